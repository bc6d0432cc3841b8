"""Which partitions a server is to own before all others, and which of them rest.

What somebody has asked for and what ZooKeeper is told are two things while a server is sick, and
the second must not make it forget the first.

Rules:
    1. What was handed over for want of a quorum rests: whoever assigns would give it back at the
       next change of the servers, however sick this one is.
    2. It rests for some time, and then until a quorum of its storages answers this server.
    3. Somebody who asks for a partition again, or no longer wants it, ends its rest.
"""

from collections.abc import Callable, Collection, Mapping

from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.replication.quorum import quorum_size


class Preferences:
    """See the module's rules. Times are seconds of any clock that goes on."""

    def __init__(self, rest_s: float) -> None:
        self.wanted: tuple[PartitionId, ...] = ()
        self._rest_s = rest_s
        self._resting: dict[PartitionId, float] = {}

    @property
    def resting(self) -> list[PartitionId]:
        """What is wanted, and not preferred for the time being."""
        return sorted(self._resting)

    def in_force_after(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> tuple[PartitionId, ...]:
        """Return what ZooKeeper is to be told when this is asked for; nothing changes yet."""
        rests = self._resting.keys() - {*added, *removed}
        return tuple(each for each in self._wanted_after(added, removed) if each not in rests)

    def change(self, added: Collection[PartitionId], removed: Collection[PartitionId]) -> None:
        """ZooKeeper has been told (rule 3)."""
        self.wanted = self._wanted_after(added, removed)
        for each in {*added, *removed}:
            self._resting.pop(each, None)

    def _wanted_after(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> tuple[PartitionId, ...]:
        kept = [each for each in self.wanted if each not in removed]
        return (*kept, *(each for each in dict.fromkeys(added) if each not in kept))

    def handed_over(self, partition_id: PartitionId, now_s: float) -> bool:
        """Take in that a partition went to another server; whether it rests for that (rule 1)."""
        if partition_id not in self.wanted:
            return False
        self._resting[partition_id] = now_s + self._rest_s
        return True

    def rested(self, now_s: float) -> list[PartitionId]:
        """Return what has rested for long enough, if its storages answer (rule 2)."""
        return sorted(each for each, until_s in self._resting.items() if until_s <= now_s)


def within_reach(
    partitions: Collection[PartitionId],
    replicas_of: Callable[[PartitionId], tuple[ReplicaId, ...]],
    reached: Mapping[ReplicaId, bool],
) -> list[PartitionId]:
    """Return the partitions of whose replicas a quorum is reached."""

    def is_reached(partition_id: PartitionId) -> bool:
        replicas = replicas_of(partition_id)
        count = sum(reached.get(each, False) for each in replicas)
        return bool(replicas) and count >= quorum_size(len(replicas))

    return [each for each in partitions if is_reached(each)]
