"""Spark's workloads of `waltz-core bench`: the same log, written and read through Spark.

Why it stands alone: the core's harness must not know Spark, so it finds these by the entry points
of group `waltz.workloads` and takes what they return as plain values.
"""

import time
from collections.abc import Mapping
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from waltz_spark.api import session, snapshot
from waltz_spark.connections import close_clients
from waltz_spark.functions import lock


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
        table = _table(spark, load).cache()
        table.count()  # the rows are made before the clock starts
        before = snapshot(spark, load.connect)
        took = _write(table, load, meter)
        after = snapshot(spark, load.connect)
        grown = _total(after.high_water_marks) - _total(before.high_water_marks)
    finally:
        spark.stop()
        close_clients()
    return {
        "rows": load.rows,
        "seconds": took,
        "bytes": load.rows * load.payload_bytes,
        "acknowledged": load.rows,
        "lost": max(0, load.rows - grown),
        "doubled": max(0, grown - load.rows),
    }


def read(load: Load, meter: Meter) -> dict[str, object]:
    """Read the whole log into Spark; a log of fewer than `--rows` rows is filled first."""
    spark = session("waltz bench", master="local[2]")
    try:
        if _total(snapshot(spark, load.connect).high_water_marks) < load.rows:
            _write(_table(spark, load), load, None)
        view = snapshot(spark, load.connect)
        rows = _total(view.high_water_marks)
        view.read(columns="transaction_id").limit(1).collect()  # workers are up and connected
        meter.start()
        began = time.perf_counter()
        # `noop` takes every column of every row and does nothing with it.
        view.read().write.format("noop").mode("overwrite").save()
        took = time.perf_counter() - began
        meter.stop()
        found = view.read(columns="transaction_id").count()
    finally:
        spark.stop()
        close_clients()
    return {
        "rows": rows,
        "seconds": took,
        "bytes": rows * load.payload_bytes,
        "acknowledged": rows,
        "lost": max(0, rows - found),
        "doubled": max(0, found - rows),
    }


def _table(spark: SparkSession, load: Load) -> DataFrame:
    """Make rows with random payloads, each under locks of its own."""
    locks = [lock(f"bench{number}", "id") for number in range(load.lock_count)]
    digest = F.sha2(F.col("id").cast("string"), 512)  # 128 characters
    payload = F.substring(F.repeat(digest, load.payload_bytes // 128 + 1), 1, load.payload_bytes)
    return spark.range(0, load.rows, numPartitions=4).select(
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
