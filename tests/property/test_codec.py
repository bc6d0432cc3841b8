"""Any message of any version round-trips; damaged bytes give a message or a typed error.

tests/fuzz tests the codec with arbitrary bytes.
"""

import dataclasses
from typing import get_type_hints

from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.record import LineageEntry, Record, RecordHeader, ReqId
from waltz_core.wire import codec, fields
from waltz_core.wire.connection import Connection, HelloReceived
from waltz_core.wire.messages import FieldKind, Hello, WireProtocol

int8 = st.integers(-(2**7), 2**7 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
raw16 = st.binary(min_size=16, max_size=16)
req_id = st.builds(ReqId, int32, int32, int32, int32)
blob = st.one_of(st.binary(max_size=60), st.binary(min_size=3000, max_size=3100))
text = st.text(st.characters(codec="utf-8"), max_size=30)
record = st.builds(Record, int64, req_id, int32, blob)
header = st.builds(RecordHeader, int64, req_id, int32)


def packed(width):
    return st.integers(0, 20).flatmap(
        lambda count: st.binary(min_size=count * width, max_size=count * width)
    )


def tuples_of(values):
    return st.lists(values, max_size=5).map(tuple)


VALUES = {
    FieldKind.BOOL: st.booleans(),
    FieldKind.INT8: int8,
    FieldKind.INT32: int32,
    FieldKind.INT64: int64,
    FieldKind.CRC32: st.integers(0, 2**32 - 1),
    FieldKind.RAW16: raw16,
    FieldKind.RAW32: st.binary(min_size=32, max_size=32),
    FieldKind.REQ_ID: req_id,
    FieldKind.BLOB: blob,
    FieldKind.TEXT: text,
    FieldKind.TEXT_OR_NULL: st.none() | text,
    FieldKind.INT32S: tuples_of(int32),
    FieldKind.PACKED_INT32S: packed(4),
    FieldKind.PACKED_INT64S: packed(8),
    FieldKind.TEXTS: tuples_of(text),
    FieldKind.LINEAGE: tuples_of(st.builds(LineageEntry, int64, int64, int64, int64, raw16)),
    FieldKind.RECORDS: tuples_of(record),
    FieldKind.TEXT_BOOL_MAP: tuples_of(st.tuples(text, st.booleans())),
    FieldKind.INT32_BOOL_MAP: tuples_of(st.tuples(int32, st.booleans())),
    FieldKind.DATA_OR_ERROR: st.tuples(blob, st.none()) | st.tuples(st.none(), st.none() | text),
    FieldKind.STACK: tuples_of(st.tuples(text, text, st.none() | text, int32)),
}
CASES = [
    (protocol, version)
    for protocol in (WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN)
    for version in protocol.versions
]


def message_of(message_class, version):
    hints = get_type_hints(message_class, include_extras=True)
    values = {}
    for field in dataclasses.fields(message_class):
        kind = hints[field.name].__metadata__[0]
        is_there = field.metadata.get("since", 0) <= version
        is_extra = field.metadata.get("is_extra", False)
        absent = field.default if is_extra else fields.EMPTY_VALUES.get(kind)
        values[field.name] = VALUES[kind] if is_there else st.just(absent)
    return st.builds(message_class, **values)


@st.composite
def any_message(draw, cases=CASES):
    protocol, version = draw(st.sampled_from(cases))
    plans = list(codec._layouts(protocol, version).values())
    message_class = draw(st.sampled_from(plans)).make
    return protocol, version, draw(message_of(message_class, version))


@given(any_message())
def test_any_message_round_trips(case):
    protocol, version, message = case
    data = b"".join(codec.encode(message, version))
    header = codec.decode_frame_header(data)
    assert header == (protocol.magic, version, len(data) - 7)
    decoded = codec.decode(protocol, version, memoryview(data)[7:])
    assert decoded == message
    assert b"".join(codec.encode(decoded, version)) == data


@given(st.sampled_from(sorted(fields.VARIABLE_FORMATS, key=lambda kind: kind.name)), st.data())
def test_any_value_of_a_field_type_with_variable_length_round_trips(kind, data):
    write, read = fields.VARIABLE_FORMATS[kind]
    value = data.draw(VALUES[kind])
    out = fields.FieldWriter()
    write(value, out)
    payload = b"".join(out.finish())
    found = []
    assert read(memoryview(payload), 0, found) == len(payload)
    assert found == [value]


@given(any_message(), st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_decoded_or_reported_as_an_error_of_the_peer(case, data):
    protocol, version, message = case
    payload = bytearray(b"".join(codec.encode(message, version))[7:])
    cut = data.draw(st.integers(0, len(payload)))
    flips = data.draw(st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(1, 255))))
    for position, change in flips:
        payload[position] ^= change
    decode_anything(protocol, version, bytes(payload[:cut]))
    decode_anything(protocol, version, bytes(payload))


def decode_anything(protocol, version, data):
    try:
        message = codec.decode(protocol, version, memoryview(data))
    except RemoteProtocolError:
        return
    try:
        again = b"".join(codec.encode(message, version))[7:]
    except LocalProtocolError:
        raise AssertionError(f"decoded what cannot be encoded: {message}") from None
    assert codec.decode(protocol, version, memoryview(again)) == message


@given(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=10).map(tuple), text)
def test_any_hello_round_trips(versions, words):
    hello = Hello(versions, words)
    assert codec.decode_hello(codec.encode_hello(hello)[7:]) == hello


@given(st.lists(any_message([(WireProtocol.STORAGE, 1)]), max_size=5), st.data())
def test_messages_are_decoded_from_any_split_of_the_bytes(cases, data):
    sent = [message for _, _, message in cases]
    dialler = Connection(WireProtocol.STORAGE, is_listener=False)
    listener = Connection(WireProtocol.STORAGE, is_listener=True)
    dialler.receive(listener.first_bytes())
    stream = dialler.first_bytes() + b"".join(b"".join(dialler.send(m)) for m in sent)
    received = []
    offset = 0
    while offset < len(stream):
        size = data.draw(st.integers(1, len(stream) - offset))
        received += listener.receive(stream[offset : offset + size])
        offset += size
    assert isinstance(received[0], HelloReceived)
    assert received[1:] == sent
    assert not listener.is_inside_frame
