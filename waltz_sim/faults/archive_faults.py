"""Faults of the object store, and of storages that upload to it.

The rules of `kinds.py` apply here. These faults occur only in worlds with an archive. If a fault
changes ZooKeeper's data, rule 4 of `data_loss_budget.py` applies.
"""

from typing import TYPE_CHECKING, Final

from waltz_core.cluster.change.rebuilding import RebuildDecision
from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.replication.quorum import quorum_size
from waltz_core.wire.messages import ExpireRequest, ObjectReplacementRequest
from waltz_sim.cluster.disaster_recovery import DisasterRecovery
from waltz_sim.cluster.simulated_cluster import MS, SimCluster
from waltz_sim.faults.injection import any_storage, counted, keep_down, pause
from waltz_sim.faults.zookeeper_faults import may_rewrite, strand_owner
from waltz_sim.world.simulated_disk import DiskFault

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from waltz_core.archive.manifest import ObjectEntry
    from waltz_core.records.record import ReplicaId, ReqId
    from waltz_core.wire.messages import ClientMessage

SEGMENT_SUFFIXES: Final = (".seg", ".idx", ".chn")
EXPIRY_REQUESTS_MAX: Final = 10
EXPIRIES_MAX: Final = 60
REPAIRS_MAX: Final = 60
REQUESTS_OF_AN_ATTEMPT: Final = 5
MARKS_WAITED_MAX: Final = 100
COMMANDS_MAX: Final = 8


def archive_away(cluster: SimCluster, rng: "Random") -> bool:
    """Make the object store unavailable for a while."""
    archive = cluster.archive
    archive.is_away = True

    def recover() -> None:
        archive.is_away = False

    cluster.world.after(rng.randrange(10, 1_000) * MS, recover)
    return True


def archive_throttles(cluster: SimCluster, rng: "Random") -> bool:
    """Let the object store reject some requests for a while."""
    archive = cluster.archive
    archive.throttled = rng.choice((0.1, 0.3))

    def recover() -> None:
        archive.throttled = 0.0

    cluster.world.after(rng.randrange(10, 1_000) * MS, recover)
    return True


def archive_loses_answers(cluster: SimCluster, rng: "Random") -> bool:
    """Lose answers of the object store for a while; the writes may take effect, even much later."""
    archive = cluster.archive
    archive.lost_answers = rng.choice((0.2, 0.5, 0.8))

    def recover() -> None:
        archive.lost_answers = 0.0

    cluster.world.after(rng.randrange(100, 2_000) * MS, recover)
    return True


def slow_archive(cluster: SimCluster, rng: "Random") -> bool:
    """Delay all requests to the object store for a while."""
    archive = cluster.archive
    archive.slow_us = rng.choice((20, 100, 400)) * MS

    def recover() -> None:
        archive.slow_us = 0

    cluster.world.after(rng.randrange(50, 1_500) * MS, recover)
    return True


def corrupt_object(cluster: SimCluster, rng: "Random") -> bool:
    """Change a stored file until its repair, or some new files when they are written."""
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
    # Until the repair, readers of the file wait, and the archive does not grow.
    cluster.world.after(rng.randrange(50, 1_000) * MS, archive.restore)
    return True


def damage_objects(cluster: SimCluster, rng: "Random") -> bool:
    """Change or lose an archived object; later an operator runs `archive verify --repair`.

    In most cases a storage still has the records of the object.
    """
    archive = cluster.archive
    listed = [each for each in _listed(cluster) if each.name in archive.files]
    logs = [each.log for each in cluster.storages.values() if each.log is not None]
    start = min((each.start.transaction_id for each in logs), default=BEFORE_FIRST)
    held = [each for each in listed if each.first > start]
    found = held if held and rng.random() < 0.8 else listed
    if not found:
        return False
    damage = rng.choice((archive.spoil, archive.lose))
    damage(rng.choice(found).name)
    after_ms = rng.randrange(5, 300)
    cluster.world.after(after_ms * MS, lambda: _repair_objects(cluster, REPAIRS_MAX))
    return True


def _repair_objects(cluster: SimCluster, left: int) -> None:
    """Request the replacement of a damaged object repeatedly, until no object is damaged.

    If no storage has the records, the files are at last restored from a copy of the archive.
    """
    archive = cluster.archive
    damaged = [each for each in _listed(cluster) if archive.is_damaged(each)]
    if cluster.is_recovering or not damaged:
        return
    if not left:
        archive.restore()
        return
    name, first, last, *_ = damaged[left % len(damaged)]
    attempt = left // REQUESTS_OF_AN_ATTEMPT
    _request(
        cluster, left, lambda req_id: ObjectReplacementRequest(req_id, name, first, last, attempt)
    )
    cluster.world.after(20 * MS, lambda: _repair_objects(cluster, left - 1))


def _listed(cluster: SimCluster) -> "list[ObjectEntry]":
    marker = cluster.coordinator.marker
    return cluster.archive.listed(None if marker is None else marker.archived)


def _request(cluster: SimCluster, turn: int, make: "Callable[[ReqId], ClientMessage]") -> None:
    """Send the request of a command on the connection of any client."""
    connected = [each for each in cluster.clients if each.is_up]
    if connected:
        connected[turn % len(connected)].request(make)


def expire_objects(cluster: SimCluster, rng: "Random") -> bool:
    """Let archived objects expire; the command repeats its request several times."""
    assert cluster.checks.archive is not None
    if not cluster.setup.expires:
        return False
    before = TransactionId(rng.randrange(cluster.checks.history.last + 2))
    cluster.checks.archive.requested(before)
    _request_expiry(cluster, before, EXPIRY_REQUESTS_MAX)
    return True


def _request_expiry(cluster: SimCluster, before: TransactionId, left: int) -> None:
    if cluster.is_recovering or not left:
        return
    _request(cluster, left, lambda req_id: ExpireRequest(req_id, before, 0))
    cluster.world.after(20 * MS, lambda: _request_expiry(cluster, before, left - 1))


def expire_rows_in_doubt(cluster: SimCluster, rng: "Random") -> bool:
    """Let all archived objects expire while an owner and some clients do not learn outcomes."""
    if not cluster.setup.expires or not strand_owner(cluster, rng):
        return False
    for client in cluster.clients:
        if rng.random() < 0.5:
            for link in list(client.links.values()):
                cluster.network.break_link(link, "cut")
            pause(cluster, client, rng)
    _expire_all(cluster, EXPIRIES_MAX)
    return True


def _expire_all(cluster: SimCluster, left: int) -> None:
    if cluster.is_recovering or not left:
        return
    assert cluster.checks.archive is not None
    before = TransactionId(cluster.checks.history.last + 1)
    cluster.checks.archive.requested(before)
    _request_expiry(cluster, before, 1)
    cluster.world.after(50 * MS, lambda: _expire_all(cluster, left - 1))


def power_loss_at_removal(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power when a storage removes a file, or shortly after."""
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


def lose_a_reset_replica(cluster: SimCluster, rng: "Random") -> bool:
    """Lose the segments of a replica; after its reset, stop the rest of its last quorum.

    The other replicas lack the newest appends. If the log of the reset replica counted, the next
    session would decide without these appends.
    """
    owner, replicas = cluster.owner, [cluster.storages[each] for each in cluster.replicas]
    marker = cluster.coordinator.marker
    if owner is None or marker is None or marker.archived is None or len(replicas) < 3:
        return False
    rng.shuffle(replicas)
    quorum = quorum_size(len(replicas))
    (victim, *holders), lagging = replicas[:quorum], replicas[quorum:]
    ways = [(owner.name, each.name) for each in lagging]
    ways += [(each.name, owner.name) for each in lagging]

    def die() -> None:
        cluster.checks.count("quorum of a reset replica away")
        for server in cluster.servers:
            cluster.kill(server)
        for each in holders:
            each.kill()
            keep_down(cluster, each, 2_000)

    def empty() -> None:
        cluster.network.unblock(ways)
        if not cluster.is_recovering and victim.is_up and cluster.budget.allows(victim):
            cluster.checks.count("fault lose_a_reset_replica")
            victim.kill()
            cluster.budget.spend(victim)
            for path in [each for each in victim.disk.files() if each.suffix in SEGMENT_SUFFIXES]:
                victim.disk.remove(path)
            victim.start()
            victim.dies_at = ("ResetLog", True, die)

    for way in ways:
        cluster.network.block(*way)
    cluster.world.after(rng.randrange(5, 60) * MS, empty)
    return False


def lose_marks(cluster: SimCluster, rng: "Random") -> bool:
    """Restore ZooKeeper's data from before a session's last archived marks, if it has any."""
    is_recent = rng.random() < 0.7

    def strike(left: int) -> None:
        if cluster.is_recovering or not left:
            return
        if _lose_marks(cluster, rng, is_recent=is_recent):
            cluster.checks.count("fault lose_marks")
        else:
            cluster.world.after(10 * MS, lambda: strike(left - 1))

    if may_rewrite(cluster):
        strike(MARKS_WAITED_MAX)
    return False


def _lose_marks(cluster: SimCluster, rng: "Random", *, is_recent: bool) -> bool:
    coordinator = cluster.coordinator
    now, marker = coordinator.metadata, coordinator.marker
    if not may_rewrite(cluster) or marker is None:
        return False
    older = [
        (metadata, past)
        for metadata, past in coordinator.past_nodes
        if metadata == now and past is not None and past.archived != marker.archived
    ]
    if not older:
        return False
    coordinator.put_back(*(older[-1] if is_recent else rng.choice(older)))
    return True


def accept_a_shorter_log(cluster: SimCluster, rng: "Random") -> bool:
    """Accept the log of a replica that ends below the archived mark, by mistake.

    The log lacks acknowledged transactions, so no session may open with it. Often all servers
    restart as well, so that no server has the former mark in memory.
    """
    replicas = list(cluster.replicas)
    if not _may_accept_less(cluster):
        return False
    rng.shuffle(replicas)
    behind, *others = (cluster.storages[each] for each in replicas)
    at_ms, restarts = rng.randrange(100, 500), rng.random() < 0.6
    cluster.held_down[behind.name] = None
    behind.kill()

    def accept() -> None:
        if cluster.is_recovering:
            return
        for each in others:
            each.kill()
            keep_down(cluster, each, 2_000)
        if restarts:
            for server in cluster.servers:
                cluster.kill(server)
        cluster.held_down.pop(behind.name, None)
        behind.start()
        cluster.checks.count("fault accept_a_shorter_log")
        cluster.world.after(20 * MS, lambda: _accept(cluster, behind.replica, COMMANDS_MAX))

    cluster.world.after(at_ms * MS, accept)
    return False


def _accept(cluster: SimCluster, replica: "ReplicaId", left: int) -> None:
    """Run the command; run it again if it dies because a server claims a session meanwhile."""

    def on_verdict(verdict: RebuildDecision | None) -> None:
        if verdict is None and left > 1:
            cluster.world.after(20 * MS, lambda: _accept(cluster, replica, left - 1))

    if not cluster.is_recovering:
        DisasterRecovery(cluster, on_verdict, accepted=replica, loses=True)


def _may_accept_less(cluster: SimCluster) -> bool:
    metadata, replicas = cluster.coordinator.metadata, cluster.replicas
    held = {} if metadata is None else metadata.states
    is_bounded = not cluster.setup.is_unbounded or cluster.coordinator.is_rewritten
    return not (is_bounded or set(held) != set(replicas) or len(replicas) < 2 or cluster.swapped)


def kill_uploader(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage that is uploading; its requests to the object store may still take effect."""
    uploading = [each for each in cluster.storages.values() if each.is_uploading]
    if not uploading:
        return False
    storage = rng.choice(uploading)
    storage.kill()
    cluster.restart_later(storage)
    return True
