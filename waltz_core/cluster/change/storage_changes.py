"""The storages of a cluster and their partitions, and the execution of changes.

Three nodes describe the storages and must always agree. A change of replicas has many steps; each
step may be taken only when the cluster has completed the previous one.

Rules:
    1. Assignment, groups and admin ports are read as one and change in one write.
    2. `replica_steps.py` decides the next step from the current state of ZooKeeper; after each
       write, the state is read again.
    3. The number of partitions that change at a time is limited, so that their copies do not
       displace appends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from waltz_core import errors
from waltz_core.cluster.change import replica_steps
from waltz_core.cluster.change.replica_steps import (
    PartitionReplicas,
    ReplicaPlan,
    ReplicaStep,
    StepWait,
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

    def check_known(self, address: ReplicaId) -> None:
        """Raise BadRequest unless the cluster has this storage."""
        if address not in self.assignment.partitions:
            names = ", ".join(self.assignment.partitions) or "none"
            raise errors.BadRequest(
                f"{address} is not a storage of this cluster; its storages: {names}"
            )

    def with_storage(
        self, address: ReplicaId, admin_port: int, group: int | None
    ) -> "StorageLayout":
        """Return the layout with one more storage, without partitions; group None: a new group.

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
        self.check_known(address)
        _check_port(admin_port)
        ports = {**self.admin_ports, address: admin_port}
        return StorageLayout(self.assignment, self.groups, ports)

    def without_storage(self, address: ReplicaId) -> "StorageLayout":
        """Return the layout without a storage; raises BadRequest while it has partitions."""
        self.check_known(address)
        held = self.assignment.partitions[address]
        if held:
            raise errors.BadRequest(
                f"storage {address} was not removed, because it still has replicas of "
                f"{len(held)} partitions, such as {held[0]}"
            )
        return StorageLayout(
            model.ReplicaAssignments(_without(self.assignment.partitions, address)),
            _without(self.groups, address),
            _without(self.admin_ports, address),
        )


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """The progress of a plan: finished partitions, all partitions, and the reasons for waiting."""

    done_count: int
    count: int
    waits: tuple[StepWait, ...] = ()
    step: tuple[ReplicaStep, ...] = ()


class _PlanCompleted(Exception):
    """Every partition has its wanted replicas."""


class StorageChanges:
    """The storages of one cluster, through one session."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._paths = nodes.paths

    async def read(self) -> StorageLayout:
        """Read the layout, not older than any write before the call."""
        await self._nodes.znodes.sync()
        return (await self._read())[0]

    async def change(self, change: Callable[[StorageLayout], StorageLayout]) -> StorageLayout:
        """Replace the layout by the result of `change`; return the new layout.

        After a concurrent write, `change` is called again. Raises BadRequest for a step that
        changes too much at once.
        """
        params = await self._nodes.read(self._paths.root, model.ClusterParams.from_bytes)
        for _ in range(WRITE_ATTEMPTS_MAX):
            old, steps = await self._read()
            new = change(old)
            check_replica_change(old.assignment, new.assignment, params.partition_count)
            data = (
                new.assignment.to_bytes(),
                model.GroupDescriptor(new.groups).to_bytes(),
                model.ConnectionMetadata(new.admin_ports).to_bytes(),
            )
            changed = [
                replace(step, data=its)
                for step, its in zip(steps, data, strict=True)
                if step.data != its
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
            f"the change to the list of storages of {self._nodes.where} was not made, because "
            "other processes changed the list during each attempt"
        )

    async def forget_id(self, address: ReplicaId) -> None:
        """Free an address for another storage: the next storage that starts there is registered.

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
        found: dict[PartitionId, PartitionReplicas] = {}
        for partition_id in partitions:
            path = self._paths.partition(partition_id)
            node = await self._nodes.znodes.get(path, signal)
            metadata = None
            if node is not None:
                metadata = model.PartitionMetadata.from_bytes(node.data, partition_id)
            found[partition_id] = PartitionReplicas(assignment.replicas_of(partition_id), metadata)
        return found

    async def carry_out(
        self, plan: ReplicaPlan, on_progress: Callable[[PlanProgress], None]
    ) -> None:
        """Take steps until every partition has its wanted replicas, or until cancelled.

        Raises BadRequest if that is impossible. If another command changes the same partitions, its
        changes count like steps of this plan.
        """
        open_ends = list(plan.wanted)
        failure: list[errors.WaltzError] = []

        async def check(signal: Signal) -> None:
            try:
                await self._advance(plan, open_ends, on_progress, signal)
            except (errors.BadRequest, errors.BadFormat) as error:
                failure.append(error)
                raise _PlanCompleted from error

        try:
            await self._nodes.follow(check)
        except _PlanCompleted:
            if failure:
                raise failure[0] from None

    async def _advance(
        self,
        plan: ReplicaPlan,
        open_ends: list[PartitionId],
        on_progress: Callable[[PlanProgress], None],
        signal: Signal,
    ) -> None:
        """Read the current state, and write the next steps while there are any."""
        while True:
            assignment = await self._nodes.read(
                self._paths.replica_assignment, model.ReplicaAssignments.from_bytes, signal
            )
            now = await self.read_replicas(
                assignment, open_ends[:CONCURRENT_PARTITIONS_MAX], signal
            )
            steps = {
                each: replica_steps.next_step(each, replicas, plan)
                for each, replicas in now.items()
            }
            for partition_id in [each for each, step in steps.items() if step is None]:
                open_ends.remove(partition_id)
            todo = tuple(each for each in steps.values() if isinstance(each, ReplicaStep))
            waits = tuple(each for each in steps.values() if isinstance(each, StepWait))
            on_progress(
                PlanProgress(len(plan.wanted) - len(open_ends), len(plan.wanted), waits, todo)
            )
            if not open_ends:
                raise _PlanCompleted
            if todo:
                await self._write(todo)
            elif len(waits) == min(len(open_ends), CONCURRENT_PARTITIONS_MAX):
                return

    async def _write(self, todo: tuple[ReplicaStep, ...]) -> None:
        await self.change(
            lambda old: replace(old, assignment=replica_steps.apply(todo, old.assignment))
        )

    async def _read(self) -> tuple[StorageLayout, list[SetNode]]:
        """Read the layout, and the writes that would leave it unchanged."""
        steps: list[SetNode] = []

        async def read(path: str, decode: Callable[[bytes], T]) -> T:
            node = await self._nodes.require(path)
            steps.append(SetNode(path, node.data, node.stat.version))
            return decode_node(path, node, decode)

        assignment = await read(self._paths.replica_assignment, model.ReplicaAssignments.from_bytes)
        groups = await read(self._paths.groups, model.GroupDescriptor.from_bytes)
        ports = await read(self._paths.connections, model.ConnectionMetadata.from_bytes)
        return StorageLayout(assignment, groups.groups, ports.admin_ports), steps


def _check_port(admin_port: int) -> None:
    if not 1 <= admin_port <= 65535:
        raise errors.BadConfig(f"expected an admin port in 1..65535, found {admin_port}")


def _without(values: Mapping[ReplicaId, T], address: ReplicaId) -> dict[ReplicaId, T]:
    return {each: value for each, value in values.items() if each != address}
