"""Storages and servers are killed, paused, stalled and restarted under load.

No reported outcome may be wrong, and the cluster recovers without an operator.
"""

import json
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.cluster_commands import (
    check_replicas_equal,
    member_address,
    run_failing,
    run_successful,
)
from tests.fault.doctor import await_findings, remote_options, run_doctor, run_printed_command
from tests.fault.load import Scenario, owner_addresses, show_partitions, wait_until
from tests.fault.stalled_member import stall_repeatedly
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.errors import Unreachable
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")


def test_a_killed_storage_is_repaired_automatically(scenario: Scenario):
    with scenario.load() as load:
        load.await_commits()
        scenario.cluster.kill("storage-1")
        load.await_commits()
        scenario.cluster.start("storage-1")
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_appends_stop_without_a_quorum_and_resume_when_a_quorum_is_back(scenario: Scenario):
    """With one storage left, only earlier appends and unknown outcomes are reported."""
    with scenario.load() as load:
        load.await_commits()
        scenario.cluster.kill("storage-2")
        scenario.cluster.kill("storage-3")
        with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as client:
            futures = [
                client.append(scenario.row(partition), partition=partition)
                for partition in range(4)
            ]
            assert not any(future.done() for future in futures)
            scenario.cluster.start("storage-2")
            assert all(future.result(TEST_TIMEOUT_S) >= 0 for future in futures)
        load.await_commits()
        scenario.cluster.start("storage-3")
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_the_log_continues_after_all_storages_are_killed_at_once(scenario: Scenario):
    with scenario.load() as load:
        load.await_commits()
        for name in STORAGES:
            scenario.cluster.member(name).process().send_signal(signal.SIGKILL)
        for name in STORAGES:
            scenario.cluster.kill(name)
        for name in STORAGES:
            scenario.cluster.start(name)
        load.await_commits()
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def test_a_server_that_was_paused_too_long_commits_nothing(scenario: Scenario):
    sleeping = member_address(scenario.cluster, "server-2")
    wait_until("both servers own partitions", lambda: len(owner_addresses(scenario.cluster)) == 2)
    found = show_partitions(scenario.cluster).items()
    moved = [number for number, each in found if each["server"] == sleeping]
    with scenario.load() as load:
        load.await_commits()
        scenario.cluster.kill("server-2", signal.SIGSTOP)
        try:
            wait_until(
                "the paused server has lost its partitions",
                lambda: sleeping not in owner_addresses(scenario.cluster),
            )
            load.await_commits()
            with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as client:
                replicas_before = {each: client.replicas(each, linearizable=True) for each in moved}
        finally:
            scenario.cluster.kill("server-2", signal.SIGCONT)
        load.await_commits()
    assert moved
    with WaltzClient(scenario.cluster.connect, PATIENT_CLIENT) as client:
        for each in moved:
            first = replicas_before[each].high_water_mark + 1
            last = client.high_water_mark(each, linearizable=True)
            assert last >= first
            for chunk in client.read_range(each, first, last):
                assert all(
                    entry.session_id >= replicas_before[each].session_id for entry in chunk.lineage
                )
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


def slow_lines(cluster: LocalCluster, storage: str) -> list[str]:
    """Return the servers' log lines about slow appends at a storage."""
    logs = [cluster.log_path(member.name) for member in cluster.members if member.kind == "server"]
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "append.slow" in line and f"replica={storage} " in line]


@pytest.mark.slow
def test_the_doctor_and_the_log_name_a_storage_that_stalls(scenario: Scenario):
    cluster, storage = scenario.cluster, member_address(scenario.cluster, "storage-2")
    with scenario.load() as load, stall_repeatedly(cluster, "storage-2"):
        load.await_commits()
        wait_until("the log names the storage", lambda: slow_lines(cluster, storage))

        def is_found() -> bool:
            findings = run_doctor(*remote_options(cluster.connect))
            return ("storage-slow", storage) in {
                (finding["name"], finding["about"]) for finding in findings
            }

        wait_until("the doctor names the storage", is_found)
        load.await_commits()
    others = [member_address(cluster, each) for each in ("storage-1", "storage-3")]

    def is_no_other_named() -> bool:
        findings = run_doctor(*remote_options(cluster.connect))
        return not any(finding["about"] in others for finding in findings)

    # On a busy machine, another storage may not answer the doctor in time.
    wait_until("the doctor names no other storage", is_no_other_named)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


# --- the directory of a partition, or of a storage, is deleted or replaced while it runs


def delete(directory: Path) -> None:
    def is_deleted() -> bool:
        shutil.rmtree(directory, ignore_errors=True)  # the storage may create files meanwhile
        return not directory.exists()

    wait_until("the directory is deleted", is_deleted)


def put_copy_back(directory: Path) -> None:
    """Restore the contents of the directory, as new files with the same names."""
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    directory.rename(directory.with_name("moved"))
    copy.rename(directory)


def failed_page(cluster: LocalCluster, name: str, path: str) -> dict[str, object]:
    """Return the content of a page that reports an error."""
    page = f"http://127.0.0.1:{cluster.member(name).http_port}{path}"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(page, timeout=TEST_TIMEOUT_S)
    with caught.value as answer:
        assert answer.code == 503
        content: dict[str, object] = json.loads(answer.read())
    return content


@pytest.mark.parametrize("change", [delete, pytest.param(put_copy_back, marks=pytest.mark.slow)])
def test_a_replica_stays_excluded_until_the_printed_re_seed_command_is_run(
    scenario: Scenario, change: Callable[[Path], None]
):
    cluster, storage = scenario.cluster, member_address(scenario.cluster, "storage-2")
    doctor_options = remote_options(cluster.connect)
    log = cluster.log_path("storage-2")
    before = log.read_text(encoding="utf-8").count("storage.files_replaced")
    with scenario.load() as load:
        load.await_commits()
        change(cluster.directory / "storage-2" / "1")
        load.await_commits()
        wait_until(
            "the storage has detected the damage",
            lambda: log.read_text(encoding="utf-8").count("storage.files_replaced") > before,
        )
        (finding,) = await_findings({"replica-unreadable"}, *doctor_options)
        assert finding["about"] == f"1 {storage}"
        assert "deleted or replaced" in finding["sentence"]
        why_not = failed_page(cluster, "storage-2", "/health")["not_served_reasons"]
        assert isinstance(why_not, dict)
        assert "deleted or replaced" in why_not["1"]
        unready = failed_page(cluster, "storage-2", "/readyz")
        assert unready["reasons"] == [f"partition 1 is not open: {why_not['1']}"]
        load.await_commits()
        output = run_printed_command(finding["command"])
        wait_until(f"the doctor reports nothing; {output}", lambda: not run_doctor(*doctor_options))
        load.await_commits()
    assert log.read_text(encoding="utf-8").count("storage.files_replaced") == before + 1
    shutil.rmtree(cluster.directory / "storage-2" / "moved", ignore_errors=True)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()


@pytest.mark.slow
def test_a_storage_ends_if_its_directory_is_deleted_and_an_empty_storage_replaces_it(
    scenario: Scenario,
):
    cluster, storage = scenario.cluster, member_address(scenario.cluster, "storage-2")
    with scenario.load() as load:
        load.await_commits()
        delete(cluster.directory / "storage-2")
        load.await_commits()
        wait_until("the storage has ended", lambda: cluster.member("storage-2").process() is None)
        log = cluster.log_path("storage-2").read_text(encoding="utf-8")
        assert "waltz-storage.ctl: the file was deleted or replaced while this process" in log
        replace = f"cluster replace-storage {storage} {storage}"
        with pytest.raises(Unreachable, match=rf"(?s)storage-2 ended while .*{replace}"):
            cluster.up()
        words = ("replace-storage", storage, storage)
        waited = run_failing(cluster, *words, "--timeout-s", "5")
        last = cluster.partition_count - 1
        assert f"at {storage}, which then gets replicas of partitions 0-{last}" in waited
        cluster.up()
        assert "cluster add-replica" in run_successful(cluster, *words)["summary"]
        run_successful(cluster, "add-replica", "all", storage)
        load.await_commits()
    wait_until(
        "the doctor reports nothing", lambda: not run_doctor(*remote_options(cluster.connect))
    )
    check_replicas_equal(scenario)
    scenario.check_replicas_equal()
    scenario.check_outcomes_against_log()
