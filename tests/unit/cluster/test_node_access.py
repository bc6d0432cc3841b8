"""`ClusterNodes`: reads of missing nodes, and following a node through changes and failures."""

import asyncio

import pytest

from tests.cluster_contract import CallbackRecorder, run_meanwhile
from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode, SetNode
from waltz_core.cluster.znodes.node_access import ClusterNodes
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper

ROOT = "/w"


def two_views():
    """Return a ZooKeeper, its nodes in one session, and a second session."""
    zookeeper = MemoryZooKeeper(asyncio.Event)
    return zookeeper, ClusterNodes(zookeeper.session(), ROOT), zookeeper.session()


@run_on_virtual_loop
async def test_a_missing_root_node_is_reported_as_a_missing_cluster():
    _, nodes, _ = two_views()
    assert nodes.connect_string == "memory:1/w"
    for read in (nodes.get_required(ROOT), nodes.read(ROOT, model.ClusterParams.from_bytes)):
        with pytest.raises(errors.BadConfig, match="is no cluster at /w of ZooKeeper memory:1"):
            await read


@run_on_virtual_loop
async def test_a_node_that_another_process_has_created_is_not_an_error():
    zookeeper, nodes, writer = two_views()
    whole = nodes.znodes.get

    async def create_first(path, signal=None):
        found = await whole(path, signal)
        await writer.write([CreateNode(path, b"theirs")])
        return found

    nodes.znodes.get = create_first
    await nodes.create_missing(["/w"])
    assert zookeeper.dump()["/w"] == b"theirs"


class NodeReader:
    """Reads one node; raises the errors in `raises` first."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.seen = CallbackRecorder()
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

    async def wait_for(self, value):
        return await self.seen.wait_for(lambda found: found == value)


@run_on_virtual_loop
async def test_a_followed_node_is_read_at_the_start_and_once_after_each_change():
    _, nodes, writer = two_views()
    reader = NodeReader(nodes)
    async with run_meanwhile(nodes.follow(reader)):
        await reader.wait_for(None)
        await writer.write([CreateNode(ROOT, b"1")])
        await reader.wait_for(b"1")
        await writer.write([CreateNode("/other")])
        await writer.write([SetNode(ROOT, b"2", 0)])
        await reader.wait_for(b"2")
    assert reader.seen.values == [None, b"1", b"2"]
    await writer.write([SetNode(ROOT, b"3", 1)])
    assert reader.seen.values[-1] == b"2"


@run_on_virtual_loop
async def test_a_read_of_a_followed_node_is_repeated_at_once_only_after_an_unknown_outcome():
    _, nodes, writer = two_views()
    reader = NodeReader(nodes)
    reader.raises = [errors.CoordinatorOutcomeUnknown("?"), errors.CoordinatorConflict("!")]
    async with run_meanwhile(nodes.follow(reader)):
        await reader.wait_for(errors.CoordinatorConflict)
        for _ in range(5):
            await asyncio.sleep(0)
        # After the unknown outcome the follower has read again; after the conflict it waits.
        assert reader.count == 2
        nodes.znodes.suspend()
        nodes.znodes.resume()
        await reader.wait_for(None)
    await writer.write([CreateNode(ROOT)])


@run_on_virtual_loop
async def test_after_a_permanent_error_a_node_is_not_followed_and_its_signal_is_removed():
    _, nodes, _ = two_views()
    reader = NodeReader(nodes)
    reader.raises = [errors.BadFormat("/w: rotten")]
    with pytest.raises(errors.BadFormat, match="rotten"):
        await nodes.follow(reader)
    assert reader.count == 1
    assert nodes.znodes._signals == []
