"""Logs servers that do not answer: once when the silence begins, and once when it ends.

A client has up to two connections to a server, and connects to it repeatedly. All these connections
share one log line for each silence, with the server's address.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from waltz_core.client.links.outage_log import LOG_INTERVAL_S

_log = logging.getLogger(__name__)

# In seconds: a quarter of the session timeout of servers at ZooKeeper. A silence is detected within
# twice this time.
SILENCE_CHECK_S = 1.0


@dataclass(slots=True)
class _ServerSilence:
    """The silence of one server: the silent connections, and whether the silence was logged."""

    connections: set[int] = field(default_factory=set)
    since_s: float = 0.0
    logged_s: float | None = None
    is_logged: bool = False


class SilentServers:
    """The silent servers of one client, by address; each connection has a number.

    `mark_suspect` makes the directory read ZooKeeper, because the server's partitions may have
    moved. If `mark_suspect` is None, no silence is logged; the doctor passes None, because it
    reports servers that do not answer as findings. A server that becomes silent repeatedly is
    logged at most once in `LOG_INTERVAL_S` seconds.
    """

    def __init__(self, mark_suspect: Callable[[], None] | None) -> None:
        self._mark_suspect = mark_suspect
        self._silences: dict[str, _ServerSilence] = {}

    def on_silence_detected(self, address: str, connection: int, *, since_s: float) -> None:
        """A caller waits on a connection without data since `since_s` (the loop's clock)."""
        if self._mark_suspect is None:
            return
        self._mark_suspect()
        silence = self._silences.setdefault(address, _ServerSilence())
        if not silence.connections:
            silence.since_s = since_s
        silence.connections.add(connection)
        now_s = asyncio.get_running_loop().time()
        is_soon = silence.logged_s is not None and now_s - silence.logged_s < LOG_INTERVAL_S
        if silence.is_logged or is_soon:
            return
        silence.is_logged, silence.logged_s = True, now_s
        _log.warning(
            "server.silent server=%s silent_s=%.1f",
            address,
            now_s - silence.since_s,
        )

    def on_data_received(self, address: str, connection: int) -> None:
        """A server has sent data on a connection; the end of a silence is logged."""
        silence = self._end_silence(address, connection)
        if silence is not None:
            _log.info("server.responsive server=%s after_s=%.1f", address, _duration_s(silence))

    def on_wait_ended(self, address: str, connection: int, reason: object) -> None:
        """No caller waits on a connection any more; if this ends a silence, log the end."""
        silence = self._end_silence(address, connection)
        if silence is not None:
            lasted_s = _duration_s(silence)
            _log.info(
                "server.silent_until_closed server=%s after_s=%.1f reason=%s",
                address,
                lasted_s,
                reason,
            )

    def _end_silence(self, address: str, connection: int) -> _ServerSilence | None:
        """Return the silence that ends with this connection, if the silence was logged."""
        silence = self._silences.get(address)
        if silence is None:
            return None
        silence.connections.discard(connection)
        if silence.connections or not silence.is_logged:
            return None
        silence.is_logged = False
        return silence


def _duration_s(silence: _ServerSilence) -> float:
    return asyncio.get_running_loop().time() - silence.since_s


class SilenceWatch:
    """Detects whether the server of one connection is silent while a caller waits for an answer."""

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
        """A message was sent: check in `SILENCE_CHECK_S` seconds, unless a check is scheduled."""
        if self._timer is None and not self._is_ended:
            self._has_received = False
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            self._timer = loop.call_later(SILENCE_CHECK_S, self._check)

    def on_data_received(self) -> None:
        """Note that the server has sent data."""
        if not self._has_received:
            self._has_received = True
            self._silent_servers.on_data_received(self._address, self._connection)

    def end(self, reason: str) -> None:
        """End the watch: the connection is closed."""
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
