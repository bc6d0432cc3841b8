"""Assigns partitions to servers and replicas to storages.

The leader decides for all servers. Because any other server may become the leader at any moment, a
decision depends only on the state in ZooKeeper.

Invariants of `assign_partitions`:
    1. Every partition has exactly one owner.
    2. A generation rises by one exactly when a partition goes to a server that did not own it.
    3. Without preferences, the numbers of partitions of any two servers differ by at most one.
    4. No partition moves without need: a server keeps its partitions if no preference and no other
       invariant prevents this.
    5. With `keeps_owners` (balance by load), invariant 3 does not hold: a server keeps all its
       partitions except the partitions that another server prefers. Partitions without an owner go
       to the servers with the fewest partitions. But if a server is new, all partitions are
       assigned as without `keeps_owners`.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from waltz_core import errors
from waltz_core.cluster.znodes.model import (
    INT32_MAX,
    PartitionAssignment,
    ReplicaAssignments,
    ServerDescriptor,
)
from waltz_core.records.record import Generation, PartitionId, ReplicaId, ServerId

FIRST_GENERATION = Generation(0)


def is_assignment_current(
    assignment: PartitionAssignment,
    servers: Mapping[ServerId, ServerDescriptor],
    *,
    cversion: int,
    partition_count: int,
) -> bool:
    """Whether an assignment was written for exactly these servers and all partitions.

    `cversion` is the current child version of the assignment's node (docs/zookeeper.md, rule 2 of
    "Membership and assignment").
    """
    return (
        assignment.cversion == cversion
        and assignment.partition_count == partition_count
        and all(server_id in servers for server_id in assignment.servers)
        and sum(len(owned) for owned in assignment.servers.values()) == partition_count
    )


def assign_partitions(
    old: PartitionAssignment,
    servers: Mapping[ServerId, ServerDescriptor],
    *,
    cversion: int,
    partition_count: int,
    keeps_owners: bool = False,
) -> PartitionAssignment:
    """Return the assignment for the live servers.

    The share of a server is the number of partitions divided by the number of servers, rounded up
    or down. The partitions are assigned in this order:

        1. Each preferred partition goes to the lowest server ID that prefers it, even beyond its
           share.
        2. Each server keeps its other partitions, up to its share.
        3. The remaining partitions are assigned in order of their IDs.

    With `keeps_owners`, invariant 5 replaces steps 2 and 3.

    Raises BadRequest if the cluster would lose partitions.
    """
    assert servers
    if partition_count < old.partition_count:
        raise errors.BadRequest(
            f"the assignment has {old.partition_count} partitions, but the cluster has only "
            f"{partition_count}, and the number of partitions cannot shrink"
        )
    builder = _AssignmentBuilder(old, sorted(servers), partition_count)
    for server_id in builder.owned_partitions:
        builder.assign_preferred(server_id, servers[server_id].preferred)
    if keeps_owners and servers.keys() <= old.servers.keys():
        builder.keep_current_owners()
    else:
        for server_id in builder.owned_partitions:
            builder.keep_up_to_share(server_id)
        for server_id in builder.owned_partitions:
            builder.assign_free(server_id)
    assert not builder.free_partitions  # invariant 1
    return PartitionAssignment(
        cversion,
        partition_count,
        {
            server_id: dict(sorted(owned.items()))
            for server_id, owned in builder.owned_partitions.items()
        },
    )


def hand_over_partition(
    old: PartitionAssignment, partition_id: PartitionId, generation: Generation, owner: ServerId
) -> PartitionAssignment | None:
    """Return the assignment in which the owner hands over one partition to the next server.

    Each partition has its own cyclic order of the servers, and goes to the server after its owner.
    So the partition visits all servers before it returns to the first one, and the partitions of
    one owner go to different servers. The server with the fewest partitions would be a bad choice:
    if a server has just handed over all its partitions, it would get these partitions back.

    Returns None if there is no other server, or if the partition has another owner now.
    """
    if old.servers.get(owner, {}).get(partition_id) != generation:
        return None
    ring = sorted(
        old.servers, key=lambda server_id: blake2b(b"%d %d" % (partition_id, server_id)).digest()
    )
    target = ring[(ring.index(owner) + 1) % len(ring)]
    return None if target == owner else move_partitions(old, {partition_id: target})


def move_partitions(
    old: PartitionAssignment, moves: Mapping[PartitionId, ServerId]
) -> PartitionAssignment:
    """Return the assignment for the same servers after these moves of partitions.

    The target of a move may be a server that is not in the old assignment.
    """
    owned = {server_id: dict(generations) for server_id, generations in old.servers.items()}
    for source, generations in old.servers.items():
        for partition_id, generation in generations.items():
            target = moves.get(partition_id, source)
            if target != source:
                del owned[source][partition_id]
                owned.setdefault(target, {})[partition_id] = _next_generation(
                    generation, partition_id
                )
    servers = {
        server_id: dict(sorted(generations.items())) for server_id, generations in owned.items()
    }
    return PartitionAssignment(old.cversion, old.partition_count, servers)


def with_minimum_generations(
    old: PartitionAssignment, at_least: Mapping[PartitionId, Generation]
) -> PartitionAssignment:
    """Return the same assignment, with generations raised to at least these values."""
    servers = {
        server_id: {
            partition_id: max(generation, at_least.get(partition_id, generation))
            for partition_id, generation in generations.items()
        }
        for server_id, generations in old.servers.items()
    }
    return PartitionAssignment(old.cversion, old.partition_count, servers)


class _AssignmentBuilder:
    """An assignment under construction: the free partitions, and the partitions of each server."""

    def __init__(
        self, old: PartitionAssignment, server_ids: Sequence[ServerId], partition_count: int
    ) -> None:
        self.free_partitions: dict[PartitionId, Generation] = {
            PartitionId(partition): FIRST_GENERATION for partition in range(partition_count)
        }
        self._owner_by_partition: dict[PartitionId, ServerId] = {}
        for server_id, owned in old.servers.items():
            self.free_partitions.update(owned)
            self._owner_by_partition.update(dict.fromkeys(owned, server_id))
        self.owned_partitions: dict[ServerId, dict[PartitionId, Generation]] = {
            server_id: {} for server_id in server_ids
        }
        self._share, self._spare = divmod(partition_count, len(server_ids))

    def assign_preferred(self, server_id: ServerId, preferred: Iterable[PartitionId]) -> None:
        for partition_id in preferred:
            if partition_id in self.free_partitions:
                self._assign(server_id, partition_id)

    def keep_up_to_share(self, server_id: ServerId) -> None:
        candidates = [
            partition_id
            for partition_id in sorted(self.free_partitions)
            if self._owner_by_partition.get(partition_id) == server_id
        ]
        self._assign_up_to_share(server_id, candidates)

    def keep_current_owners(self) -> None:
        for partition_id in sorted(self.free_partitions):
            owner = self._owner_by_partition.get(partition_id)
            if owner in self.owned_partitions:
                self._assign(owner, partition_id)
        for partition_id in sorted(self.free_partitions):
            self._assign(
                min(
                    self.owned_partitions,
                    key=lambda server_id: (len(self.owned_partitions[server_id]), server_id),
                ),
                partition_id,
            )

    def assign_free(self, server_id: ServerId) -> None:
        self._assign_up_to_share(server_id, sorted(self.free_partitions))

    def _assign_up_to_share(self, server_id: ServerId, candidates: Sequence[PartitionId]) -> None:
        for partition_id in candidates:
            count = len(self.owned_partitions[server_id])
            if count < self._share or (count == self._share and self._spare > 0):
                self._assign(server_id, partition_id)

    def _assign(self, server_id: ServerId, partition_id: PartitionId) -> None:
        generation = self.free_partitions.pop(partition_id)
        if self._owner_by_partition.get(partition_id) != server_id:
            generation = _next_generation(generation, partition_id)
        self.owned_partitions[server_id][partition_id] = generation
        # Each spare partition (the remainder of the division) may go to a server that already has
        # its share. Preferences may give servers more extra partitions than there are spare
        # partitions. Then the number becomes negative, and other servers stay below their shares.
        if len(self.owned_partitions[server_id]) > self._share:
            self._spare -= 1


def _next_generation(generation: Generation, partition_id: PartitionId) -> Generation:
    if generation >= INT32_MAX:
        raise errors.BadFormat(
            f"partition {partition_id} cannot get another owner: its generation {generation} "
            "is the maximum"
        )
    return Generation(generation + 1)


def assign_replicas(groups: Mapping[ReplicaId, int], partition_count: int) -> ReplicaAssignments:
    """Assign one replica of every partition to each group of storages, round-robin."""
    partitions: dict[ReplicaId, list[PartitionId]] = {address: [] for address in groups}
    for group in sorted(set(groups.values())):
        members = [address for address, its_group in groups.items() if its_group == group]
        for partition in range(partition_count):
            partitions[members[partition % len(members)]].append(PartitionId(partition))
    return ReplicaAssignments({address: tuple(numbers) for address, numbers in partitions.items()})


def check_replica_change(
    old: ReplicaAssignments, new: ReplicaAssignments, partition_count: int
) -> None:
    """Raise BadRequest for a change after which old and new quorums might not overlap.

    Among the replicas of a partition after the change, the added replicas must be fewer than a
    quorum (docs/design/correctness.md 2.4, row 36). If the partition had no replicas, any number
    may be added.
    """
    for partition in range(partition_count):
        partition_id = PartitionId(partition)
        before, after = old.replicas_of(partition_id), new.replicas_of(partition_id)
        added = [address for address in after if address not in before]
        if before and len(added) >= len(after) // 2 + 1:
            raise errors.BadRequest(
                f"partition {partition_id}: in one step, {len(added)} of the {len(after)} replicas "
                "would be new: expected fewer than a quorum. Hint: change one replica at a time."
            )
