"""Payloads: what is packed is unpacked exactly, and what does not fit is named."""

import contextlib
import datetime as dt
import decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import BadFormat, BadRequest
from waltz_spark.rows import Unpacker, pack

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


def where(index: int) -> str:
    return f"partition 0, transaction {index}"


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_every_spark_type_comes_back_exactly(data_format: str) -> None:
    batch = EVERY_TYPE.to_batches()[0]
    payloads = pack(batch.columns, batch.schema.names, data_format)
    unpacked = Unpacker(list(batch.schema), data_format).columns(payloads, where)
    for field, before, after in zip(batch.schema, batch.columns, unpacked, strict=True):
        assert after.type == field.type, field.name
        assert after.to_pylist() == before.to_pylist(), field.name


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
            st.none() | st.text(),
            st.none() | st.floats(allow_nan=False, allow_infinity=False, width=64),
            st.none() | st.binary(),
        ),
        max_size=20,
    )
)
def test_any_row_round_trips(data_format: str, rows: list[tuple[object, ...]]) -> None:
    kinds = [pa.int64(), pa.string(), pa.float64(), pa.binary()]
    columns = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(kinds)]
    names = ["a", "b", "c", "d"]
    fields = [pa.field(name, kind) for name, kind in zip(names, kinds, strict=True)]
    payloads = pack(columns, names, data_format)
    unpacked = Unpacker(fields, data_format).columns(payloads, where)
    assert [c.to_pylist() for c in unpacked] == [c.to_pylist() for c in columns]


def test_a_column_that_a_payload_lacks_is_null() -> None:
    payloads = pack([pa.array([1])], ["a"], "msgpack")
    found = Unpacker([pa.field("b", pa.string())], "msgpack").columns(payloads, where)
    assert found[0].to_pylist() == [None]


def test_a_value_of_another_type_names_its_row_and_column() -> None:
    payloads = pack([pa.array(["1", "x"])], ["a"], "msgpack")
    with pytest.raises(BadFormat, match="transaction 0: column 'a' is to be int32, found '1'"):
        Unpacker([pa.field("a", pa.int32())], "msgpack").columns(payloads, where)


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
@given(payload=st.binary(max_size=40))
def test_any_bytes_give_columns_or_a_typed_error(data_format: str, payload: bytes) -> None:
    unpacker = Unpacker([pa.field("a", pa.int32()), pa.field("b", pa.date32())], data_format)
    with contextlib.suppress(BadFormat):
        found = unpacker.columns(pa.array([payload], pa.binary()), where)
        assert [len(column) for column in found] == [1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_json_has_no_number_that_is_not_finite(value: float) -> None:
    nested = pa.array([[0.5], [0.5, value]], pa.list_(pa.float64()))
    for column, place in ((pa.array([0.5, value]), "$.price"), (nested, "$.price[1]")):
        with pytest.raises(BadRequest, match="dataFormat=json: found") as caught:
            pack([column], ["price"], "json")
        assert f"found {value} at {place};" in str(caught.value)
        back = Unpacker([pa.field("price", column.type)], "msgpack").columns(
            pack([column], ["price"], "msgpack"), where
        )
        assert str(back[0].to_pylist()) == str(column.to_pylist())
    with pytest.raises(BadFormat, match=r"partition 0, transaction 1: .*found NaN at \$\.price"):
        Unpacker([pa.field("price", pa.float64())], "json").columns(
            pa.array([b'{"price":1}', b'{"price":NaN}']), where
        )


@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_piecemeal_takes_away_only_what_does_not_fit(data_format: str) -> None:
    fields = [pa.field("a", pa.int32()), pa.field("b", pa.map_(pa.string(), pa.int64()))]
    texts, maps = pa.array(["x"]), pa.array([[("k", 1)]], fields[1].type)
    rows = [[pa.array([1]), maps], [texts, maps], [pa.array([2]), texts], [texts, texts]]
    payloads = [pack(row, ["a", "b"], data_format)[0].as_py() for row in rows]
    lacking = pack([texts], ["c"], data_format)[0].as_py()
    data = pa.array([*payloads, b"\x93no map", lacking], pa.binary())
    unpacker = Unpacker(fields, data_format)
    columns, is_whole = unpacker.piecemeal(data)
    pair = [("k", 1)]
    assert columns[0].to_pylist() == [1, None, 2, None, None, None]
    assert columns[1].to_pylist() == [pair, pair, None, None, None, None]
    assert is_whole.tolist() == [True, False, False, False, False, True]
    whole, good = unpacker.what_can_be_read(data)
    assert [column.to_pylist() for column in whole] == [[1] + [None] * 5, [pair] + [None] * 5]
    assert good.tolist() == is_whole.tolist()
