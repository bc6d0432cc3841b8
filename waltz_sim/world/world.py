"""Virtual time, seeded randomness, and the heap of planned actions.

A simulation must be repeatable from its seed, so this module is the only source of time and
randomness.

Rules:
    1. Actions run in the order of their time. Actions at the same time run in the order in which
       they were planned.
    2. Time is a whole number of microseconds, and only moves to the next action.
    3. Every process and every pair of processes has its own random stream. So if one fault is
       removed from a schedule, the rest of the run changes as little as possible.
    4. The trace is a running hash of all notes. Two runs of one seed have equal traces. A note
       changes only the trace. `fingerprint` costs less, and is always available.
    5. In a calm world, every random draw returns the middle value, so that a scenario does not
       depend on luck.
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

_MASK_64_BITS: Final = (1 << 64) - 1


def random_of_number(number: int) -> Random:
    """Return a random stream that depends only on a number."""
    return Random(number)  # noqa: S311 - it must be repeatable


class MiddleRandom(Random):
    """A random stream that always returns the middle value; only bytes and nonces differ."""

    def random(self) -> float:
        """Return 0.5."""
        return 0.5

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        """Return the middle value of a range."""
        whole = range(start) if stop is None else range(start, stop, step)
        return whole[len(whole) // 2]

    def choice(self, seq: "SupportsLenAndGetItem[_T]") -> _T:
        """Return the middle element of a sequence."""
        return seq[len(seq) // 2]


class PlannedAction:
    """A planned action, which can be cancelled before it runs."""

    __slots__ = ("action",)
    action: Action | None

    def cancel(self) -> None:
        """Cancel the action; do nothing if it has run."""
        self.action = None


class World:
    """Virtual time, planned actions and randomness; see the module's rules."""

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
        self.rng = random_of_number(seed)
        self.now_us = 0
        self.step_count = 0
        self.is_traced = is_traced
        self.notes: deque[str] = deque(maxlen=notes_max)
        self._heap: list[tuple[int, int, PlannedAction]] = []
        self._planned_count = 0
        self._trace_digest = hashlib.blake2b(digest_size=16)
        self._fingerprint = seed & _MASK_64_BITS

    @property
    def now_ms(self) -> int:
        """The virtual time in ms, which machines receive."""
        return self.now_us // 1000

    @property
    def trace_hash(self) -> str:
        """The hash of all notes so far (rule 4)."""
        return self._trace_digest.hexdigest()

    @property
    def fingerprint(self) -> str:
        """A hash of the times of all actions, in hexadecimal; it differs between different runs."""
        return f"{self._fingerprint:016x}"

    def stream(self, name: str) -> Random:
        """Return a new random stream that depends only on the seed and the name (rule 3)."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        return MiddleRandom(number) if self.is_calm else random_of_number(number)

    def note(self, text: str) -> None:
        """Add a line to the trace; do nothing if the world is not traced."""
        if not self.is_traced:
            return
        line = f"{self.now_us / 1000:10.3f} {text}"
        self._trace_digest.update(line.encode())
        self.notes.append(line)

    def call_after_us(self, delay_us: int, action: Action) -> PlannedAction:
        """Plan an action `delay_us` from now."""
        assert delay_us >= 0
        planned = PlannedAction()
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
        """Run the world for `duration_us`; if `until` holds before, stop and return True.

        Otherwise returns False, after the duration or after `steps_max` steps.
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
            self._fingerprint = (self._fingerprint * 0x9E3779B1 + at_us + number) & _MASK_64_BITS
            action()
            if until is not None and until():
                return True
        self.now_us = end_us
        return False
