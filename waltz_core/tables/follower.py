"""The loop of a follower: it applies the log to its tables, one batch after the other.

The loop depends only on the interfaces `FollowedTable` and `FollowedLog`, not on a table format. It
also does not depend on the type of the changes. Without Spark, the changes are an Arrow table; with
Spark, they are a DataFrame.

Rules:
    1. The table is the checkpoint: before each batch, the follower reads the table marks. The
       transactions after the marks may include some in which the follower has already found no
       changes. If the marks have not changed since the last read, the follower also skips these
       transactions.
    2. A batch is one commit, on top of the table version that the follower has read. If another
       program has committed first, the follower reads the table again. Exception: a separate
       commit, with the current marks, may add new fields of structs before the batch.
    3. A batch without changes writes no commit. If the marks have advanced, the follower commits
       the marks alone when its last commit is older than `MARKS_COMMIT_INTERVAL_S`, or when the
       follower ends. If the user created the table, and the table has no marks yet, the follower
       stores its start marks when it ends. Without these stored marks, the next run would need the
       start marks again.
    4. Commits of other programs after the follower's last commit are checked. A commit that
       replaces the rows of the table, such as a `RESTORE`, is an error. A commit of a follower with
       another name is an error, because each of the two followers would overwrite newer rows with
       old changes. Other commits, except maintenance, are logged as warnings.
    5. Start marks are an error if the table already has other marks when the follower starts.
    6. For several tables, each batch is read once, from the lowest marks of all tables. Each table
       has its own marks and its own commit, and receives only the changes after its own marks.
    7. If no end is given, the follower pauses after a batch that reaches the end of the log. So the
       follower does not create a table version for each new transaction, even if transactions
       arrive all the time.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from waltz_core.errors import BadConfig, BadFormat, Superseded, Unavailable, WaltzError
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.tables.table_marks import (
    LogState,
    MarkMap,
    StoredRules,
    TableMarks,
    common_rules,
    marks_to_continue_from,
    next_batch_marks,
)

# After this number of seconds without a commit, marks that have moved are committed alone (rule 3).
MARKS_COMMIT_INTERVAL_S = 600.0
# The maximum number of conflicts with other commits, without progress of the table marks.
CONFLICTS_MAX = 20

TABLE_REMOVED_TEXT = "the table was removed while it was followed"
# Operations of Delta and deltalake that replace a table's rows, in the form of
# `full_operation_name`.
_REPLACING_OPERATIONS = (
    "RESTORE",
    "CREATE OR REPLACE",
    "REPLACE TABLE",
    "CLONE",
    "WRITE (OVERWRITE)",
)
# Operations of Delta and deltalake that change no row. Some names have a suffix ("VACUUM START").
_MAINTENANCE_OPERATIONS = (
    "ADD COLUMN",
    "ADD CONSTRAINT",
    "ADD FEATURE",
    "CHANGE COLUMN",
    "CLUSTER BY",
    "COMPUTE STATS",
    "DROP CONSTRAINT",
    "DROP FEATURE",
    "FSCK",
    "OPTIMIZE",
    "REORG",
    "SET TBLPROPERTIES",
    "UNSET TBLPROPERTIES",
    "UPDATE COLUMN METADATA",
    "UPDATE FIELD METADATA",
    "UPDATE TABLE METADATA",
    "UPGRADE PROTOCOL",
    "VACUUM",
)

_log = logging.getLogger(__name__)

ChangesT = TypeVar("ChangesT")
ChangesT_contra = TypeVar("ChangesT_contra", contravariant=True)
ChangesT_co = TypeVar("ChangesT_co", covariant=True)


class OtherCommit(NamedTuple):
    """A commit that the follower did not write; `follower` is the other follower, if any."""

    version: int
    operation: str
    follower: str | None = None

    @property
    def is_replacement(self) -> bool:
        """Whether the commit replaces the rows of the table."""
        return self.operation.upper().startswith(_REPLACING_OPERATIONS)

    @property
    def is_maintenance(self) -> bool:
        """Whether the commit changes no row."""
        return self.operation.upper().startswith(_MAINTENANCE_OPERATIONS)


class TableState(NamedTuple):
    """The state of a follower in the newest version of a table.

    Attributes:
        metadata: the metadata of the follower's newest commit, with its marks; None if the follower
            has no commit.
        version: the number of transactions that the table records for the follower, if any. In
            Delta, this is the version in `txn`, not the version of the table.
        other_commits: the commits to check (rule 4), in any order. These are the commits after the
            follower's newest commit, and in some cases earlier commits. Empty if the follower has
            no commit.
        has_rows: whether the table has rows, or commits of another follower. If there is metadata,
            `has_rows` is False only for a table that is not created yet.
        rules: if this follower has no commit, the rules in the newest commit of any follower.
    """

    metadata: str | None
    version: int | None
    other_commits: Sequence[OtherCommit] = ()
    has_rows: bool = True
    rules: StoredRules | None = None

    @property
    def is_creation_pending(self) -> bool:
        """Whether the table does not exist yet, and `finish` or `apply` will create it."""
        return self.metadata is not None and not self.has_rows


class FollowedTable(Protocol[ChangesT_contra]):
    """A table in any format, as the follower uses it."""

    def create(self, start: TableMarks) -> None:
        """Create the table now or later, at the latest in `finish`.

        The first commit of the table contains the start marks. Until the table is created, `marks`
        returns the start marks. So a failed first batch need not leave an empty table.

        Raises:
            Superseded: the table exists already.
        """

    def finish(self) -> None:
        """Create the table if `create` has not created it yet; raises Superseded."""

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest version; None without a table.

        The next `apply` commits on top of this version.

        Args:
            follower: the name of the follower, and its cluster.
        """

    def apply(self, changes: ChangesT_contra | None, marks: TableMarks) -> bool:
        """Commit changes and marks as one version; return whether a version was written.

        If the changes have no effect, no version is needed. If `changes` is None, the marks are
        committed alone.

        Raises:
            Superseded: the table has a later version than the version that `marks()` has read.
        """


class FollowedLog(Protocol[ChangesT_co]):
    """The log and the changes in it, as the follower uses them."""

    def state(self) -> LogState:
        """Return the current high-water marks and first available IDs; marks never decrease.

        Raises:
            Unavailable: a partition does not answer.
        """

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> Sequence[ChangesT_co]:
        """Return, for each table, the last change of each key after its start and up to `ends`.

        All marks have the same partitions. A start may be after the end.

        Raises:
            Unavailable: a partition does not answer.
            BeforeLogStart: transactions have expired since the last call of `state`.
            BadFormat: a payload does not fit.
        """

    def wait(self) -> None:
        """Wait until the next request is due, or until requests may succeed again."""


class TableProgress(Generic[ChangesT]):
    """One table of a follower: its marks, and its commits.

    Args:
        table: the table; it is created if it does not exist.
        location: the name or the path of the table, for errors and log lines.
        follower: the name of the follower and the key of the cluster. A table without marks starts
            at the marks in `follower`; if `follower` has no marks, the table starts at the first
            available transaction.
        clock_s: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        table: FollowedTable[ChangesT],
        location: str,
        follower: TableMarks,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._location = table, location
        self._follower, self._given_marks = follower, follower.marks
        self._clock_s = clock_s
        self._last_commit_s = clock_s()
        # Metadata and version, as last read.
        self._last_read: tuple[str | None, int | None] | None = None
        self._is_created = False  # whether the follower has read or created the table
        self._has_marks = False  # whether the table has, or had, marks of this follower
        self._stored_marks = follower  # the marks in the table
        self._marks = follower  # the marks up to which there are no more changes (rule 1)
        self._warned_versions: set[int] = set()  # versions of other programs that were logged
        self._conflict_count = 0

    @property
    def marks(self) -> MarkMap:
        """The marks up to which the table needs no transactions."""
        return self._marks.marks

    @property
    def stored_marks(self) -> TableMarks:
        """The marks in the table."""
        return self._stored_marks

    @property
    def has_unstored_marks(self) -> bool:
        """Whether the marks differ from the marks that the table stores."""
        return dict(self.marks) != dict(self._stored_marks.marks)

    @property
    def is_commit_due(self) -> bool:
        """Whether to commit new marks alone, because the last commit is old (rule 3)."""
        return (
            self.has_unstored_marks
            and self._clock_s() - self._last_commit_s >= MARKS_COMMIT_INTERVAL_S
        )

    def read(self, log: FollowedLog[ChangesT]) -> bool:
        """Read the newest version of the table; return False if another commit came first."""
        return self._try_step(lambda: self._read(log))

    def check(self, log: LogState) -> None:
        """Check that the log still contains the transactions after the marks; raises DataLoss."""
        with errors_of_table(self._location):
            next_batch_marks(self.marks, log, 1)

    def commit(self, changes: ChangesT, end: MarkMap) -> bool:
        """Commit changes with the marks after them; return False if another commit came first.

        If the table already has the whole batch, no commit is necessary.
        """
        marks = {
            partition: max(mark, self.marks.get(partition, mark)) for partition, mark in end.items()
        }
        return marks == self.marks or self._try_step(lambda: self._commit(changes, marks))

    def finish(self, *, is_end: bool) -> bool:
        """Create the table if necessary; commit marks alone, if due or at the end (rule 3).

        Return False if another commit came first.
        """
        return self._try_step(lambda: self._finish(is_end=is_end))

    def _try_step(self, step: Callable[[], None]) -> bool:
        """Run a step; return False if another commit came first."""
        try:
            with errors_of_table(self._location):
                step()
        except Superseded as error:
            self._conflict_count += 1
            if self._conflict_count > CONFLICTS_MAX:
                raise
            _log.info("follow.commit_conflict reason=%s", error)
            return False
        return True

    def _read(self, log: FollowedLog[ChangesT]) -> None:
        """Read the newest version of the table; create the table if it does not exist."""
        state = self._table.marks(self._follower)
        if state is None:
            if self._last_read is not None:
                raise BadFormat(TABLE_REMOVED_TEXT)
            self._table.create(self._start(log))
            state = self._table.marks(self._follower)
            assert state is not None, "it was created"
        self._check_other_commits(state.other_commits)
        newest = state.metadata, state.version
        if (
            newest != self._last_read
        ):  # rule 1; another process with the same name may have committed
            stored = self._continue_from(state, log)
            if self._last_read is None:
                _log.info(
                    "follow.started table=%s marks=%s", self._location, _marks_text(stored.marks)
                )
            self._last_read, self._conflict_count = newest, 0
            self._stored_marks = self._marks = stored
        self._is_created = not state.is_creation_pending
        self._has_marks = state.metadata is not None or state.version is not None

    def _continue_from(self, state: TableState, log: FollowedLog[ChangesT]) -> TableMarks:
        """Return the marks from which the follower continues (rule 5)."""
        is_given = bool(self._given_marks)
        if state.metadata is None:
            is_new = state.version is None
            if is_new and state.has_rows and not is_given:
                raise BadConfig(
                    "the table has rows, or marks of another follower, but no marks of follower "
                    f"{self._follower.follower!r}. Hint: pass the marks up to which the table has "
                    "the log, or use another table."
                )
            if state.rules is not None:
                common_rules(state.rules, self._follower.rules)
            if state.version is None or (is_given and state.version <= self._follower.version):
                return self._start(log)
        stored = marks_to_continue_from(state.metadata, state.version, self._follower)
        if not self._is_created and is_given and dict(self._given_marks) != dict(stored.marks):
            raise BadConfig(
                f"start marks or a start time were given, but follower {self._follower.follower!r} "
                f"has already written the table up to {_marks_text(stored.marks)}. Hint: omit "
                "the start; the follower continues from the marks of the table."
            )
        return stored

    def _start(self, followed_log: FollowedLog[ChangesT]) -> TableMarks:
        """Return the start marks of a table without marks.

        Raises:
            BadConfig: the start lacks a mark for a partition.
            DataLoss: the log does not contain the transactions after the start.
        """
        log = followed_log.state()
        if not self._given_marks:
            start_marks = {
                partition: log.first_available_ids.get(partition, 0) - 1 for partition in log.marks
            }
            return self._follower._replace(marks=start_marks)
        if self._given_marks.keys() != log.marks.keys():
            raise BadConfig(
                f"start marks: expected a mark for each partition of {sorted(log.marks)}, found "
                f"marks of {sorted(self._given_marks)}. Hint: -1 means before the first "
                "transaction."
            )
        next_batch_marks(
            self._given_marks, log, 1
        )  # raises before a table with this start is created
        return self._follower

    def _check_other_commits(self, other_commits: Sequence[OtherCommit]) -> None:
        """Check the commits of other programs (rule 4)."""
        check_other_commits(other_commits, self._follower)
        for commit in sorted(other_commits):
            if commit.version not in self._warned_versions and not commit.is_maintenance:
                _log.warning(
                    "follow.foreign_commit table=%s version=%d operation=%s",
                    self._location,
                    commit.version,
                    commit.operation,
                )
        self._warned_versions = {commit.version for commit in other_commits}

    def _finish(self, *, is_end: bool) -> None:
        self._table.finish()
        self._is_created = True
        if self.is_commit_due or (is_end and (self.has_unstored_marks or not self._has_marks)):
            self._commit(None, self.marks)

    def _commit(self, changes: ChangesT | None, marks: MarkMap) -> None:
        new_marks = self._follower._replace(marks=marks)
        is_committed = self._table.apply(changes, new_marks)
        self._marks = new_marks
        if not is_committed and self.is_commit_due:  # rule 3; the log may never be idle
            self._table.finish()
            is_committed = self._table.apply(None, new_marks)
        if is_committed:
            _log.debug("follow.committed table=%s marks=%s", self._location, _marks_text(marks))
            self._stored_marks = new_marks
            self._is_created = self._has_marks = True
            self._last_commit_s = self._clock_s()
            self._conflict_count = 0


class Follower(Generic[ChangesT]):
    """Keeps tables equal to the log.

    Args:
        log: the log, with the changes of each table in it.
        tables: the tables, in the order of the changes.
        batch_transactions: the maximum number of transactions in a batch.
        on_progress: receives the number of applied transactions of this run, and the total number
            that is known so far.

    Raises:
        BadConfig: `batch_transactions` is below 1.
    """

    def __init__(
        self,
        log: FollowedLog[ChangesT],
        tables: Sequence[TableProgress[ChangesT]],
        *,
        batch_transactions: int,
        on_progress: Callable[[int, int], None] = lambda _applied, _total: None,
    ) -> None:
        if batch_transactions < 1:
            raise BadConfig(
                f"argument batch_transactions: expected 1 or more, found {batch_transactions}"
            )
        self._log, self._tables = log, list(tables)
        self._batch_transactions = batch_transactions
        self._on_progress = on_progress
        self._initial_count: int | None = None
        self._is_pause_due = False  # rule 7

    def run(self, until: MarkMap | None = None) -> list[TableMarks]:
        """Apply the log up to the marks `until`, or forever; return the marks in the tables.

        If the log is not available, a follower with an end fails, and a follower without an end
        tries again.

        Raises:
            BadConfig: start marks were given, but a table has other marks, or the start marks lack
                a partition. Or no start marks were given, and a table without marks has rows or
                another follower.
            ClusterKeyMismatch: a table follows another cluster.
            BadFormat: table marks are lost, a table was restored, or a payload does not fit.
            DataLoss: the log does not contain the transactions after the table marks.
            Unavailable: the log or a table does not answer (only with `until`).
            Superseded: in every attempt of the follower, another program has committed first.
        """
        while True:
            try:
                if self._apply_next(until):
                    return [table.stored_marks for table in self._tables]
            except Unavailable as error:
                if until is not None:
                    raise
                _log.warning("follow.unavailable reason=%s", error)
                self._log.wait()

    def _apply_next(self, until: MarkMap | None) -> bool:
        """Apply the next batch, or commit marks alone; return whether the follower has ended."""
        if not all(table.read(self._log) for table in self._tables):
            return False
        end = self._next_batch_end(until)
        if end is not None:
            before_first = int(BEFORE_FIRST)
            starts = [
                {part: table.marks.get(part, before_first) for part in end}
                for table in self._tables
            ]
            changes_by_table = self._log.changes(starts, end)
            committed = [
                table.commit(changes, end)
                for table, changes in zip(self._tables, changes_by_table, strict=True)
            ]
            self._is_pause_due &= all(committed)
            return False
        is_end = until is not None
        return all(table.finish(is_end=is_end) for table in self._tables) and is_end

    def _next_batch_end(self, until: MarkMap | None) -> dict[int, int] | None:
        """Wait for the next batch; return its end, None if marks are due or the end is reached."""
        while True:
            log = self._log.state()
            for table in self._tables:
                table.check(log)
            starts = self._lowest_marks(log)
            ends = log.marks if until is None else _limit_ends(log.marks, starts, until)
            self._report_progress(starts, ends)
            end = next_batch_marks(
                starts, LogState(ends, log.first_available_ids), self._batch_transactions
            )
            if end != starts and not self._is_pause_due:
                self._is_pause_due = until is None and end == ends
                return end
            if end == starts and (
                until is not None or any(table.is_commit_due for table in self._tables)
            ):
                return None
            self._is_pause_due = False
            self._log.wait()

    def _lowest_marks(self, log: LogState) -> dict[int, int]:
        """Return the lowest marks of all tables, from which the next batch is read (rule 6)."""
        before_first = int(BEFORE_FIRST)
        return {
            partition: min(table.marks.get(partition, before_first) for table in self._tables)
            for partition in log.marks
        }

    def _report_progress(self, starts: MarkMap, ends: MarkMap) -> None:
        done_count, total = (sum(mark + 1 for mark in marks.values()) for marks in (starts, ends))
        if self._initial_count is None:
            self._initial_count = done_count
        applied = done_count - self._initial_count
        self._on_progress(applied, max(applied, total - self._initial_count))


@contextmanager
def errors_of_table(location: str) -> Iterator[None]:
    """Add the table to the message of an error, unless the message already names it.

    `Unavailable` is not changed. This error may come from the log. If it comes from a table that
    does not answer, it already names the table.
    """
    try:
        yield
    except Unavailable:
        raise
    except WaltzError as error:
        prefix = f"table {location}"
        if not str(error).startswith(prefix):
            error.args = (f"{prefix}: {error}", *error.args[1:])
        raise


def check_other_commits(other_commits: Sequence[OtherCommit], follower: TableMarks) -> None:
    """Check the commits after the last commit of a follower (rule 4).

    Raises:
        BadFormat: a commit replaces the rows of the table, or belongs to another follower.
    """
    for commit in other_commits:
        version, operation, name = commit
        if commit.is_replacement:
            raise BadFormat(
                f"version {version} of the table is a {operation.upper()} after the last commit "
                f"of follower {follower.follower!r}, so the rows do not match the marks any "
                "more. Hint: build the table again, or, after a RESTORE, pass another follower "
                "name and the marks of the restored version."
            )
        if name is not None:
            raise BadFormat(
                f"version {version} of the table was written by follower {name!r} after the last "
                f"commit of follower {follower.follower!r}: a table has one follower. Hint: stop "
                f"this follower, and let follower {name!r} continue, or use another table."
            )


def _limit_ends(ends: MarkMap, marks: MarkMap, until: MarkMap) -> dict[int, int]:
    """Limit the ends of the log to `until`, but not below the table marks."""
    before_first = int(BEFORE_FIRST)
    return {
        partition: min(
            end, max(until.get(partition, before_first), marks.get(partition, before_first))
        )
        for partition, end in ends.items()
    }


def _marks_text(marks: MarkMap) -> str:
    text = ",".join(f"{partition}:{mark}" for partition, mark in sorted(marks.items())[:20])
    return text if len(marks) <= 20 else f"{text},..."
