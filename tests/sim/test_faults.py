"""Each kind of fault takes effect, and the fault budget prevents too many at once."""

from random import Random

import pytest

from waltz_core.replication import session_events
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME
from waltz_core.storage.service.service import NO_STORAGE_ID
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults import disk_faults, network_faults, process_faults, zookeeper_faults
from waltz_sim.faults import kinds as faults
from waltz_sim.guarantees.data_loss_budget import is_disk_sound, read_whole_log
from waltz_sim.guarantees.history import Violation
from waltz_sim.schedule import Schedule, Setup
from waltz_sim.world.simulated_disk import Survival

A, B, C = "storage0:1", "storage1:1", "storage2:1"


class FixedRolls(Random):
    """A random source that always chooses the first element, and returns the given rolls."""

    def __init__(self, roll=0.0, first=0):
        super().__init__(1)
        self.roll, self.first = roll, first

    def random(self):
        return self.roll

    def choice(self, seq):
        return seq[self.first]


def cluster_of(**setup):
    """A cluster that has written for a while, with all replicas engaged."""
    cluster = SimCluster(Schedule(7, Setup(**{"clients": 2, "think_ms": 5} | setup)))
    cluster.start_clients()
    assert cluster.world.run(2_000 * US_PER_MS, until=cluster.has_all_engaged)
    assert cluster.world.run(5_000 * US_PER_MS, until=lambda: cluster.checks.history.last > 60)
    return cluster


def settled_cluster(**setup):
    """A cluster in which all replicas hold the whole log."""
    cluster = cluster_of(**setup)
    cluster.workload.is_over = True
    assert cluster.world.run(5_000 * US_PER_MS, until=cluster.are_replicas_equal)
    return cluster


def new_session(cluster):
    cluster.owner.step(session_events.Checkpoint())
    cluster.world.run(50 * US_PER_MS)
    assert cluster.world.run(5_000 * US_PER_MS, until=cluster.has_all_engaged)


def repair_and_count(cluster):
    """Repair the cluster, which also checks all reports, and return the counts."""
    cluster.workload.is_over = False
    cluster.run_until_recovered()
    return cluster.checks.counts


def test_every_kind_of_fault_has_a_weight_and_a_description():
    assert faults.WEIGHTS.keys() == faults.KINDS.keys()
    for name, inject in faults.KINDS.items():
        assert (inject.__doc__ or "").strip().endswith("."), name


# ---- the budget


def test_the_fault_budget_permits_data_loss_on_one_replica_until_its_repair():
    cluster = settled_cluster()
    victim, other = cluster.storages[A], cluster.storages[B]
    assert cluster.budget.may_lose_data(victim)
    cluster.budget.record_loss(victim)
    assert cluster.budget.may_lose_data(victim)
    assert not cluster.budget.may_lose_data(other)
    new_session(cluster)
    assert cluster.budget.may_lose_data(other)
    assert not cluster.budget.has_lost_data(victim)


def test_a_corrupt_replica_is_not_trusted_even_if_it_is_engaged():
    cluster = settled_cluster()
    victim = cluster.storages[A]
    (path,) = [file for file in victim.disk.files() if file.name == "0000000000000000000.seg"]
    victim.disk.flip_bits(path, 500)
    cluster.budget.record_loss(victim)
    new_session(cluster)
    assert not is_disk_sound(victim)
    assert not cluster.budget.may_lose_data(cluster.storages[B])
    read_whole_log(victim.log)
    new_session(cluster)
    assert is_disk_sound(victim)
    assert cluster.budget.may_lose_data(cluster.storages[B])


def test_the_fault_budget_permits_a_silent_data_loss_only_if_no_replica_is_down():
    cluster = settled_cluster()
    assert cluster.budget.may_lose_data(cluster.storages[A], is_silent=True)
    cluster.storages[B].kill()
    assert not cluster.budget.may_lose_data(cluster.storages[A], is_silent=True)
    assert not cluster.budget.may_lose_data(cluster.storages[A])


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_fault_budget_permits_no_loss_of_the_only_copy(replicas):
    cluster = settled_cluster(replicas=replicas, spare_storages=0)
    assert not cluster.budget.may_lose_data(cluster.storages[A], is_silent=True)
    assert cluster.budget.may_lose_data(cluster.storages[A]) == (replicas == 2)


def test_an_unbounded_fault_budget_permits_losses_of_replicas_or_zookeeper_but_not_both():
    cluster = settled_cluster(is_unbounded=True)
    cluster.budget.record_loss(cluster.storages[A])
    assert cluster.budget.may_lose_data(cluster.storages[B])
    assert not cluster.budget.may_lose_data(cluster.storages[B], is_silent=True)
    assert not zookeeper_faults.delete_nodes(cluster, FixedRolls())
    cluster = settled_cluster(is_unbounded=True)
    assert zookeeper_faults.delete_nodes(cluster, FixedRolls())
    assert not cluster.budget.may_lose_data(cluster.storages[B])


# ---- disks


def test_a_disk_that_was_rolled_back_is_repaired():
    cluster = cluster_of()
    storage = cluster.storages[A]
    assert disk_faults.take_snapshot(cluster, FixedRolls())
    old = storage.log.max_id
    new_session(cluster)
    cluster.world.run(200 * US_PER_MS)
    assert disk_faults.roll_back_disk(cluster, FixedRolls())
    assert cluster.world.run(3_000 * US_PER_MS, until=lambda: storage.log is not None)
    assert cluster.checks.counts["rolled back"] == 1
    assert repair_and_count(cluster)["recovery decided without some replicas"] >= 1
    assert storage.log.max_id > old


def test_an_empty_disk_is_rejected_until_an_operator_has_replaced_it():
    cluster = cluster_of()
    storage = cluster.storages[A]
    before = storage.storage_id
    assert disk_faults.empty_disk(cluster, FixedRolls(roll=0.0))
    assert repair_and_count(cluster)["storage replaced"] == 1
    assert cluster.checks.counts["storage rejected: StorageIdMismatch"] >= 1
    assert storage.engine.storage_id not in {before, NO_STORAGE_ID}


def test_swapped_disks_are_rejected_and_nothing_is_lost():
    cluster = cluster_of()
    one, other = cluster.storages[A], cluster.storages[B]
    cluster.swap_disks(one, other)
    cluster.world.run(600 * US_PER_MS)
    assert one.log is other.log is None
    counts = repair_and_count(cluster)
    assert counts["storage rejected: StorageIdMismatch"] >= 2
    assert counts["storage replaced"] == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_unsynced_data_of_a_lying_disk_is_lost_with_the_power(is_known):
    cluster = cluster_of()
    storage = cluster.storages[A]
    disk_faults.lying_disk(cluster, FixedRolls(roll=0.4 if is_known else 0.6))
    assert storage.disk.is_lying
    assert cluster.world.run(900 * US_PER_MS, until=lambda: not storage.disk.is_lying)
    if is_known:
        assert cluster.checks.counts["fault lying_disk"] == 1
    repair_and_count(cluster)
    assert is_disk_sound(storage)


def test_a_power_loss_outside_the_budget_loses_nothing_on_a_lying_disk():
    cluster = settled_cluster()
    storage = cluster.storages[A]
    storage.disk.is_lying = True
    cluster.workload.is_over = False
    cluster.workload.begin(cluster.clients[0])
    cluster.world.run(100 * US_PER_MS)
    last = storage.log.synced_max
    storage.lose_power(Survival.NOTHING)
    assert cluster.world.run(2_000 * US_PER_MS, until=lambda: storage.log is not None)
    assert storage.log.synced_max >= last


@pytest.mark.parametrize("kind", ["rot", "zeroed_page", "stale_page", "misdirected_write"])
@pytest.mark.parametrize("seed", range(2))
def test_corrupted_records_are_repaired(kind, seed):
    cluster = settled_cluster(segment_bytes_max=2_048)
    assert faults.KINDS[kind](cluster, Random(seed))
    cluster.workload.is_over = False
    repair_and_count(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_truncated_or_missing_files_are_repaired_or_the_storage_is_replaced(seed):
    cluster = settled_cluster(segment_bytes_max=2_048)
    assert disk_faults.cut_file(cluster, Random(seed))
    repair_and_count(cluster)


def test_a_torn_record_after_a_restart_is_a_violation():
    cluster = settled_cluster()
    storage = cluster.storages[A]
    segment = next(path for path in storage.disk.files() if path.suffix == ".seg")
    storage.disk.flip_bits(segment, len(storage.disk.visible_content(segment)) - 5)
    with pytest.raises(Violation, match=r"treats a torn record, \d+, as a part of its log"):
        cluster.checks.on_log_opened(storage, storage.log)


def test_a_corrupt_control_slot_makes_a_replica_suspect_until_a_session_repairs_it():
    cluster = settled_cluster()
    assert disk_faults.spoiled_slot(cluster, FixedRolls())
    assert cluster.checks.counts["spoiled .ctl"] == 1
    assert any(file.name == SLOTS_FILE_NAME for file in cluster.storages[A].disk.files())
    assert repair_and_count(cluster)["storage replaced"] == 0


# ---- processes, links, ZooKeeper


# Truncations occur only after faults, and are rare.
@pytest.mark.parametrize("point", sorted({*process_faults.SERVER_CRASH_POINTS} - {"Truncate"}))
@pytest.mark.parametrize("is_after", [False, True])
def test_a_server_that_dies_at_a_chosen_point_restarts_and_the_cluster_recovers(point, is_after):
    cluster = cluster_of(servers=1)
    server = cluster.owner
    failed_calls = []
    server.planned_death = (point, is_after, lambda: failed_calls.append(cluster.world.now_ms))
    incarnation = server.incarnation
    cluster.owner.step(session_events.Checkpoint())
    assert cluster.world.run(3_000 * US_PER_MS, until=lambda: bool(failed_calls))
    assert server.incarnation > incarnation
    repair_and_count(cluster)


@pytest.mark.parametrize("is_after", [False, True])
def test_a_task_takes_effect_if_its_storage_dies_after_it_but_not_before_it(is_after):
    cluster = settled_cluster()
    storage = cluster.storages[A]
    failed_calls = []
    storage.planned_death = ("Prepare", is_after, lambda: failed_calls.append(storage.log.promised))
    promised = storage.log.promised
    cluster.owner.step(session_events.Checkpoint())
    assert cluster.world.run(1_000 * US_PER_MS, until=lambda: bool(failed_calls))
    assert failed_calls == [promised + is_after]
    repair_and_count(cluster)


def test_timers_of_a_fast_clock_fire_early_and_the_clock_never_goes_back():
    cluster = settled_cluster()
    process = cluster.servers[0]
    start_ms, own_ms = cluster.world.now_ms, process.now_ms
    assert own_ms == start_ms
    process.set_clock_rate(1.2)
    cluster.world.run(1_000 * US_PER_MS)
    assert process.now_ms - own_ms == pytest.approx(1_200, abs=2)
    process.set_clock_rate(0.8)
    fired_ms = process.now_ms
    assert fired_ms >= own_ms + 1_198
    cluster.world.run(1_000 * US_PER_MS)
    assert process.now_ms - fired_ms == pytest.approx(800, abs=2)


def test_a_link_is_cut_while_messages_are_in_flight():
    cluster = cluster_of()
    failed_count = 0
    for seed in range(200):
        cluster.world.run(1 * US_PER_MS)
        failed_count += network_faults.half_delivered(cluster, Random(seed))
    assert failed_count > 5
    repair_and_count(cluster)


def test_messages_of_an_abandoned_link_arrive_after_the_next_mount_and_are_rejected():
    cluster = cluster_of(clients=3)
    counts = cluster.checks.counts
    for seed in range(30):
        network_faults.outlived_link(cluster, Random(seed))
        cluster.world.run(100 * US_PER_MS)
    assert counts["fault outlived_link"] > 5
    assert counts["append on an older connection"] > 5
    repair_and_count(cluster)
    assert all(link.held is None for link in cluster.network.links.values())


def test_the_fault_outlived_link_does_not_replace_an_unused_link():
    cluster = settled_cluster()
    before = len(cluster.network.links)
    assert not network_faults.outlived_link(cluster, Random(1))
    cluster.world.run(3_000 * US_PER_MS)
    assert cluster.checks.counts["fault outlived_link"] == 0
    assert len(cluster.network.links) <= before + 1


def test_a_close_is_not_delivered_over_a_blocked_link():
    cluster = settled_cluster()
    network, server = cluster.network, cluster.owner
    link = next(each for each in server.links.values() if each.ends[1].name == A)
    network.block(A, server.name)
    network.close(link, 1)
    cluster.world.run(100 * US_PER_MS)
    assert link.is_open == [True, False]
    assert cluster.world.run(3_000 * US_PER_MS, until=lambda: not link.is_open[0])


def cluster_with_stranded_owner(seed, **setup):
    """A cluster in which a stranded owner still serves, while another server commits."""
    cluster = cluster_of(clients=3, **setup)
    old, last = cluster.owner, cluster.checks.history.last
    assert zookeeper_faults.strand_owner(cluster, Random(seed))
    assert cluster.world.run(
        2_000 * US_PER_MS, until=lambda: cluster.checks.history.last > last + 20
    )
    assert cluster.owner is not old
    return cluster, old


@pytest.mark.parametrize(("seed", "kept_count"), [(8, 0), (12, 1), (14, 1)])
def test_a_stranded_owner_stays_open_while_a_new_owner_replaces_it(seed, kept_count):
    cluster, old = cluster_with_stranded_owner(seed)
    new, mark = cluster.owner, old.partition.high_water_mark
    assert old.partition.is_open
    assert mark < new.partition.high_water_mark
    blocked = cluster.network.blocked
    reachable = [name for name in (A, B, C) if (old.name, name) not in blocked]
    assert len(reachable) == kept_count
    assert all((new.name, name) in blocked for name in reachable)
    repair_and_count(cluster)
    assert not cluster.network.blocked
    assert not cluster.coordinator.cut_off_servers


def test_a_stranded_owner_reports_no_old_mark():
    counts = [
        repair_and_count(cluster_with_stranded_owner(seed, think_ms=10)[0]) for seed in (8, 12, 15)
    ]
    assert sum(count["mark requested from an old owner"] for count in counts) > 5


def test_the_only_server_is_not_stranded():
    cluster = cluster_of(servers=1)
    assert not zookeeper_faults.strand_owner(cluster, Random(1))
    assert not cluster.coordinator.cut_off_servers


def test_delayed_watches_are_coalesced_and_lead_to_the_latest_assignment():
    cluster = settled_cluster()
    coordinator = cluster.coordinator
    coordinator.watch_delay_ms_max = 500
    for _ in range(5):
        coordinator.set_owner("server1")
        coordinator.set_owner("server0")
    assert cluster.checks.counts["watch coalesced"] > 5
    cluster.world.run(1_000 * US_PER_MS)
    assert cluster.owner.name == "server0"
    assert cluster.owner.partition.generation == coordinator.assignment.generation


def test_a_client_may_receive_a_stale_answer_about_the_owner():
    cluster = settled_cluster()
    cluster.coordinator.set_owner("server1")
    cluster.coordinator.stale_read_share = 1.0
    answers = []
    for _ in range(20):
        cluster.coordinator.owner_for(cluster.clients[0], answers.append)
    cluster.world.run(10 * US_PER_MS)
    assert {answer.owner for answer in answers} > {"server1"}


def test_replicas_are_reassigned_while_one_storage_is_down():
    cluster = cluster_of()
    assert zookeeper_faults.change_replicas_with_one_away(cluster, Random(3))
    repair_and_count(cluster)


def test_two_owners_claim_one_session_and_only_one_succeeds():
    cluster = cluster_of()
    failed_count = 0
    for seed in range(30):
        failed_count += zookeeper_faults.duel(cluster, Random(seed))
        cluster.world.run(300 * US_PER_MS)
    assert failed_count > 5
    counts = repair_and_count(cluster)
    assert counts["two owners claimed one session"] > 0


def test_a_hanging_server_loses_its_session_and_the_partition_moves():
    cluster = cluster_of(servers=2)
    hung = cluster.owner
    assert process_faults.hanging_server(cluster, FixedRolls(first=cluster.servers.index(hung)))
    hung.hang_count += 1  # the server does not continue by itself
    cluster.coordinator.watch_hanging(hung)
    assert cluster.coordinator.has_session[hung.name]
    cluster.world.run(5_000 * US_PER_MS, until=lambda: cluster.owner is not hung)
    assert not cluster.coordinator.has_session[hung.name]
    cluster.world.run(5_000 * US_PER_MS, until=cluster.has_all_engaged)
    assert repair_and_count(cluster)["session of a hanging server expired"] == 1
    assert not hung.is_hanging


def test_a_server_hangs_only_if_another_server_runs():
    cluster = cluster_of(servers=2)
    one, other = cluster.servers
    assert process_faults.hanging_server(cluster, FixedRolls(first=0))
    assert not process_faults.hanging_server(cluster, FixedRolls(first=1))
    assert one.is_hanging
    assert not other.is_hanging
    repair_and_count(cluster)
