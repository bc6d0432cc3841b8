"""Faults of processes and clocks: crashes, pauses, slowness, clock jumps and drift.

The rules of `kinds.py` apply here.
"""

from typing import TYPE_CHECKING, Final

from waltz_sim.cluster.retried_task import RetriedTask
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.cluster.simulated_servers import RELEASED_PAUSE_US
from waltz_sim.faults.injection import (
    choose_pause_ms,
    choose_storage,
    count_callback,
    keep_down,
    pause,
)
from waltz_sim.world.simulated_disk import DiskFault, Survival

if TYPE_CHECKING:
    from random import Random

# Messages and events at which a server dies, before or after them (`SimServer.planned_death`).
SERVER_CRASH_POINTS: Final = (
    "Prepare",
    "SetLowWaterMark",
    "Truncate",
    "AppendRaw",
    "Engage",
    "WriteMetadata",
    "MetadataWritten",
    "Prepared",
    "ReplicaEnd",
    "Appended",
)
STORAGE_CRASH_POINTS: Final = ("Prepare", "SetLowWaterMark", "Truncate", "AppendRaw", "Engage")


# ---- storages


def kill_storage(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage as with SIGKILL; its supervisor restarts it."""
    storage = choose_storage(cluster, rng)
    if not storage.is_up:
        return False
    storage.kill(is_silent=rng.random() < 0.1)
    cluster.restart_later(storage)
    return True


def storage_away(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage, and keep it down for a long time."""
    storage = choose_storage(cluster, rng)
    if not storage.is_up:
        return False
    cluster.kept_down[storage.name] = None
    storage.kill(is_silent=rng.random() < 0.5)

    def start_again() -> None:
        cluster.kept_down.pop(storage.name, None)
        storage.start()

    cluster.world.call_after_us(rng.randrange(500, 4_000) * US_PER_MS, start_again)
    return True


def restart_loop(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage or a server several times within a short time."""
    process = choose_storage(cluster, rng) if rng.random() < 0.6 else rng.choice(cluster.servers)
    if not process.is_up:
        return False
    for _ in range(rng.randint(2, 5)):
        cluster.world.call_after_us(
            rng.randrange(1, 800) * US_PER_MS, lambda: cluster.kill(process)
        )
    return True


def crash_storage_at(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a storage at a named request: before its work, or between the work and the answer."""
    storage = choose_storage(cluster, rng)
    on_injected = count_callback(cluster, "crash_storage_at")
    storage.planned_death = (rng.choice(STORAGE_CRASH_POINTS), rng.random() < 0.7, on_injected)
    return False


def power_loss(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power of one machine, which loses unsynced data."""
    storage = choose_storage(cluster, rng)
    if not storage.is_up:
        return False
    storage.lose_power(rng.choice(list(Survival)))
    return True


def power_loss_at_a_step(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power at one of the next steps of a disk, or at the next sync."""
    disk = choose_storage(cluster, rng).disk
    on_injected = count_callback(cluster, "power_loss_at_a_step")
    if rng.random() < 0.5:
        disk.plan_fault(disk.step_count + rng.randint(1, 12), DiskFault.POWER_LOSS, on_injected)
    else:
        disk.plan_fault_at_call(("sync",), DiskFault.POWER_LOSS, on_injected)
    return False


def all_power(cluster: SimCluster, rng: "Random") -> bool:
    """Cut the power of all storages' machines at the same time."""
    for storage in cluster.storages.values():
        if storage.is_up:
            storage.lose_power(rng.choice(list(Survival)))
    return True


def pause_storage(cluster: SimCluster, rng: "Random") -> bool:
    """Pause a storage for a while, as SIGSTOP does."""
    return pause(cluster, choose_storage(cluster, rng), rng)


# ---- servers


def pause_server(cluster: SimCluster, rng: "Random") -> bool:
    """Pause a server for a while, perhaps for longer than its session timeout."""
    server = rng.choice(cluster.servers)
    if not pause(cluster, server, rng):
        return False
    cluster.coordinator.watch_server(server)
    return True


def hanging_server(cluster: SimCluster, rng: "Random") -> bool:
    """Hang a server's event loop, perhaps forever, while its threads keep its ZooKeeper session.

    At least one other server does not hang, because the partition has to move to this server.
    """
    server = rng.choice(cluster.servers)
    hang_ms = rng.choice((300, 1_500, 4_000, None))
    others = [each for each in cluster.servers if each is not server and not each.is_hanging]
    if server.is_paused or not server.is_up or not others:
        return False
    server.hang()
    if hang_ms is not None:
        hang_count = server.hang_count

        def recover() -> None:
            if server.hang_count == hang_count:
                server.resume()

        cluster.world.call_after_us(hang_ms * US_PER_MS, recover)
    return True


def kill_server(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a server as with SIGKILL; its supervisor restarts it."""
    server = rng.choice(cluster.servers)
    if not server.is_up:
        return False
    server.kill(is_silent=rng.random() < 0.2)
    cluster.restart_later(server)
    return True


def crash_server_at(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a server at a named point: before or after it sends or receives a message."""
    owner = cluster.owner
    server = rng.choice(cluster.servers) if owner is None else owner
    on_injected = count_callback(cluster, "crash_server_at")
    server.planned_death = (rng.choice(SERVER_CRASH_POINTS), rng.random() < 0.6, on_injected)
    return False


def slow_server(cluster: SimCluster, rng: "Random") -> bool:
    """Slow down a server for a while."""
    server = rng.choice(cluster.servers)
    server.slow_us = rng.choice((50, 500, 3_000))

    def recover() -> None:
        server.slow_us = 0

    cluster.world.call_after_us(rng.randrange(50, 1_000) * US_PER_MS, recover)
    return True


# ---- clients


def kill_client(cluster: SimCluster, rng: "Random") -> bool:
    """Kill a client, perhaps with appends in flight; it restarts as another client."""
    client = rng.choice(cluster.clients)
    if not client.is_up:
        return False
    client.kill(is_silent=rng.random() < 0.3)
    cluster.workload.drop_submissions(client)

    def start_again() -> None:
        if not client.is_up:
            cluster.start_client(client)

    cluster.world.call_after_us(rng.randrange(1, 500) * US_PER_MS, start_again)
    return True


def pause_client(cluster: SimCluster, rng: "Random") -> bool:
    """Pause a client for a while."""
    return pause(cluster, rng.choice(cluster.clients), rng)


def slow_apply(cluster: SimCluster, rng: "Random") -> bool:
    """Slow down the application of a client, which then applies the feed slowly."""
    client = rng.choice(cluster.clients)
    if not client.is_up:
        return False
    client.apply_us_max = rng.choice((50_000, 400_000))

    def recover() -> None:
        client.apply_us_max = 3_000

    cluster.world.call_after_us(choose_pause_ms(rng) * US_PER_MS, recover)
    return True


def two_attempts(cluster: SimCluster, rng: "Random") -> bool:
    """Resume the older attempt of a task after a newer attempt has written all rows.

    Often the storages lose their quorum in between, until the server releases the partition and
    owns it again in the same generation.
    """
    owner = cluster.owner
    if owner is None or owner.partition is None or not owner.partition.is_open:
        return False
    on_injected = count_callback(cluster, "two_attempts")
    away_ms = cluster.setup.quorum_ms_max + rng.randrange(50, 500)
    is_away = rng.random() < 0.7
    later_ms = rng.randrange(300)
    if is_away:
        later_ms += rng.choice((0, away_ms, away_ms + RELEASED_PAUSE_US // US_PER_MS))

    def written() -> None:
        on_injected()
        if is_away and not cluster.is_recovering:
            stop_quorum(cluster, rng, away_ms)
        cluster.world.call_after_us(later_ms * US_PER_MS, task.continue_first_attempt)

    task = RetriedTask(cluster, written)
    return False


def stop_quorum(cluster: SimCluster, rng: "Random", away_ms: int) -> None:
    """Stop so many replicas for a while that the others are not a quorum."""
    replicas = list(cluster.replicas)
    for replica in rng.sample(replicas, len(replicas) // 2 + 1):
        storage = cluster.storages[replica]
        if storage.is_up:
            storage.kill()
            keep_down(cluster, storage, away_ms)


# ---- clocks


def clock_jump(cluster: SimCluster, rng: "Random") -> bool:
    """Move the wall clock of a process by one hour."""
    rng.choice(list(cluster.processes)).wall_offset_ms += rng.choice((-3_600_000, 3_600_000))
    return True


def clock_drift(cluster: SimCluster, rng: "Random") -> bool:
    """Let the monotonic clock of a process, and all its timers, run fast or slow."""
    rng.choice(list(cluster.processes)).set_clock_rate(rng.choice((0.8, 0.9, 1.1, 1.2)))
    return True
