"""The condition of a partition, derived from the doctor's facts: owner, session and replicas.

Two modules evaluate this state, so that their reports agree: `diagnosis.py` reports causes (the
doctor), and `checks.py` reports failed checks (`cluster verify`).

Rules:
    1. If a storage has reported nothing about a replica, the replica counts as healthy.
    2. A replica is *answering* if the owner could include it in a new store session now.
"""

from enum import Enum, auto

from waltz_core.cluster.change.replica_steps import PartitionReplicas
from waltz_core.cluster.znodes.model import UNRESOLVED, MarkerState, ReplicaState
from waltz_core.ops.facts import (
    ClusterFacts,
    PartitionFacts,
    ReplicaFacts,
    ServerFacts,
    StorageFacts,
)
from waltz_core.records.record import PartitionId, ReplicaId


class UnavailableReason(Enum):
    """The reason why a replica is unavailable, although its storage answers."""

    OFFLINE = auto()
    MISSING = auto()
    OPENING = auto()
    UNREADABLE = auto()
    STUCK = auto()


def unavailable_reason(replica: ReplicaFacts) -> UnavailableReason | None:
    """Return the reason why a replica is unavailable, or None if it is available."""
    if not replica.is_online:
        return UnavailableReason.OFFLINE
    if not replica.is_present:
        return UnavailableReason.MISSING
    if replica.is_opening:
        return UnavailableReason.OPENING
    if replica.open_error:
        return UnavailableReason.UNREADABLE
    return UnavailableReason.STUCK if replica.is_stuck else None


class PartitionCondition:
    """The owner, the session and the replicas of one partition, according to the facts."""

    def __init__(self, cluster: ClusterFacts, partition_id: PartitionId) -> None:
        self.partition_id = partition_id
        self.facts = cluster.partitions.get(partition_id, PartitionFacts())
        self.assigned_replicas = cluster.assigned_replicas.get(partition_id, ())
        self.replicas = PartitionReplicas(self.assigned_replicas, self.facts.metadata)
        self.quorum_size = len(self.assigned_replicas) // 2 + 1
        self._cluster = cluster

    # --- the state in ZooKeeper

    @property
    def owner(self) -> ServerFacts | None:
        """The live server that owns the partition; None if there is none."""
        owner = self._cluster.owners.get(self.partition_id)
        return None if owner is None else self._cluster.servers.get(owner.server_id)

    @property
    def replica_states(self) -> dict[ReplicaId, ReplicaState]:
        """The states of the replicas in the newest session, by replica."""
        metadata = self.facts.metadata
        return {} if metadata is None else dict(metadata.states)

    @property
    def engaged_replicas(self) -> list[ReplicaId]:
        """The replicas that are engaged in the newest session and whose storages are known."""
        states = self.replica_states
        known_replicas = [replica for replica in states if replica in self._cluster.storages]
        return [
            replica
            for replica in known_replicas
            if states[replica].closing_high_water_mark == UNRESOLVED
        ]

    @property
    def not_engaged_replicas(self) -> list[ReplicaId]:
        """The assigned replicas that are not engaged in the newest session."""
        return [
            replica
            for replica in self.assigned_replicas
            if replica not in self.replicas.in_sync_replicas
        ]

    @property
    def has_outdated_session_replicas(self) -> bool:
        """Whether the replicas of the newest session differ from the assigned replicas."""
        return set(self.replica_states) != set(self.assigned_replicas)

    @property
    def is_metadata_lost(self) -> bool:
        """Whether ZooKeeper has lost the metadata: the marker is open, but no replica engaged."""
        marker = self.facts.marker
        is_open = marker is not None and marker.state is MarkerState.OPEN
        return is_open and not self.replicas.was_ever_opened

    # --- the state at the owner

    @property
    def is_served(self) -> bool:
        """Whether the owner answers requests for the partition."""
        return self.owner is not None and self.partition_id in self.owner.served_partitions

    @property
    def has_open_session(self) -> bool:
        """Whether the owner has an open session for the partition."""
        return self.owner is not None and self.owner.served_partitions.get(self.partition_id, False)

    # --- the state at the storages

    @property
    def assigned_storages(self) -> list[StorageFacts]:
        """The storages to which the partition is assigned."""
        return [self._cluster.storages[address] for address in self.assigned_replicas]

    def replica_facts(self, address: ReplicaId) -> ReplicaFacts | None:
        """Return the report of a storage about its replica; None without a report."""
        return self._cluster.storages[address].replicas.get(self.partition_id)

    def is_answering(self, address: ReplicaId) -> bool:
        """Whether a new session could include the replica on a storage (rule 2)."""
        if self._cluster.storages[address].failure:
            return False
        replica = self.replica_facts(address)
        return replica is None or unavailable_reason(replica) is None

    def is_suspect(self, address: ReplicaId) -> bool:
        """Whether the replica on a storage is suspect: its log is not trusted."""
        replica = self.replica_facts(address)
        return replica is not None and replica.is_suspect

    @property
    def answering_replicas(self) -> list[ReplicaId]:
        """The assigned replicas that answer."""
        return [replica for replica in self.assigned_replicas if self.is_answering(replica)]

    @property
    def suspect_replicas(self) -> list[ReplicaId]:
        """The engaged replicas that answer and are suspect."""
        return [
            replica
            for replica in self.engaged_replicas
            if self.is_answering(replica) and self.is_suspect(replica)
        ]

    @property
    def replicas_of_unknown_state(self) -> list[ReplicaId]:
        """The engaged replicas whose last acknowledged ID cannot be determined."""
        return [
            replica
            for replica in self.engaged_replicas
            if not self.is_answering(replica) or self.is_suspect(replica)
        ]

    @property
    def has_no_trusted_quorum(self) -> bool:
        """Whether all engaged replicas answer, but too many are suspect to open a session."""
        is_answered = all(self.is_answering(replica) for replica in self.engaged_replicas)
        return (
            is_answered
            and not self.has_open_session
            and len(self.suspect_replicas) >= self.quorum_size
        )

    @property
    def last_id(self) -> int:
        """The highest ID in any assigned replica; -1 if no replica has reported records."""
        replicas = [self.replica_facts(replica) for replica in self.assigned_replicas]
        return max((replica.last_id for replica in replicas if replica is not None), default=-1)
