"""The append pipeline: validation, batching, submission, and answers for final outcomes."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from tests.call_counting import record_calls
from waltz_core import errors
from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append
from waltz_core.records.lock_blocks import LogEnd, encode
from waltz_core.records.record import (
    GENESIS_CHAIN,
    ClientId,
    Generation,
    PartitionId,
    ReplicaId,
    ReqId,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication.session_events import Batch, SessionOpened
from waltz_core.server.append.large_batch_throttle import (
    PAUSE_MS_MAX,
    PIECE_BYTES,
    SHARED_PERIOD_MS,
    LargeBatchThrottle,
)
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import (
    AppendOutcome,
    BarrierReached,
    BatchCommitted,
    ConfirmAheadOfLog,
    SubmitBatch,
)
from waltz_core.server.append.pipeline import AppendPipeline
from waltz_core.server.locking.lock_table_loader import HOLD_APPENDS_MS_MAX
from waltz_core.server.locking.pending_appends import LARGE_REQUEST_BYTES_MIN
from waltz_core.server.partition_events import ConnectionId, Fetch, PartitionLimits, SendToClient
from waltz_core.wire.messages import (
    AppendBatch,
    AppendRequest,
    AppendResult,
    ErrorResponse,
    LockBlocks,
    RowOutcomeCode,
)

ALICE, BOB = ClientId(1), ClientId(2)
A, B = ConnectionId(10), ConnectionId(20)
GENERATION = Generation(3)
MIB = 1024 * 1024


class World:
    """A pipeline with a session and two mounted clients; commits on request."""

    def __init__(self, limits: PartitionLimits | None = None, *, is_open: bool = True) -> None:
        self.mounts = Mounts(100)
        self.throttle = LargeBatchThrottle()
        limits = limits or PartitionLimits(lock_slot_count=1009)
        self.pipeline = AppendPipeline(limits, self.mounts, self.throttle, PartitionId(0))
        self.session = 0
        self.now_ms = 0
        self.submitted: list[Batch] = []
        for client, connection in ((ALICE, A), (BOB, B)):
            self.mounts.begin_mount(client, connection, 1)
            self.mounts.finish_mount(client, connection)
        self.sequence = 1
        if is_open:
            self.open(-1)

    def open(
        self, mark: int, *, settled: int | None = None, follows_own_session: bool = True
    ) -> list[AppendOutcome]:
        self.session += 1
        opened = SessionOpened(
            SessionId(self.session),
            GENERATION,
            TransactionId(mark),
            GENESIS_CHAIN,
            follows_own_session,
        )
        last = TransactionId(mark if settled is None else settled)
        return self.pipeline.on_session_settled(
            opened, last, follows_own_session=follows_own_session
        )

    def single(
        self,
        client: ClientId = ALICE,
        *,
        mark: int = -1,
        write: Sequence[int] = (),
        read: Sequence[int] = (),
        append: Sequence[int] = (),
        data: bytes = b"data",
        generation: Generation = GENERATION,
        cost: int = 100,
        over_limit: errors.Overloaded | None = None,
    ) -> ReqId:
        req_id = ReqId(client, generation, PartitionId(0), self.sequence)
        self.sequence += 1
        message = AppendRequest(
            req_id, mark, tuple(write), tuple(read), tuple(append), 7, data, zlib.crc32(data)
        )
        self.early = self.pipeline.receive(
            A if client == ALICE else B,
            message,
            cost_bytes=cost,
            now_ms=self.now_ms,
            over_limit=over_limit,
        )
        return req_id

    def batch(
        self,
        rows: Sequence[bytes],
        client: ClientId = ALICE,
        *,
        mark: int = -1,
        write: Sequence[Sequence[int]] | None = None,
        marks: Sequence[int] | None = None,
        cost: int | None = None,
    ) -> ReqId:
        req_id = ReqId(client, GENERATION, PartitionId(0), self.sequence)
        self.sequence += len(rows)
        none: list[list[int]] = [[] for _ in rows]
        payload = encode_append(
            list(range(len(rows))),
            list(rows),
            write_locks=none if write is None else write,
            read_locks=none,
            append_locks=none,
            marks=marks,
        )
        message = AppendBatch(req_id, mark, payload, zlib.crc32(payload))
        self.early = self.pipeline.receive(
            A if client == ALICE else B,
            message,
            cost_bytes=cost or len(payload),
            now_ms=self.now_ms,
        )
        return req_id

    def share(self) -> None:
        """Make the throttle assume that a small request has met another client's large ones."""
        self.throttle.on_large_batch_started(ConnectionId(99), self.now_ms)
        self.throttle.on_large_batches_forgotten()
        self.throttle.on_small_request_started(B, self.now_ms)

    @property
    def wants_turn(self) -> bool:
        at_ms = self.pipeline.due_ms(self.now_ms)
        return at_ms is not None and at_ms <= self.now_ms

    def turn(self, wall_ms: int = 1_000) -> list[AppendOutcome]:
        out = self.pipeline.process_slice(now_ms=self.now_ms, wall_ms=wall_ms)
        self.submitted += [each.batch for each in out if isinstance(each, SubmitBatch)]
        return out

    def turns(self) -> list[Batch]:
        """Take turns while there is work; return the submitted batches."""
        before = len(self.submitted)
        while self.wants_turn:
            self.turn()
        return self.submitted[before:]

    def piece(self) -> Batch:
        """Wait for the pause of the throttle, take a turn, and return the submitted batch."""
        before = len(self.submitted)
        self.turn_when_paced()
        (batch,) = self.submitted[before:]
        return batch

    def turn_when_paced(self) -> list[AppendOutcome]:
        at_ms = self.pipeline.due_ms(self.now_ms)
        assert at_ms is not None
        self.now_ms = at_ms
        return self.turn()

    def commit(self) -> list[AppendOutcome]:
        """Commit everything that was submitted in this session."""
        chain = GENESIS_CHAIN
        for batch in self.submitted:
            chain = next_chain(
                chain, batch.first, batch.last, SessionId(self.session), batch.record_crcs
            )
        last = self.submitted[-1].last
        return self.pipeline.on_committed(last, chain, now_ms=self.now_ms)


def results(
    outcomes: Sequence[AppendOutcome],
) -> dict[ReqId, list[tuple[int, RowOutcomeCode, int]]]:
    """Return ID, reason and conflict of each row of each request that was answered."""
    found = {}
    for outcome in outcomes:
        if isinstance(outcome, SendToClient) and isinstance(outcome.message, AppendResult):
            message = outcome.message
            ids = np.frombuffer(message.transaction_ids, ">i8").tolist()
            conflicts = np.frombuffer(message.conflicting, ">i8").tolist()
            reasons = [RowOutcomeCode(each) for each in bytes(message.reasons)]
            found[message.req_id] = list(zip(ids, reasons, conflicts, strict=True))
    return found


def answer_proof(world: World, outcomes: Sequence[AppendOutcome]) -> list[AppendOutcome]:
    """Return the answers for the rows that are ahead, once the session is proven."""
    pending_rows = [
        outcome.pending for outcome in outcomes if isinstance(outcome, ConfirmAheadOfLog)
    ]
    answers_ahead = [
        world.pipeline.answer_ahead_of_log(pending, is_proved=True) for pending in pending_rows
    ]
    return [
        outcome
        for outcomes in answers_ahead
        for outcome in outcomes
        if isinstance(outcome, SendToClient)
    ]


def error_codes(outcomes: Sequence[AppendOutcome]) -> list[int]:
    return [
        outcome.message.error_code
        for outcome in outcomes
        if isinstance(outcome, SendToClient) and isinstance(outcome.message, ErrorResponse)
    ]


COMMITTED, LOCK, LOST = RowOutcomeCode.COMMITTED, RowOutcomeCode.LOCK, RowOutcomeCode.LOST


# --- IDs, records, answers


def test_waiting_appends_become_one_batch_in_fair_order() -> None:
    world = World()
    first = world.single(data=b"one")
    rows = world.batch([b"two", b"three"])
    other = world.single(BOB, data=b"four")
    out = world.turn()
    (batch,) = world.submitted
    assert [type(each) for each in out] == [SubmitBatch]
    assert (batch.first, batch.last, batch.stamp_ms) == (0, 3, 1_000)
    lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
    assert raw_records.first_bad_record(batch.records, lengths) is None
    assert raw_records.ids_of(batch.records, lengths).tolist() == [0, 1, 2, 3]
    assert raw_records.record_crcs(batch.records, lengths) == batch.record_crcs
    assert zlib.crc32(batch.records) == batch.records_crc
    answered = results(world.commit())
    # Alice's single, then Bob's turn, then Alice's batch.
    assert answered == {
        first: [(0, COMMITTED, -1)],
        other: [(1, COMMITTED, -1)],
        rows: [(2, COMMITTED, -1), (3, COMMITTED, -1)],
    }
    assert world.pipeline.high_water_mark == 3
    assert world.pipeline.in_flight_bytes == 0


def test_commit_stamps_never_decrease() -> None:
    world = World()
    world.single()
    world.turn(wall_ms=500)
    world.single()
    world.turn(wall_ms=400)
    assert [batch.stamp_ms for batch in world.submitted] == [500, 500]


def test_commit_stamps_continue_after_the_stamps_of_the_previous_owner() -> None:
    world = World(is_open=False)
    opened = SessionOpened(SessionId(1), GENERATION, TransactionId(4), GENESIS_CHAIN, False)
    world.pipeline.on_session_settled(
        opened, TransactionId(4), follows_own_session=False, stamp_ms=900
    )
    world.single()
    world.turn(wall_ms=400)
    world.single()
    world.turn(wall_ms=1_000)
    assert [batch.stamp_ms for batch in world.submitted] == [900, 1_000]


def test_a_committed_batch_is_published_before_its_answers() -> None:
    world = World()
    world.single()
    world.turn(wall_ms=9)
    out = world.commit()
    assert [type(each) for each in out] == [BatchCommitted, SendToClient]
    assert isinstance(out[0], BatchCommitted)
    batch = world.submitted[0]
    chain = next_chain(
        GENESIS_CHAIN, TransactionId(0), TransactionId(0), SessionId(1), batch.record_crcs
    )
    assert out[0].entry == (0, 0, 1, 9, chain)


def test_the_duration_of_appends_is_recorded() -> None:
    world = World()
    world.single()
    world.now_ms = 30
    world.single()
    world.turn()
    world.now_ms = 75
    world.commit()
    assert list(world.pipeline.counters.took_ms) == [75]


# --- locks


def test_a_rejection_waits_for_the_conflicting_transaction_in_flight() -> None:
    world = World()
    winner = world.single(write=[5])
    world.turn()
    waiting = world.single(BOB, write=[5])
    assert world.turn() == []
    assert results(world.commit()) == {winner: [(0, COMMITTED, -1)], waiting: [(-1, LOCK, 0)]}


def test_the_second_of_two_conflicting_appends_in_one_turn_is_rejected() -> None:
    world = World()
    winner = world.single(write=[5])
    loser = world.single(BOB, write=[5])
    blind = world.single(BOB, append=[5])
    world.turn()
    assert results(world.commit()) == {
        winner: [(0, COMMITTED, -1)],
        loser: [(-1, LOCK, 0)],
        blind: [(1, COMMITTED, -1)],
    }


def test_a_mark_above_the_log_is_rejected_row_by_row() -> None:
    world = World()
    ahead = world.single(mark=0, read=[1])
    rows = world.batch([b"a", b"b"], BOB, marks=[-1, 4])
    out = world.turn()
    assert results(out) == {}
    assert results(answer_proof(world, out)) == {ahead: [(-1, RowOutcomeCode.AHEAD, -1)]}
    out = answer_proof(world, world.commit())
    assert results(out) == {rows: [(0, COMMITTED, -1), (-1, RowOutcomeCode.AHEAD, -1)]}
    assert world.pipeline.counters.rejected[RowOutcomeCode.AHEAD] == 2


def test_a_waiting_append_is_rejected_when_its_client_mounts_again() -> None:
    world = World()
    late = world.single()
    world.mounts.begin_mount(ALICE, A, 1)
    world.mounts.finish_mount(ALICE, A)
    assert results(world.turn()) == {late: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)]}
    again = world.single()
    world.turn()
    assert results(world.commit()) == {again: [(0, COMMITTED, -1)]}


# --- checks before an append enters the log


def test_only_the_newest_mount_with_the_current_generation_may_append() -> None:
    world = World()
    stale = world.single(generation=Generation(2))
    fenced = world.single(BOB)
    rows = world.batch([b"a", b"b"], BOB)
    # Requests are checked when dequeued: a newer mount fences those that wait.
    world.mounts.begin_mount(BOB, ConnectionId(21), 2)
    assert results(world.turn()) == {
        stale: [(-1, RowOutcomeCode.GENERATION, -1)],
        fenced: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)],
        rows: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)] * 2,
    }
    assert world.submitted == []


def test_a_row_over_the_limit_is_not_appended_and_writes_no_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("waltz_core.server.locking.validation.TRANSACTION_BYTES_MAX", 4)
    world = World()
    rows = world.batch([b"fits", b"is too large", b"fits"], write=[[1], [2], [2]])
    world.turn()
    (batch,) = world.submitted
    assert batch.last == 1
    assert results(world.commit()) == {
        rows: [(0, COMMITTED, -1), (-1, RowOutcomeCode.TOO_LARGE, -1), (1, COMMITTED, -1)]
    }


def test_an_append_with_a_wrong_checksum_is_rejected() -> None:
    world = World()
    req_id = ReqId(ALICE, GENERATION, PartitionId(0), 1)
    world.pipeline.receive(
        A, AppendRequest(req_id, -1, (), (), (), 0, b"data", 1), cost_bytes=50, now_ms=0
    )
    world.pipeline.receive(A, AppendBatch(req_id, -1, b"payload", 1), cost_bytes=50, now_ms=0)
    out = world.turn()
    assert error_codes(out) == [errors.ChecksumMismatch.code] * 2
    single, batch = (each.message for each in out if isinstance(each, SendToClient))
    assert isinstance(single, ErrorResponse)
    assert "data is damaged: expected CRC" in single.message
    assert isinstance(batch, ErrorResponse)
    assert "payload is damaged: expected CRC" in batch.message
    assert world.submitted == []


def test_a_batch_that_cannot_be_decoded_is_reported() -> None:
    world = World()
    req_id = ReqId(ALICE, GENERATION, PartitionId(0), 1)
    invalid_payload = b"no arrow"
    world.pipeline.receive(
        A,
        AppendBatch(req_id, -1, invalid_payload, zlib.crc32(invalid_payload)),
        cost_bytes=50,
        now_ms=0,
    )
    assert error_codes(world.turn()) == [errors.BadRequest.code]


def test_a_batch_of_too_many_rows_is_reported_and_counted() -> None:
    world = World(PartitionLimits(lock_slot_count=11, batch_rows_max=1))
    world.batch([b"a", b"b"], cost=7)
    (answer,) = world.turn()
    assert error_codes([answer]) == [errors.TooLarge.code]
    assert answer.cost_bytes == 7
    figures = world.pipeline.counters
    assert (figures.requests, figures.rejected[RowOutcomeCode.TOO_LARGE]) == (1, 1)


def test_rejections_are_counted_by_their_reason() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    world.single(write=[5])
    world.turn()
    world.mounts.require_remount(ALICE)
    world.single()
    world.batch([b"a", b"b"])
    assert len(results([*world.turn(), *world.commit()])) == 4
    rejected = world.pipeline.counters.rejected
    assert (rejected[RowOutcomeCode.LOCK], rejected[RowOutcomeCode.NOT_MOUNTED]) == (1, 3)


def test_a_failed_check_of_a_mark_above_the_log_does_not_end_a_newer_mount() -> None:
    world = World()
    world.single(mark=9)
    (effect,) = [effect for effect in world.turn() if isinstance(effect, ConfirmAheadOfLog)]
    world.mounts.begin_mount(ALICE, A, 2)
    world.mounts.finish_mount(ALICE, A)
    world.pipeline.answer_ahead_of_log(effect.pending, is_proved=False)
    world.single()
    assert results(world.turn()) == {}
    assert results(world.commit())


def test_sequence_numbers_that_run_out_are_reported() -> None:
    world = World()
    world.sequence = 0x7FFFFFFF
    world.batch([b"a", b"b"])
    assert error_codes(world.turn()) == [errors.BadRequest.code]
    world.sequence = 0x7FFFFFFF
    last = world.batch([b"a"])
    world.turn()
    assert results(world.commit()) == {last: [(0, COMMITTED, -1)]}


def test_a_transaction_over_4_mib_is_too_large() -> None:
    world = World()
    single = world.single(data=bytes(4 * MIB + 1))
    largest = world.single(data=bytes(4 * MIB))
    assert results(world.turn()) == {single: [(-1, RowOutcomeCode.TOO_LARGE, -1)]}
    assert results(world.commit()) == {largest: [(0, COMMITTED, -1)]}


# --- waiting


def test_a_full_queue_rejects_only_connections_over_their_share() -> None:
    world = World(PartitionLimits(lock_slot_count=11, queue_bytes_max=1000), is_open=False)
    rejected = []
    for _ in range(20):
        req_id = world.single()
        if results(world.early) == {req_id: [(-1, RowOutcomeCode.OVERLOADED, -1)]}:
            rejected.append(req_id)
    assert len(rejected) == 10
    world.single(BOB)
    assert world.early == []
    assert world.pipeline.queued_bytes == 1100


def test_appends_do_not_overtake_an_append_that_waits_for_queue_space() -> None:
    world = World(PartitionLimits(lock_slot_count=11, queue_bytes_max=1000), is_open=False)
    before = world.single(cost=600)
    without_room = world.single(cost=600)
    assert results(world.early) == {without_room: [(-1, RowOutcomeCode.OVERLOADED, -1)]}
    after = world.single(cost=100)
    assert world.early == []
    assert not world.wants_turn
    assert world.turn() == []
    world.open(-1)
    assert world.wants_turn
    assert results(world.turn()) == {after: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)]}
    assert results(world.commit()) == {before: [(0, COMMITTED, -1)]}
    world.mounts.begin_mount(ALICE, A, 1)
    world.mounts.finish_mount(ALICE, A)
    again = world.single(cost=600)
    world.turn()
    assert results(world.commit()) == {again: [(1, COMMITTED, -1)]}


def test_appends_do_not_overtake_an_append_over_a_limit() -> None:
    world = World()
    before = world.single()
    world.single(over_limit=errors.Overloaded("alice is over a limit", 700))
    answer = world.early[0].message
    assert isinstance(answer, ErrorResponse)
    assert (answer.error_code, answer.retry_after_ms) == (errors.Overloaded.code, 700)
    after, other = world.single(), world.single(BOB)
    assert results(world.turn()) == {after: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)]}
    ids = {before: [(0, COMMITTED, -1)], other: [(1, COMMITTED, -1)]}
    assert results(world.commit()) == ids
    world.mounts.begin_mount(ALICE, A, 1)
    world.mounts.finish_mount(ALICE, A)
    again = world.single()
    world.turn()
    assert results(world.commit()) == {again: [(2, COMMITTED, -1)]}


def test_a_flush_does_not_wait_for_an_append_over_a_limit() -> None:
    world = World()
    world.single(over_limit=errors.Overloaded("alice is over a limit", 700))
    assert world.pipeline.flush(5) == [BarrierReached(5)]


def test_each_row_of_a_batch_without_queue_space_is_rejected() -> None:
    world = World(PartitionLimits(lock_slot_count=11, queue_bytes_max=1000), is_open=False)
    for _ in range(5):
        world.batch([b"a"] * 100)
    rejected = world.batch([b"a", b"b"])
    assert results(world.early) == {rejected: [(-1, RowOutcomeCode.OVERLOADED, -1)] * 2}


LARGE = bytes(LARGE_REQUEST_BYTES_MIN)


def test_large_requests_wait_while_the_in_flight_window_is_full() -> None:
    world = World(PartitionLimits(lock_slot_count=11, in_flight_bytes_max=LARGE_REQUEST_BYTES_MIN))
    world.single(data=LARGE, cost=LARGE_REQUEST_BYTES_MIN)
    world.single(data=LARGE, cost=LARGE_REQUEST_BYTES_MIN)
    world.turn()
    assert not world.wants_turn
    assert len(world.submitted) == 1
    # Small requests pass, up to twice the window.
    world.single(BOB)
    assert world.wants_turn
    world.turn()
    assert len(world.submitted) == 2
    world.commit()
    world.now_ms = PAUSE_MS_MAX
    assert world.wants_turn


def test_a_large_request_is_sent_alone() -> None:
    world = World()
    world.single()
    world.single(BOB, data=LARGE, cost=LARGE_REQUEST_BYTES_MIN)
    world.single()
    assert [batch.last - batch.first + 1 for batch in world.turns()] == [1, 1, 1]


def test_large_requests_run_one_at_a_time_while_small_ones_wait() -> None:
    world = World()
    for _ in range(4):
        world.single(data=LARGE, cost=LARGE_REQUEST_BYTES_MIN)
    assert len(world.turns()) == 4
    world.commit()
    for _ in range(3):
        world.single(data=LARGE, cost=LARGE_REQUEST_BYTES_MIN)
    world.turn()
    world.single(BOB)
    assert len(world.turns()) == 1
    world.now_ms = 4
    world.commit()
    assert not world.wants_turn
    at_ms = world.pipeline.due_ms(4)
    assert at_ms is not None
    assert 4 < at_ms <= 4 + PAUSE_MS_MAX
    # Small requests are processed meanwhile.
    world.single(BOB)
    assert len(world.turns()) == 1
    world.now_ms = at_ms
    assert len(world.turns()) == 1
    world.commit()
    world.now_ms = 4 + SHARED_PERIOD_MS
    assert len(world.turns()) == 1


def test_large_requests_of_a_closed_session_delay_no_request() -> None:
    world = World()
    world.share()
    world.batch([bytes(PIECE_BYTES // 2)] * 3)
    world.piece()
    at_ms = PAUSE_MS_MAX  # the pause after `share` has been committed is over
    assert world.throttle.large_allowed_at_ms(at_ms) > at_ms
    world.pipeline.on_session_closed()
    assert world.throttle.large_allowed_at_ms(at_ms) == at_ms
    world.open(-1, settled=-1)


# --- pieces


def test_a_large_batch_is_processed_in_pieces_if_other_clients_send_small_requests() -> None:
    world = World()
    world.share()
    rows = [bytes((number,)) * (PIECE_BYTES // 2) for number in range(5)]
    flood = world.batch(rows, write=[[1], [2], [1], [3], [4]])
    first = world.piece()
    small = world.single(BOB)
    world.turn()
    assert results(world.commit()) == {small: [(first.last + 1, COMMITTED, -1)]}
    while not results(out := world.turn_when_paced()):
        if results(out := world.commit()):
            break
        for piece in world.submitted:
            lengths = raw_records.lengths_from_wire(piece.lengths, len(piece.records))
            assert raw_records.first_bad_record(piece.records, lengths) is None
    assert len(world.submitted) >= 3
    assert [(number, reason) for number, reason, _ in results(out)[flood]] == [
        (0, COMMITTED),
        (2, COMMITTED),
        (-1, LOCK),
        (3, COMMITTED),
        (4, COMMITTED),
    ]
    assert results(out)[flood][2] == (-1, LOCK, 0)
    assert world.pipeline.queued_bytes == world.pipeline.in_flight_bytes == 0


def records_of(batches: Sequence[Batch]) -> list[tuple[int, bytes]]:
    """Return sequence number and data of each record."""
    found = []
    for batch in batches:
        lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
        numbers = raw_records.req_ids_of(batch.records, lengths)["sequence"].tolist()
        start = 0
        for number, length in zip(numbers, lengths.tolist(), strict=True):
            found.append((number, bytes(batch.records[start + 36 : start + length - 4])))
            start += length
    return found


def test_rows_keep_order_and_sequence_numbers_across_pieces() -> None:
    world = World()
    world.share()
    rows = [bytes((number,)) * (PIECE_BYTES * 3 // 4) for number in range(6)]
    flood = world.batch(rows)
    behind = world.single(data=b"behind")
    while world.pipeline.queued_bytes:
        before = world.pipeline.queued_bytes
        world.piece()
        assert world.pipeline.queued_bytes < before
        out = world.commit()
    assert len(world.submitted) > 2
    sent = [(flood.sequence + number, row) for number, row in enumerate(rows)]
    assert records_of(world.submitted) == [*sent, (behind.sequence, b"behind")]
    assert behind in results(out)


def world_with_flood(world: World, *, flush: bool = False) -> ReqId:
    """Share the server, and submit the first piece of a large batch."""
    world.share()
    flood = world.batch([bytes(PIECE_BYTES // 2)] * 4)
    if flush:
        world.pipeline.flush(1)
    world.piece()
    assert world.pipeline.queued_bytes > 0
    return flood


@pytest.mark.parametrize(("connection", "sequence"), [(ConnectionId(11), 2), (A, 1)])
def test_a_mount_that_ends_between_two_pieces_drops_the_rest(
    connection: ConnectionId, sequence: int
) -> None:
    world = World()
    flood = world_with_flood(world)
    done = world.submitted[0].last + 1
    world.mounts.begin_mount(ALICE, connection, sequence)
    world.mounts.finish_mount(ALICE, connection)
    out = world.commit()
    assert results(out) == {}
    world.now_ms += PAUSE_MS_MAX
    committed = [(number, COMMITTED, -1) for number in range(done)]
    rejected = [(-1, RowOutcomeCode.NOT_MOUNTED, -1)] * (4 - done)
    assert results(world.turn()) == {flood: committed + rejected}
    assert len(world.submitted) == 1


def test_all_pieces_after_a_lost_piece_are_lost() -> None:
    world = World()
    flood = world_with_flood(world)
    lost = world.submitted[0].last + 1
    world.pipeline.on_session_closed()
    assert results(world.open(-1)) == {}
    rejected = [(-1, RowOutcomeCode.NOT_MOUNTED, -1)] * (4 - lost)
    world.now_ms += PAUSE_MS_MAX
    assert results(world.turn()) == {flood: [(-1, LOST, -1)] * lost + rejected}


def test_rows_that_were_not_submitted_are_appended_in_the_next_session() -> None:
    world = World()
    flood = world_with_flood(world)
    world.commit()
    mark = world.submitted[-1].last
    world.pipeline.on_session_closed()
    assert results(world.open(mark)) == {}
    world.submitted.clear()
    out: list[AppendOutcome] = []
    while world.pipeline.queued_bytes:
        world.piece()
        out = world.commit()
    assert [row[:2] for row in results(out)[flood]] == [(number, COMMITTED) for number in range(4)]


def test_a_flush_waits_for_all_pieces_of_a_batch() -> None:
    world = World()
    world_with_flood(world, flush=True)
    while world.pipeline.queued_bytes:
        assert BarrierReached(1) not in world.commit()
        world.piece()
    assert BarrierReached(1) in world.commit()


def test_a_flush_of_a_connection_that_closes_between_two_pieces_is_removed_only_once() -> None:
    world = World()
    world_with_flood(world, flush=True)
    assert world.pipeline.close(A) == []
    assert world.pipeline.queued_bytes == 0
    assert BarrierReached(1) in world.commit()
    assert world.pipeline.flush(2) == [BarrierReached(2)]
    again = World()
    world_with_flood(again, flush=True)
    again.commit()
    assert again.pipeline.close(A) == [BarrierReached(1)]


def test_abandoning_a_partition_during_a_batch_leaves_the_batch_in_doubt() -> None:
    world = World()
    flood = world_with_flood(world)
    queued = world.single()
    first, second, _ = world.pipeline.abandon()
    assert [pending.req_id for pending in first] == [queued]
    assert [pending.req_id for pending in second] == [flood]
    world = World()
    flood = world_with_flood(world)
    world.commit()
    assert [pending.req_id for pending in world.pipeline.abandon()[1]] == [flood]


def test_a_closed_connection_drops_its_unsubmitted_appends() -> None:
    world = World()
    world.single()
    world.turn()
    world.single()
    assert world.pipeline.close(A) == []
    assert world.turn() == []
    assert len(results(world.commit())) == 1


# --- flush and mount barriers


def test_a_flush_does_not_wait_for_later_requests() -> None:
    world = World()
    assert world.pipeline.flush(1) == [BarrierReached(1)]
    world.single(write=[5])
    world.turn()
    world.single(BOB, write=[5])
    assert world.pipeline.flush(2) == []
    assert world.pipeline.flush(3) == []
    world.single()
    world.turn()
    chain = GENESIS_CHAIN
    batch = world.submitted[0]
    chain = next_chain(chain, batch.first, batch.last, SessionId(1), batch.record_crcs)
    out = world.pipeline.on_committed(TransactionId(0), chain, now_ms=0)
    assert [each for each in out if isinstance(each, BarrierReached)] == []
    out = world.commit()
    assert [each.token for each in out if isinstance(each, BarrierReached)] == [2, 3]


def test_a_flush_does_not_wait_for_rejected_appends_and_closed_connections() -> None:
    world = World()
    world.single(generation=Generation(9))
    world.pipeline.flush(1)
    assert BarrierReached(1) in world.turn()
    world.single()
    world.pipeline.flush(2)
    assert world.pipeline.close(A) == [BarrierReached(2)]


def test_a_flush_waits_for_earlier_requests_only() -> None:
    world = World()
    world.single()
    world.turn()
    assert world.pipeline.flush(1) == []
    world.single(generation=Generation(9))
    assert BarrierReached(1) not in world.turn()  # only the later request has ended
    world.single()
    assert BarrierReached(1) in world.commit()


def test_a_barrier_waits_only_for_batches_in_flight() -> None:
    world = World()
    assert world.pipeline.add_barrier(1) == [BarrierReached(1)]
    world.single()
    world.turn()
    assert world.pipeline.add_barrier(2) == []
    world.single()
    assert world.commit()[-1] == BarrierReached(2)


# --- lost sessions


def test_outcomes_are_reported_when_settled_and_not_at_the_end_of_a_session() -> None:
    world = World()
    kept, lost = world.single(write=[1]), None
    world.turn()
    lost = world.single(write=[2])
    world.turn()
    waiting = world.single(BOB, write=[2])
    behind = world.single(BOB, write=[1])
    world.turn()
    world.pipeline.add_barrier(9)
    world.pipeline.on_session_closed()
    assert world.turn() == []
    out = world.open(0, settled=0)
    assert results(out) == {
        kept: [(0, COMMITTED, -1)],
        lost: [(-1, LOST, -1)],
        waiting: [(-1, LOST, -1)],
        behind: [(-1, LOCK, 0)],
    }
    assert BarrierReached(9) in out
    assert world.pipeline.in_flight_bytes == 0


@pytest.mark.parametrize("follows_own_session", [True, False])
def test_committed_batches_of_an_ended_session_are_kept_if_no_other_server_has_written(
    follows_own_session,
) -> None:
    """If another server had written, the chain of the batch could differ from that of the log."""
    world = World()
    for _ in range(2):
        world.single()
        world.turn()
    world.pipeline.on_session_closed()
    out = world.open(1, follows_own_session=follows_own_session)
    kept = [each.entry.last for each in out if isinstance(each, BatchCommitted)]
    assert kept == ([0, 1] if follows_own_session else [])
    assert list(results(out).values()) == [[(0, COMMITTED, -1)], [(1, COMMITTED, -1)]]


def test_locks_of_lost_transactions_are_released_if_no_other_server_has_written() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    world.pipeline.on_session_closed()
    world.open(-1, settled=-1, follows_own_session=True)
    world.submitted.clear()
    behind = world.single()
    assert results(world.turn()) == {behind: [(-1, RowOutcomeCode.NOT_MOUNTED, -1)]}
    again = world.single(BOB, write=[5], mark=-1)
    world.turn()
    assert results(world.commit()) == {again: [(0, COMMITTED, -1)]}


def test_a_retry_of_a_lost_append_is_accepted_even_after_other_appends() -> None:
    world = World()
    world.single(write=[1])
    world.turn()
    world.single(write=[5])
    world.turn()
    world.pipeline.on_session_closed()
    world.open(0, settled=0)
    world.submitted.clear()
    again = world.single(BOB, write=[5], mark=-1)
    world.turn()
    assert results(world.commit()) == {again: [(1, COMMITTED, -1)]}


def test_all_locks_count_as_written_after_a_session_of_another_owner() -> None:
    world = World()
    world.pipeline.on_session_closed()
    world.open(7, settled=-1, follows_own_session=False)
    behind = world.single(write=[5], mark=6)
    assert results(world.turn()) == {behind: [(-1, LOCK, 7)]}
    level = world.single(write=[5], mark=7)
    world.turn()
    assert results(world.commit()) == {level: [(8, COMMITTED, -1)]}


def test_settlement_may_commit_a_part_of_a_request() -> None:
    world = World()
    rows = world.batch([b"a", b"b", b"c", b"d"], write=[[1], [1], [2], [2]])
    world.turn()
    world.pipeline.on_session_closed()
    assert results(world.open(0, settled=0)) == {
        rows: [(0, COMMITTED, -1), (-1, LOCK, 0), (-1, LOST, -1), (-1, LOST, -1)]
    }


def test_abandoning_distinguishes_queued_from_submitted_appends() -> None:
    world = World()
    in_flight = world.single()
    world.turn()
    queued = world.single()
    world.pipeline.flush(4)
    first, second, out = world.pipeline.abandon()
    assert [pending.req_id for pending in first] == [queued]
    assert [pending.req_id for pending in second] == [in_flight]
    assert out == [BarrierReached(4)]
    assert world.pipeline.flush(5) == [BarrierReached(5)]
    assert world.pipeline.queued_bytes == world.pipeline.in_flight_bytes == 0


# --- cost


@pytest.mark.parametrize("locks", [0, 1])
def test_the_number_of_calls_hardly_grows_with_the_number_of_rows(locks: int) -> None:
    def calls(row_count: int) -> int:
        world = World(PartitionLimits(lock_slot_count=1_048_573))
        write = [[row] * locks for row in range(row_count)]
        payloads = [bytes(512)] * row_count
        world.batch(payloads, write=write)
        with record_calls() as counted:
            world.turn()
            out = world.commit()
        ((_, rows),) = results(out).items()
        assert len(rows) == row_count
        return len(counted)

    calls(2_000)  # builds tables that are kept
    assert calls(2_000) <= 2 * calls(100)


def test_a_commit_with_another_chain_raises_an_assertion_error() -> None:
    world = World()
    world.single()
    world.turn()
    with pytest.raises(AssertionError):
        world.pipeline.on_committed(TransactionId(0), GENESIS_CHAIN, now_ms=0)


def test_a_batch_contains_the_locks_of_all_its_transactions() -> None:
    world = World()
    world.single(write=[1], read=[8], append=[2])
    world.batch([b"x", b"y"], write=[[3], [4]])
    world.single(write=[5])
    (batch,) = world.turns()
    assert batch.locks == struct.pack(">5i", 1, 2, 3, 4, 5)
    world.single()
    (batch,) = world.turns()
    assert batch.locks == b""


def test_no_append_is_validated_before_the_lock_table_is_filled() -> None:
    world = World(is_open=False)
    world.open(5, follows_own_session=False)
    lock_loader = world.pipeline.lock_loader
    (fetch,) = lock_loader.query_locks(
        SessionId(1), (ReplicaId("s1:1"),), world.now_ms, must_hold_appends=True
    )
    assert isinstance(fetch, Fetch)
    world.single(write=[1], mark=3)
    world.single(write=[2], mark=4)
    assert not world.wants_turn
    end, before = LogEnd(TransactionId(5), GENESIS_CHAIN), bytes([7] * 16)
    block = encode(TransactionId(3), end, before, struct.pack(">i", 2))
    lock_loader.on_blocks_fetched(fetch.token, LockBlocks(1, fetch.token, 0, block))
    assert world.wants_turn
    (batch,) = world.turns()
    assert (batch.first, batch.last, batch.locks) == (6, 6, struct.pack(">i", 1))


def test_the_wait_for_the_lock_table_is_limited() -> None:
    world = World(is_open=False)
    world.open(5, follows_own_session=False)
    world.pipeline.lock_loader.query_locks(
        SessionId(1), (ReplicaId("s1:1"),), 0, must_hold_appends=True
    )
    world.single(write=[1], mark=3)
    world.single(write=[1], mark=5)
    assert world.pipeline.due_ms(0) == HOLD_APPENDS_MS_MAX
    world.now_ms = HOLD_APPENDS_MS_MAX
    assert world.wants_turn
    (batch,) = world.turns()
    assert batch.last == 6
