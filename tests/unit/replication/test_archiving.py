"""Archiving of a partition: uploads, recorded marks, and what replicas receive."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_bench import (
    ARCHIVING,
    INTERVAL_MS,
    ArchivingBench,
    archive,
    attempts,
    begin,
    chain_at,
    end_collection,
    finish,
    new_bench,
    progress,
)
from tests.unit.replication.bench import LIMITS, A, B, Bench, C, wire
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
def bench():
    """Three replicas with batches 0..1, 2..3 and 4..5."""
    return new_bench()


def announced_marks(bench):
    return [(name, each.last) for name, each in bench.sent if isinstance(each, wire.SetArchived)]


def test_a_range_is_archived_compared_recorded_and_then_announced(bench):
    replica, request = begin(bench)
    assert (request.first, request.last, request.chain_before) == (0, 5, GENESIS_CHAIN)
    assert (request.manifest, request.manifest_crc) == ("", 0)
    lineages = len(bench.all_sent(wire.LineageRequest))
    finish(bench, replica, request, last=3)
    (compared,) = bench.all_sent(wire.LineageRequest)[lineages:]
    assert (compared.first, compared.last) == (3, 3)
    assert bench.sent[-1][0] != replica
    assert bench.marker.archived is None
    bench.run(answers_zookeeper=False)
    assert bench.zookeeper_requests[0].marker.archived == ArchivedMark(
        3, chain_at(bench, 3), 9, 0, 7, "m1"
    )
    assert announced_marks(bench) == []
    bench.run()
    assert bench.marker.archived.last == 3
    assert sorted(announced_marks(bench)) == [(A, 3), (B, 3), (C, 3)]
    assert bench.reports("archive.manifest_recorded") == [
        {"session": 0, "last": 3, "manifest": "m1"}
    ]


def test_the_next_attempt_starts_at_once_with_the_recorded_manifest(bench):
    first = archive(bench, last=3)
    _, request = attempts(bench)[-1]
    (collection,) = bench.all_sent(wire.CollectGarbage)
    assert (request.first, request.last, request.attempt) == (4, 5, collection.attempt + 1)
    assert (request.chain_before, request.manifest, request.manifest_crc) == (first.chain, "m1", 7)


@pytest.mark.parametrize("is_archived", [False, True])
def test_an_attempt_without_progress_is_abandoned_and_another_replica_tries(bench, is_archived):
    replica, request = begin(bench)
    bench.run_for(NO_PROGRESS_MS_MAX - 2 * INTERVAL_MS)
    bench.silent = {A, B, C}
    if is_archived:
        finish(bench, replica, request)  # no other replica has returned its chain
    else:
        progress(bench, replica, replace(request, attempt=9))
        progress(bench, next(name for name in bench.names if name != replica), request)
        bench.wait(2 * INTERVAL_MS - 1_000)
        assert not bench.reports("archive.failed"), "the other reports belong to no attempt"
        progress(bench, replica, request)
    bench.wait(NO_PROGRESS_MS_MAX - 1)
    assert not bench.reports("archive.failed")
    bench.wait(1)
    (report,) = bench.reports("archive.failed")
    assert (report["replica"], report["reason"]) == (
        replica,
        "the storage has reported no progress for 300000 ms",
    )
    bench.silent = set()
    other, second = begin(bench)
    assert (other != replica, second.attempt) == (True, 2)
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived is None, "a late result is not used"
    finish(bench, other, second)
    bench.run()
    assert bench.marker.archived.manifest == "m2"


def test_a_late_rejection_of_an_abandoned_attempt_is_ignored(bench):
    bench.silent = {A, B, C}
    bench.wait(INTERVAL_MS)
    ((replica, _),) = attempts(bench)
    bench.silent = {replica}
    bench.run_for(NO_PROGRESS_MS_MAX)
    assert begin(bench)[0] != replica
    bench.silent, bench.rejected = set(), wire.ArchiveRange
    bench.run()
    assert [each["reason"] for each in bench.reports("archive.failed")] == [
        "the storage has reported no progress for 300000 ms"
    ]


def test_no_attempt_starts_during_another_or_without_new_batches(bench):
    replica, request = begin(bench)
    bench.append(1)
    bench.run_for(10 * INTERVAL_MS)
    assert len(attempts(bench)) == 1
    finish(bench, replica, request)
    bench.run()
    replica, request = attempts(bench)[-1]
    assert request.first == 6
    finish(bench, replica, request)
    bench.run_for(10 * INTERVAL_MS)
    assert len(attempts(bench)) == 2
    assert bench.marker.archived.last == 6


def test_a_range_that_is_too_small_is_requested_again_after_the_interval(bench):
    replica, request = begin(bench)
    finish(bench, replica, request, last=-1, manifest="", manifest_crc=0)
    bench.run_for(INTERVAL_MS - 1)
    assert len(attempts(bench)) == 1
    bench.run_for(1)
    assert len(attempts(bench)) == 2
    assert not bench.reports("archive.failed")


def test_attempts_after_a_failure_use_another_replica_and_back_off(bench):
    replicas, pause = [], INTERVAL_MS
    for count in range(3):
        bench.run_for(pause)
        assert len(attempts(bench)) == count + 1
        replica, request = attempts(bench)[-1]
        replicas.append(replica)
        finish(bench, replica, request, last=-1, manifest="", error="store: 503")
        pause = INTERVAL_MS << count
        bench.run_for(pause - 1)
        assert len(attempts(bench)) == count + 1
        pause = 1
    assert len(set(replicas)) > 1
    assert bench.reports("archive.failed")[0]["reason"] == "store: 503"
    assert bench.store.open_session_id == 0, "the session continues"
    assert bench.marker.archived is None


def test_a_rejected_request_is_a_failure_of_the_attempt_only(bench):
    for each in bench.storages.values():
        handle = each.handle

        def reject(message, handle=handle):
            if isinstance(message, wire.ArchiveRange):
                return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "no archive")
            return handle(message)

        each.handle = reject
    bench.run_for(INTERVAL_MS)
    (report,) = bench.reports("archive.failed")
    assert report["reason"] == "BadRequest: no archive"
    assert bench.store.open_session_id == 0


def test_a_replica_that_rejects_the_mark_does_not_end_the_attempt(bench):
    storage = bench.storages[C]
    handle = storage.handle

    def reject(message):
        if isinstance(message, wire.SetArchived):
            return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "another chain")
        return handle(message)

    storage.handle = reject
    archive(bench, last=3)
    (report,) = bench.reports("archive.failed")
    assert (report["replica"], report["reason"]) == (C, "BadRequest: another chain")
    replica, request = attempts(bench)[-1]
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived.last == 5


def test_a_chain_that_another_replica_does_not_have_is_not_recorded(bench):
    replica, request = begin(bench)
    finish(bench, replica, request, chain=b"x" * 16)
    bench.run()
    assert bench.marker.archived is None
    (report,) = bench.reports("archive.failed")
    assert report["reason"].startswith(
        f"expected chain hash {'78' * 16} at transaction 5, as archived by {replica}, found"
    )


def test_an_end_within_a_batch_is_not_recorded(bench):
    replica, request = begin(bench)
    finish(bench, replica, request, last=4, chain=chain_at(bench, 5))
    bench.run()
    assert bench.marker.archived is None
    assert "found no batch that ends there at" in bench.reports("archive.failed")[0]["reason"]


def test_results_of_other_attempts_and_replicas_are_ignored(bench):
    replica, request = begin(bench)
    other = next(name for name in bench.names if name != replica)
    finish(bench, other, request)
    finish(bench, replica, replace(request, attempt=9))
    finish(bench, replica, request)
    finish(bench, replica, request, last=3)
    bench.run()
    assert bench.marker.archived.last == 5


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_a_mark_is_recorded_once_despite_a_lost_zookeeper_answer(bench, outcome):
    replica, request = begin(bench)
    finish(bench, replica, request)
    bench.run(answers_zookeeper=False)
    bench.answer_zookeeper(outcome)
    assert announced_marks(bench) == []
    bench.append(1)
    bench.run_for(5_000)
    assert bench.marker.archived.last == 5
    assert bench.store.open_session_id == 0
    assert sorted(announced_marks(bench)) == [(A, 5), (B, 5), (C, 5)]


def test_another_session_in_zookeeper_ends_this_one_before_the_mark_is_recorded(bench):
    replica, request = begin(bench)
    finish(bench, replica, request)
    bench.run(answers_zookeeper=False)
    bench.claim_elsewhere(5)
    bench.run()
    assert bench.marker.archived is None
    assert bench.store.open_session_id != 0


def test_a_later_session_keeps_the_mark_and_continues_after_it(bench):
    mark = archive(bench, last=3)
    bench.lose(A)
    bench.reopen()
    assert bench.marker.archived == mark
    _, request = begin(bench)
    assert (request.first, request.chain_before, request.session_id) == (4, mark.chain, 1)
    assert (A, 3) in announced_marks(bench)


def test_an_attempt_ends_with_its_session(bench):
    replica, request = begin(bench)
    bench.lose(next(name for name in bench.names if name != replica))
    bench.reopen()
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived is None
    assert begin(bench)[1].first == 0


def test_a_log_with_another_chain_at_the_archived_mark_is_not_appended_to(bench):
    mark = archive(bench, last=3)
    bench.marker = replace(bench.marker, archived=mark._replace(chain=b"x" * 16))
    bench.marker_version += 1
    settled = len(bench.all_reported(SessionSettled))
    bench.lose(A)
    bench.wait(3_000)
    bench.run()
    (report, *_) = bench.reports("partition.open_failed")
    assert "the archive has transactions up to 3 with chain hash 7878" in report["reason"]
    assert len(bench.all_reported(SessionSettled)) == settled
    assert bench.store.open_session_id is None


def test_a_log_that_ends_below_the_archived_mark_is_rejected(bench):
    mark = archive(bench, last=3)
    bench.marker = replace(bench.marker, archived=mark._replace(last=9))
    bench.marker_version += 1
    bench.lose(A)
    bench.wait(3_000)
    bench.run()
    assert bench.reports("partition.open_failed")[0]["reason"] == (
        "the log of the replicas ends at transaction 5, but 9 is archived"
    )


def test_a_single_replica_archives_without_a_comparison():
    bench = new_bench(A)
    assert archive(bench).last == 5
    assert announced_marks(bench) == [(A, 5)]


def test_a_replica_that_lags_is_compared_and_notified_when_it_has_caught_up(bench):
    bench.silent = {B, C}
    bench.submit()
    bench.run()
    bench.silent = set()
    bench.run_for(INTERVAL_MS)
    replica, request = attempts(bench)[-1]
    assert request.last in {5, 6}
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived.last == request.last


def test_storages_of_an_older_version_receive_no_archive_requests():
    bench = Bench(limits=ARCHIVING)
    for each in bench.storages.values():
        each.supports_archiving = False
    bench.open()
    bench.append(2)
    bench.run_for(5 * INTERVAL_MS)
    assert not attempts(bench)
    assert bench.store.wake_at_ms > bench.now_ms


def test_without_an_archive_interval_no_range_is_archived():
    bench = Bench()
    bench.open()
    bench.append(2)
    bench.run_for(10 * INTERVAL_MS)
    assert not attempts(bench)
    assert bench.store.wake_at_ms is None


# ---- garbage


def collections(bench):
    return [each for each in bench.sent if isinstance(each[1], wire.CollectGarbage)]


def test_garbage_is_collected_when_a_mark_is_recorded_and_then_every_hour(bench):
    bench.run_for(2 * COLLECTION_INTERVAL_MS)
    assert not collections(bench), "no mark is recorded"
    replica, request = attempts(bench)[-1]
    bench.silent = {A, B, C}
    finish(bench, replica, request, last=3)
    bench.silent = set()
    bench.run(answers_zookeeper=False)
    assert not collections(bench), "the write of the mark has no known outcome"
    bench.run()
    ((_, collection),) = collections(bench)
    mark = bench.marker.archived
    assert (collection.last, collection.chain, collection.manifest, collection.manifest_crc) == (
        3,
        mark.chain,
        mark.manifest,
        7,
    )
    assert collection.attempt > request.attempt
    replica, request = attempts(bench)[-1]
    assert request.attempt > collection.attempt
    finish(bench, replica, request)
    bench.run()
    bench.wait(COLLECTION_INTERVAL_MS - 1)
    assert len(collections(bench)) == 1
    bench.wait(1)
    assert collections(bench)[1][1].last == 5
    assert len({replica for replica, _ in collections(bench)}) == 2


@pytest.mark.parametrize("is_uploading", [False, True])
def test_collections_and_attempts_exclude_each_other(bench, is_uploading):
    archive(bench)
    bench.wait(COLLECTION_INTERVAL_MS - 2 * INTERVAL_MS)
    bench.collects = False
    if is_uploading:
        bench.append(1)
        replica, request = begin(bench)
        bench.run_for(2 * INTERVAL_MS)
        assert len(collections(bench)) == 1
        finish(bench, replica, request)
        bench.run()
    else:
        bench.run_for(2 * INTERVAL_MS)
        bench.append(1)
        count = len(attempts(bench))
        bench.run_for(2 * INTERVAL_MS)
        assert len(attempts(bench)) == count
        end_collection(bench, *collections(bench)[-1])
        bench.run_for(INTERVAL_MS)
        assert len(attempts(bench)) == count + 1
    assert len(collections(bench)) == 2


def test_an_incomplete_garbage_collection_continues_after_the_archive_interval(bench):
    bench.collects = False
    archive(bench)
    end_collection(bench, *collections(bench)[-1], has_more=True)
    bench.wait(INTERVAL_MS - 1)
    assert len(collections(bench)) == 1
    bench.wait(1)
    assert len(collections(bench)) == 2
    end_collection(bench, *collections(bench)[-1])
    bench.run_for(COLLECTION_INTERVAL_MS - 1)
    assert len(collections(bench)) == 2


@pytest.mark.parametrize("fault", ["error", "rejection", "silence"])
def test_a_failed_collection_is_reported_and_archiving_continues(bench, fault):
    bench.collects = False
    bench.rejected = wire.CollectGarbage if fault == "rejection" else ()
    archive(bench, last=3)
    replica, request = collections(bench)[-1]
    if fault == "error":
        end_collection(bench, replica, request, error="listed files are missing")
    elif fault == "silence":
        bench.wait(NO_PROGRESS_MS_MAX)
    (report,) = bench.reports("archive.garbage_collection_failed")
    assert report["replica"] == replica
    assert bench.store.open_session_id == 0
    bench.run_for(INTERVAL_MS)
    finish(bench, *attempts(bench)[-1])
    bench.run()
    assert bench.marker.archived.last == 5
    bench.run_for(COLLECTION_INTERVAL_MS)
    assert len(collections(bench)) == 2
    assert not bench.reports("archive.failed")


def test_no_garbage_is_collected_while_a_replica_is_absent(bench):
    bench.lose(C)
    bench.down.add(C)
    bench.reopen()
    archive(bench)
    bench.run_for(COLLECTION_INTERVAL_MS)
    assert not collections(bench)
    bench.down.clear()
    bench.run_for(10_000)
    bench.append(1)
    bench.run_for(INTERVAL_MS)
    finish(bench, *attempts(bench)[-1])
    bench.run_for(INTERVAL_MS)
    assert len(collections(bench)) == 1


def test_no_garbage_is_collected_if_a_log_begins_above_the_mark(bench):
    """ZooKeeper was rolled back: the archive may have the records before that start."""
    replica, request = begin(bench)
    each = bench.store.session.replicas[C]
    each.repair.start = 4
    finish(bench, replica, request, last=3)
    bench.run_for(INTERVAL_MS)
    assert not collections(bench)
    (report,) = bench.reports("archive.garbage_collection_failed")
    assert report["replica"] == C
    assert report["reason"].startswith(
        "the log of the replica begins after transaction 4, but in ZooKeeper the "
        "last archived transaction is 3:"
    )
    assert attempts(bench)[-1][1].first == 4, "archiving continues"


# ---- replicas without the archived records


def test_a_checkpoint_is_due_once_when_much_is_archived_above_the_mark():
    bench = ArchivingBench(limits=replace(ARCHIVING, archived_bytes_max=1))
    bench.open()
    bench.append(2, batches=3)
    assert not bench.all_reported(CheckpointDue)
    archive(bench, last=1)
    assert bench.all_reported(CheckpointDue) == [CheckpointDue(0)]
    bench.append(1)
    replica, request = attempts(bench)[-1]
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived.last == 5
    assert len(bench.all_reported(CheckpointDue)) == 1


def test_only_the_archived_part_above_the_mark_counts_for_a_checkpoint():
    sent = new_bench().all_sent(wire.AppendRaw, A)
    size = sum(len(each.records) for each in sent)
    bench = ArchivingBench(limits=replace(ARCHIVING, archived_bytes_max=size))
    bench.open()
    bench.append(2, batches=5)
    archive(bench, last=5)
    assert not bench.all_reported(CheckpointDue)
    replica, request = attempts(bench)[-1]
    finish(bench, replica, request, last=7)
    bench.run()
    assert [each.session_id for each in bench.all_reported(CheckpointDue)] == [0]
    # All archived batches are below the mark of the next session.
    bench.lose(A)
    bench.reopen()
    assert bench.store.open_session_id == 1
    archive(bench)
    assert bench.marker.archived.last == 9
    assert len(bench.all_reported(CheckpointDue)) == 1


def remove_archived(bench, last, names=(A, B)):
    for name in names:
        bench.storages[name].remove_up_to(last)


def wipe(bench, name):
    """Replace a storage's log by an empty, suspect one."""
    disk = bench.storages[name].disk
    disk.entries.clear()
    disk.confirmed, disk.provisional, disk.suspect, disk.last_session = -1, None, True, -1


def test_an_emptied_replica_begins_after_the_archived_mark(bench):
    archive(bench, last=3)
    remove_archived(bench, 1)
    bench.lose(C)
    wipe(bench, C)
    bench.reopen()
    bench.run_for(3_000)
    assert [each["replica"] for each in bench.reports("replica.reset")] == [C]
    assert bench.storages[C].disk.start[0] == 3
    bench.append(1)
    assert bench.storages[C].payloads() == bench.storages[A].payloads()[2:]
    assert not bench.storages[C].disk.suspect


def test_a_source_that_removes_segments_is_read_from_the_archived_mark(bench):
    mark = archive(bench, last=3)
    bench.lose(C)
    bench.storages[C].disk.entries.pop()
    bench.storages[C].disk.entries.pop()
    bench.storages[C].disk.suspect = True
    disk = bench.storages[C].disk
    disk.confirmed, disk.provisional = 1, None
    copied = len(bench.all_sent(wire.RangeRaw))

    def fetches():
        return len(bench.all_sent(wire.RangeRaw)) > copied

    bench.wait(2_000)
    bench.step_until(fetches)
    remove_archived(bench, 3)
    bench.run_for(3_000)
    assert [each["last"] for each in bench.reports("replica.reset")] == [mark.last]
    assert bench.storages[C].payloads() == bench.storages[A].payloads()


def test_a_trusted_replica_that_lags_is_completed_and_not_reset():
    """A reset replica would not count, so the loss of another replica would block recovery."""
    bench = ArchivingBench()
    bench.open()
    bench.silent = {C}
    bench.append(2)
    replica, request = begin(bench)
    assert replica != C
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived.last == 1
    assert bench.storages[C].last == -1
    bench.lose(B)
    bench.silent = set()
    bench.reopen()
    bench.run_for(3_000)
    assert not bench.reports("replica.reset")
    assert bench.storages[C].payloads() == bench.storages[A].payloads()


def test_a_trusted_replica_without_a_source_is_reset_when_the_session_is_open_without_it():
    """ZooKeeper then records the replica as closed, so no session needs its log."""
    bench = Bench(limits=replace(ARCHIVING, range_bytes_max=1))
    bench.open()
    bench.silent = {C}
    bench.append(1, batches=40)
    replica, request = begin(bench)
    assert replica != C
    finish(bench, replica, request)
    bench.run()
    bench.lose(A)
    bench.silent = set()
    bench.wait(2_000)
    bench.step_until(lambda: bench.all_sent(wire.RangeRaw))
    bench.silent = {C}
    bench.run_for(LIMITS.opening_grace_ms)
    assert bench.store.open_session_id == 1
    assert bench.storages[C].last < 39
    remove_archived(bench, 39)
    bench.silent = set()
    bench.run_for(3_000)
    assert [each["replica"] for each in bench.reports("replica.reset")] == [C]
    bench.append(1)
    assert bench.store.session.claim.session_id == 1
    assert len(bench.store.session.engaged) == 3


def test_a_new_owner_reads_the_last_commit_stamp_from_the_archive():
    bench = new_bench()
    archive(bench)
    remove_archived(bench, 5, (A, B, C))
    other = bench.other_server()
    other.marker = bench.marker
    other.open(generation=2)
    (settled,) = other.all_reported(SessionSettled)
    assert (settled.committed_last, settled.stamp_ms) == (5, 9)
    other.append(1)
    assert other.store.high_water_mark == 6


# ---- a restored partition: its log begins after a recorded mark

ORIGIN = ArchivedMark(41, b"chain-at-forty-1", 700, 3, 8, "m0")


def restored_bench():
    bench = Bench(limits=ARCHIVING)
    bench.marker = replace(bench.marker, archived=ORIGIN)
    bench.metadata = PartitionMetadata(0, 60)
    return bench


def test_a_new_partition_with_an_archived_mark_begins_after_it():
    bench = restored_bench()
    bench.open()
    (opened,) = bench.all_reported(SessionOpened)
    assert (opened.session_id, opened.high_water_mark, opened.chain) == (61, *ORIGIN[:2])
    (settled,) = bench.all_reported(SessionSettled)
    assert settled.stamp_ms == ORIGIN.stamp_ms, "commit times continue"
    assert bench.marker.archived == ORIGIN
    bench.append(2)
    assert bench.store.high_water_mark == 43
    for name in (A, B, C):
        disk = bench.storages[name].disk
        assert disk.start == (ORIGIN.last, ORIGIN.chain)
        assert not disk.suspect
    _, request = begin(bench)
    assert (request.first, request.chain_before, request.manifest) == (42, ORIGIN.chain, "m0")


def test_a_failed_first_session_does_not_change_where_a_new_log_begins():
    bench = restored_bench()
    bench.decide()
    assert {bench.storages[name].disk.start[0] for name in (A, B, C)} == {ORIGIN.last}
    other = bench.other_server()
    other.open(generation=2)
    other.append(1)
    assert other.store.high_water_mark == 42
    assert len(bench.all_sent(wire.ResetLog)) == 3
    assert not other.all_sent(wire.ResetLog)


def test_a_storage_of_an_older_version_is_not_requested_to_reset_its_log():
    """The protocol version of this storage does not have the request."""
    bench = restored_bench()
    bench.storages[C].supports_archiving = False
    bench.open()
    bench.run_for(3_000)
    assert [each["replica"] for each in bench.reports("replica.reset")] == [A, B]
    assert len(bench.store.session.engaged) == 2


def test_a_new_partition_with_an_archived_mark_rejects_a_replica_with_records():
    bench = Bench(limits=ARCHIVING)
    bench.open()
    bench.append(2)
    other = bench.other_server()
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
    bench = new_bench()
    bench.submit(2)
    for name in (A, B):  # The appends are committed, but this owner gets no answer.
        bench.storages[name].handle(bench.requests[name].popleft())
    other = bench.other_server()
    other.limits = ARCHIVING
    other.store = other._new_store(ARCHIVING)
    other.open(generation=2)
    other.numbers = 100
    other.append(1)
    archive(other, last=8)
    remove_archived(other, 8, (A, B, C))
    bench.check_replica_states(other)
    bench.lose(A)
    bench.take_ownership(generation=3)
    return bench


def test_a_returning_owner_finds_its_batches_in_the_archive():
    bench = returning_owner()
    bench.reopen()
    assert bench.all_reported(SessionSettled)[-1].committed_last == 7
    bench.append(1)
    assert bench.store.high_water_mark == 9


def test_archived_damage_is_repaired_from_the_archive_if_no_log_has_the_records(bench):
    archive(bench, last=3)
    remove_archived(bench, 3)
    bench.lose(A)
    bench.reopen()
    bench.run_for(3_000)
    assert bench.store.session.is_settled
    report_damage(bench, C, 3, 5)
    bench.run()
    assert [each["ids"] for each in bench.reports("replica.repaired")] == ["3..3", "5..5"]
    assert not bench.storages[C].disk.damaged


def test_the_archive_is_not_queried_for_damage_above_the_archived_mark(bench):
    archive(bench, last=3)
    for name in (A, B, C):
        report_damage(bench, name, 4)
    bench.sent.clear()
    bench.run_for(3_000)
    assert not bench.all_sent(wire.RangeRaw)


@pytest.mark.parametrize("removed", [-1, 3])
def test_an_empty_late_replica_begins_at_the_mark_of_the_session(removed):
    """Meanwhile the archived mark has risen, but the replica copies the later batches."""
    bench = Bench(limits=ARCHIVING)
    bench.open()
    bench.append(2, batches=2)
    bench.down = {C}
    bench.lose(C)
    bench.reopen()
    mark = bench.all_reported(SessionOpened)[-1].high_water_mark
    assert mark == 3
    bench.append(2, batches=2)
    assert archive(bench).last == 7
    if removed >= 0:
        remove_archived(bench, removed)
    wipe(bench, C)
    bench.down = set()
    bench.run_for(3_000)
    assert [each["last"] for each in bench.reports("replica.reset")] == [mark]
    assert bench.storages[C].last == 7
    assert bench.store.readable_replicas == [A, B, C]


def test_failures_alternate_between_two_replicas():
    bench = Bench(A, B, limits=ARCHIVING)
    bench.open()
    bench.append(2)
    replicas, pause = [], INTERVAL_MS
    for count in range(4):
        bench.run_for(pause)
        replica, request = attempts(bench)[count]
        replicas.append(replica)
        finish(bench, replica, request, last=-1, manifest="", error="store: 503")
        pause = INTERVAL_MS << count
    assert replicas in ([A, B, A, B], [B, A, B, A])


def test_a_mark_below_the_start_of_the_logs_is_reported_as_a_rollback_of_zookeeper(bench):
    old = archive(bench, last=3)
    finish(bench, *attempts(bench)[-1])
    bench.run()
    assert bench.marker.archived.last == 5
    remove_archived(bench, 5, (A, B, C))
    bench.marker = replace(bench.marker, archived=old)
    bench.marker_version += 1
    bench.lose(A)
    for _ in range(20):
        bench.run()
        bench.wait(50)
    assert bench.store.open_session_id is None
    reasons = [each["reason"] for each in bench.reports("partition.open_failed")]
    assert reasons
    assert (
        "begins later: the log is not the archived one, or ZooKeeper's data was rolled back"
        in (reasons[-1])
    )


def test_a_replica_with_another_chain_does_not_stop_archiving(bench):
    """For example, a reconstructed batch has another chain."""
    storage = bench.storages[A]
    handle = storage.handle

    def differ(message):
        if isinstance(message, wire.LineageRequest):
            return wire.Nack(message.session_id, message.sequence, 0, 12, 0, "no batch end")
        return handle(message)

    storage.handle = differ
    begin(bench)
    for count in range(4):
        replica, request = attempts(bench)[-1]
        if replica == A:
            finish(bench, replica, request, last=-1, manifest="", error="reconstructed")
        else:
            finish(bench, replica, request)
        bench.run_for(INTERVAL_MS << count)
    assert bench.marker.archived.last == 5


@pytest.mark.parametrize("readable", [(), (C,)])
def test_archived_batches_in_doubt_are_unknown_without_the_object_store(readable):
    bench = returning_owner()
    for name, storage in bench.storages.items():
        if name in readable:
            continue

        def fail(message, handle=storage.handle):
            answer = handle(message)
            if not isinstance(answer, wire.LineageResponse) or message.last > 7:
                return answer
            code = ArchiveUnavailable.code
            return wire.Nack(message.session_id, message.sequence, 0, code, 0, "store: 503")

        storage.handle = fail
    bench.reopen()
    settled = bench.all_reported(SessionSettled)[-1]
    assert (settled.committed_last, settled.has_unknown_outcomes) == (
        (7, False) if readable else (5, True)
    )


def lag(bench):
    """Return the backlog, with its age instead of a time."""
    count, byte_count, since_ms = bench.store.archive_backlog
    return count, byte_count, None if since_ms is None else bench.now_ms - since_ms


def test_the_backlog_is_the_reported_backlog_plus_later_appends(bench):
    record_bytes = len(bench.storages[A].disk.entries[0].records[0])
    assert lag(bench)[:2] == (6, 6 * record_bytes), "estimated from the average of the session"
    replica, request = begin(bench)
    assert lag(bench)[2] == INTERVAL_MS, "the age starts when the backlog is noticed"
    report = {"unarchived_last": 5, "unarchived_bytes": 900, "unarchived_age_ms": 50_000}
    finish(bench, replica, request, last=-1, manifest="", **report)
    assert lag(bench) == (6, 900, 50_000)
    bench.append(2)
    assert lag(bench)[:2] == (8, 900 + 2 * record_bytes)
    replica, request = begin(bench)
    finish(bench, replica, request, last=3, unarchived_last=5, unarchived_bytes=900)
    bench.run()
    assert lag(bench)[:2] == (4, 300 + 2 * record_bytes), (
        "4 of the 6 reported transactions are archived"
    )
    finish(bench, *attempts(bench)[-1])
    bench.run()
    assert lag(bench) == (0, 0, None)


def test_is_archiving_is_true_during_an_attempt():
    bench = ArchivingBench(limits=replace(ARCHIVING, archive_interval_ms=60_000))
    bench.open()
    bench.append(2, batches=3)
    assert not bench.store.is_archiving
    replica, request = begin(bench)
    assert bench.store.is_archiving
    finish(bench, replica, request)
    bench.run()
    assert bench.marker.archived.last == 5
    assert not bench.store.is_archiving
