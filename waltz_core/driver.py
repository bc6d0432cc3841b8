"""Runs one machine on asyncio, with the contract of `machine.py` (order, wake-ups, failures).

Rules:
    1. One step at a time. An event that is posted while effects are performed is queued.
    2. All effects of a step are performed, in list order, before the next event is processed.
    3. `wake_at_ms` is read again after every step; there is at most one timer.
    4. After a machine has raised an exception, it gets no more events, and its owner is notified
       once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from waltz_core.log_lines import log_report
from waltz_core.machine import Machine, Report, Wakeup

_log = logging.getLogger(__name__)

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


def loop_clock_ms() -> int:
    """Return the running loop's monotonic time, in milliseconds."""
    # uvloop's times are whole milliseconds, but 32914.34 * 1000 is below 32914340
    return round(asyncio.get_running_loop().time() * 1000)


class Driver(Generic[EventT, EffectT]):
    """Runs one machine on the running loop, without tasks or threads."""

    def __init__(
        self,
        machine: Machine[EventT | Wakeup, EffectT | Report],
        perform: Callable[[EffectT], None],
        *,
        on_report: Callable[[Report], None] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        clock: Callable[[], int] = loop_clock_ms,
        name: str = "",
    ) -> None:
        self._machine = machine
        self._perform = perform
        self._on_report = on_report or self._log_report
        self._on_failure = on_failure
        self._clock = clock
        self._name = name or type(machine).__name__
        self._inbox: deque[EventT | Wakeup] = deque()
        self._is_stepping = False
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        self._loop = asyncio.get_running_loop()
        self._set_timer()

    @property
    def is_stopped(self) -> bool:
        """Whether the driver accepts no more events."""
        return self._is_stopped

    def post(self, event: EventT | Wakeup) -> None:
        """Pass an event to the machine, and perform the effects before the return (but see rule 1).

        A stopped driver drops the event. Errors of the machine are not raised: see `on_failure`.
        """
        if self._is_stopped:
            return
        self._inbox.append(event)
        if not self._is_stepping:
            self._run()

    def stop(self) -> None:
        """Accept no more events, and cancel the timer; may be called again."""
        self._is_stopped = True
        self._inbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._is_stepping = True
        try:
            while self._inbox and not self._is_stopped:
                self._step(self._inbox.popleft())
        except Exception as error:  # noqa: BLE001 - rule 4: any error stops the machine
            self._fail(error)
        finally:
            self._is_stepping = False
        if not self._is_stopped:
            self._set_timer()

    def _step(self, event: EventT | Wakeup) -> None:
        effects = self._machine.step(event, self._clock())
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("machine.step machine=%s input=%r effects=%r", self._name, event, effects)
        for effect in effects:
            if isinstance(effect, Report):
                self._on_report(effect)
            else:
                self._perform(effect)

    def _fail(self, error: Exception) -> None:
        self.stop()
        _log.error("machine.failed machine=%s", self._name, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _set_timer(self) -> None:
        """Set the timer; if the timer is set too early, keep it: an early wake-up is harmless."""
        wake_at_ms = self._machine.wake_at_ms
        if wake_at_ms is None:
            return
        if self._timer is not None:
            if self._timer_at_ms <= wake_at_ms:
                return
            self._timer.cancel()
        self._timer_at_ms = wake_at_ms
        delay_ms = max(0, wake_at_ms - self._clock())
        self._timer = self._loop.call_later(delay_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.post(Wakeup())

    def _log_report(self, report: Report) -> None:
        log_report(_log, logging.INFO, report, machine=self._name)
