"""All that goes wrong: one function for each kind of fault.

Why it stands alone: a fault that is not listed here is not simulated. `WEIGHTS` is the list.

Rules:
    1. A fault is decided by its own chance alone (`schedule.py`, rule 1), and by what is there.
    2. The budget: at most one replica at a time may have lost what it had promised to keep (disk
       taken back, rotten, lost), and only while all others can be believed. More than that no
       quorum survives, and nothing is promised for it.
    3. A kind of fault that fired is counted, so that a run in which it never does can be refused.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from waltz_core.cluster.model import UNRESOLVED
from waltz_core.record import ReplicaId
from waltz_core.replication import events
from waltz_core.sim.cluster import MS, SimCluster
from waltz_core.sim.disk import Fault as DiskFault
from waltz_core.sim.disk import Survival
from waltz_core.sim.process import Process
from waltz_core.sim.schedule import Fault, Schedule
from waltz_core.sim.storages import SimStorage
from waltz_core.sim.world import chance_of

if TYPE_CHECKING:
    from random import Random

Strike = Callable[[SimCluster, "Random"], bool]


def plan(cluster: SimCluster, schedule: Schedule) -> None:
    """Let the faults of a schedule happen, each in its time."""
    for fault in schedule.faults:
        cluster.world.after(fault.at_us, _action(cluster, fault))


def _action(cluster: SimCluster, fault: Fault) -> Callable[[], None]:
    def strike() -> None:
        if cluster.is_healing:
            return
        rng = chance_of(fault.chance)
        cluster.world.note(f"fault {fault.kind}")
        if KINDS[fault.kind](cluster, rng):
            cluster.checks.count(f"fault {fault.kind}")

    return strike


def _pause_ms(rng: "Random") -> int:
    return rng.choice((5, 50, 500, 3_000))


def _storage(cluster: SimCluster, rng: "Random") -> SimStorage:
    """Return any storage of the assignment, or sometimes a spare one."""
    if rng.random() < 0.9:
        return cluster.storages[rng.choice(cluster.coordinator.assignment.replicas)]
    return rng.choice(list(cluster.storages.values()))


# ---- processes


def kill_storage(cluster: SimCluster, rng: "Random") -> bool:
    """`kill -9` of a storage, which its supervisor starts again."""
    storage = _storage(cluster, rng)
    if not storage.is_up:
        return False
    storage.kill(is_silent=rng.random() < 0.1)
    cluster.restart_later(storage)
    return True


def storage_away(cluster: SimCluster, rng: "Random") -> bool:
    """A storage is gone for long."""
    storage = _storage(cluster, rng)
    if not storage.is_up:
        return False
    cluster.held_down[storage.name] = None
    storage.kill(is_silent=rng.random() < 0.5)

    def back() -> None:
        cluster.held_down.pop(storage.name, None)
        storage.start()

    cluster.world.after(rng.randrange(500, 4_000) * MS, back)
    return True


def power_loss(cluster: SimCluster, rng: "Random") -> bool:
    """One machine loses its power, and what was not synced."""
    storage = _storage(cluster, rng)
    if not storage.is_up:
        return False
    storage.lose_power(rng.choice(list(Survival)))
    return True


def power_loss_at_a_step(cluster: SimCluster, rng: "Random") -> bool:
    """The power goes in the middle of a piece of work."""
    storage = _storage(cluster, rng)
    if not storage.is_up:
        return False
    disk = storage.disk
    disk.plan(disk.step_count + rng.randint(1, 12), DiskFault.POWER_LOSS)
    return True


def all_power(cluster: SimCluster, rng: "Random") -> bool:
    """The room is dark."""
    for storage in cluster.storages.values():
        if storage.is_up:
            storage.lose_power(rng.choice(list(Survival)))
    return True


def pause_storage(cluster: SimCluster, rng: "Random") -> bool:
    """A storage stands still (SIGSTOP)."""
    return _pause(cluster, _storage(cluster, rng), rng)


def pause_server(cluster: SimCluster, rng: "Random") -> bool:
    """A server stands still, maybe for longer than its session lives."""
    server = rng.choice(cluster.servers)
    if not _pause(cluster, server, rng):
        return False
    cluster.coordinator.watch_server(server)
    return True


def _pause(cluster: SimCluster, process: Process, rng: "Random") -> bool:
    if process.is_paused or not process.is_up:
        return False
    process.pause()
    cluster.world.after(_pause_ms(rng) * MS, process.resume)
    return True


def kill_server(cluster: SimCluster, rng: "Random") -> bool:
    """`kill -9` of a server."""
    server = rng.choice(cluster.servers)
    if not server.is_up:
        return False
    server.kill(is_silent=rng.random() < 0.2)
    cluster.restart_later(server)
    return True


def slow_server(cluster: SimCluster, rng: "Random") -> bool:
    """A server takes long for everything."""
    server = rng.choice(cluster.servers)
    server.slow_us = rng.choice((50, 500, 3_000))

    def recover() -> None:
        server.slow_us = 0

    cluster.world.after(rng.randrange(50, 1_000) * MS, recover)
    return True


def kill_client(cluster: SimCluster, rng: "Random") -> bool:
    """A client dies with appends under way, and comes back as another one."""
    client = rng.choice(cluster.clients)
    if not client.is_up:
        return False
    client.kill(is_silent=rng.random() < 0.3)
    cluster.workload.drop(client)

    def back() -> None:
        if not client.is_up:
            cluster.start_client(client)

    cluster.world.after(rng.randrange(1, 500) * MS, back)
    return True


def pause_client(cluster: SimCluster, rng: "Random") -> bool:
    """A client stands still."""
    return _pause(cluster, rng.choice(cluster.clients), rng)


# ---- network


def cut_link(cluster: SimCluster, rng: "Random") -> bool:
    """One link breaks."""
    links = list(cluster.network.links.values())
    if not links:
        return False
    cluster.network.break_link(rng.choice(links), "cut")
    return True


def mute_link(cluster: SimCluster, rng: "Random") -> bool:
    """One link lets nothing through, and nobody is told."""
    links = list(cluster.network.links.values())
    if not links:
        return False
    cluster.network.mute(rng.choice(links))
    return True


def partition_network(cluster: SimCluster, rng: "Random") -> bool:
    """Some machines do not hear some others, maybe in one direction only."""
    names = [each.name for each in cluster.processes]
    side = {name for name in names if rng.random() < 0.4}
    is_one_way = rng.random() < 0.4
    network = cluster.network
    for one in names:
        for other in names:
            if (one in side) and (other not in side):
                network.block(one, other)
                if not is_one_way:
                    network.block(other, one)
    cluster.world.after(rng.randrange(10, 1_500) * MS, network.blocked.clear)
    return True


def slow_network(cluster: SimCluster, rng: "Random") -> bool:
    """Everything takes longer on the wire."""
    cluster.network.slow_us = rng.choice((1_000, 10_000, 60_000))

    def recover() -> None:
        cluster.network.slow_us = 0

    cluster.world.after(rng.randrange(20, 500) * MS, recover)
    return True


# ---- disks


def failing_disk(cluster: SimCluster, rng: "Random") -> bool:
    """A write or a sync fails, once."""
    storage = _storage(cluster, rng)
    disk = storage.disk
    disk.plan(disk.step_count + rng.randint(1, 12), DiskFault.FAILS)
    return True


def full_disk(cluster: SimCluster, rng: "Random") -> bool:
    """A disk has no room for a while."""
    storage = _storage(cluster, rng)
    used = sum(len(content) for content in storage.disk.files().values())
    storage.disk.capacity_bytes = used + rng.choice((0, 100, 2_000))

    def empty() -> None:
        storage.disk.capacity_bytes = None

    cluster.world.after(rng.randrange(100, 2_000) * MS, empty)
    return True


def slow_disk(cluster: SimCluster, rng: "Random") -> bool:
    """A disk syncs at another pace."""
    _storage(cluster, rng).fsync_us = rng.choice((100, 500, 5_000, 100_000))
    return True


# ---- ZooKeeper


def lost_answers(cluster: SimCluster, rng: "Random") -> bool:
    """ZooKeeper's answers get lost for a while."""
    cluster.coordinator.lost_answers = 0.5

    def recover() -> None:
        cluster.coordinator.lost_answers = 0.0

    cluster.world.after(rng.randrange(10, 400) * MS, recover)
    return True


def zookeeper_away(cluster: SimCluster, rng: "Random") -> bool:
    """ZooKeeper answers nobody."""
    cluster.coordinator.is_away = True

    def recover() -> None:
        cluster.coordinator.is_away = False

    cluster.world.after(rng.randrange(10, 1_500) * MS, recover)
    return True


def expire_session(cluster: SimCluster, rng: "Random") -> bool:
    """A server's session ends though it lives."""
    server = rng.choice(cluster.servers)
    if not server.is_up or not cluster.coordinator.alive.get(server.name):
        return False
    cluster.coordinator.expire(server)
    return True


def cut_off_server(cluster: SimCluster, rng: "Random") -> bool:
    """A server does not reach ZooKeeper, while all else works."""
    server = rng.choice(cluster.servers)
    coordinator = cluster.coordinator
    coordinator.cut_off[server.name] = None
    coordinator.watch_server(server)
    cluster.world.after(
        rng.randrange(50, 3_000) * MS, lambda: coordinator.cut_off.pop(server.name, None)
    )
    return True


def late_watches(cluster: SimCluster, rng: "Random") -> bool:
    """News of the assignment take long."""
    cluster.coordinator.watch_delay_ms_max = rng.choice((100, 1_000, 3_000))

    def recover() -> None:
        cluster.coordinator.watch_delay_ms_max = 20

    cluster.world.after(rng.randrange(100, 2_000) * MS, recover)
    return True


# ---- operators


def move_partition(cluster: SimCluster, rng: "Random") -> bool:
    """The assignment gives the partition to any living server, maybe to the same one."""
    coordinator = cluster.coordinator
    living = [name for name, is_alive in coordinator.alive.items() if is_alive]
    if not living:
        return False
    coordinator.give(rng.choice(living))
    return True


def change_replicas(cluster: SimCluster, rng: "Random") -> bool:
    """One replica more, or less, or one in the place of another."""
    coordinator = cluster.coordinator
    now = list(coordinator.assignment.replicas)
    held = {} if coordinator.metadata is None else coordinator.metadata.states
    if set(held) != set(now):
        return False  # One step at a time.
    spare = [each for each in cluster.storages if each not in now]
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


def checkpoint(cluster: SimCluster, rng: "Random") -> bool:
    """A new session is asked for, under load."""
    owner = cluster.owner
    if owner is None or owner.partition is None or not owner.partition.is_open or owner.is_paused:
        return False
    owner.step(events.Checkpoint())
    return True


def clock_jump(cluster: SimCluster, rng: "Random") -> bool:
    """A clock on the wall jumps by an hour."""
    rng.choice(list(cluster.processes)).wall_offset_ms += rng.choice((-3_600_000, 3_600_000))
    return True


# ---- the budget (rule 2)


def all_believed(cluster: SimCluster) -> bool:
    """Whether every replica that is engaged has all that it ever promised to keep."""
    metadata = cluster.coordinator.metadata
    states = {} if metadata is None else metadata.states
    for replica, state in states.items():
        if state.closing_high_water_mark != UNRESOLVED:
            continue
        log = cluster.storages[ReplicaId(replica)].log
        if log is None or log.suspect or log.damaged or log.last_session < state.session_id:
            return False
    return True


KINDS: Final[dict[str, Strike]] = {
    strike.__name__: strike
    for strike in (
        kill_storage,
        storage_away,
        power_loss,
        power_loss_at_a_step,
        all_power,
        pause_storage,
        pause_server,
        kill_server,
        slow_server,
        kill_client,
        pause_client,
        cut_link,
        mute_link,
        partition_network,
        slow_network,
        failing_disk,
        full_disk,
        slow_disk,
        lost_answers,
        zookeeper_away,
        expire_session,
        cut_off_server,
        late_watches,
        move_partition,
        change_replicas,
        checkpoint,
        clock_jump,
    )
}
WEIGHTS: Final[dict[str, int]] = {
    **dict.fromkeys(KINDS, 2),
    "kill_storage": 4,
    "cut_link": 4,
    "lost_answers": 3,
    "all_power": 1,
    "slow_disk": 1,
    "clock_jump": 1,
}
