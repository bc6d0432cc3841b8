"""The state of a change feed: the latest payload of each key of a partition, in SQLite.

A state is either private, in a database that SQLite deletes when the connection closes, or a file
in a directory. The file is a cache between the micro-batches of a query; the log is the source of
truth.

Rules (docs/decisions/049-tables-that-follow-the-log.md, "Change feed"):
    1. A state has a mark: it contains the changes of all transactions up to this mark. It moves to
       another mark in one SQLite transaction, so a killed task leaves the state at the previous
       mark.
    2. When a state moves, it also stores the rows that the move replaced. So it can return to
       `previous_mark`.
    3. One task uses a file at a time: the task holds an exclusive lock on the file until the task
       ends.
    4. A file counts as damaged if SQLite cannot read it, if another version has written it, or if a
       row does not match its checksum.
    5. If the transaction of a row has expired from the log, the row counts as absent, because a
       rebuilt state would not contain the row either.
    6. The memory of a state is its page cache, independent of the number of keys.
"""

import logging
import os
import sqlite3
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from waltz_core.records.record import BEFORE_FIRST

# The size of the digest of a key. With 10^9 keys, the probability of a collision is 10^-21.
KEY_DIGEST_BYTES = 16
_SET_PAGE_CACHE = "PRAGMA cache_size = -65536"  # KiB
UNUSED_S_MAX = 8 * 24 * 3600  # a weekly query keeps its states
# The first two bytes are letters of the project; the last two are the version of the tables below.
_FORMAT_VERSION = 0x575A_0001
_FILE_SUFFIX = ".sqlite"
_JOURNAL_SUFFIX = "-journal"  # the suffix that SQLite uses
# A key, a header and a transaction ID.
_ROW_PREFIX = struct.Struct(f">{KEY_DIGEST_BYTES}siq")
_CREATE_TABLES = """
    CREATE TABLE latest (key BLOB PRIMARY KEY, header INTEGER, id INTEGER, data BLOB, sum INTEGER)
        WITHOUT ROWID;
    CREATE TABLE replaced (key BLOB PRIMARY KEY, header INTEGER, id INTEGER, data BLOB, sum INTEGER)
        WITHOUT ROWID;
    CREATE TABLE place (mark INTEGER NOT NULL, previous INTEGER NOT NULL);
"""

_log = logging.getLogger("waltz")


class StoredRow(NamedTuple):
    """The last change of a key: its transaction, and the payload as it is in the log."""

    header: int
    transaction_id: int
    data: bytes


class FeedState:
    """The state of one partition; `create_private_state` and `open_cached_state` open it.

    Args:
        database: a database with the tables, and with an open transaction.
        is_private: whether the state has no file.
    """

    def __init__(self, database: sqlite3.Connection, *, is_private: bool) -> None:
        self._database = database
        self._is_private = is_private
        self.first_available = 0  # the first transaction that the log has (rule 5)
        match database.execute("SELECT mark, previous FROM place").fetchall():
            case [(int(mark), int(previous))]:
                self.mark, self.previous_mark = mark, previous
            case rows:
                raise sqlite3.DatabaseError(f"expected one row with two marks, found {rows}")

    def find_row(self, key: bytes) -> StoredRow | None:
        """Return the last change of a key; None if the key is absent, deleted or expired.

        Raises:
            sqlite3.DatabaseError: the state is damaged (rule 4).
        """
        fields = self._database.execute(
            "SELECT header, id, data, sum FROM latest WHERE key = ?", (key,)
        ).fetchone()
        if fields is None:
            return None
        row = StoredRow(*fields[:3])
        try:
            is_damaged = _checksum(key, row) != fields[3]
        except (struct.error, TypeError):  # SQLite's columns may have values of any type
            is_damaged = True
        if is_damaged:
            raise sqlite3.DatabaseError("a row does not match its checksum")
        return row if row.transaction_id >= self.first_available else None

    def write(self, upserts: Iterable[tuple[bytes, StoredRow]], deletes: Iterable[bytes]) -> None:
        """Write the last change of each key."""
        rows = sorted((key, *row, _checksum(key, row)) for key, row in upserts)
        self._database.executemany("INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?, ?)", rows)
        keys = ((key,) for key in deletes)
        self._database.executemany("DELETE FROM latest WHERE key = ?", keys)

    def save_replaced_rows(self, rows: Iterable[tuple[bytes, StoredRow | None]]) -> None:
        """Store the rows that the next changes replace, so that the state can return (rule 2)."""
        if self._is_private:
            return
        self._database.executemany(
            "INSERT OR IGNORE INTO replaced VALUES (?, ?, ?, ?, ?)",
            sorted(
                (key, None, None, None, None) if row is None else (key, *row, _checksum(key, row))
                for key, row in rows
            ),
        )

    def delete_replaced_rows(self) -> None:
        """Delete the replaced rows; from now on, the state cannot return to `previous_mark`."""
        self._database.execute("DELETE FROM replaced")

    def return_to_previous_mark(self) -> None:
        """Return to `previous_mark` (rule 2)."""
        self._database.execute(
            "INSERT OR REPLACE INTO latest SELECT * FROM replaced WHERE data IS NOT NULL"
        )
        self._database.execute(
            "DELETE FROM latest WHERE key IN (SELECT key FROM replaced WHERE data IS NULL)"
        )
        self.mark = self.previous_mark
        self.delete_replaced_rows()

    def clear(self) -> None:
        """Make the state empty, as before the first transaction."""
        self._database.execute("DELETE FROM latest")
        self.mark = int(BEFORE_FIRST)
        self.delete_replaced_rows()

    def commit(self, mark: int, *, previous_mark: int) -> None:
        """Set the mark of the state; return after SQLite has synced it.

        Args:
            mark: the new mark.
            previous_mark: the mark to which the state can return; `mark` if no replaced rows were
                stored.
        """
        self.mark, self.previous_mark = mark, previous_mark
        self._database.execute("UPDATE place SET mark = ?, previous = ?", (mark, previous_mark))
        self._database.execute("COMMIT")
        self._database.execute("BEGIN EXCLUSIVE")

    def close(self) -> None:
        """Close the state; uncommitted changes are lost."""
        self._database.close()


def _checksum(key: bytes, row: StoredRow) -> int:
    return zlib.crc32(row.data, zlib.crc32(_ROW_PREFIX.pack(key, row.header, row.transaction_id)))


def create_private_state() -> FeedState:
    """Return an empty state in a temporary database."""
    database = sqlite3.connect("", isolation_level=None)
    database.execute(_SET_PAGE_CACHE)
    # The database does not outlive the connection, so there is nothing to roll back.
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("BEGIN")
    _create_tables(database)
    return FeedState(database, is_private=True)


def open_cached_state(file: Path) -> FeedState | None:
    """Return the state in a file; it is empty if the file is new or was damaged.

    The result is None if another task uses the file, or if it cannot be opened or created. The
    function also deletes other files in the directory that no task has used for 8 days.
    """
    for _ in range(2):
        try:
            return _open_state(file)
        except (sqlite3.Error, OSError) as error:
            # The lower byte of SQLite's extended error code is the primary error code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                _log.info("spark.feed_state_in_use file=%s", file)
                return None
            discard_file(file, error)
    return None


def discard_file(file: Path, error: Exception) -> None:
    """Delete a damaged or unreadable file of a state, and log a warning."""
    _log.warning("spark.feed_state_discarded file=%s error=%s", file, error)
    with suppress(OSError):
        # The journal is kept, because it may already belong to a new file. When SQLite creates a
        # file, it deletes an existing journal.
        file.unlink(missing_ok=True)


def _open_state(file: Path) -> FeedState:
    """Open a file, lock it (rule 3), and check that it is a state of this version (rule 4)."""
    # Do not wait for another task: it holds its lock for a long time.
    database = sqlite3.connect(file, timeout=0, isolation_level=None)
    try:
        database.execute(_SET_PAGE_CACHE)
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        # With DELETE, a task whose file was deleted could delete the journal of the next file.
        database.execute("PRAGMA journal_mode = TRUNCATE")
        database.execute("BEGIN EXCLUSIVE")
        ((version,),) = database.execute("PRAGMA user_version")
        ((count,),) = database.execute("SELECT count(*) FROM sqlite_master")
        if version == count == 0:
            _create_tables(database)
        _check_version(database)
        os.utime(file)
        _delete_unused_files(file)
        return FeedState(database, is_private=False)
    except BaseException:
        database.close()
        raise


def _check_version(database: sqlite3.Connection) -> None:
    ((version,),) = database.execute("PRAGMA user_version")
    if version != _FORMAT_VERSION:
        raise sqlite3.DatabaseError(f"expected version {_FORMAT_VERSION:#x}, found {version:#x}")


def _create_tables(database: sqlite3.Connection) -> None:
    for statement in _CREATE_TABLES.split(";"):
        database.execute(statement)
    before = int(BEFORE_FIRST)
    database.execute("INSERT INTO place VALUES (?, ?)", (before, before))
    database.execute(f"PRAGMA user_version = {_FORMAT_VERSION}")


# ---------------------------------------------------------------------------------------------
# The directory


def state_file_path(name: str) -> Path | None:
    """Return the path for a state; None if no directory is private to this user."""
    directory: Path | None = None
    try:
        # gettempdir fails if no directory is writable, or if all disks are full.
        directory = Path(tempfile.gettempdir(), f"waltz-change-feed-{os.getuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        is_own_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_own_directory or status.st_mode & 0o077:
            raise PermissionError("expected a directory that only its owner can read")
    except OSError as error:
        _log.warning("spark.feed_state_not_cached directory=%s error=%s", directory, error)
        return None
    return directory / (name + _FILE_SUFFIX)


def _delete_unused_files(current_file: Path) -> None:
    """Delete the states whose last use was 8 days or more before the last use of `current_file`."""
    oldest = current_file.stat().st_mtime - UNUSED_S_MAX
    for file in current_file.parent.glob(f"*{_FILE_SUFFIX}"):
        _delete_if_older(file, oldest)
    for journal in current_file.parent.glob(f"*{_FILE_SUFFIX}{_JOURNAL_SUFFIX}"):
        # A file without the journal of its last transaction may be damaged.
        if not Path(str(journal).removesuffix(_JOURNAL_SUFFIX)).exists():
            _delete_if_older(journal, oldest)


def _delete_if_older(file: Path, oldest: float) -> None:
    with suppress(OSError):  # another task may delete it at the same time
        if file.stat().st_mtime < oldest:
            file.unlink()
