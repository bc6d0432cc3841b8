"""Decoders of payloads with schemas, of the schemas, and of a schema registry's answers."""

import base64
import json
from datetime import UTC, date, datetime
from functools import cache, partial

import pyarrow as pa

from tests.fuzz.decoder import Decoder
from tests.fuzz.mutations import BINARY_WORDS, TEXT_WORDS
from tests.protobuf_files import encode_descriptor, order_file
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_core.records.unpacking import Unpacker
from waltz_core.schemas.avro_codec import AvroCodec
from waltz_core.schemas.formats import PayloadEncoder, SchemaCache
from waltz_core.schemas.protobuf_codec import ProtobufCodec
from waltz_core.schemas.registered_schemas import RegisteredSchema, SchemaType
from waltz_core.schemas.registry_client import SchemaRegistry
from waltz_core.schemas.registry_http import HttpAnswer

FIELDS = (
    ("id", "long"),
    ("share", ["null", "float", "double"]),
    ("item", ["null", "string", {"type": "enum", "name": "E", "symbols": ["A", "B"]}]),
    ("data", "bytes"),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}),
    ("key", {"type": "string", "logicalType": "uuid"}),
    ("day", {"type": "int", "logicalType": "date"}),
    ("at", {"type": "long", "logicalType": "timestamp-nanos"}),
    ("tags", {"type": "array", "items": ["null", "string"]}),
    ("counts", {"type": "map", "values": "int"}),
    (
        "lines",
        {
            "type": "array",
            "items": {
                "type": "record",
                "name": "shop.Line",
                "fields": [{"name": "sku", "type": {"type": "fixed", "name": "F", "size": 2}}],
            },
        },
    ),
)
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": name, "type": kind} for name, kind in FIELDS],
}
VALUE = {
    "id": 7,
    "share": 0.5,
    "item": "A",
    "data": b"\0\xff",
    "price": 12,
    "key": "00000000-0000-0000-0000-000000000001",
    "tags": ["a", None],
    "counts": {"a": 1},
    "lines": [{"sku": b"ab"}],
}
COLUMNS = [
    pa.field("id", pa.int32()),
    pa.field("item", pa.string()),
    pa.field("price", pa.decimal128(12, 2)),
    pa.field("day", pa.date32()),
    pa.field("at", pa.timestamp("us", "UTC")),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("counts", pa.map_(pa.string(), pa.int32())),
    pa.field("lines", pa.list_(pa.struct([("sku", pa.binary())]))),
]


class FixedAnswer(SchemaRegistry):
    """A client of a registry that answers each request with the same bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__("http://registry")
        self._data = data

    def send_to_any_address(self, path, body, deadline_s) -> HttpAnswer:
        return HttpAnswer(200, self._data)


def avro_schema() -> RegisteredSchema:
    return RegisteredSchema(1, SchemaType.AVRO, json.dumps(ORDER))


def protobuf_schema() -> RegisteredSchema:
    return RegisteredSchema(1, SchemaType.PROTOBUF, encode_descriptor(order_file()))


@cache
def _cache(kind: SchemaType) -> SchemaCache:
    schema_cache = SchemaCache(FixedAnswer(b"{}"), kind)
    schema_cache.add(avro_schema() if kind is SchemaType.AVRO else protobuf_schema())
    return schema_cache


def unpack(kind: SchemaType, data: bytes) -> None:
    """Decode a payload, and unpack it into columns, strictly and with nulls."""
    decode = _cache(kind).decode
    Unpacker(COLUMNS, kind.value.lower(), decode=decode).readable_columns(pa.array([data]))
    decode(data)


def avro_payloads() -> list[bytes]:
    times = {"day": date(2020, 1, 2), "at": datetime(2020, 1, 2, 3, tzinfo=UTC)}
    return [PayloadEncoder(avro_schema()).encode(VALUE | times)]


def protobuf_payloads() -> list[bytes]:
    value = {
        "id": 7,
        "owner": "ü",
        "tags": ["a"],
        "lines": [{"sku": "x", "count": 3}],
        "counts": {"a": 1},
        "named": {4: {"count": 1}},
        "price": 12,
        "limit": 5,
        "first": {"first": {"id": 1}},
    }
    refund = PayloadEncoder(protobuf_schema(), "shop.Refund").encode({"id": 1})
    return [PayloadEncoder(protobuf_schema()).encode(value), refund]


def parse_avro_schema(data: bytes) -> None:
    """Check a schema; an accepted schema decodes any bytes, or rejects them."""
    text = data.decode("utf-8", "replace")
    codec = AvroCodec(RegisteredSchema(1, SchemaType.AVRO, text))
    for body in (bytes(64), b"\x02" * 64, b"\xff" * 9 + b"\x01"):
        try:
            codec.decode(body)
        except BadFormat:
            continue


def parse_protobuf_schema(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    codec = ProtobufCodec(RegisteredSchema(1, SchemaType.PROTOBUF, text))
    for body in (b"\0", b"\0\x08\x07", b"\x02\x02\x0a\x00"):
        try:
            codec.decode(body)
        except BadFormat:
            continue


def read_answer(data: bytes) -> None:
    registry = FixedAnswer(data)
    try:
        registry.schema(1, SchemaType.AVRO)
    finally:
        registry.subject_schema("orders-value", None, SchemaType.AVRO)


DECODERS = (
    Decoder("payload-avro", partial(unpack, SchemaType.AVRO), (BadFormat,), avro_payloads),
    Decoder(
        "payload-protobuf", partial(unpack, SchemaType.PROTOBUF), (BadFormat,), protobuf_payloads
    ),
    Decoder(
        "avro-schema",
        parse_avro_schema,
        (BadFormat,),
        lambda: [
            json.dumps(ORDER).encode(),
            b'"string"',
            b'["null",{"type":"map","values":"int"}]',
        ],
        words=(*TEXT_WORDS, b'"null"', b'"Order"', b'{"type":"array","items":"null"}', b'"size":'),
    ),
    Decoder(
        "protobuf-schema",
        parse_protobuf_schema,
        (BadFormat,),
        lambda: [order_file().SerializeToString()],
        words=BINARY_WORDS,
    ),
    Decoder(
        "schema-registry-answer",
        read_answer,
        (BadFormat, BadConfig, BadRequest, Unavailable),
        lambda: [
            b'{"subject":"s","version":1,"id":3,"schemaType":"AVRO","schema":"\\"string\\""}',
            b'{"id":1,"schema":"0","references":[{"name":"n","subject":"s","version":1}]}',
        ],
        words=TEXT_WORDS,
    ),
)
