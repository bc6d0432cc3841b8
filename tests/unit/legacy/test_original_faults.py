"""A 0.13 server with faults: the client reports no wrong outcome and always terminates."""

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from tests.loops import poll_until, run_on_loop
from tests.original_server_for_clients import OriginalCluster, Peer
from waltz_core import errors
from waltz_core.client import AsyncCallbacks, AsyncWaltzClient, lock
from waltz_core.client.api.opening import UnopenedClient
from waltz_core.client.read import requests
from waltz_core.client.stream import client_partition
from waltz_core.client.stream.stream_events import StreamSettings
from waltz_core.config import ClientConfig
from waltz_core.legacy import legacy_server_stream
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.wire import messages

IN_MEMORY_CONFIG = ClientConfig(
    request_timeout_ms=10_000,
    retry_interval_ms_min=5,
    retry_interval_ms_max=50,
    mount_timeout_ms=300,
)


@pytest.fixture(autouse=True)
def short_flush_delay(monkeypatch):
    """Send flushes after a short delay; a 0.13 client would wait for five seconds."""
    monkeypatch.setattr(legacy_server_stream, "FLUSH_AFTER_MS", 100)


@pytest.fixture
def cluster():
    with OriginalCluster(1, server_count=2) as cluster:
        yield cluster


def client_of(cluster):
    directory = cluster.directory()
    return UnopenedClient(AsyncWaltzClient(directory, "original", IN_MEMORY_CONFIG, client_id=None))


def payloads_in_log(cluster):
    return [data for _, _, data in cluster.logs[0].records]


async def results_of(futures):
    """Return each outcome: an ID, or the error."""
    await asyncio.wait(futures)
    return [future.exception() or future.result() for future in futures]


async def append_all(client, count, **named):
    return [await client.append(b"%d" % i, partition=0, **named) for i in range(count)]


async def stop_answers(cluster):
    """Let the storages not answer."""
    await asyncio.to_thread(cluster.call, cluster.partition(0).may_commit.clear)


async def on_server(cluster, call):
    return await asyncio.to_thread(cluster.call, call)


@run_on_loop
@pytest.mark.parametrize(("kept", "is_cut"), [(0, False), (3, True), (7, True)])
async def test_appends_are_found_in_the_log_or_resent_and_committed_once(kept, is_cut, cluster):
    async with client_of(cluster) as client:
        await client.mount([0])
        await stop_answers(cluster)
        futures = await append_all(client, 7)
        await poll_until(lambda: len(cluster.partition(0).pending) == 7)
        if is_cut:
            await on_server(cluster, cluster.servers[0].cut)
        await on_server(cluster, lambda: cluster.partition(0).break_session(kept))
        await on_server(cluster, cluster.partition(0).may_commit.set)
        ids = await results_of(futures)
    payloads = payloads_in_log(cluster)
    assert sorted(payloads) == [b"%d" % i for i in range(7)]
    assert [payloads[transaction_id] for transaction_id in ids] == [b"%d" % i for i in range(7)]


@run_on_loop
async def test_a_former_owner_decides_no_outcome(cluster):
    """The old owner's mark is outdated: the new owner committed appends that the old one lost."""
    async with client_of(cluster) as client:
        await client.mount([0])
        directory = client.directory
        directory.stale_owners = dict(directory.owners)
        await stop_answers(cluster)
        futures = await append_all(client, 2)
        await poll_until(lambda: len(cluster.partition(0).pending) == 2)
        before = cluster.partition(0)

        await asyncio.to_thread(cluster.move, 0, 1, kept=1, is_notified=False)
        # The old owner abandons appends in flight, and answers flushes and mounts.
        await on_server(cluster, lambda: before.break_session(0))
        await poll_until(lambda: cluster.servers[0].answered.count(8) > 3)
        assert not any(future.done() for future in futures)
        directory.stale_owners = None
        assert await results_of(futures) == [0, 1]
    assert payloads_in_log(cluster) == [b"0", b"1"]


@run_on_loop
async def test_an_append_waits_until_the_server_owns_the_partition(cluster):
    await on_server(cluster, lambda: cluster.servers[0].release_ownership(0))
    async with client_of(cluster) as client:
        future = await client.append(b"late", partition=0)
        await poll_until(lambda: cluster.servers[0].answered.count(11) > 1)
        await on_server(cluster, lambda: cluster.servers[0].add_partition(0, cluster.logs[0], 1))
        assert await future == 0


@run_on_loop
async def test_a_mark_request_is_repeated_while_the_server_does_not_own_the_partition(
    monkeypatch, cluster
):
    monkeypatch.setitem(requests.LEGACY_ANSWER_TIMEOUT_S, messages.HighWaterMarkResponse, 0.05)
    cluster.fill(0, 4)
    await on_server(cluster, lambda: cluster.servers[0].release_ownership(0))
    async with client_of(cluster) as client, asyncio.TaskGroup() as group:
        request_task = group.create_task(client.high_water_mark(0, linearizable=True))
        await poll_until(lambda: cluster.servers[0].answered.count(11) > 1)
        await on_server(cluster, lambda: cluster.servers[0].add_partition(0, cluster.logs[0], 1))
        assert await request_task == 3


@run_on_loop
async def test_an_unanswered_mount_is_retried_on_another_connection(cluster):
    server = cluster.servers[0]
    server.is_answering = False
    async with client_of(cluster) as client:
        future = await client.append(b"at last", partition=0)
        await poll_until(lambda: server.answered.count(0) >= 1)
        server.is_answering = True
        assert await future == 0
        assert server.answered.count(0) >= 2


@run_on_loop
async def test_a_mark_above_the_log_is_rejected_before_the_append_is_sent(cluster):
    async with client_of(cluster) as client:
        await client.mount([0])
        future = await client.append(b"", partition=0, client_high_water_mark=5)
        with pytest.raises(errors.ClientAheadOfLog):
            await future
    assert 2 not in cluster.servers[0].answered


@run_on_loop
async def test_uncommitted_records_are_never_requested(cluster):
    cluster.fill(0, 10, b"data")
    async with client_of(cluster) as client:
        chunks = client.read_range(0, 5, 20)
        assert [row.data for row in (await anext(chunks)).rows()] == [b"data"] * 5
        with pytest.raises(errors.DataLoss):
            await anext(chunks)
    assert not cluster.partition(0).poisoned


class RecordingCallbacks(AsyncCallbacks):
    def __init__(self, mark, count):
        self.mark, self.count = mark, count
        self.ids, self.payloads = [], []
        self.is_over = asyncio.Event()

    async def client_high_water_mark(self, partition):
        return self.mark

    async def apply_transaction(self, transaction):
        self.ids.append(transaction.transaction_id)
        if transaction.transaction_id % 1_000 == 0:
            self.payloads.append(await transaction.data())
        if len(self.ids) == self.count:
            self.is_over.set()


# The first transaction is in the feed, and the second transaction is in a fetched range of headers
# (partition_stream.py, invariant 7).
@run_on_loop
@pytest.mark.parametrize("behind", [1_000, 3_000])
async def test_a_client_that_lags_far_catches_up_and_continues(behind, monkeypatch, cluster):
    monkeypatch.setattr(
        client_partition, "StreamSettings", partial(StreamSettings, feed_lag_max=2_000)
    )
    cluster.fill(0, behind, b"old")
    async with client_of(cluster) as client:
        seen = RecordingCallbacks(-1, behind + 10)
        await client.subscribe(seen, [0])
        ids = await results_of(await append_all(client, 10))
        assert ids == list(range(behind, behind + 10))
        await seen.is_over.wait()
        assert seen.ids == list(range(behind + 10))
        assert seen.payloads == [b"old"] * (behind // 1_000) + [b"0"]


@run_on_loop
async def test_an_exactly_once_append_to_a_legacy_server_is_an_error(cluster):
    reason = r"runs Waltz 0\.13, which does not support exactly-once"
    async with client_of(cluster) as client:
        client.claim = SimpleNamespace(check=AsyncMock())
        future = await client.append(b"", partition=0)
        with pytest.raises(errors.UsageError, match=reason):
            await future
        client.claim = None


@run_on_loop
async def test_a_partition_moves_from_a_server_of_this_version_to_a_0_13_program(cluster):
    with MemoryWaltz(1) as ours:
        async with client_of(cluster) as client:
            directory = client.directory
            directory.stale_owners = {0: ours.async_client()._client.directory.owners[0]}
            client._client_id = 50
            first = [await client.append(b"ours", partition=0) for _ in range(3)]
            assert await results_of(first) == [0, 1, 2]
            assert not await client.has_legacy_server()
            # Transactions stay in the log, whichever server owns the partition.
            cluster.fill(0, 3)
            cluster.owners[0] = (0, 2)
            await on_server(
                cluster, lambda: cluster.servers[0].add_partition(0, cluster.logs[0], 2)
            )
            directory.stale_owners = None
            directory.changed(directory.owners)
            later = [await client.append(b"original", partition=0) for _ in range(3)]
            assert await results_of(later) == [3, 4, 5]
            assert await client.has_legacy_server()
    assert payloads_in_log(cluster)[3:] == [b"original"] * 3


@run_on_loop
async def test_a_client_whose_mount_was_replaced_silently_mounts_on_a_new_connection(cluster):
    def replace(partition):
        (client_id,) = partition.mounts
        peer, generation = partition.mounts[client_id]
        later = Peer(peer.writer)
        later.sequence = peer.sequence + 1
        partition.mounts[client_id] = (later, generation)

    async with client_of(cluster) as client:
        await client.mount([0])
        await on_server(cluster, lambda: replace(cluster.partition(0)))
        assert await (await client.append(b"dropped at first", partition=0)) == 0


# --- all faults together


def inject_fault(cluster, chance):
    server = cluster.servers[cluster.owners[0][0]]
    partition = cluster.partition(0)
    match chance.randrange(6):
        case 0:
            server.cut()
        case 1 | 2:
            partition.break_session(chance.randrange(4))
        case 3:
            partition.drops = chance.randrange(3)
        case 4:
            partition.may_commit.clear()
        case 5:
            partition.may_commit.set()


async def inject_faults(cluster, chance):
    while True:
        await on_server(cluster, lambda: inject_fault(cluster, chance))
        if chance.random() < 0.1:
            target, kept = 1 - cluster.owners[0][0], chance.randrange(4)
            is_notified = chance.random() < 0.5
            await asyncio.to_thread(cluster.move, 0, target, kept=kept, is_notified=is_notified)
        await asyncio.sleep(0.01)


async def write(cluster, name, rounds, outcomes):
    async with client_of(cluster) as client:
        for number in range(rounds):
            payloads = [b"%d %d %d" % (name, number, i) for i in range(12)]
            futures = [
                await client.append(
                    data, partition=0, write_locks=[lock("shared", i)] if i % 2 else []
                )
                for i, data in enumerate(payloads)
            ]
            outcomes.update(zip(payloads, await results_of(futures), strict=True))


@run_on_loop
@pytest.mark.parametrize("seed", range(2))
async def test_no_wrong_outcome_is_reported_under_faults(seed, cluster):
    chance = random.Random(seed)
    rounds, writers, outcomes = 20, 3, {}
    async with asyncio.TaskGroup() as group:
        fault_task = group.create_task(inject_faults(cluster, chance))
        async with asyncio.TaskGroup() as writing:
            for name in range(writers):
                writing.create_task(write(cluster, name, rounds, outcomes))
        fault_task.cancel()
    payloads = payloads_in_log(cluster)
    assert len(set(payloads)) == len(payloads)
    assert len(outcomes) == rounds * writers * 12
    for data, outcome in outcomes.items():
        if isinstance(outcome, int):
            assert payloads[outcome] == data
        elif not isinstance(outcome, errors.OutcomeUnknown):
            assert data not in payloads
    assert sum(isinstance(each, int) for each in outcomes.values()) > rounds
