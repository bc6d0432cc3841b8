"""What the doctor was told, and by whom: the one thing that a diagnosis is made from.

Who asks knows sockets and timeouts, who judges knows none of them, and both meet here. Nothing is
left out because it is as it should be: the doctor also says what there is.

Rules:
    1. Whoever could not be asked stands here with the reason, in its `trouble`; it is empty for
       those that have answered. What they would have said is then left at its default.
    2. `is_silent` tells two kinds of trouble apart: a connection was taken, and nothing was said.
       `is_shut` is a third one: somebody is there, and TLS does not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from waltz_core.cluster.membership.registration import Ownership
from waltz_core.cluster.nodes.model import PartitionMarker, PartitionMetadata
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of ZooKeeper; `mode` is leader, follower, standalone, or empty: it serves nobody."""

    address: str
    trouble: str = ""
    is_silent: bool = False
    mode: str = ""
    latency_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server that is registered, and what it says of itself."""

    address: str
    preferred: tuple[PartitionId, ...] = ()
    trouble: str = ""
    is_silent: bool = False
    is_shut: bool = False
    latency_ms: float = 0.0
    # By partition that it serves: whether it has an open session with a quorum of replicas.
    served: Mapping[PartitionId, bool] = field(default_factory=dict)
    out_of_reach: tuple[ReplicaId, ...] = ()
    # It owns nothing because no other server can connect to it; what those say of that.
    is_left_out: bool = False
    unreachable: tuple[str, ...] = ()
    # By storage: the seconds of the last minute in which it answered appends, and the median of
    # their mean latencies in microseconds.
    append_times: Mapping[ReplicaId, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One partition of one storage; `why_not` says why its log does not open.

    `is_opening`: nothing is known against its log, which is being read, or about to be.
    `is_stuck`: whoever reads from it gets no answer, though its storage answers.
    """

    is_held: bool = True
    is_available: bool = True
    is_served: bool = True
    why_not: str = ""
    is_suspect: bool = False
    last_session: SessionId = NO_SESSION
    last: TransactionId = BEFORE_FIRST
    damaged_count: int = 0
    is_opening: bool = False
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """The disk of a storage; `size_bytes` is None where an older storage does not tell."""

    free_bytes: int
    is_full: bool
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """One storage of the assignment: both its ports, who it is, what it holds.

    `is_hanging`: its administration knows who it is, and does not come to its disk.
    `other_admin` is where its administration was found instead of at the port that ZooKeeper has;
    `clock_ahead_ms` is against the clock of whoever asked, and None where it does not tell.
    """

    address: ReplicaId
    admin: str
    trouble: str = ""
    is_silent: bool = False
    is_shut: bool = False
    latency_ms: float = 0.0
    admin_trouble: str = ""
    is_hanging: bool = False
    other_admin: int | None = None
    registered_id: str | None = None
    storage_id: str | None = None
    is_of_cluster: bool = True
    room: RoomFacts | None = None
    clock_ahead_ms: float | None = None
    replicas: Mapping[PartitionId, ReplicaFacts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition: what ZooKeeper has of it, and what a client is told by its owner.

    `stamp_ahead_ms` is how far the commit stamp of its last transaction lies in the future.
    """

    metadata: PartitionMetadata | None = None
    marker: PartitionMarker | None = None
    mark: TransactionId | None = None
    mark_trouble: str = ""
    stamp_ahead_ms: float | None = None


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One process of a cluster on this machine: its state is up, stopped (by a signal) or down."""

    name: str
    address: str
    state: str
    pid: int = 0
    admin_port: int = 0


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """A cluster on this machine, which `waltz-core local up` has made."""

    directory: str
    members: tuple[MemberFacts, ...]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What ZooKeeper says of a cluster, and what its processes say of themselves."""

    partition_count: int
    is_settled: bool
    owners: Mapping[PartitionId, Ownership]
    servers: Mapping[int, ServerFacts]
    storages: Mapping[ReplicaId, StorageFacts]
    assigned: Mapping[PartitionId, tuple[ReplicaId, ...]]
    groups: Mapping[ReplicaId, int]
    partitions: Mapping[PartitionId, PartitionFacts]
    cluster_key: str = "CLUSTER_KEY"
    name: str = "NAME"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything; without `cluster`, one of the three troubles says why there is nothing of it."""

    connect: str
    nodes: tuple[NodeFacts, ...] = ()
    zookeeper_trouble: str = ""
    refusal: str = ""
    is_no_cluster: bool = False
    cluster: ClusterFacts | None = None
    local: LocalFacts | None = None
