"""A new owner loads its lock table from storages, before or while appends continue."""

import struct

import pytest

from waltz_core.machine import Report
from waltz_core.records.lock_blocks import LogEnd, encode
from waltz_core.records.record import PartitionId, ReplicaId, SessionId, TransactionId
from waltz_core.server.locking import lock_table_loader as module
from waltz_core.server.locking.lock_table import LockTable
from waltz_core.server.locking.lock_table_loader import (
    FETCHES_IN_FLIGHT_MAX,
    HOLD_APPENDS_MS_MAX,
    RETRY_MS,
    LockTableLoader,
)
from waltz_core.server.partition_events import Fetch, PartitionLimits
from waltz_core.wire.messages import LockBlocks, LockBlocksRequest

MARK = 9
REPLICAS = (ReplicaId("s1:1"), ReplicaId("s2:1"), ReplicaId("s3:1"))
SESSION = SessionId(4)


def end(last: int, history: int = 0) -> LogEnd:
    return LogEnd(TransactionId(last), bytes([last % 256, history]) * 8)


def block(last: int, *locks: int, first: int | None = None, history: int = 0) -> bytes:
    """Return a block, by default of one transaction, which also writes the lock of its own ID."""
    low = last if first is None else first
    packed = struct.pack(f">{len(locks) + 1}i", 1_000 + last, *locks)
    return encode(TransactionId(low), end(last, history), end(low - 1).chain, packed)


def blocks(first: int, last: int) -> bytes:
    return b"".join(block(number) for number in range(first, last + 1))


class World:
    def __init__(self, **limits: int) -> None:
        self.limits = PartitionLimits(lock_slot_count=100_003, **limits)
        self.table = LockTable(100_003, TransactionId(MARK))
        self.lock_loader = LockTableLoader(PartitionId(2), self.limits)
        self.lock_loader.begin(self.table, end(MARK))
        self.now_ms = 1_000
        self.fetches: list[Fetch] = []
        self.reports: list[Report] = []

    def take(self, outcomes: list[Fetch | Report]) -> None:
        for outcome in outcomes:
            (self.fetches if isinstance(outcome, Fetch) else self.reports).append(outcome)  # type: ignore[arg-type]

    def query_locks(self, session: int = SESSION, *, must_hold_appends: bool = True) -> None:
        self.take(
            self.lock_loader.query_locks(
                SessionId(session), REPLICAS, self.now_ms, must_hold_appends=must_hold_appends
            )
        )

    def answer(self, data: bytes, fetch: Fetch | None = None) -> None:
        request = (fetch or self.fetches[-1]).message
        self.lock_loader.on_blocks_fetched(
            request.sequence, LockBlocks(request.session_id, request.sequence, 2, data)
        )

    def fail(self) -> None:
        self.take(self.lock_loader.on_fetch_failed(self.fetches[-1].token, self.now_ms))

    def run(self) -> int:
        count = 0
        while self.lock_loader.due_ms(self.now_ms) == self.now_ms:
            self.take(self.lock_loader.load_slice(self.now_ms))
            count += 1
        return count

    def estimates_of_writers(self, *ids: int) -> list[int]:
        return [self.table.estimate(1_000 + transaction_id) for transaction_id in ids]


def test_one_replica_with_all_blocks_fills_the_lock_table() -> None:
    world = World()
    world.query_locks()
    (fetch,) = world.fetches
    assert fetch.replica == REPLICAS[0]
    assert fetch.message == LockBlocksRequest(SESSION, fetch.token, 2, 8 << 20)
    assert fetch.token < 0
    assert world.lock_loader.is_holding_appends(world.now_ms)
    assert world.table.estimate(77) == MARK
    world.answer(blocks(0, MARK))
    world.run()
    assert not world.lock_loader.is_holding_appends(world.now_ms)
    assert world.estimates_of_writers(*range(10)) == list(range(10))
    assert world.table.estimate(77) == -1
    assert world.lock_loader.floor == -1
    assert world.reports == [Report("locks.loaded", (("known_from", 0), ("mark", MARK)))]
    assert len(world.fetches) == 1
    assert world.lock_loader.due_ms(world.now_ms) is None


def test_the_estimate_of_a_loaded_lock_is_between_its_last_writer_and_the_batch_end() -> None:
    world = World()
    world.query_locks()
    world.answer(blocks(0, 3) + block(6, 5, first=4) + block(7, 5) + block(8) + block(9, 1_002))
    world.run()
    assert world.table.estimate(5) == 7
    assert world.estimates_of_writers(6, 2) == [6, 9]


def test_distances_in_a_lock_block_determine_which_transaction_wrote_each_lock() -> None:
    world = World()
    world.query_locks()
    packed = struct.pack(">4i", 21, 22, 23, 21)
    block_with_distances = encode(
        TransactionId(4), end(MARK), end(3).chain, packed, bytes([5, 4, 0, 2])
    )
    world.answer(blocks(0, 3) + block_with_distances)
    world.run()
    assert [world.table.estimate(each) for each in (21, 22, 23)] == [MARK - 2, MARK - 4, MARK]
    assert world.estimates_of_writers(3) == [3]


def test_the_refill_reads_down_to_the_limit() -> None:
    world = World(lock_load_count_max=3)
    world.query_locks()
    world.answer(blocks(0, MARK))
    world.run()
    assert world.lock_loader.floor == 6
    assert world.estimates_of_writers(5, 6, 7, 8) == [6, 6, 7, 8]
    assert world.reports[0].name == "locks.loaded"


@pytest.mark.parametrize(
    "data",
    [b"", b"junk" * 40, blocks(0, 8), blocks(0, 8) + block(9, history=1), blocks(0, 9)[:-1]],
    ids=["nothing", "junk", "too short", "another log", "torn"],
)
def test_lock_blocks_that_do_not_match_the_log_are_not_loaded(data: bytes) -> None:
    world = World()
    world.query_locks()
    for replica in REPLICAS:
        assert world.fetches[-1].replica == replica
        world.answer(data)
        world.run()
    assert world.lock_loader.floor == MARK
    assert world.table.estimate(77) == MARK
    assert not world.lock_loader.is_holding_appends(world.now_ms)
    assert world.reports == [
        Report("locks.partially_loaded", (("known_from", MARK + 1), ("mark", MARK)))
    ]


def test_the_next_replica_supplies_missing_blocks() -> None:
    world = World()
    world.query_locks()
    world.answer(blocks(0, 3) + blocks(6, 9))
    world.run()
    assert world.lock_loader.floor == 5
    assert world.estimates_of_writers(3, 5, 6) == [5, 5, 6]
    assert world.lock_loader.is_holding_appends(world.now_ms)
    world.answer(blocks(0, 9))
    world.run()
    assert world.estimates_of_writers(0, 3, 5, 6) == [0, 3, 5, 6]
    assert [fetch.replica for fetch in world.fetches] == list(REPLICAS[:2])


def test_locks_written_during_the_refill_are_kept() -> None:
    world = World()
    world.query_locks(must_hold_appends=False)
    assert not world.lock_loader.is_holding_appends(world.now_ms)
    world.table.validate_one(
        ([1_005], [], []),
        MARK,
        high_water_mark=TransactionId(MARK),
        next_id=TransactionId(MARK + 1),
    )
    world.answer(blocks(0, MARK))
    world.run()
    assert world.estimates_of_writers(4, 5, 6) == [4, MARK + 1, 6]


def test_mounts_wait_a_limited_time_while_the_refill_continues() -> None:
    world = World()
    world.query_locks()
    assert world.lock_loader.due_ms(world.now_ms) == world.now_ms + HOLD_APPENDS_MS_MAX
    world.now_ms += HOLD_APPENDS_MS_MAX
    assert not world.lock_loader.is_holding_appends(world.now_ms)
    assert world.lock_loader.due_ms(world.now_ms) is None
    world.answer(blocks(0, MARK))
    world.run()
    assert world.lock_loader.floor == -1


def test_a_failed_replica_is_queried_again_later() -> None:
    world = World()
    world.query_locks()
    for _ in REPLICAS:
        world.fail()
    assert [fetch.replica for fetch in world.fetches] == list(REPLICAS)
    assert world.lock_loader.due_ms(world.now_ms) == world.now_ms + RETRY_MS
    world.now_ms += RETRY_MS
    world.run()
    assert [fetch.replica for fetch in world.fetches] == [*REPLICAS, REPLICAS[0]]
    world.answer(blocks(0, MARK))
    world.run()
    assert world.lock_loader.floor == -1


def test_a_failing_refill_stops_when_no_request_waits_any_more() -> None:
    world = World()
    world.query_locks()
    world.now_ms += HOLD_APPENDS_MS_MAX
    for _ in REPLICAS:
        world.fail()
    assert len(world.fetches) == len(REPLICAS)
    assert world.reports[0].name == "locks.partially_loaded"
    assert world.lock_loader.due_ms(world.now_ms) is None


def test_a_later_session_of_the_same_owner_continues_loading() -> None:
    world = World()
    world.query_locks()
    world.answer(blocks(6, MARK))
    world.run()
    late = world.fetches[-1]
    world.lock_loader.stop()
    world.query_locks(SESSION + 1, must_hold_appends=False)
    world.answer(blocks(0, MARK), late)
    assert world.run() == 0
    assert world.lock_loader.floor == 5
    world.answer(blocks(0, MARK + 3))
    world.run()
    assert world.lock_loader.floor == -1
    world.query_locks(SESSION + 2)
    assert world.fetches[-1].message.session_id == SESSION + 1
    assert not world.lock_loader.is_holding_appends(world.now_ms)


def test_missing_blocks_are_not_requested_again() -> None:
    world = World()
    world.query_locks()
    for data in (blocks(8, MARK), blocks(6, MARK), blocks(0, 3) + blocks(6, MARK)):
        world.answer(data)
        world.run()
    assert world.lock_loader.floor == 5
    # The first replica was queried at another floor. The other two have no blocks at this floor.
    world.lock_loader.stop()
    world.query_locks(SESSION + 1, must_hold_appends=False)
    assert [each.replica for each in world.fetches[3:]] == [REPLICAS[0]]
    world.answer(blocks(8, MARK + 2))
    world.run()
    reports = len(world.reports)
    for session in range(SESSION + 2, SESSION + 9):
        world.lock_loader.stop()
        world.query_locks(session, must_hold_appends=False)
        assert world.lock_loader.due_ms(world.now_ms) is None
    assert len(world.fetches) == 4
    assert len(world.reports) == reports
    # After another owner has written to the log, all locks are unknown again.
    world.lock_loader.begin(world.table, end(MARK))
    world.query_locks(SESSION + 9)
    assert world.fetches[4].replica == REPLICAS[0]
    assert world.lock_loader.is_holding_appends(world.now_ms)


def test_a_replica_that_returned_no_lock_blocks_is_queried_again() -> None:
    world = World()
    world.query_locks()
    world.answer(b"")
    world.run()
    world.now_ms += HOLD_APPENDS_MS_MAX
    world.fail()
    world.answer(blocks(8, MARK))
    world.run()
    assert world.lock_loader.floor == 7
    world.lock_loader.stop()
    world.query_locks(SESSION + 1, must_hold_appends=False)
    world.answer(b"")
    world.run()
    assert [fetch.replica for fetch in world.fetches[3:]] == list(REPLICAS[:2])


def test_the_number_of_unanswered_requests_is_limited() -> None:
    world = World()
    for session in range(FETCHES_IN_FLIGHT_MAX + 3):
        world.query_locks(session)
    assert len(world.fetches) == FETCHES_IN_FLIGHT_MAX
    assert not world.lock_loader.is_holding_appends(world.now_ms)
    world.take(world.lock_loader.on_fetch_failed(world.fetches[0].token, world.now_ms))
    world.query_locks(99)
    assert len(world.fetches) == FETCHES_IN_FLIGHT_MAX + 1


@pytest.mark.parametrize("limit", ["SLICE_BLOCKS_MAX", "SLICE_LOCKS_MAX"])
def test_a_refill_that_takes_several_turns_is_complete(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(module, limit, 2)
    world = World()
    world.query_locks()
    world.answer(blocks(0, MARK))
    assert world.run() == 5
    assert world.estimates_of_writers(*range(10)) == list(range(10))


def test_lock_blocks_above_the_mark_are_skipped_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLICE_BLOCKS_MAX", 2)
    world = World()
    world.query_locks()
    world.answer(blocks(0, MARK + 4))
    assert world.run() > 5
    assert world.lock_loader.floor == -1


def test_the_lock_table_is_not_refilled_from_an_empty_log_or_with_a_limit_of_0() -> None:
    world = World()
    world.lock_loader.begin(world.table, LogEnd(TransactionId(-1), bytes(16)))
    world.query_locks()
    assert world.fetches == []
    world = World(lock_load_count_max=0)
    world.query_locks()
    assert world.fetches == []
    assert not world.lock_loader.is_holding_appends(world.now_ms)
