"""Faults in a cluster of processes: the doctor names each, and its commands repair it.

The cluster is one of `waltz-core local up`. Each test leaves a healthy cluster, but may change it.
Therefore each test reads the current assignment of replicas if it needs it.
"""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import run_command
from tests.fault.cluster_commands import (
    assigned_replicas,
    change_layout,
    member_address,
    partitions_not_engaged,
    run_successful,
)
from tests.fault.doctor import (
    DiagnosedCluster,
    await_findings,
    faulty_cluster,
    local_options,
    repair,
    run_doctor,
)
from tests.fault.load import wait_until
from tests.fault.threads import resume_threads, stop_threads
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.cluster.change.storage_changes import StorageLayout
from waltz_core.cluster.znodes.model import PartitionMetadata
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.local import LocalCluster
from waltz_core.local.zookeeper_process import find_java
from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.storage.files.format import SLOT_BYTES

pytestmark = pytest.mark.fault


class Fault(NamedTuple):
    """A fault, and all findings that the doctor must report.

    `passes` does or awaits what no printed command does. Then the test runs the printed commands.
    """

    names: tuple[str, ...]
    inject: Callable[[LocalCluster], None]
    passes: Callable[[LocalCluster], None] = lambda _cluster: None


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiagnosedCluster]:
    try:
        with faulty_cluster(tmp_path_factory.mktemp("doctor") / "waltz") as diagnosed:
            yield diagnosed
    finally:
        for directory in MOUNTED:
            subprocess.run(["umount", "-l", str(directory)], check=True, capture_output=True)


# --- the faults


def kill(*names: str) -> Callable[[LocalCluster], None]:
    def inject(cluster: LocalCluster) -> None:
        for name in names:
            cluster.kill(name)

    return inject


def freeze(name: str) -> Callable[[LocalCluster], None]:
    return lambda cluster: cluster.kill(name, signal.SIGSTOP)


def combined(*faults: Callable[[LocalCluster], None]) -> Callable[[LocalCluster], None]:
    def inject(cluster: LocalCluster) -> None:
        for fault in faults:
            fault(cluster)

    return inject


def storage(cluster: LocalCluster, subcommand: str, name: str, *words: str) -> None:
    at = (
        "--connect",
        cluster.connect,
        "--storage",
        member_address(cluster, name),
        "--partition",
        "0",
    )
    run_command("storage", subcommand, *at, *words)


def take_offline(cluster: LocalCluster) -> None:
    storage(cluster, "availability", "storage-1", "--online", "false")


def mark_two_suspect(cluster: LocalCluster) -> None:
    """Make two of three replicas suspect before the next session, which must not open."""
    for name in ("server-1", "server-2"):
        cluster.kill(name)
    for name in ("storage-1", "storage-2"):
        storage(cluster, "mark-suspect", name, "--force")
    for name in ("server-1", "server-2"):
        cluster.start(name)


def damage(cluster: LocalCluster) -> None:
    """Corrupt one record on two disks while the third is unreachable."""
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        for future in [client.append(b"x" * 1000, partition=0) for _ in range(20)]:
            future.result(TEST_TIMEOUT_S)
    # A quorum of the replicas must be trusted without the third replica.
    wait_until("all replicas are engaged", lambda: not partitions_not_engaged(cluster))
    cluster.kill("storage-3")
    for name in ("storage-1", "storage-2"):
        newest = max((cluster.directory / name / "0").glob("*.seg"))
        with newest.open("r+b") as file:
            file.seek(newest.stat().st_size - 5_500)
            file.write(b"rot")
    for name in ("storage-1", "storage-2"):
        storage(cluster, "scrub", name)


def spoil_log(cluster: LocalCluster) -> None:
    """Corrupt both control slots of a partition."""
    cluster.kill("storage-2")
    slots = cluster.directory / "storage-2" / "0" / "waltz-x.ctl"
    slots.write_bytes(b"\xff" * max(slots.stat().st_size, 2 * SLOT_BYTES))
    cluster.start("storage-2")


def remove_replica(cluster: LocalCluster) -> None:
    """Remove a replica from a storage, and restore some files of the replica later."""
    run_successful(cluster, "remove-replica", "0", member_address(cluster, "storage-3"))
    storage(cluster, "add-partition", "storage-3")


def prefer_twice(cluster: LocalCluster) -> None:
    for name in ("server-1", "server-2"):
        run_successful(cluster, "prefer", "1", member_address(cluster, name))


def misname_admin_port(cluster: LocalCluster) -> None:
    one = member_address(cluster, "storage-2")
    change_layout(cluster, lambda old: replace(old, admin_ports={**old.admin_ports, one: 1}))


def share_a_group(cluster: LocalCluster) -> None:
    """Put two of the three replicas of partition 0 into one group."""
    first, second, third = sorted(assigned_replicas(cluster)[0])
    (spare,) = {member_address(cluster, f"storage-{number}") for number in range(1, 5)} - {
        first,
        second,
        third,
    }
    groups = {first: 0, second: 0, third: 1, spare: 2}
    change_layout(cluster, lambda old: replace(old, groups=groups))


def storage_with_partition_0(cluster: LocalCluster) -> str:
    """Return the name of a storage with a replica of partition 0; the tests move replicas."""
    first = min(assigned_replicas(cluster)[0])
    return next(member.name for member in cluster.members if first.endswith(f":{member.port}"))


# --- disks, threads and clocks

BLOCKED_STARTS: list[tuple[str, Path, Path]] = []


def delay_start(cluster: LocalCluster) -> None:
    """Block a read that a storage executes at its start after a crash."""
    name = storage_with_partition_0(cluster)
    cluster.kill(name)
    newest = max((cluster.directory / name / "0").glob("*.seg"))
    moved_path = newest.with_suffix(".aside")
    newest.rename(moved_path)
    os.mkfifo(newest)
    BLOCKED_STARTS.append((name, newest, moved_path))
    cluster.start(name)


def restart_without_block(cluster: LocalCluster) -> None:
    for name, newest, moved_path in BLOCKED_STARTS:
        cluster.kill(name)
        moved_path.replace(newest)
        cluster.start(name)
    BLOCKED_STARTS.clear()


def hang(cluster: LocalCluster) -> None:
    """Stop the threads of the disk; the one for connections continues."""
    member = cluster.member(storage_with_partition_0(cluster))
    process = member.process()
    assert process is not None
    pages = f"http://127.0.0.1:{member.http_port}"
    stop_threads(process.pid, lambda: is_answering(f"{pages}/livez"))
    assert not is_answering(f"{pages}/readyz", timeout_s=TEST_TIMEOUT_S)


def is_answering(url: str, *, timeout_s: float = 1) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as page:
            return page.status == 200
    except OSError:
        return False


def shift_clock(cluster: LocalCluster) -> None:
    """Set a storage's clock some seconds ahead, until a printed command corrects it."""
    ahead = cluster.directory / "ahead"
    (ahead / "bin").mkdir(parents=True, exist_ok=True)
    (ahead / "sitecustomize.py").write_text(AHEAD, encoding="utf-8")
    (ahead / "by_ns").touch()
    set_clock = ahead / "bin" / "timedatectl"
    set_clock.write_text(f"#!/bin/sh\nrm {shlex.quote(str(ahead / 'by_ns'))}\n", encoding="utf-8")
    set_clock.chmod(0o755)
    cluster.kill("storage-2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ahead}:{os.environ.get('PYTHONPATH', '')}")
        cluster.start("storage-2")


AHEAD = """
import pathlib, time
real, by_ns = time.time_ns, pathlib.Path(__file__).with_name("by_ns")
time.time_ns = lambda: real() + 7_000_000_000 * by_ns.exists()
"""


def leave_free(mib: int) -> Callable[[LocalCluster], None]:
    """Shrink the disk of a storage to its content plus the given number of bytes."""

    def inject(cluster: LocalCluster) -> None:
        change_layout(cluster, lambda old: replace(old, groups=one_group_for_each(old)))
        name = storage_with_partition_0(cluster)
        directory = cluster.directory / name
        if directory not in MOUNTED:
            cluster.kill(name)
            move_to_own_disk(directory)
            cluster.start(name)
            wait_until(
                "the process is registered",
                lambda: not run_doctor(*local_options(cluster.directory)),
            )
        used = shutil.disk_usage(directory).used
        mount("-o", f"remount,size={used + (mib << 20)}", str(directory))

    return inject


def one_group_for_each(layout: StorageLayout) -> dict[ReplicaId, int]:
    """Return groups such that each storage is in a separate group."""
    return {group: index for index, group in enumerate(layout.groups)}


def move_to_own_disk(where: Path) -> None:
    """Move a directory to a separate disk."""
    shutil.copytree(where, copy := where.with_suffix(".aside"))
    mount("-t", "tmpfs", "-o", "size=4g", "tmpfs", str(where))
    MOUNTED.append(where)
    shutil.copytree(copy, where, dirs_exist_ok=True)
    shutil.rmtree(copy)


def free_disk_space() -> None:
    for directory in MOUNTED:
        mount("-o", "remount,size=4g", str(directory))


MOUNTED: list[Path] = []


def fill(cluster: LocalCluster) -> None:
    """Fill a disk."""
    leave_free(0)(cluster)
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        for future in [client.append(bytes(100_000), partition=0) for _ in range(80)]:
            future.result(TEST_TIMEOUT_S)


def mount(*words: str) -> None:
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("only root on Linux can mount a small disk")
    result = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no tmpfs can be mounted: {result.stderr.strip()}")


# --- lost ZooKeeper data


def lose_metadata(cluster: LocalCluster) -> None:
    """Empty the metadata znode of one partition."""

    async def write() -> None:
        async with open_session(cluster.connect) as coordinator:
            old = await coordinator.read_partition(PartitionId(1))
            assert old.marker is not None
            await coordinator.write_partition(
                PartitionId(1), PartitionMetadata(), old.marker, old.versions
            )

    asyncio.run(write())


def lose_zookeeper(cluster: LocalCluster) -> None:
    """Restart all ZooKeeper servers with empty directories."""
    nodes = [zookeeper.name for zookeeper in cluster.zookeepers]
    for name in nodes:
        cluster.kill(name)
    for name in nodes:
        shutil.rmtree(cluster.directory / name / "version-2")
        cluster.start(name)


FAULTS = {
    "a quorum of the storages is killed": Fault(
        ("process-down", "no-quorum"), kill("storage-1", "storage-2")
    ),
    "all servers are killed": Fault(("process-down", "no-server"), kill("server-1", "server-2")),
    "a storage and a server are frozen": Fault(
        ("process-stopped",), combined(freeze("storage-2"), freeze("server-2"))
    ),
    "a node of ZooKeeper finds no quorum": Fault(
        ("process-down", "zookeeper-unavailable", "zookeeper-server-without-quorum"),
        kill("zookeeper-1", "zookeeper-2"),
    ),
    "three people have each changed something": Fault(
        ("replica-offline", "preference-not-granted", "admin-port-wrong"),
        combined(take_offline, prefer_twice, misname_admin_port),
    ),
    "no quorum is trusted": Fault(("no-trusted-quorum",), mark_two_suspect),
    "a record has rotted": Fault(("process-down", "replica-damaged"), damage),
    "a log does not open": Fault(("replica-unreadable",), spoil_log),
    "a replica is missing": Fault(("replica-left-over", "too-few-replicas"), remove_replica),
    "groups are crowded": Fault(("replicas-share-group",), share_a_group),
    "a start takes long": Fault(("storage-starting",), delay_start, restart_without_block),
    "a disk hangs": Fault(("storage-unresponsive",), hang),
    "a clock is wrong": Fault(("storage-clock-skew",), shift_clock),
    "a disk is nearly full": Fault(("disk-nearly-full",), leave_free(200)),
    "a disk is full": Fault(("disk-full",), fill),
    "ZooKeeper has lost a node": Fault(("metadata-lost",), lose_metadata),
    "ZooKeeper has lost everything": Fault(("cluster-lost",), lose_zookeeper),
}


# `tests/unit/ops/test_diagnosis.py` has the finding of each fault. Each entry is the title of a
# fault -> the file in this folder with the same fault, or the title of a fault with almost the same
# steps.
SLOW_FAULTS = {
    "all servers are killed": "test_doctor_elsewhere.py",
    "a node of ZooKeeper finds no quorum": "test_zookeeper_trouble.py",
    "no quorum is trusted": "test_rebuilding.py",
    "a record has rotted": "test_disk_errors.py",
    "a log does not open": "test_storage_death.py",
    "a disk is nearly full": "test_bad_input.py",
    "a disk is full": "test_bad_input.py",
    "ZooKeeper has lost a node": "test_rebuilding.py",
    "ZooKeeper has lost everything": "test_rebuilding.py",
}


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.slow) if title in SLOW_FAULTS else title
        for title in FAULTS
    ],
)
def test_the_doctor_finds_a_fault_and_the_printed_command_repairs_it(
    diagnosed: DiagnosedCluster, title: str
):
    fault, cluster = FAULTS[title], diagnosed.cluster()
    diagnosed.write(cluster.connect)
    fault.inject(cluster)
    findings = await_findings(fault.names, *local_options(diagnosed.directory))
    fault.passes(cluster)
    try:
        repair(diagnosed.directory, findings, diagnosed.directory / "ahead" / "bin")
    finally:
        resume_threads()
        free_disk_space()
    diagnosed.check_rows(cluster.connect)


def test_local_up_returns_only_when_every_zookeeper_server_is_ready(
    diagnosed: DiagnosedCluster, monkeypatch: pytest.MonkeyPatch
):
    """Partitions can open before all storages have started; the doctor reports such storages."""
    slow = diagnosed.directory / "slow-java" / "bin" / "java"
    slow.parent.mkdir(parents=True)
    slow.write_text(f'#!/bin/sh\nsleep 8\nexec {find_java()} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(slow.parent.parent))
    cluster = diagnosed.cluster()
    kill("zookeeper-1")(cluster)
    cluster.up()
    findings = run_doctor(*local_options(diagnosed.directory))
    assert not [finding for finding in findings if finding["area"] == "ZooKeeper"]
