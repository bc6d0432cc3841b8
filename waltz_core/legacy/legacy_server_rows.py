"""Splits appends into single rows for a 0.13 server, and combines outcomes and feeds again.

A 0.13 server accepts one transaction per request, and feeds one transaction per message. The
client's stream instead sends submissions of many rows, and receives ranges of the feed.

Rules:
    1. Row i of a submission gets its own request ID. The sequence number of this request ID is the
       sequence number of the submission's request ID, plus i. A current server assigns the same
       request IDs.
    2. The stream gets one answer for a submission, when the outcomes of all its rows are final.
"""

import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from waltz_core.records import batches
from waltz_core.records.record import (
    BEFORE_FIRST,
    FRAME_BYTES_MAX,
    GENESIS_CHAIN,
    NO_SESSION,
    ReqId,
    TransactionId,
)
from waltz_core.wire.messages import (
    AppendBatch,
    AppendRequest,
    AppendResult,
    FeedBatch,
    FeedData,
    MountWriter,
    RowOutcomeCode,
)

_FEED_HEADER: Final = struct.Struct(">16si")


@dataclass(slots=True, eq=False)
class SubmissionRows:
    """The outcomes of the rows of one submission, as far as they are known."""

    req_id: ReqId  # the request ID of the first row
    row_count: int
    ids: list[int] = field(init=False)
    reasons: bytearray = field(init=False)
    conflicting: list[int] = field(init=False)
    pending_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [BEFORE_FIRST] * self.row_count
        self.conflicting = [BEFORE_FIRST] * self.row_count
        self.reasons = bytearray(self.row_count)
        self.pending_count = self.row_count

    def result(self, high_water_mark: TransactionId) -> AppendResult:
        """Return the answer, like that of a current server; all rows must be final (rule 2)."""
        assert self.pending_count == 0
        layout = f">{self.row_count}q"
        return AppendResult(
            self.req_id,
            high_water_mark,
            struct.pack(layout, *self.ids),
            bytes(self.reasons),
            struct.pack(layout, *self.conflicting),
        )


@dataclass(slots=True, eq=False)
class LegacyRow:
    """One transaction: its 0.13 request, its submission, and its position in the submission."""

    submission: SubmissionRows
    position: int  # the position of the row in its submission
    request: AppendRequest
    number: int = 0  # the number of the row in the order of sending on this connection
    sent_ms: int = 0
    # The estimate of the lock that has rejected the row.
    conflicting_id: TransactionId | None = None

    @property
    def mark(self) -> int:
        """The high-water mark of the author."""
        return self.request.client_high_water_mark

    def on_committed(self, transaction_id: TransactionId) -> bool:
        """Record that the row is in the log; return whether its submission can be answered now."""
        self.submission.ids[self.position] = transaction_id
        return self._mark_ended(RowOutcomeCode.COMMITTED)

    def on_rejected(self, reason: RowOutcomeCode) -> bool:
        """Record that the row will never be in the log; return whether its submission is complete.

        A complete submission can be answered. If a lock has rejected the row, the outcome is LOCK,
        even if `reason` is different.
        """
        if self.conflicting_id is None:
            return self._mark_ended(reason)
        self.submission.conflicting[self.position] = self.conflicting_id
        return self._mark_ended(RowOutcomeCode.LOCK)

    def _mark_ended(self, reason: RowOutcomeCode) -> bool:
        self.submission.reasons[self.position] = reason
        self.submission.pending_count -= 1
        return self.submission.pending_count == 0


def split_into_rows(message: AppendRequest | AppendBatch) -> list[LegacyRow]:
    """Return the rows of an append in order, each with its own request (rule 1)."""
    if isinstance(message, AppendRequest):
        return [LegacyRow(SubmissionRows(message.req_id, 1), 0, message)]
    decoded = batches.decode_append(
        message.payload, rows_max=FRAME_BYTES_MAX, bytes_max=FRAME_BYTES_MAX
    )
    submission = SubmissionRows(message.req_id, decoded.count)
    marks = [message.client_high_water_mark] * decoded.count
    if decoded.marks is not None:
        marks = decoded.marks.tolist()
    first = message.req_id
    columns = (decoded.write_locks, decoded.read_locks, decoded.append_locks)
    rows = zip(
        marks,
        *(_locks_of(column) for column in columns),
        decoded.headers.tolist(),
        decoded.data.to_pylist(),
        decoded.crcs.tolist(),
        strict=True,
    )
    return [
        LegacyRow(
            submission,
            position,
            AppendRequest(first._replace(sequence=first.sequence + position), *row),
        )
        for position, row in enumerate(rows)
    ]


def _locks_of(column: batches.LockColumn) -> list[tuple[int, ...]]:
    bounds, values = column.offsets.tolist(), column.values.tolist()
    return [tuple(values[start:end]) for start, end in pairwise(bounds)]


class FeedRun:
    """Consecutive transactions of the feed, which the stream receives together."""

    def __init__(self, mount: MountWriter) -> None:
        self._mount = mount
        self._header_values = frozenset(mount.header_values)
        self._clear()

    def _clear(self) -> None:
        self._first, self._count = 0, 0
        self._headers = bytearray()
        # The positions, counted from `_first`, of the transactions that the filter selects.
        self._selected_positions: list[int] = []

    def add(self, message: FeedData) -> None:
        """Add a transaction; if the filter excludes it, omit its header, like a current server."""
        if self._count == 0:
            self._first = message.transaction_id
        if not self._header_values or message.header in self._header_values:
            self._headers += _FEED_HEADER.pack(message.req_id.to_bytes(), message.header)
            self._selected_positions.append(self._count)
        self._count += 1

    def take(self) -> FeedBatch | None:
        """Return the transactions added since the last call; None if there are none."""
        if self._count == 0:
            return None
        is_unfiltered = len(self._selected_positions) == self._count
        batch = FeedBatch(
            self._mount.req_id,
            self._first,
            self._count,
            bytes(self._headers),
            NO_SESSION,
            BEFORE_FIRST,
            GENESIS_CHAIN,
            b""
            if is_unfiltered
            else struct.pack(f">{len(self._selected_positions)}i", *self._selected_positions),
        )
        self._clear()
        return batch
