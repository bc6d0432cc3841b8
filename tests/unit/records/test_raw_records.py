"""Tests of `waltz_core.records.raw_records`."""

import struct
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadFormat
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    FRAME_BYTES_MAX,
    RECORD_HEADER,
    RECORD_PREFIX,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)

# Two records that Waltz 0.13 wrote (docs/design/disk-format.md 4).
GOLDEN = bytes.fromhex(
    "0000000000000000000000010000000100000000000000020000000700000007154677bc68656c6c6f2d30"
    "9afdeea8"
    "0000000000000001000000010000000100000000000000030000000700000007753908d262757273742d30"
    "b77888b5"
)
GOLDEN_LENGTHS = np.array([47, 47])
REQ_ID = ReqId(ClientId(5), Generation(2), PartitionId(1), 100)


def record(transaction_id: int, data: bytes, *, sequence: int = 1, header: int = 0) -> bytes:
    identity = REQ_ID._replace(sequence=sequence).to_bytes()
    body = RECORD_PREFIX.pack(transaction_id, identity, header, len(data), 0)[:32]
    body += crc32(data).to_bytes(4, "big") + data
    return body + crc32(body).to_bytes(4, "big")


def run_of(rows: list[bytes], first: int = 0) -> tuple[bytes, raw_records.I64]:
    records = [record(first + i, row, sequence=i, header=-i) for i, row in enumerate(rows)]
    return b"".join(records), np.array([len(r) for r in records], dtype=np.int64)


def by_arrays() -> AbstractContextManager[int]:
    """Process few records with arrays, like many records."""
    return mock.patch.object(raw_records, "ONE_BY_ONE_MAX", 0)


datas = st.lists(st.binary(max_size=60), min_size=1, max_size=20)


def test_golden_records_are_intact_and_have_the_expected_values() -> None:
    assert raw_records.first_bad_record(GOLDEN, GOLDEN_LENGTHS) is None
    assert raw_records.first_gap(GOLDEN, GOLDEN_LENGTHS, TransactionId(0)) is None
    assert raw_records.ids_of(GOLDEN, GOLDEN_LENGTHS).tolist() == [0, 1]
    assert raw_records.application_headers_of(GOLDEN, GOLDEN_LENGTHS).tolist() == [7, 7]
    assert raw_records.req_ids_of(GOLDEN, GOLDEN_LENGTHS).tolist() == [(1, 1, 0, 2), (1, 1, 0, 3)]
    crcs = raw_records.record_crcs(GOLDEN, GOLDEN_LENGTHS)
    assert crcs == bytes.fromhex("9afdeea8b77888b5")
    assert raw_records.run_crc(np.frombuffer(crcs, ">u4"), GOLDEN_LENGTHS) == crc32(GOLDEN)


@given(datas)
def test_function_headers_of_returns_the_first_28_bytes_of_each_record(rows: list[bytes]) -> None:
    records, lengths = run_of(rows, first=7)
    starts = raw_records.offsets_of(lengths)[:-1].tolist()
    packed = raw_records.headers_of(records, lengths)
    assert packed == b"".join(records[s : s + 28] for s in starts)
    feed = raw_records.feed_headers_of(records, lengths)
    assert feed == b"".join(records[s + 8 : s + 28] for s in starts)
    with by_arrays():
        assert raw_records.feed_headers_of(records, lengths) == feed
    assert raw_records.from_feed_headers(TransactionId(7), feed) == packed
    assert RECORD_HEADER.unpack(packed[:28])[0] == 7


@given(datas, st.data())
def test_a_flipped_bit_is_found_in_its_record(rows: list[bytes], data: st.DataObject) -> None:
    records, lengths = run_of(rows)
    assert raw_records.first_bad_record(memoryview(records), lengths) is None
    with by_arrays():
        assert raw_records.first_bad_record(memoryview(records), lengths) is None
    position = data.draw(st.integers(0, len(records) - 1))
    damaged = bytearray(records)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    bad_record = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
    assert raw_records.first_bad_record(bytes(damaged), lengths) == bad_record
    with by_arrays():
        assert raw_records.first_bad_record(bytes(damaged), lengths) == bad_record


@given(datas, st.data())
def test_function_verified_crcs_returns_crcs_if_and_only_if_all_records_are_right(
    rows: list[bytes], data: st.DataObject
) -> None:
    """The combined check of an append must agree with the two functions that locate an error."""
    first = TransactionId(data.draw(st.integers(0, 5)))
    records, lengths = run_of(rows, first=data.draw(st.integers(0, 5)))
    changed = bytearray(records)
    for position in data.draw(st.lists(st.integers(0, len(records) - 1), max_size=2)):
        changed[position] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):  # a shifted boundary; with empty rows it may be valid
        border = data.draw(st.integers(0, lengths.size - 1))
        shift = min(data.draw(st.integers(0, 3)), int(lengths[border]) - 40)
        lengths = lengths.copy()
        lengths[border] -= shift
        lengths[(border + 1) % lengths.size] += shift
    run = bytes(changed)
    is_right = (
        raw_records.first_bad_record(run, lengths) is None
        and raw_records.first_gap(run, lengths, first) is None
    )
    expected = raw_records.record_crcs(run, lengths) if is_right else None
    assert raw_records.verified_crcs(memoryview(run), lengths, first) == expected
    with by_arrays():
        assert raw_records.verified_crcs(memoryview(run), lengths, first) == expected
        known = raw_records.verified_crcs(run, lengths, first, records_crc=crc32(run))
        assert known == expected


def test_a_wrong_stated_length_is_detected_despite_a_valid_crc() -> None:
    """A reader of the file trusts the stated length, and would not find the next record."""
    records, lengths = run_of([b"first", b"other", b"third"])
    start, end = int(lengths[0]), int(lengths[:2].sum())
    for stated in (4, 6):
        body = bytearray(records[start : end - 4])
        offset = RECORD_PREFIX.size - 8
        assert int.from_bytes(body[offset : offset + 4], "big") == 5
        body[offset : offset + 4] = stated.to_bytes(4, "big")
        forged = records[:start] + bytes(body) + crc32(body).to_bytes(4, "big") + records[end:]
        assert raw_records.first_bad_record(forged, lengths) == 1
        assert raw_records.verified_crcs(forged, lengths, TransactionId(0)) is None
        with by_arrays():
            assert raw_records.first_bad_record(forged, lengths) == 1
            assert raw_records.verified_crcs(forged, lengths, TransactionId(0)) is None


def test_function_verified_crcs_returns_none_for_the_crc_of_other_records() -> None:
    records, lengths = run_of([b"aa", b"bb"] * raw_records.ONE_BY_ONE_MAX)
    none = raw_records.verified_crcs(
        records, lengths, TransactionId(0), records_crc=crc32(b"other")
    )
    assert none is None


def test_the_first_of_several_bad_records_is_returned() -> None:
    records, lengths = run_of([b"a" * 9, b"b", b"c", b"d"])
    damaged = bytearray(records)
    damaged[-1] ^= 1
    damaged[60] ^= 1  # in the second record
    assert raw_records.first_bad_record(bytes(damaged), lengths) == 1


def test_wrong_record_lengths_are_found() -> None:
    """The bytes are intact, but the run's list of lengths differs from the records' lengths."""
    records, lengths = run_of([b"aa", b"bb"])
    shifted = lengths + np.array([1, -1])
    assert raw_records.first_bad_record(records, shifted) == 0


def test_an_empty_buffer_has_no_records_and_no_faults() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert raw_records.first_bad_record(b"", none) is None
    assert raw_records.first_gap(b"", none, TransactionId(0)) is None
    assert raw_records.headers_of(b"", none) == b""
    assert raw_records.feed_headers_of(b"", none) == b""
    assert raw_records.record_crcs(b"", none) == b""
    assert raw_records.ids_of(b"", none).tolist() == []
    assert raw_records.offsets_of(none).tolist() == [0]
    assert raw_records.lengths_from_wire(b"", 0).tolist() == []


def test_function_first_gap_returns_the_first_record_with_an_unexpected_id() -> None:
    records = record(4, b"a") + record(5, b"b") + record(7, b"c")
    lengths = np.array([41, 41, 41])
    assert raw_records.first_gap(records, lengths, TransactionId(4)) == 2
    assert raw_records.first_gap(records, lengths, TransactionId(3)) == 0


@given(st.lists(st.integers(40, FRAME_BYTES_MAX), max_size=9))
def test_lengths_round_trip(values: list[int]) -> None:
    packed = raw_records.lengths_to_wire(np.array(values, dtype=np.int64))
    assert packed == struct.pack(f">{len(values)}i", *values)
    assert raw_records.lengths_from_wire(packed, sum(values)).tolist() == values


def test_a_record_of_waltz_0_13_may_be_larger_than_one_of_this_version() -> None:
    """If such a record were rejected, no client could read it, and no replica could copy it."""
    length = raw_records.RECORD_BYTES_MAX + 1
    packed = struct.pack(">i", length)
    assert raw_records.lengths_from_wire(packed, length).tolist() == [length]
    assert raw_records.lengths_from_wire(packed * 40, 40 * length).tolist() == [length] * 40


@pytest.mark.parametrize(
    ("values", "total", "problem"),
    [
        ([47, 39], 86, "at least 40"),
        ([47, -1], 46, "at least 40"),
        ([FRAME_BYTES_MAX + 1], FRAME_BYTES_MAX + 1, "at most"),
        ([47, 47], 95, "94, but the records have 95"),
    ],
)
def test_impossible_lengths_are_rejected(values: list[int], total: int, problem: str) -> None:
    packed = struct.pack(f">{len(values)}i", *values)
    with pytest.raises(BadFormat, match=problem):
        raw_records.lengths_from_wire(packed, total)


@given(st.binary(max_size=64), st.integers(0, 1 << 40))
def test_arbitrary_bytes_decode_to_lengths_or_raise_bad_format(packed: bytes, total: int) -> None:
    try:
        lengths = raw_records.lengths_from_wire(packed, total)
    except BadFormat:
        return
    assert int(lengths.sum()) == total


@given(datas, st.data())
def test_function_slice_records_returns_the_chosen_records_and_lengths(
    rows: list[bytes], data: st.DataObject
) -> None:
    records, lengths = run_of(rows)
    skip = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - skip))
    part, part_lengths = raw_records.slice_records(records, lengths, skip=skip, count=count)
    expected = [record(i, rows[i], sequence=i, header=-i) for i in range(skip, skip + count)]
    assert bytes(part) == b"".join(expected)
    assert part_lengths.tolist() == [len(r) for r in expected]


@pytest.mark.parametrize(
    ("bytes_max", "count"), [(0, 1), (49, 1), (50, 1), (109, 1), (110, 2), (169, 2), (999, 3)]
)
def test_function_count_within_counts_at_least_one_record(bytes_max: int, count: int) -> None:
    assert raw_records.count_within(np.array([50, 60, 70]), bytes_max) == count


@given(
    st.sets(st.integers(0, 30)),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda each: each[0]),
)
def test_commit_stamps_are_looked_up_by_id(chosen: set[int], runs: list[tuple[int, int]]) -> None:
    stamps = [(first, last, 100 + first) for first, last in sorted(runs)]
    expected = []
    for each in sorted(chosen):
        started_runs = [run for run in stamps if run[0] <= each]
        expected.append(started_runs[-1][2] if started_runs and each <= started_runs[-1][1] else 0)
    ids = np.array(sorted(chosen), dtype=np.int64)
    assert raw_records.stamps_of(ids, stamps).tolist() == expected


def test_unordered_stamps_raise_no_error() -> None:
    ids = np.arange(9)
    assert raw_records.stamps_of(ids, [(6, 7, 1), (2, 3, 2), (0, 8, 3)]).size == ids.size


def test_prefixes_have_the_sequence_number_of_their_row() -> None:
    prefixes = raw_records.encode_prefixes(
        np.array([8, 9]),
        REQ_ID,
        np.array([0, 2]),
        np.array([3, -4], dtype=np.int32),
        lengths=np.array([2, 1]),
        data_crcs=np.array([crc32(b"ab"), crc32(b"c")], dtype=np.uint32),
    )
    expected = [
        record(8, b"ab", sequence=100, header=3)[:36],
        record(9, b"c", sequence=102, header=-4)[:36],
    ]
    assert [row.tobytes() for row in prefixes] == expected
    assert raw_records.prefix_crcs(prefixes).tolist() == [crc32(row) for row in expected]
