"""Stream reads: offsets are high-water marks, and a micro-batch is a range of each partition.

Why it stands alone: Spark keeps one reader in a process of its own to ask it for offsets, and
pickles another one to the tasks; the only thing they share is what stands in the checkpoint.

Rules:
    1. An offset is JSON from partition to mark, `{"0": 41}`: what was read, inclusive. A
       micro-batch reads what lies between two of them, whoever plans it, however often.
    2. Offsets never go back, though a server that was the owner a moment ago may tell an old mark.
    3. A start past the end of the log is data loss, once a quorum of the replicas has confirmed it.
"""

import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from waltz_core.errors import BadConfig, DataLoss, WaltzError
from waltz_core.record import BEFORE_FIRST
from waltz_spark import planning
from waltz_spark.connections import client_of
from waltz_spark.datasource.batch import read_task, tasks_of
from waltz_spark.datasource.starts import starts
from waltz_spark.failures import plainly, plainly_each
from waltz_spark.options import Marks, ReadOptions

Offset = dict[str, int]


class WaltzStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows.

    Args:
        options: the read's, already checked.
        schema: the columns wanted, in order: the log's own and, with `dataFormat`, the payload's.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: Marks | None = None  # where a query ends that reads only what is there
        self._marks: Marks = {}
        self._marks_until_s = 0.0

    # ---- offsets, in the process that Spark keeps for them

    @plainly
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint starts.

        Raises:
            DataLoss: a mark lies past the end of its log.
            BadConfig: a partition does not exist.
            Unavailable: the cluster does not answer.
        """
        options, client = self._options, client_of(self._options.connect)
        planning.check_marks(options, client.partition_count)
        chosen = planning.chosen_partitions(options, client.partition_count)
        # Rule 3: a mark that was given is held against what a quorum confirms.
        marks = {each: int(client.high_water_mark(each, linearizable=True)) for each in chosen}
        return _offset(starts(client, options, marks))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the most that a micro-batch reads, unless the trigger says otherwise."""
        return ReadMaxRows(self._options.trigger_transactions_max)

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix where the query ends: at the marks of now."""
        self._target = self._marks_now()

    @plainly
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch (rules 2 and 3).

        Raises:
            DataLoss: the log ends before `start`.
            BadConfig: `start`, from a checkpoint, is of other partitions.
        """
        begin = self._begin(start)
        ends = self._marks_now() if self._target is None else self._target
        ends = {each: self._end_of(each, begin[each], mark) for each, mark in ends.items()}
        if isinstance(limit, ReadMaxRows):
            begin = {each: min(mark, ends[each]) for each, mark in begin.items()}
            ends = planning.limited(begin, ends, limit.max_rows)
        return _offset(ends)

    @plainly
    def reportLatestOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the marks of now, for the query's progress."""
        return _offset(self._marks_now())

    def commit(self, end: Offset) -> None:
        """Nothing: the log keeps everything, and the checkpoint knows what was read."""

    def stop(self) -> None:
        """Nothing: the connections close with their process."""

    def _begin(self, start: Offset) -> Marks:
        """Return a checkpoint's offset by partition; one that it has not begins at the start."""
        client = client_of(self._options.connect)
        chosen = planning.chosen_partitions(self._options, client.partition_count)
        found = {int(partition): mark for partition, mark in start.items()}
        if foreign := sorted(found.keys() - set(chosen)):
            raise BadConfig(
                f"the checkpoint is of a query that read partition {foreign[0]} too, which this "
                "one leaves out: keep option 'partitions' as it was, or begin with another "
                "checkpoint"
            )
        return {partition: found.get(partition, int(BEFORE_FIRST)) for partition in chosen}

    def _end_of(self, partition: int, start: int, mark: int) -> int:
        if start <= mark:
            return mark
        if self._target is not None and start <= self._marks_now()[partition]:
            return start
        mark = client_of(self._options.connect).high_water_mark(partition, linearizable=True)
        if start > mark and self._options.fail_on_data_loss:
            raise DataLoss(
                f"the checkpoint ends at transaction {start} of partition {partition}, but its log "
                f"ends at {mark}: another cluster, or a log that was made anew. Begin with another "
                "checkpoint, or set failOnDataLoss=false to go on from the end of the log"
            )
        return min(start, mark)

    def _marks_now(self) -> Marks:
        """Return the marks, at most `pollInterval` old."""
        now_s = time.monotonic()
        if now_s >= self._marks_until_s:
            client = client_of(self._options.connect)
            chosen = planning.chosen_partitions(self._options, client.partition_count)
            if len(chosen) == client.partition_count:
                marks = client.high_water_marks()
            else:
                marks = {each: client.high_water_mark(each) for each in chosen}
            # Rule 2: of two answers the later mark is true.
            self._marks = {
                each: max(int(marks[each]), self._marks.get(each, int(BEFORE_FIRST)))
                for each in chosen
            }
            self._marks_until_s = now_s + self._options.poll_ms / 1000
        return self._marks

    # ---- a micro-batch

    @plainly
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch (rule 1)."""
        whole = planning.spans(self._begin(start), self._begin(end), self._options.transaction_ids)
        client = client_of(self._options.connect)
        sources = {span.partition: client.replicas(span.partition) for span in whole}
        return tasks_of(client, self._options, whole, sources)

    @plainly_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's transactions as Arrow batches."""
        return read_task(partition, self._options, self._schema)


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What stands for the reader of a stream that cannot be read, and says why when it is asked.

    PySpark 4.3 hides what `streamReader` raises behind an error of its own.
    """

    def __init__(self, error: WaltzError) -> None:
        self._error = error

    @plainly
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Raise what is wrong."""
        raise self._error

    @plainly
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Raise what is wrong."""
        raise self._error

    @plainly
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Raise what is wrong."""
        raise self._error

    @plainly
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise what is wrong."""
        raise self._error


def _offset(marks: Marks) -> Offset:
    return {str(partition): int(mark) for partition, mark in sorted(marks.items())}
