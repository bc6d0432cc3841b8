"""Batch reads and writes against a real cluster: every row is read back complete."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

import waltz_spark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_spark.functions import lock

pytestmark = pytest.mark.spark

ACCOUNTS = "id long, owner string, balance decimal(12,2), opened date, seen timestamp"


def marks_json(marks: dict[int, int]) -> str:
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


def marks_of(spark: SparkSession, connect: str) -> dict[int, int]:
    return dict(waltz_spark.snapshot(spark, connect).high_water_marks)


def since(spark: SparkSession, connect: str, marks: dict[int, int]):
    return spark.read.format("waltz").option("startingHighWaterMarks", marks_json(marks))


def accounts(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr(
        "id",
        "concat('owner ', id) AS owner",
        "CAST(id * 1.25 AS decimal(12,2)) AS balance",
        "date_add(DATE'2013-01-01', CAST(id % 365 AS int)) AS opened",
        "timestamp_micros(id * 1234567) AS seen",
    )


@pytest.mark.core
@pytest.mark.parametrize("data_format", ["msgpack", "json"])
def test_every_row_of_a_table_is_read_back(
    spark: SparkSession, connect: str, data_format: str
) -> None:
    before = marks_of(spark, connect)
    table = accounts(spark, 1000)
    locked = table.withColumn("append_locks", F.array(lock("account", "id")))
    locked.write.format("waltz").mode("append").option("dataFormat", data_format).save(connect)
    back = since(spark, connect, before).option("dataFormat", data_format).schema(ACCOUNTS)
    assert_df_equality(back.load(connect), table, ignore_row_order=True, ignore_nullable=True)


def test_raw_columns_are_written_and_read_back(spark: SparkSession, connect: str) -> None:
    before = marks_of(spark, connect)
    rows = [(0, 5, "a"), (1, None, "b"), (0, -7, "c")]
    table = spark.createDataFrame(rows, "partition int, header int, data string").coalesce(1)
    table.write.format("waltz").mode("append").save(connect)
    found = since(spark, connect, before).load(connect).orderBy("partition", "transaction_id")
    assert [f.simpleString() for f in found.schema.fields] == [
        "partition:int",
        "transaction_id:bigint",
        "header:int",
        "request_id:struct<client_id:int,generation:int,partition:int,sequence:int>",
        "commit_time:timestamp",
        "data:binary",
    ]
    rows_read = [(r.partition, r.transaction_id, r.header, bytes(r.data)) for r in found.collect()]
    assert rows_read == [
        (0, before[0] + 1, 5, b"a"),
        (0, before[0] + 2, -7, b"c"),
        (1, before[1] + 1, 0, b"b"),
    ]
    assert all(row.commit_time is not None for row in found.collect())


def test_options_select_ranges_partitions_headers_and_columns(
    spark: SparkSession, connect: str
) -> None:
    before = marks_of(spark, connect)
    table = spark.range(1000).selectExpr(
        "2 AS partition", "CAST(id % 3 AS int) AS header", "CAST(id AS string) AS data"
    )
    table.coalesce(1).write.format("waltz").mode("append").save(connect)
    first = before[2] + 1

    def read(**options: object) -> DataFrame:
        reader = spark.read.format("waltz")
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load(connect)

    some = read(partitions="2", transactionIds=f"{first + 10}-{first + 19}")
    assert sorted(bytes(row.data).decode() for row in some.collect()) == [
        str(number) for number in range(10, 20)
    ]
    ones = read(
        partitions="2", headers="1", startingHighWaterMarks=marks_json(before), columns="header"
    )
    assert ones.columns == ["header"]
    assert ones.count() == len(range(1, 1000, 3))
    headers = read(
        partitions="2",
        startingHighWaterMarks=marks_json(before),
        columns="transaction_id,header",
        minPartitions=4,
    )
    assert headers.rdd.getNumPartitions() >= 4
    assert [tuple(row) for row in headers.orderBy("transaction_id").collect()] == [
        (first + number, number % 3) for number in range(1000)
    ]


def test_a_dataframe_is_a_snapshot(spark: SparkSession, connect: str) -> None:
    snapshot = waltz_spark.snapshot(spark, connect)
    count = snapshot.read().count()
    assert count == sum(mark + 1 for mark in snapshot.high_water_marks.values())
    spark.range(10).selectExpr("CAST(id AS string) AS data").write.format("waltz").mode(
        "append"
    ).save(connect)
    assert snapshot.read().count() == count
    assert waltz_spark.snapshot(spark, connect).read().count() == count + 10


def test_reads_through_the_server_return_the_same_rows(spark: SparkSession, connect: str) -> None:
    snapshot = waltz_spark.snapshot(spark, connect)
    replica, server = snapshot.read(readFrom="replica"), snapshot.read(readFrom="server")
    assert_df_equality(replica, server, ignore_row_order=True)


def dispatches(spark: SparkSession, writer_name: str, first: int, last: int) -> DataFrame:
    return spark.range(first, last + 1).select(
        F.col("id"),
        F.lit(writer_name).alias("who"),
        F.array(lock("aircraft", "id")).alias("write_locks"),
    )


@pytest.mark.core
def test_the_second_of_two_writers_with_the_same_snapshot_is_rejected(
    spark: SparkSession, connect: str
) -> None:
    marks = marks_of(spark, connect)
    first = waltz_spark.append(
        dispatches(spark, "anna", 0, 39), connect, high_water_marks=marks, dataFormat="msgpack"
    )
    assert first.counts["committed"] == 40
    assert first.rejected.count() == 0
    second = waltz_spark.append(
        dispatches(spark, "boris", 25, 64), connect, high_water_marks=marks, dataFormat="msgpack"
    )
    assert second.counts["rejected"] == 15
    assert second.counts["rejected_by_own_rows"] == 0
    won = {row.id: row.transaction_id for row in first.committed.collect()}
    lost = {row.id: row for row in second.rejected.collect()}
    assert sorted(lost) == list(range(25, 40))
    for number, row in lost.items():
        assert row.lock_failure_transaction_id == won[number]
        assert row.transaction_id is None
        assert row.who == "boris"
        assert row.retry_high_water_mark >= won[number]
    again = waltz_spark.append(
        dispatches(spark, "boris", 25, 39), connect, dataFormat="msgpack", onLockFailure="fail"
    )
    assert again.counts["committed"] == 15


def count_up(spark: SparkSession, connect: str, key: int) -> None:
    """Read a counter from the log, add one, write it; start again after a rejection."""
    while True:
        snapshot = waltz_spark.snapshot(spark, connect)
        snapshot_rows = snapshot.read("key int, value int", dataFormat="json", mode="DROPMALFORMED")
        (row,) = (
            snapshot_rows.where(F.col("key") == key).agg(F.max("value").alias("value")).collect()
        )
        table = spark.createDataFrame([(key, (row.value or 0) + 1)], "key int, value int")
        locked = table.withColumn("write_locks", F.array(lock("counter", F.col("key"))))
        result = waltz_spark.append(
            locked.coalesce(1),
            connect,
            high_water_marks=snapshot.high_water_marks,
            dataFormat="json",
            onLockFailure="retry",
        )
        if result.counts["committed"]:
            return
        assert (result.counts["retry"], result.counts["rejected"]) == (1, 0)
        (rejected,) = result.retry.collect()
        assert rejected.status == "RETRY"
        assert rejected.retry_high_water_mark >= rejected.lock_failure_transaction_id


def test_concurrent_jobs_increment_one_counter(spark: SparkSession, connect: str) -> None:
    key, jobs = 4711, 4
    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(count_up, spark, connect, key) for _ in range(jobs)]:
            job.result(TEST_TIMEOUT_S)
    reader = spark.read.format("waltz").option("dataFormat", "json").option("mode", "DROPMALFORMED")
    rows = reader.schema("key int, value int").load(connect).where(F.col("key") == key).collect()
    assert sorted(row.value for row in rows) == list(range(1, jobs + 1))


def test_rows_of_one_job_conflict_like_rows_of_two_jobs(spark: SparkSession, connect: str) -> None:
    table = spark.range(20).select(F.col("id"), F.array(lock("hot", F.lit(1))).alias("write_locks"))
    result = waltz_spark.append(table.coalesce(1), connect, dataFormat="msgpack")
    assert result.counts["committed"] == 1
    assert result.counts["rejected"] == 19
    assert result.counts["rejected_by_own_rows"] == 19


def test_an_empty_dataframe_writes_no_transactions(spark: SparkSession, connect: str) -> None:
    before = marks_of(spark, connect)
    result = waltz_spark.append(accounts(spark, 10).where("id < 0"), connect, dataFormat="msgpack")
    assert result.counts["committed"] == 0
    assert result.results.count() == 0
    assert "status" in result.results.columns
    none = spark.createDataFrame([], "data string")
    none.write.format("waltz").mode("append").save(connect)
    assert marks_of(spark, connect) == before


def test_results_are_written_and_read_with_any_kind_of_path(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    table = spark.range(3).selectExpr("id")
    spark.conf.set("fs.defaultFS", "hdfs://127.0.0.1:9")  # nothing listens there
    try:
        for results_path in (
            f"{tmp_path}/plain",
            f"{tmp_path}/of [day] {{1}}",
            f"file://{tmp_path}/a%20b",
        ):
            result = waltz_spark.append(
                table, connect, dataFormat="msgpack", resultsPath=results_path
            )
            assert result.committed.count() == 3
    finally:
        spark.conf.unset("fs.defaultFS")


def test_order_within_a_partition_is_kept(spark: SparkSession, connect: str) -> None:
    before = marks_of(spark, connect)
    table = spark.range(20_000).selectExpr("1 AS partition", "CAST(id AS string) AS data")
    table.coalesce(1).write.format("waltz").mode("append").save(connect)
    frame = since(spark, connect, before).option("partitions", "1").load(connect)
    values = [int(bytes(r.data)) for r in frame.orderBy("transaction_id").collect()]
    assert values == list(range(20_000))


CORRUPT = [b'{"n":1}', b"no json", b'{"n":"x"}', b'{"n":4}', b"[5]", b"\xff\xfe", b'{"n":7}', b"{}"]


def corrupt_log(spark: SparkSession, connect: str):
    """Write payloads, half of which are corrupt; return a reader of them."""
    before = marks_of(spark, connect)
    with WaltzClient(connect) as client:
        for payload in CORRUPT:
            client.append(payload, partition=0).result(TEST_TIMEOUT_S)
    return since(spark, connect, before).option("dataFormat", "json")


def test_option_mode_determines_the_handling_of_unpackable_payloads(
    spark: SparkSession, connect: str
) -> None:
    reader = corrupt_log(spark, connect)
    with pytest.raises(
        Exception, match=r"partition 0, transaction \d+: expected a payload in json"
    ):
        reader.schema("n long").load(connect).collect()

    reader = reader.option("mode", "PERMISSIVE")
    rows = reader.schema("n long, _corrupt_record binary").load(connect).collect()
    assert [row.n for row in rows] == [1, None, None, 4, None, None, 7, None]
    payloads_read = [None if row[1] is None else bytes(row[1]) for row in rows]
    assert payloads_read == [None, *CORRUPT[1:3], None, *CORRUPT[4:6], None, None]
    named = reader.option("columnNameOfCorruptRecord", "bad").schema("bad string, n long")
    assert [row.bad for row in named.load(connect).collect()][4:7] == ["[5]", "��", None]
    plain = reader.schema("transaction_id long, n long").load(connect).collect()
    assert [row.transaction_id is None for row in plain] == [False] * len(CORRUPT)

    reader = reader.option("mode", "DROPMALFORMED")
    rows = reader.schema("n long, transaction_id long").load(connect).collect()
    assert [row.n for row in rows] == [1, 4, 7, None]
    ids = [row.transaction_id for row in rows]
    assert [transaction_id - ids[0] for transaction_id in ids] == [0, 3, 6, 7]
    # A payload that lacks a required column is handled according to the mode, too.
    required = reader.option("requiredColumns", "N").schema("n long")
    assert [row.n for row in required.load(connect).collect()] == [1, 4, 7]
    with pytest.raises(Exception, match=r"'requiredColumns': .*\(n\), found 'm'"):
        reader.option("requiredColumns", "n,m").schema("n long").load(connect).collect()


def test_rows_are_read_back_with_the_not_null_schema_of_their_dataframe(
    spark: SparkSession, connect: str
) -> None:
    before = marks_of(spark, connect)
    table = (
        spark.range(20)
        .select(
            "id",
            F.lit("x").alias("word"),
            F.array(F.lit(1), F.lit(2)).alias("list"),
            F.struct(F.col("id").alias("inner")).alias("struct"),
            F.create_map(F.lit("k"), F.col("id")).alias("map"),
        )
        .coalesce(1)
    )
    assert not any(field.nullable for field in table.schema)
    waltz_spark.append(table, connect, dataFormat="json")
    reader = since(spark, connect, before).option("dataFormat", "json").schema(table.schema)
    assert sorted(reader.load(connect).collect()) == table.collect()


def test_a_not_null_column_never_contains_null(spark: SparkSession, connect: str) -> None:
    reader = corrupt_log(spark, connect).schema(
        StructType([StructField("n", LongType(), nullable=False)])
    )
    dropped = reader.option("mode", "DROPMALFORMED").load(connect)
    assert [row.n for row in dropped.collect()] == [1, 4, 7]
    assert dropped.where("n is not null").count() == 3
    with pytest.raises(Exception, match=r"column 'n' is NOT NULL .* Hint: .*toNullable"):
        reader.option("mode", "PERMISSIVE").load(connect).collect()


def test_payload_keys_match_columns_by_the_case_rules_of_spark(
    spark: SparkSession, connect: str
) -> None:
    reader = corrupt_log(spark, connect).option("mode", "DROPMALFORMED").schema("N long")
    assert [row.N for row in reader.load(connect).collect()] == [1, 4, 7, None]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        # No payload has this column. So every payload that is a map fits.
        numbers = [row.N for row in reader.load(connect).collect()]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert numbers == [None] * 5
