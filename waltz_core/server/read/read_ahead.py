"""Read-ahead for clients that request transactions one by one.

A 0.13 client requests the data of each transaction in a separate message. Without read-ahead, each
request for a transaction outside of the transaction cache would be a round trip to a storage.

Rules:
    1. A range is fetched if a request closely follows an earlier request of the same partition. The
       range has at most `PREFETCH_COUNT_MAX` records and `PREFETCH_BYTES_MAX`, or one larger
       record.
    2. The last `PREFETCHED_RANGES_MAX` ranges of a partition are kept. Their bytes are a part of
       the memory budget that the transaction caches of all partitions share.
    3. Only verified records of committed transactions are kept, and only while no other owner can
       have written the log (`clear`).
"""

from collections import OrderedDict, deque
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.records.raw_records import Buffer, offsets_of
from waltz_core.records.record import TransactionId
from waltz_core.server.read.cache import BATCH_OVERHEAD_BYTES, CacheBudget

I64 = npt.NDArray[np.int64]

PREFETCH_COUNT_MAX: Final = 1_024
PREFETCH_BYTES_MAX: Final = 64 * 1024
PREFETCHED_RANGES_MAX: Final = 4
# The maximum distance, in IDs, between a request and the request that it follows. Clients skip
# transactions whose header they do not need.
NEAR_DISTANCE_MAX: Final = 32
_REMEMBERED_ENDS_MAX: Final = 16


class _PrefetchedRange(NamedTuple):
    """A range of records that was fetched before it was requested."""

    allocation_id: int
    cost_bytes: int
    offsets: I64
    records: memoryview


class ReadAhead:
    """The prefetched ranges of one partition, by the module's rules."""

    def __init__(self, budget: CacheBudget) -> None:
        self._budget = budget
        self._ranges: OrderedDict[TransactionId, _PrefetchedRange] = OrderedDict()  # by first ID
        self._ends: deque[TransactionId] = deque(maxlen=_REMEMBERED_ENDS_MAX)
        self.hits = 0

    def find(self, transaction_id: TransactionId) -> memoryview | None:
        """Return the record of a transaction; None if it was not prefetched."""
        for first, prefetched in self._ranges.items():
            index = transaction_id - first
            if 0 <= index < prefetched.offsets.size - 1:
                self.hits += 1
                return prefetched.records[prefetched.offsets[index] : prefetched.offsets[index + 1]]
        return None

    def should_fetch(self, transaction_id: TransactionId) -> bool:
        """Whether to fetch a range that starts with this transaction (rule 1)."""
        return any(0 < transaction_id - end <= NEAR_DISTANCE_MAX for end in self._ends)

    def note_fetched_up_to(self, transaction_id: TransactionId) -> None:
        """Record that records up to this transaction were fetched."""
        self._ends.append(transaction_id)

    def keep(self, first: TransactionId, lengths: I64, records: Buffer) -> None:
        """Keep a fetched range; drop the oldest one if necessary (rule 2)."""
        self.note_fetched_up_to(TransactionId(first + lengths.size - 1))
        if first in self._ranges:
            self._drop(first)
        offsets = offsets_of(lengths)
        cost_bytes = len(records) + offsets.nbytes + BATCH_OVERHEAD_BYTES
        if cost_bytes > self._budget.limit_bytes:
            return
        if len(self._ranges) == PREFETCHED_RANGES_MAX:
            self.drop_oldest()
        allocation_id = self._budget.take(cost_bytes, self)
        # A copy, because a view would also keep the rest of the storage's answer in memory.
        copy = memoryview(bytes(records))
        self._ranges[first] = _PrefetchedRange(allocation_id, cost_bytes, offsets, copy)

    def drop_oldest(self) -> None:
        """Drop the oldest range; the budget calls this method to make room."""
        self._drop(next(iter(self._ranges)))

    def clear(self) -> None:
        """Drop all ranges."""
        for first in list(self._ranges):
            self._drop(first)
        self._ends.clear()

    def _drop(self, first: TransactionId) -> None:
        prefetched = self._ranges.pop(first)
        self._budget.release(prefetched.allocation_id, prefetched.cost_bytes)
