"""The budget for faults that destroy durable data of replicas.

If every disk could be lost, no quorum would survive, and a run would prove nothing. If no disk
could be lost, a run would prove as little. These rules state when each kind of loss is allowed.

Rules:
    1. A replica may lose data in a way that it detects: an empty disk, a disk from before the last
       session, or unreadable slots. This is allowed if every other engaged replica is trusted,
       because each acknowledged transaction is then on one of these replicas. It is not allowed in
       two cases, in which a session could still engage another replica with lost data:
       - Another replica has undetected rot, even if this replica is not engaged or has left.
       - Another replica has lost data in the current session. This session could engage that
         replica because of the replica's earlier answers.
    2. A replica may lose the end of its log without a trace, within a session. No component can
       detect this loss. It is allowed only if a quorum of other replicas is engaged, and all of
       these engaged replicas hold everything that this replica holds (docs/design/correctness.md
       2.4, rows 2 and 8). Even if one of these replicas is away, the others outvote this replica.
    3. A replica that has lost data is trusted again under two conditions: a later session has
       engaged it, and a complete read of a copy of its disk has found no damage.
    4. ZooKeeper's data is the last record of the expected content of the disks. So this data may
       not change after a disk has lost data, and no disk may lose data after such a change.
    5. Without a budget (`Setup.is_unbounded`), losses of rule 1 may happen at any time. Then the
       partition may halt, but a wrong answer is still a failure.
"""

from typing import TYPE_CHECKING, Final

from waltz_core.cluster.znodes.model import UNRESOLVED, PartitionMetadata, ReplicaState
from waltz_core.errors import WaltzError
from waltz_core.records.record import (
    NO_SESSION,
    RECONSTRUCTED,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.quorum import quorum_size
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.reading import READ_BYTES
from waltz_sim.world.simulated_disk import SimDisk

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_storages import SimStorage

_NO_METADATA: Final = PartitionMetadata()


class DataLossBudget:
    """Decides whether a loss of durable data is allowed by the module's rules."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        # Replica that has lost data -> the partition's session in ZooKeeper at that time.
        self.lost_sessions: dict[ReplicaId, SessionId] = {}

    @property
    def _metadata(self) -> PartitionMetadata:
        return self._cluster.coordinator.metadata or _NO_METADATA

    def session_of(self, storage: "SimStorage") -> SessionId:
        """Return the session of a replica's state in ZooKeeper."""
        state = self._metadata.states.get(storage.replica)
        return NO_SESSION if state is None else state.session_id

    def is_engaged(self, storage: "SimStorage") -> bool:
        """Whether a replica is engaged according to ZooKeeper, so that its vote counts."""
        state = self._metadata.states.get(storage.replica)
        return state is not None and state.closing_high_water_mark == UNRESOLVED

    def may_lose_data(self, victim: "SimStorage", *, is_silent: bool = False) -> bool:
        """Whether a replica may lose data now (all rules); `is_silent` is a loss of rule 2."""
        cluster = self._cluster
        if victim.name in cluster.swapped_disks or cluster.coordinator.is_rewritten:
            return False  # Its disk belongs to another storage, or rule 4 applies.
        if cluster.setup.is_unbounded and not is_silent:
            return True
        metadata = self._metadata
        rest = [
            (cluster.storages[ReplicaId(name)], state)
            for name, state in metadata.states.items()
            if name != victim.replica
        ]
        others = [other for other in rest if other[1].closing_high_water_mark == UNRESOLVED]
        if len(metadata.states) < 2 or not others:
            return False
        unsound = [cluster.storages[name] for name in self.lost_sessions if name != victim.replica]
        rots = any(not is_disk_sound(storage) for storage in unsound)
        is_awaited = any(
            self.lost_sessions.get(each.replica) == metadata.session_id for each, _ in rest
        )
        trusted = all(self._is_trusted(storage, state) for storage, state in others)
        if rots or is_awaited or not trusted:
            return False
        if not is_silent:
            return True
        is_outvoted = len(others) >= quorum_size(len(metadata.states))
        return is_outvoted and self._have_all_records(victim, [storage for storage, _ in others])

    def has_lost_data(self, storage: "SimStorage") -> bool:
        """Whether a replica has lost data and is not known to be repaired (rule 3)."""
        return storage.replica in self.lost_sessions

    def has_rot(self, storage: "SimStorage") -> bool:
        """Whether a replica that has lost data cannot be read completely."""
        return self.has_lost_data(storage) and not is_disk_sound(storage)

    def record_loss(self, victim: "SimStorage") -> None:
        """Record that a replica loses data."""
        self.lost_sessions[victim.replica] = self._metadata.session_id
        self._cluster.checks.on_disk_rolled_back(victim)

    def _is_trusted(self, storage: "SimStorage", state: ReplicaState) -> bool:
        log = storage.log
        if log is None or log.suspect or log.damaged or log.last_session < state.session_id:
            return False
        if log.is_broken:
            return False  # The replica may be suspect at its next opening.
        since = self.lost_sessions.get(storage.replica)
        if since is None:
            return True
        if state.session_id <= since or not is_disk_sound(storage):
            return False
        del self.lost_sessions[storage.replica]
        return True

    def _have_all_records(self, victim: "SimStorage", others: "list[SimStorage]") -> bool:
        if victim.log is None:
            return False
        last = max(victim.log.max_id, self._cluster.checks.history.last)
        return all(other.log is not None and other.log.synced_max >= last for other in others)


def is_disk_sound(storage: "SimStorage") -> bool:
    """Whether a disk can be read completely and is trusted. The check reads a copy of the disk."""
    copy = SimDisk(is_traced=False)
    copy.replace_contents(storage.disk.durable_contents())
    try:
        engine = storage.open_engine(copy)
        log = engine.log(PartitionId(0))
        read_whole_log(log)
        return not log.suspect and not log.damaged and not _has_lost_batches(log)
    except WaltzError:
        return False


def _has_lost_batches(log: PartitionLog) -> bool:
    """Whether a log has lost batch entries. Such a log serves records, but no complete copy."""
    first = TransactionId(log.start.transaction_id + 1)
    if log.synced_max < first:
        return False
    _, entries = log.lineage(first, log.synced_max)
    return not entries or any(entry.session_id == RECONSTRUCTED for entry in entries)


def read_whole_log(log: PartitionLog) -> None:
    """Read a whole log, so that its damage is detected; raise WaltzError if that fails."""
    at = TransactionId(log.start.transaction_id + 1)
    while at <= log.synced_max:
        log.lineage(at, at)
        at = log.verify(at, READ_BYTES)
