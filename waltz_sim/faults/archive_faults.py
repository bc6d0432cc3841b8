"""Faults of the object store, and of storages that upload to it.

The rules of `kinds.py` apply here. They strike only in worlds with an archive.
"""

from typing import TYPE_CHECKING, Final

from waltz_core.cluster.change.rebuilding import RebuildDecision
from waltz_core.records.record import TransactionId
from waltz_core.wire.messages import ExpireRequest
from waltz_sim.cluster.rescue import Rescue
from waltz_sim.cluster.simulated_cluster import MS, SimCluster
from waltz_sim.faults.striking import any_storage, counted, keep_down
from waltz_sim.world.simulated_disk import DiskFault

if TYPE_CHECKING:
    from random import Random

EXPIRY_REQUESTS_MAX: Final = 10
COMMANDS_MAX: Final = 8


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


def expire_objects(cluster: SimCluster, rng: "Random") -> bool:
    """Let archived objects expire; the command repeats its request until it is carried out."""
    assert cluster.checks.archive is not None
    if not cluster.setup.expires:
        return False
    before = TransactionId(rng.randrange(cluster.checks.history.last + 2))
    cluster.checks.archive.requested(before)
    _request_expiry(cluster, before, EXPIRY_REQUESTS_MAX)
    return True


def _request_expiry(cluster: SimCluster, before: TransactionId, left: int) -> None:
    connected = [each for each in cluster.clients if each.is_up]
    if cluster.is_recovering or not left:
        return
    if connected:
        connected[left % len(connected)].request(lambda req_id: ExpireRequest(req_id, before, 0))
    cluster.world.after(20 * MS, lambda: _request_expiry(cluster, before, left - 1))


def power_loss_at_removal(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power while a storage removes a file, or shortly after."""
    disk = any_storage(cluster, rng).disk
    struck, steps = counted(cluster, "power_loss_at_removal"), rng.randint(1, 6)

    def removing() -> None:
        disk.plan(disk.step_count + steps, DiskFault.POWER_LOSS, struck)

    disk.plan_call(("unlink",), None, removing)
    return False


def crash_at_a_reset(cluster: SimCluster, rng: "Random") -> bool:
    """Kill the owner or a storage when a log is reset, or shortly after."""
    struck, is_after = counted(cluster, "crash_at_a_reset"), rng.random() < 0.6
    owner = cluster.owner
    if owner is not None and rng.random() < 0.7:
        owner.dies_at = (rng.choice(("ResetLog", "ReplicaEnd")), is_after, struck)
    else:
        any_storage(cluster, rng).dies_at = ("ResetLog", is_after, struck)
    return False


def accept_a_shorter_log(cluster: SimCluster, rng: "Random") -> bool:
    """Accept the log of a replica that ends below the archived mark, by mistake.

    Acknowledged transactions are missing from it, so no session may open with it.
    """
    metadata, replicas = cluster.coordinator.metadata, list(cluster.replicas)
    held = {} if metadata is None else metadata.states
    is_bounded = not cluster.setup.is_unbounded or cluster.coordinator.is_rewritten
    if is_bounded or set(held) != set(replicas) or len(replicas) < 2 or cluster.swapped:
        return False
    rng.shuffle(replicas)
    behind, *others = (cluster.storages[each] for each in replicas)
    at_ms = rng.randrange(100, 500)
    cluster.held_down[behind.name] = None
    behind.kill()

    def accept() -> None:
        if cluster.is_recovering:
            return
        for each in others:
            each.kill()
            keep_down(cluster, each, 2_000)
        cluster.held_down.pop(behind.name, None)
        behind.start()
        cluster.checks.count("fault accept_a_shorter_log")
        cluster.world.after(20 * MS, lambda: run(COMMANDS_MAX))

    def run(left: int) -> None:
        """Run the command; it dies if a server claims a session meanwhile."""

        def on_verdict(verdict: RebuildDecision | None) -> None:
            if verdict is None and left > 1:
                cluster.world.after(20 * MS, lambda: run(left - 1))

        if not cluster.is_recovering:
            Rescue(cluster, on_verdict, accepted=behind.replica, loses=True)

    cluster.world.after(at_ms * MS, accept)
    return False


def kill_uploader(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage that uploads; its requests to the object store may still take effect."""
    uploading = [each for each in cluster.storages.values() if each.is_uploading]
    if not uploading:
        return False
    storage = rng.choice(uploading)
    storage.kill()
    cluster.restart_later(storage)
    return True
