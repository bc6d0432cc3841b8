"""Every message of protocols L and S, with its type code. Protocol A is in `admin_messages.py`.

`codec.py` encodes and decodes according to these declarations alone. docs/design/wire-format.md
describes the exchanges, with tables that `make docs` generates from this file.

Rules:
    1. Fields are written in declaration order, big-endian, with the layouts of `FieldKind`.
    2. `since` and `until` are the first and the last version of the protocol in which a message or
       a field exists. If an older version cannot express a value, encoding fails. The exception is
       a field with `is_extra`: it is not sent, and the peer reads the field's default.
    3. A code is never reused; codes that 0.13 does not have start at 64.
    4. Large byte fields are decoded as views of the frame. A view keeps the whole frame in memory.
    5. If a payload is shorter or longer than its message, the peer has violated the protocol.
    6. Each message declares in its own body which permission it requires, or `ANSWER` if it is
       never a request. A class without a declaration fails at import; an inherited declaration does
       not count.
"""

from collections.abc import Sequence
from dataclasses import field
from enum import Enum, IntEnum
from typing import Annotated, ClassVar, TypeAlias

from waltz_core.access.client_ids import NO_PROOF
from waltz_core.access.requirements import (
    ADMINISTER,
    ANSWER,
    APPEND,
    CREDENTIAL,
    READ,
    REPLICATE,
    AccessVerb,
    RequirementDeclaration,
    Scope,
    require_all,
    require_by_field,
    require_one,
)
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, LineageEntry, Record, ReqId
from waltz_core.values import value

Buffer: TypeAlias = bytes | memoryview


class FieldKind(Enum):
    """The layout of a field. n is an int32 count; a negative n is null, where null is allowed."""

    BOOL = "one byte, 1 is true"
    INT8 = "one signed byte"
    INT32 = "4 bytes"
    INT64 = "8 bytes"
    CRC32 = "4 bytes, unsigned: a CRC-32 as `checksum.py` returns it"
    RAW16 = "16 bytes: a UUID, a nonce, a chain"
    RAW32 = "32 bytes: the secret of a token"
    REQ_ID = "16 bytes: client ID, generation, partition ID, sequence"
    BLOB = "n, then n bytes; never null"
    TEXT = "n, then n bytes of UTF-8; never null"
    TEXT_OR_NULL = "n, then n bytes of UTF-8; null allowed"
    INT32S = "n, then n int32; as a tuple"
    PACKED_INT32S = "n, then n int32; kept as 4 n big-endian bytes"
    PACKED_INT64S = "n, then n int64; kept as 8 n big-endian bytes"
    TEXTS = "n, then n texts"
    LINEAGE = "n, then n entries of 48 bytes: first, last, session, stamp (int64 each), chain (16)"
    RECORDS = "n, then n records: ID, request ID, header, data, crc of data"
    TEXT_BOOL_MAP = "n, then n pairs of text and bool"
    INT32_BOOL_MAP = "n, then n pairs of int32 and bool"
    DATA_OR_ERROR = "bool; if true data (blob) and its crc, else an error text that may be null"
    STACK = "n, then n frames of class, method, file (may be null), line"


Bool = Annotated[bool, FieldKind.BOOL]
Int8 = Annotated[int, FieldKind.INT8]
Int32 = Annotated[int, FieldKind.INT32]
Int64 = Annotated[int, FieldKind.INT64]
Crc32 = Annotated[int, FieldKind.CRC32]
Raw16 = Annotated[bytes, FieldKind.RAW16]
Raw32 = Annotated[bytes, FieldKind.RAW32]
Req = Annotated[ReqId, FieldKind.REQ_ID]
Blob = Annotated[Buffer, FieldKind.BLOB]
Text = Annotated[str, FieldKind.TEXT]
TextOrNull = Annotated[str | None, FieldKind.TEXT_OR_NULL]
Int32s = Annotated[tuple[int, ...], FieldKind.INT32S]
PackedInt32s = Annotated[Buffer, FieldKind.PACKED_INT32S]
PackedInt64s = Annotated[Buffer, FieldKind.PACKED_INT64S]
Texts = Annotated[tuple[str, ...], FieldKind.TEXTS]
Lineage = Annotated[tuple[LineageEntry, ...], FieldKind.LINEAGE]
Records = Annotated[tuple[Record, ...], FieldKind.RECORDS]
TextBoolMap = Annotated[tuple[tuple[str, bool], ...], FieldKind.TEXT_BOOL_MAP]
Int32BoolMap = Annotated[tuple[tuple[int, bool], ...], FieldKind.INT32_BOOL_MAP]
# (data, None), or (None, error text), or (None, None)
DataOrError = Annotated[tuple[Buffer | None, str | None], FieldKind.DATA_OR_ERROR]


class WireProtocol(Enum):
    """The protocol of a port: its magic byte, its versions, and the texts of its hellos.

    A listener and a dialer may support different versions.
    """

    HELLO = ("H", (0,), (0,), "", "")
    # From version 3 on, a server of 0.13 can report that a client is ahead of the log.
    CLIENT = (
        "L",
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
        (3, 4, 5, 6, 7, 8, 9),
        "Waltz Server",
        "Waltz Client",
    )
    STORAGE = ("S", (1, 2, 3, 4), (1, 2, 3, 4), "Waltz Storage Server", "Waltz Storage Client")
    ADMIN = ("A", (0, 1, 2), (0, 1, 2), "Waltz Storage Admin Server", "Waltz Storage Admin Client")

    def __init__(
        self,
        magic: str,
        accepted: tuple[int, ...],
        offered: tuple[int, ...],
        listener_text: str,
        dialler_text: str,
    ) -> None:
        self.magic = ord(magic)
        self.versions_accepted = accepted
        self.versions_offered = offered
        self.listener_text = listener_text
        self.dialler_text = dialler_text

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that either side supports, in ascending order."""
        return tuple(sorted({*self.versions_accepted, *self.versions_offered}))


class RowOutcomeCode(IntEnum):
    """The outcome of one row of an append: COMMITTED, or why the row is not in the log."""

    COMMITTED = 0
    LOCK = 1  # final: the conflicting transaction is in the log
    LOST = 2  # The store session has ended. The row is not in the log and may be sent again.
    AHEAD = 3  # The row's high-water mark is above the log's high-water mark.
    NOT_MOUNTED = 4
    GENERATION = 5
    NO_SPACE = 6
    TOO_LARGE = 7
    OVERLOADED = 8


class RangeForm(IntEnum):
    """The part of each transaction that a range answer contains."""

    WHOLE = 0  # whole records, as in the segment file
    HEADERS = 1  # 28 bytes each: ID, request ID, header


# RANGE_REQUEST of protocol L: like HEADERS, but only headers of the request's client ID. The number
# 2 is in use for `record_locations.LOCATIONS`.
OWN_HEADERS = 3
# PREPARED: the storage does not support archiving.
NO_ARCHIVING = -2
# MOUNT_WRITER: the writer has no high-water mark, and uses that of the log.
LATEST_MARK = -2
# Limits on the sizes for which a decoder allocates memory, in addition to the limit on the frame.
TEXT_BYTES_MAX = 64 * 1024
# The number of entries of one field that become Python objects: locks, texts, lineage, records,
# pairs.
ENTRIES_MAX = 64 * 1024
# The number of headers in a filter. The server searches these headers for each range, or during a
# whole mount.
FILTER_HEADERS_MAX = 1_000


@value(frozen=True, slots=True)
class Message:
    """The base class of all messages. Its class variables are the columns of the table."""

    protocol: ClassVar[WireProtocol]
    code: ClassVar[int]
    requires: ClassVar[RequirementDeclaration]
    since: ClassVar[int] = 0
    until: ClassVar[int | None] = None

    def named_partitions(self) -> Sequence[int]:
        """The partitions for which a sender needs the required verbs (`Scope.NAMED`)."""
        partitions: Sequence[int] | None = getattr(self, "partitions", None)
        if partitions is None:  # The partition is in the prefix or in the request ID.
            partitions = (getattr(self, "req_id", self).partition_id,)  # type: ignore[union-attr]
        return partitions

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "code") and "requires" not in vars(cls):  # rule 6
            raise TypeError(
                f"{cls.__name__}: expected a declaration `requires` in the body of the message"
            )


# ---------------------------------------------------------------------------------------------
# H: the first frame of either side


@value(frozen=True, slots=True)
class Hello:
    """The versions that one side supports. A hello has no type code: H has no other message."""

    versions: tuple[int, ...]
    text: str


# ---------------------------------------------------------------------------------------------
# L: client and server. Prefix: type (1 byte), request ID (16)


@value(frozen=True, slots=True)
class ClientMessage(Message):
    """A message between a client and a server."""

    protocol = WireProtocol.CLIENT
    req_id: Req


@value(frozen=True, slots=True)
class MountRequest(ClientMessage):
    """Start the feed of a partition on this connection, after the client's high-water mark."""

    code = 0
    requires = require_all(READ)
    client_high_water_mark: Int64
    connection_sequence: Int64


class MountState(IntEnum):
    """The result of a mount. `CLIENT_AHEAD`: the client's high-water mark is above the log's."""

    READY = 0
    NOT_READY = 1
    CLIENT_AHEAD = 2


@value(frozen=True, slots=True)
class MountOutcome(ClientMessage):
    """The older form of `MountResponse`, without a reason."""

    code = 1
    requires = ANSWER
    until: ClassVar[int | None] = 2
    is_ready: Bool


@value(frozen=True, slots=True)
class MountResponse(ClientMessage):
    """The state of a mount.

    READY: the feed has reached the log's high-water mark, and older appends of this client are
    final.
    """

    code = 1
    requires = ANSWER
    since = 3
    state: Int32  # a MountState


@value(frozen=True, slots=True)
class AppendRequest(ClientMessage):
    """Append one transaction."""

    code = 2
    requires = require_all(APPEND)
    client_high_water_mark: Int64
    write_locks: Int32s
    read_locks: Int32s = field(metadata={"since": 1})
    append_locks: Int32s = field(metadata={"since": 2})
    header: Int32
    data: Blob
    data_crc: Crc32


@value(frozen=True, slots=True)
class FeedRequest(ClientMessage):
    """Request the next part of the feed. The request ID is that of the mount."""

    code = 3
    requires = require_all(READ)
    client_high_water_mark: Int64


@value(frozen=True, slots=True)
class FeedData(ClientMessage):
    """One committed transaction. The request ID is that of the append that wrote it."""

    code = 4
    requires = ANSWER
    transaction_id: Int64
    header: Int32


@value(frozen=True, slots=True)
class FeedSuspended(ClientMessage):
    """The requested part of the feed was sent; the client may send the next `FeedRequest`."""

    code = 5
    requires = ANSWER


@value(frozen=True, slots=True)
class TransactionDataRequest(ClientMessage):
    """Request the data of one transaction."""

    code = 6
    requires = require_all(READ)
    transaction_id: Int64


@value(frozen=True, slots=True)
class TransactionDataResponse(ClientMessage):
    """The data of one transaction, or the reason why the server cannot return it."""

    code = 7
    requires = ANSWER
    transaction_id: Int64
    result: DataOrError


@value(frozen=True, slots=True)
class FlushRequest(ClientMessage):
    """Request an answer as soon as all appends received before this request are final."""

    code = 8
    requires = require_one(READ, APPEND)


@value(frozen=True, slots=True)
class FlushResponse(ClientMessage):
    """All earlier appends are final. The answer contains the log's high-water mark at this time."""

    code = 9
    requires = ANSWER
    high_water_mark: Int64


@value(frozen=True, slots=True)
class LockFailure(ClientMessage):
    """A lock conflict rejected the append.

    The ID is above the client's mark. The ID is that of the conflicting transaction or a higher
    one, because the lock table has only an estimate.
    """

    code = 10
    requires = ANSWER
    transaction_id: Int64


@value(frozen=True, slots=True)
class HighWaterMarkRequest(ClientMessage):
    """Request the high-water mark of the partition."""

    code = 11
    requires = require_one(READ, APPEND)


@value(frozen=True, slots=True)
class HighWaterMarkResponse(ClientMessage):
    """The high-water mark: the ID of the last committed transaction that the server knows of."""

    code = 12
    requires = ANSWER
    high_water_mark: Int64


@value(frozen=True, slots=True)
class CheckConnectivityRequest(ClientMessage):
    """Request that the server tries to connect to every storage of the assignment."""

    code = 13
    requires = require_all(ADMINISTER, scope=Scope.ALL)
    since = 1


@value(frozen=True, slots=True)
class CheckConnectivityResponse(ClientMessage):
    """The storages ("host:port"), each with a flag that states whether it answered the server."""

    code = 14
    requires = ANSWER
    since = 1
    reachable: TextBoolMap


@value(frozen=True, slots=True)
class ServerPartitionsRequest(ClientMessage):
    """Request the list of partitions that the server owns."""

    code = 15
    requires = require_one(*AccessVerb, scope=Scope.ANY)
    since = 2


@value(frozen=True, slots=True)
class ServerPartitionsResponse(ClientMessage):
    """The partitions that the server owns."""

    code = 16
    requires = ANSWER
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredRequest(ClientMessage):
    """Make the server the preferred owner of these partitions until its process exits."""

    code = 17
    requires = require_all(ADMINISTER)
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredResponse(ClientMessage):
    """Whether the server has updated the assignment; false if a partition does not exist."""

    code = 18
    requires = ANSWER
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class RemovePreferredRequest(ClientMessage):
    """Remove the server's preference for these partitions."""

    code = 19
    requires = require_all(ADMINISTER)
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class RemovePreferredResponse(ClientMessage):
    """Whether the server has updated the assignment."""

    code = 20
    requires = ANSWER
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class PartitionsHealthRequest(ClientMessage):
    """Request the list of the server's partitions, with the states of their store sessions."""

    code = 21
    requires = require_one(*AccessVerb, scope=Scope.ANY)
    since = 4


@value(frozen=True, slots=True)
class PartitionsHealthResponse(ClientMessage):
    """The partitions of the server; each with a flag: whether its store session is open."""

    code = 22
    requires = ANSWER
    since = 4
    healthy: Int32BoolMap


@value(frozen=True, slots=True)
class AppendTimesRequest(ClientMessage):
    """Request the latencies of this server's appends at its storages."""

    code = 85
    requires = require_all(ADMINISTER, scope=Scope.ALL)
    since = 6


@value(frozen=True, slots=True)
class AppendTimesResponse(ClientMessage):
    """The append latencies of each storage ("host:port") over the last minute.

    `second_counts`: the number of seconds in which the storage answered appends. `medians_us`: the
    median of the mean latencies of these seconds, in microseconds.
    """

    code = 86
    requires = ANSWER
    since = 6
    storages: Texts
    second_counts: Int32s
    medians_us: Int32s


@value(frozen=True, slots=True)
class AppendBatch(ClientMessage):
    """Append many transactions: one Arrow IPC record batch (`batches.APPEND_SCHEMA`).

    The sequence number of row i is the sequence number of the request ID plus i, even if earlier
    rows are rejected. The high-water mark applies to every row, unless the batch has a column of
    marks.
    """

    code = 64
    requires = require_all(APPEND)
    since = 5
    client_high_water_mark: Int64
    payload: Blob
    payload_crc: Crc32


@value(frozen=True, slots=True)
class AppendResult(ClientMessage):
    """The outcome of every row of an append, sent when all rows are final.

    `transaction_ids` contains -1 for rejected rows. `reasons` has one byte per row
    (`RowOutcomeCode`). If a row was rejected with LOCK, `conflicting` contains the ID of the
    conflicting transaction or a higher ID; otherwise it contains -1.
    """

    code = 65
    requires = ANSWER
    since = 5
    high_water_mark: Int64
    transaction_ids: PackedInt64s
    reasons: Blob
    conflicting: PackedInt64s


@value(frozen=True, slots=True)
class AppendFollowing(AppendRequest):
    """Append one transaction that may depend on appends in flight.

    `session_id` is -1 if the writer has used no `Predecessors`. If the writer has used
    `Predecessors`, `session_id` is their store session. The request's mark may then be above the
    log's high-water mark: the writer has received the appends in flight up to this mark. If a lock
    rejects the append, the answer is `Predecessors` where possible, otherwise an `AppendResult`.
    """

    code = 83
    requires = require_all(READ, APPEND)
    since = 6
    session_id: Int64 = -1


@value(frozen=True, slots=True)
class Predecessors(ClientMessage):
    """A lock conflict rejected the append; `records` are the conflicting transactions.

    These are all transactions above the request's mark, up to `last`, that have written one of the
    request's write or read locks. `records` has their bytes as in the segment file, `lengths` the
    lengths of the records. Transactions above `high_water_mark` (of the log) are in flight in the
    session, so they may get lost. If one is lost, no append that depends on it gets into the log.
    """

    code = 84
    requires = ANSWER
    since = 6
    session_id: Int64
    high_water_mark: Int64
    last: Int64
    lengths: PackedInt32s
    records: Blob


@value(frozen=True, slots=True)
class MountWriter(ClientMessage):
    """Mount a partition for writing; with `wants_feed`, also start its feed.

    The feed starts after the client's mark.

    `connection_sequence` fences older connections of the same client ID. Within a generation, the
    server rejects every number below the highest one so far, even after the connection with this
    number was closed. `high_water_mark` is the client's mark or `LATEST_MARK`. `header_values`
    filters the feed by application header; empty means no filter. `proof` proves ownership of the
    client ID (`ClientIdResponse`).
    """

    code = 66
    requires = require_by_field(
        "wants_feed", {False: require_one(READ, APPEND), True: require_all(READ)}
    )
    since = 5
    connection_sequence: Int64
    high_water_mark: Int64
    wants_feed: Bool
    header_values: Int32s = ()
    proof: Raw16 = field(default=NO_PROOF, metadata={"since": 8, "is_extra": True}, repr=False)


@value(frozen=True, slots=True)
class Mounted(ClientMessage):
    """The partition accepts appends of this connection; older appends of the client are final."""

    code = 67
    requires = ANSWER
    since = 5
    session_id: Int64
    high_water_mark: Int64
    batch_rows_max: Int32
    batch_bytes_max: Int32
    in_flight_bytes_max: Int64


@value(frozen=True, slots=True)
class RangeRequest(ClientMessage):
    """Read committed transactions first..last, at most about `bytes_max` bytes of them.

    `header_values` filters by application header at the server; empty means no filter. With form
    `OWN_HEADERS` (L 8), the answer has only headers of the request's client ID, and no lineage.
    This client ID must be mounted on the same connection.
    """

    code = 68
    requires = require_by_field(
        "form",
        {
            RangeForm.WHOLE: require_all(READ),
            RangeForm.HEADERS: require_all(READ),
            OWN_HEADERS: require_all(APPEND),
        },
    )
    since = 5
    first: Int64
    last: Int64
    bytes_max: Int32
    form: Int8
    header_values: Int32s


@value(frozen=True, slots=True)
class RangeData(ClientMessage):
    """A part of a range. `next` is the next ID to read.

    At the end of the range, `next` is above the requested last ID. With form WHOLE, `lengths` are
    the lengths of the records, and `records` has the bytes of the segment file. With form HEADERS,
    `lengths` is empty, and `records` has 28 bytes per transaction. `lineage` lists the batches of
    the part; the first and the last batch may extend beyond the part. The IDs in the records are
    consecutive, unless the request has a filter.
    """

    code = 69
    requires = ANSWER
    since = 5
    first: Int64
    count: Int32
    next: Int64
    form: Int8
    lengths: PackedInt32s
    records: Blob
    session_id: Int64
    high_water_mark: Int64
    lineage: Lineage


@value(frozen=True, slots=True)
class FeedBatch(ClientMessage):
    """Committed transactions first..first+count-1, 20 bytes each: request ID, application header.

    A filtered feed contains headers only of the transactions that pass the filter. `picked`
    contains the offsets of these transactions from `first`, in ascending order. If `picked` is
    empty, the message contains headers of all transactions.

    `chain` is the log's hash chain at `chain_at`, the last ID of a batch. If the server knows no
    chain at a position inside the part, `chain_at` is BEFORE_FIRST and `chain` is zeros. A client
    compares chains to detect that it has applied a different log.
    """

    code = 70
    requires = ANSWER
    since = 5
    first: Int64
    count: Int32
    headers: Blob
    session_id: Int64
    chain_at: Int64
    chain: Raw16
    picked: PackedInt32s = b""


@value(frozen=True, slots=True)
class ReplicasRequest(ClientMessage):
    """Request the session, the high-water mark, and the replicas that readers may use.

    With `linearizable`, the server first confirms, by heartbeats to a quorum, that there is no
    later session.
    """

    code = 71
    requires = require_one(READ, APPEND)
    since = 5
    linearizable: Bool


@value(frozen=True, slots=True)
class ReplicasResponse(ClientMessage):
    """The open session, its high-water mark, its engaged replicas, and the state of the archive.

    `replicas` has the addresses of the engaged replicas.

    The archive contains the IDs `first_available`..`archived`; `manifest` lists its objects.
    `unarchived_bytes` is the approximate size of the committed records after `archived`, or -1 if
    it is not known. `archive_interval_ms` is the setting of the server: 0 if it archives nothing.
    """

    code = 72
    requires = ANSWER
    since = 5
    session_id: Int64
    high_water_mark: Int64
    replicas: Texts
    cluster_key: Raw16
    partition_count: Int32
    first_available: Int64 = field(default=0, metadata={"since": 7, "is_extra": True})
    archived: Int64 = field(default=BEFORE_FIRST, metadata={"since": 7, "is_extra": True})
    manifest: Text = field(default="", metadata={"since": 7, "is_extra": True})
    manifest_crc: Crc32 = field(default=0, metadata={"since": 7, "is_extra": True})
    unarchived_bytes: Int64 = field(default=-1, metadata={"since": 7, "is_extra": True})
    archive_interval_ms: Int64 = field(default=0, metadata={"since": 7, "is_extra": True})


@value(frozen=True, slots=True)
class ErrorResponse(ClientMessage):
    """The request failed. `error_code` is the code of the error in `errors.py`.

    `first_available`: the first ID of the log if the request was for earlier IDs; otherwise -1.
    `retry_after_ms`: how long the client should wait before it repeats the request; 0 if this is
    not known.
    """

    code = 73
    requires = ANSWER
    since = 5
    error_code: Int32
    retriable: Bool
    message: Text
    first_available: Int64 = field(default=BEFORE_FIRST, metadata={"since": 7, "is_extra": True})
    retry_after_ms: Int32 = field(default=0, metadata={"since": 8, "is_extra": True})


@value(frozen=True, slots=True)
class ExpireRequest(ClientMessage):
    """Remove whole archived objects from the start of the log.

    An object is removed if all its IDs are below `before`, or all its commit times are before
    `before_ms`. 0 means no limit. Repeat the request until the answer states that the expiry is
    done.
    """

    code = 76
    requires = require_all(ADMINISTER)
    since = 7
    before: Int64
    before_ms: Int64


@value(frozen=True, slots=True)
class ExpireResponse(ClientMessage):
    """The current first available ID.

    `is_done` states that the server has carried out the expiry as far as possible.
    """

    code = 77
    requires = ANSWER
    since = 7
    first_available: Int64
    is_done: Bool


@value(frozen=True, slots=True)
class ObjectReplacementRequest(ClientMessage):
    """Replace an object of the archive that is corrupt or missing, from the log of a storage.

    The manifest lists the object as `object`, with the IDs first..last. Repeat the request until
    the answer states that the attempt has ended. `token` is a random number that identifies the
    attempt: a request with another token starts a new attempt.
    """

    code = 78
    requires = require_all(ADMINISTER)
    since = 7
    object: Text
    first: Int64
    last: Int64
    token: Int64


@value(frozen=True, slots=True)
class ObjectReplacementResponse(ClientMessage):
    """Whether the attempt has ended, and whether the object was replaced.

    `storage` is the storage that has written the new object; it is empty if an earlier request has
    already replaced the object. `failures` has the reason for each storage that could not write the
    object. The server reports the end of an attempt once; a later request starts a new attempt.
    """

    code = 79
    requires = ANSWER
    since = 7
    is_ended: Bool
    is_replaced: Bool
    storage: Text
    failures: Texts


@value(frozen=True, slots=True)
class Authenticate(ClientMessage):
    """Authenticate the connection as the principal of a token.

    Permitted only as the first message of a connection, and only over TLS. If the server does not
    accept the token, it answers with an error and closes the connection.
    """

    code = 87
    requires = CREDENTIAL
    since = 8
    token: Raw32 = field(repr=False)


@value(frozen=True, slots=True)
class Authenticated(ClientMessage):
    """The server has accepted the token."""

    code = 88
    requires = ANSWER
    since = 8


@value(frozen=True, slots=True)
class ClientIdRequest(ClientMessage):
    """Request a new client ID: one that no server has ever issued before."""

    code = 89
    requires = require_one(READ, APPEND, scope=Scope.ANY)
    since = 8


@value(frozen=True, slots=True)
class ClientIdResponse(ClientMessage):
    """A client ID for the principal of the connection, and the proof that its mounts must contain.

    `proof` is `NO_PROOF` if the server has no permissions.
    """

    code = 90
    requires = ANSWER
    since = 8
    client_id: Int32
    proof: Raw16 = field(repr=False)


class RegistryOperation(IntEnum):
    """An operation on the registry of exactly-once writes (`cluster/write_registry.py`)."""

    BEGIN = 0
    READ = 1
    ENTER = 2
    CHECK = 3
    TASKS = 4
    FINISH = 5
    FORGET = 6


@value(frozen=True, slots=True)
class RegistryRequest(ClientMessage):
    """Read or change the record of an exactly-once write.

    The client repeats the request if it receives no answer. A write belongs to the principal that
    began it (decision 048, AC 14). The fields depend on the operation:
        - BEGIN: `partitions` and `marks` are the starting marks; `arguments` has `keep_ms` and
          `in_series`.
        - ENTER: `task`; `arguments` has `run`.
        - CHECK: `task` and `attempt`.
        - TASKS: `arguments` has `run`.
        - FINISH: `arguments` has `summary` and `keep_ms`. With an `attempt`, the operation succeeds
          only while this is the latest attempt of `task`.

    `arguments` is JSON; it is empty for all other operations.
    """

    code = 91
    requires = require_by_field(
        "operation",
        {
            RegistryOperation.BEGIN: require_all(READ, APPEND),
            RegistryOperation.READ: require_all(APPEND, scope=Scope.ANY),
            RegistryOperation.ENTER: require_all(APPEND, scope=Scope.ANY),
            RegistryOperation.CHECK: require_all(APPEND, scope=Scope.ANY),
            RegistryOperation.TASKS: require_all(APPEND, scope=Scope.ANY),
            RegistryOperation.FINISH: require_all(APPEND, scope=Scope.ANY),
            RegistryOperation.FORGET: require_all(APPEND, scope=Scope.ANY),
        },
    )
    since = 8
    operation: Int8  # a RegistryOperation
    write: Text
    task: Int32 = 0
    attempt: Int32 = 0
    partitions: Int32s = ()
    marks: PackedInt64s = b""
    arguments: Blob = b""


@value(frozen=True, slots=True)
class RegistryResponse(ClientMessage):
    """The server has carried out the operation of a `RegistryRequest`.

    `result` is JSON, and depends on the operation:
        - BEGIN, READ and FINISH: the write's node in ZooKeeper; empty if there is no such node.
        - ENTER: the task's node. `proof` is the proof of the task's client ID, or `NO_PROOF` if the
          server has no permissions.
        - TASKS: an object. `tasks` has the numbers of all tasks, `others` the client IDs of the
          tasks that another run has begun.
    """

    code = 92
    requires = ANSWER
    since = 8
    result: Blob = b""
    proof: Raw16 = field(default=NO_PROOF, repr=False)


@value(frozen=True, slots=True)
class RejectionsRequest(ClientMessage):
    """Request the newest rejected rows of the partition, which the owner keeps in memory."""

    code = 93
    requires = require_one(READ, ADMINISTER)
    since = 9


@value(frozen=True, slots=True)
class RejectionsResponse(ClientMessage):
    """The newest rejected rows since the server took the partition: at most 100, newest first.

    All fields have one entry for each row. `stamps_ms`: the server's wall clock time, in
    milliseconds since 1970 (UTC). `request_ids`: 16 bytes each, with the layout of REQ_ID.
    `reasons`: one byte each, a `RowOutcomeCode`: LOCK, AHEAD or TOO_LARGE. For LOCK, `conflicting`
    contains the ID of the conflicting transaction or a higher ID; otherwise it contains -1.
    """

    code = 94
    requires = ANSWER
    since = 9
    stamps_ms: PackedInt64s
    request_ids: Blob
    reasons: Blob
    conflicting: PackedInt64s


# ---------------------------------------------------------------------------------------------
# S: server and storage. Prefix: type (1), session ID (8), sequence number (8), partition ID (4). An
# answer has the session, sequence number and partition of its request.


@value(frozen=True, slots=True)
class StorageMessage(Message):
    """A message between a server (or a reader) and a storage."""

    protocol = WireProtocol.STORAGE
    session_id: Int64
    sequence: Int64
    partition_id: Int32


@value(frozen=True, slots=True)
class OpenRequest(StorageMessage):
    """Check that the storage belongs to this cluster.

    Session, sequence number and partition are -1.
    """

    code = 1
    requires = require_one(READ, REPLICATE, scope=Scope.ANY)
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class SuccessResponse(StorageMessage):
    """The storage has processed the request."""

    code = 7
    requires = ANSWER


@value(frozen=True, slots=True)
class Prepare(StorageMessage):
    """Promise the session, end older sessions, sync the log, and return the state of the replica.

    `storage_id` is the ID with which the storage is registered, or 16 zeros if none is registered
    yet.
    """

    code = 64
    requires = require_all(REPLICATE)
    since = 1
    nonce: Raw16
    storage_id: Raw16
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class Prepared(StorageMessage):
    """The state of the replica on disk, read after the fencing of older sessions and a sync.

    `damaged` contains pairs (first ID, last ID) of unreadable records. `engaged_session` is the
    last session that opened with this replica engaged. ZooKeeper records each session before it
    opens. `engaged_session` is -1 if there is no such session or the storage does not report it (S
    1). `start` is the last ID of the batch before the log's first record, and `start_chain` is the
    hash chain at this ID. `start` is -2 if the storage does not support archiving (S 2).
    """

    code = 65
    requires = ANSWER
    since = 1
    storage_id: Raw16
    last_session: Int64
    low_water_mark: Int64
    mark_confirmed: Bool
    synced_max: Int64
    chain: Raw16
    suspect: Bool
    damaged: PackedInt64s
    engaged_session: Int64 = field(default=NO_SESSION, metadata={"since": 2, "is_extra": True})
    start: Int64 = field(default=NO_ARCHIVING, metadata={"since": 3, "is_extra": True})
    start_chain: Raw16 = field(default=bytes(16), metadata={"since": 3, "is_extra": True})


@value(frozen=True, slots=True)
class ReplicaEnd(StorageMessage):
    """The request is done: the last ID on disk, and the hash chain there.

    Answers 67, 68, 69 and 75.
    """

    code = 66
    requires = ANSWER
    since = 1
    synced_max: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class SetLowWaterMark(StorageMessage):
    """Make the session and the low-water mark durable.

    Rejected unless the log ends exactly at the mark.
    """

    code = 67
    requires = require_all(REPLICATE)
    since = 1
    mark: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class Truncate(StorageMessage):
    """Truncate the log after `last_to_keep`.

    `base` is the last ID of a batch: of all batch ends that the owner knows, the highest one that
    is not above `last_to_keep`. `base_chain` is the hash chain at `base`. The storage rejects the
    request if its chain at `base` differs, or if `last_to_keep` is below the confirmed low-water
    mark.
    """

    code = 68
    requires = require_all(REPLICATE)
    since = 1
    last_to_keep: Int64
    base: Int64
    base_chain: Raw16


@value(frozen=True, slots=True)
class Engage(StorageMessage):
    """Confirm the low-water mark: ZooKeeper lists the replica as engaged in this session."""

    code = 69
    requires = require_all(REPLICATE)
    since = 1
    mark: Int64


@value(frozen=True, slots=True)
class AppendRaw(StorageMessage):
    """Append records with the same bytes as on disk: one or more whole batches (`lineage`).

    `locks` is the batch's lock block (`lock_blocks.py`). The storage keeps the lock block for the
    next owner. `locks` is empty if the sender does not know the locks.
    """

    code = 70
    requires = require_all(REPLICATE)
    since = 1
    first: Int64
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32
    chain_before: Raw16
    lineage: Lineage
    locks: Blob = b""


@value(frozen=True, slots=True)
class Appended(StorageMessage):
    """The log is synced to disk up to this ID."""

    code = 71
    requires = ANSWER
    since = 1
    synced_max: Int64


@value(frozen=True, slots=True)
class RangeRaw(StorageMessage):
    """Read records first..last, at most about `bytes_max` bytes, but at least one batch or record.

    `reader`: the sender is a reader, not the owner. The storage answers a reader only while its
    replica is engaged in the session of the prefix. For a reader, the answer ends at the latest at
    the last ID that the storage has synced. `whole_batches`, for repair and catch-up: `first` is
    the first ID of a batch, and the answer ends at the end of a batch.
    """

    code = 72
    requires = require_by_field(
        "reader", {False: require_all(REPLICATE), True: require_one(READ, REPLICATE)}
    )
    since = 1
    first: Int64
    last: Int64
    bytes_max: Int32
    form: Int8
    whole_batches: Bool
    reader: Bool


@value(frozen=True, slots=True)
class RangeBytes(StorageMessage):
    """Records first..first+count-1. `chain_before` is meaningful only for whole batches.

    `ticket`: in an answer with record locations, a code. The storage passes an open file to this
    reader only with this code (`record_locations.py`). `ticket` is empty without access control.
    """

    code = 73
    requires = ANSWER
    since = 1
    first: Int64
    count: Int32
    form: Int8
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32
    chain_before: Raw16
    lineage: Lineage
    ticket: Blob = field(default=b"", metadata={"since": 4, "is_extra": True})


@value(frozen=True, slots=True)
class LineageRequest(StorageMessage):
    """Request the lineage entries of the batches that cover first..last."""

    code = 74
    requires = require_all(REPLICATE)
    since = 1
    first: Int64
    last: Int64


@value(frozen=True, slots=True)
class Repair(StorageMessage):
    """Replace a damaged range below the low-water mark by the records of another replica."""

    code = 75
    requires = require_all(REPLICATE)
    since = 1
    first: Int64
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32


@value(frozen=True, slots=True)
class LineageResponse(StorageMessage):
    """The requested batches in order, and the chain before them.

    If not all batches fit, the response contains the newest ones.
    """

    code = 76
    requires = ANSWER
    since = 1
    chain_before: Raw16
    lineage: Lineage


@value(frozen=True, slots=True)
class Heartbeat(StorageMessage):
    """Request a confirmation that the storage has promised no later session."""

    code = 77
    requires = require_all(REPLICATE)
    since = 1


@value(frozen=True, slots=True)
class HeartbeatResponse(StorageMessage):
    """The storage confirms that it has promised no later session."""

    code = 78
    requires = ANSWER
    since = 1


@value(frozen=True, slots=True)
class LockBlocksRequest(StorageMessage):
    """Request the newest lock blocks as a reader: the storage must be engaged in the session."""

    code = 81
    requires = require_all(REPLICATE)
    since = 1
    bytes_max: Int32


@value(frozen=True, slots=True)
class LockBlocks(StorageMessage):
    """The last bytes of the lock files, unchecked.

    The receiver validates the blocks against the log.
    """

    code = 82
    requires = ANSWER
    since = 1
    blocks: Blob


@value(frozen=True, slots=True)
class Nack(StorageMessage):
    """The request failed. `error_code` is the code of the error in `errors.py`.

    `promised`: the session that the replica has promised. `first_available`: the first ID of the
    log if the request was for earlier IDs; otherwise -1. `retry_after_ms`: how long the sender
    should wait before it repeats the request; 0 if this is not known.
    """

    code = 79
    requires = ANSWER
    since = 1
    error_code: Int32
    promised: Int64
    message: Text
    first_available: Int64 = field(default=BEFORE_FIRST, metadata={"since": 3, "is_extra": True})
    retry_after_ms: Int32 = field(default=0, metadata={"since": 4, "is_extra": True})


@value(frozen=True, slots=True)
class DamageFound(StorageMessage):
    """A notification to the owner (sequence number 0): more records are unreadable.

    `damaged` contains pairs (first ID, last ID) of all known damage of the replica, as in PREPARED.
    """

    code = 80
    requires = ANSWER
    since = 1
    damaged: PackedInt64s


@value(frozen=True, slots=True)
class ArchiveRange(StorageMessage):
    """Write whole batches of first..last into the archive, starting with the batch at `first`.

    `chain_before` is the hash chain before `first`. `manifest` and `manifest_crc` identify the
    present manifest; `manifest` is empty if nothing is archived. The names of the new files contain
    `attempt`. The storage reports the end with `RangeArchived`.
    """

    code = 83
    requires = require_all(REPLICATE)
    since = 3
    attempt: Int32
    first: Int64
    last: Int64
    chain_before: Raw16
    manifest: Text
    manifest_crc: Crc32


@value(frozen=True, slots=True)
class RangeArchived(StorageMessage):
    """A notification to the owner (sequence number 0): an archive or replacement attempt has ended.

    The new manifest contains all batches up to `last`, where the hash chain is `chain`. `stamp_ms`
    is the commit stamp of the last batch that was written. If `manifest` is empty, nothing has
    changed. Either the attempt failed (with an `error`), or there were not enough records yet, or
    the object had already been replaced.

    The three `unarchived_` fields describe the range that was not archived before the attempt.
    `unarchived_last` is its last ID, or -1 if the log could not be read. `unarchived_bytes` is the
    size of its records. `unarchived_age_ms` is the time since its oldest batch was committed, or -1
    if this time is not known.
    """

    code = 84
    requires = ANSWER
    since = 3
    attempt: Int32
    last: Int64
    chain: Raw16
    stamp_ms: Int64
    manifest: Text
    manifest_crc: Crc32
    error: Text
    unarchived_last: Int64 = BEFORE_FIRST
    unarchived_bytes: Int64 = 0
    unarchived_age_ms: Int64 = -1


@value(frozen=True, slots=True)
class SetArchived(StorageMessage):
    """The archive contains the IDs first..last (rule AR 9).

    Rejected if the log's chain at `last` differs.
    """

    code = 85
    requires = require_all(REPLICATE)
    since = 3
    last: Int64
    chain: Raw16
    first: Int64
    manifest_crc: Crc32
    manifest: Text


@value(frozen=True, slots=True)
class ResetLog(StorageMessage):
    """Delete all records. The empty log then starts after `last`, the end of the archived part.

    The storage rejects the request unless two conditions hold. The log ends before `last`. The log
    is suspect, or has no confirmed low-water mark above `last`.
    """

    code = 86
    requires = require_all(REPLICATE)
    since = 3
    last: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class CollectGarbage(StorageMessage):
    """Delete files of the archive that the recorded manifest does not list, a few per request.

    The manifest ends at `last` with the hash chain `chain`. All attempts of this session with
    numbers below `attempt` have ended (rule AR 16). The storage reports the end with
    `GarbageCollected`.
    """

    code = 87
    requires = require_all(REPLICATE)
    since = 3
    attempt: Int32
    last: Int64
    chain: Raw16
    manifest: Text
    manifest_crc: Crc32


@value(frozen=True, slots=True)
class GarbageCollected(StorageMessage):
    """A notification to the owner (sequence number 0): a garbage collection has ended.

    `has_more`: there is more garbage than one request deletes. If `error` is not empty, the
    collection failed.
    """

    code = 88
    requires = ANSWER
    since = 3
    attempt: Int32
    has_more: Bool
    error: Text


@value(frozen=True, slots=True)
class ExpireObjects(StorageMessage):
    """Expire whole objects: write a manifest with a later first available ID (rule AR 5).

    The recorded manifest ends at `last` with the hash chain `chain`. An object expires if all its
    IDs are below `before`, if all its commit times are before `before_ms`, or if all its
    transactions are older than `retention_ms`. A limit of 0 is not used. The storage reports the
    end with `ObjectsExpired`.
    """

    code = 90
    requires = require_all(REPLICATE)
    since = 3
    attempt: Int32
    last: Int64
    chain: Raw16
    manifest: Text
    manifest_crc: Crc32
    before: Int64
    before_ms: Int64
    retention_ms: Int64


@value(frozen=True, slots=True)
class ObjectsExpired(StorageMessage):
    """A notification to the owner (sequence number 0): an expiry has ended.

    `first` is the first available ID in the new manifest. If `manifest` is empty, nothing has
    changed: either there was no object to expire, or the expiry failed with `error`.
    """

    code = 91
    requires = ANSWER
    since = 3
    attempt: Int32
    first: Int64
    manifest: Text
    manifest_crc: Crc32
    error: Text


@value(frozen=True, slots=True)
class ReplaceObject(StorageMessage):
    """Write first..last as a new object; list it in the manifest instead of `object` (rule AR 5).

    The recorded manifest ends at `archived` with the hash chain `chain`, and lists `object` with
    these IDs. The storage reports the end with `RangeArchived`.
    """

    code = 92
    requires = require_all(REPLICATE)
    since = 3
    attempt: Int32
    first: Int64
    last: Int64
    object: Text
    archived: Int64
    chain: Raw16
    manifest: Text
    manifest_crc: Crc32


@value(frozen=True, slots=True)
class ArchiveProgress(StorageMessage):
    """A notification to the owner (sequence number 0): the archive attempt is still running.

    While a storage works on the archive, it sends this message for each archive request that waits
    or runs at this storage.
    """

    code = 89
    requires = ANSWER
    since = 3
    attempt: Int32


@value(frozen=True, slots=True)
class AuthenticateAtStorage(StorageMessage):
    """Like `Authenticate`, for a storage; `SuccessResponse` answers this message.

    Session, sequence number and partition are -1.
    """

    code = 93
    requires = CREDENTIAL
    since = 4
    token: Raw32 = field(repr=False)
