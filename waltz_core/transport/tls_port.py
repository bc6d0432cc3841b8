"""A listening port with TLS: it accepts connections, performs handshakes, and logs failures.

The event loop's own listening port closes a connection silently if the handshake fails. So if a
peer did not use TLS, the peer's operator would find no reason in any log.

Rules:
    1. If a peer does not begin with a handshake, the peer is logged, and receives an alert that
       Waltz's dialers recognize. A connection without any byte is not logged.
    2. A handshake may take `HANDSHAKE_S_MAX` at most, and `port_limits.py` limits the number and
       rate of handshakes. The answer to the ClientHello uses most of the CPU time. So a handshake
       begins only when the whole ClientHello has arrived and the queue gives it a turn.
    3. No bytes reach a connection's protocol before the handshake is done.
    4. While a cluster switches to TLS (`tls_transition`), the port also accepts a peer without TLS,
       that is, a peer that does not begin with a handshake. If daemons already connect with TLS,
       such a peer is logged.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

from waltz_core.transport import client_hello, tcp, tls
from waltz_core.transport.admission.port_limits import HandshakeLimits, HandshakeQueue

_log = logging.getLogger(__name__)

HANDSHAKE_S_MAX: Final = 5.0
HANDSHAKES_MAX: Final = 4_096
LISTEN_BACKLOG: Final = 1_024

# The pause after an accept fails for lack of descriptors or memory; a retry would also fail.
_ACCEPT_PAUSE_S: Final = 0.5


class TlsPort:
    """A listening port with TLS; `make_protocol` is called after a successful handshake."""

    def __init__(
        self, context: tls.ListenContext, make_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self.port = 0
        self._context = context
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._accept_task: asyncio.Task[None] | None = None
        self._limits = HandshakeLimits(
            count_max=HANDSHAKES_MAX,
            burst=context.handshake_burst_max,
            per_s=context.handshakes_per_s_max,
        )
        self._queue = HandshakeQueue(self._loop.call_later)

    async def open(self, host: str, port: int) -> None:
        """Listen on all addresses of a host, like `loop.create_server`; raises OSError."""
        infos = await self._loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, address in dict.fromkeys(infos):
                self._sockets.append(_listening_socket(family, address))
        except OSError:
            self._close_sockets()
            raise
        self.port = self._sockets[0].getsockname()[1]
        # Like the event loop's own ports, this task is in no task group: `close` ends it.
        self._accept_task = self._loop.create_task(self._accept_all(), name="tls-port")

    async def close(self) -> None:
        """Stop accepting connections, and drop handshakes in progress."""
        if self._accept_task is not None:
            self._accept_task.cancel()
            await asyncio.wait([self._accept_task])
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listening_socket in self._sockets:
            listening_socket.close()
        self._sockets.clear()

    async def _accept_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for listening_socket in self._sockets:
                tasks.create_task(self._accept(listening_socket, tasks))

    async def _accept(self, listening_socket: socket.socket, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                accepted, address = await self._loop.sock_accept(listening_socket)
            except OSError as error:
                _log.warning("tls.accept_failed error=%s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            rejection = self._limits.begin_handshake(address[0])
            if rejection:  # accept and close: a refused dial suggests a dead server
                if tls.is_new_failure(address[0], "too many handshakes"):
                    _log.warning("tls.handshake_failed peer=%s error=%s", address[0], rejection)
                accepted.close()
                continue
            tasks.create_task(self._handshake(accepted, address[0]))

    async def _handshake(self, accepted: socket.socket, host: str) -> None:
        duplicate: socket.socket | None = None
        is_handed_over = False
        try:
            first = await self._first_bytes(accepted, host)
            if self._is_acceptable(first, accepted, host):
                is_tls = first[0] == tls.HANDSHAKE_RECORD
                # If the handshake fails, the loop closes `accepted`. The duplicate stays open, so
                # that an alert can be sent.
                duplicate = accepted.dup()
                is_handed_over = True
                await self._loop.connect_accepted_socket(
                    self._make_protocol,
                    accepted,
                    ssl=self._context if is_tls else None,
                    ssl_handshake_timeout=HANDSHAKE_S_MAX if is_tls else None,
                )
        except TimeoutError:
            tls.log_failure(host, f"the TLS handshake did not complete within {HANDSHAKE_S_MAX} s")
        except ConnectionResetError:
            tls.log_failure(
                host,
                "the peer closed the connection during the handshake. It may not trust the "
                "certificate",
            )
        except OSError as error:
            tls.log_failure(host, tls.failure_text(error))
            if duplicate is not None:
                with contextlib.suppress(OSError):
                    duplicate.send(tls.alert_of(error))
        except Exception:  # noqa: BLE001 - one connection must not end the port
            _log.exception("tls.connection_failed peer=%s", host)
        finally:
            self._limits.end_handshake(host)
            if duplicate is not None:
                duplicate.close()
            if not is_handed_over:
                accepted.close()

    async def _first_bytes(self, accepted: socket.socket, host: str) -> bytes:
        """Wait for a peer's first bytes and for a turn (rule 2); return the bytes without reading.

        Return b"" if the peer has closed the connection. The peer must send the bytes within
        `HANDSHAKE_S_MAX`. The wait for a turn is not included in this time.
        """
        accepted.settimeout(0)
        late_s = self._loop.time() + HANDSHAKE_S_MAX
        wanted_bytes = 1
        async with asyncio.timeout_at(late_s) as deadline:
            while True:
                # The socket becomes readable when `wanted_bytes` have arrived, so a slow peer uses
                # at most three turns.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)
                deadline.reschedule(late_s)
                late_s += await self._wait_for_turn(accepted, host, deadline)
                try:
                    first_bytes = accepted.recv(
                        client_hello.HELLO_RECORD_BYTES_MAX, socket.MSG_PEEK
                    )
                except ConnectionResetError:
                    return b""
                if len(first_bytes) < wanted_bytes:
                    return b""
                wanted_bytes = client_hello.bytes_needed(first_bytes)
                if len(first_bytes) >= wanted_bytes:
                    break
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return first_bytes

    async def _wait_for_turn(
        self, accepted: socket.socket, host: str, deadline: asyncio.Timeout
    ) -> float:
        """Wait until the socket is readable, then for its turn; return the second wait in s."""
        turn_future, readable_s = self._loop.create_future(), 0.0

        def is_readable() -> None:
            nonlocal readable_s
            self._loop.remove_reader(accepted)
            if not turn_future.done():  # it has not timed out
                readable_s = self._loop.time()
                deadline.reschedule(None)
                self._queue.add(host, turn_future, lambda: tcp.has_peer_closed(accepted))

        self._loop.add_reader(accepted, is_readable)
        try:
            await turn_future
        finally:
            self._loop.remove_reader(accepted)
        return self._loop.time() - readable_s

    def _is_acceptable(self, first: bytes, accepted: socket.socket, host: str) -> bool:
        """Whether a peer with these first bytes may continue; if not, send it an alert (rule 1)."""
        if not first:
            return False
        if first[0] == tls.HANDSHAKE_RECORD:
            failure = client_hello.reject_reason(first)
            if failure:
                tls.log_failure(host, failure)
                accepted.recv(
                    client_hello.HELLO_RECORD_BYTES_MAX
                )  # with unread bytes the system would drop the alert
                accepted.send(tls.HANDSHAKE_FAILURE_ALERT)
            elif tcp.has_peer_closed(accepted):
                failure = "the peer closed the connection while its handshake waited in the queue"
                tls.log_failure(host, failure)
            return not failure
        if self._context.plain_peers:  # rule 4
            if self._context.plain_peers == "dial":
                tls.log_plain_peer(host)
            return True
        tls.log_failure(host, "expected TLS, found plain TCP")
        accepted.recv(64 * 1024)  # with unread bytes the system would drop the alert
        accepted.send(tls.UNEXPECTED_MESSAGE_ALERT)
        return False


def _listening_socket(family: int, address: tuple[object, ...]) -> socket.socket:
    listening_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening_socket.bind(address)
        listening_socket.listen(LISTEN_BACKLOG)
        listening_socket.settimeout(0)
    except OSError:
        listening_socket.close()
        raise
    return listening_socket
