"""A model of the server of Waltz 0.13, as its clients see it (docs/design/wire-format.md 2 and 4).

The model implements protocol L 4 with its own encoding of frames, and keeps its log in memory. The
model behaves like a 0.13 server:
- It does not acknowledge appends.
- It ignores requests of an outdated connection or generation, and some others.
- It never finds a transaction that was requested before its commit.

A test controls replication. The test can delay commits, and can end a session with or without a
commit of the appends in flight.

The model runs in a separate thread, so that clients with and without an event loop can use it. The
methods of the model may be called from other threads.
"""

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Self
from zlib import crc32

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client.links.directory import ClusterInfo, Owner, OwnersChanged
from waltz_core.records.record import Generation, PartitionId

HELLO = struct.Struct(">Bhi")
REQ_ID_BYTES = 16
LOCK_SLOTS = 30_000
APPEND_QUEUE = 100
STORE_QUEUE = 200
BATCH = 100
MIN_FETCH = 100
NO_SESSION_MARK = -(1 << 63)
ACCEPT_STEPS = 8
READY, NOT_READY, CLIENT_AHEAD = 0, 1, 2


class Payload:
    """Reads the fields of a payload; fails at the end of a truncated message."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> Any:
        values = struct.unpack_from(">" + layout, self.data, self.at)
        self.at += struct.calcsize(">" + layout)
        return values[0] if len(values) == 1 else values

    def ints(self) -> list[int]:
        return [self.take("i") for _ in range(self.take("i"))]

    def blob(self) -> bytes:
        size = self.take("i")
        self.at += size
        return self.data[self.at - size : self.at]


class Dropped(Exception):
    """The server closes the connection without an answer."""


class Peer:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.version = 4
        self.sequence: int | None = None  # fixed by its first mount
        self.is_open = True

    def send(self, kind: int, req_id: bytes, rest: bytes = b"") -> None:
        payload = bytes([kind]) + req_id + rest
        if self.is_open and not self.writer.is_closing():
            self.writer.write(HELLO.pack(ord("L"), self.version, len(payload)) + payload)

    def cut(self) -> None:
        self.is_open = False
        self.writer.transport.abort()


class LockTable:
    """Section 6: a lock uses three of 30,000 slots, active while a transaction is in flight."""

    def __init__(self, mark: int) -> None:
        self.marks = [mark] * LOCK_SLOTS
        self.active: dict[int, int] = {}

    @staticmethod
    def slots(lock: int) -> list[int]:
        found, h = [], lock & 0xFFFFFFFF
        for _ in range(3):
            h = (h * 1103515245 + 12345) & 0xFFFFFFFF
            found.append((h & 0x3FFFFFFF) % LOCK_SLOTS)
        return found

    def all_slots(self, locks: Iterable[int]) -> set[int]:
        return {slot for lock in locks for slot in self.slots(lock)}

    def estimate(self, locks: Iterable[int]) -> int:
        return max(
            (min(self.marks[slot] for slot in self.slots(lock)) for lock in locks), default=-1
        )


class Log:
    """The log of one partition, as its storages have it together."""

    def __init__(self, records: Iterable[tuple[bytes, int, bytes]] = ()) -> None:
        self.records = list(records)

    @property
    def mark(self) -> int:
        return len(self.records) - 1


class Partition:
    """One partition at the server that owns it."""

    def __init__(self, log: Log, generation: int) -> None:
        self.log = log
        self.generation = generation
        self.locks = LockTable(log.mark)
        self.mounts: dict[int, tuple[Peer, int]] = {}  # by client ID: connection and generation
        self.queue: asyncio.Queue[Any] = asyncio.Queue(APPEND_QUEUE)
        self.store: asyncio.Queue[Any] = asyncio.Queue(STORE_QUEUE)
        self.pending: list[Any] = []  # submitted to the store and not final
        self.changed = asyncio.Event()
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.poisoned: set[int] = set()
        self.drops = 0
        self.tasks: list[asyncio.Task[None]] = []

    def is_valid(self, peer: Peer, client_id: int) -> bool:
        return self.mounts.get(client_id, (None, 0))[0] is peer

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_until_settled(self) -> None:
        while self.pending:
            await self.changed.wait()

    async def run_appends(self) -> None:
        while True:
            item = await self.queue.get()
            if callable(item):  # a flush: answered when all earlier appends are final
                await self.wait_until_settled()
                item()
            else:
                await self.append(*item)

    async def append(
        self, peer: Peer, req_id: bytes, mark: int, locks: list[list[int]], header: int, data: bytes
    ) -> None:
        client_id, generation = struct.unpack_from(">ii", req_id)
        if not self.is_valid(peer, client_id):
            return
        write, read, added = locks
        slots = self.locks.all_slots([*write, *read, *added])
        while any(self.locks.active.get(slot) for slot in slots):
            await self.wait_until_settled()
        estimate = self.locks.estimate([*write, *read])
        if estimate > mark:
            peer.send(10, req_id, struct.pack(">q", estimate))
            return
        if generation != self.generation:
            return
        if self.drops > 0:
            self.drops -= 1
            return
        held = self.locks.all_slots([*write, *added])
        for slot in held:
            self.locks.active[slot] = self.locks.active.get(slot, 0) + 1
        entry = (req_id, header, data, held)
        self.pending.append(entry)
        await self.store.put(entry)

    async def run_store(self) -> None:
        while True:
            batch = [await self.store.get()]
            while len(batch) < BATCH and not self.store.empty():
                batch.append(self.store.get_nowait())
            await self.may_commit.wait()
            # Entries that a broken session has resolved meanwhile are skipped.
            for entry in [each for each in batch if any(each is one for one in self.pending)]:
                self.resolve(entry, is_committed=True)
            self.notify()

    def resolve(self, entry: Any, *, is_committed: bool) -> None:
        req_id, header, data, held = entry
        self.pending = [each for each in self.pending if each is not entry]
        if is_committed:
            self.log.records.append((req_id, header, data))
            for slot in held:
                self.locks.marks[slot] = self.log.mark
        for slot in held:
            self.locks.active[slot] -= 1

    def break_session(self, kept: int) -> None:
        for index, entry in enumerate(list(self.pending)):
            self.resolve(entry, is_committed=index < kept)
        self.notify()


class OriginalServer:
    """One server with a listening port and its assigned partitions."""

    def __init__(self, versions: tuple[int, ...]) -> None:
        self.versions = versions
        self.partitions: dict[int, Partition] = {}
        self.peers: list[Peer] = []
        self.answered: list[int] = []  # the types of all messages, in order
        self.is_answering = True
        self.port = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def add_partition(self, number: int, log: Log, generation: int) -> None:
        partition = self.partitions[number] = Partition(log, generation)
        partition.tasks = [self._spawn(partition.run_appends()), self._spawn(partition.run_store())]

    def release_ownership(self, number: int) -> None:
        for task in self.partitions.pop(number).tasks:
            task.cancel()

    def cut(self) -> None:
        for peer in list(self.peers):
            peer.cut()

    def stop(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()

    def _spawn(self, task: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        new_task = asyncio.get_running_loop().create_task(task)
        self._tasks.add(new_task)
        new_task.add_done_callback(self._tasks.discard)
        return new_task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        self.peers.append(peer)
        try:
            await self._greet(peer, reader)
            while True:
                frame = await self._frame(reader, ord("L"), peer.version)
                if frame:
                    await self._take(peer, frame)
        except (Dropped, asyncio.IncompleteReadError, ConnectionError, struct.error):
            pass  # the client has disconnected, or has sent an invalid message
        except asyncio.CancelledError:
            pass  # the server stops
        finally:
            peer.cut()
            self.peers.remove(peer)
            for partition in self.partitions.values():
                for client_id, (mounted, _) in list(partition.mounts.items()):
                    if mounted is peer:
                        del partition.mounts[client_id]

    async def _greet(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        text = b"Waltz Server"
        hello = struct.pack(f">i{len(self.versions)}h", len(self.versions), *self.versions)
        hello += struct.pack(">i", len(text)) + text
        peer.writer.write(HELLO.pack(ord("H"), 0, len(hello)) + hello)
        client_hello = Payload(await self._frame(reader, ord("H"), 0))
        common = {client_hello.take("h") for _ in range(client_hello.take("i"))} & set(
            self.versions
        )
        if not common:
            raise Dropped
        peer.version = max(common)

    async def _frame(self, reader: asyncio.StreamReader, magic: int, version: int) -> bytes:
        unpacked = HELLO.unpack(await reader.readexactly(HELLO.size))
        if unpacked[:2] != (magic, version):
            raise Dropped
        return await reader.readexactly(unpacked[2])

    async def _take(self, peer: Peer, frame: bytes) -> None:
        payload = Payload(frame)
        kind = payload.take("b")
        self.answered.append(kind)
        req_id = payload.data[1 : 1 + REQ_ID_BYTES]
        payload.at += REQ_ID_BYTES
        handler = self._handlers().get(kind)
        if handler is None:
            raise Dropped
        await handler(peer, req_id, payload)
        if payload.at != len(frame):
            raise Dropped
        await peer.writer.drain()

    def _handlers(self) -> dict[int, Callable[..., Coroutine[Any, Any, None]]]:
        return {
            0: self._mount,
            2: self._append,
            3: self._feed,
            6: self._data,
            8: self._flush,
            11: self._mark,
            13: self._connectivity,
            15: self._owned,
            21: self._health,
        }

    def _find(self, req_id: bytes) -> tuple[int, Partition | None]:
        client_id, _, number, _ = struct.unpack(">4i", req_id)
        return client_id, self.partitions.get(number)

    # --- mount and feed

    async def _mount(self, peer: Peer, req_id: bytes, payload: Payload) -> None:
        mark, sequence = payload.take("qq")
        client_id, partition = self._find(req_id)
        if partition is None:
            self._mount_answer(peer, req_id, NOT_READY)
            return
        if peer.sequence is None:
            peer.sequence = sequence
        generation = struct.unpack_from(">i", req_id, 4)[0]
        known = partition.mounts.get(client_id)
        if (
            known is None
            or generation > known[1]
            or (generation == known[1] and peer.sequence > (known[0].sequence or 0))
        ):
            partition.mounts[client_id] = (peer, generation)
        if not self._goes_by(partition, peer, client_id) or not self.is_answering:
            return
        is_final = asyncio.Event()
        await partition.queue.put(is_final.set)
        await is_final.wait()
        last = partition.log.mark
        if mark > last:
            self._mount_answer(peer, req_id, CLIENT_AHEAD)
        else:
            done = lambda: self._mount_answer(peer, req_id, READY)  # noqa: E731
            self._spawn(self._send_feed(peer, partition, mark + 1, last, done))

    @staticmethod
    def _goes_by(partition: Partition, peer: Peer, client_id: int) -> bool:
        return partition.mounts[client_id][0].sequence == peer.sequence

    @staticmethod
    def _mount_answer(peer: Peer, req_id: bytes, state: int) -> None:
        if peer.version <= 2:
            peer.send(1, req_id, bytes([state == READY]))
        else:
            peer.send(1, req_id, struct.pack(">i", state))

    async def _feed(self, peer: Peer, req_id: bytes, payload: Payload) -> None:
        mark = payload.take("q")
        client_id, partition = self._find(req_id)
        if partition is None or not partition.is_valid(peer, client_id):
            return
        if mark > partition.log.mark:
            raise Dropped
        granted = max(partition.log.mark - mark, MIN_FETCH)
        suspended = lambda: peer.send(5, req_id)  # noqa: E731
        self._spawn(self._send_feed(peer, partition, mark + 1, mark + granted, suspended))

    async def _send_feed(
        self, peer: Peer, partition: Partition, first: int, last: int, done: Callable[[], None]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            for number in range(first, last + 1):
                while number > partition.log.mark:
                    await partition.changed.wait()
                if not peer.is_open:
                    return
                req_id, header, _ = partition.log.records[number]
                peer.send(4, req_id, struct.pack(">qi", number, header))
                if number % 64 == 0:
                    await peer.writer.drain()
            done()

    # --- appends

    async def _append(self, peer: Peer, req_id: bytes, payload: Payload) -> None:
        mark = payload.take("q")
        locks = [payload.ints() for _ in range(min(peer.version, 2) + 1)]
        header, data = payload.take("i"), payload.blob()
        if payload.take("I") != crc32(data):
            raise Dropped
        _, partition = self._find(req_id)
        if partition is not None:
            locks += [[]] * (3 - len(locks))
            await partition.queue.put((peer, req_id, mark, locks, header, data))

    async def _flush(self, peer: Peer, req_id: bytes, _payload: Payload) -> None:
        _, partition = self._find(req_id)
        if partition is not None:

            def answer() -> None:
                peer.send(9, req_id, struct.pack(">q", partition.log.mark))

            await partition.queue.put(answer)

    # --- questions

    async def _data(self, peer: Peer, req_id: bytes, payload: Payload) -> None:
        number = payload.take("q")
        _, partition = self._find(req_id)
        rest = struct.pack(">q", number)
        if partition is not None and number > partition.log.mark:
            partition.poisoned.add(number)  # later requests do not find this ID either
        if partition is None:
            text = b"partition not ready"
        elif number in partition.poisoned:
            text = b"com.wepay.waltz.store.exception.TransactionNotFoundException"
        else:
            data = partition.log.records[number][2]
            rest += b"\x01" + struct.pack(">i", len(data)) + data + struct.pack(">I", crc32(data))
            peer.send(7, req_id, rest)
            return
        peer.send(7, req_id, rest + b"\x00" + struct.pack(">i", len(text)) + text)

    async def _mark(self, peer: Peer, req_id: bytes, _payload: Payload) -> None:
        _, partition = self._find(req_id)
        if partition is not None:
            peer.send(12, req_id, struct.pack(">q", partition.log.mark))

    async def _connectivity(self, peer: Peer, req_id: bytes, _payload: Payload) -> None:
        peer.send(14, req_id, struct.pack(">i", 0))

    async def _owned(self, peer: Peer, req_id: bytes, _payload: Payload) -> None:
        owned = sorted(self.partitions)
        peer.send(16, req_id, struct.pack(f">{len(owned) + 1}i", len(owned), *owned))

    async def _health(self, peer: Peer, req_id: bytes, _payload: Payload) -> None:
        entries = b"".join(
            struct.pack(">i?", partition, True) for partition in sorted(self.partitions)
        )
        peer.send(22, req_id, struct.pack(">i", len(self.partitions)) + entries)


class OriginalCluster:
    """Several 0.13 servers with shared logs; a context manager."""

    def __init__(
        self,
        partition_count: int = 4,
        *,
        server_count: int = 1,
        versions: tuple[int, ...] = (0, 1, 2, 3, 4),
    ) -> None:
        self.partition_count = partition_count
        self.logs = [Log() for _ in range(partition_count)]
        self.owners: dict[int, tuple[int, int]] = {}  # partition: server and generation
        self.servers = [OriginalServer(versions) for _ in range(server_count)]
        self.last_client_id = 0
        self.ids = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, call: Callable[[], Any]) -> Any:
        """Run a function on the servers' thread; return its result."""

        async def run() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TEST_TIMEOUT_S)

    async def _start(self) -> None:
        for server in self.servers:
            await server.start()
        for number in range(self.partition_count):
            self._assign(number, number % len(self.servers), 1)

    async def _stop(self) -> None:
        # `_serve` closes the socket of each connection. asyncio needs some steps of the loop until
        # `_serve` runs. If the server is closed before, the socket stays open.
        for _ in range(ACCEPT_STEPS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.stop()
        # Tasks that were cancelled end before their loop does.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    def _assign(self, number: int, server: int, generation: int) -> None:
        self.owners[number] = (server, generation)
        self.servers[server].add_partition(number, self.logs[number], generation)

    def address(self, server: int) -> str:
        return f"127.0.0.1:{self.servers[server].port}"

    def partition(self, number: int) -> Partition:
        """Return a partition of its owner."""
        return self.servers[self.owners[number][0]].partitions[number]

    def fill(self, number: int, count: int, data: bytes = b"") -> None:
        """Append `count` transactions of another client to the log."""
        log = self.logs[number]
        sequence = len(log.records) + 1
        log.records += [
            (struct.pack(">4i", 1_000_000, 1, number, sequence + i), 0, data) for i in range(count)
        ]

    def move(self, number: int, server: int, *, kept: int = 0, is_notified: bool = True) -> None:
        """Move a partition to another server; the previous owner releases it if `is_notified`.

        `kept` is the number of appends in flight that have reached a quorum: recovery finds them.
        """

        def move() -> None:
            before, generation = self.owners[number]
            old = self.servers[before].partitions[number]
            reached = [(req_id, header, data) for req_id, header, data, _ in old.pending[:kept]]
            if is_notified:
                self.servers[before].release_ownership(number)
            else:
                # The previous owner is fenced: it can commit no appends, and does not see commits
                # of other owners.
                old.log = Log(list(old.log.records))
                old.may_commit.clear()
            self.logs[number].records += reached
            self._assign(number, server, generation + 1)

        self.call(move)

    # --- for tests without a ZooKeeper

    def directory(self) -> "OriginalDirectory":
        """Return the owners of the partitions as a client's directory."""
        return OriginalDirectory(self)


class OriginalDirectory:
    """The current owners of the partitions (`client.directory.Directory`)."""

    def __init__(self, cluster: OriginalCluster) -> None:
        self._cluster = cluster
        self.cluster = ClusterInfo("original", bytes(16), cluster.partition_count)
        self.changed: OwnersChanged | None = None
        # The owners that the client assumes, where they have changed since.
        self.stale_owners: dict[int, Owner] | None = None

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        return {
            PartitionId(number): Owner(self._cluster.address(server), Generation(generation))
            for number, (server, generation) in self._cluster.owners.items()
        }

    async def open(self, on_change: OwnersChanged) -> None:
        self.changed = on_change

    async def run(self) -> None:
        known = self.owners
        while True:
            await asyncio.sleep(0.02)
            if self.stale_owners is None and self.owners != known and self.changed is not None:
                known = self.owners
                self.changed(known)

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        return (self.stale_owners or self.owners)[partition_id]

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        return self.owners[partition_id]

    def mark_suspect(self) -> None:
        pass

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        return {}

    async def next_client_id(self) -> int:
        with self._cluster.ids:
            self._cluster.last_client_id += 1
            return self._cluster.last_client_id

    async def close(self) -> None:
        pass
