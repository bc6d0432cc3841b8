"""A table of Parquet files. Tasks of Spark write the files, and the driver writes the marks.

The layout and its rules are the same as in the core (`waltz_core/tables/parquet_table.py`). So a
follower with Spark continues a table of a follower without Spark, and vice versa. Tasks write with
pyarrow: tasks and driver access the store of the table like `waltz-core follow`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from waltz_core.tables.follower import TableState
from waltz_core.tables.parquet_table import FollowedParquetTable, with_position_columns, write_file
from waltz_core.tables.row_changes import ChangeRules, combine_batches
from waltz_core.tables.table_marks import TableMarks
from waltz_spark.spark_version import arrow_schema
from waltz_spark.tables.spark_errors import translate_errors
from waltz_spark.worker_errors import without_stack_each

_FILE_COLUMNS = "name string"


class SparkParquetTable:
    """A table of Parquet files of one follower (implements `FollowedTable`).

    Args:
        uri: a directory that exists on all machines of Spark, or a URL of an object store.
        schema: the declared columns.
        rules: how transactions become changes.

    Raises:
        BadConfig: the rules have a key or deletes, or a column has a reserved name.
    """

    def __init__(self, uri: str, schema: StructType, rules: ChangeRules) -> None:
        columns = arrow_schema(schema)
        self._table = FollowedParquetTable(uri, columns, rules)
        self._file_writer = ParquetFileWriter(uri, with_position_columns(columns))

    def create(self, start: TableMarks) -> None:
        """Let the first batch create the table; errors as in `FollowedParquetTable`."""
        self._table.create(start)

    def finish(self) -> None:
        """Create the table if `create` was called; errors as in `FollowedParquetTable`."""
        self._table.finish()

    def marks(self, follower: TableMarks) -> TableState | None:
        """Return the state of the table; errors as in `FollowedParquetTable`."""
        return self._table.marks(follower)

    def apply(self, changes: DataFrame | None, marks: TableMarks) -> bool:
        """Write changes as a batch with the marks after it; return whether there is a new batch.

        A batch contains only files of tasks that Spark has accepted. So a task that runs twice, or
        after the death of its driver, adds no rows.

        Raises:
            BadRequest: a change is a delete.
            Superseded: another follower has written this batch.
            Unavailable: Spark has lost an executor.
            The errors of `read` of the log: the changes cannot be read.
        """
        if changes is None:
            return self._table.apply(None, marks)
        with translate_errors(f"table {self._file_writer.uri}", changes.sparkSession, library=None):
            names = [
                row["name"]
                for row in changes.mapInArrow(self._file_writer, _FILE_COLUMNS).collect()
            ]
        if names:
            self._table.publish(names, marks)
        return bool(names)


@dataclass
class ParquetFileWriter:
    """Writes the changes of a task to files, and yields the file names."""

    uri: str
    schema: pa.Schema

    @without_stack_each
    def __call__(self, changes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the names of the files as Arrow batches."""
        names = write_file(self.uri, self.schema, combine_batches(changes))
        yield pa.RecordBatch.from_pydict({"name": pa.array(names, pa.string())})
