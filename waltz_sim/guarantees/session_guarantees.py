"""Checks of store sessions: claims, decisions, openings and commits.

This module follows docs/design/correctness.md 2.1. It uses the data in ZooKeeper, the promises on
the disks, and the answers that the owner has received. From these data, it computes the expected
decisions independently, and compares them with the owner's decisions.

Rules:
    1. The content of ZooKeeper is known from the writes that ZooKeeper has applied (`wrote`).
    2. A replica is fenced when its disk has promised the session, whether or not any server has
       received the answer.
    3. The checks compute the expected decision once. They do this when the owner reports its
       decision, or earlier, when the owner sends the first message that changes a replica. All
       later messages must agree with this decision.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.machine import Report
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    Chain,
    LineageEntry,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication import session_events
from waltz_core.wire.messages import (
    Appended,
    AppendRaw,
    Engage,
    Prepared,
    Repair,
    ReplicaEnd,
    ResetLog,
    SetLowWaterMark,
    StorageMessage,
    Truncate,
)

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.guarantees.checker_state import CheckerState

_MESSAGES_THAT_CHANGE_REPLICAS = (AppendRaw, Engage, Repair, ResetLog, SetLowWaterMark, Truncate)


class ClaimedMetadata(NamedTuple):
    """The metadata that the first compare-and-set of a session found and wrote."""

    server: str
    nonce: bytes
    states: Mapping[ReplicaId, ReplicaState]

    @property
    def engaged(self) -> list[str]:
        """The replicas that were engaged in the previous session."""
        return [str(name) for name, state in self.states.items() if state[1] == UNRESOLVED]

    @property
    def quorum(self) -> int:
        """The quorum size of the last assignment; 0 if the partition was never opened."""
        return len(self.states) // 2 + 1 if self.states else 0


class DecidedMark(NamedTuple):
    """A decision: the lowest mark that the answers allow, and the count of unknown replicas."""

    mark_min: int
    unknown_count: int


class SessionGuarantees:
    """Checks all store sessions of the partition."""

    def __init__(self, state: "CheckerState") -> None:
        self._state = state
        self.is_rewritten = False  # whether a fault has changed ZooKeeper's data
        self.claims: dict[SessionId, ClaimedMetadata] = {}
        # By session, from its second compare-and-set on: its latest metadata.
        self.opened_sessions: dict[SessionId, PartitionMetadata] = {}
        # The end of the log at the second compare-and-set. An owner that opens late is fenced, and
        # need not cover the log after this end.
        self._last_at_open: dict[SessionId, int] = {}
        self.ever_engaged: dict[SessionId, dict[str, None]] = {}
        self.engaged_replicas: dict[str, None] = {}
        self._nonces: dict[bytes, SessionId] = {}
        self._claim_nonces: dict[SessionId, dict[bytes, None]] = {}
        self._version = 0
        self._last_claimants: list[str] = []
        # From the disks: for each replica, the highest promise and the highest last session in its
        # slots; for each chain, the replicas that have synced the chain.
        self._promised_sessions: dict[str, SessionId] = {}
        self._last_session: dict[str, SessionId] = {}
        self._synced_replicas: dict[Chain, dict[str, None]] = {}
        self._last_of_chain: dict[Chain, int] = {}  # chain -> the last ID of its batch
        # Answers that the owner has received. A flag states whether an answer came from the storage
        # that was registered at that time.
        self._prepare_answers: dict[tuple[SessionId, str], list[tuple[Prepared, bool]]] = {}
        self._answered_last: dict[tuple[SessionId, str], int] = {}
        self.decided_marks: dict[SessionId, DecidedMark] = {}
        self._marks: dict[SessionId, int] = {}
        self._sessions_with_batches: dict[SessionId, None] = {}

    # ---- ZooKeeper (rule 1)

    def on_metadata_written(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """20. MetaShape: check a write; record claims, open sessions and engaged replicas."""
        self.engaged_replicas = dict.fromkeys(_engaged_replicas(after))
        if self.is_rewritten:
            if after.states:
                self.opened_sessions[after.session_id] = after
                self._last_at_open.setdefault(after.session_id, self._state.history.last)
            return
        if after.session_id == before.session_id:
            self._check_states(server, before, after, marker)
        else:
            self._check_claim(server, before, after, marker)
        version = self._state.cluster.coordinator.metadata_version
        if version != self._version + 1:
            self._fail_metadata_shape(
                f"the version of the metadata was {self._version} and is {version}"
            )
        self._version = version

    def _fail_metadata_shape(self, text: str) -> None:
        self._state.fail("MetaShape", text)

    def _check_claim(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """Check a first compare-and-set: it changes only session, generation and nonce."""
        session = after.session_id
        if session != before.session_id + 1 or after.generation < before.generation:
            self._fail_metadata_shape(f"a claim changes {before} to {after}")
        if marker.session_id != session or marker.nonce in self._nonces:
            self._fail_metadata_shape(
                f"the claim of session {session} has the marker of session {marker.session_id}, or "
                "an old nonce"
            )
        if dict(after.states) != dict(before.states):
            self._fail_metadata_shape(
                f"a claim changes the replica states {before.states} to {after.states}"
            )
        self._nonces[marker.nonce] = session
        self.claims[session] = ClaimedMetadata(server, marker.nonce, after.states)
        if (
            before.session_id in self.opened_sessions
            and before.session_id not in self._sessions_with_batches
        ):
            self._state.count("session without appends")
        if len(self._claim_nonces.get(session, ())) > 1:
            self._state.count("two owners claimed one session")
        claimants = self._last_claimants
        if not claimants or claimants[-1] != server:
            claimants.append(server)
            if claimants[-3:-2] == [server]:
                self._state.count("partition returned to its previous owner")

    def _check_states(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """Check a later compare-and-set: its engaged replicas, and the marks of closed replicas."""
        session = after.session_id
        claim = self.claims.get(session)
        if claim is None or (claim.server, claim.nonce) != (server, marker.nonce):
            self._fail_metadata_shape(
                f"{server} writes states of session {session}, claimed by {claim}"
            )
            return
        engaged = _engaged_replicas(after)
        if len(engaged) < len(after.states) // 2 + 1:
            self._fail_metadata_shape(f"fewer than a quorum of replicas are engaged: {after}")
        if {after.states[ReplicaId(name)].session_id for name in engaged} != {session}:
            self._fail_metadata_shape(
                f"replicas are engaged in other sessions than {session}: {after}"
            )
        engaged_before = self.ever_engaged.setdefault(session, {})
        if not set(engaged_before) <= set(engaged):
            self._fail_metadata_shape(
                f"session {session} continues without one of {list(engaged_before)}: {after}"
            )
        self._check_closed_replicas(claim, after)
        for name in engaged:
            if self._last_session.get(name, NO_SESSION) < session:
                self._state.fail(
                    "EngagedOnly",
                    f"{name} is recorded as engaged in session {session}, but has not set its mark",
                )
        if not engaged_before:
            self._check_previous_assignment(claim, session)
        elif len(engaged) > len(engaged_before):
            self._state.count("replica joined an open session")
        engaged_before.update(dict.fromkeys(engaged))
        self.opened_sessions[session] = after
        self._last_at_open.setdefault(session, self._state.history.last)

    def _check_previous_assignment(self, claim: ClaimedMetadata, session: SessionId) -> None:
        """Check a session that opens: a quorum of the former assignment has its mark (2.1 G)."""
        marked = [
            str(name)
            for name in claim.states
            if self._last_session.get(name, NO_SESSION) >= session
        ]
        if len(marked) < claim.quorum:
            self._fail_metadata_shape(
                f"session {session} opens, but of {list(claim.states)} only {marked} have set its "
                "mark"
            )

    def _check_closed_replicas(self, claim: ClaimedMetadata, after: PartitionMetadata) -> None:
        """Check that other replicas are closed at the session's mark, or stay closed as before."""
        mark = self._marks.get(after.session_id, BEFORE_FIRST)
        for name, state in after.states.items():
            if state[1] == UNRESOLVED:
                continue
            old = claim.states.get(name)
            wanted = ReplicaState(NO_SESSION, TransactionId(mark)) if old is None else old
            if old is not None and old[1] == UNRESOLVED:
                wanted = ReplicaState(old.session_id, TransactionId(mark))
            if state != wanted:
                self._fail_metadata_shape(f"{name} is recorded as {state}, expected {wanted}")

    def on_zookeeper_rewritten(self) -> None:
        """Record that a fault has replaced ZooKeeper's data, so that session IDs may repeat.

        From now on the only guarantee for sessions is that no mark is below the log. Other modules
        check the results that applications receive.
        """
        self.is_rewritten = True

    # ---- disks (rule 2)

    def on_slot_written(self, name: str, promised: SessionId, last_session: SessionId) -> None:
        """Record the promised session and the last session in a replica's slot."""
        self._promised_sessions[name] = max(promised, self._promised_sessions.get(name, NO_SESSION))
        self._last_session[name] = max(last_session, self._last_session.get(name, NO_SESSION))

    def on_batches_synced(
        self, name: str, session: SessionId, nonce: bytes, lineage: Sequence[LineageEntry]
    ) -> None:
        """4. SingleWriter, 7. GateCAS2: check a session's batches that a replica has synced."""
        claim = self.claims.get(session)
        if (claim is None or claim.nonce != nonce) and not self.is_rewritten:
            self._state.fail(
                "SingleWriter", f"{name} accepts appends of session {session} from another server"
            )
        for entry in lineage:
            is_open = session in self.opened_sessions or self.is_rewritten
            if entry.session_id == session and not is_open:
                self._state.fail(
                    "GateCAS2", f"{name} has an append of session {session}, which is not open"
                )
            self._synced_replicas.setdefault(entry.chain, {})[name] = None
            self._last_of_chain[entry.chain] = entry.last

    def on_log_truncated(self, name: str, above: int) -> None:
        """Forget the batches that a replica had above an ID."""
        for chain, names in self._synced_replicas.items():
            if name in names and self._last_of_chain[chain] > above:
                del names[name]

    # ---- messages to and from the owner

    def on_replica_response(self, session: SessionId, replica: str, answer: StorageMessage) -> None:
        """Record an answer of a storage that the owner receives."""
        if isinstance(answer, Prepared):
            coordinator = self._state.cluster.coordinator
            registered = coordinator.storage_ids.get(ReplicaId(replica))
            # The answer may have been sent before the storage at this address was replaced.
            former = coordinator.former_ids.get(ReplicaId(replica), ())
            is_registered = registered in (None, answer.storage_id) or answer.storage_id in former
            self._prepare_answers.setdefault((session, replica), []).append((answer, is_registered))
            self._count_undecided_session(session)
        elif isinstance(answer, Appended | ReplicaEnd):
            key = session, replica
            self._answered_last[key] = max(
                answer.synced_max, self._answered_last.get(key, BEFORE_FIRST)
            )

    def _count_undecided_session(self, session: SessionId) -> None:
        """Count a session that cannot decide although an untrusted replica has answered."""
        claim = self.claims.get(session)
        if claim is None or session in self.decided_marks:
            return
        answered = [name for name in claim.engaged if (session, name) in self._prepare_answers]
        known = self._trusted_last_ids(session, claim)
        if len(known) < len(answered) and len(claim.engaged) - len(known) >= claim.quorum:
            self._state.count("recovery waited for more trusted replicas")

    def _trusted_last_ids(self, session: SessionId, claim: ClaimedMetadata) -> list[int]:
        """Return the last IDs of the engaged replicas that are trusted."""
        lasts = [
            self._trusted_last_id(session, name, claim.states[ReplicaId(name)])
            for name in claim.engaged
        ]
        return [last for last in lasts if last is not None]

    def on_sent_to_replica(self, server: "SimServer", effect: session_events.SendToReplica) -> None:
        """Check that replicas are changed only in a session that has decided (9, rule 3)."""
        message, session = effect.message, effect.session_id
        if not isinstance(message, _MESSAGES_THAT_CHANGE_REPLICAS) or self.is_rewritten:
            return
        self._decide(session)
        if isinstance(message, SetLowWaterMark):
            self._check_mark(session, message.mark)
        if isinstance(message, Engage) and effect.replica not in self.ever_engaged.get(session, ()):
            self._state.fail(
                "EngagedOnly",
                f"{effect.replica} is notified that it is engaged in session {session}, but it is "
                "not",
            )
        if isinstance(message, AppendRaw):
            self._check_own_append(server, effect.replica, message)

    def _check_own_append(self, server: "SimServer", replica: str, message: AppendRaw) -> None:
        """7. GateCAS2, and 2.1 I: check that live appends are sent only to engaged replicas."""
        session = SessionId(message.session_id)
        lasts = [entry.last for entry in message.lineage if entry.session_id == session]
        if not lasts:
            return
        if session not in self.opened_sessions:
            self._state.fail(
                "GateCAS2", f"{server.name} appends in session {session}, which is not open yet"
            )
        late = lasts[-1] > self._state.history.last
        if late and replica not in self.ever_engaged[session]:
            self._state.fail(
                "EngagedOnly",
                f"{replica}, which is not engaged in session {session}, gets transaction "
                f"{lasts[-1]}",
            )

    def _decide(self, session: SessionId) -> DecidedMark:
        """5. FenceFirst, and the formula of 6. DecisionCovers: compute a decision independently."""
        found = self.decided_marks.get(session)
        if found is not None:
            return found
        claim = self.claims.get(session)
        if claim is None:
            self._state.fail("SingleWriter", f"session {session} acts without a claim")
        engaged, quorum = claim.engaged, claim.quorum
        unfenced = [
            name for name in engaged if self._promised_sessions.get(name, NO_SESSION) < session
        ]
        if engaged and len(unfenced) >= quorum:
            self._state.fail(
                "FenceFirst",
                f"session {session} decides where the log ends, but {unfenced} may still "
                "acknowledge appends of earlier sessions",
            )
        known = self._trusted_last_ids(session, claim)
        unknown_count = len(engaged) - len(known)
        mark_min = BEFORE_FIRST
        if engaged:
            if unknown_count >= quorum:
                self._state.fail(
                    "DecisionCovers",
                    f"session {session} decides with fewer than a quorum of trusted replicas: "
                    f"{known}",
                )
            known.sort(reverse=True)
            mark_min = TransactionId(known[quorum - unknown_count - 1])
        if unknown_count:
            self._state.count("recovery decided without some replicas")
        decided = self.decided_marks[session] = DecidedMark(mark_min, unknown_count)
        return decided

    def is_trusted(self, session: SessionId, name: str) -> bool:
        """Whether this session, or the next session, needs a replica's log for its decision."""
        if session in self.opened_sessions:
            return name in self.ever_engaged.get(session, ())
        claim = self.claims.get(session)
        if claim is None or name not in claim.engaged or self.is_rewritten:
            return False
        return self._trusted_last_id(session, name, claim.states[ReplicaId(name)]) is not None

    def _trusted_last_id(self, session: SessionId, name: str, state: ReplicaState) -> int | None:
        """Return the last ID of a replica if it is trusted, otherwise None."""
        last = -2
        for answer, is_registered in self._prepare_answers.get((session, name), ()):
            damage = memoryview(answer.damaged).cast("B")
            ends = [
                int.from_bytes(damage[offset : offset + 8], "big")
                for offset in range(8, len(damage), 16)
            ]
            if (
                answer.suspect
                or answer.last_session < state.session_id
                or not is_registered
                or any(end > answer.low_water_mark for end in ends)
                or answer.synced_max < last
            ):
                return None
            last = answer.synced_max
        return None if last == -2 else last

    def _check_mark(self, session: SessionId, mark: int) -> None:
        """6. DecisionCovers: check a mark that a session uses."""
        known = self._marks.get(session)
        if known is not None and mark != known:
            self._state.fail("DecisionCovers", f"session {session} uses mark {known}, then {mark}")
        if known is not None:
            return  # The log may have grown in this session since.
        self._marks[session] = mark
        decided, last = self._decide(session), self._state.history.last
        if mark < decided.mark_min or mark < last:
            self._state.fail(
                "DecisionCovers",
                f"session {session} uses mark {mark}, but transactions up to {decided.mark_min} "
                f"may be acknowledged, and the log ends at {last}",
            )

    # ---- effects of the owner

    def on_batch_submitted(self, server: "SimServer", session: SessionId) -> None:
        """7. GateCAS2: check that a server submits batches only to an open session."""
        if self.is_rewritten:
            return
        if session not in self.opened_sessions:
            self._state.fail(
                "GateCAS2",
                f"{server.name} submits a batch to session {session}, which is not open yet",
            )
        self._sessions_with_batches[session] = None

    def on_store_effect(self, server: "SimServer", effect: session_events.Effect) -> None:
        """Check one effect of the store."""
        match effect:
            case session_events.WriteMetadata(metadata=metadata, marker=marker):
                tried = self._claim_nonces.setdefault(metadata.session_id, {})
                claim = self.claims.get(metadata.session_id)
                is_new = marker.nonce not in tried
                if is_new and claim is not None and claim.nonce != marker.nonce:
                    self._state.count("two owners claimed one session")
                tried[marker.nonce] = None
            case session_events.SessionOpened() if self.is_rewritten:
                self._check_decision_covers(effect)
            case _ if self.is_rewritten:
                pass
            case Report(name="recovery.decided"):
                self._decide(SessionId(int(str(dict(effect.fields)["session"]))))
            case session_events.SessionOpened():
                self._check_session_opened(server, effect)
            case session_events.SessionSettled():
                self._check_session_is_open(effect.session_id, "SessionSettled")
            case session_events.TransactionsCommitted():
                self._check_commit(effect)
            case session_events.MarkProofFailed():
                self._state.count("mark not confirmed by a quorum")
            case _:
                pass

    def _check_session_is_open(self, session: SessionId, effect_name: str) -> None:
        if session not in self.opened_sessions:
            self._state.fail(
                "GateCAS2", f"effect {effect_name} of session {session}, which is not open yet"
            )

    def _check_session_opened(
        self, server: "SimServer", effect: session_events.SessionOpened
    ) -> None:
        """Check a session that opens: 4. SingleWriter, 6. DecisionCovers, 7. GateCAS2."""
        session = effect.session_id
        self._check_session_is_open(session, "SessionOpened")
        self._state.count("session opened")
        self._check_mark(session, effect.high_water_mark)
        self._check_decision_covers(effect)
        writer = self.claims[session].server
        if writer != server.name:
            self._state.fail(
                "SingleWriter", f"{writer} and {server.name} both own session {session}"
            )

    def _check_decision_covers(self, effect: session_events.SessionOpened) -> None:
        """6. DecisionCovers: check that a session covers all rows acknowledged to applications."""
        last = self._last_at_open.get(effect.session_id, self._state.history.last)
        if effect.high_water_mark < last:
            self._state.fail(
                "DecisionCovers",
                f"session {effect.session_id} opens at mark {effect.high_water_mark}, but the log "
                f"ends at {self._state.history.last}",
            )
        if effect.high_water_mark > self._state.history.last:
            self._state.count("unacknowledged rows kept by a recovery")

    def _check_commit(self, effect: session_events.TransactionsCommitted) -> None:
        """Check a commit: 2. AckQuorum by the disks, 8. EngagedOnly by the owner's answers."""
        session, last = effect.session_id, effect.last
        self._check_session_is_open(session, "Committed")
        quorum = len(self.opened_sessions[session].states) // 2 + 1
        engaged = self.ever_engaged[session]
        holders = [name for name in self._synced_replicas.get(effect.chain, ()) if name in engaged]
        if len(holders) < quorum:
            self._state.fail(
                "AckQuorum",
                f"transaction {last} of session {session} is committed, but only {holders} have it",
            )
        voters = [
            name
            for name in engaged
            if self._answered_last.get((session, name), BEFORE_FIRST) >= last
        ]
        if len(voters) < quorum:
            self._state.fail(
                "EngagedOnly",
                f"transaction {last} of session {session} is committed, but of {list(engaged)} "
                f"only {voters} have acknowledged it",
            )


def _engaged_replicas(metadata: PartitionMetadata) -> list[str]:
    return [name for name, state in metadata.states.items() if state[1] == UNRESOLVED]
