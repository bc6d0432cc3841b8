"""What the administration of a storage asks for: its errands, and what they come back with.

The machine that decides (`admin.py`) and the shell that carries out (`admin_port.py`) share these
words and nothing else.
"""

from typing import Final, NamedTuple, TypeAlias

from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    Chain,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.files.format import IdRange, PartitionInfo
from waltz_core.values import value
from waltz_core.wire.admin_messages import Copy

# ---------------------------------------------------------------------------------------------
# Errands


@value(frozen=True, slots=True)
class FindHeld:
    """Which partitions are held: a tuple of `HeldPartition`."""


@value(frozen=True, slots=True)
class FindRoom:
    """How the disk and the clock stand: `DiskRoom`."""


@value(frozen=True, slots=True)
class InspectReplica:
    """How a partition stands here: `ReplicaStatus`."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class FindStanding:
    """What ZooKeeper says of this replica, now: `ZooKeeperView`."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class ReadRange:
    """Read records of a partition that is held: `RangeBytes`."""

    partition_id: PartitionId
    first: TransactionId
    last: TransactionId
    bytes_max: int
    whole_batches: bool = False


@value(frozen=True, slots=True)
class ScrubStatus:
    """How far the scrub is with a partition that is served, begun anew if so wanted: `ScrubState`.

    None for one that is not served.
    """

    partition_id: PartitionId
    begins: bool


@value(frozen=True, slots=True)
class Assign:
    """Begin to hold a partition."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class Unassign:
    """Hold a partition no longer."""

    partition_id: PartitionId
    deletes_files: bool


@value(frozen=True, slots=True)
class SetAvailability:
    """Take a partition offline, or online again."""

    partition_id: PartitionId
    is_available: bool


@value(frozen=True, slots=True)
class MarkReplicaSuspect:
    """Mark a replica as suspect."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class Reseed:
    """Throw a replica's log away; it begins anew, empty and suspect."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class PutCopy:
    """Put whole batches behind the log of a partition that is offline: its last id."""

    batches: Copy


Question: TypeAlias = FindHeld | FindRoom | InspectReplica | FindStanding | ReadRange | ScrubStatus
ReplicaChange: TypeAlias = (
    Assign | Unassign | SetAvailability | MarkReplicaSuspect | Reseed | PutCopy
)
Errand: TypeAlias = Question | ReplicaChange


class HeldPartition(NamedTuple):
    """A partition that is held, as the control file has it, and the last id on disk."""

    partition_id: PartitionId
    info: PartitionInfo
    synced_max: TransactionId
    is_available: bool


class DiskRoom(NamedTuple):
    """Free bytes of the disk, its size, what is kept back of them, and what the clock shows.

    `is_full`: appends are refused. `clock_ms` is in ms since the epoch. `disk_error` is why the
    disk does not say what is free, None if it does.
    """

    free_bytes: int | None
    reserved_bytes: int
    is_full: bool
    clock_ms: int
    disk_error: str | None = None
    size_bytes: int | None = None


class LogFacts(NamedTuple):
    """What a log says of itself; `low_water_mark` is the confirmed one."""

    is_suspect: bool
    promised: SessionId
    last_session: SessionId
    low_water_mark: TransactionId
    synced_max: TransactionId
    chain: Chain
    damaged: tuple[IdRange, ...]


NO_LOG: Final = LogFacts(
    is_suspect=False,
    promised=NO_SESSION,
    last_session=NO_SESSION,
    low_water_mark=BEFORE_FIRST,
    synced_max=BEFORE_FIRST,
    chain=GENESIS_CHAIN,
    damaged=(),
)


class ReplicaStatus(NamedTuple):
    """How a partition stands here; without `log`, `why_not` says why there is none."""

    is_held: bool
    is_available: bool
    is_served: bool
    info: PartitionInfo
    log: LogFacts | None
    why_not: str = ""


class ZooKeeperView(NamedTuple):
    """What ZooKeeper says: the assignment of now, and the replicas of the last session."""

    is_assigned: bool
    is_engaged: bool
    session_id: SessionId
    engaged: tuple[str, ...]
    replica_count: int
