"""Files of results: their rows and their visibility."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import ArrayType, LongType, NullType, StructType

from waltz_core.errors import BadRequest
from waltz_spark.writer.appender import FinalRows
from waltz_spark.writer.columns import RESULT_COLUMNS
from waltz_spark.writer.results import (
    REJECTED,
    RESULT_FIELDS,
    ResultFile,
    check_column_types,
    is_result_file_of,
    publish_results,
    result_file_name,
)


@pytest.mark.parametrize("write", ["1", "n-1", "run-0123", "a.b", "x[y]"])
def test_a_result_file_name_identifies_its_write(write: str) -> None:
    assert is_result_file_of(result_file_name(3, 70_000, write), write)
    assert is_result_file_of(result_file_name(123_456, 0, write), write)


@pytest.mark.parametrize(
    "name",
    [
        result_file_name(0, 3, "n-1"),  # the name of the other write ends with this name
        result_file_name(0, 3, "11"),
        "part-00000-0c1d-1.parquet",  # file names of Spark begin alike
        "part-00000-3-1.parquet.crc",
        "_SUCCESS",
    ],
)
def test_files_of_other_writes_are_not_result_files_of_this_write(name: str) -> None:
    assert not is_result_file_of(name, "1")


def test_the_reserved_column_names_are_the_result_columns() -> None:
    own = [field.name for field in RESULT_FIELDS]
    assert sorted([*RESULT_COLUMNS, "partition"]) == sorted(own)


def test_a_column_unsupported_by_parquet_is_reported_before_any_write() -> None:
    empty, nothing = StructType(), ArrayType(NullType(), containsNull=False)
    schema = StructType().add("id", LongType()).add("note", empty).add("list", nothing)
    for name in ("note", "list"):
        with pytest.raises(BadRequest, match=f"column '{name}' has type .* option resultColumns"):
            check_column_types(schema, ["id", name])
    with pytest.raises(BadRequest, match="option resultColumns"):
        check_column_types(schema, None)
    check_column_types(schema, ["id"])
    # Payload columns, and columns that results replace, are not stored.
    check_column_types(StructType().add("status", empty).add("data", empty), None)


def attempt(path: Path, number: int, write: str = "w") -> ResultFile:
    """Return the file of a task attempt with outcomes of two rows."""
    file = ResultFile(str(path), result_file_name(0, number, write), rejected_status=REJECTED)
    ids, none = np.arange(2, dtype=np.int64), np.full(2, -1, np.int64)
    identity = pa.RecordBatch.from_pydict({"id": pa.array([1, 2])})
    file.add(FinalRows(0, identity, ids, np.zeros(2, np.uint8), none, 1, 1))
    return file


def test_only_published_result_files_are_visible(tmp_path: Path) -> None:
    kept, lost, other = attempt(tmp_path, 3), attempt(tmp_path, 4), attempt(tmp_path, 3, "v")
    lost.close()
    other.close()
    name = kept.close()
    assert name is not None
    assert pq.read_table(tmp_path).num_rows == 0
    publish_results(str(tmp_path), [name, result_file_name(1, 0, "w")], "w", {})
    late = attempt(tmp_path, 5)  # an attempt that is killed after the job has ended
    assert pq.read_table(tmp_path).num_rows == 2
    late.close()
    assert pq.read_table(tmp_path).num_rows == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {name, f"_{other.name}", f"_{late.name}", "_waltz.json", "_SUCCESS"}


def test_the_results_of_a_failed_task_are_visible(tmp_path: Path) -> None:
    attempt(tmp_path, 3).close_for_failed_task()
    assert pq.read_table(tmp_path).num_rows == 2
    ResultFile(
        str(tmp_path), result_file_name(0, 4, "w"), rejected_status=REJECTED
    ).close_for_failed_task()
    assert [path.name for path in tmp_path.iterdir()] == [result_file_name(0, 3, "w")]
