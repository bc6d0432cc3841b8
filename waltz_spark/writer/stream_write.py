"""`df.writeStream.format("waltz")`: each micro-batch is an exactly-once write.

Spark creates one writer for the tasks of a micro-batch, and another one, in another process, for
the commit. Neither writer knows the number of the batch, but the tasks do.

Rules (docs/spark.md, "Exactly once"):
    1. A micro-batch is the write (query, batch). Its tasks read the query and the batch from their
       local properties, and pass both to the commit in their messages. The first task of the first
       run sets the starting marks.
    2. Spark records a micro-batch after this writer's commit. If the driver dies after the commit
       and before the record, Spark repeats the batch with the same tasks. These tasks find that the
       write is done, and append nothing. If the rows differ, the query fails, because otherwise the
       newly computed rows would be lost without notice.
    3. The commit also removes the write of the previous batch, because Spark has recorded that
       batch. The write of the last batch is kept for a year after its end. While this write exists,
       no task of an earlier batch can begin.
"""

import dataclasses
import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from waltz_core.errors import BadConfig
from waltz_spark.options import WriteOptions
from waltz_spark.spark_version import DataSourceStreamArrowWriter
from waltz_spark.worker_errors import without_stack
from waltz_spark.writer.batch_write import (
    DAY_MS,
    UNFINISHED_RETENTION_DAYS,
    NamedWrite,
    create_write_job,
    finish_write,
    remove_writes,
)
from waltz_spark.writer.task import TaskResult, WriteJob, task_attempt
from waltz_spark.writer.write_counts import WriteCounts, add_counts

_log = logging.getLogger("waltz")

# The local properties of a task that identify its query and micro-batch.
_QUERY_PROPERTY, _BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
_OTHER_ROWS_HINT = (
    "When Spark repeats a micro-batch, the query must compute the same rows. The rows of "
    "the first run stay in the log, and those of this run are not appended. To continue "
    "without the rows of this run, start a query with a new checkpointLocation."
)


class WaltzStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream; each row is one transaction.

    Args:
        options: the checked options of the write.
        schema: the stream's schema.

    Raises:
        BadRequest: the stream cannot be written. It is raised on the driver, before any task.
        Unavailable: the cluster cannot be reached.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if (
            options.recompute_function is not None
            and options.is_exactly_once
            and not options.identity_columns
        ):
            raise BadConfig(
                "option 'recompute' in a stream needs identityColumns (with dataFormat), "
                "because a repeated micro-batch cannot find recomputed rows without it. "
                "Hint: set identityColumns, or use exactlyOnce=false."
            )
        self._job = create_write_job(options, schema, None)

    # -- in a task ----------------------------------------------------------------------------

    @without_stack
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task; return their outcomes."""
        result = _job_of_micro_batch(self._job).write_task(iterator, *task_attempt())
        result.query = _task_property(_QUERY_PROPERTY)
        return result

    # -- on the driver ------------------------------------------------------------------------

    @without_stack
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Keep the results of the micro-batch, and log its outcome (rules 2 and 3)."""
        tasks = [message for message in messages if isinstance(message, TaskResult)]
        write = next((task.write for task in tasks if task.write is not None), None)
        before: list[str] = []
        if write is not None and batchId > 0:
            before = [f"{write.removesuffix(str(batchId))}{batchId - 1}"]
        _log.info("spark.micro_batch_written batch=%d", batchId)
        retention_days = max(UNFINISHED_RETENTION_DAYS, self._job.options.retention_days)
        named_write = None if write is None else NamedWrite(write, retention_days, _OTHER_ROWS_HINT)
        summary = finish_write(self._job, messages, named_write)
        query = next((task.query for task in tasks if task.query is not None), None)
        if summary is not None and query is not None:
            rejected = summary["rejected"] + summary["retry"]
            retried = sum(task.retried for task in tasks)
            add_counts(query, WriteCounts(summary["committed"], rejected, retried))
        remove_writes(self._job, before)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log the number of committed rows. A repeated micro-batch finds these rows in the log."""
        tasks = [message for message in messages if isinstance(message, TaskResult)]
        if any(task.was_done for task in tasks):
            return  # the error has the row counts
        _log.warning(
            "spark.micro_batch_failed batch=%d committed=%d",
            batchId,
            sum(task.committed for task in tasks),
        )


def _job_of_micro_batch(job: WriteJob) -> WriteJob:
    """Return the job for this task's micro-batch (rule 1)."""
    query, batch = _task_property(_QUERY_PROPERTY), _task_property(_BATCH_PROPERTY)
    options = job.options
    if options.results_path is not None:
        path = f"{options.results_path.rstrip('/')}/batch={batch}"
        options = dataclasses.replace(options, results_path=path)
    write = f"{options.write_name or 'stream'}-{query}-{batch}" if options.is_exactly_once else None
    return dataclasses.replace(
        job, options=options, write=write, keep_ms=UNFINISHED_RETENTION_DAYS * DAY_MS
    )


def _task_property(name: str) -> str:
    context = TaskContext.get()
    assert context is not None, "a micro-batch is written in tasks"
    value = context.getLocalProperty(name)
    assert value is not None
    return value
