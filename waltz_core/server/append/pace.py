"""How often large batches may start while others wait for small ones.

A batch of a thousand rows keeps every process on its way busy for as long as hundreds of single
appends do. On a machine with few processors a client that sends nothing but such batches would
double and redouble the time that everybody else's appends take. The remedy looks at the server as a
whole, whatever partitions its clients write to.

Rules:
    1. While all clients send large batches, or all send small requests, nothing is held back.
    2. For a while after one client's small request met another client's large ones, large ones go
       in pieces, one at a time, with a pause after each in proportion to the time that it took.
    3. The proportion is steered by what small requests suffer. While the server is not shared, one
       in a hundred takes longer than the calm time. One that meets a piece and takes a fifth longer
       still raises the proportion, each that does not lowers it a little, so that one in two
       hundred does. Where there are processors to spare it comes down to next to nothing.
    4. Nothing waits for ever: a pause is bounded, and a piece that never lands (its session has
       ended) is forgotten with its partition's flights.
    5. It can be switched off: then whoever sends most gets most.
"""

import math
from typing import Final

from waltz_core.server.partition_events import ConnectionId

# While the server is shared, a large batch is cut into pieces of so many bytes. Half of that costs
# as many quorum rounds more as it spares; twice that can be felt by whoever meets one.
PIECE_BYTES: Final = 64 * 1024
# For so long after a small request met large ones the server counts as shared.
SHARED_MS: Final = 1_000
# A piece is followed by a pause of so many times as long as it took (rule 3).
FACTOR_FIRST, FACTOR_MIN, FACTOR_MAX = 4.0, 0.25, 16.0
FACTOR_UP: Final = 1.5
FACTOR_DOWN: Final = FACTOR_UP ** (-1 / 199)
# What a small request may take beside a piece, in calm times. Its client suffers more than the
# server sees, for its own turns and its answer's way take longer too: this keeps it below twice.
SUFFERS: Final = 1.2
# A calm time is believed for so long; later, requests that meet no piece must do to tell another.
CALM_KEPT_MS: Final = 60_000
# The calm time moves by so much of itself, up and down, a hundred times as often down.
CALM_UP: Final = 1.2
CALM_DOWN: Final = CALM_UP ** (-1 / 99)
PAUSE_MS_MAX: Final = 100
# A piece that has not landed for so long is not waited for any more: its storages are in trouble.
STALLED_MS: Final = 1_000
# How soon to ask again while a piece of another partition is in flight.
ASK_AGAIN_MS: Final = 2


class Pace:
    """One for all partitions of a server; see the module's rules."""

    __slots__ = (
        "_busy_ms",
        "_calm_kept_until_ms",
        "_calm_ms",
        "_free_at_ms",
        "_in_flight",
        "_is_on",
        "_large",
        "_large_ms",
        "_shared_until_ms",
        "factor",
    )

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._in_flight = 0
        self._large: ConnectionId | None = None  # whose the large batch was that started last
        self._large_ms = 0
        self._free_at_ms = 0
        self._shared_until_ms = 0
        self._busy_ms = -1  # when a piece was last known to be in flight
        self._calm_ms: float | None = None  # see rule 3
        self._calm_kept_until_ms = 0
        self.factor = FACTOR_FIRST

    def small(self, connection: ConnectionId, now_ms: int) -> None:
        """Note that a small request takes its turn (rule 2)."""
        is_other = self._large not in {None, connection}
        if self._is_on and is_other and now_ms - self._large_ms < SHARED_MS:
            self._shared_until_ms = now_ms + SHARED_MS

    def small_landed(self, received_ms: int, now_ms: int) -> None:
        """Note how long a small request took, from its arrival until it was final (rule 3)."""
        took_ms = now_ms - received_ms
        if not self._in_flight and self._busy_ms < received_ms:
            self._learn_calm(took_ms, now_ms)
        elif self._calm_ms is not None and took_ms > SUFFERS * self._calm_ms:
            self.factor = min(self.factor * FACTOR_UP, FACTOR_MAX)
        else:
            self.factor = max(self.factor * FACTOR_DOWN, FACTOR_MIN)

    def _learn_calm(self, took_ms: int, now_ms: int) -> None:
        """Move the calm time; beside a flood even requests that meet no piece are slower."""
        if now_ms >= self._shared_until_ms:
            self._calm_kept_until_ms = now_ms + CALM_KEPT_MS
        elif now_ms < self._calm_kept_until_ms:
            return
        calm_ms = self._calm_ms or 2.0 * max(1, took_ms)
        self._calm_ms = max(1.0, calm_ms * (CALM_UP if took_ms > calm_ms else CALM_DOWN))

    def large_at_ms(self, now_ms: int) -> int:
        """Return when a large batch may start, or whether it may should be asked again."""
        if now_ms >= self._shared_until_ms:
            return now_ms
        if self._in_flight and now_ms - self._large_ms < STALLED_MS:
            return now_ms + ASK_AGAIN_MS
        return max(now_ms, self._free_at_ms)

    def piece_bytes(self, now_ms: int) -> int | None:
        """Return of how many bytes a piece of a large batch is now; None for all of it."""
        return PIECE_BYTES if now_ms < self._shared_until_ms else None

    def started(self, connection: ConnectionId, now_ms: int) -> None:
        """A large batch, or a piece, is on its way; `landed` or `forgotten` follows."""
        self._in_flight += 1
        self._large, self._large_ms = connection, now_ms
        self._busy_ms = now_ms

    def landed(self, started_ms: int, now_ms: int) -> None:
        """It is final."""
        self.forgotten()
        self._busy_ms = now_ms
        pause_ms = min(self.factor * max(1, now_ms - started_ms), PAUSE_MS_MAX)
        self._free_at_ms = now_ms + math.ceil(pause_ms)

    def forgotten(self, count: int = 1) -> None:
        """So many will not land: their session has ended (rule 4)."""
        self._in_flight -= count
        assert self._in_flight >= 0
