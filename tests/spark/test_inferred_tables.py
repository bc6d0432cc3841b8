"""Delta tables of Spark with inferred columns equal those of the core's follower."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import waltz_spark
from tests import table_libraries
from tests.commands import run_command
from tests.spark.test_tables import append_and_return_marks
from waltz_core.errors import WaltzError
from waltz_core.tables.table_marks import decode_marks

pytestmark = [
    pytest.mark.spark,
    pytest.mark.core,
    pytest.mark.skipif(
        not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason()
    ),
]

ROWS = [
    {"id": 1, "name": "a", "at": {"x": 1}},
    {"id": 2, "tags": [{"k": "v"}, None], "flag": None},
    {"id": 1, "name": None, "at": {"x": 2, "y": [1.5]}, "flag": True},
    {"id": 3, "raw": b"\x00"},
    {"id": 9, "_d": True, "only_of_a_delete": 1},
    {"id": 2, "tags": [{"k": "w", "n": 5}], "at": None},
    {"id": 3, "_d": True},
    {"id": 4, "tags": [], "at": {"y": []}},
]


def without_spark(connect: str, table: Path, start: dict[int, int], *more: str) -> CompletedProcess:
    marks = json.dumps({str(partition): mark for partition, mark in start.items()})
    line = ["follow", str(table), "--connect", connect, "--key", "id", "--until", "now"]
    return run_command(
        *line, "--delete-where", "_d", *(["--start-marks", marks] if start else []), *more
    )


def rows_of_table(table: Path) -> dict[int, dict]:
    rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    return {row["id"]: row for row in rows}


def inferred_columns(table: Path) -> dict[str, str]:
    return {part.name: str(part.type) for part in DeltaTable(table).schema().fields}


@pytest.mark.versions
def test_spark_infers_the_same_columns_as_the_core_for_all_batch_limits(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    start = append_and_return_marks(connect, *((0, row) for row in ROWS))
    table_options = {"key": "id", "delete_where": "_d", "until": "now"}
    table = tmp_path / "without Spark"
    assert without_spark(connect, table, start).returncode == 0
    expected = rows_of_table(table), inferred_columns(table)
    assert len(expected[1]) == 10
    for number, limits in enumerate(
        ({}, {"batch_transactions": 1}, {"batch_transactions": 3, "minPartitions": 2})
    ):
        table = tmp_path / str(number)
        marks = waltz_spark.follow(
            spark, connect, table=str(table), start=start, **table_options, **limits
        )
        assert (rows_of_table(table), inferred_columns(table)) == expected, limits
        newest = DeltaTable(table).history(1)[0]["userMetadata"]
        assert dict(decode_marks(newest).marks) == marks
    # Each of the two followers continues the table, with new columns.
    append_and_return_marks(connect, (0, {"id": 5, "new": 1}), (0, {"id": 5, "at": {"z": "z"}}))
    waltz_spark.follow(spark, connect, table=str(table), **table_options)
    append_and_return_marks(connect, (0, {"id": 6, "newer": 2, "at": {"w": 0}}))
    assert without_spark(connect, table, {}).returncode == 0
    append_and_return_marks(connect, (0, {"id": 7, "newest": b""}))
    waltz_spark.follow(spark, connect, table=str(table), **table_options)
    assert without_spark(connect, tmp_path / "all", start).returncode == 0
    assert (rows_of_table(table), inferred_columns(table)) == (
        rows_of_table(tmp_path / "all"),
        inferred_columns(tmp_path / "all"),
    )


@pytest.mark.slow
def test_followers_continue_a_table_that_was_created_without_columns(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    """Neither follower had a transaction when it created the table."""
    start = append_and_return_marks(connect)
    table_options = {"key": "id", "delete_where": "_d", "until": "now"}
    tables = tmp_path / "of_spark", tmp_path / "without Spark"
    waltz_spark.follow(spark, connect, table=str(tables[0]), start=start, **table_options)
    assert without_spark(connect, tables[1], start).returncode == 0
    append_and_return_marks(connect, (0, {"id": 1, "value": 5}))
    for table in tables:
        waltz_spark.follow(spark, connect, table=str(table), **table_options)
        assert rows_of_table(table)[1]["value"] == 5


@pytest.mark.parametrize(
    "rows",
    [
        [(0, {"id": 1, "a": 1.5}), (0, {"id": 1}), (1, {"id": 3, "a": 1})],
        [(0, {"id": 1, "a": {"b": [[1], ["x"]]}})],
        [(0, {"id": 1}), (0, {"a": 1})],
        [(0, {"id": 1, "A": 5, "a": 5})],
        # `tests/unit/tables/test_inferred_columns.py` has the same errors without Spark.
        *(
            pytest.param(rows, marks=pytest.mark.slow)
            for rows in (
                [(0, {"id": 1, "a": 1}), (0, {"id": 2, "a": "x"})],
                [(0, {"id": 1, "a": []})],
                [(0, {"a": 1})],
                [(0, {"id": 1.5})],
                [(0, {"id": 1, "header": 5})],
                [(0, {"id": 1, "a b": 5})],
            )
        ),
    ],
)
def test_failed_inference_raises_the_errors_of_the_core_and_leaves_no_table(
    spark: SparkSession, connect: str, tmp_path: Path, rows: list[tuple[int, dict]]
) -> None:
    start = append_and_return_marks(connect, *rows)
    result = without_spark(connect, tmp_path / "table", start)
    assert result.returncode == 1
    table = tmp_path / "of_spark"
    with pytest.raises(WaltzError) as caught:
        waltz_spark.follow(
            spark,
            connect,
            table=str(table),
            key="id",
            delete_where="_d",
            start=start,
            until="now",
            minPartitions=4,
        )
    assert without_place(str(caught.value)) == without_place(result.stderr)
    assert not (table / "_delta_log").exists()


def without_place(text: str) -> str:
    """Return an error without the name of the table and the command's prefix."""
    return re.sub(r"^.*(error: |table \S+: )", "", text.strip())


@pytest.mark.slow
def test_tasks_agree_on_columns_that_they_find_in_different_orders(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    """One task has only an empty list; the value with the element type is in another task."""
    start = append_and_return_marks(
        connect, (0, {"id": 1, "a": [1]}), (0, {"id": 3, "a": []}), (1, {"id": 2, "a": []})
    )
    table = tmp_path / "table"
    waltz_spark.follow(
        spark, connect, table=str(table), key="id", start=start, until="now", minPartitions=3
    )
    assert {row["id"]: row["a"] for row in rows_of_table(table).values()} == {1: [1], 2: [], 3: []}
