"""The values that ZooKeeper stores for one cluster, and their bytes (`paths.py` has the paths).

All processes of a cluster read these bytes, including processes of other versions, so the bytes
must not change. No other module encodes or decodes these nodes. The layouts are those of Waltz
0.13; extensions are below `R/x`, which 0.13 never reads.

Rules:
    1. Integers are big-endian; a structure starts with its version byte.
    2. For any bytes, a decoder returns a value or raises `errors.BadFormat`, and no other
       exception. Before a decoder allocates memory, it checks each count against the remaining
       bytes. Bytes after the end of the value are an error.
    3. Strings are "modified UTF-8" after an unsigned 16-bit length.
    4. Maps keep the order in which they were decoded. Therefore a value that is decoded and encoded
       again has the same bytes.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar
from uuid import UUID

from waltz_core import errors
from waltz_core.records.record import (
    NO_SESSION,
    Chain,
    Generation,
    PartitionId,
    ReplicaId,
    ServerId,
    SessionId,
    TransactionId,
)

# The closing high-water mark of a replica that is still engaged in its session.
UNRESOLVED = TransactionId(-(1 << 63))
NO_GENERATION = Generation(-1)
# The `cversion` of an assignment that was not computed yet.
NO_CVERSION = -1
INT32_MAX = (1 << 31) - 1
UTF_BYTES_MAX = 0xFFFF
NONCE_BYTES = 16
NO_NONCE = bytes(NONCE_BYTES)

CLUSTER_MAGIC = 0xB4E87347
STRUCTURE_VERSION = 1
ASSIGNMENT_VERSION = 3
_ARCHIVED_VERSION = 2
_ARCHIVED_MARK = struct.Struct(">q16sqqI")


# --- values and their bytes


@dataclass(frozen=True, slots=True)
class ClusterParams:
    """The name and the partition count of a cluster.

    Node `R`: int32 magic, byte 1, UTF name, int32 partition count.
    """

    name: str
    partition_count: int

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        head = struct.pack(">IB", CLUSTER_MAGIC, STRUCTURE_VERSION)
        return head + encode_utf(self.name) + struct.pack(">i", self.partition_count)

    @staticmethod
    def from_bytes(data: bytes) -> "ClusterParams":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "ClusterParams")
        magic = reader.int32("magic") & 0xFFFFFFFF
        if magic != CLUSTER_MAGIC:
            raise reader.format_error(f"expected magic {CLUSTER_MAGIC:08x}, found {magic:08x}")
        reader.version()
        return reader.check_end(
            ClusterParams(reader.utf("name"), reader.non_negative("partition count"))
        )


@dataclass(frozen=True, slots=True)
class ServerDescriptor:
    """A live server: its ID, address and preferred partitions.

    Node `R/serverDescriptors/s_N`: byte 1, int32 ID, UTF host, int32 port, int32 n, n x int32.
    """

    server_id: ServerId
    host: str
    port: int
    preferred: tuple[PartitionId, ...] = ()

    @property
    def address(self) -> str:
        """The address for clients, "host:port"."""
        return f"{self.host}:{self.port}"

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        return b"".join(
            (
                struct.pack(">Bi", STRUCTURE_VERSION, self.server_id),
                encode_utf(self.host),
                struct.pack(">i", self.port),
                _pack_ints(self.preferred),
            )
        )

    @staticmethod
    def from_bytes(data: bytes) -> "ServerDescriptor":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "ServerDescriptor")
        reader.version()
        server_id = ServerId(reader.int32("server ID"))
        host, port = reader.utf("host"), reader.port("port")
        return reader.check_end(
            ServerDescriptor(server_id, host, port, reader.partitions("preferred"))
        )


@dataclass(frozen=True, slots=True)
class PartitionAssignment:
    """The owner and generation of each partition.

    Node `R/serverDescriptors`: byte 3, int32 cversion, int32 partition count, int32 n, n x server.
    A server is int32 ID, int32 m, m x (int32 partition, int32 generation). The assignment is in
    force while `cversion` equals the child version of the node, that is, while the
    registered servers are exactly the servers for which it was computed.
    """

    cversion: int = NO_CVERSION
    partition_count: int = 0
    servers: Mapping[ServerId, Mapping[PartitionId, Generation]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        head = (ASSIGNMENT_VERSION, self.cversion, self.partition_count, len(self.servers))
        parts = [struct.pack(">Biii", *head)]
        for server_id, owned in self.servers.items():
            parts.append(struct.pack(">ii", server_id, len(owned)))
            parts.extend(struct.pack(">ii", *pair) for pair in owned.items())
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> "PartitionAssignment":
        """Decode the node's bytes; raises BadFormat, also for a duplicate or unknown partition."""
        reader = _Reader(data, "PartitionAssignment")
        reader.version(ASSIGNMENT_VERSION)
        cversion = reader.int32("cversion")
        partition_count = reader.non_negative("partition count")
        servers: dict[ServerId, dict[PartitionId, Generation]] = {}
        seen: set[PartitionId] = set()
        for _ in range(reader.count("server count", item_bytes=8)):
            server_id = ServerId(reader.int32("server ID"))
            if server_id in servers:
                raise reader.format_error(f"server {server_id} is listed twice")
            servers[server_id] = owned = {}
            for _ in range(reader.count("partition list length", item_bytes=8)):
                partition_id = PartitionId(reader.non_negative("partition ID"))
                if partition_id in seen or partition_id >= partition_count:
                    raise reader.format_error(
                        f"partition {partition_id} is listed twice or is not below "
                        f"the partition count {partition_count}"
                    )
                seen.add(partition_id)
                owned[partition_id] = Generation(reader.int32("generation"))
        return reader.check_end(PartitionAssignment(cversion, partition_count, servers))


@dataclass(frozen=True, slots=True)
class StoreParams:
    """The cluster key and the partition count, for storages.

    Node `R/store`: byte 1, 16 bytes cluster key, int32 partition count.
    """

    cluster_key: UUID
    partition_count: int

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        key = self.cluster_key.bytes
        return struct.pack(">B16si", STRUCTURE_VERSION, key, self.partition_count)

    @staticmethod
    def from_bytes(data: bytes) -> "StoreParams":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "StoreParams")
        reader.version()
        key = UUID(bytes=reader.take(16, "cluster key"))
        return reader.check_end(StoreParams(key, reader.non_negative("partition count")))


@dataclass(frozen=True, slots=True)
class ReplicaAssignments:
    """The partitions of which each storage has a replica.

    Node `R/store/assignment`: byte 1, int32 n, n x (UTF "host:port", int32 m, m x int32).
    """

    partitions: Mapping[ReplicaId, tuple[PartitionId, ...]] = field(default_factory=dict)

    def replicas_of(self, partition_id: PartitionId) -> tuple[ReplicaId, ...]:
        """Return the storages with a replica of a partition, in the order of the node."""
        return tuple(
            address for address, partitions in self.partitions.items() if partition_id in partitions
        )

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        parts = [struct.pack(">Bi", STRUCTURE_VERSION, len(self.partitions))]
        for address, partitions in self.partitions.items():
            parts.append(encode_utf(address) + _pack_ints(partitions))
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> "ReplicaAssignments":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "ReplicaAssignments")
        reader.version()
        partitions = reader.read_map_by_address(
            lambda: reader.partitions("partitions"), item_bytes=4
        )
        return reader.check_end(ReplicaAssignments(partitions))


@dataclass(frozen=True, slots=True)
class GroupDescriptor:
    """The group of each storage.

    Node `R/store/group`: byte 1, int32 n, n x (UTF "host:port", int32 group).
    """

    groups: Mapping[ReplicaId, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        return _pack_int_by_address(self.groups)

    @staticmethod
    def from_bytes(data: bytes) -> "GroupDescriptor":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "GroupDescriptor")
        reader.version()
        groups = reader.read_map_by_address(lambda: reader.int32("group"), item_bytes=4)
        return reader.check_end(GroupDescriptor(groups))


@dataclass(frozen=True, slots=True)
class ConnectionMetadata:
    """The admin port of each storage.

    Node `R/store/connection`: byte 1, int32 n, n x (UTF "host:port", int32 admin port).
    """

    admin_ports: Mapping[ReplicaId, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        return _pack_int_by_address(self.admin_ports)

    @staticmethod
    def from_bytes(data: bytes) -> "ConnectionMetadata":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "ConnectionMetadata")
        reader.version()
        ports = reader.read_map_by_address(lambda: reader.port("admin port"), item_bytes=4)
        return reader.check_end(ConnectionMetadata(ports))


class ReplicaState(NamedTuple):
    """The state of one replica: engaged in `session_id`, or closed at a high-water mark."""

    session_id: SessionId
    closing_high_water_mark: TransactionId = UNRESOLVED


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """The generation, store session and replica states of a partition.

    Node `R/store/partition/P`: byte 1, int32 generation, int64 session, int32 n, n x replica state.
    A replica state is byte 1, then (byte 1, int32 P, UTF "host:port"), int64 session, int64 closing
    high-water mark. Because every state contains P, encoding and decoding need P.
    """

    generation: Generation = NO_GENERATION
    session_id: SessionId = NO_SESSION
    states: Mapping[ReplicaId, ReplicaState] = field(default_factory=dict)

    def to_bytes(self, partition_id: PartitionId) -> bytes:
        """Return the node's bytes."""
        head = (STRUCTURE_VERSION, self.generation, self.session_id, len(self.states))
        parts = [struct.pack(">Biqi", *head)]
        for address, state in self.states.items():
            parts.append(struct.pack(">BBi", STRUCTURE_VERSION, STRUCTURE_VERSION, partition_id))
            parts.append(encode_utf(address))
            parts.append(struct.pack(">qq", *state))
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes, partition_id: PartitionId) -> "PartitionMetadata":
        """Decode the node's bytes; raises BadFormat, also if a state names another partition."""
        reader = _Reader(data, "PartitionMetadata")
        reader.version()
        generation = Generation(reader.int32("generation"))
        session_id = SessionId(reader.int64("session ID"))
        states: dict[ReplicaId, ReplicaState] = {}
        for _ in range(reader.count("replica count", item_bytes=24)):
            reader.version()
            reader.version()
            found = reader.int32("partition ID")
            if found != partition_id:
                raise reader.format_error(f"expected partition {partition_id}, found {found}")
            address = reader.new_address(states)
            session = SessionId(reader.int64("replica session ID"))
            mark = TransactionId(reader.int64("closing high-water mark"))
            states[address] = ReplicaState(session, mark)
        return reader.check_end(PartitionMetadata(generation, session_id, states))


EMPTY_METADATA = PartitionMetadata()


class MarkerState(Enum):
    """Whether a partition may still be new, without any records."""

    NEW = 1  # created by `cluster create` or by adoption; no session has been opened
    OPEN = 2  # a session has been opened: if the metadata is empty, it was lost


class ArchivedMark(NamedTuple):
    """The range of a partition that is in the archive: IDs `first`..`last` (decision 047).

    `last` is the last ID of a batch. `chain` and the commit stamp are those of this batch.
    `manifest` is the name of the manifest that lists the objects, with the CRC-32 of the manifest's
    bytes.
    """

    last: TransactionId
    chain: Chain
    stamp_ms: int
    first: TransactionId
    manifest_crc: int
    manifest: str


@dataclass(frozen=True, slots=True)
class PartitionMarker:
    """State of a partition in addition to that of Waltz 0.13: new or open, nonce, archived range.

    Node `R/x/partition/P`: byte 1, byte state (1 new, 2 open), int64 session, 16 bytes nonce.

    If there is an archived range, the first byte is 2. The nonce is then followed by int64 last ID,
    16 bytes chain, int64 commit stamp, int64 first ID, uint32 CRC of the manifest, UTF name of the
    manifest.

    The marker and the partition's metadata change in the same atomic write. After ZooKeeper was
    restored from an old copy, two servers can have the same session ID. The nonce distinguishes
    these servers. The nonce is valid only while `session_id` is the session of the metadata.
    """

    state: MarkerState
    session_id: SessionId = NO_SESSION
    nonce: bytes = NO_NONCE
    archived: ArchivedMark | None = None

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        assert len(self.nonce) == NONCE_BYTES
        version = STRUCTURE_VERSION if self.archived is None else _ARCHIVED_VERSION
        data = struct.pack(">BBq16s", version, self.state.value, self.session_id, self.nonce)
        if self.archived is not None:
            *numbers, manifest = self.archived
            data += _ARCHIVED_MARK.pack(*numbers) + encode_utf(manifest)
        return data

    @staticmethod
    def from_bytes(data: bytes) -> "PartitionMarker":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "PartitionMarker")
        has_archive = data[:1] == bytes([_ARCHIVED_VERSION])
        reader.version(_ARCHIVED_VERSION if has_archive else STRUCTURE_VERSION)
        state = reader.take(1, "state")[0]
        if state not in (MarkerState.NEW.value, MarkerState.OPEN.value):
            raise reader.format_error(f"expected state 1 (new) or 2 (open), found {state}")
        session_id = SessionId(reader.int64("session ID"))
        nonce = reader.take(NONCE_BYTES, "nonce")
        archived = _read_archived_mark(reader) if has_archive else None
        return reader.check_end(PartitionMarker(MarkerState(state), session_id, nonce, archived))


def _read_archived_mark(reader: "_Reader") -> ArchivedMark:
    last, chain, stamp_ms, first, crc = _ARCHIVED_MARK.unpack(
        reader.take(_ARCHIVED_MARK.size, "archived mark")
    )
    if not 0 <= first <= last + 1:
        raise reader.format_error(f"expected archived IDs from 0 on, found {first}..{last}")
    mark = TransactionId(last), Chain(chain), stamp_ms, TransactionId(first)
    return ArchivedMark(*mark, crc, reader.utf("name of the manifest"))


@dataclass(frozen=True, slots=True)
class StorageRegistration:
    """The ID of the storage that is registered at an address.

    Node `R/x/storage/HOST:PORT`: byte 1, 16 bytes storage ID.
    """

    storage_id: UUID

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        return struct.pack(">B16s", STRUCTURE_VERSION, self.storage_id.bytes)

    @staticmethod
    def from_bytes(data: bytes) -> "StorageRegistration":
        """Decode the node's bytes; raises BadFormat."""
        reader = _Reader(data, "StorageRegistration")
        reader.version()
        return reader.check_end(StorageRegistration(UUID(bytes=reader.take(16, "storage ID"))))


def encode_id_counter(last_id: int) -> bytes:
    """Return the bytes of an ID counter."""
    return struct.pack(">i", last_id)


def decode_id_counter(data: bytes) -> int:
    """Decode an ID counter, 0..INT32_MAX; raises BadFormat."""
    reader = _Reader(data, "ID counter")
    return reader.check_end(reader.non_negative("last ID"))


# --- strings


def encode_utf(text: str) -> bytes:
    """Return length and modified UTF-8 of a string; raises BadRequest if it is too long.

    In modified UTF-8, U+0000 is two bytes, and a character above U+FFFF is its two surrogates.
    """
    units = [
        text[index] if text[index] <= "\uffff" else _surrogate_pair(text[index])
        for index in range(len(text))
    ]
    data = "".join(units).encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")
    if len(data) > UTF_BYTES_MAX:
        raise errors.BadRequest(
            f"a string for ZooKeeper is too long: expected at most {UTF_BYTES_MAX} bytes, "
            f"found {len(data)}: {text[:40]!r}..."
        )
    return struct.pack(">H", len(data)) + data


def decode_utf(data: bytes) -> str:
    """Return the string in modified UTF-8 bytes without their length; raises UnicodeDecodeError."""
    # NB: the byte 0xc0 occurs only in this sequence, so replacing the sequence first is safe. A
    # four-byte sequence is valid UTF-8, but modified UTF-8 never contains one.
    text = data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")
    if any(char > "\uffff" for char in text):
        raise UnicodeDecodeError("utf-8", data, 0, len(data), "four-byte sequence")
    return text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


def _surrogate_pair(char: str) -> str:
    high, low = struct.unpack(">HH", char.encode("utf-16-be"))
    return chr(high) + chr(low)


# --- bytes in and out


def _pack_ints(values: tuple[PartitionId, ...]) -> bytes:
    return struct.pack(f">i{len(values)}i", len(values), *values)


def _pack_int_by_address(values: Mapping[ReplicaId, int]) -> bytes:
    parts = [struct.pack(">Bi", STRUCTURE_VERSION, len(values))]
    for address, value in values.items():
        parts.append(encode_utf(address) + struct.pack(">i", value))
    return b"".join(parts)


T = TypeVar("T")


class _Reader:
    """A cursor over a node's bytes that raises BadFormat for any invalid input."""

    __slots__ = ("_data", "_kind", "_offset")

    def __init__(self, data: bytes, kind: str) -> None:
        self._data = data
        self._kind = kind
        self._offset = 0

    def format_error(self, what: str) -> errors.BadFormat:
        return errors.BadFormat(
            f"znode data of a {self._kind}: {what}, at offset {self._offset} of "
            f"{len(self._data)} bytes"
        )

    def take(self, size_bytes: int, name: str) -> bytes:
        remaining = len(self._data) - self._offset
        if remaining < size_bytes:
            raise self.format_error(f"expected {size_bytes} bytes of {name}, found {remaining}")
        start, self._offset = self._offset, self._offset + size_bytes
        return self._data[start : self._offset]

    def version(self, expected: int = STRUCTURE_VERSION) -> None:
        found_version = self.take(1, "version")[0]
        if found_version != expected:
            raise self.format_error(f"expected version {expected}, found {found_version}")

    def int32(self, name: str) -> int:
        return int.from_bytes(self.take(4, name), "big", signed=True)

    def int64(self, name: str) -> int:
        return int.from_bytes(self.take(8, name), "big", signed=True)

    def non_negative(self, name: str) -> int:
        value = self.int32(name)
        if value < 0:
            raise self.format_error(f"expected {name} of 0 or more, found {value}")
        return value

    def port(self, name: str) -> int:
        value = self.int32(name)
        if not 0 <= value <= 65535:
            raise self.format_error(f"expected {name} in 0..65535, found {value}")
        return value

    def count(self, name: str, *, item_bytes: int) -> int:
        value = self.non_negative(name)
        remaining = len(self._data) - self._offset
        if value * item_bytes > remaining:
            raise self.format_error(
                f"{name} {value} needs at least {value * item_bytes} bytes, found {remaining}"
            )
        return value

    def utf(self, name: str) -> str:
        size_bytes = int.from_bytes(self.take(2, f"length of {name}"), "big")
        data = self.take(size_bytes, name)
        try:
            return decode_utf(data)
        except UnicodeDecodeError as error:
            raise self.format_error(f"{name} is not modified UTF-8 ({error.reason})") from error

    def partitions(self, name: str) -> tuple[PartitionId, ...]:
        count = self.count(f"length of {name}", item_bytes=4)
        return tuple(PartitionId(self.non_negative(name)) for _ in range(count))

    def new_address(self, known: Mapping[ReplicaId, object]) -> ReplicaId:
        address = ReplicaId(self.utf("storage address"))
        if address in known:
            raise self.format_error(f"storage {address!r} is listed twice")
        return address

    def read_map_by_address(
        self, read_value: Callable[[], T], *, item_bytes: int
    ) -> dict[ReplicaId, T]:
        values: dict[ReplicaId, T] = {}
        for _ in range(self.count("storage count", item_bytes=2 + item_bytes)):
            address = self.new_address(values)
            values[address] = read_value()
        return values

    def check_end(self, value: T) -> T:
        if self._offset != len(self._data):
            raise self.format_error(f"found {len(self._data) - self._offset} bytes after the end")
        return value
