"""Authors who follow what is in flight: who of them is told next, and what each has to know.

Under a hot lock the log goes as fast as its authors hear of one another, not as fast as disks sync.
An author that was refused is told here what has got in before him, though it is not durable yet;
what he then computes is admitted behind it, and is lost if that is lost.

Rules (decision 017):
    1. Only refusals wait here. They are final: nothing that was refused is ever admitted.
    2. Who is told gets every transaction above his mark, up to the last that was admitted, that has
       entered one of his locks; or, where that is not known or is too much, none.
    3. Refused authors wait in `lock_queues.py`: one of them is told when a transaction with its
       locks is admitted, and some time after none was; while an author that was told is expected
       back, others join the queue.
    4. No author waits longer than that file's rules permit.
    5. What is remembered is of one open session and of what it was opened with: nothing.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from waltz_core.records.record import NO_SESSION, RECORD_OVERHEAD_BYTES, SessionId, TransactionId
from waltz_core.server.locking.judging import JudgedPiece
from waltz_core.server.locking.lock_queues import LockQueues
from waltz_core.server.locking.tickets import SingleTicket
from waltz_core.server.partition_events import Answer
from waltz_core.wire.messages import AppendFollowing, Buffer, Predecessors

# So much is remembered of what was admitted, and so much of it is told to one author.
REMEMBERED_COUNT_MAX: Final = 1_024
REMEMBERED_BYTES_MAX: Final = 4 << 20
# While others wait for what they are to follow, a batch goes so long after the one before. A disk
# syncs for one transaction as long as for eight, and what comes next does not wait for it.
GATHER_MS: Final = 5
TOLD_COUNT_MAX: Final = 64
TOLD_BYTES_MAX: Final = 64 << 10
# Who asks for more locks is not told: each would be looked for in all that is remembered.
TOLD_LOCKS_MAX: Final = 64
_LOCK_BYTES: Final = 4
# What a lock takes that is remembered as a number of its own.
REMEMBERED_LOCK_BYTES: Final = 64


class _Admitted(NamedTuple):
    """A transaction with its locks and its record; or rows of a batch, with their packed locks.

    Not the request itself: that would keep the frame that it came in.
    """

    last: TransactionId
    locks: frozenset[int] | None  # None for rows of a batch
    content: Buffer

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        locks = () if self.locks is None else self.locks
        return len(self.content) + REMEMBERED_LOCK_BYTES * len(locks)


class RecentAppends:
    """The transactions that were admitted last, without a gap."""

    __slots__ = ("_after", "_entries", "_size_bytes")

    def __init__(self) -> None:
        self._entries: deque[_Admitted] = deque()
        self._size_bytes = 0
        # Everything above is remembered; None: nothing is.
        self._after: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether anything is remembered at all."""
        return self._after is not None

    def begin(self, last: TransactionId) -> None:
        """Remember what is admitted after this."""
        self._after = last

    def end(self) -> None:
        """Forget it (rule 5)."""
        self._entries.clear()
        self._size_bytes, self._after = 0, None

    def add(self, ticket: SingleTicket, record: Buffer) -> None:
        """A single transaction was admitted, with the next id."""
        message = ticket.message
        locks = frozenset((*message.write_locks, *message.append_locks))
        self._add(_Admitted(TransactionId(ticket.transaction_id), locks, record))

    def add_rows(self, last: TransactionId, packed_locks: bytes) -> None:
        """Rows of a batch were admitted, up to this one; what they say is not remembered."""
        self._add(_Admitted(last, None, packed_locks))

    def above(self, mark: int, locks: Sequence[int]) -> list[Buffer] | None:
        """Return the records of what has entered one of the locks above a mark (rule 2)."""
        if self._after is None or mark < self._after or len(locks) > TOLD_LOCKS_MAX:
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
            if len(found) == TOLD_COUNT_MAX or size_bytes > TOLD_BYTES_MAX:
                return None
            found.append(entry.content)
        found.reverse()
        return found

    def _add(self, entry: _Admitted) -> None:
        self._entries.append(entry)
        self._size_bytes += entry.size_bytes
        while len(self._entries) > REMEMBERED_COUNT_MAX or self._size_bytes > REMEMBERED_BYTES_MAX:
            oldest = self._entries.popleft()
            self._size_bytes -= oldest.size_bytes
            self._after = oldest.last


def _may_hold(packed_locks: bytes, locks: Sequence[int]) -> bool:
    """Whether a lock may be among packed ones; what lies across two of them may look like one."""
    return any(lock.to_bytes(_LOCK_BYTES, "big", signed=True) in packed_locks for lock in locks)


class Followers:
    """See the module's rules; the pipeline asks it."""

    __slots__ = ("_admitted", "_session_id", "_sessions_max", "waiting")

    def __init__(self) -> None:
        self._admitted = RecentAppends()
        self.waiting = LockQueues(expects_return=True)
        self._session_id = NO_SESSION  # in which authors may follow; none while there is none
        self._sessions_max = NO_SESSION

    # --- the session

    def opened(self, session_id: SessionId) -> None:
        """A session takes appends.

        One whose number is not new to this process is nobody's to follow: what was told in the
        other one would pass for what is in flight in this one. ZooKeeper's numbers rise, unless its
        data were put back.
        """
        if session_id > self._sessions_max:
            self._session_id = self._sessions_max = session_id

    def closed(self) -> None:
        """Nothing of the session may be followed any more."""
        self._session_id = NO_SESSION
        self._admitted.end()

    def holds(self, message: AppendFollowing, last: TransactionId) -> bool:
        """Whether what an author has followed is what is in flight here, or was in this session."""
        is_same = message.session_id == self._session_id != NO_SESSION
        return is_same and message.client_high_water_mark <= last

    def gathers_until_ms(self, submitted_ms: int) -> int:
        """When what is gathered goes, though nothing is in flight any more."""
        return submitted_ms + (GATHER_MS if self.waiting.waiting_count else 0)

    # --- what is admitted

    def begin(self, last: TransactionId) -> None:
        """Remember what is admitted from now on: until an author wants to follow, nothing is."""
        if not self._admitted.is_begun and self._session_id != NO_SESSION:
            self._admitted.begin(last)

    def added(self, piece: JudgedPiece) -> None:
        """Rows were admitted."""
        if not self._admitted.is_begun:
            return
        part = piece.part
        assert part is not None
        end = 0
        for ticket in piece.doubtful:
            if not isinstance(ticket, SingleTicket):
                self._admitted.add_rows(part.last, piece.locks)
            elif ticket.transaction_id >= 0:
                start, end = end, end + RECORD_OVERHEAD_BYTES + len(ticket.message.data)
                self._admitted.add(ticket, part.records[start:end])

    # --- who is told

    def may_tell(self, ticket: SingleTicket) -> bool:
        """Whether a refused author can be told what he has not seen."""
        if self._session_id == NO_SESSION:
            return False
        return self._admitted.above(*_view_of(ticket)) is not None

    def told(
        self, ticket: SingleTicket, high_water_mark: TransactionId, next_id: TransactionId
    ) -> Answer | None:
        """Return the answer that tells an author what to follow; None where nothing can be told."""
        if self._session_id == NO_SESSION:
            return None
        found = self._admitted.above(*_view_of(ticket))
        if found is None:
            return None
        lengths = struct.pack(f">{len(found)}i", *map(len, found))
        records = b"".join(found)
        last = next_id - 1
        message = Predecessors(
            ticket.req_id, self._session_id, high_water_mark, last, lengths, records
        )
        return Answer(ticket.connection, message, ticket.cost_bytes)


def _view_of(ticket: SingleTicket) -> tuple[int, tuple[int, ...]]:
    message = ticket.message
    return message.client_high_water_mark, (*message.write_locks, *message.read_locks)
