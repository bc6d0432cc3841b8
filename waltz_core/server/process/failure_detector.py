"""Failure detection by connection: a server whose process has died is removed at once.

ZooKeeper detects a dead process only when its session times out. But the operating system closes
the connections of a dead process immediately, and rejects new ones.

Rules:
    1. Another server can be declared dead only if this server was connected to it before. A refused
       connection to an address that was never reachable proves nothing.
    2. A server is dead if its connection was lost, and then new connections were refused
       `REFUSALS_MIN` times in a row. In this case, no process listens at its address. Other
       failures prove nothing: a connection attempt that gets no answer (the host may be dead or
       partitioned), and a refused connection if the name has several addresses. ZooKeeper's session
       timeout detects these servers.
    3. A false detection only moves partitions: the live server registers again, and storages fence
       replaced owners. No other code may rely on this detection.
    4. If a server changes its preferences, its process is still the same, so the watch continues.
    5. A dying process may accept one more connection and drop it. So after a connection that lasted
       less than `RETRY_PAUSE_S`, and after an attempt that failed in another way, this server
       connects again soon. The pauses then grow up to `RETRY_PAUSE_S`.
    6. The results are published for the leader. The leader assigns no partitions to a server to
       which no other server can connect (`cluster/membership/reachability.py`). An accepted
       connection is a success even if the peer closes it at once: the peer may have another
       version, or too many connections.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Final

from waltz_core.cluster.membership.reachability import PublishedReachability, Reachability
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.znodes.model import ServerDescriptor
from waltz_core.driver import loop_clock_ms
from waltz_core.errors import AuthenticationFailed, BadConfig, TlsFailed, WaltzError
from waltz_core.records.record import ServerId
from waltz_core.server.process.storage_links import TaskStarter
from waltz_core.transport import net
from waltz_core.wire.messages import WireProtocol

_log = logging.getLogger(__name__)

REFUSALS_MIN: Final = 3
REFUSED_PAUSE_S: Final = 0.02
RETRY_PAUSE_S: Final = 1.0
PUBLISH_INTERVAL_S: Final = 1.0
DIAL_TIMEOUT_S: Final = 3.0


class FailureDetector:
    """Watches all other servers, by the module's rules.

    Args:
        server_id: the ID of this server.
        tasks: runs the watches.
        remove_dead: removes a dead server from the cluster; raises if that fails.
        ssl: the TLS context for dialing other servers.
    """

    def __init__(
        self,
        server_id: ServerId,
        tasks: TaskStarter,
        remove_dead: Callable[[ServerDescriptor], Awaitable[None]],
        *,
        ssl: SSLContext | None = None,
    ) -> None:
        self._server_id = server_id
        self._tasks = tasks
        self._remove_dead = remove_dead
        self._ssl = ssl
        self._watches: dict[tuple[ServerId, str], _ServerWatch] = {}
        self._results = _DialResults()

    def watch_servers(self, view: ServersView) -> None:
        """Watch exactly the other servers of this view."""
        others = {
            (server.server_id, server.address): server
            for server in view.servers.values()
            if server.server_id != self._server_id
        }
        for key in self._watches.keys() - others.keys():
            self._watches.pop(key).stop()
        for key, descriptor in others.items():
            if key in self._watches:
                self._watches[key].descriptor = descriptor  # rule 4
                continue
            watch = self._watches[key] = _ServerWatch(
                descriptor, self._remove_dead, self._ssl, self._results
            )
            self._tasks.create_task(watch.run())
        self._results.reachability.keep_only({server_id for server_id, _ in others})

    async def publish_results(
        self, published_reachability: PublishedReachability, is_witness: Callable[[], bool]
    ) -> None:
        """Publish the results of the dials periodically, until cancelled (rule 6)."""
        while True:
            self._results.is_changed.clear()
            report = self._results.reachability.report(loop_clock_ms())
            if not is_witness():
                report = report.as_non_witness()
            try:
                await published_reachability.publish(self._server_id, report)
            except WaltzError as error:
                _log.info("server.reachability_publish_failed error=%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_INTERVAL_S):
                    await self._results.is_changed.wait()

    def stop(self) -> None:
        """Stop all watches."""
        for watch in self._watches.values():
            watch.stop()
        self._watches.clear()


class _DialResults:
    """The dial results of all watches; each dial sets `is_changed`."""

    def __init__(self) -> None:
        self.reachability = Reachability()
        self.is_changed = asyncio.Event()

    def record_dial(self, server_id: ServerId, error: WaltzError | None) -> None:
        """Record the result of a dial; `error` is None if it succeeded."""
        now_ms = loop_clock_ms()
        is_failed = isinstance(error, BadConfig | TlsFailed | AuthenticationFailed)
        if is_failed or (error and isinstance(error.__cause__, OSError)):
            self.reachability.note_failure(server_id, str(error), now_ms)
        else:
            self.reachability.note_connection(server_id, now_ms)
        self.is_changed.set()


class _ServerWatch:
    """A connection to one server, established again whenever it is lost."""

    def __init__(
        self,
        descriptor: ServerDescriptor,
        remove_dead: Callable[[ServerDescriptor], Awaitable[None]],
        ssl: SSLContext | None,
        results: _DialResults,
    ) -> None:
        self.descriptor = descriptor
        self._results = results
        self._remove_dead = remove_dead
        self._ssl = ssl
        self._stopped = asyncio.Event()
        self._link: net.Link | None = None

    def stop(self) -> None:
        """Request the end of the watch, and abort its connection."""
        self._stopped.set()
        if self._link is not None:
            self._link.abort("this server no longer checks the other server")

    async def run(self) -> None:
        """Keep a connection to the server until `stop` is called (rules 1 and 2)."""
        was_connected, refusals, pause_s = False, 0, REFUSED_PAUSE_S
        while not self._stopped.is_set():
            try:
                self._link = await net.dial(
                    WireProtocol.CLIENT,
                    self.descriptor.address,
                    timeout_s=DIAL_TIMEOUT_S,
                    ssl=self._ssl,
                )
            except WaltzError as error:
                self._record_dial(error)
                is_refused = isinstance(error.__cause__, ConnectionRefusedError)
                refusals = refusals + 1 if is_refused and was_connected else 0
                if refusals < REFUSALS_MIN:
                    await self._pause(REFUSED_PAUSE_S if refusals else pause_s)
                    pause_s = min(2 * pause_s, RETRY_PAUSE_S)  # rule 5
                    continue
                # After a removal, the server must be reached again before another removal (rule 1).
                refusals, was_connected = 0, not await self._remove_dead_server()
                await self._pause(RETRY_PAUSE_S)
            else:
                self._record_dial(None)
                was_connected, refusals, since_ms = True, 0, loop_clock_ms()
                if self._stopped.is_set():
                    self._link.abort("this server no longer checks the other server")
                await self._link.wait_closed()
                if loop_clock_ms() - since_ms >= RETRY_PAUSE_S * 1000:
                    pause_s = REFUSED_PAUSE_S
                    continue
                # The pause also grows if the server closes each connection at once.
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, RETRY_PAUSE_S)

    def _record_dial(self, error: WaltzError | None) -> None:
        if not self._stopped.is_set():
            self._results.record_dial(self.descriptor.server_id, error)

    async def _remove_dead_server(self) -> bool:
        dead_server = self.descriptor
        try:
            await self._remove_dead(dead_server)
        except WaltzError as error:
            _log.warning(
                "server.dead_peer_removal_failed server=%s error=%s", dead_server.server_id, error
            )
            return False
        _log.warning(
            "server.dead_peer_removed server=%s address=%s "
            "reason='nothing listens at this address'",
            dead_server.server_id,
            dead_server.address,
        )
        return True

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return
