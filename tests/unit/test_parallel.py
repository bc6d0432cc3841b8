"""`run_parallel`: results in order, the first error unchanged, and a usable task afterwards."""

import asyncio

import pytest

from tests.loops import run_on_loop
from waltz_core import errors
from waltz_core.parallel import run_parallel


class Waiting:
    """Calls that wait until they are cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled_count = 0

    async def wait(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise

    async def fail(self) -> None:
        await self.started.wait()
        raise errors.Unavailable("the first error")


@run_on_loop
async def test_results_have_the_order_of_the_calls():
    is_last_done = asyncio.Event()

    async def first() -> int:
        await is_last_done.wait()
        return 1

    async def last() -> int:
        is_last_done.set()
        return 2

    assert await run_parallel([first(), last()]) == [1, 2]


@run_on_loop
async def test_the_first_error_cancels_the_others_and_later_timeouts_work():
    for _ in range(2):
        waiting = Waiting()
        with pytest.raises(errors.Unavailable, match="the first error"):
            await run_parallel([waiting.fail(), waiting.wait()])
        assert waiting.cancelled_count == 1
    with pytest.raises(TimeoutError):  # not CancelledError, as with Python 3.11.2
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()


@run_on_loop
async def test_a_cancelled_caller_cancels_the_calls():
    calls = Waiting(), Waiting()
    caller = asyncio.get_running_loop().create_task(run_parallel(call.wait() for call in calls))
    for call in calls:
        await call.started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert [call.cancelled_count for call in calls] == [1, 1]
