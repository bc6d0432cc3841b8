"""Ports of this machine for daemons: which are free, and one that nobody has.

Why it stands alone: a cluster draws all its ports before any daemon listens at one, and keeps them
while daemons come and go.
"""

import random
import socket
import time

from waltz_core.errors import Unreachable

# Below the range from which the kernel draws ports for outgoing connections, so that none of
# those can sit on a daemon's port while the daemon is away.
FIRST, LAST = 10240, 32000
SOON_S = 2.0


def is_free(port: int, host: str) -> bool:
    """Tell whether a daemon could listen at a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_free_soon(port: int, host: str) -> bool:
    """Tell whether a port is free, or becomes so: of a process just killed it is held a moment."""
    deadline = time.monotonic() + SOON_S
    while not is_free(port, host):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def draw(taken: set[int], host: str) -> int:
    """Return a free port that is none of these; raises Unreachable when none is found."""
    chooser = random.SystemRandom()
    for _ in range(1000):
        port = chooser.randint(FIRST, LAST)
        if port not in taken and is_free(port, host):
            return port
    raise Unreachable(f"no free port between {FIRST} and {LAST} on {host}")
