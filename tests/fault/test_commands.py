"""The commands of `docs/commands.md` that no other test runs, on a cluster of processes.

The tests build on one another: the last ones stop the cluster and delete it.
"""

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.commands import run_command
from tests.fault.cluster_commands import member_address
from tests.fault.load import are_all_replicas_engaged, wait_until, waltz_command
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.cli.main import main
from waltz_core.client import WaltzClient
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.record import PartitionId, ReplicaId

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("commands") / "waltz"
    with running_cluster(directory, server_count=2, partition_count=2) as cluster:
        hosts = cluster.connect.partition("/")[0]
        # A cluster is up when all partitions answer. At first, one server may own all of them.
        wait_until(
            "both servers own partitions",
            lambda: json_output(cluster, "cluster", "list", hosts)[0]["servers"] == 2,
        )
        yield cluster


class CommandOutput(NamedTuple):
    """The output of a command."""

    code: int
    out: str
    error: str


def output_of(cluster: LocalCluster, *words: str) -> CommandOutput:
    """Run a command in this process, because a new process takes long to start."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALTZ_CONNECT", cluster.connect)
        patch.setattr(sys, "argv", ["waltz-core", *words])  # the command that the audit log records
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main()
    return CommandOutput(code, out.getvalue(), error.getvalue())


def json_output(cluster: LocalCluster, *words: str) -> Any:
    """Run a command with `--json` that must succeed; return its output."""
    output = output_of(cluster, *words, "--json")
    assert output.code == 0, output
    return json.loads(output.out)


def run_failing(cluster: LocalCluster, *words: str) -> str:
    """Run a command that must fail; return its error message of one line."""
    output = output_of(cluster, *words)
    assert (output.code, output.out) == (1, ""), output
    *_, sentence = output.error.strip().splitlines()
    assert sentence.startswith("waltz-core: ")
    return sentence


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """Return a terminal to write to, and a function that returns its text."""
    terminal_end, process_end = pty.openpty()
    output: list[str] = []

    def read() -> None:
        with contextlib.suppress(
            OSError
        ):  # Linux reports this when no process has the terminal open.
            while chunk := os.read(terminal_end, 4096):
                output.append(chunk.decode())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process_end, output
    finally:
        os.close(process_end)
        reader.join()
        os.close(terminal_end)


def test_a_cluster_is_listed_and_reports_its_key(cluster: LocalCluster):
    hosts, _, root = cluster.connect.partition("/")
    (listed,) = json_output(cluster, "cluster", "list", hosts)
    assert (listed["root"], listed["name"], listed["partitions"]) == (f"/{root}", "local", 2)
    assert (listed["servers"], listed["storages"]) == (2, 3)
    assert json_output(cluster, "cluster", "show-key") == {"cluster_key": listed["key"]}
    assert json_output(cluster, "cluster", "list", f"{hosts}/nothing/here") == []


def test_client_commands_validate_and_watch_the_log(cluster: LocalCluster):
    words = ("--clients", "3", "--transactions", "10", "--partitions", "2")
    output = json_output(cluster, "client", "validate", *words)
    assert (output["is_valid"], output["written"], output["checked"]) == (True, 30, 90)
    first, last = output["ids"]["0"]
    assert json_output(cluster, "client", "high-water-mark", "--partition", "0") == {"0": last}
    produced = json_output(cluster, "client", "create-producer", "--transactions", "3")
    assert produced["ids"] == {"0": [last + 1, last + 3]}
    words = ("--first", str(first), "--transactions", str(last + 3 - first + 1))
    assert json_output(cluster, "client", "create-consumer", *words)["is_valid"]
    watched = output_of(cluster, "client", "watch", "--first", str(last), "--transactions", "2")
    assert watched.out == f"{last}\t0\t{last}\n{last + 1}\t0\t{last + 1}\n"
    assert output_of(cluster, "client", "watch", "--partition", "9").code == 1


def test_servers_report_their_partitions_and_the_peers_that_they_can_reach(cluster: LocalCluster):
    one, other = (member_address(cluster, f"server-{each}") for each in (1, 2))
    output = json_output(cluster, "server", "add-preferred-partition", "all", one)
    assert output["owns"] == [0, 1]
    listed = {
        server["address"]: server for server in json_output(cluster, "server", "list")["servers"]
    }
    assert listed[one]["preferred"] == listed[one]["partitions"] == [0, 1]
    assert listed[other]["partitions"] == []
    json_output(cluster, "server", "remove-preferred-partition", "0-1", one)
    is_healthy = lambda: output_of(cluster, "server", "list").code == 0  # noqa: E731
    wait_until("the servers are healthy", is_healthy)
    # A cluster accepts appends when a quorum of its storages runs.
    reaches_all = lambda: output_of(cluster, "cluster", "check-connectivity").code == 0  # noqa: E731
    wait_until("all storages run", reaches_all)
    reach = json_output(cluster, "cluster", "check-connectivity")
    assert reach["is_healthy"]
    assert len(reach["connections"]) == 2 * (1 + 3)
    address = f"127.0.0.1:{cluster.member('storage-1').http_port}"
    match = ("--match", "waltz_storage_last_transaction")
    assert json_output(cluster, "storage", "metrics", address, *match).keys() >= {
        'waltz_storage_last_transaction{partition="0"}'
    }


def test_an_error_of_one_partition_is_reported_for_this_partition(cluster: LocalCluster):
    wait_until("the cluster is healthy", lambda: output_of(cluster, "cluster", "verify").code == 0)
    output = json_output(cluster, "cluster", "verify", "--by-partition")
    assert output["passed"]
    assert all(all(checks.values()) for checks in output["partitions"].values())
    storage = member_address(cluster, "storage-2")
    at = ("--storage", storage, "--partition", "1")
    json_output(cluster, "storage", "availability", *at, "--online", "false")
    failed = output_of(cluster, "cluster", "verify", "--by-partition", "--json")
    assert failed.code == 1
    document = json.loads(failed.out)
    assert all(document["partitions"]["0"].values())
    assert not document["partitions"]["1"]["storage"]
    (repair,) = [
        finding for finding in document["findings"] if "has taken its replica offline." in finding
    ]
    words = repair.split("`")[1].split()[1:]
    assert output_of(cluster, *words).code == 0
    wait_until("the cluster is healthy", lambda: output_of(cluster, "cluster", "verify").code == 0)


def test_a_scrub_shows_its_progress_at_a_terminal(cluster: LocalCluster):
    at = ("--storage", member_address(cluster, "storage-1"), "--partition", "0-1")
    line = waltz_command("storage", "scrub", *at, "--connect", cluster.connect)
    with terminal() as (screen, output):
        cluster.kill("storage-1", signal.SIGSTOP)  # so that it takes longer than a second
        try:
            started = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=screen, text=True)
            wait_until("the line is shown", lambda: "to answer" in "".join(output))
        finally:
            cluster.kill("storage-1", signal.SIGCONT)
        table, _ = started.communicate(timeout=TEST_TIMEOUT_S)
    assert started.returncode == 0
    shown = "".join(output)
    assert "0 of 2 waiting for " in shown
    assert shown.rpartition("waiting for ")[2].count("\x1b[2K"), (
        "the progress line remains after the end"
    )
    assert "\x1b" not in table
    assert table.split()[:4] == ["partition", "next", "ID", "last"]
    rows = json_output(cluster, "storage", "scrub", *at, "--status")["partitions"]
    assert [(row["damaged"], row["error"], row["passes"] > 0) for row in rows] == [
        (0, None, True)
    ] * 2


def test_the_scrub_command_times_out_if_the_storage_is_silent(cluster: LocalCluster):
    storage = member_address(cluster, "storage-1")
    cluster.kill("storage-1", signal.SIGSTOP)
    try:
        words = ("--storage", storage, "--partition", "0-1", "--timeout-s", "1")
        output = run_failing(cluster, "storage", "scrub", *words)
    finally:
        cluster.kill("storage-1", signal.SIGCONT)
    assert (
        f"the command did not finish within 1 s. It still waits for: {storage} to answer." in output
    )


def test_bench_commands_measure_a_running_cluster_without_lost_rows(cluster: LocalCluster):
    at = ("--connect", cluster.connect, "--json")
    load = ("--seconds", "1", "--writers", "8", "--lock-pool", "2", "--interval-ms", "1")
    document = json.loads(output_of(cluster, "bench", "test-producers", *load, *at).out)
    assert document["rows"] > 0
    assert document["lost"] == document["duplicated"] == 0
    assert document["extra"]["rejected"] > 0, "eight writers had no conflict on two locks"
    document = json.loads(output_of(cluster, "bench", "test-consumers", "--rows", "100", *at).out)
    assert document["rows"] >= 100
    assert document["lost"] == document["duplicated"] == 0


# --- storages


def storage_addresses(cluster: LocalCluster) -> list[str]:
    return [f"127.0.0.1:{member.port}" for member in cluster.members if member.kind == "storage"]


def append(cluster: LocalCluster, count: int) -> int:
    """Append to partition 0 and return the last ID."""
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        futures = [client.append(b"x" * 100, partition=0) for _ in range(count)]
        return max(future.result(TEST_TIMEOUT_S) for future in futures)


def replica(cluster: LocalCluster, name: str, partition: int = 0) -> dict[str, object]:
    listed = json_output(cluster, "storage", "list", "--storage", name)
    (found,) = [replica for replica in listed["replicas"] if replica["partition"] == partition]
    assert isinstance(found, dict)
    return found


def has_caught_up(cluster: LocalCluster, name: str, last: int) -> bool:
    found = replica(cluster, name)
    return (found["state"], found["last"]) == ("online", last)


def test_storage_commands_report_that_all_storages_match_the_assignment(cluster: LocalCluster):
    wait_until("all run", lambda: output_of(cluster, "storage", "validate").code == 0)
    validated = json_output(cluster, "storage", "validate")
    assert validated["is_healthy"]
    assert set(validated["storages"]) == set(storage_addresses(cluster))
    assert json_output(cluster, "storage", "sync-partitions") == {"is_done": True, "steps": []}
    listed = json_output(cluster, "storage", "list")
    assert len(listed["replicas"]) == 6
    assert {replica["state"] for replica in listed["replicas"]} == {"online"}
    last = append(cluster, 50)
    words = ("--storage", storage_addresses(cluster)[0], "--partition", "0-1")
    ids = json_output(cluster, "storage", "max-transaction-id", *words)
    assert ids["0"] == last
    assert ids.keys() == {"0", "1"}


def test_commands_re_seed_and_recover_partition_bring_a_replica_back_in_sync(cluster: LocalCluster):
    one, other = storage_addresses(cluster)[:2]
    at = ("--storage", other, "--partition", "0")
    last = append(cluster, 200)
    assert "was not deleted, because it is in sync" in run_failing(
        cluster, "storage", "re-seed", *at
    )
    json_output(cluster, "storage", "availability", *at, "--online", "false")
    wait_until("the other servers continue", lambda: append(cluster, 1) > last)
    mark = replica(cluster, one)["low_water_mark"]
    assert "expected partition 0 to be offline" in run_failing(
        cluster,
        *("storage", "recover-partition", "--storage", one),
        *("--partition", "0", "--from", other),
    )
    json_output(cluster, "storage", "re-seed", *at)
    found = replica(cluster, other)
    assert (found["state"], found["last"]) == ("offline, suspect", -1)
    steps = json_output(
        cluster, "storage", "recover-partition", *at, "--from", one, "--batch-bytes", "5000"
    )
    assert steps == [{"partition": 0, "last before": -1, "last after": mark}]
    json_output(cluster, "storage", "availability", *at, "--online", "true")
    last = append(cluster, 10)
    wait_until("the replica is in sync", lambda: has_caught_up(cluster, other, last))
    commands = audited_commands(cluster)
    for is_online in ("false", "true"):
        expected = f"storage availability {' '.join(at)} --online {is_online}"
        assert any(expected in command for command in commands), commands


def audited_commands(cluster: LocalCluster) -> list[str]:
    return [entry["command"] for entry in json_output(cluster, "cluster", "audit")]


def test_a_new_session_brings_a_replica_marked_suspect_back_in_sync(cluster: LocalCluster):
    name = storage_addresses(cluster)[2]
    at = ("--storage", name, "--partition", "0")
    wait_until("the replica is engaged", lambda: are_all_replicas_engaged(cluster))
    before = replica(cluster, name)["session"]
    json_output(cluster, "storage", "mark-suspect", *at)
    last = append(cluster, 10)
    wait_until("the replica is in sync", lambda: has_caught_up(cluster, name, last))
    assert replica(cluster, name)["session"] > before, "the replica was not marked suspect"


def assign(cluster: LocalCluster, held: dict[str, tuple[int, ...]]) -> None:
    async def main() -> None:
        async with open_session(cluster.connect) as coordinator:
            partitions = {
                ReplicaId(name): tuple(map(PartitionId, each)) for name, each in held.items()
            }
            await coordinator.update_replica_assignment(lambda _: ReplicaAssignments(partitions))

    asyncio.run(main())


def test_a_partition_moves_away_and_returns(cluster: LocalCluster):
    one, other, third = storage_addresses(cluster)
    at = ("--storage", third, "--partition", "1")
    assert "because ZooKeeper assigns it to this storage" in run_failing(
        cluster, "storage", "remove-partition", *at, "--delete-files"
    )
    assign(cluster, {one: (0, 1), other: (0, 1), third: (0,)})
    wait_until(
        "the replica is not engaged",
        lambda: output_of(cluster, "storage", "remove-partition", *at, "--delete-files").code == 0,
    )
    directory = Path(cluster.directory) / "storage-3" / "1"
    assert list(directory.iterdir()) == []
    assert "not assigned" in run_failing(cluster, "storage", "max-transaction-id", *at)
    assert json_output(cluster, "storage", "sync-partitions") == {"is_done": True, "steps": []}
    assign(cluster, {one: (0, 1), other: (0, 1), third: (0, 1)})
    wait_until(
        "it is held", lambda: output_of(cluster, "storage", "max-transaction-id", *at).code == 0
    )
    assert json_output(cluster, "storage", "add-partition", *at) == {
        "storage": third,
        "subcommand": "add-partition",
        "done": [1],
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("list",), "expected --admin HOST:ADMIN_PORT, or --connect"),
        (("list", "--admin", "127.0.0.1"), "expected host:port"),
        (("list", "--admin", "127.0.0.1:1"), "127.0.0.1:1"),
        (("list", "--admin", "127.0.0.1:1", "--storage", "x:1"), "found both"),
        (("re-seed", "--admin", "127.0.0.1:1", "--partition", "x"), "ranges such as 0-6,7"),
        (("re-seed", "--admin", "127.0.0.1:1", "--partition", "3-1"), "a range from a lower to"),
    ],
)
def test_invalid_requests_are_reported_in_a_sentence(words: tuple[str, ...], sentence: str):
    result = run_command("storage", *words)
    assert result.returncode == 1, (result.stdout, result.stderr)
    (line,) = result.stderr.strip().splitlines()
    assert sentence in line


def test_a_storage_outside_the_cluster_is_reported(cluster: LocalCluster):
    at = ("--partition", "0")
    assert "expected a storage of this cluster" in run_failing(
        cluster, "storage", "re-seed", *at, "--storage", "no:1"
    )
    assert "expected --storage HOST:PORT in addition to --connect" in run_failing(
        cluster, "storage", "re-seed", *at
    )
    port = next(member.port for member in cluster.members if member.kind == "storage")
    result = run_command("storage", "list", "--admin", f"127.0.0.1:{port}")
    assert "expected the admin port of a storage, found a 'Waltz Storage Server'" in result.stderr


# --- the end


def test_an_unused_cluster_is_deleted(cluster: LocalCluster):
    output = run_failing(cluster, "cluster", "delete", "payments")
    assert "expected local, the name of the cluster at " in output
    assert "found payments" in output
    assert "servers or storages still run:" in run_failing(cluster, "cluster", "delete", "local")
    assert any("cluster delete local" in command for command in audited_commands(cluster))
    for member in cluster.members:
        if member.kind != "zookeeper":
            cluster.kill(member.name)
    wait_until(
        "the servers' ZooKeeper sessions have ended",
        lambda: json_output(cluster, "cluster", "list")[0]["servers"] == 0,
    )
    key = json_output(cluster, "cluster", "show-key")["cluster_key"]
    assert json_output(cluster, "cluster", "delete", "local")["cluster_key"] == key
    assert json_output(cluster, "cluster", "list") == []
    assert "there is no cluster at" in run_failing(cluster, "cluster", "delete", "local", "--force")
