"""Seeds of the replication world: promises hold under faults, and all is equal after they end.

A failing seed is replayed with `python -m tests.sim.replication_world SEED` and prints its trace.
"""

import os
import subprocess
import sys

import pytest

from tests.sim.replication_world import FAULTS, Sim, run_seed

pytestmark = pytest.mark.sim
SEEDS = int(os.environ.get("WALTZ_SEEDS", "60"))
FIRST_SEED = int(os.environ.get("WALTZ_FIRST_SEED", "0"))


@pytest.mark.timeout(SEEDS * 20 + 60)
def test_three_replicas_and_two_servers():
    reached = sum(
        (run_seed(seed).checker.counts for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)),
        start=Sim(0).checker.counts,
    )
    for state in (
        "acked",
        "failed",
        "settled ok",
        "mark proved",
        "mark unproved",
        "replica.unknown",
        "replica.refused",
        "coordinator.away",
        "released",
        "session.abandoned",
        "nack RangeRaw",
        *(f"fault {name}" for name in FAULTS),
    ):
        assert reached[state], f"no seed reached: {state}"


@pytest.mark.timeout(SEEDS * 20 + 60)
def test_five_replicas_and_three_servers():
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS // 4):
        assert run_seed(seed, replicas=5, servers=3).checker.counts["acked"], f"idle: {seed}"


def test_one_replica():
    for seed in range(8):
        # There is nobody to mend it, and every loss of its disk is a loss.
        faults = dict.fromkeys(FAULTS, True) | {"roll_back": False, "rot": False}
        sim = run_seed(seed, replicas=1, servers=2, faults=faults)
        assert sim.checker.counts["acked"], f"idle: {seed}"


def test_without_faults_nothing_is_ever_lost_or_closed():
    counts = Sim(5, faults={}).run().checker.counts
    assert counts["failed"] == counts["replica.lost"] == 0
    assert counts["acked"] > 300


def test_a_seed_is_the_same_run_in_every_process():
    program = "from tests.sim.replication_world import Sim\nprint(Sim(11).run().world.trace)\n"
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    assert len(traces.pop().strip()) == 32
