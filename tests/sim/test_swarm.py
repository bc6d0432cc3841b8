"""Many seeds in one process: totals of the results, and cleanup."""

import gc

from waltz_sim.run import ScheduleGenerator
from waltz_sim.swarm import sweep


def test_one_process_sums_the_results_and_restores_the_garbage_collector():
    before = gc.get_threshold()
    sums = sweep(3, 2, jobs=1, generator=ScheduleGenerator(100))
    assert gc.get_threshold() == before
    assert (sums.seeds, sums.failures) == (2, [])
    assert sums.steps >= 200
    assert sums.cpu_s > 0
    assert sums.steps_per_cpu_s == sums.steps / sums.cpu_s
