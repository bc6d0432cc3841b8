"""Unit tests of `waltz_core.replication.partition_store`: successive sessions."""

import itertools

import pytest

from tests.unit.replication.bench import LIMITS, A, B, Bench, C, D, E, wire
from tests.unit.replication.model_storage import make_batch
from waltz_core.cluster.znodes.model import UNRESOLVED, MarkerState, PartitionMetadata, ReplicaState
from waltz_core.errors import BeforeLogStart
from waltz_core.replication import session_events
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_session import ReplicaStage
from waltz_core.replication.session_events import (
    MarkProofFailed,
    MarkProved,
    OwnershipReleased,
    SessionClosed,
    SessionOpened,
    SessionSettled,
    TransactionsCommitted,
)


def test_the_first_session_of_a_new_partition_opens_with_an_empty_log(bench):
    opened = bench.all_reported(SessionOpened)
    assert opened == [SessionOpened(0, 1, -1, bytes(16), False)]
    assert bench.all_reported(SessionSettled) == [SessionSettled(0, -1)]
    assert bench.metadata == PartitionMetadata(
        1, 0, dict.fromkeys([A, B, C], ReplicaState(0, UNRESOLVED))
    )
    assert bench.marker.state is MarkerState.OPEN
    assert bench.store.readable_replicas == [A, B, C]
    assert bench.store.next_transaction_id == 0


def test_session_opened_is_reported_after_the_second_compare_and_set():
    bench = Bench()
    bench.decide()
    assert not bench.all_reported(SessionOpened)
    assert not bench.all_sent(wire.Engage)
    assert bench.store.open_session_id is None
    bench.answer_zookeeper()
    assert len(bench.all_reported(SessionOpened)) == 1
    assert len(bench.all_sent(wire.Engage)) == 3


@pytest.mark.parametrize("outcome", ["lost", "away"])
def test_a_claim_of_unknown_outcome_is_read_again(outcome):
    bench = Bench()
    bench.take_ownership()
    bench.answer_zookeeper()
    bench.answer_zookeeper(outcome)
    bench.wait(100)
    assert isinstance(bench.answer_zookeeper(), session_events.ReadMetadata)
    bench.run_for(20)
    assert bench.store.open_session_id == 0
    # A claim that failed is repeated, and a claim that succeeded is not.
    assert bench.metadata.session_id == 0


@pytest.mark.parametrize("outcome", ["lost", "away"])
def test_states_with_an_unknown_outcome_are_read_again_before_anything_is_reported(outcome):
    bench = Bench()
    bench.decide()
    bench.answer_zookeeper(outcome)
    assert not bench.all_reported(SessionOpened)
    bench.wait(3000)
    assert not bench.all_reported(SessionOpened)
    bench.run()
    assert bench.store.open_session_id == 0
    assert bench.metadata.session_id == 0


def test_a_failed_write_of_states_is_retried_after_a_pause():
    bench = Bench()
    bench.decide()
    bench.answer_zookeeper("away")
    asked_ms = bench.now_ms
    bench.step(session_events.Wakeup())
    bench.lose(C)
    bench.run(answers_zookeeper=False)
    assert not bench.zookeeper_requests
    while not bench.zookeeper_requests:
        bench.now_ms = bench.store.wake_at_ms
        bench.step(session_events.Wakeup())
    assert bench.now_ms > asked_ms
    assert len(bench.zookeeper_requests) == 1


def test_a_lost_claim_is_repeated_with_another_session_id():
    bench = Bench()
    bench.take_ownership()
    bench.answer_zookeeper()
    bench.claim_elsewhere(7)
    bench.reopen()
    assert bench.store.open_session_id == 8


def test_states_are_not_written_over_the_claim_of_another_process():
    bench = Bench()
    bench.decide()
    bench.claim_elsewhere(7)
    their_metadata = bench.metadata
    while bench.zookeeper_requests:
        bench.answer_zookeeper()
    assert bench.metadata == their_metadata
    assert bench.store.session is None
    assert not bench.all_reported(SessionOpened)
    bench.reopen()
    assert bench.store.open_session_id == 8


def test_a_later_generation_in_zookeeper_is_not_overwritten():
    bench = Bench()
    bench.metadata = PartitionMetadata(5, 7, {})
    bench.take_ownership(generation=4)
    bench.run()
    assert "generation of the partition is 5" in bench.all_reported(OwnershipReleased)[0].reason
    assert bench.metadata.session_id == 7
    assert bench.store.wake_at_ms is None


def test_an_open_partition_without_states_is_rejected_and_checked_again():
    bench = Bench(state=MarkerState.OPEN)
    bench.take_ownership()
    bench.run()
    assert "lost or rolled back" in bench.reports("partition.open_failed")[0]["reason"]
    assert not bench.sent
    bench.metadata = PartitionMetadata(1, 3, dict.fromkeys([A, B, C], ReplicaState(-1, UNRESOLVED)))
    bench.wait(11_000)
    bench.run_for(100)
    assert bench.store.open_session_id is not None


def test_a_new_partition_with_records_somewhere_is_rejected():
    donor = Bench()
    donor.open()
    donor.append()
    bench = Bench()
    bench.storages[A].disk.entries = donor.storages[A].disk.entries
    bench.take_ownership()
    bench.run()
    assert bench.store.open_session_id is None
    reason = bench.reports("partition.open_failed")[0]["reason"]
    assert "because ZooKeeper has no replica states" in reason
    assert bench.storages[A].last == 0


def test_a_partition_of_waltz_0_13_is_adopted_only_with_all_replicas():
    bench = Bench(state=None)
    bench.down = {C}
    bench.take_ownership()
    bench.run_for(1000)
    assert bench.store.open_session_id is None
    assert not bench.all_sent(wire.SetLowWaterMark)
    bench.down = set()
    bench.wait(3000)
    bench.reopen()
    assert bench.marker.state is MarkerState.OPEN


def test_commits_need_a_quorum_and_come_in_order(bench):
    last = bench.submit(2)
    bench.submit()
    bench.deliver(A)
    assert not bench.all_reported(TransactionsCommitted)
    bench.deliver(B)
    assert [one.last for one in bench.all_reported(TransactionsCommitted)] == [last]
    bench.run()
    committed = bench.all_reported(TransactionsCommitted)
    assert [one.last for one in committed] == [1, 2]
    assert committed[-1].chain == bench.storages[A].chain == bench.storages[C].chain
    assert bench.store.high_water_mark == 2
    assert bench.store.in_flight_bytes == 0


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_fewer_replicas_than_a_majority_commit_no_batch(count, quorum):
    bench = Bench(*(A, B, C, D, E)[:count])
    bench.open()
    bench.submit()
    for synced, name in enumerate(bench.names, 1):
        bench.deliver(name)
        assert bool(bench.all_reported(TransactionsCommitted)) == (synced >= quorum)


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_fewer_replicas_than_a_majority_open_no_session(count, quorum):
    names = (A, B, C, D, E)[:count]
    bench = Bench(*names)
    bench.down = set(names[quorum - 1 :])
    bench.take_ownership()
    for _ in range(3):
        bench.run()
        bench.wait(LIMITS.opening_grace_ms)
    assert bench.store.session is not None
    assert bench.store.open_session_id is None
    bench.down = set(names[quorum:])
    bench.wait(LIMITS.redial_ms_max)
    bench.reopen()
    assert bench.store.readable_replicas == list(names[:quorum])


def test_the_session_after_the_loss_of_a_replica_continues_without_it(bench):
    bench.append()
    bench.submit()
    bench.deliver(A)
    bench.deliver(B)
    bench.down = {C}
    bench.lose(C)
    assert bench.all_reported(SessionClosed)[0].session_id == 0
    start_ms = bench.now_ms
    while bench.store.open_session_id is None:
        bench.run()
        bench.wait(5)
    assert bench.now_ms - start_ms <= 60
    opened = bench.all_reported(SessionOpened)[-1]
    assert (opened.session_id, opened.high_water_mark, opened.follows_own_session) == (1, 1, True)
    assert bench.metadata.states[C] == ReplicaState(0, 1)
    assert bench.all_reported(SessionSettled)[-1].committed_last == 1


def test_an_intermediate_session_of_another_owner_clears_unbroken(bench):
    bench.claim_elsewhere(1)
    bench.step(session_events.Checkpoint())
    assert isinstance(bench.zookeeper_requests[0], session_events.WriteMetadata), (
        "the owner reads the metadata after a conflict"
    )
    bench.reopen()
    assert bench.store.open_session_id == 2
    assert not bench.all_reported(SessionOpened)[-1].follows_own_session


def test_a_claim_of_the_same_server_after_another_servers_session_is_not_unbroken(bench):
    """The second claim finds the nonce of this server, from a session that never opened."""
    bench.claim_elsewhere(1)
    bench.step(session_events.Checkpoint())
    while bench.metadata.session_id != 2:
        bench.answer_zookeeper()
    for name in (A, B):
        bench.lose(name)
    bench.take_ownership(replicas=(C, B, A))
    bench.reopen()
    opened = bench.all_reported(SessionOpened)[-1]
    assert opened.session_id == 3
    assert not opened.follows_own_session


def with_foreign_ids_in_doubt():
    """This owner lost IDs 0..1 in session 0; another server wrote other rows 0..1 in session 1."""
    bench = Bench()
    bench.open()
    bench.submit(2)
    other = bench.other_server()
    other.numbers = 100
    other.open(generation=2)
    other.append(2)
    bench.check_replica_states(other)
    bench.lose(A)
    bench.take_ownership(generation=3)
    return bench


def open_until_settlement_reads(bench):
    """Open a session that has to read from a replica; return this replica."""
    opened_count = len(bench.all_reported(SessionOpened))
    while len(bench.all_reported(SessionOpened)) == opened_count:
        bench.run(answers_zookeeper=False)
        if bench.zookeeper_requests:
            bench.answer_zookeeper()
        else:
            bench.wait(bench.limits.opening_grace_ms)
    supplier, message = bench.sent[-1]
    assert isinstance(message, wire.LineageRequest)
    return supplier


def test_unknown_outcomes_are_settled_by_store_session_not_by_id():
    bench = with_foreign_ids_in_doubt()
    bench.reopen()
    opened = bench.all_reported(SessionOpened)[-1]
    assert opened.high_water_mark == 1
    assert not opened.follows_own_session
    assert bench.all_reported(SessionSettled)[-1].committed_last == -1
    assert bench.logs()[A] == [100, 101]


def test_unknown_outcomes_survive_a_session_lost_before_they_are_settled():
    bench = with_foreign_ids_in_doubt()
    settled_count = len(bench.all_reported(SessionSettled))
    bench.lose(open_until_settlement_reads(bench))
    assert len(bench.all_reported(SessionSettled)) == settled_count
    bench.reopen()
    assert bench.all_reported(SessionSettled)[-1].committed_last == -1
    # This server has not read the batches of other owners before that session yet.
    assert not bench.all_reported(SessionOpened)[-1].follows_own_session


def test_outcomes_of_expired_batches_remain_unknown():
    bench = with_foreign_ids_in_doubt()
    supplier = open_until_settlement_reads(bench)
    while bench.all_sent(wire.LineageRequest)[-1].first != 0:
        bench.deliver(supplier)  # the stamp at the mark comes first
    requests = bench.all_sent(wire.LineageRequest)[-1]
    begins = (BeforeLogStart.code, 0, "expected IDs from 9 on", 9)
    answer = wire.Nack(requests.session_id, requests.sequence, requests.partition_id, *begins)
    bench.step(session_events.ReplicaResponded(requests.session_id, supplier, answer))
    outcome = bench.all_reported(SessionSettled)[-1]
    assert (outcome.session_id, outcome.has_unknown_outcomes) == (requests.session_id, True)
    assert bench.store.session.ending is None, "the replica is not at fault"


def test_a_new_owner_learns_the_last_commit_stamp_of_the_log(bench):
    """The clock of a new owner may be behind the previous owner's, but stamps never decrease."""
    bench.submit(2)
    bench.now_ms = 7_000
    bench.append()
    other = bench.other_server()
    other.take_ownership(generation=2)
    other.reopen()
    assert other.all_reported(SessionSettled) == [SessionSettled(1, 2, 7_000)]


def test_a_replica_that_does_not_answer_settlement_reads_is_dropped(bench):
    bench.append()
    other = bench.other_server()
    other.take_ownership(generation=2)
    supplier = open_until_settlement_reads(other)
    other.silent.add(supplier)
    other.run()
    assert other.store.open_session_id is None
    other.wait(other.limits.answer_ms_max)
    other.reopen()
    assert other.store.session.replicas[supplier].stage is not ReplicaStage.ENGAGED


def test_appends_on_a_quorum_are_settled_as_committed(bench):
    bench.submit(2)
    bench.submit()
    for name in (A, B):
        bench.storages[name].handle(bench.requests[name].popleft())
    bench.lose(C)
    bench.reopen()
    assert bench.all_reported(SessionOpened)[-1].high_water_mark == 1
    assert bench.all_reported(SessionSettled)[-1].committed_last == 1
    assert not bench.all_reported(TransactionsCommitted)


def test_an_owner_that_is_fenced_repeatedly_releases_the_partition():
    bench = Bench(limits=SessionLimits(lost_races_max=2))
    bench.open()
    for _ in range(40):
        if bench.all_reported(OwnershipReleased):
            break
        session = bench.metadata.session_id + 5
        bench.claim_elsewhere(session)
        for storage in bench.storages.values():
            storage.disk.promised = session
        if bench.store.open_session_id is not None:
            bench.submit()
        for _ in range(8):
            bench.run()
            bench.wait(300)
    assert (
        "another server has started a store session during each"
        in bench.all_reported(OwnershipReleased)[0].reason
    )


def test_storages_ahead_of_zookeeper_stop_a_claim(bench):
    for name in (A, B):
        bench.storages[name].disk.promised = 99
    bench.step(session_events.Checkpoint())
    for _ in range(10):
        bench.run()
        bench.wait(bench.limits.useful_session_ms)
    assert bench.store.open_session_id is None
    assert any(
        "99" not in one["reason"] and "have store sessions after" in one["reason"]
        for one in bench.reports("partition.open_failed")
    )
    assert bench.metadata.session_id < 99


def test_one_storage_ahead_of_zookeeper_does_not_stop_the_session(bench):
    bench.storages[A].disk.promised = 99
    bench.step(session_events.Checkpoint())
    bench.wait(100)
    bench.reopen()
    assert bench.store.readable_replicas == [B, C]


def test_a_long_time_without_a_quorum_releases_the_partition():
    bench = Bench()
    bench.down = {A, B}
    begun_ms = bench.now_ms
    bench.take_ownership()
    while not bench.all_reported(OwnershipReleased):
        bench.run()
        bench.now_ms = bench.store.wake_at_ms
        bench.step(session_events.Wakeup())
    assert bench.now_ms - begun_ms == bench.limits.quorum_ms_max
    assert "no quorum" in bench.all_reported(OwnershipReleased)[0].reason
    assert bench.store.wake_at_ms is None


def test_a_queued_zookeeper_request_does_not_release_the_partition():
    bench = Bench()
    bench.take_ownership()
    bench.wait(60_000)
    assert not bench.all_reported(OwnershipReleased)
    bench.run()
    assert bench.store.open_session_id == 0
    # From then on, the timeout applies again.
    bench.down = {A, B}
    bench.take_ownership(2)
    for _ in range(11):
        bench.run()
        bench.wait(bench.limits.useful_session_ms)
    assert not bench.all_reported(OwnershipReleased)
    for _ in range(3):
        bench.run()
        bench.wait(bench.limits.useful_session_ms)
    assert "no quorum" in bench.all_reported(OwnershipReleased)[0].reason


def test_appends_that_cannot_be_sent_release_the_partition(bench):
    bench.submit()
    bench.deliver(A)
    bench.wait(13_000)
    assert bench.all_reported(SessionClosed)
    assert "no quorum" in bench.all_reported(OwnershipReleased)[0].reason


def test_a_zookeeper_outage_neither_releases_the_partition_nor_stops_appends():
    bench = Bench()
    bench.down = {C}
    bench.open()
    bench.down = set()
    bench.wait(3000)
    bench.run(answers_zookeeper=False)
    assert bench.zookeeper_requests, "the third replica is ready to join"
    for _ in range(30):
        while bench.zookeeper_requests:
            bench.answer_zookeeper("away")
        bench.submit()
        bench.run(answers_zookeeper=False)
        bench.wait(bench.limits.useful_session_ms)
    assert bench.store.open_session_id == 0
    assert bench.store.high_water_mark == 29
    assert not bench.all_reported(OwnershipReleased)
    bench.wait(3000)
    bench.run()
    assert bench.store.readable_replicas == [A, B, C]


def test_marks_are_proved_only_by_a_quorum():
    bench = Bench()
    bench.step(session_events.ProveMark(5))
    bench.take_ownership()
    bench.run(answers_zookeeper=False)
    bench.step(session_events.ProveMark(6))
    assert bench.all_reported(MarkProofFailed) == [MarkProofFailed(5), MarkProofFailed(6)]
    bench.reopen()
    bench.append()
    bench.step(session_events.ProveMark(7))
    bench.deliver(B)
    assert not bench.all_reported(MarkProved)
    bench.deliver(C)
    assert bench.all_reported(MarkProved) == [MarkProved(7, 0)]
    bench.silent = {A, B}
    bench.run()
    bench.step(session_events.ProveMark(8))
    bench.run()
    bench.wait(3000)
    assert bench.all_reported(MarkProofFailed)[2:] == [MarkProofFailed(8)]
    bench.silent = set()
    bench.reopen()
    bench.step(session_events.ProveMark(9))
    bench.lose(A)
    assert bench.all_reported(MarkProofFailed)[3:] == [MarkProofFailed(9)]
    bench.step(session_events.ReleaseOwnership())
    bench.step(session_events.ProveMark(10))
    assert bench.all_reported(MarkProofFailed)[4:] == [MarkProofFailed(10)]


def test_a_batch_submitted_after_the_end_of_the_session_is_dropped(bench):
    session = bench.store.open_session_id
    bench.lose(A)
    sent = len(bench.sent)
    bench.step(session_events.SubmitToSession(session, make_batch(0, [1], 5)))
    assert len(bench.sent) == sent
    bench.reopen()
    sent = len(bench.sent)
    bench.step(session_events.SubmitToSession(session, make_batch(0, [1], 5)))
    assert len(bench.sent) == sent


def test_earlier_zookeeper_requests_are_not_awaited():
    """An answer to an older attempt does not answer the current request."""
    bench = Bench()
    bench.take_ownership()
    bench.answer_zookeeper()
    bench.step(session_events.ReassignReplicas((C, B, A)))
    written, _ = bench.zookeeper_requests
    assert isinstance(written, session_events.WriteMetadata)
    bench.answer_zookeeper()
    assert len(bench.zookeeper_requests) == 1
    assert not bench.reports("session.claimed")
    bench.reopen()
    assert bench.store.open_session_id == 1
    assert bench.store.readable_replicas == [C, B, A]


def test_late_answers_to_an_abandoned_write_are_ignored():
    """The result of the write is read; a late answer may refer to another attempt."""
    bench = Bench()
    bench.take_ownership()
    bench.answer_zookeeper()
    effect = bench.answer_zookeeper("away")
    assert isinstance(effect, session_events.WriteMetadata)
    for late in (
        session_events.MetadataWritten(effect.attempt, 1, 1),
        session_events.MetadataRead(effect.attempt, bench.metadata, 0, bench.marker, 0),
    ):
        bench.step(late)
        assert bench.store.session is None
        assert not bench.zookeeper_requests
    bench.reopen()
    assert bench.store.open_session_id == 0


def test_a_partition_that_is_released_closes_its_session_and_connections(bench):
    bench.step(session_events.ReleaseOwnership())
    assert bench.requests == {}
    assert bench.store.session is None
    assert bench.store.wake_at_ms is None
    assert len(bench.all_reported(SessionClosed)) == 1
    assert not bench.all_reported(OwnershipReleased)


def test_a_repeated_assignment_has_no_effect(bench):
    bench.take_ownership()
    bench.step(session_events.ReassignReplicas((A, B, C)))
    assert bench.store.open_session_id == 0
    bench.take_ownership(generation=2)
    bench.reopen()
    assert bench.metadata.generation == 2


def test_a_replica_is_replaced_by_another():
    bench = Bench()
    bench.add_storage(D)
    bench.open()
    bench.append(2, batches=5)
    bench.step(session_events.ReassignReplicas((A, B, D)))
    bench.wait(30)
    bench.reopen()
    bench.run_for(100)
    assert bench.metadata.states == dict.fromkeys([A, B, D], ReplicaState(1, UNRESOLVED))
    assert bench.storages[D].payloads() == bench.storages[A].payloads()
    assert C not in bench.requests


def test_a_session_opens_with_a_quorum_of_the_last_assignment_too():
    """B is down, and C is lost after the decision. A and D are a quorum of the new replicas."""
    bench = Bench(A, B, C, D)
    bench.open(replicas=(A, B, C))
    bench.append()
    bench.down = {B}
    bench.step(session_events.ReassignReplicas((A, B, D)))
    while bench.zookeeper_requests:
        bench.answer_zookeeper()
    while bench.dials:
        bench.connect()
    for name in (A, C):
        bench.deliver(name)
    assert bench.store.session.repairs.goal is not None
    bench.down = {B, C}
    bench.lose(C)
    for _ in range(20):
        bench.run()
        bench.wait(50)
    assert bench.store.session.replicas[D].is_marked
    assert bench.store.open_session_id is None
    bench.down = {C}
    bench.wait(1_000)
    bench.reopen()
    assert set(bench.metadata.states) == {A, B, D}


def test_too_many_new_replicas_at_once_are_rejected():
    bench = Bench()
    bench.add_storage(D)
    bench.add_storage(E)
    bench.open()
    bench.step(session_events.ReassignReplicas((A, D, E)))
    bench.run()
    bench.wait(100)
    assert "fewer than 2 new replicas" in bench.reports("partition.open_failed")[0]["reason"]
    bench.step(session_events.ReassignReplicas((A, B, D)))
    bench.reopen()
    assert bench.store.open_session_id == 1


def test_a_log_below_an_exposed_mark_is_not_opened(bench):
    """All disks lose acknowledged records: no session opens, and the log reports the loss."""
    bench.append()
    for storage in bench.storages.values():
        storage.disk.entries = []
    bench.step(session_events.Checkpoint())
    bench.run_for(100)
    assert bench.store.open_session_id is None
    assert "0 was committed" in bench.reports("partition.open_failed")[0]["reason"]


def test_pauses_grow_after_each_failure(bench):
    claimed_ms = []
    for _ in range(12):
        bench.wait(1)
        for _ in range(3000):
            bench.run()
            if bench.store.open_session_id is not None:
                break
            bench.wait(10)
        claimed_ms.append(bench.now_ms)
        bench.lose(A)
    gaps = [b - a for a, b in itertools.pairwise(claimed_ms)]
    assert max(gaps[:2]) < 150
    assert gaps[-1] >= 1000


def test_a_rolling_restart_of_storages_does_not_count_as_failures(bench):
    for replica in (A, B, C) * 4:
        bench.wait(bench.limits.useful_session_ms)
        bench.run()
        assert replica in bench.store.readable_replicas
        bench.lose(replica)
        lost_ms = bench.now_ms
        while bench.store.open_session_id is None:
            bench.wait(1)
            bench.run()
        assert (
            bench.now_ms - lost_ms
            <= bench.limits.first_retry_ms_max + bench.limits.opening_grace_ms
        )


def test_a_session_id_that_was_assigned_twice_rejects_the_partition(bench):
    """ZooKeeper is rolled back by one session: the next claim has a session ID that was in use."""
    old = (bench.metadata, bench.marker)
    bench.step(session_events.Checkpoint())
    bench.reopen()
    bench.append(batches=3)
    assert bench.store.open_session_id == 1
    bench.metadata, bench.marker = old
    bench.store = bench._new_store(bench.limits)
    bench.requests.clear()
    bench.take_ownership(generation=2)
    bench.run_for(100)
    assert bench.store.open_session_id is None
    assert "rolled back" in bench.reports("partition.open_failed")[0]["reason"]
    claimed = bench.metadata.session_id
    for _ in range(5):
        bench.wait(11_000)
        bench.run()
    assert bench.metadata.session_id == claimed
    assert len({tuple(log) for log in bench.logs().values()}) == 1
    assert not bench.all_reported(OwnershipReleased)
