"""A model of the client of Waltz 0.13: its bytes and its behavior (docs/design/wire-format.md 2).

The model shares no code with the implementation under test, not even for encoding frames. So the
same mistake cannot be on both sides of a connection. The model has the known behavior of a 0.13
client, including its defects:

- It has two connections to each server (stream and rpc). Only the stream mounts. Both connections
  use the same ReqIds.
- A broken connection is opened again with the next sequence number, and mounts all its partitions.
- After NOT_READY for the ReqId of the last mount it waits 500 ms, and mounts again.
- Appends are not acknowledged. When the client receives its own ReqId in the feed, this append was
  successful, and all earlier open appends have failed. LOCK_FAILURE and FLUSH_RESPONSE take effect
  when the client's mark has reached the ID that they contain.
- It sends a flush after each READY, and every 5 s while an append is open.
- It ignores answers with an unexpected ReqId, and transactions whose ID is not the next one.
"""

import asyncio
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

FRAME = struct.Struct(">Bhi")
HELLO, CLIENT = 0x48, 0x4C
MOUNT_REQUEST, MOUNT_RESPONSE, APPEND_REQUEST, FEED_REQUEST, FEED_DATA, FEED_SUSPENDED = range(6)
DATA_REQUEST, DATA_RESPONSE, FLUSH_REQUEST, FLUSH_RESPONSE, LOCK_FAILURE = range(6, 11)
MARK_REQUEST, MARK_RESPONSE, CHECK_REQUEST, CHECK_RESPONSE = range(11, 15)
READY, NOT_READY, CLIENT_AHEAD = 0, 1, 2
CONCURRENT_MAX = 5
NOT_READY_S = 0.5
LONG_WAIT_S = 5.0
OPEN_FAILED_S = 1.0


class Req(NamedTuple):
    client: int
    generation: int
    partition: int
    sequence: int

    def pack(self) -> bytes:
        return struct.pack(">iiii", *self)


def lock(name: str, number: int) -> int:
    """Return the hash of a lock in Waltz 0.13."""
    h = 0
    for unit in struct.unpack(f">{len(name)}H", name.encode("utf-16-be")):
        h = (31 * h + unit) & 0xFFFFFFFF
    h ^= (number ^ (number >> 32)) & 0xFFFFFFFF
    return h - (1 << 32) if h >> 31 else h


async def wait_before_retry(seconds) -> None:
    """Wait before another attempt, as a 0.13 client does."""
    await asyncio.sleep(seconds)


def ints(values) -> bytes:
    return struct.pack(f">i{len(values)}i", len(values), *values)


def append_body(version, mark, data, *, header=0, write=(), read=(), append=()) -> bytes:
    """Return the fields of an APPEND_REQUEST; asserts that the version supports them."""
    assert version >= 2 or not append
    assert version >= 1 or not read
    locks = (write, read, append)[: 1 + min(version, 2)]
    body = struct.pack(">q", mark) + b"".join(map(ints, locks))
    crc = zlib.crc32(data)
    return body + struct.pack(">ii", header, len(data)) + data + struct.pack(">I", crc)


class Wire:
    """One TCP connection after the exchange of hellos."""

    def __init__(self, reader, writer, version):
        self._reader, self._writer, self.version = reader, writer, version

    @classmethod
    async def open(cls, endpoint, versions=(0, 1, 2, 3, 4)):
        host, port = endpoint.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        text = b"Waltz Client"
        hello = struct.pack(f">i{len(versions)}hi", len(versions), *versions, len(text)) + text
        writer.write(FRAME.pack(HELLO, 0, len(hello)) + hello)
        try:
            magic, version, size = FRAME.unpack(await reader.readexactly(FRAME.size))
            assert (magic, version) == (HELLO, 0)
            answer = await reader.readexactly(size)
        except BaseException:  # cancelled, too
            writer.close()
            raise
        (count,) = struct.unpack_from(">i", answer)
        versions_of_server = struct.unpack_from(f">{count}h", answer, 4)
        return cls(reader, writer, max(set(versions_of_server) & set(versions)))

    def send(self, kind, req, body=b""):
        self.send_bytes(FRAME.pack(CLIENT, self.version, 17 + len(body)) + bytes([kind]), req, body)

    def send_bytes(self, *pieces):
        pack = [piece.pack() if isinstance(piece, Req) else piece for piece in pieces]
        self._writer.write(b"".join(pack))

    async def receive(self):
        """Return kind, ReqId and the fields; raises EOFError or OSError at the end."""
        magic, version, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        assert (magic, version) == (CLIENT, self.version)
        assert size >= 17
        payload = await self._reader.readexactly(size)
        return payload[0], Req(*struct.unpack_from(">iiii", payload, 1)), payload[17:]

    def close(self):
        self._writer.close()


def mount_state(version, body) -> int:
    if version >= 3:
        (state,) = struct.unpack(">i", body)
        return state
    (is_ready,) = struct.unpack(">B", body)
    return READY if is_ready == 1 else NOT_READY


def data_of(body) -> tuple[int, bytes | None, str | None]:
    """Return the ID, and data or an error, of a TRANSACTION_DATA_RESPONSE."""
    number, is_there, size = struct.unpack_from(">qBi", body)
    content = body[13 : 13 + size]
    if is_there != 1:
        assert len(body) == 13 + size
        return number, None, content.decode()
    (crc,) = struct.unpack(">I", body[13 + size :])
    assert crc == zlib.crc32(content)
    return number, content, None


class Partition:
    """The state of one side (stream or rpc) of a partition."""

    def __init__(self, client_id, number):
        self.client_id, self.number = client_id, number
        self.generation = -1
        self.sequence = 0
        self.link = None
        # Of the stream only:
        self.mark = -1
        self.mounted = asyncio.Event()
        self.registered: dict[Req, asyncio.Future[bool]] = {}
        self.last_req: Req | None = None
        self.last_s = 0.0
        self.lock_failures: list[tuple[int, Req]] = []
        self.flush_points: list[tuple[int, Req]] = []
        # Of rpc only:
        self.wanted: dict[int, list[asyncio.Future]] = {}
        self.marks: list[asyncio.Future] = []

    def next_req(self) -> Req:
        self.sequence += 1
        return Req(self.client_id, self.generation, self.number, self.sequence)

    # --- the monitor of open appends

    @property
    def open_count(self) -> int:
        return sum(not each.done() for each in self.registered.values())

    def complete(self, req, success):
        while self.registered:
            other = next(iter(self.registered))
            future = self.registered.pop(other)
            if not future.done():
                future.set_result(success if other == req else False)
            if other == req:
                break

    def abort(self, req):
        future = self.registered.get(req)
        if future is not None and not future.done():
            future.set_result(False)

    def process_queues(self):
        self.lock_failures.sort()
        while self.lock_failures and self.lock_failures[0][0] <= self.mark:
            self.abort(self.lock_failures.pop(0)[1])
        while self.flush_points and self.flush_points[0][0] <= self.mark:
            self.flushed(self.flush_points.pop(0)[1])

    def flushed(self, req):
        if req in self.registered:
            self.complete(req, False)

    def flush(self):
        if self.last_req in self.registered and self.link is not None:
            self.link.send(FLUSH_REQUEST, self.last_req)


class Link:
    """One connection of one side to one server; `sequence` counts its reconnects."""

    def __init__(self, side, endpoint, sequence):
        self.side, self.endpoint, self.sequence = side, endpoint, sequence
        self.partitions: dict[int, Partition] = {}
        self.sessions: dict[int, Req] = {}
        self.wire: Wire | None = None
        self.is_running = True
        self.processing: list[asyncio.Task] = []
        self.task = side.client.tasks.create_task(self.run())

    def send(self, kind, req, body=b""):
        if self.wire is not None:
            if kind == MOUNT_REQUEST:
                self.sessions[req.partition] = req
            self.wire.send(kind, req, body)

    def mount(self, partition):
        self.partitions[partition.number] = partition
        partition.mounted.clear()
        partition.link = self
        if self.wire is not None:
            self.side.mounting(self, partition)

    def unmount(self, number):
        partition = self.partitions.pop(number, None)
        if partition is not None and partition.link is self:
            partition.mounted.clear()
            partition.link = None

    def send_mount(self, partition):
        body = struct.pack(">qq", partition.mark, self.sequence)
        self.send(MOUNT_REQUEST, partition.next_req(), body)

    async def run(self):
        open_failed = True
        try:
            wire = await Wire.open(self.endpoint, self.side.client.versions)
            open_failed = False
            self.wire = wire
            if wire.version >= 1:  # a 0.13 client requests this on each new connection
                self.send(CHECK_REQUEST, Req(self.side.client.client_id, 0, 0, 0))
            for partition in list(self.partitions.values()):
                self.side.mounting(self, partition)
            await self.read(wire)
        except (EOFError, OSError):
            pass  # the connection has ended; a new one replaces it below
        finally:
            for task in self.processing:
                task.cancel()
            if self.wire is not None:
                self.wire.close()
            self.wire = None
        if self.is_running:
            await wait_before_retry(OPEN_FAILED_S if open_failed else 0)
            self.side.replace(self)

    async def read(self, wire):
        """Read messages into a queue for each partition, where they are processed."""
        queues: dict[int, asyncio.Queue] = {}
        while True:
            message = await wire.receive()
            number = message[1].partition
            if number not in queues:
                queues[number] = asyncio.Queue(60)
                task = self.side.client.tasks.create_task(self.process(queues[number]))
                self.processing.append(task)
            await queues[number].put(message)

    async def process(self, queue):
        while True:
            await self.side.process(self, *await queue.get())

    def close(self):
        self.is_running = False
        self.task.cancel()
        for number in list(self.partitions):
            self.unmount(number)


class Side:
    """One half of a client, stream or rpc: its links by server, and its partitions."""

    def __init__(self, client):
        self.client = client
        self.links: dict[str, Link] = {}
        self.partitions = {n: Partition(client.client_id, n) for n in client.numbers}
        self.reconnects = 0

    def set_endpoints(self, endpoints):
        """Set the assignment: for each server, its partitions and their generations."""
        for endpoint in [each for each in self.links if each not in endpoints]:
            self.links.pop(endpoint).close()
        for endpoint, owned in endpoints.items():
            for number, generation in owned.items():
                partition = self.partitions.get(number)
                if partition is None:
                    continue
                partition.generation = max(partition.generation, generation)
                if partition.link is None or partition.link.endpoint != endpoint:
                    for link in self.links.values():
                        link.unmount(number)
                    if endpoint not in self.links:
                        self.links[endpoint] = Link(self, endpoint, 0)
                    self.links[endpoint].mount(partition)

    def replace(self, link):
        if self.links.get(link.endpoint) is link:
            self.reconnects += 1
            new = self.links[link.endpoint] = Link(self, link.endpoint, link.sequence + 1)
            for number, partition in list(link.partitions.items()):
                link.unmount(number)
                new.mount(partition)


class Stream(Side):
    """The half that mounts, receives feeds and appends."""

    def mounting(self, link, partition):
        link.send_mount(partition)

    async def process(self, link, kind, req, body):
        partition = link.partitions.get(req.partition)
        if partition is None:
            return
        if kind == MOUNT_RESPONSE:
            if req == link.sessions.get(req.partition):
                await self.mount_answered(link, partition, req, body)
        elif kind == FEED_DATA:
            await self.receive_feed(partition, req, body)
        elif kind == FEED_SUSPENDED:
            if req == link.sessions.get(req.partition):
                link.send(FEED_REQUEST, req, struct.pack(">q", partition.mark))
        elif kind in (FLUSH_RESPONSE, LOCK_FAILURE):
            (number,) = struct.unpack(">q", body)
            queue = partition.lock_failures if kind == LOCK_FAILURE else partition.flush_points
            self.client.counts[kind] += 1
            queue.append((number, req))
            partition.process_queues()
        else:
            assert kind == CHECK_RESPONSE, f"Waltz 0.13 has no answer of type {kind}"

    async def mount_answered(self, link, partition, req, body):
        assert link.wire is not None
        state = mount_state(link.wire.version, body)
        if state == READY:
            partition.mounted.set()
            partition.flush()
            link.send(FEED_REQUEST, req, struct.pack(">q", partition.mark))
        else:
            assert state == NOT_READY, "the client is ahead of the log"
            self.client.counts["not ready"] += 1
            await wait_before_retry(NOT_READY_S)
            if partition.number in link.partitions:
                link.send_mount(partition)

    async def receive_feed(self, partition, req, body):
        number, header = struct.unpack(">qi", body)
        assert number <= partition.mark + 1, "a gap in the feed"
        if number == partition.mark + 1:
            if req in partition.registered:
                partition.complete(req, True)
            # The data is requested first, so that state and mark change together.
            data = await self.client.get_data(partition.number, number)
            if partition.mark + 1 == number:
                self.client.apply(partition.number, number, header, req, data)
                partition.mark = number
        else:
            self.client.counts["ignored"] += 1
        partition.process_queues()


class Rpc(Side):
    """The half that requests data and marks; it does not mount."""

    def mounting(self, link, partition):
        for number in partition.wanted:
            link.send(DATA_REQUEST, partition.next_req(), struct.pack(">q", number))
        if partition.marks:
            link.send(MARK_REQUEST, partition.next_req())

    async def process(self, link, kind, req, body):
        partition = link.partitions.get(req.partition)
        if partition is None:
            return
        if kind == DATA_RESPONSE:
            number, data, error = data_of(body)
            for each in partition.wanted.pop(number, ()):
                if not each.done():
                    each.set_result((data, error))
        elif kind == MARK_RESPONSE:
            (mark,) = struct.unpack(">q", body)
            for each in partition.marks:
                each.set_result(mark)
            partition.marks.clear()
        else:
            assert kind == CHECK_RESPONSE, (
                f"the rpc connection of 0.13 has no answer of type {kind}"
            )


class OriginalClient:
    """A 0.13 client. `apply(partition, id, header, req, data)` updates the application's state."""

    def __init__(self, client_id, partitions, apply, *, versions=(0, 1, 2, 3, 4)):
        self.client_id, self.numbers, self.apply = client_id, tuple(partitions), apply
        self.versions = versions
        self.outcomes: dict[Req, bool] = {}
        self.counts: dict[object, int] = dict.fromkeys(
            (FLUSH_RESPONSE, LOCK_FAILURE, "not ready", "ignored"), 0
        )
        self.tasks = asyncio.TaskGroup()

    async def __aenter__(self):
        await self.tasks.__aenter__()
        self.stream, self.rpc = Stream(self), Rpc(self)
        self._nudging = self.tasks.create_task(self._resend_late())
        return self

    async def __aexit__(self, *failure):
        self._nudging.cancel()
        for side in (self.stream, self.rpc):
            for link in side.links.values():
                link.close()
        await self.tasks.__aexit__(*failure)

    def set_endpoints(self, endpoints):
        self.stream.set_endpoints(endpoints)
        self.rpc.set_endpoints(endpoints)

    async def get_data(self, partition, number) -> bytes:
        """Request data until there is an answer with data."""
        backoff_s = 0.01
        while True:
            side = self.rpc.partitions[partition]
            future = asyncio.get_running_loop().create_future()
            is_asked = number in side.wanted
            side.wanted.setdefault(number, []).append(future)
            if not is_asked and side.link is not None:
                side.link.send(DATA_REQUEST, side.next_req(), struct.pack(">q", number))
            data, _ = await future
            if data is not None:
                return data
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, 5.0)

    async def get_mark(self, partition) -> int:
        side = self.rpc.partitions[partition]
        future = asyncio.get_running_loop().create_future()
        side.marks.append(future)
        if side.link is not None:
            side.link.send(MARK_REQUEST, side.next_req())
        return await future

    async def append(self, partition, execute: Callable[[], dict]) -> bool:
        """Append what `execute` returns (data, locks) for the current state; return the outcome."""
        side = self.stream.partitions[partition]
        await side.mounted.wait()
        req, mark, wanted = side.next_req(), side.mark, execute()
        while side.open_count >= CONCURRENT_MAX:
            await asyncio.wait(
                [each for each in side.registered.values() if not each.done()],
                return_when=asyncio.FIRST_COMPLETED,
            )
        await side.mounted.wait()
        future = side.registered[req] = asyncio.get_running_loop().create_future()
        side.last_req, side.last_s = req, asyncio.get_running_loop().time()
        wire = None if side.link is None else side.link.wire
        if wire is None:
            side.abort(req)
        else:
            wire.send(APPEND_REQUEST, req, append_body(wire.version, mark, **wanted))
        self.outcomes[req] = await future
        return self.outcomes[req]

    async def submit(self, partition, execute) -> None:
        """Append until success; `execute` is called again for each attempt."""
        while not await self.append(partition, execute):
            pass

    async def _resend_late(self):
        while True:
            await asyncio.sleep(LONG_WAIT_S / 10)
            for partition in self.stream.partitions.values():
                is_late = asyncio.get_running_loop().time() - partition.last_s > LONG_WAIT_S
                if is_late and partition.registered and partition.mounted.is_set():
                    partition.last_s += LONG_WAIT_S / 2
                    partition.flush()
