"""Streams from a real cluster: every transaction once, in order, also after a restart."""

import json
import time
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import waltz_spark
from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, DataLoss
from waltz_spark import LagListener, lag_of
from waltz_spark.option_table import Purpose
from waltz_spark.options import parse_read
from waltz_spark.spark_version import HAS_ADMISSION_CONTROL

pytestmark = pytest.mark.spark

with_admission_control = pytest.mark.skipif(
    not HAS_ADMISSION_CONTROL, reason="PySpark before 4.2 has no admission control and no lag"
)

PARTITIONS = 4


def append(connect: str, count: int, *, partition: int | None = None, tag: str = "t") -> None:
    with WaltzClient(connect) as client:
        futures = [
            client.append(
                f"{tag}{n}".encode(), partition=n % PARTITIONS if partition is None else partition
            )
            for n in range(count)
        ]
        for future in futures:
            future.result(TEST_TIMEOUT_S)


def marks_of(connect: str) -> dict[int, int]:
    with WaltzClient(connect) as client:
        return {int(partition): int(mark) for partition, mark in client.high_water_marks().items()}


def as_json(marks: dict[int, int]) -> str:
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


def stream(spark: SparkSession, connect: str, **options: object) -> DataFrame:
    return spark.readStream.format("waltz").options(**options).load(connect)


def into_files(table: DataFrame, directory: Path) -> StreamingQuery:
    """Read all current transactions into Parquet files, and end."""
    return (
        table.writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .option("path", str(directory / "files"))
        .trigger(availableNow=True)
        .start()
    )


def await_end(query: StreamingQuery) -> StreamingQuery:
    assert query.awaitTermination(TEST_TIMEOUT_S)
    return query


@pytest.fixture
def start_marks(connect: str) -> dict[int, int]:
    """The marks before the test."""
    return marks_of(connect)


def test_a_stream_returns_the_same_rows_as_a_batch_read(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    append(connect, 300)
    starting = {"startingHighWaterMarks": as_json(start_marks)}
    await_end(into_files(stream(spark, connect, **starting), tmp_path))
    batch = spark.read.format("waltz").options(**starting).load(connect)
    assert batch.count() == 300
    assert_df_equality(spark.read.parquet(str(tmp_path / "files")), batch, ignore_row_order=True)


@pytest.mark.core
def test_a_stream_continues_from_its_checkpoint(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    starting = {"startingHighWaterMarks": as_json(start_marks)}
    for times in range(1, 3):
        append(connect, 40, tag=f"{times}-")
        await_end(into_files(stream(spark, connect, **starting), tmp_path))
        files = spark.read.parquet(str(tmp_path / "files"))
        assert files.count() == files.distinct().count() == 40 * times
    # Without new transactions, there is no further batch.
    await_end(into_files(stream(spark, connect, **starting), tmp_path))
    assert spark.read.parquet(str(tmp_path / "files")).count() == 80


@pytest.mark.slow
def test_a_stream_starts_with_new_transactions_unless_an_option_sets_the_start(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    append(connect, 8)
    await_end(into_files(stream(spark, connect), tmp_path))
    append(connect, 12, tag="new")
    await_end(into_files(stream(spark, connect), tmp_path))
    rows = spark.read.parquet(str(tmp_path / "files")).selectExpr("CAST(data AS string)").collect()
    assert sorted(row.data for row in rows) == sorted(f"new{n}" for n in range(12))


@with_admission_control
def test_a_micro_batch_respects_its_limit(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    append(connect, 40, partition=0)
    append(connect, 10, partition=1)
    table = stream(
        spark, connect, startingHighWaterMarks=as_json(start_marks), maxTransactionsPerTrigger=20
    )
    query = await_end(into_files(table, tmp_path))
    counts = [
        progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]
    ]
    assert counts == [20, 20, 10]
    ends = [json.loads(progress["sources"][0]["endOffset"]) for progress in query.recentProgress]
    assert ends[0]["0"] - start_marks[0] == 16  # the limit is divided in proportion to the lags
    assert ends[0]["1"] - start_marks[1] == 4


def test_micro_batches_follow_a_writer_in_order(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    def collect(batch: DataFrame, _number: int) -> None:
        rows = batch.select("partition", "transaction_id").collect()
        seen.extend(sorted((row.partition, row.transaction_id) for row in rows))

    query = (
        stream(spark, connect, startingHighWaterMarks=as_json(start_marks), pollInterval=0)
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        for times in range(3):
            append(connect, 30, tag=f"{times}")
            query.processAllAvailable()
            assert len(seen) == 30 * (times + 1)
    finally:
        query.stop()
    for partition in range(PARTITIONS):
        ids = [transaction_id for each, transaction_id in seen if each == partition]
        assert ids == list(range(start_marks[partition] + 1, start_marks[partition] + 1 + len(ids)))


@with_admission_control
def test_the_lag_is_the_marks_minus_the_position_of_the_stream(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    reported: list[list[dict[int, int]]] = []
    listener = LagListener(lambda _query, lags: reported.append(lags))
    spark.streams.addListener(listener)
    try:
        append(connect, 50, partition=2)
        table = stream(
            spark,
            connect,
            startingHighWaterMarks=as_json(start_marks),
            maxTransactionsPerTrigger=20,
            pollInterval=0,
        )
        query = await_end(into_files(table, tmp_path))
        assert [lag_of(progress)[0][2] for progress in query.recentProgress][:3] == [30, 10, 0]
        wait_until("three micro-batches are reported", lambda: len(reported) >= 3)
        assert [log[2] for (log,) in reported[:3]] == [30, 10, 0]
        wait_until("the end of the query is reported", lambda: str(query.id) not in listener.lags)
    finally:
        spark.streams.removeListener(listener)


def test_a_start_by_time_reads_from_the_first_later_transaction(
    spark: SparkSession, connect: str
) -> None:
    append(connect, 5, partition=3, tag="old")
    rows = spark.read.format("waltz").option("partitions", 3).load(connect)
    last = rows.orderBy("transaction_id", ascending=False).first()
    assert last is not None
    after = int(last.commit_time.timestamp() * 1000) + 1
    wait_until("the clock has advanced", lambda: time.time_ns() // 1_000_000 > after)
    append(connect, 3, partition=3, tag="new")
    for start in (str(after), last.commit_time.isoformat(timespec="milliseconds")):
        found = (
            spark.read.format("waltz")
            .options(partitions=3, startingTimestamp=start)
            .load(connect)
            .selectExpr("CAST(data AS string) AS data")
            .collect()
        )
        new = [row.data for row in found if row.data.startswith("new")]
        assert new == ["new0", "new1", "new2"]
    assert [row.data for row in found][-4:-3] == ["old4"]  # with the same commit time


WRONG = [
    (
        {"endingHighWaterMarks": "latest"},
        "is for reading a batch, but it was used for reading a stream",
    ),
    ({"pollInterval": "soon"}, "integer from 0 to 3600000, found 'soon'"),
    ({"maxTransactionsPerTrigger": "0"}, "integer from 1"),
    ({"startingTimestamp": "yesterday"}, "expected a time such"),
    (
        {"startingTimestamp": "2026-01-01", "startingHighWaterMarks": "latest"},
        "both set the start",
    ),
]


def test_a_wrong_option_is_reported_before_anything_runs(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    for options, sentence in WRONG:
        with pytest.raises(BadConfig, match=sentence):
            parse_read({"connect": connect, **options}, Purpose.STREAM)
    options, sentence = WRONG[0]
    with pytest.raises(Exception, match=sentence) as failed:
        await_end(into_files(stream(spark, connect, **options), tmp_path))
    assert isinstance(waltz_spark.error_of(failed.value), BadConfig)


def test_a_checkpoint_past_the_end_of_the_log_is_data_loss(
    spark: SparkSession, connect: str, start_marks: dict[int, int], tmp_path: Path
) -> None:
    await_end(into_files(stream(spark, connect, startingHighWaterMarks="latest"), tmp_path))
    offsets = tmp_path / "checkpoint" / "offsets" / "0"
    text = offsets.read_text()
    lines = text.splitlines()
    ahead = {str(partition): mark + 1000 for partition, mark in start_marks.items()}
    offsets.write_text("\n".join([*lines[:-1], json.dumps(ahead)]))
    for crc in offsets.parent.glob(".*.crc"):
        crc.unlink()
    append(connect, 4)
    with pytest.raises(StreamingQueryException, match="but its log ends at") as failed:
        await_end(into_files(stream(spark, connect), tmp_path))
    assert isinstance(waltz_spark.error_of(failed.value), DataLoss)
