"""A filter saves network bytes between a real server and a client."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import AsyncCallbacks, AsyncTransaction, AsyncWaltzClient, WaltzClient
from waltz_core.client.links.directory import ClusterLayout, Owner
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.batches import encode_append
from waltz_core.records.record import Generation

WANTED, OTHER = 7, 8
# The filter passes one of this number of transactions.
SHARE = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster") / "local"
    with running_cluster(directory, storage_count=1, server_count=1) as cluster:
        yield cluster


class Counter:
    """A proxy between a client and a server; counts the bytes that the server sends."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._there = (host, int(port))
        self.bytes = 0
        self.address = ""
        self._open: list[asyncio.Event] = []

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_over = asyncio.Event()
        self._open.append(is_over)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._there)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, there_writer, is_counted=False))
                group.create_task(self._forward(there_reader, writer, is_counted=True))
        except* ConnectionError:
            pass  # a side that closes with bytes unread resets the other
        finally:
            is_over.set()

    async def closed(self) -> None:
        for each in self._open:
            await each.wait()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.bytes += len(data) if is_counted else 0
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
        await writer.wait_closed()


class RecordingCallbacks(AsyncCallbacks):
    def __init__(self, mark: int, *, reads_data: bool) -> None:
        self.mark = mark
        self.reads_data = reads_data
        self.seen: list[int] = []

    async def client_high_water_mark(self, partition: int) -> int:
        return self.mark

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        if self.reads_data:
            await transaction.data()
        self.seen.append(transaction.transaction_id)


async def bytes_of_a_feed(
    layout: ClusterLayout,
    partition: int,
    callbacks: RecordingCallbacks,
    last: int,
    headers: list[int] | None,
) -> int:
    """Return the number of bytes that are sent from the callbacks' mark up to `last`."""
    address, generation = layout.owners[partition]
    counter = Counter(address)
    async with await counter.start():
        through = Owner(counter.address, Generation(generation))

        async def owner(*_: object, **__: object) -> Owner:
            return through

        async with AsyncWaltzClient.at(layout) as c:
            # With its own lookup, the client would query ZooKeeper after the first mount, and
            # bypass the counter.
            c.directory.owner = owner  # type: ignore[method-assign]
            await c.subscribe(callbacks, [partition], headers=headers)
            async with asyncio.timeout(TEST_TIMEOUT_S):
                applier = c._partitions[partition].applier
                assert applier is not None
                await applier.wait_until_applied(last)
        await counter.closed()
    return counter.bytes


# The client is far from the end of the log, so it fetches ranges before it uses the feed.
@pytest.mark.parametrize(
    ("partition", "batches", "reads_data"), [(0, 15, False), (0, 15, True), (1, 45, True)]
)
def test_a_filtered_feed_sends_proportionally_fewer_bytes(
    cluster: LocalCluster, partition: int, batches: int, reads_data: bool
) -> None:
    with WaltzClient(cluster.connect) as client:
        rows, none = 1_000, [[]] * 1_000
        headers = [WANTED if i % SHARE == 0 else OTHER for i in range(rows)]
        payload = encode_append(
            headers, [b"x" * 100] * rows, write_locks=none, read_locks=none, append_locks=none
        )
        mark = client.high_water_mark(partition)
        appends = [
            client.append_batch(partition, payload, rows, client_high_water_mark=-1)
            for _ in range(batches)
        ]
        assert all(append.result(TEST_TIMEOUT_S).transaction_ids.min() > mark for append in appends)
        last = client.high_water_mark(partition)
        client.mount([partition])
        layout = client.layout()

    async def measure() -> tuple[int, int]:
        plain = RecordingCallbacks(mark, reads_data=reads_data)
        filtered = RecordingCallbacks(mark, reads_data=reads_data)
        everything = await bytes_of_a_feed(layout, partition, plain, last, None)
        some = await bytes_of_a_feed(layout, partition, filtered, last, [WANTED])
        assert plain.seen == list(range(mark + 1, last + 1))
        assert filtered.seen == plain.seen[::SHARE]
        return everything, some

    everything, some = asyncio.run(measure())
    logging.getLogger(__name__).info("%d bytes without a filter, %d with one", everything, some)
    assert everything > (last - mark) * (120 if reads_data else 20)
    # A filtered header has 24 bytes instead of 20, and each frame has a few more.
    assert some < everything / SHARE * 1.5 + 4_000
