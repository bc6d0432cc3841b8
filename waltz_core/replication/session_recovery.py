"""Recovery: which replicas to trust, how much of the log to keep, which states to write.

These decisions determine whether acknowledged transactions survive. The module has no connections
and no clock, so tests can cover each case by itself.

Rules (docs/design/correctness.md 2.1, C to E and G):
    1. A missing answer never means that a replica has no records. A replica without an answer, with
       an older session, or with a wiped or suspect disk is UNKNOWN for the whole session.
    2. If the unknown replicas are a quorum, nothing is decided and nothing is changed.
    3. If the unknown replicas are not a quorum, the high-water mark is the highest ID that a quorum
       could have acknowledged.
    4. A partition is new only if its marker in ZooKeeper states so, and no replica that answers has
       records. The marker of a restored partition contains an archived mark, and the log begins
       after this mark. A replica may already have been reset to this beginning, by a session that
       never opened (decision 055).
    5. If a replica was engaged in a session later than all sessions in ZooKeeper, ZooKeeper's data
       was rolled back. Other replicas may lack transactions that were acknowledged in that later
       session. So no session opens with this replica.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    Chain,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.quorum import quorum_mark, quorum_size
from waltz_core.wire.messages import Prepared

NO_STORAGE_ID = bytes(16)


class HistoryOrigin(Enum):
    """Where a partition's history is recorded."""

    RECORDED = auto()  # ZooKeeper has the replicas and their states
    NEW = auto()  # created by `cluster create` or `restore`, never opened
    ADOPTED = auto()  # no marker and no states: every replica must report that it is empty
    LOST = auto()  # a session was opened before, but ZooKeeper has no replica states


def history_origin_of(
    metadata: PartitionMetadata | None, marker: PartitionMarker | None
) -> HistoryOrigin:
    """Return where a partition's history is recorded."""
    states = {} if metadata is None else metadata.states
    if marker is not None and marker.state is MarkerState.OPEN:
        return HistoryOrigin.RECORDED if states else HistoryOrigin.LOST
    if not states:
        return HistoryOrigin.ADOPTED if marker is None else HistoryOrigin.NEW
    # `states_to_claim` writes these states, which stay until the adopting session has opened.
    if marker is not None and all(state == _UNANSWERED_STATE for state in states.values()):
        return HistoryOrigin.ADOPTED
    return HistoryOrigin.RECORDED


_UNANSWERED_STATE = ReplicaState(NO_SESSION, UNRESOLVED)


def states_to_claim(
    origin: HistoryOrigin, states: Mapping[ReplicaId, ReplicaState], assigned: Sequence[ReplicaId]
) -> dict[ReplicaId, ReplicaState]:
    """Return the replica states of the first compare-and-set: unchanged, except for an adoption.

    If an adopted partition has no states, all replicas are recorded as unanswered. The record
    ensures that a later session also requires answers of all replicas.
    """
    if origin is HistoryOrigin.ADOPTED and not states:
        return dict.fromkeys(assigned, _UNANSWERED_STATE)
    return dict(states)


def is_credible(answer: Prepared, state: ReplicaState, registered_id: bytes) -> bool:
    """Return whether an engaged replica's log still has everything that it acknowledged."""
    if registered_id not in (NO_STORAGE_ID, answer.storage_id):
        return False
    if answer.last_session < state.session_id or answer.suspect:
        return False
    pairs = memoryview(answer.damaged)
    damaged_lasts = (
        int.from_bytes(pairs[offset + 8 : offset + 16], "big")
        for offset in range(0, len(pairs), 16)
    )
    return all(last <= answer.low_water_mark for last in damaged_lasts)


def decided_mark(
    synced_lasts: Sequence[TransactionId], *, unknown_count: int, quorum: int
) -> TransactionId | None:
    """Return the highest ID that could have been acknowledged; None while it cannot be known.

    `synced_lasts` are the last synced IDs of the credible replicas. `unknown_count` is the number
    of the other engaged replicas. An unknown replica may have acknowledged any ID, so the function
    assumes that it has acknowledged every ID.
    """
    assert unknown_count >= 0
    assert len(synced_lasts) + unknown_count >= quorum, "fewer engaged replicas than a quorum"
    if unknown_count >= quorum:
        return None
    return quorum_mark(synced_lasts, quorum - unknown_count)


class Recovery:
    """The answers of the last session's replicas so far, and the decision."""

    def __init__(
        self,
        origin: HistoryOrigin,
        states: Mapping[ReplicaId, ReplicaState],
        archived: ArchivedMark | None = None,
    ) -> None:
        assert origin is not HistoryOrigin.LOST
        self.origin = origin
        # Where a new log begins (rule 4).
        self._log_begin: tuple[TransactionId, Chain] = BEFORE_FIRST, GENESIS_CHAIN
        if origin is HistoryOrigin.NEW and archived is not None:
            self._log_begin = archived.last, archived.chain
        self.states = dict(states)
        self.engaged = [
            replica
            for replica, state in self.states.items()
            if state.closing_high_water_mark == UNRESOLVED
        ]
        # None: the replica is UNKNOWN, which never changes (rule 1).
        self._synced_last: dict[ReplicaId, TransactionId | None] = {}
        self.mark: TransactionId | None = None

    @property
    def previous_quorum_size(self) -> int:
        """The quorum of the last assignment; 0 without a history."""
        return quorum_size(len(self.states)) if self.states else 0

    @property
    def newest_session(self) -> SessionId:
        """The last opened session, according to ZooKeeper; no later session has written batches."""
        return max((state.session_id for state in self.states.values()), default=NO_SESSION)

    @property
    def known_chain(self) -> Chain | None:
        """The chain at the decided mark if the log begins there; otherwise None."""
        last, chain = self._log_begin
        return chain if self.mark == last else None

    @property
    def unknown_replicas(self) -> list[ReplicaId]:
        """The engaged replicas that have not answered credibly (yet)."""
        return [replica for replica in self.engaged if self._synced_last.get(replica) is None]

    @property
    def is_complete(self) -> bool:
        """Whether every engaged replica has answered, credibly or not."""
        return all(replica in self._synced_last for replica in self.engaged)

    def is_credible(self, replica: ReplicaId) -> bool:
        """Whether the replica was engaged in the last session and is trusted."""
        return self._synced_last.get(replica) is not None

    def has_unexpected_records(self, answer: Prepared) -> bool:
        """Whether a replica has records although the partition must have none (rule 4)."""
        if self.origin is HistoryOrigin.RECORDED or answer.synced_max == BEFORE_FIRST:
            return False
        # After a reset, a log without records begins where the restored log begins. Any other log
        # that ends above `BEFORE_FIRST` contains records.
        end = answer.synced_max, bytes(answer.chain)
        return answer.start != answer.synced_max or end != self._log_begin

    def exclusion_reason(self, answer: Prepared) -> str | None:
        """Return why no session can include a replica with this answer; None if a session can.

        Rules 4 and 5 define the reasons.
        """
        if self.has_unexpected_records(answer):
            return (
                "expected a replica without records, because ZooKeeper has no replica states for "
                f"the partition, found records up to transaction {answer.synced_max}. Hint: run "
                "`waltz-core doctor`."
            )
        if answer.engaged_session <= self.newest_session:
            return None
        return (
            f"the replica was in sync in store session {answer.engaged_session}, but in "
            f"ZooKeeper the last opened session is {self.newest_session}: ZooKeeper's data "
            "was rolled back"
        )

    def is_needed(self, replica: ReplicaId) -> bool:
        """Return whether a decision needs this replica.

        A decision needs only the replicas that were engaged in the last session according to
        ZooKeeper. Another replica may know of a later session that ZooKeeper has lost. But then a
        quorum of the assignment has synced the appends of this later session. As long as the
        assignment is the same, no session opens without one replica of this quorum, and that
        replica reports the later session.
        """
        return self.origin is not HistoryOrigin.RECORDED or replica in self.engaged

    def on_prepared(self, replica: ReplicaId, answer: Prepared, registered_id: bytes) -> None:
        """Process a replica's answer to PREPARE."""
        if replica not in self.engaged:
            return  # A replica that was not engaged in the last session does not affect the mark.
        credible = is_credible(answer, self.states[replica], registered_id)
        synced_max = TransactionId(answer.synced_max)
        if replica in self._synced_last:
            previous = self._synced_last[replica]
            # No log is truncated before the decision, so a shorter log has lost records.
            has_shrunk = previous is not None and self.mark is None and synced_max < previous
            credible = credible and previous is not None and not has_shrunk
        self._synced_last[replica] = synced_max if credible else None

    def decide_mark(self) -> TransactionId | None:
        """Decide the high-water mark if this is possible; the decision never changes."""
        if self.mark is None:
            self.mark = self._compute_mark()
        return self.mark

    def _compute_mark(self) -> TransactionId | None:
        if self.origin is HistoryOrigin.NEW:
            return self._log_begin[0]
        if self.origin is HistoryOrigin.ADOPTED and self.unknown_replicas:
            return None
        synced_lasts = [
            last for last in map(self._synced_last.get, self.engaged) if last is not None
        ]
        unknown_count = len(self.engaged) - len(synced_lasts)
        if len(self.engaged) < self.previous_quorum_size:
            return None  # No session leaves such states, so an operator must intervene.
        return decided_mark(
            synced_lasts, unknown_count=unknown_count, quorum=self.previous_quorum_size
        )

    def opening_states(
        self,
        session_id: SessionId,
        assigned: Sequence[ReplicaId],
        ready: Sequence[ReplicaId],
    ) -> dict[ReplicaId, ReplicaState]:
        """Return the states of the second compare-and-set (G)."""
        assert self.mark is not None
        return {
            replica: self._opening_state(replica, session_id, is_ready=replica in ready)
            for replica in assigned
        }

    def _opening_state(
        self, replica: ReplicaId, session_id: SessionId, *, is_ready: bool
    ) -> ReplicaState:
        assert self.mark is not None
        if is_ready:
            return ReplicaState(session_id, UNRESOLVED)
        old = self.states.get(replica)
        if old is None:
            return ReplicaState(NO_SESSION, self.mark)
        if old.closing_high_water_mark == UNRESOLVED:
            return ReplicaState(old.session_id, self.mark)
        return old
