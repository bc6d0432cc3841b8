"""The workload `flood`: the latency of single appends, with and without a greedy tenant.

Only the client with single appends is measured. Each greedy tenant is a separate process
(`compared/tenant_load.py`). With `--tls`, the temporary cluster has access control and the greedy
tenant has limits. If the tenant gets a separate connect string, the limits that its cluster has set
for this tenant apply.

Rules:
    1. Each of `ROUNDS` rounds measures each kind of greedy tenant. A round measures the client
       first in the calm phase, without a greedy tenant, and then during the flood. The ratio of a
       kind is the median of the ratios of its rounds, because the speed of a machine changes over
       time.
    2. The measured client appends all the time. The measurement of a flood begins `START_S` after
       the flood has begun, when the tenant has used the burst that its limits permit. Between
       floods a tenant has no connections. A calm phase begins `START_S` after the end of the
       previous flood.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop

from waltz_bench.batch_appends import fill
from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult, percentile_ms
from waltz_core.client import AsyncWaltzClient
from waltz_core.errors import Unavailable

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

TENANT_KINDS = ("appender", "reader", "connections")
ROUNDS = 10
PAUSE_S = 0.004
START_S = 1.5
START_S_MAX = 60.0
PERCENTILES = (50, 99)


@dataclass
class _PhaseTimes:
    """The measurements for one kind of greedy tenant: append times in s, and the tenant's rate."""

    calm_s: list[list[float]] = field(default_factory=list)
    flooded_s: list[list[float]] = field(default_factory=list)
    received_per_s: list[float] = field(default_factory=list)
    calm_meter: Meter = field(default_factory=lambda: Meter(None))
    flooded_meter: Meter = field(default_factory=lambda: Meter(None))

    def figures(self, phase_s: float) -> dict[str, object]:
        """Return the figures for the report: medians over the rounds."""
        figures_by_name: dict[str, object] = {}
        for percent in PERCENTILES:
            calm, flooded = (
                [percentile_ms(phase, percent / 100) or 0.0 for phase in phases]
                for phases in (self.calm_s, self.flooded_s)
            )
            ratios = [
                flooded_s / calm_latency_s
                for flooded_s, calm_latency_s in zip(flooded, calm, strict=True)
                if calm_latency_s
            ]
            figures_by_name[f"calm_p{percent}_ms"] = round(statistics.median(calm), 3)
            figures_by_name[f"flooded_p{percent}_ms"] = round(statistics.median(flooded), 3)
            figures_by_name[f"p{percent}_ratio"] = round(statistics.median(ratios), 2)
            figures_by_name[f"p{percent}_ratios"] = [round(ratio, 2) for ratio in ratios]
        figures_by_name["got_per_s"] = round(statistics.median(self.received_per_s))
        meters = (("calm", self.calm_meter), ("flooded", self.flooded_meter))
        for name, meter in meters:
            cpu_s = meter.cpu_seconds_by_role() or {}
            cores = {role: s / phase_s / len(self.calm_s) for role, s in cpu_s.items()}
            figures_by_name[f"{name}_cores"] = {
                role: round(core, 2) for role, core in cores.items()
            }
        return figures_by_name


def flood(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append single transactions, alternately without and with a greedy tenant of each kind."""
    return uvloop.run(_flood(load, meter))


async def _flood(load: BenchLoad, meter: Meter) -> WorkloadResult:
    phase_s = load.seconds / (2 * ROUNDS * len(TENANT_KINDS))
    phases_by_kind = {
        kind: _PhaseTimes(calm_meter=Meter(meter.cluster), flooded_meter=Meter(meter.cluster))
        for kind in TENANT_KINDS
    }
    async with AsyncWaltzClient.connect(load.connect) as client, AsyncExitStack() as stack:
        await fill(client, load)
        tenants = {
            kind: await stack.enter_async_context(_run_greedy_tenant(kind, load))
            for kind in TENANT_KINDS
        }
        for kind, phases in [item for _ in range(ROUNDS) for item in phases_by_kind.items()]:
            await _append_singles(client, load, START_S, Meter(None))
            phases.calm_s.append(await _append_singles(client, load, phase_s, phases.calm_meter))
            tenants[kind].command("go")
            await _append_until_greedy(client, load, tenants[kind])
            before, start_s = tenants[kind].received_total, time.perf_counter()
            meter.start()
            phases.flooded_s.append(
                await _append_singles(client, load, phase_s, phases.flooded_meter)
            )
            meter.stop()
            received = tenants[kind].received_total - before
            phases.received_per_s.append(received / (time.perf_counter() - start_s))
            tenants[kind].command("stop")
    latencies_s = [
        each for phases in phases_by_kind.values() for part in phases.flooded_s for each in part
    ]
    calm_count = sum(len(part) for phases in phases_by_kind.values() for part in phases.calm_s)
    return WorkloadResult(
        rows=len(latencies_s),
        seconds=load.seconds / 2,
        bytes=len(latencies_s) * load.payload_bytes,
        latencies_s=latencies_s,
        gap_s_max=max(latencies_s, default=0.0),
        acknowledged=calm_count + len(latencies_s),
        extra={kind: phases.figures(phase_s) for kind, phases in phases_by_kind.items()},
    )


async def _append_singles(
    client: AsyncWaltzClient, load: BenchLoad, seconds: float, meter: Meter
) -> list[float]:
    """Append one transaction at a time, to all partitions round-robin; return the times in s."""
    latencies_s: list[float] = []
    data = bytes(load.payload_bytes)
    meter.start()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not latencies_s:
        start_s = time.perf_counter()
        await (await client.append(data, partition=len(latencies_s) % client.partition_count))
        latencies_s.append(time.perf_counter() - start_s)
        await asyncio.sleep(PAUSE_S)
    meter.stop()
    return latencies_s


class _TenantProcess:
    """The process of a greedy tenant, and how much it has received."""

    def __init__(self, kind: str, process: Process) -> None:
        self.kind = kind
        self.received_total = 0  # in total until now: bytes, or connections
        self._process = process

    async def read(self) -> None:
        """Read the numbers that the process reports every second, until it exits."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.received_total = int(line)

    def command(self, word: str) -> None:
        """Send a line to the process: it starts or stops its load."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())


@asynccontextmanager
async def _run_greedy_tenant(kind: str, load: BenchLoad) -> AsyncIterator[_TenantProcess]:
    """Run the process of a greedy tenant; it makes no load before the first command."""
    connect = load.flood_connect or load.connect
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "waltz_bench.compared.tenant_load", kind, connect, str(load.payload_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    tenant = _TenantProcess(kind, process)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tenant.read())
        try:
            yield tenant
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _append_until_greedy(
    client: AsyncWaltzClient, load: BenchLoad, tenant: _TenantProcess
) -> None:
    """Append until the tenant receives something, and for `START_S` after that (rule 2)."""
    before, until = tenant.received_total, time.perf_counter() + START_S_MAX
    while tenant.received_total == before:
        await _append_singles(client, load, PAUSE_S, Meter(None))
        if time.perf_counter() > until:
            raise Unavailable(
                f"the {tenant.kind} client received nothing within {START_S_MAX:.0f} s"
            )
    await _append_singles(client, load, START_S, Meter(None))
