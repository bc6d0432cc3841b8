"""A program on a machine: it runs, is slow, stands still, dies, and starts again.

Storages, servers and clients die in the same way, and what a dead program had planned must not
happen.

Rules:
    1. What was planned by one incarnation never reaches the next one.
    2. What comes in while it stands still or is busy waits, and is taken in in its order.
    3. A machine's `wake_at_ms` is looked at after every step; there is at most one timer.
    4. Each has a clock of its own, which may run fast or slow but never goes back; `now_ms` shows
       it. Another one hangs on the wall, and may show anything.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from waltz_sim.world.world import Action, Planned, World

if TYPE_CHECKING:
    from waltz_sim.world.network import SimLink


class Process:
    """See the module's rules. A subclass says what happens in `died`, `started` and `ring`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = world.stream(name)
        self.chance = self.rng.random
        self.is_up = True
        self.is_paused = False
        self.incarnation = 1
        self.slow_us = 0  # before each thing that it takes in
        self.wall_offset_ms = 0
        self.pace = 1.0  # how fast its own clock runs
        self._pace_since_us = (0, 0)  # the world's time and its own, when that began
        self.links: dict[int, SimLink] = {}
        self._held: deque[Action] = deque()  # of this incarnation
        self._free_at_us = 0
        self._timer: Planned | None = None
        self._timer_at_ms = 0

    @property
    def wall_ms(self) -> int:
        """What its clock on the wall shows."""
        return 1_000_000 + self.world.now_ms + self.wall_offset_ms

    @property
    def now_ms(self) -> int:
        """What its own clock shows (rule 4)."""
        if self.pace == 1.0 and not self._pace_since_us[0]:
            return self.world.now_us // 1000
        return self._now_us() // 1000

    def _now_us(self) -> int:
        since_us, own_us = self._pace_since_us
        return own_us + int((self.world.now_us - since_us) * self.pace)

    def set_pace(self, pace: float) -> None:
        """Let its clock run at another pace from now on."""
        self._pace_since_us = max(1, self.world.now_us), self._now_us()
        self.pace = pace

    def takes_at_once(self, incarnation: int) -> bool:
        """Whether `take` would neither drop what comes in now nor let it wait."""
        return (
            incarnation == self.incarnation
            and self.is_up
            and not (self.is_paused or self._held or self.slow_us)
        )

    def take(self, incarnation: int, action: Action) -> None:
        """Let something come in that was meant for one incarnation (rules 1 and 2)."""
        if incarnation != self.incarnation or not self.is_up:
            return
        if self.is_paused or self._held:
            self._held.append(action)
        elif self.slow_us and self.world.now_us < self._free_at_us:
            self._held.append(action)
            self._take_held_later()
        else:
            if self.slow_us:
                self._free_at_us = self.world.now_us + self.slow_us
            action()

    def _take_held_later(self) -> None:
        delay_us, incarnation = max(0, self._free_at_us - self.world.now_us), self.incarnation
        self.world.after(delay_us, lambda: self._take_held(incarnation))

    def _take_held(self, incarnation: int) -> None:
        """Take in what waited; the first of it, while it is slow."""
        while incarnation == self.incarnation and self._held and not self.is_paused:
            if self.slow_us and self.world.now_us < self._free_at_us:
                self._take_held_later()
                break
            self._free_at_us = self.world.now_us + self.slow_us
            self._held.popleft()()

    def after(self, delay_us: int, action: Action) -> Planned:
        """Plan something that ends with this incarnation."""
        return self.world.after(delay_us, partial(self.take, self.incarnation, action))

    def pause(self) -> None:
        """Stand still (SIGSTOP)."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on, with what came in meanwhile."""
        if not self.is_paused:
            return
        self.is_paused = False
        self._take_held(self.incarnation)

    def die(self) -> None:
        """End at once; what it has sent may still arrive."""
        self.is_up = self.is_paused = False
        self.incarnation += 1
        self._held.clear()
        self._timer = None
        self._free_at_us = 0
        self.died()

    def start(self) -> None:
        """Start anew; nothing for one that runs."""
        if self.is_up:
            return
        self.is_up = True
        self.incarnation += 1
        self.started()

    def set_timer(self, at_ms: int | None) -> None:
        """Have `ring` called at this time (rule 3)."""
        if at_ms is None:
            return
        timer = self._timer
        if timer is not None and timer.action is not None:
            if self._timer_at_ms <= at_ms:
                return
            timer.cancel()
        self._timer_at_ms = at_ms
        delay_us = at_ms * 1000 - self.world.now_us
        if self._pace_since_us[0]:
            delay_us = int((at_ms * 1000 - self._now_us()) / self.pace) + 1
        self._timer = self.after(delay_us if delay_us > 0 else 1, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.ring()

    # ---- what a subclass does

    def died(self) -> None:
        """Forget what was in memory."""

    def started(self) -> None:
        """Come up."""

    def ring(self) -> None:
        """The timer: send the machine its wake-up if it is due, and set the next timer."""
