"""The workload `many-partitions`: a cluster with many partitions, from its start to its restart.

It creates a cluster, and measures the cluster's processes.

Rules:
    1. A start is complete when every partition has acknowledged an append. This shows that the
       partition has an owner, and that the owner has a store session with a quorum of synced
       replicas.
    2. The cost of a step is reported in CPU time and in wall time, because wall time depends on
       other load on the machine.
    3. A row is sent again only if the log is known not to contain it. So the high-water marks at
       the end show how many rows are lost or duplicated.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.cli.output import print_error
from waltz_core.client import AsyncWaltzClient, RowOutcomeCode
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.errors import Unavailable, WaltzError
from waltz_core.local import LocalCluster
from waltz_core.records.batches import encode_append

PARTITIONS = 1_000
SERVERS = STORAGES = 3
START_S_MAX = 300.0
POLL_INTERVAL_S = 0.05
SETTLE_S = 3.0
MIB = 1024 * 1024
_NO_LOCKS: list[list[int]] = [[]]
_PAYLOAD = encode_append(
    [0], [b"?"], write_locks=_NO_LOCKS, read_locks=_NO_LOCKS, append_locks=_NO_LOCKS
)


def many_partitions(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Create a cluster with many partitions; measure its start, idle load, failover and restart."""
    del meter  # a meter needs an existing cluster, and this workload creates one
    return uvloop.run(_many_partitions(load))


async def _many_partitions(load: BenchLoad) -> WorkloadResult:

    directory = Path(tempfile.mkdtemp(prefix="waltz-many-", dir=load.directory))
    cluster = LocalCluster(
        directory,
        exit_with_parent=True,
        partition_count=load.partitions or PARTITIONS,
        server_count=SERVERS,
        storage_count=STORAGES,
    )
    run = _ManyPartitionsRun(cluster)
    # Without this, each of a thousand streams would log that its partition has moved.
    logging.getLogger("waltz_core.driver").setLevel(logging.WARNING)
    try:
        await run.create()
        elapsed_s = await run.measure_start("start")
        await run.measure_idle(load.seconds)
        await run.kill_server()
        await run.measure_start("restart")
        lost, duplicated = await run.check()
    finally:
        if cluster.exists():
            cluster.down()
        shutil.rmtree(directory, ignore_errors=True)
    count = sum(run.acknowledged.values())
    return WorkloadResult(
        rows=count,
        seconds=elapsed_s,
        bytes=count,
        gap_s_max=run.gap_s,
        acknowledged=count,
        lost=lost,
        duplicated=duplicated,
        extra=run.figures,
    )


@dataclass
class _ManyPartitionsRun:
    cluster: LocalCluster
    figures: dict[str, object] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)
    unknown: dict[int, int] = field(default_factory=dict)
    gap_s: float = 0.0

    async def create(self) -> None:
        """Start ZooKeeper, and create the cluster in it."""
        start_s = time.perf_counter()
        await asyncio.to_thread(self.cluster.prepare, START_S_MAX)
        self.figures["create_s"] = _round(time.perf_counter() - start_s)

    async def measure_start(self, event: str) -> float:
        """Kill and start all storages and servers, and wait until the start is complete (rule 1).

        Returns the time in seconds.
        """
        names = [member.name for member in self.cluster.members if member.kind != "zookeeper"]
        for name in names:
            self.cluster.kill(name)
        print_error(f"{event}: {self.cluster.partition_count} partitions")
        before, start_s = self._cpu_seconds(), time.perf_counter()
        for name in names:
            self.cluster.start(name)
        await self._wait_until_owned()
        async with await self._connect_client() as client:
            first_answers_s = await self._append_to_all(client, start_s)
        elapsed_s = time.perf_counter() - start_s
        self.figures |= {
            f"{event}_s": _round(elapsed_s),
            f"{event}_half_s": _round(sorted(first_answers_s)[len(first_answers_s) // 2]),
            f"{event}_cpu_s": _difference(self._cpu_seconds(), before),
        }
        return elapsed_s

    async def measure_idle(self, seconds: float) -> None:
        """Measure the CPU, memory and threads of the processes for some seconds without load."""
        await asyncio.sleep(SETTLE_S)
        before, start_s = self._cpu_seconds(), time.perf_counter()
        await asyncio.sleep(seconds)
        elapsed_s = time.perf_counter() - start_s
        cpu_shares = {
            name: cpu_s / elapsed_s
            for name, cpu_s in _difference(self._cpu_seconds(), before).items()
        }
        self.figures["idle_cpu_share"] = {
            name: _round(cpu_share) for name, cpu_share in cpu_shares.items()
        }
        processes = self.cluster.processes()
        self.figures["memory_mib"] = {
            name: process.memory_info().rss // MIB for name, process in processes.items()
        }
        self.figures["threads"] = {
            name: process.num_threads() for name, process in processes.items()
        }

    async def kill_server(self) -> None:
        """Kill a server, and wait until all of its partitions have another owner and append."""
        async with await self._connect_client() as client:
            await self._append_to_all(client, time.perf_counter())
            before, start_s = self._cpu_seconds(), time.perf_counter()
            self.cluster.kill("server-1", signal.SIGKILL)
            print_error("a server was killed")
            after_s = await self._append_to_all(client, start_s)
        self.gap_s = max(after_s)
        self.figures |= {
            "server_killed_s": _round(self.gap_s),
            "server_killed_cpu_s": _difference(self._cpu_seconds(), before),
        }

    async def check(self) -> tuple[int, int]:
        """Return the counts of lost and duplicated rows, from the high-water marks (rule 3)."""
        async with await self._connect_client() as client:
            marks = await client.high_water_marks(linearizable=True)
        lost = duplicated = 0
        for partition, mark in marks.items():
            surplus = mark + 1 - self.acknowledged.get(partition, 0)
            lost += max(0, -surplus)
            duplicated += max(0, surplus - self.unknown.get(partition, 0))
        self.figures["unknown"] = sum(self.unknown.values())
        return lost, duplicated

    # ------------------------------------------------------------------------- appends

    async def _connect_client(self) -> AsyncWaltzClient:
        until = time.perf_counter() + START_S_MAX
        while True:
            try:
                return await AsyncWaltzClient.connect(self.cluster.connect)
            except WaltzError:
                if time.perf_counter() > until:
                    raise
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _wait_until_owned(self) -> None:
        """Wait until all servers are registered and own all partitions."""
        ports = {member.port for member in self.cluster.members if member.kind == "server"}
        until = time.perf_counter() + START_S_MAX
        async with open_session(self.cluster.connect) as coordinator:
            while time.perf_counter() < until:
                view = await coordinator.read_servers()
                if view.is_settled and {server.port for server in view.servers.values()} == ports:
                    return
                await asyncio.sleep(POLL_INTERVAL_S)
        raise Unavailable(f"not all servers owned partitions within {START_S_MAX:.0f} s")

    async def _append_to_all(self, client: AsyncWaltzClient, start_s: float) -> list[float]:
        """Append a row to each partition; return for each answer its time in s after `start_s`."""
        after_s: list[float] = []

        async def append(partition: int) -> None:
            await self._append(client, partition)
            after_s.append(time.perf_counter() - start_s)

        async with asyncio.TaskGroup() as tasks:
            for partition in range(self.cluster.partition_count):
                tasks.create_task(append(partition))
        return after_s

    async def _append(self, client: AsyncWaltzClient, partition: int) -> None:
        until = time.perf_counter() + START_S_MAX
        while time.perf_counter() < until:
            try:
                answer = await client.append_batch(
                    partition, _PAYLOAD, 1, client_high_water_mark=-1
                )
                outcome = await answer
            except WaltzError:
                self.unknown[partition] = self.unknown.get(partition, 0) + 1
            else:
                if (outcome.reasons == RowOutcomeCode.COMMITTED).all():
                    self.acknowledged[partition] = self.acknowledged.get(partition, 0) + 1
                    return
            await asyncio.sleep(POLL_INTERVAL_S)
        raise Unavailable(f"partition {partition} accepted no append within {START_S_MAX:.0f} s")

    def _cpu_seconds(self) -> dict[str, float]:
        cpu_times = {
            name: process.cpu_times() for name, process in self.cluster.processes().items()
        }
        return {name: cpu_time.user + cpu_time.system for name, cpu_time in cpu_times.items()}


def _difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: _round(now[name] - before.get(name, 0.0)) for name in now}


def _round(value: float) -> float:
    return round(value, 3)
