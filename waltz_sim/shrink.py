"""Shortens a failing schedule to the part that the failure needs.

A schedule with sixty faults and four clients does not show the cause of a failure. Faults can be
removed, because each fault depends only on its own `chance` (`schedule.py`, rule 1).

Rules:
    1. A shorter schedule is kept only if it breaks the same rule.
    2. No part of a schedule grows: faults are removed, sizes are reduced, the time is shortened.
    3. The effort is limited by a number of runs, and by the caller (`is_out_of_time`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from waltz_sim.run import RunVerdict, run
from waltz_sim.schedule import Fault, Schedule

RUNS_MAX: Final = 300
DURATION_MS_MIN: Final = 50
# The values to try for each part of a set-up, in this order.
SMALLER_SETUPS: Final[tuple[tuple[str, tuple[float, ...]], ...]] = (
    ("is_bytes", (False,)),
    ("is_unbounded", (False,)),
    ("has_large_batches", (False,)),
    ("archive_interval_ms", (0,)),
    ("replicas", (1, 3)),
    ("spare_storages", (0, 1)),
    ("servers", (1, 2)),
    ("clients", (1, 2, 3)),
    ("batch_share", (0.0,)),
    ("keys", (1, 2, 6)),
)

Run = Callable[[Schedule], RunVerdict]


@dataclass(frozen=True, slots=True)
class ShrunkSchedule:
    """The shortest failing schedule that was found, its verdict, and the number of runs."""

    schedule: Schedule
    verdict: RunVerdict
    run_count: int


def shrink(
    verdict: RunVerdict,
    *,
    runs_max: int = RUNS_MAX,
    is_out_of_time: Callable[[], bool] = lambda: False,
    run_one: Run = run,
) -> ShrunkSchedule:
    """Shorten the schedule of a failed run."""
    assert verdict.rule is not None
    search = _Search(verdict, runs_max, is_out_of_time, run_one)
    search.shorten()
    return ShrunkSchedule(search.best_verdict.schedule, search.best_verdict, search.run_count)


class _Search:
    """The shortest failing schedule so far, and the search for a shorter one."""

    def __init__(
        self, verdict: RunVerdict, runs_max: int, is_out_of_time: Callable[[], bool], run_one: Run
    ) -> None:
        self.best_verdict = verdict
        self.run_count = 0
        self._rule = verdict.rule
        self._runs_max = runs_max
        self._is_out_of_time = is_out_of_time
        self._run_one = run_one

    @property
    def _faults(self) -> tuple[Fault, ...]:
        return self.best_verdict.schedule.faults

    def shorten(self) -> None:
        """Shorten the schedule, until a whole round brings no improvement."""
        size = None
        while size != _size_of(self.best_verdict.schedule) and not self._is_over():
            size = _size_of(self.best_verdict.schedule)
            self._shorten_time()
            self._remove_faults()
            self._reduce_setup()

    def _is_over(self) -> bool:
        return self.run_count >= self._runs_max or self._is_out_of_time()

    def _try_candidate(self, candidate: Schedule) -> bool:
        """Run a schedule; if it breaks the same rule, keep it and return True (rule 1)."""
        if self._is_over():
            return False
        self.run_count += 1
        verdict = self._run_one(candidate)
        if verdict.rule != self._rule:
            return False
        self.best_verdict = verdict
        return True

    def _shorten_time(self) -> None:
        """Shorten the time in which faults occur; remove the faults after it."""
        failed_ms = self.best_verdict.virtual_ms + 1
        schedule = self.best_verdict.schedule
        if failed_ms < schedule.setup.duration_ms:
            self._try_candidate(_with_duration(schedule, failed_ms))
        elif schedule.faults:
            # The run failed after all faults were repaired. The time after the last fault hardly
            # matters.
            last_ms = schedule.faults[-1].at_us // 1_000 + 1
            if last_ms < schedule.setup.duration_ms:
                self._try_candidate(_with_duration(schedule, last_ms))
        duration_ms = self.best_verdict.schedule.setup.duration_ms
        step_ms = duration_ms // 2
        while step_ms >= DURATION_MS_MIN and not self._is_over():
            if self._try_candidate(
                _with_duration(self.best_verdict.schedule, duration_ms - step_ms)
            ):
                duration_ms -= step_ms
            step_ms = min(step_ms, duration_ms) // 2

    def _remove_faults(self) -> None:
        """Remove groups of faults, first large groups and at last single faults (ddmin)."""
        if self._faults and self._try_candidate(self.best_verdict.schedule.with_faults(())):
            return
        group_count = 2
        while len(self._faults) > 1 and not self._is_over():
            if any(
                self._try_candidate(candidate)
                for candidate in _without_groups(self.best_verdict, group_count)
            ):
                group_count = max(2, group_count - 1)
            elif group_count >= len(self._faults):
                return
            else:
                group_count = min(len(self._faults), 2 * group_count)

    def _reduce_setup(self) -> None:
        """Reduce the sizes of the world, one after the other."""
        for name, values in SMALLER_SETUPS:
            for value in values:
                if value >= getattr(self.best_verdict.schedule.setup, name):
                    break
                if self._try_candidate(self.best_verdict.schedule.with_setup(**{name: value})):
                    break


def _with_duration(schedule: Schedule, duration_ms: int) -> Schedule:
    faults = [fault for fault in schedule.faults if fault.at_us <= duration_ms * 1_000]
    return schedule.with_faults(faults).with_setup(duration_ms=duration_ms)


def _without_groups(verdict: RunVerdict, group_count: int) -> Iterator[Schedule]:
    """Yield the schedule without its first group of faults, then without its second, and so on."""
    faults: Sequence[Fault] = verdict.schedule.faults
    size = -(-len(faults) // group_count)
    for start in range(0, len(faults), size):
        yield verdict.schedule.with_faults((*faults[:start], *faults[start + size :]))


def _size_of(schedule: Schedule) -> tuple[int, ...]:
    setup = schedule.setup
    sizes = [int(100 * getattr(setup, name)) for name, _ in SMALLER_SETUPS]
    return (len(schedule.faults), setup.duration_ms, *sizes)
