"""Appends that have IDs but are not final: the batches in flight, and the draft of the next batch.

Rules:
    1. The IDs are consecutive, starting after the high-water mark. The batches in flight have the
       lowest IDs, from the oldest to the newest. The draft has the highest IDs; it gathers
       dependent appends.
    2. When a session ends, its batches in flight are kept until the next session has determined
       which of these batches are in the log.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from waltz_core.records.batches import EncodedBatch
from waltz_core.records.lock_blocks import DISTANCES_TRANSACTIONS_MAX
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Chain,
    LineageEntry,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication.session_events import Batch
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.append.outcomes import AppendOutcome
from waltz_core.server.locking.pending_appends import PendingAppend
from waltz_core.server.locking.single_records import join_batches

# With a slice of these bytes as its table, `translate` subtracts each byte from a constant, without
# a loop.
_DESCENDING_BYTES: Final = bytes(range(255, -1, -1)) * 2


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight, and the append requests that end when it is committed.

    `waiting_tokens` has the tokens of the mounts that wait for this batch.
    """

    entry: LineageEntry
    batch: Batch
    submitted_ms: int
    appends: list[PendingAppend]
    is_large: bool = False
    waiting_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BatchDraft:
    """The rows that this turn and earlier turns have admitted, but not submitted yet.

    `waiting_tokens` has the tokens of the mounts that wait until the whole draft is final.
    `must_submit_now`: the draft goes to the store at once, even while a batch is in flight.
    """

    parts: list[EncodedBatch] = field(default_factory=list)
    locks: list[bytes] = field(default_factory=list)
    lock_rows: list[bytes] = field(default_factory=list)  # for each lock, its row in the part
    appends: list[PendingAppend] = field(default_factory=list)
    outcomes: list[AppendOutcome] = field(default_factory=list)
    waiting_tokens: list[int] = field(default_factory=list)
    is_large: bool = False
    must_submit_now: bool = False
    size_bytes: int = 0  # the size of the records; a field, because every turn reads it

    def add(self, part: EncodedBatch, locks: bytes, lock_rows: bytes) -> None:
        """Add records that have IDs.

        `locks` are their locks. `lock_rows` has one byte for each lock: the row that writes the
        lock.
        """
        self.parts.append(part)
        self.locks.append(locks)
        self.lock_rows.append(lock_rows)
        self.size_bytes += len(part.records)

    def distances(self) -> bytes:
        """Return, for each lock, how far the ID of its writer is below the last ID of the draft.

        Return empty bytes if a distance does not fit into a byte.
        """
        last = self.parts[-1].last
        if last - self.parts[0].first >= DISTANCES_TRANSACTIONS_MAX:
            return b""
        return b"".join(
            rows.translate(_DESCENDING_BYTES[255 - (last - part.first) :][:256])
            for part, rows in zip(self.parts, self.lock_rows, strict=True)
        )


class InFlightBatches:
    """The batches in flight of one partition, and the draft that is being gathered."""

    def __init__(self, throttle: LargeBatchThrottle) -> None:
        self._throttle = throttle
        self._batches: deque[InFlightBatch] = deque()
        self.draft: BatchDraft | None = None  # admitted rows that are not submitted yet
        self.submitted_bytes = 0
        self._large_batch_count = 0
        self.next_id = TransactionId(0)
        self._submitted_last = BEFORE_FIRST
        self.submitted_ms = 0  # when the last batch was submitted
        self._chain: Chain = GENESIS_CHAIN
        self._stamp_ms = 0

    def __len__(self) -> int:
        """Return the number of batches in flight."""
        return len(self._batches)

    def __iter__(self) -> Iterator[InFlightBatch]:
        """Yield the batches in flight, oldest first."""
        return iter(self._batches)

    @property
    def size_bytes(self) -> int:
        """The size of all records that have IDs but are not final, in bytes."""
        draft = self.draft
        return self.submitted_bytes + (draft.size_bytes if draft is not None else 0)

    @property
    def unsubmitted_count(self) -> int:
        """The number of IDs of rows that are not submitted yet."""
        return self.next_id - 1 - self._submitted_last if self.draft is not None else 0

    @property
    def last(self) -> InFlightBatch | BatchDraft | None:
        """The batch in flight, or the draft, with the highest IDs."""
        return self.draft or (self._batches[-1] if self._batches else None)

    # ---- the store session

    def pop_settled_batches(self, last: TransactionId) -> Iterator[InFlightBatch]:
        """Remove and yield the batches of an earlier session that are in the log (rule 2)."""
        while self._batches and self._batches[0].entry.last <= last:
            yield self._batches.popleft()

    def pop_lost_batches(self) -> tuple[list[InFlightBatch | BatchDraft], TransactionId]:
        """Remove the other batches and the draft, which are lost.

        Return the lost batches, and the last ID that was submitted to the store.
        """
        lost_batches: list[InFlightBatch | BatchDraft] = [*self._batches]
        if self.draft is not None:
            lost_batches.append(self.draft)
        self._batches.clear()
        self.draft = None
        self.stop()
        self.submitted_bytes = 0
        return lost_batches, self._submitted_last

    def begin(self, high_water_mark: TransactionId, chain: Chain, stamp_ms: int) -> None:
        """Start to assign the IDs above `high_water_mark`.

        `stamp_ms` is the log's last commit stamp.
        """
        assert not self._batches
        self._chain, self.next_id = chain, TransactionId(high_water_mark + 1)
        self._submitted_last = high_water_mark
        self._stamp_ms = max(self._stamp_ms, stamp_ms)

    def stop(self) -> None:
        """The session has ended: forget its large batches, for which other partitions wait."""
        self._throttle.on_large_batches_forgotten(self._large_batch_count)
        self._large_batch_count = 0

    # ---- batches

    def submit(
        self, draft: BatchDraft, session_id: SessionId, *, now_ms: int, wall_ms: int
    ) -> Batch | None:
        """Create a batch in flight from the records of a draft; None if it has no records."""
        if not draft.parts:
            if draft.appends:
                # These appends were rejected because of an ID in flight, so they become final
                # together with the newest batch in flight.
                self._batches[-1].appends.extend(draft.appends)
            return None
        part = join_batches(draft.parts)
        self._stamp_ms = max(self._stamp_ms, wall_ms)
        batch = Batch(*part, self._stamp_ms, b"".join(draft.locks), draft.distances())
        first, last = batch.first, batch.last
        self._chain = next_chain(self._chain, first, last, session_id, batch.record_crcs)
        entry = LineageEntry(first, last, session_id, self._stamp_ms, self._chain)
        assert last + 1 == self.next_id
        self._submitted_last, self.submitted_ms = last, now_ms
        self._batches.append(
            InFlightBatch(entry, batch, now_ms, draft.appends, draft.is_large, draft.waiting_tokens)
        )
        self.submitted_bytes += len(batch.records)
        if draft.is_large:
            self._large_batch_count += 1
            self._throttle.on_large_batch_started(draft.appends[0].connection, now_ms)
        return batch

    def pop_committed_batches(
        self, last: TransactionId, chain: Chain, now_ms: int
    ) -> list[InFlightBatch]:
        """Remove and return the batches committed up to `last`, where the chain is `chain`."""
        committed: list[InFlightBatch] = []
        while self._batches and self._batches[0].entry.last <= last:
            oldest = self._batches.popleft()
            self.submitted_bytes -= len(oldest.batch.records)
            if oldest.is_large:
                self._large_batch_count -= 1
                self._throttle.on_large_batch_finished(oldest.submitted_ms, now_ms)
            elif oldest.appends:
                self._throttle.on_small_request_finished(oldest.appends[0].received_ms, now_ms)
            assert oldest.entry.last < last or oldest.entry.chain == chain
            committed.append(oldest)
        assert self.submitted_bytes >= 0
        return committed
