"""The simulated archive: faults occur as configured, and uploads continue after them."""

from random import Random

import pytest

from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults import archive_faults
from waltz_sim.schedule import Schedule, Setup

SIZES = {"archive_object_bytes": 1, "local_retention_bytes": 1, "segment_bytes_max": 300}


class FirstChoice(Random):
    """A random source that chooses the first element, and returns the given roll."""

    def __init__(self, roll=0.0):
        super().__init__(1)
        self.roll = roll

    def random(self):
        return self.roll

    def choice(self, seq):
        return seq[0]


class World:
    """A cluster that writes and archives."""

    def __init__(self, **setup):
        chosen = {"archive_interval_ms": 10, "checkpoint_interval_count": 20, "think_ms": 30}
        self.cluster = SimCluster(Schedule(7, Setup(**chosen | SIZES | setup)))
        self.archive, self.counts = self.cluster.archive, self.cluster.checks.counts
        self.cluster.start_clients()

    def wait(self, is_reached, ms=5_000):
        assert self.cluster.world.run(ms * US_PER_MS, until=is_reached), (
            "the situation was not reached"
        )

    def wait_for(self, name, count=1):
        """Run the world until a counter has increased by this number."""
        wanted = self.counts[name] + count
        self.wait(lambda: self.counts[name] >= wanted)

    @property
    def uploading(self):
        return [storage for storage in self.cluster.storages.values() if storage.is_uploading]


@pytest.fixture
def world():
    world = World()
    world.wait_for("archived", 2)
    return world


def test_a_world_without_an_archive_has_no_uploads():
    world = World(archive_interval_ms=0)
    world.cluster.world.run(500 * US_PER_MS)
    assert world.cluster.checks.history.last > 20
    assert not world.archive.files
    assert world.cluster.checks.archive is None


def test_segments_are_removed_and_old_rows_are_read_from_the_archive(world):
    world.wait_for("storage.segment_removed", 3)
    client, reads = world.cluster.clients[0], world.counts["read from the archive"]
    has_feed = False
    while not has_feed:  # not every client has a feed
        client.kill()
        world.cluster.start_client(client)
        has_feed = world.cluster.world.run(500 * US_PER_MS, until=lambda: client.fed_last >= 0)
    assert world.counts["read from the archive"] > reads
    world.cluster.run_until_recovered()
    assert client.fed_last == world.cluster.checks.history.last


@pytest.mark.parametrize(
    ("fault", "field"),
    [("archive_away", "is_unavailable"), ("archive_throttles", "rejected_share")],
)
def test_uploads_fail_and_continue_after_the_fault(world, fault, field):
    assert getattr(archive_faults, fault)(world.cluster, FirstChoice())
    assert getattr(world.archive, field)
    world.wait(lambda: not getattr(world.archive, field))
    setattr(world.archive, field, 1.0)
    world.wait_for("archive.failed")
    setattr(world.archive, field, 0.0)
    world.wait_for("archived")


def test_garbage_is_collected_and_the_archive_stays_complete(world):
    before = dict(world.archive.files)
    world.wait_for("archive file deleted", 3)
    world.wait_for("archived")
    world.cluster.run_until_recovered()
    assert len(before.keys() - world.archive.files.keys()) >= 1


def test_a_write_whose_answer_is_lost_may_take_effect_after_the_next_attempt():
    world = World()  # The first upload begins with a write.
    world.archive.lost_answer_share = 0.8
    world.archive._chance = lambda: 0.7  # late
    world.wait_for("archive answer lost")
    world.archive.lost_answer_share = 0.0
    world.wait_for("archive write after its answer")
    assert world.archive.files
    world.wait_for("archived")


def test_a_write_takes_effect_after_its_sender_died():
    world = World()
    world.archive.extra_delay_us = 50 * US_PER_MS
    world.wait(lambda: world.uploading)
    world.cluster.world.run(2 * US_PER_MS)
    assert archive_faults.kill_uploader(world.cluster, FirstChoice())
    world.archive.extra_delay_us = 0
    world.wait_for("archive write after its sender died")
    world.wait_for("archived")


def test_the_fault_kill_uploader_does_nothing_without_an_upload():
    world = World(archive_interval_ms=0)
    assert not archive_faults.kill_uploader(world.cluster, FirstChoice())


def test_an_upload_detects_a_file_that_was_written_wrong(world):
    world.archive.corrupted_share = 1.0
    world.wait_for("archive.failed")
    assert not world.archive.original_files
    assert archive_faults.corrupt_object(world.cluster, FirstChoice())
    assert world.archive.corrupted_share == 0.5
    world.wait(lambda: not world.archive.corrupted_share)
    world.wait_for("archived")


def test_a_stored_file_that_is_corrupted_later_is_repaired(world):
    before = dict(world.archive.files)
    assert archive_faults.corrupt_object(world.cluster, FirstChoice(roll=0.9))
    (name,) = world.archive.original_files
    assert world.archive.files[name] != before[name] == world.archive.original_files[name]
    world.wait(lambda: not world.archive.original_files)
    assert world.archive.files[name] == before[name]


def test_a_slow_object_store_delays_only_the_archive(world):
    archive_faults.slow_archive(world.cluster, FirstChoice())
    assert world.archive.extra_delay_us
    last = world.cluster.checks.history.last
    world.wait_for("archived")
    assert world.cluster.checks.history.last > last
    world.wait(lambda: not world.archive.extra_delay_us)


def test_a_checkpoint_lets_a_long_session_remove_segments():
    """AR 11: without a checkpoint, only segments below the session's first mark are removed."""
    world = World(checkpoint_interval_count=1 << 30, archived_bytes_max=500)
    world.wait_for("checkpoint due", 2)
    world.wait_for("storage.segment_removed", 3)
    world = World(checkpoint_interval_count=1 << 30)
    world.wait_for("archived", 10)
    assert not world.counts["storage.segment_removed"]


# ---- replacement of objects


def listed(world):
    return world.archive.listed_objects(world.cluster.coordinator.marker.archived)


@pytest.mark.parametrize("damage", ["corrupt_file", "lose_file"])
def test_a_damaged_object_is_replaced_from_a_log(damage):
    world = World(local_retention_bytes=0)
    world.wait_for("archived", 2)
    old = listed(world)[0]
    getattr(world.archive, damage)(old.name)
    assert world.archive.is_damaged(old)
    archive_faults._repair_objects(world.cluster, 10)
    world.wait_for("archive.object_replaced")
    world.wait(lambda: old.name not in {entry.name for entry in listed(world)})
    assert listed(world)[0][1:4] == old[1:4]
    assert not any(map(world.archive.is_damaged, listed(world)))
    world.cluster.run_until_recovered()


def test_a_damaged_object_is_restored_from_a_copy_if_no_log_has_its_records():
    world = World(restored_count=20)
    archive_faults.damage_objects(world.cluster, FirstChoice())
    (name,) = world.archive.original_files
    world.wait_for("archive.object_replacement_failed", 3)
    assert not world.counts["archive.object_replaced"]
    world.wait(lambda: not world.archive.original_files)
    assert name in {each.name for each in listed(world)}


def test_the_fault_damage_objects_does_nothing_without_objects():
    assert not archive_faults.damage_objects(World().cluster, FirstChoice())


# ---- collection


def test_a_session_collects_garbage_at_intervals():
    world = World(checkpoint_interval_count=1 << 30, collection_interval_ms=30)
    world.wait_for("archive file deleted", 1)
    sessions = world.counts["session opened"]
    world.wait_for("archive file deleted", 3)
    assert world.counts["session opened"] == sessions


# ---- expiry


@pytest.fixture
def expiring():
    world = World(expires=True)
    world.wait_for("archived", 3)
    return world


def expire(world, before):
    """Let the objects below an ID expire; return the first available ID."""
    world.cluster.checks.archive.on_expiry_requested(before)
    archive_faults._request_expiry(world.cluster, before, 10)
    world.wait_for("archived objects expired")
    return world.cluster.coordinator.marker.archived.first


def test_a_requested_expiry_moves_the_first_available_id(expiring):
    first = expire(expiring, 5)
    assert 0 < first <= 5
    expiring.wait_for("archived")
    assert expiring.cluster.coordinator.marker.archived.first == first


def test_the_fault_expire_objects_requests_an_expiry_only_if_objects_may_expire(world, expiring):
    assert not archive_faults.expire_objects(world.cluster, FirstChoice())
    assert archive_faults.expire_objects(expiring.cluster, FirstChoice())
    assert expiring.counts["archived objects expired"] == 0
    assert archive_faults.expire_objects(expiring.cluster, Random(3))
    expiring.wait_for("archived objects expired")


def test_the_retention_policy_lets_objects_expire():
    world = World(expires=True, archive_retention_ms=50)
    world.wait_for("archived objects expired")
    assert world.cluster.coordinator.marker.archived.first > 0


def test_expired_objects_are_deleted_after_the_grace_period(expiring):
    oldest = {name for name in expiring.archive.files if "/objects/0-" in name}
    expire(expiring, 5)
    began_ms = expiring.cluster.world.now_ms
    expiring.wait(lambda: not oldest & expiring.archive.files.keys())
    assert expiring.cluster.world.now_ms - began_ms > expiring.archive.expiry_grace_ms - 100


def test_a_cluster_recovers_if_all_objects_expire_while_outcomes_are_unknown():
    world = World(expires=True, clients=4)
    world.wait_for("archived", 3)
    assert archive_faults.expire_rows_in_doubt(world.cluster, Random(2))
    assert world.cluster.coordinator.cut_off_servers
    world.wait_for("archived objects expired", 2)
    world.cluster.run_until_recovered()


def test_a_feed_from_the_start_continues_after_the_expired_transactions(expiring):
    expiring.wait_for("storage.segment_removed", 6)
    first = expire(expiring, expiring.cluster.checks.history.last + 1)
    workload = expiring.cluster.workload
    expiring.cluster.kill(expiring.cluster.owner)  # it has cached old rows
    for client in expiring.cluster.clients:
        client.kill()
        expiring.cluster.start_client(client)
    expiring.wait(lambda: workload.first_available)
    assert workload.first_available >= first
    expiring.cluster.run_until_recovered()


# ---- a restored partition


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_partition_continues_its_log(seed):
    setup = {"archive_interval_ms": 10, "think_ms": 30, "restored_count": 20, **SIZES}
    cluster = SimCluster(Schedule(seed, Setup(**setup, expires=seed % 2 == 1)))
    mark = cluster.coordinator.marker.archived
    assert (mark.last, cluster.checks.history.last) == (19, 19)
    cluster.start_clients()
    assert cluster.world.run(5_000 * US_PER_MS, until=lambda: cluster.checks.counts["archived"])
    assert cluster.coordinator.marker.archived.last > mark.last
    starts = [
        storage.log.start.transaction_id for storage in cluster.storages.values() if storage.log
    ]
    assert max(starts) >= mark.last
    cluster.run_until_recovered()
    assert cluster.checks.counts["replica reset"] >= 3


# ---- losses by operators and ZooKeeper


def test_uploads_continue_after_zookeeper_loses_the_newest_archived_mark():
    world = World(is_unbounded=True, checkpoint_interval_count=1 << 30)
    world.wait_for("archived", 3)
    before = world.cluster.coordinator.marker.archived
    archive_faults.lose_marks(world.cluster, FirstChoice())
    assert world.counts["fault lose_marks"] == 1
    after = world.cluster.coordinator.marker.archived
    assert after.last < before.last
    names = {listed_object.name for listed_object in world.archive.listed_objects(before)}
    world.wait_for("archived")
    world.cluster.run_until_recovered()
    assert names - {entry.name for entry in listed(world)}


def test_the_fault_lose_marks_does_nothing_unless_zookeeper_may_lose_data(world):
    archive_faults.lose_marks(world.cluster, FirstChoice())
    world.wait_for("archived", 2)
    assert not world.counts["fault lose_marks"]


@pytest.mark.parametrize("restarts", [True, False])
def test_no_session_opens_with_a_log_that_ends_below_the_archived_mark(restarts):
    world = World(is_unbounded=True)
    world.wait_for("archived", 3)
    archive_faults.accept_a_shorter_log(world.cluster, FirstChoice(roll=0.0 if restarts else 0.9))
    world.wait_for("fault accept_a_shorter_log")
    world.wait_for("replica accepted")
    opened = world.counts["session opened"]
    world.cluster.run_until_recovered()
    assert world.counts["session opened"] == opened
    assert world.counts["quorum lost without a wrong answer"] == 1


# ---- crashes


def test_a_reset_replica_does_not_decide_a_log_without_the_rest_of_its_quorum():
    world = World(servers=1)
    world.wait_for("archived", 3)
    archive_faults.lose_a_reset_replica(world.cluster, Random(1))
    world.wait_for("fault lose_a_reset_replica")
    world.wait_for("last quorum of a reset replica stopped")
    world.cluster.run_until_recovered()
    assert world.counts["replica reset"] >= 1


def test_a_storage_opens_after_a_power_loss_during_the_removal_of_a_segment(world):
    for _ in world.cluster.storages:
        archive_faults.power_loss_at_removal(world.cluster, Random(1))
    world.wait_for("fault power_loss_at_removal")
    world.cluster.run_until_recovered()
    assert not world.counts["storage rejected: MissingSegment"]
