"""The server process over real sockets, with storages and a ZooKeeper in memory."""

import asyncio
import contextlib
import dataclasses
import logging
import zlib
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import pytest

from tests.integration.memory_storage import MemoryStorage
from tests.loops import poll_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.znodes.interface import DeleteNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import SESSION_TIMEOUT_MS, MemoryZooKeeper
from waltz_core.config import ServerConfig
from waltz_core.records.batches import encode_append
from waltz_core.records.record import ClientId, Generation, PartitionId, ReplicaId, ReqId
from waltz_core.server.process import server_daemon
from waltz_core.server.process.server_daemon import Server
from waltz_core.transport import net
from waltz_core.wire import messages
from waltz_core.wire.messages import (
    LATEST_MARK,
    ClientMessage,
    RangeForm,
    RowOutcomeCode,
    WireProtocol,
)

ROOT = "/waltz/test"
CLUSTER_KEY = UUID(int=7)
MessageT = TypeVar("MessageT", bound=ClientMessage)
ALICE, BOB = ClientId(1), ClientId(2)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def run_with_timeout() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await main

    net.run(run_with_timeout())


class World:
    """Storages, a ZooKeeper, and servers that tests start and stop."""

    def __init__(self) -> None:
        self.zookeeper = MemoryZooKeeper(asyncio.Event)
        self.storages = [MemoryStorage(number) for number in range(3)]
        self.servers: list[Server] = []
        self.stops: list[asyncio.Event] = []

    async def start(self, partition_count: int) -> None:
        coordinator = self.zookeeper.coordinator(ROOT)
        for each in self.storages:
            await each.start()
        new = NewCluster(
            "test",
            partition_count,
            CLUSTER_KEY,
            # Each storage is a separate group.
            tuple(
                NewStorage(ReplicaId(each.address), 1, n) for n, each in enumerate(self.storages)
            ),
            {
                ReplicaId(each.address): tuple(map(PartitionId, range(partition_count)))
                for each in self.storages
            },
        )
        await coordinator.create_cluster(new)
        for storage in self.storages:
            await coordinator.register_storage_id(ReplicaId(storage.address), storage.storage_id)

    async def serve(self, tasks: asyncio.TaskGroup, **settings: Any) -> Server:
        coordinator = self.zookeeper.coordinator(ROOT)
        config = ServerConfig(connect="memory:1/waltz/test", port=0, **settings)
        cluster = await coordinator.read_cluster()
        server = Server(config, coordinator, cluster, await coordinator.next_server_id())
        stop, ready = asyncio.Event(), asyncio.Event()
        tasks.create_task(server.serve(stop, lambda _address: ready.set()))
        await ready.wait()
        self.servers.append(server)
        self.stops.append(stop)
        return server


@contextlib.asynccontextmanager
async def cluster(
    partition_count: int = 1, *, world: World | None = None, **settings: Any
) -> AsyncIterator[tuple[World, Server]]:
    world = World() if world is None else world
    await world.start(partition_count)
    async with asyncio.TaskGroup() as tasks:
        server = await world.serve(tasks, **settings)
        await poll_until(
            lambda: (
                len(server.hosts) == partition_count
                and all(host.partition.is_open for host in server.hosts.values())
            )
        )
        try:
            yield world, server
        finally:
            for stop in world.stops:
                stop.set()
    for storage in world.storages:
        await storage.stop()


class Client:
    """One connection of a client; answers by request ID."""

    def __init__(self, link: net.Link, client_id: ClientId, generation: int) -> None:
        self.link = link
        self.client_id = client_id
        self.generation = Generation(generation)
        self.sequence = 0
        self.pushed: list[ClientMessage] = []
        self._answers: dict[ReqId, asyncio.Future[ClientMessage]] = {}
        self.closed: str | None = None
        link.start(self._take, self._close)

    def _take(self, received: list[messages.Message]) -> None:
        for message in received:
            assert isinstance(message, ClientMessage)
            waiting = self._answers.get(message.req_id)
            if waiting is None or waiting.done() or isinstance(message, messages.FeedBatch):
                self.pushed.append(message)
            else:
                waiting.set_result(message)

    def _close(self, reason: str) -> None:
        self.closed = reason

    def req_id(self, rows: int = 1, partition: int = 0) -> ReqId:
        self.sequence += rows
        return ReqId(
            self.client_id, self.generation, PartitionId(partition), self.sequence - rows + 1
        )

    def ask(self, message: ClientMessage) -> "asyncio.Future[ClientMessage]":
        self._answers[message.req_id] = asyncio.get_running_loop().create_future()
        self.link.send(message)
        return self._answers[message.req_id]

    async def mount(
        self, partition: int = 0, *, sequence: int = 1, mark: int = LATEST_MARK, feed: bool = False
    ) -> messages.Mounted:
        req_id = self.req_id(partition=partition)
        answer = await self.ask(messages.MountWriter(req_id, sequence, mark, feed))
        assert isinstance(answer, messages.Mounted), answer
        return answer

    def append(
        self, rows: int = 1, *, size: int = 10, mark: int = -1, locks: list[int] | None = None
    ) -> "asyncio.Future[ClientMessage]":
        none: list[list[int]] = [[] for _ in range(rows)]
        payload = encode_append(
            list(range(rows)),
            [bytes(size)] * rows,
            write_locks=none if locks is None else [[lock] for lock in locks],
            read_locks=none,
            append_locks=none,
        )
        req_id = self.req_id(rows)
        return self.ask(messages.AppendBatch(req_id, mark, payload, zlib.crc32(payload)))

    async def mark(self, partition: int = 0) -> int:
        answer = await self.ask(messages.HighWaterMarkRequest(self.req_id(partition=partition)))
        assert isinstance(answer, messages.HighWaterMarkResponse), answer
        return answer.high_water_mark


async def connect(server: Server, client_id: ClientId = ALICE) -> Client:
    link = await net.dial(WireProtocol.CLIENT, server.address)
    generations = [host.partition.generation for host in server.hosts.values()]
    return Client(link, client_id, generations[0] if generations else 0)


async def ids(answer: "asyncio.Future[ClientMessage]") -> list[int]:
    message = await answer
    assert isinstance(message, messages.AppendResult), message
    found: list[int] = np.frombuffer(message.transaction_ids, ">i8").tolist()
    return found


def test_a_client_can_append_read_and_flush() -> None:
    async def main() -> None:
        async with cluster() as (world, server):
            client = await connect(server)
            mounted = await client.mount()
            assert mounted.high_water_mark == -1
            assert await ids(client.append(3)) == [0, 1, 2]
            single = messages.AppendRequest(
                client.req_id(), -1, (7,), (), (), 5, b"alone", zlib.crc32(b"alone")
            )
            assert await ids(client.ask(single)) == [3]
            flushed = await client.ask(messages.FlushRequest(client.req_id()))
            assert isinstance(flushed, messages.FlushResponse)
            assert flushed.high_water_mark == 3 == await client.mark()
            data = await client.ask(messages.TransactionDataRequest(client.req_id(), 3))
            assert isinstance(data, messages.TransactionDataResponse)
            assert bytes(data.result[0] or b"") == b"alone"
            answer = await client.ask(
                messages.RangeRequest(client.req_id(), 0, 9, 1 << 20, RangeForm.WHOLE, ())
            )
            assert isinstance(answer, messages.RangeData)
            assert (answer.count, answer.next) == (4, 4)
            for storage in world.storages:
                await poll_until(lambda log=storage.logs[0]: log.last == 3)
                assert storage.counts["RangeRaw"] == 0

    run(main())


def test_evicted_data_is_read_from_a_storage() -> None:
    async def main() -> None:
        async with cluster(transaction_cache_bytes=1 << 20) as (world, server):
            client = await connect(server)
            await client.mount()
            for _ in range(4):
                await client.append(100, size=4_000)
            ask = messages.RangeRequest(client.req_id(), 0, 99, 1 << 20, RangeForm.WHOLE, ())
            answer = await client.ask(ask)
            assert isinstance(answer, messages.RangeData)
            assert answer.count == 100
            assert sum(storage.counts["RangeRaw"] for storage in world.storages) == 1
            newest = messages.RangeRequest(client.req_id(), 399, 399, 9, RangeForm.HEADERS, ())
            answer = await client.ask(newest)
            assert isinstance(answer, messages.RangeData)
            assert sum(storage.counts["RangeRaw"] for storage in world.storages) == 1

    run(main())


def test_a_server_reads_from_its_own_group_while_the_replica_there_is_engaged() -> None:
    async def main() -> None:
        async with cluster(transaction_cache_bytes=1 << 20, group=1) as (world, server):
            client = await connect(server)
            await client.mount()
            for _ in range(4):
                await client.append(100, size=4_000)

            async def read(first: int) -> None:
                number = client.req_id()
                ask = messages.RangeRequest(number, first, first + 9, 1 << 20, RangeForm.WHOLE, ())
                answer = await client.ask(ask)
                assert isinstance(answer, messages.RangeData)
                assert answer.count == 10

            for first in range(0, 60, 10):
                await read(first)
            assert [storage.counts["RangeRaw"] for storage in world.storages] == [0, 6, 0]
            await world.storages[1].stop()
            await read(70)
            assert world.storages[1].counts["RangeRaw"] == 6
            assert sum(storage.counts["RangeRaw"] for storage in world.storages) == 7

    run(main())


def test_requests_without_a_partition_are_answered_by_the_server() -> None:
    async def main() -> None:
        async with cluster(2) as (world, server):
            client = await connect(server)
            owned = await client.ask(messages.ServerPartitionsRequest(client.req_id()))
            assert isinstance(owned, messages.ServerPartitionsResponse)
            assert owned.partitions == (0, 1)
            health = await client.ask(messages.PartitionsHealthRequest(client.req_id()))
            assert isinstance(health, messages.PartitionsHealthResponse)
            assert health.healthy == ((0, True), (1, True))
            await world.storages[2].stop()
            reach = await client.ask(messages.CheckConnectivityRequest(client.req_id()))
            assert isinstance(reach, messages.CheckConnectivityResponse)
            assert sorted(is_up for _, is_up in reach.reachable) == [False, True, True]
            replicas = await client.ask(
                messages.ReplicasRequest(client.req_id(), linearizable=True)
            )
            assert isinstance(replicas, messages.ReplicasResponse)
            assert set(replicas.replicas) <= {storage.address for storage in world.storages}
            assert (await server.health()).details["zookeeper"] is True

    run(main())


def test_a_server_reports_the_latency_of_its_storages_and_which_append_was_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with cluster(slow_append_ms=1) as (world, server):
            client = await connect(server)
            await client.mount()
            names = {storage.address for storage in world.storages}

            def is_logged() -> bool:
                lines = [
                    message for message in caplog.messages if message.startswith("append.slow ")
                ]
                return all(any(f"replica={name} " in line for line in lines) for name in names)

            while not is_logged():
                await client.append(1)
            times = messages.AppendTimesResponse(client.req_id(), (), (), ())
            while set(times.storages) != names:
                answer = await client.ask(messages.AppendTimesRequest(client.req_id()))
                assert isinstance(answer, messages.AppendTimesResponse)
                times = answer
            assert all(count >= 1 for count in times.second_counts)
            assert len(times.medians_us) == len(names)
            page = server.metrics.page().decode()
            assert "waltz_server_zookeeper_connected 1.0" in page
            for name in names:
                assert f'waltz_server_replica_append_seconds_count{{replica="{name}"}}' in page

    with caplog.at_level("WARNING"):
        run(main())


def test_a_server_is_notified_of_its_preferred_partitions() -> None:
    async def main() -> None:
        async with cluster(2) as (world, server):
            client = await connect(server)

            async def prefers(kind: type, partitions: tuple[int, ...]) -> bool:
                answer = await client.ask(kind(client.req_id(), partitions))
                return bool(answer.is_done)

            async def written() -> tuple[int, ...]:
                (found,) = (await world.zookeeper.coordinator(ROOT).read_servers()).servers.values()
                return found.preferred

            assert await prefers(messages.AddPreferredRequest, (1, 0))
            assert await written() == (1, 0)
            for wrong in ((2,), (0, -1), ()):
                assert not await prefers(messages.AddPreferredRequest, wrong)
                assert not await prefers(messages.RemovePreferredRequest, wrong)
            assert await written() == (1, 0)
            assert await prefers(messages.RemovePreferredRequest, (1,))
            assert await prefers(messages.AddPreferredRequest, (0,))
            assert await written() == (0,)

    run(main())


def test_every_invalid_request_gets_an_error() -> None:
    async def main() -> None:
        async with cluster() as (_, server):
            client = await connect(server)
            unknown = await client.ask(messages.HighWaterMarkRequest(client.req_id(partition=9)))
            assert isinstance(unknown, messages.ErrorResponse)
            assert unknown.error_code == errors.UnknownPartition.code
            answer = await client.ask(messages.FlushResponse(client.req_id(), 3))
            assert isinstance(answer, messages.ErrorResponse)
            assert answer.error_code == errors.BadRequest.code
            rejected = await client.append(2)
            assert isinstance(rejected, messages.AppendResult)
            assert bytes(rejected.reasons) == bytes([RowOutcomeCode.NOT_MOUNTED] * 2)

    run(main())


def test_a_replaced_storage_joins_without_a_new_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_short_delays = partial(
        dataclasses.replace, redial_ms_min=10, redial_ms_max=20, rejected_retry_ms=30
    )
    partition_limits_of = server_daemon.session_limits_of
    monkeypatch.setattr(
        server_daemon,
        "session_limits_of",
        lambda config: with_short_delays(partition_limits_of(config)),
    )

    async def main() -> None:
        async with cluster() as (world, server):
            client = await connect(server)
            await client.mount()
            await client.append(3)
            replaced, partition = world.storages[1], server.hosts[PartitionId(0)].partition
            session = partition.session_id
            await replaced.stop()
            # The partition may be open again before the test can observe that it was closed.
            await poll_until(lambda: partition.session_id > session and partition.is_open)
            session = partition.session_id
            replaced.logs.clear()
            replaced.storage_id = UUID(int=99)
            await replaced.start()
            coordinator = world.zookeeper.coordinator(ROOT)
            path = coordinator.paths.storage_id(ReplicaId(replaced.address))
            await world.zookeeper.session().write([DeleteNode(path, 0)])
            registered = await coordinator.register_storage_id(
                ReplicaId(replaced.address), replaced.storage_id
            )
            assert registered == replaced.storage_id
            await poll_until(lambda: 0 in replaced.logs and replaced.logs[0].last == 2)
            assert partition.session_id == session

    run(main())


def test_appends_and_marks_continue_without_zookeeper() -> None:
    async def main() -> None:
        async with cluster(high_water_mark_staleness_ms_max=1) as (world, server):
            client = await connect(server)
            await client.mount()
            for session in world.zookeeper._sessions:
                session.suspend()
            assert (await server.health()).is_healthy is True
            world.zookeeper.advance(2 * SESSION_TIMEOUT_MS)
            health = await server.health()
            assert health.is_healthy is True
            assert health.unready_reasons == []
            assert health.details["zookeeper"] is False
            assert await ids(client.append(2)) == [0, 1]
            # The server must query a quorum, because `high_water_mark_staleness_ms_max` has passed.
            before = sum(storage.counts["Heartbeat"] for storage in world.storages)
            await poll_until(lambda: server.hosts[PartitionId(0)].partition.is_open)
            async with asyncio.timeout(TEST_TIMEOUT_S):
                while sum(storage.counts["Heartbeat"] for storage in world.storages) == before:
                    assert await client.mark() == 1
                    await asyncio.sleep(0.001)
            for session in world.zookeeper._sessions:
                session.resume()
            assert await ids(client.append(2)) == [2, 3]

    run(main())


def test_a_server_is_ready_once_it_has_registered_and_its_partitions_are_open() -> None:
    async def main() -> None:
        async with cluster() as (world, first):
            coordinator = world.zookeeper.coordinator(ROOT)
            view, server_id = await coordinator.read_cluster(), await coordinator.next_server_id()
            new = Server(ServerConfig(connect="memory:1/x"), coordinator, view, server_id)
            assert (await new.health()).unready_reasons == ["the server has not registered yet"]
            async with asyncio.TaskGroup() as tasks:
                second = await world.serve(tasks)
                assert not second.hosts
                assert (await second.health()).unready_reasons == []
                world.stops[1].set()
            assert (await first.health()).unready_reasons == []
            for storage in world.storages:
                await storage.stop()
            await poll_until(lambda: not first.hosts[PartitionId(0)].partition.is_open)
            health = await first.health()
            assert health.unready_reasons == ["partition 0 has no open store session"]

    run(main())


def test_the_former_owner_of_a_moved_partition_answers_not_owned_and_keeps_no_state() -> None:
    async def main() -> None:
        async with cluster(2) as (world, first):
            client = await connect(first)
            for partition in (0, 1):
                await client.mount(partition)
            hosts = dict(first.hosts)
            async with asyncio.TaskGroup() as tasks:
                second = await world.serve(tasks)
                await poll_until(lambda: len(first.hosts) == 1 and len(second.hosts) == 1)
                (moved,) = second.hosts
                await poll_until(lambda: second.hosts[moved].partition.is_open)
                req_id = client.req_id(partition=moved)
                answer = await client.ask(messages.HighWaterMarkRequest(req_id))
                assert isinstance(answer, messages.ErrorResponse)
                assert answer.error_code == errors.NotOwned.code
                # The neighbor is connected as well, and receives nothing.
                hosts_asked = [each.hosts.values() for each in first._clients._clients.values()]
                assert list(chain(*hosts_asked)) == [hosts[PartitionId(1 - moved)]]
                assert second.hosts[moved].partition.generation > hosts[moved].partition.generation
                world.stops[1].set()
                await poll_until(lambda: len(first.hosts) == 2)

    run(main())


def test_a_client_that_never_reads_needs_bounded_memory_and_slows_no_other_client() -> None:
    async def main() -> None:
        async with cluster() as (_, server):
            writer, slow_reader = await connect(server), await connect(server, BOB)
            await writer.mount()
            mounted = await slow_reader.mount(feed=True)
            slow_reader.link.pause_reading()
            slow_reader.link.send(messages.FeedRequest(mounted.req_id, -1))
            for _ in range(100):
                slow_reader.link.send(
                    messages.RangeRequest(
                        slow_reader.req_id(), 0, 10_000, 1 << 22, RangeForm.WHOLE, ()
                    )
                )
            for _ in range(100):
                await writer.append(1_000, size=100)
                assert server._clients.memory_bytes < 64 << 20
            assert await writer.mark() == 99_999
            assert slow_reader.closed is None
            slow_reader.link.resume_reading()
            await poll_until(
                lambda: (
                    sum(
                        each.count
                        for each in slow_reader.pushed
                        if isinstance(each, messages.FeedBatch)
                    )
                    >= 10_000
                )
            )

    run(main())


def test_appends_in_flight_at_shutdown_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with cluster() as (world, server):
            client = await connect(server)
            await client.mount()
            for storage in world.storages:
                storage.holds_appends = True
            waiting = client.append(2)
            pipeline = server.hosts[PartitionId(0)].partition.pipeline
            await poll_until(lambda: pipeline.in_flight_bytes > 0)
            world.stops[0].set()
            await asyncio.sleep(0)
            for storage in world.storages:
                storage.release()
            assert await ids(waiting) == [0, 1]

    with caplog.at_level(logging.ERROR):
        run(main())
    assert caplog.records == []
