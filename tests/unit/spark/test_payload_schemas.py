"""Avro and Protobuf in Spark without a cluster: options, rows of a write, columns of a read."""

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.serializers import CPickleSerializer
from pyspark.sql import types
from pyspark.sql.types import StructType

from tests.protobuf_files import encode_descriptor, order_file
from tests.schema_registry import InProcessRegistry, run_schema_registry
from tests.unit.spark.test_rows import EVERY_TYPE, PARTS, list_of, struct_of
from waltz_core.client import Avro, Protobuf
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_core.records.unpacking import Unpacker
from waltz_core.schemas.avro_codec import AvroCodec
from waltz_core.schemas.avro_schemas import schema_of_columns
from waltz_core.schemas.registered_schemas import RegisteredSchema, SchemaType
from waltz_spark.datasource.fetch import BatchConverter
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.options import WriteOptions, parse_read, parse_write
from waltz_spark.payload_encryption import PayloadEncryptor
from waltz_spark.payload_schemas import resolve_write_schema
from waltz_spark.rows import pack_rows
from waltz_spark.spark_version import arrow_schema
from waltz_spark.writer.columns import RowConverter
from waltz_spark.writer.row_keys import RowKeys

CONNECT = {"connect": "zk1:2181/waltz/none"}
SUBJECT = {"schemaSubject": "orders-value"}
UTC = dt.UTC


@pytest.fixture
def registry() -> Iterator[InProcessRegistry]:
    with run_schema_registry() as registry:
        yield registry


def options_for(
    registry: InProcessRegistry, data_format: str = "avro", **more: str
) -> dict[str, str]:
    return {**CONNECT, "dataFormat": data_format, "schemaRegistry": registry.url, **more}


def resolve_and_convert(
    options: dict[str, str], batch: pa.RecordBatch
) -> tuple[WriteOptions, pa.RecordBatch]:
    """Return the options as the driver passes them, and the append columns of a task."""
    found = resolve_write_schema(parse_write(options), list(batch.schema))
    sent: WriteOptions = CPickleSerializer().loads(CPickleSerializer().dumps(found))
    return sent, RowConverter(sent, 4, {}, keeps_input_columns=False).convert(batch).append


TYPES: dict[str, types.DataType] = {
    "long": types.LongType(),
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "date": types.DateType(),
    "timestamp": types.TimestampType(),
    "counts": types.MapType(types.StringType(), types.IntegerType()),
    "lines": types.ArrayType(StructType([types.StructField("sku", types.StringType())])),
}


def schema_of(columns: str) -> StructType:
    """Return the schema of columns, "id long, item string"; DDL needs a session."""
    parts = [each.split() for each in columns.split(",")]
    return StructType([types.StructField(name, TYPES[kind]) for name, kind in parts])


def read(options: dict[str, str], columns: str, data: pa.Array, **more: str) -> pa.RecordBatch:
    schema = schema_of(columns)
    count = len(data)
    batch = pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([2] * count, pa.int32()),
            "transaction_id": pa.array(range(count), pa.int64()),
            "header": pa.array([0] * count, pa.int32()),
            "data": data,
        }
    )
    return BatchConverter(parse_read(options | more), schema).convert(batch)


# --- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataFormat": "avro"}, "dataFormat=avro needs option schemaRegistry"),
        ({"dataFormat": "protobuf"}, "dataFormat=protobuf needs option schemaRegistry"),
        ({"schemaRegistry": "http://r"}, "'schemaRegistry' needs dataFormat=avro or protobuf"),
        (
            {"dataFormat": "json", "schemaRegistryAuthFile": "/f"},
            "'schemaRegistryAuthFile' needs dataFormat=avro or protobuf",
        ),
        ({"dataFormat": "avro", "schemaRegistry": "r:80"}, "expected a URL like http://"),
    ],
)
def test_only_formats_with_schemas_accept_and_require_a_registry(options, text):
    for parse in (parse_read, parse_write):
        with pytest.raises(BadConfig, match=text):
            parse(CONNECT | options)


def test_a_password_in_the_url_is_rejected_without_showing_it():
    options = {"dataFormat": "avro", "schemaRegistry": "http://waltz:secret@r"}
    with pytest.raises(BadConfig, match="without a user and a password") as caught:
        parse_read(CONNECT | options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataFormat": "avro"}, "needs option schemaSubject"),
        ({"dataFormat": "avro", "schemaMessage": "a.B"} | SUBJECT, "needs dataFormat=protobuf"),
        (
            {"dataFormat": "avro", "schemaVersion": "0"} | SUBJECT,
            "'schemaVersion': expected an int",
        ),
        ({"dataFormat": "msgpack"} | SUBJECT, "'schemaRegistry' needs dataFormat"),
    ],
)
def test_invalid_schema_options_of_a_write_are_rejected(options, text):
    with pytest.raises(BadConfig, match=text):
        parse_write(CONNECT | {"schemaRegistry": "http://r"} | options)


def test_the_default_version_depends_on_the_format():
    options = CONNECT | {"schemaRegistry": "http://r"} | SUBJECT
    for data_format, version, number, is_derived_from_columns in (
        ("avro", None, None, True),
        ("avro", "latest", None, False),
        ("Avro", "3", 3, False),
        ("protobuf", None, None, False),
    ):
        chosen = {} if version is None else {"schemaVersion": version}
        found = parse_write(options | chosen | {"dataFormat": data_format}).registry
        assert found is not None
        assert (found.version, found.is_derived_from_columns) == (number, is_derived_from_columns)


@pytest.mark.parametrize(
    ("data_format", "key"),
    [("avro", types.IntegerType()), ("protobuf", types.ArrayType(types.LongType()))],
)
def test_unsupported_map_keys_are_rejected_on_the_driver(data_format, key):
    kind = types.MapType(key, types.IntegerType())
    schema = StructType([types.StructField("m", kind)])
    options = CONNECT | {"dataFormat": data_format, "schemaRegistry": "http://r"} | SUBJECT
    with pytest.raises(
        BadRequest, match=f"dataFormat={data_format} does not support keys of this type"
    ):
        WaltzDataSource(options)._parse_write_options(schema)


# --- rows and columns

ROWS = pa.RecordBatch.from_pydict(
    {
        "id": pa.array([1, 2], pa.int64()),
        "item": pa.array(["ring", None]),
        "price": pa.array([dt.date(2020, 1, 1), None], pa.date32()),
    }
)


def test_a_write_registers_the_schema_of_its_columns_on_the_driver(registry):
    options, append = resolve_and_convert(options_for(registry, **SUBJECT), ROWS)
    assert registry.requests == [("POST", "/subjects/orders-value/versions")]
    assert json.loads(registry.by_id[1]["schema"]) == schema_of_columns(list(ROWS.schema))
    first = append.column("data")[0].as_py()
    assert first.hex() == "0000000001" + "0202" + "020872696e67" + "02ac9d02"
    reader = Avro(registry.url)
    assert reader.deserialize(first) == {"id": 1, "item": "ring", "price": dt.date(2020, 1, 1)}
    assert options.registry.schema.schema_id == 1
    # Tasks need no registry to write rows, or to find their rows in the log.
    keys = RowKeys(parse_write(options_for(registry, identityColumns="id,price", **SUBJECT)))
    assert keys.keys_of_record(0, 0, first) == keys.keys_of_record(0, 5, first)


def test_identity_columns_alone_determine_the_row_hash(registry):
    write_options = options_for(registry, identityColumns="id,price", **SUBJECT)
    options, append = resolve_and_convert(write_options, ROWS)
    registry.fault = "reset"
    keys = RowKeys(options)
    (first_row, second_row) = append.column("data").to_pylist()
    changed = ROWS.set_column(1, "item", pa.array(["pen", "cup"]))
    shaped = RowConverter(options, 4, {}, keeps_input_columns=False).convert(changed).append
    (other, _) = shaped.column("data").to_pylist()
    assert keys.keys_of_record(0, 0, first_row) == keys.keys_of_record(0, 0, other)
    assert keys.keys_of_record(0, 0, first_row) != keys.keys_of_record(0, 0, second_row)


def test_an_incompatible_schema_is_rejected_before_any_task(registry):
    resolve_and_convert(options_for(registry, **SUBJECT), ROWS)
    field = pa.field("amount", pa.float64(), nullable=False)
    with pytest.raises(BadRequest, match="not compatible"):
        resolve_write_schema(parse_write(options_for(registry, **SUBJECT)), [*ROWS.schema, field])
    nullable = [*ROWS.schema, field.with_nullable(True)]
    resolve_write_schema(parse_write(options_for(registry, **SUBJECT)), nullable)
    assert len(registry.subjects["orders-value"]) == 2


def test_columns_are_written_with_a_registered_version(registry):
    fields = [
        {"name": "price", "type": ["null", {"type": "int", "logicalType": "date"}]},
        {"name": "id", "type": "int"},
        {"name": "item", "type": ["null", "string"], "default": None},
        {"name": "more", "type": "string", "default": "x"},
    ]
    registry.put("orders-value", json.dumps({"type": "record", "name": "R", "fields": fields}))
    write_options = options_for(registry, schemaVersion="latest", **SUBJECT)
    _, append = resolve_and_convert(write_options, ROWS)
    found = [Avro(registry.url).deserialize(row) for row in append.column("data").to_pylist()]
    assert found[0] == {"id": 1, "item": "ring", "price": dt.date(2020, 1, 1), "more": "x"}
    large = ROWS.set_column(0, "id", pa.array([1, 1 << 40]))
    with pytest.raises(BadRequest, match="field 'id': 1099511627776 is out of the range of int"):
        resolve_and_convert(write_options, large)
    with pytest.raises(
        BadRequest, match="column 'nothing': subject 'orders-value' has no such field"
    ):
        resolve_and_convert(write_options, ROWS.append_column("nothing", pa.array([1, 2])))


def test_protobuf_writes_a_message_of_the_registered_file(registry):
    registry.put("orders-value", encode_descriptor(order_file()), "PROTOBUF")
    batch = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([1, 2], pa.int64()),
            "at": pa.array([dt.datetime(2020, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            "counts": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
            "lines": pa.array([[{"sku": "x"}], []], pa.list_(pa.struct([("sku", pa.string())]))),
        }
    )
    write_options = options_for(registry, "protobuf", **SUBJECT)
    _, append = resolve_and_convert(write_options, batch)
    first, second = append.column("data").to_pylist()
    assert first[:7] == b"\0\0\0\0\1\0\x08"
    assert Protobuf(registry.url).deserialize(first)["lines"] == [{"sku": "x", "count": 0}]
    columns = "id long, at timestamp, counts counts, lines lines"
    back = read(options_for(registry, "protobuf"), columns, append.column("data"))
    assert back.to_pylist() == batch.to_pylist()
    assert "at" not in Protobuf(registry.url).deserialize(second)
    refunds = write_options | {"schemaMessage": "shop.Refund"}
    assert (
        resolve_and_convert(refunds, batch.select(["id"]))[1].column("data")[0].as_py()[5:7]
        == b"\2\2"
    )
    with pytest.raises(BadRequest, match=r"column 'at': subject .* has no such field; it has id"):
        resolve_and_convert(refunds, batch)


def test_every_spark_type_that_avro_supports_round_trips_exactly(registry):
    batch = EVERY_TYPE.drop_columns(["map_int"]).to_batches()[0]
    _, append = resolve_and_convert(options_for(registry, **SUBJECT), batch)
    unpacker = Unpacker(list(batch.schema), "avro", decode=Avro(registry.url).decode)
    back = unpacker.columns(append.column("data"), str)
    for part, before, after in zip(batch.schema, batch.columns, back, strict=True):
        assert (after.type, after.to_pylist()) == (part.type, before.to_pylist()), part.name


def map_with_text_keys(part):
    kind, values = part
    keys = st.text(max_size=3)
    pairs = st.dictionaries(keys, st.none() | values, max_size=3).map(lambda v: [*v.items()])
    return pa.map_(pa.string(), kind), pairs


KINDS = st.recursive(
    st.sampled_from(PARTS),
    lambda inner: st.one_of(inner.map(list_of), inner.map(map_with_text_keys), struct_of(inner)),
    max_leaves=4,
)


@given(data=st.data())
def test_any_nested_column_round_trips_through_avro(data):
    kind, values = data.draw(KINDS)
    column = pa.array(data.draw(st.lists(st.none() | values, max_size=4)), kind)
    column = column.slice(data.draw(st.integers(0, len(column))))  # as Spark cuts its batches
    text = json.dumps(schema_of_columns([pa.field("a", kind)]))
    codec = AvroCodec(RegisteredSchema(1, SchemaType.AVRO, text))
    payloads = pack_rows([column], ["a"], "avro", codec.encode)
    unpacker = Unpacker([pa.field("a", kind)], "avro", decode=codec.decode)
    back = unpacker.columns(payloads, str)[0]
    back.validate(full=True)
    assert (back.type, back.to_pylist()) == (kind, column.to_pylist())
    again, is_whole = unpacker.columns_with_nulls(payloads)
    assert again[0].equals(back)
    assert is_whole.all()


def test_the_avro_type_of_a_not_null_column_is_not_a_union(registry):
    schema = StructType([types.StructField("id", types.LongType(), nullable=False)])
    options = resolve_write_schema(
        parse_write(options_for(registry, **SUBJECT)), list(arrow_schema(schema))
    )
    fields = json.loads(options.registry.schema.text)["fields"]
    assert fields[0] == {"name": "id", "type": "long"}


# --- reading


def test_rows_of_old_and_new_schemas_are_read_with_the_reader_schema(registry):
    older = pa.RecordBatch.from_pydict({"id": pa.array([1], pa.int32()), "gone": pa.array(["x"])})
    registry.put("a", "0")
    _, first = resolve_and_convert(options_for(registry, schemaSubject="s1"), older)
    _, second = resolve_and_convert(options_for(registry, schemaSubject="s2"), ROWS)
    data = pa.concat_arrays([first.column("data"), second.column("data")])
    found = read(
        options_for(registry), "transaction_id long, ID long, item string, price date", data
    )
    assert found.to_pylist() == [
        {"transaction_id": 0, "ID": 1, "item": None, "price": None},
        {"transaction_id": 1, "ID": 1, "item": "ring", "price": dt.date(2020, 1, 1)},
        {"transaction_id": 2, "ID": 2, "item": None, "price": None},
    ]


def test_the_mode_determines_the_result_for_payloads_that_cannot_be_read(registry):
    _, append = resolve_and_convert(options_for(registry, **SUBJECT), ROWS)
    good = append.column("data").to_pylist()
    unknown = b"\0\0\0\0\x63" + good[0][5:]
    data = pa.array([good[0], b"{}", unknown, good[0][:-1], good[1]], pa.binary())
    options = options_for(registry)
    with pytest.raises(BadFormat, match="partition 2, transaction 1: expected a payload in avro: "):
        read(options, "id long", data)
    nulls = read(options, "id long, _corrupt_record binary", data, mode="PERMISSIVE")
    assert nulls.to_pydict() == {
        "id": [1, None, None, None, 2],
        "_corrupt_record": [None, *data.to_pylist()[1:4], None],
    }
    dropped = read(options, "transaction_id long, id long", data, mode="DROPMALFORMED")
    assert dropped.to_pydict() == {"transaction_id": [0, 4], "id": [1, 2]}


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
def test_an_unavailable_schema_registry_fails_the_read_in_every_mode(registry, mode):
    _, append = resolve_and_convert(options_for(registry, **SUBJECT), ROWS)
    registry.fault = (503, b"")
    with pytest.raises(Unavailable, match=r"schema registry at .* status 503"):
        read(options_for(registry), "id long", append.column("data"), mode=mode)
    registry.fault = (401, b"")
    with pytest.raises(BadConfig, match="rejects the credentials"):
        read(options_for(registry), "id long", append.column("data"), mode=mode)


def test_driver_and_tasks_read_credentials_from_a_file(registry, tmp_path):
    registry.user = "waltz:a secret"
    file = tmp_path / "auth"
    file.write_text(registry.user)
    write_options = options_for(registry, schemaRegistryAuthFile=str(file))
    options, append = resolve_and_convert(write_options | SUBJECT, ROWS)
    assert read(write_options, "id long", append.column("data")).to_pydict() == {"id": [1, 2]}
    assert "secret" not in repr(options)
    assert b"secret" not in CPickleSerializer().dumps(options)


def test_the_schema_prefix_is_inside_the_encrypted_payload(registry, tmp_path: Path):
    (tmp_path / "a").write_text("0f" * 32)
    keys = {"encryptionKeys": str(tmp_path)}
    options, append = resolve_and_convert(
        options_for(registry, **keys, encryptionKeyId="a", **SUBJECT), ROWS
    )
    sealed = PayloadEncryptor(options).encrypt_columns(append, 2).column("data")
    assert {bytes(row)[:3] for row in sealed.to_pylist()} == {b"WZE"}
    found = read(options_for(registry), "id long, data_error string", sealed, **keys)
    assert found.to_pydict() == {"id": [1, 2], "data_error": [None, None]}
