"""Rules of the server, each broken alone."""

import numpy as np

from tests.sim.switches import Patches, instead, nothing, switch
from waltz_core.server import append
from waltz_core.server.append import AppendPipeline
from waltz_core.server.judging import Piece
from waltz_core.server.locks import LockTable


@switch
def locks_kept_over_foreign_session() -> Patches:
    """The lock table is not filled anew when another server may have written."""
    yield instead(LockTable, "reset", nothing)


@switch
def locks_not_clamped() -> Patches:
    """Entries of a lost session stay in the lock table."""
    yield instead(LockTable, "clamp", nothing)


@switch
def locks_written_at_commit() -> Patches:
    """A lock is entered when its transaction is committed, not when it is judged."""
    judge, judge_one, committed = LockTable.judge, LockTable.judge_one, AppendPipeline.committed
    later = {}  # table -> what was entered too early, by id

    def without_entries(self, call, next_id):
        before = self._slots.copy()
        found = call()
        changed = np.flatnonzero(self._slots != before)
        entries = later.setdefault(id(self), [])
        entries += [(int(self._slots[slot]), int(slot)) for slot in changed]
        self._slots[changed] = before[changed]
        return found

    def judge_later(self, requests, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return without_entries(self, lambda: judge(self, requests, **marks), next_id)

    def judge_one_later(self, locks, mark, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return without_entries(self, lambda: judge_one(self, locks, mark, **marks), next_id)

    def committed_then_entered(self, last, chain, *, now_ms):
        entries = later.pop(id(self._table), [])
        for entered, slot in entries:
            if entered <= last:
                self._table._slots[slot] = max(entered, self._table._slots[slot])
        later[id(self._table)] = [entry for entry in entries if entry[0] > last]
        return committed(self, last, chain, now_ms=now_ms)

    yield instead(LockTable, "judge", judge_later)
    yield instead(LockTable, "judge_one", judge_one_later)
    yield instead(AppendPipeline, "committed", committed_then_entered)


@switch
def read_locks_unchecked() -> Patches:
    """Read locks are not looked up."""
    yield from without_locks("read")


@switch
def append_locks_not_entered() -> Patches:
    """Append locks leave nothing in the table."""
    yield from without_locks("append")


def without_locks(kind):
    """Judge every row as if it had asked for no locks of a kind."""
    judge, judge_one = LockTable.judge, LockTable.judge_one

    def judge_rows(self, requests, *, high_water_mark, next_id):
        asked = getattr(requests, kind)
        none = asked._replace(offsets=np.zeros_like(asked.offsets), values=asked.values[:0])
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return judge(self, requests._replace(**{kind: none}), **marks)

    def judge_row(self, locks, mark, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        write, read, append = locks
        left = (write, (), append) if kind == "read" else (write, read, ())
        return judge_one(self, left, mark, **marks)

    yield instead(LockTable, "judge", judge_rows)
    yield instead(LockTable, "judge_one", judge_row)


@switch
def conflict_in_flight_told_at_once() -> Patches:
    """A refusal for a transaction in flight is told before that one is final."""
    rows, singles = append.judge_rows, append.judge_singles

    def judge_rows(ticket, stop, table, place):
        piece = rows(ticket, stop, table, place)
        return (
            piece if piece.part is not None else Piece(None, [], [*piece.doubtful, *piece.refused])
        )

    def judge_singles(group, table, place):
        piece = singles(group, table, place)
        kept = [ticket.message for ticket in group if ticket.transaction_id >= 0]
        locks = [lock for each in kept for lock in each.write_locks]
        return piece._replace(locks=np.array(locks, dtype=">i4").tobytes())

    yield instead(append, "judge_rows", judge_rows)
    yield instead(append, "judge_singles", judge_singles)
