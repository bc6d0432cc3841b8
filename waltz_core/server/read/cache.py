"""Caches of the partitions' logs, so that recent reads need no storage.

A slow or greedy reader must not take memory from other clients. So all bytes in the caches count
against limits.

There are two caches. `TransactionCache` contains whole appended batches with their records, and
serves ranges. `FeedCache` contains only the request ID and the header of each transaction, 20
bytes. So it can contain the transactions of some minutes, and a client whose feed is that far
behind needs no read from a storage.

Rules:
    1. Only committed transactions are added, in ID order and without a gap. A gap clears the cache.
    2. The bytes never exceed the limit. The oldest batches are dropped first, over all partitions
       that share a budget.
    3. Reads return views of the added bytes; dropping batches later does not change these views.
    4. When a new session opens and no other owner can have written in between, the caller calls
       `truncate_after` with the recovered high-water mark. If another owner can have written, the
       caller calls `clear`.
"""

from bisect import bisect_right
from collections import OrderedDict
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from waltz_core.records import raw_records
from waltz_core.records.raw_records import Buffer
from waltz_core.records.record import LineageEntry, TransactionId

I64 = npt.NDArray[np.int64]

# The overhead of Python and NumPy for each batch, measured on batches of one small record.
BATCH_OVERHEAD_BYTES: Final = 1024
_FEED_HEADER_BYTES: Final = raw_records.FEED_HEADER_BYTES


class CachedBatch(NamedTuple):
    """One committed batch in the cache."""

    entry: LineageEntry
    lengths: I64
    records: Buffer

    @property
    def cost_bytes(self) -> int:
        """The memory that this cache entry uses, in bytes."""
        return len(self.records) + int(self.lengths.nbytes) + BATCH_OVERHEAD_BYTES


class CachedRange(NamedTuple):
    """The records first..last of one batch; `entry` describes the whole batch."""

    first: TransactionId
    last: TransactionId
    lengths: I64
    records: memoryview
    entry: LineageEntry


class BudgetHolder(Protocol):
    """A cache that uses bytes of a budget."""

    def drop_oldest(self) -> None:
        """Release the oldest bytes of this cache."""


class CacheBudget:
    """The memory budget that the transaction caches of all partitions share."""

    __slots__ = ("_holders", "_last_allocation_id", "_limit_bytes", "_used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes >= 0
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._last_allocation_id = 0
        self._holders: OrderedDict[int, BudgetHolder] = OrderedDict()

    @property
    def limit_bytes(self) -> int:
        """The limit of the budget, in bytes."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """How many bytes of the budget are in use."""
        return self._used_bytes

    def take(self, cost_bytes: int, holder: BudgetHolder) -> int:
        """Allocate bytes of the budget for a cache; return a receipt for `release`.

        If necessary, the oldest batches of all caches are dropped first.
        """
        assert 0 < cost_bytes <= self._limit_bytes
        while self._used_bytes + cost_bytes > self._limit_bytes:
            oldest = next(iter(self._holders.values()))
            oldest.drop_oldest()
        self._last_allocation_id += 1
        self._holders[self._last_allocation_id] = holder
        self._used_bytes += cost_bytes
        return self._last_allocation_id

    def release(self, allocation_id: int, cost_bytes: int) -> None:
        """Return the bytes of a dropped batch to the budget."""
        del self._holders[allocation_id]
        self._used_bytes -= cost_bytes
        assert self._used_bytes >= 0


class TransactionCache:
    """The newest committed batches of one partition, with their records."""

    __slots__ = ("_batches", "_firsts", "_head", "budget", "hits", "misses")

    def __init__(self, budget: CacheBudget) -> None:
        self.budget = budget
        # Batches by first ID, in ID order. `_firsts[_head:]` lists these IDs for binary search.
        self._batches: OrderedDict[int, tuple[int, CachedBatch]] = OrderedDict()
        self._firsts: list[int] = []
        self._head = 0
        self.hits = 0
        self.misses = 0

    # -----------------------------------------------------------------------------------------
    # adding

    def put(self, entry: LineageEntry, lengths: I64, records: Buffer) -> None:
        """Add a committed batch; `lengths` are the lengths of its records in bytes."""
        assert lengths.size == entry.last - entry.first + 1
        newest = self.last
        if newest is not None and entry.first != newest + 1:
            self.clear()  # rule 1
        batch = CachedBatch(entry, lengths, records)
        if batch.cost_bytes > self.budget.limit_bytes:
            self.clear()  # This batch cannot be added, so the next batch would leave a gap.
            return
        allocation_id = self.budget.take(batch.cost_bytes, self)
        self._batches[entry.first] = (allocation_id, batch)
        self._firsts.append(entry.first)

    def drop_oldest(self) -> None:
        """Drop the oldest batch; the budget calls this method to make room."""
        first, (allocation_id, batch) = self._batches.popitem(last=False)
        assert self._firsts[self._head] == first
        self.budget.release(allocation_id, batch.cost_bytes)
        self._head += 1
        if self._head * 2 > len(self._firsts):
            del self._firsts[: self._head]
            self._head = 0

    def truncate_after(self, mark: TransactionId) -> None:
        """Drop every batch that has IDs above the mark (rule 4)."""
        newest = self.last
        while newest is not None and newest > mark:
            first, (allocation_id, batch) = self._batches.popitem()
            assert self._firsts[-1] == first
            self.budget.release(allocation_id, batch.cost_bytes)
            self._firsts.pop()
            newest = self.last

    def clear(self) -> None:
        """Drop all batches."""
        for allocation_id, batch in self._batches.values():
            self.budget.release(allocation_id, batch.cost_bytes)
        self._batches.clear()
        self._firsts.clear()
        self._head = 0

    # -----------------------------------------------------------------------------------------
    # reading

    @property
    def first(self) -> TransactionId | None:
        """The oldest cached ID; None if the cache is empty."""
        return TransactionId(self._firsts[self._head]) if self._batches else None

    @property
    def last(self) -> TransactionId | None:
        """The newest cached ID; None if the cache is empty."""
        if not self._batches:
            return None
        return self._batches[self._firsts[-1]][1].entry.last

    def read(self, first: TransactionId, last: TransactionId, bytes_max: int) -> list[CachedRange]:
        """Return the records from `first` up to `last`, or about `bytes_max` bytes, batch by batch.

        Returns at least one record, or an empty list if `first` is not cached. Nothing is copied.
        """
        assert first <= last
        oldest, newest = self.first, self.last
        if oldest is None or newest is None or not oldest <= first <= newest:
            self.misses += 1
            return []
        self.hits += 1
        position = bisect_right(self._firsts, first, lo=self._head) - 1
        ranges: list[CachedRange] = []
        start = int(first)
        while start <= min(last, newest) and (bytes_max > 0 or not ranges):
            part = _range_of_batch(
                self._batches[self._firsts[position]][1], start, int(last), bytes_max
            )
            ranges.append(part)
            bytes_max -= len(part.records)
            # A part that ends inside its batch has reached a limit, so it is the last part.
            if part.last < part.entry.last:
                break
            start = part.last + 1
            position += 1
        return ranges


def _range_of_batch(batch: CachedBatch, first: int, last: int, bytes_max: int) -> CachedRange:
    entry, lengths, records = batch
    assert entry.first <= first <= entry.last
    skip = first - entry.first
    wanted_count = min(last, entry.last) - first + 1
    count = min(
        wanted_count, raw_records.count_within(lengths[skip : skip + wanted_count], bytes_max)
    )
    view, part = raw_records.slice_records(records, lengths, skip=skip, count=count)
    return CachedRange(TransactionId(first), TransactionId(first + count - 1), part, view, entry)


class FeedCache:
    """The request ID and header of the newest transactions of a partition, in a ring buffer.

    The position of a transaction follows from its ID. So a read is one or two slices, and small
    batches cost no more than large ones.
    """

    __slots__ = ("_capacity", "_first", "_last", "_ring", "hits", "misses")

    def __init__(self, limit_bytes: int) -> None:
        self._capacity = limit_bytes // _FEED_HEADER_BYTES
        assert self._capacity > 0
        # The operating system allocates zeroed memory only when it is first written to.
        self._ring = memoryview(bytearray(self._capacity * _FEED_HEADER_BYTES))
        self._first = 0
        self._last = -1
        self.hits = 0
        self.misses = 0

    @property
    def capacity(self) -> int:
        """The number of transactions that fit into the ring."""
        return self._capacity

    @property
    def size_bytes(self) -> int:
        """The maximum memory of the ring, in bytes."""
        return self._ring.nbytes

    def put(self, first: TransactionId, packed: Buffer) -> None:
        """Add committed transactions, 20 bytes each (`raw_records.feed_headers_of`)."""
        assert len(packed) % _FEED_HEADER_BYTES == 0
        count = len(packed) // _FEED_HEADER_BYTES
        if first != self._last + 1:
            self._first = first  # rule 1
        self._last = first + count - 1
        self._first = max(self._first, self._last - self._capacity + 1)
        kept_count = min(count, self._capacity)
        view = memoryview(packed)[(count - kept_count) * _FEED_HEADER_BYTES :]
        start = (self._last - kept_count + 1) % self._capacity
        count_until_end = min(kept_count, self._capacity - start)
        self._ring[start * _FEED_HEADER_BYTES : (start + count_until_end) * _FEED_HEADER_BYTES] = (
            view[: count_until_end * _FEED_HEADER_BYTES]
        )
        if count_until_end < kept_count:
            self._ring[: (kept_count - count_until_end) * _FEED_HEADER_BYTES] = view[
                count_until_end * _FEED_HEADER_BYTES :
            ]

    def read(self, first: TransactionId, last: TransactionId) -> bytes:
        """Return 20 bytes for each transaction from `first` up to `last` or the newest cached one.

        Return empty bytes if `first` is not cached. The result is a copy, because the ring is
        overwritten.
        """
        assert first <= last
        if not self._first <= first <= self._last:
            self.misses += 1
            return b""
        self.hits += 1
        count = min(last, self._last) - first + 1
        start = first % self._capacity
        count_until_end = min(count, self._capacity - start)
        if count_until_end == count:
            return bytes(
                self._ring[start * _FEED_HEADER_BYTES : (start + count) * _FEED_HEADER_BYTES]
            )
        return b"".join(
            (
                self._ring[
                    start * _FEED_HEADER_BYTES : (start + count_until_end) * _FEED_HEADER_BYTES
                ],
                self._ring[: (count - count_until_end) * _FEED_HEADER_BYTES],
            )
        )

    def truncate_after(self, mark: TransactionId) -> None:
        """Drop the transactions above the mark (rule 4)."""
        self._last = min(self._last, mark)
        self._first = min(self._first, self._last + 1)

    def clear(self) -> None:
        """Drop all transactions."""
        self._first, self._last = 0, -1
