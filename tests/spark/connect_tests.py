"""Tests of Spark Connect. `test_connect.py` starts them in a separate pytest run.

This process is a client of a Spark Connect server and has no Java. Reads and writes reach the log
through the Python workers of the server.
"""

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import waltz_spark
from tests import table_libraries
from tests.fault.load import wait_until
from tests.spark.connect_server import run_connect_server
from tests.spark.versions import first_shown_text, needs_pyspark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import WaltzClient
from waltz_spark import LagListener, lag_of
from waltz_spark.functions import lock
from waltz_spark.spark_version import HAS_ADMISSION_CONTROL
from waltz_spark.tables.table_session import table_session

pytestmark = pytest.mark.spark

ACCOUNTS = "id long, owner string, balance decimal(12,2), opened date, seen timestamp"


@pytest.fixture(scope="session")
def connect() -> str:
    return os.environ["WALTZ_TESTS_CONNECT"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with run_connect_server(tmp_path_factory.mktemp("server") / "server.log") as address:
        session = waltz_spark.session(remote=address)
        yield session
        session.stop()


@pytest.fixture
def marks(spark: SparkSession, connect: str) -> dict[int, int]:
    """The log's marks before the test."""
    return dict(waltz_spark.snapshot(spark, connect).high_water_marks)


def marks_as_json(marks: dict[int, int]) -> str:
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


def read_after_marks(
    spark: SparkSession, connect: str, marks: dict[int, int], **options: object
) -> DataFrame:
    reader = spark.read.format("waltz").option("startingHighWaterMarks", marks_as_json(marks))
    return reader.options(**options).load(connect)


def seat_reservations(spark: SparkSession, writer_name: str, first: int, last: int) -> DataFrame:
    locks = F.array(lock("seat over connect", "id")).alias("write_locks")
    return spark.range(first, last + 1).select("id", F.lit(writer_name).alias("who"), locks)


def is_one_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and type(error).__module__ == "waltz_core.errors"


def test_every_row_of_a_table_is_read_back(
    spark: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    assert type(spark).__module__.startswith("pyspark.sql.connect.")
    table = spark.range(500).selectExpr(
        "id",
        "concat('owner ', id) AS owner",
        "CAST(id * 1.25 AS decimal(12,2)) AS balance",
        "date_add(DATE'2013-01-01', CAST(id % 365 AS int)) AS opened",
        "timestamp_micros(id * 1234567) AS seen",
    )
    locked = table.withColumn("append_locks", F.array(lock("account", "id")))
    locked.write.format("waltz").mode("append").option("dataFormat", "msgpack").save(connect)
    back = spark.read.format("waltz").option("dataFormat", "msgpack").schema(ACCOUNTS)
    back = back.option("startingHighWaterMarks", marks_as_json(marks)).load(connect)
    assert_df_equality(back, table, ignore_row_order=True, ignore_nullable=True)


def test_a_payload_that_cannot_be_unpacked_is_an_error_or_null(
    spark: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    with WaltzClient(connect) as client:
        for payload in (b'{"n":1}', b"no json", b'{"n":3}'):
            client.append(payload, partition=0).result(TEST_TIMEOUT_S)
    reader = spark.read.format("waltz").options(
        dataFormat="json", startingHighWaterMarks=marks_as_json(marks)
    )
    with pytest.raises(
        errors.BadFormat, match=r"^partition 0, transaction \d+: expected a (payload|map)"
    ):
        reader.schema("n long").load(connect).collect()
    all_of_them = reader.option("mode", "PERMISSIVE").schema("n long, _corrupt_record string")
    assert [tuple(row) for row in all_of_them.load(connect).collect()] == [
        (1, None),
        (None, "no json"),
        (3, None),
    ]


def test_the_second_of_two_writers_with_the_same_snapshot_is_rejected(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    snapshot = waltz_spark.snapshot(spark, connect)
    count = snapshot.read().count()
    assert count == sum(mark + 1 for mark in snapshot.high_water_marks.values())

    def write(
        writer_name: str, first: int, last: int, **options: object
    ) -> waltz_spark.WriteResult:
        return waltz_spark.append(
            seat_reservations(spark, writer_name, first, last),
            connect,
            high_water_marks=snapshot.high_water_marks,
            resultsPath=tmp_path / writer_name,
            dataFormat="msgpack",
            **options,
        )

    anna = write("anna", 0, 39)
    assert (anna.counts["committed"], anna.rejected.count()) == (40, 0)
    boris = write("boris", 25, 64)
    assert (boris.counts["committed"], boris.counts["rejected"]) == (25, 15)
    won = {row.id: row.transaction_id for row in anna.committed.collect()}
    lost = {row.id: row.lock_failure_transaction_id for row in boris.rejected.collect()}
    assert lost == {number: won[number] for number in range(25, 40)}
    clara = write("clara", 64, 65, onLockFailure="retry")
    assert (clara.counts["retry"], clara.counts["rejected"]) == (1, 0)
    (again,) = clara.retry.collect()
    assert again.status == "RETRY"
    assert again.retry_high_water_mark >= again.lock_failure_transaction_id
    assert snapshot.read().count() == count
    with pytest.raises(errors.LockFailed, match=r"^partition \d: a row was rejected") as caught:
        write("dora", 0, 0, onLockFailure="fail")
    assert is_one_sentence(caught.value)


def test_an_append_over_connect_needs_option_results_path(
    spark: SparkSession, connect: str
) -> None:
    with pytest.raises(errors.BadConfig, match="use option resultsPath"):
        waltz_spark.append(
            seat_reservations(spark, "anna", 100, 100), connect, dataFormat="msgpack"
        )


def test_errors_are_one_sentence(spark: SparkSession, connect: str, marks: dict[int, int]) -> None:
    with pytest.raises(errors.BadConfig) as caught:
        read_after_marks(spark, connect, marks, startingHighWaterMark="x").collect()
    assert str(caught.value) == (
        "format 'waltz' has no option 'startinghighwatermark'. Hint: did you mean "
        "'startingHighWaterMarks'?"
    )
    assert is_one_sentence(caught.value)
    assert isinstance(caught.value, AnalysisException)
    locked = seat_reservations(spark, "anna", 200, 200)
    writer = locked.write.format("waltz").mode("append").options(dataFormat="msgpack")
    writer = writer.option("clientHighWaterMarks", marks_as_json(marks))
    writer.save(connect)
    with pytest.raises(errors.LockFailed, match=r"^partition \d: a row was rejected") as rejected:
        writer.save(connect)
    assert is_one_sentence(rejected.value)
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND") as other:
        spark.sql("SELECT * FROM no_such_relation").collect()
    assert not isinstance(other.value, errors.WaltzError)


@needs_pyspark(4, 3, "a session of Connect makes no other one")
def test_a_plain_spark_session_reports_the_same_error(spark: SparkSession, connect: str) -> None:
    plain_session = spark.newSession()
    with pytest.raises(AnalysisException) as caught:
        plain_session.read.format("waltz").option("partition", "3").load(connect).collect()
    assert not isinstance(caught.value, errors.WaltzError)
    error = waltz_spark.error_of(caught.value)
    assert type(error) is errors.BadConfig
    assert str(error) in str(caught.value).splitlines()[0]
    assert "did you mean 'partitions'?" in str(error)


def test_a_write_with_a_write_id_is_written_once(
    spark: SparkSession, connect: str, marks: dict[int, int], tmp_path: Path
) -> None:
    table = spark.range(0, 400, numPartitions=4).selectExpr(
        "CAST(id AS string) AS data", "CAST(id % 4 AS int) AS partition"
    )
    name = f"once-{sum(marks.values())}"
    for number in range(2):
        result = waltz_spark.append(
            table, connect, writeId=name, resultsPath=tmp_path / str(number)
        )
        assert (result.counts["committed"], result.already_committed) == (400, number == 1)
        assert result.results.count() == 400
    fewer = table.where("partition != 3")
    sentence = (
        rf"^the write ID was used with different rows: write '{name}' .* 400 rows, .* 300 rows"
    )
    with pytest.raises(errors.BadRequest, match=sentence) as caught:
        fewer.write.format("waltz").mode("append").option("writeId", name).save(connect)
    assert is_one_sentence(caught.value)
    with pytest.raises(errors.BadRequest, match=sentence):
        waltz_spark.append(fewer, connect, writeId=name, resultsPath=tmp_path / "fewer")
    counts = Counter(
        int(bytes(row.data)) for row in read_after_marks(spark, connect, marks).collect()
    )
    assert counts == Counter(dict.fromkeys(range(400), 1))


def test_views_and_inserts_of_sql_work_over_connect(
    spark: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    base = f"connect '{connect}', columns 'partition,data'"
    for name, options in (
        ("log_in", base),
        ("log", f"{base}, startingHighWaterMarks '{marks_as_json(marks)}'"),
    ):
        spark.sql(f"CREATE TEMPORARY VIEW {name} USING waltz OPTIONS ({options})")
    spark.sql("INSERT INTO log_in SELECT 3, CAST('over connect' AS binary)")
    (row,) = spark.sql("SELECT data FROM log").collect()
    assert bytes(row.data) == b"over connect"
    with pytest.raises(errors.BadConfig, match=r"did you mean 'partitions'\?"):
        spark.sql(f"CREATE TEMPORARY VIEW bad USING waltz OPTIONS ({base}, partition '3')")


def await_query(query: StreamingQuery) -> StreamingQuery:
    assert query.awaitTermination(TEST_TIMEOUT_S)
    return query


def test_a_stream_reads_the_log_and_another_stream_writes_each_row_once(
    spark: SparkSession, connect: str, marks: dict[int, int], tmp_path: Path
) -> None:
    """A stream copies the log to files, also after a restart; another copies files to the log."""
    output: list[str] = []
    listener = LagListener(lambda query, _lags: output.append(query))
    spark.streams.addListener(listener)
    starting = {"startingHighWaterMarks": marks_as_json(marks), "maxTransactionsPerTrigger": "40"}
    for times in (1, 2):
        rows = spark.range(0, 60, numPartitions=2).selectExpr(f"concat('{times}-', id) AS data")
        rows.write.format("waltz").mode("append").save(connect)
        table = spark.readStream.format("waltz").options(**starting).load(connect)
        writer = table.selectExpr("CAST(data AS string)").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "in"))
        query = await_query(writer.trigger(availableNow=True).start(str(tmp_path / "files")))
        assert sum(lag_of(query.lastProgress)[0].values()) == 0
        assert len(query.recentProgress) >= (2 if HAS_ADMISSION_CONTROL else 1)
        files = spark.read.parquet(str(tmp_path / "files"))
        assert files.count() == files.distinct().count() == 60 * times
    wait_until("the listener is called", lambda: output)
    spark.streams.removeListener(listener)

    middle = dict(waltz_spark.snapshot(spark, connect).high_water_marks)
    results = tmp_path / "results"
    for times in (1, 2):
        files = spark.readStream.schema("data string").parquet(str(tmp_path / "files"))
        writer = files.writeStream.format("waltz").option("resultsPath", str(results))
        writer = writer.option("checkpointLocation", str(tmp_path / "out"))
        await_query(writer.trigger(availableNow=True).start(connect))
        assert read_after_marks(spark, connect, middle).count() == 120
        if times == 1:  # like a driver that died before Spark recorded the micro-batch
            for name in ("0", ".0.crc"):
                (tmp_path / "out" / "commits" / name).unlink(missing_ok=True)
    assert (results / "batch=0" / "_SUCCESS").exists()


def start_with_function(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query with a Python function; start it again if Spark's worker is late.

    Spark waits ten seconds for a Python process on the server's machine, which is too short on a
    busy machine. No setting changes this time.
    """
    try:
        return writer.start()
    except PySparkException as error:
        if "Python worker failed to connect back" not in str(error):
            raise
    return writer.start()


def test_foreach_batch_writes_each_batch_once(
    spark: SparkSession, connect: str, marks: dict[int, int], tmp_path: Path
) -> None:
    """The function runs on the server's machine; its first run fails after its write."""
    rows = spark.range(0, 80, numPartitions=2).selectExpr("CAST(id AS string) AS data")
    rows.write.parquet(str(tmp_path / "in"))
    failed, name = str(tmp_path / "failed"), f"foreach-{sum(marks.values())}"

    def settle(table: DataFrame, number: int) -> None:
        options = {"writeId": name, "batchId": str(number)}
        table.write.format("waltz").mode("append").options(**options).save(connect)
        if not os.path.exists(failed):
            with open(failed, "w"):
                pass
            raise RuntimeError("after the write")

    def run() -> StreamingQuery:
        stream = spark.readStream.schema("data string").parquet(str(tmp_path / "in"))
        writer = stream.writeStream.foreachBatch(settle)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return start_with_function(writer.trigger(availableNow=True))

    with pytest.raises(PySparkException, match="after the write"):
        run().awaitTermination(TEST_TIMEOUT_S)
    await_query(run())
    counts = Counter(
        int(bytes(row.data)) for row in read_after_marks(spark, connect, marks).collect()
    )
    assert counts == Counter(dict.fromkeys(range(80), 1))


def test_a_stream_with_wrong_columns_is_rejected(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    spark.range(1).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
    writer = stream.writeStream.format("waltz").option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start(connect)
    with pytest.raises(errors.BadRequest, match=r"^the input has no column 'data'") as caught:
        query.awaitTermination(TEST_TIMEOUT_S)
    assert is_one_sentence(caught.value)
    output = query.exception()
    assert type(waltz_spark.error_of(output)) is errors.BadRequest
    assert "input has no column 'data'" in first_shown_text(output)


def test_deleting_a_table_session_does_not_end_threads_of_other_sessions(
    spark: SparkSession,
) -> None:
    """Before PySpark 4.2, all clients share threads, and a deleted session closes its client."""
    if hasattr(spark.client, "_release_futures"):
        pytest.skip("each client of this PySpark waits for its own tasks")
    with table_session(spark) as session:
        assert session.range(3).count() == 3
        shared = ExecutePlanResponseReattachableIterator._release_thread_pool_instance
    del session
    gc.collect()
    assert shared.submit(len, "abc").result() == 3
    assert spark.range(4).count() == 4


@pytest.mark.skipif(not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason())
def test_tables_follow_the_log(spark: SparkSession, connect: str, tmp_path: Path) -> None:
    rows = spark.range(20).select("id", F.lit("followed").alias("owner"))
    written = waltz_spark.append(
        rows, connect, dataFormat="msgpack", partitions=0, resultsPath=str(tmp_path / "results")
    )
    start = waltz_spark.snapshot(spark, connect).high_water_marks
    start = {**start, 0: written.committed.agg(F.min("transaction_id")).collect()[0][0] - 1}
    table_options = {
        "table": str(tmp_path / "table"),
        "key": "id",
        "schema": "id long, owner string",
    }
    marks = waltz_spark.follow(spark, connect, **table_options, start=start, until="now")
    assert marks[0] == start[0] + 20
    assert spark.read.format("delta").load(table_options["table"]).count() == 20
    assert waltz_spark.follow(spark, connect, **table_options, until="now") == marks
    read_after_marks = spark.read.format("waltz").option(
        "startingHighWaterMarks", marks_as_json(start)
    )
    df = read_after_marks.schema("id long, owner string, partition int, transaction_id long")
    df = df.option("dataFormat", "msgpack").load(connect)
    other = {"table": str(tmp_path / "other"), "key": "id"}
    assert waltz_spark.upsert(df, connect, **other) == {0: marks[0]}
    assert waltz_spark.upsert(df, connect, **other) == {0: marks[0]}
    found = {"table": str(tmp_path / "found"), "key": "id"}
    assert waltz_spark.follow(spark, connect, **found, start=start, until="now") == marks
    streamed = {"table": str(tmp_path / "streamed"), "key": "id"}
    stream = spark.readStream.format("waltz").option("startingHighWaterMarks", marks_as_json(start))
    rows = stream.schema(df.schema).option("dataFormat", "msgpack").load(connect)
    in_batches = rows.writeStream.foreachBatch(
        lambda batch, _number: waltz_spark.upsert(batch, connect, **streamed)
    )
    checkpoint = str(tmp_path / "checkpoint")
    query = in_batches.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    expected, *tables = [
        spark.read.format("delta").load(each["table"])
        for each in (table_options, other, found, streamed)
    ]
    for table in tables:
        assert_df_equality(table, expected, ignore_row_order=True)
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None
