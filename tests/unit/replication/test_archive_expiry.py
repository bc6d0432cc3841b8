"""Expiry of the archive: the choice of a replica, the recorded state, and the end of an expiry."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_bench import (
    ARCHIVING,
    INTERVAL_MS,
    ArchivingBench,
    archive,
    archived_bench,
    attempts,
    begin,
    end_attempt,
    new_bench,
    next_owner_of,
)
from tests.unit.replication.bench import A, B, C, wire
from waltz_core.replication.archiving import EXPIRY_INTERVAL_MS, EXPIRY_RETRY_MS, NO_PROGRESS_MS_MAX
from waltz_core.replication.session_events import ExpireArchive, ReplicaResponded


@pytest.fixture
def bench():
    return archived_bench()


def expiries(bench):
    return [each for each in bench.sent if isinstance(each[1], wire.ExpireObjects)]


def request(bench, before=2, before_ms=0):
    """Request an expiry; return the replica and the request that it gets."""
    count = len(expiries(bench))
    bench.step(ExpireArchive(before, before_ms))
    bench.run()
    assert len(expiries(bench)) == count + 1
    return expiries(bench)[-1]


def finish(bench, replica, expiry, *, first=2, manifest="e1", error="", **changes):
    """Let a replica report the end of an expiry."""
    expiry = replace(expiry, **changes)
    prefix = expiry.session_id, 0, expiry.partition_id
    notice = wire.ObjectsExpired(*prefix, expiry.attempt, first, manifest, 8, error)
    bench.step(ReplicaResponded(expiry.session_id, replica, notice))


def first_of(bench):
    return bench.marker.archived.first


def test_an_expiry_is_recorded_and_then_announced(bench):
    mark = bench.marker.archived
    replica, expiry = request(bench, before=2, before_ms=77)
    assert (expiry.last, expiry.chain, expiry.manifest) == (3, mark.chain, mark.manifest)
    assert (expiry.before, expiry.before_ms, expiry.retention_ms) == (2, 77, 0)
    assert not bench.store.is_expiry_done(2, 77)
    finish(bench, replica, expiry)
    bench.run(answers_zookeeper=False)
    assert bench.marker.archived == mark
    assert not bench.store.is_expiry_done(2, 77)
    bench.run()
    assert bench.marker.archived == mark._replace(first=2, manifest="e1", manifest_crc=8)
    assert bench.reports("archive.transactions_expired") == [
        {"session": 0, "first": 2, "manifest": "e1"}
    ]
    learned = [
        (name, each.first) for name, each in bench.sent if isinstance(each, wire.SetArchived)
    ]
    assert sorted(learned[-3:]) == [(A, 2), (B, 2), (C, 2)]
    assert bench.store.is_expiry_done(2, 77)
    assert bench.store.is_expiry_done(1, 0)
    assert not bench.store.is_expiry_done(3, 0)


def test_objects_that_are_archived_later_are_a_new_expiry(bench):
    replica, expiry = request(bench, before=100)
    finish(bench, replica, expiry, first=4)
    bench.run()
    assert bench.store.is_expiry_done(100, 0)
    archive(bench)
    assert first_of(bench) == 4, "an attempt keeps the first available ID"
    assert not bench.store.is_expiry_done(100, 0)


@pytest.mark.parametrize(("first", "is_used"), [(0, True), (4, True), (5, False), (-1, False)])
def test_the_first_available_id_is_at_most_the_one_after_the_archived_mark(bench, first, is_used):
    mark = bench.marker.archived
    replica, expiry = request(bench)
    finish(bench, replica, expiry, first=first)
    bench.run()
    assert bench.marker.archived == (
        mark._replace(first=first, manifest="e1", manifest_crc=8) if is_used else mark
    )
    assert len(bench.reports("archive.expiry_failed")) == (0 if is_used else 1)


def test_the_first_available_id_never_decreases(bench):
    replica, expiry = request(bench)
    finish(bench, replica, expiry)
    bench.run()
    replica, expiry = request(bench, before=3)
    finish(bench, replica, expiry, first=1, manifest="e2")
    bench.run()
    assert (first_of(bench), bench.marker.archived.manifest) == (2, "e1")
    (failure,) = bench.reports("archive.expiry_failed")
    assert failure["reason"] == "expected a first available ID in 2..4, found 1"


def test_an_expiry_without_objects_is_not_recorded(bench):
    mark = bench.marker.archived
    replica, expiry = request(bench)
    finish(bench, replica, expiry, first=0, manifest="")
    bench.run()
    assert bench.marker.archived == mark
    assert bench.store.is_expiry_done(2, 0)
    assert not bench.zookeeper_requests


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_an_expiry_is_recorded_once_despite_a_lost_zookeeper_answer(bench, outcome):
    replica, expiry = request(bench)
    finish(bench, replica, expiry)
    bench.run(answers_zookeeper=False)
    bench.answer_zookeeper(outcome)
    assert not bench.store.is_expiry_done(2, 0)
    bench.run_for(5_000)
    assert first_of(bench) == 2
    assert bench.store.is_expiry_done(2, 0)
    assert len(bench.reports("archive.transactions_expired")) == 1


def test_another_session_in_zookeeper_ends_this_one_before_the_expiry_is_recorded(bench):
    replica, expiry = request(bench)
    finish(bench, replica, expiry)
    bench.run(answers_zookeeper=False)
    bench.claim_elsewhere(5)
    kept = bench.marker = replace(bench.marker, archived=None)
    bench.run()
    assert bench.marker.archived == kept.archived
    assert bench.store.open_session_id != 0


def test_an_expiry_ends_with_its_session(bench):
    replica, expiry = request(bench)
    bench.lose(next(name for name in bench.names if name != replica))
    bench.reopen()
    finish(bench, replica, expiry)
    bench.run()
    assert first_of(bench) == 0
    assert not bench.store.is_expiry_done(2, 0)


@pytest.mark.parametrize("kind", ["error", "silence", "rejection"])
def test_a_failed_expiry_is_repeated_by_another_replica(bench, kind):
    if kind == "rejection":
        bench.rejected = (wire.ExpireObjects,)
    replica, expiry = request(bench)
    if kind == "error":
        finish(bench, replica, expiry, error="cannot read m1", manifest="")
    elif kind == "silence":
        bench.run_for(NO_PROGRESS_MS_MAX)
        end_attempt(bench)  # the attempt that has begun meanwhile
    assert len(bench.reports("archive.expiry_failed")) == 1
    bench.rejected = ()
    bench.run_for(EXPIRY_RETRY_MS)
    again, later = expiries(bench)[-1]
    assert (again != replica, later.attempt > expiry.attempt) == (True, True)
    finish(bench, replica, expiry, manifest="late")
    finish(bench, again, later)
    bench.run()
    assert bench.marker.archived.manifest == "e1"


def test_the_last_of_several_requests_is_carried_out_after_the_first(bench):
    replica, expiry = request(bench, before=1)
    bench.step(ExpireArchive(3, 9))
    bench.step(ExpireArchive(2, 0))
    finish(bench, replica, expiry, first=0, manifest="")
    bench.run()
    replica, expiry = expiries(bench)[-1]
    assert (expiry.before, expiry.before_ms) == (3, 9)
    finish(bench, replica, expiry, first=2)
    bench.run()
    assert bench.store.is_expiry_done(3, 9)
    assert len(expiries(bench)) == 2


def test_an_expiry_and_an_attempt_exclude_each_other(bench):
    begin(bench)
    bench.step(ExpireArchive(2, 0))
    bench.run()
    assert not expiries(bench)
    end_attempt(bench)
    bench.run()
    replica, expiry = expiries(bench)[-1]
    count = len(attempts(bench))
    bench.run_for(2 * INTERVAL_MS)
    assert len(attempts(bench)) == count
    finish(bench, replica, expiry)
    bench.run()
    assert attempts(bench)[-1][1].manifest == "e1"


def test_nothing_expires_before_the_first_upload():
    bench = new_bench()
    bench.step(ExpireArchive(2, 0))
    bench.run_for(EXPIRY_RETRY_MS)
    assert not expiries(bench)


def test_with_a_retention_objects_expire_at_intervals():
    bench = ArchivingBench()
    bench.store = bench._new_store(replace(ARCHIVING, archive_retention_ms=5_000))
    bench.open()
    bench.append(2, batches=3)
    archive(bench, last=3)
    ((replica, expiry),) = expiries(bench)
    assert (expiry.before, expiry.before_ms, expiry.retention_ms) == (0, 0, 5_000)
    finish(bench, replica, expiry)
    bench.run()
    assert first_of(bench) == 2
    bench.run_for(INTERVAL_MS)
    end_attempt(bench)
    assert len(expiries(bench)) == 1
    bench.run_for(EXPIRY_INTERVAL_MS)
    end_attempt(bench)
    bench.run_for(0)
    assert len(expiries(bench)) == 2


def test_an_owner_without_an_archive_interval_still_expires_on_request(bench):
    other = next_owner_of(bench)
    replica, expiry = request(other)
    finish(other, replica, expiry, error="cannot read m1", manifest="")
    other.run_for(EXPIRY_RETRY_MS)
    replica, expiry = expiries(other)[-1]
    finish(other, replica, expiry)
    other.run()
    assert first_of(other) == 2
    assert other.store.is_expiry_done(2, 0)
