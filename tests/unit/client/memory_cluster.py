"""A cluster in one process: production partition machines, a log in memory, real TCP.

Only the layers below a served partition are simulated: replication commits at once or on request,
and reads come from the log in memory. ZooKeeper is `cluster/zookeeper/zookeeper_in_memory.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple
from uuid import UUID

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.access.client_ids import NO_PROOF
from waltz_core.client import AsyncWaltzClient
from waltz_core.client.links.directory import ZooKeeperDirectory
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.znodes import model
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.config import ClientConfig
from waltz_core.driver import Driver
from waltz_core.errors import NotOwned
from waltz_core.records.record import PartitionId
from waltz_core.replication import session_events as replication
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.partition.served_partition import Partition, PartitionIdentity
from waltz_core.server.partition_events import (
    ConnectionClosed,
    ConnectionId,
    Fetch,
    FetchAnswered,
    PartitionLimits,
    RequestReceived,
    SendToClient,
    error_answer,
)
from waltz_core.server.process.log_in_memory import MEMORY_REPLICA, MemoryLog, MemoryStore
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.transport import net
from waltz_core.transport.listening import Listener, listen
from waltz_core.wire.messages import ClientIdRequest, ClientIdResponse, WireProtocol

KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
ROOT = "/waltz/test"
CONNECT = f"memory:2181{ROOT}"
MIB = 1024 * 1024
IN_MEMORY_CONFIG = ClientConfig(
    request_timeout_ms=8_000,
    retry_interval_ms_min=5,
    retry_interval_ms_max=50,
    zookeeper_connect_timeout_ms=3_000,
    mount_timeout_ms=3_000,
    server_connect_timeout_ms=1_000,
)


class ReadableLog(MemoryLog):
    def rows(self) -> list[tuple[tuple[int, ...], int, bytes]]:
        """Return the rows of the log: request ID, header, data."""
        return [
            (tuple(transaction.req_id), transaction.header, transaction.data)
            for transaction in self.transactions()
        ]


class HoldingStore(MemoryStore):
    """Commits batches at once; while `is_holding` is set, keeps them until `release`."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.is_holding = False
        self.held_batches: list[replication.Batch] = []

    def submit(self, batch: replication.Batch) -> Sequence[replication.Effect]:
        if not self.is_holding:
            return super().submit(batch)
        self.held_batches.append(batch)
        return ()

    def open(self) -> Sequence[replication.Effect]:
        self.held_batches.clear()
        return super().open()


class HostedPartition(NamedTuple):
    """One partition on a server."""

    partition: Partition
    driver: Driver
    store: HoldingStore


class OpenedClient(AsyncWaltzClient):
    """A client with a context manager that opens and closes it."""

    @contextlib.asynccontextmanager
    async def open_during(self) -> AsyncIterator["OpenedClient"]:
        await self.open()
        try:
            yield self
        finally:
            await self.close()


class MemoryServer:
    """A server that owns partitions by the assignment and serves clients over TCP."""

    def __init__(self, cluster: "MemoryCluster", server_id: int) -> None:
        self._cluster = cluster
        self.server_id = server_id
        self.coordinator = cluster.zookeeper.coordinator(ROOT)
        self.partitions: dict[int, HostedPartition] = {}
        self.links: dict[int, net.Link] = {}
        self.listener: Listener | None = None
        self._connections = 0
        self.received: list[str] = []
        self.tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        self.listener = await listen(WireProtocol.CLIENT, "127.0.0.1", 0, self._accept)
        await self.coordinator.register_server(
            model.ServerDescriptor(self.server_id, "127.0.0.1", self.listener.port)
        )

    async def follow(self) -> None:
        await self.coordinator.follow_servers(self._on_servers_changed)

    def _on_servers_changed(self, view) -> None:
        own_partitions = view.partitions_of(self.server_id)
        for number in [each for each in self.partitions if each not in own_partitions]:
            self.partitions.pop(number)[1].post(replication.ReleaseOwnership())
        for number, generation in own_partitions.items():
            if number not in self.partitions:
                store = HoldingStore(self._cluster.logs[number])
                partition = Partition(
                    PartitionIdentity(
                        PartitionId(number), self._cluster.partition_count, KEY.bytes
                    ),
                    store,
                    self._cluster.limits,
                    TransactionCache(CacheBudget(16 * MIB)),
                    FeedCache(4 * MIB),
                    LargeBatchThrottle(),
                )
                driver = Driver(partition, lambda effect, n=number: self._perform(n, effect))
                self.partitions[number] = HostedPartition(partition, driver, store)
            partition, driver, _ = self.partitions[number]
            if partition.generation != generation:
                driver.post(replication.TakeOwnership(generation, (MEMORY_REPLICA,)))

    def _accept(self, link: net.Link) -> None:
        self._connections += 1
        number = self._connections
        self.links[number] = link

        def on_messages(messages) -> None:
            for message in messages:
                self.received.append(type(message).__name__)
                if isinstance(message, ClientIdRequest):
                    self._cluster._group.create_task(self._issue_client_id(link, message))
                    continue
                hosted = self.partitions.get(message.req_id.partition_id)
                if hosted is None:
                    answer = error_answer(
                        ConnectionId(number), message.req_id, 0, NotOwned("not here")
                    )
                    link.send(answer.message)
                else:
                    hosted[1].post(
                        RequestReceived(ConnectionId(number), message, 100, 1_700_000_000_000)
                    )

        def on_closed(reason: str) -> None:
            del self.links[number]
            for _, driver, _ in self.partitions.values():
                driver.post(ConnectionClosed(ConnectionId(number)))

        link.start(on_messages, on_closed)

    async def _issue_client_id(self, link: net.Link, message: ClientIdRequest) -> None:
        client_id = await self.coordinator.issued_ids.allocate_id()
        link.send(ClientIdResponse(message.req_id, client_id, NO_PROOF))

    def _perform(self, number: int, effect) -> None:
        match effect:
            case SendToClient():
                link = self.links.get(effect.connection)
                if link is not None:
                    link.send(effect.message)
            case Fetch():
                answer = self._cluster.logs[number].read(effect.message)
                driver = self.partitions[number][1]
                loop = asyncio.get_running_loop()
                loop.call_soon(driver.post, FetchAnswered(effect.token, answer))

    def cut(self) -> None:
        """Break every connection."""
        for link in list(self.links.values()):
            link.abort("cut")

    def lose_session(self, number: int, *, committed: int) -> None:
        """End a partition's session; the first `committed` batches in flight are in the log."""
        _partition, driver, store = self.partitions[number]
        log = self._cluster.logs[number]
        for batch in store.held_batches[:committed]:
            log.write(batch, log.session)
        effects = [replication.SessionClosed(log.session, "lost"), *store.open()]
        out: list = []
        original_step, store.step = store.step, lambda event, now_ms: effects
        try:
            # After any event of the store the partition processes the store's effects.
            driver.post(replication.Checkpoint())
        finally:
            store.step = original_step
        assert not out

    def release(self, number: int) -> None:
        """Commit the held batches, and stop holding further ones."""
        _, driver, store = self.partitions[number]
        log = self._cluster.logs[number]
        store.is_holding = False
        batches, store.held_batches = store.held_batches, []
        effects: list = []
        for batch in batches:
            log.write(batch, log.session)
            effects.append(replication.TransactionsCommitted(log.session, log.mark, log.chain))
        original_step, store.step = store.step, lambda event, now_ms: effects
        try:
            driver.post(replication.Checkpoint())
        finally:
            store.step = original_step

    async def stop(self) -> None:
        """Stop the server: it answers no client, and ZooKeeper notices."""
        await self.coordinator.close()
        for _, driver, _ in self.partitions.values():
            driver.stop()
        self.cut()
        if self.listener is not None:
            await self.listener.close()


class MemoryCluster:
    """ZooKeeper, logs and servers."""

    def __init__(self, partition_count: int, limits: PartitionLimits | None = None) -> None:
        self.partition_count = partition_count
        self.limits = limits or PartitionLimits(lock_slot_count=1_048_573, lock_load_count_max=0)
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.logs = [ReadableLog() for _ in range(partition_count)]
        self.servers: list[MemoryServer] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[int, asyncio.Task] = {}

    async def add_server(self) -> MemoryServer:
        server = MemoryServer(self, len(self.servers))
        self.servers.append(server)
        await server.start()
        self._tasks[server.server_id] = self._group.create_task(server.follow())
        return server

    async def stop_server(self, server: MemoryServer) -> None:
        self._tasks.pop(server.server_id).cancel()
        await server.stop()

    async def wait_until_settled(self) -> None:
        """Wait until every partition is owned and open."""
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while True:
                owned = sum(
                    partition.is_open
                    for server in self.servers
                    if server.server_id in self._tasks
                    for partition, _, _ in server.partitions.values()
                )
                if owned == self.partition_count:
                    return
                await asyncio.sleep(0.01)

    def owner(self, number: int) -> MemoryServer:
        return next(
            server
            for server in self.servers
            if server.server_id in self._tasks and number in server.partitions
        )

    def client(
        self,
        config: ClientConfig = IN_MEMORY_CONFIG,
        *,
        client_id: int | None = None,
        root: str = ROOT,
    ) -> OpenedClient:
        directory = ZooKeeperDirectory(
            CONNECT,
            connect_timeout_ms=config.zookeeper_connect_timeout_ms,
            coordinator=self.zookeeper.coordinator(root),
        )
        return OpenedClient(directory, CONNECT, config, client_id=client_id)


@contextlib.asynccontextmanager
async def memory_cluster(
    *, partition_count: int = 2, server_count: int = 1, limits: PartitionLimits | None = None
) -> AsyncIterator[MemoryCluster]:
    cluster = MemoryCluster(partition_count, limits)
    await cluster.zookeeper.coordinator(ROOT).create_cluster(
        NewCluster("test", partition_count, KEY)
    )
    async with asyncio.TaskGroup() as group:
        cluster._group = group
        try:
            for _ in range(server_count):
                await cluster.add_server()
            await cluster.wait_until_settled()
            yield cluster
        finally:
            for server in cluster.servers:
                if server.server_id in cluster._tasks:
                    await cluster.stop_server(server)


@contextlib.asynccontextmanager
async def two_clients(
    second: ClientConfig = IN_MEMORY_CONFIG,
) -> AsyncIterator[tuple[MemoryCluster, OpenedClient, OpenedClient]]:
    """Yield a cluster and two clients of it."""
    async with (
        memory_cluster() as cluster,
        cluster.client().open_during() as one,
        cluster.client(second).open_during() as two,
    ):
        yield cluster, one, two
