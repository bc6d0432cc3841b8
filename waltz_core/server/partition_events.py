"""The events, the effects and the limits of a served partition.

The state machine of a partition, its host and the server process communicate only with these events
and effects, and with the events of `replication/session_events.py`.

Rules:
    1. Every request ends with exactly one final `SendToClient`, unless its connection closes first.
       The `cost_bytes` of this effect is the size of the request. Earlier messages for the request,
       such as parts of a feed, have `cost_bytes` 0.
    2. No request is dropped. If there is no other answer to a request, the answer is an
       `ErrorResponse`.
    3. `Fetch` has one outcome with the same token: `FetchAnswered` or `FetchFailed`.
    4. `ConnectionDrained` follows every `ConnectionCongested`, and may come without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, NewType, Protocol, TypeAlias

from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BeforeLogStart, Overloaded, Unreachable, WaltzError
from waltz_core.machine import Wakeup
from waltz_core.records.raw_records import FEED_HEADER_BYTES
from waltz_core.records.record import (
    BEFORE_FIRST,
    FRAME_BYTES_MAX,
    GENESIS_CHAIN,
    TRANSACTION_BYTES_MAX,
    Chain,
    PartitionId,
    ReplicaId,
    ReqId,
    TransactionId,
)
from waltz_core.replication import session_events as replication
from waltz_core.values import value
from waltz_core.wire.messages import (
    Buffer,
    ClientMessage,
    ErrorResponse,
    LockBlocks,
    LockBlocksRequest,
    RangeBytes,
    RangeRaw,
)

# Identifies one accepted connection of this process; never reused.
ConnectionId = NewType("ConnectionId", int)

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """The limits of a partition. All must be positive, except those for which 0 has a meaning.

    - `high_water_mark_staleness_ms_max`: maximum age of a proof (a confirmation of the session by a
      quorum). If the last proof is older, the server reports a high-water mark only after a new
      proof.
    - `session_wait_ms_max`: how long a request other than an append waits for a store session
      before it is rejected.
    - `remembered_clients_max`: number of disconnected clients whose highest connection sequence is
      kept.
    - `checkpoint_interval_count`: number of transactions after which a new session starts, to raise
      the low-water marks. The session starts earlier if the store reports that a checkpoint is due,
      and later while an archive attempt is running. `checkpoint_interval_ms` is the minimum age of
      the old session.
    - `lock_load_count_max`: number of transactions whose locks a new owner requests; 0 for none.
    - `lock_tail_bytes_max`: size limit of a storage's answer to a request for locks.
    - `archive_interval_ms`: the interval of archive attempts, for the doctor; 0 if nothing is
      archived.
    """

    lock_slot_count: int
    queue_bytes_max: int = 32 * MIB
    in_flight_bytes_max: int = 4 * MIB
    in_flight_batches_max: int = 64
    batch_rows_max: int = 16_384
    batch_bytes_max: int = 8 * MIB
    connection_bytes_max: int = 16 * MIB
    slice_bytes_max: int = 1 * MIB
    slice_rows_max: int = 8_192
    feed_frame_count_max: int = 4_096
    feed_request_count_min: int = 10_000
    range_bytes_max: int = 4 * MIB
    concurrent_fetches_max: int = 8
    remembered_clients_max: int = 262_144
    high_water_mark_staleness_ms_max: int = 2_000
    session_wait_ms_max: int = 5_000
    checkpoint_interval_count: int = 250_000
    checkpoint_interval_ms: int = 10_000
    lock_load_count_max: int = 1_000_000
    lock_tail_bytes_max: int = 8 * MIB
    archive_interval_ms: int = 0

    def __post_init__(self) -> None:
        may_be_zero = ("lock_load_count_max", "archive_interval_ms")
        for name in (limit.name for limit in fields(self)):
            assert getattr(self, name) >= (0 if name in may_be_zero else 1), name
        # A single transaction of the maximum size must fit everywhere.
        assert TRANSACTION_BYTES_MAX < self.batch_bytes_max < FRAME_BYTES_MAX
        assert self.range_bytes_max <= FRAME_BYTES_MAX // 2


class Store(Protocol):
    """The interface of `replication.partition_store.PartitionStore` that the partition uses."""

    @property
    def wake_at_ms(self) -> int | None:
        """When the partition must send the next `Wakeup` to the store."""

    @property
    def readable_replicas(self) -> Sequence[ReplicaId]:
        """The replicas that readers may query in the open session."""

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark of the partition, as ZooKeeper records it."""

    @property
    def is_archiving(self) -> bool:
        """Whether an archive attempt is running; its work is lost if the session ends now."""

    @property
    def archive_backlog(self) -> replication.ArchiveBacklog | None:
        """The backlog of unarchived transactions; None if unknown, or without an archive."""

    def is_expiry_done(self, before: TransactionId, before_ms: int) -> bool:
        """Whether an `ExpireArchive` with these limits was carried out on the whole archive."""

    def replacement_outcome(
        self, request: replication.ReplaceArchivedObject
    ) -> replication.ReplacementOutcome | None:
        """Return the outcome of an object replacement; None while it is in progress."""

    def step(self, event: replication.Event, now_ms: int) -> Sequence[replication.Effect]:
        """Process one event and return its effects."""


@value(frozen=True, slots=True)
class PartitionIdentity:
    """A partition, and the cluster to which it belongs."""

    partition_id: PartitionId
    partition_count: int
    cluster_key: bytes


# ---------------------------------------------------------------------------------------------
# Events


@value(frozen=True, slots=True)
class RequestReceived:
    """A client's request for this partition has arrived; it uses `cost_bytes` of memory.

    `wall_ms` is the wall clock time for the commit stamp; no decision depends on it.
    `principal`: the principal to which a mount binds its client ID (`mounts.py`, rule 7); empty for
    other requests. `over_limit`: if the principal of an append is over a limit, the error with
    which the append must be rejected.
    """

    connection: ConnectionId
    message: ClientMessage
    cost_bytes: int
    wall_ms: int
    principal: str = ""
    over_limit: Overloaded | None = None


@value(frozen=True, slots=True)
class ConnectionClosed:
    """A connection was closed: drop its requests that were not submitted yet."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class ConnectionCongested:
    """A connection accepts no more frames for now, because its client reads too slowly."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class ConnectionDrained:
    """A congested connection accepts frames again."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class FetchAnswered:
    """A storage has answered a fetch."""

    token: int
    message: RangeBytes | LockBlocks


@value(frozen=True, slots=True)
class FetchFailed:
    """A fetch has failed at one storage; another storage may still answer it.

    `first_available`: the first ID of the log, or -1 if it is not known. If the fetch begins below
    this ID, no storage can answer it. `damage_code`: the code of the error if this storage's copies
    of the records are damaged, on its disk and in the archive; otherwise 0.
    """

    token: int
    reason: str
    first_available: TransactionId = BEFORE_FIRST
    damage_code: int = 0


Event: TypeAlias = (
    RequestReceived
    | ConnectionClosed
    | ConnectionCongested
    | ConnectionDrained
    | FetchAnswered
    | FetchFailed
    | Wakeup
    | replication.TakeOwnership
    | replication.ReassignReplicas
    | replication.ReleaseOwnership
    | replication.Checkpoint
    | replication.MetadataRead
    | replication.MetadataWritten
    | replication.MetadataConflict
    | replication.MetadataOutcomeUnknown
    | replication.ReplicaOpened
    | replication.ReplicaLost
    | replication.ReplicaResponded
)

# ---------------------------------------------------------------------------------------------
# Effects


@value(frozen=True, slots=True)
class SendToClient:
    """Send a message to a client; see rule 1.

    `request` is the answered request. It is set in two cases: for errors, because the adapter of
    0.13 clients needs it, and for administrative requests, because the audit log needs it.
    """

    connection: ConnectionId
    message: ClientMessage
    cost_bytes: int
    request: ClientMessage | None = field(default=None, compare=False)


@value(frozen=True, slots=True)
class Fetch:
    """Read from a storage, but not over the connection of the store session.

    `is_urgent`: use a shorter timeout, after which another storage is queried.
    """

    token: int
    replica: ReplicaId
    message: RangeRaw | LockBlocksRequest
    is_urgent: bool = False


class FeedHeaders(NamedTuple):
    """Feed headers (20 bytes each) from `first` on, and the chain at the last known batch end."""

    first: TransactionId
    headers: Buffer
    chain_at: TransactionId = BEFORE_FIRST
    chain: Chain = GENESIS_CHAIN

    @property
    def size(self) -> int:
        """The number of transactions."""
        return len(self.headers) // FEED_HEADER_BYTES


@value(frozen=True, slots=True)
class FeedFailed:
    """No feed headers can be read from `first` on: the log begins later, or it is damaged there."""

    first: TransactionId
    error: BeforeLogStart | Unreachable


Effect: TypeAlias = SendToClient | Fetch | replication.Effect


def error_answer(
    connection: ConnectionId,
    req_id: ReqId,
    cost_bytes: int,
    error: WaltzError,
    request: ClientMessage | None = None,
) -> SendToClient:
    """Build the answer that reports an error for a request."""
    first = error.first_available if isinstance(error, BeforeLogStart) else BEFORE_FIRST
    retry_after_ms = error.retry_after_ms if isinstance(error, Overloaded) else 0
    message = ErrorResponse(req_id, error.code, error.retriable, str(error), first, retry_after_ms)
    return SendToClient(connection, message, cost_bytes, request)
