"""The differences between PySpark 4.0, 4.1, 4.2 and 4.3.

The other modules use the names of PySpark 4.3. If an older PySpark lacks a name, this module
provides it or works around it. docs/spark.md, "Versions of Spark", lists the features of each
version.

Rules:
    1. Check PySpark's features, not its version number.
    2. No other module catches an ImportError or a TypeError because of PySpark's version.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql import SparkSession, datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
)
from pyspark.sql.pandas import types
from pyspark.sql.types import StructType

from waltz_spark.offsets import Offset, decode_offset

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION_CONTROL: bool
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:  # before 4.2
        from dataclasses import dataclass

        class ReadLimit:
            """The limit of a micro-batch."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """No limit."""

        @dataclass
        class ReadMaxRows(ReadLimit):
            """At most this many transactions."""

            max_rows: int

        class SupportsTriggerAvailableNow:
            """An empty mixin: PySpark before 4.2 does not use it."""

        HAS_ADMISSION_CONTROL = False
    else:
        HAS_ADMISSION_CONTROL = True

    if hasattr(datasource, "DataSourceStreamArrowWriter"):
        DataSourceStreamArrowWriter = datasource.DataSourceStreamArrowWriter
    else:

        class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):
            """A writer that gets Arrow batches in PySpark 4.0 through its second base class."""


__all__ = [
    "HAS_ADMISSION_CONTROL",
    "DataSourceStreamArrowWriter",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "adapt_stream_reader",
    "arrow_schema",
    "new_session",
]

_log = logging.getLogger("waltz")

_HAS_TIMEZONE_PARAMETER = "timezone" in inspect.signature(types.to_arrow_schema).parameters


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema for Spark's batches, with timestamps in UTC.

    Raises:
        PySparkException: Arrow has no type for a column.
    """
    if _HAS_TIMEZONE_PARAMETER:
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)  # before 4.3, always in UTC


def new_session(spark: SparkSession) -> SparkSession:
    """Return another session of the same Spark, with its own settings.

    With Spark Connect, the function creates a session on the server over the connection of `spark`.
    From PySpark 4.1 on, that session also has the artifacts of `spark`.
    """
    kind: Any = type(spark)
    if not kind.__module__.startswith("pyspark.sql.connect."):
        return spark.newSession()
    if hasattr(kind, "cloneSession"):
        session = kind.cloneSession(spark)
    else:
        builder = copy.copy(spark.client._builder)
        params = builder._params.items()
        builder._params = {name: each for name, each in params if name != "session_id"}
        session = kind(builder)
    if not hasattr(session.client, "_release_futures"):
        # Before 4.2, closing a client ends the threads of all clients of the process, even while
        # another client starts a task in these threads. Python's garbage collection also closes
        # clients.
        session.client.close = session.client._channel.close
    return cast("SparkSession", session)


def adapt_stream_reader(reader: DataSourceStreamReader) -> DataSourceStreamReader:
    """Adapt a reader with admission control to this version of PySpark."""
    return reader if HAS_ADMISSION_CONTROL else _ReaderWithoutAdmissionControl(reader)


class _ReaderWithoutAdmissionControl(DataSourceStreamReader):
    """A stream reader for PySpark before 4.2, where `latestOffset` has no start and no limit.

    Rules:
        1. A micro-batch reads everything available. These versions run `availableNow` and `once` as
           one micro-batch, so a limit would end such a query too early. The reader cannot detect
           the query's trigger.
        2. The start is the offset that Spark has used last. Before the first micro-batch, the start
           may be unknown. In this case `partitions` checks for data loss, because it receives both
           offsets.
    """

    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader = reader
        self._start: Offset = {}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint."""
        self._start = self._reader.initialOffset()
        return self._start

    def latestOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch (rule 1)."""
        end = self._reader.latestOffset(self._start, ReadAllAvailable())
        if self._start:
            self._warn_if_over_limit(self._start, end)
            self._start = end
        return end

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch; a restarted query passes its last offset twice."""
        self._start = end
        begin, ends = decode_offset(start), decode_offset(end)
        is_other_cluster = begin.cluster_key not in (None, ends.cluster_key)
        if is_other_cluster or any(
            mark < begin.marks.get(partition, mark) for partition, mark in ends.marks.items()
        ):
            # Rule 2. The call raises DataLoss, or restarts a partition that belongs to another log.
            latest_marks = decode_offset(self._reader.latestOffset(start, ReadAllAvailable())).marks
            start_marks = {
                partition: min(mark, latest_marks.get(partition, mark))
                for partition, mark in begin.marks.items()
            }
            start = start | {str(partition): mark for partition, mark in start_marks.items()}
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the transactions of a task as Arrow batches."""
        return self._reader.read(partition)

    def commit(self, end: Offset) -> None:
        """Call `commit` of the wrapped reader."""
        self._reader.commit(end)

    def stop(self) -> None:
        """Call `stop` of the wrapped reader."""
        self._reader.stop()

    def _warn_if_over_limit(self, start: Offset, end: Offset) -> None:
        limit = self._reader.getDefaultReadLimit()
        begin = decode_offset(start).marks
        count = sum(
            mark - begin.get(partition, -1) for partition, mark in decode_offset(end).marks.items()
        )
        if isinstance(limit, ReadMaxRows) and count > limit.max_rows:
            _log.warning(
                "spark.micro_batch_over_limit transactions=%d maxTransactionsPerTrigger=%d hint=%r",
                count,
                limit.max_rows,
                "PySpark before version 4.2 cannot limit the size of a micro-batch",
            )
