"""Faults of the object store, and of storages that upload to it.

The rules of `kinds.py` apply here. They strike only in worlds with an archive.
"""

from typing import TYPE_CHECKING

from waltz_sim.cluster.simulated_cluster import MS, SimCluster

if TYPE_CHECKING:
    from random import Random


def archive_away(cluster: SimCluster, rng: "Random") -> bool:
    """Make the object store unavailable."""
    archive = cluster.archive
    archive.is_away = True

    def recover() -> None:
        archive.is_away = False

    cluster.world.after(rng.randrange(10, 1_000) * MS, recover)
    return True


def archive_throttles(cluster: SimCluster, rng: "Random") -> bool:
    """Let the object store reject some requests."""
    archive = cluster.archive
    archive.throttled = rng.choice((0.1, 0.3))

    def recover() -> None:
        archive.throttled = 0.0

    cluster.world.after(rng.randrange(10, 1_000) * MS, recover)
    return True


def archive_loses_answers(cluster: SimCluster, rng: "Random") -> bool:
    """Lose answers of the object store; the writes may take effect, also much later."""
    archive = cluster.archive
    archive.lost_answers = rng.choice((0.2, 0.5, 0.8))

    def recover() -> None:
        archive.lost_answers = 0.0

    cluster.world.after(rng.randrange(100, 2_000) * MS, recover)
    return True


def slow_archive(cluster: SimCluster, rng: "Random") -> bool:
    """Delay all requests to the object store."""
    archive = cluster.archive
    archive.slow_us = rng.choice((20, 100, 400)) * MS

    def recover() -> None:
        archive.slow_us = 0

    cluster.world.after(rng.randrange(50, 1_500) * MS, recover)
    return True


def corrupt_object(cluster: SimCluster, rng: "Random") -> bool:
    """Change a file after it was written; or, for a while, each new file when it is written."""
    archive = cluster.archive
    if rng.random() < 0.5:
        archive.corrupting = 0.5

        def recover() -> None:
            archive.corrupting = 0.0

        cluster.world.after(rng.randrange(10, 300) * MS, recover)
        return True
    if not archive.files:
        return False
    archive.spoil(rng.choice(list(archive.files)))
    # Until then its readers wait, and the archive does not grow.
    cluster.world.after(rng.randrange(50, 1_000) * MS, archive.restore)
    return True


def kill_uploader(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage that uploads; its requests to the object store may still take effect."""
    uploading = [each for each in cluster.storages.values() if each.is_uploading]
    if not uploading:
        return False
    storage = rng.choice(uploading)
    storage.kill()
    cluster.restart_later(storage)
    return True
