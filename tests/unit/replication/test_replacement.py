"""Replacement of an archived object: requests to replicas, and the recorded manifest."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_bench import (
    INTERVAL_MS,
    archived_bench,
    attempts,
    begin,
    end_attempt,
    finish,
    next_owner_of,
)
from tests.unit.replication.bench import A, B, C, wire
from waltz_core.replication.archiving import NO_PROGRESS_MS_MAX
from waltz_core.replication.session_events import ReplaceArchivedObject, ReplacementOutcome

OBJECT = ReplaceArchivedObject("o1", 0, 1, 77)


@pytest.fixture
def bench():
    return archived_bench()


def replacements(bench):
    return [each for each in bench.sent if isinstance(each[1], wire.ReplaceObject)]


def request(bench, wanted=OBJECT):
    """Request a replacement; return the replica and the request that it gets."""
    count = len(replacements(bench))
    bench.step(wanted)
    bench.run()
    assert len(replacements(bench)) == count + 1
    return replacements(bench)[-1]


def report_written(bench, replica, message, **fields):
    """Let a replica report that it has written the object and the manifest."""
    mark = bench.marker.archived
    known = {"last": mark.last, "chain": mark.chain, "manifest": "r1", "manifest_crc": 8}
    finish(bench, replica, message, **known | fields)


def report_failure(bench, replica, message, error="expected IDs from 4 on"):
    report_written(bench, replica, message, manifest="", error=error)


def test_the_new_manifest_is_recorded_and_the_mark_stays(bench):
    mark = bench.marker.archived
    replica, message = request(bench)
    assert (message.object, message.first, message.last) == ("o1", 0, 1)
    assert (message.archived, message.chain, message.manifest) == (3, mark.chain, mark.manifest)
    report_written(bench, replica, message)
    bench.run(answers_zookeeper=False)
    assert bench.marker.archived == mark
    assert bench.store.replacement_outcome(OBJECT) is None, (
        "ZooKeeper has not recorded the replacement"
    )
    bench.run()
    assert bench.marker.archived == mark._replace(manifest="r1", manifest_crc=8)
    assert bench.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, replica, ())
    assert bench.reports("archive.object_replaced") == [
        {"session": 0, "object": "o1", "replica": replica, "manifest": "r1"}
    ]
    assert not bench.reports("archive.transactions_expired")
    learned = [
        (name, each.manifest) for name, each in bench.sent if isinstance(each, wire.SetArchived)
    ]
    assert sorted(learned[-3:]) == [(A, "r1"), (B, "r1"), (C, "r1")]


def test_a_replica_without_the_records_is_followed_by_another(bench):
    replica, message = request(bench)
    report_failure(bench, replica, message)
    bench.run()
    other, later = replacements(bench)[-1]
    assert other != replica
    assert later.attempt > message.attempt
    report_written(bench, replica, message, manifest="late")
    report_written(bench, other, later)
    bench.run()
    assert bench.marker.archived.manifest == "r1"
    reasons = (f"{replica}: expected IDs from 4 on",)
    assert bench.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, other, reasons)


def test_each_replica_is_requested_once_and_the_outcome_has_all_reasons(bench):
    mark = bench.marker.archived
    request(bench)
    for number in range(3):
        report_failure(bench, *replacements(bench)[-1], error=f"reason {number}")
        bench.run()
    requested_replicas = [replica for replica, _ in replacements(bench)]
    assert sorted(requested_replicas) == [A, B, C]
    reasons = tuple(
        f"{replica}: reason {number}" for number, replica in enumerate(requested_replicas)
    )
    assert bench.store.replacement_outcome(OBJECT) == ReplacementOutcome(False, None, reasons)
    assert len(bench.reports("archive.object_replacement_failed")) == 3
    assert bench.marker.archived == mark


def test_a_later_request_for_the_same_object_begins_again(bench):
    request(bench)
    for _ in range(3):
        report_failure(bench, *replacements(bench)[-1])
        bench.run()
    outcome = bench.store.replacement_outcome(OBJECT)
    bench.step(OBJECT)
    bench.run()
    assert bench.store.replacement_outcome(OBJECT) == outcome, "an answer may have been lost"
    later = replace(OBJECT, token=78)
    assert bench.store.replacement_outcome(later) is None
    report_written(bench, *request(bench, later))
    bench.run()
    assert bench.store.replacement_outcome(later).is_replaced


@pytest.mark.parametrize("kind", ["silence", "rejection", "another end"])
def test_a_replica_that_fails_is_not_requested_again(bench, kind):
    if kind == "rejection":
        bench.rejected = (wire.ReplaceObject,)
    bench.step(OBJECT)
    bench.run()
    first, message = replacements(bench)[0]
    if kind == "silence":
        bench.run_for(NO_PROGRESS_MS_MAX)
    elif kind == "another end":
        report_written(bench, first, message, chain=bytes(16))
        bench.run()
    else:
        assert len(replacements(bench)) == 3
        assert not bench.store.replacement_outcome(OBJECT).is_replaced
        return
    second, later = replacements(bench)[1]
    assert second != first
    report_written(bench, second, later)
    bench.run()
    assert bench.marker.archived.manifest == "r1"
    (reason,) = bench.store.replacement_outcome(OBJECT).failures
    expected = (
        "the storage has reported no progress for"
        if kind == "silence"
        else "expected a manifest that ends at transaction 3"
    )
    assert f"{first}: {expected}" in reason


def test_a_request_for_a_replaced_object_has_no_effect(bench):
    mark = bench.marker.archived
    report_written(bench, *request(bench), manifest="")
    bench.run()
    assert bench.marker.archived == mark
    assert bench.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, None, ())


def test_a_replacement_and_an_attempt_exclude_each_other(bench):
    begin(bench)
    bench.step(OBJECT)
    bench.run()
    assert not replacements(bench)
    end_attempt(bench)
    bench.run()
    replica, message = replacements(bench)[-1]
    count = len(attempts(bench))
    bench.run_for(2 * INTERVAL_MS)
    assert len(attempts(bench)) == count
    report_written(bench, replica, message)
    bench.run()
    assert attempts(bench)[-1][1].manifest == "r1"


def test_replacements_run_one_after_the_other(bench):
    replica, message = request(bench)
    other = ReplaceArchivedObject("o2", 2, 3, 78)
    bench.step(other)
    report_written(bench, replica, message)
    bench.run()
    assert bench.store.replacement_outcome(OBJECT).is_replaced
    assert len(replacements(bench)) == 1
    _, message = request(bench, other)
    assert (message.object, message.manifest) == ("o2", "r1")


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_a_replacement_is_recorded_once_despite_a_lost_zookeeper_answer(bench, outcome):
    report_written(bench, *request(bench))
    bench.run(answers_zookeeper=False)
    bench.answer_zookeeper(outcome)
    assert bench.store.replacement_outcome(OBJECT) is None
    bench.run_for(5_000)
    assert bench.marker.archived.manifest == "r1"
    assert len(bench.reports("archive.object_replaced")) == 1


def test_a_replacement_ends_with_its_session(bench):
    mark = bench.marker.archived
    replica, message = request(bench)
    bench.lose(next(name for name in bench.names if name != replica))
    bench.reopen()
    report_written(bench, replica, message)
    bench.run()
    assert bench.marker.archived == mark
    assert bench.store.replacement_outcome(OBJECT) is None


def test_an_owner_without_an_archive_interval_still_replaces_an_object(bench):
    other = next_owner_of(bench)
    report_written(other, *request(other))
    other.run()
    assert other.marker.archived.manifest == "r1"
