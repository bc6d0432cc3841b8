"""The guarantees, one checker each, called as things happen and once more at the end.

Why it stands alone: this is the list of what Waltz promises, as code. A checker looks from outside:
at what is handed to replicas, what lies on their disks, what ZooKeeper holds, what applications are
told; never at what a machine thinks of itself.

The names are those of correctness.md 3.2.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from waltz_core.client import events as client_events
from waltz_core.cluster.model import UNRESOLVED, PartitionMarker, PartitionMetadata
from waltz_core.errors import OutcomeUnknown, WaltzError
from waltz_core.machine import Report
from waltz_core.record import (
    BEFORE_FIRST,
    Chain,
    SessionId,
    TransactionId,
)
from waltz_core.replication import events
from waltz_core.replication.quorum import quorum_size
from waltz_core.sim.history import History, Operation, Violation
from waltz_core.storage.partition_log import PartitionLog
from waltz_core.storage.work import Work, WorkResult
from waltz_core.wire.messages import AppendRaw, Reason, SetLowWaterMark, Truncate

if TYPE_CHECKING:
    from waltz_core.replication.partition_store import PartitionStore
    from waltz_core.server.events import Answer
    from waltz_core.sim.clients import SimClient
    from waltz_core.sim.cluster import SimCluster
    from waltz_core.sim.servers import SimServer
    from waltz_core.sim.storages import SimStorage


class Durable(NamedTuple):
    """What of a replica may never go back."""

    promised: SessionId
    last_session: SessionId
    confirmed_mark: TransactionId


class Checks:
    """All checkers, and what they remember. Each public method is told of one kind of thing."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.history = History()
        self.counts: Counter[str] = Counter()
        self.durable: dict[str, Durable] = {}
        # Chains of batches that were ever synced on a replica.
        self.synced: dict[Chain, dict[str, None]] = {}
        self.opened: dict[SessionId, PartitionMetadata] = {}  # by the second compare-and-set
        self.ever_engaged: dict[SessionId, dict[str, None]] = {}
        self.names: dict[SessionId, bytes] = {}
        self.writers: dict[SessionId, str] = {}
        self.heads: dict[tuple[str, SessionId], Chain] = {}  # where a server appends next
        self.told_marks: dict[str, int] = {}
        self.last_writes: dict[int, int] = {}  # lock -> the last transaction that wrote it
        self.client_marks: dict[str, int] = {}

    def count(self, what: str) -> None:
        """Note that something worth knowing has come to pass (27, Sometimes)."""
        self.counts[what] += 1

    def fail(self, rule: str, text: str) -> None:
        """Raise what was found."""
        raise Violation(rule, text)

    def reported(self, name: str, report: Report) -> None:
        """A machine says what it did."""
        self.counts[report.name] += 1
        if self._world.is_traced:
            fields = " ".join(f"{key}={value}" for key, value in report.fields)
            self._world.note(f"{name} ! {report.name} {fields}")

    # -----------------------------------------------------------------------------------------
    # storages

    def storage_started(self, storage: "SimStorage") -> None:
        """A process has its directory open."""

    def storage_refused(self, storage: "SimStorage", error: WaltzError) -> None:
        """A directory or a log cannot be opened."""
        self.count(f"storage refused: {type(error).__name__}")

    def log_opened(self, storage: "SimStorage", log: PartitionLog) -> None:
        """3. PromiseMono, over restarts."""
        self._check_durable(storage.name, log)

    def rolled_back(self, storage: "SimStorage") -> None:
        """A fault has taken this replica's disk back: what it promised is gone."""
        self.durable.pop(storage.name, None)

    def before_work(self, storage: "SimStorage", work: Work) -> TransactionId:
        """Look at a log before something is done to it; `worked` gets what is returned."""
        if work.requests:
            message = work.requests[0].message
            if isinstance(message, Truncate):
                self._check_cut(storage.name, work.log, message)
            elif isinstance(message, SetLowWaterMark):
                return work.log.synced_max
        return TransactionId(BEFORE_FIRST)

    def worked(
        self, storage: "SimStorage", work: Work, result: WorkResult, synced_before: TransactionId
    ) -> None:
        """A piece of work is done, and is answered in a moment."""
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            message = request.message
            if isinstance(outcome, WaltzError):
                self.counts[f"nack {type(message).__name__}"] += 1
                continue
            if isinstance(message, AppendRaw):
                for entry in message.lineage:
                    self.synced.setdefault(entry.chain, {})[storage.name] = None
                    self._check_writer(
                        storage.name, entry.session_id, SessionId(message.session_id)
                    )
            elif isinstance(message, SetLowWaterMark) and message.mark != synced_before:
                self.fail("LwmFull", f"{storage.name}: mark {message.mark} at {synced_before}")
        if work.requests:
            self._check_durable(storage.name, work.log)

    def _check_durable(self, name: str, log: PartitionLog) -> None:
        """3. PromiseMono."""
        slot = log.slot
        now = Durable(slot.promised, slot.last_session, slot.low_water_mark)
        before = self.durable.get(name)
        if before is not None and (
            now.promised < before.promised
            or now.last_session < before.last_session
            or now.confirmed_mark < before.confirmed_mark
        ):
            self.fail("PromiseMono", f"{name}: {before}, then {now}")
        if now.last_session > now.promised:
            self.fail("PromiseMono", f"{name}: {now}")
        self.durable[name] = now

    def _check_cut(self, name: str, log: PartitionLog, message: Truncate) -> None:
        """9. NoCutCommitted: what is cut is not, with the same chain, in the log."""
        keep, chains = message.last_to_keep, self.history.chains
        if keep >= log.max_id or not self.history.log:
            return
        _, entries = log.lineage(TransactionId(max(0, keep + 1)), log.max_id)
        for entry in entries:
            if entry.last > keep and chains.get(entry.last) == entry.chain:
                self.fail("NoCutCommitted", f"{name} keeps {keep}, cuts {entry.last}")

    def _check_writer(self, name: str, written: SessionId, session: SessionId) -> None:
        """7. GateCAS2: nothing of a session lies on a disk before it is open."""
        if written == session and session not in self.opened:
            self.fail("GateCAS2", f"{name} has an append of {session}, which is not open")

    # -----------------------------------------------------------------------------------------
    # ZooKeeper

    def wrote(
        self,
        server: str,
        before: PartitionMetadata,
        after: PartitionMetadata,
        marker: PartitionMarker,
    ) -> None:
        """20. MetaShape; remembers which sessions are open, and who is engaged in them."""
        states = after.states
        engaged = [n for n, state in states.items() if state[1] == UNRESOLVED]
        sessions = {states[name].session_id for name in engaged}
        if after.session_id < before.session_id or after.generation < before.generation:
            self.fail("MetaShape", f"from {before} to {after}")
        if states and (len(sessions) != 1 or len(engaged) < quorum_size(len(states))):
            self.fail("MetaShape", f"{after}")
        if self.names.setdefault(after.session_id, marker.nonce) != marker.nonce:
            self.fail("MetaShape", f"session {after.session_id} has two nonces")
        if self._world.is_traced:
            self._world.note(f"zookeeper < {server} {states_in_words(after)}")
        if engaged and sessions == {after.session_id}:
            self.opened[after.session_id] = after
            ever = self.ever_engaged.setdefault(after.session_id, {})
            if ever and len(engaged) > len(ever):
                self.count("late join")
            ever.update(dict.fromkeys(engaged))

    # -----------------------------------------------------------------------------------------
    # servers

    def partition_made(self, server: "SimServer") -> None:
        """A server has a new, empty partition machine: nothing was told yet."""
        self.told_marks.pop(server.name, None)

    def submitted(self, server: "SimServer", event: events.Submit) -> None:
        """The pipeline hands a batch to the store."""
        key = server.name, event.session_id
        if event.session_id not in self.opened:
            self.fail("GateCAS2", f"{server.name} submits to {event.session_id}, not open yet")
        self.heads[key] = self.history.submitted(self.heads[key], event.session_id, event.batch)

    def stepped(
        self, server: "SimServer", store: "PartitionStore", effects: Sequence[events.Effect]
    ) -> None:
        """The store says something."""
        for effect in effects:
            match effect:
                case events.SessionOpened():
                    self._session_opened(server, effect)
                case events.Committed():
                    self._committed(server, store, effect)
                case events.Settled():
                    self._check_open(effect.session_id, "Settled")
                case events.SessionClosed():
                    self.count("session closed")
                case _:
                    pass

    def _check_open(self, session_id: SessionId, what: str) -> None:
        if session_id not in self.opened:
            self.fail("GateCAS2", f"{what} of session {session_id} before it is open")

    def _session_opened(self, server: "SimServer", effect: events.SessionOpened) -> None:
        """6. DecisionCovers, 4. SingleWriter, 15. HwmMono."""
        self._check_open(effect.session_id, "SessionOpened")
        self.count("session opened")
        mark, history = effect.high_water_mark, self.history
        if mark < history.last:
            self.fail(
                "DecisionCovers",
                f"{history.last} was committed, {effect.session_id} opens at {mark}",
            )
        writer = self.writers.setdefault(effect.session_id, server.name)
        if writer != server.name:
            self.fail("SingleWriter", f"{writer} and {server.name} in {effect.session_id}")
        self._exposed(mark, effect.chain)
        self.heads[server.name, effect.session_id] = effect.chain

    def _committed(
        self, server: "SimServer", store: "PartitionStore", effect: events.Committed
    ) -> None:
        """2. AckQuorum, 8. EngagedOnly."""
        self._check_open(effect.session_id, "Committed")
        session = store.session
        assert session is not None
        quorum = quorum_size(len(session.claim.assigned))
        engaged = self.ever_engaged.get(effect.session_id, {})
        holders = [name for name in self.synced.get(effect.chain, ()) if name in engaged]
        if len(holders) < quorum:
            self.fail("AckQuorum", f"{effect.last} of {effect.session_id} is on {holders} only")
        self._exposed(effect.last, effect.chain)

    def _exposed(self, last: TransactionId, chain: Chain) -> None:
        for transaction_id in self.history.exposed(last, chain):
            self._in_the_log(transaction_id)

    def _in_the_log(self, transaction_id: int) -> None:
        """11. OutcomeTruth, 17. LockSerial: looked at when a row becomes part of the log."""
        history = self.history
        operation = history.operations.get(history.log[transaction_id].number)
        if operation is None:
            self.fail("LogMatching", f"nobody asked for what is at {transaction_id}")
            return
        if operation.told == "no":
            self.fail("OutcomeTruth", f"{operation} was told no, and is at {transaction_id}")
        if operation.transaction_id not in {-1, transaction_id}:
            self.fail("AtMostOnce", f"{operation} is at {transaction_id}, too")
        operation.transaction_id = transaction_id
        self._check_serial(operation, transaction_id)

    def _check_serial(self, operation: Operation, transaction_id: int) -> None:
        """17. LockSerial and 16. NotAhead, by the author's true mark."""
        writes = self.last_writes
        for lock in (*operation.write, *operation.read):
            if writes.get(lock, BEFORE_FIRST) > operation.mark:
                self.fail(
                    "LockSerial",
                    f"{transaction_id} with lock {lock} at mark {operation.mark}, written at "
                    f"{writes[lock]}",
                )
        if operation.mark >= transaction_id:
            self.fail("NotAhead", f"{transaction_id} was computed at {operation.mark}")
        for lock in (*operation.write, *operation.append):
            writes[lock] = transaction_id

    def server_stepped(self, server: "SimServer") -> None:
        """18, 19. LockBound and ReserveHeld; 26. Bounded."""
        partition = server.partition
        assert partition is not None
        pipeline, limits = partition.pipeline, self._cluster.limits
        if pipeline.queued_bytes > 2 * limits.queue_bytes_max:
            self.fail("Bounded", f"{server.name}: {pipeline.queued_bytes} bytes queued")

    def sent_to_replica(self, server: "SimServer", effect: events.SendToReplica) -> None:
        """A request is on its way to a storage."""

    def answered(self, server: "SimServer", answer: "Answer") -> None:
        """A message leaves a server for a client."""

    # -----------------------------------------------------------------------------------------
    # clients

    def client_started(self, client: "SimClient") -> None:
        """A client begins a life."""
        self.client_marks[client.name] = BEFORE_FIRST

    def client_died(self, client: "SimClient") -> None:
        """What it waited for is nobody's any more."""
        for operation in self.history.operations.values():
            if operation.client == client.name and not operation.told:
                operation.told = "gone"

    def client_stopped(self, client: "SimClient", error: WaltzError) -> None:
        """A stream has ended for good: never in a world without data loss."""
        self.fail("ClientStopped", f"{client.name}: {error}")

    def mark_moved(self, client: "SimClient", mark: TransactionId) -> None:
        """13, 15. A mark that a client is shown never goes back, nor beyond the log."""
        if mark < self.client_marks[client.name]:
            self.fail("HwmMono", f"{client.name}: {mark} after {self.client_marks[client.name]}")
        if mark > self.history.last:
            self.fail(
                "HwmMono", f"{client.name} was shown {mark}, the log ends at {self.history.last}"
            )
        self.client_marks[client.name] = mark

    def settled(self, client: "SimClient", effect: client_events.Settled) -> None:
        """11. OutcomeTruth: what an application is told is so."""
        operations = self._cluster.workload.operations_of(effect.token)
        outcome = effect.outcome
        history = self.history
        for operation, transaction_id, reason, conflict in zip(
            operations,
            outcome.transaction_ids.tolist(),
            outcome.reasons.tolist(),
            outcome.conflicting.tolist(),
            strict=True,
        ):
            self.counts[f"told {Reason(reason).name}"] += 1
            if transaction_id >= 0:
                if transaction_id > history.last or (
                    history.log[transaction_id].number != operation.number
                ):
                    self.fail("OutcomeTruth", f"{operation} was told {transaction_id}")
                operation.told = "ok"
            else:
                if operation.transaction_id >= 0:
                    self.fail("OutcomeTruth", f"{operation} is in the log, told {Reason(reason)!r}")
                if reason == Reason.LOCK and conflict > history.last:
                    self.fail("OutcomeTruth", f"refused for {conflict}, which is not final")
                operation.told = "no"
        if outcome.high_water_mark > history.last:
            self.fail("HwmMono", f"{client.name} was told mark {outcome.high_water_mark}")
        assert isinstance(outcome.reasons, np.ndarray)

    def refused(self, client: "SimClient", effect: client_events.Refused) -> None:
        """A parcel without an outcome: nobody knows, or surely not."""
        is_unknown = isinstance(effect.error, OutcomeUnknown)
        self.count("told unknown" if is_unknown else "told not sent")
        for operation in self._cluster.workload.operations_of(effect.token):
            operation.told = "unknown" if is_unknown else "no"
            if not is_unknown and operation.transaction_id >= 0:
                self.fail("OutcomeTruth", f"{operation} is in the log, told {effect.error}")

    def fed(self, client: "SimClient", effect: client_events.Fed) -> None:
        """13. Dense and 14. ClientPrefix."""
        if effect.first != client.fed + 1:
            self.fail("Dense", f"{client.name} was fed {effect.first} after {client.fed}")
        heads = np.frombuffer(effect.headers, dtype=">i4").reshape(-1, 5)
        for place, (client_id, _, _, sequence, _) in enumerate(heads.tolist(), effect.first):
            if place > self.history.last or self.history.log[place].key != (client_id, sequence):
                self.fail("ClientPrefix", f"{client.name} was fed another transaction at {place}")
        self.counts["fed"] += effect.count

    # -----------------------------------------------------------------------------------------
    # the end

    def at_end(self) -> None:
        """24, 25. Fixed and Converged: all replicas hold the log, and everybody was told."""
        history = self.history
        for name in self._cluster.coordinator.assignment.replicas:
            storage = self._cluster.storages[name]
            log = storage.log
            if log is None or log.max_id != history.last:
                self.fail("Converged", f"{name} ends at {log and log.max_id}, not {history.last}")
                return
            if log.suspect or log.damaged:
                self.fail("Converged", f"{name} is suspect or damaged: {log.damaged}")
            if log.state().chain != history.chains[history.last]:
                self.fail("LogMatching", f"{name} has another chain at {history.last}")
        for operation in history.operations.values():
            if not operation.told:
                self.fail("Converged", f"{operation} was never told")


def states_in_words(metadata: PartitionMetadata) -> str:
    """Return the replica states in a few words: `A:3 B:3 C:2<17`."""
    return f"{metadata.session_id}: " + " ".join(
        f"{name}:{state.session_id}" + ("" if state[1] == UNRESOLVED else f"<{state[1]}")
        for name, state in metadata.states.items()
    )
