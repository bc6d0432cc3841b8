"""Pipelined dependent appends: a writer may use transactions that are still in flight.

Without dependent appends, every attempt on a contended lock waits for the disks. With dependent
appends, a rejected writer receives its predecessors (the admitted transactions that the writer has
not seen) before these are durable. The writer computes its transaction again. The new transaction
is admitted after its predecessors. If a predecessor is lost, the new transaction is lost, too.

Rules (decision 017):
    1. Only rejections wait here. The rejections are final: a rejected append is never admitted.
    2. The answer contains the predecessors. These are all admitted transactions above the writer's
       mark that have written one of the locks of the writer's append. If the predecessors are not
       known, or are over the limit, the answer contains none of them.
    3. Rejected writers wait in `lock_queues.py`. One writer is notified when a transaction with its
       locks is admitted, or after a timeout. The notified writer is expected to send its next
       attempt. Until this attempt is admitted or the timeout ends, all other rejected writers join
       the queue.
    4. No writer waits for longer than rule 3 of `lock_queues.py` permits.
    5. Only transactions admitted in the open session are remembered.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from waltz_core.records.record import NO_SESSION, RECORD_OVERHEAD_BYTES, SessionId, TransactionId
from waltz_core.server.locking.lock_queues import LockQueues
from waltz_core.server.locking.pending_appends import PendingSingle
from waltz_core.server.locking.validation import ValidatedPiece
from waltz_core.server.partition_events import SendToClient
from waltz_core.wire.messages import AppendFollowing, Buffer, Predecessors

# The limits of the admitted transactions that are remembered, in number and bytes.
REMEMBERED_TRANSACTIONS_MAX: Final = 1_024
REMEMBERED_BYTES_MAX: Final = 4 << 20
# The minimum interval between batches while writers wait. The server uses it to gather larger
# batches, which costs nothing: a sync of eight transactions takes as long as a sync of one, and the
# next dependent append does not wait for the sync.
GATHER_MS: Final = 5
# The limits of the predecessors in one answer, in number and bytes.
PREDECESSORS_COUNT_MAX: Final = 64
PREDECESSORS_BYTES_MAX: Final = 64 << 10
# A writer with more locks gets no predecessors, because each lock is searched in all remembered
# transactions.
PREDECESSORS_LOCKS_MAX: Final = 64
_LOCK_BYTES: Final = 4
# The memory of a remembered lock that is stored as a separate number, in bytes.
REMEMBERED_LOCK_BYTES: Final = 64


class _AdmittedEntry(NamedTuple):
    """An admitted transaction with its locks and record, or rows of a batch with packed locks.

    The entry does not refer to the request, because this would keep the request's frame in memory.
    """

    last: TransactionId
    locks: frozenset[int] | None  # None for rows of a batch
    content: Buffer

    @property
    def size_bytes(self) -> int:
        """The approximate memory that this entry uses, in bytes."""
        locks = () if self.locks is None else self.locks
        return len(self.content) + REMEMBERED_LOCK_BYTES * len(locks)


class RecentAppends:
    """The transactions that were admitted last, without a gap."""

    __slots__ = ("_entries", "_remembered_after", "_size_bytes")

    def __init__(self) -> None:
        self._entries: deque[_AdmittedEntry] = deque()
        self._size_bytes = 0
        # All transactions above this ID are remembered; None if no transaction is remembered.
        self._remembered_after: int | None = None

    @property
    def is_remembering(self) -> bool:
        """Whether transactions are being remembered."""
        return self._remembered_after is not None

    def begin(self, last: TransactionId) -> None:
        """Remember the transactions that are admitted after ID `last`."""
        self._remembered_after = last

    def end(self) -> None:
        """Forget all transactions (rule 5)."""
        self._entries.clear()
        self._size_bytes, self._remembered_after = 0, None

    def add(self, pending: PendingSingle, record: Buffer) -> None:
        """Remember a single transaction, which was admitted with the next ID."""
        message = pending.message
        locks = frozenset((*message.write_locks, *message.append_locks))
        self._add(_AdmittedEntry(TransactionId(pending.transaction_id), locks, record))

    def add_rows(self, last: TransactionId, packed_locks: bytes) -> None:
        """Remember the locks, but not the data, of rows that were admitted up to ID `last`."""
        self._add(_AdmittedEntry(last, None, packed_locks))

    def records_above(self, mark: int, locks: Sequence[int]) -> list[Buffer] | None:
        """Return the records of transactions above a mark that have written one of the locks.

        Return None if the transactions are not known or are over the limit (rule 2).
        """
        if (
            self._remembered_after is None
            or mark < self._remembered_after
            or len(locks) > PREDECESSORS_LOCKS_MAX
        ):
            return None
        records: list[Buffer] = []
        size_bytes = 0
        for entry in reversed(self._entries):
            if entry.last <= mark:
                break
            if entry.locks is None:
                if _may_contain_lock(bytes(entry.content), locks):
                    return None
                continue
            if entry.locks.isdisjoint(locks):
                continue
            size_bytes += len(entry.content)
            if len(records) == PREDECESSORS_COUNT_MAX or size_bytes > PREDECESSORS_BYTES_MAX:
                return None
            records.append(entry.content)
        records.reverse()
        return records

    def _add(self, entry: _AdmittedEntry) -> None:
        self._entries.append(entry)
        self._size_bytes += entry.size_bytes
        while (
            len(self._entries) > REMEMBERED_TRANSACTIONS_MAX
            or self._size_bytes > REMEMBERED_BYTES_MAX
        ):
            oldest = self._entries.popleft()
            self._size_bytes -= oldest.size_bytes
            self._remembered_after = oldest.last


def _may_contain_lock(packed_locks: bytes, locks: Sequence[int]) -> bool:
    """Whether packed locks may contain one of the given locks.

    Bytes that span two packed locks can match by chance.
    """
    return any(lock.to_bytes(_LOCK_BYTES, "big", signed=True) in packed_locks for lock in locks)


class DependentAppends:
    """Remembers admitted transactions and answers rejected writers, by the module's rules."""

    __slots__ = ("_admitted", "_session_id", "_sessions_max", "waiting")

    def __init__(self) -> None:
        self._admitted = RecentAppends()
        self.waiting = LockQueues(expects_next_attempt=True)
        self._session_id = NO_SESSION  # the session in which dependent appends are possible
        self._sessions_max = NO_SESSION

    # --- the session

    def on_session_opened(self, session_id: SessionId) -> None:
        """A session accepts appends.

        Dependent appends are possible only if `session_id` is higher than the IDs of all earlier
        sessions of this process. Without this condition, predecessors from an earlier session with
        the same ID would be mistaken for transactions in flight in this session. The IDs repeat
        only if ZooKeeper's data was restored from a backup.
        """
        if session_id > self._sessions_max:
            self._session_id = self._sessions_max = session_id

    def on_session_closed(self) -> None:
        """The session has ended: dependent appends are no longer possible."""
        self._session_id = NO_SESSION
        self._admitted.end()

    def knows_predecessors(self, message: AppendFollowing, last: TransactionId) -> bool:
        """Whether the predecessors of an append are, or were, in flight in the open session."""
        is_same = message.session_id == self._session_id != NO_SESSION
        return is_same and message.client_high_water_mark <= last

    def gathering_end_ms(self, submitted_ms: int) -> int:
        """Return when the gathered draft must be submitted if no batch is in flight."""
        return submitted_ms + (GATHER_MS if self.waiting.waiting_count else 0)

    # --- admitted transactions

    def begin(self, last: TransactionId) -> None:
        """Start to remember transactions; called for the first dependent append of a session."""
        if not self._admitted.is_remembering and self._session_id != NO_SESSION:
            self._admitted.begin(last)

    def on_rows_admitted(self, piece: ValidatedPiece) -> None:
        """Remember the rows of a validated piece that were admitted."""
        if not self._admitted.is_remembering:
            return
        part = piece.part
        assert part is not None
        end = 0
        for pending in piece.unsettled_appends:
            if not isinstance(pending, PendingSingle):
                self._admitted.add_rows(part.last, piece.locks)
            elif pending.transaction_id >= 0:
                start, end = end, end + RECORD_OVERHEAD_BYTES + len(pending.message.data)
                self._admitted.add(pending, part.records[start:end])

    # --- answers

    def has_predecessors(self, pending: PendingSingle) -> bool:
        """Whether the predecessors of a rejected append are known, and within the limit."""
        if self._session_id == NO_SESSION:
            return False
        return self._admitted.records_above(*_mark_and_locks_of(pending)) is not None

    def predecessors_answer(
        self, pending: PendingSingle, high_water_mark: TransactionId, next_id: TransactionId
    ) -> SendToClient | None:
        """Return the answer that contains the predecessors of a rejected append.

        Return None if the predecessors are not known or are over the limit (rule 2).
        """
        if self._session_id == NO_SESSION:
            return None
        predecessors = self._admitted.records_above(*_mark_and_locks_of(pending))
        if predecessors is None:
            return None
        lengths = struct.pack(f">{len(predecessors)}i", *map(len, predecessors))
        records = b"".join(predecessors)
        last = next_id - 1
        message = Predecessors(
            pending.req_id, self._session_id, high_water_mark, last, lengths, records
        )
        return SendToClient(pending.connection, message, pending.cost_bytes)


def _mark_and_locks_of(pending: PendingSingle) -> tuple[int, tuple[int, ...]]:
    message = pending.message
    return message.client_high_water_mark, (*message.write_locks, *message.read_locks)
