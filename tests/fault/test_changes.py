"""Commands add and remove storages and replicas under load; no append gets a wrong outcome.

The tests build on one another: each test leaves a healthy cluster.
"""

import pytest

from tests.fault.cluster_commands import (
    admin_port_arguments,
    assigned_replicas,
    check_replicas_equal,
    member_address,
    run_failing,
    run_successful,
    start_new_storage,
)
from tests.fault.doctor import remote_options, run_doctor
from tests.fault.load import Scenario, read_segment_files, show_cluster, show_partitions, wait_until

pytestmark = pytest.mark.fault


def storages_of(scenario: Scenario) -> set[str]:
    """Return the storages of the cluster."""
    found = show_cluster(scenario.cluster)["storages"]
    assert isinstance(found, dict)
    return set(found)


def check_nothing_is_wrong(scenario: Scenario) -> None:
    """Wait until the doctor reports nothing, as after every operation on a healthy cluster."""
    words = remote_options(scenario.cluster.connect)
    wait_until("the doctor reports nothing", lambda: not run_doctor(*words))


def test_the_four_recovery_examples_work_while_writes_continue(scenario: Scenario):
    cluster = scenario.cluster
    d, e = start_new_storage(cluster), start_new_storage(cluster)
    usual = assigned_replicas(cluster)[0]
    with scenario.load() as load:
        load.await_commits()
        assert (
            run_successful(
                cluster, "add-storage", d, "--group", "0", *admin_port_arguments(cluster, d)
            )["group"]
            == 0
        )
        run_successful(cluster, "add-storage", e, "--group", "1", *admin_port_arguments(cluster, e))
        run_successful(cluster, "add-replica", "0", d)
        assert assigned_replicas(cluster)[0] == usual | {d}
        load.await_commits()
        run_successful(cluster, "remove-replica", "0", d)
        assert assigned_replicas(cluster)[0] == usual
        assert not read_segment_files(cluster, "storage-4")
        check_nothing_is_wrong(scenario)
        steps = run_successful(cluster, "add-replica", "0", d, e)["steps"]
        assert steps == [f"partition 0: +{d}", f"partition 0: +{e}"]
        load.await_commits()
        assert run_successful(cluster, "verify") == {"passed": True, "findings": []}
        steps = run_successful(cluster, "remove-replica", "0", d, e)["steps"]
        assert steps == [f"partition 0: -{d}", f"partition 0: -{e}"]
        load.await_commits()
    check_nothing_is_wrong(scenario)
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()
    assert "would remove all replicas of partition 0" in run_failing(
        cluster, "remove-replica", "0", *sorted(usual)
    )
    assert "is not a storage of this cluster" in run_failing(
        cluster, "add-replica", "0", "127.0.0.1:1"
    )


def test_the_log_continues_when_one_of_three_groups_of_storages_is_lost(scenario: Scenario):
    cluster = scenario.cluster
    first, second, third = (member_address(cluster, f"storage-{each}") for each in (1, 2, 3))
    d, e = (member_address(cluster, f"storage-{each}") for each in (4, 5))
    groups = {first: 0, d: 0, second: 1, e: 1, third: 2}
    assert storages_of(scenario) == set(groups)
    with scenario.load() as load:
        load.await_commits()
        assert run_successful(cluster, "auto-assign")["changed"]
        for assigned in assigned_replicas(cluster).values():
            assert sorted(groups[each] for each in assigned) == [0, 1, 2]
        check_nothing_is_wrong(scenario)
        for name in ("storage-1", "storage-4"):
            cluster.kill(name)
        load.await_commits()
        for name in ("storage-1", "storage-4"):
            cluster.start(name)
        load.await_commits()
        wait_until(
            "all replicas are in sync",
            lambda: all(len(each["engaged"]) == 3 for each in show_partitions(cluster).values()),
        )
        run_successful(cluster, "remove-storage", d)
        run_successful(cluster, "remove-storage", e)
        load.await_commits()
    assert storages_of(scenario) == {first, second, third}
    check_nothing_is_wrong(scenario)
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()


def test_a_dead_storage_is_replaced_by_an_empty_one(scenario: Scenario):
    cluster = scenario.cluster
    dead, fresh = member_address(cluster, "storage-3"), start_new_storage(cluster)
    with scenario.load() as load:
        load.await_commits()
        cluster.kill("storage-3")
        load.await_commits()
        result = run_successful(
            cluster, "replace-storage", dead, fresh, *admin_port_arguments(cluster, fresh)
        )
        assert result["moved"] == cluster.partition_count
        load.await_commits()
        assert storages_of(scenario) == {*(storages_of(scenario) - {dead}), fresh}
        # The cluster continues after it has lost another storage, so the new storage is in the
        # quorum.
        cluster.kill("storage-2")
        load.await_commits()
        cluster.start("storage-2")
        load.await_commits()
    check_nothing_is_wrong(scenario)
    check_replicas_equal(scenario)
    scenario.check_outcomes_against_log()


def test_a_server_owns_all_partitions_while_it_is_their_preferred_server(scenario: Scenario):
    cluster = scenario.cluster
    one = member_address(cluster, "server-1")
    with scenario.load() as load:
        load.await_commits()
        assert run_successful(cluster, "prefer", "all", one)["owns"] == [0, 1, 2, 3]
        load.await_commits()
        check_nothing_is_wrong(scenario)
        assert len(run_successful(cluster, "unprefer", "0-3", one)["owns"]) == 2
        load.await_commits()
    check_nothing_is_wrong(scenario)
    scenario.check_outcomes_against_log()
    assert "no server is registered at 127.0.0.1:1" in run_failing(
        cluster, "prefer", "0", "127.0.0.1:1"
    )


def test_every_change_has_an_audit_entry(scenario: Scenario):
    result = run_successful(scenario.cluster, "audit")
    subcommands = [each["command"].split()[1] for each in result]
    for subcommand in ("add-storage", "add-replica", "remove-storage", "replace-storage", "prefer"):
        assert subcommand in subcommands
    assert "verify" not in subcommands
    outcomes = {each["outcome"].split(":")[0] for each in result}
    assert outcomes == {"done", "failed"}
    assert all("@" in each["user"] and each["ended_ms"] >= each["begun_ms"] for each in result)
