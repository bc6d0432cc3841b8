"""Strict unpacking: a payload's value becomes a column's value only without loss."""

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import msgpack
import pyarrow as pa
import pytest

from waltz_core.errors import BadFormat
from waltz_core.records.unpacking import Unpacker, columns_matching

UTC = dt.UTC
KINDS = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal": pa.decimal128(10, 2),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array": pa.list_(pa.int32()),
    "struct": pa.struct([("x", pa.int32())]),
    "map": pa.map_(pa.string(), pa.int32()),
}


def describe_row(index: int) -> str:
    return f"transaction {index}"


def pack(value: object, data_format: str) -> pa.Array:
    row = {"a": value}
    data = msgpack.packb(row) if data_format == "msgpack" else json.dumps(row).encode()
    return pa.array([data], pa.binary())


def read(value: object, kind: pa.DataType, data_format: str) -> object:
    unpacker = Unpacker([pa.field("a", kind)], data_format)
    return unpacker.columns(pack(value, data_format), describe_row)[0][0].as_py()


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (12.75, "int"),
        (-0.9, "bigint"),
        (1.0, "int"),
        (1e300, "float"),
        (True, "double"),
        (True, "int"),
        (1, "boolean"),
        (1 << 40, "int"),
        (128, "tinyint"),
        ((1 << 53) + 1, "double"),
        ("1", "int"),
        ("1.5", "double"),
        ("1.234", "decimal"),
        ("123456789012.00", "decimal"),
        ("9" * 60, "decimal"),
        ("9" * 90, "decimal"),
        ("NaN", "decimal"),
        (1 << 63, "decimal"),
        (True, "decimal"),
        (5, "string"),
        (5, "binary"),
        (1.7, "timestamp"),
        (1.5, "date"),
        ("2013-01-31T10:00:00Z", "date"),
        (True, "date"),
        (False, "timestamp"),
        ([1.5], "array"),
        ({"x": "1"}, "struct"),
        ([1], "struct"),
        ([1], "map"),
    ],
)
def test_lossy_conversions_are_errors(value: object, kind: str, data_format: str) -> None:
    with pytest.raises(BadFormat, match="transaction 0, column 'a': expected "):
        read(value, KINDS[kind], data_format)


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (7, "bigint", 7),
        (7, "double", 7.0),
        (7, "float", 7.0),
        (1 << 53, "double", float(1 << 53)),
        (7, "decimal", Decimal("7.00")),
        ("7.25", "decimal", Decimal("7.25")),
        (0.5, "float", 0.5),
        (None, "int", None),
    ],
)
@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_lossless_values_are_converted(
    value: object, kind: str, found: object, data_format: str
) -> None:
    assert read(value, KINDS[kind], data_format) == found


def test_a_json_number_is_converted_to_an_exact_decimal() -> None:
    kind = pa.decimal128(38, 18)
    unpacker = Unpacker([pa.field("a", kind), pa.field("b", pa.float64())], "json")
    data = pa.array([b'{"a": 0.123456789012345678, "b": 0.1}'], pa.binary())
    columns = unpacker.columns(data, describe_row)
    assert columns[0].to_pylist() == [Decimal("0.123456789012345678")]
    assert columns[1].to_pylist() == [0.1]
    for text in (b"0.1234567890123456789", b"1e400", b"1e99999999", b"-1e-99999999"):
        with pytest.raises(BadFormat, match="column 'a'"):
            unpacker.columns(pa.array([b'{"a": ' + text + b"}"], pa.binary()), describe_row)
    with pytest.raises(BadFormat, match="column 'b'"):
        unpacker.columns(pa.array([b'{"b": 1e400}'], pa.binary()), describe_row)
    with pytest.raises(BadFormat, match="NaN"):
        unpacker.columns(pa.array([b'{"b": NaN}'], pa.binary()), describe_row)


@pytest.mark.parametrize("text", ["-_-_", "An-na", "QUI", "QUI=\n", "QR==", " QUI="])
def test_text_that_is_not_base64_is_rejected_for_a_binary_column(text: str) -> None:
    with pytest.raises(BadFormat, match="column 'a': expected binary"):
        read(text, pa.binary(), "json")
    assert read("QUI=", pa.binary(), "json") == b"AB"


def test_a_timestamp_in_nanoseconds_must_be_a_multiple_of_a_microsecond() -> None:
    kind = KINDS["timestamp"]
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)
    assert read("2026-01-02T03:04:05.123456000Z", kind, "json") == moment
    assert read("2026-01-02T03:04:05.123456Z", kind, "json") == moment
    with pytest.raises(BadFormat, match="column 'a'"):
        read("2026-01-02T03:04:05.123456001Z", kind, "json")


def test_a_payload_nested_too_deeply_is_reported() -> None:
    data = b"\x81\xa1a" + b"\x91" * 2_000 + b"\x01"
    with pytest.raises(BadFormat, match="nested too deeply"):
        Unpacker([pa.field("a", pa.int32())], "msgpack").columns(pa.array([data]), describe_row)


def test_a_key_matches_a_column_in_any_case_unless_spark_is_case_sensitive() -> None:
    fields = [pa.field("Id", pa.int32()), pa.field("s", pa.struct([("X", pa.int32())]))]
    data = pa.array([msgpack.packb({"ID": 1, "S": {"x": 2}})], pa.binary())
    columns = Unpacker(fields, "msgpack").columns(data, describe_row)
    assert [column.to_pylist() for column in columns] == [[1], [{"X": 2}]]
    columns = Unpacker(fields, "msgpack", is_case_sensitive=True).columns(data, describe_row)
    assert [column.to_pylist() for column in columns] == [[None], [None]]
    both = pa.array([msgpack.packb({"ID": 1, "Id": 2})], pa.binary())
    assert Unpacker(fields, "msgpack").columns(both, describe_row)[0].to_pylist() == [2]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("id", ["ID", "id"], ["id"]),
        ("Id", ["ID", "amount"], ["ID"]),
        ("id", ["amount"], []),
    ],
)
def test_a_required_column_is_found_in_any_case(name, columns, expected):
    assert columns_matching(name, columns) == expected
    fields = [pa.field(column, pa.int64()) for column in columns]
    unpacker = Unpacker(fields, "json", required=[name])
    _, good = unpacker.readable_columns(pa.array([b"{}"]))
    assert good.tolist() == [not expected]


def test_a_required_column_that_a_payload_lacks_is_an_error() -> None:
    fields = [pa.field("id", pa.int32()), pa.field("b", pa.int32())]
    rows = [{"id": 1}, {"ID": None}, {"b": 2}]
    data = pa.array([msgpack.packb(row) for row in rows], pa.binary())
    unpacker = Unpacker(fields, "msgpack", required=["id"])
    with pytest.raises(BadFormat, match="transaction 2: the payload has no column 'id'"):
        unpacker.columns(data, describe_row)
    _, is_whole = unpacker.columns_with_nulls(data)
    assert is_whole.tolist() == [True, True, False]


def test_a_column_that_is_not_nullable_never_has_a_null() -> None:
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("b", pa.int32())]
    rows = [{"id": 1}, {"b": 2}, {"id": None, "b": 3}, {"id": "x"}]
    data = pa.array([msgpack.packb(row) for row in rows], pa.binary())
    unpacker = Unpacker(fields, "msgpack")
    assert unpacker.columns(data[:1], describe_row)[0].to_pylist() == [1]
    for row in (1, 2):
        with pytest.raises(BadFormat, match=r"transaction 0: column 'id' is NOT NULL .* Hint"):
            unpacker.columns(data[row : row + 1], describe_row)
    _, is_whole = unpacker.readable_columns(data)
    assert is_whole.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            pa.struct([pa.field("x", pa.int32(), nullable=False)]),
            [{"x": 1}, None],
            [{}, {"x": None}],
        ),
        (pa.list_(pa.field("element", pa.int32(), nullable=False)), [[1], [], None], [[1, None]]),
        (
            pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False)),
            [{"k": 1}, {}, None],
            [{"k": 1, "l": None}],
        ),
    ],
)
def test_nested_fields_that_are_not_nullable_never_have_a_null(kind, good, bad) -> None:
    field = pa.field("a", kind)
    unpacker = Unpacker([field], "msgpack")
    data = pa.array([msgpack.packb({"a": each}) for each in good], pa.binary())
    (column,) = unpacker.columns(data, describe_row)
    assert (column.type, column.to_pylist(maps_as_pydicts="strict")) == (kind, good)
    for each in bad:
        data = pa.array([msgpack.packb({"a": each})], pa.binary())
        with pytest.raises(BadFormat, match="is null, but the schema declares it NOT NULL"):
            unpacker.columns(data, describe_row)
        columns, is_whole = unpacker.readable_columns(data)
        assert (columns[0].to_pylist(), is_whole.tolist()) == ([None], [False])


def test_an_empty_map_is_read_as_a_struct_of_nulls() -> None:
    kind = pa.struct([("x", pa.int32()), ("s", pa.struct([("y", pa.int32())]))])
    assert read({}, kind, "msgpack") == {"x": None, "s": None}
    assert read({"s": {}}, kind, "json") == {"x": None, "s": {"y": None}}


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_an_integer_becomes_a_float_only_without_rounding(data_format: str) -> None:
    assert read(1 << 24, pa.float32(), data_format) == float(1 << 24)
    assert read((1 << 24) + 1, pa.float64(), data_format) == float((1 << 24) + 1)
    for value, kind in (((1 << 24) + 1, pa.float32()), ((1 << 53) + 1, pa.float64())):
        with pytest.raises(BadFormat, match="cannot be represented exactly as a"):
            read(value, kind, data_format)
    with pytest.raises(BadFormat, match="column 'a': expected float"):
        read(1 << 62 << 62 << 62, pa.float32(), "json")


DOCS = Path(__file__).parents[3] / "docs" / "spark.md"
SAMPLES = {
    "boolean": [True],
    "integer": [7],
    "number with a fraction or an exponent": [7.25],
    "text": ["7.25", "QUI=", "2013-01-31", "2013-01-31T10:00:00Z", "x"],
    "bin (msgpack)": [b"x"],
    "array, map": [[1], {"x": 1}],
}
COLUMNS = {
    "boolean": ["boolean"],
    "integers": ["tinyint", "int", "bigint"],
    "float, double": ["float", "double"],
    "decimal": ["decimal"],
    "string": ["string"],
    "binary": ["binary"],
    "date": ["date"],
    "timestamp": ["timestamp"],
}


def documented_conversions() -> list[list[str]]:
    section = DOCS.read_text(encoding="utf-8").split("### Conversions")[1]
    lines = section.split("An array column needs")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def is_converted(value: object, kind: str, data_format: str) -> bool:
    if data_format == "json" and isinstance(value, bytes):
        return False
    try:
        read(value, KINDS[kind], data_format)
    except BadFormat:
        return False
    return True


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_the_documented_table_of_conversions_is_correct(data_format: str) -> None:
    head, _, *rows = documented_conversions()
    assert head[1:] == list(COLUMNS)
    assert [row[0] for row in rows] == list(SAMPLES)
    for name, *cells in rows:
        for column, cell in zip(COLUMNS, cells, strict=True):
            only = {"JSON": "json", "msgpack": "msgpack"}.get(cell.partition(":")[0])
            if name == "bin (msgpack)":
                only = "msgpack"
            fits = cell != "\N{EN DASH}" and only in (None, data_format)
            for kind in COLUMNS[column]:
                found = any(is_converted(value, kind, data_format) for value in SAMPLES[name])
                assert found == fits, (name, kind, data_format)
