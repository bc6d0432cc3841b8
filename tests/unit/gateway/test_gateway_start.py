"""Errors at the start of a gateway."""

import socket

import pytest

from waltz_core.config.declarations import GatewayConfig
from waltz_core.errors import BadConfig
from waltz_core.gateway import gateway_daemon


class _Directory:
    """A `SharedDirectory` without a cluster."""

    def __init__(self, *_):
        pass

    async def open(self):
        """Do nothing."""

    async def watch_assignment(self):
        """Return at once."""

    async def close(self):
        """Do nothing."""


@pytest.mark.parametrize("name", ["port", "http_port"])
def test_a_port_in_use_is_reported_as_one_error(monkeypatch, name):
    monkeypatch.setattr(gateway_daemon, "SharedDirectory", _Directory)
    with socket.create_server(("127.0.0.1", 0)) as used:
        ports = {"port": 0, name: used.getsockname()[1]}
        with pytest.raises(BadConfig, match=f"setting {name}: the daemon cannot listen at"):
            gateway_daemon.run(GatewayConfig(connect="zk:1/w", **ports))
