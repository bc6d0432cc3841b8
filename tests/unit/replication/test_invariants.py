"""`waltz_core.replication.invariants`: each invariant detects its violation."""

import pytest

from tests.unit.replication.bench import A, B, Bench, C
from waltz_core.cluster.znodes.model import ReplicaState
from waltz_core.replication.invariants import check
from waltz_core.replication.replica_session import ReplicaStage


@pytest.fixture
def bench():
    bench = Bench()
    bench.open()
    bench.submit(2)
    bench.run()
    return bench


def test_a_correct_machine_violates_no_invariant(bench):
    assert bench.store.high_water_mark == 1
    check(bench.store)
    idle = Bench().store
    assert idle.session is None
    check(idle)


def test_counting_a_replica_unknown_to_zookeeper_is_detected(bench):
    bench.store.session.states[B] = ReplicaState(0, 5)
    with pytest.raises(AssertionError):
        check(bench.store)


def test_a_mark_without_a_synced_quorum_is_detected(bench):
    bench.store.session.replicas[A].synced_last = 0
    check(bench.store)
    bench.store.session.replicas[B].synced_last = 0
    with pytest.raises(AssertionError):
        check(bench.store)


def test_fewer_engaged_replicas_than_a_quorum_are_detected(bench):
    for name in (A, B):
        bench.store.session.replicas[name].stage = ReplicaStage.ABSENT
    with pytest.raises(AssertionError):
        check(bench.store)


def test_a_late_replica_with_uncommitted_batches_is_detected(bench):
    one = bench.store.session.replicas[C]
    one.stage = ReplicaStage.READY
    check(bench.store)
    one.next_id += 1
    with pytest.raises(AssertionError, match="only committed batches"):
        check(bench.store)


def test_a_connected_rejected_replica_is_detected(bench):
    bench.store.session.replicas[C].cannot_rejoin = True
    with pytest.raises(AssertionError, match="cannot rejoin"):
        check(bench.store)


def test_a_mark_before_the_decision_is_detected():
    bench = Bench()
    bench.take_ownership()
    bench.answer_zookeeper()
    bench.answer_zookeeper()
    bench.store.session.repairs.goal = None
    bench.store.session.replicas[A].stage = ReplicaStage.READY
    with pytest.raises(AssertionError):
        check(bench.store)
