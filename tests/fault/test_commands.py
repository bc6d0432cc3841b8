"""Each command of `docs/commands.md` that no other test gives, against one cluster of processes.

The tests go on from one another: the last ones stop the cluster and delete it.
"""

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
from typing import Any, NamedTuple

import pytest

from tests.fault.changing import address
from tests.fault.load import command, wait_until
from tests.patience import HANG_S
from waltz_core.cli.main import main
from waltz_core.local import LocalCluster, running

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    where = tmp_path_factory.mktemp("commands") / "waltz"
    with running(where, server_count=2, partition_count=2) as found:
        hosts = found.connect.partition("/")[0]
        # It is up when all partitions answer, which one server may own alone at first.
        wait_until(
            "both are there", lambda: done(found, "cluster", "list", hosts)[0]["servers"] == 2
        )
        yield found


class Ran(NamedTuple):
    """What a command has said."""

    code: int
    out: str
    error: str


def ran(cluster: LocalCluster, *words: str) -> Ran:
    """Give a command in this process: most of the time of a new one is its start."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALTZ_CONNECT", cluster.connect)
        patch.setattr(sys, "argv", ["waltz-core", *words])  # as the record has it
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main()
    return Ran(code, out.getvalue(), error.getvalue())


def done(cluster: LocalCluster, *words: str) -> Any:
    """Give a command with `--json` that must succeed; return what it says."""
    found = ran(cluster, *words, "--json")
    assert found.code == 0, found
    return json.loads(found.out)


def refused(cluster: LocalCluster, *words: str) -> str:
    """Give a command that must fail; return its one sentence."""
    found = ran(cluster, *words)
    assert (found.code, found.out) == (1, ""), found
    *_, sentence = found.error.strip().splitlines()
    assert sentence.startswith("waltz-core: ")
    return sentence


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """Give a terminal to write to, and what stands there so far."""
    ours, theirs = pty.openpty()
    output: list[str] = []

    def read() -> None:
        with contextlib.suppress(
            OSError
        ):  # Linux's way to say that no process has it open any more.
            while chunk := os.read(ours, 4096):
                output.append(chunk.decode())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, output
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def test_a_cluster_is_listed_and_reports_its_key(cluster: LocalCluster):
    hosts, _, root = cluster.connect.partition("/")
    (listed,) = done(cluster, "cluster", "list", hosts)
    assert (listed["root"], listed["name"], listed["partitions"]) == (f"/{root}", "local", 2)
    assert (listed["servers"], listed["storages"]) == (2, 3)
    assert done(cluster, "cluster", "show-key") == {"cluster_key": listed["key"]}
    assert done(cluster, "cluster", "list", f"{hosts}/nothing/here") == []


def test_the_log_is_valid_and_followed(cluster: LocalCluster):
    words = ("--clients", "3", "--transactions", "10", "--partitions", "2")
    found = done(cluster, "client", "validate", *words)
    assert (found["is_valid"], found["written"], found["checked"]) == (True, 30, 90)
    first, last = found["ids"]["0"]
    assert done(cluster, "client", "high-water-mark", "--partition", "0") == {"0": last}
    made = done(cluster, "client", "create-producer", "--transactions", "3")
    assert made["ids"] == {"0": [last + 1, last + 3]}
    words = ("--first", str(first), "--transactions", str(last + 3 - first + 1))
    assert done(cluster, "client", "create-consumer", *words)["is_valid"]
    watched = ran(cluster, "client", "watch", "--first", str(last), "--transactions", "2")
    assert watched.out == f"{last}\t0\t{last}\n{last + 1}\t0\t{last + 1}\n"
    assert ran(cluster, "client", "watch", "--partition", "9").code == 1


def test_servers_report_what_they_own_and_reach(cluster: LocalCluster):
    one, other = (address(cluster, f"server-{each}") for each in (1, 2))
    output = done(cluster, "server", "add-preferred-partition", "all", one)
    assert output["owns"] == [0, 1]
    listed = {each["address"]: each for each in done(cluster, "server", "list")["servers"]}
    assert listed[one]["preferred"] == listed[one]["partitions"] == [0, 1]
    assert listed[other]["partitions"] == []
    done(cluster, "server", "remove-preferred-partition", "0-1", one)
    is_healthy = lambda: ran(cluster, "server", "list").code == 0  # noqa: E731
    wait_until("the servers are well", is_healthy)
    # A cluster takes appends when a quorum of its storages runs.
    reaches_all = lambda: ran(cluster, "cluster", "check-connectivity").code == 0  # noqa: E731
    wait_until("all storages run", reaches_all)
    reach = done(cluster, "cluster", "check-connectivity")
    assert reach["is_healthy"]
    assert len(reach["connections"]) == 2 * (1 + 3)
    where = f"127.0.0.1:{cluster.member('storage-1').http_port}"
    match = ("--match", "waltz_storage_last_transaction")
    assert done(cluster, "storage", "metrics", where, *match).keys() >= {
        'waltz_storage_last_transaction{partition="0"}'
    }


def test_an_error_of_one_partition_is_reported_for_that_one(cluster: LocalCluster):
    wait_until("all is well", lambda: ran(cluster, "cluster", "verify").code == 0)
    found = done(cluster, "cluster", "verify", "--by-partition")
    assert found["passed"]
    assert all(all(checks.values()) for checks in found["partitions"].values())
    storage = address(cluster, "storage-2")
    at = ("--storage", storage, "--partition", "1")
    done(cluster, "storage", "availability", *at, "--online", "false")
    failed = ran(cluster, "cluster", "verify", "--by-partition", "--json")
    assert failed.code == 1
    found = json.loads(failed.out)
    assert all(found["partitions"]["0"].values())
    assert not found["partitions"]["1"]["storage"]
    (repair,) = [each for each in found["findings"] if "has it offline" in each]
    words = repair.split("`")[1].split()[1:]
    assert ran(cluster, *words).code == 0
    wait_until("all is well", lambda: ran(cluster, "cluster", "verify").code == 0)


def test_a_scrub_shows_at_a_terminal_how_far_it_is(cluster: LocalCluster):
    at = ("--storage", address(cluster, "storage-1"), "--partition", "0-1")
    line = command("storage", "scrub", *at, "--connect", cluster.connect)
    with terminal() as (screen, output):
        cluster.kill("storage-1", signal.SIGSTOP)  # so that it takes longer than a second
        try:
            started = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=screen, text=True)
            wait_until("the line is shown", lambda: "to answer" in "".join(output))
        finally:
            cluster.kill("storage-1", signal.SIGCONT)
        table, _ = started.communicate(timeout=HANG_S)
    assert started.returncode == 0
    shown = "".join(output)
    assert "0 of 2 waiting for " in shown
    assert shown.rpartition("waiting for ")[2].count("\x1b[2K"), "the line is gone at the end"
    assert "\x1b" not in table
    assert table.split()[:4] == ["partition", "next", "id", "last"]
    rows = done(cluster, "storage", "scrub", *at, "--status")["partitions"]
    assert [(row["damaged"], row["error"], row["passes"] > 0) for row in rows] == [
        (0, None, True)
    ] * 2


def test_a_scrub_of_a_storage_that_has_gone_silent_ends(cluster: LocalCluster):
    storage = address(cluster, "storage-1")
    cluster.kill("storage-1", signal.SIGSTOP)
    try:
        words = ("--storage", storage, "--partition", "0-1", "--timeout-s", "1")
        output = refused(cluster, "storage", "scrub", *words)
    finally:
        cluster.kill("storage-1", signal.SIGCONT)
    assert f"not done within 1 s, still waiting: {storage} to answer." in output


def test_a_running_cluster_can_be_measured(cluster: LocalCluster):
    at = ("--connect", cluster.connect, "--json")
    load = ("--seconds", "1", "--writers", "8", "--lock-pool", "2", "--interval-ms", "1")
    found = json.loads(ran(cluster, "bench", "test-producers", *load, *at).out)
    assert found["rows"] > 0
    assert found["lost"] == found["doubled"] == 0
    assert found["extra"]["rejected"] > 0, "eight writers never met on two locks"
    found = json.loads(ran(cluster, "bench", "test-consumers", "--rows", "100", *at).out)
    assert found["rows"] >= 100
    assert found["lost"] == found["doubled"] == 0


def test_an_unused_cluster_is_deleted(cluster: LocalCluster):
    assert "the name of the cluster at " in refused(cluster, "cluster", "delete", "payments")
    assert "expected all servers and storages to be stopped" in refused(
        cluster, "cluster", "delete", "local"
    )
    outcomes = {each["command"]: each["outcome"] for each in done(cluster, "cluster", "audit")}
    assert sum("availability" in what for what in outcomes) == 2
    assert any("cluster delete local" in what for what in outcomes)
    for member in cluster.members:
        if member.kind != "zookeeper":
            cluster.kill(member.name)
    wait_until(
        "ZooKeeper has let the servers go",
        lambda: done(cluster, "cluster", "list")[0]["servers"] == 0,
    )
    key = done(cluster, "cluster", "show-key")["cluster_key"]
    assert done(cluster, "cluster", "delete", "local")["cluster_key"] == key
    assert done(cluster, "cluster", "list") == []
    assert "there is nothing at" in refused(cluster, "cluster", "delete", "local", "--force")
