"""The delay before the next attempt: it doubles with each failure, with jitter.

If a server has died, its clients must not all connect again at once, and none may retry without
pauses.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Counts consecutive failures; the first retry comes at once, later delays double."""

    def __init__(self, *, interval_ms_min: int, interval_ms_max: int, random: "Random") -> None:
        assert 0 < interval_ms_min <= interval_ms_max
        self._interval_ms_min = interval_ms_min
        self._interval_ms_max = interval_ms_max
        self._random = random
        self._failures = 0

    @property
    def stable_ms(self) -> int:
        """After this long a connection counts as a success, even when it ends."""
        return self._interval_ms_max

    def reset(self) -> None:
        """Reset: the next attempt comes at once."""
        self._failures = 0

    def note_failure(self) -> int:
        """Count a failure; return the delay in ms, 0 after the first."""
        self._failures += 1
        if self._failures == 1:
            return 0
        doubled = self._interval_ms_min << min(self._failures - 2, 20)
        interval_ms = min(doubled, self._interval_ms_max)
        # Half to the whole of the interval.
        return interval_ms - self._random.randrange(interval_ms // 2 + 1)
