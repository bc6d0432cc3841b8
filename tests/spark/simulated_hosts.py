"""Network namespaces on a bridge that stand for several machines.

Each simulated host has a separate network: an address, a loopback interface and ports. It reaches
other hosts only over the bridge, and has no access to the networks of this machine. A process holds
the namespace, and ends with its standard input, so nothing remains after a test. Without root or
iproute2, the hosts are addresses of the loopback interface.
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

ADDRESS_PREFIX = "10.99.0"
BRIDGE = "hub"
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
COMMAND_TIMEOUT_S = 30
# `WALTZ_SIMULATED_HOSTS=loopback` runs the tests without namespaces.
ISOLATION_MODE = os.environ.get("WALTZ_SIMULATED_HOSTS", "namespaces")


@dataclass(frozen=True)
class SimulatedHost:
    """A machine: its address and, in a namespace, the process that holds it."""

    address: str
    namespace_pid: int | None = None

    @property
    def has_own_network(self) -> bool:
        """Whether this host has a separate network."""
        return self.namespace_pid is not None

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another command on this host."""
        return (
            [*words]
            if self.namespace_pid is None
            else ["nsenter", f"-n/proc/{self.namespace_pid}/ns/net", *words]
        )

    def run(self, *words: str) -> None:
        """Run a command on this host; raises CalledProcessError with its output."""
        subprocess.run(
            self.command(*words), check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S
        )

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Move this thread and its children to this host during a `with` block."""
        if self.namespace_pid is None:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as before:
            with Path(f"/proc/{self.namespace_pid}/ns/net").open() as namespace:
                _set_network(namespace.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())

    @contextlib.contextmanager
    def block_ports(self, ports: Sequence[int]) -> Iterator[None]:
        """Block connections to some ports of other hosts during a `with` block."""
        rules = [("ipproto", "tcp", "dport", str(port), "unreachable") for port in ports]
        for rule in rules:
            self.run("ip", "rule", "add", *rule, "pref", "1")
        try:
            yield
        finally:
            for rule in rules:
                self.run("ip", "rule", "del", *rule)


@contextlib.contextmanager
def simulated_hosts() -> Iterator[tuple[SimulatedHost, SimulatedHost, SimulatedHost]]:
    """Yield three hosts for the duration of a `with` block: the hub and two worker hosts."""
    with contextlib.ExitStack() as stack:
        try:
            holders = [stack.enter_context(network_namespace()) for _ in range(3)]
            hub, first, second = hosts = tuple(
                SimulatedHost(f"{ADDRESS_PREFIX}.{n + 1}", namespace_pid)
                for n, namespace_pid in enumerate(holders)
            )
            _connect_hosts(hub, (first, second))
        except (OSError, subprocess.SubprocessError):
            stack.close()
            hosts = (
                SimulatedHost("127.0.0.1"),
                SimulatedHost("127.0.0.1"),
                SimulatedHost("127.0.0.2"),
            )
        yield hosts


@contextlib.contextmanager
def network_namespace(*also: str) -> Iterator[int]:
    """Create a network namespace; yield the process that holds it.

    With option `-m`, the process also has its own mounts.
    """
    if ISOLATION_MODE != "namespaces":
        raise OSError(f"WALTZ_SIMULATED_HOSTS={ISOLATION_MODE}")
    with subprocess.Popen(["unshare", "-n", *also, "cat"], stdin=subprocess.PIPE) as namespace_pid:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        try:
            # When the process executes `cat`, the namespace is complete.
            while Path(f"/proc/{namespace_pid.pid}/comm").read_text() != "cat\n":
                if namespace_pid.poll() is not None or time.monotonic() > deadline:
                    raise OSError("no network namespace can be made here")
                time.sleep(0.01)
            yield namespace_pid.pid
        finally:
            namespace_pid.kill()


def _connect_hosts(hub: SimulatedHost, worker_hosts: Sequence[SimulatedHost]) -> None:
    """Connect the hosts by a bridge in the hub, and an Ethernet pair for each worker host."""
    hub.run("ip", "link", "add", BRIDGE, "type", "bridge")
    for number, worker_host in enumerate(worker_hosts, 1):
        end = f"rim{number}"
        peer = ("peer", "name", "eth0", "netns", str(worker_host.namespace_pid))
        hub.run("ip", "link", "add", end, "type", "veth", *peer)
        hub.run("ip", "link", "set", end, "master", BRIDGE, "up")
    for host, link in ((hub, BRIDGE), *((worker_host, "eth0") for worker_host in worker_hosts)):
        host.run("ip", "address", "add", f"{host.address}/24", "dev", link)
        for name in ("lo", link):
            host.run("ip", "link", "set", name, "up")


def _set_network(handle: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def die_with_parent() -> None:
    """Let Linux end this child when its parent dies; runs after the fork."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
