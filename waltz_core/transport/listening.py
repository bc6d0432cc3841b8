"""Listening ports, with TLS (`tls_port.py`) or without TLS, and their links."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from waltz_core.errors import BadConfig
from waltz_core.transport import tls
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.net import WRITE_BACKLOG_BYTES_MAX, Link, LinkOwner
from waltz_core.transport.tls_port import LISTEN_BACKLOG, TlsPort
from waltz_core.wire.messages import WireProtocol

_log = logging.getLogger(__name__)


async def listen(
    protocol: WireProtocol,
    host: str,
    port: int,
    on_connection: Callable[[Link], None],
    *,
    ssl: tls.ListenContext | None = None,
    limits: LinkLimits | None = None,
) -> "Listener":
    """Listen on an address, and call `on_connection` with each link after both hellos.

    Port 0 selects a free port; `Listener.port` has its number. If `ssl` (`tls.listen_context`) is
    given, each link has the principal of its peer, and a peer without TLS receives an alert. Raises
    BadConfig if it is not possible to listen on the address.
    """
    listener = Listener(protocol, on_connection, limits or LinkLimits())
    try:
        async with asyncio.timeout(10.0):
            await listener._open(host, port, ssl)
    except OSError as error:
        raise BadConfig(f"cannot listen on {host}:{port}: {tls.failure_text(error)}") from error
    return listener


class Listener:
    """An open port and its links."""

    def __init__(
        self, protocol: WireProtocol, on_connection: Callable[[Link], None], limits: LinkLimits
    ) -> None:
        self.host = ""
        self.port = 0
        self._protocol = protocol
        self._limits = limits
        self._owner = LinkOwner(
            on_ready=on_connection,
            on_lost=self._on_link_lost,
            on_opened=self._on_link_opened,
            limits=limits,
        )
        self._links: dict[Link, None] = {}
        self._server: asyncio.Server | None = None
        self._tls_port: TlsPort | None = None
        self._is_closed = False

    @property
    def links(self) -> tuple[Link, ...]:
        """The open links, including links whose peer has not sent its hello yet."""
        return tuple(self._links)

    async def close(self, reason: str = "shutting down") -> None:
        """Stop accepting connections, close the open links, and wait until they are closed."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        if self._tls_port is not None:
            await self._tls_port.close()
        for link in self.links:
            link.close(reason)
        for link in self.links:
            await link.wait_closed()

    async def _open(self, host: str, port: int, ssl: tls.ListenContext | None) -> None:
        self.host = host
        if ssl is not None:
            self._owner = replace(self._owner, access=ssl.access)
            self._tls_port = TlsPort(ssl, self._make_protocol)
            await self._tls_port.open(host, port)
            self.port = self._tls_port.port
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._make_protocol, host, port, backlog=LISTEN_BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _make_protocol(self) -> asyncio.BufferedProtocol:
        link = Link(
            self._protocol,
            is_listener=True,
            write_backlog_bytes_max=WRITE_BACKLOG_BYTES_MAX,
            owner=self._owner,
        )
        return link.as_protocol()

    def _on_link_opened(self, link: Link) -> None:
        if self._is_closed:  # It was accepted before `close`, and is reported only now.
            link.abort("shutting down")
            return
        rejection = self._limits.add_link(link)
        if rejection:
            if tls.is_new_failure(link.host, rejection):
                _log.warning(
                    "net.connection_rejected connections=%d peer=%s error=%r",
                    len(self._links),
                    link.address,
                    rejection,
                )
            link.abort(rejection)
            return
        self._links[link] = None

    def _on_link_lost(self, link: Link) -> None:
        self._links.pop(link, None)
        self._limits.remove_link(link)
