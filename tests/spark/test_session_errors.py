"""A session of `waltz_spark.session` raises Waltz's own errors, without Spark's wrapping."""

import copy
import json
import traceback
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.spark.versions import first_shown_text
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_spark import session_errors
from waltz_spark.functions import lock

pytestmark = pytest.mark.spark

UNREACHABLE = "127.0.0.1:1/waltz/none"


def read(spark: SparkSession, connect: str, **options: str) -> DataFrame:
    return spark.read.format("waltz").options(**options).load(connect)


def locked(spark: SparkSession, key: int) -> DataFrame:
    write_locks = F.array(lock("unwrapped", F.lit(key))).alias("write_locks")
    return spark.range(1).select(F.lit("x").alias("data"), write_locks)


def write(table: DataFrame, connect: str, **options: str) -> None:
    table.write.format("waltz").mode("append").options(**options).save(connect)


def is_one_sentence(error: BaseException) -> bool:
    """Whether the last output is the class and the message, without a line of Java."""
    shown = traceback.format_exception_only(error)
    last = f"waltz_core.errors.{type(error).__name__}: {error}\n"
    return shown == [last] and "\n" not in str(error) and "\tat org.apache" not in str(error)


def test_a_wrong_option_is_raised_as_a_waltz_error(spark: SparkSession, connect: str) -> None:
    with pytest.raises(errors.BadConfig) as caught:
        read(spark, connect, startingHighWaterMark="x")
    assert str(caught.value) == (
        "format 'waltz' has no option 'startinghighwatermark'. Hint: did you mean "
        "'startingHighWaterMarks'?"
    )
    assert is_one_sentence(caught.value)


def test_a_waltz_error_is_also_an_instance_of_the_error_class_of_spark(
    spark: SparkSession, connect: str
) -> None:
    """Code that catches Spark's classes continues to work."""
    with pytest.raises(AnalysisException) as caught:
        read(spark, connect, partitions="99").count()
    assert isinstance(caught.value, errors.BadConfig)
    assert caught.value.getCondition() == "PYTHON_DATA_SOURCE_ERROR"
    assert type(caught.value.__cause__) is not type(caught.value)
    assert isinstance(caught.value.__cause__, AnalysisException)
    assert "Java" not in "".join(traceback.format_exception(caught.value))
    assert type(waltz_spark.error_of(caught.value)) is errors.BadConfig
    again = copy.copy(caught.value)  # `copy` uses the interface of pickle
    assert (type(again), str(again)) == (errors.BadConfig, str(caught.value))


def test_a_rejected_row_is_raised_as_a_waltz_error(spark: SparkSession, connect: str) -> None:
    marks = dict(waltz_spark.snapshot(spark, connect).high_water_marks)
    waltz_spark.append(locked(spark, 1), connect, high_water_marks=marks)
    marks_json = json.dumps({str(partition): mark for partition, mark in marks.items()})
    sentence = r"^partition \d: a row was rejected, because transaction \d+ has written one of"
    with pytest.raises(errors.LockFailed, match=sentence) as caught:
        write(locked(spark, 1), connect, onLockFailure="fail", clientHighWaterMarks=marks_json)
    assert is_one_sentence(caught.value)


def test_a_missing_zookeeper_is_raised_as_a_waltz_error(spark: SparkSession) -> None:
    with pytest.raises(errors.Unavailable, match=r"^no ZooKeeper answered") as caught:
        write(locked(spark, 2), UNREACHABLE)
    assert is_one_sentence(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:toPandas attempted Arrow optimization")  # Spark's own words
def test_every_action_raises_the_same_error(spark: SparkSession, connect: str) -> None:
    """Without conversion, some actions raise an error of py4j with the whole Java stack."""
    write(spark.createDataFrame([("no msgpack", 0)], "data string, partition int"), connect)
    reader = spark.read.format("waltz").option("dataFormat", "msgpack").schema("id long")
    actions = (
        lambda table: table.collect(),
        lambda table: table.toPandas(),
        lambda table: list(table.toLocalIterator()),
        lambda table: table.rdd.count(),
    )
    for action in actions:
        with pytest.raises(errors.BadFormat, match=r"^partition \d, transaction \d+") as caught:
            action(reader.load(connect))
        assert is_one_sentence(caught.value)
        assert "\tat " not in str(caught.value.__cause__)


def test_an_error_of_a_stream_is_raised_as_a_waltz_error(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    spark.range(1).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
    writer = stream.writeStream.format("waltz").option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start(connect)
    with pytest.raises(errors.BadRequest, match=r"^the input has no column 'data'") as caught:
        query.awaitTermination(TEST_TIMEOUT_S)
    assert isinstance(caught.value, StreamingQueryException)
    assert is_one_sentence(caught.value)
    query_error = query.exception()
    assert str(caught.value) in first_shown_text(query_error)
    assert type(waltz_spark.error_of(query_error)) is errors.BadRequest


def test_an_error_of_a_user_function_is_raised_unchanged(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    spark.range(1).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
    errors_raised: list[BaseException] = []

    def settle(table: DataFrame, _number: int) -> None:
        try:
            write(table, connect)
        except errors.BadRequest as error:
            errors_raised.append(error)
            raise RuntimeError("the ledger is closed") from error

    query = stream.writeStream.foreachBatch(settle).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException, match="the ledger is closed") as caught:
        query.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination(
            TEST_TIMEOUT_S
        )
    assert len(errors_raised) == 1
    assert not isinstance(caught.value, errors.WaltzError)


def test_errors_of_spark_are_raised_unchanged(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND") as analysis:
        spark.sql("SELECT * FROM no_such_relation").collect()
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO") as arithmetic:
        spark.sql("SELECT 1 / id FROM range(1)").collect()
    with pytest.raises(Py4JJavaError) as java:
        spark.sparkContext._jvm.java.util.ArrayList().get(1)
    for caught in (analysis, arithmetic, java):
        assert not isinstance(caught.value, errors.WaltzError)
        assert caught.value.__cause__ is None


@pytest.mark.filterwarnings("ignore:Cannot infer the eval type")  # Spark's own words
def test_a_waltz_error_quoted_by_a_user_is_not_converted(spark: SparkSession) -> None:
    quoted = "waltz_core.errors.LockFailed: no"

    def failing(sentence: str) -> DataFrame:
        def fail(_: int) -> int:
            raise RuntimeError(sentence) from None

        return spark.range(1).select(F.udf(fail, "int")("id"))

    tables = [
        spark.sql(f"SELECT CAST('{quoted}' AS int)"),
        spark.sql(f"SELECT raise_error('x {quoted}')"),
        failing(f"my job: {quoted}"),
        failing(f"two lines\n{quoted}"),
    ]
    for table in tables:
        with pytest.raises(PySparkException, match="LockFailed: no") as caught:
            table.collect()
        assert not isinstance(caught.value, errors.WaltzError)
        assert waltz_spark.error_of(caught.value) is None


def test_a_plain_spark_session_raises_the_error_of_spark(
    spark: SparkSession, connect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_errors, "_patched_contexts", set())
    with pytest.raises(AnalysisException) as caught:
        read(spark, connect, startingHighWaterMarks="x")
    assert not isinstance(caught.value, errors.WaltzError)
    assert type(waltz_spark.error_of(caught.value)) is errors.BadConfig
    session_errors.raise_waltz_errors(spark)
    session_errors.raise_waltz_errors(spark)
    with pytest.raises(errors.BadConfig) as caught:
        read(spark, connect, startingHighWaterMarks="x")
    # After several calls, an error is converted only once: its cause is Spark's error.
    assert not isinstance(caught.value.__cause__, errors.WaltzError)


def test_errors_are_still_raised_if_internals_of_pyspark_change(
    spark: SparkSession, connect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object) -> None:
        raise AttributeError("no such method any more")

    monkeypatch.setattr(session_errors, "convert_exception", changed)
    with pytest.raises(errors.BadConfig) as caught:
        read(spark, connect, startingHighWaterMarks="x")
    assert isinstance(caught.value.__cause__, Py4JJavaError)
    monkeypatch.setattr(session_errors, "trailing_error", changed)
    with pytest.raises(AnalysisException, match="startingHighWaterMarks"):
        read(spark, connect, startingHighWaterMarks="x")
    monkeypatch.setattr(session_errors, "_patch_py4j", changed)
    session_errors.raise_waltz_errors(spark)  # does nothing, and logs this
