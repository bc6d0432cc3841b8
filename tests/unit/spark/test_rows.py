"""Payloads: packed columns are unpacked exactly; unsupported ones are named in an error."""

import contextlib
import datetime as dt
import decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types

from waltz_core.errors import BadFormat, BadRequest
from waltz_core.records.unpacking import Unpacker
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.rows import check_nullable, check_packed_type, pack_rows

UTC = dt.UTC
EVERY_TYPE = pa.table(
    {
        "int": pa.array([1, None], pa.int32()),
        "long": pa.array([-(1 << 63), None], pa.int64()),
        "float": pa.array([1.5, 0.1], pa.float32()),
        "double": pa.array([0.1, None], pa.float64()),
        "bool": pa.array([True, None], pa.bool_()),
        "string": pa.array(["grüße 🛩", None]),
        "void": pa.nulls(2),
        "tiny": pa.array([-128, None], pa.int8()),
        "no_null": pa.array([3, 4], pa.int16()),
        "binary": pa.array([b"\x00\xff", None], pa.binary()),
        "date": pa.array([dt.date(2013, 1, 31), None]),
        "timestamp": pa.array(
            [dt.datetime(2013, 1, 1, 10, 0, 0, 123456, UTC), None], pa.timestamp("us", "UTC")
        ),
        "timestamp_ntz": pa.array([dt.datetime(1913, 1, 1, 10), None], pa.timestamp("us")),  # noqa: DTZ001
        "decimal": pa.array(
            [decimal.Decimal("12345678901234567890.12"), None], pa.decimal128(38, 2)
        ),
        "dates": pa.array([[dt.date(2000, 1, 1), None], None], pa.list_(pa.date32())),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "map_int": pa.array([[(1, b"x")], None], pa.map_(pa.int32(), pa.binary())),
        "struct": pa.array(
            [{"x": 1, "y": b"q"}, None], pa.struct([("x", pa.int32()), ("y", pa.binary())])
        ),
        "structs": pa.array(
            [[{"d": dt.date(2001, 1, 1)}], None], pa.list_(pa.struct([("d", pa.date32())]))
        ),
    }
).combine_chunks()


def describe_row(index: int) -> str:
    return f"partition 0, transaction {index}"


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_every_spark_type_round_trips_exactly(data_format: str) -> None:
    batch = EVERY_TYPE.to_batches()[0]
    payloads = pack_rows(batch.columns, batch.schema.names, data_format)
    unpacked = Unpacker(list(batch.schema), data_format).columns(payloads, describe_row)
    for field, before, after in zip(batch.schema, batch.columns, unpacked, strict=True):
        assert after.type == field.type, field.name
        assert after.to_pylist() == before.to_pylist(), field.name


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@pytest.mark.parametrize("zone", ["America/St_Johns", "Europe/Amsterdam", "UTC"])
def test_timestamps_before_standard_time_keep_their_seconds(data_format: str, zone: str) -> None:
    kind = pa.timestamp("us", zone)
    moments = pa.array([-2_840_140_799_000_007, 0, None], kind)
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), moments)
    payloads = pack_rows([moments, nested], ["a", "b"], data_format)
    fields = [pa.field("a", kind), pa.field("b", nested.type)]
    assert Unpacker(fields, data_format).columns(payloads, str) == [moments, nested]


def test_the_error_for_a_value_of_another_type_names_its_row_and_column() -> None:
    payloads = pack_rows([pa.array(["1", "x"])], ["a"], "msgpack")
    with pytest.raises(BadFormat, match="transaction 0, column 'a': expected int32, found '1'"):
        Unpacker([pa.field("a", pa.int32())], "msgpack").columns(payloads, describe_row)


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@given(payload=st.binary(max_size=40))
def test_any_bytes_are_unpacked_or_raise_a_typed_error(data_format: str, payload: bytes) -> None:
    unpacker = Unpacker([pa.field("a", pa.int32()), pa.field("b", pa.date32())], data_format)
    with contextlib.suppress(BadFormat):
        columns = unpacker.columns(pa.array([payload], pa.binary()), describe_row)
        assert [len(column) for column in columns] == [1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_rejected_in_json(value: float) -> None:
    nested = pa.array([[0.5], [0.5, value]], pa.list_(pa.float64()))
    for column, json_path in ((pa.array([0.5, value]), "$.price"), (nested, "$.price[1]")):
        with pytest.raises(BadRequest, match="dataFormat=json: found") as caught:
            pack_rows([column], ["price"], "json")
        assert f"found {value} at {json_path};" in str(caught.value)
        back = Unpacker([pa.field("price", column.type)], "msgpack").columns(
            pack_rows([column], ["price"], "msgpack"), describe_row
        )
        assert str(back[0].to_pylist()) == str(column.to_pylist())
    with pytest.raises(BadFormat, match=r"partition 0, transaction 1: .*found NaN at \$\.price"):
        Unpacker([pa.field("price", pa.float64())], "json").columns(
            pa.array([b'{"price":1}', b'{"price":NaN}']), describe_row
        )


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_only_values_that_cannot_be_converted_become_null(data_format: str) -> None:
    fields = [pa.field("a", pa.int32()), pa.field("b", pa.map_(pa.string(), pa.int64()))]
    texts, maps = pa.array(["x"]), pa.array([[("k", 1)]], fields[1].type)
    rows = [[pa.array([1]), maps], [texts, maps], [pa.array([2]), texts], [texts, texts]]
    payloads = [pack_rows(row, ["a", "b"], data_format)[0].as_py() for row in rows]
    lacking = pack_rows([texts], ["c"], data_format)[0].as_py()
    data = pa.array([*payloads, b"\x93no map", lacking], pa.binary())
    unpacker = Unpacker(fields, data_format)
    columns, is_whole = unpacker.columns_with_nulls(data)
    pair = [("k", 1)]
    assert columns[0].to_pylist() == [1, None, 2, None, None, None]
    assert columns[1].to_pylist() == [pair, pair, None, None, None, None]
    assert is_whole.tolist() == [True, False, False, False, False, True]
    whole, good = unpacker.readable_columns(data)
    assert [column.to_pylist() for column in whole] == [[1] + [None] * 5, [pair] + [None] * 5]
    assert good.tolist() == is_whole.tolist()


# Types that are cast during conversion, and other types, with sample values.
PARTS: list[tuple[pa.DataType, st.SearchStrategy[object]]] = [
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.string(), st.text(max_size=3)),
    (pa.binary(), st.binary(max_size=3)),
    (pa.bool_(), st.booleans()),
    (pa.float32(), st.floats(allow_nan=False, allow_infinity=False, width=32)),
    (pa.null(), st.none()),
    (pa.decimal128(5, 2), st.decimals("-999.99", "999.99", places=2)),
    (pa.date32(), st.dates()),
    (
        pa.timestamp("us", "UTC"),
        st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001
    ),
    (pa.timestamp("us"), st.datetimes()),
]
KEYS = [part for part in PARTS if not pa.types.is_null(part[0])]


def list_of(part: tuple[pa.DataType, st.SearchStrategy[object]]) -> tuple[object, object]:
    kind, values = part
    return pa.list_(kind), st.lists(st.none() | values, max_size=3)


def map_of(part: tuple[pa.DataType, st.SearchStrategy[object]]) -> st.SearchStrategy[object]:
    kind, values = part
    return st.sampled_from(KEYS).map(
        lambda key: (
            pa.map_(key[0], kind),
            st.dictionaries(key[1], st.none() | values, max_size=3).map(lambda v: [*v.items()]),
        )
    )


def struct_of(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    def struct(parts: list[tuple[pa.DataType, st.SearchStrategy[object]]]) -> object:
        named = {f"f{number}": part for number, part in enumerate(parts)}
        values = {name: st.none() | part[1] for name, part in named.items()}
        return pa.struct([(name, part[0]) for name, part in named.items()]), st.fixed_dictionaries(
            values
        )

    return st.lists(inner, max_size=3).map(struct)


KINDS = st.recursive(
    st.sampled_from(PARTS),
    lambda inner: st.one_of(inner.map(list_of), inner.flatmap(map_of), struct_of(inner)),
    max_leaves=4,
)


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@given(data=st.data())
def test_any_nested_value_round_trips_with_a_null_at_each_level(
    data_format: str, data: st.DataObject
) -> None:
    kind, values = data.draw(KINDS)
    column = pa.array(data.draw(st.lists(st.none() | values, max_size=4)), kind)
    column = column.slice(data.draw(st.integers(0, len(column))))  # as Spark cuts its batches
    payloads = pack_rows([column], ["a"], data_format)
    unpacker = Unpacker([pa.field("a", kind)], data_format)
    back = unpacker.columns(payloads, describe_row)[0]
    back.validate(full=True)
    assert back.type == kind
    assert back.to_pylist() == column.to_pylist()
    again, is_whole = unpacker.columns_with_nulls(payloads)
    assert again[0].equals(back)
    assert is_whole.all()


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.struct([("d", pa.decimal128(5, 2))]), [None, {"d": None}]),
        (pa.list_(pa.struct([("d", pa.date32())])), [[None], None, []]),
        (pa.map_(pa.string(), pa.struct([("t", pa.timestamp("us", "UTC"))])), [[("k", None)]]),
        (pa.struct([("s", pa.struct([("d", pa.decimal128(38, 18))]))]), [None, {"s": None}]),
        (pa.struct([pa.field("d", pa.decimal128(5, 2), nullable=False)]), [None]),
        (
            pa.struct([("d", pa.decimal128(5, 2)), ("v", pa.list_(pa.null()))]),
            [None, {"d": None, "v": [None, None, None]}],
        ),
    ],
)
def test_values_under_a_null_are_not_cast(
    data_format: str, kind: pa.DataType, values: list[object]
) -> None:
    column = pa.array(values, kind)
    payloads = pack_rows([column], ["a"], data_format)
    back = Unpacker([pa.field("a", kind)], data_format).columns(payloads, describe_row)
    assert (back[0].type, back[0].to_pylist()) == (kind, values)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (pa.list_(pa.string()), b'{"a": "abc"}'),
        (pa.struct([("x", pa.int32())]), b'{"a": [1]}'),
        (pa.struct([("x", pa.int32())]), b'{"a": false}'),
        (pa.map_(pa.string(), pa.int32()), b'{"a": {"k": 1}}'),
        (pa.map_(pa.string(), pa.int32()), b'{"a": ["ab"]}'),
        (pa.map_(pa.string(), pa.int32()), b'{"a": [[null, 1]]}'),
        (pa.list_(pa.binary()), b'{"a": [1]}'),
        (pa.binary(), b'{"a": "a"}'),
    ],
)
def test_the_error_names_a_nested_value_of_another_type(kind: pa.DataType, payload: bytes) -> None:
    with pytest.raises(BadFormat, match="transaction 1, column 'a': expected "):
        Unpacker([pa.field("a", kind)], "json").columns(pa.array([b"{}", payload]), describe_row)


def test_the_error_names_a_payload_with_a_lone_surrogate() -> None:
    payloads = pa.array([b"{}", b'{"a": "\\ud800"}'])
    with pytest.raises(
        BadFormat, match="transaction 1: expected a payload in json: found an unpaired surrogate"
    ):
        Unpacker([pa.field("a", pa.string())], "json").columns(payloads, describe_row)


def test_the_error_names_a_payload_with_unhashable_keys() -> None:
    payload = b"\x81\x91\x01\x01"  # {[1]: 1}
    with pytest.raises(BadFormat, match="transaction 0: expected a payload in msgpack"):
        Unpacker([pa.field("a", pa.int32())], "msgpack").columns(pa.array([payload]), describe_row)


STRING, INT, VOID = types.StringType(), types.IntegerType(), types.NullType()
STRUCT = types.StructType([types.StructField("x", INT)])


@pytest.mark.parametrize(
    ("key", "data_format", "sentence"),
    [
        (STRUCT, "msgpack", "use dataFormat=json, or cast the keys"),
        (types.ArrayType(INT), "msgpack", "use dataFormat=json, or cast the keys"),
        (VOID, "msgpack", "a packed map cannot have null keys."),
        (VOID, "json", "a packed map cannot have null keys."),
    ],
)
def test_maps_whose_keys_cannot_be_packed_are_rejected(
    key: types.DataType, data_format: str, sentence: str
) -> None:
    kind = types.MapType(key, VOID)
    nested = types.ArrayType(types.StructType([types.StructField("m", kind)]))
    for each, name in ((kind, "'a'"), (nested, "'a.m'")):
        with pytest.raises(BadRequest, match=sentence) as caught:
            check_packed_type("a", each, data_format)
        assert name in str(caught.value)


def test_json_packs_maps_with_any_key() -> None:
    check_packed_type("a", types.MapType(STRUCT, INT), "json")
    kind = pa.map_(pa.struct([("d", pa.date32())]), pa.int32())
    column = pa.array([[({"d": dt.date(2000, 1, 1)}, 1), ({"d": None}, 2)], None], kind)
    back = Unpacker([pa.field("a", kind)], "json").columns(
        pack_rows([column], ["a"], "json"), describe_row
    )
    assert back[0].equals(column)


@pytest.mark.parametrize(
    ("kind", "nullable", "name"),
    [
        (INT, False, "'a'"),
        (types.StructType([types.StructField("x", INT, nullable=False)]), True, "'a.x'"),
        (types.ArrayType(INT, containsNull=False), True, "'a.element'"),
        (types.MapType(STRING, INT, valueContainsNull=False), True, "'a.value'"),
        (
            types.ArrayType(types.MapType(STRUCT, INT, valueContainsNull=False)),
            True,
            "'a.element.value'",
        ),
    ],
)
def test_mode_permissive_rejects_columns_that_are_not_null(
    kind: types.DataType, nullable: bool, name: str
) -> None:
    with pytest.raises(BadRequest, match=r"Hint: use .*toNullable") as caught:
        check_nullable("a", kind, nullable=nullable)
    assert f"column {name} is NOT NULL in the schema" in str(caught.value)
    as_struct = types.StructType([types.StructField("a", kind, nullable=nullable)])
    check_nullable("a", as_struct.toNullable(), nullable=True)  # as the hint suggests


def test_reader_and_writer_reject_an_invalid_schema_before_any_task() -> None:
    connect = {"path": "zk1:2181/waltz/none", "dataFormat": "msgpack"}
    source = WaltzDataSource(connect)
    log = types.StructField("header", INT, nullable=False)  # the log has no null there
    not_nullable = types.StructType([log, types.StructField("a", INT, nullable=False)])
    permissive = WaltzDataSource(connect | {"mode": "PERMISSIVE"})
    with pytest.raises(BadRequest, match="column 'a' is NOT NULL in the schema"):
        permissive.reader(not_nullable)
    with pytest.raises(BadRequest, match="column 'a' is NOT NULL in the schema"):
        permissive.streamReader(not_nullable).initialOffset()
    source.reader(not_nullable)  # checked row by row
    for name, kind in (("commit_time", types.TimestampType()), ("_corrupt_record", STRING)):
        wrong = types.StructType([*not_nullable, types.StructField(name, kind, nullable=False)])
        with pytest.raises(
            BadRequest, match=f"column '{name}' is NOT NULL in the schema, but it is"
        ):
            source.reader(wrong)
    source._parse_write_options(not_nullable)  # written columns may be declared as not null
    keyed = types.StructType([types.StructField("a", types.MapType(STRUCT, INT))])
    for call in (source.reader, lambda schema: source.writer(schema, overwrite=False)):
        with pytest.raises(BadRequest, match="but dataFormat=msgpack does not support keys"):
            call(keyed)
    WaltzDataSource(connect | {"dataFormat": "json"})._parse_write_options(keyed)
