"""Whose results a file has."""

import pytest

from waltz_spark.writer.columns import RESULT_COLUMNS
from waltz_spark.writer.results import RESULT_FIELDS, file_name, is_of


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
