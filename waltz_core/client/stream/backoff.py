"""How long to wait before the next try, the more often it has failed.

Clients of a server that has died must not all come back at once, and none may come back in a tight
loop; that is one rule, kept in one place.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Backoff:
    """Counts failures in a row: none before the first try, then doubling, with jitter."""

    def __init__(self, *, interval_ms_min: int, interval_ms_max: int, random: "Random") -> None:
        assert 0 < interval_ms_min <= interval_ms_max
        self._interval_ms_min = interval_ms_min
        self._interval_ms_max = interval_ms_max
        self._random = random
        self._failures = 0

    @property
    def stable_ms(self) -> int:
        """What has worked for so long is not counted as a failure when it ends."""
        return self._interval_ms_max

    def succeeded(self) -> None:
        """Start over: the next try comes at once."""
        self._failures = 0

    def failed(self) -> int:
        """Count a failure; return how long to wait, 0 after the first."""
        self._failures += 1
        if self._failures == 1:
            return 0
        doubled = self._interval_ms_min << min(self._failures - 2, 20)
        interval_ms = min(doubled, self._interval_ms_max)
        # Half to the whole of the interval.
        return interval_ms - self._random.randrange(interval_ms // 2 + 1)
