"""A simulated operating system process: it runs, is slow, pauses, dies, and starts again.

Storages, servers and clients die in the same way. The planned actions of a dead process must not
run.

Rules:
    1. Actions planned by one incarnation never reach the next incarnation.
    2. Input that arrives during a pause or a busy time waits, and is processed in order.
    3. A machine's `wake_at_ms` is read after every step. There is at most one timer.
    4. Each process has its own monotonic clock (`now_ms`), which may run fast or slow, and a wall
       clock, which may show any time.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from waltz_sim.world.world import Action, PlannedAction, World

if TYPE_CHECKING:
    from waltz_sim.world.network import SimLink


class Process:
    """A simulated process. A subclass implements `on_died`, `on_started` and `on_timer`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = world.stream(name)
        self.chance = self.rng.random
        self.is_up = True
        self.is_paused = False
        self.incarnation = 1
        self.slow_us = 0  # the delay before each input
        self.wall_offset_ms = 0
        self.clock_rate = 1.0  # the speed of this process's monotonic clock
        self._rate_since_us = (0, 0)  # the world's time and this clock's time when the speed began
        self.links: dict[int, SimLink] = {}
        self._waiting_inputs: deque[Action] = deque()  # waiting inputs of this incarnation
        self._free_at_us = 0
        self._timer: PlannedAction | None = None
        self._timer_at_ms = 0

    @property
    def wall_ms(self) -> int:
        """The time of this process's wall clock in ms."""
        return 1_000_000 + self.world.now_ms + self.wall_offset_ms

    @property
    def now_ms(self) -> int:
        """The time of this process's monotonic clock in ms (rule 4)."""
        if self.clock_rate == 1.0 and not self._rate_since_us[0]:
            return self.world.now_us // 1000
        return self._now_us() // 1000

    def _now_us(self) -> int:
        since_us, own_us = self._rate_since_us
        return own_us + int((self.world.now_us - since_us) * self.clock_rate)

    def set_clock_rate(self, clock_rate: float) -> None:
        """Change the speed of this process's monotonic clock."""
        self._rate_since_us = max(1, self.world.now_us), self._now_us()
        self.clock_rate = clock_rate

    def can_process_now(self, incarnation: int) -> bool:
        """Whether `process_input` would process an input now, without dropping or delaying it."""
        return (
            incarnation == self.incarnation
            and self.is_up
            and not (self.is_paused or self._waiting_inputs or self.slow_us)
        )

    def process_input(self, incarnation: int, action: Action) -> None:
        """Process an input for one incarnation, now or later (rules 1 and 2)."""
        if incarnation != self.incarnation or not self.is_up:
            return
        if self.is_paused or self._waiting_inputs:
            self._waiting_inputs.append(action)
        elif self.slow_us and self.world.now_us < self._free_at_us:
            self._waiting_inputs.append(action)
            self._process_waiting_later()
        else:
            if self.slow_us:
                self._free_at_us = self.world.now_us + self.slow_us
            action()

    def _process_waiting_later(self) -> None:
        delay_us, incarnation = max(0, self._free_at_us - self.world.now_us), self.incarnation
        self.world.call_after_us(delay_us, lambda: self._process_waiting(incarnation))

    def _process_waiting(self, incarnation: int) -> None:
        """Process the waiting inputs; while the process is slow, only the first one."""
        while incarnation == self.incarnation and self._waiting_inputs and not self.is_paused:
            if self.slow_us and self.world.now_us < self._free_at_us:
                self._process_waiting_later()
                break
            self._free_at_us = self.world.now_us + self.slow_us
            self._waiting_inputs.popleft()()

    def call_after_us(self, delay_us: int, action: Action) -> PlannedAction:
        """Plan an action for this incarnation; the action is dropped if the process dies first."""
        return self.world.call_after_us(
            delay_us, partial(self.process_input, self.incarnation, action)
        )

    def pause(self) -> None:
        """Pause the process, as SIGSTOP does."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue the process, with the inputs that arrived meanwhile."""
        if not self.is_paused:
            return
        self.is_paused = False
        self._process_waiting(self.incarnation)

    def die(self) -> None:
        """Kill the process; the messages that it has sent may still arrive."""
        self.is_up = self.is_paused = False
        self.incarnation += 1
        self._waiting_inputs.clear()
        self._timer = None
        self._free_at_us = 0
        self.on_died()

    def start(self) -> None:
        """Start the process again; do nothing if it is running."""
        if self.is_up:
            return
        self.is_up = True
        self.incarnation += 1
        self.on_started()

    def set_timer(self, at_ms: int | None) -> None:
        """Call `on_timer` at a time of this process's clock, or at an earlier set time (rule 3)."""
        if at_ms is None:
            return
        timer = self._timer
        if timer is not None and timer.action is not None:
            if self._timer_at_ms <= at_ms:
                return
            timer.cancel()
        self._timer_at_ms = at_ms
        delay_us = at_ms * 1000 - self.world.now_us
        if self._rate_since_us[0]:
            delay_us = int((at_ms * 1000 - self._now_us()) / self.clock_rate) + 1
        self._timer = self.call_after_us(delay_us if delay_us > 0 else 1, self._on_world_timer)

    def _on_world_timer(self) -> None:
        self._timer = None
        self.on_timer()

    # ---- implemented by subclasses

    def on_died(self) -> None:
        """Drop the state in memory, after the process has died."""

    def on_started(self) -> None:
        """Create the state in memory, after the process has started."""

    def on_timer(self) -> None:
        """Handle the timer: wake the machine if it is due, and set the next timer."""
