"""`df.write.format("waltz")`: what runs on the driver, before the tasks and after them.

Why it stands alone: Spark pickles the writer to every task and unpickles it again for the commit,
so it holds plain values only, and nothing may hang on shared state, `abort` or `finally`.

Rules (spark.md, "Exactly once"):
    1. A write begins on the driver, so that its starting marks are those of its first run, and a
       task that finds none knows that it is over. One without a name of its own is named anew each
       time: only its tasks can be run again.
    2. `commit` keeps the results first, and then marks the write as done: whoever finds it done
       finds the results. A write that nobody can name is forgotten instead. Forgetting can wait:
       where ZooKeeper does not answer it is no reason for a job to fail whose rows are in the log.
    3. `abort` takes nothing back and forgets nothing: tasks may still run, and it may be run again.
"""

import asyncio
import logging
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from waltz_core.client import begin_write, end_write, forget_writes, summary_of_write
from waltz_core.errors import BadConfig, WaltzError
from waltz_spark.connections import client_of
from waltz_spark.failures import plainly
from waltz_spark.options import WriteOptions
from waltz_spark.writer.appender import check_marks
from waltz_spark.writer.columns import check_schema
from waltz_spark.writer.recompute import load_function
from waltz_spark.writer.results import check_carried, keep, tell_again
from waltz_spark.writer.task import Job, Written, place_of_task

_log = logging.getLogger("waltz")

DAY_MS = 24 * 3_600 * 1_000
# What is not done may be waited for longer, and of a stream only the last micro-batch is kept.
UNDONE_DAYS = 365


def new_job(options: WriteOptions, schema: StructType, write: str | None) -> Job:
    """Return what the tasks of one execution share; on the driver, before any task.

    Raises:
        BadRequest: the DataFrame cannot be written.
        BadConfig: there is no function as option `recompute` names.
        Unavailable: the cluster cannot be reached.
    """
    check_schema(schema, options)
    if options.results_path is not None:
        check_carried(schema, options.result_columns)
    if options.recompute is not None:
        load_function(options.recompute)
        if options.exactly_once and not options.identity_columns:
            _log.warning(
                "waltz: recompute without identityColumns: a task that is run again after rows "
                "were computed anew fails, as it cannot find them in the log"
            )
    client = client_of(options.connect)
    if options.exactly_once and client.has_original():
        raise BadConfig(
            "option 'exactlyOnce': partitions of this cluster are at an original Waltz server, "
            "which cannot keep a task that is run again from writing twice; give exactlyOnce=false"
        )
    check_marks(options.marks, client.partition_count)
    # One resolution for the whole job: every row without a mark of its own was computed, for
    # all we know, from what the log held when the job started.
    marks = {int(p): int(mark) for p, mark in client.high_water_marks().items()}
    return Job(client.layout(), options, marks, secrets.token_hex(12), now_ms(), write)


class WaltzBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame; one row is one transaction.

    Args:
        options: the write's, already checked.
        schema: the DataFrame's.

    Raises:
        BadRequest: the DataFrame cannot be written; on the driver, before any task.
        Unavailable: the cluster cannot be reached.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        named = options.write_name
        write = named if named is not None else f"run-{secrets.token_hex(12)}"
        job = new_job(options, schema, write if options.exactly_once else None)
        self._job = job
        self._is_named = named is not None
        if options.exactly_once:
            days = UNDONE_DAYS if self._is_named else options.retention_days
            until_ms = job.began_ms + days * DAY_MS
            asyncio.run(begin_write(options.connect, write, job.marks, keep_until_ms=until_ms))

    # -- in a task ----------------------------------------------------------------------------

    @plainly
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send a task's rows; return what became of them."""
        return self._job.write_task(iterator, *place_of_task())

    # -- on the driver again ------------------------------------------------------------------

    @plainly
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Close the results and say in one line what became of the job (rule 2)."""
        tasks = [message for message in messages if isinstance(message, Written)]
        write = self._job.write
        finish(self._job, tasks, write=write if self._is_named else None)
        forget(self._job, [] if write is None or self._is_named else [write])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what is in the log; nothing is taken back, because a log cannot."""
        tasks = [message for message in messages if isinstance(message, Written)]
        committed = sum(task.committed for task in tasks)
        again = ""
        if self._is_named:
            again = f"; run it again as write {self._job.write}, and they are not written twice"
        _log.warning(
            "waltz: the job failed; at least %d of its rows are in the log and stay there%s",
            committed,
            again,
        )


def finish(job: Job, tasks: list[Written], *, write: str | None, days: int | None = None) -> None:
    """Keep the results, mark the write as done for some days, and log what became of it."""
    paths = [task.results_path for task in tasks if task.results_path is not None]
    if any(task.was_done for task in tasks) and write is not None:
        _log.warning("waltz: write %s was done already; nothing was appended", write)
        done = asyncio.run(summary_of_write(job.options.connect, write))
        if paths and done is not None:
            tell_again(paths[0], done)
        return
    summary = summarise(tasks, hands_back=job.options.hands_back)
    summary["seconds"] = round((now_ms() - job.began_ms) / 1_000, 3)
    if paths:
        # The writer that commits a micro-batch is another one than its tasks had.
        name = next((task.results_name for task in tasks), job.results_name)
        summary |= {"results_path": paths[0], "results_name": name}
        keep(paths[0], [task.file for task in tasks if task.file is not None], name, summary)
    if write is not None:
        until_ms = now_ms() + max(days or 0, job.options.retention_days) * DAY_MS
        asyncio.run(end_write(job.options.connect, write, summary, keep_until_ms=until_ms))
    _log.warning(
        "waltz: %(committed)d rows committed (%(recomputed)d computed anew), %(rejected)d "
        "rejected, %(retry)d to be tried again (%(rejected_by_own_rows)d refused by rows of this "
        "job) in %(seconds).1f s",
        summary,
    )


def forget(job: Job, writes: list[str]) -> None:
    """Forget writes that nobody asks about any more, and some whose time is over (rule 2)."""
    if not job.options.exactly_once:
        return
    try:
        asyncio.run(forget_writes(job.options.connect, writes, now_ms=now_ms()))
    except WaltzError as error:
        _log.warning("waltz: writes %s are forgotten later: %s", writes, error)


def now_ms() -> int:
    """Return the time, for what outlives a process."""
    return int(time.time() * 1_000)  # noqa: TID251 - see above


def summarise(tasks: list[Written], *, hands_back: bool = False) -> dict[str, Any]:
    """Return the job's counts and marks from its tasks'."""
    marks: dict[int, int] = {}
    for task in tasks:
        for partition, mark in task.marks.items():
            marks[partition] = max(marks.get(partition, -1), mark)
    runs: dict[int, list[tuple[int, int]]] = {}
    for task in tasks:
        for partition, first, last in task.runs:
            runs.setdefault(partition, []).append((first, last))
    for found in runs.values():
        found.sort()
    refused = sum(task.rejected for task in tasks)
    own = sum(_is_own(runs.get(partition, []), conflict) for partition, conflict in _all(tasks))
    return {
        "committed": sum(task.committed for task in tasks),
        "recomputed": sum(task.recomputed for task in tasks),
        "rejected": 0 if hands_back else refused,
        "retry": refused if hands_back else 0,
        "rejected_by_own_rows": own,
        "found": sum(task.found for task in tasks),
        "high_water_marks": {str(partition): mark for partition, mark in sorted(marks.items())},
    }


def _all(tasks: list[Written]) -> Iterator[tuple[int, int]]:
    for task in tasks:
        yield from task.conflicts


def _is_own(sorted_runs: list[tuple[int, int]], conflict: int) -> bool:
    place = bisect_right(sorted_runs, (conflict, 1 << 63)) - 1
    return place >= 0 and sorted_runs[place][1] >= conflict
