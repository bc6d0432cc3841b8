"""Servers and storages stop while Spark reads: Spark returns all rows, and no task fails.

The session is `local[2]`, where one failed task ends the job. So a successful job had no failed
task.
"""

import json
import signal
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_core.local
import waltz_spark
from tests.fault.cluster_commands import member_address, run_successful
from tests.fault.load import are_all_replicas_engaged, show_cluster, wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster
from waltz_core.records.batches import encode_append

pytestmark = pytest.mark.spark

PARTITIONS, TASKS = 2, 4
# Each task reads three chunks of 4 MiB. At a fault, the task processes one chunk and receives
# another.
ROWS, ROW_BYTES, BATCH = 6_000, 4_000, 500

Rows = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def log() -> Iterator[LocalCluster]:
    """A separate cluster, with a log that takes long enough to read."""
    with waltz_core.local.running_cluster(server_count=2, partition_count=PARTITIONS) as cluster:
        with WaltzClient(cluster.connect) as client:
            for partition in range(PARTITIONS):
                futures = [
                    client.append_batch(partition, payload, BATCH, client_high_water_mark=-1)
                    for payload in (batch(partition, first) for first in range(0, ROWS, BATCH))
                ]
                committed = [future.result(TEST_TIMEOUT_S).committed_count for future in futures]
                assert committed == [BATCH] * len(futures)
        yield cluster


def data_of(partition: int, row: int) -> bytes:
    return b"%d:%d " % (partition, row) * (ROW_BYTES // 8)


def batch(partition: int, first: int) -> bytes:
    nothing: list[list[int]] = [[]] * BATCH
    return encode_append(
        [0] * BATCH,
        [data_of(partition, row) for row in range(first, first + BATCH)],
        write_locks=nothing,
        read_locks=nothing,
        append_locks=nothing,
    )


EXPECTED = [
    (partition, row, zlib.crc32(data_of(partition, row)))
    for partition in range(PARTITIONS)
    for row in range(ROWS)
]


def wait_in_first_task(
    directory: Path,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that makes the first task report that it reads, and wait to continue."""

    def wait_and_return(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            context = TaskContext.get()
            assert context is not None
            if context.partitionId() == 0:
                (directory / "begun").touch()
                for _ in range(50 * TEST_TIMEOUT_S):
                    if (directory / "go").exists():
                        break
                    threading.Event().wait(0.02)
            yield batch

    return wait_and_return


def read_while(
    spark: SparkSession,
    log: LocalCluster,
    directory: Path,
    event: Callable[[], None],
    **options: Any,
) -> Rows:
    """Read the log's first rows by a batch; the event is set while a task reads."""
    directory.mkdir()
    table = (
        spark.read.format("waltz")
        .options(
            columns="partition,transaction_id,data",
            transactionIds=f"0-{ROWS - 1}",
            minPartitions=TASKS,
            **options,
        )
        .load(log.connect)
    )
    table = table.mapInArrow(wait_in_first_task(directory), table.schema)
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(
            lambda: table.selectExpr("partition", "transaction_id", "crc32(data) AS crc").collect()
        )
        try:
            await_task(directory, job)
            event()
        finally:
            (directory / "go").touch()
        return sorted(
            (row.partition, row.transaction_id, row.crc) for row in job.result(TEST_TIMEOUT_S)
        )


def await_task(directory: Path, job: Future[Any]) -> None:
    """Wait until the first task reads."""
    wait_until("a task has begun", lambda: (directory / "begun").exists() or job.done())


def prefer(log: LocalCluster, name: str, other: str) -> None:
    """Make one server own all partitions."""
    wait_until("both servers are registered", lambda: has_servers(log, name, other))
    # If two servers were preferred, the older one would own the partitions.
    run_successful(log, "unprefer", "all", member_address(log, other))
    assert run_successful(log, "prefer", "all", member_address(log, name))["owns"] == [0, 1]


def has_servers(log: LocalCluster, *names: str) -> bool:
    """Whether these servers are registered; one that was started a moment ago may not be yet."""
    servers = show_cluster(log)["servers"]
    assert isinstance(servers, dict)
    return {member_address(log, name) for name in names} <= set(servers.values())


def marks(log: LocalCluster) -> dict[int, int]:
    with WaltzClient(log.connect) as client:
        return {int(partition): int(mark) for partition, mark in client.high_water_marks().items()}


class Writer:
    """Appends to all partitions until it is stopped; `written` has its committed rows."""

    def __init__(self, connect: str) -> None:
        self._client = WaltzClient(connect)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written: list[tuple[int, int, bytes]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop writing."""
        self._is_stopping.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._is_stopping.wait(0.01):
            for partition in range(PARTITIONS):
                data = b"row %d" % len(self.written)
                at = self._client.append(data, partition=partition).result(TEST_TIMEOUT_S)
                self.written.append((partition, at, data))


@pytest.mark.slow
def test_batch_reads_and_a_stream_follow_moved_partitions(
    spark: SparkSession, log: LocalCluster, tmp_path: Path
) -> None:
    stream_rows: list[tuple[int, int, bytes]] = []

    def collect(table: DataFrame, _number: int) -> None:
        rows = table.select("partition", "transaction_id", "data").collect()
        stream_rows.extend((row.partition, row.transaction_id, bytes(row.data)) for row in rows)

    query = (
        spark.readStream.format("waltz")
        # At the end, the stream must return the newest rows, too.
        .options(startingHighWaterMarks="latest", readFrom="server", pollInterval=0)
        .load(log.connect)
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        prefer(log, "server-1", "server-2")
        with Writer(log.connect) as writer:
            for number, event in enumerate(
                (lambda: prefer(log, "server-2", "server-1"), lambda: log.kill("server-2"))
            ):
                place = tmp_path / str(number)
                assert read_while(spark, log, place, event, readFrom="server") == EXPECTED
                count = len(stream_rows)
                wait_until("the stream continues", lambda at=count: len(stream_rows) > at + 20)
            writer.stop()
            query.processAllAvailable()
        assert query.exception() is None
        assert sorted(stream_rows) == sorted(writer.written)
        for partition in range(PARTITIONS):
            ids = [at for each, at, _ in sorted(stream_rows) if each == partition]
            assert ids == list(range(ROWS, ROWS + len(ids)))
    finally:
        query.stop()
        log.start("server-2")


@pytest.mark.slow
def test_tasks_switch_to_another_server_if_their_server_is_frozen(
    spark: SparkSession, log: LocalCluster, tmp_path: Path
) -> None:
    """A frozen server keeps its connections. A request may take twice the session timeout."""
    prefer(log, "server-2", "server-1")
    frozen = log.member("server-2")
    directories = {each: tmp_path / each for each in ("read", "written")}

    def freeze() -> None:
        log.kill(frozen.name, signal.SIGSTOP)

    try:
        assert read_while(spark, log, directories["read"], freeze, readFrom="server") == EXPECTED
        log.kill(frozen.name, signal.SIGCONT)
        prefer(log, "server-2", "server-1")
        before = marks(log)
        directories["written"].mkdir()
        table = spark.range(0, 40_000, 1, TASKS).selectExpr(
            f"CAST(id % {PARTITIONS} AS int) AS partition", "CAST(id AS string) AS data"
        )
        table = table.mapInArrow(wait_in_first_task(directories["written"]), table.schema)
        with ThreadPoolExecutor(1) as thread:
            write_job = thread.submit(waltz_spark.append, table, log.connect)
            try:
                await_task(directories["written"], write_job)
                freeze()
            finally:
                (directories["written"] / "go").touch()
            assert write_job.result(TEST_TIMEOUT_S).counts["committed"] == 40_000
    finally:
        log.kill(frozen.name, signal.SIGCONT)
    # The server's ZooKeeper session ended while it was frozen, so it registers again.
    wait_until("both servers are registered", lambda: has_servers(log, "server-1", "server-2"))
    run_successful(log, "unprefer", "all", member_address(log, frozen.name))
    rows = (
        spark.read.format("waltz")
        .options(columns="data", startingHighWaterMarks=json.dumps(before))
        .load(log.connect)
        .selectExpr("CAST(CAST(data AS string) AS long) AS id")
    )
    assert rows.agg(F.count("id"), F.countDistinct("id"), F.sum("id")).first() == (
        40_000,
        40_000,
        sum(range(40_000)),
    )


def is_settled(log: LocalCluster) -> bool:
    """Return whether both servers own a partition and all replicas are engaged."""
    partitions = show_cluster(log)["partitions"]
    assert isinstance(partitions, dict)
    return len(
        {partition["server"] for partition in partitions.values()}
    ) == 2 and are_all_replicas_engaged(log)


def read_bytes(log: LocalCluster, name: str) -> float:
    """Return how much a storage has read for others."""
    url = f"http://127.0.0.1:{log.member(name).http_port}/metrics"
    with urllib.request.urlopen(url, timeout=TEST_TIMEOUT_S) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(READ_BYTES))


READ_BYTES = "waltz_storage_read_bytes_total"


def test_a_batch_read_uses_its_own_group_and_other_groups_if_its_group_is_down(
    spark: SparkSession, log: LocalCluster, tmp_path: Path
) -> None:
    names = ["storage-1", "storage-2", "storage-3"]
    near = names[1]
    # A new server takes over partitions, and a new session may not include the near replica at
    # first.
    wait_until("no partition moves", lambda: is_settled(log))
    with WaltzClient(log.connect) as client:
        # Each storage of a local cluster is a separate group.
        (group,) = (
            each
            for each in range(4)
            if client.replicas(0, group=each).replicas_in_group == (member_address(log, near),)
        )
    before = {name: read_bytes(log, name) for name in names}
    at_kill: dict[str, float] = {}

    def kill() -> None:
        at_kill.update({name: read_bytes(log, name) - before[name] for name in names})
        log.kill(near)

    try:
        rows = read_while(spark, log, tmp_path / "batch", kill, group=group)
    finally:
        log.start(near)
    assert rows == EXPECTED
    assert at_kill[near] > 4 * ROW_BYTES
    assert at_kill[names[0]] == at_kill[names[2]] == 0
    # The remaining rows come from the other storages. If a new store session has begun, these
    # storages reject the reads, and the rows come from the server.
    total_bytes = sum(len(data_of(partition, row)) for partition, row, _ in EXPECTED)
    assert at_kill[near] < total_bytes
