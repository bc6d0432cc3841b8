"""The client's connections: at most two to each server, shared by all partitions that it owns.

A connection carries the messages of many partitions. This module routes each message to its
receiver, by request ID and partition.

Rules:
    1. A request that is not an append has a negative sequence number. So its answer is never
       mistaken for the answer to an append. Streams use numbers down to `CONTROL_SEQUENCE_MIN`;
       this file uses lower numbers.
    2. Each wait for an answer has a timeout, and fails when the connection breaks.
    3. Callers that need a connection to the same address share one attempt to connect. If the
       caller that started the attempt is cancelled, one of the waiting callers starts another
       attempt.
    4. Large answers use a second connection. On a shared connection, a range in transit would delay
       every message after it. Also, while the client does not read the answers on a connection, the
       server reads no appends from this connection. Each of the two connections is opened when it
       is first needed (docs/decisions/014).
    5. For a 0.13 server, this module translates the messages of streams between stream and socket
       (`legacy/legacy_server_link.py`). Other requests are not translated: their senders check the
       server's version.
    6. If a server does not answer and sends nothing, it is `silent`. A silent server may be frozen,
       and its partitions may have moved long before the waiting caller times out. Each silence is
       logged once (`silent_servers.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Container
from ssl import SSLContext
from typing import NamedTuple, cast

from waltz_core import errors
from waltz_core.client.links import silent_servers
from waltz_core.client.links.legacy_server import LegacyServer
from waltz_core.client.links.pending_requests import AnswerT, PendingRequests
from waltz_core.client.links.silent_servers import SilenceWatch, SilentServers
from waltz_core.legacy import legacy_server_stream
from waltz_core.records.record import PartitionId, ReqId
from waltz_core.transport import net
from waltz_core.wire.messages import (
    AppendFollowing,
    ClientIdRequest,
    ClientMessage,
    Message,
    RegistryRequest,
    RejectionsRequest,
    WireProtocol,
)

_log = logging.getLogger(__name__)

_DIAL_NUMBER = 0  # all dials have this number; connections have the numbers from 1 on

MessageCallback = Callable[[int, ClientMessage], None]
LostCallback = Callable[[int, str], None]
IsWaiting = Callable[[], bool]
# Checks whether the server still owns the partition at the generation of the mount.
OwnershipCheck = Callable[[Callable[[bool], None]], None]
_LinkKey = tuple[
    str, bool
]  # the server's address, and whether it is the connection for large answers


class _Stream(NamedTuple):
    """The receiver of one partition's messages."""

    on_message: MessageCallback
    on_lost: LostCallback
    check_ownership: OwnershipCheck


class ServerLink:
    """One connection to one server, with the streams of partitions and with requests."""

    def __init__(
        self,
        number: int,
        link: net.Link,
        *,
        on_closed: Callable[["ServerLink"], None],
        silent_servers: SilentServers,
    ) -> None:
        self.number = number
        self._link = link
        self._on_closed = on_closed
        self._answers = PendingRequests(link)
        self._watch = SilenceWatch(silent_servers, link.address, number, self._is_waiting)
        self._streams: dict[int, _Stream] = {}
        self._waiting_checks: dict[int, IsWaiting] = {}
        self._close_after_s: float | None = None
        self.is_legacy_server = (link.version or 0) <= legacy_server_stream.VERSION_MAX
        self._legacy_server = (
            LegacyServer(link, self._deliver_message, self._check_ownership)
            if self.is_legacy_server
            else None
        )
        link.start(self._on_messages_received, self._on_connection_closed)

    @property
    def is_closed(self) -> bool:
        """Whether the connection can send no more messages."""
        return self._link.is_closed

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def supports_pipelining(self) -> bool:
        """Whether the server supports pipelined dependent appends."""
        return (self._link.version or 0) >= AppendFollowing.since

    @property
    def supports_registry(self) -> bool:
        """Whether the server carries out operations on the registry of exactly-once writes."""
        return (self._link.version or 0) >= RegistryRequest.since

    @property
    def issues_client_ids(self) -> bool:
        """Whether the server issues client IDs, and can return the rows of a single client ID."""
        return (self._link.version or 0) >= ClientIdRequest.since

    @property
    def reports_rejections(self) -> bool:
        """Whether the server reports the newest rejections of a partition."""
        return (self._link.version or 0) >= RejectionsRequest.since

    def attach_stream(
        self,
        partition_id: int,
        on_message: MessageCallback,
        on_lost: LostCallback,
        is_waiting: IsWaiting,
        check_ownership: OwnershipCheck,
    ) -> None:
        """Pass messages of a partition to its stream from now on, except answers to `request`.

        `check_ownership` checks whether the server owns the partition now. Only links to a 0.13
        server use it.
        """
        self._streams[partition_id] = _Stream(on_message, on_lost, check_ownership)
        self._waiting_checks[partition_id] = is_waiting

    def release_stream(self, partition_id: int) -> None:
        """The stream now uses another link, but still receives late answers on this link."""
        self._waiting_checks.pop(partition_id, None)
        self._close_if_unused()

    def detach_stream(self, partition_id: int) -> None:
        """The partition's stream has ended: pass no more messages to it."""
        self._streams.pop(partition_id, None)
        self.release_stream(partition_id)

    def retire(self, close_after_s: float) -> None:
        """Close the connection when all streams have left it, after a time for late answers."""
        self._close_after_s = close_after_s
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._close_after_s is not None and not self._waiting_checks and not self.is_closed:
            loop = asyncio.get_running_loop()
            loop.call_later(self._close_after_s, self._link.close, "replaced by a newer connection")

    def send(self, message: ClientMessage) -> None:
        """Send a message of a stream; a closed connection calls the stream's `on_lost`."""
        if self._legacy_server is None:
            self._link.send(message)
        else:
            self._legacy_server.send(message)
        self._watch.start()

    async def request(
        self,
        answer: type[AnswerT],
        make_request: Callable[[ReqId], ClientMessage],
        *,
        client_id: int,
        partition_id: int,
        timeout_s: float,
    ) -> AnswerT:
        """Send a request and return its answer; see `PendingRequests.request`."""
        self._watch.start()
        return await self._answers.request(
            answer,
            make_request,
            client_id=client_id,
            partition_id=partition_id,
            timeout_s=timeout_s,
        )

    def _is_waiting(self) -> bool:
        return self._answers.has_waiting_callers or any(
            is_partition_waiting() for is_partition_waiting in self._waiting_checks.values()
        )

    def _on_messages_received(self, received: list[Message]) -> None:
        self._watch.on_data_received()
        partition_messages = [
            message
            for message in cast("list[ClientMessage]", received)
            if not self._answers.try_complete(message)
        ]
        if self._legacy_server is not None:
            self._legacy_server.on_received(partition_messages)
            return
        for message in partition_messages:
            self._deliver_message(message)

    def _deliver_message(self, message: ClientMessage) -> None:
        stream = self._streams.get(message.req_id.partition_id)
        if stream is not None:
            stream.on_message(self.number, message)

    def _check_ownership(self, partition_id: PartitionId, answer: Callable[[bool], None]) -> None:
        stream = self._streams.get(partition_id)
        if stream is not None:
            stream.check_ownership(answer)

    def close(self, reason: str) -> None:
        """Close the connection when all unsent messages are sent."""
        self._link.close(reason)

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await self._link.wait_closed()

    def _on_connection_closed(self, reason: str) -> None:
        self._watch.end(reason)
        if self._legacy_server is not None:
            self._legacy_server.stop()
        self._answers.fail(reason)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.on_lost(self.number, reason)
        self._on_closed(self)


class ServerLinks:
    """The connections of one client, by server address and purpose."""

    def __init__(
        self,
        *,
        dial_timeout_s: float,
        late_answers_s: float,
        mark_suspect: Callable[[], None] | None = lambda: None,
        ssl: SSLContext | None = None,
    ) -> None:
        self._silent_servers = SilentServers(mark_suspect)
        self._dial_timeout_s = dial_timeout_s
        self._late_answers_s = late_answers_s
        self._ssl = ssl
        self._links: dict[_LinkKey, ServerLink] = {}
        self._open: dict[int, ServerLink] = {}
        self._dialing: dict[_LinkKey, asyncio.Future[None]] = {}
        self._count = 0
        self._logged_legacy_servers: set[str] = set()  # 0.13 servers that are logged already
        self._is_closed = False

    async def get(
        self, address: str, *, is_bulk: bool = False, excluded: Container[int] = ()
    ) -> ServerLink:
        """Return an open connection to a server that is not in `excluded`; dial if there is none.

        With `is_bulk`, this is the connection for large answers (rule 4). Raises Unreachable, or
        RemoteProtocolError if the peer uses another protocol.
        """
        key = (address, is_bulk)
        while True:
            link = self._links.get(key)
            if link is not None and not link.is_closed:
                if link.number not in excluded:
                    return link
                link.retire(self._late_answers_s)
                del self._links[key]
            current_dial = self._dialing.get(key)
            if current_dial is None:
                return await self._dial_shared(key)
            # NB: if a task that awaits a future is cancelled, the future is cancelled, too; `wait`
            # prevents this.
            await asyncio.wait([current_dial])
            if not current_dial.cancelled():
                current_dial.result()

    async def _dial_shared(self, key: _LinkKey) -> ServerLink:
        """Dial; callers that need the same connection meanwhile share the outcome (rule 3)."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialing[key] = outcome
        silence_timer = self._watch_dial(key[0])
        try:
            link = await self._dial(key)
        except errors.WaltzError as error:
            self._silent_servers.on_wait_ended(key[0], _DIAL_NUMBER, error)
            outcome.set_exception(error)
            outcome.exception()  # retrieved here, as there may be no waiting caller
            raise
        else:
            self._silent_servers.on_data_received(key[0], _DIAL_NUMBER)
            outcome.set_result(None)
            return link
        finally:
            silence_timer.cancel()
            self._silent_servers.on_wait_ended(
                key[0], _DIAL_NUMBER, "the attempt to connect was cancelled"
            )  # no effect if the end was reported above
            del self._dialing[key]
            outcome.cancel()  # no effect if it is done; otherwise the dial was cancelled

    def _watch_dial(self, address: str) -> asyncio.TimerHandle:
        """Report a server that sends no hello in time (rule 6); the caller cancels the timer."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        return loop.call_later(
            silent_servers.SILENCE_CHECK_S,
            lambda: self._silent_servers.on_silence_detected(
                address, _DIAL_NUMBER, since_s=began_s
            ),
        )

    async def dial_unshared(self, address: str) -> net.Link:
        """Return a connection that is not shared; the caller must close it.

        Raises Unreachable, or RemoteProtocolError.
        """
        return await net.dial(
            WireProtocol.CLIENT, address, timeout_s=self._dial_timeout_s, ssl=self._ssl
        )

    async def _dial(self, key: _LinkKey) -> ServerLink:
        address = key[0]
        link = await self.dial_unshared(address)
        if self._is_closed:
            link.abort("the client was closed")
            raise errors.Unreachable(f"{address}: the client was closed")
        self._count += 1
        server_link = ServerLink(
            self._count,
            link,
            on_closed=lambda closed_link: self._remove_link(key, closed_link),
            silent_servers=self._silent_servers,
        )
        if server_link.is_closed:  # closed after the hello: no handler would be notified
            raise errors.Unreachable(f"{address}: {link.closed_reason}")
        self._links[key] = self._open[server_link.number] = server_link
        if server_link.is_legacy_server and address not in self._logged_legacy_servers:
            self._logged_legacy_servers.add(address)
            _log.warning(
                "client.legacy_server server=%s version=%d see=docs/compatibility.md",
                address,
                link.version,
            )
        return server_link

    async def close(self, reason: str) -> None:
        """Close all connections, and wait until they are closed."""
        self._is_closed = True
        links = list(self._open.values())
        for link in links:
            link.close(reason)
        for link in links:
            await link.wait_closed()

    def _remove_link(self, key: _LinkKey, link: ServerLink) -> None:
        self._open.pop(link.number, None)
        if self._links.get(key) is link:
            del self._links[key]
