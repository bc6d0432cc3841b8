"""Registers live servers; on the leader, keeps the assignment of partitions up to date.

All processes read the live servers. Only the live server with the smallest ID, the leader, assigns
partitions.

Rules (docs/zookeeper.md, "Membership and assignment"):
    1. An assignment is settled while its `cversion` equals the child version of its node. A settled
       assignment was written for exactly the registered servers. Only settled assignments are
       passed to callbacks.
    2. The leader computes the assignments. Exceptions: a server that changes its own preferences,
       or hands over a partition, writes the new assignment itself. Each assignment is written at
       the version that was read; after a conflict, the state is read again.
    3. A registered server whose session was lost registers again, under the same server ID.
    4. A server that registers for the first time removes the nodes of earlier processes at its
       address.
    5. After an outage of ZooKeeper, sessions may have ended although no server has died. Therefore,
       for one session timeout after the outage (at least `REGISTRATION_GRACE_MS_MIN`), the leader
       waits for owners that have not registered again, and writes no assignment. A server that
       changes its own preferences waits in the same way. No process waits for a server that is
       known to be dead: `remove_dead_server` was called for it, or another process is registered at
       its address.
    6. An assignment includes only the servers that may own partitions (`reachability.py`). When
       this set changes, the leader writes a new assignment, even if the live servers are the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Never

from waltz_core import errors
from waltz_core.cluster.membership.assignment import (
    assign_partitions,
    hand_over_partition,
    is_assignment_current,
    move_partitions,
    with_minimum_generations,
)
from waltz_core.cluster.membership.reachability import PublishedReachability, eligible_servers
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import (
    CreateNode,
    DeleteNode,
    NodeStat,
    Operation,
    SetNode,
    Signal,
)
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.cluster.znodes.paths import DESCRIPTOR_PREFIX
from waltz_core.records.record import Generation, PartitionId, ServerId

READ_ATTEMPTS_MAX = 20
WRITE_ATTEMPTS_MAX = 20
# Processes reconnect within two seconds after an outage of ZooKeeper, even if their session timeout
# is shorter.
REGISTRATION_GRACE_MS_MIN = 3_000


class Ownership(NamedTuple):
    """The owner of a partition, and the generation of its ownership."""

    server_id: ServerId
    generation: Generation


@dataclass(frozen=True, slots=True)
class ServersView:
    """The live servers and the partitions that they own.

    `is_settled` means that the assignment was written for exactly these servers. `follow` reports
    only settled views, and the view without any server.
    """

    servers: Mapping[ServerId, model.ServerDescriptor]
    owners: Mapping[PartitionId, Ownership]
    is_settled: bool
    # Live servers that get no partitions, because no other server can connect to them (rule 6).
    excluded: frozenset[ServerId] = frozenset()
    # Servers in the assignment that are not registered. They may still run without a session.
    unregistered: frozenset[ServerId] = field(default=frozenset(), compare=False)

    def partitions_of(self, server_id: ServerId) -> dict[PartitionId, Generation]:
        """Return the generations of the partitions that a server owns."""
        return {
            partition_id: owner.generation
            for partition_id, owner in self.owners.items()
            if owner.server_id == server_id
        }


class _RegisteredServer(NamedTuple):
    path: str
    descriptor: model.ServerDescriptor
    stat: NodeStat


class _MembershipNodes(NamedTuple):
    stat: NodeStat
    assignment: model.PartitionAssignment
    registered: tuple[_RegisteredServer, ...]

    @property
    def servers(self) -> dict[ServerId, model.ServerDescriptor]:
        ordered = sorted(self.registered, key=lambda server: server.descriptor.server_id)
        return {server.descriptor.server_id: server.descriptor for server in ordered}


class Membership:
    """The live servers, as one process reads them; for a server, also its own registration."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._reachability = PublishedReachability(nodes)
        # The wanted registration of this process; None while it does not serve.
        self._descriptor: model.ServerDescriptor | None = None
        # For rule 5: the last known address of each server, the servers known to be dead, and the
        # signals of callers that wait for owners.
        self._addresses: dict[ServerId, str] = {}
        self._dead_servers: set[ServerId] = set()
        self._waiting_signals: dict[Signal, None] = {}
        # Whether partitions move by load and not by count (assignment.py, invariant 5).
        self.keeps_owners = False

    async def register(self, descriptor: model.ServerDescriptor) -> None:
        """Register this process as a live server, or change its registration.

        The node exists as long as the session. After a lost session, `follow` registers the same
        server ID again. From now on, `follow` also does the work of the leader whenever this
        process has the smallest live server ID.
        """
        self._descriptor = descriptor
        for _ in range(WRITE_ATTEMPTS_MAX):
            try:
                membership = await self._read_membership()
                if await self._remove_earlier_registrations(membership, descriptor):
                    continue
                if await self._ensure_registered(membership, descriptor):
                    return
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._nodes.znodes.sync()
        raise errors.CoordinatorUnavailable(
            f"server {descriptor.server_id} could not be registered at "
            f"{self._nodes.connect_string}, "
            f"because other processes changed its znodes during each of {WRITE_ATTEMPTS_MAX} "
            "attempts"
        )

    async def unregister(self) -> None:
        """Remove this process from the live servers (a clean shutdown).

        Raises CoordinatorUnavailable if the node may still exist.
        """
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is None:
            return
        for _ in range(WRITE_ATTEMPTS_MAX):
            own_nodes = self._own_nodes(await self._read_membership(), descriptor.server_id)
            if not own_nodes:
                return
            try:
                await self._nodes.znodes.write(
                    [DeleteNode(node.path, node.stat.version) for node in own_nodes]
                )
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._nodes.znodes.sync()
        raise self._conflict_error()

    async def change_preferences(self, descriptor: model.ServerDescriptor) -> None:
        """Change the preferred partitions of this server, and write a new assignment at once.

        Registration and assignment change in one write, so that no process sees only one of the two
        changes. Rule 5 may delay this write. If the write is not possible, nothing has changed, and
        the method raises CoordinatorUnavailable.
        """
        partition_count = await self._read_partition_count()
        old_descriptor = self._descriptor
        try:
            for _ in range(WRITE_ATTEMPTS_MAX):
                await self._wait_for_owners()
                self._descriptor = descriptor
                try:
                    if await self._try_change_preferences(descriptor, partition_count):
                        return
                except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                    await self._nodes.znodes.sync()
        except BaseException:  # also when the caller is cancelled
            if self._descriptor is not None:
                self._descriptor = old_descriptor
            raise
        self._descriptor = old_descriptor
        raise self._conflict_error()

    def _conflict_error(self) -> errors.CoordinatorUnavailable:
        return errors.CoordinatorUnavailable(
            f"cannot change {self._nodes.paths.servers}: other processes changed it during "
            "each attempt"
        )

    async def _wait_for_owners(self) -> None:
        """Wait while owners may register again (rule 5); raises if this process unregisters."""
        signal = self._nodes.znodes.new_signal()
        try:
            while self._is_waiting_for_owners(await self._read_membership(signal), signal):
                await signal.wait()
                signal.clear()
        finally:
            self._waiting_signals.pop(signal, None)
            self._nodes.znodes.drop_signal(signal)
        if self._descriptor is None:
            raise errors.CoordinatorUnavailable("this server is leaving the cluster")

    async def _try_change_preferences(
        self, descriptor: model.ServerDescriptor, partition_count: int
    ) -> bool:
        """Write descriptor and assignment; return False if another change must come first."""
        membership = await self._read_membership()
        if self._grace_left_ms(membership) > 0:
            return False
        own_nodes = self._own_nodes(membership, descriptor.server_id)
        if len(own_nodes) != 1:
            await self._ensure_registered(membership, descriptor)
            return False
        servers = {**membership.servers, descriptor.server_id: descriptor}
        may_own = await self._eligible_servers(membership)
        assignment = assign_partitions(
            membership.assignment,
            {server_id: server for server_id, server in servers.items() if server_id in may_own},
            cversion=membership.stat.cversion,
            partition_count=partition_count,
            keeps_owners=self.keeps_owners,
        )
        await self._nodes.znodes.write(
            [
                SetNode(own_nodes[0].path, descriptor.to_bytes(), own_nodes[0].stat.version),
                SetNode(self._nodes.paths.servers, assignment.to_bytes(), membership.stat.version),
            ]
        )
        return True

    async def move_partitions(
        self, expected_view: ServersView, moves: Mapping[PartitionId, ServerId]
    ) -> bool:
        """Move partitions between live servers; return False if servers or owners have changed.

        If the method returns False, no partition has moved, and the caller plans again.
        """
        partition_count = await self._read_partition_count()
        membership = await self._read_membership()
        if (
            not self._is_leader(expected_view)
            or _servers_view(membership, partition_count) != expected_view
        ):
            return False
        assignment = move_partitions(membership.assignment, moves)
        step = SetNode(self._nodes.paths.servers, assignment.to_bytes(), membership.stat.version)
        try:
            await self._nodes.znodes.write([step])
        except errors.CoordinatorConflict:
            return False
        return True

    async def increase_generations(self, at_least: Mapping[PartitionId, Generation]) -> None:
        """Raise generations in the assignment that are below `at_least`; owners stay the same.

        Raises CoordinatorUnavailable if other processes write the assignment during each attempt.
        """
        for _ in range(WRITE_ATTEMPTS_MAX):
            membership = await self._read_membership()
            new_assignment = with_minimum_generations(membership.assignment, at_least)
            if new_assignment == membership.assignment:
                return
            step = SetNode(
                self._nodes.paths.servers, new_assignment.to_bytes(), membership.stat.version
            )
            try:
                await self._nodes.znodes.write([step])
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._nodes.znodes.sync()
        raise errors.CoordinatorUnavailable(
            f"cannot change {self._nodes.paths.servers}: other processes changed it during "
            f"each of {WRITE_ATTEMPTS_MAX} attempts"
        )

    async def remove_dead_server(self, dead: model.ServerDescriptor) -> None:
        """Delete the node, if it still exists, of a server whose process is known to be dead.

        Without this call, the server's partitions would move only some seconds later, when its
        session ends. Safety does not depend on this deletion, but on fencing. Raises
        CoordinatorUnavailable if the node may still exist.
        """
        for _ in range(WRITE_ATTEMPTS_MAX):
            membership = await self._read_membership()
            nodes = [node for node in membership.registered if node.descriptor == dead]
            if not nodes:
                self._note_dead_server(dead.server_id)
                return
            try:
                await self._nodes.znodes.write(
                    [DeleteNode(node.path, node.stat.version) for node in nodes]
                )
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._nodes.znodes.sync()
        raise self._conflict_error()

    async def hand_over(self, partition_id: PartitionId, generation: Generation) -> bool:
        """Assign a partition of this process to another live server.

        The same write removes this server's preference for the partition. Without this removal, the
        next assignment would give the partition back to this server. `change_preferences` can set
        the preference again.

        Returns False if there is no other server, or if this process does not own the partition any
        more. Raises CoordinatorUnavailable if ZooKeeper does not answer.
        """
        old_descriptor = self._descriptor
        if old_descriptor is None:
            return False
        preferred = tuple(
            preferred_id
            for preferred_id in old_descriptor.preferred
            if preferred_id != partition_id
        )
        is_done = False
        try:
            new_descriptor = replace(old_descriptor, preferred=preferred)
            is_done = await self._try_hand_over(new_descriptor, partition_id, generation)
        finally:  # also when the caller is cancelled
            if not is_done and self._descriptor is not None:
                self._descriptor = old_descriptor
        return is_done

    async def _try_hand_over(
        self,
        new_descriptor: model.ServerDescriptor,
        partition_id: PartitionId,
        generation: Generation,
    ) -> bool:
        """Write descriptor and assignment; return False if the partition cannot be handed over."""
        partition_count = await self._read_partition_count()
        server_id, is_outcome_unknown = new_descriptor.server_id, False
        for _ in range(WRITE_ATTEMPTS_MAX):
            membership = await self._read_membership()
            if (
                self._descriptor is None
                or not _servers_view(membership, partition_count).is_settled
            ):
                return False  # The leader is about to write another assignment.
            own_nodes = self._own_nodes(membership, server_id)
            assignment = hand_over_partition(
                membership.assignment, partition_id, generation, server_id
            )
            if assignment is None or len(own_nodes) != 1:
                owned = membership.assignment.servers.get(server_id, {})
                return is_outcome_unknown and owned.get(partition_id) != generation
            # Set the descriptor before the write; otherwise `follow` would restore the old one.
            self._descriptor = new_descriptor
            try:
                await self._nodes.znodes.write(
                    [
                        SetNode(
                            own_nodes[0].path, new_descriptor.to_bytes(), own_nodes[0].stat.version
                        ),
                        SetNode(
                            self._nodes.paths.servers,
                            assignment.to_bytes(),
                            membership.stat.version,
                        ),
                    ]
                )
            except errors.CoordinatorConflict:
                await self._nodes.znodes.sync()
            except errors.CoordinatorOutcomeUnknown:
                is_outcome_unknown = True
                await self._nodes.znodes.sync()
            else:
                return True
        return False

    async def read(self) -> ServersView:
        """Read the live servers and their partitions, even if the assignment is out of date."""
        partition_count = await self._read_partition_count()
        return _servers_view(await self._read_membership(), partition_count)

    async def follow(self, callback: Callable[[ServersView], None]) -> Never:
        """Call back with each settled view (rule 1), and if no server is live, until cancelled.

        While this process is registered, this method also keeps it registered. If this process is
        the leader, the method also computes the assignments (rules 1 and 2).
        """
        partition_count: int | None = None
        last: ServersView | None = None

        async def check(signal: Signal) -> None:
            nonlocal last, partition_count
            if partition_count is None:
                partition_count = await self._read_partition_count()
            membership = await self._read_membership(signal)
            self._remember_addresses(membership)
            descriptor = self._descriptor
            if descriptor and not await self._ensure_registered(membership, descriptor):
                return  # The registration has changed the nodes; a signal follows.
            view = _servers_view(membership, partition_count)
            if view != last and (view.is_settled or not view.servers):
                last = view
                callback(view)
            if view.servers and self._is_leader(view):
                await self._run_leader_duties(membership, view, signal)

        await self._nodes.follow(check)

    async def _run_leader_duties(
        self, membership: _MembershipNodes, view: ServersView, signal: Signal
    ) -> None:
        """As the leader, write a new assignment if one is necessary (rules 1, 2, 5, 6)."""
        may_own = await self._eligible_servers(membership, signal)
        is_due = not view.is_settled or may_own != membership.assignment.servers.keys()
        if is_due and not self._is_waiting_for_owners(membership, signal):
            await self._write_assignment(membership, may_own)

    async def _eligible_servers(
        self, membership: _MembershipNodes, signal: Signal | None = None
    ) -> frozenset[ServerId]:
        """Return the live servers that may own partitions."""
        live = membership.servers.keys()
        if len(live) < 2:
            return frozenset(live)  # the last server takes over without another read
        reports = await self._reachability.read(live, signal)
        return eligible_servers(live, membership.assignment.servers.keys(), reports)

    def _is_leader(self, view: ServersView) -> bool:
        return self._descriptor is not None and self._descriptor.server_id == min(view.servers)

    def _remember_addresses(self, membership: _MembershipNodes) -> None:
        registered, assigned = membership.servers, membership.assignment.servers
        self._dead_servers = {
            server_id
            for server_id in self._dead_servers
            if server_id in assigned and server_id not in registered
        }
        self._addresses = {
            server_id: address
            for server_id, address in self._addresses.items()
            if server_id in assigned
        } | {server_id: descriptor.address for server_id, descriptor in registered.items()}

    def _note_dead_server(self, server_id: ServerId) -> None:
        self._dead_servers.add(server_id)
        for signal in list(self._waiting_signals):
            signal.set()

    def _is_waiting_for_owners(self, membership: _MembershipNodes, signal: Signal) -> bool:
        """Whether owners may still register again; if so, `signal` is set when the wait is over."""
        remaining_ms = self._grace_left_ms(membership)
        if remaining_ms <= 0:
            self._waiting_signals.pop(signal, None)
            return False
        self._waiting_signals[signal] = None
        self._nodes.znodes.set_signal_later(signal, remaining_ms)
        return True

    def _grace_left_ms(self, membership: _MembershipNodes) -> int:
        """Return the time left, in ms, for owners to register again; 0 if none is awaited."""
        reconnected_ms = self._nodes.connection_history.reconnected_ms
        grace_ms = max(self._nodes.znodes.session_timeout_ms, REGISTRATION_GRACE_MS_MIN)
        if (
            reconnected_ms is None
            or reconnected_ms >= grace_ms
            or not self._awaited_owners(membership)
        ):
            return 0
        return grace_ms - reconnected_ms

    def _awaited_owners(self, membership: _MembershipNodes) -> list[ServerId]:
        """Return the owners that are neither registered nor known to be dead (rule 5)."""
        registered = membership.servers
        used_addresses = {descriptor.address for descriptor in registered.values()}
        return [
            server_id
            for server_id, owned in membership.assignment.servers.items()
            if owned
            and server_id not in registered
            and server_id not in self._dead_servers
            and self._addresses.get(server_id) not in used_addresses
        ]

    async def _write_assignment(
        self, membership: _MembershipNodes, may_own: frozenset[ServerId]
    ) -> None:
        assignment = assign_partitions(
            membership.assignment,
            {
                server_id: server
                for server_id, server in membership.servers.items()
                if server_id in may_own
            },
            cversion=membership.stat.cversion,
            partition_count=await self._read_partition_count(),
            keeps_owners=self.keeps_owners,
        )
        step = SetNode(self._nodes.paths.servers, assignment.to_bytes(), membership.stat.version)
        await self._nodes.znodes.write([step])

    async def _ensure_registered(
        self, membership: _MembershipNodes, descriptor: model.ServerDescriptor
    ) -> bool:
        """Write this process's node unless the node is correct; return whether it was correct."""
        own_nodes = self._own_nodes(membership, descriptor.server_id)
        if len(own_nodes) == 1 and own_nodes[0].descriptor == descriptor:
            return True
        step: Operation
        if not own_nodes:
            prefix, data = self._nodes.paths.descriptor_prefix, descriptor.to_bytes()
            step = CreateNode(prefix, data, is_ephemeral=True, is_sequential=True)
        elif len(own_nodes) == 1:
            step = SetNode(own_nodes[0].path, descriptor.to_bytes(), own_nodes[0].stat.version)
        else:
            # Two attempts to register have both succeeded.
            step = DeleteNode(own_nodes[-1].path, own_nodes[-1].stat.version)
        await self._nodes.znodes.write([step])
        return False

    async def _remove_earlier_registrations(
        self, membership: _MembershipNodes, descriptor: model.ServerDescriptor
    ) -> bool:
        """Delete the nodes of earlier processes at this address; return True if there were any.

        Because this process listens at the address, the earlier processes are dead. So their
        partitions can move before their sessions end. Safety does not depend on this deletion, but
        on fencing.
        """
        dead = [
            node
            for node in membership.registered
            if node.descriptor.address == descriptor.address
            and node.descriptor.server_id < descriptor.server_id
        ]
        if dead:
            await self._nodes.znodes.write(
                [DeleteNode(node.path, node.stat.version) for node in dead]
            )
        return bool(dead)

    def _own_nodes(
        self, membership: _MembershipNodes, server_id: ServerId
    ) -> list[_RegisteredServer]:
        # The node of an earlier session of this process is ignored, because ZooKeeper is about to
        # delete it.
        session = self._nodes.znodes.session_number
        return [
            node
            for node in membership.registered
            if node.descriptor.server_id == server_id and node.stat.owner == session
        ]

    async def _read_partition_count(self) -> int:
        params = await self._nodes.read(self._nodes.paths.root, model.ClusterParams.from_bytes)
        return params.partition_count

    async def _read_membership(self, signal: Signal | None = None) -> _MembershipNodes:
        path = self._nodes.paths.servers
        for _ in range(READ_ATTEMPTS_MAX):
            node = await self._nodes.get_required(path, signal)
            listing = await self._nodes.znodes.children(path, signal)
            if listing is None or listing.stat != node.stat:
                continue  # The servers or the assignment have changed in between.
            registered = await self._read_descriptors(listing.names, signal)
            if registered is not None:
                assignment = decode_node(path, node, model.PartitionAssignment.from_bytes)
                return _MembershipNodes(node.stat, assignment, registered)
        raise errors.CoordinatorUnavailable(
            f"cannot read {path}: other processes changed it during each attempt"
        )

    async def _read_descriptors(
        self, names: tuple[str, ...], signal: Signal | None
    ) -> tuple[_RegisteredServer, ...] | None:
        servers: list[_RegisteredServer] = []
        for name in names:
            if not name.startswith(DESCRIPTOR_PREFIX):
                continue
            path = f"{self._nodes.paths.servers}/{name}"
            node = await self._nodes.znodes.get(path, signal)
            if node is None:
                return None
            descriptor = decode_node(path, node, model.ServerDescriptor.from_bytes)
            servers.append(_RegisteredServer(path, descriptor, node.stat))
        return tuple(servers)


def _servers_view(membership: _MembershipNodes, partition_count: int) -> ServersView:
    servers = membership.servers
    owners = {
        partition_id: Ownership(server_id, generation)
        for server_id, owned in membership.assignment.servers.items()
        for partition_id, generation in owned.items()
        if server_id in servers
    }
    settled = is_assignment_current(
        membership.assignment,
        servers,
        cversion=membership.stat.cversion,
        partition_count=partition_count,
    )
    excluded = frozenset(servers.keys() - membership.assignment.servers.keys() if settled else ())
    unregistered = frozenset(membership.assignment.servers.keys() - servers.keys())
    return ServersView(servers, dict(sorted(owners.items())), settled, excluded, unregistered)
