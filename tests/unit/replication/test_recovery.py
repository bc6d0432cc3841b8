"""Unit tests of `waltz_core.replication.session_recovery`, against all possible histories."""

from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.replication.quorum import quorum_size
from waltz_core.replication.session_recovery import (
    HistoryOrigin,
    Recovery,
    decided_mark,
    history_origin_of,
    is_credible,
    states_to_claim,
)
from waltz_core.wire.messages import Prepared

A, B, C, D = (f"storage{n}:1" for n in range(4))
OWN_ID = bytes(range(16))


def prepared(last, *, session=5, mark=0, suspect=False, damaged=(), storage_id=OWN_ID):
    packed = b"".join(value.to_bytes(8, "big") for pair in damaged for value in pair)
    state = (session, mark, True, last, bytes(16), suspect, packed)
    return Prepared(6, 1, 0, storage_id, *state)


def engaged(*names, session=5):
    return dict.fromkeys(names, ReplicaState(session, UNRESOLVED))


@pytest.mark.parametrize("replica_count", [1, 2, 3, 4, 5])
def test_the_decision_is_the_highest_id_that_can_have_been_acknowledged(replica_count):
    """Try all logs of the credible replicas and all possible logs of the unknown replicas."""
    quorum = quorum_size(replica_count)
    cases = 0
    for engaged_count in range(quorum, replica_count + 1):
        for unknown_count in range(engaged_count + 1):
            known_count = engaged_count - unknown_count
            for maxes in combinations_with_replacement(range(-1, 3), known_count):
                cases += 1
                mark = decided_mark(list(maxes), unknown_count=unknown_count, quorum=quorum)
                # An unknown replica may have had no records, the same records as others, or more.
                histories = product((-1, 0, 1, 2, 99), repeat=unknown_count)
                best = max(sorted((*maxes, *past), reverse=True)[quorum - 1] for past in histories)
                if mark is None:
                    assert best == 99
                    assert unknown_count >= quorum
                else:
                    assert mark == best
    assert cases > 3


def test_replicas_that_were_not_engaged_do_not_count():
    states = {**engaged(A, B), C: ReplicaState(3, 7)}
    recovery = Recovery(HistoryOrigin.RECORDED, states)
    recovery.on_prepared(C, prepared(99), OWN_ID)
    assert recovery.decide_mark() is None
    recovery.on_prepared(A, prepared(4), OWN_ID)
    assert recovery.decide_mark() == 4
    assert recovery.unknown_replicas == [B]


def test_recovery_keeps_a_record_that_the_vote_of_waltz_0_13_would_lose():
    """B and C had ID 0. B's disk is rolled back, C is down, and A never had ID 0."""
    recovery = Recovery(HistoryOrigin.RECORDED, engaged(A, B, C))
    recovery.on_prepared(A, prepared(-1), OWN_ID)
    recovery.on_prepared(B, prepared(-1, session=4), OWN_ID)
    assert recovery.decide_mark() is None
    recovery.on_prepared(C, prepared(0), OWN_ID)
    assert recovery.decide_mark() == 0


def test_a_suspect_answer_or_a_log_shorter_than_before_makes_a_replica_unknown():
    recovery = Recovery(HistoryOrigin.RECORDED, engaged(A, B, C))
    recovery.on_prepared(A, prepared(9, suspect=True), OWN_ID)
    recovery.on_prepared(A, prepared(9), OWN_ID)
    recovery.on_prepared(B, prepared(9), OWN_ID)
    recovery.on_prepared(B, prepared(8), OWN_ID)
    assert recovery.unknown_replicas == [A, B, C]


@pytest.mark.parametrize(
    ("answer", "credible"),
    [
        (prepared(9), True),
        (prepared(9, session=6), True),
        (prepared(9, session=4), False),
        (prepared(9, suspect=True), False),
        (prepared(9, storage_id=bytes(15) + b"x"), False),
        (prepared(9, mark=5, damaged=[(2, 3)]), True),
        (prepared(9, mark=5, damaged=[(2, 3), (5, 6)]), False),
    ],
)
def test_trust_in_a_replica_depends_on_its_answer_and_its_recorded_state(answer, credible):
    assert is_credible(answer, ReplicaState(5, UNRESOLVED), OWN_ID) is credible


def test_without_a_registered_storage_id_any_id_is_accepted():
    state = ReplicaState(5, UNRESOLVED)
    assert is_credible(prepared(9, storage_id=bytes(15) + b"x"), state, bytes(16))


# ---------------------------------------------------------------------------------------------
# partitions without a history


def marker(state):
    return PartitionMarker(state)


@pytest.mark.parametrize(
    ("metadata", "mark", "origin"),
    [
        (PartitionMetadata(), marker(MarkerState.NEW), HistoryOrigin.NEW),
        (None, marker(MarkerState.NEW), HistoryOrigin.NEW),
        (PartitionMetadata(), marker(MarkerState.OPEN), HistoryOrigin.LOST),
        (None, marker(MarkerState.OPEN), HistoryOrigin.LOST),
        (None, None, HistoryOrigin.ADOPTED),
        (PartitionMetadata(), None, HistoryOrigin.ADOPTED),
        (PartitionMetadata(1, 5, engaged(A)), None, HistoryOrigin.RECORDED),
        (PartitionMetadata(1, 5, engaged(A)), marker(MarkerState.NEW), HistoryOrigin.RECORDED),
        (PartitionMetadata(1, 5, engaged(A)), marker(MarkerState.OPEN), HistoryOrigin.RECORDED),
    ],
)
def test_the_history_origin_is_derived_from_metadata_and_marker(metadata, mark, origin):
    assert history_origin_of(metadata, mark) is origin


def test_an_interrupted_adoption_requires_all_recorded_replicas():
    states = states_to_claim(HistoryOrigin.ADOPTED, {}, [A, B, C])
    # Storages that an earlier claim has recorded must answer, even if others are assigned now.
    assert states_to_claim(HistoryOrigin.ADOPTED, states, [A, B]) == states
    metadata = PartitionMetadata(1, 1, states)
    assert history_origin_of(metadata, marker(MarkerState.NEW)) is HistoryOrigin.ADOPTED
    recovery = Recovery(HistoryOrigin.ADOPTED, states)
    recovery.on_prepared(A, prepared(-1, session=-1), OWN_ID)
    recovery.on_prepared(B, prepared(-1, session=-1), OWN_ID)
    assert recovery.decide_mark() is None
    recovery.on_prepared(C, prepared(-1, session=-1), OWN_ID)
    assert recovery.decide_mark() == -1


# ---------------------------------------------------------------------------------------------
# states that are written to ZooKeeper


def test_the_opening_of_a_session_records_the_state_of_each_replica():
    states = {**engaged(A, B), C: ReplicaState(3, 7)}
    recovery = Recovery(HistoryOrigin.RECORDED, states)
    recovery.on_prepared(A, prepared(9), OWN_ID)
    assert recovery.decide_mark() == 9
    assert recovery.opening_states(6, [A, B, C, D], [A]) == {
        A: ReplicaState(6, UNRESOLVED),
        B: ReplicaState(5, 9),
        C: ReplicaState(3, 7),
        D: ReplicaState(-1, 9),
    }


def test_the_quorum_of_the_last_assignment_counts_all_its_replicas():
    states = engaged(A, B, C) | dict.fromkeys((D, "storage4:1"), ReplicaState(4, 7))
    recovery = Recovery(HistoryOrigin.RECORDED, states)
    assert len(recovery.engaged) == 3
    assert recovery.previous_quorum_size == 3


def test_a_replica_engaged_in_a_later_session_than_zookeepers_last_is_excluded():
    recovery = Recovery(HistoryOrigin.RECORDED, engaged(A, B, session=5))
    later = replace(prepared(9, session=6), engaged_session=6)
    assert "was in sync in store session 6" in recovery.exclusion_reason(later)
    # A replica has set a mark in a session that never opened. So the replica does not report this
    # session as engaged, and the replica's state in ZooKeeper is unchanged.
    assert recovery.exclusion_reason(prepared(9, session=6)) is None
    assert recovery.exclusion_reason(replace(later, engaged_session=5)) is None
    # A storage outside ZooKeeper's last session cannot block the session of its members.
    assert [recovery.is_needed(each) for each in (A, B, C)] == [True, True, False]
