"""Changes functions and several tables of one follower in Spark: each table equals its replay."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import waltz_spark
from tests import table_libraries
from tests.changes_functions import pair_changes
from tests.commands import run_command
from tests.spark.tables_job import BATCH_TRANSACTIONS, follow_table
from tests.time_limits import PATIENT_CLIENT
from tests.written_log import (
    DELETE_HEADER,
    WrittenLog,
    check_versions,
    end_marks,
    marks_by_version,
    read_table,
)
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.tables.merged_table import MergedDeltaTable

pytestmark = [pytest.mark.spark, pytest.mark.core]
PAIRS, FAILING = "changes_functions:return_pairs", "changes_functions:raise_key_error"
with_delta = pytest.mark.skipif(
    not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason()
)

ROOT = Path(__file__).parents[2]


@pytest.mark.versions
@with_delta
def test_both_followers_and_upsert_apply_a_changes_function(
    spark: SparkSession, written: WrittenLog, tmp_path: Path
) -> None:
    spark.sparkContext.addPyFile(str(ROOT / "tests/changes_functions.py"))
    table = str(tmp_path / "table")
    call = {"table": table, "key": "id", "changes": PAIRS}
    columns = "id long, op string, value long"
    half = {partition: end // 2 for partition, end in end_marks(written).items()}
    waltz_spark.follow(
        spark,
        written.connect,
        **call,
        schema=columns,
        until=half,
        batch_transactions=BATCH_TRANSACTIONS,
        minPartitions=4,
    )
    log = spark.read.format("waltz").option("dataFormat", "msgpack")
    df = log.schema(f"{columns}, header int, partition int, transaction_id long")
    waltz_spark.upsert(df.load(written.connect), written.connect, **call)
    check_versions(written, table, pair_changes)
    assert read_table(table) == written.replayed(end_marks(written), pair_changes)
    with WaltzClient(written.connect, PATIENT_CLIENT) as client:
        written.append(client, 21)
    words = ["follow", table, "--connect", written.connect, "--key", "id", "--until", "now"]
    words += [word for each in ("id", "value") for word in ("--column", f"{each}:int64")]
    words += ["--column", "op:string", "--changes", PAIRS]
    result = run_command(*words)
    assert result.returncode == 0, result.stderr
    check_versions(written, table, pair_changes)
    assert read_table(table) == written.replayed(end_marks(written), pair_changes)
    call |= {"table": str(tmp_path / "other"), "changes": FAILING}
    with pytest.raises(BadRequest, match=rf"{FAILING} \(first transaction: .*KeyError"):
        waltz_spark.follow(spark, written.connect, **call, schema=columns, until="now")
    with pytest.raises(BadConfig, match=f"either the changes function {FAILING} or rules"):
        waltz_spark.follow(spark, written.connect, **call, schema=columns, delete_where="op = 'D'")
    with pytest.raises(BadConfig, match="expected a schema of the transactions, found none"):
        waltz_spark.follow(spark, written.connect, **call)


@with_delta
@pytest.mark.slow
def test_tables_are_read_once_and_continue_after_an_interrupt_between_their_commits(
    spark: SparkSession, written: WrittenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.sparkContext.addPyFile(str(ROOT / "tests/changes_functions.py"))
    rules, pairs = str(tmp_path / "rules"), str(tmp_path / "pairs")
    columns = "id long, op string, value long"
    by_rules = waltz_spark.Table(
        "id", columns, [1, DELETE_HEADER], [DELETE_HEADER], delete_where="op = 'D'"
    )
    tables = {
        rules: by_rules,
        pairs: waltz_spark.Table("id", columns, changes=PAIRS),
    }

    def follow_all() -> dict[str, dict[int, int]]:
        return waltz_spark.follow(
            spark,
            written.connect,
            tables=tables,
            until="now",
            batch_transactions=BATCH_TRANSACTIONS,
        )

    follow_table(spark, written.connect, rules, until={0: 5, 1: 5})  # a table is added to it
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
    newest = [max(marks_by_version(table).items())[1] for table in tables]
    assert newest[0] != newest[1]
    assert follow_all() == dict.fromkeys(tables, end_marks(written))
    for each, changes in ((rules, None), (pairs, pair_changes)):
        check_versions(written, each, changes)
        assert read_table(each) == written.replayed(end_marks(written), changes)
    for wrong, message in (
        ({rules: by_rules._replace(schema=None)}, f"table {rules}: expected a schema, found none"),
        ({rules: by_rules._replace(schema="id int")}, f"table {rules}: .* one column 'op'"),
        ({}, "expected one or more tables, found none"),
    ):
        with pytest.raises(BadConfig, match=message):
            waltz_spark.follow(spark, written.connect, tables=wrong)
    with pytest.raises(BadConfig, match="expected either the argument tables, or table"):
        waltz_spark.follow(spark, written.connect, table=rules, tables=tables)
