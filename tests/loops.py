"""Stories on an event loop: they end within a time, and wait for what has no event of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

from tests.patience import HANG_S
from waltz_core.transport import net

LOOK_S = 0.002


def on_loop(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, on the loop of daemons, within `HANG_S`."""

    @wraps(story)
    def run(*fixtures: object, **named_fixtures: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(HANG_S):
                await story(*fixtures, **named_fixtures)

        net.run(bounded())

    return run


async def until(condition: Callable[[], object]) -> None:
    """Look at a condition until it holds; the time of the story ends it otherwise."""
    while not condition():  # noqa: ASYNC110 - what is awaited has no event of its own
        await asyncio.sleep(LOOK_S)
