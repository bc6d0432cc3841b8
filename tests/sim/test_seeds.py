"""Three hundred seeds break no guarantee, and cover enough kinds of faults.

`python -m waltz_sim --seed S` replays one; `make sim MINUTES=60` tries new ones.
"""

import os

import pytest

from waltz_sim.swarm import sweep

pytestmark = pytest.mark.sim
SEEDS = int(os.environ.get("WALTZ_SIM_SEEDS", "300"))
FIRST = int(os.environ.get("WALTZ_SIM_FIRST", "0"))
CORES = len(os.sched_getaffinity(0))


def test_no_seed_breaks_a_guarantee():
    sums = sweep(FIRST, SEEDS, jobs=CORES)
    broken = [
        f"python -m waltz_sim --seed {failure.seed}: {failure.rule}, {failure.text[-500:]}"
        for failure in sums.failures
    ]
    assert not broken, "\n".join(broken)
    assert sums.seeds == SEEDS
    assert not sums.find_missing(), "did not occur"
