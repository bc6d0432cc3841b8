"""How requests end; `test_append.py` has what leads there."""

from types import SimpleNamespace

from tests.unit.server.test_append import ALICE, A, World, results
from waltz_core.errors import BadRequest, TooLarge
from waltz_core.server.append.endings import Endings
from waltz_core.server.append.outcomes import Ahead, Reached
from waltz_core.server.locking.tickets import AppendFigures
from waltz_core.wire.messages import ErrorResponse, Reason


def ticket_of(endings: Endings) -> SimpleNamespace:
    return SimpleNamespace(
        epoch=endings.enter(), connection=A, req_id=None, cost_bytes=7, message=None
    )


def test_a_flush_waits_for_what_came_before_it_and_for_nothing_else():
    endings = Endings(World().mounts, AppendFigures())
    assert endings.flush(1) == [Reached(1)]
    before = ticket_of(endings)
    assert endings.flush(2) == []
    after = ticket_of(endings)
    assert endings.flush(3) == []
    out: list = []
    endings.leave(after, out)
    assert out == []  # an earlier one has not ended
    endings.leave(before, out)
    assert out == [Reached(2), Reached(3)]
    assert endings.flush(4) == [Reached(4)]


def test_abandoning_answers_all_flushes():
    endings = Endings(World().mounts, AppendFigures())
    ticket_of(endings)
    endings.flush(1)
    assert endings.abandon() == [Reached(1)]
    assert endings.flush(2) == [Reached(2)]


def test_an_error_ends_a_request_and_what_is_too_large_is_counted():
    figures = AppendFigures()
    endings = Endings(World().mounts, figures)
    out: list = []
    for error in (BadRequest("no"), TooLarge("no")):
        endings.fail(ticket_of(endings), error, out)
    assert [type(each.message) for each in out] == [ErrorResponse, ErrorResponse]
    assert [each.cost_bytes for each in out] == [7, 7]
    assert (figures.requests, figures.refused[Reason.TOO_LARGE]) == (2, 1)


def test_refusals_are_counted_by_their_reason():
    world = World()
    world.single(write=[5])
    world.turn()
    world.single(write=[5])
    world.turn()
    world.mounts.lapse(ALICE)
    world.single()
    world.batch([b"a", b"b"])
    out = [*world.turn(), *world.commit()]
    assert len(results(out)) == 4
    refused = world.pipeline.figures.refused
    assert (refused[Reason.LOCK], refused[Reason.NOT_MOUNTED]) == (1, 3)


def test_without_a_proof_that_it_is_ahead_a_client_has_to_mount_again():
    world = World()
    ahead = world.single(mark=9)
    (found,) = [each for each in world.turn() if isinstance(each, Ahead)]
    answered = world.pipeline.answer_ahead(found.ticket, is_proved=False)
    assert results(answered) == {ahead: [(-1, Reason.NOT_MOUNTED, -1)]}
    behind = world.single()
    assert results(world.turn()) == {behind: [(-1, Reason.NOT_MOUNTED, -1)]}


def test_a_client_that_has_mounted_meanwhile_keeps_its_mount():
    world = World()
    world.single(mark=9)
    (found,) = [each for each in world.turn() if isinstance(each, Ahead)]
    world.mounts.begin(ALICE, A, 2)
    world.mounts.finish(ALICE, A)
    world.pipeline.answer_ahead(found.ticket, is_proved=False)
    world.single()
    assert results(world.turn()) == {}
    assert results(world.commit())
