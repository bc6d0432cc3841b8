"""Captured and modeled traffic of 0.13 clients at a server of this version."""

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests import original_client as original
from tests.integration.test_server_daemon import ALICE, BOB, cluster, connect, run
from tests.loops import poll_until
from tests.original_client import Req, Wire
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.legacy import legacy_client
from waltz_core.records.record import PartitionId
from waltz_core.server.process.server_daemon import Server

GOLDEN = Path(__file__).parents[1] / "golden" / "wire" / "client_server_v4.json"
VERSIONS = range(5)
MOUNT_FIELDS = struct.Struct(">qq")
LONG = struct.Struct(">q")
NOT_FOUND = (
    "com.wepay.waltz.store.exception.TransactionNotFoundException: partition=0transactionId=1000000"
)


def captured(name: str, number: int = 0) -> bytes:
    """Return the n-th captured frame of a name."""
    examples = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = [example["frame_hex"] for example in examples if example["name"] == name]
    return bytes.fromhex(found[number])


async def next_frame(wire: Wire) -> bytes:
    """Return the bytes of the next frame."""
    async with asyncio.timeout(TEST_TIMEOUT_S):
        kind, req, body = await wire.receive()
    return (
        original.FRAME.pack(0x4C, wire.version, 17 + len(body)) + bytes([kind]) + req.pack() + body
    )


async def answer(wire: Wire, *expected: int) -> tuple[Req, bytes]:
    """Return the next message, which must have one of these types."""
    async with asyncio.timeout(TEST_TIMEOUT_S):
        kind, req, body = await wire.receive()
    assert kind in expected
    return req, body


async def is_ended(wire: Wire) -> bool:
    """Whether the server ends the connection without another message."""
    with contextlib.suppress(EOFError, OSError):
        async with asyncio.timeout(TEST_TIMEOUT_S):
            raise AssertionError(await wire.receive())
    return True


def req(sequence: int, *, partition: int = 0, client: int = 9, generation: int = 1) -> Req:
    return Req(client, generation, partition, sequence)


def send_mount(wire: Wire, at: Req, mark: int = -1, sequence: int = 0) -> None:
    wire.send(original.MOUNT_REQUEST, at, MOUNT_FIELDS.pack(mark, sequence))


async def state_of(wire: Wire, at: Req, mark: int = -1, sequence: int = 0) -> int:
    """Mount, and return the state in the answer; the feed must not begin before the answer."""
    send_mount(wire, at, mark, sequence)
    found, body = await answer(wire, original.MOUNT_RESPONSE)
    assert found == at
    return original.mount_state(wire.version, body)


async def receive_feed(wire: Wire) -> int:
    """Return the ID in the next message, which must be a part of the feed."""
    _, body = await answer(wire, original.FEED_DATA)
    return struct.unpack(">qi", body)[0]


def send_append(wire: Wire, at: Req, data: bytes, mark: int = -1, **rest: object) -> None:
    body = original.append_body(wire.version, mark, data, **rest)
    wire.send(original.APPEND_REQUEST, at, body)


@contextlib.asynccontextmanager
async def dialing(server: Server) -> AsyncIterator[Callable[..., Awaitable[Wire]]]:
    """Yield a function that opens connections of the given versions; close them at the end."""
    wires: list[Wire] = []

    async def dial(versions: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Wire:
        wires.append(await Wire.open(server.address, versions))
        return wires[-1]

    try:
        yield dial
    finally:
        for wire in wires:
            wire.close()


@contextlib.contextmanager
def watching(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Yield the list of log records at level info or above."""
    caplog.set_level(logging.INFO)
    logged: list[str] = []
    yield logged
    logged += caplog.messages


def test_captured_requests_get_the_captured_answers() -> None:
    async def main() -> None:
        async with cluster(4, feed_request_count_min=100) as (_, server), dialing(server) as dial:
            wire = await dial()
            assert wire.version == 4

            async def logged(question: str, expected: str) -> None:
                wire.send_bytes(captured(question))
                assert await next_frame(wire) == captured(expected), expected

            await logged("MOUNT_REQUEST", "MOUNT_RESPONSE")
            wire.send_bytes(captured("FEED_REQUEST"))
            await logged("APPEND_REQUEST", "FEED_DATA")
            await logged("FLUSH_REQUEST", "FLUSH_RESPONSE")
            await logged("TRANSACTION_DATA_REQUEST", "TRANSACTION_DATA_RESPONSE")
            # As during the capture: two appends write the same lock, and the second is rejected.
            for sequence in (3, 4):
                send_append(wire, Req(1, 1, 0, sequence), b"x", mark=0, write=[5])
            assert await receive_feed(wire) == 1
            assert await next_frame(wire) == captured("LOCK_FAILURE")
            for sequence in range(11, 18):
                send_append(wire, Req(1, 1, 0, sequence), b"y")
                await receive_feed(wire)
            await logged("HIGH_WATER_MARK_REQUEST", "HIGH_WATER_MARK_RESPONSE")
            for name in (
                "SERVER_PARTITIONS_ASSIGNMENT",
                "SERVER_PARTITIONS_HEALTH_STAT",
                "ADD_PREFERRED_PARTITION",
                "REMOVE_PREFERRED_PARTITION",
            ):
                await logged(f"{name}_REQUEST", f"{name}_RESPONSE")
            wire.send_bytes(captured("CHECK_STORAGE_CONNECTIVITY_REQUEST"))
            _, body = await answer(wire, original.CHECK_RESPONSE)
            assert struct.unpack_from(">i", body) == (3,)
            # Locks of all kinds, in a partition before and after its mount.
            assert await state_of(wire, Req(1, 1, 1, 1)) == original.READY
            wire.send(original.FEED_REQUEST, Req(1, 1, 1, 1), LONG.pack(-1))
            send_append(wire, Req(1, 1, 1, 2), b"z")
            send_append(wire, Req(1, 1, 1, 4), b"z")
            assert [await receive_feed(wire) for _ in range(2)] == [0, 1]
            for number in (1, 2):
                wire.send_bytes(captured("APPEND_REQUEST", number))
                assert await receive_feed(wire) == 1 + number
            # The client has requested a feed; the server suspends it after a hundred transactions.
            assert await state_of(wire, Req(1, 1, 2, 1)) == original.READY
            wire.send(original.FEED_REQUEST, Req(1, 1, 2, 1), LONG.pack(-1))
            for sequence in range(2, 104):
                send_append(wire, Req(1, 1, 2, sequence), b"")
            assert [await receive_feed(wire) for _ in range(100)] == list(range(100))
            assert await next_frame(wire) == captured("FEED_SUSPENDED")

    run(main())


@pytest.mark.parametrize("version", VERSIONS)
def test_clients_of_each_version_can_mount_append_and_read(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:
            wire = await dial(tuple(range(version + 1)))
            assert wire.version == version
            assert await state_of(wire, req(1)) == original.READY
            wire.send(original.FEED_REQUEST, req(1), LONG.pack(-1))
            kinds = ("write", "read", "append")[: 1 + min(version, 2)]
            send_append(wire, req(2), b"first", header=-7, **{kind: [3] for kind in kinds})
            found, body = await answer(wire, original.FEED_DATA)
            assert (found, struct.unpack(">qi", body)) == (req(2), (0, -7))
            send_append(wire, req(3), b"late", write=[3])
            found, body = await answer(wire, original.LOCK_FAILURE)
            assert (found, LONG.unpack(body)) == (req(3), (0,))
            send_append(wire, req(4), b"second", mark=0, write=[3])
            assert await receive_feed(wire) == 1
            rpc = await dial(tuple(range(version + 1)))
            rpc.send(original.DATA_REQUEST, req(1), LONG.pack(1))
            _, body = await answer(rpc, original.DATA_RESPONSE)
            assert original.data_of(body) == (1, b"second", None)
            again = await dial(tuple(range(version + 1)))
            send_mount(again, req(5), 0, 1)
            assert await receive_feed(again) == 1
            _, body = await answer(again, original.MOUNT_RESPONSE)
            assert original.mount_state(version, body) == original.READY
            # Messages that exist only in later versions end the connection.
            beyond = {0: original.CHECK_REQUEST, 1: 15, 2: 21, 3: 21, 4: 64}[version]
            rpc.send(beyond, req(0))
            assert await is_ended(rpc)
            await poll_until(
                lambda: server._clients.legacy_client_count == 1
            )  # the superseded connection has ended

    with watching(caplog) as logged:
        run(main())
    assert (
        sum("client.legacy_connected" in each and f"version={version}" in each for each in logged)
        == 3
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mount_is_answered_after_the_feed_has_sent_the_missing_transactions(version: int) -> None:
    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:
            writer = await connect(server)
            await writer.mount()
            await writer.append(10)
            wire = await dial(tuple(range(version + 1)))
            send_mount(wire, req(1), 4)
            assert [await receive_feed(wire) for _ in range(5)] == [5, 6, 7, 8, 9]
            found, _ = await answer(wire, original.MOUNT_RESPONSE)
            assert found == req(1)
            # Nothing more is sent before the client requests it.
            await writer.append(1)
            assert await state_of(wire, req(2), 10) == original.READY
            wire.send(original.FEED_REQUEST, req(2), LONG.pack(10))
            await writer.append(1)
            assert await receive_feed(wire) == 11
            ahead = original.CLIENT_AHEAD if version >= 3 else original.NOT_READY
            assert await state_of(wire, req(3), 99) == ahead
            assert await state_of(wire, req(4, partition=1)) == original.NOT_READY
            for generation in (0, 2):
                of_another = req(5, generation=generation)
                assert await state_of(wire, of_another) == original.NOT_READY

    run(main())


def test_this_server_closes_connections_in_the_same_cases_as_0_13() -> None:
    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:

            async def mounted(client: int) -> Wire:
                wire = await dial()
                assert await state_of(wire, req(1, client=client)) == original.READY
                return wire

            ahead = await mounted(1)
            ahead.send(original.FEED_REQUEST, req(1, client=1), LONG.pack(7))
            assert await is_ended(ahead)
            broken = await mounted(2)
            body = original.append_body(4, -1, b"data")
            broken.send(original.APPEND_REQUEST, req(2, client=2), body[:-1] + b"?")
            assert await is_ended(broken)
            for kind in (17, 19):
                empty = await dial()
                empty.send(kind, req(0), original.ints(()))
                assert await is_ended(empty)
            null = await dial()
            null.send(17, req(0), b"\xff" * 4)
            assert await is_ended(null)
            no_data = await mounted(3)
            locks = original.ints(()) * 3
            fields = LONG.pack(-1) + locks + struct.pack(">iiI", 0, -1, 0)
            no_data.send(original.APPEND_REQUEST, req(2, client=3), fields)
            assert await is_ended(no_data)
            for change in (b"", b"more"):
                wrong = await dial()
                wrong.send(original.FLUSH_REQUEST, req(1), change + b"\x00")
                assert await is_ended(wrong)
            answers = await dial()
            answers.send(original.FLUSH_RESPONSE, req(1), LONG.pack(0))
            assert await is_ended(answers)
            no_mark = await dial()
            send_mount(no_mark, req(1), -2)
            assert await is_ended(no_mark)
            assert server.hosts[PartitionId(0)].partition.high_water_mark == -1

    run(main())


def test_a_later_connection_of_a_client_ends_the_earlier_one() -> None:
    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:
            early, late = [await dial() for _ in range(2)]
            assert await state_of(early, req(1), sequence=3) == original.READY
            early.send(original.FEED_REQUEST, req(1), LONG.pack(-1))
            assert await state_of(late, req(1), sequence=4) == original.READY
            assert await is_ended(early)
            late.send(original.FEED_REQUEST, req(1), LONG.pack(-1))
            send_append(late, req(2), b"x")
            assert await receive_feed(late) == 0
            # If a sequence number is too late, or starts again at 0, the connection ends. The
            # client then retries with higher numbers.
            for sequence in (0, 4):
                again = await dial()
                send_mount(again, req(1), sequence=sequence)
                assert await is_ended(again)

    run(main())


def test_requests_without_a_mount_are_answered_if_the_partition_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(legacy_client, "MARK_WAIT_S", 0.2)

    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:
            writer = await connect(server)
            await writer.mount()
            await writer.append(3, size=2)
            rpc = await dial()
            rpc.send(original.MARK_REQUEST, req(1))
            assert await answer(rpc, original.MARK_RESPONSE) == (req(1), LONG.pack(2))
            rpc.send(original.FLUSH_REQUEST, req(2))
            assert await answer(rpc, original.FLUSH_RESPONSE) == (req(2), LONG.pack(2))
            for number, partition, error in (
                (1_000_000, 0, NOT_FOUND),
                (0, 7, "partition not ready"),
            ):
                rpc.send(original.DATA_REQUEST, req(3, partition=partition), LONG.pack(number))
                found, body = await answer(rpc, original.DATA_RESPONSE)
                assert found == req(3, partition=partition)
                assert original.data_of(body) == (number, None, error)
            # The server answers neither a flush nor a request for a mark.
            rpc.send(original.FLUSH_REQUEST, req(4, partition=7))
            rpc.send(original.MARK_REQUEST, req(5, partition=7))
            rpc.send(original.DATA_REQUEST, req(6), LONG.pack(2))
            _, body = await answer(rpc, original.DATA_RESPONSE)
            assert original.data_of(body) == (2, bytes(2), None)
            assert await is_ended(rpc)

    run(main())


def test_a_0_13_program_that_does_not_read_uses_bounded_memory() -> None:
    async def main() -> None:
        async with cluster() as (_, server), dialing(server) as dial:
            writer = await connect(server, BOB)
            await writer.mount()
            slow_reader = await dial()
            send_mount(slow_reader, req(1, client=ALICE))
            await answer(slow_reader, original.MOUNT_RESPONSE)
            slow_reader.send(original.FEED_REQUEST, req(1, client=ALICE), LONG.pack(-1))
            for _ in range(45):
                await writer.append(1_000, size=220)
                assert server._clients.memory_bytes < 8 << 20
            mark = await writer.mark()
            next_id = 0
            while next_id <= mark:
                _, body = await answer(slow_reader, original.FEED_DATA, original.FEED_SUSPENDED)
                if body:
                    assert struct.unpack_from(">q", body) == (next_id,)
                    next_id += 1
                else:
                    slow_reader.send(
                        original.FEED_REQUEST, req(1, client=ALICE), LONG.pack(next_id - 1)
                    )

    run(main())
