"""The schedule of faults of a round, drawn from a seed; the same on every machine.

A schedule is a value: it has no processes, clocks or randomness. Faults that a machine does not
support (cuts without root) are skipped. The times of the other faults do not change.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.chaos.cluster import SESSION_MS, ClusterSize
from tests.chaos.lag import LinkSettings
from tests.chaos.network import Link, both_ways

FIRST_S = 2.0
CALM_BETWEEN_S = 1.8  # on average
SESSION_S = SESSION_MS / 1000
KINDS_MIN = 4
NOT_SLOW: Final = LinkSettings()


@dataclass(frozen=True)
class Fault:
    """One fault, its time and its duration."""

    at_s: float
    for_s: float
    kind: str
    targets: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    lag: LinkSettings = NOT_SLOW
    summary: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7} {self.summary or ', '.join(self.targets)} for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Schedule:
    """The cluster of a seed and its faults, ordered by time."""

    seed: int
    cluster_size: ClusterSize
    faults: tuple[Fault, ...]


Draw = Callable[[random.Random, ClusterSize, float], Fault]


def draw_schedule(seed: int, round_s: float, *, archives: bool = False) -> Schedule:
    """Draw the schedule of a seed for a round of the given length.

    Each seed has only some kinds of faults: frequent faults would hide the effects of rare ones.
    Every second seed has an archive; with `archives`, every seed has one. With an archive, most
    faults are kills of processes that the archive needs.
    """
    chance = random.Random(seed)
    cluster_size = ClusterSize(
        zookeepers=chance.choice((1, 1, 1, 3)),
        storages=chance.choice((3, 3, 3, 5)),
        servers=chance.choice((2, 3)),
        clients=3,
        stores=int(archives or seed % 2 == 1),
    )
    kinds = [
        KINDS[each]
        for each in chance.sample(list(KINDS), chance.randrange(KINDS_MIN, len(KINDS) + 1))
    ]
    if cluster_size.stores:
        kinds = [*kinds[:KINDS_MIN], *ARCHIVE_KINDS * 2]
    faults = []
    at_s = FIRST_S
    while at_s < round_s:
        faults.append(chance.choice(kinds)(chance, cluster_size, round(at_s, 2)))
        at_s += chance.expovariate(1 / CALM_BETWEEN_S)
    return Schedule(seed, cluster_size, tuple(faults))


def _draw_duration(chance: random.Random) -> float:
    """Draw a duration near the session timeout, where decisions are made, or far from it."""
    return round(
        chance.choice((0.3, 1.0, SESSION_S, 1.5 * SESSION_S, 3 * SESSION_S))
        * chance.uniform(0.7, 1.3),
        2,
    )


def _daemon(chance: random.Random, cluster_size: ClusterSize) -> str:
    kinds = ["server", "storage", "server", "storage", "zookeeper"]
    kind = chance.choice(kinds + ["store"] * cluster_size.stores)
    return chance.choice(cluster_size.names(kind))


def _kill(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(at_s, _draw_duration(chance), "kill", (_daemon(chance, cluster_size),))


def _kill_many(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    kind = chance.choice(("server", "storage", "zookeeper"))
    names = cluster_size.names(kind)
    some = tuple(chance.sample(names, chance.randrange(1, len(names) + 1)))
    return Fault(at_s, _draw_duration(chance), "kill", some)


def _kill_client(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(
        at_s, _draw_duration(chance), "kill", (chance.choice(cluster_size.names("client")),)
    )


def _kill_storage(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(
        at_s, _draw_duration(chance), "kill", (chance.choice(cluster_size.names("storage")),)
    )


def _kill_owner(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(
        at_s, _draw_duration(chance), "kill", (chance.choice(cluster_size.names("server")),)
    )


def _kill_store(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(at_s, _draw_duration(chance), "kill", tuple(cluster_size.names("store")))


def _stop(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(at_s, _draw_duration(chance), "stop", (_daemon(chance, cluster_size),))


def _freeze(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(at_s, _draw_duration(chance), "freeze", (_daemon(chance, cluster_size),))


def _full(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    return Fault(
        at_s, _draw_duration(chance), "full", (chance.choice(cluster_size.names("storage")),)
    )


def _isolate(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    name = _daemon(chance, cluster_size)
    everything = [*cluster_size.members, *cluster_size.names("client"), "operator"]
    links = tuple(both_ways([name], everything))
    return Fault(at_s, _draw_duration(chance), "cut", (), links, summary=f"{name} from all")


def _cut(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    """Cut one server or client from one or all members of a kind, in one or both directions."""
    near = chance.choice(("server", "server", "server", "storage", "client"))
    far = {
        "server": chance.choice(("storage", "storage", "zookeeper", "server", "client")),
        "storage": chance.choice(("zookeeper", "store")) if cluster_size.stores else "zookeeper",
        "client": chance.choice(("server", "zookeeper")),
    }[near]
    one = chance.choice(cluster_size.names(near))
    them = [name for name in cluster_size.names(far) if name != one]
    if chance.random() < 0.5:
        them = chance.sample(them, chance.randrange(1, len(them) + 1))
    direction = chance.choice(("<->", "<->", "->", "<-"))
    outbound, inbound = [(one, each) for each in them], [(each, one) for each in them]
    links = {"<->": outbound + inbound, "->": outbound, "<-": inbound}[direction]
    summary = f"{one} {direction} {', '.join(them)}"
    return Fault(at_s, _draw_duration(chance), "cut", (), tuple(links), summary=summary)


def _slow(chance: random.Random, cluster_size: ClusterSize, at_s: float) -> Fault:
    one = chance.choice([*cluster_size.members, *cluster_size.names("client")])
    lag = chance.choice(
        (
            LinkSettings(20, 20),
            LinkSettings(100, 100),
            LinkSettings(400, 300),
            LinkSettings(5, 5, 0.02),
            LinkSettings(20, 20, 0.1),
            LinkSettings(1, 0, 0.0, 128 * 1024),
        )
    )
    links = tuple(both_ways([one], [*cluster_size.members, *cluster_size.names("client")]))
    return Fault(at_s, _draw_duration(chance), "slow", (), links, lag, summary=f"{one} ({lag})")


KINDS: Final[dict[str, Draw]] = {
    "kill": _kill,
    "kill many": _kill_many,
    "kill a client": _kill_client,
    "stop": _stop,
    "freeze": _freeze,
    "full disk": _full,
    "isolate": _isolate,
    "cut": _cut,
    "cut again": _cut,  # twice in this list, because there are many kinds of cuts
    "slow": _slow,
}
# Each of these kills can interrupt an upload: each storage uploads most of the time, and each
# server owns partitions and controls their uploads.
ARCHIVE_KINDS: Final[tuple[Draw, ...]] = (_kill_storage, _kill_owner, _kill_store)
