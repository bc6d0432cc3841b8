"""An append-only table of Parquet files, written by a follower: one row for each transaction.

    TABLE/batch=0/_waltz.json          the start of the table, without rows
    TABLE/batch=1/NAME.parquet         the rows of a batch, in one file or several
    TABLE/batch=1/_waltz.json          the marks after the batch
    TABLE/_writing/                    files that are not in a batch yet; no reader lists them
    TABLE/_removed/                    such files from earlier runs, which are being deleted

Rules:
    1. A batch is complete when its directory contains `_waltz.json`, which is written last. In a
       local directory, a batch gets its final name only when it is complete, so readers see only
       complete batches. In an object store, readers must select the complete batches.
    2. Batches are numbered without gaps. The newest complete batch contains the marks of the table.
       The next run removes the files of an incomplete batch.
    3. A table has one follower at a time. In a local directory, a second follower that completes
       the same batch fails with `Superseded`. In an object store, the second follower is not
       detected. When a follower starts, it removes, in one step, all files that belong to no batch,
       including files of another follower. The other follower then cannot complete its batch.
       Before the rename that would complete the batch, it checks that its files still exist. A
       rename of removed files fails.
    4. A table has the declared columns and two position columns, `_partition` and
       `_transaction_id`. The newest file has all columns of the table. A column keeps its type.
    5. A table is created together with its first changes, so that a failed first batch leaves no
       empty table.
    6. Temporary errors raise `Unavailable`. Denied access, and values or types that Parquet does
       not support, are permanent errors.
"""

import errno
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from waltz_core.archive.store import ArchiveStore
from waltz_core.client.api.scanning import ArrowSchema
from waltz_core.errors import BadConfig, BadRequest, ObjectMissing, Superseded, Unavailable
from waltz_core.tables.delta_errors import CREDENTIALS_HINT, PERMISSION_HINT
from waltz_core.tables.follower import OtherCommit, TableState
from waltz_core.tables.inferred_columns import LOG_COLUMNS
from waltz_core.tables.row_changes import DELETED_COLUMN, ArrowTable, ChangeRules
from waltz_core.tables.table_marks import StoredRules, TableMarks, decode_marks, encode_marks

MARKS_FILE: Final = "_waltz.json"
_WRITING_FOLDER: Final = "_writing"
_REMOVED_FOLDER: Final = "_removed"
_COMPLETE_BATCH_PATTERN: Final = re.compile(rf"batch=(\d+)/{re.escape(MARKS_FILE)}")
# The position columns of the table (rule 4), and the columns of the changes from which they come.
_POSITION_COLUMNS: Final = {"_partition": "partition", "_transaction_id": "transaction_id"}
_POSITION_TYPES: Final = {"_partition": pa.int32(), "_transaction_id": pa.int64()}
_RESERVED_NAMES: Final = {
    *_POSITION_COLUMNS,
    DELETED_COLUMN,
    "batch",
}  # readers add a column `batch`
# Denied access: error numbers of a directory, and texts of the libraries for object stores.
_DENIED_ERRNOS: Final = (errno.EPERM, errno.EACCES, errno.EROFS)
_DENIED_PATTERN: Final = re.compile(
    r"ACCESS_DENIED|PERMISSION_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|"
    r"status\W+40[13]\b"
)
_DELTA_HINT = "Hint: use a Delta table for the current row of each key."


class FollowedParquetTable:
    """A table of Parquet files of one follower (implements `FollowedTable`).

    Args:
        uri: a directory, or a URL of an object store.
        schema: the declared columns; None if the columns are those of the changes.
        rules: how transactions become changes.

    Raises:
        BadConfig: the rules contain a key or deletes, or a column has a reserved name or a type
            that Parquet does not support.
    """

    def __init__(self, uri: str, schema: ArrowSchema | None, rules: ChangeRules) -> None:
        if rules.key or rules.delete_headers or rules.delete_where:
            raise BadConfig(
                "a Parquet table is append-only: expected no key and no rules for deletes, found "
                f"{'a key' if rules.key else 'rules for deletes'}. {_DELTA_HINT}"
            )
        self._schema = None if schema is None else with_position_columns(schema)
        _check_types(schema or ())
        self._uri = uri
        self._store = ArchiveStore(_url_of(uri))
        self._newest_batch = -1  # the number of the newest complete batch
        # The marks of a table before its creation (rule 5).
        self._start_marks: TableMarks | None = None
        self._has_checked_columns = False

    def columns(self) -> ArrowSchema:
        """Return the columns of the newest file, without the position columns."""
        with self._translate_errors():
            return pa.schema(
                [field for field in self._stored_schema() if field.name not in _POSITION_COLUMNS]
            )

    def create(self, start: TableMarks) -> None:
        """Request that the next batch, or `finish`, creates the table (rule 5).

        Raises:
            BadConfig: the directory has other files.
            Unavailable: the store reports an error.
        """
        with self._translate_errors():
            own_prefixes = (f"{_WRITING_FOLDER}/", f"{_REMOVED_FOLDER}/")
            other_files = [
                file_name
                for file_name in self._all_file_names()
                if not file_name.startswith(own_prefixes)
            ]
        if other_files and not any(map(_COMPLETE_BATCH_PATTERN.fullmatch, other_files)):
            raise BadConfig(
                f"table {self._uri}: expected an empty directory or a table of Parquet files, "
                f"found {other_files[0]}. Hint: use another directory."
            )
        self._start_marks = start

    def finish(self) -> None:
        """Create the table if `create` was called: an empty batch with the starting marks.

        Raises:
            Superseded: the table exists already.
            Unavailable: the store reports an error.
        """
        if self._start_marks is not None:
            self._publish([], self._start_marks)
            self._start_marks = None

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state after the newest complete batch, or of a table that is not created yet.

        Returns None if there is no table.

        Raises:
            BadConfig: a column of the table has another type than the declared one, or is not
                declared.
            Unavailable: the store reports an error.
        """
        with self._translate_errors():
            if self._newest_batch < 0:
                self._remove_unpublished_files()
            if self._newest_batch < 0 or not self._is_newest_batch():
                self._newest_batch = max(self._complete_batches(), default=-1)
            if self._newest_batch < 0:
                if self._start_marks is None:
                    return None
                return TableState(
                    encode_marks(self._start_marks), self._start_marks.version, (), has_rows=False
                )
            self._start_marks = None
            if not self._has_checked_columns:
                self._check_columns()
                self._has_checked_columns = True
            return self._read_state(follower)

    def apply(self, changes: ArrowTable | None, marks: TableMarks) -> bool:
        """Write changes as a batch with the marks after it; return whether there is a new batch.

        Raises:
            BadConfig: an inferred column has a reserved name.
            BadRequest: a change is a delete.
            Superseded: another follower has written this batch (rule 3).
            Unavailable: the store reports an error.
        """
        if changes is not None and not changes.num_rows:
            return False
        names: list[str] = []
        if changes is not None:
            schema = self._schema or _inferred_schema(changes)
            names = _write_parquet_file(self._uri, self._store, schema, [changes])
        self.publish(names, marks)
        return True

    def publish(self, names: Iterable[str], marks: TableMarks) -> None:
        """Publish files as the next batch, with the marks after it; durable on return (rule 1).

        Raises:
            Superseded: another follower has written this batch (rule 3).
            Unavailable: the store reports an error.
        """
        self.finish()
        self._publish(names, marks)

    def _publish(self, names: Iterable[str], marks: TableMarks) -> None:
        target, names = f"batch={self._newest_batch + 1}", list(names)
        with self._translate_errors():
            existing_names = self._store.list_names(target)
            if f"{target}/{MARKS_FILE}" in existing_names:
                raise Superseded(f"table {self._uri}: another program has committed {target}")
            for name in existing_names:
                self._store.delete(name)  # rule 2
            folder = f"{_WRITING_FOLDER}/{_unique_name()}" if self._store.is_directory else target
            for name in names:
                self._store.move(f"{_WRITING_FOLDER}/{name}", f"{folder}/{name}")
            self._store.write(f"{folder}/{MARKS_FILE}", encode_marks(marks).encode())
            if folder != target:
                expected = sorted(f"{folder}/{name}" for name in (*names, MARKS_FILE))
                if self._store.list_names(folder) != expected:
                    raise Superseded(f"table {self._uri}: another program has removed {folder}")
                try:
                    self._store.move(folder, target)
                except Unavailable as error:
                    if self._store.list_names(target):
                        raise Superseded(
                            f"table {self._uri}: another program has committed {target}"
                        ) from error
                    raise
        self._newest_batch += 1

    def _remove_unpublished_files(self) -> None:
        """Remove the files that are in no batch (rules 2 and 3)."""
        if not self._store.is_directory:
            self._store.delete_folder(_WRITING_FOLDER)
            return
        if self._store.list_names(_WRITING_FOLDER):
            with suppress(ObjectMissing):  # another follower has removed them
                self._store.move(_WRITING_FOLDER, f"{_REMOVED_FOLDER}/{_unique_name()}")
        self._store.delete_folder(_REMOVED_FOLDER)

    def _all_file_names(self) -> list[str]:
        return self._store.list_names("")

    def _complete_batches(self) -> list[int]:
        """Return the numbers of all complete batches."""
        return [
            int(match[1])
            for match in map(_COMPLETE_BATCH_PATTERN.fullmatch, self._all_file_names())
            if match
        ]

    def _is_newest_batch(self) -> bool:
        """Whether the newest batch that was read still exists and is still the newest."""
        exists, following = (
            f"batch={number}/{MARKS_FILE}" in self._store.list_names(f"batch={number}")
            for number in (self._newest_batch, self._newest_batch + 1)
        )
        return exists and not following

    def _read_state(self, follower: TableMarks) -> TableState:
        """Find the newest batch of the follower, and the later batches (rule 2)."""
        other_commits: list[OtherCommit] = []
        rules: StoredRules | None = None
        numbers = [self._newest_batch]
        while numbers:
            number = numbers.pop(0)
            metadata = self._store.read(f"batch={number}/{MARKS_FILE}").decode()
            marks = decode_marks(metadata)
            if marks is not None and marks.follower == follower.follower:
                return TableState(metadata, marks.version, other_commits)
            rules = rules or (marks and marks.rules)
            other_commits.append(OtherCommit(number, "APPEND", marks.follower if marks else None))
            if number == self._newest_batch:
                numbers = sorted(self._complete_batches(), reverse=True)[1:]
        return TableState(None, None, rules=rules)

    def _stored_schema(self) -> ArrowSchema:
        """Return the schema of the newest file; an empty schema if there is no file."""
        for number in sorted(self._complete_batches(), reverse=True):
            for name in self._store.list_names(f"batch={number}"):
                if name.endswith(".parquet"):
                    with self._store.open(name) as file:
                        return pq.read_schema(file.native)
        return pa.schema([])

    def _check_columns(self) -> None:
        if self._schema is None:
            return
        for part in self._stored_schema():
            if part.name not in self._schema.names:
                raise BadConfig(
                    f"table {self._uri}: column {part.name!r} of the table is not declared. "
                    "Hint: declare all columns of the table."
                )
            declared_type = self._schema.field(part.name).type
            if part.type != declared_type:
                raise BadConfig(
                    f"table {self._uri}: column {part.name!r} has type {part.type} in the table, "
                    f"but is declared as {declared_type}. Hint: the type of a column cannot "
                    "change; "
                    f"declare {part.type}, or use a new table."
                )

    def _translate_errors(self) -> AbstractContextManager[None]:
        return _translate_errors(self._uri, self._store)


@contextmanager
def _translate_errors(uri: str, store: ArchiveStore) -> Iterator[None]:
    """Convert errors of the store to errors about the table."""
    try:
        yield
    except ObjectMissing as error:
        raise Superseded(f"table {uri}: {_reason_text(error)}") from error
    except (Unavailable, OSError, pa.ArrowException) as error:
        text = f"table {uri}: {_reason_text(error)}"
        cause = error.__cause__ if isinstance(error, Unavailable) else error
        if store.is_directory and isinstance(cause, FileNotFoundError):
            raise Superseded(text) from error  # another follower has started (rule 3)
        if isinstance(cause, pa.ArrowException) and not isinstance(cause, OSError):
            raise BadRequest(text) from error
        if getattr(cause, "errno", None) in _DENIED_ERRNOS:
            raise BadConfig(f"{text}. {PERMISSION_HINT}") from error
        if _DENIED_PATTERN.search(str(cause)):
            raise BadConfig(f"{text.rstrip('.')}. {CREDENTIALS_HINT}") from error
        raise Unavailable(text) from error


def write_file(uri: str, schema: ArrowSchema, changes: Iterable[ArrowTable]) -> list[str]:
    """Write changes to a file of a table, in any process; return its name for `publish`.

    The file is durable after the call, but no reader lists it yet. Without changes, no file is
    written.

    Args:
        uri: the directory or the URL of the table.
        schema: the columns of the table, including the position columns.
        changes: the parts of a batch.

    Raises:
        BadRequest: a change is a delete, or a value does not fit its column.
        Unavailable, BadConfig: the store reports an error (rule 6).
    """
    return _write_parquet_file(uri, ArchiveStore(_url_of(uri)), schema, changes)


def _write_parquet_file(
    uri: str, store: ArchiveStore, schema: ArrowSchema, changes: Iterable[ArrowTable]
) -> list[str]:
    parts = (part for part in changes if part.num_rows)
    first = next(parts, None)
    if first is None:
        return []
    name = f"{_unique_name()}.parquet"
    with (
        _translate_errors(uri, store),
        store.open_sink(f"{_WRITING_FOLDER}/{name}") as sink,
        pq.ParquetWriter(sink, schema) as writer,
    ):
        for part in chain([first], parts):
            writer.write_table(_rows_to_write(part, schema))
    return [name]


def _rows_to_write(changes: ArrowTable, schema: ArrowSchema) -> ArrowTable:
    if pc.any(changes[DELETED_COLUMN]).as_py():
        row = pc.index(changes[DELETED_COLUMN], value=True).as_py()
        partition, transaction = (changes[name][row] for name in _POSITION_COLUMNS.values())
        raise BadRequest(
            f"partition {partition}, transaction {transaction}: found a delete, but rows of "
            f"a Parquet table cannot be deleted. {_DELTA_HINT}"
        )
    # The timestamps in Spark's batches have the time zone of the session. Therefore the timestamps
    # are cast.
    columns = [
        changes[_POSITION_COLUMNS.get(part.name, part.name)].cast(part.type) for part in schema
    ]
    return pa.table(columns, schema=schema)


def with_position_columns(schema: ArrowSchema) -> ArrowSchema:
    """Add the position columns to the columns of a table; raises BadConfig for reserved names."""
    names_by_lower = {name: name for name in _RESERVED_NAMES}
    for name in schema.names:
        if (other_name := names_by_lower.get(name.lower())) is not None:
            raise BadConfig(
                f"column {name!r}: the name {other_name!r} is already used, and the table does not "
                "distinguish upper and lower case. Reserved names are "
                f"{', '.join(sorted(_RESERVED_NAMES))}. Hint: rename the column."
            )
        names_by_lower[name.lower()] = name
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in _POSITION_TYPES.items())])


def _check_types(schema: Iterable[pa.Field]) -> None:
    for part in schema:
        try:
            pq.write_table(pa.schema([part]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowException:
            raise BadConfig(
                f"column {part.name!r}: Parquet has no type {part.type}. Hint: declare another one."
            ) from None


def _inferred_schema(changes: ArrowTable) -> ArrowSchema:
    reserved = (*LOG_COLUMNS, DELETED_COLUMN)
    return with_position_columns(
        pa.schema([part for part in changes.schema if part.name not in reserved])
    )


def _url_of(uri: str) -> str:
    """Return the URL of a table, which may be a path of a directory."""
    return uri if "://" in uri else Path(uri).absolute().as_uri()


def _unique_name() -> str:
    return uuid.uuid4().hex  # noqa: TID251 - a name on no other server


def _reason_text(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("archive: ")[:300]
