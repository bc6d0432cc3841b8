"""Invariants of a partition's state machine, checked from outside between any two steps.

The checks compare the states of all parts of the machine. The simulator runs them after every step;
production does not. `docs/replication.md` describes each check under the same name.
"""

from typing import Final

from waltz_core.cluster.znodes.model import UNRESOLVED
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.replication.quorum import quorum_mark, quorum_size
from waltz_core.replication.replica_session import MARK_SET_STAGES, ReplicaSession, ReplicaStage
from waltz_core.replication.store_session import StoreSession

_READY: Final = ReplicaStage.READY  # to look up a member of an enum is slow


def check(store: PartitionStore) -> None:
    """Assert every invariant of one partition's machine."""
    session = store.session
    if session is None:
        assert store.open_session_id is None
        assert store.readable_replicas == []
        return
    assert session.ending is None, "an ended session must be dropped in the same step"
    _check_untouched(session)
    engaged = session.engaged
    _check_engaged_only(session, engaged)
    _check_commit_quorum(store, session, engaged)


def _check_untouched(session: StoreSession) -> None:
    """Check the invariant Untouched: no replica is changed before the mark is decided."""
    if session.repairs.goal is None:
        assert session.window is None
        assert session.pending_states is None
        for peer in session.replicas.values():
            assert peer.stage not in MARK_SET_STAGES
    for peer in session.replicas.values():
        if peer.cannot_rejoin:
            assert not peer.is_connected, "a replica that cannot rejoin must not be connected"


def _check_engaged_only(session: StoreSession, engaged: list[ReplicaSession]) -> None:
    """Check the invariant EngagedOnly: only replicas that ZooKeeper records as engaged count.

    The engaged replicas of an open session are a quorum.
    """
    claim, states = session.claim, session.states
    for peer in engaged:
        assert states.get(peer.replica) == (claim.session_id, UNRESOLVED)
        assert peer.replica in claim.assigned
    if session.window is None:
        assert not engaged, "GateCAS2"
    else:
        assert len(engaged) >= quorum_size(len(claim.assigned))


def _check_commit_quorum(
    store: PartitionStore, session: StoreSession, engaged: list[ReplicaSession]
) -> None:
    """Check the invariant CommitQuorum: the mark ends a batch, and a quorum has synced up to it."""
    window = session.window
    if window is None:
        return
    goal = session.repairs.goal
    assert goal is not None
    committed, last = window.committed, window.last
    assert goal.mark <= committed <= last
    marks = [peer.synced_last for peer in engaged]
    reached = quorum_mark(marks, session.quorum)
    assert reached is not None
    assert committed <= max(reached, goal.mark)
    for peer in engaged:
        assert peer.synced_last < peer.next_id <= last + 1
    for peer in session.replicas.values():
        if peer.stage is _READY:
            assert peer.next_id <= committed + 1, "a late replica may have only committed batches"
    assert store.high_water_mark == committed
    assert store.next_transaction_id == last + 1
