"""The workloads `spark-write` and `spark-read`: write and read the log through Spark.

They alternate with a measurement of the ceiling: a source that yields similar batches from memory,
or a sink that discards all batches. `of_ceiling` is the rate of the log divided by the rate of the
ceiling. Both rates are medians of several rounds after a warm-up.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from pyspark.sql.types import StructType

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_spark.api import session, snapshot
from waltz_spark.functions import lock
from waltz_spark.option_table import TASK_TRANSACTIONS_MAX
from waltz_spark.options import LOG_COLUMNS
from waltz_spark.rows import log_columns_ddl
from waltz_spark.shared_clients import close_clients
from waltz_spark.spark_version import arrow_schema

PARTITION = 0
ROUNDS = 3
TABLE_TASKS_MIN, TABLE_TASK_ROWS = 4, 125_000  # the rows of one task always fit in memory
BATCH_ROWS, BATCH_BYTES, BATCH_COUNT = 8_192, 8 * 1024 * 1024, 16


def write(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Write `--rows` rows of `--payload` bytes with append locks; then count them in the log."""
    spark = session("waltz bench", master="local[2]")
    try:
        spark.dataSource.register(MemorySource)
        table = _create_table(spark, load).cache()
        _write(table, load)  # a warm-up: it computes the rows and starts the worker processes
        _discard(table)
        before = snapshot(spark, load.connect)
        rounds = _run_alternately(lambda: _write(table, load), lambda: _discard(table), meter)
        after = snapshot(spark, load.connect)
        log_growth = _transaction_count(after.high_water_marks) - _transaction_count(
            before.high_water_marks
        )
    finally:
        spark.stop()
        close_clients()
    return _result_of_rounds(load, rounds, log_growth - (ROUNDS - 1) * load.rows)


def read(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Read `--rows` rows of one partition into Spark; append rows first if there are fewer."""
    spark = session("waltz bench", master="local[2]")
    try:
        spark.dataSource.register(MemorySource)
        missing = load.rows - 1 - snapshot(spark, load.connect).high_water_marks[PARTITION]
        if missing > 0:
            table = _create_table(spark, load, missing).withColumn("partition", F.lit(PARTITION))
            _write(table, load)
        view = snapshot(spark, load.connect)
        reader = view.reader().option("endingHighWaterMarks", f'{{"{PARTITION}": {load.rows - 1}}}')
        log = reader.option("partitions", PARTITION).load(load.connect)
        frame_reader = spark.read.format("waltz_memory_source")
        memory = frame_reader.options(rows=load.rows, payload=load.payload_bytes).load()
        for frame in (memory, log):
            _read_all(frame)  # a warm-up: workers connect, and the JVM compiles the code
        rounds = _run_alternately(lambda: _read_all(log), lambda: _read_all(memory), meter)
        row_count = log.select("transaction_id").distinct().count()
    finally:
        spark.stop()
        close_clients()
    return _result_of_rounds(load, rounds, row_count)


def _run_alternately(
    through_log: Callable[[], None], through_memory: Callable[[], None], meter: Meter
) -> list[tuple[float, float]]:
    """Run the two functions alternately, `ROUNDS` times; return the seconds of each round.

    They alternate because the speed of a machine changes over time.
    """

    def run_metered() -> None:
        meter.start()
        through_log()
        meter.stop()

    return [(_time_call(run_metered), _time_call(through_memory)) for _ in range(ROUNDS)]


def _result_of_rounds(
    load: BenchLoad, rounds: Sequence[tuple[float, float]], row_count: int
) -> WorkloadResult:
    """Return the result of all rounds; the log contains `row_count` rows of one round."""
    seconds_by_round, ceilings = zip(*rounds, strict=True)
    return WorkloadResult(
        rows=ROUNDS * load.rows,
        seconds=sum(seconds_by_round),
        bytes=ROUNDS * load.rows * load.payload_bytes,
        acknowledged=ROUNDS * load.rows,
        lost=max(0, load.rows - row_count),
        duplicated=max(0, row_count - load.rows),
        of_ceiling=round(statistics.median(ceilings) / statistics.median(seconds_by_round), 3),
        extra={
            "rates_per_s": [round(load.rows / seconds) for seconds in seconds_by_round],
            "ceiling_rates_per_s": [round(load.rows / seconds) for seconds in ceilings],
        },
    )


def _time_call(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _read_all(df: DataFrame) -> None:
    """Let Spark read every column of every row, and discard the rows."""
    df.write.format("noop").mode("overwrite").save()


def _discard(table: DataFrame) -> None:
    table.write.format("waltz_memory_source").mode("append").save()


def _create_table(spark: SparkSession, load: BenchLoad, rows: int | None = None) -> DataFrame:
    """Return rows with pseudo-random payloads, each with its own locks."""
    locks = [lock(f"bench{number}", "id") for number in range(load.lock_count)]
    digest = F.sha2(F.col("id").cast("string"), 512)  # 128 characters
    payload = F.substring(F.repeat(digest, load.payload_bytes // 128 + 1), 1, load.payload_bytes)
    count = rows or load.rows
    tasks = max(TABLE_TASKS_MIN, -(-count // TABLE_TASK_ROWS))
    return spark.range(0, count, numPartitions=tasks).select(
        payload.cast("binary").alias("data"),
        F.array(*locks).alias("append_locks"),
    )


def _write(table: DataFrame, load: BenchLoad) -> None:
    writer = table.write.format("waltz").mode("append")
    if load.batch is not None:
        writer = writer.option("batchSize", load.batch)
    writer.save(load.connect)


def _transaction_count(marks: Mapping[int, int]) -> int:
    return sum(mark + 1 for mark in marks.values())


# ---------------------------------------------------------------------------------------------
# The ceiling: the maximum rate of Spark's Python workers without the log


@dataclass
class _IdRangePartition(InputPartition):
    """A Spark partition that contains the transactions first..last."""

    first: int
    last: int


class MemorySource(DataSource):
    """A source that yields similar batches from memory, and a sink that discards rows."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the Spark format."""
        return "waltz_memory_source"

    def schema(self) -> str:
        """Return the schema of the log's columns."""
        return log_columns_ddl(LOG_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the source that reads batches from memory."""
        return _MemoryReader(int(self.options["rows"]), int(self.options["payload"]), schema)

    def writer(self, schema: StructType, overwrite: bool) -> "_DiscardWriter":  # noqa: FBT001 - Spark's
        """Return the sink that discards rows."""
        return _DiscardWriter()


class _MemoryReader(DataSourceReader):
    """Yields tasks and batches of the same sizes as a read of the log."""

    def __init__(self, rows: int, payload_bytes: int, schema: StructType) -> None:
        self._rows = rows
        self._payload_bytes = payload_bytes
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return as many tasks as a read of the log has."""
        starts = range(0, self._rows, TASK_TRANSACTIONS_MAX)
        ends = [min(start + TASK_TRANSACTIONS_MAX, self._rows) - 1 for start in starts]
        return [_IdRangePartition(*span) for span in zip(starts, ends, strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the same few batches repeatedly, until the partition has enough rows."""
        assert isinstance(partition, _IdRangePartition)
        count = max(1, min(BATCH_ROWS, BATCH_BYTES // max(self._payload_bytes, 1)))
        generated = _create_batches(self._schema, count, self._payload_bytes)
        remaining = partition.last - partition.first + 1
        for batch in itertools.cycle(generated):
            yield batch if remaining > count else batch.slice(0, remaining)
            remaining -= count
            if remaining <= 0:
                return


@functools.cache
def _create_batches(schema: StructType, count: int, payload_bytes: int) -> list[pa.RecordBatch]:
    """Create batches of random payloads, once in each process.

    Together, the batches are larger than a CPU cache.
    """
    int32_zeros, int64_values = np.zeros(count, np.int32), np.arange(count)
    request = pa.StructArray.from_arrays(
        [pa.array(int32_zeros)] * 4, ["client_id", "generation", "partition", "sequence"]
    )
    stamps = pa.array(int64_values, pa.timestamp("us", tz="UTC"))
    other_columns = [
        pa.array(int32_zeros),
        pa.array(int64_values),
        pa.array(int32_zeros),
        request,
        stamps,
    ]
    arrow = arrow_schema(schema)
    rng = np.random.default_rng(0)
    rows = [[rng.bytes(payload_bytes) for _ in range(count)] for _ in range(BATCH_COUNT)]
    return [
        pa.RecordBatch.from_arrays([*other_columns, pa.array(row, pa.binary())], schema=arrow)
        for row in rows
    ]


class _DiscardWriter(DataSourceArrowWriter):
    """Discards all rows without storing them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Read and discard the rows of one task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()
