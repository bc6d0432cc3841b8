"""Passes one partition's feed to the application: in order, each transaction once.

Rules:
    1. A transaction is passed to the application when the previous one was applied or skipped.
    2. The queue of transactions is bounded: the stream requests more only as transactions are
       applied.
    3. If a callback raises, `PoisonPolicy` decides about the transaction. After STOP, no further
       transaction is passed on.
    4. After the feed has ended, no transaction is passed on; a running callback finishes.
    5. A consumer of batches gets all transactions that have arrived while it applied the previous
       batch. The consumer also gets the mark, because a filtered feed advances past the last
       transaction that passes the filter.
"""

import asyncio
import contextlib
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from waltz_core import errors
from waltz_core.client.links.outage_log import OutageLog
from waltz_core.client.model.callbacks import AsyncCallbacks, PoisonPolicy, default_policy
from waltz_core.client.model.transaction import AsyncTransaction, DataSource, check_mark
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId
from waltz_core.spans import WaltzTracer
from waltz_core.wire.messages import Buffer

_log = logging.getLogger(__name__)

FEED_HEADER_STRUCT = struct.Struct(">iiiii")
assert FEED_HEADER_STRUCT.size == raw_records.FEED_HEADER_BYTES

# The maximum number of transactions that are passed on between two turns of the event loop, and the
# maximum number in a batch.
DELIVERY_TRANSACTIONS_MAX = 256
BATCH_TRANSACTIONS_MAX = 4_096
# If callbacks are slow, a run ends after this time, so that the mark does not lag by the whole run.
DELIVERY_S_MAX = 0.05
# In seconds: the maximum time for which the mark of a batched consumer is held back while no
# transaction passes the filter. So one write of the mark covers many transactions.
MARK_HOLD_S = 0.2
RETRY_S_MIN, RETRY_S_MAX = 0.01, 10.0

ResultT = TypeVar("ResultT")

FeedHeaderFields: TypeAlias = tuple[int, int, int, int, int]
# Transactions that are passed on together: ascending IDs, and the five numbers of each.
DeliveryRun: TypeAlias = list[tuple[int, FeedHeaderFields]]


class DeliveryProgress(NamedTuple):
    """The result of `apply`: the number of applied transactions, and the error of the next one."""

    applied_count: int
    error: Exception | None


class Consumer(Protocol):
    """Passes transactions to callbacks: on the event loop (`LoopConsumer`), or on threads."""

    @property
    def is_batched(self) -> bool:
        """Whether the consumer applies batches, and stores marks (rule 5)."""

    async def start_mark(self, partition_id: PartitionId) -> TransactionId | None:
        """Return the mark after which the application starts; None for the end of the log."""

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        """Apply transactions in order while `is_running()` is True, until a callback raises.

        When all transactions are applied, the log is applied up to `last`. A consumer may apply
        only a part of them. A batched consumer may apply any number. Any other consumer applies at
        least one transaction, and begins no other transaction after `DELIVERY_S_MAX`.
        """

    async def on_uncaught_exception(
        self, partition_id: PartitionId, transaction_id: TransactionId, error: Exception
    ) -> PoisonPolicy:
        """Return the policy for a transaction whose callback raised."""


class LoopConsumer:
    """Passes transactions to `AsyncCallbacks` on the event loop."""

    is_batched = False

    def __init__(
        self, callbacks: AsyncCallbacks, source_of: Callable[[PartitionId], DataSource]
    ) -> None:
        self._callbacks = callbacks
        self._source_of = source_of

    async def start_mark(self, partition_id: PartitionId) -> TransactionId | None:
        """Return the mark after which the application starts; None for the end of the log."""
        mark = self._callbacks.client_high_water_mark(partition_id)
        return check_start_mark(partition_id, await _callback_result(mark))

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        """Apply transactions in order while `is_running()` is True, until a callback raises."""
        source = self._source_of(partition_id)
        apply = self._callbacks.apply_transaction
        loop = asyncio.get_running_loop()
        until_s = loop.time() + DELIVERY_S_MAX
        count = 0
        try:
            for transaction_number, feed_header in run:
                if not is_running():
                    break
                transaction_id = TransactionId(transaction_number)
                await apply(AsyncTransaction(partition_id, transaction_id, feed_header, source))
                count += 1
                if loop.time() > until_s:
                    break
        except asyncio.CancelledError as error:
            return DeliveryProgress(count, application_cancellation_error(error))
        except Exception as error:  # noqa: BLE001 - any exception of the application
            return DeliveryProgress(count, error)
        return DeliveryProgress(count, None)

    async def on_uncaught_exception(
        self, partition_id: PartitionId, transaction_id: TransactionId, error: Exception
    ) -> PoisonPolicy:
        """Return the policy for a transaction whose callback raised."""
        return await _callback_result(
            self._callbacks.uncaught_exception(partition_id, transaction_id, error)
        )


async def _callback_result(answer: Awaitable[ResultT]) -> ResultT:
    """Await the result of a callback; a CancelledError raised by it becomes another error."""
    try:
        return await answer
    except asyncio.CancelledError as error:
        raise application_cancellation_error(error) from error


def application_cancellation_error(error: asyncio.CancelledError) -> Exception:
    """Return an error for a CancelledError that the application raised.

    Raises the CancelledError itself if this task is being cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    converted = RuntimeError("the callback of the application raised CancelledError")
    converted.__cause__ = error
    return converted


LATEST = -2


def check_start_mark(partition_id: PartitionId, mark: int) -> TransactionId | None:
    """Return the mark that `client_high_water_mark` has returned; None for LATEST."""
    if mark == LATEST:
        return None
    return check_mark(mark, f"the application's client_high_water_mark of partition {partition_id}")


class Applier:
    """Passes the feed of one partition to a consumer."""

    def __init__(
        self,
        partition_id: PartitionId,
        consumer: Consumer,
        applied: Callable[[TransactionId], None],
        tracer: WaltzTracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._partition_id = partition_id
        self._consumer = consumer
        self._on_applied = applied
        self._queue: deque[tuple[Sequence[int], Buffer, TransactionId]] = deque()
        self._range_arrived = asyncio.Event()
        self._end_event = asyncio.Event()
        self._applied: TransactionId | None = None
        self._mark_advanced_s = 0.0
        self._waiting: dict[asyncio.Future[None], TransactionId] = {}
        self._outage = OutageLog(partition_id, "data")
        self.stopped: Exception | None = None
        self.is_paused_by_application = False  # paused by the application, which may resume it

    @property
    def mark(self) -> TransactionId | None:
        """The last applied transaction; None before the application has returned its mark."""
        return self._applied

    def start(self, mark: TransactionId) -> None:
        """Start at the application's mark."""
        self._advance_mark(mark)

    def queue_range(self, ids: Sequence[int], headers: Buffer, last: TransactionId) -> None:
        """Queue a range of the feed up to `last`; `headers` has 20 bytes for each ID."""
        if self.stopped is not None:
            return
        self._queue.append((ids, headers, last))
        self._range_arrived.set()

    async def wait_until_applied(self, mark: TransactionId) -> None:
        """Wait until the feed is applied up to `mark`; raises Unavailable if it stops earlier."""
        while self._applied is None or self._applied < mark:
            if self.stopped is not None:
                raise errors.Unavailable(
                    f"the feed of partition {self._partition_id} has stopped before transaction "
                    f"{mark}: {self.stopped}"
                ) from self.stopped
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[future] = mark
            self._range_arrived.set()  # the awaited mark may be held back
            try:
                await future
            finally:  # remove the future of a cancelled caller, because a pause may take days
                self._waiting.pop(future, None)

    async def run(self) -> None:
        """Pass the feed to the consumer until the feed is stopped or this task is cancelled."""
        size = BATCH_TRANSACTIONS_MAX if self._consumer.is_batched else DELIVERY_TRANSACTIONS_MAX
        while self.stopped is None:
            if not self._queue:
                self._range_arrived.clear()
                await self._range_arrived.wait()
                continue
            run, last = self._take_from_queue(size)
            if not run and not self._consumer.is_batched:
                self._advance_mark(last)
                continue
            if not run and not await self._hold_back_mark(last):
                continue
            for start in range(0, max(len(run), 1), size):
                piece = run[start : start + size]
                is_end = start + size >= len(run)
                if not await self._apply_run(
                    piece, last if is_end else TransactionId(piece[-1][0])
                ):
                    return
                await asyncio.sleep(0)

    def _take_from_queue(self, size: int) -> tuple[DeliveryRun, TransactionId]:
        """Remove about `size` transactions from the queue; return them and their last ID."""
        run: DeliveryRun = []
        last = BEFORE_FIRST
        while self._queue and len(run) < size:
            ids, headers, last = self._queue.popleft()
            run += zip(ids, FEED_HEADER_STRUCT.iter_unpack(headers), strict=True)
        return run, last

    async def _hold_back_mark(self, last: TransactionId) -> bool:
        """Hold back a mark without transactions; return False when a later mark replaces it.

        The mark is held back for at most MARK_HOLD_S, and not while a caller waits for it.
        """
        due_s = self._mark_advanced_s + MARK_HOLD_S
        while not self._is_awaited(last) and self.stopped is None:
            left_s = due_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return True
            if self._queue:
                return False
            self._range_arrived.clear()
            await self._pause(left_s, self._range_arrived)
        return True

    def _is_awaited(self, mark: TransactionId) -> bool:
        return any(awaited_mark <= mark for awaited_mark in self._waiting.values())

    async def stop(self, error: Exception) -> None:
        """End a feed that cannot continue; notify the application and the callers that wait."""
        if self.stopped is not None:
            return
        self.end(error)
        _log.error("feed.stopped partition=%d error=%s", self._partition_id, error)
        next_id = TransactionId(0 if self._applied is None else self._applied + 1)
        try:
            await self._consumer.on_uncaught_exception(self._partition_id, next_id, error)
        except Exception as callback_error:  # noqa: BLE001 - any exception of the application
            _log.exception(
                "feed.callback_failed partition=%d", self._partition_id, exc_info=callback_error
            )

    async def _apply_run(self, run: DeliveryRun, last: TransactionId) -> bool:
        """Pass transactions and the mark to the consumer; return False if the feed has ended."""
        pause_s = RETRY_S_MIN
        while self._applied != last and self.stopped is None:
            progress = await self._apply_once(run, last)
            if progress.applied_count:
                self._advance_mark(TransactionId(run[progress.applied_count - 1][0]))
                run = run[progress.applied_count :]
                pause_s = RETRY_S_MIN
            if progress.error is None:
                self._outage.note_success()
                if not run and self.stopped is None:
                    self._advance_mark(last)
                continue
            first = TransactionId(run[0][0]) if run else last
            policy = await self._choose_poison_policy(first, progress.error)
            if policy is PoisonPolicy.STOP:
                _log.error("feed.stopped partition=%d error=%s", self._partition_id, progress.error)
                self.end(progress.error)
                return False
            if policy is PoisonPolicy.SKIP:
                self._advance_mark(first)
                run = run[1:]
            else:
                await self._pause(pause_s, self._end_event)
                pause_s = min(2 * pause_s, RETRY_S_MAX)
        return self.stopped is None

    async def _apply_once(self, run: DeliveryRun, last: TransactionId) -> DeliveryProgress:
        apply = self._consumer.apply(self._partition_id, run, last, self._is_running)
        if self._tracer is None or not run:
            return await apply
        with self._tracer.apply_span(self._partition_id, run[0][0], len(run)) as fail:
            progress = await apply
            if progress.error is not None:
                fail(progress.error)
        return progress

    def _is_running(self) -> bool:
        return self.stopped is None

    async def _pause(self, pause_s: float, event: asyncio.Event) -> None:
        """Wait for an event, such as the end of the feed, for at most `pause_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await event.wait()

    async def _choose_poison_policy(
        self, transaction_id: TransactionId, error: Exception
    ) -> PoisonPolicy:
        if default_policy(error) is PoisonPolicy.RETRY:
            self._outage.note_failure(error)
        else:
            _log.warning(
                "feed.apply_failed partition=%d transaction=%d",
                self._partition_id,
                transaction_id,
                exc_info=error,
            )
        try:
            # If the result is not a policy, this raises, so that the feed stops.
            return PoisonPolicy(
                await self._consumer.on_uncaught_exception(
                    self._partition_id, transaction_id, error
                )
            )
        except Exception as callback_error:  # noqa: BLE001 - any exception of the application
            _log.exception(
                "feed.callback_failed partition=%d", self._partition_id, exc_info=callback_error
            )
            return PoisonPolicy.STOP

    def _advance_mark(self, mark: TransactionId) -> None:
        assert self._applied is None or mark > self._applied or mark == self._applied
        self._applied = mark
        self._mark_advanced_s = asyncio.get_running_loop().time()
        self._on_applied(mark)
        if self._waiting:
            for future in [
                waiter for waiter, awaited_mark in self._waiting.items() if awaited_mark <= mark
            ]:
                del self._waiting[future]
                if not future.done():
                    future.set_result(None)

    def pause_by_application(self, error: Exception) -> None:
        """End the feed, because the application has paused it."""
        self.is_paused_by_application = True
        self.end(error)

    def end(self, error: Exception) -> None:
        """End the feed without notifying the application: no transaction is passed on any more."""
        self.stopped = error
        self._range_arrived.set()
        self._end_event.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)  # `wait_until_applied` checks again, and raises
