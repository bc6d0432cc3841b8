"""Checks of lock tables against the transactions that really wrote each lock.

`ledger.py` checks serializability without lock tables. This module finds the cause of a failure: a
lock table that misses a writer, or has an entry for a transaction that never existed.

Rules:
    1. An entry of a lock table may be too high. It is never too low, and never above the last ID
       that its server has assigned.
    2. A server knows the log up to the high-water mark that its session has committed. The server's
       lock table need not have later writes by other servers.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.replication import session_events

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.history import Operation

# One lock of one table is checked every STEPS_PER_LOCK_CHECK steps of servers, and the reserved
# entries of the whole table every STEPS_PER_TABLE_CHECK steps.
STEPS_PER_LOCK_CHECK: Final = 4
STEPS_PER_TABLE_CHECK: Final = 64


class LockGuarantees:
    """Checks the lock tables of all servers."""

    def __init__(self, state: "CheckerState") -> None:
        self._state = state
        self._writers: dict[int, list[int]] = {}  # lock -> IDs of the transactions that wrote it
        self._committed_last: dict[str, int] = {}  # server -> the last ID committed in its session
        self._submitted_last: dict[str, int] = {}  # server -> the last ID submitted to its store
        self._step_count = 0

    def add_row(self, operation: "Operation", transaction_id: int) -> None:
        """Record the locks of a row that was added to the log."""
        for lock in (*operation.write_locks, *operation.append_locks):
            self._writers.setdefault(lock, []).append(transaction_id)

    def last_writer(self, lock: int, mark: int) -> int:
        """Return the ID of the last transaction that wrote a lock, up to a mark."""
        writers = self._writers.get(lock, ())
        at = bisect_right(writers, mark)
        return writers[at - 1] if at else BEFORE_FIRST

    def on_store_effect(self, server: str, effect: session_events.Effect) -> None:
        """Update the last committed ID of a server."""
        match effect:
            case session_events.SessionOpened():
                self._committed_last[server] = self._submitted_last[server] = effect.high_water_mark
            case session_events.TransactionsCommitted():
                self._committed_last[server] = effect.last
            case _:
                pass

    def on_batch_submitted(self, server: str, batch: session_events.Batch) -> None:
        """Record the last ID that a server has submitted to its store."""
        self._submitted_last[server] = batch.last

    def on_server_stepped(self, server: "SimServer") -> None:
        """Check one lock every few steps, and the reserved entries of the table less often."""
        self._step_count += 1
        count = self._step_count
        if count % STEPS_PER_LOCK_CHECK:
            return
        partition = server.partition
        if partition is None or not partition.is_open:
            return
        locks = list(self._writers)
        if locks:
            self.check_lock(server, locks[count // STEPS_PER_LOCK_CHECK % len(locks)])
        if count % STEPS_PER_TABLE_CHECK == 0:
            self.check_table(server)

    def check_lock(self, server: "SimServer", lock: int) -> None:
        """Check the entry of one lock in a server's table: 18. LockBound and 19. ReserveHeld."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        estimate, mark = table.estimate(lock), self._committed_last[name]
        assigned_last = self._last_assigned_id(server)
        writer = self.last_writer(lock, mark)
        if estimate < writer:
            self._state.fail(
                "LockBound",
                f"{name} has transaction {estimate} as the last writer of lock {lock}, but "
                f"transaction {writer} has written it",
            )
        if estimate > assigned_last:
            self._state.fail(
                "ReserveHeld",
                f"{name} has transaction {estimate} as the last writer of lock {lock}: expected at "
                f"most the last assigned ID, {assigned_last} (the log ends at {mark})",
            )

    def _last_assigned_id(self, server: "SimServer") -> TransactionId:
        """Return the last ID that a server has assigned, whether submitted to the store or not."""
        assert server.partition is not None
        gathered = server.partition.pipeline.unsubmitted_count
        return TransactionId(self._submitted_last[server.name] + gathered)

    def check_table(self, server: "SimServer") -> None:
        """Check that a server's table has no reserved entries above the last assigned ID."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        assigned_last = self._last_assigned_id(server)
        if table.false_rejection_probability(assigned_last) > 0:
            self._state.fail(
                "ReserveHeld",
                f"{name} has lock entries above the last assigned ID, {assigned_last}",
            )
