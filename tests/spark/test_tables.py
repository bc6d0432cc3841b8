"""Delta tables that follow the log in Spark: they equal a replay, and continue after kills."""

import json
import re
from datetime import datetime
from pathlib import Path

import msgpack
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import waltz_core.local
import waltz_spark
from tests import table_libraries
from tests.commands import run_command
from tests.spark.tables_job import DURING_A_COMMIT, STEPS, follow_table, method_ending_at
from tests.time_limits import PATIENT_CLIENT
from tests.written_log import (
    DELETE_HEADER,
    TRANSACTION_COUNT,
    WrittenLog,
    check_versions,
    end_marks,
    marks_by_version,
    read_table,
)
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_spark.session_errors import SPARK_ERRORS
from waltz_spark.tables.merged_table import MergedDeltaTable

pytestmark = [pytest.mark.spark, pytest.mark.core]
with_delta = pytest.mark.skipif(
    not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason()
)

ROOT = Path(__file__).parents[2]


def append(written: WrittenLog, seed: int) -> None:
    with WaltzClient(written.connect, PATIENT_CLIENT) as client:
        written.append(client, seed)


def transactions(reader: object, connect: str) -> DataFrame:
    """Return the log as a batch or a stream, with the columns for `upsert`."""
    columns = "id long, op string, value long, header int, partition int, transaction_id long"
    selected = reader.format("waltz").schema(columns).option("headers", f"1,{DELETE_HEADER}")
    return selected.option("dataFormat", "msgpack").load(connect)


def upsert(df: DataFrame, connect: str, table: str, key: str = "id") -> dict[int, int]:
    return waltz_spark.upsert(
        df,
        connect,
        table=table,
        key=key,
        delete_headers=[DELETE_HEADER],
        delete_where="op = 'D'",
    )


@pytest.mark.skipif(bool(table_libraries.DELTA.jars()), reason="the library is installed")
def test_spark_without_delta_raises_an_error_with_a_hint(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    with pytest.raises(
        BadConfig, match=r"no library of Delta that works with Spark .*\. Hint: Delta"
    ):
        follow_table(spark, written.connect, str(tmp_path / "table"))


@with_delta
def test_the_table_equals_a_replay_and_a_repeated_call_writes_no_commit(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert follow_table(spark, written.connect, str(table)) == end_marks(written)
    check_versions(written, table)
    found = marks_by_version(table)
    assert len(found) > 2
    assert read_table(table) == written.replayed(end_marks(written))
    assert follow_table(spark, written.connect, str(table)) == end_marks(written)
    assert marks_by_version(table) == found
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.slow
@with_delta
def test_a_micro_batch_that_is_repeated_writes_no_commit(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    found = []

    def apply(df: DataFrame, _batch: int) -> None:
        found.append(upsert(df, written.connect, str(table)))
        found.append(upsert(df, written.connect, str(table)))

    def run(checkpoint: str) -> None:
        rows = transactions(
            spark.readStream.option("startingHighWaterMarks", "earliest").option(
                "maxTransactionsPerTrigger", TRANSACTION_COUNT // 2
            ),
            written.connect,
        )
        query = rows.writeStream.foreachBatch(apply).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination()

    run("first")
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))
    assert found[0] == found[1]
    versions = marks_by_version(table)
    run("second")  # a new checkpoint begins at the first transaction
    assert marks_by_version(table) == versions


@pytest.mark.slow
@with_delta
def test_each_kind_of_follower_continues_a_table_of_the_other_kind(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    follow_table(spark, written.connect, str(table))
    for seed in (2, 3):
        append(written, seed)
        result = run_command(*written.command(table, "--until", "now"))
        assert result.returncode == 0, result.stderr
        append(written, seed + 10)
        if seed == 2:
            assert follow_table(spark, written.connect, str(table)) == end_marks(written)
        else:
            upsert(transactions(spark.read, written.connect), written.connect, str(table))
    check_versions(written, table)
    newest = max(marks_by_version(table).items())[1]
    assert read_table(table) == written.replayed(newest) == written.replayed(end_marks(written))
    table = tmp_path / "of upsert"
    upsert(transactions(spark.read, written.connect), written.connect, str(table))
    result = run_command(*written.command(table, "--until", "now"))
    assert result.returncode == 0, result.stderr
    check_versions(written, table)


@with_delta
@pytest.mark.slow
def test_changed_rules_for_an_existing_table_are_an_error(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    """A table that `upsert` wrote stores no headers until `follow` has written to it."""
    table, other = str(tmp_path / "table"), str(tmp_path / "other")
    upsert(transactions(spark.read, written.connect), written.connect, other)
    append(written, seed=11)
    for path in (table, other):
        follow_table(spark, written.connect, path)
    df = transactions(spark.read, written.connect)
    for path in (table, other):
        versions = marks_by_version(path)
        rejected = pytest.raises(BadConfig, match="as in the commits of the table, found ")
        with rejected:
            follow_table(spark, written.connect, path, key="value")
        with rejected:
            follow_table(spark, written.connect, path, headers=[DELETE_HEADER])
        with rejected:
            upsert(df, written.connect, path, "value")
        assert marks_by_version(path) == versions


@pytest.mark.slow
@with_delta
def test_a_named_table_without_rows_is_followed_from_a_start(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    """The user has created the table: it has no marks and no rows."""
    spark.sql(f"CREATE DATABASE named LOCATION '{tmp_path}/named'")
    columns = "id BIGINT, op STRING, value BIGINT, _partition INT, _transaction_id BIGINT"
    spark.sql(f"CREATE TABLE named.accounts ({columns}) USING delta")
    start = {partition: end // 2 for partition, end in end_marks(written).items()}
    marks = follow_table(
        spark, written.connect, "named.accounts", start=start, batch_transactions=1000
    )
    assert marks == end_marks(written)
    table = tmp_path / "named" / "accounts"
    rows = read_table(table)
    assert rows
    assert rows.items() <= written.replayed(marks).items()
    assert all(transaction_id > start[partition] for _, partition, transaction_id in rows.values())
    with pytest.raises(
        BadConfig, match="start time were given, but follower 'follow' has already written"
    ):
        follow_table(spark, written.connect, "named.accounts", start=start)
    assert follow_table(spark, written.connect, "named.created", start="2100-01-01") == end_marks(
        written
    )
    assert read_table(tmp_path / "named" / "created") == {}


@pytest.mark.slow
@with_delta
@pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_a_text_key_that_delta_would_read_as_null_is_an_error(
    spark: SparkSession, tmp_path: Path, connect: str, text: str
) -> None:
    """Delta stores the text as null, so the next change of this key would insert a second row."""
    table = tmp_path / "table"
    columns = "day STRING, value BIGINT, _partition INT, _transaction_id BIGINT"
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta PARTITIONED BY (day)")
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        call = {"table": str(table), "key": "day", "schema": "day string, value long"}
        start = {int(partition): int(mark) for partition, mark in client.high_water_marks().items()}
        for day, more in (("mon", {"start": start}), ("tue", {})):
            client.append(msgpack.packb({"day": day, "value": 1}), partition=0).result()
            waltz_spark.follow(spark, connect, **call, **more, until="now")
        client.append(msgpack.packb({"day": text, "value": 1}), partition=0).result()
        place = f"partition 0, transaction {start[0] + 3}: expected null or another text"
        with pytest.raises(BadRequest, match=f"{place} .* column 'day' .* found '{text}', which"):
            waltz_spark.follow(spark, connect, **call, until="now")
    rows = spark.read.format("delta").load(str(table)).collect()
    assert {row["day"] for row in rows} == {"mon", "tue"}


@with_delta
def test_timestamps_in_a_partition_column_survive_the_end_of_daylight_saving_time(
    spark: SparkSession, tmp_path: Path, connect: str
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    table = tmp_path / "table"
    columns = "seen TIMESTAMP, _partition INT, _transaction_id BIGINT"
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta PARTITIONED BY (seen)")
    texts = [f"2026-10-25T0{hour}:30:00Z" for hour in range(2)]
    call = {"table": str(table), "key": "seen", "schema": "seen timestamp", "dataFormat": "json"}
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        start = {int(partition): int(mark) for partition, mark in client.high_water_marks().items()}
        for text in texts:
            client.append(json.dumps({"seen": text}).encode(), partition=0).result()
    waltz_spark.follow(session, connect, **call, start=start, until="now")
    seen = spark.read.format("delta").load(str(table)).selectExpr("unix_micros(seen) AS at")
    found = sorted(row["at"] // 1_000_000 for row in seen.collect())
    assert found == [int(datetime.fromisoformat(text).timestamp()) for text in texts]


@with_delta
@pytest.mark.slow
def test_option_until_is_validated(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    """Marks of JSON have partitions as text."""
    table = str(tmp_path / "table")
    with pytest.raises(BadConfig, match="until: expected 'now' or the mark of each partition"):
        follow_table(spark, written.connect, table, until="later")
    end = {str(partition): mark for partition, mark in end_marks(written).items()}
    assert follow_table(spark, written.connect, table, until=end) == end_marks(written)


@with_delta
def test_a_row_key_in_two_partitions_is_an_error(
    spark: SparkSession, tmp_path: Path, connect: str
) -> None:
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        start = {int(each): int(mark) for each, mark in client.high_water_marks().items()}

        def append_row(partition: int, key: int) -> None:
            client.append(msgpack.packb({"id": key}), partition=partition).result()

        place = {"table": str(tmp_path / "table"), "key": "id", "schema": "id long"}
        append_row(0, 7)
        waltz_spark.follow(spark, connect, **place, start=start, until="now")
        append_row(1, 7)
        with pytest.raises(BadRequest, match=r"the key \(7\) has .* partition 0, transaction"):
            waltz_spark.follow(spark, connect, **place, until="now")
        place["table"] = str(tmp_path / "other")
        with pytest.raises(BadRequest, match=r"the key \(7\) has .* partition 0 and partition 1, "):
            waltz_spark.follow(spark, connect, **place, start=start, until="now")


@with_delta
@pytest.mark.slow
def test_a_follower_fails_on_a_restored_table_and_on_lost_marks(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    follow_table(spark, written.connect, str(table), batch_transactions=50)
    marks = marks_by_version(table)[1]
    spark.sql(f"OPTIMIZE delta.`{table}`")
    assert follow_table(spark, written.connect, str(table)) == end_marks(written)
    spark.sql(f"RESTORE delta.`{table}` TO VERSION AS OF 1")
    df = transactions(spark.read, written.connect)
    for call in (
        lambda: follow_table(spark, written.connect, str(table)),
        lambda: upsert(df, written.connect, str(table)),
    ):
        with pytest.raises(BadFormat, match="is a RESTORE after the last commit of follower"):
            call()
    assert follow_table(
        spark, written.connect, str(table), follower="again", start=marks
    ) == end_marks(written)
    assert read_table(table) == written.replayed(end_marks(written))
    # Commits without the metadata of this follower, as after a clean-up of Delta's log.
    for commit in sorted((table / "_delta_log").glob("*.json")):
        commit.write_text(
            commit.read_text().replace('\\"follower\\":\\"again\\"', '\\"follower\\":\\"x\\"')
        )
        (commit.parent / f".{commit.name}.crc").unlink(missing_ok=True)
    other = spark.newSession()
    other.sql(f"REFRESH TABLE delta.`{table}`")
    with pytest.raises(BadFormat, match="expected a commit of the table with high-water marks"):
        follow_table(spark, written.connect, str(table), follower="again")


@pytest.mark.slow
@with_delta
def test_following_a_table_that_another_program_has_overwritten_is_an_error(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    follow_table(spark, written.connect, table, batch_transactions=1000)
    rows = spark.read.format("delta").load(table)
    rows.write.format("delta").mode("overwrite").save(table)
    with pytest.raises(
        BadFormat, match=r"is a WRITE \(OVERWRITE\) after the last commit of follow"
    ):
        follow_table(spark, written.connect, table)


@with_delta
def test_both_kinds_of_follower_create_the_same_column_types(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    columns = {
        "id": ("string", "string"),
        "amount": ("decimal(12,2)", "decimal128(12, 2)"),
        "seen": ("timestamp", "timestamp[us, tz=UTC]"),
        "data_of": ("binary", "binary"),
        "rate": ("double", "double"),
    }
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        start = {int(partition): int(mark) for partition, mark in client.high_water_marks().items()}
        row = {"id": "a", "amount": "1.50", "seen": 5, "data_of": b"\x00", "rate": 0.5}
        client.append(msgpack.packb(row), partition=0).result()
        client.append(msgpack.packb({"id": "b"}), partition=0).result()
    schema = ", ".join(f"{name} {spark_type}" for name, (spark_type, _) in columns.items())
    table = tmp_path / "table"
    waltz_spark.follow(
        spark, connect, table=str(table), key="id", schema=schema, start=start, until="now"
    )
    rows = DeltaTable(table).to_pyarrow_table().sort_by("id").to_pylist()
    assert rows[0]["amount"].as_tuple().digits == (1, 5, 0)
    assert rows[0]["seen"].microsecond == 5
    assert rows[0]["data_of"] == b"\x00"
    assert rows[1]["rate"] is None


@with_delta
def test_columns_may_be_added_later_but_not_omitted_or_changed(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    place = {"table": table, "key": "id", "until": "now", "headers": [1]}
    waltz_spark.follow(spark, written.connect, **place, schema="id long, op string")
    append(written, 4)
    waltz_spark.follow(spark, written.connect, **place, schema="id long, op string, value long")
    last = spark.read.format("delta").load(table).orderBy("_transaction_id").tail(1)[0]
    assert last["value"] is not None
    for schema, message in (
        ("id long, op string", "column 'value' of the table is not declared"),
        ("id long, op string, value int", "has type bigint in the table, but is declared as int"),
        ("id long, _partition int", "Reserved names are _deleted, _partition, _transaction_id"),
    ):
        with pytest.raises(BadConfig, match=message):
            waltz_spark.follow(spark, written.connect, **place, schema=schema)
    with pytest.raises(BadConfig, match=r"expected only the options dataFormat, .*, found 'mode'"):
        waltz_spark.follow(spark, written.connect, **place, schema="id long", mode="PERMISSIVE")


class FollowerEnded(BaseException):
    """A follower was ended."""


@with_delta
@pytest.mark.slow
def test_another_session_continues_a_follower_that_ended_between_two_commits(
    spark: SparkSession, written: WrittenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"

    def end() -> None:
        raise FollowerEnded

    for step in (each for each in STEPS if each != DURING_A_COMMIT):
        with monkeypatch.context() as patch:
            patch.setattr(MergedDeltaTable, *method_ending_at(step, end, table))
            with pytest.raises(FollowerEnded):
                follow_table(spark.newSession(), written.connect, str(table))
        check_versions(written, table)
    follow_table(spark, written.connect, str(table))
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))


# Each snippet repeats a call of the tests above or in `test_several_tables.py`, on another cluster.
@with_delta
@pytest.mark.slow
def test_the_snippets_of_the_page_work(spark: SparkSession, tmp_path: Path) -> None:
    page = ROOT / "docs/spark-tables.md"
    text = page.read_text(encoding="utf-8").replace("/lake/", f"{tmp_path}/")
    tables_page = (ROOT / "docs/tables.md").read_text(encoding="utf-8")
    session, *rest = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    compile(session, page, "exec")  # this snippet starts another Spark session
    names = {"spark": spark, "waltz_spark": waltz_spark, "place": str(tmp_path / "place")}
    options = {"storage_count": 1, "server_count": 1, "partition_count": 1}
    with waltz_core.local.running_cluster(tmp_path / "local", **options) as cluster:
        with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
            for header, row in ((1, {"id": 1, "balance": 5}), (1, {"id": 2}), (2, {"id": 2})):
                client.append(msgpack.packb(row), header=header).result()
        ledger = tables_page[tables_page.index("# ledger.py") :]
        (tmp_path / "ledger.py").write_text(ledger[: ledger.index("```")])
        spark.sparkContext.addPyFile(str(tmp_path / "ledger.py"))
        for snippet in rest:
            if "ledger:entries" in snippet:
                names["query"].awaitTermination()
                with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
                    row = {"transfer": 1, "payer": 1, "payee": 3, "amount": 25}
                    client.append(msgpack.packb(row), header=3).result()
            code = snippet.replace("zk1:2181,zk2:2181/waltz/payments", cluster.connect)
            exec(compile(code, page, "exec"), names)
    assert names["marks"] == {0: 2}
    assert set(map(str, names["by_table"].values())) == {"{0: 3}"}
    rows = spark.read.format("delta").load(f"{tmp_path}/entries").orderBy("account").collect()
    assert [(row["account"], row["amount"]) for row in rows] == [(1, -25), (3, 25)]
    for table in ("accounts", "balances"):
        rows = spark.read.format("delta").load(f"{tmp_path}/{table}").collect()
        assert [(row["id"], row["balance"]) for row in rows] == [(1, 5)]


def append_and_return_marks(connect: str, *rows: tuple[int, dict]) -> dict[int, int]:
    """Append rows to partitions; return the marks before them."""
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        start = {int(each): int(mark) for each, mark in client.high_water_marks().items()}
        for partition, row in rows:
            client.append(msgpack.packb(row), partition=partition).result()
    return start


@pytest.mark.slow
@with_delta
def test_a_failed_first_run_leaves_no_table(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    """The next run may use other types and another start. The table has a path or a name."""
    start = append_and_return_marks(
        connect, (0, {"id": 1, "value": "a"}), (1, {"id": 2, "value": "b"})
    )
    spark.sql(f"CREATE DATABASE failing LOCATION '{tmp_path}/failing'")
    for table in (str(tmp_path / "table"), "failing.accounts"):
        place = {"table": table, "key": "id", "until": "now"}
        with pytest.raises(BadFormat):
            waltz_spark.follow(spark, connect, **place, schema="id long, value long", start=start)
        later = {**start, 0: start[0] + 1}
        waltz_spark.follow(spark, connect, **place, schema="id long, value string", start=later)
        frame = spark.read.format("delta").load(table) if "/" in table else spark.table(table)
        assert [row["value"] for row in frame.collect()] == ["b"]
    log = spark.read.format("waltz").option("connect", connect).load()
    df = log.selectExpr(
        "transaction_id AS id", "partition", "transaction_id", "bigint(raise_error('wrong')) AS x"
    )
    with pytest.raises(PySparkException):
        waltz_spark.upsert(df, connect, table=str(tmp_path / "other"), key="id")
    assert not (tmp_path / "other").exists()


@with_delta
def test_an_error_of_the_network_is_temporary_and_other_errors_end_a_follower(
    spark: SparkSession, written: WrittenLog
) -> None:
    spark.conf.set("ipc.client.connect.max.retries", "0")
    with pytest.raises(Unavailable, match=r"^table hdfs://127.0.0.1:1/t: .*ConnectException"):
        follow_table(spark, written.connect, "hdfs://127.0.0.1:1/t")
    with pytest.raises(SPARK_ERRORS):
        follow_table(spark, written.connect, "/proc/no/table", until=None)
