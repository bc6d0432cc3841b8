"""Bad input from Spark: one error on the driver before any task starts."""

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

import waltz_spark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_spark.datasource.source import WaltzDataSource

pytestmark = pytest.mark.spark

DATA = "data string"


def rows(spark: SparkSession, schema: str = DATA, *values: tuple[object, ...]) -> DataFrame:
    return spark.createDataFrame(list(values) or [("x",)], schema)


LOG = StructType().add("data", BinaryType())


def planned(connect: str, schema: StructType = LOG, **options: str) -> None:
    """Plan a read like the process that Spark starts for this."""
    WaltzDataSource({"path": connect, **options}).reader(schema).partitions()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"partitions": "99"}, "expected partitions in 0..3, found 99"),
        ({"partitions": "0", "startingHighWaterMarks": '{"0": 999999999}'}, "its log ends at"),
        ({"partitions": "0", "endingHighWaterMarks": '{"0": 999999999}'}, "its log ends at"),
        (
            {"startingHighWaterMarks": '{"0": -1, "1": -1}'},
            "has no high-water mark for partition 2, 3:",
        ),
        (
            {"partitions": "a"},
            "'partitions': expected a list of integers such as '0,3,5', found 'a'",
        ),
        ({"failOnDataLoss": "yes"}, "'failOnDataLoss': expected one of true, false, found 'yes'"),
        (
            {"transactionIds": "5-3"},
            "'transactionIds': expected ranges such as '1000-1999,5000', found '5-3'",
        ),
        ({"minPartitions": "0"}, "integer from 1 to 100000, found '0'"),
        (
            {"maxTransactionsPerTrigger": "5"},
            "is for reading a stream, but it was used for reading a batch",
        ),
    ],
)
def test_wrong_read_options_are_reported(
    connect: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(errors.WaltzError, match=sentence):
        planned(connect, **options)


def test_a_missing_cluster_is_reported(connect: str) -> None:
    for connect_string, sentence in (
        ("nowhere", "expected host:port"),
        (connect.partition("/")[0] + "/waltz/absent", "waltz-core cluster create"),
    ):
        with pytest.raises(errors.WaltzError, match=sentence):
            planned(connect_string)


WRONG_WRITES = (
    ("data string, write_lock int", ("x", 1), {}, "did you mean 'write_locks'?"),
    ("data string", ("x",), {"partitionBy": "nothing"}, "no column 'nothing'"),
    (
        "data string",
        ("x",),
        {"clientHighWaterMarks": '{"9": 1}'},
        "expected partitions in 0..3, found 9",
    ),
    ("data string", ("x" * (4 << 20) + "y",), {}, "4,194,305 bytes is over the limit"),
    (
        "data string, partition int, client_high_water_mark long",
        ("x", 0, 1 << 40),
        {},
        "client_high_water_mark of a row is 1099511627776:",
    ),
)


def test_invalid_writes_leave_nothing_in_the_log(spark: SparkSession, connect: str) -> None:
    before = waltz_spark.snapshot(spark, connect).high_water_marks
    for schema, values, options, sentence in WRONG_WRITES:
        table = rows(spark, schema, values)
        with pytest.raises(Exception, match=sentence):
            table.write.format("waltz").mode("append").options(**options).save(connect)
    assert waltz_spark.snapshot(spark, connect).high_water_marks == before


def test_an_error_is_shown_without_a_stack_and_with_its_class(
    spark: SparkSession, connect: str
) -> None:
    outside = rows(spark, "data string, partition int", ("x", 9))
    with pytest.raises(Exception, match="found 9") as on_executor:
        outside.write.format("waltz").mode("append").save(connect)
    with pytest.raises(Exception, match="no column 'data'") as on_driver:
        rows(spark, "misspelt string").write.format("waltz").mode("append").save(connect)
    for caught, expected in (
        (on_executor, "column 'partition': expected a partition in 0..3, found 9"),
        (on_driver, "no column"),
    ):
        assert "Traceback" not in str(caught.value)
        error = waltz_spark.error_of(caught.value)
        assert type(error) is errors.BadRequest
        assert expected in str(error)
    with pytest.raises(errors.BadRequest, match="found 9"):
        waltz_spark.append(outside, connect)


@pytest.mark.parametrize(
    ("name", "kind", "options", "sentence"),
    [
        ("id", LongType(), {}, "columns that the log does not have"),
        ("transaction_id", StringType(), {}, "'transaction_id' of the log: expected type bigint"),
        ("v", DayTimeIntervalType(), {"dataFormat": "msgpack"}, "column 'v' has type interval day"),
        (
            "_corrupt_record",
            IntegerType(),
            {"dataFormat": "json"},
            "column '_corrupt_record', for payloads that cannot be unpacked:",
        ),
        ("data", BinaryType(), {"dataFormat": "msgpack"}, "needs a schema with the payload's col"),
    ],
)
def test_wrong_schemas_are_reported(
    connect: str, name: str, kind: DataType, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(errors.BadRequest, match=sentence):
        planned(connect, StructType().add(name, kind), **options)


def test_a_duplicate_column_is_reported(spark: SparkSession, connect: str) -> None:
    duplicated = rows(spark).select("data", "data")
    with pytest.raises(AnalysisException, match=r"two columns have the name 'data'."):
        duplicated.write.format("waltz").mode("append").save(connect)


@pytest.mark.parametrize("results_path", ["nowhere://there/is", "/proc/nothing/of/ours"])
def test_a_results_path_that_cannot_be_used_is_reported(
    spark: SparkSession, connect: str, results_path: str
) -> None:
    with pytest.raises(
        AnalysisException, match=r"option 'resultsPath': .* cannot be used"
    ) as failed:
        rows(spark).write.format("waltz").mode("append").option("resultsPath", results_path).save(
            connect
        )
    assert isinstance(waltz_spark.error_of(failed.value), errors.BadConfig)


def test_save_modes_error_and_overwrite_are_rejected_before_anything_runs(
    spark: SparkSession, connect: str
) -> None:
    for mode, sentence in (
        ("error", 'Please use either the "Append"'),
        ("overwrite", "mode 'overwrite' is not supported"),
    ):
        with pytest.raises(AnalysisException, match=sentence):
            rows(spark).write.format("waltz").mode(mode).save(connect)


def test_a_read_from_a_list_of_clusters_is_rejected(spark: SparkSession, connect: str) -> None:
    with pytest.raises(AnalysisException, match="a read uses one cluster"):
        spark.read.format("waltz").load([connect, connect]).count()


def test_output_mode_complete_is_rejected_with_the_reason(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    counts = spark.readStream.format("rate").load().groupBy().count()
    query = (
        counts.selectExpr("CAST(count AS string) AS data")
        .writeStream.format("waltz")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path))
        .start(connect)
    )
    with pytest.raises(
        StreamingQueryException, match="outputMode 'complete' is not supported"
    ) as failed:
        query.awaitTermination(TEST_TIMEOUT_S)
    assert isinstance(waltz_spark.error_of(failed.value), errors.BadRequest)
