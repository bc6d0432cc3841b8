"""The writes that create a cluster's nodes, as a pure function of the options.

A cluster that was only partly created must never be mistaken for a complete one. The nodes are
those that the tools of Waltz 0.13 create (docs/zookeeper.md, "Creating a cluster").

Rules:
    1. The root's own data is written last. A root without data is not a cluster.
    2. A small cluster is created in one atomic write. A large cluster is created in several writes,
       each within ZooKeeper's limit for one request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self
from uuid import UUID

from waltz_core import errors
from waltz_core.cluster.membership.assignment import assign_replicas
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import (
    NO_NODE,
    CheckVersion,
    CreateNode,
    DeleteNode,
    Operation,
    SetNode,
)
from waltz_core.cluster.znodes.paths import ClusterPaths
from waltz_core.config.connect_string import check_address
from waltz_core.records.record import PartitionId, ReplicaId

# A request may have 1 MiB.
STEP_OPERATIONS_MAX = 1000
STEP_BYTES_MAX = 500_000
_OPERATION_BYTES = 100  # in addition to path and data


class NewStorage(NamedTuple):
    """A storage of a new cluster: its address "host:port", its admin port and its group."""

    address: ReplicaId
    admin_port: int
    group: int

    @classmethod
    def parse(cls, text: str, index: int) -> Self:
        """Parse HOST:PORT:ADMIN_PORT[:GROUP]; the default group is `index`.

        Raises BadConfig for any other text.
        """
        parts = text.rsplit(":", 3)
        if len(parts) == 4 and parts[1].isdigit():
            host, port, admin, group = parts
        else:
            host, port, admin = [*text.rsplit(":", 2), "", ""][:3]
            group = str(index)
        if not (host and port.isdigit() and admin.isdigit() and group.isdigit()):
            raise errors.BadConfig(
                f"--storage: expected HOST:PORT:ADMIN_PORT[:GROUP], found {text!r}"
            )
        return cls(ReplicaId(f"{host}:{port}"), int(admin), int(group))


@dataclass(frozen=True, slots=True)
class NewCluster:
    """The options of `cluster create`; raises BadConfig if they are not valid.

    The caller generates the cluster key at random. If `assignment` is None, each group of storages
    gets one replica of every partition.
    """

    name: str
    partition_count: int
    cluster_key: UUID
    storages: tuple[NewStorage, ...] = ()
    assignment: Mapping[ReplicaId, tuple[PartitionId, ...]] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise errors.BadConfig("the name of the cluster is empty")
        if not 1 <= self.partition_count <= model.INT32_MAX:
            raise errors.BadConfig(
                f"expected a partition count of at least 1, found {self.partition_count}"
            )
        addresses = [storage.address for storage in self.storages]
        for storage in self.storages:
            check_address(storage.address)
            if not 1 <= storage.admin_port <= 65535:
                raise errors.BadConfig(
                    f"storage {storage.address}: expected an admin port in 1..65535, found "
                    f"{storage.admin_port}"
                )
            if addresses.count(storage.address) > 1:
                raise errors.BadConfig(f"storage {storage.address} is named twice")
        for address, partitions in (self.assignment or {}).items():
            if address not in addresses:
                raise errors.BadConfig(
                    f"the assignment of replicas names {address}, which is not a storage of the "
                    "cluster"
                )
            if any(not 0 <= partition_id < self.partition_count for partition_id in partitions):
                raise errors.BadConfig(
                    f"the assignment of replicas gives storage {address} the partitions "
                    f"{list(partitions)}: expected partitions in 0..{self.partition_count - 1}"
                )

    @property
    def groups(self) -> dict[ReplicaId, int]:
        """The storages' groups, by address."""
        return {storage.address: storage.group for storage in self.storages}

    @property
    def replica_assignments(self) -> model.ReplicaAssignments:
        """The partitions of each storage."""
        if self.assignment is None:
            return assign_replicas(self.groups, self.partition_count)
        partitions_by_address = {
            address: self.assignment.get(address, ()) for address in self.groups
        }
        return model.ReplicaAssignments(partitions_by_address)


def creation_steps(
    paths: ClusterPaths,
    new: NewCluster,
    *,
    root_version: int,
    data_by_path: Mapping[str, bytes] | None = None,
    added_nodes: Sequence[CreateNode] = (),
) -> list[list[Operation]]:
    """Return the writes, in order; `root_version` is NO_NODE if the root does not exist.

    For a cluster that is rebuilt or restored, `data_by_path` contains the data that some nodes get
    instead of their initial data, and `added_nodes` are additional nodes.
    """
    store = model.StoreParams(new.cluster_key, new.partition_count)
    ports = {storage.address: storage.admin_port for storage in new.storages}
    operations: list[Operation] = [CreateNode(paths.root)] if root_version == NO_NODE else []
    operations += [
        CreateNode(paths.servers, model.PartitionAssignment().to_bytes()),
        CreateNode(paths.ids),
        CreateNode(paths.client_ids, model.encode_id_counter(0)),
        CreateNode(paths.server_ids, model.encode_id_counter(0)),
        CreateNode(paths.store, store.to_bytes()),
        CreateNode(paths.partitions),
        CreateNode(paths.groups, model.GroupDescriptor(new.groups).to_bytes()),
        CreateNode(paths.replica_assignment, new.replica_assignments.to_bytes()),
        CreateNode(paths.connections, model.ConnectionMetadata(ports).to_bytes()),
        CreateNode(paths.extensions),
        CreateNode(paths.markers),
        CreateNode(paths.storage_ids),
    ]
    marker = model.PartitionMarker(model.MarkerState.NEW).to_bytes()
    operations += [
        CreateNode(paths.marker(PartitionId(partition)), marker)
        for partition in range(new.partition_count)
    ]
    replaced = data_by_path or {}
    operations = [
        replace(operation, data=replaced[operation.path])
        if isinstance(operation, CreateNode) and operation.path in replaced
        else operation
        for operation in operations
    ]
    params = model.ClusterParams(new.name, new.partition_count).to_bytes()
    root = SetNode(paths.root, params, max(root_version, 0))  # rule 1
    return _split_into_steps([*operations, *added_nodes, root])


def _split_into_steps(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Split operations into writes (rule 2)."""
    steps: list[list[Operation]] = []
    free_bytes = 0
    for operation in operations:
        data = b"" if isinstance(operation, DeleteNode | CheckVersion) else operation.data or b""
        size = _OPERATION_BYTES + len(operation.path) + len(data)
        if not steps or size > free_bytes or len(steps[-1]) == STEP_OPERATIONS_MAX:
            steps.append([])
            free_bytes = STEP_BYTES_MAX
        steps[-1].append(operation)
        free_bytes -= size
    return steps
