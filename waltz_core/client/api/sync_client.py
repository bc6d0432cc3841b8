"""The client for threads: the asyncio client on one background loop, behind blocking calls.

This client is for applications, notebooks and Spark workers without an event loop. Every method
only calls the asyncio client (`async_client.py`).

Rules:
    1. One background thread runs the loop. The application's code never runs on it: contexts,
       hooks and callbacks run on worker threads and may block.
    2. A method may be called from any thread except the thread of the loop.
    3. A client belongs to the process that has opened it; a forked child gets a UsageError.
    4. Another thread may close the client at any moment. So no call is scheduled on a loop that is
       ending or has ended. Later calls raise UsageError.
"""

import asyncio
import inspect
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, TypeVar

import uvloop

from waltz_core import errors
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.api.opening import NOT_PICKLABLE_TEXT, UnopenedClient
from waltz_core.client.api.scanning import (
    ArrowReader,
    ArrowSchema,
    DataFormat,
    ScanColumns,
    open_scan,
    scan_ranges_of,
)
from waltz_core.client.api.subscriptions import reentrant_set_partitions_error
from waltz_core.client.api.thread_outcome import ThreadOutcome
from waltz_core.client.links.directory import ClusterInfo, ClusterLayout, FixedDirectory
from waltz_core.client.model.callbacks import (
    BatchCallbacks,
    Callbacks,
    PoisonPolicy,
    check_callbacks,
    check_headers,
)
from waltz_core.client.model.predecessors import PipelinedState
from waltz_core.client.model.transaction import (
    Transaction,
    TransactionBuilder,
    TransactionContext,
    check_context,
)
from waltz_core.client.read.feed_delivery import (
    DELIVERY_S_MAX,
    DeliveryProgress,
    DeliveryRun,
    check_start_mark,
)
from waltz_core.client.read.ranges import InterruptibleChunks, RangeChunk, ReplicaSet
from waltz_core.client.read.reported_rejections import Rejection
from waltz_core.client.stream.write_claim import TaskClaim
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.client.stream.appends import ReportOrder
    from waltz_core.client.stream.outcome_tracker import BatchOutcome

# The maximum sizes of two pools: threads for `execute`, and threads for hooks and feeds (one for
# each that runs). The pools are separate because a callback or a hook may wait for a context.
WORKERS_MAX = 16
APPLIERS_MAX = 256
# Timeout for the tasks that are still on the loop when the client closes.
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)

_CLOSED_TEXT = "the client is closed"
_NOT_CLOSED_TEXT = "a WaltzClient was not closed before the interpreter ended"
# The beginning of the message that `ThreadPoolExecutor.submit` raises after a shutdown of the
# executor or of the interpreter.
_SHUT_DOWN_TEXT = "cannot schedule new futures"

ResultT = TypeVar("ResultT")


class WaltzClient:
    """A client for one cluster, for any number of threads.

        with WaltzClient("zk1:2181/waltz/payments") as client:
            transaction_id = client.append(b"...", write_locks=[lock("account", 7)]).result()

    `append`, `append_batch` and `submit` block while the number of appends in flight is at its
    limit (the window). They return a `concurrent.futures.Future`.

    Raises:
        BadConfig: the connect string is wrong, or there is no cluster at its root.
        CoordinatorUnavailable: no ZooKeeper server answers; the message names the hosts.
    """

    def __init__(
        self,
        connect: str,
        config: ClientConfig | None = None,
        *,
        client_id: int | None = None,
        partitions: Iterable[int] | None = None,
    ) -> None:
        self._open_on_new_loop(
            lambda: AsyncWaltzClient.connect(
                connect, config, client_id=client_id, partitions=partitions
            )
        )

    @classmethod
    def connect(
        cls,
        connect: str,
        config: ClientConfig | None = None,
        *,
        client_id: int | None = None,
        partitions: Iterable[int] | None = None,
    ) -> Self:
        """Open a client; equivalent to `WaltzClient(...)`."""
        return cls(connect, config, client_id=client_id, partitions=partitions)

    @classmethod
    def at(
        cls,
        layout: ClusterLayout,
        config: ClientConfig | None = None,
        *,
        client_id: int | None = None,
        connection_sequence: int = 0,
        claim: TaskClaim | None = None,
        partitions: Iterable[int] | None = None,
    ) -> Self:
        """Open a client with a given layout; see `AsyncWaltzClient.at`."""
        client = cls.__new__(cls)
        client._open_on_new_loop(
            lambda: AsyncWaltzClient.at(
                layout,
                config,
                client_id=client_id,
                connection_sequence=connection_sequence,
                claim=claim,
                partitions=partitions,
            )
        )
        return client

    @classmethod
    def wrap(cls, opening: Callable[[], UnopenedClient[AsyncWaltzClient]]) -> Self:
        """Open a sync client over an asyncio client; `memory_waltz.MemoryWaltz` uses this."""
        client = cls.__new__(cls)
        client._open_on_new_loop(opening)
        return client

    def _open_on_new_loop(self, opening: Callable[[], UnopenedClient[AsyncWaltzClient]]) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        # An RLock: a signal handler may close the client on the thread that it has interrupted.
        self._closing = threading.RLock()
        self._schedule_lock = threading.RLock()
        self._accepts_calls = True  # rule 4
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="waltz-client", daemon=True
        )
        self._thread.start()
        self._workers = _Workers(WORKERS_MAX, thread_name_prefix="waltz-context")
        self._appliers = _Workers(APPLIERS_MAX, thread_name_prefix="waltz-callback")
        self._running: set[Future[DeliveryProgress]] = set()  # callbacks that are running
        self._applying = threading.local()  # the partition whose transaction this thread applies

        async def begin() -> AsyncWaltzClient:
            return await opening()

        try:
            self._client = self._wait_for_result(begin())
        except BaseException:
            self._end_threads()
            raise

    def close(self) -> None:
        """Wait for outcomes up to the request timeout, then close the client; may be called twice.

        `close` also waits for running callbacks, with the same timeout. So a new client that
        resumes from the application's mark applies no transaction twice. A `close` that a callback
        calls does not wait for callbacks.
        """
        self._check_not_forked()
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                try:
                    self._wait_for_result(self._client.close())
                finally:
                    self._end_threads()
        # Outside the lock, because a callback may also close the client.
        self._await_callbacks()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise errors.UsageError(NOT_PICKLABLE_TEXT)

    # --- the cluster

    def cluster(self) -> ClusterInfo:
        """Return the name, the cluster key and the partition count of the cluster."""
        return self._client.cluster()

    @property
    def partition_count(self) -> int:
        """The number of partitions of the cluster."""
        return self._client.partition_count

    @property
    def client_id(self) -> int | None:
        """The client ID; None before the first mount."""
        return self._client.client_id

    @property
    def has_pending(self) -> bool:
        """Whether the client has appends without an outcome."""
        return self._client.has_pending

    def layout(self) -> ClusterLayout:
        """Return the cluster and its partition owners as plain values, for `at` elsewhere."""
        return self._client.layout()

    def add_owners(self, layout: ClusterLayout) -> None:
        """Add newer partition owners to a client that was opened with `at`."""
        self._check_usable()
        directory = self._client.directory
        if isinstance(directory, FixedDirectory):
            self._schedule(lambda: self._loop.call_soon_threadsafe(directory.add_owners, layout))

    def high_water_mark(self, partition: int, *, linearizable: bool = False) -> TransactionId:
        """Return a partition's high-water mark; see `AsyncWaltzClient.high_water_mark`."""
        return self._call(self._client.high_water_mark(partition, linearizable=linearizable))

    def high_water_marks(
        self, partitions: Iterable[int] | None = None, *, linearizable: bool = False
    ) -> dict[int, TransactionId]:
        """Return the high-water marks of partitions (default: all), requested in parallel."""
        return self._call(self._client.high_water_marks(partitions, linearizable=linearizable))

    def replicas(
        self, partition: int, *, linearizable: bool = False, group: int | None = None
    ) -> ReplicaSet:
        """Return a partition's session, mark and replicas; see `AsyncWaltzClient.replicas`."""
        return self._call(self._client.replicas(partition, linearizable=linearizable, group=group))

    def replica_sets(
        self,
        partitions: Iterable[int] | None = None,
        *,
        linearizable: bool = False,
        group: int | None = None,
    ) -> dict[int, ReplicaSet]:
        """Return the `replicas` of several partitions (default: all), requested in parallel."""
        return self._call(
            self._client.replica_sets(partitions, linearizable=linearizable, group=group)
        )

    def has_legacy_server(self, partitions: Iterable[int] | None = None) -> bool:
        """Return whether a Waltz 0.13 server owns any of these partitions now (default: all)."""
        return self._call(self._client.has_legacy_server(partitions))

    def recent_rejections(self, partition: int) -> list[Rejection]:
        """Return the newest rejections; see `AsyncWaltzClient.recent_rejections`."""
        return self._call(self._client.recent_rejections(partition))

    def flush(self, partition: int) -> TransactionId:
        """Wait until earlier appends are final; return the mark (`AsyncWaltzClient.flush`)."""
        return self._call(self._client.flush(partition))

    def mount(self, partitions: Iterable[int] | None = None) -> dict[int, TransactionId]:
        """Mount partitions (default: all) now; return their high-water marks, as far as known."""
        return self._call(self._client.mount(partitions))

    # --- writing

    def begin_sequences(self, sequences: Mapping[int, int]) -> None:
        """Set the first sequence numbers; see `AsyncWaltzClient.begin_sequences`."""
        self._call(self._client.begin_sequences(sequences))

    def other_clients(self) -> set[int]:
        """Return the client IDs of those tasks of the claimed write that other runs have begun."""
        claim = self._client.claim
        assert claim is not None, "for clients with a claim"
        return self._call(claim.other_clients())

    def append(  # noqa: PLR0913 - the parts of a transaction
        self,
        data: bytes,
        *,
        partition: int | None = None,
        header: int = 0,
        write_locks: Iterable[int] = (),
        read_locks: Iterable[int] = (),
        append_locks: Iterable[int] = (),
        client_high_water_mark: int | None = None,
        pipelined: PipelinedState | bool = False,
        encryption_key_id: str | None = None,
    ) -> "Future[TransactionId]":
        """Append one transaction; return a future of its ID. See `AsyncWaltzClient.append`."""
        return self._start_append(
            self._client.append(
                data,
                partition=partition,
                header=header,
                write_locks=write_locks,
                read_locks=read_locks,
                append_locks=append_locks,
                client_high_water_mark=client_high_water_mark,
                pipelined=pipelined,
                encryption_key_id=encryption_key_id,
            )
        )

    def append_batch(
        self,
        partition: int,
        payload: bytes | memoryview,
        row_count: int,
        *,
        client_high_water_mark: int,
        order: "ReportOrder | None" = None,
    ) -> "Future[BatchOutcome]":
        """Append a batch encoded by `batches.encode_append`; return a future of its outcome."""
        return self._start_append(
            self._client.append_batch(
                partition,
                payload,
                row_count,
                client_high_water_mark=client_high_water_mark,
                order=order,
            )
        )

    def submit(self, context: TransactionContext) -> "Future[TransactionId | None]":
        """Run a context; return a future of its transaction ID (None if `execute` returned False).

        `execute` and the hooks run on worker threads. `submit` makes the first attempt before it
        returns.
        """
        runnable = _ThreadContext(context, self._workers, self._appliers)
        return self._start_append(self._client.run_context(runnable))

    # --- the feed

    def subscribe(
        self,
        callbacks: Callbacks,
        partitions: Iterable[int] | None = None,
        *,
        headers: Iterable[int] | None = None,
    ) -> None:
        """Apply the feeds of partitions (default: all) to `callbacks` until the client is closed.

        `headers` filters the feed; see `AsyncWaltzClient.subscribe`.
        """
        check_callbacks(callbacks, is_async=False)
        values = check_headers(headers)
        consumer_arguments = self._client, self._appliers, self._running, self._applying
        if isinstance(callbacks, BatchCallbacks):
            consumer: _ThreadConsumer = _BatchConsumer(callbacks, *consumer_arguments)
        else:
            consumer = _ThreadConsumer(callbacks, *consumer_arguments)
        self._call(self._client.subscribe_consumer(consumer, partitions, values))

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions whose feeds are applied now, without those whose feed has ended."""
        return self._client.partitions

    def set_partitions(self, partitions: Iterable[int]) -> None:
        """Apply the feeds of exactly these partitions; see `AsyncWaltzClient.set_partitions`."""
        applying = getattr(self._applying, "partition_id", None)
        if applying is not None:
            raise reentrant_set_partitions_error(applying)
        self._call(self._client.set_partitions(partitions))

    # --- reading

    def read_range(  # noqa: PLR0913 - see `RangeQuery`
        self,
        partition: int,
        first: int,
        last: int,
        *,
        form: RangeForm = RangeForm.WHOLE,
        header_values: Iterable[int] = (),
        bytes_max: int | None = None,
        replicas: ReplicaSet | None = None,
    ) -> Generator[RangeChunk, None, None]:
        """Yield the committed transactions first..last in verified, gapless chunks, in order."""
        chunks = InterruptibleChunks(
            self._client.read_range(
                partition,
                first,
                last,
                form=form,
                header_values=header_values,
                bytes_max=bytes_max,
                replicas=replicas,
            )
        )
        try:
            while True:
                chunk = self._call(chunks.next_or_none())
                if chunk is None:
                    return
                yield chunk
        finally:
            if not self._is_closed and os.getpid() == self._pid:
                self._call(chunks.end())

    def scan(
        self,
        partition: int | Iterable[int] | None = None,
        *,
        start: int | Mapping[int, int] | None = None,
        stop: int | Mapping[int, int] | None = None,
        schema: ArrowSchema | None = None,
        data_format: DataFormat = "msgpack",
    ) -> ArrowReader:
        """Return a `pyarrow.RecordBatchReader` of the committed transactions start..stop-1.

        It reads one partition after another (default: all), only as fast as its consumer. `start`
        and `stop` are IDs, or IDs by partition (default: all that is available now). `schema` names
        the columns (default: the log's). Columns that the log does not have are unpacked strictly
        from payloads; `data_format` is "msgpack", "json", or a serializer `Avro` or `Protobuf`.
        Raises DataLoss for an ID after the end of the log, and BeforeLogStart for an expired ID.
        """
        partition_ids = [int(partition)] if isinstance(partition, SupportsIndex) else partition
        columns = ScanColumns(schema, data_format, has_keys=self._client.has_keys)
        # A check of given IDs needs a current mark: a former owner may return a lower mark.
        is_given = start is not None or stop is not None
        sources = self.replica_sets(partition_ids, linearizable=is_given)
        return open_scan(self, scan_ranges_of(sources, start, stop), sources, columns)

    # --- private

    def _call(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            self._check_usable()
        except errors.UsageError:
            call.close()
            raise
        return self._wait_for_result(call)

    def _start_append(
        self, call: "Coroutine[Any, Any, asyncio.Future[ResultT]]"
    ) -> "Future[ResultT]":
        """Start an append and wait for space in the window; return the future of its outcome."""
        outcome: Future[ResultT] = ThreadOutcome(self._client.pending_reason)
        # An append on its way to the log cannot be cancelled.
        outcome.set_running_or_notify_cancel()

        async def begin() -> None:
            inner = await call
            if inner.done():  # the loop may end before it calls a callback
                _copy_outcome(inner, outcome)
            else:
                inner.add_done_callback(lambda finished: _copy_outcome(finished, outcome))

        try:
            self._call(begin())
        except errors.UsageError:
            call.close()  # the coroutine may not have started
            raise
        return outcome

    def _wait_for_result(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            outcome = self._schedule(lambda: asyncio.run_coroutine_threadsafe(call, self._loop))
        except errors.UsageError:
            call.close()
            raise
        try:
            return outcome.result()
        except CancelledError:  # only the end of the loop's thread cancels (`_end_threads`)
            raise errors.UsageError(_CLOSED_TEXT) from None
        except (KeyboardInterrupt, SystemExit):  # raised by a signal handler
            outcome.cancel()
            raise

    def _schedule(self, schedule: Callable[[], ResultT]) -> ResultT:
        """Schedule a call on the loop; raises UsageError once no calls are accepted (rule 4)."""
        with self._schedule_lock:
            try:
                if self._accepts_calls:
                    return schedule()
            except RuntimeError:  # a signal handler has closed the client meanwhile
                if self._accepts_calls:
                    raise
            raise errors.UsageError(_CLOSED_TEXT)

    def _check_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise errors.UsageError(
                f"this client was opened by process {self._pid} and cannot be used in the "
                f"forked process {os.getpid()}. Hint: open a client in each process."
            )

    def _check_usable(self) -> None:
        self._check_not_forked()
        if self._is_closed:
            raise errors.UsageError(_CLOSED_TEXT)
        if threading.current_thread() is self._thread:
            raise errors.UsageError(
                "a blocking method was called on the client's own event loop, and would wait "
                "for itself. Hint: call it on another thread, or use AsyncWaltzClient."
            )

    def _end_threads(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._appliers.shutdown(wait=False, cancel_futures=True)
        with self._schedule_lock:
            self._accepts_calls = False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # Cancel requests for which threads still wait, such as data for a callback. This is a loop
        # because a thread may make another request while the cancelled requests end.
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        while (unfinished_tasks := asyncio.all_tasks(self._loop)) and time.monotonic() < end_s:
            for task in unfinished_tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(unfinished_tasks, timeout=CLOSE_TIMEOUT_S))
        self._loop.close()

    def _await_callbacks(self) -> None:
        if getattr(self._applying, "partition_id", None) is not None:
            return
        pending = wait(set(self._running), self._client.config.request_timeout_ms / 1000).not_done
        if pending:
            _log.warning("client.closed_while_applying callbacks=%d", len(pending))


class _Workers(ThreadPoolExecutor):
    """Threads for the application's code.

    When the interpreter exits, an open client continues until its own thread ends, but worker
    threads accept no more calls. Further calls are cancelled, as in a closed client.
    """

    is_ended = False

    def submit(
        self,
        fn: Callable[..., ResultT],
        /,
        *args: Any,  # noqa: ANN401 - the arguments of `fn`
        **kwargs: Any,  # noqa: ANN401 - the arguments of `fn`
    ) -> "Future[ResultT]":
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_SHUT_DOWN_TEXT):
                raise
        if not self.is_ended:
            warnings.warn(_NOT_CLOSED_TEXT, ResourceWarning, stacklevel=1)
        outcome: Future[ResultT] = Future()
        outcome.cancel()
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        self.is_ended = True
        super().shutdown(wait, cancel_futures=cancel_futures)


class _ThreadContext:
    """A context whose methods run on worker threads."""

    def __init__(
        self,
        context: TransactionContext,
        workers: ThreadPoolExecutor,
        hook_workers: ThreadPoolExecutor,
    ) -> None:
        self._context = check_context(context)
        self._workers = workers
        self._hook_workers = hook_workers

    @property
    def retries_max(self) -> int | None:
        return self._context.retries_max

    @property
    def timeout_ms(self) -> int | None:
        return self._context.timeout_ms

    @property
    def pipelined(self) -> bool:
        return self._context.pipelined

    def partition_id(self, partition_count: int) -> int:
        try:
            return self._context.partition_id(partition_count)
        except Exception:
            raise
        except BaseException as error:
            raise _converted_thread_error(error) from error

    async def execute(self, builder: TransactionBuilder) -> bool:
        result: object = await _offload(self._workers, self._context.execute, builder)
        _check_not_coroutine("execute", result)
        return bool(result)

    async def call(self, hook: str, *args: object) -> None:
        method = getattr(self._context, hook)
        if getattr(type(self._context), hook) is getattr(TransactionContext, hook):
            return  # the hook is not overridden
        await _offload(self._hook_workers, method, *args)


class _ThreadConsumer:
    """Passes transactions to `Callbacks` on worker threads, several in one call of a thread."""

    is_batched = False

    def __init__(
        self,
        callbacks: Callbacks,
        client: AsyncWaltzClient,
        workers: ThreadPoolExecutor,
        running: "set[Future[DeliveryProgress]]",
        applying: threading.local,
    ) -> None:
        self._callbacks = callbacks
        self._client = client
        self._workers = workers
        self._running = running  # the event loop and the workers change this set
        self._applying = applying

    async def start_mark(self, partition_id: PartitionId) -> TransactionId | None:
        mark = await _offload(self._workers, self._callbacks.client_high_water_mark, partition_id)
        return check_start_mark(partition_id, mark)

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        source = self._client.subscriptions.data_cache(partition_id)
        apply: Callable[[Transaction], object] = self._callbacks.apply_transaction

        def apply_all() -> DeliveryProgress:
            until_s = time.monotonic() + DELIVERY_S_MAX
            count = 0
            try:
                for number, header in run:
                    if not is_running():
                        break
                    transaction = Transaction(partition_id, TransactionId(number), header, source)
                    _check_not_coroutine("apply_transaction", apply(transaction))
                    count += 1
                    if time.monotonic() > until_s:
                        break
            except BaseException as error:  # noqa: BLE001 - any exception of the application
                return DeliveryProgress(count, _converted_thread_error(error))
            return DeliveryProgress(count, None)

        return await self._apply_on_thread(partition_id, apply_all)

    async def _apply_on_thread(
        self, partition_id: PartitionId, apply: Callable[[], DeliveryProgress]
    ) -> DeliveryProgress:
        """Run callbacks on a worker thread; `close` waits until they have returned."""

        def run() -> DeliveryProgress:
            self._applying.partition_id = partition_id
            try:
                return apply()
            finally:
                self._applying.partition_id = None

        running = self._workers.submit(run)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    async def on_uncaught_exception(
        self, partition_id: PartitionId, transaction_id: TransactionId, error: Exception
    ) -> PoisonPolicy:
        call = self._callbacks.uncaught_exception
        return await _offload(self._workers, lambda: call(partition_id, transaction_id, error))


class _BatchConsumer(_ThreadConsumer):
    """Passes batches of transactions to `BatchCallbacks` on worker threads."""

    is_batched = True

    def __init__(self, callbacks: BatchCallbacks, client: AsyncWaltzClient, *args: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(callbacks, client, *args)
        self._batched = callbacks
        self._cluster = client.cluster()

    async def start_mark(self, partition_id: PartitionId) -> TransactionId | None:
        begin, cluster = self._batched.begin, self._cluster
        await _offload(self._workers, lambda: begin(cluster.key, cluster.restore_sources))
        return await super().start_mark(partition_id)

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        source = self._client.subscriptions.data_cache(partition_id)
        transactions: Sequence[Transaction] = [
            Transaction(partition_id, TransactionId(transaction_id), feed_header, source)
            for transaction_id, feed_header in run
        ]

        def apply_transactions() -> DeliveryProgress:
            if run and not is_running():
                return DeliveryProgress(0, None)
            try:
                return DeliveryProgress(
                    self._batched.apply_transactions(partition_id, transactions, last), None
                )
            except BaseException as error:  # noqa: BLE001 - any exception of the application
                return DeliveryProgress(0, _converted_thread_error(error))

        return await self._apply_on_thread(partition_id, apply_transactions)


async def _offload(
    workers: ThreadPoolExecutor, call: Callable[..., ResultT], *args: object
) -> ResultT:
    """Run the application's code on a thread; convert exceptions that a future does not accept."""

    def run() -> ResultT:
        try:
            return call(*args)
        except BaseException as error:
            converted_error = _converted_thread_error(error)
            if converted_error is error:
                raise
            raise converted_error from error

    return await asyncio.get_running_loop().run_in_executor(workers, run)


def _check_not_coroutine(name: str, result: object) -> None:
    """Raise UsageError for the coroutine of an async function: none of its code has run."""
    if inspect.iscoroutine(result):
        result.close()
        raise errors.UsageError(
            f"{name} is an async function, which WaltzClient cannot call. Hint: use "
            "AsyncWaltzClient, or a plain function."
        )


def _converted_thread_error(error: BaseException) -> Exception:
    """Return the exception to raise in place of the application's exception on a thread."""
    # With one of these exceptions, the task of a future would wait forever or appear cancelled.
    if isinstance(error, StopIteration | CancelledError):
        return RuntimeError(f"the application raised {error!r}")
    if isinstance(error, Exception):
        return error
    return errors.UsageError(
        f"the application raised {type(error).__name__} on a worker thread, where it cannot "
        "end the process. Hint: signal the main thread to exit."
    )


def _copy_outcome(finished: "asyncio.Future[ResultT]", outcome: "Future[ResultT]") -> None:
    if finished.cancelled():
        outcome.set_exception(
            errors.OutcomeUnknown("the client was closed before the outcome was known")
        )
    elif (error := finished.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(finished.result())
