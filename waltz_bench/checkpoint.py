"""The workload `checkpoint`: the pauses in a constant load when a new session begins.

After every 250,000 transactions, a new session raises the low-water marks. Appends pause while the
new session replaces the previous one.

Rules:
    1. One writer is the only user of one partition, and always has a few batches in flight. The
       cost of a new session is the longest time without an answer around the start of the session.
    2. The workload continues until it has seen a new session, for up to a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult, percentile_ms
from waltz_core.client import AsyncWaltzClient, RangeForm, RowOutcomeCode
from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from waltz_core.client import BatchOutcome

PARTITION = 0
WAIT_S_MAX = 60.0
POLL_INTERVAL_S = 0.01


class _AnswerTimes:
    """The times of all answers, and the times at which new sessions were seen, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.start_s = time.perf_counter()
        self.deadline_s = self.start_s + seconds
        self.answered_s: list[float] = []
        self.latencies_s: list[float] = []
        # For each session change, two times; the new session began between them.
        self.session_change_s: list[tuple[float, float]] = []
        self.ids: list[int] = []
        self.rejected = 0

    @property
    def is_over(self) -> bool:
        now = time.perf_counter()
        return now >= self.deadline_s and (
            bool(self.session_change_s) or now >= self.start_s + WAIT_S_MAX
        )

    def gaps_s(self) -> list[float]:
        """Return for each new session the longest time in s without an answer around its start."""
        times = np.array(self.answered_s)
        starts, ends = times[:-1], times[1:]
        return [
            float((ends - starts)[(ends >= before) & (starts <= after)].max(initial=0.0))
            for before, after in self.session_change_s
        ]


def checkpoint(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append batches to one partition until a new session was seen; report the pauses."""
    return uvloop.run(_checkpoint(load, meter))


async def _checkpoint(load: BenchLoad, meter: Meter) -> WorkloadResult:

    async with AsyncWaltzClient.connect(load.connect) as client:
        await (await client.append(b"", partition=PARTITION))
        start = await client.high_water_mark(PARTITION)
        run = _AnswerTimes(load.seconds)
        meter.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(_watch_sessions(client, run))
            group.create_task(_append_until_end(client, load, run))
        elapsed_s = time.perf_counter() - run.start_s
        meter.stop()
        lost, duplicated = await _check_log(client, run, start)
    gaps_s = run.gaps_s()
    usual_s = np.diff(run.answered_s).tolist()
    return WorkloadResult(
        rows=len(run.ids),
        seconds=elapsed_s,
        bytes=len(run.ids) * load.payload_bytes,
        latencies_s=run.latencies_s,
        gap_s_max=max(usual_s, default=0.0),
        acknowledged=len(run.ids),
        lost=lost,
        duplicated=duplicated,
        errors=run.rejected,
        extra={
            "checkpoints": len(gaps_s),
            "checkpoint_gaps_ms": [round(each * 1000, 2) for each in gaps_s],
            "usual_gap_p50_ms": percentile_ms(usual_s, 0.5),
            "usual_gap_p99_ms": percentile_ms(usual_s, 0.99),
        },
    )


async def _watch_sessions(client: AsyncWaltzClient, run: _AnswerTimes) -> None:
    """Poll the partition's session ID, and record between which two polls it changes."""
    session_id = (await client.replicas(PARTITION)).session_id
    previous_s = time.perf_counter()
    while not run.is_over:
        await asyncio.sleep(POLL_INTERVAL_S)
        new_session_id = (await client.replicas(PARTITION)).session_id
        now = time.perf_counter()
        if new_session_id != session_id:
            run.session_change_s.append((previous_s, now))
        session_id, previous_s = new_session_id, now


async def _append_until_end(client: AsyncWaltzClient, load: BenchLoad, run: _AnswerTimes) -> None:
    """Append batches with a few in flight until the run is over (rule 1)."""
    count = load.batch_rows
    none: list[list[int]] = [[] for _ in range(count)]
    payload = encode_append(
        [0] * count,
        [bytes(load.payload_bytes)] * count,
        write_locks=none,
        read_locks=none,
        append_locks=none,
    )
    mark = await client.high_water_mark(PARTITION)
    waiting: deque[tuple[float, Awaitable[BatchOutcome]]] = deque()
    while waiting or not run.is_over:
        while len(waiting) < load.in_flight and not run.is_over:
            sent_s = time.perf_counter()
            future = await client.append_batch(
                PARTITION, payload, count, client_high_water_mark=mark
            )
            waiting.append((sent_s, future))
        if not waiting:
            return
        sent_s, answer = waiting.popleft()
        outcome = await answer
        now = time.perf_counter()
        run.answered_s.append(now)
        run.latencies_s.append(now - sent_s)
        is_committed = outcome.reasons == RowOutcomeCode.COMMITTED
        run.ids += outcome.transaction_ids[is_committed].tolist()
        run.rejected += int((~is_committed).sum())
        mark = outcome.high_water_mark


async def _check_log(client: AsyncWaltzClient, run: _AnswerTimes, start: int) -> tuple[int, int]:
    """Read the rows back; return the number of lost IDs and of duplicated rows."""
    last = await client.high_water_mark(PARTITION)
    ids, requests = [], []
    async for chunk in client.read_range(PARTITION, start + 1, last, form=RangeForm.HEADERS):
        heads = np.frombuffer(chunk.records, raw_records.HEADER_DTYPE)
        ids.append(heads["transaction_id"].astype(np.int64))
        requests.append(heads["req_id"])
    if not ids:
        return len(run.ids), 0
    rows = np.concatenate(requests)
    lost = np.setdiff1d(np.array(run.ids, np.int64), np.concatenate(ids)).size
    duplicated = len(rows) - len(np.unique(rows)) + len(run.ids) - len(set(run.ids))
    return int(lost), int(duplicated)
