"""The cache of fed payloads: content, expiry and size limit."""

import asyncio
from collections import defaultdict

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import memory_cluster
from tests.unit.client.test_async_client import batch_of, wait_until
from waltz_core.client import AsyncCallbacks
from waltz_core.client.read.data_cache import DataBudget
from waltz_core.records.record import TransactionId

COUNT = 60
SIZE = 2_000


class ReadingCallbacks(AsyncCallbacks):
    """Requests the data of each transaction."""

    def __init__(self) -> None:
        self.seen: dict[int, list[bytes]] = defaultdict(list)
        self.kept_bytes: list[int] = []
        self.budget: DataBudget | None = None
        self.transactions: dict[int, object] = {}

    async def apply_transaction(self, transaction):
        self.seen[transaction.partition_id].append(await transaction.data())
        self.transactions.setdefault(transaction.partition_id, transaction)
        assert self.budget is not None
        self.kept_bytes.append(self.budget.used_bytes)


async def write(client, partition):
    payload = batch_of(*(b"%d" % i + bytes(SIZE) for i in range(COUNT)))
    await (await client.append_batch(partition, payload, COUNT, client_high_water_mark=-1))


async def read_all(client, partitions):
    callbacks = ReadingCallbacks()
    callbacks.budget = client.subscriptions.data_budget
    await client.subscribe(callbacks, range(partitions))
    await wait_until(
        lambda: all(len(callbacks.seen[number]) == COUNT for number in range(partitions))
    )
    assert all(
        callbacks.seen[number] == [b"%d" % i + bytes(SIZE) for i in range(COUNT)]
        for number in range(partitions)
    )
    return callbacks


@run_on_virtual_loop
async def test_all_partitions_share_one_budget_while_they_catch_up():
    bytes_max = 50_000
    async with (
        memory_cluster(partition_count=4) as cluster,
        cluster.client().open_during() as client,
    ):
        client.subscriptions.data_budget = DataBudget(bytes_max)
        for partition in range(4):
            await write(client, partition)
        callbacks = await read_all(client, 4)
        assert SIZE < max(callbacks.kept_bytes) <= bytes_max


@run_on_virtual_loop
async def test_the_cache_drops_applied_data():
    async with (
        memory_cluster(partition_count=2) as cluster,
        cluster.client().open_during() as client,
    ):
        for partition in range(2):
            await write(client, partition)
        callbacks = await read_all(client, 2)
        assert max(callbacks.kept_bytes) >= SIZE
        await wait_until(lambda: client.subscriptions.data_budget.used_bytes == 0)
        # The data can still be read from the log.
        assert await callbacks.transactions[1].data() == b"0" + bytes(SIZE)
        await client.set_partitions([0])
        assert await callbacks.transactions[1].data() == b"0" + bytes(SIZE)


@run_on_virtual_loop
async def test_a_feed_that_ends_releases_its_prefetched_ranges():
    async with (
        memory_cluster(partition_count=1) as cluster,
        cluster.client().open_during() as client,
    ):
        await write(client, 0)
        may_continue = asyncio.Event()

        class WaitingCallbacks(AsyncCallbacks):
            async def apply_transaction(self, transaction):
                await transaction.data()
                await may_continue.wait()

        await client.subscribe(WaitingCallbacks())
        budget = client.subscriptions.data_budget
        await wait_until(lambda: budget.used_bytes > 0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.set_partitions([]))
            may_continue.set()
        assert budget.used_bytes == 0


class FakeCache:
    """A cache that records the costs of its chunks by first ID."""

    def __init__(self, budget):
        self.budget = budget
        self.kept = {}
        budget.add(self)

    def keep(self, first, cost_bytes):
        self.kept[first] = cost_bytes
        self.budget.take(self, TransactionId(first), cost_bytes)

    def drop(self, first):
        del self.kept[first]
        self.budget.release(self, first)


def test_chunks_over_the_budget_are_dropped_oldest_first_except_the_newest():
    budget = DataBudget(100)
    one, two = FakeCache(budget), FakeCache(budget)
    one.keep(0, 40)
    two.keep(0, 40)
    one.keep(7, 30)
    assert (one.kept, two.kept) == ({7: 30}, {0: 40})
    assert budget.used_bytes == 70
    two.keep(9, 500)  # a chunk that is larger than the budget
    assert (one.kept, two.kept) == ({}, {9: 500})
    two.keep(10, 1)
    assert (two.kept, budget.used_bytes) == ({10: 1}, 1)


def test_the_share_of_a_partition_shrinks_with_the_number_of_partitions():
    budget = DataBudget(8_000)
    assert budget.fetch_bytes_max == 2_000
    holders = [FakeCache(budget) for _ in range(10)]
    assert budget.fetch_bytes_max == 200
    for holder in holders[1:]:
        budget.remove(holder)
    assert budget.fetch_bytes_max == 2_000
