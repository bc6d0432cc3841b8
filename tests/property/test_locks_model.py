"""The lock table gives the results of a simple model that validates row by row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.records.batches import LockColumn
from waltz_core.records.record import TransactionId
from waltz_core.server.locking.lock_table import AHEAD, PASSED, LockRequests, LockTable

Row = tuple[list[int], list[int], list[int], int, bool]  # write, read, append, mark lag, eligible
LOCKS = st.sampled_from([0, 1, 2, 3, -1, -7, 2**31 - 1, -(2**31)])
rows = st.lists(
    st.tuples(
        st.lists(LOCKS, max_size=2),
        st.lists(LOCKS, max_size=2),
        st.lists(LOCKS, max_size=1),
        st.integers(-1, 6),
        st.integers(0, 9).map(bool),
    ),
    max_size=9,
)
# Each step: the rows of a batch; then the number of transactions in flight that commit, and whether
# the session continues.
steps = st.lists(st.tuples(rows, st.integers(0, 12), st.sampled_from("----cr")), max_size=6)


class Model:
    """docs/design/wire-format.md 4 and docs/design/correctness.md 2.4, rows 25-30; no arrays."""

    def __init__(self, slot_count: int, mark: int) -> None:
        self.slots = [mark] * slot_count
        self.entered: list[tuple[int, int, int]] = []  # ID, slot, previous value of the slot

    def undo_entries_above(self, mark: int) -> None:
        """Undo all entries above the mark."""
        for entered_id, position, before in reversed(self.entered):
            if entered_id > mark:
                self.slots[position] = before
        self.entered.clear()
        self.slots = [min(slot, mark) for slot in self.slots]

    def places(self, lock: int) -> list[int]:
        value, found = lock & 0xFFFFFFFF, []
        for _ in range(3):
            value = (value * 1103515245 + 12345) & 0xFFFFFFFF
            found.append((value & 0x3FFFFFFF) % len(self.slots))
        return found

    def validate(self, batch: list[Row], high: int, next_id: int) -> list[tuple[int, int, bool]]:
        verdicts = []
        for write, read, append, lag, eligible in batch:
            mark = max(-1, high - lag) if lag >= 0 else high + 1
            estimates = [min(self.slots[p] for p in self.places(k)) for k in write + read]
            estimate = max(estimates, default=-1)
            if not eligible:
                verdicts.append((-1, -1, False))
            elif mark > high:
                verdicts.append((-1, -1, True))
            elif estimate > mark:
                verdicts.append((-1, estimate, False))
            else:
                for lock in write + append:
                    for position in self.places(lock):
                        self.entered.append((next_id, position, self.slots[position]))
                        self.slots[position] = next_id
                verdicts.append((next_id, -1, False))
                next_id += 1
        return verdicts


def column(lists: list[list[int]]) -> LockColumn:
    values = [lock for row in lists for lock in row]
    return LockColumn(np.cumsum([0] + [len(r) for r in lists]), np.array(values, dtype=np.int32))


def validate_one_by_one(
    table: LockTable,
    batch: list[Row],
    marks: list[int],
    expected: list[tuple[int, int, bool]],
    high: TransactionId,
) -> None:
    """Check that the same rows, validated one by one, have the same verdicts."""
    next_id = min((each for each, _, _ in expected if each >= 0), default=high + 1)
    for (write, read, append, _, eligible), mark, (given_id, conflict, ahead) in zip(
        batch, marks, expected, strict=True
    ):
        if not eligible:
            continue
        verdict = table.validate_one(
            (write, read, append), mark, high_water_mark=high, next_id=TransactionId(next_id)
        )
        assert verdict == (AHEAD if ahead else PASSED if given_id >= 0 else conflict)
        next_id += verdict == PASSED


@settings(max_examples=400)
@given(st.sampled_from([1, 2, 5, 31, 1009]), st.integers(-1, 5), steps)
def test_the_table_validates_like_the_model(
    slot_count: int, high: int, course: list[tuple[list[Row], int, str]]
) -> None:
    table, model = LockTable(slot_count, TransactionId(high)), Model(slot_count, high)
    single = LockTable(slot_count, TransactionId(high))
    next_id = high + 1
    for batch, commits, fate in course:
        marks = [max(-1, high - lag) if lag >= 0 else high + 1 for _, _, _, lag, _ in batch]
        found = table.validate(
            LockRequests(
                *(column([row[kind] for row in batch]) for kind in range(3)),
                marks=np.array(marks, dtype=np.int64),
                eligible=np.array([row[4] for row in batch], dtype=bool),
            ),
            high_water_mark=TransactionId(high),
            next_id=TransactionId(next_id),
        )
        expected = model.validate(batch, high, next_id)
        verdicts = zip(
            found.ids.tolist(), found.conflicts.tolist(), found.ahead.tolist(), strict=True
        )
        assert list(verdicts) == expected
        assert found.pending.tolist() == [conflict > high for _, conflict, _ in expected]
        assert found.accepted_count == sum(i >= 0 for i, _, _ in expected)
        assert table._slots.tolist() == model.slots
        validate_one_by_one(single, batch, marks, expected, TransactionId(high))
        assert single._slots.tolist() == model.slots
        next_id += found.accepted_count
        high = min(high + commits, next_id - 1)
        table.on_committed(TransactionId(high))
        if fate == "c":  # the session is lost with the rows in flight; the lineage continues
            table.undo_entries_above(TransactionId(high))
            single.undo_entries_above(TransactionId(high))
            model.undo_entries_above(high)
            assert table._slots.tolist() == single._slots.tolist() == model.slots
            next_id = high + 1
        elif fate == "r":
            table.reset(TransactionId(high))
            single.reset(TransactionId(high))
            model.entered.clear()
            model.slots = [high] * slot_count
            next_id = high + 1
        # LockBound: no estimate is above the last assigned ID.
        assert max(model.slots) < next_id
