"""Payloads as text for display: every format, and hostile bytes."""

import base64
import json
import os
import struct
import time
import tracemalloc

import msgpack
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waltz_core.client import BYTES, JSON, MSGPACK, Zstd
from waltz_core.encryption.envelopes import ENVELOPE_OVERHEAD_BYTES, Encryption
from waltz_core.encryption.keys import KeyCache
from waltz_core.gateway.console.message_pack_text import DEPTH_MAX
from waltz_core.gateway.console.payload_text import JSON_DEPTH_MAX, PayloadText, decode_payload
from waltz_core.schemas.schema_prefix import prefix_of

LIMIT = 16 * 1024
MIB = 1024 * 1024


def decode(data, bytes_max=LIMIT):
    """Decode a payload, and check the properties of every decoded payload."""
    decoded = decode_payload(data, bytes_max)
    assert len(decoded.text.encode()) <= bytes_max
    assert type(decoded.is_shortened) is bool
    return decoded


def show(data, bytes_max=LIMIT):
    """Return format and text of a payload that is shown completely."""
    decoded = decode(data, bytes_max)
    assert not decoded.is_shortened
    return decoded.format, decoded.text


def unpack(data):
    """Return the value of a MessagePack payload, as the page parses it."""
    name, text = show(data)
    assert name == "messagepack"
    return json.loads(text)


# --- the simple formats


def test_an_empty_payload_has_no_text():
    assert show(b"") == ("empty", "")


@pytest.mark.parametrize(
    "text",
    [
        '{"id":12345678901234567890123456789,"ratio":0.10000000000000000000001}',
        ' [1, 2,\n\t{"a": null}]\n',
        '"a text"',
        "17",
        "-1e999",
        '"\\ud800 is half of a character"',
        '{"line":"\u2028","nul":"\\u0000"}',
        '{"a":1,"a":2}',
        "9" * 5000,
        "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX,
        '["' + "[" * 1000 + '\\"]"]',
    ],
)
def test_json_is_shown_unchanged(text):
    assert show(text.encode()) == ("json", text)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "NaN",
        "[Infinity]",
        '{"a":1} {"b":2}',
        '{"a":1,}',
        "{'a': 1}",
        '["a\tb"]',
        "\ufeff{}",
        "[" * (JSON_DEPTH_MAX + 1) + "]" * (JSON_DEPTH_MAX + 1),
        "[" * 5000,
        '"' + '\\"' * 5000,
        "line 1\r\nline 2\u2028line 3",
        "Grüße 你好 🙂",
        "ܐܒܓ",  # in MessagePack, its first byte begins an array
        "ߐߑߒ",  # or a map
        "<script>alert(1)</script>",
    ],
)
def test_other_text_is_shown_unchanged(text):
    assert show(text.encode()) == ("text", text)


@pytest.mark.parametrize(
    "data",
    [
        b"a\x00b",
        b"\x1b[31mred",
        b"a\x7f",
        "a\u0085b".encode(),
        b"a\x0b",
        b"\x07",
        b"\xa5hello",  # a short text in MessagePack
        b"\xff\xfe",
        b"\xc3(",
        b"\xed\xa0\x80",  # a surrogate
        b"\xc0\x80",  # an overlong NUL
        b"t\xe9",
        "text".encode("utf-16"),
        b"\xac\xed\x00\x05t\x00\x01a",  # a serialized Java object
    ],
)
def test_binary_payloads_are_dumped(data):
    name, text = show(data)
    assert name == "binary"
    assert bytes.fromhex(text[10:57]) == data


def test_a_dump_has_16_bytes_in_a_line():
    name, text = show(b"\xffhello world \x00\n<and more>")
    assert name == "binary"
    assert text.split("\n") == [
        "00000000  ff 68 65 6c 6c 6f 20 77 6f 72 6c 64 20 00 0a 3c  .hello world ..<",
        "00000010  61 6e 64 20 6d 6f 72 65 3e                       and more>",
    ]


# --- envelopes, schemas and compression


def encrypt(payload, key_id="customer-7"):
    keys = KeyCache(lambda _key_id: bytes(32), "test")
    return Encryption(keys).encrypt(payload, partition=1, header=2, key_id=key_id)


def test_an_envelope_is_described_without_its_key():
    name, text = show(encrypt(b'{"secret":1}'))
    size = 12 + ENVELOPE_OVERHEAD_BYTES + len("customer-7")
    assert name == "encrypted"
    assert text == f"key ID: customer-7\npayload: 12 bytes\nenvelope: {size} bytes"


@pytest.mark.parametrize("size", range(4, 4 + 1 + 10 + 16 + 4 + 16))
def test_a_truncated_envelope_is_damaged(size):
    name, text = show(encrypt(b"")[:size])
    assert (name, text.split("\n")[0]) == ("encrypted", "damaged envelope of an encrypted payload")


def test_the_key_id_of_a_hostile_envelope_is_not_shown():
    data = encrypt(b"x", "key")
    name, text = show(data.replace(b"key", b"\n\x00<"))
    assert (name, text.split("\n")[0]) == ("encrypted", "damaged envelope of an encrypted payload")


def test_a_payload_with_a_schema_has_the_schema_id_and_a_dump():
    assert show(prefix_of(12) + b"\x02\x08ring") == (
        "schema",
        "schema 12\n00000005  02 08 72 69 6e 67                                ..ring",
    )
    assert show(prefix_of(12)) == ("schema", "schema 12")


@pytest.mark.parametrize(
    "data", [b"\x00", b"\x00\x00\x00\x01", struct.pack(">q", 7), b"\x00\xff\xff\xff\xff1"]
)
def test_a_leading_zero_byte_alone_is_not_a_schema_prefix(data):
    assert show(data)[0] == "binary"


def test_compressed_payloads_have_the_format_of_their_content():
    value = {"text": "a" * 1000}
    assert show(Zstd(JSON).serialize(value)) == ("json", JSON.serialize(value).decode())
    assert unpack(Zstd(MSGPACK).serialize(value)) == value
    assert show(Zstd(JSON).serialize([1])) == ("json", "[1]")  # too small for zstd
    assert show(Zstd(BYTES).serialize(b"")) == ("empty", "")
    assert show(Zstd(BYTES).serialize(prefix_of(3) + bytes(300)))[0] == "schema"


def test_a_damaged_compressed_payload_is_dumped():
    data = Zstd(BYTES).serialize(b"a" * 1000)
    for damaged in (data[:-1], data[:5], b"\xc1", b"\xc1\x07abc", data[:2] + bytes(4) + data[6:]):
        name, text = show(damaged)
        title, dump = text.split("\n", 1)
        assert (name, title) == ("compressed", "zstd payload that cannot be decompressed")
        assert dump.startswith("00000000  c1")


def test_only_the_outer_level_of_compression_is_decompressed():
    inner = Zstd(BYTES, minimum_bytes=0).serialize(b"a" * 1000)
    assert show(Zstd(BYTES).serialize(inner))[0] == "binary"


@pytest.mark.parametrize("stated_bytes", [1, 1000, 4 * MIB, 2**32 - 1])
def test_a_decompression_bomb_uses_little_memory(stated_bytes):
    bomb = pa.Codec("zstd").compress(bytes(512 * MIB), asbytes=True)
    tracemalloc.start()
    before_bytes = pa.total_allocated_bytes()
    decoded = decode(b"\xc1\x01" + struct.pack(">I", stated_bytes) + bomb)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert decoded.format == "compressed"
    assert peak_bytes < 8 * MIB
    assert pa.total_allocated_bytes() - before_bytes < 8 * MIB


# --- MessagePack


def test_a_map_is_shown_as_json():
    value = {"id": 2**64 - 1, "low": -(2**63), "price": 1.5, "ok": True, "none": None, "ä": ["x"]}
    name, text = show(MSGPACK.serialize(value))
    assert name == "messagepack"
    assert text == (
        '{"id":18446744073709551615,"low":-9223372036854775808,"price":1.5,"ok":true,'
        '"none":null,"ä":["x"]}'
    )


def test_values_without_a_json_type_are_marked():
    times = [msgpack.Timestamp(1764496800), msgpack.Timestamp(1764496800, 120_000_000)]
    times += [msgpack.Timestamp(-1, 1), msgpack.Timestamp(2**60)]
    floats = [float("nan"), float("inf"), float("-inf")]
    unpacked = unpack(
        MSGPACK.serialize(
            {"bytes": b"\x00\xff", "times": times, "other": msgpack.ExtType(5, b"abc"), "f": floats}
        )
    )
    assert unpacked["bytes"] == {"$bytes": "AP8="}
    assert unpacked["times"][:3] == [
        {"$timestamp": "2025-11-30T10:00:00Z"},
        {"$timestamp": "2025-11-30T10:00:00.12Z"},
        {"$timestamp": "1969-12-31T23:59:59.000000001Z"},
    ]
    assert unpacked["times"][3]["$extension"] == -1
    assert unpacked["other"] == {"$extension": 5, "$bytes": "YWJj"}
    assert unpacked["f"] == [{"$float": each} for each in ("NaN", "Infinity", "-Infinity")]


def test_maps_with_keys_other_than_strings_are_shown_completely():
    assert unpack(MSGPACK.serialize({7: "a", "7": "b"})) == {"$map": [[7, "a"], ["7", "b"]]}
    assert unpack(b"\x82\xa1a\x01\xa1a\x02") == {"$map": [["a", 1], ["a", 2]]}
    assert unpack(MSGPACK.serialize({b"k": 1, None: 2, True: 3})) == {
        "$map": [[{"$bytes": "aw=="}, 1], [None, 2], [True, 3]]
    }


@pytest.mark.parametrize("text", ["\u2028", "\x00\x1f", "🙂", '"\\', "</script>"])
def test_texts_in_messagepack_are_escaped_as_in_json(text):
    assert unpack(MSGPACK.serialize({text: text})) == {text: text}


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a",  # a value is missing
        b"\x91\x01\x01",  # more bytes follow
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff" + bytes(1000),
        b"\xdc\xff\xff" + bytes(1000),
        b"\x91\xdb\xff\xff\xff\xffabc",
        b"\x91\xc6\xff\xff\xff\xffabc",
        b"\x91\xc9\xff\xff\xff\xff\x01abc",
        b"\x91\xc1",
        b"\x91\xa1\xff",
        b"\x91\xa3\xed\xa0\x80",
        b"\x81\x90\x01",  # a key that is an array
        b"\x91" * (DEPTH_MAX + 1) + b"\x01",
        b"\x91" * 5000 + b"\x01",
        b"\xdc\x00\x01" * 5000 + b"\x01",
    ],
)
def test_invalid_or_hostile_messagepack_is_dumped(data):
    decoded = decode(data)
    assert decoded.format == "binary"


def test_the_deepest_messagepack_is_shown():
    assert unpack(b"\x91" * DEPTH_MAX + b"\x01")


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
)


@given(st.lists(plain_values) | st.dictionaries(st.text(), plain_values))
def test_plain_messagepack_values_are_shown_exactly(value):
    assert unpack(MSGPACK.serialize(value)) == value


@given(st.binary(max_size=60).map(lambda rest: b"\x93" + rest))
@example(b"\x93\x01\x02")
def test_every_payload_shown_as_messagepack_can_be_unpacked_by_package_msgpack(data):
    """The package msgpack accepts shown payloads, except texts and keys it cannot represent."""
    if decode(data).format == "messagepack":
        msgpack.unpackb(data, strict_map_key=False, timestamp=0)


# --- payloads over the limit


def test_truncated_json_is_shown_as_text():
    data = json.dumps(["ä" * 100] * 1000, ensure_ascii=False).encode()
    decoded = decode(data, 1001)
    assert (decoded.format, decoded.is_shortened) == ("text", True)
    assert data.decode().startswith(decoded.text)
    assert len(decoded.text.encode()) >= 998


@pytest.mark.parametrize("bytes_max", range(1, 9))
def test_text_is_truncated_between_characters(bytes_max):
    decoded = decode("ab🙂🙂🙂".encode(), bytes_max)
    assert (decoded.format, decoded.is_shortened) == ("text", True)
    assert decoded.text == "ab🙂🙂🙂".encode()[:bytes_max].decode(errors="ignore")


def test_text_that_ends_inside_of_a_character_is_dumped():
    assert decode("🙂".encode()[:-1]).format == "binary"


def test_a_long_array_is_truncated():
    decoded = decode(MSGPACK.serialize(list(range(100_000))), 1000)
    assert (decoded.format, decoded.is_shortened) == ("messagepack", True)
    assert decoded.text.startswith("[0,1,2,3,")
    assert len(decoded.text) > 800


def test_a_long_text_in_messagepack_is_truncated_between_characters():
    for size in range(200, 204):
        decoded = decode(MSGPACK.serialize({"a": "🙂" * 10_000, "b": b"x" * 100_000}), size)
        assert (decoded.format, decoded.is_shortened) == ("messagepack", True)
        assert decoded.text.startswith('{"a":"🙂🙂')


def test_a_long_dump_is_truncated_at_the_end_of_a_line():
    decoded = decode(b"\xff" * 10_000)
    assert (decoded.format, decoded.is_shortened) == ("binary", True)
    assert {len(line) for line in decoded.text.split("\n")} == {75}
    assert len(decoded.text) > LIMIT - 76


large_parts = [
    b"a",
    b"\xff",
    b"[",
    b'["',
    b'"\\',
    b'{"a":',
    b"1",
    b"\x91",
    b"\xdd\x03\xff\xff\x00",
    b"\x81\xa1a",
    b"\xc0",
    b"\xc1\x00",
    b"\xc1\x00[",
    b"\x00\x00\x00\x00\x01",
    b"WZE\x01",
    "🙂".encode(),
    b"\xdb\x03\xff\xff\x00",
]


@pytest.mark.parametrize("part", large_parts)
def test_a_payload_of_64_mib_takes_bounded_time_and_memory(part):
    data = part * (64 * MIB // len(part))
    began_s = time.process_time()
    decode(data)
    took_s = time.process_time() - began_s
    assert took_s < 1
    tracemalloc.start()
    decode(data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < len(data) + 4 * MIB  # a copy of what follows the mark of `Zstd`


@pytest.mark.parametrize("part", large_parts)
def test_payloads_just_within_the_limit_take_bounded_time(part):
    data = part * (LIMIT // len(part))
    began_s = time.process_time()
    decode(data)
    assert time.process_time() - began_s < 0.5


# --- any bytes

prefixes = st.sampled_from(
    [b"", b"WZE\x01", b"WZE\x01\x03key", b"\xc1\x00", b"\xc1\x01\x00\x00\x00\x09", b"\x00\x00"]
    + [bytes((code,)) for code in range(0x80, 0xA0)]
    + [bytes((code, 0, 2)) for code in range(0xC0, 0xE0)]
    + [b"\x92" + bytes((code,)) for code in range(0xC0, 0xE0)]
    + [b"[", b'{"', b'"\\u', "ä".encode()]
)


@given(prefixes, st.binary(max_size=300), st.integers(1, 400))
def test_any_bytes_are_shown_as_text(prefix, rest, bytes_max):
    decoded = decode(prefix + rest, bytes_max)
    assert isinstance(decoded, PayloadText)
    assert decoded == decode_payload(prefix + rest, bytes_max)
    json.loads(json.dumps(decoded))


@given(st.binary(max_size=2000), st.integers(1, 3000))
def test_any_compressed_bytes_are_shown_as_text(data, bytes_max):
    packed = Zstd(BYTES, minimum_bytes=0).serialize(data)
    decoded = decode(packed, bytes_max)
    if not data.startswith((b"WZE\x01", b"\xc1")):
        assert decoded == decode(data, bytes_max)


def test_random_bytes_are_shown_as_text():
    for size in (1, 5, 17, 5000):
        data = os.urandom(size)
        assert decode(data).text, base64.b64encode(data)
