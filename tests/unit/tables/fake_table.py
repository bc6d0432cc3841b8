"""A table and a log in memory, for tests of followers; changes map keys to values or None."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from waltz_core.errors import Superseded
from waltz_core.tables.delta_commits import DeltaCommit, find_newest_commit
from waltz_core.tables.follower import TableState
from waltz_core.tables.table_marks import LogState, MarkMap, TableMarks, decode_marks, encode_marks

Changes = dict[str, int | None]


class Killed(BaseException):
    """Simulates a killed process."""


class Version(NamedTuple):
    """A version of the table."""

    rows: dict[str, int]
    versions: dict[str, int]  # by application
    operation: str
    metadata: str | None = None


class StoredVersions(list[Version]):
    """The versions of a table, which several followers may share."""

    def commit(self, operation: str, rows: dict[str, int] | None = None) -> None:
        """Commit as another program."""
        old = self[-1]
        self.append(Version(old.rows if rows is None else rows, old.versions, operation))


class OpenTable:
    """A `FollowedTable` of a follower; `on_step` is called before each step of it.

    Like tables of files, the table is created with its first changes, or by `finish`.
    """

    def __init__(
        self, stored: StoredVersions, on_step: Callable[[str], None] | None = None
    ) -> None:
        self.stored = stored
        self._on_step = on_step or (lambda _step: None)
        self._seen = -1
        self._start_marks: TableMarks | None = None  # the start of a table that is not created yet

    def create(self, start: TableMarks) -> None:
        self._on_step("create")
        self._start_marks = start

    def finish(self) -> None:
        self._on_step("finish")
        self._create_due()

    def marks(self, follower: TableMarks) -> TableState | None:
        self._on_step("marks")
        if not self.stored:
            if self._start_marks is None:
                return None
            return TableState(
                encode_marks(self._start_marks), self._start_marks.version, (), has_rows=False
            )
        self._start_marks = None
        self._seen = len(self.stored) - 1
        newest = self.stored[-1]
        version = newest.versions.get(follower.application)
        commits = [
            DeltaCommit(index, each.operation, each.metadata)
            for index, each in enumerate(self.stored)
        ][::-1]
        if commit := find_newest_commit(follower, commits, is_complete=True):
            metadata, others = commit
            return TableState(metadata, version, others)
        marks = (decode_marks(each.metadata) for each in commits)
        rules = next((mark.rules for mark in marks if mark is not None), None)
        return TableState(None, version, (), rules is not None or bool(newest.rows), rules)

    def apply(self, changes: Changes | None, marks: TableMarks) -> bool:
        self._on_step("apply")
        old = self.stored[-1].rows if self.stored else {}
        rows = dict(old)
        for key, value in (changes or {}).items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        if changes is not None and rows == old:
            return False
        self._create_due()
        newest = self.stored[-1]
        if self._seen != len(self.stored) - 1:
            raise Superseded("another commit came first")
        versions = {**newest.versions, marks.application: marks.version}
        self._append(Version(rows, versions, "MERGE", encode_marks(marks)))
        return True

    def _create_due(self) -> None:
        if self._start_marks is None:
            return
        if self.stored:
            raise Superseded("the table exists")
        start = self._start_marks
        self._append(Version({}, {start.application: start.version}, "CREATE", encode_marks(start)))
        self._start_marks, self._seen = None, 0

    def _append(self, version: Version) -> None:
        self.stored.append(version)
        self._on_step("committed")


class LogInMemory:
    """A `FollowedLog` with a list of transactions per partition: a key, and its value or None."""

    def __init__(self, *partitions: list[tuple[str, int | None]]) -> None:
        self.partitions = [list(partition) for partition in partitions]
        self.firsts: dict[int, int] = {}
        self.read: list[tuple[dict[int, int], dict[int, int]]] = []
        self.on_wait: Callable[[], None] = _raise_killed

    def state(self) -> LogState:
        marks = {number: len(partition) - 1 for number, partition in enumerate(self.partitions)}
        return LogState(marks, self.firsts)

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> list[Changes]:
        self.read.append(
            (
                {partition: min(marks[partition] for marks in starts) for partition in ends},
                dict(ends),
            )
        )
        return [self.replayed(start, ends) for start in starts]

    def replayed(self, starts: MarkMap, ends: MarkMap) -> Changes:
        found: Changes = {}
        for number, end in ends.items():
            found |= dict(self.partitions[number][starts[number] + 1 : end + 1])
        return found

    def wait(self) -> None:
        self.on_wait()


def _raise_killed() -> None:
    raise Killed
