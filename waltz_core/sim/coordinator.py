"""ZooKeeper as the simulated processes see it: versions, sessions, watches, and lost answers.

Why it stands alone: it is the one thing in a cluster that is taken to be consistent. What it holds
is always right here; what its clients are told of it may come late, twice, or never.

Rules:
    1. Both nodes of the partition change in one step, each at its expected version, or not at all.
    2. A request whose answer is lost may have been carried out, may never be, or may be later.
    3. The assignment names one owner with one generation; a server hears of it when its watch
       fires, which may be long after, and a server whose session has expired is not told that until
       it can ask again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from waltz_core.cluster.model import (
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.record import Generation, ReplicaId
from waltz_core.replication import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_core.sim.cluster import SimCluster
    from waltz_core.sim.process import Process
    from waltz_core.sim.servers import SimServer

Told: TypeAlias = (
    events.MetadataRead | events.MetadataWritten | events.MetadataConflict | events.MetadataUnknown
)
SESSION_MS: Final = 1_000
NAME: Final = "zookeeper"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who owns the partition (None: nobody), since which generation, and who stores it."""

    owner: str | None
    generation: Generation
    replicas: tuple[ReplicaId, ...]


class SimCoordinator:
    """See the module's rules."""

    def __init__(self, cluster: "SimCluster", replicas: tuple[ReplicaId, ...]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.stream(NAME)
        self._chance = self._rng.random
        # As `cluster create` leaves them.
        self.metadata: PartitionMetadata | None = PartitionMetadata()
        self.metadata_version = 0
        self.marker: PartitionMarker | None = PartitionMarker(MarkerState.NEW)
        self.marker_version = 0
        self.storage_ids: dict[ReplicaId, bytes] = {}
        self.assignment = Assignment(None, Generation(-1), replicas)
        self.alive: dict[str, bool] = {}  # server sessions, in the order of their first coming
        self.client_count = 0
        self.connection_count = 0
        # What may be wrong with it.
        self.is_away = False
        self.lost_answers = 0.0
        self.watch_delay_ms_max = 20
        self.cut_off: dict[str, None] = {}  # servers that cannot reach it

    # ---- the partition's nodes (rule 1)

    def read(self, server: "SimServer", effect: events.ReadMetadata) -> None:
        """Answer with what both nodes hold."""

        def look() -> None:
            if self._is_unreachable(server):
                self._answer(server, events.MetadataUnknown(effect.attempt, "no answer"))
                return
            server.storage_ids.update(self.storage_ids)
            answer = events.MetadataRead(
                effect.attempt,
                self.metadata,
                self.metadata_version,
                self.marker,
                self.marker_version,
            )
            self._answer(server, answer)

        self._world.after(self._delay_us(), look)

    def write(self, server: "SimServer", effect: events.WriteMetadata) -> None:
        """Compare and set both nodes; rule 2 when answers get lost."""
        delay_us = self._delay_us()
        is_lost = self._chance() < self.lost_answers
        if is_lost:
            self._cluster.checks.count("CAS lost reply")
            unknown = events.MetadataUnknown(effect.attempt, "connection loss")
            self._world.after(delay_us, lambda: self._answer(server, unknown))
            roll = self._chance()
            if roll < 0.3:
                return
            if roll < 0.6:
                delay_us += self._rng.randrange(50_000)
        incarnation = server.incarnation

        def apply() -> None:
            if server.incarnation != incarnation and self._chance() < 0.5:
                return  # It died with the request still in its socket.
            answer = self._apply(server, effect)
            if not is_lost:
                self._answer(server, answer)

        self._world.after(delay_us, apply)

    def _apply(self, server: "SimServer", effect: events.WriteMetadata) -> Told:
        if self._is_unreachable(server):
            return events.MetadataUnknown(effect.attempt, "connection loss")
        versions = self.metadata_version, self.marker_version
        if (effect.metadata_version, effect.marker_version) != versions:
            self._cluster.checks.count("CAS conflict")
            return events.MetadataConflict(effect.attempt)
        before = self.metadata or PartitionMetadata()
        self.metadata, self.marker = effect.metadata, effect.marker
        self.metadata_version += 1
        self.marker_version += 1
        self._cluster.checks.wrote(server.name, before, effect.metadata, effect.marker)
        return events.MetadataWritten(effect.attempt, self.metadata_version, self.marker_version)

    def _answer(self, server: "SimServer", event: Told) -> None:
        server.after(self._delay_us(), lambda: server.step(event))

    def _delay_us(self) -> int:
        return int(200 + self._chance() * 1_500)

    def _is_unreachable(self, server: "Process") -> bool:
        return self.is_away or server.name in self.cut_off or not server.is_up

    # ---- server sessions and the assignment (rule 3)

    def register_server(self, server: "SimServer") -> None:
        """A server has come (again): it may be given the partition."""
        if self._is_unreachable(server):
            server.after(100_000, lambda: self.register_server(server))
            return
        self.alive[server.name] = True
        self.assign()
        self._tell(server)

    def watch_server(self, server: "SimServer") -> None:
        """Look, after the time that a session lives, whether a server is still silent."""
        incarnation = server.incarnation

        def look() -> None:
            if not self._is_silent(server):
                return
            if server.incarnation != incarnation and server.is_up:
                return
            if self.alive.get(server.name):
                self.expire(server)

        self._world.after(SESSION_MS * 1000, look)

    def _is_silent(self, server: "SimServer") -> bool:
        return not server.is_up or server.is_paused or server.name in self.cut_off

    def expire(self, server: "SimServer") -> None:
        """End a server's session: the partition goes to another one."""
        self._world.note(f"zookeeper: the session of {server.name} has expired")
        self._cluster.checks.count("session expired")
        self.alive[server.name] = False
        self.assign()
        self._learn_of_expiry(server)

    def _learn_of_expiry(self, server: "SimServer") -> None:
        def learn() -> None:
            if self._is_unreachable(server):
                server.after(50_000, learn)
                return
            server.disown()
            self.register_server(server)

        server.after(self._delay_us() + 1_000, learn)

    def assign(self) -> None:
        """Give the partition to a living server, if its owner lives no longer."""
        now = self.assignment
        if now.owner is not None and self.alive.get(now.owner):
            return
        living = [name for name, is_alive in self.alive.items() if is_alive]
        if living:
            self.give(self._rng.choice(living))
        elif now.owner is not None:
            self.assignment = Assignment(None, now.generation, now.replicas)

    def give(self, owner: str) -> None:
        """Make a server the owner, with the next generation."""
        now = self.assignment
        generation = Generation(now.generation + 1)
        self._world.note(f"zookeeper: {owner} owns generation {generation}")
        if now.owner is not None and now.owner != owner:
            self._cluster.checks.count("owner changed")
        self.assignment = Assignment(owner, generation, now.replicas)
        self._tell_all()

    def reassign(self, replicas: tuple[ReplicaId, ...]) -> None:
        """Change which storages hold the partition."""
        now = self.assignment
        self._world.note(f"zookeeper: replicas {' '.join(replicas)}")
        self.assignment = Assignment(now.owner, now.generation, replicas)
        self._tell_all()

    def _tell_all(self) -> None:
        for server in self._cluster.servers:
            self._tell(server)

    def _tell(self, server: "SimServer") -> None:
        """Let a server's watch fire; it then reads what holds at that time."""

        def fire() -> None:
            if self._is_unreachable(server):
                server.after(100_000, fire)
                return
            seen = self.assignment
            if self.alive.get(server.name):
                server.after(self._delay_us(), lambda: server.assigned(seen))

        delay_us = self._rng.randrange(1, self.watch_delay_ms_max * 1000 + 1)
        server.after(delay_us, fire)

    # ---- clients

    def owner_for(self, client: "Process", answer: "Callable[[Assignment], None]") -> None:
        """Tell a client who owns the partition; it may already be another one."""
        seen = self.assignment
        client.after(self._delay_us(), lambda: answer(seen))

    def next_client_id(self) -> int:
        """Return a client id that nobody had before."""
        self.client_count += 1
        return self.client_count

    def next_connection_sequence(self) -> int:
        """Return a number higher than all before."""
        self.connection_count += 1
        return self.connection_count
