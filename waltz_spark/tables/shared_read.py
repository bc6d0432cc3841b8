"""Reads a part of the log once, and returns the changes of several tables.

Rules:
    1. A task reads the columns of the log, filtered by the headers of all tables. Each table
       decodes only its own transactions.
    2. A task returns rows with a struct for each table. In each row, only the struct of the row's
       table is not null. Spark keeps the rows in its cache until the next part is read, because
       each table has its own commit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from waltz_core.tables.followed_log import LogStateReader
from waltz_core.tables.follower import errors_of_table
from waltz_core.tables.row_changes import (
    ArrowTable,
    ChangeRules,
    add_changes,
    check_rules,
    combine_batches,
    empty_changes,
    select_transactions,
)
from waltz_core.tables.table_marks import LogState, MarkMap
from waltz_spark.datasource.batch_read import ReadTask
from waltz_spark.datasource.fetch import BatchConverter, ReadSource, read_log_batches
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.options import ReadOptions, parse_read
from waltz_spark.planning import TransactionRange
from waltz_spark.shared_clients import client_at
from waltz_spark.spark_version import arrow_schema
from waltz_spark.tables.column_inference import decrypted_rows
from waltz_spark.tables.log_changes import (
    changes_schema,
    combine_task_changes,
    marks_as_json,
    table_columns,
    transaction_columns,
    with_error_column,
)
from waltz_spark.worker_errors import without_stack_each

# The columns of the log that tables use to select transactions, and that error messages name.
_SELECTION_COLUMNS = ("partition", "transaction_id", "header")
_LOG_SCHEMA = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("transaction_id", LongType()),
        StructField("header", IntegerType()),
        StructField("data", BinaryType()),
    ]
)


@dataclass
class SharedTable:
    """A table of a shared read.

    Attributes:
        name: the name or the path of the table, for errors.
        declared_columns: the declared columns of its transactions.
        rules: how transactions become changes.
        headers: the headers of its transactions; if empty, all transactions belong to the table.
        options: the options for reading the table.
    """

    name: str
    declared_columns: StructType
    rules: ChangeRules
    headers: tuple[int, ...]
    options: Mapping[str, str]

    def check(self) -> None:
        """Check the rules and the options of the table.

        Raises:
            BadConfig, BadRequest: the rules or the options do not fit the columns.
        """
        with errors_of_table(self.name):
            rows = self.row_schema()
            check_rules(self.rules, arrow_schema(rows))
            WaltzDataSource(self.options).reader(with_error_column(rows, self.options))

    def row_schema(self) -> StructType:
        """Return the columns of the table's transactions."""
        return transaction_columns(self.declared_columns, self.rules)

    def batch_converter(self) -> BatchConverter:
        """Return the conversion of the log's columns to those of the table's transactions."""
        return BatchConverter(
            parse_read(self.options), with_error_column(self.row_schema(), self.options)
        )


class SharedSparkFollowedLog:
    """The log and the changes of several tables in it (implements `FollowedLog`).

    Args:
        session: runs the tasks.
        state_reader: provides the high-water marks of the log.
        tables: the tables.
        options: the options of the reads, without those for the format of payloads.

    Raises:
        BadConfig, BadRequest: the rules or the options do not fit the columns of a table.
    """

    def __init__(
        self,
        session: SparkSession,
        state_reader: LogStateReader,
        tables: Sequence[SharedTable],
        options: dict[str, str],
    ) -> None:
        for table in tables:
            table.check()
        self._session, self._state_reader = session, state_reader
        self._tables, self._options = list(tables), options
        self._parts: DataFrame | None = None

    def state(self) -> LogState:
        """Return the log's high-water marks and first available IDs; raises Unavailable."""
        return self._state_reader.state()

    def wait(self) -> None:
        """Wait until the next request is due."""
        self._state_reader.wait()

    def release(self) -> None:
        """Release the last changes from Spark's cache."""
        if self._parts is not None:
            self._parts.unpersist()
            self._parts = None

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> list[DataFrame]:
        """Return, for each table, the last change of each key after its start and up to `ends`.

        The log is read at the first action.

        Raises:
            DataLoss: transactions have expired.
            Unavailable: a partition does not answer.
        """
        self.release()
        lowest_starts = {partition: min(marks[partition] for marks in starts) for partition in ends}
        options = {
            **self._options,
            "startingHighWaterMarks": marks_as_json(lowest_starts),
            "endingHighWaterMarks": marks_as_json(ends),
        }
        reader = WaltzDataSource(options).reader(_LOG_SCHEMA)
        tasks = [task for task in reader.partitions() if isinstance(task, ReadTask)]
        numbers = self._session.range(0, len(tasks), 1, len(tasks))
        read = SharedRead(
            tasks, parse_read(options), self._tables, [dict(start) for start in starts]
        )
        self._parts = numbers.mapInArrow(read, read.schema()).persist()
        changes_by_table = []
        for index, table in enumerate(self._tables):
            changes = self._parts.where(f"t{index} IS NOT NULL").select(f"t{index}.*")
            changes_by_table.append(
                combine_task_changes(changes, table.rules.key) if len(tasks) > 1 else changes
            )
        return changes_by_table


@dataclass
class SharedRead:
    """Reads the transactions of tasks, and yields the last changes of each table (rule 2).

    Each Spark task receives one number: the index of an element of `tasks`.
    """

    tasks: Sequence[ReadTask]
    options: ReadOptions
    tables: Sequence[SharedTable]
    starts: Sequence[dict[int, int]]

    def schema(self) -> StructType:
        """Return the schema of the rows: a struct column for each table."""
        kinds = (
            changes_schema(table_columns(table.declared_columns, table.rules))
            for table in self.tables
        )
        return StructType([StructField(f"t{index}", kind) for index, kind in enumerate(kinds)])

    @without_stack_each
    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the changes as Arrow batches."""
        kinds = arrow_schema(self.schema())
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for index, changes in enumerate(self._last_changes(self.tasks[number])):
                    rows = changes.select(kinds.types[index].names)
                    yield from _as_structs(rows, index, kinds)

    def _last_changes(self, task: ReadTask) -> list[ArrowTable]:
        """Return, for each table, the last changes in the transactions of a task."""
        converters = [each.batch_converter() for each in self.tables]
        columns = dict.fromkeys(
            (*_SELECTION_COLUMNS, *(name for each in converters for name in each.columns))
        )
        kinds = [arrow_schema(each.row_schema()) for each in self.tables]
        changes_by_table = [
            empty_changes(kind, each.rules) for kind, each in zip(kinds, self.tables, strict=True)
        ]
        source = ReadSource(client_at(task.layout), task.replicas, task.archived_objects)
        span = TransactionRange(task.partition, task.first, task.last)
        for part in combine_batches(read_log_batches(source, span, self.options, list(columns))):
            for index, (table, converter) in enumerate(zip(self.tables, converters, strict=True)):
                after = self.starts[index][task.partition]
                with errors_of_table(table.name):
                    rows = [
                        converter.convert(select_transactions(batch, after, table.headers))
                        for batch in part.to_batches()
                    ]
                    readable = decrypted_rows(rows, kinds[index].names)
                    decoded = pa.Table.from_batches(readable, schema=kinds[index])
                    changes_by_table[index] = add_changes(
                        changes_by_table[index], decoded, table.rules
                    )
        return changes_by_table


def _as_structs(
    changes: ArrowTable, column_index: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield changes as structs in column `column_index`; the other columns are null."""
    for batch in changes.cast(pa.schema(list(schema.types[column_index]))).to_batches():
        columns = [pa.nulls(batch.num_rows, kind) for kind in schema.types]
        columns[column_index] = pa.StructArray.from_arrays(
            batch.columns, fields=list(schema.types[column_index])
        )
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
