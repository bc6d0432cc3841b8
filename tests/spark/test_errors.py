"""Bad input from Spark: one sentence on the driver, before any task, and nothing lost."""

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import waltz_spark
from waltz_core import errors

pytestmark = pytest.mark.spark

DATA = "data string"


def rows(spark: SparkSession, schema: str = DATA, *values: tuple[object, ...]) -> DataFrame:
    return spark.createDataFrame(list(values) or [("x",)], schema)


START = '{"0": -1, "1": -1, "2": -1, "3": -1}'


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"onLockFailur": "reject"}, "did you mean 'onLockFailure'"),
        ({"startingHighWaterMarks": "oldest"}, "startingHighWaterMarks"),
        ({"partitions": "99"}, "expected partitions of 0 to 3, found 99"),
        ({"partitions": "0", "startingHighWaterMarks": '{"0": 999999999}'}, "its log ends at"),
        ({"startingHighWaterMarks": '{"0": -1, "1": -1}'}, "has no mark for partition 2, 3"),
        ({"columns": "date"}, "did you mean 'data'"),
        ({"onLockFailure": "fail"}, "is for writing, this is reading"),
        ({"partitions": "a"}, "'partitions': expected integers, '0,3,5', found 'a'"),
        ({"failOnDataLoss": "yes"}, "'failOnDataLoss': expected one of true, false, found 'yes'"),
        ({"partitions": "0", "endingHighWaterMarks": '{"0": 999999999}'}, "its log ends at"),
        ({"transactionIds": "5-3"}, "'transactionIds': expected '1000-1999,5000', found '5-3'"),
        ({"minPartitions": "0"}, "integer from 1 to 100000, found '0'"),
    ],
)
def test_wrong_read_options(
    spark: SparkSession, connect: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        spark.read.format("waltz").options(**options).load(connect).count()


def test_a_read_that_ends_before_it_starts(spark: SparkSession, connect: str) -> None:
    rows(spark).write.format("waltz").mode("append").save(connect)
    marks = {"startingHighWaterMarks": "latest", "endingHighWaterMarks": START}
    with pytest.raises(Exception, match=r"the read starts after transaction .* and ends at -1"):
        spark.read.format("waltz").options(**marks).load(connect).count()


def test_a_wrong_connect_string(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="expected host:port"):
        spark.read.format("waltz").load("nowhere").count()


def test_no_cluster_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    with pytest.raises(Exception, match="no cluster is specified"):
        spark.read.format("waltz").load().count()


def test_no_zookeeper(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"no ZooKeeper answered at 127\.0\.0\.1:1"):
        spark.read.format("waltz").load("127.0.0.1:1/waltz/none").count()


def test_an_absent_root(spark: SparkSession, connect: str) -> None:
    other = connect.partition("/")[0] + "/waltz/absent"
    with pytest.raises(Exception, match="waltz-core cluster create"):
        spark.read.format("waltz").load(other).count()


@pytest.mark.parametrize(
    ("schema", "values", "options", "sentence"),
    [
        ("payload string", ("x",), {}, "no column 'data'"),
        ("data string, write_lock int", ("x", 1), {}, "did you mean 'write_locks'"),
        ("data int", (1,), {}, "'data': expected binary or string, found int"),
        ("data string, header string", ("x", "y"), {}, "'header': expected int"),
        ("data string, write_locks array<string>", ("x", ["y"]), {}, "array<int>"),
        ("data string, partition int", ("x", 9), {}, "'partition': expected 0 to 3, found 9"),
        ("data string", ("x",), {"partitionBy": "nothing"}, "no column 'nothing'"),
        (
            "data string",
            ("x",),
            {"clientHighWaterMarks": '{"9": 1}'},
            "expected partitions of 0 to 3, found 9",
        ),
        ("data string", ("x" * (4 << 20) + "y",), {}, "4,194,305 bytes is over the limit"),
        (
            "data string, partition int, client_high_water_mark long",
            ("x", 0, 1 << 40),
            {},
            "and a row's client_high_water_mark is 1099511627776",
        ),
    ],
)
def test_wrong_writes(
    spark: SparkSession,
    connect: str,
    schema: str,
    values: tuple[object, ...],
    options: dict[str, str],
    sentence: str,
) -> None:
    before = spark.read.format("waltz").load(connect).count()
    with pytest.raises(Exception, match=sentence):
        rows(spark, schema, values).write.format("waltz").mode("append").options(**options).save(
            connect
        )
    assert spark.read.format("waltz").load(connect).count() == before


def test_an_error_is_shown_without_a_stack_and_with_its_class(
    spark: SparkSession, connect: str
) -> None:
    outside = rows(spark, "data string, partition int", ("x", 9))
    with pytest.raises(Exception, match="found 9") as on_executor:
        outside.write.format("waltz").mode("append").save(connect)
    with pytest.raises(Exception, match="no column 'data'") as on_driver:
        rows(spark, "misspelt string").write.format("waltz").mode("append").save(connect)
    for caught, expected in (
        (on_executor, "column 'partition': expected 0 to 3, found 9"),
        (on_driver, "no column"),
    ):
        assert "Traceback" not in str(caught.value)
        found = waltz_spark.error_of(caught.value)
        assert type(found) is errors.BadRequest
        assert expected in str(found)
    with pytest.raises(errors.BadRequest, match="found 9"):
        waltz_spark.append(outside, connect)


@pytest.mark.parametrize(
    ("schema", "options", "sentence"),
    [
        ("id long", {}, "columns that the log does not have"),
        ("transaction_id string", {}, "'transaction_id' of the log: expected type bigint, found"),
        ("v interval day to second", {"dataFormat": "msgpack"}, "column 'v' is interval day"),
        ("_corrupt_record int", {"dataFormat": "json"}, "expected string or binary"),
        ("data binary", {"dataFormat": "msgpack"}, "needs a schema with the payload's columns"),
    ],
)
def test_wrong_schemas(
    spark: SparkSession, connect: str, schema: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(AnalysisException, match=sentence) as failed:
        spark.read.format("waltz").schema(schema).options(**options).load(connect).count()
    assert isinstance(waltz_spark.error_of(failed.value), errors.BadRequest)


def test_a_column_that_is_there_twice(spark: SparkSession, connect: str) -> None:
    twice = rows(spark).select("data", "data")
    with pytest.raises(AnalysisException, match="two columns have the name 'data'"):
        twice.write.format("waltz").mode("append").save(connect)


@pytest.mark.parametrize("place", ["nowhere://there/is", "/proc/nothing/of/ours"])
def test_results_that_have_no_place(spark: SparkSession, connect: str, place: str) -> None:
    with pytest.raises(AnalysisException, match="option 'resultsPath': cannot use") as failed:
        rows(spark).write.format("waltz").mode("append").option("resultsPath", place).save(connect)
    assert isinstance(waltz_spark.error_of(failed.value), errors.BadConfig)


def test_a_null_is_no_payload(spark: SparkSession, connect: str) -> None:
    with pytest.raises(Exception, match="column 'data' is null in row 0 of its task"):
        rows(spark, "data string, partition int", (None, 0)).write.format("waltz").mode(
            "append"
        ).save(connect)


def test_nothing_to_write_is_no_error(spark: SparkSession, connect: str) -> None:
    before = spark.read.format("waltz").load(connect).count()
    rows(spark).limit(0).write.format("waltz").mode("append").save(connect)
    result = waltz_spark.append(spark.createDataFrame([], DATA), connect)
    assert result.counts["committed"] == result.committed.count() == 0
    assert spark.read.format("waltz").load(connect).count() == before


@pytest.mark.parametrize("mode", ["error", "ignore"])
def test_other_modes_are_rejected_before_anything_runs(
    spark: SparkSession, connect: str, mode: str
) -> None:
    with pytest.raises(AnalysisException, match='Please use either the "Append"'):
        rows(spark).write.format("waltz").mode(mode).save(connect)


def test_a_list_of_clusters(spark: SparkSession, connect: str) -> None:
    with pytest.raises(AnalysisException, match="a read is of one cluster"):
        spark.read.format("waltz").load([connect, connect]).count()


def test_complete_states_the_reason_a_log_cannot(
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
        query.awaitTermination(120)
    assert isinstance(waltz_spark.error_of(failed.value), errors.BadRequest)


def test_overwrite_states_the_reason_a_log_cannot(spark: SparkSession, connect: str) -> None:
    with pytest.raises(Exception, match="mode 'overwrite' is not supported"):
        rows(spark).write.format("waltz").mode("overwrite").save(connect)


def test_a_payload_that_does_not_fit_the_schema_is_named(spark: SparkSession, connect: str) -> None:
    rows(spark, "data string, partition int", ("no msgpack", 0)).write.format("waltz").mode(
        "append"
    ).save(connect)
    reader = spark.read.format("waltz").option("dataFormat", "msgpack").schema("id long")
    with pytest.raises(Exception, match=r"partition \d, transaction \d+"):
        reader.load(connect).collect()
