"""The newest rejections of a partition are listed for a limited time."""

import struct
import zlib

import pytest

from tests.unit.server.test_append import BOB, A, B, World, answer_proof
from tests.unit.server.test_dependent_appends import Authors
from tests.unit.server.test_partition import ALICE, world_with_mount
from tests.unit.server.test_partition import World as PartitionWorld
from waltz_core import errors
from waltz_core.records.record import Generation, ReqId, TransactionId
from waltz_core.replication import session_events as replication
from waltz_core.server.append.outcomes import ConfirmAheadOfLog
from waltz_core.server.append.recent_rejections import REJECTIONS_MAX
from waltz_core.wire import messages
from waltz_core.wire.messages import RowOutcomeCode

LOCK, AHEAD = RowOutcomeCode.LOCK, RowOutcomeCode.AHEAD
TOO_LARGE = RowOutcomeCode.TOO_LARGE


def listed_rejections(world: World) -> list[tuple[ReqId, RowOutcomeCode, int]]:
    rows = world.pipeline.rejections.newest_first(world.pipeline.high_water_mark)
    return [(row.req_id, row.reason, row.conflict) for row in rows]


def row_of(req_id: ReqId, number: int) -> ReqId:
    return req_id._replace(sequence=req_id.sequence + number)


# --- which rejections are recorded


def test_a_rejection_is_recorded_after_its_conflicting_transaction_commits() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    loser = world.single(BOB, write=[5])
    world.turn(wall_ms=1_234)
    assert listed_rejections(world) == []
    world.commit()
    assert listed_rejections(world) == [(loser, LOCK, 0)]
    (row,) = world.pipeline.rejections.newest_first(TransactionId(0))
    assert row.stamp_ms == 1_234


def test_a_row_lost_with_its_conflicting_transaction_is_not_recorded() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    world.single(BOB, write=[5])
    world.batch([b"a", b"b"], BOB, write=[[5], [5]])
    world.turn()
    world.pipeline.on_session_closed()
    world.open(-1)
    assert world.pipeline.counters.rejected[RowOutcomeCode.LOST] == 4
    assert world.pipeline.counters.rejected[LOCK] == 0
    assert listed_rejections(world) == []


def test_a_rejection_is_recorded_if_the_next_session_has_its_conflicting_transaction() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    loser = world.single(BOB, write=[5])
    world.turn()
    world.pipeline.on_session_closed()
    assert listed_rejections(world) == []
    world.open(0)
    assert listed_rejections(world) == [(loser, LOCK, 0)]


def test_each_rejected_row_of_a_batch_is_recorded_with_its_own_request_id() -> None:
    world = World()
    rows = world.batch([b"a", b"b", b"c", b"d"], write=[[5], [5], [6], [7]], marks=[-1, -1, -1, 40])
    world.turn()
    answer_proof(world, world.commit())
    assert listed_rejections(world) == [(row_of(rows, 3), AHEAD, -1), (row_of(rows, 1), LOCK, 0)]


def test_a_mark_above_the_log_is_recorded_only_after_the_proof() -> None:
    world = World()
    world.single(mark=0, read=[1])
    unproved = world.turn()
    assert listed_rejections(world) == []
    for each in unproved:
        assert isinstance(each, ConfirmAheadOfLog)
        world.pipeline.answer_ahead_of_log(each.pending, is_proved=False)
    assert listed_rejections(world) == []  # NOT_MOUNTED
    ahead = world.single(BOB, mark=0, read=[1])
    answer_proof(world, world.turn())
    assert listed_rejections(world) == [(ahead, AHEAD, -1)]


def test_rejections_that_the_client_retries_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("waltz_core.server.append.admission.TRANSACTION_BYTES_MAX", 4)
    world = World()
    large = world.single(data=b"is too large")
    world.single(generation=Generation(2))
    world.single(over_limit=errors.Overloaded("over the limit", 5))
    world.turn()
    assert listed_rejections(world) == [(large, TOO_LARGE, -1)]


def test_a_rejection_by_predecessors_in_flight_is_listed_after_their_commit() -> None:
    world = Authors()
    world.follow(data=b"first")
    world.turn()
    loser = world.follow(BOB)
    world.turn()  # answered with predecessors
    assert world.pipeline.counters.rejected[LOCK] == 1
    assert listed_rejections(world) == []
    world.commit()
    assert listed_rejections(world) == [(loser, LOCK, 0)]


def test_rejections_by_lost_predecessors_are_dropped() -> None:
    world = Authors()
    world.follow(data=b"first")
    world.turn()
    for _ in range(3):  # one is answered with predecessors, the others wait in the queue
        world.follow(BOB)
        world.turn()
    world.pipeline.on_session_closed()
    assert world.pipeline.counters.rejected[LOCK] == 3
    assert listed_rejections(world) == []
    world.open(-1, settled=-1)
    world.submitted.clear()
    world.single(BOB, write=[99])  # This append gets the ID of the lost transaction.
    world.turn()
    world.commit()
    assert listed_rejections(world) == []


# --- limits of number and time


def test_the_newest_hundred_rejections_are_listed_newest_first() -> None:
    world = World()
    world.single(write=[5])
    world.turn()
    world.commit()
    rows = world.batch([b"x"] * (REJECTIONS_MAX + 20), BOB, write=[[5]] * (REJECTIONS_MAX + 20))
    world.turn()
    last = world.single(BOB, write=[5])
    world.turn()
    rejections = listed_rejections(world)
    assert len(rejections) == REJECTIONS_MAX == 100
    assert rejections[0] == (last, LOCK, 0)
    assert [rejection[0] for rejection in rejections[1:]] == [
        row_of(rows, number) for number in range(119, 20, -1)
    ]


def test_a_partition_that_has_moved_starts_with_no_rejections() -> None:
    world = World()
    world.single(write=[5])
    world.single(BOB, write=[5])
    world.turn()
    world.commit()
    assert len(listed_rejections(world)) == 1
    world.pipeline.abandon()
    assert listed_rejections(world) == []


# --- requests


def rejections_of(world: PartitionWorld) -> messages.RejectionsResponse:
    answer = world.answer(world.send(A, messages.RejectionsRequest(world.req_id(ALICE))))
    assert isinstance(answer, messages.RejectionsResponse)
    return answer


def append_with_lock(world: PartitionWorld) -> ReqId:
    req_id = world.req_id(ALICE)
    return world.send(A, messages.AppendRequest(req_id, -1, (5,), (), (), 0, b"", zlib.crc32(b"")))


def test_an_owner_answers_with_the_rejections_of_its_partition_even_without_a_session() -> None:
    world = world_with_mount()
    nothing = rejections_of(world)
    assert (nothing.stamps_ms, nothing.request_ids) == (b"", b"")
    assert (nothing.reasons, nothing.conflicting) == (b"", b"")
    append_with_lock(world)
    loser = append_with_lock(world)
    world.run()
    world.commit()
    world.close()
    rejections = rejections_of(world)
    assert struct.unpack(">q", rejections.stamps_ms) == (1_000,)
    assert ReqId.from_bytes(rejections.request_ids) == loser
    assert (rejections.reasons, struct.unpack(">q", rejections.conflicting)) == (
        bytes((LOCK,)),
        (0,),
    )


def test_a_server_that_released_the_partition_answers_that_it_does_not_own_it() -> None:
    world = world_with_mount()
    append_with_lock(world)
    append_with_lock(world)
    world.run()
    world.commit()
    world.step(replication.ReleaseOwnership())
    request = world.send(B, messages.RejectionsRequest(world.req_id(ALICE)))
    assert world.error(request) == errors.NotOwned.code
    world.step(replication.TakeOwnership(Generation(2), ()))
    world.open(0, generation=2)
    assert rejections_of(world).reasons == b""
