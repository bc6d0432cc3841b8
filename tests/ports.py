"""Ports for daemons that tests restart. No two test processes get the same port."""

import asyncio
import os
import random
import socket
from typing import Final

from waltz_core.local import ports

# While a daemon is down, its port is free, and another worker or a command could take it. So each
# worker has its own ports, below the range that commands use by default.
_LOWEST_PORT: Final = 5_000
_WORKER_NUMBER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKER_COUNT: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS_PER_WORKER: Final = (ports.FIRST_PORT - _LOWEST_PORT) // _WORKER_COUNT
_FIRST_PORT: Final = _LOWEST_PORT + _WORKER_NUMBER * _PORTS_PER_WORKER
_used_ports: set[int] = set()


def use_worker_port_range() -> None:
    """Make clusters in this process use its share of the ports."""
    ports.FIRST_PORT, ports.LAST_PORT = _FIRST_PORT, _FIRST_PORT + _PORTS_PER_WORKER - 1


def free_port() -> int:
    """Return a free port of this process's share, never the same one twice."""
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(_FIRST_PORT, _FIRST_PORT + _PORTS_PER_WORKER)
        if port in _used_ports:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _used_ports.add(port)
        return port


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server of asyncio's default loop; each accepted connection has reached its protocol.

    asyncio accepts a connection in several steps, and loses the connection's socket when its
    server closes between them (python/cpython#109564).
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(3):  # the task that accepts, `connection_made`, the end of that task
        await asyncio.sleep(0)
    server.close()
