"""Rejected rows are recomputed in their task by the user's function."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

import waltz_spark
from waltz_core.client import begin_write
from waltz_core.errors import BadRequest
from waltz_spark.functions import lock
from waltz_spark.options import parse_write
from waltz_spark.writer.batch_write import create_write_job
from waltz_spark.writer.task import WriteJob

pytestmark = pytest.mark.spark

ValuesOf = Callable[[int], list[tuple[int, int]]]
FUNCTIONS = Path(__file__).parent / "recompute_functions.py"


@pytest.fixture(autouse=True, scope="module")
def recompute_path(spark: SparkSession) -> Iterator[None]:
    spark.addArtifact(str(FUNCTIONS), pyfile=True)
    sys.path.insert(0, str(FUNCTIONS.parent))
    yield
    sys.path.remove(str(FUNCTIONS.parent))


def counters(spark: SparkSession, key: int, more: int, value: int, count: int = 1) -> DataFrame:
    rows = spark.range(count).select(
        F.col("id").cast("int").alias("row"),
        F.lit(key).alias("key"),
        F.lit(more).alias("more"),
        F.lit(value + more).alias("value"),
    )
    return rows.withColumn("write_locks", F.array(lock("counter", F.col("key")))).coalesce(1)


@pytest.fixture
def values_of(spark: SparkSession, connect: str) -> ValuesOf:
    """Return a function that reads `more` and `value` of a key's rows since the test began."""
    since = waltz_spark.snapshot(spark, connect).high_water_marks
    marks = json.dumps({str(partition): mark for partition, mark in since.items()})

    def values(key: int) -> list[tuple[int, int]]:
        reader = spark.read.format("waltz").options(
            dataFormat="json", mode="DROPMALFORMED", startingHighWaterMarks=marks
        )
        schema = "transaction_id bigint, key int, more int, value int"
        rows = reader.schema(schema).load(connect).where(F.col("key") == key)
        return [(row.more, row.value) for row in rows.orderBy("transaction_id").collect()]

    return values


def test_a_rejected_row_is_computed_again(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    key = 9001
    snapshot = waltz_spark.snapshot(spark, connect)
    marks = snapshot.high_water_marks
    first = counters(spark, key, 5, 0)
    waltz_spark.append(first, connect, high_water_marks=marks, dataFormat="json")
    result = waltz_spark.append(
        counters(spark, key, 7, 0),  # from the same snapshot, so it conflicts
        connect,
        high_water_marks=marks,
        dataFormat="json",
        onLockFailure="retry",
        recompute="recompute_functions:add_to_newest",
    )
    assert result.counts["committed"] == result.counts["recomputed"] == 1
    (row,) = result.committed.collect()
    assert (row.value, row.attempts) == (12, 2)
    assert values_of(key) == [(5, 5), (7, 12)]


def test_jobs_add_to_one_counter(spark: SparkSession, connect: str, values_of: ValuesOf) -> None:
    key = 9002
    marks = waltz_spark.snapshot(spark, connect).high_water_marks
    frames = [counters(spark, key, more, 0) for more in range(1, 6)]

    def add(frame: DataFrame) -> int:
        result = waltz_spark.append(
            frame,
            connect,
            high_water_marks=marks,
            dataFormat="json",
            onLockFailure="retry",
            recompute="recompute_functions:add_to_newest",
            maxRetries=100,
        )
        assert result.counts["committed"] == 1
        return int(result.counts["recomputed"])

    with ThreadPoolExecutor(5) as pool:
        recomputed = list(pool.map(add, frames))
    assert sum(recomputed) == 4  # all were computed from the same empty counter
    values = values_of(key)
    total = 0
    for more, value in values:
        total += more
        assert value == total
    assert total == 15


@pytest.mark.slow
def test_rows_that_the_function_omits_stay_rejected(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    key = 9003
    marks = waltz_spark.snapshot(spark, connect).high_water_marks
    conflicting = counters(spark, key, 1, 0)
    waltz_spark.append(conflicting, connect, high_water_marks=marks, dataFormat="json")
    result = waltz_spark.append(
        counters(spark, key, 2, 0, count=3),
        connect,
        high_water_marks=marks,
        dataFormat="json",
        onLockFailure="retry",
        recompute="recompute_functions:drop_all",
    )
    assert (result.counts["committed"], result.counts["rejected"]) == (0, 3)
    assert result.rejected.count() == 3
    assert {row.attempts for row in result.rejected.collect()} == {1}
    assert values_of(key) == [(1, 1)]


def test_a_row_is_rejected_when_its_retries_are_used_up(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    """Eight rows of one job under one lock: each round commits one of them."""
    result = waltz_spark.append(
        counters(spark, 9004, 1, 0, count=8),
        connect,
        dataFormat="json",
        onLockFailure="retry",
        recompute="recompute_functions:add_to_newest",
        maxRetries=3,
        retryBackoff=0,
    )
    assert (result.counts["committed"], result.counts["rejected"]) == (4, 4)
    assert result.counts["recomputed"] == 3
    assert {row.attempts for row in result.rejected.collect()} == {4}
    assert values_of(9004) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_invalid_options_are_reported_before_any_task(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    for options, text in (
        (
            {"recompute": "recompute_functions:none_such"},
            "'recompute_functions:none_such' cannot be imported \\(",
        ),
        ({"recompute": "no_such_module:f"}, "'no_such_module:f' cannot be imported \\("),
        ({"recompute": "just_a_name"}, "expected 'module:function'"),
        ({"recompute": "a:b", "onLockFailure": "reject"}, "needs onLockFailure=retry"),
        ({"identityColumns": "nothing"}, "packs into the payload, found 'nothing'"),
    ):
        all_options = {"onLockFailure": "retry", "dataFormat": "json", **options}
        with pytest.raises(Exception, match=text):
            waltz_spark.append(counters(spark, 9005, 1, 0), connect, **all_options)
    assert values_of(9005) == []


@pytest.mark.slow
def test_each_row_gets_the_transactions_since_its_own_mark(
    spark: SparkSession, connect: str
) -> None:
    key = 9007
    with_append = {"dataFormat": "json", "onLockFailure": "fail"}
    first_append = waltz_spark.append(counters(spark, key, 1, 0), connect, **with_append)
    (first,) = first_append.committed.collect()
    for _ in range(2):
        waltz_spark.append(counters(spark, key, 1, 0), connect, **with_append)
    marks = {"old": first.transaction_id - 1, "new": first.transaction_id}
    rows = counters(spark, key, 1, 0, count=2).withColumn(
        "client_high_water_mark",
        F.when(F.col("row") == 0, F.lit(marks["old"])).otherwise(F.lit(marks["new"])).cast("long"),
    )
    result = waltz_spark.append(
        rows,
        connect,
        dataFormat="json",
        onLockFailure="retry",
        recompute="recompute_functions:count_since",
        maxRetries=1,
    )
    found = {row.row: (row.status, row.value) for row in result.results.collect()}
    # Both rows conflict: the first row has not seen three transactions, and the second row has not
    # seen two. After its recomputation, the first row conflicts with the second row again.
    assert found == {0: ("COMMITTED", 3), 1: ("REJECTED", 2)}


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        ("return_list", BadRequest, r"to return a pyarrow\.Table, found list"),
        ("change_identity", BadRequest, "to leave identity column 'row' unchanged"),
        ("raise_error", Exception, "the shop's own"),
    ],
)
def test_an_invalid_result_of_recompute_fails_the_job(
    spark: SparkSession, connect: str, function: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        waltz_spark.append(
            counters(spark, 9008, 1, 0, count=2),
            connect,
            dataFormat="json",
            onLockFailure="retry",
            recompute=f"recompute_functions:{function}",
            identityColumns="row",
        )


@pytest.mark.slow
def test_results_of_several_writes_share_a_directory(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "results")
    spark.range(3).write.parquet(path)  # of the user
    results = [
        waltz_spark.append(counters(spark, key, 1, 0), connect, dataFormat="json", resultsPath=path)
        for key in (9009, 9010)
    ]
    assert [[row.key for row in result.results.collect()] for result in results] == [[9009], [9010]]
    assert spark.read.schema("id long").parquet(f"{path}/part-*.snappy.parquet").count() == 3


SCHEMA = StructType(
    [
        StructField("row", StringType()),
        StructField("key", IntegerType()),
        StructField("more", IntegerType()),
        StructField("value", IntegerType()),
    ]
)


def job_of(connect: str, name: str, **options: str) -> WriteJob:
    """Begin a write under a lock, with rows that were computed from an empty log."""
    wanted = {
        "connect": connect,
        "dataFormat": "json",
        "onLockFailure": "retry",
        "recompute": "recompute_functions:add_to_newest",
        "maxRetries": "50",
        "retryBackoff": "0",
        "clientHighWaterMarks": "{}",
        **options,
    }
    job = create_write_job(parse_write(wanted), SCHEMA, name)
    asyncio.run(begin_write(connect, name, job.marks, keep_ms=1 << 34))
    return job


def batch_of(key: int, rows: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "row": pa.array([f"{key}-{row}" for row in rows]),
            "key": pa.array([key] * len(rows), pa.int32()),
            "more": pa.array([1] * len(rows), pa.int32()),
            "value": pa.array([1] * len(rows), pa.int32()),
            "write_locks": pa.array([[key]] * len(rows), pa.list_(pa.int32())),
        }
    )


def test_a_repeated_attempt_finds_recomputed_rows_by_their_identity(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    """A repeated attempt finds the rows by their identity, even if they were recomputed."""
    job = job_of(connect, "again-1", identityColumns="row")
    first = job.write_task(iter([batch_of(9101, [0, 1, 2])]), 0, 0)  # its result is lost
    assert (first.committed, first.recomputed) == (3, 2)
    written = job.write_task(iter([batch_of(9101, [0, 1, 2, 3, 4])]), 0, 1)
    assert (written.committed, written.found) == (5, 3)
    assert values_of(9101) == [(1, value) for value in range(1, 6)]


def test_without_identity_columns_a_repeated_attempt_fails_and_duplicates_no_row(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    job = job_of(connect, "again-2")
    job.write_task(iter([batch_of(9102, [0, 1, 2])]), 0, 0)
    with pytest.raises(BadRequest, match=r"option identityColumns \(with dataFormat\)"):
        job.write_task(iter([batch_of(9102, [0, 1, 2, 3, 4])]), 0, 1)
    assert values_of(9102) == [(1, value) for value in range(1, 4)]


def test_rows_with_equal_identities_fail_the_write(
    spark: SparkSession, connect: str, values_of: ValuesOf
) -> None:
    job = job_of(connect, "again-3", identityColumns="key")
    job.write_task(iter([batch_of(9103, [0])]), 0, 0)
    with pytest.raises(
        BadRequest, match="several rows of this task have the same key, but different"
    ):
        job.write_task(iter([batch_of(9103, [0, 1])]), 0, 1)
    assert len(values_of(9103)) == 1
