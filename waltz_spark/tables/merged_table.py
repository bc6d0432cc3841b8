"""A Delta table that a follower in Spark writes, with `MERGE`.

Each commit has the marks as `userMetadata`, and the identifier of the follower as `txn`. Delta
reads marks and identifier from the settings of the session, so the session belongs to the table.

Rules:
    1. The `txn` version of a commit is the number of transactions in the table before the commit,
       plus one. So commits that were prepared on the same marks have the same version, and Delta
       accepts only the first of them. If the table already has the version of a `MERGE`, or a
       higher version, Delta skips the `MERGE`. If a commit with the same identifier came between
       the start and the end of a `MERGE`, Delta rejects the `MERGE`. In both cases, the follower
       raises `Superseded`.
    2. The `txn` version does not prevent commits of other programs. So a `RESTORE`, or a commit of
       a follower with another name, may come between two commits of the follower. The follower
       detects such a commit when it reads the table again (`delta_commits.py`).
    3. A table has the declared columns, and the position of the last change of the row:
       `_partition` and `_transaction_id`.
    4. Auto compaction is off. If it were on, Delta would run an `OPTIMIZE` in the session after the
       `MERGE`, and commit it with the metadata of the follower.
    5. Delta stores values of partition columns as texts, in names of directories. Delta reads two
       texts as null: the empty text, and the name that represents null. The follower rejects both
       texts: a `MERGE` would not find the row with such a key, and would insert the row again. The
       time zone is UTC, because in other zones two timestamps have the same text when daylight
       saving time ends.
"""

import contextlib
import re
import uuid
from collections.abc import Iterable, Sequence

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from waltz_core.errors import BadConfig, Superseded
from waltz_core.tables.delta_columns import check_schema
from waltz_core.tables.delta_commits import DeltaCommit, find_newest_commit, full_operation_name
from waltz_core.tables.follower import TableState
from waltz_core.tables.row_changes import DELETED_COLUMN
from waltz_core.tables.table_marks import TableMarks, decode_marks, encode_marks
from waltz_spark.spark_version import arrow_schema
from waltz_spark.tables.merge_statement import (
    POSITION_COLUMNS,
    check_column_names,
    check_table_columns,
    merge_actions,
    quote_identifier,
    split_table_name,
)
from waltz_spark.tables.spark_errors import NULL_TEXT_PREFIX, translate_errors

_METADATA_SETTING = "spark.databricks.delta.commitInfo.userMetadata"
_APPLICATION_SETTING = "spark.databricks.delta.write.txnAppId"
_VERSION_SETTING = "spark.databricks.delta.write.txnVersion"
_AUTO_COMPACTION_SETTING = (
    "spark.databricks.delta.autoCompact.enabled"  # rule 4; precedes the property
)
_TIME_ZONE_SETTING = "spark.sql.session.timeZone"
_NULL_TEXTS = ("", "__HIVE_DEFAULT_PARTITION__")  # rule 5
# The errors with which Spark and Delta report that a table does not exist.
_NO_TABLE_ERRORS = re.compile(
    r"DELTA_TABLE_ONLY_OPERATION|DELTA_MISSING_DELTA_TABLE|TABLE_OR_VIEW_NOT_FOUND|"
    r"DELTA_TABLE_NOT_FOUND|DELTA_PATH_DOES_NOT_EXIST"
)
_COMMITS_READ_FIRST = 5  # the number of commits to read at first; usually one is of the follower


class MergedDeltaTable:
    """A Delta table of one follower (implements `FollowedTable`).

    Args:
        session: a session that only the tables of this follower use.
        name: the name of the table, or its path or URL, which contains a slash.
        schema: the declared columns; None: the columns of the changes.
        key: the key columns.

    Raises:
        BadConfig: `name` is not valid, a key column is not declared, or a declared column has a
            reserved name.
    """

    def __init__(
        self, session: SparkSession, name: str, schema: StructType | None, key: Sequence[str]
    ) -> None:
        self._has_declared_schema = schema is not None
        if schema is not None:
            check_column_names(schema, key)
        self._session, self._name, self._key = session, name, key
        self._schema = _nullable_columns(schema or StructType())
        self._is_path = "/" in name
        if not self._is_path and not split_table_name(name):
            raise BadConfig(
                f"expected the path, the URL or the name of a table, found {name!r}. Hint: a part "
                "of a name with characters other than letters, digits and _ needs backticks: "
                "shop.`accounts-2`."
            )
        self._sql_name = f"delta.{quote_identifier(name)}" if self._is_path else name
        self._has_checked_columns = False
        self._stored_columns = StructType()  # the columns of the version that `marks()` has read
        # The marks of a table that the first `apply` creates.
        self._start_marks: TableMarks | None = None
        self._next_version = 0  # the `txn` version of the next commit (rule 1)
        self._partition_columns: list[str] | None = None  # None: not read yet

    def columns(self) -> StructType:
        """Return the columns of the version that `marks()` has read, except position columns."""
        return StructType(
            [part for part in self._stored_columns if part.name not in POSITION_COLUMNS]
        )

    def create(self, start: TableMarks) -> None:
        """Let the next `apply` or `finish` create the table, if it does not exist by then.

        So a first batch that cannot be read leaves no table.
        """
        self._start_marks = start

    def finish(self) -> None:
        """Create the table without rows, if `create` was called.

        Raises:
            Superseded: the table exists already.
            BadConfig: the session has no Delta library.
        """
        if self._start_marks is None:
            return
        start = self._start_marks
        with self.translate_errors():
            self._set_commit_settings(start, start.version)
            empty = self._session.createDataFrame(
                [], StructType([*self._schema, *POSITION_COLUMNS.fields()])
            )
            writer = empty.write.format("delta").mode("error")
            if self._is_path:
                writer.save(self._name)
            else:
                writer.saveAsTable(self._name)
        self._start_marks, self._next_version = None, start.version + 1
        self._stored_columns = empty.schema

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest version; None if there is no table.

        Raises:
            BadConfig: the session has no Delta library, or a column of the table is not declared,
                or has another type than the declared one.
        """
        with self.translate_errors():
            commits, stored_state = self._newest_commits(follower)
            if not commits:
                if self._start_marks is None:
                    return None
                return TableState(
                    encode_marks(self._start_marks), self._start_marks.version, (), has_rows=False
                )
            self._start_marks = None
            self._stored_columns = self._read_table().schema
            self._check_columns()
            state = stored_state or self._state_without_marks(commits, follower)
            self._next_version = 0 if state.version is None else state.version + 1
            return state

    def apply(self, changes: DataFrame | None, marks: TableMarks) -> bool:
        """Merge changes and store the marks in one commit; return whether there is a new version.

        Raises:
            BadRequest: a key has changes in two partitions.
            Superseded: another commit came first (rule 1).
            BadConfig: the session has no Delta library for this version of Spark.
            The errors of `read` of the log: the changes cannot be read.
        """
        schema = self._columns_of_changes(changes)
        first = changes.persist() if changes is not None and self._start_marks is not None else None
        try:
            if first is not None:
                with self.translate_errors():
                    first.count()  # an error is raised before the table exists
                self._schema = schema
            self.finish()
            with self.translate_errors():
                is_committed = self._merge_changes(changes, schema, marks)
        finally:
            if first is not None:
                first.unpersist()
        if not is_committed:
            raise Superseded(
                f"table {self._name}: another commit of follower {marks.follower!r} came first"
            )
        return True

    def _columns_of_changes(self, changes: DataFrame | None) -> StructType:
        """Return the table columns of changes; Delta may not support the name of a column."""
        reserved = {*POSITION_COLUMNS._asdict(), DELETED_COLUMN}
        schema = _nullable_columns(
            [] if changes is None else [x for x in changes.schema if x.name not in reserved]
        )
        if schema and not self._has_declared_schema:
            check_schema(arrow_schema(schema))
        return schema

    def _merge_changes(
        self, changes: DataFrame | None, schema: StructType, marks: TableMarks
    ) -> bool:
        """Merge changes; return False if Delta has skipped the `MERGE` (rule 1)."""
        view = f"waltz_{uuid.uuid4().hex}"  # noqa: TID251 - a name on no other server
        into_clause = f"INTO {self._sql_name} AS target USING global_temp.{view} AS source ON"
        if changes is None or not set(self._key) <= set(schema.names):  # no rows to merge
            changes = self._session.createDataFrame([], "partition int")
            merge = (
                f"MERGE {into_clause} target._partition = source.partition WHEN MATCHED THEN DELETE"
            )
        else:
            self._add_key_columns(schema)
            merge = self._merge_text(into_clause, schema)
            changes = self._with_null_text_checks(changes)
        self._set_commit_settings(marks, self._next_version)
        # The changes may belong to another session; sessions share global views.
        changes.createOrReplaceGlobalTempView(view)
        try:
            return bool(self._session.sql(merge).collect())
        finally:
            self._session.catalog.dropGlobalTempView(view)

    def _with_null_text_checks(self, changes: DataFrame) -> DataFrame:
        """Make changes fail if a partition column has a text that Delta reads as null (rule 5)."""
        if self._partition_columns is None:
            detail = self._session.sql(f"DESCRIBE DETAIL {self._sql_name}").collect()[0]
            self._partition_columns = list(detail["partitionColumns"])
        checked = {}
        for part in changes.schema:
            if part.name in self._partition_columns and isinstance(part.dataType, StringType):
                text, position = (
                    F.col(quote_identifier(part.name)),
                    map(F.col, ("partition", "transaction_id")),
                )
                start = F.format_string(f"{NULL_TEXT_PREFIX}%d, transaction %d", *position)
                message_parts = (F.lit(f", column {part.name!r}, found '"), text, F.lit("'."))
                error = F.raise_error(F.concat(start, *message_parts)).cast("string")
                checked[part.name] = F.when(text.isin(*_NULL_TEXTS), error).otherwise(text)
        return changes.withColumns(checked) if checked else changes

    def _add_key_columns(self, schema: StructType) -> None:
        """Add missing key columns to an empty table: the condition of a `MERGE` needs them."""
        new = [
            part
            for part in schema
            if part.name in self._key and part.name not in self._stored_columns.names
        ]
        if not new:
            return
        if self._read_table().limit(1).collect():
            raise BadConfig(
                f"table {self._name}: expected key column {new[0].name!r} in the table, found "
                f"the columns {', '.join(self._stored_columns.names)}"
            )
        columns = ", ".join(
            f"{quote_identifier(part.name)} {part.dataType.simpleString()}" for part in new
        )
        self._session.sql(f"ALTER TABLE {self._sql_name} ADD COLUMNS ({columns})")
        self._stored_columns = self._read_table().schema

    def _set_commit_settings(self, marks: TableMarks, version: int) -> None:
        self._session.conf.set(_METADATA_SETTING, encode_marks(marks))
        self._session.conf.set(_APPLICATION_SETTING, marks.application)
        self._session.conf.set(_VERSION_SETTING, str(version))
        self._session.conf.set(_AUTO_COMPACTION_SETTING, "false")
        self._session.conf.set(_TIME_ZONE_SETTING, "UTC")

    def _merge_text(self, into_clause: str, schema: StructType) -> str:
        is_new = _type_names(schema).items() - _type_names(self._stored_columns).items()
        evolving = "WITH SCHEMA EVOLUTION " if is_new else ""
        return f"MERGE {evolving}{into_clause} {merge_actions(schema.names, self._key)}"

    def _newest_commits(self, follower: TableMarks) -> tuple[list[DeltaCommit], TableState | None]:
        """Return commits, newest first (none without a table), and the state found in them."""
        limit = _COMMITS_READ_FIRST
        while True:
            commits = list(map(_commit_of_row, self._read_history(limit)))
            is_complete = len(commits) < limit
            if newest := find_newest_commit(follower, commits, is_complete=is_complete):
                metadata, other_commits = newest
                marks = decode_marks(metadata)
                assert marks is not None, "the commit is of the follower"
                # The `txn` of the follower has this version or a lower one.
                return commits, TableState(metadata, marks.version, other_commits)
            if is_complete:
                return commits, None
            limit *= 100

    def _read_history(self, limit: int) -> list[Row]:
        try:
            history = self._session.sql(f"DESCRIBE HISTORY {self._sql_name} LIMIT {limit}")
            mode = F.coalesce(F.col("operationParameters")["mode"], F.lit("")).alias("mode")
            return history.select("version", "operation", mode, "userMetadata").collect()
        except PySparkException as error:
            if _NO_TABLE_ERRORS.search(str(error)):
                return []
            raise

    def _read_table(self) -> DataFrame:
        if self._is_path:
            return self._session.read.format("delta").load(self._name)
        return self._session.table(self._name)

    def _state_without_marks(
        self, commits: Sequence[DeltaCommit], follower: TableMarks
    ) -> TableState:
        other_marks = [
            marks for commit in commits if (marks := decode_marks(commit.metadata)) is not None
        ]
        has_rows = bool(other_marks) or bool(self._read_table().limit(1).collect())
        rules = other_marks[0].rules if other_marks else None
        return TableState(None, self._stored_version(follower.application), (), has_rows, rules)

    def _stored_version(self, application: str) -> int | None:
        """Return the newest `txn` version of an application; only Delta's log files contain it."""
        location = self._session.sql(f"DESCRIBE DETAIL {self._sql_name}").collect()[0]["location"]
        escaped = re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", location)
        reader = self._session.read.schema("txn struct<appId: string, version: bigint>")
        version_rows = []
        for ending in ("json", "parquet"):
            parts = reader.format(ending).option("pathGlobFilter", f"*.{ending}")
            versions = parts.load(f"{escaped}/_delta_log").where(F.col("txn.appId") == application)
            version_rows += versions.agg(F.max("txn.version")).collect()
        return max((row[0] for row in version_rows if row[0] is not None), default=None)

    def _check_columns(self) -> None:
        if self._has_checked_columns or not self._has_declared_schema:
            return
        check_table_columns(
            self._name, self._stored_columns, (*self._schema, *POSITION_COLUMNS.fields())
        )
        self._has_checked_columns = True

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of Spark, its tasks and Delta to errors of the project."""
        return translate_errors(f"table {self._name}", self._session)


def _commit_of_row(row: Row) -> DeltaCommit:
    operation = full_operation_name(row["operation"] or "", row["mode"])
    return DeltaCommit(row["version"], operation, row["userMetadata"])


def _nullable_columns(fields: Iterable[StructField]) -> StructType:
    """Return the fields as nullable columns without metadata."""
    return StructType([StructField(part.name, part.dataType) for part in fields])


def _type_names(schema: StructType) -> dict[str, str]:
    return {part.name: part.dataType.simpleString() for part in schema}
