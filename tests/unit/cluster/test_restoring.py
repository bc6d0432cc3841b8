"""The nodes of a restored cluster: first IDs of partitions, IDs, and writes."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.loops import run_on_virtual_loop
from tests.unit.cluster.test_backup import ACCESS, BACKUP, KEY, manifest_of
from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.cluster.change.backup import PartitionBackup
from waltz_core.cluster.change.creation import STEP_BYTES_MAX, NewCluster, NewStorage
from waltz_core.cluster.change.restoring import restored_cluster, restoring_steps
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.assignment import assign_partitions
from waltz_core.cluster.write_registry import TaskState, WriteState, WriteWithTasks
from waltz_core.cluster.znodes.interface import NO_NODE
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionAssignment,
    ServerDescriptor,
)
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.replication.session_recovery import HistoryOrigin, history_origin_of

NEW_KEY = UUID(int=9)
CLIENT_KEY = b"k" * 32
ARCHIVED_END = ArchivedMark(7, b"c" * 16, 5, 0, 6, "m2")
ARCHIVED_ENDS = {0: ARCHIVED_END, 1: None}
CLOCK_ID = 1_000
ROOT = "/w"
NEW_CLUSTER = NewCluster("shop", 2, NEW_KEY, (NewStorage("a:1", 2, 0),))


async def restore_cluster(backup=BACKUP, ends=None, ids=CLOCK_ID, zookeeper=None):
    zookeeper = zookeeper or MemoryZooKeeper(asyncio.Event)
    coordinator = Coordinator(zookeeper.session(), ROOT)
    cluster = restored_cluster(backup, NEW_KEY.bytes, ends or ARCHIVED_ENDS, ids, CLIENT_KEY)
    await coordinator.create_restored_cluster(NEW_CLUSTER, cluster)
    return coordinator


@run_on_virtual_loop
async def test_restored_logs_begin_at_their_archived_ends_in_later_sessions_and_generations():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    coordinator = await restore_cluster(zookeeper=zookeeper)
    cluster = await coordinator.read_cluster()
    assert (cluster.params.name, cluster.store.cluster_key) == ("shop", NEW_KEY)
    for number, end in ARCHIVED_ENDS.items():
        view = await coordinator.read_partition(number)
        assert view.marker.state is MarkerState.NEW
        assert view.marker.archived == end
        assert (view.metadata.session_id, view.metadata.generation) == (CLOCK_ID, CLOCK_ID)
        assert history_origin_of(view.metadata, view.marker) is HistoryOrigin.NEW
    before = PartitionAssignment.from_bytes(zookeeper.dump()[f"{ROOT}/serverDescriptors"])
    server = ServerDescriptor(1, "h", 1)
    after = assign_partitions(before, {1: server}, cversion=1, partition_count=2)
    assert after.servers[1] == {0: CLOCK_ID + 1, 1: CLOCK_ID + 1}
    assert await coordinator.next_client_id() == CLOCK_ID + 1
    assert await coordinator.issued_ids.allocate_id() == FIRST_ISSUED_ID + CLOCK_ID
    assert (await coordinator.read_restore_sources()).includes(KEY.hex, {0: 7, 1: -1})
    assert not (await coordinator.read_restore_sources()).includes(KEY.hex, {0: 8})


@run_on_virtual_loop
async def test_counters_continue_from_the_backup_if_they_are_above_the_clock():
    coordinator = await restore_cluster(ids=1)
    view = await coordinator.read_partition(0)
    assert (view.metadata.session_id, view.metadata.generation) == (61, 4)
    assert await coordinator.next_client_id() == 42
    later = replace(BACKUP, issued_client_id=FIRST_ISSUED_ID + 50)
    assert (
        await (await restore_cluster(later, ids=1)).issued_ids.allocate_id() == FIRST_ISSUED_ID + 51
    )


@run_on_virtual_loop
async def test_permissions_are_restored_with_their_revision_and_a_new_client_key():
    """Client IDs issued after the backup have proofs of the old key, and can be issued again."""
    coordinator = await restore_cluster(replace(BACKUP, permissions=ACCESS))
    assert await coordinator.permissions.read_existing() == replace(ACCESS, client_key=CLIENT_KEY)
    assert await (await restore_cluster()).permissions.read() is None


@run_on_virtual_loop
async def test_writes_are_restored_with_their_tasks():
    coordinator = await restore_cluster()
    assert await coordinator.writes.read_all() == dict(BACKUP.writes)


@run_on_virtual_loop
async def test_a_write_after_the_restored_mark_becomes_unfinished():
    removing = WriteWithTasks(WriteState({0: 6}, 0, {}), {})
    writes = {**BACKUP.writes, "removing": removing}
    backup = replace(BACKUP, writes=writes)
    coordinator = await restore_cluster(backup, {0: ARCHIVED_END._replace(last=2), 1: None})
    stored = await coordinator.writes.read_all()
    assert stored["monday"].state == WriteState({0: 2}, 1_000)
    assert stored["monday"].tasks == BACKUP.writes["monday"].tasks
    assert stored["removing"].state == WriteState({0: 2}, 0, {})


def test_a_cluster_restored_with_its_old_key_is_not_listed_as_a_source():
    cluster = restored_cluster(BACKUP, KEY.bytes, ARCHIVED_ENDS, CLOCK_ID, CLIENT_KEY)
    assert cluster.restore_sources == BACKUP.restore_sources


@pytest.mark.parametrize("task_count", [3, 200])
def test_the_root_znode_gets_its_data_last_and_the_size_of_each_step_is_limited(task_count):
    task = TaskState(5, 2, tuple(f"run-{number:030}" for number in range(100)))
    writes = {"w": WriteWithTasks(WriteState({}, 1), dict.fromkeys(range(task_count), task))}
    partitions = tuple(
        PartitionBackup(7, 60, 3, manifest_of(partition=partition)) for partition in range(2)
    )
    backup = replace(BACKUP, writes=writes, partitions=partitions)
    cluster = restored_cluster(
        backup, NEW_KEY.bytes, {0: ARCHIVED_END, 1: ARCHIVED_END}, CLOCK_ID, CLIENT_KEY
    )
    steps = restoring_steps(ClusterPaths(ROOT), NEW_CLUSTER, cluster, root_version=NO_NODE)
    assert len(steps) == (1 if task_count == 3 else 2)
    for step in steps:
        assert sum(len(each.path) + len(each.data or b"") for each in step) <= STEP_BYTES_MAX
    assert steps[-1][-1].path == ROOT
