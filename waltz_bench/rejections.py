"""The workload `move-rejections`: false rejections after a partition has moved.

It kills servers of a local cluster and empties lock files. This shows how much a new owner knows
about locks that were written before.

Rules:
    1. Rows have high-water marks of different lags, and check locks that were never written. So all
       rejections are false. Even locks are written, and odd locks are checked.
    2. Before each measurement, the workload writes transactions with different locks, as many as
       the longest lag. So the three measurements begin with the same kind of log.
    3. `after` is measured from the first answer of the new owner on. `without_file` is measured in
       the same way, after the storages' lock files were emptied: the new owner knows only its
       high-water mark.
"""

from __future__ import annotations

import asyncio
import os
import time
from random import Random
from typing import TYPE_CHECKING

import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.client import AsyncWaltzClient, RowOutcomeCode
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.records.batches import encode_append
from waltz_core.records.record import PartitionId

if TYPE_CHECKING:
    from pathlib import Path

    from waltz_core.client import BatchOutcome
    from waltz_core.cluster.coordinator import Coordinator
    from waltz_core.local import LocalCluster

LAGS = (0, 1_000, 10_000, 50_000, 100_000)
ROUNDS = 3
PARTITION = 0
WAIT_S_MAX = 60.0
POLL_INTERVAL_S = 0.02
# The reasons that show that the server has checked the locks of a row.
_CODES_AFTER_LOCK_CHECK = (RowOutcomeCode.COMMITTED, RowOutcomeCode.LOCK)


class _RejectionRun:
    """One run on one partition, with its client and its cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        client: AsyncWaltzClient,
        coordinator: Coordinator,
        batch_rows: int,
    ) -> None:
        self.rows = 0
        self._cluster = cluster
        self._client = client
        self._coordinator = coordinator
        self._batch_rows = batch_rows
        self._random = Random(7)  # noqa: S311 - test data

    async def rates(self, *, moves: bool, with_file: bool = True) -> dict[str, float]:
        """Write, move the partition if `moves`, and return the rates by lag (rules 2 and 3)."""
        mark = await self._client.high_water_mark(PARTITION)
        mark_needed = mark + max(LAGS)
        while mark < mark_needed:
            mark = (await self._append(mark, is_writer=True)).high_water_mark
        if not moves:
            return {str(lag): await self._rate(mark - lag) for lag in LAGS}
        owner = await self._owner()
        await asyncio.to_thread(self._cluster.kill, owner)
        if not with_file:  # If done earlier, a lagging replica could still receive lock blocks.
            self._empty_lock_files()
        rates_by_lag = {str(lag): await self._rate(mark - lag) for lag in LAGS}
        await asyncio.to_thread(self._cluster.start, owner)
        await self.wait_until_complete()
        return rates_by_lag

    async def _rate(self, mark: int) -> float:
        """Return the share of rows that are rejected at a high-water mark (rule 1)."""
        rejected = row_count = 0
        for _ in range(ROUNDS):
            outcome = await self._append(mark, is_writer=False)
            rejected += int((outcome.reasons == RowOutcomeCode.LOCK).sum())
            row_count += self._batch_rows
        return rejected / row_count

    async def _append(self, mark: int, *, is_writer: bool) -> BatchOutcome:
        """Append a batch, and repeat it until the server has checked the locks of all rows."""
        count = self._batch_rows
        none: list[list[int]] = [[] for _ in range(count)]
        locks = [[2 * self._random.randrange(1 << 30) + (not is_writer)] for _ in range(count)]
        payload = encode_append(
            [0] * count,
            [b""] * count,
            write_locks=locks if is_writer else none,
            read_locks=none if is_writer else locks,
            append_locks=none,
        )
        until = time.perf_counter() + WAIT_S_MAX
        while time.perf_counter() < until:
            try:
                outcome = await (
                    await self._client.append_batch(
                        PARTITION, payload, count, client_high_water_mark=mark
                    )
                )
            except WaltzError:
                continue
            if all(
                RowOutcomeCode(each) in _CODES_AFTER_LOCK_CHECK
                for each in set(outcome.reasons.tolist())
            ):
                self.rows += count
                return outcome
        raise Unavailable(
            f"partition {PARTITION}: the append had no outcome within {WAIT_S_MAX:.0f} s"
        )

    async def _owner(self) -> str:
        view = await self._coordinator.read_servers()
        port = view.servers[view.owners[PartitionId(PARTITION)].server_id].port
        return next(member.name for member in self._cluster.members if member.port == port)

    async def wait_until_complete(self) -> None:
        """Wait until all servers are registered and own their partitions."""
        ports = {member.port for member in self._cluster.members if member.kind == "server"}
        until = time.perf_counter() + WAIT_S_MAX
        while time.perf_counter() < until:
            view = await self._coordinator.read_servers()
            if {server.port for server in view.servers.values()} == ports and view.is_settled:
                return
            await asyncio.sleep(POLL_INTERVAL_S)
        raise Unavailable(
            f"the cluster was not completely available again within {WAIT_S_MAX:.0f} s"
        )

    def _empty_lock_files(self) -> None:
        storages = [member.name for member in self._cluster.members if member.kind == "storage"]
        lock_files: list[Path] = []
        for name in storages:
            lock_files += (self._cluster.directory / name / str(PARTITION)).glob("waltz-x.lck*")
        if not lock_files:
            raise Unavailable(
                f"there are no lock files of partition {PARTITION} in {self._cluster.directory}"
            )
        for path in lock_files:
            os.truncate(path, 0)


def move_rejections(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Measure false rejections by lag: before a move, after a move, and without lock files."""
    return uvloop.run(_move_rejections(load, meter))


async def _move_rejections(load: BenchLoad, meter: Meter) -> WorkloadResult:

    if meter.cluster is None:
        raise BadConfig(
            "this workload kills daemons, so it needs a local cluster. Hint: pass the cluster's "
            "--directory, or omit --connect and --directory to use a temporary cluster."
        )
    async with (
        AsyncWaltzClient.connect(load.connect) as client,
        open_session(load.connect) as coordinator,
    ):
        run = _RejectionRun(meter.cluster, client, coordinator, load.batch_rows)
        await run.wait_until_complete()
        start_s = time.perf_counter()
        rejected = {
            "before": await run.rates(moves=False),
            "after": await run.rates(moves=True),
            "without_file": await run.rates(moves=True, with_file=False),
        }
        elapsed_s = time.perf_counter() - start_s
    return WorkloadResult(
        rows=run.rows,
        seconds=elapsed_s,
        bytes=0,
        acknowledged=run.rows,
        extra={"rejected_by_lag": rejected},
    )
