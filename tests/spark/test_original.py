"""Spark with a 0.13 server: reads, and writes without exactly-once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.original_server_for_clients import OriginalCluster
from tests.original_zookeeper import Nodes
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import lock
from waltz_spark.shared_clients import close_client

pytestmark = pytest.mark.spark

COUNT = 6_000


@pytest.fixture
def original() -> Iterator[OriginalCluster]:
    with OriginalCluster(2, server_count=2) as cluster:
        yield cluster


@pytest.fixture
def connect_string(original: OriginalCluster, connect: str) -> Iterator[str]:
    host = connect.partition("/")[0]
    # A separate root, because a process keeps its client of a cluster.
    nodes = Nodes(host, original, f"/original-{original.servers[0].port}")
    yield f"{host}{nodes.root}"
    close_client(f"{host}{nodes.root}")
    nodes.close()


def test_a_log_is_read_in_tasks(
    spark: SparkSession, original: OriginalCluster, connect_string: str
) -> None:
    original.fill(0, COUNT, b"zero")
    original.fill(1, 10, b"one")
    frame = spark.read.format("waltz").option("minPartitions", 3).load(connect_string)
    rows = frame.select("partition", "transaction_id", "data", "commit_time").collect()
    assert sorted(row[:2] for row in rows) == [
        *((0, i) for i in range(COUNT)),
        *((1, i) for i in range(10)),
    ]
    assert {bytes(row.data) for row in rows} == {b"zero", b"one"}
    assert {row.commit_time for row in rows} == {None}  # 0.13 stores no commit time


def test_the_first_row_of_each_lock_is_written_and_the_other_rows_are_rejected(
    spark: SparkSession, original: OriginalCluster, connect_string: str
) -> None:
    rows = [(i % 2, b"%d" % i, [lock("hot", i % 4)]) for i in range(40)]
    schema = "partition int, data binary, write_locks array<int>"
    frame = spark.createDataFrame(rows, schema)
    write = frame.write.format("waltz").mode("append")
    write.options(exactlyOnce="false", onLockFailure="reject").save(connect_string)
    # The first row of each lock is committed; the other rows were computed from a log without this
    # row.
    for log, locks in zip(original.logs, ([0, 2], [1, 3]), strict=True):
        assert sorted(int(data) % 4 for _, _, data in log.records) == locks


def test_exactly_once_is_rejected_before_any_task(
    spark: SparkSession, original: OriginalCluster, connect_string: str
) -> None:
    frame = spark.createDataFrame([(b"x",)], "data binary")
    with pytest.raises(Exception, match=r"exactlyOnce.* are at a Waltz 0.13 server"):
        frame.write.format("waltz").mode("append").save(connect_string)
    assert [log.mark for log in original.logs] == [-1, -1]


def test_a_stream_copies_one_partition_into_another(
    spark: SparkSession, original: OriginalCluster, connect_string: str, tmp_path: Path
) -> None:
    original.fill(0, COUNT, b"copied")
    source = spark.readStream.format("waltz").option("partitions", "0")
    table = (
        source.option("startingHighWaterMarks", "earliest")
        .load(connect_string)
        .selectExpr("data", "1 AS partition")
    )
    writer = table.writeStream.format("waltz").option("checkpointLocation", str(tmp_path / "at"))
    query = (
        writer.options(path=connect_string, exactlyOnce="false").trigger(availableNow=True).start()
    )
    assert query.awaitTermination(TEST_TIMEOUT_S)
    assert [data for _, _, data in original.logs[1].records] == [b"copied"] * COUNT
