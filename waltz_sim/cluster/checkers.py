"""Passes every event of the simulator to the checkers of the guarantees.

Processes, links and disks of the simulator report their events to one object, `Checks`. It passes
each event to the checkers (`guarantees/`) that need it, and makes further checks at the end of a
run.

Each public method receives one kind of event. The names and numbers of the guarantees are those of
docs/design/correctness.md 3.2.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from waltz_core.client.stream import stream_events as client_events
from waltz_core.cluster.znodes.model import (
    UNRESOLVED,
    ArchivedMark,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.errors import BeforeLogStart, WaltzError
from waltz_core.machine import Report
from waltz_core.records.record import Chain, SessionId, TransactionId
from waltz_core.replication import session_events
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service.work import Work, WorkResult
from waltz_sim.guarantees.archive_guarantees import ArchiveGuarantees
from waltz_sim.guarantees.checker_state import CheckerState
from waltz_sim.guarantees.ledger import Ledger
from waltz_sim.guarantees.limit_guarantees import LimitGuarantees
from waltz_sim.guarantees.lock_guarantees import LockGuarantees
from waltz_sim.guarantees.outcome_guarantees import OutcomeGuarantees
from waltz_sim.guarantees.replica_guarantees import LogBefore, ReplicaGuarantees, first_on
from waltz_sim.guarantees.response_guarantees import ResponseGuarantees
from waltz_sim.guarantees.session_guarantees import SessionGuarantees
from waltz_sim.guarantees.sometimes import REPORTED

if TYPE_CHECKING:
    from waltz_core.replication.partition_store import PartitionStore
    from waltz_core.server.partition_events import SendToClient
    from waltz_core.wire.messages import ClientMessage, StorageMessage
    from waltz_sim.cluster.servers import SimServer
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.world.network import SimLink


class Checks(CheckerState):
    """All checkers of a world, and the state that they share."""

    def __init__(self, cluster: "SimCluster") -> None:
        super().__init__(cluster)
        self.sessions = SessionGuarantees(self)
        self.replicas = ReplicaGuarantees(self, self.sessions)
        self.answers = ResponseGuarantees(self, self.sessions)
        self.locking = LockGuarantees(self)
        self.outcomes = OutcomeGuarantees(self, self.answers, self.locking)
        self.bounds = LimitGuarantees(self)
        self.archive = (
            ArchiveGuarantees(self, self.sessions) if cluster.setup.archive_interval_ms else None
        )
        self._opening: dict[str, int] = {}  # the bytes on each disk before it is opened
        self._heads: dict[
            tuple[str, SessionId], Chain
        ] = {}  # the chain after the last append that a server has submitted in a session

    def reported(self, name: str, report: Report) -> None:
        """Called when a machine has sent a report."""
        self.counts[REPORTED.get(report.name, report.name)] += 1
        if self.world.is_traced:
            fields = " ".join(f"{key}={value}" for key, value in report.fields)
            self.world.note(f"{name} ! {report.name} {fields}")

    # -----------------------------------------------------------------------------------------
    # storages

    def storage_started(self, storage: "SimStorage") -> None:
        """Called when a storage process has opened its directory."""

    def storage_rejected(self, storage: "SimStorage", error: WaltzError) -> None:
        """Called when a directory or a log cannot be opened."""
        self.count(f"storage rejected: {type(error).__name__}")

    def log_opening(self, storage: "SimStorage") -> int:
        """Called before a directory and its log are opened; `log_opened` receives the result."""
        return self._opening.setdefault(storage.name, self.replicas.bytes_of(storage))

    def log_opened(self, storage: "SimStorage", log: PartitionLog, bytes_before: int = 0) -> None:
        """Called when a log is open; opening may have cut a torn record at its end."""
        self._opening.pop(storage.name, None)
        if self.replicas.bytes_of(storage) < bytes_before:
            self.count("torn record at the end of a log")
        self.replicas.opened(storage, log)
        if self.archive is not None:
            self.archive.opened(storage, log)

    def rolled_back(self, storage: "SimStorage") -> None:
        """Called when a fault has rolled back a replica's disk, so that its promises are lost."""
        self.replicas.rolled_back(storage)

    def became_corrupt(self, storage: "SimStorage") -> None:
        """Called when a fault has changed durable bytes of a replica."""
        self.replicas.became_corrupt(storage)

    def before_work(self, storage: "SimStorage", work: Work) -> LogBefore:
        """Called before a piece of work; `worked` receives the returned state of the log."""
        return self.replicas.before_work(storage, work)

    def worked(
        self, storage: "SimStorage", work: Work, result: WorkResult, before: LogBefore
    ) -> None:
        """Called when a piece of work is done, before its answer is sent."""
        self.replicas.worked(storage, work, result, before)
        self.bounds.worked(storage)
        if self.archive is not None:
            self.archive.worked(storage, work, result)

    def archive_written(self, name: str, *, is_known: bool) -> None:
        """Called when a file was written to the archive; `is_known` if the name existed before."""
        assert self.archive is not None
        self.archive.written(name, is_known=is_known)

    def archive_expires(self, name: str, wall_ms: int) -> None:
        """Called when a storage writes an expiry's manifest, computed at its time `wall_ms`."""
        assert self.archive is not None
        self.archive.expires(name, wall_ms)

    def archive_deleted(self, name: str) -> None:
        """Called when a garbage collection has deleted a file of the archive."""
        assert self.archive is not None
        self.archive.deleted(name)

    # -----------------------------------------------------------------------------------------
    # ZooKeeper

    def wrote(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """Called when both nodes of the partition in ZooKeeper have changed."""
        if self.world.is_traced:
            self.world.note(f"zookeeper < {server} {states_in_words(after)}")
        self.sessions.wrote(server, before, after, marker)
        if self.archive is not None:
            self.archive.wrote(server, marker)

    def restored(self, mark: ArchivedMark) -> None:
        """Called when the partition was restored from a backup, with this archived mark."""
        if self.archive is not None:
            self.archive.restored(mark)

    def zookeeper_changed(self) -> None:
        """Called when a fault has replaced data in ZooKeeper."""
        self.sessions.zookeeper_changed()

    # -----------------------------------------------------------------------------------------
    # servers

    def partition_made(self, server: "SimServer") -> None:
        """Called when a server has created a partition machine, which has reported no outcomes."""
        self.answers.made(server.name)

    def submitted(self, server: "SimServer", event: session_events.Submit) -> None:
        """Called when the pipeline of a server submits a batch to the store."""
        key = server.name, event.session_id
        self.sessions.submitted(server, event.session_id)
        self._heads[key] = self.history.submitted(self._heads[key], event.session_id, event.batch)
        self.locking.submitted(server.name, event.batch)
        self.outcomes.submitted(self._heads[key])

    def stepped(
        self, server: "SimServer", store: "PartitionStore", effects: Sequence[session_events.Effect]
    ) -> None:
        """Called with the effects of one step of the store."""
        name = server.name
        for effect in effects:
            kind = type(effect)
            if kind is session_events.SendToReplica:
                continue
            self.sessions.stepped(server, effect)
            if self.archive is not None:
                self.archive.stepped(name, effect)
            if isinstance(effect, session_events.SessionOpened):
                self.outcomes.exposed(effect.high_water_mark, effect.chain)
                self._heads[name, effect.session_id] = effect.chain
            elif isinstance(effect, session_events.Committed):
                self.outcomes.exposed(effect.last, effect.chain)
            elif isinstance(effect, session_events.SessionClosed):
                self.count("session closed")
            elif isinstance(effect, session_events.CheckpointDue):
                self.count("checkpoint due")
            self.answers.store_reported(name, effect)
            self.locking.store_reported(name, effect)
            self.bounds.store_reported(name, effect)

    def server_stepped(self, server: "SimServer") -> None:
        """Called when a server has completed one step with all its effects."""
        self.answers.stepped(server)
        self.locking.stepped(server)
        self.bounds.stepped(server)

    def sent_to_replica(self, server: "SimServer", effect: session_events.SendToReplica) -> None:
        """Called when a server has sent a request to a storage."""
        self.sessions.sent(server, effect)
        self.bounds.sent(effect)

    def replica_answered(
        self, session_id: SessionId, replica: str, message: "StorageMessage"
    ) -> None:
        """Called when the owner has received an answer of a storage."""
        self.sessions.received(session_id, replica, message)
        self.bounds.received(session_id, replica, message)

    def answered(self, server: "SimServer", answer: "SendToClient") -> None:
        """Called when a server has sent a message to a client."""
        self.answers.answered(server, answer)

    def dialed(self, client: str, server: str) -> None:
        """Called when a process opens a connection."""
        self.bounds.dialed(client, server)

    # -----------------------------------------------------------------------------------------
    # clients

    def client_started(self, client: "SimClient") -> None:
        """Called when a client has started."""
        self.outcomes.started(client)

    def client_died(self, client: "SimClient") -> None:
        """Called when a client has died, so that its pending appends have no author."""
        self.outcomes.died(client)

    def client_stopped(self, client: "SimClient", error: WaltzError) -> None:
        """Called when a stream has ended permanently; correct only if its feed has expired."""
        if self.archive is not None and isinstance(error, BeforeLogStart):
            self.archive.rejected(client.fed + 1, error.first_available)
            return
        self.fail("ClientStopped", f"{client.name}: {error}")

    def client_follows(self, client: "SimClient") -> None:
        """Called when a client subscribes to the feed."""
        self.outcomes.followers[client.name] = client

    def client_sent(self, client: "SimClient", link: "SimLink", message: "ClientMessage") -> None:
        """Called when a client sends a message to a server."""
        self.answers.sent(client, link, message)
        if self.archive is not None:
            self.archive.client_sent(message)

    def client_received(
        self, client: "SimClient", link: "SimLink", message: "ClientMessage"
    ) -> None:
        """Called when a client receives a message from a server."""
        self.answers.received(client, link, message)
        if self.archive is not None:
            self.archive.client_received(message)

    def mark_moved(self, client: "SimClient", mark: TransactionId) -> None:
        """Called when a client's high-water mark has changed."""
        self.outcomes.mark_moved(client, mark)

    def settled(self, client: "SimClient", effect: client_events.SubmissionSettled) -> None:
        """Called when an application receives the outcome of a submission."""
        self.outcomes.settled(client, effect)

    def rejected(self, client: "SimClient", effect: client_events.SubmissionRejected) -> None:
        """Called when an application receives an error instead of an outcome."""
        self.outcomes.rejected(client, effect.token, effect.error)

    def fed(self, client: "SimClient", effect: client_events.FeedAdvanced) -> None:
        """Called when an application receives transactions of the feed."""
        self.outcomes.fed(client, effect)

    # -----------------------------------------------------------------------------------------
    # the end

    def at_end(self) -> None:
        """24, 25. Fixed and Converged: all replicas have the log, and all outcomes are known."""
        history, last = self.history, self.history.last
        for name in self.cluster.coordinator.assignment.replicas:
            storage = self.cluster.storages[name]
            log = storage.log
            if log is None or log.max_id != last:
                self.fail("Converged", f"{name} ends at {log and log.max_id}, not {last}")
            if log.suspect or log.damaged:
                self.fail("Converged", f"{name} is suspect or damaged: {log.damaged}")
            if log.state().chain != history.chains[last]:
                self.fail("LogMatching", f"{name} has another chain at {last}")
            self.replicas.check_records(storage, last)
        for operation in history.operations.values():
            if not operation.outcome:
                self.fail("Converged", f"the outcome of {operation} was never reported")
        for client in self.outcomes.followers.values():
            if client.fed != last:
                self.fail("Converged", f"{client.name} was fed up to {client.fed}, not {last}")
        self._replay()

    def _replay(self) -> None:
        """17. Serializable: replay the whole log of one replica, from the first record on."""
        ledger = Ledger()
        storage = self.cluster.storages[self.cluster.coordinator.assignment.replicas[0]]
        archived = self.archive.data_before(first_on(storage)) if self.archive is not None else ()
        for transaction_id, data in enumerate(chain(archived, self.replicas.data_on(storage))):
            ledger.take(transaction_id, data)
        ledger.audit()
        self.counts["checked transactions"] += ledger.checked_count


def states_in_words(metadata: PartitionMetadata) -> str:
    """Format the replica states, for example as `4: A:3 B:3 C:2<17`."""
    return f"{metadata.session_id}: " + " ".join(
        f"{name}:{state.session_id}" + ("" if state[1] == UNRESOLVED else f"<{state[1]}")
        for name, state in metadata.states.items()
    )
