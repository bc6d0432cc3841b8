"""The delay of appends when a checkpoint begins a new session under load, in virtual time.

A sync takes 0.5 ms, a message 0.3 ms, and a request to ZooKeeper about 1 ms. The command
`waltz-core bench checkpoint` measures the delay in real processes.
"""

import itertools

import pytest

from tests.sim.steady_writer import SteadyWriter
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.schedule import Schedule, Setup

DURATION_MS = 1_200
WRITE_EVERY_MS = 2
COST_MS_MAX = 50


def longest_gap_ms(writer: SteadyWriter) -> float:
    """The longest time between two answers, except at the start of the first session."""
    gaps = (after - before for before, after in itertools.pairwise(writer.answered_us))
    return max(gaps) / US_PER_MS


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_a_checkpoint_under_load_costs_less_than_50_ms(replicas: int):
    setup = Setup(
        replicas=replicas,
        spare_storages=0,
        servers=1,
        clients=1,
        checkpoint_interval_count=100,
        lag_bytes_max=1 << 20,
        is_calm=True,
    )
    cluster = SimCluster(Schedule(0, setup))
    writer = SteadyWriter(cluster, every_ms=WRITE_EVERY_MS, until_ms=DURATION_MS)
    writer.append()
    cluster.world.run(DURATION_MS * US_PER_MS)
    assert cluster.coordinator.metadata.session_id >= 4
    assert cluster.checks.counts["session closed"] >= 4
    cluster.run_until_recovered()
    # No row is lost, rejected or duplicated, and the log contains no other rows.
    assert writer.others == []
    assert writer.ids == list(range(len(writer.sent_us)))
    assert longest_gap_ms(writer) < COST_MS_MAX
