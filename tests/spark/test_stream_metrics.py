"""The metrics of streaming queries: lag from events of Spark, and row counts from the driver."""

import json
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_spark.functions import lock
from waltz_spark.monitoring import query_metrics

pytestmark = pytest.mark.spark


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"waltz_spark_{name}", labels)


def append(connect: str, partition: int, count: int) -> None:
    with WaltzClient(connect) as client:
        for _ in range(count):
            client.append(b"data", partition=partition).result(TEST_TIMEOUT_S)


@pytest.fixture(autouse=True)
def long_metrics_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scrapes wait for the log, even on a busy machine."""
    monkeypatch.setattr(query_metrics, "REQUEST_S_MAX", TEST_TIMEOUT_S)


def ignore_batch(_batch: DataFrame, _number: int) -> None:
    pass


def test_the_lag_of_a_query_grows_between_its_micro_batches(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    separate_session = spark.newSession()
    waltz_spark.export_metrics(separate_session, connect)
    with WaltzClient(connect) as client:
        labels = {"cluster": client.cluster().name, "query": "reader", "source": "0"}
        start_marks = {
            str(partition): mark for partition, mark in client.high_water_marks().items()
        }
    append(connect, 1, 3)
    rows = separate_session.readStream.format("waltz").option(
        "startingHighWaterMarks", json.dumps(start_marks)
    )
    writer = rows.load(connect).writeStream.queryName("reader").foreachBatch(ignore_batch)
    writer = writer.option("checkpointLocation", str(tmp_path)).trigger(processingTime="1 hour")
    query = writer.start()
    try:
        wait_until(
            "the first micro-batch is read",
            lambda: value("lag_transactions", partition="1", **labels) == 0,
        )
        append(connect, 1, 2)
        assert value("lag_transactions", partition="1", **labels) == 2
        age_s = value("lag_seconds", partition="1", **labels)
        assert age_s is not None
        assert 0 <= age_s < TEST_TIMEOUT_S
        assert value("lag_seconds", partition="0", **labels) == 0
    finally:
        query.stop()
    wait_until(
        "a stopped query has no lag",
        lambda: value("lag_transactions", partition="1", **labels) is None,
    )


def test_committed_and_rejected_rows_of_a_stream_are_counted(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    separate_session = spark.newSession()
    waltz_spark.export_metrics(separate_session, connect)
    rows = separate_session.range(3).coalesce(1).select(F.lit("row").alias("data"))
    rows.write.parquet(str(tmp_path / "in"))
    files = separate_session.readStream.schema("data string").parquet(str(tmp_path / "in"))
    locked = files.select(
        "data",
        F.array(lock("rows of a metric", F.col("data"))).alias("write_locks"),
    )
    writer = locked.writeStream.queryName("writer").format("waltz")
    writer = writer.option("onLockFailure", "reject")
    query = writer.option("checkpointLocation", str(tmp_path / "out")).start(connect)
    try:
        query.processAllAvailable()
        # The first row is committed; the others have the same lock.
        wait_until(
            "the micro-batch is counted",
            lambda: value("committed_rows_total", query="writer") == 1,
        )
        assert value("rejected_rows_total", query="writer") == 2
        assert value("retried_rows_total", query="writer") == 0
    finally:
        query.stop()
