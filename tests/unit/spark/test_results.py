"""Whose results a file has."""

import pytest
from pyspark.sql.types import ArrayType, LongType, NullType, StructType

from waltz_core.errors import BadRequest
from waltz_spark.writer.columns import RESULT_COLUMNS
from waltz_spark.writer.results import RESULT_FIELDS, check_carried, file_name, is_of


@pytest.mark.parametrize("write", ["1", "n-1", "run-0123", "a.b", "x[y]"])
def test_a_file_is_of_the_write_in_its_name(write: str) -> None:
    assert is_of(file_name(3, 70_000, write), write)
    assert is_of(file_name(123_456, 0, write), write)


@pytest.mark.parametrize(
    "name",
    [
        file_name(0, 3, "n-1"),  # the other one's name ends with this one's
        file_name(0, 3, "11"),
        "part-00000-0c1d-1.parquet",  # Spark's own names begin alike
        "part-00000-3-1.parquet.crc",
        "_SUCCESS",
    ],
)
def test_what_is_another_ones_is_left_alone(name: str) -> None:
    assert not is_of(name, "1")


def test_the_columns_that_nobody_may_carry_are_those_of_results() -> None:
    own = [field.name for field in RESULT_FIELDS]
    assert sorted([*RESULT_COLUMNS, "partition"]) == sorted(own)


def test_a_column_that_parquet_has_not_is_told_before_anything_is_written() -> None:
    empty, nothing = StructType(), ArrayType(NullType(), containsNull=False)
    schema = StructType().add("id", LongType()).add("note", empty).add("list", nothing)
    for name in ("note", "list"):
        with pytest.raises(BadRequest, match=f"column '{name}' is .* option resultColumns"):
            check_carried(schema, ["id", name])
    with pytest.raises(BadRequest, match="option resultColumns"):
        check_carried(schema, None)
    check_carried(schema, ["id"])
    # What gives way to a column of the results, or is the payload, need not be carried.
    check_carried(StructType().add("status", empty).add("data", empty), None)
