"""Expiry of the archive: the choice of a replica, the recorded state, and the end of an expiry."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_world import (
    ARCHIVING,
    INTERVAL_MS,
    ArchivingWorld,
    archive,
    archived_world,
    attempts,
    begin,
    end_attempt,
    new_world,
    next_owner_of,
)
from tests.unit.replication.replication_world import A, B, C, wire
from waltz_core.replication.archiving import EXPIRY_INTERVAL_MS, EXPIRY_RETRY_MS, NO_PROGRESS_MS_MAX
from waltz_core.replication.session_events import ExpireArchive, ReplicaResponded


@pytest.fixture
def world():
    return archived_world()


def expiries(world):
    return [message for message in world.sent if isinstance(message[1], wire.ExpireObjects)]


def request(world, before=2, before_ms=0):
    """Request an expiry; return the replica and the request that it gets."""
    count = len(expiries(world))
    world.step(ExpireArchive(before, before_ms))
    world.run()
    assert len(expiries(world)) == count + 1
    return expiries(world)[-1]


def finish(world, replica, expiry, *, first=2, manifest="e1", error="", **changes):
    """Let a replica report the end of an expiry."""
    expiry = replace(expiry, **changes)
    prefix = expiry.session_id, 0, expiry.partition_id
    notice = wire.ObjectsExpired(*prefix, expiry.attempt, first, manifest, 8, error)
    world.step(ReplicaResponded(expiry.session_id, replica, notice))


def first_of(world):
    return world.marker.archived.first


def test_an_expiry_is_recorded_and_then_announced(world):
    mark = world.marker.archived
    replica, expiry = request(world, before=2, before_ms=77)
    assert (expiry.last, expiry.chain, expiry.manifest) == (3, mark.chain, mark.manifest)
    assert (expiry.before, expiry.before_ms, expiry.retention_ms) == (2, 77, 0)
    assert not world.store.is_expiry_done(2, 77)
    finish(world, replica, expiry)
    world.run(answers_zookeeper=False)
    assert world.marker.archived == mark
    assert not world.store.is_expiry_done(2, 77)
    world.run()
    assert world.marker.archived == mark._replace(first=2, manifest="e1", manifest_crc=8)
    assert world.reports("archive.transactions_expired") == [
        {"session": 0, "first": 2, "manifest": "e1"}
    ]
    learned = [
        (name, each.first) for name, each in world.sent if isinstance(each, wire.SetArchived)
    ]
    assert sorted(learned[-3:]) == [(A, 2), (B, 2), (C, 2)]
    assert world.store.is_expiry_done(2, 77)
    assert world.store.is_expiry_done(1, 0)
    assert not world.store.is_expiry_done(3, 0)


def test_an_expiry_does_not_cover_objects_that_are_archived_later(world):
    replica, expiry = request(world, before=100)
    finish(world, replica, expiry, first=4)
    world.run()
    assert world.store.is_expiry_done(100, 0)
    archive(world)
    assert first_of(world) == 4, "an attempt keeps the first available ID"
    assert not world.store.is_expiry_done(100, 0)


@pytest.mark.parametrize(("first", "is_used"), [(0, True), (4, True), (5, False), (-1, False)])
def test_a_first_available_id_above_the_archived_mark_plus_1_is_not_recorded(world, first, is_used):
    mark = world.marker.archived
    replica, expiry = request(world)
    finish(world, replica, expiry, first=first)
    world.run()
    assert world.marker.archived == (
        mark._replace(first=first, manifest="e1", manifest_crc=8) if is_used else mark
    )
    assert len(world.reports("archive.expiry_failed")) == (0 if is_used else 1)


def test_the_first_available_id_never_decreases(world):
    replica, expiry = request(world)
    finish(world, replica, expiry)
    world.run()
    replica, expiry = request(world, before=3)
    finish(world, replica, expiry, first=1, manifest="e2")
    world.run()
    assert (first_of(world), world.marker.archived.manifest) == (2, "e1")
    (failure,) = world.reports("archive.expiry_failed")
    assert failure["reason"] == "expected a first available ID in 2..4, found 1"


def test_an_expiry_without_objects_is_not_recorded(world):
    mark = world.marker.archived
    replica, expiry = request(world)
    finish(world, replica, expiry, first=0, manifest="")
    world.run()
    assert world.marker.archived == mark
    assert world.store.is_expiry_done(2, 0)
    assert not world.zookeeper_requests


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_an_expiry_is_recorded_once_despite_a_lost_zookeeper_answer(world, outcome):
    replica, expiry = request(world)
    finish(world, replica, expiry)
    world.run(answers_zookeeper=False)
    world.answer_zookeeper(outcome)
    assert not world.store.is_expiry_done(2, 0)
    world.run_for(5_000)
    assert first_of(world) == 2
    assert world.store.is_expiry_done(2, 0)
    assert len(world.reports("archive.transactions_expired")) == 1


def test_no_expiry_is_recorded_after_another_session_has_claimed_the_partition(world):
    replica, expiry = request(world)
    finish(world, replica, expiry)
    world.run(answers_zookeeper=False)
    world.claim_elsewhere(5)
    kept = world.marker = replace(world.marker, archived=None)
    world.run()
    assert world.marker.archived == kept.archived
    assert world.store.open_session_id != 0


def test_an_expiry_ends_with_its_session(world):
    replica, expiry = request(world)
    world.lose(next(name for name in world.names if name != replica))
    world.reopen()
    finish(world, replica, expiry)
    world.run()
    assert first_of(world) == 0
    assert not world.store.is_expiry_done(2, 0)


@pytest.mark.parametrize("kind", ["error", "silence", "rejection"])
def test_a_failed_expiry_is_repeated_by_another_replica(world, kind):
    if kind == "rejection":
        world.rejected = (wire.ExpireObjects,)
    replica, expiry = request(world)
    if kind == "error":
        finish(world, replica, expiry, error="cannot read m1", manifest="")
    elif kind == "silence":
        world.run_for(NO_PROGRESS_MS_MAX)
        end_attempt(world)  # the attempt that has begun meanwhile
    assert len(world.reports("archive.expiry_failed")) == 1
    world.rejected = ()
    world.run_for(EXPIRY_RETRY_MS)
    again, later = expiries(world)[-1]
    assert (again != replica, later.attempt > expiry.attempt) == (True, True)
    finish(world, replica, expiry, manifest="late")
    finish(world, again, later)
    world.run()
    assert world.marker.archived.manifest == "e1"


def test_requests_during_an_expiry_are_merged_into_one_expiry_with_their_highest_limits(world):
    replica, expiry = request(world, before=1)
    world.step(ExpireArchive(3, 9))
    world.step(ExpireArchive(2, 0))
    finish(world, replica, expiry, first=0, manifest="")
    world.run()
    replica, expiry = expiries(world)[-1]
    assert (expiry.before, expiry.before_ms) == (3, 9)
    finish(world, replica, expiry, first=2)
    world.run()
    assert world.store.is_expiry_done(3, 9)
    assert len(expiries(world)) == 2


def test_an_expiry_and_an_archiving_attempt_exclude_each_other(world):
    begin(world)
    world.step(ExpireArchive(2, 0))
    world.run()
    assert not expiries(world)
    end_attempt(world)
    world.run()
    replica, expiry = expiries(world)[-1]
    count = len(attempts(world))
    world.run_for(2 * INTERVAL_MS)
    assert len(attempts(world)) == count
    finish(world, replica, expiry)
    world.run()
    assert attempts(world)[-1][1].manifest == "e1"


def test_nothing_expires_before_the_first_upload():
    world = new_world()
    world.step(ExpireArchive(2, 0))
    world.run_for(EXPIRY_RETRY_MS)
    assert not expiries(world)


def test_objects_expire_at_intervals_if_a_retention_is_set():
    world = ArchivingWorld()
    world.store = world._new_store(replace(ARCHIVING, archive_retention_ms=5_000))
    world.open()
    world.append(2, batches=3)
    archive(world, last=3)
    ((replica, expiry),) = expiries(world)
    assert (expiry.before, expiry.before_ms, expiry.retention_ms) == (0, 0, 5_000)
    finish(world, replica, expiry)
    world.run()
    assert first_of(world) == 2
    world.run_for(INTERVAL_MS)
    end_attempt(world)
    assert len(expiries(world)) == 1
    world.run_for(EXPIRY_INTERVAL_MS)
    end_attempt(world)
    world.run_for(0)
    assert len(expiries(world)) == 2


def test_an_owner_without_an_archive_interval_still_expires_transactions_on_request(world):
    other = next_owner_of(world)
    replica, expiry = request(other)
    finish(other, replica, expiry, error="cannot read m1", manifest="")
    other.run_for(EXPIRY_RETRY_MS)
    replica, expiry = expiries(other)[-1]
    finish(other, replica, expiry)
    other.run()
    assert first_of(other) == 2
    assert other.store.is_expiry_done(2, 0)
