"""Finds the records of a `.seg` file one after the other, across damage.

The commands that dump, count, verify and repair all need the positions of the records. A search
that stopped at the first wrong byte would find only one fault.

Rules:
    1. A `RecordRun` contains consecutive records with the expected IDs. The caller verifies their
       checksums if it needs to.
    2. Between two runs there may be a `Gap`. A gap begins at bytes that are not a record. A gap
       also begins at a record with a wrong CRC, if no other record begins where this record ends. A
       gap ends at the next record with a valid CRC.
    3. At most a few blocks of a file are in memory at any time.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from waltz_core.offline.files import ReadableFile
from waltz_core.offline.layout import FILE_HEADER_BYTES, RECORD, RECORD_FRAME_BYTES, crc32

BLOCK_BYTES: Final = 8 * 1024 * 1024
# No storage accepts a record of this size, so a greater length is always wrong.
RECORD_BYTES_MAX: Final = 64 * 1024 * 1024


class RecordRun(NamedTuple):
    """Adjacent records; record i is `data[bounds[i] : bounds[i + 1]]`, with the ID first + i.

    `offset` is the offset of the data in the file.
    """

    first: int
    offset: int
    data: bytes
    bounds: list[int]

    @property
    def length(self) -> int:
        """The number of records."""
        return len(self.bounds) - 1

    def starting_at(self, transaction_id: int) -> "RecordRun":
        """Return the records, starting at an ID."""
        skip = min(max(0, transaction_id - self.first), self.length)
        return self._replace(first=self.first + skip, bounds=self.bounds[skip:])

    def up_to(self, transaction_id: int) -> "RecordRun":
        """Return the records up to and including an ID."""
        return self._replace(bounds=self.bounds[: max(0, transaction_id - self.first + 1) + 1])


class Gap(NamedTuple):
    """Bytes offset..end-1, in which the records first..next_id-1 are missing.

    `next_id` is None if no record follows. `reason` states the fault.
    """

    first: int
    next_id: int | None
    offset: int
    end: int
    reason: str


class RecordFields(NamedTuple):
    """The fields of a record, without its data."""

    transaction_id: int
    client: int
    generation: int
    partition: int
    sequence: int
    header: int
    data_bytes: int
    data_crc: int


def record_fields(record: bytes | memoryview) -> RecordFields:
    """Decode the fields of a record."""
    return RecordFields._make(RECORD.unpack_from(record))


def has_valid_crc(record: bytes | memoryview) -> bool:
    """Return whether the CRC at the end of a record is correct."""
    return crc32(record[:-4]) == int.from_bytes(record[-4:], "big")


def is_record_at(file: ReadableFile, transaction_id: int, offset: int) -> bool:
    """Return whether the record with an ID may begin at an offset; its CRC is not checked."""
    return offset >= FILE_HEADER_BYTES and not _record_fault(
        file, transaction_id, offset, file.size()
    )


def walk_records(
    file: ReadableFile, first: int, offset: int = FILE_HEADER_BYTES
) -> Iterator[RecordRun | Gap]:
    """Yield all records and the gaps between them, starting with ID `first` at `offset`."""
    size = file.size()
    expected_id = first
    while offset < size:
        run = _read_run(file, expected_id, offset, size)
        if run.length:
            yield run
            expected_id, offset = expected_id + run.length, run.offset + run.bounds[-1]
            continue
        gap = _find_gap(file, expected_id, offset, size)
        yield gap
        if gap.next_id is None:
            return
        expected_id, offset = gap.next_id, gap.end


def _read_run(file: ReadableFile, expected_id: int, offset: int, size: int) -> RecordRun:
    """Return the consecutive records of one block; omit the last one if its length is wrong."""
    end = _record_end(file, expected_id, offset, size)
    data = file.pread(max(BLOCK_BYTES, end - offset) if end else 0, offset)
    bounds = _record_bounds(data, expected_id)
    if len(bounds) > 1:
        end = offset + bounds[-1]
        is_continued = end == size or _record_end(file, expected_id + len(bounds) - 1, end, size)
        # If no record begins at the end of the run, there are two cases. Either the next record is
        # broken, or the length of the run's last record is wrong. In the second case, the CRC of
        # the last record is wrong, too.
        if not is_continued and not has_valid_crc(memoryview(data)[bounds[-2] : bounds[-1]]):
            bounds.pop()
    return RecordRun(expected_id, offset, data, bounds)


def _record_bounds(data: bytes, expected_id: int) -> list[int]:
    """Return the start of each complete record in these bytes, and the end of the last one."""
    unpack = RECORD.unpack_from
    bounds = [0]
    position, last_start = 0, len(data) - RECORD_FRAME_BYTES
    while position <= last_start:
        prefix = unpack(data, position)
        length = prefix[6]
        if prefix[0] != expected_id or not 0 <= length <= last_start - position:
            break
        position += length + RECORD_FRAME_BYTES
        expected_id += 1
        bounds.append(position)
    return bounds


def _record_end(file: ReadableFile, expected_id: int, offset: int, size: int) -> int:
    """Return the end of the record at an offset; 0 if it cannot be the expected record."""
    return (
        0
        if _record_fault(file, expected_id, offset, size)
        else offset + _record_length(file, offset)
    )


def _record_length(file: ReadableFile, offset: int) -> int:
    return RECORD_FRAME_BYTES + record_fields(file.pread(RECORD.size, offset)).data_bytes


def _record_fault(file: ReadableFile, expected_id: int, offset: int, size: int) -> str:
    """Return why the bytes at an offset cannot be the expected record; '' if they can be."""
    space = size - offset - RECORD_FRAME_BYTES
    if space < 0:
        return f"expected at least {RECORD_FRAME_BYTES} bytes for a record, found {size - offset}"
    fields = record_fields(file.pread(RECORD.size, offset))
    if fields.transaction_id != expected_id:
        return f"expected transaction ID {expected_id}, found {fields.transaction_id}"
    space = min(space, RECORD_BYTES_MAX)
    if not 0 <= fields.data_bytes <= space:
        return (
            f"expected a record with at most {space} bytes of data, found a length of "
            f"{fields.data_bytes}"
        )
    return ""


def _find_gap(file: ReadableFile, expected_id: int, offset: int, size: int) -> Gap:
    reason = _record_fault(file, expected_id, offset, size)
    if not reason:
        record = file.pread(_record_length(file, offset), offset)
        stated_crc = int.from_bytes(record[-4:], "big")
        reason = (
            f"expected CRC {crc32(record[:-4]):08x}, found {stated_crc:08x}; no record begins at "
            f"the end of record {expected_id}"
        )
    following = _find_next_record(file, offset + 1, expected_id, size)
    next_id, end = following if following is not None else (None, size)
    return Gap(expected_id, next_id, offset, end, reason)


def _find_next_record(
    file: ReadableFile, offset: int, after: int, size: int
) -> tuple[int, int] | None:
    """Find the first record with a valid CRC and an ID above `after`; return its ID and offset."""
    # Each record has at least 40 bytes, so no ID can be far above the expected one.
    id_max = after + (size - offset) // RECORD_FRAME_BYTES + 1
    while offset + RECORD_FRAME_BYTES <= size:
        data = file.pread(BLOCK_BYTES, offset)
        for position in _possible_offsets(data, after, id_max, size - offset):
            fields = record_fields(memoryview(data)[position:])
            length = RECORD_FRAME_BYTES + fields.data_bytes
            is_complete = len(data) - position >= length
            record = (
                data[position : position + length]
                if is_complete
                else file.pread(length, offset + position)
            )
            if has_valid_crc(record):
                return fields.transaction_id, offset + position
        offset += max(1, len(data) - RECORD.size + 1)
    return None


def _possible_offsets(data: bytes, previous_id: int, id_max: int, space: int) -> list[int]:
    """Return the offsets at which a record may begin, judged by its ID and length.

    `space` is the number of bytes from the beginning of `data` to the end of the file.
    """
    count = len(data) - RECORD.size + 1
    if count <= 0:
        return []
    ids = np.ndarray((count,), dtype=">i8", buffer=data, strides=(1,))
    positions = np.flatnonzero((ids > previous_id) & (ids <= id_max))
    lengths = np.ndarray((count,), dtype=">i4", buffer=data, offset=28, strides=(1,))
    data_lengths = lengths[positions].astype(np.int64)
    fits = (data_lengths >= 0) & (positions + data_lengths + RECORD_FRAME_BYTES <= space)
    offsets: list[int] = positions[fits & (data_lengths <= RECORD_BYTES_MAX)].tolist()
    return offsets
