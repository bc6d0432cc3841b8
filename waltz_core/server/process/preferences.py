"""The partitions that a server prefers to own, and which of these preferences are suspended.

While a server cannot serve a partition that it prefers, the preference is *suspended*: it is
removed from ZooKeeper. This server remembers the preference and restores it later.

Rules:
    1. If a partition was released because there was no quorum, its preference is suspended.
       If the preference stayed, the next assignment would give the partition back to this server.
    2. A preference is suspended for a minimum time, and then until a quorum of the partition's
       storages answers this server.
    3. A new request for the preference, or its removal, ends the suspension.
"""

from collections.abc import Callable, Collection, Mapping

from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.replication.quorum import quorum_size


class Preferences:
    """The preferences of one server, by the module's rules.

    Times are seconds of any monotonic clock.
    """

    def __init__(self, suspension_s: float) -> None:
        self.preferred: tuple[PartitionId, ...] = ()
        self._suspension_s = suspension_s
        self._suspended: dict[PartitionId, float] = {}

    @property
    def suspended_partitions(self) -> list[PartitionId]:
        """The partitions whose preference is suspended."""
        return sorted(self._suspended)

    def active_preferences_after(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> tuple[PartitionId, ...]:
        """Return the preferences to write to ZooKeeper for this change; does not apply it yet."""
        suspended = self._suspended.keys() - {*added, *removed}
        return tuple(
            partition_id
            for partition_id in self._preferences_after(added, removed)
            if partition_id not in suspended
        )

    def change(self, added: Collection[PartitionId], removed: Collection[PartitionId]) -> None:
        """Apply a change that was written to ZooKeeper (rule 3)."""
        self.preferred = self._preferences_after(added, removed)
        for partition_id in {*added, *removed}:
            self._suspended.pop(partition_id, None)

    def _preferences_after(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> tuple[PartitionId, ...]:
        kept_ids = [partition_id for partition_id in self.preferred if partition_id not in removed]
        return (
            *kept_ids,
            *(
                partition_id
                for partition_id in dict.fromkeys(added)
                if partition_id not in kept_ids
            ),
        )

    def suspend(self, partition_id: PartitionId, now_s: float) -> bool:
        """Suspend the preference for a partition that was handed over (rule 1).

        Return False if the server does not prefer the partition.
        """
        if partition_id not in self.preferred:
            return False
        self._suspended[partition_id] = now_s + self._suspension_s
        return True

    def resumable_partitions(self, now_s: float) -> list[PartitionId]:
        """Return the partitions that have been suspended for the minimum time (rule 2)."""
        return sorted(
            partition_id for partition_id, until_s in self._suspended.items() if until_s <= now_s
        )


def reachable_partitions(
    partitions: Collection[PartitionId],
    replicas_of: Callable[[PartitionId], tuple[ReplicaId, ...]],
    is_reachable: Mapping[ReplicaId, bool],
) -> list[PartitionId]:
    """Return the partitions with a quorum of reachable replicas."""

    def has_reachable_quorum(partition_id: PartitionId) -> bool:
        replicas = replicas_of(partition_id)
        count = sum(is_reachable.get(replica, False) for replica in replicas)
        return bool(replicas) and count >= quorum_size(len(replicas))

    return [partition_id for partition_id in partitions if has_reachable_quorum(partition_id)]
