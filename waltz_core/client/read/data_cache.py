"""The data of a feed's transactions: fetched in ranges, kept until the transactions are applied.

The feed has only headers, because some callbacks need no data. This cache fetches data when a
callback requests it, on the event loop or on a worker thread.

Rules:
    1. A request for one transaction's data also fetches the data of the following transactions.
       Each further request fetches more of them.
    2. A chunk is dropped when the application has applied all of it.
    3. The chunks of all partitions of a client share one memory budget (`DataBudget`). Each
       partition limits its fetches to an equal share. If single large transactions exceed the
       budget, the oldest chunks are dropped.
"""

import asyncio
import bisect
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from typing import Final, NamedTuple

from waltz_core import errors
from waltz_core.client.read.ranges import RangeChunk, RangeQuery
from waltz_core.encryption.envelopes import Encryption
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, RECORD_PREFIX, TransactionId

DATA_BYTES_MAX: Final = 64 * 1024 * 1024
CHUNKS_KEPT_MAX: Final = 4
# The size of a first fetch. Each fetch that continues at the next transaction is twice as large.
PREFETCH_BYTES_MIN: Final = 64 * 1024
# The memory for a record in addition to its bytes: its list entry, and its part of the lineage.
RECORD_COST_BYTES: Final = 96
# While a thread waits for data, it checks at this interval that the event loop still exists.
POLL_INTERVAL_S = 1.0


class _CachedChunk(NamedTuple):
    """A chunk of the log in memory, up to the transaction `last`."""

    ids: Sequence[int]  # ascending
    offsets: list[int]
    records: memoryview
    last: TransactionId

    @property
    def cost_bytes(self) -> int:
        return len(self.records) + RECORD_COST_BYTES * len(self.ids)

    def data(self, transaction_id: TransactionId) -> bytes | None:
        index = bisect.bisect_left(self.ids, transaction_id)
        if index == len(self.ids) or self.ids[index] != transaction_id:
            return None
        start, end = self.offsets[index], self.offsets[index + 1]
        return bytes(self.records[start + RECORD_PREFIX.size : end - 4])


class DataBudget:
    """The bytes that all data caches of one client may keep; called on the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._caches: dict[DataCache, None] = {}
        self._chunk_costs: dict[tuple[DataCache, TransactionId], int] = {}  # oldest first
        self.used_bytes = 0

    @property
    def fetch_bytes_max(self) -> int:
        """The maximum size of one fetch of one cache, in bytes (rule 3)."""
        return self._bytes_max // (CHUNKS_KEPT_MAX * max(1, len(self._caches)))

    def add(self, cache: "DataCache") -> None:
        """Add the cache of a feed that starts."""
        self._caches[cache] = None

    def remove(self, cache: "DataCache") -> None:
        """Remove a cache whose feed has ended."""
        self._caches.pop(cache, None)

    def take(self, cache: "DataCache", first: TransactionId, cost_bytes: int) -> None:
        """Count a new chunk; drop the oldest other chunks while the budget is exceeded."""
        self._chunk_costs[cache, first] = cost_bytes
        self.used_bytes += cost_bytes
        while self.used_bytes > self._bytes_max and len(self._chunk_costs) > 1:
            holder, oldest_first = next(iter(self._chunk_costs))
            holder.drop(oldest_first)

    def release(self, cache: "DataCache", first: TransactionId) -> None:
        """Subtract the bytes of a chunk that was dropped."""
        self.used_bytes -= self._chunk_costs.pop((cache, first))


class DataCache:
    """The data of one partition's transactions, by the rules above."""

    def __init__(  # noqa: PLR0913 - two ways to fetch, and their limits
        self,
        fetch: Callable[[RangeQuery], Awaitable[RangeChunk]],
        fetch_one: Callable[[TransactionId], Awaitable[bytes]],
        *,
        mark: Callable[[], TransactionId],
        bytes_max: int,
        budget: DataBudget,
        loop: asyncio.AbstractEventLoop,
        header_values: tuple[int, ...] = (),
        encryption: Encryption | None = None,
    ) -> None:
        self.encryption = encryption
        self._fetch = fetch
        self._fetch_one = fetch_one
        self._mark = mark
        self._bytes_max = bytes_max
        self._budget = budget
        self._loop = loop
        self._header_values = header_values
        # The chunks by first ID, oldest first. Other threads read this dict, so it changes in
        # single (atomic) steps only.
        self._chunks: dict[TransactionId, _CachedChunk] = {}
        self._next_id = BEFORE_FIRST
        self._next_fetch_bytes = PREFETCH_BYTES_MIN
        self._fetch_lock = asyncio.Lock()
        budget.add(self)

    async def data_of(self, transaction_id: TransactionId) -> bytes:
        """Return one transaction's data."""
        data = self._find_data(transaction_id)
        if data is not None:
            return data
        async with self._fetch_lock:
            data = self._find_data(transaction_id)
            if data is not None:
                return data
            return await self._fetch_data(transaction_id)

    def data_of_blocking(self, transaction_id: TransactionId) -> bytes:
        """Return one transaction's data to a thread other than the event loop's."""
        data = self._find_data(transaction_id)
        if data is not None:
            return data
        read_coroutine = self.data_of(transaction_id)
        try:
            future = asyncio.run_coroutine_threadsafe(read_coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            read_coroutine.close()
            raise errors.Unavailable("the client is closed") from None
        while True:
            try:
                return future.result(POLL_INTERVAL_S)
            except TimeoutError:
                # A loop that was closed in the meantime never resolves the future.
                if not future.done() and self._loop.is_closed():
                    if inspect.getcoroutinestate(read_coroutine) == inspect.CORO_CREATED:
                        read_coroutine.close()
                    raise errors.Unavailable("the client is closed") from None
                if future.done():
                    raise
            except CancelledError:
                raise errors.Unavailable("the client is closed") from None

    def release_applied(self, mark: TransactionId) -> None:
        """Drop the chunks that the application has applied completely (rule 2)."""
        for first, chunk in list(self._chunks.items()):
            if chunk.last <= mark:
                self.drop(first)

    def drop(self, first: TransactionId) -> None:
        """Drop the chunk that begins at `first`."""
        del self._chunks[first]
        self._budget.release(self, first)

    def clear(self) -> None:
        """Drop all chunks, and leave the budget: the feed has ended."""
        for first in list(self._chunks):
            self.drop(first)
        self._budget.remove(self)

    def _find_data(self, transaction_id: TransactionId) -> bytes | None:
        for chunk in list(self._chunks.values()):
            data = chunk.data(transaction_id)
            if data is not None:
                return data
        return None

    async def _fetch_data(self, transaction_id: TransactionId) -> bytes:
        is_sequential = transaction_id == self._next_id
        if self._header_values:  # the next transaction that passes the filter may have any later ID
            is_sequential = BEFORE_FIRST < self._next_id <= transaction_id
        wanted_bytes = 2 * self._next_fetch_bytes if is_sequential else PREFETCH_BYTES_MIN
        self._next_fetch_bytes = min(wanted_bytes, self._bytes_max, self._budget.fetch_bytes_max)
        last = max(transaction_id, self._mark())
        try:
            query = RangeQuery(
                transaction_id,
                last,
                header_values=self._header_values,
                bytes_max=self._next_fetch_bytes,
            )
            chunk = await self._fetch(query)
        except errors.BadRequest:
            return await self._fetch_one(transaction_id)
        if chunk.count == 0:
            raise errors.DataLoss(
                f"the log has lost transactions: the feed had transaction {transaction_id}, "
                f"but the log now ends at {chunk.high_water_mark}"
            )
        data = self._keep_chunk(chunk).data(transaction_id)
        assert data is not None
        return data

    def _keep_chunk(self, chunk: RangeChunk) -> _CachedChunk:
        offsets = raw_records.offsets_of(chunk.lengths).tolist()
        records = memoryview(chunk.records)
        ids: Sequence[int] = range(chunk.first, chunk.first + chunk.count)
        if self._header_values:
            ids = [int.from_bytes(records[offset : offset + 8], "big") for offset in offsets[:-1]]
        cached_chunk = _CachedChunk(ids, offsets, records, TransactionId(chunk.next - 1))
        if chunk.first in self._chunks:
            self.drop(chunk.first)
        self._chunks[chunk.first] = cached_chunk
        self._budget.take(self, chunk.first, cached_chunk.cost_bytes)
        while len(self._chunks) > CHUNKS_KEPT_MAX:
            self.drop(next(iter(self._chunks)))
        self._next_id = chunk.next
        return cached_chunk
