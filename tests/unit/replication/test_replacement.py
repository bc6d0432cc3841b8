"""Replacement of an archived object: requests to replicas, and the recorded manifest."""

from dataclasses import replace

import pytest

from tests.unit.replication.archiving_world import (
    INTERVAL_MS,
    archived_world,
    attempts,
    begin,
    end_attempt,
    finish,
    next_owner_of,
)
from tests.unit.replication.replication_world import A, B, C, wire
from waltz_core.replication.archiving import NO_PROGRESS_MS_MAX
from waltz_core.replication.session_events import ReplaceArchivedObject, ReplacementOutcome

OBJECT = ReplaceArchivedObject("o1", 0, 1, 77)


@pytest.fixture
def world():
    return archived_world()


def replacements(world):
    return [message for message in world.sent if isinstance(message[1], wire.ReplaceObject)]


def request(world, wanted=OBJECT):
    """Request a replacement; return the replica and the request that it gets."""
    count = len(replacements(world))
    world.step(wanted)
    world.run()
    assert len(replacements(world)) == count + 1
    return replacements(world)[-1]


def report_written(world, replica, message, **fields):
    """Let a replica report that it has written the object and the manifest."""
    mark = world.marker.archived
    known = {"last": mark.last, "chain": mark.chain, "manifest": "r1", "manifest_crc": 8}
    finish(world, replica, message, **known | fields)


def report_failure(world, replica, message, error="expected IDs from 4 on"):
    report_written(world, replica, message, manifest="", error=error)


def test_a_replacement_records_the_new_manifest_and_keeps_the_archived_mark(world):
    mark = world.marker.archived
    replica, message = request(world)
    assert (message.object, message.first, message.last) == ("o1", 0, 1)
    assert (message.archived, message.chain, message.manifest) == (3, mark.chain, mark.manifest)
    report_written(world, replica, message)
    world.run(answers_zookeeper=False)
    assert world.marker.archived == mark
    assert world.store.replacement_outcome(OBJECT) is None, (
        "ZooKeeper has not recorded the replacement"
    )
    world.run()
    assert world.marker.archived == mark._replace(manifest="r1", manifest_crc=8)
    assert world.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, replica, ())
    assert world.reports("archive.object_replaced") == [
        {"session": 0, "object": "o1", "replica": replica, "manifest": "r1"}
    ]
    assert not world.reports("archive.transactions_expired")
    learned = [
        (name, each.manifest) for name, each in world.sent if isinstance(each, wire.SetArchived)
    ]
    assert sorted(learned[-3:]) == [(A, "r1"), (B, "r1"), (C, "r1")]


def test_a_second_replica_is_requested_if_the_first_lacks_the_records(world):
    replica, message = request(world)
    report_failure(world, replica, message)
    world.run()
    other, later = replacements(world)[-1]
    assert other != replica
    assert later.attempt > message.attempt
    report_written(world, replica, message, manifest="late")
    report_written(world, other, later)
    world.run()
    assert world.marker.archived.manifest == "r1"
    reasons = (f"{replica}: expected IDs from 4 on",)
    assert world.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, other, reasons)


def test_each_replica_is_tried_once_and_the_outcome_has_the_errors_of_all(world):
    mark = world.marker.archived
    request(world)
    for number in range(3):
        report_failure(world, *replacements(world)[-1], error=f"reason {number}")
        world.run()
    requested_replicas = [replica for replica, _ in replacements(world)]
    assert sorted(requested_replicas) == [A, B, C]
    reasons = tuple(
        f"{replica}: reason {number}" for number, replica in enumerate(requested_replicas)
    )
    assert world.store.replacement_outcome(OBJECT) == ReplacementOutcome(False, None, reasons)
    assert len(world.reports("archive.object_replacement_failed")) == 3
    assert world.marker.archived == mark


def test_a_later_request_for_the_same_object_begins_again(world):
    request(world)
    for _ in range(3):
        report_failure(world, *replacements(world)[-1])
        world.run()
    outcome = world.store.replacement_outcome(OBJECT)
    world.step(OBJECT)
    world.run()
    assert world.store.replacement_outcome(OBJECT) == outcome, "an answer may have been lost"
    later = replace(OBJECT, token=78)
    assert world.store.replacement_outcome(later) is None
    report_written(world, *request(world, later))
    world.run()
    assert world.store.replacement_outcome(later).is_replaced


@pytest.mark.parametrize("kind", ["silence", "rejection", "another end"])
def test_a_replica_that_fails_is_not_requested_again(world, kind):
    if kind == "rejection":
        world.rejected = (wire.ReplaceObject,)
    world.step(OBJECT)
    world.run()
    first, message = replacements(world)[0]
    if kind == "silence":
        world.run_for(NO_PROGRESS_MS_MAX)
    elif kind == "another end":
        report_written(world, first, message, chain=bytes(16))
        world.run()
    else:
        assert len(replacements(world)) == 3
        assert not world.store.replacement_outcome(OBJECT).is_replaced
        return
    second, later = replacements(world)[1]
    assert second != first
    report_written(world, second, later)
    world.run()
    assert world.marker.archived.manifest == "r1"
    (reason,) = world.store.replacement_outcome(OBJECT).failures
    expected = (
        "the storage has reported no progress for"
        if kind == "silence"
        else "expected a manifest that ends at transaction 3"
    )
    assert f"{first}: {expected}" in reason


def test_a_request_for_a_replaced_object_has_no_effect(world):
    mark = world.marker.archived
    report_written(world, *request(world), manifest="")
    world.run()
    assert world.marker.archived == mark
    assert world.store.replacement_outcome(OBJECT) == ReplacementOutcome(True, None, ())


def test_an_object_replacement_and_an_archiving_attempt_exclude_each_other(world):
    begin(world)
    world.step(OBJECT)
    world.run()
    assert not replacements(world)
    end_attempt(world)
    world.run()
    replica, message = replacements(world)[-1]
    count = len(attempts(world))
    world.run_for(2 * INTERVAL_MS)
    assert len(attempts(world)) == count
    report_written(world, replica, message)
    world.run()
    assert attempts(world)[-1][1].manifest == "r1"


def test_replacements_run_one_after_the_other(world):
    replica, message = request(world)
    other = ReplaceArchivedObject("o2", 2, 3, 78)
    world.step(other)
    report_written(world, replica, message)
    world.run()
    assert world.store.replacement_outcome(OBJECT).is_replaced
    assert len(replacements(world)) == 1
    _, message = request(world, other)
    assert (message.object, message.manifest) == ("o2", "r1")


@pytest.mark.parametrize("outcome", ["away", "lost"])
def test_a_replacement_is_recorded_once_despite_a_lost_zookeeper_answer(world, outcome):
    report_written(world, *request(world))
    world.run(answers_zookeeper=False)
    world.answer_zookeeper(outcome)
    assert world.store.replacement_outcome(OBJECT) is None
    world.run_for(5_000)
    assert world.marker.archived.manifest == "r1"
    assert len(world.reports("archive.object_replaced")) == 1


def test_a_replacement_ends_with_its_session(world):
    mark = world.marker.archived
    replica, message = request(world)
    world.lose(next(name for name in world.names if name != replica))
    world.reopen()
    report_written(world, replica, message)
    world.run()
    assert world.marker.archived == mark
    assert world.store.replacement_outcome(OBJECT) is None


def test_an_owner_without_an_archive_interval_still_replaces_an_object(world):
    other = next_owner_of(world)
    report_written(other, *request(other))
    other.run()
    assert other.marker.archived.manifest == "r1"
