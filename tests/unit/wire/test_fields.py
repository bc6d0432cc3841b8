"""The byte layout of each kind of field, and rejected bytes."""

import struct
import zlib

import pytest

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.record import LineageEntry, Record, ReqId
from waltz_core.wire.fields import FIXED_FORMATS, VARIABLE_FORMATS, FieldWriter
from waltz_core.wire.messages import ENTRIES_MAX, TEXT_BYTES_MAX, FieldKind

REQ_ID = ReqId(1, 2, 3, 4)
REQ_BYTES = struct.pack(">iiii", 1, 2, 3, 4)
RECORD = Record(7, REQ_ID, -5, b"abc")
RECORD_BYTES = (
    struct.pack(">q", 7)
    + REQ_BYTES
    + struct.pack(">ii", -5, 3)
    + b"abc"
    + struct.pack(">I", zlib.crc32(b"abc"))
)
ENTRY = LineageEntry(1, 2, 3, 4, b"0123456789abcdef")
CRC_BYTES = struct.pack(">I", zlib.crc32(b"abc"))


def count(number):
    return struct.pack(">i", number)


LAYOUTS = [
    (FieldKind.BLOB, b"ab", count(2) + b"ab"),
    (FieldKind.TEXT, "ä", count(2) + b"\xc3\xa4"),
    (FieldKind.TEXT_OR_NULL, None, count(-1)),
    (FieldKind.TEXT_OR_NULL, "", count(0)),
    (FieldKind.INT32S, (7, -8), count(2) + count(7) + count(-8)),
    (FieldKind.PACKED_INT32S, count(7), count(1) + count(7)),
    (FieldKind.PACKED_INT64S, bytes(16), count(2) + bytes(16)),
    (FieldKind.TEXTS, ("a", ""), count(2) + count(1) + b"a" + count(0)),
    (FieldKind.LINEAGE, (ENTRY,), count(1) + struct.pack(">qqqq", 1, 2, 3, 4) + ENTRY.chain),
    (FieldKind.RECORDS, (RECORD,), count(1) + RECORD_BYTES),
    (FieldKind.TEXT_BOOL_MAP, (("a", True),), count(1) + count(1) + b"a\1"),
    (FieldKind.INT32_BOOL_MAP, ((9, False),), count(1) + count(9) + b"\0"),
    (FieldKind.DATA_OR_ERROR, (b"abc", None), b"\1" + count(3) + b"abc" + CRC_BYTES),
    (FieldKind.DATA_OR_ERROR, (None, None), b"\0" + count(-1)),
    (FieldKind.DATA_OR_ERROR, (None, "no"), b"\0" + count(2) + b"no"),
    (
        FieldKind.STACK,
        (("C", "m", None, -2),),
        count(1) + count(1) + b"C" + count(1) + b"m" + count(-1) + count(-2),
    ),
]


def put(kind, value):
    out = FieldWriter()
    VARIABLE_FORMATS[kind][0](value, out)
    return b"".join(out.finish())


def read(kind, data):
    values = []
    end = VARIABLE_FORMATS[kind][1](memoryview(data), 0, values)
    assert end == len(data)
    (value,) = values
    return value


@pytest.mark.parametrize(("kind", "value", "data"), LAYOUTS)
def test_a_value_is_encoded_as_in_the_table(kind, value, data):
    assert put(kind, value) == data
    assert read(kind, data) == value


def test_every_kind_of_variable_size_is_tested():
    assert {kind for kind, _, _ in LAYOUTS} == set(VARIABLE_FORMATS)


@pytest.mark.parametrize(("kind", "value", "data"), LAYOUTS)
def test_a_value_that_is_cut_short_is_rejected(kind, value, data):
    for size in range(len(data)):
        with pytest.raises((RemoteProtocolError, struct.error)):
            VARIABLE_FORMATS[kind][1](memoryview(data[:size]), 0, [])


@pytest.mark.parametrize("kind", sorted(set(VARIABLE_FORMATS), key=lambda kind: kind.name))
@pytest.mark.parametrize("number", [2**31 - 1, 2**24])
def test_a_count_that_does_not_fit_the_remaining_bytes_is_rejected(kind, number):
    data = (b"\1" if kind is FieldKind.DATA_OR_ERROR else b"") + count(number)
    with pytest.raises((RemoteProtocolError, struct.error)):
        VARIABLE_FORMATS[kind][1](memoryview(data + bytes(3)), 0, [])


@pytest.mark.parametrize("number", [-1, -(2**31)])
def test_a_negative_count_is_null_only_where_null_is_allowed(number):
    assert read(FieldKind.TEXT_OR_NULL, count(number)) is None
    for kind in (FieldKind.BLOB, FieldKind.TEXT, FieldKind.INT32S, FieldKind.LINEAGE):
        with pytest.raises(RemoteProtocolError, match=r"count -\d+ at byte 0 does not fit the 0"):
            VARIABLE_FORMATS[kind][1](memoryview(count(number)), 0, [])


def test_too_many_entries_are_rejected_by_the_encoder_and_the_decoder():
    with pytest.raises(LocalProtocolError, match="at most 65536 entries"):
        put(FieldKind.TEXTS, ("",) * (ENTRIES_MAX + 1))
    data = count(ENTRIES_MAX + 1) + bytes(4 * (ENTRIES_MAX + 1))
    with pytest.raises(RemoteProtocolError, match="at most 65536 entries"):
        read(FieldKind.TEXTS, data)
    assert len(read(FieldKind.TEXTS, count(ENTRIES_MAX) + bytes(4 * ENTRIES_MAX))) == ENTRIES_MAX


def test_a_text_with_invalid_utf8_or_over_the_length_limit_is_rejected():
    with pytest.raises(UnicodeDecodeError):
        read(FieldKind.TEXT, count(1) + b"\xff")
    with pytest.raises(RemoteProtocolError, match="a text of at most"):
        read(FieldKind.TEXT, count(TEXT_BYTES_MAX + 1) + bytes(TEXT_BYTES_MAX + 1))


def test_a_record_with_a_wrong_crc_is_rejected():
    wrong = bytearray(RECORD_BYTES)
    wrong[-5] ^= 1
    with pytest.raises(RemoteProtocolError, match="CRC"):
        read(FieldKind.RECORDS, count(1) + bytes(wrong))


def test_packed_numbers_are_decoded_without_a_copy_and_partial_items_are_rejected():
    with pytest.raises(LocalProtocolError, match="items of 8 bytes, found 9"):
        put(FieldKind.PACKED_INT64S, bytes(9))
    data = count(2) + bytes(16)
    found = read(FieldKind.PACKED_INT64S, data)
    assert isinstance(found, memoryview)
    assert found.obj is data


def test_small_bytes_are_joined_and_large_bytes_stay_separate():
    out = FieldWriter()
    large = bytes(5000)
    out.put_bytes(b"a")
    out.put_bytes(large)
    out.put_bytes(b"b")
    out.put_bytes(b"c")
    buffers = out.finish()
    assert buffers == [b"a", large, b"bc"]
    assert buffers[1] is large
    assert FieldWriter().finish() == [b""]


def test_an_id_of_another_length_than_16_bytes_is_rejected():
    to_wire = FIXED_FORMATS[FieldKind.RAW16].to_wire
    assert to_wire(memoryview(bytes(16))) == bytes(16)
    with pytest.raises(LocalProtocolError, match="expected 16 bytes, found 15"):
        to_wire(bytes(15))
