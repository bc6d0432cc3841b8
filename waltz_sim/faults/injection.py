"""Helpers for faults: select the victim, and count faults that strike.

All kinds of faults are built from these helpers.

Rules:
    1. A fault depends only on its own random numbers (`schedule.py`, rule 1) and on the state of
       the cluster.
    2. A fault is counted when it strikes, not when it is planned, so that a batch of runs in which
       a kind never struck can be rejected.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from waltz_sim.cluster.simulated_cluster import MS, SimCluster
from waltz_sim.cluster.simulated_storages import SimStorage
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from random import Random

# Injects the fault or schedules it; returns whether it has struck (rule 2).
InjectFault = Callable[[SimCluster, "Random"], bool]


def any_storage(cluster: SimCluster, rng: "Random") -> SimStorage:
    """Return any storage of the assignment, or sometimes a spare one."""
    if rng.random() < 0.9:
        return cluster.storages[rng.choice(cluster.coordinator.assignment.replicas)]
    return rng.choice(list(cluster.storages.values()))


def pause_ms(rng: "Random") -> int:
    """Return the duration of a process's pause."""
    return rng.choice((5, 50, 500, 3_000))


def pause(cluster: SimCluster, process: Process, rng: "Random") -> bool:
    """Pause a process temporarily (SIGSTOP)."""
    if process.is_paused or not process.is_up:
        return False
    process.pause()
    cluster.world.after(pause_ms(rng) * MS, process.resume)
    return True


def counted(cluster: SimCluster, kind: str) -> Callable[[], None]:
    """Return the callback that a planned fault calls when it strikes (rule 2)."""
    return lambda: cluster.checks.count(f"fault {kind}")


def keep_down(cluster: SimCluster, process: Process, away_ms: int) -> None:
    """Restart a killed process after a delay, and not earlier."""
    cluster.held_down[process.name] = None

    def back() -> None:
        cluster.held_down.pop(process.name, None)
        process.start()

    cluster.world.after(away_ms * MS, back)


def restore_trust_later(cluster: SimCluster, storage: SimStorage, *, after_ms: int) -> None:
    """Let an operator trust a lying disk again, after its storage has started with the setting."""

    def trust_again() -> None:
        if storage.log is None:  # It has not opened since with this setting.
            cluster.world.after(1_000 * MS, trust_again)
        else:
            storage.trusts_fsync = True

    cluster.world.after(after_ms * MS, trust_again)
