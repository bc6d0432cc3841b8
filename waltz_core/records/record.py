"""The values that every layer uses: IDs, records, record headers, lineage, lock hashes.

Messages, files and ZooKeeper nodes contain these values. The meaning of their bytes never changes
(docs/design/wire-format.md).

Rules:
    1. Transaction IDs start at 0 in each partition and have no gaps.
    2. All integers are big-endian two's complement; IDs and marks are 64 bits wide.
    3. `BEFORE_FIRST` is the high-water mark of an empty log; no other negative mark exists.
"""

import hashlib
import struct
from typing import NamedTuple, NewType

PartitionId = NewType("PartitionId", int)
TransactionId = NewType("TransactionId", int)
SessionId = NewType("SessionId", int)
ClientId = NewType("ClientId", int)
ServerId = NewType("ServerId", int)
Generation = NewType("Generation", int)
# The name of a replica is the address of its storage, "host:port", as in the assignment node.
ReplicaId = NewType("ReplicaId", str)
# A value of the hash chain: blake2b-16 over the log of a partition up to the end of one batch.
Chain = NewType("Chain", bytes)

BEFORE_FIRST = TransactionId(-1)
NO_SESSION = SessionId(-1)
# If the entries of batches are unreadable, a storage creates a new entry with this session. Such a
# new entry must not be copied to other replicas.
RECONSTRUCTED = SessionId(-2)
CHAIN_BYTES = 16
GENESIS_CHAIN = Chain(bytes(CHAIN_BYTES))

REQ_ID = struct.Struct(">iiii")
RECORD_HEADER = struct.Struct(">q16si")
# transaction ID, request ID, header, data length, data crc; then the data; then the record crc
RECORD_PREFIX = struct.Struct(">q16siiI")
RECORD_OVERHEAD_BYTES = 40
assert REQ_ID.size == 16
assert RECORD_HEADER.size == 28
assert RECORD_PREFIX.size + 4 == RECORD_OVERHEAD_BYTES

TRANSACTION_BYTES_MAX = 4 * 1024 * 1024
# The maximum number of locks of one kind in a transaction: the longest list in a frame
# (`messages.ENTRIES_MAX`).
LOCKS_MAX = 64 * 1024
FRAME_BYTES_MAX = 16 * 1024 * 1024
assert TRANSACTION_BYTES_MAX + RECORD_OVERHEAD_BYTES < FRAME_BYTES_MAX

# Requests other than appends have negative sequence numbers, so that they are never mistaken for
# rows. A client's streams use numbers down to this minimum; its other requests use lower numbers.
CONTROL_SEQUENCE_MIN = -(1 << 30)


class ReqId(NamedTuple):
    """The identity of an append or another request. No two transactions in the log share it.

    A writer may use the sequence number of a row again if the row is known to be lost. For example,
    a Spark task continues after the highest sequence number in the log.
    """

    client_id: ClientId
    generation: Generation
    partition_id: PartitionId
    sequence: int

    def __str__(self) -> str:
        """Return the text for log lines and errors: client.generation.partition.sequence."""
        return f"{self.client_id}.{self.generation}.{self.partition_id}.{self.sequence}"

    def to_bytes(self) -> bytes:
        """Return the 16 bytes of the request ID (docs/design/wire-format.md 2)."""
        return REQ_ID.pack(*self)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> "ReqId":
        """Decode a request ID from 16 bytes; the caller has checked the length."""
        client_id, generation, partition_id, sequence = REQ_ID.unpack(data)
        return ReqId(
            ClientId(client_id), Generation(generation), PartitionId(partition_id), sequence
        )


class RecordHeader(NamedTuple):
    """A transaction's entry in the feed: ID, request ID of the append, application header."""

    transaction_id: TransactionId
    req_id: ReqId
    header: int


class Record(NamedTuple):
    """One committed transaction."""

    transaction_id: TransactionId
    req_id: ReqId
    header: int
    data: bytes


class LineageEntry(NamedTuple):
    """One appended batch: its first and last ID, session, commit stamp and hash chain.

    The owner sets the bounds and all replicas copy them, so the entry is equal on all replicas.
    `chain` is the hash chain AFTER this batch. If a batch is truncated in the middle, its remainder
    gets a new entry and a new chain.
    """

    first: TransactionId
    last: TransactionId
    session_id: SessionId
    stamp_ms: int
    chain: Chain


_CHAIN_INPUT = struct.Struct(">16sqqq")


def next_chain(
    previous: Chain,
    first: TransactionId,
    last: TransactionId,
    session_id: SessionId,
    record_crcs: bytes,
) -> Chain:
    """Return the hash chain after a batch; `record_crcs` has 4 big-endian bytes per record.

    docs/design/correctness.md 2.3, "Lineage", states the rule. The chain does not cover the commit
    stamp, because no decision may depend on a clock.
    """
    assert len(record_crcs) == 4 * (last - first + 1)
    digest = hashlib.blake2b(_CHAIN_INPUT.pack(previous, first, last, session_id), digest_size=16)
    digest.update(record_crcs)
    return Chain(digest.digest())


def lock_hash(name: str, key: int) -> int:
    """Return the 32-bit signed hash of a lock for messages (docs/design/wire-format.md 4).

    The hash covers the UTF-16 code units of the name, and the key as a signed 64-bit integer.
    """
    total = 0
    units = name.encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", units):
        total = (31 * total + unit) & 0xFFFFFFFF
    unsigned_key = key & 0xFFFFFFFFFFFFFFFF
    total ^= (unsigned_key ^ (unsigned_key >> 32)) & 0xFFFFFFFF
    return total - (1 << 32) if total >= 1 << 31 else total


def partition_of_hash(lock: int, partition_count: int) -> PartitionId:
    """Return the partition for a 32-bit hash: the same on every client (docs/spark.md, "Writing").

    The multiplication spreads the hashes of one partition over the whole lock table.
    """
    assert partition_count > 0
    multiplied = ((lock & 0xFFFFFFFF) * 0x9E3779B1) & 0xFFFFFFFF
    return PartitionId((multiplied * partition_count) >> 32)
