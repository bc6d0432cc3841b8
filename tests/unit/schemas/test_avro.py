"""Avro: strict values, schemas that could exhaust a process, damaged payloads."""

import datetime as dt
import io
import json
import math
import uuid
from decimal import Decimal

import fastavro
import pyarrow as pa
import pytest

from waltz_core.errors import BadFormat, BadRequest
from waltz_core.records.unpacking import Unpacker
from waltz_core.schemas.avro_codec import AvroCodec
from waltz_core.schemas.avro_schemas import DEPTH_MAX, VALUES_MAX, schema_of_columns
from waltz_core.schemas.registered_schemas import NamedSchema, RegisteredSchema, SchemaType

UTC = dt.UTC
MOMENT = dt.datetime(2026, 11, 29, 10, 0, 0, 123_000, UTC)
LOCAL = dt.datetime(1913, 1, 1, 10, 0, 0, 5)  # noqa: DTZ001


def codec(schema: object, *references: tuple[str, str]) -> AvroCodec:
    named = tuple(NamedSchema(*reference) for reference in references)
    return AvroCodec(RegisteredSchema(7, SchemaType.AVRO, json.dumps(schema), named))


def logical_type(base: str, name: str, **more: object) -> dict[str, object]:
    return {"type": base, "logicalType": name} | more


def fixed(size: int, **more: object) -> dict[str, object]:
    return {"type": "fixed", "name": "F", "size": size} | more


DECIMAL = logical_type("bytes", "decimal", precision=9, scale=2)


def test_encoded_values_have_the_bytes_of_the_avro_specification():
    schema = {"type": "record", "name": "test", "fields": [
        {"name": "a", "type": "long"}, {"name": "b", "type": "string"}]}  # fmt: skip
    assert codec(schema).encode({"a": 27, "b": "foo"}).hex() == "3606666f6f"
    assert codec({"type": "array", "items": "long"}).encode([3, 27]).hex() == "04063600"
    assert codec(["null", "string"]).encode("a").hex() == "020261"
    assert codec(["null", "string"]).encode(None).hex() == "00"


@pytest.mark.parametrize(
    ("schema", "value", "data"),
    [
        (logical_type("int", "date"), dt.date(1970, 1, 2), "02"),
        (logical_type("int", "date"), dt.date(1, 1, 1), None),
        (logical_type("int", "time-millis"), dt.time(0, 0, 1), "d00f"),
        (logical_type("long", "time-micros"), dt.time(23, 59, 59, 999_999), None),
        (logical_type("long", "timestamp-millis"), MOMENT, None),
        (logical_type("long", "timestamp-micros"), dt.datetime(1969, 12, 31, tzinfo=UTC), None),
        (logical_type("long", "timestamp-nanos"), MOMENT, None),
        (logical_type("long", "local-timestamp-micros"), LOCAL, None),
        (logical_type("long", "local-timestamp-nanos"), LOCAL, None),
        (DECIMAL, Decimal("-12.50"), "04fb1e"),
        (DECIMAL, Decimal("0.00"), "0200"),
        (DECIMAL, Decimal("1.28"), "040080"),
        (
            fixed(4) | logical_type("fixed", "decimal", precision=9, scale=2),
            Decimal("-0.01"),
            "ffffffff",
        ),
        (logical_type("string", "uuid"), uuid.UUID(int=1 << 100), None),
        (fixed(16) | logical_type("fixed", "uuid"), uuid.UUID(int=255), "00" * 15 + "ff"),
        (fixed(2), b"ab", "6162"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "02"),
        ({"type": "map", "values": "int"}, {"a": 1, "b": -1}, "0402610202620100"),
        ("float", 0.5, "0000003f"),
        ("double", math.inf, None),
        ("boolean", True, "01"),
        ("null", None, ""),
        (["null", "float", "double"], 0.1, None),  # no float has this value
        ([logical_type("int", "date"), "long", "string"], 1 << 40, None),
    ],
)
def test_values_of_each_type_round_trip(schema, value, data):
    tested = codec(schema)
    encoded = tested.encode(value)
    assert data is None or encoded.hex() == data
    back = tested.decode(encoded)
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    ("schema", "value", "text"),
    [
        ("int", 1 << 31, "out of the range of int"),
        ("long", -(1 << 63) - 1, "out of the range of long"),
        ("int", True, "expected an integer"),
        ("int", 1.0, "expected an integer"),
        ("boolean", 1, "expected a boolean"),
        ("float", (1 << 24) + 1, "cannot be represented exactly as a float"),
        ("float", 1e39, "too large"),
        ("double", "1", "expected a number"),
        ("string", b"a", "expected a text"),
        ("string", "\ud800", "surrogates"),
        ("bytes", "a", "expected bytes"),
        ("null", 0, "expected null"),
        (fixed(2), b"abc", "expected 2 bytes, found 3"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B", "expected one of A"),
        (logical_type("int", "date"), MOMENT, "expected a date"),
        (logical_type("int", "date"), 5, "expected a date"),
        (logical_type("int", "time-millis"), dt.time(0, 0, 0, 1), "more precise than the unit"),
        (
            logical_type("long", "timestamp-millis"),
            MOMENT.replace(microsecond=1),
            "more precise than",
        ),
        (logical_type("long", "timestamp-micros"), LOCAL, "with a time zone"),
        (logical_type("long", "local-timestamp-micros"), MOMENT, "without a time zone"),
        (
            logical_type("long", "timestamp-nanos"),
            dt.datetime(9999, 1, 1, tzinfo=UTC),
            "range of long",
        ),
        (DECIMAL, Decimal("1.234"), "2 digits after the point"),
        (DECIMAL, Decimal(10_000_000), "up to 9 digits"),
        (DECIMAL, Decimal("NaN"), "not a number"),
        (DECIMAL, Decimal("1e999999"), "range of a decimal"),
        (DECIMAL, 1.5, "expected a decimal"),
        (logical_type("string", "uuid"), "abc", "UUID"),
        ({"type": "map", "values": "int"}, {1: 1}, "expected a text"),
        ({"type": "array", "items": "int"}, {1: 1}, "expected a list"),
        (["null", "int", "boolean"], "a", "an integer.* or expected a boolean"),
        (["null"], "a", "expected null"),
    ],
)
def test_a_value_of_another_type_is_rejected(schema, value, text):
    with pytest.raises(BadRequest, match=rf"does not fit the Avro schema: .*{text}"):
        codec(schema).encode(value)


def test_an_error_names_the_field():
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}
    schema = {"type": "record", "name": "R", "fields": [{"name": "i", "type": inner}]}
    with pytest.raises(BadRequest, match=r"field 'i': field 'x': expected an integer.*found None"):
        codec(schema).encode({"i": {}})
    with pytest.raises(BadRequest, match="field 'i': the schema has no field 'y'"):
        codec(schema).encode({"i": {"x": 1, "y": 2}})


def test_absent_fields_have_their_defaults():
    inner = {"type": "record", "name": "I", "fields": [
        {"name": "x", "type": "int"}, {"name": "y", "type": "int", "default": 2}]}  # fmt: skip
    fields = [
        {"name": "text", "type": ["string", "null"], "default": "a"},
        {"name": "none", "type": ["string", "null"], "default": None},
        {"name": "data", "type": "bytes", "default": "\u00ff"},
        {"name": "inner", "type": inner, "default": {"x": 1}},
        {"name": "list", "type": {"type": "array", "items": "I"}, "default": [{"x": 3}]},
        {"name": "map", "type": {"type": "map", "values": "long"}, "default": {"k": 1}},
        {"name": "day", "type": logical_type("int", "date"), "default": 1},
        {"name": "nullable", "type": ["null", "int"]},
    ]
    tested = codec({"type": "record", "name": "R", "fields": fields})
    assert tested.decode(tested.encode({})) == {
        "text": "a",
        "none": None,
        "data": b"\xff",
        "inner": {"x": 1, "y": 2},
        "list": [{"x": 3, "y": 2}],
        "map": {"k": 1},
        "day": dt.date(1970, 1, 2),
        "nullable": None,
    }


def test_a_default_of_another_type_is_rejected_only_when_writing():
    for kind, default in (("bytes", 5), ({"type": "array", "items": "int"}, 7)):
        field = {"name": "a", "type": kind, "default": default}
        tested = codec({"type": "record", "name": "R", "fields": [field]})
        assert tested.decode(b"\0") in ({"a": b""}, {"a": []})
        with pytest.raises(BadRequest, match="a default that is not of its type"):
            tested.encode({})


def test_a_schema_can_use_the_types_of_its_references():
    address = json.dumps(record("string", name="shop.Address"))
    fields = [{"name": "a", "type": "Address"}, {"name": "b", "type": ["null", "shop.Address"]}]
    schema = {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}
    tested = codec(schema, ("shop.Address", address))
    value = {"a": {"f0": "x"}, "b": {"f0": "y"}}
    assert tested.decode(tested.encode(value)) == value
    assert tested.field_names() == ("a", "b")
    assert codec("shop.Address", ("shop.Address", address)).field_names() == ("f0",)


def record(*types: object, name: str = "R") -> dict[str, object]:
    fields = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields}


def nested(depth: int) -> object:
    found: object = "int"
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def doubling_schema() -> object:
    """Return a schema whose size doubles with each of its types."""
    found: object = record("int", name="T0")
    for number in range(1, 40):
        found = record(found, f"T{number - 1}", name=f"T{number}")
    return found


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (record(["null", "R"]), "contains itself"),
        (record({"type": "array", "items": "R"}), "contains itself"),
        (record({"type": "map", "values": record("R", name="S")}), "contains itself"),
        (nested(DEPTH_MAX + 1), "levels of nested types, found more"),
        (doubling_schema(), f"up to {VALUES_MAX} fields"),
        ({"type": "array", "items": "null"}, "may have no bytes"),
        ({"type": "array", "items": record()}, "may have no bytes"),
        ({"type": "array", "items": fixed(0)}, "may have no bytes"),
        ({"type": "array", "items": record("int", *["null"] * 16)}, "16 values per byte"),
        ({"type": "map", "values": record(*["null"] * 16)}, "16 values per byte"),
        (fixed(1 << 40), "no valid size"),
        (fixed(-1), "no valid size"),
        ([], "expected a union with at least one type, found an empty one"),
        (["int", ["null"]], "expected no union in a union, found one"),
        (["int", logical_type("int", "date")], "expected a union of different types, found"),
        ("nothing", "no type 'nothing'"),
        ({}, "expected a type"),
        (7, "expected a type"),
        (None, "expected a type"),
        ({"type": "record", "name": "R"}, "no list of fields"),
        ({"type": "record", "name": "a b", "fields": []}, "expected a name"),
        ({"type": "record", "name": ["R"], "fields": []}, "expected a name"),
        (record("int") | {"fields": [7]}, "field without a name"),
        (record("int") | {"fields": [{"name": "x", "type": "int"}] * 2}, "two fields 'x'"),
        ({"type": "enum", "name": "E", "symbols": "AB"}, "no list of symbols"),
        (record(record("int")), "two types have the name 'R'"),
    ],
)
def test_a_schema_that_is_not_valid_or_not_supported_is_an_error(schema, text):
    with pytest.raises(BadFormat, match=rf"schema 7: Avro schema: .*{text}"):
        codec(schema)


@pytest.mark.parametrize("text", ["", "{", "{'a'}", "[" * 100_000, '"\\ud800"', "NaN"])
def test_a_text_that_is_not_a_schema_is_an_error(text):
    with pytest.raises(BadFormat, match="schema 7: "):
        AvroCodec(RegisteredSchema(7, SchemaType.AVRO, text))


def test_internal_fastavro_keys_in_a_schema_have_no_effect():
    schema = record("int") | {"__fastavro_parsed__": True, "__named_schemas__": {}}
    assert codec(schema).decode(b"\x02") == {"f0": 1}


def test_wide_records_in_lists_are_supported():
    fields = [pa.field(f"c{number}", pa.string()) for number in range(500)]
    column = pa.field("rows", pa.list_(pa.struct(fields)))
    tested = codec(schema_of_columns([column]))
    value = {"rows": [{"c7": "x"}, None]}
    found = tested.decode(tested.encode(value))["rows"]
    assert (found[0]["c7"], found[0]["c8"], found[1]) == ("x", None, None)


@pytest.mark.parametrize(
    ("schema", "data", "text"),
    [
        ("int", "", "."),
        ("int", "0202", "1 more bytes"),
        ("string", "01", "."),
        ("string", "ffffffff0f", "."),
        ("string", "0261", None),
        ("string", "02ff", "utf-8"),
        ("bytes", "feffffffffffffffff01", "."),
        ({"type": "array", "items": "int"}, "ffffffffffffffffff01", "."),
        ({"type": "array", "items": "int"}, "feffffffffffffffff0102", "."),
        ({"type": "map", "values": "int"}, "feffffffffffffffff01", "."),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "02", "."),
        (["null"], "02", "."),
        (logical_type("int", "date"), "ffffffff0f", "."),
        (logical_type("long", "timestamp-micros"), "feffffffffffffffff01", "."),
        (logical_type("long", "timestamp-nanos"), "02", "whole microseconds"),
        (logical_type("int", "time-millis"), "01", "time of day"),
        (logical_type("string", "uuid"), "0261", "UUID"),
        (logical_type("bytes", "decimal", precision=2), "0264", "up to 2 digits"),
    ],
)
def test_damaged_bytes_are_an_error(schema, data, text):
    tested = codec(schema)
    if text is None:
        tested.decode(bytes.fromhex(data))
        return
    with pytest.raises(BadFormat, match=rf"(not a|one) value of the Avro schema.*{text}"):
        tested.decode(bytes.fromhex(data))


def test_a_decimal_of_4_mib_is_rejected_at_once():
    size = 4 << 20
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema("bytes"), b"\x7f" * size)
    tested = codec(logical_type("bytes", "decimal", precision=76))
    with pytest.raises(BadFormat, match="up to 76 digits"):
        tested.decode(sink.getvalue())


# --- columns


def unpack_columns(schema: object, fields: list[pa.Field], *values: object) -> list[pa.Array]:
    tested = codec(schema)
    payloads = pa.array([tested.encode(value) for value in values], pa.binary())
    unpacker = Unpacker(fields, "avro", decode=tested.decode)
    return unpacker.columns(payloads, lambda row: f"row {row}")


@pytest.mark.parametrize(
    ("written", "value", "kind", "expected"),
    [
        ("int", 7, pa.int64(), 7),
        ("int", 7, pa.float64(), 7.0),
        ("int", 7, pa.decimal128(5, 2), Decimal("7.00")),
        ("float", 0.5, pa.float64(), 0.5),
        ("long", 7, pa.int8(), 7),
        (DECIMAL, Decimal("1.50"), pa.decimal128(20, 4), Decimal("1.5000")),
        (logical_type("string", "uuid"), uuid.UUID(int=5), pa.string(), str(uuid.UUID(int=5))),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", pa.string(), "A"),
        (logical_type("long", "timestamp-millis"), MOMENT, pa.timestamp("us", "UTC"), MOMENT),
        (logical_type("long", "local-timestamp-micros"), LOCAL, pa.timestamp("us"), LOCAL),
        (logical_type("int", "time-millis"), dt.time(1), pa.time64("us"), dt.time(1)),
        (["int", "null", "string"], None, pa.int32(), None),
    ],
)
def test_a_value_is_converted_without_loss(written, value, kind, expected):
    (found,) = unpack_columns(record(written), [pa.field("f0", kind)], {"f0": value})
    assert found.to_pylist() == [expected]


@pytest.mark.parametrize(
    ("written", "value", "kind"),
    [
        ("long", 1 << 40, pa.int32()),
        ("long", 7, pa.timestamp("us", "UTC")),  # the unit is unknown
        ("int", 7, pa.date32()),
        (logical_type("int", "date"), dt.date(2000, 1, 1), pa.int32()),
        (logical_type("long", "timestamp-millis"), MOMENT, pa.int64()),
        (logical_type("long", "timestamp-millis"), MOMENT, pa.timestamp("us")),
        (logical_type("long", "local-timestamp-micros"), LOCAL, pa.timestamp("us", "UTC")),
        (logical_type("int", "date"), dt.date(2000, 1, 1), pa.timestamp("us")),
        (DECIMAL, Decimal("1.55"), pa.decimal128(5, 1)),
        (DECIMAL, Decimal("1.50"), pa.string()),
        ("bytes", b"a", pa.string()),
        ("string", "a", pa.binary()),
        ("boolean", True, pa.int32()),
        ("double", 1.0, pa.int32()),
        (["int", "string"], "a", pa.int32()),
    ],
)
def test_the_error_for_a_value_of_another_type_names_row_and_column(written, value, kind):
    with pytest.raises(BadFormat, match=r"row 0, column 'f0': expected .*found"):
        unpack_columns(record(written), [pa.field("f0", kind)], {"f0": value})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.map_(pa.int32(), pa.int32()), "keys of type string, found int32"),
        (pa.duration("us"), "Avro has no type for duration"),
        (pa.uint64(), "Avro has no type for uint64"),
        (pa.timestamp("ns"), "Avro has no type for timestamp"),
        (pa.list_(pa.struct([("a b", pa.int32())])), "column 'c.a b': a name in Avro"),
    ],
)
def test_columns_without_an_avro_type_are_rejected(kind, text):
    with pytest.raises(BadRequest, match=text):
        schema_of_columns([pa.field("c", kind)])


def test_nullable_columns_can_be_added_to_the_schema():
    schema = schema_of_columns(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("price", pa.decimal128(12, 2)),
            pa.field("lines", pa.list_(pa.struct([("sku", pa.string())]))),
        ]
    )
    assert schema == {
        "type": "record",
        "name": "topLevelRecord",
        "fields": [
            {"name": "id", "type": "long"},
            {
                "name": "price",
                "type": ["null", logical_type("bytes", "decimal", precision=12, scale=2)],
                "default": None,
            },
            {
                "name": "lines",
                "type": [
                    "null",
                    {
                        "type": "array",
                        "items": [
                            "null",
                            {
                                "type": "record",
                                "name": "topLevelRecord.lines.element",
                                "fields": [
                                    {"name": "sku", "type": ["null", "string"], "default": None}
                                ],
                            },
                        ],
                    },
                ],
                "default": None,
            },
        ],
    }
