"""What a served partition is told, what it answers, and the limits that it keeps.

The partition machine, the shell that reaches storages and the process around them speak to one
another in these words only, together with those of `replication/session_events.py`.

Rules:
    1. Every request ends with exactly one `Answer` whose `cost_bytes` is the request's own, unless
       its connection closes first. Answers in between (the feed) have `cost_bytes` 0.
    2. Whatever cannot be answered otherwise is answered by an `ErrorResponse`; nothing is dropped.
    3. `Fetch` has one outcome with the same token: `Fetched` or `FetchFailed`.
    4. `Drained` follows every `Congested`, and may come without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, NewType, Protocol, TypeAlias

from waltz_core.errors import WaltzError
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

# One accepted connection of this process; never used again for another one.
ConnectionId = NewType("ConnectionId", int)

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """The numbers a partition keeps to. All must be positive, but for `lock_refill_count_max`.

    `session_timer_ms`: for so long after a quorum last answered in the session, marks are told
    without asking it again. `open_wait_ms`: for so long a request other than an append waits for a
    store session before it is refused. `fences_max`: of so many clients the highest connection
    sequence is remembered after they left. `checkpoint_interval_count`: after so many transactions
    in a session, but not more often than every `checkpoint_interval_ms`, a new one is started, so
    that low-water marks move up. `lock_refill_count_max`: of so many transactions a new owner wants
    to know the locks, 0 for none; `lock_tail_bytes_max`: in so many bytes, a storage's answer.
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
    feed_grant_count_min: int = 10_000
    range_bytes_max: int = 4 * MIB
    fetches_max: int = 8
    fences_max: int = 262_144
    session_timer_ms: int = 2_000
    open_wait_ms: int = 5_000
    checkpoint_interval_count: int = 250_000
    checkpoint_interval_ms: int = 10_000
    lock_refill_count_max: int = 1_000_000
    lock_tail_bytes_max: int = 8 * MIB

    def __post_init__(self) -> None:
        may_be_zero = "lock_refill_count_max"
        names = (each.name for each in fields(self))
        assert self.lock_refill_count_max >= 0
        assert all(getattr(self, name) > 0 for name in names if name != may_be_zero)
        # Some single transaction of the greatest size must fit everywhere.
        assert TRANSACTION_BYTES_MAX < self.batch_bytes_max < FRAME_BYTES_MAX
        assert self.range_bytes_max <= FRAME_BYTES_MAX // 2


class Store(Protocol):
    """What the partition needs of `replication.partition_store.PartitionStore`."""

    @property
    def wake_at_ms(self) -> int | None:
        """When to send it the next `Wakeup`."""

    @property
    def readable_replicas(self) -> Sequence[ReplicaId]:
        """The replicas that readers may ask in the open session."""

    def step(self, event: replication.Event, now_ms: int) -> Sequence[replication.Effect]:
        """Take one event in."""


@value(frozen=True, slots=True)
class PartitionIdentity:
    """Which partition of which cluster this is."""

    partition_id: PartitionId
    partition_count: int
    cluster_key: bytes


# ---------------------------------------------------------------------------------------------
# Events


@value(frozen=True, slots=True)
class Received:
    """A client's request for this partition came in, `cost_bytes` long.

    `wall_ms` is the wall clock: it becomes a commit stamp, and nothing is ever decided by it.
    """

    connection: ConnectionId
    message: ClientMessage
    cost_bytes: int
    wall_ms: int


@value(frozen=True, slots=True)
class Closed:
    """A connection is gone; what it sent and was not submitted yet is dropped."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class Congested:
    """A connection takes no more for now: its client reads too slowly."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class Drained:
    """A congested connection takes more again."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class Fetched:
    """A storage answered a fetch."""

    token: int
    message: RangeBytes | LockBlocks


@value(frozen=True, slots=True)
class FetchFailed:
    """A fetch failed at this storage; another one may do."""

    token: int
    reason: str


Event: TypeAlias = (
    Received
    | Closed
    | Congested
    | Drained
    | Fetched
    | FetchFailed
    | Wakeup
    | replication.Own
    | replication.Reassign
    | replication.Disown
    | replication.Checkpoint
    | replication.MetadataRead
    | replication.MetadataWritten
    | replication.MetadataConflict
    | replication.MetadataUnknown
    | replication.ReplicaOpened
    | replication.ReplicaLost
    | replication.ReplicaAnswered
)

# ---------------------------------------------------------------------------------------------
# Effects


@value(frozen=True, slots=True)
class Answer:
    """Send a message to a client; see rule 1.

    `question` is the request that an error is told of, for whoever has to put it into other words.
    """

    connection: ConnectionId
    message: ClientMessage
    cost_bytes: int
    question: ClientMessage | None = field(default=None, compare=False)


@value(frozen=True, slots=True)
class Fetch:
    """Read from a storage, on a connection that has nothing to do with the session's.

    `is_urgent`: another one is asked when this one does not answer soon.
    """

    token: int
    replica: ReplicaId
    message: RangeRaw | LockBlocksRequest
    is_urgent: bool = False


class FeedHeaders(NamedTuple):
    """Feed headers (20 bytes each) from `first` on, and the chain at the newest batch end known."""

    first: TransactionId
    headers: Buffer
    chain_at: TransactionId = BEFORE_FIRST
    chain: Chain = GENESIS_CHAIN

    @property
    def size(self) -> int:
        """How many transactions it covers."""
        return len(self.headers) // FEED_HEADER_BYTES


Effect: TypeAlias = Answer | Fetch | replication.Effect


def refusal(
    connection: ConnectionId,
    req_id: ReqId,
    cost_bytes: int,
    error: WaltzError,
    question: ClientMessage | None = None,
) -> Answer:
    """Return the answer that tells an error."""
    message = ErrorResponse(req_id, error.code, error.retriable, str(error))
    return Answer(connection, message, cost_bytes, question)
