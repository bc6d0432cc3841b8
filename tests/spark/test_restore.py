"""After a total loss, queries and exactly-once writes continue in the restored cluster."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from pyspark.sql import SparkSession

import waltz_core.local
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import Callbacks, Transaction, WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.local import LocalCluster
from waltz_spark import shared_clients

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PARTITIONS = 2
DAEMONS = ("server-1", "storage-1")


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return f"file://{tmp_path}/archive"


@pytest.fixture
def cluster(archive: str) -> Iterator[LocalCluster]:
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive_url": archive, "archive_age_ms": 0},
        "server": {"archive_interval_ms": 100},
    }
    with waltz_core.local.running_cluster(
        storage_count=1, server_count=1, partition_count=PARTITIONS, settings=settings
    ) as running:
        yield running


def lose_and_restore(cluster: LocalCluster, archive: str, file: str) -> None:
    """Delete the storage and the cluster's znodes; restore both from a backup."""
    for name in DAEMONS:
        cluster.kill(name)
    shutil.rmtree(cluster.directory / "storage-1")
    hosts, _, root = cluster.connect.partition("/")
    zookeeper = KazooClient(hosts)
    zookeeper.start()
    zookeeper.delete(f"/{root}", recursive=True)
    zookeeper.stop()
    zookeeper.close()
    storage = cluster.member("storage-1")
    address = f"127.0.0.1:{storage.port}:{storage.admin_port}"
    words = ("--connect", cluster.connect, "--archive", archive, "--backup", file)
    restored = run_command("restore", *words, "--storage", address)
    assert restored.returncode == 0, restored
    for name in reversed(DAEMONS):
        cluster.start(name)


def append(connect: str, tag: str, count: int) -> set[str]:
    texts = [f"{tag}{n}" for n in range(count)]
    with WaltzClient(connect) as client:
        futures = [
            client.append(text.encode(), partition=n % PARTITIONS) for n, text in enumerate(texts)
        ]
        for future in futures:
            future.result(TEST_TIMEOUT_S)
    return set(texts)


def write_once(spark: SparkSession, connect: str) -> set[str]:
    rows = [(f"once{n}".encode(), n % PARTITIONS) for n in range(20)]
    frame = spark.createDataFrame(rows, "data binary, partition int")
    frame.write.format("waltz").option("writeId", "monday").mode("append").save(connect)
    return {data.decode() for data, _ in rows}


def stream(spark: SparkSession, connect: str, checkpoint: Path, **options: str) -> list[str]:
    """Run a query until it has all transactions; return the transactions of this run."""
    rows_read: list[str] = []
    query = (
        spark.readStream.format("waltz")
        .options(startingHighWaterMarks="earliest", **options)
        .load(connect)
        .writeStream.foreachBatch(
            lambda frame, _: rows_read.extend(bytes(row.data).decode() for row in frame.collect())
        )
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TEST_TIMEOUT_S)
    return rows_read


def test_a_checkpoint_and_an_exactly_once_write_continue(
    spark: SparkSession, cluster: LocalCluster, archive: str, tmp_path: Path
) -> None:
    connect, file = cluster.connect, str(tmp_path / "backup")
    before = write_once(spark, connect) | append(connect, "before", 30)
    assert set(stream(spark, connect, tmp_path / "old")) == before
    saved = run_command("backup", "--connect", connect, "--archive", archive, "--output", file)
    assert saved.returncode == 0, saved
    shared_clients.close_clients()
    lose_and_restore(cluster, archive, file)

    write_once(spark, connect)
    after = append(connect, "after", 10)
    assert sorted(stream(spark, connect, tmp_path / "old")) == sorted(after)
    for source, options in (("served", {}), ("direct", {"archive": archive})):
        seen = stream(spark, connect, tmp_path / source, **options)
        assert sorted(seen) == sorted(before | after)


class RecordingCallbacks(Callbacks):
    """Records the transactions of a feed."""

    def __init__(self) -> None:
        self.applied: list[tuple[object, str | None]] = []

    def client_high_water_mark(self, partition: int) -> int:
        return -1

    def apply_transaction(self, transaction: Transaction) -> None:
        data = transaction.data()
        self.applied.append((data, transaction.data_error))


def read_everywhere(
    spark: SparkSession, connect: str, archive: str, keys: Path, count: int
) -> dict[str, Counter[tuple[object, str | None]]]:
    """Return the payloads, or the errors, that each kind of reader with these keys gets."""
    found = {}
    for source, options in (("servers", {}), ("archive", {"archive": archive})):
        reader = spark.read.format("waltz").options(encryptionKeys=str(keys), **options)
        rows = reader.load(connect).select("data", "data_error").collect()
        found[f"Spark from {source}"] = Counter((row[0] and bytes(row[0]), row[1]) for row in rows)
    with WaltzClient(connect, ClientConfig(encryption_keys=str(keys))) as client:
        found["ranges"] = Counter(
            (row.data, row.data_error)
            for partition, last in client.high_water_marks().items()
            for chunk in client.read_range(partition, 0, last)
            for row in chunk.rows()
        )
        callbacks = RecordingCallbacks()
        client.subscribe(callbacks)
        wait_until("the feed has all transactions", lambda: len(callbacks.applied) == count)
        found["feed"] = Counter(callbacks.applied)
    return found


def test_destroyed_keys_hide_their_rows_in_log_archive_and_restored_cluster(
    spark: SparkSession, cluster: LocalCluster, archive: str, tmp_path: Path
) -> None:
    connect, file = cluster.connect, str(tmp_path / "backup")
    keys, remaining_keys = tmp_path / "keys", tmp_path / "left"
    names = ("kept", "destroyed")
    for directory in (keys, remaining_keys):
        directory.mkdir()
        for number, name in enumerate(names):
            (directory / name).write_text(f"{number:064x}")
    (remaining_keys / "destroyed").unlink()
    rows = [(f"{name}-{n}".encode(), n % PARTITIONS, name) for name in names for n in range(20)]
    frame = spark.createDataFrame(rows, "data binary, partition int, key string")
    options = {"encryptionKeys": str(keys), "encryptionKeyIdColumn": "key"}
    frame.write.format("waltz").options(**options, writeId="monday").mode("append").save(connect)
    all_rows = Counter((data, None) for data, _, _ in rows)
    remaining = Counter((data, None) for data, _, name in rows if name == "kept")
    remaining[None, "the key 'destroyed' does not exist"] = 20

    def check() -> None:
        for directory, expected in ((keys, all_rows), (remaining_keys, remaining)):
            payloads = read_everywhere(spark, connect, archive, directory, len(rows))
            assert payloads == dict.fromkeys(payloads, expected)

    check()
    saved = run_command("backup", "--connect", connect, "--archive", archive, "--output", file)
    assert saved.returncode == 0, saved
    shared_clients.close_clients()
    lose_and_restore(cluster, archive, file)
    check()
    # The write compares its rows with the decrypted rows of the restored log.
    frame.write.format("waltz").options(**options, writeId="monday").mode("append").save(connect)
    check()
