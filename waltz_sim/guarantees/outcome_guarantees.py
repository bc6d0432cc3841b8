"""Checks of the outcomes, feeds and marks that applications receive, against the log.

A user can see no other results. The checks use only the log and the results that applications
receive. They use no replica, session or server.

Rules:
    1. The log is that of the reference history. It grows here, and each new row is checked once,
       when it is added.
    2. An application's mark is the last ID that it has really seen, whatever its client states.
    3. An application does not receive AHEAD if the log had reached its mark before the application
       sent the request.
"""

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from waltz_core.client.stream import stream_events
from waltz_core.errors import OutcomeUnknown, WaltzError
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, Chain, TransactionId
from waltz_core.wire.messages import RowOutcomeCode
from waltz_sim.guarantees.history import Operation, data_of_record

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.lock_guarantees import LockGuarantees
    from waltz_sim.guarantees.response_guarantees import ResponseGuarantees
    from waltz_sim.world.process import Process

_COUNTER_OF_REASON: Final = {int(reason): f"reported {reason.name}" for reason in RowOutcomeCode}
_FEED_ENTRY: Final = struct.Struct(">5i")  # client ID, generation, partition, sequence, header


class OutcomeGuarantees:
    """Checks the results that all applications receive."""

    def __init__(
        self, state: "CheckerState", responses: "ResponseGuarantees", locks: "LockGuarantees"
    ) -> None:
        self._state = state
        self._responses = responses
        self._locks = locks
        self._marks: dict[str, int] = {}
        self._exposure_us: dict[int, int] = {}  # when each ID was first exposed as committed
        self.feed_clients: dict[str, SimClient] = {}  # clients that have requested the feed

    # ---- the log (rule 1)

    def on_log_exposed(self, last: TransactionId, chain: Chain) -> None:
        """1. AckUnique: check that a component exposes the log up to an ID with this chain."""
        for transaction_id in self._state.history.extend_log(last, chain):
            self._check_new_row(transaction_id)

    def on_batch_submitted(self, chain: Chain) -> None:
        """16. NotAhead: check that no row was computed from rows that are not in the log."""
        history = self._state.history
        for position, row in enumerate(history.nodes[chain].rows, history.nodes[chain].first):
            operation = history.operations.get(row.number)
            if operation is None:
                continue
            if operation.session_id != NO_SESSION:
                self._check_dependent_append(operation, chain, position)
            elif operation.mark > history.last:
                self._state.fail(
                    "NotAhead",
                    f"{operation} is accepted, although its mark is above {history.last}, the end "
                    "of the log",
                )

    def _check_dependent_append(self, operation: Operation, chain: Chain, position: int) -> None:
        """Followed: check the IDs and the session of a dependent append's predecessors."""
        state, history = self._state, self._state.history
        session_id = history.nodes[chain].session_id
        if operation.session_id != session_id:
            state.fail("Followed", f"{operation} is accepted in another session, {session_id}")
        if operation.mark >= position:
            state.fail(
                "Followed",
                f"{operation} is accepted as transaction {position}, which is not above its mark",
            )
        for transaction_id, key in operation.predecessors:
            row = history.row_on_path(chain, transaction_id)
            if row is None or row.key != key:
                state.fail(
                    "Followed",
                    f"{operation}: expected predecessor {key} as transaction {transaction_id}, "
                    f"found {row}",
                )
        self._check_writers_reported(operation, chain)
        if operation.mark > history.last:
            state.count("dependent append sent before its predecessors committed")

    def _check_writers_reported(self, operation: Operation, chain: Chain) -> None:
        """Followed: check that the row's author was notified of all newer writers of its locks."""
        history = self._state.history
        reported = {transaction_id for transaction_id, _ in operation.predecessors}
        locks = {*operation.write_locks, *operation.read_locks}
        for transaction_id in range(operation.state_mark + 1, operation.mark + 1):
            row = history.row_on_path(chain, transaction_id)
            writer = None if row is None else history.operations.get(row.number)
            if writer is None or transaction_id in reported:
                continue
            if not locks.isdisjoint((*writer.write_locks, *writer.append_locks)):
                self._state.fail(
                    "Followed",
                    f"the author of {operation} was not notified of {writer}, transaction "
                    f"{transaction_id}",
                )

    def _check_new_row(self, transaction_id: int) -> None:
        """Check a new row: 11. OutcomeTruth, 12. AtMostOnce, 16. NotAhead, 17. LockSerial."""
        state, history = self._state, self._state.history
        self._exposure_us[transaction_id] = state.world.now_us
        operation = history.operations.get(history.log[transaction_id].number)
        if operation is None:
            state.fail(
                "LogMatching",
                f"no application has appended the row of transaction {transaction_id}",
            )
        if data_of_record(history.records[transaction_id]) != operation.data:
            state.fail(
                "LogMatching", f"{operation} differs from the row of transaction {transaction_id}"
            )
        if operation.outcome == "no":
            state.fail(
                "OutcomeTruth",
                f"{operation} is in the log as transaction {transaction_id}, but was reported as "
                "failed",
            )
        if operation.transaction_id not in {-1, transaction_id}:
            state.fail(
                "AtMostOnce",
                f"{operation} is in the log twice, also as transaction {transaction_id}",
            )
        operation.transaction_id = transaction_id
        self._check_serial(operation, transaction_id)
        self._state.ledger.replay(transaction_id, operation.data)

    def _check_serial(self, operation: Operation, transaction_id: int) -> None:
        """17. LockSerial and 16. NotAhead: check a row by its author's real mark (rule 2)."""
        last_writer = self._locks.last_writer
        for lock in (*operation.write_locks, *operation.read_locks):
            writer = last_writer(lock, transaction_id)
            if writer > operation.mark:
                self._state.fail(
                    "LockSerial",
                    f"transaction {transaction_id} has mark {operation.mark}, but transaction "
                    f"{writer} has written its lock {lock}",
                )
        if operation.mark >= transaction_id:
            self._state.fail(
                "NotAhead",
                f"transaction {transaction_id} has mark {operation.mark}, expected a lower mark",
            )
        self._locks.add_row(operation, transaction_id)

    # ---- clients

    def on_client_started(self, client: "SimClient") -> None:
        """Record that a client starts."""
        self._marks[client.name] = BEFORE_FIRST
        self.feed_clients.pop(client.name, None)

    def on_client_died(self, client: "Process") -> None:
        """Set the outcome of the pending operations of a client that died."""
        self.feed_clients.pop(client.name, None)
        for operation in self._state.history.operations.values():
            if operation.client == client.name and not operation.outcome:
                operation.outcome = "gone"

    def on_client_mark_moved(self, client: "SimClient", mark: TransactionId) -> None:
        """15. HwmMono: check that a client's mark never goes back, and is never beyond the log."""
        if mark < self._marks[client.name]:
            self._state.fail(
                "HwmMono",
                f"the mark of {client.name} moves back from {self._marks[client.name]} to {mark}",
            )
        self._check_not_beyond_log(client, mark)
        self._marks[client.name] = mark

    def _check_not_beyond_log(self, client: "SimClient", mark: int) -> None:
        last = self._state.history.last
        if mark > last:
            self._state.fail(
                "HwmMono", f"{client.name} received mark {mark}, but the log ends at {last}"
            )

    def on_submission_settled(
        self, client: "SimClient", effect: stream_events.SubmissionSettled
    ) -> None:
        """11. OutcomeTruth: check each outcome that an application receives."""
        state, outcome = self._state, effect.outcome
        assert isinstance(outcome.reasons, np.ndarray)
        for operation, transaction_id, reason, conflict in zip(
            state.cluster.workload.operations_of(effect.token),
            outcome.transaction_ids.tolist(),
            outcome.reasons.tolist(),
            outcome.conflicting.tolist(),
            strict=True,
        ):
            state.counts[_COUNTER_OF_REASON[reason]] += 1
            if transaction_id >= 0:
                self._check_reported_commit(operation, transaction_id)
            else:
                self._check_reported_rejection(operation, RowOutcomeCode(reason), conflict)
        self._check_not_beyond_log(client, outcome.high_water_mark)

    def _check_reported_commit(self, operation: Operation, transaction_id: int) -> None:
        history = self._state.history
        if transaction_id > history.last or (
            history.log[transaction_id].number != operation.number
        ):
            self._state.fail(
                "OutcomeTruth", f"{operation} was reported as transaction {transaction_id}"
            )
        operation.outcome = "ok"
        self._responses.on_acknowledged(transaction_id)

    def _check_reported_rejection(
        self, operation: Operation, reason: RowOutcomeCode, conflict: int
    ) -> None:
        if operation.transaction_id >= 0:
            self._state.fail(
                "OutcomeTruth", f"{operation} is in the log, but was reported as {reason!r}"
            )
        if reason == RowOutcomeCode.LOCK and conflict > self._state.history.last:
            self._state.fail(
                "OutcomeTruth",
                f"{operation} was rejected because of {conflict}, which is not committed",
            )
        if reason == RowOutcomeCode.AHEAD and self._was_mark_reached(operation):
            self._state.fail(
                "OutcomeTruth",
                f"{operation} was rejected as AHEAD, although the log had reached its mark",
            )
        operation.outcome = "no"

    def _was_mark_reached(self, operation: Operation) -> bool:
        """Whether the log had reached an operation's mark before the application requested it."""
        exposed_us = self._exposure_us.get(operation.mark, operation.requested_us + 1)
        return operation.mark == BEFORE_FIRST or exposed_us <= operation.requested_us

    def on_submission_rejected(self, client: "SimClient", token: int, error: WaltzError) -> None:
        """11. OutcomeTruth: check a failed submission, which is unknown or was not sent."""
        is_unknown = isinstance(error, OutcomeUnknown)
        self._state.count("reported unknown" if is_unknown else "reported not sent")
        for operation in self._state.cluster.workload.operations_of(token):
            operation.outcome = "unknown" if is_unknown else "no"
            if not is_unknown and operation.transaction_id >= 0:
                self._state.fail(
                    "OutcomeTruth", f"{operation} is in the log, but failed with {error}"
                )

    def on_context_ended(
        self, operation: Operation, result: TransactionId | Exception | None
    ) -> None:
        """11. OutcomeTruth: check the result of a context's attempt, an ID or an error."""
        if isinstance(result, OutcomeUnknown):
            operation.outcome = "unknown"
        elif isinstance(result, int):
            self._check_reported_commit(operation, result)
        else:
            self._check_reported_rejection(operation, RowOutcomeCode.LOST, BEFORE_FIRST)

    # ---- the feed

    def on_feed_received(self, client: "SimClient", effect: stream_events.FeedAdvanced) -> None:
        """13. Dense and 14. ClientPrefix: check the rows that a client receives in its feed."""
        state, log = self._state, self._state.history.log
        if effect.first != client.fed_last + 1:
            state.fail(
                "Dense",
                f"the feed of {client.name} continues with {effect.first} after {client.fed_last}",
            )
        entries = list(_FEED_ENTRY.iter_unpack(effect.headers))
        if len(entries) != effect.count:
            state.fail(
                "Dense", f"{client.name} received {len(entries)} headers, expected {effect.count}"
            )
        for position, (client_id, _, _, sequence, _) in enumerate(entries, effect.first):
            if position >= len(log) or log[position].key != (client_id, sequence):
                state.fail(
                    "ClientPrefix", f"{client.name} received a wrong row as transaction {position}"
                )
        state.counts["fed"] += effect.count

    def have_all_feeds_ended(self) -> bool:
        """25. Converged: whether every client that follows the feed has reached the log's end."""
        last = self._state.history.last
        return all(client.fed_last == last for client in self.feed_clients.values())
