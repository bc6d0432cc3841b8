"""The tasks of a storage's administration, and their results.

The machine that decides (`admin.py`) and the driver that performs the tasks
(`process/admin_port.py`) share only these types.
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
# Tasks


@value(frozen=True, slots=True)
class FindHeldPartitions:
    """List the partitions that the storage holds. Result: a tuple of `HeldPartition`."""


@value(frozen=True, slots=True)
class FindDiskStatus:
    """Read the free space of the disk, and the clock. Result: `DiskStatus`."""


@value(frozen=True, slots=True)
class FindArchiveState:
    """Read the state of archiving. Result: `ArchiveState`; None if the storage has no archive."""


@value(frozen=True, slots=True)
class InspectReplica:
    """Read the state of a replica. Result: `ReplicaStatus`."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class FindZooKeeperState:
    """Read the state of this replica in ZooKeeper. Result: `ZooKeeperState`."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class ReadRange:
    """Read records of a partition that the storage holds. Result: `RangeBytes`."""

    partition_id: PartitionId
    first: TransactionId
    last: TransactionId
    bytes_max: int
    whole_batches: bool = False


@value(frozen=True, slots=True)
class FindScrubState:
    """Read the progress of the scrub in a served partition; with `begins`, first start a new pass.

    Result: `ScrubState`; None if the partition is not served.
    """

    partition_id: PartitionId
    begins: bool


@value(frozen=True, slots=True)
class Assign:
    """Begin to hold a partition."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class Unassign:
    """Stop holding a partition; its files are deleted if `deletes_files` is set."""

    partition_id: PartitionId
    deletes_files: bool


@value(frozen=True, slots=True)
class SetAvailableTask:
    """Take a partition offline or online, as `is_available` states."""

    partition_id: PartitionId
    is_available: bool


@value(frozen=True, slots=True)
class MarkSuspectTask:
    """Mark a replica as suspect."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class ReSeedTask:
    """Delete the log of a replica, which starts again, empty and suspect."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class PutCopy:
    """Append complete batches to the log of an offline partition. Result: the last ID."""

    batches: Copy


AdminQuery: TypeAlias = (
    FindHeldPartitions
    | FindDiskStatus
    | FindArchiveState
    | InspectReplica
    | FindZooKeeperState
    | ReadRange
    | FindScrubState
)
ReplicaChange: TypeAlias = (
    Assign | Unassign | SetAvailableTask | MarkSuspectTask | ReSeedTask | PutCopy
)
AdminTask: TypeAlias = AdminQuery | ReplicaChange


class HeldPartition(NamedTuple):
    """A partition that the storage holds: its control file entry, and the last ID on disk."""

    partition_id: PartitionId
    info: PartitionInfo
    synced_max: TransactionId
    is_available: bool


class DiskStatus(NamedTuple):
    """The free bytes of the disk, its size, the size of the reserve, and the clock.

    `filling_bytes_per_day` states by how much the free bytes decrease, None if this is not known
    yet. `is_full` states that appends are rejected. `clock_ms` is in ms since the epoch.
    `disk_error` is the error of the query for free bytes, None if it succeeded.
    """

    free_bytes: int | None
    reserved_bytes: int
    is_full: bool
    clock_ms: int
    disk_error: str | None = None
    size_bytes: int | None = None
    filling_bytes_per_day: int | None = None


class ArchiveState(NamedTuple):
    """The settings of the archive, and the failures since the last successful attempt.

    `is_damaged` states that the last error was a missing or corrupt file of the archive.
    `read_damage` is the last error of this kind that a read has found; empty if there is none.
    """

    url: str
    age_ms: int
    failure_count: int
    error: str
    is_damaged: bool
    read_damage: str


class LogStatus(NamedTuple):
    """The state of a log; `low_water_mark` is the confirmed one."""

    is_suspect: bool
    promised: SessionId
    last_session: SessionId
    low_water_mark: TransactionId
    synced_max: TransactionId
    chain: Chain
    damaged: tuple[IdRange, ...]


NO_LOG: Final = LogStatus(
    is_suspect=False,
    promised=NO_SESSION,
    last_session=NO_SESSION,
    low_water_mark=BEFORE_FIRST,
    synced_max=BEFORE_FIRST,
    chain=GENESIS_CHAIN,
    damaged=(),
)


class ReplicaStatus(NamedTuple):
    """The state of a replica; if `log` is None, `reason` states why it is not open."""

    is_held: bool
    is_available: bool
    is_served: bool
    info: PartitionInfo
    log: LogStatus | None
    reason: str = ""


class ZooKeeperState(NamedTuple):
    """The current assignment in ZooKeeper, and the replicas of the last session."""

    is_assigned: bool
    is_engaged: bool
    session_id: SessionId
    engaged: tuple[str, ...]
    replica_count: int
