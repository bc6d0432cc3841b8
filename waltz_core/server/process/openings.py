"""Limits how many partitions of a server open a store session at the same time.

A server may get a thousand partitions at once. If it opened all together, the first would be served
no earlier than the last. Also, claims of partitions that soon move to the next server would be
wasted.

Rules:
    1. At most `TURNS_MAX` partitions have a turn; the others wait in order of arrival.
    2. A turn ends when the session is open or abandoned, and after `TURN_S` in any case: a
       partition without a quorum tries again and again, but does not block the others.
"""

import asyncio
from typing import Final

# Enough to keep ZooKeeper, the network and the storages' disks busy.
TURNS_MAX: Final = 64
TURN_S: Final = 0.25


class Turn:
    """Permission to open a session; see the module's rules."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self.end)

    def end(self) -> None:
        """Let another partition begin; idempotent."""
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._turns.release()


class Openings:
    """Gives turns."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(TURNS_MAX)

    async def turn(self) -> Turn:
        """Wait for a turn and take it."""
        await self._turns.acquire()
        return Turn(self._turns)
