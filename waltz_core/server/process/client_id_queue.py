"""Issues client IDs. Requests that wait at the same time share a write to ZooKeeper.

So a client that requests many IDs at once causes only few writes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from waltz_core.records.record import ClientId


class ClientIdQueue:
    """Issues client IDs to waiting callers.

    `allocate` receives the number of wanted IDs, and returns up to this many, at least one.
    """

    def __init__(self, allocate: Callable[[int], Awaitable[Sequence[int]]]) -> None:
        self._allocate = allocate
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._allocated: deque[int] = deque()

    async def next_client_id(self) -> ClientId:
        """Return a client ID that was never used before; raises the error of `allocate`."""
        self._waiting += 1
        try:
            async with self._lock:
                if not self._allocated:
                    self._allocated.extend(await self._allocate(self._waiting))
                return ClientId(self._allocated.popleft())
        finally:
            self._waiting -= 1
