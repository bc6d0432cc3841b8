"""Our server with storages of the original: real sockets, and frames that are not ours."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_server_daemon import (
    BOB,
    CLUSTER_KEY,
    ROOT,
    World,
    cluster,
    connect,
    ids,
    run,
)
from tests.loops import until
from tests.original_storage import NONE, PREFIX, OriginalStorage
from waltz_core.cluster.coordinator import PartitionVersions
from waltz_core.record import PartitionId, SessionId
from waltz_core.server.daemon import Server
from waltz_core.wire import messages
from waltz_core.wire.messages import RangeForm

GOLDEN = Path(__file__).parents[1] / "golden" / "wire" / "storage_v0.json"
ZERO = PartitionId(0)


@asynccontextmanager
async def originals(
    partition_count: int = 1, **settings: Any
) -> AsyncIterator[tuple[World, Server, list[OriginalStorage]]]:
    """A server of ours over three storages of the original."""
    world = World()
    world.storages = []
    world.originals = [OriginalStorage(CLUSTER_KEY.bytes, partition_count) for _ in range(3)]
    async with cluster(partition_count, world=world, **settings) as (_, server):
        yield world, server, world.originals


def last_of(model: OriginalStorage) -> int:
    return model.partitions[0].last


def test_append_read_and_feed() -> None:
    async def main() -> None:
        async with originals(transaction_cache_bytes=1 << 20) as (_, server, models):
            client = await connect(server)
            await client.mount()
            assert await ids(client.append(3)) == [0, 1, 2]
            assert await ids(client.append(700, size=3_000)) == list(range(3, 703))
            assert await ids(client.append(1, mark=702, locks=[5])) == [703]
            assert await ids(client.append(1, mark=2, locks=[5])) == [-1]
            for model in models:
                await until(lambda model=model: last_of(model) == 703)
                assert model.partitions[0].records == models[0].partitions[0].records
            found: list[bytes] = []
            while len(found) < 704:
                answer = await client.ask(
                    messages.RangeRequest(
                        client.req_id(), len(found), 703, 1 << 20, RangeForm.WHOLE, ()
                    )
                )
                assert isinstance(answer, messages.RangeData), answer
                at = 0
                for (length,) in struct.iter_unpack(">i", answer.lengths):
                    found.append(bytes(answer.records[at + 36 : at + length - 4]))
                    at += length
            partition = models[0].partitions[0]
            assert found == [partition.data(at) for at in range(704)]
            assert any(model.asked(17) for model in models), "the cache has it all"
            reader = await connect(server, BOB)
            mounted = await reader.mount(mark=-1, feed=True)
            reader.link.send(messages.FeedRequest(mounted.req_id, -1))

            def fed() -> list[messages.FeedBatch]:
                return [one for one in reader.pushed if isinstance(one, messages.FeedBatch)]

            await until(lambda: sum(one.count for one in fed()) == 704)
            # The log has no chain that anybody could know it by later.
            assert {one.chain_at for one in fed()} == {-1}
            headers = b"".join(bytes(one.headers) for one in fed())
            assert [headers[at : at + 16] for at in range(0, len(headers), 20)] == [
                partition.request_id(at) for at in range(704)
            ]

    run(main())


def test_clients_are_not_sent_to_the_storages() -> None:
    async def main() -> None:
        async with originals() as (_, server, _models):
            client = await connect(server)
            asked = messages.ReplicasRequest(client.req_id(), linearizable=True)
            answer = await client.ask(asked)
            assert isinstance(answer, messages.ReplicasResponse)
            assert answer.replicas == ()

    run(main())


def test_a_storage_that_was_away_is_filled_up() -> None:
    async def main() -> None:
        async with originals() as (_, server, models):
            client = await connect(server)
            await client.mount()
            await client.append(3)
            partition = server.hosts[ZERO].partition
            session = partition.session_id
            await models[0].stop()
            await until(lambda: partition.session_id > session and partition.is_open)
            await client.mount(sequence=2)
            for first in range(3, 33, 3):
                assert await ids(client.append(3)) == [first, first + 1, first + 2]
            await models[0].start()
            await until(lambda: last_of(models[0]) == 32)
            assert models[0].partitions[0].records == models[1].partitions[0].records
            await until(lambda: partition.engaged_count == 3)

    run(main())


def test_a_server_that_is_started_again_finds_its_log() -> None:
    async def main() -> None:
        async with originals(2) as (world, server, models):
            client = await connect(server)
            await client.mount()
            assert await ids(client.append(5)) == [0, 1, 2, 3, 4]
            async with asyncio.TaskGroup() as tasks:
                world.stops[0].set()
                await until(lambda: client.closed is not None)
                again = await world.serve(tasks)
                await until(
                    lambda: (
                        len(again.hosts) == 2
                        and all(host.partition.is_open for host in again.hosts.values())
                    )
                )
                client = await connect(again)
                client.generation = again.hosts[ZERO].partition.generation
                mounted = await client.mount()
                assert mounted.high_water_mark == 4
                assert await ids(client.append(2)) == [5, 6]
                for model in models:
                    await until(lambda model=model: last_of(model) == 6)
                    saved = model.partitions[0]
                    assert (saved.saved_session, saved.low_water_mark) == (1, 4)
                world.stops[1].set()

    run(main())


def test_a_server_whose_session_was_taken_appends_nothing_more() -> None:
    """An original server has the next session, and has asked a quorum for its state."""

    async def main() -> None:
        async with originals() as (world, server, models):
            client = await connect(server)
            await client.mount()
            await client.append(3)
            coordinator = world.zookeeper.coordinator(ROOT)
            view = await coordinator.read_partition(ZERO)
            metadata, marker = view.metadata, view.marker
            assert metadata is not None
            assert marker is not None
            taken = SessionId(metadata.session_id + 1)
            # It knows nothing of our node beside its own, which keeps the session of before.
            await coordinator.write_partition(
                ZERO,
                replace(metadata, session_id=taken),
                marker,
                PartitionVersions(view.metadata_version, view.marker_version),
            )
            for model in models[:2]:
                assert model.handle(PREFIX.pack(2, taken, 0, 0) + b"\0")[0] == 3
            answer = await client.append(1)
            assert isinstance(answer, messages.AppendResult)
            assert bytes(answer.reasons) == bytes([messages.Reason.LOST])
            partition = server.hosts[ZERO].partition
            await until(lambda: partition.is_open and partition.session_id > taken)
            await client.mount(sequence=2)
            assert await ids(client.append(1)) == [3]
            for model in models:
                await until(lambda model=model: last_of(model) == 3)
                assert model.partitions[0].records == models[0].partitions[0].records

    run(main())


def test_what_was_in_flight_when_a_storage_died_is_told_as_it_is() -> None:
    async def main() -> None:
        async with originals() as (_, server, models):
            client = await connect(server)
            await client.mount()
            assert await ids(client.append(3)) == [0, 1, 2]
            for model in models:
                model.is_held = True
            waiting = client.append(2)
            await until(lambda: all(last_of(model) == 4 for model in models))
            assert not waiting.done()
            await models[0].stop()
            assert await ids(waiting) == [3, 4]
            for model in models[1:]:
                model.release()
            await client.mount(sequence=2)
            assert await ids(client.append(1)) == [5]

    run(main())


def test_a_second_server_takes_over() -> None:
    async def main() -> None:
        async with originals(2) as (world, first, models):
            client = await connect(first)
            await client.mount()
            await client.append(4)
            async with asyncio.TaskGroup() as tasks:
                second = await world.serve(tasks)
                await until(lambda: len(first.hosts) == 1 and len(second.hosts) == 1)
                world.stops[0].set()
                await until(lambda: len(second.hosts) == 2)
                await until(lambda: all(host.partition.is_open for host in second.hosts.values()))
                other = await connect(second)
                other.generation = second.hosts[ZERO].partition.generation
                assert (await other.mount()).high_water_mark == 3
                assert await ids(other.append(1)) == [4]
                for model in models:
                    await until(lambda model=model: last_of(model) == 4)
                world.stops[1].set()

    run(main())


def test_it_says_once_what_it_speaks_with(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with originals() as (_, server, models):
            partition = server.hosts[ZERO].partition
            session = partition.session_id
            await models[0].stop()
            await until(lambda: partition.session_id > session and partition.is_open)
            warned = [one.message for one in caplog.records if "replica.original" in one.message]
            assert len(warned) == 3

    run(main())


def test_connectivity_is_told() -> None:
    async def main() -> None:
        async with originals() as (_, server, models):
            client = await connect(server)
            asked = messages.CheckConnectivityRequest(client.req_id())
            answer = await client.ask(asked)
            assert isinstance(answer, messages.CheckConnectivityResponse)
            assert dict(answer.reachable) == {model.address: True for model in models}

    run(main())


def test_the_frames_are_those_that_were_captured() -> None:
    """Each request that is sent has type, prefix and fields as the original's own server sends."""
    captured: dict[int, list[bytes]] = {}
    for one in json.loads(GOLDEN.read_text()):
        captured.setdefault(one["decoded"]["type"], []).append(bytes.fromhex(one["payload_hex"]))

    async def main() -> None:
        async with originals() as (_, server, models):
            client = await connect(server)
            await client.mount()
            await client.append(3)
            model = models[0]
            await until(lambda: last_of(model) == 2)
            # Versions 0 to 2 are offered, and the text is the original's.
            assert (
                model.hellos[0] == struct.pack(">ihhhi", 3, 0, 1, 2, 20) + b"Waltz Storage Client"
            )
            opening = captured[1][0]
            assert model.requests[0] == PREFIX.pack(1, NONE, NONE, NONE) + CLUSTER_KEY.bytes + (
                struct.pack(">i", 1)
            )
            assert len(model.requests[0]) == len(opening)
            assert model.requests[0][: PREFIX.size] == opening[: PREFIX.size]
            sequences = [PREFIX.unpack_from(each)[2] for each in model.requests[1:]]
            assert sequences == list(range(len(sequences)))
            for kind in (2, 13, 4):
                assert {len(each) for each in model.asked(kind)} == {len(captured[kind][0])}
                assert {each[-1:] for each in model.asked(kind)} == {b"\0"}
            (append,) = model.asked(6)
            assert append[PREFIX.size : PREFIX.size + 4] == struct.pack(">i", 3)

    run(main())
