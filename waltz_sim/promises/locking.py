"""Lock tables, held against who has really written what.

Whether the log is serializable is looked at elsewhere, without any table. This says why it would
not be: a table that forgot a writer, or one that remembers what never was.

Rules:
    1. A table errs upwards only, and never above what its server has given out.
    2. A server knows the log up to the mark that its session has committed; what others have
       written since is no fault of its table.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.replication import session_events

if TYPE_CHECKING:
    from waltz_sim.cluster.servers import SimServer
    from waltz_sim.promises.history import Operation
    from waltz_sim.promises.witness import Witness

# Every so many steps of servers one lock of one table is looked at, and the whole table at last.
LOCK_EVERY: Final = 4
TABLE_EVERY: Final = 64


class Locking:
    """All lock tables."""

    def __init__(self, witness: "Witness") -> None:
        self._witness = witness
        self._writers: dict[int, list[int]] = {}  # lock -> the transactions that wrote it
        self._mark: dict[str, int] = {}  # of each server: committed in its session
        self._given: dict[str, int] = {}  # and handed to the store
        self._step_count = 0

    def written(self, operation: "Operation", transaction_id: int) -> None:
        """A row is in the log."""
        for lock in (*operation.write, *operation.append):
            self._writers.setdefault(lock, []).append(transaction_id)

    def last_writer(self, lock: int, mark: int) -> int:
        """Return who wrote a lock last, up to a mark."""
        writers = self._writers.get(lock, ())
        at = bisect_right(writers, mark)
        return writers[at - 1] if at else BEFORE_FIRST

    def store_said(self, server: str, effect: session_events.Effect) -> None:
        """Marks move."""
        match effect:
            case session_events.SessionOpened():
                self._mark[server] = self._given[server] = effect.high_water_mark
            case session_events.Committed():
                self._mark[server] = effect.last
            case _:
                pass

    def submitted(self, server: str, batch: session_events.Batch) -> None:
        """Ids are given out."""
        self._given[server] = batch.last

    def stepped(self, server: "SimServer") -> None:
        """Look at a lock now and then, and at all of them more seldom."""
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
        """18. LockBound and 19. ReserveHeld, of one lock."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        estimate, mark = table.estimate(lock), self._mark[name]
        given = self._given_out(server)
        writer = self.last_writer(lock, mark)
        if estimate < writer:
            self._witness.fail(
                "LockBound", f"{name} has lock {lock} at {estimate}, {writer} wrote it"
            )
        if estimate > given:
            self._witness.fail(
                "ReserveHeld",
                f"{name} has lock {lock} at {estimate}; given out was {given}, "
                f"the log ends at {mark}",
            )

    def _given_out(self, server: "SimServer") -> TransactionId:
        """Return the last id that was given out: some are not handed to the store yet."""
        assert server.partition is not None
        gathered = server.partition.pipeline.gathered_count
        return TransactionId(self._given[server.name] + gathered)

    def check_table(self, server: "SimServer") -> None:
        """The same of a whole table: nothing is reserved for what is not in flight."""
        assert server.partition is not None
        table, name = server.partition.pipeline.locks, server.name
        assert table is not None
        given = self._given_out(server)
        if table.false_refusal_probability(given) > 0:
            self._witness.fail("ReserveHeld", f"{name} has entries above {given}")
