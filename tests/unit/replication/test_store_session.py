"""Unit tests of `waltz_core.replication.store_session`: one session, with its replicas."""

from dataclasses import replace

import pytest

from tests.unit.replication.replication_world import LIMITS, A, B, C, ReplicationWorld, wire
from waltz_core import errors
from waltz_core.cluster.znodes.model import UNRESOLVED, ReplicaState
from waltz_core.replication import session_events
from waltz_core.replication.replica_session import SLOW_APPEND_REPORT_INTERVAL_MS, ReplicaStage
from waltz_core.replication.session_events import (
    SessionClosed,
    SessionOpened,
    TransactionsCommitted,
)
from waltz_core.wire.messages import Prepared

CHANGES = (wire.Truncate, wire.AppendRaw, wire.SetLowWaterMark, wire.Repair, wire.Engage)


def restart(world, *, down=()):
    """End the session, and begin the next one while some storages are down."""
    world.down = set(down)
    world.sent.clear()
    world.step(session_events.Checkpoint())


def stage(world, replica):
    return world.store.session.replicas[replica].stage


# ---------------------------------------------------------------------------------------------
# C to F: fence, decide, repair


def test_the_first_message_is_prepare_with_session_nonce_and_storage_id():
    world = ReplicationWorld()
    del world.storage_ids[C]
    world.take_ownership()
    world.answer_zookeeper()
    world.answer_zookeeper()
    for _ in range(3):
        world.connect()
    prepares = dict(world.sent)
    assert {type(message) for message in prepares.values()} == {wire.Prepare}
    assert {message.nonce for message in prepares.values()} == {world.marker.nonce}
    assert prepares[A].storage_id == world.storages[A].disk.storage_id
    assert prepares[C].storage_id == bytes(16)


def test_an_undecidable_session_waits_without_changing_replicas(world):
    world.append()
    world.storages[B].disk.suspect = True
    restart(world, down=[C])
    world.run_for(500)
    assert not any(isinstance(message, CHANGES) for _, message in world.sent)
    assert world.store.session.recovery.unknown_replicas == [B, C]
    assert world.storages[A].disk.promised == world.storages[B].disk.promised == 1
    world.down = set()
    world.wait(3000)
    world.run()
    assert world.store.open_session_id is not None
    assert world.all_reported(SessionOpened)[-1].high_water_mark == 0
    assert not world.storages[B].disk.suspect


def test_an_undecidable_recovery_is_reported_once(world):
    for name in (B, C):
        world.storages[name].disk.suspect = True
    restart(world)
    world.run_for(2000)
    assert world.reports("recovery.waiting") == [{"session": 1, "untrusted": (B, C)}]


def test_an_unacknowledged_tail_is_kept_only_if_a_voting_replica_does_not_answer():
    for down, mark in (([], -1), ([C], 1)):
        world = ReplicationWorld()
        world.open()
        world.submit(2)
        world.deliver(A)
        restart(world, down=down)
        world.silent = set(down)
        world.wait(LIMITS.opening_grace_ms)
        # All replicas must answer before the decision, so that only one decision is possible.
        while world.dials:
            world.connect()
        for name in sorted(set(world.names) - set(down), reverse=True):
            world.deliver(name) if world.requests.get(name) else None
        world.reopen()
        opened = world.all_reported(SessionOpened)[-1]
        assert opened.high_water_mark in (mark, 1)
        logs = world.logs()
        assert logs[A] == logs[B]
        assert len(logs[A]) == opened.high_water_mark + 1


def test_a_rolled_back_replica_is_repaired_and_counts_again(world):
    world.append(2, batches=6)
    old = world.storages[A].disk
    world.storages[A].disk = replace(old, entries=old.entries[:1], suspect=True)
    world.step(session_events.Checkpoint())
    world.run_for(LIMITS.opening_grace_ms)
    assert world.reports("replica.untrusted") == [{"session": 1, "replica": A, "last": 1}]
    world.wait(1000)
    world.run()
    assert world.store.readable_replicas == [A, B, C]
    assert world.logs()[A] == world.logs()[B]


def test_another_storage_at_the_address_is_not_used(world):
    world.storage_ids[A] = b"another-storage!"
    restart(world)
    world.run_for(LIMITS.opening_grace_ms)
    assert world.store.readable_replicas == [B, C]
    assert world.reports("replica.rejected")[0]["replica"] == A


def test_a_batch_of_a_session_unknown_to_zookeeper_is_not_trusted(world):
    """ZooKeeper was rolled back; the log of an older session would truncate committed IDs."""
    old = world.metadata, world.marker
    world.submit(3)
    world.submit(3)
    for _ in range(2):
        world.deliver(C)  # the other storages get no requests
    restart(world, down=[C])
    for name in (A, B):
        world.requests.get(name, []).clear()
    world.reopen()
    world.append()
    assert world.store.high_water_mark == 0
    before = world.logs()
    assert [len(before[name]) for name in (A, B, C)] == [1, 1, 6]
    session_id = world.metadata.session_id
    world.metadata, world.marker = replace(old[0], session_id=session_id), old[1]
    world.metadata_version += 1
    restart(world, down=[A])
    world.step(session_events.TakeOwnership(2, world.names))
    world.run_for(LIMITS.opening_grace_ms)
    assert world.store.open_session_id is None
    assert world.logs() == before
    assert (
        "ZooKeeper's data was rolled back" in world.reports("partition.open_failed")[-1]["reason"]
    )


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_replica_engaged_after_zookeepers_last_session_is_not_used(
    world, monkeypatch, is_left_out
):
    """If ZooKeeper records this replica as closed, the other replicas open a session without it.

    This is safe: if there was a later session, one of the other replicas has promised it, too. If
    ZooKeeper does not record the replica as closed, no session opens.
    """
    if is_left_out:
        restart(world, down=[C])
        world.reopen()
    restart(world)
    prepare = world.storages[C]._prepare

    def prepare_with_later_session(prefix, message):
        return replace(prepare(prefix, message), engaged_session=9)

    monkeypatch.setattr(world.storages[C], "_prepare", prepare_with_later_session)
    world.step(session_events.TakeOwnership(2, world.names))
    world.run_for(LIMITS.opening_grace_ms)
    why = "the replica was in sync in store session 9, but in ZooKeeper the last opened session is"
    if is_left_out:
        assert world.store.readable_replicas == [A, B]
        assert world.reports("replica.rejected")[0]["replica"] == C
        assert why in world.reports("replica.rejected")[0]["reason"]
    else:
        assert world.store.open_session_id is None
        assert f"replica {C}: {why}" in world.reports("partition.open_failed")[-1]["reason"]


@pytest.mark.parametrize(
    ("error", "wait_ms"),
    [
        (errors.UnknownPartition("not here"), LIMITS.redial_ms_max),
        (errors.StorageIdMismatch("another"), LIMITS.rejected_retry_ms),
    ],
)
def test_a_rejected_replica_is_dialed_again_after_the_pause_for_its_error(
    monkeypatch, error, wait_ms
):
    def refuse(_prefix, _message):
        raise error

    world = ReplicationWorld()
    monkeypatch.setattr(world.storages[C], "_prepare", refuse)
    world.open()
    monkeypatch.undo()
    assert world.reports("replica.rejected")[0]["replica"] == C
    world.wait(wait_ms // 2 - 100)
    assert not world.dials
    world.wait(wait_ms // 2 + 100)
    assert [dial.replica for dial in world.dials] == [C]


def test_bad_copies_are_detected_and_another_source_is_queried(world):
    for _ in range(4):
        world.submit(2)
        world.deliver(A)
        world.deliver(B)
    real = world.storages[A].handle

    def corrupt_answer(message):
        answer = real(message)
        if isinstance(answer, wire.RangeBytes):
            records = bytearray(answer.records)
            records[50] ^= 1
            answer = replace(answer, records=bytes(records))
        return answer

    world.storages[A].handle = corrupt_answer
    restart(world)
    for _ in range(5):
        world.run()
        world.wait(100)
    assert world.reports("replica.source_unusable")[0]["replica"] == A
    assert world.logs()[C] == world.logs()[B]
    assert world.store.readable_replicas == [A, B, C]


def test_damage_that_occurs_during_a_session_is_repaired_in_the_next_session(world):
    world.append(2, batches=4)
    restart(world)
    world.reopen()
    world.storages[B].disk.damaged = {1, 6}
    restart(world)
    world.run_for(100)
    assert not world.storages[B].disk.damaged
    assert world.store.readable_replicas == [A, B, C]


def test_a_silent_storage_times_out_and_is_dialed_again(world):
    world.silent = {C}
    restart(world)
    world.run_for(LIMITS.opening_grace_ms)
    assert world.store.readable_replicas == [A, B]
    assert stage(world, C) is ReplicaStage.PREPARING
    world.wait(LIMITS.answer_ms_max)
    assert world.reports("replica.disconnected")[-1]["reason"] == "no answer"
    world.silent = set()
    world.wait(3000)
    world.run()
    assert world.store.readable_replicas == [A, B, C]


# ---------------------------------------------------------------------------------------------
# I: late replicas


def test_a_late_replica_joins_after_it_has_caught_up_and_zookeeper_has_recorded_it():
    world = ReplicationWorld()
    world.down = {C}
    world.open()
    world.append(2, batches=20)
    world.down = set()
    world.wait(3000)
    world.run(answers_zookeeper=False)
    assert world.logs()[C] == world.logs()[A]
    assert stage(world, C) is ReplicaStage.READY
    assert world.store.readable_replicas == [A, B]
    # The late replica does not count towards the quorum, and receives only committed batches.
    world.submit()
    world.run(answers_zookeeper=False)
    assert world.storages[C].last == 40
    world.submit()
    world.deliver(A)
    assert not world.requests[C]
    world.run()
    assert world.metadata.states[C] == ReplicaState(0, UNRESOLVED)
    assert world.store.readable_replicas == [A, B, C]
    assert world.logs()[C] == world.logs()[A]


@pytest.mark.parametrize("step", [wire.AppendRaw, wire.SetLowWaterMark])
def test_a_late_replica_may_be_slow_while_it_catches_up(step):
    world = ReplicationWorld()
    world.down = {C}
    world.open()
    world.append(2, batches=20)
    session = world.store.open_session_id
    world.down, world.silent = set(), {C}
    world.wait(3000)
    world.run()
    while not isinstance(world.requests[C][0], step):
        world.silent = set()
        world.deliver(C)
        world.silent = {C}
        world.run()
    for _ in range(4):
        world.wait(LIMITS.answer_ms_max)
        world.append()
    # If the replica were dropped, it could return only in another session. So it waits.
    assert world.store.open_session_id == session
    (waiting,) = world.store.replica_waits_ms(world.now_ms).items()
    assert waiting == (C, 4 * LIMITS.answer_ms_max)
    assert not [
        report
        for report in world.reports("replica.disconnected")
        if report["reason"] == "no answer"
    ]
    assert world.metadata.states[C] != ReplicaState(0, UNRESOLVED), (
        "the replica lacks committed batches"
    )
    world.silent = set()
    world.run()
    assert world.store.replica_waits_ms(world.now_ms) == {}
    assert world.store.open_session_id == session
    assert world.store.readable_replicas == [A, B, C]
    assert world.logs()[C] == world.logs()[A]


def test_a_lost_late_replica_rejoins_in_the_next_session():
    world = ReplicationWorld()
    world.down = {C}
    world.open()
    world.down = set()
    world.wait(3000)
    world.run(answers_zookeeper=False)
    assert stage(world, C) is ReplicaStage.READY
    world.zookeeper_requests.clear()
    world.store.session.pending_states = None
    world.lose(C)
    assert world.store.open_session_id == 0
    world.wait(LIMITS.rejoin_session_age_ms_min)
    world.reopen()
    world.run_for(100)
    assert world.store.open_session_id == 1
    assert world.store.readable_replicas == [A, B, C]


def test_the_loss_of_a_replica_that_may_be_engaged_ends_the_session():
    world = ReplicationWorld()
    world.decide()
    world.lose(B)
    assert world.reports("session.abandoned")
    assert not world.all_reported(SessionOpened)
    world.reopen()
    assert world.store.open_session_id == 1


# ---------------------------------------------------------------------------------------------
# J: the live log


def test_a_slow_replica_uses_bounded_memory_and_delays_no_commit(world):
    world.silent = {C}
    for _ in range(200):
        world.append(2)
    assert world.store.high_water_mark == 399
    session = world.store.session
    assert session.replicas[C].unanswered_bytes <= LIMITS.lag_bytes_max + 200
    assert len(world.requests[C]) < 20
    assert session.window.first > 380
    world.silent = set()
    world.run()
    assert world.logs()[C] == world.logs()[A]
    assert any(message.whole_batches for message in world.all_sent(wire.RangeRaw))
    assert not world.all_reported(SessionClosed)


def test_a_replica_that_is_a_little_slow_is_fed_from_memory(world):
    world.silent = {C}
    for _ in range(14):
        world.append()
    assert world.store.session.replicas[C].next_id < 14, "the replica was not sent all appends"
    world.silent = set()
    world.run()
    assert world.logs()[C] == world.logs()[A]
    assert not world.all_sent(wire.RangeRaw)


def test_a_rejected_append_ends_the_session_and_excludes_the_replica(world):
    world.storages[C].fails_next_sync = True
    world.append()
    assert world.all_reported(SessionClosed)
    world.reopen()
    world.run_for(100)
    assert world.store.readable_replicas == [A, B]
    world.wait(LIMITS.exclusion_ms_min)
    world.run()
    assert world.store.readable_replicas == [A, B, C]
    assert world.store.open_session_id == 1


def test_an_excluded_replica_is_used_if_the_quorum_needs_it(world):
    world.down = {B}
    world.storages[C].fails_next_sync = True
    world.submit()
    world.deliver(C)
    world.reopen()
    assert world.store.readable_replicas == [A, C]


@pytest.mark.parametrize("synced_max", [-1, 0, 2, 99])
def test_an_impossible_answer_ends_the_session(world, synced_max):
    world.submit(2)
    message = world.requests[A].popleft()
    if isinstance(message, wire.Engage):
        message = world.requests[A].popleft()
    answer = wire.Appended(0, message.sequence, 0, synced_max)
    world.step(session_events.ReplicaResponded(0, A, answer))
    assert "expected a log that is synced up to a" in world.all_reported(SessionClosed)[0].reason
    assert not world.all_reported(TransactionsCommitted)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (wire.Appended(0, 999, 0, 0), "answers request"),
        (wire.HeartbeatResponse(0, 4, 0), "expected Appended, found HeartbeatResponse"),
        (Prepared(0, 4, 0, bytes(16), 0, 0, True, 0, bytes(16), False, b""), "found Prepared"),
    ],
)
def test_an_answer_without_a_request_ends_the_connection(world, answer, problem):
    world.submit()
    world.step(session_events.ReplicaResponded(0, A, answer))
    reason = world.all_reported(SessionClosed)[0].reason
    assert "storage0:1" in reason
    assert problem in reason


@pytest.mark.parametrize(
    "late",
    [
        session_events.ReplicaResponded(0, A, wire.Appended(0, 1, 0, 5)),
        session_events.ReplicaLost(0, A, "late"),
        session_events.ReplicaOpened(0, A),
    ],
)
def test_answers_of_an_older_session_are_dropped(world, late):
    restart(world)
    world.step(late)
    world.answer_zookeeper()  # the claim
    dialing = len(world.reported), len(world.sent)
    world.step(late)
    assert (len(world.reported), len(world.sent)) == dialing
    world.reopen()
    world.append()
    running = len(world.reported), len(world.sent)
    world.step(late)
    assert (len(world.reported), len(world.sent)) == running
    assert world.store.open_session_id == 1
    assert world.store.readable_replicas == [A, B, C]


def test_a_promise_to_a_later_session_ends_the_current_session(world):
    world.submit()
    message = world.requests[A].popleft()
    nack = wire.Nack(0, message.sequence, 0, errors.SessionFenced.code, 7, "bound to 7")
    world.step(session_events.ReplicaResponded(0, A, nack))
    assert "bound to 7" in world.all_reported(SessionClosed)[0].reason
    world.wait(30)
    assert isinstance(world.zookeeper_requests[0], session_events.ReadMetadata)


def test_a_replica_that_has_lost_its_promise_joins_the_next_session():
    world = ReplicationWorld()
    world.take_ownership()
    world.step_until(lambda: world.requests.get(A))
    message = world.requests[A].popleft()
    assert isinstance(message, wire.Prepare)
    nack = wire.Nack(0, message.sequence, 0, errors.ReplicaSuspect.code, 0, "a slot was lost")
    world.step(session_events.ReplicaResponded(0, A, nack))
    assert world.store.session is None
    world.wait(1_000)
    world.run()
    assert world.store.open_session_id == 1


def test_a_disk_failure_during_prepare_is_not_reported_as_a_fence():
    """The storage has promised this session, but could not store the promise on its disk."""
    world = ReplicationWorld()
    world.take_ownership()
    world.step_until(lambda: all(world.requests.get(name) for name in (A, B, C)))
    for name in (A, B):
        message = world.requests[name].popleft()
        assert isinstance(message, wire.Prepare)
        nack = wire.Nack(0, message.sequence, 0, errors.DiskFailed.code, 0, "input/output error")
        world.step(session_events.ReplicaResponded(0, name, nack))
    assert world.reports("partition.open_failed") == []
    assert world.store.session is not None
    for _ in range(20):
        world.wait(1_000)
        world.run()
    assert world.store.open_session_id is not None


def test_a_promise_later_than_the_one_known_to_the_owner_ends_the_session(world):
    """The replica was already ahead of ZooKeeper; an even later promise is of another owner."""
    world.storages[A].disk.promised = 99
    world.step(session_events.Checkpoint())
    world.wait(100)
    world.reopen()
    session_id = world.store.session.claim.session_id
    assert world.store.session.claim.later_promises == {A: 99}
    for promised in (99, 100):
        while not world.requests.get(A):
            world.wait(100)
            world.connect() if world.dials else None
        world.storages[A].disk.promised = promised
        world.deliver(A)
        assert (world.store.session is None) == (promised == 100)
    assert "bound to 100" in world.all_reported(SessionClosed)[-1].reason
    assert world.all_reported(SessionClosed)[-1].session_id == session_id


def test_an_answer_from_another_storage_at_the_address_is_not_trusted():
    """A storage identifies itself only in its answer; its log may belong to another replica."""
    world = ReplicationWorld()
    world.take_ownership()
    world.step_until(lambda: world.requests.get(A))
    world.storages[A].disk.storage_id = b"another-storage!"
    message = world.requests[A].popleft()
    answer = world.storages[A].handle(replace(message, storage_id=bytes(16)))
    assert isinstance(answer, Prepared)
    world.step(session_events.ReplicaResponded(0, A, answer))
    assert "expected the storage with ID" in world.reports("replica.rejected")[0]["reason"]
    world.wait(LIMITS.opening_grace_ms)
    world.run()
    assert world.store.readable_replicas == [B, C]


def test_slow_appends_are_reported_with_their_replica():
    world = ReplicationWorld(limits=replace(LIMITS, slow_append_ms=250))
    world.open()
    world.submit()
    world.deliver(A)
    world.now_ms += 249
    world.deliver(B)
    world.now_ms += 1
    world.deliver(C)
    assert world.store.take_append_times() == {A: [0], B: [249], C: [250]}
    assert world.store.take_append_times() == {}
    (slow,) = world.reports("append.slow")
    assert slow == {
        "session": 0, "replica": C, "took_ms": 250, "count": 1,
        "first": 0, "last": 0, "requests": "0.0.0.0",
    }  # fmt: skip


def test_slow_appends_are_reported_once_a_second_with_all_their_ids():
    world = ReplicationWorld(limits=replace(LIMITS, slow_append_ms=250))
    world.open()
    for _ in range(3):
        world.submit()
    world.now_ms += 900
    world.run()  # three late answers of each replica
    world.submit()
    world.now_ms += 500
    world.run()
    assert len(slow_appends_of(world, A)) == 1
    world.wait(SLOW_APPEND_REPORT_INTERVAL_MS - 500)
    found = slow_appends_of(world, A)
    assert [(each["took_ms"], each["count"]) for each in found] == [(900, 1), (900, 3)]
    assert [(each["first"], each["last"]) for each in found] == [(0, 0), (1, 3)]
    assert [each["requests"] for each in found] == ["0.0.0.0", "0.0.0.1,0.0.0.2,0.0.0.3"]


def test_slow_appends_are_reported_when_the_session_ends():
    world = ReplicationWorld(limits=replace(LIMITS, slow_append_ms=250))
    world.open()
    for _ in range(2):
        world.submit()
    world.now_ms += 900
    world.run()
    assert [each["count"] for each in slow_appends_of(world, A)] == [1]
    world.step(session_events.ReleaseOwnership())
    assert [each["count"] for each in slow_appends_of(world, A)] == [1, 1]


def slow_appends_of(world, replica):
    return [report for report in world.reports("append.slow") if report["replica"] == replica]


def test_without_a_limit_no_append_is_reported_as_slow(world):
    world.submit()
    world.now_ms += 100_000
    world.run()
    assert world.store.take_append_times()[A] == [100_000]
    assert world.reports("append.slow") == []
