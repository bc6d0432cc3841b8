"""Simulated machines in network namespaces; each link between them can be cut or slowed down.

Each machine is a network namespace with a link to a router, which is a namespace, too. Faults
change only the router: packets of a cut link are lost without an error, as with an unplugged cable.
The processes that hold the namespaces end with this process (`tests/spark/simulated_hosts.py`). All
links, rules and mounts disappear with them, so nothing remains of a run that was killed.

Without root or iproute2, machines are addresses of the loopback interface, and no link can be
cut.

Rules:
    1. A cut has one direction; both directions are two cuts. If a link has several cuts, packets
       pass again only when all of these cuts are removed.
    2. Packets of slow links pass through `tests/chaos/lag.py`; a link that is both cut and slow is
       cut.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.chaos.lag import TUN_DEVICE, LinkSettings
from tests.spark.simulated_hosts import SimulatedHost, die_with_parent, network_namespace
from tests.time_limits import TEST_TIMEOUT_S

PROJECT_ROOT = Path(__file__).resolve().parents[2]
ADDRESS_PREFIX = "10.88"
CUT_RANK, SLOW_RANK, SLOW_TABLE = 10, 20, 100
TUN_PATH = Path("/dev/net/tun")

Link = tuple[str, str]  # source, target


@dataclass(frozen=True)
class Machine(SimulatedHost):
    """A simulated machine, and the router's end of its link."""

    name: str = ""
    router_interface: str = ""

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one on this machine, with its mounts."""
        if self.namespace_pid is None:
            return [*words]
        return [
            "nsenter",
            f"-n/proc/{self.namespace_pid}/ns/net",
            f"-m/proc/{self.namespace_pid}/ns/mnt",
            *words,
        ]

    def path(self, inside: Path) -> Path:
        """Return the path of a file of this machine from outside its namespace."""
        return (
            inside
            if self.namespace_pid is None
            else Path(f"/proc/{self.namespace_pid}/root{inside}")
        )


class Network:
    """Machines by name; `with Network(names) as network`."""

    def __init__(self, names: Iterable[str], *, uses_namespaces: bool = True) -> None:
        self._names = list(names)
        self._uses_namespaces = uses_namespaces
        self._stack = contextlib.ExitStack()
        self._router: Machine | None = None
        self._lag_process: subprocess.Popen[str] | None = None
        self._cuts: Counter[Link] = Counter()
        self._slow_links: dict[Link, LinkSettings] = {}
        self.machines: dict[str, Machine] = {}
        self.cannot_cut_reason = ""  # why nothing can be cut here, empty where it can

    def __enter__(self) -> Self:
        try:
            if not self._uses_namespaces:
                raise OSError("not requested")  # noqa: TRY301 - as if there were none
            self._build()
        except (OSError, subprocess.SubprocessError) as error:
            self._stack.close()
            self._router = self._lag_process = None
            self.cannot_cut_reason = f"no network namespaces can be made ({error})"
            net = 1 + os.getpid() % 250
            self.machines = {
                name: Machine(f"127.{net}.{number}.2", name=name)
                for number, name in enumerate(self._names, 1)
            }
        return self

    def __exit__(self, *_error: object) -> None:
        self._lag_process = None
        self._stack.close()

    @property
    def can_cut(self) -> bool:
        """Whether links can be cut here."""
        return self._router is not None

    @property
    def can_slow(self) -> bool:
        """Whether links can be made slow here."""
        return self._lag_process is not None

    # ---- faults

    def cut(self, links: Iterable[Link]) -> None:
        """Cut links: all of their packets are lost (rule 1)."""
        self._count_cuts(links, 1)

    def restore(self, links: Iterable[Link]) -> None:
        """Remove one cut of each link."""
        self._count_cuts(links, -1)

    @contextlib.contextmanager
    def cut_during(self, links: Iterable[Link]) -> Iterator[None]:
        """Cut links for the duration of the `with` block."""
        cut = list(links)
        self.cut(cut)
        try:
            yield
        finally:
            self.restore(cut)

    def delay(self, links: Iterable[Link], lag: LinkSettings) -> None:
        """Delay the packets of links, and drop some, as `lag` states."""
        self._set_slow_links({**self._slow_links, **dict.fromkeys(links, lag)})

    def remove_delays(self, links: Iterable[Link]) -> None:
        """Remove the delays of links."""
        departed = set(links)
        self._set_slow_links(
            {link: lag for link, lag in self._slow_links.items() if link not in departed}
        )

    def repair(self) -> None:
        """Remove all cuts and delays."""
        self.restore([link for link, count in self._cuts.items() for _ in range(count)])
        if self._lag_process is not None:
            self._set_slow_links({})

    def _count_cuts(self, links: Iterable[Link], by: int) -> None:
        lines = []
        for link in links:
            was_cut = self._cuts[link] > 0
            self._cuts[link] += by
            assert self._cuts[link] >= 0, link
            if was_cut != (self._cuts[link] > 0):
                source, target = (self.machines[name].address for name in link)
                verb = "del" if was_cut else "add"
                rule = f"from {source} to {target} pref {CUT_RANK} blackhole"
                lines.append(f"rule {verb} {rule}")
        self._send_to_router(lines)

    def _set_slow_links(self, slow: dict[Link, LinkSettings]) -> None:
        assert self._lag_process is not None, "this machine cannot slow down links"
        assert self._lag_process.stdin is not None
        # A link is created before the rule that uses it, and removed after the rule.
        both = self._slow_links | slow
        self._send_to_lag(both)
        self._send_to_router(
            [
                f"rule {verb} iif {self.machines[source].router_interface} "
                f"to {self.machines[target].address} "
                f"pref {SLOW_RANK} lookup {SLOW_TABLE}"
                for verb, links in (
                    ("add", slow.keys() - self._slow_links.keys()),
                    ("del", self._slow_links.keys() - slow.keys()),
                )
                for source, target in sorted(links)
            ]
        )
        self._slow_links = slow

    def _send_to_lag(self, slow: dict[Link, LinkSettings]) -> None:
        assert self._lag_process is not None
        assert self._lag_process.stdin is not None
        links = [
            (self.machines[source].address, self.machines[target].address, *lag)
            for (source, target), lag in slow.items()
        ]
        self._lag_process.stdin.write(json.dumps(links) + "\n")
        self._lag_process.stdin.flush()

    # ---- the links

    def _build(self) -> None:
        namespace_pid = self._stack.enter_context(network_namespace())
        self._router = Machine("", namespace_pid, name="router")
        links = []
        for number, name in enumerate(self._names, 1):
            held = self._stack.enter_context(network_namespace("-m"))
            gate = f"to{number}"
            self.machines[name] = Machine(
                f"{ADDRESS_PREFIX}.{number}.2", held, name=name, router_interface=gate
            )
            links += [
                f"link add {gate} type veth peer name eth0 netns {held}",
                f"address add {ADDRESS_PREFIX}.{number}.1/24 dev {gate}",
                f"link set {gate} up",
            ]
        self._send_to_router(["link set lo up", *links])
        self._router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, name in enumerate(self._names, 1):
            _run_ip_batch(
                self.machines[name],
                [
                    "link set lo up",
                    f"address add {ADDRESS_PREFIX}.{number}.2/24 dev eth0",
                    "link set eth0 up",
                    f"route add default via {ADDRESS_PREFIX}.{number}.1",
                ],
            )
        if TUN_PATH.exists():
            self._start_lag()

    def _start_lag(self) -> None:
        assert self._router is not None
        lag = self._stack.enter_context(
            subprocess.Popen(
                self._router.command(sys.executable, "-m", "tests.chaos.lag"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread runs yet
            )
        )
        self._stack.callback(lag.kill)
        assert lag.stdout is not None
        if lag.stdout.readline() != "ready\n":
            return
        self._lag_process = lag
        self._send_to_router(
            [f"link set {TUN_DEVICE} up", f"route add default dev {TUN_DEVICE} table {SLOW_TABLE}"]
        )

    def _send_to_router(self, lines: list[str]) -> None:
        if lines:
            assert self._router is not None, "this machine cannot cut links"
            _run_ip_batch(self._router, lines)


def environment() -> dict[str, str]:
    """Return the environment of a process that may have another working directory."""
    return {
        **os.environ,
        "PYTHONPATH": f"{PROJECT_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def both_ways(sources: Iterable[str], targets: Iterable[str]) -> list[Link]:
    """Return the links between two sets of machines, in both directions."""
    others = list(targets)
    return [
        link
        for source in sources
        for other in others
        for link in ((source, other), (other, source))
        if source != other
    ]


def _run_ip_batch(machine: Machine, lines: list[str]) -> None:
    """Run several `ip` commands in one process; raises CalledProcessError."""
    subprocess.run(
        machine.command("ip", "-batch", "-"),
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
        capture_output=True,
        timeout=TEST_TIMEOUT_S,
    )
