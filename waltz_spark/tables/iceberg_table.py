"""An Iceberg table that a follower in Spark writes, with `MERGE`.

The summary of each snapshot stores the marks in property `waltz.marks`. Iceberg reads the property
from the settings of the session, so the session belongs to the table.

Rules:
    1. Let v be the snapshot that `marks()` has read. No other commit may come between v and the
       snapshot of the next batch. So a batch is committed to its own branch, which begins at v.
       Then the branch `main` is moved to the new snapshot. If `main` is no longer at v, Iceberg
       rejects this move, and the follower raises `Superseded`. If another program has dropped the
       branch, Iceberg commits the batch on top of `main`, in a new branch. So the follower also
       checks that the parent of the new snapshot is v.
    2. Every snapshot in the history of `main` contains its marks and the rows up to these marks. So
       a rollback to such a snapshot needs no repair: the follower continues from the snapshot's
       marks.
    3. Snapshots that only replace files (compaction) do not count as commits of other programs.
    4. The position columns are `_log_partition` and `_transaction_id`, because `_partition` is one
       of Iceberg's metadata columns.
    5. If a batch has values for columns that the table lacks, the follower adds these columns
       before it writes the batch.
"""

import contextlib
import re
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from waltz_core.errors import BadConfig, Superseded
from waltz_core.tables.follower import OtherCommit, TableState
from waltz_core.tables.table_marks import StoredRules, TableMarks, decode_marks, encode_marks
from waltz_spark.tables.merge_statement import (
    PositionColumns,
    check_column_names,
    check_table_columns,
    merge_actions,
    quote_identifier,
    split_table_name,
)
from waltz_spark.tables.spark_errors import ICEBERG, translate_errors

_MARKS_PROPERTY = "waltz.marks"
_MARKS_SETTING = f"spark.sql.iceberg.snapshot-property.{_MARKS_PROPERTY}"
_POSITION_COLUMN_NAMES = PositionColumns(partition="_log_partition")  # rule 4
# Iceberg can create a table that has a column with such a name, but cannot read it.
_METADATA_COLUMNS = (
    "_change_ordinal",
    "_change_type",
    "_commit_snapshot_id",
    "_file",
    "_last_updated_sequence_number",
    "_partition",
    "_pos",
    "_row_id",
    "_spec_id",
)
_BRANCH_PREFIX = "waltz_"  # the prefix of branch names (rule 1)
_MAINTENANCE_OPERATION = "replace"  # rule 3
# Spark types that Iceberg stores as other types, so the next run would find another type.
_UNSUPPORTED_TYPES = {"tinyint": "int", "smallint": "int"}
_NO_TABLE_ERRORS = re.compile(r"TABLE_OR_VIEW_NOT_FOUND|NoSuchTableException|SCHEMA_NOT_FOUND")
_SNAPSHOTS_READ_FIRST = 20  # the number to read at first; usually one of them is of the follower


class _BranchHead(NamedTuple):
    """The newest snapshot of a branch, and its parent."""

    snapshot: int
    parent: int | None


class MergedIcebergTable:
    """An Iceberg table of one follower (implements `FollowedTable`).

    Args:
        session: a session for this table only.
        name: the name of the table, with its catalog and namespace.
        schema: the declared columns.
        key: the key columns.

    Raises:
        BadConfig: the name is not complete, a key column is not declared, or a declared column has
            a reserved name or a type that Iceberg lacks.
    """

    def __init__(
        self, session: SparkSession, name: str, schema: StructType, key: Sequence[str]
    ) -> None:
        check_column_names(schema, key, {*_POSITION_COLUMN_NAMES, *_METADATA_COLUMNS})
        if len(split_table_name(name)) < 3:
            raise BadConfig(
                "expected the name of an Iceberg table with its catalog and namespace, such as "
                f"lake.shop.accounts, found {name!r}"
            )
        for part in schema:
            if stored := _UNSUPPORTED_TYPES.get(part.dataType.simpleString()):
                raise BadConfig(
                    f"column {part.name!r}: Iceberg has no type {part.dataType.simpleString()}. "
                    f"Hint: declare it as {stored}."
                )
        self._session, self._name, self._key = session, name, key
        self._columns = [StructField(part.name, part.dataType) for part in schema]
        self._schema = StructType([*self._columns, *_POSITION_COLUMN_NAMES.fields()])
        self._branch = f"{_BRANCH_PREFIX}{uuid.uuid4().hex}"  # noqa: TID251 - a name on no other server
        # The marks of a table that the first `apply` creates.
        self._start_marks: TableMarks | None = None
        self._base_snapshot: int | None = None  # the snapshot of `main` that `marks()` has read
        self._new_columns: list[StructField] | None = None  # to be added; None: not checked
        self._has_dropped_branches = False  # whether the branches of earlier runs were dropped

    def create(self, start: TableMarks) -> None:
        """Let the next `apply` or `finish` create the table, if it does not exist by then.

        So a first batch that cannot be read leaves no table.
        """
        self._start_marks = start

    def finish(self) -> None:
        """Create the table if `create` was called; its first snapshot has the marks of its start.

        Raises:
            Superseded: the table exists already.
            BadConfig: the session has no Iceberg library.
        """
        if self._start_marks is None:
            return
        with self.translate_errors():
            self._session.conf.set(_MARKS_SETTING, encode_marks(self._start_marks))
            empty = self._session.createDataFrame([], self._schema)
            empty.writeTo(self._name).using("iceberg").create()
            self._start_marks = None
            self._base_snapshot, self._new_columns = self._first_snapshot(), []

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest snapshot, or of a table that is not yet created.

        The result is None if there is no table.

        Raises:
            BadConfig: the session has no Iceberg library, or a column of the table is not declared,
                or has another type than the declared one.
        """
        with self.translate_errors():
            try:
                self._session.sql(f"REFRESH TABLE {self._name}")
                branches = self._branches()
            except PySparkException as error:
                if not _NO_TABLE_ERRORS.search(str(error)):
                    raise
                if self._start_marks is None:
                    return None
                return TableState(
                    encode_marks(self._start_marks), self._start_marks.version, (), has_rows=False
                )
            self._start_marks = None
            if self._new_columns is None:
                self._new_columns = self._missing_columns()
            self._base_snapshot = branches.get("main")
            limit = _SNAPSHOTS_READ_FIRST
            while True:
                snapshots = self._newest_snapshots(limit)
                state = _state_of(snapshots, self._base_snapshot, follower)
                if state.metadata is not None or len(snapshots) < limit:
                    return state
                limit *= 100

    def apply(self, changes: DataFrame | None, marks: TableMarks) -> bool:
        """Merge changes and store the marks in one commit; return whether there is a new snapshot.

        Raises:
            BadRequest: a key has changes in two partitions.
            Superseded: another commit came first (rule 1).
            BadConfig: the session has no Iceberg library for this version of Spark.
            The errors of `read` of the log: the changes cannot be read.
        """
        first = changes.persist() if changes is not None and self._start_marks is not None else None
        try:
            if first is not None:
                with self.translate_errors():
                    first.count()  # an error is raised before the table exists
            self.finish()
            with self.translate_errors():
                return self._commit_changes(changes, marks)
        finally:
            if first is not None:
                first.unpersist()

    def _commit_changes(self, changes: DataFrame | None, marks: TableMarks) -> bool:
        self._add_columns()
        begin = self._ensure_base_snapshot()
        self._session.sql(
            f"ALTER TABLE {self._name} CREATE OR REPLACE BRANCH {self._branch} "
            f"AS OF VERSION {begin}"
        )
        self._session.conf.set(_MARKS_SETTING, encode_marks(marks))
        branch = f"{self._name}.branch_{self._branch}"
        if changes is None:
            self._session.createDataFrame([], self._schema).writeTo(branch).append()
        else:
            self._merge_into(branch, changes)
        head = self._branch_heads().get(self._branch)
        if head is not None and head.snapshot == begin:
            return False
        if head is None or head.parent != begin:
            raise Superseded(
                f"table {self._name}: another program has dropped branch {self._branch}"
            )
        catalog, *name_parts = split_table_name(self._name)
        table = (
            ".".join(map(quote_identifier, name_parts)).replace("\\", "\\\\").replace("'", "\\'")
        )
        self._session.sql(
            f"CALL {quote_identifier(catalog)}.system.fast_forward(table => '{table}', "
            f"branch => 'main', to => '{self._branch}')"
        ).collect()
        self._drop_branches()
        return True

    def _merge_into(self, branch: str, changes: DataFrame) -> None:
        view = f"waltz_{uuid.uuid4().hex}"  # noqa: TID251 - a name on no other server
        # The changes may belong to another session; sessions share global views.
        changes.createOrReplaceGlobalTempView(view)
        try:
            actions = merge_actions(
                [part.name for part in self._columns], self._key, _POSITION_COLUMN_NAMES
            )
            self._session.sql(
                f"MERGE INTO {branch} AS target USING global_temp.{view} AS source ON {actions}"
            ).collect()
        finally:
            self._session.catalog.dropGlobalTempView(view)

    def _ensure_base_snapshot(self) -> int:
        """Return the snapshot that `marks()` has read; create one if a user's table has none."""
        if self._base_snapshot is None:
            self._session.conf.unset(_MARKS_SETTING)
            self._session.createDataFrame([], self._schema).writeTo(self._name).append()
            self._base_snapshot = self._first_snapshot()
        return self._base_snapshot

    def _first_snapshot(self) -> int:
        """Return the first snapshot, which this table has committed.

        Raises:
            Superseded: `main` is at another snapshot, with marks that were not read (rule 1).
        """
        head = self._branch_heads()["main"]
        if head.parent is not None:
            raise Superseded(f"table {self._name}: another commit came first")
        return head.snapshot

    def _branches(self) -> dict[str, int]:
        """Return the ID of the newest snapshot of each branch, by name."""
        branches = self._session.sql(
            f"SELECT name, snapshot_id FROM {self._name}.refs WHERE type = 'BRANCH'"  # noqa: S608 - the user's SQL
        )
        return dict(map(tuple, branches.collect()))

    def _branch_heads(self) -> dict[str, _BranchHead]:
        """Return the newest snapshot of each branch and its parent, by name."""
        heads = self._session.sql(
            "SELECT r.name, r.snapshot_id, s.parent_id "  # noqa: S608 - the user's SQL
            f"FROM {self._name}.refs r JOIN {self._name}.snapshots s "
            "ON r.snapshot_id = s.snapshot_id WHERE r.type = 'BRANCH'"
        )
        return {
            row["name"]: _BranchHead(row["snapshot_id"], row["parent_id"])
            for row in heads.collect()
        }

    def _drop_branches(self) -> None:
        """Drop the branches of earlier runs, which would keep their snapshots from expiring.

        A branch is kept if its newest snapshot is that of `main`, or the next one after it: another
        follower may use this branch. `main` can no longer move to the other branches.
        """
        if self._has_dropped_branches:
            return
        self._has_dropped_branches = True
        heads = self._branch_heads()
        main = heads["main"].snapshot
        for name, head in heads.items():
            if name.startswith(_BRANCH_PREFIX) and main not in head:
                self._session.sql(f"ALTER TABLE {self._name} DROP BRANCH IF EXISTS {name}")

    def _newest_snapshots(self, limit: int) -> list[Row]:
        """Return the newest `limit` snapshots, including those of other branches."""
        return self._session.sql(
            "SELECT snapshot_id, parent_id, operation, "  # noqa: S608 - the user's SQL
            f"summary['{_MARKS_PROPERTY}'] AS marks, summary['total-records'] AS rows "
            f"FROM {self._name}.snapshots ORDER BY committed_at DESC LIMIT {limit}"
        ).collect()

    def _missing_columns(self) -> list[StructField]:
        """Return the declared columns that the table lacks."""
        table_schema = self._session.table(self._name).schema
        check_table_columns(self._name, table_schema, self._schema)
        return [part for part in self._schema if part.name not in table_schema.names]

    def _add_columns(self) -> None:
        """Add the declared columns that the table lacks (rule 5)."""
        if self._new_columns:
            columns = ", ".join(
                f"{quote_identifier(part.name)} {_type_in_sql(part.dataType)}"
                for part in self._new_columns
            )
            self._session.sql(f"ALTER TABLE {self._name} ADD COLUMNS ({columns})")
            self._new_columns = []

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of Spark, its tasks and Iceberg to errors of the project."""
        return translate_errors(f"table {self._name}", self._session, ICEBERG)


def _state_of(snapshots: Sequence[Row], newest: int | None, follower: TableMarks) -> TableState:
    """Return the state at the newest snapshot of a follower, with later commits of other programs.

    Args:
        snapshots: snapshots of all branches.
        newest: the newest snapshot of `main`; only its ancestors count.
        follower: the name and the cluster of the follower.
    """
    by_id = {row["snapshot_id"]: row for row in snapshots}
    other_commits: list[OtherCommit] = []
    rules: StoredRules | None = None
    at = newest
    while at in by_id:
        row = by_id[at]
        marks = decode_marks(row["marks"])
        if marks is not None and marks.follower == follower.follower:
            return TableState(row["marks"], marks.version, other_commits)
        if row["operation"] != _MAINTENANCE_OPERATION:
            name = None if marks is None else marks.follower
            rules = rules or (marks and marks.rules)
            other_commits.append(OtherCommit(row["snapshot_id"], row["operation"] or "", name))
        at = row["parent_id"]
    has_rows = newest in by_id and by_id[newest]["rows"] != "0"
    # An expired snapshot may have had marks.
    has_follower = at is not None or any(
        other_commit.follower is not None for other_commit in other_commits
    )
    return TableState(None, None, (), has_rows=has_rows or has_follower, rules=rules)


def _type_in_sql(kind: DataType) -> str:
    """Return a type in SQL syntax; Spark's simple string does not quote the names of fields."""
    if isinstance(kind, ArrayType):
        return f"ARRAY<{_type_in_sql(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{_type_in_sql(kind.keyType)}, {_type_in_sql(kind.valueType)}>"
    if isinstance(kind, StructType):
        fields = ", ".join(
            f"{quote_identifier(part.name)}: {_type_in_sql(part.dataType)}" for part in kind
        )
        return f"STRUCT<{fields}>"
    return kind.simpleString()
