"""The files of one partition's log: writes, syncs, and the state after a failure.

`PartitionLog` decides on all writes, and `LogFiles` executes them. `LogFiles` also tracks the
reported end of the log. While records are covered (`covered_records.py`), the reported end is
before the end of the records.

Rules (numbers in brackets: docs/design/correctness.md 2.4):
    1. A method that promises durability returns after the sync.
    2. The acked marker is the ID at the end of a batch, with the chain hash at this ID. Records,
       batches and index are synced up to the marker. The marker moves when a segment is full, and a
       second after a sync. If the log is idle, the service moves the marker. A log that ends below
       its marker is suspect [2].
    3. After a failed write or sync, unsynced records are truncated, and the file is not written any
       more. When a session prepares the log again, the log continues in a new segment. If the
       truncation or the write of a slot fails, too, the log rejects all calls until it is opened
       again [7].
    4. A truncation writes its intent first. If the disk is full, a repeated call or the next
       opening finishes the truncation [9, 12].
    5. If files were deleted or replaced while this process had them open, the log uses neither the
       deleted nor the new files. Appends to the deleted files would be lost, and the new files may
       lack a promise.
    6. A new start of the log is durable in both slots before older segments are removed. If one
       slot still had the old start, and a crash made this slot current again, the log could not be
       opened.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from waltz_core.errors import DiskFailed, MissingSegment, NoSpace, WaltzError
from waltz_core.records.record import Chain, LineageEntry, PartitionId, TransactionId
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME, SlotFile
from waltz_core.storage.files.format import UNBATCHED_CHAIN, AckedMarker, Slot
from waltz_core.storage.files.id_ranges import damage_after
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import truncation
from waltz_core.storage.log.reading import LogReader

I64 = npt.NDArray[np.int64]
MARKER_INTERVAL_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings that all logs of a storage share.

    A segment larger than `segment_bytes_max` receives no further record. `now_ms` is the wall
    clock: it stamps headers and paces the acked marker, but no decision depends on it. If
    `trust_fsync` is False, an unclean stop makes the replica suspect.
    """

    cluster_key: bytes
    segment_bytes_max: int
    now_ms: Callable[[], int]
    trust_fsync: bool = True


class LogFiles:
    """Segments and slots of one log; all calls block, and only one may run at a time."""

    def __init__(self, segments: Segments, slots: SlotFile, settings: LogSettings) -> None:
        self.partition_id: PartitionId = slots.slot.partition_id
        self.sync_count = 0
        self.failure_count = 0
        self.has_failed = False  # rule 3
        self.is_broken = False  # rule 3: until the log is opened again
        self.is_half_truncated = False  # rule 4: the disk was full
        self.files_error: MissingSegment | None = None  # rule 5
        self._settings = settings
        # The time of the first sync since the marker moved; 0 if there is none.
        self._unmarked_since_ms = 0
        self.replace_files(segments, slots)

    def replace_files(self, segments: Segments, slots: SlotFile) -> None:
        """Replace the files by newly opened ones, and reset the state that depends on them."""
        self.segments = segments
        self.slots = slots
        self.reader = LogReader(self.partition_id, segments, slots, self.write_slot)
        self.lock_block_file = segments.lock_block_file
        self.covered_end: TransactionId | None = None  # the reported end while records are covered
        self.synced_max = segments.last_id
        self.chain = self.synced_chain = segments.chain
        self.has_failed = self.is_broken = False

    @property
    def slot(self) -> Slot:
        """The durable state of the partition, without the records."""
        return self.slots.slot

    @property
    def last_id(self) -> TransactionId:
        """The last ID of the log, synced or not; in an empty log, the ID of its start."""
        return self.segments.last_id if self.covered_end is None else self.covered_end

    # ---- writing

    def append(self, lengths: I64, records: memoryview, entries: Sequence[LineageEntry]) -> None:
        """Write complete batches after the last record; `sync` makes them durable.

        Raises:
            NoSpace: the disk is full; nothing was written.
            DiskFailed: a write failed (rule 3).
        """
        log_end_before = (self.last_id, self.chain)
        try:
            self.write_batches(lengths, records, entries)
        except NoSpace:
            # A part of the append may have been written. The truncation removes this part. The
            # session ends, but the disk has not failed.
            self._truncate_to(*log_end_before)
            raise
        except DiskFailed as error:
            self.fail()
            raise DiskFailed(str(error)) from error  # Here a failed read counts as a failed write.
        self.chain = entries[-1].chain

    def write_batches(
        self, lengths: I64, records: memoryview, entries: Sequence[LineageEntry]
    ) -> None:
        """Write records and batches; begin a new segment wherever the current one is too large."""
        end = AckedMarker(self.last_id, self.chain)
        while lengths.size:
            current = self.segments.current
            space = self._settings.segment_bytes_max - current.size_bytes
            if space < 0:
                entries, end = self._roll(entries, end)
                continue
            part, size = lengths, len(records)
            if size > space:
                # The first record that ends beyond the space is the last record in this segment.
                ends = lengths.cumsum()
                part = lengths[: int(ends.searchsorted(space, side="right")) + 1]
                size = int(ends[part.size - 1])
            current.append(part, records[:size])
            lengths, records = lengths[part.size :], records[size:]
        self.segments.current.append_entries(entries, self.synced_max)

    def _roll(
        self, entries: Sequence[LineageEntry], end: AckedMarker
    ) -> tuple[Sequence[LineageEntry], AckedMarker]:
        """Begin a new segment, in the middle of an append of the batches `entries`.

        `end` is the end of the last batch before `entries`. Return the entries of the batches that
        end after the old segment, and the end of the last batch in the old segment. This method
        reads nothing, because corrupt bytes must not interrupt the append.
        """
        last = self.segments.last_id
        segment_entries = [entry for entry in entries if entry.last <= last]
        self.segments.current.append_entries(segment_entries, self.synced_max)
        if segment_entries:
            end = AckedMarker(segment_entries[-1].last, segment_entries[-1].chain)
        self.sync_count += self.segments.sync()
        self.segments.sync_index()
        marker = AckedMarker(last, UNBATCHED_CHAIN) if self.slot.is_unbatched else end
        if marker.transaction_id != self.segments.start.transaction_id:
            self.write_slot(replace(self.slot, acked=marker))
            self._unmarked_since_ms = 0
        self.segments.add(self._settings.now_ms(), end.chain)
        return entries[len(segment_entries) :], end

    def sync(self) -> TransactionId:
        """Sync all appended records and their batches; return the last ID.

        Raises:
            DiskFailed: the sync failed; everything after the last successful sync is truncated
                (rule 3).
        """
        self.check_usable()
        try:
            self.sync_count += self.segments.sync()
        except (DiskFailed, NoSpace) as error:
            self.fail()
            raise DiskFailed(str(error)) from error
        self.synced_max = self.last_id
        self.synced_chain = self.chain
        if self.slots.slot.acked.transaction_id < self.synced_max:
            now_ms = self._settings.now_ms()
            self._unmarked_since_ms = self._unmarked_since_ms or now_ms
            if (
                abs(now_ms - self._unmarked_since_ms) >= MARKER_INTERVAL_MS
            ):  # a clock may be set back
                self.mark_acked()
        return self.synced_max

    def mark_acked(self) -> None:
        """Move the acked marker to the last synced ID, durably (rule 2).

        The marker does not move after a failure. The marker also does not move while records are
        covered, because `covered_records.py` has set it.
        """
        if self.covered_end is not None:
            return
        self._unmarked_since_ms = 0
        # After a failure, the marker stays: after a failed sync of the index, another sync would
        # wrongly succeed, and a truncation that found no space has set the marker already.
        if self.slot.acked.transaction_id < self.synced_max and not self.has_failed:
            self.sync_index()
            marker = AckedMarker(self.synced_max, self.synced_chain)
            self.write_slot(replace(self.slot, acked=marker))

    def sync_index(self) -> None:
        """Sync the index; a failure is final (rule 3)."""
        try:
            self.segments.sync_index()
        except DiskFailed:
            self.fail()
            raise

    def write_slot(self, slot: Slot, *, may_be_full: bool = False) -> None:
        """Write a slot, durably; with `may_be_full`, NoSpace leaves the log usable."""
        self.check_files()
        try:
            self.slots.write(slot)
            self.sync_count += 1
        except (DiskFailed, NoSpace) as error:
            if may_be_full and isinstance(error, NoSpace):
                raise  # Nothing was written.
            raise self.mark_broken(f"cannot write the control slots: {error}") from error

    def truncate(self, last_to_keep: TransactionId) -> None:
        """Remove all records and batches after an ID, durably (rule 4).

        Raises:
            NoSpace: the disk is full. Call this method again when there is space; until then other
                calls fail.
            DiskFailed: the log must be opened again.
        """
        was_half_truncated = self.is_half_truncated
        if not was_half_truncated:
            slot_with_intent = truncation.slot_with_intent(self.slot, self.segments, last_to_keep)
            self.write_slot(slot_with_intent, may_be_full=True)
        intent = self.slot.truncate
        assert intent is not None
        self.has_failed = self.is_broken = True  # until the truncation is carried out
        try:
            truncation.carry_out(self.segments, intent)
            self.slots.write(truncation.slot_after_truncation(self.slot, self.segments))
        except WaltzError as error:
            # The intent is durable, and stays: the next opening carries it out before anything
            # else.
            self.is_half_truncated = isinstance(error, NoSpace) and not was_half_truncated
            if self.is_half_truncated:
                raise
            raise DiskFailed(
                f"partition {self.partition_id}: cannot truncate the log: {error}"
            ) from error
        self.is_half_truncated = self.has_failed = self.is_broken = False
        self.sync_count += 1
        self.synced_max = self.last_id
        # Take the chain hash from the slot: a read of the files could fail, and then the chain hash
        # of the longer log would stay.
        self.chain = self.synced_chain = self.slot.acked.chain

    def begin_after(self, start: AckedMarker, slot: Slot) -> None:
        """Make the log begin after a batch end, durably, and remove older segments (rule 6).

        `slot` is the present slot with the changes that belong to the new start.

        Raises:
            DiskFailed: the log must be opened again.
        """
        slot = replace(slot, start=start, damaged=damage_after(slot.damaged, start.transaction_id))
        self.write_slot(slot)
        self.write_slot(slot)
        try:
            self.segments.begin_after(start, self._settings.now_ms())
        except (DiskFailed, NoSpace) as error:
            raise self.mark_broken(
                f"cannot remove the log before transaction {start.transaction_id}: {error}"
            ) from error
        if self.synced_max < start.transaction_id:
            self.synced_max, self.chain = start
            self.synced_chain = start.chain

    def now_ms(self) -> int:
        """Return the time of the clock that dates the segments, in milliseconds."""
        return self._settings.now_ms()

    # ---- failing (rules 3 and 5)

    def check_usable(self) -> None:
        """Raise DiskFailed after a failure, until a session continues in a new segment."""
        if self.has_failed:
            raise DiskFailed(
                f"partition {self.partition_id}: a write failed in this store session; the "
                "log accepts no further writes until the next session"
            )

    def fail(self) -> None:
        """Truncate unsynced records, and reject further writes.

        If the truncation fails, too, the log is broken.
        """
        self.failure_count += 1
        self.has_failed = True
        self._truncate_to(self.synced_max, self.synced_chain)

    @contextmanager
    def fail_on_disk_error(self) -> Iterator[None]:
        """Make a disk failure inside the block final for the log (rule 3)."""
        try:
            yield
        except (DiskFailed, NoSpace) as error:
            self.fail()
            raise DiskFailed(str(error)) from error

    def _truncate_to(self, last: TransactionId, chain: Chain) -> None:
        if self.covered_end is not None:
            self.stop_covering()
            last, chain = min(self.slot.acked.transaction_id, self.synced_max), UNBATCHED_CHAIN
            self.synced_max = last
        try:
            if self.slot.acked.transaction_id > last:
                # When a new segment began, the marker moved above `last`. The records above `last`
                # were not acknowledged.
                self.write_slot(replace(self.slot, acked=AckedMarker(last, chain)))
            self.segments.truncate(last, None)
        except WaltzError as error:  # also ChecksumMismatch: the index may be wrong
            failure = self.mark_broken(f"the records written after {last} cannot be truncated")
            self.write_slot(replace(self.slot, suspect=True))
            raise failure from error
        self.chain = chain

    def continue_in_new_segment(self) -> None:
        """Begin a new segment after a failure, so that the log accepts writes again."""
        self.segments.continue_in_new_file(
            self._settings.now_ms(), self.chain, self.slot.acked.transaction_id
        )
        self.has_failed = False

    def stop_covering(self) -> None:
        """Stop covering records: they belong to the log again, without batches."""
        if self.covered_end is not None:
            self.covered_end = None
            self.synced_max = self.segments.last_id
            self.chain = self.synced_chain = UNBATCHED_CHAIN

    def mark_broken(self, reason: str) -> DiskFailed:
        """Reject all calls until the log is opened again.

        Return the error for the caller to raise.
        """
        self.has_failed = self.is_broken = True
        return DiskFailed(f"partition {self.partition_id}: {reason}")

    def check_files(self) -> None:
        """Check that directory and slots are still the files that were opened (rule 5).

        Raises:
            MissingSegment: the files were deleted or replaced; the log rejects all further calls.
            DiskFailed: the disk could not be read.
        """
        if self.files_error is None and not self.slots.is_in_place():
            self.has_failed = self.is_broken = True
            self.files_error = MissingSegment(
                f"{self.segments.directory}: the directory or its {SLOTS_FILE_NAME} was deleted or "
                "replaced while this process used it"
            )
        if self.files_error is not None:
            raise self.files_error

    # ---- the end

    def close(self) -> None:
        """Sync, move the marker to the end, clear the dirty bit, all durably; close the files."""
        self.stop_covering()
        try:
            if not self.has_failed:
                self.sync()
                self.segments.sync_index()
                marker = AckedMarker(self.synced_max, self.synced_chain)
                self.write_slot(replace(self.slot, acked=marker, dirty=False))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files without any write, as if the process had crashed."""
        self.segments.close()
        self.slots.close()
