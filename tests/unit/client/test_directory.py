"""A directory that is told where partitions are, a few of them at a time."""

import asyncio

from waltz_core.client.directory import ClusterInfo, FixedDirectory, Layout, Owner

CLUSTER = ClusterInfo("shop", bytes(16), 3)
LAYOUT = Layout("zk:2181/shop", CLUSTER, {0: ("a:1", 1), 2: ("b:2", 4)})


def test_a_task_is_told_of_its_own_partition_only():
    assert LAYOUT.of(2) == Layout("zk:2181/shop", CLUSTER, {2: ("b:2", 4)})
    assert LAYOUT.of(1) == Layout("zk:2181/shop", CLUSTER, {})


def test_what_later_tasks_are_told_is_learned_without_asking():
    directory = FixedDirectory(LAYOUT.of(0), connect_timeout_ms=1)
    directory.learn(LAYOUT.of(2))
    assert asyncio.run(directory.owner(2, after_failure=False)) == Owner("b:2", 4)


def test_what_is_known_is_not_unlearned():
    directory = FixedDirectory(LAYOUT, connect_timeout_ms=1)
    directory.learn(Layout("zk:2181/shop", CLUSTER, {0: ("gone:9", 1)}))
    assert directory.owners[0] == Owner("a:1", 1)
