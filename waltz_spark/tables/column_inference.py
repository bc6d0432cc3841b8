"""The changes in a part of the log, for tables whose columns are inferred from the payloads.

Rules:
    1. Tasks infer columns concurrently, each in its own part of the log. If a task fails, or if two
       tasks infer different types for a column, the tasks run again, one after the other. Then each
       task receives the columns that earlier tasks have inferred, as in the follower without Spark.
       So the columns and the errors are the same as in that follower.
    2. Spark needs the columns of a DataFrame before it runs a task. So tasks return their changes
       as Arrow bytes, which Spark keeps until all columns are known.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from waltz_core.errors import BadConfig, BadFormat
from waltz_core.tables.followed_log import check_decrypted, compute_changes_inferring_columns
from waltz_core.tables.inferred_columns import COLUMNS_MAX, LOG_COLUMNS, field_count
from waltz_core.tables.row_changes import DELETED_COLUMN, ChangeRules, combine_batches
from waltz_spark.tables.spark_errors import translate_errors
from waltz_spark.worker_errors import without_stack_each

# The result of tasks: a row with the columns first, then rows with changes (rule 2).
_PART_COLUMNS = "task int, columns binary, changes binary"
_PART_BYTES = 8 * 1024 * 1024


class _SchemaConflict(Exception):
    """Tasks have inferred two types for a column, or too many columns in total."""


@dataclass
class ColumnInferringRead:
    """Reads the transactions of tasks; yields the last changes, and the inferred columns.

    Attributes:
        reader: reads the columns of the log, with `data`.
        tasks: the tasks, in the order of the log.
        rules: how transactions become changes.
        known_columns: the known columns of the table.
        data_format: the format of the payloads.
    """

    reader: DataSourceReader
    tasks: Sequence[InputPartition]
    rules: ChangeRules
    known_columns: pa.Schema
    data_format: str

    @without_stack_each
    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the columns and changes of each task."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                rows = self.reader.read(self.tasks[number])
                rows = decrypted_rows(rows, [*LOG_COLUMNS, "data"])
                changes = compute_changes_inferring_columns(
                    combine_batches(rows), self.rules, self.known_columns, self.data_format
                )
                names = [name for name in changes.schema.names if name not in LOG_COLUMNS]
                names = [*names[:-1], *LOG_COLUMNS[:2], DELETED_COLUMN]
                yield from _encode_changes(number, changes.select(names))


def decrypted_rows(
    batches: Iterable[pa.RecordBatch], columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the given columns of batches; raises BadFormat if a payload was not decrypted."""
    for batch in batches:
        check_decrypted(batch)
        yield batch.select(columns)


def _encode_changes(task: int, changes: pa.Table) -> Iterator[pa.RecordBatch]:
    columns = pa.schema(list(changes.schema)[: -len(LOG_COLUMNS)])
    yield _part_row(task, columns.serialize().to_pybytes(), None)
    count = max(1, changes.num_rows * _PART_BYTES // max(1, changes.nbytes))
    for rows in changes.combine_chunks().to_batches(count):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        yield _part_row(task, None, sink.getvalue().to_pybytes())


def _part_row(task: int, columns: bytes | None, changes: bytes | None) -> pa.RecordBatch:
    arrays = [
        pa.array([task], pa.int32()),
        *(pa.array([x], pa.binary()) for x in (columns, changes)),
    ]
    return pa.RecordBatch.from_arrays(arrays, ["task", "columns", "changes"])


@dataclass
class ArrowChangesDecoder:
    """Converts changes from Arrow bytes to rows that have all columns."""

    schema: pa.Schema

    @without_stack_each
    def __call__(self, parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the changes as Arrow batches."""
        for part in parts:
            for arrow_bytes in part.column(0):
                changes = pa.ipc.open_stream(arrow_bytes.as_buffer()).read_all()
                columns = [
                    changes[each.name].cast(each.type)
                    if each.name in changes.schema.names
                    else pa.nulls(changes.num_rows, each.type)
                    for each in self.schema
                ]
                yield from pa.table(columns, schema=self.schema).to_batches()


class ColumnInference:
    """Infers the columns of payloads, and computes the changes.

    Spark keeps the last changes in its cache until the next call of `changes`.

    Args:
        session: runs the tasks.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._parts: DataFrame | None = None

    def changes(self, read: ColumnInferringRead) -> DataFrame:
        """Return the changes in the transactions of tasks: the last change for each key and task.

        Raises:
            BadFormat: a payload does not fit, a key is null, or a column has no type.
            BadConfig: the rules do not fit the columns.
            The errors of the reader: the log cannot be read.
        """
        try:
            columns = self._run_tasks(read)
        except (BadFormat, BadConfig, _SchemaConflict):
            columns = read.known_columns
            for task in read.tasks:  # rule 1
                columns = self._run_tasks(replace(read, tasks=[task], known_columns=columns))
            columns = self._run_tasks(replace(read, known_columns=columns))
        assert self._parts is not None, "the tasks have run"
        position = [pa.field(LOG_COLUMNS[0], pa.int32()), pa.field(LOG_COLUMNS[1], pa.int64())]
        deleted = pa.field(DELETED_COLUMN, pa.bool_(), nullable=False)
        schema = pa.schema([*columns, *position, deleted])
        packed_changes = self._parts.where("changes IS NOT NULL").select("changes")
        return packed_changes.mapInArrow(ArrowChangesDecoder(schema), spark_schema(schema))

    def release(self) -> None:
        """Release the bytes of the last changes from Spark's cache."""
        if self._parts is not None:
            self._parts.unpersist()
            self._parts = None

    def _run_tasks(self, read: ColumnInferringRead) -> pa.Schema:
        """Run the tasks, and return the known and the inferred columns."""
        self.release()
        numbers = self._session.range(0, len(read.tasks), 1, len(read.tasks))
        self._parts = numbers.mapInArrow(read, _PART_COLUMNS).persist()
        with translate_errors("the log", self._session):
            column_rows = (
                self._parts.where("columns IS NOT NULL").select("task", "columns").collect()
            )
        known_columns = read.known_columns
        for _, columns in sorted((row["task"], bytes(row["columns"])) for row in column_rows):
            known_columns = _merge_schemas(known_columns, pa.ipc.read_schema(pa.py_buffer(columns)))
        if field_count(part.type for part in known_columns) > COLUMNS_MAX:
            raise _SchemaConflict
        return known_columns


def spark_schema(schema: pa.Schema) -> StructType:
    """Convert inferred columns to Spark types."""
    return from_arrow_schema(schema)


def _merge_schemas(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    return pa.schema(list(_common_type(pa.struct(list(first)), pa.struct(list(second)))))


def _common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Return a type with the fields of both types; the fields of the first type come first."""
    if first == second:
        return first
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(_common_type(first.value_type, second.value_type))
    if not (pa.types.is_struct(first) and pa.types.is_struct(second)):
        raise _SchemaConflict
    fields = {part.name: part.type for part in first}
    for part in second:
        fields[part.name] = _common_type(fields.get(part.name, part.type), part.type)
    return pa.struct(list(fields.items()))
