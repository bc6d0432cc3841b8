"""A table of Parquet files of a follower, which only gains rows: each transaction adds its own.

    TABLE/batch=0/_waltz.json          the start of the table, without rows
    TABLE/batch=1/NAME.parquet         the rows of a batch, in one file or several
    TABLE/batch=1/_waltz.json          the marks after the batch
    TABLE/_writing/                    files that are in no batch yet; no reader lists them
    TABLE/_removed/                    such files of earlier runs, which are being deleted

Rules:
    1. A batch is complete when its directory has `_waltz.json`, which is written last. In a local
       directory, a batch gets its name when it is complete, so all batches are. In an object store,
       readers list the complete ones.
    2. Batches are numbered without a gap. The newest complete one has the marks; the next run
       removes files of a later one that is not complete.
    3. A table has one follower at a time. In a local directory, the second one to complete a batch
       raises `Superseded`; object stores do not detect it. A follower that starts removes the files
       of other ones that are in no batch, in one step. So before a batch gets its name, the other
       one checks that it has its files, or its rename fails.
    4. A table has the declared columns, `_partition` and `_transaction_id`: the place of the
       transaction. The newest file has all columns; a column keeps its type.
    5. A table is created with its first changes, so a first batch that fails leaves no table.
    6. Errors that another attempt may avoid are `Unavailable`. Denied access, and values and types
       that Parquet lacks, are not.
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
from waltz_core.tables.found_columns import LOG_COLUMNS
from waltz_core.tables.row_changes import DELETED, ArrowTable, ChangeRules
from waltz_core.tables.table_marks import StoredRules, TableMarks, decode, encode

MARKS_FILE: Final = "_waltz.json"
_WRITING: Final = "_writing"
_REMOVED: Final = "_removed"
_COMPLETE: Final = re.compile(rf"batch=(\d+)/{re.escape(MARKS_FILE)}")
# The columns of the place (rule 4), and those of the changes that they have.
_PLACE: Final = {"_partition": "partition", "_transaction_id": "transaction_id"}
_PLACE_TYPES: Final = {"_partition": pa.int32(), "_transaction_id": pa.int64()}
_RESERVED: Final = {*_PLACE, DELETED, "batch"}  # readers add a column `batch`
# Numbers of errors of a directory, and what the libraries of object stores report.
_DENIED_NUMBERS: Final = (errno.EPERM, errno.EACCES, errno.EROFS)
_DENIED: Final = re.compile(
    r"ACCESS_DENIED|PERMISSION_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|"
    r"status\W+40[13]\b"
)
_HINT = "Hint: use a Delta table for the current row of each key."


class FollowedParquetTable:
    """A table of Parquet files, of one follower.

    Args:
        uri: a directory, or a URL of an object store.
        schema: the declared columns; None if the columns are those of the changes.
        rules: how transactions become changes.

    Raises:
        BadConfig: the rules have a key or deletes, or a column has a reserved name or a type that
            Parquet lacks.
    """

    def __init__(self, uri: str, schema: ArrowSchema | None, rules: ChangeRules) -> None:
        if rules.key or rules.delete_headers or rules.delete_where:
            raise BadConfig(
                "a Parquet table only gains rows: expected no key and no rules for deletes, found "
                f"{'a key' if rules.key else 'rules for deletes'}. {_HINT}"
            )
        self._schema = None if schema is None else with_place(schema)
        _check_types(schema or ())
        self._uri = uri
        self._store = ArchiveStore(_url_of(uri))
        self._newest = -1  # the number of the newest complete batch
        self._start: TableMarks | None = None  # of a table that is due (rule 5)
        self._is_checked = False

    def columns(self) -> ArrowSchema:
        """Return the columns of the newest file, without those of the place."""
        with self._translate_errors():
            return pa.schema([each for each in self._stored_schema() if each.name not in _PLACE])

    def create(self, start: TableMarks) -> None:
        """Create the table with the next batch, or `finish` (rule 5).

        Raises:
            BadConfig: the directory has other files.
            Unavailable: the store reports an error.
        """
        with self._translate_errors():
            own = (f"{_WRITING}/", f"{_REMOVED}/")
            others = [each for each in self._names() if not each.startswith(own)]
        if others and not any(map(_COMPLETE.fullmatch, others)):
            raise BadConfig(
                f"table {self._uri}: expected an empty directory or a table of Parquet files, "
                f"found {others[0]}. Hint: use another directory."
            )
        self._start = start

    def finish(self) -> None:
        """Create the table if it is due: a batch without rows, with the marks of the start.

        Raises:
            Superseded: the table exists.
            Unavailable: the store reports an error.
        """
        if self._start is not None:
            self._publish([], self._start)
            self._start = None

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state after the newest complete batch, or that of a table that is due.

        None if there is no table.

        Raises:
            BadConfig: a column of the table has another type than the declared one, or is not
                declared.
            Unavailable: the store reports an error.
        """
        with self._translate_errors():
            if self._newest < 0:
                self._remove_writing()
            if self._newest < 0 or not self._is_newest():
                self._newest = max(self._complete_batches(), default=-1)
            if self._newest < 0:
                if self._start is None:
                    return None
                return TableState(encode(self._start), self._start.version, (), has_rows=False)
            self._start = None
            if not self._is_checked:
                self._check_columns()
                self._is_checked = True
            return self._state(follower)

    def apply(self, changes: ArrowTable | None, marks: TableMarks) -> bool:
        """Write changes as a batch with the marks after it; return whether there is a new batch.

        Raises:
            BadConfig: a found column has a reserved name.
            BadRequest: a change is a delete.
            Superseded: another follower has written this batch (rule 3).
            Unavailable: the store reports an error.
        """
        if changes is not None and not changes.num_rows:
            return False
        names: list[str] = []
        if changes is not None:
            schema = self._schema or _found_schema(changes)
            names = _write(self._uri, self._store, schema, [changes])
        self.publish(names, marks)
        return True

    def publish(self, names: Iterable[str], marks: TableMarks) -> None:
        """Make the next batch of files, with the marks after it (rule 1); it is durable.

        Raises:
            Superseded: another follower has written this batch (rule 3).
            Unavailable: the store reports an error.
        """
        self.finish()
        self._publish(names, marks)

    def _publish(self, names: Iterable[str], marks: TableMarks) -> None:
        target, names = f"batch={self._newest + 1}", list(names)
        with self._translate_errors():
            found = self._store.names(target)
            if f"{target}/{MARKS_FILE}" in found:
                raise Superseded(f"table {self._uri}: another program has written {target}")
            for name in found:
                self._store.delete(name)  # rule 2
            folder = f"{_WRITING}/{_unique_name()}" if self._store.is_directory else target
            for name in names:
                self._store.move(f"{_WRITING}/{name}", f"{folder}/{name}")
            self._store.write(f"{folder}/{MARKS_FILE}", encode(marks).encode())
            if folder != target:
                expected = sorted(f"{folder}/{name}" for name in (*names, MARKS_FILE))
                if self._store.names(folder) != expected:
                    raise Superseded(f"table {self._uri}: another program has removed {folder}")
                try:
                    self._store.move(folder, target)
                except Unavailable as error:
                    if self._store.names(target):
                        raise Superseded(
                            f"table {self._uri}: another program has written {target}"
                        ) from error
                    raise
        self._newest += 1

    def _remove_writing(self) -> None:
        """Remove the files that are in no batch (rules 2 and 3)."""
        if not self._store.is_directory:
            self._store.delete_folder(_WRITING)
            return
        if self._store.names(_WRITING):
            with suppress(ObjectMissing):  # another follower has removed them
                self._store.move(_WRITING, f"{_REMOVED}/{_unique_name()}")
        self._store.delete_folder(_REMOVED)

    def _names(self) -> list[str]:
        return self._store.names("")

    def _complete_batches(self) -> list[int]:
        """Return the numbers of the complete batches."""
        return [int(found[1]) for found in map(_COMPLETE.fullmatch, self._names()) if found]

    def _is_newest(self) -> bool:
        """Return whether the newest batch that was read is still the newest one."""
        this, following = (
            f"batch={number}/{MARKS_FILE}" in self._store.names(f"batch={number}")
            for number in (self._newest, self._newest + 1)
        )
        return this and not following

    def _state(self, follower: TableMarks) -> TableState:
        """Return the newest batch of the follower, and the later ones (rule 2)."""
        others: list[OtherCommit] = []
        rules: StoredRules | None = None
        numbers = [self._newest]
        while numbers:
            number = numbers.pop(0)
            metadata = self._store.read(f"batch={number}/{MARKS_FILE}").decode()
            found = decode(metadata)
            if found is not None and found.follower == follower.follower:
                return TableState(metadata, found.version, others)
            rules = rules or (found and found.rules)
            others.append(OtherCommit(number, "APPEND", found.follower if found else None))
            if number == self._newest:
                numbers = sorted(self._complete_batches(), reverse=True)[1:]
        return TableState(None, None, rules=rules)

    def _stored_schema(self) -> ArrowSchema:
        """Return the schema of the newest file; an empty one if there is no file."""
        for number in sorted(self._complete_batches(), reverse=True):
            for name in self._store.names(f"batch={number}"):
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
                    f"table {self._uri}: column {part.name!r} is not declared. Hint: declare all "
                    "columns of the table."
                )
            declared = self._schema.field(part.name).type
            if part.type != declared:
                raise BadConfig(
                    f"table {self._uri}: column {part.name!r}: expected the declared type "
                    f"{declared}, found {part.type}. Hint: a column keeps its type; declare this "
                    "type, or use a new table."
                )

    def _translate_errors(self) -> AbstractContextManager[None]:
        return _translate_errors(self._uri, self._store)


@contextmanager
def _translate_errors(uri: str, store: ArchiveStore) -> Iterator[None]:
    """Raise errors of the store as errors of the table."""
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
        if getattr(cause, "errno", None) in _DENIED_NUMBERS:
            raise BadConfig(f"{text}. {PERMISSION_HINT}") from error
        if _DENIED.search(str(cause)):
            raise BadConfig(f"{text.rstrip('.')}. {CREDENTIALS_HINT}") from error
        raise Unavailable(text) from error


def write_file(uri: str, schema: ArrowSchema, changes: Iterable[ArrowTable]) -> list[str]:
    """Write changes to a file of a table, in any process; return its name, for `publish`.

    The file is durable, and no reader lists it yet. Without changes there is none.

    Args:
        uri: the table.
        schema: its columns, with those of the place.
        changes: parts of a batch.

    Raises:
        BadRequest: a change is a delete, or a value does not fit its column.
        Unavailable, BadConfig: the store reports an error (rule 6).
    """
    return _write(uri, ArchiveStore(_url_of(uri)), schema, changes)


def _write(
    uri: str, store: ArchiveStore, schema: ArrowSchema, changes: Iterable[ArrowTable]
) -> list[str]:
    parts = (part for part in changes if part.num_rows)
    first = next(parts, None)
    if first is None:
        return []
    name = f"{_unique_name()}.parquet"
    with (
        _translate_errors(uri, store),
        store.writing(f"{_WRITING}/{name}") as sink,
        pq.ParquetWriter(sink, schema) as writer,
    ):
        for part in chain([first], parts):
            writer.write_table(_rows(part, schema))
    return [name]


def _rows(changes: ArrowTable, schema: ArrowSchema) -> ArrowTable:
    if pc.any(changes[DELETED]).as_py():
        row = pc.index(changes[DELETED], value=True).as_py()
        partition, transaction = (changes[name][row] for name in _PLACE.values())
        raise BadRequest(
            f"partition {partition}, transaction {transaction}: a Parquet table only gains rows: "
            f"expected no delete, found one. {_HINT}"
        )
    # Spark's batches have the time zone of the session in the types of timestamps.
    columns = [changes[_PLACE.get(part.name, part.name)].cast(part.type) for part in schema]
    return pa.table(columns, schema=schema)


def with_place(schema: ArrowSchema) -> ArrowSchema:
    """Return the columns of a table, with those of the place; raises BadConfig (reserved names)."""
    seen = {name: name for name in _RESERVED}
    for name in schema.names:
        if (known := seen.get(name.lower())) is not None:
            raise BadConfig(
                f"column {name!r}: expected names that differ in more than their case, and none of "
                f"{', '.join(sorted(_RESERVED))}, found {name!r} and {known!r}. Hint: rename the "
                "column."
            )
        seen[name.lower()] = name
    return pa.schema([*schema, *(pa.field(name, kind) for name, kind in _PLACE_TYPES.items())])


def _check_types(schema: Iterable[pa.Field]) -> None:
    for part in schema:
        try:
            pq.write_table(pa.schema([part]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowException:
            raise BadConfig(
                f"column {part.name!r}: Parquet has no type {part.type}. Hint: declare another one."
            ) from None


def _found_schema(changes: ArrowTable) -> ArrowSchema:
    own = (*LOG_COLUMNS, DELETED)
    return with_place(pa.schema([part for part in changes.schema if part.name not in own]))


def _url_of(uri: str) -> str:
    """Return the URL of a table whose directory may be given as a path."""
    return uri if "://" in uri else Path(uri).absolute().as_uri()


def _unique_name() -> str:
    return uuid.uuid4().hex  # noqa: TID251 - a name on no other server


def _reason_text(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("archive: ")[:300]
