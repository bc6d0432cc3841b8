"""The clients of a server: which of their requests reach a partition."""

import asyncio
import weakref
from types import SimpleNamespace

from tests.loops import pass_time, poll_until, run_on_loop, run_on_virtual_loop
from tests.unit.server.test_partition import BOB, world_with_mount
from waltz_core.driver import Driver
from waltz_core.errors import Overloaded, PermissionDenied
from waltz_core.metrics import Metrics
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.server.partition_events import (
    ConnectionCongested,
    ConnectionDrained,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.process.clients import ClientConnections
from waltz_core.server.process.flow_control import FlowLimits
from waltz_core.wire.messages import (
    AppendRequest,
    CheckConnectivityRequest,
    CheckConnectivityResponse,
    ClientIdRequest,
    ErrorResponse,
    ExpireRequest,
    ExpireResponse,
    FeedBatch,
    FlushRequest,
    FlushResponse,
    Mounted,
    MountWriter,
    TransactionDataRequest,
    WireProtocol,
)

LIMITS = FlowLimits(2, 1 << 20, 1 << 30, 1 << 20)


class Link:
    """A connection whose client reads nothing from the first answer on."""

    def __init__(self) -> None:
        self.version, self.address = max(WireProtocol.CLIENT.versions_accepted), "a:1"
        self.is_closed = False
        self.is_congested, self.write_backlog_bytes, self.is_read = False, 0, True
        self.is_over_limit, self.access = False, None
        self.sent, self.denied, self.ended_feeds = [], {}, []

    @property
    def must_pause_feeds(self) -> bool:
        return self.is_congested or self.is_over_limit

    def denial(self, request):
        return self.denied.get(type(request))

    def audit_request(self, _request):
        return None

    def on_feeds_ended(self, partition_id) -> None:
        self.ended_feeds.append(partition_id)

    def start(self, received, closed, drained) -> None:
        self.received, self.closed, self.drained = received, closed, drained

    def send(self, message) -> None:
        self.sent.append(message)
        self.is_congested, self.write_backlog_bytes = True, 1 << 20

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class Host:
    """A partition that records the requests that it receives."""

    partition_id = PartitionId(0)
    is_open = True

    def __init__(self) -> None:
        self.received_requests, self.over_limit, self.events = [], [], []

    def post(self, event) -> None:
        self.events.append(type(event))

    def receive(self, connection, message, cost_bytes, *, principal="", over_limit=None) -> None:
        self.received_requests.append((connection, message, cost_bytes))
        self.over_limit.append(over_limit)


class Backend:
    partition_count = 1

    def __init__(self) -> None:
        self.host = Host()
        self.hosts = {self.host.partition_id: self.host}
        self.check_count = 0
        self.may_end = asyncio.Event()

    async def check_connectivity(self):
        self.check_count += 1
        await self.may_end.wait()
        return [("s:1", True)]


@run_on_loop
async def test_a_client_that_does_not_read_is_paused():
    backend, link = Backend(), Link()
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    requests = [
        FlushRequest(ReqId(ClientId(1), Generation(1), PartitionId(0), -each)) for each in (1, 2, 3)
    ]
    link.received(requests)
    received_requests = backend.host.received_requests
    assert [message for _, message, _ in received_requests] == requests[:2]
    connection, message, cost_bytes = received_requests[0]
    clients.answer(SendToClient(connection, FlushResponse(message.req_id, 0), cost_bytes))
    await asyncio.sleep(0)
    assert len(received_requests) == 2
    link.is_congested = False
    link.drained()
    assert [message for _, message, _ in received_requests] == requests


@run_on_loop
async def test_a_denied_request_reaches_no_partition_and_frees_its_slot():
    backend, link = Backend(), Link()
    link.denied[AppendRequest] = PermissionDenied("no")
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    ids = [ReqId(ClientId(1), Generation(1), PartitionId(0), number) for number in range(5)]
    link.received([AppendRequest(req_id, 0, (), (), (), 0, b"", 0) for req_id in ids])
    link.is_congested = False
    link.drained()
    await poll_until(lambda: len(link.sent) == 4)  # the client reads slowly
    link.is_congested = False
    link.drained()
    assert link.sent == [
        ErrorResponse(req_id, PermissionDenied.code, False, "no") for req_id in ids
    ]
    link.is_congested = False
    link.drained()
    flush = FlushRequest(ids[0])
    link.received([flush])
    assert [message for _, message, _ in backend.host.received_requests] == [flush]


@run_on_loop
async def test_a_principal_over_its_client_id_limit_gets_no_further_id():
    class Access:
        def charge_client_id(self):
            raise Overloaded("no ID", 10)

    class Issuing(Backend):
        async def next_client_id(self):
            return ClientId(5)

    link = Link()
    link.access = Access()
    async with asyncio.TaskGroup() as tasks:
        clients = ClientConnections(Issuing(), LIMITS, tasks, Metrics("server"))
        clients.accept(link)
        link.received([ClientIdRequest(ReqId(ClientId(-1), Generation(0), PartitionId(-1), -1))])
        await poll_until(lambda: link.sent)
    (answer,) = link.sent
    assert (answer.error_code, answer.retry_after_ms) == (Overloaded.code, 10)


@run_on_loop
async def test_a_connection_that_is_closed_at_once_gets_no_client_id():
    """The ID would not be charged to a principal, and there are only 2^30 IDs for all clients."""
    issued = []

    class Issuing(Backend):
        async def next_client_id(self):
            issued.append(1)
            return ClientId(5)

    link = Link()
    async with asyncio.TaskGroup() as tasks:
        clients = ClientConnections(Issuing(), LIMITS, tasks, Metrics("server"))
        clients.accept(link)
        link.received([ClientIdRequest(ReqId(ClientId(-1), Generation(0), PartitionId(-1), -1))])
        link.closed("gone")
    assert issued == []


@run_on_loop
async def test_an_append_over_a_limit_reaches_its_partition_but_other_requests_do_not():
    backend, link = Backend(), Link()
    error = Overloaded("etl is over a limit", 700)
    link.denied = {AppendRequest: error, FlushRequest: error}
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    req_id = ReqId(ClientId(1), Generation(1), PartitionId(0), 5)
    append = AppendRequest(req_id, 0, (), (), (), 0, b"", 0)
    link.received([append, FlushRequest(req_id)])
    await poll_until(lambda: link.sent)
    assert [message for _, message, _ in backend.host.received_requests] == [append]
    assert backend.host.over_limit == [error]
    assert link.sent == [
        ErrorResponse(req_id, Overloaded.code, True, "etl is over a limit", retry_after_ms=700)
    ]


@run_on_loop
async def test_a_limit_pauses_feeds_but_not_requests():
    class ReadLink(Link):
        def send(self, message) -> None:
            self.sent.append(message)

    backend, link = Backend(), ReadLink()
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    flush = FlushRequest(ReqId(ClientId(1), Generation(1), PartitionId(0), -1))
    link.received([flush])
    (connection, _, cost_bytes), host = backend.host.received_requests[0], backend.host
    link.is_over_limit = True
    clients.answer(SendToClient(connection, FlushResponse(flush.req_id, 0), cost_bytes))
    await poll_until(lambda: host.events)
    assert host.events == [ConnectionCongested]
    link.received([flush])
    assert len(host.received_requests) == 2
    link.is_congested = True
    link.is_over_limit = False
    link.drained()
    assert host.events == [ConnectionCongested]  # the client does not read
    link.is_congested = False
    link.drained()
    assert host.events == [ConnectionCongested, ConnectionDrained]


@run_on_loop
async def test_a_limit_pauses_a_feed_after_the_frame_that_exceeds_the_limit():
    """A commit sends a frame at once, although a wake-up for the next frame is already due."""

    class LimitedLink(Link):
        def send(self, message) -> None:
            self.sent.append(type(message))
            self.is_over_limit |= isinstance(message, FeedBatch)

    world, link = world_with_mount(feed_frame_count_max=2), LimitedLink()
    world.fill(6)

    def perform(effect) -> None:
        if isinstance(effect, SendToClient):
            clients.answer(effect)

    def receive(connection, message, cost_bytes, **_options) -> None:
        driver.post(RequestReceived(connection, message, cost_bytes, 1_000))

    driver = Driver(world.partition, perform)
    partition_id = PartitionId(0)
    host = SimpleNamespace(partition_id=partition_id, post=driver.post, receive=receive)
    backend = SimpleNamespace(partition_count=1, hosts={partition_id: host})
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    world.step = driver.post
    link.received([MountWriter(world.req_id(BOB), 1, -1, wants_feed=True)])
    await pass_turns()
    assert link.sent == [FeedBatch]
    world.append()
    await pass_turns()
    link.is_over_limit = False
    link.drained()
    world.commit()
    await pass_turns()
    assert link.sent == [FeedBatch] * 2
    link.is_over_limit = False
    link.drained()
    await pass_turns()
    assert link.sent == [FeedBatch] * 3 + [Mounted]


async def pass_turns() -> None:
    """Let all ready callbacks and tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


@run_on_loop
async def test_feeds_of_a_moved_partition_do_not_count_towards_limits():
    backend, link = Backend(), Link()
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    link.received([FlushRequest(ReqId(ClientId(1), Generation(1), PartitionId(0), -1))])
    clients.forget_partition(backend.host)
    assert link.ended_feeds == [PartitionId(0)]


@run_on_loop
async def test_concurrent_connectivity_checks_are_shared():
    """Each check connects to every storage, and file descriptors are limited."""
    backend, links = Backend(), [Link(), Link()]
    async with asyncio.TaskGroup() as tasks:
        clients = ClientConnections(backend, LIMITS, tasks, Metrics("server"))
        ids = [ReqId(ClientId(1), Generation(0), PartitionId(0), -each) for each in (1, 2)]
        for link in links:
            clients.accept(link)
            link.received([CheckConnectivityRequest(req_id) for req_id in ids])
        await poll_until(lambda: backend.check_count)
        backend.may_end.set()
    assert backend.check_count == 1
    answers = [CheckConnectivityResponse(req_id, (("s:1", True),)) for req_id in ids]
    assert [link.sent for link in links] == [answers, answers]


class AuditedRequest:
    """A request in the audit log, whose lines are written at once."""

    def __init__(self) -> None:
        self.outcomes = []

    def begin(self, on_begun) -> None:
        on_begun(None)

    def end(self, outcome, error="") -> None:
        self.outcomes.append(outcome)


class AuditAccess:
    def may_begin(self, error):
        return error is None


class Expiry(ExpireRequest):
    """A request that supports weak references, to observe when it is freed."""

    __slots__ = ("__weakref__",)
    requires = ExpireRequest.requires


@run_on_loop
async def test_an_audited_request_object_is_kept_in_memory_until_its_answer():
    """The outcome is found by Python's `id` of the request, which a later request could get."""
    backend, link, audited = Backend(), Link(), AuditedRequest()
    link.access, link.audit_request = AuditAccess(), lambda _request: audited
    clients = ClientConnections(backend, LIMITS, None, Metrics("server"))
    clients.accept(link)
    req_id = ReqId(ClientId(1), Generation(1), PartitionId(0), -1)
    request = Expiry(req_id, 5, 0)
    kept = weakref.ref(request)
    link.received([request])
    del request
    ((connection, _, cost_bytes),) = backend.host.received_requests
    del _
    backend.host.received_requests.clear()  # the partition keeps the ID of the request only
    assert kept() is not None
    answer = ExpireResponse(req_id, 5, is_done=True)
    clients.answer(SendToClient(connection, answer, cost_bytes, kept()))
    assert audited.outcomes == ["done"]
    assert kept() is None


@run_on_virtual_loop
async def test_a_connection_over_the_memory_limit_resumes_after_its_answers_drain():
    class SlowLink(Link):
        def send(self, message) -> None:  # the system accepts the data later
            self.sent.append(message)
            self.write_backlog_bytes = 600 << 10

    backend, links = Backend(), [SlowLink(), SlowLink()]
    limits = LIMITS._replace(memory_bytes_max=1 << 20)
    clients = ClientConnections(backend, limits, None, Metrics("server"))
    for number, link in enumerate(links):
        clients.accept(link)
        link.received([FlushRequest(ReqId(ClientId(number), Generation(1), PartitionId(0), -1))])
    for connection, message, cost_bytes in backend.host.received_requests:
        clients.answer(SendToClient(connection, FlushResponse(message.req_id, 0), cost_bytes))
    await asyncio.sleep(0)
    assert [link.is_read for link in links].count(False) == 1
    for link in links:
        link.write_backlog_bytes = 0
    await pass_time(1)
    assert all(link.is_read for link in links)
    assert clients.memory_bytes == 0


@run_on_loop
async def test_a_read_starts_when_another_connection_frees_memory():
    backend, links = Backend(), [Link(), Link()]
    clients = ClientConnections(
        backend, LIMITS._replace(memory_bytes_max=4_096), None, Metrics("server")
    )
    for link in links:
        clients.accept(link)
    ids = ReqId(ClientId(1), Generation(1), PartitionId(0), -1)
    links[0].received([AppendRequest(ids, 0, (), (), (), 0, bytes(8_192), 0)])
    small = AppendRequest(ids, 0, (), (), (), 0, b"1", 0)
    links[1].received([small, TransactionDataRequest(ids, 0)])
    assert len(backend.host.received_requests) == 2  # an append may wait for long
    links[0].closed("done")
    await poll_until(lambda: len(backend.host.received_requests) == 3)
