"""Every row's outcome, as Parquet: what a task writes and what the job keeps of it.

Results are how a user learns which rows are in the log, so their columns are an interface of their
own.

Rules:
    1. A task attempt writes a file of its own, with the write in its name. Readers do not see it:
       its name begins with `_` until the job renames the files of the attempts that Spark took. The
       job deletes the others of this write, and writes `_SUCCESS` last. A directory without it is
       unfinished. What an attempt leaves that outlives the job is never seen. Other files are other
       people's.
    2. The columns are the carried input columns, then `RESULT_FIELDS`; all nullable.
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

from waltz_core.client import Reason
from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.spark_version import arrow_schema
from waltz_spark.writer.appender import Answered

COMMITTED, REJECTED, RETRY = "COMMITTED", "REJECTED", "RETRY"
# The log's own columns of a result; an input column of the same name gives way to them.
RESULT_FIELDS = (
    pa.field("status", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("transaction_id", pa.int64()),
    pa.field("attempts", pa.int32()),
    pa.field("lock_failure_transaction_id", pa.int64()),
    pa.field("retry_high_water_mark", pa.int64()),
)
SUMMARY_FILE = "_waltz.json"
_SUCCESS = "_SUCCESS"
# Spark and pyarrow read no file whose name begins so.
_HIDDEN = "_"
_OWN = frozenset(part.name for part in RESULT_FIELDS)


def result_batch(answered: Answered, refused: str) -> pa.RecordBatch:
    """Return one row of results for each answered row; `refused` is what a refused one is called.

    `retry_high_water_mark` is a mark from which such a row can be computed again.
    """
    assert answered.identity is not None
    identity = answered.identity
    kept = [name for name in identity.schema.names if name not in _OWN]
    committed = answered.reasons == Reason.COMMITTED
    count = len(committed)
    marks = np.maximum(answered.conflicting, answered.high_water_mark)
    own = [
        pa.array(np.where(committed, COMMITTED, refused).tolist(), pa.string()),
        pa.array(np.full(count, answered.partition, np.int32)),
        pa.array(answered.transaction_ids, pa.int64(), mask=~committed),
        pa.array(np.full(count, answered.attempt, np.int32)),
        pa.array(answered.conflicting, pa.int64(), mask=committed),
        pa.array(marks.astype(np.int64), pa.int64(), mask=committed),
    ]
    fields = [identity.schema.field(name).with_nullable(nullable=True) for name in kept]
    columns = [identity.column(name) for name in kept]
    return pa.RecordBatch.from_arrays(columns + own, schema=pa.schema([*fields, *RESULT_FIELDS]))


def check_carried(schema: StructType, names: Sequence[str] | None) -> None:
    """Refuse a column that Parquet does not have, before any row is in the log.

    Args:
        schema: the DataFrame's.
        names: the input columns that the results carry; all but `data` when None.

    Raises:
        BadRequest: names the column and its type.
    """
    for part in schema.fields:
        if part.name in _OWN or part.name not in (names or schema.names):
            continue
        if part.name == "data" and names is None:
            continue
        try:
            # All are nullable in results (rule 2).
            kind = arrow_schema(StructType().add(part.name, part.dataType))
            pq.ParquetWriter(pa.BufferOutputStream(), kind).close()
        except (ValueError, pa.ArrowException, PySparkException) as error:
            raise BadRequest(
                f"column {part.name!r} is {part.dataType.simpleString()}, which results, being "
                f"Parquet, cannot carry ({error}): leave it out with option resultColumns"
            ) from None


class ResultDirectory(NamedTuple):
    """A directory on any file system that pyarrow opens."""

    system: fs.FileSystem
    path: str


def open_place(results_path: str, *, is_read: bool = False) -> ResultDirectory:
    """Open `resultsPath`; make the directory, unless it is only read.

    Raises:
        BadConfig: no file system is known for it, or it cannot be made.
    """
    try:
        if "://" in results_path:
            system, path = fs.FileSystem.from_uri(results_path)
        else:
            system, path = fs.LocalFileSystem(), results_path.removeprefix("file:")
        if not is_read:
            system.create_dir(path, recursive=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadConfig(f"option 'resultsPath': cannot use {results_path!r}: {error}") from None
    return ResultDirectory(system, path.rstrip("/"))


class ResultFile:
    """The results of one task attempt; made when the first row comes."""

    def __init__(self, results_path: str, name: str, *, refused: str) -> None:
        self._refused = refused
        self._place = open_place(results_path)
        self.name = name
        self._writer: pq.ParquetWriter | None = None

    def add(self, answered: Answered) -> None:
        """Append the outcomes of some rows."""
        batch = result_batch(answered, self._refused)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                f"{self._place.path}/{_HIDDEN}{self.name}",
                batch.schema,
                filesystem=self._place.system,
            )
        self._writer.write_batch(batch)

    def close(self) -> str | None:
        """Finish the file; return the name for `keep`, or None when there was no row."""
        if self._writer is None:
            return None
        self._writer.close()
        return self.name

    def close_of_failed(self) -> None:
        """Finish the file and show it: the job of this task keeps nothing."""
        if self.close() is not None:
            _show(self._place, self.name)


def file_name(task: int, attempt: int, write: str) -> str:
    """Return the name of the results of a task attempt."""
    return f"part-{task:05d}-{attempt}-{write}.parquet"


def is_of(name: str, write: str) -> bool:
    """Whether a file has results of this write; one write's name may be the end of another's."""
    return re.fullmatch(rf"part-\d+-\d+-{re.escape(write)}\.parquet", name) is not None


def keep(results_path: str, names: list[str], write: str, summary: dict[str, object]) -> None:
    """Keep the named files of a write, delete what its other attempts left (rule 1)."""
    place = open_place(results_path)
    for name in names:
        with suppress(FileNotFoundError):  # an executor's that has a directory of its own
            _show(place, name)
    wanted = set(names)
    selector = fs.FileSelector(place.path)
    for entry in place.system.get_file_info(selector):
        name = entry.base_name
        if is_of(name.removeprefix(_HIDDEN), write) and name not in wanted:
            place.system.delete_file(entry.path)
    _conclude(place, summary)


def _show(place: ResultDirectory, name: str) -> None:
    place.system.move(f"{place.path}/{_HIDDEN}{name}", f"{place.path}/{name}")


def tell_again(results_path: str, summary: dict[str, object]) -> None:
    """Have a directory say what a write came to that was done before, and where its results are."""
    _conclude(open_place(results_path), summary)


def _conclude(place: ResultDirectory, summary: dict[str, object]) -> None:
    for name, text in ((SUMMARY_FILE, json.dumps(summary)), (_SUCCESS, "")):
        with place.system.open_output_stream(f"{place.path}/{name}") as stream:
            stream.write(text.encode())
