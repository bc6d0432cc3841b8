"""Append requests on their way through the server, and the outcome of each of their rows.

What a client is told about an append must be the truth for ever. Every row's outcome is written in
one of two places, here: when the row is judged, and when a lost session is settled. Nothing else
changes it.

Rules:
    1. A row's outcome is final when its id, or the id that it was refused for, is no longer in
       flight. A request is answered when all of its rows are judged and final.
    2. `settle`: what lies above the settled mark is LOST, whether it was accepted or refused for an
       id that is lost itself. It is not judged again, so nothing can bring it back after its client
       was told (docs/design/correctness.md 2.3).
    3. Rows of one request have consecutive sequence numbers, refused ones too.
    4. A batch may be judged in pieces, from the first row on. A row that no piece has reached has
       no outcome: it is judged in whatever session comes then, or refused with all behind it.
    5. AHEAD is told when the session that it was judged in was proven later (`proofs.py`, rule 3).
       A row for which that cannot be had is told NOT_MOUNTED: it is not in the log either way.
"""

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from waltz_core.records.batches import AppendRows
from waltz_core.records.record import (
    NO_SESSION,
    RECORD_OVERHEAD_BYTES,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.server.locking.lock_table import NO_CONFLICT, REFUSED
from waltz_core.server.partition_events import Answer, ConnectionId
from waltz_core.wire.messages import (
    AppendBatch,
    AppendFollowing,
    AppendRequest,
    AppendResult,
    Reason,
)

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

# A request of so many bytes is large: it delays small ones (`append/pace.py`).
LARGE_BYTES: Final = 64 * 1024
# Of how many batches it is kept how long they took.
TOOK_MAX: Final = 4_096
_ID = struct.Struct(">q")
_NONE: Final = _ID.pack(REFUSED)
assert REFUSED == NO_CONFLICT == -1
_REASONS: Final = {reason: bytes((reason,)) for reason in Reason}


@dataclass(slots=True)
class Epoch:
    """The requests received between two flushes: how many are not final, and who waits for it."""

    unfinished: int = 0
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SingleTicket:
    """One transaction, sent alone."""

    connection: ConnectionId
    cost_bytes: int
    message: AppendRequest
    epoch: Epoch
    received_ms: int
    # The number of the mount that it came under (`mounts.py`, rule 5).
    mount: int = 0
    transaction_id: int = REFUSED
    reason: Reason = Reason.COMMITTED
    conflict: int = NO_CONFLICT
    # The session that it was judged in.
    session_id: SessionId = NO_SESSION

    @property
    def req_id(self) -> ReqId:
        """The request's id, which is the transaction's."""
        return self.message.req_id

    @property
    def is_large(self) -> bool:
        """Whether small ones may pass it."""
        return self.cost_bytes >= LARGE_BYTES

    @property
    def follows(self) -> bool:
        """Whether its author follows what is in flight (`following.py`)."""
        return isinstance(self.message, AppendFollowing)

    @property
    def is_ahead(self) -> bool:
        """Whether it would be told AHEAD (rule 5)."""
        return self.reason is Reason.AHEAD

    def doubt(self) -> None:
        """There is no proof that the client is ahead (rule 5)."""
        assert self.is_ahead
        self.reason = Reason.NOT_MOUNTED

    def refuse(self, reason: Reason) -> None:
        """The transaction will not be in the log, and this is final."""
        self.transaction_id, self.reason, self.conflict = REFUSED, reason, NO_CONFLICT

    def refuse_for(self, conflict: int) -> None:
        """A lock stands against it; at `conflict` or below, which is final."""
        self.transaction_id, self.reason, self.conflict = REFUSED, Reason.LOCK, conflict

    def settle(self, last: TransactionId, loss: Reason = Reason.LOST) -> bool:
        """Rule 2; True when it was lost, which is told as `loss`."""
        is_lost = self.transaction_id > last or self.conflict > last
        if is_lost:
            self.refuse(loss)
        return is_lost

    def answer(self, high_water_mark: TransactionId) -> Answer:
        """Return what the client is told."""
        accepted = self.transaction_id != REFUSED
        message = AppendResult(
            self.message.req_id,
            high_water_mark,
            _ID.pack(self.transaction_id) if accepted else _NONE,
            _REASONS[self.reason],
            _NONE if self.conflict == NO_CONFLICT else _ID.pack(self.conflict),
        )
        return Answer(self.connection, message, self.cost_bytes)


@dataclass(slots=True)
class BatchTicket:
    """Many transactions in one request; rows below `judged_count` have an outcome (rule 4).

    `message` goes when it is decoded, and `rows` when they are all judged: both pin the frame.
    `mount` is as for a single one; `session_id` is the session that its first piece was judged in.
    `flight_count` is the number of store batches that it waits for.
    """

    connection: ConnectionId
    cost_bytes: int
    message: AppendBatch | None
    req_id: ReqId
    epoch: Epoch
    received_ms: int
    mount: int = 0
    rows: AppendRows | None = None
    mark: int = 0
    judged_count: int = 0
    flight_count: int = 0
    ids: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    reasons: U8 = field(default_factory=lambda: np.empty(0, np.uint8))
    conflicts: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    session_id: SessionId = NO_SESSION

    @property
    def is_large(self) -> bool:
        """Whether small ones may pass it, and it may be cut into pieces."""
        return self.cost_bytes >= LARGE_BYTES

    @property
    def is_judged(self) -> bool:
        """Whether all of its rows have an outcome."""
        return self.rows is None and self.message is None

    @property
    def is_final(self) -> bool:
        """Whether it can be answered (rule 1)."""
        return self.is_judged and not self.flight_count

    @property
    def is_ahead(self) -> bool:
        """Whether a row would be told AHEAD (rule 5)."""
        return bool((self.reasons == Reason.AHEAD).any())

    def doubt(self) -> None:
        """There is no proof that the client is ahead (rule 5)."""
        assert self.is_ahead
        self.reasons[self.reasons == Reason.AHEAD] = Reason.NOT_MOUNTED

    def open(self, rows: AppendRows) -> None:
        """Note the decoded rows, of which none is judged."""
        assert self.message is not None
        self.mark = self.message.client_high_water_mark
        self.message, self.rows = None, rows
        self.ids = np.full(rows.count, REFUSED, np.int64)
        self.conflicts = np.full(rows.count, NO_CONFLICT, np.int64)
        self.reasons = np.zeros(rows.count, np.uint8)

    def stop_within(self, piece_bytes: int | None) -> int:
        """Return the row before which a piece ends that takes about so many bytes, or all."""
        assert self.rows is not None
        if piece_bytes is None:
            return self.rows.count
        start = self.judged_count
        # A record is never shorter than this, so no more rows than these can fit.
        near = start + max(1, piece_bytes // RECORD_OVERHEAD_BYTES)
        ends = np.cumsum(self.rows.lengths[start:near] + RECORD_OVERHEAD_BYTES)
        return start + max(1, int(np.searchsorted(ends, piece_bytes, side="right")))

    def cost_up_to(self, row: int) -> int:
        """Return what share of its cost belongs to the rows before this one."""
        return self.cost_bytes * row // self.ids.size

    def judged(self, stop: int) -> None:
        """Note that rows up to `stop` - 1 have an outcome; the last takes the frame with it."""
        assert self.judged_count < stop <= self.ids.size
        self.judged_count = stop
        if stop == self.ids.size:
            self.rows = None

    def refuse(self, reason: Reason) -> None:
        """None of the rows that are not judged will be in the log, and this is final."""
        self.reasons[self.judged_count :] = reason
        self.judged(self.ids.size)

    def settle(self, last: TransactionId, loss: Reason = Reason.LOST) -> bool:
        """Rule 2; True when a row was lost, which is told as `loss`."""
        lost = (self.ids > last) | (self.conflicts > last)
        self.ids = np.where(lost, REFUSED, self.ids)
        self.conflicts = np.where(lost, NO_CONFLICT, self.conflicts)
        self.reasons = np.where(lost, np.uint8(loss), self.reasons)
        return bool(lost.any())

    def answer(self, high_water_mark: TransactionId) -> Answer:
        """Return what the client is told."""
        assert self.ids.size == self.reasons.size == self.conflicts.size > 0
        message = AppendResult(
            self.req_id,
            high_water_mark,
            self.ids.astype(">i8").tobytes(),
            self.reasons.tobytes(),
            self.conflicts.astype(">i8").tobytes(),
        )
        return Answer(self.connection, message, self.cost_bytes)


Ticket: TypeAlias = SingleTicket | BatchTicket


@dataclass(slots=True)
class AppendFigures:
    """What became of requests since the start, for metrics; `refused` is by `Reason`."""

    requests: int = 0
    batches: int = 0
    accepted: int = 0
    committed: int = 0
    committed_bytes: int = 0
    refused: list[int] = field(default_factory=lambda: [0] * len(Reason))
    # From the arrival of the first request of a batch to its answer; taken out by whoever shows it.
    took_ms: deque[int] = field(default_factory=lambda: deque(maxlen=TOOK_MAX))
