"""Reads a partition's log: returns only verified records, and skips damaged records.

Reading changes nothing except the list of known damage and wrong index or batch entries (rule 3).
All reads of a log go through this file.

Rules:
    1. No record is returned that contradicts its own CRC, length or ID.
    2. Damage that a read finds is noted durably in the slot before the read continues.
    3. A wrong index or batch entry is repaired from its neighbors, once per read.
    4. A failed read of the disk is retried once. If it fails again, the bytes count as wrong, and
       rules 1 to 3 apply. Each error is kept until `take_disk_errors` is called.
    5. A reader on this machine may receive file positions instead of records. Such a reader does
       the checks of rule 1 itself, and requests wrong records again through the storage
       (`client/read/local_reader.py`).
    6. A read that looks for damage first drops the records from the page cache. The page cache may
       contain the right bytes although the bytes on the disk are wrong.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from waltz_core.errors import (
    BadFormat,
    BadRequest,
    BeforeLogStart,
    ChecksumMismatch,
    DiskFailed,
    ReadFailed,
)
from waltz_core.records import raw_records
from waltz_core.records.raw_records import RangeRead
from waltz_core.records.record import BEFORE_FIRST, Chain, LineageEntry, PartitionId, TransactionId
from waltz_core.storage.files.control_file import SlotFile
from waltz_core.storage.files.format import IdRange, Slot
from waltz_core.storage.files.id_ranges import add_damage
from waltz_core.storage.files.segments import Segments, first_invalid_record
from waltz_core.wire.record_locations import FileLocation

I64 = npt.NDArray[np.int64]
_ReadT = TypeVar("_ReadT")
READ_BYTES: Final = 8 * 1024 * 1024
# The maximum number of bytes that are read for one answer of headers. Large records have few
# headers in many bytes, and the partition does nothing else during the read.
HEADERS_READ_BYTES_MAX: Final = 4 * READ_BYTES
LINEAGE_ENTRIES_MAX: Final = 1 << 16
# The maximum number of records in one unreadable range. To find the end of the range, its records
# are read one by one.
_UNREADABLE_RUN_MAX: Final = 128
_ERRORS_KEPT_MAX: Final = 16
_REPAIRABLE_ERRORS: Final = (BadFormat, ChecksumMismatch, ReadFailed)


class HeadersRead(NamedTuple):
    """The 28-byte headers of `record_count` records from `first` on, with their batches."""

    first: TransactionId
    record_count: int
    headers: bytes
    entries: tuple[LineageEntry, ...]
    chain_before: Chain


class LocationsRead(NamedTuple):
    """The file positions of the records from `first` on, and the batches to which they belong."""

    first: TransactionId
    lengths: I64
    locations: tuple[FileLocation, ...]
    entries: tuple[LineageEntry, ...]


class LogReader:
    """Reads records, headers and batches of one partition."""

    def __init__(
        self,
        partition_id: PartitionId,
        segments: Segments,
        slots: SlotFile,
        write_slot: Callable[[Slot], None],
    ) -> None:
        self.partition_id = partition_id
        self._segments = segments
        self._slots = slots
        self._write_slot = write_slot
        self._errors: list[str] = []  # errors of the disk (rule 4)
        self.checked_bytes = 0  # bytes of records that were read and verified

    def take_disk_errors(self) -> list[str]:
        """Return the disk errors since the last call, and forget them."""
        errors, self._errors = self._errors, []
        return errors

    def read_range(
        self, first: TransactionId, last: TransactionId, bytes_max: int, *, whole_batches: bool
    ) -> RangeRead:
        """Return records of first..last up to `bytes_max`, but at least one record or batch.

        With `whole_batches`, `first` must begin a batch, and the result ends with a batch. The
        result ends before a damaged record.

        Raises:
            BeforeLogStart: the log does not contain `first` any more.
            BadRequest: the log does not have these records, or no batch begins at `first`.
            ChecksumMismatch: the record at `first` (or its batch) is damaged.
        """
        self._check_bounds(first, last)
        wrong_id = BEFORE_FIRST
        while True:
            self._reject_damaged(first, whole_batches=whole_batches)
            read = self._read_with_repair(
                first,
                last,
                lambda: self._read_range(first, last, bytes_max, whole_batches=whole_batches),
            )
            if isinstance(read, RangeRead):
                return read
            if isinstance(read, IdRange):
                self._note_damage((read,))
                continue
            # Either the index is wrong, and is repaired once, or the record is lost. Each round
            # notes damage that the next round skips.
            self._note_damage(
                self._segments.diagnose(read) if read != wrong_id else (IdRange(read, read),)
            )
            wrong_id = read

    def _read_with_repair(
        self, first: TransactionId, last: TransactionId, read: Callable[[], _ReadT]
    ) -> _ReadT:
        """Call `read`; if index or batches are wrong, repair them and call `read` once more."""
        try:
            return read()
        except ReadFailed as error:
            self._keep_error(error)
            with suppress(*_REPAIRABLE_ERRORS):
                return read()
        except (BadFormat, ChecksumMismatch):
            pass
        self._note_damage(self._segments.repair(first, last))
        return read()

    def _read_range(
        self, first: TransactionId, last: TransactionId, bytes_max: int, *, whole_batches: bool
    ) -> RangeRead | TransactionId | IdRange:
        """Read a range without a repair.

        If that fails, return the ID of the first wrong record, or the unreadable range.
        """
        end = self._segments.last_fitting_id(first, last, bytes_max)
        end = self._last_before_damage(first, end, whole_batches=whole_batches)
        try:
            records, lengths = self._segments.read(first, end)
        except ReadFailed as error:
            self._keep_error(error)
            unreadable = self._first_unreadable(first, end)
            if unreadable is not None:
                return unreadable
            records, lengths = self._segments.read(first, end)
        wrong_index = first_invalid_record(records, lengths, first)
        if wrong_index is not None:
            return TransactionId(first + wrong_index)
        chain_before, entries = self._segments.entries(first, end, LINEAGE_ENTRIES_MAX)
        self.checked_bytes += len(records)
        return RangeRead(first, lengths, records, entries, chain_before)

    def _first_unreadable(self, first: TransactionId, last: TransactionId) -> IdRange | None:
        """Return the first records of a range that the disk cannot read.

        Return None if the disk can read the complete range.
        """
        low, high = int(first), int(last)
        if self._is_readable(low, high):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._is_readable(low, middle):
                low = middle + 1
            else:
                high = middle
        end = low
        run_end = min(int(last), low + _UNREADABLE_RUN_MAX - 1)
        while end < run_end and not self._is_readable(end + 1, end + 1):
            end += 1
        return IdRange(TransactionId(low), TransactionId(end))

    def _is_readable(self, first: int, last: int) -> bool:
        try:
            self._segments.read(TransactionId(first), TransactionId(last))
        except ReadFailed:
            return False
        return True

    def _keep_error(self, error: ReadFailed) -> None:
        if len(self._errors) < _ERRORS_KEPT_MAX:
            self._errors.append(str(error))

    def verify(self, first: TransactionId, bytes_max: int) -> TransactionId:
        """Read records from the disk, starting at an ID, and note damage (rule 6).

        Return the ID from which the next call must continue.
        """
        first = max(first, TransactionId(self._segments.start.transaction_id + 1))
        last = self._segments.last_id
        if first > last:
            return first  # a log that has removed or dropped all records is empty
        # This is only a hint. The read itself finds wrong bytes.
        with suppress(DiskFailed, *_REPAIRABLE_ERRORS):
            self._segments.drop_cached(
                first, self._segments.last_fitting_id(first, last, bytes_max)
            )
        try:
            read = self.read_range(first, last, bytes_max, whole_batches=False)
        except ChecksumMismatch:
            for ids in self._slots.slot.damaged:
                if ids.first <= first <= ids.last:
                    return TransactionId(ids.last + 1)
            raise
        return TransactionId(first + int(read.lengths.size))

    def _check_bounds(self, first: TransactionId, last: TransactionId) -> None:
        start = self._segments.start.transaction_id
        if 0 <= first <= start:
            raise BeforeLogStart(
                f"partition {self.partition_id}: transactions {first}..{last} were requested, "
                f"but the log of this storage begins at {start + 1}",
                start + 1,
            )
        if not start < first <= last <= self._segments.last_id:
            raise BadRequest(
                f"partition {self.partition_id}: transactions {first}..{last} were requested, "
                f"but the log of this storage ends at {self._segments.last_id}"
            )

    def byte_count(self, first: TransactionId, last: TransactionId) -> int:
        """Return the number of bytes of the records first..last."""
        return self._segments.byte_count(first, last)

    def segment_end(self, transaction_id: TransactionId) -> TransactionId:
        """Return the last ID of the segment that contains an ID."""
        return self._segments.segment_end(transaction_id)

    def _reject_damaged(self, first: TransactionId, *, whole_batches: bool) -> None:
        last = first
        if whole_batches:
            entry = self._read_with_repair(first, first, lambda: self._segments.entry_of(first))
            if entry is None or entry.first != first:
                found_text = "none" if entry is None else f"batch {entry.first}..{entry.last}"
                raise BadRequest(
                    f"partition {self.partition_id}: expected a batch that begins at "
                    f"transaction {first}, found {found_text}"
                )
            last = entry.last
        for damaged in self._slots.slot.damaged:
            if damaged.first <= last and first <= damaged.last:
                raise ChecksumMismatch(
                    f"partition {self.partition_id}: records {damaged.first}..{damaged.last} "
                    "are damaged"
                )

    def _last_before_damage(
        self, first: TransactionId, last: TransactionId, *, whole_batches: bool
    ) -> TransactionId:
        """Return the last ID to read: before any damage, and at a batch's end if requested."""
        end_id = last + 1
        for damaged in self._slots.slot.damaged:
            if first < damaged.first < end_id:
                end_id = damaged.first
        if whole_batches and end_id <= self._segments.last_id:
            entry, entry_at_end = (
                self._segments.entry_of(first),
                self._segments.entry_of(TransactionId(end_id)),
            )
            assert entry is not None
            assert entry_at_end is not None
            end_id = max(entry.last + 1, entry_at_end.first)
        return TransactionId(end_id - 1)

    def read_headers(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> HeadersRead:
        """Return the 28-byte headers of first..last up to `bytes_max`, but at least one header.

        If the records are large, fewer headers are returned.

        Raises:
            BeforeLogStart, BadRequest, ChecksumMismatch: as for `read_range`.
        """
        last = min(last, TransactionId(first + max(1, bytes_max // 28) - 1))
        parts: list[bytes] = []
        next_id, read_bytes = first, 0
        while next_id <= last and read_bytes < HEADERS_READ_BYTES_MAX:
            try:
                read = self.read_range(next_id, last, READ_BYTES, whole_batches=False)
            except ChecksumMismatch:
                if not parts:
                    raise
                break
            parts.append(raw_records.headers_of(read.records, read.lengths))
            next_id = TransactionId(next_id + int(read.lengths.size))
            read_bytes += len(read.records)
        chain_before, entries = self.lineage(first, TransactionId(next_id - 1))
        return HeadersRead(first, next_id - first, b"".join(parts), entries, chain_before)

    def locations(self, first: TransactionId, last: TransactionId, bytes_max: int) -> LocationsRead:
        """Return the file positions of records of first..last up to `bytes_max`, but at least one.

        This method does not read the records. The result ends before known damage.

        Raises:
            BeforeLogStart, BadRequest, ChecksumMismatch: as for `read_range`.
        """
        self._check_bounds(first, last)
        self._reject_damaged(first, whole_batches=False)
        return self._read_with_repair(first, last, lambda: self._locations(first, last, bytes_max))

    def _locations(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> LocationsRead:
        # The records cannot have more batches than IDs, so no batch is omitted.
        last = min(last, TransactionId(first + LINEAGE_ENTRIES_MAX - 1))
        end = self._segments.last_fitting_id(first, last, bytes_max)
        end = self._last_before_damage(first, end, whole_batches=False)
        _, entries = self._segments.entries(first, end, LINEAGE_ENTRIES_MAX)
        locations, lengths = self._segments.locations(first, end)
        return LocationsRead(first, lengths, tuple(locations), entries)

    def lineage(
        self, first: TransactionId, last: TransactionId
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that overlap first..last, and the chain hash before them.

        If there are too many batches, the newest are returned. Batches at or below the start are
        omitted.

        Raises:
            BeforeLogStart: the log contains no ID of the range any more.
            BadFormat, ChecksumMismatch: an entry is wrong.
        """
        start = self._segments.start.transaction_id
        if 0 <= last <= start:
            self._check_bounds(first, last)
        first = max(first, TransactionId(start + 1))
        return self._read_with_repair(
            first, last, lambda: self._segments.entries(first, last, LINEAGE_ENTRIES_MAX)
        )

    def _note_damage(self, new_damage: Sequence[IdRange]) -> None:
        slot = self._slots.slot
        damaged = slot.damaged
        for ids in new_damage:
            damaged = add_damage(damaged, ids)
        if damaged != slot.damaged:
            self._write_slot(replace(slot, damaged=damaged))
