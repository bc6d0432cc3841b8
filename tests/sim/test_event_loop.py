"""The event loop in virtual time: timers, tasks, errors, and its end with the process."""

import asyncio

import pytest

from waltz_sim.world.event_loop import create_loop
from waltz_sim.world.process import Process
from waltz_sim.world.world import World


@pytest.fixture
def process():
    return Process(World(7), "program")


async def virtual(s):
    """Let virtual time pass."""
    passed = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(s, passed.set)
    try:
        await passed.wait()
    finally:
        timer.cancel()


def test_tasks_of_the_event_loop_wait_in_simulated_time_only(process):
    loop, outcome = create_loop(process), []

    async def wait(s):
        await virtual(s)
        outcome.append((s, loop.time()))

    async def begin():
        async with asyncio.TaskGroup() as group:
            for s in (2.0, 0.5, 1.0):
                group.create_task(wait(s))
        outcome.append("all")

    loop.run_inside(lambda: loop.create_task(begin()))
    assert outcome == []
    process.world.run(10_000_000)
    assert [s for s, _ in outcome[:3]] == [0.5, 1.0, 2.0]
    assert all(0 <= at - s < 0.001 for s, at in outcome[:3])
    assert outcome[3] == "all"


def test_a_timeout_cancels_its_task_and_leaves_no_timer(process):
    loop, outcome = create_loop(process), []

    async def late():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await virtual(60)
        outcome.append(loop.time())
        async with asyncio.timeout(60):
            await virtual(1)

    loop.run_inside(lambda: loop.create_task(late()))
    process.world.run(10_000_000)
    steps = process.world.step_count
    process.world.run(100_000_000)
    assert outcome[0] == pytest.approx(1.0, abs=0.001)
    assert process.world.step_count == steps


def test_a_paused_program_runs_no_callback(process):
    loop, outcome = create_loop(process), []
    loop.run_inside(lambda: loop.call_later(1, outcome.append, "late"))
    process.pause()
    process.world.run(5_000_000)
    assert outcome == []
    process.resume()
    assert outcome == ["late"]


def test_errors_inside_the_event_loop_are_raised_by_the_caller(process):
    loop = create_loop(process)

    def survive():
        loop.keep_error(ValueError("first"))
        loop.keep_error(ValueError("second"))

    with pytest.raises(ValueError, match="first"):
        loop.run_inside(survive)
    loop.run_inside(lambda: None)
    with pytest.raises(ZeroDivisionError):
        loop.run_inside(lambda: loop.call_soon(lambda: 1 / 0))


def test_closing_the_event_loop_cancels_its_tasks_and_keeps_the_outer_loop(process):
    outcome = []

    async def outside():
        loop = create_loop(process)

        async def work():
            try:
                await virtual(60)
            finally:
                outcome.append("ended")

        loop.run_inside(lambda: loop.create_task(work()))
        loop.close()
        assert loop.is_closed()
        assert asyncio.get_running_loop() is not loop
        process.world.run(100_000_000)

    asyncio.run(outside())
    assert outcome == ["ended"]
