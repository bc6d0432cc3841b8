"""Recovery by command: lost ZooKeeper data, a disk that lost writes, suspect or lost replicas.

The tests build on one another: each test leaves a cluster that accepts appends.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.fault.cluster_commands import (
    assigned_replicas,
    check_replicas_equal,
    finish_command,
    member_address,
    run_failing,
    run_successful,
    start_command,
)
from tests.fault.conftest import SESSION_MS
from tests.fault.load import (
    Scenario,
    are_all_replicas_engaged,
    paused_process,
    start_zookeeper,
    wait_until,
)
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.local import Member, running_cluster
from waltz_core.local.ports import is_free

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")
DIES_AT_THE_MARK = """
import os, signal, sys
from waltz_core.cli import main
from waltz_core.cli.storage import owner_connection

async def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

owner_connection.OwnerConnection.set_low_water_mark = die
main.main(sys.argv[1:])
"""
CLOCK_OF_2020 = """
import sys
from waltz_core.cli import main
from waltz_core.cluster.change import rebuilding

rebuilding.first_id_after_loss = lambda _: 1
main.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def module_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Give a cluster whose storages do not trust their logs after a crash."""
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS},
        "storage": {"zookeeper_session_timeout_ms": SESSION_MS, "trust_fsync": False},
    }
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield Scenario(cluster)


def test_an_empty_zookeeper_is_rebuilt_from_the_storages(scenario: Scenario):
    cluster = scenario.cluster
    for _ in range(3):
        with scenario.load() as load:
            load.await_commits(100)
            last_client_id = load.client_id
    for member in reversed(cluster.members):
        cluster.kill(member.name, signal.SIGTERM)
    shutil.rmtree(cluster.directory / "zookeeper" / "version-2")
    start_zookeeper(cluster)
    named = []
    for name in STORAGES:
        member = cluster.member(name)
        named += ["--storage", f"127.0.0.1:{member.port}:{member.admin_port}"]
    directory = str(cluster.directory / "storage-2")
    rebuild = ("rebuild-metadata", *named, "--from-directory", directory)
    # If the command reaches its time limit, it reports the reason for its wait, and another run can
    # continue. The clock of the command that creates the znodes is set back.
    words = ("cluster", *rebuild, "--connect", cluster.connect, "--timeout-s")
    line = [sys.executable, "-c", CLOCK_OF_2020, *words]
    limits_s = (3 << doublings for doublings in range(8))  # until one is long enough
    reported = (
        subprocess.run([*line, str(each)], check=False, capture_output=True, text=True).stderr
        for each in limits_s
    )
    waited = next(each for each in reported if member_address(cluster, "storage-1") in each)
    assert "Hint: start these storages; name a storage with --missing" in waited
    command = start_command(cluster, *rebuild)
    for name in (*STORAGES, "server-1", "server-2"):
        cluster.start(name)
    result = finish_command(command)
    assert result.code == 0, result
    assert len(result.result["partitions"]) == cluster.partition_count
    with scenario.load() as load:
        load.await_commits()
        assert load.client_id > last_client_id
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()
    scenario.check_replicas_equal()
    assert "there is nothing to rebuild" in run_failing(cluster, *rebuild)


@pytest.mark.slow
def test_a_storage_whose_disk_lost_synced_data_does_not_count_towards_the_quorum(
    scenario: Scenario, tmp_path: Path
):
    """Within a session, the disk returns to the state in which it stopped syncing.

    Another replica is down. If the replica on this disk counted, it would be half of the quorum for
    the decision, and acknowledged rows would be lost.
    """
    cluster = scenario.cluster
    lying, absent = cluster.member("storage-3"), cluster.member("storage-1")
    with scenario.load() as load:
        load.await_commits()
    wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(cluster))
    with paused_process(cluster, lying.name):
        shutil.copytree(cluster.directory / lying.name, tmp_path / "synced")
    with scenario.load() as load:
        load.await_commits()
    for name in ("server-1", "server-2", lying.name):
        cluster.kill(name)
    cluster.kill(absent.name, signal.SIGTERM)  # After a kill, it could not trust its log either.
    shutil.rmtree(cluster.directory / lying.name)
    shutil.copytree(tmp_path / "synced", cluster.directory / lying.name)
    reported = unknown_replicas(scenario, lying)
    for name in (lying.name, "server-1", "server-2"):
        cluster.start(name)
    wait_until(
        "the replica is trusted in no partition",
        lambda: (
            len(partitions_in(unknown_replicas(scenario, lying) - reported))
            == cluster.partition_count
        ),
    )
    assert has_no_open_partition(scenario)
    cluster.start(absent.name)
    with scenario.load() as load:
        load.await_commits()
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()
    scenario.check_replicas_equal()


def unknown_replicas(scenario: Scenario, member: Member) -> set[str]:
    """Return the servers' lines about a storage that is not trusted."""
    address = f"127.0.0.1:{member.port}"
    lines: set[str] = set()
    for server in ("server-1", "server-2"):
        text = scenario.cluster.log_path(server).read_text(encoding="utf-8")
        lines |= {
            line for line in text.splitlines() if "replica.untrusted" in line and address in line
        }
    return lines


def partitions_in(lines: set[str]) -> set[str]:
    """Return the partitions of log lines; each new session of a partition writes a line."""
    return {found[0] for line in lines if (found := re.search(r" partition=\d+", line))}


@pytest.mark.slow
def test_command_accept_replicas_opens_partitions_whose_replicas_are_all_suspect(
    scenario: Scenario,
):
    cluster = scenario.cluster
    with scenario.load() as load:
        load.await_commits()
    for name in STORAGES:
        cluster.member(name).process().send_signal(signal.SIGKILL)
    for name in STORAGES:
        cluster.kill(name)
    for name in STORAGES:
        cluster.start(name)
    # While the storages start, no partition is open either, so the test waits for them first.
    ports = [cluster.member(name).admin_port for name in STORAGES]
    wait_until("all answer", lambda: not any(is_free(port, cluster.host) for port in ports))
    wait_until("no partition is open", lambda: has_no_open_partition(scenario))
    shown = run_successful(cluster, "accept-replicas", "0")
    assert all(replica["is_suspect"] for replica in shown["replicas"].values())
    assert has_no_open_partition(scenario), "without --yes, the command has changed a partition"
    # If the command is killed after its write to ZooKeeper and before the replica is changed, no
    # partition opens, and the command can be repeated.
    words = ("cluster", "accept-replicas", "0", "--yes", "--connect", cluster.connect)
    killed = subprocess.run([sys.executable, "-c", DIES_AT_THE_MARK, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert has_no_open_partition(scenario), "a command that did not finish has opened the partition"
    for partition in range(cluster.partition_count):
        result = run_successful(cluster, "accept-replicas", str(partition), "--yes")
        assert result["chosen"] in result["replicas"]
    with scenario.load() as load:
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def has_no_open_partition(scenario: Scenario) -> bool:
    """Return whether `verify` finds no partition open."""
    result = run_command("cluster", "verify", "--connect", scenario.cluster.connect, "--json")
    closed = (
        "has no open store session with a quorum of its replicas",
        "does not answer requests for it",
    )
    sentences = [
        finding
        for finding in json.loads(result.stdout)["findings"]
        if any(one in finding for one in closed)
    ]
    return len(sentences) == scenario.cluster.partition_count


def test_a_cluster_recovers_from_its_last_disk_with_accept_replicas_and_replace_storage(
    scenario: Scenario,
):
    cluster = scenario.cluster
    last, lost, other = (member_address(cluster, name) for name in STORAGES)
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        marks = client.high_water_marks()
    for name in STORAGES[1:]:
        cluster.kill(name)
        shutil.rmtree(cluster.directory / name)
    shown = run_successful(cluster, "accept-replicas", "0")
    assert shown["accepted"] is False
    assert shown["chosen"] == last
    assert set(shown["unanswered"]) == {lost, other}
    assert shown["replicas"][last]["synced_max"] == marks[0]
    assert assigned_replicas(cluster)[0] == {last, lost, other}
    partitions = range(cluster.partition_count)
    for partition in partitions:
        run_successful(cluster, "accept-replicas", str(partition), "--yes")
    assert assigned_replicas(cluster) == {each: {last} for each in partitions}
    with scenario.load() as load:
        load.await_commits()
        replace = ("replace-storage", lost, lost)
        waited = run_failing(cluster, *replace, "--timeout-s", "2")
        assert f"the start of an empty storage at {lost}, which then gets" in waited
        cluster.start("storage-2")
        run_successful(cluster, *replace)
        run_successful(cluster, "remove-storage", other)
        run_successful(cluster, "auto-assign", "--replicas", "2")
        load.await_commits()
    assert assigned_replicas(cluster) == {each: {last, lost} for each in partitions}
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()
