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
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults.injection import choose_storage, count_callback, keep_down, pause
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
MARK_POLLS_MAX: Final = 100
COMMAND_RUNS_MAX: Final = 8


def archive_away(cluster: SimCluster, rng: "Random") -> bool:
    """Make the object store unavailable for a while."""
    archive = cluster.archive
    archive.is_unavailable = True

    def recover() -> None:
        archive.is_unavailable = False

    cluster.world.call_after_us(rng.randrange(10, 1_000) * US_PER_MS, recover)
    return True


def archive_throttles(cluster: SimCluster, rng: "Random") -> bool:
    """Let the object store reject some requests for a while."""
    archive = cluster.archive
    archive.rejected_share = rng.choice((0.1, 0.3))

    def recover() -> None:
        archive.rejected_share = 0.0

    cluster.world.call_after_us(rng.randrange(10, 1_000) * US_PER_MS, recover)
    return True


def archive_loses_answers(cluster: SimCluster, rng: "Random") -> bool:
    """Lose answers of the object store for a while; the writes may take effect, even much later."""
    archive = cluster.archive
    archive.lost_answer_share = rng.choice((0.2, 0.5, 0.8))

    def recover() -> None:
        archive.lost_answer_share = 0.0

    cluster.world.call_after_us(rng.randrange(100, 2_000) * US_PER_MS, recover)
    return True


def slow_archive(cluster: SimCluster, rng: "Random") -> bool:
    """Delay all requests to the object store for a while."""
    archive = cluster.archive
    archive.extra_delay_us = rng.choice((20, 100, 400)) * US_PER_MS

    def recover() -> None:
        archive.extra_delay_us = 0

    cluster.world.call_after_us(rng.randrange(50, 1_500) * US_PER_MS, recover)
    return True


def corrupt_object(cluster: SimCluster, rng: "Random") -> bool:
    """Change a stored file until its repair, or some new files when they are written."""
    archive = cluster.archive
    if rng.random() < 0.5:
        archive.corrupted_share = 0.5

        def recover() -> None:
            archive.corrupted_share = 0.0

        cluster.world.call_after_us(rng.randrange(10, 300) * US_PER_MS, recover)
        return True
    if not archive.files:
        return False
    archive.corrupt_file(rng.choice(list(archive.files)))
    # Until the repair, readers of the file wait, and the archive does not grow.
    cluster.world.call_after_us(rng.randrange(50, 1_000) * US_PER_MS, archive.restore_files)
    return True


def damage_objects(cluster: SimCluster, rng: "Random") -> bool:
    """Change or lose an archived object; later an operator runs `archive verify --repair`.

    In most cases a storage still has the records of the object.
    """
    archive = cluster.archive
    listed = [
        listed_object
        for listed_object in _listed_objects(cluster)
        if listed_object.name in archive.files
    ]
    logs = [storage.log for storage in cluster.storages.values() if storage.log is not None]
    start = min((log.start.transaction_id for log in logs), default=BEFORE_FIRST)
    held = [listed_object for listed_object in listed if listed_object.first > start]
    found = held if held and rng.random() < 0.8 else listed
    if not found:
        return False
    damage = rng.choice((archive.corrupt_file, archive.lose_file))
    damage(rng.choice(found).name)
    after_ms = rng.randrange(5, 300)
    cluster.world.call_after_us(after_ms * US_PER_MS, lambda: _repair_objects(cluster, REPAIRS_MAX))
    return True


def _repair_objects(cluster: SimCluster, tries_left: int) -> None:
    """Request the replacement of a damaged object repeatedly, until no object is damaged.

    An object may still be damaged after the last try, for example because no storage has its
    records. Then the files are restored from a copy of the archive.
    """
    archive = cluster.archive
    damaged = [
        listed_object
        for listed_object in _listed_objects(cluster)
        if archive.is_damaged(listed_object)
    ]
    if cluster.is_recovering or not damaged:
        return
    if not tries_left:
        archive.restore_files()
        return
    name, first, last, *_ = damaged[tries_left % len(damaged)]
    attempt = tries_left // REQUESTS_OF_AN_ATTEMPT
    _request(
        cluster,
        tries_left,
        lambda req_id: ObjectReplacementRequest(req_id, name, first, last, attempt),
    )
    cluster.world.call_after_us(20 * US_PER_MS, lambda: _repair_objects(cluster, tries_left - 1))


def _listed_objects(cluster: SimCluster) -> "list[ObjectEntry]":
    marker = cluster.coordinator.marker
    return cluster.archive.listed_objects(None if marker is None else marker.archived)


def _request(
    cluster: SimCluster, client_number: int, make_request: "Callable[[ReqId], ClientMessage]"
) -> None:
    """Send the request of a command on the connection of any client."""
    connected = [client for client in cluster.clients if client.is_up]
    if connected:
        connected[client_number % len(connected)].request(make_request)


def expire_objects(cluster: SimCluster, rng: "Random") -> bool:
    """Let archived objects expire; the command repeats its request several times."""
    assert cluster.checks.archive is not None
    if not cluster.setup.expires:
        return False
    before = TransactionId(rng.randrange(cluster.checks.history.last + 2))
    cluster.checks.archive.on_expiry_requested(before)
    _request_expiry(cluster, before, EXPIRY_REQUESTS_MAX)
    return True


def _request_expiry(cluster: SimCluster, before: TransactionId, tries_left: int) -> None:
    if cluster.is_recovering or not tries_left:
        return
    _request(cluster, tries_left, lambda req_id: ExpireRequest(req_id, before, 0))
    cluster.world.call_after_us(
        20 * US_PER_MS, lambda: _request_expiry(cluster, before, tries_left - 1)
    )


def expire_rows_in_doubt(cluster: SimCluster, rng: "Random") -> bool:
    """Let all archived objects expire while outcomes do not reach an owner and some clients."""
    if not cluster.setup.expires or not strand_owner(cluster, rng):
        return False
    for client in cluster.clients:
        if rng.random() < 0.5:
            for link in list(client.links.values()):
                cluster.network.break_link(link, "cut")
            pause(cluster, client, rng)
    _expire_all(cluster, EXPIRIES_MAX)
    return True


def _expire_all(cluster: SimCluster, tries_left: int) -> None:
    if cluster.is_recovering or not tries_left:
        return
    assert cluster.checks.archive is not None
    before = TransactionId(cluster.checks.history.last + 1)
    cluster.checks.archive.on_expiry_requested(before)
    _request_expiry(cluster, before, 1)
    cluster.world.call_after_us(50 * US_PER_MS, lambda: _expire_all(cluster, tries_left - 1))


def power_loss_at_removal(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power when a storage removes a file, or shortly after."""
    disk = choose_storage(cluster, rng).disk
    on_injected, steps = count_callback(cluster, "power_loss_at_removal"), rng.randint(1, 6)

    def plan_power_loss() -> None:
        disk.plan_fault(disk.step_count + steps, DiskFault.POWER_LOSS, on_injected)

    disk.plan_fault_at_call(("unlink",), None, plan_power_loss)
    return False


def crash_at_a_reset(cluster: SimCluster, rng: "Random") -> bool:
    """Kill the owner or a storage when a log is reset, or shortly after."""
    on_injected, is_after = count_callback(cluster, "crash_at_a_reset"), rng.random() < 0.6
    owner = cluster.owner
    if owner is not None and rng.random() < 0.7:
        owner.planned_death = (rng.choice(("ResetLog", "ReplicaEnd")), is_after, on_injected)
    else:
        choose_storage(cluster, rng).planned_death = ("ResetLog", is_after, on_injected)
    return False


def lose_a_reset_replica(cluster: SimCluster, rng: "Random") -> bool:
    """Lose a replica's segments; after its reset, stop the other replicas of its last quorum.

    The replicas outside of this quorum lack the newest appends. If the log of the reset replica
    counted, the next session would decide without these appends.
    """
    owner, replicas = cluster.owner, [cluster.storages[replica] for replica in cluster.replicas]
    marker = cluster.coordinator.marker
    if owner is None or marker is None or marker.archived is None or len(replicas) < 3:
        return False
    rng.shuffle(replicas)
    quorum = quorum_size(len(replicas))
    (victim, *holders), lagging = replicas[:quorum], replicas[quorum:]
    directions = [(owner.name, each.name) for each in lagging]
    directions += [(each.name, owner.name) for each in lagging]

    def stop_last_quorum() -> None:
        cluster.checks.count("last quorum of a reset replica stopped")
        for server in cluster.servers:
            cluster.kill(server)
        for holder in holders:
            holder.kill()
            keep_down(cluster, holder, 2_000)

    def remove_segments() -> None:
        cluster.network.unblock(directions)
        if not cluster.is_recovering and victim.is_up and cluster.budget.may_lose_data(victim):
            cluster.checks.count("fault lose_a_reset_replica")
            victim.kill()
            cluster.budget.record_loss(victim)
            for path in [file for file in victim.disk.files() if file.suffix in SEGMENT_SUFFIXES]:
                victim.disk.remove(path)
            victim.start()
            victim.planned_death = ("ResetLog", True, stop_last_quorum)

    for direction in directions:
        cluster.network.block(*direction)
    cluster.world.call_after_us(rng.randrange(5, 60) * US_PER_MS, remove_segments)
    return False


def lose_marks(cluster: SimCluster, rng: "Random") -> bool:
    """Roll ZooKeeper back to an older archived mark of the same session, if there is one."""
    is_recent = rng.random() < 0.7

    def try_to_lose_marks(tries_left: int) -> None:
        if cluster.is_recovering or not tries_left:
            return
        if _lose_marks(cluster, rng, is_recent=is_recent):
            cluster.checks.count("fault lose_marks")
        else:
            cluster.world.call_after_us(10 * US_PER_MS, lambda: try_to_lose_marks(tries_left - 1))

    if may_rewrite(cluster):
        try_to_lose_marks(MARK_POLLS_MAX)
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
    coordinator.replace_nodes(*(older[-1] if is_recent else rng.choice(older)))
    return True


def accept_a_shorter_log(cluster: SimCluster, rng: "Random") -> bool:
    """Accept, by mistake, a replica's log that ends below the archived mark.

    The log lacks acknowledged transactions, so no session may open with it. Often all servers
    restart as well, so that no server has the former mark in memory.
    """
    replicas = list(cluster.replicas)
    if not _may_accept_less(cluster):
        return False
    rng.shuffle(replicas)
    behind, *others = (cluster.storages[replica] for replica in replicas)
    at_ms, restarts = rng.randrange(100, 500), rng.random() < 0.6
    cluster.kept_down[behind.name] = None
    behind.kill()

    def accept() -> None:
        if cluster.is_recovering:
            return
        for other in others:
            other.kill()
            keep_down(cluster, other, 2_000)
        if restarts:
            for server in cluster.servers:
                cluster.kill(server)
        cluster.kept_down.pop(behind.name, None)
        behind.start()
        cluster.checks.count("fault accept_a_shorter_log")
        cluster.world.call_after_us(
            20 * US_PER_MS, lambda: _accept(cluster, behind.replica, COMMAND_RUNS_MAX)
        )

    cluster.world.call_after_us(at_ms * US_PER_MS, accept)
    return False


def _accept(cluster: SimCluster, replica: "ReplicaId", tries_left: int) -> None:
    """Run the command; run it again if it dies because a server claims a session meanwhile."""

    def on_decision(decision: RebuildDecision | None) -> None:
        if decision is None and tries_left > 1:
            cluster.world.call_after_us(
                20 * US_PER_MS, lambda: _accept(cluster, replica, tries_left - 1)
            )

    if not cluster.is_recovering:
        DisasterRecovery(cluster, on_decision, accepted=replica, may_lose_archived=True)


def _may_accept_less(cluster: SimCluster) -> bool:
    metadata, replicas = cluster.coordinator.metadata, cluster.replicas
    held = {} if metadata is None else metadata.states
    is_bounded = not cluster.setup.is_unbounded or cluster.coordinator.is_rewritten
    return not (
        is_bounded or set(held) != set(replicas) or len(replicas) < 2 or cluster.swapped_disks
    )


def kill_uploader(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage that is uploading; its requests to the object store may still take effect."""
    uploading = [each for each in cluster.storages.values() if each.is_uploading]
    if not uploading:
        return False
    storage = rng.choice(uploading)
    storage.kill()
    cluster.restart_later(storage)
    return True
