"""Every message of L and S, one table by type code; A is in `admin_messages.py`.

What two programs of different ages say to each other must be readable in one place. `codec.py`
derives the bytes from the declarations here and adds nothing. docs/design/wire-format.md has the
conversations that they belong to, and tables of these declarations, which `make docs` writes.

Rules:
    1. Fields are written in declaration order, big-endian, with the layouts of `FieldKind`.
    2. `since` and `until` say in which versions of its surface a message or a field exists. What a
       peer of an older version cannot be told is refused here, unless it is marked `is_extra`: the
       peer does without it, and who reads the older version has the field's default.
    3. A code is never reused; our own codes start at 64.
    4. Large byte fields are decoded as views of the frame: whoever keeps one keeps the frame.
    5. A payload that is shorter or longer than its message is an error of the peer.
"""

from dataclasses import field
from enum import Enum, IntEnum
from typing import Annotated, ClassVar, TypeAlias

from waltz_core.records.record import NO_SESSION, LineageEntry, Record, ReqId
from waltz_core.values import value

Buffer: TypeAlias = bytes | memoryview


class FieldKind(Enum):
    """How a field is laid out. n is an int32 count; a negative n is null where null is allowed."""

    BOOL = "one byte, 1 is true"
    INT8 = "one signed byte"
    INT32 = "4 bytes"
    INT64 = "8 bytes"
    CRC32 = "4 bytes, unsigned: a CRC-32 as `checksum.py` returns it"
    RAW16 = "16 bytes as they are: a UUID, a nonce, a chain"
    REQ_ID = "16 bytes: client id, generation, partition id, sequence"
    BLOB = "n, then n bytes; never null"
    TEXT = "n, then n bytes of UTF-8; never null"
    TEXT_OR_NULL = "n, then n bytes of UTF-8; null allowed"
    INT32S = "n, then n int32; as a tuple"
    PACKED_INT32S = "n, then n int32; kept as 4 n big-endian bytes"
    PACKED_INT64S = "n, then n int64; kept as 8 n big-endian bytes"
    TEXTS = "n, then n texts"
    LINEAGE = "n, then n entries of 48 bytes: first, last, session, stamp (int64 each), chain (16)"
    RECORDS = "n, then n records: id, request id, header, data, crc of data"
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


class Surface(Enum):
    """A port's language: its magic byte, the versions that exist, the texts of its hellos.

    Which of the versions a listener of ours takes, and a dialler of ours offers, may differ.
    """

    HELLO = ("H", (0,), (0,), "", "")
    # Of the original's versions 3 is the first whose servers can say that a client is ahead.
    CLIENT = ("L", (0, 1, 2, 3, 4, 5, 6), (3, 4, 5, 6), "Waltz Server", "Waltz Client")
    STORAGE = ("S", (1, 2), (1, 2), "Waltz Storage Server", "Waltz Storage Client")
    ADMIN = ("A", (0, 1), (0, 1), "Waltz Storage Admin Server", "Waltz Storage Admin Client")

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
        """All versions that one side or the other of ours can speak, rising."""
        return tuple(sorted({*self.versions_taken, *self.versions_offered}))


class Reason(IntEnum):
    """Why one row of an append is not in the log. COMMITTED is no refusal."""

    COMMITTED = 0
    LOCK = 1  # final: the conflicting transaction is in the log
    LOST = 2  # the store session broke; the row is not in the log and may be sent again
    AHEAD = 3  # the row's high-water mark lies above the log's
    NOT_MOUNTED = 4
    GENERATION = 5
    NO_SPACE = 6
    TOO_LARGE = 7
    OVERLOADED = 8


class RangeForm(IntEnum):
    """What a range answer carries of each transaction."""

    WHOLE = 0  # records as they lie in the segment file
    HEADERS = 1  # 28 bytes each: id, request id, header


# MOUNT_WRITER: the writer has no mark of its own and takes the log's.
LATEST_MARK = -2
# Limits on counts that a decoder allocates for, beside the frame's own size.
TEXT_BYTES_MAX = 64 * 1024
# Entries of one field that become Python objects: locks, texts, lineage, records, pairs.
ENTRIES_MAX = 64 * 1024


@value(frozen=True, slots=True)
class Message:
    """The base of all messages; the class variables are the table's columns."""

    surface: ClassVar[Surface]
    code: ClassVar[int]
    since: ClassVar[int] = 0
    until: ClassVar[int | None] = None


# ---------------------------------------------------------------------------------------------
# H: the first frame of either side


@value(frozen=True, slots=True)
class Hello:
    """Which versions a side can speak. Not typed by a code: it is the only message of its magic."""

    versions: tuple[int, ...]
    text: str


# ---------------------------------------------------------------------------------------------
# L: client and server. Prefix: type (1 byte), request id (16)


@value(frozen=True, slots=True)
class ClientMessage(Message):
    """A message between a client and a server."""

    surface = Surface.CLIENT
    req_id: Req


@value(frozen=True, slots=True)
class MountRequest(ClientMessage):
    """Start the feed of a partition after the client's mark, on this connection."""

    code = 0
    client_high_water_mark: Int64
    connection_sequence: Int64


class MountState(IntEnum):
    """What the answer to a mount says; `CLIENT_AHEAD`: its mark is above the log's."""

    READY = 0
    NOT_READY = 1
    CLIENT_AHEAD = 2


@value(frozen=True, slots=True)
class MountOutcome(ClientMessage):
    """As `MountResponse`, before that could say why not."""

    code = 1
    until: ClassVar[int | None] = 2
    is_ready: Bool


@value(frozen=True, slots=True)
class MountResponse(ClientMessage):
    """The feed has reached the log's mark and nothing older of this client is in flight."""

    code = 1
    since = 3
    state: Int32  # a MountState


@value(frozen=True, slots=True)
class AppendRequest(ClientMessage):
    """Append one transaction."""

    code = 2
    client_high_water_mark: Int64
    write_locks: Int32s
    read_locks: Int32s = field(metadata={"since": 1})
    append_locks: Int32s = field(metadata={"since": 2})
    header: Int32
    data: Blob
    data_crc: Crc32


@value(frozen=True, slots=True)
class FeedRequest(ClientMessage):
    """Grant the server another stretch of the feed; the request id is the mount's."""

    code = 3
    client_high_water_mark: Int64


@value(frozen=True, slots=True)
class FeedData(ClientMessage):
    """One committed transaction; the request id is that of the append which wrote it."""

    code = 4
    transaction_id: Int64
    header: Int32


@value(frozen=True, slots=True)
class FeedSuspended(ClientMessage):
    """The granted stretch is used up; send the next feed request."""

    code = 5


@value(frozen=True, slots=True)
class TransactionDataRequest(ClientMessage):
    """Fetch one transaction's data."""

    code = 6
    transaction_id: Int64


@value(frozen=True, slots=True)
class TransactionDataResponse(ClientMessage):
    """One transaction's data, or why there is none."""

    code = 7
    transaction_id: Int64
    result: DataOrError


@value(frozen=True, slots=True)
class FlushRequest(ClientMessage):
    """Answer when every append received before this request is final."""

    code = 8


@value(frozen=True, slots=True)
class FlushResponse(ClientMessage):
    """The high-water mark after the flush."""

    code = 9
    high_water_mark: Int64


@value(frozen=True, slots=True)
class LockFailure(ClientMessage):
    """An append was refused; the id is the estimate that exceeded the client's mark."""

    code = 10
    transaction_id: Int64


@value(frozen=True, slots=True)
class HighWaterMarkRequest(ClientMessage):
    """Ask for the partition's high-water mark."""

    code = 11


@value(frozen=True, slots=True)
class HighWaterMarkResponse(ClientMessage):
    """The last committed transaction that the server knows of."""

    code = 12
    high_water_mark: Int64


@value(frozen=True, slots=True)
class CheckConnectivityRequest(ClientMessage):
    """Ask the server to try every storage of the assignment."""

    code = 13
    since = 1


@value(frozen=True, slots=True)
class CheckConnectivityResponse(ClientMessage):
    """Which storages ("host:port") answered the server."""

    code = 14
    since = 1
    reachable: TextBoolMap


@value(frozen=True, slots=True)
class ServerPartitionsRequest(ClientMessage):
    """Ask which partitions the server owns."""

    code = 15
    since = 2


@value(frozen=True, slots=True)
class ServerPartitionsResponse(ClientMessage):
    """The partitions the server owns."""

    code = 16
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredRequest(ClientMessage):
    """Have the server own these partitions before all others, as long as its process lives."""

    code = 17
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class AddPreferredResponse(ClientMessage):
    """Whether the assignment has been made anew; false for partitions that there are not."""

    code = 18
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class RemovePreferredRequest(ClientMessage):
    """Let these partitions go where any other goes."""

    code = 19
    since = 2
    partitions: Int32s


@value(frozen=True, slots=True)
class RemovePreferredResponse(ClientMessage):
    """As with adding them."""

    code = 20
    since = 2
    is_done: Bool


@value(frozen=True, slots=True)
class PartitionsHealthRequest(ClientMessage):
    """Ask which partitions have a usable store session."""

    code = 21
    since = 4


@value(frozen=True, slots=True)
class PartitionsHealthResponse(ClientMessage):
    """Partition id to whether its store session is open."""

    code = 22
    since = 4
    healthy: Int32BoolMap


@value(frozen=True, slots=True)
class AppendTimesRequest(ClientMessage):
    """Request the latencies of this server's appends at its storages."""

    code = 85
    since = 6


@value(frozen=True, slots=True)
class AppendTimesResponse(ClientMessage):
    """Append latency by storage ("host:port"), over the last minute.

    `second_counts`: seconds in which it answered appends. `medians_us`: the median of those
    seconds' mean latencies, in microseconds.
    """

    code = 86
    since = 6
    storages: Texts
    second_counts: Int32s
    medians_us: Int32s


@value(frozen=True, slots=True)
class AppendBatch(ClientMessage):
    """Append many transactions: one Arrow IPC record batch (`batches.APPEND_SCHEMA`).

    Row i has the sequence number of the request id plus i, also when earlier rows are refused.
    The mark holds for every row unless the batch has a mark column.
    """

    code = 64
    since = 5
    client_high_water_mark: Int64
    payload: Blob
    payload_crc: Crc32


@value(frozen=True, slots=True)
class AppendResult(ClientMessage):
    """The outcome of every row of an append, sent when all of them are final.

    `transaction_ids` holds -1 for refused rows, `reasons` one byte each (`Reason`), `conflicting`
    the id that a LOCK refusal conflicts with (an estimate from above), -1 otherwise.
    """

    code = 65
    since = 5
    high_water_mark: Int64
    transaction_ids: PackedInt64s
    reasons: Blob
    conflicting: PackedInt64s


@value(frozen=True, slots=True)
class AppendFollowing(AppendRequest):
    """Append one transaction whose author wants to follow what is in flight.

    Its mark may lie above the log's, if what is in flight up to there was told in the store session
    `session_id` by `Predecessors`; -1 for a mark of the log. Refused for a lock it is answered by
    `Predecessors` where that can be, otherwise by an `AppendResult` like any other.
    """

    code = 83
    since = 6
    session_id: Int64 = -1


@value(frozen=True, slots=True)
class Predecessors(ClientMessage):
    """A transaction was refused for a lock; what its author has not seen of its locks is here.

    `records` are all those above the request's mark, up to `last`, that have written one of its
    write or read locks, as they lie in the segment file, and `lengths` their lengths. Those above
    `high_water_mark`, the log's, are in flight in the session: they may never be in the log, and
    then nothing that follows them will be.
    """

    code = 84
    since = 6
    session_id: Int64
    high_water_mark: Int64
    last: Int64
    lengths: PackedInt32s
    records: Blob


@value(frozen=True, slots=True)
class MountWriter(ClientMessage):
    """Mount a partition for writing (and, if wanted, its feed from the mark on).

    `connection_sequence` fences older connections of the same client id: the highest one wins for
    the whole generation, after its connection has closed too. `high_water_mark` is the client's
    mark or `LATEST_MARK`. `header_values` filters the feed by application header; empty means no
    filter.
    """

    code = 66
    since = 5
    connection_sequence: Int64
    high_water_mark: Int64
    wants_feed: Bool
    header_values: Int32s = ()


@value(frozen=True, slots=True)
class Mounted(ClientMessage):
    """The partition takes this connection's appends; everything older of the client is final."""

    code = 67
    since = 5
    session_id: Int64
    high_water_mark: Int64
    batch_rows_max: Int32
    batch_bytes_max: Int32
    in_flight_bytes_max: Int64


@value(frozen=True, slots=True)
class RangeRequest(ClientMessage):
    """Read committed transactions first..last, at most about `bytes_max` of them.

    `header_values` filters by application header at the server; empty means no filter.
    """

    code = 68
    since = 5
    first: Int64
    last: Int64
    bytes_max: Int32
    form: Int8
    header_values: Int32s


@value(frozen=True, slots=True)
class RangeData(ClientMessage):
    """A stretch of a range. `next` is where to go on: past the asked last id when it is done.

    WHOLE: `lengths` are the records' lengths, `records` the segment file's bytes. HEADERS: no
    `lengths`, `records` are 28 bytes each. `lineage` covers the stretch; its first and last entries
    may reach beyond it. With a filter the ids in the records have gaps, without one they are dense.
    """

    code = 69
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
    """Committed transactions first..first+count-1 as 20 bytes each: request id, header.

    In a filtered feed only some of them have headers here, and `picked` says which, as rising
    offsets from `first`; it is empty where all of them have. The stretch is covered all the same:
    what has none does not pass the filter.

    `chain` is the log's chain at `chain_at` (a batch's last id, or BEFORE_FIRST and zeros when the
    server does not know one inside the stretch), so that a client can tell a changed history.
    """

    code = 70
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
    """Ask for the session, the mark and the replicas that readers may use.

    `linearizable`: prove by a quorum's heartbeat that no later session exists before answering.
    """

    code = 71
    since = 5
    linearizable: Bool


@value(frozen=True, slots=True)
class ReplicasResponse(ClientMessage):
    """The open session, its mark, and the addresses of the engaged replicas."""

    code = 72
    since = 5
    session_id: Int64
    high_water_mark: Int64
    replicas: Texts
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class ErrorResponse(ClientMessage):
    """Why a request got no other answer; the code is that of `errors.py`."""

    code = 73
    since = 5
    error_code: Int32
    retriable: Bool
    message: Text


# ---------------------------------------------------------------------------------------------
# S: server and storage. Prefix: type (1), session id (8), sequence (8), partition id (4).
# Answers echo session, sequence and partition of their request.


@value(frozen=True, slots=True)
class StorageMessage(Message):
    """A message between a server (or a reader) and a storage."""

    surface = Surface.STORAGE
    session_id: Int64
    sequence: Int64
    partition_id: Int32


@value(frozen=True, slots=True)
class OpenRequest(StorageMessage):
    """Check that the storage is of this cluster. Session, sequence and partition are -1."""

    code = 1
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class SuccessResponse(StorageMessage):
    """Done, with nothing to tell."""

    code = 7


@value(frozen=True, slots=True)
class Prepare(StorageMessage):
    """Fence: promise the session, end older ones, sync the log, then answer with its state.

    `storage_id` is the registered one, or 16 zeros when none is registered yet.
    """

    code = 64
    since = 1
    nonce: Raw16
    storage_id: Raw16
    cluster_key: Raw16
    partition_count: Int32


@value(frozen=True, slots=True)
class Prepared(StorageMessage):
    """What the replica has on disk, read after the fence and a sync.

    `damaged` holds pairs first, last of ids whose records cannot be read. `engaged_session`:
    the last one that had opened with the replica in it, so that ZooKeeper has known of it; or -1,
    also from a storage that does not tell it (S 1).
    """

    code = 65
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


@value(frozen=True, slots=True)
class ReplicaEnd(StorageMessage):
    """Done; the last id on disk and the chain there. Answers 67, 68, 69 and 75."""

    code = 66
    since = 1
    synced_max: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class SetLowWaterMark(StorageMessage):
    """Make the session and the mark durable; refused unless the log ends exactly at the mark."""

    code = 67
    since = 1
    mark: Int64
    chain: Raw16


@value(frozen=True, slots=True)
class Truncate(StorageMessage):
    """Cut everything after `last_to_keep`.

    `base` is the last batch end at or below it that the owner knows, `base_chain` the chain there;
    refused when the replica's chain at `base` differs, or below the confirmed low-water mark.
    """

    code = 68
    since = 1
    last_to_keep: Int64
    base: Int64
    base_chain: Raw16


@value(frozen=True, slots=True)
class Engage(StorageMessage):
    """ZooKeeper has the replica as engaged in this session: the mark is confirmed."""

    code = 69
    since = 1
    mark: Int64


@value(frozen=True, slots=True)
class AppendRaw(StorageMessage):
    """Append records as they will lie on disk, one or more whole batches (`lineage`).

    `locks` is the batch's lock block (`lock_blocks.py`), which the storage keeps for the next
    owner; empty where the sender does not know the locks.
    """

    code = 70
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
    """Everything up to this id is on disk, synced."""

    code = 71
    since = 1
    synced_max: Int64


@value(frozen=True, slots=True)
class RangeRaw(StorageMessage):
    """Read records first..last, at most about `bytes_max` (one batch or record at least).

    `reader`: the asker is no owner; answered only while this storage is engaged in the session of
    the prefix, and only up to what it has synced. `whole_batches`: first is a batch's first id,
    and the answer ends at a batch's last one (repair, catch-up).
    """

    code = 72
    since = 1
    first: Int64
    last: Int64
    bytes_max: Int32
    form: Int8
    whole_batches: Bool
    reader: Bool


@value(frozen=True, slots=True)
class RangeBytes(StorageMessage):
    """Records first..first+count-1; `chain_before` is meaningful for whole batches only."""

    code = 73
    since = 1
    first: Int64
    count: Int32
    form: Int8
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32
    chain_before: Raw16
    lineage: Lineage


@value(frozen=True, slots=True)
class LineageRequest(StorageMessage):
    """Ask for the batches that cover first..last."""

    code = 74
    since = 1
    first: Int64
    last: Int64


@value(frozen=True, slots=True)
class Repair(StorageMessage):
    """Fill a damaged range below the mark with the usher's records."""

    code = 75
    since = 1
    first: Int64
    lengths: PackedInt32s
    records: Blob
    records_crc: Crc32


@value(frozen=True, slots=True)
class LineageResponse(StorageMessage):
    """Batches in order, and the chain before the first of them (newest ones when cut short)."""

    code = 76
    since = 1
    chain_before: Raw16
    lineage: Lineage


@value(frozen=True, slots=True)
class Heartbeat(StorageMessage):
    """Ask whether the storage still knows no later session."""

    code = 77
    since = 1


@value(frozen=True, slots=True)
class HeartbeatAnswer(StorageMessage):
    """No later session was promised here."""

    code = 78
    since = 1


@value(frozen=True, slots=True)
class LockBlocksRequest(StorageMessage):
    """Ask for the newest lock blocks, as a reader does: this storage must be engaged."""

    code = 81
    since = 1
    bytes_max: Int32


@value(frozen=True, slots=True)
class LockBlocks(StorageMessage):
    """The newest bytes of the lock files, as they are: the log has to prove what they say."""

    code = 82
    since = 1
    blocks: Blob


@value(frozen=True, slots=True)
class Nack(StorageMessage):
    """Refused: the code is that of `errors.py`, `promised` the session the storage is bound to."""

    code = 79
    since = 1
    error_code: Int32
    promised: Int64
    message: Text


@value(frozen=True, slots=True)
class DamageFound(StorageMessage):
    """Told to the owner unasked (sequence 0): there are records that cannot be read, new ones too.

    `damaged` holds pairs first, last, of everything that is known now, as in PREPARED.
    """

    code = 80
    since = 1
    damaged: PackedInt64s
