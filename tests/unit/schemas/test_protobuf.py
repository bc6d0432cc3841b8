"""Protobuf: strict values, message types by their path, hostile descriptors and messages."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.protobuf_files import (
    INT32,
    INT64,
    MESSAGE,
    REPEATED,
    STRING,
    add_field,
    encode_descriptor,
    order_file,
)
from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.records.unpacking import Unpacker
from waltz_core.schemas.protobuf_codec import ProtobufCodec
from waltz_core.schemas.registered_schemas import NamedSchema, RegisteredSchema, SchemaType

UTC = dt.UTC
ORDER = {
    "id": 5,
    "owner": "ü",
    "at": dt.datetime(1969, 1, 1, 0, 0, 0, 5, UTC),
    "limit": 0,
    "day": dt.date(2020, 1, 2),
    "price": Decimal("-12.50"),
    "tags": ["a", ""],
    "lines": [{"sku": "x", "count": 3}],
    "state": "PAID",
    "counts": {"a": -1},
    "named": {4: {"sku": "", "count": 0}},
    "cash": 1.5,
    "discount": 0,
    "weight": 0.5,
    "photo": b"\0\xff",
    "is_gift": True,
    "time": dt.time(23, 59, 59, 999_999),
}
# The defaults of fields without presence.
DEFAULTS = {
    "id": 0,
    "owner": "",
    "tags": [],
    "lines": [],
    "state": "NEW",
    "counts": {},
    "named": {},
    "weight": 0.0,
    "photo": b"",
    "is_gift": False,
}


def schema_of(file, *references, schema_id: int = 7) -> RegisteredSchema:
    named = tuple(
        NamedSchema(reference.name, encode_descriptor(reference)) for reference in references
    )
    return RegisteredSchema(schema_id, SchemaType.PROTOBUF, encode_descriptor(file), named)


def codec(message: str | None = None) -> ProtobufCodec:
    return ProtobufCodec(schema_of(order_file()), message)


def test_each_kind_of_field_round_trips():
    tested = codec()
    first = ORDER | {"first": {"id": 1}}
    assert tested.decode(tested.encode(first)) == ORDER | {"first": DEFAULTS | {"id": 1}}


def test_fields_without_presence_have_defaults_and_others_are_absent():
    assert codec().decode(b"\0") == DEFAULTS
    assert codec().decode(codec().encode({"card": ""})) == DEFAULTS | {"card": ""}


def test_the_message_indexes_are_the_path_of_the_type():
    for name, indexes in (
        ("shop.Order", "00"),
        ("shop.Refund", "0202"),
        ("shop.Order.Line", "040000"),
    ):
        encoded = codec(name).encode({})
        assert encoded.hex() == indexes
        codec().decode(encoded)  # also another codec of the schema
    with pytest.raises(BadConfig, match=r"no message type 'shop.Nothing'; it has shop.Order, "):
        codec("shop.Nothing")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "expected a map of fields"),
        ({"nothing": 1}, "no field 'nothing'"),
        ({"id": True}, "field 'id': expected an integer"),
        ({"id": 1 << 63}, "field 'id': .*range of int64"),
        ({"id": None}, "field 'id': a null .*optional"),
        ({"tags": None}, "field 'tags': a null"),
        ({"tags": [None]}, "field 'tags': expected a text"),
        ({"tags": "ab"}, "field 'tags': expected a list"),
        ({"lines": [{"count": -1}]}, "field 'lines': field 'count': .*uint32"),
        ({"lines": [None]}, "field 'lines': expected a map"),
        ({"counts": {1: 1}}, "field 'counts': expected a text"),
        ({"named": {1: None}}, "field 'named': expected a map"),
        ({"state": "LOST"}, "field 'state': expected one of NEW, PAID"),
        ({"weight": 1e39}, "field 'weight': float too large"),
        ({"owner": "\ud800"}, "surrogates"),
        ({"cash": 1.0, "card": "x"}, "'cash' and 'card' are in the same oneof: expected"),
        ({"at": dt.datetime(2020, 1, 1)}, "field 'at': expected a timestamp with a time zone"),  # noqa: DTZ001
        ({"day": ORDER["at"]}, "field 'day': expected a date"),
        ({"time": 5}, "field 'time': expected a time"),
        ({"price": 1.5}, "field 'price': expected a decimal"),
        ({"limit": "1"}, "field 'limit': field 'value': expected an integer"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_rejected(value, text):
    with pytest.raises(BadRequest, match=rf"does not fit the Protobuf schema: .*{text}"):
        codec().encode(value)


def test_a_null_is_encoded_as_an_absent_field_if_the_field_has_presence():
    nulls = dict.fromkeys(("at", "limit", "price", "cash", "card", "discount", "first"))
    assert codec().encode(nulls) == b"\0"
    # A present message without fields is not an absent one.
    assert codec().decode(codec().encode({"first": {}}))["first"] == DEFAULTS


def test_a_generated_message_is_written_only_if_it_has_the_type_of_the_codec():
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="shop", syntax="proto3")
    add_field(file.message_type.add(name="Refund"), "id", 1, INT64)
    pool.Add(file)
    refund = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Refund"))
    encoded = codec("shop.Refund").encode(refund(id=9))
    assert encoded.hex() == "02020809"
    assert codec().decode(encoded) == {"id": 9}
    with pytest.raises(BadRequest, match=r"type shop\.Order, found one of type shop\.Refund"):
        codec().encode(refund(id=9))


def test_a_file_can_import_the_references_of_its_schema():
    part = descriptor_pb2.FileDescriptorProto(name="default", package="shop", syntax="proto3")
    add_field(part.message_type.add(name="City"), "name", 1, STRING)
    main = descriptor_pb2.FileDescriptorProto(name="default", syntax="proto3")
    main.dependency.append("shop/city.proto")
    add_field(main.message_type.add(name="Address"), "city", 1, MESSAGE, type_name=".shop.City")
    schema = schema_of(main)._replace(
        references=(NamedSchema("shop/city.proto", encode_descriptor(part)),)
    )
    tested = ProtobufCodec(schema)
    assert tested.decode(tested.encode({"city": {"name": "x"}})) == {"city": {"name": "x"}}
    with pytest.raises(BadFormat, match=r"schema 7: Protobuf: .*shop/city.proto"):
        ProtobufCodec(schema_of(main))


def test_two_schemas_may_have_different_types_with_the_same_name():
    other = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    add_field(other.message_type.add(name="Order"), "id", 1, STRING)
    tested = ProtobufCodec(schema_of(other, schema_id=8))
    assert tested.decode(tested.encode({"id": "x"})) == {"id": "x"}
    assert codec().decode(codec().encode({"id": 1}))["id"] == 1


def proto2_file():
    file = descriptor_pb2.FileDescriptorProto(name="old.proto", syntax="proto2")
    message = file.message_type.add(name="Old")
    add_field(message, "id", 1, INT32, label=2)  # required
    add_field(message, "name", 2, STRING, default_value="none")
    return file


def test_absent_proto2_fields_have_no_defaults_and_required_fields_are_checked():
    tested = ProtobufCodec(schema_of(proto2_file()))
    assert tested.decode(tested.encode({"id": 1})) == {"id": 1}
    with pytest.raises(BadRequest, match="id"):
        tested.encode({"name": "x"})
    with pytest.raises(BadFormat, match=r"UTF-8|utf-8"):
        tested.decode(b"\0\x08\x01\x12\x01\xff")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("", "truncated"),
        ("0220", r"no message type with the indexes \[16\]"),
        ("060000", "truncated"),
        ("00ff", "not a message"),
        ("000a", "not a message"),
        ("001201ff", "not a message"),
        ("001a021001", "whole microseconds"),  # a timestamp of one nanosecond
        ("001a0a08ffffffffffffffff7f", "not a message"),  # one after the year 9999
        ("002a00", "not a message"),  # a date without a day
        ("00320418ff07", "not a message|76 digits"),  # a decimal of a large scale
    ],
)
def test_damaged_bytes_are_an_error(data, text):
    with pytest.raises(BadFormat, match=text):
        codec().decode(bytes.fromhex(data))


def varint(data: bytes) -> bytes:
    size, found = len(data), bytearray()
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes([*found, size])


def test_a_message_that_is_nested_too_deeply_is_an_error():
    for depth, is_good in ((90, True), (5_000, False)):
        data = b""
        for _ in range(depth):
            data = b"\x9a\x01" + varint(data) + data  # field 19, `first`
        if is_good:
            codec().decode(b"\0" + data)
        else:
            with pytest.raises(BadFormat, match="not a message"):
                codec().decode(b"\0" + data)


def test_a_payload_with_too_many_default_values_is_rejected():
    """Two bytes of a payload demand a message with 5,000 defaults."""
    file = descriptor_pb2.FileDescriptorProto(name="wide.proto", syntax="proto3")
    wide = file.message_type.add(name="Wide")
    for number in range(1, 5_001):
        add_field(wide, f"f{number}", number, INT32)
    rows = file.message_type.add(name="Rows")
    add_field(rows, "rows", 1, MESSAGE, type_name=".Wide", label=REPEATED)
    tested = ProtobufCodec(schema_of(file))
    assert len(tested.decode(b"\x02\x02" + b"\x0a\x00" * 10)["rows"]) == 10
    with pytest.raises(BadFormat, match="expected at most"):
        tested.decode(b"\x02\x02" + b"\x0a\x00" * 100_000)


@pytest.mark.parametrize("text", ["", "not base64", "/w==", "syntax = 'proto3';"])
def test_a_text_that_is_not_a_descriptor_is_an_error(text):
    with pytest.raises(BadFormat, match=r"format=serialized|no message type"):
        ProtobufCodec(RegisteredSchema(7, SchemaType.PROTOBUF, text)).decode(b"\0")


def test_descriptors_that_are_not_valid_are_an_error():
    wrong_type = order_file()
    wrong_type.message_type[0].field[2].type_name = ".shop.Nothing"
    cycle = descriptor_pb2.FileDescriptorProto(name="c.proto", dependency=["c.proto"])
    for file in (wrong_type, cycle):
        with pytest.raises(BadFormat, match="schema 7: Protobuf: "):
            ProtobufCodec(schema_of(file, cycle))
    # A message with the name of a known type, and other fields.
    fake = descriptor_pb2.FileDescriptorProto(
        name="google/protobuf/timestamp.proto", package="google.protobuf", syntax="proto3"
    )
    add_field(fake.message_type.add(name="Timestamp"), "nothing", 1, INT32)
    tested = ProtobufCodec(schema_of(fake))
    with pytest.raises(BadFormat, match="not a message"):
        tested.decode(b"\0")


def test_columns_are_filled_from_fields_by_name():
    tested = codec()
    payloads = pa.array([tested.encode(ORDER), tested.encode({})], pa.binary())
    fields = [
        pa.field("id", pa.int64()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("state", pa.string()),
        pa.field("discount", pa.int8()),
        pa.field("lines", pa.list_(pa.struct([("sku", pa.string())]))),
        pa.field("named", pa.map_(pa.int64(), pa.struct([("count", pa.int32())]))),
        pa.field("later", pa.string()),
    ]
    columns = Unpacker(fields, "protobuf", decode=tested.decode).columns(payloads, str)
    rows = [column.to_pylist() for column in columns]
    assert rows == [
        [5, 0],
        [ORDER["at"], None],
        [Decimal("-12.50"), None],
        ["PAID", "NEW"],
        [0, None],
        [[{"sku": "x"}], []],
        [[(4, {"count": 0})], []],
        [None, None],
    ]
    required = Unpacker(fields, "protobuf", decode=tested.decode, required=["price"])
    with pytest.raises(BadFormat, match="row 1: the payload has no column 'price'"):
        required.columns(payloads, lambda row: f"row {row}")
