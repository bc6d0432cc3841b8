"""One task of a write: it appends each of its rows once, and collects their outcomes.

Batch writes and micro-batches use this module. Spark pickles the job for every task, so the job
contains plain values only.

Rules:
    1. With `exactlyOnce`, an attempt first claims its task in the write (`TaskClaim`). Then it
       skips the rows that earlier attempts have appended (`earlier_rows.py`).
    2. If the write is already done, its tasks append nothing. They still count and hash their rows:
       the driver compares these rows with the rows of the finished write.
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

from waltz_core.client import ClusterLayout, RowOutcomeCode, TaskClaim, WaltzClient
from waltz_core.errors import BadRequest, LockFailed
from waltz_spark.options import OnLockFailure, WriteOptions
from waltz_spark.payload_encryption import decryption_of
from waltz_spark.planning import first_items_text
from waltz_spark.shared_clients import client_at, freeze_existing_objects
from waltz_spark.task_spans import write_span
from waltz_spark.writer.appender import Appender, FinalRows
from waltz_spark.writer.columns import ConvertedRows, RowConverter
from waltz_spark.writer.earlier_rows import EarlierRows, read_earlier_rows
from waltz_spark.writer.recompute import Recomputer
from waltz_spark.writer.results import REJECTED, RETRY, ResultFile, result_file_name
from waltz_spark.writer.row_keys import RowKeys
from waltz_spark.writer.rows_hash import RowsHash, hash_rows

_log = logging.getLogger("waltz")

# The maximum number of conflicts that a task reports; they only serve a count in a log line.
CONFLICTS_MAX = 10_000
ID_RANGES_MAX = 100_000


@dataclass
class TaskResult(WriterCommitMessage):
    """The report of one task: row counts, high-water marks, and the ranges of IDs that it wrote."""

    write: str | None = None
    was_done: bool = False
    is_repeated: bool = False  # an earlier attempt or run has begun tasks of the write
    rows: RowsHash = field(
        default_factory=RowsHash
    )  # the rows of the task, for a write with a name
    results_path: str | None = None
    results_name: str = ""
    committed: int = 0
    rejected: int = 0
    recomputed: int = 0  # the committed rows that were recomputed
    found: int = 0  # the committed rows that earlier attempts have appended
    marks: dict[int, int] = field(default_factory=dict)
    id_ranges: list[tuple[int, int, int]] = field(default_factory=list)  # partition, first, last
    conflicts: list[tuple[int, int]] = field(default_factory=list)  # partition, conflicting ID
    file: str | None = None
    query: str | None = None  # of a stream
    retried: int = 0  # appends that were repeated

    def count(self, final_rows: FinalRows) -> None:
        """Add the outcomes of rows to the counts."""
        committed = final_rows.reasons == RowOutcomeCode.COMMITTED
        self.committed += int(committed.sum())
        self.rejected += int((~committed).sum())
        self.recomputed += int(committed.sum()) if final_rows.retries else 0
        self.retried += (final_rows.attempt - 1) * len(committed)
        mark = max(self.marks.get(final_rows.partition, -1), final_rows.high_water_mark)
        self.marks[final_rows.partition] = mark
        ids = np.sort(final_rows.transaction_ids[committed])
        gap_indexes = np.flatnonzero(np.diff(ids) != 1)
        first_ids = ids[np.concatenate(([0], gap_indexes + 1))] if len(ids) else ids
        last_ids = ids[np.concatenate((gap_indexes, [len(ids) - 1]))] if len(ids) else ids
        for first, last in zip(first_ids.tolist(), last_ids.tolist(), strict=True):
            self._add_id_range(final_rows.partition, first, last)
        conflicts_left = CONFLICTS_MAX - len(self.conflicts)
        for conflict in final_rows.conflicting[~committed][: max(conflicts_left, 0)].tolist():
            self.conflicts.append((final_rows.partition, conflict))

    def _add_id_range(self, partition: int, first: int, last: int) -> None:
        for index in range(len(self.id_ranges) - 1, max(len(self.id_ranges) - 9, -1), -1):
            if self.id_ranges[index][0] == partition and self.id_ranges[index][2] == first - 1:
                self.id_ranges[index] = (partition, self.id_ranges[index][1], last)
                return
        if len(self.id_ranges) < ID_RANGES_MAX:
            self.id_ranges.append((partition, first, last))


@dataclass(frozen=True)
class WriteJob:
    """The common part of all tasks in one run of a write.

    `marks` are the high-water marks of the log at `start_ms`, the start of the run; `options.marks`
    are the marks that the user specified. `run` is the name of the run, and `write` the name of the
    write, None without `exactlyOnce`. `keep_ms` is the retention of a write that its first task
    begins.
    """

    layout: ClusterLayout
    options: WriteOptions
    marks: dict[int, int]
    run: str
    start_ms: int
    write: str | None
    keep_ms: int | None = None

    @property
    def is_named(self) -> bool:
        """Whether the whole job can run again as the same write."""
        has_name = self.options.write_name is not None or self.keep_ms is not None
        return has_name and self.write is not None

    def write_task(self, batches: Iterator[pa.RecordBatch], task: int, attempt: int) -> TaskResult:
        """Write the rows of a task; return their outcomes."""
        with write_span(self.options.traces) as counts:
            result = self._write_rows(batches, task, attempt)
            counts |= {"waltz.committed": result.committed, "waltz.rejected": result.rejected}
        freeze_existing_objects("write")
        return result

    def _write_rows(self, batches: Iterator[pa.RecordBatch], task: int, attempt: int) -> TaskResult:
        if self.write is None:
            client = client_at(self.layout)
            return self._send_rows(client, batches, EarlierRows(), (task, attempt), self.marks)
        claim = TaskClaim(
            self.layout.connect,
            self.write,
            task,
            run=self.run,
            begin_arguments=None if self.keep_ms is None else (self.marks, self.keep_ms),
        )
        with WaltzClient.at(self.layout, claim=claim) as client:
            if claim.is_done:
                path = self.options.results_path
                result = TaskResult(write=self.write, was_done=True, results_path=path)
                converter = self._create_converter(claim.marks, task, keeps_input_columns=False)
                for _ in self._convert_batches(batches, converter, result):
                    pass  # the rows are counted (rule 2), and Spark expects a full read
                return result
            self._check_partitions(claim)
            earlier_rows = self._find_earlier_rows(client, claim)
            result = self._send_rows(
                client, batches, earlier_rows or EarlierRows(), (task, attempt), claim.marks
            )
            result.is_repeated = earlier_rows is not None
            return result

    @property
    def results_name(self) -> str:
        """The part of file names that distinguishes this write's results in a directory."""
        return self.write or self.run

    def _file_name(self, task: int, attempt: int) -> str:
        return result_file_name(task, attempt, self.results_name)

    def _check_partitions(self, claim: TaskClaim) -> None:
        """Check that this run uses the same partitions as the first run of the write.

        The marks of other partitions are unknown, so rows in them would not be read back.
        """
        if claim.marks.keys() != self.marks.keys():
            start_s, now = (first_items_text(sorted(each)) for each in (claim.marks, self.marks))
            raise BadRequest(
                f"write {claim.write!r} was begun for partitions {start_s}, but this run is "
                f"for partitions {now}. Hint: run it again with the same option 'partitions' "
                "as before."
            )

    def _find_earlier_rows(self, client: WaltzClient, claim: TaskClaim) -> EarlierRows | None:
        """Return the rows that earlier attempts or runs have appended; None if there were none."""
        state, other_client_ids = claim.state, client.other_clients()
        if state.attempt == 1 and not other_client_ids:
            return None
        keys = RowKeys(self.options)
        own_client_id = int(state.client_id)
        earlier_rows = read_earlier_rows(
            client,
            claim.marks,
            own_client_id=own_client_id,
            other_client_ids=other_client_ids,
            keys=keys,
            encryption=decryption_of(self.options),
        )
        client.begin_sequences(earlier_rows.next_sequences)
        _log.info(
            "spark.committed_rows_found task=%d write=%s attempt=%d rows=%d",
            claim.task,
            claim.write,
            state.attempt,
            earlier_rows.count,
        )
        return earlier_rows

    def _send_rows(
        self,
        client: WaltzClient,
        batches: Iterator[pa.RecordBatch],
        earlier_rows: EarlierRows,
        attempt_numbers: tuple[int, int],  # the numbers of task and attempt
        marks: dict[int, int],
    ) -> TaskResult:
        options = self.options
        result = TaskResult(write=self.write, results_path=options.results_path)
        result.results_name = self.results_name
        results = None
        if options.results_path is not None:
            rejected_status = RETRY if options.returns_rejected_rows else REJECTED
            results = ResultFile(
                options.results_path,
                self._file_name(*attempt_numbers),
                rejected_status=rejected_status,
            )
        converter = self._create_converter(
            marks, attempt_numbers[0], keeps_input_columns=results is not None
        )
        converted = self._convert_batches(batches, converter, result)
        start_s = time.monotonic()
        found_rows: list[FinalRows] = []
        sent_rows = self._create_appender(client, converter).send(
            earlier_rows.missing_rows(converted, found_rows)
        )
        for final_rows in _with_found_rows(sent_rows, found_rows, result):
            result.count(final_rows)
            if results is not None:
                results.add(final_rows)
            if options.on_lock_failure is OnLockFailure.FAIL and result.rejected:
                self._raise_lock_failed(result, final_rows, results)
        result.file = None if results is None else results.close()
        elapsed_s, rows = time.monotonic() - start_s, result.committed + result.rejected
        _log.info(
            "spark.task_written task=%d attempt=%d rows=%d took_s=%.2f rejected=%d",
            *attempt_numbers,
            rows,
            elapsed_s,
            result.rejected,
        )
        return result

    def _create_converter(
        self, marks: Mapping[int, int], task: int, *, keeps_input_columns: bool
    ) -> RowConverter:
        return RowConverter(
            self.options,
            self.layout.cluster.partition_count,
            {**marks, **self.options.marks},
            keeps_input_columns=keeps_input_columns,
            first_round_robin_index=task,
        )

    def _convert_batches(
        self, batches: Iterator[pa.RecordBatch], converter: RowConverter, result: TaskResult
    ) -> Iterator[ConvertedRows]:
        for batch in batches:
            if not batch.num_rows:
                continue
            converted = converter.convert(batch)
            if self.is_named:
                result.rows = result.rows.plus(hash_rows(batch, converted, self.options))
            yield converted

    def _create_appender(self, client: WaltzClient, converter: RowConverter) -> Appender:
        recomputer = None
        if self.options.recompute_function is not None:
            recomputer = Recomputer(client, self.options, converter, random.SystemRandom())
        return Appender(client, self.options, recomputer)

    def _raise_lock_failed(
        self, result: TaskResult, final_rows: FinalRows, results: ResultFile | None
    ) -> None:
        if results is not None:
            results.close_for_failed_task()
        rejected = np.flatnonzero(final_rows.reasons != RowOutcomeCode.COMMITTED)
        conflict = int(final_rows.conflicting[rejected[0]])
        hint = (
            f"Hint: {self.options.results_path} has each row's outcome."
            if results is not None
            else "Hint: use option resultsPath for each row's outcome, or onLockFailure=reject."
        )
        raise LockFailed(
            f"partition {final_rows.partition}: a row was rejected, because transaction "
            f"{conflict} has written one of its locks after the row's high-water mark. "
            f"{result.committed} rows of this task are in the log, and rows of other tasks "
            f"may be as well. {hint}"
        )


def task_attempt() -> tuple[int, int]:
    """Return the numbers of this process's Spark task and attempt."""
    context = TaskContext.get()
    return (0, 0) if context is None else (context.partitionId(), context.taskAttemptId())


def _with_found_rows(
    sent_rows: Iterable[FinalRows], found_rows: list[FinalRows], result: TaskResult
) -> Iterator[FinalRows]:
    """Yield the outcomes of sent rows, and of rows that were already in the log."""
    for final_rows in sent_rows:
        yield from _yield_found_rows(found_rows, result)
        yield final_rows
    yield from _yield_found_rows(found_rows, result)


def _yield_found_rows(found_rows: list[FinalRows], result: TaskResult) -> Iterator[FinalRows]:
    while found_rows:
        final_rows = found_rows.pop(0)
        result.found += len(final_rows.transaction_ids)
        yield final_rows
