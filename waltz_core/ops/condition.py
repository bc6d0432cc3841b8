"""The state of a partition, derived from the facts: its owner, its session, its replicas.

The doctor reports causes and `cluster verify` lists checks; both use this state, so that they
agree. Conclusions are drawn in `diagnosis.py` and `checks.py`.

Rules:
    1. Unknown is not wrong: a replica of which its storage has reported nothing lacks nothing.
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
    """Why a storage that answers does not serve a replica."""

    OFFLINE = auto()
    NOT_HELD = auto()
    OPENING = auto()
    UNREADABLE = auto()
    STUCK = auto()


def unavailable_reason(held: ReplicaFacts) -> UnavailableReason | None:
    """Return what keeps a replica from being used, as far as its storage reports."""
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
    """One partition; see the module's rules."""

    def __init__(self, cluster: ClusterFacts, partition_id: PartitionId) -> None:
        self.partition_id = partition_id
        self.facts = cluster.partitions.get(partition_id, PartitionFacts())
        self.assigned = cluster.assigned.get(partition_id, ())
        self.replicas = PartitionReplicas(self.assigned, self.facts.metadata)
        self.quorum = len(self.assigned) // 2 + 1
        self._cluster = cluster

    # --- as ZooKeeper has it

    @property
    def owner(self) -> ServerFacts | None:
        """The live server that owns it."""
        owner = self._cluster.owners.get(self.partition_id)
        return None if owner is None else self._cluster.servers.get(owner.server_id)

    @property
    def states(self) -> dict[ReplicaId, ReplicaState]:
        """The states of the replicas in the newest session."""
        metadata = self.facts.metadata
        return {} if metadata is None else dict(metadata.states)

    @property
    def engaged(self) -> list[ReplicaId]:
        """The storages that the newest session counts on."""
        states = self.states
        known = [each for each in states if each in self._cluster.storages]
        return [each for each in known if states[each].closing_high_water_mark == UNRESOLVED]

    @property
    def not_engaged(self) -> list[ReplicaId]:
        """The assigned replicas that the newest session does not count on."""
        return [each for each in self.assigned if each not in self.replicas.in_sync]

    @property
    def is_of_other_replicas(self) -> bool:
        """Whether the newest session is not with the replicas that are assigned."""
        return set(self.states) != set(self.assigned)

    @property
    def is_state_lost(self) -> bool:
        """Whether ZooKeeper has lost its state: it is open, but no replica was engaged."""
        marker = self.facts.marker
        is_open = marker is not None and marker.state is MarkerState.OPEN
        return is_open and not self.replicas.was_opened

    # --- as its owner has it

    @property
    def is_served(self) -> bool:
        """Whether its owner serves it."""
        return self.owner is not None and self.partition_id in self.owner.served

    @property
    def is_open(self) -> bool:
        """Whether its owner has an open session."""
        return self.owner is not None and self.owner.served.get(self.partition_id, False)

    # --- as its storages have it

    @property
    def storages(self) -> list[StorageFacts]:
        """The storages that it is assigned to."""
        return [self._cluster.storages[each] for each in self.assigned]

    def held(self, address: ReplicaId) -> ReplicaFacts | None:
        """Return what a storage has reported of its replica."""
        return self._cluster.storages[address].replicas.get(self.partition_id)

    def answers(self, address: ReplicaId) -> bool:
        """Whether a session could be opened with a replica (rule 2)."""
        if self._cluster.storages[address].failure:
            return False
        held = self.held(address)
        return held is None or unavailable_reason(held) is None

    def is_suspect(self, address: ReplicaId) -> bool:
        """Return whether the log of a replica is not trusted."""
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
        """The replicas whose acknowledged IDs a recovery would not know."""
        return [each for each in self.engaged if not self.answers(each) or self.is_suspect(each)]

    @property
    def has_no_trusted_quorum(self) -> bool:
        """Whether all answer, and too many are suspect: starting a process does not help."""
        is_answered = all(self.answers(each) for each in self.engaged)
        return is_answered and not self.is_open and len(self.suspects) >= self.quorum

    @property
    def last_id(self) -> int:
        """The highest ID in any of its replicas; -1 if none has reported records."""
        held = [self.held(each) for each in self.assigned]
        return max((each.last for each in held if each is not None), default=-1)
