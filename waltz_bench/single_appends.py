"""The workloads of `waltz-core bench` with single transactions: latency and the feed.

They measure a service that sends one transaction at a time. `batch_appends.py` measures batches.

Rules:
    1. Depending on the workload, each append has its own lock, or a lock that other appends use as
       well. After a rejection, a writer waits until the log has advanced.
    2. Afterwards the acknowledged transactions are checked in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from waltz_bench.batch_appends import fill
from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult, percentile_ms
from waltz_core import errors
from waltz_core.client import AsyncCallbacks, AsyncTransaction, AsyncWaltzClient, RangeForm, lock
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, TransactionId

if TYPE_CHECKING:
    from collections.abc import Mapping


WRITERS = 64
SLICES = 4
SINGLES_IN_FLIGHT = 512


def append_one(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append one transaction at a time; with `--peer nats`, alternately to Waltz and JetStream."""
    return uvloop.run(_append_one(load, meter))


async def _append_one(load: BenchLoad, meter: Meter) -> WorkloadResult:

    payload = Random(3).randbytes(load.payload_bytes)  # noqa: S311 - test data
    latencies_s: list[float] = []
    peer_times: list[float] = []
    ids: list[int] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncWaltzClient.connect(load.connect))
        peer = None
        if load.peer is not None:
            from waltz_bench.compared.nats_peer import Jetstream  # noqa: PLC0415 - an optional package

            peer = await stack.enter_async_context(Jetstream())
        starts = await client.high_water_marks()
        for _ in range(20):
            await (await client.append(payload, partition=0))
            if peer is not None:
                await peer.publish(payload)
        meter.start()
        elapsed_s = 0.0
        for _ in range(SLICES):
            start_s = time.perf_counter()
            until = start_s + load.seconds / SLICES
            while (sent_s := time.perf_counter()) < until:
                locks = [lock("bench", len(ids))]
                ids.append(await (await client.append(payload, partition=0, write_locks=locks)))
                latencies_s.append(time.perf_counter() - sent_s)
            elapsed_s += time.perf_counter() - start_s
            until = time.perf_counter() + load.seconds / SLICES
            while peer is not None and (sent_s := time.perf_counter()) < until:
                await peer.publish(payload)
                peer_times.append(time.perf_counter() - sent_s)
        meter.stop()
        lost, duplicated = await check_ids(client, starts, {0: ids})
    extra: dict[str, object] = {}
    if peer_times:
        extra = {
            f"{load.peer}_p{share}_ms": percentile_ms(peer_times, share / 100) for share in (50, 99)
        }
        extra["p50_ratio"] = round(float(np.median(latencies_s) / np.median(peer_times)), 2)
    return workload_result(
        load, ids, latencies_s, elapsed_s=elapsed_s, wrong_counts=(lost, duplicated), extra=extra
    )


def append_single(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append single transactions to all partitions round-robin, with many in flight."""
    return uvloop.run(_append_single(load, meter))


async def _append_single(load: BenchLoad, meter: Meter) -> WorkloadResult:
    payload = Random(3).randbytes(load.payload_bytes)  # noqa: S311 - test data
    latencies: list[float] = []
    ids: dict[int, list[int]] = {}
    async with AsyncWaltzClient.connect(load.connect) as client:
        await client.mount()
        starts = await client.high_water_marks()
        waiting: deque[tuple[float, int, asyncio.Future[TransactionId]]] = deque()
        meter.start()
        start_s = time.perf_counter()
        until = start_s + load.seconds
        append_number = 0
        while waiting or time.perf_counter() < until:
            while len(waiting) < SINGLES_IN_FLIGHT and (sent_s := time.perf_counter()) < until:
                append_number += 1
                partition = append_number % client.partition_count
                locks = [lock("bench", append_number)]
                future = await client.append(payload, partition=partition, write_locks=locks)
                waiting.append((sent_s, partition, future))
            if waiting:
                sent_s, partition, future = waiting.popleft()
                ids.setdefault(partition, []).append(await future)
                latencies.append(time.perf_counter() - sent_s)
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        lost, duplicated = await check_ids(client, starts, ids)
    rows = [each for part in ids.values() for each in part]
    return workload_result(
        load, rows, latencies, elapsed_s=elapsed_s, wrong_counts=(lost, duplicated), extra={}
    )


def conditional(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append to one partition with 64 writers, each with its own lock and one append in flight.

    The workload uses one partition, because each peer in the comparison has one stream, table or
    group.
    """
    return uvloop.run(_conditional(load, meter))


async def _conditional(load: BenchLoad, meter: Meter) -> WorkloadResult:
    payload = Random(3).randbytes(load.payload_bytes)  # noqa: S311 - test data
    latencies: list[float] = []
    partition = 0
    ids: list[int] = []
    rejected = 0

    async def write(client: AsyncWaltzClient, number: int, until: float) -> None:
        nonlocal rejected
        locks, mark = [lock("writer", number)], await client.high_water_mark(partition)
        while (sent_s := time.perf_counter()) < until:
            try:
                mark = await (
                    await client.append(
                        payload,
                        partition=partition,
                        write_locks=locks,
                        client_high_water_mark=mark,
                    )
                )
            except errors.LockFailed:  # a different lock has the same slot in the lock table
                rejected += 1
                mark = await client.high_water_mark(partition)
                continue
            latencies.append(time.perf_counter() - sent_s)
            ids.append(mark)

    async with AsyncWaltzClient.connect(load.connect) as client:
        await client.mount()
        starts = await client.high_water_marks()
        meter.start()
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(WRITERS):
                group.create_task(write(client, number, start_s + load.seconds))
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        lost, duplicated = await check_ids(client, starts, {partition: ids})
    extra: dict[str, object] = {"writers": WRITERS, "rejected": rejected}
    return workload_result(
        load, ids, latencies, elapsed_s=elapsed_s, wrong_counts=(lost, duplicated), extra=extra
    )


class _CountCallbacks(AsyncCallbacks):
    """Counts the transactions of the feed, without reading their data."""

    def __init__(self, count: int) -> None:
        self._expected_count = count
        self.count = 0
        self.is_done = asyncio.Event()

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Count a transaction, and signal the last transaction."""
        self.count += 1
        if self.count == self._expected_count:
            self.is_done.set()


def feed(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Catch up with a log of `--rows` transactions by the feed, headers only."""
    return uvloop.run(_feed(load, meter))


async def _feed(load: BenchLoad, meter: Meter) -> WorkloadResult:

    async with AsyncWaltzClient.connect(load.connect) as client:
        marks = await client.high_water_marks()
        if sum(marks.values()) + len(marks) < load.rows:
            await fill(client, load)
            marks = await client.high_water_marks()
        rows = sum(marks.values()) + len(marks)
        callbacks = _CountCallbacks(rows)
        meter.start()
        start_s = time.perf_counter()
        await client.subscribe(callbacks)
        await callbacks.is_done.wait()
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
    return WorkloadResult(
        rows=rows,
        seconds=elapsed_s,
        bytes=rows * 20,
        acknowledged=rows,
        lost=max(0, rows - callbacks.count),
        duplicated=max(0, callbacks.count - rows),
    )


def workload_result(
    load: BenchLoad,
    ids: list[int],
    latencies: list[float],
    *,
    elapsed_s: float,
    wrong_counts: tuple[int, int],
    extra: dict[str, object],
) -> WorkloadResult:
    """Return the result of a workload with single appends; `elapsed_s` is the time in seconds."""

    return WorkloadResult(
        rows=len(ids),
        seconds=elapsed_s,
        bytes=len(ids) * load.payload_bytes,
        latencies_s=latencies,
        gap_s_max=max(latencies, default=0.0),
        acknowledged=len(ids),
        lost=wrong_counts[0],
        duplicated=wrong_counts[1],
        extra=extra,
    )


async def check_ids(
    client: AsyncWaltzClient, starts: Mapping[int, int], acknowledged: Mapping[int, list[int]]
) -> tuple[int, int]:
    """Return how many acknowledged IDs the log does not contain, and how many are duplicated."""
    lost = duplicated = 0
    for partition, ids in acknowledged.items():
        duplicated += len(ids) - len(set(ids))
        last = await client.high_water_mark(partition)
        lost += sum(1 for transaction_id in ids if not starts[partition] < transaction_id <= last)
        first = max(starts[partition], BEFORE_FIRST) + 1
        chunks = client.read_range(partition, first, last, form=RangeForm.HEADERS)
        requests = [
            np.frombuffer(chunk.records, raw_records.HEADER_DTYPE)["req_id"]
            async for chunk in chunks
        ]
        if requests:
            request_ids = np.concatenate(requests)
            duplicated += len(request_ids) - len(np.unique(request_ids))
    return lost, duplicated


# ---- producers: writers that share a pool of locks


@dataclass
class _AcknowledgedAppends:
    ids: dict[int, list[int]] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    rejected: int = 0


def producers(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append with `--writers`, locks from a `--lock-pool`, and pauses of `--interval-ms`."""
    return uvloop.run(_producers(load, meter))


async def _producers(load: BenchLoad, meter: Meter) -> WorkloadResult:
    acknowledged = _AcknowledgedAppends()
    async with AsyncWaltzClient.connect(load.connect) as client:
        await client.mount()
        starts = await client.high_water_marks()
        meter.start()
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(load.writers):
                group.create_task(
                    _write(client, load, number, start_s + load.seconds, acknowledged)
                )
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        wrong_counts = await check_ids(client, starts, acknowledged.ids)
    rows = [transaction_id for ids in acknowledged.ids.values() for transaction_id in ids]
    extra: dict[str, object] = {"rejected": acknowledged.rejected}
    return workload_result(
        load,
        rows,
        acknowledged.latencies_s,
        elapsed_s=elapsed_s,
        wrong_counts=wrong_counts,
        extra=extra,
    )


async def _write(
    client: AsyncWaltzClient,
    load: BenchLoad,
    number: int,
    until: float,
    acknowledged: _AcknowledgedAppends,
) -> None:
    random = Random(number)  # noqa: S311 - test data
    payload = random.randbytes(load.payload_bytes)
    partition = number % client.partition_count
    mark = await client.high_water_mark(partition)
    while (sent_s := time.perf_counter()) < until:
        pool = range(load.lock_count if load.lock_pool else 0)
        locks = [lock("bench", random.randrange(load.lock_pool)) for _ in pool]
        try:
            future = await client.append(
                payload, partition=partition, write_locks=locks, client_high_water_mark=mark
            )
            mark = await future
        except errors.LockFailed as failed:
            acknowledged.rejected += 1
            new_mark = failed.high_water_mark
            mark = (
                await client.high_water_mark(partition)
                if new_mark is None
                else TransactionId(new_mark)
            )
            continue
        acknowledged.latencies_s.append(time.perf_counter() - sent_s)
        acknowledged.ids.setdefault(partition, []).append(mark)
        if load.interval_ms:
            await asyncio.sleep(load.interval_ms / 1000)
