"""Range reads at a 0.13 server: headers from separate feeds, single data requests."""

import asyncio

import numpy as np
import pytest

from tests.loops import run_on_loop
from tests.original_server_for_clients import OriginalCluster
from waltz_core import errors
from waltz_core.client import AsyncWaltzClient, RangeForm
from waltz_core.client.api.opening import UnopenedClient
from waltz_core.config import ClientConfig
from waltz_core.legacy import legacy_server_reads
from waltz_core.records.raw_records import HEADER_DTYPE

COUNT = 1_000


@pytest.fixture
def cluster():
    with OriginalCluster(1) as cluster:
        log = cluster.logs[0]
        cluster.fill(0, COUNT)
        log.records = [(req_id, i % 5, b"%d" % i) for i, (req_id, _, _) in enumerate(log.records)]
        yield cluster


def client_of(cluster, timeout_ms=60_000):
    config = ClientConfig(
        request_timeout_ms=timeout_ms, retry_interval_ms_min=5, retry_interval_ms_max=50
    )
    return UnopenedClient(AsyncWaltzClient(cluster.directory(), "x", config, client_id=None))


@pytest.fixture(autouse=True)
def small_answers(monkeypatch):
    monkeypatch.setattr(legacy_server_reads, "WHOLE_COUNT_MAX", 128)
    monkeypatch.setattr(legacy_server_reads, "HEADERS_COUNT_MAX", 128)


def cached_feed_count(client):
    return sum(len(feed) for feed in client.requests._legacy_reads._feeds.values())


async def data_of(chunks):
    return [row.data async for chunk in chunks for row in chunk.rows()]


@run_on_loop
async def test_a_range_is_complete_and_leaves_no_open_feed(cluster):
    async with client_of(cluster) as client:
        chunks = [chunk async for chunk in client.read_range(0, 10, COUNT - 1)]
        assert [row.data for chunk in chunks for row in chunk.rows()] == [
            b"%d" % i for i in range(10, COUNT)
        ]
        assert all(chunk.lineage == () and chunk.stamps == [] for chunk in chunks)
        heads = [
            np.frombuffer(chunk.records, HEADER_DTYPE)
            async for chunk in client.read_range(0, 0, COUNT - 1, form=RangeForm.HEADERS)
        ]
        assert np.concatenate(heads)["req_id"]["sequence"].tolist() == list(range(1, COUNT + 1))
        assert cached_feed_count(client) == 0
        assert cluster.last_client_id == 1  # successive reads share one client ID


@run_on_loop
async def test_a_chunk_is_only_slightly_larger_than_requested(cluster):
    async with client_of(cluster) as client:
        sizes = [len(each.records) async for each in client.read_range(0, 0, 999, bytes_max=4_000)]
        assert max(sizes) < 4_000 + legacy_server_reads.CONCURRENT_REQUESTS_MAX * 50
        assert len(sizes) > 5


@run_on_loop
async def test_readers_of_one_partition_do_not_disturb_each_other(cluster):
    async with client_of(cluster) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(data_of(client.read_range(0, first, COUNT - 1)))
                for first in (0, 5, 400)
            ]
        for first, task in zip((0, 5, 400), tasks, strict=True):
            assert task.result() == [b"%d" % i for i in range(first, COUNT)]
        assert cached_feed_count(client) == 0


@run_on_loop
async def test_feeds_of_inactive_readers_are_cached_within_a_limit(cluster):
    async with client_of(cluster) as client:
        for first in range(10):
            chunks = client.read_range(0, first, COUNT - 1)
            await anext(chunks)
            await chunks.aclose()
        assert cached_feed_count(client) <= legacy_server_reads.FEEDS_MAX
        assert cluster.last_client_id <= legacy_server_reads.FEEDS_MAX + 3


@run_on_loop
async def test_a_feed_in_use_at_close_is_not_cached(monkeypatch, cluster):
    read, read_feeds = legacy_server_reads.HeaderFeed.read, []
    async with client_of(cluster) as client:

        async def read_and_close(feed, *arguments):
            found = await read(feed, *arguments)
            read_feeds.append(feed)
            client.requests.close()
            return found

        monkeypatch.setattr(legacy_server_reads.HeaderFeed, "read", read_and_close)
        chunks = client.read_range(0, 0, COUNT - 1)
        await anext(chunks)
        assert cached_feed_count(client) == 0
        assert read_feeds[0].is_closed
        await chunks.aclose()


@run_on_loop
async def test_the_client_filters_ranges_of_a_0_13_server(cluster):
    async with client_of(cluster) as client:
        found = await data_of(client.read_range(0, 0, 99, header_values=[2, 3]))
        assert found == [b"%d" % i for i in range(100) if i % 5 in (2, 3)]


@run_on_loop
async def test_a_disconnected_feed_is_restarted(cluster):
    async with client_of(cluster) as client:
        found = []
        async for chunk in client.read_range(0, 0, COUNT - 1):
            found += [row.data for row in chunk.rows()]
            if len(found) < 600:
                await asyncio.to_thread(cluster.call, cluster.servers[0].cut)
        assert found == [b"%d" % i for i in range(COUNT)]


async def error_of_read(cluster, expected):
    """Return the error of a read at its timeout."""
    for timeout_ms in (500, 5_000, 50_000):
        async with client_of(cluster, timeout_ms) as client:
            with pytest.raises(errors.Unavailable) as caught:
                await data_of(client.read_range(0, 0, 20))
        if expected in str(caught.value):
            break
        # On a busy machine the last attempt ended without the server's reason.
    assert expected in str(caught.value)
    return caught.value


@run_on_loop
async def test_an_unreadable_range_is_reported_at_the_timeout(cluster):
    cluster.partition(0).poisoned.add(7)
    await error_of_read(cluster, "TransactionNotFoundException")
    await asyncio.to_thread(cluster.call, lambda: cluster.servers[0].release_ownership(0))
    error = await error_of_read(cluster, "is not ready for partition 0")
    assert isinstance(error, errors.NotOwned)
