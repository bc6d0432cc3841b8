"""Finds records in the bytes of a `.seg` file after a crash, without relying on the index.

This code only recognizes records. The caller decides which of them belong to the log.

Rules:
    1. Bytes are a record if their ID, length and CRC match. The position alone proves nothing.
    2. A *hole* is a range of bytes that are not records. After a hole, there may be several
       candidates for the next record. The reasons: a misdirected write leaves valid records in
       wrong places, and the data of a record may contain other records. The search prefers the
       first candidate at a position that the index states. An earlier candidate wins only if valid
       records follow it up to this position, without a gap. If no candidate is at such a position,
       the first candidate wins.
    3. Some bytes may be unreadable on the disk. If the search decides where a torn tail is
       truncated, unreadable bytes are an error. In all other searches, unreadable bytes are treated
       as a hole (`PartlyReadableFile`), but only if the index can be read. Without the index, a
       candidate after the hole may be inside a record's data.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from waltz_core.errors import ReadFailed
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import RECORD_BYTES_MAX, first_bad_record, offsets_of
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    TRANSACTION_BYTES_MAX,
    TransactionId,
)
from waltz_core.storage.disk.file_system import File
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES
from waltz_core.storage.files.index import OffsetIndex

I64 = npt.NDArray[np.int64]
_ID_MAX: Final = TransactionId((1 << 63) - 1)
_NO_OFFSETS: Final = np.zeros(0, dtype=np.int64)
SCAN_BYTES: Final = 8 * 1024 * 1024
_STEP_BYTES: Final = 64 * 1024
_DATA_LENGTH_OFFSET: Final = 28  # the offset in a record of the length of its data
# If a drive has lost a sector, the file is read in pieces of the size of a sector.
_PIECE_BYTES: Final = 4096
assert SCAN_BYTES > RECORD_BYTES_MAX


class SearchedFile(Protocol):
    """The operations of a file that the search needs."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""


class PartlyReadableFile:
    """A file in which unreadable bytes are read as zeros (rule 3).

    A piece of the file that was found unreadable is not read again.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._unreadable_pieces: set[int] = set()  # numbers of unreadable pieces

    @property
    def has_unreadable(self) -> bool:
        """Whether any bytes were unreadable."""
        return bool(self._unreadable_pieces)

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""
        pieces = range(offset // _PIECE_BYTES, -(-(offset + size) // _PIECE_BYTES))
        if self._unreadable_pieces.isdisjoint(pieces):
            with suppress(ReadFailed):
                return self._file.pread(size, offset)
        end = min(offset + size, self._file.size())
        parts = []
        while offset < end:
            piece_end = min(end, offset - offset % _PIECE_BYTES + _PIECE_BYTES)
            parts.append(self._read_piece(piece_end - offset, offset))
            offset = piece_end
        return b"".join(parts)

    def _read_piece(self, size: int, offset: int) -> bytes:
        number = offset // _PIECE_BYTES
        if number not in self._unreadable_pieces:
            try:
                return self._file.pread(size, offset)
            except ReadFailed:
                self._unreadable_pieces.add(number)
        return bytes(size)


def record_end(file: SearchedFile, start: int, transaction_id: int, size: int) -> int | None:
    """Return the end of the record at an offset; None if it does not have the expected ID."""
    if not SEGMENT_HEADER_BYTES <= start <= size - RECORD_OVERHEAD_BYTES:
        return None
    found_id, _, _, length, _ = RECORD_PREFIX.unpack(file.pread(RECORD_PREFIX.size, start))
    end = start + RECORD_OVERHEAD_BYTES + length
    if found_id != transaction_id or length < 0 or end > size:
        return None
    return int(end)


def scan(
    file: SearchedFile,
    offset: int,
    first: TransactionId,
    *,
    size: int,
    stop_id: TransactionId | None,
) -> tuple[I64, int]:
    """Find the valid records from an offset on.

    Return their offsets and the end of the last one.
    """
    all_starts: list[I64] = []
    next_id = int(first)
    while offset < size and next_id != stop_id:
        data = file.pread(min(SCAN_BYTES, size - offset), offset)
        lengths = _candidate_lengths(data, next_id, stop_id)
        if not lengths.size:
            end = record_end(file, offset, next_id, size) or 0
            if end - offset <= len(data):
                break
            lengths = np.array([end - offset], dtype=np.int64)  # a large record of Waltz 0.13
            data = file.pread(end - offset, offset)
        run = memoryview(data)[: int(lengths.sum())]
        bad_index = first_bad_record(run, lengths)
        valid_lengths = lengths[:bad_index] if bad_index is not None else lengths
        all_starts.append(offsets_of(valid_lengths)[:-1] + offset)
        offset += int(valid_lengths.sum())
        next_id += int(valid_lengths.size)
        if bad_index is not None:
            break
    starts = np.concatenate(all_starts) if all_starts else np.zeros(0, dtype=np.int64)
    return starts, offset


def _candidate_lengths(data: bytes, next_id: int, stop_id: int | None) -> I64:
    """Return the lengths of complete candidates that have the expected IDs."""
    lengths = []
    offset = 0
    while offset + RECORD_OVERHEAD_BYTES <= len(data) and next_id != stop_id:
        found_id, _, _, data_bytes, _ = RECORD_PREFIX.unpack_from(data, offset)
        length = RECORD_OVERHEAD_BYTES + data_bytes
        if found_id != next_id or data_bytes < 0 or offset + length > len(data):
            break
        lengths.append(length)
        offset += length
        next_id += 1
    return np.array(lengths, dtype=np.int64)


class FoundRecord(NamedTuple):
    """A record and its position.

    `is_confirmed` is set if the index states this position, or if valid records follow without a
    gap up to a position that the index states.
    """

    transaction_id: TransactionId
    offset: int
    is_confirmed: bool


class HoleSearch:
    """Finds the records with which the log continues after holes, in one file."""

    def __init__(
        self, file: SearchedFile, index: OffsetIndex, first: TransactionId, *, last: TransactionId
    ) -> None:
        self._file = file
        self._index = index
        self._first = first  # the first ID of the segment
        self._last = last  # records above this ID are ignored
        # The offsets that the index states for the IDs from `_starts_first_id` on.
        self._starts: I64 | None = None
        self._starts_first_id = first

    def record_after(
        self, hole_first_id: TransactionId, offset: int, size: int
    ) -> tuple[TransactionId, int] | None:
        """Return the first record after a hole that begins at `offset` with the ID `hole_first_id`.

        Return None if no record up to `last` is found.

        Raises:
            ReadFailed: neither all records nor their index can be read.
        """
        if self._starts is None:
            # Read the index once, before the caller writes records after a hole to the index.
            self._starts_first_id = TransactionId(hole_first_id + 1)
            has_disk_errors = (
                isinstance(self._file, PartlyReadableFile) and self._file.has_unreadable
            )
            read = self._index.read if has_disk_errors else self._index.try_read  # rule 3
            self._starts = read(self._starts_first_id - self._first, self._last - hole_first_id)
            if has_disk_errors and (self._starts < SEGMENT_HEADER_BYTES).any():
                # The block of the index with these offsets was discarded (file_system.py, rule 8).
                raise ReadFailed(
                    f"cannot find the records after {hole_first_id}: expected readable records or "
                    f"index entries up to {self._last}, found disk errors in both. Hint: check the "
                    "disk."
                )
        starts = self._starts[hole_first_id + 1 - self._starts_first_id :]
        record = find_record(
            self._file, offset, hole_first_id, size=size, starts=starts, last=self._last
        )
        if record is None:
            return None
        if not record.is_confirmed:
            # The search of the whole file has confirmed no record. Later searches do not try this
            # again.
            self._starts = _NO_OFFSETS
        return record.transaction_id, record.offset


def find_record(
    file: SearchedFile,
    hole_offset: int,
    first: TransactionId,
    *,
    size: int,
    starts: I64,
    last: TransactionId = _ID_MAX,
) -> FoundRecord | None:
    """Return the first record after a hole, up to the ID `last` (rule 2); None if there is none.

    The hole begins at `hole_offset` with the record `first`. `starts` has the offsets that the
    index states for the records after `first`.
    """
    best: FoundRecord | None = None
    offset = hole_offset + 1
    while offset + RECORD_OVERHEAD_BYTES <= size:
        data = file.pread(min(SCAN_BYTES, size - offset), offset)
        for data_offset in _candidate_offsets(data, first, size - offset):
            found_id, _, _, data_bytes, _ = RECORD_PREFIX.unpack_from(data, data_offset)
            start, missing_count = offset + data_offset, found_id - first - 1
            if found_id > last or start - hole_offset < RECORD_OVERHEAD_BYTES * (missing_count + 1):
                continue  # above `last`, or the hole is too small for the missing records
            is_known = missing_count < starts.size and starts[missing_count] == start
            if not is_known and (best is not None or data_bytes > TRANSACTION_BYTES_MAX):
                continue  # a client can choose data that looks like many beginnings of long records
            record = file.pread(RECORD_OVERHEAD_BYTES + data_bytes, start)
            if int.from_bytes(record[-4:], "big") != crc32(record[:-4]):
                continue
            candidate = FoundRecord(TransactionId(found_id), start, is_known)
            if is_known:
                is_contiguous = best is not None and _has_records_between(
                    file, best, candidate, size
                )
                return (
                    best._replace(is_confirmed=True)
                    if best is not None and is_contiguous
                    else candidate
                )
            best = candidate
        if best is not None and not starts.size:
            break
        offset += max(1, len(data) - RECORD_PREFIX.size + 1)
    return best


def _has_records_between(
    file: SearchedFile, begin: FoundRecord, end: FoundRecord, size: int
) -> bool:
    """Return whether valid records fill the space between two records, without a gap."""
    first, stop_id = begin.transaction_id, end.transaction_id
    starts, offset = scan(file, begin.offset, first, size=size, stop_id=stop_id)
    return (first + starts.size, offset) == (stop_id, end.offset)


def _candidate_offsets(data: bytes, after: int, space: int) -> Iterator[int]:
    """Yield the offsets where ID and length of a record look possible, in ascending order.

    The arrays for this check are many times as large as the bytes, so the search works in steps.
    """
    # Each record has at least 40 bytes, so no ID can be far above the expected one.
    id_max = after + space // RECORD_OVERHEAD_BYTES + 1_000_000
    count = len(data) - RECORD_PREFIX.size + 1
    for start in range(0, count, _STEP_BYTES):
        size = min(_STEP_BYTES, count - start)
        ids: I64 = np.ndarray((size,), dtype=">i8", buffer=data, offset=start, strides=(1,))
        data_lengths: I64 = np.ndarray(
            (size,), dtype=">i4", buffer=data, offset=start + _DATA_LENGTH_OFFSET, strides=(1,)
        )
        (positions,) = ((ids > after) & (ids <= id_max)).nonzero()
        lengths = data_lengths[positions].astype(np.int64)
        positions += start
        fits = (lengths >= 0) & (lengths + RECORD_OVERHEAD_BYTES + positions <= space)
        yield from positions[fits].tolist()
