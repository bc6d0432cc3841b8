"""Merges identical requests: all callers before the request is sent share its answer.

A server that takes over hundreds of partitions sends ZooKeeper the same request for each of them.
Each caller needs an answer that is not older than its call, so one request serves all callers that
came before it was sent. Later callers need another one, also while the first is in flight.
"""

import asyncio
from collections.abc import Awaitable, Callable


class SharedRequest:
    """A request that concurrent callers share.

    Args:
        send: sends the request; its exception is raised to all callers that share the request.
    """

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def wait_for_answer(self) -> None:
        """Wait for the answer to a request that was sent after this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._send_after(self._running))
            self._next.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._next)

    async def _send_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        await self._send()


def _retrieve_exception(answered: asyncio.Task[None]) -> None:
    """Retrieve the exception, because all callers may have been cancelled."""
    if not answered.cancelled():
        answered.exception()
