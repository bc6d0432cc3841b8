"""Network faults: links break, drop messages or are slow, in one direction or in both.

The rules of `kinds.py` apply here.
"""

from functools import partial
from typing import TYPE_CHECKING, Final

from waltz_sim.cluster.simulated_clients import SimClient
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.cluster.simulated_servers import SimServer
from waltz_sim.faults.injection import choose_storage, count_callback
from waltz_sim.world.network import FAR, NEAR, Handlers, SimLink

if TYPE_CHECKING:
    from random import Random

# How long after the end of a link its messages may still arrive, in ms: shortest and longest.
LATE_MS: Final = (50, 2_000)


def cut_link(cluster: SimCluster, rng: "Random") -> bool:
    """Break one link."""
    links = list(cluster.network.links.values())
    if not links:
        return False
    cluster.network.break_link(rng.choice(links), "cut")
    return True


def half_delivered(cluster: SimCluster, rng: "Random") -> bool:
    """Break a link with messages in flight: only the first messages arrive."""
    network = cluster.network
    under_way = [
        (link, end)
        for link in network.links.values()
        for end in (NEAR, FAR)
        if link.is_open[end] and link.arrives_at_us[1 - end] > cluster.world.now_us
    ]
    if not under_way:
        return False
    network.break_in_transfer(*rng.choice(under_way), rng)
    return True


def mute_link(cluster: SimCluster, rng: "Random") -> bool:
    """Drop all messages on one link from now on, without an error."""
    links = list(cluster.network.links.values())
    if not links:
        return False
    cluster.network.mute(rng.choice(links))
    return True


def revoke_replicate(cluster: SimCluster, rng: "Random") -> bool:
    """Let one or all storages deny requests for a while; their links break first (048, AC 4)."""
    storages = [choose_storage(cluster, rng)]
    if rng.random() < 0.3:
        storages = list(cluster.storages.values())
    for storage in storages:
        storage.is_denying = True
        for link in list(storage.links.values()):
            cluster.network.break_link(link, "the permissions have changed")

    def grant() -> None:
        for storage in storages:
            storage.is_denying = False

    cluster.world.call_after_us(rng.randrange(10, 1_500) * US_PER_MS, grant)
    return True


def partition_network(cluster: SimCluster, rng: "Random") -> bool:
    """Block the network between two groups of machines for a while, perhaps in one direction."""
    names = [process.name for process in cluster.processes]
    side = {name for name in names if rng.random() < 0.4}
    is_one_way = rng.random() < 0.4
    network = cluster.network
    for machine in names:
        for other in names:
            if (machine in side) and (other not in side):
                network.block(machine, other)
                if not is_one_way:
                    network.block(other, machine)
    cluster.world.call_after_us(rng.randrange(10, 1_500) * US_PER_MS, network.blocked.clear)
    return True


def isolate_one(cluster: SimCluster, rng: "Random") -> bool:
    """Isolate one machine from all others for a while, or two machines from each other."""
    network, names = cluster.network, [process.name for process in cluster.processes]
    machine = rng.choice(names)
    others = [name for name in names if name != machine]
    if rng.random() < 0.4:
        others = [rng.choice(others)]
    is_one_way = rng.random() < 0.4
    for other in others:
        network.block(machine, other)
        if not is_one_way:
            network.block(other, machine)
    cluster.world.call_after_us(rng.randrange(50, 2_500) * US_PER_MS, network.blocked.clear)
    return True


def slow_network(cluster: SimCluster, rng: "Random") -> bool:
    """Increase the latency of all messages for a while."""
    cluster.network.extra_delay_us = rng.choice((1_000, 10_000, 60_000))

    def recover() -> None:
        cluster.network.extra_delay_us = 0

    cluster.world.call_after_us(rng.randrange(20, 500) * US_PER_MS, recover)
    return True


def heavy_tail(cluster: SimCluster, rng: "Random") -> bool:
    """Delay a few messages for very long; later messages on these links wait for them."""
    cluster.network.slow_message_share = rng.choice((0.01, 0.1))

    def recover() -> None:
        cluster.network.slow_message_share = 0.0

    cluster.world.call_after_us(rng.randrange(20, 800) * US_PER_MS, recover)
    return True


def duplicate_connect(cluster: SimCluster, rng: "Random") -> bool:
    """Let a client open a second connection, send no message on it, and close it."""
    client, server = rng.choice(cluster.clients), rng.choice(cluster.servers)
    if not client.is_up or not server.is_up:
        return False
    stay_ms = rng.randrange(1, 500)

    def leave(link: SimLink) -> None:
        client.call_after_us(stay_ms * US_PER_MS, lambda: cluster.network.close(link, NEAR))

    cluster.network.dial(
        client,
        server,
        Handlers(lambda _link, _message: None, lambda _link, _reason: None),
        on_opened=leave,
        on_failed=lambda _reason: None,
        accept=server.accept,
    )
    return True


def slow_reader(cluster: SimCluster, rng: "Random") -> bool:
    """Let a client stop reading from a server for a while."""
    links = [
        link
        for link in cluster.network.links.values()
        if isinstance(link.ends[NEAR], SimClient) and link.is_open[FAR]
    ]
    if not links:
        return False
    link = rng.choice(links)
    server = link.ends[FAR]
    assert isinstance(server, SimServer)
    if server.partition is None or server.is_paused:
        return False
    server.congest(link)
    return True


def outlived_link(cluster: SimCluster, rng: "Random") -> bool:
    """Let the dialing process abandon a link; its messages, then the link's end, arrive later."""
    network, world = cluster.network, cluster.world
    links = [
        link
        for link in network.links.values()
        if all(link.is_open)
        and link.held is None
        and isinstance(link.ends[NEAR], SimClient | SimServer)
    ]
    of_clients = [link for link in links if isinstance(link.ends[NEAR], SimClient)]
    if of_clients and rng.random() < 0.7:
        links = of_clients
    if not links:
        return False
    link = rng.choice(links)
    network.hold(link, count_callback(cluster, "outlived_link"))
    abandoned_after_us = rng.choice((2, 10, 40, 100)) * US_PER_MS
    shortest, longest = LATE_MS
    late_us = int(shortest * (longest / shortest) ** rng.random()) * US_PER_MS
    world.call_after_us(abandoned_after_us, partial(network.abandon, link, "abandoned"))
    end_us = rng.choice((0, 1, 20)) * US_PER_MS
    world.call_after_us(
        abandoned_after_us + late_us, partial(network.release, link, "abandoned", end_us)
    )
    return False
