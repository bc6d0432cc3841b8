"""The counter of the client IDs that servers issue."""

import asyncio

import pytest

from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.access.client_ids import BEFORE_FIRST_ISSUED_ID, FIRST_ISSUED_ID
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper


def coordinators(count):
    zookeeper = MemoryZooKeeper(asyncio.Event)
    return [zookeeper.coordinator("/waltz") for _ in range(count)]


async def start(coordinator, *, extensions=True):
    nodes = coordinator._nodes
    await nodes.create_missing(("/waltz", *((coordinator.paths.extensions,) if extensions else ())))


async def put(coordinator, last_id):
    data = model.encode_id_counter(last_id)
    await coordinator._znodes.write([CreateNode(coordinator.paths.issued_client_ids, data)])


@run_on_virtual_loop
async def test_two_servers_issue_consecutive_ids_and_no_id_twice():
    one, two = coordinators(2)
    await start(one, extensions=False)  # as in a cluster created by Waltz 0.13
    assert await one.issued_ids.read_last_id() == BEFORE_FIRST_ISSUED_ID
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.issued_ids.allocate_id()) for each in (one, two) * 20]
    assert sorted(task.result() for task in tasks) == list(
        range(FIRST_ISSUED_ID, FIRST_ISSUED_ID + 40)
    )
    assert await two.issued_ids.read_last_id() == FIRST_ISSUED_ID + 39


@run_on_virtual_loop
async def test_an_id_that_a_lost_write_may_have_allocated_is_skipped(monkeypatch):
    (one,) = coordinators(1)
    await start(one)
    await one.issued_ids.allocate_id()
    write, outcomes = one._znodes.write, [errors.CoordinatorOutcomeUnknown("lost")]

    async def lost_once(steps):
        await write(steps)
        if outcomes:
            raise outcomes.pop()

    monkeypatch.setattr(one._znodes, "write", lost_once)
    assert await one.issued_ids.allocate_id() == FIRST_ISSUED_ID + 2


@run_on_virtual_loop
async def test_a_raised_counter_is_not_lowered():
    (one,) = coordinators(1)
    await start(one)
    await one.issued_ids.increase_to(FIRST_ISSUED_ID + 70)
    await one.issued_ids.increase_to(FIRST_ISSUED_ID + 5)
    assert await one.issued_ids.allocate_id() == FIRST_ISSUED_ID + 71


@run_on_virtual_loop
async def test_no_id_is_allocated_after_the_highest_id():
    (one,) = coordinators(1)
    await start(one)
    await put(one, model.INT32_MAX - 1)
    assert list(await one.issued_ids.allocate_ids(9)) == [model.INT32_MAX]
    with pytest.raises(errors.BadFormat, match="all IDs up to 2147483647 are issued"):
        await one.issued_ids.allocate_id()


@run_on_virtual_loop
async def test_a_counter_below_the_first_id_is_an_error():
    (one,) = coordinators(1)
    await start(one)
    await put(one, 5)
    with pytest.raises(errors.BadFormat, match=r"/waltz/x/client: expected at least 1073741823"):
        await one.issued_ids.allocate_id()
