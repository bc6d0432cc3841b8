"""Sends the rows of one task in batches, several in flight, and collects every outcome.

Batch writes and stream writes use it; it does not need Spark.

Rules:
    1. Rows of one log partition are sent in the order of the input.
    2. A lost row (the session broke, the partition moved) is known not to be in the log, so it is
       sent again. All later rows of its partition wait for it, so that rule 1 holds. A row that a
       lock rejected is never sent again, because its payload is stale.
    3. The input is not read while `maxInFlight` batches wait for an answer. It is also not read
       while the rejected rows that wait for their recomputation would fill `maxInFlight` batches.
    4. With a `recompute` function, rejected rows are recomputed after a delay. Other rows do not
       wait for rejected rows, so recomputed rows may be sent after later rows of the input.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.client import BatchOutcome, ReportOrder, RowOutcomeCode
from waltz_core.errors import (
    BadRequest,
    ClientAheadOfLog,
    NoSpace,
    Overloaded,
    TooLarge,
    Unavailable,
    WaltzError,
)
from waltz_core.records.batches import encode_append_arrow
from waltz_spark.options import WriteOptions
from waltz_spark.payload_encryption import ADDED_BYTES_MAX, PayloadEncryptor
from waltz_spark.writer.columns import LOCK_COLUMNS, MARK_COLUMN, ConvertedRows
from waltz_spark.writer.recompute import RecomputedRows, RejectedRows

if TYPE_CHECKING:
    from concurrent.futures import Future

BATCH_BYTES_MAX = 4 * 1024 * 1024
_LOCK_BYTES = 4
RETRY_SECONDS_MAX = 60.0
_PAUSE_SECONDS_FIRST, _PAUSE_SECONDS_MAX = 0.02, 1.0
_RETRIED_OUTCOMES = (
    RowOutcomeCode.LOST,
    RowOutcomeCode.NOT_MOUNTED,
    RowOutcomeCode.GENERATION,
    RowOutcomeCode.OVERLOADED,
    RowOutcomeCode.NO_SPACE,
)
_ERROR_TYPES: dict[RowOutcomeCode, type[Unavailable]] = {
    RowOutcomeCode.NO_SPACE: NoSpace,
    RowOutcomeCode.OVERLOADED: Overloaded,
}
_FATAL_OUTCOMES: dict[RowOutcomeCode, tuple[type[WaltzError], str]] = {
    RowOutcomeCode.AHEAD: (
        ClientAheadOfLog,
        (
            "the log ends at transaction {end}, but the client_high_water_mark of a row "
            "is {mark}: the mark is from another cluster, or the log was created again"
        ),
    ),
    RowOutcomeCode.TOO_LARGE: (TooLarge, "the server rejected a transaction as too large"),
}


class BatchClient(Protocol):
    """The method of the client that a task uses."""

    def append_batch(
        self,
        partition: int,
        payload: bytes | memoryview,
        row_count: int,
        *,
        client_high_water_mark: int,
        order: ReportOrder,
    ) -> "Future[BatchOutcome]":
        """Send one append batch; after lost rows, later batches with the same `order` are lost."""


class Recompute(Protocol):
    """The interface for recomputing rejected rows; implemented by `Recomputer`."""

    retries_max: int

    def pause_s(self, retries: int) -> float:
        """Return the delay in seconds for rows that were recomputed `retries` times."""

    def recompute(self, rejected: RejectedRows) -> RecomputedRows:
        """Return the recomputed rows; the function may omit rejected rows."""


class FinalRows(NamedTuple):
    """Rows with final outcomes, which `reasons` contains: committed, or rejected by a lock."""

    partition: int
    identity: pa.RecordBatch | None
    transaction_ids: npt.NDArray[np.int64]
    reasons: npt.NDArray[np.uint8]
    conflicting: npt.NDArray[np.int64]
    high_water_mark: int
    attempt: int
    retries: int = 0  # how often the rows were recomputed


@dataclass(slots=True)
class _Chunk:
    """Rows that are sent in one append."""

    partition: int
    append: pa.RecordBatch
    identity: pa.RecordBatch | None
    source: pa.RecordBatch | None
    attempt: int = 1
    retries: int = 0

    @property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        parts = (self.append, self.identity, self.source)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def take(self, rows: npt.NDArray[np.integer]) -> "_Chunk":
        """Return the rows at these indexes as a chunk of the next attempt."""
        index = pa.array(rows)
        append, identity, source = (
            None if batch is None else batch.take(index)
            for batch in (self.append, self.identity, self.source)
        )
        return _Chunk(self.partition, append, identity, source, self.attempt + 1, self.retries)


class _WaitingRows(NamedTuple):
    """Rejected rows that wait until they are recomputed."""

    due_s: float
    chunk: _Chunk
    conflicting: npt.NDArray[np.int64]
    high_water_mark: int


@dataclass(slots=True)
class _PartitionRows:
    """The rows for one log partition: unsent, in flight, to be sent again, and to be recomputed."""

    waiting: list[_Chunk] = field(default_factory=list)
    waiting_row_count: int = 0
    waiting_bytes: int = 0
    sent: "deque[tuple[_Chunk, Future[BatchOutcome]]]" = field(default_factory=deque)
    chunks_to_resend: list[_Chunk] = field(default_factory=list)
    rejected: "deque[_WaitingRows]" = field(default_factory=deque)
    recomputed: "deque[_Chunk]" = field(default_factory=deque)
    order: ReportOrder = field(default_factory=ReportOrder)
    failing_since_s: float | None = None
    failure_count: int = 0
    last_reason: RowOutcomeCode = RowOutcomeCode.LOST
    last_detail: str = ""


class Appender:
    """Sends rows and yields their final outcomes, oldest first within each log partition."""

    def __init__(
        self,
        client: BatchClient,
        options: WriteOptions,
        recomputer: Recompute | None = None,
    ) -> None:
        self._client = client
        self._recomputer = recomputer
        self._rejected_rows_max = options.batch_rows * options.in_flight_max
        self._rejected_bytes_max = BATCH_BYTES_MAX * options.in_flight_max
        self._batch_rows = options.batch_rows
        # Encryption is the last step before an append: rows that wait are in plain text.
        self._encryptor = None if options.encryption_keys is None else PayloadEncryptor(options)
        self._added_bytes = 0 if self._encryptor is None else ADDED_BYTES_MAX
        self._in_flight_max = options.in_flight_max
        self._rows_by_partition: dict[int, _PartitionRows] = {}
        self._in_flight = 0

    def send(self, batches: Iterable[ConvertedRows]) -> Iterator[FinalRows]:
        """Send all rows; yield their outcomes as they become known.

        Raises:
            Unavailable: a partition accepted no rows for a minute; the message names it.
            BadRequest: the `recompute` function returned an invalid result.
            ClientAheadOfLog, TooLarge: the log can never accept a row.
        """
        for converted in batches:
            self._enqueue(converted)
            yield from self._send_and_collect(last=False)
        yield from self._send_and_collect(last=True)

    # -- in -----------------------------------------------------------------------------------

    def _enqueue(self, converted: ConvertedRows) -> None:
        order = np.argsort(converted.partitions, kind="stable")
        partitions, starts = np.unique(converted.partitions[order], return_index=True)
        bounds = [*starts.tolist(), len(order)]
        for number, partition in enumerate(partitions.tolist()):
            rows = pa.array(order[bounds[number] : bounds[number + 1]])
            is_one_partition = len(partitions) == 1
            append = converted.append if is_one_partition else converted.append.take(rows)
            identity, source = (
                batch if batch is None or is_one_partition else batch.take(rows)
                for batch in (converted.identity, converted.source)
            )
            lane = self._rows_by_partition.setdefault(partition, _PartitionRows())
            lane.waiting.append(_Chunk(partition, append, identity, source))
            lane.waiting_row_count += append.num_rows
            lane.waiting_bytes += append.nbytes

    # -- out ----------------------------------------------------------------------------------

    def _send_and_collect(self, *, last: bool) -> Iterator[FinalRows]:
        """Send rows until the next input may be read; with `last`, until all rows are answered."""
        while True:
            for partition in sorted(self._rows_by_partition):
                lane = self._rows_by_partition[partition]
                if lane.rejected:
                    yield from self._recompute_due_rows(lane)
                self._send_waiting_rows(lane, last=last)
            yield from self._collect_answers(block=False)
            if self._has_capacity() and not self._has_work(last=last):
                return
            if not self._in_flight:
                self._sleep_until_recompute()
            yield from self._collect_answers(block=True)

    def _has_capacity(self) -> bool:
        return self._in_flight < self._in_flight_max

    def _has_work(self, *, last: bool) -> bool:
        lanes = self._rows_by_partition.values()
        if any(lane.chunks_to_resend or lane.recomputed for lane in lanes):
            return True
        if last:
            return any(lane.waiting_row_count or lane.sent or lane.rejected for lane in lanes)
        rejected = [each.chunk for lane in lanes for each in lane.rejected]
        if sum(chunk.append.num_rows for chunk in rejected) >= self._rejected_rows_max:
            return True
        if sum(chunk.nbytes for chunk in rejected) >= self._rejected_bytes_max:
            return True
        return any(self._is_full(lane) for lane in lanes)

    def _is_full(self, lane: _PartitionRows) -> bool:
        return lane.waiting_row_count >= self._batch_rows or lane.waiting_bytes >= BATCH_BYTES_MAX

    def _send_waiting_rows(self, lane: _PartitionRows, *, last: bool) -> None:
        if lane.chunks_to_resend:
            # Rule 2: send lost rows first, after all outstanding answers have arrived. So they keep
            # their order.
            if lane.sent:
                return
            self._pause_before_resend(lane)
            chunks, lane.chunks_to_resend = lane.chunks_to_resend, []
            for chunk in chunks:
                self._send_chunk(lane, chunk)
            return
        while lane.recomputed and self._has_capacity():
            self._send_chunk(lane, lane.recomputed.popleft())
        while self._has_capacity() and (self._is_full(lane) or (last and lane.waiting_row_count)):
            self._send_chunk(lane, self._next_chunk(lane))

    def _next_chunk(self, lane: _PartitionRows) -> _Chunk:
        """Remove up to `batchSize` rows and 4 MiB from the start of a lane, as one chunk."""
        parts: list[_Chunk] = []
        rows = size = 0
        while lane.waiting and rows < self._batch_rows:
            chunk = lane.waiting[0]
            row_count = _rows_that_fit(
                chunk.append, self._batch_rows - rows, BATCH_BYTES_MAX - size, self._added_bytes
            )
            if row_count == 0 and parts:
                break
            row_count = max(row_count, 1)
            head = _slice_chunk(chunk, 0, row_count)
            parts.append(head)
            rows += row_count
            size += head.append.nbytes + row_count * self._added_bytes
            if row_count == chunk.append.num_rows:
                lane.waiting.pop(0)
            else:
                lane.waiting[0] = _slice_chunk(chunk, row_count, chunk.append.num_rows - row_count)
        lane.waiting_row_count -= rows
        lane.waiting_bytes = max(0, lane.waiting_bytes - size) if lane.waiting else 0
        return _join_chunks(parts)

    def _send_chunk(self, lane: _PartitionRows, chunk: _Chunk) -> None:
        append = chunk.append
        if self._encryptor is not None:
            append = self._encryptor.encrypt_columns(append, chunk.partition)
        payload = encode_append_arrow(append)
        # Each row in the batch has its own mark. The mark of the frame applies to no row.
        future = self._client.append_batch(
            chunk.partition,
            payload,
            chunk.append.num_rows,
            client_high_water_mark=-1,
            order=lane.order,
        )
        lane.sent.append((chunk, future))
        self._in_flight += 1

    def _collect_answers(self, *, block: bool) -> Iterator[FinalRows]:
        """Process available answers in order; if `block`, wait for the oldest answer of a lane."""
        for partition in sorted(self._rows_by_partition):
            lane = self._rows_by_partition[partition]
            while lane.sent and (block or lane.sent[0][1].done()):
                chunk, future = lane.sent.popleft()
                self._in_flight -= 1
                outcome = future.result()
                block = False
                yield from self._process_outcome(lane, chunk, outcome)

    def _process_outcome(
        self, lane: _PartitionRows, chunk: _Chunk, outcome: BatchOutcome
    ) -> Iterator[FinalRows]:
        reasons = outcome.reasons
        for reason, (kind, text) in _FATAL_OUTCOMES.items():
            if (reasons == reason).any():
                mark = pc.max(chunk.append.column(MARK_COLUMN)).as_py()
                text_of_outcome = text.format(end=outcome.high_water_mark, mark=mark)
                raise kind(f"partition {chunk.partition}: {text_of_outcome}")
        is_lost = np.isin(reasons, [int(reason) for reason in _RETRIED_OUTCOMES])
        if is_lost.any():
            lane.order.processed_count += 1
            lane.chunks_to_resend.append(chunk.take(np.flatnonzero(is_lost)))
            lane.last_reason = RowOutcomeCode(int(reasons[is_lost][0]))
            lane.last_detail = f": {outcome.detail}" if outcome.detail else ""
        elif not lane.chunks_to_resend:
            lane.failing_since_s, lane.failure_count = None, 0
        kept_indexes = np.flatnonzero(~is_lost)
        if self._recomputer is not None and chunk.retries < self._recomputer.retries_max:
            rejected = np.flatnonzero(~is_lost & (reasons != RowOutcomeCode.COMMITTED))
            kept_indexes = np.flatnonzero(reasons == RowOutcomeCode.COMMITTED)
            if len(rejected):
                due_s = time.monotonic() + self._recomputer.pause_s(chunk.retries)
                winners, mark = outcome.conflicting[rejected], outcome.high_water_mark
                lane.rejected.append(_WaitingRows(due_s, chunk.take(rejected), winners, mark))
        if len(kept_indexes):
            identity = chunk.identity
            if identity is not None and len(kept_indexes) < len(reasons):
                identity = identity.take(pa.array(kept_indexes))
            yield FinalRows(
                chunk.partition,
                identity,
                outcome.transaction_ids[kept_indexes],
                reasons[kept_indexes],
                outcome.conflicting[kept_indexes],
                outcome.high_water_mark,
                chunk.attempt,
                chunk.retries,
            )

    # -- again --------------------------------------------------------------------------------

    def _recompute_due_rows(self, lane: _PartitionRows) -> Iterator[FinalRows]:
        """Recompute the rows whose delay has passed; yield rows that the function omitted."""
        assert self._recomputer is not None
        now = time.monotonic()
        for waiting in [each for each in lane.rejected if each.due_s <= now]:
            lane.rejected.remove(waiting)
            chunk = waiting.chunk
            assert chunk.source is not None
            marks = chunk.append.column(MARK_COLUMN).to_numpy()
            recomputed = self._recomputer.recompute(
                RejectedRows(chunk.partition, chunk.source, marks, waiting.conflicting)
            )
            recomputed_chunk = _Chunk(
                chunk.partition,
                recomputed.converted.append,
                recomputed.converted.identity,
                recomputed.converted.source,
                chunk.attempt,
                chunk.retries + 1,
            )
            lane.recomputed.extend(
                _split_chunk(recomputed_chunk, self._batch_rows, self._added_bytes)
            )
            omitted_rows = np.setdiff1d(np.arange(chunk.append.num_rows), recomputed.rows)
            if len(omitted_rows):
                yield _omitted_rows(waiting, omitted_rows)

    def _sleep_until_recompute(self) -> None:
        due_times = [
            each.due_s for lane in self._rows_by_partition.values() for each in lane.rejected
        ]
        if due_times:
            time.sleep(max(0.0, min(due_times) - time.monotonic()))

    def _pause_before_resend(self, lane: _PartitionRows) -> None:
        """Sleep, longer after each failure of this lane; raise after `RETRY_SECONDS_MAX`."""
        now = time.monotonic()
        lane.failing_since_s = lane.failing_since_s or now
        if now - lane.failing_since_s > RETRY_SECONDS_MAX:
            chunk = lane.chunks_to_resend[0]
            kind = _ERROR_TYPES.get(lane.last_reason, Unavailable)
            raise kind(
                f"partition {chunk.partition} accepted no rows for {RETRY_SECONDS_MAX:.0f} s "
                f"(last answer: {lane.last_reason.name}{lane.last_detail}), so "
                f"{sum(c.append.num_rows for c in lane.chunks_to_resend)} rows are not in the log"
            )
        pause = min(_PAUSE_SECONDS_FIRST * 2**lane.failure_count, _PAUSE_SECONDS_MAX)
        lane.failure_count += 1
        time.sleep(pause)


def _slice_chunk(chunk: _Chunk, start: int, count: int) -> _Chunk:
    if start == 0 and count == chunk.append.num_rows:
        return chunk
    append, identity, source = (
        None if batch is None else batch.slice(start, count)
        for batch in (chunk.append, chunk.identity, chunk.source)
    )
    return _Chunk(chunk.partition, append, identity, source, chunk.attempt, chunk.retries)


def _split_chunk(chunk: _Chunk, rows_max: int, added_bytes: int) -> Iterator[_Chunk]:
    """Split recomputed rows into chunks of the size of an append."""
    start = 0
    while start < chunk.append.num_rows:
        remaining = chunk.append.slice(start)
        count = max(1, _rows_that_fit(remaining, rows_max, BATCH_BYTES_MAX, added_bytes))
        yield _slice_chunk(chunk, start, count)
        start += count


def _omitted_rows(waiting: _WaitingRows, rows: npt.NDArray[np.int64]) -> FinalRows:
    """Return rejected rows as final, because the function omitted them."""
    chunk = waiting.chunk
    assert chunk.identity is None or len(chunk.identity) == len(waiting.conflicting)
    return FinalRows(
        chunk.partition,
        None if chunk.identity is None else chunk.identity.take(pa.array(rows)),
        np.full(len(rows), -1, dtype=np.int64),
        np.full(len(rows), int(RowOutcomeCode.LOCK), dtype=np.uint8),
        waiting.conflicting[rows],
        waiting.high_water_mark,
        chunk.attempt - 1,  # `take` has counted an attempt for rows that are not sent
        chunk.retries,
    )


def _join_chunks(chunks: list[_Chunk]) -> _Chunk:
    assert chunks, "a batch has rows"
    if len(chunks) == 1:
        return chunks[0]
    append = pa.concat_batches([chunk.append for chunk in chunks])
    identities = [chunk.identity for chunk in chunks if chunk.identity is not None]
    sources = [chunk.source for chunk in chunks if chunk.source is not None]
    identity, source = (
        pa.concat_batches(parts) if parts else None for parts in (identities, sources)
    )
    attempt = max(chunk.attempt for chunk in chunks)
    return _Chunk(chunks[0].partition, append, identity, source, attempt)


def _rows_that_fit(append: pa.RecordBatch, rows_max: int, bytes_max: int, added_bytes: int) -> int:
    """Return the number of leading rows whose payloads and locks are within both limits.

    `added_bytes` is the number of bytes that encryption adds to each row.
    """
    count: int = min(append.num_rows, rows_max)
    data = append.column("data")
    offsets = np.frombuffer(data.buffers()[1], np.int32)[data.offset :][: len(data) + 1]
    ends = offsets[1 : count + 1].astype(np.int64) - int(offsets[0])
    if added_bytes:
        ends += added_bytes * np.arange(1, count + 1)
    for name in LOCK_COLUMNS:
        locks = np.asarray(append.column(name).offsets)
        ends += _LOCK_BYTES * (locks[1 : count + 1].astype(np.int64) - int(locks[0]))
    return min(count, int(np.searchsorted(ends, max(bytes_max, 0), "right")))


def check_client_marks(marks: Mapping[int, int], partition_count: int) -> None:
    """Reject marks for partitions that the cluster does not have.

    Raises:
        BadRequest: the error names the partition.
    """
    for partition in marks:
        if not 0 <= partition < partition_count:
            raise BadRequest(
                "option 'clientHighWaterMarks': expected partitions in "
                f"0..{partition_count - 1}, found {partition}"
            )
