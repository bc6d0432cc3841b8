"""The append pipeline over a log that loses sessions: every reported outcome is true.

The inputs are random: clients, locks, marks, batches in pieces, late commits, remounts, closed
connections, and proofs that are late or missing. Sessions are lost, with or without another owner
in the meantime, and logs are truncated in the middle of a batch. At the end the outcomes are
compared with the log.
"""

import random
import zlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append
from waltz_core.records.record import (
    GENESIS_CHAIN,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication.session_events import Batch, SessionOpened
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import (
    AppendOutcome,
    BarrierReached,
    ConfirmAheadOfLog,
    SubmitBatch,
)
from waltz_core.server.append.pipeline import AppendPipeline
from waltz_core.server.append.recent_rejections import REJECTIONS_MAX
from waltz_core.server.locking.pending_appends import LARGE_REQUEST_BYTES_MIN, PendingAppend
from waltz_core.server.partition_events import ConnectionId, PartitionLimits, SendToClient
from waltz_core.wire.messages import AppendBatch, AppendRequest, AppendResult, RowOutcomeCode

SEEDS = range(150)
STEPS = 100
GENERATION = Generation(1)
FOREIGN = ClientId(99)


@dataclass
class Row:
    """A row that a client has sent, to compare it with the log."""

    mark: int
    write: tuple[int, ...]
    read: tuple[int, ...]
    append: tuple[int, ...]
    log_last: int  # the last ID of the log when the row was sent


def req_ids_of(batch: Batch) -> list[ReqId]:
    lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
    return [ReqId(*each) for each in raw_records.req_ids_of(batch.records, lengths).tolist()]


class RandomPieces(LargeBatchThrottle):
    """Draws the sizes of pieces: one row, two rows, or the size by the rules of the server."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def piece_bytes(self, now_ms: int) -> int | None:
        return self._rng.choice((1, 110, super().piece_bytes(now_ms)))


@dataclass
class World:
    rng: random.Random
    rows: dict[ReqId, Row] = field(default_factory=dict)
    requests: dict[ReqId, int] = field(default_factory=dict)  # first row -> number of rows
    answers: dict[ReqId, list[tuple[int, RowOutcomeCode, int]]] = field(default_factory=dict)
    log: list[ReqId] = field(default_factory=list)
    in_flight: list[Batch] = field(default_factory=list)
    sequence: int = 1
    session: int = 0
    is_open: bool = False
    unanswered_at_flush: dict[int, set[ReqId]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    submitted: set[ReqId] = field(default_factory=set)
    mount_of: dict[ReqId, ConnectionId] = field(default_factory=dict)
    closed: set[ConnectionId] = field(default_factory=set)
    now_ms: int = 0
    cut: set[ReqId] = field(default_factory=set)  # requests that store batches have split
    unproved: list[PendingAppend] = field(default_factory=list)
    # The rejections in the order of their answers.
    rejected: deque[tuple[ReqId, RowOutcomeCode, int]] = field(
        default_factory=lambda: deque(maxlen=REJECTIONS_MAX)
    )

    def __post_init__(self) -> None:
        self.mounts = Mounts(100)
        # The table has so few slots that locks collide. So a rejection may be false, but an
        # acceptance may not.
        limits = PartitionLimits(
            lock_slot_count=self.rng.choice((13, 1009)),
            slice_rows_max=self.rng.choice((2, 8192)),
            in_flight_batches_max=self.rng.choice((2, 64)),
        )
        self.large_share = self.rng.choice((0.0, 0.7, 1.0))
        self.pipeline = AppendPipeline(limits, self.mounts, RandomPieces(self.rng), PartitionId(0))
        self.connections = {ClientId(1): ConnectionId(1_000), ClientId(2): ConnectionId(2_000)}
        self.sequences = dict.fromkeys(self.connections, 1)
        for client, connection in self.connections.items():
            self.mounts.begin_mount(client, connection, 1)
            self.mounts.finish_mount(client, connection)

    # --- possible events

    def locks(self) -> tuple[int, ...]:
        return tuple(self.rng.randrange(6) for _ in range(self.rng.choice((0, 0, 1, 1, 2))))

    def row(self) -> Row:
        lag = self.rng.choice((-1, 0, 0, 0, 1, 3))
        last = len(self.log) - 1
        return Row(max(-1, last - lag), self.locks(), self.locks(), self.locks(), last)

    def send(self) -> None:
        client = self.rng.choice(list(self.connections))
        connection = self.connections[client]
        rows = [self.row() for _ in range(self.rng.choice((1, 1, 3, 6)))]
        req_id = ReqId(client, GENERATION, PartitionId(0), self.sequence)
        for row in rows:
            self.rows[req_id._replace(sequence=self.sequence)] = row
            self.sequence += 1
        self.requests[req_id] = len(rows)
        self.mount_of[req_id] = connection
        if len(rows) == 1 and self.rng.random() < 0.7:
            (row,) = rows
            data = b"x"
            locks = (row.write, row.read, row.append)
            single = AppendRequest(req_id, row.mark, *locks, 0, data, zlib.crc32(data))
            self.take(self.pipeline.receive(connection, single, cost_bytes=50, now_ms=self.now_ms))
            return
        payload = encode_append(
            [0] * len(rows),
            [b"x"] * len(rows),
            write_locks=[row.write for row in rows],
            read_locks=[row.read for row in rows],
            append_locks=[row.append for row in rows],
            marks=[row.mark for row in rows],
        )
        batch = AppendBatch(req_id, -1, payload, zlib.crc32(payload))
        cost_bytes = LARGE_REQUEST_BYTES_MIN if self.rng.random() < self.large_share else 50
        self.take(
            self.pipeline.receive(connection, batch, cost_bytes=cost_bytes, now_ms=self.now_ms)
        )

    def turn(self) -> None:
        self.now_ms += self.rng.choice((0, 1, 60))
        self.take(self.pipeline.process_slice(now_ms=self.now_ms, wall_ms=0))

    def commit(self) -> None:
        if not self.is_open or not self.in_flight:
            return
        for _ in range(self.rng.randint(1, len(self.in_flight))):
            self.append_to_log(self.in_flight.pop(0))
        last = TransactionId(len(self.log) - 1)
        self.take(self.pipeline.on_committed(last, self.chain, now_ms=self.now_ms))

    def lose(self) -> None:
        if not self.is_open:
            return
        self.pipeline.on_session_closed()
        self.prove(is_proved=False)
        self.is_open = False

    def prove(self, *, is_proved: bool | None = None) -> None:
        """Answer the appends whose marks are ahead of the log, with or without a session proof."""
        if is_proved is None:
            is_proved = self.rng.random() < 0.8
        appends, self.unproved = self.unproved, []
        for pending in appends:
            self.take(self.pipeline.answer_ahead_of_log(pending, is_proved=is_proved))

    def open(self) -> None:
        if self.is_open:
            return
        # Recovery keeps some of the rows in flight, possibly a part of a batch.
        for _ in range(self.rng.randint(0, len(self.in_flight))):
            self.append_to_log(self.in_flight.pop(0))
        if self.in_flight and self.rng.random() < 0.5:
            batch = self.in_flight.pop(0)
            self.append_to_log(batch, self.rng.randint(0, batch.last - batch.first))
        self.in_flight.clear()
        settled = len(self.log) - 1
        follows_own_session = self.rng.random() < 0.6
        if not follows_own_session:
            for _ in range(self.rng.randrange(4)):
                foreign = ReqId(FOREIGN, GENERATION, PartitionId(0), self.sequence)
                self.sequence += 1
                last = len(self.log) - 1
                self.rows[foreign] = Row(last, self.locks(), (), (), last)
                self.log.append(foreign)
        self.session += 1
        self.chain = GENESIS_CHAIN
        opened = SessionOpened(
            SessionId(self.session),
            GENERATION,
            TransactionId(len(self.log) - 1),
            GENESIS_CHAIN,
            follows_own_session,
        )
        self.is_open = True
        self.take(
            self.pipeline.on_session_settled(
                opened, TransactionId(settled), follows_own_session=follows_own_session
            )
        )
        for client, connection in list(self.connections.items()):
            if not self.mounts.is_ready(client, connection) and self.rng.random() < 0.7:
                self.remount(client)

    def remount(self, client: ClientId | None = None) -> None:
        if client is None:
            client = self.rng.choice(list(self.connections))
        connection = ConnectionId(self.connections[client] + 1)
        self.connections[client] = connection
        self.sequences[client] += 1
        self.mounts.begin_mount(client, connection, self.sequences[client])
        self.mounts.finish_mount(client, connection)

    def close(self) -> None:
        """Break a connection: the client gets no answers on it, and mounts on another one."""
        client = self.rng.choice(list(self.connections))
        connection = self.connections[client]
        self.mounts.on_connection_closed(connection)
        self.closed.add(connection)
        self.take(self.pipeline.close(connection))
        self.remount(client)

    def flush(self) -> None:
        token = len(self.unanswered_at_flush)
        self.unanswered_at_flush[token] = set(self.requests) - set(self.answers)
        self.take(self.pipeline.flush(token))

    # --- reported outcomes

    def append_to_log(self, batch: Batch, count: int | None = None) -> None:
        lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
        ids = raw_records.ids_of(batch.records, lengths).tolist()
        req_ids = raw_records.req_ids_of(batch.records, lengths).tolist()
        assert ids[0] == batch.first == len(self.log)
        for transaction_id, req_id in zip(ids[:count], req_ids[:count], strict=True):
            assert transaction_id == len(self.log)
            self.log.append(ReqId(*req_id))
        self.chain = next_chain(
            self.chain, batch.first, batch.last, SessionId(self.session), batch.record_crcs
        )

    def take(self, outcomes: list[AppendOutcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, SubmitBatch):
                self.in_flight.append(outcome.batch)
                self.record_split(outcome.batch)
            elif isinstance(outcome, BarrierReached):
                assert outcome.token not in self.reached
                self.reached.add(outcome.token)
                waited = self.unanswered_at_flush[outcome.token]
                open_rows = {row for batch in self.in_flight for row in req_ids_of(batch)}
                assert not any(self.rows_of(each) & open_rows for each in waited)
                assert self.rows_to_answer(self.unanswered_at_flush[outcome.token]) <= set(
                    self.answers
                )
            elif isinstance(outcome, ConfirmAheadOfLog):
                self.unproved.append(outcome.pending)
            elif isinstance(outcome, SendToClient):
                message = outcome.message
                assert isinstance(message, AppendResult)
                self.on_answer(message)

    def record_split(self, batch: Batch) -> None:
        sent = set(req_ids_of(batch))
        for first in self.requests:
            rows = self.rows_of(first)
            if rows & sent and rows & self.submitted:
                self.cut.add(first)
        assert not sent & self.submitted, "a row is submitted once"
        self.submitted |= sent

    def rows_of(self, first: ReqId) -> set[ReqId]:
        count = self.requests[first]
        return {first._replace(sequence=first.sequence + number) for number in range(count)}

    def rows_to_answer(self, requests: Collection[ReqId]) -> set[ReqId]:
        """Return the rows that must be answered, because their connection is open."""
        return {request for request in requests if self.mount_of[request] not in self.closed}

    def on_answer(self, message: AppendResult) -> None:
        assert message.req_id not in self.answers, "a row was answered twice"
        assert self.is_open, "an outcome was reported between sessions"
        ids = np.frombuffer(message.transaction_ids, ">i8").tolist()
        conflicts = np.frombuffer(message.conflicting, ">i8").tolist()
        reasons = [RowOutcomeCode(each) for each in bytes(message.reasons)]
        assert len(ids) == self.requests[message.req_id]
        self.answers[message.req_id] = list(zip(ids, reasons, conflicts, strict=True))
        mark = len(self.log) - 1
        assert message.high_water_mark <= mark
        for number, (transaction_id, reason, conflict) in enumerate(self.answers[message.req_id]):
            req_id = message.req_id._replace(sequence=message.req_id.sequence + number)
            row = self.rows[req_id]
            if reason in (RowOutcomeCode.LOCK, RowOutcomeCode.AHEAD):
                self.rejected.append((req_id, reason, conflict))
            assert reason != RowOutcomeCode.AHEAD or row.mark > row.log_last
            assert (reason == RowOutcomeCode.COMMITTED) == (transaction_id >= 0)
            assert transaction_id <= mark
            assert conflict <= mark, "a rejection was reported before its reason was final"
            assert (reason == RowOutcomeCode.LOCK) == (conflict >= 0)

    # --- the log

    def check(self) -> None:
        assert self.rows_to_answer(self.requests) <= set(self.answers)
        assert len(set(self.log)) == len(self.log), "AtMostOnce"
        reported = set()
        for first, rows in self.answers.items():
            for number, (transaction_id, _, conflict) in enumerate(rows):
                req_id = first._replace(sequence=first.sequence + number)
                if transaction_id >= 0:
                    assert self.log[transaction_id] == req_id, (
                        "OutcomeTruth: a row reported as committed is not in the log"
                    )
                    reported.add(req_id)
                else:
                    assert req_id not in self.log, (
                        "OutcomeTruth: a row reported as rejected is in the log"
                    )
                    assert conflict == -1 or conflict > self.rows[req_id].mark
        unreported = {
            row
            for request in self.requests
            if request not in self.answers
            for row in self.rows_of(request)
        }
        committed = {req_id for req_id in self.log if req_id.client_id != FOREIGN}
        assert reported == committed - unreported
        self.check_order()
        self.check_rejections()
        for position, req_id in enumerate(self.log):
            if req_id.client_id == FOREIGN:
                continue
            row = self.rows[req_id]
            held = set(row.write) | set(row.read)
            for between in self.log[row.mark + 1 : position]:
                entered = self.rows[between]
                assert not held & {*entered.write, *entered.append}, "LockSerial"
            assert row.mark < position, "NotAhead"

    def check_order(self) -> None:
        """Check that if a row is lost, the log has no later row of the same client and mount."""
        lost: set[ConnectionId] = set()
        for first in self.requests:
            mount = self.mount_of[first]
            for transaction_id, reason, _ in self.answers.get(first, ()):
                assert transaction_id == -1 or mount not in lost
                if reason == RowOutcomeCode.LOST:
                    lost.add(mount)

    def check_rejections(self) -> None:
        """Check that the listed rejections are the newest reported ones, without lost rows."""
        listed = self.pipeline.rejections.newest_first(TransactionId(len(self.log) - 1))
        found = [(name.req_id, name.reason, name.conflict) for name in reversed(listed)]
        assert found == list(self.rejected)


def run(seed: int) -> World:
    world = World(random.Random(seed))
    steps = (
        [world.send] * 8
        + [world.turn] * 10
        + [world.commit] * 4
        + [world.prove] * 2
        + [world.lose, world.open, world.open, world.remount, world.close, world.flush]
    )
    for _ in range(STEPS):
        world.rng.choice(steps)()
    # All faults are repaired. Every waiting row must get an outcome.
    world.open()
    while world.pipeline.due_ms(world.now_ms) is not None or world.in_flight:
        world.now_ms += 1
        world.turn()
        world.commit()
    world.prove(is_proved=True)
    assert world.pipeline.queued_bytes == world.pipeline.in_flight_bytes == 0
    world.check()
    assert world.reached == set(world.unanswered_at_flush)
    return world


def test_reported_outcomes_are_true() -> None:
    """The test also checks that the schedules reach the intended situations."""
    reasons = dict.fromkeys(RowOutcomeCode, 0)
    sessions = cut = cut_short = cut_lost = 0
    for seed in SEEDS:
        try:
            world = run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        sessions += world.session
        cut += len(world.cut)
        for rows in world.answers.values():
            reported = {reason for _, reason, _ in rows}
            cut_short += {RowOutcomeCode.COMMITTED, RowOutcomeCode.NOT_MOUNTED} <= reported
            cut_lost += {RowOutcomeCode.LOST, RowOutcomeCode.NOT_MOUNTED} <= reported
            for _, reason, _ in rows:
                reasons[reason] += 1
    for reason in (
        RowOutcomeCode.COMMITTED,
        RowOutcomeCode.LOCK,
        RowOutcomeCode.LOST,
        RowOutcomeCode.AHEAD,
        RowOutcomeCode.NOT_MOUNTED,
    ):
        assert reasons[reason] > 30, reason
    assert sessions > 150
    assert cut > 50
    assert cut_short > 15
    assert cut_lost > 5
