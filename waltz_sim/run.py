"""Runs one seed or one schedule to its end, and returns a verdict.

Tests, the command line, the swarm and the shrinker all use this module. So they run a schedule in
the same way, and have the same definition of a failure.
"""

import traceback
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults import kinds as faults
from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.guarantees.history import Violation
from waltz_sim.schedule import DEFAULT_STEPS_MAX, Schedule, schedule_of


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The result of a run. `rule` is the name of the broken rule; None if no rule was broken.

    An error in a machine, such as a failed assertion, breaks the rule `Crash`. `steps` counts the
    events of the world, `disk_steps` the steps of its disks, and `committed` the transactions.
    """

    schedule: Schedule
    rule: str | None
    text: str
    counts: Counter[str]
    steps: int
    disk_steps: int
    virtual_ms: int
    committed: int
    fingerprint: str
    trace: str
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether the run broke no rule."""
        return self.rule is None


@dataclass(frozen=True, slots=True)
class ScheduleGenerator:
    """How a schedule is drawn from a seed.

    All faults are repaired after `steps_max` steps. The schedules are rough if `is_rough`: rule 4
    of `kinds.py`.
    """

    steps_max: int = DEFAULT_STEPS_MAX
    is_rough: bool = False

    def schedule_of(self, seed: int) -> Schedule:
        """Draw the schedule of a seed."""
        drawn = faults.rough_schedule_of(seed) if self.is_rough else schedule_of(seed, WEIGHTS)
        return drawn.with_setup(steps_max=self.steps_max)

    @property
    def options(self) -> str:
        """The command-line options of this generator, each with a space before it."""
        rough = " --rough" if self.is_rough else ""
        return rough + ("" if self.steps_max == DEFAULT_STEPS_MAX else f" --steps {self.steps_max}")

    def command(self, seed: int) -> str:
        """Return the command that replays a seed."""
        return f"python -m waltz_sim --seed {seed}{self.options}"


DEFAULT_GENERATOR: Final = ScheduleGenerator()


def run_seed(
    seed: int, generator: ScheduleGenerator = DEFAULT_GENERATOR, *, is_traced: bool = False
) -> RunVerdict:
    """Draw the schedule of a seed, and run it."""
    return run(generator.schedule_of(seed), is_traced=is_traced)


def run(schedule: Schedule, *, is_traced: bool = False, keeps_all: bool = False) -> RunVerdict:
    """Run a schedule: inject its faults, repair all of them, and make the final checks.

    If `keeps_all`, the verdict has all lines of the trace. Otherwise it has only the last lines.
    """
    cluster = SimCluster(schedule, is_traced=is_traced)
    if keeps_all:
        cluster.world.notes = deque(cluster.world.notes)
    rule, text = None, ""
    try:
        faults.plan_faults(cluster, schedule)
        cluster.start_clients()
        setup = schedule.setup
        cluster.world.run(setup.duration_ms * US_PER_MS, steps_max=setup.steps_max)
        cluster.run_until_recovered()
    except Violation as violation:
        rule, text = violation.rule, str(violation)
    except Exception:  # noqa: BLE001 - any error of a machine is a finding
        rule, text = "Crash", traceback.format_exc(limit=-6)
    finally:
        cluster.close()
    world = cluster.world
    return RunVerdict(
        schedule=schedule,
        rule=rule,
        text=text,
        counts=cluster.checks.counts,
        steps=world.step_count,
        disk_steps=sum(storage.disk.step_count for storage in cluster.storages.values()),
        virtual_ms=world.now_ms,
        committed=len(cluster.checks.history.log),
        fingerprint=world.fingerprint,
        trace=world.trace_hash,
        notes=tuple(world.notes),
    )
