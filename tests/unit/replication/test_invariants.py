"""`waltz_core.replication.invariants`: each invariant detects its violation."""

import pytest

from tests.unit.replication.replication_world import A, B, C, ReplicationWorld
from waltz_core.cluster.znodes.model import ReplicaState
from waltz_core.replication.invariants import check
from waltz_core.replication.replica_session import ReplicaStage


@pytest.fixture
def world():
    world = ReplicationWorld()
    world.open()
    world.submit(2)
    world.run()
    return world


def test_a_correct_machine_violates_no_invariant(world):
    assert world.store.high_water_mark == 1
    check(world.store)
    idle = ReplicationWorld().store
    assert idle.session is None
    check(idle)


def test_a_session_that_counts_a_replica_unknown_to_zookeeper_is_detected(world):
    world.store.session.states[B] = ReplicaState(0, 5)
    with pytest.raises(AssertionError):
        check(world.store)


def test_a_mark_without_a_synced_quorum_is_detected(world):
    world.store.session.replicas[A].synced_last = 0
    check(world.store)
    world.store.session.replicas[B].synced_last = 0
    with pytest.raises(AssertionError):
        check(world.store)


def test_fewer_engaged_replicas_than_a_quorum_are_detected(world):
    for name in (A, B):
        world.store.session.replicas[name].stage = ReplicaStage.ABSENT
    with pytest.raises(AssertionError):
        check(world.store)


def test_a_late_replica_with_uncommitted_batches_is_detected(world):
    one = world.store.session.replicas[C]
    one.stage = ReplicaStage.READY
    check(world.store)
    one.next_id += 1
    with pytest.raises(AssertionError, match="only committed batches"):
        check(world.store)


def test_a_connection_to_a_rejected_replica_is_detected(world):
    world.store.session.replicas[C].cannot_rejoin = True
    with pytest.raises(AssertionError, match="cannot rejoin"):
        check(world.store)


def test_a_mark_that_is_set_before_the_decision_on_the_log_is_detected():
    world = ReplicationWorld()
    world.take_ownership()
    world.answer_zookeeper()
    world.answer_zookeeper()
    world.store.session.repairs.goal = None
    world.store.session.replicas[A].stage = ReplicaStage.READY
    with pytest.raises(AssertionError):
        check(world.store)
