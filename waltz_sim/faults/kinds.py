"""The list of all kinds of faults.

A fault that is not listed here is not simulated. The faults themselves are in `process_faults.py`,
`network_faults.py`, `disk_faults.py`, `zookeeper_faults.py` and `archive_faults.py`.

Rules:
    1. A fault depends only on its own random numbers (`schedule.py`, rule 1) and on the state of
       the cluster.
    2. A fault destroys durable data of a replica only within a budget (`data_loss_budget.py`).
    3. Each fault that occurs is counted by its kind. So a batch of runs in which a kind never
       occurs can be rejected (`injection.py`).
    4. Rough runs find bugs that need several rare faults at once. A rough run has a theme: a few
       kinds of faults that occur often, such as faults of disks, of ZooKeeper's data, or of
       assignments. In half of the rough runs, only the kinds of the theme and of `_ALWAYS_POSSIBLE`
       can occur. Most rough runs have small segments.
"""

from collections.abc import Callable
from typing import Final

from waltz_sim.cluster.simulated_cluster import SimCluster
from waltz_sim.faults import (
    archive_faults,
    disk_faults,
    network_faults,
    process_faults,
    zookeeper_faults,
)
from waltz_sim.faults.injection import InjectFault
from waltz_sim.schedule import Fault, Schedule, schedule_of
from waltz_sim.world.world import random_of_number


def plan_faults(cluster: SimCluster, schedule: Schedule) -> None:
    """Plan each fault of a schedule at its time."""
    for fault in schedule.faults:
        cluster.world.call_after_us(fault.at_us, _action(cluster, fault))


def _action(cluster: SimCluster, fault: Fault) -> Callable[[], None]:
    def inject() -> None:
        if cluster.is_recovering:
            return
        rng = random_of_number(fault.chance)
        cluster.world.note(f"fault {fault.kind}")
        if KINDS[fault.kind](cluster, rng):
            cluster.checks.count(f"fault {fault.kind}")

    return inject


KINDS: Final[dict[str, InjectFault]] = {
    inject.__name__: inject
    for inject in (
        process_faults.kill_storage,
        process_faults.storage_away,
        process_faults.restart_loop,
        process_faults.crash_storage_at,
        process_faults.power_loss,
        process_faults.power_loss_at_a_step,
        process_faults.all_power,
        process_faults.pause_storage,
        process_faults.pause_server,
        process_faults.hanging_server,
        process_faults.kill_server,
        process_faults.crash_server_at,
        process_faults.slow_server,
        process_faults.kill_client,
        process_faults.pause_client,
        process_faults.slow_apply,
        process_faults.two_attempts,
        process_faults.clock_jump,
        process_faults.clock_drift,
        network_faults.cut_link,
        network_faults.half_delivered,
        network_faults.mute_link,
        network_faults.partition_network,
        network_faults.isolate_one,
        network_faults.slow_network,
        network_faults.heavy_tail,
        network_faults.duplicate_connect,
        network_faults.slow_reader,
        network_faults.outlived_link,
        network_faults.revoke_replicate,
        disk_faults.failing_disk,
        disk_faults.failing_call,
        disk_faults.failing_read,
        disk_faults.full_disk,
        disk_faults.slow_disk,
        disk_faults.hanging_disk,
        disk_faults.take_snapshot,
        disk_faults.roll_back_disk,
        disk_faults.empty_disk,
        disk_faults.clone_disk,
        disk_faults.swap_disks,
        disk_faults.lying_disk,
        disk_faults.rot,
        disk_faults.unseen_rot,
        disk_faults.memory_pressure,
        disk_faults.zeroed_page,
        disk_faults.misdirected_write,
        disk_faults.stale_page,
        disk_faults.cut_file,
        disk_faults.spoiled_slot,
        disk_faults.scrub,
        disk_faults.spoiled_locks,
        zookeeper_faults.lost_answers,
        zookeeper_faults.zookeeper_away,
        zookeeper_faults.zookeeper_restart,
        zookeeper_faults.expire_session,
        zookeeper_faults.cut_off_server,
        zookeeper_faults.late_watches,
        zookeeper_faults.lost_watches,
        zookeeper_faults.stale_reads,
        zookeeper_faults.strand_owner,
        zookeeper_faults.roll_back_nodes,
        zookeeper_faults.delete_nodes,
        zookeeper_faults.move_partition,
        zookeeper_faults.duel,
        zookeeper_faults.change_replicas,
        zookeeper_faults.change_replicas_with_one_away,
        zookeeper_faults.checkpoint,
        zookeeper_faults.accept_replicas,
        archive_faults.archive_away,
        archive_faults.archive_throttles,
        archive_faults.archive_loses_answers,
        archive_faults.slow_archive,
        archive_faults.corrupt_object,
        archive_faults.kill_uploader,
        archive_faults.expire_objects,
        archive_faults.power_loss_at_removal,
        archive_faults.crash_at_a_reset,
        archive_faults.accept_a_shorter_log,
        archive_faults.damage_objects,
        archive_faults.expire_rows_in_doubt,
        archive_faults.lose_a_reset_replica,
        archive_faults.lose_marks,
    )
}
# Faults that the budget seldom allows are drawn more often.
WEIGHTS: Final[dict[str, int]] = {
    **dict.fromkeys(KINDS, 4),
    "kill_storage": 8,
    "cut_link": 8,
    "lost_answers": 6,
    "take_snapshot": 8,
    "roll_back_disk": 10,
    "lying_disk": 8,
    "rot": 8,
    "zeroed_page": 8,
    "misdirected_write": 8,
    "stale_page": 8,
    "cut_file": 8,
    "roll_back_nodes": 8,
    "delete_nodes": 8,
    "strand_owner": 24,
    "all_power": 2,
    "slow_disk": 2,
    "clock_jump": 2,
    "clock_drift": 2,
    "slow_apply": 2,
    "duplicate_connect": 2,
}

# Rule 4: the kinds from which a theme is chosen, and the kinds that can occur in any rough run.
THEMES: Final = (
    "all_power",
    "change_replicas",
    "clone_disk",
    "crash_storage_at",
    "cut_file",
    "delete_nodes",
    "empty_disk",
    "failing_call",
    "failing_disk",
    "failing_read",
    "full_disk",
    "kill_storage",
    "lying_disk",
    "misdirected_write",
    "power_loss",
    "power_loss_at_a_step",
    "restart_loop",
    "roll_back_disk",
    "roll_back_nodes",
    "rot",
    "spoiled_slot",
    "stale_page",
    "strand_owner",
    "swap_disks",
    "take_snapshot",
    "zeroed_page",
)
_ALWAYS_POSSIBLE: Final = (
    "change_replicas",
    "crash_server_at",
    "cut_link",
    "kill_server",
    "kill_storage",
    "move_partition",
    "power_loss",
    "restart_loop",
    "take_snapshot",
)
assert KINDS.keys() >= {*THEMES, *_ALWAYS_POSSIBLE}


def rough_schedule_of(seed: int) -> Schedule:
    """Draw a rough schedule from a seed (rule 4)."""
    rng = random_of_number(seed ^ 0x20064)
    theme = rng.sample(THEMES, rng.randint(3, 6))
    weights = {kind: rng.choice((16, 30)) if kind in theme else 3 for kind in WEIGHTS}
    allowed_kinds = None if rng.random() < 0.5 else {*theme, *_ALWAYS_POSSIBLE}
    schedule = schedule_of(seed, weights, allowed_kinds=allowed_kinds)
    if rng.random() < 0.6:
        schedule = schedule.with_setup(segment_bytes_max=rng.choice((600, 1_200, 2_048)))
    if rng.random() < 0.3:
        schedule = schedule.with_setup(replicas=5)
    if rng.random() < 0.3:
        schedule = schedule.with_setup(checkpoint_interval_count=rng.choice((10, 30)))
    return schedule
