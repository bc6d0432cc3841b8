"""The coordinator: all operations of servers, storages, clients and commands in ZooKeeper.

Each operation is a small protocol over the versions of znodes. A mistake in such a protocol can
lose data or give a partition two owners. The operations use only the interface `znodes.Znodes`, so
tests and the simulator run the same code with a ZooKeeper in memory.

Rules:
    1. Each write depends on the version that was read: no write is unconditional.
    2. A partition's metadata and marker change in one write and are read as one pair.
    3. A write with unknown outcome is treated neither as done nor as failed. If a new read can show
       the outcome, as for IDs and registrations, the coordinator reads again. If no read can show
       the outcome, the caller gets the error.
    4. Only the calls `follow_...` wait for long: they run until they are cancelled.

All operations raise CoordinatorUnavailable if ZooKeeper does not answer in time, and BadConfig if
there is no cluster. If a node cannot be decoded, they raise BadFormat with the path of the node.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Never
from uuid import UUID

from waltz_core import errors
from waltz_core.access.permissions import Permissions
from waltz_core.cluster.change.audit import AuditLog
from waltz_core.cluster.change.creation import NewCluster, NewStorage, creation_steps
from waltz_core.cluster.change.rebuilding import rebuilding_steps
from waltz_core.cluster.change.restoring import RestoredCluster, restoring_steps
from waltz_core.cluster.change.storage_changes import StorageChanges
from waltz_core.cluster.change.stored_permissions import StoredPermissions
from waltz_core.cluster.membership.applied_revisions import AppliedRevisions
from waltz_core.cluster.membership.assignment import check_replica_change
from waltz_core.cluster.membership.issued_ids import IssuedIds
from waltz_core.cluster.membership.loads import PublishedLoads
from waltz_core.cluster.membership.reachability import PublishedReachability
from waltz_core.cluster.membership.registration import Membership, Ownership, ServersView
from waltz_core.cluster.write_registry import WriteRegistry
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.interface import (
    NO_NODE,
    CreateNode,
    Node,
    Operation,
    SessionState,
    SetNode,
    Signal,
    StateCallback,
    Znodes,
)
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
from waltz_core.cluster.znodes.tree import FoundCluster, delete_tree, find_clusters
from waltz_core.records.record import ClientId, Generation, PartitionId, ReplicaId, ServerId

__all__ = [
    "ClusterView",
    "Coordinator",
    "NewCluster",
    "NewStorage",
    "Ownership",
    "PartitionVersions",
    "PartitionView",
    "ServersView",
    "SessionState",
]

ID_ATTEMPTS_MAX = 1000
READ_ATTEMPTS_MAX = 20
WRITE_ATTEMPTS_MAX = 20
# Health checks do not report an outage of ZooKeeper that is shorter than this number of session
# timeouts.
OUTAGE_TIMEOUTS_MAX = 2


class ClusterView(NamedTuple):
    """The properties of a cluster that never change: name, partition count and cluster key."""

    params: model.ClusterParams
    store: model.StoreParams


class PartitionVersions(NamedTuple):
    """The versions of a partition's two nodes; NO_NODE for a node that does not exist."""

    metadata: int
    marker: int


class PartitionView(NamedTuple):
    """A partition's two nodes, read as one pair; None for a node that does not exist."""

    metadata: model.PartitionMetadata | None
    metadata_version: int
    marker: model.PartitionMarker | None
    marker_version: int

    @property
    def versions(self) -> PartitionVersions:
        """The versions for `write_partition`."""
        return PartitionVersions(self.metadata_version, self.marker_version)


class Coordinator:
    """One process's session with ZooKeeper, as a member of one cluster."""

    def __init__(self, znodes: Znodes, root: str) -> None:
        self._znodes = znodes
        self._nodes = ClusterNodes(znodes, root)
        self._membership = Membership(self._nodes)
        self.writes = WriteRegistry(self._nodes)
        self.issued_ids = IssuedIds(self._nodes)
        self.storages = StorageChanges(self._nodes)
        self.audit = AuditLog(self._nodes)
        self.loads = PublishedLoads(self._nodes)
        self.reachability = PublishedReachability(self._nodes)
        self.permissions = StoredPermissions(self._nodes)
        self._applied_revisions = AppliedRevisions(self._nodes)
        self.paths = self._nodes.paths

    @property
    def connect_string(self) -> str:
        """The cluster's connect string, for messages to users."""
        return self._nodes.connect_string

    # --- the session

    @property
    def session_state(self) -> SessionState:
        """The state of the session with ZooKeeper."""
        return self._znodes.state

    @property
    def session_timeout_ms(self) -> int:
        """The time without heartbeats after which ZooKeeper ends the session."""
        return self._znodes.session_timeout_ms

    @property
    def was_connected_recently(self) -> bool:
        """Whether ZooKeeper is connected, or was a short time ago; for health checks.

        The cluster continues without ZooKeeper, and a process usually finds another ZooKeeper
        server soon. An outage of more than two session timeouts needs an operator.
        """
        limit_ms = OUTAGE_TIMEOUTS_MAX * self._znodes.session_timeout_ms
        return self._nodes.connection_history.disconnected_ms < limit_ms

    def on_session_state(self, callback: StateCallback) -> None:
        """Call back at each change of the session's state, on the event loop."""
        self._znodes.on_state(callback)

    async def check_administrator(self) -> None:
        """Raise BadConfig if the session has only the members' user, or does not know that user."""
        await self._znodes.check_administrator()
        # NB: an auth file with one user does not show whether this user is the members' user. With
        # the members' user, this read fails.
        await self._znodes.children(self.paths.audit)

    async def close(self) -> None:
        """End the session; the node of a registered server is deleted at once."""
        await self._znodes.close()

    # --- the cluster

    async def read_cluster(self) -> ClusterView:
        """Read the cluster's constants."""
        root = await self._znodes.get(self.paths.root)
        if root is None or not root.data:
            raise self._nodes.no_cluster_error()
        params = decode_node(self.paths.root, root, model.ClusterParams.from_bytes)
        store = await self._nodes.read(self.paths.store, model.StoreParams.from_bytes)
        if params.partition_count != store.partition_count:
            raise errors.BadFormat(
                f"the znodes contradict each other: {self.paths.root} has "
                f"{params.partition_count} partitions, {self.paths.store} has "
                f"{store.partition_count}"
            )
        return ClusterView(params, store)

    async def create_cluster(self, new: NewCluster) -> None:
        """Create all nodes of a cluster, with each partition marked as new.

        docs/zookeeper.md, "Creating a cluster", lists the nodes. Raises CoordinatorConflict if
        there is a cluster already, or the remains of one.
        """
        await self._create(
            new, lambda version: creation_steps(self.paths, new, root_version=version)
        )

    async def create_rebuilt_cluster(self, new: NewCluster, ids: int) -> None:
        """Create the nodes of a cluster that is rebuilt from its storages (rebuilding.py).

        Client IDs and generations continue from `ids`.
        """
        await self._create(
            new, lambda version: rebuilding_steps(self.paths, new, root_version=version, ids=ids)
        )

    async def create_restored_cluster(self, new: NewCluster, restored: RestoredCluster) -> None:
        """Create the nodes of a cluster that is restored from a backup (restoring.py)."""
        await self._create(
            new, lambda version: restoring_steps(self.paths, new, restored, root_version=version)
        )

    async def read_restore_sources(self) -> RestoreSources:
        """Read the clusters from whose backups this cluster was restored."""
        path = self.paths.restore_sources
        node = await self._znodes.get(path)
        return (
            NO_RESTORE_SOURCES
            if node is None
            else decode_node(path, node, RestoreSources.from_bytes)
        )

    async def _create(
        self, new: NewCluster, make_steps: Callable[[int], list[list[Operation]]]
    ) -> None:
        """Create the nodes of a cluster; `make_steps` returns the writes for a root's version."""
        root = self.paths.root
        parents = [root[:end] for end in range(1, len(root)) if root[end] == "/"]
        await self._nodes.create_missing(parents)
        for step in make_steps(await self._root_version_without_cluster()):
            try:
                await self._znodes.write(step)
            except errors.CoordinatorOutcomeUnknown:
                if not await self._is_own_creation(new):
                    raise
            except errors.CoordinatorConflict as conflict:
                await self._root_version_without_cluster()
                raise errors.CoordinatorConflict(
                    f"cannot create a cluster at {self.connect_string}: it has znodes of a cluster "
                    "that another command is creating, or the remains of an unfinished one "
                    f"({conflict}). Hint: if no other command runs, delete the znodes with "
                    "`waltz-core cluster delete`."
                ) from conflict

    async def _root_version_without_cluster(self) -> int:
        """Return the root's version, or NO_NODE; raises CoordinatorConflict if it has a cluster."""
        node = await self._znodes.get(self.paths.root)
        if node is not None and node.data:
            raise errors.CoordinatorConflict(f"a cluster exists already at {self.connect_string}")
        return NO_NODE if node is None else node.stat.version

    async def _is_own_creation(self, new: NewCluster) -> bool:
        await self._znodes.sync()
        node = await self._znodes.get(self.paths.store)
        root = await self._znodes.get(self.paths.root)
        if node is None or root is None or not root.data:
            return False
        store = decode_node(self.paths.store, node, model.StoreParams.from_bytes)
        return store.cluster_key == new.cluster_key

    async def find_clusters(self, parent_path: str) -> list[FoundCluster]:
        """Return all clusters at a path of this ZooKeeper or below it."""
        return await find_clusters(self._znodes, parent_path)

    async def root_of(self, cluster_key: UUID) -> str | None:
        """Return the root of the cluster with this key in this ZooKeeper; None if there is none."""
        for root, _ in await self.find_clusters("/"):
            if (await self.for_root(root).read_cluster()).store.cluster_key == cluster_key:
                return root
        return None

    def for_root(self, root: str) -> "Coordinator":
        """Return a coordinator for another cluster, over the same session."""
        return Coordinator(self._znodes, root)

    async def delete_cluster(self, on_progress: Callable[[int, int], None]) -> int:
        """Delete all nodes of the cluster, or its remains; return the number of deleted nodes.

        The caller must know that the cluster is not needed any more. `on_progress` receives the
        number of deleted nodes and the total number.
        """
        return await delete_tree(self._znodes, self.paths.root, on_progress)

    # --- IDs

    async def last_client_id(self) -> ClientId:
        """Return the last allocated client ID."""
        await self._znodes.sync()
        return ClientId(await self._nodes.read(self.paths.client_ids, model.decode_id_counter))

    async def next_client_id(self) -> ClientId:
        """Allocate a client ID that was never used before, without a server."""
        return ClientId(await self._next_id(self.paths.client_ids))

    async def next_server_id(self) -> ServerId:
        """Allocate a server ID that was never used before."""
        return ServerId(await self._next_id(self.paths.server_ids))

    async def _next_id(self, path: str) -> int:
        for _ in range(ID_ATTEMPTS_MAX):
            node = await self._nodes.get_required(path)
            last_id = decode_node(path, node, model.decode_id_counter)
            if last_id == model.INT32_MAX:
                raise errors.BadFormat(
                    f"cannot allocate an ID from {path}: all IDs up to {last_id} are allocated"
                )
            try:
                await self._znodes.write(
                    [SetNode(path, model.encode_id_counter(last_id + 1), node.stat.version)]
                )
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                continue  # An ID that may have been allocated is skipped.
            return last_id + 1
        raise errors.CoordinatorUnavailable(
            f"cannot allocate an ID from {path}: other processes changed it during each of "
            f"{ID_ATTEMPTS_MAX} attempts"
        )

    async def increase_ids(
        self, client_id: ClientId, generations: Mapping[PartitionId, Generation]
    ) -> None:
        """Raise the last client ID, and the generation of each partition, for a rebuilt cluster.

        See rebuilding.py, rule 5.
        """
        path = self.paths.client_ids
        for _ in range(ID_ATTEMPTS_MAX):
            node = await self._nodes.get_required(path)
            if decode_node(path, node, model.decode_id_counter) >= client_id:
                return await self._membership.increase_generations(generations)
            step = SetNode(path, model.encode_id_counter(client_id), node.stat.version)
            with suppress(errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._znodes.write([step])
        raise errors.CoordinatorUnavailable(
            f"cannot change {path}: other processes changed it during each of "
            f"{ID_ATTEMPTS_MAX} attempts"
        )

    # --- partitions

    async def read_partition(self, partition_id: PartitionId) -> PartitionView:
        """Read metadata and marker as one pair, which includes all writes before the call."""
        await self._znodes.sync()
        path = self.paths.partition(partition_id)
        marker_path = self.paths.marker(partition_id)
        before = await self._znodes.get(path)
        for _ in range(READ_ATTEMPTS_MAX):
            marker = await self._znodes.get(marker_path)
            after = await self._znodes.get(path)
            # Both nodes change in the same write. So if the metadata did not change while the
            # marker was read, the two belong together.
            if _node_version(before) == _node_version(after):
                return PartitionView(
                    _decode_metadata(path, after, partition_id),
                    _node_version(after),
                    _decode_marker(marker_path, marker),
                    _node_version(marker),
                )
            before = after
        raise errors.CoordinatorUnavailable(
            f"cannot read {path}: other processes changed it during each attempt"
        )

    async def write_partition(
        self,
        partition_id: PartitionId,
        metadata: model.PartitionMetadata,
        marker: model.PartitionMarker,
        expected: PartitionVersions,
    ) -> PartitionVersions:
        """Write metadata and marker in one compare-and-set, and return their new versions.

        If either node is not at its expected version, the method writes nothing, and raises
        CoordinatorConflict. If the answer is lost, the method raises CoordinatorOutcomeUnknown. The
        caller then reads the nodes again, and compares session and nonce
        (docs/design/correctness.md 2.1 B).
        """
        if NO_NODE in expected:
            parents = (self.paths.partitions, self.paths.extensions, self.paths.markers)
            await self._nodes.create_missing(parents)
        path, data = self.paths.partition(partition_id), metadata.to_bytes(partition_id)
        steps: list[Operation] = []
        if expected.metadata == NO_NODE:
            # As in Waltz 0.13, version 0 of the node is empty metadata, and the first store session
            # writes version 1.
            steps.append(CreateNode(path, model.EMPTY_METADATA.to_bytes(partition_id)))
        steps.append(SetNode(path, data, max(expected.metadata, 0)))
        marker_path = self.paths.marker(partition_id)
        if expected.marker == NO_NODE:
            steps.append(CreateNode(marker_path, marker.to_bytes()))
        else:
            steps.append(SetNode(marker_path, marker.to_bytes(), expected.marker))
        *_, metadata_version, marker_version = await self._znodes.write(steps)
        return PartitionVersions(metadata_version, marker_version)

    # --- storages

    async def read_replica_assignment(self) -> model.ReplicaAssignments:
        """Read the replica assignment: the partitions of each storage."""
        return await self._nodes.read(
            self.paths.replica_assignment, model.ReplicaAssignments.from_bytes
        )

    async def read_connections(self) -> model.ConnectionMetadata:
        """Read the admin ports of the storages."""
        return await self._nodes.read(self.paths.connections, model.ConnectionMetadata.from_bytes)

    async def read_groups(self) -> model.GroupDescriptor:
        """Read the groups of the storages."""
        return await self._nodes.read(self.paths.groups, model.GroupDescriptor.from_bytes)

    async def update_replica_assignment(
        self, change: Callable[[model.ReplicaAssignments], model.ReplicaAssignments]
    ) -> model.ReplicaAssignments:
        """Replace the replica assignment by the result of `change`; return the new assignment.

        After a concurrent write, `change` is called again. Raises BadRequest if `change` adds too
        many replicas to a partition at once (docs/design/correctness.md 2.4, row 36).
        """
        path = self.paths.replica_assignment
        partition_count = (await self.read_cluster()).params.partition_count
        for _ in range(WRITE_ATTEMPTS_MAX):
            node = await self._nodes.get_required(path)
            old = decode_node(path, node, model.ReplicaAssignments.from_bytes)
            new = change(old)
            check_replica_change(old, new, partition_count)
            try:
                await self._znodes.write([SetNode(path, new.to_bytes(), node.stat.version)])
            except errors.CoordinatorConflict:
                continue
            return new
        raise errors.CoordinatorUnavailable(
            f"cannot change {path}: other processes changed it during each attempt"
        )

    async def register_storage_id(self, address: ReplicaId, storage_id: UUID) -> UUID:
        """Register the storage at `address`; return the ID that is registered for this address.

        The first storage stays registered: a result other than `storage_id` means that another
        storage belongs to this address.
        """
        path = self.paths.storage_id(address)
        data = model.StorageRegistration(storage_id).to_bytes()
        for _ in range(WRITE_ATTEMPTS_MAX):
            await self._nodes.create_missing((self.paths.extensions, self.paths.storage_ids))
            node = await self._znodes.get(path)
            if node is not None:
                return decode_node(path, node, model.StorageRegistration.from_bytes).storage_id
            try:
                await self._znodes.write([CreateNode(path, data)])
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._znodes.sync()
                continue
            return storage_id
        raise errors.CoordinatorUnavailable(
            f"the znode {path} could not be created to register this process"
        )

    async def read_storage_ids(self) -> dict[ReplicaId, UUID]:
        """Read the registered ID of each storage."""
        listing = await self._znodes.children(self.paths.storage_ids)
        storage_ids: dict[ReplicaId, UUID] = {}
        for name in () if listing is None else listing.names:
            path = self.paths.storage_id(ReplicaId(name))
            node = await self._znodes.get(path)
            if node is not None:
                registration = decode_node(path, node, model.StorageRegistration.from_bytes)
                storage_ids[ReplicaId(name)] = registration.storage_id
        return storage_ids

    async def follow_replica_assignment(
        self, callback: Callable[[model.ReplicaAssignments], None]
    ) -> Never:
        """Call back with the replica assignment, now and at each change, until cancelled."""
        path = self.paths.replica_assignment
        last: model.ReplicaAssignments | None = None

        async def check(signal: Signal) -> None:
            nonlocal last
            current = await self._nodes.read(path, model.ReplicaAssignments.from_bytes, signal)
            if current != last:
                last = current
                callback(current)

        await self._nodes.follow(check)

    async def follow_permissions(
        self,
        callback: Callable[[Permissions | None], None],
        on_not_published: Callable[[errors.WaltzError], None] = lambda _: None,
    ) -> Never:
        """Call back with the permissions, None if the node is missing, now and at each change.

        The method also publishes the revision that `set_applied_revision` has set. If the revision
        cannot be published, `on_not_published` receives the error, and the method continues to
        follow the permissions.
        """
        path = self.paths.access
        last: bytes | None = b""  # not read yet: the node is never empty

        async def check(signal: Signal) -> None:
            nonlocal last
            node = await self._znodes.get(path, signal)
            data = None if node is None else node.data
            try:
                if data != last:
                    callback(
                        None
                        if node is None
                        else decode_node(path, node, access_node.decode_permissions)
                    )
                    last = data
            finally:  # A new session publishes again, even while the node cannot be decoded.
                try:
                    await self._applied_revisions.publish()
                except (errors.BadConfig, errors.CoordinatorConflict) as error:
                    on_not_published(error)

        await self._nodes.follow(check)

    def set_applied_revision(self, name: str, revision: int) -> None:
        """Set the permissions revision that this daemon uses and will publish (decision 048, AC 6).

        The callback of `follow_permissions` calls this method. `follow_permissions` then publishes
        the revision, and publishes it again in each new session. `membership/applied_revisions.py`
        describes the names of daemons.
        """
        self._applied_revisions.set_revision(name, revision)

    async def read_applied_revisions(self) -> dict[str, int]:
        """Read the revision that each daemon uses, by daemon name, not older than the call.

        Daemons without access control are not included.
        """
        return await self._applied_revisions.read()

    # --- servers

    async def register_server(self, descriptor: model.ServerDescriptor) -> None:
        """Register this process as a live server, or change its registration.

        The node exists as long as the session. After a lost session, `follow_servers` registers the
        same server ID again. From now on, `follow_servers` also does the work of the leader
        whenever this process has the smallest live server ID.
        """
        await self._membership.register(descriptor)

    async def change_preferences(self, descriptor: model.ServerDescriptor) -> None:
        """Change the preferred partitions of this server, and assign all partitions again."""
        await self._membership.change_preferences(descriptor)

    def keep_owners(self) -> None:
        """While this process is the leader, move partitions by load, not by count."""
        self._membership.keeps_owners = True

    async def move_partitions(
        self, expected_view: ServersView, moves: Mapping[PartitionId, ServerId]
    ) -> bool:
        """As the leader, move partitions; return False if servers or ownership have changed."""
        return await self._membership.move_partitions(expected_view, moves)

    async def unregister_server(self) -> None:
        """Remove this process from the live servers (a clean shutdown)."""
        await self._membership.unregister()

    async def remove_dead_server(self, dead: model.ServerDescriptor) -> None:
        """Remove another server whose process is known to be dead, if it is still registered."""
        await self._membership.remove_dead_server(dead)

    async def hand_over(self, partition_id: PartitionId, generation: Generation) -> bool:
        """Assign a partition of this process to another server; return False if there is none."""
        return await self._membership.hand_over(partition_id, generation)

    async def read_servers(self) -> ServersView:
        """Read the live servers and their partitions, even if the assignment is out of date."""
        return await self._membership.read()

    async def read_latest_servers(self) -> ServersView:
        """Return the same as `read_servers`, including all writes before this call."""
        await self._znodes.sync()
        return await self._membership.read()

    async def follow_servers(self, callback: Callable[[ServersView], None]) -> Never:
        """Call back with each settled view, and with the view without servers, until cancelled."""
        await self._membership.follow(callback)


def _node_version(node: Node | None) -> int:
    return NO_NODE if node is None else node.stat.version


def _decode_metadata(
    path: str, node: Node | None, partition_id: PartitionId
) -> model.PartitionMetadata | None:
    if node is None:
        return None
    return decode_node(
        path, node, lambda data: model.PartitionMetadata.from_bytes(data, partition_id)
    )


def _decode_marker(path: str, node: Node | None) -> model.PartitionMarker | None:
    return None if node is None else decode_node(path, node, model.PartitionMarker.from_bytes)
