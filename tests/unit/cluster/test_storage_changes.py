"""The storages of a cluster, and plans that run against an owner in memory."""

import asyncio
import contextlib
from uuid import UUID

import pytest

from tests.loops import run_on_virtual_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.cluster.change import replica_steps
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.change.replica_steps import ReplicaPlan
from waltz_core.cluster.change.storage_changes import CONCURRENT_PARTITIONS_MAX, StorageLayout
from waltz_core.cluster.coordinator import Coordinator, PartitionVersions
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import NO_NODE, SetNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper

ROOT = "/w"
A, B, C, D = (f"10.0.0.{n}:5280" for n in range(4))


class Cluster:
    """A cluster in memory with three storages in groups of their own."""

    def __init__(self, partition_count=2):
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.partition_count = partition_count
        self.coordinator = self.zookeeper.coordinator(ROOT)

    async def create(self):
        storages = tuple(NewStorage(each, 5281, number) for number, each in enumerate((A, B, C)))
        await self.coordinator.create_cluster(
            NewCluster("w", self.partition_count, UUID(int=1), storages)
        )
        return self

    @contextlib.asynccontextmanager
    async def run_owner(self, *, away=()):
        """Run an owner that opens a new session whenever the replicas of a partition change."""
        owner = Owner(self.zookeeper.coordinator(ROOT), away)
        task = asyncio.get_running_loop().create_task(owner.run())
        try:
            await owner.has_seen.wait()
            yield owner
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Owner:
    def __init__(self, coordinator: Coordinator, away):
        self.coordinator = coordinator
        self.away = away
        self.seen = []
        self.has_seen = asyncio.Event()

    async def run(self):
        await self.coordinator.follow_replica_assignment(self.take)

    def take(self, assignment):
        self.seen.append(assignment)
        self.open(assignment)
        self.has_seen.set()

    def open(self, assignment):
        znodes, paths = self.coordinator._znodes, self.coordinator.paths
        for number in {each for held in assignment.partitions.values() for each in held}:
            states = {
                each: model.ReplicaState(
                    len(self.seen), 5 if each in self.away else model.UNRESOLVED
                )
                for each in assignment.replicas_of(number)
            }
            metadata = model.PartitionMetadata(1, len(self.seen), states)
            path = paths.partition(number)
            entry = znodes._zookeeper.entry(path)
            data = metadata.to_bytes(number)
            marker = model.PartitionMarker(model.MarkerState.OPEN)
            if entry is None:
                run_now(
                    self.coordinator.write_partition(
                        number, metadata, marker, PartitionVersions(NO_NODE, 0)
                    )
                )
            elif (
                model.PartitionMetadata.from_bytes(entry.data, number).states.keys()
                != states.keys()
            ):
                run_now(znodes.write([SetNode(path, data, entry.version)]))


def run_now(coroutine):
    """Run a coroutine that never waits (memory.py, rule 1)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it has waited")


def run_in_cluster(scenario):
    async def run():
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await scenario(await Cluster().create())

    return lambda: asyncio.run(run())


# --- the layout


def layout():
    return StorageLayout(
        model.ReplicaAssignments({A: (0,), B: ()}), {A: 0, B: 3}, {A: 5281, B: 5281}
    )


def test_a_storage_is_added_empty_and_in_a_group_of_its_own():
    with_new_storage = layout().with_storage(C, 99, None)
    assert with_new_storage.assignment.partitions == {A: (0,), B: (), C: ()}
    assert (with_new_storage.groups[C], with_new_storage.admin_ports[C]) == (4, 99)
    assert layout().with_storage(C, 99, 3).groups[C] == 3
    assert StorageLayout(model.ReplicaAssignments(), {}, {}).with_storage(C, 9, None).groups == {
        C: 0
    }


@pytest.mark.parametrize(
    ("address", "port", "problem"),
    [
        (A, 9, "is already a storage of this cluster"),
        ("host", 9, "no port"),
        ("a..b:1", 9, "'a..b', which is not a valid host name"),
        (C, 0, "admin port"),
    ],
)
def test_an_invalid_storage_is_rejected(address, port, problem):
    with pytest.raises(errors.UsageError, match=problem):
        layout().with_storage(address, port, None)


def test_a_storage_without_replicas_is_removed():
    assert layout().without_storage(B) == StorageLayout(
        model.ReplicaAssignments({A: (0,)}), {A: 0}, {A: 5281}
    )
    with pytest.raises(errors.BadRequest, match="still has replicas of 1 partitions"):
        layout().without_storage(A)
    with pytest.raises(
        errors.BadRequest, match=f"{D} is not a storage of this cluster; its storages: {A}"
    ):
        layout().without_storage(D)


def test_an_admin_port_can_be_registered_again():
    assert layout().with_admin_port(B, 77).admin_ports == {**layout().admin_ports, B: 77}
    assert layout().with_admin_port(B, 77).assignment == layout().assignment
    with pytest.raises(errors.BadRequest):
        layout().with_admin_port(D, 77)
    with pytest.raises(
        errors.BadConfig,
        match=r"expected an admin port in 1\.\.65535, "
        r"found 0",
    ):
        layout().with_admin_port(B, 0)


@run_in_cluster
async def test_the_three_znodes_of_storages_change_in_one_write(cluster):
    storages = cluster.coordinator.storages
    written = await storages.change_layout(lambda old: old.with_storage(D, 7, 2))
    assert await storages.read_layout() == written
    assert (await cluster.coordinator.read_groups()).groups[D] == 2
    assert (await cluster.coordinator.read_connections()).admin_ports[D] == 7
    assert (await cluster.coordinator.read_replica_assignment()).partitions[D] == ()


@run_in_cluster
async def test_a_change_is_repeated_if_another_process_wrote_first(cluster):
    storages, other = cluster.coordinator.storages, cluster.zookeeper.coordinator(ROOT).storages
    concurrent_writes = []

    def change(old):
        if not concurrent_writes:
            concurrent_writes.append(
                run_now(other.change_layout(lambda before: before.with_storage(D, 7, 2)))
            )
        return old.with_storage("10.0.0.9:1", 8, 2)

    written = await storages.change_layout(change)
    assert set(written.assignment.partitions) == {A, B, C, D, "10.0.0.9:1"}
    assert await storages.read_layout() == written


@run_in_cluster
async def test_a_step_with_too_many_new_replicas_is_rejected(cluster):
    def change(old):
        moved_assignment = model.ReplicaAssignments(
            {A: (0, 1), B: (), C: (), D: (0, 1), "h:1": (0, 1)}
        )
        return StorageLayout(moved_assignment, old.groups, old.admin_ports)

    with pytest.raises(errors.BadRequest, match="partition 0: in one step, 2 of the 3 replicas"):
        await cluster.coordinator.storages.change_layout(change)


@run_in_cluster
async def test_a_freed_address_can_be_registered_for_another_storage(cluster):
    coordinator = cluster.coordinator
    one, two = UUID(int=1), UUID(int=2)
    await coordinator.register_storage_id(A, one)
    await coordinator.storages.forget_storage_id(A)
    await coordinator.storages.forget_storage_id(A)
    assert await coordinator.register_storage_id(A, two) == two


@run_in_cluster
async def test_an_address_that_could_not_be_freed_is_not_reported_as_free(cluster):
    await cluster.coordinator.register_storage_id(A, UUID(int=1))

    async def conflict(_writes):
        raise errors.CoordinatorConflict("x")

    cluster.coordinator._znodes.write = conflict
    with pytest.raises(errors.CoordinatorUnavailable, match="changed the list during each attempt"):
        await cluster.coordinator.storages.forget_storage_id(A)


# --- plans


async def carry_out(cluster, wanted):
    progress = []
    layout = await cluster.coordinator.storages.read_layout()
    plan = ReplicaPlan.for_placement(wanted, layout.assignment)
    await cluster.coordinator.storages.execute_plan(plan, progress.append)
    return progress


@run_in_cluster
async def test_a_plan_is_carried_out_step_by_step(cluster):
    await cluster.coordinator.storages.change_layout(lambda old: old.with_storage(D, 7, 2))
    async with cluster.run_owner() as owner:
        progress = await carry_out(cluster, {0: (A, B, D), 1: (A, B)})
    seen = [sorted(each.replicas_of(0)) for each in owner.seen]
    assert seen[:3] == [[A, B, C], [A, B, C, D], [A, B, D]]
    assert (progress[0].done_count, progress[0].partition_count) == (0, 2)
    assert (progress[-1].done_count, progress[-1].steps, progress[-1].postponed_steps) == (
        2,
        (),
        (),
    )
    assert [str(step) for step in progress[0].steps] == [
        f"partition 0: +{D}",
        f"partition 1: -{C}",
    ]
    after = await cluster.coordinator.read_replica_assignment()
    assert set(after.replicas_of(0)) == {A, B, D}
    assert set(after.replicas_of(1)) == {A, B}


@run_in_cluster
async def test_a_plan_waits_and_reports_the_reason(cluster):
    """Storage C is unavailable; without A the quorum of two would need C."""
    async with cluster.run_owner(away=[C]):
        progress = []
        layout = await cluster.coordinator.storages.read_layout()
        plan = ReplicaPlan.for_placement({0: (B, C)}, layout.assignment)
        async with asyncio.TaskGroup() as tasks:
            execution = cluster.coordinator.storages.execute_plan(plan, progress.append)
            waiting = tasks.create_task(execution)
            while not (progress and progress[-1].postponed_steps):  # noqa: ASYNC110 - it is no event
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
    assert str(progress[-1].postponed_steps[0]).startswith(
        f"partition 0: not in sync: {C}. After the change, an append would need 2 "
        f"acknowledgements of the replicas {B}, {C}, of which only 1 would be in sync."
    )
    assert progress[-1].steps == ()


@run_in_cluster
async def test_an_impossible_change_is_rejected(cluster):
    async with cluster.run_owner():
        with pytest.raises(
            errors.BadRequest, match=r"10\.0\.0\.9:1 is not a storage of this cluster"
        ):
            await carry_out(cluster, {0: (A, B, C, "10.0.0.9:1")})


@run_on_virtual_loop
async def test_a_limited_number_of_partitions_changes_at_a_time():
    cluster = await Cluster(3 * CONCURRENT_PARTITIONS_MAX).create()
    await cluster.coordinator.storages.change_layout(lambda old: old.with_storage(D, 7, 2))
    layout = await cluster.coordinator.storages.read_layout()
    now = replica_steps.placement_of(layout.assignment, cluster.partition_count)
    async with cluster.run_owner():
        progress = await carry_out(
            cluster, replica_steps.placement_with_replacement(now, A, D, now)
        )
    assert max(len(each.steps) for each in progress) == CONCURRENT_PARTITIONS_MAX
    after = await cluster.coordinator.read_replica_assignment()
    assert after.partitions[A] == ()
    assert len(after.partitions[D]) == cluster.partition_count
