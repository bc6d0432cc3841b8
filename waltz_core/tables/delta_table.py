"""A Delta table of a follower, written with deltalake: the only file that imports this library.

Like commits of delta-spark, each commit contains the marks as `userMetadata` of its `commitInfo`.
It also contains the identifier of the follower as `txn`.

Rules:
    1. If `marks()` has read version v, the commit must become version v + 1. The library's retry on
       a newer version is disabled.
    2. A table has the declared columns and two position columns. In each row, the position columns
       `_partition` and `_transaction_id` name the transaction of the row's last change.
    3. If a key has changes in two partitions, the merge fails. (`last_changes` detects this error
       only within one batch.)
    4. The batch that contains the first value of an inferred column commits this column, even if
       the batch has no other effect. So the columns do not depend on the sizes of batches.
    5. The follower rejects types that Delta does not support, because the library would convert
       them. It also rejects schemas that the library can commit but not read again.
    6. Delta stores the value of a partition column as a text. The follower rejects types and values
       that such a text does not preserve.
    7. A table is created together with its first changes, so that a failed first batch leaves no
       empty table.
    8. If a merge added fields to a struct, the library would write null for the whole struct in
       unchanged rows. So a separate commit adds the fields before the merge. The marks of this
       commit are the current marks of the table.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Superseded
from waltz_core.tables.delta_columns import check_schema
from waltz_core.tables.delta_commits import DeltaCommit, find_newest_commit, full_operation_name
from waltz_core.tables.delta_errors import TWO_PARTITIONS_PREFIX, library_error
from waltz_core.tables.follower import TABLE_REMOVED_TEXT, TableState
from waltz_core.tables.inferred_columns import LOG_COLUMNS, field_count
from waltz_core.tables.row_changes import DELETED_COLUMN, ArrowTable
from waltz_core.tables.table_marks import TableMarks, decode_marks, encode_marks

try:
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError, TableNotFoundError
except ModuleNotFoundError:
    raise BadConfig(
        "Delta tables need the package deltalake. Hint: run pip install 'waltz-spark[tables]'."
    ) from None

# The position columns of the table (rule 2), and the columns of the changes from which they come.
_POSITION_COLUMNS: Final = {"_partition": "partition", "_transaction_id": "transaction_id"}
_POSITION_TYPES: Final = {"_partition": pa.int32(), "_transaction_id": pa.int64()}
# Rule 6: the library writes negative decimals as texts that it cannot read, and alters binaries.
_PARTITION_COLUMN_TYPES = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date32,
    pa.types.is_timestamp,
)


class FollowedDeltaTable:
    """A Delta table of one follower.

    Args:
        uri: a directory, or a URL of an object store.
        schema: the declared columns; None if the columns are those of the changes.
        key: the key columns.

    Raises:
        BadConfig: a column has a name or a type that Delta does not support, there is no key, or a
            key column is not declared.
    """

    def __init__(self, uri: str, schema: ArrowSchema | None, key: Sequence[str]) -> None:
        self._has_declared_columns = schema is not None
        if not key:
            raise BadConfig("key: expected one or more columns for a Delta table, found none")
        if schema is not None:
            check_schema(schema)
            if missing := [name for name in key if name not in schema.names]:
                raise BadConfig(
                    f"key: expected columns of the table, found {missing[0]!r}. Hint: declare this "
                    "column, or correct the key."
                )
        self._schema = _with_position_columns(schema or pa.schema([]))
        self._uri, self._key = uri, list(key)
        self._table: DeltaTable | None = None
        # The marks of a table before its creation (rule 7).
        self._start_marks: TableMarks | None = None
        self._state: tuple[int, TableState] | None = None  # the version of the table, and its state

    def columns(self) -> ArrowSchema:
        """Return the columns of the version that `marks()` has read, except position columns."""
        schema = self._schema if self._table is None else _schema_of(self._table)
        return pa.schema([part for part in schema if part.name not in _POSITION_COLUMNS])

    def create(self, start: TableMarks) -> None:
        """Request that the next `apply` with an effect, or `finish`, creates the table (rule 7)."""
        self._start_marks = start

    def finish(self) -> None:
        """Create the table if `create` was called; the first commit contains the start marks.

        Raises:
            Superseded: the table exists already.
            The errors of `library_error`: the library reports an error.
        """
        if self._start_marks is None:
            return
        with self._translate_errors():
            try:
                self._table = DeltaTable.create(
                    self._uri,
                    self._schema,
                    mode="error",
                    commit_properties=_commit_properties(self._start_marks),
                )
            except DeltaError:
                if DeltaTable.is_deltatable(self._uri):
                    raise Superseded(f"table {self._uri}: another program has created it") from None
                raise
        self._start_marks = None

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest version, or of a table that is not created yet.

        Returns None if there is no table.

        Raises:
            BadConfig: a column of the table is not declared, or has another type than the declared
                one. Or a partition column has a type that the library changes.
            BadFormat: the table was removed.
            The errors of `library_error`: the library reports an error.
        """
        with self._translate_errors():
            if self._table is None:
                try:
                    table = DeltaTable(self._uri)
                except TableNotFoundError:
                    if self._start_marks is None:
                        return None
                    return TableState(
                        encode_marks(self._start_marks),
                        self._start_marks.version,
                        (),
                        has_rows=False,
                    )
                _check_partition_types(table)
                if self._has_declared_columns:
                    self._check_columns(table)
                self._table, self._start_marks = table, None
            else:
                self._table.update_incremental()
                if not self._table.history(1):  # an update would find nothing new there
                    raise BadFormat(TABLE_REMOVED_TEXT)
            # NB: if newer commits exist, the history lists these commits, but with wrong version
            # numbers. So the state is read again until no newer version exists.
            while self._state is None or self._state[0] != self._table.version():
                self._state = self._table.version(), _read_table_state(self._table, follower)
                self._table.update_incremental()
            return self._state[1]

    def apply(self, changes: ArrowTable | None, marks: TableMarks) -> bool:
        """Merge changes, and commit the marks with them; return whether there is a new version.

        Raises:
            BadRequest: a key has changes in two partitions, or a value of a partition column is
                an empty text.
            Superseded: the table has a later version than the version that `marks()` has read.
            The errors of `library_error`: the library reports another error.
        """
        if changes is not None and not changes.num_rows:
            return False
        rows = None if changes is None else self._rows_of_changes(changes)
        self.finish()
        table = self._table
        assert table is not None, "marks() was called"
        version_before = table.version()
        with self._translate_errors():
            if changes is None or rows is None:
                _commit_rows(table, _schema_of(table).empty_table(), marks)
                return True
            _check_partition_values(table, rows)
            if self._has_key(table):
                version_before = self._add_fields(table, rows)
                self._merge(
                    table, rows.append_column(DELETED_COLUMN, changes[DELETED_COLUMN]), marks
                )
            else:
                _commit_rows(table, rows.filter(pc.invert(changes[DELETED_COLUMN])), marks)
            return table.version() != version_before

    def _rows_of_changes(self, changes: ArrowTable) -> ArrowTable:
        """Return the rows of changes, with the columns of the table; raises BadConfig."""
        schema = self._schema if self._has_declared_columns else _inferred_schema(changes)
        columns = [changes[_POSITION_COLUMNS.get(name, name)] for name in schema.names]
        return pa.table(columns, schema=schema)

    def _has_key(self, table: DeltaTable) -> bool:
        """Whether the table has the key columns; raises BadConfig if rows exist without them."""
        missing = set(self._key) - set(self.columns().names)
        if missing and _has_rows(table):
            raise BadConfig(
                f"table {self._uri}: expected key column {min(missing)!r} in the table, found "
                f"the columns {', '.join(self.columns().names)}"
            )
        return not missing

    def _add_fields(self, table: DeltaTable, rows: ArrowTable) -> int:
        """Commit new fields of structs if there are any (rule 8); return the table's version."""
        version, table_schema = table.version(), _schema_of(table)
        shared = [name for name in rows.schema.names if name in table_schema.names]
        old, new = (
            field_count(schema.field(name).type for name in shared)
            for schema in (table_schema, rows.schema)
        )
        if new > old:
            assert self._state is not None, "marks() was called"
            _commit_rows(table, rows.slice(0, 0), decode_marks(self._state[1].metadata))
            version += 1
            if table.version() != version:
                raise Superseded(f"table {self._uri}: another program has committed a version")
        return version

    def _merge(self, table: DeltaTable, source: ArrowTable, marks: TableMarks) -> None:
        values = {
            _quote_name(name): f"source.{_quote_name(name)}" for name in source.schema.names[:-1]
        }
        is_deleted = f"source.{_quote_name(DELETED_COLUMN)}"
        is_key = (
            f"target.{quoted_name} = source.{quoted_name}"
            for quoted_name in map(_quote_name, self._key)
        )
        merge = table.merge(
            source,
            predicate=" AND ".join(is_key),
            source_alias="source",
            target_alias="target",
            merge_schema=True,  # NB: new columns are committed also without another effect (rule 4)
            commit_properties=_commit_properties(marks),
        )
        (
            merge.when_matched_delete(self._delete_condition(source.schema, is_deleted))
            .when_matched_update(values)
            .when_not_matched_insert(values, predicate=f"NOT {is_deleted}")
            .execute()
        )

    def _delete_condition(self, schema: ArrowSchema, is_deleted: str) -> str:
        """Return the condition `is_deleted`; it fails for a row of another partition (rule 3)."""
        key = ", ', ', ".join(_as_text(schema.field(name)) for name in self._key)
        positions = ", ' and ', ".join(
            f"'partition ', CAST({side}._partition AS VARCHAR), ', transaction ', "
            f"CAST({side}._transaction_id AS VARCHAR)"
            for side in ("target", "source")
        )
        message = f"concat('{TWO_PARTITIONS_PREFIX}(', {key}, ') in ', {positions}, '.')"
        return (
            "CASE WHEN target._partition <> source._partition "
            f"THEN CAST({message} AS BOOLEAN) ELSE {is_deleted} END"
        )

    def _check_columns(self, table: DeltaTable) -> None:
        for part in _schema_of(table):
            if part.name not in self._schema.names:
                raise BadConfig(
                    f"table {self._uri}: column {part.name!r} of the table is not declared. "
                    "Hint: declare all columns of the table."
                )
            declared_type = self._schema.field(part.name).type
            if _comparable_type(part.type) != _comparable_type(declared_type):
                raise BadConfig(
                    f"table {self._uri}: column {part.name!r} has type {part.type} in the table, "
                    f"but is declared as {declared_type}. Hint: the type of a column cannot "
                    "change; "
                    f"declare {part.type}, or use a new table."
                )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert errors of the library to errors of the project."""
        try:
            yield
        except (DeltaError, OSError) as error:
            raise library_error(self._uri, error) from error


def _schema_of(table: DeltaTable) -> ArrowSchema:
    return pa.schema(table.schema().to_arrow())


def _with_position_columns(schema: ArrowSchema) -> ArrowSchema:
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in _POSITION_TYPES.items())])


def _inferred_schema(changes: ArrowTable) -> ArrowSchema:
    """Return the schema of the table for changes with inferred columns; raises BadConfig."""
    reserved = (*LOG_COLUMNS, DELETED_COLUMN)
    inferred = pa.schema([part for part in changes.schema if part.name not in reserved])
    check_schema(inferred)
    return _with_position_columns(inferred)


def _commit_rows(table: DeltaTable, rows: ArrowTable, marks: TableMarks | None) -> None:
    """Commit rows, possibly none, and add columns that the table lacks."""
    write_deltalake(
        table, rows, mode="append", schema_mode="merge", commit_properties=_commit_properties(marks)
    )


def _check_partition_types(table: DeltaTable) -> None:
    """Reject types of partition columns that the library changes (rule 6)."""
    schema = _schema_of(table)
    for name in table.metadata().partition_columns:
        kind = schema.field(name).type
        if not any(is_type(kind) for is_type in _PARTITION_COLUMN_TYPES):
            raise BadConfig(
                f"partition column {name!r} of the table: expected a boolean, an integer, text, "
                f"a date or a timestamp, found {kind}. Hint: use another partition "
                "column."
            )


def _check_partition_values(table: DeltaTable, rows: ArrowTable) -> None:
    """Reject empty texts in partition columns: Delta reads them as null (rule 6)."""
    for name in table.metadata().partition_columns:
        if name not in rows.schema.names or not _is_text(rows.schema.field(name).type):
            continue
        row = pc.index(rows[name], pa.scalar("", rows.schema.field(name).type)).as_py()
        if row >= 0:
            partition, transaction = (
                rows[position_column][row].as_py() for position_column in _POSITION_COLUMNS
            )
            raise BadRequest(
                f"partition {partition}, transaction {transaction}: expected null or a text that "
                f"is not empty in partition column {name!r} of the table, found ''. Hint: use a "
                "table with another partition column."
            )


def _as_text(column: pa.Field) -> str:
    """Return a SQL expression for the value of a source column as text."""
    name = f"source.{_quote_name(column.name)}"
    is_binary = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    return f"encode({name}, 'hex')" if is_binary else f"CAST({name} AS VARCHAR)"


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _comparable_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without details that Delta does not store: names of children, large types."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_comparable_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_comparable_type(kind.key_type), _comparable_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, _comparable_type(part.type)) for part in kind])
    return kind


def _read_table_state(table: DeltaTable, follower: TableMarks) -> TableState:
    """Find the newest commit of a follower, and the commits to check.

    Read only the newest commits of the table first, and more of them if necessary.
    """
    version = table.transaction_version(follower.application)
    limit: int | None = 2
    while True:
        commits = list(map(_parse_commit, table.history(limit)))
        is_complete = limit is None or len(commits) < limit
        if newest_and_others := find_newest_commit(follower, commits, is_complete=is_complete):
            metadata, other_commits = newest_and_others
            return TableState(metadata, version, other_commits)
        if is_complete:
            marks = (decode_marks(each.metadata) for each in commits)
            rules = next((each.rules for each in marks if each is not None), None)
            has_rows = rules is not None or _has_rows(table)
            return TableState(None, version, (), has_rows, rules)
        limit = None if limit is None or limit > 1000 else limit * 8


def _parse_commit(entry: Mapping[str, Any]) -> DeltaCommit:
    mode = entry.get("operationParameters", {}).get("mode", "")
    operation = full_operation_name(entry.get("operation", ""), mode)
    return DeltaCommit(entry["version"], operation, entry.get("userMetadata"))


def _has_rows(table: DeltaTable) -> bool:
    counts = pa.table(table.get_add_actions(flatten=True))["num_records"]
    return bool(counts.null_count or pc.sum(counts).as_py())


def _commit_properties(marks: TableMarks | None) -> CommitProperties:
    """Return the properties of a commit; `marks` is None for a user's table without marks."""
    if marks is None:
        return CommitProperties(max_commit_retries=0)  # rule 1
    return CommitProperties(
        custom_metadata={"userMetadata": encode_marks(marks)},
        app_transactions=[Transaction(marks.application, marks.version)],
        max_commit_retries=0,
    )


def _quote_name(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
