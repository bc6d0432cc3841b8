"""The effect of one slow replica of three on appends, in virtual time.

A sync takes 0.5 s on this replica's disk, and 0.5 ms on the other disks. So the replica lags by
more records than the owner keeps in memory, and gets these records from another replica's log.
"""

from functools import cache

import pytest

from tests.sim.steady_writer import SteadyWriter
from waltz_core.wire.messages import RangeRaw
from waltz_sim.cluster.checkers import Checks
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.schedule import Schedule, Setup

DURATION_MS = 2_000
WRITE_EVERY_MS = 3
SLOW_US = 500_000
SLOWER_MAX = 2.0
SETUP = Setup(
    spare_storages=0,
    servers=1,
    clients=1,
    segment_bytes_max=1 << 20,
    checkpoint_interval_count=1 << 30,
    duration_ms=DURATION_MS,
)


class ReadCounter(Checks):
    """All checkers, and the number of records that one replica has read for another."""

    def on_work_done(self, storage, work, result, before) -> None:
        super().on_work_done(storage, work, result, before)
        for request in work.requests:
            if isinstance(request.message, RangeRaw) and not request.message.reader:
                self.count("copied from a log")


def percentile_ms(writer: SteadyWriter, share: float) -> float:
    return sorted(writer.took_us)[int(share * len(writer.took_us))] / US_PER_MS


def tick(cluster: SimCluster) -> None:
    """Plan an action at regular times, so that the checkers run even without other events."""
    cluster.world.call_after_us(50 * US_PER_MS, lambda: tick(cluster))


def written(seed: int, slow: str | None = None, *, from_the_start: bool = False) -> SteadyWriter:
    """Run a cluster with one slow storage or none; no session may end because of it."""
    cluster = SimCluster(Schedule(seed, SETUP), checks=ReadCounter)
    for storage in cluster.storages.values():
        storage.fsync_us = 500
    if slow is not None and from_the_start:
        cluster.storages[slow].fsync_us = SLOW_US
    writer = SteadyWriter(cluster, every_ms=WRITE_EVERY_MS, until_ms=DURATION_MS)
    tick(cluster)
    assert cluster.world.run(
        1_000 * US_PER_MS, until=lambda: cluster.checks.counts["session opened"] > 0
    )
    if slow is not None:
        cluster.storages[slow].fsync_us = SLOW_US
    writer.append()
    cluster.world.run((DURATION_MS + 200) * US_PER_MS - cluster.world.now_us)
    assert cluster.checks.counts["session closed"] == 0
    assert len(writer.took_us) == len(writer.sent_us) > 500
    if slow is not None:
        behind, last = cluster.storages[slow].log.synced_max, len(writer.sent_us) - 1
        assert behind < last - 50, "the replica is not slow"
        assert cluster.checks.counts["copied from a log"], "the replica got all records from memory"
    cluster.run_until_recovered()
    assert writer.others == []
    return writer


@cache
def without_slow_replica() -> SteadyWriter:
    return written(0)


@pytest.mark.parametrize("slow", ["storage0:1", "storage2:1"])
def test_a_slow_replica_costs_appends_little_and_ends_no_session(slow: str):
    with_slow_replica = written(0, slow)
    for share in (0.5, 0.99):
        assert percentile_ms(with_slow_replica, share) <= SLOWER_MAX * percentile_ms(
            without_slow_replica(), share
        )


def test_a_replica_that_is_too_slow_to_join_ends_no_session():
    with_slow_replica = written(0, "storage0:1", from_the_start=True)
    assert percentile_ms(with_slow_replica, 0.99) <= SLOWER_MAX * percentile_ms(
        without_slow_replica(), 0.99
    )
