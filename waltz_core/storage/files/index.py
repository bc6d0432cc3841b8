"""Two lookups of a segment: ID to offset (`.idx`), and ID to batch (`.chn`).

Both are arrays of fixed entries on disk that are only extended or truncated at their end. Neither
is held in memory, however long the log is.

Rules:
    1. `.idx` is a cache: it can be rebuilt from the records, and is if it is wrong.
    2. `.chn` is not: a batch's bounds, session and stamp are stored nowhere else. It holds the
       batches whose last record is in the segment; such a batch may begin in an earlier segment.
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
from waltz_core.storage.disk.file_system import Disk, File, write_over
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
    of_file,
)

I64 = npt.NDArray[np.int64]
_BLOCK_ENTRIES: Final = 4096
_OFFSET: Final = struct.Struct(">q")
assert _OFFSET.size == OFFSET_BYTES


class OffsetIndex:
    """Where each record of a segment starts in its `.seg` file; `header` is that of both files."""

    def __init__(self, file: File, header: SegmentHeader) -> None:
        self._file = file
        self._header = header
        self.count = max(0, (file.size() - SEGMENT_HEADER_BYTES) // OFFSET_BYTES)
        self.is_dirty = False  # written to, by this process, since its last sync

    def read(self, place: int, count: int) -> I64:
        """Return up to `count` offsets from the record at `place` in the segment on."""
        assert place >= 0
        count = max(0, min(count, self.count - place))
        data = self._file.pread(OFFSET_BYTES * count, _offset_place(place))
        return np.frombuffer(data[: len(data) // 8 * 8], dtype=">i8").astype(np.int64)

    def write(self, place: int, offsets: I64) -> None:
        """Write offsets from the record at `place` on; not durable."""
        assert 0 <= place <= self.count
        if offsets.size:
            self.is_dirty = True
            self._file.pwrite([offsets.astype(">i8").tobytes()], _offset_place(place))
            self.count = max(self.count, place + int(offsets.size))

    def write_over(self, place: int, offsets: I64) -> None:
        """Write offsets as `write` does, over some that may be unreadable."""
        assert 0 <= place <= self.count
        if not offsets.size:
            return
        self.is_dirty = True
        write_over(self._file, offsets.astype(">i8").tobytes(), _offset_place(place))
        self.count = max(self.count, place + int(offsets.size))
        with suppress(ReadFailed):
            if not any(self._file.pread(SEGMENT_HEADER_BYTES, 0)):  # its block was abandoned
                self._file.pwrite([self._header.encode()], 0)

    def add(self, offset: int) -> None:
        """Write the offset of one more record: for one, arrays cost more than they save."""
        self.is_dirty = True
        self._file.pwrite([_OFFSET.pack(offset)], _offset_place(self.count))
        self.count += 1

    def known(self, place: int, count: int) -> I64:
        """Return offsets as `read` does; none if the disk cannot read them."""
        try:
            return self.read(place, count)
        except ReadFailed:
            return np.zeros(0, dtype=np.int64)

    def rewrite(self, place: int, offsets: I64) -> None:
        """Store these offsets from the record at `place` on; write only if any differs."""
        try:
            is_right = np.array_equal(self.read(place, int(offsets.size)), offsets)
        except ReadFailed:
            is_right = False
        if not is_right:
            self.write_over(place, offsets)

    def truncate(self, count: int) -> None:
        """Keep the first `count` offsets."""
        self.is_dirty = self.is_dirty or count != self.count
        self._file.truncate(_offset_place(count))
        self.count = count

    def sync(self) -> None:
        """Make the file durable."""
        self._file.sync()
        self.is_dirty = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _offset_place(place: int) -> int:
    return SEGMENT_HEADER_BYTES + OFFSET_BYTES * place


class LineageFile:
    """The batches that end in a segment, oldest first; `chain_before` is the chain before them."""

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
        """Open a file.

        Raises:
            BadFormat, ChecksumMismatch: its header is wrong.
        """
        file = disk.open(path)
        try:
            with of_file(path):
                header = LineageHeader.decode(file.pread(LINEAGE_HEADER_BYTES, 0))
            return cls(file, header)
        except BaseException:
            file.close()
            raise

    @property
    def segment(self) -> SegmentHeader:
        """The header of the segment that it belongs to."""
        return self._header.segment

    def entry(self, place: int) -> LineageEntry:
        """Return one entry.

        Raises:
            BadFormat, ChecksumMismatch: its bytes are wrong.
        """
        assert 0 <= place < self.count
        return self._decoded(self._file.pread(LINEAGE_ENTRY_BYTES, _entry_place(place)), place)[0]

    def entries(self, place: int) -> Iterator[LineageEntry]:
        """Return the entries from a place on, read block by block.

        Raises:
            BadFormat, ChecksumMismatch: the bytes of one are wrong.
        """
        while place < self.count:
            wanted = min(_BLOCK_ENTRIES, self.count - place)
            data = memoryview(self._file.pread(LINEAGE_ENTRY_BYTES * wanted, _entry_place(place)))
            for number, start in enumerate(range(0, len(data), LINEAGE_ENTRY_BYTES), place):
                yield self._decoded(data[start : start + LINEAGE_ENTRY_BYTES], number)[0]
            place += wanted

    def place_of(self, transaction_id: TransactionId) -> int:
        """Return the place of the first batch that ends at or after an ID; `count` if none does."""
        low, high = 0, self.count
        while low < high:
            place = middle = (low + high) // 2
            entry = self._readable(place)
            while entry is None and (place := place + 1) < high:
                entry = self._readable(place)
            if entry is not None and entry.last < transaction_id:
                low = place + 1
            else:
                high = middle
        return low

    def _readable(self, place: int) -> LineageEntry | None:
        """Return the entry at a place; None where its bytes are wrong."""
        try:
            return self.entry(place)
        except (BadFormat, ChecksumMismatch):
            return None

    def _decoded(self, data: Bytes, place: int) -> tuple[LineageEntry, TransactionId]:
        return decode_entry(data, segment_crc=self._segment_crc, place=place)

    def _encoded(
        self, entries: Sequence[LineageEntry], synced: TransactionId, place: int
    ) -> list[bytes]:
        return [
            encode_entry(entry, synced, segment_crc=self._segment_crc, place=number)
            for number, entry in enumerate(entries, place)
        ]

    def trim(self) -> LineageEntry | None:
        """Drop invalid entries at the end (of a torn or missing write); return the last one."""
        place, end = self.count - 1, None
        while place >= 0 and (end := self._readable(place)) is None:
            place -= 1
        if place + 1 < self.count or self._has_partial_entry:
            self.truncate(place + 1)
        return end

    def unreadable(self) -> list[tuple[int, int]]:
        """Return the runs of places low..high-1 whose entries cannot be read; reads all of them."""
        runs: list[tuple[int, int]] = []
        for place in range(self.count):
            try:
                self.entry(place)
                continue
            except (BadFormat, ChecksumMismatch, ReadFailed):
                pass
            if runs and runs[-1][1] == place:
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
        return runs

    def rewrite(self, place: int, entries: Sequence[LineageEntry]) -> None:
        """Write entries over those from a place on, durably."""
        assert place + len(entries) <= self.count
        parts = self._encoded(entries, BEFORE_FIRST, place)
        if place:
            self._file.pwrite(parts, _entry_place(place))
        else:  # with the header: a lost block can only be written as a whole
            self._file.pwrite([self._header.encode(), *parts], 0)
        self._file.sync()

    def write_again(self, place: int) -> None:
        """Write the entries from a place on as they are; not durable."""
        size = LINEAGE_ENTRY_BYTES * (self.count - place)
        if size:
            self._file.pwrite([self._file.pread(size, _entry_place(place))], _entry_place(place))

    def slice(self, low: int, high: int) -> list[LineageEntry]:
        """Return the entries of places low..high-1."""
        return list(islice(self.entries(low), high - low))

    def rewrite_header(self, chain_before: Chain) -> None:
        """Write another chain before the first entry, durably; entry CRCs cover the rest."""
        self._header = self._header._replace(chain_before=chain_before)
        self._file.pwrite([self._header.encode()], 0)
        self._file.sync()
        self.chain_before = chain_before

    def chain_at(self, place: int) -> Chain:
        """Return the chain before the entry at a place."""
        return self.entry(place - 1).chain if place else self.chain_before

    def durable_before(self, place: int) -> TransactionId:
        """Return the last ID that the entries from a place on state as durable before them.

        Unreadable entries are skipped.
        """
        durable_before = BEFORE_FIRST
        for at in range(place, self.count):
            data = self._file.pread(LINEAGE_ENTRY_BYTES, _entry_place(at))
            try:
                durable_before = max(durable_before, self._decoded(data, at)[1])
            except (BadFormat, ChecksumMismatch):
                continue
        return durable_before

    def append(self, entries: Sequence[LineageEntry], synced: TransactionId) -> None:
        """Write entries at the end; `synced` is the last durable ID. Not durable."""
        if entries:
            parts = self._encoded(entries, synced, self.count)
            self._file.pwrite(parts, _entry_place(self.count))
            self.count += len(entries)

    def truncate(self, count: int) -> None:
        """Keep the first `count` entries."""
        self._file.truncate(_entry_place(count))
        self.count = count
        self._has_partial_entry = False

    def sync(self) -> None:
        """Make it durable."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _entry_place(place: int) -> int:
    return LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES * place
