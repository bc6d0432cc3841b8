"""Spark's workloads of `waltz-core bench`: the same log, written and read through Spark.

Why it stands alone: the core's harness must not know Spark, so it finds these by the entry points
of group `waltz.workloads` and takes what they return as plain values.

Beside the log stands the ceiling, measured in the same run before and after it: a source that
yields the same batches from memory, and a sink that throws them away. `of_ceiling` is the share of
that rate which the log reaches.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.api import session, snapshot
from waltz_spark.connections import close_clients
from waltz_spark.functions import lock
from waltz_spark.options import LOG_COLUMNS, TASK_TRANSACTIONS_MAX
from waltz_spark.rows import read_schema

PARTITION = 0
BATCH_ROWS, BATCH_BYTES = 8_192, 8 * 1024 * 1024


class Load(Protocol):
    """What the harness asks for."""

    connect: str
    payload_bytes: int
    lock_count: int
    batch_rows: int
    rows: int


class Meter(Protocol):
    """Reads the daemons' CPU time between start and stop."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""


def write(load: Load, meter: Meter) -> dict[str, object]:
    """Write `--rows` rows of `--payload` bytes under append locks; then count what is there."""
    spark = session("waltz bench", master="local[2]")
    try:
        spark.dataSource.register(Ceiling)
        table = _table(spark, load).cache()
        table.count()  # the rows are made before the clock starts
        _drain(table)  # workers are up
        before = snapshot(spark, load.connect)
        ceilings = [_timed(lambda: _drain(table))]
        took = _write(table, load, meter)
        ceilings.append(_timed(lambda: _drain(table)))
        after = snapshot(spark, load.connect)
        grown = _total(after.high_water_marks) - _total(before.high_water_marks)
    finally:
        spark.stop()
        close_clients()
    return _told(load, load.rows, grown, took, ceilings)


def read(load: Load, meter: Meter) -> dict[str, object]:
    """Read `--rows` rows of one partition into Spark; one that holds fewer is filled first."""
    spark = session("waltz bench", master="local[2]")
    try:
        spark.dataSource.register(Ceiling)
        missing = load.rows - 1 - snapshot(spark, load.connect).high_water_marks[PARTITION]
        if missing > 0:
            table = _table(spark, load, missing).withColumn("partition", F.lit(PARTITION))
            _write(table, load, None)
        view = snapshot(spark, load.connect)
        reader = view.reader().option("endingHighWaterMarks", f'{{"{PARTITION}": {load.rows - 1}}}')
        log = reader.option("partitions", PARTITION).load(load.connect)
        made = spark.read.format("waltz_ceiling")
        memory = made.options(rows=load.rows, payload=load.payload_bytes).load()
        for frame in (memory, log):
            _take(frame.limit(1))  # workers are up and connected
        ceilings = [_timed(lambda: _take(memory))]
        meter.start()
        took = _timed(lambda: _take(log))
        meter.stop()
        ceilings.append(_timed(lambda: _take(memory)))
        found = log.select("transaction_id").distinct().count()
    finally:
        spark.stop()
        close_clients()
    return _told(load, load.rows, found, took, ceilings)


def _told(
    load: Load, rows: int, found: int, took: float, ceilings: Sequence[float]
) -> dict[str, object]:
    ceiling = statistics.mean(ceilings)
    return {
        "rows": rows,
        "seconds": took,
        "bytes": rows * load.payload_bytes,
        "acknowledged": rows,
        "lost": max(0, rows - found),
        "doubled": max(0, found - rows),
        "of_ceiling": round(ceiling / took, 3),
        "extra": {"ceiling_rates_per_s": [round(rows / seconds) for seconds in ceilings]},
    }


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _take(frame: DataFrame) -> None:
    """Have Spark take every column of every row and do nothing with it."""
    frame.write.format("noop").mode("overwrite").save()


def _drain(table: DataFrame) -> None:
    table.write.format("waltz_ceiling").mode("append").save()


def _table(spark: SparkSession, load: Load, rows: int | None = None) -> DataFrame:
    """Make rows with random payloads, each under locks of its own."""
    locks = [lock(f"bench{number}", "id") for number in range(load.lock_count)]
    digest = F.sha2(F.col("id").cast("string"), 512)  # 128 characters
    payload = F.substring(F.repeat(digest, load.payload_bytes // 128 + 1), 1, load.payload_bytes)
    return spark.range(0, rows or load.rows, numPartitions=4).select(
        payload.cast("binary").alias("data"),
        F.array(*locks).alias("append_locks"),
    )


def _write(table: DataFrame, load: Load, meter: Meter | None) -> float:
    if meter is not None:
        meter.start()
    began = time.perf_counter()
    table.write.format("waltz").mode("append").option("batchSize", load.batch_rows).save(
        load.connect
    )
    took = time.perf_counter() - began
    if meter is not None:
        meter.stop()
    return took


def _total(marks: Mapping[int, int]) -> int:
    return sum(mark + 1 for mark in marks.values())


# ---------------------------------------------------------------------------------------------
# The ceiling: what Spark's Python workers can take and give at all


@dataclass
class _Part(InputPartition):
    """Transactions first..last, of nobody."""

    first: int
    last: int


class Ceiling(DataSource):
    """Batches like the log's, out of memory; a sink that forgets."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "waltz_ceiling"

    def schema(self) -> str:
        """Return the log's columns."""
        return read_schema(LOG_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the source."""
        return _Memory(int(self.options["rows"]), int(self.options["payload"]), schema)

    def writer(self, schema: StructType, overwrite: bool) -> "_Nowhere":  # noqa: FBT001 - Spark's
        """Return the sink."""
        return _Nowhere()


class _Memory(DataSourceReader):
    """Cut into tasks and batches as a read of the log is."""

    def __init__(self, rows: int, payload_bytes: int, schema: StructType) -> None:
        self._rows = rows
        self._payload_bytes = payload_bytes
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return as many tasks as the log would have."""
        starts = range(0, self._rows, TASK_TRANSACTIONS_MAX)
        ends = [min(start + TASK_TRANSACTIONS_MAX, self._rows) - 1 for start in starts]
        return [_Part(*span) for span in zip(starts, ends, strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one batch over and over."""
        assert isinstance(partition, _Part)
        count = max(1, min(BATCH_ROWS, BATCH_BYTES // max(self._payload_bytes, 1)))
        batch = self._batch(count)
        left = partition.last - partition.first + 1
        while left:
            yield batch if left >= count else batch.slice(0, left)
            left -= min(left, count)

    def _batch(self, count: int) -> pa.RecordBatch:
        ints, longs = np.zeros(count, np.int32), np.arange(count)
        request = pa.StructArray.from_arrays(
            [pa.array(ints)] * 4, ["client_id", "generation", "partition", "sequence"]
        )
        payloads = pa.array([bytes(self._payload_bytes)] * count, pa.binary())
        stamps = pa.array(longs, pa.timestamp("us", tz="UTC"))
        columns = [pa.array(ints), pa.array(longs), pa.array(ints), request, stamps, payloads]
        return pa.RecordBatch.from_arrays(
            columns, schema=to_arrow_schema(self._schema, timezone="UTC")
        )


class _Nowhere(DataSourceArrowWriter):
    """Takes all rows and keeps none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take a task's rows."""
        for _ in iterator:
            pass
        return WriterCommitMessage()
