"""A server that other servers cannot reach, or that hangs, is frozen, or was restarted.

The partitions of this server move, the doctor reports the reason, and a fenced attempt stays
fenced.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.certificates import create_certificates
from tests.commands import run_command
from tests.fault.child import ChildProcess
from tests.fault.cluster_commands import member_address
from tests.fault.load import PROJECT_ROOT, Scenario, owner_addresses, show_partitions, wait_until
from tests.fault.port_proxy import PortProxy
from tests.ports import free_port
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import ClusterLayout, TaskClaim, WaltzClient, begin_write, end_write
from waltz_core.config import ClientConfig, render_toml
from waltz_core.errors import ConnectionSuperseded
from waltz_core.local import LocalCluster, running_cluster

pytestmark = pytest.mark.fault
STORAGE_COUNT = 1
# A session timeout that is longer than any step in this file.
REQUEST_MS = 600_000
KEEP_MS = 1 << 34
SERVERS = ("server-1", "server-2")


class Server(ChildProcess):
    """A server in addition to those of the cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        settings: dict[str, object],
        program: Sequence[str] = ("-m", "waltz_core", "server", "run", "--config"),
    ) -> None:
        values = {"connect": cluster.connect, "zookeeper_session_timeout_ms": 1_500} | settings
        values = {"listen_host": "127.0.0.1", "advertised_host": "127.0.0.1"} | values
        config, self._log = folder / "server.toml", folder / "server.log"
        config.write_text(render_toml("server", values))
        with self._log.open("w") as log:
            self.run([sys.executable, *program, str(config)], log)

    def is_ready(self) -> bool:
        """Return whether it is registered."""
        assert self.process.poll() is None, self._log.read_text()
        return "server ready" in self._log.read_text()


def doctor(cluster: LocalCluster) -> str:
    """Return the doctor's output."""
    words = ("doctor", "--connect", cluster.connect, "--directory", "nowhere")
    return run_command(*words).stdout


@pytest.mark.slow
def test_a_server_with_an_untrusted_certificate_gets_no_partitions(tmp_path: Path):
    trusted, other = (create_certificates(tmp_path, name=name) for name in ("trusted", "other"))
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", trusted.settings))
    with running_cluster(
        tmp_path / "cluster", tls=file, storage_count=1, server_count=1
    ) as cluster:
        scenario = Scenario(cluster)
        before = owner_addresses(cluster)
        port = free_port()
        shows = {"tls_certificate": other.certificate, "tls_key": other.key}
        server = Server(cluster, tmp_path, {"port": port, "tls": "on", **shows})
        try:
            with scenario.load() as load:
                wait_until("the server is registered", server.is_ready)
                expected = (
                    "the certificate of the peer is not valid",
                    f"server 127.0.0.1:{port} gets no partitions, because",
                )

                def names_reason() -> bool:
                    output = doctor(cluster)
                    return all(each in output for each in expected)

                wait_until("the doctor reports the reason", names_reason)
                assert owner_addresses(cluster) == before
                load.await_commits()
        finally:
            server.kill()
        assert {each.outcome for each in scenario.ledger} <= {"committed", "rejected"}
        scenario.check_outcomes_against_log()


def test_a_running_server_that_becomes_unreachable_loses_its_partitions(
    scenario: Scenario, tmp_path: Path
):
    port = free_port()
    with PortProxy(lambda: port) as gate:
        wait_until(
            "both servers own partitions", lambda: len(owner_addresses(scenario.cluster)) == 2
        )
        gated, others = f"127.0.0.1:{gate.port}", owner_addresses(scenario.cluster)
        settings = {"port": port, "advertised_port": gate.port}
        server = Server(scenario.cluster, tmp_path, settings)
        try:
            with scenario.load() as load:
                wait_until(
                    "the server owns partitions", lambda: gated in owner_addresses(scenario.cluster)
                )
                load.await_commits()
                gate.close()
                wait_until(
                    "the server owns no partition",
                    lambda: owner_addresses(scenario.cluster) == others,
                )
                load.await_commits()
                wait_until(
                    "the doctor reports it", lambda: "no partitions" in doctor(scenario.cluster)
                )
                assert server.is_ready()
                gate.open()
                wait_until(
                    "the server owns partitions again",
                    lambda: gated in owner_addresses(scenario.cluster),
                )
                load.await_commits()
        finally:
            server.kill()
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_a_server_cut_off_from_other_servers_owns_no_partition_after_all_storages_restart(
    scenario: Scenario, tmp_path: Path
):
    cluster = scenario.cluster
    wait_until("both servers own partitions", lambda: len(owner_addresses(cluster)) == 2)
    others = owner_addresses(cluster)
    settings = {"port": free_port(), "advertised_port": free_port()}
    server = Server(cluster, tmp_path, settings, ("-m", "tests.fault.firewalled_server"))
    try:
        wait_until("the server is registered", server.is_ready)
        with scenario.load() as load:
            load.await_commits()
            for _ in range(2):
                cluster.kill("storage-1")
                cluster.start("storage-1")
                load.await_commits()
                # While no partition was open, the leader may have assigned partitions to this
                # server.
                wait_until(
                    "the other servers own all partitions",
                    lambda: owner_addresses(cluster) == others,
                )
                load.await_commits()
    finally:
        server.kill()
    scenario.check_outcomes_against_log()


# --- a server hangs, and another one is frozen


class HangingServer(ChildProcess):
    """server-1, as a process that can hang."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        config = scenario.cluster.directory / "conf" / "server-1.toml"
        self._log = folder / "log"
        self._while = folder / "while"
        words = [str(self._while), str(config)]
        with self._log.open("w") as log:
            self.run(
                [sys.executable, "-m", "tests.fault.hanging_server", *words], log, PROJECT_ROOT
            )

    def hang(self) -> None:
        """Hang until `resume`."""
        self._while.touch()
        self.process.send_signal(signal.SIGUSR1)

    def resume(self) -> None:
        """Let the event loop run again."""
        self._while.unlink()

    def log_text(self) -> str:
        """Return its log."""
        return self._log.read_text(encoding="utf-8")


@pytest.fixture
def hanging_server(scenario: Scenario, tmp_path: Path) -> Iterator[HangingServer]:
    """Run server-1 in a process that can hang."""
    scenario.cluster.kill("server-1", signal.SIGTERM)
    server = HangingServer(scenario, tmp_path)
    try:
        wait_until(
            "both servers own partitions", lambda: len(owner_addresses(scenario.cluster)) == 2
        )
        yield server
    finally:
        server.kill()


def test_partitions_of_a_hanging_server_move_and_the_server_rejoins(
    scenario: Scenario, hanging_server: HangingServer
):
    with scenario.load() as load:
        load.await_commits()
        hanging_server.hang()
        other = {member_address(scenario.cluster, "server-2")}
        wait_until(
            "the other server owns all partitions",
            lambda: owner_addresses(scenario.cluster) == other,
        )
        load.await_commits()
        assert "process.event_loop_unresponsive" in hanging_server.log_text()
        hanging_server.resume()
        wait_until(
            "both servers own partitions again", lambda: len(owner_addresses(scenario.cluster)) == 2
        )
        load.await_commits()
    assert "process.event_loop_responsive" in hanging_server.log_text()
    assert hanging_server.process.poll() is None
    scenario.check_outcomes_against_log()


def owned_by(scenario: Scenario, name: str) -> list[int]:
    """Return the partitions that a server owns."""
    address = member_address(scenario.cluster, name)
    found = show_partitions(scenario.cluster).items()
    return [number for number, finding in found if finding["server"] == address]


def test_a_client_without_watches_notices_that_its_server_is_frozen(scenario: Scenario):
    """The client is like a Spark task: it has the cluster's layout, but no ZooKeeper session."""
    owned: list[int] = []
    wait_until(
        "the server owns partitions", lambda: owned.extend(owned_by(scenario, "server-1")) or owned
    )
    with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as watching:
        layout = watching.layout()
    number = owned[0]
    with (
        WaltzClient.at(layout, ClientConfig(request_timeout_ms=REQUEST_MS)) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        first = client.append(scenario.row(number), partition=number).result(TEST_TIMEOUT_S)
        scenario.cluster.kill("server-1", signal.SIGSTOP)
        try:
            appended = client.append(scenario.row(number), partition=number)
            mark_request = threads.submit(client.high_water_mark, number)
            read = threads.submit(lambda: list(client.read_range(number, first, first)))
            assert appended.result(TEST_TIMEOUT_S) == first + 1
            assert mark_request.result(TEST_TIMEOUT_S) >= first
            assert [len(chunk.lengths) for chunk in read.result(TEST_TIMEOUT_S)] == [1]
        finally:
            scenario.cluster.kill("server-1", signal.SIGCONT)
    scenario.check_replicas_equal()


# --- servers that lose their mounts


def layout_of(connect: str) -> ClusterLayout:
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        return client.layout()


def begin_attempt(scenario: Scenario, write: str, run: str) -> WaltzClient:
    """Begin an attempt at task 0 of a write."""
    connect = scenario.cluster.connect
    return WaltzClient.at(layout_of(connect), claim=TaskClaim(connect, write, 0, run=run))


def restart_servers(scenario: Scenario) -> None:
    for name in SERVERS:
        scenario.cluster.kill(name, signal.SIGKILL)
    for name in SERVERS:
        scenario.cluster.start(name)


def begin(scenario: Scenario, write: str) -> None:
    asyncio.run(begin_write(scenario.cluster.connect, write, {}, keep_ms=KEEP_MS))


def records_with(scenario: Scenario, data: bytes) -> int:
    found = 0
    with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as client:
        for partition, last in client.high_water_marks(linearizable=True).items():
            for chunk in client.read_range(partition, 0, last) if last >= 0 else ():
                found += bytes(chunk.records).count(data)
    return found


def test_a_newer_attempt_ends_an_older_attempt_although_the_servers_restart(
    scenario: Scenario,
) -> None:
    begin(scenario, "claim-1")
    with begin_attempt(scenario, "claim-1", "a") as old:
        first_of_old, late_of_old, first_of_new = (scenario.row(0) for _ in range(3))
        old.append(first_of_old, partition=0).result(TEST_TIMEOUT_S)
        with begin_attempt(scenario, "claim-1", "a") as new:
            new.mount([0])
            restart_servers(scenario)
            with pytest.raises(ConnectionSuperseded):
                old.append(late_of_old, partition=0).result(TEST_TIMEOUT_S)
            new.append(first_of_new, partition=0).result(TEST_TIMEOUT_S)
    assert records_with(scenario, first_of_old) == records_with(scenario, first_of_new) == 1
    assert records_with(scenario, late_of_old) == 0


def test_a_finished_write_ends_its_attempts_although_the_servers_restart(
    scenario: Scenario,
) -> None:
    begin(scenario, "claim-2")
    connect = scenario.cluster.connect
    with begin_attempt(scenario, "claim-2", "a") as straggler:
        in_time, too_late = scenario.row(1), scenario.row(1)
        straggler.append(in_time, partition=1).result(TEST_TIMEOUT_S)
        asyncio.run(end_write(connect, "claim-2", {}, keep_ms=KEEP_MS))
        restart_servers(scenario)
        with pytest.raises(ConnectionSuperseded):
            straggler.append(too_late, partition=1).result(TEST_TIMEOUT_S)
    assert records_with(scenario, in_time) == 1
    assert records_with(scenario, too_late) == 0


@contextlib.contextmanager
def server_down(scenario: Scenario, name: str) -> Iterator[None]:
    scenario.cluster.kill(name, signal.SIGKILL)
    try:
        yield
    finally:
        scenario.cluster.start(name)


def test_a_write_begins_continues_and_finishes_while_servers_are_killed(scenario: Scenario) -> None:
    """Any live server can carry out the operations on the registry of writes."""
    connect, row = scenario.cluster.connect, scenario.row(2)
    with server_down(scenario, "server-1"):
        begin(scenario, "claim-3")
    with server_down(scenario, "server-2"), begin_attempt(scenario, "claim-3", "a") as writer:
        writer.append(row, partition=2).result(TEST_TIMEOUT_S)
    with server_down(scenario, "server-1"):
        end_of_write = end_write(connect, "claim-3", {"rows": 1}, keep_ms=KEEP_MS)
        assert asyncio.run(end_of_write) == {"rows": 1}
    claim = TaskClaim(connect, "claim-3", 0, run="b")
    with WaltzClient.at(layout_of(connect), claim=claim):
        assert claim.is_done
    assert records_with(scenario, row) == 1
