"""The workloads `failover-*`, `rolling-restart` and `zookeeper-loss`: the longest gap in answers.

They stop and start daemons of a local cluster under load, and measure the longest time without an
answer. They also check that no row is lost or duplicated.

Rules:
    1. Every partition has its own writer. The writer sends a few rows at a time, and then pauses
       for a short time. A step lasts until all partitions have continued. The gap of a step is the
       longest time between two acknowledgements of the same partition during the step.
    2. If a row is reported as not in the log, it is sent again, as a user would do. If the log
       contains the row nevertheless, the check of the log reports a duplicate. Rows are identified
       by their content.
    3. Each step begins with a complete cluster: all servers are registered and, if storages are
       restarted, all replicas are engaged.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.client import AsyncWaltzClient, RowOutcomeCode
from waltz_core.cluster.znodes.interface import SessionState
from waltz_core.cluster.znodes.model import UNRESOLVED
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.records import batches
from waltz_core.records.batches import encode_append
from waltz_core.records.record import PartitionId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from waltz_core.client import BatchOutcome
    from waltz_core.cluster.coordinator import Coordinator, Ownership
    from waltz_core.local import LocalCluster

STEPS = 5
ROWS = 10
PAUSE_S = 0.002
SETTLE_S = 1.0
WAIT_S_MAX = 60.0
POLL_INTERVAL_S = 0.02
# How long ZooKeeper is down, in seconds: several session timeouts of a server.
OUTAGE_S = 15.0


@dataclass
class _WriterAnswers:
    """The acknowledgements that the writer of one partition received."""

    partition: int
    answered_s: list[float] = field(default_factory=list)
    acknowledged: Counter[bytes] = field(default_factory=Counter)
    unknown: set[bytes] = field(default_factory=set)
    resent_count: int = 0

    def gap_s(self, start_s: float, ended: float) -> float:
        """Return the longest gap in s between two answers that overlaps an interval."""
        gaps = [each for each in pairwise(self.answered_s) if each[1] >= start_s]
        return max((b - a for a, b in gaps if a <= ended), default=ended - start_s)


class _FailoverRun:
    """One run: a cluster, one writer for each partition, and the measured gaps (module's rules)."""

    def __init__(
        self, cluster: LocalCluster, client: AsyncWaltzClient, coordinator: Coordinator
    ) -> None:
        self.cluster = cluster
        self.client = client
        self.writers = [_WriterAnswers(partition) for partition in range(client.partition_count)]
        self.gaps_s: dict[str, list[float]] = {}
        self.extra: dict[str, float] = {}
        self._coordinator = coordinator
        self._is_finished = False

    async def write(self, writer: _WriterAnswers) -> None:
        """Append rows to one partition until the run is over (rules 1 and 2)."""
        count = 0
        while not self._is_finished:
            rows = [b"%d:%d" % (writer.partition, count + number) for number in range(ROWS)]
            count += ROWS
            while rows:
                rows = await self._append(writer, rows)
            await asyncio.sleep(PAUSE_S)

    async def _append(self, writer: _WriterAnswers, rows: list[bytes]) -> list[bytes]:
        """Send rows once; return those that the log does not contain, to be sent again."""
        none: list[list[int]] = [[] for _ in rows]
        payload = encode_append(
            [0] * len(rows), rows, write_locks=none, read_locks=none, append_locks=none
        )
        try:
            outcome: BatchOutcome = await (
                await self.client.append_batch(
                    writer.partition, payload, len(rows), client_high_water_mark=-1
                )
            )
        except WaltzError:
            writer.unknown.update(rows)
            return []
        is_committed = outcome.reasons == RowOutcomeCode.COMMITTED
        if is_committed.any():
            writer.answered_s.append(time.perf_counter())
        writer.acknowledged.update(
            row
            for row, is_row_committed in zip(rows, is_committed, strict=True)
            if is_row_committed
        )
        uncommitted = [
            row
            for row, is_row_committed in zip(rows, is_committed, strict=True)
            if not is_row_committed
        ]
        if uncommitted:
            writer.resent_count += 1
            await asyncio.sleep(PAUSE_S)
        return uncommitted

    def stop(self) -> None:
        """Let all writers finish."""
        self._is_finished = True

    async def step(self, kind: str, run_step: Callable[[], Awaitable[None]]) -> None:
        """Run a step until all partitions have continued; record its longest gap (rule 1)."""
        await asyncio.sleep(SETTLE_S)
        start_s = time.perf_counter()
        await run_step()
        step_end_s = time.perf_counter()
        await self._wait_for(
            "acknowledgements in each partition",
            lambda: all(
                writer.answered_s and writer.answered_s[-1] > step_end_s for writer in self.writers
            ),
        )
        await asyncio.sleep(SETTLE_S)
        now = time.perf_counter()
        gap_s = max(writer.gap_s(start_s, now) for writer in self.writers)
        self.gaps_s.setdefault(kind, []).append(gap_s)

    async def _wait_for(self, subject: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.perf_counter() + WAIT_S_MAX
        while not condition():
            if time.perf_counter() > deadline_s:
                raise Unavailable(f"{subject} took more than {WAIT_S_MAX:.0f} s")
            await asyncio.sleep(POLL_INTERVAL_S)

    # ------------------------------------------------------------------------- the cluster

    async def owner_of(self, partition: int) -> str:
        """Return the name of the member, such as server-1, that owns a partition."""
        view = await self._coordinator.read_servers()
        port = view.servers[view.owners[PartitionId(partition)].server_id].port
        return next(member.name for member in self.cluster.members if member.port == port)

    async def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a member; if the signal terminates the process, wait for its exit."""
        await asyncio.to_thread(self.cluster.kill, name, number)

    async def start(self, name: str) -> None:
        """Start a member, and wait until the cluster is complete again (rule 3)."""
        await asyncio.to_thread(self.cluster.start, name)
        await self.wait_until_complete()

    async def owners(self) -> dict[PartitionId, Ownership]:
        """Return the owner and the generation of each partition, from ZooKeeper."""
        return dict((await self._coordinator.read_servers()).owners)

    async def await_zookeeper(self) -> None:
        """Wait until the session with ZooKeeper is connected again."""
        coordinator = self._coordinator
        await self._wait_for(
            "the connection to ZooKeeper",
            lambda: coordinator.session_state is SessionState.CONNECTED,
        )

    async def wait_until_complete(self) -> None:
        """Wait until all servers are registered, own partitions, and all replicas are engaged."""
        until = time.perf_counter() + WAIT_S_MAX
        while not await self._is_complete():
            if time.perf_counter() > until:
                raise Unavailable(
                    f"the cluster was not completely available again within {WAIT_S_MAX:.0f} s"
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _is_complete(self) -> bool:
        ports = {member.port for member in self.cluster.members if member.kind == "server"}
        view = await self._coordinator.read_servers()
        owners = {owner.server_id for owner in view.owners.values()}
        owner_count_min = min(len(ports), len(self.writers))
        if {server.port for server in view.servers.values()} != ports or len(
            owners
        ) < owner_count_min:
            return False
        storages = sum(member.kind == "storage" for member in self.cluster.members)
        for writer in self.writers:
            metadata = (
                await self._coordinator.read_partition(PartitionId(writer.partition))
            ).metadata
            states = metadata.states.values() if metadata else ()
            if sum(state.closing_high_water_mark == UNRESOLVED for state in states) < storages:
                return False
        return view.is_settled

    # ------------------------------------------------------------------------- the end

    async def check(self) -> tuple[int, int]:
        """Read the log; return the number of lost acknowledged rows, and of duplicated rows."""
        lost = duplicated = 0
        for writer in self.writers:
            read_rows: Counter[bytes] = Counter()
            partition_id = PartitionId(writer.partition)
            last = await self.client.high_water_mark(writer.partition, linearizable=True)
            async for chunk in self.client.read_range(writer.partition, 0, last):
                for batch in batches.range_to_arrow(
                    chunk.records, chunk.lengths, (), ("data",), partition_id=partition_id
                ):
                    read_rows.update(batch.column("data").to_pylist())
            lost += (writer.acknowledged - read_rows).total()
            duplicated += sum(count - 1 for row, count in read_rows.items() if row)
        return lost, duplicated


async def _kill_owner(run: _FailoverRun) -> None:
    """Kill the owner of partition 0, and start it again; do so `STEPS` times."""
    for _ in range(STEPS):
        name = await run.owner_of(0)
        await run.step("kill", lambda name=name: run.signal(name, signal.SIGKILL))  # type: ignore[misc]
        await run.step("start", lambda name=name: run.start(name))  # type: ignore[misc]


async def _terminate_owner(run: _FailoverRun) -> None:
    """Stop the owner of partition 0 with SIGTERM, and start it again; do so `STEPS` times."""
    for _ in range(STEPS):
        name = await run.owner_of(0)
        await run.step("term", lambda name=name: run.signal(name, signal.SIGTERM))  # type: ignore[misc]
        await run.step("start", lambda name=name: run.start(name))  # type: ignore[misc]


async def _freeze_owner(run: _FailoverRun) -> None:
    """Freeze the owner of partition 0, and resume it after a failover; do so `STEPS` times."""
    for _ in range(STEPS):
        name = await run.owner_of(0)
        await run.step("freeze", lambda name=name: run.signal(name, signal.SIGSTOP))  # type: ignore[misc]
        await run.step("wake", lambda name=name: _resume(run, name))  # type: ignore[misc]


async def _resume(run: _FailoverRun, name: str) -> None:
    await run.signal(name, signal.SIGCONT)
    await run.wait_until_complete()


async def _restart_all(run: _FailoverRun) -> None:
    """Restart all servers and all storages, one at a time."""
    names = [member.name for member in run.cluster.members if member.kind in ("server", "storage")]
    for name in sorted(names):
        kind = name.split("-")[0]
        await run.step(f"{kind}-term", lambda name=name: run.signal(name, signal.SIGTERM))  # type: ignore[misc]
        await run.step(f"{kind}-start", lambda name=name: run.start(name))  # type: ignore[misc]


async def _stop_zookeeper(run: _FailoverRun) -> None:
    """Kill ZooKeeper, and start it again after `OUTAGE_S`; count the partitions that moved."""
    before = await run.owners()
    names = [member.name for member in run.cluster.members if member.kind == "zookeeper"]

    async def stop_zookeeper() -> None:
        for name in names:
            await run.signal(name, signal.SIGKILL)
        await asyncio.sleep(OUTAGE_S)

    async def find() -> None:
        for name in names:
            await asyncio.to_thread(run.cluster.start, name)
        await run.await_zookeeper()
        start_s = time.perf_counter()
        await run.wait_until_complete()
        run.extra["whole_after_s"] = round(time.perf_counter() - start_s, 3)

    await run.step("loss", stop_zookeeper)
    await run.step("return", find)
    after = await run.owners()
    run.extra["moved"] = sum(before[each] != after.get(each) for each in before)


def failover_kill(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Kill a server with SIGKILL, five times; report the gaps after the kills."""
    return uvloop.run(_run_scenario(load, meter, _kill_owner, "kill"))


def failover_term(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Stop a server with SIGTERM, five times; report the gaps after the stops."""
    return uvloop.run(_run_scenario(load, meter, _terminate_owner, "term"))


def failover_freeze(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Freeze a server with SIGSTOP until other servers own its partitions, five times."""
    return uvloop.run(_run_scenario(load, meter, _freeze_owner, "freeze"))


def rolling_restart(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Restart every server and every storage with SIGTERM, one at a time."""
    return uvloop.run(_run_scenario(load, meter, _restart_all, None))


def zookeeper_loss(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Kill all ZooKeeper processes once, and start them again after `OUTAGE_S`."""
    return uvloop.run(_run_scenario(load, meter, _stop_zookeeper, None))


async def _run_scenario(
    load: BenchLoad,
    meter: Meter,
    scenario: Callable[[_FailoverRun], Awaitable[None]],
    step_kind: str | None,
) -> WorkloadResult:
    """Run a scenario under load; report the gaps of steps of `step_kind` (None: all steps)."""

    if meter.cluster is None:
        raise BadConfig(
            "this workload kills daemons, so it needs a local cluster. Hint: pass the cluster's "
            "--directory, or omit --connect and --directory to use a temporary cluster."
        )
    async with (
        AsyncWaltzClient.connect(load.connect) as client,
        open_session(load.connect) as coordinator,
    ):
        run = _FailoverRun(meter.cluster, client, coordinator)
        await run.wait_until_complete()
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for writer in run.writers:
                group.create_task(run.write(writer))
            await scenario(run)
            run.stop()
        elapsed_s = time.perf_counter() - start_s
        lost, duplicated = await run.check()
    gaps_s = [gap for kind, each in run.gaps_s.items() for gap in each if step_kind in (kind, None)]
    count = sum(writer.acknowledged.total() for writer in run.writers)
    return WorkloadResult(
        rows=count,
        seconds=elapsed_s,
        bytes=0,
        gap_s_max=max(gaps_s),
        acknowledged=count,
        lost=lost,
        duplicated=duplicated,
        extra={
            "median_gap_s": round(statistics.median(gaps_s), 3),
            "gaps_s": {kind: [round(gap, 3) for gap in each] for kind, each in run.gaps_s.items()},
            "unknown": sum(len(writer.unknown) for writer in run.writers),
            "sent_again": sum(writer.resent_count for writer in run.writers),
            **run.extra,
        },
    )
