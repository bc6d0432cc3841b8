"""Limits of principals in a cluster of real processes, with a tenant that exceeds its limit.

Each tenant appends and reads in its own partition.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.request import urlopen

import pytest

from tests.certificates import Certificates
from tests.integration.permitted_cluster import (
    FAR_FUTURE_MS,
    PRINCIPALS,
    ClusterAccess,
    permitted_cluster,
)
from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits, StoredToken
from waltz_core.access.requirements import AccessVerb
from waltz_core.access.tokens import hash_of
from waltz_core.client import AsyncWaltzClient, WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import Overloaded
from waltz_core.records.batches import encode_append
from waltz_core.records.record import PartitionId, ReqId
from waltz_core.transport import net, tls
from waltz_core.wire import messages
from waltz_core.wire.messages import WireProtocol

GREEDY, MODERATE = "writer", "read"  # names of `PRINCIPALS`
PARTITIONS = {GREEDY: 1, MODERATE: 2}
ROW_BYTES = 10_000
LIMIT_BYTES_PER_S = 100_000
PERMISSIONS = Permissions(
    1,
    "ops",
    0,
    bytes(32),
    grants=(
        Grant("localhost", False, AccessVerb.REPLICATE, None),
        *(
            Grant(name, False, verb, ((partition, partition),))
            for name, partition in PARTITIONS.items()
            for verb in (AccessVerb.READ, AccessVerb.APPEND)
        ),
    ),
    tokens={
        hash_of(bytes([number]) * 32): StoredToken(f"t{number}", name, FAR_FUTURE_MS)
        for number, name in enumerate(PRINCIPALS)
    },
)


@pytest.fixture(scope="module")
def access(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[ClusterAccess]:
    with permitted_cluster(tmp_path_factory, certificates, PERMISSIONS) as cluster:
        yield cluster


def with_limits(**limits: int) -> Permissions:
    return dataclasses.replace(PERMISSIONS, limits={GREEDY: PrincipalLimits(**limits)})


@contextmanager
def moderate_appends(access: ClusterAccess) -> Iterator[list[int]]:
    """Let the other tenant append meanwhile; yield the IDs of its transactions."""
    must_stop, ids = threading.Event(), list[int]()

    def run() -> None:
        with WaltzClient(access.connect(MODERATE)) as client:
            while not must_stop.is_set():
                ids.append(client.append(b"calm", partition=PARTITIONS[MODERATE]).result())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ids
    finally:
        must_stop.set()
        thread.join()


def test_a_greedy_appender_is_slowed_to_its_limit_and_its_rows_stay_in_order(access: ClusterAccess):
    access.write(with_limits(bytes_per_s=LIMIT_BYTES_PER_S))
    partition, rows = PARTITIONS[GREEDY], 30
    # The size of the first request is the limit for six seconds, so the second request exceeds the
    # limit.
    sizes = [6 * LIMIT_BYTES_PER_S, *[ROW_BYTES] * (rows - 1)]
    payloads = [f"{number:09d}".encode().ljust(size) for number, size in enumerate(sizes)]
    with WaltzClient(access.connect(GREEDY)) as client, moderate_appends(access) as moderate_ids:
        before = client.high_water_mark(partition)
        began_s = time.monotonic()
        appended = [client.append(payload, partition=partition) for payload in payloads]
        ids = [each.result() for each in appended]
        # A server accepts a request of any size if the limit is not exhausted; the next request
        # waits.
        ids.append(client.append(b"last", partition=partition).result())
        took_s = time.monotonic() - began_s
    # All rows are in the log once, in the order of `append`, although many were rejected at first.
    assert ids == [*range(before + 1, before + 2 + rows)]
    # The burst, which is the limit for one second, does not wait.
    assert took_s >= sum(sizes) / LIMIT_BYTES_PER_S - 1.1
    assert len(moderate_ids) > took_s  # The other tenant has no pauses of a second.
    assert moderate_ids == [*range(moderate_ids[0], moderate_ids[0] + len(moderate_ids))]
    log = access.cluster.log_path("server-1").read_text()
    assert f"error={GREEDY} exceeds its limit of {LIMIT_BYTES_PER_S} bytes per second at" in log


@pytest.mark.parametrize("at_storages", [False, True])
def test_a_greedy_reader_is_slowed_to_its_limit(access: ClusterAccess, at_storages: bool):
    access.write(PERMISSIONS)
    partition, rows = PARTITIONS[GREEDY], 100
    with WaltzClient(access.connect(GREEDY)) as client:
        payload = bytes(ROW_BYTES)
        futures = [client.append(payload, partition=partition) for _ in range(rows)]
        ids = [future.result() for future in futures]
        access.write(with_limits(bytes_per_s=2 * LIMIT_BYTES_PER_S))
        replicas = client.replicas(partition) if at_storages else None
        began_s = time.monotonic()
        chunks = client.read_range(partition, ids[0], ids[-1], replicas=replicas)
        count = sum(len(row.data) for chunk in chunks for row in chunk.rows())
        took_s = time.monotonic() - began_s
    assert count == rows * ROW_BYTES
    # The burst, and a range that exceeds it, do not wait.
    assert took_s >= count / (2 * LIMIT_BYTES_PER_S) - 2.5


def test_a_greedy_feed_is_slowed_to_its_limit_while_its_principal_appends(access: ClusterAccess):
    access.write(PERMISSIONS)
    partition, rows, limit = PARTITIONS[GREEDY], 10_000, 40_000
    locks: list[tuple[int, ...]] = [()] * rows
    payload = encode_append(
        [0] * rows, [b"x"] * rows, write_locks=locks, read_locks=locks, append_locks=locks
    )
    with WaltzClient(access.connect(GREEDY)) as client:
        client.append_batch(partition, payload, rows, client_high_water_mark=-1).result()
        access.write(with_limits(bytes_per_s=limit))
        with ThreadPoolExecutor() as threads:
            feed = threads.submit(asyncio.run, follow(access, partition))
            appended = 0
            while not feed.done():
                client.append(b"y", partition=partition).result()
                appended += 1
            took_s, ids = feed.result()
    assert ids == [*range(len(ids))]  # dense and in order
    # The burst, and a frame of 4,096 transactions that exceeds it, do not wait.
    assert took_s >= 20 * len(ids) / limit - 3.1
    assert appended > took_s


async def follow(access: ClusterAccess, partition: int) -> tuple[float, list[int]]:
    """Mount with the feed from the start; return the time until the feed has ended, and the IDs."""
    connect = access.connect(GREEDY)
    async with AsyncWaltzClient.connect(connect) as client:
        owner = await client.directory.owner(PartitionId(partition), after_failure=False)
    link = await net.dial(
        WireProtocol.CLIENT, owner.address, ssl=tls.dial_context(ClientConfig(), connect)
    )
    link.send(messages.ClientIdRequest(ReqId(-1, 0, -1, -1)))
    (issued,) = await link.receive()
    ids: list[int] = []
    began_s = time.monotonic()
    mount_id = ReqId(issued.client_id, owner.generation, PartitionId(partition), -1)
    link.send(messages.MountWriter(mount_id, 1, -1, True, (), issued.proof))
    while True:
        for message in await link.receive():
            if isinstance(message, messages.Mounted):
                link.abort("done")
                return time.monotonic() - began_s, ids
            assert isinstance(message, messages.FeedBatch), message
            ids += range(message.first, message.first + message.count)


def test_a_change_of_the_limits_needs_no_new_connection(access: ClusterAccess):
    partition = PARTITIONS[GREEDY]
    access.write(PERMISSIONS)
    config = ClientConfig(request_timeout_ms=8_000)
    with WaltzClient(access.connect(GREEDY), config) as client:
        client.append(b"x", partition=partition).result()
        access.write(with_limits(bytes_per_s=ROW_BYTES // 20))
        client.append(bytes(ROW_BYTES), partition=partition).result()
        # The next request would have to wait for about 20 seconds.
        late = client.append(b"x", partition=partition).exception()
        assert isinstance(late, Overloaded)
        assert 0 < late.retry_after_ms < 20_000
        assert f"exceeds its limit of {ROW_BYTES // 20} bytes per second at" in str(late)
        access.write(PERMISSIONS)
        assert client.append(b"x", partition=partition).exception() is None


def test_a_client_over_its_connection_limit_gets_the_reason(access: ClusterAccess):
    partition = PARTITIONS[GREEDY]
    access.write(with_limits(connections=1))
    config = ClientConfig(request_timeout_ms=2_000)
    with WaltzClient(access.connect(GREEDY), config) as first:
        first.append(b"x", partition=partition).result()
        with (
            WaltzClient(access.connect(GREEDY), config) as second,
            pytest.raises(Overloaded, match=f"{GREEDY} exceeds its limit of 1 connection at"),
        ):
            second.high_water_mark(partition)
        first.append(b"y", partition=partition).result()
    with WaltzClient(access.connect(GREEDY)) as third:
        assert third.append(b"z", partition=partition).result() > 0
    page = metrics_page(access)
    assert f'waltz_server_principal_rejected_requests_total{{principal="{GREEDY}"}}' in page
    assert f'principal="{MODERATE}"' not in page


def metrics_page(access: ClusterAccess) -> str:
    """Return the server's metrics; they are updated once a second."""
    port = next(member.http_port for member in access.cluster.members if member.name == "server-1")
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())
