"""Virtual time, seeded chance, and the heap of what is going to happen.

Whatever a simulation does must be repeatable from its seed, so time and chance come from here and
from nowhere else.

Rules:
    1. Things happen in the order of their time, in the order of planning at the same time.
    2. Time is in whole microseconds and only moves when something happens.
    3. Every process and every pair of processes has a stream of chance of its own, so that leaving
       one fault out of a schedule disturbs the rest of the run as little as may be.
    4. The trace is a running hash over what was noted: two runs of one seed have equal traces.
       Noting changes nothing but the trace; `fingerprint` is cheaper and always there.
    5. In a calm world every draw is the middle one, so that a told story does not hang on luck.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

Action = Callable[[], None]
_T = TypeVar("_T")

_MASK: Final = (1 << 64) - 1


def chance_of(number: int) -> Random:
    """Return chance that depends on a number alone."""
    return Random(number)  # noqa: S311 - repeatable is the point


class Evenness(Random):
    """Chance that always takes the middle; only bytes and nonces still differ."""

    def random(self) -> float:
        """Return the middle."""
        return 0.5

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """Return the middle of a range."""
        whole = range(start) if stop is None else range(start, stop, step)
        return whole[len(whole) // 2]

    def choice(self, seq: "SupportsLenAndGetItem[_T]") -> _T:
        """Return the one in the middle."""
        return seq[len(seq) // 2]


class Planned:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("action",)
    action: Action | None

    def cancel(self) -> None:
        """Let it not happen; harmless when it has."""
        self.action = None


class World:
    """See the module's rules."""

    def __init__(
        self,
        seed: int,
        *,
        notes_max: int | None = 400,
        is_traced: bool = True,
        is_calm: bool = False,
    ) -> None:
        self.seed = seed
        self.is_calm = is_calm
        self.rng = chance_of(seed)
        self.now_us = 0
        self.step_count = 0
        self.is_traced = is_traced
        self.notes: deque[str] = deque(maxlen=notes_max)
        self._heap: list[tuple[int, int, Planned]] = []
        self._planned_count = 0
        self._trace = hashlib.blake2b(digest_size=16)
        self._fingerprint = seed & _MASK

    @property
    def now_ms(self) -> int:
        """The time that machines are told."""
        return self.now_us // 1000

    @property
    def trace(self) -> str:
        """The hash of everything noted so far."""
        return self._trace.hexdigest()

    @property
    def fingerprint(self) -> str:
        """A number made of when things happened; it differs where runs differ."""
        return f"{self._fingerprint:016x}"

    def stream(self, name: str) -> Random:
        """Return a new stream of chance that depends on the seed and the name alone (rule 3)."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        return Evenness(number) if self.is_calm else chance_of(number)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if not self.is_traced:
            return
        line = f"{self.now_us / 1000:10.3f} {text}"
        self._trace.update(line.encode())
        self.notes.append(line)

    def after(self, delay_us: int, action: Action) -> Planned:
        """Plan something."""
        assert delay_us >= 0
        planned = Planned()
        planned.action = action
        self._planned_count += 1
        heapq.heappush(self._heap, (self.now_us + delay_us, self._planned_count, planned))
        return planned

    def run(
        self,
        duration_us: int,
        *,
        until: Callable[[], bool] | None = None,
        steps_max: int | None = None,
    ) -> bool:
        """Let time pass; stop early, and return True, as soon as `until` holds.

        Stops after `steps_max` steps as well, where that is given.
        """
        end_us = self.now_us + duration_us
        heap, pop = self._heap, heapq.heappop
        last_step = self.step_count + steps_max if steps_max is not None else -1
        while heap and heap[0][0] <= end_us:
            if self.step_count == last_step:
                return False
            at_us, number, planned = pop(heap)
            action = planned.action
            if action is None:
                continue
            self.now_us = at_us
            self.step_count += 1
            self._fingerprint = (self._fingerprint * 0x9E3779B1 + at_us + number) & _MASK
            action()
            if until is not None and until():
                return True
        self.now_us = end_us
        return False
