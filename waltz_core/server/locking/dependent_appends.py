"""Pipelined dependent appends: writers that build on transactions that are still in flight.

With a contended lock, throughput then depends on how soon writers receive each other's
transactions, and not on the disks. A rejected writer receives its predecessors: the admitted
transactions that it has not seen, although they are not durable yet. It computes its transaction
again. This one is admitted after its predecessors, and is lost if they are lost.

Rules (decision 017):
    1. Only rejections wait here. They are final: a rejected append is never admitted.
    2. The answer contains the predecessors: every transaction above the writer's mark, up to the
       last admitted one, that has entered one of its locks. If these are not known, or over the
       limit, the answer has none.
    3. Rejected writers wait in `lock_queues.py`. One is notified when a transaction with its locks
       is admitted, or after a timeout. While a notified writer is expected to send its next
       attempt, others join the queue.
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

# How many admitted transactions are remembered, in number and bytes.
REMEMBERED_COUNT_MAX: Final = 1_024
REMEMBERED_BYTES_MAX: Final = 4 << 20
# Minimum interval between batches while writers wait. A sync takes as long for one transaction as
# for eight, and the next dependent append does not wait for it.
GATHER_MS: Final = 5
# How many predecessors one answer contains.
PREDECESSORS_COUNT_MAX: Final = 64
PREDECESSORS_BYTES_MAX: Final = 64 << 10
# Writers with more locks get none: each lock is searched in all remembered transactions.
PREDECESSORS_LOCKS_MAX: Final = 64
_LOCK_BYTES: Final = 4
# Memory of a remembered lock that is stored as a number of its own.
REMEMBERED_LOCK_BYTES: Final = 64


class _AdmittedEntry(NamedTuple):
    """A transaction with its locks and its record; or rows of a batch, with their packed locks.

    Not the request itself: that would keep its frame in memory.
    """

    last: TransactionId
    locks: frozenset[int] | None  # None for rows of a batch
    content: Buffer

    @property
    def size_bytes(self) -> int:
        """Approximate memory that it takes."""
        locks = () if self.locks is None else self.locks
        return len(self.content) + REMEMBERED_LOCK_BYTES * len(locks)


class RecentAppends:
    """The transactions that were admitted last, without a gap."""

    __slots__ = ("_after", "_entries", "_size_bytes")

    def __init__(self) -> None:
        self._entries: deque[_AdmittedEntry] = deque()
        self._size_bytes = 0
        # Every transaction above this ID is remembered; None: none is.
        self._after: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether anything is remembered at all."""
        return self._after is not None

    def begin(self, last: TransactionId) -> None:
        """Remember transactions that are admitted after this one."""
        self._after = last

    def end(self) -> None:
        """Forget everything (rule 5)."""
        self._entries.clear()
        self._size_bytes, self._after = 0, None

    def add(self, pending: PendingSingle, record: Buffer) -> None:
        """A single transaction was admitted, with the next ID."""
        message = pending.message
        locks = frozenset((*message.write_locks, *message.append_locks))
        self._add(_AdmittedEntry(TransactionId(pending.transaction_id), locks, record))

    def add_rows(self, last: TransactionId, packed_locks: bytes) -> None:
        """Rows of a batch were admitted, up to this one; their data is not remembered."""
        self._add(_AdmittedEntry(last, None, packed_locks))

    def records_above(self, mark: int, locks: Sequence[int]) -> list[Buffer] | None:
        """Return the records above a mark that entered one of the locks; None by rule 2."""
        if self._after is None or mark < self._after or len(locks) > PREDECESSORS_LOCKS_MAX:
            return None
        found: list[Buffer] = []
        size_bytes = 0
        for entry in reversed(self._entries):
            if entry.last <= mark:
                break
            if entry.locks is None:
                if _may_hold(bytes(entry.content), locks):
                    return None
                continue
            if entry.locks.isdisjoint(locks):
                continue
            size_bytes += len(entry.content)
            if len(found) == PREDECESSORS_COUNT_MAX or size_bytes > PREDECESSORS_BYTES_MAX:
                return None
            found.append(entry.content)
        found.reverse()
        return found

    def _add(self, entry: _AdmittedEntry) -> None:
        self._entries.append(entry)
        self._size_bytes += entry.size_bytes
        while len(self._entries) > REMEMBERED_COUNT_MAX or self._size_bytes > REMEMBERED_BYTES_MAX:
            oldest = self._entries.popleft()
            self._size_bytes -= oldest.size_bytes
            self._after = oldest.last


def _may_hold(packed_locks: bytes, locks: Sequence[int]) -> bool:
    """Whether a lock may be among packed ones; bytes across two locks can match by chance."""
    return any(lock.to_bytes(_LOCK_BYTES, "big", signed=True) in packed_locks for lock in locks)


class DependentAppends:
    """See the module's rules; the pipeline calls it."""

    __slots__ = ("_admitted", "_session_id", "_sessions_max", "waiting")

    def __init__(self) -> None:
        self._admitted = RecentAppends()
        self.waiting = LockQueues(expects_return=True)
        self._session_id = NO_SESSION  # the session in which dependent appends are possible
        self._sessions_max = NO_SESSION

    # --- the session

    def on_session_opened(self, session_id: SessionId) -> None:
        """A session accepts appends.

        If its number is not new to this process, dependent appends are not possible in it:
        predecessors from the other session would pass for transactions in flight in this one.
        ZooKeeper's numbers rise, unless its data was restored from a backup.
        """
        if session_id > self._sessions_max:
            self._session_id = self._sessions_max = session_id

    def on_session_closed(self) -> None:
        """The session has ended: dependent appends are not possible any more."""
        self._session_id = NO_SESSION
        self._admitted.end()

    def knows_predecessors(self, message: AppendFollowing, last: TransactionId) -> bool:
        """Whether the append's predecessors are in flight, or were, in this same session."""
        is_same = message.session_id == self._session_id != NO_SESSION
        return is_same and message.client_high_water_mark <= last

    def gathering_ends_ms(self, submitted_ms: int) -> int:
        """When the gathered draft is submitted if nothing is in flight."""
        return submitted_ms + (GATHER_MS if self.waiting.waiting_count else 0)

    # --- admitted transactions

    def begin(self, last: TransactionId) -> None:
        """Remember transactions from now on; called for the first dependent append."""
        if not self._admitted.is_begun and self._session_id != NO_SESSION:
            self._admitted.begin(last)

    def on_rows_admitted(self, piece: ValidatedPiece) -> None:
        """Rows were admitted."""
        if not self._admitted.is_begun:
            return
        part = piece.part
        assert part is not None
        end = 0
        for pending in piece.doubtful:
            if not isinstance(pending, PendingSingle):
                self._admitted.add_rows(part.last, piece.locks)
            elif pending.transaction_id >= 0:
                start, end = end, end + RECORD_OVERHEAD_BYTES + len(pending.message.data)
                self._admitted.add(pending, part.records[start:end])

    # --- answers

    def has_predecessors(self, pending: PendingSingle) -> bool:
        """Whether the predecessors of a rejected append are known."""
        if self._session_id == NO_SESSION:
            return False
        return self._admitted.records_above(*_view_of(pending)) is not None

    def predecessors_answer(
        self, pending: PendingSingle, high_water_mark: TransactionId, next_id: TransactionId
    ) -> SendToClient | None:
        """Return the answer with the predecessors of a rejected append; None by rule 2."""
        if self._session_id == NO_SESSION:
            return None
        found = self._admitted.records_above(*_view_of(pending))
        if found is None:
            return None
        lengths = struct.pack(f">{len(found)}i", *map(len, found))
        records = b"".join(found)
        last = next_id - 1
        message = Predecessors(
            pending.req_id, self._session_id, high_water_mark, last, lengths, records
        )
        return SendToClient(pending.connection, message, pending.cost_bytes)


def _view_of(pending: PendingSingle) -> tuple[int, tuple[int, ...]]:
    message = pending.message
    return message.client_high_water_mark, (*message.write_locks, *message.read_locks)
