"""Tests of `waltz_core.server.process.openings`."""

import asyncio

import pytest

from tests.loops import on_virtual_loop
from waltz_core.server.process import openings as openings_module
from waltz_core.server.process.openings import TURNS_MAX, Openings, Turn


@on_virtual_loop
async def test_a_limited_number_opens_at_a_time_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(openings_module, "TURN_S", 600.0)  # none ends by itself
    openings, turns = Openings(), list[Turn]()

    async def begin() -> None:
        turns.append(await openings.turn())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(TURNS_MAX + 2):
            tasks.create_task(begin())
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(turns) == TURNS_MAX
        turns[0].end()
        turns[0].end()  # again is no second place
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(turns) == TURNS_MAX + 1
        turns[1].end()


@on_virtual_loop
async def test_a_turn_ends_at_its_timeout():
    openings = Openings()
    turns = [await openings.turn() for _ in range(TURNS_MAX + 1)]
    assert len(turns) == TURNS_MAX + 1
