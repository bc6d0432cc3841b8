"""The serializers `Avro` and `Protobuf`: requests to the registry, and the schema cache."""

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.serializers import CPickleSerializer

from tests.protobuf_files import encode_descriptor, order_file
from tests.schema_registry import InProcessRegistry, run_schema_registry
from waltz_core.client import JSON, Avro, Protobuf, WaltzClient, Zstd
from waltz_core.config import ClientConfig
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.schemas.formats import SCHEMAS_MAX, SchemaCache
from waltz_core.schemas.registered_schemas import SchemaType
from waltz_core.schemas.registry_client import SchemaRegistry

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "item", "type": "string"}],
}
RING = {"id": 1, "item": "ring"}


@pytest.fixture
def registry() -> Iterator[InProcessRegistry]:
    with run_schema_registry() as registry:
        yield registry


def test_a_payload_consists_of_prefix_and_value(registry):
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    assert orders.serialize(RING).hex() == "0000000001" + "02" + "0872696e67"
    assert orders.deserialize(bytes.fromhex("0000000001020872696e67")) == RING


def test_a_schema_is_registered_once_and_requested_once(registry):
    orders = Avro(registry.url, subject="orders-value", schema=json.dumps(ORDER))
    reader = Avro(registry.url)
    assert [reader.deserialize(orders.serialize(RING)) for _ in range(3)] == [RING] * 3
    assert registry.requests == [
        ("POST", "/subjects/orders-value/versions"),
        ("GET", "/schemas/ids/1"),
    ]
    # All serializers of a process share the schemas.
    assert Avro(registry.url).deserialize(orders.serialize(RING)) == RING
    assert len(registry.requests) == 2


def test_an_incompatible_schema_is_rejected_before_encoding(registry):
    Avro(registry.url, subject="orders-value", schema=ORDER).serialize(RING)
    more = ORDER | {"fields": [*ORDER["fields"], {"name": "price", "type": "double"}]}
    with pytest.raises(BadRequest, match="not compatible"):
        Avro(registry.url, subject="orders-value", schema=more).serialize(RING | {"price": 1.0})


def test_readers_of_old_and_new_schemas_get_the_fields_that_were_written(registry):
    older = Avro(registry.url, subject="orders-value", schema=ORDER)
    price = {"name": "price", "type": ["null", "double"], "default": None}
    newer = Avro(
        registry.url, subject="orders-value", schema=ORDER | {"fields": [*ORDER["fields"], price]}
    )
    data = [older.serialize(RING), newer.serialize(RING | {"price": 2.5})]
    for reader in (older, newer, Avro(registry.url)):
        assert [reader.deserialize(each) for each in data] == [RING, RING | {"price": 2.5}]


def test_a_serializer_can_write_a_given_version_of_the_subject(registry):
    first, second = registry.put("s", json.dumps(ORDER)), registry.put("s", '"string"')
    assert Avro(registry.url, subject="s").serialize("x")[:5] == second.to_bytes(5, "big")
    assert Avro(registry.url, subject="s", version=1).serialize(RING)[:5] == first.to_bytes(
        5, "big"
    )
    with pytest.raises(BadConfig, match="no version 3 of subject 's'"):
        Avro(registry.url, subject="s", version=3).serialize(RING)


def test_a_protobuf_serializer_writes_the_first_or_the_named_type_of_the_schema(registry):
    registry.put("orders-value", encode_descriptor(order_file()), "PROTOBUF")
    orders = Protobuf(registry.url, subject="orders-value")
    assert orders.serialize({"id": 5}).hex() == "0000000001" + "00" + "0805"
    refunds = Protobuf(registry.url, subject="orders-value", message="shop.Refund")
    data = refunds.serialize({"id": 5})
    assert data.hex() == "0000000001" + "0202" + "0805"
    assert Protobuf(registry.url).deserialize(data) == {"id": 5}


def test_invalid_arguments_are_rejected_without_a_request_to_the_registry(registry):
    with pytest.raises(BadConfig, match="one of the arguments schema and version, found both"):
        Avro(registry.url, schema=ORDER, version=1)
    with pytest.raises(BadRequest, match="argument schema: Avro schema: expected a type"):
        Avro(registry.url, schema={"type": 7})
    with pytest.raises(BadRequest, match="argument schema: expected JSON"):
        Avro(registry.url, schema={"type": {1, 2}})
    with pytest.raises(BadConfig, match="without a user and a password"):
        Protobuf("http://u:p@r")
    for each in (Avro(registry.url), Protobuf(registry.url)):
        with pytest.raises(BadConfig, match="writing needs the argument subject"):
            each.serialize({})
    assert registry.requests == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "at least 5 bytes"),
        (b"\x83\xa2id\x01", "begins with byte 0x00"),
        (b"\0\0\0\0\x63x", "schema 99 does not exist"),
        (b"\0\0\0\0\x01\x02", "not a value of the Avro schema"),
        (b"\0\0\0\0\x02\x02", "kind AVRO, found 'PROTOBUF'"),
        (b"\0\0\0\0\x03\x02", "schema 3: Avro schema: type 'R' contains itself"),
    ],
)
def test_payloads_that_cannot_be_read_are_a_bad_format(registry, data, text):
    registry.add(json.dumps(ORDER))
    registry.add(encode_descriptor(order_file()), "PROTOBUF")
    registry.add('{"type":"record","name":"R","fields":[{"name":"r","type":["null","R"]}]}')
    with pytest.raises(BadFormat, match=rf"transaction data: .*{text}"):
        Avro(registry.url).deserialize(data)


def test_an_outage_of_the_registry_is_not_reported_as_a_bad_payload(registry):
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    data = orders.serialize(RING)
    registry.fault = (503, b"")
    reader = Avro(registry.url)
    with pytest.raises(Unavailable, match="status 503"):
        reader.deserialize(data)
    orders.serialize(RING)  # the schema is known
    registry.fault = None
    assert reader.deserialize(data) == RING


def test_a_missing_schema_is_requested_again_later(registry):
    now_s = [100.0]
    cache = SchemaCache(SchemaRegistry(registry.url), SchemaType.AVRO, lambda: now_s[0])
    data = b"\0\0\0\0\x01\x02"
    for _ in range(2):
        with pytest.raises(BadFormat, match="schema 1 does not exist"):
            cache.decode(data)
    assert len(registry.requests) == 1
    registry.add('"long"')
    now_s[0] += 10
    assert cache.decode(data) == 1


def test_the_cache_is_limited(registry):
    cache = SchemaCache(SchemaRegistry(registry.url), SchemaType.AVRO)
    registry.by_id = {number: {"schema": '"long"'} for number in range(SCHEMAS_MAX + 50)}
    for number in range(SCHEMAS_MAX + 50):
        assert cache.decode(b"\0" + number.to_bytes(4, "big") + b"\x02") == 1
    assert len(cache._codecs) == SCHEMAS_MAX


def test_a_pickled_serializer_does_not_contain_cached_schemas(registry, tmp_path):
    registry.user = "waltz:a secret"
    file = tmp_path / "auth"
    file.write_text(registry.user)
    orders = Avro(registry.url, auth_file=str(file), subject="orders-value", schema=ORDER)
    data = orders.serialize(RING)
    sent = CPickleSerializer().dumps(orders)
    assert b"secret" not in sent
    assert CPickleSerializer().loads(sent).serialize(RING) == data
    assert "secret" not in repr(vars(orders))


def test_the_schema_prefix_is_inside_the_compressed_value(registry):
    orders = Zstd(Avro(registry.url, subject="orders-value", schema=ORDER), minimum_bytes=10)
    long = {"id": 1, "item": "ring " * 100}
    assert orders.deserialize(orders.serialize(long)) == long


# --- with a log


COLUMNS = pa.schema(
    [
        ("transaction_id", pa.int64()),
        ("id", pa.int64()),
        ("item", pa.string()),
        ("later", pa.date32()),
    ]
)


@pytest.fixture
def client() -> Iterator[WaltzClient]:
    with MemoryWaltz(partition_count=1) as waltz, waltz.client() as client:
        yield client


def test_a_scan_unpacks_payloads_by_the_schemas_of_their_writers(registry, client):
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    swapped = ORDER | {"fields": ORDER["fields"][::-1]}
    client.append(orders.serialize(RING), partition=0).result()
    registry.subjects.clear()
    other = Avro(registry.url, subject="orders-value", schema=swapped)
    client.append(other.serialize({"id": 2, "item": "pen"}), partition=0).result()
    table = client.scan(0, schema=COLUMNS, data_format=Avro(registry.url)).read_all()
    assert table.to_pylist() == [
        {"transaction_id": 0, "id": 1, "item": "ring", "later": None},
        {"transaction_id": 1, "id": 2, "item": "pen", "later": None},
    ]


def test_the_error_of_a_scan_names_the_transaction(registry, client):
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    client.append(orders.serialize(RING), partition=0).result()
    client.append(JSON.serialize(RING), partition=0).result()
    with pytest.raises(
        BadFormat,
        match=r"partition 0, transaction 1: expected a payload in avro: .*0x00, found 0x7b",
    ):
        client.scan(0, schema=COLUMNS, data_format=orders).read_all()
    text = pa.schema([("id", pa.string())])
    with pytest.raises(BadFormat, match="transaction 0, column 'id': expected string, found 1"):
        client.scan(0, stop=1, schema=text, data_format=orders).read_all()


def test_an_outage_of_the_registry_ends_a_scan(registry, client):
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    client.append(orders.serialize(RING), partition=0).result()
    registry.fault = "reset"
    with pytest.raises(Unavailable, match="the schema registry at"):
        client.scan(0, schema=COLUMNS, data_format=Avro(registry.url)).read_all()


@pytest.mark.parametrize("name", ["avro", "protobuf"])
def test_a_scan_rejects_a_format_name_in_place_of_a_format_object(client, name):
    with pytest.raises(BadRequest, match=rf"found '{name}'. Hint: pass {name.capitalize()}\("):
        client.scan(0, schema=COLUMNS, data_format=name)


def test_the_schema_prefix_is_inside_the_encrypted_envelope(registry, tmp_path):
    (tmp_path / "a").write_text("0f" * 32)
    orders = Avro(registry.url, subject="orders-value", schema=ORDER)
    config = ClientConfig(encryption_keys=str(tmp_path), encryption_key_id="a")
    with MemoryWaltz(partition_count=1) as waltz, waltz.client(config) as client:
        client.append(orders.serialize(RING), partition=0).result()
        (stored,) = waltz.transactions(0)
        assert b"ring" not in stored.data
        assert stored.data[:3] == b"WZE"
        table = client.scan(0, schema=COLUMNS, data_format=orders).read_all()
        assert table["item"].to_pylist() == ["ring"]
