"""The clients of one server: their links, admission and routing of requests, and answers.

For every request, this module checks the limits of flow control, and passes the request to its
partition. If this server does not own the partition, the module answers with an error. Partitions
do not depend on links, and links do not depend on partitions.

Rules:
    1. Every request is answered: by a partition, by the process, or by an error.
    2. A link is read only while flow control permits further requests on it.
    3. A partition that has received a request of a connection is notified when the connection is
       congested, drained or closed. When the feeds of a principal pause because of its limit,
       partitions are notified that its connections are congested; flow control is not notified.
    4. For a 0.13 client (up to L 4) `legacy_client.py` translates the answers. If this module ends
       the connection, no further request of the client is processed.
    5. A denied request is rejected here, and no other module receives it (decision 048, AC 7). A
       request over a limit of its principal is also rejected here, unless it is an append. The
       partition rejects an append over a limit, because no later append may overtake it (AC 10).
    6. With an audit log, an administrative request begins only after its line was written. A second
       line contains the outcome of the request. The outcome is "unknown" if the connection is
       closed before the answer (AC 11).
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, cast

from waltz_core import errors
from waltz_core.legacy.legacy_client import (
    VERSION_MAX,
    EncodedFrames,
    EndConnection,
    InexpressibleError,
    LegacyClientAdapter,
    LegacyResponse,
)
from waltz_core.metrics import Metrics
from waltz_core.records.record import ClientId, PartitionId
from waltz_core.server.partition_events import (
    ConnectionClosed,
    ConnectionCongested,
    ConnectionDrained,
    ConnectionId,
    Event,
    SendToClient,
    error_answer,
)
from waltz_core.server.process.append_times import AppendTime
from waltz_core.server.process.flow_control import AdmittedRequest, FlowControl, FlowLimits
from waltz_core.server.process.registry_requests import RegistryRequests
from waltz_core.server.process.storage_links import TaskStarter
from waltz_core.transport.admission.audit_log import AuditedRequest
from waltz_core.transport.net import Link
from waltz_core.wire.append_ids import committed_ids_text
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    AppendBatch,
    AppendRequest,
    AppendResult,
    AppendTimesRequest,
    AppendTimesResponse,
    CheckConnectivityRequest,
    CheckConnectivityResponse,
    ClientIdRequest,
    ClientIdResponse,
    ClientMessage,
    ErrorResponse,
    ExpireRequest,
    FeedRequest,
    FlushRequest,
    FlushResponse,
    HighWaterMarkRequest,
    LockFailure,
    Message,
    MountRequest,
    MountResponse,
    MountState,
    MountWriter,
    ObjectReplacementRequest,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    RangeRequest,
    RegistryRequest,
    RegistryResponse,
    RejectionsRequest,
    RemovePreferredRequest,
    RemovePreferredResponse,
    ReplicasRequest,
    ServerPartitionsRequest,
    ServerPartitionsResponse,
    TransactionDataRequest,
)

_log = logging.getLogger(__name__)

# The interval of memory checks while connections are not read because of the memory limit.
_MEMORY_CHECK_INTERVAL_S: Final = 0.1
_APPEND_TYPES = (AppendBatch, AppendRequest)
_PARTITION_REQUEST_TYPES = (
    AppendBatch,
    AppendRequest,
    ExpireRequest,
    FeedRequest,
    FlushRequest,
    HighWaterMarkRequest,
    MountRequest,
    MountWriter,
    RangeRequest,
    ObjectReplacementRequest,
    RejectionsRequest,
    ReplicasRequest,
    TransactionDataRequest,
)


class PartitionHost(Protocol):
    """One partition: a `host.Host`, or a log in memory."""

    @property
    def partition_id(self) -> PartitionId:
        """The ID of the partition."""

    @property
    def is_open(self) -> bool:
        """Whether the partition accepts appends."""

    def post(self, event: Event) -> None:
        """Pass an event to the partition's machine."""

    def receive(
        self,
        connection: ConnectionId,
        message: ClientMessage,
        cost_bytes: int,
        *,
        principal: str = "",
        over_limit: errors.Overloaded | None = None,
    ) -> None:
        """Pass a client's request to the machine, with the fields of `RequestReceived`."""


class Backend(Protocol):
    """The server process, as its clients use it."""

    @property
    def hosts(self) -> Mapping[PartitionId, PartitionHost]:
        """The partitions that this server serves."""

    @property
    def partition_count(self) -> int:
        """The number of partitions in the cluster."""

    def append_times(self) -> Sequence[AppendTime]:
        """Return the append latencies of the storages over the last minute."""

    async def next_client_id(self) -> ClientId:
        """Issue a client ID that was never used before."""

    @property
    def registry(self) -> RegistryRequests | None:
        """The registry of exactly-once writes; None without ZooKeeper."""

    async def check_connectivity(self) -> Sequence[tuple[str, bool]]:
        """Try to connect to every storage of the replica assignment; return which have answered."""

    async def change_preferences(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> None:
        """Change the list of partitions of which this server is the preferred owner."""


@dataclass(slots=True)
class _ClientConnection:
    """One connected client."""

    link: Link
    legacy_client: LegacyClientAdapter | None
    hosts: dict[PartitionId, PartitionHost] = field(default_factory=dict)  # those with its requests
    is_feed_paused: bool = False  # Partitions send no feed on this connection (rule 3).
    is_reading: bool = True
    # The small answers of one turn of the event loop are sent together. A system call for each
    # answer would cost more than all other work for a single append.
    outbox: list[ClientMessage] = field(default_factory=list)
    # Audited requests (rule 6), by the `id` of the message. The entry keeps the message in memory
    # until the answer, so that no other message gets the same `id`.
    audited_requests: dict[int, tuple[ClientMessage, AuditedRequest]] = field(default_factory=dict)


class ClientConnections:
    """The connections of all clients, by the module's rules."""

    def __init__(
        self, backend: Backend, limits: FlowLimits, tasks: TaskStarter, metrics: Metrics
    ) -> None:
        self._backend = backend
        self._tasks = tasks
        self._metrics = metrics
        self._flow = FlowControl(limits)
        self._clients: dict[ConnectionId, _ClientConnection] = {}
        self._connection_ids = count(1)
        self._connections_to_flush: dict[ConnectionId, None] = {}
        # The requests that receive the result of the running connectivity check.
        self._connectivity_requests: list[tuple[ConnectionId, AdmittedRequest]] = []
        self._loop = asyncio.get_running_loop()
        self._memory_check_timer: asyncio.TimerHandle | None = None

    @property
    def memory_bytes(self) -> int:
        """The size of all requests and answers in progress, in bytes."""
        return self._flow.memory_bytes

    @property
    def count(self) -> int:
        """The number of connected clients."""
        return len(self._clients)

    @property
    def legacy_client_count(self) -> int:
        return sum(client.legacy_client is not None for client in self._clients.values())

    # -----------------------------------------------------------------------------------------
    # links

    def accept(self, link: Link) -> None:
        """Accept the link of a client that has connected."""
        connection = ConnectionId(next(self._connection_ids))
        version = link.version
        assert version is not None
        legacy_client = LegacyClientAdapter(version) if version <= VERSION_MAX else None
        if legacy_client is not None:
            _log.info("client.legacy_connected address=%s version=%d", link.address, version)
        self._clients[connection] = _ClientConnection(link, legacy_client)
        self._flow.open(connection)
        link.start(
            lambda messages: self._on_messages_received(connection, messages),
            lambda reason: self._on_link_closed(connection, reason),
            lambda: self._on_link_drained(connection),
        )

    def forget_partition(self, host: PartitionHost) -> None:
        """Remove a partition that this server no longer serves."""
        for client in self._clients.values():
            if client.hosts.get(host.partition_id) is host:
                del client.hosts[host.partition_id]
                client.link.on_feeds_ended(host.partition_id)

    def disconnect(self, connection: ConnectionId, reason: str) -> None:
        """Abort a connection if it is open; unsent answers are lost."""
        client = self._clients.get(connection)
        if client is not None:
            client.link.abort(reason)

    def pause(self) -> None:
        """Stop reading from all clients: the server is shutting down."""
        for client in self._clients.values():
            client.link.pause_reading()

    def _on_messages_received(self, connection: ConnectionId, messages: list[Message]) -> None:
        self._flow.receive(connection, cast("list[ClientMessage]", messages))
        self._admit_requests(connection)
        self._apply_memory_limit()

    def _on_link_drained(self, connection: ConnectionId) -> None:
        client = self._clients.get(connection)
        if client is None:
            return
        self._update_backlog(connection, client)
        if client.is_feed_paused and not client.link.must_pause_feeds:
            client.is_feed_paused = False
            for host in list(client.hosts.values()):
                host.post(ConnectionDrained(connection))
        self._admit_requests(connection)

    def _on_link_closed(self, connection: ConnectionId, reason: str) -> None:
        client = self._clients.pop(connection)
        _log.debug("client.disconnected address=%s reason=%s", client.link.address, reason)
        self._connections_to_flush.pop(connection, None)
        self._flow.close(connection)
        for _, audited in client.audited_requests.values():
            audited.end("unknown", "the connection was closed before the answer")
        for host in client.hosts.values():
            host.post(ConnectionClosed(connection))
        self._apply_memory_limit()

    # -----------------------------------------------------------------------------------------
    # answers

    def answer(self, effect: SendToClient) -> None:
        """Send an answer to a client; if it ends a request, free the bytes of this request."""
        connection = effect.connection
        client = self._clients.get(connection)
        if client is None:
            return
        audited = client.audited_requests.pop(id(effect.request), None)
        if audited is not None:
            _write_audit_outcome(audited[1], effect.message)
        if client.legacy_client is None:
            self._send_answer(connection, client, effect.message)
        else:
            translated = client.legacy_client.translate_response(
                effect.message, effect.request, self._loop.time()
            )
            if translated is not None:
                self._send_to_legacy_client(connection, client, translated)
        self._flow.on_answered(connection, effect.cost_bytes)
        if not self._connections_to_flush:
            # Send later: the caller is in the middle of a step.
            self._loop.call_soon(self._flush_answers)
        self._connections_to_flush[connection] = None

    def _send_answer(
        self, connection: ConnectionId, client: _ClientConnection, message: ClientMessage
    ) -> None:
        if isinstance(message, AppendResult):
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug(
                    "server.append_answered request=%s rows=%d committed=%s",
                    message.req_id,
                    len(message.reasons),
                    committed_ids_text(message),
                )
            client.outbox.append(message)
            return
        self._send_outbox(client)
        client.link.send(message)
        self._update_congestion(connection, client)

    def _send_to_legacy_client(
        self, connection: ConnectionId, client: _ClientConnection, answer: LegacyResponse
    ) -> None:
        match answer:
            case EncodedFrames():
                client.link.send_frames(answer.data)
                self._update_congestion(connection, client)
            case LockFailure() | FlushResponse():
                # The feed is about to send the transaction that these answers name. So the feed
                # must be sent before these answers.
                client.outbox.append(answer)
            case EndConnection():
                self._loop.call_later(
                    answer.after_s, self._close_after_answers, connection, answer.reason
                )
            case InexpressibleError():
                _log.warning(
                    "client.inexpressible_error address=%s error=%s",
                    client.link.address,
                    answer.text,
                )
            case _:
                self._send_answer(connection, client, answer)

    def _close_after_answers(self, connection: ConnectionId, reason: str) -> None:
        """Close a connection after its pending answers are sent."""
        client = self._clients.get(connection)
        if client is not None and not client.link.is_closed:
            _log.info(
                "client.legacy_connection_closed address=%s reason=%s", client.link.address, reason
            )
            self._send_outbox(client)
            client.link.close(reason)

    def _send_outbox(self, client: _ClientConnection) -> None:
        if client.outbox:
            outbox, client.outbox = client.outbox, []
            client.link.send_all(outbox)

    def _flush_answers(self) -> None:
        """Send the collected answers, and admit the requests that flow control permits now."""
        connections, self._connections_to_flush = self._connections_to_flush, {}
        for connection in connections:
            client = self._clients.get(connection)
            if client is not None and client.outbox:
                self._send_outbox(client)
                self._update_congestion(connection, client)
        for connection in connections:
            self._admit_requests(connection)
        self._apply_memory_limit()

    def _update_congestion(self, connection: ConnectionId, client: _ClientConnection) -> None:
        if client.link.must_pause_feeds and not client.is_feed_paused:
            client.is_feed_paused = True
            # Notify at once, because a partition may serve its feeds before the loop's next turn.
            for host in list(client.hosts.values()):
                host.post(ConnectionCongested(connection))
        self._update_backlog(connection, client)  # last: flow control must see the congestion, too

    def _update_backlog(self, connection: ConnectionId, client: _ClientConnection) -> None:
        self._flow.note_backlog(
            connection, client.link.write_backlog_bytes, is_congested=client.link.is_congested
        )

    # -----------------------------------------------------------------------------------------
    # requests

    def _admit_requests(self, connection: ConnectionId) -> None:
        for request in self._flow.admit(connection):
            self._dispatch(connection, request)
        self._update_reading(connection)

    def _apply_memory_limit(self) -> None:
        """Apply the memory limit.

        Read the present backlogs first, because no event reports that a backlog has decreased.
        """
        if self._flow.is_over_limit and self._memory_check_timer is None:
            self._update_backlogs()
        for connection in self._flow.apply_memory_limit():
            self._admit_requests(connection)
        if self._flow.has_paused_connections and self._memory_check_timer is None:
            self._memory_check_timer = self._loop.call_later(
                _MEMORY_CHECK_INTERVAL_S, self._recheck_memory_limit
            )

    def _recheck_memory_limit(self) -> None:
        self._memory_check_timer = None
        self._update_backlogs()
        self._apply_memory_limit()

    def _update_backlogs(self) -> None:
        for connection, client in self._clients.items():
            self._update_backlog(connection, client)

    def _update_reading(self, connection: ConnectionId) -> None:
        client = self._clients.get(connection)
        if client is None:
            return
        may_read = self._flow.may_read(connection)
        if may_read == client.is_reading:
            return
        client.is_reading = may_read
        if may_read:
            client.link.resume_reading()
        else:
            client.link.pause_reading()

    def _dispatch(self, connection: ConnectionId, request: AdmittedRequest) -> None:
        client = self._clients.get(connection)
        if client is None or client.link.is_closed:
            return
        message = request.message
        if isinstance(message, _APPEND_TYPES) and _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "server.append_received request=%s client=%s", message.req_id, client.link.address
            )
        if client.legacy_client is not None:
            end = client.legacy_client.check_request(message, self._loop.time())
            if end is not None:
                self._close_after_answers(connection, end.reason)
                return
        denial, over_limit = client.link.denial(message), None
        if denial is not None:  # rule 5
            if isinstance(denial, errors.Overloaded) and isinstance(message, _APPEND_TYPES):
                over_limit = denial
            else:
                answer = error_answer(
                    connection, message.req_id, request.cost_bytes, denial, message
                )
                self.answer(answer)
                return
        audited = client.link.audit_request(message)
        if audited is None:
            self._route_request(connection, client, request, over_limit)
        else:
            client.audited_requests[id(message)] = message, audited
            audited.begin(partial(self._on_audit_line_written, connection, request))

    def _on_audit_line_written(
        self, connection: ConnectionId, request: AdmittedRequest, error: errors.WaltzError | None
    ) -> None:
        """Process a request whose audit line was written; reject it if writing failed (rule 6)."""
        client, message = self._clients.get(connection), request.message
        if client is None or client.link.is_closed or client.link.access is None:
            return
        if client.link.access.may_begin(error):
            self._route_request(connection, client, request)
            return
        assert error is not None
        self.answer(error_answer(connection, message.req_id, request.cost_bytes, error, message))

    def _route_request(
        self,
        connection: ConnectionId,
        client: _ClientConnection,
        request: AdmittedRequest,
        over_limit: errors.Overloaded | None = None,
    ) -> None:
        message = request.message
        if not isinstance(message, _PARTITION_REQUEST_TYPES):
            self._serve_server_request(connection, request)
            return
        partition_id = message.req_id.partition_id
        host = self._backend.hosts.get(partition_id)
        if host is None:
            self.answer(self._rejection_answer(connection, request))
            return
        if client.hosts.get(partition_id) is not host:
            client.hosts[partition_id] = host
            if client.is_feed_paused:
                host.post(ConnectionCongested(connection))
        principal = ""
        if isinstance(message, MountRequest | MountWriter):
            access = client.link.access
            principal = "" if access is None else access.bound_principal(message)
        host.receive(
            connection, message, request.cost_bytes, principal=principal, over_limit=over_limit
        )

    def _rejection_answer(self, connection: ConnectionId, request: AdmittedRequest) -> SendToClient:
        """Build the answer to a request for a partition that this server does not serve."""
        message, cost_bytes = request
        partition_id = message.req_id.partition_id
        if not 0 <= partition_id < self._backend.partition_count:
            error: errors.WaltzError = errors.UnknownPartition(
                f"there is no partition {partition_id}: the cluster has partitions "
                f"0..{self._backend.partition_count - 1}"
            )
        elif isinstance(message, MountRequest):
            return SendToClient(
                connection, MountResponse(message.req_id, MountState.NOT_READY), cost_bytes
            )
        else:
            error = errors.NotOwned(f"this server does not own partition {partition_id}")
        return error_answer(connection, message.req_id, cost_bytes, error, message)

    def _serve_server_request(self, connection: ConnectionId, request: AdmittedRequest) -> None:
        """Answer a request that is for the server and not for a partition."""
        message, cost_bytes = request
        answer: ClientMessage
        if isinstance(message, ServerPartitionsRequest):
            answer = ServerPartitionsResponse(message.req_id, tuple(sorted(self._backend.hosts)))
        elif isinstance(message, PartitionsHealthRequest):
            partition_states = tuple(
                (partition_id, host.is_open)
                for partition_id, host in sorted(self._backend.hosts.items())
            )
            answer = PartitionsHealthResponse(message.req_id, partition_states)
        elif isinstance(message, AppendTimesRequest):
            append_times = self._backend.append_times()
            answer = AppendTimesResponse(
                message.req_id,
                tuple(append_time.replica for append_time in append_times),
                tuple(append_time.second_count for append_time in append_times),
                tuple(append_time.median_us for append_time in append_times),
            )
        elif isinstance(message, CheckConnectivityRequest):
            self._connectivity_requests.append((connection, request))
            if len(self._connectivity_requests) == 1:
                self._tasks.create_task(self._check_connectivity())
            return
        elif isinstance(message, AddPreferredRequest | RemovePreferredRequest):
            self._tasks.create_task(self._change_preferences(connection, message, cost_bytes))
            return
        elif isinstance(message, ClientIdRequest):
            self._tasks.create_task(self._issue_client_id(connection, message, cost_bytes))
            return
        elif isinstance(message, RegistryRequest) and self._backend.registry is not None:
            link = self._clients[connection].link
            answer_coroutine = self._backend.registry.answer(
                message, link.access, is_closed=lambda: link.is_closed
            )
            self._tasks.create_task(self._serve_registry(connection, request, answer_coroutine))
            return
        else:
            error_text = f"a server accepts no {type(message).__name__} as a request"
            error = errors.BadRequest(error_text)
            self.answer(error_answer(connection, message.req_id, cost_bytes, error, message))
            return
        self.answer(SendToClient(connection, answer, cost_bytes, message))

    async def _check_connectivity(self) -> None:
        reachable = tuple(await self._backend.check_connectivity())
        checks, self._connectivity_requests = self._connectivity_requests, []
        for connection, (message, cost_bytes) in checks:
            answer = CheckConnectivityResponse(message.req_id, reachable)
            self.answer(SendToClient(connection, answer, cost_bytes, message))

    async def _issue_client_id(
        self, connection: ConnectionId, message: ClientIdRequest, cost_bytes: int
    ) -> None:
        client = self._clients.get(connection)
        if client is None:
            return
        try:
            if client.link.access is not None:
                client.link.access.charge_client_id()
            client_id = await self._backend.next_client_id()
        except errors.WaltzError as error:
            self.answer(error_answer(connection, message.req_id, cost_bytes, error, message))
            return
        client = self._clients.get(connection)
        if client is not None:
            answer = ClientIdResponse(message.req_id, client_id, client.link.proof_of(client_id))
            self.answer(SendToClient(connection, answer, cost_bytes))

    async def _serve_registry(
        self,
        connection: ConnectionId,
        request: AdmittedRequest,
        answer_coroutine: Coroutine[Any, Any, RegistryResponse],
    ) -> None:
        message, cost_bytes = request
        try:
            answer = await answer_coroutine
        except errors.WaltzError as error:
            self.answer(error_answer(connection, message.req_id, cost_bytes, error, message))
            return
        except Exception as error:  # noqa: BLE001 - a request must not end the server
            _log.exception("client.request_failed request=%s", type(message).__name__)
            internal_error = errors.WaltzError(
                f"the server failed to process the request: {error!r:.200}"
            )
            self.answer(
                error_answer(connection, message.req_id, cost_bytes, internal_error, message)
            )
            return
        self.answer(SendToClient(connection, answer, cost_bytes))

    async def _change_preferences(
        self,
        connection: ConnectionId,
        message: AddPreferredRequest | RemovePreferredRequest,
        cost_bytes: int,
    ) -> None:
        """Change the preferences; answer False if a partition is unknown or none is given."""
        count = self._backend.partition_count
        partition_ids = [PartitionId(number) for number in message.partitions]
        is_done = bool(partition_ids) and all(0 <= number < count for number in partition_ids)
        is_added = isinstance(message, AddPreferredRequest)
        try:
            if is_done:
                await self._backend.change_preferences(
                    partition_ids if is_added else (), () if is_added else partition_ids
                )
        except errors.WaltzError as error:
            self.answer(error_answer(connection, message.req_id, cost_bytes, error, message))
            return
        answer = AddPreferredResponse if is_added else RemovePreferredResponse
        self.answer(SendToClient(connection, answer(message.req_id, is_done), cost_bytes, message))


def _write_audit_outcome(audited: AuditedRequest, answer: ClientMessage) -> None:
    if isinstance(answer, ErrorResponse):
        audited.end("rejected", answer.message)
    else:
        audited.end("done")
