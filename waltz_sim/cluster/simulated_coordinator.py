"""Simulated ZooKeeper: versions, sessions, watches, and lost answers.

The cluster assumes that ZooKeeper is consistent. So the simulated data is always correct, but
answers may arrive late, twice, or never.

Rules:
    1. Both nodes of the partition change in one step, each at its expected version, or not at all.
    2. If the answer to a request is lost, the request has been carried out, will be carried out
       later, or is never carried out.
    3. The assignment names one owner with one generation. A server learns of the assignment when
       its watch fires, which may be much later. A server with an expired session learns of the
       expiry when it can reach ZooKeeper again.
    4. A watch fires once for all changes since the server has set it. The server then reads the
       current state. Later reads never return an older state. If a watch is lost with a connection,
       the server sets it again on the next connection, and then reads.
    5. A client may receive an old state.
    6. A server with a hanging event loop keeps its session as long as the production watchdog
       allows.
    7. With `Setup.has_new_owner_ids` a restarted server has another ID, as in production. If the
       former process owned the partition, the restarted server or another server becomes the owner,
       in the next generation.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from waltz_core.cluster.znodes.model import MarkerState, PartitionMarker, PartitionMetadata
from waltz_core.cluster.zookeeper.watchdog import Watchdog
from waltz_core.records.record import Generation, ReplicaId, SessionId
from waltz_core.replication import session_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.world.process import Process

CoordinatorAnswer: TypeAlias = (
    session_events.MetadataRead
    | session_events.MetadataWritten
    | session_events.MetadataConflict
    | session_events.MetadataOutcomeUnknown
)
SESSION_MS: Final = 1_000
HEARTBEAT_US: Final = SESSION_MS * 1000 // 3
LOST_WATCH_US: Final = (500_000, 4_000_000)
PAST_ASSIGNMENTS_MAX: Final = 6
ZOOKEEPER_NAME: Final = "zookeeper"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The owner of the partition (None without an owner), its generation, and the replicas."""

    owner: str | None
    generation: Generation
    replicas: tuple[ReplicaId, ...]


class SimCoordinator:
    """The simulated ZooKeeper of one world; see the module's rules."""

    def __init__(self, cluster: "SimCluster", replicas: tuple[ReplicaId, ...]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.stream(ZOOKEEPER_NAME)
        self._chance = self._rng.random
        # The nodes as `cluster create` leaves them.
        self.metadata: PartitionMetadata | None = PartitionMetadata()
        self.metadata_version = 0
        self.marker: PartitionMarker | None = PartitionMarker(MarkerState.NEW)
        self.marker_version = 0
        self.storage_ids: dict[ReplicaId, bytes] = {}
        self.former_ids: dict[ReplicaId, list[bytes]] = {}  # the IDs of replaced storages
        self.assignment = Assignment(None, Generation(-1), replicas)
        self._last_incarnation: dict[str, int] = {}  # server -> its last registered incarnation
        # Server -> whether its session is alive, in the order of the first registrations.
        self.has_session: dict[str, bool] = {}
        self.client_count = 0
        self.connection_count = 0
        # Faults.
        self.is_unavailable = False
        self.lost_answer_share = 0.0
        self.watch_delay_ms_max = 20
        self.lost_watch_share = 0.0
        self.stale_read_share = 0.0  # the share of clients' reads that return an old state
        self.cut_off_servers: dict[str, None] = {}  # servers that cannot reach ZooKeeper
        self.is_rewritten = False
        self.past_nodes: list[tuple[PartitionMetadata | None, PartitionMarker | None]] = []
        self._past_assignments = [self.assignment]  # the latest assignments, newest last
        # Server whose watch will fire -> its incarnation.
        self._pending_watches: dict[str, int] = {}
        self._last_notification_us: dict[str, int] = {}

    # ---- the partition's nodes (rule 1)

    def read(self, server: "SimServer", effect: session_events.ReadMetadata) -> None:
        """Read both nodes, and pass the answer to a server."""

        def check() -> None:
            if self._is_unreachable(server):
                self._answer(
                    server, session_events.MetadataOutcomeUnknown(effect.attempt, "no answer")
                )
                return
            server.storage_ids.update(self.storage_ids)
            answer = session_events.MetadataRead(
                effect.attempt,
                self.metadata,
                self.metadata_version,
                self.marker,
                self.marker_version,
            )
            self._answer(server, answer)

        self._world.call_after_us(self._delay_us(), check)

    def read_storage_ids(self, server: "SimServer") -> None:
        """Update a server's registered storage IDs, unless ZooKeeper is unreachable."""

        def check() -> None:
            if not self._is_unreachable(server):
                server.storage_ids.update(self.storage_ids)

        server.call_after_us(self._delay_us(), check)

    def write(self, server: "SimServer", effect: session_events.WriteMetadata) -> None:
        """Compare and set both nodes; rule 2 applies to lost answers."""
        delay_us = self._delay_us()
        is_lost = self._chance() < self.lost_answer_share
        if is_lost:
            self._cluster.checks.count("reply to a compare-and-set lost")
            unknown = session_events.MetadataOutcomeUnknown(effect.attempt, "connection loss")
            self._world.call_after_us(delay_us, lambda: self._answer(server, unknown))
            roll = self._chance()
            if roll < 0.3:
                return
            if roll < 0.6:
                delay_us += self._rng.randrange(50_000)
        incarnation = server.incarnation

        def apply() -> None:
            if server.incarnation != incarnation and self._chance() < 0.5:
                return  # The server died with the request still in its socket.
            answer = self._apply_write(server, effect)
            if not is_lost:
                self._answer(server, answer)

        self._world.call_after_us(delay_us, apply)

    def _apply_write(
        self, server: "SimServer", effect: session_events.WriteMetadata
    ) -> CoordinatorAnswer:
        if self._is_unreachable(server):
            return session_events.MetadataOutcomeUnknown(effect.attempt, "connection loss")
        versions = self.metadata_version, self.marker_version
        if (effect.metadata_version, effect.marker_version) != versions:
            self._cluster.checks.count("CAS conflict")
            return session_events.MetadataConflict(effect.attempt)
        before = self.metadata or PartitionMetadata()
        if self._cluster.setup.is_unbounded:
            self.past_nodes.append((self.metadata, self.marker))
        self.metadata, self.marker = effect.metadata, effect.marker
        self.metadata_version += 1
        self.marker_version += 1
        self._cluster.checks.on_metadata_written(
            server.name, before, effect.metadata, effect.marker
        )
        if server.name != self.assignment.owner:
            self._cluster.checks.count("claim of a server that owns nothing any more")
        return session_events.MetadataWritten(
            effect.attempt, self.metadata_version, self.marker_version
        )

    def _answer(self, server: "SimServer", event: CoordinatorAnswer) -> None:
        server.call_after_us(self._delay_us(), lambda: server.step(event))

    def _delay_us(self) -> int:
        return int(200 + self._chance() * 1_500)

    def _is_unreachable(self, server: "Process") -> bool:
        return self.is_unavailable or server.name in self.cut_off_servers or not server.is_up

    # ---- server sessions and the assignment (rule 3)

    def register_server(self, server: "SimServer") -> None:
        """Register a server, which may become the owner of the partition."""
        if self._is_unreachable(server):
            server.call_after_us(100_000, lambda: self.register_server(server))
            return
        self.has_session[server.name] = True
        former = self._last_incarnation.get(server.name)
        self._last_incarnation[server.name] = server.incarnation
        is_another = former not in {None, server.incarnation}
        if is_another and self._cluster.setup.has_new_owner_ids:
            self._replace_former_owner(server)
        self.assign()
        self._notify(server)

    def _replace_former_owner(self, server: "SimServer") -> None:
        """Take the partition from the former process at this address (rule 7)."""
        if self.assignment.owner == server.name:
            living = [name for name, is_alive in self.has_session.items() if is_alive]
            self.set_owner(self._rng.choice(living))

    def watch_server(self, server: "SimServer") -> None:
        """Expire a server's session if the server is still silent after the session timeout."""
        incarnation = server.incarnation

        def check() -> None:
            if not self._is_silent(server):
                return
            if server.incarnation != incarnation and server.is_up:
                return
            if self.has_session.get(server.name):
                self.expire(server)

        self._world.call_after_us(SESSION_MS * 1000, check)

    def _is_silent(self, server: "SimServer") -> bool:
        is_stopped = server.is_paused and not server.is_hanging
        return not server.is_up or is_stopped or server.name in self.cut_off_servers

    def watch_hanging(self, server: "SimServer") -> None:
        """Keep the session of a hanging server until the watchdog ends the session (rule 6)."""
        watchdog = Watchdog(SESSION_MS, server.now_ms)
        hang = server.incarnation, server.hang_count
        received_us = self._world.now_us

        def check() -> None:
            nonlocal received_us
            is_over = not server.is_hanging or hang != (server.incarnation, server.hang_count)
            if is_over or not self.has_session.get(server.name):
                return
            may_keep = watchdog.may_keep_session(server.now_ms)
            # No session expires while ZooKeeper is unavailable.
            if self.is_unavailable or (may_keep and server.name not in self.cut_off_servers):
                received_us = self._world.now_us
            if self._world.now_us - received_us >= SESSION_MS * 1000:
                self._cluster.checks.count("session of a hanging server expired")
                self.expire(server)
                return
            self._world.call_after_us(HEARTBEAT_US, check)

        self._world.call_after_us(HEARTBEAT_US, check)

    def expire(self, server: "SimServer") -> None:
        """Expire a server's session, so that the partition moves to another server."""
        self._world.note(f"zookeeper: the session of {server.name} has expired")
        self._cluster.checks.count("session expired")
        self.has_session[server.name] = False
        self.assign()
        self._notify_of_expiry(server)

    def _notify_of_expiry(self, server: "SimServer") -> None:
        def notify_owner() -> None:
            if self._is_unreachable(server):
                server.call_after_us(50_000, notify_owner)
                return
            server.release_ownership()
            self.register_server(server)

        server.call_after_us(self._delay_us() + 1_000, notify_owner)

    def assign(self) -> None:
        """Assign the partition to a live server if its owner is dead."""
        now = self.assignment
        if now.owner is not None and self.has_session.get(now.owner):
            return
        living = [name for name, is_alive in self.has_session.items() if is_alive]
        if living:
            self.set_owner(self._rng.choice(living))
        elif now.owner is not None:
            self.assignment = Assignment(None, now.generation, now.replicas)

    def set_owner(self, owner: str) -> None:
        """Make a server the owner, with the next generation."""
        now = self.assignment
        generation = Generation(now.generation + 1)
        self._world.note(f"zookeeper: {owner} owns generation {generation}")
        if now.owner is not None and now.owner != owner:
            self._cluster.checks.count("owner changed")
        self.assignment = Assignment(owner, generation, now.replicas)
        self._past_assignments = [*self._past_assignments, self.assignment][-PAST_ASSIGNMENTS_MAX:]
        self._notify_all()

    def reassign(self, replicas: tuple[ReplicaId, ...]) -> None:
        """Change the replicas of the partition."""
        now = self.assignment
        self._world.note(f"zookeeper: replicas {' '.join(replicas)}")
        self.assignment = Assignment(now.owner, now.generation, replicas)
        self._past_assignments = [*self._past_assignments, self.assignment][-PAST_ASSIGNMENTS_MAX:]
        self._notify_all()

    def _notify_all(self) -> None:
        for server in self._cluster.servers:
            self._notify(server)

    def _notify(self, server: "SimServer", *, is_new: bool = False) -> None:
        """Let a server's watch fire; the server then reads the current state (rule 4)."""
        name = server.name
        if not is_new and self._pending_watches.get(name) == server.incarnation:
            self._cluster.checks.count("watch coalesced")
            return
        self._pending_watches[name] = server.incarnation

        def notify() -> None:
            if self._is_unreachable(server):
                server.call_after_us(100_000, notify)
                return
            self._pending_watches.pop(name, None)
            seen = self.assignment
            if self.has_session.get(name):
                at_us = max(
                    self._world.now_us + self._delay_us(),
                    self._last_notification_us.get(name, 0) + 1,
                )
                self._last_notification_us[name] = at_us
                server.call_after_us(at_us - self._world.now_us, lambda: server.on_assigned(seen))

        server.call_after_us(self.draw_watch_delay_us(), notify)

    def draw_watch_delay_us(self) -> int:
        """Return the delay in µs until a watch fires."""
        if self.lost_watch_share and self._chance() < self.lost_watch_share:
            self._cluster.checks.count("watch lost")
            return self._rng.randint(*LOST_WATCH_US)
        return self._rng.randrange(1, self.watch_delay_ms_max * 1000 + 1)

    # ---- faults of the whole service

    def restart(self, expired: "list[SimServer]") -> None:
        """Restart ZooKeeper after a complete stop; the sessions of some servers have expired."""
        self.is_unavailable = False
        for server in self._cluster.servers:
            if server in expired and self.has_session.get(server.name):
                self.expire(server)
            else:
                self._notify(server, is_new=True)

    def replace_nodes(
        self, metadata: PartitionMetadata | None, marker: PartitionMarker | None
    ) -> None:
        """Replace the data of the partition's nodes; None removes a node."""
        self.is_rewritten = True
        self._world.note(f"zookeeper: the nodes become {metadata} and {marker}")
        self.metadata_version = -1 if metadata is None else self.metadata_version + 1
        self.marker_version = -1 if marker is None else self.marker_version + 1
        self.metadata, self.marker = metadata, marker
        self._cluster.checks.on_zookeeper_rewritten()

    def claim_session(self, name: str, session_id: SessionId, nonce: bytes) -> None:
        """Claim a session for a command, as an owner does; nothing else changes."""
        before, marker = self.metadata, self.marker
        assert before is not None
        assert marker is not None
        after = replace(before, session_id=session_id)
        claimed = replace(marker, session_id=session_id, nonce=nonce)
        if session_id != before.session_id + 1:
            self.replace_nodes(
                after, claimed
            )  # ZooKeeper's data was older than that of the storages
            return
        self.metadata, self.marker = after, claimed
        self.metadata_version += 1
        self.marker_version += 1
        self._cluster.checks.on_metadata_written(name, before, after, claimed)

    # ---- clients

    def owner_for(self, client: "Process", answer: "Callable[[Assignment], None]") -> None:
        """Answer a client with the owner of the partition, or with a former one (rule 5)."""
        seen = self.assignment
        if self.stale_read_share and self._chance() < self.stale_read_share:
            seen = self._rng.choice(self._past_assignments)
            self._cluster.checks.count("stale read")
        client.call_after_us(self._delay_us(), lambda: answer(seen))

    def next_client_id(self) -> int:
        """Return an unused client ID."""
        self.client_count += 1
        return self.client_count

    def next_connection_sequence(self) -> int:
        """Return a number that is greater than all earlier ones."""
        self.connection_count += 1
        return self.connection_count
