"""Clusters are found at any depth, and deleted completely despite concurrent changes."""

import asyncio

import pytest

from tests.cluster_contract import CLUSTER_KEY
from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.znodes import tree
from waltz_core.cluster.znodes.interface import CreateNode
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault


class Scenario:
    """A ZooKeeper with clusters, and a session for the writes of tests."""

    def __init__(self):
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.session = self.zookeeper.session()

    async def cluster(self, root, name="w", partition_count=3):
        coordinator = self.zookeeper.coordinator(root)
        await coordinator.create_cluster(NewCluster(name, partition_count, CLUSTER_KEY))
        return coordinator


@pytest.fixture
def scenario():
    return Scenario()


@run_on_virtual_loop
async def test_clusters_are_found_only_below_the_given_path(scenario):
    for root in ("/a/one", "/a/two", "/b"):
        await scenario.cluster(root, root[-1])
    await scenario.cluster("/zookeeper")  # its own nodes are ignored
    await scenario.session.write([CreateNode("/a/other", b"no cluster")])

    async def roots(below):
        return [
            find_cluster.root for find_cluster in await tree.find_clusters(scenario.session, below)
        ]

    assert await roots("/") == ["/a/one", "/a/two", "/b"]
    assert await roots("/a") == ["/a/one", "/a/two"]
    assert await roots("/b") == ["/b"]
    assert await roots("/a/other") == await roots("/none") == []
    (cluster,) = await tree.find_clusters(scenario.session, "/b")
    assert (cluster.params.name, cluster.params.partition_count) == ("b", 3)


@run_on_virtual_loop
async def test_find_clusters_rejects_a_path_with_too_many_znodes(scenario, monkeypatch):
    monkeypatch.setattr(tree, "NODES_MAX", 10)
    await scenario.session.write([CreateNode(f"/n{number}") for number in range(9)])
    assert await tree.find_clusters(scenario.session, "/") == []
    await scenario.session.write([CreateNode("/n9")])
    with pytest.raises(errors.BadRequest, match="more than 10 znodes below /"):
        await tree.find_clusters(scenario.session, "/")


@run_on_virtual_loop
async def test_a_deleted_cluster_leaves_no_znodes_and_its_neighbors_stay(scenario):
    await scenario.cluster("/a/one")
    await scenario.cluster("/a/two")
    kept = {path for path in scenario.zookeeper.dump() if not path.startswith("/a/two")}
    before = len(scenario.zookeeper.dump())
    progress = []
    count = await tree.delete_tree(scenario.session, "/a/two", lambda *each: progress.append(each))
    assert set(scenario.zookeeper.dump()) == kept
    assert count == before - len(kept)
    assert progress[0] == (0, count)
    assert await tree.delete_tree(scenario.session, "/a/two") == 0
    await scenario.cluster("/a/two")


@run_on_virtual_loop
async def test_large_clusters_are_deleted_in_steps(scenario, monkeypatch):
    monkeypatch.setattr(tree, "STEP_NODES_MAX", 10)
    await scenario.cluster("/w", partition_count=15)
    steps = []
    count = await tree.delete_tree(scenario.session, "/w", lambda *each: steps.append(each))
    assert 20 < count < 30
    assert [deleted_count for deleted_count, _ in steps] == [0, 10, 20]
    assert {of for _, of in steps} == {count}
    assert set(scenario.zookeeper.dump()) == {"/"}


@pytest.mark.parametrize("fault", list(WriteFault))
@pytest.mark.parametrize("at", [0, 1])
@run_on_virtual_loop
async def test_a_write_of_unknown_outcome_is_read_again(scenario, fault, at):
    await scenario.cluster("/w")
    scenario.session.faults = [None] * at + [fault]
    await tree.delete_tree(scenario.session, "/w")
    assert set(scenario.zookeeper.dump()) == {"/"}


@run_on_virtual_loop
async def test_nodes_created_during_the_deletion_are_deleted(scenario):
    await scenario.cluster("/w")
    other = scenario.zookeeper.session()
    new = [CreateNode("/w/new"), CreateNode("/w/new/deep")]

    class ConcurrentWriter:
        def __getattr__(self, name):
            return getattr(scenario.session, name)

        async def write(self, operations):
            if new:
                await other.write([new.pop(0)])
            return await scenario.session.write(operations)

    await tree.delete_tree(ConcurrentWriter(), "/w")
    assert new == []
    assert set(scenario.zookeeper.dump()) == {"/"}


@run_on_virtual_loop
async def test_deleting_a_cluster_under_constant_writes_fails_but_leaves_no_cluster(scenario):
    coordinator = await scenario.cluster("/w")
    other, numbers = scenario.zookeeper.session(), iter(range(1_000))

    class ConcurrentWriter:
        def __getattr__(self, name):
            return getattr(scenario.session, name)

        async def write(self, operations):
            if len(operations) > 1:
                await other.write([CreateNode(f"/w/n{next(numbers)}")])
            return await scenario.session.write(operations)

    with pytest.raises(
        errors.CoordinatorConflict, match="deleted completely, because processes still write to it"
    ):
        await tree.delete_tree(ConcurrentWriter(), "/w")
    assert scenario.zookeeper.dump()["/w"] == b""
    with pytest.raises(errors.BadConfig, match="is no cluster at /w"):
        await coordinator.read_cluster()


@run_on_virtual_loop
async def test_remains_of_a_cluster_are_deleted_and_other_clusters_stay(scenario):
    await scenario.session.write(
        [CreateNode("/w"), CreateNode("/w/store"), CreateNode("/w/store/partition")]
    )
    await scenario.session.write([CreateNode("/a"), CreateNode("/a/ids"), CreateNode("/a/topics")])
    await scenario.session.write([CreateNode("/b", b"x")])
    assert await tree.delete_tree(scenario.session, "/w") == 3
    with pytest.raises(
        errors.BadRequest, match="expected a cluster or its remains, found a znode t"
    ):
        await tree.delete_tree(scenario.session, "/a")
    with pytest.raises(errors.BadRequest, match="1 bytes of another program"):
        await tree.delete_tree(scenario.session, "/b")
    assert set(scenario.zookeeper.dump()) == {"/", "/a", "/a/ids", "/a/topics", "/b"}


@run_on_virtual_loop
async def test_a_cluster_with_another_cluster_below_its_root_is_not_deleted(scenario):
    await scenario.cluster("/w")
    await scenario.cluster("/w/team/payments", "payments")
    before = scenario.zookeeper.dump()
    with pytest.raises(
        errors.BadRequest, match=r"payments at /w/team/payments\. Hint: delete that"
    ):
        await tree.delete_tree(scenario.session, "/w")
    assert scenario.zookeeper.dump() == before
    await tree.delete_tree(scenario.session, "/w/team/payments")
    await tree.delete_tree(scenario.session, "/w")
    assert set(scenario.zookeeper.dump()) == {"/"}


def test_the_deletion_knows_all_names_of_znodes_below_a_root():
    paths = ClusterPaths("/r")
    below = [paths.ids, paths.servers, paths.store, paths.extensions]
    assert [path.removeprefix("/r/") for path in below] == list(tree.TOP_NAMES)
