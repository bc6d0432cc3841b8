"""Faults of ZooKeeper, and actions of operators.

The rules of `kinds.py` apply here. Faults that destroy ZooKeeper's data occur only in worlds
without a budget.
"""

from typing import TYPE_CHECKING

from waltz_core.cluster.change.rebuilding import RebuildDecision
from waltz_core.replication import session_events
from waltz_sim.cluster.disaster_recovery import BEST_REPLICA, DEATH_STEPS, DisasterRecovery
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults.injection import choose_pause_ms, keep_down, restore_trust_later
from waltz_sim.world.simulated_disk import Survival

if TYPE_CHECKING:
    from random import Random

    from waltz_core.records.record import ReplicaId
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.cluster.simulated_storages import SimStorage


# ---- answers, sessions, watches


def lost_answers(cluster: SimCluster, rng: "Random") -> bool:
    """Lose some of ZooKeeper's answers for a while."""
    cluster.coordinator.lost_answer_share = 0.5

    def recover() -> None:
        cluster.coordinator.lost_answer_share = 0.0

    cluster.world.call_after_us(rng.randrange(10, 400) * US_PER_MS, recover)
    return True


def zookeeper_away(cluster: SimCluster, rng: "Random") -> bool:
    """Make ZooKeeper unavailable to all of its clients for a while."""
    cluster.coordinator.is_unavailable = True

    def recover() -> None:
        cluster.coordinator.is_unavailable = False

    cluster.world.call_after_us(rng.randrange(10, 1_500) * US_PER_MS, recover)
    return True


def zookeeper_restart(cluster: SimCluster, rng: "Random") -> bool:
    """Restart all ZooKeeper nodes; watches are set again, and some sessions expire."""
    cluster.coordinator.is_unavailable = True
    expired = [server for server in cluster.servers if rng.random() < 0.5]
    back_ms = rng.randrange(50, 1_500)
    cluster.world.call_after_us(back_ms * US_PER_MS, lambda: cluster.coordinator.restart(expired))
    return True


def expire_session(cluster: SimCluster, rng: "Random") -> bool:
    """Expire the ZooKeeper session of a live server."""
    server = rng.choice(cluster.servers)
    if not server.is_up or not cluster.coordinator.has_session.get(server.name):
        return False
    cluster.coordinator.expire(server)
    return True


def cut_off_server(cluster: SimCluster, rng: "Random") -> bool:
    """Cut a server off from ZooKeeper for a while; all its other links work."""
    server = rng.choice(cluster.servers)
    coordinator = cluster.coordinator
    coordinator.cut_off_servers[server.name] = None
    coordinator.watch_server(server)
    cluster.world.call_after_us(
        rng.randrange(50, 3_000) * US_PER_MS,
        lambda: coordinator.cut_off_servers.pop(server.name, None),
    )
    return True


def late_watches(cluster: SimCluster, rng: "Random") -> bool:
    """Delay the watches of the assignment for a while."""
    cluster.coordinator.watch_delay_ms_max = rng.choice((100, 1_000, 3_000))

    def recover() -> None:
        cluster.coordinator.watch_delay_ms_max = 20

    cluster.world.call_after_us(rng.randrange(100, 2_000) * US_PER_MS, recover)
    return True


def lost_watches(cluster: SimCluster, rng: "Random") -> bool:
    """Lose watches together with their connections for a while."""
    cluster.coordinator.lost_watch_share = 0.6

    def recover() -> None:
        cluster.coordinator.lost_watch_share = 0.0

    cluster.world.call_after_us(rng.randrange(100, 2_000) * US_PER_MS, recover)
    return True


def stale_reads(cluster: SimCluster, rng: "Random") -> bool:
    """Let ZooKeeper answer clients with old states for a while."""
    cluster.coordinator.stale_read_share = 0.7

    def recover() -> None:
        cluster.coordinator.stale_read_share = 0.0

    cluster.world.call_after_us(rng.randrange(100, 3_000) * US_PER_MS, recover)
    return True


# ---- a former owner that survives


def strand_owner(cluster: SimCluster, rng: "Random") -> bool:
    """Cut off the owner, some clients and a few replicas, while another server takes over.

    The owner loses ZooKeeper and most replicas. No component can notify the owner that its session
    has expired, that the partition has moved, or that it is fenced. The partition may return to the
    owner before the owner learns of the move. The owner's clients may leave it, and may be sent
    back to it.
    """
    coordinator, owner = cluster.coordinator, cluster.owner
    successors = _possible_successors(cluster)
    if owner is None or not successors:
        return False
    coordinator.cut_off_servers[owner.name] = None
    directions = _cut_replicas_off(cluster, owner, rng)
    leaving = list(cluster.clients)
    rng.shuffle(leaving)
    del leaving[rng.randint(1, max(1, len(leaving) - 1)) :]
    stale_reads = rng.choice((0.0, 0.6))
    successor = rng.choice(successors) if rng.random() < 0.4 else None

    def move_partition_away() -> None:
        if cluster.is_recovering or owner.name not in coordinator.cut_off_servers:
            return
        if successor is not None:
            coordinator.set_owner(successor)
        elif coordinator.has_session.get(owner.name):
            coordinator.expire(owner)
        coordinator.stale_read_share = max(stale_reads, coordinator.stale_read_share)
        for client in leaving:
            _break_links_repeatedly(cluster, client, rng.randrange(10, 300))

    def reconnect_to_replicas() -> None:
        cluster.network.unblock(directions)

    def reconnect_to_zookeeper() -> None:
        if (
            successor is not None
            and not cluster.is_recovering
            and coordinator.has_session.get(owner.name)
        ):
            coordinator.set_owner(owner.name)
        coordinator.cut_off_servers.pop(owner.name, None)
        coordinator.stale_read_share = 0.0

    cluster.world.call_after_us(rng.randrange(1, 40) * US_PER_MS, move_partition_away)
    cluster.world.call_after_us(rng.randrange(200, 3_000) * US_PER_MS, reconnect_to_replicas)
    cluster.world.call_after_us(rng.randrange(300, 3_000) * US_PER_MS, reconnect_to_zookeeper)
    return True


def _possible_successors(cluster: SimCluster) -> list[str]:
    """Return the servers that could take over from the owner; empty if no owner is serving."""
    coordinator, owner = cluster.coordinator, cluster.owner
    if owner is None or owner.is_paused or owner.name in coordinator.cut_off_servers:
        return []
    if owner.partition is None or not owner.partition.is_open:
        return []
    alive = [name for name, is_alive in coordinator.has_session.items() if is_alive]
    return [
        name for name in alive if name != owner.name and name not in coordinator.cut_off_servers
    ]


def _cut_replicas_off(
    cluster: SimCluster, owner: "SimServer", rng: "Random"
) -> list[tuple[str, str]]:
    """Let the owner reach only a minority of replicas, and others only the rest; or do nothing."""
    network, replicas = cluster.network, list(cluster.replicas)
    rng.shuffle(replicas)
    if rng.random() < 0.15:
        return []
    kept = set(replicas[: rng.randint(0, (len(replicas) - 1) // 2)])
    pairs = [
        (server.name, replica)
        for server in cluster.servers
        for replica in replicas
        if (server is owner) != (replica in kept)
    ]
    directions = [*pairs, *((replica, server) for server, replica in pairs)]
    for direction in directions:
        network.block(*direction)
    return directions


def _break_links_repeatedly(cluster: SimCluster, client: "SimClient", wait_ms: int) -> None:
    """Break a client's links repeatedly, while any server is cut off from ZooKeeper."""
    if cluster.is_recovering or not cluster.coordinator.cut_off_servers:
        return
    for link in list(client.links.values()):
        cluster.network.break_link(link, "cut")
    cluster.world.call_after_us(
        wait_ms * US_PER_MS, lambda: _break_links_repeatedly(cluster, client, 2 * wait_ms)
    )


# ---- ZooKeeper's data (data_loss_budget.py, rule 4)


def may_rewrite(cluster: SimCluster) -> bool:
    """Whether a fault may replace ZooKeeper's data now."""
    return cluster.setup.is_unbounded and not cluster.budget.lost_sessions


def roll_back_nodes(cluster: SimCluster, rng: "Random") -> bool:
    """Restore older data in the partition's nodes."""
    coordinator = cluster.coordinator
    if not may_rewrite(cluster) or not coordinator.past_nodes:
        return False
    coordinator.replace_nodes(*rng.choice(coordinator.past_nodes))
    return True


def delete_nodes(cluster: SimCluster, rng: "Random") -> bool:
    """Delete one of the partition's nodes, or both."""
    coordinator = cluster.coordinator
    if not may_rewrite(cluster) or coordinator.metadata is None:
        return False
    deleted = rng.choice(("metadata", "marker", "both"))
    metadata = coordinator.metadata if deleted == "marker" else None
    marker = coordinator.marker if deleted == "metadata" else None
    coordinator.replace_nodes(metadata, marker)
    return True


# ---- operators


def move_partition(cluster: SimCluster, rng: "Random") -> bool:
    """Assign the partition to any live server, perhaps to the same one."""
    coordinator = cluster.coordinator
    living = [name for name, is_alive in coordinator.has_session.items() if is_alive]
    if not living:
        return False
    coordinator.set_owner(rng.choice(living))
    return True


def duel(cluster: SimCluster, rng: "Random") -> bool:
    """Pause the owner or delay its watches, while the partition moves away and perhaps returns."""
    coordinator = cluster.coordinator
    owner = cluster.owner
    others = [
        name
        for name, is_alive in coordinator.has_session.items()
        if is_alive and owner is not None and name != owner.name
    ]
    if owner is None or owner.is_paused or not owner.is_up or not others:
        return False
    if rng.random() < 0.5:
        owner.pause()
        cluster.world.call_after_us(choose_pause_ms(rng) * US_PER_MS, owner.resume)
    else:
        coordinator.watch_delay_ms_max = 1_000
    coordinator.set_owner(rng.choice(others))

    def return_partition() -> None:
        coordinator.watch_delay_ms_max = 20
        if coordinator.has_session.get(owner.name) and rng.random() < 0.7:
            coordinator.set_owner(owner.name)

    cluster.world.call_after_us(rng.randrange(5, 600) * US_PER_MS, return_partition)
    return True


def change_replicas(cluster: SimCluster, rng: "Random") -> bool:
    """Add, remove or replace one replica."""
    coordinator = cluster.coordinator
    now = list(coordinator.assignment.replicas)
    held = {} if coordinator.metadata is None else coordinator.metadata.states
    if set(held) != set(now):
        return False  # There is only one change at a time.
    spare = [storage for storage in cluster.storages if storage not in now]
    roll = rng.random()
    if roll < 0.4 and len(now) > 2:
        now.remove(rng.choice(now))
    elif spare and len(now) >= 2:
        if roll > 0.8 and len(now) > 2:
            now.remove(rng.choice(now))
        now.append(rng.choice(spare))
    else:
        return False
    cluster.reassign(tuple(now))
    return True


def change_replicas_with_one_away(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage during a change of replicas, perhaps the one that joins or leaves."""
    if not change_replicas(cluster, rng):
        return False
    storage = rng.choice(list(cluster.storages.values()))
    cluster.kill(storage)
    return True


def checkpoint(cluster: SimCluster, rng: "Random") -> bool:
    """Request a new session under load, as at a checkpoint."""
    owner = cluster.owner
    if owner is None or owner.partition is None or not owner.partition.is_open or owner.is_paused:
        return False
    owner.step(session_events.Checkpoint())
    return True


def accept_replicas(cluster: SimCluster, rng: "Random") -> bool:
    """Accept a replica's log by a command, which may die after each step, and is then run again.

    Often the replica has lost its last records, and is suspect. Another replica lacks these
    records, and the replicas that have the records are down. Then a partial run of the command must
    not open the partition.
    """
    metadata, replicas = cluster.coordinator.metadata, list(cluster.replicas)
    held = {} if metadata is None else metadata.states
    if set(held) != set(replicas) or len(replicas) < 2 or cluster.swapped_disks:
        return False
    rng.shuffle(replicas)
    accepted, behind, *others = (cluster.storages[replica] for replica in replicas)
    at_ms = rng.randrange(50, 300)
    if others and rng.random() < 0.6 and accepted.is_up and not accepted.disk.has_fault:
        accepted.disk.is_lying = True
        behind.kill()
        keep_down(cluster, behind, at_ms)
        cluster.world.call_after_us(
            (at_ms + 20) * US_PER_MS, lambda: _lose_log_end(cluster, accepted, others)
        )
        _accept_later(cluster, accepted.replica, rng, at_ms + 30)
    else:
        _accept_later(cluster, BEST_REPLICA, rng, at_ms)
    return False


def _accept_later(cluster: SimCluster, accepted: "ReplicaId", rng: "Random", after_ms: int) -> None:
    """Run the command when the replica is reachable; if the command dies, perhaps run it again."""
    dies_after = rng.choice(("", "", *DEATH_STEPS))
    again_ms = rng.choice((None, 200, 1_500))

    def on_decision(decision: RebuildDecision | None) -> None:
        cluster.checks.count("fault accept_replicas")
        cluster.checks.count(
            "disaster recovery interrupted" if decision is None else "disaster recovery done"
        )
        if decision is None and again_ms is not None:
            cluster.world.call_after_us(again_ms * US_PER_MS, rerun_command)

    def rerun_command() -> None:
        if not cluster.is_recovering:
            DisasterRecovery(cluster, lambda _: None, accepted=accepted)

    def run(tries_left: int = 20) -> None:
        if tries_left and accepted != BEST_REPLICA and cluster.storages[accepted].log is None:
            cluster.world.call_after_us(50 * US_PER_MS, lambda: run(tries_left - 1))
        elif not cluster.is_recovering:
            DisasterRecovery(cluster, on_decision, accepted=accepted, dies_after=dies_after)

    cluster.world.call_after_us(after_ms * US_PER_MS, run)


def _lose_log_end(cluster: SimCluster, victim: "SimStorage", others: "list[SimStorage]") -> None:
    """Lose the unsynced data of a lying disk, and stop the replicas that have this data."""
    if not victim.disk.is_lying:
        return
    if victim.is_up and not cluster.is_recovering and cluster.budget.may_lose_data(victim):
        cluster.budget.record_loss(victim)
        for other in others:
            other.kill()
            keep_down(cluster, other, 2_000)
        victim.trusts_fsync = False
        victim.lose_power(Survival.NOTHING, loses_ignored_syncs=True)
        restore_trust_later(cluster, victim, after_ms=1_000)
    victim.disk.stop_lying()
