"""The bytes of Confluent's wire format, as documented by Confluent."""

import pytest

from waltz_core.errors import BadFormat
from waltz_core.schemas.schema_prefix import (
    encode_message_indexes,
    prefix_of,
    split_message_indexes,
    split_prefix,
)


@pytest.mark.parametrize(
    ("schema_id", "data"),
    [
        (0, "0000000000"),
        (1, "0000000001"),
        (0x01020304, "0001020304"),
        ((1 << 31) - 1, "007fffffff"),
    ],
)
def test_the_prefix_is_a_zero_and_the_schema_id_big_endian(schema_id, data):
    assert prefix_of(schema_id).hex() == data
    assert split_prefix(bytes.fromhex(data) + b"rest") == (schema_id, b"rest")


@pytest.mark.parametrize(
    ("path", "data"),
    [((0,), "00"), ((1,), "0202"), ((1, 0), "040200"), ((2, 0, 70), "0604008c01")],
)
def test_message_indexes_are_zigzag_varints_with_one_byte_for_the_first_type(path, data):
    assert encode_message_indexes(path).hex() == data
    assert split_message_indexes(bytes.fromhex(data) + b"rest") == (path, b"rest")


def test_the_long_form_of_the_first_message_index_is_accepted():
    assert split_message_indexes(b"\x02\x00rest") == ((0,), b"rest")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "at least 5 bytes, found 0"),
        (b"\0\0\0\1", "at least 5 bytes, found 4"),
        (b"\x01\0\0\0\1x", "begins with byte 0x00, found 0x01.*encrypted"),
        (b'{"id": 1}', "found 0x7b"),
        (b"\0\x80\0\0\0", "schema ID up to 2147483647, found 2147483648"),
    ],
)
def test_an_unknown_prefix_is_an_error(data, text):
    with pytest.raises(BadFormat, match=text):
        split_prefix(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "truncated"),
        (b"\x04\x02", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x80\x80\x80\x80\x01", "over 5 bytes"),
        (b"\x03", "1 to 32 message indexes, found -2"),
        (b"\x80\x01", "1 to 32 message indexes, found 64"),
        (b"\x02\x01", "from 0, found -1"),
    ],
)
def test_damaged_message_indexes_are_an_error(data, text):
    with pytest.raises(BadFormat, match=text):
        split_message_indexes(data)
