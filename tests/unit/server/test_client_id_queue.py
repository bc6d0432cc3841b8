"""Requests for client IDs share a write to ZooKeeper."""

import asyncio

import pytest

from tests.loops import poll_until, run_on_virtual_loop
from waltz_core.errors import CoordinatorUnavailable
from waltz_core.server.process.client_id_queue import ClientIdQueue


class Counter:
    """Allocates IDs from 0 on, after the test permits it."""

    def __init__(self):
        self.writes, self.last, self.error = [], -1, None
        self.may_write = asyncio.Event()

    async def allocate(self, count):
        self.writes.append(count)
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        first, self.last = self.last + 1, self.last + count
        return range(first, self.last + 1)


@run_on_virtual_loop
async def test_requests_that_wait_at_the_same_time_share_a_write():
    counter = Counter()
    queue = ClientIdQueue(counter.allocate)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(queue.next_client_id()) for _ in range(100)]
        cancelled = group.create_task(queue.next_client_id())
        await poll_until(lambda: counter.writes)
        cancelled.cancel()
        counter.may_write.set()
    assert len({task.result() for task in tasks}) == 100
    assert counter.writes == [1, 99]  # one write for all requests during the first write
    assert await queue.next_client_id() == 100


@run_on_virtual_loop
async def test_all_requests_that_share_a_failed_write_get_its_error():
    counter = Counter()
    queue = ClientIdQueue(counter.allocate)
    counter.may_write.set()
    counter.error = CoordinatorUnavailable("no ZooKeeper")
    for _ in range(2):
        with pytest.raises(CoordinatorUnavailable):
            await queue.next_client_id()
    counter.error = None
    assert await queue.next_client_id() == 0
