"""Faults in a whole cluster of processes: the doctor names each, and what it prints mends it.

The cluster is one that `waltz-core local up` knows: three nodes of ZooKeeper, three storages and a
spare one, two servers. Each test leaves it whole, though not always as it was.
"""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fault.changing import address, admin_port, does, new_storage, replicas
from tests.fault.load import ROOT, command, wait_until
from waltz_core.cli.main import main
from waltz_core.client import WaltzClient
from waltz_core.cluster.storages import Layout
from waltz_core.cluster.zookeeper import connected
from waltz_core.local import LocalCluster
from waltz_core.storage.format import SLOT_BYTES

pytestmark = pytest.mark.fault

ROUNDS_MAX = 4
# Whatever has started a process has to see to its end, too.
STARTED: list[LocalCluster] = []


class Fault(NamedTuple):
    """What is broken, and all that the doctor is to find then."""

    names: tuple[str, ...]
    inject: Callable[[LocalCluster], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("doctor") / "waltz"
    made = LocalCluster(where, zookeeper_count=3, partition_count=2)
    STARTED.append(made)
    try:
        made.up()
        spare = new_storage(made)
        does(made, "add-storage", spare, *admin_port(made, spare))
        yield where
    finally:
        for each in reversed(STARTED):
            each.down()
        STARTED.clear()


@pytest.fixture
def cluster(directory: Path) -> LocalCluster:
    """Give the cluster as it is now: the commands that are printed start processes, too."""
    found = LocalCluster(directory)
    STARTED.append(found)
    return found


def doctor(cluster: LocalCluster, *words: str) -> list[dict[str, str]]:
    """Return what the doctor finds."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["doctor", "--directory", str(cluster.directory), "--json", *words])
    told = json.loads(out.getvalue())
    assert code == (1 if told["findings"] else 0)
    assert told["is_well"] == (not told["findings"])
    findings: list[dict[str, str]] = told["findings"]
    return findings


def run_as_printed(line: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr


def mend(cluster: LocalCluster, found: list[dict[str, str]]) -> None:
    """Do what the doctor says until it has nothing more to say."""
    for _ in range(ROUNDS_MAX):
        for line in dict.fromkeys(each["command"] for each in found):
            # What may lose data is for somebody to decide: here, for this test.
            run_as_printed(f"{line} --yes" if "accept-replicas" in line else line)
        found = doctor(cluster, "--timeout-s", "1.5")
        if not found:
            return
    pytest.fail(f"still wrong after {ROUNDS_MAX} rounds: {found}")


# --- the faults


def kill(*names: str) -> Callable[[LocalCluster], None]:
    def inject(cluster: LocalCluster) -> None:
        for name in names:
            cluster.kill(name)

    return inject


def freeze(name: str) -> Callable[[LocalCluster], None]:
    return lambda cluster: cluster.kill(name, signal.SIGSTOP)


def all_of(*faults: Callable[[LocalCluster], None]) -> Callable[[LocalCluster], None]:
    def inject(cluster: LocalCluster) -> None:
        for each in faults:
            each(cluster)

    return inject


def storage(cluster: LocalCluster, verb: str, name: str, *words: str) -> None:
    at = ("--connect", cluster.connect, "--storage", address(cluster, name), "--partition", "0")
    done = subprocess.run(
        command("storage", verb, *at, *words),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr


def take_offline(cluster: LocalCluster) -> None:
    storage(cluster, "availability", "storage-1", "--online", "false")


def doubt_two(cluster: LocalCluster) -> None:
    """A session that nobody may open: two of three replicas are suspect before the next one."""
    for name in ("server-1", "server-2"):
        cluster.kill(name)
    for name in ("storage-1", "storage-2"):
        storage(cluster, "mark-suspect", name, "--force")
    for name in ("server-1", "server-2"):
        cluster.start(name)


def damage(cluster: LocalCluster) -> None:
    """One record rots on two disks while the third cannot be reached."""
    with WaltzClient(cluster.connect) as client:
        for future in [client.append(b"x" * 1000, partition=0) for _ in range(20)]:
            future.result(45)
    cluster.kill("storage-3")
    for name in ("storage-1", "storage-2"):
        newest = max((cluster.directory / name / "0").glob("*.seg"))
        with newest.open("r+b") as file:
            file.seek(newest.stat().st_size - 5_500)
            file.write(b"rot")
    for name in ("storage-1", "storage-2"):
        storage(cluster, "scrub", name)


def spoil_log(cluster: LocalCluster) -> None:
    """No slot of a partition's control file can be read."""
    cluster.kill("storage-2")
    slots = cluster.directory / "storage-2" / "0" / "waltz-x.ctl"
    slots.write_bytes(b"\xff" * max(slots.stat().st_size, 2 * SLOT_BYTES))
    cluster.start("storage-2")


def remove_replica(cluster: LocalCluster) -> None:
    does(cluster, "remove-replica", "0", address(cluster, "storage-3"))


def prefer_twice(cluster: LocalCluster) -> None:
    for name in ("server-1", "server-2"):
        does(cluster, "prefer", "1", address(cluster, name))


def change_layout(cluster: LocalCluster, change: Callable[[Layout], Layout]) -> None:
    async def write() -> None:
        async with connected(cluster.connect) as coordinator:
            await coordinator.storages.change(change)

    asyncio.run(write())


def misname_admin_port(cluster: LocalCluster) -> None:
    one = address(cluster, "storage-2")
    change_layout(cluster, lambda old: replace(old, admin_ports={**old.admin_ports, one: 1}))


def crowd(cluster: LocalCluster) -> None:
    """Two of the three places of partition 0 turn out to be one."""
    first, second, third = sorted(replicas(cluster)[0])
    (spare,) = {address(cluster, f"storage-{number}") for number in range(1, 5)} - {
        first,
        second,
        third,
    }
    groups = {first: 0, second: 0, third: 1, spare: 2}
    change_layout(cluster, lambda old: replace(old, groups=groups))


FAULTS = {
    "a quorum of the storages is killed": Fault(
        ("process-down", "no-quorum"), kill("storage-1", "storage-2")
    ),
    "all servers are killed": Fault(("process-down", "no-server"), kill("server-1", "server-2")),
    "a storage and a server are frozen": Fault(
        ("process-stopped",), all_of(freeze("storage-2"), freeze("server-2"))
    ),
    "a node of ZooKeeper finds no quorum": Fault(
        ("process-down", "zookeeper-away", "zookeeper-node-alone"),
        kill("zookeeper-1", "zookeeper-2"),
    ),
    "three people have each changed something": Fault(
        ("replica-offline", "preference-not-granted", "admin-port-wrong"),
        all_of(take_offline, prefer_twice, misname_admin_port),
    ),
    "nobody can vouch": Fault(("nobody-can-vouch",), doubt_two),
    "a record has rotted": Fault(("process-down", "replica-damaged"), damage),
    "a log does not open": Fault(("replica-unreadable",), spoil_log),
    "a replica is missing": Fault(("replica-left-over", "too-few-replicas"), remove_replica),
    "groups are crowded": Fault(("groups-crowded",), crowd),
}


@pytest.mark.parametrize("title", list(FAULTS))
def test_a_fault_is_named_and_mended_by_what_is_printed(cluster: LocalCluster, title: str):
    fault = FAULTS[title]
    fault.inject(cluster)
    found: list[dict[str, str]] = []

    def is_named() -> bool:
        found[:] = doctor(cluster, "--timeout-s", "1.5")
        return set(fault.names) == {each["name"] for each in found}

    wait_until(f"{fault.names} in {found}", is_named)
    mend(cluster, found)
