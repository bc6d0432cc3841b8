"""Whom a fault strikes, and when it counts.

Every kind of fault is written in the same few words.

Rules:
    1. A fault is decided by its own chance alone (`schedule.py`, rule 1), and by what is there.
    2. It counts when it has struck, not when it was planned, so that a batch of runs in which a
       kind never struck can be refused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from waltz_sim.cluster.simulated_cluster import MS, SimCluster
from waltz_sim.cluster.simulated_storages import SimStorage
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from random import Random

# Does the thing, or plans it; returns whether it has struck (rule 2).
Strike = Callable[[SimCluster, "Random"], bool]


def any_storage(cluster: SimCluster, rng: "Random") -> SimStorage:
    """Return any storage of the assignment, or sometimes a spare one."""
    if rng.random() < 0.9:
        return cluster.storages[rng.choice(cluster.coordinator.assignment.replicas)]
    return rng.choice(list(cluster.storages.values()))


def pause_ms(rng: "Random") -> int:
    """Return how long a process stands still."""
    return rng.choice((5, 50, 500, 3_000))


def pause(cluster: SimCluster, process: Process, rng: "Random") -> bool:
    """Let a process stand still for a while (SIGSTOP)."""
    if process.is_paused or not process.is_up:
        return False
    process.pause()
    cluster.world.after(pause_ms(rng) * MS, process.resume)
    return True


def counted(cluster: SimCluster, kind: str) -> Callable[[], None]:
    """Return what a fault that was planned calls when it strikes (rule 2)."""
    return lambda: cluster.checks.count(f"fault {kind}")


def keep_down(cluster: SimCluster, process: Process, away_ms: int) -> None:
    """Start a process that was killed again after a while, and not before."""
    cluster.held_down[process.name] = None

    def back() -> None:
        cluster.held_down.pop(process.name, None)
        process.start()

    cluster.world.after(away_ms * MS, back)


def trust_again_later(cluster: SimCluster, storage: SimStorage, *, after_ms: int) -> None:
    """Have an operator forget that a disk has lied, once its storage has started with that."""

    def trust_again() -> None:
        if storage.log is None:  # It has not been opened since, with this in its settings.
            cluster.world.after(1_000 * MS, trust_again)
        else:
            storage.trusts_fsync = True

    cluster.world.after(after_ms * MS, trust_again)
