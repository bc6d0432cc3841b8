"""A checkpoint begins a new session in the middle of a load: what it costs, in virtual time.

Disks sync in half a millisecond, links take a third, ZooKeeper about one. What it costs real
processes is measured by `waltz-core bench checkpoint`.
"""

import itertools

import pytest

from waltz_core.records.record import BEFORE_FIRST
from waltz_core.wire.messages import Reason
from waltz_sim.cluster.simulated_cluster import MS, SimCluster
from waltz_sim.schedule import Schedule, Setup

DURATION_MS = 1_200
WRITE_EVERY_MS = 2
COST_MS_MAX = 50
NO_LOCKS = ((), (), ())


class Writer:
    """Appends a row now and then, whatever is under way, and notes when it is answered."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.client = cluster.clients[0]
        self.sent_count = 0
        self.answered_us: list[int] = []
        self.ids: list[int] = []
        self.others: list[str] = []
        self.client.on_settled = self.settled
        self.client.on_rejected = lambda effect: self.others.append(str(effect.error))
        self.client.started()
        self.client.subscribe(BEFORE_FIRST)
        self.append()

    def append(self) -> None:
        if self.world.now_ms < DURATION_MS:
            self.sent_count += 1
            workload, mark = self.cluster.workload, self.client.mark
            self.client.append(workload.parcel(self.client, [NO_LOCKS], mark))
            self.world.after(WRITE_EVERY_MS * MS, self.append)

    def settled(self, effect) -> None:
        self.cluster.workload.ended(effect.token)
        self.answered_us.append(self.world.now_us)
        for number, reason in zip(
            effect.outcome.transaction_ids, effect.outcome.reasons, strict=True
        ):
            if reason == Reason.COMMITTED:
                self.ids.append(int(number))
            else:
                self.others.append(Reason(reason).name)

    def longest_gap_ms(self) -> float:
        """The longest silence, but for the first session's beginning."""
        times = self.answered_us
        return max(after - before for before, after in itertools.pairwise(times)) / MS


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
    writer = Writer(cluster)
    cluster.world.run(DURATION_MS * MS)
    assert cluster.coordinator.metadata.session_id >= 4
    assert cluster.checks.counts["session closed"] >= 4
    cluster.run_until_recovered()
    # Nothing is lost, refused or doubled, and the log holds nothing else.
    assert writer.others == []
    assert writer.ids == list(range(writer.sent_count))
    assert writer.longest_gap_ms() < COST_MS_MAX
