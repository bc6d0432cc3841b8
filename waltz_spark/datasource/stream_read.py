"""Stream reads: offsets are high-water marks, and a micro-batch is a range of each partition.

Spark keeps one reader for offsets in a separate process, and pickles another reader to the tasks.
The two readers share only the offsets in the checkpoint.

Rules:
    1. An offset has the mark of each partition (read up to this ID, inclusive) and the cluster key
       (`offsets.py`). A micro-batch reads the transactions between two offsets, even if it is
       planned several times.
    2. Offsets never decrease, except by rule 4. This holds even if a server that has just lost a
       partition reports an old mark.
    3. A start past the end of the log is data loss, after a quorum of the replicas has confirmed
       the end. An offset from another cluster is also data loss, even if the log is long enough.
       There is one exception: the cluster was restored from a backup of the cluster in the offset,
       and this backup contains all transactions that the stream has read.
    4. If the offset is from another log (rule 3) and the options allow data loss, the stream reads
       the partition from its start. First, a micro-batch that reads nothing from this partition
       sets the offset to `BEFORE_FIRST`.
    5. An offset before the first available ID of its log is data loss, too. If the options allow
       it, the read continues from the first available ID.
    6. A micro-batch that was planned for another log cannot be read. The reader recognizes such a
       micro-batch by the cluster key, or by an end past the end of the log. An offset from a
       development version has no cluster key; the next offset has one.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from waltz_core.client import ClusterInfo, ReplicaSet, WaltzClient
from waltz_core.errors import BadConfig, DataLoss, WaltzError
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.tables.table_marks import divide_by_lag
from waltz_spark import planning
from waltz_spark.datasource.batch_read import plan_read_tasks, run_read_task
from waltz_spark.datasource.feed_read import streaming_query_id
from waltz_spark.datasource.start_offsets import (
    determine_starts,
    first_available_ids,
    high_water_marks_of,
    raise_to_first_available,
)
from waltz_spark.offsets import Offset, StreamOffset, decode_offset, encode_offset
from waltz_spark.options import Marks, ReadOptions
from waltz_spark.shared_clients import client_of, query_replica_sets
from waltz_spark.spark_version import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from waltz_spark.worker_errors import without_stack, without_stack_each

_log = logging.getLogger("waltz")

_START_OF_STREAM = "the stream"
_OTHER_LOG_REASON = (
    "the log was created again, or belongs to another cluster. Hint: use another "
    "checkpoint, or set failOnDataLoss=false to read the log from its start."
)


class WaltzStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows.

    Args:
        options: the checked options of the read.
        schema: the requested columns, in order: those of the log and, with `dataFormat`, of
            payloads.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._final_marks: Marks | None = None  # the end of a query with trigger availableNow
        self._cached_marks: Marks = {}
        self._first_available_ids: Marks = {}  # the first available ID of each partition
        self._marks_valid_until_s = 0.0
        self._cluster_key = b""  # the key of the cluster to which the cached marks belong
        self._cluster: ClusterInfo | None = None

    # ---- offsets, in the process that Spark starts for them

    @without_stack
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint.

        Raises:
            DataLoss: a mark is past the end of its log, or requested transactions have expired.
            BadConfig: a partition does not exist, or has no mark.
            Unavailable: the cluster does not answer.
        """
        # Rule 3: compare a mark from the user with marks that a quorum has confirmed.
        client, sources = self._query_partitions(linearizable=True)
        return encode_offset(determine_starts(client, self._options, sources), client.cluster().key)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the maximum size of a micro-batch, unless the trigger sets another limit."""
        return ReadMaxRows(self._options.trigger_transactions_max)

    @without_stack
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Set the end of the query to the current high-water marks."""
        self._final_marks = self._current_marks()

    @without_stack
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch (rules 2 and 3).

        Raises:
            DataLoss: the log ends before `start`, or the transactions after `start` have expired.
            BadConfig: the checkpoint has partitions that this query omits.
        """
        begin, cluster = self._decode_offset(start)
        marks = self._current_marks(begin)
        is_other_log = not self._is_same_log(StreamOffset(begin, cluster))
        recreated = [
            partition
            for partition, mark in begin.items()
            if is_other_log or mark > marks[partition]
        ]
        if recreated:
            restart_marks = self._restart_marks(recreated, StreamOffset(begin, cluster), marks)
            return encode_offset({**begin, **restart_marks}, self._cluster_key)
        begin = raise_to_first_available(
            self._options, begin, self._first_available_ids, _START_OF_STREAM
        )
        ends = marks
        if self._final_marks is not None:
            # A target from another log would never be reached.
            ends = {
                partition: min(mark, marks[partition])
                for partition, mark in self._final_marks.items()
            }
            ends = {partition: max(mark, begin[partition]) for partition, mark in ends.items()}
        if isinstance(limit, ReadMaxRows):
            ends = divide_by_lag(begin, ends, limit.max_rows)
        return encode_offset(ends, self._cluster_key)

    @without_stack
    def reportLatestOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the current high-water marks, for the query's progress report."""
        return encode_offset(self._current_marks(), self._cluster_key)

    def commit(self, end: Offset) -> None:
        """Do nothing: the log keeps everything, and the checkpoint has the position."""

    def stop(self) -> None:
        """Do nothing: the connections close when their process exits."""

    def _decode_offset(self, start: Offset) -> StreamOffset:
        """Decode an offset; a partition that the offset lacks has the mark `BEFORE_FIRST`."""
        client = client_of(self._options.connect)
        partitions = planning.chosen_partitions(self._options, client.partition_count)
        offset_marks, cluster = decode_offset(start)
        if omitted_partitions := sorted(offset_marks.keys() - set(partitions)):
            raise BadConfig(
                "the checkpoint belongs to a query that also read partition "
                f"{omitted_partitions[0]}, "
                "but this query omits it. Hint: do not change option 'partitions', or use "
                "another checkpoint."
            )
        marks = {
            partition: offset_marks.get(partition, int(BEFORE_FIRST)) for partition in partitions
        }
        return StreamOffset(marks, cluster)

    def _restart_marks(self, recreated: Sequence[int], start: StreamOffset, marks: Marks) -> Marks:
        """Return the marks at which partitions of another log are read again (rule 4).

        Raises:
            DataLoss: the options do not allow data loss.
        """
        if self._options.fails_on_data_loss:
            # For the message: the partition whose log ends the furthest before its offset.
            begin = start.marks
            worst_partition = min(recreated, key=lambda each: marks[each] - begin[each])
            problem = (
                f"the stream has read partition {worst_partition} up to transaction "
                f"{begin[worst_partition]}, "
                f"but its log ends at transaction {marks[worst_partition]}"
            )
            if marks[worst_partition] >= begin[worst_partition]:
                problem = self._other_cluster_text(start.cluster_key, self._cluster_key)
            raise DataLoss(f"{problem}: {_OTHER_LOG_REASON}")
        _log.warning("spark.log_recreated partitions=%s", recreated)
        return dict.fromkeys(recreated, int(BEFORE_FIRST))

    def _is_same_log(self, offset: StreamOffset) -> bool:
        """Whether an offset belongs to the log of the last queried cluster (rule 3)."""
        if offset.cluster_key in (None, self._cluster_key.hex()):
            return True
        assert self._cluster is not None
        return self._cluster.restore_sources.includes(offset.cluster_key, offset.marks)

    def _other_cluster_text(self, expected: str | None, found_key: bytes) -> str:
        return (
            f"{self._options.connect} is another cluster than that of the checkpoint: "
            f"expected cluster key {expected}, found {found_key.hex()}"
        )

    def _current_marks(self, minimum: Marks | None = None) -> Marks:
        """Return marks at most `pollInterval` old; a mark below `minimum` is confirmed (rule 3)."""
        now_s = time.monotonic()
        if now_s >= self._marks_valid_until_s:
            previous_marks = self._cached_marks
            # Rule 2: a reader without earlier marks cannot detect an old mark.
            self._cached_marks = self._request_marks(linearizable=not previous_marks)
            self._confirm_marks(previous_marks)
            self._marks_valid_until_s = now_s + self._options.poll_ms / 1000
        self._confirm_marks(minimum or {})
        return self._cached_marks

    def _confirm_marks(self, previous_marks: Marks) -> None:
        """Request linearizable marks if a cached mark is below the previous one (rules 2 and 3)."""
        if any(
            mark < previous_marks.get(partition, mark)
            for partition, mark in self._cached_marks.items()
        ):
            self._cached_marks = self._request_marks(linearizable=True)

    def _request_marks(self, *, linearizable: bool) -> Marks:
        sources = self._query_partitions(linearizable=linearizable)[1]
        self._first_available_ids = first_available_ids(sources)
        return high_water_marks_of(sources)

    def _query_partitions(
        self, partitions: Sequence[int] | None = None, *, linearizable: bool
    ) -> tuple[WaltzClient, dict[int, ReplicaSet]]:
        """Query the given partitions, or all chosen partitions, and record the cluster."""
        choose = partial(planning.chosen_partitions, self._options)
        client, sources = query_replica_sets(
            self._options.connect,
            choose if partitions is None else lambda _: partitions,
            linearizable=linearizable,
            group=self._options.group,
        )
        cluster = client.cluster()
        if self._cluster_key != cluster.key:
            self._marks_valid_until_s = 0.0  # the cached marks belong to another cluster
            self._cluster_key, self._cluster = cluster.key, cluster
        return client, sources

    # ---- a micro-batch

    @without_stack
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch (rule 1).

        Raises:
            DataLoss: the micro-batch was planned for another log (rule 6), or its transactions
                have expired (rule 5).
        """
        options, (ends, cluster) = self._options, self._decode_offset(end)
        begin = self._decode_offset(start).marks
        spans = planning.plan_spans(begin, ends, options.transaction_ids)
        planned_ends = {span.partition: ends[span.partition] for span in spans}
        client, sources = self._query_partitions(list(planned_ends), linearizable=False)
        if _partitions_with_earlier_end(planned_ends, sources):
            client, sources = self._query_partitions(list(planned_ends), linearizable=True)
        partitions_past_end, key = (
            _partitions_with_earlier_end(planned_ends, sources),
            client.cluster().key,
        )
        is_other_log = not self._is_same_log(StreamOffset(ends, cluster))
        if recreated := [
            partition
            for partition in planned_ends
            if partition in partitions_past_end or is_other_log
        ]:
            if options.fails_on_data_loss:
                problem = self._other_cluster_text(cluster, key)
                if partitions_past_end:
                    problem = (
                        "the micro-batch ends at transaction "
                        f"{planned_ends[partitions_past_end[0]]} of partition "
                        f"{partitions_past_end[0]}, but its log ends at transaction "
                        f"{sources[partitions_past_end[0]].high_water_mark}"
                    )
                raise DataLoss(f"{problem}: {_OTHER_LOG_REASON}")
            _log.warning("spark.micro_batch_skipped partitions=%s", recreated)
            spans = [span for span in spans if span.partition not in recreated]
        first_ids = first_available_ids({span.partition: sources[span.partition] for span in spans})
        begin = {partition: begin[partition] for partition in first_ids}
        begin = raise_to_first_available(options, begin, first_ids, _START_OF_STREAM)
        ends = {each: max(ends[each], at) for each, at in begin.items()}
        spans = planning.plan_spans(begin, ends, options.transaction_ids)
        return plan_read_tasks(client, options, spans, sources)

    @without_stack_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the transactions of a task as Arrow batches."""
        return run_read_task(partition, self._options, self._schema, streaming_query_id())


class FailingStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader for a stream that cannot be read: its methods raise the error.

    If `streamReader` raised the error, PySpark 4.3 would hide it behind another error.
    """

    def __init__(self, error: WaltzError) -> None:
        self._error = error

    @without_stack
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Raise the error."""
        raise self._error

    @without_stack
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Raise the error."""
        raise self._error

    @without_stack
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Raise the error."""
        raise self._error

    @without_stack
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise the error."""
        raise self._error


def _partitions_with_earlier_end(ends: Marks, sources: Mapping[int, ReplicaSet]) -> list[int]:
    """Return the partitions whose log ends before the given end."""
    return [
        partition for partition, end in ends.items() if end > sources[partition].high_water_mark
    ]
