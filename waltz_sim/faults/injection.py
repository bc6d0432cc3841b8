"""Helpers for faults: they choose the victim, and count the faults that occur.

All kinds of faults are built from these helpers.

Rules:
    1. A fault depends only on its own random numbers (`schedule.py`, rule 1) and on the state of
       the cluster.
    2. A fault is counted when it occurs, not when it is planned. So a batch of runs in which a
       kind of fault never occurred can be rejected.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.cluster.simulated_storages import SimStorage
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from random import Random

# A function that injects a fault or plans it; it returns whether the fault has occurred (rule 2).
InjectFault = Callable[[SimCluster, "Random"], bool]


def choose_storage(cluster: SimCluster, rng: "Random") -> SimStorage:
    """Choose a storage: mostly one of the assigned storages, sometimes any storage."""
    if rng.random() < 0.9:
        return cluster.storages[rng.choice(cluster.coordinator.assignment.replicas)]
    return rng.choice(list(cluster.storages.values()))


def choose_pause_ms(rng: "Random") -> int:
    """Choose the duration in ms of a process's pause."""
    return rng.choice((5, 50, 500, 3_000))


def pause(cluster: SimCluster, process: Process, rng: "Random") -> bool:
    """Pause a process for a while, as SIGSTOP does; return False if that is not possible."""
    if process.is_paused or not process.is_up:
        return False
    process.pause()
    cluster.world.call_after_us(choose_pause_ms(rng) * US_PER_MS, process.resume)
    return True


def count_callback(cluster: SimCluster, kind: str) -> Callable[[], None]:
    """Return the callback that a planned fault calls when it occurs (rule 2)."""
    return lambda: cluster.checks.count(f"fault {kind}")


def keep_down(cluster: SimCluster, process: Process, away_ms: int) -> None:
    """Start a killed process after `away_ms`, and not earlier."""
    cluster.kept_down[process.name] = None

    def start_again() -> None:
        cluster.kept_down.pop(process.name, None)
        process.start()

    cluster.world.call_after_us(away_ms * US_PER_MS, start_again)


def restore_trust_later(cluster: SimCluster, storage: SimStorage, *, after_ms: int) -> None:
    """Let an operator trust a disk again, after its storage has started without this trust."""

    def trust_disk_again() -> None:
        if storage.log is None:  # The storage has not opened its log with this setting yet.
            cluster.world.call_after_us(1_000 * US_PER_MS, trust_disk_again)
        else:
            storage.trusts_fsync = True

    cluster.world.call_after_us(after_ms * US_PER_MS, trust_disk_again)
