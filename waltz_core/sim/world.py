"""Virtual time, one seeded source of chance, and the heap of what is going to happen.

Why it stands alone: whatever a simulation does must be repeatable from its seed, so time and chance
come from here and from nowhere else.

Rules:
    1. Things happen in the order of their time, in the order of planning at the same time.
    2. Time is in whole microseconds and only moves when something happens.
    3. The trace is a running hash over what was noted: two runs of one seed have equal traces.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random

Action = Callable[[], None]


class Planned:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Let it not happen; harmless when it has."""
        self.action = None


class World:
    """See the module's rules."""

    def __init__(self, seed: int, *, notes_max: int = 400) -> None:
        self.seed = seed
        self.rng = Random(seed)  # noqa: S311 - repeatable is the point
        self.now_us = 0
        self.step_count = 0
        self.notes: deque[str] = deque(maxlen=notes_max)
        self._heap: list[tuple[int, int, Planned]] = []
        self._planned_count = 0
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def now_ms(self) -> int:
        """The time that machines are told."""
        return self.now_us // 1000

    @property
    def trace(self) -> str:
        """The hash of everything noted so far."""
        return self._trace.hexdigest()

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_us / 1000:10.3f} {text}"
        self._trace.update(line.encode())
        self.notes.append(line)

    def after(self, delay_us: int, action: Action) -> Planned:
        """Plan something."""
        assert delay_us >= 0
        planned = Planned(action)
        self._planned_count += 1
        heapq.heappush(self._heap, (self.now_us + delay_us, self._planned_count, planned))
        return planned

    def run(self, duration_us: int, *, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; stop early, and return True, as soon as `until` holds."""
        end_us = self.now_us + duration_us
        while self._heap and self._heap[0][0] <= end_us:
            at_us, _, planned = heapq.heappop(self._heap)
            if planned.action is None:
                continue
            self.now_us = at_us
            self.step_count += 1
            planned.action()
            if until is not None and until():
                return True
        self.now_us = end_us
        return False
