"""Tests of `waltz_core.server.locking.lock_table`."""

import numpy as np
import pytest

from tests.call_counting import record_calls
from waltz_core.records.batches import LockColumn
from waltz_core.records.record import TransactionId
from waltz_core.server.locking.lock_table import (
    NO_CONFLICT,
    NO_ID,
    SLOT_COUNT,
    LockRequests,
    LockTable,
    Validation,
    slot_count_within,
    slot_indices,
)


def column(rows: list[list[int]]) -> LockColumn:
    offsets = np.cumsum([0] + [len(row) for row in rows])
    return LockColumn(offsets, np.array([x for row in rows for x in row], dtype=np.int32))


def validate(
    table: LockTable,
    *rows: dict[str, list[int]],
    mark: int | list[int] = 0,
    high: int = 0,
    next_id: int | None = None,
    eligible: list[bool] | None = None,
) -> Validation:
    """Validate rows given as {"w": [...], "r": [...], "a": [...]}; marks and log default to 0."""
    write, read, append = (column([row.get(key, []) for row in rows]) for key in "wra")
    marks = mark if isinstance(mark, int) else np.array(mark, dtype=np.int64)
    mask = None if eligible is None else np.array(eligible)
    return table.validate(
        LockRequests(write, read, append, marks, mask),
        high_water_mark=TransactionId(high),
        next_id=TransactionId(high + 1 if next_id is None else next_id),
    )


def table_at(mark: int) -> LockTable:
    return LockTable(SLOT_COUNT, TransactionId(mark))


def test_a_lock_is_accepted_if_its_estimate_is_at_most_the_mark() -> None:
    table = table_at(5)
    assert validate(table, {"w": [1]}, mark=5, high=9).ids.tolist() == [10]
    verdicts = validate(table, {"w": [2]}, mark=4, high=9)
    assert verdicts.ids.tolist() == [NO_ID]
    assert verdicts.conflicts.tolist() == [5]
    assert not verdicts.pending.any()


@pytest.mark.parametrize("kind", ["w", "r"])
def test_write_and_read_locks_conflict_with_an_earlier_write_lock(kind: str) -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, next_id=1)
    verdicts = validate(table, {kind: [1]}, mark=0, high=1)
    assert verdicts.conflicts.tolist() == [1]


@pytest.mark.parametrize(("kind", "enters"), [("w", True), ("a", True), ("r", False)])
def test_only_write_and_append_locks_are_entered_in_the_lock_table(kind: str, enters: bool) -> None:
    table = table_at(0)
    validate(table, {kind: [1]}, next_id=1)
    assert table.estimate(1) == (1 if enters else 0)
    assert table.estimate(2) == 0


def test_a_row_reports_its_highest_conflict() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, {"w": [2]}, {"w": [3]})
    verdicts = validate(table, {"w": [1], "r": [3, 2]}, mark=0, high=3)
    assert verdicts.conflicts.tolist() == [3]


def test_ineligible_rows_do_not_change_the_lock_table() -> None:
    table = table_at(0)
    verdicts = validate(
        table, {"w": [1]}, {"w": [1]}, {"w": [9]}, mark=[0, 0, 99], eligible=[False, True, False]
    )
    assert verdicts.ids.tolist() == [NO_ID, 1, NO_ID]
    assert not verdicts.ahead.any()
    assert table.estimate(9) == 0


def test_a_conflict_is_pending_only_if_its_transaction_is_in_flight() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, {"w": [2]}, high=0, next_id=1)
    verdicts = validate(table, {"w": [1]}, {"w": [2]}, mark=0, high=1, next_id=3)
    assert verdicts.conflicts.tolist() == [1, 2]
    assert verdicts.pending.tolist() == [False, True]


def test_a_row_is_checked_against_the_earlier_rows_of_its_batch() -> None:
    verdicts = validate(table_at(0), {"w": [1]}, {"w": [1]}, {"r": [1]}, {"w": [2]}, {"a": [2]})
    assert verdicts.ids.tolist() == [1, NO_ID, NO_ID, 2, 3]
    assert verdicts.conflicts.tolist() == [NO_CONFLICT, 1, 1, NO_CONFLICT, NO_CONFLICT]
    assert verdicts.pending.tolist() == [False, True, True, False, False]


def test_a_rejected_row_does_not_cause_a_conflict_for_later_rows() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, high=0, next_id=1)
    verdicts = validate(table, {"w": [1, 2]}, {"w": [2]}, {"w": [2]}, mark=0, high=1)
    assert verdicts.ids.tolist() == [NO_ID, 2, NO_ID]
    assert verdicts.conflicts.tolist() == [1, NO_CONFLICT, 2]


def test_a_row_with_a_repeated_lock_does_not_conflict_with_itself() -> None:
    verdicts = validate(table_at(0), {"w": [1, 1], "r": [1], "a": [1]})
    assert verdicts.ids.tolist() == [1]


def test_clamping_the_lock_table_removes_uncommitted_transactions() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, {"w": [2]}, high=0, next_id=1)
    table.undo_entries_above(TransactionId(1))
    assert (table.estimate(1), table.estimate(2), table.estimate(3)) == (1, 0, 0)
    assert validate(table, {"w": [2]}, mark=0, high=1).ids.tolist() == [2]


def test_a_lost_append_does_not_reject_its_retry() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, high=0, next_id=1)
    table.on_committed(TransactionId(1))
    # Other appends commit; the session ends while the next writer of the lock is in flight.
    validate(table, *({"w": [other]} for other in range(2, 10)), mark=1, high=1, next_id=2)
    validate(table, {"w": [1]}, mark=1, high=1, next_id=10)
    table.undo_entries_above(TransactionId(9))
    assert table.estimate(1) == 1
    assert validate(table, {"w": [1]}, mark=1, high=9, next_id=10).ids.tolist() == [10]


def test_a_reset_rejects_appends_with_older_marks() -> None:
    table = table_at(0)
    table.reset(TransactionId(6))
    assert validate(table, {"w": [1]}, {"r": [2]}, {"a": [3]}, mark=5, high=6).accepted_count == 1
    assert validate(table, {"w": [1]}, {"r": [2]}, mark=6, high=6, next_id=8).accepted_count == 2


def test_an_undo_after_a_reset_leaves_all_locks_at_the_id_of_the_reset() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, {"w": [2]}, {"w": [3]}, next_id=1)
    # Another owner may have written any lock up to ID 1; then this owner returns.
    table.reset(TransactionId(1))
    table.undo_entries_above(TransactionId(1))
    assert [table.estimate(lock) for lock in (1, 2, 3)] == [1, 1, 1]
    assert validate(table, {"r": [3]}, mark=0, high=1).conflicts.tolist() == [1]


def test_without_undo_entries_no_lock_stays_above_the_mark() -> None:
    table = table_at(0)
    validate(table, {"w": [1]}, next_id=1)
    validate(table, {"w": [1, *range(10, 10_000)]}, mark=1, high=1, next_id=2)
    table.undo_entries_above(TransactionId(1))
    assert [table.estimate(lock) for lock in (1, 10, 9_999)] == [1, 1, 1]
    assert validate(table, {"w": [1, 10]}, mark=1, high=1).ids.tolist() == [2]


def test_validation_of_an_empty_batch_accepts_no_row() -> None:
    assert validate(table_at(0)).accepted_count == 0


def test_a_batch_changes_only_the_slots_of_its_entries() -> None:
    """Validation must remove all row numbers that it has put into the table."""
    table = LockTable(11, TransactionId(3))
    validate(table, {"w": [1]}, {"w": [1]}, {"r": [2]}, {"w": [5]}, mark=[3, 3, 3, 0], high=3)
    assert set(table._slots.tolist()) <= {3, 4, 5}
    unchanged = set(range(11)) - set(slot_indices([1], 11).ravel().tolist())
    assert {int(table._slots[slot]) for slot in unchanged} <= {3}


@pytest.mark.parametrize("lock", [0, 1, -1, 7, 2**31 - 1, -(2**31)])
def test_an_estimate_is_the_minimum_of_three_slots(lock: int) -> None:
    table = LockTable(1009, TransactionId(0))
    table._slots[:] = np.arange(1009)
    assert table.estimate(lock) == slot_indices([lock], 1009).min()


def test_the_false_rejection_probability_depends_on_the_share_of_newer_slots() -> None:
    table = LockTable(1000, TransactionId(0))
    assert table.false_rejection_probability(TransactionId(0)) == 0
    assert table.false_rejection_probability(TransactionId(-1)) == 1
    table._slots[::2] = 9
    assert table.false_rejection_probability(TransactionId(5)) == pytest.approx(1 / 8)


def test_the_measured_false_rejection_rate_equals_the_prediction() -> None:
    table = LockTable(100_003, TransactionId(0))
    numbers = np.random.default_rng(1)
    locks = numbers.integers(-(2**31), 2**31, 30_000).astype(np.int32)
    none = LockColumn(np.zeros(locks.size + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))
    written = LockColumn(np.arange(locks.size + 1), locks)
    first = TransactionId(0)
    table.validate(
        LockRequests(none, none, written, 0), high_water_mark=first, next_id=TransactionId(1)
    )
    predicted = table.false_rejection_probability(first)
    other_locks = numbers.integers(-(2**31), 2**31, 20_000).astype(np.int32)
    false_rejection_rate = (table._slots[slot_indices(other_locks, 100_003)].min(axis=0) > 0).mean()
    assert predicted == pytest.approx(false_rejection_rate, rel=0.1)
    assert 0.1 < predicted < 0.4


def test_a_table_needs_8_bytes_for_each_slot() -> None:
    assert table_at(0).size_bytes == 8 * 1_048_573


@pytest.mark.parametrize(
    ("budget_bytes", "table_count", "expected"),
    [(1 << 40, 4, SLOT_COUNT), (8 * 100, 1, 97), (8 * 100, 10, 7), (0, 1, 2)],
)
def test_the_slot_count_is_a_prime_that_fits_the_budget(
    budget_bytes: int, table_count: int, expected: int
) -> None:
    assert slot_count_within(budget_bytes, table_count) == expected


@pytest.mark.parametrize("hot", [False, True])
def test_the_number_of_calls_does_not_depend_on_the_number_of_rows(hot: bool) -> None:
    counts = []
    for count in (100, 10_000):
        locks = np.zeros(count, np.int32) if hot else np.arange(count, dtype=np.int32)
        none = LockColumn(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))
        requests = LockRequests(LockColumn(np.arange(count + 1), locks), none, none, 0)
        table = table_at(0)
        with record_calls() as calls:
            verdicts = table.validate(
                requests, high_water_mark=TransactionId(0), next_id=TransactionId(1)
            )
        assert verdicts.accepted_count == (1 if hot else verdicts.accepted_count)
        counts.append(len(calls))
    assert counts[1] <= 2 * counts[0]


def test_a_refill_never_lowers_a_lock_below_its_writer() -> None:
    table = table_at(9)
    validate(table, {"w": [3]}, mark=9, high=9)
    ids = np.array([9, 7, 7], dtype=np.int64)
    table.enter_older_locks(
        TransactionId(9), TransactionId(6), np.array([1, 2, 3], dtype=np.int32), ids
    )
    assert [table.estimate(lock) for lock in (1, 2, 3, 4)] == [9, 7, 10, 6]
    table.enter_older_locks(
        TransactionId(6),
        TransactionId(-1),
        np.array([1, 4], dtype=np.int32),
        np.array([5, 5], dtype=np.int64),
    )
    assert [table.estimate(lock) for lock in (1, 2, 3, 4, 5)] == [9, 7, 10, 5, -1]
