"""Reading and following nodes: what is said of a missing one, and what a follower lives through."""

import asyncio

import pytest

from tests.cluster_contract import Inbox, running
from waltz_core import errors
from waltz_core.cluster.nodes import model
from waltz_core.cluster.nodes.node_access import ClusterNodes, decode_node
from waltz_core.cluster.nodes.znodes import CreateNode, Node, NodeStat, Set
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault

ROOT = "/w"


def two_views():
    """One ZooKeeper through two sessions."""
    zookeeper = MemoryZooKeeper(asyncio.Event)
    return zookeeper, ClusterNodes(zookeeper.session(), ROOT), zookeeper.session()


def test_a_missing_node_is_a_missing_cluster():
    async def run():
        _, nodes, _ = two_views()
        assert nodes.where == "memory:1/w"
        for read in (nodes.require(ROOT), nodes.read(ROOT, model.ClusterParams.from_bytes)):
            with pytest.raises(
                errors.BadConfig, match=r"no cluster at root /w of ZooKeeper memory:1"
            ):
                await read

    asyncio.run(run())


def test_a_node_is_read_and_decoded():
    async def run():
        _, nodes, writer = two_views()
        params = model.ClusterParams("payments", 4)
        await writer.write([CreateNode(ROOT, params.to_bytes())])
        assert (await nodes.require(ROOT)).data == params.to_bytes()
        assert await nodes.read(ROOT, model.ClusterParams.from_bytes) == params

    asyncio.run(run())


def test_bytes_that_cannot_be_decoded_are_reported_with_their_path():
    node = Node(b"\x01", NodeStat(0, 0))
    with pytest.raises(errors.BadFormat, match=r"^/w/x: "):
        decode_node("/w/x", node, model.ClusterParams.from_bytes)
    assert decode_node("/w/x", node, bytes.hex) == "01"


def test_missing_nodes_are_made_parents_first_and_others_left_alone():
    async def run():
        zookeeper, nodes, writer = two_views()
        await writer.write([CreateNode("/w"), CreateNode("/w/a", b"kept")])
        for _ in range(2):
            await nodes.ensure(["/w", "/w/a", "/w/b", "/w/b/c"])
        assert zookeeper.dump() == {
            "/": b"",
            "/w": b"",
            "/w/a": b"kept",
            "/w/b": b"",
            "/w/b/c": b"",
        }

    asyncio.run(run())


def test_a_process_quicker_is_no_error():
    async def run():
        zookeeper, nodes, writer = two_views()
        whole = nodes.znodes.get

        async def overtaken(path, signal=None):
            found = await whole(path, signal)
            await writer.write([CreateNode(path, b"theirs")])
            return found

        nodes.znodes.get = overtaken
        await nodes.ensure(["/w"])
        assert zookeeper.dump()["/w"] == b"theirs"

    asyncio.run(run())


class Looks:
    """Looks at one node, and can be made to fail."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.seen = Inbox()
        self.raises = []
        self.count = 0

    async def __call__(self, signal):
        self.count += 1
        if self.raises:
            error = self.raises.pop(0)
            self.seen(type(error))
            raise error
        node = await self.nodes.znodes.get(ROOT, signal)
        self.seen(node and node.data)

    async def until(self, value):
        return await self.seen.until(lambda found: found == value)


def test_a_follower_looks_at_once_and_after_each_change_and_no_more():
    async def run():
        _, nodes, writer = two_views()
        looks = Looks(nodes)
        async with running(nodes.follow(looks)):
            await looks.until(None)
            await writer.write([CreateNode(ROOT, b"1")])
            await looks.until(b"1")
            await writer.write([CreateNode("/other")])
            await writer.write([Set(ROOT, b"2", 0)])
            await looks.until(b"2")
        assert looks.seen.all == [None, b"1", b"2"]
        await writer.write([Set(ROOT, b"3", 1)])
        assert looks.seen.all[-1] == b"2"

    asyncio.run(run())


def test_a_follower_outlives_lost_connections_and_sessions():
    async def run():
        _, nodes, writer = two_views()
        await writer.write([CreateNode(ROOT, b"1")])
        looks = Looks(nodes)
        async with running(nodes.follow(looks)):
            await looks.until(b"1")
            for end in (nodes.znodes.suspend, nodes.znodes.expire):
                end()
                version = (await writer.get(ROOT)).stat.version
                await writer.write([Set(ROOT, end.__name__.encode(), version)])
                nodes.znodes.resume()
                await looks.until(end.__name__.encode())

    asyncio.run(run())


def test_a_follower_waits_after_a_conflict_and_looks_again_after_an_unknown_outcome():
    async def run():
        _, nodes, writer = two_views()
        looks = Looks(nodes)
        looks.raises = [errors.CoordinatorOutcomeUnknown("?"), errors.CoordinatorConflict("!")]
        async with running(nodes.follow(looks)):
            await looks.until(errors.CoordinatorConflict)
            for _ in range(5):
                await asyncio.sleep(0)
            # The unknown outcome was looked at again by itself; the conflict waits for a signal.
            assert looks.count == 2
            nodes.znodes.suspend()
            nodes.znodes.resume()
            await looks.until(None)
        await writer.write([CreateNode(ROOT)])

    asyncio.run(run())


def test_an_error_that_no_retry_repairs_ends_a_follower_and_its_signal():
    async def run():
        _, nodes, _ = two_views()
        looks = Looks(nodes)
        looks.raises = [errors.BadFormat("/w: rotten")]
        with pytest.raises(errors.BadFormat, match="rotten"):
            await nodes.follow(looks)
        assert looks.count == 1
        assert nodes.znodes._signals == []

    asyncio.run(run())


def test_an_unknown_write_inside_a_look_is_looked_at_again():
    async def run():
        zookeeper, nodes, _ = two_views()
        done = Inbox()

        async def look(signal):
            if await nodes.znodes.get(ROOT, signal) is None:
                await nodes.znodes.write([CreateNode(ROOT, b"made")])
            done(zookeeper.dump().get(ROOT))

        nodes.znodes.faults = [WriteFault.REQUEST_LOST, WriteFault.REPLY_LOST]
        async with running(nodes.follow(look)):
            await done.until(lambda found: found == b"made")
        assert len(done.all) == 1

    asyncio.run(run())
