"""`df.write.format("waltz")`: what runs on the driver and in each task.

Why it stands alone: Spark pickles the writer to every task and unpickles it again for the commit,
so it holds plain values only, and nothing may hang on shared state, `abort` or `finally`.
"""

import dataclasses
import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from waltz_core.client import Reason
from waltz_core.errors import LockFailed
from waltz_spark.connections import client_at, client_of
from waltz_spark.failures import plainly
from waltz_spark.options import OnLockFailure, WriteOptions
from waltz_spark.writer.appender import Answered, Appender, check_marks
from waltz_spark.writer.columns import Shaped, Shaper, check_schema
from waltz_spark.writer.results import ResultFile, keep

_log = logging.getLogger("waltz")


@dataclass
class Written(WriterCommitMessage):
    """What one task tells the job: counts, marks, and which ids it wrote (runs of first, last)."""

    committed: int = 0
    rejected: int = 0
    marks: dict[int, int] = field(default_factory=dict)
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # partition, first, last
    conflicts: list[tuple[int, int]] = field(default_factory=list)  # partition, conflicting id
    file: str | None = None

    def count(self, answered: Answered) -> None:
        """Take the outcomes of some rows into the counts."""
        committed = answered.reasons == Reason.COMMITTED
        self.committed += int(committed.sum())
        self.rejected += int((~committed).sum())
        mark = max(self.marks.get(answered.partition, -1), answered.high_water_mark)
        self.marks[answered.partition] = mark
        ids = np.sort(answered.transaction_ids[committed])
        breaks = np.flatnonzero(np.diff(ids) != 1)
        firsts = ids[np.concatenate(([0], breaks + 1))] if len(ids) else ids
        lasts = ids[np.concatenate((breaks, [len(ids) - 1]))] if len(ids) else ids
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._add_run(answered.partition, first, last)
        room = CONFLICTS_MAX - len(self.conflicts)
        for conflict in answered.conflicting[~committed][: max(room, 0)].tolist():
            self.conflicts.append((answered.partition, conflict))

    def _add_run(self, partition: int, first: int, last: int) -> None:
        for index in range(len(self.runs) - 1, max(len(self.runs) - 9, -1), -1):
            if self.runs[index][0] == partition and self.runs[index][2] == first - 1:
                self.runs[index] = (partition, self.runs[index][1], last)
                return
        if len(self.runs) < RUNS_MAX:
            self.runs.append((partition, first, last))


# What a task reports of single conflicts is for a count in a log line, so it may be cut short.
CONFLICTS_MAX = 10_000
RUNS_MAX = 100_000


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
        check_schema(schema, options)
        client = client_of(options.connect)
        self._partition_count = client.partition_count
        self._layout = client.layout()
        check_marks(options.marks, self._partition_count)
        # One resolution for the whole job: every row without a mark of its own was computed, for
        # all we know, from what the log held when the job started.
        marks = {int(p): int(mark) for p, mark in client.high_water_marks().items()}
        self._options = dataclasses.replace(options, marks={**marks, **options.marks})
        self._began = time.time()  # noqa: TID251 - the job's duration, over two processes

    # -- in a task ----------------------------------------------------------------------------

    @plainly
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send a task's rows; return what became of them."""
        context = TaskContext.get()
        task = context.partitionId() if context else 0
        attempt = context.taskAttemptId() if context else 0
        began = time.monotonic()
        written = Written()
        results = self._result_file(f"part-{task:05d}-{attempt}.parquet")
        appender = Appender(client_at(self._layout), self._options)
        for answered in appender.send(self._shaped(iterator)):
            written.count(answered)
            if results is not None:
                results.add(answered)
            if self._options.on_lock_failure is OnLockFailure.FAIL and written.rejected:
                self._fail(written, answered, results)
        written.file = None if results is None else results.close()
        took = time.monotonic() - began
        rows = written.committed + written.rejected
        _log.info("task %d: %d rows in %.2f s (%d rejected)", task, rows, took, written.rejected)
        return written

    def _shaped(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Shaped]:
        shaper = Shaper(
            self._options,
            self._partition_count,
            self._options.marks,
            wants_identity=self._options.results_path is not None,
        )
        return (shaper.shape(batch) for batch in batches if batch.num_rows)

    def _result_file(self, name: str) -> ResultFile | None:
        path = self._options.results_path
        return None if path is None else ResultFile(path, name)

    def _fail(self, written: Written, answered: Answered, results: ResultFile | None) -> None:
        if results is not None:
            results.close()
        refused = np.flatnonzero(answered.reasons != Reason.COMMITTED)
        conflict = int(answered.conflicting[refused[0]])
        where = (
            f"which ones stands in {self._options.results_path}"
            if results is not None
            else "give option resultsPath to have each row's outcome, or onLockFailure=reject"
        )
        raise LockFailed(
            f"partition {answered.partition}: a row was refused, transaction {conflict} has "
            f"written one of its locks since the row's high-water mark. {written.committed} rows "
            f"of this task are in the log, those of other tasks may be too; {where}"
        )

    # -- on the driver again ------------------------------------------------------------------

    @plainly
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Close the results and say in one line what became of the job."""
        tasks = [message for message in messages if isinstance(message, Written)]
        summary = summarise(tasks)
        summary["seconds"] = round(time.time() - self._began, 3)  # noqa: TID251
        if self._options.results_path is not None:
            names = [task.file for task in tasks if task.file is not None]
            keep(self._options.results_path, names, summary)
        _log.warning(
            "waltz: %(committed)d rows committed, %(rejected)d rejected "
            "(%(rejected_by_own_rows)d of them by rows of this job) in %(seconds).1f s",
            summary,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what is in the log; nothing is taken back, because a log cannot."""
        tasks = [message for message in messages if isinstance(message, Written)]
        committed = sum(task.committed for task in tasks)
        _log.warning(
            "waltz: the job failed; at least %d of its rows are in the log and stay there",
            committed,
        )


def summarise(tasks: list[Written]) -> dict[str, object]:
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
    own = sum(_is_own(runs.get(partition, []), conflict) for partition, conflict in _all(tasks))
    return {
        "committed": sum(task.committed for task in tasks),
        "rejected": sum(task.rejected for task in tasks),
        "rejected_by_own_rows": own,
        "high_water_marks": {str(partition): mark for partition, mark in sorted(marks.items())},
    }


def _all(tasks: list[Written]) -> Iterator[tuple[int, int]]:
    for task in tasks:
        yield from task.conflicts


def _is_own(sorted_runs: list[tuple[int, int]], conflict: int) -> bool:
    place = bisect_right(sorted_runs, (conflict, 1 << 63)) - 1
    return place >= 0 and sorted_runs[place][1] >= conflict
