"""Checks of lock tables against the transactions that really wrote each lock.

`ledger.py` checks serializability without lock tables. This module finds the cause of a failure: a
lock table that misses a writer, or has an entry for a transaction that never existed.

Rules:
    1. An entry of a lock table may be too high. It is never too low, and never above the last ID
       that its server has assigned.
    2. A server knows the log up to the high-water mark that its session has committed. Its table
       need not have later writes by other servers.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.replication import session_events

if TYPE_CHECKING:
    from waltz_sim.cluster.servers import SimServer
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.history import Operation

# One lock of one table is checked every LOCK_EVERY steps of servers, and the reserved entries of
# the whole table every TABLE_EVERY steps.
LOCK_EVERY: Final = 4
TABLE_EVERY: Final = 64


class LockGuarantees:
    """Checks the lock tables of all servers."""

    def __init__(self, evidence: "CheckerState") -> None:
        self._facts = evidence
        self._writers: dict[int, list[int]] = {}  # lock -> IDs of the transactions that wrote it
        self._mark: dict[str, int] = {}  # server -> the last ID committed in its session
        self._given: dict[str, int] = {}  # server -> the last ID submitted to its store
        self._step_count = 0

    def written(self, operation: "Operation", transaction_id: int) -> None:
        """Record the locks of a row that was added to the log."""
        for lock in (*operation.write, *operation.append):
            self._writers.setdefault(lock, []).append(transaction_id)

    def last_writer(self, lock: int, mark: int) -> int:
        """Return the ID of the last transaction up to a mark that wrote a lock."""
        writers = self._writers.get(lock, ())
        at = bisect_right(writers, mark)
        return writers[at - 1] if at else BEFORE_FIRST

    def store_reported(self, server: str, effect: session_events.Effect) -> None:
        """Update the last committed ID of a server."""
        match effect:
            case session_events.SessionOpened():
                self._mark[server] = self._given[server] = effect.high_water_mark
            case session_events.Committed():
                self._mark[server] = effect.last
            case _:
                pass

    def submitted(self, server: str, batch: session_events.Batch) -> None:
        """Record the last ID that a server has submitted to its store."""
        self._given[server] = batch.last

    def stepped(self, server: "SimServer") -> None:
        """Check one lock every few steps, and the reserved entries of the table less often."""
        self._step_count += 1
        count = self._step_count
        if count % LOCK_EVERY:
            return
        partition = server.partition
        if partition is None or not partition.is_open:
            return
        locks = list(self._writers)
        if locks:
            self.check_lock(server, locks[count // LOCK_EVERY % len(locks)])
        if count % TABLE_EVERY == 0:
            self.check_table(server)

    def check_lock(self, server: "SimServer", lock: int) -> None:
        """Check the entry of one lock in a server's table: 18. LockBound and 19. ReserveHeld."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        estimate, mark = table.estimate(lock), self._mark[name]
        given = self._given_out(server)
        writer = self.last_writer(lock, mark)
        if estimate < writer:
            self._facts.fail(
                "LockBound", f"{name} has lock {lock} at {estimate}, but {writer} wrote it"
            )
        if estimate > given:
            self._facts.fail(
                "ReserveHeld",
                f"{name} has lock {lock} at {estimate}; the last assigned ID is {given}, "
                f"the log ends at {mark}",
            )

    def _given_out(self, server: "SimServer") -> TransactionId:
        """Return the last ID that a server has assigned, whether submitted to the store or not."""
        assert server.partition is not None
        gathered = server.partition.pipeline.gathered_count
        return TransactionId(self._given[server.name] + gathered)

    def check_table(self, server: "SimServer") -> None:
        """Check that a server's table has no reserved entries above the last assigned ID."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        given = self._given_out(server)
        if table.false_rejection_probability(given) > 0:
            self._facts.fail("ReserveHeld", f"{name} has entries above {given}")
