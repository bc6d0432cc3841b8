"""Disks that fail, corrupt data or return with an old copy are reported and repaired.

The errors are injected with strace, one system call of one process at a time.
"""

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.load import (
    Scenario,
    are_all_replicas_engaged,
    paused_process,
    show_partitions,
    wait_until,
)
from tests.fault.syscall_errors import inject_errors
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import Unavailable
from waltz_core.local import running_cluster

pytestmark = pytest.mark.fault
SERVERS = ("server-1", "server-2")
RECORD_START = 128  # records begin after the header of a segment


@pytest.fixture(scope="module")
def module_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Give a cluster with small segments that are read again every second."""
    settings: dict[str, dict[str, object]] = {
        "storage": {"segment_bytes_max": 16_384, "scrub_interval_ms": 1_000},
        "server": {"zookeeper_session_timeout_ms": 1_500},
    }
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield Scenario(cluster)


def metric(scenario: Scenario, name: str, name_of_metric: str) -> float:
    """Return the sum of a metric of a member over its labels."""
    port = scenario.cluster.member(name).http_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TEST_TIMEOUT_S) as page:
        text = page.read().decode()
    matches = re.findall(rf"^{name_of_metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(float(each) for each in matches)


def health(scenario: Scenario, name: str) -> dict[str, object]:
    port = scenario.cluster.member(name).http_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TEST_TIMEOUT_S) as page:
        document: dict[str, object] = json.loads(page.read())
    return document


def log_of(scenario: Scenario, name: str) -> str:
    return scenario.cluster.log_path(name).read_text(encoding="utf-8", errors="replace")


def server_logs(scenario: Scenario) -> str:
    return "".join(log_of(scenario, name) for name in SERVERS)


def cold_segment(scenario: Scenario, storage: str) -> Path:
    """Append until a partition has a second segment; return the first one."""
    top = scenario.cluster.directory / storage
    with scenario.load() as load:
        load.await_commits()
        wait_until("a second segment", lambda: len(list(top.glob("0/*.seg"))) > 1)
    scenario.check_replicas_equal()
    return min(top.glob("0/*.seg"))


def sessions(scenario: Scenario) -> list[object]:
    return [shown["session"] for shown in show_partitions(scenario.cluster).values()]


# ---------------------------------------------------------------------------------------------
# corruption


def test_corruption_found_by_a_scrub_is_repaired_without_a_new_store_session(
    scenario: Scenario,
):
    path = cold_segment(scenario, "storage-2")
    before = path.read_bytes()
    opened = sessions(scenario)
    with path.open("r+b") as file:
        for offset in (RECORD_START + 50, RECORD_START + 3_000):
            file.seek(offset)
            file.write(bytes([before[offset] ^ 1]))
    found = "waltz_storage_damage_found_transactions_total"
    repaired = "waltz_storage_repaired_transactions_total"
    wait_until("found", lambda: metric(scenario, "storage-2", found) >= 2)
    wait_until("repaired", lambda: metric(scenario, "storage-2", repaired) >= 2)
    assert metric(scenario, "storage-2", found) == metric(scenario, "storage-2", repaired)
    assert path.read_bytes() == before
    assert sessions(scenario) == opened, "no session ended because of the repair"
    assert metric(scenario, "storage-2", "waltz_storage_damaged_transactions") == 0
    assert health(scenario, "storage-2")["damaged"] == []
    log = log_of(scenario, "storage-2")
    assert "storage.damage_found partition=0" in log
    assert "storage.damage_repaired partition=0" in log
    # The server learns of the repair after the storage has reported the repair to the doctor.
    wait_until(
        "the repair is logged", lambda: "replica.repaired partition=0" in server_logs(scenario)
    )
    scenario.check_outcomes_against_log()


# ---------------------------------------------------------------------------------------------
# errors of the disk


def test_a_failed_read_is_reported_and_its_records_are_repaired(scenario: Scenario):
    path = cold_segment(scenario, "storage-3")
    repaired = "waltz_storage_repaired_transactions_total"
    earlier = metric(scenario, "storage-3", repaired)
    fail = ("-P", str(path), "-e", "trace=pread64", "-e", "inject=pread64:error=EIO:when=1..12")
    with inject_errors(scenario, "storage-3", *fail):
        wait_until("repaired", lambda: metric(scenario, "storage-3", repaired) > earlier)
        wait_until("whole", lambda: health(scenario, "storage-3")["damaged"] == [])
    assert metric(scenario, "storage-3", "waltz_storage_failed_reads_total") >= 1
    assert metric(scenario, "storage-3", "waltz_storage_failed_writes_total") == 0
    log = log_of(scenario, "storage-3")
    assert f"cannot read {path}: Input/output error" in log
    assert scenario.cluster.member("storage-3").process() is not None
    with scenario.load() as load:
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_a_second_failed_sync_ends_the_process_and_names_the_file(scenario: Scenario):
    with scenario.load() as load:
        load.await_commits()
        # The error affects only files of records and batches, not the slots or the file with the
        # position of the scrub.
        with inject_errors(
            scenario, "storage-1", "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO"
        ):
            wait_until(
                "the process ended", lambda: scenario.cluster.member("storage-1").process() is None
            )
        load.await_commits()
        last = log_of(scenario, "storage-1").strip().splitlines()[-1]
        top = scenario.cluster.directory / "storage-1"
        assert re.search(rf"(syncing|sync) {top}/\S+: Input/output error", last), last
        assert "Traceback" not in log_of(scenario, "storage-1")
        scenario.cluster.start("storage-1")
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


# ---------------------------------------------------------------------------------------------
# a backup that is put back


def copy_running(scenario: Scenario, storage: str, where: Path) -> None:
    """Copy a storage's directory as it is at one moment."""
    with paused_process(scenario.cluster, storage):
        shutil.copytree(scenario.cluster.directory / storage, where)


def restore_copy(scenario: Scenario, storage: str, where: Path) -> None:
    directory = scenario.cluster.directory / storage
    shutil.rmtree(directory)
    shutil.copytree(where, directory)


def test_a_storage_restored_from_an_old_copy_has_no_vote_until_it_catches_up(
    scenario: Scenario, tmp_path: Path
):
    with scenario.load() as load:
        load.await_commits()
        copy_running(scenario, "storage-2", tmp_path / "old")
        load.await_commits()
        scenario.cluster.kill("storage-2")
        restore_copy(scenario, "storage-2", tmp_path / "old")
        load.await_commits()
        # One of the two complete replicas stops when the old copy starts.
        scenario.cluster.kill("storage-3")
        scenario.cluster.start("storage-2")
        load.await_commits()
        scenario.cluster.start("storage-3")
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_two_storages_are_no_quorum_if_one_was_restored_from_an_old_copy(
    scenario: Scenario, tmp_path: Path
):
    with scenario.load() as load:
        load.await_commits()
        copy_running(scenario, "storage-2", tmp_path / "old")
        # The storage is down for a moment, so that ZooKeeper records later sessions than the copy
        # has.
        scenario.cluster.kill("storage-2")
        load.await_commits()
        scenario.cluster.start("storage-2")
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(scenario.cluster))
        load.await_commits()
    scenario.check_replicas_equal()
    # Kill the servers first: no session may begin during the kills and get an answer of the third
    # storage.
    for name in (*SERVERS, "storage-1", "storage-2", "storage-3"):
        scenario.cluster.kill(name)
    restore_copy(scenario, "storage-2", tmp_path / "old")
    log = {name: len(log_of(scenario, name)) for name in SERVERS}
    address = f"127.0.0.1:{scenario.cluster.member('storage-2').port}"
    for name in ("storage-1", "storage-2", *SERVERS):
        scenario.cluster.start(name)

    def is_unknown() -> bool:
        lines = "".join(log_of(scenario, name)[start:] for name, start in log.items())
        return all(
            re.search(rf"replica.untrusted partition={partition} .*replica={address}", lines)
            for partition in range(4)
        )

    diagnosed = ClientConfig(request_timeout_ms=1000 * TEST_TIMEOUT_S)
    with WaltzClient(scenario.cluster.connect, diagnosed) as client:
        futures = [
            client.append(scenario.row(partition), partition=partition) for partition in range(4)
        ]
        wait_until("the old copy is not trusted", is_unknown)
        # All running storages have answered. If their answers sufficed to open a session, the
        # server would return a mark.
        with WaltzClient(
            scenario.cluster.connect, ClientConfig(request_timeout_ms=400)
        ) as second_client:
            for partition in range(4):
                with pytest.raises(Unavailable, match="within 400 ms: "):
                    second_client.high_water_mark(partition)
        results = [future.exception() or future.result() for future in futures if future.done()]
        assert results == []
        scenario.cluster.start("storage-3")
        assert all(future.result(TEST_TIMEOUT_S) >= 0 for future in futures)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()
