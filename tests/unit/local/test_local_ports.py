"""No other program uses a reserved port, and the daemon can listen on it."""

import asyncio
import socket

from tests.ports import free_port
from waltz_core.local import ports
from waltz_core.local.local_cluster import LOOPBACK


def test_a_reserved_port_is_unique_and_a_daemon_can_listen_on_it():
    port = free_port()
    held = ports.hold_port(port, LOOPBACK)
    assert held is not None
    with held:
        assert ports.hold_port(port, LOOPBACK) is None
        assert ports.is_free(port, LOOPBACK)

        async def listen():
            async with await asyncio.start_server(lambda *_: None, LOOPBACK, port):
                assert not ports.is_free(port, LOOPBACK)

        asyncio.run(listen())
    again = ports.hold_port(port, LOOPBACK)
    assert again is not None
    again.close()


def test_a_port_in_use_by_another_program_is_not_reserved():
    with socket.create_server((LOOPBACK, 0)) as other:
        assert ports.hold_port(other.getsockname()[1], LOOPBACK) is None
