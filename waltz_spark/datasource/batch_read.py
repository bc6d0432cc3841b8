"""Batch reads: the driver resolves high-water marks once and plans tasks; tasks fetch ranges.

Spark pickles the reader for every task, so the reader contains plain values only. Spark calls
`partitions` once for a `load`, at the first action. So a DataFrame is a snapshot.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from waltz_core.client import ArchivedObjects, ClusterLayout, ReplicaSet, WaltzClient
from waltz_spark import planning
from waltz_spark.datasource.archive_read import find_archived_objects, split_at_objects
from waltz_spark.datasource.change_feed import ChangeFeed
from waltz_spark.datasource.feed_read import FeedReader, FeedSpan, feed_state_file
from waltz_spark.datasource.fetch import (
    BatchConverter,
    ReadSource,
    read_converted_batches,
    read_log_batches,
)
from waltz_spark.datasource.start_offsets import (
    determine_ends,
    determine_starts,
    extend_to_first_available,
)
from waltz_spark.options import ReadOptions
from waltz_spark.shared_clients import client_at, query_replica_sets
from waltz_spark.task_spans import with_read_span
from waltz_spark.worker_errors import without_stack, without_stack_each


@dataclass
class ReadTask(InputPartition):
    """The input of one task: transactions first..last of one partition, and its replicas.

    Spark pickles each task separately, so a task contains only the owner of its own partition. The
    task of a change feed reads the whole log up to `last`, and yields rows only for transactions
    after `feed_start_mark`.
    """

    layout: ClusterLayout
    replicas: ReplicaSet
    partition: int
    first: int
    last: int
    archived_objects: ArchivedObjects | None = None
    feed_start_mark: int | None = None


class WaltzBatchReader(DataSourceReader):
    """Reads a range of the log.

    Args:
        options: the checked options of the read.
        schema: the requested columns, in order: those of the log and, with `dataFormat`, of
            payloads.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @without_stack
    def partitions(self) -> Sequence[InputPartition]:
        """Resolve the high-water marks, once, and return the tasks.

        Raises:
            DataLoss: a mark is past the end of its log, or requested transactions have expired.
            BadConfig: a partition does not exist, has no mark, or would end before its start.
            Unavailable: the cluster does not answer.
        """
        options = self._options
        # A server that has just lost the partition may report an older mark than the user's mark.
        # So marks from the user are compared with marks that a quorum has confirmed.
        is_given = not (
            isinstance(options.starting_marks, str) and isinstance(options.ending_marks, str)
        )
        client, sources = query_replica_sets(
            options.connect,
            partial(planning.chosen_partitions, options),
            linearizable=is_given,
            group=options.group,
        )
        begin, end = determine_starts(client, options, sources), determine_ends(options, sources)
        planning.check_order(options, begin, end)
        spans = planning.plan_spans(begin, end, options.transaction_ids)
        return plan_read_tasks(client, options, spans, sources)

    @without_stack_each
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the transactions of a task as Arrow batches."""
        return run_read_task(partition, self._options, self._schema)


def plan_read_tasks(
    client: WaltzClient,
    options: ReadOptions,
    spans: Sequence[planning.TransactionRange],
    sources: Mapping[int, ReplicaSet],
) -> Sequence[InputPartition]:
    """Return the tasks that read the spans; `sources` has the replicas of each partition.

    Raises:
        DataLoss: transactions that a change feed needs have expired.
        BadConfig: option `archive` names no object store.
    """
    feed_starts: dict[int, int] = {}
    if options.change_feed_rules is not None:
        feed_starts = {span.partition: span.first - 1 for span in spans}
        spans = extend_to_first_available(options, spans, sources)
    objects = (
        {}
        if options.archive_url is None
        else find_archived_objects(options.archive_url, spans, sources)
    )
    if options.change_feed_rules is None:
        parts = [
            part for span in spans for part in split_at_objects(span, objects.get(span.partition))
        ]
        spans = planning.split_spans(
            parts,
            task_count_min=options.task_count_min,
            per_task_max=options.task_transactions_max,
        )
    layout = client.layout()
    tasks = []
    for span in spans:
        archived = objects.get(span.partition)
        if archived is not None and archived.manifest.first <= span.first <= archived.manifest.last:
            archived = archived.objects_between(span.first, span.last)
        else:
            archived = None
        owners, replicas = layout.for_partition(span.partition), sources[span.partition]
        tasks.append(ReadTask(owners, replicas, *span, archived, feed_starts.get(span.partition)))
    return tasks


def run_read_task(
    task: InputPartition, options: ReadOptions, schema: StructType, query: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield a task's transactions, or the rows of its change feed, as Arrow batches.

    Args:
        task: one of `plan_read_tasks`.
        options: the options of the read.
        schema: the requested columns.
        query: the ID of the streaming query that may cache the state of its change feed.

    Raises:
        The errors of `read_converted_batches` and `FeedReader.rows`.
    """
    if not isinstance(task, ReadTask):
        return iter(())  # Spark passes another object if there is nothing to read
    return with_read_span(_read_task(task, options, schema, query), options.traces, task.partition)


def _read_task(
    task: ReadTask, options: ReadOptions, schema: StructType, query: str | None
) -> Iterator[pa.RecordBatch]:
    source = ReadSource(client_at(task.layout), task.replicas, task.archived_objects)
    if task.feed_start_mark is None:
        span = planning.TransactionRange(task.partition, task.first, task.last)
        return read_converted_batches(source, span, BatchConverter(options, schema))
    feed = ChangeFeed(options, schema, task.partition)
    cluster = task.layout.cluster.key

    def read(first: int, last: int) -> Iterator[pa.RecordBatch]:
        span = planning.TransactionRange(task.partition, first, last)
        return read_log_batches(source, span, options, feed.columns)

    file = feed_state_file(query, cluster, task.partition, options, schema)
    feed_span = FeedSpan(task.first, task.feed_start_mark, task.last)
    return FeedReader(feed, read, feed_span, file).rows()
