"""`follow` and `upsert`: keep tables equal to a replay of the log up to the marks of the tables.

Both functions run in the user's Python process, like `append` and `snapshot`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, overload

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from waltz_core.errors import BadConfig, BadRequest, Superseded
from waltz_core.tables.followed_log import LogStateReader
from waltz_core.tables.follower import (
    CONFLICTS_MAX,
    Follower,
    TableProgress,
    check_other_commits,
    errors_of_table,
)
from waltz_core.tables.row_changes import (
    ChangeRules,
    changes_function,
    check_rules,
    parse_condition,
)
from waltz_core.tables.table_marks import TableMarks, marks_to_continue_from
from waltz_spark.api import option_texts
from waltz_spark.datasource.start_offsets import determine_starts
from waltz_spark.options import parse_read
from waltz_spark.shared_clients import client_of, query_replica_sets, with_client
from waltz_spark.spark_version import arrow_schema
from waltz_spark.tables.log_changes import (
    SparkFollowedLog,
    changes_of_dataframe,
    combine_task_changes,
    table_columns,
    with_log_columns,
)
from waltz_spark.tables.merged_table import MergedDeltaTable
from waltz_spark.tables.parquet_files import SparkParquetTable
from waltz_spark.tables.shared_read import SharedSparkFollowedLog, SharedTable
from waltz_spark.tables.table_formats import MergedTable, TableFormat, open_merged_table, open_table
from waltz_spark.tables.table_session import table_session

BATCH_TRANSACTIONS = 1_000_000
INTERVAL_S = 1.0
_PAYLOAD_OPTIONS = ("dataFormat", "schemaRegistry", "schemaRegistryAuthFile")
_READ_OPTIONS = (
    *_PAYLOAD_OPTIONS,
    "encryptionKeys",
    "requireEncryption",
    "readFrom",
    "archive",
    "group",
    "minPartitions",
    "maxTransactionsPerTask",
)

_log = logging.getLogger(__name__)


class Table(NamedTuple):
    """A table for `follow(..., tables=...)`; the fields are arguments of `follow`."""

    key: str | Sequence[str] = ()
    schema: str | StructType | None = None
    headers: Sequence[int] = ()
    delete_headers: Sequence[int] = ()
    delete_where: str | None = None
    changes: str | None = None
    format: TableFormat | None = None


@overload
def follow(
    spark: SparkSession,
    connect: str,
    *,
    table: str,
    key: str | Sequence[str] = (),
    schema: str | StructType | None = None,
    format: TableFormat | None = None,
    headers: Sequence[int] = (),
    delete_headers: Sequence[int] = (),
    delete_where: str | None = None,
    changes: str | None = None,
    **other_arguments: Any,  # noqa: ANN401 - the other arguments
) -> dict[int, int]: ...


@overload
def follow(
    spark: SparkSession,
    connect: str,
    *,
    tables: Mapping[str, Table],
    **other_arguments: Any,  # noqa: ANN401 - the other arguments
) -> dict[str, dict[int, int]]: ...


def follow(  # noqa: PLR0913 - a caller gives four of them
    spark: SparkSession,
    connect: str,
    *,
    table: str | None = None,
    key: str | Sequence[str] = (),
    schema: str | StructType | None = None,
    format: TableFormat | None = None,  # noqa: A002 - Spark's name
    headers: Sequence[int] = (),
    delete_headers: Sequence[int] = (),
    delete_where: str | None = None,
    changes: str | None = None,
    tables: Mapping[str, Table] | None = None,
    follower: str = "follow",
    start: Mapping[int, int] | datetime | str | None = None,
    until: Literal["now"] | Mapping[int, int] | None = None,
    batch_transactions: int = BATCH_TRANSACTIONS,
    interval_s: float = INTERVAL_S,
    on_progress: Callable[[int, int], None] = lambda _applied, _total: None,
    **options: object,
) -> dict[int, int] | dict[str, dict[int, int]]:
    """Keep tables equal to the log, batch by batch; return the high-water marks of the tables.

    Each batch is one commit, which also stores the marks. So the table equals a replay of the log,
    even after the driver, an executor or a task was killed. A repeated call continues at the marks
    of the table. `waltz-core follow` can continue the same table without Spark.

        waltz_spark.follow(spark, connect, table="/tables/accounts", key="id",
                           schema="id long, owner string, op string", delete_where="op = 'D'")

    Args:
        spark: a session with Delta or Iceberg; Waltz opens another session to write the table.
        connect: the connect string of the cluster.
        table: the name of the table, or its path or URL. If the table does not exist, it is
            created.
        key: the key column or columns; none for Parquet.
        schema: the columns of the table: columns of the payload, and columns of the log by their
            names. The table has two more columns, `_partition` and `_transaction_id`. Without a
            schema, columns are inferred from the payloads. The payloads must be msgpack or JSON,
            and the table must be a Delta table.
        format: the format of a new table: delta (default), iceberg, or parquet. A Parquet table
            only gains rows, and each call for it needs `format`.
        headers: the headers of transactions that belong to the table; default: all transactions.
        delete_headers: the headers of transactions that delete the row with their key.
        delete_where: another condition for deletes: a boolean column, or a comparison of a column
            with a literal (`op = 'D'`).
        changes: `module:function`, the name of a changes function. The argument of this function is
            a `pyarrow.Table` of transactions with the columns of `schema`. The function returns
            changes. The columns of the table are those that the function returns. Workers must be
            able to import the module.
        tables: several tables by name, path or URL, in place of the arguments above. The log is
            read once for all tables. Each table has its own commits and marks; the result has the
            marks by table.
        follower: the name of the follower in the commits of the table.
        start: the start of a new table. It is a commit time (in UTC if it has no time zone), or a
            mapping with the mark before the first transaction of each partition. Default: the first
            available transaction.
        until: the end of the call. "now" is the end of the log at the time of the call. A mapping
            has a mark for each partition; if the log ends before these marks, the call ends at the
            end of the log. Default: the function returns only with an error.
        batch_transactions: the maximum number of transactions in a commit.
        interval_s: seconds between requests for new transactions.
        on_progress: a function that is called with two numbers: the transactions that this call has
            applied, and the transactions that it has to apply, as known at this time.
        options: options of the format: `dataFormat` (msgpack by default), `schemaRegistry`,
            `schemaRegistryAuthFile`, `encryptionKeys`, `requireEncryption`, `readFrom`, `archive`,
            `group`, `minPartitions`, `maxTransactionsPerTask`.

    Raises:
        BadConfig: an argument is not valid, `start` was used for a table with marks, the table has
            other columns or another format, or the session lacks the library for the format.
        BadFormat: a payload does not fit, a key is null, the table marks are lost, or the table was
            restored.
        BadRequest: a key has changes in two partitions, or a changes function has failed.
        ClusterKeyMismatch: the table follows another cluster.
        DataLoss: the log no longer has the transactions after the table marks.
        Unavailable: the cluster does not answer (only with `until`).
        Superseded: in each attempt, another commit came first.
    """
    if interval_s <= 0:
        raise BadConfig(f"interval_s: expected more than 0, found {interval_s:g}")
    single_table = Table(key, schema, headers, delete_headers, delete_where, changes, format)
    tables_by_name = _tables_by_name(table, single_table, tables)
    cluster = with_client(connect, lambda client: client.cluster().key.hex())
    with table_session(spark) as session:
        state_reader = LogStateReader(client_of(connect), interval_s=interval_s)
        opened_tables = [
            _open_checked_table(session, connect, name, each, options)
            for name, each in tables_by_name.items()
        ]
        log: SparkFollowedLog | SharedSparkFollowedLog
        if tables is None:
            log = _create_log_of_one_table(session, state_reader, opened_tables[0])
        else:
            log = _create_log_of_several_tables(session, state_reader, opened_tables)
        marks = _start_marks(connect, start, opened_tables[0].read_options)
        loop = Follower(
            log,
            [
                TableProgress(
                    entry.target,
                    entry.name,
                    TableMarks(follower, cluster, marks, entry.rules.stored_rules(entry.headers)),
                )
                for entry in opened_tables
            ],
            batch_transactions=batch_transactions,
            on_progress=on_progress,
        )
        try:
            final_marks = loop.run(_end_marks(state_reader, until))
        finally:
            log.release()
    by_table = {
        opened_table.name: dict(mark.marks)
        for opened_table, mark in zip(opened_tables, final_marks, strict=True)
    }
    return by_table if table is None else by_table[table]


class _CheckedTable(NamedTuple):
    """A table of a call of `follow`, after its checks."""

    name: str
    declared_columns: StructType | None
    rules: ChangeRules
    headers: tuple[int, ...]
    read_options: dict[str, str]
    target: MergedTable | SparkParquetTable


def _tables_by_name(
    table: str | None, single_table: Table, tables: Mapping[str, Table] | None
) -> Mapping[str, Table]:
    """Return the tables of a call by name, from either of the two forms of arguments."""
    if tables is None:
        if table is None or not (single_table.key or single_table.format == "parquet"):
            found_text = "neither" if table is None else "table without key"
            raise BadConfig(
                f"follow: expected the arguments table and key, or tables; found {found_text}"
            )
        return {table: single_table}
    if table is not None or single_table != Table():
        raise BadConfig(
            "follow: expected either the argument tables, or table with "
            f"{', '.join(Table._fields)}; found both"
        )
    if not tables:
        raise BadConfig("follow: expected one or more tables, found none")
    return tables


def _open_checked_table(
    session: SparkSession,
    connect: str,
    name: str,
    table: Table,
    options: Mapping[str, object],
) -> _CheckedTable:
    """Check the arguments for a table, and open it."""
    with errors_of_table(name):
        headers = tuple(table.headers)
        if headers and (unread_headers := set(table.delete_headers) - set(headers)):
            raise BadConfig(
                f"delete_headers: header {min(unread_headers)} is not in the parameter "
                f"`headers`, {sorted(headers)}. Hint: add it there."
            )
        declared_columns = None
        if table.schema is not None:
            declared_columns = session.createDataFrame([], table.schema).schema
        rules = _create_rules(
            table, None if declared_columns is None else with_log_columns(declared_columns)
        )
        columns = None if declared_columns is None else table_columns(declared_columns, rules)
        reads = _read_options(connect, declared_columns, headers, options)
        target = open_table(session, name, table.format, columns, rules)
    return _CheckedTable(name, declared_columns, rules, headers, reads, target)


def _create_log_of_one_table(
    session: SparkSession, state_reader: LogStateReader, table: _CheckedTable
) -> SparkFollowedLog:
    known_columns: StructType | Callable[[], StructType] | None = table.declared_columns
    if known_columns is None:
        assert isinstance(table.target, MergedDeltaTable), "other formats have a schema"
        known_columns = table.target.columns
    return SparkFollowedLog(session, state_reader, known_columns, table.rules, table.read_options)


def _create_log_of_several_tables(
    session: SparkSession, state_reader: LogStateReader, tables: Sequence[_CheckedTable]
) -> SharedSparkFollowedLog:
    shared_tables = []
    for table in tables:
        if table.declared_columns is None:
            raise BadConfig(
                f"table {table.name}: expected a schema, found none. Hint: with several tables, "
                "declare the columns of each."
            )
        shared_tables.append(
            SharedTable(
                table.name, table.declared_columns, table.rules, table.headers, table.read_options
            )
        )
    options = _without_options(tables[0].read_options, *_PAYLOAD_OPTIONS, "headers")
    if all(table.headers for table in tables):
        headers = {header for table in tables for header in table.headers}
        options["headers"] = ",".join(map(str, sorted(headers)))
    return SharedSparkFollowedLog(session, state_reader, shared_tables, options)


def upsert(  # noqa: PLR0913 - a caller gives four of them
    df: DataFrame,
    connect: str,
    *,
    table: str,
    key: str | Sequence[str],
    format: TableFormat | None = None,  # noqa: A002 - Spark's name
    delete_headers: Sequence[int] = (),
    delete_where: str | None = None,
    changes: str | None = None,
    follower: str = "follow",
) -> dict[int, int]:
    """Apply each transaction to a table exactly once; return the table's high-water marks.

    Call the function in a `foreachBatch`. The rows and the marks after them are one commit. Rows up
    to the marks of the table are dropped. So a repeated micro-batch writes no commit, even with a
    new checkpoint directory.

        def each(df, batch):
            waltz_spark.upsert(df, connect, table="/tables/accounts", key="id")

    Args:
        df: transactions of the log, with the columns `partition` and `transaction_id`, and the
            columns of the table. With `delete_headers`, column `header` is also required. A
            transaction may have several rows with different keys.
        connect: the connect string of the transactions' cluster.
        table: the name of the table, or its path or URL. If the table does not exist, it is
            created.
        key: the key column or columns.
        format: the format of a new table: delta (default) or iceberg.
        delete_headers: the headers of transactions that delete the row with their key.
        delete_where: another condition for deletes, as for `follow`.
        changes: `module:function`, a function that computes changes from the rows, as for `follow`.
        follower: the name of the follower in the commits of the table.

    Raises:
        BadConfig: an argument is not valid, the table has other columns, or rows but no marks, or
            the session lacks the library for the format.
        BadFormat: a key is null, the table marks are lost, or the table was restored.
        BadRequest: `df` is not a DataFrame of transactions, or a key has changes in two partitions.
        ClusterKeyMismatch: the table follows another cluster.
        Superseded: in each attempt, another commit came first.
    """
    _check_dataframe(df)
    table_arguments = Table(key, None, (), delete_headers, delete_where, changes)
    rules = _create_rules(table_arguments, df.schema)
    columns = _columns_of_table(df, rules)
    cluster = with_client(connect, lambda client: client.cluster().key.hex())
    name = TableMarks(follower, cluster, {}, rules.stored_rules(None))
    with table_session(df.sparkSession) as session:
        target = open_merged_table(session, table, format, columns, rules)
        conflicts = 0
        while True:
            try:
                return _upsert_once(df, target, columns, rules, name)
            except Superseded as error:
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise
                _log.info("follow.commit_conflict reason=%s", error)


def _upsert_once(
    df: DataFrame,
    target: MergedTable,
    columns: StructType,
    rules: ChangeRules,
    name: TableMarks,
) -> dict[int, int]:
    stored = _stored_marks(target, name)
    parts = changes_of_dataframe(df, columns, rules, stored.marks)
    # Two Spark actions use the changes: the query for the marks, and the MERGE.
    changes = combine_task_changes(parts, rules.key).persist()
    try:
        with target.translate_errors():
            rows = changes.groupBy("partition").agg(F.max("transaction_id")).collect()
        if not rows:
            target.finish()
            return dict(stored.marks)
        marks = {**stored.marks, **dict(map(tuple, rows))}
        target.apply(changes, stored._replace(marks=marks))
        return marks
    finally:
        changes.unpersist()


def _stored_marks(target: MergedTable, name: TableMarks) -> TableMarks:
    """Return the marks of the table; create the table if it does not exist."""
    state = target.marks(name)
    if state is None:
        target.create(name)
        state = target.marks(name)
        assert state is not None, "the table was created"
    if state.metadata is None and state.version is None and state.has_rows:
        raise BadConfig(
            "the table has rows, or marks of another follower, but no marks of follower "
            f"{name.follower!r}. Hint: use another table."
        )
    check_other_commits(state.other_commits, name)
    return marks_to_continue_from(state.metadata, state.version, name)


def _create_rules(table: Table, rows: StructType | None) -> ChangeRules:
    """Return the rules of a table; `rows` has the columns of transactions, None if not declared."""
    condition = None if table.delete_where is None else parse_condition(table.delete_where)
    key = [table.key] if isinstance(table.key, str) else list(table.key)
    rules = ChangeRules(key, tuple(table.delete_headers), condition)
    if table.changes is None:
        return rules
    if rows is None:
        raise BadConfig(
            f"changes function {table.changes}: expected a schema of the transactions, found none. "
            "Hint: declare their columns, or column data."
        )
    return replace(rules, function=changes_function(table.changes, arrow_schema(rows), key))


def _check_dataframe(df: DataFrame) -> None:
    """Check that the value of `df` is a DataFrame of transactions."""
    if getattr(df, "sparkSession", None) is None:
        found = f"{type(df).__module__}.{type(df).__name__}"
        raise BadRequest(f"upsert: expected a Spark DataFrame, found {found}")
    types = {part.name: part.dataType.simpleString() for part in df.schema}
    for column, expected in (("partition", "int"), ("transaction_id", "bigint")):
        if types.get(column) != expected:
            raise BadRequest(
                f"upsert: expected column {column!r} with type {expected}, found "
                f"{types.get(column, 'none')}. Hint: list it in the schema of the read."
            )


def _columns_of_table(df: DataFrame, rules: ChangeRules) -> StructType:
    """Return the columns of the table for a DataFrame of transactions."""
    check_rules(rules, arrow_schema(df.schema))
    if rules.function is not None:
        return table_columns(df.schema, rules)
    position_columns = {
        "partition",
        "transaction_id",
        *(["header"] if rules.delete_headers else []),
    }
    return StructType(
        [
            StructField(part.name, part.dataType)
            for part in df.schema
            if part.name not in position_columns
        ]
    )


def _read_options(
    connect: str, columns: StructType | None, headers: Sequence[int], options: Mapping[str, object]
) -> dict[str, str]:
    texts = option_texts(options)
    for name in texts:
        if name not in _READ_OPTIONS:
            raise BadConfig(
                f"follow: expected only the options {', '.join(_READ_OPTIONS)} for reads, "
                f"found {name!r}"
            )
    texts.setdefault("dataFormat", "msgpack")
    if headers:
        texts["headers"] = ",".join(map(str, headers))
    texts["connect"] = connect
    if columns and all(name in parse_read(texts).log_columns for name in columns.names):
        return _without_options(texts, *_PAYLOAD_OPTIONS)  # the table has only columns of the log
    return texts


def _without_options(options: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def _start_marks(
    connect: str, start: Mapping[int, int] | datetime | str | None, options: Mapping[str, str]
) -> Mapping[int, int]:
    """Return the start of a call as marks; no marks if `start` is None."""
    if start is None or isinstance(start, Mapping):
        return {int(partition): int(mark) for partition, mark in (start or {}).items()}
    text = start.isoformat() if isinstance(start, datetime) else start
    read_options = parse_read({**options, "startingTimestamp": text})
    client, sources = query_replica_sets(connect, range, linearizable=True)
    return determine_starts(client, read_options, sources)


def _end_marks(state_reader: LogStateReader, until: object) -> Mapping[int, int] | None:
    """Return the marks at which a call ends; None if it does not end.

    Raises:
        BadConfig: `until` is neither "now" nor a mapping of marks.
    """
    if until is None:
        return None
    if until == "now":
        return state_reader.state().marks
    if not isinstance(until, Mapping):
        raise BadConfig(f"until: expected 'now' or the mark of each partition, found {until!r}")
    return {int(partition): int(mark) for partition, mark in until.items()}
