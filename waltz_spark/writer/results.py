"""The results of a write: the outcome of every row, in Parquet files that the tasks write.

The columns of the files are an interface for users.

Rules:
    1. Each task attempt writes its own file. The name of the file contains the name of the write,
       and begins with `_`, so that readers ignore the file. At the end, the job renames the files
       of the attempts that Spark accepted, deletes the other files of this write, and writes
       `_SUCCESS` last. So a directory without `_SUCCESS` is unfinished. If an attempt runs longer
       than the job, readers continue to ignore its file. The job does not touch other files in the
       directory.
    2. The columns are the chosen input columns, then `RESULT_FIELDS`; all are nullable.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from waltz_core.client import RowOutcomeCode
from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.spark_version import arrow_schema
from waltz_spark.writer.appender import FinalRows

COMMITTED, REJECTED, RETRY = "COMMITTED", "REJECTED", "RETRY"
# The columns of the outcome. They replace input columns with the same names.
RESULT_FIELDS = (
    pa.field("status", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("transaction_id", pa.int64()),
    pa.field("attempts", pa.int32()),
    pa.field("lock_failure_transaction_id", pa.int64()),
    pa.field("retry_high_water_mark", pa.int64()),
)
SUMMARY_FILE = "_waltz.json"
_SUCCESS_FILE = "_SUCCESS"
# Spark and pyarrow ignore files with this prefix.
_HIDDEN_PREFIX = "_"
_RESULT_COLUMN_NAMES = frozenset(part.name for part in RESULT_FIELDS)


def result_batch(final_rows: FinalRows, rejected_status: str) -> pa.RecordBatch:
    """Return the results of rows as a batch; `rejected_status` is the status of rejected rows.

    `retry_high_water_mark` is a high-water mark from which a rejected row can be computed again.
    """
    assert final_rows.identity is not None
    identity = final_rows.identity
    input_names = [name for name in identity.schema.names if name not in _RESULT_COLUMN_NAMES]
    committed = final_rows.reasons == RowOutcomeCode.COMMITTED
    count = len(committed)
    marks = np.maximum(final_rows.conflicting, final_rows.high_water_mark)
    outcome_columns = [
        pa.array(np.where(committed, COMMITTED, rejected_status).tolist(), pa.string()),
        pa.array(np.full(count, final_rows.partition, np.int32)),
        pa.array(final_rows.transaction_ids, pa.int64(), mask=~committed),
        pa.array(np.full(count, final_rows.attempt, np.int32)),
        pa.array(final_rows.conflicting, pa.int64(), mask=committed),
        pa.array(marks.astype(np.int64), pa.int64(), mask=committed),
    ]
    fields = [identity.schema.field(name).with_nullable(nullable=True) for name in input_names]
    columns = [identity.column(name) for name in input_names]
    return pa.RecordBatch.from_arrays(
        columns + outcome_columns, schema=pa.schema([*fields, *RESULT_FIELDS])
    )


def check_column_types(schema: StructType, names: Sequence[str] | None) -> None:
    """Reject a column type that Parquet does not support, before any row is in the log.

    Args:
        schema: the DataFrame's schema.
        names: the input columns in the results; None: all but `data`.

    Raises:
        BadRequest: the error names the column and its type.
    """
    for part in schema.fields:
        if part.name in _RESULT_COLUMN_NAMES or part.name not in (names or schema.names):
            continue
        if part.name == "data" and names is None:
            continue
        try:
            # All columns are nullable in results (rule 2).
            kind = arrow_schema(StructType().add(part.name, part.dataType))
            pq.ParquetWriter(pa.BufferOutputStream(), kind).close()
        except (ValueError, pa.ArrowException, PySparkException) as error:
            raise BadRequest(
                f"column {part.name!r} has type {part.dataType.simpleString()}, which "
                f"Parquet results do not support ({error}). Hint: omit the column with option "
                "resultColumns."
            ) from None


class ResultDirectory(NamedTuple):
    """A directory on any file system that pyarrow supports."""

    file_system: fs.FileSystem
    path: str


def open_results_directory(results_path: str, *, is_for_reading: bool = False) -> ResultDirectory:
    """Open `resultsPath`; create the directory, unless `is_for_reading`.

    Raises:
        BadConfig: the file system is unknown, or the directory cannot be created.
    """
    try:
        if "://" in results_path:
            system, path = fs.FileSystem.from_uri(results_path)
        else:
            system, path = fs.LocalFileSystem(), results_path.removeprefix("file:")
        if not is_for_reading:
            system.create_dir(path, recursive=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadConfig(f"option 'resultsPath': {results_path!r} cannot be used: {error}") from None
    return ResultDirectory(system, path.rstrip("/"))


class ResultFile:
    """The results of one task attempt; the first row creates the file."""

    def __init__(self, results_path: str, name: str, *, rejected_status: str) -> None:
        self._rejected_status = rejected_status
        self._directory = open_results_directory(results_path)
        self.name = name
        self._writer: pq.ParquetWriter | None = None

    def add(self, final_rows: FinalRows) -> None:
        """Append the outcomes of rows to the file."""
        batch = result_batch(final_rows, self._rejected_status)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                f"{self._directory.path}/{_HIDDEN_PREFIX}{self.name}",
                batch.schema,
                filesystem=self._directory.file_system,
            )
        self._writer.write_batch(batch)

    def close(self) -> str | None:
        """Finish the file; return its name for `publish_results`, or None if there were no rows."""
        if self._writer is None:
            return None
        self._writer.close()
        return self.name

    def close_for_failed_task(self) -> None:
        """Finish the file and make it visible, for a failed task: its job keeps no results."""
        if self.close() is not None:
            _make_visible(self._directory, self.name)


def result_file_name(task: int, attempt: int, write: str) -> str:
    """Return the name of the results file for a task attempt."""
    return f"part-{task:05d}-{attempt}-{write}.parquet"


def is_result_file_of(name: str, write: str) -> bool:
    """Whether a file has results of this write; one write's name may be a suffix of another's."""
    return re.fullmatch(rf"part-\d+-\d+-{re.escape(write)}\.parquet", name) is not None


def publish_results(
    results_path: str, names: list[str], write: str, summary: dict[str, object]
) -> None:
    """Make the named files of a write visible; delete the files of other attempts (rule 1)."""
    directory = open_results_directory(results_path)
    for name in names:
        with suppress(FileNotFoundError):  # an executor has another local directory
            _make_visible(directory, name)
    published_names = set(names)
    selector = fs.FileSelector(directory.path)
    for entry in directory.file_system.get_file_info(selector):
        name = entry.base_name
        if (
            is_result_file_of(name.removeprefix(_HIDDEN_PREFIX), write)
            and name not in published_names
        ):
            directory.file_system.delete_file(entry.path)
    _write_summary(directory, summary)


def _make_visible(directory: ResultDirectory, name: str) -> None:
    directory.file_system.move(
        f"{directory.path}/{_HIDDEN_PREFIX}{name}", f"{directory.path}/{name}"
    )


def rewrite_summary(results_path: str, summary: dict[str, object]) -> None:
    """Write the summary of a write that was already done, with the directory of its results."""
    _write_summary(open_results_directory(results_path), summary)


def _write_summary(directory: ResultDirectory, summary: dict[str, object]) -> None:
    for name, text in ((SUMMARY_FILE, json.dumps(summary)), (_SUCCESS_FILE, "")):
        with directory.file_system.open_output_stream(f"{directory.path}/{name}") as stream:
            stream.write(text.encode())
