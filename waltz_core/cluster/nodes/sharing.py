"""One answer for all who asked before the question was put.

A server that takes over hundreds of partitions asks ZooKeeper the same thing for each of them. What
an answer has to be is "not older than my question", and that one answer is for everybody who asked
before it was put. It may be put again while an earlier one is under way: that one says nothing to
those who came later.
"""

import asyncio
from collections.abc import Awaitable, Callable


class Shared:
    """A question to which all who ask at about the same time get one answer.

    Args:
        ask: puts the question; what it raises is raised to all who share it.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def answered(self) -> None:
        """Return when a question was answered that was put after this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._put(self._running))
            self._next.add_done_callback(_take)
        await asyncio.shield(self._next)

    async def _put(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        await self._ask()


def _take(answered: asyncio.Task[None]) -> None:
    """Look at how it went: whoever asked may have been cancelled, and nobody needs to know then."""
    if not answered.cancelled():
        answered.exception()
