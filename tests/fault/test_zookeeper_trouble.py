"""ZooKeeper loses one server, all its servers or a session, or requires other credentials.

WALTZ_OUTAGE_S is the duration of the outage of all ZooKeeper servers; production should survive 60.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.fault.load import Load, Scenario, show_cluster, wait_until, zookeeper_mode
from tests.fault.port_proxy import PortProxy
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S, machine_slowdown
from waltz_core.client import WaltzClient
from waltz_core.cluster.coordinator import ServersView
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.config import ClientConfig
from waltz_core.errors import BadConfig, CoordinatorUnavailable, WaltzError
from waltz_core.local import LocalCluster, Member, running_cluster

OUTAGE_S = float(os.environ.get("WALTZ_OUTAGE_S", "10"))
# A busy machine delays a process for less than this time. A longer pause means that the process has
# waited for a session.
SESSION_MS = 3_000
# The tests wait for commits while ZooKeeper is unavailable. So these commits show that no append
# waits for ZooKeeper. In addition, no pause between commits may be as long as a session. On a busy
# machine any process pauses, so this limit grows with the load.
GAP_S = SESSION_MS / 1000
SETTINGS: dict[str, dict[str, object]] = {
    kind: {"zookeeper_session_timeout_ms": SESSION_MS} for kind in ("server", "storage")
}


@pytest.fixture(scope="module")
def module_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Give a cluster with an ensemble, with short sessions."""
    directory = tmp_path_factory.mktemp("ensemble")
    with running_cluster(directory, settings=SETTINGS, zookeeper_count=3) as cluster:
        yield Scenario(cluster)


def print_measurement(text: str) -> None:
    """Print a measurement, even if pytest captures standard output."""
    sys.__stderr__.write(f"\n{text}\n") if sys.__stderr__ else None


def servers_view(cluster: LocalCluster) -> ServersView:
    """Read from ZooKeeper the registered processes, and the owners.

    After the election of a leader, an ensemble accepts no session for a while. On a busy machine,
    this period is longer than the time that a client waits.
    """

    async def read() -> ServersView:
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while True:
            try:
                async with open_session(cluster.connect) as coordinator:
                    return await coordinator.read_servers()
            except CoordinatorUnavailable:
                if time.monotonic() > deadline:
                    raise

    return asyncio.run(read())


def owners(cluster: LocalCluster) -> dict[int, tuple[str, int]]:
    """Return server and generation of each partition whose owner is registered."""
    view = servers_view(cluster)
    return {
        int(partition): (view.servers[owner.server_id].address, int(owner.generation))
        for partition, owner in view.owners.items()
    }


def await_spread(cluster: LocalCluster) -> dict[int, tuple[str, int]]:
    """Wait until all servers own partitions, and all partitions have a session; return owners."""
    wait_until(
        "both servers own partitions",
        lambda: len({owner[0] for owner in owners(cluster).values()}) == 2,
    )
    wait_until("healthy", lambda: all(health[0] == 200 for health in healths(cluster).values()))
    return owners(cluster)


def page(member: Member, path: str) -> tuple[int, str]:
    """Return status and text of a page of a daemon."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{member.http_port}{path}", timeout=TEST_TIMEOUT_S
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def healths(cluster: LocalCluster) -> dict[str, tuple[int, dict[str, object]]]:
    """Return status and content of /health of each daemon."""
    found = {}
    for member in cluster.members:
        if member.http_port and member.process() is not None:
            status, text = page(member, "/health")
            found[member.name] = status, json.loads(text)
    return found


def daemons_without_zookeeper(cluster: LocalCluster) -> list[str]:
    """Return the daemons whose health reports only that ZooKeeper is unavailable."""
    return [
        name
        for name, (status, health) in healths(cluster).items()
        if status == 200 and health["zookeeper"] is False
    ]


def gap_s(load: Load, began_s: float, ended_s: float) -> float:
    """Return the longest time without any acknowledgement, over all partitions, in a stretch."""
    reported = sorted(
        each.reported_s for each in load.ledger if began_s <= each.reported_s <= ended_s
    )
    return max(b - a for a, b in pairwise([began_s, *reported, ended_s]))


def test_the_connect_string_of_a_local_cluster_names_all_zookeeper_servers(scenario: Scenario):
    cluster = scenario.cluster
    assert [member.name for member in cluster.zookeepers] == [f"zookeeper-{n}" for n in (1, 2, 3)]
    hosts = ",".join(f"127.0.0.1:{member.port}" for member in cluster.zookeepers)
    assert cluster.connect == f"{hosts}/waltz/local"
    for member in cluster.zookeepers:
        config = (cluster.directory / "conf" / f"{member.name}.cfg").read_text()
        assert config.count("\nserver.") == 3
    wait_until(
        "a leader and two followers",
        lambda: (
            sorted(map(zookeeper_mode, cluster.zookeepers)) == ["follower", "follower", "leader"]
        ),
    )
    # A root may have any depth, and an unavailable host is skipped.
    connect_without_cluster = f"127.0.0.1:1,{hosts}/waltz/of/another/team"
    for words in (("create", "--partitions", "1", "--storage", "127.0.0.1:2:3"), ("show",)):
        result = run_command("cluster", *words, connect_without_cluster)
        assert result.returncode == 0, result.stderr
    assert "waltz  cluster key " in result.stdout


@pytest.mark.slow
def test_the_loss_of_the_leading_zookeeper_server_interrupts_no_append(scenario: Scenario):
    """All sessions lose their connections. If a follower dies, only its sessions do."""
    cluster = scenario.cluster
    before = await_spread(cluster)
    with scenario.load() as load:
        load.await_commits()
        failures_before, began_s = len(load.failure_reasons), time.monotonic()
        lost = next(
            member.name for member in cluster.zookeepers if zookeeper_mode(member) == "leader"
        )
        cluster.kill(lost)
        wait_until(
            "commits for the time of two sessions",
            lambda: time.monotonic() > began_s + 2 * SESSION_MS / 1000,
        )
        assert daemons_without_zookeeper(cluster) == []
        assert owners(cluster) == before
        ended_s = time.monotonic()
        assert load.failure_reasons[failures_before:] == []
    assert gap_s(load, began_s, ended_s) < GAP_S * machine_slowdown()
    cluster.start(lost)
    wait_until(
        "the ZooKeeper server is back",
        lambda: zookeeper_mode(cluster.member(lost)) in ("follower", "leader"),
    )
    scenario.check_outcomes_against_log()


def test_no_append_is_rejected_and_no_partition_moves_while_zookeeper_is_down(
    scenario: Scenario,
):
    cluster = scenario.cluster
    before, moved = await_spread(cluster), moves(cluster)
    with scenario.load() as load, WaltzClient(cluster.connect, PATIENT_CLIENT) as reader:
        load.await_commits()
        failures_before, began_s = len(load.failure_reasons), time.monotonic()
        for member in cluster.zookeepers:
            cluster.kill(member.name)
        assert daemons_without_zookeeper(cluster) == [], (
            "health must not change after a short outage"
        )
        daemons = {member.name for member in cluster.members if member.http_port}
        wait_until(
            "the health pages report the outage",
            lambda: set(daemons_without_zookeeper(cluster)) == daemons,
        )
        while time.monotonic() < began_s + OUTAGE_S:
            load.await_commits()
            for member in cluster.members:
                if member.http_port:
                    assert page(member, "/livez") == (200, "ok\n")
                    assert page(member, "/readyz")[0] == 200
            # A mark that is proven by a quorum's answers, and not by anything in ZooKeeper.
            marks = reader.high_water_marks()
            assert min(marks.values()) >= 0
        for member in cluster.zookeepers:
            cluster.start(member.name)
        wait_until("transaction is a quorum:", lambda: leads(cluster))
        back = time.monotonic()
        wait_until("all daemons are healthy", lambda: not daemons_without_zookeeper(cluster))
        wait_until("as before", lambda: owners(cluster) == before)
        took = time.monotonic() - back
        assert len(servers_view(cluster).servers) == 2
        load.await_commits()
        ended_s = time.monotonic()
        assert load.failure_reasons[failures_before:] == []
        # Sessions that no process has resumed expire. Then no partition may move either. No event
        # shows this, so the test waits.
        wait_until(
            "commits for the time of two sessions",
            lambda: time.monotonic() > ended_s + 2 * SESSION_MS / 1000,
        )
        assert owners(cluster) == before
    gap = gap_s(load, began_s, ended_s)
    print_measurement(
        f"away {OUTAGE_S:.0f} s, longest gap {gap:.3f} s, as before after {took:.2f} s"
    )
    assert gap < GAP_S * machine_slowdown()
    assert moves(cluster) == moved
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_no_partition_moves_when_all_zookeeper_sessions_end(tmp_path: Path):
    """ZooKeeper runs but is unreachable. The sessions of all servers expire; then servers return.

    A killed ZooKeeper would keep the sessions, and a new leader would restart their timeouts.
    """
    cluster = LocalCluster(tmp_path, exit_with_parent=True, storage_count=1, settings=SETTINGS)
    with PortProxy(lambda: cluster.member("zookeeper").port) as gate:
        through = f"127.0.0.1:{gate.port}/waltz/local"
        for each in ("server", "storage"):
            cluster._settings = {**cluster._settings, each: {**SETTINGS[each], "connect": through}}
        try:
            cluster.up()
            before, moved = await_spread(cluster), moves(cluster)
            scenario = Scenario(cluster)
            with scenario.load() as load:
                load.await_commits()
                failures_before, began_s = len(load.failure_reasons), time.monotonic()
                gate.close()
                wait_until(
                    "the ZooKeeper sessions have ended", lambda: not servers_view(cluster).servers
                )
                load.await_commits()
                gate.open()
                back = time.monotonic()
                wait_until("as before", lambda: is_as_before(cluster, before))
                took = time.monotonic() - back
                load.await_commits()
                ended_s = time.monotonic()
                assert load.failure_reasons[failures_before:] == []
            gap = gap_s(load, began_s, ended_s)
            print_measurement(
                f"all sessions over, longest gap {gap:.3f} s, as before after {took:.2f} s"
            )
            assert moves(cluster) == moved
            assert gap < GAP_S * machine_slowdown()
            scenario.check_outcomes_against_log()
        finally:
            cluster.down()


def is_as_before(cluster: LocalCluster, before: dict[int, tuple[str, int]]) -> bool:
    """Return whether all servers are registered and own the same partitions as before."""
    return owners(cluster) == before and servers_view(cluster).is_settled


def leads(cluster: LocalCluster) -> bool:
    """Return whether a node of ZooKeeper is the leader, which implies that it serves."""
    return "leader" in [zookeeper_mode(member) for member in cluster.zookeepers]


def moves(cluster: LocalCluster) -> int:
    """Return how often a server has logged that a partition moved away."""
    names = [member.name for member in cluster.members if member.kind == "server"]
    logs = [cluster.log_path(name).read_text(encoding="utf-8") for name in names]
    return sum(log.count("partition.moved_away") for log in logs)


@pytest.mark.slow
def test_a_server_that_dies_in_a_zookeeper_outage_is_replaced_afterwards(
    scenario: Scenario,
):
    cluster = scenario.cluster
    await_spread(cluster)
    with scenario.load() as load:
        load.await_commits()
        lost = cluster.zookeepers[:2]  # the third server alone is no quorum
        for member in lost:
            cluster.kill(member.name)
        cluster.kill("server-2")
        dead = f"127.0.0.1:{cluster.member('server-2').port}"
        for member in lost:
            cluster.start(member.name)
        wait_until("transaction is a quorum:", lambda: leads(cluster))
        wait_until(
            "the other server owns all partitions",
            lambda: dead not in {owner[0] for owner in owners(cluster).values()},
        )
        load.await_commits()
        cluster.start("server-2")
        await_spread(cluster)
        load.await_commits()
    scenario.check_outcomes_against_log()


# --- authentication


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    """Return an auth file."""
    path = tmp_path / "zookeeper.auth"
    path.write_text("digest:waltz:a long password\n")
    path.chmod(0o600)
    return path


def error_of(*words: str) -> str:
    """Return the one line that a command prints before it fails."""
    result = run_command(*words)
    assert result.returncode != 0, result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_a_protected_cluster_rejects_other_zookeeper_users(
    tmp_path: Path,
    auth_file: Path,
    cluster_of: Callable,  # type: ignore[type-arg]
):
    options = {
        "storage_count": 1,
        "server_count": 1,
        "partition_count": 1,
        "exit_with_parent": True,
    }
    cluster = cluster_of(LocalCluster(tmp_path / "c", **options))
    open_connect = cluster.up()
    with WaltzClient(open_connect, PATIENT_CLIENT) as client:
        client.append(b"open", partition=0).result(TEST_TIMEOUT_S)
    # As in docs/zookeeper.md: first, all processes authenticate, and still create open nodes.
    auth_file.write_text("digest:waltz:a long password\nworld:anyone:cdrwa\n")
    connect = f"{open_connect}?auth={auth_file}"
    cluster._load_state().auth_file = str(auth_file)
    for name in ("storage-1", "server-1"):
        cluster.kill(name, signal.SIGTERM)
        cluster.start(name)
    for each in (open_connect, connect):
        wait_until("both may", lambda each=each: mark(each) == 0)
    auth_file.write_text("digest:waltz:a long password\n")
    cluster.kill("server-1", signal.SIGTERM)
    cluster.start("server-1")
    wait_until("the server is back", lambda: mark(connect) == 0)
    assert "restricted the access to " in run_command("cluster", "protect", connect).stderr
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        client.append(b"closed", partition=0).result(TEST_TIMEOUT_S)
        assert client.high_water_marks() == {0: 1}
    assert cluster.connect == connect
    assert "engaged" in str(show_cluster(cluster)["partitions"])
    check_other_users_are_rejected(tmp_path, open_connect)
    # No process shows the password.
    for member in cluster.members:
        process = member.process()
        assert process is not None
        assert "a long password" not in " ".join(process.cmdline())


def check_other_users_are_rejected(tmp_path: Path, connect: str) -> None:
    """Try a client without credentials, with other credentials, and with a missing file."""
    unreachable = error_of("cluster", "show", connect)
    assert "requires authentication for /waltz/local:" in unreachable
    assert "?auth=FILE" in unreachable
    wrong = tmp_path / "wrong.auth"
    wrong.write_text("digest:waltz:another password\n")
    other = error_of("cluster", "show", f"{connect}?auth={wrong}")
    assert "denies access to /waltz/local:" in other
    assert "the user 'waltz' in" in other
    assert "another password\n" not in other.replace("with another password", "")
    with pytest.raises(BadConfig, match="requires authentication"):
        WaltzClient(connect, PATIENT_CLIENT)
    missing = error_of("cluster", "show", f"{connect}?auth={tmp_path}/none")
    assert "cannot be read: No such file" in missing


def mark(connect: str) -> int | None:
    """Return the mark of partition 0, None while no server answers."""
    try:
        with WaltzClient(connect, ClientConfig(zookeeper_connect_timeout_ms=3_000)) as client:
            return int(client.high_water_marks()[0])
    except WaltzError:
        return None
