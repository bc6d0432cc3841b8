"""The greedy tenants of the workload `flood`, and a cluster in which they have limits.

Each tenant is a separate process: `python -m waltz_bench.compared.tenant_load KIND CONNECT
PAYLOAD_BYTES`. The process pauses only if it must. It begins its load after one line of standard
input, closes its connections after the next line, and so on. It exits at the end of standard input.
Every second, it prints the total that it has received.

Rules:
    1. `appender` keeps `IN_FLIGHT` batches in flight in each partition.
    2. `reader` reads the log repeatedly. From servers it reads feeds from the start, and pipelined
       ranges. From storages it reads ranges. It does not wait after a server has rejected a range.
    3. `connections` opens connections in a loop, and keeps some of them open.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from ssl import SSLContext
from typing import Final

import uvloop

from waltz_bench.compared import access_cost
from waltz_bench.measuring import BATCH_ROWS
from waltz_core.access.permissions import PrincipalLimits
from waltz_core.client import AsyncWaltzClient, BatchOutcome
from waltz_core.config import ClientConfig
from waltz_core.errors import Unavailable, WaltzError, error_from_code
from waltz_core.local import LocalCluster
from waltz_core.records.batches import encode_append
from waltz_core.records.record import (
    BEFORE_FIRST,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.transport import net, tls
from waltz_core.wire.messages import (
    ClientIdRequest,
    ClientIdResponse,
    ErrorResponse,
    FeedBatch,
    Mounted,
    MountWriter,
    RangeData,
    RangeForm,
    RangeRequest,
    WireProtocol,
)

CALM: Final = "calm"
GREEDY: Final = "greedy"
GREEDY_LIMITS: Final = PrincipalLimits(5_000_000, 1_000, 40, 40)
# A handshake costs CPU, and the server does not know the principal before it. So the handshakes of
# each host are limited.
HANDSHAKE_LIMITS: Final = {"handshake_burst_max": 100, "handshakes_per_s_max": 20}
_CALM_LIMITS: Final = PrincipalLimits(1 << 40, 1 << 40, 1_000, 1_000)
IN_FLIGHT: Final = 32
# `_RANGES_IN_FLIGHT` and `_OPEN_CONNECTIONS` are limits per task, `_DIALER_COUNT` is per tenant.
_READERS_PER_PARTITION: Final = 2
_RANGES_IN_FLIGHT: Final = 8
_DIALER_COUNT: Final = 8
_OPEN_CONNECTIONS: Final = 3
_RANGE_BYTES: Final = 4 << 20
_RETRY_S: Final = 0.01


@contextmanager
def limited_tenants(tls_file: Path) -> Iterator[tuple[LocalCluster, str, str]]:
    """Run a cluster with access control; yield it, and the connect strings of both tenants.

    The first connect string is for the calm (measured) client, the second for greedy tenants.
    """
    limits = {CALM: _CALM_LIMITS, GREEDY: GREEDY_LIMITS}
    with access_cost.cluster_with_permissions(tls_file, "on", limits, HANDSHAKE_LIMITS) as (
        cluster,
        connects,
    ):
        yield cluster, connects[CALM], connects[GREEDY]


@dataclass
class _TenantClient:
    client: AsyncWaltzClient
    ssl: SSLContext | None
    payload_bytes: int
    received: "_ReceivedTotal"
    addresses: dict[PartitionId, str] = field(default_factory=dict)

    async def dial(self, partition: PartitionId) -> net.Link:
        """Open a connection to the owner of a partition."""
        return await net.dial(WireProtocol.CLIENT, self.addresses[partition], ssl=self.ssl)


@dataclass
class _ReceivedTotal:
    total: int = 0  # the total of bytes or connections

    async def report(self) -> None:
        """Print the total every second."""
        while True:
            print(self.total, flush=True)  # noqa: T201 - the parent reads it
            await asyncio.sleep(1)


async def _repeat_forever(call: Callable[[], Awaitable[None]]) -> None:
    """Repeat a call forever; retry after an `Unavailable` error, such as the error of a limit."""
    while True:
        try:
            await call()
        except WaltzError as error:
            if not isinstance(error, Unavailable):
                raise
            await asyncio.sleep(_RETRY_S)


async def _append(tenant: _TenantClient, partition: PartitionId) -> None:
    empty: list[tuple[int, ...]] = [()] * BATCH_ROWS
    payload = encode_append(
        [0] * BATCH_ROWS,
        [bytes(tenant.payload_bytes)] * BATCH_ROWS,
        write_locks=empty,
        read_locks=empty,
        append_locks=empty,
    )
    waiting: deque[asyncio.Future[BatchOutcome]] = deque()

    def done(future: asyncio.Future[BatchOutcome]) -> None:
        if not future.cancelled() and future.exception() is None:
            tenant.received.total += future.result().committed_count * tenant.payload_bytes

    while True:
        waiting.append(
            await tenant.client.append_batch(
                partition, payload, BATCH_ROWS, client_high_water_mark=BEFORE_FIRST
            )
        )
        waiting[-1].add_done_callback(done)
        if len(waiting) == IN_FLIGHT:
            await waiting.popleft()


async def _read_feed(tenant: _TenantClient, partition: PartitionId) -> None:
    """Read the feed of a partition from its start, repeatedly."""
    owner = await tenant.client.directory.owner(partition, after_failure=False)
    link = await tenant.dial(partition)
    try:
        link.send(ClientIdRequest(ReqId(ClientId(-1), Generation(0), PartitionId(-1), -1)))
        (response,) = await link.receive()
        if isinstance(response, ErrorResponse):
            raise error_from_code(response.error_code, response.message)
        assert isinstance(response, ClientIdResponse)
        for number in count(1):
            mount_id = ReqId(ClientId(response.client_id), owner.generation, partition, -number)
            link.send(MountWriter(mount_id, number, BEFORE_FIRST, True, (), response.proof))  # noqa: FBT003
            await _wait_for_mount(tenant, link)
    finally:
        link.abort("done")


async def _wait_for_mount(tenant: _TenantClient, link: net.Link) -> None:
    while True:
        for message in await link.receive():
            if isinstance(message, FeedBatch):
                tenant.received.total += len(message.headers)
            elif isinstance(message, Mounted):
                return
            elif isinstance(message, ErrorResponse):
                raise error_from_code(message.error_code, message.message)


async def _read_server(tenant: _TenantClient, partition: PartitionId) -> None:
    """Keep `_RANGES_IN_FLIGHT` range requests in flight at a server, even after rejections."""
    mark = await tenant.client.high_water_mark(partition)
    link, random = await tenant.dial(partition), Random(partition)  # noqa: S311 - no secret
    numbers = count(1)

    def request() -> None:
        req_id = ReqId(ClientId(-1), Generation(0), partition, -next(numbers))
        first = TransactionId(random.randrange(max(mark, 1)))
        link.send(RangeRequest(req_id, first, mark, _RANGE_BYTES, RangeForm.WHOLE, ()))

    try:
        for _ in range(_RANGES_IN_FLIGHT):
            request()
        while True:
            for message in await link.receive():
                if isinstance(message, RangeData):
                    tenant.received.total += len(message.records)
                request()
    finally:
        link.abort("done")


async def _read_storages(tenant: _TenantClient, partition: PartitionId) -> None:
    replicas = await tenant.client.replicas(partition)
    last = replicas.high_water_mark
    async for chunk in tenant.client.read_range(partition, 0, last, replicas=replicas):
        tenant.received.total += len(chunk.records)


async def _connect(tenant: _TenantClient) -> None:
    """Open connections in a loop, and keep the latest `_OPEN_CONNECTIONS` of them open."""
    links: deque[net.Link] = deque()
    try:
        while True:
            partition = tenant.received.total % len(tenant.addresses)
            links.append(await tenant.dial(PartitionId(partition)))
            tenant.received.total += 1
            if len(links) > _OPEN_CONNECTIONS:
                links.popleft().abort("another connection is open")
    finally:
        for link in links:
            link.abort("done")


async def _run(kind: str, connect: str, payload_bytes: int) -> None:
    """Start and stop the load, alternately, at each line of standard input, until its end."""
    lines, received = asyncio.StreamReader(), _ReceivedTotal()
    loop = asyncio.get_running_loop()
    # Without this, uvloop prints each handshake that a limit has ended.
    loop.set_exception_handler(lambda *_: None)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        report_task = tasks.create_task(received.report())
        while await lines.readline():
            flooding = tasks.create_task(_run_tenant(kind, connect, payload_bytes, received))
            await lines.readline()
            flooding.cancel()
        report_task.cancel()


async def _run_tenant(
    kind: str, connect: str, payload_bytes: int, received: _ReceivedTotal
) -> None:
    ssl = tls.dial_context(ClientConfig(), connect)
    async with AsyncWaltzClient.connect(connect) as client, asyncio.TaskGroup() as tasks:
        tenant = _TenantClient(client, ssl, payload_bytes, received)
        for number in range(client.partition_count):
            owner = await client.directory.owner(PartitionId(number), after_failure=False)
            tenant.addresses[PartitionId(number)] = owner.address
        for call in _tenant_calls(kind, tenant):
            tasks.create_task(_repeat_forever(call))


def _tenant_calls(kind: str, tenant: _TenantClient) -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield the calls that a tenant repeats, all at the same time."""
    if kind == "connections":
        for _ in range(_DIALER_COUNT):
            yield partial(_connect, tenant)
        return
    reads = (_read_feed, _read_server, _read_storages) * _READERS_PER_PARTITION
    for address in tenant.addresses:
        for call in (_append,) if kind == "appender" else reads:
            yield partial(call, tenant, address)


def main() -> None:
    """Run a greedy tenant, at a lower CPU priority than measured processes, until it is killed."""
    os.nice(10)
    if sys.platform == "linux" and (policy := os.sched_getscheduler(0)) != os.SCHED_OTHER:
        lowest = os.sched_get_priority_min(policy)
        os.sched_setscheduler(0, policy, os.sched_param(lowest))
    kind, connect, payload_bytes = sys.argv[1:]
    uvloop.run(_run(kind, connect, int(payload_bytes)))


if __name__ == "__main__":
    main()
