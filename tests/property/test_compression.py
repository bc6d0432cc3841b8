"""Compressed payloads survive a round trip; arbitrary bytes give a value or a typed error."""

import struct
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_core.client import BYTES, JSON, MSGPACK, Zstd
from waltz_core.records.record import TRANSACTION_BYTES_MAX

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
)
# Bytes that compress well, and bytes that do not.
datas = st.binary(max_size=500) | st.builds(
    lambda part, times: part * times, st.binary(max_size=20), st.integers(0, 500)
)
repetitive_datas = st.builds(
    lambda part, times: part * times, st.binary(min_size=1, max_size=20), st.integers(101, 500)
)


@given(values, st.sampled_from([MSGPACK, JSON]), st.integers(1, 22), st.integers(0, 300))
def test_every_value_round_trips(value, inner, level, minimum_bytes):
    packed = Zstd(inner, level=level, minimum_bytes=minimum_bytes).serialize(value)
    # A reader needs neither the level nor the minimum size.
    assert Zstd(inner).deserialize(packed) == value


@given(datas, st.integers(0, 300))
def test_a_payload_names_its_codec_and_grows_by_two_bytes_at_most(data, minimum_bytes):
    packed = Zstd(BYTES, minimum_bytes=minimum_bytes).serialize(data)
    assert packed[0] == 0xC1
    assert packed[1] in (0, 1)
    assert len(packed) <= len(data) + 2
    if len(data) < minimum_bytes:
        assert packed == b"\xc1\x00" + data
    assert Zstd(BYTES).deserialize(packed) == data


zstd = pa.Codec("zstd")
framed = st.builds(
    lambda size, data: b"\xc1\x01" + struct.pack(">I", size) + data,
    st.integers(0, 2**32 - 1) | st.integers(0, 600),
    st.binary(max_size=100) | datas.map(lambda data: zstd.compress(data, asbytes=True)),
)


@given(st.binary(max_size=100) | framed | st.binary().map(lambda rest: b"\xc1" + rest))
def test_any_bytes_decode_to_a_value_or_raise_bad_format(data):
    try:
        value = Zstd(BYTES).deserialize(data)
    except errors.BadFormat:
        return
    assert len(value) <= TRANSACTION_BYTES_MAX
    assert data[1] == 0 or zstd.decompress(data[6:], len(value), asbytes=True) == value


@given(repetitive_datas, st.data())
def test_a_truncated_payload_is_reported(data, drawn):
    packed = Zstd(BYTES, minimum_bytes=0).serialize(data)
    assert packed[1] == 1, "compressed"
    cut = drawn.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(errors.BadFormat):
        Zstd(BYTES).deserialize(packed[:cut])


def test_payloads_written_without_compression_are_reported():
    for inner, value in ((MSGPACK, {"a": [1]}), (JSON, {"a": [1]}), (BYTES, b"\x00"), (BYTES, b"")):
        with pytest.raises(errors.BadFormat, match=r"written without compression\.Zstd"):
            Zstd(inner).deserialize(inner.serialize(value))


def test_a_payload_that_would_unpack_to_gigabytes_allocates_nothing():
    bomb = zstd.compress(bytes(64 * 1024 * 1024), asbytes=True)
    assert len(bomb) < 10_000
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        for claimed in (64 * 1024 * 1024, 2**32 - 1, TRANSACTION_BYTES_MAX + 1, 0):
            with pytest.raises(errors.BadFormat, match="uncompressed size"):
                Zstd(BYTES).deserialize(b"\xc1\x01" + struct.pack(">I", claimed) + bomb)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        with pytest.raises(errors.BadFormat):
            Zstd(BYTES).deserialize(b"\xc1\x01" + struct.pack(">I", 1000) + bomb)
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() == before


def test_an_invalid_level_or_a_too_large_payload_is_reported():
    with pytest.raises(errors.BadRequest, match="1 to 22, found 23"):
        Zstd(BYTES, level=23)
    with pytest.raises(errors.TooLarge, match="before compression"):
        Zstd(BYTES).serialize(bytes(TRANSACTION_BYTES_MAX + 1))
    largest = bytes(TRANSACTION_BYTES_MAX)
    assert Zstd(BYTES).deserialize(Zstd(BYTES).serialize(largest)) == largest
