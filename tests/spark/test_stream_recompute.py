"""A log is recreated while a stream reads it: the stream fails, or reads the log from its start."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery  # noqa: TC002

import waltz_core.local
import waltz_spark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.errors import DataLoss
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.spark

PARTITIONS = 2


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with waltz_core.local.running_cluster(
        storage_count=1, server_count=1, partition_count=PARTITIONS
    ) as running:
        yield running


def recreate(cluster: LocalCluster) -> None:
    """Replace a cluster by another cluster, at the same root of the same ZooKeeper."""
    daemons = [member.name for member in cluster.members if member.kind != "zookeeper"]
    for name in reversed(daemons):
        cluster.kill(name)
        shutil.rmtree(cluster.directory / name, ignore_errors=True)
    hosts, _, root = cluster.connect.partition("/")
    zookeeper = KazooClient(hosts)
    zookeeper.start()
    zookeeper.delete(f"/{root}", recursive=True)
    zookeeper.stop()
    zookeeper.close()
    (cluster.directory / "created").unlink()
    cluster.up()


def append(connect: str, tag: str, count: int) -> set[str]:
    texts = [f"{tag}{n}" for n in range(count)]
    with WaltzClient(connect) as client:
        futures = [
            client.append(text.encode(), partition=n % PARTITIONS) for n, text in enumerate(texts)
        ]
        for future in futures:
            future.result(TEST_TIMEOUT_S)
    return set(texts)


class Reader:
    """A stream of the whole log, and its rows; `after` runs once, before the next poll."""

    def __init__(
        self,
        spark: SparkSession,
        connect: str,
        checkpoint: Path,
        after: Callable[[], None] = lambda: None,
        **options: object,
    ) -> None:
        self.seen: list[str] = []
        self._after = after
        chosen = {"startingHighWaterMarks": "earliest", "pollInterval": 0, **options}
        self.query: StreamingQuery = (
            spark.readStream.format("waltz")
            .options(**chosen)
            .load(connect)
            .writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(checkpoint))
            .start()
        )

    def _take(self, batch: DataFrame, _number: int) -> None:
        self.seen += [row.data for row in batch.selectExpr("CAST(data AS string)").collect()]
        after, self._after = self._after, lambda: None
        after()


def test_a_running_stream_reports_a_recreated_log(
    spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    later = 2  # fewer transactions than in the previous log

    def recreate_log() -> None:
        recreate(cluster)
        append(cluster.connect, "new", later)

    old = append(cluster.connect, "old", 10)
    reader = Reader(spark, cluster.connect, tmp_path, after=recreate_log)
    with pytest.raises(StreamingQueryException, match="created again") as failed:
        reader.query.awaitTermination(200)
    assert isinstance(waltz_spark.error_of(failed.value), DataLoss)
    assert "Traceback" not in str(waltz_spark.error_of(failed.value))
    assert set(reader.seen) == old
    # The same session reads and writes the new log.
    snapshot = waltz_spark.snapshot(spark, cluster.connect)
    assert snapshot.read().count() == later
    spark.createDataFrame([(b"one",)], "data binary").write.format("waltz").mode("append").save(
        cluster.connect
    )
    assert waltz_spark.snapshot(spark, cluster.connect).read().count() == later + 1


@pytest.mark.slow
def test_if_data_loss_is_allowed_a_recreated_log_is_read_from_its_start(
    spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    new: set[str] = set()

    def recreate_log() -> None:
        recreate(cluster)
        new.update(append(cluster.connect, "new", 40))  # more than in the previous log

    old = append(cluster.connect, "old", 10)
    reader = Reader(spark, cluster.connect, tmp_path, after=recreate_log, failOnDataLoss="false")
    try:
        reader.query.processAllAvailable()
        assert sorted(reader.seen) == sorted(old | new)
        more = append(cluster.connect, "more", 3)
        reader.query.processAllAvailable()
        assert sorted(reader.seen) == sorted(old | new | more)
    finally:
        reader.query.stop()


def plan_past_the_end(checkpoint: Path) -> None:
    """Change the last micro-batch: it is not committed, and ends at ID 1000 of each partition."""
    (last,) = (checkpoint / "commits").glob("0")
    last.unlink()
    offsets = checkpoint / "offsets" / "0"
    *head, _ = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*head, json.dumps({str(n): 1000 for n in range(PARTITIONS)})]))
    for crc in checkpoint.glob("*/.*.crc"):
        crc.unlink()


@pytest.mark.slow
def test_a_micro_batch_planned_past_the_end_of_the_log_is_data_loss(
    spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    rows = append(cluster.connect, "here", 10)
    reader = Reader(spark, cluster.connect, tmp_path)
    reader.query.processAllAvailable()
    reader.query.stop()
    plan_past_the_end(tmp_path)
    reader = Reader(spark, cluster.connect, tmp_path)
    with pytest.raises(StreamingQueryException, match="the micro-batch ends at") as failed:
        reader.query.awaitTermination(TEST_TIMEOUT_S)
    assert isinstance(waltz_spark.error_of(failed.value), DataLoss)
    reader = Reader(spark, cluster.connect, tmp_path, failOnDataLoss="false")
    try:
        reader.query.processAllAvailable()
        assert sorted(reader.seen) == sorted(rows)
    finally:
        reader.query.stop()
