"""What must hold of a partition's machine between any two steps, checked from outside.

Why it stands alone: these checks need the whole state at once, which no part of the machine sees.
The simulator runs them after every step; production does not.

Each check is named as in `docs/replication.md`.
"""

from waltz_core.cluster.model import UNRESOLVED, ReplicaState
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.replication.quorum import quorum_mark, quorum_size
from waltz_core.replication.replica_session import MARKED, ReplicaSession, Stage
from waltz_core.replication.store_session import StoreSession


def check(store: PartitionStore) -> None:
    """Assert every invariant of one partition's machine."""
    session = store.session
    if session is None:
        assert store.open_session is None
        assert store.readable_replicas == []
        return
    assert session.ended is None, "an ended session is dropped in the step that ends it"
    _check_touch(session)
    engaged = session.engaged
    _check_engaged(session, engaged)
    _check_marks(store, session, engaged)


def _check_touch(session: StoreSession) -> None:
    """Untouched: before the decision no replica is being changed."""
    if session.repairs.goal is None:
        assert session.window is None
        assert session.writing is None
        for each in session.replicas.values():
            assert each.stage not in MARKED
    for each in session.replicas.values():
        assert not (each.is_tainted and each.is_connected), "a tainted replica is connected"


def _check_engaged(session: StoreSession, engaged: list[ReplicaSession]) -> None:
    """EngagedOnly: who counts is engaged in ZooKeeper, and a quorum is, while the session lives."""
    state = ReplicaState(session.claim.session_id, UNRESOLVED)
    for each in engaged:
        assert session.states.get(each.replica) == state
        assert each.replica in session.claim.assigned
    if session.window is None:
        assert not engaged, "GateCAS2"
    else:
        assert len(engaged) >= quorum_size(len(session.claim.assigned))


def _check_marks(
    store: PartitionStore, session: StoreSession, engaged: list[ReplicaSession]
) -> None:
    """CommitQuorum: the mark is what a quorum has synced, rounded down to a whole batch."""
    window = session.window
    if window is None:
        return
    goal = session.repairs.goal
    assert goal is not None
    assert goal.mark <= window.committed <= window.last
    marks = [each.synced_last for each in engaged]
    reached = quorum_mark(marks, session.quorum)
    assert reached is not None
    assert window.committed <= max(reached, goal.mark)
    for each in engaged:
        assert each.synced_last < each.next_id <= window.last + 1
    for each in session.replicas.values():
        if each.stage is Stage.READY:
            assert each.next_id <= window.committed + 1, "a late replica has only what is committed"
    assert store.high_water_mark == window.committed
    assert store.next_transaction_id == window.last + 1
