"""The last change of each key in a part of the log, or in a DataFrame with a part of the log.

Rules:
    1. A task reads transactions and reduces them in its Python process, so the JVM receives one row
       for each key and task. The JVM reduces the results of several tasks again.
    2. DataFrames of changes have the columns of the table, then `partition`, `transaction_id` and
       `_deleted`.
    3. The start and the end of a batch determine its content, so a repeated batch has the same
       changes.
    4. With encryption keys, a payload that cannot be decrypted is an error: its row is unknown.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from waltz_core.errors import BadConfig
from waltz_core.tables.followed_log import LogStateReader
from waltz_core.tables.row_changes import (
    DELETED_COLUMN,
    ChangeRules,
    check_rules,
    combine_batches,
    compute_changes,
    reduce_batches,
)
from waltz_core.tables.table_marks import LogState, MarkMap
from waltz_spark.datasource.source import WaltzDataSource
from waltz_spark.options import ERROR_COLUMN, LOG_COLUMNS
from waltz_spark.spark_version import arrow_schema
from waltz_spark.tables.column_inference import (
    ColumnInference,
    ColumnInferringRead,
    decrypted_rows,
    spark_schema,
)
from waltz_spark.tables.spark_errors import TWO_PARTITIONS_PREFIX
from waltz_spark.worker_errors import without_stack_each

_POSITION_FIELDS = (
    StructField("partition", IntegerType()),
    StructField("transaction_id", LongType()),
)
_HEADER_FIELD = StructField("header", IntegerType())
_ERROR_FIELD = StructField(ERROR_COLUMN, StringType())


class SparkFollowedLog:
    """The log and the changes in it, read by Spark tasks (implements `FollowedLog`).

    Args:
        session: runs the tasks.
        state_reader: provides the high-water marks of the log.
        schema: the declared columns of the table. To infer the columns from payloads, pass a
            function that returns the columns that the table has so far.
        rules: how transactions become changes.
        options: the options of the reads.

    Raises:
        BadConfig: the rules do not fit the schema, or columns cannot be inferred from this
            data format.
    """

    def __init__(
        self,
        session: SparkSession,
        state_reader: LogStateReader,
        schema: StructType | Callable[[], StructType],
        rules: ChangeRules,
        options: Mapping[str, str],
    ) -> None:
        self._session, self._state_reader = session, state_reader
        self._options, self._rules = dict(options), rules
        self._inference = ColumnInference(session)
        self._read_known_columns = schema if callable(schema) else None
        if callable(schema):
            self._data_format = self._options.pop("dataFormat")
            if self._data_format not in ("msgpack", "json"):
                raise BadConfig(
                    "schema: expected declared columns for payloads in "
                    f"{self._data_format}, found none. Hint: declare the columns; they are "
                    "derived from the payloads only for msgpack and json."
                )
            rows = StructType([*_POSITION_FIELDS, _HEADER_FIELD, StructField("data", BinaryType())])
            self._read_schema = with_error_column(rows, self._options)
            return
        rows = transaction_columns(schema, rules)
        check_rules(rules, arrow_schema(rows))
        self._row_schema, self._read_schema = (
            arrow_schema(rows),
            with_error_column(rows, self._options),
        )
        self._changes_schema = changes_schema(table_columns(schema, rules))

    def state(self) -> LogState:
        """Return the log's high-water marks and first available IDs; raises Unavailable."""
        return self._state_reader.state()

    def wait(self) -> None:
        """Wait until the next request is due."""
        self._state_reader.wait()

    def release(self) -> None:
        """Release the data of the last changes from Spark's cache."""
        self._inference.release()

    def changes(self, starts: Sequence[MarkMap], ends: MarkMap) -> list[DataFrame]:
        """Return the last change of each key after `starts[0]` and up to `ends`, as one DataFrame.

        If columns are declared, the log is read at the next action. If not, the log is read at
        once.

        Raises:
            BadFormat, BadConfig: columns cannot be inferred; see `ColumnInference`.
            DataLoss: transactions have expired.
            Unavailable: a partition does not answer.
        """
        options = {
            **self._options,
            "startingHighWaterMarks": marks_as_json(starts[0]),
            "endingHighWaterMarks": marks_as_json(ends),
        }
        reader = WaltzDataSource(options).reader(self._read_schema)
        tasks = reader.partitions()
        if self._read_known_columns is not None:
            known_columns = arrow_schema(self._read_known_columns())
            task_changes = self._inference.changes(
                ColumnInferringRead(reader, tasks, self._rules, known_columns, self._data_format)
            )
        else:
            numbers = self._session.range(0, len(tasks), 1, len(tasks))
            read = LastChangesRead(
                reader, tasks, self._rules, self._row_schema, self._changes_schema.names
            )
            task_changes = numbers.mapInArrow(read, self._changes_schema)
        return [
            task_changes if len(tasks) == 1 else combine_task_changes(task_changes, self._rules.key)
        ]


@dataclass
class LastChangesRead:
    """Reads the transactions of tasks, and yields the last changes (rule 1).

    Each Spark task receives one number: the index of an element of `tasks`.
    """

    reader: DataSourceReader
    tasks: Sequence[InputPartition]
    rules: ChangeRules
    schema: pa.Schema
    columns: list[str]

    @without_stack_each
    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the changes as Arrow batches."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                rows = self.reader.read(self.tasks[number])
                rows = decrypted_rows(rows, self.schema.names)
                for changes in self._last_changes(rows):
                    yield from changes.select(self.columns).to_batches()

    def _last_changes(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield the last changes; without a key, all changes part by part, to bound the memory."""
        if self.rules.key:
            yield reduce_batches(rows, self.rules, self.schema)
        else:
            yield from (compute_changes(part, self.rules) for part in combine_batches(rows))


@dataclass
class DataFrameReduction:
    """Reduces the rows of a DataFrame to the last changes after the marks in `after`."""

    rules: ChangeRules
    schema: pa.Schema
    columns: list[str]
    after: MarkMap

    @without_stack_each
    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the changes as Arrow batches."""
        if self.rules.function is not None:  # Spark's timestamps are in the session's time zone
            parts = (pa.Table.from_batches([batch]).cast(self.schema) for batch in rows)
            rows = (batch for part in parts for batch in part.to_batches())
        last_changes = reduce_batches(rows, self.rules, self.schema, self.after)
        yield from last_changes.select(self.columns).to_batches()


def changes_of_dataframe(
    df: DataFrame, schema: StructType, rules: ChangeRules, after: MarkMap
) -> DataFrame:
    """Return the last change of each key and task in a DataFrame of transactions (rule 2).

    Args:
        df: transactions with the columns of the table, and with the columns that the rules use.
        schema: the columns of the table.
        rules: how transactions become changes.
        after: the marks of the table; transactions up to them are dropped.
    """
    result_schema = changes_schema(schema)
    reduction = DataFrameReduction(rules, arrow_schema(df.schema), result_schema.names, dict(after))
    return df.mapInArrow(reduction, result_schema)


def transaction_columns(schema: StructType, rules: ChangeRules) -> StructType:
    """Return the columns of a table's transactions: declared columns, and columns of rules."""
    return with_log_columns(schema, header=bool(rules.delete_headers) or rules.function is not None)


def with_error_column(rows: StructType, options: Mapping[str, str]) -> StructType:
    """Return the columns to read; with keys, also the column for decryption errors (rule 4).

    Raises:
        BadConfig: the schema already has a column with this name.
    """
    if "encryptionKeys" not in options:
        return rows
    if ERROR_COLUMN in rows.names:
        raise BadConfig(
            f"column {ERROR_COLUMN!r}: this name is reserved if payloads are decrypted. Hint: use "
            "a payload without this field."
        )
    has_payload = any(name == "data" or name not in LOG_COLUMNS for name in rows.names)
    return StructType([*rows, *([_ERROR_FIELD] if has_payload else [])])


def with_log_columns(schema: StructType, *, header: bool = True) -> StructType:
    """Return the declared columns of transactions and the columns of the log."""
    log_fields = [*_POSITION_FIELDS, *([_HEADER_FIELD] if header else [])]
    return StructType(
        [*schema, *(log_field for log_field in log_fields if log_field.name not in schema.names)]
    )


def table_columns(schema: StructType, rules: ChangeRules) -> StructType:
    """Return the columns of a table: the columns of its transactions or of its changes function.

    Raises:
        BadConfig: Spark has no type for a column.
    """
    if rules.function is None:
        return schema
    columns = rules.function.columns
    columns_of_spark = spark_schema(columns)
    for part, spark_part in zip(columns, arrow_schema(columns_of_spark), strict=True):
        if part.type != spark_part.type:
            raise BadConfig(
                f"result of the changes function {rules.function.name}: column {part.name!r}: "
                f"expected a type of Spark, such as {spark_part.type}, found {part.type}"
            )
    return columns_of_spark


def changes_schema(schema: StructType) -> StructType:
    """Return the columns of changes (rule 2); all but the key are null in some deletes."""
    position = [each for each in _POSITION_FIELDS if each.name not in schema.names]
    columns = [StructField(each.name, each.dataType) for each in schema]
    return StructType(
        [*columns, *position, StructField(DELETED_COLUMN, BooleanType(), nullable=False)]
    )


def combine_task_changes(parts: DataFrame, key: Sequence[str]) -> DataFrame:
    """Reduce the last changes of several tasks to the last change of each key.

    If a key has changes in two partitions, the action on the result fails. The message begins with
    `TWO_PARTITIONS_PREFIX`. Without a key, all changes are returned.
    """
    if not key:
        return parts
    names = parts.columns
    # Rename all columns: the columns of the user may have any name.
    short_names = {name: f"c{number}" for number, name in enumerate(names)}
    keys, partition = [short_names[name] for name in key], short_names["partition"]
    other_columns = [short_names[name] for name in names if name not in key]
    latest = F.max_by(F.struct(*other_columns), F.col(short_names["transaction_id"]))
    groups = (
        parts.toDF(*short_names.values())
        .groupBy(*keys)
        .agg(latest.alias("last"), F.min(partition).alias("low"), F.max(partition).alias("high"))
    )
    key_texts = [part for name in keys for part in (F.lit(", "), F.col(name).cast("string"))][1:]
    positions = (F.lit("partition "), F.col("low"), F.lit(" and partition "), F.col("high"))
    message_text = F.lit(") has changes in two partitions, ")
    error = F.raise_error(
        F.concat(
            F.lit(f"{TWO_PARTITIONS_PREFIX}("), *key_texts, message_text, *positions, F.lit(".")
        )
    )

    def column(name: str) -> Column:
        number = short_names[name]
        value = F.col(number) if name in key else F.col(f"last.{number}")
        if name == DELETED_COLUMN:
            value = F.when(F.col("low") == F.col("high"), value).otherwise(error.cast("boolean"))
        return value.alias(name)

    return groups.select(*map(column, names))


def marks_as_json(marks: MarkMap) -> str:
    """Return high-water marks as JSON, the form of the options of a read."""
    return json.dumps({str(partition): mark for partition, mark in marks.items()})
