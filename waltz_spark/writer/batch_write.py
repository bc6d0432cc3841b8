"""`df.write.format("waltz")`: the code on the driver, before and after the tasks.

Spark pickles the writer for every task, and unpickles it again for the commit. So the writer
contains plain values only, and nothing may depend on shared state, `abort` or `finally`.

Rules (docs/spark.md, "Exactly once"):
    1. The driver begins a write, and the first run of the write sets the starting marks. So if a
       task finds no marks, the write has ended. A write without `writeId` gets a new name in each
       run. So its tasks can run again, but not the whole write.
    2. `commit` first keeps the results, and then marks the write as done. So if a write is done,
       its results exist.
       - A write without `writeId` is removed instead. If the removal fails, the job succeeds
         anyway, because its rows are all in the log.
       - If the write was already done, its rows must be the same (`rows_hash.py`).
       - If the write was not done, the log must have no rows of tasks that only an earlier run had.
    3. `abort` removes nothing, because tasks may still run, and the write may run again.
"""

import asyncio
import dataclasses
import functools
import logging
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from waltz_core.client import (
    WaltzClient,
    begin_write,
    end_write,
    forget_writes,
    summary_of_write,
    tasks_of_write,
)
from waltz_core.errors import BadConfig, BadRequest, ConnectionSuperseded, WaltzError
from waltz_spark.options import WriteOptions
from waltz_spark.payload_schemas import resolve_write_schema
from waltz_spark.planning import check_partition
from waltz_spark.shared_clients import with_client
from waltz_spark.spark_version import arrow_schema
from waltz_spark.worker_errors import without_stack
from waltz_spark.writer.appender import check_client_marks
from waltz_spark.writer.columns import WRITE_COLUMNS, check_schema
from waltz_spark.writer.recompute import load_recompute_function
from waltz_spark.writer.results import check_column_types, publish_results, rewrite_summary
from waltz_spark.writer.rows_hash import RowsHash
from waltz_spark.writer.task import TaskResult, WriteJob, task_attempt

_log = logging.getLogger("waltz")

DAY_MS = 24 * 3_600 * 1_000
# The retention of writes that are not done, and of the last micro-batch of a stream.
UNFINISHED_RETENTION_DAYS = 365
_OTHER_ROWS_HINT = (
    "A repeated run must compute the same rows; use another writeId for other rows. This "
    "run has appended nothing."
)
_CONCURRENT_RUN_HINT = (
    "Another run of this write completed first. The rows that this run has appended stay in "
    "the log."
)


class NamedWrite(NamedTuple):
    """A write that can run again; `hint` is for the error if a later run has other rows."""

    write: str
    retention_days: int
    hint: str = _OTHER_ROWS_HINT


def create_write_job(options: WriteOptions, schema: StructType, write: str | None) -> WriteJob:
    """Return the common part of all tasks of one run; called on the driver, before any task.

    Raises:
        BadRequest: the DataFrame cannot be written.
        BadConfig: the function of option `recompute` does not exist.
        Unavailable: the cluster, or the schema registry, cannot be reached.
    """
    check_schema(schema, options)
    if options.results_path is not None:
        check_column_types(schema, options.result_columns)
    if options.recompute_function is not None:
        load_recompute_function(options.recompute_function)
        if options.is_exactly_once and not options.identity_columns:
            _log.warning(
                "spark.recompute_without_identity hint=%r",
                "set identityColumns; without it, a task that runs again cannot find its "
                "recomputed rows in the log, and fails",
            )
    if options.registry is not None:
        payload_fields = [part for part in arrow_schema(schema) if part.name not in WRITE_COLUMNS]
        options = resolve_write_schema(options, payload_fields)
    return with_client(options.connect, lambda client: _create_job(client, options, write))


def _create_job(client: WaltzClient, options: WriteOptions, write: str | None) -> WriteJob:
    for partition in options.partitions or ():
        check_partition(partition, client.partition_count, "option 'partitions'")
    if options.is_exactly_once and client.has_legacy_server(options.partitions):
        raise BadConfig(
            "option 'exactlyOnce': some partitions are at a Waltz 0.13 server, which does "
            "not support exactly-once writes. Hint: use exactlyOnce=false."
        )
    check_client_marks(options.marks, client.partition_count)
    # The marks are resolved once for the whole job. A row without its own mark gets the mark of the
    # log at the start of the job.
    client_marks = client.high_water_marks(options.partitions)
    marks = {int(partition): int(mark) for partition, mark in client_marks.items()}
    return WriteJob(client.layout(), options, marks, secrets.token_hex(12), now_ms(), write)


class WaltzBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame; each row is one transaction.

    Args:
        options: the checked options of the write.
        schema: the DataFrame's schema.

    Raises:
        BadRequest: the DataFrame cannot be written. It is raised on the driver, before any task.
        Unavailable: the cluster cannot be reached.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        write_name = options.write_name
        write = write_name if write_name is not None else f"run-{secrets.token_hex(12)}"
        job = create_write_job(options, schema, write if options.is_exactly_once else None)
        self._job = job
        if options.is_exactly_once:
            keep_ms = UNFINISHED_RETENTION_DAYS * DAY_MS
            asyncio.run(begin_write(options.connect, write, job.marks, keep_ms=keep_ms))

    # -- in a task ----------------------------------------------------------------------------

    @without_stack
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task; return their outcomes."""
        return self._job.write_task(iterator, *task_attempt())

    # -- on the driver ------------------------------------------------------------------------

    @without_stack
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Keep the results, and log the outcome of the job (rule 2)."""
        write, days = self._job.write, self._job.options.retention_days
        named_write = None if write is None or not self._job.is_named else NamedWrite(write, days)
        finish_write(self._job, messages, named_write)
        remove_writes(self._job, [] if write is None or named_write is not None else [write])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the number of committed rows, which stay in the log."""
        tasks = [message for message in messages if isinstance(message, TaskResult)]
        if any(task.was_done for task in tasks):
            return  # the error has the row counts
        committed = sum(task.committed for task in tasks)
        _log.warning(
            "spark.write_failed committed=%d write=%s",
            committed,
            self._job.write if self._job.is_named else "unnamed",
        )


def finish_write(
    job: WriteJob, messages: Sequence[WriterCommitMessage | None], named_write: NamedWrite | None
) -> dict[str, Any] | None:
    """Keep the results, mark a named write as done, and log the outcome of the job.

    Returns its summary; None if the write was done before.

    Args:
        job: the common part of the tasks; for a stream, without the names of the write.
        messages: the messages of all tasks.
        named_write: the write, if it has a name.

    Raises:
        BadRequest: an earlier run of the write had other rows.
        ConnectionSuperseded: the write was already done, and its state was removed.
    """
    tasks = [message for message in messages if isinstance(message, TaskResult)]
    if named_write is not None and any(task.was_done for task in tasks):
        _finish_repeated_write(job, tasks, named_write)
        return None
    if named_write is not None and any(task.is_repeated for task in tasks):
        _check_no_extra_tasks(job, named_write.write, len(messages))
    paths = [task.results_path for task in tasks if task.results_path is not None]
    rows = _total_rows(tasks)
    summary = summarize_tasks(tasks, returns_rejected_rows=job.options.returns_rejected_rows)
    summary["seconds"] = round((now_ms() - job.start_ms) / 1_000, 3)
    if named_write is not None:
        summary |= rows.as_fields()
    if paths:
        # Spark commits a micro-batch with another writer, so use the name that its tasks have used.
        name = next((task.results_name for task in tasks), job.results_name)
        summary |= {"results_path": paths[0], "results_name": name}
        publish_results(
            paths[0], [task.file for task in tasks if task.file is not None], name, summary
        )
    if named_write is not None:
        keep_ms = named_write.retention_days * DAY_MS
        ended = end_write(job.options.connect, named_write.write, summary, keep_ms=keep_ms)
        rows.check_equal(named_write.write, asyncio.run(ended), hint=_CONCURRENT_RUN_HINT)
    _log.warning(
        "spark.write_committed committed=%(committed)d recomputed=%(recomputed)d "
        "rejected=%(rejected)d retry=%(retry)d rejected_by_own_rows=%(rejected_by_own_rows)d "
        "took_s=%(seconds).1f",
        summary,
    )
    return summary


def _finish_repeated_write(job: WriteJob, tasks: list[TaskResult], named_write: NamedWrite) -> None:
    """Check the rows of a write that was already done, and report it; nothing was appended."""
    summary = asyncio.run(summary_of_write(job.options.connect, named_write.write))
    if not summary:
        raise ConnectionSuperseded(
            f"write {named_write.write!r}: an earlier run has completed it, and ZooKeeper has "
            "removed its state after writeRetention; this run has appended nothing. Hint: "
            "use another writeId only if the rows must be appended a second time."
        )
    is_repeated_run = all(task.was_done for task in tasks)
    hint = named_write.hint if is_repeated_run else _CONCURRENT_RUN_HINT
    _total_rows(tasks).check_equal(named_write.write, summary, hint=hint)
    _log.warning(
        "spark.write_already_committed write=%s rows_compared=%s",
        named_write.write,
        "rows_hash" in summary,  # earlier versions wrote no hash
    )
    path = next((task.results_path for task in tasks if task.results_path is not None), None)
    if path is not None:
        rewrite_summary(path, summary | {"already_committed": True})


def _check_no_extra_tasks(job: WriteJob, write: str, task_count: int) -> None:
    """Check that an earlier run had no additional tasks whose rows are in the log."""
    extra_task_job = dataclasses.replace(job, write=write, keep_ms=None)
    for task in asyncio.run(tasks_of_write(job.options.connect, write)):
        if task < task_count:
            continue
        try:
            extra_task_job.write_task(iter(()), task, 0)
        except BadRequest:
            raise BadRequest(
                f"write {write!r}: an earlier run had more tasks than this run, which has "
                f"{task_count}. Task {task} of the earlier run has appended rows that this "
                "run does not have. The rows that this run has appended stay in the log. "
                "Hint: run the write again with the same rows in the same tasks as before. Use "
                "another writeId for other rows."
            ) from None


def _total_rows(tasks: list[TaskResult]) -> RowsHash:
    return functools.reduce(RowsHash.plus, (task.rows for task in tasks), RowsHash())


def remove_writes(job: WriteJob, writes: list[str]) -> None:
    """Remove writes that are no longer needed, and some expired writes (rule 2)."""
    if not job.options.is_exactly_once:
        return
    try:
        asyncio.run(forget_writes(job.options.connect, writes))
    except WaltzError as error:
        _log.warning("spark.finished_writes_not_removed writes=%s error=%s", writes, error)


def now_ms() -> int:
    """Return the wall-clock time in ms, for data that outlives a process, on this machine only."""
    return int(time.time() * 1_000)  # noqa: TID251 - see above


def summarize_tasks(
    tasks: list[TaskResult], *, returns_rejected_rows: bool = False
) -> dict[str, Any]:
    """Compute the row counts and high-water marks of a job from the reports of its tasks."""
    marks: dict[int, int] = {}
    for task in tasks:
        for partition, mark in task.marks.items():
            marks[partition] = max(marks.get(partition, -1), mark)
    id_ranges: dict[int, list[tuple[int, int]]] = {}
    for task in tasks:
        for partition, first, last in task.id_ranges:
            id_ranges.setdefault(partition, []).append((first, last))
    for ranges in id_ranges.values():
        ranges.sort()
    rejected = sum(task.rejected for task in tasks)
    rejected_by_own = sum(
        _is_conflict_within_write(id_ranges.get(partition, []), conflict)
        for partition, conflict in _all_conflicts(tasks)
    )
    return {
        "committed": sum(task.committed for task in tasks),
        "recomputed": sum(task.recomputed for task in tasks),
        "rejected": 0 if returns_rejected_rows else rejected,
        "retry": rejected if returns_rejected_rows else 0,
        "rejected_by_own_rows": rejected_by_own,
        "found": sum(task.found for task in tasks),
        "high_water_marks": {str(partition): mark for partition, mark in sorted(marks.items())},
    }


def _all_conflicts(tasks: list[TaskResult]) -> Iterator[tuple[int, int]]:
    for task in tasks:
        yield from task.conflicts


def _is_conflict_within_write(sorted_ranges: list[tuple[int, int]], conflict: int) -> bool:
    position = bisect_right(sorted_ranges, (conflict, 1 << 63)) - 1
    return position >= 0 and sorted_ranges[position][1] >= conflict
