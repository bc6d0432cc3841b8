"""A partition moves, over real sockets: late messages, order and outcomes of appends.

`test_stream.py`, `test_mounts.py` and the simulator test each rule separately. Here, client and
server are connected, and messages from before a break arrive after all outcomes were settled.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import (
    IN_MEMORY_CONFIG,
    ROOT,
    MemoryCluster,
    MemoryServer,
    OpenedClient,
    memory_cluster,
)
from tests.unit.client.test_async_client import RecordingCallbacks, batch_of, wait_until
from waltz_core.client import RowOutcomeCode
from waltz_core.client.links import silent_servers
from waltz_core.client.stream import appends
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes import model
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.transport import net


class HeldConnection:
    """One connection through a `Proxy`. Each direction can be paused; no byte is lost."""

    def __init__(self) -> None:
        self.open = {"up": asyncio.Event(), "down": asyncio.Event()}
        for each in self.open.values():
            each.set()
        self.held_bytes = {"up": 0, "down": 0}
        self.client: asyncio.StreamWriter | None = None

    def hold(self, direction: str) -> None:
        """Hold messages from now on."""
        self.open[direction].clear()

    def release(self, direction: str) -> None:
        """Deliver the held messages, late."""
        self.open[direction].set()

    def lose_client(self) -> None:
        """Break the client's end; the server does not notice, and gets the held messages."""
        assert self.client is not None
        self.client.transport.abort()

    async def forward(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy until the connection ends; pass on the end only when messages are not held."""
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                self.held_bytes[direction] += len(data)
                await self.open[direction].wait()
                self.held_bytes[direction] -= len(data)
                writer.write(data)
        await self.open[direction].wait()
        writer.close()


class Proxy:
    """A proxy of a server's port."""

    def __init__(self, server_port: int, tasks: asyncio.TaskGroup) -> None:
        self._server_port = server_port
        self._tasks = tasks
        self.connections: list[HeldConnection] = []
        self.port = 0
        # While set, new connections are accepted, and the client receives no bytes.
        self.is_frozen = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        connection = HeldConnection()
        connection.client = writer
        if self.is_frozen:
            connection.hold("down")
        self.connections.append(connection)
        self._tasks.create_task(connection.forward("up", reader, server_writer))
        self._tasks.create_task(connection.forward("down", server_reader, writer))


@contextlib.asynccontextmanager
async def start_proxies(cluster: MemoryCluster) -> AsyncIterator[list[Proxy]]:
    """Start a proxy for each server of the cluster; yield the proxies in the order of servers."""
    proxies: list[Proxy] = []
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:
        for server in cluster.servers:
            assert server.listener is not None
            proxy = Proxy(server.listener.port, tasks)
            listener = await stack.enter_async_context(
                await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
            )
            proxy.port = listener.sockets[0].getsockname()[1]
            await server.coordinator.register_server(descriptor(server, proxy))
            proxies.append(proxy)
        await cluster.wait_until_settled()
        yield proxies
        for proxy in proxies:
            for connection in proxy.connections:
                connection.release("up")
                connection.release("down")
        for server in cluster.servers:
            server.cut()


@contextlib.asynccontextmanager
async def two_servers(
    config: ClientConfig = IN_MEMORY_CONFIG,
) -> AsyncIterator[tuple[MemoryCluster, list[Proxy], OpenedClient]]:
    """Yield a cluster of two servers, their proxies, and a client."""
    async with (
        memory_cluster(server_count=2) as cluster,
        start_proxies(cluster) as proxies,
        cluster.client(config).open_during() as client,
    ):
        yield cluster, proxies, client


def descriptor(server: MemoryServer, proxy: Proxy, *preferred: int) -> model.ServerDescriptor:
    return model.ServerDescriptor(server.server_id, "127.0.0.1", proxy.port, preferred)


async def move(cluster: MemoryCluster, proxies: list[Proxy], new_owner: MemoryServer) -> None:
    """Make a server own partition 0, as `cluster prefer` does."""
    for server, proxy in zip(cluster.servers, proxies, strict=True):
        if server is not new_owner:
            await server.coordinator.change_preferences(descriptor(server, proxy))
    await new_owner.coordinator.change_preferences(
        descriptor(new_owner, proxies[cluster.servers.index(new_owner)], 0)
    )
    await wait_until(
        lambda: 0 in new_owner.partitions and new_owner.partitions[0].partition.is_open
    )
    await cluster.wait_until_settled()


MOVE_COUNTS = pytest.mark.parametrize(
    "moves", [0, 1, 2], ids=["stays", "moves", "moves and returns"]
)


async def make_moves(cluster: MemoryCluster, proxies: list[Proxy], count: int) -> None:
    for _ in range(count):
        (other,) = (server for server in cluster.servers if server is not cluster.owner(0))
        await move(cluster, proxies, other)


@MOVE_COUNTS
@run_on_virtual_loop
async def test_late_appends_on_an_old_connection_are_rejected(moves: int) -> None:
    async with two_servers() as (cluster, proxies, client):
        await client.mount([0])
        server = cluster.owner(0)
        (old,) = proxies[cluster.servers.index(server)].connections
        old.hold("up")
        futures = [await client.append(b"%d" % i, partition=0) for i in range(5)]
        batch = await client.append_batch(0, batch_of(b"a", b"b"), 2, client_high_water_mark=-1)
        await wait_until(lambda: old.held_bytes["up"])
        await make_moves(cluster, proxies, moves)
        old.lose_client()
        # The batch is not in the log: rows are sent again and the batch is reported as lost.
        assert (await batch).reasons.tolist() == [RowOutcomeCode.LOST] * 2
        assert sorted([await future for future in futures]) == list(range(5))
        assert cluster.owner(0) is server or moves == 1
        before = server.received.count("AppendBatch") + server.received.count("AppendRequest")
        old.release("up")
        await wait_until(
            lambda: (
                server.received.count("AppendBatch") + server.received.count("AppendRequest")
                >= before + 2
            )
        )
        assert await (await client.append(b"last", partition=0)) == 5
        data = [row for _, _, row in cluster.logs[0].rows()]
        assert data == [*(b"%d" % i for i in range(5)), b"last"]


@MOVE_COUNTS
@run_on_virtual_loop
async def test_a_late_answer_settles_its_rows_and_no_row_is_written_twice(
    moves: int,
) -> None:
    async with two_servers() as (cluster, proxies, client):
        await client.mount([0])
        server = cluster.owner(0)
        (old,) = proxies[cluster.servers.index(server)].connections
        old.hold("down")
        futures = [await client.append(b"%d" % i, partition=0) for i in range(5)]
        batch = await client.append_batch(0, batch_of(b"a", b"b"), 2, client_high_water_mark=-1)
        await wait_until(lambda: len(cluster.logs[0].rows()) == 7)
        assert not batch.done()
        await make_moves(cluster, proxies, moves)
        old.lose_client()
        assert (await batch).committed_count == 2
        ids = [await future for future in futures]
        old.release("down")
        assert await (await client.append(b"last", partition=0)) == 7
        data = [row for _, _, row in cluster.logs[0].rows()]
        assert [data[transaction_id] for transaction_id in ids] == [b"%d" % i for i in range(5)]
        assert sorted(data) == sorted([*(b"%d" % i for i in range(5)), b"a", b"b", b"last"])


@run_on_virtual_loop
async def test_repeated_moves_lose_and_duplicate_no_transaction() -> None:
    async with two_servers() as (cluster, proxies, client):
        callbacks = RecordingCallbacks()
        await client.subscribe(callbacks, [0])
        futures, outcomes = [], []
        for turn in range(4):
            for i in range(20):
                futures.append(await client.append(b"%d-%d" % (turn, i), partition=0))
                if i % 10 == 0:
                    payload = batch_of(b"b%d-%d" % (turn, i))
                    outcomes.append(
                        await client.append_batch(0, payload, 1, client_high_water_mark=-1)
                    )
            await make_moves(cluster, proxies, 1)
        ids = [await future for future in futures]
        data = [row for _, _, row in cluster.logs[0].rows()]
        # The client has sent some appends twice. Even so, the log has each append once, at the ID
        # of its outcome, and in the order of the appends.
        sent = [b"%d-%d" % (turn, i) for turn in range(4) for i in range(20)]
        assert [data[transaction_id] for transaction_id in ids] == sent
        assert ids == sorted(ids)
        # The client does not resend batches; the committed ones are in order.
        reasons_of_batches = [(await outcome).reasons.tolist() for outcome in outcomes]
        batches = [b"b%d-%d" % (turn, i) for turn in range(4) for i in range(0, 20, 10)]
        expected = [
            row for row, (reason,) in zip(batches, reasons_of_batches, strict=True) if reason == 0
        ]
        assert [row for row in data if row.startswith(b"b")] == expected
        assert len(data) == len(sent) + len(expected)
        # Over all moves, the feed has every transaction once and in order.
        await wait_until(lambda: len(callbacks.seen) == len(data))
        assert callbacks.seen == list(range(len(data)))


@run_on_virtual_loop
async def test_resent_appends_keep_their_order() -> None:
    async with two_servers() as (cluster, proxies, client):
        await client.mount([0])
        server = cluster.owner(0)
        store = server.partitions[0].store
        store.is_holding = True
        in_flight = await client.append(b"1", partition=0)
        await wait_until(lambda: store.held_batches)
        server.partitions[0].partition.pipeline.hold_submissions()
        queued = await client.append(b"2", partition=0)
        await wait_until(lambda: server.received.count("AppendRequest") == 2)
        stream = client._partitions[0].stream
        wait = stream._wait_before_retry
        # The queued append is reported as lost before the append in flight has its outcome.
        with mock.patch.object(appends, "RESEND_DELAY_S", 0.0):
            has_lost_link = asyncio.Event()
            with mock.patch.object(
                stream,
                "_wait_before_retry",
                lambda *arguments: (has_lost_link.set(), wait(*arguments)),
            ):
                async with asyncio.TaskGroup() as group:
                    group.create_task(make_moves(cluster, proxies, 1))
                    await has_lost_link.wait()
                    unsent = await client.append(b"3", partition=0)
                    assert [await in_flight, await queued, await unsent] == [0, 1, 2]
        assert [data for _, _, data in cluster.logs[0].rows()] == [b"1", b"2", b"3"]


@contextlib.asynccontextmanager
async def client_with_layout(
    cluster: MemoryCluster, config: ClientConfig
) -> AsyncIterator[OpenedClient]:
    """Yield a client as in a Spark task: it gets the layout, and does not watch ZooKeeper."""

    async def connect(*_place: object, **_options: object) -> Coordinator:
        return cluster.zookeeper.coordinator(ROOT)

    async with cluster.client().open_during() as other:
        layout = other.layout()
    with mock.patch.object(zookeeper_session, "connect", connect):
        async with OpenedClient.at(layout, config) as client:
            yield client


@pytest.mark.parametrize("is_placed", [False, True], ids=["with ZooKeeper", "with a layout"])
@pytest.mark.parametrize("name", ["fetch data", "query mark", "append"])
@run_on_virtual_loop
@mock.patch.object(net, "HELLO_S_MAX", 60.0)
@mock.patch.object(silent_servers, "SILENCE_CHECK_S", 0.05)
async def test_a_client_of_a_frozen_server_connects_to_the_next_owner(
    name: str, is_placed: bool
) -> None:
    config = replace(IN_MEMORY_CONFIG, request_timeout_ms=60_000, server_connect_timeout_ms=60_000)
    async with (
        memory_cluster(server_count=2) as cluster,
        start_proxies(cluster) as proxies,
        client_with_layout(cluster, config)
        if is_placed
        else cluster.client(config).open_during() as client,
    ):
        await (await client.append(b"a", partition=0))
        proxy = proxies[cluster.servers.index(cluster.owner(0))]
        for connection in proxy.connections:
            connection.hold("down")
        proxy.is_frozen = True
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            # Requests for data use a separate connection, which does not exist yet.
            "fetch data": lambda: client.requests.fetch_data(PartitionId(0), TransactionId(0)),
            "query mark": lambda: client.high_water_mark(0),
            "append": lambda: append_and_wait(client, b"b"),
        }
        async with asyncio.TaskGroup() as tasks:
            request_task = tasks.create_task(calls[name]())
            await wait_until(
                lambda: any(connection.held_bytes["down"] for connection in proxy.connections)
            )
            await make_moves(cluster, proxies, 1)
        assert request_task.result() == {"fetch data": b"a", "query mark": 0, "append": 1}[name]


async def append_and_wait(client: OpenedClient, data: bytes) -> int:
    return await (await client.append(data, partition=0))
