"""One task of a write: its rows into the log, once, and what became of them.

Batches and micro-batches write in the same way. Spark pickles the job to every task, so it holds
plain values only.

Rules:
    1. With `exactlyOnce` an attempt first takes the task's place in the write (`TaskClaim`), and
       skips what an earlier attempt has brought into the log (`once.py`).
    2. A write that is done already appends nothing. Its tasks count and hash their rows all the
       same: the driver compares them with those that the write was finished with.
"""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from waltz_core.client import ClusterLayout, Reason, TaskClaim, WaltzClient
from waltz_core.errors import LockFailed
from waltz_spark.options import OnLockFailure, WriteOptions
from waltz_spark.shared_clients import client_at, settle
from waltz_spark.writer.appender import Answered, Appender
from waltz_spark.writer.columns import Shaped, Shaper
from waltz_spark.writer.once import Already, read_back
from waltz_spark.writer.recompute import Recomputer
from waltz_spark.writer.results import REJECTED, RETRY, ResultFile, file_name
from waltz_spark.writer.row_keys import RowKeys
from waltz_spark.writer.row_sum import RowSum, row_sum

_log = logging.getLogger("waltz")

# What a task reports of single conflicts is for a count in a log line, so it may be cut short.
CONFLICTS_MAX = 10_000
RUNS_MAX = 100_000


@dataclass
class TaskResult(WriterCommitMessage):
    """What one task tells the job: counts, marks, and which ids it wrote (runs of first, last)."""

    write: str | None = None
    was_done: bool = False
    is_repeated: bool = False  # an earlier attempt, or an earlier run, has begun tasks of the write
    rows: RowSum = field(
        default_factory=RowSum
    )  # what the task was given, of a write that has a name
    results_path: str | None = None
    results_name: str = ""
    committed: int = 0
    rejected: int = 0
    recomputed: int = 0  # how many of the committed rows were computed anew
    found: int = 0  # how many of the committed rows an earlier attempt had brought in
    marks: dict[int, int] = field(default_factory=dict)
    runs: list[tuple[int, int, int]] = field(default_factory=list)  # partition, first, last
    conflicts: list[tuple[int, int]] = field(default_factory=list)  # partition, conflicting id
    file: str | None = None

    def count(self, answered: Answered) -> None:
        """Take the outcomes of some rows into the counts."""
        committed = answered.reasons == Reason.COMMITTED
        self.committed += int(committed.sum())
        self.rejected += int((~committed).sum())
        self.recomputed += int(committed.sum()) if answered.retries else 0
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


@dataclass(frozen=True)
class Job:
    """What all tasks of one execution share.

    `marks` are the log's when it began, at `began_ms`; those in the options are the user's. `run`
    names the execution, `write` the write: None where nothing is to be written once. `keep_ms` is
    for a write that the first of its tasks begins.
    """

    layout: ClusterLayout
    options: WriteOptions
    marks: dict[int, int]
    run: str
    began_ms: int
    write: str | None
    keep_ms: int | None = None

    @property
    def is_named(self) -> bool:
        """Whether the whole job can be run again, as the same write."""
        has_name = self.options.write_name is not None or self.keep_ms is not None
        return has_name and self.write is not None

    def write_task(self, batches: Iterator[pa.RecordBatch], task: int, attempt: int) -> TaskResult:
        """Write a task's rows; return what became of them."""
        written = self._write_task(batches, task, attempt)
        settle("write")
        return written

    def _write_task(self, batches: Iterator[pa.RecordBatch], task: int, attempt: int) -> TaskResult:
        if self.write is None:
            client = client_at(self.layout)
            return self._send(client, batches, Already(), (task, attempt), self.marks)
        claim = TaskClaim(
            self.layout.connect,
            self.write,
            task,
            run=self.run,
            series=None if self.keep_ms is None else (self.marks, self.keep_ms),
        )
        with WaltzClient.at(self.layout, claim=claim) as client:
            if claim.is_done:
                path = self.options.results_path
                written = TaskResult(write=self.write, was_done=True, results_path=path)
                shaper = self._shaper(claim.marks, task, wants_identity=False)
                for _ in self._shaped(batches, shaper, written):
                    pass  # it is counted (rule 2), and Spark waits until all of it is taken
                return written
            already = self._look_back(client, claim)
            written = self._send(
                client, batches, already or Already(), (task, attempt), claim.marks
            )
            written.is_repeated = already is not None
            return written

    @property
    def results_name(self) -> str:
        """What tells this write's results from others in one directory."""
        return self.write or self.run

    def _file_name(self, task: int, attempt: int) -> str:
        return file_name(task, attempt, self.results_name)

    def _look_back(self, client: WaltzClient, claim: TaskClaim) -> Already | None:
        """Return what the log has of an earlier attempt or run; None where there was none."""
        state, others = claim.state, client.other_clients()
        if state.attempt == 1 and not others:
            return None
        keys = RowKeys(self.options)
        own = int(state.client_id)
        already = read_back(client, claim.marks, own=own, others=others, keys=keys)
        client.begin_sequences(already.next_sequences)
        _log.info(
            "task %d of write %s, attempt %d: %d rows are in the log already",
            claim.task,
            claim.write,
            state.attempt,
            already.count,
        )
        return already

    def _send(
        self,
        client: WaltzClient,
        batches: Iterator[pa.RecordBatch],
        already: Already,
        place: tuple[int, int],  # task and attempt
        marks: dict[int, int],
    ) -> TaskResult:
        options = self.options
        written = TaskResult(write=self.write, results_path=options.results_path)
        written.results_name = self.results_name
        results = None
        if options.results_path is not None:
            refused = RETRY if options.hands_back else REJECTED
            results = ResultFile(options.results_path, self._file_name(*place), refused=refused)
        shaper = self._shaper(marks, place[0], wants_identity=results is not None)
        shaped = self._shaped(batches, shaper, written)
        began = time.monotonic()
        there: list[Answered] = []
        sent = self._appender(client, shaper).send(already.missing(shaped, there))
        for answered in _with_those_there(sent, there, written):
            written.count(answered)
            if results is not None:
                results.add(answered)
            if options.on_lock_failure is OnLockFailure.FAIL and written.rejected:
                self._fail(written, answered, results)
        written.file = None if results is None else results.close()
        took, rows = time.monotonic() - began, written.committed + written.rejected
        _log.info("%s: %d rows in %.2f s (%d rejected)", file_name, rows, took, written.rejected)
        return written

    def _shaper(self, marks: Mapping[int, int], task: int, *, wants_identity: bool) -> Shaper:
        return Shaper(
            self.options,
            self.layout.cluster.partition_count,
            {**marks, **self.options.marks},
            wants_identity=wants_identity,
            first_turn=task,
        )

    def _shaped(
        self, batches: Iterator[pa.RecordBatch], shaper: Shaper, written: TaskResult
    ) -> Iterator[Shaped]:
        for batch in batches:
            if not batch.num_rows:
                continue
            shaped = shaper.shape(batch)
            if self.is_named:
                written.rows = written.rows.plus(row_sum(batch, shaped, self.options))
            yield shaped

    def _appender(self, client: WaltzClient, shaper: Shaper) -> Appender:
        recomputer = None
        if self.options.recompute is not None:
            recomputer = Recomputer(client, self.options, shaper, random.SystemRandom())
        return Appender(client, self.options, recomputer)

    def _fail(self, written: TaskResult, answered: Answered, results: ResultFile | None) -> None:
        if results is not None:
            results.close_of_failed()
        refused = np.flatnonzero(answered.reasons != Reason.COMMITTED)
        conflict = int(answered.conflicting[refused[0]])
        where = (
            f"which ones stands in {self.options.results_path}"
            if results is not None
            else "give option resultsPath to have each row's outcome, or onLockFailure=reject"
        )
        raise LockFailed(
            f"partition {answered.partition}: a row was refused, transaction {conflict} has "
            f"written one of its locks since the row's high-water mark. {written.committed} rows "
            f"of this task are in the log, those of other tasks may be too; {where}"
        )


def place_of_task() -> tuple[int, int]:
    """Return the number of the task, and of the attempt, that this process runs for Spark."""
    context = TaskContext.get()
    return (0, 0) if context is None else (context.partitionId(), context.taskAttemptId())


def _with_those_there(
    sent: Iterable[Answered], there: list[Answered], written: TaskResult
) -> Iterator[Answered]:
    """Yield the outcomes of rows that were sent, and of those that were in the log already."""
    for answered in sent:
        yield from _drained(there, written)
        yield answered
    yield from _drained(there, written)


def _drained(there: list[Answered], written: TaskResult) -> Iterator[Answered]:
    while there:
        answered = there.pop(0)
        written.found += len(answered.transaction_ids)
        yield answered
