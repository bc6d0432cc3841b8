"""The outgoing appends of one partition: limited in number, and sent in groups.

Rows that are appended in the same iteration of the event loop are sent in one frame (a submission).
So a thousand small appends cost about as much as one batch.

Rules:
    1. The window (the limit of appends in flight) counts every row from `append` until its outcome
       is reported. When the limit is reached, callers wait in order. No row is dropped.
    2. Rows are sent in the order in which they were appended.
    3. If a row of `append` is known not to be in the log, for a temporary reason, the row is still
       valid. So the client sends the row again until its deadline. A row that a lock has rejected
       and a pipelined dependent append are never sent again.
    4. Rule 2 also holds for rows that are sent again (held rows). The held rows wait until every
       submission that was in flight with them has its outcome. Rows and batches that were appended
       later wait for the held rows. If a submission waits in the stream and was not sent yet, the
       stream returns it as lost, so that its rows are also held
       (`outcome_tracker.Submission.keeps_order`).
    5. A wait for earlier appends (a flush) does not include later appends. If it did, it might
       never end.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from waltz_core import errors
from waltz_core.client.model.predecessors import PipelinedState
from waltz_core.client.stream.append_counts import AppendCounts
from waltz_core.client.stream.outcome_tracker import BatchOutcome, SingleRow, Submission
from waltz_core.records.batches import encode_append
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    RECORD_OVERHEAD_BYTES,
    PartitionId,
    TransactionId,
)
from waltz_core.spans import TracedOutcome, WaltzTracer
from waltz_core.wire.messages import RowOutcomeCode

# Up to this number, rows are sent as single appends; more rows are cheaper as one Arrow batch.
SINGLES_MAX = 8
# While at least this many submissions are in flight, rows are gathered. They are sent when one of
# the submissions has its outcome, or when a new submission is full. So under load, many small
# writers share a frame. Without load, no row waits.
UNANSWERED_SUBMISSIONS_MIN = 1
# The maximum time for which rows are gathered, in seconds. For a contended lock, the server delays
# the rejection of a row, and other rows must not wait for this answer.
GATHERING_S_MAX = 0.005
# Delays before rows are sent again, in seconds. The second delay is for a full disk or a full
# queue.
RESEND_DELAY_S = 0.005
RESEND_WHEN_FULL_DELAY_S = 0.1

_TRANSIENT_ERRORS: dict[int, type[errors.WaltzError]] = {
    RowOutcomeCode.LOST: errors.SessionLost,
    RowOutcomeCode.NOT_MOUNTED: errors.NotMounted,
    RowOutcomeCode.GENERATION: errors.NotMounted,
    RowOutcomeCode.NO_SPACE: errors.NoSpace,
    RowOutcomeCode.OVERLOADED: errors.Overloaded,
}
_QUEUE_OR_DISK_FULL_OUTCOMES = (RowOutcomeCode.NO_SPACE, RowOutcomeCode.OVERLOADED)


@dataclass(slots=True)
class _FlushGroup:
    """The appends between two calls of `wait_for_earlier` (rule 5).

    `unfinished_count` is the number of appends without an outcome; callers in `waiting` wait for
    all of them.
    """

    unfinished_count: int = 0
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)


_NO_FLUSH_GROUP = _FlushGroup()  # the group of a row that was not appended yet


class RowOutcome(NamedTuple):
    """The outcome of one row; see `BatchOutcome`."""

    reason: int
    transaction_id: TransactionId
    conflicting: TransactionId
    high_water_mark: TransactionId
    pipelined_state: PipelinedState | None = None


class PendingRow:
    """One transaction to append, and the future of its outcome."""

    __slots__ = (
        "added_s",
        "append_locks",
        "data",
        "deadline_s",
        "flush_group",
        "future",
        "header",
        "is_attempt",
        "mark",
        "number",
        "pipelined_state",
        "read_locks",
        "size_bytes",
        "write_locks",
    )

    def __init__(self, data: bytes, header: int, mark: TransactionId) -> None:
        self.data = data
        self.size_bytes = len(data) + RECORD_OVERHEAD_BYTES  # the bytes that it uses in the window
        self.header = header
        self.mark = mark
        self.write_locks: tuple[int, ...] = ()
        self.read_locks: tuple[int, ...] = ()
        self.append_locks: tuple[int, ...] = ()
        self.deadline_s = 0.0
        self.added_s = 0.0
        self.number = 0  # the position in the order of `append`
        self.flush_group = _NO_FLUSH_GROUP
        # Whether the row is an attempt of a context. Then its future always returns a RowOutcome.
        # Otherwise the future returns the transaction ID, or raises an error.
        self.is_attempt = False
        # The appends in flight that the row depends on, in addition to its mark, if any.
        self.pipelined_state: PipelinedState | None = None
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def set_pipelined_state(
        self, pipelined_state: PipelinedState, mark: TransactionId | None
    ) -> None:
        """Make the row depend on appends in flight; `mark` is the mark of the state, if known."""
        if mark is None and pipelined_state.has_received_predecessors:
            mark = pipelined_state.base_mark
        mark = self.mark if mark is None else mark
        if mark < pipelined_state.base_mark:  # the client does not know the transactions in between
            self.mark, self.pipelined_state = pipelined_state.without_predecessors_at(mark)
        else:
            locks = (*self.write_locks, *self.read_locks)
            self.mark, self.pipelined_state = pipelined_state.mark_and_state(mark, locks)

    @property
    def row_count(self) -> int:
        """Always 1; a batch has more rows."""
        return 1

    @property
    def may_resend(self) -> bool:
        """Whether the client may send the row again unchanged (rule 3)."""
        return not self.is_attempt and (
            self.pipelined_state is None or not self.pipelined_state.has_received_predecessors
        )


class AppendWindow:
    """The rows and bytes that one partition may have in flight (rule 1)."""

    def __init__(self, *, rows_max: int, bytes_max: int) -> None:
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._rows = 0
        self._bytes = 0
        self._waiting: OrderedDict[asyncio.Future[None], tuple[int, int]] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether no rows are in flight."""
        return self._rows == 0

    def try_take(self, rows: int, size_bytes: int) -> bool:
        """Reserve space and return True if there is enough and no other caller waits for it."""
        if self._waiting or not self._fits(rows, size_bytes):
            return False
        self._rows += rows
        self._bytes += size_bytes
        return True

    async def take(self, rows: int, size_bytes: int) -> None:
        """Reserve space; wait until there is enough."""
        if self.try_take(rows, size_bytes):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = rows, size_bytes
        try:
            await future
        except asyncio.CancelledError:
            # NB: this caller is cancelled. Later callers may need less space than this one, and it
            # may take long until space is released again.
            if self._waiting.pop(future, None) is not None:
                self.release(0, 0)
            elif not future.cancelled():
                self.release(rows, size_bytes)
            raise

    def release(self, rows: int, size_bytes: int) -> None:
        """Release reserved space, and pass it to waiting callers in order."""
        self._rows -= rows
        self._bytes -= size_bytes
        assert self._rows >= 0
        assert self._bytes >= 0
        while self._waiting:
            future, (more_rows, more_bytes) = next(iter(self._waiting.items()))
            if not future.done():
                if not self._fits(more_rows, more_bytes):
                    return
                self._rows += more_rows
                self._bytes += more_bytes
                future.set_result(None)
            del self._waiting[future]

    def _fits(self, rows: int, size_bytes: int) -> bool:
        # A batch larger than the whole window is sent when no other row is in flight.
        return self._rows == 0 or (
            self._rows + rows <= self._rows_max and self._bytes + size_bytes <= self._bytes_max
        )


PostSubmission: TypeAlias = Callable[[Submission], None]


class ReportOrder:
    """Keeps one writer's batches of one partition in order, even when some of them are lost.

    The writer must send lost rows again before any later batch. But the writer may append a later
    batch before it has processed the loss, and this batch must not enter the log.

    `reported_count` is the number of outcomes with lost rows that the client has reported.
    `processed_count` is the number of these outcomes that the writer has processed. While the
    counts differ, the client does not send batches, but reports them as LOST, too.
    """

    __slots__ = ("processed_count", "reported_count")

    def __init__(self) -> None:
        self.reported_count = 0
        self.processed_count = 0


class _BatchSubmission(NamedTuple):
    """A submission of `append_batch`."""

    future: asyncio.Future[BatchOutcome]
    row_count: int
    payload: bytes | memoryview
    mark: TransactionId
    order: ReportOrder | None
    processed_count: int  # the writer's `processed_count` at the append
    flush_group: _FlushGroup
    added_s: float

    @property
    def size_bytes(self) -> int:
        """The bytes that the batch uses in the window."""
        return len(self.payload)

    def finish(self, outcome: BatchOutcome) -> None:
        """Pass the outcome to the writer."""
        if self.order is not None and np.isin(outcome.reasons, list(_TRANSIENT_ERRORS)).any():
            self.order.reported_count += 1
        if not self.future.done():
            self.future.set_result(outcome)


class Appends:
    """The appends of one partition that are in flight on this client."""

    def __init__(
        self,
        partition_id: PartitionId,
        window: AppendWindow,
        post: PostSubmission,
        *,
        batch_rows: int,
        batch_bytes: int,
        tracer: WaltzTracer | None = None,
    ) -> None:
        self._partition_id = partition_id
        self._tracer = tracer
        self.window = window
        self.counts = AppendCounts()
        self._post = post
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._loop = asyncio.get_running_loop()
        # Rows to send, and batches that wait for held rows.
        self._gathered: list[PendingRow | _BatchSubmission] = []
        self._gathered_bytes = 0
        self._is_scheduled = False
        self._has_finished = False
        self._gather_timer: asyncio.TimerHandle | None = None
        self._submissions: dict[int, list[PendingRow] | _BatchSubmission] = {}
        self._token = 0
        self._added_count = 0
        # Rows to send again (rule 4), when the submissions up to the barrier are final and the
        # pause has ended.
        self._held_rows: list[PendingRow] = []
        self._barrier_token = 0
        self._pause: asyncio.Handle | None = None
        # Kept here, because a timer handle of uvloop does not return its time after this time has
        # passed.
        self._pause_until_s = 0.0
        self._flush_groups: deque[_FlushGroup] = deque((_FlushGroup(),))

    @property
    def has_pending(self) -> bool:
        """Whether any append has no outcome yet."""
        return bool(self._submissions) or bool(self._gathered) or bool(self._held_rows)

    # --- in

    def add(self, row: PendingRow) -> None:
        """Append a row that has reserved its space in the window."""
        self._added_count += 1
        row.number = self._added_count
        row.added_s = self._loop.time()
        row.flush_group = self._join_flush_group()
        if self._tracer is not None:
            self._tracer.follow_append(row.future, self._partition_id, 1, _outcome_of_row)
        self._gathered.append(row)
        self._gathered_bytes += row.size_bytes
        if len(self._gathered) >= self._batch_rows or self._gathered_bytes >= self._batch_bytes:
            self._send_gathered()
        elif row.pipelined_state is not None:
            self._send_gathered()  # Do not gather: other writers of the same lock wait for it.
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send_or_gather)

    def add_batch(
        self,
        payload: bytes | memoryview,
        row_count: int,
        mark: TransactionId,
        order: ReportOrder | None,
    ) -> asyncio.Future[BatchOutcome]:
        """Append a batch that has reserved its space in the window; return its future."""
        # NB: read the count now. The writer may process a loss while the batch waits. But the
        # writer appended the batch before it processed the loss, so the batch must be reported
        # LOST.
        processed_count = 0 if order is None else order.processed_count
        future: asyncio.Future[BatchOutcome] = self._loop.create_future()
        if self._tracer is not None:
            self._tracer.follow_append(future, self._partition_id, row_count, _outcome_of_batch)
        batch = _BatchSubmission(
            future,
            row_count,
            payload,
            mark,
            order,
            processed_count,
            self._join_flush_group(),
            self._loop.time(),
        )
        self._gathered.append(batch)
        self._gathered_bytes += batch.size_bytes
        self._send_gathered()  # rule 2
        return batch.future

    async def wait_for_earlier(self) -> None:
        """Wait until all earlier appends have their outcomes (rule 5)."""
        if self._flush_groups[-1].unfinished_count:
            self._flush_groups.append(_FlushGroup())
        if len(self._flush_groups) > 1:
            future: asyncio.Future[None] = self._loop.create_future()
            waiting = self._flush_groups[-2].waiting
            waiting[future] = None
            try:
                await future
            finally:  # remove the future of a cancelled caller, because outcomes may take days
                waiting.pop(future, None)

    def _join_flush_group(self) -> _FlushGroup:
        flush_group = self._flush_groups[-1]
        flush_group.unfinished_count += 1
        return flush_group

    # --- out

    def _send_or_gather(self) -> None:
        self._is_scheduled = False
        if self._has_finished or len(self._submissions) < UNANSWERED_SUBMISSIONS_MIN:
            self._send_gathered()
        elif self._gather_timer is None:
            self._gather_timer = self._loop.call_later(GATHERING_S_MAX, self._send_gathered)

    def _send_gathered(self) -> None:
        self._has_finished = False
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None
        if not self._gathered or self._held_rows:  # rule 4
            return
        rows, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for (is_batch, is_alone), group in groupby(rows, _gathering_key):
            if is_batch:
                for batch in group:
                    assert isinstance(batch, _BatchSubmission)
                    self._send_batch(batch)
            else:
                self._send_run(
                    [row for row in group if isinstance(row, PendingRow)], is_alone=is_alone
                )

    def _send_batch(self, batch: _BatchSubmission) -> None:
        order = batch.order
        if order is not None and order.reported_count != batch.processed_count:
            lost_outcome = BatchOutcome.all_rejected(
                batch.row_count, RowOutcomeCode.LOST, high_water_mark=BEFORE_FIRST
            )
            self._finish_batch(batch, lost_outcome)
            self._notify_flushes()
            return
        token = self._next_token()
        self._submissions[token] = batch
        crc, keeps_order = crc32(batch.payload), order is not None
        self._post(Submission(token, batch.row_count, batch.mark, batch.payload, crc, keeps_order))

    def _send_run(self, rows: list[PendingRow], *, is_alone: bool) -> None:
        if is_alone or len(rows) <= SINGLES_MAX:
            for row in rows:
                self._send_single(row)
        else:
            for part in _split_rows(rows, self._batch_rows, self._batch_bytes):
                self._send_rows(part)

    def _send_single(self, row: PendingRow) -> None:
        token = self._next_token()
        self._submissions[token] = [row]
        locks = (row.write_locks, row.read_locks, row.append_locks)
        single = SingleRow(row.header, row.data, *locks, row.pipelined_state)
        crc, keeps_order = crc32(row.data), not row.is_attempt
        self._post(Submission(token, 1, row.mark, single, crc, keeps_order))

    def _send_rows(self, rows: list[PendingRow]) -> None:
        first_mark = rows[0].mark
        marks = [row.mark for row in rows]
        payload = encode_append(
            [row.header for row in rows],
            [row.data for row in rows],
            write_locks=[row.write_locks for row in rows],
            read_locks=[row.read_locks for row in rows],
            append_locks=[row.append_locks for row in rows],
            marks=None if marks.count(first_mark) == len(marks) else marks,
        )
        token = self._next_token()
        self._submissions[token] = rows
        keeps_order = not all(row.is_attempt for row in rows)
        self._post(Submission(token, len(rows), first_mark, payload, crc32(payload), keeps_order))

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    # --- outcomes

    def on_submission_settled(self, token: int, outcome: BatchOutcome) -> None:
        """Process the outcomes of all rows of a submission."""
        submission = self._submissions.pop(token)
        if isinstance(submission, _BatchSubmission):
            self._finish_batch(submission, outcome)
        else:
            self._settle_rows(submission, outcome)
        self._on_submission_finished()

    def _finish_batch(self, batch: _BatchSubmission, outcome: BatchOutcome) -> None:
        self._end_append(batch)
        self.counts.count_outcomes(outcome.reasons.tobytes(), self._loop.time() - batch.added_s)
        batch.finish(outcome)

    def on_rejected(self, token: int, error: errors.WaltzError) -> None:
        """Process an error that ends a submission without an outcome for its rows."""
        submission = self._submissions.pop(token)
        if isinstance(submission, _BatchSubmission):
            self._end_append(submission)
            self.counts.count_error(error, submission.row_count)
            if not submission.future.done():
                submission.future.set_exception(error)
        elif isinstance(error, errors.TooLarge) and len(submission) > 1:
            # The server's limit for one frame is lower than this client has assumed.
            middle = len(submission) // 2
            self._send_rows(submission[:middle])
            self._send_rows(submission[middle:])
        else:
            self.counts.count_error(error, len(submission))
            for row in submission:
                self._end_append(row)
                if not row.future.done():
                    row.future.set_exception(error)
        self._on_submission_finished()

    def abandon(self, error: errors.WaltzError) -> None:
        """Fail all appends with this error: no further answers will arrive."""
        rows = [*self._held_rows, *self._gathered]
        # Clear these first. Without this, rows that wait for a submission would be sent when this
        # submission fails.
        self._held_rows, self._gathered, self._gathered_bytes = [], [], 0
        for token in list(self._submissions):
            self.on_rejected(token, error)
        for row in rows:
            self._end_append(row)
            self.counts.count_error(error, row.row_count)
            if not row.future.done():
                row.future.set_exception(error)
        self._on_submission_finished()

    def _settle_rows(self, rows: list[PendingRow], outcome: BatchOutcome) -> None:
        resent_rows: list[PendingRow] = []
        final_reasons: list[int] = []
        now_s = self._loop.time()
        for row, transaction_id, reason, conflicting in zip(
            rows,
            outcome.transaction_ids.tolist(),
            outcome.reasons.tolist(),
            outcome.conflicting.tolist(),
            strict=True,
        ):
            if row.may_resend and reason in _TRANSIENT_ERRORS and now_s < row.deadline_s:
                resent_rows.append(row)
                continue
            self._end_append(row)
            final_reasons.append(reason)
            if row.future.done():
                continue
            ids = (TransactionId(transaction_id), TransactionId(conflicting))
            result = RowOutcome(reason, *ids, outcome.high_water_mark, outcome.pipelined_state)
            if row.is_attempt:
                row.future.set_result(result)
            elif reason == RowOutcomeCode.COMMITTED:
                row.future.set_result(TransactionId(transaction_id))
            else:
                error = error_of_row(self._partition_id, row, result, outcome.detail)
                if isinstance(error, errors.Overloaded):
                    error.retry_after_ms = outcome.retry_after_ms
                if isinstance(error, errors.LockFailed) and outcome.pipelined_state is not None:
                    error.pipelined_state = outcome.pipelined_state
                    error.conflicting = outcome.pipelined_state.mark
                row.future.set_exception(error)
        self.counts.count_outcomes(bytes(final_reasons), now_s - rows[0].added_s)
        if resent_rows:
            self.counts.retried += len(resent_rows)
            is_full = bool(np.isin(outcome.reasons, _QUEUE_OR_DISK_FULL_OUTCOMES).any())
            self._hold_rows(resent_rows, RESEND_WHEN_FULL_DELAY_S if is_full else RESEND_DELAY_S)

    def _hold_rows(self, rows: Sequence[PendingRow], pause_s: float) -> None:
        """Send rows again after a pause, together with all other held rows, in order."""
        self._held_rows += rows
        self._barrier_token = self._token
        until_s = self._loop.time() + pause_s
        if self._pause is not None:
            until_s = max(until_s, self._pause_until_s)
            self._pause.cancel()
        self._pause_until_s = until_s
        self._pause = self._loop.call_at(until_s, self._on_pause_ended)

    def _on_pause_ended(self) -> None:
        self._pause = None
        self._send_held_rows()

    def _send_held_rows(self) -> None:
        """Send the held rows again if rule 4 permits it now."""
        if not self._held_rows or self._pause is not None:
            return
        if self._submissions and next(iter(self._submissions)) <= self._barrier_token:
            return
        rows = sorted(self._held_rows, key=lambda row: row.number)
        self._held_rows = []
        self._gathered[:0] = rows
        self._gathered_bytes += sum(row.size_bytes for row in rows)
        self._send_gathered()

    def _end_append(self, append: PendingRow | _BatchSubmission) -> None:
        append.flush_group.unfinished_count -= 1
        assert append.flush_group.unfinished_count >= 0
        self.window.release(append.row_count, append.size_bytes)

    def _on_submission_finished(self) -> None:
        """A submission has its outcome: send the rows that were gathered in the meantime."""
        self._send_held_rows()
        self._has_finished = bool(self._gathered)
        if self._gathered and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send_or_gather)
        self._notify_flushes()

    def _notify_flushes(self) -> None:
        while len(self._flush_groups) > 1 and not self._flush_groups[0].unfinished_count:
            for future in self._flush_groups.popleft().waiting:
                if not future.done():
                    future.set_result(None)


def error_of_row(
    partition_id: PartitionId, row: PendingRow, outcome: RowOutcome, detail: str = ""
) -> errors.WaltzError:
    """Return the error that states why a row is not in the log; `detail` is from the server."""
    position = f"partition {partition_id}"
    if outcome.reason == RowOutcomeCode.LOCK:
        failed = errors.LockFailed(
            f"{position}: lock conflict, because transaction {outcome.conflicting} (or an earlier "
            "one) has written a lock of this transaction after the client's high-water mark "
            f"{row.mark}"
        )
        failed.conflicting = outcome.conflicting
        failed.high_water_mark = outcome.high_water_mark
        return failed
    if outcome.reason == RowOutcomeCode.AHEAD:
        return errors.ClientAheadOfLog(
            f"{position}: the client's high-water mark {row.mark} is above the log's "
            f"high-water mark {outcome.high_water_mark}. Hint: the client may be connected to "
            "another cluster, or the log has lost transactions."
        )
    if outcome.reason == RowOutcomeCode.TOO_LARGE:
        return errors.TooLarge(
            f"{position}: the server rejects a transaction with {len(row.data)} bytes of data as "
            "too large"
        )
    error_class = _TRANSIENT_ERRORS.get(outcome.reason, errors.Unavailable)
    name = RowOutcomeCode(outcome.reason).name
    cause = f"{name}: {detail}" if detail else name
    return error_class(
        f"{position}: the transaction was not appended ({cause}). Hint: append it again."
    )


def _gathering_key(append: PendingRow | _BatchSubmission) -> tuple[bool, bool]:
    """Return two flags: whether the append is a batch, and whether it is a row to send alone."""
    return isinstance(append, _BatchSubmission), isinstance(
        append, PendingRow
    ) and append.pipelined_state is not None


def _split_rows(rows: list[PendingRow], rows_max: int, bytes_max: int) -> list[list[PendingRow]]:
    """Split the rows into runs of at most `rows_max` rows and about `bytes_max` bytes."""
    if len(rows) <= rows_max and sum(row.size_bytes for row in rows) <= bytes_max:
        return [rows]
    parts: list[list[PendingRow]] = [[]]
    size_bytes = 0
    for row in rows:
        if parts[-1] and (len(parts[-1]) == rows_max or size_bytes + row.size_bytes > bytes_max):
            parts.append([])
            size_bytes = 0
        parts[-1].append(row)
        size_bytes += row.size_bytes
    return parts


def _outcome_of_row(result: TransactionId | RowOutcome) -> TracedOutcome:
    if not isinstance(result, RowOutcome):
        return TracedOutcome(result, 0)
    if result.reason == RowOutcomeCode.COMMITTED:
        return TracedOutcome(result.transaction_id, 0)
    return TracedOutcome(None, 1)


def _outcome_of_batch(result: BatchOutcome) -> TracedOutcome:
    committed = result.transaction_ids[result.reasons == RowOutcomeCode.COMMITTED]
    first = int(committed[0]) if committed.size else None
    return TracedOutcome(first, len(result.reasons) - committed.size)
