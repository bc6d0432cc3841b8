"""The storages of a cluster and their partitions, and the execution of changes.

Three nodes describe the storages: the assignment, the groups and the admin ports. These nodes must
always agree. A change of replicas has many steps, and each step begins only after the cluster has
completed the previous step.

Rules:
    1. Assignment, groups and admin ports are read together and change in one write.
    2. `replica_steps.py` decides the next step from the current state of ZooKeeper; after each
       write, the state is read again.
    3. Only a limited number of partitions change at a time, so that copies of logs do not displace
       appends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from waltz_core import errors
from waltz_core.cluster.change import replica_steps
from waltz_core.cluster.change.replica_steps import (
    PartitionReplicas,
    PostponedStep,
    ReplicaPlan,
    ReplicaStep,
)
from waltz_core.cluster.membership.assignment import check_replica_change
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import DeleteNode, SetNode, Signal
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.config.connect_string import check_address
from waltz_core.records.record import PartitionId, ReplicaId

WRITE_ATTEMPTS_MAX = 20
CONCURRENT_PARTITIONS_MAX: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """The storages of a cluster: the partitions, the group and the admin port of each."""

    assignment: model.ReplicaAssignments
    groups: Mapping[ReplicaId, int]
    admin_ports: Mapping[ReplicaId, int]

    def check_storage_exists(self, address: ReplicaId) -> None:
        """Raise BadRequest unless the cluster has this storage."""
        if address not in self.assignment.partitions:
            names = ", ".join(self.assignment.partitions) or "none"
            raise errors.BadRequest(
                f"{address} is not a storage of this cluster; its storages: {names}"
            )

    def with_storage(
        self, address: ReplicaId, admin_port: int, group: int | None
    ) -> "StorageLayout":
        """Return the layout with one more storage, which has no partitions.

        If `group` is None, the storage gets a new group.

        Raises BadRequest if the storage exists already, BadConfig if address or port are not valid.
        """
        check_address(address)
        _check_port(admin_port)
        if address in self.assignment.partitions:
            raise errors.BadRequest(f"{address} is already a storage of this cluster")
        its_group = max(self.groups.values(), default=-1) + 1 if group is None else group
        return StorageLayout(
            model.ReplicaAssignments({**self.assignment.partitions, address: ()}),
            {**self.groups, address: its_group},
            {**self.admin_ports, address: admin_port},
        )

    def with_admin_port(self, address: ReplicaId, admin_port: int) -> "StorageLayout":
        """Return the layout in which a storage has another admin port.

        Raises BadRequest if there is no such storage, BadConfig for an invalid port.
        """
        self.check_storage_exists(address)
        _check_port(admin_port)
        ports = {**self.admin_ports, address: admin_port}
        return StorageLayout(self.assignment, self.groups, ports)

    def without_storage(self, address: ReplicaId) -> "StorageLayout":
        """Return the layout without a storage; raises BadRequest while it has partitions."""
        self.check_storage_exists(address)
        partitions = self.assignment.partitions[address]
        if partitions:
            raise errors.BadRequest(
                f"storage {address} was not removed, because it still has replicas of "
                f"{len(partitions)} partitions, such as {partitions[0]}"
            )
        return StorageLayout(
            model.ReplicaAssignments(_without_key(self.assignment.partitions, address)),
            _without_key(self.groups, address),
            _without_key(self.admin_ports, address),
        )


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """The progress of a plan: finished partitions, all partitions, and the reasons for waiting."""

    done_count: int
    partition_count: int
    postponed_steps: tuple[PostponedStep, ...] = ()
    steps: tuple[ReplicaStep, ...] = ()


class _PlanCompleted(Exception):
    """Every partition has its wanted replicas."""


class StorageChanges:
    """Reads and changes the storages and replicas of one cluster."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._paths = nodes.paths

    async def read_layout(self) -> StorageLayout:
        """Read the layout, not older than any write before the call."""
        await self._nodes.znodes.sync()
        return (await self._read_with_versions())[0]

    async def change_layout(
        self, change: Callable[[StorageLayout], StorageLayout]
    ) -> StorageLayout:
        """Replace the layout by the result of `change`; return the new layout.

        After a concurrent write, `change` is called again. Raises BadRequest if `change` adds too
        many replicas to a partition at once.
        """
        params = await self._nodes.read(self._paths.root, model.ClusterParams.from_bytes)
        for _ in range(WRITE_ATTEMPTS_MAX):
            old, steps = await self._read_with_versions()
            new = change(old)
            check_replica_change(old.assignment, new.assignment, params.partition_count)
            data = (
                new.assignment.to_bytes(),
                model.GroupDescriptor(new.groups).to_bytes(),
                model.ConnectionMetadata(new.admin_ports).to_bytes(),
            )
            changed = [
                replace(step, data=new_data)
                for step, new_data in zip(steps, data, strict=True)
                if step.data != new_data
            ]
            if not changed:
                return new
            try:
                await self._nodes.znodes.write(changed)
            except errors.CoordinatorConflict:
                continue
            return new
        raise self._conflict_error()

    def _conflict_error(self) -> errors.CoordinatorUnavailable:
        return errors.CoordinatorUnavailable(
            f"the change to the list of storages of {self._nodes.connect_string} was not made, "
            "because other processes changed the list during each attempt"
        )

    async def forget_storage_id(self, address: ReplicaId) -> None:
        """Delete the registered storage ID of an address, so that another storage can start there.

        Raises CoordinatorUnavailable if the address may not be free.
        """
        path = self._paths.storage_id(address)
        for _ in range(WRITE_ATTEMPTS_MAX):
            node = await self._nodes.znodes.get(path)
            if node is None:
                return
            try:
                await self._nodes.znodes.write([DeleteNode(path, node.stat.version)])
            except errors.CoordinatorConflict:
                continue
            return
        raise self._conflict_error()

    async def read_replicas(
        self,
        assignment: model.ReplicaAssignments,
        partitions: Sequence[PartitionId],
        signal: Signal | None = None,
    ) -> dict[PartitionId, PartitionReplicas]:
        """Read the replicas of these partitions, with their states in the owners' sessions."""
        replicas: dict[PartitionId, PartitionReplicas] = {}
        for partition_id in partitions:
            path = self._paths.partition(partition_id)
            node = await self._nodes.znodes.get(path, signal)
            metadata = None
            if node is not None:
                metadata = model.PartitionMetadata.from_bytes(node.data, partition_id)
            replicas[partition_id] = PartitionReplicas(
                assignment.replicas_of(partition_id), metadata
            )
        return replicas

    async def execute_plan(
        self, plan: ReplicaPlan, on_progress: Callable[[PlanProgress], None]
    ) -> None:
        """Change replicas step by step until every partition has its wanted replicas.

        Raises BadRequest if the plan cannot be completed. If another command changes the same
        partitions meanwhile, the plan continues from the new state of the partitions.
        """
        unfinished = list(plan.wanted)
        failure: list[errors.WaltzError] = []

        async def check(signal: Signal) -> None:
            try:
                await self._write_next_steps(plan, unfinished, on_progress, signal)
            except (errors.BadRequest, errors.BadFormat) as error:
                failure.append(error)
                raise _PlanCompleted from error

        try:
            await self._nodes.follow(check)
        except _PlanCompleted:
            if failure:
                raise failure[0] from None

    async def _write_next_steps(
        self,
        plan: ReplicaPlan,
        unfinished: list[PartitionId],
        on_progress: Callable[[PlanProgress], None],
        signal: Signal,
    ) -> None:
        """Read the current state, and write the next steps while there are any."""
        while True:
            assignment = await self._nodes.read(
                self._paths.replica_assignment, model.ReplicaAssignments.from_bytes, signal
            )
            current_replicas = await self.read_replicas(
                assignment, unfinished[:CONCURRENT_PARTITIONS_MAX], signal
            )
            steps = {
                each: replica_steps.next_step(each, replicas, plan)
                for each, replicas in current_replicas.items()
            }
            for partition_id in [each for each, step in steps.items() if step is None]:
                unfinished.remove(partition_id)
            next_steps = tuple(each for each in steps.values() if isinstance(each, ReplicaStep))
            postponed = tuple(each for each in steps.values() if isinstance(each, PostponedStep))
            on_progress(
                PlanProgress(
                    len(plan.wanted) - len(unfinished), len(plan.wanted), postponed, next_steps
                )
            )
            if not unfinished:
                raise _PlanCompleted
            if next_steps:
                await self._write_steps(next_steps)
            elif len(postponed) == min(len(unfinished), CONCURRENT_PARTITIONS_MAX):
                return

    async def _write_steps(self, next_steps: tuple[ReplicaStep, ...]) -> None:
        await self.change_layout(
            lambda old: replace(
                old, assignment=replica_steps.apply_steps(next_steps, old.assignment)
            )
        )

    async def _read_with_versions(self) -> tuple[StorageLayout, list[SetNode]]:
        """Return the layout, and for each node a write of its current data at its version."""
        steps: list[SetNode] = []

        async def read(path: str, decode: Callable[[bytes], T]) -> T:
            node = await self._nodes.get_required(path)
            steps.append(SetNode(path, node.data, node.stat.version))
            return decode_node(path, node, decode)

        assignment = await read(self._paths.replica_assignment, model.ReplicaAssignments.from_bytes)
        groups = await read(self._paths.groups, model.GroupDescriptor.from_bytes)
        ports = await read(self._paths.connections, model.ConnectionMetadata.from_bytes)
        return StorageLayout(assignment, groups.groups, ports.admin_ports), steps


def _check_port(admin_port: int) -> None:
    if not 1 <= admin_port <= 65535:
        raise errors.BadConfig(f"expected an admin port in 1..65535, found {admin_port}")


def _without_key(values: Mapping[ReplicaId, T], address: ReplicaId) -> dict[ReplicaId, T]:
    return {key: value for key, value in values.items() if key != address}
