"""Commands that change storages: rejected arguments, and the report for an empty storage."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from waltz_core.administration import replica_changes
from waltz_core.administration.change_run import ChangeRun
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.errors import BadConfig, Unreachable
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import WireProtocol

OLD_STORAGE = "127.0.0.1:1"
CLUSTER = NewCluster("w", 2, UUID(int=7), (NewStorage(OLD_STORAGE, 2, 0),), {OLD_STORAGE: (0, 1)})


async def run(change, protocol, address_name="address", **options):
    """Run a change on a cluster and a listener; return its answer and the storages."""
    coordinator = MemoryZooKeeper(asyncio.Event).coordinator("/w")
    await coordinator.create_cluster(CLUSTER)
    listener = await listen(protocol, "127.0.0.1", 0, lambda _link: None)
    try:
        options[address_name] = f"127.0.0.1:{listener.port}"
        try:
            result = await change(ChangeRun(coordinator), admin_port=None, **options)
        finally:
            stored = set((await coordinator.storages.read_layout()).assignment.partitions)
            assert stored - {options[address_name]} == {OLD_STORAGE}
    finally:
        await listener.close()
    return result, stored


@pytest.mark.parametrize("protocol", [WireProtocol.ADMIN, WireProtocol.CLIENT])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_port_without_a_storage_is_not_added(protocol, is_replaced):
    change = replica_changes.replace_storage if is_replaced else replica_changes.add_storage
    options = (
        {"address": OLD_STORAGE, "address_name": "successor"} if is_replaced else {"group": None}
    )
    expected = f"expected the port of a storage, found a '{protocol.listener_text}'"
    with pytest.raises(BadConfig, match=expected):
        asyncio.run(run(change, protocol, **options))


def test_a_storage_is_added():
    result, stored = asyncio.run(run(replica_changes.add_storage, WireProtocol.STORAGE, group=None))
    assert stored == {OLD_STORAGE, result["storage"]}


def test_a_storage_that_does_not_run_is_rejected_as_a_replacement():
    async def take_over():
        coordinator = MemoryZooKeeper(asyncio.Event).coordinator("/w")
        await coordinator.create_cluster(CLUSTER)
        command = ChangeRun(coordinator)
        with pytest.raises(Unreachable, match=r"storage 127.0.0.1:2 does not answer; nothing"):
            await replica_changes.replace_storage(
                command, address=OLD_STORAGE, successor="127.0.0.1:2", admin_port=None
            )
        return set((await coordinator.storages.read_layout()).assignment.partitions)

    assert asyncio.run(take_over()) == {OLD_STORAGE}


def test_a_replacement_storage_that_gets_no_replicas_is_reported():
    async def add_storage_back():
        coordinator = MemoryZooKeeper(asyncio.Event).coordinator("/w")
        listener = await listen(WireProtocol.STORAGE, "127.0.0.1", 0, lambda _link: None)
        empty = f"127.0.0.1:{listener.port}"
        storages = (*CLUSTER.storages, NewStorage(empty, 2, 1))
        replicas = {OLD_STORAGE: (0, 1), empty: ()}
        await coordinator.create_cluster(replace(CLUSTER, storages=storages, assignment=replicas))
        options = {"address": empty, "successor": empty, "admin_port": None}
        result = await replica_changes.replace_storage(ChangeRun(coordinator), **options)
        await listener.close()
        return result

    result = asyncio.run(add_storage_back())
    assert result["moved"] == 0
    assert "has no replicas, and every partition has" in result["summary"]
    assert "cluster add-replica" in result["summary"]
