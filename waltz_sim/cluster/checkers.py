"""Passes every event of the simulator to the checkers of the guarantees.

Processes, links and disks of the simulator report their events to one object, `Checks`. `Checks`
passes each event to the checkers (`guarantees/`) that need the event, and makes further checks at
the end of a run.

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
from waltz_sim.guarantees.replica_guarantees import (
    LogStateBeforeWork,
    ReplicaGuarantees,
    first_id_on_disk,
)
from waltz_sim.guarantees.required_states import STATES_OF_REPORTS
from waltz_sim.guarantees.response_guarantees import ResponseGuarantees
from waltz_sim.guarantees.session_guarantees import SessionGuarantees

if TYPE_CHECKING:
    from waltz_core.replication.partition_store import PartitionStore
    from waltz_core.server.partition_events import SendToClient
    from waltz_core.wire.messages import ClientMessage, StorageMessage
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.world.network import SimLink


class Checks(CheckerState):
    """All checkers of a world, and the state that they share."""

    def __init__(self, cluster: "SimCluster") -> None:
        super().__init__(cluster)
        self.sessions = SessionGuarantees(self)
        self.replicas = ReplicaGuarantees(self, self.sessions)
        self.responses = ResponseGuarantees(self, self.sessions)
        self.locks = LockGuarantees(self)
        self.outcomes = OutcomeGuarantees(self, self.responses, self.locks)
        self.limits = LimitGuarantees(self)
        self.archive = (
            ArchiveGuarantees(self, self.sessions) if cluster.setup.archive_interval_ms else None
        )
        self._bytes_before_open: dict[str, int] = {}  # the bytes on each disk before it is opened
        # The chain after the last append that a server has submitted in a session.
        self._last_chains: dict[tuple[str, SessionId], Chain] = {}

    def on_report(self, name: str, report: Report) -> None:
        """Called when a machine has sent a report."""
        self.counts[STATES_OF_REPORTS.get(report.name, report.name)] += 1
        if self.world.is_traced:
            fields = " ".join(f"{key}={value}" for key, value in report.fields)
            self.world.note(f"{name} ! {report.name} {fields}")

    # -----------------------------------------------------------------------------------------
    # storages

    def on_storage_started(self, storage: "SimStorage") -> None:
        """Called when a storage process has opened its directory."""

    def on_storage_open_failed(self, storage: "SimStorage", error: WaltzError) -> None:
        """Called when a directory or a log cannot be opened."""
        self.count(f"storage rejected: {type(error).__name__}")

    def before_log_open(self, storage: "SimStorage") -> int:
        """Called before a log is opened; `on_log_opened` receives the returned size in bytes."""
        return self._bytes_before_open.setdefault(
            storage.name, self.replicas.segment_bytes(storage)
        )

    def on_log_opened(
        self, storage: "SimStorage", log: PartitionLog, bytes_before: int = 0
    ) -> None:
        """Called when a log is open; opening may have cut a torn record at its end."""
        self._bytes_before_open.pop(storage.name, None)
        if self.replicas.segment_bytes(storage) < bytes_before:
            self.count("torn record at the end of a log")
        self.replicas.on_log_opened(storage, log)
        if self.archive is not None:
            self.archive.on_log_opened(storage, log)

    def on_disk_rolled_back(self, storage: "SimStorage") -> None:
        """Called when a fault has rolled back a replica's disk, and its promises are lost."""
        self.replicas.on_disk_rolled_back(storage)

    def on_disk_corrupted(self, storage: "SimStorage") -> None:
        """Called when a fault has changed durable bytes of a replica."""
        self.replicas.on_disk_corrupted(storage)

    def before_work(self, storage: "SimStorage", work: Work) -> LogStateBeforeWork:
        """Called before a piece of work; `on_work_done` receives the returned state of the log."""
        return self.replicas.before_work(storage, work)

    def on_work_done(
        self, storage: "SimStorage", work: Work, result: WorkResult, before: LogStateBeforeWork
    ) -> None:
        """Called when a piece of work is done, before its answer is sent."""
        self.replicas.on_work_done(storage, work, result, before)
        self.limits.on_work_done(storage)
        if self.archive is not None:
            self.archive.on_work_done(storage, work, result)

    def on_archive_file_written(self, name: str, *, is_known: bool) -> None:
        """Called when a file was written to the archive; `is_known` if the name existed before."""
        assert self.archive is not None
        self.archive.on_file_written(name, is_known=is_known)

    def on_archive_expiry(self, name: str, wall_ms: int) -> None:
        """Called when a storage writes an expiry's manifest, computed at its time `wall_ms`."""
        assert self.archive is not None
        self.archive.on_expiry(name, wall_ms)

    def on_archive_file_deleted(self, name: str) -> None:
        """Called when a garbage collection has deleted a file of the archive."""
        assert self.archive is not None
        self.archive.on_file_deleted(name)

    # -----------------------------------------------------------------------------------------
    # ZooKeeper

    def on_metadata_written(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """Called when both nodes of the partition in ZooKeeper have changed."""
        if self.world.is_traced:
            self.world.note(f"zookeeper < {server} {format_replica_states(after)}")
        self.sessions.on_metadata_written(server, before, after, marker)
        if self.archive is not None:
            self.archive.on_metadata_written(server, marker)

    def on_partition_restored(self, mark: ArchivedMark) -> None:
        """Called when the partition was restored from a backup, with this archived mark."""
        if self.archive is not None:
            self.archive.on_partition_restored(mark)

    def on_zookeeper_rewritten(self) -> None:
        """Called when a fault has replaced data in ZooKeeper."""
        self.sessions.on_zookeeper_rewritten()

    # -----------------------------------------------------------------------------------------
    # servers

    def on_partition_created(self, server: "SimServer") -> None:
        """Called when a server has created a partition machine, before its first outcome."""
        self.responses.on_partition_created(server.name)

    def on_batch_submitted(
        self, server: "SimServer", event: session_events.SubmitToSession
    ) -> None:
        """Called when the pipeline of a server submits a batch to the store."""
        key = server.name, event.session_id
        self.sessions.on_batch_submitted(server, event.session_id)
        self._last_chains[key] = self.history.add_batch(
            self._last_chains[key], event.session_id, event.batch
        )
        self.locks.on_batch_submitted(server.name, event.batch)
        self.outcomes.on_batch_submitted(self._last_chains[key])

    def on_store_stepped(
        self, server: "SimServer", store: "PartitionStore", effects: Sequence[session_events.Effect]
    ) -> None:
        """Called with the effects of one step of the store."""
        name = server.name
        for effect in effects:
            kind = type(effect)
            if kind is session_events.SendToReplica:
                continue
            self.sessions.on_store_effect(server, effect)
            if self.archive is not None:
                self.archive.on_store_effect(name, effect)
            if isinstance(effect, session_events.SessionOpened):
                self.outcomes.on_log_exposed(effect.high_water_mark, effect.chain)
                self._last_chains[name, effect.session_id] = effect.chain
            elif isinstance(effect, session_events.TransactionsCommitted):
                self.outcomes.on_log_exposed(effect.last, effect.chain)
            elif isinstance(effect, session_events.SessionClosed):
                self.count("session closed")
            elif isinstance(effect, session_events.CheckpointDue):
                self.count("checkpoint due")
            self.responses.on_store_effect(name, effect)
            self.locks.on_store_effect(name, effect)
            self.limits.on_store_effect(name, effect)

    def on_server_stepped(self, server: "SimServer") -> None:
        """Called when a server has completed one step with all its effects."""
        self.responses.on_server_stepped(server)
        self.locks.on_server_stepped(server)
        self.limits.on_server_stepped(server)

    def on_sent_to_replica(self, server: "SimServer", effect: session_events.SendToReplica) -> None:
        """Called when a server has sent a request to a storage."""
        self.sessions.on_sent_to_replica(server, effect)
        self.limits.on_sent_to_replica(effect)

    def on_replica_response(
        self, session_id: SessionId, replica: str, message: "StorageMessage"
    ) -> None:
        """Called when the owner has received an answer of a storage."""
        self.sessions.on_replica_response(session_id, replica, message)
        self.limits.on_replica_response(session_id, replica, message)

    def on_sent_to_client(self, server: "SimServer", answer: "SendToClient") -> None:
        """Called when a server has sent a message to a client."""
        self.responses.on_sent_to_client(server, answer)

    def on_dial(self, client: str, server: str) -> None:
        """Called when a process opens a connection."""
        self.limits.on_dial(client, server)

    # -----------------------------------------------------------------------------------------
    # clients

    def on_client_started(self, client: "SimClient") -> None:
        """Called when a client has started."""
        self.outcomes.on_client_started(client)

    def on_client_died(self, client: "SimClient") -> None:
        """Called when a client has died, so that its pending appends have no author."""
        self.outcomes.on_client_died(client)

    def on_client_stopped(self, client: "SimClient", error: WaltzError) -> None:
        """Called when a stream has ended permanently; correct only if its feed has expired."""
        if self.archive is not None and isinstance(error, BeforeLogStart):
            self.archive.on_read_rejected(client.fed_last + 1, error.first_available)
            return
        self.fail("ClientStopped", f"{client.name}: {error}")

    def on_client_subscribed(self, client: "SimClient") -> None:
        """Called when a client subscribes to the feed."""
        self.outcomes.feed_clients[client.name] = client

    def on_client_sent(
        self, client: "SimClient", link: "SimLink", message: "ClientMessage"
    ) -> None:
        """Called when a client sends a message to a server."""
        self.responses.on_client_sent(client, link, message)
        if self.archive is not None:
            self.archive.on_client_sent(message)

    def on_client_received(
        self, client: "SimClient", link: "SimLink", message: "ClientMessage"
    ) -> None:
        """Called when a client receives a message from a server."""
        self.responses.on_client_received(client, link, message)
        if self.archive is not None:
            self.archive.on_client_received(message)

    def on_client_mark_moved(self, client: "SimClient", mark: TransactionId) -> None:
        """Called when a client's high-water mark has changed."""
        self.outcomes.on_client_mark_moved(client, mark)

    def on_submission_settled(
        self, client: "SimClient", effect: client_events.SubmissionSettled
    ) -> None:
        """Called when an application receives the outcome of a submission."""
        self.outcomes.on_submission_settled(client, effect)

    def on_submission_rejected(
        self, client: "SimClient", effect: client_events.SubmissionRejected
    ) -> None:
        """Called when an application receives an error instead of an outcome."""
        self.outcomes.on_submission_rejected(client, effect.token, effect.error)

    def on_feed_received(self, client: "SimClient", effect: client_events.FeedAdvanced) -> None:
        """Called when an application receives transactions of the feed."""
        self.outcomes.on_feed_received(client, effect)

    # -----------------------------------------------------------------------------------------
    # the end

    def check_final_state(self) -> None:
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
        for client in self.outcomes.feed_clients.values():
            if client.fed_last != last:
                self.fail("Converged", f"{client.name} was fed up to {client.fed_last}, not {last}")
        self._replay()

    def _replay(self) -> None:
        """17. Serializable: replay the whole log of one replica, from the first record on."""
        ledger = Ledger()
        storage = self.cluster.storages[self.cluster.coordinator.assignment.replicas[0]]
        archived = (
            self.archive.archived_data_before(first_id_on_disk(storage))
            if self.archive is not None
            else ()
        )
        for transaction_id, data in enumerate(chain(archived, self.replicas.data_on_disk(storage))):
            ledger.replay(transaction_id, data)
        ledger.check_final_state()
        self.counts["checked transactions"] += ledger.checked_count


def format_replica_states(metadata: PartitionMetadata) -> str:
    """Format the replica states, for example as `4: A:3 B:3 C:2<17`."""
    return f"{metadata.session_id}: " + " ".join(
        f"{name}:{state.session_id}" + ("" if state[1] == UNRESOLVED else f"<{state[1]}")
        for name, state in metadata.states.items()
    )
