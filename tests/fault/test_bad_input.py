"""Daemons that cannot start report one error and damage nothing; a full disk stops no daemon."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kazoo.client import KazooClient

from tests.commands import run_command
from tests.fault.load import Scenario, read_segment_files, wait_until, waltz_command
from tests.small_disk import CANNOT_MOUNT_REASON, SmallDisk, can_mount
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S, machine_slowdown
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import NoSpace, NotMounted, OutcomeUnknown, Unavailable
from waltz_core.local import running_cluster

pytestmark = pytest.mark.fault


def run(*words: str) -> subprocess.CompletedProcess[str]:
    if words[:2] != ("storage", "run"):
        return run_command(*words)
    return subprocess.run(
        waltz_command(*words), capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT_S
    )


def sentence_of(*words: str) -> str:
    """Run a command that must fail; return its error message of one line."""
    result = run(*words)
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    sentence = [line for line in result.stderr.splitlines() if line.startswith("waltz-core: ")]
    assert len(sentence) == 1, result.stderr
    return sentence[0]


def storage(scenario: Scenario, name: str, *words: str) -> tuple[str, ...]:
    config = scenario.cluster.directory / "conf" / f"{name}.toml"
    return ("storage", "run", "--config", str(config), *words)


class SmallDisks(NamedTuple):
    """The directory of a cluster, and the disks of its storages, or the reason why it has none."""

    directory: Path
    disks: list[SmallDisk]
    why_not: str


@pytest.fixture(scope="module")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisks]:
    """Mount three small disks, where that is possible."""
    changed = SmallDisks(tmp_path_factory.mktemp("disks"), [], "")
    if not can_mount():
        changed = changed._replace(why_not=CANNOT_MOUNT_REASON)
    else:
        try:
            for number in (1, 2, 3):
                changed.disks.append(SmallDisk(changed.directory / f"storage-{number}", "24m"))
        except subprocess.CalledProcessError as error:
            changed = changed._replace(why_not=f"no tmpfs can be mounted: {error.stderr.decode()}")
    yield changed
    for disk in changed.disks:
        disk.unmount()


@pytest.fixture(scope="module")
def module_scenario(small_disks: SmallDisks) -> Iterator[Scenario]:
    """Give a cluster whose three storages have small disks."""
    with running_cluster(small_disks.directory) as cluster:
        yield Scenario(cluster)


@pytest.fixture
def stopped_storage(scenario: Scenario) -> Iterator[Path]:
    """Return the directory of storage-1, which is stopped; its log must not change."""
    with scenario.load() as load:
        load.await_commits(20)
    scenario.check_replicas_equal()
    scenario.cluster.kill("storage-1", signal.SIGTERM)
    before = read_segment_files(scenario.cluster, "storage-1")
    yield scenario.cluster.directory / "storage-1"
    after = read_segment_files(scenario.cluster, "storage-1")
    assert {path: after[path][: len(data)] for path, data in before.items()} == before
    scenario.cluster.start("storage-1")
    with scenario.load() as load:
        load.await_commits(20)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_a_directory_of_another_cluster_and_a_truncated_control_file_are_rejected(
    scenario: Scenario, stopped_storage: Path
):
    root = scenario.cluster.connect.partition("/")[0] + "/another"
    address = scenario.cluster.member("storage-1")
    created = run(
        *("cluster", "create", root, "--partitions", "4"),
        *("--storage", f"127.0.0.1:{address.port}:{address.admin_port}"),
    )
    assert created.returncode == 0, created.stderr
    sentence = sentence_of(*storage(scenario, "storage-1", "--connect", root))
    assert "cluster" in sentence
    assert str(stopped_storage) in sentence
    file = stopped_storage / "waltz-storage.ctl"
    content_before = file.read_bytes()
    for length in (0, 200):
        file.write_bytes(content_before[:length])
        sentence = sentence_of(*storage(scenario, "storage-1"))
        assert file.read_bytes() == content_before[:length]
        assert "waltz-storage.ctl" in sentence
    file.write_bytes(content_before)


def test_a_second_process_on_one_directory_is_rejected(scenario: Scenario):
    sentence = sentence_of(
        *storage(scenario, "storage-2", "--port", "0", "--admin-port", "0", "--http-port", "0")
    )
    assert str(scenario.cluster.directory / "storage-2") in sentence
    with scenario.load() as load:
        load.await_commits(20)


def test_the_directory_of_another_storage_is_rejected(scenario: Scenario, stopped_storage: Path):
    """A storage starts with a copy of another disk, but the cluster knows this storage's ID."""
    scenario.cluster.kill("storage-2", signal.SIGTERM)
    copy = stopped_storage.with_name("copy")
    shutil.copytree(scenario.cluster.directory / "storage-2", copy)
    sentence = sentence_of(*storage(scenario, "storage-1", "--directory", str(copy)))
    assert "storage" in sentence
    shutil.rmtree(copy)
    scenario.cluster.start("storage-2")


@pytest.mark.parametrize("kind", ["storage", "server"])
def test_a_daemon_without_zookeeper_names_the_host_and_ends(tmp_path: Path, kind: str):
    words = ["--directory", str(tmp_path / "s")] if kind == "storage" else []
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # no process listens on it
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        sentence = sentence_of(
            *(kind, "run", "--connect", f"{host}/waltz/local", "--port", "0", *words),
            *("--zookeeper-connect-timeout-ms", "1000"),
        )
    assert host in sentence
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", ["storage", "server"])
def test_an_absent_cluster_root_is_reported(scenario: Scenario, tmp_path: Path, kind: str):
    connect = scenario.cluster.connect + "/absent"
    words = ["--directory", str(tmp_path / "s"), "--admin-port", "0"] if kind == "storage" else []
    sentence = sentence_of(kind, "run", "--connect", connect, "--port", "0", *words)
    assert "/absent" in sentence
    assert not list(tmp_path.rglob("*.ctl"))


@pytest.mark.parametrize("name", ["storage-1", "server-1"])
def test_a_port_in_use_is_reported(scenario: Scenario, name: str):
    member = scenario.cluster.member(name)
    scenario.cluster.kill(name, signal.SIGTERM)
    config = scenario.cluster.directory / "conf" / f"{name}.toml"
    with socket.create_server(("127.0.0.1", member.port)):
        sentence = sentence_of(member.kind, "run", "--config", str(config))
    assert str(member.port) in sentence


# ---------------------------------------------------------------------------------------------
# a full disk


@pytest.fixture
def small_cluster(
    scenario: Scenario, small_disks: SmallDisks
) -> Iterator[tuple[Scenario, list[SmallDisk]]]:
    """Yield the cluster and its disks; free the disks afterwards."""
    if small_disks.why_not:
        pytest.skip(small_disks.why_not)
    try:
        yield scenario, small_disks.disks
    finally:
        for disk in small_disks.disks:
            disk.free()


def test_appends_continue_with_one_full_disk(small_cluster: tuple[Scenario, list[SmallDisk]]):
    scenario, disks = small_cluster
    with scenario.load() as load:
        load.await_commits()
        disks[1].fill()
        load.await_commits()
        with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as client:
            last = client.high_water_mark(0, linearizable=True)
            assert sum(chunk.count for chunk in client.read_range(0, 0, last)) == last + 1
        disks[1].free()
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_if_all_storages_have_full_disks_appends_are_rejected_and_reads_still_work(
    small_cluster: tuple[Scenario, list[SmallDisk]],
):
    scenario, disks = small_cluster
    with scenario.load() as load:
        load.await_commits()
    for disk in disks:
        disk.fill()
    # Long enough for a session to end, and for the next session to settle its appends.
    quick = ClientConfig(request_timeout_ms=int(3_000 * machine_slowdown()))
    with WaltzClient(scenario.cluster.connect, quick) as client:
        last = client.high_water_mark(1)
        for refusal in rejected_appends(scenario, client):
            assert isinstance(refusal, Unavailable), repr(refusal)
            assert not isinstance(refusal, OutcomeUnknown)
        assert sum(chunk.count for chunk in client.read_range(1, 0, last)) == last + 1
    for disk in disks:
        disk.free()
    with scenario.load() as load:
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_a_storage_reports_a_full_disk_and_refills_its_reserve_when_space_is_free(
    small_cluster: tuple[Scenario, list[SmallDisk]],
):
    scenario, disks = small_cluster
    reserve = disks[2].directory / "waltz-x.reserve"
    wait_until("a reserve", lambda: reserve.exists() and reserve.stat().st_size > 0)
    size = reserve.stat().st_size
    disks[2].fill()
    with scenario.load() as load:
        wait_until("the storages report full disks", lambda: is_full(scenario, "storage-3"))
        load.await_commits()
        # A repair takes space from the reserve. Here another process uses this space.
        reserve.unlink()
        scenario.cluster.kill("storage-3")
        disks[2].fill()
        scenario.cluster.start("storage-3")
        wait_until(
            "the restarted storage reports a full disk", lambda: is_full(scenario, "storage-3")
        )
        load.await_commits()
        disks[2].free()
        wait_until("the disk is not full any more", lambda: not is_full(scenario, "storage-3"))
        wait_until("the reserve is complete", lambda: reserve.stat().st_size == size)
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def is_full(scenario: Scenario, storage: str) -> bool:
    """Return what a storage reports about its disk; the two pages agree."""
    pages: list[str] = []
    port = scenario.cluster.member(storage).http_port
    for name in ("health", "metrics"):
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/{name}", timeout=TEST_TIMEOUT_S
            ) as page:
                pages.append(page.read().decode())
        except urllib.error.HTTPError as error:  # An unhealthy storage answers with an HTTP error.
            pages.append(error.read().decode())
        except OSError:
            return False
    document = json.loads(pages[0])
    assert not (document["is_full"] and document["is_healthy"])
    return bool(document["is_full"]) and "waltz_storage_full_disks 1.0" in pages[1]


def rejected_appends(scenario: Scenario, client: WaltzClient) -> list[BaseException]:
    """Append until the disk has no space for an append.

    At first, appends may succeed, because the last page of a file may have space. Between two
    sessions the client may mount again during an append. Then the client receives a retriable
    error, and tries again.
    """
    errors: list[BaseException] = []

    def is_refused() -> bool:
        error = client.append(scenario.row(1, padding=9_000), partition=1).exception(TEST_TIMEOUT_S)
        if error is not None and not isinstance(error, NotMounted):
            errors.append(error)
        return isinstance(error, NoSpace)

    wait_until("an append is rejected because the disk is full", is_refused)
    return errors


def test_no_daemon_ends_because_of_an_undecodable_znode(scenario: Scenario):
    """In an earlier version, a damaged node ended all storages or all servers at once."""
    hosts, _, root = scenario.cluster.connect.partition("/")
    zookeeper = KazooClient(hosts)
    zookeeper.start(timeout=TEST_TIMEOUT_S)
    nodes = {
        f"/{root}/store/assignment": ("storage-1", "storage-2", "storage-3"),
        f"/{root}/serverDescriptors": ("server-1", "server-2"),
    }
    try:
        with scenario.load() as load:  # an open client; a new one could not read the nodes
            load.await_commits()
            for node, names in nodes.items():
                right, _ = zookeeper.get(node)
                zookeeper.set(node, b"rotten")
                for name in names:
                    log = scenario.cluster.log_path(name)
                    wait_until(
                        f"{name} has read {node}",
                        lambda log=log, node=node: (
                            f"zookeeper.znode_unreadable error={node}" in log.read_text("utf-8")
                        ),
                    )
                load.await_commits()
                zookeeper.set(node, right)
    finally:
        zookeeper.stop()
        zookeeper.close()
    with scenario.load() as load:
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()
