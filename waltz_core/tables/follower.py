"""The loop of a follower: it applies one batch of the log after the other to a table.

It knows neither a table format nor how changes are represented: `FollowedTable` and `FollowedLog`
are its view of both. Changes are an Arrow table without Spark, and a DataFrame with it.

Rules:
    1. The table is the checkpoint: before each batch, the follower reads the table marks. It skips
       a part of the log only if it has found no change there since it read the same marks.
    2. A batch is one commit, on top of the version of the table that the follower has read. If
       another commit came first, the follower reads the table again.
    3. A batch without changes writes no commit. The follower commits the marks alone when they have
       moved, and its last commit is old or it ends.
    4. A commit that replaces the rows of the table after the last commit of the follower, such as
       a `RESTORE`, is an error. So is a commit of a follower with another name: each would apply
       old changes over the rows of the other one. Other commits, except maintenance, are reported
       as warnings.
    5. A start is for a table without marks: it is never ignored, and never replaces marks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from waltz_core.errors import BadConfig, BadFormat, Superseded, Unavailable
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.tables.table_marks import (
    LogState,
    MarkMap,
    StoredRules,
    TableMarks,
    common_rules,
    continued,
    next_batch,
)

# After this time without a commit, marks that have moved are committed alone (rule 3).
MARKS_COMMIT_S = 600.0
# Commits that another commit preceded, without progress of the table marks.
CONFLICTS_MAX = 20

REMOVED = "the table was removed while it was followed"
# Operations of Delta and deltalake that replace the rows of a table, as `operation_of` has them.
_REPLACEMENTS = ("RESTORE", "CREATE OR REPLACE", "REPLACE TABLE", "WRITE (OVERWRITE)")
# Operations of Delta and deltalake that change no row; some names have a suffix ("VACUUM START").
_MAINTENANCE = (
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
    """A commit that the follower did not write; `follower` is the name of another follower."""

    version: int
    operation: str
    follower: str | None = None

    @property
    def is_replacement(self) -> bool:
        """Whether the commit replaces the rows of the table."""
        return self.operation.upper().startswith(_REPLACEMENTS)


class TableState(NamedTuple):
    """What the newest version of a table has of a follower.

    Attributes:
        metadata: that of the newest commit of the follower, with its marks; None if there is none.
        version: the number of transactions that the table has of the application, if any: the
            version in Delta's `txn`, not the version of the table.
        others: the commits after that commit, in any order; none if there is no such commit.
        has_rows: whether the table has rows, or commits of another follower.
        rules: those in the newest commit of any follower, if this one has no commit.
    """

    metadata: str | None
    version: int | None
    others: Sequence[OtherCommit] = ()
    has_rows: bool = True
    rules: StoredRules | None = None


def operation_of(operation: str, mode: str) -> str:
    """Return the operation of a commit of Delta, with the mode if it is an overwrite."""
    is_overwrite = operation == "WRITE" and mode.upper() == "OVERWRITE"
    return f"{operation} (OVERWRITE)" if is_overwrite else operation


class FollowedTable(Protocol[ChangesT_contra]):
    """A table of some format."""

    def create(self, start: TableMarks) -> None:
        """Create the table, now or at the latest in `finish`; the commit has the marks.

        Until then, `marks` returns the start: a first batch that fails should leave no table.

        Raises:
            Superseded: the table exists.
        """

    def finish(self) -> None:
        """Create the table if it is due; raises Superseded."""

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the newest version, on which `apply` commits; None without a table.

        Args:
            follower: its name and cluster.
        """

    def apply(self, changes: ChangesT_contra | None, marks: TableMarks) -> bool:
        """Commit changes and the marks after them as one version; return whether there is one.

        Changes without an effect need no version. None is no changes, and the marks are committed.

        Raises:
            Superseded: another commit is on top of the version that `marks` has read.
        """


class FollowedLog(Protocol[ChangesT_co]):
    """The log, and the changes in it."""

    def state(self) -> LogState:
        """Return the marks and first available IDs now; marks never decrease between calls.

        Raises:
            Unavailable: a partition does not answer.
        """

    def changes(self, starts: MarkMap, ends: MarkMap) -> ChangesT_co:
        """Return the last change of each key in the transactions after `starts` up to `ends`.

        Both have the same partitions.

        Raises:
            Unavailable: a partition does not answer.
            BeforeLogStart: transactions have expired meanwhile.
            BadFormat: a payload does not fit.
        """

    def wait(self) -> None:
        """Wait a while for more transactions, or until requests may succeed again."""


class Follower(Generic[ChangesT]):
    """Keeps a table equal to the log.

    Args:
        log: the log, with the changes in it.
        table: the table; it is created if there is none.
        name: the name of the follower and the key of the cluster; its marks are the start for a
            table without marks. Without any, the start is the first available transaction.
        batch_transactions: the maximum number of transactions of a batch.
        on_progress: is called with two numbers of transactions: those that this run has applied,
            and those that it has to apply, as far as it knows.
        clock_s: a monotonic clock.

    Raises:
        BadConfig: `batch_transactions` is below 1.
    """

    def __init__(
        self,
        log: FollowedLog[ChangesT],
        table: FollowedTable[ChangesT],
        name: TableMarks,
        *,
        batch_transactions: int,
        on_progress: Callable[[int, int], None] = lambda _applied, _total: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if batch_transactions < 1:
            raise BadConfig(f"batch_transactions: expected 1 or more, found {batch_transactions}")
        self._log, self._table = log, table
        self._name, self._given = name, name.marks
        self._batch_transactions = batch_transactions
        self._on_progress = on_progress
        self._clock_s = clock_s
        self._committed_s = clock_s()
        self._seen: tuple[str | None, int | None] | None = None  # of the table, when it was read
        self._stored = name  # the marks in the table
        self._marks = name  # those up to which there are no more changes (rule 1)
        self._first_version = 0
        self._warned: set[int] = set()  # versions of other programs
        self._conflicts = 0

    def run(self, until: MarkMap | None = None) -> TableMarks:
        """Apply the log up to the marks `until`, or forever; return the marks of the table.

        Without an end, it tries again when the log is not available; with an end it fails.

        Raises:
            BadConfig: a start was given, and the table has marks or the start lacks a partition;
                or no start was given, and a table without marks has rows or another follower.
            ClusterKeyMismatch: the table follows another cluster.
            BadFormat: the table marks are lost, the table was restored, or a payload does not fit.
            DataLoss: the log does not have the transactions after the table marks.
            Unavailable: the log or the table does not answer (only with `until`).
            Superseded: another commit came first each time.
        """
        while True:
            try:
                if self._turn(until):
                    return self._stored
            except Superseded as error:
                self._conflicts += 1
                if self._conflicts > CONFLICTS_MAX:
                    raise
                _log.info("follow.commit_conflict reason=%s", error)
            except Unavailable as error:
                if until is not None:
                    raise
                _log.warning("follow.unavailable reason=%s", error)
                self._log.wait()

    def _turn(self, until: MarkMap | None) -> bool:
        """Apply the next batch, or commit the marks alone; return whether the end is reached."""
        self._read_table()
        end = self._next_end(until)
        if end is None:
            self._table.finish()
        if end is not None:
            starts = {each: self._marks.marks.get(each, int(BEFORE_FIRST)) for each in end}
            self._commit(self._log.changes(starts, end), end)
        elif self._marks != self._stored:
            self._commit(None, self._marks.marks)
        return end is None and until is not None

    # --- the table

    def _read_table(self) -> None:
        """Read the newest version of the table; create it if there is none."""
        state = self._table.marks(self._name)
        if state is None:
            if self._seen is not None:
                raise BadFormat(REMOVED)
            self._table.create(self._start())
            state = self._table.marks(self._name)
            assert state is not None, "it was created"
        self._check_others(state.others)
        seen = state.metadata, state.version
        if seen != self._seen:  # rule 1: also a commit of another follower with this name
            stored = self._continued(state)
            if self._seen is None:
                self._first_version = stored.version
                _log.info("follow.started marks=%s", _shown(stored.marks))
            self._seen, self._conflicts = seen, 0
            self._stored = self._marks = stored

    def _continued(self, state: TableState) -> TableMarks:
        """Return the marks from which the follower continues (rule 5)."""
        is_given = bool(self._given)
        if state.metadata is None:
            is_new = state.version is None
            if is_new and state.has_rows and not is_given:
                raise BadConfig(
                    "the table has rows or another follower, but no marks of follower "
                    f"{self._name.follower!r}. Hint: pass the marks up to which the table has the "
                    "log, or use another table."
                )
            if state.rules is not None:
                common_rules(state.rules, self._name.rules)
            if state.version is None or (is_given and state.version <= self._name.version):
                return self._start()
        stored = continued(state.metadata, state.version, self._name)
        if self._seen is None and is_given and dict(self._given) != dict(stored.marks):
            raise BadConfig(
                f"a start was given, but follower {self._name.follower!r} has written the table "
                f"up to {_shown(stored.marks)}. Hint: omit the start; the follower continues from "
                "the marks of the table."
            )
        return stored

    def _start(self) -> TableMarks:
        """Return the marks before the first transactions of a table without marks.

        Raises:
            BadConfig: the given ones lack a partition.
            DataLoss: the log does not have what is after them.
        """
        log = self._log.state()
        if not self._given:
            firsts = {each: log.firsts.get(each, 0) - 1 for each in log.marks}
            return self._name._replace(marks=firsts)
        if self._given.keys() != log.marks.keys():
            raise BadConfig(
                f"start marks: expected a mark for each partition of {sorted(log.marks)}, found "
                f"those for {sorted(self._given)}. Hint: -1 is before the first transaction."
            )
        next_batch(self._given, log, 1)  # before a table with this start is created
        return self._name

    def _check_others(self, others: Sequence[OtherCommit]) -> None:
        """Check the commits of other programs (rule 4)."""
        check_others(others, self._name)
        for version, operation, _ in sorted(others):
            if version not in self._warned and not operation.upper().startswith(_MAINTENANCE):
                _log.warning("follow.other_commit version=%d operation=%s", version, operation)
        self._warned = {each.version for each in others}

    def _commit(self, changes: ChangesT | None, marks: MarkMap) -> None:
        after = self._name._replace(marks=marks)
        if self._table.apply(changes, after):
            _log.debug("follow.committed marks=%s", _shown(marks))
            self._stored = after
            self._committed_s = self._clock_s()
            self._conflicts = 0
        self._marks = after

    # --- the log

    def _next_end(self, until: MarkMap | None) -> dict[int, int] | None:
        """Wait for the next batch; None when the marks are due, or the end is reached (rule 3)."""
        marks = self._marks.marks
        while True:
            log = self._log.state()
            ends = log.marks if until is None else _limited(log.marks, marks, until)
            self._report(ends)
            end = next_batch(marks, LogState(ends, log.firsts), self._batch_transactions)
            if any(mark > marks.get(each, int(BEFORE_FIRST)) for each, mark in end.items()):
                return end
            is_due = self._clock_s() - self._committed_s >= MARKS_COMMIT_S
            if until is not None or (is_due and self._marks != self._stored):
                return None
            self._log.wait()

    def _report(self, ends: MarkMap) -> None:
        applied = self._marks.version - self._first_version
        total = sum(mark + 1 for mark in ends.values()) - self._first_version
        self._on_progress(applied, max(applied, total))


def check_others(others: Sequence[OtherCommit], follower: TableMarks) -> None:
    """Check the commits after the last one of a follower (rule 4).

    Raises:
        BadFormat: one replaces the rows of the table, or is of another follower.
    """
    for each in others:
        version, operation, name = each
        if each.is_replacement:
            raise BadFormat(
                f"version {version} of the table is a {operation.upper()} after the last commit "
                f"of follower {follower.follower!r}: its rows and its marks differ. Hint: build "
                "the table again, or, after a RESTORE, pass another follower name and the marks "
                "of the restored version."
            )
        if name is not None:
            raise BadFormat(
                f"version {version} of the table was written by follower {name!r} after the last "
                f"commit of follower {follower.follower!r}: a table has one follower. Hint: stop "
                f"this one, and let follower {name!r} continue, or use another table."
            )


def _limited(ends: MarkMap, marks: MarkMap, until: MarkMap) -> dict[int, int]:
    """Return lower ends of the log: up to `until`, and not below the table marks."""
    before = int(BEFORE_FIRST)
    return {
        each: min(end, max(until.get(each, before), marks.get(each, before)))
        for each, end in ends.items()
    }


def _shown(marks: MarkMap) -> str:
    shown = ",".join(f"{partition}:{mark}" for partition, mark in sorted(marks.items())[:20])
    return shown if len(marks) <= 20 else f"{shown},..."
