"""The lock table of one partition: estimates which transaction wrote a lock last.

Only this module decides optimistic locking. Its input consists of the locks of a batch of rows,
their clients' marks and the log's high-water mark. The module decides which rows get an ID and
which are rejected. The module is independent of clients, sessions and answers.

The table is similar to a count-min sketch. A lock has three slots. A slot contains the highest ID
of all locks that share the slot. The minimum of the three slots is an estimate of the lock's last
writer. This estimate is never too low, so a false rejection is possible, but a missed conflict is
not.

Rules (docs/design/correctness.md 2.3 and 2.4, rows 25-30; docs/design/wire-format.md 4):
    1. The estimate of a row is the highest estimate of its write and read locks. Append locks
       update the table and are never compared. A row passes if its estimate is not above its
       client's mark. `validate` applies this rule to many rows as arrays, `validate_one` to a
       single row.
    2. A row whose mark is above the log's is AHEAD and is not validated at all.
    3. An accepted row enters its write and append locks at once, with the ID that it will have. So
       an entry above the high-water mark is "reserved": its transaction is still in flight.
    4. If a row is rejected because of a transaction in flight, the row is PENDING until this
       transaction is final. If the transaction is committed, the rejection is reported. If the
       transaction is lost, the row is lost, too. The row is not validated again, so it cannot enter
       the log after its client was notified of the loss.
    5. Rows are validated in order, as if one by one. The entries of an accepted row apply to all
       later rows of the same batch.
    6. last writer(lock) <= estimate(lock) <= highest assigned ID. If no transaction is in flight,
       no estimate is above the high-water mark. So when entries are lost with a session, the slots
       get their previous values again. Without this, a row that is sent again would be rejected
       because of its own first attempt.
    7. A new owner does not know the last writers, so after `reset` no slot is below the high-water
       mark. The floor is an ID above which every writer is known (`lock_table_loader.py`). When the
       floor moves down, `enter_older_locks` lowers the slots at the old floor to the new floor. A
       slot above the old floor was entered by a known writer, and keeps its value.
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

# A prime number. With the specified hash function, a power of two causes nine times as many false
# rejections.
SLOT_COUNT: Final = 1_048_573
SLOT_BYTES: Final = 8
HASH_COUNT: Final = 3
NO_ID: Final = -1
NO_CONFLICT: Final = -1
# The results of `validate_one` that are not an estimate.
PASSED: Final = -1
AHEAD: Final = -2

_MULTIPLIER: Final = np.uint32(1103515245)
_INCREMENT: Final = np.uint32(12345)
_INDEX_MASK: Final = np.uint32(0x3FFFFFFF)
# The same constants as plain Python numbers.
_MULTIPLIER_INT: Final = int(_MULTIPLIER)
_INCREMENT_INT: Final = int(_INCREMENT)
_UINT32_MASK: Final = 0xFFFFFFFF
_INDEX_MASK_INT: Final = int(_INDEX_MASK)
_I64_MIN: Final = int(np.iinfo(np.int64).min)
_I64_MAX: Final = int(np.iinfo(np.int64).max)
# Above every transaction ID. `_BATCH_ROW_BASE + row` in a slot means "row of the batch being
# validated".
_BATCH_ROW_BASE: Final = 1 << 62
# For a batch with more entries, the table does not keep the overwritten values, because the copy
# would cost more than it saves.
_REMEMBERED_LOCKS_MAX: Final = HASH_COUNT * 8_192
# With a sample of this size, the estimate of false rejections has an error of about 0.5 percent.
_SAMPLE_SLOT_COUNT: Final = 65_536


class LockRequests(NamedTuple):
    """The locks and marks of the rows of one append.

    `marks` are the high-water marks of the client: one per row, or one for all rows. `eligible` is
    false for rows that were already rejected for other reasons; they get no ID and enter no lock.
    None means that all rows are eligible.
    """

    write: LockColumn
    read: LockColumn
    append: LockColumn
    marks: I64 | int
    eligible: Mask | None = None


class Validation(NamedTuple):
    """The result of the validation, for each row.

    `ids` are consecutive over the accepted rows, and NO_ID for the others. `ahead` is true for
    the rows of rule 2. `conflicts` contains the estimate that has caused the rejection of a
    row, otherwise NO_CONFLICT. `pending` is true for the rows of rule 4; they wait until the ID in
    `conflicts` is final.
    """

    ids: I64
    conflicts: I64
    ahead: Mask
    pending: Mask
    accepted_count: int

    @property
    def accepted(self) -> Mask:
        """A mask of the rows that have an ID, as `batches.encode_records` expects it."""
        accepted: Mask = self.ids != NO_ID
        return accepted


class _LockSlots(NamedTuple):
    """The slots of a list of locks in the table."""

    rows: I64  # the row of each lock
    slots: I64  # (3, lock count)

    def concatenate(self, other: "_LockSlots") -> "_LockSlots":
        """Concatenate two lists of locks; the locks of this list come first.

        Most batches have one kind of locks only, so usually one of the lists is empty.
        """
        if not other.rows.size:
            return self
        if not self.rows.size:
            return other
        rows = np.concatenate((self.rows, other.rows))
        return _LockSlots(rows, np.concatenate((self.slots, other.slots), axis=1))


class _Estimates(NamedTuple):
    """The slot values of checked locks: before the batch, and before the row of the lock.

    The second values contain the entries of all earlier rows of the batch.
    """

    rows: I64  # the row of each checked lock
    slots: I64  # (3, lock count)
    values_before_batch: I64  # (3, lock count)
    # Like `values_before_batch`, but `_BATCH_ROW_BASE + row` where this earlier row may enter.
    values_before_row: I64


class _EnteredSlots(NamedTuple):
    """The slots that rows in flight have entered, and the previous values of these slots."""

    last: int  # the highest ID of these rows
    slots: I64 | list[int]
    previous_values: I64 | list[int]
    ids: I64 | None  # the entered ID of each slot; None: all are `last`


class LockTable:
    """The estimates of the last writer of each lock, by the module's rules."""

    __slots__ = ("_entered", "_slot_count", "_slot_view", "_slots")

    def __init__(self, slot_count: int, high_water_mark: TransactionId) -> None:
        assert slot_count > 0
        self._slot_count = np.uint32(slot_count)
        self._slots = np.full(slot_count, high_water_mark, dtype=np.int64)
        self._slot_view = self._slots.data  # the same memory; faster access to single elements
        self._entered: deque[_EnteredSlots] = deque()  # in the order of the IDs

    # -----------------------------------------------------------------------------------------
    # appends

    def validate(
        self, requests: LockRequests, *, high_water_mark: TransactionId, next_id: TransactionId
    ) -> Validation:
        """Validate the rows in order (rule 5), and enter the locks of the accepted ones (rule 3).

        `next_id` is the ID of the next accepted row. The IDs from `high_water_mark + 1` up to
        `next_id - 1` are in flight.
        """
        assert high_water_mark < next_id
        count = requests.write.offsets.size - 1
        marks = np.broadcast_to(np.asarray(requests.marks, dtype=np.int64), (count,))
        ahead = marks > high_water_mark
        open_rows = ~ahead
        if requests.eligible is not None:
            ahead &= requests.eligible
            open_rows &= requests.eligible
        write, read, append = (self._lock_slots(column) for column in requests[:3])
        entering = write.concatenate(append)
        # The arrays are flat, because `ufunc.at` of NumPy 2.4 does not broadcast over two
        # dimensions.
        entries = np.tile(entering.rows, HASH_COUNT), entering.slots.ravel()
        estimates = self._estimates(write.concatenate(read), entering, entries)
        accepted, conflicts = _decide_rows(estimates, marks, open_rows, entries)
        accepted_counts = np.cumsum(accepted)
        # A conflict with a row of this batch contains the row's number. Replace it by the row's ID.
        is_in_batch = conflicts >= _BATCH_ROW_BASE
        if is_in_batch.any():
            conflicts[is_in_batch] = (
                next_id - 1 + accepted_counts[conflicts[is_in_batch] - _BATCH_ROW_BASE]
            )
        ids = np.where(accepted, next_id - 1 + accepted_counts, NO_ID)
        self._enter_accepted(*entries, ids)
        return Validation(
            ids=ids,
            conflicts=conflicts,
            ahead=ahead,
            pending=conflicts > high_water_mark,
            accepted_count=int(accepted_counts[-1]) if count else 0,
        )

    def validate_one(
        self,
        locks: tuple[Sequence[int], Sequence[int], Sequence[int]],
        mark: int,
        *,
        high_water_mark: TransactionId,
        next_id: TransactionId,
    ) -> int:
        """Validate one row like `validate`; for a few rows, this is faster than arrays.

        `locks` are the write, read and append locks. Returns PASSED (the row has ID `next_id`, and
        its locks are entered), AHEAD, or the estimate that causes the rejection of the row.
        """
        if mark > high_water_mark:
            return AHEAD
        slots, count = self._slot_view, len(self._slot_view)
        highest = NO_CONFLICT
        for lock in (*locks[0], *locks[1]):
            first, second, third = _slots_of(lock, count)
            highest = max(highest, min(slots[first], slots[second], slots[third]))
        if highest > mark:
            return highest
        entered = [slot for lock in (*locks[0], *locks[2]) for slot in _slots_of(lock, count)]
        if entered:
            before = [slots[slot] for slot in entered]
            self._entered.append(_EnteredSlots(next_id, entered, before, None))
            for slot in entered:
                slots[slot] = next_id
        return PASSED

    def on_committed(self, high_water_mark: TransactionId) -> None:
        """Entries up to the high-water mark are committed and can no longer be undone."""
        while self._entered and self._entered[0].last <= high_water_mark:
            self._entered.popleft()

    # -----------------------------------------------------------------------------------------
    # sessions

    def undo_entries_above(self, high_water_mark: TransactionId) -> None:
        """Undo the entries of a lost session above the high-water mark (rule 6).

        If another server may have owned the partition since, call `reset` instead.
        """
        while self._entered and (lost_entry := self._entered.pop()).last > high_water_mark:
            self._slots[lost_entry.slots] = lost_entry.previous_values
            if lost_entry.ids is not None:  # A part of the rows may be in the log.
                is_kept = lost_entry.ids <= high_water_mark
                np.maximum.at(
                    self._slots, np.asarray(lost_entry.slots)[is_kept], lost_entry.ids[is_kept]
                )
        self._entered.clear()
        np.minimum(self._slots, high_water_mark, out=self._slots)

    def reset(self, high_water_mark: TransactionId) -> None:
        """Forget all writers: from now on all locks count as written at the high-water mark."""
        self._entered.clear()
        self._slots.fill(high_water_mark)

    def enter_older_locks(
        self, floor: TransactionId, lower_floor: TransactionId, locks: I32, ids: I64
    ) -> None:
        """Lower the floor: enter all locks that transactions lower_floor + 1..floor have written.

        `floor` is the minimum of all slots: until now, writers at or below `floor` were not known.
        `ids` has the ID of each lock's writer, or a higher ID.
        """
        assert lower_floor < floor
        np.putmask(self._slots, self._slots <= floor, lower_floor)
        slots = slot_indices(locks, int(self._slot_count))
        np.maximum.at(self._slots, slots.ravel(), np.tile(ids, HASH_COUNT))

    # -----------------------------------------------------------------------------------------
    # size and estimates

    @property
    def size_bytes(self) -> int:
        """The memory that the table uses, in bytes."""
        return int(self._slots.nbytes)

    def estimate(self, lock: int) -> TransactionId:
        """Return the estimated last writer of one lock."""
        slots = self._slot_view
        first, second, third = _slots_of(lock, len(slots))
        return TransactionId(min(slots[first], slots[second], slots[third]))

    def false_rejection_probability(self, mark: TransactionId) -> float:
        """Return the probability that a lock without a writer is rejected for a client at `mark`.

        Such a lock is rejected if all its three slots contain an ID above the mark. The function
        estimates the proportion of these slots from a sample.
        """
        sample_step = max(1, self._slots.size // _SAMPLE_SLOT_COUNT)
        return float(np.mean(self._slots[::sample_step] > mark)) ** HASH_COUNT

    # -----------------------------------------------------------------------------------------
    # implementation

    def _lock_slots(self, column: LockColumn) -> _LockSlots:
        rows = np.repeat(np.arange(column.offsets.size - 1), column.counts)
        return _LockSlots(rows, slot_indices(column.values, int(self._slot_count)))

    def _estimates(
        self, checked: _LockSlots, entering: _LockSlots, entries: tuple[I64, I64]
    ) -> _Estimates:
        """Look up the slot values of the checked locks (see `_Estimates`).

        To find the first row that enters a slot, the function writes row numbers into the table
        itself, and then removes them. A second table of the same size would double the memory of a
        partition.
        """
        saved_values = self._slots.take(entering.slots)
        before = saved_values if checked is entering else self._slots.take(checked.slots)
        self._slots[entering.slots] = _I64_MAX
        np.minimum.at(self._slots, entries[1], entries[0] + _BATCH_ROW_BASE)
        entered = self._slots.take(checked.slots)
        self._slots[entering.slots] = saved_values
        is_entered_earlier = (entered >= _BATCH_ROW_BASE) & (
            entered - _BATCH_ROW_BASE < checked.rows
        )
        return _Estimates(
            checked.rows, checked.slots, before, np.where(is_entered_earlier, entered, before)
        )

    def _enter_accepted(self, rows: I64, slots: I64, ids: I64) -> None:
        entering = ids[rows]
        accepted = entering != NO_ID
        slots, entering = slots[accepted], entering[accepted]
        if 0 < entering.size <= _REMEMBERED_LOCKS_MAX:
            before = self._slots.take(slots)
            self._entered.append(_EnteredSlots(int(entering.max()), slots, before, entering))
        np.maximum.at(self._slots, slots, entering)


def slot_indices(locks: I32 | Sequence[int], slot_count: int) -> I64:
    """Return the three slots of each lock hash as a (3, lock count) array.

    docs/design/wire-format.md 4 specifies the hash function.
    """
    value = np.asarray(locks, dtype=np.int32).view(np.uint32)
    slots = np.empty((HASH_COUNT, value.size), dtype=np.int64)
    for hash_number in range(HASH_COUNT):
        value = value * _MULTIPLIER + _INCREMENT
        slots[hash_number] = (value & _INDEX_MASK) % np.uint32(slot_count)
    return slots


def _slots_of(lock: int, slot_count: int) -> tuple[int, int, int]:
    """Return the slots of a single lock; for one lock this is faster than `slot_indices`."""
    first = (lock * _MULTIPLIER_INT + _INCREMENT_INT) & _UINT32_MASK
    second = (first * _MULTIPLIER_INT + _INCREMENT_INT) & _UINT32_MASK
    third = (second * _MULTIPLIER_INT + _INCREMENT_INT) & _UINT32_MASK
    return (
        (first & _INDEX_MASK_INT) % slot_count,
        (second & _INDEX_MASK_INT) % slot_count,
        (third & _INDEX_MASK_INT) % slot_count,
    )


def slot_count_within(budget_bytes: int, table_count: int) -> int:
    """Return the number of slots for each lock table: the largest prime that the budget allows.

    The number is at most `SLOT_COUNT`. The budget of a server is for the tables of all partitions
    that the server may own.
    """
    assert table_count > 0
    count = min(SLOT_COUNT, max(2, budget_bytes // (SLOT_BYTES * table_count)))
    while any(count % divisor == 0 for divisor in range(2, int(count**0.5) + 1)):
        count -= 1
    return count


def _decide_rows(
    estimates: _Estimates, marks: I64, open_rows: Mask, entries: tuple[I64, I64]
) -> tuple[Mask, I64]:
    """Return a mask of the accepted rows, and the conflicts of the rejected rows in `open_rows`.

    Comparisons of whole arrays decide most rows. Rows that depend on an earlier row of the batch
    are decided one by one.
    """
    count = marks.size
    lowest = _greatest_by_row(estimates.values_before_batch.min(axis=0), estimates.rows, count)
    highest = _greatest_by_row(estimates.values_before_row.min(axis=0), estimates.rows, count)
    accepted = open_rows & (lowest <= marks)
    undecided = open_rows & (highest != lowest) & (highest > marks)
    conflicts = np.where(open_rows & ~accepted, lowest, NO_CONFLICT)
    if undecided.any():
        accepted &= ~undecided
        _decide_in_order(
            _collect_undecided_slots(estimates, undecided, entries), marks, accepted, conflicts
        )
    return accepted, conflicts


def _greatest_by_row(values: I64, rows: I64, count: int) -> I64:
    if rows.size == count and (rows[1:] > rows[:-1]).all():
        return values  # the usual case: one lock in each row
    highest_values = np.full(count, _I64_MIN, dtype=np.int64)
    np.maximum.at(highest_values, rows, values)
    return highest_values


class _UndecidedSlots(NamedTuple):
    """The slots that undecided rows check, renumbered, as plain lists in row order."""

    rows: list[int]  # the row of each checked lock
    slot_indexes: list[
        list[int]
    ]  # the three slots of each checked lock, as indexes into `slot_values`
    slot_values: list[int]  # the value of each slot, updated through the batch
    entry_rows: list[int]  # the row of each entry into one of these slots
    entry_slot_indexes: list[int]  # the index of the slot of each entry


def _collect_undecided_slots(
    estimates: _Estimates, undecided: Mask, entries: tuple[I64, I64]
) -> _UndecidedSlots:
    lock_positions = np.flatnonzero(undecided[estimates.rows])
    lock_positions = lock_positions[np.argsort(estimates.rows[lock_positions], kind="stable")]
    slots, indexes = np.unique(estimates.slots[:, lock_positions], return_inverse=True)
    indexes = indexes.reshape(HASH_COUNT, -1)
    slot_values = np.empty(slots.size, dtype=np.int64)
    slot_values[indexes] = estimates.values_before_batch[:, lock_positions]
    rows, entered_slots = entries
    slot_indexes = np.minimum(np.searchsorted(slots, entered_slots), slots.size - 1)
    entry_positions = np.flatnonzero(slots[slot_indexes] == entered_slots)
    entry_positions = entry_positions[np.argsort(rows[entry_positions], kind="stable")]
    return _UndecidedSlots(
        rows=estimates.rows[lock_positions].tolist(),
        slot_indexes=indexes.T.tolist(),
        slot_values=slot_values.tolist(),
        entry_rows=rows[entry_positions].tolist(),
        entry_slot_indexes=slot_indexes[entry_positions].tolist(),
    )


def _decide_in_order(
    undecided_slots: _UndecidedSlots, marks: I64, accepted: Mask, conflicts: I64
) -> None:
    """Decide the undecided rows one after the other, in place.

    The caller has marked these rows as not accepted. The loop calls no functions, because it must
    be fast. If all rows of a batch write the same lock, the loop runs for each row.
    """
    rows, indexes, values, entering, targets = undecided_slots
    is_accepted, conflict_ids, row_marks = accepted.tolist(), conflicts.tolist(), marks.tolist()
    lock, lock_count = 0, len(rows)
    entry, entry_count = 0, len(entering)
    while lock < lock_count:
        row = rows[lock]
        while entry < entry_count and entering[entry] < row:
            if is_accepted[entering[entry]]:
                values[targets[entry]] = _BATCH_ROW_BASE + entering[entry]
            entry += 1
        estimate = NO_CONFLICT
        while lock < lock_count and rows[lock] == row:
            first, second, third = indexes[lock]
            lowest = values[first] if values[first] < values[second] else values[second]  # noqa: FURB136
            lowest = lowest if lowest < values[third] else values[third]  # noqa: FURB136
            estimate = lowest if lowest > estimate else estimate  # noqa: FURB136 - no call per row
            lock += 1
        if estimate > row_marks[row]:
            conflict_ids[row] = estimate
        else:
            is_accepted[row] = True
            conflict_ids[row] = NO_CONFLICT
    accepted[:] = is_accepted
    conflicts[:] = conflict_ids
