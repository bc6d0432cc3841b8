"""A Delta table of Spark has one follower, and accepts one commit on top of the same marks."""

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import waltz_spark
from tests import table_libraries
from tests.spark.tables_job import follow_table
from tests.spark.test_tables import transactions, upsert
from tests.written_log import (
    DELETE_HEADER,
    WrittenLog,
    check_versions,
    end_marks,
    marks_by_version,
    read_table,
)
from waltz_core.errors import BadConfig, BadFormat, Superseded
from waltz_core.tables.follower import OtherCommit
from waltz_core.tables.table_marks import TableMarks, decode_marks
from waltz_spark.tables.log_changes import changes_schema
from waltz_spark.tables.merged_table import MergedDeltaTable

pytestmark = [
    pytest.mark.spark,
    pytest.mark.core,
    pytest.mark.skipif(
        not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason()
    ),
]


def open_table(spark: SparkSession, table: Path) -> MergedDeltaTable:
    """Return a table of one column `id`, in a separate session."""
    schema = StructType([StructField("id", LongType())])
    return MergedDeltaTable(spark.newSession(), str(table), schema, ["id"])


def change(spark: SparkSession, key: int) -> DataFrame:
    schema = changes_schema(StructType([StructField("id", LongType())]))
    return spark.createDataFrame([(key, 0, key, False)], schema)


NAME = TableMarks("follow", "0" * 32, {0: -1, 1: -1})


def marks_up_to(*marks: int) -> TableMarks:
    return NAME._replace(marks=dict(enumerate(marks)))


def test_a_table_accepts_one_of_two_commits_prepared_on_the_same_marks(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The later commit is rejected even if it has more transactions, in other partitions."""
    first, second = (open_table(spark, tmp_path / "table") for _ in range(2))
    assert first.marks(NAME) is None
    first.create(NAME)
    second.create(NAME._replace(follower="other"))
    first.finish()
    with pytest.raises(Superseded):
        second.finish()
    assert (
        decode_marks(first.marks(NAME).metadata)
        == decode_marks(second.marks(NAME).metadata)
        == NAME
    )
    assert second.apply(change(spark, 1), marks_up_to(1, -1))
    for marks in (marks_up_to(1, -1), marks_up_to(-1, 0), marks_up_to(0, 50)):
        with pytest.raises(Superseded, match="another commit of follower 'follow' came first"):
            first.apply(change(spark, 0), marks)
    second.marks(NAME)
    assert second.apply(None, marks_up_to(1, 0))
    second.marks(NAME)
    assert second.apply(None, marks_up_to(2, 0))
    with pytest.raises(Superseded):
        first.apply(change(spark, 0), marks_up_to(0, 60))
    assert decode_marks(first.marks(NAME).metadata) == marks_up_to(2, 0)
    assert first.apply(change(spark, 3), marks_up_to(3, 0))
    rows = spark.read.format("delta").load(f"{tmp_path}/table").collect()
    assert {row["id"] for row in rows} == {1, 3}


def test_a_table_without_marks_accepts_only_one_first_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The user has created the table. Two followers have different starts."""
    table = tmp_path / "table"
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id BIGINT, _partition INT, _transaction_id BIGINT) "
        "USING delta"
    )
    first, second = (open_table(spark, table) for _ in range(2))
    for each in (first, second):
        assert each.marks(NAME).metadata is None
    assert second.apply(change(spark, 1), marks_up_to(1, -1))
    with pytest.raises(Superseded):
        first.apply(change(spark, 0), marks_up_to(8, 50))
    first.marks(NAME)
    assert first.apply(change(spark, 2), marks_up_to(2, -1))


@pytest.mark.slow
@pytest.mark.parametrize("other", ["restore", "follower"])
def test_another_commit_between_a_read_and_a_merge_is_found(
    spark: SparkSession, tmp_path: Path, other: str
) -> None:
    """The next process finds it, too, even before commits that change no row."""
    first, second = (open_table(spark, tmp_path / "table") for _ in range(2))
    first.create(NAME)
    first.finish()
    first.marks(NAME)
    first.apply(change(spark, 1), marks_up_to(1, -1))
    first.marks(NAME)
    table_name = f"delta.`{tmp_path}/table`"
    if other == "restore":
        spark.sql(f"RESTORE {table_name} TO VERSION AS OF 0")
    else:
        name = NAME._replace(follower="other")
        second.marks(name)
        second.apply(change(spark, 7), name)
    for number in range(5):
        spark.sql(f"ALTER TABLE {table_name} SET TBLPROPERTIES ('a' = '{number}')")
    assert first.apply(change(spark, 2), marks_up_to(2, -1))
    for each in (first, open_table(spark, tmp_path / "table")):
        state = each.marks(NAME)
        expected = (
            OtherCommit(2, "RESTORE") if other == "restore" else OtherCommit(2, "MERGE", "other")
        )
        assert state.other_commits == [expected]
    # A follower that starts later has made no such commit.
    third = NAME._replace(follower="third")
    second.marks(third)
    second.apply(None, third)
    assert second.marks(third).other_commits == []


@pytest.mark.slow
def test_delta_compacts_no_files_after_a_commit(spark: SparkSession, tmp_path: Path) -> None:
    """A compaction would commit with the metadata of the follower."""
    target, table_name = open_table(spark, tmp_path / "table"), f"delta.`{tmp_path}/table`"
    target._session.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
    spark.sql(
        f"CREATE TABLE {table_name} (id BIGINT, _partition INT, _transaction_id BIGINT) "
        "USING delta TBLPROPERTIES ('delta.autoOptimize.autoCompact' = 'true')"
    )
    for mark in range(4):
        target.marks(NAME)
        assert target.apply(change(spark, mark), marks_up_to(mark, -1))
    operations = {row["operation"] for row in spark.sql(f"DESCRIBE HISTORY {table_name}").collect()}
    assert operations == {"CREATE TABLE", "MERGE"}


@pytest.mark.versions
def test_each_version_of_a_table_with_two_followers_equals_a_replay_up_to_its_marks(
    spark: SparkSession,
    written: WrittenLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This holds although the second follower commits before each MERGE of the first."""
    table = str(tmp_path / "table")
    apply = MergedDeltaTable.apply
    ends_of_second = iter([{0: 3, 1: 40}, {0: 45, 1: 41}, {0: 46, 1: 70}])
    depth = []

    def applied_second(self: MergedDeltaTable, *args: object) -> bool:
        until = None if depth else next(ends_of_second, None)
        if until is not None:
            depth.append(until)
            follow_table(spark, written.connect, table, until=until, batch_transactions=30)
            depth.clear()
        return apply(self, *args)

    monkeypatch.setattr(MergedDeltaTable, "apply", applied_second)
    with caplog.at_level("INFO", logger="waltz_core.tables.follower"):
        assert follow_table(spark, written.connect, table) == end_marks(written)
    assert caplog.text.count("follow.commit_conflict") == 3
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))


@pytest.mark.slow
def test_a_table_accepts_only_the_follower_that_started_last(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    half = {partition: end // 2 for partition, end in end_marks(written).items()}
    follow_table(spark, written.connect, str(table), until=half)
    df = transactions(spark.read, written.connect)

    def upsert_as_other() -> None:
        waltz_spark.upsert(
            df,
            written.connect,
            table=str(table),
            key="id",
            delete_headers=[DELETE_HEADER],
            delete_where="op = 'D'",
            follower="other",
        )

    for call in (
        lambda: follow_table(spark, written.connect, str(table), follower="other"),
        upsert_as_other,
    ):
        with pytest.raises(BadConfig, match="no marks of follower 'other'"):
            call()
    follow_table(spark, written.connect, str(table), follower="other", start=half)
    versions = marks_by_version(table)
    for call in (
        lambda: follow_table(spark, written.connect, str(table)),
        lambda: upsert(transactions(spark.read, written.connect), written.connect, str(table)),
    ):
        with pytest.raises(BadFormat, match=r"by follower 'other' after .* has one follower"):
            call()
    assert marks_by_version(table) == versions
    assert read_table(table) == written.replayed(end_marks(written))
