"""Runs commands that change a cluster under load, and checks that its replicas are equal."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.commands import run_command
from tests.fault.load import Scenario, read_segment_files, show_cluster, wait_until, waltz_command
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cluster.change.storage_changes import StorageLayout
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.local import LocalCluster
from waltz_core.local.ports import is_free


@dataclass(frozen=True)
class CommandOutput:
    """The output of a command."""

    code: int
    result: Any
    error: str


def start_command(cluster: LocalCluster, subcommand: str, *words: str) -> subprocess.Popen[str]:
    """Start a command that is awaited later, by `finish_command`."""
    line = waltz_command("cluster", subcommand, *words, "--connect", cluster.connect, "--json")
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish_command(started: subprocess.Popen[str]) -> CommandOutput:
    """Wait for a command."""
    out, error = started.communicate(timeout=TEST_TIMEOUT_S)
    return CommandOutput(started.returncode, json.loads(out) if out.strip() else None, error)


def _run_command(cluster: LocalCluster, subcommand: str, *words: str) -> CommandOutput:
    result = run_command("cluster", subcommand, *words, "--connect", cluster.connect, "--json")
    return CommandOutput(
        result.returncode,
        json.loads(result.stdout) if result.stdout.strip() else None,
        result.stderr,
    )


def run_successful(cluster: LocalCluster, subcommand: str, *words: str) -> Any:
    """Run a command that must succeed; return its output as JSON."""
    ran = _run_command(cluster, subcommand, *words)
    assert ran.code == 0, ran
    return ran.result


def run_failing(cluster: LocalCluster, subcommand: str, *words: str) -> str:
    """Run a command that must fail; return its one sentence."""
    ran = _run_command(cluster, subcommand, *words)
    assert ran.code == 1, ran
    assert ran.result is None
    *_, sentence = ran.error.strip().splitlines()
    assert sentence.startswith("waltz-core: ")
    return sentence


def member_address(cluster: LocalCluster, name: str) -> str:
    """Return the address of a member."""
    return f"127.0.0.1:{cluster.member(name).port}"


def change_layout(cluster: LocalCluster, change: Callable[[StorageLayout], StorageLayout]) -> None:
    """Change the storages in ZooKeeper directly, without a command."""

    async def write() -> None:
        async with open_session(cluster.connect) as coordinator:
            await coordinator.storages.change_layout(change)

    asyncio.run(write())


def start_new_storage(cluster: LocalCluster) -> str:
    """Start one more storage, which is not in the cluster yet; return its address."""
    storage = cluster.add_storage()
    cluster.start(storage.name)
    wait_until("it listens", lambda: not is_free(storage.port, cluster.host))
    return f"127.0.0.1:{storage.port}"


def admin_port_arguments(cluster: LocalCluster, storage: str) -> tuple[str, str]:
    """Return the arguments that select the admin port of a storage of this machine."""
    port = int(storage.rpartition(":")[2])
    return "--admin-port", str(next(m.admin_port for m in cluster.members if m.port == port))


def assigned_replicas(cluster: LocalCluster) -> dict[int, set[str]]:
    """Return the assigned replicas of each partition."""
    view = show_cluster(cluster)
    storages, partitions = view["storages"], view["partitions"]
    assert isinstance(storages, dict)
    assert isinstance(partitions, dict)
    return {
        int(partition): {name for name, held in storages.items() if int(partition) in held}
        for partition in partitions
    }


def check_replicas_equal(scenario: Scenario) -> None:
    """Wait until exactly the assigned replicas are engaged, and have the same bytes."""
    wait_until(
        "all assigned replicas are engaged", lambda: not partitions_not_engaged(scenario.cluster)
    )
    wait_until("the replicas are equal", lambda: not _unequal_partitions(scenario.cluster))


def partitions_not_engaged(cluster: LocalCluster) -> list[int]:
    """Return the partitions whose engaged replicas differ from the assigned replicas."""
    partitions = show_cluster(cluster)["partitions"]
    assert isinstance(partitions, dict)
    assigned = assigned_replicas(cluster)
    return [
        number
        for number, replicas in assigned.items()
        if set(partitions[str(number)]["engaged"]) != replicas
    ]


def _unequal_partitions(cluster: LocalCluster) -> list[int]:
    names = {f"127.0.0.1:{member.port}": member.name for member in cluster.members}
    found = []
    for number, assigned in assigned_replicas(cluster).items():
        first, *others = [_segment_files(cluster, names[each], number) for each in sorted(assigned)]
        assert first, "no files were compared"
        if any(other != first for other in others):
            found.append(number)
    return found


def _segment_files(cluster: LocalCluster, name: str, partition: int) -> dict[str, bytes]:
    whole = read_segment_files(cluster, name)
    return {path: data for path, data in whole.items() if path.startswith(f"{partition}/")}
