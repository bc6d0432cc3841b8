"""The revisions that daemons publish: their bytes, their names, and lost sessions."""

import asyncio

import pytest

from tests.cluster_contract import CLUSTER_KEY
from tests.loops import run_on_virtual_loop
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.membership.applied_revisions import (
    decode_applied_revision,
    encode_applied_revision,
    server_node_name,
    storage_node_name,
)
from waltz_core.cluster.znodes.interface import SetNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.errors import BadFormat


def test_a_revision_survives_a_round_trip():
    assert decode_applied_revision(encode_applied_revision(17)) == 17


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"format":2,"revision":1}', b'{"format":1}', 100_000 * b"["]
    + [b'{"format":1,"revision":%s}' % each for each in (b"0", b"true", b"1.5", b'"1"')],
)
def test_invalid_bytes_are_rejected(data):
    with pytest.raises(BadFormat, match=r"applied revision of permissions(:| is not valid JSON:) "):
        decode_applied_revision(data)


def test_the_names_of_server_nodes_and_storage_nodes_have_different_prefixes():
    assert server_node_name(17) == "server-17"
    assert storage_node_name("[::1]:15280") == "storage-[::1]:15280"


@run_on_virtual_loop
async def test_an_unreadable_revision_is_left_out():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    one, two = zookeeper.coordinator("/w"), zookeeper.coordinator("/w")
    await one.create_cluster(NewCluster("w", 1, CLUSTER_KEY))
    assert await one.read_applied_revisions() == {}
    for each, name in ((one, "server-1"), (two, "server-2")):
        each.set_applied_revision(name, 3)
        await each._applied_revisions.publish()
    assert await one.read_applied_revisions() == {"server-1": 3, "server-2": 3}
    path = one.paths.applied_revision("server-2")
    found = await one._znodes.get(path)
    await one._znodes.write([SetNode(path, b"{}", found.stat.version)])
    assert await one.read_applied_revisions() == {"server-1": 3}
