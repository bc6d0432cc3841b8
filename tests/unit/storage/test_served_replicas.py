"""A storage opens its partitions, a limited number at once, and checks them again."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.errors import CoordinatorUnavailable, DiskFailed, UnknownPartition
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.process.served_replicas import (
    OPENERS_MAX,
    REOPEN_S_MAX,
    REOPEN_S_MIN,
    ServedReplicas,
    recheck_interval_s,
    run_concurrently,
)
from waltz_core.storage.service import service
from waltz_sim.world.simulated_disk import SimDisk


@pytest.mark.parametrize(
    ("served", "wanted", "stored_here", "interval_s"),
    [
        ((), (), (), None),
        ((0, 2), (0, 2), (0, 2), None),
        ((0,), (0, 1), (0, 1, 2), REOPEN_S_MIN),  # a partition could not be opened
        ((0, 1), (0,), (0, 1, 2), REOPEN_S_MIN),  # an unassigned one is still in use
        ((0, 1), (0, 2), (0, 1, 2), REOPEN_S_MIN),
        ((0,), (0,), (0, 1), REOPEN_S_MAX),
        ((), (), (1,), REOPEN_S_MAX),
    ],
)
def test_the_recheck_interval_is_short_after_a_deviation_and_long_for_unserved_replicas(
    served, wanted, stored_here, interval_s
):
    found = recheck_interval_s(REOPEN_S_MIN, served=served, wanted=wanted, stored_here=stored_here)
    assert found == interval_s


# ---- following


ADDRESS = "here:1"


class Directory:
    """An engine that has only lists of local partitions and of offline partitions."""

    partition_count = 4
    has_failed = has_lost_files = False

    def __init__(self, *partitions):
        self.stored_here = set(partitions)
        self.offline = set()
        self.space = DiskSpace(SimDisk(), None, 0)
        self.opened = []
        self.open_errors = {}
        self.files_error = set()

    def check_exists(self, partition_id):
        if not 0 <= partition_id < self.partition_count:
            raise UnknownPartition(f"{partition_id}")

    def is_held(self, partition_id):
        return partition_id in self.stored_here

    def has_lost_files_of(self, partition_id):
        return partition_id in self.files_error

    def stop_serving(self, partition_id, reason):
        self.files_error.add(partition_id)
        self.open_errors[partition_id] = reason

    def assigned_partitions(self):
        return sorted(self.stored_here)

    def is_available(self, partition_id):
        return partition_id not in self.offline

    def assign_new(self, partition_ids):
        pass

    def assign(self, partition_id):
        self.stored_here.add(partition_id)
        self.opened.append(partition_id)
        return SimpleNamespace(partition_id=partition_id, synced_max=-1)


class Metadata:
    """The metadata in ZooKeeper: the partitions whose sessions still include this storage."""

    def __init__(self, *session_members):
        self.session_members = set(session_members)
        self.during_read = lambda: None  # happens during the query
        self.is_unavailable = False

    async def read_partition(self, partition_id):
        self.during_read()
        if self.is_unavailable:
            raise CoordinatorUnavailable("away")
        states = {ADDRESS: None} if partition_id in self.session_members else {}
        return SimpleNamespace(metadata=SimpleNamespace(states=states))


class Follower:
    """A `ServedReplicas` that follows assignments; `wait_for_check` waits for the next one."""

    def __init__(self, engine, coordinator):
        self.dropped = []
        self.hanging = set()  # partitions whose work does not end
        self._checked = asyncio.Event()
        self.serving = ServedReplicas(
            engine,
            coordinator,
            partitions=(),
            post=self._post,
            report=lambda _report: None,
            in_thread=self._at_once,
            on_opened=lambda _log: None,
            on_dropped=self.dropped.append,
        )
        self.serving.address = ADDRESS

    async def _at_once(self, call):
        return call()

    def _post(self, event):
        if isinstance(event, service.PartitionDropped) and event.partition_id not in self.hanging:
            self.serving.on_partition_idle(event.partition_id)

    async def assigned(self, *partitions):
        self.serving.set_assignments(ReplicaAssignments({ADDRESS: partitions}))
        return await self.wait_for_check()

    async def wait_for_check(self):
        self._checked.clear()
        self.serving.recheck()
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await self._checked.wait()
        return sorted(self.serving.logs)

    async def follow(self):
        await self.serving.follow(self._checked.set)


@asynccontextmanager
async def following(engine, coordinator=None):
    follower = Follower(engine, coordinator)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower.follow())
        try:
            yield follower
        finally:
            task.cancel()


@run_on_loop
async def test_an_offline_replica_is_not_served_even_if_assigned():
    engine = Directory(0, 1)
    engine.offline = {1}
    async with following(engine) as follower:
        assert await follower.assigned(0, 1) == [0]
        assert (follower.serving.offline, follower.serving.unserved_partitions) == ((1,), [])
        engine.offline = {0}
        assert await follower.wait_for_check() == [1]
        assert follower.dropped == [0]
        engine.offline = set()
        assert await follower.wait_for_check() == [0, 1]


@run_on_loop
async def test_a_removed_replica_that_is_a_session_member_is_served_unless_it_is_offline():
    engine, coordinator = Directory(0, 1, 2), Metadata(1, 2)
    engine.offline = {2}
    async with following(engine, coordinator) as follower:
        assert await follower.assigned(0) == [0, 1]
        assert sorted(engine.opened) == [0, 1]
        coordinator.is_unavailable = True
        assert await follower.wait_for_check() == [0, 1], (
            "the replicas do not change without a notification"
        )
        coordinator.is_unavailable = False
        coordinator.session_members = {2}
        assert await follower.wait_for_check() == [0]
        assert follower.dropped == [1]


def test_the_process_ends_after_a_failure_that_requires_a_restart():
    class Failing(Directory):
        def assign(self, partition_id):
            raise DiskFailed(f"partition {partition_id}")

    engine = Failing()

    async def main():
        async with following(engine) as follower:
            assert await follower.assigned(0) == [], "the opening is retried"
            engine.has_failed = True
            await follower.wait_for_check()

    with pytest.raises(ExceptionGroup) as failure:
        asyncio.run(main())
    assert failure.group_contains(DiskFailed, match="partition 0")


@pytest.mark.parametrize("change", ["offline", "abandoned"])
@run_on_loop
async def test_a_replica_removed_during_a_metadata_read_is_not_opened_again(change):
    engine, coordinator = Directory(0, 1), Metadata(1)

    def remove_replica():
        if change == "offline":
            engine.offline.add(1)
        else:
            engine.stored_here.discard(1)

    coordinator.during_read = remove_replica
    async with following(engine, coordinator) as follower:
        assert await follower.assigned(0) == [0]
        assert engine.opened == [0], "the replica is not created again"


def test_partitions_are_opened_by_all_opener_threads_concurrently():
    barrier = threading.Barrier(OPENERS_MAX)
    opened = []

    def call(partition_id):
        barrier.wait(timeout=TEST_TIMEOUT_S)  # the barrier fails if fewer threads arrive
        opened.append(partition_id)

    run_concurrently(call, range(2 * OPENERS_MAX))
    assert sorted(opened) == list(range(2 * OPENERS_MAX))
    run_concurrently(call, ())


def test_an_error_of_one_opening_is_raised_after_all_openings_are_done():
    opened = []

    def call(partition_id):
        if partition_id == 1:
            raise ValueError("no")
        opened.append(partition_id)

    with pytest.raises(ValueError, match="no"):
        run_concurrently(call, range(20))
    assert sorted(opened) == [0, *range(2, 20)]


@run_on_loop
async def test_a_hanging_drop_delays_only_its_partition():
    engine = Directory(0, 1, 2)
    async with following(engine) as follower:
        await follower.assigned(0, 1)
        follower.hanging = {0}
        assert await follower.assigned(2, 3) == [0, 2, 3]
        assert follower.dropped == [1]
        assert await follower.serving.run_exclusively(1, lambda: "done") == "done"
        assert await follower.assigned(0, 2) == [0, 2], (
            "the partition is dropped before it is opened again"
        )
        follower.serving.on_partition_idle(0)
        await poll_until(lambda: engine.opened.count(0) == 2)
        assert follower.dropped == [1, 3, 0]


@run_on_loop
async def test_changes_of_unknown_partitions_are_dropped():
    async with following(Directory(0, 1)) as follower:
        for partition_id in (-1, 4, 1 << 30):
            with pytest.raises(UnknownPartition):
                await follower.serving.run_exclusively(partition_id, lambda: "done")
        assert await follower.serving.run_exclusively(3, lambda: "done") == "done"
        assert set(follower.serving._locks) == {3}


@run_on_loop
async def test_a_partition_with_missing_files_is_dropped_and_not_opened_again():
    engine = Directory(0, 1)
    async with following(engine) as follower:
        assert await follower.assigned(0, 1) == [0, 1]
        follower.serving.stop_serving(0, DiskFailed("gone"))
        await poll_until(lambda: follower.dropped == [0])
        assert await follower.wait_for_check() == [1]
        assert follower.serving.unserved_partitions == [0]
        assert follower.serving.unserved_reasons == {"0": "gone"}
        assert engine.opened == [0, 1]
        engine.files_error.clear()
        assert await follower.wait_for_check() == [0, 1]
