"""Contention for a lock: rejected writers are notified in turn, within a limit."""

from tests.unit.server.test_append import ALICE, BOB, COMMITTED, LOCK, B, World, results
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.server.append.outcomes import BarrierReached
from waltz_core.server.locking.lock_queues import NOTIFY_FACTOR, NOTIFY_MS_MIN, WAIT_MS_MAX

HOT, COLD = 5, 6


def contended_lock(*, losers: int = 3, took_ms: int = 1) -> tuple[World, list, dict]:
    """Commit one transaction with the hot lock, and reject the given number because of it."""
    world = World()
    world.single(write=[HOT])
    world.turn()
    rejected = [world.single(BOB if i % 2 else ALICE, write=[HOT]) for i in range(losers)]
    world.turn()
    world.now_ms += took_ms
    answered = results(world.commit())
    return world, rejected, answered


def next_commit(world: World, mark: int, lock: int = HOT) -> dict:
    """Commit a writer's transaction with a lock; return the writers notified after the commit."""
    world.single(mark=mark, write=[lock])
    world.turn()
    return results(world.commit())


def test_each_commit_notifies_the_next_rejected_writer() -> None:
    world, rejected, answered = contended_lock()
    assert answered[rejected[0]] == [(-1, LOCK, 0)]
    assert rejected[1] not in answered
    assert rejected[2] not in answered
    for number, req_id in enumerate(rejected[1:], 1):
        answered = next_commit(world, number - 1)
        # The answer names the newest transaction, so that no writer waits for an older one.
        assert answered.pop(req_id) == [(-1, LOCK, number)]
        assert list(answered.values()) == [[(number, COMMITTED, -1)]]
    assert world.pipeline.due_ms(world.now_ms) is None


def test_rejected_writers_are_notified_in_the_order_of_rejection() -> None:
    world, rejected, _ = contended_lock(losers=2)
    world.single(mark=0, write=[HOT])
    world.turn()
    last = world.single(BOB, mark=0, write=[HOT])
    world.turn()
    answered = results(world.commit())
    assert rejected[1] in answered
    assert last not in answered
    assert last in next_commit(world, 1)


def test_a_commit_under_other_locks_notifies_no_writer() -> None:
    world, rejected, _ = contended_lock()
    assert list(next_commit(world, 0, COLD).values()) == [[(1, COMMITTED, -1)]]
    assert rejected[1] in next_commit(world, 1)


def test_queues_of_two_hot_locks_are_independent() -> None:
    world = World()
    for lock in (HOT, COLD):
        world.single(write=[lock])
    world.turn()
    rejected = [world.single(BOB, write=[lock]) for lock in (HOT, COLD, HOT, COLD)]
    world.turn()
    answered = results(world.commit())
    assert [req_id in answered for req_id in rejected] == [True, True, False, False]


def test_the_next_writer_is_notified_if_a_notified_writer_does_not_retry() -> None:
    world, rejected, _ = contended_lock(took_ms=4)
    for req_id in rejected[1:]:
        before_ms = world.now_ms
        assert not world.wants_turn
        answered = results(world.turn_when_paced())
        assert list(answered) == [req_id]
        assert world.now_ms - before_ms == NOTIFY_FACTOR * 4
    assert world.pipeline.due_ms(world.now_ms) is None


def test_slower_commits_give_waiting_writers_more_time() -> None:
    world, rejected, _ = contended_lock(took_ms=1)
    world.single(mark=0, write=[HOT])
    world.turn()
    world.now_ms += 8
    assert rejected[1] in results(world.commit())
    before_ms = world.now_ms
    answered: dict = {}
    while not answered:  # The first check handles the notifications that were already due.
        answered = results(world.turn_when_paced())
    assert list(answered) == [rejected[2]]
    assert world.now_ms - before_ms == NOTIFY_FACTOR * 8


def test_a_waiting_writer_is_notified_of_the_newest_conflicting_transaction() -> None:
    world, rejected, _ = contended_lock(losers=2)
    world.batch([b"data"], mark=0, write=[[HOT]])
    world.turn()
    late = world.single(mark=0, write=[HOT])
    world.turn()
    answered = results(world.commit())
    assert answered[rejected[1]] == [(-1, LOCK, 1)]
    assert late not in answered


def test_a_notified_writer_has_a_minimum_time_to_retry_even_if_commits_are_instant() -> None:
    world, rejected, _ = contended_lock(took_ms=0)
    assert rejected[1] in results(world.turn_when_paced())
    assert world.now_ms == NOTIFY_MS_MIN


def test_rejected_writers_wait_a_limited_time() -> None:
    world, rejected, _ = contended_lock(losers=200)
    answered = []
    while len(answered) < 199:
        answered += results(world.turn_when_paced())
        assert world.now_ms <= 1 + WAIT_MS_MAX
    assert answered == rejected[1:]


def test_the_end_of_a_session_answers_all_waiting_writers() -> None:
    world, rejected, _ = contended_lock()
    assert list(results(world.pipeline.on_session_closed())) == rejected[1:]
    assert world.pipeline.due_ms(world.now_ms) is None
    assert results(world.open(0)) == {}


def test_writers_of_a_closed_connection_get_no_answer_and_delay_no_flush() -> None:
    world, rejected, _ = contended_lock(losers=4)
    assert world.pipeline.flush(1) == []
    assert results(world.pipeline.close(B)) == {}
    out = world.turn_when_paced()
    assert list(results(out)) == [rejected[2]]
    assert BarrierReached(1) in out
    assert world.pipeline.due_ms(world.now_ms) is None


def test_a_writer_with_an_old_mark_is_answered_at_once() -> None:
    world, _, _ = contended_lock(losers=3)
    world.single(mark=0, write=[COLD])
    world.turn()  # one append is in flight, the others wait
    stale = world.single(BOB, mark=BEFORE_FIRST, write=[HOT])
    assert list(results(world.turn())) == [stale]


def test_read_only_locks_do_not_wait_for_each_other() -> None:
    world = World()
    world.single(write=[HOT])
    world.turn()
    readers = [world.single(BOB, read=[HOT]) for _ in range(3)]
    world.turn()
    answered = results(world.commit())
    assert [answered[req_id] for req_id in readers] == [[(-1, LOCK, 0)]] * 3


def test_appends_with_the_same_locks_in_any_order_share_a_queue() -> None:
    world = World()
    world.single(write=[HOT, COLD])
    world.turn()
    same_locks = [world.single(BOB, write=locks) for locks in ([HOT, COLD], [COLD, HOT])]
    other = world.single(BOB, write=[HOT, COLD], read=[7])
    world.turn()
    answered = results(world.commit())
    assert [req_id in answered for req_id in (*same_locks, other)] == [True, False, True]


def test_a_disconnected_writer_does_not_delay_others() -> None:
    world = World()
    world.single(write=[HOT])
    world.turn()
    expired = [world.single(BOB, write=[HOT]) for _ in range(2)]
    committed = world.single(ALICE, write=[HOT])
    world.turn()
    world.mounts.on_connection_closed(B)
    world.pipeline.close(B)
    answered = results(world.commit())
    assert committed in answered
    assert set(expired) <= answered.keys(), "rejections without a client are removed at once"
    assert world.pipeline.due_ms(world.now_ms) is None


def test_the_queue_with_the_earliest_deadline_is_notified_first() -> None:
    world, slow, _ = contended_lock(losers=2, took_ms=20)
    began_ms = world.now_ms
    world.single(mark=0, write=[COLD])
    world.turn()
    expired_marks = [world.single(BOB, mark=0, write=[COLD]) for _ in range(2)]
    world.turn()
    world.now_ms += 1
    assert expired_marks[0] in results(world.commit())
    assert list(results(world.turn_when_paced())) == [expired_marks[1]]
    assert world.now_ms == began_ms + 1 + NOTIFY_FACTOR
    while slow[1] not in (answered := results(world.turn_when_paced())):
        assert answered == {}
    assert world.now_ms == began_ms + NOTIFY_FACTOR * 20


def test_waiting_writers_are_notified_while_the_pipeline_is_on_hold() -> None:
    world, rejected, _ = contended_lock(losers=2)
    world.pipeline.hold_submissions()
    assert list(results(world.turn_when_paced())) == [rejected[1]]
