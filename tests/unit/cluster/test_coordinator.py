"""The coordinator over memory: the stories of the contract, and what faults on request show."""

import asyncio

import pytest

from tests.cluster_contract import KEY, STORIES, Inbox, created, descriptor, member, owned, running
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.nodes import model
from waltz_core.cluster.nodes.znodes import Set
from waltz_core.cluster.zookeeper.zookeeper_in_memory import (
    MemorySession,
    MemoryZooKeeper,
    WriteFault,
)

ROOT = "/waltz/payments"


class MemoryWorld:
    def __init__(self) -> None:
        self.zookeeper = MemoryZooKeeper(asyncio.Event)

    async def znodes(self) -> MemorySession:
        return self.zookeeper.session()

    async def expire(self, znodes: MemorySession) -> None:
        znodes.expire()
        znodes.resume()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_story(story):
    asyncio.run(story(MemoryWorld(), ROOT))


FAULTS = pytest.mark.parametrize("fault", WriteFault)


@FAULTS
def test_an_id_with_an_unknown_fate_is_not_given_out(fault):
    async def story():
        world = MemoryWorld()
        session = await world.znodes()
        await created(world, ROOT)
        coordinator = Coordinator(session, ROOT)
        assert await coordinator.next_client_id() == 1
        session.faults += [fault, fault]
        skipped = 2 if fault is WriteFault.REPLY_LOST else 0
        assert await coordinator.next_client_id() == 2 + skipped
        assert await coordinator.next_client_id() == 3 + skipped

    asyncio.run(story())


@FAULTS
def test_a_partition_write_of_unknown_outcome_is_reported(fault):
    async def story():
        world = MemoryWorld()
        await created(world, ROOT)
        session = await world.znodes()
        coordinator = Coordinator(session, ROOT)
        before = await coordinator.read_partition(0)
        metadata = model.PartitionMetadata(1, 0, {})
        marker = model.PartitionMarker(model.MarkerState.OPEN, 0, bytes(range(16)))
        await session.sync()
        # Creating the missing parents is no part of it: they exist.
        session.faults.append(fault)
        with pytest.raises(errors.CoordinatorOutcomeUnknown):
            await coordinator.write_partition(0, metadata, marker, before.versions)
        after = await coordinator.read_partition(0)
        if fault is WriteFault.REPLY_LOST:
            assert after == (metadata, 1, marker, 1)
        else:
            assert after == before

    asyncio.run(story())


@FAULTS
def test_a_storage_registers_through_faults(fault):
    async def story():
        world = MemoryWorld()
        await created(world, ROOT)
        session = await world.znodes()
        session.faults += [fault, fault]
        coordinator = Coordinator(session, ROOT)
        assert await coordinator.register_storage_id("h:1", KEY) == KEY
        assert await coordinator.read_storage_ids() == {"h:1": KEY}

    asyncio.run(story())


@FAULTS
def test_a_server_registers_once_through_faults(fault):
    async def story():
        world = MemoryWorld()
        await created(world, ROOT)
        session = await world.znodes()
        session.faults += [fault, fault, fault]
        coordinator = Coordinator(session, ROOT)
        await coordinator.register_server(descriptor(1))
        session.faults.clear()
        names = world.zookeeper.names(f"{ROOT}/serverDescriptors")
        assert names == ("s_0000000000",)
        session.faults += [fault, fault]
        await coordinator.unregister_server()
        assert world.zookeeper.names(f"{ROOT}/serverDescriptors") == ()

    asyncio.run(story())


def test_creation_whose_reply_is_lost_has_succeeded():
    async def story():
        world = MemoryWorld()
        session = await world.znodes()
        coordinator = Coordinator(session, "/flat")
        session.faults.append(WriteFault.REPLY_LOST)
        await coordinator.create_cluster(NewCluster("a", 3, KEY))
        assert (await coordinator.read_cluster()).params.partition_count == 3

    asyncio.run(story())


def test_creation_that_was_lost_is_reported_and_can_be_repeated():
    async def story():
        world = MemoryWorld()
        session = await world.znodes()
        coordinator = Coordinator(session, "/flat")
        session.faults.append(WriteFault.REQUEST_LOST)
        with pytest.raises(errors.CoordinatorOutcomeUnknown):
            await coordinator.create_cluster(NewCluster("a", 3, KEY))
        with pytest.raises(errors.BadConfig):
            await coordinator.read_cluster()
        await coordinator.create_cluster(NewCluster("a", 3, KEY))
        assert (await coordinator.read_cluster()).store.cluster_key == KEY

    asyncio.run(story())


def test_a_suspended_session_continues_where_it_was():
    async def story():
        world = MemoryWorld()
        client = await created(world, ROOT)
        session = await world.znodes()
        server = Coordinator(session, ROOT)
        at_server = Inbox()
        await server.register_server(descriptor(1))
        async with running(server.follow_servers(at_server)):
            await at_server.until(lambda view: list(view.servers) == [1])
            session.suspend()
            with pytest.raises(errors.CoordinatorUnavailable):
                await server.next_client_id()
            other = await member(world, ROOT)
            await other.register_server(descriptor(2))
            # The lead is away: no other server does its duty.
            assert not (await client.read_servers()).is_settled
            session.resume()
            view = await at_server.until(lambda view: len(view.servers) == 2)
            assert owned(view) == {0: (1, 1), 1: (1, 1), 2: (2, 2), 3: (2, 2)}

    asyncio.run(story())


def test_a_second_node_of_the_same_server_is_removed():
    async def story():
        world = MemoryWorld()
        session = await world.znodes()
        await created(world, ROOT)
        server = Coordinator(session, ROOT)
        twin = Coordinator(session, ROOT)
        await server.register_server(descriptor(1))
        path = f"{ROOT}/serverDescriptors/s_0000000000"
        await session.write([Set(path, descriptor(9).to_bytes(), 0)])
        await twin.register_server(descriptor(1))
        await session.write([Set(path, descriptor(1).to_bytes(), 1)])
        assert len(world.zookeeper.names(f"{ROOT}/serverDescriptors")) == 2
        inbox = Inbox()
        async with running(server.follow_servers(inbox)):
            await inbox.until(lambda view: view.is_settled)
        assert len(world.zookeeper.names(f"{ROOT}/serverDescriptors")) == 1

    asyncio.run(story())


def test_a_damaged_descriptor_ends_following_with_its_path():
    async def story():
        world = MemoryWorld()
        coordinator = await created(world, ROOT)
        await coordinator.register_server(descriptor(1))
        session = await world.znodes()
        await session.write([Set(f"{ROOT}/serverDescriptors/s_0000000000", b"\1", 0)])
        with pytest.raises(errors.BadFormat, match="serverDescriptors/s_0000000000"):
            await coordinator.follow_servers(Inbox())

    asyncio.run(story())


def test_cluster_and_store_must_have_as_many_partitions():
    async def story():
        world = MemoryWorld()
        coordinator = await created(world, ROOT)
        session = await world.znodes()
        await session.write([Set(f"{ROOT}/store", model.StoreParams(KEY, 5).to_bytes(), 0)])
        with pytest.raises(errors.BadFormat, match=r"has 4 partitions, .* has 5"):
            await coordinator.read_cluster()

    asyncio.run(story())


def test_ids_end_at_32_bits():
    async def story():
        world = MemoryWorld()
        coordinator = await created(world, ROOT)
        session = await world.znodes()
        await session.write([Set(f"{ROOT}/ids/client", model.encode_id(2**31 - 2), 0)])
        assert await coordinator.next_client_id() == 2**31 - 1
        with pytest.raises(errors.BadFormat, match="all 2147483647 ids"):
            await coordinator.next_client_id()

    asyncio.run(story())


def test_a_node_of_an_earlier_session_is_not_relied_on():
    async def story():
        world = MemoryWorld()
        client = await created(world, ROOT)
        earlier, session = await world.znodes(), await world.znodes()
        await Coordinator(earlier, ROOT).register_server(descriptor(1))
        server = Coordinator(session, ROOT)
        await server.register_server(descriptor(1))
        earlier.expire()
        assert world.zookeeper.names(f"{ROOT}/serverDescriptors") == ("s_0000000001",)
        assert list((await client.read_servers()).servers) == [1]

    asyncio.run(story())


def test_only_a_registered_lead_assigns():
    async def story():
        world = MemoryWorld()
        client = await created(world, ROOT)
        lead, second = await member(world, ROOT), await member(world, ROOT)
        await lead.register_server(descriptor(1))
        await second.register_server(descriptor(2))
        before = world.zookeeper.dump()
        at_client, at_second, at_lead = Inbox(), Inbox(), Inbox()
        async with running(client.follow_servers(at_client), second.follow_servers(at_second)):
            for _ in range(50):
                await asyncio.sleep(0)
            assert at_client.all == at_second.all == []
            assert world.zookeeper.dump() == before
            async with running(lead.follow_servers(at_lead)):
                await at_client.until(lambda view: view.is_settled)

    asyncio.run(story())


@FAULTS
def test_an_assignment_of_unknown_fate_is_looked_at_again(fault):
    async def story():
        world = MemoryWorld()
        await created(world, ROOT)
        session = await world.znodes()
        server = Coordinator(session, ROOT)
        await server.register_server(descriptor(1))
        session.faults.append(fault)
        inbox = Inbox()
        async with running(server.follow_servers(inbox)):
            await inbox.until(lambda view: view.is_settled)

    asyncio.run(story())


@pytest.mark.parametrize("read_number", [1, 2, 3])
def test_metadata_and_marker_are_read_as_a_pair(read_number):
    async def story():
        world = MemoryWorld()
        writer = await created(world, ROOT)
        metadata = model.PartitionMetadata(1, 0, {})
        marker = model.PartitionMarker(model.MarkerState.OPEN, 0, bytes(range(16)))
        before = await writer.read_partition(0)

        async def write() -> None:
            await writer.write_partition(0, metadata, marker, before.versions)

        # The reads are of the metadata, the marker, the metadata.
        reader = Interrupted(world.zookeeper, read_number, write)
        view = await Coordinator(reader, ROOT).read_partition(0)
        assert reader.read_count >= 3
        assert view == (metadata, 1, marker, 1)

    asyncio.run(story())


class Interrupted(MemorySession):
    """A session in which something else happens just before its n-th read."""

    def __init__(self, zookeeper, read_number, interruption):
        super().__init__(zookeeper)
        self.read_number, self.interruption = read_number, interruption
        self.read_count = 0

    async def get(self, path, signal=None):
        self.read_count += 1
        if self.read_count == self.read_number:
            await self.interruption()
        return await super().get(path, signal)
