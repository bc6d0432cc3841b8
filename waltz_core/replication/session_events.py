"""Every event and effect of the replication package.

The server, the driver and the simulator use only these to communicate with replication.
`docs/replication.md` describes the protocol; the letters A-K below are its steps.

Rules:
    1. Every event and effect of a store session contains the session ID. A machine drops an event
       of another session, so nothing needs to be cancelled.
    2. `OpenReplica` has one outcome: `ReplicaOpened` or `ReplicaLost`. An opened replica ends once,
       by `ReplicaLost` or by `CloseReplica`. No event of this replica follows a `CloseReplica`.
    3. An effect for ZooKeeper contains an attempt number. It has one outcome, with the same number.
    4. `SessionOpened`, `SessionSettled` and `TransactionsCommitted` of a session are sent only when
       its second compare-and-set is known to have succeeded (invariant GateCAS2).
    5. `SessionSettled` follows once after each `SessionOpened`, before anything is appended in the
       session. It means that all batches of earlier sessions are final.
"""

from typing import NamedTuple, TypeAlias

from waltz_core.cluster.znodes.model import PartitionMarker, PartitionMetadata
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import Chain, Generation, ReplicaId, SessionId, TransactionId
from waltz_core.values import value
from waltz_core.wire.messages import Buffer, StorageMessage


class ArchiveBacklog(NamedTuple):
    """The committed transactions that are not archived.

    `byte_count` is their approximate size, None if it is not known. `since_ms` is the time at which
    the oldest of these transactions was committed, by the clock of the session. This time is
    approximate until the next archive attempt.
    """

    transaction_count: int
    byte_count: int | None
    since_ms: int | None


class Batch(NamedTuple):
    """A batch from the append pipeline: records with their IDs, in the same bytes as on disk.

    `lengths` (big-endian int32) and `record_crcs` (big-endian uint32) have one number per record.
    `records_crc` is the CRC-32 of all bytes in `records`. `stamp_ms` is the commit stamp; it never
    decreases in a partition. `locks` are the write and append locks of all records, big-endian
    int32; None if they are unknown. `distances` has one byte per lock: the distance of the lock's
    record from `last`. It is empty if the batch has so many records that a distance may not fit
    into a byte.
    """

    first: TransactionId
    last: TransactionId
    lengths: Buffer
    records: Buffer
    record_crcs: bytes
    records_crc: int
    stamp_ms: int
    locks: bytes | None = None
    distances: bytes = b""


# ---------------------------------------------------------------------------------------------
# Events: from the owner (the served partition above)


@value(frozen=True, slots=True)
class TakeOwnership:
    """The assignment gives this server the partition (A); sent again for each new generation."""

    generation: Generation
    replicas: tuple[ReplicaId, ...]


@value(frozen=True, slots=True)
class ReassignReplicas:
    """The replica assignment has changed: start a new session with these replicas."""

    replicas: tuple[ReplicaId, ...]


@value(frozen=True, slots=True)
class ReleaseOwnership:
    """This server no longer owns the partition."""


@value(frozen=True, slots=True)
class SubmitToSession:
    """Append a batch to the open session. The batch begins after the last submitted ID."""

    session_id: SessionId
    batch: Batch


@value(frozen=True, slots=True)
class ProveMark:
    """Prove that the session is still the newest: a quorum must answer heartbeats."""

    token: int


@value(frozen=True, slots=True)
class Checkpoint:
    """Start a new session now, to raise the low-water marks."""


# ---------------------------------------------------------------------------------------------
# Events: from the coordinator


@value(frozen=True, slots=True)
class MetadataRead:
    """The partition's nodes in ZooKeeper; None if a node does not exist.

    `metadata_version` and `marker_version` are the versions of the two nodes, for `WriteMetadata`.
    -1 means that the node does not exist.
    """

    attempt: int
    metadata: PartitionMetadata | None
    metadata_version: int
    marker: PartitionMarker | None
    marker_version: int


@value(frozen=True, slots=True)
class MetadataWritten:
    """The compare-and-set has succeeded."""

    attempt: int
    metadata_version: int
    marker_version: int


@value(frozen=True, slots=True)
class MetadataConflict:
    """The compare-and-set has failed: another process has written since the read."""

    attempt: int


@value(frozen=True, slots=True)
class MetadataOutcomeUnknown:
    """A read has failed, or the outcome of a compare-and-set is unknown."""

    attempt: int
    reason: str


# ---------------------------------------------------------------------------------------------
# Events: from the replicas


@value(frozen=True, slots=True)
class ReplicaOpened:
    """A connection of this session to the storage is open; nothing was sent on it yet."""

    session_id: SessionId
    replica: ReplicaId


@value(frozen=True, slots=True)
class ReplicaLost:
    """The connection could not be opened, or was lost."""

    session_id: SessionId
    replica: ReplicaId
    reason: str


@value(frozen=True, slots=True)
class ReplicaResponded:
    """A storage has sent an answer, with the `sequence` of its request."""

    session_id: SessionId
    replica: ReplicaId
    message: StorageMessage


@value(frozen=True, slots=True)
class ExpireArchive:
    """Remove the archived objects with IDs below `before`, or committed before `before_ms`.

    0 means no limit.
    """

    before: TransactionId
    before_ms: int


@value(frozen=True, slots=True)
class ReplaceArchivedObject:
    """Replace the corrupt or missing object `name`; the manifest lists it with IDs first..last.

    `token` identifies the request, so the event may be sent again with the same token.
    """

    name: str
    first: TransactionId
    last: TransactionId
    token: int


@value(frozen=True, slots=True)
class ReplacementOutcome:
    """The outcome of a `ReplaceArchivedObject`.

    `failures` has the reason for each replica that could not write the object. `replica` is the
    replica that has written the new object; None if the object had already been replaced.
    """

    is_replaced: bool
    replica: ReplicaId | None
    failures: tuple[str, ...]


Event: TypeAlias = (
    TakeOwnership
    | ReassignReplicas
    | ReleaseOwnership
    | SubmitToSession
    | ProveMark
    | Checkpoint
    | ExpireArchive
    | ReplaceArchivedObject
    | MetadataRead
    | MetadataWritten
    | MetadataConflict
    | MetadataOutcomeUnknown
    | ReplicaOpened
    | ReplicaLost
    | ReplicaResponded
    | Wakeup
)

# ---------------------------------------------------------------------------------------------
# Effects: requests to the coordinator


@value(frozen=True, slots=True)
class ReadMetadata:
    """Read both nodes of the partition (never from a cache)."""

    attempt: int


@value(frozen=True, slots=True)
class WriteMetadata:
    """Compare-and-set both nodes in one ZooKeeper transaction, each at its version."""

    attempt: int
    metadata: PartitionMetadata
    marker: PartitionMarker
    metadata_version: int
    marker_version: int


# ---------------------------------------------------------------------------------------------
# Effects: for the replicas


@value(frozen=True, slots=True)
class OpenReplica:
    """Dial the storage: one connection for each session and replica, never shared."""

    session_id: SessionId
    replica: ReplicaId


@value(frozen=True, slots=True)
class SendToReplica:
    """Send a message on the session's connection, in order."""

    session_id: SessionId
    replica: ReplicaId
    message: StorageMessage


@value(frozen=True, slots=True)
class CloseReplica:
    """Close the connection; requests in flight on it may still reach the storage."""

    session_id: SessionId
    replica: ReplicaId


# ---------------------------------------------------------------------------------------------
# Effects: for the owner


@value(frozen=True, slots=True)
class SessionOpened:
    """The session accepts appends from `high_water_mark + 1` on (H).

    `follows_own_session`: the previous session also belonged to this machine. So no other owner can
    have written in between, and what the owner knows of the log up to its own mark is still valid.
    """

    session_id: SessionId
    generation: Generation
    high_water_mark: TransactionId
    chain: Chain
    follows_own_session: bool


@value(frozen=True, slots=True)
class SessionSettled:
    """Of the IDs submitted to earlier sessions, those up to `committed_last` are in the log.

    All later submitted IDs are lost: they are not in the log and never will be. But if
    `has_unknown_outcomes` is set, it is unknown whether these IDs are in the log, because a part of
    the log no longer exists or cannot be read now. `stamp_ms` is the last commit stamp of the log
    if another owner may have written it; otherwise 0.
    """

    session_id: SessionId
    committed_last: TransactionId
    stamp_ms: int = 0
    has_unknown_outcomes: bool = False


@value(frozen=True, slots=True)
class TransactionsCommitted:
    """The high-water mark is now `last` (J); `chain` is the log's hash chain there."""

    session_id: SessionId
    last: TransactionId
    chain: Chain


@value(frozen=True, slots=True)
class SessionClosed:
    """The session accepts no more appends.

    Submitted batches wait for the `SessionSettled` of the next session. `error_code`: if a
    replica's rejection ended the session, the code of the rejection's error (`errors.py`);
    otherwise 0.
    """

    session_id: SessionId
    reason: str
    error_code: int = 0


@value(frozen=True, slots=True)
class CheckpointDue:
    """A checkpoint is due: too many records are archived above the confirmed low-water marks.

    A checkpoint is a new session, which raises these marks. Storages remove archived segments only
    up to the marks (AR 11 of decision 047). This effect is sent once per session.
    """

    session_id: SessionId


@value(frozen=True, slots=True)
class MarkProved:
    """A quorum has confirmed that it knows no later session: `high_water_mark` is current."""

    token: int
    high_water_mark: TransactionId


@value(frozen=True, slots=True)
class MarkProofFailed:
    """The proof has failed, or the session has ended meanwhile."""

    token: int


@value(frozen=True, slots=True)
class OwnershipReleased:
    """The machine releases the partition; the owner should stop serving it.

    `should_hand_over`: this server reaches no quorum of the replicas, but another server may.
    """

    reason: str
    should_hand_over: bool = False


Effect: TypeAlias = (
    ReadMetadata
    | WriteMetadata
    | OpenReplica
    | SendToReplica
    | CloseReplica
    | SessionOpened
    | SessionSettled
    | TransactionsCommitted
    | SessionClosed
    | CheckpointDue
    | MarkProved
    | MarkProofFailed
    | OwnershipReleased
    | Report
)
