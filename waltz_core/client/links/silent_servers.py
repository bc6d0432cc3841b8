"""Logs servers that do not answer: once when the silence begins, and once when it ends.

A client has two connections to a server, and connects to it repeatedly. But a silence has one log
line, with the server's address.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from waltz_core.client.links.outage_log import LOG_INTERVAL_S

_log = logging.getLogger(__name__)

# A quarter of the time after which ZooKeeper ends a server's session; detected within twice this.
SILENT_S = 1.0


@dataclass(slots=True)
class _SilentServer:
    """The silence of one server: its silent connections, and whether it was logged."""

    connections: set[int] = field(default_factory=set)
    since_s: float = 0.0
    logged_s: float | None = None
    is_logged: bool = False


class SilentServers:
    """The silent servers of one client, by address; connections have numbers.

    `mark_suspect` makes the directory read ZooKeeper: the server's partitions may have moved. A
    server that falls silent repeatedly is logged once in `LOG_INTERVAL_S` at most. Without it
    (None) nothing is logged: the doctor reports servers that do not answer as findings.
    """

    def __init__(self, mark_suspect: Callable[[], None] | None) -> None:
        self._on_silence = mark_suspect
        self._known: dict[str, _SilentServer] = {}

    def on_silence_detected(self, address: str, connection: int, *, since_s: float) -> None:
        """It has sent nothing here since `since_s` (the loop's clock), and a caller waits."""
        if self._on_silence is None:
            return
        self._on_silence()
        known = self._known.setdefault(address, _SilentServer())
        if not known.connections:
            known.since_s = since_s
        known.connections.add(connection)
        now_s = asyncio.get_running_loop().time()
        is_soon = known.logged_s is not None and now_s - known.logged_s < LOG_INTERVAL_S
        if known.is_logged or is_soon:
            return
        known.is_logged, known.logged_s = True, now_s
        _log.warning(
            "server.silent server=%s silent_s=%.1f",
            address,
            now_s - known.since_s,
        )

    def on_data_received(self, address: str, connection: int) -> None:
        """It has sent something here; logged if it was silent."""
        known = self._end_silence(address, connection)
        if known is not None:
            _log.info("server.responsive server=%s after_s=%.1f", address, _lasted_s(known))

    def on_wait_ended(self, address: str, connection: int, reason: object) -> None:
        """No caller waits for it here any more; logged if it was silent."""
        known = self._end_silence(address, connection)
        if known is not None:
            lasted_s = _lasted_s(known)
            _log.info(
                "server.silent_until_closed server=%s after_s=%.1f reason=%s",
                address,
                lasted_s,
                reason,
            )

    def _end_silence(self, address: str, connection: int) -> _SilentServer | None:
        """Return the silence that has ended with this connection's, if it was logged."""
        known = self._known.get(address)
        if known is None:
            return None
        known.connections.discard(connection)
        if known.connections or not known.is_logged:
            return None
        known.is_logged = False
        return known


def _lasted_s(silence: _SilentServer) -> float:
    return asyncio.get_running_loop().time() - silence.since_s


class SilenceWatch:
    """Finds out whether the server of one connection is silent while a caller waits for it."""

    def __init__(
        self,
        silent_servers: SilentServers,
        address: str,
        connection: int,
        is_waiting: Callable[[], bool],
    ) -> None:
        self._silent_servers = silent_servers
        self._address = address
        self._connection = connection
        self._is_waiting = is_waiting
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._has_received = False
        self._is_ended = False

    def start(self) -> None:
        """Check after `SILENT_S`, unless a check is planned: a message was just sent."""
        if self._timer is None and not self._is_ended:
            self._has_received = False
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            self._timer = loop.call_later(SILENT_S, self._check)

    def on_data_received(self) -> None:
        """The server has sent something."""
        if not self._has_received:
            self._has_received = True
            self._silent_servers.on_data_received(self._address, self._connection)

    def end(self, reason: str) -> None:
        """The connection is closed."""
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._silent_servers.on_wait_ended(self._address, self._connection, reason)

    def _check(self) -> None:
        self._timer = None
        if not self._is_waiting():
            self._silent_servers.on_wait_ended(
                self._address, self._connection, "the caller no longer waits for the answer"
            )
            return
        if not self._has_received:
            self._silent_servers.on_silence_detected(
                self._address, self._connection, since_s=self._since_s
            )
        self.start()
