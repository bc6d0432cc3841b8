"""Orders the work of one partition.

`service.py` decides which requests are allowed, and answers them.

Rules:
    1. One piece of work runs at a time. Reads and writes take turns; within each kind, requests
       keep their order.
    2. Appends that directly follow each other are written together, so that one sync covers them.
    3. A piece of the scrub runs before all waiting requests. Such pieces are rare, and other work
       of the partition runs between them. Pieces for the archive and the retention take turns with
       waiting requests.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, SessionId, TransactionId
from waltz_core.storage.files.format import Promise
from waltz_core.storage.log.archive_pieces import ArchivePiece, RetentionPiece
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.scrub import ScrubPiece
from waltz_core.storage.service.work import (
    BATCHES_BYTES_MAX,
    RANGE_BYTES_MAX,
    ConnectionId,
    LanePiece,
    LaneRequest,
    Work,
)
from waltz_core.wire.messages import AppendRaw, LockBlocksRequest, RangeRaw, Repair, StorageMessage
from waltz_core.wire.record_locations import LOCATIONS

# A hostile or broken peer must not use up the session numbers (docs/design/correctness.md 2.4, row
# 37).
SESSION_JUMP_MAX: Final = 1 << 32
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
# The memory cost of a request in the queue, in addition to the bytes that it carries or requests.
REQUEST_OVERHEAD_BYTES: Final = 512
# The memory cost of each batch of a request, except the first batch.
_BATCH_OVERHEAD_BYTES: Final = 256


@dataclass(slots=True)
class Lane:
    """The state of one partition: its session, its waiting requests, and its running work."""

    log: PartitionLog
    # The latest promise. PREPARE raises it on arrival, before it is durable (`service.py`, rule 3).
    promise: Promise
    # The connection that has prepared the session; None if there is none now.
    owner: ConnectionId | None = None
    engaged_session: SessionId = NO_SESSION
    writes: deque[LaneRequest] = field(default_factory=deque)
    reads: deque[LaneRequest] = field(default_factory=deque)
    scrub_piece: ScrubPiece | None = None  # the next piece of the scrub
    archive_piece: ArchivePiece | None = None
    retention_piece: RetentionPiece | None = None
    was_background_piece: bool = False  # the last work was of the archive or the retention
    work: Work | None = None
    was_read: bool = False
    has_unmarked_batches: bool = False
    prepared_end: TransactionId = BEFORE_FIRST  # the end of the log when it was prepared
    has_lost_files: bool = False  # its files were deleted or replaced; it will be dropped

    def take_next(self) -> tuple[tuple[LaneRequest, ...], LanePiece | None]:
        """Remove and return the next requests, or the next piece; neither if nothing waits."""
        assert self.work is None, "rule 1"
        piece, self.scrub_piece = self.scrub_piece, None
        if piece is not None:
            return (), piece
        background_piece = self._next_background_piece()
        self.was_background_piece = background_piece is not None
        if background_piece is not None:
            return (), background_piece
        if self.reads and not (self.writes and self.was_read):
            self.was_read = True
            return (self.reads.popleft(),), None
        if self.writes:
            self.was_read = False
            return _next_group(self.writes), None
        return (), None

    def _next_background_piece(self) -> ArchivePiece | RetentionPiece | None:
        """Return the next piece of the archive or the retention; None if requests go first.

        Pieces and requests take turns (rule 3).
        """
        if self.was_background_piece and (self.reads or self.writes):
            return None
        piece: ArchivePiece | RetentionPiece | None
        if self.archive_piece is not None:
            piece, self.archive_piece = self.archive_piece, None
        else:
            piece, self.retention_piece = self.retention_piece, None
        return piece


def _next_group(writes: deque[LaneRequest]) -> tuple[LaneRequest, ...]:
    """Remove the first request and, if it is an append, the appends after it (rule 2)."""
    group = [writes.popleft()]
    if not isinstance(group[0].message, AppendRaw):
        return tuple(group)
    group_bytes = queue_bytes(group[0].message)
    while writes and isinstance(writes[0].message, AppendRaw):
        group_bytes += queue_bytes(writes[0].message)
        if group_bytes > GROUP_BYTES_MAX:
            break
        group.append(writes.popleft())
    return tuple(group)


def queue_bytes(message: StorageMessage) -> int:
    """Return the bytes of memory that a waiting request uses, or that its answer will use."""
    match message:
        case AppendRaw():
            metadata_bytes = len(message.locks) + _BATCH_OVERHEAD_BYTES * len(message.lineage[1:])
            return (
                REQUEST_OVERHEAD_BYTES
                + len(message.records)
                + len(message.lengths)
                + metadata_bytes
            )
        case Repair():
            return REQUEST_OVERHEAD_BYTES + len(message.records) + len(message.lengths)
        case RangeRaw(form=form) if form == LOCATIONS:
            return REQUEST_OVERHEAD_BYTES
        case RangeRaw(whole_batches=True):
            return REQUEST_OVERHEAD_BYTES + min(max(0, message.bytes_max), BATCHES_BYTES_MAX)
        case RangeRaw() | LockBlocksRequest():
            return REQUEST_OVERHEAD_BYTES + min(max(0, message.bytes_max), RANGE_BYTES_MAX)
        case _:
            return REQUEST_OVERHEAD_BYTES
