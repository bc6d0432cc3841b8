"""The state of a partition, derived from the facts: its owner, its session, its replicas.

The doctor reports causes and `cluster verify` reports failed checks. Both use this state, so that
they agree. `diagnosis.py` and `checks.py` draw the conclusions.

Rules:
    1. Unknown is not wrong: if a storage has reported nothing about a replica, no problem is
       assumed.
    2. A replica answers if a session could be opened with it now.
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
    """The reason why a storage that answers does not serve a replica."""

    OFFLINE = auto()
    NOT_HELD = auto()
    OPENING = auto()
    UNREADABLE = auto()
    STUCK = auto()


def unavailable_reason(held: ReplicaFacts) -> UnavailableReason | None:
    """Return the reason why a replica cannot be used, from its storage's report; None if it can."""
    if not held.is_available:
        return UnavailableReason.OFFLINE
    if not held.is_held:
        return UnavailableReason.NOT_HELD
    if held.is_opening:
        return UnavailableReason.OPENING
    if held.reason:
        return UnavailableReason.UNREADABLE
    return UnavailableReason.STUCK if held.is_stuck else None


class PartitionCondition:
    """The state of one partition; the rules of this module apply."""

    def __init__(self, cluster: ClusterFacts, partition_id: PartitionId) -> None:
        self.partition_id = partition_id
        self.facts = cluster.partitions.get(partition_id, PartitionFacts())
        self.assigned = cluster.assigned.get(partition_id, ())
        self.replicas = PartitionReplicas(self.assigned, self.facts.metadata)
        self.quorum = len(self.assigned) // 2 + 1
        self._cluster = cluster

    # --- the state in ZooKeeper

    @property
    def owner(self) -> ServerFacts | None:
        """The live server that owns the partition; None if there is none."""
        owner = self._cluster.owners.get(self.partition_id)
        return None if owner is None else self._cluster.servers.get(owner.server_id)

    @property
    def states(self) -> dict[ReplicaId, ReplicaState]:
        """The states of the replicas in the newest session, by replica."""
        metadata = self.facts.metadata
        return {} if metadata is None else dict(metadata.states)

    @property
    def engaged(self) -> list[ReplicaId]:
        """The replicas that are engaged in the newest session and whose storages are known."""
        states = self.states
        known = [each for each in states if each in self._cluster.storages]
        return [each for each in known if states[each].closing_high_water_mark == UNRESOLVED]

    @property
    def not_engaged(self) -> list[ReplicaId]:
        """The assigned replicas that are not engaged in the newest session."""
        return [each for each in self.assigned if each not in self.replicas.in_sync]

    @property
    def is_of_other_replicas(self) -> bool:
        """Whether the replicas of the newest session differ from the assigned replicas."""
        return set(self.states) != set(self.assigned)

    @property
    def is_state_lost(self) -> bool:
        """Whether ZooKeeper has lost its state: the marker is open, but no replica was engaged."""
        marker = self.facts.marker
        is_open = marker is not None and marker.state is MarkerState.OPEN
        return is_open and not self.replicas.was_opened

    # --- the state at the owner

    @property
    def is_served(self) -> bool:
        """Whether the owner answers requests for the partition."""
        return self.owner is not None and self.partition_id in self.owner.served

    @property
    def is_open(self) -> bool:
        """Whether the owner has an open session for the partition."""
        return self.owner is not None and self.owner.served.get(self.partition_id, False)

    # --- the state at the storages

    @property
    def storages(self) -> list[StorageFacts]:
        """The storages to which the partition is assigned."""
        return [self._cluster.storages[each] for each in self.assigned]

    def held(self, address: ReplicaId) -> ReplicaFacts | None:
        """Return what a storage has reported about its replica; None if it has reported nothing."""
        return self._cluster.storages[address].replicas.get(self.partition_id)

    def answers(self, address: ReplicaId) -> bool:
        """Whether a session could be opened with the replica on a storage (rule 2)."""
        if self._cluster.storages[address].failure:
            return False
        held = self.held(address)
        return held is None or unavailable_reason(held) is None

    def is_suspect(self, address: ReplicaId) -> bool:
        """Whether the replica on a storage is suspect: its log is not trusted."""
        held = self.held(address)
        return held is not None and held.is_suspect

    @property
    def answering_replicas(self) -> list[ReplicaId]:
        """The assigned replicas that answer."""
        return [each for each in self.assigned if self.answers(each)]

    @property
    def suspects(self) -> list[ReplicaId]:
        """The engaged replicas that answer and are suspect."""
        return [each for each in self.engaged if self.answers(each) and self.is_suspect(each)]

    @property
    def unknown(self) -> list[ReplicaId]:
        """The engaged replicas whose acknowledged IDs would be unknown to a recovery."""
        return [each for each in self.engaged if not self.answers(each) or self.is_suspect(each)]

    @property
    def has_no_trusted_quorum(self) -> bool:
        """Whether all replicas answer, but too many are suspect: starting a process is no help."""
        is_answered = all(self.answers(each) for each in self.engaged)
        return is_answered and not self.is_open and len(self.suspects) >= self.quorum

    @property
    def last_id(self) -> int:
        """The highest ID in any assigned replica; -1 if no replica has reported records."""
        held = [self.held(each) for each in self.assigned]
        return max((each.last for each in held if each is not None), default=-1)
