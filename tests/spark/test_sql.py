"""Spark SQL: views and tables of the log, locks, and every statement of the docs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession

import waltz_spark
from tests.spark.versions import needs_pyspark
from waltz_core import errors
from waltz_core.client import lock

pytestmark = pytest.mark.spark

DOCS = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


class Statement(NamedTuple):
    """One statement of the docs; `refusal` is the expected error of a statement that must fail."""

    text: str
    refusal: str | None


def statements() -> list[Statement]:
    """Return the statements of the section "SQL", in order."""
    section = DOCS.read_text(encoding="utf-8").split("\n## SQL\n")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"^```sql\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        for text, refusal in re.findall(r"([^;]*);\n(?:-- ([^\n]*)\n)?", block):
            found.append(Statement(text.strip(), refusal or None))
    return found


@pytest.fixture
def sql(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """A separate session; its views, functions and tables are removed with it."""
    new_session = spark.newSession()
    new_session.sql(f"CREATE DATABASE sql_tests LOCATION '{tmp_path / 'tables'}'")
    new_session.sql("USE sql_tests")
    yield new_session
    new_session.sql("DROP DATABASE sql_tests CASCADE")
    # Without this call, the new session stays the active session of the thread, and objects of
    # other sessions are not found.
    spark.createDataFrame([], "nothing int")


def as_json(marks: dict[int, int]) -> str:
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


def since(spark: SparkSession, marks: dict[int, int], connect: str) -> DataFrame:
    reader = spark.read.format("waltz").option("startingHighWaterMarks", as_json(marks))
    return reader.load(connect)


@pytest.fixture
def marks(spark: SparkSession, connect: str) -> dict[int, int]:
    """The log's marks before the test."""
    return dict(waltz_spark.snapshot(spark, connect).high_water_marks)


@needs_pyspark(4, 1, "an INSERT names all columns")
def test_every_statement_of_the_docs_works_or_is_rejected_as_documented(
    sql: SparkSession, connect: str, tmp_path: Path
) -> None:
    def with_test_values(text: str) -> str:
        text = text.replace("zk1:2181/waltz/payments", connect)
        return text.replace("/results/accounts", str(tmp_path / "results"))

    rejected_count = 0
    for statement in statements():
        if statement.refusal is None:
            sql.sql(with_test_values(statement.text)).collect()
            continue
        rejected_count += 1
        with pytest.raises(Exception, match=r".") as caught:
            sql.sql(with_test_values(statement.text)).collect()
        wanted = statement.refusal.replace("`default`", "`sql_tests`")
        assert wanted in str(caught.value).splitlines()[0], statement.text
    assert len(statements()) - rejected_count >= 14
    assert rejected_count >= 9
    # The function of the docs is the client library's lock.
    keys = [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)]
    names = ["account", "", "grüße", "a-very-long-lock-name-that-overflows-int-hash-arithmetic"]
    frame = sql.createDataFrame([(n, k) for n in names for k in keys], "n string, k long")
    for row in frame.selectExpr("n", "k", "waltz_lock(n, k) AS hash").collect():
        assert row.hash == lock(row.n, row.k)
    (text,) = sql.sql("SELECT waltz_lock('aircraft', crc32('N14228'))").collect()
    assert text[0] == lock("aircraft", "N14228")


def test_a_sql_view_returns_the_same_rows_as_a_batch_read(
    sql: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    rows = sql.sql("SELECT CAST(id AS STRING) AS data, CAST(id % 4 AS INT) AS header FROM range(9)")
    rows.write.format("waltz").mode("append").save(connect)
    options = f"connect '{connect}', startingHighWaterMarks '{as_json(marks)}'"
    sql.sql(f"CREATE TEMPORARY VIEW log USING waltz OPTIONS ({options})")
    assert_df_equality(sql.table("log"), since(sql, marks, connect), ignore_row_order=True)
    sql.sql(f"CREATE TEMPORARY VIEW threes USING waltz OPTIONS ({options}, headers '3')")
    threes = sql.sql("SELECT * FROM threes").collect()
    assert sorted(bytes(row.data) for row in threes) == [b"3", b"7"]
    # The docs warn of this: a view ignores the options of WITH.
    assert sql.sql("SELECT * FROM log WITH (headers = '3', nonsense = '1')").count() == 9


@needs_pyspark(4, 1, "an INSERT names all columns")
def test_a_view_with_columns_is_joined_with_a_table(
    sql: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    sql.sql(f"""CREATE TEMPORARY VIEW flights_in (flight BIGINT, tail STRING, header INT)
                USING waltz OPTIONS (connect '{connect}', dataFormat 'json')""")
    sql.sql("INSERT INTO flights_in BY NAME SELECT 'N' || id AS tail, id AS flight FROM range(6)")
    sql.sql(f"""CREATE TEMPORARY VIEW flights (flight BIGINT, tail STRING, transaction_id BIGINT)
                USING waltz OPTIONS (connect '{connect}', dataFormat 'json',
                                     startingHighWaterMarks '{as_json(marks)}')""")
    sql.createDataFrame([("N2", 180), ("N4", 9)], "tail string, seats int").createTempView("planes")
    found = sql.sql("SELECT flight, seats FROM flights JOIN planes USING (tail) ORDER BY flight")
    assert [tuple(row) for row in found.collect()] == [(2, 180), (4, 9)]


def test_an_insert_with_locks_is_rejected_after_a_conflict(
    sql: SparkSession, connect: str, marks: dict[int, int], tmp_path: Path
) -> None:
    columns = "(data STRING, write_locks ARRAY<INT>)"
    base = f"connect '{connect}', clientHighWaterMarks '{as_json(marks)}'"
    hashes = [lock("seat", key) for key in (1, 2)]
    for name, options in (
        ("first", ""),
        ("late", f", onLockFailure 'reject', resultsPath '{tmp_path / 'results'}'"),
    ):
        sql.sql(f"CREATE TEMPORARY VIEW {name} {columns} USING waltz OPTIONS ({base}{options})")
    sql.sql(f"INSERT INTO first VALUES ('anna', array({hashes[0]}))")
    sql.sql(f"INSERT INTO late VALUES ('b1', array({hashes[0]})), ('b2', array({hashes[1]}))")
    statuses = sql.read.parquet(str(tmp_path / "results")).select("write_locks", "status").collect()
    assert {row.write_locks[0]: row.status for row in statuses} == {
        hashes[0]: "REJECTED",
        hashes[1]: "COMMITTED",
    }
    with pytest.raises(errors.LockFailed, match="a row was rejected"):
        sql.sql(f"INSERT INTO first VALUES ('clara', array({hashes[1]}))")


def test_a_sql_table_gets_the_options_of_each_statement_that_uses_it(
    sql: SparkSession, connect: str, marks: dict[int, int]
) -> None:
    columns = "(partition INT, data BINARY)"
    sql.sql(f"CREATE TABLE log {columns} USING waltz OPTIONS (connect '{connect}')")
    insert = f"INSERT INTO log WITH (connect = '{connect}') VALUES (1, CAST('x' AS BINARY))"
    sql.sql(insert)
    sql.sql("SELECT 2 AS partition, CAST('y' AS BINARY) AS data").writeTo("log").option(
        "connect", connect
    ).append()
    rows = since(sql, marks, connect).select("partition", "data").collect()
    assert sorted((row.partition, bytes(row.data)) for row in rows) == [(1, b"x"), (2, b"y")]
    text = f"SELECT count(*) FROM log WITH (connect = '{connect}', partitions = '1')"
    assert sql.sql(text).first()[0] == marks[1] + 2
    with pytest.raises(errors.BadConfig, match=r"did you mean 'minPartitions'\?"):
        sql.sql(f"SELECT * FROM log WITH (connect = '{connect}', minPartition = '3')").collect()
    with pytest.raises(errors.BadConfig, match="no cluster is given"):
        sql.table("log").write.option("connect", connect).insertInto("log")
