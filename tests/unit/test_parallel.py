"""`run_parallel`: results in order, the first error itself, and a task that works afterwards."""

import asyncio

import pytest

from tests.loops import on_loop
from waltz_core import errors
from waltz_core.parallel import run_parallel


async def fail(cancelled: list[int], delay_s: float) -> int:
    try:
        await asyncio.sleep(delay_s)
    except asyncio.CancelledError:
        cancelled.append(1)
        raise
    raise errors.Unavailable("the first error")


@on_loop
async def test_results_have_the_order_of_the_calls():
    async def later(number: int) -> int:
        await asyncio.sleep(0.01 * (3 - number))
        return number

    assert await run_parallel(later(number) for number in range(3)) == [0, 1, 2]


@on_loop
async def test_the_first_error_ends_the_others_and_later_timeouts_work():
    cancelled: list[int] = []
    for _ in range(2):
        with pytest.raises(errors.Unavailable, match="the first error"):
            await run_parallel([fail(cancelled, 0.01), fail(cancelled, 3600)])
    assert cancelled == [1, 1]
    with pytest.raises(TimeoutError):  # not CancelledError, as with Python 3.11.2
        async with asyncio.timeout(0.001):
            await asyncio.sleep(3600)


@on_loop
async def test_a_cancelled_caller_cancels_the_calls():
    cancelled: list[int] = []
    began = [asyncio.Event(), asyncio.Event()]

    async def wait(event: asyncio.Event) -> None:
        event.set()
        await fail(cancelled, 3600)

    caller = asyncio.get_running_loop().create_task(run_parallel(wait(event) for event in began))
    for event in began:
        await event.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cancelled == [1, 1]
