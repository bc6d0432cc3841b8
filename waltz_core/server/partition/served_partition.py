"""The state machine of a served partition: appends, mounts, feeds and reads over store sessions.

This module connects clients and replication. Appends, mounts, feeds and reads have their own
modules, which are independent of each other. Only this module routes between these modules and
tracks the store session.

Rules (docs/design/correctness.md 2.1 H and 2.4, rows 16, 21, 22, 28, 29, 39):
    1. A request is answered only after `SessionOpened` and `SessionSettled` of a session; until
       then it waits.
    2. If no other owner can have written between two sessions (`follows_own_session`, same
       generation), caches and locks are kept up to the high-water mark. If another owner can have
       written, both are reset.
    3. A mount is answered when three conditions hold:
        - (a) There is a settled session.
        - (b) All appends of the client's older connections are final.
        - (c) The feed, if there is one, has reached the high-water mark at the time of (b).
    4. A high-water mark is reported only if a quorum has confirmed the session within the last
       `high_water_mark_staleness_ms_max`.
    5. A high-water mark never decreases. If the store reports a lower mark, the store has lost
       data, and the server releases the partition.
    6. ClientAheadOfLog is reported only if a quorum has confirmed the session after the request
       arrived. If this proof fails, the client gets a retriable error (`linearizable_requests.py`,
       rule 3).
"""

from collections.abc import Collection, Sequence
from typing import Final, assert_never

from waltz_core import errors
from waltz_core.machine import Report, Wakeup, earliest
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    Generation,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication import session_events as replication
from waltz_core.server.append import answers, outcomes
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.append.mounts import Mounts, PartitionPosition, requested_mark_of
from waltz_core.server.append.pipeline import AppendPipeline
from waltz_core.server.locking.pending_appends import PendingAppend
from waltz_core.server.partition.linearizable_requests import LinearizableRequests, assumed_id_of
from waltz_core.server.partition.waiting_requests import WaitingMount, WaitingRequests
from waltz_core.server.partition_events import (
    ConnectionClosed,
    ConnectionCongested,
    ConnectionDrained,
    ConnectionId,
    Effect,
    Event,
    FeedFailed,
    FeedHeaders,
    Fetch,
    FetchAnswered,
    FetchFailed,
    PartitionIdentity,
    PartitionLimits,
    RequestReceived,
    SendToClient,
    Store,
)
from waltz_core.server.read import feeds
from waltz_core.server.read.cache import FeedCache, TransactionCache
from waltz_core.server.read.feeds import ClientFeeds
from waltz_core.server.read.reads import ReadOutcome, Reads
from waltz_core.wire import messages

# While an archive attempt is running, a checkpoint is due after this multiple of the usual number
# of transactions.
_CHECKPOINT_FACTOR_WHILE_ARCHIVING: Final = 8


class Partition:
    """A served partition, by the module's rules.

    It is a state machine with the events and effects of `partition_events.py`.
    """

    def __init__(
        self,
        identity: PartitionIdentity,
        store: Store,
        limits: PartitionLimits,
        transactions: TransactionCache,
        feed_cache: FeedCache,
        throttle: LargeBatchThrottle,
    ) -> None:
        self._identity = identity
        self._store = store
        self._limits = limits
        self._mounts = Mounts(limits.remembered_clients_max)
        self.pipeline = AppendPipeline(limits, self._mounts, throttle, identity.partition_id)
        self.reads = Reads(identity.partition_id, limits, transactions, feed_cache)
        self.feed = ClientFeeds(limits, self.reads)
        self._linearizable: LinearizableRequests[RequestReceived | PendingAppend] = (
            LinearizableRequests(limits.high_water_mark_staleness_ms_max)
        )
        self._generation = Generation(-1)
        self._settled_generation = Generation(-1)
        self._is_owned = False
        self._unsettled_session: replication.SessionOpened | None = None
        self._session_id: SessionId = NO_SESSION
        self._is_open = False
        self._high_water_mark = BEFORE_FIRST
        self._opened_ms = 0
        self._written_ms = 0  # when the last write of the metadata was requested
        self._opened_mark = BEFORE_FIRST
        # The store requests a checkpoint if too much is archived above the confirmed low-water
        # marks.
        self._has_store_requested_checkpoint = False
        self._is_checkpoint_due = False
        self._waiting = WaitingRequests(limits.session_wait_ms_max)
        self._now_ms = 0
        self._wall_ms = 0
        self._effects: list[Effect] = []  # the effects of the present step
        self.session_changes = 0

    # -----------------------------------------------------------------------------------------
    # state and counters

    @property
    def is_open(self) -> bool:
        """Whether there is a settled store session; shown by the health page."""
        return self._is_open

    @property
    def is_owned(self) -> bool:
        """Whether this server serves the partition."""
        return self._is_owned

    @property
    def session_id(self) -> SessionId:
        """The ID of the session that was opened last."""
        return self._session_id

    @property
    def high_water_mark(self) -> TransactionId:
        """The high-water mark: the ID of the last transaction known to be committed."""
        return self._high_water_mark

    @property
    def first_available(self) -> TransactionId:
        """The first ID that has not expired from the archive."""
        archived = self._store.archived_mark
        return TransactionId(0) if archived is None else archived.first

    @property
    def archive_progress(self) -> tuple[TransactionId, replication.ArchiveBacklog] | None:
        """The last archived ID, and the backlog that is not archived; None without an archive."""
        recorded, backlog = self._store.archived_mark, self._store.archive_backlog
        if backlog is None:
            return None
        return (BEFORE_FIRST if recorded is None else recorded.last), backlog

    @property
    def generation(self) -> Generation:
        """The generation in which this server owns the partition."""
        return self._generation

    @property
    def _position(self) -> PartitionPosition:
        return PartitionPosition(
            self._identity.partition_id, self._generation, self._high_water_mark
        )

    @property
    def engaged(self) -> Collection[ReplicaId]:
        """The replicas in sync, which readers may query."""
        return self._store.readable_replicas

    @property
    def mount_count(self) -> int:
        """The number of mounted clients."""
        return self._mounts.mounted_client_count

    @property
    def wake_at_ms(self) -> int | None:
        """When the driver must send the next `Wakeup`."""
        if self.feed.has_work:
            return self._now_ms
        wanted_ms = earliest(self.pipeline.due_ms(self._now_ms), self._store.wake_at_ms)
        wanted_ms = earliest(wanted_ms, self.reads.wake_at_ms)
        return earliest(wanted_ms, self._waiting.due_ms)

    # -----------------------------------------------------------------------------------------
    # events

    def step(self, event: Event, now_ms: int) -> Sequence[Effect]:
        """Process one event and return its effects; `now_ms` is monotonic."""
        self._now_ms = now_ms
        match event:
            case RequestReceived():
                self._wall_ms = max(self._wall_ms, event.wall_ms)
                self._on_request_received(event)
            case ConnectionClosed():
                self._on_connection_closed(event.connection)
            case ConnectionCongested():
                self.feed.on_connection_congested(event.connection)
            case ConnectionDrained():
                self.feed.on_connection_drained(event.connection)
            case FetchAnswered() | FetchFailed():
                self._on_fetch_answered(event)
            case Wakeup():
                self._on_wakeup()
            case replication.TakeOwnership():
                self._on_ownership_taken(event)
            case replication.ReleaseOwnership():
                self._step_store(event)
                self._stop_serving("the partition has moved to another server")
            case _:
                self._step_store(event)
        out, self._effects = self._effects, []
        return out

    def _on_wakeup(self) -> None:
        store_at_ms = self._store.wake_at_ms
        if store_at_ms is not None and store_at_ms <= self._now_ms:
            self._step_store(Wakeup())
        for request in self._waiting.take_overdue(self._now_ms):
            error = errors.Unavailable(
                f"{self._position} has had no store session for "
                f"{self._limits.session_wait_ms_max} ms"
            )
            self._effects.append(answers.request_error_answer(request, error))
        self._route_reads(self.reads.wake(self._now_ms))
        self._route_appends(self.pipeline.process_slice(now_ms=self._now_ms, wall_ms=self._wall_ms))
        self._deliver_feed()

    def _on_fetch_answered(self, event: FetchAnswered | FetchFailed) -> None:
        if isinstance(event, FetchFailed):
            self._effects += self.pipeline.lock_loader.on_fetch_failed(event.token, self._now_ms)
            self._route_reads(self.reads.on_fetch_failed(event, self._now_ms))
        elif isinstance(event.message, messages.LockBlocks):
            self.pipeline.lock_loader.on_blocks_fetched(event.token, event.message)
        else:
            self._route_reads(self.reads.on_range_fetched(event.token, event.message, self._now_ms))

    # -----------------------------------------------------------------------------------------
    # clients

    def _on_request_received(self, event: RequestReceived) -> None:
        message = event.message
        if not self._is_owned:
            self._effects.append(answers.not_owned_answer(event, self._position))
        elif isinstance(message, messages.AppendRequest | messages.AppendBatch):
            received = self.pipeline.receive(
                event.connection,
                message,
                cost_bytes=event.cost_bytes,
                now_ms=self._now_ms,
                over_limit=event.over_limit,
            )
            self._route_appends(received)
        elif isinstance(message, messages.FlushRequest):
            self._route_appends(self.pipeline.flush(self._waiting.add_flush(event)))
        elif isinstance(message, messages.RejectionsRequest):  # needs no session
            rows = self.pipeline.rejections.newest_first(self._high_water_mark)
            self._effects.append(answers.rejections_answer(event, rows))
        elif self._is_open:
            self._answer_request(event)
        else:
            self._wait_for_session(event)

    def _wait_for_session(self, event: RequestReceived) -> None:
        self._waiting.wait_for_session(event, self._now_ms)

    def _answer_request(self, event: RequestReceived, *, is_proved: bool = False) -> None:
        assert self._is_open
        message = event.message
        if assumed_id_of(message) > self._high_water_mark and not is_proved:
            self._request_proof(event)
            return
        match message:
            case messages.MountRequest() | messages.MountWriter():
                self._begin_mount(event)
            case messages.FeedRequest():
                self._grant_feed(event, message)
            case messages.HighWaterMarkRequest():
                self._answer_mark(event)
            case messages.ReplicasRequest():
                self._answer_mark(event, needs_proof=message.linearizable)
            case messages.ExpireRequest():
                self._answer_expiry(event, message)
            case messages.ObjectReplacementRequest():
                self._answer_replacement(event, message)
            case messages.RangeRequest():
                self._answer_range(event, message)
            case messages.TransactionDataRequest():
                self._route_reads(self.reads.request_data(event, message))
            case _:
                error_text = (
                    f"a server accepts no {type(message).__name__} as a request for a partition"
                )
                self._effects.append(
                    answers.request_error_answer(event, errors.BadRequest(error_text))
                )

    def _answer_range(self, event: RequestReceived, message: messages.RangeRequest) -> None:
        """Answer a range request. Only the client's mounted connection may read its own headers."""
        client_id = message.req_id.client_id
        is_own = message.form == messages.OWN_HEADERS
        if is_own and not self._mounts.has_mount(client_id, event.connection):
            error_text = f"{self._position}: client {client_id} is not mounted on this connection"
            self._effects.append(answers.request_error_answer(event, errors.NotMounted(error_text)))
        else:
            self._route_reads(self.reads.request_range(event, message))

    def _on_connection_closed(self, connection: ConnectionId) -> None:
        self._mounts.on_connection_closed(connection)
        self.feed.close(connection)
        self.reads.close(connection, self.feed.fetched_first_ids)
        self._waiting.drop(connection)
        # Appends that wait for a proof are kept, because flushes of other connections wait for
        # them.
        self._linearizable.drop(
            lambda request: (
                isinstance(request, RequestReceived) and request.connection == connection
            )
        )
        self._route_appends(self.pipeline.close(connection))

    # -----------------------------------------------------------------------------------------
    # mounts

    def _begin_mount(self, event: RequestReceived) -> None:
        message, connection = event.message, event.connection
        assert isinstance(message, messages.MountRequest | messages.MountWriter)
        req_id = message.req_id
        error = self._mounts.mount_error(message, connection, self._position, event.principal)
        if error is not None:
            self._effects.append(answers.mount_error_answer(event, error))
            return
        # End all older feeds and mounts of this client, even on the same connection.
        older_mounts = self.feed.drop_client(req_id.client_id)
        if older_mounts:
            self.reads.on_feeds_ended(self.feed.fetched_first_ids)
        older_mounts += self._waiting.take_older_mounts(req_id.client_id)
        self._effects.extend(answers.superseded_answer(request) for request in older_mounts)
        sequence = message.connection_sequence
        self._mounts.begin_mount(req_id.client_id, connection, sequence, event.principal)
        wants_feed = not isinstance(message, messages.MountWriter) or message.wants_feed
        self._route_appends(
            self.pipeline.add_barrier(self._waiting.add_mount(event, wants_feed=wants_feed))
        )

    def _on_mount_drained(self, mount: WaitingMount) -> None:
        """All older appends of the client are final: continue the mount (rule 3 b)."""
        event = mount.request
        message = event.message
        assert isinstance(message, messages.MountRequest | messages.MountWriter)
        if self._reject_outdated(event):
            return
        mark = requested_mark_of(message)
        if not mount.wants_feed:
            self._finish_mount(event)
            return
        self.feed.mount(
            event,
            mark=self._high_water_mark if mark == messages.LATEST_MARK else TransactionId(mark),
            until=self._high_water_mark,
        )

    def _on_mount_caught_up(self, event: RequestReceived) -> None:
        """The feed has reached the high-water mark (rule 3 c): finish the mount.

        The session may have ended meanwhile; then the mount waits for the next session (rule 3 a).
        """
        if not self._is_open:
            self._wait_for_session(event)
        elif not self._reject_outdated(event):
            self._finish_mount(event)

    def _reject_outdated(self, event: RequestReceived) -> bool:
        """Drop a mount whose generation or connection has ended; return whether it was dropped.

        If the generation has ended, the mount is answered with an error.
        """
        req_id = event.message.req_id
        if self._mounts.has_mount(req_id.client_id, event.connection):
            return False
        if req_id.generation != self._generation:
            error_text = (
                f"{self._position}: the append is for generation {req_id.generation} of the "
                "partition, which has ended"
            )
            self._effects.append(
                answers.mount_error_answer(event, errors.GenerationMismatch(error_text))
            )
        return True

    def _finish_mount(self, event: RequestReceived) -> None:
        self._mounts.finish_mount(event.message.req_id.client_id, event.connection)
        self._effects.append(
            answers.mounted_answer(event, self._high_water_mark, self._session_id, self._limits)
        )

    def _grant_feed(self, event: RequestReceived, message: messages.FeedRequest) -> None:
        error = self.feed.add_request(event, message.client_high_water_mark, self._position)
        if error is not None:
            self._effects.append(answers.request_error_answer(event, error))

    def _deliver_feed(self) -> None:
        if self.feed.has_work:
            self._route_feed(self.feed.deliver())

    # -----------------------------------------------------------------------------------------
    # high-water marks

    def _answer_mark(self, event: RequestReceived, *, needs_proof: bool = False) -> None:
        """Answer with the high-water mark; if the last proof is too old, wait for one (rule 4)."""
        if not needs_proof and self._linearizable.is_proof_fresh(self._now_ms):
            self._effects.append(self._current_mark_answer(event))
        else:
            self._request_proof(event)

    def _request_proof(self, request: RequestReceived | PendingAppend) -> None:
        for effect in self._linearizable.wait_for_proof(request, self._now_ms):
            self._step_store(effect)

    def _on_request_proved(self, request: RequestReceived | PendingAppend) -> None:
        if not isinstance(request, RequestReceived):
            self._route_appends(self.pipeline.answer_ahead_of_log(request, is_proved=self._is_open))
        elif not self._is_open:
            self._wait_for_session(request)
        elif isinstance(
            request.message,
            messages.FlushRequest | messages.HighWaterMarkRequest | messages.ReplicasRequest,
        ):
            self._effects.append(self._current_mark_answer(request))
        else:
            self._answer_request(request, is_proved=True)

    def _current_mark_answer(self, event: RequestReceived) -> SendToClient:
        # Answer with the present mark: the client may already know a mark above the proved mark.
        mark, replicas = self._high_water_mark, self.reads.replicas
        recorded = self._store.archived_mark
        archived = None
        if recorded is not None:
            backlog, interval_ms = self._store.archive_backlog, self._limits.archive_interval_ms
            archived = answers.ArchivePosition(recorded, backlog, interval_ms)
        return answers.mark_answer(
            event, mark, self._session_id, replicas, self._identity, archived
        )

    def _answer_expiry(self, event: RequestReceived, message: messages.ExpireRequest) -> None:
        before = TransactionId(message.before)
        if before < 0 or message.before_ms < 0:
            error_text = (
                f"expiry: expected IDs and times of 0 or more, found {before} and "
                f"{message.before_ms}"
            )
            self._effects.append(answers.request_error_answer(event, errors.BadRequest(error_text)))
            return
        is_done = self._store.is_expiry_done(before, message.before_ms)
        self._effects.append(
            answers.expiry_answer(event, self._store.archived_mark, is_done=is_done)
        )
        if not is_done:
            self._step_store(replication.ExpireArchive(before, message.before_ms))

    def _answer_replacement(
        self, event: RequestReceived, message: messages.ObjectReplacementRequest
    ) -> None:
        first, last = TransactionId(message.first), TransactionId(message.last)
        archived = self._store.archived_mark
        end = -1 if archived is None else archived.last
        if not 0 <= first <= last <= end:
            error_text = f"expected an object with transactions in 0..{end}, found {first}..{last}"
            self._effects.append(answers.request_error_answer(event, errors.BadRequest(error_text)))
            return
        request = replication.ReplaceArchivedObject(message.object, first, last, message.token)
        self._effects.append(
            answers.replacement_answer(event, self._store.replacement_outcome(request))
        )
        self._step_store(request)

    # -----------------------------------------------------------------------------------------
    # the store

    def _step_store(self, event: replication.Event) -> None:
        """Pass an event to the store. Process the store's effects for this machine.

        The other effects are passed on.
        """
        for effect in self._store.step(event, self._now_ms):
            match effect:
                case replication.SessionOpened():
                    self._unsettled_session = effect
                case replication.SessionSettled():
                    self._on_session_settled(effect)
                case replication.TransactionsCommitted():
                    self._on_committed(effect)
                case replication.SessionClosed():
                    self._on_session_closed(effect)
                case replication.CheckpointDue():
                    self._has_store_requested_checkpoint = True
                    self._begin_due_checkpoint()
                case replication.MarkProved() | replication.MarkProofFailed():
                    self._on_proof_ended(effect)
                case replication.OwnershipReleased():
                    self._stop_serving(effect.reason)
                    self._effects.append(effect)
                case replication.WriteMetadata():
                    self._written_ms = self._now_ms
                    self._effects.append(effect)
                case _:
                    self._effects.append(effect)
        self.reads.replicas = self._store.readable_replicas

    def _on_ownership_taken(self, event: replication.TakeOwnership) -> None:
        if event.generation != self._generation:
            self._mounts.on_generation_started()
            self._generation = event.generation
        self._is_owned = True
        self._step_store(event)

    def _on_session_settled(self, event: replication.SessionSettled) -> None:
        opened, self._unsettled_session = self._unsettled_session, None
        assert opened is not None
        assert opened.session_id == event.session_id
        mark = opened.high_water_mark
        if mark < self._high_water_mark:
            self._release_for_data_loss(
                f"the log of the replicas ends at transaction {mark}, but "
                f"transaction {self._high_water_mark} was reported as committed"
            )
            return
        if event.has_unknown_outcomes:
            self._release_partition(
                "no storage could return the batches of an earlier store session"
            )
            return
        follows_own_session = (
            opened.follows_own_session and opened.generation == self._settled_generation
        )
        self._settled_generation = opened.generation
        self._session_id, self._is_open = opened.session_id, True
        self._high_water_mark = mark
        self._opened_ms, self._opened_mark = self._now_ms, mark
        self._is_checkpoint_due = self._has_store_requested_checkpoint = False
        self.session_changes += 1
        # Use the time at which the write was requested: a paused process may receive its result
        # late.
        self._linearizable.note_confirmation(self._written_ms)
        if not follows_own_session:
            self.reads.clear_caches()
        self.reads.replicas = self._store.readable_replicas
        settled = self.pipeline.on_session_settled(
            opened,
            event.committed_last,
            follows_own_session=follows_own_session,
            stamp_ms=event.stamp_ms,
        )
        replicas, lock_loader = self.reads.replicas, self.pipeline.lock_loader
        self._effects += lock_loader.query_locks(
            opened.session_id, replicas, self._now_ms, must_hold_appends=not follows_own_session
        )
        self.feed.on_mark_advanced(opened.session_id, mark)
        self._route_reads(self.reads.on_session_opened(opened.session_id, mark))
        self._route_appends(settled)
        self._effects.append(
            Report("session.opened", (("session", opened.session_id), ("high_water_mark", mark)))
        )
        for request in self._waiting.on_session_opened():
            self._on_request_received(request)

    def _on_committed(self, event: replication.TransactionsCommitted) -> None:
        assert self._is_open
        assert event.session_id == self._session_id
        self._high_water_mark = event.last
        append_outcomes = self.pipeline.on_committed(event.last, event.chain, now_ms=self._now_ms)
        # Reads and feeds receive the new mark before a mount that waited for the mark continues.
        self.reads.on_mark_advanced(event.last)
        self.feed.on_mark_advanced(self._session_id, event.last)
        self._route_appends(append_outcomes)
        if self.pipeline.proved_ms is not None:
            self._linearizable.note_confirmation(self.pipeline.proved_ms)
        self._deliver_feed()
        self._begin_due_checkpoint()

    def _begin_due_checkpoint(self) -> None:
        """Periodically start a new session with nothing in flight, to raise the low-water marks.

        The end of a session also ends a running archive attempt, whose work is lost. Therefore
        checkpoints are rarer while an attempt is running. With the usual interval, no attempt would
        succeed under continuous load. A slow attempt delays the checkpoint, but does not prevent
        it.
        """
        if not self._is_checkpoint_due:
            count = self._high_water_mark - self._opened_mark
            age_ms = self._now_ms - self._opened_ms
            limit = self._limits.checkpoint_interval_count
            if self._store.is_archiving:
                limit *= _CHECKPOINT_FACTOR_WHILE_ARCHIVING
            self._is_checkpoint_due = (
                count >= limit or self._has_store_requested_checkpoint
            ) and age_ms >= self._limits.checkpoint_interval_ms
            if self._is_checkpoint_due:
                self.pipeline.hold_submissions()
        if self._is_checkpoint_due and not self.pipeline.in_flight_bytes:
            self._step_store(replication.Checkpoint())

    def _on_session_closed(self, event: replication.SessionClosed) -> None:
        self._is_open = False
        self._unsettled_session = None
        is_full = event.error_code == errors.NoSpace.code
        loss_reason = messages.RowOutcomeCode.NO_SPACE if is_full else messages.RowOutcomeCode.LOST
        self._route_appends(self.pipeline.on_session_closed(loss_reason))
        self.reads.on_session_closed()
        # The next session may answer these requests, although they arrived in the ended session.
        for request in self._reject_unproved(self._linearizable.reset()):
            self._wait_for_session(request)
        self._effects.append(
            Report("session.closed", (("session", event.session_id), ("reason", event.reason)))
        )

    def _on_proof_ended(self, event: replication.MarkProved | replication.MarkProofFailed) -> None:
        if isinstance(event, replication.MarkProved):
            requests, proofs = self._linearizable.on_proof_succeeded(event.token, self._now_ms)
            assert event.high_water_mark <= self._high_water_mark
            for request in requests:
                self._on_request_proved(request)
        else:
            requests, proofs = self._linearizable.on_proof_failed(event.token, self._now_ms)
            unproved = errors.SessionLost(
                f"{self._position}: no quorum of storages has confirmed the store session"
            )
            self._effects.extend(
                answers.request_error_answer(request, unproved)
                for request in self._reject_unproved(requests)
            )
        for proof in proofs:
            self._step_store(proof)

    def _reject_unproved(
        self, requests: Sequence[RequestReceived | PendingAppend]
    ) -> list[RequestReceived]:
        """The proof of these requests has failed: reject the appends, return the other requests.

        The appends are ahead of the log, and are answered with NOT_MOUNTED (rule 6).
        """
        other_requests: list[RequestReceived] = []
        for request in requests:
            if isinstance(request, RequestReceived):
                other_requests.append(request)
            else:
                self._route_appends(self.pipeline.answer_ahead_of_log(request, is_proved=False))
        return other_requests

    # -----------------------------------------------------------------------------------------
    # release

    def _release_for_data_loss(self, reason: str) -> None:
        """Release the partition: committed transactions are missing from the log (rule 5)."""
        self._release_partition(f"committed transactions are missing: {reason}")
        self._effects.append(Report("partition.data_loss", (("reason", reason),)))

    def _release_partition(self, reason: str) -> None:
        """Release the partition; the outcome of appends in flight is unknown."""
        self._stop_serving(reason)
        self._step_store(replication.ReleaseOwnership())
        self._effects.append(replication.OwnershipReleased(reason))

    def _stop_serving(self, reason: str) -> None:
        """Stop serving the partition: answer all waiting requests."""
        self._is_owned = self._is_open = False
        self._unsettled_session = None
        queued, in_flight, barriers = self.pipeline.abandon()
        cause = f"{self._position}: {reason}"
        not_owned_error = errors.NotOwned(cause)
        unknown_outcome_error = errors.OutcomeUnknown(
            f"{cause}; the transaction may or may not be in the log"
        )
        self._effects.extend(
            answers.append_error_answer(pending, not_owned_error) for pending in queued
        )
        self._effects.extend(
            answers.append_error_answer(pending, unknown_outcome_error) for pending in in_flight
        )
        waiting = self._waiting.take_all()
        waiting += self._reject_unproved(self._linearizable.reset())
        waiting += self.feed.abandon()
        waiting += self.reads.abandon()
        self._mounts.on_partition_released()
        self._effects.extend(
            answers.request_error_answer(request, not_owned_error) for request in waiting
        )
        assert all(isinstance(outcome, outcomes.BarrierReached) for outcome in barriers)

    # -----------------------------------------------------------------------------------------
    # routing between the parts

    def _route_appends(self, append_outcomes: Sequence[outcomes.AppendOutcome]) -> None:
        for outcome in append_outcomes:
            match outcome:
                case SendToClient() | Fetch() | Report():
                    self._effects.append(outcome)
                case outcomes.SubmitBatch():
                    self._step_store(replication.SubmitToSession(self._session_id, outcome.batch))
                case outcomes.BatchCommitted():
                    self.reads.cache_batch(outcome.entry, outcome.batch)
                case outcomes.BarrierReached():
                    self._on_barrier_reached(outcome.token)
                case outcomes.ConfirmAheadOfLog():
                    self._request_proof(outcome.pending)
                case _:
                    assert_never(outcome)

    def _route_feed(self, feed_outcomes: Sequence[feeds.FeedOutcome]) -> None:
        for outcome in feed_outcomes:
            match outcome:
                case SendToClient():
                    self._effects.append(outcome)
                case feeds.FetchHeaders():
                    fetches = self.reads.request_headers(outcome.first, outcome.last)
                    self._route_reads(fetches)
                case feeds.MountCaughtUp():
                    self._on_mount_caught_up(outcome.request)
                case _:
                    assert_never(outcome)

    def _route_reads(self, read_outcomes: Sequence[ReadOutcome]) -> None:
        for outcome in read_outcomes:
            if isinstance(outcome, FeedHeaders):
                self._route_feed(self.feed.on_headers_fetched(outcome))
            elif isinstance(outcome, FeedFailed):
                requests = self.feed.on_fetch_failed(outcome.first)
                self._effects.extend(
                    answers.request_error_answer(request, outcome.error) for request in requests
                )
            else:
                self._effects.append(outcome)

    def _on_barrier_reached(self, token: int) -> None:
        request_or_mount = self._waiting.take_waiting(token)
        if request_or_mount is None:
            return  # A later mount has replaced this mount, or its request was dropped.
        request = (
            request_or_mount.request
            if isinstance(request_or_mount, WaitingMount)
            else request_or_mount
        )
        if not self._is_open:
            # The session has ended since; the request starts again in the next session.
            self._wait_for_session(request)
        elif isinstance(request_or_mount, WaitingMount):
            self._on_mount_drained(request_or_mount)
        else:
            self._answer_mark(request)
