"""One store session of one partition: fence, decide, repair, open, append, commit.

`partition_store` handles the sequence of sessions and the requests to ZooKeeper.

Rules (docs/design/correctness.md 2.1, letters C to K):
    1. Every replica of the last and of the new assignment is fenced (C).
    2. Nothing on a replica is changed before the high-water mark is decided (E).
    3. The session opens only when ZooKeeper is known to have its states (`on_metadata_written`; G,
       H).
    4. The acknowledgements of a replica count only while ZooKeeper records it as engaged. Only
       engaged replicas receive uncommitted batches (I).
    5. The committed mark is the highest ID that a quorum of engaged replicas has synced (J).
    6. The session ends when it loses an engaged replica, or a replica that ZooKeeper may have
       recorded as engaged (K). The loss of any other replica does not end the session.
    7. A slow replica blocks nothing, and has no time limit for joining. It gets batches from
       memory, and older batches from another replica's log. But until earlier sessions are settled,
       every replica must answer within `answer_ms_max`.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from waltz_core.cluster.znodes.model import UNRESOLVED, ArchivedMark, ReplicaState
from waltz_core.errors import (
    BeforeLogStart,
    Damaged,
    PermissionsNotLoaded,
    RemoteProtocolError,
    ReplicaSuspect,
    SessionFenced,
    UnknownPartition,
    WaltzError,
    error_from_code,
)
from waltz_core.machine import Report
from waltz_core.records.record import PartitionId, ReplicaId, SessionId, TransactionId
from waltz_core.replication.archiving import (
    ARCHIVE_CORRELATION_ID,
    ARCHIVE_NOTICES,
    ExpiryBounds,
    SessionArchiver,
)
from waltz_core.replication.in_doubt_queries import IN_DOUBT_CORRELATION_ID, InDoubtQueries
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.mark_proofs import MarkProofs
from waltz_core.replication.quorum import quorum_mark, quorum_size
from waltz_core.replication.repair_runner import RepairRunner
from waltz_core.replication.replica_repair import ReplicaRepair
from waltz_core.replication.replica_session import (
    MARK_SET_STAGES,
    ReplicaSession,
    ReplicaStage,
    SessionRequest,
)
from waltz_core.replication.session_claim import SessionClaim
from waltz_core.replication.session_events import (
    ArchiveBacklog,
    Batch,
    Effect,
    ReplaceArchivedObject,
    ReplacementOutcome,
    SessionOpened,
    TransactionsCommitted,
)
from waltz_core.replication.session_recovery import NO_STORAGE_ID, Recovery
from waltz_core.replication.window import SessionWindow
from waltz_core.wire import messages
from waltz_core.wire.messages import StorageMessage

if TYPE_CHECKING:
    from random import Random

# `RepairRunner` chooses the correlation IDs of its requests. The ID of a heartbeat is the token of
# the proof. The in-doubt queries and the archive have constant IDs.

# These are constants because each step compares with them many times, and to look up a member of an
# enum is slow.
_ABSENT: Final = ReplicaStage.ABSENT
_ENGAGED: Final = ReplicaStage.ENGAGED
_READY: Final = ReplicaStage.READY
_GET_SYNCED_LAST: Final = attrgetter("synced_last")
_PREPARED_STAGES: Final = (ReplicaStage.REPAIRING, ReplicaStage.READY, ReplicaStage.ENGAGED)
_CATCHING_UP_STAGES: Final = (ReplicaStage.PREPARING, ReplicaStage.REPAIRING)


class PartitionConstants(NamedTuple):
    """The constants of a partition. Only `storage_ids` changes; it is read at each use."""

    partition_id: PartitionId
    cluster_key: bytes
    partition_count: int
    storage_ids: Mapping[ReplicaId, bytes]


class EndCause(Enum):
    """Why a session ended; the pause before the next session depends on it."""

    REPLICA_LOST = auto()  # an engaged replica was lost, or rejected a request
    FENCED = auto()  # a storage has promised a later session
    REPLICA_RETURNED = auto()  # a replica has returned that cannot join this session again
    STALLED = auto()  # no quorum within the timeout
    UNSAFE = auto()  # to continue would be unsafe


class SessionEnd(NamedTuple):
    """Why a session ended, with the replica at fault and the session that it has promised, if any.

    `is_final`: the owner must not claim another session, even if the replicas of that session do
    not report this problem.
    """

    cause: EndCause
    reason: str
    replica: ReplicaId | None = None
    has_rejected_append: bool = False
    promised: SessionId | None = None
    is_final: bool = False
    error_code: int = 0  # the code (`errors.py`) of the replica's rejection; 0 without one


class StoreSession:
    """One store session, by the rules above. It appends effects to the outbox, in order."""

    def __init__(
        self,
        claim: SessionClaim,
        constants: PartitionConstants,
        *,
        outbox: list[Effect],
        rng: "Random",
        limits: SessionLimits,
    ) -> None:
        self.claim = claim
        self.recovery = Recovery(claim.origin, claim.states, claim.archived_mark)
        self.quorum = quorum_size(len(claim.assigned))
        self.window: SessionWindow | None = None  # None until the session opens
        self.opened_ms: int | None = None
        self.is_settled = False
        self.ending: SessionEnd | None = None
        # The states that ZooKeeper is known to have, and the states in a write in progress.
        self.states: dict[ReplicaId, ReplicaState] = dict(claim.states)
        self.pending_states: dict[ReplicaId, ReplicaState] | None = None
        former_replicas = [replica for replica in claim.states if replica not in claim.assigned]
        self.replicas = {
            replica: ReplicaSession(
                replica, claim.session_id, constants.partition_id, outbox=outbox, limits=limits
            )
            for replica in (*claim.assigned, *former_replicas)
        }
        self.repairs = RepairRunner(
            self.replicas, self.recovery, claim.archived_mark, outbox=outbox, limits=limits
        )
        self._constants = constants
        self._outbox = outbox
        self._rng = rng
        self._limits = limits
        self._engaged_state = ReplicaState(claim.session_id, UNRESOLVED)
        self._quorum_since_ms: int | None = None
        self._progress_ms = 0
        self._is_waiting_reported = False
        self._proofs = MarkProofs(claim.assigned, outbox=outbox, limits=limits)
        self._in_doubt_queries: InDoubtQueries | None = None
        self._archiver = SessionArchiver(claim, outbox=outbox, limits=limits)
        self._replicas_with_rival: list[ReplicaId] = []

    # -----------------------------------------------------------------------------------------
    # state

    @property
    def is_open(self) -> bool:
        """Whether ZooKeeper is known to have the session's states, until the session ends."""
        return self.window is not None and self.ending is None

    def is_useful(self, now_ms: int) -> bool:
        """Whether the session has accepted appends for `useful_session_ms` (`limits.py`)."""
        opened_ms = self.opened_ms if self.is_settled else None
        return opened_ms is not None and now_ms - opened_ms >= self._limits.useful_session_ms

    @property
    def engaged(self) -> list[ReplicaSession]:
        """The engaged replicas, in the order of the assignment."""
        return [peer for peer in self.replicas.values() if peer.stage is _ENGAGED]

    def readable_replicas(self) -> list[ReplicaId]:
        """Return the engaged replicas, sorted by their last synced ID, the highest first."""
        # The sort is stable: equal replicas stay in the order of the assignment.
        engaged = sorted(self.engaged, key=_GET_SYNCED_LAST, reverse=True)
        return [peer.replica for peer in engaged]

    def replica_waits_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return the age of each replica's oldest unanswered request, in ms."""
        return {
            peer.replica: now_ms - peer.oldest_request_sent_ms
            for peer in self.replicas.values()
            if peer.oldest_request_sent_ms is not None
        }

    def take_append_times(self) -> dict[ReplicaId, list[int]]:
        """Return and clear the append latencies of each engaged replica, in ms."""
        times: dict[ReplicaId, list[int]] = {}
        for peer in self.replicas.values():
            if peer.append_latencies_ms:
                times[peer.replica] = list(peer.append_latencies_ms)
                peer.append_latencies_ms.clear()
        return times

    def wake_times(self, now_ms: int) -> list[int]:
        """Return the times of the next timeouts and retries, including past ones."""
        times = self.repairs.wake_times(now_ms)
        for peer in self.replicas.values():
            if peer.stage is _ABSENT:
                times.append(peer.redial_at_ms)
            elif (
                not self._has_no_timeout(peer)
                and (oldest_request_sent_ms := peer.oldest_request_sent_ms) is not None
            ):
                times.append(oldest_request_sent_ms + self._limits.answer_ms_max)
            if peer.slow_report_at_ms is not None:
                times.append(peer.slow_report_at_ms)
        times += self._proofs.deadlines()
        if self._archiver.has_archive and self.is_settled:
            archive_at_ms = self._archiver.wake_at_ms
            if archive_at_ms is not None:
                times.append(archive_at_ms)
        # These times affect only `states_to_write`, which every step calls. So past times are
        # omitted.
        opening_times = [*self.claim.excluded_until_ms.values()]
        if self._quorum_since_ms is not None and self.window is None:
            opening_times.append(self._quorum_since_ms + self._limits.opening_grace_ms)
        times += [at_ms for at_ms in opening_times if at_ms > now_ms]
        stalled_at_ms = self._stalled_at_ms()
        if stalled_at_ms is not None:
            times.append(stalled_at_ms)
        return times

    # -----------------------------------------------------------------------------------------
    # events

    def start(self, now_ms: int) -> None:
        """Dial every replica of both assignments (rule 1)."""
        for peer in self.replicas.values():
            peer.dial()
        self._advance(now_ms)

    def on_connection_opened(self, replica: ReplicaId, now_ms: int) -> None:
        """A connection is open: fence the replica."""
        peer = self.replicas.get(replica)
        if peer is None or peer.stage is not ReplicaStage.DIALING:
            return
        if peer.cannot_rejoin:
            self._on_excluded_replica_returned(peer, now_ms)
            return
        peer.stage = ReplicaStage.PREPARING
        constants = self._constants
        storage_id = constants.storage_ids.get(replica, NO_STORAGE_ID)
        identity = (storage_id, constants.cluster_key, constants.partition_count)
        peer.send_request(messages.Prepare, self.claim.nonce, *identity, now_ms=now_ms)

    def on_replica_lost(self, replica: ReplicaId, reason: str, now_ms: int) -> None:
        """A connection was lost, or could not be opened."""
        peer = self.replicas.get(replica)
        if peer is not None and peer.stage is not ReplicaStage.ABSENT:
            peer.is_broken = True
            self._on_connection_lost(peer, reason, now_ms)
            self._advance(now_ms)

    def on_message_received(self, replica: ReplicaId, answer: StorageMessage, now_ms: int) -> None:
        """A storage has sent an answer, or has reported damage."""
        peer = self.replicas.get(replica)
        if peer is None or not peer.is_connected:
            return
        try:
            if isinstance(answer, messages.DamageFound):
                self.repairs.on_damage_found(peer, answer)
            elif isinstance(answer, ARCHIVE_NOTICES):
                self._archiver.on_attempt_notified(peer, answer, now_ms)
            else:
                self._on_request_answered(peer, peer.take_request(answer), answer, now_ms)
        except (RemoteProtocolError, Damaged) as error:
            self._reject_replica(peer, str(error), now_ms)
        self._advance(now_ms)

    def on_wakeup(self, now_ms: int) -> None:
        """Handle timeouts and redials, and report slow appends."""
        self.repairs.expire_slow_sources(now_ms)
        for peer in list(self.replicas.values()):
            peer.report_slow_appends(now_ms)
            oldest_request_sent_ms = peer.oldest_request_sent_ms
            if peer.stage is ReplicaStage.ABSENT and peer.redial_at_ms <= now_ms:
                peer.dial()
            elif self._has_no_timeout(peer) or oldest_request_sent_ms is None:
                continue
            elif oldest_request_sent_ms + self._limits.answer_ms_max <= now_ms:
                self._on_connection_lost(peer, "no answer", now_ms)
        self._proofs.fail_overdue(now_ms)
        stalled_at_ms = self._stalled_at_ms()
        if stalled_at_ms is not None and stalled_at_ms <= now_ms:
            self.end(SessionEnd(EndCause.STALLED, "no quorum of replicas acknowledges appends"))
        self._advance(now_ms)

    def submit(self, batch: Batch, now_ms: int) -> None:
        """Append a batch: send it to all engaged replicas (J)."""
        assert self.window is not None
        assert self.is_settled, "earlier sessions must be settled first"
        self.window.add(batch, self.claim.session_id, now_ms)
        if self._archiver.has_archive:
            self._archiver.on_batch_submitted(batch)
        for peer in self.replicas.values():
            if peer.stage is _ENGAGED:
                self._send_from_window(peer, now_ms)

    def prove_mark(self, token: int, now_ms: int) -> None:
        """Request a confirmation by a quorum that there is no later session."""
        assert self.window is not None
        self._proofs.begin(token, self.window.committed, self.engaged, now_ms)

    def request_expiry(self, bounds: ExpiryBounds, now_ms: int) -> None:
        """Schedule an expiry of the archive that a client requests."""
        self._archiver.request_expiry(bounds, now_ms)
        self._advance(now_ms)

    def is_expiry_done(self, bounds: ExpiryBounds) -> bool:
        """Whether an expiry with these limits was carried out on the whole archive."""
        return self._archiver.is_expiry_done(bounds)

    def request_replacement(self, request: ReplaceArchivedObject, now_ms: int) -> None:
        """Schedule the replacement of an archived object that a client requests."""
        self._archiver.request_replacement(request)
        self._advance(now_ms)

    def replacement_outcome(self, request: ReplaceArchivedObject) -> ReplacementOutcome | None:
        """Return the outcome of a replacement request; None if there is none yet."""
        return self._archiver.replacement_outcome(request)

    def on_metadata_written(
        self, states: Mapping[ReplicaId, ReplicaState], archived: ArchivedMark | None, now_ms: int
    ) -> None:
        """ZooKeeper is known to have these states and this archived mark (rule 3)."""
        assert self.ending is None
        goal = self.repairs.goal
        assert goal is not None
        assert goal.chain is not None
        self.states, self.pending_states = dict(states), None
        self._archiver.on_metadata_written(archived, now_ms)
        self.repairs.archived, self.repairs.is_open = archived, True
        for replica, peer in self.replicas.items():
            if states.get(replica) != self._engaged_state or peer.stage is ReplicaStage.ENGAGED:
                continue
            assert peer.stage is ReplicaStage.READY, "rule 6: the replica was lost"
            peer.stage = ReplicaStage.ENGAGED
            peer.send_request(messages.Engage, goal.mark, now_ms=now_ms)
        if self.window is None:
            self.window = SessionWindow(goal.mark, goal.chain)
            self.opened_ms = self._progress_ms = now_ms
            self._open_session(now_ms)
        self._advance(now_ms)

    def end(self, ending: SessionEnd) -> None:
        """End the session: close all connections, answer all proofs."""
        if self.ending is not None:
            return
        self.ending = ending
        for peer in self.replicas.values():
            peer.close()
        self._proofs.fail_all()

    # -----------------------------------------------------------------------------------------
    # states in ZooKeeper

    def states_to_write(self, now_ms: int) -> dict[ReplicaId, ReplicaState] | None:
        """Return the states to write next (G, I); None if there is nothing to write."""
        if self.ending is not None or self.pending_states is not None or self.repairs.goal is None:
            return None
        if self.window is not None:
            return self._joined_states(self.window, now_ms)
        ready = self._replicas_with_mark(now_ms)
        if not self._has_quorum(ready):
            ready = self._replicas_with_mark(None)
        if not self._has_quorum(ready):
            self._quorum_since_ms = None
            return None
        if self._quorum_since_ms is None:
            self._quorum_since_ms = now_ms
        is_grace_over = now_ms >= self._quorum_since_ms + self._limits.opening_grace_ms
        if not is_grace_over and any(
            peer.stage in _CATCHING_UP_STAGES for peer in self.replicas.values()
        ):
            return None
        claim = self.claim
        return self.recovery.opening_states(claim.session_id, claim.assigned, ready)

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark that ZooKeeper is known to have."""
        return self._archiver.recorded_mark

    @property
    def is_archiving(self) -> bool:
        """Whether an archive attempt is in progress."""
        return self._archiver.is_busy

    @property
    def archive_backlog(self) -> ArchiveBacklog | None:
        """The committed transactions that are not archived; None if no archive is used."""
        return self._archiver.backlog if self._archiver.has_archive else None

    @property
    def archived_mark_to_write(self) -> ArchivedMark | None:
        """The archived mark to write next; None if there is nothing to write."""
        is_writing = self.pending_states is not None
        return None if is_writing or self.ending is not None else self._archiver.mark_to_write

    def _replicas_with_mark(self, now_ms: int | None) -> list[ReplicaId]:
        """Return the replicas with the mark; with `now_ms`, omit those excluded at this time."""
        excluded_until_ms = self.claim.excluded_until_ms
        return [
            peer.replica
            for peer in self.replicas.values()
            if peer.stage in MARK_SET_STAGES
            and (now_ms is None or excluded_until_ms.get(peer.replica, now_ms) <= now_ms)
        ]

    def _has_quorum(self, ready: Sequence[ReplicaId]) -> bool:
        new_count = sum(replica in self.claim.assigned for replica in ready)
        old_count = sum(replica in self.recovery.states for replica in ready)
        return new_count >= self.quorum and old_count >= self.recovery.previous_quorum_size

    def _joined_states(
        self, window: SessionWindow, now_ms: int
    ) -> dict[ReplicaId, ReplicaState] | None:
        """Return the states that engage late replicas; None if no replica can join (I).

        A late replica joins as soon as all batches that it lacks are in memory.
        """
        ready = [peer for peer in self.replicas.values() if peer.stage is _READY]
        if not ready:
            return None
        lowest_next_id = min(window.first, window.committed + 1)
        marked = self._replicas_with_mark(now_ms)
        joining = [
            peer.replica
            for peer in ready
            if peer.replica in marked and peer.next_id >= lowest_next_id
        ]
        if not joining:
            return None
        return {**self.states, **dict.fromkeys(joining, self._engaged_state)}

    # -----------------------------------------------------------------------------------------
    # loss and return of replicas

    def _on_connection_lost(self, peer: ReplicaSession, reason: str, now_ms: int) -> None:
        """A connection was lost, or has timed out."""
        if peer.is_connected:
            self._report("replica.disconnected", replica=peer.replica, reason=reason)
        self._drop_replica(peer, reason, now_ms)

    def _reject_replica(
        self, peer: ReplicaSession, reason: str, now_ms: int, *, error_code: int = 0
    ) -> None:
        """Reject a replica: drop it, and leave it out for `rejected_retry_ms`."""
        self._report("replica.rejected", replica=peer.replica, reason=reason)
        wait_ms = self._limits.rejected_retry_ms
        if error_code in (UnknownPartition.code, PermissionsNotLoaded.code):
            # The storage has just started, and is still reading from ZooKeeper.
            wait_ms = self._limits.redial_ms_max
        self._drop_replica(peer, reason, now_ms, wait_ms=wait_ms, error_code=error_code)

    def _drop_replica(
        self,
        peer: ReplicaSession,
        reason: str,
        now_ms: int,
        *,
        wait_ms: int = 0,
        error_code: int = 0,
    ) -> None:
        """Drop a replica; end the session if the replica was, or may be, engaged (rule 6).

        `wait_ms` is the pause after a rejection; 0 without one.
        """
        is_counted = self._may_be_engaged(peer)
        self.repairs.on_connection_lost(peer)
        peer.close()
        peer.on_connection_lost(now_ms, self._rng, wait_ms=wait_ms)
        if is_counted:
            reason = f"replica {peer.replica}: {reason}"
            ending = SessionEnd(
                EndCause.REPLICA_LOST, reason, peer.replica, has_rejected_append=wait_ms > 0
            )
            self.end(ending._replace(error_code=error_code))

    def _may_be_engaged(self, peer: ReplicaSession) -> bool:
        """Whether ZooKeeper records a replica as engaged, or may do so."""
        if peer.stage is ReplicaStage.ENGAGED:
            return True
        return (
            self.pending_states is not None
            and self.pending_states.get(peer.replica) == self._engaged_state
        )

    def _has_no_timeout(self, peer: ReplicaSession) -> bool:
        """Whether a replica may take any time to answer.

        Until the session is settled, every replica has a timeout. Later, a replica that has
        answered PREPARE has no timeout, because each return of a dropped replica ends the session.
        """
        return self.is_settled and peer.stage in _PREPARED_STAGES

    def _on_excluded_replica_returned(self, peer: ReplicaSession, now_ms: int) -> None:
        """A replica that cannot rejoin (`replica_session.py`, rule 3) has connected again.

        Only a new session can use this replica. The current session ends as soon as it is old
        enough; until then, the replica waits.
        """
        peer.close()
        earliest_ms = now_ms
        if self.opened_ms is not None:
            earliest_ms = self.opened_ms + self._limits.rejoin_session_age_ms_min
        if earliest_ms <= now_ms:
            self.end(
                SessionEnd(
                    EndCause.REPLICA_RETURNED,
                    f"replica {peer.replica} has connected again, and joins the next session",
                    peer.replica,
                )
            )
            return
        peer.on_connection_lost(now_ms, self._rng, wait_ms=2 * (earliest_ms - now_ms))

    # -----------------------------------------------------------------------------------------
    # answers

    def _on_request_answered(
        self, peer: ReplicaSession, request: SessionRequest, answer: StorageMessage, now_ms: int
    ) -> None:
        match answer:
            case messages.Appended() if peer.stage in MARK_SET_STAGES:
                assert isinstance(request.message, messages.AppendRaw)
                peer.on_append_synced(request.message, answer)
                if peer.stage is _ENGAGED:
                    peer.record_latency(request.message, now_ms - request.sent_ms, now_ms)
                    self._commit(now_ms)
            case messages.Nack():
                self._on_request_nacked(peer, request, answer, now_ms)
            case messages.Prepared():
                self._on_replica_prepared(peer, answer, now_ms)
            case messages.HeartbeatResponse():
                self._proofs.on_confirmed(request.correlation_id, peer.replica)
            case messages.LineageResponse() if request.correlation_id == IN_DOUBT_CORRELATION_ID:
                assert self._in_doubt_queries is not None
                self._in_doubt_queries.on_lineage_received(peer, answer, now_ms)
                self._settle_if_done()
            case _ if request.correlation_id == ARCHIVE_CORRELATION_ID:
                self._on_archive_answered(peer, request.message, answer, now_ms)
            case messages.ReplicaEnd() if isinstance(request.message, messages.Engage):
                pass
            case _:
                self.repairs.on_step_answered(peer, request.correlation_id, answer, now_ms)

    def _on_archive_answered(
        self, peer: ReplicaSession, message: StorageMessage, answer: StorageMessage, now_ms: int
    ) -> None:
        if isinstance(answer, messages.LineageResponse):
            self._archiver.on_lineage_received(peer, message, answer, now_ms)
            self._on_archived_mark_checked()

    def _on_archive_rejected(
        self,
        peer: ReplicaSession,
        request: SessionRequest,
        error: WaltzError,
        reason: str,
        now_ms: int,
    ) -> bool:
        """Process the rejection of an archive request; most rejections do not end the session.

        Return False if the request was no archive request, or if the replica must be rejected.
        """
        if request.correlation_id != ARCHIVE_CORRELATION_ID:
            return False
        if self._archiver.is_checked or isinstance(request.message, messages.SetArchived):
            self._archiver.on_request_rejected(peer, request.message, reason, now_ms)
        elif isinstance(error, BeforeLogStart):
            self._archiver.on_mark_before_log_start(now_ms)
            self._on_archived_mark_checked()
        else:
            return False
        return True

    def _on_archived_mark_checked(self) -> None:
        """Settle or end the session, after a log was compared with the recorded archived mark."""
        if self._archiver.contradiction is not None:
            self.end(SessionEnd(EndCause.UNSAFE, self._archiver.contradiction))
        else:
            self._settle_if_done()

    def _on_request_nacked(
        self, peer: ReplicaSession, request: SessionRequest, nack: messages.Nack, now_ms: int
    ) -> None:
        error = error_from_code(nack.error_code, nack.message)
        reason = f"{type(error).__name__}: {nack.message}"
        promised = SessionId(nack.promised)
        is_promise_error = isinstance(error, SessionFenced)
        is_later_session = is_promise_error and promised > self.claim.session_id
        is_same_session = is_promise_error and promised == self.claim.session_id
        if is_later_session and self.claim.later_promises.get(peer.replica) != promised:
            self.end(SessionEnd(EndCause.FENCED, reason, peer.replica, promised=promised))
        elif isinstance(error, ReplicaSuspect) and isinstance(request.message, messages.Prepare):
            # The storage has lost the nonce of its promise, but will accept the next session.
            self.end(SessionEnd(EndCause.FENCED, reason, peer.replica))
        elif is_same_session and isinstance(request.message, messages.Prepare):
            self._on_rival_found(peer, reason, now_ms)
        elif self._on_archive_rejected(peer, request, error, reason, now_ms):
            pass
        elif self._continue_without_batches(request, error, now_ms):
            self._settle_if_done()
        elif self.repairs.on_overwrite_rejected(request.correlation_id, peer, reason, now_ms):
            self._report("replica.repair_rejected", replica=peer.replica, reason=reason)
        elif not self.repairs.on_source_rejected(
            request.correlation_id, peer, error, reason, now_ms
        ):
            self._reject_replica(peer, reason, now_ms, error_code=nack.error_code)

    def _continue_without_batches(
        self, request: SessionRequest, error: WaltzError, now_ms: int
    ) -> bool:
        """Continue the in-doubt queries without a replica that cannot return the batches in doubt.

        Return False if the error is not of this kind.
        """
        if request.correlation_id != IN_DOUBT_CORRELATION_ID or self._in_doubt_queries is None:
            return False
        return self._in_doubt_queries.on_batches_unreadable(error, now_ms)

    def _on_rival_found(self, peer: ReplicaSession, reason: str, now_ms: int) -> None:
        """Another owner has claimed this session's ID: ZooKeeper has issued it twice (row 15)."""
        self._replicas_with_rival.append(peer.replica)
        self._reject_replica(peer, reason, now_ms)
        rivals = [name for name in self.claim.assigned if name in self._replicas_with_rival]
        if self.window is None and len(rivals) > len(self.claim.assigned) - self.quorum:
            reason = (
                f"replicas {', '.join(rivals)} have promised store session "
                f"{self.claim.session_id} to another server, but ZooKeeper had no such "
                "session: ZooKeeper's data was rolled back"
            )
            self.end(SessionEnd(EndCause.UNSAFE, reason, is_final=True))

    def _on_replica_prepared(
        self, peer: ReplicaSession, answer: messages.Prepared, now_ms: int
    ) -> None:
        registered_id = self._constants.storage_ids.get(peer.replica, NO_STORAGE_ID)
        if registered_id not in (NO_STORAGE_ID, bytes(answer.storage_id)):
            found, expected = bytes(answer.storage_id).hex(), registered_id.hex()
            problem = f"expected the storage with ID {expected} at this address, found {found}"
            self._reject_replica(peer, problem, now_ms)
            return
        reason = self.recovery.exclusion_reason(answer)
        if reason is not None:
            if self.window is None and self.recovery.is_needed(peer.replica):
                self.end(
                    SessionEnd(EndCause.UNSAFE, f"replica {peer.replica}: {reason}", peer.replica)
                )
            else:
                self._reject_replica(peer, reason, now_ms)
            return
        self.recovery.on_prepared(peer.replica, answer, registered_id)
        if peer.replica in self.recovery.unknown_replicas:
            self._report("replica.untrusted", replica=peer.replica, last=answer.synced_max)
        peer.stage = ReplicaStage.REPAIRING
        peer.repair = ReplicaRepair(answer)
        peer.supports_archiving = answer.start != messages.NO_ARCHIVING

    # -----------------------------------------------------------------------------------------
    # recovery, until the session opens

    def _advance(self, now_ms: int) -> None:
        """Take all steps that have become possible."""
        if self.ending is not None or not self._decide_mark():
            return
        self.repairs.advance(now_ms)
        if self.repairs.contradiction is not None and self.window is None:
            self.end(SessionEnd(EndCause.UNSAFE, self.repairs.contradiction, is_final=True))
        for replica, reason in self.repairs.take_failed_replicas():
            self._reject_replica(self.replicas[replica], reason, now_ms)
        if self.window is not None and self.ending is None:
            for peer in self.replicas.values():
                if peer.stage in MARK_SET_STAGES:
                    self._send_from_window(peer, now_ms)
        if self._archiver.has_archive and self.is_settled and self.ending is None:
            assert self.window is not None
            replicas = self.replicas.values()
            self._archiver.advance(self.engaged, replicas, self.window.committed, now_ms)

    def _decide_mark(self) -> bool:
        if self.repairs.goal is not None:
            return True
        mark = self.recovery.decide_mark()
        if mark is None:
            if self.recovery.is_complete and not self._is_waiting_reported:
                self._is_waiting_reported = True
                self._report("recovery.waiting", untrusted=tuple(self.recovery.unknown_replicas))
            return False
        if mark < self.claim.highest_committed:
            reason = (
                f"the log of the replicas ends at transaction {mark}, but "
                f"transaction {self.claim.highest_committed} was committed"
            )
            self.end(SessionEnd(EndCause.UNSAFE, reason))
            return False
        if mark < self._archiver.archived_last:
            reason = (
                f"the log of the replicas ends at transaction {mark}, but transaction "
                f"{self._archiver.archived_last} is archived"
            )
            self.end(SessionEnd(EndCause.UNSAFE, reason))
            return False
        self._report("recovery.decided", mark=mark, untrusted=tuple(self.recovery.unknown_replicas))
        self.repairs.on_mark_decided(mark)
        return True

    def _open_session(self, now_ms: int) -> None:
        """ZooKeeper has the states: open the session (H)."""
        assert self.window is not None
        claim, mark = self.claim, self.window.committed
        for replica in [name for name in self.replicas if name not in claim.assigned]:
            self.repairs.on_connection_lost(self.replicas[replica])
            self.replicas.pop(replica).close()
        assert len(self.engaged) >= self.quorum
        self._outbox.append(
            SessionOpened(
                claim.session_id,
                claim.generation,
                mark,
                self.window.chain,
                claim.follows_own_session,
            )
        )
        self._in_doubt_queries = InDoubtQueries(claim, mark, self.engaged)
        self._archiver.begin(self.engaged, mark, now_ms)
        self._in_doubt_queries.begin(now_ms)
        self._settle_if_done()

    def _settle_if_done(self) -> None:
        """Settle the session if earlier sessions have outcomes and the archive matches the log."""
        assert self._in_doubt_queries is not None
        is_done = self._in_doubt_queries.outcome is not None and self._archiver.is_checked
        if is_done and not self.is_settled:
            assert self._in_doubt_queries.outcome is not None
            self.is_settled = True
            self._outbox.append(self._in_doubt_queries.outcome)

    # -----------------------------------------------------------------------------------------
    # the live log

    def _send_from_window(self, peer: ReplicaSession, now_ms: int) -> None:
        """Send a replica the next batches that it may receive, within the limit (rules 4 and 7)."""
        window = self.window
        assert window is not None
        last = window.last if peer.stage is _ENGAGED else window.committed
        while peer.next_id <= last and not peer.is_lagging:
            window_batch = window.batch_at(peer.next_id)
            if window_batch is None:
                copied_last = min(window.committed, window.first - 1)
                self.repairs.copy_next_batches(peer, TransactionId(copied_last), now_ms)
                return
            if window_batch.entry.last > last:
                return
            peer.append_from_window(window_batch, now_ms)

    def _commit(self, now_ms: int) -> None:
        window = self.window
        assert window is not None
        marks = [peer.synced_last for peer in self.replicas.values() if peer.stage is _ENGAGED]
        mark = quorum_mark(marks, self.quorum)
        assert mark is not None
        if not window.commit(mark):
            return
        self._progress_ms = now_ms
        committed = TransactionsCommitted(
            self.claim.session_id, window.committed, window.committed_chain
        )
        self._outbox.append(committed)
        needed = [peer.next_id for peer in self.replicas.values() if peer.stage in MARK_SET_STAGES]
        limits = self._limits
        window.trim(min(needed), limits.lag_bytes_max, limits.lag_count_max)

    def _stalled_at_ms(self) -> int | None:
        if self.window is None or self._limits.quorum_ms_max == 0:
            return None
        oldest_request_sent_ms = self.window.oldest_submitted_ms
        if oldest_request_sent_ms is None:
            return None
        return max(oldest_request_sent_ms, self._progress_ms) + self._limits.quorum_ms_max

    def _report(self, name: str, **fields: object) -> None:
        session = ("session", self.claim.session_id)
        self._outbox.append(Report(name, (session, *fields.items())))
