"""Any Avro schema and value round-trips, and fastavro reads the same bytes with its own types.

The strategy draws a schema together with values: all types, nested types, unions and logical types.
The module also tests schema evolution. If a schema has another order of fields, more or fewer
fields, or promoted types, the columns of a reader get the same values.
"""

import datetime as dt
import io
import json
from contextlib import suppress
from itertools import count

import fastavro
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadFormat
from waltz_core.records.unpacking import Unpacker
from waltz_core.schemas.avro_codec import AvroCodec
from waltz_core.schemas.registered_schemas import RegisteredSchema, SchemaType

UTC = dt.UTC
MOMENTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
LOCAL = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))  # noqa: DTZ001


def codec(schema: object) -> AvroCodec:
    return AvroCodec(RegisteredSchema(1, SchemaType.AVRO, json.dumps(schema)))


def in_millis(moment):
    return moment.replace(microsecond=moment.microsecond // 1_000 * 1_000)


def logical(base, name, **more):
    return {"type": base, "logicalType": name} | more


def fixed(size, **more):
    return lambda name: {"type": "fixed", "name": name, "size": size} | more


# Each entry: a schema, or a function that returns a schema for an unused name; then its values.
FLAT = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    ("long", st.integers(-(1 << 63), (1 << 63) - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=5)),
    ("string", st.text(max_size=5)),
    (logical("int", "date"), st.dates()),
    (logical("int", "time-millis"), st.times().map(in_millis)),
    (logical("long", "time-micros"), st.times()),
    (logical("long", "timestamp-millis"), MOMENTS.map(in_millis)),
    (logical("long", "timestamp-micros"), MOMENTS),
    (logical("long", "local-timestamp-millis"), LOCAL.map(in_millis)),
    (logical("long", "local-timestamp-micros"), LOCAL),
    (
        logical("bytes", "decimal", precision=20, scale=3),
        st.decimals(-(10**15), 10**15, places=3),
    ),
    (
        fixed(9, logicalType="decimal", precision=20, scale=3),
        st.decimals(-(10**15), 10**15, places=3),
    ),
    (logical("string", "uuid"), st.uuids()),
    (fixed(3), st.binary(min_size=3, max_size=3)),
    (
        lambda name: {"type": "enum", "name": name, "symbols": ["A", "B", "C"]},
        st.sampled_from("ABC"),
    ),
]  # fmt: skip


def base_of(schema):
    found = schema("n") if callable(schema) else schema
    return found["type"] if isinstance(found, dict) else found


def array(part):
    kind, values = part
    return lambda names: {"type": "array", "items": make_schema(kind, names)}, st.lists(
        values, max_size=3
    )


def mapping(part):
    kind, values = part
    found = st.dictionaries(st.text(max_size=3), values, max_size=3)
    return lambda names: {"type": "map", "values": make_schema(kind, names)}, found


def record(parts):
    def schema(names):
        name = f"R{next(names)}"
        fields = [
            {"name": f"f{index}", "type": make_schema(kind, names)}
            for index, (kind, _) in enumerate(parts)
        ]
        return {"type": "record", "name": name, "fields": fields}

    return schema, st.fixed_dictionaries({f"f{index}": part[1] for index, part in enumerate(parts)})


class Nested:
    """A schema whose types get different names from a counter."""

    def __init__(self, make):
        self.make = make


def nested(found):
    make, values = found
    return Nested(make), values


def make_schema(kind, names):
    if isinstance(kind, Nested):
        return kind.make(names)
    return kind(f"N{next(names)}") if callable(kind) else kind


def union(part):
    kind, values = part
    return Nested(lambda names: ["null", make_schema(kind, names)]), st.none() | values


def no_union(part):
    return part[0] != "null" and not isinstance(part[0], Nested)


FLAT_PARTS = st.sampled_from(FLAT)
PARTS_EXCEPT_NULL = st.sampled_from([part for part in FLAT if part[0] != "null"])
PARTS = st.recursive(
    FLAT_PARTS,
    lambda inner: st.one_of(
        inner.filter(lambda part: part[0] != "null").map(array).map(nested),
        inner.map(mapping).map(nested),
        st.lists(inner, max_size=4).map(record).map(nested),
        inner.filter(no_union).map(union),
    ),
    max_leaves=6,
)


@st.composite
def schemas_and_values(draw):
    kind, values = draw(PARTS)
    return make_schema(kind, count()), draw(values)


def is_supported(schema) -> bool:
    with suppress(BadFormat):  # an array of records without bytes
        return bool(codec(schema))
    return False


@given(schemas_and_values())
def test_any_value_round_trips_and_fastavro_reads_it(pair):
    schema, value = pair
    if not is_supported(schema):
        return
    tested = codec(schema)
    data = tested.encode(value)
    assert tested.decode(data) == value
    source = io.BytesIO(data)
    assert fastavro.schemaless_reader(source, fastavro.parse_schema(schema), None) == value
    assert source.read() == b""


@given(schemas_and_values())
def test_bytes_written_by_fastavro_are_decoded_to_the_same_value(pair):
    schema, value = pair
    if not is_supported(schema):
        return
    sink = io.BytesIO()
    if "local-timestamp" not in json.dumps(schema):  # fastavro 1.13 adds a time zone
        fastavro.schemaless_writer(sink, fastavro.parse_schema(schema), value)
        assert codec(schema).decode(sink.getvalue()) == value


@given(st.lists(PARTS_EXCEPT_NULL, min_size=2, max_size=5), st.data())
def test_a_value_of_a_union_round_trips_but_may_change_its_type(parts, data):
    chosen = {base_of(kind): (kind, values) for kind, values in parts}
    names = count()
    schema = ["null", *(make_schema(kind, names) for kind, _ in chosen.values())]
    value = data.draw(st.one_of(st.none(), *(values for _, values in chosen.values())))
    tested = codec(schema)
    back = tested.decode(tested.encode(value))
    # A number may get another type of the union, but the same value.
    assert back == value or str(back) == str(value)


@given(schemas_and_values(), st.data())
def test_changed_bytes_give_a_value_or_a_bad_format(pair, data):
    schema, value = pair
    if not is_supported(schema):
        return
    tested = codec(schema)
    encoded = bytearray(tested.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded)))
        encoded[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    with suppress(BadFormat):
        tested.decode(bytes(encoded))


# --- evolution

COLUMNS = {
    "id": ("int", pa.int64(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "big": ("long", pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "share": ("float", pa.float64(), st.floats(width=32, allow_nan=False)),
    "name": ("string", pa.string(), st.text(max_size=5)),
    "day": (logical("int", "date"), pa.date32(), st.dates()),
    "at": (logical("long", "timestamp-micros"), pa.timestamp("us", "UTC"), MOMENTS),
    "tags": (
        {"type": "array", "items": "string"},
        pa.list_(pa.string()),
        st.lists(st.text(max_size=3), max_size=3),
    ),
}
# The types that a later schema may have instead; the column can store both types.
PROMOTED = {"id": "long", "share": "double"}


@given(st.data())
def test_columns_get_the_values_of_any_version_of_a_schema(data):
    wanted = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, min_size=1))
    fields = [pa.field(name, COLUMNS[name][1]) for name in wanted]
    payloads, expected, codecs = [], [], {}
    for version in range(data.draw(st.integers(1, 4))):
        names = data.draw(st.permutations(sorted(COLUMNS)))[: data.draw(st.integers(1, 7))]
        kinds = {}
        for name in names:
            kind = COLUMNS[name][0]
            kind = PROMOTED.get(name, kind) if data.draw(st.booleans()) else kind
            kinds[name] = ["null", kind] if data.draw(st.booleans()) else kind
        schema = {
            "type": "record",
            "name": "R",
            "fields": [{"name": name, "type": kind} for name, kind in kinds.items()],
        }
        row = {
            name: data.draw(
                COLUMNS[name][2] | st.none() if isinstance(kind, list) else COLUMNS[name][2]
            )
            for name, kind in kinds.items()
        }
        codecs[version] = codec(schema)
        payloads.append(bytes([version]) + codecs[version].encode(row))
        expected.append({name: row.get(name) for name in wanted})
    unpacker = Unpacker(fields, "avro", decode=lambda each: codecs[each[0]].decode(each[1:]))
    columns = unpacker.columns(pa.array(payloads, pa.binary()), str)
    rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)).to_pylist()
    assert rows == expected
