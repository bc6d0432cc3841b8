"""A billion transactions, many partitions, many workers, large rows: bounded resources.

Server and client process the metadata of a billion transactions; most records are missing on disk
(`tests/forged_log.py`).
"""

import contextlib
import json
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType

import waltz_core.local
from tests.forged_log import DATA, write_forged_log
from tests.spark.versions import needs_pyspark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.client.links.connections import ServerLink
from waltz_core.local import LocalCluster
from waltz_spark.datasource.batch_read import WaltzBatchReader
from waltz_spark.option_table import Purpose
from waltz_spark.options import parse_read
from waltz_spark.shared_clients import close_client

pytestmark = pytest.mark.spark

TRANSACTIONS = 10**9
TASKS_PER_PARTITION = 4
TRANSACTIONS_PER_TASK = 1_000_000  # unless an option limits a task
# The maximum number of ZooKeeper packets for opening a session, and for all messages of daemons
# during this time. This maximum is below the number of partitions.
ZOOKEEPER_PACKETS_MAX = 200
MIB = 1 << 20

log = logging.getLogger("waltz")


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory in memory if possible, because a thousand logs sync thousands of files."""
    memory = Path("/dev/shm")
    path = tempfile.mkdtemp(prefix="waltz-scale-", dir=memory if memory.is_dir() else None)
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


# ---- a billion


# The time to start the cluster grows with the number of partitions, like the values that the tests
# count.
@pytest.fixture(scope="module", params=[250, pytest.param(1000, marks=pytest.mark.slow)])
def billion_cluster(request: pytest.FixtureRequest, directory: Path) -> Iterator[LocalCluster]:
    """One storage and one server, because a start with two servers takes twice as long."""
    cluster = LocalCluster(
        directory / f"billion-{request.param}",
        storage_count=1,
        server_count=1,
        partition_count=request.param,
        exit_with_parent=True,
        # The scrub would see that the records are missing.
        settings={"storage": {"scrub_bytes_per_s": 0}},
    )
    try:
        cluster.prepare()
        write_forged_log(cluster, last_id(cluster))
        cluster.up(timeout_s=400)
        yield cluster
    finally:
        cluster.down()


def last_id(cluster: LocalCluster) -> int:
    """Return the last ID of each partition of the forged log."""
    return TRANSACTIONS // cluster.partition_count - 1


def zookeeper_packets(cluster: LocalCluster) -> int:
    """Return how many packets ZooKeeper was sent since its start."""
    with socket.create_connection(("127.0.0.1", cluster.member("zookeeper").port)) as connection:
        connection.sendall(b"mntr")
        text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    return next(
        int(line.split()[1]) for line in text.splitlines() if line.startswith("zk_packets_received")
    )


def planned(cluster: LocalCluster, **options: str) -> WaltzBatchReader:
    read = parse_read({"connect": cluster.connect, **options}, Purpose.BATCH)
    return WaltzBatchReader(read, StructType().add("transaction_id", LongType()))


def test_a_billion_transactions_are_planned_with_one_request(
    billion_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, at_once, answer_counts, links = 0, 0, Counter[str](), set()
    request = ServerLink.request

    async def counted(self, answer, make, **rest):
        nonlocal under_way, at_once
        answer_counts[answer.__name__] += 1
        links.add(self.number)
        under_way += 1
        at_once = max(at_once, under_way)
        try:
            return await request(self, answer, make, **rest)
        finally:
            under_way -= 1

    monkeypatch.setattr(ServerLink, "request", counted)
    close_client(billion_cluster.connect)
    before = zookeeper_packets(billion_cluster)
    began_cpu, began_s = time.process_time(), time.perf_counter()
    per_task = (last_id(billion_cluster) + 1) // TASKS_PER_PARTITION
    tasks = planned(billion_cluster, maxTransactionsPerTask=str(per_task)).partitions()
    cpu_s, took_s = time.process_time() - began_cpu, time.perf_counter() - began_s
    log.info("planned %d tasks: %.3f s of CPU, %.3f s in all", len(tasks), cpu_s, took_s)
    partition_count = billion_cluster.partition_count
    assert len(tasks) == TASKS_PER_PARTITION * partition_count
    assert sum(task.last - task.first + 1 for task in tasks) == TRANSACTIONS
    # Each partition is queried once, no request waits for the answer to another request, and all
    # requests use one connection to the server. ZooKeeper is not queried for each partition.
    assert answer_counts == {"ReplicasResponse": partition_count}
    assert at_once > partition_count // 2  # the first answers may arrive before the last requests
    assert len(links) == 1
    assert zookeeper_packets(billion_cluster) - before < ZOOKEEPER_PACKETS_MAX < partition_count
    # The size of a task does not grow with the number of partitions.
    assert all(len(task.layout.owners) == 1 for task in tasks)


def test_spark_plans_a_billion_transactions_and_reads_only_the_requested_rows(
    spark: SparkSession, billion_cluster: LocalCluster
) -> None:
    whole = spark.read.format("waltz").load(billion_cluster.connect)
    assert whole.rdd.getNumPartitions() == TRANSACTIONS // TRANSACTIONS_PER_TASK
    last = last_id(billion_cluster)
    marks = json.dumps({"7": last - 1})
    with WaltzClient(billion_cluster.connect) as client:
        high = client.high_water_mark(7)
    rows = (
        spark.read.format("waltz")
        .options(partitions=7, startingHighWaterMarks=marks)
        .load(billion_cluster.connect)
        .collect()
    )
    assert [row.transaction_id for row in rows] == list(range(last, high + 1))
    assert bytes(rows[0].data) == DATA


def test_appends_continue_after_a_forged_log_of_a_billion_transactions(
    billion_cluster: LocalCluster,
) -> None:
    with WaltzClient(billion_cluster.connect) as client:
        assert (
            client.append(b"and one more", partition=3).result(TEST_TIMEOUT_S)
            == last_id(billion_cluster) + 1
        )


# ---- workers: their connections and their memory


class WorkerMonitor:
    """Polls Spark's Python workers: connections to servers, memory."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._ports = {member.port for member in cluster.members if member.kind == "server"}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample_memory)
        self.connected: list[Counter[int]] = []  # by process, for each poll that found connections
        self.rss_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample_memory(self) -> None:
        while not self._end.wait(0.05):
            found = Counter[int]()
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "pyspark" not in " ".join(process.cmdline()[:4]):
                        continue
                    count = sum(
                        bool(connection.raddr) and connection.raddr.port in self._ports
                        for connection in process.net_connections("tcp")
                        if connection.status == psutil.CONN_ESTABLISHED
                    )
                    if count:
                        found[process.pid] = count
                        self.rss_bytes = max(self.rss_bytes, process.memory_info().rss)
            if found:
                self.connected.append(found)


@pytest.fixture(scope="module")
def ordinary_cluster(directory: Path) -> Iterator[LocalCluster]:
    with waltz_core.local.running_cluster(
        directory / "plain", storage_count=1, server_count=2, partition_count=4
    ) as running:
        yield running


def rows(spark: SparkSession, count: int, size: int, tasks: int = 1) -> DataFrame:
    digest = F.sha2(F.col("id").cast("string"), 512)  # 128 characters
    data = F.repeat(digest, size // 128).cast("binary").alias("data")
    return spark.range(0, count, numPartitions=tasks).select(data)


def write(table: DataFrame, connect: str, **options: object) -> None:
    table.write.format("waltz").mode("append").options(**options).save(connect)


@pytest.mark.slow
def test_each_worker_has_few_connections(
    spark: SparkSession, ordinary_cluster: LocalCluster
) -> None:
    write(rows(spark, 4000, 256, tasks=4), ordinary_cluster.connect)
    with WorkerMonitor(ordinary_cluster) as watch:
        # Each task has a worker that reads, and a worker that writes.
        table = spark.read.format("waltz").options(columns="data", minPartitions=8)
        write(table.load(ordinary_cluster.connect), ordinary_cluster.connect)
    servers = sum(member.kind == "server" for member in ordinary_cluster.members)
    assert watch.connected
    for found in watch.connected:
        assert sum(found.values()) < 2 * len(found) * servers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "size", "options"),
    [
        pytest.param(
            *(90, 4 * MIB - 128, {"maxInFlight": 2}),
            marks=needs_pyspark(4, 1, "Spark's Arrow batches are bounded by rows only"),
        ),
        (100_000, 4096, {}),
    ],
)
def test_a_workers_memory_depends_on_options_and_not_on_the_data(
    spark: SparkSession, directory: Path, count: int, size: int, options: dict[str, int]
) -> None:
    with waltz_core.local.running_cluster(
        directory / f"rows-{size}", storage_count=1, server_count=1, partition_count=2
    ) as cluster:
        with WorkerMonitor(cluster) as writing:
            write(rows(spark, count, size), cluster.connect, **options)
        with WorkerMonitor(cluster) as reading:
            frame = spark.read.format("waltz").option("columns", "data").load(cluster.connect)
            frame.write.format("noop").mode("overwrite").save()
    peaks = [watch.rss_bytes // MIB for watch in (writing, reading)]
    log.info("%d rows of %d bytes: MiB when writing and reading %s", count, size, peaks)
    # A worker has some 150 MiB at its start. The written data is twice as large.
    assert 0 < writing.rss_bytes < 500 * MIB < count * size + 150 * MIB
    assert 0 < reading.rss_bytes < 350 * MIB
