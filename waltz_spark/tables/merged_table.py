"""A Delta table of a follower in Spark, written by `MERGE`.

Each commit has the marks as `userMetadata`, and the identifier of the follower as `txn`. Delta
takes both from the settings of the session, so the session belongs to the table.

Rules:
    1. Delta skips a `MERGE` whose version it has, and rejects one if a commit with the same
       identifier came between its start and its end. Both raise `Superseded`.
    2. A commit of another follower of this name that came before the start of a `MERGE`, and after
       `marks` has read the table, is reported as a warning. Rows may be newer than the marks then,
       until the batches up to that commit are applied again.
    3. A table has the declared columns, `_partition` and `_transaction_id`: the place of the last
       change of the row.
"""

import contextlib
import logging
import re
import uuid
from collections.abc import Iterator, Sequence

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from waltz_core.errors import BadConfig, BadRequest, Superseded
from waltz_core.tables.follower import OtherCommit, TableState, operation_of
from waltz_core.tables.table_marks import TableMarks, decode, encode
from waltz_spark.failures import error_of
from waltz_spark.tables.log_changes import changes_schema
from waltz_spark.tables.merge_statement import (
    PLACE,
    check_names,
    error_of_key,
    merge_statement,
    quoted,
)
from waltz_spark.unwrapping import SPARK_ERRORS

_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APPLICATION = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
# How Spark and Delta report that there is no table, ...
_NO_TABLE = re.compile(
    r"DELTA_TABLE_ONLY_OPERATION|DELTA_MISSING_DELTA_TABLE|TABLE_OR_VIEW_NOT_FOUND|"
    r"DELTA_TABLE_NOT_FOUND|DELTA_PATH_DOES_NOT_EXIST"
)
_TABLE_EXISTS = re.compile(
    r"DELTA_PATH_EXISTS|TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_TABLE_ALREADY_EXISTS"
)
# ... another commit, ...
_CONFLICT = re.compile(
    r"\[(DELTA_CONCURRENT_\w+|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED)\S*\]"
)
# ... and a Spark without a library of Delta, or with that of another version.
_NO_LIBRARY = re.compile(
    r"NoSuchMethodError|NoSuchFieldError|NoClassDefFoundError|IncompatibleClassChangeError|"
    r"AbstractMethodError|DATA_SOURCE_NOT_FOUND|DELTA_CONFIGURE_SPARK_SESSION\w*|"
    r"PARSE_SYNTAX_ERROR|UNSUPPORTED_FEATURE.TABLE_OPERATION|ClassNotFoundException: \S*delta\S*"
)
_HISTORY_LIMIT = 5  # commits to read at first; the newest one of the follower is among them

_log = logging.getLogger(__name__)


class MergedDeltaTable:
    """A Delta table of one follower (`FollowedTable`).

    Args:
        session: a session for this table only.
        name: the name of the table, or its path or URL, which has a slash.
        schema: the declared columns.
        key: the key columns.

    Raises:
        BadConfig: a key column is not declared, or a declared column has a reserved name.
    """

    def __init__(
        self, session: SparkSession, name: str, schema: StructType, key: Sequence[str]
    ) -> None:
        check_names(schema, key)
        self._session, self._name, self._key = session, name, key
        self._schema = StructType([StructField(part.name, part.dataType) for part in schema])
        self._is_path = "/" in name
        self._sql = f"delta.{quoted(name)}" if self._is_path else name
        self._is_checked = self._has_new_columns = False
        self._version: int | None = None  # which `marks` has read

    def finish(self) -> None:
        """Do nothing: `create` has created the table."""

    def create(self, start: TableMarks) -> None:
        """Create the table, with the marks in its first commit.

        Raises:
            Superseded: the table exists.
            BadConfig: the session has no Delta.
        """
        with self.reported():
            self._set_identifier(start)
            empty = self._session.createDataFrame([], StructType([*self._schema, *PLACE.fields()]))
            writer = empty.write.format("delta").mode("error")
            if self._is_path:
                writer.save(self._name)
            else:
                writer.saveAsTable(self._name)

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest version; None if there is no table.

        Raises:
            BadConfig: the session has no Delta, or a column of the table has another type than the
                declared one, or is not declared.
        """
        with self.reported():
            commits, found = self._newest_commits(follower)
            if not commits:
                return None
            self._check_columns()
            self._warn_of_another(commits, follower)
            self._version = commits[0]["version"]
            return found or self._state_without_marks(commits, follower)

    def apply(self, changes: DataFrame | None, marks: TableMarks) -> bool:
        """Merge changes, and commit the marks with them; return whether there is a new version.

        Raises:
            BadRequest: a key has changes in two partitions.
            Superseded: rule 1.
            BadConfig: the session has no Delta for this Spark.
            Like `read` of the log: the changes cannot be read.
        """
        if changes is None:
            changes = self._session.createDataFrame([], changes_schema(self._schema))
        view = f"waltz_{uuid.uuid4().hex}"  # noqa: TID251 - a name on no other server
        merge = merge_statement(
            self._sql,
            f"global_temp.{view}",
            self._schema.names,
            self._key,
            evolving=self._has_new_columns,
        )
        with self.reported():
            self._set_identifier(marks)
            # The changes may be of another session, which shares the global views.
            changes.createOrReplaceGlobalTempView(view)
            try:
                is_committed = bool(self._session.sql(merge).collect())
            finally:
                self._session.catalog.dropGlobalTempView(view)
        if not is_committed:
            raise Superseded(
                f"table {self._name}: another commit has version {marks.version} of follower "
                f"{marks.follower!r} or a later one"
            )
        return True

    def _set_identifier(self, marks: TableMarks) -> None:
        self._session.conf.set(_METADATA, encode(marks))
        self._session.conf.set(_APPLICATION, marks.application)
        self._session.conf.set(_VERSION, str(marks.version))

    def _newest_commits(self, follower: TableMarks) -> tuple[list[Row], TableState | None]:
        """Return commits, newest first, and the state that they have; none if there is no table."""
        limit = _HISTORY_LIMIT
        while True:
            commits = self._history(limit)
            found = _state_of(commits, follower)
            if found is not None or len(commits) < limit:
                return commits, found
            limit *= 100

    def _history(self, limit: int) -> list[Row]:
        try:
            found = self._session.sql(f"DESCRIBE HISTORY {self._sql} LIMIT {limit}")
            mode = F.coalesce(F.col("operationParameters")["mode"], F.lit("")).alias("mode")
            return found.select("version", "operation", mode, "userMetadata").collect()
        except PySparkException as error:
            if _NO_TABLE.search(str(error)):
                return []
            raise

    def _frame(self) -> DataFrame:
        if self._is_path:
            return self._session.read.format("delta").load(self._name)
        return self._session.table(self._name)

    def _state_without_marks(self, commits: Sequence[Row], follower: TableMarks) -> TableState:
        has_follower = any(decode(row["userMetadata"]) is not None for row in commits)
        has_rows = has_follower or bool(self._frame().limit(1).collect())
        return TableState(None, self._stored_version(follower.application), (), has_rows)

    def _stored_version(self, application: str) -> int | None:
        """Return the newest version of an application in Delta's log; no statement returns it."""
        location = self._session.sql(f"DESCRIBE DETAIL {self._sql}").collect()[0]["location"]
        escaped = re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", location)
        reader = self._session.read.schema("txn struct<appId: string, version: bigint>")
        found = []
        for ending in ("json", "parquet"):
            parts = reader.format(ending).option("pathGlobFilter", f"*.{ending}")
            versions = parts.load(f"{escaped}/_delta_log").where(F.col("txn.appId") == application)
            found += versions.agg(F.max("txn.version")).collect()
        return max((row[0] for row in found if row[0] is not None), default=None)

    def _check_columns(self) -> None:
        if self._is_checked:
            return
        found = self._frame().schema
        declared = {part.name: part.dataType for part in (*self._schema, *PLACE.fields())}
        for part in found:
            if part.name not in declared:
                raise BadConfig(
                    f"table {self._name}: column {part.name!r} is not declared. Hint: declare all "
                    "columns of the table."
                )
            expected = declared[part.name].simpleString()
            if part.dataType.simpleString() != expected:
                raise BadConfig(
                    f"table {self._name}: column {part.name!r}: expected the declared type "
                    f"{expected}, found {part.dataType.simpleString()}"
                )
        self._has_new_columns = len(found) < len(declared)
        self._is_checked = True

    def _warn_of_another(self, commits: Sequence[Row], follower: TableMarks) -> None:
        """Report commits of another follower with this name, below one of this one (rule 2)."""
        if self._version is None:
            return
        new = [row for row in commits if row["version"] > self._version]
        mine = [row for row in new if _is_of(row, follower)]
        if len(mine) > 1:
            _log.warning(
                "follow.concurrent_follower table=%s versions=%s",
                self._name,
                ",".join(str(row["version"]) for row in reversed(mine)),
            )

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Raise errors of tasks and of Delta as errors of the project; others are Spark's own."""
        try:
            yield
        except SPARK_ERRORS as failure:
            text = str(failure)
            found = error_of(failure) or self._error_of_table(text)
            if found is None:
                raise
            raise found from failure

    def _error_of_table(self, text: str) -> BadConfig | BadRequest | Superseded | None:
        if twice := error_of_key(self._name, text):
            return twice
        if conflict := _CONFLICT.search(text) or _TABLE_EXISTS.search(text):
            return Superseded(f"table {self._name}: another commit came first ({conflict[0]})")
        if missing := _NO_LIBRARY.search(text):
            return BadConfig(
                f"table {self._name}: Spark {self._session.version} has no library of Delta that "
                f"works with it ({missing[0]}). Hint: Delta 4.4.0 has one for Spark 4.0, 4.1 and "
                "4.2 (io.delta:delta-spark_4.2_2.13:4.4.0), and none for 4.3; docs/tables.md has "
                "the settings of the session."
            )
        return None


def _state_of(commits: Sequence[Row], follower: TableMarks) -> TableState | None:
    """Return the newest commit of a follower, and the later ones; None if there is none."""
    others: list[OtherCommit] = []
    for row in commits:
        if _is_of(row, follower):
            metadata = row["userMetadata"]
            found = decode(metadata)
            assert found is not None, "it is of the follower"
            # One commit has both, so the version is that of the marks.
            return TableState(metadata, found.version, others)
        other = decode(row["userMetadata"])
        name = None if other is None else other.follower
        operation = operation_of(row["operation"] or "", row["mode"])
        others.append(OtherCommit(row["version"], operation, name))
    return None


def _is_of(row: Row, follower: TableMarks) -> bool:
    found = decode(row["userMetadata"])
    return found is not None and found.follower == follower.follower
