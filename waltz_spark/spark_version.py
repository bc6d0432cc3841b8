"""The differences between PySpark 4.0, 4.1, 4.2 and 4.3.

The other modules use the names of PySpark 4.3. Where an older PySpark lacks one of them, this
module provides it or works around it. docs/spark.md, "Versions of Spark", has the table of what
works where.

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

from waltz_spark.offsets import Offset, decode

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
            """A mixin that PySpark before 4.2 does not use."""

        HAS_ADMISSION_CONTROL = False
    else:
        HAS_ADMISSION_CONTROL = True

    if hasattr(datasource, "DataSourceStreamArrowWriter"):
        DataSourceStreamArrowWriter = datasource.DataSourceStreamArrowWriter
    else:

        class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):
            """PySpark 4.0 passes Arrow batches to each writer of the second class."""


__all__ = [
    "HAS_ADMISSION_CONTROL",
    "DataSourceStreamArrowWriter",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "new_session",
    "stream_reader",
]

_log = logging.getLogger("waltz")

_TAKES_TIMEZONE = "timezone" in inspect.signature(types.to_arrow_schema).parameters


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema for Spark's batches, with timestamps in UTC.

    Raises:
        PySparkException: Arrow has no such type.
    """
    if _TAKES_TIMEZONE:
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)  # in UTC, before 4.3


def new_session(spark: SparkSession) -> SparkSession:
    """Return another session of the same Spark, with settings of its own.

    With Spark Connect it is a new session of the server, by the connection of this one; from 4.1
    on it has the artifacts of this one, too.
    """
    kind: Any = type(spark)
    if not kind.__module__.startswith("pyspark.sql.connect."):
        return spark.newSession()
    if hasattr(kind, "cloneSession"):
        session = kind.cloneSession(spark)
    else:
        builder = copy.copy(spark.client._builder)
        given = builder._params.items()
        builder._params = {name: each for name, each in given if name != "session_id"}
        session = kind(builder)
    if not hasattr(session.client, "_release_futures"):
        # Before 4.2, a client that is closed, also by Python's garbage collection, ends the threads
        # of all clients of the process, even while another one starts a task in them.
        session.client.close = session.client._channel.close
    return cast("SparkSession", session)


def stream_reader(reader: DataSourceStreamReader) -> DataSourceStreamReader:
    """Return a reader that this PySpark can use, from one with admission control."""
    return reader if HAS_ADMISSION_CONTROL else _WithoutAdmissionControl(reader)


class _WithoutAdmissionControl(DataSourceStreamReader):
    """A stream reader for PySpark before 4.2, which passes `latestOffset` neither start nor limit.

    Rules:
        1. A micro-batch reads everything available. These versions run `availableNow` and `once` as
           one micro-batch, so a limit would end such a query too early, and the reader cannot
           detect the query's trigger.
        2. The start is the offset that Spark has used last. Before the first micro-batch it may be
           unknown; then `partitions` checks for data loss, because it gets both ends.
    """

    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader = reader
        self._start: Offset = {}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint starts."""
        self._start = self._reader.initialOffset()
        return self._start

    def latestOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch (rule 1)."""
        end = self._reader.latestOffset(self._start, ReadAllAvailable())
        if self._start:
            self._warn_of_a_large_batch(self._start, end)
            self._start = end
        return end

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch; a restarted query passes its last offset twice."""
        self._start = end
        begin, ends = decode(start), decode(end)
        is_other = begin.cluster not in (None, ends.cluster)
        if is_other or any(mark < begin.marks.get(each, mark) for each, mark in ends.marks.items()):
            # Rule 2. It raises, or restarts a partition of another log.
            found = decode(self._reader.latestOffset(start, ReadAllAvailable())).marks
            again = {each: min(mark, found.get(each, mark)) for each, mark in begin.marks.items()}
            start = start | {str(each): mark for each, mark in again.items()}
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's transactions as Arrow batches."""
        return self._reader.read(partition)

    def commit(self, end: Offset) -> None:
        """Delegate it."""
        self._reader.commit(end)

    def stop(self) -> None:
        """Delegate it."""
        self._reader.stop()

    def _warn_of_a_large_batch(self, start: Offset, end: Offset) -> None:
        limit = self._reader.getDefaultReadLimit()
        begin = decode(start).marks
        count = sum(mark - begin.get(each, -1) for each, mark in decode(end).marks.items())
        if isinstance(limit, ReadMaxRows) and count > limit.max_rows:
            _log.warning(
                "spark.micro_batch_over_limit transactions=%d maxTransactionsPerTrigger=%d hint=%r",
                count,
                limit.max_rows,
                "PySpark before version 4.2 cannot limit the size of a micro-batch",
            )
