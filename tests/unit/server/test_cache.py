"""Tests of `waltz_core.server.read.cache`."""

import numpy as np
import pytest

from waltz_core.records.record import (
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    LineageEntry,
    SessionId,
    TransactionId,
)
from waltz_core.server.read.cache import (
    BATCH_OVERHEAD_BYTES,
    CacheBudget,
    CachedRange,
    FeedCache,
    TransactionCache,
)

RECORD_BYTES = RECORD_OVERHEAD_BYTES + 10
COST_OF_TWO = 2 * (RECORD_BYTES + 8) + BATCH_OVERHEAD_BYTES


def entry(first: int, last: int) -> LineageEntry:
    return LineageEntry(TransactionId(first), TransactionId(last), SessionId(1), 0, GENESIS_CHAIN)


def record(number: int) -> bytes:
    return bytes([number % 251]) * RECORD_BYTES


def put(cache: TransactionCache, first: int, last: int) -> None:
    lengths = np.full(last - first + 1, RECORD_BYTES)
    cache.put(entry(first, last), lengths, b"".join(record(n) for n in range(first, last + 1)))


def cache_of(*batches: tuple[int, int], limit_bytes: int = 1 << 20) -> TransactionCache:
    cache = TransactionCache(CacheBudget(limit_bytes))
    for first, last in batches:
        put(cache, first, last)
    return cache


def read(
    cache: TransactionCache, first: int, last: int, bytes_max: int = 1 << 20
) -> list[CachedRange]:
    return cache.read(TransactionId(first), TransactionId(last), bytes_max)


def numbers(found: list[CachedRange]) -> list[int]:
    """Return the IDs that were found, and check that each has its record."""
    ids: list[int] = []
    for part in found:
        mine = list(range(part.first, part.last + 1))
        assert bytes(part.records) == b"".join(record(n) for n in mine)
        assert part.lengths.tolist() == [RECORD_BYTES] * len(mine)
        assert part.entry.first <= part.first <= part.last <= part.entry.last
        ids += mine
    return ids


def test_a_range_over_several_batches_is_read() -> None:
    cache = cache_of((5, 7), (8, 8), (9, 12))
    assert numbers(read(cache, 5, 12)) == list(range(5, 13))
    assert numbers(read(cache, 6, 10)) == [6, 7, 8, 9, 10]
    assert numbers(read(cache, 8, 8)) == [8]
    assert numbers(read(cache, 11, 99)) == [11, 12]
    assert (cache.first, cache.last) == (5, 12)
    assert (cache.hits, cache.misses) == (4, 0)


@pytest.mark.parametrize(("first", "last"), [(0, 99), (4, 4), (13, 20)])
def test_a_range_that_is_not_cached_is_a_miss(first: int, last: int) -> None:
    cache = cache_of((5, 7), (8, 12))
    assert read(cache, first, last) == []
    assert (cache.hits, cache.misses) == (0, 1)


@pytest.mark.parametrize(
    ("bytes_max", "expected"),
    [
        (0, [6]),
        (RECORD_BYTES, [6]),
        (2 * RECORD_BYTES - 1, [6]),
        (2 * RECORD_BYTES, [6, 7]),
        (3 * RECORD_BYTES, [6, 7, 8]),
        (4 * RECORD_BYTES, [6, 7, 8, 9]),
    ],
)
def test_the_first_record_of_an_answer_may_exceed_bytes_max(
    bytes_max: int, expected: list[int]
) -> None:
    assert numbers(read(cache_of((5, 7), (8, 12)), 6, 12, bytes_max)) == expected


def test_cached_ranges_are_not_copied() -> None:
    cache = TransactionCache(CacheBudget(1 << 20))
    records = bytearray(record(0) + record(1))
    cache.put(entry(0, 1), np.full(2, RECORD_BYTES), memoryview(records))
    (found,) = read(cache, 1, 1)
    records[RECORD_BYTES:] = record(9)
    assert bytes(found.records) == record(9)


def test_a_gap_drops_all_earlier_batches() -> None:
    cache = cache_of((0, 3), (9, 10))
    assert (cache.first, cache.last) == (9, 10)
    assert read(cache, 3, 3) == []


def test_the_oldest_batches_of_all_partitions_are_dropped_first() -> None:
    budget = CacheBudget(3 * COST_OF_TWO)
    one, two = TransactionCache(budget), TransactionCache(budget)
    put(one, 0, 1)
    put(two, 100, 101)
    put(two, 102, 103)
    assert budget.used_bytes == budget.limit_bytes
    put(one, 2, 3)
    assert (one.first, one.last) == (2, 3)
    put(one, 4, 5)
    assert (two.first, two.last) == (102, 103)
    assert budget.used_bytes == budget.limit_bytes


def test_the_limit_holds_over_a_long_run() -> None:
    budget = CacheBudget(10 * COST_OF_TWO + 7)
    caches = [TransactionCache(budget) for _ in range(3)]
    for turn in range(100):
        cache = caches[turn % 7 % 3]
        first = 0 if cache.last is None else cache.last + 1
        put(cache, first, first + turn % 4)
        assert budget.used_bytes <= budget.limit_bytes
        assert cache.last == first + turn % 4
        if cache.first is not None:
            expected = list(range(cache.first, first + turn % 4 + 1))
            assert numbers(read(cache, cache.first, 1 << 40)) == expected


def test_a_batch_over_the_limit_is_not_cached_and_leaves_no_gap() -> None:
    cache = cache_of((0, 1), limit_bytes=COST_OF_TWO)
    put(cache, 2, 9)
    assert cache.first is None
    put(cache, 10, 11)
    assert numbers(read(cache, 10, 11)) == [10, 11]


def test_clearing_the_caches_releases_all_bytes() -> None:
    budget = CacheBudget(1 << 20)
    one, two = TransactionCache(budget), TransactionCache(budget)
    put(one, 0, 1)
    put(two, 0, 1)
    one.clear()
    assert one.first is None
    assert budget.used_bytes == COST_OF_TWO
    two.clear()
    assert budget.used_bytes == 0


@pytest.mark.parametrize(
    ("mark", "held"), [(20, (0, 9)), (9, (0, 9)), (8, (0, 5)), (5, (0, 5)), (4, (0, 1)), (0, None)]
)
def test_truncate_drops_batches_that_end_above_the_mark(
    mark: int, held: tuple[int, int] | None
) -> None:
    cache = cache_of((0, 1), (2, 5), (6, 9))
    cache.truncate_after(TransactionId(mark))
    assert (cache.first, cache.last) == (held or (None, None))
    if held and held[1] == mark:
        put(cache, mark + 1, mark + 2)
        assert numbers(read(cache, 0, 99)) == list(range(mark + 3))


def test_truncate_works_after_evictions() -> None:
    cache = cache_of(*((n, n + 1) for n in range(0, 20, 2)), limit_bytes=3 * COST_OF_TWO)
    assert (cache.first, cache.last) == (14, 19)
    cache.truncate_after(TransactionId(17))
    assert (cache.first, cache.last) == (14, 17)
    cache.truncate_after(TransactionId(3))
    assert cache.first is None


# ---------------------------------------------------------------------------------------------


def feed_headers(first: int, last: int) -> bytes:
    return b"".join(n.to_bytes(20, "big") for n in range(first, last + 1))


def put_feed(cache: FeedCache, first: int, last: int) -> None:
    cache.put(TransactionId(first), feed_headers(first, last))


def read_feed(cache: FeedCache, first: int, last: int) -> bytes:
    return cache.read(TransactionId(first), TransactionId(last))


def test_the_header_ring_wraps_around() -> None:
    cache = FeedCache(20 * 10 + 3)
    assert (cache.capacity, cache.size_bytes) == (10, 200)
    put_feed(cache, 0, 6)
    assert read_feed(cache, 0, 6) == feed_headers(0, 6)
    put_feed(cache, 7, 13)
    assert read_feed(cache, 3, 3) == b""
    assert read_feed(cache, 4, 13) == feed_headers(4, 13)
    assert read_feed(cache, 9, 99) == feed_headers(9, 13)
    assert read_feed(cache, 8, 11) == feed_headers(8, 11)
    assert read_feed(cache, 14, 14) == b""
    assert (cache.hits, cache.misses) == (4, 2)


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_the_header_ring_equals_a_list_of_the_newest_headers(capacity: int) -> None:
    cache = FeedCache(20 * capacity)
    first = 0
    for count in (1, 3, 0, 2, 9, 1, 1, 7, 5):
        put_feed(cache, first, first + count - 1)
        first += count
        oldest = max(0, first - capacity)
        assert read_feed(cache, oldest, first - 1) == feed_headers(oldest, first - 1)
        if oldest:
            assert read_feed(cache, oldest - 1, first) == b""


def test_a_gap_in_the_feed_drops_all_earlier_batches() -> None:
    cache = FeedCache(20 * 10)
    put_feed(cache, 0, 3)
    put_feed(cache, 5, 6)
    assert read_feed(cache, 3, 3) == b""
    assert read_feed(cache, 5, 9) == feed_headers(5, 6)


def test_the_feed_cache_can_be_truncated_and_cleared() -> None:
    cache = FeedCache(20 * 10)
    put_feed(cache, 0, 12)
    cache.truncate_after(TransactionId(20))
    assert read_feed(cache, 3, 12) == feed_headers(3, 12)
    cache.truncate_after(TransactionId(9))
    assert read_feed(cache, 3, 12) == feed_headers(3, 9)
    cache.put(TransactionId(10), bytes(20))
    assert read_feed(cache, 9, 12) == feed_headers(9, 9) + bytes(20)
    cache.truncate_after(TransactionId(1))
    assert read_feed(cache, 1, 1) == b""
    put_feed(cache, 2, 3)
    assert read_feed(cache, 2, 3) == feed_headers(2, 3)
    cache.clear()
    assert read_feed(cache, 0, 3) == b""
    put_feed(cache, 30, 31)
    assert read_feed(cache, 30, 31) == feed_headers(30, 31)
