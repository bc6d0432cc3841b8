"""How often large batches may start while others wait for small ones.

Why it stands alone: a batch of a thousand rows keeps every process on its way busy for as long as
hundreds of single appends do. On a machine with few processors a client that sends nothing but
such batches would double and redouble the time that everybody else's appends take. The remedy
looks at the server as a whole, whatever partitions its clients write to.

Rules:
    1. While all clients send large batches, or all send small requests, nothing is held back.
    2. For a while after one client's small request met another client's large ones, large ones go
       in pieces, one at a time, with a pause after each in proportion to the time that it took.
    3. Nothing waits for ever: a pause is bounded, and a piece that never lands (its session has
       ended) is forgotten with its partition's flights.
"""

from typing import Final

from waltz_core.server.events import ConnectionId

# A request of so many bytes is large.
LARGE_BYTES: Final = 64 * 1024
# While the server is shared, a large batch is cut into pieces of so many bytes. Half of that costs
# as many quorum rounds more as it spares; twice that can be felt by whoever meets one.
PIECE_BYTES: Final = 64 * 1024
# For so long after a small request met large ones the server counts as shared.
SHARED_MS: Final = 3_000
# A piece is followed by a pause of so many times as long as it took (measured with all processes on
# two processors: below that, small requests meet the pieces of two servers at once too often).
PAUSE_FACTOR: Final = 6
PAUSE_MS_MAX: Final = 100
# How soon to ask again while a piece of another partition is in flight.
ASK_AGAIN_MS: Final = 2


class Pace:
    """One for all partitions of a server; see the module's rules."""

    __slots__ = ("_free_at_ms", "_in_flight", "_large", "_large_ms", "_shared_until_ms")

    def __init__(self) -> None:
        self._in_flight = 0
        self._large: ConnectionId | None = None  # whose the large batch was that started last
        self._large_ms = 0
        self._free_at_ms = 0
        self._shared_until_ms = 0

    def small(self, connection: ConnectionId, now_ms: int) -> None:
        """Note that a small request takes its turn (rule 2)."""
        if self._large in {None, connection} or now_ms - self._large_ms >= SHARED_MS:
            return
        self._shared_until_ms = now_ms + SHARED_MS

    def large_at_ms(self, now_ms: int) -> int:
        """Return when a large batch may start, or whether it may should be asked again."""
        if now_ms >= self._shared_until_ms:
            return now_ms
        if self._in_flight:
            return now_ms + ASK_AGAIN_MS
        return max(now_ms, self._free_at_ms)

    def piece_bytes(self, now_ms: int) -> int | None:
        """Return of how many bytes a piece of a large batch is now; None for all of it."""
        return PIECE_BYTES if now_ms < self._shared_until_ms else None

    def started(self, connection: ConnectionId, now_ms: int) -> None:
        """A large batch, or a piece, is on its way; `landed` or `forgotten` follows."""
        self._in_flight += 1
        self._large, self._large_ms = connection, now_ms

    def landed(self, started_ms: int, now_ms: int) -> None:
        """It is final."""
        self.forgotten()
        pause_ms = min(PAUSE_FACTOR * max(1, now_ms - started_ms), PAUSE_MS_MAX)
        self._free_at_ms = now_ms + pause_ms

    def forgotten(self, count: int = 1) -> None:
        """So many will not land: their session has ended (rule 3)."""
        self._in_flight -= count
        assert self._in_flight >= 0
