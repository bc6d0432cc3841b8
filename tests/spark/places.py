"""Network namespaces on a bridge that stand for several machines.

Each place has a separate network: an address, a loopback interface and ports. It reaches other
places over the bridge only, and has no access to the networks of this machine. A namespace lasts as
long as its holder, a process that ends with its standard input, so nothing remains after a test.
Without root or iproute2, places are addresses of the loopback interface.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.99.0"
BRIDGE = "hub"
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
SECONDS_MAX = 30
# `WALTZ_PLACES=loopback` is for a look at what remains without namespaces.
WANTED = os.environ.get("WALTZ_PLACES", "namespaces")


@dataclass(frozen=True)
class Place:
    """A machine: its address and, in a namespace, the process that holds it."""

    address: str
    holder: int | None = None

    @property
    def is_apart(self) -> bool:
        """Whether this place has a separate network."""
        return self.holder is not None

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one here."""
        return (
            [*words]
            if self.holder is None
            else ["nsenter", f"-n/proc/{self.holder}/ns/net", *words]
        )

    def run(self, *words: str) -> None:
        """Run a command here; raises CalledProcessError with its output."""
        subprocess.run(self.command(*words), check=True, capture_output=True, timeout=SECONDS_MAX)

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Enter this place with this thread and its children during a `with` block."""
        if self.holder is None:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as before:
            with Path(f"/proc/{self.holder}/ns/net").open() as there:
                _set_network(there.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())

    @contextlib.contextmanager
    def block_ports(self, ports: Sequence[int]) -> Iterator[None]:
        """Block connections to some ports of other places during a `with` block."""
        rules = [("ipproto", "tcp", "dport", str(port), "unreachable") for port in ports]
        for rule in rules:
            self.run("ip", "rule", "add", *rule, "pref", "1")
        try:
            yield
        finally:
            for rule in rules:
                self.run("ip", "rule", "del", *rule)


@contextlib.contextmanager
def places() -> Iterator[tuple[Place, Place, Place]]:
    """Yield three places for the duration of a `with` block: the hub and two rims."""
    with contextlib.ExitStack() as stack:
        try:
            holders = [stack.enter_context(namespace()) for _ in range(3)]
            hub, first, second = made = tuple(
                Place(f"{NETWORK}.{n + 1}", holder) for n, holder in enumerate(holders)
            )
            _join(hub, (first, second))
        except (OSError, subprocess.SubprocessError):
            stack.close()
            made = Place("127.0.0.1"), Place("127.0.0.1"), Place("127.0.0.2")
        yield made


@contextlib.contextmanager
def namespace(*also: str) -> Iterator[int]:
    """Create a network namespace; yield the process that holds it.

    With `-m` it also has its own mounts, which end with it.
    """
    if WANTED != "namespaces":
        raise OSError(f"WALTZ_PLACES={WANTED}")
    with subprocess.Popen(["unshare", "-n", *also, "cat"], stdin=subprocess.PIPE) as holder:
        deadline = time.monotonic() + SECONDS_MAX
        try:
            # When it has become `cat` all is made.
            while Path(f"/proc/{holder.pid}/comm").read_text() != "cat\n":
                if holder.poll() is not None or time.monotonic() > deadline:
                    raise OSError("no network namespace can be made here")
                time.sleep(0.01)
            yield holder.pid
        finally:
            holder.kill()


def _join(hub: Place, rims: Sequence[Place]) -> None:
    """Connect the places by a bridge in the hub, and a pair of Ethernet ends for each rim."""
    hub.run("ip", "link", "add", BRIDGE, "type", "bridge")
    for number, rim in enumerate(rims, 1):
        end = f"rim{number}"
        peer = ("peer", "name", "eth0", "netns", str(rim.holder))
        hub.run("ip", "link", "add", end, "type", "veth", *peer)
        hub.run("ip", "link", "set", end, "master", BRIDGE, "up")
    for place, link in ((hub, BRIDGE), *((rim, "eth0") for rim in rims)):
        place.run("ip", "address", "add", f"{place.address}/24", "dev", link)
        for name in ("lo", link):
            place.run("ip", "link", "set", name, "up")


def _set_network(handle: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def die_with_parent() -> None:
    """Let Linux end this child when its parent dies; runs after the fork."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
