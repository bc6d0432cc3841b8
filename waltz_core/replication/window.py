"""The recent batches of a session, in memory: those in flight, and those that slow replicas lack.

This module computes the hash chain once for each batch. So a replica that lags or joins later gets
the same bytes and the same chain as the others.

Invariants:
    1. The batches in memory are consecutive, without a gap, and end at `last`.
    2. A batch is not dropped before it is committed.
    3. `trim` limits the bytes and the number of committed batches in memory.
"""

from collections import deque
from typing import NamedTuple

from waltz_core.records.lock_blocks import LogEnd, encode
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    Chain,
    LineageEntry,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication.session_events import Batch


class WindowBatch(NamedTuple):
    """A submitted batch, with its lineage entry and the hash chain before it."""

    entry: LineageEntry
    batch: Batch
    chain_before: Chain
    submitted_ms: int
    lock_block: bytes = b""  # the lock block of the batch

    @property
    def size_bytes(self) -> int:
        """The size of the batch's records, in bytes."""
        return len(self.batch.records)


class SessionWindow:
    """The batches from `first` to `last` that are in memory.

    `committed` is the last ID of the last committed batch.
    """

    __slots__ = (
        "_batches",
        "_size_bytes",
        "_uncommitted",
        "chain",
        "committed",
        "committed_chain",
        "in_flight_bytes",
        "last",
    )

    def __init__(self, high_water_mark: TransactionId, chain: Chain) -> None:
        self._batches: dict[TransactionId, WindowBatch] = {}
        self._uncommitted: deque[WindowBatch] = deque()
        self._size_bytes = 0
        self.in_flight_bytes = 0
        self.last = self.committed = high_water_mark
        self.chain = self.committed_chain = chain

    @property
    def first(self) -> TransactionId:
        """The first ID in memory; if no batch is in memory, the next ID to be submitted."""
        return next(iter(self._batches), TransactionId(self.last + 1))

    @property
    def uncommitted(self) -> list[Batch]:
        """The batches in flight, in order."""
        return [window_batch.batch for window_batch in self._uncommitted]

    @property
    def oldest_submitted_ms(self) -> int | None:
        """When the oldest batch in flight was submitted; None if no batch is in flight."""
        return self._uncommitted[0].submitted_ms if self._uncommitted else None

    def batch_at(self, first: TransactionId) -> WindowBatch | None:
        """Return the batch that begins at `first`; None if it is not in memory."""
        return self._batches.get(first)

    def add(self, batch: Batch, session_id: SessionId, now_ms: int) -> WindowBatch:
        """Add the next batch and compute the hash chain after it."""
        assert batch.first == self.last + 1, "IDs must be consecutive"
        assert batch.last >= batch.first
        assert len(batch.lengths) == 4 * (batch.last - batch.first + 1)
        assert len(batch.records) >= RECORD_OVERHEAD_BYTES
        chain_before = self.chain
        self.chain = next_chain(
            chain_before, batch.first, batch.last, session_id, batch.record_crcs
        )
        entry = LineageEntry(batch.first, batch.last, session_id, batch.stamp_ms, self.chain)
        locks = b""
        if batch.locks is not None:
            end = LogEnd(batch.last, self.chain)
            locks = encode(batch.first, end, chain_before, batch.locks, batch.distances)
        window_batch = WindowBatch(entry, batch, chain_before, now_ms, locks)
        self._batches[batch.first] = window_batch
        self._uncommitted.append(window_batch)
        self._size_bytes += window_batch.size_bytes + len(locks)
        self.in_flight_bytes += window_batch.size_bytes
        self.last = batch.last
        return window_batch

    def commit(self, mark: TransactionId) -> bool:
        """Commit the batches up to `mark`, which a quorum has synced; False if there are none."""
        assert mark <= self.last, "a replica has transactions that were never submitted"
        previous = self.committed
        while self._uncommitted and self._uncommitted[0].entry.last <= mark:
            window_batch = self._uncommitted.popleft()
            self.in_flight_bytes -= window_batch.size_bytes
            self.committed, self.committed_chain = window_batch.entry.last, window_batch.entry.chain
        assert self.committed >= previous
        return self.committed > previous

    def trim(self, needed_first: TransactionId, bytes_max: int, count_max: int) -> None:
        """Drop committed batches that no replica needs any more, or that are over a limit."""
        while self._batches:
            first = next(iter(self._batches))
            window_batch = self._batches[first]
            if window_batch.entry.last > self.committed:
                return  # invariant 2
            is_kept = self._size_bytes <= bytes_max and len(self._batches) <= count_max
            if window_batch.entry.last >= needed_first and is_kept:
                return
            del self._batches[first]
            self._size_bytes -= window_batch.size_bytes + len(window_batch.lock_block)
