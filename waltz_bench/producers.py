"""`waltz-core bench test-producers`: any number of writers that share a pool of locks.

`conditional` and `hot-lock` are the two extremes, with fixed parameters for comparisons.

Rules:
    1. A writer has one append in flight; after a rejection it waits until the log has advanced and
       tries again.
    2. Acknowledged transactions are checked in the log afterwards.
"""

import asyncio
import time
from dataclasses import dataclass, field
from random import Random

import uvloop

from waltz_bench.measuring import BenchLoad, Measured, Meter
from waltz_bench.single_appends import check_ids, measured
from waltz_core import errors
from waltz_core.client import AsyncWaltzClient, lock
from waltz_core.records.record import TransactionId


@dataclass
class _Acknowledged:
    ids: dict[int, list[int]] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    rejected: int = 0


def producers(load: BenchLoad, meter: Meter) -> Measured:
    """Append with `--writers`, locks from a `--lock-pool`, and pauses of `--interval-ms`."""
    return uvloop.run(_producers(load, meter))


async def _producers(load: BenchLoad, meter: Meter) -> Measured:
    acknowledged = _Acknowledged()
    async with AsyncWaltzClient.connect(load.connect) as client:
        await client.mount()
        starts = await client.high_water_marks()
        meter.start()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(load.writers):
                group.create_task(_write(client, load, number, began + load.seconds, acknowledged))
        took = time.perf_counter() - began
        meter.stop()
        wrong = await check_ids(client, starts, acknowledged.ids)
    rows = [each for its in acknowledged.ids.values() for each in its]
    extra: dict[str, object] = {"rejected": acknowledged.rejected}
    return measured(load, rows, acknowledged.latencies_s, took=took, wrong=wrong, extra=extra)


async def _write(
    client: AsyncWaltzClient,
    load: BenchLoad,
    number: int,
    until: float,
    acknowledged: _Acknowledged,
) -> None:
    chance = Random(number)  # noqa: S311 - test data
    payload = chance.randbytes(load.payload_bytes)
    partition = number % client.partition_count
    mark = await client.high_water_mark(partition)
    while (sent := time.perf_counter()) < until:
        pool = range(load.lock_count if load.lock_pool else 0)
        locks = [lock("bench", chance.randrange(load.lock_pool)) for _ in pool]
        try:
            future = await client.append(
                payload, partition=partition, write_locks=locks, client_high_water_mark=mark
            )
            mark = await future
        except errors.LockFailed as failed:
            acknowledged.rejected += 1
            later = failed.high_water_mark
            mark = (
                await client.high_water_mark(partition) if later is None else TransactionId(later)
            )
            continue
        acknowledged.latencies_s.append(time.perf_counter() - sent)
        acknowledged.ids.setdefault(partition, []).append(mark)
        if load.interval_ms:
            await asyncio.sleep(load.interval_ms / 1000)
