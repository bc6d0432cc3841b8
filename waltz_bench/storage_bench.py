"""The workloads of `waltz-core bench` without a cluster: the storage engine on this disk.

One thread calls the engine in the same way as the storage daemon, without a server, a client or a
network.

Rules:
    1. The records are created before the measurement. CPU time is the time of this whole process.
    2. All records are read back from the disk, with all checks, before a figure is reported.
    3. A new directory is created in `--directory` (by default the current directory), and removed
       at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.cli.output import print_error
from waltz_core.records import raw_records
from waltz_core.records.checksum import combine_many, crc32_of_each
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    Chain,
    ClientId,
    Generation,
    LineageEntry,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from waltz_core.storage.log.partition_log import PartitionLog


MIB: Final = 1024 * 1024
APPEND_MIB: Final = 1024
OPEN_MIB: Final = 10 * 1024
SEGMENT_BYTES_MAX: Final = 1_000_000_000
SESSION: Final = SessionId(1)
PARTITION: Final = PartitionId(0)
READ_BYTES: Final = 8 * MIB
CLUSTER_KEY: Final = bytes(16)
NONCE: Final = bytes(16)


class _AppendArguments(NamedTuple):
    """The arguments of `PartitionLog.append` for one batch, with its lineage entry."""

    first: TransactionId
    lengths: npt.NDArray[np.int64]
    records: bytes
    chain_before: Chain
    entry: LineageEntry


class _AppendTimes(NamedTuple):
    """Times in seconds: CPU of all appends, CPU of all syncs, and wall time of each batch."""

    append_cpu_s: float
    sync_cpu_s: float
    wall_s: list[float]


def storage_append(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append batches to one log, and sync each batch before the next; then read back all rows."""

    rows = _row_count(load, APPEND_MIB)
    with _directory(load) as directory:
        engine, log = _open_engine(directory, SEGMENT_BYTES_MAX)
        meter.start()
        times = _append(log, load, rows)
        meter.stop()
        engine.close()
        engine, log = _open_engine(directory, SEGMENT_BYTES_MAX)
        lost, read_cpu_s = _read_back(log, rows)
        engine.close()
    return WorkloadResult(
        rows=rows,
        seconds=sum(times.wall_s),
        bytes=rows * load.payload_bytes,
        latencies_s=times.wall_s,
        acknowledged=rows,
        lost=lost,
        cpu_seconds={"storage": times.append_cpu_s + times.sync_cpu_s},
        extra={
            "append_us": round(times.append_cpu_s * 1e6 / rows, 3),
            "sync_us": round(times.sync_cpu_s * 1e6 / rows, 3),
            "read_us": round(read_cpu_s * 1e6 / rows, 3),
        },
    )


def storage_open(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Open a storage directory with many segments three times, and read back all rows.

    The first open is as after a crash, the second as after a clean stop. Both have a cold page
    cache. The third has a warm page cache.
    """

    rows = _row_count(load, OPEN_MIB)
    record_bytes = load.payload_bytes + RECORD_OVERHEAD_BYTES
    segment_bytes_max = min(SEGMENT_BYTES_MAX, max(4096, rows * record_bytes // load.segments))
    with _directory(load) as directory:
        engine, log = _open_engine(directory, segment_bytes_max)
        print_error(f"writing {rows * record_bytes // MIB:,} MiB")
        _append(log, load, rows)
        engine.abandon()
        meter.start()
        elapsed_s: dict[str, object] = {}
        slowest_open_s = 0.0
        for name, in_memory in (("after_crash", False), ("after_stop", False), ("again", True)):
            if not in_memory:
                _drop_from_memory(directory)
            files_before = len(os.listdir("/proc/self/fd"))
            start_s = time.perf_counter()
            engine, log = _open_engine(directory, segment_bytes_max)
            took_s = time.perf_counter() - start_s
            slowest_open_s = max(slowest_open_s, took_s)
            elapsed_s[f"{name}_s"] = round(took_s, 3)
            elapsed_s["open_files"] = len(os.listdir("/proc/self/fd")) - files_before
            engine.close()
        meter.stop()
        engine, log = _open_engine(directory, segment_bytes_max)
        lost, _ = _read_back(log, rows)
        engine.close()
        elapsed_s["segments"] = len(list((directory / str(PARTITION)).glob("*.seg")))
    return WorkloadResult(
        rows=rows,
        seconds=slowest_open_s,
        bytes=rows * load.payload_bytes,
        acknowledged=rows,
        lost=lost,
        extra=elapsed_s,
    )


def _row_count(load: BenchLoad, mib: int) -> int:
    """Return the number of rows in `--mib` MiB of data (default `mib`), in whole batches."""
    row_count = (load.mib or mib) * MIB // max(1, load.payload_bytes)
    return max(1, row_count // load.batch_rows) * load.batch_rows


@contextmanager
def _directory(load: BenchLoad) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="waltz-bench-", dir=load.directory or "."))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _open_engine(directory: Path, segment_bytes_max: int) -> tuple[StorageEngine, PartitionLog]:
    settings = LogSettings(CLUSTER_KEY, segment_bytes_max, lambda: time.time_ns() // 1_000_000)
    engine = StorageEngine.open(
        RealDisk(), directory, settings, partition_count=1, new_storage_id=bytes(16)
    )
    return engine, engine.assign(PARTITION)


def _append(log: PartitionLog, load: BenchLoad, rows: int) -> _AppendTimes:
    log.prepare(SESSION, NONCE)
    append_s = sync_s = 0.0
    wall_s = []
    for batch in _create_batches(log.chain, load, rows):
        start_s, cpu = time.perf_counter(), time.process_time()
        log.append(SESSION, *batch[:4], [batch.entry])
        appended = time.process_time()
        log.sync()
        sync_s += time.process_time() - appended
        append_s += appended - cpu
        wall_s.append(time.perf_counter() - start_s)
    return _AppendTimes(append_s, sync_s, wall_s)


def _create_batches(chain: Chain, load: BenchLoad, rows: int) -> Iterator[_AppendArguments]:
    """Yield batches with the same data and consecutive IDs."""
    count, size = load.batch_rows, load.payload_bytes
    random = Random(3)  # noqa: S311 - test data
    data = [random.randbytes(size) for _ in range(count)]
    data_crcs = crc32_of_each(data)
    records = np.empty((count, size + RECORD_OVERHEAD_BYTES), dtype=np.uint8)
    records[:, 36:-4] = np.frombuffer(b"".join(data), dtype=np.uint8).reshape(count, size)
    lengths = np.full(count, size + RECORD_OVERHEAD_BYTES, dtype=np.int64)
    offsets = np.arange(count, dtype=np.int64)
    headers = np.zeros(count, dtype=np.int32)
    for first in map(TransactionId, range(0, rows, count)):
        prefixes = raw_records.encode_prefixes(
            offsets + first,
            ReqId(ClientId(1), Generation(1), PARTITION, first),
            offsets,
            headers,
            lengths=lengths - RECORD_OVERHEAD_BYTES,
            data_crcs=data_crcs,
        )
        crcs = combine_many(raw_records.prefix_crcs(prefixes), data_crcs, size).astype(">u4")
        records[:, :36] = prefixes
        records[:, -4:] = crcs.view(np.uint8).reshape(count, 4)
        last = TransactionId(first + count - 1)
        end = next_chain(chain, first, last, SESSION, crcs.tobytes())
        entry = LineageEntry(first, last, SESSION, 0, end)
        yield _AppendArguments(first, lengths, records.tobytes(), chain, entry)
        chain = end


def _read_back(log: PartitionLog, rows: int) -> tuple[int, float]:
    """Read the whole log with all checks; return the number of missing rows and the CPU seconds."""
    first = TransactionId(0)
    start_s = time.process_time()
    while first <= log.max_id:
        read = log.read_range(first, log.max_id, READ_BYTES, whole_batches=False)
        first = TransactionId(first + int(read.lengths.size))
    return rows - first, time.process_time() - start_s


def _drop_from_memory(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
