"""Unit tests of `waltz_core.replication.partition_store`: successive sessions."""

import itertools

import pytest

from tests.unit.replication.model_storage import make_batch
from tests.unit.replication.replication_world import LIMITS, A, B, C, D, E, ReplicationWorld, wire
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


def test_the_first_session_of_a_new_partition_opens_with_an_empty_log(world):
    opened = world.all_reported(SessionOpened)
    assert opened == [SessionOpened(0, 1, -1, bytes(16), False)]
    assert world.all_reported(SessionSettled) == [SessionSettled(0, -1)]
    assert world.metadata == PartitionMetadata(
        1, 0, dict.fromkeys([A, B, C], ReplicaState(0, UNRESOLVED))
    )
    assert world.marker.state is MarkerState.OPEN
    assert world.store.readable_replicas == [A, B, C]
    assert world.store.next_transaction_id == 0


def test_event_session_opened_is_reported_after_the_second_compare_and_set():
    world = ReplicationWorld()
    world.decide()
    assert not world.all_reported(SessionOpened)
    assert not world.all_sent(wire.Engage)
    assert world.store.open_session_id is None
    world.answer_zookeeper()
    assert len(world.all_reported(SessionOpened)) == 1
    assert len(world.all_sent(wire.Engage)) == 3


@pytest.mark.parametrize("outcome", ["lost", "away"])
def test_a_claim_of_unknown_outcome_is_read_again(outcome):
    world = ReplicationWorld()
    world.take_ownership()
    world.answer_zookeeper()
    world.answer_zookeeper(outcome)
    world.wait(100)
    assert isinstance(world.answer_zookeeper(), session_events.ReadMetadata)
    world.run_for(20)
    assert world.store.open_session_id == 0
    # A claim that failed is repeated, and a claim that succeeded is not.
    assert world.metadata.session_id == 0


@pytest.mark.parametrize("outcome", ["lost", "away"])
def test_a_session_is_not_reported_as_open_before_a_write_of_unknown_outcome_is_read_back(outcome):
    world = ReplicationWorld()
    world.decide()
    world.answer_zookeeper(outcome)
    assert not world.all_reported(SessionOpened)
    world.wait(3000)
    assert not world.all_reported(SessionOpened)
    world.run()
    assert world.store.open_session_id == 0
    assert world.metadata.session_id == 0


def test_a_failed_write_of_replica_states_is_retried_after_a_pause():
    world = ReplicationWorld()
    world.decide()
    world.answer_zookeeper("away")
    asked_ms = world.now_ms
    world.step(session_events.Wakeup())
    world.lose(C)
    world.run(answers_zookeeper=False)
    assert not world.zookeeper_requests
    while not world.zookeeper_requests:
        world.now_ms = world.store.wake_at_ms
        world.step(session_events.Wakeup())
    assert world.now_ms > asked_ms
    assert len(world.zookeeper_requests) == 1


def test_a_lost_claim_is_repeated_with_another_session_id():
    world = ReplicationWorld()
    world.take_ownership()
    world.answer_zookeeper()
    world.claim_elsewhere(7)
    world.reopen()
    assert world.store.open_session_id == 8


def test_replica_states_are_not_written_over_the_claim_of_another_process():
    world = ReplicationWorld()
    world.decide()
    world.claim_elsewhere(7)
    their_metadata = world.metadata
    while world.zookeeper_requests:
        world.answer_zookeeper()
    assert world.metadata == their_metadata
    assert world.store.session is None
    assert not world.all_reported(SessionOpened)
    world.reopen()
    assert world.store.open_session_id == 8


def test_a_later_generation_in_zookeeper_is_not_overwritten():
    world = ReplicationWorld()
    world.metadata = PartitionMetadata(5, 7, {})
    world.take_ownership(generation=4)
    world.run()
    assert "generation of the partition is 5" in world.all_reported(OwnershipReleased)[0].reason
    assert world.metadata.session_id == 7
    assert world.store.wake_at_ms is None


def test_an_open_partition_without_replica_states_is_rejected_and_checked_again():
    world = ReplicationWorld(state=MarkerState.OPEN)
    world.take_ownership()
    world.run()
    assert "lost or rolled back" in world.reports("partition.open_failed")[0]["reason"]
    assert not world.sent
    world.metadata = PartitionMetadata(1, 3, dict.fromkeys([A, B, C], ReplicaState(-1, UNRESOLVED)))
    world.wait(11_000)
    world.run_for(100)
    assert world.store.open_session_id is not None


def test_a_new_partition_is_rejected_if_a_storage_has_records_of_it():
    donor = ReplicationWorld()
    donor.open()
    donor.append()
    world = ReplicationWorld()
    world.storages[A].disk.entries = donor.storages[A].disk.entries
    world.take_ownership()
    world.run()
    assert world.store.open_session_id is None
    reason = world.reports("partition.open_failed")[0]["reason"]
    assert "because ZooKeeper has no replica states" in reason
    assert world.storages[A].last == 0


def test_a_partition_of_waltz_0_13_is_adopted_only_with_all_replicas():
    world = ReplicationWorld(state=None)
    world.down = {C}
    world.take_ownership()
    world.run_for(1000)
    assert world.store.open_session_id is None
    assert not world.all_sent(wire.SetLowWaterMark)
    world.down = set()
    world.wait(3000)
    world.reopen()
    assert world.marker.state is MarkerState.OPEN


def test_commits_need_a_quorum_and_come_in_order(world):
    last = world.submit(2)
    world.submit()
    world.deliver(A)
    assert not world.all_reported(TransactionsCommitted)
    world.deliver(B)
    assert [one.last for one in world.all_reported(TransactionsCommitted)] == [last]
    world.run()
    committed = world.all_reported(TransactionsCommitted)
    assert [one.last for one in committed] == [1, 2]
    assert committed[-1].chain == world.storages[A].chain == world.storages[C].chain
    assert world.store.high_water_mark == 2
    assert world.store.in_flight_bytes == 0


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_fewer_replicas_than_a_majority_commit_no_batch(count, quorum):
    world = ReplicationWorld(*(A, B, C, D, E)[:count])
    world.open()
    world.submit()
    for synced, name in enumerate(world.names, 1):
        world.deliver(name)
        assert bool(world.all_reported(TransactionsCommitted)) == (synced >= quorum)


@pytest.mark.parametrize(("count", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_fewer_replicas_than_a_majority_open_no_session(count, quorum):
    names = (A, B, C, D, E)[:count]
    world = ReplicationWorld(*names)
    world.down = set(names[quorum - 1 :])
    world.take_ownership()
    for _ in range(3):
        world.run()
        world.wait(LIMITS.opening_grace_ms)
    assert world.store.session is not None
    assert world.store.open_session_id is None
    world.down = set(names[quorum:])
    world.wait(LIMITS.redial_ms_max)
    world.reopen()
    assert world.store.readable_replicas == list(names[:quorum])


def test_the_next_session_opens_soon_without_a_lost_replica(world):
    world.append()
    world.submit()
    world.deliver(A)
    world.deliver(B)
    world.down = {C}
    world.lose(C)
    assert world.all_reported(SessionClosed)[0].session_id == 0
    start_ms = world.now_ms
    while world.store.open_session_id is None:
        world.run()
        world.wait(5)
    assert world.now_ms - start_ms <= 60
    opened = world.all_reported(SessionOpened)[-1]
    assert (opened.session_id, opened.high_water_mark, opened.follows_own_session) == (1, 1, True)
    assert world.metadata.states[C] == ReplicaState(0, 1)
    assert world.all_reported(SessionSettled)[-1].committed_last == 1


def test_flag_follows_own_session_is_false_after_an_intermediate_session_of_another_owner(world):
    world.claim_elsewhere(1)
    world.step(session_events.Checkpoint())
    assert isinstance(world.zookeeper_requests[0], session_events.WriteMetadata), (
        "the owner reads the metadata after a conflict"
    )
    world.reopen()
    assert world.store.open_session_id == 2
    assert not world.all_reported(SessionOpened)[-1].follows_own_session


def test_flag_follows_own_session_is_false_after_an_own_claim_that_never_opened(world):
    """The second claim finds the nonce of this server, from a session that never opened."""
    world.claim_elsewhere(1)
    world.step(session_events.Checkpoint())
    while world.metadata.session_id != 2:
        world.answer_zookeeper()
    for name in (A, B):
        world.lose(name)
    world.take_ownership(replicas=(C, B, A))
    world.reopen()
    opened = world.all_reported(SessionOpened)[-1]
    assert opened.session_id == 3
    assert not opened.follows_own_session


def with_foreign_ids_in_doubt():
    """This owner lost IDs 0..1 in session 0; another server wrote other rows 0..1 in session 1."""
    world = ReplicationWorld()
    world.open()
    world.submit(2)
    other = world.other_server()
    other.numbers = 100
    other.open(generation=2)
    other.append(2)
    world.check_replica_states(other)
    world.lose(A)
    world.take_ownership(generation=3)
    return world


def open_until_in_doubt_query(world):
    """Open a session that has to read from a replica; return this replica."""
    opened_count = len(world.all_reported(SessionOpened))
    while len(world.all_reported(SessionOpened)) == opened_count:
        world.run(answers_zookeeper=False)
        if world.zookeeper_requests:
            world.answer_zookeeper()
        else:
            world.wait(world.limits.opening_grace_ms)
    supplier, message = world.sent[-1]
    assert isinstance(message, wire.LineageRequest)
    return supplier


def test_unknown_outcomes_are_settled_by_store_session_not_by_id():
    world = with_foreign_ids_in_doubt()
    world.reopen()
    opened = world.all_reported(SessionOpened)[-1]
    assert opened.high_water_mark == 1
    assert not opened.follows_own_session
    assert world.all_reported(SessionSettled)[-1].committed_last == -1
    assert world.logs()[A] == [100, 101]


def test_outcomes_in_doubt_are_settled_by_the_next_session_if_the_session_is_lost():
    world = with_foreign_ids_in_doubt()
    settled_count = len(world.all_reported(SessionSettled))
    world.lose(open_until_in_doubt_query(world))
    assert len(world.all_reported(SessionSettled)) == settled_count
    world.reopen()
    assert world.all_reported(SessionSettled)[-1].committed_last == -1
    # This server has not yet read the batches that other owners wrote before that session.
    assert not world.all_reported(SessionOpened)[-1].follows_own_session


def test_outcomes_of_expired_batches_remain_unknown():
    world = with_foreign_ids_in_doubt()
    supplier = open_until_in_doubt_query(world)
    while world.all_sent(wire.LineageRequest)[-1].first != 0:
        world.deliver(supplier)  # the stamp at the mark comes first
    requests = world.all_sent(wire.LineageRequest)[-1]
    begins = (BeforeLogStart.code, 0, "expected IDs from 9 on", 9)
    answer = wire.Nack(requests.session_id, requests.sequence, requests.partition_id, *begins)
    world.step(session_events.ReplicaResponded(requests.session_id, supplier, answer))
    outcome = world.all_reported(SessionSettled)[-1]
    assert (outcome.session_id, outcome.has_unknown_outcomes) == (requests.session_id, True)
    assert world.store.session.ending is None, "the replica is not at fault"


def test_a_new_owner_learns_the_last_commit_stamp_of_the_log(world):
    """The clock of a new owner may be behind the previous owner's, but stamps never decrease."""
    world.submit(2)
    world.now_ms = 7_000
    world.append()
    other = world.other_server()
    other.take_ownership(generation=2)
    other.reopen()
    assert other.all_reported(SessionSettled) == [SessionSettled(1, 2, 7_000)]


def test_a_replica_that_does_not_answer_an_in_doubt_query_is_dropped(world):
    world.append()
    other = world.other_server()
    other.take_ownership(generation=2)
    supplier = open_until_in_doubt_query(other)
    other.silent.add(supplier)
    other.run()
    assert other.store.open_session_id is None
    other.wait(other.limits.answer_ms_max)
    other.reopen()
    assert other.store.session.replicas[supplier].stage is not ReplicaStage.ENGAGED


def test_appends_on_a_quorum_are_settled_as_committed(world):
    world.submit(2)
    world.submit()
    for name in (A, B):
        world.storages[name].handle(world.requests[name].popleft())
    world.lose(C)
    world.reopen()
    assert world.all_reported(SessionOpened)[-1].high_water_mark == 1
    assert world.all_reported(SessionSettled)[-1].committed_last == 1
    assert not world.all_reported(TransactionsCommitted)


def test_an_owner_that_is_fenced_repeatedly_releases_the_partition():
    world = ReplicationWorld(limits=SessionLimits(lost_races_max=2))
    world.open()
    for _ in range(40):
        if world.all_reported(OwnershipReleased):
            break
        session = world.metadata.session_id + 5
        world.claim_elsewhere(session)
        for storage in world.storages.values():
            storage.disk.promised = session
        if world.store.open_session_id is not None:
            world.submit()
        for _ in range(8):
            world.run()
            world.wait(300)
    assert (
        "another server has started a store session during each"
        in world.all_reported(OwnershipReleased)[0].reason
    )


def test_storages_ahead_of_zookeeper_stop_a_claim(world):
    for name in (A, B):
        world.storages[name].disk.promised = 99
    world.step(session_events.Checkpoint())
    for _ in range(10):
        world.run()
        world.wait(world.limits.useful_session_ms)
    assert world.store.open_session_id is None
    assert any(
        "99" not in report["reason"] and "have promised store sessions after" in report["reason"]
        for report in world.reports("partition.open_failed")
    )
    assert world.metadata.session_id < 99


def test_one_storage_ahead_of_zookeeper_does_not_stop_the_session(world):
    world.storages[A].disk.promised = 99
    world.step(session_events.Checkpoint())
    world.wait(100)
    world.reopen()
    assert world.store.readable_replicas == [B, C]


def test_a_long_time_without_a_quorum_releases_the_partition():
    world = ReplicationWorld()
    world.down = {A, B}
    begun_ms = world.now_ms
    world.take_ownership()
    while not world.all_reported(OwnershipReleased):
        world.run()
        world.now_ms = world.store.wake_at_ms
        world.step(session_events.Wakeup())
    assert world.now_ms - begun_ms == world.limits.quorum_ms_max
    assert "no quorum" in world.all_reported(OwnershipReleased)[0].reason
    assert world.store.wake_at_ms is None


def test_a_queued_zookeeper_request_does_not_release_the_partition():
    world = ReplicationWorld()
    world.take_ownership()
    world.wait(60_000)
    assert not world.all_reported(OwnershipReleased)
    world.run()
    assert world.store.open_session_id == 0
    # From then on, the timeout applies again.
    world.down = {A, B}
    world.take_ownership(2)
    for _ in range(11):
        world.run()
        world.wait(world.limits.useful_session_ms)
    assert not world.all_reported(OwnershipReleased)
    for _ in range(3):
        world.run()
        world.wait(world.limits.useful_session_ms)
    assert "no quorum" in world.all_reported(OwnershipReleased)[0].reason


def test_appends_that_cannot_be_sent_release_the_partition(world):
    world.submit()
    world.deliver(A)
    world.wait(13_000)
    assert world.all_reported(SessionClosed)
    assert "no quorum" in world.all_reported(OwnershipReleased)[0].reason


def test_a_zookeeper_outage_neither_releases_the_partition_nor_stops_appends():
    world = ReplicationWorld()
    world.down = {C}
    world.open()
    world.down = set()
    world.wait(3000)
    world.run(answers_zookeeper=False)
    assert world.zookeeper_requests, "the third replica is ready to join"
    for _ in range(30):
        while world.zookeeper_requests:
            world.answer_zookeeper("away")
        world.submit()
        world.run(answers_zookeeper=False)
        world.wait(world.limits.useful_session_ms)
    assert world.store.open_session_id == 0
    assert world.store.high_water_mark == 29
    assert not world.all_reported(OwnershipReleased)
    world.wait(3000)
    world.run()
    assert world.store.readable_replicas == [A, B, C]


def test_marks_are_proved_only_by_a_quorum():
    world = ReplicationWorld()
    world.step(session_events.ProveMark(5))
    world.take_ownership()
    world.run(answers_zookeeper=False)
    world.step(session_events.ProveMark(6))
    assert world.all_reported(MarkProofFailed) == [MarkProofFailed(5), MarkProofFailed(6)]
    world.reopen()
    world.append()
    world.step(session_events.ProveMark(7))
    world.deliver(B)
    assert not world.all_reported(MarkProved)
    world.deliver(C)
    assert world.all_reported(MarkProved) == [MarkProved(7, 0)]
    world.silent = {A, B}
    world.run()
    world.step(session_events.ProveMark(8))
    world.run()
    world.wait(3000)
    assert world.all_reported(MarkProofFailed)[2:] == [MarkProofFailed(8)]
    world.silent = set()
    world.reopen()
    world.step(session_events.ProveMark(9))
    world.lose(A)
    assert world.all_reported(MarkProofFailed)[3:] == [MarkProofFailed(9)]
    world.step(session_events.ReleaseOwnership())
    world.step(session_events.ProveMark(10))
    assert world.all_reported(MarkProofFailed)[4:] == [MarkProofFailed(10)]


def test_a_batch_submitted_after_the_end_of_the_session_is_dropped(world):
    session = world.store.open_session_id
    world.lose(A)
    sent = len(world.sent)
    world.step(session_events.SubmitToSession(session, make_batch(0, [1], 5)))
    assert len(world.sent) == sent
    world.reopen()
    sent = len(world.sent)
    world.step(session_events.SubmitToSession(session, make_batch(0, [1], 5)))
    assert len(world.sent) == sent


def test_an_answer_to_an_earlier_zookeeper_request_does_not_answer_the_current_request():
    """An answer to an older attempt does not answer the current request."""
    world = ReplicationWorld()
    world.take_ownership()
    world.answer_zookeeper()
    world.step(session_events.ReassignReplicas((C, B, A)))
    written, _ = world.zookeeper_requests
    assert isinstance(written, session_events.WriteMetadata)
    world.answer_zookeeper()
    assert len(world.zookeeper_requests) == 1
    assert not world.reports("session.claimed")
    world.reopen()
    assert world.store.open_session_id == 1
    assert world.store.readable_replicas == [C, B, A]


def test_late_answers_to_an_abandoned_write_are_ignored():
    """The result of the write is read; a late answer may refer to another attempt."""
    world = ReplicationWorld()
    world.take_ownership()
    world.answer_zookeeper()
    effect = world.answer_zookeeper("away")
    assert isinstance(effect, session_events.WriteMetadata)
    for late in (
        session_events.MetadataWritten(effect.attempt, 1, 1),
        session_events.MetadataRead(effect.attempt, world.metadata, 0, world.marker, 0),
    ):
        world.step(late)
        assert world.store.session is None
        assert not world.zookeeper_requests
    world.reopen()
    assert world.store.open_session_id == 0


def test_a_partition_that_is_released_closes_its_session_and_connections(world):
    world.step(session_events.ReleaseOwnership())
    assert world.requests == {}
    assert world.store.session is None
    assert world.store.wake_at_ms is None
    assert len(world.all_reported(SessionClosed)) == 1
    assert not world.all_reported(OwnershipReleased)


def test_a_repeated_assignment_has_no_effect(world):
    world.take_ownership()
    world.step(session_events.ReassignReplicas((A, B, C)))
    assert world.store.open_session_id == 0
    world.take_ownership(generation=2)
    world.reopen()
    assert world.metadata.generation == 2


def test_a_replica_is_replaced_by_another_replica():
    world = ReplicationWorld()
    world.add_storage(D)
    world.open()
    world.append(2, batches=5)
    world.step(session_events.ReassignReplicas((A, B, D)))
    world.wait(30)
    world.reopen()
    world.run_for(100)
    assert world.metadata.states == dict.fromkeys([A, B, D], ReplicaState(1, UNRESOLVED))
    assert world.storages[D].payloads() == world.storages[A].payloads()
    assert C not in world.requests


def test_a_session_opens_only_with_a_quorum_of_both_the_last_and_the_new_assignment():
    """B is down, and C is lost after the decision. A and D are a quorum of the new replicas."""
    world = ReplicationWorld(A, B, C, D)
    world.open(replicas=(A, B, C))
    world.append()
    world.down = {B}
    world.step(session_events.ReassignReplicas((A, B, D)))
    while world.zookeeper_requests:
        world.answer_zookeeper()
    while world.dials:
        world.connect()
    for name in (A, C):
        world.deliver(name)
    assert world.store.session.repairs.goal is not None
    world.down = {B, C}
    world.lose(C)
    for _ in range(20):
        world.run()
        world.wait(50)
    assert world.store.session.replicas[D].is_mark_set
    assert world.store.open_session_id is None
    world.down = {C}
    world.wait(1_000)
    world.reopen()
    assert set(world.metadata.states) == {A, B, D}


def test_too_many_new_replicas_at_once_are_rejected():
    world = ReplicationWorld()
    world.add_storage(D)
    world.add_storage(E)
    world.open()
    world.step(session_events.ReassignReplicas((A, D, E)))
    world.run()
    world.wait(100)
    assert "fewer than 2 new replicas" in world.reports("partition.open_failed")[0]["reason"]
    world.step(session_events.ReassignReplicas((A, B, D)))
    world.reopen()
    assert world.store.open_session_id == 1


def test_no_session_opens_if_all_replicas_have_lost_a_committed_record(world):
    """All disks lose acknowledged records: no session opens, and the log reports the loss."""
    world.append()
    for storage in world.storages.values():
        storage.disk.entries = []
    world.step(session_events.Checkpoint())
    world.run_for(100)
    assert world.store.open_session_id is None
    assert "transaction 0 was committed" in world.reports("partition.open_failed")[0]["reason"]


def test_pauses_grow_after_each_failure(world):
    claimed_ms = []
    for _ in range(12):
        world.wait(1)
        for _ in range(3000):
            world.run()
            if world.store.open_session_id is not None:
                break
            world.wait(10)
        claimed_ms.append(world.now_ms)
        world.lose(A)
    gaps = [b - a for a, b in itertools.pairwise(claimed_ms)]
    assert max(gaps[:2]) < 150
    assert gaps[-1] >= 1000


def test_a_rolling_restart_of_storages_does_not_count_as_failures(world):
    for replica in (A, B, C) * 4:
        world.wait(world.limits.useful_session_ms)
        world.run()
        assert replica in world.store.readable_replicas
        world.lose(replica)
        lost_ms = world.now_ms
        while world.store.open_session_id is None:
            world.wait(1)
            world.run()
        assert (
            world.now_ms - lost_ms
            <= world.limits.first_retry_ms_max + world.limits.opening_grace_ms
        )


def test_a_partition_is_rejected_if_its_session_id_was_assigned_twice(world):
    """ZooKeeper is rolled back by one session: the next claim has a session ID that was in use."""
    old = (world.metadata, world.marker)
    world.step(session_events.Checkpoint())
    world.reopen()
    world.append(batches=3)
    assert world.store.open_session_id == 1
    world.metadata, world.marker = old
    world.store = world._new_store(world.limits)
    world.requests.clear()
    world.take_ownership(generation=2)
    world.run_for(100)
    assert world.store.open_session_id is None
    assert "rolled back" in world.reports("partition.open_failed")[0]["reason"]
    claimed = world.metadata.session_id
    for _ in range(5):
        world.wait(11_000)
        world.run()
    assert world.metadata.session_id == claimed
    assert len({tuple(log) for log in world.logs().values()}) == 1
    assert not world.all_reported(OwnershipReleased)
