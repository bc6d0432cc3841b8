"""Pending appends: append requests on their way through the server, with the outcome of each row.

The reported outcome of an append must never change. A row's outcome is set when the row is
validated, and when a lost session is settled.

Rules:
    1. A row's outcome is final when its ID is no longer in flight. The outcome of a row rejected by
       a lock is final when the conflicting ID is no longer in flight. A request is answered when
       all of its rows are validated and final.
    2. `settle` marks rows with an ID above the settled mark as LOST. It also marks rows as LOST
       that were rejected because of a transaction above this mark. Lost rows are not validated
       again, so they cannot enter the log after their client was notified of the loss
       (docs/design/correctness.md 2.3).
    3. Rows of one request have consecutive sequence numbers, including rejected rows.
    4. A batch may be validated in pieces, from the first row on. Rows after the last piece have no
       outcome yet. These rows are validated later, in the session that is then open, or all of them
       are rejected.
    5. AHEAD is reported only if a quorum confirms the session in which the row was validated. The
       confirmation must follow the validation (`linearizable_requests.py`, rule 3). Without this
       confirmation the answer is NOT_MOUNTED. In both cases the row is not in the log.
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
from waltz_core.server.locking.lock_table import NO_CONFLICT, NO_ID
from waltz_core.server.partition_events import ConnectionId, SendToClient
from waltz_core.wire.messages import (
    AppendBatch,
    AppendFollowing,
    AppendRequest,
    AppendResult,
    RowOutcomeCode,
)

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

# A request of at least this size is large: it delays small requests
# (`append/large_batch_throttle.py`).
LARGE_REQUEST_BYTES_MIN: Final = 64 * 1024
# The number of latencies that are kept for metrics.
LATENCIES_MAX: Final = 4_096
_ID_STRUCT = struct.Struct(">q")
_PACKED_NO_ID: Final = _ID_STRUCT.pack(NO_ID)
assert NO_ID == NO_CONFLICT == -1
_PACKED_REASONS: Final = {reason: bytes((reason,)) for reason in RowOutcomeCode}


@dataclass(slots=True)
class FlushGroup:
    """The requests between two flushes.

    `unfinished_count` is the number of these requests that are not final yet. `waiting_tokens` has
    the tokens of the flushes that wait for all of them.
    """

    unfinished_count: int = 0
    waiting_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PendingSingle:
    """An append request with one transaction."""

    connection: ConnectionId
    cost_bytes: int
    message: AppendRequest
    flush_group: FlushGroup
    received_ms: int
    # The number of the mount under which the request arrived (`mounts.py`, rule 5).
    mount: int = 0
    transaction_id: int = NO_ID
    reason: RowOutcomeCode = RowOutcomeCode.COMMITTED
    conflict: int = NO_CONFLICT
    # The session in which the transaction was validated.
    session_id: SessionId = NO_SESSION

    @property
    def req_id(self) -> ReqId:
        """The ID of the request, which is also the request ID of the transaction."""
        return self.message.req_id

    @property
    def is_large(self) -> bool:
        """Whether small requests may overtake this request."""
        return self.cost_bytes >= LARGE_REQUEST_BYTES_MIN

    @property
    def is_dependent(self) -> bool:
        """Whether the append may depend on transactions in flight (`dependent_appends.py`)."""
        return isinstance(self.message, AppendFollowing)

    @property
    def is_ahead(self) -> bool:
        """Whether the outcome of the append is AHEAD (rule 5)."""
        return self.reason is RowOutcomeCode.AHEAD

    def replace_unconfirmed_ahead(self) -> None:
        """Replace AHEAD by NOT_MOUNTED, because no quorum has confirmed the session (rule 5)."""
        assert self.is_ahead
        self.reason = RowOutcomeCode.NOT_MOUNTED

    def reject(self, reason: RowOutcomeCode) -> None:
        """Reject the transaction: it will not be in the log, and this is final."""
        self.transaction_id, self.reason, self.conflict = NO_ID, reason, NO_CONFLICT

    def reject_by_lock(self, conflict: int) -> None:
        """Reject the transaction because of a lock; this is final.

        `conflict` is the ID of the lock's last writer, or a higher ID.
        """
        self.transaction_id, self.reason, self.conflict = NO_ID, RowOutcomeCode.LOCK, conflict

    def mark_if_lost(
        self, last: TransactionId, loss_reason: RowOutcomeCode = RowOutcomeCode.LOST
    ) -> bool:
        """Mark the append as lost by rule 2, with the mark `last`; return whether it is lost."""
        is_lost = self.transaction_id > last or self.conflict > last
        if is_lost:
            self.reject(loss_reason)
        return is_lost

    def answer(self, high_water_mark: TransactionId) -> SendToClient:
        """Build the answer to the client."""
        accepted = self.transaction_id != NO_ID
        message = AppendResult(
            self.message.req_id,
            high_water_mark,
            _ID_STRUCT.pack(self.transaction_id) if accepted else _PACKED_NO_ID,
            _PACKED_REASONS[self.reason],
            _PACKED_NO_ID if self.conflict == NO_CONFLICT else _ID_STRUCT.pack(self.conflict),
        )
        return SendToClient(self.connection, message, self.cost_bytes)


@dataclass(slots=True)
class PendingBatch:
    """An append request with many transactions.

    Rows below `validated_count` have an outcome (rule 4). `message` and `rows` keep the frame in
    memory, so `message` is dropped when the batch is decoded, and `rows` when all rows are
    validated. `mount` has the same meaning as in a single append. `session_id` is the session in
    which the first piece was validated. `in_flight_count` is the number of store batches that the
    request waits for.
    """

    connection: ConnectionId
    cost_bytes: int
    message: AppendBatch | None
    req_id: ReqId
    flush_group: FlushGroup
    received_ms: int
    mount: int = 0
    rows: AppendRows | None = None
    mark: int = 0
    validated_count: int = 0
    in_flight_count: int = 0
    ids: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    reasons: U8 = field(default_factory=lambda: np.empty(0, np.uint8))
    conflicts: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    session_id: SessionId = NO_SESSION

    @property
    def is_large(self) -> bool:
        """Whether this request may be split into pieces, and small requests may overtake it."""
        return self.cost_bytes >= LARGE_REQUEST_BYTES_MIN

    @property
    def is_validated(self) -> bool:
        """Whether all rows have an outcome."""
        return self.rows is None and self.message is None

    @property
    def is_final(self) -> bool:
        """Whether the request can be answered (rule 1)."""
        return self.is_validated and not self.in_flight_count

    @property
    def is_ahead(self) -> bool:
        """Whether the outcome of at least one row is AHEAD (rule 5)."""
        return bool((self.reasons == RowOutcomeCode.AHEAD).any())

    def replace_unconfirmed_ahead(self) -> None:
        """Replace AHEAD by NOT_MOUNTED, because no quorum has confirmed the session (rule 5)."""
        assert self.is_ahead
        self.reasons[self.reasons == RowOutcomeCode.AHEAD] = RowOutcomeCode.NOT_MOUNTED

    def open(self, rows: AppendRows) -> None:
        """Set the decoded rows, none of which is validated yet."""
        assert self.message is not None
        self.mark = self.message.client_high_water_mark
        self.message, self.rows = None, rows
        self.ids = np.full(rows.count, NO_ID, np.int64)
        self.conflicts = np.full(rows.count, NO_CONFLICT, np.int64)
        self.reasons = np.zeros(rows.count, np.uint8)

    def piece_end(self, piece_bytes: int | None) -> int:
        """Return the end of the next piece of about `piece_bytes`: the first row after the piece.

        None means that the piece contains all remaining rows.
        """
        assert self.rows is not None
        if piece_bytes is None:
            return self.rows.count
        start = self.validated_count
        # The minimum size of a record bounds the number of rows that can fit.
        nearest_row = start + max(1, piece_bytes // RECORD_OVERHEAD_BYTES)
        record_ends = np.cumsum(self.rows.lengths[start:nearest_row] + RECORD_OVERHEAD_BYTES)
        return start + max(1, int(np.searchsorted(record_ends, piece_bytes, side="right")))

    def cost_up_to(self, row: int) -> int:
        """Return the share of `cost_bytes` for the rows before row number `row`."""
        return self.cost_bytes * row // self.ids.size

    def on_rows_validated(self, stop: int) -> None:
        """Record that the rows before `stop` have an outcome; if all have, release the frame."""
        assert self.validated_count < stop <= self.ids.size
        self.validated_count = stop
        if stop == self.ids.size:
            self.rows = None

    def reject(self, reason: RowOutcomeCode) -> None:
        """Reject all rows that are not validated yet; this is final."""
        self.reasons[self.validated_count :] = reason
        self.on_rows_validated(self.ids.size)

    def mark_if_lost(
        self, last: TransactionId, loss_reason: RowOutcomeCode = RowOutcomeCode.LOST
    ) -> bool:
        """Mark the rows of rule 2 as lost, with the mark `last`; return whether there are any."""
        is_lost = (self.ids > last) | (self.conflicts > last)
        self.ids = np.where(is_lost, NO_ID, self.ids)
        self.conflicts = np.where(is_lost, NO_CONFLICT, self.conflicts)
        self.reasons = np.where(is_lost, np.uint8(loss_reason), self.reasons)
        return bool(is_lost.any())

    def answer(self, high_water_mark: TransactionId) -> SendToClient:
        """Build the answer to the client."""
        assert self.ids.size == self.reasons.size == self.conflicts.size > 0
        message = AppendResult(
            self.req_id,
            high_water_mark,
            self.ids.astype(">i8").tobytes(),
            self.reasons.tobytes(),
            self.conflicts.astype(">i8").tobytes(),
        )
        return SendToClient(self.connection, message, self.cost_bytes)


PendingAppend: TypeAlias = PendingSingle | PendingBatch


@dataclass(slots=True)
class AppendCounters:
    """Counts since the start of the process, for metrics.

    `rejected` has one count for each `RowOutcomeCode`.
    """

    requests: int = 0
    batches: int = 0
    accepted: int = 0
    committed: int = 0
    committed_bytes: int = 0
    rejected: list[int] = field(default_factory=lambda: [0] * len(RowOutcomeCode))
    # Latencies in ms, from the arrival of a batch's first request to its commit, until the metrics
    # take them.
    took_ms: deque[int] = field(default_factory=lambda: deque(maxlen=LATENCIES_MAX))
