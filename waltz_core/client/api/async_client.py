"""The client for asyncio: everything an application asks of the log.

It is the public face, where what is below is put together: outcomes are kept by
`partition_stream.py`, retries by `contexts.py`, the feed by `subscriptions.py`, ranges by
`ranges.py`.

Rules:
    1. A client belongs to one process and one event loop; a forked child gets a UsageError.
    2. A full window makes `append` and `submit` wait; nothing is dropped.
    3. `close` waits for outcomes as long as a request may take, then says OutcomeUnknown.
    4. All tasks live in one TaskGroup, in one task that lives as long as the client.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Self, cast

from waltz_core import errors
from waltz_core.client.api.contexts import ContextRun, LoopContext, RunnableContext
from waltz_core.client.api.opening import OpenedByConnect, Opening, settings_of
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
from waltz_core.client.model.callbacks import AsyncCallbacks, check_callbacks, check_headers
from waltz_core.client.model.predecessors import FOLLOW, FollowedState
from waltz_core.client.model.transaction import (
    TransactionContext,
    check_data,
    check_header,
    check_locks,
    check_mark,
    check_partition,
    check_range,
    each_of,
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
from waltz_core.client.read.requests import OwnerRequests, by_partition
from waltz_core.client.stream.appends import BatchOrder, PendingRow
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.client.stream.write_claim import TaskClaim
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.transport import tls
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.client.stream.monitor import BatchOutcome

_log = logging.getLogger(__name__)

_CLOSED = "the client is closed"


class AsyncWaltzClient(OpenedByConnect):
    """A client of one cluster, on one event loop.

        async with AsyncWaltzClient.connect("zk1:2181/waltz/payments") as client:
            future = await client.append(b"...", write_locks=[lock("account", 7)])
            transaction_id = await future

    Awaiting `append`, `append_batch` or `submit` waits for room; awaiting the future they return
    waits for the outcome.
    """

    def __init__(
        self, directory: Directory, connect: str, config: ClientConfig, *, client_id: int | None
    ) -> None:
        self.config = config
        self.directory = directory
        self.random = Random()  # noqa: S311 - spreads retries, keeps no secret
        self._ssl = tls.dialling(config, connect)
        self.links = ServerLinks(
            dial_timeout_s=config.dial_timeout_ms / 1000,
            late_answers_s=config.request_timeout_ms / 1000,
            silent=directory.doubt,
            ssl=self._ssl,
        )
        self.requests = OwnerRequests(directory, self.links, config, self.random)
        self._connect = connect
        self._client_id = client_id
        self._id_lock = asyncio.Lock()
        self._connection_sequence = 0
        self.claim: TaskClaim | None = None
        self._partitions: dict[int, ClientPartition] = {}
        self._round_robin = 0
        self._marks: dict[int, TransactionId] = {}
        self._runs: dict[ContextRun, None] = {}
        self._pid = os.getpid()
        self._closing = asyncio.Event()
        self._is_closed = False
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.subscriptions = Subscriptions(self._partition, self.spawn, self.requests, config)

    # --- beginning and end

    @classmethod
    def connect(
        cls, connect: str, config: ClientConfig | None = None, *, client_id: int | None = None
    ) -> "Opening[AsyncWaltzClient]":
        """Open a client; to be awaited, or used as `async with`.

        `connect` is "host:port[,host:port]/root". `client_id` is for writers that keep theirs
        across restarts; everybody else gets a new one from ZooKeeper.

        Raises:
            BadConfig: the connect string is wrong, or there is no cluster at its root.
            CoordinatorUnavailable: no ZooKeeper answers; the message names the hosts.
        """
        settings = settings_of(config)
        directory = ZooKeeperDirectory.of(connect, settings)
        return Opening(cls(directory, connect, settings, client_id=client_id))

    @classmethod
    def at(
        cls,
        layout: ClusterLayout,
        config: ClientConfig | None = None,
        *,
        client_id: int | None = None,
        connection_sequence: int = 0,
        claim: TaskClaim | None = None,
    ) -> "Opening[AsyncWaltzClient]":
        """Open a client that is told where everything is, and asks ZooKeeper when it has moved.

        Mounts use connection sequences above `connection_sequence`: of two writers with one client
        id the one with the higher number wins. A `claim` is a task's place in a write that must
        enter the log once: it is opened and closed with the client, gives it id and sequence, and
        is asked before each mount (docs/spark.md, "Exactly once").
        """
        settings = settings_of(config)
        directory = FixedDirectory.of(layout, settings)
        client = cls(directory, layout.connect, settings, client_id=client_id)
        client._connection_sequence = connection_sequence
        client.claim = claim
        return Opening(client)

    async def open(self) -> Self:
        """Connect; called by `connect` and `at`."""
        assert self._root is None
        try:
            await self.directory.open(self._assignment_changed)
            if self.claim is not None:
                await self.claim.open(self.config)
        except BaseException:
            self._is_closed = True
            raise
        if self.claim is not None and not self.claim.is_done:
            self._client_id = self.claim.state.client_id
            self._connection_sequence = self.claim.connection_sequence
        started = asyncio.Event()
        # The one task that is nobody's child: it holds the group of all others until `close`.
        self._root = asyncio.get_running_loop().create_task(
            self._live(started), name="waltz-client"
        )
        await started.wait()
        self.spawn(self._follow_directory(), "directory")
        return self

    async def close(self) -> None:
        """Wait for outcomes (rule 3), then end.

        May be called twice, and again after it was cancelled: the client goes on ending, and the
        second call waits until it has.
        """
        if self._root is None or (self._ending is not None and self._ending.done()):
            return
        self._check_home()
        self._is_closed = True
        if self._ending is None:
            # In no group either: the caller may be cancelled, and the client must still end.
            loop = asyncio.get_running_loop()
            self._ending = loop.create_task(self._end(self._root), name="waltz-client-end")
        await asyncio.shield(self._ending)

    async def _end(self, root: "asyncio.Task[None]") -> None:
        try:
            async with asyncio.timeout(self.config.request_timeout_ms / 1000):
                for run in list(self._runs):
                    await asyncio.wait([run.future])
                for partition in list(self._partitions.values()):
                    await partition.appends.wait_idle()
        except TimeoutError:
            _log.warning("client.closed_with_pending client=%s", self._client_id)
        for partition in self._partitions.values():
            partition.close()
        self._closing.set()
        await root
        self.requests.close()
        await self.links.close("the client was closed")
        await self.directory.close()
        if self.claim is not None:
            await self.claim.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _live(self, started: asyncio.Event) -> None:
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
                _log.warning("client.directory_lost error=%s", error)
                await asyncio.sleep(pause_s)
            else:
                return

    def spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until the client is closed; what it raises is logged."""
        if self._group is None or self._closing.is_set():
            task.close()
            return
        running = self._group.create_task(self._guarded(task, name), name=name)
        self._tasks[running] = None
        running.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _guarded(self, task: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await task
        except Exception:  # noqa: BLE001 - the top of a task
            _log.exception("client.task_failed task=%s", name)

    def next_connection_sequence(self) -> int:
        """Return a number higher than all before."""
        self._connection_sequence += 1
        return self._connection_sequence

    def _assignment_changed(self, owners: Mapping[PartitionId, Owner]) -> None:
        for partition_id, owner in owners.items():
            if (partition := self._partitions.get(partition_id)) is not None:
                partition.moved(owner.generation)
        self.requests.moved(owners)

    # --- the cluster

    def cluster(self) -> ClusterInfo:
        """Return the cluster's name, key and partition count."""
        return self.directory.cluster

    @property
    def partition_count(self) -> int:
        """How many partitions the cluster has."""
        return self.directory.cluster.partition_count

    @property
    def client_id(self) -> int | None:
        """The client id; None before the first mount."""
        return self._client_id

    @property
    def has_pending(self) -> bool:
        """Whether any append waits for its outcome."""
        return any(partition.appends.has_pending for partition in self._partitions.values())

    def layout(self) -> ClusterLayout:
        """Return where everything is, as plain values for `at` in other processes."""
        owners = {
            int(partition_id): (owner.address, int(owner.generation))
            for partition_id, owner in self.directory.owners.items()
        }
        return ClusterLayout(self._connect, self.directory.cluster, owners)

    async def high_water_mark(self, partition: int, *, linearizable: bool = False) -> TransactionId:
        """Return the last committed transaction of a partition, -1 for an empty one.

        `linearizable`: a quorum has confirmed the answer, so it is not older than the question.
        """
        return await self._ask_mark(self._checked(partition), linearizable=linearizable)

    async def high_water_marks(self, *, linearizable: bool = False) -> dict[int, TransactionId]:
        """Return the marks of all partitions, asked at once."""
        wanted = self._all_or(None)
        return await by_partition(wanted, partial(self._ask_mark, linearizable=linearizable))

    async def replicas(
        self, partition: int, *, linearizable: bool = False, group: int | None = None
    ) -> ReplicaSet:
        """Return session, mark and replicas of a partition; those of the `group` are nearby."""
        found = await self.replica_sets([partition], linearizable=linearizable, group=group)
        return found[partition]

    async def replica_sets(
        self,
        partitions: Iterable[int] | None = None,
        *,
        linearizable: bool = False,
        group: int | None = None,
    ) -> dict[int, ReplicaSet]:
        """Return what `replicas` does of many partitions (all by default), asked at once."""
        wanted, near = self._all_or(partitions), self.config.group if group is None else group
        return await self.requests.replica_sets(wanted, linearizable=linearizable, group=near)

    async def has_original(self, partitions: Iterable[int] | None = None) -> bool:
        """Return whether any partition (all by default) is at an original server now."""
        return await self.requests.has_original(self._all_or(partitions))

    async def flush(self, partition: int) -> TransactionId:
        """Wait until every append made before is final; return the partition's mark.

        The mark covers those appends. It may lack what another server has committed in the last
        two seconds, when the partition moved meanwhile; for a mark that lacks nothing ask for
        `high_water_mark(partition, linearizable=True)`.
        """
        partition_id = self._checked(partition)
        known = self._partitions.get(partition_id)
        if known is not None:
            await known.appends.wait_idle()
        return await self.requests.flush(partition_id)

    async def mount(self, partitions: Iterable[int] | None = None) -> dict[int, TransactionId]:
        """Mount partitions (all by default) now; return what is known of their marks.

        Everything that older connections with this client id have sent is final then.
        """

        async def mount(partition_id: PartitionId) -> TransactionId:
            partition = await self._partition(partition_id)
            await partition.mounted()
            return partition.stream.high_water_mark

        return await by_partition(self._all_or(partitions), mount)

    async def begin_sequences(self, sequences: Mapping[int, int]) -> None:
        """Number requests from these numbers on, by partition: lower ones were somebody else's.

        For a client that writes with the id of an earlier one; before it appends anything.
        """
        for partition_id, sequence in sequences.items():
            (await self._partition(self._checked(partition_id))).begin_sequences(sequence)

    # --- writing

    async def append(  # noqa: PLR0913 - every one of them is a part of a transaction
        self,
        data: bytes,
        *,
        partition: int | None = None,
        header: int = 0,
        write_locks: Iterable[int] = (),
        read_locks: Iterable[int] = (),
        append_locks: Iterable[int] = (),
        client_high_water_mark: int | None = None,
        follows: FollowedState | bool = False,
    ) -> "asyncio.Future[TransactionId]":
        """Append one transaction; return a future of its id.

        Without a partition it is that of the first lock, or the next one in turn. Without a mark it
        is what this client has applied, or knows of. The future raises LockFailed (with a mark to
        compute anew from), ClientAhead, TooLarge, OutcomeUnknown, another Unavailable when it could
        not be placed in time, or what ended the stream; only OutcomeUnknown leaves it in doubt.

        With `follows` LockFailed may come earlier, and with `following`: what is in flight. Give it
        back as `follows` with what was computed as though that were in the log.
        """
        write, read = check_locks("write", write_locks), check_locks("read", read_locks)
        added = check_locks("append", append_locks)
        locks = write or read or added
        told = None if client_high_water_mark is None else check_mark(client_high_water_mark)
        chosen = await self._partition(self._choose(partition, locks))
        if (write or read) and told is None and not chosen.is_ready:
            await chosen.mounted()  # there is no mark to go by before
        if (write or read) and told is None and chosen.is_starting:
            await chosen.fed()
        mark = chosen.mark if told is None else told
        row = PendingRow(check_data(data), check_header(header), mark)
        row.write_locks, row.read_locks, row.append_locks = write, read, added
        if follows:
            row.follow(FOLLOW if follows is True else follows, told)
        if not chosen.window.try_take(1, row.size_bytes):
            await chosen.window.take(1, row.size_bytes)
        loop = asyncio.get_running_loop()
        row.deadline_s = loop.time() + self.config.request_timeout_ms / 1000
        chosen.appends.add(row)
        return cast("asyncio.Future[TransactionId]", row.future)

    async def append_batch(
        self,
        partition: int,
        payload: bytes | memoryview,
        row_count: int,
        *,
        client_high_water_mark: int,
        order: BatchOrder | None = None,
    ) -> "asyncio.Future[BatchOutcome]":
        """Append a batch as `batches.encode_append` makes it; return a future of its outcome.

        With an `order` rows of its batches enter in the order in which they were appended, also
        over losses; see `BatchOrder`.

        The future raises only when there is no outcome for the rows: TooLarge, BadRequest,
        Unavailable or what has ended the stream (none is in the log), or OutcomeUnknown.
        """
        mark = check_mark(client_high_water_mark)
        chosen = await self._partition(self._checked(partition))
        if row_count < 1:
            raise errors.BadRequest(f"append batch: expected at least one row, found {row_count}")
        await chosen.window.take(row_count, len(payload))
        return chosen.appends.add_batch(payload, row_count, mark, order)

    async def submit(self, context: TransactionContext) -> "asyncio.Future[TransactionId | None]":
        """Run a context; return a future of its transaction id, None when it gave itself up.

        The first attempt is made before this returns; what `execute` raises goes to `on_exception`
        and into the future.
        """
        return await self.run_context(LoopContext(context))

    async def run_context(self, context: RunnableContext) -> "asyncio.Future[TransactionId | None]":
        """Run whatever can be run as a context; `submit` for others than asyncio's."""
        self._check_usable()
        partition_id = self._checked(context.partition_id(self.partition_count))
        run = ContextRun(context, await self._partition(partition_id), self.random)
        if await run.begin():
            self._runs[run] = None
            run.future.add_done_callback(lambda _: self._runs.pop(run, None))
            if self._closing.is_set():
                await run.follow()  # closed during the first attempt, which was not sent
            else:
                self.spawn(run.follow(), "context")
        return run.future

    # --- the feed

    async def subscribe(
        self,
        callbacks: AsyncCallbacks,
        partitions: Iterable[int] | None = None,
        *,
        headers: Iterable[int] | None = None,
    ) -> None:
        """Apply the feed of partitions (all by default) to the callbacks until closed.

        With `headers` only transactions with one of these are brought; the servers pass over the
        others, and this client's mark goes on over them.

        Returns when the application has told its marks. Raises BadRequest for a partition that is
        applied already, and what `client_high_water_mark` raises.
        """
        check_callbacks(callbacks, is_async=True)
        consumer = LoopConsumer(callbacks, self.subscriptions.data)
        await self.subscribe_consumer(consumer, partitions, check_headers(headers))

    async def subscribe_consumer(
        self, consumer: Consumer, partitions: Iterable[int] | None, header_values: tuple[int, ...]
    ) -> None:
        """Apply the feed to any consumer; `subscribe` for others than asyncio's."""
        recipient = Recipient(consumer, header_values)
        await self.subscriptions.subscribe(recipient, self._all_or(partitions))

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions whose feed is applied now; one that has ended is not among them."""
        return self.subscriptions.partitions

    async def set_partitions(self, partitions: Iterable[int]) -> None:
        """Have the feed of exactly these partitions applied, by the callbacks of `subscribe`.

        Returns when nothing of the others is applied any more (what was begun is finished), and
        the marks of those that are new were asked for. A partition goes to the callbacks that it
        had before, a new one to those that subscribed last. Not for use in a callback.

        Raises UsageError before the first `subscribe`, and what `client_high_water_mark` raises.
        """
        await self.subscriptions.set_partitions(self._all_or(partitions))

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
        """Yield the committed transactions first..last in checked chunks, dense and in order.

        With `replicas` (as `replicas()` tells them) the bytes come from a storage that vouches for
        them, and from the server where none does. Raises DataLoss when the log ends before `last`.
        """
        partition_id = self._checked(partition)
        check_range(partition_id, first, last)
        query = RangeQuery(
            TransactionId(first),
            TransactionId(last),
            form,
            tuple(header_values),
            bytes_max or self.config.range_bytes_max,
        )

        async def from_server(rest: RangeQuery) -> RangeChunk:
            return await self.requests.range(partition_id, rest)

        reader = ReplicaReader(
            partition_id,
            replicas or NO_REPLICAS,
            from_server,
            first=query.first,
            timeout_s=self.config.dial_timeout_ms / 1000,
            ssl=self._ssl,
        )
        try:
            async for chunk in read_chunks(partition_id, query, reader.fetch, self._start):
                yield chunk
        finally:
            reader.close()

    # --- private

    def _start(self, fetch: Coroutine[Any, Any, RangeChunk]) -> "asyncio.Future[RangeChunk]":
        """Run a fetch beside its reader, who may lose interest."""
        future: asyncio.Future[RangeChunk] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def run() -> None:
            told: RangeChunk | errors.WaltzError = errors.Unavailable(_CLOSED)
            try:
                told = await fetch
            except errors.WaltzError as error:
                told = error
            finally:
                if isinstance(told, RangeChunk) and not future.done():
                    future.set_result(told)
                elif isinstance(told, errors.WaltzError) and not future.done():
                    future.set_exception(told)

        if self._closing.is_set():
            fetch.close()
            raise errors.UsageError(_CLOSED)
        self.spawn(run(), "fetch")
        return future

    def _check_home(self) -> None:
        if os.getpid() != self._pid:
            raise errors.UsageError(
                f"this client was opened by process {self._pid} and is used in process "
                f"{os.getpid()}, a fork of it: open a client of its own there"
            )
        if self._root is not None and self._root.get_loop() is not asyncio.get_running_loop():
            raise errors.UsageError(
                "this client was opened on another event loop: open one in each asyncio.run"
            )

    def _check_usable(self) -> None:
        self._check_home()
        if self._is_closed or self._root is None:
            raise errors.UsageError(_CLOSED)

    def _checked(self, partition: int) -> PartitionId:
        self._check_usable()
        return check_partition(partition, self.cluster().name, self.partition_count)

    def _all_or(self, partitions: Iterable[int] | None) -> list[PartitionId]:
        self._check_usable()
        wanted = range(self.partition_count) if partitions is None else partitions
        return [self._checked(each) for each in each_of("partitions", wanted)]

    def _choose(self, partition: int | None, locks: tuple[int, ...]) -> PartitionId:
        if partition is not None:
            return self._checked(partition)
        self._check_usable()
        if locks:
            return partition_of(locks[0], self.partition_count)
        self._round_robin = (self._round_robin + 1) % self.partition_count
        return PartitionId(self._round_robin)

    async def _ask_mark(self, partition_id: PartitionId, *, linearizable: bool) -> TransactionId:
        mark = await self.requests.high_water_mark(partition_id, linearizable=linearizable)
        # A server that is about to find out that it has lost the partition may answer with less
        # than this client was told before; what is told never goes back.
        known = max(mark, self._marks.get(partition_id, mark))
        self._marks[partition_id] = known
        return known

    async def _partition(self, partition_id: PartitionId) -> ClientPartition:
        found = self._partitions.get(partition_id)
        if found is not None:
            return found
        async with self._id_lock:
            if self._client_id is None:
                self._client_id = await self.directory.next_client_id()
        # NB: another task may have made it meanwhile.
        found = self._partitions.get(partition_id)
        if found is None:
            found = ClientPartition(partition_id, self._client_id, self)
            self._partitions[partition_id] = found
        return found
