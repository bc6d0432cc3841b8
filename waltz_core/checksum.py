"""CRC-32 of bytes, of many short rows at once, and of two runs of bytes from their two CRCs.

Why it stands alone: the record checksum is the one thing that travels unchanged from a client's
DataFrame over three disks to a reader, so there must be one definition of it. CRC-32 is linear
over XOR. Hence the checksum of a record follows from that of its header and that of its data, and
the checksum of a run of records from those inside it, without a second pass over the bytes.

Rules:
    1. CRC-32 IEEE 802.3 as zlib has it, always as an unsigned number (interop.md, "CRC"). ISA-L
       takes it with the processor's own instructions, ten times as fast as zlib.
    2. `combine(crc32(a), crc32(b), len(b)) == crc32(a + b)`.
    3. No function here runs Python per row; tables are built once and are never changed.
    4. What is linear can be made to cancel out: where the CRCs themselves come from somebody who
       may mean harm, each row is checked, and `fold` is not the means.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Bytes = bytes | bytearray | memoryview

# A length is taken apart into digits of six bits: 16 MiB, the largest frame, has four of them,
# and one digit's tables (256 KiB) still fit into a core's second-level cache.
_DIGIT_BITS: Final = 6
_DIGIT_VALUES: Final = 1 << _DIGIT_BITS
_POLYNOMIAL: Final = 0xEDB88320
LENGTH_MAX: Final = (1 << 36) - 1
assert LENGTH_MAX.bit_length() % _DIGIT_BITS == 0


def crc32(data: Bytes, value: int = 0) -> int:
    """Return the CRC-32 of `data`, or of what `value` stands for followed by `data`."""
    return isal_zlib.crc32(data, value)


def crc32_of_each(parts: Sequence[Bytes]) -> U32:
    """Return the CRC-32 of each of the parts; the loop over them runs in C (rule 3)."""
    return np.fromiter(map(isal_zlib.crc32, parts), dtype=np.uint32, count=len(parts))


def combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """Return the CRC-32 of `a + b` (rule 2); `len_b` is the length of `b` in bytes."""
    assert 0 <= len_b <= LENGTH_MAX
    place = 0
    while len_b:
        digit = len_b & (_DIGIT_VALUES - 1)
        if digit:
            table = _shift_tables(place)[:, digit]
            crc_a = int(
                table[0, crc_a & 0xFF]
                ^ table[1, crc_a >> 8 & 0xFF]
                ^ table[2, crc_a >> 16 & 0xFF]
                ^ table[3, crc_a >> 24]
            )
        len_b >>= _DIGIT_BITS
        place += 1
    return crc_a ^ crc_b


def combine_many(crc_a: U32, crc_b: U32, len_b: I64 | int) -> U32:
    """Return `combine` of each row; `len_b` is one length for each row, or one for all."""
    assert crc_a.shape == crc_b.shape
    return shift_many(crc_a, len_b) ^ crc_b


def shift_many(crcs: U32, length: I64 | int) -> U32:
    """Return what each CRC becomes when `length` bytes follow, before their own CRC is XORed in.

    `length` is one number of bytes for each row, or one for all rows, which is cheaper.
    """
    if isinstance(length, int):
        return _shift_all(crcs, length)
    assert crcs.shape == length.shape
    if length.size == 0:
        return crcs.copy()
    shortest, longest = int(length.min()), int(length.max())
    assert shortest >= 0
    if shortest == longest:
        return _shift_all(crcs, longest)
    return _shift_each(crcs, length, longest)


def fold(crcs: U32, lengths: I64) -> int:
    """Return the CRC-32 of all rows one after the other, from the CRC and the length of each."""
    assert crcs.shape == lengths.shape
    if crcs.size == 0:
        return 0
    ends = np.cumsum(lengths)
    return int(np.bitwise_xor.reduce(shift_many(crcs, ends[-1] - ends)))


def crc32_of_rows(rows: U8) -> U32:
    """Return the CRC-32 of each row of a (row count, row bytes) array.

    Columns that hold the same byte in all rows cost nothing: they are in the one CRC of a
    model row. In record headers that is most of them.
    """
    count, width = rows.shape
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    model = rows[0]
    total = np.full(count, crc32(model.tobytes()), dtype=np.uint32)
    tables = _row_tables(width)
    for column in np.flatnonzero((rows != model).any(axis=0)).tolist():
        # The CRC differs from the model's by the image of the bytes that differ.
        total ^= tables[column].take(rows[:, column] ^ model[column])
    return total


def crc32_with_trailer(crcs: U32) -> U32:
    """Return the CRC-32 of bytes followed by their own CRC as four big-endian bytes.

    That is how a record lies on the disk, so the checksum of a run of records follows from
    the checksums inside it.
    """
    tables, constant = _trailer_tables()
    return _apply(tables, crcs) ^ constant


def _shift_all(crcs: U32, length: int) -> U32:
    assert 0 <= length <= LENGTH_MAX
    place = 0
    while length:
        digit = length & (_DIGIT_VALUES - 1)
        if digit:
            crcs = _apply(_shift_tables(place)[:, digit], crcs)
        length >>= _DIGIT_BITS
        place += 1
    return crcs


def _shift_each(crcs: U32, lengths: I64, longest: int) -> U32:
    assert longest <= LENGTH_MAX
    place = 0
    while longest >> (_DIGIT_BITS * place):
        digit = lengths >> (_DIGIT_BITS * place) & (_DIGIT_VALUES - 1)
        tables = _shift_tables(place).reshape(4, -1)
        row_of_table = digit << 8
        octets = _octets(crcs)
        shifted = tables[0].take(row_of_table + octets[0])
        shifted ^= tables[1].take(row_of_table + octets[1])
        shifted ^= tables[2].take(row_of_table + octets[2])
        shifted ^= tables[3].take(row_of_table + octets[3])
        crcs = shifted
        place += 1
    return crcs


def _apply(table: U32, crcs: U32) -> U32:
    """Map each CRC through a linear map given as four tables, one for each of its octets."""
    octets = _octets(crcs)
    mapped: U32 = table[0].take(octets[0])
    mapped ^= table[1].take(octets[1])
    mapped ^= table[2].take(octets[2])
    mapped ^= table[3].take(octets[3])
    return mapped


def _octets(crcs: U32) -> U8:
    """Return the octets of each CRC as four rows, the lowest first."""
    return np.ascontiguousarray(crcs, dtype="<u4").view(np.uint8).reshape(-1, 4).T


@cache
def _byte_table() -> U32:
    """Return the usual 256 entries: the register after one byte of input."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@cache
def _shift_tables(place: int) -> U32:
    """Return the maps of `digit * 64**place` zero bytes, as [octet, digit, value] -> CRC."""
    assert 0 <= place < LENGTH_MAX.bit_length() // _DIGIT_BITS
    identity = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if place == 0:
        step = _byte_table()[identity & 0xFF] ^ identity >> 8
    else:
        lower = _shift_tables(place - 1)
        step = _apply(lower[:, 1], lower[:, -1].ravel()).reshape(4, 256)
    tables = np.empty((4, _DIGIT_VALUES, 256), dtype=np.uint32)
    tables[:, 0] = identity
    for digit in range(1, _DIGIT_VALUES):
        tables[:, digit] = _apply(step, tables[:, digit - 1].ravel()).reshape(4, 256)
    tables.flags.writeable = False
    return tables


@cache
def _trailer_tables() -> tuple[U32, np.uint32]:
    """Return `crc32_with_trailer` as a linear map and a constant, read off at the unit values."""
    units = _shift_tables(0)[:, 0].ravel()
    trailers = units.astype(">u4").view(np.uint8).reshape(-1, 4)
    images = combine_many(units, crc32_of_rows(trailers), 4)
    constant = images[0]
    return (images ^ constant).reshape(4, 256), constant


@lru_cache(maxsize=16)
def _row_tables(width: int) -> U32:
    """Return [column, value] -> what this byte adds to the CRC of a row of `width` bytes."""
    tables = np.empty((width, 256), dtype=np.uint32)
    image = _byte_table()
    for column in range(width - 1, -1, -1):
        tables[column] = image
        image = _byte_table()[image & 0xFF] ^ image >> 8
    tables.flags.writeable = False
    return tables
