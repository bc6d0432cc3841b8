"""The simulated applications.

A checker finds only faults that an application could notice, so these applications use the whole
API. They append single transactions and batches, with all kinds of locks, at old and new marks.
They retry after a rejection, follow the feed, query marks, die and restart.

Rules:
    1. Each client works in its own loop, with its own random numbers.
    2. Every row has a unique number, and is recorded before it is sent.
    3. A checked transaction (`ledger.py`) reads the state at its mark, like an application that has
       applied the feed up to this mark.
    4. Some applications follow appends in flight: they compute new rows from these appends, as if
       the appends were committed.
    5. A row that claims a mark beyond the log has only append locks, because no value can be
       computed from transactions that do not exist.
"""

import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

from waltz_core.client.model.predecessors import NO_PREDECESSORS, PipelinedState
from waltz_core.client.stream import stream_events
from waltz_core.client.stream.outcome_tracker import SingleRow, Submission
from waltz_core.errors import BeforeLogStart, WaltzError
from waltz_core.records.batches import encode_append
from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.wire.messages import (
    FlushRequest,
    HighWaterMarkRequest,
    RangeForm,
    RangeRequest,
    ReplicasRequest,
    RowOutcomeCode,
    TransactionDataRequest,
)
from waltz_sim.guarantees.history import NUMBER_BYTES, Operation, make_data
from waltz_sim.guarantees.ledger import CheckedTransaction, RowKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.world.process import Process

# The write, read and append locks of one row.
Locks = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
RowPlan = Locks | CheckedTransaction
PENDING_MAX: Final = 4
RETRIES_MAX: Final = 3
RECOVERY_WAIT_US: Final = 200_000
SLOWDOWN_STEP_US: Final = 20_000
CHECKED_TRANSACTION_SHARE: Final = 0.4
REQUEST_SHARE: Final = 0.06
WAITING_REQUEST_SHARE: Final = 0.25  # for an application whose appends are not answered
MARK_AHEAD_SHARE: Final = 0.004
# Long records have whole sectors between their first and their last sector.
ROWS_PER_LONG_ROW: Final = 7
LONG_ROW_BYTES: Final = 1_200


class Workload:
    """All applications of a world, and their submissions."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._row_count = 0
        self._submission_count = 0
        self._submissions: dict[int, list[Operation]] = {}
        self.first_available = TransactionId(0)  # as the applications have learned it
        self.is_over = False
        self._recovering_since_us: int | None = None

    def recovering_us(self) -> int:
        """Return the time in µs since the recovery phase began."""
        if self._recovering_since_us is None:
            self._recovering_since_us = self._world.now_us
        return self._world.now_us - self._recovering_since_us

    @property
    def pending_count(self) -> int:
        """The number of submissions that wait for an outcome."""
        return len(self._submissions)

    def operations_of(self, token: int) -> "Sequence[Operation]":
        """Return the rows of a submission."""
        return self._submissions[token]

    def begin(self, client: "SimClient") -> None:
        """Start the application of a client that has just started."""
        _Application(self, self._cluster, client).begin()

    def create_submission(
        self,
        client: "SimClient",
        rows: "Sequence[RowPlan]",
        mark: int,
        pipelined_state: PipelinedState | None = None,
    ) -> Submission:
        """Record rows (checked transactions, or locks), and return a submission with them.

        Dependent rows are computed from the state at the mark, and from the appends in flight.
        """
        self._submission_count += 1
        operations = [self._record_row(client.name, row, mark, pipelined_state) for row in rows]
        self._submissions[self._submission_count] = operations
        if len(operations) == 1:
            operation = operations[0]
            content = SingleRow(
                7,
                operation.data,
                operation.write_locks,
                operation.read_locks,
                operation.append_locks,
                pipelined_state,
            )
            return Submission(
                self._submission_count,
                1,
                TransactionId(operation.mark),
                content,
                zlib.crc32(operation.data),
            )
        payload = encode_append(
            [7] * len(rows),
            [each.data for each in operations],
            write_locks=[each.write_locks for each in operations],
            read_locks=[each.read_locks for each in operations],
            append_locks=[each.append_locks for each in operations],
        )
        return Submission(
            self._submission_count, len(rows), TransactionId(mark), payload, zlib.crc32(payload)
        )

    def record_rows(self, author: str, rows: "Sequence[Locks]") -> list[Operation]:
        """Record rows that no author waits for."""
        operations = [self._record_row(author, row, BEFORE_FIRST, None) for row in rows]
        for operation in operations:
            operation.outcome = "gone"
        return operations

    def _record_row(
        self, author: str, row: RowPlan, mark: int, pipelined_state: PipelinedState | None
    ) -> Operation:
        self._row_count += 1
        ahead = (
            ()
            if pipelined_state is None
            else pipelined_state.predecessors_above(TransactionId(mark))
        )
        number, checks = self._row_count, self._cluster.checks
        if isinstance(row, CheckedTransaction):
            write, read = row.write_locks, row.read_locks
            append: tuple[int, ...] = ()
            data = make_data(number, NUMBER_BYTES) + checks.ledger.encode_body(
                row, mark, [each.data for each in ahead]
            )
        else:
            write, read, append = row
            is_long = not number % ROWS_PER_LONG_ROW
            data = make_data(number, LONG_ROW_BYTES if is_long else NUMBER_BYTES * (1 + number % 3))
        state_mark = mark
        if pipelined_state is not None and pipelined_state.has_received_predecessors:
            mark = pipelined_state.mark
        operation = Operation(
            number, author, row, write, read, append, mark, self._world.now_us, data
        )
        if pipelined_state is not None and pipelined_state.has_received_predecessors:
            operation.session_id, operation.state_mark = pipelined_state.session_id, state_mark
            operation.predecessors = tuple(
                (each.transaction_id, (each.req_id.client_id, each.req_id.sequence))
                for each in ahead
            )
        checks.history.operations[number] = operation
        return operation

    def record_row(self, author: str, row: RowPlan, mark: int) -> Operation:
        """Record one row whose outcome the caller reports to the checkers."""
        return self._record_row(author, row, mark, None)

    def think_us(self, process: "Process") -> int:
        """Return the pause in µs after an action of an application."""
        think_us = self._cluster.setup.think_ms * 1_000
        if self._cluster.is_recovering:
            # Only the recovery of the cluster is still awaited, which may take long.
            late_us = max(0, self.recovering_us() - RECOVERY_WAIT_US)
            think_us += think_us * late_us // SLOWDOWN_STEP_US
        return int(process.chance() * 2 * think_us) + 100

    def checked_transaction_of(self, process: "Process") -> CheckedTransaction:
        """Return the next checked transaction of an application."""
        keys, roll = self._cluster.setup.keys, process.chance()
        key = int(process.chance() * keys)
        if roll < 0.4:
            return CheckedTransaction(
                RowKind.TRANSFER, key, (key + 1 + int(process.chance() * (keys - 1))) % keys
            )
        return (
            CheckedTransaction(RowKind.PUSH, key, key)
            if roll < 0.7
            else CheckedTransaction(RowKind.GUARD, key, key ^ 1)
        )

    def remove_submission(self, token: int) -> "list[Operation]":
        """Remove a submission whose outcome is known, or will never be known; return its rows."""
        return self._submissions.pop(token)

    def drop_submissions(self, client: "SimClient") -> None:
        """Remove all submissions of a client that has died."""
        for token, operations in list(self._submissions.items()):
            if operations[0].client == client.name:
                del self._submissions[token]


class _Application:
    """The application of one client, until the client dies."""

    def __init__(self, workload: Workload, cluster: "SimCluster", client: "SimClient") -> None:
        self._workload = workload
        self._cluster = cluster
        self._client = client
        self._chance = client.chance
        self._rng = client.rng
        self._is_pipelined = int(client.name.removeprefix("client")) < cluster.setup.followers
        self._waiting_count = 0
        self._retry_count = 0

    def begin(self) -> None:
        client = self._client
        client.on_settled = self._on_settled
        client.on_rejected = self._on_rejected
        client.on_stopped = self._on_stopped
        if self._chance() < 0.6:
            client.subscribe(TransactionId(self._workload.first_available - 1))
        self._act_later()

    def _act_later(self) -> None:
        self._client.call_after_us(self._workload.think_us(self._client), self._run_next_action)

    def _run_next_action(self) -> None:
        if self._workload.is_over:
            return
        is_stuck = self._waiting_count >= PENDING_MAX
        if self._chance() < (WAITING_REQUEST_SHARE if is_stuck else REQUEST_SHARE):
            self._random_request()
        if not is_stuck:
            roll = self._chance()
            if roll >= self._cluster.setup.batch_share:
                self._append([self._choose_row()], self._choose_mark())
            else:
                rows = [self._choose_row() for _ in range(2 + int(self._chance() * 5))]
                self._append(rows, self._choose_mark())
        self._act_later()

    def _random_request(self) -> None:
        """Query a mark, a range, or one transaction; the checkers check the answers."""
        client, roll = self._client, self._chance()
        last = max(0, client.mark)
        if roll < 0.3:
            client.request(lambda req_id: ReplicasRequest(req_id, linearizable=True))
        elif roll < 0.4:
            client.request(lambda req_id: ReplicasRequest(req_id, linearizable=False))
        elif roll < 0.55:
            client.request(HighWaterMarkRequest)
        elif roll < 0.75:
            client.request(FlushRequest)
        elif roll < 0.85:
            position = TransactionId(int(self._chance() * (last + 1)))
            client.request(lambda req_id: TransactionDataRequest(req_id, position))
        else:
            form = RangeForm.WHOLE if self._chance() < 0.7 else RangeForm.HEADERS
            wanted = (7,) if self._chance() < 0.3 else ()
            first = int(self._chance() * (last + 1))
            client.request(lambda req_id: RangeRequest(req_id, first, last, 600, form, wanted))

    def _choose_mark(self) -> int:
        """Return a mark that the application has seen: mostly the last, sometimes an older one."""
        mark: int = self._client.mark
        if self._chance() < 0.2:
            mark = max(BEFORE_FIRST, mark - int(self._chance() * 10))
        return mark

    def _choose_row(self) -> RowPlan:
        if self._chance() < CHECKED_TRANSACTION_SHARE:
            return self._workload.checked_transaction_of(self._client)
        return self._random_locks(0.5), self._random_locks(0.3), self._random_locks(0.2)

    def _random_locks(self, share: float) -> tuple[int, ...]:
        if self._chance() >= share:
            return ()
        keys = self._cluster.setup.keys
        count = 1 if self._chance() < 0.8 else 2
        return tuple(sorted({int(self._chance() * keys) for _ in range(count)}))

    def _append(
        self, rows: "Sequence[RowPlan]", mark: int, pipelined_state: PipelinedState | None = None
    ) -> None:
        self._waiting_count += 1
        if self._chance() < MARK_AHEAD_SHARE:
            rows, mark, pipelined_state = [((), (), (1,))], self._client.mark + 5, None
        claimed: PipelinedState | None = None
        if self._is_pipelined and len(rows) == 1:
            # The row is computed from the state at the mark, and from the earlier appends in
            # flight.
            claimed = (pipelined_state or NO_PREDECESSORS).mark_and_state(TransactionId(mark))[1]
        self._client.append(self._workload.create_submission(self._client, rows, mark, claimed))

    def _on_settled(self, effect: stream_events.SubmissionSettled) -> None:
        operations = self._workload.remove_submission(effect.token)
        self._waiting_count -= 1
        again = [
            operation.row
            for operation, reason in zip(operations, effect.outcome.reasons.tolist(), strict=True)
            if reason == RowOutcomeCode.LOCK
        ]
        if again and self._retry_count < RETRIES_MAX and not self._workload.is_over:
            self._retry_count += 1
            self._cluster.checks.count("retry after a rejection")
            self._append(again, self._client.mark, effect.outcome.pipelined_state)
        else:
            self._retry_count = 0

    def _on_stopped(self, error: WaltzError) -> None:
        """Start again after the expired transactions of the feed, as another client."""
        assert isinstance(error, BeforeLogStart)
        self._workload.first_available = TransactionId(error.first_available)
        client = self._client
        client.call_after_us(0, partial(self._restart, client.incarnation))

    def _restart(self, incarnation: int) -> None:
        client = self._client
        if client.incarnation == incarnation and client.is_up:
            client.kill()
            self._cluster.start_client(client)

    def _on_rejected(self, effect: stream_events.SubmissionRejected) -> None:
        self._workload.remove_submission(effect.token)
        self._waiting_count -= 1
