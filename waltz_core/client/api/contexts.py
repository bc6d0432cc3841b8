"""Runs transaction contexts: execute, append, and execute again after a rejection.

If a lock rejects an attempt, the attempt was computed from an old state, and is discarded. The
client then applies the transactions that were missing in this state, and the context computes a new
attempt.

Rules:
    1. The client's mark is read before `execute`, so the state that the application reads is at
       least as new as the mark.
    2. A retry begins when the client has applied the conflicting transaction. If the client has no
       feed of the partition, the retry begins when the transaction is known to be in the log.
    3. Each attempt is final before the next attempt begins, so no context is in the log twice.
    4. A context has a deadline and a limit of retries. It expires when the deadline has passed, or
       when it needs a retry and no retries are left. The deadline also ends an `execute` that waits
       on the event loop. An `execute` on a thread continues after the deadline, but its result is
       ignored. If an attempt was already appended, the context waits for its outcome beyond the
       deadline.
    5. With a feed, `execute` reads the state that the callbacks have computed. While the
       application has paused the partition, the callbacks apply no transactions, so no attempt
       begins. An attempt with the log's mark would claim to have seen transactions that the
       callbacks have not applied.
    6. If a dependent attempt is rejected because of appends in flight, the context computes a new
       attempt at once, as if these appends were committed. Only the new attempt assumes this; the
       callbacks apply these appends only after their commit.
    7. If a context expires while its view is behind the log, the error contains the marks of the
       view and of the log.
"""

import asyncio
import inspect
import logging
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

from waltz_core import errors
from waltz_core.client.model.payloads import encrypt_payload
from waltz_core.client.model.predecessors import initial_state
from waltz_core.client.model.transaction import (
    TransactionBuilder,
    TransactionContext,
    check_context,
)
from waltz_core.client.read.feed_delivery import application_cancellation_error
from waltz_core.client.stream.appends import PendingRow, RowOutcome, error_of_row
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.encryption.envelopes import Encryption
from waltz_core.records.record import TransactionId
from waltz_core.wire.messages import RowOutcomeCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

PAUSE_S_MIN, PAUSE_S_MAX = 0.01, 1.0

_FINAL_OUTCOMES = (RowOutcomeCode.AHEAD, RowOutcomeCode.TOO_LARGE)


ResultT = TypeVar("ResultT")


class _DeadlinePassed(Exception):
    """The deadline has passed before an attempt was appended."""


class RunnableContext(Protocol):
    """A `TransactionContext` whose methods run on the event loop or on worker threads."""

    @property
    def retries_max(self) -> int | None:
        """The maximum number of attempts after the first one; None for no limit."""

    @property
    def timeout_ms(self) -> int | None:
        """The timeout for all attempts together, in milliseconds; None for no limit."""

    @property
    def pipelined(self) -> bool:
        """Whether an attempt may depend on appends in flight."""

    def partition_id(self, partition_count: int) -> int:
        """Return the ID of the partition to append to."""

    async def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the builder; return False if there is nothing to append."""

    async def call(self, hook: str, *args: object) -> None:
        """Call the hook with this name, for example `on_completion`."""


class LoopContext:
    """A context whose methods run on the event loop; they may be coroutines."""

    def __init__(self, context: TransactionContext) -> None:
        self._context = check_context(context)

    @property
    def retries_max(self) -> int | None:
        """The maximum number of attempts after the first one; None for no limit."""
        return self._context.retries_max

    @property
    def timeout_ms(self) -> int | None:
        """The timeout for all attempts together, in milliseconds; None for no limit."""
        return self._context.timeout_ms

    @property
    def pipelined(self) -> bool:
        """Whether an attempt may depend on appends in flight."""
        return self._context.pipelined

    def partition_id(self, partition_count: int) -> int:
        """Return the ID of the partition to append to."""
        return self._context.partition_id(partition_count)

    async def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the builder; return False if there is nothing to append."""
        try:
            result: bool | Awaitable[bool] = self._context.execute(builder)
            return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError as error:
            raise application_cancellation_error(error) from error

    async def call(self, hook: str, *args: object) -> None:
        """Call the hook with this name, for example `on_completion`."""
        method: Callable[..., Awaitable[None] | None] = getattr(self._context, hook)
        try:
            result = method(*args)
            if inspect.isawaitable(result):
                await result
        except asyncio.CancelledError as error:
            raise application_cancellation_error(error) from error


class ContextRun:
    """The run of one context, until its transaction is in the log or the context has ended."""

    def __init__(
        self,
        context: RunnableContext,
        partition: ClientPartition,
        random: Random,
        encryption: Encryption | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._partition = partition
        self._random = random
        self._encryption = encryption
        self._loop = loop
        timeout_ms = context.timeout_ms
        self._deadline_s = None if timeout_ms is None else loop.time() + timeout_ms / 1000
        self._retries = 0
        self._pause_s = PAUSE_S_MIN
        applier = partition.applier
        self._began_s = loop.time()
        self._mark_at_start = None if applier is None else applier.mark
        self.future: asyncio.Future[TransactionId | None] = loop.create_future()
        # The hooks also report the error, so callers need not retrieve the error from the future.
        self.future.add_done_callback(_retrieve_exception)
        self._row: PendingRow | None = None
        # The appends in flight that the next attempt depends on; None if the context is not
        # pipelined (rule 6).
        self._pipelined_state = initial_state(encryption) if context.pipelined else None

    async def begin(self) -> bool:
        """Make the first attempt; return False if the context has ended with this attempt."""
        try:
            return await self._make_attempt()
        except _DeadlinePassed as deadline_error:
            return await self._finish_expired(errors.Unavailable(str(deadline_error)))
        except Exception as error:  # noqa: BLE001 - whatever `execute` raises
            await self._finish_failed(error)
            return False

    async def run_to_end(self) -> None:
        """Process outcomes and make further attempts until the context has ended."""
        try:
            while await self._run_step():
                pass
        except asyncio.CancelledError:
            self._finish_on_close()
            raise
        except _DeadlinePassed as deadline_error:
            await self._finish_expired(errors.Unavailable(str(deadline_error)))
        except Exception as error:  # noqa: BLE001 - whatever `execute` or a hook raises
            await self._finish_failed(error)

    async def _make_attempt(self) -> bool:
        """Execute the context and append its transaction; False if `execute` returned False."""
        partition = self._partition
        await self._await_until_deadline(
            partition.ensure_mounted(), "the client had not mounted the partition"
        )
        if partition.has_view:
            await self._await_until_deadline(
                partition.wait_for_feed(), "the application had paused the partition"
            )
        builder = TransactionBuilder(partition.partition_id, partition.mark)  # rule 1
        builder.pipelined_state = self._pipelined_state
        if self._pipelined_state is not None:
            self._pipelined_state = (
                self._pipelined_state.without_predecessors()
            )  # predecessors are valid for one attempt
        executing = self._context.execute(builder)
        is_wanted = await self._await_until_deadline(executing, "execute was still running")
        if not is_wanted:
            self._set_outcome(None)
            await self._call_hook("on_completion", False)  # noqa: FBT003
            return False
        if builder.data is None:
            raise errors.BadRequest(
                "method execute returned True, but has not set the transaction data. Hint: "
                "call set_transaction_data in it."
            )
        mark, pipelined_state = builder.mark_and_state()
        data = builder.data
        if self._encryption is not None or builder.encryption_key_id is not None:
            data = await self._await_until_deadline(
                encrypt_payload(
                    self._encryption,
                    data,
                    partition=partition.partition_id,
                    header=builder.header,
                    key_id=builder.encryption_key_id,
                ),
                "the key provider had not returned the encryption key",
            )
        row = PendingRow(data, builder.header, mark)
        row.pipelined_state = pipelined_state
        row.write_locks = builder.write_locks
        row.read_locks = builder.read_locks
        row.append_locks = builder.append_locks
        row.is_attempt = True
        await self._await_until_deadline(
            partition.window.take(1, row.size_bytes),
            "the client had reached its limit of appends in flight",
        )
        partition.appends.add(row)
        self._row = row
        return True

    async def _await_until_deadline(
        self, answer: "Awaitable[ResultT]", description: str
    ) -> ResultT:
        """Return the awaited result; at the deadline raises _DeadlinePassed with `description`."""
        deadline_timeout = asyncio.timeout_at(self._deadline_s)
        try:
            async with deadline_timeout:
                return await answer
        except TimeoutError:
            if not deadline_timeout.expired():
                raise  # the TimeoutError of `execute` itself
            partition = self._partition
            failure = "" if partition.is_ready else f" ({partition.stream.failure})"
            raise _DeadlinePassed(
                f"the context for partition {partition.partition_id} timed out after "
                f"{self._context.timeout_ms} ms (timeout_ms), because {description}{failure}"
            ) from None

    async def _run_step(self) -> bool:
        """Process the outcome of the attempt; return False when the context has ended."""
        row = self._row
        assert row is not None
        try:
            outcome = await row.future
        except errors.OutcomeUnknown as error:
            await self._finish_failed(error)
            return False
        except errors.Unavailable as error:  # the row is not in the log, so rule 3 holds
            return await self._retry_attempt(error, wait_for=None)
        assert isinstance(outcome, RowOutcome)
        if outcome.reason == RowOutcomeCode.COMMITTED:
            await self._finish_committed(outcome.transaction_id)
            return False
        rejection = error_of_row(self._partition.partition_id, row, outcome)
        if outcome.reason in _FINAL_OUTCOMES:
            await self._finish_failed(rejection)
            return False
        if outcome.reason != RowOutcomeCode.LOCK:
            return await self._retry_attempt(rejection, wait_for=None)
        if outcome.pipelined_state is not None:
            self._pipelined_state = outcome.pipelined_state
        await self._call_hook("on_lock_failure")
        return await self._retry_attempt(rejection, wait_for=outcome.conflicting)

    async def _retry_attempt(
        self, error: errors.WaltzError, *, wait_for: TransactionId | None
    ) -> bool:
        """Try again after `wait_for` is applied or after a delay; return False if the run ended."""
        self._retries += 1
        limit = self._context.retries_max
        if limit is not None and self._retries > limit:
            return await self._finish_expired(error)
        if self._deadline_s is not None and self._loop.time() >= self._deadline_s:
            # Check the deadline here, because `asyncio.timeout` interrupts only code that suspends.
            return await self._finish_expired(self._view_behind_error(wait_for) or error)
        try:
            async with asyncio.timeout_at(self._deadline_s):
                if wait_for is None:
                    await asyncio.sleep(self._pause_s * (0.5 + self._random.random() / 2))
                    self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
                else:
                    await self._wait_until_applied(wait_for)
        except TimeoutError:
            return await self._finish_expired(self._view_behind_error(wait_for) or error)
        self._partition.appends.counts.retried += 1
        return await self._make_attempt()

    def _view_behind_error(self, required_mark: TransactionId | None) -> errors.ViewBehind | None:
        """Return an error if the view has not applied `required_mark` yet (rule 7)."""
        partition, applier = self._partition, self._partition.applier
        if required_mark is None or applier is None or applier.is_paused_by_application:
            return None
        view_mark = partition.mark if applier.mark is None else applier.mark
        if view_mark >= required_mark:
            return None
        log_mark = max(required_mark, partition.stream.high_water_mark)
        took_s = max(self._loop.time() - self._began_s, 0.001)
        rate_per_s = (
            0 if self._mark_at_start is None else (view_mark - self._mark_at_start) / took_s
        )
        hint = "the callbacks applied no transaction in this time; check what they wait for."
        if rate_per_s:
            remaining_s = (log_mark - view_mark) / rate_per_s
            hint = (
                f"at this rate, the callbacks need {remaining_s:,.1f} s to apply the rest of the "
                "log; submit the context again then."
            )
        error = errors.ViewBehind(
            f"the context for partition {partition.partition_id} timed out after "
            f"{self._context.timeout_ms} ms (timeout_ms), because the callbacks had not applied "
            f"the log yet. They are at transaction {view_mark}, the log is at {log_mark}, and they "
            f"apply {rate_per_s:,.1f} transactions per second. Hint: {hint}"
        )
        error.applied, error.high_water_mark, error.rate_per_s = view_mark, log_mark, rate_per_s
        return error

    async def _wait_until_applied(self, mark: TransactionId) -> None:
        """Wait until `mark` is applied or, without a feed, known to be in the log (rule 2)."""
        while self._partition.has_view:
            applier = await self._partition.wait_for_feed()
            if applier is None:
                break
            try:
                await applier.wait_until_applied(mark)
            except errors.Unavailable:
                if not applier.is_paused_by_application:
                    raise
            else:
                return
        await self._partition.wait_until_known(mark)

    async def _finish_committed(self, transaction_id: TransactionId) -> None:
        if not self.future.done():
            self.future.set_result(transaction_id)
        await self._call_hook("on_completion", True)  # noqa: FBT003
        applier = self._partition.applier
        if applier is not None:
            try:
                await applier.wait_until_applied(transaction_id)
            except errors.Unavailable:
                return  # The feed has stopped, and the application was notified.
            await self._call_hook("on_application")

    def _finish_on_close(self) -> None:
        """End the run because the client closes; report the last attempt's outcome if known."""
        row = self._row
        # NB: an ending loop cancels this task, and thereby the future for which this task waits.
        if row is None or not row.future.done() or row.future.cancelled():
            error = errors.OutcomeUnknown(
                "the client was closed before the outcome of the append was known"
            )
            self._set_outcome(error)
        elif (failure := row.future.exception()) is not None:
            self._set_outcome(failure)
        elif isinstance(outcome := row.future.result(), RowOutcome) and not outcome.reason:
            if not self.future.done():
                self.future.set_result(outcome.transaction_id)
        else:
            text = (
                "the client was closed before the context was tried again; the transaction is "
                "not in the log"
            )
            self._set_outcome(errors.Unreachable(text))

    async def _finish_expired(self, error: errors.WaltzError) -> bool:
        self._set_outcome(error)
        await self._call_hook("on_expiration")
        return False

    async def _finish_failed(self, error: Exception) -> None:
        self._set_outcome(error)
        await self._call_hook("on_exception", error)

    async def _call_hook(self, name: str, *args: object) -> None:
        """Call a hook of the context. Its exceptions are logged, and do not change the outcome."""
        try:
            await self._context.call(name, *args)
        except Exception:  # noqa: BLE001 - any exception of the application
            _log.exception(
                "client.hook_failed partition=%d hook=%s", self._partition.partition_id, name
            )

    def _set_outcome(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


def _retrieve_exception(future: "asyncio.Future[TransactionId | None]") -> None:
    if not future.cancelled():
        future.exception()
