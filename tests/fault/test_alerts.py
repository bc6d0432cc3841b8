"""Faults of real daemons: each fault fires its alert, and no other alert.

The rules are those in conf/prometheus/, evaluated with the metrics of the daemons.
"""

import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fault.load import Scenario, start_zookeeper, wait_until
from tests.fault.sampled_metrics import expect_alerts
from tests.fault.stalled_member import stall_repeatedly
from tests.fault.syscall_errors import inject_errors
from tests.fault.threads import resume_threads, stop_threads
from tests.promtool import find_promtool
from tests.small_disk import CANNOT_MOUNT_REASON, SmallDisk, can_mount
from waltz_core.local import LocalCluster, running_cluster

pytestmark = pytest.mark.fault
DISK_SIZE = "400m"  # more than the 256 MiB of a disk that is nearly full


class Fault(NamedTuple):
    """The alerts that a fault fires, and how it is injected and removed."""

    alerts: set[str]
    inject: Callable[[Scenario], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def module_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Give a cluster with small segments that are read again every second."""
    find_promtool()
    settings: dict[str, dict[str, object]] = {
        "storage": {"segment_bytes_max": 16_384, "scrub_interval_ms": 1_000},
        "server": {"zookeeper_session_timeout_ms": 1_500},
    }
    directory = tmp_path_factory.mktemp("cluster")
    try:
        mount_disk(directory / "storage-3")
        with running_cluster(directory, settings=settings) as cluster:
            yield Scenario(cluster)
    finally:
        while DISKS:
            DISKS.popitem()[1].unmount()


DISKS: dict[Path, SmallDisk] = {}


def mount_disk(where: Path) -> None:
    """Mount a disk that a test can fill, where that is possible."""
    if can_mount():
        try:
            DISKS[where] = SmallDisk(where, DISK_SIZE)
        except subprocess.CalledProcessError:
            where.rmdir()


# --- the faults


def killed(*names: str) -> Callable[[Scenario], AbstractContextManager[None]]:
    @contextmanager
    def inject(scenario: Scenario) -> Iterator[None]:
        for name in names:
            scenario.cluster.kill(name)
        try:
            yield
        finally:
            for name in names:
                scenario.cluster.start(name)

    return inject


@contextmanager
def without_zookeeper(scenario: Scenario) -> Iterator[None]:
    scenario.cluster.kill("zookeeper")
    try:
        yield
    finally:
        start_zookeeper(scenario.cluster)


@contextmanager
def hanging_disk(scenario: Scenario) -> Iterator[None]:
    """Stop the threads of a storage's disk; the one for connections continues."""
    member = scenario.cluster.member("storage-1")
    process = member.process()
    assert process is not None
    try:
        stop_threads(process.pid, lambda: is_answering(member.http_port))
        yield
    finally:
        resume_threads()


def is_answering(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as page:
            return page.status == 200
    except OSError:
        return False


@contextmanager
def slow_storage(scenario: Scenario) -> Iterator[None]:
    with stall_repeatedly(scenario.cluster, "storage-2"):
        yield


@contextmanager
def full_disk(scenario: Scenario) -> Iterator[None]:
    disk = DISKS.get(scenario.cluster.directory / "storage-3")
    if disk is None:
        pytest.skip(CANNOT_MOUNT_REASON)
    disk.fill()
    try:
        yield
    finally:
        disk.free()


@contextmanager
def failing_reads(scenario: Scenario) -> Iterator[None]:
    path = cold_segment(scenario.cluster, "storage-1")
    fail = ("-P", str(path), "-e", "trace=pread64", "-e", "inject=pread64:error=EIO:when=1..12")
    with inject_errors(scenario, "storage-1", *fail):
        yield


@contextmanager
def rot(scenario: Scenario) -> Iterator[None]:
    """Change a byte of an old record, which the scrub finds and the owner repairs."""
    path = cold_segment(scenario.cluster, "storage-2")
    with path.open("r+b") as file:
        file.seek(3_000)
        before = file.read(1)
        file.seek(3_000)
        file.write(bytes([before[0] ^ 1]))
    yield


def cold_segment(cluster: LocalCluster, storage: str) -> Path:
    """Return a segment that is not written any more, under load."""
    top = cluster.directory / storage
    wait_until("a second segment", lambda: len(list(top.glob("0/*.seg"))) > 1)
    return min(top.glob("0/*.seg"))


FAULTS = {
    "a storage is killed": Fault({"WaltzStorageDown"}, killed("storage-1")),
    "a server is killed": Fault({"WaltzServerDown"}, killed("server-1")),
    "a quorum of the storages is killed": Fault(
        {"WaltzStorageDown", "WaltzPartitionUnavailable"}, killed("storage-1", "storage-2")
    ),
    "all servers are killed": Fault(
        {"WaltzServerDown", "WaltzPartitionUnavailable"}, killed("server-1", "server-2")
    ),
    "ZooKeeper is killed": Fault({"WaltzZooKeeperUnavailable"}, without_zookeeper),
    "a disk hangs": Fault({"WaltzStorageUnresponsive"}, hanging_disk),
    "a storage is slow": Fault({"WaltzStorageSlow"}, slow_storage),
    "a disk is full": Fault({"WaltzDiskFull"}, full_disk),
    "reads of a disk fail": Fault({"WaltzDiskErrors"}, failing_reads),
    "a record has rotted": Fault({"WaltzTransactionsDamaged"}, rot),
}


# One fault of each kind is enough for `make test`: a dead process, a hanging disk, a full disk and
# changed bytes.
QUICK_FAULTS = (
    "a quorum of the storages is killed",
    "a disk hangs",
    "a disk is full",
    "a record has rotted",
)


@pytest.mark.parametrize(
    "title",
    [
        title if title in QUICK_FAULTS else pytest.param(title, marks=pytest.mark.slow)
        for title in FAULTS
    ],
)
def test_a_fault_fires_exactly_its_own_alerts(
    scenario: Scenario, title: str, tmp_path: Path
) -> None:
    fault, cluster = FAULTS[title], scenario.cluster
    with scenario.load():
        before = expect_alerts(cluster, set(), tmp_path)
        with fault.inject(scenario):
            expect_alerts(cluster, fault.alerts, tmp_path, before)
