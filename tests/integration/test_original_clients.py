"""Models of 0.13 clients get no lost, duplicated or wrong outcomes from this version's server."""

import asyncio
import contextlib
import struct
import zlib

import pytest

from tests import original_client as original
from tests.integration.test_server_daemon import World, cluster, connect, ids, run
from tests.loops import poll_until
from tests.original_client import OriginalClient, Req
from waltz_core.records.record import PartitionId
from waltz_core.server.process import host as hosting
from waltz_core.server.process.server_daemon import Server
from waltz_core.wire import messages


class Counters:
    """The state that a client makes of the log: counters, by name."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.applied: list[tuple[int, bytes]] = []

    def apply(self, _partition: int, number: int, _header: int, _req: Req, data: bytes) -> None:
        assert number == len(self.applied)
        self.applied.append((number, data))
        name, value = data.decode().split("=")
        assert int(value) == self.values.get(name, 0) + 1, "one client has not seen another's write"
        self.values[name] = int(value)

    def count_up(self, name: str) -> dict[str, object]:
        """Return an append that counts one up, as the state is now."""
        value = self.values.get(name, 0) + 1
        return {"data": f"{name}={value}".encode(), "write": [original.lock(name, 0)]}


def endpoints_of(*servers: Server) -> dict[str, dict[int, int]]:
    return {
        server.address: {int(p): int(h.partition.generation) for p, h in server.hosts.items()}
        for server in servers
    }


@contextlib.asynccontextmanager
async def model_of(client_id: int, *servers: Server):
    state = Counters()
    async with OriginalClient(client_id, [0], state.apply) as client:
        client.set_endpoints(endpoints_of(*servers))
        yield client, state


async def applied_more(models: list[tuple[OriginalClient, Counters]]) -> None:
    """Wait until every client has applied some more transactions."""
    for _, state in models:
        mark = len(state.applied)
        await poll_until(lambda state=state, mark=mark: len(state.applied) > mark + 5)


async def count_until(is_over: asyncio.Event, client: OriginalClient, state: Counters) -> None:
    while not is_over.is_set():
        await client.submit(0, lambda: state.count_up("a"))


def has_lost_partition(client: OriginalClient) -> bool:
    """Whether a client was notified that the partition moved; a waiting read is notified later."""
    return client.counts["not ready"] > 1 or bool(client.rpc.partitions[0].wanted)


def check_outcomes(world: World, clients: list[OriginalClient]) -> None:
    """Check that the log has each committed append once, and no append reported as failed."""
    log = [
        Req(*struct.unpack_from(">iiii", record, 8)) for record in world.storages[1].logs[0].records
    ]
    assert len(set(log)) == len(log)
    for client in clients:
        for each, is_committed in client.outcomes.items():
            assert (each in log) == is_committed, each


def test_appends_of_a_broken_session_are_settled_on_the_same_connection() -> None:
    async def main() -> None:
        async with cluster() as (world, server), model_of(9, server) as (client, state):
            await client.submit(0, lambda: state.count_up("a"))
            partition = server.hosts[PartitionId(0)].partition
            for storage in world.storages:
                storage.holds_appends = True
            names = ("a", "b", "c", "d", "e")
            waiting = [
                asyncio.ensure_future(client.submit(0, lambda name=name: state.count_up(name)))  # noqa: TID251
                for name in names
            ]
            await poll_until(lambda: all(each.logs[0].last == 5 for each in world.storages))
            # No append was acknowledged. All three storages discard the appends, so they are lost.
            session = partition.session_id
            for storage in world.storages:
                storage._held_answers.clear()
                storage.holds_appends = False
                storage.logs[0].truncate(0)
            for storage in world.storages:
                await storage.stop()
                await storage.start()
            await asyncio.wait(waiting)
            assert partition.session_id > session
            await poll_until(lambda: state.values == {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1})
            assert client.counts["not ready"] >= 1
            assert client.stream.reconnects == 0
            assert False in client.outcomes.values()
            await poll_until(lambda: world.storages[1].logs[0].last == 5)
            check_outcomes(world, [client])

    run(main())


def test_a_0_13_client_with_a_reset_connection_number_reconnects_until_it_is_accepted() -> None:
    async def main() -> None:
        async with cluster() as (_, server):
            earlier = await original.Wire.open(server.address)
            mount = Req(9, 1, 0, 1)
            earlier.send(original.MOUNT_REQUEST, mount, struct.pack(">qq", -1, 3))
            kind, *_ = await earlier.receive()
            assert kind == original.MOUNT_RESPONSE
            # After its server's node was missing for a moment, the client restarts its sequence at
            # 0.
            async with model_of(9, server) as (client, state):
                await client.submit(0, lambda: state.count_up("a"))
                assert client.stream.reconnects == 4
                await poll_until(lambda: state.values == {"a": 1})
            earlier.close()

    run(main())


def test_a_reader_continues_when_its_server_owns_the_partition_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "REOPEN_PAUSE_S", 0.1)

    async def main() -> None:
        async with (
            cluster(quorum_timeout_ms=1_000) as (world, server),
            model_of(9, server) as (client, state),
        ):
            await client.submit(0, lambda: state.count_up("a"))
            partition = server.hosts[PartitionId(0)].partition
            generation = partition.generation
            for storage in world.storages[:2]:
                await storage.stop()
            await poll_until(lambda: not partition.is_owned)
            mark = asyncio.ensure_future(client.get_mark(0))  # noqa: TID251
            for storage in world.storages[:2]:
                await storage.start()
            await poll_until(lambda: partition.is_open)
            assert partition.generation == generation
            writer = await connect(server)
            await writer.mount()
            crc = zlib.crc32(b"b=1")
            request = messages.AppendRequest(writer.req_id(), 0, (), (), (), 0, b"b=1", crc)
            assert await ids(writer.ask(request)) == [1]
            await poll_until(lambda: state.values == {"a": 1, "b": 1})
            await client.submit(0, lambda: state.count_up("a"))
            assert client.stream.reconnects == 0
            assert await mark >= 0
            check_outcomes(world, [client])

    run(main())


def test_counters_stay_right_if_clients_notice_late_that_a_partition_moved_and_returned() -> None:
    async def main() -> None:
        async with cluster(2) as (world, first), contextlib.AsyncExitStack() as stack:
            models = [
                await stack.enter_async_context(model_of(20 + number, first)) for number in range(3)
            ]
            is_over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for model in models:
                    tasks.create_task(count_until(is_over, *model))
                await applied_more(models)
                async with asyncio.TaskGroup() as serving:
                    second = await world.serve(serving)
                    await second.change_preferences((PartitionId(0),), ())
                    await poll_until(lambda: 0 in second.hosts and 0 not in first.hosts)
                    await poll_until(lambda: second.hosts[PartitionId(0)].is_open)
                    await poll_until(
                        lambda: all(has_lost_partition(client) for client, _ in models)
                    )
                    for client, _ in models:
                        client.set_endpoints(endpoints_of(first, second))
                    await applied_more(models)
                    world.stops[1].set()
                await poll_until(lambda: 0 in first.hosts)
                for client, _ in models:
                    client.set_endpoints(endpoints_of(first))
                await applied_more(models)
                is_over.set()
            total = sum(sum(client.outcomes.values()) for client, _ in models)
            for _, state in models:
                await poll_until(lambda state=state: state.values == {"a": total})
            check_outcomes(world, [client for client, _ in models])

    run(main())


def test_a_client_ahead_of_the_log_is_informed_even_after_its_mount_has_ended() -> None:
    async def main() -> None:
        async with cluster() as (_, server):
            generation = int(server.hosts[PartitionId(0)].partition.generation)

            async def mount(wire: original.Wire, sequence: int, mark: int, connection: int) -> int:
                req = Req(9, generation, 0, sequence)
                wire.send(original.MOUNT_REQUEST, req, struct.pack(">qq", mark, connection))
                kind, answered, body = await wire.receive()
                assert (kind, answered) == (original.MOUNT_RESPONSE, req)
                return original.mount_state(wire.version, body)

            wire = await original.Wire.open(server.address)
            assert await mount(wire, 1, -1, 0) == original.READY
            req = Req(9, generation, 0, 2)
            wire.send(original.APPEND_REQUEST, req, original.append_body(4, 99, b"x"))
            kind, answered, body = await wire.receive()
            assert (kind, answered.sequence) == (original.MOUNT_RESPONSE, 1)
            assert original.mount_state(4, body) == original.NOT_READY
            assert await mount(wire, 3, 99, 0) == original.CLIENT_AHEAD
            wire.close()
            wire = await original.Wire.open(server.address)
            assert await mount(wire, 4, 99, 1) == original.CLIENT_AHEAD
            wire.close()

    run(main())


def test_a_client_that_catches_up_needs_one_storage_read_for_many_transactions() -> None:
    async def main() -> None:
        async with cluster() as (_, server):
            writer = await connect(server)
            await writer.mount()
            assert await ids(writer.append(2_000, size=100)) == list(range(2_000))
            reads = server.hosts[PartitionId(0)].partition.reads
            reads.clear_caches()  # as in a new owner of the partition
            applied: list[tuple[int, int]] = []

            def apply(_partition: int, number: int, header: int, _req: Req, data: bytes) -> None:
                assert data == bytes(100)
                applied.append((number, header))

            async with OriginalClient(9, [0], apply) as client:
                client.set_endpoints(endpoints_of(server))
                await poll_until(lambda: len(applied) == 2_000)
            assert applied == [(each, each) for each in range(2_000)]
            # Headers, a single transaction, and the remaining transactions in ranges of 64 KiB.
            assert reads.fetch_count <= 10

    run(main())
