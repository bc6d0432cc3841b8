"""The append pipeline of one partition: queue, validate, encode, submit, answer when final.

In the pipeline, a transaction gets its ID or is rejected. So the pipeline ensures that no outcome
is reported before it is final, and that no final outcome ever changes.

    received -> its connection's lane -> [turn] checks, lock validation, IDs -> records
             -> one store batch, in flight -> committed or settled -> answered

Rules (docs/design/correctness.md 2.3 and 2.4, rows 22-30):
    1. The mount and the generation are checked when a request leaves its lane, not when it enters.
       So when a client mounts again, the pipeline rejects all its queued requests from older
       connections, or from an older mount on the same connection.
    2. Locks are entered into the lock table at validation, with the IDs that the rows will have. So
       an entry above the high-water mark belongs to a transaction in flight. A row that is rejected
       because of such an entry waits until that transaction is final.
    3. Rows are validated once. Rows that are lost with a session are reported as LOST, but only
       after `SessionSettled`.
    4. A lost row ends its client's mount, because later appends of the client must not overtake the
       row.
    5. All small requests of one turn are sent to the store as one batch, so that they share a
       quorum round. A large request is sent alone, so that no small request waits for its bytes.
       While the server is shared (`large_batch_throttle.py`), a large request is sent in pieces,
       and small requests of other clients take turns in between.
    6. IDs in flight are consecutive, starting after the high-water mark.
    7. Rule 1 applies to each piece of a large request. When the mount or the generation has ended,
       the rest of the request is rejected; validated rows keep their outcome. If a piece is lost
       with its session, the mount ends (rule 4), so no later row of the same request can enter the
       log.
    8. After the partition has moved to this server, no row is validated until the lock table has
       been filled (`lock_table_loader.py`).
    9. AHEAD (the client's mark is above the log's) is reported only after a quorum has confirmed
       the session (`completions.py`).
    10. A dependent append (`dependent_appends.py`) is validated as if its predecessors were in the
        log. If the predecessors were not in flight in this same session, the append is rejected.
        While a batch is in flight, admitted dependent appends are gathered, and submitted when this
        batch is committed. But if other writers wait at that time, the gathered appends are
        submitted at the earliest `GATHER_MS` after the submission of this batch.
"""

from collections.abc import Iterable
from typing import TypeGuard

from waltz_core.errors import Overloaded
from waltz_core.machine import earliest
from waltz_core.records.lock_blocks import LogEnd
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, Chain, PartitionId, TransactionId
from waltz_core.replication.session_events import SessionOpened
from waltz_core.server.append.admission import Admission
from waltz_core.server.append.completions import Completions
from waltz_core.server.append.in_flight import BatchDraft, InFlightBatch, InFlightBatches
from waltz_core.server.append.lanes import Lanes
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import (
    AppendOutcome,
    BarrierReached,
    BatchCommitted,
    SubmitBatch,
)
from waltz_core.server.append.recent_rejections import RecentRejections
from waltz_core.server.locking.dependent_appends import DependentAppends
from waltz_core.server.locking.lock_queues import LockQueues, is_contending
from waltz_core.server.locking.lock_table import LockTable
from waltz_core.server.locking.lock_table_loader import LockTableLoader
from waltz_core.server.locking.pending_appends import (
    AppendCounters,
    PendingAppend,
    PendingBatch,
    PendingSingle,
)
from waltz_core.server.locking.validation import (
    InFlightRange,
    ValidatedPiece,
    validate_rows,
    validate_singles,
)
from waltz_core.server.partition_events import ConnectionId, PartitionLimits
from waltz_core.wire.messages import AppendBatch, AppendFollowing, AppendRequest, RowOutcomeCode


class AppendPipeline:
    """The append pipeline, by the rules above; `Partition` carries out its outcomes."""

    def __init__(
        self,
        limits: PartitionLimits,
        mounts: Mounts,
        throttle: LargeBatchThrottle,
        partition_id: PartitionId,
    ) -> None:
        self._limits = limits
        self._mounts = mounts
        self._throttle = throttle
        self._lanes: Lanes[PendingAppend] = Lanes()
        self._lock_queues = LockQueues(expects_next_attempt=False)
        self._dependent_appends = DependentAppends()
        self.counters = AppendCounters()
        self.rejections = RecentRejections()
        self._completions = Completions(mounts, self.counters, self.rejections)
        self._admission = Admission(limits, mounts, self._completions)
        self._in_flight = InFlightBatches(throttle)
        self._lock_table: LockTable | None = None
        self._is_open = False
        self._loss_code = RowOutcomeCode.LOST
        self._are_submissions_held = False
        self._session_id = NO_SESSION
        self._high_water_mark = BEFORE_FIRST
        self.lock_loader = LockTableLoader(partition_id, limits)
        self.proved_ms: int | None = None

    # -----------------------------------------------------------------------------------------
    # state and counters

    @property
    def high_water_mark(self) -> TransactionId:
        """The last committed ID in the session that was opened last."""
        return self._high_water_mark

    @property
    def queued_bytes(self) -> int:
        """The size of the requests that wait in the lanes, in bytes."""
        return self._lanes.queued_bytes

    @property
    def in_flight_bytes(self) -> int:
        """The size of the records that were admitted but are not final, in bytes."""
        return self._in_flight.size_bytes

    @property
    def unsubmitted_count(self) -> int:
        """The number of IDs of rows that are not submitted yet (rule 10)."""
        return self._in_flight.unsubmitted_count

    def due_ms(self, now_ms: int) -> int | None:
        """When `process_slice` has work next; None if only a commit or a request brings work."""
        at_ms = earliest(self._next_request(now_ms)[1], self._lock_queues.due_ms)
        at_ms = earliest(at_ms, self._dependent_appends.waiting.due_ms)
        at_ms = earliest(at_ms, self._gathered_draft_due_ms(now_ms))
        return earliest(at_ms, self.lock_loader.due_ms(now_ms))

    def _gathered_draft_due_ms(self, now_ms: int) -> int | None:
        """Return when the gathered draft must be submitted (rule 10).

        Return None if there is no draft, or if the draft waits for the commit of a batch.
        """
        in_flight = self._in_flight
        if in_flight.draft is None or not self._is_open or len(in_flight):
            return None
        return (
            now_ms
            if self._are_submissions_held
            else self._dependent_appends.gathering_end_ms(in_flight.submitted_ms)
        )

    @property
    def locks(self) -> LockTable | None:
        """The lock table of the partition; None before the first session."""
        return self._lock_table

    # -----------------------------------------------------------------------------------------
    # the store session

    def on_session_settled(
        self,
        opened: SessionOpened,
        last: TransactionId,
        *,
        follows_own_session: bool,
        stamp_ms: int = 0,
    ) -> list[AppendOutcome]:
        """A session has opened and earlier sessions are settled: accept appends from now on.

        `last`: appends of earlier sessions are in the log up to this ID. `follows_own_session`: no
        other owner can have written since the previous session. If another owner can have written,
        all locks count as written at the high-water mark until `lock_loader` has queried the
        storages. `stamp_ms` is the log's last commit stamp, because the clock of this server may be
        behind that of the last owner.
        """
        assert not self._is_open
        assert last <= opened.high_water_mark
        out: list[AppendOutcome] = []
        self._high_water_mark = opened.high_water_mark
        self._session_id, self._admission.generation = opened.session_id, opened.generation
        self._completions.session_id = opened.session_id
        self._completions.high_water_mark = opened.high_water_mark
        for settled in self._in_flight.pop_settled_batches(last):
            self._finish_batch(settled, out, now_ms=None, is_owner=follows_own_session)
        lost_batches, submitted_last = self._in_flight.pop_lost_batches()
        self.rejections.drop_lost(min(last, submitted_last))
        for lost_batch in lost_batches:
            for pending in lost_batch.appends:
                if pending.mark_if_lost(min(last, submitted_last), self._loss_code):
                    self._mounts.require_remount(pending.req_id.client_id)
                self._finish_part(pending, out)
            out.extend(BarrierReached(token) for token in lost_batch.waiting_tokens)
        self._in_flight.begin(opened.high_water_mark, opened.chain, stamp_ms)
        if self._lock_table is None:
            self._lock_table = LockTable(self._limits.lock_slot_count, opened.high_water_mark)
        elif follows_own_session:
            self._lock_table.undo_entries_above(opened.high_water_mark)
        else:
            self._lock_table.reset(opened.high_water_mark)
        if not follows_own_session:
            self.lock_loader.begin(self._lock_table, LogEnd(opened.high_water_mark, opened.chain))
        self._is_open = True
        self._are_submissions_held = False
        self._dependent_appends.on_session_opened(opened.session_id)
        return out

    def on_committed(
        self, last: TransactionId, chain: Chain, *, now_ms: int
    ) -> list[AppendOutcome]:
        """The high-water mark has moved to `last`, where the log's hash chain is `chain`."""
        assert self._is_open
        assert self._high_water_mark <= last < self._in_flight.next_id
        self._high_water_mark = self._completions.high_water_mark = last
        assert self._lock_table is not None
        self._lock_table.on_committed(last)
        out: list[AppendOutcome] = []
        for batch in self._in_flight.pop_committed_batches(last, chain, now_ms):
            self.proved_ms = batch.submitted_ms
            if batch.appends:
                self.counters.took_ms.append(now_ms - batch.appends[0].received_ms)
            self._finish_batch(batch, out, now_ms=now_ms)
        return out

    def hold_submissions(self) -> None:
        """Submit nothing more in this session, so that it can end without appends in flight."""
        self._are_submissions_held = True

    def on_session_closed(
        self, loss_reason: RowOutcomeCode = RowOutcomeCode.LOST
    ) -> list[AppendOutcome]:
        """The session has ended; appends in flight wait until the next session is settled.

        `loss_reason` is the reason to report for lost rows, for example NO_SPACE.
        """
        self._is_open = False
        self.lock_loader.stop()
        self._loss_code = loss_reason
        self._in_flight.stop()
        self._dependent_appends.on_session_closed()
        # Report final rejections now: it may take long until the next session opens.
        return self._completions.answer_rejected(
            self._lock_queues.take_all()
        ) + self._answer_dependent_writers(self._dependent_appends.waiting.take_all())

    def abandon(self) -> tuple[list[PendingAppend], list[PendingAppend], list[AppendOutcome]]:
        """Release the partition and drop its appends.

        Return the appends that are not in the log, the appends that may be in the log, and the
        outcomes to carry out.
        """
        self._is_open = False
        self.lock_loader.stop()
        self._dependent_appends.on_session_closed()
        out: list[AppendOutcome] = []
        queued: list[PendingAppend] = []
        # Keyed by `id`, because a request may have rows in several batches and in its lane.
        appends_in_doubt: dict[int, PendingAppend] = {}
        for lost_batch in self._in_flight.pop_lost_batches()[0]:
            for pending in lost_batch.appends:
                if isinstance(lost_batch, BatchDraft) and isinstance(pending, PendingSingle):
                    queued.append(pending)  # This append was not submitted.
                else:
                    appends_in_doubt[id(pending)] = pending
            out.extend(BarrierReached(token) for token in lost_batch.waiting_tokens)
        for pending in self._lanes.drop_all():
            if isinstance(pending, PendingBatch) and pending.validated_count:
                appends_in_doubt[id(pending)] = pending
            else:
                queued.append(pending)
        # Rejected appends are not in the log either.
        queued += [*self._lock_queues.take_all(), *self._dependent_appends.waiting.take_all()]
        out += self._completions.abandon()
        self.rejections.clear()
        return queued, list(appends_in_doubt.values()), out

    # -----------------------------------------------------------------------------------------
    # clients

    def receive(
        self,
        connection: ConnectionId,
        message: AppendRequest | AppendBatch,
        *,
        cost_bytes: int,
        now_ms: int,
        over_limit: Overloaded | None = None,
    ) -> list[AppendOutcome]:
        """Queue a request; reject it if the queue is full, or if `over_limit` is given.

        `over_limit` is the error if the principal of the request is over a limit.
        """
        flush_group = self._completions.add_request()
        pending: PendingAppend
        req_id = message.req_id
        mount = self._mounts.mount_number_on_arrival(req_id.client_id, connection)
        if isinstance(message, AppendRequest):
            pending = PendingSingle(connection, cost_bytes, message, flush_group, now_ms, mount)
        else:
            pending = PendingBatch(
                connection, cost_bytes, message, req_id, flush_group, now_ms, mount
            )
        out: list[AppendOutcome] = []
        if over_limit is not None:
            self._mounts.note_rejected_append(req_id.client_id, connection)
            self._completions.answer_error(
                pending, over_limit, out
            )  # not decoded, because this would be wasted work
            return out
        if self._lanes.is_over_share(connection, cost_bytes, self._limits.queue_bytes_max):
            self._mounts.note_rejected_append(req_id.client_id, connection)
            self._admission.reject(pending, RowOutcomeCode.OVERLOADED, out)
            return out
        self._lanes.push(pending)
        return out

    def close(self, connection: ConnectionId) -> list[AppendOutcome]:
        """Drop the queued requests of a closed connection; its batches in flight continue."""
        out: list[AppendOutcome] = []
        for pending in self._lanes.drop(connection):
            if isinstance(pending, PendingBatch) and pending.in_flight_count:
                pending.reject(RowOutcomeCode.NOT_MOUNTED)  # It ends with its last batch in flight.
            else:
                self._completions.remove_request(pending, out)
        for rejected in (
            *self._lock_queues.drop(connection),
            *self._dependent_appends.waiting.drop(connection),
        ):
            self._completions.remove_request(rejected, out)
        return out

    def add_barrier(self, token: int) -> list[AppendOutcome]:
        """Return `BarrierReached` when all appends now in flight are final. Mounts use it."""
        last = self._in_flight.last
        if last is None:
            return [BarrierReached(token)]
        last.waiting_tokens.append(token)
        return []

    def answer_ahead_of_log(
        self, pending: PendingAppend, *, is_proved: bool
    ) -> list[AppendOutcome]:
        """Answer a request that has rows ahead of the log (rule 9)."""
        return self._completions.answer_ahead_of_log(pending, is_proved=is_proved)

    def flush(self, token: int) -> list[AppendOutcome]:
        """Return `BarrierReached` when all appends received until now are final."""
        return self._completions.flush(token)

    # -----------------------------------------------------------------------------------------
    # a turn

    def process_slice(self, *, now_ms: int, wall_ms: int) -> list[AppendOutcome]:
        """Take requests of about one slice from the lanes, validate and submit them (rule 5)."""
        in_flight, self.rejections.wall_ms = self._in_flight, wall_ms
        draft, in_flight.draft = in_flight.draft or BatchDraft(), None
        draft.outcomes = [*self.lock_loader.load_slice(now_ms)]
        draft.outcomes += self._completions.answer_rejected(self._lock_queues.take_due(now_ms))
        draft.outcomes += self._answer_dependent_writers(
            self._dependent_appends.waiting.take_due(now_ms)
        )
        self._take_slice(draft, now_ms)
        if draft.parts and self._must_keep_draft(draft, now_ms):
            in_flight.draft = draft
            draft.outcomes, out = [], draft.outcomes
            return out
        batch = in_flight.submit(draft, self._session_id, now_ms=now_ms, wall_ms=wall_ms)
        if batch is not None:
            self.counters.batches += 1
            self.counters.accepted += batch.last - batch.first + 1
            draft.outcomes.append(SubmitBatch(batch))
        return draft.outcomes

    def _take_slice(self, draft: BatchDraft, now_ms: int) -> None:
        """Take requests of about one slice from their lanes, and validate them into the draft."""
        group: list[PendingSingle] = []
        bytes_left, rows_left = self._limits.slice_bytes_max, self._limits.slice_rows_max
        while bytes_left > 0 and rows_left > 0:
            pending, _ = self._next_request(now_ms)
            if pending is None:
                break
            if pending.is_large and (group or draft.appends):
                draft.must_submit_now = True
                break
            bytes_left -= pending.cost_bytes
            if not pending.is_large:
                self._throttle.on_small_request_started(pending.connection, now_ms)
            if isinstance(pending, PendingSingle):
                rows_left -= 1
                group = self._take_single(pending, group, draft, now_ms)
            else:
                self._validate_group(group, draft)
                group = []
                rows_left -= self._take_rows(pending, draft, now_ms)
            if pending.is_large:
                draft.is_large = draft.must_submit_now = True
                break
        self._validate_group(group, draft)

    def _take_single(
        self, pending: PendingSingle, group: list[PendingSingle], draft: BatchDraft, now_ms: int
    ) -> list[PendingSingle]:
        """Take a single append from its lane, and check it.

        Return the group of appends to be validated together next.
        """
        self._lanes.take(with_large=pending.is_large)
        if not self._admission.try_admit(pending, draft.outcomes):
            return group
        pending.session_id = self._session_id
        if not pending.is_dependent:
            group.append(pending)
            return group
        self._validate_group(group, draft)
        self._validate_dependent(pending, draft, now_ms)
        return []

    def _must_keep_draft(self, draft: BatchDraft, now_ms: int) -> bool:
        """Whether the draft must wait: by rule 10, or because the session has closed."""
        if not self._is_open:
            return True
        if draft.must_submit_now or draft.size_bytes >= self._limits.slice_bytes_max:
            return False
        if len(self._in_flight):
            return True
        until_ms = self._dependent_appends.gathering_end_ms(self._in_flight.submitted_ms)
        return now_ms < until_ms and not self._are_submissions_held and not draft.waiting_tokens

    def _next_request(self, now_ms: int) -> tuple[PendingAppend | None, int | None]:
        """Return the request to take now, and when the next turn may be.

        The request is None if none may be taken. The time is None if the next turn depends on an
        event.
        """
        if not self._lanes.queued_bytes or not self._is_open or self._are_submissions_held:
            return None, None
        if self.lock_loader.is_holding_appends(now_ms):
            return None, None
        head = self._lanes.peek()
        if head is None or len(self._in_flight) >= self._limits.in_flight_batches_max:
            return None, None
        bytes_max, at_ms = self._limits.in_flight_bytes_max, None
        if head.is_large:
            if self._in_flight.submitted_bytes < bytes_max:
                at_ms = self._throttle.large_allowed_at_ms(now_ms)
                if at_ms == now_ms:
                    return head, now_ms
            head = self._lanes.peek(with_large=False)
        # The limit for small requests is twice as high, so they do not wait for the commit of large
        # ones.
        if head is not None and self._in_flight.submitted_bytes < 2 * bytes_max:
            return head, now_ms
        return None, at_ms

    def _take_rows(self, pending: PendingBatch, draft: BatchDraft, now_ms: int) -> int:
        """Take a batch or a piece of it from its lane, and validate it; return its number of rows.

        Only large batches are split. A small one is taken whole, together with other requests.
        """
        piece_bytes = self._throttle.piece_bytes(now_ms) if pending.is_large else None
        if not self._admission.try_decode(pending, draft.outcomes):
            self._lanes.take(with_large=pending.is_large)
            return 0
        start, stop = pending.validated_count, pending.piece_end(piece_bytes)
        if reason := self._admission.invalid_mount_code(pending):
            self._lanes.take(with_large=pending.is_large)
            pending.reject(reason)
            self._completions.answer_if_final(pending, draft.outcomes)
            return 0
        if stop < pending.ids.size:
            self._lanes.charge_part(pending.cost_up_to(stop) - pending.cost_up_to(start))
        else:
            self._lanes.take(with_large=pending.is_large)
        assert self._lock_table is not None
        if not start:
            pending.session_id = self._session_id
        draft.must_submit_now = True
        self._add_piece(
            validate_rows(pending, stop, self._lock_table, self._in_flight_range), draft
        )
        return stop - start

    def _validate_group(self, group: list[PendingSingle], draft: BatchDraft) -> None:
        if group:
            assert self._lock_table is not None
            draft.must_submit_now = True
            self._add_piece(validate_singles(group, self._lock_table, self._in_flight_range), draft)

    def _validate_dependent(self, pending: PendingSingle, draft: BatchDraft, now_ms: int) -> None:
        """Validate a dependent append (rule 10)."""
        assert self._lock_table is not None
        message = pending.message
        assert isinstance(message, AppendFollowing)
        last = TransactionId(self._in_flight.next_id - 1)
        self._dependent_appends.begin(last)
        has_seen = message.session_id != NO_SESSION
        if has_seen and not self._dependent_appends.knows_predecessors(message, last):
            pending.reject_by_lock(self._high_water_mark)
            self._completions.answer_final(pending, draft.outcomes)
            return
        mark = last if has_seen else self._high_water_mark
        piece = validate_singles(
            [pending], self._lock_table, InFlightRange(mark, self._in_flight.next_id)
        )
        if pending.reason is RowOutcomeCode.LOCK and self._dependent_appends.has_predecessors(
            pending
        ):
            notified = self._dependent_appends.waiting.on_rejected(pending, now_ms)
            draft.outcomes += self._answer_dependent_writers(notified)
            return
        if pending.conflict > self._high_water_mark:
            piece = ValidatedPiece(None, [pending], [])
        self._add_piece(piece, draft)
        if piece.part is not None:
            notified = self._dependent_appends.waiting.on_writer_admitted(pending, now_ms)
            draft.outcomes += self._answer_dependent_writers(notified)

    def _answer_dependent_writers(self, rejected: Iterable[PendingSingle]) -> list[AppendOutcome]:
        return self._completions.answer_dependent_writers(
            rejected, self._dependent_appends, self._in_flight.next_id
        )

    @property
    def _in_flight_range(self) -> InFlightRange:
        return InFlightRange(self._high_water_mark, self._in_flight.next_id)

    def _add_piece(self, piece: ValidatedPiece, draft: BatchDraft) -> None:
        if piece.part is not None:
            draft.add(piece.part, piece.locks, piece.lock_rows)
            self._in_flight.next_id = TransactionId(piece.part.last + 1)
            self._dependent_appends.on_rows_admitted(piece)
        for pending in piece.unsettled_appends:
            if isinstance(pending, PendingBatch):
                pending.in_flight_count += 1
            draft.appends.append(pending)
        for pending in piece.rejected_appends:
            self._completions.answer_if_final(pending, draft.outcomes)

    # -----------------------------------------------------------------------------------------
    # the end of a batch

    def _finish_batch(
        self,
        finished: InFlightBatch,
        out: list[AppendOutcome],
        *,
        now_ms: int | None,
        is_owner: bool = True,
    ) -> None:
        batch = finished.batch
        self.counters.committed += batch.last - batch.first + 1
        self.counters.committed_bytes += len(batch.records)
        if is_owner:  # Otherwise another owner may have written other batches since.
            out.append(BatchCommitted(finished.entry, batch))
        lock_waiters: list[PendingSingle] = []
        for pending in finished.appends:
            if now_ms is not None and self._may_wait_in_lock_queue(pending):
                lock_waiters.append(pending)
            else:
                self._finish_part(pending, out)
        if now_ms is not None:
            took_ms = now_ms - finished.submitted_ms
            out += self._completions.answer_rejected(
                self._lock_queues.on_committed(
                    finished.appends, lock_waiters, took_ms=took_ms, now_ms=now_ms
                )
            )
        out.extend(BarrierReached(token) for token in finished.waiting_tokens)

    def _may_wait_in_lock_queue(self, pending: PendingAppend) -> TypeGuard[PendingSingle]:
        if not is_contending(pending):
            return False
        # The writer must still be mounted; otherwise no notification would reach it later.
        return (
            pending.mount
            == self._mounts.mount_number(pending.req_id.client_id, pending.connection)
            > 0
        )

    def _finish_part(self, pending: PendingAppend, out: list[AppendOutcome]) -> None:
        """A batch with rows of a request is final. Answer the request if all its rows are final."""
        if isinstance(pending, PendingBatch):
            pending.in_flight_count -= 1
        self._completions.answer_if_final(pending, out)
