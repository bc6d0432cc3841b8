"""The client's state machine for one partition: mounts, appends, receives the feed, mounts again.

The machine implements the client's part of the recovery after a broken connection;
`server/partition/served_partition.py` is the server's part. The client's driver and the simulator
run the machine. SETTLING is the phase in which the machine reads the log back, to settle rows in
doubt.

    IDLE -> LINKING -> MOUNTING -> SETTLING -> READY        STOPPED ends all of it
               ^           |           |         |
               +-- WAITING (back-off) <+---------+

Invariants:
    1. Appends are sent only in the phase READY. In this phase, the client is mounted. The answer to
       the mount has proven that all older appends are final. Rows in doubt were settled by reading
       the log.
    2. The generations of mounts never decrease. A server may have lost the partition without
       knowing it, so a mount in an older generation proves nothing about a later owner.
    3. A mount whose mark is below a known mark is not trusted.
    4. The connection sequences of links increase, so that the newest link fences all others. A link
       with an append that was never answered is not mounted again. The server fences between
       connections. So a new mount on the same link would not fence requests that are still queued
       on this link.
    5. The sequence number of an appended row is never used again, whatever the row's outcome is.
    6. No transaction of the feed is missing: each accepted part starts right after the previous
       one.
    7. If a feed is far behind, the client does not request the feed from the server, because the
       server would send the whole feed at once. Instead, the stream emits `FeedLagging`. Then the
       driver reads the transactions, as fast as the application applies them.
    8. Submissions with `keeps_order` do not overtake each other. When one such submission is
       reported lost, all such submissions that still wait are reported LOST, too. The stream then
       sends only those that are appended after this report.
    9. After a rejection with `retry_after_ms`, the next mount begins at the earliest after this
       time.
"""

from typing import TYPE_CHECKING, assert_never

from waltz_core import errors
from waltz_core.access.client_ids import NO_PROOF
from waltz_core.client.stream import append_errors, stream_events
from waltz_core.client.stream.backoff import Backoff
from waltz_core.client.stream.cursor import FeedCursor
from waltz_core.client.stream.outbox import MountLimits, Outbox
from waltz_core.client.stream.outcome_tracker import (
    AppendAnswer,
    BatchOutcome,
    OutcomeTracker,
    PendingSubmission,
    Submission,
)
from waltz_core.client.stream.readback import ReadBack
from waltz_core.client.stream.stream_events import (
    Effect,
    Event,
    FeedLagging,
    MarkAdvanced,
    OpenLink,
    Phase,
    RequestClientId,
    SendOnLink,
    StreamReady,
    StreamSettings,
    StreamStopped,
    SubmissionRejected,
    SubmissionSettled,
)
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import (
    BEFORE_FIRST,
    CONTROL_SEQUENCE_MIN,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.wire import messages
from waltz_core.wire.messages import LATEST_MARK, RowOutcomeCode

if TYPE_CHECKING:
    from random import Random

SEQUENCE_MAX = (1 << 31) - 1
_NO_CLIENT_ID = -1

_LINKED_PHASES = (Phase.MOUNTING, Phase.SETTLING, Phase.READY)


class PartitionStream:
    """The state machine of one partition, with the invariants above."""

    def __init__(
        self,
        client_id: int | None,
        partition_id: PartitionId,
        settings: StreamSettings,
        random: "Random",
        proof: bytes = NO_PROOF,
    ) -> None:
        # Whether there is no client ID yet, or a server has denied it (see `ClientIdRenewed`).
        self.needs_client_id = client_id is None
        self._client_id = _NO_CLIENT_ID if client_id is None else client_id
        self._proof = proof
        # Whether a mount was denied because of the client ID, and no mount has succeeded since.
        self._is_id_denied = False
        self._partition_id = partition_id
        self._settings = settings
        self._tracker = OutcomeTracker(self._client_id, partition_id)
        self._outbox = Outbox(partition_id)
        self._cursor = FeedCursor(settings.feed_ahead_max)
        self._readback = ReadBack(settings.range_bytes_max)
        self._backoff = Backoff(
            interval_ms_min=settings.retry_interval_ms_min,
            interval_ms_max=settings.retry_interval_ms_max,
            random=random,
        )
        self.next_sequence = 1
        self._next_control_sequence = -1
        self.phase = Phase.IDLE
        # The deadline of the phase. In READY, it is set only while the stream waits to mount again.
        self._phase_deadline_ms: int | None = None
        self._ready_since_ms = 0
        # The number of the last `OpenLink`; outcomes of earlier ones are ignored.
        self.attempt = 0
        self._wants_mount = False
        # The reason to mount again as soon as all appends in READY are answered; None without a
        # reason.
        self._remount_reason: str | None = None
        self._link = -1
        # Links with appends that were never answered (invariant 4).
        self._avoided_links: dict[int, None] = {}
        self._mount = 0
        self._mount_id: ReqId | None = None
        self._mount_has_feed = False
        self._supports_pipelining = self._supports_own_ranges = False
        self._generation = Generation(-1)
        self._connection_sequence = -1
        self._limits = MountLimits(1, 1, 1)
        self._is_renewing_client_id = False
        self._paused_until_ms = 0  # invariant 9
        self._stopped: errors.WaltzError | None = None
        # The last reason why the partition was not mounted.
        self.failure = "the client is not connected yet"
        # The highest mark of the log that this client has received.
        self.high_water_mark = BEFORE_FIRST

    # --- for the driver

    @property
    def client_id(self) -> int:
        """The client ID of the appends that are sent from now on; -1 while there is none."""
        return self._client_id

    @property
    def has_feed(self) -> bool:
        """Whether the application has requested a feed."""
        return self._cursor.is_started

    @property
    def has_pending(self) -> bool:
        """Whether any submission waits to be sent or to become final."""
        return len(self._outbox) > 0 or len(self._tracker) > 0

    @property
    def wake_at_ms(self) -> int | None:
        """The time at which the driver must send the next `Wakeup`."""
        wanted_ms = self._phase_deadline_ms
        for oldest in (self._outbox.first, self._tracker.oldest):
            if oldest is not None and (wanted_ms is None or oldest.deadline_ms < wanted_ms):
                wanted_ms = oldest.deadline_ms
        return wanted_ms

    # --- events

    def step(self, event: Event, now_ms: int) -> list[Effect]:  # noqa: C901, PLR0912
        """Process one event; see `machine.py`."""
        effects: list[Effect] = []
        match event:
            case stream_events.SendAppends():
                self._queue_submission(event.submission, now_ms, effects)
            case stream_events.MessageReceived():
                self._on_message_received(event, now_ms, effects)
            case stream_events.FeedApplied():
                self._on_applied(event.mark, now_ms, effects)
            case stream_events.MountPartition():
                self._wants_mount = True
                self._open_link_if_idle(effects)
            case stream_events.Subscribe():
                self._cursor.start_after(event.mark, event.header_values)
                self._remount("the application has requested the feed", now_ms, effects)
            case stream_events.Unsubscribe():
                self._end_feed(now_ms, effects)
            case stream_events.ResumeFeed():
                self._cursor.resume(event.mark)
                self._remount("the feed has caught up", now_ms, effects)
            case stream_events.LinkOpened():
                self._on_link_opened(event, now_ms, effects)
            case stream_events.LinkFailed():
                self._on_link_failed(event, now_ms, effects)
            case stream_events.LinkLost():
                self._on_link_lost(event, now_ms, effects)
            case stream_events.GenerationChanged():
                self._on_owner_moved(event.generation, now_ms, effects)
            case stream_events.ClientIdRenewed():
                self._on_client_id_renewed(event, now_ms, effects)
            case stream_events.CloseStream():
                self._stop_stream(
                    errors.Unreachable("the client was closed before it sent the append"), effects
                )
            case Wakeup():
                self._on_wakeup(now_ms, effects)
            case _:
                assert_never(event)
        return effects

    def _queue_submission(self, submission: Submission, now_ms: int, effects: list[Effect]) -> None:
        if self._stopped is not None:
            effects.append(SubmissionRejected(submission.token, self._stopped))
            return
        self._outbox.put(submission, now_ms + self._settings.request_timeout_ms)
        if self.phase is Phase.READY:
            self._send_waiting(effects)
        else:
            self._open_link_if_idle(effects)

    def _on_wakeup(self, now_ms: int, effects: list[Effect]) -> None:
        self._end_expired(now_ms, effects)
        if self._phase_deadline_ms is None or now_ms < self._phase_deadline_ms:
            return
        if self.phase is Phase.WAITING:
            self._open_link(effects)
        elif self.phase is Phase.READY:
            self._leave_link(self._remount_reason or "", now_ms, effects)
        else:
            self._leave_link("the server did not answer the mount in time", now_ms, effects)

    # --- links

    def _open_link_if_idle(self, effects: list[Effect]) -> None:
        if self.phase is Phase.IDLE:
            self._open_link(effects)

    def _open_link(self, effects: list[Effect]) -> None:
        assert self.phase in (Phase.IDLE, Phase.WAITING, Phase.LINKING)
        self.phase = Phase.LINKING
        self._phase_deadline_ms = None
        self.attempt += 1
        self._avoided_links.update((pending.link, None) for pending in self._tracker)
        effects.append(OpenLink(self.attempt, tuple(self._avoided_links)))

    def _on_link_opened(
        self, event: stream_events.LinkOpened, now_ms: int, effects: list[Effect]
    ) -> None:
        if self.phase is not Phase.LINKING or event.attempt != self.attempt:
            return
        if event.generation < self._generation:  # invariant 2
            self._wait_before_retry(
                f"the server's generation {event.generation} of the partition is older than the "
                f"known one, {self._generation}",
                now_ms,
                effects,
            )
            return
        assert event.connection_sequence > self._connection_sequence  # invariant 4
        assert event.link not in self._avoided_links  # invariant 4
        assert not self.needs_client_id
        self._connection_sequence = event.connection_sequence
        self._generation = event.generation
        self._link = event.link
        self._supports_pipelining, self._supports_own_ranges = (
            event.supports_pipelining,
            event.supports_own_ranges,
        )
        # The first mount is without the feed: its answer states how far behind the feed is.
        self._send_mount(LATEST_MARK, now_ms, effects, wants_feed=False)

    def _send_mount(
        self, mark: int, now_ms: int, effects: list[Effect], *, wants_feed: bool
    ) -> None:
        self.phase = Phase.MOUNTING
        self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        self._mount += 1
        self._mount_id = self._next_control_id()
        self._mount_has_feed = wants_feed
        self._cursor.on_mount_started()
        values = self._cursor.header_values if wants_feed else ()
        number = self._connection_sequence
        request = messages.MountWriter(
            self._mount_id, number, mark, wants_feed, values, self._proof
        )
        effects.append(SendOnLink(self._link, request))

    def _on_link_lost(
        self, event: stream_events.LinkLost, now_ms: int, effects: list[Effect]
    ) -> None:
        self._avoided_links.pop(event.link, None)
        for pending in self._tracker:
            pending.is_link_lost |= pending.link == event.link
        if event.link == self._link and self.phase in _LINKED_PHASES:
            self._leave_link(event.reason, now_ms, effects)

    def _avoid_link(self, pending: PendingSubmission) -> None:
        """Avoid the link of a submission without an answer: do not mount on it again."""
        if pending.is_link_lost:
            self._avoided_links.pop(pending.link, None)
        else:
            self._avoided_links[pending.link] = None

    def _on_link_failed(
        self, event: stream_events.LinkFailed, now_ms: int, effects: list[Effect]
    ) -> None:
        if self.phase is not Phase.LINKING or event.attempt != self.attempt:
            return
        if event.error.retriable:
            self._note_pause(event.error, now_ms)
            self._wait_before_retry(str(event.error), now_ms, effects)
        else:
            self._stop_stream(event.error, effects)

    def _on_owner_moved(self, generation: Generation, now_ms: int, effects: list[Effect]) -> None:
        if self.phase in (Phase.WAITING, Phase.LINKING):
            # Ignore the outcome of a dial in progress, because the former owner's host may be down.
            self._backoff.reset()  # The failures were those of the former owner.
            self._paused_until_ms = now_ms
            self._open_link(effects)
        elif self.phase in _LINKED_PHASES and generation > self._generation:
            self._leave_link("the partition has moved to another server", now_ms, effects)

    def _remount(self, reason: str, now_ms: int, effects: list[Effect]) -> None:
        """Mount again, on the same link if all appends on it are answered soon."""
        if self.phase is not Phase.READY:
            # In IDLE, no mount exists yet; in LINKING and WAITING, the next mount suffices.
            if self.phase in (Phase.MOUNTING, Phase.SETTLING):
                self._leave_link(reason, now_ms, effects)
            self._open_link_if_idle(effects)
            return
        if self._remount_reason is None:
            self._remount_reason = reason
            self._phase_deadline_ms = now_ms + self._settings.retry_interval_ms_max
        self._leave_if_drained(now_ms, effects)

    def _leave_if_drained(self, now_ms: int, effects: list[Effect]) -> bool:
        if self._remount_reason is None or len(self._tracker):
            return False
        self._leave_link(self._remount_reason, now_ms, effects)
        return True

    def _leave_link(self, reason: str, now_ms: int, effects: list[Effect]) -> None:
        """Leave the link, and mount again if there is a reason to."""
        assert self.phase in _LINKED_PHASES
        stable_ms = self._backoff.stable_ms
        if self.phase is Phase.READY and now_ms - self._ready_since_ms >= stable_ms:
            self._backoff.reset()
        self._link = -1
        self._mount_id = None
        self._remount_reason = None
        self._readback.cancel()
        self._wait_before_retry(reason, now_ms, effects)

    def _wait_before_retry(self, reason: str, now_ms: int, effects: list[Effect]) -> None:
        self.failure = reason
        effects.append(self._report("stream.interrupted", reason=reason))
        self._phase_deadline_ms = None
        if not (self.has_pending or self._cursor.is_started or self._wants_mount):
            self.phase = Phase.IDLE
            return
        self.phase = Phase.WAITING
        # A longer pause is useless, because every request times out before.
        pause_ms = min(self.pause_ms(now_ms), self._settings.request_timeout_ms)
        delay_ms = max(self._backoff.note_failure(), pause_ms)
        if delay_ms == 0:
            self._open_link(effects)
        else:
            self._phase_deadline_ms = now_ms + delay_ms

    def pause_ms(self, now_ms: int) -> int:
        """Return the rest of the pause that a server has requested, in ms (invariant 9)."""
        return max(0, self._paused_until_ms - now_ms)

    # --- messages

    def _on_message_received(
        self, event: stream_events.MessageReceived, now_ms: int, effects: list[Effect]
    ) -> None:
        message = event.message
        if isinstance(message, AppendAnswer):
            # The outcome is final on any link: the server answers when every row is final.
            self._on_append_result(message, now_ms, effects)
            return
        if event.link != self._link or self.phase not in _LINKED_PHASES:
            return
        match message:
            case messages.FeedBatch():
                self._on_feed_batch(message, now_ms, effects)
            case messages.FeedSuspended() if message.req_id == self._mount_id:
                self._cursor.is_suspended = True
                self._request_feed(effects)
            case messages.Mounted() if message.req_id == self._mount_id:
                self._on_mount_succeeded(message, now_ms, effects)
            case messages.RangeData() if self._readback.is_requested(message.req_id):
                self._on_range_data(message, now_ms, effects)
            case messages.ErrorResponse():
                self._on_error_received(message, now_ms, effects)
            case _:
                effects.append(
                    self._report("stream.message_ignored", answer=type(message).__name__)
                )

    def _on_mount_succeeded(
        self, message: messages.Mounted, now_ms: int, effects: list[Effect]
    ) -> None:
        if self.phase is not Phase.MOUNTING:
            return
        mark = TransactionId(message.high_water_mark)
        if mark < self.high_water_mark:  # invariant 3
            known_mark = self.high_water_mark
            self._leave_link(
                f"the server's high-water mark {mark} is below the known one, {known_mark}",
                now_ms,
                effects,
            )
            return
        self._note_mark(mark, effects)
        self._limits = MountLimits.from_response(message, self._settings.in_flight_bytes_max)
        if self._mount_with_feed_if_near(mark, now_ms, effects):
            return
        self._tracker.note_mount_mark(mark)
        self._readback.begin(
            self._tracker.unresolved_range(), self._cursor.chain if self._mount_has_feed else None
        )
        self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        self._continue_readback(now_ms, effects)

    def _mount_with_feed_if_near(
        self, mark: TransactionId, now_ms: int, effects: list[Effect]
    ) -> bool:
        """Mount again, with the feed, if the feed is requested and not far behind (invariant 7).

        Return whether the partition is being mounted again.
        """
        cursor = self._cursor
        if not cursor.is_started:
            return False
        if self._mount_has_feed:
            cursor.on_mount_succeeded()
            self._request_feed(effects)
            return False
        feed_mark = cursor.start_at_end(mark)
        if mark - feed_mark <= self._settings.feed_lag_max:
            self._send_mount(feed_mark, now_ms, effects, wants_feed=True)
            return True
        if not cursor.is_lagging:
            cursor.is_lagging = True
            effects.append(FeedLagging(feed_mark, mark))
        return False

    def _continue_readback(self, now_ms: int, effects: list[Effect]) -> None:
        if self._readback.is_done:
            self._become_ready(now_ms, effects)
            return
        self.phase = Phase.SETTLING
        request = self._readback.request(
            self._next_control_id(), supports_own_ranges=self._supports_own_ranges
        )
        effects.append(SendOnLink(self._link, request))

    def _on_range_data(
        self, message: messages.RangeData, now_ms: int, effects: list[Effect]
    ) -> None:
        assert self.phase is Phase.SETTLING
        history_loss = self._readback.history_loss(message)
        if history_loss is not None:
            self._stop_stream(history_loss, effects)
            return
        error_text = self._readback.accept_headers(message, self._tracker)
        if error_text is not None:
            self._leave_link(error_text, now_ms, effects)
            return
        self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        self._continue_readback(now_ms, effects)

    def _become_ready(self, now_ms: int, effects: list[Effect]) -> None:
        for pending, outcome in self._tracker.take_final_outcomes(self.high_water_mark):
            self._avoid_link(pending)
            self._settle_submission(pending.submission, outcome, effects)
        assert len(self._tracker) == 0  # invariant 1
        self.phase = Phase.READY
        self._is_id_denied = False
        self._phase_deadline_ms = None
        self._paused_until_ms = now_ms
        self._ready_since_ms = now_ms
        self._wants_mount = False
        effects.append(StreamReady(self.high_water_mark))
        self._send_waiting(effects)

    def _on_error_received(
        self, message: messages.ErrorResponse, now_ms: int, effects: list[Effect]
    ) -> None:
        error = errors.error_from_code(
            message.error_code, message.message, message.first_available, message.retry_after_ms
        )
        self._note_pause(error, now_ms)
        pending = self._tracker.find(message.req_id)
        if pending is not None:
            self._on_append_error(pending, error, now_ms, effects)
        elif message.req_id == self._mount_id:
            if append_errors.is_mount_retriable(error):
                self._leave_link(str(error), now_ms, effects)
            elif isinstance(error, errors.ClientIdDenied) and not self._is_id_denied:
                self._on_id_denied(error, now_ms, effects)
            else:
                self._stop_stream(error, effects)
        elif self._readback.is_requested(message.req_id):
            if isinstance(error, errors.BeforeLogStart):
                self._on_rows_before_log_start(error, now_ms, effects)
            else:
                self._leave_link(
                    f"the client could not read back the log: {error}", now_ms, effects
                )
        else:
            effects.append(self._report("stream.message_ignored", answer=str(error)))

    def _note_pause(self, error: errors.WaltzError, now_ms: int) -> None:
        """Note the pause that a server has requested (invariant 9)."""
        if isinstance(error, errors.Overloaded):
            self._paused_until_ms = max(self._paused_until_ms, now_ms + error.retry_after_ms)

    def _on_rows_before_log_start(
        self, error: errors.BeforeLogStart, now_ms: int, effects: list[Effect]
    ) -> None:
        """The log begins after the rows to read back: their outcome is unknown."""
        if self._readback.on_before_log_start():
            self.failure = str(error)
            for pending in self._tracker.submissions_in_doubt_below(
                TransactionId(error.first_available)
            ):
                self._end_pending(pending, "because the log begins after them", effects)
            self._readback.begin(self._tracker.unresolved_range(), None)
        self._continue_readback(now_ms, effects)

    # --- appends

    def _send_waiting(self, effects: list[Effect]) -> None:
        assert self.phase is Phase.READY  # invariant 1
        if self._remount_reason is not None:
            return
        while (waiting := self._outbox.first) is not None:
            submission = waiting.submission
            rejection = self._outbox.rejection(submission, self._limits, self._mount)
            if rejection is not None:
                self._outbox.take()
                self._report_rejection(submission, rejection, effects)
                continue
            in_flight_bytes = self._tracker.in_flight_bytes + submission.size_bytes
            if len(self._tracker) and in_flight_bytes > self._limits.in_flight_bytes_max:
                return
            if self.next_sequence + submission.row_count > SEQUENCE_MAX:
                self._request_client_id(effects)
                return
            self._outbox.take()
            self._send_submission(submission, waiting.deadline_ms, effects)

    def _send_submission(
        self, submission: Submission, deadline_ms: int, effects: list[Effect]
    ) -> None:
        client_id = ClientId(self._client_id)
        req_id = ReqId(client_id, self._generation, self._partition_id, self.next_sequence)
        self.next_sequence += submission.row_count  # invariant 5
        self._tracker.register(
            PendingSubmission(
                submission, req_id, self._link, self._mount, self.high_water_mark, deadline_ms
            )
        )
        effects.append(
            SendOnLink(
                self._link,
                submission.message(req_id, supports_pipelining=self._supports_pipelining),
            )
        )

    def _on_append_result(self, message: AppendAnswer, now_ms: int, effects: list[Effect]) -> None:
        try:
            answer = self._tracker.on_answered(message)
        except errors.RemoteProtocolError as error:
            # The append is in doubt, like an append that was never answered.
            if self.phase in _LINKED_PHASES:
                self._leave_link(str(error), now_ms, effects)
            return
        if answer is not None:
            self._process_outcome(*answer, now_ms, effects)

    def _on_append_error(
        self,
        pending: PendingSubmission,
        error: errors.WaltzError,
        now_ms: int,
        effects: list[Effect],
    ) -> None:
        reason = append_errors.outcome_code_of(error)
        if reason is not None:
            self._tracker.remove(pending)
            outcome = BatchOutcome.all_rejected(
                pending.submission.row_count,
                reason,
                high_water_mark=self.high_water_mark,
                detail=str(error),
                retry_after_ms=self.pause_ms(now_ms),
            )
            is_paused = outcome.retry_after_ms > 0
            self._process_outcome(
                pending, outcome, now_ms, effects, str(error) if is_paused else None
            )
        elif isinstance(error, errors.UsageError):
            self._tracker.remove(pending)
            effects.append(SubmissionRejected(pending.submission.token, error))
            self._leave_if_drained(now_ms, effects)
        elif isinstance(error, errors.ConnectionSuperseded):
            # An answer under an older mount may have this error because this client has mounted
            # again.
            if pending.mount == self._mount:
                self._stop_stream(error, effects)
        else:
            self._leave_link(str(error), now_ms, effects)

    def _process_outcome(
        self,
        pending: PendingSubmission,
        outcome: BatchOutcome,
        now_ms: int,
        effects: list[Effect],
        remounts_for: str | None = None,
    ) -> None:
        self._note_mark(outcome.high_water_mark, effects)
        self._settle_submission(pending.submission, outcome, effects)
        if self.phase is not Phase.READY:
            return
        reason = append_errors.remount_reason(outcome)
        if reason is not None:
            remounts_for = f"the server rejected an append ({reason.name})"
        if remounts_for is not None and pending.mount == self._mount:
            self._remount(remounts_for, now_ms, effects)
        elif not self._leave_if_drained(now_ms, effects):
            self._send_waiting(effects)

    def _settle_submission(
        self, submission: Submission, outcome: BatchOutcome, effects: list[Effect]
    ) -> None:
        effects.append(SubmissionSettled(submission.token, outcome))
        effects.extend(
            SubmissionSettled(*outcome_of_token)
            for outcome_of_token in self._outbox.fail_following(submission, outcome)
        )

    def _report_rejection(
        self, submission: Submission, rejection: errors.WaltzError, effects: list[Effect]
    ) -> None:
        """Report why a submission is not sent. `Appends` splits a submission that is too large."""
        effects.append(SubmissionRejected(submission.token, rejection))
        if isinstance(rejection, errors.TooLarge) and submission.row_count > 1:  # invariant 8
            lost_outcome = BatchOutcome.all_rejected(
                submission.row_count, RowOutcomeCode.LOST, high_water_mark=self.high_water_mark
            )
            effects.extend(
                SubmissionSettled(*settled)
                for settled in self._outbox.fail_following(submission, lost_outcome)
            )

    def _end_expired(self, now_ms: int, effects: list[Effect]) -> None:
        timeout_ms = self._settings.request_timeout_ms
        expired = [pending for pending in self._tracker if pending.deadline_ms <= now_ms]
        for pending in expired:
            self._end_pending(pending, f"within {timeout_ms} ms", effects)
        for waiting in self._outbox.take_expired(now_ms):
            pause_ms = self.pause_ms(now_ms)
            error = append_errors.not_sent_error(
                self._partition_id, timeout_ms, self.failure, pause_ms
            )
            effects.append(SubmissionRejected(waiting.submission.token, error))

    def _end_pending(self, pending: PendingSubmission, when: str, effects: list[Effect]) -> None:
        """End a submission: report the outcome if all rows have one, otherwise OutcomeUnknown."""
        self._tracker.remove(pending)
        self._avoid_link(pending)
        outcome = pending.known_outcome(self.high_water_mark)
        if outcome is not None:
            effects.append(SubmissionSettled(pending.submission.token, outcome))
        else:
            error = append_errors.unknown_outcome_error(pending, when, self.failure)
            effects.append(SubmissionRejected(pending.submission.token, error))

    # --- client IDs

    def _request_client_id(self, effects: list[Effect]) -> None:
        # NB: the ID changes only when the tracker is empty, because rows are matched by the ID.
        if len(self._tracker) == 0 and not self._is_renewing_client_id:
            self._is_renewing_client_id = True
            effects.append(RequestClientId())

    def _on_id_denied(
        self, error: errors.ClientIdDenied, now_ms: int, effects: list[Effect]
    ) -> None:
        """Mount again with a new client ID. Rows in doubt can be read back only with the old ID."""
        self._is_id_denied = self.needs_client_id = True
        self.failure = str(error)
        for pending in list(self._tracker):
            self._end_pending(pending, "with this client ID", effects)
        self._leave_link(str(error), now_ms, effects)

    def _on_client_id_renewed(
        self, event: stream_events.ClientIdRenewed, now_ms: int, effects: list[Effect]
    ) -> None:
        if not (self._is_renewing_client_id or self.needs_client_id):
            return
        assert len(self._tracker) == 0
        if self._client_id != _NO_CLIENT_ID:
            self.next_sequence = 1
        self._is_renewing_client_id = self.needs_client_id = False
        self._client_id, self._proof = event.client_id, event.proof
        self._tracker = OutcomeTracker(event.client_id, self._partition_id)
        if self.phase in _LINKED_PHASES:
            self._leave_link("the client ID has changed", now_ms, effects)

    # --- feed

    def _end_feed(self, now_ms: int, effects: list[Effect]) -> None:
        self._cursor = FeedCursor(self._settings.feed_ahead_max)
        if self._mount_has_feed and self.phase in _LINKED_PHASES:
            self._remount("the feed was ended", now_ms, effects)
        # NB: late messages of this feed must not be mistaken for messages of the next feed.
        self._mount_has_feed = False

    def _on_feed_batch(
        self, message: messages.FeedBatch, now_ms: int, effects: list[Effect]
    ) -> None:
        if message.req_id != self._mount_id or not self._mount_has_feed:
            return
        advance = self._cursor.accept_batch(message)
        if isinstance(advance, str):  # invariant 6
            self._leave_link(advance, now_ms, effects)
            return
        if self.phase is Phase.MOUNTING:
            self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        if advance is not None:
            if advance.picked is None:  # with a filter, rows are found by reading back
                self._tracker.match_feed(advance.first, advance.headers)
            self._note_mark(advance.last, effects)
            effects.append(advance)

    def _on_applied(self, mark: TransactionId, now_ms: int, effects: list[Effect]) -> None:
        if self._cursor.note_applied(mark) and self.phase is Phase.READY:
            # The end of the log is not known; the answer to the next mount states it (invariant 7).
            self._remount("the application has caught up", now_ms, effects)
        else:
            self._request_feed(effects)

    def _request_feed(self, effects: list[Effect]) -> None:
        """Request the next range of the feed, unless the application is too far behind."""
        if self._mount_id is None or not self._mount_has_feed:
            return
        mark = self._cursor.take_request_mark()
        if mark is not None:
            effects.append(SendOnLink(self._link, messages.FeedRequest(self._mount_id, mark)))

    # --- the rest

    def _note_mark(self, mark: TransactionId, effects: list[Effect]) -> None:
        if mark > self.high_water_mark:
            self.high_water_mark = mark
            effects.append(MarkAdvanced(mark))

    def _next_control_id(self) -> ReqId:
        sequence = self._next_control_sequence
        self._next_control_sequence = sequence - 1 if sequence > CONTROL_SEQUENCE_MIN else -1
        return ReqId(ClientId(self._client_id), self._generation, self._partition_id, sequence)

    def _report(self, name: str, **fields: object) -> Report:
        return Report(name, (("partition", self._partition_id), *fields.items()))

    def _stop_stream(self, error: errors.WaltzError, effects: list[Effect]) -> None:
        if self.phase is Phase.STOPPED:
            return
        self.phase = Phase.STOPPED
        self._phase_deadline_ms = None
        self._stopped = error
        self.failure = str(error)
        self._link = -1
        for pending in list(self._tracker):
            self._end_pending(pending, "before the stream ended", effects)
        effects.extend(
            SubmissionRejected(waiting.submission.token, error)
            for waiting in self._outbox.take_all()
        )
        effects.append(StreamStopped(error))
