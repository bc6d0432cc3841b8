"""`WaltzClient.scan`: parts of the log as an Arrow stream, read while the consumer reads."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgpack
import pyarrow as pa
import pytest

from waltz_core import errors
from waltz_core.client import WaltzClient
from waltz_core.client.api.scanning import ScanColumns, ScanRange, open_scan, scan_ranges_of
from waltz_core.client.read.ranges import NO_REPLICAS, ArchivedRange, ReplicaSet
from waltz_core.encryption.envelopes import DecryptedPayload
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.records.batches import READ_SCHEMA

SCHEMA_WITH_OWNER = pa.schema(
    [("transaction_id", pa.int64()), ("id", pa.int32()), ("owner", pa.string())]
)


@pytest.fixture
def client() -> Iterator[WaltzClient]:
    with MemoryWaltz(partition_count=3) as waltz, waltz.client() as client:
        yield client


def fill(client: WaltzClient, partition: int, count: int) -> None:
    futures = [
        client.append(
            msgpack.packb({"id": number, "owner": f"owner {number}"}),
            partition=partition,
            header=number,
        )
        for number in range(count)
    ]
    for future in futures:
        future.result()


def test_a_scan_has_each_transaction_of_each_partition_in_order(client: WaltzClient):
    for partition, count in enumerate((5, 0, 3)):
        fill(client, partition, count)
    table = client.scan().read_all()
    assert table.schema == READ_SCHEMA
    expected = [
        (partition, row.transaction_id, row.header, row.data)
        for partition, last in client.high_water_marks().items()
        for chunk in client.read_range(partition, 0, last)
        for row in chunk.rows()
    ]
    names = ("partition", "transaction_id", "header", "data")
    assert len(expected) == 8
    assert list(zip(*(table[name].to_pylist() for name in names), strict=True)) == expected
    assert table["commit_time"].null_count == 0
    assert {row["partition"] for row in table["request_id"].to_pylist()} == {0, 2}


def test_fields_of_payloads_become_columns_in_the_order_of_the_schema(client: WaltzClient):
    fill(client, 1, 2)
    client.append(msgpack.packb({"id": 7}), partition=1).result()  # no field "owner"
    table = client.scan(1, schema=SCHEMA_WITH_OWNER).read_all()
    assert table.schema == SCHEMA_WITH_OWNER
    assert table.to_pydict() == {
        "transaction_id": [0, 1, 2],
        "id": [0, 1, 7],
        "owner": ["owner 0", "owner 1", None],
    }


def test_json_payloads_keep_their_types(client: WaltzClient):
    client.append(json.dumps({"price": 0.1, "tags": ["a"]}).encode(), partition=0).result()
    schema = pa.schema([("price", pa.decimal128(10, 2)), ("tags", pa.list_(pa.string()))])
    table = client.scan(0, schema=schema, data_format="json").read_all()
    assert table.to_pylist()[0]["tags"] == ["a"]
    assert str(table["price"][0]) == "0.10"


def test_a_scan_matches_payload_keys_and_columns_case_sensitively(client: WaltzClient):
    client.append(msgpack.packb({"ID": 7}), partition=0).result()
    assert client.scan(0, schema=pa.schema([("id", pa.int32())])).read_all()["id"].null_count == 1


def test_the_error_for_a_payload_of_a_wrong_type_names_transaction_and_column(client: WaltzClient):
    fill(client, 2, 3)
    client.append(msgpack.packb({"id": 1.5}), partition=2).result()
    with pytest.raises(errors.BadFormat, match=r"partition 2, transaction 3, column 'id'.*int32"):
        client.scan([0, 2], schema=SCHEMA_WITH_OWNER).read_all()


def test_a_column_that_is_not_nullable_needs_a_value_in_each_payload(client: WaltzClient):
    fill(client, 0, 1)
    client.append(msgpack.packb({"id": 1}), partition=0).result()
    schema = pa.schema([pa.field("owner", pa.string(), nullable=False)])
    assert client.scan(0, stop=1, schema=schema).read_all().schema == schema
    with pytest.raises(errors.BadFormat, match=r"transaction 1: column 'owner' is NOT NULL"):
        client.scan(0, schema=schema).read_all()


@pytest.mark.parametrize(
    ("start", "stop", "ids"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (2, None, [2, 3, 4]),
        (None, 2, [0, 1]),
        (1, 3, [1, 2]),
        (3, 3, []),
        (5, None, []),
        ({0: 4}, {0: 5}, [4]),
    ],
)
def test_a_scan_includes_its_start_and_excludes_its_stop(client: WaltzClient, start, stop, ids):
    fill(client, 0, 5)
    table = client.scan(0, start=start, stop=stop).read_all()
    assert table["transaction_id"].to_pylist() == ids


def test_a_scan_is_a_snapshot_at_the_time_of_the_call(client: WaltzClient):
    fill(client, 0, 2)
    reader = client.scan(0)
    fill(client, 0, 1)
    assert reader.read_all().num_rows == 2


def test_without_payload_columns_only_headers_are_read():
    assert ScanColumns(pa.schema([("transaction_id", pa.int64())])).form.name == "HEADERS"
    assert ScanColumns(None).form.name == "WHOLE"
    assert ScanColumns(SCHEMA_WITH_OWNER).form.name == "WHOLE"


def test_a_scan_with_an_empty_schema_counts_rows(client: WaltzClient):
    fill(client, 0, 3)
    assert client.scan(0, schema=pa.schema([])).read_all().num_rows == 3


class Chunks:
    """A client whose ranges are chunks of one transaction; records the reads."""

    def __init__(self, client: WaltzClient) -> None:
        self._client = client
        self.log: list[str] = []

    def read_range(self, partition: int, first: int, last: int, **rest: object):
        try:
            for number in range(first, last + 1):
                self.log.append(f"{partition}/{number}")
                yield from self._client.read_range(partition, number, number, form=rest["form"])
        finally:
            self.log.append("end")


def test_a_scan_reads_no_chunk_before_the_consumer_requests_its_batch(client: WaltzClient):
    fill(client, 0, 3)
    fill(client, 1, 2)
    chunks = Chunks(client)
    reader = open_scan(
        chunks,
        [ScanRange(0, 1, 3), ScanRange(1, 0, 2)],
        dict.fromkeys((0, 1)),
        ScanColumns(SCHEMA_WITH_OWNER),
    )
    assert chunks.log == []
    assert reader.read_next_batch()["id"].to_pylist() == [1]
    assert chunks.log == ["0/1"]
    assert reader.read_next_batch()["id"].to_pylist() == [2]
    assert reader.read_next_batch()["id"].to_pylist() == [0]
    assert chunks.log == ["0/1", "0/2", "end", "1/0"]
    reader.close()
    del reader
    assert chunks.log[4:] == ["end"]


def test_another_thread_can_read_a_scan(client: WaltzClient):
    fill(client, 0, 3)
    reader = client.scan(0)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(reader.read_all).result().num_rows == 3


def test_a_scan_of_a_closed_client_raises_an_error(client: WaltzClient):
    fill(client, 0, 1)
    reader = client.scan(0)
    client.close()
    with pytest.raises(errors.UsageError, match="closed"):
        reader.read_all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"start": -1},
            "argument start, partition 0: expected a transaction ID, found -1",
        ),
        (
            {"stop": True},
            "argument stop, partition 0: expected a transaction ID, found True",
        ),
        (
            {"start": {1: 0}},
            (
                r"argument start: expected an ID for each partition of \[0\], found IDs "
                r"for \[1\]"
            ),
        ),
        (
            {"start": 2, "stop": 1},
            "expected start <= stop, found start 2 and stop 1",
        ),
        ({"data_format": "jsn"}, r"data_format: .*found 'jsn'. Hint: did you mean 'json'\?"),
        ({"schema": {"id": "int"}}, r"expected a pyarrow.Schema"),
        ({"schema": pa.schema([("header", pa.int64())])}, r"'header' of the log: expected type"),
        (
            {"schema": pa.schema([("id", pa.int64()), ("id", pa.int64())])},
            "different column names, found 'id' twice",
        ),
        (
            {"schema": pa.schema([pa.field("commit_time", pa.timestamp("us", "UTC"), False)])},
            "argument schema: column 'commit_time' is declared as not nullable",
        ),
    ],
)
def test_an_invalid_argument_is_rejected_when_scan_is_called(
    client: WaltzClient, arguments, message
):
    fill(client, 0, 3)
    with pytest.raises(errors.BadRequest, match=message):
        client.scan(0, **arguments)


@pytest.mark.parametrize("name", ["start", "stop"])
def test_a_scan_with_an_id_after_the_end_of_the_log_reports_data_loss(client: WaltzClient, name):
    fill(client, 0, 3)
    with pytest.raises(errors.DataLoss, match=f"{name}, partition 0: expected at most 3"):
        client.scan(0, **{name: 4})


def replicas_with_archive(first: int) -> ReplicaSet:
    return replace(NO_REPLICAS, high_water_mark=9, archived=ArchivedRange(first, 8, "m", 0))


def test_a_scan_begins_at_the_first_available_transaction():
    sources = {0: replicas_with_archive(0), 1: replicas_with_archive(4)}
    assert scan_ranges_of(sources, None, None) == [ScanRange(0, 0, 10), ScanRange(1, 4, 10)]
    for start, stop in ((3, None), (None, 3)):
        with pytest.raises(
            errors.BeforeLogStart, match=r"partition 1: .*transactions before 4 have expired"
        ):
            scan_ranges_of(sources, start, stop)


def test_an_undecryptable_payload_is_null_and_column_data_error_has_the_reason(client: WaltzClient):
    fill(client, 0, 3)

    def decrypt(data: bytes, *, header: int) -> DecryptedPayload:
        if header == 1:
            return DecryptedPayload(None, "there is no key 'k'")
        return DecryptedPayload(data, None)

    chunks = [replace(chunk, decrypt=decrypt) for chunk in client.read_range(0, 0, 2)]
    schema = pa.schema([("id", pa.int32()), ("data_error", pa.string())])
    for wanted in (schema, None):
        columns = ScanColumns(wanted, has_keys=True)
        table = pa.Table.from_batches(
            [batch for chunk in chunks for batch in columns.batches(chunk, 0)], columns.schema
        )
        assert table["data_error"].to_pylist() == [None, "there is no key 'k'", None]
        if wanted is None:
            assert [row is None for row in table["data"].to_pylist()] == [False, True, False]
        else:
            assert table["id"].to_pylist() == [0, None, 2]


def test_columns_that_may_lack_a_decrypted_value_are_nullable():
    for name, kind in (("id", pa.int32()), ("data", pa.binary())):
        with pytest.raises(errors.BadRequest, match=f"'{name}'.* Hint: declare the column"):
            ScanColumns(pa.schema([pa.field(name, kind, nullable=False)]), has_keys=True)
