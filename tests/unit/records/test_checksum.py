"""Tests of `waltz_core.records.checksum`, compared with the package crcmod."""

import crcmod.predefined
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.records import checksum

oracle = crcmod.predefined.mkCrcFun("crc-32")
runs = st.lists(st.binary(max_size=300), max_size=40)


def crcs_of(rows: list[bytes]) -> checksum.U32:
    return np.array([oracle(row) for row in rows], dtype=np.uint32)


def lengths_of(rows: list[bytes]) -> checksum.I64:
    return np.array([len(row) for row in rows], dtype=np.int64)


@given(st.binary(max_size=500), st.binary(max_size=500))
def test_crc32_equals_the_crc_of_zlib(first: bytes, second: bytes) -> None:
    assert checksum.crc32(first) == oracle(first)
    assert checksum.crc32(second, checksum.crc32(first)) == oracle(first + second)


@given(st.binary(max_size=500), st.binary(max_size=5000))
def test_function_combine_returns_the_crc_of_two_joined_byte_strings(
    first: bytes, second: bytes
) -> None:
    assert checksum.combine(oracle(first), oracle(second), len(second)) == oracle(first + second)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4095, 4096, 4097, 262_144, 1 << 24])
def test_combine_is_correct_for_lengths_around_powers_of_its_base(length: int) -> None:
    second = bytes(length)
    joined = checksum.crc32(second, checksum.crc32(b"left"))
    assert checksum.combine(checksum.crc32(b"left"), checksum.crc32(second), length) == joined
    many = checksum.combine_many(
        np.array([oracle(b"left")] * 2, dtype=np.uint32),
        np.array([checksum.crc32(second), oracle(b"x")], dtype=np.uint32),
        np.array([length, 1]),
    )
    assert many.tolist() == [joined, oracle(b"leftx")]


@given(runs, st.binary(min_size=1, max_size=40))
def test_functions_combine_many_and_combine_agree_for_each_pair(
    rows: list[bytes], head: bytes
) -> None:
    heads = np.full(len(rows), oracle(head), dtype=np.uint32)
    joined = checksum.combine_many(heads, crcs_of(rows), lengths_of(rows))
    assert joined.tolist() == [oracle(head + row) for row in rows]


@given(st.lists(st.binary(min_size=7, max_size=7), max_size=20))
def test_function_combine_many_accepts_one_length_for_all_pairs(rows: list[bytes]) -> None:
    heads = np.full(len(rows), oracle(b"head"), dtype=np.uint32)
    expected = [oracle(b"head" + row) for row in rows]
    assert checksum.combine_many(heads, crcs_of(rows), 7).tolist() == expected
    assert checksum.combine_many(heads, crcs_of(rows), lengths_of(rows)).tolist() == expected


def with_trailers(rows: list[bytes]) -> list[bytes]:
    return [row + oracle(row).to_bytes(4, "big") for row in rows]


@given(runs)
def test_function_crc32_of_run_returns_the_crc_of_all_bytes_of_the_rows(rows: list[bytes]) -> None:
    whole = with_trailers(rows)
    assert checksum.crc32_of_run(crcs_of(rows), lengths_of(whole)) == oracle(b"".join(whole))


@pytest.mark.parametrize("last", [1, 300_000])
def test_function_crc32_of_run_supports_more_bytes_than_the_power_table(last: int) -> None:
    sizes = [3_000_000, 5, 600_000, checksum._RUN_BYTES - 600_009, 0, 1_048_572, 17, last]
    rows = [bytes([size % 251]) * size for size in sizes]
    crcs = np.array([checksum.crc32(row) for row in rows], dtype=np.uint32)
    whole = [row + int(crc).to_bytes(4, "big") for row, crc in zip(rows, crcs, strict=True)]
    expected = checksum.crc32(b"".join(whole))
    assert checksum.crc32_of_run(crcs, lengths_of(whole)) == expected


def test_function_crc32_of_run_detects_two_exchanged_rows() -> None:
    rows = [b"one", b"two", b"six"]
    lengths = lengths_of(with_trailers(rows))
    assert checksum.crc32_of_run(crcs_of(rows), lengths) != checksum.crc32_of_run(
        crcs_of(rows[::-1]), lengths
    )


@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n))))
def test_crc32_of_rows_equals_crc32_for_each_row(rows: list[bytes]) -> None:
    width = len(rows[0]) if rows else 1
    matrix = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), width)
    assert checksum.crc32_of_rows(matrix).tolist() == [oracle(row) for row in rows]


def test_precomputed_checksum_tables_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        checksum._shift_tables(0)[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        checksum._row_tables(4)[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        checksum._powers()[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        checksum._trailer_products()[0] = 1


@pytest.mark.parametrize("length", [-1, checksum.LENGTH_MAX + 1])
def test_impossible_lengths_raise_an_assertion_error(length: int) -> None:
    one = np.array([1], dtype=np.uint32)
    with pytest.raises(AssertionError):
        checksum.combine(1, 1, length)
    with pytest.raises(AssertionError):
        checksum.shift_many(one, length)
    with pytest.raises(AssertionError):
        checksum.shift_many(np.array([1, 1], dtype=np.uint32), np.array([length, 0]))
