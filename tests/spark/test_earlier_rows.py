"""The rows of a task enter the log once, even if its attempts fail. These tests need no Spark."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

import waltz_core.local
from tests.spark.log_payloads import payload_counts
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient, begin_write, end_write, forget_writes
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadRequest, ConnectionSuperseded
from waltz_spark.options import parse_write
from waltz_spark.writer.batch_write import (
    DAY_MS,
    NamedWrite,
    WaltzBatchWriter,
    create_write_job,
    finish_write,
    remove_writes,
)
from waltz_spark.writer.task import TaskResult, WriteJob

pytestmark = pytest.mark.spark

SCHEMA = StructType([StructField("data", BinaryType()), StructField("partition", IntegerType())])
PARTITIONS = 4
KEEP_MS = 1 << 34


class AttemptKilled(Exception):
    """An attempt was killed."""


def rows_of(task: int, count: int, *, of: int = 0) -> list[bytes]:
    return [b"%d-%d" % (task, n) for n in range(of, count)]


def batches_of(rows: list[bytes], size: int = 20) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        partitions = pa.array([(start + n) % PARTITIONS for n in range(len(part))], pa.int32())
        yield pa.RecordBatch.from_arrays(
            [pa.array(part, pa.binary()), partitions], ["data", "partition"]
        )


class Write:
    """One write and its runs."""

    def __init__(self, connect: str, name: str, **options: str) -> None:
        self.connect, self.name = connect, name
        wanted = {"connect": connect, "batchSize": "5", **options}
        if options.get("exactlyOnce") != "false":
            wanted["writeId"] = name
        self.options = parse_write(wanted)
        self.client = WaltzClient(connect)
        self.marks = self.client.high_water_marks(linearizable=True)

    def job(self) -> WriteJob:
        """Begin a run."""
        return self.job_of(SCHEMA)

    def job_of(self, schema: StructType) -> WriteJob:
        """Begin a run with other columns."""
        job = create_write_job(self.options, schema, self.name)
        asyncio.run(begin_write(self.connect, self.name, job.marks, keep_ms=KEEP_MS))
        return job

    def finish(self, job: WriteJob, *tasks: TaskResult) -> None:
        """Commit a run, as the driver does."""
        finish_write(job, tasks, NamedWrite(self.name, 7))

    def in_log(self) -> Counter[bytes]:
        """Return the rows in the log since the start of the write, with their counts."""
        return payload_counts(self.client, self.marks)

    def wait_for_rows(self, count: int) -> None:
        """Wait until the given number of rows is in the log."""
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while time.monotonic() < deadline:
            if sum(self.in_log().values()) >= count:
                return
        raise AssertionError(f"expected {count} rows in the log, found {self.in_log()}")


@pytest.fixture
def write(connect: str, request: pytest.FixtureRequest) -> Iterator[Write]:
    new_write = Write(connect, request.node.name)
    yield new_write
    new_write.client.close()


def run_until_killed(
    write: Write, job: WriteJob, rows: list[bytes], count: int, task: int = 0
) -> None:
    """Run an attempt that appends `count` rows and then dies."""
    before = sum(write.in_log().values())

    def feed() -> Iterator[pa.RecordBatch]:
        yield from batches_of(rows[:count])
        write.wait_for_rows(before + count)
        raise AttemptKilled

    with pytest.raises(AttemptKilled):
        job.write_task(feed(), task, 0)


def counted_once(rows: list[bytes]) -> Counter[bytes]:
    return Counter(dict.fromkeys(rows, 1))


def test_a_run_for_other_partitions_is_rejected_and_appends_nothing(write: Write) -> None:
    """The run would not read back the rows of the first run in partitions 2 and 3."""
    rows, job = rows_of(0, 20), write.job()
    job.write_task(batches_of(rows), 0, 0)
    other = Write(write.connect, write.name, partitions="0,1")
    try:
        with pytest.raises(
            BadRequest, match=r"begun for partitions 0, 1, 2, 3, but this run is for .* 0, 1\. Hint"
        ):
            other.job().write_task(batches_of(rows), 0, 1)
    finally:
        other.client.close()
    assert write.in_log() == counted_once(rows)


def test_an_attempt_continues_where_the_previous_one_stopped(write: Write) -> None:
    rows, job = rows_of(0, 200), write.job()
    run_until_killed(write, job, rows, 100)
    second = job.write_task(batches_of(rows), 0, 1)
    assert write.in_log() == counted_once(rows)
    assert (second.committed, second.rejected) == (200, 0)
    assert second.found == 100
    third = job.write_task(batches_of(rows), 0, 2)
    assert (third.committed, third.found) == (200, 200)
    assert write.in_log() == counted_once(rows)
    assert third.id_ranges != []


def test_without_exactly_once_a_repeated_write_duplicates_rows(write: Write) -> None:
    """The same job with `exactlyOnce` off writes the rows again."""
    rows = rows_of(0, 100)
    off = Write(write.connect, write.name, exactlyOnce="false")
    off.client.close()
    off.client = write.client
    job = create_write_job(off.options, SCHEMA, None)
    run_until_killed(off, job, rows, 60)
    job.write_task(batches_of(rows), 0, 1)
    assert max(off.in_log().values()) == 2


def test_an_attempt_finds_earlier_rows_in_another_order_even_if_rows_are_equal(
    write: Write,
) -> None:
    rows, job = [b"same"] * 40 + rows_of(0, 40), write.job()
    run_until_killed(write, job, rows, 60)
    shuffled = [(rows[n], n % PARTITIONS) for n in range(80)]
    shuffled = sorted(shuffled, key=lambda each: (each[1], each[0]))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([each for each, _ in shuffled], pa.binary()),
            pa.array([each for _, each in shuffled], pa.int32()),
        ],
        ["data", "partition"],
    )
    job.write_task(iter([batch]), 0, 1)
    assert write.in_log() == Counter(rows)


@contextlib.contextmanager
def while_an_attempt_is_paused(
    write: Write, job: WriteJob, rows: list[bytes]
) -> Iterator[list[ConnectionSuperseded]]:
    """Run the block while an attempt has half of its rows in the log; it continues afterwards."""
    may_continue = threading.Event()
    failures: list[ConnectionSuperseded] = []

    def slow_batches() -> Iterator[pa.RecordBatch]:
        yield from batches_of(rows[:60])
        assert may_continue.wait(TEST_TIMEOUT_S)
        yield from batches_of(rows[60:])

    def write_slowly() -> None:
        try:
            job.write_task(slow_batches(), 0, 0)
        except ConnectionSuperseded as error:
            failures.append(error)

    straggler = threading.Thread(target=write_slowly)
    straggler.start()
    try:
        write.wait_for_rows(60)
        yield failures
    finally:
        may_continue.set()
        straggler.join(TEST_TIMEOUT_S)


def test_an_older_attempt_that_still_runs_writes_nothing(write: Write) -> None:
    """A straggler after `abort`, or the slower of two attempts under speculation."""
    rows, job = rows_of(0, 120), write.job()
    with while_an_attempt_is_paused(write, job, rows) as failures:
        result = job.write_task(batches_of(rows), 0, 1)
    assert (result.committed, result.found, len(failures)) == (120, 60, 1)
    assert write.in_log() == counted_once(rows)


def test_a_second_run_of_a_job_continues_where_the_first_run_stopped(write: Write) -> None:
    first, rows = write.job(), {task: rows_of(task, 60) for task in range(3)}
    first.write_task(batches_of(rows[0]), 0, 0)
    run_until_killed(write, first, rows[1], 40, task=1)
    second = write.job()
    assert second.run != first.run
    result = [second.write_task(batches_of(rows[task]), task, 1) for task in range(3)]
    assert [each.found == 0 for each in result] == [False, False, True]
    assert sum(each.committed for each in result) == 180
    assert write.in_log() == counted_once([row for each in rows.values() for row in each])


def test_a_run_that_splits_the_rows_into_other_tasks_writes_no_row_twice(write: Write) -> None:
    first, rows = write.job(), rows_of(0, 120)
    first.write_task(batches_of(rows[:60]), 0, 0)
    run_until_killed(write, first, rows[60:], 40, task=1)
    rows_in_log = write.in_log()
    second = write.job()
    for task, part, why in (
        (0, rows, "another task has appended a row of this task"),
        (0, rows[:40], "appended 60 rows, but 20 of them are not among the 40 rows that"),
        (1, rows[100:], "appended 40 rows, but 40 of them are not among the 20 rows that"),
        (2, rows[116:] + rows[96:100], "another task has appended a row of this task"),
    ):
        with pytest.raises(BadRequest, match=why):
            second.write_task(batches_of(part), task, 1)
        assert write.in_log() == rows_in_log
    third = write.job()
    assert third.write_task(batches_of(rows[:60]), 0, 1).found == 60
    assert third.write_task(batches_of(rows[60:]), 1, 1).found == 40
    assert write.in_log() == counted_once(rows)


def test_a_run_with_fewer_tasks_fails_if_a_missing_task_has_appended_rows(write: Write) -> None:
    """The log has rows of a task that only the earlier run had. This run has none of these rows."""
    rows, first = rows_of(0, 80), write.job()
    first.write_task(batches_of(rows[:60]), 0, 0)
    first.write_task(batches_of(rows[60:]), 1, 0)
    first.write_task(batches_of([]), 2, 0)
    second = write.job()
    only = second.write_task(batches_of(rows[:60]), 0, 1)
    with pytest.raises(BadRequest, match="Task 1 of the earlier run has appended rows"):
        write.finish(second, only)
    third = write.job()  # task 2 had no rows, so it may be missing
    tasks = [
        third.write_task(batches_of(rows[at:to]), n, 2) for n, at, to in ((0, 0, 60), (1, 60, 80))
    ]
    write.finish(third, *tasks)
    assert write.in_log() == counted_once(rows)


def test_a_completed_write_appends_no_rows_again(write: Write) -> None:
    """A repeated run counts its rows. Its tasks may have the rows in another distribution."""
    rows, job = rows_of(0, 50), write.job()
    first = job.write_task(batches_of(rows), 0, 0)
    write.finish(job, first)
    again = write.job()
    tasks = [
        again.write_task(batches_of(part), task, 1)
        for task, part in enumerate((rows[40:], rows[20:40], rows[:20]))
    ]
    assert [(task.was_done, task.committed, task.rows.rows) for task in tasks] == [
        (True, 0, 10), (True, 0, 20), (True, 0, 20),
    ]  # fmt: skip
    write.finish(again, *tasks)
    assert write.in_log() == counted_once(rows)
    asyncio.run(forget_writes(write.connect, [write.name]))
    with pytest.raises(
        ConnectionSuperseded,
        match=r"removed its state after writeRetention; this run has appended nothing",
    ):
        write.finish(again, *tasks)
    with pytest.raises(ConnectionSuperseded, match="the state of the write was removed"):
        job.write_task(batches_of(rows), 0, 2)
    assert write.in_log() == counted_once(rows)


def test_a_completed_write_rejects_other_rows(write: Write) -> None:
    monday, job = rows_of(1, 1), write.job()
    write.finish(job, job.write_task(batches_of(monday), 0, 0))
    for others, counts, hashes in (
        (rows_of(2, 2), "completed with 1 row, but this run has 2 rows", False),
        (rows_of(2, 1), "completed with 1 row, but this run has 1 row", True),
        ([], "completed with 1 row, but this run has 0 rows", False),
    ):
        again = write.job()
        result = again.write_task(batches_of(others), 0, 1)
        with pytest.raises(BadRequest, match=counts) as caught:
            write.finish(again, result)
        assert ("the counts are equal, the hashes differ" in str(caught.value)) is hashes
        assert "This run has appended nothing" in str(caught.value)
        assert write.in_log() == counted_once(monday)
    again = write.job()
    write.finish(again, again.write_task(batches_of(monday), 0, 1))


def test_a_run_fails_if_another_run_with_other_rows_completes_first(write: Write) -> None:
    """Two runs at the same time: the second has one more row, and the first finishes first."""
    rows, first = rows_of(0, 20), write.job()
    result = first.write_task(batches_of(rows), 0, 0)
    second = write.job()
    more = second.write_task(batches_of([*rows, b"more"]), 0, 1)
    write.finish(first, result)
    with pytest.raises(
        BadRequest,
        match=r"with 20 rows, but this run has 21 rows\. .* completed first",
    ):
        write.finish(second, more)
    assert write.in_log() == counted_once([*rows, b"more"])


def test_a_write_completed_by_an_earlier_version_stays_completed(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """The summary has no hash. So the rows cannot be compared, and the log line states this."""
    rows, job = rows_of(0, 5), write.job()
    result = job.write_task(batches_of(rows), 0, 0)
    asyncio.run(end_write(write.connect, write.name, {"committed": 5}, keep_ms=KEEP_MS))
    again = write.job()
    write.finish(again, again.write_task(batches_of(rows_of(7, 3)), 0, 1))
    line = f"spark.write_already_committed write={write.name} rows_compared=False"
    assert line in caplog.text
    write.finish(job, result)
    assert write.in_log() == counted_once(rows)


async def kept_ms(connect: str, write: str) -> int | None:
    async with zookeeper_session.open_session(connect) as coordinator:
        state = await coordinator.writes.read(write)
        return None if state is None else state.keep_ms


def test_an_unnamed_write_is_remembered_while_it_runs(write: Write) -> None:
    """`writeRetention` begins with the end of a write; the write's tasks may run for longer."""
    wanted = {"connect": write.connect, "writeRetention": "1"}
    unnamed = str(WaltzBatchWriter(parse_write(wanted), SCHEMA)._job.write)
    assert asyncio.run(kept_ms(write.connect, unnamed)) == 365 * DAY_MS
    asyncio.run(forget_writes(write.connect, [unnamed]))


def test_a_driver_with_a_fast_clock_removes_no_write_too_early(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, job = rows_of(0, 5), write.job()
    write.finish(job, job.write_task(batches_of(rows), 0, 0))
    ahead = time.time() + 30 * 24 * 3_600  # noqa: TID251 - a driver's clock
    monkeypatch.setattr(time, "time", lambda: ahead)
    for _ in range(3):  # each removal checks only some of the writes
        remove_writes(job, [])
    again = write.job()
    write.finish(again, again.write_task(batches_of(rows), 0, 1))
    assert write.in_log() == counted_once(rows)


def test_round_robin_rows_are_found_in_any_partition(write: Write) -> None:
    schema = StructType([StructField("data", BinaryType())])
    rows, job = [*rows_of(0, 100), *[b"same"] * 20], write.job_of(schema)

    def batches(rows: list[bytes]) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(rows), 20):
            yield pa.RecordBatch.from_arrays([pa.array(rows[start : start + 20])], ["data"])

    def feed() -> Iterator[pa.RecordBatch]:
        yield from batches(rows[:40] + rows[100:])
        write.wait_for_rows(60)
        raise AttemptKilled

    with pytest.raises(AttemptKilled):
        job.write_task(feed(), 0, 0)
    result = job.write_task(batches(rows[::-1]), 0, 1)
    assert (result.committed, result.found) == (120, 60)
    assert write.in_log() == Counter(rows)


def test_results_can_omit_the_columns_of_the_input(connect: str, tmp_path: Path) -> None:
    write = Write(connect, "t-results", resultsPath=str(tmp_path), batchSize="1")
    schema = StructType([StructField("data", BinaryType())])
    job = write.job_of(schema)
    batch = pa.RecordBatch.from_arrays([pa.array(rows_of(0, 20))], ["data"])

    def feed() -> Iterator[pa.RecordBatch]:
        yield batch.slice(10)
        write.wait_for_rows(10)
        raise AttemptKilled

    with pytest.raises(AttemptKilled):
        job.write_task(feed(), 0, 0)
    result = job.write_task(iter([batch]), 0, 1)
    assert (result.committed, result.found) == (20, 10)
    write.finish(job, result)
    assert pq.read_table(tmp_path / str(result.file)).num_rows == 20
    write.client.close()


def test_an_attempt_that_runs_longer_than_its_job_adds_no_results(
    connect: str, tmp_path: Path
) -> None:
    write = Write(connect, "t-outlives", resultsPath=str(tmp_path))
    job = write.job_of(StructType([StructField("data", BinaryType())]))
    batch = pa.RecordBatch.from_arrays([pa.array(rows_of(0, 20))], ["data"])
    result = job.write_task(iter([batch]), 0, 0)

    def feed() -> Iterator[pa.RecordBatch]:
        write.finish(job, result)
        yield batch

    late = job.write_task(feed(), 0, 1)
    assert late.found == 20
    assert pq.read_table(tmp_path).num_rows == 20
    write.client.close()


def test_no_task_of_an_earlier_micro_batch_starts_after_a_later_batch(write: Write) -> None:
    """A task of an abandoned attempt starts after its batch was forgotten."""
    stream = {n: dataclasses.replace(write.job(), write=f"s-{n}") for n in (9, 10)}
    series = {n: dataclasses.replace(job, keep_ms=KEEP_MS) for n, job in stream.items()}
    series[9].write_task(batches_of(rows_of(9, 20)), 0, 0)
    series[10].write_task(batches_of(rows_of(10, 20)), 0, 0)
    asyncio.run(forget_writes(write.connect, ["s-9"]))
    with pytest.raises(ConnectionSuperseded, match="s-10, has started"):
        series[9].write_task(batches_of(rows_of(9, 20)), 0, 1)
    assert write.in_log() == counted_once(rows_of(9, 20) + rows_of(10, 20))


def test_a_server_that_dies_between_two_attempts_duplicates_no_row(
    write: Write, cluster: waltz_core.local.LocalCluster
) -> None:
    """The next owner's memory lacks the fence; the generation and the znode contain it."""
    rows, job = rows_of(0, 120), write.job()
    with while_an_attempt_is_paused(write, job, rows) as failures:
        cluster.kill("server-1")
        try:
            result = job.write_task(batches_of(rows), 0, 1)
        finally:
            cluster.start("server-1")
    assert (result.committed, len(failures)) == (120, 1)
    assert write.in_log() == counted_once(rows)


def test_equal_rows_with_different_locks_are_distinguished_or_rejected(connect: str) -> None:
    from pyspark.sql.types import ArrayType  # noqa: PLC0415

    write = Write(connect, "t-locks")
    schema = StructType([*SCHEMA.fields, StructField("append_locks", ArrayType(IntegerType()))])
    job = write.job_of(schema)

    def batch(locks: list[int]) -> pa.RecordBatch:
        count = len(locks)
        columns = [
            pa.array([b"same"] * count, pa.binary()),
            pa.array([0] * count, pa.int32()),
            pa.array([[lock] for lock in locks], pa.list_(pa.int32())),
        ]
        return pa.RecordBatch.from_arrays(columns, ["data", "partition", "append_locks"])

    def feed() -> Iterator[pa.RecordBatch]:
        yield batch([7] * 10)
        write.wait_for_rows(10)
        raise AttemptKilled

    with pytest.raises(AttemptKilled):
        job.write_task(feed(), 0, 0)
    with pytest.raises(
        BadRequest, match="several rows of this task have the same header and data, but different"
    ):
        job.write_task(iter([batch([7] * 10 + [8])]), 0, 1)
    assert job.write_task(iter([batch([7] * 12)]), 0, 2).committed == 12
    assert write.in_log() == Counter({b"same": 12})
