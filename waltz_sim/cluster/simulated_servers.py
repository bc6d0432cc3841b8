"""A simulated server: the production partition and its store, in virtual time.

It replaces `server/process/host.py` and `server/process/storage_links.py`. It has links to storages
and from clients, sends requests to ZooKeeper, and can die at a chosen event or effect of a machine.

Rules:
    1. The machines are the unchanged production machines. Each ownership has new machines, as in
       the daemon.
    2. Every event and effect of the store passes through the checkers first.
    3. If a server has released a partition that is still assigned to it, the server takes ownership
       again after a pause.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import Damaged, NotOwned, error_from_code
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import ReplicaId, SessionId, TransactionId
from waltz_core.replication import session_events
from waltz_core.replication.invariants import check
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.locking.pending_appends import LARGE_REQUEST_BYTES_MIN
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import (
    ConnectionClosed,
    ConnectionCongested,
    ConnectionDrained,
    ConnectionId,
    Effect,
    Event,
    Fetch,
    FetchAnswered,
    FetchFailed,
    PartitionIdentity,
    RequestReceived,
    SendToClient,
    error_answer,
)
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.wire.messages import (
    AppendBatch,
    AppendRequest,
    ClientMessage,
    LockBlocks,
    Message,
    Nack,
    OpenRequest,
    RangeBytes,
    StorageMessage,
    SuccessResponse,
)
from waltz_sim.world.network import FAR, NEAR, Handlers, SimLink
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_coordinator import Assignment

RELEASED_PAUSE_US: Final = 300_000
READ_TIMEOUT_US: Final = 2_000_000
PIECE_BYTES: Final = 150
_NO_CLIENT_ID: Final = -1


class SmallPieceThrottle(LargeBatchThrottle):
    """A throttle for large batches. Its pieces are small, like all batches in the simulator."""

    def piece_bytes(self, now_ms: int) -> int | None:
        """Return the size of a piece in bytes; None if the batch is not divided."""
        return None if super().piece_bytes(now_ms) is None else PIECE_BYTES


class ObservedStore:
    """The store of a partition, observed by the checkers (rule 2)."""

    def __init__(self, server: "SimServer", store: PartitionStore) -> None:
        self.store = store
        self._server = server
        self._checks = server.cluster.checks

    @property
    def wake_at_ms(self) -> int | None:
        """The time in ms at which the store wants a `Wakeup`."""
        return self.store.wake_at_ms

    @property
    def readable_replicas(self) -> Sequence[ReplicaId]:
        """The replicas from which the server may read."""
        return self.store.readable_replicas

    @property
    def archived_mark(self) -> ArchivedMark | None:
        """The archived mark of the store."""
        return self.store.archived_mark

    @property
    def is_archiving(self) -> bool:
        """Whether the store archives the log."""
        return self.store.is_archiving

    @property
    def archive_backlog(self) -> session_events.ArchiveBacklog | None:
        """How much of the log is not archived yet."""
        return self.store.archive_backlog

    def is_expiry_done(self, before: TransactionId, before_ms: int) -> bool:
        """Forward the call to the store."""
        return self.store.is_expiry_done(before, before_ms)

    def replacement_outcome(
        self, request: session_events.ReplaceArchivedObject
    ) -> session_events.ReplacementOutcome | None:
        """Forward the call to the store."""
        return self.store.replacement_outcome(request)

    def step(self, event: session_events.Event, now_ms: int) -> Sequence[session_events.Effect]:
        """Step the store, and check the event, its invariants and its effects."""
        if type(event) is session_events.SubmitToSession:
            self._checks.on_batch_submitted(self._server, event)
        effects = self.store.step(event, now_ms)
        check(self.store)
        self._checks.on_store_stepped(self._server, self.store, effects)
        return effects


class SimServer(Process):
    """One simulated server process."""

    def __init__(self, cluster: "SimCluster", name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.storage_ids: dict[ReplicaId, bytes] = {}
        self.partition: Partition | None = None
        self.store: ObservedStore | None = None
        self._ownership = 0  # the number of the current partition machine in this process
        self._replicas: tuple[ReplicaId, ...] = ()
        self._sessions: dict[tuple[SessionId, ReplicaId], SimLink | None] = {}
        self._readers: dict[ReplicaId, SimLink | None] = {}
        self._fetches: dict[int, tuple[ReplicaId, int, Fetch]] = {}  # by sequence number
        self._fetch_count = 0
        # Where the server must die: the name of an event or effect, and whether after it (or
        # before). The callback runs at the death.
        self.planned_death: tuple[str, bool, Callable[[], None]] | None = None
        # Whether its event loop hangs while its other threads run.
        self.is_hanging = False
        self.hang_count = 0

    @property
    def fetch_count(self) -> int:
        """The number of reads from storages that are in progress."""
        return len(self._fetches)

    # ---- life

    def on_started(self) -> None:
        """Start without state, and register the server in ZooKeeper."""
        self.cluster.coordinator.register_server(self)

    def hang(self) -> None:
        """Stop the event loop, while other threads keep the ZooKeeper session alive."""
        self.pause()
        self.is_hanging = True
        self.hang_count += 1
        self.cluster.coordinator.watch_hanging(self)

    def resume(self) -> None:
        """Continue after `pause` or `hang`."""
        self.is_hanging = False
        super().resume()

    def on_died(self) -> None:
        """Drop all state except the name."""
        self.is_hanging = False
        self.partition = self.store = None
        self._replicas = ()
        self._sessions.clear()
        self._readers.clear()
        self._fetches.clear()

    def kill(self, *, is_silent: bool = False) -> None:
        """Kill the process as with SIGKILL; if `is_silent`, its peers do not notice at once."""
        if not self.is_up:
            return
        self.world.note(f"{self.name} is killed")
        self.die()
        self.cluster.network.end_links(self, is_silent=is_silent)
        self.cluster.coordinator.watch_server(self)

    def _kill_if_planned(self, event_or_effect: object, *, is_after: bool) -> bool:
        """Kill this server if a fault is planned at this point; return whether it was killed."""
        if self.planned_death is None:
            return False
        point, is_wanted_after, on_death = self.planned_death
        if isinstance(
            event_or_effect, session_events.SendToReplica | session_events.ReplicaResponded
        ):
            event_or_effect = event_or_effect.message
        if type(event_or_effect).__name__ != point or is_after != is_wanted_after:
            return False
        self.planned_death = None
        on_death()
        self.kill()
        self.cluster.restart_later(self)
        return True

    def on_assigned(self, assignment: "Assignment") -> None:
        """Apply the current assignment, which this server has just read."""
        if assignment.owner != self.name:
            self.release_ownership()
            return
        replicas = assignment.replicas
        if self.partition is None:
            self._create_partition()
        assert self.partition is not None
        is_new = assignment.generation != self.partition.generation or not self._replicas
        has_changed = replicas != self._replicas
        self._replicas = replicas
        if is_new or not self.partition.is_owned:
            self.step(session_events.TakeOwnership(assignment.generation, replicas))
        elif has_changed:
            self.step(session_events.ReassignReplicas(replicas))

    def release_ownership(self) -> None:
        """Release the partition, because another server owns it."""
        if self.partition is None:
            return
        self.step(session_events.ReleaseOwnership())
        for key in list(self._sessions):
            self._close_session_link(*key)
        self.partition = self.store = None
        self._replicas = ()
        self._fetches.clear()

    def _create_partition(self) -> None:
        cluster = self.cluster
        store = PartitionStore(
            cluster.partition_id,
            cluster.key,
            1,
            self.storage_ids,
            rng=self.rng,
            limits=cluster.store_limits,
        )
        self._ownership += 1
        self.store = ObservedStore(self, store)
        self.partition = Partition(
            PartitionIdentity(cluster.partition_id, 1, cluster.key),
            self.store,
            cluster.limits,
            TransactionCache(CacheBudget(64 * 1024)),
            FeedCache(64 * 1024),
            SmallPieceThrottle(),
        )
        cluster.checks.on_partition_created(self)

    # ---- the machine

    def step(self, event: Event) -> None:
        """Pass an event to the partition machine; drop it if the server has no partition."""
        machine = self.partition
        if machine is None:
            return
        if self.world.is_traced:
            self.world.note(f"{self.name} < {describe_event(event)}")
        if self.planned_death is not None and self._kill_if_planned(event, is_after=False):
            return
        for effect in machine.step(event, self.now_ms):
            if self.planned_death is not None and self._kill_if_planned(effect, is_after=False):
                return
            self._perform(effect)
            if self.planned_death is not None and self._kill_if_planned(effect, is_after=True):
                return
        self.cluster.checks.on_server_stepped(self)
        if self.planned_death is not None and self._kill_if_planned(event, is_after=True):
            return
        if self.partition is machine:
            self.set_timer(machine.wake_at_ms)

    def on_timer(self) -> None:
        """Wake the partition machine."""
        if self.partition is not None:
            self.step(Wakeup())

    def _perform(self, effect: Effect) -> None:  # noqa: C901 - a case for each effect
        match effect:
            case SendToClient():
                self._send_to_client(effect)
            case session_events.SendToReplica():
                link = self._sessions.get((effect.session_id, effect.replica))
                if link is not None:
                    self.cluster.checks.on_sent_to_replica(self, effect)
                    self.cluster.network.send(link, NEAR, effect.message)
            case session_events.OpenReplica():
                self._open_session_link(effect.session_id, effect.replica)
            case session_events.CloseReplica():
                self._close_session_link(effect.session_id, effect.replica)
            case Fetch():
                self._fetch(effect)
            case session_events.ReadMetadata():
                self.cluster.coordinator.read(self, effect)
            case session_events.WriteMetadata():
                self.cluster.coordinator.write(self, effect)
            case session_events.OwnershipReleased():
                self.cluster.checks.count("partition released")
                self.world.note(f"{self.name} releases the partition: {effect.reason}")
                ownership = self._ownership
                self.call_after_us(RELEASED_PAUSE_US, lambda: self._retake_ownership(ownership))
            case Report():
                self.cluster.checks.on_report(self.name, effect)
                if effect.name == "replica.rejected":
                    self.cluster.coordinator.read_storage_ids(self)
            case _:
                raise AssertionError(f"an unknown effect: {effect!r}")

    def _retake_ownership(self, ownership: int) -> None:
        partition = self.partition
        if partition is None or ownership != self._ownership or partition.is_owned:
            return
        self.step(session_events.TakeOwnership(partition.generation, self._replicas))

    # ---- clients

    def accept(self, link: SimLink) -> Handlers:
        """Accept the connection of a client."""
        return Handlers(self._on_client_message, self._on_client_lost)

    def _on_client_message(self, link: SimLink, message: Message) -> None:
        assert isinstance(message, ClientMessage)
        connection = ConnectionId(link.number)
        cost_bytes = 512
        if isinstance(message, AppendBatch):
            cost_bytes += len(message.payload)
            if self.cluster.setup.has_large_batches:
                cost_bytes += LARGE_REQUEST_BYTES_MIN
        elif isinstance(message, AppendRequest):
            cost_bytes += len(message.data)
        if self.partition is None:
            self._reject_unserved(link, message)
            return
        self.step(RequestReceived(connection, message, cost_bytes, self.wall_ms))

    def _reject_unserved(self, link: SimLink, message: ClientMessage) -> None:
        """Answer a request as the daemon does for a partition that it does not serve."""
        error = NotOwned(f"{self.name} does not own the partition")
        answer = error_answer(ConnectionId(link.number), message.req_id, 0, error)
        self.cluster.network.send(link, FAR, answer.message)

    def _on_client_lost(self, link: SimLink, reason: str) -> None:
        self.step(ConnectionClosed(ConnectionId(link.number)))

    def _send_to_client(self, effect: SendToClient) -> None:
        self.cluster.checks.on_sent_to_client(self, effect)
        link = self.links.get(effect.connection)
        if link is not None:
            self.cluster.network.send(link, FAR, effect.message)

    def congest(self, link: SimLink) -> None:
        """Simulate a client that stops reading for a while."""
        connection = ConnectionId(link.number)
        self.step(ConnectionCongested(connection))
        self.call_after_us(
            self.rng.randrange(1_000, 200_000), lambda: self.step(ConnectionDrained(connection))
        )

    # ---- storages

    def _open_session_link(self, session_id: SessionId, replica: ReplicaId) -> None:
        key = session_id, replica
        assert key not in self._sessions
        self._sessions[key] = None
        self.cluster.checks.on_dial(self.name, replica)
        storage = self.cluster.storages.get(replica)
        if storage is None:
            self.call_after_us(500, lambda: self._on_session_link_lost(key, "no such host"))
            return

        def on_opened(link: SimLink) -> None:
            if key not in self._sessions:
                self.cluster.network.close(link, NEAR)
                return
            self._sessions[key] = link
            self.step(session_events.ReplicaOpened(session_id, replica))

        def on_answer(link: SimLink, message: Message) -> None:
            if self._sessions.get(key) is link:
                assert isinstance(message, StorageMessage)
                self.cluster.checks.on_replica_response(session_id, replica, message)
                self.step(session_events.ReplicaResponded(session_id, replica, message))

        self.cluster.network.dial(
            self,
            storage,
            Handlers(on_answer, lambda link, reason: self._on_session_link_lost(key, reason)),
            on_opened=on_opened,
            on_failed=lambda reason: self._on_session_link_lost(key, reason),
            accept=storage.accept,
        )

    def _on_session_link_lost(self, key: tuple[SessionId, ReplicaId], reason: str) -> None:
        if key in self._sessions:
            del self._sessions[key]
            self.step(session_events.ReplicaLost(*key, reason))

    def _close_session_link(self, session_id: SessionId, replica: ReplicaId) -> None:
        link = self._sessions.pop((session_id, replica), None)
        if link is not None:
            self.cluster.network.close(link, NEAR)

    # ---- reads from storages, outside of sessions

    def _fetch(self, effect: Fetch) -> None:
        self._fetch_count += 1
        sequence = effect.message.sequence
        self._fetches[sequence] = (effect.replica, self._fetch_count, effect)
        number = self._fetch_count
        self.call_after_us(
            READ_TIMEOUT_US, lambda: self._on_fetch_failed(sequence, number, "no answer")
        )
        if effect.replica not in self._readers:
            self._open_reader(effect.replica)
        link = self._readers.get(effect.replica)
        if link is not None:
            self.cluster.network.send(link, NEAR, effect.message)

    def _open_reader(self, replica: ReplicaId) -> None:
        self._readers[replica] = None
        storage = self.cluster.storages.get(replica)
        if storage is None:
            self.call_after_us(500, lambda: self._on_reader_lost(replica, "no such host"))
            return

        def on_opened(link: SimLink) -> None:
            self._readers[replica] = link
            opening = OpenRequest(_NO_CLIENT_ID, _NO_CLIENT_ID, _NO_CLIENT_ID, self.cluster.key, 1)
            self.cluster.network.send(link, NEAR, opening)
            for at, _, fetch in list(self._fetches.values()):
                if at == replica:
                    self.cluster.network.send(link, NEAR, fetch.message)

        self.cluster.network.dial(
            self,
            storage,
            Handlers(
                self._on_reader_response, lambda link, reason: self._on_reader_lost(replica, reason)
            ),
            on_opened=on_opened,
            on_failed=partial(self._on_reader_lost, replica),
            accept=storage.accept,
        )

    def _on_reader_response(self, link: SimLink, message: Message) -> None:
        assert isinstance(message, StorageMessage)
        if isinstance(message, SuccessResponse):
            return
        found = self._fetches.pop(message.sequence, None)
        if found is None:
            return
        token = found[2].token
        if isinstance(message, RangeBytes | LockBlocks):
            self.step(FetchAnswered(token, message))
        else:
            assert isinstance(message, Nack)
            first = TransactionId(message.first_available)
            is_damage = isinstance(error_from_code(message.error_code, ""), Damaged)
            code = message.error_code if is_damage else 0
            self.step(FetchFailed(token, message.message, first, code))

    def _on_reader_lost(self, replica: ReplicaId, reason: str) -> None:
        self._readers.pop(replica, None)
        for sequence, (at, number, _) in list(self._fetches.items()):
            if at == replica:
                self._on_fetch_failed(sequence, number, reason)

    def _on_fetch_failed(self, sequence: int, number: int, reason: str) -> None:
        found = self._fetches.get(sequence)
        if found is not None and found[1] == number:
            del self._fetches[sequence]
            self.step(FetchFailed(found[2].token, reason))


def describe_event(event: Event) -> str:
    """Describe an event in a short text for the trace."""
    match event:
        case session_events.ReplicaResponded():
            return f"{event.replica} {describe_message(event.message)}"
        case RequestReceived():
            return f"client {event.connection} {describe_message(event.message)}"
        case session_events.MetadataRead():
            return f"MetadataRead session {event.metadata and event.metadata.session_id}"
        case FetchAnswered():
            return f"Fetched {event.token} {describe_message(event.message)}"
        case _:
            return str(event)


_TRACED_FIELDS = ("session_id", "first", "mark", "last_to_keep", "synced_max", "req_id", "message")


def describe_message(message: Message) -> str:
    """Describe a message in a short text for the trace."""
    found = [
        f"{name}={getattr(message, name)}" for name in _TRACED_FIELDS if hasattr(message, name)
    ]
    return " ".join((type(message).__name__, *found))
