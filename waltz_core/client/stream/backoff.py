"""The delay before the next attempt: it doubles with each failure, with jitter.

Without the delay, a client would retry without pauses. Without the jitter, all clients of a dead
server would connect again at the same time.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Counts consecutive failures. The first retry has no delay; later delays double."""

    def __init__(self, *, interval_ms_min: int, interval_ms_max: int, random: "Random") -> None:
        assert 0 < interval_ms_min <= interval_ms_max
        self._interval_ms_min = interval_ms_min
        self._interval_ms_max = interval_ms_max
        self._random = random
        self._failures = 0

    @property
    def stable_ms(self) -> int:
        """The time, in ms, after which a connection counts as a success, even if it ends later."""
        return self._interval_ms_max

    def reset(self) -> None:
        """Reset the count: the next attempt has no delay."""
        self._failures = 0

    def note_failure(self) -> int:
        """Count a failure; return the delay before the next attempt in ms, 0 after the first."""
        self._failures += 1
        if self._failures == 1:
            return 0
        doubled = self._interval_ms_min << min(self._failures - 2, 20)
        interval_ms = min(doubled, self._interval_ms_max)
        # The delay is random, between half of the interval and the whole interval.
        return interval_ms - self._random.randrange(interval_ms // 2 + 1)
