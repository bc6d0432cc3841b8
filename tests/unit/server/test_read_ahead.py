"""The read-ahead buffer: which records it keeps, and its size limit."""

import pytest

from tests.unit.storage.logs import make_run
from waltz_core.records.record import TransactionId
from waltz_core.server.read.cache import CacheBudget
from waltz_core.server.read.read_ahead import NEAR_DISTANCE_MAX, PREFETCHED_RANGES_MAX, ReadAhead


def keep(ahead: ReadAhead, first: int, count: int, *, size: int = 100) -> None:
    records, lengths = make_run(first, [size] * count)
    ahead.keep(TransactionId(first), lengths, records)


def record_of(transaction_id: int, *, size: int = 100) -> bytes:
    return make_run(transaction_id, [size])[0]


def buffered_ids(ahead: ReadAhead, *ids: int) -> list[int]:
    found = {transaction_id: ahead.find(TransactionId(transaction_id)) for transaction_id in ids}
    assert all(record in (None, record_of(each)) for each, record in found.items())
    return [transaction_id for transaction_id in ids if found[transaction_id] is not None]


def test_the_oldest_range_is_dropped_when_a_new_range_needs_its_place() -> None:
    budget = CacheBudget(1 << 20)
    ahead = ReadAhead(budget)
    for number in range(PREFETCHED_RANGES_MAX):
        keep(ahead, 10 * number, 5)
    full_bytes = budget.used_bytes
    keep(ahead, 1_000, 5)
    assert buffered_ids(ahead, 0, 10, 1_000) == [10, 1_000]
    assert budget.used_bytes == full_bytes
    # The same range replaces itself.
    keep(ahead, 1_000, 5)
    assert buffered_ids(ahead, 10, 1_000) == [10, 1_000]
    ahead.clear()
    assert budget.used_bytes == 0
    assert buffered_ids(ahead, 10, 1_000) == []


def test_all_partitions_share_the_budget() -> None:
    budget = CacheBudget(20_000)
    partitions = [ReadAhead(budget) for _ in range(50)]
    for ahead in partitions:
        keep(ahead, 0, 20)
        assert 0 < budget.used_bytes <= 20_000
    assert [buffered_ids(ahead, 0) for ahead in partitions[:3]] == [[], [], []]
    assert buffered_ids(partitions[-1], 0) == [0]


@pytest.mark.parametrize(
    ("after", "should_fetch"),
    [(0, False), (1, True), (NEAR_DISTANCE_MAX, True), (NEAR_DISTANCE_MAX + 1, False)],
)
def test_only_a_read_that_starts_few_ids_after_a_fetched_range_causes_read_ahead(
    after: int, should_fetch: bool
) -> None:
    ahead = ReadAhead(CacheBudget(1 << 20))
    ahead.note_fetched_up_to(TransactionId(100))
    assert ahead.should_fetch(TransactionId(100 + after)) is should_fetch
    assert not ahead.should_fetch(TransactionId(99))
