"""Finds free ports of this machine, and holds each of them until a daemon listens at it.

A cluster chooses all its ports before any daemon listens, and must keep them while daemons start
and stop.

To hold a port, the cluster binds a socket to it, but does not listen. `hold_port` in another
process then fails for this port. A daemon can still listen at the port, because on Linux this is
possible if both sockets have SO_REUSEADDR.
"""

import random
import socket
import sys
import time

from waltz_core.errors import Unreachable

# This range is below the range from which the kernel chooses ports for outgoing connections. So no
# connection takes a daemon's port while the daemon does not run.
FIRST_PORT, LAST_PORT = 10240, 32000
FREE_TIMEOUT_S = 2.0


def is_free(port: int, host: str) -> bool:
    """Whether a daemon could listen at a port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def wait_until_free(port: int, host: str) -> bool:
    """Wait a short time until a port is free; return whether it is free."""
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while not is_free(port, host):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def hold_port(port: int, host: str) -> socket.socket | None:
    """Return a socket that holds a port; None if another program uses the port.

    A daemon can still listen at a held port (`is_free`). On systems other than Linux, this function
    closes the socket at once, because a daemon could not listen at a held port.
    """
    held_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held_socket.bind((host, port))  # without SO_REUSEADDR: only one of two such binds succeeds
    except OSError:
        held_socket.close()
        return None
    held_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if not sys.platform.startswith("linux"):
        held_socket.close()
    return held_socket


def choose_port(used_ports: set[int], host: str) -> tuple[int, socket.socket]:
    """Return a free port that is not in `used_ports`, and the socket that holds it.

    Raises Unreachable if there is no free port.
    """
    chooser = random.SystemRandom()
    for _ in range(1000):
        port = chooser.randint(FIRST_PORT, LAST_PORT)
        held_socket = None if port in used_ports else hold_port(port, host)
        if held_socket is not None:
            return port, held_socket
    raise Unreachable(f"there is no free port between {FIRST_PORT} and {LAST_PORT} on {host}")
