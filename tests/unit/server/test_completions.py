"""How requests end; `test_append.py` has what leads there."""

from types import SimpleNamespace

from tests.unit.server.test_append import ALICE, A, World, results
from waltz_core.errors import BadRequest, TooLarge
from waltz_core.server.append.completions import Completions
from waltz_core.server.append.outcomes import AheadOfLog, Reached
from waltz_core.server.locking.tickets import AppendCounters
from waltz_core.wire.messages import ErrorResponse, Reason


def ticket_of(completions: Completions) -> SimpleNamespace:
    return SimpleNamespace(
        epoch=completions.enter(), connection=A, req_id=None, cost_bytes=7, message=None
    )


def test_a_flush_waits_for_what_came_before_it_and_for_nothing_else():
    completions = Completions(World().mounts, AppendCounters())
    assert completions.flush(1) == [Reached(1)]
    before = ticket_of(completions)
    assert completions.flush(2) == []
    after = ticket_of(completions)
    assert completions.flush(3) == []
    out: list = []
    completions.leave(after, out)
    assert out == []  # an earlier one has not ended
    completions.leave(before, out)
    assert out == [Reached(2), Reached(3)]
    assert completions.flush(4) == [Reached(4)]


def test_abandoning_answers_all_flushes():
    completions = Completions(World().mounts, AppendCounters())
    ticket_of(completions)
    completions.flush(1)
    assert completions.abandon() == [Reached(1)]
    assert completions.flush(2) == [Reached(2)]


def test_an_error_ends_a_request_and_what_is_too_large_is_counted():
    figures = AppendCounters()
    completions = Completions(World().mounts, figures)
    out: list = []
    for error in (BadRequest("no"), TooLarge("no")):
        completions.fail(ticket_of(completions), error, out)
    assert [type(each.message) for each in out] == [ErrorResponse, ErrorResponse]
    assert [each.cost_bytes for each in out] == [7, 7]
    assert (figures.requests, figures.rejected[Reason.TOO_LARGE]) == (2, 1)


def test_rejections_are_counted_by_their_reason():
    world = World()
    world.single(write=[5])
    world.turn()
    world.single(write=[5])
    world.turn()
    world.mounts.invalidate(ALICE)
    world.single()
    world.batch([b"a", b"b"])
    out = [*world.turn(), *world.commit()]
    assert len(results(out)) == 4
    refused = world.pipeline.counters.rejected
    assert (refused[Reason.LOCK], refused[Reason.NOT_MOUNTED]) == (1, 3)


def test_without_a_proof_that_it_is_ahead_a_client_has_to_mount_again():
    world = World()
    ahead = world.single(mark=9)
    (found,) = [each for each in world.turn() if isinstance(each, AheadOfLog)]
    answered = world.pipeline.answer_ahead(found.ticket, is_proved=False)
    assert results(answered) == {ahead: [(-1, Reason.NOT_MOUNTED, -1)]}
    behind = world.single()
    assert results(world.turn()) == {behind: [(-1, Reason.NOT_MOUNTED, -1)]}


def test_a_client_that_has_mounted_meanwhile_keeps_its_mount():
    world = World()
    world.single(mark=9)
    (found,) = [each for each in world.turn() if isinstance(each, AheadOfLog)]
    world.mounts.begin(ALICE, A, 2)
    world.mounts.finish(ALICE, A)
    world.pipeline.answer_ahead(found.ticket, is_proved=False)
    world.single()
    assert results(world.turn()) == {}
    assert results(world.commit())
