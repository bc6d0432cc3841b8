"""The lock table of one partition: which transaction may have written a lock last.

Optimistic locking is decided here and nowhere else. Given the locks of a batch of rows, their
clients' marks and the log's, the table says which rows get which id and which are refused; it knows
nothing of clients, sessions or answers.

The table is a counting-free sketch: a lock has three slots, a slot holds the highest id of all the
locks that share it, and the least of the three is an estimate of the lock's last writer that errs
upwards only. So a false refusal is possible and a missed conflict is not.

Rules (docs/design/correctness.md 2.3 and 2.4, rows 25-30; docs/design/wire-format.md 4):
    1. The estimate of a row is the greatest over its write and read locks; append locks update the
       table and are never compared. A row passes when the estimate is not above its client's mark.
    2. A row whose mark is above the log's is AHEAD and is not judged at all.
    3. An accepted row enters its write and append locks at once, with the id it will have. An
       entry above the high-water mark is thus "reserved": its transaction is still in flight.
    4. A row refused because of an entry in flight is PENDING on that id: the refusal may be told
       when the id is committed; when the id is lost, the row is lost too and is not judged again,
       so that nothing can bring it back after its client was told of the loss.
    5. Rows are judged in order, as if one by one: a row sees what the accepted rows before it in
       its own batch have entered.
    6. last writer(lock) <= estimate(lock) <= highest id given out; with nothing in flight no
       estimate is above the high-water mark.
       What is lost with its session is taken back: what its locks held before holds again. Else a
       row that is sent again would be refused for its own first try.
    7. After `reset` no slot is below the mark; `refine` lets them go down as far as every writer
       above is known (`refill.py`). A slot above the floor was entered, and stays.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.records.batches import LockColumn
from waltz_core.records.record import TransactionId

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# A prime: with the fixed hash chain a power of two has nine times as many false refusals.
SLOT_COUNT: Final = 1_048_573
SLOT_BYTES: Final = 8
HASH_COUNT: Final = 3
REFUSED: Final = -1
NO_CONFLICT: Final = -1
# What `judge_one` says beside an estimate.
PASSED: Final = -1
AHEAD: Final = -2

_MULTIPLIER: Final = np.uint32(1103515245)
_INCREMENT: Final = np.uint32(12345)
_INDEX_MASK: Final = np.uint32(0x3FFFFFFF)
# The same for plain numbers.
_A: Final = int(_MULTIPLIER)
_B: Final = int(_INCREMENT)
_WORD: Final = 0xFFFFFFFF
_INDEX: Final = int(_INDEX_MASK)
_I64_MIN: Final = int(np.iinfo(np.int64).min)
_I64_MAX: Final = int(np.iinfo(np.int64).max)
# Above every transaction id: `_IN_BATCH + row` in a slot means "row of the batch being judged".
_IN_BATCH: Final = 1 << 62
# What more entries than these have overwritten is not kept: it would cost more than it is worth.
_TAKEN_BACK_MAX: Final = HASH_COUNT * 8_192
# For the false refusal estimate a sample of this many slots has an error of about half a percent.
_SAMPLE_SLOTS: Final = 65_536


class LockRequests(NamedTuple):
    """The rows of one append as the table needs them.

    `marks` are the client high-water marks, one a row or one for all. `eligible` (all, if None)
    leaves out rows that were refused for other reasons: they get no id and enter no lock.
    """

    write: LockColumn
    read: LockColumn
    append: LockColumn
    marks: I64 | int
    eligible: Mask | None = None


class Judgement(NamedTuple):
    """The verdict on each row.

    `ids` are consecutive over the accepted rows, REFUSED for the others. `ahead` marks the rows of
    rule 2. `conflicts` holds the estimate that a row was refused for, else NO_CONFLICT. `pending`
    marks the rows of rule 4, which wait for the id in `conflicts` to become final.
    """

    ids: I64
    conflicts: I64
    ahead: Mask
    pending: Mask
    accepted_count: int

    @property
    def accepted(self) -> Mask:
        """Which rows have an id; the mask for `batches.encode_records`."""
        accepted: Mask = self.ids != REFUSED
        return accepted


class _Places(NamedTuple):
    """Where locks are in the table."""

    rows: I64  # row of each lock
    slots: I64  # (3, lock count)

    def with_those_of(self, other: "_Places") -> "_Places":
        """Return both, these first; most batches have one kind of locks only."""
        if not other.rows.size:
            return self
        if not self.rows.size:
            return other
        rows = np.concatenate((self.rows, other.rows))
        return _Places(rows, np.concatenate((self.slots, other.slots), axis=1))


class _Estimates(NamedTuple):
    """What the slots of checked locks say: before the batch, and with every row before entered."""

    rows: I64  # row of each checked lock
    slots: I64  # (3, lock count)
    before: I64  # (3, lock count) slot values before the batch
    entered: I64  # (3, lock count) the same, or `_IN_BATCH + row` where an earlier row may enter


class _Entered(NamedTuple):
    """Slots that were entered for what is in flight, and what they held before, in one order."""

    last: int  # the highest id
    slots: I64 | list[int]
    before: I64 | list[int]
    ids: I64 | None  # those that were entered; None: all are the highest


class LockTable:
    """Estimates of the last writer of each lock; see the module's rules."""

    __slots__ = ("_entered", "_plain", "_slot_count", "_slots")

    def __init__(self, slot_count: int, high_water_mark: TransactionId) -> None:
        assert slot_count > 0
        self._slot_count = np.uint32(slot_count)
        self._slots = np.full(slot_count, high_water_mark, dtype=np.int64)
        self._plain = self._slots.data  # the same memory, quicker one by one
        self._entered: deque[_Entered] = deque()  # by id

    # -----------------------------------------------------------------------------------------
    # appends

    def judge(
        self, requests: LockRequests, *, high_water_mark: TransactionId, next_id: TransactionId
    ) -> Judgement:
        """Judge the rows in order (rule 5), and enter the locks of the accepted ones (rule 3).

        `next_id` is the id of the next accepted row; everything from `high_water_mark + 1` up to
        it is in flight.
        """
        assert high_water_mark < next_id
        count = requests.write.offsets.size - 1
        marks = np.broadcast_to(np.asarray(requests.marks, dtype=np.int64), (count,))
        ahead = marks > high_water_mark
        open_rows = ~ahead
        if requests.eligible is not None:
            ahead &= requests.eligible
            open_rows &= requests.eligible
        write, read, append = (self._places(column) for column in requests[:3])
        entering = write.with_those_of(append)
        # One dimension only: NumPy 2.4's `ufunc.at` does not broadcast over two dimensions.
        entries = np.tile(entering.rows, HASH_COUNT), entering.slots.ravel()
        found = self._estimates(write.with_those_of(read), entering, entries)
        accepted, conflicts = _decide(found, marks, open_rows, entries)
        ranks = np.cumsum(accepted)
        # A conflict with a row of this batch is known by the row; its id only now.
        inside = conflicts >= _IN_BATCH
        if inside.any():
            conflicts[inside] = next_id - 1 + ranks[conflicts[inside] - _IN_BATCH]
        ids = np.where(accepted, next_id - 1 + ranks, REFUSED)
        self._enter(*entries, ids)
        return Judgement(
            ids=ids,
            conflicts=conflicts,
            ahead=ahead,
            pending=conflicts > high_water_mark,
            accepted_count=int(ranks[-1]) if count else 0,
        )

    def judge_one(
        self,
        locks: tuple[Sequence[int], Sequence[int], Sequence[int]],
        mark: int,
        *,
        high_water_mark: TransactionId,
        next_id: TransactionId,
    ) -> int:
        """Judge one row as `judge` would: for so few, arrays cost more than they save.

        `locks` are the write, read and append locks. Returns PASSED (the row has `next_id`, and
        its locks are entered), AHEAD, or the estimate that the row is refused for.
        """
        if mark > high_water_mark:
            return AHEAD
        slots, count = self._plain, len(self._plain)
        highest = NO_CONFLICT
        for lock in (*locks[0], *locks[1]):
            first, second, third = _slots_of(lock, count)
            highest = max(highest, min(slots[first], slots[second], slots[third]))
        if highest > mark:
            return highest
        entered = [slot for lock in (*locks[0], *locks[2]) for slot in _slots_of(lock, count)]
        if entered:
            before = [slots[slot] for slot in entered]
            self._entered.append(_Entered(next_id, entered, before, None))
            for slot in entered:
                slots[slot] = next_id
        return PASSED

    def landed(self, high_water_mark: TransactionId) -> None:
        """What is in the log up to the mark is not taken back any more."""
        while self._entered and self._entered[0].last <= high_water_mark:
            self._entered.popleft()

    # -----------------------------------------------------------------------------------------
    # sessions

    def clamp(self, high_water_mark: TransactionId) -> None:
        """Forget what never came to be: after a lost session, nothing lies above its mark (rule 6).

        Right only when no other server has owned the partition since; else `reset`.
        """
        while self._entered and (lost := self._entered.pop()).last > high_water_mark:
            self._slots[lost.slots] = lost.before
            if lost.ids is not None:  # the first of them may be in the log
                kept = lost.ids <= high_water_mark
                np.maximum.at(self._slots, np.asarray(lost.slots)[kept], lost.ids[kept])
        self._entered.clear()
        np.minimum(self._slots, high_water_mark, out=self._slots)

    def reset(self, high_water_mark: TransactionId) -> None:
        """Know nothing but that all writes lie at or below the mark."""
        self._entered.clear()
        self._slots.fill(high_water_mark)

    def refine(
        self, floor: TransactionId, lower_floor: TransactionId, locks: I32, ids: I64
    ) -> None:
        """Learn all locks of the transactions above a lower floor, up to the floor.

        The floor is the least that any slot holds, since nothing more was known of what lies there
        or below. `ids` has for each lock an id not below that of its writer.
        """
        assert lower_floor < floor
        np.putmask(self._slots, self._slots <= floor, lower_floor)
        slots = indices(locks, int(self._slot_count))
        np.maximum.at(self._slots, slots.ravel(), np.tile(ids, HASH_COUNT))

    # -----------------------------------------------------------------------------------------
    # figures

    @property
    def size_bytes(self) -> int:
        """How much memory the table takes."""
        return int(self._slots.nbytes)

    def estimate(self, lock: int) -> TransactionId:
        """Return the estimate of one lock."""
        slots = self._plain
        first, second, third = _slots_of(lock, len(slots))
        return TransactionId(min(slots[first], slots[second], slots[third]))

    def false_refusal_probability(self, mark: TransactionId) -> float:
        """Return how likely a lock that nobody wrote is refused to a client at `mark`.

        It is refused when all its three slots hold an id above the mark; a sample of the slots
        says how many do.
        """
        step = max(1, self._slots.size // _SAMPLE_SLOTS)
        return float(np.mean(self._slots[::step] > mark)) ** HASH_COUNT

    # -----------------------------------------------------------------------------------------
    # inside

    def _places(self, column: LockColumn) -> _Places:
        rows = np.repeat(np.arange(column.offsets.size - 1), column.counts)
        return _Places(rows, indices(column.values, int(self._slot_count)))

    def _estimates(
        self, checked: _Places, entering: _Places, entries: tuple[I64, I64]
    ) -> _Estimates:
        """Look up the checked locks before the batch, and as if all earlier rows had entered.

        To find the first row that enters a slot, the row numbers are put into the table itself
        and taken out again: a second table of its size would double what a partition costs.
        """
        kept = self._slots.take(entering.slots)
        before = kept if checked is entering else self._slots.take(checked.slots)
        self._slots[entering.slots] = _I64_MAX
        np.minimum.at(self._slots, entries[1], entries[0] + _IN_BATCH)
        entered = self._slots.take(checked.slots)
        self._slots[entering.slots] = kept
        earlier = (entered >= _IN_BATCH) & (entered - _IN_BATCH < checked.rows)
        return _Estimates(checked.rows, checked.slots, before, np.where(earlier, entered, before))

    def _enter(self, rows: I64, slots: I64, ids: I64) -> None:
        entering = ids[rows]
        accepted = entering != REFUSED
        slots, entering = slots[accepted], entering[accepted]
        if 0 < entering.size <= _TAKEN_BACK_MAX:
            before = self._slots.take(slots)
            self._entered.append(_Entered(int(entering.max()), slots, before, entering))
        np.maximum.at(self._slots, slots, entering)


def indices(locks: I32 | Sequence[int], slot_count: int) -> I64:
    """Return the three slots of each lock hash as a (3, lock count) array.

    docs/design/wire-format.md 4 has the function.
    """
    value = np.asarray(locks, dtype=np.int32).view(np.uint32)
    slots = np.empty((HASH_COUNT, value.size), dtype=np.int64)
    for turn in range(HASH_COUNT):
        value = value * _MULTIPLIER + _INCREMENT
        slots[turn] = (value & _INDEX_MASK) % np.uint32(slot_count)
    return slots


def _slots_of(lock: int, slot_count: int) -> tuple[int, int, int]:
    """Return what `indices` does, of one lock: for so few, arrays cost more than they save."""
    one = (lock * _A + _B) & _WORD
    two = (one * _A + _B) & _WORD
    three = (two * _A + _B) & _WORD
    return (one & _INDEX) % slot_count, (two & _INDEX) % slot_count, (three & _INDEX) % slot_count


def slot_count_within(budget_bytes: int, table_count: int) -> int:
    """Return the largest prime number of slots, up to the default, that the budget allows.

    The budget is a server's, for the tables of all partitions that it may come to own.
    """
    assert table_count > 0
    count = min(SLOT_COUNT, max(2, budget_bytes // (SLOT_BYTES * table_count)))
    while any(count % divisor == 0 for divisor in range(2, int(count**0.5) + 1)):
        count -= 1
    return count


def _decide(
    found: _Estimates, marks: I64, open_rows: Mask, entries: tuple[I64, I64]
) -> tuple[Mask, I64]:
    """Return which rows are accepted, and for what each other open row is refused.

    Most rows are settled by whole-array comparisons. What is left are rows that stand or fall
    with an earlier row of the batch; they are taken one by one.
    """
    count = marks.size
    lowest = _greatest_by_row(found.before.min(axis=0), found.rows, count)
    highest = _greatest_by_row(found.entered.min(axis=0), found.rows, count)
    accepted = open_rows & (lowest <= marks)
    doubtful = open_rows & (highest != lowest) & (highest > marks)
    conflicts = np.where(open_rows & ~accepted, lowest, NO_CONFLICT)
    if doubtful.any():
        accepted &= ~doubtful
        _decide_in_order(_follow(found, doubtful, entries), marks, accepted, conflicts)
    return accepted, conflicts


def _greatest_by_row(values: I64, rows: I64, count: int) -> I64:
    if rows.size == count and (rows[1:] > rows[:-1]).all():
        return values  # The usual case, one lock in each row.
    greatest = np.full(count, _I64_MIN, dtype=np.int64)
    np.maximum.at(greatest, rows, values)
    return greatest


class _Followed(NamedTuple):
    """The slots that doubtful rows check, renumbered, as plain lists in row order."""

    rows: list[int]  # row of each checked lock
    places: list[list[int]]  # its three slots, as places in `held`
    held: list[int]  # what each slot holds, followed through the batch
    entering: list[int]  # row of each entry into one of these slots
    targets: list[int]  # the place that it enters


def _follow(found: _Estimates, doubtful: Mask, entries: tuple[I64, I64]) -> _Followed:
    checked = np.flatnonzero(doubtful[found.rows])
    checked = checked[np.argsort(found.rows[checked], kind="stable")]
    slots, places = np.unique(found.slots[:, checked], return_inverse=True)
    places = places.reshape(HASH_COUNT, -1)
    held = np.empty(slots.size, dtype=np.int64)
    held[places] = found.before[:, checked]
    rows, entered = entries
    target = np.minimum(np.searchsorted(slots, entered), slots.size - 1)
    relevant = np.flatnonzero(slots[target] == entered)
    relevant = relevant[np.argsort(rows[relevant], kind="stable")]
    return _Followed(
        rows=found.rows[checked].tolist(),
        places=places.T.tolist(),
        held=held.tolist(),
        entering=rows[relevant].tolist(),
        targets=target[relevant].tolist(),
    )


def _decide_in_order(followed: _Followed, marks: I64, accepted: Mask, conflicts: I64) -> None:
    """Settle the doubtful rows one after the other, in place.

    Each of them comes in as not accepted. The loop calls nothing: it may run for each row of a
    batch that writes one lock over and over.
    """
    rows, places, held, entering, targets = followed
    passed, refused, limits = accepted.tolist(), conflicts.tolist(), marks.tolist()
    lock, lock_count = 0, len(rows)
    entry, entry_count = 0, len(entering)
    while lock < lock_count:
        row = rows[lock]
        while entry < entry_count and entering[entry] < row:
            if passed[entering[entry]]:
                held[targets[entry]] = _IN_BATCH + entering[entry]
            entry += 1
        estimate = NO_CONFLICT
        while lock < lock_count and rows[lock] == row:
            first, second, third = places[lock]
            least = held[first] if held[first] < held[second] else held[second]  # noqa: FURB136
            least = least if least < held[third] else held[third]  # noqa: FURB136
            estimate = least if least > estimate else estimate  # noqa: FURB136 - no call per row
            lock += 1
        if estimate > limits[row]:
            refused[row] = estimate
        else:
            passed[row] = True
            refused[row] = NO_CONFLICT
    accepted[:] = passed
    conflicts[:] = refused
