"""The workload `archive`: a log that is larger than the disks of its storages.

It appends `--mib` MiB of data to one partition. Meanwhile the storages archive the log. Each
storage keeps at most `LOCAL_BYTES_MAX`, or an eighth of the data if an eighth is less. Then the
workload reads the whole log in three ways: by ranges, by the feed from the first ID on, and with
Spark from the archive. The time of Spark's read is compared with the time in which Spark reads a
Parquet file with the same rows.

Rules:
    1. The data of each row follows from its ID. So every reader compares every byte of every row.
    2. `of_without` is the rate of appends while the archive keeps up, divided by the rate of an
       equal cluster without an archive. The two clusters are measured alternately, in windows of
       `--seconds`.
    3. The report contains the largest observed size of a storage's directory.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import uvloop

from waltz_bench.measuring import MIB, BenchLoad, Meter, WorkloadResult
from waltz_core.cli.output import print_error
from waltz_core.client import AsyncCallbacks, AsyncTransaction, AsyncWaltzClient
from waltz_core.local import LocalCluster
from waltz_core.records.batches import encode_append
from waltz_core.records.record import RECORD_OVERHEAD_BYTES, RECORD_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from pyspark.sql import DataFrame

    from waltz_core.client import BatchOutcome, RangeChunk

MIB_DEFAULT = 1024
LOCAL_BYTES_MAX = 1536 * MIB
SEGMENTS = 24  # the number of segments that `local_retention_bytes` permits
PARTITION = 0
WINDOWS = 3
ROUNDS = 2
WATCH_INTERVAL_S = 0.5
ID_BYTES = 8
_DIGITS_BYTES = 1 << 20
_STRIDE = 7_919


@functools.cache
def _digits() -> bytes:
    """Return the text from which the rows are cut: it compresses to about half, like real data."""
    return Random(17).randbytes(_DIGITS_BYTES // 2).hex().encode()  # noqa: S311 - test data


def _row(transaction_id: int, payload_bytes: int) -> bytes:
    start = transaction_id * _STRIDE % (_DIGITS_BYTES - payload_bytes)
    padding = _digits()[start : start + payload_bytes - ID_BYTES]
    return transaction_id.to_bytes(ID_BYTES, "big") + padding


def archive(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Append more data than the storages keep locally, and read it back in three ways."""
    del meter  # a meter needs an existing cluster, and this workload creates one
    directory = Path(tempfile.mkdtemp(prefix="waltz-archive-", dir=load.directory))
    url = f"file://{directory}/archive"
    local_bytes = min(LOCAL_BYTES_MAX, (load.mib or MIB_DEFAULT) * MIB // 8)
    segment_bytes = local_bytes // SEGMENTS
    with_archive: dict[str, dict[str, object]] = {
        "storage": {
            "archive_url": url,
            "archive_age_ms": 1_000,
            "local_retention_bytes": local_bytes,
            "segment_bytes_max": segment_bytes,
        },
        "server": {"archive_interval_ms": 250},
    }
    plain_settings: dict[str, dict[str, object]] = {"storage": {"segment_bytes_max": segment_bytes}}
    clusters = [
        LocalCluster(
            directory / name,
            exit_with_parent=True,
            partition_count=1,
            server_count=1,
            settings=settings,
        )
        for name, settings in (("archived", with_archive), ("plain", plain_settings))
    ]
    try:
        run = _ArchiveRun(load, clusters[0], directory)
        uvloop.run(run.compare_rates(clusters[1]))
        clusters[1].down()
        shutil.rmtree(directory / "plain", ignore_errors=True)
        uvloop.run(run.fill())
        uvloop.run(run.read_all())
        run.read_with_spark(url)
        return run.result()
    finally:
        for cluster in clusters:
            if cluster.exists():
                cluster.down()
        shutil.rmtree(directory, ignore_errors=True)


class _ArchiveRun:
    """One run of the workload, and its figures for the report."""

    def __init__(self, load: BenchLoad, cluster: LocalCluster, directory: Path) -> None:
        self._load = load
        self._cluster = cluster
        self._directory = directory
        self._rows_max = (load.mib or MIB_DEFAULT) * MIB // load.payload_bytes
        self._count = 0
        self._wrong_count = 0
        self._fill_s = 0.0
        self._local_bytes_max = 0
        self._figures: dict[str, object] = {}
        self._stop_watching = threading.Event()

    # ---- appends

    async def compare_rates(self, plain_cluster: LocalCluster) -> None:
        """Append to both clusters alternately, and compute the ratio of their rates (rule 2)."""
        self._cluster.up()
        plain_cluster.up()
        rates: list[tuple[float, float]] = []
        plain_count = 0
        async with (
            AsyncWaltzClient.connect(self._cluster.connect) as archived,
            AsyncWaltzClient.connect(plain_cluster.connect) as plain_client,
        ):
            for _ in range(WINDOWS):
                added_count, with_s = await self._append(archived, self._count, self._load.seconds)
                self._count += added_count
                await self._wait_until_archived(archived)
                plain_added, without_s = await self._append(
                    plain_client, plain_count, self._load.seconds
                )
                plain_count += plain_added
                rates.append((added_count / with_s, plain_added / without_s))
        ratios = [archive_rate / plain_rate for archive_rate, plain_rate in rates]
        self._figures["of_without"] = round(statistics.median(ratios), 3)
        self._figures["of_without_each"] = [round(ratio, 3) for ratio in ratios]
        print_error(f"rate of appends with archiving / without: {self._figures['of_without']}")

    async def fill(self) -> None:
        """Append the remaining rows, and wait until all rows are archived."""
        threading.Thread(target=self._watch_sizes, daemon=True).start()
        async with AsyncWaltzClient.connect(self._cluster.connect) as client:
            start_s = time.perf_counter()
            while self._count < self._rows_max:
                added_count, _ = await self._append(client, self._count, self._load.seconds)
                self._count += added_count
                await self._wait_until_archived(client)
                print_error(f"{self._count:,} of {self._rows_max:,} rows are appended and archived")
            self._fill_s = time.perf_counter() - start_s
        self._stop_watching.set()
        self._figures["local_mib_max"] = round(self._local_bytes_max / MIB)
        archive_bytes = sum(
            path.stat().st_size for path in (self._directory / "archive").rglob("*.parquet")
        )
        self._figures["archive_mib"] = round(archive_bytes / MIB)

    async def _append(
        self, client: AsyncWaltzClient, first: int, seconds: float
    ) -> tuple[int, float]:
        """Append rows from ID `first` on for `seconds`; return their number and the time in s."""
        start_s = time.perf_counter()
        waiting: deque[Awaitable[BatchOutcome]] = deque()
        count = self._load.batch_rows
        none: list[list[int]] = [[] for _ in range(count)]
        next_row = first
        while time.perf_counter() - start_s < seconds:
            rows = [_row(next_row + number, self._load.payload_bytes) for number in range(count)]
            payload = encode_append(
                [0] * count, rows, write_locks=none, read_locks=none, append_locks=none
            )
            if len(waiting) >= self._load.in_flight:
                await waiting.popleft()
            waiting.append(
                await client.append_batch(PARTITION, payload, count, client_high_water_mark=-1)
            )
            next_row += count
        for waiter in waiting:
            await waiter
        return next_row - first, time.perf_counter() - start_s

    async def _wait_until_archived(self, client: AsyncWaltzClient) -> None:
        while True:
            replica_set = (await client.replica_sets([PARTITION]))[PARTITION]
            if (
                replica_set.archived is not None
                and replica_set.archived.last == replica_set.high_water_mark
            ):
                return
            await asyncio.sleep(0.2)

    def _watch_sizes(self) -> None:
        while not self._stop_watching.wait(WATCH_INTERVAL_S):
            self._local_bytes_max = max(self._local_bytes_max, *self._sizes())

    def _sizes(self) -> list[int]:
        return [
            _size_of(path) for path in self._cluster.directory.glob("storage-*") if path.is_dir()
        ]

    # ---- reads

    async def read_all(self) -> None:
        """Read all rows by ranges and then by the feed, and compare every row (rule 1)."""
        async with AsyncWaltzClient.connect(self._cluster.connect) as client:
            start_s = time.perf_counter()
            rows = 0
            async for chunk in client.read_range(PARTITION, 0, self._count - 1):
                self._wrong_count += _count_wrong_in_chunk(chunk, self._load.payload_bytes)
                rows += chunk.count
            self._record_figures("read_range", rows, start_s)
            start_s = time.perf_counter()
            feed = _ComparedFeed(self._count, self._load.payload_bytes)
            await client.subscribe(feed, [PARTITION])
            await feed.done.wait()
            self._wrong_count += feed.wrong
            self._record_figures("feed", feed.seen_count, start_s)

    def read_with_spark(self, url: str) -> None:
        """Check all rows in the archive with Spark; time Spark against an equal Parquet file."""
        from waltz_spark.api import session  # noqa: PLC0415 - the other parts need no Spark
        from waltz_spark.shared_clients import close_clients  # noqa: PLC0415

        spark = session("waltz bench", master="local[2]")
        try:
            reader = spark.read.format("waltz").option("archive", url)
            log = reader.load(self._cluster.connect).select("transaction_id", "data")
            start_s = time.perf_counter()
            check = functools.partial(_wrong_rows, self._load.payload_bytes)
            sums = log.mapInArrow(check, "rows long, wrong long").groupBy().sum().collect()[0]
            self._wrong_count += sums[1]
            self._record_figures("spark_check", sums[0], start_s)
            path = str(self._directory / "plain.parquet")
            log.write.option("compression", "zstd").parquet(path)
            durations = [
                (_time_read(log), _time_read(spark.read.parquet(path))) for _ in range(ROUNDS)
            ]
            fastest_times = [min(each) for each in zip(*durations, strict=True)]
            self._figures["spark_archive_s"], self._figures["spark_parquet_s"] = map(
                functools.partial(round, ndigits=2), fastest_times
            )
        finally:
            spark.stop()
            close_clients()

    def _record_figures(self, name: str, rows: int, start_s: float) -> None:
        elapsed_s = time.perf_counter() - start_s
        self._wrong_count += abs(rows - self._count)
        rate = rows * self._load.payload_bytes / elapsed_s / MIB
        self._figures[f"{name}_mib_per_s"] = round(rate, 1)
        print_error(f"{name}: {rows:,} rows in {elapsed_s:.1f} s, {self._wrong_count} wrong so far")

    def result(self) -> WorkloadResult:
        """Return the result of the run."""
        return WorkloadResult(
            rows=self._count,
            seconds=self._fill_s,
            bytes=self._count * self._load.payload_bytes,
            acknowledged=self._count,
            errors=self._wrong_count,
            extra=self._figures,
        )


class _ComparedFeed(AsyncCallbacks):
    """Compares the rows of the feed with the expected rows, and signals the last row."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self._count = count
        self._payload_bytes = payload_bytes
        self.seen_count = 0
        self.wrong = 0
        self.done = asyncio.Event()

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        is_next = transaction.transaction_id == self.seen_count
        data = await transaction.data()
        self.wrong += not is_next or data != _row(self.seen_count, self._payload_bytes)
        self.seen_count += 1
        if self.seen_count == self._count:
            self.done.set()


def _count_wrong_in_chunk(chunk: RangeChunk, payload_bytes: int) -> int:
    """Return the number of rows in a chunk that differ from the expected rows."""
    size = payload_bytes + RECORD_OVERHEAD_BYTES
    if (chunk.lengths != size).any():
        return chunk.count
    records = np.frombuffer(chunk.records, np.uint8).reshape(-1, size)
    ids = np.arange(chunk.first, chunk.first + chunk.count)
    start = RECORD_PREFIX.size
    return _count_wrong(ids, records[:, start : start + payload_bytes])


def _count_wrong(ids: np.ndarray, datas: np.ndarray) -> int:
    expected = b"".join(_row(each, datas.shape[1]) for each in ids.tolist())
    is_equal = np.frombuffer(expected, np.uint8).reshape(datas.shape) == datas
    return int((~is_equal.all(axis=1)).sum())


def _wrong_rows(payload_bytes: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield one row for a Spark task: the number of its rows, and the number of wrong rows."""
    rows = wrong_count = 0
    for batch in batches:
        ids = batch.column(0).to_numpy(zero_copy_only=False)
        datas = batch.column(1).to_pylist()
        expected = (_row(each, payload_bytes) for each in ids.tolist())
        wrong_count += sum(data != row for data, row in zip(datas, expected, strict=True))
        rows += len(datas)
    yield pa.RecordBatch.from_pydict({"rows": [rows], "wrong": [wrong_count]})


def _time_read(df: DataFrame) -> float:
    """Let Spark read every column of every row and discard the rows; return the time in s."""
    start_s = time.perf_counter()
    df.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - start_s


def _size_of(directory: Path) -> int:
    size_bytes = 0
    for path in directory.rglob("*"):
        try:
            size_bytes += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return size_bytes
