"""How many partitions of a server are on their way to a store session at one time.

A server may be given a thousand partitions at once. If all begin together, the first is served when
the last is, and what moves on to the next server that starts has been claimed for nothing.

Rules:
    1. At most `TURNS_MAX` have a turn; the others wait in the order in which they came.
    2. A turn is over with its session, and after `TURN_S` in any case: a partition that finds no
       quorum goes on trying, and holds up nobody.
"""

import asyncio
from typing import Final

# Enough to keep ZooKeeper, the network and the storages' disks busy, whatever each waits for.
TURNS_MAX: Final = 64
TURN_S: Final = 0.25


class Turn:
    """Leave to open a session; see the module's rules."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self.end)

    def end(self) -> None:
        """Let another one begin; harmless when repeated."""
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
