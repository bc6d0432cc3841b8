"""Each broken rule is detected by its own short schedule and by the named checker.

After a change of production code a schedule may not reach the broken rule any more. Then the test
tries the seeds of the original search. `python -m tests.sim.mutants --search all` searches new
traces.
"""

import pytest

from tests.sim.mutants import SEEDS_MAX, TRACES, load, run_broken
from tests.sim.switches import SWITCHES
from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.run import run
from waltz_sim.schedule import schedule_of

pytestmark = pytest.mark.sim


KEPT_TRACES = {path.stem: load(path) for path in sorted(TRACES.glob("*.json"))}


@pytest.mark.parametrize(
    "trace",
    [pytest.param(trace, id=f"{name}: {trace.rule}") for name, trace in KEPT_TRACES.items()],
)
def test_a_broken_rule_is_detected(trace):
    green = run(trace.schedule)
    assert green.is_good, green.text
    # If production code has changed, the schedule may pass in spite of the mutant. Then the seeds
    # of its search are tried, and another checker may detect the mutant first.
    schedules = [trace.schedule, *(schedule_of(seed, WEIGHTS) for seed in trace.seeds)]
    rules = (run_broken(trace.switch, schedule).rule for schedule in schedules)
    assert any(rule not in {None, "Crash"} or rule == trace.rule for rule in rules), (
        f"the mutant is not detected: python -m tests.sim.mutants --search {trace.switch}"
    )


def test_each_trace_belongs_to_an_existing_switch():
    assert set(KEPT_TRACES) <= set(SWITCHES)
    assert len(KEPT_TRACES) >= 45
    assert all(name == trace.switch for name, trace in KEPT_TRACES.items())
    needed = [trace.seeds_needed for trace in KEPT_TRACES.values()]
    assert all(each is None or 0 < each <= SEEDS_MAX for each in needed)
