"""Runs of raw records: consecutive records, exactly as in a segment file.

The owner sends the same bytes to the disks of all replicas, to its cache and to readers. In a
repair, one replica sends these bytes to another replica. The functions of this module find
positions, IDs, headers and checksums in the bytes without decoding the records. A run consists of a
buffer and the lengths of its records.

    0                8                       24       28  32         36     36+n         40+n
    | transaction ID | request ID (16 bytes) | header | n | data crc | data | record crc |

Rules:
    1. All integers are big-endian. The data CRC covers the data, and the record CRC covers all
       bytes before it (docs/design/disk-format.md 4).
    2. No function here runs Python code per record, except to find the damaged record in a damaged
       run.
    3. Lengths from outside must pass `lengths_from_wire` before any other function uses them.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat
from waltz_core.records.checksum import crc32, crc32_of_rows, crc32_of_run
from waltz_core.records.record import (
    FRAME_BYTES_MAX,
    RECORD_HEADER,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    REQ_ID,
    TRANSACTION_BYTES_MAX,
    Chain,
    LineageEntry,
    ReqId,
    TransactionId,
)

Buffer = bytes | memoryview
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Structured = npt.NDArray[np.void]

_TRAILER_BYTES = 4
_ID_AND_LENGTH = struct.Struct(">q20xi")
_ID = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CRC = struct.Struct(">I")
# Runs with at most this many records and bytes are processed in plain Python.
ONE_BY_ONE_MAX = 32
ONE_BY_ONE_BYTES_MAX = 32 * 1024
RECORD_BYTES_MAX = RECORD_OVERHEAD_BYTES + TRANSACTION_BYTES_MAX
FEED_HEADER_BYTES = 20

REQ_ID_DTYPE = np.dtype(
    [("client_id", ">i4"), ("generation", ">i4"), ("partition_id", ">i4"), ("sequence", ">i4")]
)
HEADER_DTYPE = np.dtype([("transaction_id", ">i8"), ("req_id", REQ_ID_DTYPE), ("header", ">i4")])
FEED_HEADER_DTYPE = np.dtype([("req_id", REQ_ID_DTYPE), ("header", ">i4")])
PREFIX_DTYPE = np.dtype([("head", HEADER_DTYPE), ("length", ">i4"), ("data_crc", ">u4")])
assert REQ_ID_DTYPE.itemsize == REQ_ID.size
assert HEADER_DTYPE.itemsize == RECORD_HEADER.size
assert PREFIX_DTYPE.itemsize == RECORD_PREFIX.size
assert FEED_HEADER_DTYPE.itemsize == FEED_HEADER_BYTES


class RangeRead(NamedTuple):
    """A run of records that starts at `first`.

    `entries` are the batches that contain the records. `chain_before` is the hash chain before the
    first of these batches.
    """

    first: TransactionId
    lengths: I64
    records: Buffer
    entries: tuple[LineageEntry, ...]
    chain_before: Chain


# ---------------------------------------------------------------------------------------------
# lengths


def lengths_from_wire(packed: Buffer, records_bytes: int) -> I64:
    """Decode the lengths of a run of `records_bytes` bytes; return them as int64.

    The only upper limit is the frame size: Waltz 0.13 has accepted transactions of any size.

    Raises:
        BadFormat: the bytes are not an int32 array, a length is impossible, or the sum of the
            lengths is not `records_bytes`.
    """
    if len(packed) % 4:
        raise BadFormat(
            f"record lengths: expected 4 bytes each, found {len(packed)} bytes in total"
        )
    if 0 < len(packed) <= 4 * ONE_BY_ONE_MAX:
        values = struct.unpack(f">{len(packed) // 4}i", packed)
        are_possible = min(values) >= RECORD_OVERHEAD_BYTES and max(values) <= FRAME_BYTES_MAX
        if are_possible and sum(values) == records_bytes:
            return np.array(values, dtype=np.int64)
    lengths: I64 = np.frombuffer(packed, dtype=">i4").astype(np.int64)
    if lengths.size:
        shortest, longest = lengths.min(), lengths.max()
        if shortest < RECORD_OVERHEAD_BYTES:
            raise BadFormat(
                f"record lengths: expected at least {RECORD_OVERHEAD_BYTES} bytes for each "
                f"record, found {shortest}"
            )
        if longest > FRAME_BYTES_MAX:
            raise BadFormat(
                f"record lengths: expected at most {FRAME_BYTES_MAX} bytes for each record, "
                f"found {longest}"
            )
    total = int(lengths.sum())
    if total != records_bytes:
        raise BadFormat(
            f"record lengths: their sum is {total}, but the records have {records_bytes} bytes"
        )
    return lengths


def total_bytes(lengths: I64) -> int:
    """Return the total size of the records, in bytes."""
    if lengths.size <= ONE_BY_ONE_MAX:
        return sum(lengths.tolist())  # for a few records, six times as fast as arrays
    return int(lengths.sum())


def lengths_to_wire(lengths: I64) -> bytes:
    """Encode the lengths as big-endian int32, one per record."""
    return lengths.astype(">i4").tobytes()


def offsets_of(lengths: I64) -> I64:
    """Return the start of each record, and the end of the run as the last offset."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lengths_between(offsets: I64) -> I64:
    """Return the distance from each offset to the next; the last offset has no distance."""
    return offsets[1:] - offsets[:-1]  # For a few offsets, `np.diff` is many times slower.


def count_within(lengths: I64, bytes_max: int) -> int:
    """Return how many of the first records fit into `bytes_max` bytes; at least one."""
    assert lengths.size > 0
    return max(1, int(np.searchsorted(np.cumsum(lengths), bytes_max, side="right")))


def slice_records(
    records: Buffer, lengths: I64, *, skip: int, count: int
) -> tuple[memoryview, I64]:
    """Return the `count` records after the first `skip` records, and their lengths, as views."""
    assert skip >= 0
    assert skip + count <= lengths.size
    start = total_bytes(lengths[:skip])
    part = lengths[skip : skip + count]
    return memoryview(records)[start : start + total_bytes(part)], part


# ---------------------------------------------------------------------------------------------
# the content of records


def headers_of(records: Buffer, lengths: I64) -> bytes:
    """Return the record headers as on the wire: ID, request ID, header; 28 bytes each."""
    return _gather(records, _starts(lengths), HEADER_DTYPE).tobytes()


def prefixes_of(records: Buffer, lengths: I64) -> Structured:
    """Return the 36 bytes before each record's data, as a structured array (`PREFIX_DTYPE`)."""
    return _gather(records, _starts(lengths), PREFIX_DTYPE)


def feed_headers_of(records: Buffer, lengths: I64) -> bytes:
    """Return the feed headers of all records: request ID and header, 20 bytes each."""
    if lengths.size <= ONE_BY_ONE_MAX:
        view, offset = memoryview(records), 0
        pieces: list[memoryview] = []
        for length in lengths.tolist():
            pieces.append(view[offset + 8 : offset + 28])
            offset += length
        return b"".join(pieces)
    return _gather(records, _starts(lengths) + 8, FEED_HEADER_DTYPE).tobytes()


def ids_of(records: Buffer, lengths: I64) -> I64:
    """Return the transaction IDs of the records."""
    return _gather(records, _starts(lengths), np.dtype(">i8")).astype(np.int64)


def req_ids_of(records: Buffer, lengths: I64) -> Structured:
    """Return the request IDs of the records as a structured array (`REQ_ID_DTYPE`)."""
    return _gather(records, _starts(lengths) + 8, REQ_ID_DTYPE)


def application_headers_of(records: Buffer, lengths: I64) -> I32:
    """Return the header that the application chose for each record."""
    return _gather(records, _starts(lengths) + 24, np.dtype(">i4")).astype(np.int32)


def record_crcs(records: Buffer, lengths: I64) -> bytes:
    """Return the CRC of each record, 4 big-endian bytes each: the input of `next_chain`."""
    return _trailers(records, lengths).tobytes()


def from_feed_headers(first: TransactionId, packed: Buffer) -> bytes:
    """Convert 20-byte feed headers to 28-byte record headers, with IDs from `first` on."""
    feed = np.frombuffer(packed, dtype=FEED_HEADER_DTYPE)
    headers = np.empty(feed.size, dtype=HEADER_DTYPE)
    headers["transaction_id"] = np.arange(first, first + feed.size, dtype=np.int64)
    headers["req_id"] = feed["req_id"]
    headers["header"] = feed["header"]
    return headers.tobytes()


def stamps_of(ids: I64, stamps: Sequence[tuple[int, int, int]]) -> I64:
    """Return the commit stamp of each ID; 0 for an ID without a stamp.

    `ids` are ascending. `stamps` is a list of (first ID, last ID, stamp), in ID order.
    """
    if not stamps:
        return np.zeros(ids.size, dtype=np.int64)
    first_ids, last_ids, stamps_ms = np.array(stamps, dtype=np.int64).T
    # Search the position of each stamp, not of each ID, because there are many more IDs.
    starts = np.maximum.accumulate(ids.searchsorted(first_ids))
    ends = np.minimum(ids.searchsorted(last_ids, side="right"), np.append(starts[1:], ids.size))
    bounds = np.zeros(2 * starts.size + 2, dtype=np.int64)
    bounds[1:-1:2] = starts
    bounds[2:-1:2] = np.maximum(ends, starts)
    bounds[-1] = ids.size
    stamp_between = np.zeros(bounds.size - 1, dtype=np.int64)  # even: 0, no stamp
    stamp_between[1::2] = stamps_ms
    return stamp_between.repeat(lengths_between(bounds))


# ---------------------------------------------------------------------------------------------
# checks


def verified_crcs(
    records: Buffer, lengths: I64, first: TransactionId, *, records_crc: int | None = None
) -> bytes | None:
    """Verify all records of a run; return `record_crcs`, or None if a record is wrong.

    Each record must have its ID (from `first` on), its length and its CRC. After None,
    `first_bad_record` and `first_gap` find the wrong record. The function makes one pass over the
    bytes. `records_crc` is the CRC of these bytes if the caller has already computed it; never pass
    a CRC that a sender states.
    """
    if lengths.size <= ONE_BY_ONE_MAX and len(records) <= ONE_BY_ONE_BYTES_MAX:
        return _verified_crcs_one_by_one(memoryview(records), lengths.tolist(), first)
    ends = lengths.cumsum()
    assert len(records) == ends[-1]
    prefixes = _gather(records, ends - lengths, PREFIX_DTYPE)
    if not (prefixes["length"] == lengths - RECORD_OVERHEAD_BYTES).all():
        return None
    ids = prefixes["head"]["transaction_id"]
    if not (ids == np.arange(first, first + lengths.size, dtype=np.int64)).all():
        return None
    trailers = _gather(records, ends - _TRAILER_BYTES, np.dtype(">u4"))
    whole_crc = crc32(records) if records_crc is None else records_crc
    # CRC-32 is linear: all records are intact if the CRC of the run is the one that the record CRCs
    # imply.
    return trailers.tobytes() if whole_crc == run_crc(trailers, lengths) else None


def _verified_crcs_one_by_one(records: memoryview, lengths: list[int], first: int) -> bytes | None:
    """Do the same as `verified_crcs` for few records, because arrays would be slower for them."""
    assert len(records) == sum(lengths)
    crcs: list[memoryview] = []
    start = 0
    for transaction_id, length in enumerate(lengths, first):
        end = start + length
        crc_at = end - _TRAILER_BYTES
        found_id, data_bytes = _ID_AND_LENGTH.unpack_from(records, start)
        if found_id != transaction_id or data_bytes != length - RECORD_OVERHEAD_BYTES:
            return None
        if crc32(records[start:crc_at]) != _CRC.unpack_from(records, crc_at)[0]:
            return None
        crcs.append(records[crc_at:end])
        start = end
    return b"".join(crcs)


def first_bad_record(records: Buffer, lengths: I64) -> int | None:
    """Return the index of the first record with a wrong CRC or length; None if all are right.

    The function computes one CRC over the whole run, and compares it with the CRC that follows from
    the CRCs in the records. If the two CRCs differ, the function checks each record separately.
    """
    assert len(records) == total_bytes(lengths)
    if lengths.size <= ONE_BY_ONE_MAX and len(records) <= ONE_BY_ONE_BYTES_MAX:
        return _first_bad_one_by_one(memoryview(records), lengths.tolist())
    data_lengths = _gather(records, _starts(lengths) + 28, np.dtype(">i4"))
    wrong_indexes = (data_lengths != lengths - RECORD_OVERHEAD_BYTES).nonzero()[0]
    checked_count = int(wrong_indexes[0]) if wrong_indexes.size else int(lengths.size)
    crcs = _trailers(records, lengths)
    if checked_count == lengths.size and crc32(records) == run_crc(crcs, lengths):
        return None
    offsets = offsets_of(lengths)
    view = memoryview(records)
    for index in range(checked_count):
        start, end = int(offsets[index]), int(offsets[index + 1])
        if crc32(view[start : end - _TRAILER_BYTES]) != int(crcs[index]):
            return index
    # CRC-32 is linear: if every record matched its own CRC, the whole run would have matched.
    assert checked_count < lengths.size
    return checked_count


def _first_bad_one_by_one(records: memoryview, lengths: list[int]) -> int | None:
    start = 0
    for index, length in enumerate(lengths):
        end = start + length
        crc_at = end - _TRAILER_BYTES
        (data_length,) = _LENGTH.unpack_from(records, start + 28)
        (crc,) = _CRC.unpack_from(records, crc_at)
        if data_length != length - RECORD_OVERHEAD_BYTES or crc32(records[start:crc_at]) != crc:
            return index
        start = end
    return None


def run_crc(crcs: npt.NDArray[np.generic], lengths: I64) -> int:
    """Return the CRC-32 of a whole run from the record CRCs, without reading the bytes again."""
    return crc32_of_run(crcs.astype(np.uint32), lengths)


def first_gap(records: Buffer, lengths: I64, first: TransactionId) -> int | None:
    """Return the index of the first record whose ID is not `first` + index; None if all match."""
    if lengths.size <= ONE_BY_ONE_MAX:
        return _first_gap_one_by_one(records, lengths.tolist(), first)
    ids = _gather(records, _starts(lengths), np.dtype(">i8"))
    wrong_indexes = (ids != np.arange(first, first + lengths.size, dtype=np.int64)).nonzero()[0]
    return int(wrong_indexes[0]) if wrong_indexes.size else None


def _first_gap_one_by_one(records: Buffer, lengths: list[int], first: int) -> int | None:
    start = 0
    for index, length in enumerate(lengths):
        (found_id,) = _ID.unpack_from(records, start)
        if found_id != first + index:
            return index
        start += length
    return None


# ---------------------------------------------------------------------------------------------
# encoding


def encode_record(
    transaction_id: int, req_id: ReqId, header: int, data: Buffer, data_crc: int
) -> bytes:
    """Encode one record as in a segment file. `batches.encode_records` encodes many at once."""
    prefix = RECORD_PREFIX.pack(transaction_id, req_id.to_bytes(), header, len(data), data_crc)
    return b"".join((prefix, data, crc32(data, crc32(prefix)).to_bytes(4, "big")))


def encode_prefixes(
    ids: I64, req_id: ReqId, rows: I64, headers: I32, *, lengths: I64, data_crcs: U32
) -> U8:
    """Return the 36 bytes before each record's data, as a (record count, 36) array.

    `req_id` is the request ID of row 0. `rows` has the row number of each record in the request,
    because a row keeps its sequence number if earlier rows are rejected. `lengths` are the lengths
    of the data in bytes.
    """
    assert ids.shape == rows.shape == headers.shape == lengths.shape == data_crcs.shape
    prefix_rows = np.empty(ids.size, dtype=PREFIX_DTYPE)
    head = prefix_rows["head"]
    head["transaction_id"] = ids
    request_ids = head["req_id"]
    request_ids["client_id"] = req_id.client_id
    request_ids["generation"] = req_id.generation
    request_ids["partition_id"] = req_id.partition_id
    request_ids["sequence"] = rows + req_id.sequence
    head["header"] = headers
    prefix_rows["length"] = lengths
    prefix_rows["data_crc"] = data_crcs
    return prefix_rows.view(np.uint8).reshape(ids.size, PREFIX_DTYPE.itemsize)


def prefix_crcs(prefix_rows: U8) -> U32:
    """Return the CRC-32 of each prefix. Columns that are equal in all prefixes cost nothing."""
    assert prefix_rows.shape[1] == PREFIX_DTYPE.itemsize
    return crc32_of_rows(prefix_rows)


def _starts(lengths: I64) -> I64:
    return lengths.cumsum() - lengths


def _trailers(records: Buffer, lengths: I64) -> npt.NDArray[np.generic]:
    return _gather(records, lengths.cumsum() - _TRAILER_BYTES, np.dtype(">u4"))


def _gather(records: Buffer, byte_offsets: I64, kind: np.dtype) -> npt.NDArray:  # type: ignore[type-arg]
    """Return the values of one dtype at given byte offsets of a buffer, with a single fancy index.

    The function views the buffer as overlapping values, one starting at each byte. The function
    copies structures as opaque bytes, because NumPy would copy structures field by field.
    """
    if byte_offsets.size == 0:
        return np.empty(0, dtype=kind)
    if kind.names is not None:
        return _gather(records, byte_offsets, np.dtype((np.void, kind.itemsize))).view(kind)
    window_count = len(records) - kind.itemsize + 1
    assert window_count > 0
    windows: npt.NDArray[np.generic] = np.ndarray(
        shape=(window_count,), dtype=kind, buffer=records, strides=(1,)
    )
    return windows[byte_offsets]
