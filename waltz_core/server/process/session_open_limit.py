"""Limits how many partitions of a server open a store session at the same time.

A server may own a thousand partitions at once. If it opened all sessions together, the first
partition would be available no earlier than the last. Also, many claims of sessions in ZooKeeper
would be wasted, because some of the partitions soon move to the next server.

Rules:
    1. At most `PERMITS_MAX` partitions have a permit; the others wait in order of arrival.
    2. A permit ends when the session is open or abandoned, and at the latest after `PERMIT_S_MAX`.
       So a partition without a quorum does not block the others, although it tries again and again.
"""

import asyncio
from typing import Final

# Enough permits to keep ZooKeeper, the network and the storages' disks busy.
PERMITS_MAX: Final = 64
PERMIT_S_MAX: Final = 0.25


class SessionOpenPermit:
    """Permits one partition to open a session, by the module's rules."""

    def __init__(self, permits: asyncio.Semaphore) -> None:
        self._permits = permits
        self._is_released = False
        self._timer = asyncio.get_running_loop().call_later(PERMIT_S_MAX, self.release)

    def release(self) -> None:
        """Return the permit, so that another partition can begin; idempotent."""
        if not self._is_released:
            self._is_released = True
            self._timer.cancel()
            self._permits.release()


class SessionOpenLimit:
    """Issues permits to open a session."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(PERMITS_MAX)

    async def acquire(self) -> SessionOpenPermit:
        """Wait for a permit."""
        await self._permits.acquire()
        return SessionOpenPermit(self._permits)
