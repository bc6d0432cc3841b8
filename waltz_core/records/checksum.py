"""CRC-32 of bytes, of many short rows, and of concatenated parts whose CRCs are known.

CRC-32 is linear over XOR. Therefore the checksum of a record can be computed from two checksums:
that of its header, and that of its data. The checksum of a run of records can be computed from the
CRCs in the records. So the bytes are read only once.

Rules:
    1. The algorithm is CRC-32 IEEE 802.3, like zlib's; results are always unsigned. ISA-L computes
       it with processor instructions, ten times as fast as zlib.
    2. `combine(crc32(a), crc32(b), len(b)) == crc32(a + b)`.
    3. No function here runs Python code per row; tables are built once and never changed.
    4. A sender could choose wrong CRCs so that their errors cancel out in the checksum of a run.
       Therefore CRCs from an untrusted sender are checked row by row, not with `crc32_of_run`.
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

# A length is split into digits of six bits. 16 MiB, the largest frame, has four digits. The tables
# of one digit (256 KiB) fit into a core's second-level cache.
_DIGIT_BITS: Final = 6
_DIGIT_VALUES: Final = 1 << _DIGIT_BITS
_POLYNOMIAL: Final = 0xEDB88320
LENGTH_MAX: Final = (1 << 36) - 1
assert LENGTH_MAX.bit_length() % _DIGIT_BITS == 0
# In a polynomial, the highest bit is the coefficient of the lowest power, as in the CRC.
_ONE: Final = 1 << 31
_TRAILER_BYTES: Final = 4
_RUN_BYTES: Final = 1 << 20
_TABLE_STARTS: Final = np.arange(33 * 4) << 8


# `crc32(data)` returns the CRC-32 of data; `crc32(data, crc)` continues `crc` over data. There is
# no wrapper, because each append calls this function several times.
crc32 = isal_zlib.crc32


def crc32_of_each(parts: Sequence[Bytes]) -> U32:
    """Return the CRC-32 of each part; the loop over the parts runs in C (rule 3)."""
    return np.fromiter(map(isal_zlib.crc32, parts), dtype=np.uint32, count=len(parts))


def combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """Return the CRC-32 of `a + b` (rule 2); `len_b` is the length of `b` in bytes."""
    assert 0 <= len_b <= LENGTH_MAX
    exponent = 0
    while len_b:
        digit = len_b & (_DIGIT_VALUES - 1)
        if digit:
            table = _shift_tables(exponent)[:, digit]
            crc_a = int(
                table[0, crc_a & 0xFF]
                ^ table[1, crc_a >> 8 & 0xFF]
                ^ table[2, crc_a >> 16 & 0xFF]
                ^ table[3, crc_a >> 24]
            )
        len_b >>= _DIGIT_BITS
        exponent += 1
    return crc_a ^ crc_b


def combine_many(crc_a: U32, crc_b: U32, len_b: I64 | int) -> U32:
    """Apply `combine` to each row; `len_b` is one length per row, or one for all rows."""
    assert crc_a.shape == crc_b.shape
    return shift_many(crc_a, len_b) ^ crc_b


def shift_many(crcs: U32, length: I64 | int) -> U32:
    """Shift the CRC of each row, because `length` more bytes follow the row.

    The XOR of the shifted CRC and the CRC of the following bytes is the CRC of both parts together.
    `length` is one number of bytes per row, or one for all rows, which is cheaper.
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


def crc32_of_run(crcs: U32, lengths: I64) -> int:
    """Return the CRC-32 of consecutive rows that each end with their own CRC, big-endian.

    Records on disk have this form. `crcs` are the CRCs in the rows, and `lengths` are the lengths
    of the whole rows in bytes. The function does not read the bytes of the rows. If d bytes follow
    a row, the row adds the product of `x**8d` and the CRC of the whole row to the result. The CRC
    of the whole row is a linear function of the 32 bits of the CRC in the row, plus a constant. So
    for each of the 32 bits, the function first adds the powers `x**8d` of the rows whose CRC has
    this bit. For the constant, it adds the powers of all rows. Then 33 products are enough: one for
    each bit, and one for the constant.
    """
    assert crcs.shape == lengths.shape
    powers = _powers()
    ends = lengths.cumsum()
    run = start = done_bytes = 0
    while start < crcs.size:
        # Take the rows that the table of powers covers. Usually these are all rows.
        stop = int(ends.searchsorted(done_bytes + powers.size, side="right"))
        stop = min(max(stop, start + 1), crcs.size)
        end = int(ends[stop - 1])
        part = _run_within(crcs[start:stop], powers.take(end - ends[start:stop]))
        run = combine(run, part, end - done_bytes)
        start, done_bytes = stop, end
    return run


def _run_within(crcs: U32, powers: U32) -> int:
    # Plane k has bit 31 - k of each CRC as its sign. A shift of all numbers by one count is fast.
    planes = np.empty((32, crcs.size), dtype=np.int32)
    planes[0] = crcs.view(np.int32)
    for width in (1, 2, 4, 8, 16):
        np.left_shift(planes[:width], width, out=planes[width : 2 * width])
    planes >>= 31  # all ones if the CRC has the bit, else zero
    planes &= powers.view(np.int32)
    sums = np.empty(33, dtype=np.uint32)
    np.bitwise_xor.reduce(planes, axis=1, out=sums[31::-1].view(np.int32))
    sums[32] = np.bitwise_xor.reduce(powers)
    octets = sums.astype("<u4").view(np.uint8)
    return int(np.bitwise_xor.reduce(_trailer_products().take(_TABLE_STARTS + octets)))


def crc32_of_rows(rows: U8) -> U32:
    """Return the CRC-32 of each row of a (row count, row bytes) array.

    Columns with the same byte in all rows cost nothing, because the CRC of one model row covers
    these columns. In record headers, most columns are of this kind.
    """
    count, width = rows.shape
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    model = rows[0]
    total = np.full(count, crc32(model.tobytes()), dtype=np.uint32)
    tables = _row_tables(width)
    for column in np.flatnonzero((rows != model).any(axis=0)).tolist():
        # The CRC differs from the model's CRC by the image of the XOR of the two bytes.
        total ^= tables[column].take(rows[:, column] ^ model[column])
    return total


def _shift_all(crcs: U32, length: int) -> U32:
    assert 0 <= length <= LENGTH_MAX
    exponent = 0
    while length:
        digit = length & (_DIGIT_VALUES - 1)
        if digit:
            crcs = _apply(_shift_tables(exponent)[:, digit], crcs)
        length >>= _DIGIT_BITS
        exponent += 1
    return crcs


def _shift_each(crcs: U32, lengths: I64, longest: int) -> U32:
    assert longest <= LENGTH_MAX
    exponent = 0
    while longest >> (_DIGIT_BITS * exponent):
        digit = lengths >> (_DIGIT_BITS * exponent) & (_DIGIT_VALUES - 1)
        tables = _shift_tables(exponent).reshape(4, -1)
        row_of_table = digit << 8
        octets = _octets(crcs)
        shifted = tables[0].take(row_of_table + octets[0])
        shifted ^= tables[1].take(row_of_table + octets[1])
        shifted ^= tables[2].take(row_of_table + octets[2])
        shifted ^= tables[3].take(row_of_table + octets[3])
        crcs = shifted
        exponent += 1
    return crcs


def _apply(table: U32, crcs: U32) -> U32:
    """Apply a linear map to each CRC; the map has four tables, one for each octet of a CRC."""
    octets = _octets(crcs)
    mapped: U32 = table[0].take(octets[0])
    mapped ^= table[1].take(octets[1])
    mapped ^= table[2].take(octets[2])
    mapped ^= table[3].take(octets[3])
    return mapped


def _octets(crcs: U32) -> U8:
    """Return the octets of all CRCs as four rows, the lowest octet first."""
    return np.ascontiguousarray(crcs, dtype="<u4").view(np.uint8).reshape(-1, 4).T


@cache
def _byte_table() -> U32:
    """Return the usual CRC table: for each of 256 bytes, the register after this byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@cache
def _shift_tables(exponent: int) -> U32:
    """Return tables that shift a CRC by `digit * 64**exponent` bytes, for each digit.

    The array has the indexes [octet of the CRC, digit, value of the octet].
    """
    assert 0 <= exponent < LENGTH_MAX.bit_length() // _DIGIT_BITS
    identity = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if exponent == 0:
        step = _byte_table()[identity & 0xFF] ^ identity >> 8
    else:
        lower = _shift_tables(exponent - 1)
        step = _apply(lower[:, 1], lower[:, -1].ravel()).reshape(4, 256)
    tables = np.empty((4, _DIGIT_VALUES, 256), dtype=np.uint32)
    tables[:, 0] = identity
    for digit in range(1, _DIGIT_VALUES):
        tables[:, digit] = _apply(step, tables[:, digit - 1].ravel()).reshape(4, 256)
    tables.flags.writeable = False
    return tables


@cache
def _powers() -> U32:
    """Return `x**8d` modulo the polynomial for each number of bytes d below `_RUN_BYTES`."""
    powers = np.empty(_RUN_BYTES, dtype=np.uint32)
    powers[0] = _ONE
    count = 1
    while count < _RUN_BYTES:
        powers[count : 2 * count] = _shift_all(powers[:count], count)
        count *= 2
    powers.flags.writeable = False
    return powers


@cache
def _trailer_products() -> U32:
    """Return the products of 33 constant factors with each octet, for `_run_within`.

    If bytes are followed by their own CRC, the CRC over both is a linear map of the first CRC, plus
    a constant. The first 32 factors are the images of the 32 bits under this map. The last factor
    is the constant. `_run_within` multiplies each factor with a sum of powers; the sum for the
    constant contains all powers. Each factor has four tables of 256 products, one for each octet of
    its sum.
    """
    units = np.zeros(33, dtype=np.uint32)
    units[:32] = np.uint32(1) << np.arange(32, dtype=np.uint32)
    trailers = units.astype(">u4").view(np.uint8).reshape(-1, _TRAILER_BYTES)
    factors = combine_many(units, crc32_of_rows(trailers), _TRAILER_BYTES)
    factors[:32] ^= factors[32]
    octets = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    product = np.zeros((33, 4, 256), dtype=np.uint32)
    for bit in range(31, -1, -1):
        product ^= np.where(octets >> bit & 1, factors[:, None, None], np.uint32(0))
        factors = np.where(factors & 1, factors >> 1 ^ np.uint32(_POLYNOMIAL), factors >> 1)
    table = product.reshape(-1)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=16)
def _row_tables(width: int) -> U32:
    """Return an array [column, value]: what a byte adds to the CRC of a row of `width` bytes."""
    tables = np.empty((width, 256), dtype=np.uint32)
    image = _byte_table()
    for column in range(width - 1, -1, -1):
        tables[column] = image
        image = _byte_table()[image & 0xFF] ^ image >> 8
    tables.flags.writeable = False
    return tables
