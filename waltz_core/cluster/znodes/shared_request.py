"""Merges identical requests: callers that arrive before a request is sent share its answer.

Without this class, a server that takes over hundreds of partitions would send ZooKeeper the same
request for each partition. But each caller needs an answer that is not older than its call.
Therefore one request serves only the callers that arrived before the request was sent. Callers that
arrive while the request is in flight share the next request.
"""

import asyncio
from collections.abc import Awaitable, Callable


class SharedRequest:
    """A request that concurrent callers share.

    Args:
        send: sends the request; all callers that share the request receive its exception.
    """

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._running_task: asyncio.Task[None] | None = None
        self._next_task: asyncio.Task[None] | None = None

    async def wait_for_answer(self) -> None:
        """Wait for the answer to a request that was sent after this call."""
        if self._next_task is None:
            self._next_task = asyncio.get_running_loop().create_task(
                self._send_after(self._running_task)
            )
            self._next_task.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._next_task)

    async def _send_after(self, earlier_task: asyncio.Task[None] | None) -> None:
        if earlier_task is not None:
            await asyncio.wait((earlier_task,))
        self._running_task, self._next_task = self._next_task, None
        await self._send()


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if all callers were cancelled."""
    if not task.cancelled():
        task.exception()
