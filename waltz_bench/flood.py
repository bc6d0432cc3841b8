"""The workload `flood`: the latency of single appends while another client sends at full speed.

Only the client with single appends is measured; the flood is a separate process. With a connect
string of its own, the flood has another principal, whose limits (`access limit`) the run measures.

Rules:
    1. The calm figures and those under the flood come from one run and the same client.
    2. The measured client runs all the time. The flood starts after the calm phase, is measured as
       soon as its batches are in the log, and ends with the run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from waltz_bench.measuring import BenchLoad, Measured, Meter, percentile_ms
from waltz_core.client import AsyncWaltzClient
from waltz_core.errors import Unavailable

if TYPE_CHECKING:
    from asyncio.subprocess import Process


PAUSE_S = 0.004
# The minimum of batches that the flood keeps in flight in each partition.
IN_FLIGHT_MIN = 32
START_S_MAX = 20.0
START_POLL_S = 0.2
START_ROWS = 5_000
_PROGRAM = "import os, sys; os.nice(10); from waltz_core.cli.main import main; sys.exit(main())"


def flood(load: BenchLoad, meter: Meter) -> Measured:
    """Append single transactions, half of the time alone, then during a flood."""
    return uvloop.run(_flood(load, meter))


async def _flood(load: BenchLoad, meter: Meter) -> Measured:

    async with AsyncWaltzClient.connect(load.connect) as client:
        for partition in range(client.partition_count):
            await (await client.append(b"", partition=partition))
        calm_s = await _probe(client, load, load.seconds / 2)
        process = await _start(load)
        try:
            await _flooded(client, load)
            before = await _sum_of_marks(client)
            meter.start()
            began = time.perf_counter()
            flooded_s = await _probe(client, load, load.seconds / 2)
            took = time.perf_counter() - began
            meter.stop()
            rows = await _sum_of_marks(client) - before
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    figures = {
        f"{name}_p{share}_ms": percentile_ms(values, share / 100)
        for name, values in (("calm", calm_s), ("flooded", flooded_s))
        for share in (50, 99)
    }
    ratio = (figures["flooded_p99_ms"] or 0.0) / (figures["calm_p99_ms"] or 1.0)
    return Measured(
        rows=rows,
        seconds=took,
        bytes=rows * load.payload_bytes,
        latencies_s=flooded_s,
        gap_s_max=max(flooded_s, default=0.0),
        acknowledged=len(calm_s) + len(flooded_s),
        extra={**figures, "p99_ratio": round(ratio, 2), "flood_in_flight": _in_flight(load)},
    )


async def _probe(client: AsyncWaltzClient, load: BenchLoad, seconds: float) -> list[float]:
    """Append one transaction after the other, to all partitions round-robin; return the times."""
    taken_s: list[float] = []
    data = bytes(load.payload_bytes)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        await (await client.append(data, partition=len(taken_s) % client.partition_count))
        taken_s.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)
    return taken_s


def _in_flight(load: BenchLoad) -> int:
    return max(IN_FLIGHT_MIN, load.in_flight)


async def _start(load: BenchLoad) -> Process:
    wanted = {
        "--connect": load.flood_connect or load.connect,
        "--payload": load.payload_bytes,
        "--locks": load.lock_count,
        "--batch": load.batch_rows,
        "--in-flight": _in_flight(load),
        "--seconds": 10 * load.seconds,
    }
    arguments = [str(part) for pair in wanted.items() for part in pair]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _PROGRAM, "bench", "append-batch", "--json", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def _flooded(client: AsyncWaltzClient, load: BenchLoad) -> None:
    """Append until every partition has many batches of the flood (rule 2)."""
    starts = await client.high_water_marks()
    until = time.perf_counter() + START_S_MAX
    while time.perf_counter() < until:
        await _probe(client, load, START_POLL_S)
        marks = await client.high_water_marks()
        if all(marks[each] - starts[each] > START_ROWS for each in marks):
            return
    raise Unavailable(f"no batches of the flood within {START_S_MAX:.0f} s")


async def _sum_of_marks(client: AsyncWaltzClient) -> int:
    return sum((await client.high_water_marks()).values())
