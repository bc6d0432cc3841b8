"""The state of a partition, which the doctor and `cluster verify` share."""

import pytest

from tests.unit.ops.test_diagnosis import ENGAGED, ONE, SPARE, A, B, C, Case
from waltz_core.cluster.znodes.model import PartitionMetadata, ReplicaState
from waltz_core.ops.condition import PartitionCondition


@pytest.fixture
def case():
    return Case()


def condition_of(case):
    return PartitionCondition(case.facts.cluster, 0)


def test_a_healthy_partition_has_no_problems(case):
    now = condition_of(case)
    assert now.owner.address == ONE
    assert (
        now.is_served,
        now.has_open_session,
        now.is_metadata_lost,
        now.has_outdated_session_replicas,
    ) == (*(True, True, False, False),)
    assert now.answering_replicas == now.engaged_replicas == [A, B, C]
    assert (
        now.not_engaged_replicas,
        now.suspect_replicas,
        now.replicas_of_unknown_state,
        now.has_no_trusted_quorum,
    ) == (
        [],
        [],
        [],
        False,
    )
    assert (now.quorum_size, now.last_id) == (2, 90)


def test_a_stuck_or_unavailable_replica_does_not_count_as_answering(case):
    case.storage(A, failure="refused", replicas={})
    case.replica(B, is_stuck=True)
    case.storage(C, replicas={})  # a storage without a report is assumed to be healthy
    now = condition_of(case)
    assert now.answering_replicas == [C]
    assert now.replicas_of_unknown_state == [A, B]


def test_a_quorum_may_be_trusted_while_replicas_are_unavailable(case):
    case.server(1, served_partitions={0: False})
    case.replica(A, is_suspect=True)
    assert not condition_of(case).has_no_trusted_quorum
    case.replica(B, is_suspect=True)
    assert condition_of(case).suspect_replicas == [A, B]
    assert condition_of(case).has_no_trusted_quorum
    case.storage(C, failure="refused", replicas={})
    assert not condition_of(case).has_no_trusted_quorum  # the unavailable storage may have the log


def test_only_replicas_of_the_newest_session_are_engaged(case):
    case.states({A: ENGAGED, B: ReplicaState(6, 50), SPARE: ENGAGED})
    now = condition_of(case)
    assert now.engaged_replicas == [A, SPARE]
    assert now.not_engaged_replicas == [B, C]
    assert now.has_outdated_session_replicas
    case.partition(metadata=PartitionMetadata())
    assert condition_of(case).is_metadata_lost
