"""The client for asyncio: the complete public API of the log.

The client combines the lower modules: `partition_stream.py` tracks outcomes, `contexts.py` retries
contexts, `subscriptions.py` runs feeds, and `ranges.py` reads ranges.

Rules:
    1. A client belongs to one process and one event loop; a forked child gets a UsageError.
    2. When the number of appends in flight reaches its limit (the window), `append` and `submit`
       wait; no append is dropped.
    3. `close` waits for outcomes up to the request timeout. Appends without an outcome then fail
       with OutcomeUnknown.
    4. All tasks run in one TaskGroup, inside one task that lives as long as the client.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Self, cast

from waltz_core import errors
from waltz_core.access.client_ids import ClientIdentity
from waltz_core.client.api.client_metrics import ClientMetrics
from waltz_core.client.api.contexts import ContextRun, LoopContext, RunnableContext
from waltz_core.client.api.opening import OpenedByConnect, UnopenedClient, config_or_default
from waltz_core.client.api.subscriptions import Subscriptions
from waltz_core.client.links.connections import ServerLinks
from waltz_core.client.links.directory import (
    ClusterInfo,
    ClusterLayout,
    Directory,
    FixedDirectory,
    Owner,
    ZooKeeperDirectory,
)
from waltz_core.client.links.identities import ClientIdentities
from waltz_core.client.model.callbacks import AsyncCallbacks, check_callbacks, check_headers
from waltz_core.client.model.payloads import encrypt_payload, encryption_of
from waltz_core.client.model.predecessors import PipelinedState, initial_state
from waltz_core.client.model.transaction import (
    TransactionContext,
    check_data,
    check_header,
    check_items,
    check_locks,
    check_mark,
    check_partition,
    check_range,
    partition_of,
)
from waltz_core.client.read.catch_up import Recipient
from waltz_core.client.read.feed_delivery import Consumer, LoopConsumer
from waltz_core.client.read.ranges import (
    NO_REPLICAS,
    RangeChunk,
    RangeQuery,
    ReplicaReader,
    ReplicaSet,
    read_chunks,
)
from waltz_core.client.read.reported_rejections import Rejection
from waltz_core.client.read.requests import OwnerRequests, query_partitions
from waltz_core.client.stream.appends import PendingRow, ReportOrder
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.client.stream.write_claim import TaskClaim
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.spans import WaltzTracer
from waltz_core.transport import tls
from waltz_core.transport.token_source import ForwardedToken
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.client.stream.outcome_tracker import BatchOutcome

_log = logging.getLogger(__name__)

_CLOSED_TEXT = "the client is closed"


class AsyncWaltzClient(OpenedByConnect):
    """A client for one cluster, on one event loop.

        async with AsyncWaltzClient.connect("zk1:2181/waltz/payments") as client:
            future = await client.append(b"...", write_locks=[lock("account", 7)])
            transaction_id = await future

    `await client.append(...)` waits until the number of appends in flight is below its limit (the
    window). Then it returns a future; `await future` waits for the outcome. `append_batch` and
    `submit` work in the same way.
    """

    def __init__(
        self,
        directory: Directory,
        connect: str,
        config: ClientConfig,
        *,
        client_id: int | None,
        token: ForwardedToken | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.tracer = WaltzTracer() if config.traces else None
        self.random = Random()  # noqa: S311 - spreads retries, keeps no secret
        self.ssl_context = tls.dial_context(config, connect, token)  # presents the token to servers
        self.links = ServerLinks(
            dial_timeout_s=config.server_connect_timeout_ms / 1000,
            late_answers_s=config.request_timeout_ms / 1000,
            mark_suspect=directory.mark_suspect,
            ssl=self.ssl_context,
        )
        self.requests = OwnerRequests(directory, self.links, config, self.random)
        self._connect = connect
        self.ids = ClientIdentities(
            directory,
            self.links,
            timeout_s=config.mount_timeout_ms / 1000,
            fixed_identity=None if client_id is None else ClientIdentity(client_id),
        )
        self._connection_sequence = 0
        self.claim: TaskClaim | None = None
        self._partitions: dict[int, ClientPartition] = {}
        # The partitions that this client appends to, and uses by default; None: all.
        self._own_partitions: tuple[PartitionId, ...] | None = None
        self._round_robin = 0
        self._marks: dict[int, TransactionId] = {}
        self._context_runs: dict[ContextRun, None] = {}
        self._range_readers: dict[ReplicaReader, None] = {}  # readers of ranges that are being read
        self._pid = os.getpid()
        self._closing = asyncio.Event()
        self._is_closed = False
        self._group: asyncio.TaskGroup | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._close_task: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._client_metrics: ClientMetrics | None = None
        self._encryption = encryption_of(config)
        self.subscriptions = Subscriptions(
            self._partition, self.spawn, self.requests, config, self._encryption
        )

    # --- beginning and end

    @classmethod
    def connect(
        cls,
        connect: str,
        config: ClientConfig | None = None,
        *,
        client_id: int | None = None,
        partitions: Iterable[int] | None = None,
    ) -> "UnopenedClient[AsyncWaltzClient]":
        """Open a client: await the result, or use it in `async with`.

        `connect` is "host:port[,host:port]/root". `client_id` is for writers that keep their client
        ID across restarts; a server assigns a new ID to every other client. If `partitions` is
        given, the client appends only to these partitions. They are also the default of its
        methods, instead of all partitions. A principal that has permissions for only some
        partitions needs this argument.

        Raises:
            BadConfig: the connect string is wrong, or there is no cluster at its root.
            CoordinatorUnavailable: no ZooKeeper server answers; the message names the hosts.
        """
        settings = config_or_default(config)
        directory = ZooKeeperDirectory.from_config(connect, settings)
        client = cls(directory, connect, settings, client_id=client_id)
        client._set_own_partitions(partitions)
        return UnopenedClient(client)

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
    ) -> "UnopenedClient[AsyncWaltzClient]":
        """Open a client with a given layout; the client queries ZooKeeper only if partitions moved.

        Mounts use connection sequences above `connection_sequence`. If two writers have the same
        client ID, the mount with the higher connection sequence wins. `partitions` has the same
        meaning as in `connect`.

        A `claim` represents one task of an exactly-once write (docs/spark.md, "Exactly once"). The
        claim supplies the client ID and the connection sequence. When the client opens or closes,
        it also opens or closes the claim. It checks the claim before each mount.
        """
        settings = config_or_default(config)
        directory = FixedDirectory.from_config(layout, settings)
        client = cls(directory, layout.connect, settings, client_id=client_id)
        client._connection_sequence = connection_sequence
        client.claim = claim
        client._set_own_partitions(partitions)
        return UnopenedClient(client)

    def _set_own_partitions(self, partitions: Iterable[int] | None) -> None:
        if partitions is not None:
            # `open` checks that these partitions exist.
            self._own_partitions = cast(
                "tuple[PartitionId, ...]", check_items("partitions", partitions)
            )

    async def open(self) -> Self:
        """Connect to the cluster and start the client's tasks; `connect` and `at` call this."""
        assert self._main_task is None
        try:
            await self.directory.open(self._on_owners_changed)
            if self._own_partitions is not None:
                self._own_partitions = self._check_own_partitions(self._own_partitions)
            if self.claim is not None:
                await self.claim.open(self)
        except BaseException:
            self._is_closed = True
            await self.links.close("the client could not be opened")
            await self.directory.close()
            raise
        if self.claim is not None and not self.claim.is_done:
            self.ids.set_identity(self.claim.identity)
            self._connection_sequence = self.claim.connection_sequence
        started = asyncio.Event()
        # This task is outside the TaskGroup: it keeps the group open until `close`.
        self._main_task = asyncio.get_running_loop().create_task(
            self._run_tasks(started), name="waltz-client"
        )
        try:
            await started.wait()
        except asyncio.CancelledError:  # the caller has no client that it could close
            await self.close()
            raise
        self.spawn(self._follow_directory(), "directory")
        self._client_metrics = ClientMetrics(self, self._partitions)
        return self

    async def close(self) -> None:
        """Wait for outcomes (rule 3), then close the client.

        `close` may be called twice. If the first call is cancelled, the client continues to close
        in the background, and the second call waits until the client is closed.
        """
        if self._main_task is None or (self._close_task is not None and self._close_task.done()):
            return
        self._check_process_and_loop()
        self._is_closed = True
        if self._close_task is None:
            # This task is also outside the TaskGroup, because the client must close even if the
            # caller is cancelled.
            loop = asyncio.get_running_loop()
            self._close_task = loop.create_task(
                self._finish_and_close(self._main_task), name="waltz-client-end"
            )
        await asyncio.shield(self._close_task)

    async def _finish_and_close(self, root: "asyncio.Task[None]") -> None:
        try:
            async with asyncio.timeout(self.config.request_timeout_ms / 1000):
                for run in list(self._context_runs):
                    await asyncio.wait([run.future])
                for partition in list(self._partitions.values()):
                    while partition.appends.has_pending:
                        await partition.appends.wait_for_earlier()
        except TimeoutError:
            _log.warning("client.closed_with_pending_appends client=%s", self.client_id)
        finally:  # NB: also if the loop ends earlier, because a thread may wait for an outcome
            for partition in self._partitions.values():
                partition.close()
            if self._client_metrics is not None:
                self._client_metrics.close()
            self._closing.set()
            for reader in list(self._range_readers):
                reader.close()
            await asyncio.wait([root])
            self.requests.close()
            await self.links.close("the client was closed")
            await self.directory.close()
            if self.claim is not None:
                await self.claim.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run_tasks(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            started.set()
            await self._closing.wait()
            for task in list(self._tasks):
                task.cancel()

    async def _follow_directory(self) -> None:
        pause_s = self.config.retry_interval_ms_max / 1000
        while True:
            try:
                await self.directory.run()
            except errors.WaltzError as error:
                _log.warning("client.assignment_watch_failed error=%s", error)
                await asyncio.sleep(pause_s)
            else:
                return

    def spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until it ends or the client is closed; an exception of the task is logged."""
        if self._group is None or self._closing.is_set():
            task.close()
            return
        running = self._group.create_task(self._run_and_log_exception(task, name), name=name)
        self._tasks[running] = None
        running.add_done_callback(lambda finished: self._tasks.pop(finished, None))

    async def _run_and_log_exception(self, task: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await task
        except Exception:  # noqa: BLE001 - the exception of a task is logged
            _log.exception("client.task_failed task=%s", name)

    def next_connection_sequence(self) -> int:
        """Return the connection sequence of the next mount, higher than all earlier ones."""
        self._connection_sequence += 1
        return self._connection_sequence

    def _on_owners_changed(self, owners: Mapping[PartitionId, Owner]) -> None:
        for partition_id, owner in owners.items():
            if (partition := self._partitions.get(partition_id)) is not None:
                partition.on_generation_changed(owner.generation)
        self.requests.on_owners_changed(owners)

    # --- the cluster

    def cluster(self) -> ClusterInfo:
        """Return the name, the cluster key and the partition count of the cluster."""
        return self.directory.cluster

    @property
    def partition_count(self) -> int:
        """The number of partitions of the cluster."""
        return self.directory.cluster.partition_count

    @property
    def client_id(self) -> int | None:
        """The client ID; None before the first mount."""
        identity = self.ids.current
        return None if identity is None else identity.client_id

    @property
    def has_pending(self) -> bool:
        """Whether the client has appends without an outcome."""
        # NB: threads of the sync client read this dict while the loop adds partitions; `list`
        # copies it atomically.
        return any(partition.appends.has_pending for partition in list(self._partitions.values()))

    def pending_reason(self) -> str:
        """Return why appends may not have their outcomes yet; any thread may call this method."""
        waiting = [
            f"partition {partition.partition_id} is not mounted: {partition.stream.failure}"
            for partition in list(self._partitions.values())
            if not partition.is_ready
        ]
        return "; ".join(waiting[:3]) or "the servers have not answered yet"

    def layout(self) -> ClusterLayout:
        """Return the cluster and its partition owners as plain values, for `at` elsewhere."""
        owners = {
            int(partition_id): (owner.address, int(owner.generation))
            for partition_id, owner in self.directory.owners.items()
        }
        return ClusterLayout(self._connect, self.directory.cluster, owners)

    @property
    def has_keys(self) -> bool:
        """Whether the client has encryption keys, so that it can decrypt payloads."""
        return self._encryption is not None

    async def high_water_mark(self, partition: int, *, linearizable: bool = False) -> TransactionId:
        """Return a partition's high-water mark (its last committed transaction ID), -1 if empty.

        With `linearizable`, a quorum confirms the mark, so the mark is not older than the call.
        """
        return await self._request_mark(self._check_partition(partition), linearizable=linearizable)

    async def high_water_marks(
        self, partitions: Iterable[int] | None = None, *, linearizable: bool = False
    ) -> dict[int, TransactionId]:
        """Return the high-water marks of partitions (default: all), requested in parallel."""
        partition_ids = self._partitions_or_all(partitions)
        return await query_partitions(
            partition_ids, partial(self._request_mark, linearizable=linearizable)
        )

    async def replicas(
        self, partition: int, *, linearizable: bool = False, group: int | None = None
    ) -> ReplicaSet:
        """Return the store session, the high-water mark and the readable replicas of a partition.

        Replicas on storages of group `group` count as nearby; `read_range` reads from them first
        [default: the client's setting].
        """
        replica_sets = await self.replica_sets([partition], linearizable=linearizable, group=group)
        return replica_sets[partition]

    async def replica_sets(
        self,
        partitions: Iterable[int] | None = None,
        *,
        linearizable: bool = False,
        group: int | None = None,
    ) -> dict[int, ReplicaSet]:
        """Return the `replicas` of several partitions (default: all), requested in parallel."""
        partition_ids, nearby_group = (
            self._partitions_or_all(partitions),
            self.config.group if group is None else group,
        )
        return await self.requests.replica_sets(
            partition_ids, linearizable=linearizable, group=nearby_group
        )

    async def has_legacy_server(self, partitions: Iterable[int] | None = None) -> bool:
        """Return whether a Waltz 0.13 server owns any of these partitions now (default: all)."""
        return await self.requests.has_legacy_server(self._partitions_or_all(partitions))

    async def recent_rejections(self, partition: int) -> list[Rejection]:
        """Return the newest rejected transactions of a partition, newest first.

        The owner keeps at most 100 rejections, in memory only. A new owner starts without
        rejections. Raises BadRequest if the server is too old for this request.
        """
        return await self.requests.recent_rejections(self._check_partition(partition))

    async def flush(self, partition: int) -> TransactionId:
        """Wait until all earlier appends are final; return the partition's high-water mark.

        If an earlier append is committed, its transaction ID is not above the mark. If the
        partition moved during the call, another server may have committed transactions above the
        mark in the last two seconds. For a mark that is not older than the call, use
        `high_water_mark(partition, linearizable=True)`.
        """
        partition_id = self._check_partition(partition)
        client_partition = self._partitions.get(partition_id)
        if client_partition is not None:
            await client_partition.appends.wait_for_earlier()
        return await self.requests.flush(partition_id)

    async def mount(self, partitions: Iterable[int] | None = None) -> dict[int, TransactionId]:
        """Mount partitions (default: all) now; return their high-water marks, as far as known.

        When `mount` returns, all appends that older connections sent with this client ID are final.
        """

        async def mount(partition_id: PartitionId) -> TransactionId:
            partition = await self._partition(partition_id)
            await partition.ensure_mounted()
            return partition.stream.high_water_mark

        return await query_partitions(self._partitions_or_all(partitions), mount)

    async def begin_sequences(self, sequences: Mapping[int, int]) -> None:
        """Set the first sequence number for the appends to each partition.

        If an earlier client with the same client ID has used the lower numbers, call this method
        before any append.
        """
        for partition_id, sequence in sequences.items():
            (await self._partition(self._check_partition(partition_id))).begin_sequences(sequence)

    # --- writing

    async def append(  # noqa: PLR0913 - the parts of a transaction
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
    ) -> "asyncio.Future[TransactionId]":
        """Append one transaction; return a future of its transaction ID.

        By default, the first lock determines the partition; without locks, partitions are used
        round-robin. The default of `client_high_water_mark` is the last transaction that this
        client has applied. Without a feed, it is the last transaction that is known to be in the
        log.

        The future raises LockFailed, ClientAheadOfLog, TooLarge, OutcomeUnknown, another
        Unavailable if the append timed out, or the error that ended the stream. After LockFailed,
        compute again from the state at the error's `high_water_mark`. After OutcomeUnknown, the
        transaction may be in the log. After any other error, it is not.

        With `pipelined`, the future may raise LockFailed before the conflicting transactions are
        committed. The `pipelined_state` of the error contains these transactions. Compute again as
        if they were in the log, and pass this state as `pipelined`.

        `encryption_key_id` is the ID of the key that encrypts `data` [default: the client's
        setting].
        """
        write, read = check_locks("write", write_locks), check_locks("read", read_locks)
        appended = check_locks("append", append_locks)
        locks = write or read or appended
        given_mark = None if client_high_water_mark is None else check_mark(client_high_water_mark)
        client_partition = await self._partition(self._choose_partition(partition, locks))
        if (write or read) and given_mark is None and not client_partition.is_ready:
            await client_partition.ensure_mounted()  # the mark is unknown before the mount
        if (write or read) and given_mark is None and client_partition.is_starting:
            await client_partition.wait_for_feed()
        mark = client_partition.mark if given_mark is None else given_mark
        payload, header = check_data(data), check_header(header)
        if self._encryption is not None or encryption_key_id is not None:
            payload = await encrypt_payload(
                self._encryption,
                payload,
                partition=client_partition.partition_id,
                header=header,
                key_id=encryption_key_id,
            )
        row = PendingRow(payload, header, mark)
        row.write_locks, row.read_locks, row.append_locks = write, read, appended
        if pipelined:
            row.set_pipelined_state(
                initial_state(self._encryption) if pipelined is True else pipelined, given_mark
            )
        if not client_partition.window.try_take(1, row.size_bytes):
            await client_partition.window.take(1, row.size_bytes)
        loop = asyncio.get_running_loop()
        row.deadline_s = loop.time() + self.config.request_timeout_ms / 1000
        client_partition.appends.add(row)
        return cast("asyncio.Future[TransactionId]", row.future)

    async def append_batch(
        self,
        partition: int,
        payload: bytes | memoryview,
        row_count: int,
        *,
        client_high_water_mark: int,
        order: ReportOrder | None = None,
    ) -> "asyncio.Future[BatchOutcome]":
        """Append a batch encoded by `batches.encode_append`; return a future of its outcome.

        The client does not encrypt the payloads of the batch; see `Encryption.encrypt_column`.

        With an `order`, rows enter the log in the order in which they were appended, even when
        requests are lost; see `ReportOrder`.

        The future raises an error if the batch ends without an outcome for each row. After
        OutcomeUnknown, rows may be in the log. After TooLarge, BadRequest, another Unavailable or
        the error that ended the stream, no row is in the log.
        """
        mark = check_mark(client_high_water_mark)
        client_partition = await self._partition(self._choose_partition(partition, ()))
        if row_count < 1:
            raise errors.BadRequest(
                f"append batch: expected at least one row, found {row_count} rows"
            )
        await client_partition.window.take(row_count, len(payload))
        return client_partition.appends.add_batch(payload, row_count, mark, order)

    async def submit(self, context: TransactionContext) -> "asyncio.Future[TransactionId | None]":
        """Run a context; return a future of its transaction ID (None if `execute` returned False).

        `submit` makes the first attempt before it returns. If `execute` raises an exception, the
        client passes the exception to `on_exception`, and the future raises the exception.
        """
        return await self.run_context(LoopContext(context))

    async def run_context(self, context: RunnableContext) -> "asyncio.Future[TransactionId | None]":
        """Run a context whose methods run on the loop or on threads; `submit` calls this method."""
        self._check_usable()
        partition_id = self._choose_partition(context.partition_id(self.partition_count), ())
        partition = await self._partition(partition_id)
        run = ContextRun(context, partition, self.random, self._encryption)
        if await run.begin():
            self._context_runs[run] = None
            run.future.add_done_callback(lambda _: self._context_runs.pop(run, None))
            if self._closing.is_set():
                # The client was closed during the first attempt, so the attempt is not sent.
                await run.run_to_end()
            else:
                self.spawn(run.run_to_end(), "context")
        return run.future

    # --- the feed

    async def subscribe(
        self,
        callbacks: AsyncCallbacks,
        partitions: Iterable[int] | None = None,
        *,
        headers: Iterable[int] | None = None,
    ) -> None:
        """Apply the feeds of partitions (default: all) to `callbacks` until the client is closed.

        With `headers`, the callbacks receive only transactions with one of these headers. The
        servers skip the other transactions, and this client's high-water mark advances past them.

        `subscribe` returns when the callbacks have returned the application's mark of each
        partition. `subscribe` raises BadRequest for a partition that already has a feed. It also
        raises any exception that `client_high_water_mark` raises.
        """
        check_callbacks(callbacks, is_async=True)
        consumer = LoopConsumer(callbacks, self.subscriptions.data_cache)
        await self.subscribe_consumer(consumer, partitions, check_headers(headers))

    async def subscribe_consumer(
        self, consumer: Consumer, partitions: Iterable[int] | None, header_values: tuple[int, ...]
    ) -> None:
        """Apply feeds to a consumer on the event loop or on threads; `subscribe` calls this."""
        recipient = Recipient(consumer, header_values)
        await self.subscriptions.subscribe(recipient, self._partitions_or_all(partitions))

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions whose feeds are applied now, without those whose feed has ended."""
        return self.subscriptions.partitions

    async def set_partitions(self, partitions: Iterable[int]) -> None:
        """Start and stop feeds so that the callbacks receive exactly these partitions.

        The method stops the feeds of all other partitions, and waits for their running callbacks.
        It returns when the marks of the new partitions are known. A partition that was subscribed
        earlier keeps its callbacks; a new partition gets the callbacks of the last `subscribe`. Do
        not call this method in a callback.

        Raises UsageError before the first `subscribe`, and any exception that
        `client_high_water_mark` raises.
        """
        await self.subscriptions.set_partitions(self._partitions_or_all(partitions))

    # --- reading

    async def read_range(  # noqa: PLR0913 - see `RangeQuery`
        self,
        partition: int,
        first: int,
        last: int,
        *,
        form: RangeForm = RangeForm.WHOLE,
        header_values: Iterable[int] = (),
        bytes_max: int | None = None,
        replicas: ReplicaSet | None = None,
    ) -> AsyncIterator[RangeChunk]:
        """Yield the committed transactions first..last in verified chunks, in order, without gaps.

        With `replicas` (from method `replicas`), the transactions come from a storage that is in
        sync and has all of them, otherwise from the server. Raises DataLoss if the log ends before
        `last`. With the setting `encryption_keys`, `RangeChunk.rows` decrypts the data.
        """
        partition_id = self._check_partition(partition)
        check_range(partition_id, first, last)
        query = RangeQuery(
            TransactionId(first),
            TransactionId(last),
            form,
            tuple(header_values),
            bytes_max or self.config.range_bytes_max,
        )

        async def fetch_from_server(query_part: RangeQuery) -> RangeChunk:
            return await self.requests.fetch_range(partition_id, query_part)

        reader = ReplicaReader(
            partition_id,
            replicas or NO_REPLICAS,
            fetch_from_server,
            first=query.first,
            timeout_s=self.config.server_connect_timeout_ms / 1000,
            ssl=self.ssl_context,
        )
        self._range_readers[reader] = None
        try:
            async for chunk in read_chunks(partition_id, query, reader.fetch, self._start_fetch):
                if self._encryption is None:
                    yield chunk
                else:
                    decrypt = partial(self._encryption.decrypt, partition=partition_id)
                    yield replace(chunk, decrypt=decrypt)
        finally:
            self._range_readers.pop(reader, None)
            reader.close()

    # --- private

    def _start_fetch(self, fetch: Coroutine[Any, Any, RangeChunk]) -> "asyncio.Future[RangeChunk]":
        """Run a fetch in a task of its own, so that it finishes even if its reader is cancelled."""
        future: asyncio.Future[RangeChunk] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda finished: finished.cancelled() or finished.exception())

        async def run() -> None:
            outcome: RangeChunk | errors.WaltzError = errors.Unavailable(_CLOSED_TEXT)
            try:
                outcome = await fetch
            except errors.WaltzError as error:
                outcome = error
            finally:
                if isinstance(outcome, RangeChunk) and not future.done():
                    future.set_result(outcome)
                elif isinstance(outcome, errors.WaltzError) and not future.done():
                    future.set_exception(outcome)

        if self._closing.is_set():
            fetch.close()
            raise errors.UsageError(_CLOSED_TEXT)
        self.spawn(run(), "fetch")
        return future

    def _check_process_and_loop(self) -> None:
        if os.getpid() != self._pid:
            raise errors.UsageError(
                f"this client was opened by process {self._pid} and cannot be used in the "
                f"forked process {os.getpid()}. Hint: open a client in each process."
            )
        if (
            self._main_task is not None
            and self._main_task.get_loop() is not asyncio.get_running_loop()
        ):
            raise errors.UsageError(
                "this client was opened on another event loop, and works only there. Hint: "
                "open a client in each asyncio.run."
            )

    def _check_usable(self) -> None:
        self._check_process_and_loop()
        if self._is_closed or self._main_task is None:
            raise errors.UsageError(_CLOSED_TEXT)

    def _check_partition(self, partition: int) -> PartitionId:
        self._check_usable()
        return check_partition(partition, self.cluster().name, self.partition_count)

    def _partitions_or_all(self, partitions: Iterable[int] | None) -> list[PartitionId]:
        self._check_usable()
        own_ids = self._own_partitions
        numbers = (own_ids or range(self.partition_count)) if partitions is None else partitions
        return [self._check_partition(number) for number in check_items("partitions", numbers)]

    def _check_own_partitions(self, partitions: Iterable[int]) -> tuple[PartitionId, ...]:
        name, count = self.cluster().name, self.partition_count
        partition_ids = {check_partition(partition, name, count) for partition in partitions}
        if not partition_ids:
            raise errors.BadConfig(
                "argument partitions: expected one or more partitions, found none"
            )
        return tuple(sorted(partition_ids))

    def _choose_partition(self, partition: int | None, locks: tuple[int, ...]) -> PartitionId:
        """Return an append's partition; raises BadRequest if the client was opened without it."""
        own_ids = self._own_partitions
        if partition is not None:
            partition_id = self._check_partition(partition)
            if own_ids is not None and partition_id not in own_ids:
                raise errors.BadRequest(
                    f"partition {partition_id} is not one of the partitions that this client was "
                    f"opened for, {list(own_ids)}"
                )
            return partition_id
        self._check_usable()
        if locks:
            partition_id = partition_of(locks[0], self.partition_count)
            if own_ids is not None and partition_id not in own_ids:
                raise errors.BadRequest(
                    f"the first lock chooses partition {partition_id}, which is not one of the "
                    f"partitions that this client was opened for, {list(own_ids)}. Hint: "
                    "pass the argument partition, with the same value for all appends with this "
                    "lock."
                )
            return partition_id
        self._round_robin = (self._round_robin + 1) % len(own_ids or range(self.partition_count))
        return own_ids[self._round_robin] if own_ids else PartitionId(self._round_robin)

    async def _request_mark(
        self, partition_id: PartitionId, *, linearizable: bool
    ) -> TransactionId:
        mark = await self.requests.high_water_mark(partition_id, linearizable=linearizable)
        # A server may have lost the partition without knowing it, and then return a lower mark. The
        # mark that this method returns never decreases.
        highest_mark = max(mark, self._marks.get(partition_id, mark))
        self._marks[partition_id] = highest_mark
        return highest_mark

    async def _partition(self, partition_id: PartitionId) -> ClientPartition:
        client_partition = self._partitions.get(partition_id)
        if client_partition is None:
            if self._closing.is_set():  # a closing client would never end the partition
                raise errors.UsageError(_CLOSED_TEXT)
            client_partition = ClientPartition(partition_id, self)
            self._partitions[partition_id] = client_partition
        return client_partition
