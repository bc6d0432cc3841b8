"""Appends that depend on appends in flight are accepted, rejected and answered."""

import zlib

import pytest

from tests.unit.server.test_append import (
    ALICE,
    BOB,
    COMMITTED,
    GENERATION,
    LOCK,
    LOST,
    A,
    B,
    World,
    results,
)
from waltz_core.client.model.predecessors import NO_PREDECESSORS
from waltz_core.records.record import NO_SESSION, PartitionId, ReqId
from waltz_core.server.append.outcomes import BarrierReached, ConfirmAheadOfLog
from waltz_core.server.locking import dependent_appends
from waltz_core.server.locking.dependent_appends import GATHER_MS
from waltz_core.server.locking.lock_queues import NOTIFY_MS_MIN, WAIT_MS_MAX
from waltz_core.server.partition_events import PartitionLimits, SendToClient
from waltz_core.wire.messages import AppendFollowing, Predecessors

HOT, COLD = 5, 6


class Authors(World):
    """A pipeline, and authors of dependent appends."""

    def follow(
        self,
        client=ALICE,
        *,
        mark=-1,
        session=NO_SESSION,
        write=(HOT,),
        read=(),
        data=b"data",
    ) -> ReqId:
        req_id = ReqId(client, GENERATION, PartitionId(0), self.sequence)
        self.sequence += 1
        message = AppendFollowing(
            req_id, mark, tuple(write), tuple(read), (), 7, data, zlib.crc32(data), session
        )
        self.early = self.pipeline.receive(
            A if client == ALICE else B, message, cost_bytes=100, now_ms=self.now_ms
        )
        return req_id

    def after(self, mark: int, **more) -> ReqId:
        """Append as an author that has received everything up to a mark in the current session."""
        return self.follow(mark=mark, session=self.session, **more)


def predecessor_ids(outcomes) -> dict[ReqId, list[int]]:
    """Return the IDs that each author received."""
    return {
        outcome.message.req_id: [
            record.transaction_id
            for record in NO_PREDECESSORS.with_predecessors(outcome.message, -1, 0, ()).predecessors
        ]
        for outcome in outcomes
        if isinstance(outcome, SendToClient) and isinstance(outcome.message, Predecessors)
    }


def in_flight() -> tuple[Authors, ReqId]:
    """A pipeline with one author's transaction in flight."""
    world = Authors()
    winner = world.follow(data=b"first")
    world.turn()
    return world, winner


def test_a_rejected_writer_gets_its_predecessors_and_may_append_after_them():
    world, winner = in_flight()
    loser = world.follow(BOB)
    (answer,) = world.turn()
    message = answer.message
    assert message.req_id == loser
    assert (message.session_id, message.high_water_mark, message.last) == (world.session, -1, 0)
    ((transaction_id, req_id, header, data),) = NO_PREDECESSORS.with_predecessors(
        message, -1, 0, ()
    ).predecessors
    assert (transaction_id, req_id, header, data) == (0, winner, 7, b"first")
    behind = world.after(0, client=BOB)
    assert world.turn() == []  # the append is gathered
    assert results(world.commit()) == {winner: [(0, COMMITTED, -1)]}
    assert len(world.turns()) == 1
    assert results(world.commit()) == {behind: [(1, COMMITTED, -1)]}


def test_gathered_appends_become_one_batch_after_the_appends_in_flight():
    world, _ = in_flight()
    for number in range(3):
        world.follow(BOB)
        assert predecessor_ids(world.turn())
        world.after(number, client=BOB)
        world.turn()
    assert len(world.submitted) == 1
    (first,) = world.submitted
    assert world.pipeline.in_flight_bytes == 4 * len(first.records) - 3
    assert not world.wants_turn
    world.commit()
    (batch,) = world.turns()
    assert (batch.first, batch.last) == (1, 3)


def test_gathered_appends_are_submitted_when_they_reach_the_slice_limit():
    world = Authors(PartitionLimits(lock_slot_count=1009, slice_bytes_max=5_000))
    world.follow(data=b"first")
    world.turn()
    for number in range(3):
        world.follow(BOB)
        assert predecessor_ids(world.turn())
        assert len(world.submitted) == 1
        world.after(number, client=BOB, data=bytes(2_000))
        world.turn()
    (_, batch) = world.submitted
    assert (batch.first, batch.last) == (1, 3)


def test_a_barrier_waits_for_gathered_appends_and_for_appends_in_flight():
    world, _ = in_flight()
    world.after(0, client=BOB)
    world.turn()
    assert world.pipeline.add_barrier(1) == []
    assert BarrierReached(1) not in world.commit()
    assert len(world.turns()) == 1
    assert BarrierReached(1) in world.commit()


def test_gathered_appends_wait_a_limited_time_for_waiting_authors():
    world, _ = in_flight()
    world.follow(BOB)
    assert predecessor_ids(world.turn())
    world.follow(BOB)  # waits for the append of the notified author, or for its timeout
    world.after(0)
    assert predecessor_ids(world.turn())
    world.follow(BOB)
    world.turn()
    assert len(world.submitted) == 1
    world.commit()
    assert world.turns() == []
    began_ms = world.now_ms
    while not world.turns():
        world.now_ms += 1
        assert world.now_ms <= began_ms + GATHER_MS
    (_, batch) = world.submitted
    assert (batch.first, batch.last) == (1, 1)
    assert world.now_ms > began_ms


def test_an_independent_append_submits_the_gathered_dependent_appends():
    world, _ = in_flight()
    world.follow(BOB)
    world.turn()
    world.after(0, client=BOB)
    world.turn()
    world.single(write=[COLD])
    world.turn()
    assert [(batch.first, batch.last) for batch in world.submitted] == [(0, 0), (1, 2)]


def test_predecessors_are_the_writers_of_the_locks_above_the_mark_of_the_append():
    world = Authors()
    world.follow(write=[COLD])  # from now on, the table records it
    world.follow(write=[HOT])
    world.single(write=[7])
    world.single(append=[HOT])
    world.turn()
    world.commit()
    world.single(append=[8])
    world.turn()
    assert predecessor_ids_for(world, write=[HOT]) == [1, 3]
    assert predecessor_ids_for(world, write=[9], read=[8, 7]) == [2, 4]
    assert predecessor_ids_for(world, write=[HOT], mark=1) == [3]
    assert predecessor_ids_for(world, write=[HOT, COLD], mark=3) is None  # the append is admitted


def predecessor_ids_for(world: Authors, **request) -> list[int] | None:
    req_id = world.follow(BOB, **request)
    out = world.turn()
    world.now_ms += WAIT_MS_MAX  # the authors have timed out
    return predecessor_ids([*out, *world.turn()]).get(req_id)


def test_rows_of_append_batches_are_not_predecessors():
    world, winner = in_flight()
    world.batch([b"a", b"b"], write=[[COLD], [9]])
    world.turn()
    assert predecessor_ids_for(world, write=[HOT]) == [0]
    waiting = world.follow(BOB, write=[COLD])
    assert world.turn() == []
    out = world.commit()
    assert results(out)[waiting] == [(-1, LOCK, 1)]
    assert results(out)[winner] == [(0, COMMITTED, -1)]


@pytest.mark.parametrize("name", ["PREDECESSORS_COUNT_MAX", "PREDECESSORS_BYTES_MAX"])
def test_predecessors_over_a_limit_are_not_reported(name, monkeypatch):
    world, _ = in_flight()
    world.single(append=[HOT])
    world.turn()
    monkeypatch.setattr(dependent_appends, name, 1)
    waiting = world.follow(BOB)
    assert world.turn() == []
    assert results(world.commit())[waiting] == [(-1, LOCK, 1)]


def test_predecessors_for_too_many_locks_are_not_returned():
    world, _ = in_flight()
    most = dependent_appends.PREDECESSORS_LOCKS_MAX
    assert predecessor_ids_for(world, write=range(HOT, HOT + most)) == [0]
    waiting = world.follow(BOB, write=range(HOT, HOT + most), read=[100])
    assert world.turn() == []
    assert results(world.commit())[waiting] == [(-1, LOCK, 0)]


def test_the_number_of_remembered_locks_is_limited(monkeypatch):
    monkeypatch.setattr(
        dependent_appends, "REMEMBERED_BYTES_MAX", 100 * dependent_appends.REMEMBERED_LOCK_BYTES
    )
    world, _ = in_flight()
    world.single(write=range(HOT + 1, HOT + 50), append=range(100, 150))
    world.turn()
    world.single(write=[500])
    world.turn()
    for _ in range(3):
        world.commit()
    assert predecessor_ids_for(world, write=[500], mark=1) == [2]
    late = world.follow(BOB)
    assert results(world.turn())[late] == [(-1, LOCK, 0)]


def test_predecessors_of_forgotten_locks_are_not_returned(monkeypatch):
    monkeypatch.setattr(dependent_appends, "REMEMBERED_TRANSACTIONS_MAX", 2)
    world, _ = in_flight()
    for _ in range(2):
        world.single(append=[HOT])
    world.turn()
    world.commit()
    late = world.follow(BOB, mark=-1)
    assert results(world.turn())[late] == [(-1, LOCK, 2)]
    assert predecessor_ids_for(world, mark=0) == [1, 2]


def test_each_admitted_append_notifies_one_waiting_author():
    world, _ = in_flight()
    losers = [world.follow(BOB if i % 2 else ALICE) for i in range(3)]
    assert list(predecessor_ids(world.turn())) == losers[:1]
    for number, loser in enumerate(losers[1:]):
        world.after(number)
        assert predecessor_ids(world.turn()) == {loser: list(range(number + 2))}


def test_the_next_writer_is_notified_if_a_notified_writer_does_not_append():
    world, _ = in_flight()
    losers = [world.follow(), world.follow()]
    assert list(predecessor_ids(world.turn())) == losers[:1]
    at_ms = world.pipeline.due_ms(world.now_ms)
    assert at_ms == world.now_ms + NOTIFY_MS_MIN
    world.now_ms = at_ms
    assert list(predecessor_ids(world.turn())) == losers[1:]
    world.now_ms += WAIT_MS_MAX
    world.turn()
    assert world.pipeline.due_ms(world.now_ms) is None


def test_dependent_appends_to_another_session_are_rejected():
    world, winner = in_flight()
    world.follow(BOB)
    assert predecessor_ids(world.turn())
    session = world.session
    world.pipeline.on_session_closed()
    assert results(world.open(-1, settled=-1)) == {winner: [(-1, LOST, -1)]}
    world.submitted.clear()
    world.mounts.begin_mount(ALICE, A, 2)
    world.mounts.finish_mount(ALICE, A)
    other = world.follow(data=b"another transaction 0")
    world.turn()
    stale = world.follow(BOB, mark=0, session=session)
    assert results(world.turn()) == {stale: [(-1, LOCK, -1)]}
    assert results(world.commit()) == {other: [(0, COMMITTED, -1)]}
    # The same holds when the log of the other session reaches this ID.
    stale = world.follow(BOB, mark=0, session=session)
    assert results(world.turn()) == {stale: [(-1, LOCK, 0)]}


def test_dependent_appends_after_a_zookeeper_rollback_are_rejected():
    world, _ = in_flight()
    world.pipeline.on_session_closed()
    world.session -= 1  # as after a rollback of ZooKeeper
    world.open(-1, settled=-1)
    world.submitted.clear()
    world.follow(BOB)
    world.turn()
    waiting = world.follow(BOB)
    stale = world.after(0, client=BOB)
    assert results(world.turn()) == {stale: [(-1, LOCK, -1)]}
    assert results(world.commit())[waiting] == [(-1, LOCK, 0)]


def test_a_rejected_append_cannot_be_a_predecessor():
    world, _ = in_flight()
    beyond = world.after(1)
    assert results(world.turn()) == {beyond: [(-1, LOCK, -1)]}


def test_a_dependent_append_is_rejected_for_later_conflicts():
    world, _ = in_flight()
    world.after(0, client=BOB)
    late = world.after(0, client=BOB)
    assert predecessor_ids(world.turn()) == {late: [1]}


def test_a_conflicting_append_that_gets_no_predecessors_waits_for_the_append_in_flight():
    world, _ = in_flight()
    behind = world.after(0)
    late = world.after(
        0, client=BOB, read=range(100, 100 + dependent_appends.PREDECESSORS_LOCKS_MAX)
    )
    assert results(world.turn()) == {}
    assert late not in results(world.commit())
    assert len(world.turns()) == 1
    assert results(world.commit()) == {behind: [(1, COMMITTED, -1)], late: [(-1, LOCK, 1)]}


def test_an_append_with_the_mark_of_an_append_in_flight_is_treated_as_ahead_of_the_log():
    world, winner = in_flight()
    world.follow(BOB, mark=0)
    assert [type(effect) for effect in world.turn()] == [ConfirmAheadOfLog]
    assert list(results(world.commit())) == [winner]
    assert not world.pipeline.in_flight_bytes


@pytest.mark.parametrize("mark", [0, 5])
def test_gathered_appends_are_lost_with_their_session(mark):
    world, winner = in_flight()
    behind = world.after(0, client=BOB)
    world.turn()
    token = world.pipeline.add_barrier(1)
    assert token == []
    assert world.pipeline.on_session_closed() == []
    assert not world.wants_turn
    out = world.open(mark, settled=mark, follows_own_session=mark == 0)
    assert results(out) == {winner: [(0, COMMITTED, -1)], behind: [(-1, LOST, -1)]}
    assert BarrierReached(1) in out
    assert world.submitted[-1].last == 0


def test_gathered_appends_of_an_abandoned_partition_count_as_not_submitted():
    world, winner = in_flight()
    behind = world.after(0, client=BOB)
    waiting = [world.follow(BOB), world.follow(BOB)]
    assert list(predecessor_ids(world.turn())) == waiting[:1]
    queued, doubtful, _ = world.pipeline.abandon()
    assert {each.req_id for each in queued} == {behind, waiting[1]}
    assert [each.req_id for each in doubtful] == [winner]


def test_a_waiting_author_is_answered_at_the_end_of_the_session_unless_it_disconnected():
    world, _ = in_flight()
    waiting = [world.follow(), world.follow(BOB), world.follow()]
    assert list(predecessor_ids(world.turn())) == waiting[:1]
    world.pipeline.close(B)
    assert results(world.pipeline.on_session_closed()) == {waiting[2]: [(-1, LOCK, -1)]}


def world_with_gathered_append() -> Authors:
    """Return a world in which no append is in flight, and a gathered append waits.

    This append waits for more appends because an author waits.
    """
    world, _ = in_flight()
    world.follow(BOB)
    world.turn()
    world.follow(BOB)
    world.after(0)
    world.turn()
    world.follow(BOB)
    world.turn()
    world.commit()
    assert world.turns() == []
    assert world.pipeline.in_flight_bytes
    return world


@pytest.mark.parametrize(
    ("end", "submitted"), [("hold_submissions", [0, 1]), ("on_session_closed", [0])]
)
def test_gathered_appends_are_sent_before_the_end_of_the_session_and_not_after(end, submitted):
    world = world_with_gathered_append()
    getattr(world.pipeline, end)()
    assert world.wants_turn == (end == "hold_submissions")
    world.now_ms += GATHER_MS
    world.turn()
    assert [batch.last for batch in world.submitted] == submitted


def test_a_dependent_append_does_not_overtake_earlier_appends():
    world, winner = in_flight()
    world.commit()
    first, second = world.single(mark=0, write=(COLD,)), world.follow(mark=0)
    world.turns()
    assert results(world.commit()) == {
        first: [(1, COMMITTED, -1)],
        second: [(2, COMMITTED, -1)],
    }
    assert winner != first


def test_predecessors_of_a_lost_session_are_not_returned_in_the_next_session():
    world, winner = in_flight()
    world.pipeline.on_session_closed()
    assert results(world.open(-1)) == {winner: [(-1, LOST, -1)]}
    again = world.follow(BOB, data=b"again")
    world.turn()
    world.follow(BOB)
    (answer,) = world.turn()
    assert (answer.message.session_id, answer.message.last) == (world.session, 0)
    (predecessor,) = NO_PREDECESSORS.with_predecessors(answer.message, -1, 0, ()).predecessors
    assert (predecessor.req_id, predecessor.data) == (again, b"again")


def test_a_predecessor_has_the_data_of_its_own_row_despite_rejected_rows():
    world, _ = in_flight()
    world.single(write=(HOT,), data=b"refused for what is in flight")
    cold = world.single(BOB, write=(COLD,), data=b"cold")
    world.turns()
    world.follow(BOB, write=(COLD,))
    (answer,) = world.turn()
    (predecessor,) = NO_PREDECESSORS.with_predecessors(answer.message, -1, 0, ()).predecessors
    assert (predecessor.transaction_id, predecessor.req_id, predecessor.data) == (1, cold, b"cold")


def test_a_connection_that_did_not_request_predecessors_gets_none():
    world, _ = in_flight()
    waiting = world.single(BOB, write=[HOT])
    assert world.turn() == []
    assert results(world.commit())[waiting] == [(-1, LOCK, 0)]
