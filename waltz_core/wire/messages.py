"""Every message of protocols L and S, one table by type code; A is in `admin_messages.py`.

`codec.py` derives the bytes from these declarations alone. docs/design/wire-format.md describes the
exchanges, with tables that `make docs` generates from here.

Rules:
    1. Fields are written in declaration order, big-endian, with the layouts of `FieldKind`.
    2. `since` and `until` are the versions of its protocol in which a message or a field exists. A
       value that an older version cannot express is an error, unless the field is marked
       `is_extra`: it is not sent then, and the peer reads the field's default.
    3. A code is never reused; codes that 0.13 does not have start at 64.
    4. Large byte fields are decoded as views of the frame: keeping one keeps the frame.
    5. A payload that is shorter or longer than its message is a protocol error of the peer.
    6. Each message declares in its own body which permission it requires; `ANSWER` if it is never a
       request. A class without a declaration fails at import: an inherited one does not count.
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
    Declaration,
    Scope,
    all_of,
    by_field,
    one_of,
)
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, LineageEntry, Record, ReqId
from waltz_core.values import value

Buffer: TypeAlias = bytes | memoryview


class FieldKind(Enum):
    """The layout of a field. n is an int32 count; a negative n is null, if null is allowed."""

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
# (data, None) or (None, error text or None)
DataOrError = Annotated[tuple[Buffer | None, str | None], FieldKind.DATA_OR_ERROR]


class WireProtocol(Enum):
    """The protocol of a port: its magic byte, the existing versions, the texts of its hellos.

    The versions that a listener accepts and those that a dialer offers may differ.
    """

    HELLO = ("H", (0,), (0,), "", "")
    # 3 is the first version of 0.13 whose servers can report that a client is ahead.
    CLIENT = ("L", (0, 1, 2, 3, 4, 5, 6, 7, 8), (3, 4, 5, 6, 7, 8), "Waltz Server", "Waltz Client")
    STORAGE = ("S", (1, 2, 3, 4), (1, 2, 3, 4), "Waltz Storage Server", "Waltz Storage Client")
    ADMIN = ("A", (0, 1, 2), (0, 1, 2), "Waltz Storage Admin Server", "Waltz Storage Admin Client")

    def __init__(
        self,
        magic: str,
        taken: tuple[int, ...],
        offered: tuple[int, ...],
        listener_text: str,
        dialler_text: str,
    ) -> None:
        self.magic = ord(magic)
        self.versions_taken = taken
        self.versions_offered = offered
        self.listener_text = listener_text
        self.dialler_text = dialler_text

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that either side supports, ascending."""
        return tuple(sorted({*self.versions_taken, *self.versions_offered}))


class RowOutcomeCode(IntEnum):
    """Why one row of an append is not in the log. COMMITTED is not a rejection."""

    COMMITTED = 0
    LOCK = 1  # final: the conflicting transaction is in the log
    LOST = 2  # the store session broke; the row is not in the log and may be sent again
    AHEAD = 3  # the row's high-water mark is above the log's
    NOT_MOUNTED = 4
    GENERATION = 5
    NO_SPACE = 6
    TOO_LARGE = 7
    OVERLOADED = 8


class RangeForm(IntEnum):
    """The part of each transaction that a range answer contains."""

    WHOLE = 0  # records as in the segment file
    HEADERS = 1  # 28 bytes each: ID, request ID, header


# RANGE_REQUEST: like HEADERS, only those of the request's client ID (protocol L; 2 is LOCATIONS).
OWN_HEADERS = 3
# PREPARED: the storage does not support archiving.
NO_ARCHIVING = -2
# MOUNT_WRITER: the writer has no mark and uses the log's.
LATEST_MARK = -2
# Limits on counts for which a decoder allocates memory, in addition to the frame's size.
TEXT_BYTES_MAX = 64 * 1024
# Entries of one field that become Python objects: locks, texts, lineage, records, pairs.
ENTRIES_MAX = 64 * 1024
# Headers of a filter: the server looks for them in each range, or as long as a mount lasts.
FILTER_HEADERS_MAX = 1_000


@value(frozen=True, slots=True)
class Message:
    """The base of all messages; the class variables are the table's columns."""

    protocol: ClassVar[WireProtocol]
    code: ClassVar[int]
    requires: ClassVar[Declaration]
    since: ClassVar[int] = 0
    until: ClassVar[int | None] = None

    def named_partitions(self) -> Sequence[int]:
        """The partitions of a request, for which its verbs must be granted (`Scope.NAMED`)."""
        found: Sequence[int] | None = getattr(self, "partitions", None)
        if found is None:  # in its prefix, or in its request ID
            found = (getattr(self, "req_id", self).partition_id,)  # type: ignore[union-attr]
        return found

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "code") and "requires" not in vars(cls):  # rule 6
            raise TypeError(
                f"{cls.__name__}: expected a declaration `requires` in the body of the message"
            )


# ---------------------------------------------------------------------------------------------
# H: the first frame of either side


@value(frozen=True, slots=True)
class Hello:
    """The versions of a side. It has no type code: it is the only message of its magic."""

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
    """Start the feed of a partition after the client's mark, on this connection."""

    code = 0
    requires = all_of(READ)
    client_high_water_mark: Int64
    connection_sequence: Int64


class MountState(IntEnum):
    """The result of a mount; `CLIENT_AHEAD`: the client's mark is above the log's."""

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
    """The feed has reached the log's mark, and older appends of this client are final."""

    code = 1
    requires = ANSWER
    since = 3
    state: Int32  # a MountState


@value(frozen=True, slots=True)
class AppendRequest(ClientMessage):
    """Append one transaction."""

    code = 2
    requires = all_of(APPEND)
    client_high_water_mark: Int64
    write_locks: Int32s
    read_locks: Int32s = field(metadata={"since": 1})
    append_locks: Int32s = field(metadata={"since": 2})
    header: Int32
    data: Blob
    data_crc: Crc32


@value(frozen=True, slots=True)
class FeedRequest(ClientMessage):
    """Request the next part of the feed; the request ID is the mount's."""

    code = 3
    requires = all_of(READ)
    client_high_water_mark: Int64


@value(frozen=True, slots=True)
class FeedData(ClientMessage):
    """One committed transaction; the request ID is that of the append which wrote it."""

    code = 4
    requires = ANSWER
    transaction_id: Int64
    header: Int32


@value(frozen=True, slots=True)
class FeedSuspended(ClientMessage):
    """The requested part was sent; send the next feed request."""

    code = 5
    requires = ANSWER


@value(frozen=True, slots=True)
class TransactionDataRequest(ClientMessage):
    """Request one transaction's data."""

    code = 6
    requires = all_of(READ)
    transaction_id: Int64


@value(frozen=True, slots=True)
class TransactionDataResponse(ClientMessage):
    """One transaction's data, or the reason why there is none."""

    code = 7
    requires = ANSWER
    transaction_id: Int64
    result: DataOrError


@value(frozen=True, slots=True)
class FlushRequest(ClientMessage):
    """Answer when every append received before this request is final."""

    code = 8
    requires = one_of(READ, APPEND)


@value(frozen=True, slots=True)
class FlushResponse(ClientMessage):
    """The high-water mark after the flush."""

    code = 9
    requires = ANSWER
    high_water_mark: Int64


@value(frozen=True, slots=True)
class LockFailure(ClientMessage):
    """An append was rejected; the ID is the estimate that exceeded the client's mark."""

    code = 10
    requires = ANSWER
    transaction_id: Int64


@value(frozen=True, slots=True)
class HighWaterMarkRequest(ClientMessage):
    """Request the partition's high-water mark."""

    code = 11
    requires = one_of(READ, APPEND)


@value(frozen=True, slots=True)
class HighWaterMarkResponse(ClientMessage):
    """The last committed transaction that the server knows of."""

    code = 12
    requires = ANSWER
    high_water_mark: Int64


@value(frozen=True, slots=True)
class CheckConnectivityRequest(ClientMessage):
    """Request that the server tries to connect to every assigned storage."""

    code = 13
    requires = all_of(ADMINISTER, scope=Scope.ALL)
    since = 1


@value(frozen=True, slots=True)
class CheckConnectivityResponse(ClientMessage):
    """Which storages ("host:port") answered the server."""

    code = 14
    requires = ANSWER
    since = 1
    reachable: TextBoolMap


@value(frozen=True, slots=True)
class ServerPartitionsRequest(ClientMessage):
    """Request the partitions that the server owns."""

    code = 15
    requires = one_of(*AccessVerb, scope=Scope.ANY)
    since = 2


@value(frozen=True, slots=True)
class ServerPartitionsResponse(ClientMessage):
    """The partitions the server owns."""

    code = 16
    requires = ANSWER
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredRequest(ClientMessage):
    """Make the server the preferred owner of these partitions, as long as its process lives."""

    code = 17
    requires = all_of(ADMINISTER)
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredResponse(ClientMessage):
    """Whether the assignment was rewritten; false for partitions that do not exist."""

    code = 18
    requires = ANSWER
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class RemovePreferredRequest(ClientMessage):
    """End the preference for these partitions."""

    code = 19
    requires = all_of(ADMINISTER)
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class RemovePreferredResponse(ClientMessage):
    """Whether the assignment was rewritten."""

    code = 20
    requires = ANSWER
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class PartitionsHealthRequest(ClientMessage):
    """Request which partitions have an open store session."""

    code = 21
    requires = one_of(*AccessVerb, scope=Scope.ANY)
    since = 4


@value(frozen=True, slots=True)
class PartitionsHealthResponse(ClientMessage):
    """For each partition of the server, whether its store session is open."""

    code = 22
    requires = ANSWER
    since = 4
    healthy: Int32BoolMap


@value(frozen=True, slots=True)
class AppendTimesRequest(ClientMessage):
    """Request the latencies of this server's appends at its storages."""

    code = 85
    requires = all_of(ADMINISTER, scope=Scope.ALL)
    since = 6


@value(frozen=True, slots=True)
class AppendTimesResponse(ClientMessage):
    """Append latency by storage ("host:port"), over the last minute.

    `second_counts`: seconds in which it answered appends. `medians_us`: the median of those
    seconds' mean latencies, in microseconds.
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

    Row i has the sequence number of the request ID plus i, even when earlier rows are rejected.
    The mark applies to every row unless the batch has a mark column.
    """

    code = 64
    requires = all_of(APPEND)
    since = 5
    client_high_water_mark: Int64
    payload: Blob
    payload_crc: Crc32


@value(frozen=True, slots=True)
class AppendResult(ClientMessage):
    """The outcome of every row of an append, sent when all of them are final.

    `transaction_ids` holds -1 for rejected rows, `reasons` one byte each (`RowOutcomeCode`),
    `conflicting` the ID that a LOCK rejection conflicts with (an upper estimate), -1 otherwise.
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

    Its mark may be above the log's, if `Predecessors` has reported the appends in flight up to it
    in the store session `session_id`; -1 for a mark of the log. If a lock rejects it, the answer is
    `Predecessors` where possible, otherwise an `AppendResult`.
    """

    code = 83
    requires = all_of(READ, APPEND)
    since = 6
    session_id: Int64 = -1


@value(frozen=True, slots=True)
class Predecessors(ClientMessage):
    """A lock caused a rejection: these transactions have written its locks since the mark.

    `records` are all those above the request's mark, up to `last`, that have written one of its
    write or read locks, as in the segment file, and `lengths` their lengths. Those above
    `high_water_mark`, the log's, are in flight in the session: they may never be in the log, and
    then no append that depends on them will be.
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
    """Mount a partition for writing. With `wants_feed`, also start its feed after the mark.

    `connection_sequence` fences older connections of the same client id: the highest one wins for
    the whole generation, even after its connection was closed. `high_water_mark` is the client's
    mark or `LATEST_MARK`. `header_values` filters the feed by application header; empty means no
    filter. `proof` is that of the client ID (`ClientIdResponse`).
    """

    code = 66
    requires = by_field("wants_feed", {False: one_of(READ, APPEND), True: all_of(READ)})
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
    """Read committed transactions first..last, at most about `bytes_max` of them.

    `header_values` filters by application header at the server; empty means no filter. With form
    `OWN_HEADERS` (L 8) the answer has only headers of the request's client ID, which must be
    mounted on the same connection, and no lineage.
    """

    code = 68
    requires = by_field(
        "form",
        {
            RangeForm.WHOLE: all_of(READ),
            RangeForm.HEADERS: all_of(READ),
            OWN_HEADERS: all_of(APPEND),
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
    """A part of a range. `next` is the next ID to read: above the requested last ID at the end.

    WHOLE: `lengths` are the records' lengths, `records` the segment file's bytes. HEADERS: no
    `lengths`, `records` are 28 bytes each. `lineage` covers the part; its first and last entries
    may reach beyond it. With a filter the ids in the records have gaps, without one they are dense.
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
    """Committed transactions first..first+count-1 as 20 bytes each: request ID, header.

    In a filtered feed only some of them have headers here: `picked` are their ascending offsets
    from `first`, empty if all have. The others of the part do not pass the filter.

    `chain` is the log's chain at `chain_at` (a batch's last ID, or BEFORE_FIRST and zeros if the
    server does not know one inside the part), by which a client detects a changed history.
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
    """Request the session, the mark and the replicas that readers may use.

    `linearizable`: before the answer, a quorum's heartbeats prove that there is no later session.
    """

    code = 71
    requires = one_of(READ, APPEND)
    since = 5
    linearizable: Bool


@value(frozen=True, slots=True)
class ReplicasResponse(ClientMessage):
    """The open session, its mark, the addresses of the engaged replicas, and what is archived.

    The archive has the IDs `first_available`..`archived`; `manifest` lists its objects.
    `unarchived_bytes` is the approximate size of the committed records after them, -1 if it is not
    known. `archive_interval_ms` is the setting of the server: 0 if it archives nothing.
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
    """The error of a request; the code is that of `errors.py`.

    `first_available`: the first ID of the log, if the error is that it begins there; otherwise -1.
    `retry_after_ms`: the pause before the request may be repeated; 0 if it is not known.
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
    """Remove archived objects from the start of the log, whole ones only.

    They have IDs below `before` only, or commit times before `before_ms`. 0 stands for none.
    Repeat the request until the answer shows that it is done.
    """

    code = 76
    requires = all_of(ADMINISTER)
    since = 7
    before: Int64
    before_ms: Int64


@value(frozen=True, slots=True)
class ExpireResponse(ClientMessage):
    """The first available ID now; `is_done`: the expiry was carried out, as far as possible."""

    code = 77
    requires = ANSWER
    since = 7
    first_available: Int64
    is_done: Bool


@value(frozen=True, slots=True)
class ObjectReplacementRequest(ClientMessage):
    """Replace an object of the archive that is corrupt or missing, from the log of a storage.

    It is listed as `object`, with the IDs first..last. Repeat the request until the answer shows
    that the attempt has ended. `token` is a random number of the attempt: a request with another
    one begins again.
    """

    code = 78
    requires = all_of(ADMINISTER)
    since = 7
    object: Text
    first: Int64
    last: Int64
    token: Int64


@value(frozen=True, slots=True)
class ObjectReplacementResponse(ClientMessage):
    """Whether the work has ended, and whether the object was replaced.

    `storage` has written the new object; it is empty if another request had it replaced before.
    `failures` has the reason of each storage that could not write it. Reported once: a later
    request begins again.
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
    """Take the principal of a token; only as the first message of a connection, over TLS only.

    If the token is not accepted, the server answers with an error and closes the connection.
    """

    code = 87
    requires = CREDENTIAL
    since = 8
    token: Raw32 = field(repr=False)


@value(frozen=True, slots=True)
class Authenticated(ClientMessage):
    """The token is accepted."""

    code = 88
    requires = ANSWER
    since = 8


@value(frozen=True, slots=True)
class ClientIdRequest(ClientMessage):
    """Request a client ID that was never issued before."""

    code = 89
    requires = one_of(READ, APPEND, scope=Scope.ANY)
    since = 8


@value(frozen=True, slots=True)
class ClientIdResponse(ClientMessage):
    """A client ID of the connection's principal, with the proof for its mounts.

    The proof is `NO_PROOF` if the server has no permissions.
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
    """Read or change the record of an exactly-once write; sent again if there is no answer.

    A write belongs to the principal that began it (decision 048, AC 14). `partitions` and `marks`
    are the starting marks of BEGIN, `task` is for ENTER and CHECK, `attempt` for CHECK. With an
    `attempt`, FINISH succeeds only while it is the latest one of `task`. `arguments` is JSON:
    `keep_ms` and `in_series` of BEGIN, `run` of ENTER and TASKS, `summary` and `keep_ms` of FINISH;
    otherwise it is empty.
    """

    code = 91
    requires = by_field(
        "operation",
        {
            RegistryOperation.BEGIN: all_of(READ, APPEND),
            RegistryOperation.READ: all_of(APPEND, scope=Scope.ANY),
            RegistryOperation.ENTER: all_of(APPEND, scope=Scope.ANY),
            RegistryOperation.CHECK: all_of(APPEND, scope=Scope.ANY),
            RegistryOperation.TASKS: all_of(APPEND, scope=Scope.ANY),
            RegistryOperation.FINISH: all_of(APPEND, scope=Scope.ANY),
            RegistryOperation.FORGET: all_of(APPEND, scope=Scope.ANY),
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
    """The operation is done.

    `result` is the node of the write (BEGIN, READ, FINISH; empty if there is none) or of the task
    (ENTER), JSON as in ZooKeeper. For TASKS it is a JSON object: `tasks` has the numbers of all
    tasks, `others` the client IDs of those that another run has begun. `proof` is that of the
    task's client ID (ENTER; `NO_PROOF` if the server has no permissions).
    """

    code = 92
    requires = ANSWER
    since = 8
    result: Blob = b""
    proof: Raw16 = field(default=NO_PROOF, repr=False)


# ---------------------------------------------------------------------------------------------
# S: server and storage. Prefix: type (1), session ID (8), sequence (8), partition ID (4).
# Answers echo session, sequence and partition of their request.


@value(frozen=True, slots=True)
class StorageMessage(Message):
    """A message between a server (or a reader) and a storage."""

    protocol = WireProtocol.STORAGE
    session_id: Int64
    sequence: Int64
    partition_id: Int32


@value(frozen=True, slots=True)
class OpenRequest(StorageMessage):
    """Check that the storage belongs to this cluster. Session, sequence and partition are -1."""

    code = 1
    requires = one_of(READ, REPLICATE, scope=Scope.ANY)
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class SuccessResponse(StorageMessage):
    """The request is done."""

    code = 7
    requires = ANSWER


@value(frozen=True, slots=True)
class Prepare(StorageMessage):
    """Promise the session, end older ones, sync the log, and return the state of the replica.

    `storage_id` is the registered one, or 16 zeros if none is registered yet.
    """

    code = 64
    requires = all_of(REPLICATE)
    since = 1
    nonce: Raw16
    storage_id: Raw16
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class Prepared(StorageMessage):
    """The replica's state on disk, read after the fence and a sync.

    `damaged` holds pairs first, last of ids whose records cannot be read. `engaged_session`:
    the last one that was opened with the replica in it, so that ZooKeeper has known of it; or -1,
    also from a storage that does not report it (S 1). `start` is the end of the batch before the
    log's first record, with the chain there; -2 from a storage without archiving (S 2).
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
    """The request is done: the last ID on disk and the chain there. Answers 67, 68, 69 and 75."""

    code = 66
    requires = ANSWER
    since = 1
    synced_max: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class SetLowWaterMark(StorageMessage):
    """Make the session and the mark durable; rejected unless the log ends exactly at the mark."""

    code = 67
    requires = all_of(REPLICATE)
    since = 1
    mark: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class Truncate(StorageMessage):
    """Truncate the log after `last_to_keep`.

    `base` is the last batch end at or below it that the owner knows, `base_chain` the chain there;
    rejected if the replica's chain at `base` differs, or below the confirmed low-water mark.
    """

    code = 68
    requires = all_of(REPLICATE)
    since = 1
    last_to_keep: Int64
    base: Int64
    base_chain: Raw16


@value(frozen=True, slots=True)
class Engage(StorageMessage):
    """Confirm the mark: ZooKeeper lists the replica as engaged in this session."""

    code = 69
    requires = all_of(REPLICATE)
    since = 1
    mark: Int64


@value(frozen=True, slots=True)
class AppendRaw(StorageMessage):
    """Append records as they will be on disk, one or more whole batches (`lineage`).

    `locks` is the batch's lock block (`lock_blocks.py`), which the storage keeps for the next
    owner; empty if the sender does not know the locks.
    """

    code = 70
    requires = all_of(REPLICATE)
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
    """Everything up to this ID is on disk, synced."""

    code = 71
    requires = ANSWER
    since = 1
    synced_max: Int64


@value(frozen=True, slots=True)
class RangeRaw(StorageMessage):
    """Read records first..last, at most about `bytes_max` (one batch or record at least).

    `reader`: the sender is not an owner; answered only while this storage is engaged in the session
    of the prefix, and only up to what it has synced. `whole_batches`: first is a batch's first ID,
    and the answer ends at a batch's last one (repair, catch-up).
    """

    code = 72
    requires = by_field("reader", {False: all_of(REPLICATE), True: one_of(READ, REPLICATE)})
    since = 1
    first: Int64
    last: Int64
    bytes_max: Int32
    form: Int8
    whole_batches: Bool
    reader: Bool


@value(frozen=True, slots=True)
class RangeBytes(StorageMessage):
    """Records first..first+count-1; `chain_before` is meaningful for whole batches only.

    `ticket`: with record locations, what the storage requires before it passes an open file to this
    reader (`record_locations.py`); empty without access control.
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
    """Request the batches that cover first..last."""

    code = 74
    requires = all_of(REPLICATE)
    since = 1
    first: Int64
    last: Int64


@value(frozen=True, slots=True)
class Repair(StorageMessage):
    """Replace a damaged range below the mark by another replica's records."""

    code = 75
    requires = all_of(REPLICATE)
    since = 1
    first: Int64
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32


@value(frozen=True, slots=True)
class LineageResponse(StorageMessage):
    """The requested batches in order (if not all fit, the newest), and the chain before them."""

    code = 76
    requires = ANSWER
    since = 1
    chain_before: Raw16
    lineage: Lineage


@value(frozen=True, slots=True)
class Heartbeat(StorageMessage):
    """Request a confirmation that the storage has promised no later session."""

    code = 77
    requires = all_of(REPLICATE)
    since = 1


@value(frozen=True, slots=True)
class HeartbeatResponse(StorageMessage):
    """The storage has promised no later session."""

    code = 78
    requires = ANSWER
    since = 1


@value(frozen=True, slots=True)
class LockBlocksRequest(StorageMessage):
    """Request the newest lock blocks, as a reader: this storage must be engaged."""

    code = 81
    requires = all_of(REPLICATE)
    since = 1
    bytes_max: Int32


@value(frozen=True, slots=True)
class LockBlocks(StorageMessage):
    """The newest bytes of the lock files, unchecked: the receiver compares them with the log."""

    code = 82
    requires = ANSWER
    since = 1
    blocks: Blob


@value(frozen=True, slots=True)
class Nack(StorageMessage):
    """An error: a code of `errors.py`; `promised` is the session that the replica has promised.

    `first_available`: the first ID of the log, if the error is that it begins there; otherwise -1.
    `retry_after_ms`: the pause before the request may be repeated; 0 if it is not known.
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
    """A notification to the owner (sequence 0): more records cannot be read.

    `damaged` holds pairs first, last, of all damage that is known now, like PREPARED.
    """

    code = 80
    requires = ANSWER
    since = 1
    damaged: PackedInt64s


@value(frozen=True, slots=True)
class ArchiveRange(StorageMessage):
    """Write whole batches of first..last, from the first one on, into the archive.

    `chain_before` is the chain before `first`; `manifest` with its CRC is the present one, empty if
    nothing is archived. `attempt` is a part of the new files' names. `RangeArchived` follows.
    """

    code = 83
    requires = all_of(REPLICATE)
    since = 3
    attempt: Int32
    first: Int64
    last: Int64
    chain_before: Raw16
    manifest: Text
    manifest_crc: Crc32


@value(frozen=True, slots=True)
class RangeArchived(StorageMessage):
    """A notification to the owner (sequence 0): the end of an attempt to archive or to replace.

    The new manifest has all batches up to `last`, where the chain is `chain`. The last one that was
    written has the commit stamp `stamp_ms`. If `manifest` is empty, nothing has changed: there is
    not enough yet, the object was replaced before or, with an `error`, the attempt failed. Before
    the attempt, the range up to `unarchived_last` had `unarchived_bytes` of records, and its oldest
    batch was committed `unarchived_age_ms` ago (-1: not known); `unarchived_last` is -1 if the log
    could not be read.
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
    """The archive has the IDs first..last (rule AR 9); rejected if the log has another chain."""

    code = 85
    requires = all_of(REPLICATE)
    since = 3
    last: Int64
    chain: Raw16
    first: Int64
    manifest_crc: Crc32
    manifest: Text


@value(frozen=True, slots=True)
class ResetLog(StorageMessage):
    """Drop all records: the empty log then starts after `last`, which the archive has.

    Rejected unless the log ends before `last`, and is suspect or has no confirmed mark above it.
    """

    code = 86
    requires = all_of(REPLICATE)
    since = 3
    last: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class CollectGarbage(StorageMessage):
    """Delete files of the archive that the recorded manifest does not list, a few at a time.

    The manifest ends at `last` with this chain. All attempts of this session below `attempt` have
    ended (rule AR 16). `GarbageCollected` follows.
    """

    code = 87
    requires = all_of(REPLICATE)
    since = 3
    attempt: Int32
    last: Int64
    chain: Raw16
    manifest: Text
    manifest_crc: Crc32


@value(frozen=True, slots=True)
class GarbageCollected(StorageMessage):
    """A notification to the owner (sequence 0): the end of a collection.

    `has_more`: there is more garbage than one request deletes. With an `error` it has failed.
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

    The recorded manifest ends at `last` with this chain. An object expires if its IDs are below
    `before`, or its commit times before `before_ms` or older than `retention_ms`; 0 stands for
    none. `ObjectsExpired` follows.
    """

    code = 90
    requires = all_of(REPLICATE)
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
    """A notification to the owner (sequence 0): the end of an expiry.

    `first` is the first available ID of the new manifest. If `manifest` is empty, nothing has
    changed: nothing expires or, with an `error`, the expiry failed.
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
    """Write first..last as a new object; a manifest lists it instead of `object` (rule AR 5).

    The recorded manifest ends at `archived` with `chain`, and lists `object` with these IDs.
    `RangeArchived` follows.
    """

    code = 92
    requires = all_of(REPLICATE)
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
    """A notification to the owner (sequence 0): the archive attempt is still running.

    A storage sends it for requests that wait or run, while its work on the archive continues.
    """

    code = 89
    requires = ANSWER
    since = 3
    attempt: Int32


@value(frozen=True, slots=True)
class AuthenticateAtStorage(StorageMessage):
    """Like `Authenticate`; session, sequence and partition are -1. `SuccessResponse` answers it."""

    code = 93
    requires = CREDENTIAL
    since = 4
    token: Raw32 = field(repr=False)
