"""Iceberg tables and Parquet files that follow the log in Spark."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameWriterV2, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import waltz_spark
from tests import table_libraries
from tests.commands import run_command
from tests.spark.tables_job import CATALOG_NAME, catalog_settings, follow_table, method_ending_at
from tests.spark.test_tables import append_and_return_marks, transactions, upsert, with_delta
from tests.spark.test_tables_killed import run_job
from tests.time_limits import PATIENT_CLIENT
from tests.written_log import DELETE_HEADER, PARTITION_COUNT, TableRows, WrittenLog, end_marks
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadRequest, Superseded, Unavailable
from waltz_core.tables.row_changes import ChangeRules
from waltz_core.tables.table_marks import TableMarks, decode_marks
from waltz_spark.tables.iceberg_table import MergedIcebergTable
from waltz_spark.tables.log_changes import changes_schema
from waltz_spark.tables.parquet_files import SparkParquetTable

pytestmark = pytest.mark.spark
with_iceberg = pytest.mark.skipif(
    not table_libraries.ICEBERG.jars(), reason=table_libraries.ICEBERG.missing_reason()
)

NAME = TableMarks("follow", "0" * 32, {0: -1})
ID = StructType([StructField("id", LongType())])


class ProcessKilled(BaseException):
    """The process was killed."""


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def iceberg_session(spark: SparkSession, warehouse: Path) -> Iterator[SparkSession]:
    """Return a session with a catalog of Iceberg tables."""
    session = spark.newSession()
    for name, value in catalog_settings(warehouse).items():
        session.conf.set(name, value)
    return session


def append(written: WrittenLog, seed: int) -> None:
    with WaltzClient(written.connect, PATIENT_CLIENT) as client:
        written.append(client, seed)


def content(session: SparkSession, table: str, snapshot: int | None = None) -> TableRows:
    version = "" if snapshot is None else f"VERSION AS OF {snapshot}"
    session.sql(f"REFRESH TABLE {table}")
    rows = session.sql(f"SELECT * FROM {table} {version}").collect()
    assert len({row["id"] for row in rows}) == len(rows)
    columns = ("value", "_log_partition", "_transaction_id")
    return {row["id"]: tuple(row[name] for name in columns) for row in rows}


def marks_by_snapshot(session: SparkSession, table: str) -> dict[int, dict[int, int]]:
    """Return the marks of all snapshots in the history of `main`, oldest first."""
    session.sql(f"REFRESH TABLE {table}")
    rows = session.sql(
        "SELECT h.snapshot_id, s.summary['waltz.marks'] "
        f"FROM {table}.history h JOIN {table}.snapshots s ON h.snapshot_id = s.snapshot_id "
        "WHERE is_current_ancestor ORDER BY made_current_at"
    ).collect()
    return {snapshot: dict(decode_marks(metadata).marks) for snapshot, metadata in rows}


def check_snapshots(session: SparkSession, written: WrittenLog, table: str) -> None:
    """Check that each snapshot has the rows up to its marks, and that marks never decrease."""
    before = dict.fromkeys(range(PARTITION_COUNT), -1)
    for snapshot, marks in marks_by_snapshot(session, table).items():
        assert content(session, table, snapshot) == written.replayed(marks)
        assert all(mark >= before.get(partition, -1) for partition, mark in marks.items())
        before = marks


@pytest.mark.core
@with_iceberg
def test_an_iceberg_table_equals_a_replay_and_a_repeated_call_writes_no_snapshot(
    iceberg_session: SparkSession, written: WrittenLog
) -> None:
    table = f"{CATALOG_NAME}.shop.replayed"
    more = {"format": "iceberg", "batch_transactions": 70}
    assert follow_table(iceberg_session, written.connect, table, **more) == end_marks(written)
    check_snapshots(iceberg_session, written, table)
    found = marks_by_snapshot(iceberg_session, table)
    assert len(found) > 2
    assert content(iceberg_session, table) == written.replayed(end_marks(written))
    assert follow_table(iceberg_session, written.connect, table) == end_marks(written)
    rows = transactions(iceberg_session.read, written.connect)
    assert upsert(rows, written.connect, table) == end_marks(written)
    assert marks_by_snapshot(iceberg_session, table) == found
    append(written, 2)
    upsert(transactions(iceberg_session.read, written.connect), written.connect, table)
    check_snapshots(iceberg_session, written, table)
    newest = list(marks_by_snapshot(iceberg_session, table).values())[-1]
    assert (
        content(iceberg_session, table)
        == written.replayed(newest)
        == written.replayed(end_marks(written))
    )


@pytest.mark.core
@with_iceberg
@pytest.mark.slow
def test_another_session_continues_a_follower_that_ended_before_the_publication(
    iceberg_session: SparkSession,
    written: WrittenLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = f"{CATALOG_NAME}.shop.ended"

    def end() -> None:
        raise ProcessKilled

    for step in ("after _merge_into", "after apply"):
        with monkeypatch.context() as patch:
            patch.setattr(
                MergedIcebergTable, *method_ending_at(step, end, tmp_path, MergedIcebergTable)
            )
            with pytest.raises(ProcessKilled):
                follow_table(
                    iceberg_session, written.connect, table, format="iceberg", batch_transactions=90
                )
        check_snapshots(iceberg_session, written, table)
    follow_table(iceberg_session, written.connect, table)
    check_snapshots(iceberg_session, written, table)
    assert content(iceberg_session, table) == written.replayed(end_marks(written))


@pytest.mark.core
@pytest.mark.versions
@with_iceberg
def test_a_follower_continues_after_its_driver_died_between_merge_and_publication(
    iceberg_session: SparkSession, written: WrittenLog, warehouse: Path
) -> None:
    table = f"{CATALOG_NAME}.shop.killed"
    assert run_job(written, table, "after _merge_into", WAREHOUSE=str(warehouse)) == -9
    check_snapshots(iceberg_session, written, table)
    assert content(iceberg_session, table) == {}
    follow_table(iceberg_session, written.connect, table)
    check_snapshots(iceberg_session, written, table)
    assert content(iceberg_session, table) == written.replayed(end_marks(written))
    names = [row["name"] for row in iceberg_session.sql(f"SELECT name FROM {table}.refs").collect()]
    assert len(names) == 2, "the branch of the killed process was not removed"


@pytest.mark.versions
@with_iceberg
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_follower_continues_after_its_driver_ended_at_any_statement(
    iceberg_session: SparkSession, written: WrittenLog, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    table = f"{CATALOG_NAME}.shop.ended_{when}"
    statements = count()
    sql = SparkSession.sql

    def kill_at_statement(fatal: int) -> Callable[..., Any]:
        numbers = count()

        def run_statement(session: SparkSession, text: str) -> DataFrame:
            if text.startswith(("SELECT", "DESCRIBE")):
                return sql(session, text)
            is_fatal = next(numbers) == fatal
            if is_fatal and when == "before":
                raise ProcessKilled
            try:
                return sql(session, text)
            finally:  # also after the error that the table does not exist yet
                if is_fatal:
                    raise ProcessKilled

        return run_statement

    for fatal in statements:
        append(written, 20 + fatal)
        with monkeypatch.context() as patch:
            patch.setattr(SparkSession, "sql", kill_at_statement(fatal))
            with suppress(ProcessKilled):
                follow_table(
                    iceberg_session, written.connect, table, format="iceberg", batch_transactions=70
                )
                break
        if iceberg_session.catalog.tableExists(table):
            check_snapshots(iceberg_session, written, table)
    assert fatal > 5
    check_snapshots(iceberg_session, written, table)
    assert content(iceberg_session, table) == written.replayed(end_marks(written))


def opened(iceberg_session: SparkSession, warehouse: Path, table: str) -> MergedIcebergTable:
    session = iceberg_session.newSession()
    for name, value in catalog_settings(warehouse).items():
        session.conf.set(name, value)
    return MergedIcebergTable(session, table, ID, ["id"])


def changes(iceberg_session: SparkSession, key: int, *, is_deleted: bool = False) -> DataFrame:
    return iceberg_session.createDataFrame([(key, 0, key, is_deleted)], changes_schema(ID))


def marks_up_to(mark: int) -> TableMarks:
    return NAME._replace(marks={0: mark})


def ids(iceberg_session: SparkSession, table: str) -> list[int]:
    iceberg_session.sql(f"REFRESH TABLE {table}")
    return sorted(row["id"] for row in iceberg_session.table(table).collect())


@pytest.mark.core
@with_iceberg
def test_the_later_commit_of_two_followers_of_an_iceberg_table_is_rejected(
    iceberg_session: SparkSession, warehouse: Path
) -> None:
    table = f"{CATALOG_NAME}.shop.two"
    first, second = (
        opened(iceberg_session, warehouse, table),
        opened(iceberg_session, warehouse, table),
    )
    assert first.marks(NAME) is None
    for each in (first, second):
        each.create(NAME)
        assert not each.marks(NAME).has_rows
    first.finish()
    with pytest.raises(Superseded):
        second.finish()
    assert (
        decode_marks(first.marks(NAME).metadata)
        == decode_marks(second.marks(NAME).metadata)
        == NAME
    )
    assert second.apply(changes(iceberg_session, 1), marks_up_to(1))
    for change in (changes(iceberg_session, 0), None):
        with pytest.raises(Superseded, match="another commit came first"):
            first.apply(change, marks_up_to(0))
    assert ids(iceberg_session, table) == [1]
    assert decode_marks(first.marks(NAME).metadata) == marks_up_to(1)
    assert first.apply(None, marks_up_to(2))
    # A commit of another program, too.
    second.marks(NAME)
    iceberg_session.sql(f"DELETE FROM {table}")
    with pytest.raises(Superseded):
        second.apply(changes(iceberg_session, 3), marks_up_to(3))
    state = second.marks(NAME)
    assert decode_marks(state.metadata) == marks_up_to(2)
    assert [each.operation for each in state.other_commits] == ["delete"]


# "append" is the same pause, in a table that the user has created.
@pytest.mark.core
@with_iceberg
@pytest.mark.parametrize("step", ["create", pytest.param("append", marks=pytest.mark.slow)])
def test_a_follower_that_pauses_after_the_first_snapshot_is_rejected(
    iceberg_session: SparkSession, warehouse: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The second follower commits during the pause. The user may have created the table."""
    table = f"{CATALOG_NAME}.shop.paused_{step}"
    if step == "append":
        columns = "id BIGINT, _log_partition INT, _transaction_id BIGINT"
        iceberg_session.sql(f"CREATE TABLE {table} ({columns}) USING iceberg")
    first, second = (
        opened(iceberg_session, warehouse, table),
        opened(iceberg_session, warehouse, table),
    )
    if first.marks(NAME) is None:
        first.create(NAME)
    write = getattr(DataFrameWriterV2, step)

    def written(self: DataFrameWriterV2) -> None:
        write(self)
        patch.undo()
        second.marks(NAME)
        assert second.apply(changes(iceberg_session, 1), marks_up_to(5))
        first._session.sql(f"REFRESH TABLE {table}")  # as after 30 s

    with monkeypatch.context() as patch:
        patch.setattr(DataFrameWriterV2, step, written)
        with pytest.raises(Superseded, match="another commit came first"):
            first.apply(changes(iceberg_session, 0), marks_up_to(0))
    assert decode_marks(first.marks(NAME).metadata) == marks_up_to(5)
    assert ids(iceberg_session, table) == [1]


@pytest.mark.slow
@pytest.mark.core
@with_iceberg
def test_a_second_follower_keeps_branches_that_may_become_main(
    iceberg_session: SparkSession, warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"{CATALOG_NAME}.shop.kept"
    first, second = (
        opened(iceberg_session, warehouse, table),
        opened(iceberg_session, warehouse, table),
    )
    first.marks(NAME)
    first.create(NAME)
    assert first.apply(changes(iceberg_session, 0), marks_up_to(0))
    first.marks(NAME)
    merge = MergedIcebergTable._merge_into

    def merged(self: MergedIcebergTable, *args: Any) -> None:
        opened(iceberg_session, warehouse, table).marks(NAME)  # another follower starts
        merge(self, *args)
        opened(iceberg_session, warehouse, table).marks(NAME)

    monkeypatch.setattr(MergedIcebergTable, "_merge_into", merged)
    assert first.apply(changes(iceberg_session, 1), marks_up_to(1))
    first.marks(NAME)
    second.marks(NAME)

    def merge_late(self: MergedIcebergTable, *args: Any) -> None:
        if self is first:  # the commit of the second follower removes the branch
            assert second.apply(changes(iceberg_session, 2), marks_up_to(2))
        merge(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MergedIcebergTable, "_merge_into", merge_late)
        with pytest.raises(Superseded, match="another"):
            first.apply(changes(iceberg_session, 3), marks_up_to(3))
    assert ids(iceberg_session, table) == [0, 1, 2]
    # A branch that begins at a later snapshot must not be moved back.
    third = opened(iceberg_session, warehouse, table)
    for each in (first, third):
        assert decode_marks(each.marks(NAME).metadata) == marks_up_to(2)
    append_rows = DataFrameWriterV2.append

    def appended_late(self: DataFrameWriterV2) -> None:
        assert third.apply(changes(iceberg_session, 4), marks_up_to(4))
        iceberg_session.sql(f"REFRESH TABLE {table}")
        iceberg_session.sql(f"ALTER TABLE {table} CREATE BRANCH {first._branch}")
        append_rows(self)

    with monkeypatch.context() as patch:
        patch.setattr(DataFrameWriterV2, "append", appended_late)
        with pytest.raises(Superseded, match="another program has dropped branch waltz_"):
            first.apply(None, marks_up_to(3))
    assert decode_marks(first.marks(NAME).metadata) == marks_up_to(4)
    assert first.apply(changes(iceberg_session, 5), marks_up_to(5))
    assert ids(iceberg_session, table) == [0, 1, 2, 4, 5]


@pytest.mark.core
@with_iceberg
def test_an_iceberg_table_is_created_after_a_temporary_error(
    iceberg_session: SparkSession, warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"{CATALOG_NAME}.shop.late"
    target = opened(iceberg_session, warehouse, table)
    target.create(NAME)

    def fail(_self: DataFrameWriterV2) -> None:
        raise PySparkException("java.net.ConnectException: Connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(DataFrameWriterV2, "create", fail)
        with pytest.raises(Unavailable):
            target.finish()
    state = target.marks(NAME)
    assert state is not None
    assert decode_marks(state.metadata) == NAME
    assert target.apply(changes(iceberg_session, 1), marks_up_to(1))
    assert ids(iceberg_session, table) == [1]


@pytest.mark.core
@with_iceberg
def test_the_marks_of_an_iceberg_table_match_its_rows(
    iceberg_session: SparkSession, warehouse: Path
) -> None:
    """The test deletes absent keys, and rolls the table back."""
    table = f"{CATALOG_NAME}.shop.marked"
    target = opened(iceberg_session, warehouse, table)
    assert target.marks(NAME) is None
    target.create(NAME)
    target.finish()
    assert target.marks(NAME) is not None
    assert target.apply(changes(iceberg_session, 7, is_deleted=True), marks_up_to(7))
    state = target.marks(NAME)
    assert (decode_marks(state.metadata), state.other_commits, ids(iceberg_session, table)) == (
        marks_up_to(7),
        [],
        [],
    )
    assert target.apply(changes(iceberg_session, 8), marks_up_to(8))
    other = target.marks(NAME._replace(follower="other"))
    assert (other.metadata, other.version, other.has_rows) == (None, None, True)
    snapshots = iceberg_session.sql(
        f"SELECT snapshot_id FROM {table}.history ORDER BY made_current_at"
    )
    created = snapshots.collect()[0][0]
    iceberg_session.sql(
        f"CALL {CATALOG_NAME}.system.rollback_to_snapshot('shop.marked', {created})"
    )
    assert decode_marks(target.marks(NAME).metadata) == NAME
    assert target.apply(changes(iceberg_session, 9), marks_up_to(9))
    assert ids(iceberg_session, table) == [9]


@pytest.mark.versions
@with_iceberg
def test_columns_of_an_iceberg_table_may_be_declared_later(
    iceberg_session: SparkSession, written: WrittenLog
) -> None:
    """The user has created the table, without the position columns."""
    table = f"{CATALOG_NAME}.shop.wider"
    iceberg_session.sql(
        f"CREATE TABLE {table} (id BIGINT, op STRING) USING iceberg PARTITIONED BY (op)"
    )
    assert follow_table(iceberg_session, written.connect, table) == end_marks(written)
    assert content(iceberg_session, table) == written.replayed(end_marks(written))
    for schema, message in (
        ("id long, op string", "column 'value' of the table is not declared"),
        ("id long, op string, value int", "has type bigint in the table, but is declared as int"),
        ("id long, op string, value long, n short", "has no type smallint"),
        ("id long, op string, value long, _file string", "Reserved names are .*, _file, "),
    ):
        with pytest.raises(BadConfig, match=message):
            waltz_spark.follow(
                iceberg_session, written.connect, table=table, key="id", schema=schema
            )
    nested = "id long, op string, value long, more array<struct<`a b`: long, c: map<string, int>>>"
    waltz_spark.follow(
        iceberg_session,
        written.connect,
        table=table,
        key="id",
        schema=nested,
        headers=[1, DELETE_HEADER],
        delete_headers=[DELETE_HEADER],
        delete_where="op = 'D'",
        until="now",
    )
    append(written, 3)
    with pytest.raises(BadConfig, match="expected format delta, found iceberg"):
        follow_table(iceberg_session, written.connect, table, format="delta")


@pytest.mark.versions
@pytest.mark.parametrize(
    "table_format",
    [pytest.param("iceberg", marks=with_iceberg), pytest.param("delta", marks=with_delta)],
)
def test_structs_that_gain_fields_keep_their_values(
    iceberg_session: SparkSession, connect: str, tmp_path: Path, table_format: str
) -> None:
    """The structs may be in lists. The user adds the fields: `follow` changes no declared type."""
    table = f"{CATALOG_NAME}.shop.structs" if table_format == "iceberg" else str(tmp_path / "table")
    name = table if table_format == "iceberg" else f"delta.`{table}`"

    def payload(key: int, **fields: object) -> tuple[int, dict]:
        return 0, {"id": key, "at": fields, "places": [fields]}

    def follow_structs(fields: str, **more: object) -> None:
        schema = f"id long, at struct<{fields}>, places array<struct<{fields}>>"
        table_options = {"table": table, "format": table_format, "key": "id", "schema": schema}
        waltz_spark.follow(iceberg_session, connect, **table_options, until="now", **more)

    def rows() -> list[dict]:
        if table_format == "iceberg":
            iceberg_session.sql(f"REFRESH TABLE {table}")
        found = iceberg_session.sql(f"SELECT id, at, places FROM {name} ORDER BY id").collect()
        assert all(row["places"] == [row["at"]] for row in found)
        return [row["at"].asDict() for row in found]

    start = append_and_return_marks(connect, *(payload(number, x=number) for number in range(3)))
    follow_structs("x: long", start=start)
    assert rows() == [{"x": 0}, {"x": 1}, {"x": 2}]
    append_and_return_marks(connect, payload(1, x=7, y="a"), payload(3, y="b"))
    with pytest.raises(
        BadConfig, match=r"column 'at' has type .* but is declared as .* Hint: .*ADD COLUMN"
    ):
        follow_structs("x: long, y: string")
    for path in ("at.y", "places.element.y"):
        iceberg_session.sql(f"ALTER TABLE {name} ADD COLUMN {path} string")
    follow_structs("x: long, y: string")
    after = [(0, None), (7, "a"), (2, None), (None, "b")]
    assert rows() == [{"x": x, "y": y} for x, y in after]


@pytest.mark.versions
@with_iceberg
def test_a_row_key_in_two_partitions_is_an_error(iceberg_session: SparkSession) -> None:
    schema = StructType([StructField("id", LongType())])
    table = MergedIcebergTable(iceberg_session, f"{CATALOG_NAME}.shop.keys", schema, ["id"])
    table.create(NAME)
    for partition in (0, 1):
        changes = iceberg_session.createDataFrame(
            [(7, partition, 5, False)], changes_schema(schema)
        )
        if partition == 0:
            assert table.apply(changes, NAME)
            table.marks(NAME)
        else:
            with pytest.raises(BadRequest, match=r"the key \(7\) has .* partition 0, transaction"):
                table.apply(changes, NAME)


@pytest.mark.skipif(bool(table_libraries.ICEBERG.jars()), reason="the library is installed")
@pytest.mark.core
def test_spark_without_iceberg_raises_an_error_with_a_hint(
    spark: SparkSession, written: WrittenLog
) -> None:
    problem = r"no library of Iceberg that works with Spark .* \(.*\)\. Hint: there are libraries"
    with pytest.raises(BadConfig, match=problem):
        follow_table(spark, written.connect, "lake.shop.accounts", format="iceberg")


@pytest.mark.core
def test_a_format_that_does_not_match_the_arguments_is_an_error(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    for table, table_format, message in (
        ("accounts", "iceberg", "with its catalog and namespace"),
        (str(tmp_path), "iceberg", "expected a name of a table with format iceberg"),
        (
            "lake.shop.accounts",
            "parquet",
            "expected a path or a URL of a table with format parquet",
        ),
        (str(tmp_path), "parquet", "is append-only: expected no key"),
        (str(tmp_path), "csv", "format: expected one of delta, iceberg, parquet, found 'csv'"),
    ):
        with pytest.raises(BadConfig, match=re.escape(message)):
            follow_table(spark, written.connect, table, format=table_format)
    with pytest.raises(BadConfig, match="follow: expected the arguments table and key, or tables"):
        waltz_spark.follow(spark, written.connect, table=str(tmp_path), schema="id long")
    with pytest.raises(BadConfig, match="expected a schema for a table with format parquet"):
        waltz_spark.follow(spark, written.connect, table=str(tmp_path), format="parquet")


# --- Parquet


def added(written: WrittenLog) -> list[tuple[int, int, int]]:
    """Return the expected rows of a table of Parquet files: the transactions with header 1."""
    return sorted(
        (partition, transaction_id, row["value"])
        for partition, log in enumerate(written.log)
        for transaction_id, (header, row) in enumerate(log)
        if header == 1
    )


def in_files(table: Path) -> list[tuple[int, int, int]]:
    rows = ds.dataset(table, format="parquet").to_table().to_pylist()
    return sorted((row["_partition"], row["_transaction_id"], row["value"]) for row in rows)


def add(spark: SparkSession, written: WrittenLog, table: Path, **more: object) -> dict[int, int]:
    return waltz_spark.follow(
        spark,
        written.connect,
        table=str(table),
        format="parquet",
        schema="id long, op string, value long, commit_time timestamp",
        headers=[1],
        **{"until": "now", "batch_transactions": 50, "minPartitions": 3, **more},
    )


@pytest.mark.core
def test_parquet_files_contain_each_row_once_and_both_followers_continue_the_table(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert add(spark, written, table) == end_marks(written)
    assert in_files(table) == added(written)
    batches = sorted(table.glob("batch=*"))
    assert add(spark, written, table) == end_marks(written)
    assert sorted(table.glob("batch=*")) == batches
    append(written, 5)
    words = ["follow", str(table), "--format", "parquet", "--connect", written.connect]
    words += ["--column", "id:int64", "--column", "op:string", "--column", "value:int64"]
    words += ["--column", "commit_time", "--header", "1", "--until", "now"]
    result = run_command(*words)
    assert result.returncode == 0, result.stderr
    assert in_files(table) == added(written)
    append(written, 6)
    assert add(spark, written, table) == end_marks(written)
    assert in_files(table) == added(written)
    read = spark.read.parquet(str(table))
    assert read.count() == len(added(written))
    assert dict(read.dtypes)["commit_time"] == "timestamp"


@pytest.mark.core
def test_a_lost_executor_is_a_temporary_error_for_parquet_tables(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = SparkParquetTable(str(tmp_path / "table"), ID, ChangeRules(()))
    target.create(NAME)

    def lose(_rows: Iterator[Any]) -> Iterator[Any]:
        raise RuntimeError("ExecutorLostFailure (executor 1 exited)")
        yield

    lost = changes(spark, 1).mapInArrow(lose, changes_schema(ID))
    with pytest.raises(Unavailable, match=f"^table {tmp_path}/table: .*ExecutorLostFailure"):
        target.apply(lost, marks_up_to(1))
    assert target.apply(changes(spark, 1), marks_up_to(1))


@pytest.mark.versions
def test_killed_tasks_add_no_row_twice(written: WrittenLog, tmp_path: Path) -> None:
    table = tmp_path / "table"
    assert run_job(written, table, "tasks", STRUCK=str(tmp_path), FORMAT="parquet") == 0
    assert (tmp_path / "worker").exists()
    assert (tmp_path / "executor").exists()
    assert in_files(table) == added(written)
