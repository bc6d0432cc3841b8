"""What applications are told, held against the log: outcomes, feeds, marks.

This is the whole of what a user sees. It needs no replica, no session and no server to be judged:
only the log and the people.

Rules:
    1. The log is the books' one; it grows here, and each new row is looked at once, as it comes in.
    2. An application's mark is what it has really seen, whatever its client claims.
    3. Nobody is told that he is ahead of a log that had reached his mark before he asked.
"""

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from waltz_core.client.stream import stream_events
from waltz_core.errors import OutcomeUnknown, WaltzError
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, Chain, TransactionId
from waltz_core.wire.messages import Reason
from waltz_sim.promises.history import Operation, data_in

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.promises.answer_promises import AnswerPromises
    from waltz_sim.promises.locking import Locking
    from waltz_sim.promises.witness import Witness
    from waltz_sim.world.process import Process

_TOLD: Final = {int(reason): f"told {reason.name}" for reason in Reason}
_HEAD: Final = struct.Struct(">5i")  # client id, generation, partition, sequence, header


class Outcomes:
    """All applications."""

    def __init__(self, witness: "Witness", answers: "AnswerPromises", locking: "Locking") -> None:
        self._witness = witness
        self._answers = answers
        self._locking = locking
        self._marks: dict[str, int] = {}
        self._since_us: dict[int, int] = {}  # when each id was first known to be in the log
        self.followers: dict[str, SimClient] = {}  # who has asked for the feed

    # ---- the log (rule 1)

    def exposed(self, last: TransactionId, chain: Chain) -> None:
        """1. AckUnique: somebody says that the log reaches an id, with this chain there."""
        for transaction_id in self._witness.history.exposed(last, chain):
            self._in_the_log(transaction_id)

    def submitted(self, chain: Chain) -> None:
        """16. NotAhead: nobody has computed from what is not in the log."""
        history = self._witness.history
        for place, row in enumerate(history.nodes[chain].rows, history.nodes[chain].first):
            operation = history.operations.get(row.number)
            if operation is None:
                continue
            if operation.session_id != NO_SESSION:
                self._check_followed(operation, chain, place)
            elif operation.mark > history.last:
                self._witness.fail(
                    "NotAhead", f"{operation} is taken, the log ends at {history.last}"
                )

    def _check_followed(self, operation: Operation, chain: Chain, place: int) -> None:
        """Followed: what its author took to be in flight is what stands there, in one session."""
        witness, history = self._witness, self._witness.history
        session_id = history.nodes[chain].session_id
        if operation.session_id != session_id:
            witness.fail("Followed", f"{operation} is taken in session {session_id}")
        if operation.mark >= place:
            witness.fail("Followed", f"{operation} is taken as {place}")
        for transaction_id, key in operation.followed:
            row = history.row_before(chain, transaction_id)
            if row is None or row.key != key:
                witness.fail(
                    "Followed", f"{operation} follows {key} at {transaction_id}, there is {row}"
                )
        self._check_all_told(operation, chain)
        if operation.mark > history.last:
            witness.count("followed in flight")

    def _check_all_told(self, operation: Operation, chain: Chain) -> None:
        """Followed: its author was told of all that has entered one of his locks since then."""
        history = self._witness.history
        told = {transaction_id for transaction_id, _ in operation.followed}
        locks = {*operation.write, *operation.read}
        for transaction_id in range(operation.state_mark + 1, operation.mark + 1):
            row = history.row_before(chain, transaction_id)
            writer = None if row is None else history.operations.get(row.number)
            if writer is None or transaction_id in told:
                continue
            if not locks.isdisjoint((*writer.write, *writer.append)):
                self._witness.fail(
                    "Followed", f"{operation} was not told of {writer} at {transaction_id}"
                )

    def _in_the_log(self, transaction_id: int) -> None:
        """11. OutcomeTruth, 12. AtMostOnce, 16. NotAhead, 17. LockSerial."""
        witness, history = self._witness, self._witness.history
        self._since_us[transaction_id] = witness.world.now_us
        operation = history.operations.get(history.log[transaction_id].number)
        if operation is None:
            witness.fail("LogMatching", f"nobody asked for what is at {transaction_id}")
        if data_in(history.records[transaction_id]) != operation.data:
            witness.fail("LogMatching", f"{operation} is not what lies at {transaction_id}")
        if operation.told == "no":
            witness.fail("OutcomeTruth", f"{operation} was told no, and is at {transaction_id}")
        if operation.transaction_id not in {-1, transaction_id}:
            witness.fail("AtMostOnce", f"{operation} is at {transaction_id}, too")
        operation.transaction_id = transaction_id
        self._check_serial(operation, transaction_id)
        self._witness.ledger.take(transaction_id, operation.data)

    def _check_serial(self, operation: Operation, transaction_id: int) -> None:
        """17. LockSerial and 16. NotAhead, by the author's true mark (rule 2)."""
        last_writer = self._locking.last_writer
        for lock in (*operation.write, *operation.read):
            writer = last_writer(lock, transaction_id)
            if writer > operation.mark:
                self._witness.fail(
                    "LockSerial",
                    f"{transaction_id} with lock {lock} at mark {operation.mark}, written at "
                    f"{writer}",
                )
        if operation.mark >= transaction_id:
            self._witness.fail("NotAhead", f"{transaction_id} was computed at {operation.mark}")
        self._locking.written(operation, transaction_id)

    # ---- clients

    def started(self, client: "SimClient") -> None:
        """A client begins a life."""
        self._marks[client.name] = BEFORE_FIRST
        self.followers.pop(client.name, None)

    def died(self, client: "Process") -> None:
        """What it waited for is nobody's any more."""
        self.followers.pop(client.name, None)
        for operation in self._witness.history.operations.values():
            if operation.client == client.name and not operation.told:
                operation.told = "gone"

    def mark_moved(self, client: "SimClient", mark: TransactionId) -> None:
        """15. HwmMono: a mark that a client is shown never goes back, nor beyond the log."""
        if mark < self._marks[client.name]:
            self._witness.fail("HwmMono", f"{client.name}: {mark} after {self._marks[client.name]}")
        self._not_beyond(client, mark)
        self._marks[client.name] = mark

    def _not_beyond(self, client: "SimClient", mark: int) -> None:
        last = self._witness.history.last
        if mark > last:
            self._witness.fail("HwmMono", f"{client.name} was shown {mark}, the log ends at {last}")

    def settled(self, client: "SimClient", effect: stream_events.ParcelSettled) -> None:
        """11. OutcomeTruth: what an application is told is so."""
        witness, outcome = self._witness, effect.outcome
        assert isinstance(outcome.reasons, np.ndarray)
        for operation, transaction_id, reason, conflict in zip(
            witness.cluster.workload.operations_of(effect.token),
            outcome.transaction_ids.tolist(),
            outcome.reasons.tolist(),
            outcome.conflicting.tolist(),
            strict=True,
        ):
            witness.counts[_TOLD[reason]] += 1
            if transaction_id >= 0:
                self._told_yes(operation, transaction_id)
            else:
                self._told_no(operation, Reason(reason), conflict)
        self._not_beyond(client, outcome.high_water_mark)

    def _told_yes(self, operation: Operation, transaction_id: int) -> None:
        history = self._witness.history
        if transaction_id > history.last or (
            history.log[transaction_id].number != operation.number
        ):
            self._witness.fail("OutcomeTruth", f"{operation} was told {transaction_id}")
        operation.told = "ok"
        self._answers.acknowledged(transaction_id)

    def _told_no(self, operation: Operation, reason: Reason, conflict: int) -> None:
        if operation.transaction_id >= 0:
            self._witness.fail("OutcomeTruth", f"{operation} is in the log, told {reason!r}")
        if reason == Reason.LOCK and conflict > self._witness.history.last:
            self._witness.fail("OutcomeTruth", f"refused for {conflict}, which is not final")
        if reason == Reason.AHEAD and self._is_reached(operation):
            self._witness.fail("OutcomeTruth", f"{operation} was told AHEAD, and was not (rule 3)")
        operation.told = "no"

    def _is_reached(self, operation: Operation) -> bool:
        """Whether the log had the mark of an operation when that was asked for."""
        since_us = self._since_us.get(operation.mark, operation.asked_us + 1)
        return operation.mark == BEFORE_FIRST or since_us <= operation.asked_us

    def refused(self, client: "SimClient", token: int, error: WaltzError) -> None:
        """11. OutcomeTruth, of a parcel without an outcome: nobody knows, or surely not."""
        is_unknown = isinstance(error, OutcomeUnknown)
        self._witness.count("told unknown" if is_unknown else "told not sent")
        for operation in self._witness.cluster.workload.operations_of(token):
            operation.told = "unknown" if is_unknown else "no"
            if not is_unknown and operation.transaction_id >= 0:
                self._witness.fail("OutcomeTruth", f"{operation} is in the log, told {error}")

    def context_ended(self, operation: Operation, result: TransactionId | Exception | None) -> None:
        """11. OutcomeTruth, of an attempt of a context: its id, or why there is none."""
        if isinstance(result, OutcomeUnknown):
            operation.told = "unknown"
        elif isinstance(result, int):
            self._told_yes(operation, result)
        else:
            self._told_no(operation, Reason.LOST, BEFORE_FIRST)

    # ---- the feed

    def fed(self, client: "SimClient", effect: stream_events.Fed) -> None:
        """13. Dense and 14. ClientPrefix."""
        witness, log = self._witness, self._witness.history.log
        if effect.first != client.fed + 1:
            witness.fail("Dense", f"{client.name} was fed {effect.first} after {client.fed}")
        heads = list(_HEAD.iter_unpack(effect.headers))
        if len(heads) != effect.count:
            witness.fail("Dense", f"{client.name} was fed {len(heads)} headers as {effect.count}")
        for place, (client_id, _, _, sequence, _) in enumerate(heads, effect.first):
            if place >= len(log) or log[place].key != (client_id, sequence):
                witness.fail("ClientPrefix", f"{client.name} was fed another one at {place}")
        witness.counts["fed"] += effect.count

    def are_all_fed(self) -> bool:
        """25. Converged: whoever follows the feed has come to its end."""
        last = self._witness.history.last
        return all(each.fed == last for each in self.followers.values())
