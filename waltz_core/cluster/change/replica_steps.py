"""Plans changes of a cluster's replicas as a sequence of safe steps.

This module only decides the next step of a partition. `storage_changes.py` reads the current state,
writes the steps and waits.

Rules (docs/design/correctness.md 2.1 C and G, 2.4 row 36):
    1. The next step of a partition begins only after the owner of the partition has opened a store
       session with the replicas of the previous step.
    2. A step adds one replica, removes one replica, or replaces one replica that is not in sync.
    3. After each step, the replicas in sync are a quorum. Therefore appends never wait for a
       replica that still copies the log. Partitions with a single replica are an exception.
    4. No replica is removed before all added replicas are in sync.
    5. A plan stores only the wanted placement. After a crash, the change therefore continues from
       the actual placement.

Invariants of a wanted placement:
    1. A partition has its replicas on different storages, and in as many groups as possible.
    2. No replica moves without need.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from waltz_core import errors
from waltz_core.cluster.znodes.model import UNRESOLVED, PartitionMetadata, ReplicaAssignments
from waltz_core.records.record import PartitionId, ReplicaId

Placement: TypeAlias = Mapping[PartitionId, tuple[ReplicaId, ...]]


# --- one step after the other


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The wanted replicas of some partitions; `added_replicas` must still get in sync."""

    wanted: Placement
    added_replicas: Placement

    @staticmethod
    def for_placement(wanted: Placement, assigned: ReplicaAssignments) -> "ReplicaPlan":
        """Return the plan that leads from an assignment to a placement."""
        old_replicas = {partition_id: assigned.replicas_of(partition_id) for partition_id in wanted}
        added_replicas = {
            partition_id: tuple(name for name in replicas if name not in old_replicas[partition_id])
            for partition_id, replicas in wanted.items()
        }
        return ReplicaPlan(dict(wanted), added_replicas)


class PartitionReplicas(NamedTuple):
    """The actual replicas of one partition, with their states in its owner's session."""

    assigned: tuple[ReplicaId, ...]
    metadata: PartitionMetadata | None

    @property
    def in_sync_replicas(self) -> list[ReplicaId]:
        """The assigned replicas that are engaged in the open session."""
        if self.metadata is None:
            return []
        states = self.metadata.states
        return [
            replica
            for replica in self.assigned
            if replica in states and states[replica] == (self.metadata.session_id, UNRESOLVED)
        ]

    @property
    def was_ever_opened(self) -> bool:
        """Whether a store session of the partition was ever opened."""
        return self.metadata is not None and bool(self.metadata.states)


class ReplicaStep(NamedTuple):
    """One step of one partition: from the replicas `before` to the replicas `after`."""

    partition_id: PartitionId
    before: tuple[ReplicaId, ...]
    after: tuple[ReplicaId, ...]

    def __str__(self) -> str:
        added = [f"+{replica}" for replica in self.after if replica not in self.before]
        removed = [f"-{replica}" for replica in self.before if replica not in self.after]
        return f"partition {self.partition_id}: {' '.join(added + removed)}"


class PostponedStep(NamedTuple):
    """A step that a partition cannot take yet, and the reason for the user."""

    partition_id: PartitionId
    reason: str

    def __str__(self) -> str:
        return f"partition {self.partition_id}: {self.reason}"


def next_step(
    partition_id: PartitionId, current: PartitionReplicas, plan: ReplicaPlan
) -> ReplicaStep | PostponedStep | None:
    """Return a partition's next step, or the reason to wait; None if the plan is completed."""
    wanted = plan.wanted[partition_id]
    if not wanted:
        raise errors.BadRequest(
            f"partition {partition_id} is not changed, because it would have no replica afterwards"
        )
    leaving = [replica for replica in current.assigned if replica not in wanted]
    missing = [replica for replica in wanted if replica not in current.assigned]
    if not current.assigned:
        return ReplicaStep(partition_id, (), tuple(wanted))
    if not current.was_ever_opened:
        # The partition has no records yet, so no replica has to copy any. It is sufficient that the
        # old and the new quorums overlap.
        return _step_without_history(partition_id, current, missing, leaving)
    reason = _session_wait_reason(current) or _sync_wait_reason(
        current, plan.added_replicas[partition_id]
    )
    if reason is not None:
        return PostponedStep(partition_id, reason)
    if missing:
        return _step_adding_replica(partition_id, current, missing[0], leaving)
    if leaving:
        return _step_removing_replica(partition_id, current, leaving)
    return None


def apply_steps(changes: Iterable[ReplicaStep], old: ReplicaAssignments) -> ReplicaAssignments:
    """Return the assignment after these steps.

    Raises CoordinatorConflict if the replicas of a partition differ from those with which the step
    was planned.
    """
    partitions = {name: list(numbers) for name, numbers in old.partitions.items()}
    for partition_id, before, after in changes:
        current = old.replicas_of(partition_id)
        if set(current) != set(before):
            raise errors.CoordinatorConflict(
                f"another command has changed partition {partition_id} meanwhile: expected "
                f"the replicas {_join_names(before)}, found {_join_names(current)}"
            )
        for name in before:
            if name not in after:
                partitions[name].remove(partition_id)
        for name in after:
            if name not in partitions:
                raise errors.BadRequest(f"{name} is not a storage of this cluster")
            if name not in before:
                partitions[name].append(partition_id)
    return ReplicaAssignments(
        {name: tuple(sorted(numbers)) for name, numbers in partitions.items()}
    )


def _step_without_history(
    partition_id: PartitionId,
    current: PartitionReplicas,
    missing: list[ReplicaId],
    leaving: list[ReplicaId],
) -> ReplicaStep | None:
    if missing:
        return ReplicaStep(partition_id, current.assigned, (*current.assigned, missing[0]))
    if leaving:
        return ReplicaStep(
            partition_id, current.assigned, _without_replica(current.assigned, leaving[0])
        )
    return None


def _session_wait_reason(current: PartitionReplicas) -> str | None:
    """Return the reason to wait for a store session (rule 1); None if there is none."""
    assert current.metadata is not None
    if set(current.metadata.states) != set(current.assigned):
        return (
            "the server of the partition must open a store session with the replicas "
            f"{_join_names(current.assigned)}"
        )
    if not current.in_sync_replicas:
        return (
            "the server of the partition must open a store session; the last one was with "
            f"the replicas {_join_names(_engaged_replicas(current))}, and a quorum of "
            "them must answer"
        )
    return None


def _engaged_replicas(current: PartitionReplicas) -> list[ReplicaId]:
    assert current.metadata is not None
    states = current.metadata.states.items()
    return [replica for replica, state in states if state.closing_high_water_mark == UNRESOLVED]


def _sync_wait_reason(
    current: PartitionReplicas, added_replicas: Collection[ReplicaId]
) -> str | None:
    """Return the reason to wait for a replica in sync (rule 4); None if there is none."""
    copying = [
        replica
        for replica in current.assigned
        if replica in added_replicas and replica not in current.in_sync_replicas
    ]
    return f"the log is being copied to {_join_names(copying)}" if copying else None


def _step_adding_replica(
    partition_id: PartitionId,
    current: PartitionReplicas,
    added: ReplicaId,
    leaving: list[ReplicaId],
) -> ReplicaStep | PostponedStep:
    out_of_sync = [replica for replica in leaving if replica not in current.in_sync_replicas]
    if out_of_sync:  # The quorum keeps its size, so appends do not wait for the copy.
        after = (*_without_replica(current.assigned, out_of_sync[0]), added)
        return _step_or_postponed(partition_id, current, after, len(current.in_sync_replicas))
    after = (*current.assigned, added)
    if len(current.in_sync_replicas) == len(current.assigned):
        return ReplicaStep(partition_id, current.assigned, after)
    return _step_or_postponed(partition_id, current, after, len(current.in_sync_replicas))


def _step_removing_replica(
    partition_id: PartitionId, current: PartitionReplicas, leaving: list[ReplicaId]
) -> ReplicaStep | PostponedStep:
    out_of_sync = [replica for replica in leaving if replica not in current.in_sync_replicas]
    after = _without_replica(current.assigned, (out_of_sync or leaving)[0])
    return _step_or_postponed(
        partition_id,
        current,
        after,
        len([replica for replica in current.in_sync_replicas if replica in after]),
    )


def _step_or_postponed(
    partition_id: PartitionId,
    current: PartitionReplicas,
    after: tuple[ReplicaId, ...],
    in_sync_count: int,
) -> ReplicaStep | PostponedStep:
    """Return the step, unless it would break rule 3."""
    quorum = len(after) // 2 + 1
    if in_sync_count >= quorum:
        return ReplicaStep(partition_id, current.assigned, after)
    out_of_sync = [
        replica for replica in current.assigned if replica not in current.in_sync_replicas
    ]
    return PostponedStep(
        partition_id,
        f"not in sync: {_join_names(out_of_sync)}. After the change, an append would need {quorum} "
        f"acknowledgements of the replicas {_join_names(after)}, of which only {in_sync_count} "
        "would be in sync. Hint: start each storage that is not in sync, or replace it.",
    )


def _without_replica(replicas: tuple[ReplicaId, ...], removed: ReplicaId) -> tuple[ReplicaId, ...]:
    return tuple(replica for replica in replicas if replica != removed)


def _join_names(replicas: Iterable[ReplicaId]) -> str:
    return ", ".join(replicas) or "none"


# --- wanted placements


@dataclass(slots=True)
class _PlacementBuilder:
    """A placement under construction: the replicas, and their number on each storage."""

    groups: Mapping[ReplicaId, int]
    replicas: dict[PartitionId, list[ReplicaId]]
    replica_counts: dict[ReplicaId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replica_counts = dict.fromkeys(self.groups, 0)
        for replicas in self.replicas.values():
            for replica in replicas:
                self.replica_counts[replica] = self.replica_counts.get(replica, 0) + 1

    def group_count(self, replicas: Iterable[ReplicaId]) -> int:
        return len({self.groups.get(replica) for replica in replicas})

    def move(self, partition_id: PartitionId, old: ReplicaId | None, new: ReplicaId | None) -> None:
        if old is not None:
            self.replicas[partition_id].remove(old)
            self.replica_counts[old] -= 1
        if new is not None:
            self.replicas[partition_id].append(new)
            self.replica_counts[new] += 1

    def best_storage_for(
        self, replicas: Collection[ReplicaId], excluded: Collection[ReplicaId]
    ) -> ReplicaId | None:
        """Return the best storage for one more replica: in another group, with few replicas."""
        candidates = [
            storage
            for storage in self.groups
            if storage not in replicas and storage not in excluded
        ]
        group_count = self.group_count(replicas)
        return min(
            candidates,
            key=lambda storage: (
                -self.group_count([*replicas, storage]) + group_count,
                self.replica_counts[storage],
            ),
            default=None,
        )

    def replica_to_remove(self, replicas: list[ReplicaId]) -> ReplicaId:
        """Return a replica to remove: in a group with several replicas, on the fullest storage."""

        def cost(replica: ReplicaId) -> tuple[int, int]:
            remaining = [other for other in replicas if other != replica]
            return self.group_count(remaining), self.replica_counts[replica]

        return max(replicas, key=cost)


def placement_of(
    assigned: ReplicaAssignments, partition_count: int
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the replicas of every partition."""
    partitions = map(PartitionId, range(partition_count))
    return {partition_id: assigned.replicas_of(partition_id) for partition_id in partitions}


def placement_without_storage(
    current: Placement, groups: Mapping[ReplicaId, int], address: ReplicaId
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the new replicas of each partition that has a replica on the storage at `address`.

    Raises BadRequest if a replica has no other place.
    """
    usual_count = _usual_replica_count(current)
    builder = _PlacementBuilder(
        groups, {each: list(replicas) for each, replicas in current.items()}
    )
    moved: dict[PartitionId, tuple[ReplicaId, ...]] = {}
    for partition_id, replicas in current.items():
        if address not in replicas:
            continue
        others = [each for each in replicas if each != address]
        if (
            len(others) >= usual_count
        ):  # another storage has the copy: this completes an earlier move
            moved[partition_id] = tuple(others)
            continue
        storage = builder.best_storage_for(others, [address])
        if storage is None:
            raise errors.BadRequest(
                f"every other storage already has a replica of partition {partition_id}. "
                "Hint: add a storage first, or remove the replica (`cluster remove-replica "
                f"{partition_id} {address}`)."
            )
        builder.move(partition_id, address, storage)
        moved[partition_id] = tuple(builder.replicas[partition_id])
    return moved


def placement_with_replacement(
    current: Placement, old: ReplicaId, new: ReplicaId, partitions: Collection[PartitionId]
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the placement in which storage `new` has taken over the replicas of storage `old`.

    If both storages have a replica of a partition, the result depends on the number of its
    replicas. If the partition has more replicas than usual, the change completes an earlier move.
    If it does not, this function raises BadRequest, because the change would only remove a
    replica.
    """
    usual_count = _usual_replica_count(current)
    wanted: dict[PartitionId, tuple[ReplicaId, ...]] = {}
    for partition_id in partitions:
        replicas = current[partition_id]
        if old not in replicas:
            continue
        if new in replicas and len(replicas) <= usual_count:
            raise errors.BadRequest(
                f"nothing was changed: storage {new} already has a replica of partition "
                f"{partition_id}, so the partition would be left with {len(replicas) - 1} "
                f"replicas instead of the usual {usual_count}. Hint: choose another storage, or "
                f"remove the replica on purpose (`cluster remove-replica {partition_id} "
                f"{old}`)."
            )
        wanted[partition_id] = tuple(
            dict.fromkeys(new if replica == old else replica for replica in replicas)
        )
    return wanted


def placement_with_missing_replicas(
    current: Placement, address: ReplicaId
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the placement in which a storage gets a replica of each partition that lacks one."""
    usual_count = _usual_replica_count(current)
    return {
        partition_id: (*replicas, address)
        for partition_id, replicas in current.items()
        if address not in replicas and len(replicas) < usual_count
    }


def _usual_replica_count(current: Placement) -> int:
    """Return the number of replicas that most partitions have; in a tie, the greater number."""
    counts = [len(replicas) for replicas in current.values()]
    return max(counts, key=lambda each: (counts.count(each), each), default=0)


def spread_replicas(
    current: Placement, groups: Mapping[ReplicaId, int], replica_count: int | None = None
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the placement with replicas spread evenly over groups and storages.

    Without `replica_count`, a partition keeps its number of replicas, or gets one for each group if
    it has none. Raises BadRequest if there are too few storages.
    """
    builder = _fill_up_placement(current, groups, replica_count)
    for partition_id in builder.replicas:
        _spread_over_groups(builder, partition_id)
    while _move_one_replica(builder):
        pass
    return {partition: tuple(replicas) for partition, replicas in builder.replicas.items()}


def fill_up_replicas(
    current: Placement, groups: Mapping[ReplicaId, int], replica_count: int | None = None
) -> dict[PartitionId, tuple[ReplicaId, ...]]:
    """Return the placement in which each partition has the wanted number of replicas.

    Replicas are added or removed, but no replica moves. Without `replica_count`, a partition keeps
    its number of replicas, or gets one for each group if it has none.

    Raises BadRequest if there are too few storages.
    """
    return {
        partition_id: tuple(replicas)
        for partition_id, replicas in _fill_up_placement(
            current, groups, replica_count
        ).replicas.items()
    }


def _fill_up_placement(
    current: Placement, groups: Mapping[ReplicaId, int], replica_count: int | None
) -> _PlacementBuilder:
    usual_count = replica_count or len(set(groups.values()))
    if not 1 <= usual_count <= len(groups):
        raise errors.BadRequest(
            f"replicas per partition: expected 1 to {len(groups)}, the number of storages, found "
            f"{usual_count}"
        )
    builder = _PlacementBuilder(
        groups, {number: list(replicas) for number, replicas in current.items()}
    )
    for partition_id, replicas in builder.replicas.items():
        count = replica_count or len(replicas) or usual_count
        while len(replicas) < count:
            storage = builder.best_storage_for(replicas, ())
            assert storage is not None
            builder.move(partition_id, None, storage)
        while len(replicas) > count:
            builder.move(partition_id, builder.replica_to_remove(replicas), None)
    return builder


def _spread_over_groups(builder: _PlacementBuilder, partition_id: PartitionId) -> None:
    replicas = builder.replicas[partition_id]
    while True:
        removed = builder.replica_to_remove(replicas)
        others = [replica for replica in replicas if replica != removed]
        storage = builder.best_storage_for(others, [removed])
        if storage is None:
            return
        if builder.group_count([*others, storage]) <= builder.group_count(replicas):
            return
        builder.move(partition_id, removed, storage)


def _move_one_replica(builder: _PlacementBuilder) -> bool:
    """Move a replica to a storage that has at least two replicas fewer.

    Return False if no replica can move.
    """
    storages = sorted(builder.groups, key=lambda replica: builder.replica_counts[replica])
    for source in reversed(storages):
        for target in storages:
            if builder.replica_counts[source] - builder.replica_counts[target] < 2:
                break
            for partition_id, replicas in builder.replicas.items():
                if source not in replicas or target in replicas:
                    continue
                after = [target if replica == source else replica for replica in replicas]
                if builder.group_count(after) >= builder.group_count(replicas):
                    builder.move(partition_id, source, target)
                    return True
    return False


def partitions_in_too_few_groups(
    current: Placement, groups: Mapping[ReplicaId, int]
) -> list[PartitionId]:
    """Return the partitions whose replicas are in fewer groups than possible."""
    group_count = len(set(groups.values()))
    return [
        partition_id
        for partition_id, replicas in current.items()
        if len({groups.get(replica) for replica in replicas}) < min(len(replicas), group_count)
    ]


def parse_partitions(text: str, partition_count: int) -> tuple[PartitionId, ...]:
    """Return the partitions named by a text like "0-6,7,10-16" or "all"; raises BadConfig."""
    expected = (
        f"partitions: expected numbers and ranges such as 0-3,7 in 0..{partition_count - 1}, or all"
    )
    if text == "all":
        return tuple(map(PartitionId, range(partition_count)))
    parsed_numbers: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise errors.BadConfig(f"{expected}; found {text!r}")
        numbers = range(int(first), int(last if dash else first) + 1)
        if not numbers or numbers[-1] >= partition_count:
            where = f"{text!r}" if part == text else f"{part.strip()!r} in {text!r}"
            raise errors.BadConfig(f"{expected}; found {where}")
        parsed_numbers.update(dict.fromkeys(numbers))
    return tuple(map(PartitionId, parsed_numbers))


def ranges_of_numbers(numbers: list[int]) -> str:
    """Return numbers as ranges in the syntax of options, such as "0-6,9"; "-" if none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] + 1 == number:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts) or "-"
