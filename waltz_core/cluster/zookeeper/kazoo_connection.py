"""Replaces methods of kazoo's connection thread: shorter timeouts, and a watchdog.

The replaced methods are internal to kazoo 2.10, and all of them run on kazoo's thread.
`zookeeper_session.py` uses kazoo's public interface.

Rules:
    1. A request for a session is sent again soon if ZooKeeper does not answer. A ZooKeeper server
       that is just starting may never answer the first request. kazoo would wait for a whole
       session timeout.
    2. This module stores the session timeout that ZooKeeper has granted, because kazoo does not
       report it.
    3. While the event loop hangs, kazoo's thread sends no heartbeat and opens no connection, so
       that the session expires (`watchdog.py`). All other requests come from the loop, so a hanging
       loop sends no request either.
    4. A lookup of a host name that fails, for any reason, is repeated. kazoo repeats it only for a
       `gaierror`. Without this rule, kazoo's thread would end permanently if the process has no
       file descriptor left.
    5. A slow lookup of one host name does not delay the connection to other hosts. kazoo would wait
       until all host names are resolved. Until a slow lookup ends, the addresses from the last
       lookup are used.
"""

import logging
import random
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionDropped
from kazoo.protocol.serialization import Connect

from waltz_core.cluster.zookeeper.watchdog import Watchdog
from waltz_core.transport import dns_lookup

_log = logging.getLogger(__name__)

# For rule 1: the first wait is short. Each following wait is twice as long, up to a maximum that is
# sufficient for any usable ZooKeeper.
SESSION_ANSWER_TIMEOUT_S_MIN: Final = 0.5
SESSION_ANSWER_TIMEOUT_S_MAX: Final = 3.0
# For rule 5: longer than a working DNS server needs.
LOOKUP_TIMEOUT_S: Final = 0.5

__all__ = ["KazooHandler", "KazooHooks", "clock_ms"]


def clock_ms() -> int:
    """Return the time since the start of the machine, in ms."""
    return time.monotonic_ns() // 1_000_000


class KazooHooks:
    """The replaced methods of one kazoo client; see the module's rules."""

    def __init__(self, client: KazooClient, session_timeout_ms: int) -> None:
        self.watchdog = Watchdog(session_timeout_ms, clock_ms())
        self._client = client
        self._addresses: dict[str, dns_lookup.Addresses] = {}
        self._session_answer_timeout_s = SESSION_ANSWER_TIMEOUT_S_MIN
        self._is_withholding_heartbeats = False
        connection = client._connection
        self._invoke, connection._invoke = connection._invoke, self._invoke_hooked
        self._send_ping, connection._send_ping = connection._send_ping, self._send_ping_hooked
        connection._expand_client_hosts = self._expand_hosts_hooked

    @property
    def session_timeout_ms(self) -> int:
        """The granted session timeout; until one is granted, the requested one."""
        return self.watchdog.timeout_ms

    def _invoke_hooked(self, timeout_s: float, request: object, xid: int | None = None) -> Any:  # noqa: ANN401 - kazoo's
        if not isinstance(request, Connect):
            return self._invoke(timeout_s, request, xid)
        if not self._may_keep_session():
            raise ConnectionDropped("the event loop of the process is blocked")
        answer_s = min(timeout_s, self._session_answer_timeout_s)
        self._session_answer_timeout_s = min(
            2 * self._session_answer_timeout_s, SESSION_ANSWER_TIMEOUT_S_MAX
        )
        answer = self._invoke(answer_s, request, xid)
        self._session_answer_timeout_s = SESSION_ANSWER_TIMEOUT_S_MIN
        if answer[0].time_out > 0:
            self.watchdog.timeout_ms = answer[0].time_out
        return answer

    def _send_ping_hooked(self, connect_timeout_s: float) -> None:
        if self._may_keep_session():
            self._send_ping(connect_timeout_s)

    def _expand_hosts_hooked(self) -> list[tuple[str, str, int]]:
        """Return host, address and port of all known hosts; kazoo calls this method repeatedly."""
        lookups = {
            host.strip(): dns_lookup.begin_lookup(host.strip()) for host, _ in self._client.hosts
        }
        for host, lookup in lookups.items():
            lookup.add_done_callback(partial(self._note_addresses, host))
        done, pending = wait(lookups.values(), LOOKUP_TIMEOUT_S)
        while pending and not self._addresses and all(lookup.exception() for lookup in done):
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for host, lookup in lookups.items():
            if lookup.done() and lookup.exception() is None:  # its callback may not have run yet
                self._addresses[host] = lookup.result()
        addresses = [
            (host.strip(), address, port)
            for host, port in self._client.hosts
            for address in self._addresses.get(host.strip(), ())
        ]
        random.shuffle(addresses)
        return addresses

    def _note_addresses(self, host: str, lookup: "Future[dns_lookup.Addresses]") -> None:
        error = lookup.exception()
        if error is None:
            self._addresses[host] = lookup.result()
        else:
            self._addresses.pop(host, None)
            _log.warning("zookeeper.host_unresolved host=%s error=%s", host, error)

    def _may_keep_session(self) -> bool:
        """Query the watchdog; log the beginning and the end of a hang, because the loop cannot."""
        now_ms = clock_ms()
        may_keep = self.watchdog.may_keep_session(now_ms)
        if self._is_withholding_heartbeats == may_keep:
            self._is_withholding_heartbeats = not may_keep
            if may_keep:
                _log.info("process.event_loop_responsive")
            else:
                silent_ms = self.watchdog.silent_ms(now_ms)
                _log.error(
                    "process.event_loop_unresponsive silent_ms=%d session=left_to_expire", silent_ms
                )
        return may_keep


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, with a shorter timeout for a host that does not answer at all."""

    def __init__(self, connect_timeout_s: float) -> None:
        super().__init__()
        self._connect_timeout_s = connect_timeout_s
        self.failure = "the host name cannot be resolved, or the host does not answer"

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - kazoo's
        """Connect within `connect_timeout_s`."""
        kwargs["timeout"] = min(kwargs["timeout"], self._connect_timeout_s)
        try:
            connection = super().create_connection(*args, **kwargs)
        except OSError as error:
            self.failure = error.strerror or str(error)
            raise
        self.failure = (
            "the host accepts connections, but ZooKeeper does not answer the request for a session"
        )
        return connection
