"""Serves HTTP with uvicorn at a port of a daemon, in the daemon's own event loop.

`uvicorn.Server` would install signal handlers, wait for its end in a loop with ten turns per
second, and end the process if the address is in use. So only uvicorn's connections are used
(docs/decisions/065).

Rules:
    1. A connection has one request. It is closed `REQUEST_S_MAX` after it was opened, whether the
       client or the page is slow; unsent bytes do not stay in memory.
    2. There are at most `CONNECTIONS_MAX` connections, and requests whose client has disconnected
       count, too. Further connections are closed at once.
    3. The buffer for an incomplete head has `HEAD_BYTES_MAX`, and that for a body 64 KiB.
    4. uvicorn logs nothing: a peer could fill the log with its warnings of bad requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from waltz_core.errors import BadConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONNECTIONS_MAX: Final = 32
HEAD_BYTES_MAX: Final = 8 * 1024
REQUEST_S_MAX: Final = 5.0
CLOSE_S_MAX: Final = 1.0
_SILENT: Final = logging.Logger("uvicorn", logging.CRITICAL + 1)  # noqa: LOG001 - rule 4; no logger of the process


@contextlib.asynccontextmanager
async def serve_http(app: "ASGIApp", *, host: str, port: int) -> AsyncIterator[int]:
    """Serve the pages of `app` while the block runs; yields the port (0: any free one).

    Raises:
        BadConfig: it is not possible to listen at the address.
    """
    config = Config(
        app,
        http="h11",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        workers=1,  # otherwise the environment is read
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    config.load()
    state = ServerState()
    state.default_headers = [(b"connection", b"close")]  # rule 1
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(lambda: _Connection(config, state, {}, loop), host, port)
    except OSError as error:
        raise BadConfig(
            f"setting http_port: the daemon cannot listen at {host}:{port}: {error.strerror}"
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


class _Connection(H11Protocol):
    """A connection with the limits of this module."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as there
        self.logger, self.access_log = _SILENT, False
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks)) > CONNECTIONS_MAX:  # rule 2
            transport.abort()
        else:
            self._deadline = self.loop.call_later(REQUEST_S_MAX, transport.abort)  # rule 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
