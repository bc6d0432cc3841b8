"""Spark reads archived transactions directly from the object store, without server and storages."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StructField, StructType

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.store import ArchiveStore
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster, running_cluster
from waltz_spark.datasource.batch_read import ReadTask, WaltzBatchReader
from waltz_spark.datasource.change_feed import resolve_rule_columns
from waltz_spark.option_table import Purpose
from waltz_spark.options import parse_read
from waltz_spark.shared_clients import close_clients

pytestmark = pytest.mark.spark
ROWS = 2_000
KEYS = 50
PARTITIONS = 2
TYPES: dict[str, DataType] = {
    "partition": IntegerType(),
    "transaction_id": LongType(),
    "header": IntegerType(),
    "data": BinaryType(),
}


class Archived(NamedTuple):
    """A cluster with ROWS rows in each partition; the archive has most of these rows."""

    cluster: LocalCluster
    url: str
    rows: set[tuple[int, int, int, bytes]]

    @property
    def options(self) -> dict[str, str]:
        return {"connect": self.cluster.connect, "archive": self.url}

    def reader(self, columns: str) -> WaltzBatchReader:
        options = parse_read({**self.options, "columns": columns}, Purpose.BATCH)
        schema = StructType([StructField(column, TYPES[column]) for column in options.columns])
        return WaltzBatchReader(options, schema)


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archived]:
    directory = tmp_path_factory.mktemp("archived")
    url = f"file://{directory}/archive"
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive_url": url, "archive_object_bytes": 100_000, "archive_age_ms": 0},
        "server": {"archive_interval_ms": 100},
    }
    options = {"settings": settings, "server_count": 1, "partition_count": PARTITIONS}
    with running_cluster(directory / "cluster", **options) as cluster:
        rows: set[tuple[int, int, int, bytes]] = set()
        with WaltzClient(cluster.connect) as client:
            for partition in range(PARTITIONS):
                payloads = [
                    msgpack.packb({"id": row % KEYS, "place": (partition, row), "more": bytes(150)})
                    for row in range(ROWS)
                ]
                futures = [
                    client.append(data, partition=partition, header=row % 3)
                    for row, data in enumerate(payloads)
                ]
                for row, future in enumerate(futures):
                    rows.add((partition, future.result(TEST_TIMEOUT_S), row % 3, payloads[row]))

            def is_archived() -> bool:
                found = client.replica_sets().values()
                return all(each.archived and each.archived.last >= ROWS // 2 for each in found)

            wait_until("the archive has most rows", is_archived)
        yield Archived(cluster, url, rows)
        close_clients()


def test_a_read_from_the_archive_has_all_rows(spark: SparkSession, archived: Archived) -> None:

    def log(**more: str) -> DataFrame:
        return spark.read.format("waltz").options(**archived.options, **more).load()

    rows = log().select("partition", "transaction_id", "header", "data").collect()
    assert {(row[0], row[1], row[2], bytes(row[3])) for row in rows} == archived.rows
    assert len(rows) == len(archived.rows)
    filtered = log(headers="1", columns="partition,header")
    assert filtered.count() == sum(header == 1 for _, _, header, _ in archived.rows)
    times = log(columns="commit_time").orderBy("commit_time").collect()
    since_ms = int(times[len(times) // 2][0].timestamp() * 1000)
    recent = log(startingTimestamp=str(since_ms)).count()
    assert 0 < recent < len(times)
    assert recent == log().where(f"commit_time >= timestamp_millis({since_ms})").count()


def test_a_wrong_object_is_named_and_its_rows_come_from_the_storages(
    archived: Archived, caplog: pytest.LogCaptureFixture
) -> None:
    reader = archived.reader("partition,transaction_id,header,data")
    tasks = reader.partitions()
    store = ArchiveStore(archived.url)
    name = next(each for each in store.list_names("") if each.endswith(".parquet"))
    path = Path(archived.url.removeprefix("file://")) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with caplog.at_level(logging.WARNING, "waltz"):
        found = [tuple(r.values()) for t in tasks for b in reader.read(t) for r in b.to_pylist()]
    path.write_bytes(whole)
    assert set(found) == archived.rows
    assert len(found) == len(archived.rows)
    (warning,) = [message for message in caplog.messages if "spark.archive_not_read" in message]
    assert name in warning


def test_a_change_feed_reads_the_archive_and_then_the_storages(
    archived: Archived, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {"changeFeed": "true", "key": "id", "dataFormat": "msgpack"}
    schema = (
        StructType().add("id", "long").add("_change_type", "string").add("partition", "integer")
    )
    options = resolve_rule_columns(parse_read({**archived.options, **rules}), schema)
    reader = WaltzBatchReader(options, schema)
    with caplog.at_level(logging.INFO, "waltz"):
        tasks = reader.partitions()
        found = [tuple(r.values()) for t in tasks for b in reader.read(t) for r in b.to_pylist()]
    assert all(isinstance(task, ReadTask) and task.archived_objects is not None for task in tasks)
    kinds = Counter((kind, partition) for _, kind, partition in found)
    updates = ROWS - KEYS
    for partition in range(PARTITIONS):
        assert kinds["insert", partition] == KEYS
        assert kinds["update_preimage", partition] == updates
        assert kinds["update_postimage", partition] == updates
    assert not any("spark.archive_not_read" in message for message in caplog.messages)


def test_a_missing_archive_fails_no_read(
    archived: Archived, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    missing_archive = archived._replace(url=f"file://{tmp_path}/nothing")
    with caplog.at_level(logging.WARNING, "waltz"):
        tasks = missing_archive.reader("transaction_id").partitions()
    assert all(isinstance(task, ReadTask) and task.archived_objects is None for task in tasks)
    assert sum("spark.archive_not_read" in message for message in caplog.messages) == PARTITIONS


def test_tasks_need_neither_servers_nor_storages_for_archived_rows(archived: Archived) -> None:
    """The last test of this file: it ends the cluster."""
    readers = [archived.reader(each) for each in ("transaction_id,data", "transaction_id")]
    planned = [(reader, reader.partitions()) for reader in readers]
    archived.cluster.down()
    expected = {(each[1], each[3]) for each in archived.rows}
    for reader, tasks in planned:
        archived_parts = [
            task
            for task in tasks
            if isinstance(task, ReadTask) and task.archived_objects is not None
        ]
        found = [
            row
            for each in archived_parts
            for batch in reader.read(each)
            for row in batch.to_pylist()
        ]
        assert len(found) >= len(archived.rows) // 2
        for row in found:
            assert "data" not in row or (row["transaction_id"], row["data"]) in expected
