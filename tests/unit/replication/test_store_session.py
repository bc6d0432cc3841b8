"""Unit tests of `waltz_core.replication.store_session`: one session, with its replicas."""

from dataclasses import replace

import pytest

from tests.unit.replication.bench import LIMITS, A, B, Bench, C, wire
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


def restart(bench, *, down=()):
    """End the session, and begin the next one while some storages are down."""
    bench.down = set(down)
    bench.sent.clear()
    bench.step(session_events.Checkpoint())


def stage(bench, replica):
    return bench.store.session.replicas[replica].stage


# ---------------------------------------------------------------------------------------------
# C to F: fence, decide, repair


def test_prepare_is_sent_first_with_session_nonce_and_storage_id():
    bench = Bench()
    del bench.storage_ids[C]
    bench.take_ownership()
    bench.answer_zookeeper()
    bench.answer_zookeeper()
    for _ in range(3):
        bench.connect()
    prepares = dict(bench.sent)
    assert {type(message) for message in prepares.values()} == {wire.Prepare}
    assert {message.nonce for message in prepares.values()} == {bench.marker.nonce}
    assert prepares[A].storage_id == bench.storages[A].disk.storage_id
    assert prepares[C].storage_id == bytes(16)


def test_an_undecidable_session_waits_without_changing_replicas(bench):
    bench.append()
    bench.storages[B].disk.suspect = True
    restart(bench, down=[C])
    bench.run_for(500)
    assert not any(isinstance(message, CHANGES) for _, message in bench.sent)
    assert bench.store.session.recovery.unknown_replicas == [B, C]
    assert bench.storages[A].disk.promised == bench.storages[B].disk.promised == 1
    bench.down = set()
    bench.wait(3000)
    bench.run()
    assert bench.store.open_session_id is not None
    assert bench.all_reported(SessionOpened)[-1].high_water_mark == 0
    assert not bench.storages[B].disk.suspect


def test_an_undecidable_recovery_is_reported_once(bench):
    for name in (B, C):
        bench.storages[name].disk.suspect = True
    restart(bench)
    bench.run_for(2000)
    assert bench.reports("recovery.waiting") == [{"session": 1, "untrusted": (B, C)}]


def test_an_unacknowledged_tail_is_kept_only_while_a_voter_is_unknown():
    for down, mark in (([], -1), ([C], 1)):
        bench = Bench()
        bench.open()
        bench.submit(2)
        bench.deliver(A)
        restart(bench, down=down)
        bench.silent = set(down)
        bench.wait(LIMITS.opening_grace_ms)
        # All replicas must answer before the decision, so that only one decision is possible.
        while bench.dials:
            bench.connect()
        for name in sorted(set(bench.names) - set(down), reverse=True):
            bench.deliver(name) if bench.requests.get(name) else None
        bench.reopen()
        opened = bench.all_reported(SessionOpened)[-1]
        assert opened.high_water_mark in (mark, 1)
        logs = bench.logs()
        assert logs[A] == logs[B]
        assert len(logs[A]) == opened.high_water_mark + 1


def test_a_rolled_back_replica_is_repaired_and_counts_again(bench):
    bench.append(2, batches=6)
    old = bench.storages[A].disk
    bench.storages[A].disk = replace(old, entries=old.entries[:1], suspect=True)
    bench.step(session_events.Checkpoint())
    bench.run_for(LIMITS.opening_grace_ms)
    assert bench.reports("replica.untrusted") == [{"session": 1, "replica": A, "last": 1}]
    bench.wait(1000)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.logs()[A] == bench.logs()[B]


def test_another_storage_at_the_address_is_not_used(bench):
    bench.storage_ids[A] = b"another-storage!"
    restart(bench)
    bench.run_for(LIMITS.opening_grace_ms)
    assert bench.store.readable_replicas == [B, C]
    assert bench.reports("replica.rejected")[0]["replica"] == A


def test_a_batch_of_a_session_unknown_to_zookeeper_is_not_trusted(bench):
    """ZooKeeper was rolled back; the log of an older session would truncate committed IDs."""
    old = bench.metadata, bench.marker
    bench.submit(3)
    bench.submit(3)
    for _ in range(2):
        bench.deliver(C)  # the other storages get no requests
    restart(bench, down=[C])
    for name in (A, B):
        bench.requests.get(name, []).clear()
    bench.reopen()
    bench.append()
    assert bench.store.high_water_mark == 0
    before = bench.logs()
    assert [len(before[name]) for name in (A, B, C)] == [1, 1, 6]
    session_id = bench.metadata.session_id
    bench.metadata, bench.marker = replace(old[0], session_id=session_id), old[1]
    bench.metadata_version += 1
    restart(bench, down=[A])
    bench.step(session_events.TakeOwnership(2, bench.names))
    bench.run_for(LIMITS.opening_grace_ms)
    assert bench.store.open_session_id is None
    assert bench.logs() == before
    assert (
        "ZooKeeper's data was rolled back" in bench.reports("partition.open_failed")[-1]["reason"]
    )


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_replica_engaged_after_zookeepers_last_session_is_not_used(
    bench, monkeypatch, is_left_out
):
    """A replica that ZooKeeper records as closed does not block the session of the others:
    if there was a later session, one of the other replicas has its promise, too.
    """
    if is_left_out:
        restart(bench, down=[C])
        bench.reopen()
    restart(bench)
    prepare = bench.storages[C]._prepare

    def prepare_with_later_session(prefix, message):
        return replace(prepare(prefix, message), engaged_session=9)

    monkeypatch.setattr(bench.storages[C], "_prepare", prepare_with_later_session)
    bench.step(session_events.TakeOwnership(2, bench.names))
    bench.run_for(LIMITS.opening_grace_ms)
    why = "the replica was in sync in store session 9, but in ZooKeeper the last opened session is"
    if is_left_out:
        assert bench.store.readable_replicas == [A, B]
        assert bench.reports("replica.rejected")[0]["replica"] == C
        assert why in bench.reports("replica.rejected")[0]["reason"]
    else:
        assert bench.store.open_session_id is None
        assert f"replica {C}: {why}" in bench.reports("partition.open_failed")[-1]["reason"]


@pytest.mark.parametrize(
    ("error", "wait_ms"),
    [
        (errors.UnknownPartition("not here"), LIMITS.redial_ms_max),
        (errors.StorageIdMismatch("another"), LIMITS.rejected_retry_ms),
    ],
)
def test_a_storage_without_its_assignment_is_queried_again_soon(monkeypatch, error, wait_ms):
    def refuse(_prefix, _message):
        raise error

    bench = Bench()
    monkeypatch.setattr(bench.storages[C], "_prepare", refuse)
    bench.open()
    monkeypatch.undo()
    assert bench.reports("replica.rejected")[0]["replica"] == C
    bench.wait(wait_ms // 2 - 100)
    assert not bench.dials
    bench.wait(wait_ms // 2 + 100)
    assert [dial.replica for dial in bench.dials] == [C]


def test_bad_copies_are_detected_and_another_source_is_queried(bench):
    for _ in range(4):
        bench.submit(2)
        bench.deliver(A)
        bench.deliver(B)
    real = bench.storages[A].handle

    def corrupt_answer(message):
        answer = real(message)
        if isinstance(answer, wire.RangeBytes):
            records = bytearray(answer.records)
            records[50] ^= 1
            answer = replace(answer, records=bytes(records))
        return answer

    bench.storages[A].handle = corrupt_answer
    restart(bench)
    for _ in range(5):
        bench.run()
        bench.wait(100)
    assert bench.reports("replica.source_unusable")[0]["replica"] == A
    assert bench.logs()[C] == bench.logs()[B]
    assert bench.store.readable_replicas == [A, B, C]


def test_damage_in_a_running_log_is_repaired_at_the_next_session(bench):
    bench.append(2, batches=4)
    restart(bench)
    bench.reopen()
    bench.storages[B].disk.damaged = {1, 6}
    restart(bench)
    bench.run_for(100)
    assert not bench.storages[B].disk.damaged
    assert bench.store.readable_replicas == [A, B, C]


def test_a_silent_storage_times_out_and_is_dialed_again(bench):
    bench.silent = {C}
    restart(bench)
    bench.run_for(LIMITS.opening_grace_ms)
    assert bench.store.readable_replicas == [A, B]
    assert stage(bench, C) is ReplicaStage.PREPARING
    bench.wait(LIMITS.answer_ms_max)
    assert bench.reports("replica.disconnected")[-1]["reason"] == "no answer"
    bench.silent = set()
    bench.wait(3000)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]


# ---------------------------------------------------------------------------------------------
# I: late replicas


def test_a_late_replica_joins_after_it_has_caught_up_and_zookeeper_has_recorded_it():
    bench = Bench()
    bench.down = {C}
    bench.open()
    bench.append(2, batches=20)
    bench.down = set()
    bench.wait(3000)
    bench.run(answers_zookeeper=False)
    assert bench.logs()[C] == bench.logs()[A]
    assert stage(bench, C) is ReplicaStage.READY
    assert bench.store.readable_replicas == [A, B]
    # The late replica does not count towards the quorum, and receives only committed batches.
    bench.submit()
    bench.run(answers_zookeeper=False)
    assert bench.storages[C].last == 40
    bench.submit()
    bench.deliver(A)
    assert not bench.requests[C]
    bench.run()
    assert bench.metadata.states[C] == ReplicaState(0, UNRESOLVED)
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.logs()[C] == bench.logs()[A]


@pytest.mark.parametrize("step", [wire.AppendRaw, wire.SetLowWaterMark])
def test_a_late_replica_may_be_slow_while_it_catches_up(step):
    bench = Bench()
    bench.down = {C}
    bench.open()
    bench.append(2, batches=20)
    session = bench.store.open_session_id
    bench.down, bench.silent = set(), {C}
    bench.wait(3000)
    bench.run()
    while not isinstance(bench.requests[C][0], step):
        bench.silent = set()
        bench.deliver(C)
        bench.silent = {C}
        bench.run()
    for _ in range(4):
        bench.wait(LIMITS.answer_ms_max)
        bench.append()
    # If the replica were dropped, it could return only in another session. So it waits.
    assert bench.store.open_session_id == session
    (waiting,) = bench.store.replica_waits_ms(bench.now_ms).items()
    assert waiting == (C, 4 * LIMITS.answer_ms_max)
    assert not [
        one for one in bench.reports("replica.disconnected") if one["reason"] == "no answer"
    ]
    assert bench.metadata.states[C] != ReplicaState(0, UNRESOLVED), (
        "the replica lacks committed batches"
    )
    bench.silent = set()
    bench.run()
    assert bench.store.replica_waits_ms(bench.now_ms) == {}
    assert bench.store.open_session_id == session
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.logs()[C] == bench.logs()[A]


def test_a_lost_late_replica_rejoins_in_the_next_session():
    bench = Bench()
    bench.down = {C}
    bench.open()
    bench.down = set()
    bench.wait(3000)
    bench.run(answers_zookeeper=False)
    assert stage(bench, C) is ReplicaStage.READY
    bench.zookeeper_requests.clear()
    bench.store.session.pending_states = None
    bench.lose(C)
    assert bench.store.open_session_id == 0
    bench.wait(LIMITS.rejoin_session_age_ms_min)
    bench.reopen()
    bench.run_for(100)
    assert bench.store.open_session_id == 1
    assert bench.store.readable_replicas == [A, B, C]


def test_the_loss_of_a_replica_that_may_be_engaged_ends_the_session():
    bench = Bench()
    bench.decide()
    bench.lose(B)
    assert bench.reports("session.abandoned")
    assert not bench.all_reported(SessionOpened)
    bench.reopen()
    assert bench.store.open_session_id == 1


# ---------------------------------------------------------------------------------------------
# J: the live log


def test_a_slow_replica_uses_bounded_memory_and_delays_no_commit(bench):
    bench.silent = {C}
    for _ in range(200):
        bench.append(2)
    assert bench.store.high_water_mark == 399
    session = bench.store.session
    assert session.replicas[C].unanswered_bytes <= LIMITS.lag_bytes_max + 200
    assert len(bench.requests[C]) < 20
    assert session.window.first > 380
    bench.silent = set()
    bench.run()
    assert bench.logs()[C] == bench.logs()[A]
    assert any(message.whole_batches for message in bench.all_sent(wire.RangeRaw))
    assert not bench.all_reported(SessionClosed)


def test_a_replica_that_is_a_little_slow_is_fed_from_memory(bench):
    bench.silent = {C}
    for _ in range(14):
        bench.append()
    assert bench.store.session.replicas[C].next_id < 14, "the replica was not sent all appends"
    bench.silent = set()
    bench.run()
    assert bench.logs()[C] == bench.logs()[A]
    assert not bench.all_sent(wire.RangeRaw)


def test_a_rejected_append_ends_the_session_and_excludes_the_replica(bench):
    bench.storages[C].fails_next_sync = True
    bench.append()
    assert bench.all_reported(SessionClosed)
    bench.reopen()
    bench.run_for(100)
    assert bench.store.readable_replicas == [A, B]
    bench.wait(LIMITS.exclusion_ms_min)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.store.open_session_id == 1


def test_an_excluded_replica_is_used_if_the_quorum_needs_it(bench):
    bench.down = {B}
    bench.storages[C].fails_next_sync = True
    bench.submit()
    bench.deliver(C)
    bench.reopen()
    assert bench.store.readable_replicas == [A, C]


@pytest.mark.parametrize("synced_max", [-1, 0, 2, 99])
def test_an_impossible_answer_ends_the_session(bench, synced_max):
    bench.submit(2)
    message = bench.requests[A].popleft()
    if isinstance(message, wire.Engage):
        message = bench.requests[A].popleft()
    answer = wire.Appended(0, message.sequence, 0, synced_max)
    bench.step(session_events.ReplicaResponded(0, A, answer))
    assert "expected a log that is synced up to a" in bench.all_reported(SessionClosed)[0].reason
    assert not bench.all_reported(TransactionsCommitted)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (wire.Appended(0, 999, 0, 0), "answers request"),
        (wire.HeartbeatResponse(0, 4, 0), "expected Appended, found HeartbeatResponse"),
        (Prepared(0, 4, 0, bytes(16), 0, 0, True, 0, bytes(16), False, b""), "found Prepared"),
    ],
)
def test_an_answer_without_a_request_ends_the_connection(bench, answer, problem):
    bench.submit()
    bench.step(session_events.ReplicaResponded(0, A, answer))
    reason = bench.all_reported(SessionClosed)[0].reason
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
def test_answers_of_an_older_session_are_dropped(bench, late):
    restart(bench)
    bench.step(late)
    bench.answer_zookeeper()  # the claim
    dialing = len(bench.reported), len(bench.sent)
    bench.step(late)
    assert (len(bench.reported), len(bench.sent)) == dialing
    bench.reopen()
    bench.append()
    running = len(bench.reported), len(bench.sent)
    bench.step(late)
    assert (len(bench.reported), len(bench.sent)) == running
    assert bench.store.open_session_id == 1
    assert bench.store.readable_replicas == [A, B, C]


def test_a_promise_to_a_later_session_ends_this_session(bench):
    bench.submit()
    message = bench.requests[A].popleft()
    nack = wire.Nack(0, message.sequence, 0, errors.SessionFenced.code, 7, "bound to 7")
    bench.step(session_events.ReplicaResponded(0, A, nack))
    assert "bound to 7" in bench.all_reported(SessionClosed)[0].reason
    bench.wait(30)
    assert isinstance(bench.zookeeper_requests[0], session_events.ReadMetadata)


def test_a_replica_that_has_lost_its_promise_joins_the_next_session():
    bench = Bench()
    bench.take_ownership()
    bench.step_until(lambda: bench.requests.get(A))
    message = bench.requests[A].popleft()
    assert isinstance(message, wire.Prepare)
    nack = wire.Nack(0, message.sequence, 0, errors.ReplicaSuspect.code, 0, "a slot was lost")
    bench.step(session_events.ReplicaResponded(0, A, nack))
    assert bench.store.session is None
    bench.wait(1_000)
    bench.run()
    assert bench.store.open_session_id == 1


def test_a_disk_failure_during_prepare_is_not_reported_as_a_fence():
    """The storage has promised this session, but could not store the promise on its disk."""
    bench = Bench()
    bench.take_ownership()
    bench.step_until(lambda: all(bench.requests.get(name) for name in (A, B, C)))
    for name in (A, B):
        message = bench.requests[name].popleft()
        assert isinstance(message, wire.Prepare)
        nack = wire.Nack(0, message.sequence, 0, errors.DiskFailed.code, 0, "input/output error")
        bench.step(session_events.ReplicaResponded(0, name, nack))
    assert bench.reports("partition.open_failed") == []
    assert bench.store.session is not None
    for _ in range(20):
        bench.wait(1_000)
        bench.run()
    assert bench.store.open_session_id is not None


def test_a_promise_above_the_known_later_promise_ends_the_session(bench):
    """The replica was already ahead of ZooKeeper; an even later promise is of another owner."""
    bench.storages[A].disk.promised = 99
    bench.step(session_events.Checkpoint())
    bench.wait(100)
    bench.reopen()
    session_id = bench.store.session.claim.session_id
    assert bench.store.session.claim.later_promises == {A: 99}
    for promised in (99, 100):
        while not bench.requests.get(A):
            bench.wait(100)
            bench.connect() if bench.dials else None
        bench.storages[A].disk.promised = promised
        bench.deliver(A)
        assert (bench.store.session is None) == (promised == 100)
    assert "bound to 100" in bench.all_reported(SessionClosed)[-1].reason
    assert bench.all_reported(SessionClosed)[-1].session_id == session_id


def test_a_storage_at_the_address_of_another_is_not_trusted():
    """A storage identifies itself only in its answer; its log may belong to another replica."""
    bench = Bench()
    bench.take_ownership()
    bench.step_until(lambda: bench.requests.get(A))
    bench.storages[A].disk.storage_id = b"another-storage!"
    message = bench.requests[A].popleft()
    answer = bench.storages[A].handle(replace(message, storage_id=bytes(16)))
    assert isinstance(answer, Prepared)
    bench.step(session_events.ReplicaResponded(0, A, answer))
    assert "expected the storage with ID" in bench.reports("replica.rejected")[0]["reason"]
    bench.wait(LIMITS.opening_grace_ms)
    bench.run()
    assert bench.store.readable_replicas == [B, C]


def test_slow_appends_are_reported_with_their_replica():
    bench = Bench(limits=replace(LIMITS, slow_append_ms=250))
    bench.open()
    bench.submit()
    bench.deliver(A)
    bench.now_ms += 249
    bench.deliver(B)
    bench.now_ms += 1
    bench.deliver(C)
    assert bench.store.take_append_times() == {A: [0], B: [249], C: [250]}
    assert bench.store.take_append_times() == {}
    (slow,) = bench.reports("append.slow")
    assert slow == {
        "session": 0, "replica": C, "took_ms": 250, "count": 1,
        "first": 0, "last": 0, "requests": "0.0.0.0",
    }  # fmt: skip


def test_slow_appends_are_reported_once_a_second_with_all_their_ids():
    bench = Bench(limits=replace(LIMITS, slow_append_ms=250))
    bench.open()
    for _ in range(3):
        bench.submit()
    bench.now_ms += 900
    bench.run()  # three late answers of each replica
    bench.submit()
    bench.now_ms += 500
    bench.run()
    assert len(slow_appends_of(bench, A)) == 1
    bench.wait(SLOW_APPEND_REPORT_INTERVAL_MS - 500)
    found = slow_appends_of(bench, A)
    assert [(each["took_ms"], each["count"]) for each in found] == [(900, 1), (900, 3)]
    assert [(each["first"], each["last"]) for each in found] == [(0, 0), (1, 3)]
    assert [each["requests"] for each in found] == ["0.0.0.0", "0.0.0.1,0.0.0.2,0.0.0.3"]


def test_slow_appends_are_reported_when_the_session_ends():
    bench = Bench(limits=replace(LIMITS, slow_append_ms=250))
    bench.open()
    for _ in range(2):
        bench.submit()
    bench.now_ms += 900
    bench.run()
    assert [each["count"] for each in slow_appends_of(bench, A)] == [1]
    bench.step(session_events.ReleaseOwnership())
    assert [each["count"] for each in slow_appends_of(bench, A)] == [1, 1]


def slow_appends_of(bench, replica):
    return [each for each in bench.reports("append.slow") if each["replica"] == replica]


def test_without_a_limit_no_append_is_slow(bench):
    bench.submit()
    bench.now_ms += 100_000
    bench.run()
    assert bench.store.take_append_times()[A] == [100_000]
    assert bench.reports("append.slow") == []
