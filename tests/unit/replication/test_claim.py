"""Unit tests of `waltz_core.replication.session_claim`."""

import pytest

from waltz_core.cluster.nodes.model import (
    NO_GENERATION,
    UNRESOLVED,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.replication.session_claim import View, claim_over, is_newer, rejection, states_over

A, B, C, D, E = (f"storage{n}:1" for n in range(5))
NONCE = b"n" * 16
STATES = dict.fromkeys([A, B, C], ReplicaState(5, UNRESOLVED))


def view(states=STATES, *, session=5, state=MarkerState.OPEN, marker_session=5):
    marker = None if state is None else PartitionMarker(state, marker_session, NONCE)
    return View(PartitionMetadata(3, session, states), 7, marker, 8)


@pytest.mark.parametrize(
    ("one", "other", "newer"),
    [
        (1, 0, True),
        (0, 1, False),
        (1, 1, False),
        (0, NO_GENERATION, True),
        (NO_GENERATION, 0, False),
        (-(1 << 31), (1 << 31) - 1, True),
        ((1 << 31) - 1, -(1 << 31), False),
    ],
)
def test_generations_wrap(one, other, newer):
    assert is_newer(one, other) is newer


def test_a_claim_is_the_next_session_and_nothing_else():
    claimed = claim_over(view(), 4, [A, B, C], b"m" * 16)
    assert claimed.metadata == PartitionMetadata(4, 6, STATES)
    assert claimed.marker == PartitionMarker(MarkerState.OPEN, 6, b"m" * 16)
    assert claimed.versions == (7, 8)
    assert claimed.name == (6, b"m" * 16)


def test_adoption_makes_the_marker():
    claimed = claim_over(view(state=None), 4, [A, B, C], NONCE)
    assert claimed.marker.state is MarkerState.NEW
    assert claimed.metadata.states == STATES


def test_adoption_without_states_records_the_replicas_that_must_answer():
    claimed = claim_over(view({}, state=None), 4, [A, B, C], NONCE)
    assert claimed.metadata.states == dict.fromkeys([A, B, C], ReplicaState(-1, UNRESOLVED))


def test_the_partition_is_open_with_its_states():
    states = {A: ReplicaState(6, UNRESOLVED)}
    written = states_over(view(state=MarkerState.NEW), states)
    assert written.marker.state is MarkerState.OPEN
    assert written.metadata == PartitionMetadata(3, 5, states)


def test_a_claim_by_a_0_13_program_server_has_no_name():
    assert view().name == (5, NONCE)
    assert view(session=6).name is None
    assert view(state=None).name is None


def test_an_open_partition_without_states_is_rejected():
    assert "lost or rolled back" in rejection(view({}), [A, B, C], {})
    assert rejection(view({}, state=MarkerState.NEW), [A, B, C], {}) is None


def test_storages_that_know_later_sessions_than_zookeeper():
    assert rejection(view(), [A, B, C], {A: 9}) is None
    assert rejection(view(), [A, B, C], {A: 5, B: 5}) is None
    assert "bound to sessions later than 5" in rejection(view(), [A, B, C], {A: 9, B: 9})
