"""The audit record has every change, also the creation and deletion of a cluster."""

import asyncio
import contextlib

import pytest

from tests.cluster_contract import CLUSTER_KEY
from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.administration.change_run import OUTCOME_INTERRUPTED, time_limit
from waltz_core.cli.change_commands import audit_change
from waltz_core.cluster.change.audit import OUTCOME_BEGUN, OUTCOME_DONE
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper

CLUSTER = NewCluster("w", 1, CLUSTER_KEY)


@pytest.fixture
def coordinator():
    return MemoryZooKeeper(asyncio.Event).coordinator("/w")


async def outcomes(coordinator):
    return [each.outcome for each in await coordinator.audit.read()]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, OUTCOME_DONE),
        (errors.BadRequest("expected more"), "failed: expected more"),
        (asyncio.CancelledError(), OUTCOME_INTERRUPTED),
    ],
)
@run_on_virtual_loop
async def test_a_change_has_an_audit_entry_while_it_runs_and_afterwards(
    coordinator, error, outcome
):
    await coordinator.create_cluster(CLUSTER)
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        async with audit_change(coordinator):
            assert await outcomes(coordinator) == [OUTCOME_BEGUN]
            if error:
                raise error
    assert await outcomes(coordinator) == [outcome]


@run_on_virtual_loop
async def test_a_created_cluster_has_an_audit_entry_of_its_creation(coordinator):
    async with audit_change(coordinator, may_create_cluster=True):
        await coordinator.create_cluster(CLUSTER)
    assert await outcomes(coordinator) == [OUTCOME_DONE]


@run_on_virtual_loop
async def test_an_audit_entry_does_not_recreate_a_deleted_cluster(coordinator):
    for creates in (False, True):
        await coordinator.create_cluster(CLUSTER)
        async with audit_change(coordinator, may_create_cluster=creates):
            await coordinator.delete_cluster(lambda _done, _count: None)
        with pytest.raises(errors.BadConfig, match="there is no cluster at /w"):
            await coordinator.read_cluster()
        assert await coordinator.audit.read() == []


@pytest.mark.parametrize(
    ("user", "sudo_user", "user_name"),
    [("root", "alice", "alice as root"), ("alice", None, "alice"), ("alice", "alice", "alice")],
)
@run_on_virtual_loop
async def test_the_audit_record_names_the_user_behind_sudo(
    coordinator, monkeypatch, user, sudo_user, user_name
):
    """Administrators who share a machine all run commands as root."""
    monkeypatch.setenv("LOGNAME", user)
    monkeypatch.delenv("SUDO_USER", raising=False)
    if sudo_user:
        monkeypatch.setenv("SUDO_USER", sudo_user)
    await coordinator.create_cluster(CLUSTER)
    async with audit_change(coordinator):
        (entry,) = await coordinator.audit.read()
    assert entry.user.rpartition("@")[0] == user_name


@run_on_virtual_loop
async def test_the_error_of_a_timed_out_command_names_the_cause():
    with pytest.raises(errors.Unavailable, match="It still waits for: a storage"):
        async with time_limit(0.01, lambda: "a storage"):
            await asyncio.Event().wait()
