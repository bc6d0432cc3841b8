"""After a total loss, queries and exactly-once writes continue in the restored cluster."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from pyspark.sql import SparkSession

import waltz_core.local
from tests.commands import run_command
from tests.patience import HANG_S
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster
from waltz_spark import shared_clients

pytestmark = pytest.mark.spark

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
    with waltz_core.local.running(
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
    place = f"127.0.0.1:{storage.port}:{storage.admin_port}"
    words = ("--connect", cluster.connect, "--archive", archive, "--backup", file)
    restored = run_command("restore", *words, "--storage", place)
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
            future.result(HANG_S)
    return set(texts)


def write_once(spark: SparkSession, connect: str) -> set[str]:
    rows = [(f"once{n}".encode(), n % PARTITIONS) for n in range(20)]
    frame = spark.createDataFrame(rows, "data binary, partition int")
    frame.write.format("waltz").option("writeId", "monday").mode("append").save(connect)
    return {data.decode() for data, _ in rows}


def stream(spark: SparkSession, connect: str, checkpoint: Path, **options: str) -> list[str]:
    """Run a query until it has all transactions; return those that this run has read."""
    seen: list[str] = []
    query = (
        spark.readStream.format("waltz")
        .options(startingHighWaterMarks="earliest", **options)
        .load(connect)
        .writeStream.foreachBatch(
            lambda frame, _: seen.extend(bytes(row.data).decode() for row in frame.collect())
        )
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(HANG_S)
    return seen


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
    for place, options in (("served", {}), ("direct", {"archive": archive})):
        seen = stream(spark, connect, tmp_path / place, **options)
        assert sorted(seen) == sorted(before | after)
