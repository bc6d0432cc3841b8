"""How coverage counts faults and seeds."""

from collections import Counter

from waltz_sim.coverage import SEEDS_MIN, Coverage, FailedSeed, sum_verdicts
from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.guarantees.required_states import REQUIRED_STATES
from waltz_sim.report import format_report
from waltz_sim.run import RunVerdict
from waltz_sim.schedule import Schedule


def verdict(seed, rule=None, **counts):
    return RunVerdict(
        schedule=Schedule(seed),
        rule=rule,
        text=f"{rule}: it was | broken",
        counts=Counter(counts),
        steps=10,
        disk_steps=20,
        virtual_ms=1_000,
        committed=3,
        fingerprint="",
        trace="",
        notes=(),
    )


def everything(seeds):
    names = [*REQUIRED_STATES, *(f"fault {kind}" for kind in WEIGHTS)]
    return Coverage(seeds=seeds, counts=Counter(dict.fromkeys(names, 1)))


def test_the_counts_of_runs_are_added():
    first = sum_verdicts([verdict(1, fed=2), verdict(2, "Fork", fed=1)])
    second = sum_verdicts([verdict(0, "Dense")])
    first.merge(second)
    assert (first.seeds, first.steps, first.disk_steps, first.committed) == (3, 30, 60, 9)
    assert first.counts["fed"] == 3
    assert first.failures == [
        FailedSeed(0, "Dense", "Dense: it was | broken"),
        FailedSeed(2, "Fork", "Fork: it was | broken"),
    ]
    assert not first.is_good


def test_the_steps_per_second_of_cpu_time_are_reported():
    sums = Coverage(seeds=6, steps=12_000, cpu_s=1.0)
    sums.merge(Coverage(seeds=6, steps=12_000, cpu_s=0.5))
    assert (sums.seeds_per_cpu_s, sums.steps_per_cpu_s) == (8.0, 16_000.0)
    assert (Coverage().seeds_per_cpu_s, Coverage().steps_per_cpu_s) == (0.0, 0.0)
    report = format_report(sums, first=0, seconds=1.0)
    assert "| CPU time | 2 s; per second 8.0 seeds, 16,000 steps |" in report


def test_few_seeds_may_leave_states_and_faults_untried():
    assert Coverage(seeds=SEEDS_MIN - 1).find_missing() == []


def test_many_seeds_must_try_all_states_and_faults():
    assert everything(SEEDS_MIN).is_good
    quiet = Coverage(seeds=SEEDS_MIN)
    assert len(quiet.find_missing()) == len(REQUIRED_STATES) + len(WEIGHTS)
    assert not quiet.is_good


def test_the_run_fails_if_a_kind_of_fault_never_fires():
    sums = everything(SEEDS_MIN)
    sums.counts["fault kill_storage"] = 0
    assert sums.find_missing() == ["fault kill_storage"]
    assert not sums.is_good
    assert sums.faults["kill_storage"] == 0


def test_the_report_names_broken_guarantees_and_untried_faults():
    sums = everything(SEEDS_MIN)
    sums.counts["fault cut_link"] = 0
    sums.merge(sum_verdicts([verdict(17, "Fork"), verdict(18, "Converged")]))
    report = format_report(sums, first=5, seconds=10.0)
    assert "| seeds | 302 from 5 on |" in report
    assert "| lost, changed or forked | 1 |" in report
    assert "| duplicated | 0 |" in report
    assert "- fault cut_link" in report
    assert "| `python -m waltz_sim --seed 17` | Fork | Fork: it was \\| broken |" in report
