"""Tests of `waltz_core.server.process.session_open_limit`."""

import asyncio

import pytest

from tests.loops import run_on_virtual_loop
from waltz_core.server.process import session_open_limit
from waltz_core.server.process.session_open_limit import (
    PERMITS_MAX,
    SessionOpenLimit,
    SessionOpenPermit,
)


@run_on_virtual_loop
async def test_a_limited_number_of_sessions_opens_at_a_time_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(session_open_limit, "PERMIT_S_MAX", 600.0)  # no permit expires
    limit, permits = SessionOpenLimit(), list[SessionOpenPermit]()

    async def begin() -> None:
        permits.append(await limit.acquire())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PERMITS_MAX + 2):
            tasks.create_task(begin())
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(permits) == PERMITS_MAX
        permits[0].release()
        permits[0].release()  # a second release has no effect
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(permits) == PERMITS_MAX + 1
        permits[1].release()


@run_on_virtual_loop
async def test_a_permit_ends_at_its_timeout():
    limit = SessionOpenLimit()
    permits = [await limit.acquire() for _ in range(PERMITS_MAX + 1)]
    assert len(permits) == PERMITS_MAX + 1
