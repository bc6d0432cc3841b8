"""TCP connections: the function that dials, and the links that carry messages.

This file opens all connections with Waltz's protocols, and `listening.py` accepts them. A link
wraps a `wire.connection.Connection`.

A link is passed to its user after both hellos. The user either sets callbacks (`start`: the fastest
way to receive messages) or awaits `receive`.

Rules:
    1. Callbacks run on the event loop, in the order of arrival. `on_closed` is called once, as the
       last callback.
    2. Messages that arrive before `start` wait in an inbox. Above `_INBOX_BYTES_MAX`, reading
       pauses.
    3. Above `WRITE_BACKLOG_BYTES_HIGH` unsent bytes a link is congested. A listener then stops
       reading the link, so that a client that does not read answers cannot send more requests. A
       dialer continues to read, because a congested listener reads again only when its answers
       were read.
    4. A link that exceeds its hard limit of unsent bytes is closed, with a reason.
    5. A peer that sends no hello in time, or sends a frame too slowly, is disconnected.
    6. The dialing side sends an empty frame when it has sent nothing for a while.
    7. A dialer with a token sends the token first. The dialer passes the link to its user when the
       peer has accepted the token. If the listener does not accept the token, it closes the link.
       On the listener's side, `principal` of the link is the principal of the peer.
    8. The user of a listener's link processes a request only if `denial` or `filter_permitted`
       permits it. Before this check, requests of a principal with limits wait in `throttle.py`.
    9. A peer whose principal has no permission may send small frames only, and is disconnected
       after `UNAUTHORIZED_S_MAX`. The peer is not disconnected at once, because a 0.13 client would
       immediately connect again. Until the peer is disconnected, its requests are answered with
       denials.
    10. The same rules hold with TLS. Bytes that TLS has passed to the socket do not count as
        unsent. So there may be twice as many bytes in memory as rules 3 and 4 permit.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import uvloop

from waltz_core.access.client_ids import NO_PROOF
from waltz_core.access.principals import ANONYMOUS
from waltz_core.access.quotas import REQUEST_BYTES_MIN
from waltz_core.errors import (
    AuthenticationFailed,
    BadConfig,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    TlsFailed,
    Unreachable,
    WaltzError,
)
from waltz_core.records.record import FRAME_BYTES_MAX
from waltz_core.transport import dialing, tcp, tls
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.admission.throttle import Throttle
from waltz_core.wire import authentication
from waltz_core.wire.connection import (
    FOUND_TLS_TEXT,
    SMALL_FRAME_BYTES_MAX,
    Connection,
    HelloReceived,
    ProtocolFailed,
)
from waltz_core.wire.messages import Hello, Message, WireProtocol

if TYPE_CHECKING:
    from waltz_core.transport.admission.audit_log import AuditedRequest
    from waltz_core.transport.admission.connection_access import ConnectionAccess
    from waltz_core.transport.admission.port_access import PortAccess

_log = logging.getLogger(__name__)

HELLO_S_MAX: Final = 5.0
CLOSE_S_MAX: Final = 5.0
UNAUTHORIZED_S_MAX: Final = 5.0
WRITE_BACKLOG_BYTES_HIGH: Final = 1024 * 1024
WRITE_BACKLOG_BYTES_LOW: Final = 256 * 1024
WRITE_BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
_INBOX_BYTES_MAX: Final = 1024 * 1024
_TICK_S: Final = 15.0
# 0.13 dialers send a keep-alive after 600 s; a peer that misses two of them is dead.
_IDLE_TICKS_MAX: Final = int(1_300 / _TICK_S)
_FRAME_BYTES_PER_TICK_MIN: Final = 1024 * int(_TICK_S)

MessagesCallback: TypeAlias = Callable[[list[Message]], None]
ClosedCallback: TypeAlias = Callable[[str], None]
DrainedCallback: TypeAlias = Callable[[], None]
ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a daemon's main coroutine on uvloop until it returns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address "host:port", or "[::1]:99" for IPv6.

    Raises BadConfig for any other text.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    if not colon or not host or not is_port:
        raise BadConfig(f'expected an address such as "host:port", found {address!r:.200}')
    return host, int(port)


async def dial(
    protocol: WireProtocol,
    address: str,
    *,
    timeout_s: float = 5.0,
    ssl: SSLContext | None = None,
    write_backlog_bytes_max: int = WRITE_BACKLOG_BYTES_MAX,
) -> "Link":
    """Connect to "host:port", and return the link after both hellos.

    If `ssl` (`tls.dial_context`) is given, the link uses TLS, and sends the token of `ssl` to a
    peer whose version has access control.

    Raises:
        Unreachable: there is no connection within `timeout_s` seconds.
        TlsFailed: only one side uses TLS, or a certificate is not accepted.
        AuthenticationFailed: the token cannot be read or is not accepted.
        Overloaded: the token's principal has too many connections at the peer.
        RemoteProtocolError: the peer speaks another protocol.
    """
    host, port = split_address(address)
    token = await dialing.read_token(address, ssl)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Link] = loop.create_future()

    def on_ready(link: Link) -> None:
        if not ready.done():
            ready.set_result(link)

    def on_lost(link: Link) -> None:
        if not ready.done():
            ready.set_exception(_connection_error(address, link))
            ready.exception()  # retrieved here, because the dial may have been cancelled

    link = Link(
        protocol,
        is_listener=False,
        write_backlog_bytes_max=write_backlog_bytes_max,
        owner=LinkOwner(on_ready=on_ready, on_lost=on_lost),
    )
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await dialing.connect(link.as_protocol, host, port, ssl)
                await ready
                if token is not None:
                    await dialing.send_token(link, token)
        except TimeoutError as error:
            raise Unreachable(
                f"{address} did not accept a connection, or did not send its hello message, within "
                f"{timeout_s} s"
            ) from error
        except OSError as error:
            kind = TlsFailed if isinstance(error, SSLError) else Unreachable
            raise kind(f"{address}: {tls.failure_text(error)}") from error
    except BaseException as error:
        dialing.log_rejection(address, error)
        # NB: the caller may be cancelled when the link is ready; then only this code can close it.
        link.abort("the attempt to connect was cancelled")
        raise
    return link


@dataclass(frozen=True, slots=True)
class LinkOwner:
    """The dial or listening port that creates a link.

    It is notified when the link opens and ends.
    """

    on_ready: "Callable[[Link], None]"
    on_lost: "Callable[[Link], None]"
    on_opened: "Callable[[Link], None]" = lambda _link: None
    access: "PortAccess | None" = None
    limits: LinkLimits | None = None


class Link:
    """One TCP connection that carries messages of one protocol."""

    def __init__(
        self,
        protocol: WireProtocol,
        *,
        is_listener: bool,
        write_backlog_bytes_max: int,
        owner: LinkOwner,
    ) -> None:
        assert write_backlog_bytes_max > WRITE_BACKLOG_BYTES_HIGH
        self.protocol = protocol
        self.address = ""
        # The access of a listener's peer; None without access control.
        self.access: ConnectionAccess | None = None
        self.closed_reason: str | None = None
        # The hard limit of unsent bytes (rule 4); the user of the link may change it.
        self.write_backlog_bytes_max = write_backlog_bytes_max
        self.bytes_sent = 0
        self.bytes_received = 0
        self._connection = Connection(protocol, is_listener=is_listener)
        self._is_listener = is_listener
        self._owner = owner
        self._has_messages = False  # the first message may be a token
        self._throttle: Throttle | None = None  # only for a principal with limits
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._on_messages: MessagesCallback | None = None
        self._on_closed: ClosedCallback | None = None
        self._on_drained: DrainedCallback | None = None
        # Messages that arrive before `start`, and events for callers that wait.
        self._inbox: list[Message] = []
        self._inbox_bytes = 0
        self._arrived_event = asyncio.Event()
        self._closed_event = asyncio.Event()
        self._drained_event = asyncio.Event()
        self._drained_event.set()
        self._is_paused_by_owner = False
        self._is_reading = True
        self._has_tls_failed = False
        # The state at the last tick.
        self._timer: asyncio.TimerHandle | None = None
        self._tick_sent = 0
        self._tick_received = 0
        self._tick_was_inside_frame = False
        self._idle_ticks = 0

    def as_protocol(self) -> asyncio.BufferedProtocol:
        """Return the protocol object that the event loop calls for this connection."""
        return _LinkProtocol(self)

    # ------------------------------------------------------------------ state

    @property
    def version(self) -> int | None:
        """The protocol version on which both peers agreed; None before the peer's hello."""
        return self._connection.version

    @property
    def peer(self) -> Hello | None:
        """The hello message of the peer; None before it has arrived."""
        return self._connection.peer

    @property
    def host(self) -> str:  # the host part of `address`
        return self.address.rpartition(":")[0]

    @property
    def is_unauthorized(self) -> bool:
        """Whether this is a listener's link whose peer has no permission (rule 9)."""
        return self.access is not None and not self.access.has_permission

    @property
    def incomplete_bytes(self) -> int:
        """The number of bytes of an incomplete frame that have arrived."""
        return self._connection.incomplete_bytes

    @property
    def is_closed(self) -> bool:
        """Whether the link is closed, or closing, so that it cannot send any more."""
        return self.closed_reason is not None

    def limit_write_buffer(self, high_bytes: int) -> None:
        """Set the number of unsent bytes above which the link is congested; the default is 1 MiB.

        If the hard limit is lower than twice this number, it rises to twice this number.
        """
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=high_bytes, low=high_bytes // 4)
        self.write_backlog_bytes_max = max(self.write_backlog_bytes_max, 2 * high_bytes)

    @property
    def is_congested(self) -> bool:
        """Whether there are too many unsent bytes, so the user should not produce more (rule 3)."""
        return not self._drained_event.is_set()

    @property
    def must_pause_feeds(self) -> bool:
        """Whether feeds must pause: the link is congested, or feed bytes are not yet paid for."""
        return self.is_congested or (self._throttle is not None and self._throttle.is_pausing_feeds)

    @property
    def write_backlog_bytes(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        if self._transport is None or self.is_closed:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def principal(self) -> str:
        """The principal of a listener's peer; `anonymous` without access control."""
        return ANONYMOUS if self.access is None else self.access.principal

    def proof_of(self, client_id: int) -> bytes:
        """Return the proof of a client ID that this server issues to the peer."""
        return NO_PROOF if self.access is None else self.access.proof_of(client_id)

    def denial(self, request: Message) -> WaltzError | None:
        """Return the error for a denied request; None for a permitted one (rule 8)."""
        return None if self.access is None else self.access.denial(request, self.version)

    def on_feeds_ended(self, partition_id: int) -> None:
        """The feeds of a partition have ended: stop counting them for the principal's limit."""
        if self._throttle is not None:
            self._throttle.on_feeds_ended(partition_id)

    def filter_permitted(self, requests: list[Message]) -> list[Message]:
        """Return the permitted requests, and answer the other requests with errors (rule 8)."""
        if self.access is None:
            return requests
        permitted = []
        for request in requests:
            error = self.access.denial(request, self.version)
            if error is None:
                permitted.append(request)
            else:
                self.send(authentication.rejected_answer(request, self.version, error))
        return permitted

    def audit_request(self, request: Message) -> "AuditedRequest | None":
        """Return the audit entry of a peer's request; None if the request is not audited."""
        return None if self.access is None else self.access.audit_request(request)

    # ------------------------------------------------------------------ receiving

    def start(
        self,
        on_messages: MessagesCallback,
        on_closed: ClosedCallback,
        on_drained: DrainedCallback | None = None,
    ) -> None:
        """Pass messages and the end of the link to callbacks from now on (rule 1).

        `on_drained` is called when a congestion ends, and when a pause of feeds ends.
        """
        assert self._on_messages is None
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._on_drained = on_drained
        if self._inbox:
            on_messages(self._take_inbox())
        if self._closed_event.is_set():
            assert self.closed_reason is not None
            on_closed(self.closed_reason)

    async def receive(self) -> list[Message]:
        """Wait for messages and return them, at least one.

        Raises Unreachable if the link is closed.
        """
        assert self._on_messages is None
        while not self._inbox:
            if self.is_closed:
                raise Unreachable(f"{self.address}: {self.closed_reason}")
            self._arrived_event.clear()
            await self._arrived_event.wait()
        return self._take_inbox()

    def pause_reading(self) -> None:
        """Stop reading, so that the peer must stop sending when the kernel's buffers are full."""
        self._is_paused_by_owner = True
        self._update_reading()

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""
        self._is_paused_by_owner = False
        self._update_reading()

    # ------------------------------------------------------------------ sending

    def send(self, message: Message) -> None:
        """Send a message; if the link is closed, drop the message (`on_closed` reports the end).

        The caller must not change the buffers of the message afterwards. Raises LocalProtocolError
        for a message that the agreed version cannot express.
        """
        if self.is_closed:
            return
        assert self._transport is not None
        buffers = self._connection.send(message)
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)
        self._count_sent(sum(map(len, buffers)))
        throttle = None if self.access is None else self._active_throttle()
        if throttle is not None:
            throttle.on_sent(message)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send messages in order with one system call; see `send`."""
        if self.is_closed:
            return
        assert self._transport is not None
        buffers = [buffer for message in messages for buffer in self._connection.send(message)]
        self._transport.write(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        self._count_sent(sum(map(len, buffers)))

    def send_frames(self, frames: bytes) -> None:
        """Send complete, encoded frames of a feed in the agreed version; see `send`."""
        if self.is_closed:
            return
        assert self._transport is not None
        self._transport.write(frames)
        self._count_sent(len(frames))
        throttle = self._active_throttle()
        if throttle is not None:
            throttle.on_feed_sent(len(frames))

    def _count_sent(self, size_bytes: int) -> None:
        assert self._transport is not None
        self.bytes_sent += size_bytes
        backlog_bytes = self._transport.get_write_buffer_size()
        if backlog_bytes > self.write_backlog_bytes_max:
            self.abort(f"the peer does not read: {backlog_bytes} bytes could not be sent")

    async def wait_drained(self) -> None:
        """Wait until the link is not congested any more, or is closed."""
        await self._drained_event.wait()

    # ------------------------------------------------------------------ closing

    def close(self, reason: str) -> None:
        """Close the link after all unsent bytes are sent, but within `CLOSE_S_MAX`."""
        if self.is_closed:
            return
        self.closed_reason = reason
        if self._transport is None:
            return
        self._transport.close()
        self._set_timer(CLOSE_S_MAX, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close the link immediately, and discard unsent bytes."""
        if not self.is_closed:
            self.closed_reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed and `on_closed` was called."""
        await self._closed_event.wait()

    # ------------------------------------------------------------------ private

    def _on_connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.address = tcp.peer_address(transport)
        if self._owner.access is not None:
            certificate = transport.get_extra_info("peercert")
            self.access = self._owner.access.add_connection(certificate, self.address, self.abort)
            self._connection.peer_frame_bytes_max = self._frame_bytes_max
        self._owner.on_opened(self)
        if self.is_closed:  # rejected, or the dial was cancelled meanwhile
            transport.abort()
            return
        tcp.set_options(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(
            high=WRITE_BACKLOG_BYTES_HIGH, low=WRITE_BACKLOG_BYTES_LOW
        )
        transport.write(self._connection.first_bytes())
        self._set_timer(HELLO_S_MAX, self._on_hello_timeout)

    def _on_connection_lost(self, error: Exception | None) -> None:
        if self.closed_reason is None:
            reason = tls.failure_text(error) if error else ""
            self.closed_reason = f"connection lost: {reason}" if error else "closed by the peer"
            if isinstance(error, SSLError):
                self.closed_reason, self._has_tls_failed = reason, True
            if isinstance(error, TimeoutError):  # the kernel's own probes of an idle connection
                _log.warning("net.peer_silent peer=%s error=%s", self.address, reason)
        self._set_timer(None, None)
        self._closed_event.set()
        self._arrived_event.set()
        self._drained_event.set()
        self._transport = None
        if self._throttle is not None:
            self._throttle.stop()
        if self._owner.access is not None and self.access is not None:
            self._owner.access.remove_connection(self.access)
        self._owner.on_lost(self)
        if self._on_closed is not None:
            self._on_closed(self.closed_reason)

    def _on_bytes_received(self, count: int) -> None:
        self.bytes_received += count
        incomplete_bytes = self.incomplete_bytes
        events = self._connection.buffer_updated(count)
        limits = self._owner.limits
        if limits is not None and incomplete_bytes != self.incomplete_bytes:
            limits.note_incomplete(self)
        if not events or self.is_closed:
            return
        if isinstance(events[0], HelloReceived):
            self._on_hello_received()
            del events[0]
        failed: RemoteProtocolError | None = None
        if events and isinstance(events[-1], ProtocolFailed):
            failed = events[-1].error
            del events[-1]
        messages = cast("list[Message]", events)  # hello and failure were removed
        if messages and not self._has_messages:
            messages = self._process_token(messages)
        if messages and not self.is_closed:
            self._deliver_or_throttle(messages, count)
        if failed is not None:
            self._close_after_error(failed)

    def _close_after_error(self, failed: RemoteProtocolError) -> None:
        """Close the link after a protocol error of the peer, and log the error."""
        if str(failed) != FOUND_TLS_TEXT:
            if tls.is_new_failure(self.host, tls.error_kind(str(failed))):
                _log.warning("net.protocol_error peer=%s error=%s", self.address, failed)
        elif self._is_listener:  # a dialer raises an exception
            tls.log_failure(self.host, FOUND_TLS_TEXT)
        self.abort(str(failed))

    def _frame_bytes_max(self) -> int:
        return SMALL_FRAME_BYTES_MAX if self.is_unauthorized else FRAME_BYTES_MAX

    def _process_token(self, messages: list[Message]) -> list[Message]:
        """Process the token, if a peer's first message is one (rule 7); return the other messages.

        From now on, the connection counts for its principal.
        """
        self._has_messages = True
        first = messages[0]
        is_token = self._is_listener and isinstance(first, authentication.CREDENTIAL_TYPES)
        credential = cast("authentication.Credential", first) if is_token else None
        try:
            if credential is not None:
                self._accept_token(credential)
            self._count_for_principal()
        except AuthenticationFailed as error:
            if tls.is_new_failure(self.host, str(error)):
                _log.warning("access.token_rejected peer=%s error=%s", self.host, error)
            if self.access is not None and credential is not None:
                self.access.on_token_rejected(credential, str(error))
            self._reject_connection(first, error)
            return []
        except Overloaded as error:
            self._reject_connection(first, error)
            return []
        if credential is None:
            return messages
        self.send(authentication.accepted_answer(credential))
        return messages[1:]

    def _count_for_principal(self) -> None:
        """Count the connection for its principal; raises Overloaded if the limit is exceeded."""
        if self.access is not None and self._owner.limits is not None:
            self.access.register_connection(partial(self._owner.limits.set_tenant, self))

    def _reject_connection(self, first: Message, error: WaltzError) -> None:
        """Answer the peer's first message with an error, and close the connection."""
        try:
            self.send(authentication.rejected_answer(first, self.version, error))
        except LocalProtocolError:  # a 0.13 client, which would connect again without a pause
            self.pause_reading()
            self._set_timer(CLOSE_S_MAX, lambda: self.abort(str(error)))
        else:
            self.close(str(error))

    def _accept_token(self, credential: authentication.Credential) -> None:
        """Set the principal from a token; raises AuthenticationFailed."""
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is None:
            raise AuthenticationFailed(
                "expected TLS, which is required to present a token; found plain TCP"
            )
        if self.access is not None:
            self.access.take_token(credential.token)

    def _on_hello_received(self) -> None:
        self._set_timer(_TICK_S if self.access is None else UNAUTHORIZED_S_MAX, self._on_tick)
        self._owner.on_ready(self)

    def _deliver_or_throttle(self, messages: list[Message], count: int) -> None:
        """Pass messages to the user, now or when the limits of their principal permit (rule 8)."""
        throttle = self._active_throttle()
        if throttle is None:
            self._deliver(messages, count)
        else:
            throttle.receive(messages)

    def _active_throttle(self) -> Throttle | None:
        """Return the link's throttle; None if its principal has never had limits."""
        has_limits = self.access is not None and self.access.quota is not None
        if self._throttle is None and has_limits:
            assert self.access is not None
            self._throttle = Throttle(self.access, self._deliver_throttled, self._resume_feeds)
        return self._throttle

    def _deliver_throttled(self, messages: list[Message]) -> None:
        if messages and not self.is_closed:
            self._deliver(messages, REQUEST_BYTES_MIN * len(messages))
        self._update_reading()

    def _deliver(self, messages: list[Message], count: int) -> None:
        if self._on_messages is not None:
            self._on_messages(messages)
            return
        self._inbox += messages
        self._inbox_bytes += count
        self._arrived_event.set()
        self._update_reading()

    def _take_inbox(self) -> list[Message]:
        messages = self._inbox
        self._inbox = []
        self._inbox_bytes = 0
        self._update_reading()
        return messages

    def _on_congestion_changed(self, *, is_congested: bool) -> None:
        if is_congested:
            self._drained_event.clear()
        else:
            self._drained_event.set()
        self._update_reading()
        if not is_congested:
            self._resume_feeds()

    def _resume_feeds(self) -> None:
        if self._on_drained is not None:
            self._on_drained()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        is_wanted = not (
            self._is_paused_by_owner
            or (self._throttle is not None and self._throttle.is_pausing)
            or self._inbox_bytes > _INBOX_BYTES_MAX
            or (self._is_listener and self.is_congested)
        )
        if is_wanted and not self._is_reading:
            self._tick_was_inside_frame = False  # this side did not read, so the peer was not slow
            transport.resume_reading()
        elif self._is_reading and not is_wanted:
            transport.pause_reading()
        self._is_reading = is_wanted

    def _on_hello_timeout(self) -> None:
        self.abort(f"expected the hello message of the peer within {HELLO_S_MAX} s")

    def _on_tick(self) -> None:
        """Enforce rules 5, 6 and 9; the timer calls this method every `_TICK_S`."""
        if self.is_unauthorized:
            self.abort(f"the connection was still unauthorized after {UNAUTHORIZED_S_MAX} s")
            return
        if not self._has_messages:
            try:  # otherwise silent connections would not count for a limit
                self._count_for_principal()
            except Overloaded as error:
                self.abort(str(error))
                return
        received = self.bytes_received - self._tick_received
        is_inside_frame = self._connection.is_inside_frame
        is_slow = is_inside_frame and self._tick_was_inside_frame
        self._idle_ticks = 0 if received or not self._is_reading else self._idle_ticks + 1
        if is_slow and received < _FRAME_BYTES_PER_TICK_MIN and self._is_reading:
            self.abort(f"a message arrived too slowly: {received} bytes in {_TICK_S} s")
            return
        if self._is_listener and self._idle_ticks > _IDLE_TICKS_MAX:
            self.abort(f"nothing was received for {int(_IDLE_TICKS_MAX * _TICK_S)} s")
            return
        assert self._transport is not None
        silence_ms = tcp.silence_ms(self._transport.get_extra_info("socket"))
        if silence_ms is not None:
            _log.warning("net.peer_silent peer=%s silent_ms=%d", self.address, silence_ms)
            self.abort(f"the host of the peer has acknowledged no packet for {silence_ms} ms")
            return
        if not self._is_listener and self.bytes_sent == self._tick_sent:
            self._transport.write(self._connection.keep_alive())
        self._tick_sent = self.bytes_sent
        self._tick_received = self.bytes_received
        self._tick_was_inside_frame = is_inside_frame
        self._set_timer(_TICK_S, self._on_tick)

    def _set_timer(self, delay_s: float | None, call: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None and call is not None:
            self._timer = self._loop.call_later(delay_s, call)


class _LinkProtocol(asyncio.BufferedProtocol):
    """The methods that the event loop calls; a class of its own hides them from users of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link._on_connection_made(cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._link._on_connection_lost(exc)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._link._connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._link._on_bytes_received(nbytes)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._link._on_congestion_changed(is_congested=True)

    def resume_writing(self) -> None:
        self._link._on_congestion_changed(is_congested=False)


def _connection_error(address: str, link: Link) -> WaltzError:
    """Return the error of a dial for a link that was closed before the peer's hello."""
    broken = link._connection.failure
    if broken is not None and str(broken) == FOUND_TLS_TEXT:
        return TlsFailed(f"{address}: {broken}. {dialing.TLS_HINT}")
    if link._has_tls_failed:
        return TlsFailed(f"{address}: {broken or link.closed_reason}")
    if broken is not None:
        return RemoteProtocolError(f"{address}: {broken}")
    return Unreachable(f"{address}: {link.closed_reason} before it sent its hello message")
