"""A shortened schedule fails in the same way and has no unnecessary step."""

from collections import Counter

import pytest

from waltz_sim.run import RunVerdict
from waltz_sim.schedule import Fault, Schedule, Setup
from waltz_sim.shrink import shrink

FAULTS = tuple(Fault(1_000 * at, f"kind{at % 7}", at) for at in range(100, 5_900, 60))
NEEDED = (FAULTS[17], FAULTS[58])


def verdict_of(schedule, rule, virtual_ms=6_000):
    return RunVerdict(
        schedule=schedule,
        rule=rule,
        text="",
        counts=Counter(),
        steps=0,
        disk_steps=0,
        virtual_ms=virtual_ms,
        committed=0,
        fingerprint="",
        trace="",
        notes=(),
    )


class Model:
    """A run that fails if the schedule has certain faults and the world is large enough."""

    def __init__(self, needed=NEEDED, **least):
        self.needed, self.mark_min = needed, least
        self.run_count = 0

    def run(self, schedule):
        self.run_count += 1
        has_all = set(self.needed) <= set(schedule.faults)
        is_large = all(getattr(schedule.setup, name) >= n for name, n in self.mark_min.items())
        has_time = schedule.setup.duration_ms >= 4_000
        fails = has_all and is_large and has_time
        return verdict_of(schedule, "Fork" if fails else ("Converged" if has_all else None))


def schedule(faults=FAULTS):
    return Schedule(7, Setup(replicas=5, servers=3, clients=4, spare_storages=2), faults)


def test_shrinking_keeps_only_the_needed_faults():
    model = Model(clients=2)
    shrunk = shrink(model.run(schedule()), run_one=model.run)
    assert shrunk.verdict.rule == "Fork"
    assert shrunk.schedule.faults == NEEDED
    setup = shrunk.schedule.setup
    assert (setup.clients, setup.servers, setup.replicas, setup.spare_storages) == (2, 1, 1, 0)
    assert 4_000 <= setup.duration_ms < 4_200
    assert shrunk.run_count == model.run_count - 1


def test_two_of_97_faults_are_found_in_a_hundred_runs():
    """Measured: 62 runs to shrink the faults and all sizes of the world."""
    model = Model()
    shrunk = shrink(model.run(schedule()), run_one=model.run)
    assert shrunk.schedule.faults == NEEDED
    assert len(FAULTS) == 97
    assert shrunk.run_count <= 100


def test_a_failure_of_another_rule_is_ignored():
    model = Model(replicas=5)
    shrunk = shrink(model.run(schedule()), run_one=model.run)
    assert shrunk.schedule.setup.replicas == 5
    assert shrunk.verdict.rule == "Fork"


@pytest.mark.parametrize("runs_max", [1, 5, 20])
def test_shrinking_has_a_bounded_number_of_runs(runs_max):
    model = Model()
    first = model.run(schedule())
    shrunk = shrink(first, runs_max=runs_max, run_one=model.run)
    assert shrunk.run_count == runs_max
    assert shrunk.verdict.rule == "Fork"


def test_shrinking_ends_at_its_time_limit():
    model = Model()
    shrunk = shrink(
        model.run(schedule()), is_out_of_time=lambda: model.run_count > 3, run_one=model.run
    )
    assert model.run_count == 4
    assert shrunk.verdict.rule == "Fork"


def test_a_failure_without_faults_is_shortened_to_no_faults():
    model = Model(needed=())
    shrunk = shrink(model.run(schedule()), run_one=model.run)
    assert shrunk.schedule.faults == ()


def test_events_after_the_failure_are_removed_first():
    model = Model()
    first = verdict_of(schedule(), "Fork", virtual_ms=4_100)
    shrunk = shrink(first, runs_max=1, run_one=model.run)
    assert shrunk.schedule.setup.duration_ms == 4_101
    assert max(fault.at_us for fault in shrunk.schedule.faults) <= 4_101_000
