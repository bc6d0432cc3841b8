"""Archiving of a partition: uploads, recorded marks, and what replicas receive."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_world import (
    ARCHIVING,
    INTERVAL_MS,
    ArchivingWorld,
    archive,
    attempts,
    begin,
    chain_at,
    end_collection,
    finish,
    new_world,
    progress,
)
from tests.unit.replication.replication_world import LIMITS, A, B, C, ReplicationWorld, wire
from tests.unit.replication.test_repair_runner import report_damage
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.errors import ArchiveUnavailable
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.archiving import NO_PROGRESS_MS_MAX
from waltz_core.replication.session_events import CheckpointDue, SessionOpened, SessionSettled

COLLECTION_INTERVAL_MS = ARCHIVING.collection_interval_ms


@pytest.fixture
def world():
    """Three replicas with batches 0..1, 2..3 and 4..5."""
    return new_world()


def announced_marks(world):
    return [(name, each.last) for name, each in world.sent if isinstance(each, wire.SetArchived)]


def test_a_range_is_archived_compared_recorded_and_then_announced(world):
    replica, request = begin(world)
    assert (request.first, request.last, request.chain_before) == (0, 5, GENESIS_CHAIN)
    assert (request.manifest, request.manifest_crc) == ("", 0)
    lineages = len(world.all_sent(wire.LineageRequest))
    finish(world, replica, request, last=3)
    (compared,) = world.all_sent(wire.LineageRequest)[lineages:]
    assert (compared.first, compared.last) == (3, 3)
    assert world.sent[-1][0] != replica
    assert world.marker.archived is None
    world.run(answers_zookeeper=False)
    assert world.zookeeper_requests[0].marker.archived == ArchivedMark(
        3, chain_at(world, 3), 9, 0, 7, "m1"
    )
    assert announced_marks(world) == []
    world.run()
    assert world.marker.archived.last == 3
    assert sorted(announced_marks(world)) == [(A, 3), (B, 3), (C, 3)]
    assert world.reports("archive.manifest_recorded") == [
        {"session": 0, "last": 3, "manifest": "m1"}
    ]


def test_the_next_attempt_starts_at_once_with_the_recorded_manifest(world):
    first = archive(world, last=3)
    _, request = attempts(world)[-1]
    (collection,) = world.all_sent(wire.CollectGarbage)
    assert (request.first, request.last, request.attempt) == (4, 5, collection.attempt + 1)
    assert (request.chain_before, request.manifest, request.manifest_crc) == (first.chain, "m1", 7)


@pytest.mark.parametrize("is_archived", [False, True])
def test_an_attempt_without_progress_is_abandoned_and_another_replica_tries(world, is_archived):
    replica, request = begin(world)
    world.run_for(NO_PROGRESS_MS_MAX - 2 * INTERVAL_MS)
    world.silent = {A, B, C}
    if is_archived:
        finish(world, replica, request)  # no other replica has returned its chain
    else:
        progress(world, replica, replace(request, attempt=9))
        progress(world, next(name for name in world.names if name != replica), request)
        world.wait(2 * INTERVAL_MS - 1_000)
        assert not world.reports("archive.failed"), "the other reports belong to no attempt"
        progress(world, replica, request)
    world.wait(NO_PROGRESS_MS_MAX - 1)
    assert not world.reports("archive.failed")
    world.wait(1)
    (report,) = world.reports("archive.failed")
    assert (report["replica"], report["reason"]) == (
        replica,
        "the storage has reported no progress for 300000 ms",
    )
    world.silent = set()
    other, second = begin(world)
    assert (other != replica, second.attempt) == (True, 2)
    finish(world, replica, request)
    world.run()
    assert world.marker.archived is None, "a late result is not used"
    finish(world, other, second)
    world.run()
    assert world.marker.archived.manifest == "m2"


def test_a_late_rejection_of_an_abandoned_attempt_is_ignored(world):
    world.silent = {A, B, C}
    world.wait(INTERVAL_MS)
    ((replica, _),) = attempts(world)
    world.silent = {replica}
    world.run_for(NO_PROGRESS_MS_MAX)
    assert begin(world)[0] != replica
    world.silent, world.rejected = set(), wire.ArchiveRange
    world.run()
    assert [report["reason"] for report in world.reports("archive.failed")] == [
        "the storage has reported no progress for 300000 ms"
    ]


def test_no_archiving_attempt_starts_during_an_attempt_or_without_new_batches(world):
    replica, request = begin(world)
    world.append(1)
    world.run_for(10 * INTERVAL_MS)
    assert len(attempts(world)) == 1
    finish(world, replica, request)
    world.run()
    replica, request = attempts(world)[-1]
    assert request.first == 6
    finish(world, replica, request)
    world.run_for(10 * INTERVAL_MS)
    assert len(attempts(world)) == 2
    assert world.marker.archived.last == 6


def test_a_range_that_is_too_small_is_requested_again_after_the_interval(world):
    replica, request = begin(world)
    finish(world, replica, request, last=-1, manifest="", manifest_crc=0)
    world.run_for(INTERVAL_MS - 1)
    assert len(attempts(world)) == 1
    world.run_for(1)
    assert len(attempts(world)) == 2
    assert not world.reports("archive.failed")


def test_attempts_after_a_failure_use_another_replica_and_back_off(world):
    replicas, pause = [], INTERVAL_MS
    for count in range(3):
        world.run_for(pause)
        assert len(attempts(world)) == count + 1
        replica, request = attempts(world)[-1]
        replicas.append(replica)
        finish(world, replica, request, last=-1, manifest="", error="store: 503")
        pause = INTERVAL_MS << count
        world.run_for(pause - 1)
        assert len(attempts(world)) == count + 1
        pause = 1
    assert len(set(replicas)) > 1
    assert world.reports("archive.failed")[0]["reason"] == "store: 503"
    assert world.store.open_session_id == 0, "the session continues"
    assert world.marker.archived is None


def test_a_rejected_archive_request_ends_the_attempt_but_not_the_session(world):
    for storage in world.storages.values():
        handle = storage.handle

        def reject(message, handle=handle):
            if isinstance(message, wire.ArchiveRange):
                return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "no archive")
            return handle(message)

        storage.handle = reject
    world.run_for(INTERVAL_MS)
    (report,) = world.reports("archive.failed")
    assert report["reason"] == "BadRequest: no archive"
    assert world.store.open_session_id == 0


def test_a_replica_that_rejects_the_mark_does_not_end_the_attempt(world):
    storage = world.storages[C]
    handle = storage.handle

    def reject(message):
        if isinstance(message, wire.SetArchived):
            return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "another chain")
        return handle(message)

    storage.handle = reject
    archive(world, last=3)
    (report,) = world.reports("archive.failed")
    assert (report["replica"], report["reason"]) == (C, "BadRequest: another chain")
    replica, request = attempts(world)[-1]
    finish(world, replica, request)
    world.run()
    assert world.marker.archived.last == 5


def test_an_archived_range_is_not_recorded_if_the_chain_of_another_replica_differs(world):
    replica, request = begin(world)
    finish(world, replica, request, chain=b"x" * 16)
    world.run()
    assert world.marker.archived is None
    (report,) = world.reports("archive.failed")
    assert report["reason"].startswith(
        f"expected chain hash {'78' * 16} at transaction 5, as archived by {replica}, found"
    )


def test_an_archived_range_that_ends_within_a_batch_is_not_recorded(world):
    replica, request = begin(world)
    finish(world, replica, request, last=4, chain=chain_at(world, 5))
    world.run()
    assert world.marker.archived is None
    assert "found no batch that ends there at" in world.reports("archive.failed")[0]["reason"]


def test_results_of_other_attempts_and_replicas_are_ignored(world):
    replica, request = begin(world)
    other = next(name for name in world.names if name != replica)
    finish(world, other, request)
    finish(world, replica, replace(request, attempt=9))
    finish(world, replica, request)
    finish(world, replica, request, last=3)
    world.run()
    assert world.marker.archived.last == 5


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_a_mark_is_recorded_once_despite_a_lost_zookeeper_answer(world, outcome):
    replica, request = begin(world)
    finish(world, replica, request)
    world.run(answers_zookeeper=False)
    world.answer_zookeeper(outcome)
    assert announced_marks(world) == []
    world.append(1)
    world.run_for(5_000)
    assert world.marker.archived.last == 5
    assert world.store.open_session_id == 0
    assert sorted(announced_marks(world)) == [(A, 5), (B, 5), (C, 5)]


def test_no_archived_mark_is_recorded_after_another_session_has_claimed_the_partition(world):
    replica, request = begin(world)
    finish(world, replica, request)
    world.run(answers_zookeeper=False)
    world.claim_elsewhere(5)
    world.run()
    assert world.marker.archived is None
    assert world.store.open_session_id != 0


def test_a_later_session_keeps_the_mark_and_continues_after_it(world):
    mark = archive(world, last=3)
    world.lose(A)
    world.reopen()
    assert world.marker.archived == mark
    _, request = begin(world)
    assert (request.first, request.chain_before, request.session_id) == (4, mark.chain, 1)
    assert (A, 3) in announced_marks(world)


def test_an_attempt_ends_with_its_session(world):
    replica, request = begin(world)
    world.lose(next(name for name in world.names if name != replica))
    world.reopen()
    finish(world, replica, request)
    world.run()
    assert world.marker.archived is None
    assert begin(world)[1].first == 0


def test_no_session_opens_if_the_log_has_another_chain_at_the_archived_mark(world):
    mark = archive(world, last=3)
    world.marker = replace(world.marker, archived=mark._replace(chain=b"x" * 16))
    world.marker_version += 1
    settled = len(world.all_reported(SessionSettled))
    world.lose(A)
    world.wait(3_000)
    world.run()
    (report, *_) = world.reports("partition.open_failed")
    assert "the archive has transactions up to 3 with chain hash 7878" in report["reason"]
    assert len(world.all_reported(SessionSettled)) == settled
    assert world.store.open_session_id is None


def test_a_log_that_ends_below_the_archived_mark_is_rejected(world):
    mark = archive(world, last=3)
    world.marker = replace(world.marker, archived=mark._replace(last=9))
    world.marker_version += 1
    world.lose(A)
    world.wait(3_000)
    world.run()
    assert world.reports("partition.open_failed")[0]["reason"] == (
        "the log of the replicas ends at transaction 5, but transaction 9 is archived"
    )


def test_a_single_replica_archives_without_a_comparison():
    world = new_world(A)
    assert archive(world).last == 5
    assert announced_marks(world) == [(A, 5)]


def test_a_replica_that_lags_is_compared_and_notified_when_it_has_caught_up(world):
    world.silent = {B, C}
    world.submit()
    world.run()
    world.silent = set()
    world.run_for(INTERVAL_MS)
    replica, request = attempts(world)[-1]
    assert request.last in {5, 6}
    finish(world, replica, request)
    world.run()
    assert world.marker.archived.last == request.last


def test_storages_of_an_older_version_receive_no_archive_requests():
    world = ReplicationWorld(limits=ARCHIVING)
    for storage in world.storages.values():
        storage.supports_archiving = False
    world.open()
    world.append(2)
    world.run_for(5 * INTERVAL_MS)
    assert not attempts(world)
    assert world.store.wake_at_ms > world.now_ms


def test_without_an_archive_interval_no_range_is_archived():
    world = ReplicationWorld()
    world.open()
    world.append(2)
    world.run_for(10 * INTERVAL_MS)
    assert not attempts(world)
    assert world.store.wake_at_ms is None


# ---- garbage


def collections(world):
    return [message for message in world.sent if isinstance(message[1], wire.CollectGarbage)]


def test_garbage_is_collected_when_a_mark_is_recorded_and_then_every_hour(world):
    world.run_for(2 * COLLECTION_INTERVAL_MS)
    assert not collections(world), "no mark is recorded"
    replica, request = attempts(world)[-1]
    world.silent = {A, B, C}
    finish(world, replica, request, last=3)
    world.silent = set()
    world.run(answers_zookeeper=False)
    assert not collections(world), "the write of the mark has no known outcome"
    world.run()
    ((_, collection),) = collections(world)
    mark = world.marker.archived
    assert (collection.last, collection.chain, collection.manifest, collection.manifest_crc) == (
        3,
        mark.chain,
        mark.manifest,
        7,
    )
    assert collection.attempt > request.attempt
    replica, request = attempts(world)[-1]
    assert request.attempt > collection.attempt
    finish(world, replica, request)
    world.run()
    world.wait(COLLECTION_INTERVAL_MS - 1)
    assert len(collections(world)) == 1
    world.wait(1)
    assert collections(world)[1][1].last == 5
    assert len({replica for replica, _ in collections(world)}) == 2


@pytest.mark.parametrize("is_uploading", [False, True])
def test_garbage_collections_and_archiving_attempts_exclude_each_other(world, is_uploading):
    archive(world)
    world.wait(COLLECTION_INTERVAL_MS - 2 * INTERVAL_MS)
    world.collects = False
    if is_uploading:
        world.append(1)
        replica, request = begin(world)
        world.run_for(2 * INTERVAL_MS)
        assert len(collections(world)) == 1
        finish(world, replica, request)
        world.run()
    else:
        world.run_for(2 * INTERVAL_MS)
        world.append(1)
        count = len(attempts(world))
        world.run_for(2 * INTERVAL_MS)
        assert len(attempts(world)) == count
        end_collection(world, *collections(world)[-1])
        world.run_for(INTERVAL_MS)
        assert len(attempts(world)) == count + 1
    assert len(collections(world)) == 2


def test_an_incomplete_garbage_collection_continues_after_the_archive_interval(world):
    world.collects = False
    archive(world)
    end_collection(world, *collections(world)[-1], has_more=True)
    world.wait(INTERVAL_MS - 1)
    assert len(collections(world)) == 1
    world.wait(1)
    assert len(collections(world)) == 2
    end_collection(world, *collections(world)[-1])
    world.run_for(COLLECTION_INTERVAL_MS - 1)
    assert len(collections(world)) == 2


@pytest.mark.parametrize("fault", ["error", "rejection", "silence"])
def test_a_failed_collection_is_reported_and_archiving_continues(world, fault):
    world.collects = False
    world.rejected = wire.CollectGarbage if fault == "rejection" else ()
    archive(world, last=3)
    replica, request = collections(world)[-1]
    if fault == "error":
        end_collection(world, replica, request, error="listed files are missing")
    elif fault == "silence":
        world.wait(NO_PROGRESS_MS_MAX)
    (report,) = world.reports("archive.garbage_collection_failed")
    assert report["replica"] == replica
    assert world.store.open_session_id == 0
    world.run_for(INTERVAL_MS)
    finish(world, *attempts(world)[-1])
    world.run()
    assert world.marker.archived.last == 5
    world.run_for(COLLECTION_INTERVAL_MS)
    assert len(collections(world)) == 2
    assert not world.reports("archive.failed")


def test_no_garbage_is_collected_while_a_replica_is_absent(world):
    world.lose(C)
    world.down.add(C)
    world.reopen()
    archive(world)
    world.run_for(COLLECTION_INTERVAL_MS)
    assert not collections(world)
    world.down.clear()
    world.run_for(10_000)
    world.append(1)
    world.run_for(INTERVAL_MS)
    finish(world, *attempts(world)[-1])
    world.run_for(INTERVAL_MS)
    assert len(collections(world)) == 1


def test_no_garbage_is_collected_if_a_log_begins_above_the_mark(world):
    """ZooKeeper was rolled back: the archive may have the records before that start."""
    replica, request = begin(world)
    each = world.store.session.replicas[C]
    each.repair.start = 4
    finish(world, replica, request, last=3)
    world.run_for(INTERVAL_MS)
    assert not collections(world)
    (report,) = world.reports("archive.garbage_collection_failed")
    assert report["replica"] == C
    assert report["reason"].startswith(
        "the log of the replica begins after transaction 4, but in ZooKeeper the "
        "last archived transaction is 3:"
    )
    assert attempts(world)[-1][1].first == 4, "archiving continues"


# ---- replicas without the archived records


def test_one_checkpoint_is_due_if_too_much_is_archived_above_the_low_water_mark():
    world = ArchivingWorld(limits=replace(ARCHIVING, archived_bytes_max=1))
    world.open()
    world.append(2, batches=3)
    assert not world.all_reported(CheckpointDue)
    archive(world, last=1)
    assert world.all_reported(CheckpointDue) == [CheckpointDue(0)]
    world.append(1)
    replica, request = attempts(world)[-1]
    finish(world, replica, request)
    world.run()
    assert world.marker.archived.last == 5
    assert len(world.all_reported(CheckpointDue)) == 1


def test_only_records_archived_above_the_low_water_mark_count_for_a_checkpoint():
    sent = new_world().all_sent(wire.AppendRaw, A)
    size = sum(len(message.records) for message in sent)
    world = ArchivingWorld(limits=replace(ARCHIVING, archived_bytes_max=size))
    world.open()
    world.append(2, batches=5)
    archive(world, last=5)
    assert not world.all_reported(CheckpointDue)
    replica, request = attempts(world)[-1]
    finish(world, replica, request, last=7)
    world.run()
    assert [each.session_id for each in world.all_reported(CheckpointDue)] == [0]
    # All archived batches are below the mark of the next session.
    world.lose(A)
    world.reopen()
    assert world.store.open_session_id == 1
    archive(world)
    assert world.marker.archived.last == 9
    assert len(world.all_reported(CheckpointDue)) == 1


def remove_archived(world, last, names=(A, B)):
    for name in names:
        world.storages[name].remove_up_to(last)


def wipe(world, name):
    """Replace a storage's log by an empty, suspect one."""
    disk = world.storages[name].disk
    disk.entries.clear()
    disk.confirmed, disk.provisional, disk.suspect, disk.last_session = -1, None, True, -1


def test_an_emptied_replica_begins_after_the_archived_mark(world):
    archive(world, last=3)
    remove_archived(world, 1)
    world.lose(C)
    wipe(world, C)
    world.reopen()
    world.run_for(3_000)
    assert [report["replica"] for report in world.reports("replica.reset")] == [C]
    assert world.storages[C].disk.start[0] == 3
    world.append(1)
    assert world.storages[C].payloads() == world.storages[A].payloads()[2:]
    assert not world.storages[C].disk.suspect


def test_a_source_that_removes_segments_is_read_from_the_archived_mark(world):
    mark = archive(world, last=3)
    world.lose(C)
    world.storages[C].disk.entries.pop()
    world.storages[C].disk.entries.pop()
    world.storages[C].disk.suspect = True
    disk = world.storages[C].disk
    disk.confirmed, disk.provisional = 1, None
    copied = len(world.all_sent(wire.RangeRaw))

    def fetches():
        return len(world.all_sent(wire.RangeRaw)) > copied

    world.wait(2_000)
    world.step_until(fetches)
    remove_archived(world, 3)
    world.run_for(3_000)
    assert [report["last"] for report in world.reports("replica.reset")] == [mark.last]
    assert world.storages[C].payloads() == world.storages[A].payloads()


def test_a_trusted_replica_that_lags_is_completed_and_not_reset():
    """A reset replica would not count, so the loss of another replica would block recovery."""
    world = ArchivingWorld()
    world.open()
    world.silent = {C}
    world.append(2)
    replica, request = begin(world)
    assert replica != C
    finish(world, replica, request)
    world.run()
    assert world.marker.archived.last == 1
    assert world.storages[C].last == -1
    world.lose(B)
    world.silent = set()
    world.reopen()
    world.run_for(3_000)
    assert not world.reports("replica.reset")
    assert world.storages[C].payloads() == world.storages[A].payloads()


def test_a_replica_that_no_source_can_complete_is_reset_after_a_session_opens_without_it():
    """ZooKeeper then records the replica as closed, so no session needs its log."""
    world = ReplicationWorld(limits=replace(ARCHIVING, range_bytes_max=1))
    world.open()
    world.silent = {C}
    world.append(1, batches=40)
    replica, request = begin(world)
    assert replica != C
    finish(world, replica, request)
    world.run()
    world.lose(A)
    world.silent = set()
    world.wait(2_000)
    world.step_until(lambda: world.all_sent(wire.RangeRaw))
    world.silent = {C}
    world.run_for(LIMITS.opening_grace_ms)
    assert world.store.open_session_id == 1
    assert world.storages[C].last < 39
    remove_archived(world, 39)
    world.silent = set()
    world.run_for(3_000)
    assert [report["replica"] for report in world.reports("replica.reset")] == [C]
    world.append(1)
    assert world.store.session.claim.session_id == 1
    assert len(world.store.session.engaged) == 3


def test_a_new_owner_reads_the_last_commit_stamp_from_the_archive():
    world = new_world()
    archive(world)
    remove_archived(world, 5, (A, B, C))
    other = world.other_server()
    other.marker = world.marker
    other.open(generation=2)
    (settled,) = other.all_reported(SessionSettled)
    assert (settled.committed_last, settled.stamp_ms) == (5, 9)
    other.append(1)
    assert other.store.high_water_mark == 6


# ---- a restored partition: its log begins after a recorded mark

ORIGIN = ArchivedMark(41, b"chain-at-forty-1", 700, 3, 8, "m0")


def restored_world():
    world = ReplicationWorld(limits=ARCHIVING)
    world.marker = replace(world.marker, archived=ORIGIN)
    world.metadata = PartitionMetadata(0, 60)
    return world


def test_a_new_partition_with_an_archived_mark_begins_after_it():
    world = restored_world()
    world.open()
    (opened,) = world.all_reported(SessionOpened)
    assert (opened.session_id, opened.high_water_mark, opened.chain) == (61, *ORIGIN[:2])
    (settled,) = world.all_reported(SessionSettled)
    assert settled.stamp_ms == ORIGIN.stamp_ms, "commit times continue"
    assert world.marker.archived == ORIGIN
    world.append(2)
    assert world.store.high_water_mark == 43
    for name in (A, B, C):
        disk = world.storages[name].disk
        assert disk.start == (ORIGIN.last, ORIGIN.chain)
        assert not disk.suspect
    _, request = begin(world)
    assert (request.first, request.chain_before, request.manifest) == (42, ORIGIN.chain, "m0")


def test_a_failed_first_session_does_not_change_where_a_new_log_begins():
    world = restored_world()
    world.decide()
    assert {world.storages[name].disk.start[0] for name in (A, B, C)} == {ORIGIN.last}
    other = world.other_server()
    other.open(generation=2)
    other.append(1)
    assert other.store.high_water_mark == 42
    assert len(world.all_sent(wire.ResetLog)) == 3
    assert not other.all_sent(wire.ResetLog)


def test_a_storage_of_an_older_version_receives_no_request_to_reset_its_log():
    """The protocol version of this storage does not have the request."""
    world = restored_world()
    world.storages[C].supports_archiving = False
    world.open()
    world.run_for(3_000)
    assert [report["replica"] for report in world.reports("replica.reset")] == [A, B]
    assert len(world.store.session.engaged) == 2


def test_a_new_partition_with_an_archived_mark_rejects_a_replica_with_records():
    world = ReplicationWorld(limits=ARCHIVING)
    world.open()
    world.append(2)
    other = world.other_server()
    other.metadata, other.metadata_version = PartitionMetadata(0, 60), 0
    other.marker = PartitionMarker(MarkerState.NEW, archived=ORIGIN)
    other.take_ownership()
    other.run_for(3_000)
    assert other.store.open_session_id is None
    assert (
        "found records up to transaction 1" in other.reports("partition.open_failed")[0]["reason"]
    )
    assert not other.all_sent(wire.ResetLog)


def returning_owner():
    """Return an owner with batches in doubt up to ID 7, which another owner has archived."""
    world = new_world()
    world.submit(2)
    for name in (A, B):  # The appends are committed, but this owner gets no answer.
        world.storages[name].handle(world.requests[name].popleft())
    other = world.other_server()
    other.limits = ARCHIVING
    other.store = other._new_store(ARCHIVING)
    other.open(generation=2)
    other.numbers = 100
    other.append(1)
    archive(other, last=8)
    remove_archived(other, 8, (A, B, C))
    world.check_replica_states(other)
    world.lose(A)
    world.take_ownership(generation=3)
    return world


def test_a_returning_owner_settles_its_appends_from_batches_in_the_archive():
    world = returning_owner()
    world.reopen()
    assert world.all_reported(SessionSettled)[-1].committed_last == 7
    world.append(1)
    assert world.store.high_water_mark == 9


def test_archived_damage_is_repaired_from_the_archive_if_no_log_has_the_records(world):
    archive(world, last=3)
    remove_archived(world, 3)
    world.lose(A)
    world.reopen()
    world.run_for(3_000)
    assert world.store.session.is_settled
    report_damage(world, C, 3, 5)
    world.run()
    assert [report["ids"] for report in world.reports("replica.repaired")] == ["3..3", "5..5"]
    assert not world.storages[C].disk.damaged


def test_the_archive_is_not_queried_for_damage_above_the_archived_mark(world):
    archive(world, last=3)
    for name in (A, B, C):
        report_damage(world, name, 4)
    world.sent.clear()
    world.run_for(3_000)
    assert not world.all_sent(wire.RangeRaw)


@pytest.mark.parametrize("removed", [-1, 3])
def test_an_empty_late_replica_begins_at_the_mark_of_the_session(removed):
    """Meanwhile the archived mark has risen, but the replica copies the later batches."""
    world = ReplicationWorld(limits=ARCHIVING)
    world.open()
    world.append(2, batches=2)
    world.down = {C}
    world.lose(C)
    world.reopen()
    mark = world.all_reported(SessionOpened)[-1].high_water_mark
    assert mark == 3
    world.append(2, batches=2)
    assert archive(world).last == 7
    if removed >= 0:
        remove_archived(world, removed)
    wipe(world, C)
    world.down = set()
    world.run_for(3_000)
    assert [report["last"] for report in world.reports("replica.reset")] == [mark]
    assert world.storages[C].last == 7
    assert world.store.readable_replicas == [A, B, C]


def test_after_each_failure_the_next_attempt_uses_the_other_of_two_replicas():
    world = ReplicationWorld(A, B, limits=ARCHIVING)
    world.open()
    world.append(2)
    replicas, pause = [], INTERVAL_MS
    for count in range(4):
        world.run_for(pause)
        replica, request = attempts(world)[count]
        replicas.append(replica)
        finish(world, replica, request, last=-1, manifest="", error="store: 503")
        pause = INTERVAL_MS << count
    assert replicas in ([A, B, A, B], [B, A, B, A])


def test_a_mark_below_the_start_of_the_logs_is_reported_as_a_rollback_of_zookeeper(world):
    old = archive(world, last=3)
    finish(world, *attempts(world)[-1])
    world.run()
    assert world.marker.archived.last == 5
    remove_archived(world, 5, (A, B, C))
    world.marker = replace(world.marker, archived=old)
    world.marker_version += 1
    world.lose(A)
    for _ in range(20):
        world.run()
        world.wait(50)
    assert world.store.open_session_id is None
    reasons = [report["reason"] for report in world.reports("partition.open_failed")]
    assert reasons
    assert (
        "begins later: the log is not the archived one, or ZooKeeper's data was rolled back"
        in (reasons[-1])
    )


def test_a_replica_with_another_chain_does_not_stop_archiving(world):
    """For example, a reconstructed batch has another chain."""
    storage = world.storages[A]
    handle = storage.handle

    def differ(message):
        if isinstance(message, wire.LineageRequest):
            return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "no batch end")
        return handle(message)

    storage.handle = differ
    begin(world)
    for count in range(4):
        replica, request = attempts(world)[-1]
        if replica == A:
            finish(world, replica, request, last=-1, manifest="", error="reconstructed")
        else:
            finish(world, replica, request)
        world.run_for(INTERVAL_MS << count)
    assert world.marker.archived.last == 5


@pytest.mark.parametrize("readable", [(), (C,)])
def test_archived_batches_in_doubt_have_unknown_outcomes_if_no_replica_reads_the_archive(readable):
    world = returning_owner()
    for name, storage in world.storages.items():
        if name in readable:
            continue

        def fail(message, handle=storage.handle):
            answer = handle(message)
            if not isinstance(answer, wire.LineageResponse) or message.last > 7:
                return answer
            code = ArchiveUnavailable.code
            return wire.Nack(message.session_id, message.sequence, 0, code, 0, "store: 503")

        storage.handle = fail
    world.reopen()
    settled = world.all_reported(SessionSettled)[-1]
    assert (settled.committed_last, settled.has_unknown_outcomes) == (
        (7, False) if readable else (5, True)
    )


def lag(world):
    """Return the backlog, with its age instead of a time."""
    count, byte_count, since_ms = world.store.archive_backlog
    return count, byte_count, None if since_ms is None else world.now_ms - since_ms


def test_the_backlog_is_the_reported_backlog_plus_later_appends(world):
    record_bytes = len(world.storages[A].disk.entries[0].records[0])
    assert lag(world)[:2] == (6, 6 * record_bytes), "estimated from the average of the session"
    replica, request = begin(world)
    assert lag(world)[2] == INTERVAL_MS, "the age starts when the backlog is noticed"
    report = {"unarchived_last": 5, "unarchived_bytes": 900, "unarchived_age_ms": 50_000}
    finish(world, replica, request, last=-1, manifest="", **report)
    assert lag(world) == (6, 900, 50_000)
    world.append(2)
    assert lag(world)[:2] == (8, 900 + 2 * record_bytes)
    replica, request = begin(world)
    finish(world, replica, request, last=3, unarchived_last=5, unarchived_bytes=900)
    world.run()
    assert lag(world)[:2] == (4, 300 + 2 * record_bytes), (
        "4 of the 6 reported transactions are archived"
    )
    finish(world, *attempts(world)[-1])
    world.run()
    assert lag(world) == (0, 0, None)


def test_flag_is_archiving_is_true_during_an_attempt():
    world = ArchivingWorld(limits=replace(ARCHIVING, archive_interval_ms=60_000))
    world.open()
    world.append(2, batches=3)
    assert not world.store.is_archiving
    replica, request = begin(world)
    assert world.store.is_archiving
    finish(world, replica, request)
    world.run()
    assert world.marker.archived.last == 5
    assert not world.store.is_archiving
