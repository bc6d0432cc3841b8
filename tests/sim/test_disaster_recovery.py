"""`accept-replicas` is interrupted after each step: no partition opens with a wrong log."""

import pytest

from tests.sim.broken_replication import marked_before_zookeeper
from tests.sim.switches import broken
from tests.sim.test_faults import cluster_of, repair_and_count, settled_cluster
from waltz_sim.cluster.disaster_recovery import BEST_REPLICA, DEATH_STEPS, DisasterRecovery
from waltz_sim.cluster.simulated_cluster import US_PER_MS
from waltz_sim.guarantees.history import Violation
from waltz_sim.world.simulated_disk import Survival

pytestmark = pytest.mark.sim
A, B, C = "storage0:1", "storage1:1", "storage2:1"


def accept(cluster, replica=BEST_REPLICA, *, dies_after=""):
    """Run the command to its end, and return its decision."""
    ended = []
    DisasterRecovery(cluster, ended.append, accepted=replica, dies_after=dies_after)
    assert cluster.world.run(20_000 * US_PER_MS, until=lambda: bool(ended))
    return ended[0]


def test_a_complete_log_is_accepted_and_copied_to_all_replicas():
    cluster = settled_cluster()
    last = cluster.checks.history.last
    assert accept(cluster).log.last_synced_id == last
    assert set(cluster.replicas) == {A, B, C}
    assert cluster.unfinished_recovery is None
    repair_and_count(cluster)


@pytest.mark.parametrize("step", DEATH_STEPS)
def test_a_command_that_dies_after_a_step_loses_no_transaction_and_can_be_repeated(step):
    cluster = settled_cluster()
    assert accept(cluster, dies_after=step) is None
    # If a command dies after the write and before the assignment, the recovery is unfinished, and
    # no session opens.
    is_undecided = step in {"write", "mark"}
    assert (cluster.unfinished_recovery is not None) == is_undecided
    assert cluster.coordinator.is_rewritten == (step not in {"claim", "fence"})
    if step == "write":
        assert not cluster.world.run(5_000 * US_PER_MS, until=cluster.has_all_engaged)
    repair_and_count(cluster)
    assert cluster.unfinished_recovery is None


def lost_end():
    """C lags. A has lost the records that C lacks, and is suspect. B has all, but is down."""
    cluster = cluster_of(spare_storages=0, segment_bytes_max=65_536)
    a, b, c = (cluster.storages[each] for each in (A, B, C))
    cluster.kept_down[c.name] = None
    c.kill()
    a.disk.is_lying = True
    last = cluster.checks.history.last
    assert cluster.world.run(
        5_000 * US_PER_MS, until=lambda: cluster.checks.history.last > last + 5
    )
    cluster.kept_down[b.name] = None
    b.kill()
    a.trusts_fsync = False
    a.lose_power(Survival.NOTHING, loses_ignored_syncs=True)
    a.disk.stop_lying()
    cluster.budget.record_loss(a)
    cluster.kept_down.pop(c.name)
    c.start()
    assert cluster.world.run(5_000 * US_PER_MS, until=lambda: None not in (a.log, c.log))
    assert a.log.suspect
    # The owner in memory would remember the committed records.
    cluster.kill(cluster.owner)
    return cluster


def test_an_incomplete_log_is_not_marked_before_zookeeper_is_written():
    cluster = lost_end()
    assert accept(cluster, A) is None
    assert cluster.storages[A].log.suspect
    assert not cluster.world.run(5_000 * US_PER_MS, until=cluster.has_all_engaged)
    repair_and_count(cluster)


def test_marking_a_log_before_the_write_to_zookeeper_may_lose_acknowledged_rows():
    with broken(marked_before_zookeeper.__name__):
        cluster = lost_end()
        assert accept(cluster, A) is None
        with pytest.raises(Violation, match=r"DecisionCovers: .* the log ends at"):
            cluster.world.run(5_000 * US_PER_MS, until=cluster.has_all_engaged)
