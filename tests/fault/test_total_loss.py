"""The runbook for the loss of all storages and of ZooKeeper (docs/backup.md), executed."""

import asyncio
import json
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from tests.commands import run_command
from tests.fault.load import start_zookeeper, wait_until
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import RangeForm, Transaction, WaltzClient, lock
from waltz_core.client.api.sql import SqlCallbacks
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.errors import ConnectionSuperseded, LockFailed
from waltz_core.local import LocalCluster, running_cluster

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")
PARTITIONS = 3  # the last one stays empty
ROWS = 200
LOCK = lock("account", 7)
T = TypeVar("T")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('archive')}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, archive: str) -> Iterator[LocalCluster]:
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive_url": archive, "archive_object_bytes": 20_000, "archive_age_ms": 0},
        "server": {"archive_interval_ms": 100},
    }
    options = {"settings": settings, "server_count": 1, "partition_count": PARTITIONS}
    with running_cluster(tmp_path_factory.mktemp("cluster"), **options) as cluster:
        yield cluster


def run(*words: str, code: int = 0) -> Any:
    """Run a command; return its result, or the error that it prints."""
    ran = run_command(*words, "--json")
    assert ran.returncode == code, ran
    return json.loads(ran.stdout) if code == 0 else ran.stderr


def in_zookeeper(connect: str, work: Callable[[Coordinator], Awaitable[T]]) -> T:
    async def run_with_session() -> T:
        async with open_session(connect) as coordinator:
            return await work(coordinator)

    return asyncio.run(run_with_session())


def archived_mark_of(connect: str, partition: int) -> ArchivedMark | None:
    async def read(coordinator: Coordinator) -> ArchivedMark | None:
        marker = (await coordinator.read_partition(partition)).marker
        assert marker is not None
        return marker.archived

    return in_zookeeper(connect, read)


def append(client: WaltzClient, written: list[list[bytes]], rows: int) -> None:
    """Append rows to two partitions, every tenth one under a lock, and note them."""
    for number in range(rows):
        partition = number % 2
        log = written[partition]
        row = b"%d:%d:" % (partition, len(log)) + b"x" * 300
        locks = [LOCK] if number % 10 == 0 else []
        mark = len(log) - 1
        appended = client.append(
            row, partition=partition, write_locks=locks, client_high_water_mark=mark
        )
        assert appended.result(TEST_TIMEOUT_S) == len(log)
        log.append(row)


def log_of(connect: str, partition: int) -> list[bytes]:
    """Return the payloads of a partition from ID 0 on, including those only in the archive."""
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        last = client.high_water_mark(partition)
        return [
            bytes(row.data)
            for chunk in client.read_range(partition, 0, last, form=RangeForm.WHOLE)
            for row in chunk.rows()
        ]


def check_log(connect: str, partition: int, expected: list[bytes]) -> None:
    """Check all rows, and the feed of a client that has already applied half of the rows."""
    assert log_of(connect, partition) == expected
    applied = len(expected) // 2
    rest = expected[applied:]
    if rest:
        words = ("--partition", str(partition), "--first", str(applied), "--json")
        consumed = run_command(
            "client", "watch", "--connect", connect, *words, "--transactions", str(len(rest))
        )
        rows = [json.loads(line) for line in consumed.stdout.splitlines()]
        assert [row["data"].encode() for row in rows] == rest
        assert [row["transaction_id"] for row in rows] == [*range(applied, len(expected))]


TALLIES = sa.Table(
    "tallies",
    sa.MetaData(),
    sa.Column("partition_id", sa.Integer),
    sa.Column("transaction_id", sa.Integer),
)


class Tally(SqlCallbacks):
    """A view with a row for each transaction that it has applied."""

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        partition, last = int(transaction.partition_id), int(transaction.transaction_id)
        connection.execute(TALLIES.insert().values(partition_id=partition, transaction_id=last))


def apply_view(engine: sa.Engine, connect: str, logs: list[list[bytes]]) -> None:
    """Follow the log until the view has each transaction once."""
    expected = [(number, last) for number, log in enumerate(logs) for last in range(len(log))]

    def is_complete() -> bool:
        with engine.connect() as connection:
            query = sa.select(TALLIES).order_by(*TALLIES.c)
            return [tuple(row) for row in connection.execute(query)] == expected

    with WaltzClient(connect, PATIENT_CLIENT) as client:
        client.subscribe(Tally(engine))
        wait_until("the view has all transactions", is_complete)


def lose_everything(cluster: LocalCluster) -> None:
    """Kill all processes and delete their directories; then start an empty ZooKeeper."""
    for member in reversed(cluster.members):
        cluster.kill(member.name, signal.SIGKILL)
    for name in STORAGES:
        shutil.rmtree(cluster.directory / name)
    shutil.rmtree(cluster.directory / "zookeeper" / "version-2")
    start_zookeeper(cluster)


def storages_of(cluster: LocalCluster) -> list[str]:
    named: list[str] = []
    for name in STORAGES:
        member = cluster.member(name)
        named += ["--storage", f"127.0.0.1:{member.port}:{member.admin_port}"]
    return named


async def write_once(coordinator: Coordinator) -> None:
    """Begin, enter and finish an exactly-once write, as its first run does."""
    await coordinator.writes.begin("monday", {0: 3, 1: -1}, 1 << 40)
    await coordinator.writes.enter("monday", 0, "run", coordinator.next_client_id)
    await coordinator.writes.finish("monday", {"rows": 5}, 1 << 40)


async def repeat_write(coordinator: Coordinator) -> object:
    """Begin the write again like a later run, whose tasks cannot enter; return its summary."""
    state = await coordinator.writes.begin("monday", {0: 99}, 1 << 40)
    with pytest.raises(ConnectionSuperseded, match="monday"):
        await coordinator.writes.enter("monday", 1, "later", coordinator.next_client_id)
    return state.summary


@pytest.mark.slow
def test_a_lost_cluster_is_restored_and_continues(
    cluster: LocalCluster, archive: str, tmp_path: Path
):
    written: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    connect, file = cluster.connect, str(tmp_path / "backup")
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        client.mount()
        append(client, written, ROWS)
        in_zookeeper(connect, write_once)
        old_client_id = client.client_id
        saved = run("backup", "--connect", connect, "--output", file)
        assert saved["partitions"] == {"0": ROWS // 2 - 1, "1": ROWS // 2 - 1, "2": -1}
        assert saved["writes"] == ["monday"]
        before = in_zookeeper(connect, lambda found: found.read_partition(0))
        logs = [list(log) for log in written]
        engine = sa.create_engine(f"sqlite:///{tmp_path}/view.db")
        TALLIES.create(engine)
        apply_view(engine, connect, logs)
        append(client, written, 20)  # after the backup: lost with the cluster
    source_key = run("cluster", "show-key", "--connect", connect)["cluster_key"]
    lose_everything(cluster)

    words = ("--connect", connect, "--archive", archive, "--backup", file, *storages_of(cluster))
    restored = run("restore", *words)
    assert restored["cluster_key"] != source_key
    assert restored["partitions"] == {"0": [0, ROWS // 2 - 1], "1": [0, ROWS // 2 - 1], "2": None}
    assert "a cluster exists already at" in run("restore", *words, code=1)
    for name in (*STORAGES, "server-1"):
        cluster.start(name)

    with WaltzClient(connect, PATIENT_CLIENT) as client:
        client.mount()
        assert client.client_id > old_client_id
        assert client.high_water_marks() == {0: ROWS // 2 - 1, 1: ROWS // 2 - 1, 2: -1}
        assert in_zookeeper(connect, repeat_write) == {"rows": 5}
        late = client.append(b"old", partition=0, write_locks=[LOCK], client_high_water_mark=5)
        with pytest.raises(LockFailed):
            late.result(TEST_TIMEOUT_S)
        append(client, logs, 40)
    for partition, log in enumerate(logs):
        check_log(connect, partition, log)
    apply_view(engine, connect, logs)
    wait_until("the doctor reports nothing", lambda: not doctor_findings(connect))
    after = in_zookeeper(connect, lambda found: found.read_partition(0))
    assert before.metadata is not None
    assert after.metadata is not None
    assert after.metadata.session_id > before.metadata.session_id
    assert after.metadata.generation > before.metadata.generation
    wait_until(
        "the remaining transactions are archived",
        lambda: archived_last(connect, 0) == len(logs[0]) - 1,
    )
    run("archive", "verify", "--connect", connect, "--archive", archive)
    check_again_from_the_restored_one(cluster, archive, logs, tmp_path)


def doctor_findings(connect: str) -> list[dict[str, Any]]:
    result = run_command("doctor", "--connect", connect, "--json")
    findings: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return findings


def archived_last(connect: str, partition: int) -> int:
    mark = archived_mark_of(connect, partition)
    return -1 if mark is None else mark.last


def check_again_from_the_restored_one(
    cluster: LocalCluster, archive: str, logs: list[list[bytes]], tmp_path: Path
) -> None:
    """A backup of a restored cluster is restored up to a mark, with the same key."""
    connect, file = cluster.connect, str(tmp_path / "second")
    run("backup", "--connect", connect, "--archive", archive, "--output", file)
    key = run("cluster", "show-key", "--connect", connect)["cluster_key"]
    lose_everything(cluster)
    words = ("--connect", connect, "--archive", archive, "--backup", file, *storages_of(cluster))
    restored = run("restore", *words, "--same-key", "--mark", "0=50", "--mark", "1=-1")
    assert restored["cluster_key"] == key
    assert restored["partitions"] == {"0": [0, 50], "1": None, "2": None}
    second_connect = connect.rpartition("/")[0] + "/elsewhere"
    same = run("restore", "--connect", second_connect, *words[2:], "--same-key", code=1)
    assert "cannot restore with --same-key: the cluster" in same
    for name in (*STORAGES, "server-1"):
        cluster.start(name)
    shorter_logs = [logs[0][:51], [], []]
    run("archive", "verify", "--connect", connect, "--archive", archive)
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        client.mount()
        append(client, shorter_logs, 20)
    for partition, log in enumerate(shorter_logs):
        check_log(connect, partition, log)
