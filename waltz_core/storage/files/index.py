"""The two look-up files of a segment: ID to offset (`.idx`), and ID to batch (`.chn`).

Both files are arrays of entries of fixed size, which are only extended or truncated at their end.
Neither file is held in memory, however long the log is.

Rules:
    1. `.idx` is a cache: a wrong index is rebuilt from the records.
    2. `.chn` is not a cache: a batch's bounds, session and stamp are stored nowhere else. A `.chn`
       file has the batches whose last record is in the segment. Such a batch may begin in an
       earlier segment.
    3. Entries of one file follow one another without gaps.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, ChecksumMismatch, ReadFailed
from waltz_core.records.record import BEFORE_FIRST, Chain, LineageEntry, TransactionId
from waltz_core.storage.disk.file_system import Disk, File, overwrite
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    OFFSET_BYTES,
    SEGMENT_HEADER_BYTES,
    Bytes,
    LineageHeader,
    SegmentHeader,
    decode_entry,
    encode_entry,
    errors_with_path,
)

I64 = npt.NDArray[np.int64]
_BLOCK_ENTRIES: Final = 4096
_OFFSET_STRUCT: Final = struct.Struct(">q")
assert _OFFSET_STRUCT.size == OFFSET_BYTES


class OffsetIndex:
    """The offset of each record of a segment in its `.seg` file.

    Both files have the same header.
    """

    def __init__(self, file: File, header: SegmentHeader) -> None:
        self._file = file
        self._header = header
        self.count = max(0, (file.size() - SEGMENT_HEADER_BYTES) // OFFSET_BYTES)
        self.is_dirty = False  # whether this process has written to it since its last sync

    def read(self, position: int, count: int) -> I64:
        """Return up to `count` offsets, from the record at `position` in the segment on."""
        assert position >= 0
        count = max(0, min(count, self.count - position))
        data = self._file.pread(OFFSET_BYTES * count, _index_offset(position))
        return np.frombuffer(data[: len(data) // 8 * 8], dtype=">i8").astype(np.int64)

    def write(self, position: int, offsets: I64) -> None:
        """Write offsets from the record at `position` on, without a sync."""
        assert 0 <= position <= self.count
        if offsets.size:
            self.is_dirty = True
            self._file.pwrite([offsets.astype(">i8").tobytes()], _index_offset(position))
            self.count = max(self.count, position + int(offsets.size))

    def overwrite(self, position: int, offsets: I64) -> None:
        """Write offsets like `write`, over bytes that may be unreadable."""
        assert 0 <= position <= self.count
        if not offsets.size:
            return
        self.is_dirty = True
        overwrite(self._file, offsets.astype(">i8").tobytes(), _index_offset(position))
        self.count = max(self.count, position + int(offsets.size))
        with suppress(ReadFailed):
            if not any(self._file.pread(SEGMENT_HEADER_BYTES, 0)):  # its block was discarded
                self._file.pwrite([self._header.encode()], 0)

    def add(self, offset: int) -> None:
        """Write the offset of one more record, without the cost of arrays."""
        self.is_dirty = True
        self._file.pwrite([_OFFSET_STRUCT.pack(offset)], _index_offset(self.count))
        self.count += 1

    def try_read(self, position: int, count: int) -> I64:
        """Return offsets like `read`; return none if the disk cannot read them."""
        try:
            return self.read(position, count)
        except ReadFailed:
            return np.zeros(0, dtype=np.int64)

    def rewrite(self, position: int, offsets: I64) -> None:
        """Store these offsets from the record at `position` on.

        Write only if any of them differs.
        """
        try:
            is_valid = np.array_equal(self.read(position, int(offsets.size)), offsets)
        except ReadFailed:
            is_valid = False
        if not is_valid:
            self.overwrite(position, offsets)

    def truncate(self, count: int) -> None:
        """Keep the first `count` offsets, and remove the others."""
        self.is_dirty = self.is_dirty or count != self.count
        self._file.truncate(_index_offset(count))
        self.count = count

    def sync(self) -> None:
        """Make the index file durable."""
        self._file.sync()
        self.is_dirty = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _index_offset(position: int) -> int:
    return SEGMENT_HEADER_BYTES + OFFSET_BYTES * position


class LineageFile:
    """The batches that end in a segment, oldest first, and the chain hash before them."""

    def __init__(self, file: File, header: LineageHeader) -> None:
        self._file = file
        self._header = header
        self._segment_crc = header.segment_crc
        self.chain_before = header.chain_before
        entries_bytes = file.size() - LINEAGE_HEADER_BYTES
        self.count = max(0, entries_bytes // LINEAGE_ENTRY_BYTES)
        self._has_partial_entry = entries_bytes != LINEAGE_ENTRY_BYTES * self.count

    @classmethod
    def open(cls, disk: Disk, path: Path) -> "LineageFile":
        """Open a lineage file.

        Raises:
            BadFormat, ChecksumMismatch: its header is wrong.
        """
        file = disk.open(path)
        try:
            with errors_with_path(path):
                header = LineageHeader.decode(file.pread(LINEAGE_HEADER_BYTES, 0))
            return cls(file, header)
        except BaseException:
            file.close()
            raise

    @property
    def segment(self) -> SegmentHeader:
        """The header of the segment to which the file belongs."""
        return self._header.segment

    def entry(self, position: int) -> LineageEntry:
        """Return the entry at a position.

        Raises:
            BadFormat, ChecksumMismatch: its bytes are wrong.
        """
        assert 0 <= position < self.count
        return self._decode(
            self._file.pread(LINEAGE_ENTRY_BYTES, _entry_offset(position)), position
        )[0]

    def entries(self, position: int) -> Iterator[LineageEntry]:
        """Yield the entries, starting at a position, and read them block by block.

        Raises:
            BadFormat, ChecksumMismatch: the bytes of an entry are wrong.
        """
        while position < self.count:
            entry_count = min(_BLOCK_ENTRIES, self.count - position)
            data = memoryview(
                self._file.pread(LINEAGE_ENTRY_BYTES * entry_count, _entry_offset(position))
            )
            for number, start in enumerate(range(0, len(data), LINEAGE_ENTRY_BYTES), position):
                yield self._decode(data[start : start + LINEAGE_ENTRY_BYTES], number)[0]
            position += entry_count

    def position_of(self, transaction_id: TransactionId) -> int:
        """Return the position of the first batch that ends at or after an ID.

        Return `count` if there is no such batch.
        """
        low, high = 0, self.count
        while low < high:
            position = middle = (low + high) // 2
            entry = self._entry_or_none(position)
            while entry is None and (position := position + 1) < high:
                entry = self._entry_or_none(position)
            if entry is not None and entry.last < transaction_id:
                low = position + 1
            else:
                high = middle
        return low

    def _entry_or_none(self, position: int) -> LineageEntry | None:
        """Return the entry at a position; None if its bytes are wrong."""
        try:
            return self.entry(position)
        except (BadFormat, ChecksumMismatch):
            return None

    def _decode(self, data: Bytes, position: int) -> tuple[LineageEntry, TransactionId]:
        return decode_entry(data, segment_crc=self._segment_crc, position=position)

    def _encode(
        self, entries: Sequence[LineageEntry], synced: TransactionId, position: int
    ) -> list[bytes]:
        return [
            encode_entry(entry, synced, segment_crc=self._segment_crc, position=number)
            for number, entry in enumerate(entries, position)
        ]

    def trim_invalid(self) -> LineageEntry | None:
        """Remove invalid entries at the end, which torn or missing writes have left.

        Return the last valid entry; None if there is none.
        """
        position, end = self.count - 1, None
        while position >= 0 and (end := self._entry_or_none(position)) is None:
            position -= 1
        if position + 1 < self.count or self._has_partial_entry:
            self.truncate(position + 1)
        return end

    def unreadable_runs(self) -> list[tuple[int, int]]:
        """Return the runs low..high-1 of positions whose entries cannot be read.

        This reads all entries of the file.
        """
        runs: list[tuple[int, int]] = []
        for position in range(self.count):
            try:
                self.entry(position)
                continue
            except (BadFormat, ChecksumMismatch, ReadFailed):
                pass
            if runs and runs[-1][1] == position:
                runs[-1] = (runs[-1][0], position + 1)
            else:
                runs.append((position, position + 1))
        return runs

    def rewrite(self, position: int, entries: Sequence[LineageEntry]) -> None:
        """Overwrite the entries, starting at a position, durably."""
        assert position + len(entries) <= self.count
        parts = self._encode(entries, BEFORE_FIRST, position)
        if position:
            self._file.pwrite(parts, _entry_offset(position))
        else:  # with the header, because an unreadable block can only be written as a whole
            self._file.pwrite([self._header.encode(), *parts], 0)
        self._file.sync()

    def write_again(self, position: int) -> None:
        """Rewrite the existing entries, starting at a position, without a sync."""
        size = LINEAGE_ENTRY_BYTES * (self.count - position)
        if size:
            self._file.pwrite(
                [self._file.pread(size, _entry_offset(position))], _entry_offset(position)
            )

    def slice(self, low: int, high: int) -> list[LineageEntry]:
        """Return the entries at positions low..high-1."""
        return list(islice(self.entries(low), high - low))

    def rewrite_header(self, chain_before: Chain) -> None:
        """Replace the chain hash that precedes the first entry, durably; entries stay valid."""
        self._header = self._header._replace(chain_before=chain_before)
        self._file.pwrite([self._header.encode()], 0)
        self._file.sync()
        self.chain_before = chain_before

    def chain_at(self, position: int) -> Chain:
        """Return the chain hash before the entry at a position."""
        return self.entry(position - 1).chain if position else self.chain_before

    def durable_before(self, position: int) -> TransactionId:
        """Return the greatest synced ID in the entries at and after a position.

        Unreadable entries are skipped.
        """
        durable_before = BEFORE_FIRST
        for index in range(position, self.count):
            data = self._file.pread(LINEAGE_ENTRY_BYTES, _entry_offset(index))
            try:
                durable_before = max(durable_before, self._decode(data, index)[1])
            except (BadFormat, ChecksumMismatch):
                continue
        return durable_before

    def append(self, entries: Sequence[LineageEntry], synced: TransactionId) -> None:
        """Append entries without a sync. Each entry contains `synced`, the last durable ID."""
        if entries:
            parts = self._encode(entries, synced, self.count)
            self._file.pwrite(parts, _entry_offset(self.count))
            self.count += len(entries)

    def truncate(self, count: int) -> None:
        """Keep the first `count` entries, and remove the others."""
        self._file.truncate(_entry_offset(count))
        self.count = count
        self._has_partial_entry = False

    def sync(self) -> None:
        """Make the lineage file durable."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _entry_offset(position: int) -> int:
    return LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES * position
