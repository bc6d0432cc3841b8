"""The coordinator over ZooKeeper in memory: the scenarios of the contract, and faults."""

import asyncio

import pytest

from tests.cluster_contract import CLUSTER_KEY, SCENARIOS, create_cluster, server_descriptor
from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import SetNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import (
    MemorySession,
    MemoryZooKeeper,
    WriteFault,
)

ROOT = "/waltz/payments"
METADATA = model.PartitionMetadata(1, 0, {})
MARKER = model.PartitionMarker(model.MarkerState.OPEN, 0, bytes(range(16)))


class MemoryWorld:
    def __init__(self) -> None:
        self.zookeeper = MemoryZooKeeper(asyncio.Event)

    async def znodes(self) -> MemorySession:
        return self.zookeeper.session()

    async def expire(self, znodes: MemorySession) -> None:
        znodes.expire()
        znodes.resume()


@pytest.mark.parametrize("check_scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(check_scenario):
    asyncio.run(check_scenario(MemoryWorld(), ROOT))


FAULTS = pytest.mark.parametrize("fault", WriteFault)


async def with_cluster() -> tuple[MemoryWorld, MemorySession, Coordinator]:
    """Return a world with a cluster, a session in it, and the coordinator of this session."""
    world = MemoryWorld()
    await create_cluster(world, ROOT)
    session = await world.znodes()
    return world, session, Coordinator(session, ROOT)


@FAULTS
@run_on_virtual_loop
async def test_an_id_whose_write_has_an_unknown_outcome_is_not_used(fault):
    _, session, coordinator = await with_cluster()
    assert await coordinator.next_client_id() == 1
    session.faults += [fault, fault]
    skipped = 2 if fault is WriteFault.REPLY_LOST else 0
    assert await coordinator.next_client_id() == 2 + skipped
    assert await coordinator.next_client_id() == 3 + skipped


@FAULTS
@run_on_virtual_loop
async def test_a_partition_write_of_unknown_outcome_is_reported(fault):
    _, session, coordinator = await with_cluster()
    before = await coordinator.read_partition(0)
    # The parents exist, so that they need not be created.
    session.faults.append(fault)
    with pytest.raises(errors.CoordinatorOutcomeUnknown):
        await coordinator.write_partition(0, METADATA, MARKER, before.versions)
    after = await coordinator.read_partition(0)
    if fault is WriteFault.REPLY_LOST:
        assert after == (METADATA, 1, MARKER, 1)
    else:
        assert after == before


@FAULTS
@run_on_virtual_loop
async def test_a_storage_registers_despite_lost_requests_and_answers(fault):
    _, session, coordinator = await with_cluster()
    session.faults += [fault, fault]
    assert await coordinator.register_storage_id("h:1", CLUSTER_KEY) == CLUSTER_KEY
    assert await coordinator.read_storage_ids() == {"h:1": CLUSTER_KEY}


@FAULTS
@run_on_virtual_loop
async def test_a_creation_without_an_answer_has_succeeded_or_can_be_repeated(fault):
    session = await MemoryWorld().znodes()
    coordinator = Coordinator(session, "/flat")
    session.faults.append(fault)
    if fault is WriteFault.REQUEST_LOST:
        with pytest.raises(errors.CoordinatorOutcomeUnknown):
            await coordinator.create_cluster(NewCluster("a", 3, CLUSTER_KEY))
        with pytest.raises(errors.BadConfig):
            await coordinator.read_cluster()
    await coordinator.create_cluster(NewCluster("a", 3, CLUSTER_KEY))
    assert (await coordinator.read_cluster()).store.cluster_key == CLUSTER_KEY


@run_on_virtual_loop
async def test_cluster_and_store_must_have_the_same_number_of_partitions():
    _, session, coordinator = await with_cluster()
    await session.write([SetNode(f"{ROOT}/store", model.StoreParams(CLUSTER_KEY, 5).to_bytes(), 0)])
    with pytest.raises(errors.BadFormat, match=r"has 4 partitions, .* has 5"):
        await coordinator.read_cluster()


@run_on_virtual_loop
async def test_ids_above_32_bits_are_not_allocated():
    _, session, coordinator = await with_cluster()
    await session.write([SetNode(f"{ROOT}/ids/client", model.encode_id_counter(2**31 - 2), 0)])
    assert await coordinator.next_client_id() == 2**31 - 1
    with pytest.raises(errors.BadFormat, match="all IDs up to 2147483647 are allocated"):
        await coordinator.next_client_id()


@run_on_virtual_loop
async def test_a_node_of_an_earlier_session_is_not_trusted():
    world, earlier, earlier_coordinator = await with_cluster()
    await earlier_coordinator.register_server(server_descriptor(1))
    server = Coordinator(await world.znodes(), ROOT)
    await server.register_server(server_descriptor(1))
    earlier.expire()
    assert world.zookeeper.child_names(f"{ROOT}/serverDescriptors") == ("s_0000000001",)
    assert list((await server.read_servers()).servers) == [1]


@pytest.mark.parametrize("read_number", [1, 2, 3])
@run_on_virtual_loop
async def test_the_metadata_and_marker_of_a_partition_are_read_from_the_same_write(read_number):
    world, _, writer = await with_cluster()
    before = await writer.read_partition(0)

    async def write() -> None:
        await writer.write_partition(0, METADATA, MARKER, before.versions)

    # The coordinator reads the metadata, the marker, and the metadata again.
    reader = InterruptedSession(world.zookeeper, read_number, write)
    view = await Coordinator(reader, ROOT).read_partition(0)
    assert reader.read_count >= 3
    assert view == (METADATA, 1, MARKER, 1)


class InterruptedSession(MemorySession):
    """A session that calls `interruption` just before its n-th read."""

    def __init__(self, zookeeper, read_number, interruption):
        super().__init__(zookeeper)
        self.read_number, self.interruption = read_number, interruption
        self.read_count = 0

    async def get(self, path, signal=None):
        self.read_count += 1
        if self.read_count == self.read_number:
            await self.interruption()
        return await super().get(path, signal)
