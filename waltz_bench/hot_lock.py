"""The workload `hot-lock`: eight clients increment one counter under one lock.

Each transaction contains the new value, and the ID of the transaction that wrote the old value.
Afterwards the workload checks the log.

Rules:
    1. A client computes a value only from a known value. The client has read the known value in the
       log, or the builder has returned it from an append in flight (`builder.predecessors`).
    2. The log contains every transaction of the run, with the ID that its author received. Each
       transaction contains the ID of its predecessor in the log, and the predecessor's value + 1.
       All other transactions count as lost or duplicated.
"""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import uvloop

from waltz_bench.single_appends import workload_result
from waltz_core.client import (
    AsyncWaltzClient,
    RangeForm,
    TransactionBuilder,
    TransactionContext,
    lock,
)
from waltz_core.records import raw_records
from waltz_core.records.record import RECORD_PREFIX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult


WRITERS: Final = 8
PARTITION: Final = 0
# The run, the value, and the ID of the transaction from which the value was computed.
_COUNTER_LAYOUT: Final = struct.Struct(">QQq")


class CounterView(NamedTuple):
    """A client's view of the counter: value, ID of the transaction that wrote it, and mark.

    The mark is the high-water mark up to which the client has read.
    """

    value: int
    writer: int
    mark: int


class _Increment(TransactionContext):
    """Increments the counter once; the client retries it until the log accepts it."""

    pipelined = True

    def __init__(
        self, client: AsyncWaltzClient, run: int, view: CounterView, padding: bytes
    ) -> None:
        super().__init__()
        self._client = client
        self._run = run
        self._padding = padding
        self.view = view
        self.value = 0
        self.attempts = 0
        self.reads = 0
        self.has_followed = False
        self._is_behind = False

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the workload."""
        assert partition_count > 0
        return PARTITION

    def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the next value (rule 1)."""
        return cast("bool", self._execute(builder))  # `AsyncWaltzClient` awaits this coroutine

    async def _execute(self, builder: TransactionBuilder) -> bool:
        self.attempts += 1
        last = builder.client_high_water_mark
        predecessors = builder.predecessors(self.view.mark)
        self.has_followed = bool(predecessors)
        if self._is_behind and not self.has_followed:
            self.reads += 1
            self.view = await _read(self._client, self._run, self.view, last)
            predecessors = builder.predecessors(self.view.mark)
        self._is_behind = True
        value, writer = self.view.value, self.view.writer
        for predecessor in predecessors:
            count = _counter_value(predecessor.data, self._run)
            if count is not None:
                value, writer = count, predecessor.transaction_id
        self.value = value + 1
        builder.data = _COUNTER_LAYOUT.pack(self._run, self.value, writer) + self._padding
        builder.set_write_locks([lock("hot", self._run)])
        return True


def _counter_value(data: bytes, run: int) -> int | None:
    """Return the counter's value in a transaction's data; None for another run's transaction."""
    if len(data) < _COUNTER_LAYOUT.size:
        return None
    data_run, value, _ = _COUNTER_LAYOUT.unpack_from(data)
    return value if data_run == run else None


async def _read(client: AsyncWaltzClient, run: int, view: CounterView, last: int) -> CounterView:
    """Return the counter up to transaction `last`; read the log after the mark of `view`."""
    value, writer = view.value, view.writer
    async for transaction_id, new_value, _ in _read_counts(client, run, view.mark + 1, last):
        value, writer = new_value, transaction_id
    return CounterView(value, writer, max(view.mark, last))


async def _read_counts(
    client: AsyncWaltzClient, run: int, first: int, last: int
) -> AsyncIterator[tuple[int, int, int]]:
    """Yield (ID, value, predecessor's ID) for each transaction of this run in a range."""
    async for chunk in client.read_range(PARTITION, first, last, form=RangeForm.WHOLE):
        offsets = raw_records.offsets_of(chunk.lengths).tolist()
        for position, offset in enumerate(offsets[:-1]):
            data = bytes(chunk.records[offset + RECORD_PREFIX.size : offsets[position + 1] - 4])
            if len(data) >= _COUNTER_LAYOUT.size and _COUNTER_LAYOUT.unpack_from(data)[0] == run:
                _, value, writer = _COUNTER_LAYOUT.unpack_from(data)
                yield chunk.first + position, value, writer


def hot_lock(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Increment a counter with eight clients under one lock; retry each increment until done."""
    return uvloop.run(_hot_lock(load, meter))


async def _hot_lock(load: BenchLoad, meter: Meter) -> WorkloadResult:
    run = time.time_ns()
    padding = Random(3).randbytes(max(0, load.payload_bytes - _COUNTER_LAYOUT.size))  # noqa: S311 - test data
    latencies: list[float] = []
    outcomes: dict[int, int] = {}
    attempts = followed = reads = 0

    async def write(client: AsyncWaltzClient, view: CounterView, until: float) -> None:
        nonlocal attempts, followed, reads
        while (sent_s := time.perf_counter()) < until:
            context = _Increment(client, run, view, padding)
            transaction_id = await (await client.submit(context))
            assert transaction_id is not None, "the context never aborts"
            latencies.append(time.perf_counter() - sent_s)
            outcomes[transaction_id] = context.value
            view = CounterView(context.value, transaction_id, transaction_id)
            attempts += context.attempts
            followed += context.has_followed
            reads += context.reads

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncWaltzClient.connect(load.connect))
            for _ in range(WRITERS)
        ]
        for client in clients:
            await client.mount([PARTITION])
        start = await clients[0].high_water_mark(PARTITION, linearizable=True)
        meter.start()
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(write(client, CounterView(0, -1, start), start_s + load.seconds))
        elapsed_s = time.perf_counter() - start_s
        meter.stop()
        wrong = await _check_log(clients[0], run, start, outcomes)
        batches = await _count_batches(clients[0], min(outcomes), max(outcomes))
    extra: dict[str, object] = {
        "writers": WRITERS,
        "conflicts_per_commit": round((attempts - len(outcomes)) / max(len(outcomes), 1), 2),
        "followed": followed,
        "commits_per_batch": round(len(outcomes) / batches, 2),
        "reads": reads,
    }
    return workload_result(
        load, list(outcomes), latencies, elapsed_s=elapsed_s, wrong_counts=wrong, extra=extra
    )


async def _count_batches(client: AsyncWaltzClient, first: int, last: int) -> int:
    """Return the number of storage batches that contain the transactions first..last."""
    ends: set[int] = set()
    async for chunk in client.read_range(PARTITION, first, last, form=RangeForm.HEADERS):
        ends.update(min(entry.last, last) for entry in chunk.lineage)
    return len(ends)


async def _check_log(
    client: AsyncWaltzClient, run: int, start: int, outcomes: dict[int, int]
) -> tuple[int, int]:
    """Return the counts of lost and of duplicated or wrongly computed transactions (rule 2)."""
    last = await client.high_water_mark(PARTITION, linearizable=True)
    before, value, wrong_count, found_count = -1, 0, 0, 0
    async for transaction_id, count, writer in _read_counts(client, run, start + 1, last):
        found_count += outcomes.get(transaction_id) == count
        wrong_count += (count, writer) != (value + 1, before)
        before, value = transaction_id, count
    return len(outcomes) - found_count, wrong_count
