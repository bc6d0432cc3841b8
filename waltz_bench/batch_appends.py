"""The workloads of `waltz-core bench` that append or read batches, without Spark.

Each workload is one function, which does what an application would do. `command.py` calls it, and
reports the result.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.client import AsyncWaltzClient, BatchOutcome, RangeForm, RowOutcomeCode
from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append
from waltz_core.records.record import BEFORE_FIRST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping


I64 = npt.NDArray[np.int64]
LAGS = (0, 1_000, 10_000, 50_000, 100_000)
# The number of locks to choose from. Two rows of one run rarely choose the same lock.
LOCK_SPACE = 1 << 31


@dataclass
class _AppendOutcomes:
    """The outcomes of the appended batches: IDs by partition, times in s, and counts of rows."""

    ids: dict[int, list[I64]] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    acknowledged: int = 0
    rejected: int = 0
    errors: int = 0

    def gap_s_max(self) -> float:
        """Return the longest time in seconds between two consecutive answers."""
        return float(np.diff(np.array(sorted(self.answered_s))).max(initial=0.0))


def append_batch(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append batches to every partition for `--seconds`, several in flight; read back all rows."""
    return uvloop.run(_append_batch(load, meter))


async def _append_batch(load: BenchLoad, meter: Meter) -> WorkloadResult:

    async with AsyncWaltzClient.connect(load.connect) as client:
        partitions = list(range(client.partition_count))
        starts = await client.high_water_marks()
        payloads = [_payload(load, Random(seed)) for seed in range(8)]  # noqa: S311 - test data
        for partition in partitions:
            # mount before the clock starts
            await _append_one_batch(client, partition, payloads[0], load)
        outcomes_so_far = _AppendOutcomes()
        lanes = max(1, load.in_flight)
        meter.start()
        start_s = time.perf_counter()
        until = start_s + load.seconds
        async with asyncio.TaskGroup() as group:
            for partition in partitions:
                group.create_task(
                    _append_until(
                        client, partition, payloads, load, (until, lanes), outcomes_so_far
                    )
                )
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        lost, duplicated = await _check(client, starts, outcomes_so_far)
    return WorkloadResult(
        rows=outcomes_so_far.acknowledged,
        seconds=elapsed_s,
        bytes=outcomes_so_far.acknowledged * load.payload_bytes,
        latencies_s=outcomes_so_far.latencies_s,
        gap_s_max=outcomes_so_far.gap_s_max(),
        acknowledged=outcomes_so_far.acknowledged,
        lost=lost,
        duplicated=duplicated,
        errors=outcomes_so_far.errors,
        extra={"rejected": outcomes_so_far.rejected, "partitions": len(partitions)},
    )


def _payload(load: BenchLoad, random: Random, *, has_write_locks: bool = True) -> bytes:
    """Encode a batch with write locks or append locks. Append locks never cause a rejection."""
    count = load.batch_rows
    data = [random.randbytes(load.payload_bytes) for _ in range(count)]
    locks = [[random.randrange(LOCK_SPACE) for _ in range(load.lock_count)] for _ in range(count)]
    none: list[list[int]] = [[] for _ in range(count)]
    return encode_append(
        [0] * count,
        data,
        write_locks=locks if has_write_locks else none,
        read_locks=none,
        append_locks=none if has_write_locks else locks,
    )


async def _append_one_batch(
    client: AsyncWaltzClient, partition: int, payload: bytes, load: BenchLoad
) -> None:
    mark = await client.high_water_mark(partition)
    await (
        await client.append_batch(partition, payload, load.batch_rows, client_high_water_mark=mark)
    )


async def _append_until(
    client: AsyncWaltzClient,
    partition: int,
    payloads: list[bytes],
    load: BenchLoad,
    limits: tuple[float, int],
    outcomes_so_far: _AppendOutcomes,
) -> None:
    """Keep several batches of one partition in flight until the time is over."""
    deadline_s, in_flight = limits
    mark = await client.high_water_mark(partition)
    waiting: deque[tuple[float, Awaitable[BatchOutcome]]] = deque()
    payload_number = partition
    while waiting or time.perf_counter() < deadline_s:
        while len(waiting) < in_flight and time.perf_counter() < deadline_s:
            payload_number += 1
            sent_s = time.perf_counter()
            future = await client.append_batch(
                partition,
                payloads[payload_number % len(payloads)],
                load.batch_rows,
                client_high_water_mark=mark,
            )
            waiting.append((sent_s, future))
        if not waiting:
            return
        sent_s, answer = waiting.popleft()
        outcome = await answer
        now = time.perf_counter()
        outcomes_so_far.latencies_s.append(now - sent_s)
        outcomes_so_far.answered_s.append(now)
        committed = outcome.reasons == RowOutcomeCode.COMMITTED
        ids = outcome.transaction_ids[committed]
        outcomes_so_far.ids.setdefault(partition, []).append(ids)
        outcomes_so_far.acknowledged += len(ids)
        outcomes_so_far.rejected += int((~committed).sum())
        mark = outcome.high_water_mark


async def _check(
    client: AsyncWaltzClient, starts: Mapping[int, int], outcomes_so_far: _AppendOutcomes
) -> tuple[int, int]:
    """Read the headers of all appended rows; return the counts of lost and duplicated rows."""
    lost = duplicated = 0
    for partition, chunks in outcomes_so_far.ids.items():
        ids = np.sort(np.concatenate(chunks)) if chunks else np.zeros(0, np.int64)
        duplicated += len(ids) - len(np.unique(ids))
        last = await client.high_water_mark(partition)
        id_arrays: list[I64] = []
        requests: list[npt.NDArray[np.void]] = []
        async for chunk in client.read_range(
            partition, starts[partition] + 1, last, form=RangeForm.HEADERS
        ):
            heads = np.frombuffer(chunk.records, raw_records.HEADER_DTYPE)
            id_arrays.append(heads["transaction_id"].astype(np.int64))
            requests.append(heads["req_id"])
        read_ids = np.concatenate(id_arrays) if id_arrays else np.zeros(0, np.int64)
        lost += int(np.setdiff1d(ids, read_ids).size)
        if requests:
            request_ids = np.concatenate(requests)
            duplicated += len(request_ids) - len(np.unique(request_ids))
    return lost, duplicated


def replay(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Read the whole log with one reader; append `--rows` rows first if the log has fewer."""
    return uvloop.run(_replay(load, meter))


async def _replay(load: BenchLoad, meter: Meter) -> WorkloadResult:

    async with AsyncWaltzClient.connect(load.connect) as client:
        marks = await client.high_water_marks()
        if sum(marks.values()) + len(marks) < load.rows:
            await fill(client, load)
            marks = await client.high_water_marks()
        rows = size = 0
        latencies: list[float] = []
        meter.start()
        start_s = last = time.perf_counter()
        for partition, mark in marks.items():
            async for chunk in client.read_range(partition, BEFORE_FIRST + 1, mark):
                rows += len(chunk.lengths)
                size += len(chunk.records)
                now = time.perf_counter()
                latencies.append(now - last)
                last = now
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        expected = sum(marks.values()) + len(marks)
    return WorkloadResult(
        rows=rows,
        seconds=elapsed_s,
        bytes=size,
        latencies_s=latencies,
        gap_s_max=max(latencies, default=0.0),
        acknowledged=expected,
        lost=expected - rows,
    )


async def fill(client: AsyncWaltzClient, load: BenchLoad) -> None:
    """Append `--rows` rows with append locks, distributed evenly over all partitions."""
    payload = _payload(load, Random(1), has_write_locks=False)  # noqa: S311 - test data
    per_partition = -(-load.rows // (load.batch_rows * client.partition_count))
    async with asyncio.TaskGroup() as group:
        for partition in range(client.partition_count):
            group.create_task(_fill_one(client, partition, payload, load, per_partition))


async def _fill_one(
    client: AsyncWaltzClient, partition: int, payload: bytes, load: BenchLoad, count: int
) -> None:
    waiting: deque[Awaitable[BatchOutcome]] = deque()
    mark = await client.high_water_mark(partition)
    for _ in range(count):
        if len(waiting) >= load.in_flight:
            mark = (await waiting.popleft()).high_water_mark
        waiting.append(
            await client.append_batch(
                partition, payload, load.batch_rows, client_high_water_mark=mark
            )
        )
    for answer in waiting:
        await answer


def false_rejections(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Measure how often transactions without a real conflict are rejected, for several lags.

    The lag of an append is the number of transactions in the log after its high-water mark. The
    workload first fills one partition with transactions that have write locks. Then it appends rows
    at high-water marks of different lags. The locks of these rows were never written.
    """
    return uvloop.run(_false_rejections(load, meter))


async def _false_rejections(load: BenchLoad, meter: Meter) -> WorkloadResult:

    random = Random(7)  # noqa: S311 - test data
    partition, count = 0, load.batch_rows
    none: list[list[int]] = [[] for _ in range(count)]
    data = [b""] * count
    rates: dict[str, float] = {}
    rows = 0
    async with AsyncWaltzClient.connect(load.connect) as client:
        meter.start()
        start_s = time.perf_counter()
        first = await client.high_water_mark(partition)
        while await client.high_water_mark(partition) < first + max(LAGS):
            # Even locks are written, and odd locks are only checked, so no real conflict exists.
            locks = [[2 * random.randrange(1 << 30)] for _ in range(count)]
            payload = encode_append(
                [0] * count, data, write_locks=locks, read_locks=none, append_locks=none
            )
            await _append_one_batch(client, partition, payload, load)
            rows += count
        for lag in LAGS:
            mark = await client.high_water_mark(partition) - lag
            rejected = row_count = 0
            for _ in range(10):
                locks = [[2 * random.randrange(1 << 30) + 1] for _ in range(count)]
                payload = encode_append(
                    [0] * count, data, write_locks=none, read_locks=locks, append_locks=none
                )
                answer = await client.append_batch(
                    partition, payload, count, client_high_water_mark=mark
                )
                outcome = await answer
                rejected += int((outcome.reasons == RowOutcomeCode.LOCK).sum())
                row_count += count
            rates[str(lag)] = rejected / row_count
            rows += row_count
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
    return WorkloadResult(
        rows=rows, seconds=elapsed_s, bytes=0, acknowledged=rows, extra={"rejected_by_lag": rates}
    )
