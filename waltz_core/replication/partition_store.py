"""Opens the store sessions of one partition, one after the other.

This module keeps the state that outlives a session: the committed mark, the batches in doubt, and
the replicas that rejected appends. It also makes all requests to ZooKeeper, so that every
compare-and-set of the protocol is in one file.

Rules (docs/design/correctness.md 2.1 A, B, G, K and the rows of 2.4):
    1. Every write is conditional on the versions that were read, and has its own attempt number.
       Outcomes of other attempts are dropped.
    2. If the outcome of a write is unknown, the nodes are read again. A claim has succeeded only if
       the node contains the session and the nonce of this claim. A write of replica states is
       repeated, unchanged, until a read shows the outcome.
    3. A session ID is claimed once. After a failed claim, the next claim has another ID.
    4. A server never claims a session for a generation that is older than the generation in
       ZooKeeper. A server also claims no session if ZooKeeper has lost data. There are two signs of
       this loss: a partition that was opened has no replica states, or storages have promised a
       later session than the session in ZooKeeper.
    5. Batches in doubt stay in doubt until a later session is settled.
    6. After each failure there is a pause. The pauses become longer, up to a limit.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, assert_never

from waltz_core.cluster.znodes.model import EMPTY_METADATA, ArchivedMark, ReplicaState
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import (
    BEFORE_FIRST,
    Generation,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.archiving import ExpiryBounds
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.session_claim import (
    InDoubtIds,
    PartitionNodes,
    SessionClaim,
    claim_rejection,
    claimed_nodes,
    is_later_generation,
    nodes_with_states,
)
from waltz_core.replication.session_events import (
    ArchiveBacklog,
    Checkpoint,
    Effect,
    Event,
    ExpireArchive,
    MarkProofFailed,
    MetadataConflict,
    MetadataOutcomeUnknown,
    MetadataRead,
    MetadataWritten,
    OwnershipReleased,
    ProveMark,
    ReadMetadata,
    ReassignReplicas,
    ReleaseOwnership,
    ReplaceArchivedObject,
    ReplacementOutcome,
    ReplicaLost,
    ReplicaOpened,
    ReplicaResponded,
    SessionClosed,
    SubmitToSession,
    TakeOwnership,
    WriteMetadata,
)
from waltz_core.replication.session_recovery import history_origin_of
from waltz_core.replication.store_session import (
    EndCause,
    PartitionConstants,
    SessionEnd,
    StoreSession,
)

if TYPE_CHECKING:
    from random import Random

_NONCE_BYTES: Final = 16
_OWN_SESSIONS_MAX: Final = 16  # how many own sessions are remembered, to recognize them


class _PendingRequest(Enum):
    """The kind of the pending request to the coordinator."""

    NO_REQUEST = auto()
    READ = auto()  # before a claim
    CLAIM = auto()  # CAS#1
    CLAIM_CHECK = auto()  # reading: CAS#1 has an unknown outcome
    STATES_WRITE = auto()  # CAS#2 or CAS#3
    STATES_CHECK = auto()  # reading: CAS#2 or CAS#3 has an unknown outcome, or a conflict


class PartitionStore:
    """The store of one partition: a state machine (see `machine.py` for its contract).

    `storage_ids` are the registered IDs, 16 bytes each; the mapping may be updated at any time.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        cluster_key: bytes,
        partition_count: int,
        storage_ids: Mapping[ReplicaId, bytes],
        *,
        rng: "Random",
        limits: SessionLimits,
    ) -> None:
        assert len(cluster_key) == 16
        self._constants = PartitionConstants(
            partition_id, cluster_key, partition_count, storage_ids
        )
        self._rng = rng
        self._limits = limits
        self._outbox: list[Effect] = []
        self._now_ms = 0
        self._wake_at_ms: int | None = None
        # Ownership of the partition (A).
        self._generation: Generation | None = None
        self._replicas: tuple[ReplicaId, ...] = ()
        # The session, and the coordinator.
        self._session: StoreSession | None = None
        self._nodes: PartitionNodes | None = None  # the nodes in ZooKeeper, if known
        # The nodes if the write in progress succeeds.
        self._nodes_being_written: PartitionNodes | None = None
        self._pending_request = _PendingRequest.NO_REQUEST
        self._attempt = 0
        self._retry_at_ms: int | None = None  # when to send the next request to the coordinator
        # The state that outlives sessions.
        self._own_claims: list[tuple[SessionId, bytes]] = []
        self._follows_own_session = False
        self._high_water_mark = BEFORE_FIRST
        self._in_doubt: InDoubtIds | None = None
        self._failure_count = 0
        self._unavailable_count = 0
        self._lost_race_count = 0
        self._winning_claim: tuple[SessionId, bytes] | None = None
        self._no_quorum_since_ms: int | None = None
        self._excluded_until_ms: dict[ReplicaId, int] = {}
        self._exclusion_ms: dict[ReplicaId, int] = {}
        self._promised_sessions: dict[ReplicaId, SessionId] = {}
        self._final_rejection: str | None = None

    # -----------------------------------------------------------------------------------------
    # state between steps

    @property
    def open_session_id(self) -> SessionId | None:
        """The open session, if it accepts appends (earlier sessions are settled), or else None."""
        session = self._session
        if session is None or not session.is_open or not session.is_settled:
            return None
        return session.claim.session_id

    @property
    def high_water_mark(self) -> TransactionId:
        """The high-water mark: the last ID that this machine knows to be committed."""
        return self._high_water_mark

    @property
    def next_transaction_id(self) -> TransactionId:
        """The first ID of the next batch; only meaningful while a session is open."""
        session = self._session
        last = self._high_water_mark
        if session is not None and session.window is not None:
            last = session.window.last
        return TransactionId(last + 1)

    @property
    def readable_replicas(self) -> list[ReplicaId]:
        """The engaged replicas, sorted by their last synced ID, the highest first."""
        session = self._session
        return session.readable_replicas() if session is not None and session.is_open else []

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark of the partition that ZooKeeper is known to record."""
        return None if self._session is None else self._session.archived_mark

    @property
    def is_archiving(self) -> bool:
        """Whether an archive attempt is in progress; its work is lost if the session ends now."""
        return self._session is not None and self._session.is_archiving

    @property
    def archive_backlog(self) -> ArchiveBacklog | None:
        """The backlog of unarchived transactions in the open session; None without an archive."""
        session = self._session
        return session.archive_backlog if session is not None and session.is_settled else None

    def is_expiry_done(self, before: TransactionId, before_ms: int) -> bool:
        """Whether an `ExpireArchive` with these limits was carried out on the whole archive."""
        session = self._session
        return session is not None and session.is_expiry_done(ExpiryBounds(before, before_ms))

    def replacement_outcome(self, request: ReplaceArchivedObject) -> ReplacementOutcome | None:
        """Return the outcome of a replacement in this session; None if there is none yet."""
        return None if self._session is None else self._session.replacement_outcome(request)

    def replica_waits_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return the age of the oldest unanswered request to each replica, in ms."""
        return {} if self._session is None else self._session.replica_waits_ms(now_ms)

    def take_append_times(self) -> dict[ReplicaId, list[int]]:
        """Return and clear the append latencies of each engaged replica, in ms."""
        return {} if self._session is None else self._session.take_append_times()

    @property
    def in_flight_bytes(self) -> int:
        """The size of the records submitted to the open session and not committed, in bytes."""
        session = self._session
        if session is None or session.window is None:
            return 0
        return session.window.in_flight_bytes

    @property
    def session(self) -> StoreSession | None:
        """The present session, open or not, for checks of invariants."""
        return self._session

    @property
    def wake_at_ms(self) -> int | None:
        """When the driver must send the next `Wakeup`; None for never."""
        return self._wake_at_ms  # cached, because it is read more often than it changes

    def _wake_times(self) -> list[int]:
        times = [] if self._session is None else self._session.wake_times(self._now_ms)
        if self._retry_at_ms is not None:
            times.append(self._retry_at_ms)
        release_at_ms = self._release_at_ms()
        if release_at_ms is not None:
            times.append(release_at_ms)
        return times

    # -----------------------------------------------------------------------------------------
    # events

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Process one event and return its effects."""
        assert now_ms >= self._now_ms, "time went backwards"
        assert not self._outbox
        self._now_ms = now_ms
        match event:
            case ReplicaResponded() | ReplicaOpened() | ReplicaLost():
                self._on_replica_event(event)
            case SubmitToSession() | ProveMark() | ExpireArchive() | ReplaceArchivedObject():
                self._pass_to_session(event)
            case MetadataRead() | MetadataWritten() | MetadataConflict() | MetadataOutcomeUnknown():
                if (
                    event.attempt == self._attempt
                    and self._pending_request is not _PendingRequest.NO_REQUEST
                ):
                    self._on_coordinator_event(event)
            case TakeOwnership() | ReassignReplicas() | ReleaseOwnership() | Checkpoint():
                self._on_owner_command(event)
            case Wakeup():
                self._on_wakeup()
            case _:
                assert_never(event)
        self._process_session_state()
        self._wake_at_ms = min(self._wake_times(), default=None)
        effects = self._outbox[:]
        self._outbox.clear()
        return effects

    def _on_replica_event(self, event: ReplicaResponded | ReplicaOpened | ReplicaLost) -> None:
        session = self._session
        if session is None or event.session_id != session.claim.session_id:
            return
        match event:
            case ReplicaResponded():
                session.on_message_received(event.replica, event.message, self._now_ms)
            case ReplicaOpened():
                session.on_connection_opened(event.replica, self._now_ms)
            case ReplicaLost():
                session.on_replica_lost(event.replica, event.reason, self._now_ms)

    def _pass_to_session(
        self, event: SubmitToSession | ProveMark | ExpireArchive | ReplaceArchivedObject
    ) -> None:
        session = self._session
        is_open = session is not None and session.is_open
        match event:
            case SubmitToSession():
                if session is not None and self.open_session_id == event.session_id:
                    session.submit(event.batch, self._now_ms)
            case ProveMark():
                if session is not None and is_open:
                    session.prove_mark(event.token, self._now_ms)
                else:
                    self._outbox.append(MarkProofFailed(event.token))
            case ExpireArchive():
                if session is not None and is_open:
                    session.request_expiry(
                        ExpiryBounds(event.before, event.before_ms), self._now_ms
                    )
            case ReplaceArchivedObject():
                if session is not None and is_open:
                    session.request_replacement(event, self._now_ms)

    def _on_owner_command(
        self, event: TakeOwnership | ReassignReplicas | ReleaseOwnership | Checkpoint
    ) -> None:
        match event:
            case ReleaseOwnership():
                self._drop_ownership("disowned")
            case TakeOwnership():
                self._take_ownership(event.generation, event.replicas)
            case ReassignReplicas():
                if self._generation is not None and event.replicas != self._replicas:
                    self._take_ownership(self._generation, event.replicas)
            case Checkpoint():
                if self._session is not None and self._session.is_open:
                    self._end_session("checkpoint")
                    self._claim_session_after(0)

    def _take_ownership(self, generation: Generation, replicas: tuple[ReplicaId, ...]) -> None:
        """Own the partition and claim a session, unless generation and replicas are unchanged."""
        assert replicas, "a partition must have at least one replica"
        assert len(set(replicas)) == len(replicas)
        if (generation, replicas) == (self._generation, self._replicas):
            return
        self._end_session("the owner or the replicas of the partition have changed")
        self._generation, self._replicas = generation, replicas
        self._final_rejection = None
        self._lost_race_count = self._failure_count = 0
        # The time without a quorum starts with the first claim, because a partition may wait long
        # for its first claim.
        self._no_quorum_since_ms = None
        self._claim_session_after(0)

    def _drop_ownership(self, reason: str) -> None:
        self._end_session(reason)
        self._generation = None
        self._no_quorum_since_ms = None
        self._forget_request()

    def _release_partition(self, reason: str, *, should_hand_over: bool = False) -> None:
        """Release the partition until it is assigned again."""
        self._drop_ownership(reason)
        self._outbox.append(OwnershipReleased(reason, should_hand_over))

    def _on_wakeup(self) -> None:
        now_ms = self._now_ms
        release_at_ms = self._release_at_ms()
        if release_at_ms is not None and release_at_ms <= now_ms:
            limit_ms = self._limits.quorum_ms_max
            self._release_partition(
                f"there was no quorum of replicas for {limit_ms} ms", should_hand_over=True
            )
            return
        if self._session is not None:
            self._session.on_wakeup(now_ms)
        if self._retry_at_ms is not None and self._retry_at_ms <= now_ms:
            self._retry_at_ms = None
            self._send_next_request()

    def _release_at_ms(self) -> int | None:
        """Return when to release the partition, because another server may reach a quorum (row 18).

        Return None if a quorum is reached, or if there is no limit.
        """
        if self._no_quorum_since_ms is None or self._limits.quorum_ms_max == 0:
            return None
        return self._no_quorum_since_ms + self._limits.quorum_ms_max

    # -----------------------------------------------------------------------------------------
    # the session, after each step

    def _process_session_state(self) -> None:
        session = self._session
        if session is None:
            return
        if session.window is not None:
            self._high_water_mark = session.window.committed
        if session.ending is not None:
            self._on_session_ended(session, session.ending)
            return
        if self._pending_request is not _PendingRequest.NO_REQUEST or self._retry_at_ms is not None:
            return
        states, archived = session.states_to_write(self._now_ms), session.archived_mark_to_write
        if states is not None or archived is not None:
            self._write_states(session, states, archived)

    def _on_session_ended(self, session: StoreSession, ending: SessionEnd) -> None:
        replica = ending.replica
        if ending.promised is not None and replica is not None:
            self._promised_sessions[replica] = ending.promised
        if ending.has_rejected_append and replica is not None:
            exclusion_ms = self._exclusion_ms.get(replica, self._limits.exclusion_ms_min)
            self._excluded_until_ms[replica] = self._now_ms + exclusion_ms
            self._exclusion_ms[replica] = min(2 * exclusion_ms, self._limits.exclusion_ms_max)
        is_useful = session.is_useful(self._now_ms)
        self._end_session(ending.reason, ending.error_code)
        match ending.cause:
            case EndCause.STALLED:
                self._release_partition(ending.reason, should_hand_over=True)
            case EndCause.UNSAFE:
                self._final_rejection = ending.reason if ending.is_final else None
                self._on_claim_rejected(ending.reason)
            case EndCause.FENCED:
                self._nodes = None
                self._claim_session_after(self._count_failure())
            case EndCause.REPLICA_LOST | EndCause.REPLICA_RETURNED:
                if is_useful:
                    self._failure_count = 0
                self._claim_session_after(self._count_failure())

    def _end_session(self, reason: str, error_code: int = 0) -> None:
        """Close the session and keep the state that outlives it (rule 5)."""
        session = self._session
        if session is None:
            return
        session.end(SessionEnd(EndCause.REPLICA_LOST, reason))
        self._session = None
        # A write in progress may or may not succeed, so the nodes must be read again.
        if (
            self._pending_request is not _PendingRequest.NO_REQUEST
            or self._nodes_being_written is not None
        ):
            self._nodes = None
        self._forget_request()
        window = session.window
        if window is None:
            self._report("session.abandoned", session=session.claim.session_id, reason=reason)
            return
        if session.is_settled:
            # The owner knows the log only if the session is settled.
            self._follows_own_session = True
            in_doubt = InDoubtIds(session.claim.session_id, window.committed, window.last)
            self._in_doubt = in_doubt if window.last > window.committed else None
        assert session.opened_ms is not None
        if self._now_ms - session.opened_ms >= self._limits.stable_session_ms:
            self._failure_count = self._lost_race_count = 0
            self._exclusion_ms.clear()
        self._no_quorum_since_ms = self._now_ms
        self._outbox.append(SessionClosed(session.claim.session_id, reason, error_code))

    def _count_failure(self) -> int:
        """Count one more failure of a session, and return the pause after it in ms (rule 6)."""
        self._failure_count += 1
        if self._failure_count == 1:
            return self._rng.randint(0, self._limits.first_retry_ms_max)
        return self._backoff_ms(self._failure_count - 2)

    def _backoff_ms(self, doublings: int) -> int:
        limits = self._limits
        longest = min(limits.retry_ms_min << min(doublings, 16), limits.retry_ms_max)
        return self._rng.randint(longest // 2, longest)

    # -----------------------------------------------------------------------------------------
    # requests to the coordinator

    def _claim_session_after(self, wait_ms: int) -> None:
        assert self._session is None
        self._forget_request()
        if wait_ms == 0:
            self._send_next_request()
        else:
            self._retry_at_ms = self._now_ms + wait_ms

    def _forget_request(self) -> None:
        self._pending_request = _PendingRequest.NO_REQUEST
        self._nodes_being_written = None
        self._retry_at_ms = None

    def _send_next_request(self) -> None:
        """Send the next request to the coordinator, after the pause."""
        if self._generation is None:
            return
        if self._pending_request in (_PendingRequest.CLAIM_CHECK, _PendingRequest.STATES_CHECK):
            self._read_metadata(self._pending_request)
        elif self._session is None and self._nodes is not None:
            self._claim_session(self._nodes)
        elif self._session is None:
            self._read_metadata(_PendingRequest.READ)

    def _read_metadata(self, waiting: _PendingRequest) -> None:
        self._pending_request = waiting
        self._attempt += 1
        self._outbox.append(ReadMetadata(self._attempt))

    def _write_metadata(self, nodes: PartitionNodes, waiting: _PendingRequest) -> None:
        """Compare-and-set both nodes; `nodes` has the new values and the versions to replace."""
        assert nodes.marker is not None
        self._pending_request, self._nodes_being_written = waiting, nodes
        self._attempt += 1
        self._outbox.append(
            WriteMetadata(
                self._attempt,
                nodes.metadata,
                nodes.marker,
                nodes.metadata_version,
                nodes.marker_version,
            )
        )

    def _on_coordinator_event(
        self, event: MetadataRead | MetadataWritten | MetadataConflict | MetadataOutcomeUnknown
    ) -> None:
        waiting, self._pending_request = self._pending_request, _PendingRequest.NO_REQUEST
        if not isinstance(event, MetadataOutcomeUnknown):
            self._unavailable_count = 0
        match event:
            case MetadataRead():
                metadata = EMPTY_METADATA if event.metadata is None else event.metadata
                versions = event.metadata_version, event.marker_version
                nodes = PartitionNodes(metadata, versions[0], event.marker, versions[1])
                self._on_metadata_read(waiting, nodes)
            case MetadataWritten():
                assert self._nodes_being_written is not None
                nodes = self._nodes_being_written._replace(
                    metadata_version=event.metadata_version, marker_version=event.marker_version
                )
                self._on_metadata_written(nodes)
            case MetadataConflict():
                self._nodes = None
                is_states_write = waiting is _PendingRequest.STATES_WRITE
                self._read_metadata(
                    _PendingRequest.STATES_CHECK if is_states_write else _PendingRequest.CLAIM_CHECK
                )
            case MetadataOutcomeUnknown():
                self._on_coordinator_unavailable(waiting, event.reason)

    def _on_coordinator_unavailable(self, waiting: _PendingRequest, reason: str) -> None:
        """ZooKeeper is unavailable: repeat the request after a pause; an open session continues."""
        self._report("coordinator.unavailable", waiting=waiting.name, reason=reason)
        self._nodes = None
        if waiting is _PendingRequest.CLAIM:
            self._pending_request = _PendingRequest.CLAIM_CHECK
        elif waiting is _PendingRequest.STATES_WRITE:
            self._pending_request = _PendingRequest.STATES_CHECK
        elif waiting is not _PendingRequest.READ:
            self._pending_request = waiting
        self._attempt += 1  # a late answer is dropped
        self._retry_at_ms = self._now_ms + self._backoff_ms(self._unavailable_count)
        self._unavailable_count += 1
        if self._no_quorum_since_ms is not None:
            # A release would not help, because other servers probably do not reach ZooKeeper
            # either.
            self._no_quorum_since_ms = self._now_ms

    def _on_metadata_read(self, waiting: _PendingRequest, nodes: PartitionNodes) -> None:
        self._nodes = nodes
        written_nodes = self._nodes_being_written
        if waiting is _PendingRequest.READ:
            self._claim_session(nodes)
            return
        assert written_nodes is not None
        if (nodes.metadata, nodes.marker) == (written_nodes.metadata, written_nodes.marker):
            self._on_metadata_written(nodes)
        elif waiting is _PendingRequest.CLAIM_CHECK:
            self._nodes_being_written = None
            self._claim_session(nodes)
        elif nodes.versions == written_nodes.versions:
            self._write_metadata(written_nodes, _PendingRequest.STATES_WRITE)
        else:
            self._nodes_being_written = None
            assert self._session is not None
            self._session.end(
                SessionEnd(EndCause.FENCED, "another server has started a store session")
            )

    def _on_metadata_written(self, nodes: PartitionNodes) -> None:
        """A compare-and-set is known to have succeeded."""
        self._nodes, self._nodes_being_written = nodes, None
        if self._session is None:
            self._start_session(nodes)
            return
        if self._session.window is None:
            self._no_quorum_since_ms = None
        self._session.on_metadata_written(nodes.metadata.states, nodes.archived_mark, self._now_ms)

    # -----------------------------------------------------------------------------------------
    # CAS#1: the claim (A, B)

    def _claim_session(self, nodes: PartitionNodes) -> None:
        assert self._generation is not None
        assert self._session is None
        if self._no_quorum_since_ms is None:
            self._no_quorum_since_ms = self._now_ms
        if is_later_generation(nodes.metadata.generation, self._generation):
            self._release_partition(
                f"the generation of the partition is {nodes.metadata.generation}, but this "
                f"server owns it in generation {self._generation}"
            )
            return
        if self._yield_to_other_server(nodes):
            return
        reason = self._final_rejection or claim_rejection(
            nodes, self._replicas, self._promised_sessions
        )
        if reason is not None:
            self._on_claim_rejected(reason)
            return
        nonce = self._rng.randbytes(_NONCE_BYTES)
        new_nodes = claimed_nodes(nodes, self._generation, self._replicas, nonce)
        # If this machine did not make the last claim, another owner may have written the log since.
        self._follows_own_session = (
            self._follows_own_session and nodes.last_claim in self._own_claims
        )
        assert new_nodes.last_claim is not None
        self._own_claims = [*self._own_claims, new_nodes.last_claim][-_OWN_SESSIONS_MAX:]
        self._write_metadata(new_nodes, _PendingRequest.CLAIM)

    def _yield_to_other_server(self, nodes: PartitionNodes) -> bool:
        """Count the sessions that other servers have claimed since this server's last session.

        If there is more than one such session, pause or release the partition, and return True (row
        17).
        """
        if not self._own_claims or nodes.last_claim in self._own_claims:
            return False
        if self._winning_claim == nodes.last_claim:
            return False
        self._winning_claim = nodes.last_claim
        self._lost_race_count += 1
        if self._lost_race_count > self._limits.lost_races_max:
            self._release_partition(
                f"another server has started a store session during each of the "
                f"{self._lost_race_count} attempts of this server"
            )
            return True
        if self._lost_race_count > 1:
            self._nodes = None
            self._retry_at_ms = self._now_ms + self._count_failure()
            return True
        return False

    def _on_claim_rejected(self, reason: str) -> None:
        """Report a rejected claim, and try again later: an operator must act.

        The partition is not released, because other servers would find the same condition.
        """
        self._report("partition.open_failed", reason=reason)
        self._nodes = None
        self._no_quorum_since_ms = self._now_ms
        self._claim_session_after(self._limits.rejected_retry_ms)

    def _start_session(self, nodes: PartitionNodes) -> None:
        assert self._generation is not None
        assert nodes.marker is not None
        session_id = nodes.metadata.session_id
        later_promises = {
            name: promised
            for name, promised in self._promised_sessions.items()
            if promised > session_id
        }
        claim = SessionClaim(
            session_id=session_id,
            generation=self._generation,
            nonce=nodes.marker.nonce,
            origin=history_origin_of(nodes.metadata, nodes.marker),
            states=nodes.metadata.states,
            assigned=self._replicas,
            follows_own_session=self._follows_own_session,
            highest_committed=self._high_water_mark,
            in_doubt=self._in_doubt,
            excluded_until_ms=dict(self._excluded_until_ms),
            later_promises=later_promises,
            archived_mark=nodes.archived_mark,
        )
        self._report("session.claimed", session=session_id, origin=claim.origin.name)
        self._session = StoreSession(
            claim, self._constants, outbox=self._outbox, rng=self._rng, limits=self._limits
        )
        self._session.start(self._now_ms)

    # -----------------------------------------------------------------------------------------
    # CAS#2 and CAS#3: the states (G, I)

    def _write_states(
        self,
        session: StoreSession,
        states: dict[ReplicaId, ReplicaState] | None,
        archived: ArchivedMark | None,
    ) -> None:
        """Write new states, a new archived mark, or both; None leaves the present value."""
        nodes = self._nodes
        assert nodes is not None, "the versions are known from the claim or the last write"
        assert nodes.marker is not None
        assert nodes.metadata.session_id == session.claim.session_id
        session.pending_states = session.states if states is None else states
        written = nodes_with_states(nodes, session.pending_states, archived or nodes.archived_mark)
        self._write_metadata(written, _PendingRequest.STATES_WRITE)

    def _report(self, name: str, **fields: object) -> None:
        self._outbox.append(Report(name, tuple(fields.items())))
