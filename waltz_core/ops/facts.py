"""The doctor's facts about a cluster. A diagnosis has no other input.

The probes handle sockets and timeouts, so the diagnosis depends only on the facts. The facts also
describe healthy processes, because the doctor prints a summary.

Rules:
    1. If a process has answered, `failure` is empty. Otherwise `failure` is the reason, and the
       other fields have their defaults.
    2. Flags distinguish the kinds of failures. `is_silent`: the process accepted a connection, but
       did not answer. `is_denied`: the process rejects the token of the doctor, or the requests of
       the doctor's principal. `is_tls_mismatch`: the process runs, but the TLS handshake failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from waltz_core.cluster.membership.registration import Ownership
from waltz_core.cluster.znodes.model import ArchivedMark, PartitionMarker, PartitionMetadata
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)


@dataclass(frozen=True, slots=True)
class ZooKeeperServerFacts:
    """One ZooKeeper server; `mode` is leader, follower, standalone, or empty (not serving)."""

    address: str
    failure: str = ""
    is_silent: bool = False
    mode: str = ""
    latency_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One registered server: its entry in ZooKeeper, and its answers to the doctor."""

    address: str
    preferred_partitions: tuple[PartitionId, ...] = ()
    failure: str = ""
    is_silent: bool = False
    is_tls_mismatch: bool = False
    is_denied: bool = False
    latency_ms: float = 0.0
    # For each served partition, whether there is an open session with a quorum of replicas.
    served_partitions: Mapping[PartitionId, bool] = field(default_factory=dict)
    unreachable_storages: tuple[ReplicaId, ...] = ()
    # Whether the server owns no partition because other servers cannot connect to it. The next
    # field contains their errors.
    is_excluded_as_unreachable: bool = False
    connection_errors: tuple[str, ...] = ()
    # For each storage, a pair. The first number counts the seconds of the last minute in which the
    # storage answered appends. The second number is the median of the mean latencies of these
    # seconds, in microseconds.
    append_latencies: Mapping[ReplicaId, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica, as its storage reports it.

    `open_error`: the reason why the log cannot be opened; empty if it can be opened.
    `is_opening`: the log has no known fault, and is being opened or about to be opened.
    `is_stuck`: reads of the log get no answer, although the storage answers.
    """

    is_present: bool = True
    is_online: bool = True
    is_served: bool = True
    open_error: str = ""
    is_suspect: bool = False
    last_session_id: SessionId = NO_SESSION
    last_id: TransactionId = BEFORE_FIRST
    damaged_count: int = 0
    is_opening: bool = False
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The disk of a storage; a value is None if an older storage does not report it.

    `filling_bytes_per_day` is the rate of the last day; None in the first hour of the process.
    """

    free_bytes: int
    is_full: bool
    size_bytes: int | None = None
    filling_bytes_per_day: int | None = None

    @property
    def days_until_full(self) -> float | None:
        """The days until the disk is full at this rate; None if unknown, or if it does not fill."""
        rate = self.filling_bytes_per_day
        return self.free_bytes / rate if rate is not None and rate > 0 else None


@dataclass(frozen=True, slots=True)
class ArchiveFacts:
    """The archive as a storage reports it: its settings, and its last attempts.

    `failure_count` is the number of failed attempts since the last successful attempt, and `error`
    is the last error. `is_damaged` is true if this error is a missing or corrupt file of the
    archive. `read_damage` is the last error of this kind that a read has found.
    """

    url: str
    age_ms: int = 0
    failure_count: int = 0
    error: str = ""
    is_damaged: bool = False
    read_damage: str = ""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """One storage of the assignment: its two ports, its identity, and its replicas.

    `is_hanging`: the admin port answers, but requests that use the disk do not complete.
    `found_admin_port` is the storage's real admin port, if ZooKeeper contains a different one.
    `clock_ahead_ms` is relative to this machine's clock; None if the storage does not report its
    clock.
    """

    address: ReplicaId
    admin_address: str
    failure: str = ""
    is_silent: bool = False
    is_tls_mismatch: bool = False
    is_denied: bool = False
    latency_ms: float = 0.0
    admin_failure: str = ""
    is_hanging: bool = False
    found_admin_port: int | None = None
    registered_storage_id: str | None = None
    storage_id: str | None = None
    belongs_to_cluster: bool = True
    disk: DiskFacts | None = None
    clock_ahead_ms: float | None = None
    archive: ArchiveFacts | None = None
    replicas: Mapping[PartitionId, ReplicaFacts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition: its state in ZooKeeper, and its owner's answers to a client.

    `commit_stamp_ahead_ms` is the time by which the commit stamp of the last transaction is in the
    future. `oldest_unarchived_age_s` is the age of the oldest transaction that is not archived. It
    is 0 if all transactions are archived, and None if it is unknown or if the cluster archives
    nothing. `unarchived_bytes` is the approximate size of these transactions, as the owner reports
    it. `archive_interval_ms` is the owner's setting, 0 if it archives nothing or is unknown.
    """

    metadata: PartitionMetadata | None = None
    marker: PartitionMarker | None = None
    high_water_mark: TransactionId | None = None
    high_water_mark_error: str = ""
    commit_stamp_ahead_ms: float | None = None
    oldest_unarchived_age_s: float | None = None
    unarchived_bytes: int | None = None
    archive_interval_ms: int = 0

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark of the partition in ZooKeeper."""
        return None if self.marker is None else self.marker.archived

    @property
    def unarchived_count(self) -> int | None:
        """The number of committed transactions that are not archived; None without a mark."""
        if self.high_water_mark is None:
            return None
        return max(
            0,
            self.high_water_mark
            - (BEFORE_FIRST if self.archived_mark is None else self.archived_mark.last),
        )


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One process of a cluster on this machine; its state is up, stopped (by a signal) or down."""

    name: str
    address: str
    state: str
    pid: int = 0
    admin_port: int = 0


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """A cluster on this machine that `waltz-core local up` has created."""

    directory: str
    members: tuple[MemberFacts, ...]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The state of a cluster in ZooKeeper, and the answers of its processes."""

    partition_count: int
    is_assignment_settled: bool
    owners: Mapping[PartitionId, Ownership]
    servers: Mapping[int, ServerFacts]
    storages: Mapping[ReplicaId, StorageFacts]
    assigned_replicas: Mapping[PartitionId, tuple[ReplicaId, ...]]
    storage_groups: Mapping[ReplicaId, int]
    partitions: Mapping[PartitionId, PartitionFacts]
    cluster_key: str = "CLUSTER_KEY"
    name: str = "NAME"


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts; if `cluster` is None, one of the three fields before `cluster` is the reason."""

    connect: str
    zookeeper_servers: tuple[ZooKeeperServerFacts, ...] = ()
    zookeeper_failure: str = ""
    access_error: str = ""
    is_cluster_missing: bool = False
    cluster: ClusterFacts | None = None
    local: LocalFacts | None = None
