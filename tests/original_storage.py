"""A model of the original's storage: what it answers, what it refuses, what it closes on.

It is made from the description of the original's bytes and habits (interop.md 1 and 3), with
layouts of its own and none of our codec, so that a mistake of ours cannot be in both ends. It keeps
its current session in memory, begun with what its control file holds, and loses it with its
process; the log is synced with each append.
"""

import asyncio
import contextlib
import struct
import zlib
from dataclasses import dataclass, field

from tests.ports import free_port, stop_listening

HELLO = struct.pack(">cHi", b"H", 0, 4 + 2 + 4 + 20) + struct.pack(">iHi", 1, 0, 20)
HELLO += b"Waltz Storage Server"
PREFIX = struct.Struct(">bqqi")
FRAME = struct.Struct(">cHi")
HEADER = struct.Struct(">q16si")
NONE = -1
SUCCESS, FAILURE = 7, 8
STORAGE_EXCEPTION = "com.wepay.waltz.storage.exception.StorageException: "
CONCURRENT = "com.wepay.waltz.storage.exception.ConcurrentUpdateException: "


class Closed(Exception):
    """The original closes the connection."""


class Refused(Exception):
    """The original answers with an exception."""


@dataclass
class Partition:
    """What is on disk; `session` is in memory only."""

    records: list[bytes] = field(default_factory=list)  # as on the wire
    saved_session: int = NONE
    low_water_mark: int = NONE
    local_low_water_mark: int = NONE
    is_available: bool = True
    session: int = NONE

    @property
    def last(self) -> int:
        return len(self.records) - 1

    def header(self, at: int) -> bytes:
        return self.records[at][: HEADER.size]

    def data(self, at: int) -> bytes:
        return self.records[at][HEADER.size + 4 : -4]

    def request_id(self, at: int) -> bytes:
        return self.records[at][8:24]


class OriginalStorage:
    """A storage with all partitions assigned; `requests` are the payloads that came, in order."""

    def __init__(self, cluster_key: bytes, partition_count: int) -> None:
        self.cluster_key = cluster_key
        self.partition_count = partition_count
        self.partitions = {each: Partition() for each in range(partition_count)}
        self.requests: list[bytes] = []
        self.hellos: list[bytes] = []
        self.is_held = False  # appends are done, and nobody is told
        self._held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self.port = free_port()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def asked(self, kind: int) -> list[bytes]:
        """The payloads of one type."""
        return [each for each in self.requests if each[0] == kind]

    # ------------------------------------------------------------------ the process

    async def start(self) -> None:
        for partition in self.partitions.values():
            partition.session = partition.saved_session
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is None:
            return
        await stop_listening(self._server)
        for writer in list(self._writers):
            writer.transport.abort()
        self._server = None
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            writer.write(HELLO)
            hello = await _payload(reader, b"H")
            self.hellos.append(hello)
            (count,) = struct.unpack_from(">i", hello)
            if 0 in struct.unpack_from(f">{count}H", hello, 4):
                await self._serve(reader, writer)
        except (Closed, struct.error, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            payload = await _payload(reader, b"S")
            if not payload:
                continue  # a sign of life
            answer = self.handle(payload)
            if self.is_held and payload[0] == 6:
                self._held.append((writer, answer))
            else:
                _send(writer, answer)

    def release(self) -> None:
        """Send the answers to appends that were held back, where somebody is left."""
        self.is_held = False
        for writer, answer in self._held:
            if writer in self._writers:
                _send(writer, answer)
        self._held.clear()

    # ------------------------------------------------------------------ what it answers

    def handle(self, payload: bytes) -> bytes:
        """Answer a request's payload, or close the connection."""
        self.requests.append(payload)
        kind, session, sequence, number = PREFIX.unpack_from(payload)
        body = payload[PREFIX.size :]
        try:
            answer_kind, answer = self._answer(kind, session, number, body)
        except Refused as refused:
            text = str(refused).encode()
            answer_kind = FAILURE
            # One frame of the stack, without a file name.
            answer = struct.pack(">i", len(text)) + text
            answer += struct.pack(">ii1si1sii", 1, 1, b"C", 1, b"m", -1, -2)
        return PREFIX.pack(answer_kind, session, sequence, number) + answer

    def _answer(self, kind: int, session: int, number: int, body: bytes) -> tuple[int, bytes]:
        if kind == 1:
            return self._open(body)
        partition = self.partitions.get(number)
        if partition is None:
            raise Refused(f"java.lang.Exception: Partition:{number} is not assigned.")
        # Before any check.
        partition.session = max(partition.session, session)
        if session != partition.session:
            raise Refused(
                f"{CONCURRENT}session id has changed to {partition.session}, "
                f"but request context contains {session}"
            )
        if not partition.is_available:
            raise Refused(
                f"{STORAGE_EXCEPTION}read and write for partition={number} have been disabled on "
                "storage node"
            )
        return self._served(kind, partition, session, body)

    def _open(self, body: bytes) -> tuple[int, bytes]:
        key, count = struct.unpack(">16si", body)
        if key != self.cluster_key:
            raise Refused(
                f"{STORAGE_EXCEPTION}Provided cluster key is inconsistent with key in control file."
            )
        if count != self.partition_count:
            raise Refused(
                f"{STORAGE_EXCEPTION}Provided number of partitions is inconsistent with the total "
                "number of partitions in control file."
            )
        return SUCCESS, b""

    def _served(
        self, kind: int, partition: Partition, session: int, body: bytes
    ) -> tuple[int, bytes]:
        if kind in (2, 13):
            _online(body)
            if kind == 13:
                return 14, struct.pack(">q", partition.last)
            marks = partition.low_water_mark, partition.local_low_water_mark
            return 3, struct.pack(">qqq", partition.saved_session, *marks)
        if kind in (4, 5):
            (at,) = struct.unpack(">q", body[:8])
            _online(body[8:])
            if kind == 5:
                del partition.records[at + 1 :]
                return 14, struct.pack(">q", partition.last)
            return self._mark(partition, session, at)
        if kind == 6:
            return self._append(partition, body)
        if kind in (9, 11):
            (at,) = struct.unpack(">q", body)
            if not 0 <= at <= partition.last:
                return kind + 1, b"\0"
            found = partition.header(at) if kind == 9 else partition.records[at]
            return kind + 1, b"\1" + found
        if kind in (15, 17):
            first, count = struct.unpack(">qi", body)
            ids = range(first, min(first + count, len(partition.records)))
            of = partition.header if kind == 15 else partition.records.__getitem__
            return kind + 1, struct.pack(">i", len(ids)) + b"".join(map(of, ids))
        raise Closed

    def _mark(self, partition: Partition, session: int, mark: int) -> tuple[int, bytes]:
        if partition.last > mark:
            raise Refused(f"{STORAGE_EXCEPTION}low-water mark is lower than the max transaction id")
        if mark < partition.low_water_mark or session < partition.saved_session:
            raise Refused(f"{STORAGE_EXCEPTION}invalid low-water mark")
        partition.saved_session = session
        partition.low_water_mark, partition.local_low_water_mark = mark, partition.last
        return SUCCESS, b""

    def _append(self, partition: Partition, body: bytes) -> tuple[int, bytes]:
        (count,) = struct.unpack_from(">i", body)
        at, records = 4, []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", body, at + HEADER.size)
            end = at + HEADER.size + 4 + length + 4
            record = body[at:end]
            (crc,) = struct.unpack(">I", record[-4:])
            if zlib.crc32(record[HEADER.size + 4 : -4]) != crc:
                raise Closed
            records.append(record)
            at = end
        _online(body[at:])
        for record in records:
            (transaction_id,) = struct.unpack_from(">q", record)
            if transaction_id != partition.last + 1:
                raise Refused(f"{STORAGE_EXCEPTION}transaction out of order")
            partition.records.append(record)
        return SUCCESS, b""


def _online(rest: bytes) -> None:
    """No server asks as the offline recovery does; anything but one byte is a corrupted message."""
    if rest != b"\0":
        raise Closed


async def _payload(reader: asyncio.StreamReader, expected: bytes) -> bytes:
    magic, version, length = FRAME.unpack(await reader.readexactly(FRAME.size))
    if (magic, version) != (expected, 0):
        raise Closed
    return await reader.readexactly(length)


def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(FRAME.pack(b"S", 0, len(answer)) + answer)
