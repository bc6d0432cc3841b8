"""Unit tests of `waltz_core.replication.session_claim`."""

import pytest

from waltz_core.cluster.znodes.model import (
    NO_GENERATION,
    UNRESOLVED,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.replication.session_claim import (
    PartitionNodes,
    claim_rejection,
    is_later_generation,
)

A, B, C, D, E = (f"storage{n}:1" for n in range(5))
NONCE = b"n" * 16
STATES = dict.fromkeys([A, B, C], ReplicaState(5, UNRESOLVED))


def view(states=STATES, *, session=5, state=MarkerState.OPEN, marker_session=5):
    marker = None if state is None else PartitionMarker(state, marker_session, NONCE)
    return PartitionNodes(PartitionMetadata(3, session, states), 7, marker, 8)


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
def test_the_generation_counter_wraps_around(one, other, newer):
    assert is_later_generation(one, other) is newer


def test_a_claim_by_a_0_13_server_has_no_nonce():
    assert view().last_claim == (5, NONCE)
    assert view(session=6).last_claim is None
    assert view(state=None).last_claim is None


def test_an_open_partition_without_replica_states_is_rejected():
    assert "lost or rolled back" in claim_rejection(view({}), [A, B, C], {})
    assert claim_rejection(view({}, state=MarkerState.NEW), [A, B, C], {}) is None
