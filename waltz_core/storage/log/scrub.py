"""Schedules the scrub, which rereads logs to find damage while other replicas can repair it.

This file checks no bytes; it only schedules reads. `service.py` runs the pieces of a scrub between
the other work of a partition. A *pass* is one complete scrub of a partition.

Rules:
    1. The whole storage reads one piece at a time. After each piece, it pauses to keep the
       configured rate.
    2. A partition is read in the order of its IDs, from the first ID to the last ID that existed
       when the pass began. After that, the next partition has its turn.
    3. An automatic pass begins at least `interval_ms` after the previous one began. A requested
       pass has priority and is faster. It also runs if automatic passes are disabled.
    4. The progress of a pass is written to a file from time to time. If this file is lost, the
       storage reads a part of the log again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from waltz_core.machine import earliest
from waltz_core.records.checksum import crc32
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId
from waltz_core.storage.disk.file_system import Disk, create_durably

MIB: Final = 1024 * 1024
# While a piece is read, its partition does nothing else.
PIECE_BYTES_MAX: Final = 256 * 1024
# A requested pass is faster: an operator waits for it and has chosen the time.
REQUESTED_BYTES_PER_S: Final = 32 * MIB
# The interval before the next attempt, for a partition that has no records or is busy.
PASS_PAUSE_MS: Final = 1_000
PROGRESS_FILE_NAME: Final = "waltz-x.scrub"
_PROGRESS_BYTES_MAX: Final = 1024 * 1024
_FIRST_ID: Final = TransactionId(0)


class ScrubPiece(NamedTuple):
    """A piece of a log to read: the first ID, and the approximate number of bytes."""

    first: TransactionId
    bytes_max: int


class ScrubResult(NamedTuple):
    """The result of a piece: the next ID, the bytes read, and the error that stopped the read."""

    next_id: TransactionId
    read_bytes: int
    error: str | None = None


class ScrubState(NamedTuple):
    """The progress of the scrub in a partition.

    `finished_age_ms` is -1 before the first pass ends.
    """

    partition_id: PartitionId
    is_running: bool
    is_requested: bool
    next_id: TransactionId
    last_id: TransactionId
    read_bytes: int
    passes_count: int
    finished_age_ms: int
    error: str | None


@dataclass(slots=True)
class _PartitionScrub:
    """The state of one partition: its current pass, or when the next pass may begin."""

    next_id: TransactionId
    last_id: TransactionId = BEFORE_FIRST
    is_running: bool = False
    is_requested: bool = False
    due_ms: int | None = None
    read_bytes: int = 0
    passes_count: int = 0
    finished_ms: int | None = None
    error: str | None = None


class Scrub:
    """Schedules the pieces of all partitions of a storage.

    With `bytes_per_s` 0, there are no automatic passes.
    """

    def __init__(
        self,
        *,
        bytes_per_s: int = 0,
        interval_ms: int = 0,
        positions: Mapping[PartitionId, TransactionId] | None = None,
    ) -> None:
        assert bytes_per_s >= 0
        self._bytes_per_s = bytes_per_s
        self._interval_ms = interval_ms
        self._scrubs: dict[PartitionId, _PartitionScrub] = {}
        self._positions = dict(positions or {})
        self._reading: PartitionId | None = None  # rule 1
        self._free_at_ms = 0
        self.wake_at_ms: int | None = None  # when the next piece is due

    # ---- partitions

    def on_partition_opened(self, partition_id: PartitionId, now_ms: int) -> None:
        """Schedule a partition that is now served, from the position of its interrupted pass."""
        scrub = _PartitionScrub(self._positions.pop(partition_id, _FIRST_ID))
        self._scrubs[partition_id] = scrub
        if self._bytes_per_s:
            scrub.due_ms = now_ms
            # `_update_wake_time` is not called, because there may be a thousand partitions.
            if self._reading is None:
                self.wake_at_ms = earliest(self.wake_at_ms, max(self._free_at_ms, now_ms))

    def on_partition_dropped(self, partition_id: PartitionId) -> None:
        """Remove a partition that is not served any more."""
        del self._scrubs[partition_id]
        if self._reading == partition_id:
            self._reading = None
        self._update_wake_time()

    def request(self, partition_ids: Iterable[PartitionId], now_ms: int) -> None:
        """Request a pass over these partitions now, from the beginning of their logs (rule 3)."""
        for partition_id in partition_ids:
            scrub = self._scrubs[partition_id]
            scrub.is_requested, scrub.is_running, scrub.due_ms = True, False, now_ms
            scrub.next_id = _FIRST_ID
        self._free_at_ms = min(self._free_at_ms, now_ms)
        self._update_wake_time()

    # ---- schedule

    def _update_wake_time(self) -> None:
        """Compute `wake_at_ms`, which is read far more often than it changes."""
        self.wake_at_ms = None
        due_times_ms = [scrub.due_ms for scrub in self._scrubs.values() if scrub.due_ms is not None]
        if due_times_ms and self._reading is None:
            self.wake_at_ms = max(self._free_at_ms, min(due_times_ms))

    def next_partition(self, now_ms: int) -> PartitionId | None:
        """Return the partition to read next, if it is time for it.

        The caller must call `begin` next.
        """
        if self.wake_at_ms is None or self.wake_at_ms > now_ms:
            return None
        due_scrubs = [
            (not scrub.is_requested, not scrub.is_running, scrub.due_ms, partition_id)
            for partition_id, scrub in self._scrubs.items()
            if scrub.due_ms is not None and scrub.due_ms <= now_ms
        ]
        return min(due_scrubs)[-1]

    def begin(
        self, partition_id: PartitionId, last_id: TransactionId, now_ms: int
    ) -> ScrubPiece | None:
        """Return the next piece of a log that ends at `last_id`; None if the pass is finished."""
        scrub = self._scrubs[partition_id]
        if not scrub.is_running:
            scrub.is_running, scrub.last_id, scrub.error = True, last_id, None
            # The interval counts from the start, so that the duration of a pass does not shift the
            # next pass.
            scrub.due_ms = now_ms
        scrub.last_id = min(scrub.last_id, last_id)  # A log may have been truncated since.
        if scrub.next_id > scrub.last_id:
            self._finish(scrub, now_ms)
            return None
        self._reading = partition_id
        self._update_wake_time()
        return ScrubPiece(scrub.next_id, min(PIECE_BYTES_MAX, self._rate(scrub)))

    def on_piece_done(self, partition_id: PartitionId, scrubbed: ScrubResult, now_ms: int) -> bool:
        """Process the result of a piece; return whether the pass is finished."""
        assert self._reading == partition_id
        self._reading = None
        scrub = self._scrubs[partition_id]
        scrub.read_bytes += scrubbed.read_bytes
        if scrubbed.error is not None:
            scrub.error = scrubbed.error
        pause_ms = -(-scrubbed.read_bytes * 1_000 // self._rate(scrub))
        self._free_at_ms = now_ms + max(1, pause_ms)
        is_finished = False
        if scrub.is_running:  # Not if a new pass was requested meanwhile.
            scrub.next_id = scrubbed.next_id
            is_finished = scrub.next_id > scrub.last_id
            if is_finished:
                self._finish(scrub, now_ms)
        self._update_wake_time()
        return is_finished

    def _rate(self, scrub: _PartitionScrub) -> int:
        return max(self._bytes_per_s, REQUESTED_BYTES_PER_S if scrub.is_requested else 1)

    def _finish(self, scrub: _PartitionScrub, now_ms: int) -> None:
        assert scrub.due_ms is not None
        scrub.is_running = scrub.is_requested = False
        scrub.next_id = _FIRST_ID
        scrub.passes_count += 1
        scrub.finished_ms = now_ms
        pass_start_ms = scrub.due_ms
        scrub.due_ms = None
        if self._bytes_per_s:
            scrub.due_ms = max(pass_start_ms + self._interval_ms, now_ms + PASS_PAUSE_MS)
        self._update_wake_time()

    # ---- progress

    def states(self, now_ms: int) -> list[ScrubState]:
        """Return the progress of each partition, ordered by partition number."""
        return [
            ScrubState(
                partition_id,
                scrub.is_running,
                scrub.is_requested,
                scrub.next_id,
                scrub.last_id,
                scrub.read_bytes,
                scrub.passes_count,
                -1 if scrub.finished_ms is None else now_ms - scrub.finished_ms,
                scrub.error,
            )
            for partition_id, scrub in sorted(self._scrubs.items())
        ]

    @property
    def positions(self) -> dict[PartitionId, TransactionId]:
        """The next ID of each unfinished pass, by partition (rule 4)."""
        return {number: scrub.next_id for number, scrub in self._scrubs.items() if scrub.next_id}


# ---------------------------------------------------------------------------------------------
# the progress file (rule 4): a checksum, then a line for each partition


def write_scrub_positions(
    disk: Disk, directory: Path, positions: Mapping[PartitionId, TransactionId]
) -> None:
    """Write the next ID of each pass to the progress file; raises DiskFailed or NoSpace."""
    lines = "".join(f"{partition} {next_id}\n" for partition, next_id in sorted(positions.items()))
    body = lines.encode()
    create_durably(disk, directory, [(PROGRESS_FILE_NAME, f"{crc32(body):08x}\n".encode() + body)])


def read_scrub_positions(disk: Disk, directory: Path) -> dict[PartitionId, TransactionId]:
    """Read the next ID of each pass from the progress file; raises DiskFailed.

    Return an empty dictionary if the file is missing or damaged.
    """
    if not disk.exists(directory / PROGRESS_FILE_NAME):
        return {}
    file = disk.open(directory / PROGRESS_FILE_NAME)
    try:
        stated_crc, _, body = file.pread(_PROGRESS_BYTES_MAX, 0).partition(b"\n")
    finally:
        file.close()
    if stated_crc != f"{crc32(body):08x}".encode():
        return {}
    positions: dict[PartitionId, TransactionId] = {}
    for line in body.decode().splitlines():
        partition, next_id = line.split(" ")
        positions[PartitionId(int(partition))] = TransactionId(int(next_id))
    return positions
