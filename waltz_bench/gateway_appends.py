"""The workload `gateway`: appends over HTTP through a gateway, compared with the Python client.

The workload has three phases: through a gateway without idempotency keys, through a gateway with
these keys, and with the Python client. In each phase, `CONNECTIONS` appends are in flight. The
gateway is a separate process; the HTTP client is in this process, like the Python client. Two CPU
times per transaction are compared: the CPU time of the gateway, and the CPU time of this process in
the phase with the Python client.
"""

import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple, TypeAlias

import uvloop

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult, cpu_seconds_of
from waltz_bench.single_appends import check_ids, workload_result
from waltz_core.client import AsyncWaltzClient
from waltz_core.errors import Unavailable

CONNECTIONS = 64
_HEAD_END = b"\r\n\r\n"
_LENGTH_HEADER = b"content-length: "


class _PhaseResult(NamedTuple):
    """The appends of one phase of the run."""

    ids: list[tuple[int, int]]  # partition, transaction ID
    latencies_s: list[float]
    seconds: float
    cpu_seconds: float  # of the gateway, or of this process with the Python client

    @property
    def rate_per_s(self) -> int:
        return round(len(self.ids) / self.seconds)

    @property
    def cpu_us_per_tx(self) -> float:
        return round(self.cpu_seconds * 1e6 / len(self.ids), 1)


class _Gateway(NamedTuple):
    """The process of the gateway."""

    port: int
    pid: int


Append: TypeAlias = Callable[[int], Coroutine[Any, Any, tuple[int, int]]]
WriterRun: TypeAlias = Callable[[Append], Coroutine[Any, Any, None]]


def gateway(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append with 64 connections through a gateway, and with 64 writers of the Python client."""
    return uvloop.run(_gateway(load, meter))


async def _gateway(load: BenchLoad, meter: Meter) -> WorkloadResult:
    payload = Random(3).randbytes(load.payload_bytes)  # noqa: S311 - test data
    async with (
        AsyncWaltzClient.connect(load.connect) as client,
        _run_gateway(load.connect) as process,
    ):
        await client.mount()
        starts = await client.high_water_marks()
        count = client.partition_count
        meter.start()
        without_keys = await _append_over_http(process, payload, count, load.seconds)
        meter.stop()
        key = f"bench-{time.time_ns()}"
        keyed = await _append_over_http(process, payload, count, load.seconds, key=key)

        async def append(number: int) -> tuple[int, int]:
            partition = number % count
            return partition, await (await client.append(payload, partition=partition))

        async def with_client(write: WriterRun) -> None:
            await write(append)

        python = await _measure(with_client, load.seconds, os.getpid())
        acknowledged: dict[int, list[int]] = {}
        for partition, transaction_id in (*without_keys.ids, *keyed.ids, *python.ids):
            acknowledged.setdefault(partition, []).append(transaction_id)
        wrong = await check_ids(client, starts, acknowledged)
    extra: dict[str, object] = {
        "connections": CONNECTIONS,
        "with_keys_per_s": keyed.rate_per_s,
        "python_client_per_s": python.rate_per_s,
        "of_python_client": round(without_keys.rate_per_s / python.rate_per_s, 3),
        "gateway_cpu_us_per_tx": without_keys.cpu_us_per_tx,
        "gateway_with_keys_cpu_us_per_tx": keyed.cpu_us_per_tx,
        "python_client_cpu_us_per_tx": python.cpu_us_per_tx,
        "cpu_ratio": round(without_keys.cpu_us_per_tx / python.cpu_us_per_tx, 2),
    }
    ids = [transaction_id for _, transaction_id in without_keys.ids]
    return workload_result(
        load,
        ids,
        without_keys.latencies_s,
        elapsed_s=without_keys.seconds,
        wrong_counts=wrong,
        extra=extra,
    )


async def _append_over_http(
    process: _Gateway, payload: bytes, partition_count: int, seconds: float, *, key: str = ""
) -> _PhaseResult:
    data = base64.b64encode(payload).decode("ascii")

    async def connect(write: WriterRun) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)

        async def append(number: int) -> tuple[int, int]:
            row = {"data": data, "partition": number % partition_count}
            body = json.dumps({"transactions": [row]}).encode()
            key_header = f"Idempotency-Key: {key}-{number}\r\n" if key else ""
            head = f"POST /v1/transactions HTTP/1.1\r\nHost: localhost\r\n{key_header}"
            head += "Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(_HEAD_END)
            length = int(answer.partition(_LENGTH_HEADER)[2].partition(b"\r\n")[0])
            reply = json.loads(await reader.readexactly(length))
            if not answer.startswith(b"HTTP/1.1 200"):
                raise Unavailable(f"the gateway has rejected an append: {reply}")
            outcome = reply["outcomes"][0]
            return outcome["partition"], outcome["transaction_id"]

        try:
            await write(append)
        finally:
            writer.close()

    return await _measure(connect, seconds, process.pid)


async def _measure(
    connect: Callable[[WriterRun], Coroutine[Any, Any, None]], seconds: float, pid: int
) -> _PhaseResult:
    """Run `CONNECTIONS` writers for a time; each has one append in flight."""
    ids: list[tuple[int, int]] = []
    latencies_s: list[float] = []
    cpu_s, start_s = cpu_seconds_of(pid), time.perf_counter()
    numbers = iter(range(1 << 60))

    async def write(append: Append) -> None:
        while (sent_s := time.perf_counter()) < start_s + seconds:
            ids.append(await append(next(numbers)))
            latencies_s.append(time.perf_counter() - sent_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(connect(write))
    elapsed_s = time.perf_counter() - start_s
    return _PhaseResult(ids, latencies_s, elapsed_s, cpu_seconds_of(pid) - cpu_s)


@asynccontextmanager
async def _run_gateway(connect: str) -> AsyncIterator[_Gateway]:
    """Run a gateway."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "waltz_core", "gateway", "run"),
        *("--connect", connect, "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line.startswith("gateway ready "):
            raise Unavailable("the gateway has not started; its log lines have the reason")
        yield _Gateway(int(line.rpartition(":")[2]), process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
