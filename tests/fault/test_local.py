"""`waltz-core local`: its commands, and what happens when processes or files are lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.fault.load import wait_until, waltz_command
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S, machine_slowdown
from waltz_core.client import WaltzClient
from waltz_core.errors import Unreachable
from waltz_core.local import LocalCluster, Member, cluster, ports
from waltz_core.local.local_cluster import LOOPBACK, process_start_s
from waltz_core.local.ports import is_free
from waltz_core.local.zookeeper_process import zookeeper_config

pytestmark = pytest.mark.fault
# `WALTZ_LOCAL_CYCLES=20` is the long version.
CYCLES = int(os.environ.get("WALTZ_LOCAL_CYCLES", "2"))
# A small cluster, for speed: the kinds of processes are the same.
THREE_STORAGES = ("--storages", "3", "--servers", "1", "--partitions", "2")
ONE_STORAGE = ("--storages", "1", "--servers", "1", "--partitions", "2")


def local(directory: Path, subcommand: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        waltz_command("local", subcommand, "--directory", str(directory), *words),
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )


def up(directory: Path, *words: str) -> str:
    result = local(directory, "up", *(words or ONE_STORAGE))
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def status(directory: Path) -> dict[str, dict[str, object]]:
    document = json.loads(local(directory, "status", "--json").stdout)
    return {member["name"]: member for member in document["members"]}


def listening(pids: list[int]) -> set[str]:
    """Return the addresses at which processes listen."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for pid in pids
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def pids_at(directory: Path) -> list[int]:
    """Return every process that has the directory in its command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if is_alive and any(str(directory) in word for word in words):
            found.append(process.pid)
    return sorted(found)


def rejection_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one-line error message of a command that has failed."""
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    (sentence,) = result.stderr.strip().splitlines()
    return sentence


def occupy(port: int) -> socket.socket:
    """Return a socket that listens at a port, like another program."""
    return socket.create_server(("127.0.0.1", port))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory with a non-ASCII name; at the end, end all processes that still use it."""
    path = tmp_path / "ümlaut 馬"
    yield path
    if (path / "cluster.json").exists():
        LocalCluster(path).down()
    assert pids_at(path) == []


def kill_everything(directory: Path) -> list[int]:
    ports = []
    for member in LocalCluster(directory).members:
        process = member.process()
        if process is not None:
            process.send_signal(signal.SIGKILL)
        ports += [port for port in (member.port, member.admin_port, member.http_port) if port]
    return ports


@pytest.mark.slow
def test_repeated_kills_of_a_cluster_lose_no_transaction_and_leave_no_process(directory: Path):
    written: list[tuple[int, bytes]] = []
    for cycle in range(CYCLES):
        connect = up(directory, *THREE_STORAGES)
        with WaltzClient(connect, PATIENT_CLIENT) as client:
            for number in range(20):
                data = f"{cycle}.{number}".encode()
                written.append((client.append(data, partition=0).result(TEST_TIMEOUT_S), data))
        ports = kill_everything(directory)
        wait_until("no process remains", lambda: pids_at(directory) == [])
        wait_until("ports free", lambda: all(is_free(port, LOOPBACK) for port in ports))  # noqa: B023
    with WaltzClient(up(directory, *THREE_STORAGES), PATIENT_CLIENT) as client:
        assert client.high_water_mark(0, linearizable=True) == len(written) - 1
        records = b"".join(
            bytes(chunk.records) for chunk in client.read_range(0, 0, len(written) - 1)
        )
    assert [number for number, _ in written] == list(range(len(written)))
    assert all(data in records for _, data in written)


@pytest.mark.slow
def test_local_up_starts_only_missing_processes_and_local_down_stops_no_foreign_process(
    directory: Path,
):
    line = waltz_command("local", "up", "--directory", str(directory), *ONE_STORAGE)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        wait_until("the first command has started", (directory / "cluster.json").exists)
        first.send_signal(signal.SIGSTOP)  # so it is still starting while the second command runs
        try:
            second = local(directory, "up", *ONE_STORAGE)
        finally:
            first.send_signal(signal.SIGCONT)
        out, error_text = first.communicate(timeout=TEST_TIMEOUT_S)
    assert first.returncode == 0, error_text
    assert "another command is starting or stopping the cluster" in rejection_of(second)
    connect = out.strip()
    before = status(directory)
    assert up(directory) == connect
    assert status(directory) == before
    LocalCluster(directory).kill("storage-1")
    down = local(directory, "status", "--json")
    assert down.returncode == 1
    states = {each["name"]: each["state"] for each in json.loads(down.stdout)["members"]}
    assert states == {"zookeeper": "up", "storage-1": "down", "server-1": "up"}
    assert up(directory) == connect
    after = status(directory)
    assert {member["state"] for member in after.values()} == {"up"}
    assert [name for name in after if after[name] != before[name]] == ["storage-1"]
    LocalCluster(directory).kill("server-1")
    state_file = directory / "cluster.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as foreign:
        state = json.loads(state_file.read_text())
        for member in state["members"]:
            if member["name"] == "server-1":
                member["pid"] = foreign.pid
        state_file.write_text(json.dumps(state))
        assert local(directory, "down").returncode == 0
        assert foreign.poll() is None
        foreign.kill()
    assert pids_at(directory) == []
    assert "no process of the cluster was running" in local(directory, "down").stderr


@pytest.mark.slow
def test_local_up_avoids_ports_in_use_but_never_changes_the_port_of_a_storage(directory: Path):
    usual = (2181, 15180, 15280, 15281, 15290, 15291)
    with ExitStack() as stack:
        for port in usual:
            with suppress(OSError):  # another process uses the port
                stack.enter_context(occupy(port))
        connect = up(directory)
        assert not {member["port"] for member in status(directory).values()} & set(usual)
        # The port of a server may change, because no component identifies the server by it. Of a
        # registered storage, only the HTTP port for metrics may change.
        assert local(directory, "down").returncode == 0
        server, storage = map(LocalCluster(directory).member, ("server-1", "storage-1"))
        stack.enter_context(occupy(server.port))
        stack.enter_context(occupy(storage.http_port))
        assert up(directory) == connect
        moved = LocalCluster(directory)
        assert moved.member("server-1").port != server.port
        assert moved.member("storage-1").http_port != storage.http_port
        ports = moved.member("storage-1").port, moved.member("storage-1").admin_port
        assert ports == (storage.port, storage.admin_port)
        # The port for connections may not change.
        assert local(directory, "down").returncode == 0
        with occupy(storage.port):
            sentence = rejection_of(local(directory, "up", *ONE_STORAGE))
        assert f"another program uses port {storage.port} of storage-1. " in sentence


@pytest.mark.slow
def test_clusters_that_start_concurrently_get_different_ports(tmp_path: Path):
    directories = [tmp_path / str(number) for number in range(2)]
    starts = [
        subprocess.Popen(
            waltz_command(
                "local", "up", "--directory", str(each), *ONE_STORAGE, "--timeout-s", "300"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in directories
    ]
    try:
        ended = [(each.communicate(timeout=TEST_TIMEOUT_S), each.returncode) for each in starts]
        assert [code for _, code in ended] == [0, 0], ended
        ports = [LocalCluster(each)._load_state().ports for each in directories]
        assert len(set().union(*ports)) == sum(map(len, ports))
    finally:
        for start in starts:
            start.kill()
            start.communicate()
        for each in directories:
            if (each / "cluster.json").exists():
                LocalCluster(each).down()


@pytest.mark.slow
def test_local_up_chooses_other_ports_if_the_recorded_ports_are_in_use(directory: Path):
    """A start that died early has recorded ports, but no process has registered their addresses."""
    cluster = LocalCluster(directory, storage_count=1, server_count=1, partition_count=2)
    directory.mkdir()
    cluster._load_or_create()
    cluster._release_ports()
    before = cluster._load_state().ports
    with ExitStack() as stack:
        for port in before:
            stack.enter_context(occupy(port))
        again = LocalCluster(directory)
        stack.callback(again.down)
        again.prepare()
        assert not again._load_state().ports & before
    assert len(again._load_state().ports) == len(before)


@pytest.mark.slow
def test_a_port_base_determines_all_ports(directory: Path):
    base = ports.FIRST_PORT + 100
    while not all(is_free(base + offset, LOOPBACK) for offset in range(6)):
        base += 6
    with occupy(base + 3):
        sentence = rejection_of(local(directory, "up", *ONE_STORAGE, "--port-base", str(base)))
    assert f"--port-base {base}: another program uses port {base + 3}. Hint: choose" in sentence
    assert not (directory / "cluster.json").exists()
    up(directory, *ONE_STORAGE, "--port-base", str(base))
    assert LocalCluster(directory)._load_state().ports == set(range(base, base + 6))
    sentence = rejection_of(local(directory, "up", "--port-base", "20000"))
    assert f"--port-base: the cluster in {directory} was created with {base}, which" in sentence
    assert local(directory, "down").returncode == 0
    server = LocalCluster(directory)._load_state().members[-1]
    for port in (server.http_port, server.port):
        with occupy(port):
            sentence = rejection_of(local(directory, "up"))
        assert (
            f"another program uses port {port} of {server.name}. The process cannot use another "
            "port, because the cluster "
        ) in sentence
        assert LocalCluster(directory)._load_state().ports == set(range(base, base + 6))


def test_the_zookeeper_command_names_a_port_in_use(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = tmp_path / "zoo.cfg"
        config.write_text(zookeeper_config(tmp_path / "data", port))
        result = subprocess.run(
            waltz_command("zookeeper", "run", "--config", str(config)),
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT_S,
        )
    assert rejection_of(result).endswith(f"another program uses port {port} of ZooKeeper")


@pytest.mark.slow
def test_local_up_waits_for_every_server(directory: Path):
    slow = LocalCluster(directory, storage_count=1, server_count=2, partition_count=2)
    with ExitStack() as stack:
        stack.callback(slow.down)
        slow.prepare()
        slow.start("server-2")
        slow.kill("server-2", signal.SIGSTOP)  # before it can have registered itself
        stack.callback(slow.kill, "server-2", signal.SIGCONT)
        lines: list[str] = []
        late = f"not registered in ZooKeeper yet: 127.0.0.1:{slow.member('server-2').port}"
        with pytest.raises(Unreachable, match=late):
            slow.up(timeout_s=8 * machine_slowdown(), show_line=lines.append)
        assert any(re.search(f"waiting for .*{late}", line) for line in lines)
        slow.kill("server-2", signal.SIGCONT)
        with WaltzClient(slow.up(), PATIENT_CLIENT) as client:
            owners = {address for address, _ in client.layout().owners.values()}
        assert owners == {f"127.0.0.1:{slow.member(f'server-{each}').port}" for each in (1, 2)}


PARENT = """
import sys
from pathlib import Path
import waltz_core.local
small = {"storage_count": 1, "server_count": 1, "partition_count": 2}
with waltz_core.local.cluster(Path(sys.argv[1]), **small) as connect:
    print(connect, flush=True)
    sys.stdin.read()
"""


def test_an_embedded_cluster_ends_with_its_parent_process(tmp_path: Path):
    directory = tmp_path / "embedded"
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as error_file,
        subprocess.Popen(
            [sys.executable, "-c", PARENT, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_file,
        ) as parent,
    ):
        assert parent.stdout is not None
        assert b"127.0.0.1" in parent.stdout.readline(), errors.read_text()
        children = [pid for pid in pids_at(directory) if pid != parent.pid]
        assert len(children) >= 3
        parent.kill()
        parent.wait(TEST_TIMEOUT_S)
        wait_until("no child process remains", lambda: pids_at(directory) == [])


def test_an_embedded_cluster_listens_at_its_address_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = "127.0.0.3"
    with cluster(host=host, storage_count=1, server_count=1, partition_count=2) as connect:
        assert connect.startswith(f"{host}:")
        (directory,) = tmp_path.iterdir()
        local_cluster = LocalCluster(directory)
        with WaltzClient(connect, PATIENT_CLIENT) as client:
            assert client.append(b"x", partition=0).result(TEST_TIMEOUT_S) == 0
            assert {replica.rpartition(":")[0] for replica in client.replicas(0).replicas} == {host}
        for member in local_cluster.members:
            assert not is_free(member.port, host)
        assert listening(pids_at(directory)) == {host}
        assert local_cluster.connect == connect
        assert pids_at(directory)
    assert list(tmp_path.iterdir()) == []
    assert pids_at(directory) == []


def test_commands_without_a_cluster_suggest_local_up(directory: Path):
    for subcommand in ("status", "down"):
        assert "Hint: `waltz-core local up` starts one." in rejection_of(
            local(directory, subcommand)
        )


def test_a_directory_may_have_any_name_in_the_c_locale(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """ZooKeeper, in Java, encodes file names by the locale, and reads settings as Latin-1."""
    monkeypatch.setenv("LC_ALL", "C")
    up(directory)
    assert (directory / "zookeeper" / "version-2").is_dir()
    assert list(directory.parent.iterdir()) == [directory]


def test_local_up_reports_a_failed_zookeeper_at_once_and_quotes_the_end_of_its_log(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERVER_JVMFLAGS", "-XX:+ThereIsNoSuchOption")
    result = local(
        directory, "up", *ONE_STORAGE, "--timeout-s", "600"
    )  # longer than the time limit of the test
    assert result.returncode == 1
    assert "waltz-core: zookeeper ended while the cluster was starting." in result.stderr
    assert "ThereIsNoSuchOption" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(
    not psutil.LINUX, reason="on other systems the start time does not depend on the clock"
)
def test_a_clock_step_does_not_hide_a_running_process(monkeypatch: pytest.MonkeyPatch):
    member = Member("server-1", 0, pid=os.getpid(), started=process_start_s(psutil.Process()))
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3_600)
    assert member.state == "up"
    assert replace(member, started=member.started + 1).state == "down"
