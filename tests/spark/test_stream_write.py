"""Micro-batches written to a real cluster enter the log once, also when Spark repeats them."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

import waltz_spark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.datasource.source import WaltzDataSource

pytestmark = pytest.mark.spark

ROWS = 60  # the rows of a file, and of a micro-batch


class StreamedTable:
    """A stream from files to the log, its checkpoint, and the rows of the stream in the log."""

    def __init__(self, spark: SparkSession, connect: str, path: Path) -> None:
        self.spark, self.connect, self.path = spark, connect, path
        with WaltzClient(connect) as client:
            marks = client.high_water_marks(linearizable=True)
        self.marks = json.dumps({str(partition): int(mark) for partition, mark in marks.items()})

    def add_batch(self, number: int) -> None:
        """Add a file, the input of one micro-batch."""
        table = self.spark.range(number * ROWS, (number + 1) * ROWS, numPartitions=1)
        table.write.mode("append").parquet(str(self.path / "in"))

    def add_to_first(self, number: int) -> None:
        """Add a file to the first micro-batch of a stream that begins again."""
        self.add_batch(number)
        all_rows = self.spark.read.parquet(str(self.path / "in")).coalesce(1)
        all_rows.write.parquet(str(self.path / "whole"))
        shutil.rmtree(self.path / "in")
        (self.path / "whole").rename(self.path / "in")

    def table(self) -> DataFrame:
        """Return the rows of the stream."""
        files = self.spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
        return (
            files.parquet(str(self.path / "in"))
            .repartition(3)
            .selectExpr("CAST(id AS string) AS data", "CAST(id % 4 AS int) AS partition")
        )

    def start(self, name: str = "waltz", **options: str) -> StreamingQuery:
        """Start a query that writes all available rows and ends."""
        writer = self.table().writeStream.format(name).options(**options)
        writer = writer.option("checkpointLocation", str(self.path / "checkpoint"))
        return writer.option("path", self.connect).trigger(availableNow=True).start()

    def run(self, name: str = "waltz", **options: str) -> None:
        """Start a query, and wait for its end."""
        assert self.start(name, **options).awaitTermination(TEST_TIMEOUT_S)

    def in_log(self) -> Counter[int]:
        """Return the rows that the log has received since the start, with their counts."""
        reader = self.spark.read.format("waltz").option("startingHighWaterMarks", self.marks)
        return Counter(int(bytes(row.data)) for row in reader.load(self.connect).collect())

    def forget_commit(self, number: int) -> None:
        """Change the checkpoint, as if the driver had died before Spark recorded a micro-batch."""
        commits = self.path / "checkpoint" / "commits"
        for name in (f"{number}", f".{number}.crc"):
            (commits / name).unlink(missing_ok=True)


@pytest.fixture
def target(spark: SparkSession, connect: str, tmp_path: Path) -> StreamedTable:
    return StreamedTable(spark, connect, tmp_path)


def counted_once(batches: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(batches * ROWS), 1))


@pytest.mark.core
def test_a_batch_that_spark_has_not_recorded_is_not_written_again(target: StreamedTable) -> None:
    """The driver dies after the commit of Waltz, and before that of Spark."""
    target.add_batch(0)
    target.add_batch(1)
    target.run()
    assert target.in_log() == counted_once(2)
    target.forget_commit(1)
    target.add_batch(2)
    target.run()
    assert target.in_log() == counted_once(3)


def test_a_batch_that_is_sent_again_with_other_rows_fails(target: StreamedTable) -> None:
    """A user has truncated the checkpoint: Spark plans the batch again, with more input."""
    target.add_batch(0)
    target.run()
    target.forget_commit(0)
    for name in ("0", ".0.crc"):
        (target.path / "checkpoint" / "offsets" / name).unlink(missing_ok=True)
        (target.path / "checkpoint" / "sources" / "0" / name).unlink(missing_ok=True)
    target.add_to_first(1)
    with pytest.raises(StreamingQueryException, match=r"completed with 60 rows, but .* 120 rows"):
        target.run()
    assert target.in_log() == counted_once(1)


def test_a_micro_batch_that_was_written_but_not_committed_is_not_written_again(
    target: StreamedTable,
) -> None:
    """The driver dies between the tasks and the commit; the next driver finds the rows."""

    class DyingSource(WaltzDataSource):
        @classmethod
        def name(cls) -> str:
            return "waltz_dies"

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
            writer = super().streamWriter(schema, overwrite)

            def commit(messages: object, batchId: int) -> None:  # noqa: N803
                raise RuntimeError("the driver is gone")

            writer.commit = commit
            return writer

    target.spark.dataSource.register(DyingSource)
    target.add_batch(0)
    with pytest.raises(StreamingQueryException, match="the driver is gone"):
        target.run("waltz_dies")
    assert target.in_log() == counted_once(1)
    target.add_batch(1)
    target.run()
    assert target.in_log() == counted_once(2)


def test_each_micro_batch_has_its_own_results(target: StreamedTable, tmp_path: Path) -> None:
    target.add_batch(0)
    target.add_batch(1)
    results = tmp_path / "results"
    target.run(resultsPath=str(results))
    target.forget_commit(1)
    target.run(resultsPath=str(results))
    for number in (0, 1):
        directory = results / f"batch={number}"
        assert (directory / "_SUCCESS").exists()
        result_rows = target.spark.read.parquet(str(directory)).collect()
        assert {row.status for row in result_rows} == {"COMMITTED"}
        assert (
            len(result_rows)
            == len({(row.partition, row.transaction_id) for row in result_rows})
            == ROWS
        )


def test_a_foreach_batch_with_a_name_and_a_number_is_written_once(target: StreamedTable) -> None:
    def write(table: DataFrame, number: int) -> None:
        options = {"writeId": "foreach-test", "batchId": str(number)}
        table.write.format("waltz").mode("append").options(**options).save(target.connect)
        if number == 1 and not (target.path / "failed").exists():
            (target.path / "failed").touch()
            raise RuntimeError("after the write")

    def run() -> None:
        query = target.table().writeStream.foreachBatch(write)
        query = query.option("checkpointLocation", str(target.path / "checkpoint"))
        assert query.trigger(availableNow=True).start().awaitTermination(TEST_TIMEOUT_S)

    target.add_batch(0)
    target.add_batch(1)
    with pytest.raises(StreamingQueryException, match="after the write"):
        run()
    run()
    assert target.in_log() == counted_once(2)


@pytest.mark.core
def test_a_failed_named_job_is_run_again(target: StreamedTable) -> None:
    """A batch write with a name: rows that the log already contains are not written again."""
    table = target.spark.range(0, 4_000, numPartitions=4).selectExpr(
        "CAST(IF(id = 3900 AND {fail}, raise_error('no'), id) AS string) AS data".format(
            fail="true"
        ),
        "CAST(id % 4 AS int) AS partition",
    )
    right = target.spark.range(0, 4_000, numPartitions=4).selectExpr(
        "CAST(id AS string) AS data", "CAST(id % 4 AS int) AS partition"
    )
    options = {"writeId": "nightly-2026-11-21", "batchSize": "50"}
    with pytest.raises(Exception, match="no"):
        table.write.format("waltz").mode("append").options(**options).save(target.connect)
    row_count = sum(target.in_log().values())
    assert row_count > 0
    for _ in range(2):  # the second run finds that the write is done
        right.write.format("waltz").mode("append").options(**options).save(target.connect)
        assert target.in_log() == Counter(dict.fromkeys(range(4_000), 1))
    again = waltz_spark.append(right.repartition(3), target.connect, **options)
    assert (again.already_committed, again.counts["committed"]) == (True, 4_000)
    with pytest.raises(BadConfig, match=r"there are no results in .* without option resultsPath"):
        assert again.committed
    with pytest.raises(BadRequest, match="with 4000 rows, but this run has 3999 rows"):
        right.where("data != '7'").write.format("waltz").mode("append").options(**options).save(
            target.connect
        )
    assert target.in_log() == Counter(dict.fromkeys(range(4_000), 1))


def test_a_named_append_reports_its_first_run_and_rejects_other_rows(
    spark: SparkSession, connect: str
) -> None:
    days = {
        day: spark.createDataFrame(rows, "data string")
        for day, rows in (
            ("monday", [("Anna",)]),
            ("tuesday", [("Boris",)]),
            ("both", [("Anna",), ("Boris",)]),
        )
    }
    first, again = (waltz_spark.append(days["monday"], connect, writeId="daily") for _ in range(2))
    assert (first.already_committed, again.already_committed) == (False, True)
    assert again.counts == first.counts
    assert again.results.collect() == first.results.collect()
    for day, sentence in (
        (
            "both",
            "the write ID was used with different rows: .* with 1 row, but this run has 2 rows",
        ),
        ("tuesday", "the counts are equal, the hashes differ"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            waltz_spark.append(days[day], connect, writeId="daily")
    empty = days["monday"].limit(0)
    results = [waltz_spark.append(empty, connect, writeId="empty") for _ in range(2)]
    assert [result.already_committed for result in results] == [False, True]
    assert [result.results.count() for result in results] == [0, 0]
