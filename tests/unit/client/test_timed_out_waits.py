"""Callers that stop waiting for a partition leave no state behind.

Contexts with a deadline, and appends to a partition without a server, time out by the thousands.
"""

import asyncio
import contextlib
from random import Random
from types import SimpleNamespace

from tests.loops import run_on_virtual_loop
from tests.unit.client.scenarios import PARTITION
from waltz_core import errors
from waltz_core.client.read.feed_delivery import Applier
from waltz_core.client.stream.appends import Appends, AppendWindow, PendingRow
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.config import ClientConfig
from waltz_core.records.record import TransactionId

COUNT = 10


async def time_out(answer):
    with contextlib.suppress(TimeoutError, errors.Unreachable):
        async with asyncio.timeout(1.0):
            await answer


def partition_without_a_server():
    def spawn(task, name):
        task.close()

    services = SimpleNamespace(
        config=ClientConfig(request_timeout_ms=100),
        ids=SimpleNamespace(current=None),
        random=Random(0),
        claim=None,
        tracer=None,
        spawn=spawn,
    )
    return ClientPartition(PARTITION, services)


@run_on_virtual_loop
async def test_a_timed_out_wait_for_a_feed_leaves_no_state():
    applier = Applier(PARTITION, None, lambda mark: None)
    applier.start(TransactionId(3))
    for _ in range(COUNT):
        await time_out(applier.wait_until_applied(TransactionId(4)))
    assert not applier._waiting


@run_on_virtual_loop
async def test_timed_out_waits_for_a_mount_and_for_a_mark_leave_no_state():
    partition = partition_without_a_server()
    for _ in range(COUNT):
        await time_out(partition.ensure_mounted())
        await time_out(partition.wait_until_known(TransactionId(4)))
    assert not partition._mount_waiters
    assert not partition._mark_waiters
    partition.close()


@run_on_virtual_loop
async def test_a_timed_out_wait_for_outcomes_leaves_no_state():
    window = AppendWindow(rows_max=100, bytes_max=1 << 20)
    appends = Appends(PARTITION, window, lambda event: None, batch_rows=1, batch_bytes=100)
    row = PendingRow(b"data", 0, TransactionId(0))
    assert window.try_take(1, row.size_bytes)
    appends.add(row)
    for _ in range(COUNT):
        await time_out(appends.wait_for_earlier())
    assert not any(flush_group.waiting for flush_group in appends._flush_groups)
    appends.abandon(errors.Unreachable("no server is there"))
    assert row.future.exception() is not None
