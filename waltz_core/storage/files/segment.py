"""One segment: records back to back in a `.seg` file, with its `.idx` and `.chn`.

This file implements the layout of records in one segment, and distinguishes a torn tail from
damage. It does not depend on sessions, marks or other segments.

Rules:
    1. A segment exists when its `.seg` file has its final name. `.idx` and `.chn` receive their
       final names before `.seg`.
    2. Records of a segment have the IDs first..next_id-1; `.seg` ends with its last record.
    3. If bytes are not a record, and these bytes or later bytes are known to have been synced, the
       bytes are damage, and stay. All other bytes that are not a record are a torn tail
       (docs/design/correctness.md 2.5). The acked marker, a later segment and the entry of a later
       batch show which bytes were synced. A valid record does not show that the bytes before it
       were synced, because a crash may leave any sectors of unsynced data on the disk.
    4. Damaged records keep their offsets in the index, so that a repair can write the records to
       the same place. To find the end of damage, the search uses the index first
       (`record_search.py`).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, ChecksumMismatch, MissingSegment, ReadFailed
from waltz_core.records.raw_records import ONE_BY_ONE_MAX, lengths_between, offsets_of
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    Chain,
    LineageEntry,
    PartitionId,
    TransactionId,
)
from waltz_core.storage.disk.file_system import Disk, File, create_durably, overwrite
from waltz_core.storage.files.format import (
    SEGMENT_HEADER_BYTES,
    IdRange,
    LineageHeader,
    SegmentHeader,
    errors_with_path,
    segment_name,
)
from waltz_core.storage.files.index import LineageFile, OffsetIndex
from waltz_core.storage.files.record_search import (
    SCAN_BYTES,
    HoleSearch,
    PartlyReadableFile,
    SearchedFile,
    record_end,
    scan,
)

# The maximum number of records in a file of 4 GiB. If more records are missing, whole files are
# missing, and the gap must not be treated as a hole.
HOLE_IDS_MAX = (4 << 30) // RECORD_OVERHEAD_BYTES
_HOLE_PIECE_IDS = 1 << 16  # the IDs of a hole that are in memory at once
I64 = npt.NDArray[np.int64]
Buffer = bytes | memoryview


class SegmentRecovery(NamedTuple):
    """The result of `Segment.recover`.

    `damaged` has the ranges of unreadable IDs. `has_lost_ids` states that IDs are missing although
    they are known to have been synced.
    """

    damaged: tuple[IdRange, ...]
    has_lost_ids: bool


class Segment:
    """The files of one segment, which are opened when they are first needed."""

    def __init__(self, disk: Disk, directory: Path, header: SegmentHeader) -> None:
        self.first = header.first
        self.next_id = header.first
        self.size_bytes = SEGMENT_HEADER_BYTES
        self._header = header
        self._disk = disk
        self._directory = directory
        self._paths: dict[str, Path] = {}  # by suffix
        self._files: tuple[File, OffsetIndex, LineageFile] | None = None
        self._records_dirty = False
        self._lineage_dirty = False

    @classmethod
    def create(
        cls, disk: Disk, directory: Path, header: SegmentHeader, chain_before: Chain
    ) -> "Segment":
        """Create an empty segment, durably (rule 1)."""
        create_durably(disk, directory, cls.new_files(header, chain_before))
        return cls(disk, directory, header)

    @staticmethod
    def new_files(header: SegmentHeader, chain_before: Chain) -> list[tuple[str, bytes]]:
        """Return the names and contents of the files of an empty segment, `.seg` last (rule 1)."""
        header_bytes, first = header.encode(), header.first
        return [
            (segment_name(first, ".idx"), header_bytes),
            (segment_name(first, ".chn"), LineageHeader(header, chain_before).encode()),
            (segment_name(first, ".seg"), header_bytes),
        ]

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        first: TransactionId,
        *,
        partition_id: PartitionId,
        cluster_key: bytes,
        lineage: LineageFile | None = None,
    ) -> "Segment":
        """Open a segment; if its `.idx` file is missing, create an empty one.

        `lineage` is its `.chn` file if this file is open already.

        Raises:
            BadFormat, ChecksumMismatch: a header is wrong, or belongs to another partition or
                cluster.
        """
        path = directory / segment_name(first, ".seg")
        with ExitStack() as opened:
            if lineage is not None:
                opened.callback(lineage.close)
            file = disk.open(path)
            opened.callback(file.close)
            with errors_with_path(path):
                header = SegmentHeader.decode(file.pread(SEGMENT_HEADER_BYTES, 0))
            if header[1:] != (cluster_key, partition_id, first):
                raise BadFormat(
                    f"{path}: expected a segment of partition {partition_id} from "
                    f"transaction {first} on, of cluster {cluster_key.hex()}; found partition "
                    f"{header.partition_id} from {header.first} on, of cluster "
                    f"{header.cluster_key.hex()}"
                )
            segment = cls(disk, directory, header)
            segment.size_bytes = file.size()
            index = OffsetIndex(segment._open_index(), header)
            opened.callback(index.close)
            segment.next_id = TransactionId(first + index.count)
            segment._files = (file, index, lineage or segment._open_lineage())
            opened.pop_all()
        return segment

    # ---- files

    def _open_files(self) -> tuple[File, OffsetIndex, LineageFile]:
        if self._files is None:
            with ExitStack() as opened:
                index = OffsetIndex(self._disk.open(self._path(".idx")), self._header)
                opened.callback(index.close)
                lineage = self._open_lineage()
                opened.callback(lineage.close)
                self._files = (self._disk.open(self._path(".seg")), index, lineage)
                opened.pop_all()
        return self._files

    def _open_lineage(self) -> LineageFile:
        lineage = LineageFile.open(self._disk, self._path(".chn"))
        if lineage.segment[1:] != self._header[1:]:
            lineage.close()
            raise BadFormat(f"{self._path('.chn')} belongs to another segment")
        return lineage

    def _open_index(self) -> File:
        """Open the `.idx` file; create an empty one if it is missing or belongs to another segment.

        If only the first block of the file is lost, the other blocks are kept: they may have
        offsets of damaged records.
        """
        path = self._path(".idx")
        if self._disk.exists(path):
            file = self._disk.open(path)
            try:
                if self._has_header(file):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()
        create_durably(self._disk, self._directory, [(path.name, self._header.encode())])
        return self._disk.open(path)

    def _has_header(self, file: File) -> bool:
        """Return whether the file belongs to this segment.

        If the header was in a lost block, it is written again.
        """
        try:
            header_bytes = file.pread(SEGMENT_HEADER_BYTES, 0)
        except ReadFailed:
            file.discard_unreadable(0, SEGMENT_HEADER_BYTES)
            header_bytes = file.pread(SEGMENT_HEADER_BYTES, 0)
        if len(header_bytes) == SEGMENT_HEADER_BYTES and not any(header_bytes):
            file.pwrite([self._header.encode()], 0)
            file.sync()
            return True
        try:
            return SegmentHeader.decode(header_bytes)[1:] == self._header[1:]
        except BadFormat:
            return False

    def _path(self, suffix: str) -> Path:
        path = self._paths.get(suffix)
        if path is None:
            path = self._paths[suffix] = self._directory / segment_name(self.first, suffix)
        return path

    @property
    def index(self) -> OffsetIndex:
        """The index: the offsets of the records."""
        return self._open_files()[1]

    @property
    def lineage(self) -> LineageFile:
        """The batches that end in this segment."""
        return self._open_files()[2]

    @property
    def last(self) -> TransactionId:
        """The ID of the last record; one below `first` if there is no record."""
        return TransactionId(self.next_id - 1)

    @property
    def is_dirty(self) -> bool:
        """Whether there are unsynced records or batches."""
        return self._records_dirty or self._lineage_dirty

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        if self._files is not None:
            (file, index, lineage), self._files = self._files, None
            try:
                file.close()
            finally:
                try:
                    index.close()
                finally:
                    lineage.close()

    def forget(self) -> None:
        """Never sync these files again: after a failed sync, another sync would wrongly succeed."""
        self._records_dirty = self._lineage_dirty = False
        self.close()

    def copy_index(self, synced: TransactionId) -> None:
        """Write the index to a new file, durably, because a sync of the old file may have failed.

        The old index was synced up to the ID `synced`. The offsets after this ID are computed from
        the records, because the system may have dropped index pages that a failed sync has not
        written.
        """
        file, index, _ = self._open_files()
        count = self.next_id - self.first
        known_offsets = index.read(0, count)
        offsets = np.pad(known_offsets, (0, count - known_offsets.size))
        start_id, offset = self._start_of(synced, PartlyReadableFile(file))
        starts, _ = scan(
            PartlyReadableFile(file), offset, start_id, size=self.size_bytes, stop_id=self.next_id
        )
        position = start_id - self.first
        offsets[position : position + starts.size] = starts
        content = self._header.encode() + offsets.astype(">i8").tobytes()
        self.close()
        create_durably(self._disk, self._directory, [(segment_name(self.first, ".idx"), content)])

    def rewrite_lineage_header(self, chain_before: Chain) -> None:
        """Replace the chain hash that precedes the first batch, durably."""
        self.lineage.rewrite_header(chain_before)

    def remove(self) -> None:
        """Remove the files, `.seg` first and durably; an opening removes leftovers (rule 1)."""
        self.close()
        self._disk.unlink(self._path(".seg"))
        self._disk.sync_directory(self._directory)
        for suffix in (".chn", ".idx"):
            self._disk.unlink(self._path(suffix))

    # ---- writing

    def append(self, lengths: I64, records: Buffer) -> None:
        """Write records after the last record, without a sync."""
        file, index, _ = self._open_files()
        self._records_dirty = True
        file.pwrite([records], self.size_bytes)
        count = int(lengths.size)
        if count == 1 and index.count == self.next_id - self.first:
            index.add(self.size_bytes)
        else:
            index.write(self.next_id - self.first, lengths.cumsum() - lengths + self.size_bytes)
        self.size_bytes += len(records)
        self.next_id = TransactionId(self.next_id + count)

    def append_entries(self, entries: Sequence[LineageEntry], synced: TransactionId) -> None:
        """Append entries of batches without a sync; each contains `synced`, the last durable ID."""
        if entries:
            self._lineage_dirty = True
            self.lineage.append(entries, synced)

    def sync(self) -> int:
        """Make records and batches durable; return the number of syncs."""
        file, _, lineage = self._open_files()
        count = 0
        if self._records_dirty:
            file.sync()
            count += 1
            self._records_dirty = False
        if self._lineage_dirty:
            lineage.sync()
            count += 1
            self._lineage_dirty = False
        return count

    def sync_index(self) -> None:
        """Make the index durable, if it has changed."""
        if self.index.is_dirty:
            self.index.sync()

    def truncate(self, last_to_keep: TransactionId) -> None:
        """Remove records and batches after an ID, without a sync.

        If the truncation shortens a batch, the entry of this batch is removed; the caller must add
        an entry for the rest of the batch.
        """
        file, index, lineage = self._open_files()
        kept_count = max(0, last_to_keep - self.first + 1)
        if kept_count < self.next_id - self.first:
            self.size_bytes = int(self.bounds(self.first + kept_count, self.first + kept_count)[0])
            self.next_id = TransactionId(self.first + kept_count)
        self._records_dirty = True
        self._lineage_dirty = True
        file.truncate(self.size_bytes)
        index.truncate(self.next_id - self.first)
        position = lineage.position_of(TransactionId(last_to_keep + 1))
        lineage.truncate(position)

    def fill(self, lengths: I64, records: Buffer, hole: IdRange) -> None:
        """Write the first records of a hole, durably.

        A hole at the end of the segment may have any size in bytes.

        Raises:
            BadFormat: the hole has more or fewer bytes than the records.
        """
        file, index, _ = self._open_files()
        offsets = self.bounds(hole.first, hole.last)
        count = int(lengths.size)
        start, end = int(offsets[0]), int(offsets[-1])
        filled_end = start + len(records)
        fills_hole = count == hole.last - hole.first + 1
        is_at_end = hole.last == self.last
        if not is_at_end and (filled_end > end or (fills_hole and filled_end < end)):
            at_most = "" if fills_hole else "at most "
            raise BadFormat(
                f"damaged records {hole.first}..{hole.last}: expected a replacement of {at_most}"
                f"{end - start} bytes, found {len(records)} bytes in {count} records"
            )
        if is_at_end:
            self.size_bytes = filled_end if fills_hole else max(filled_end, end)
            file.truncate(self.size_bytes)
        overwrite(file, records, start)
        if not any(file.pread(SEGMENT_HEADER_BYTES, 0)):  # its block was discarded
            file.pwrite([self._header.encode()], 0)
        starts = offsets_of(lengths) + start
        position = hole.first - self.first
        index.overwrite(position, starts[:-1])
        if not fills_hole and int(offsets[count]) != filled_end:
            # The rest of the hole begins at another offset than the index states.
            index.overwrite(
                position + count, np.full(offsets.size - 1 - count, filled_end, dtype=np.int64)
            )
        file.sync()
        index.sync()

    def write_again(
        self,
        first: TransactionId,
        *,
        index_rewrite_first: TransactionId | None = None,
        syncs_all: bool = True,
    ) -> None:
        """Rewrite all bytes, starting at an ID, and sync them.

        A sync alone is not enough: the page cache may treat lost pages as clean. If
        `index_rewrite_first` is lower than `first`, the index is rewritten from
        `index_rewrite_first` on, because a sync of the index may have failed separately. If
        `syncs_all` is False, records and index were synced earlier, and are synced again only if
        the opening has changed them.
        """
        file, index, lineage = self._open_files()
        if first < self.next_id:
            start = int(self.bounds(first, first)[0])
            for offset in range(start, self.size_bytes, SCAN_BYTES):
                file.pwrite([file.pread(min(SCAN_BYTES, self.size_bytes - offset), offset)], offset)
        index_rewrite_first = (
            first if index_rewrite_first is None else min(first, index_rewrite_first)
        )
        if index_rewrite_first < self.next_id:
            position = index_rewrite_first - self.first
            index.write(position, index.read(position, self.next_id - index_rewrite_first))
        lineage.write_again(lineage.position_of(first))
        if syncs_all or self._records_dirty:
            file.sync()
        if syncs_all or index.is_dirty:
            index.sync()
        lineage.sync()
        self._records_dirty = self._lineage_dirty = False

    # ---- reading

    def bounds(self, first: int, last: int) -> I64:
        """Return the offsets of the records first..last, and the end of the last record."""
        assert self.first <= first
        count = last - first + 1
        position = first - self.first
        offsets = self.index.read(position, min(count + 1, self.next_id - first))
        if first + offsets.size == self.next_id and offsets.size <= count:
            offsets = np.append(offsets, self.size_bytes)
        if (
            offsets.size != count + 1
            or offsets[0] < SEGMENT_HEADER_BYTES
            or offsets[-1] > self.size_bytes
            or not _is_ascending(offsets)
        ):
            raise ChecksumMismatch(
                f"{self._path('.idx')}: the index is wrong from record {first} on"
            )
        return offsets

    def read(self, first: TransactionId, last: TransactionId) -> tuple[bytes, I64]:
        """Return the bytes of records first..last, unchecked, and their lengths."""
        offsets = self.bounds(first, last)
        size = int(offsets[-1] - offsets[0])
        data = self._open_files()[0].pread(size, int(offsets[0]))
        # Missing bytes read as zeros, which are not records: the caller's check finds them.
        return data.ljust(size, b"\0"), lengths_between(offsets)

    def drop_cached(self, first: TransactionId, last: TransactionId) -> None:
        """Drop the bytes of first..last from the page cache, so that reads go to the disk."""
        offsets = self.bounds(first, last)
        start = 0 if first == self.first else int(offsets[0])  # including the header's block
        self._open_files()[0].drop_cached(start, int(offsets[-1]) - start)

    # ---- after a crash

    def is_plausible(self) -> bool:
        """Return whether the index and the size of `.seg` agree on the end of the last record.

        Return False if the disk cannot read one of them. Only older segments are checked.
        """
        if self.next_id == self.first:
            return self.size_bytes == SEGMENT_HEADER_BYTES
        file, index, _ = self._open_files()
        start = index.try_read(self.last - self.first, 1)
        if not start.size:
            return False
        end = record_end(PartlyReadableFile(file), int(start[0]), self.last, self.size_bytes)
        return end == self.size_bytes

    def _start_of(
        self, transaction_id: TransactionId, reader: SearchedFile
    ) -> tuple[TransactionId, int]:
        """Return the ID and the offset of the record with which a scan must begin.

        This is the record of the given ID. If the index is wrong there, the scan begins with the
        segment's first record.
        """
        if self.first < transaction_id < self.next_id:
            start = self.index.try_read(transaction_id - self.first, 1)
            if start.size and record_end(reader, int(start[0]), transaction_id, self.size_bytes):
                return transaction_id, int(start[0])
        return self.first, SEGMENT_HEADER_BYTES

    def has_correct_index(self, transaction_id: TransactionId) -> bool:
        """Return whether the index and the record of an ID agree on the record's bounds."""
        start, end = self.bounds(transaction_id, transaction_id).tolist()
        file = self._open_files()[0]
        return bool(record_end(file, start, transaction_id, self.size_bytes) == end)

    def recover(
        self, start_id: TransactionId, last_synced: TransactionId, *, is_last: bool
    ) -> SegmentRecovery:
        """Read records from `start_id` on, repair the index, and truncate a torn tail (rule 3).

        `last_synced` is the last ID that is known to have been synced. In the last segment, the
        acked marker or a batch entry states this ID. In the other segments, this ID is the last one
        before the next segment. Raises MissingSegment if more records are missing than fit into one
        file.
        """
        file, index, _ = self._open_files()
        file_size = file.size()
        # The tail of the last segment may be truncated. A failed read does not prove that the tail
        # is torn, so a failed read raises an error.
        reader = file if is_last else PartlyReadableFile(file)
        start_id, offset = self._start_of(start_id, reader)
        stop_id = None if is_last else TransactionId(last_synced + 1)
        damaged: list[IdRange] = []
        has_lost_ids = False
        next_id = start_id
        search = HoleSearch(reader, index, self.first, last=TransactionId(last_synced + 1))
        while True:
            starts, offset = scan(reader, offset, next_id, size=file_size, stop_id=stop_id)
            self._repair(next_id, starts)
            next_id = TransactionId(next_id + int(starts.size))
            if next_id > last_synced:
                break  # no byte after `last_synced` was synced, so all of them count as torn
            next_record = search.record_after(next_id, offset, file_size)
            if next_record is not None:
                hole = IdRange(next_id, TransactionId(next_record[0] - 1))
                damaged.append(self._index_hole(hole, offset, next_record[1]))
                next_id, offset = next_record
                continue
            if is_last and (offset == file_size or not self._has_index_of(last_synced, file_size)):
                has_lost_ids = True
                break
            damaged.append(self._index_hole(IdRange(next_id, last_synced), offset, file_size))
            next_id, offset = TransactionId(last_synced + 1), file_size
            break
        self.next_id, self.size_bytes = next_id, offset
        index.truncate(next_id - self.first)
        if offset < file_size and (is_last or not damaged):  # otherwise the bytes may be records
            file.truncate(offset)
            self._records_dirty = True
        if not is_last:
            # Later steps may truncate more of the last segment; `write_again` makes the result
            # durable.
            file.sync()
            index.sync()
            self._records_dirty = False
        return SegmentRecovery(tuple(damaged), has_lost_ids)

    def _repair(self, first: TransactionId, starts: I64) -> None:
        self.index.rewrite(first - self.first, starts)

    def _index_hole(self, hole: IdRange, offset: int, end: int) -> IdRange:
        """Write the IDs of a hole to the index, and return the hole.

        Each ID keeps its offset in the old index. If the old offsets are not plausible, all IDs get
        the offset at which the hole begins. Raises MissingSegment if one file cannot have had so
        many records.
        """
        position, count = hole.first - self.first, hole.last - hole.first + 1
        if count > HOLE_IDS_MAX:
            raise MissingSegment(
                f"{self._path('.seg')}: found no records with IDs {hole.first} to "
                f"{hole.last}: expected at most {HOLE_IDS_MAX} consecutive missing records"
            )
        pieces = [
            (piece_position, min(_HOLE_PIECE_IDS, position + count - piece_position))
            for piece_position in range(position, position + count, _HOLE_PIECE_IDS)
        ]
        is_known = self._has_index_of_hole(pieces, offset, end)
        for piece_position, size in pieces:
            starts = (
                self.index.try_read(piece_position, size)
                if is_known
                else np.full(size, offset, np.int64)
            )
            self.index.overwrite(piece_position, starts)
        return hole

    def _has_index_of_hole(self, pieces: Sequence[tuple[int, int]], offset: int, end: int) -> bool:
        """Whether the index has ascending offsets for a hole from `offset` to `end`."""
        previous_offset = offset - 1
        for piece_position, size in pieces:
            starts = self.index.try_read(piece_position, size)
            is_rising = starts.size == size and previous_offset < starts[0]
            # Compare instead of subtracting: the difference may not fit into 64 bits.
            if not is_rising or not (starts[1:] > starts[:-1]).all():
                return False
            if previous_offset == offset - 1 and starts[0] != offset:
                return False
            previous_offset = int(starts[-1])
        return previous_offset < max(end, offset + 1)

    def _has_index_of(self, transaction_id: TransactionId, file_size: int) -> bool:
        start = self.index.read(transaction_id - self.first, 1)
        return bool(start.size and start[0] < file_size)


def _is_ascending(offsets: I64) -> bool:
    if offsets.size <= ONE_BY_ONE_MAX:
        values = offsets.tolist()
        return bool(values == sorted(values))  # for few values, a third of the time of arrays
    return not bool((offsets[1:] < offsets[:-1]).any())
