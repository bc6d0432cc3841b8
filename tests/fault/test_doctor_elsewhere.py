"""The doctor on another machine finds processes that are down, silent or misconfigured.

The printed commands run in the folder of the daemon's settings file. If a finding states that a
process must be ended first, the test ends it.
"""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import run_command
from tests.fault.cluster_commands import change_layout, member_address, run_failing, run_successful
from tests.fault.doctor import (
    DiagnosedCluster,
    await_findings,
    faulty_cluster,
    remote_options,
    run_doctor,
    run_printed_command,
)
from tests.fault.load import wait_until
from tests.ports import free_port
from waltz_core.local import LocalCluster
from waltz_core.records.record import ReplicaId

pytestmark = pytest.mark.fault

# The longest session timeout that ZooKeeper grants. A dead or frozen process stays registered for
# this time. On a busy machine, a doctor that checks twice takes more than 10 s.
SESSION_MS = 40_000


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiagnosedCluster]:
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS}
    }
    with faulty_cluster(tmp_path_factory.mktemp("doctor") / "waltz", settings) as diagnosed:
        yield diagnosed


class Fault(NamedTuple):
    """A fault of some members, and the expected finding.

    `ends`: the finding states that a process must be ended; the doctor prints no command for this.
    """

    name: str
    members: tuple[str, ...]
    signal_number: int
    ends: bool = False


FAULTS = (
    Fault("zookeeper-server-unavailable", ("zookeeper-2",), signal.SIGKILL),
    Fault("storage-unavailable", ("storage-1",), signal.SIGKILL),
    Fault("storage-silent", ("storage-2",), signal.SIGSTOP, ends=True),
    Fault("no-server", ("server-1", "server-2"), signal.SIGTERM),
    Fault("server-silent", ("server-2",), signal.SIGSTOP, ends=True),
)


# These faults are slow to test, and similar tests exist: `test_doctor.py` finds dead processes and
# silent ones.
SLOW_FAULTS = ("zookeeper-server-unavailable", "storage-unavailable", "storage-silent", "no-server")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW_FAULTS else []
        )
        for each in FAULTS
    ],
)
def test_the_command_printed_by_the_doctor_starts_the_process(
    diagnosed: DiagnosedCluster, fault: Fault
):
    cluster = diagnosed.cluster()
    doctor_options = remote_options(cluster.connect)
    diagnosed.write(cluster.connect)
    for member in fault.members:
        cluster.kill(member, fault.signal_number)
    findings = await_findings([fault.name], *doctor_options)
    if fault.name == "storage-silent":
        check_reported_once(cluster)
    for member in fault.members if fault.ends else ():
        assert "start it again" in findings[0]["sentence"]
        cluster.kill(member)
    for line in {finding["command"] for finding in findings}:
        diagnosed.run_daemon(line, settings_of(cluster, fault.members[0]))
    wait_until("the doctor reports nothing", lambda: not run_doctor(*doctor_options))
    diagnosed.check_rows(cluster.connect)
    repair_cluster(diagnosed, cluster)


def check_reported_once(cluster: LocalCluster) -> None:
    """Check that the doctor reports the storage once, although servers answer late meanwhile."""
    result = run_command("doctor", *remote_options(cluster.connect))
    assert result.stdout.startswith(
        f"1. storage {member_address(cluster, 'storage-2')} accepts connections"
    )
    assert "\n2. " not in result.stdout
    assert result.stderr == ""


def settings_of(cluster: LocalCluster, member: str) -> Path:
    """Return the path of the daemon's settings file, with the name in the printed command."""
    kind = cluster.member(member).kind
    name = {"zookeeper": "zoo.cfg", "storage": "storage.toml", "server": "server.toml"}[kind]
    directory = cluster.directory / "settings" / member
    directory.mkdir(parents=True, exist_ok=True)
    (source,) = (cluster.directory / "conf").glob(f"{member}.*")
    shutil.copy(source, directory / name)
    return directory


def repair_cluster(diagnosed: DiagnosedCluster, cluster: LocalCluster) -> None:
    """Start all members, as the next test expects."""
    diagnosed.end_daemons()
    for member in cluster.members:
        cluster.start(member.name)
    wait_until(
        "the doctor reports nothing", lambda: not run_doctor(*remote_options(cluster.connect))
    )


@pytest.mark.slow
def test_all_dead_servers_are_removed(diagnosed: DiagnosedCluster):
    """No other server can remove the dead servers before their ZooKeeper sessions end."""
    cluster = diagnosed.cluster()
    doctor_options = remote_options(cluster.connect)
    diagnosed.write(cluster.connect)
    servers = [member.name for member in cluster.members if member.kind == "server"]
    for name in servers:  # frozen first: otherwise one server would remove the other
        cluster.kill(name, signal.SIGSTOP)
    for name in servers:
        cluster.kill(name)
    findings = run_doctor(*doctor_options)
    # ZooKeeper may have ended the session of one server, or of both.
    assert {finding["name"] for finding in findings} in ({"server-unavailable"}, {"no-server"})
    for finding in findings:
        if finding["name"] == "server-unavailable":
            run_printed_command(finding["command"])
    (alone,) = await_findings(["no-server"], *doctor_options)
    diagnosed.run_daemon(alone["command"], settings_of(cluster, servers[0]))
    wait_until("the doctor reports nothing", lambda: not run_doctor(*doctor_options))
    diagnosed.check_rows(cluster.connect)
    repair_cluster(diagnosed, cluster)


def test_an_added_storage_that_has_never_started_is_reported(diagnosed: DiagnosedCluster):
    cluster = diagnosed.cluster()
    doctor_options = remote_options(cluster.connect)
    port, admin_port = free_port(), free_port()
    storage = f"127.0.0.1:{port}"
    words = ("add-storage", storage, "--admin-port", str(admin_port))
    assert "Hint: start the storage with an empty directory" in run_failing(cluster, *words)
    change_layout(cluster, lambda old: old.with_storage(ReplicaId(storage), admin_port, None))
    (finding,) = await_findings(["storage-never-started"], *doctor_options)
    assert storage in finding["sentence"]
    settings_directory = cluster.directory / "settings" / "new"
    settings_directory.mkdir(parents=True)
    settings = {"port": port, "admin_port": admin_port, "listen_host": '"127.0.0.1"'}
    settings |= {"connect": f'"{cluster.connect}"', "directory": f'"{settings_directory / "data"}"'}
    text = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (settings_directory / "storage.toml").write_text(text, encoding="utf-8")
    diagnosed.run_daemon(finding["command"], settings_directory)
    wait_until("the doctor reports nothing", lambda: not run_doctor(*doctor_options))
    run_successful(cluster, "remove-storage", storage)
    repair_cluster(diagnosed, cluster)


@pytest.mark.slow
def test_a_storage_of_another_cluster_at_the_address_is_reported(diagnosed: DiagnosedCluster):
    """The storage of another cluster was started, and listens at the address."""
    cluster = diagnosed.cluster()
    look = remote_options(cluster.connect)
    diagnosed.write(cluster.connect)
    member = cluster.member("storage-3")
    other = f"{cluster.connect.rpartition('/')[0]}/other"
    at = f"--storage 127.0.0.1:{member.port}:{member.admin_port}"
    run_printed_command(f"waltz-core cluster create {other} --partitions 1 {at}")
    cluster.kill(member.name)
    settings_directory = settings_of(cluster, member.name)
    wrong = cluster.directory / "settings" / "wrong"
    shutil.copytree(settings_directory, wrong)
    flags = f"--connect {other} --directory {wrong / 'data'}"
    diagnosed.run_daemon(f"waltz-core storage run --config storage.toml {flags}", wrong)
    (finding,) = await_findings(["storage-cluster-mismatch"], *look)
    assert (
        f"the storage at {member_address(cluster, member.name)} belongs to another cluster"
        in finding["sentence"]
    )
    diagnosed.end_daemons()
    diagnosed.run_daemon(finding["command"], settings_directory)
    wait_until("the doctor reports nothing", lambda: not run_doctor(*look))
    diagnosed.check_rows(cluster.connect)
    run_printed_command(f"waltz-core cluster delete waltz --connect {other} --force")
    repair_cluster(diagnosed, cluster)


def wrong_connect_strings(
    cluster: LocalCluster,
) -> dict[str, Callable[[Path], tuple[str, dict[str, str]]]]:
    """Return wrong connect strings, each with the values to insert into the printed command."""
    hosts = cluster.connect.rpartition("/")[0]

    def connect_string_of_other_user(directory: Path) -> tuple[str, dict[str, str]]:
        auth = directory / "zookeeper.auth"
        auth.write_text("digest:waltz:a long password\n", encoding="utf-8")
        make = ("cluster", "create", f"{hosts}/closed?auth={auth}", "--partitions", "1")
        assert run_command(*make).returncode == 0
        return f"{hosts}/closed", {"FILE": str(auth)}

    def absent(_directory: Path) -> tuple[str, dict[str, str]]:
        storage = f"127.0.0.1:{free_port()}:{free_port()}"
        return f"{hosts}/new", {"COUNT": "1", "HOST:PORT:ADMIN_PORT": storage}

    return {"zookeeper-access-denied": connect_string_of_other_user, "no-cluster": absent}


@pytest.mark.parametrize("name", ["zookeeper-access-denied", "no-cluster"])
def test_a_connect_string_without_a_cluster_is_reported_with_the_next_command(
    diagnosed: DiagnosedCluster, tmp_path: Path, name: str
):
    """After the command the doctor reports the next problem: a cluster without processes."""
    connect, words = wrong_connect_strings(diagnosed.cluster())[name](tmp_path)
    (finding,) = await_findings([name], *remote_options(connect))
    line = finding["command"]
    for capitals, known in words.items():
        line = line.replace(capitals, known)
    run_printed_command(line)
    auth = f"?auth={words['FILE']}" if "FILE" in words else ""
    names = {each["name"] for each in run_doctor(*remote_options(connect + auth))}
    assert "no-server" in names
    assert name not in names
