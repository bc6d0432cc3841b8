"""Limits the local size and age of the logs, by removal of old segments that are archived.

This file only chooses segments. `service.py` runs the pieces in the partitions' lanes, and
`PartitionLog` decides whether a segment may be removed (rule AR 10 of decision 047).

Rules:
    1. A round measures all logs, one after the other. After that, segments are removed, one at a
       time. First, segments over the age limit are removed. Then segments of the largest log are
       removed, until all logs together are within the size limit.
    2. The archived mark of a partition belongs to the present session. It is in memory only (AR 9).
    3. A round begins when a mark was set, and `MEASURE_INTERVAL_MS` after the last round. If no
       limit is set, there is no round. If a mark is set during a round, only the log of this mark
       is measured again.
"""

from dataclasses import dataclass
from typing import Final

from waltz_core.records.record import PartitionId
from waltz_core.storage.files.format import AckedMarker
from waltz_core.storage.log.archive_pieces import LogSize, RetentionPiece

MEASURE_INTERVAL_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """The maximum bytes of all logs, and the maximum age of a log's oldest segment; 0: no limit."""

    bytes_max: int = 0
    age_ms_max: int = 0


NO_RETENTION_LIMITS: Final = RetentionLimits()


class Retention:
    """Chooses the segments to remove; rules refer to this module."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._marks: dict[PartitionId, AckedMarker] = {}
        self._sizes: dict[PartitionId, LogSize | None] = {}  # None: not measured yet in this round
        self._running: PartitionId | None = None
        self._due_ms: int | None = None

    @property
    def wake_at_ms(self) -> int | None:
        """When to call `next_piece`; None while a piece runs."""
        return self._due_ms if self._running is None else None

    def on_partition_opened(self, partition_id: PartitionId) -> None:
        """Add a log, which was opened."""
        self._sizes[partition_id] = None

    def on_partition_dropped(self, partition_id: PartitionId) -> None:
        """Remove a log, which is not served any more."""
        self.forget(partition_id)
        del self._sizes[partition_id]

    def on_archived(self, partition_id: PartitionId, mark: AckedMarker, now_ms: int) -> None:
        """Store a session's archived mark, which matches the log, and begin a round (rule 3)."""
        self._marks[partition_id] = mark
        if self._limits.bytes_max or self._limits.age_ms_max:
            self._due_ms = now_ms
            self._sizes[partition_id] = None

    def forget(self, partition_id: PartitionId) -> None:
        """Forget the mark and the running piece of a partition whose session has ended (rule 2)."""
        self._marks.pop(partition_id, None)
        if self._running == partition_id:
            self._running = None

    def next_piece(self, now_ms: int) -> tuple[PartitionId, RetentionPiece] | None:
        """Return the next piece to run; None if one is running, or the round is over."""
        if self._due_ms is None or now_ms < self._due_ms or self._running is not None:
            return None
        for partition_id, size in self._sizes.items():
            if size is None:
                return self._begin(partition_id, removes_oldest=False)
        chosen_partition = self._next_removal()
        if chosen_partition is not None:
            return self._begin(chosen_partition, removes_oldest=True)
        self._sizes = dict.fromkeys(self._sizes)
        self._due_ms = now_ms + MEASURE_INTERVAL_MS if self._marks else None
        return None

    def _begin(
        self, partition_id: PartitionId, *, removes_oldest: bool
    ) -> tuple[PartitionId, RetentionPiece]:
        self._running = partition_id
        return partition_id, RetentionPiece(self._marks.get(partition_id), removes_oldest)

    def _next_removal(self) -> PartitionId | None:
        """Return the partition whose oldest segment is removed next (rule 1)."""
        sizes = {
            partition_id: size for partition_id, size in self._sizes.items() if size is not None
        }
        removable = [partition_id for partition_id, size in sizes.items() if size.is_removable]
        if not removable:
            return None
        oldest = max(removable, key=lambda partition_id: sizes[partition_id].oldest_age_ms)
        if 0 < self._limits.age_ms_max < sizes[oldest].oldest_age_ms:
            return oldest
        if 0 < self._limits.bytes_max < sum(size.size_bytes for size in sizes.values()):
            return max(removable, key=lambda partition_id: sizes[partition_id].size_bytes)
        return None

    def on_piece_done(self, partition_id: PartitionId, size: LogSize | None) -> None:
        """Process a piece's result; `size` is None after an error, which ends the log's turn."""
        if self._running == partition_id:
            self._running = None
        self._sizes[partition_id] = LogSize(0) if size is None else size
