"""Serves HTTP with uvicorn at a port of a daemon, in the daemon's own event loop.

`uvicorn.Server` would install signal handlers, poll ten times per second for its end, and exit the
process if the address is in use. So this file uses only uvicorn's connections (docs/decisions/065).

Rules:
    1. A connection carries one request. The connection is closed `REQUEST_S_MAX` after it was
       opened, whether the client or the page is slow. Its unsent bytes are then dropped.
    2. There are at most `CONNECTIONS_MAX` connections. A request whose client has disconnected also
       counts as a connection. Further connections are closed at once.
    3. The buffer for an incomplete request head has `HEAD_BYTES_MAX`, and the buffer for a body 64
       KiB.
    4. uvicorn logs nothing. If uvicorn logged, a peer could fill the log with warnings of bad
       requests, or with the exceptions that a bad request causes after its response.
    5. With `keep_alive_connections_max`, this number replaces `CONNECTIONS_MAX` in rule 2, and rule
       1 does not apply. A connection carries any number of requests, of any duration. The
       connection is closed in these cases:
        - The head or the body of a request does not arrive within `RECEIVE_S_MAX`.
        - There is no request for `IDLE_S_MAX`.
        - The client takes no byte of a response for `STALLED_S_MAX`.
        - The TLS handshake takes longer than `RECEIVE_S_MAX`.
        - The client's host is dead, and the connection has bytes to send.
    6. A client that sends its whole request before it reads must be able to read an early response.
       So if a response is sent before the whole request has arrived, the rest of the request is
       dropped.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
import termios
from collections.abc import AsyncIterator
from ssl import SSLContext
from typing import TYPE_CHECKING, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from waltz_core.errors import BadConfig
from waltz_core.transport import tcp

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONNECTIONS_MAX: Final = 32
HEAD_BYTES_MAX: Final = 8 * 1024
REQUEST_S_MAX: Final = 5.0
RECEIVE_S_MAX: Final = 20.0
IDLE_S_MAX: Final = 75
STALLED_S_MAX: Final = 30.0
CHECK_INTERVAL_S: Final = 1.0
CLOSE_S_MAX: Final = 1.0
_SILENT_LOGGER: Final = logging.Logger("uvicorn", logging.CRITICAL + 1)  # noqa: LOG001 - rule 4


@contextlib.asynccontextmanager
async def serve_http(
    app: "ASGIApp",
    *,
    host: str,
    port: int,
    keep_alive_connections_max: int | None = None,
    ssl: SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve the pages of `app` while the block runs, and yield the port; 0 selects a free port.

    Raises:
        BadConfig: it is not possible to listen on the address.
    """
    config = Config(
        app,
        http="h11",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        workers=1,  # otherwise uvicorn reads the environment
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        timeout_keep_alive=IDLE_S_MAX,
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def make_connection() -> H11Protocol:
        if keep_alive_connections_max is None:
            return _SingleRequestConnection(config, state, {}, loop)
        return _KeepAliveConnection(config, state, loop, keep_alive_connections_max)

    if keep_alive_connections_max is None:
        state.default_headers = [(b"connection", b"close")]  # rule 1
    try:
        server = await loop.create_server(
            make_connection,
            host,
            port,
            ssl=ssl,
            ssl_handshake_timeout=None if ssl is None else RECEIVE_S_MAX,
        )
    except OSError as error:
        name = "http_port" if keep_alive_connections_max is None else "port"
        raise BadConfig(
            f"setting {name}: the daemon cannot listen at {host}:{port}: {error.strerror}"
        ) from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in state.tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                if state.tasks:
                    await asyncio.wait(state.tasks)
                await server.wait_closed()


class _SilentConnection(H11Protocol):
    """A connection with rule 4."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in `H11Protocol`
        self.logger, self.access_log = _SILENT_LOGGER, False
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # a response was sent before the end of the request
            self.transport.abort()


class _SingleRequestConnection(_SilentConnection):
    """A connection for one request, with limits of its number and duration (rules 1 and 2)."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in `H11Protocol`
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks)) > CONNECTIONS_MAX:  # rule 2
            transport.abort()
        else:
            self._deadline = self.loop.call_later(REQUEST_S_MAX, transport.abort)  # rule 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


class _KeepAliveConnection(_SilentConnection):
    """A connection for any number of requests (rule 5)."""

    _check_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
        connections_max: int,
    ) -> None:
        super().__init__(config, state, {}, loop)
        self._connections_max = connections_max
        self._last_receive_s = self._last_progress_s = loop.time()
        self._checked_cycle: object = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in `H11Protocol`
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks)) > self._connections_max:
            transport.abort()
            return
        self._check()

    def _check(self) -> None:
        """Close the connection by rule 5, or check it again later."""
        now_s = self.loop.time()
        if self.cycle is not self._checked_cycle or not self._is_receiving():
            self._checked_cycle, self._last_receive_s = self.cycle, now_s
        sock = self.transport.get_extra_info("socket")
        unsent_bytes = self.transport.get_write_buffer_size() + _count_queued_bytes(sock)
        is_waiting = self.flow.write_paused or self.transport.is_closing()
        if not is_waiting or unsent_bytes < self._unsent_bytes:
            self._last_progress_s = now_s
        self._unsent_bytes = unsent_bytes
        is_slow = (
            now_s - self._last_receive_s > RECEIVE_S_MAX
            or now_s - self._last_progress_s > STALLED_S_MAX
        )
        if is_slow or tcp.silence_ms(sock) is not None:
            self.transport.abort()
        else:
            self._check_timer = self.loop.call_later(CHECK_INTERVAL_S, self._check)

    def _is_receiving(self) -> bool:
        """Return whether the connection waits for the rest of a head or a body."""
        if self.timeout_keep_alive_task is not None:  # idle: uvicorn closes the connection
            return False
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        super().connection_lost(exc)


def _count_queued_bytes(sock: socket.socket) -> int:
    """Return the bytes in the system that the client has not acknowledged."""
    packed = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(packed, sys.byteorder)
