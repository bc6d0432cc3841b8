"""Runs coroutines of tests on an event loop with a timeout, and polls conditions."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import TypeVar

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.transport import net

POLL_INTERVAL_S = 0.002
LOOP_TURN_S = 0.001  # virtual time of one turn, so that loops without timers end, too

ResultT = TypeVar("ResultT")


class _VirtualClockSelector(selectors.DefaultSelector):
    """Adds the time until the next timer to the loop's clock instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.thread_count = 0  # the number of calls on other threads, which take real time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.thread_count:
            return super().select(POLL_INTERVAL_S)
        selected = super().select(0)
        if not selected:
            assert timeout is not None, "no timer is planned, so the scenario would never end"
            self.now_s += timeout
        self.now_s += LOOP_TURN_S
        return selected


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _VirtualClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor, func, *args):  # type: ignore[no-untyped-def,override]
        self._clock.thread_count += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_is_done)
        return future

    def _thread_is_done(self, _future: object) -> None:
        self._clock.thread_count -= 1


def run_in_virtual_time(scenario: Coroutine[object, object, ResultT]) -> ResultT:
    """Run a coroutine without real waits for timers; it may also wait for `asyncio.to_thread`.

    Virtual time passes only while all tasks wait, and by `LOOP_TURN_S` at each turn. So it does not
    depend on the load of the machine.
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(scenario)


def run_on_loop(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, on the daemons' event loop, within `TEST_TIMEOUT_S`."""

    @wraps(scenario)
    def run(*fixtures: object, **named_fixtures: object) -> None:
        async def run_with_timeout() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await scenario(*fixtures, **named_fixtures)

        net.run(run_with_timeout())

    return run


def run_on_virtual_loop(
    scenario: Callable[..., Coroutine[object, object, None]],
) -> Callable[..., None]:
    """Run a coroutine function as a test, in virtual time, within `TEST_TIMEOUT_S` of it."""

    @wraps(scenario)
    def run(*fixtures: object, **named_fixtures: object) -> None:
        async def run_with_timeout() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await scenario(*fixtures, **named_fixtures)

        run_in_virtual_time(run_with_timeout())

    return run


async def poll_until(condition: Callable[[], object]) -> None:
    """Poll a condition until it holds; the time limit of the scenario applies."""
    while not condition():  # noqa: ASYNC110 - what is awaited has no event of its own
        await asyncio.sleep(POLL_INTERVAL_S)


async def pass_time(seconds: float) -> None:
    """Let virtual time pass, for a test of what happens, or does not happen, in this time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while loop.time() < end_s:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(end_s - loop.time())
