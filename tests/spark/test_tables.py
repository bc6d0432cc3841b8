"""Delta tables that follow the log in Spark: they equal a replay, and continue after kills."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import waltz_core.local
import waltz_spark
from tests import delta_jars
from tests.changing import changes_of as pair_changes
from tests.commands import run_command
from tests.patience import HANG_S, PATIENT
from tests.spark.tables_job import BATCH, STEPS, follow
from tests.written_log import (
    DELETE_HEADER,
    PARTITIONS,
    Written,
    check_versions,
    content,
    ends,
    marks_by_version,
)
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadFormat, BadRequest, Superseded
from waltz_core.tables.follower import OtherCommit
from waltz_core.tables.table_marks import TableMarks, decode
from waltz_spark.tables.log_changes import changes_schema
from waltz_spark.tables.merged_table import MergedDeltaTable

pytestmark = [pytest.mark.spark, pytest.mark.core]
with_delta = pytest.mark.skipif(not delta_jars.jars(), reason=delta_jars.reason_without())

ROOT = Path(__file__).parents[2]
TRANSACTIONS = 120


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    place = tmp_path_factory.mktemp("cluster") / "local"
    with waltz_core.local.running(place, partition_count=PARTITIONS) as cluster:
        found = Written(cluster.connect, [[] for _ in range(PARTITIONS)])
        append(found, 1)
        yield found


def append(written: Written, seed: int) -> None:
    with WaltzClient(written.connect, PATIENT) as client:
        written.append(client, TRANSACTIONS, seed)


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


@pytest.mark.skipif(bool(delta_jars.jars()), reason="there is a library")
def test_a_spark_without_delta_is_a_clear_error(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    with pytest.raises(BadConfig, match=r"no library of Delta that works with it .*\. Hint: Delta"):
        follow(spark, written.connect, str(tmp_path / "table"))


@with_delta
def test_the_table_equals_a_replay_and_a_repeated_call_writes_no_commit(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert follow(spark, written.connect, str(table)) == ends(written)
    check_versions(written, table)
    found = marks_by_version(table)
    assert len(found) > 2
    assert content(table) == written.replayed(ends(written))
    assert follow(spark, written.connect, str(table)) == ends(written)
    assert marks_by_version(table) == found
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@with_delta
def test_a_micro_batch_that_is_repeated_writes_no_commit(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    found = []

    def apply(df: DataFrame, _batch: int) -> None:
        found.append(upsert(df, written.connect, str(table)))
        found.append(upsert(df, written.connect, str(table)))

    def run(checkpoint: str) -> None:
        rows = transactions(
            spark.readStream.option("startingHighWaterMarks", "earliest").option(
                "maxTransactionsPerTrigger", TRANSACTIONS // 2
            ),
            written.connect,
        )
        query = rows.writeStream.foreachBatch(apply).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination()

    run("first")
    check_versions(written, table)
    assert content(table) == written.replayed(ends(written))
    assert found[0] == found[1]
    versions = marks_by_version(table)
    run("second")  # a new checkpoint begins at the first transaction
    assert marks_by_version(table) == versions


@with_delta
def test_each_follower_continues_a_table_of_the_other_one(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    follow(spark, written.connect, str(table))
    for seed in (2, 3):
        append(written, seed)
        done = run_command(*written.command(table, "--until", "now"))
        assert done.returncode == 0, done.stderr
        append(written, seed + 10)
        if seed == 2:
            assert follow(spark, written.connect, str(table)) == ends(written)
        else:
            upsert(transactions(spark.read, written.connect), written.connect, str(table))
    check_versions(written, table)
    newest = max(marks_by_version(table).items())[1]
    assert content(table) == written.replayed(newest) == written.replayed(ends(written))
    table = tmp_path / "of upsert"
    upsert(transactions(spark.read, written.connect), written.connect, str(table))
    done = run_command(*written.command(table, "--until", "now"))
    assert done.returncode == 0, done.stderr
    check_versions(written, table)


@with_delta
def test_another_rule_for_an_existing_table_is_an_error(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    """A table of `upsert` has no headers until `follow` has written it."""
    table, other = str(tmp_path / "table"), str(tmp_path / "other")
    follow(spark, written.connect, table)
    upsert(transactions(spark.read, written.connect), written.connect, other)
    follow(spark, written.connect, other)
    df = transactions(spark.read, written.connect)
    for place in (table, other):
        versions = marks_by_version(place)
        rejected = pytest.raises(BadConfig, match="as in the commits of the table, found ")
        with rejected:
            follow(spark, written.connect, place, key="value")
        with rejected:
            follow(spark, written.connect, place, headers=[DELETE_HEADER])
        with rejected:
            upsert(df, written.connect, place, "value")
        assert marks_by_version(place) == versions


@with_delta
def test_a_start_and_a_table_with_a_name(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    """The user has created the table: it has no marks and no rows."""
    spark.sql(f"CREATE DATABASE named LOCATION '{tmp_path}/named'")
    columns = "id BIGINT, op STRING, value BIGINT, _partition INT, _transaction_id BIGINT"
    spark.sql(f"CREATE TABLE named.accounts ({columns}) USING delta")
    start = {each: end // 2 for each, end in ends(written).items()}
    marks = follow(spark, written.connect, "named.accounts", start=start, batch_transactions=1000)
    assert marks == ends(written)
    table = tmp_path / "named" / "accounts"
    rows = content(table)
    assert rows
    assert rows.items() <= written.replayed(marks).items()
    assert all(place > start[partition] for _, partition, place in rows.values())
    with pytest.raises(BadConfig, match="a start was given, but follower 'follow' has written"):
        follow(spark, written.connect, "named.accounts", start=start)
    assert follow(spark, written.connect, "named.created", start="2100-01-01") == ends(written)
    assert content(tmp_path / "named" / "created") == {}


@with_delta
def test_a_key_in_two_partitions_fails(spark: SparkSession, tmp_path: Path, connect: str) -> None:
    with WaltzClient(connect, PATIENT) as client:
        start = {int(each): int(mark) for each, mark in client.high_water_marks().items()}

        def put(partition: int, key: int) -> None:
            client.append(msgpack.packb({"id": key}), partition=partition).result()

        place = {"table": str(tmp_path / "table"), "key": "id", "schema": "id long"}
        put(0, 7)
        waltz_spark.follow(spark, connect, **place, start=start, until="now")
        put(1, 7)
        with pytest.raises(BadRequest, match=r"the key \(7\) has .* partition 0, transaction"):
            waltz_spark.follow(spark, connect, **place, until="now")
        place["table"] = str(tmp_path / "other")
        with pytest.raises(BadRequest, match=r"the key \(7\) has .* partition 0 and partition 1, "):
            waltz_spark.follow(spark, connect, **place, start=start, until="now")


@with_delta
def test_a_restored_table_and_lost_marks_are_errors(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    follow(spark, written.connect, str(table), batch_transactions=50)
    marks = marks_by_version(table)[1]
    spark.sql(f"OPTIMIZE delta.`{table}`")
    assert follow(spark, written.connect, str(table)) == ends(written)
    spark.sql(f"RESTORE delta.`{table}` TO VERSION AS OF 1")
    df = transactions(spark.read, written.connect)
    for call in (
        lambda: follow(spark, written.connect, str(table)),
        lambda: upsert(df, written.connect, str(table)),
    ):
        with pytest.raises(BadFormat, match="is a RESTORE after the last commit of follower"):
            call()
    assert follow(spark, written.connect, str(table), follower="again", start=marks) == ends(
        written
    )
    assert content(table) == written.replayed(ends(written))
    # Commits without the metadata of this follower, as after a clean-up of the log.
    for commit in sorted((table / "_delta_log").glob("*.json")):
        commit.write_text(
            commit.read_text().replace('\\"follower\\":\\"again\\"', '\\"follower\\":\\"x\\"')
        )
        (commit.parent / f".{commit.name}.crc").unlink(missing_ok=True)
    other = spark.newSession()
    other.sql(f"REFRESH TABLE delta.`{table}`")
    with pytest.raises(BadFormat, match="but no commit with their high-water marks"):
        follow(spark, written.connect, str(table), follower="again")


@with_delta
def test_types_are_those_of_the_other_follower(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    columns = {
        "id": ("string", "string"),
        "amount": ("decimal(12,2)", "decimal128(12, 2)"),
        "seen": ("timestamp", "timestamp[us, tz=UTC]"),
        "data_of": ("binary", "binary"),
        "rate": ("double", "double"),
    }
    with WaltzClient(connect, PATIENT) as client:
        start = {int(each): int(mark) for each, mark in client.high_water_marks().items()}
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
def test_columns_may_be_declared_later_and_others_are_errors(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    place = {"table": table, "key": "id", "until": "now", "headers": [1]}
    waltz_spark.follow(spark, written.connect, **place, schema="id long, op string")
    append(written, 4)
    waltz_spark.follow(spark, written.connect, **place, schema="id long, op string, value long")
    last = spark.read.format("delta").load(table).orderBy("_transaction_id").tail(1)[0]
    assert last["value"] is not None
    for schema, message in (
        ("id long, op string", "column 'value' is not declared"),
        ("id long, op string, value int", "expected the declared type int, found bigint"),
        ("id long, _partition int", "none of _deleted, _partition, _transaction_id"),
    ):
        with pytest.raises(BadConfig, match=message):
            waltz_spark.follow(spark, written.connect, **place, schema=schema)
    with pytest.raises(BadConfig, match=r"expected an option of dataFormat, .*, found 'mode'"):
        waltz_spark.follow(spark, written.connect, **place, schema="id long", mode="PERMISSIVE")


def run_job(written: Written, table: Path, step: str, **more: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.tables_job", written.connect, str(table), step],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr[-4000:]
    return done.returncode


@with_delta
def test_a_driver_that_is_killed_continues(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    for step in STEPS:
        assert run_job(written, table, step) == -9
        check_versions(written, table)
    follow(spark, written.connect, str(table))
    check_versions(written, table)
    assert content(table) == written.replayed(ends(written))


@with_delta
def test_workers_and_executors_that_are_killed_change_nothing(
    written: Written, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert run_job(written, table, "tasks", STRUCK=str(tmp_path)) == 0
    assert (tmp_path / "worker").exists()
    assert (tmp_path / "executor").exists()
    check_versions(written, table)
    assert content(table) == written.replayed(ends(written))


@with_delta
def test_the_snippets_of_the_page_work(spark: SparkSession, tmp_path: Path) -> None:
    page = ROOT / "docs/spark-tables.md"
    text = page.read_text(encoding="utf-8").replace("/lake/", f"{tmp_path}/")
    tables_page = (ROOT / "docs/tables.md").read_text(encoding="utf-8")
    session, *rest = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    compile(session, page, "exec")  # it starts another Spark
    names = {"spark": spark, "waltz_spark": waltz_spark, "place": str(tmp_path / "place")}
    with waltz_core.local.running(tmp_path / "local", partition_count=1) as cluster:
        with WaltzClient(cluster.connect, PATIENT) as client:
            for header, row in ((1, {"id": 1, "balance": 5}), (1, {"id": 2}), (2, {"id": 2})):
                client.append(msgpack.packb(row), header=header).result()
        ledger = re.search(r"^```python\n(# ledger.py.*?)^```$", tables_page, re.M | re.S)[1]
        (tmp_path / "ledger.py").write_text(ledger)
        spark.sparkContext.addPyFile(str(tmp_path / "ledger.py"))
        for snippet in rest:
            if "ledger:entries" in snippet:
                names["query"].awaitTermination()
                with WaltzClient(cluster.connect, PATIENT) as client:
                    row = {"transfer": 1, "payer": 1, "payee": 3, "amount": 25}
                    client.append(msgpack.packb(row), header=3).result()
            here = snippet.replace("zk1:2181,zk2:2181/waltz/payments", cluster.connect)
            exec(compile(here, page, "exec"), names)
    assert names["marks"] == {0: 2}
    assert set(map(str, names["by_table"].values())) == {"{0: 3}"}
    rows = spark.read.format("delta").load(f"{tmp_path}/entries").orderBy("account").collect()
    assert [(row["account"], row["amount"]) for row in rows] == [(1, -25), (3, 25)]
    for table in ("accounts", "balances"):
        rows = spark.read.format("delta").load(f"{tmp_path}/{table}").collect()
        assert [(row["id"], row["balance"]) for row in rows] == [(1, 5)]


def opened(spark: SparkSession, table: Path) -> MergedDeltaTable:
    """Return a table of one column `id`, in a session of its own."""
    schema = StructType([StructField("id", LongType())])
    return MergedDeltaTable(spark.newSession(), str(table), schema, ["id"])


def change(spark: SparkSession, key: int) -> DataFrame:
    schema = changes_schema(StructType([StructField("id", LongType())]))
    return spark.createDataFrame([(key, 0, key, False)], schema)


NAME = TableMarks("follow", "0" * 32, {0: -1, 1: -1})


def up_to(*marks: int) -> TableMarks:
    return NAME._replace(marks=dict(enumerate(marks)))


@with_delta
def test_of_commits_that_were_prepared_on_the_same_marks_the_table_accepts_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also if the marks of the later one cover more transactions, in other partitions."""
    first, second = (opened(spark, tmp_path / "table") for _ in range(2))
    assert first.marks(NAME) is None
    first.create(NAME)
    with pytest.raises(Superseded):
        second.create(NAME._replace(follower="other"))
    assert decode(first.marks(NAME).metadata) == decode(second.marks(NAME).metadata) == NAME
    assert second.apply(change(spark, 1), up_to(1, -1))
    for marks in (up_to(1, -1), up_to(-1, 0), up_to(0, 50)):
        with pytest.raises(Superseded, match="another commit of follower 'follow' came first"):
            first.apply(change(spark, 0), marks)
    second.marks(NAME)
    assert second.apply(None, up_to(1, 0))
    second.marks(NAME)
    assert second.apply(None, up_to(2, 0))
    with pytest.raises(Superseded):
        first.apply(change(spark, 0), up_to(0, 60))
    assert decode(first.marks(NAME).metadata) == up_to(2, 0)
    assert first.apply(change(spark, 3), up_to(3, 0))
    assert [
        row["id"] for row in spark.read.format("delta").load(f"{tmp_path}/table").collect()
    ] == [1, 3]


@with_delta
def test_a_table_without_marks_accepts_one_first_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The user has created it, and two followers have other starts."""
    table = tmp_path / "table"
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id BIGINT, _partition INT, _transaction_id BIGINT) "
        "USING delta"
    )
    first, second = (opened(spark, table) for _ in range(2))
    for each in (first, second):
        assert each.marks(NAME).metadata is None
    assert second.apply(change(spark, 1), up_to(1, -1))
    with pytest.raises(Superseded):
        first.apply(change(spark, 0), up_to(8, 50))
    first.marks(NAME)
    assert first.apply(change(spark, 2), up_to(2, -1))


@with_delta
@pytest.mark.parametrize("other", ["restore", "follower"])
def test_another_commit_between_a_read_and_a_merge_is_found(
    spark: SparkSession, tmp_path: Path, other: str
) -> None:
    """Also by the next process, and behind commits that change no row."""
    first, second = (opened(spark, tmp_path / "table") for _ in range(2))
    first.create(NAME)
    first.marks(NAME)
    first.apply(change(spark, 1), up_to(1, -1))
    first.marks(NAME)
    place = f"delta.`{tmp_path}/table`"
    if other == "restore":
        spark.sql(f"RESTORE {place} TO VERSION AS OF 0")
    else:
        name = NAME._replace(follower="other")
        second.marks(name)
        second.apply(change(spark, 7), name)
    for number in range(5):
        spark.sql(f"ALTER TABLE {place} SET TBLPROPERTIES ('a' = '{number}')")
    assert first.apply(change(spark, 2), up_to(2, -1))
    for each in (first, opened(spark, tmp_path / "table")):
        state = each.marks(NAME)
        expected = (
            OtherCommit(2, "RESTORE") if other == "restore" else OtherCommit(2, "MERGE", "other")
        )
        assert state.others == [expected]
    # A follower that starts after it has no such commit.
    third = NAME._replace(follower="third")
    second.marks(third)
    second.apply(None, third)
    assert second.marks(third).others == []


@with_delta
def test_two_followers_at_once(
    spark: SparkSession,
    written: Written,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each version is a replay of its marks, although the second one commits before each MERGE."""
    table = str(tmp_path / "table")
    apply = MergedDeltaTable.apply
    ends_of_second = iter([{0: 3, 1: 40}, {0: 45, 1: 41}, {0: 46, 1: 70}])
    depth = []

    def applied_second(self: MergedDeltaTable, *args: object) -> bool:
        until = None if depth else next(ends_of_second, None)
        if until is not None:
            depth.append(until)
            follow(spark, written.connect, table, until=until, batch_transactions=30)
            depth.clear()
        return apply(self, *args)

    monkeypatch.setattr(MergedDeltaTable, "apply", applied_second)
    with caplog.at_level("INFO", logger="waltz_core.tables.follower"):
        assert follow(spark, written.connect, table) == ends(written)
    assert caplog.text.count("follow.commit_conflict") == 3
    check_versions(written, table)
    assert content(table) == written.replayed(ends(written))


@with_delta
def test_a_changes_function_in_both_followers_and_in_upsert(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    spark.sparkContext.addPyFile(str(ROOT / "tests/changing.py"))
    table = str(tmp_path / "table")
    call = {"table": table, "key": "id", "changes": "changing:pairs"}
    columns = "id long, op string, value long"
    half = {each: end // 2 for each, end in ends(written).items()}
    waltz_spark.follow(
        spark,
        written.connect,
        **call,
        schema=columns,
        until=half,
        batch_transactions=BATCH,
        minPartitions=4,
    )
    log = spark.read.format("waltz").option("dataFormat", "msgpack")
    df = log.schema(f"{columns}, header int, partition int, transaction_id long")
    waltz_spark.upsert(df.load(written.connect), written.connect, **call)
    check_versions(written, table, pair_changes)
    assert content(table) == written.replayed(ends(written), pair_changes)
    append(written, 21)
    words = ["follow", table, "--connect", written.connect, "--key", "id", "--until", "now"]
    words += [word for each in ("id", "value") for word in ("--column", f"{each}:int64")]
    words += ["--column", "op:string", "--changes", "changing:pairs"]
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    check_versions(written, table, pair_changes)
    assert content(table) == written.replayed(ends(written), pair_changes)
    call |= {"table": str(tmp_path / "other"), "changes": "changing:failing"}
    with pytest.raises(BadRequest, match=r"changing:failing for transactions from .*KeyError"):
        waltz_spark.follow(spark, written.connect, **call, schema=columns, until="now")
    with pytest.raises(BadConfig, match="either the changes function changing:failing or rules"):
        waltz_spark.follow(spark, written.connect, **call, schema=columns, delete_where="op = 'D'")
    with pytest.raises(BadConfig, match="expected a schema of the transactions, found none"):
        waltz_spark.follow(spark, written.connect, **call)


@with_delta
def test_several_tables_are_read_once_and_continue_after_an_end_between_their_commits(
    spark: SparkSession, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.sparkContext.addPyFile(str(ROOT / "tests/changing.py"))
    rules, pairs = str(tmp_path / "rules"), str(tmp_path / "pairs")
    columns = "id long, op string, value long"
    by_rules = waltz_spark.Table(
        "id", columns, [1, DELETE_HEADER], [DELETE_HEADER], delete_where="op = 'D'"
    )
    tables = {rules: by_rules, pairs: waltz_spark.Table("id", columns, changes="changing:pairs")}

    def follow_all() -> dict[str, dict[int, int]]:
        return waltz_spark.follow(
            spark, written.connect, tables=tables, until="now", batch_transactions=BATCH
        )

    follow(spark, written.connect, rules, until={0: 5, 1: 5})  # a table is added to it
    apply = MergedDeltaTable.apply
    commits = []

    def applied(self: MergedDeltaTable, *args: object) -> bool:
        found = apply(self, *args)
        commits.append(self)
        if len(commits) == 3:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr(MergedDeltaTable, "apply", applied)
        with pytest.raises(KeyboardInterrupt):
            follow_all()
    newest = [max(marks_by_version(each).items())[1] for each in tables]
    assert newest[0] != newest[1]
    assert follow_all() == dict.fromkeys(tables, ends(written))
    for each, changes in ((rules, None), (pairs, pair_changes)):
        check_versions(written, each, changes)
        assert content(each) == written.replayed(ends(written), changes)
    for wrong, message in (
        ({rules: by_rules._replace(schema=None)}, f"table {rules}: expected a schema, found none"),
        ({rules: by_rules._replace(schema="id int")}, f"table {rules}: .* one column 'op'"),
        ({}, "expected one or more tables, found none"),
    ):
        with pytest.raises(BadConfig, match=message):
            waltz_spark.follow(spark, written.connect, tables=wrong)
    with pytest.raises(BadConfig, match="expected either tables or table"):
        waltz_spark.follow(spark, written.connect, table=rules, tables=tables)
