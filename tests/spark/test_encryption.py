"""Encrypted payloads in Spark: one key for each row, missing keys, and repeated attempts."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.spark.test_earlier_rows import Write, batches_of, counted_once, rows_of, run_until_killed
from waltz_core.client import MSGPACK, WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_spark.functions import lock

pytestmark = pytest.mark.spark

SCHEMA = "id long, customer string, transaction_id long, data_error string"
FUNCTIONS = Path(__file__).parent / "recompute_functions.py"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with the keys of three customers."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for number in range(3):
        (keys / f"customer-{number}").write_text(f"{number:064x}\n")
    return keys


def without(directory: Path, key_id: str) -> Path:
    """Return a directory that lacks a key; no process has cached its keys."""
    remaining_keys = directory.with_name(f"without-{key_id}")
    shutil.copytree(directory, remaining_keys)
    (remaining_keys / key_id).unlink()
    return remaining_keys


def marks_of(spark: SparkSession, connect: str) -> str:
    marks = waltz_spark.snapshot(spark, connect).high_water_marks
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


def customers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).withColumn("customer", F.expr("concat('customer-', id % 3)"))


def payloads(connect: str, marks: str, **settings: object) -> list[object]:
    """Return the payloads that a client reads after the given marks."""
    found: list[object] = []
    with WaltzClient(connect, ClientConfig(**settings)) as client:
        for partition, last in client.high_water_marks().items():
            for chunk in client.read_range(partition, json.loads(marks)[str(partition)] + 1, last):
                found += [row.data for row in chunk.rows()]
    return found


@pytest.mark.core
def test_rows_have_their_own_keys_and_a_destroyed_key_hides_only_its_rows(
    spark: SparkSession, connect: str, directory: Path
) -> None:
    before = marks_of(spark, connect)
    written = customers(spark, 300)
    options = {"dataFormat": "msgpack", "encryptionKeys": str(directory)}
    written.write.format("waltz").mode("append").options(
        **options, encryptionKeyIdColumn="customer"
    ).save(connect)
    since = {"startingHighWaterMarks": before, "connect": connect}
    reader = spark.read.format("waltz").options(**since, **options).schema(SCHEMA)
    assert reader.load().where("data_error IS NOT NULL").count() == 0
    rows = {(row.id, row.customer) for row in reader.load().collect()}
    assert rows == {(row.id, row.customer) for row in written.collect()}
    # The log has envelopes. They contain the IDs of the keys, but no plain text.
    stored = payloads(connect, before)
    assert len(stored) == 300
    assert Counter(bytes(each)[:15] for each in stored) == {
        b"WZE\x01\x0acustomer-%d" % number: 100 for number in range(3)
    }
    remaining_keys = str(without(directory, "customer-1"))
    for mode in ("FAILFAST", "DROPMALFORMED", "PERMISSIVE"):
        frame = reader.options(encryptionKeys=remaining_keys, mode=mode).load()
        reasons = frame.groupBy("data_error").count().collect()
        assert {(row.data_error, row["count"]) for row in reasons} == {
            (None, 200),
            ("the key 'customer-1' does not exist", 100),
        }
        lost = frame.where("data_error IS NOT NULL")
        assert lost.where("id IS NULL AND customer IS NULL").count() == 100
        assert lost.where("transaction_id IS NULL").count() == 0
    # A client has the same keys.
    plain = payloads(connect, before, encryption_keys=remaining_keys)
    assert plain.count(None) == 100


@pytest.mark.core
@pytest.mark.slow
def test_a_follower_fails_on_a_payload_that_it_cannot_decrypt(
    spark: SparkSession, connect: str, directory: Path, tmp_path: Path
) -> None:
    """The test uses declared columns, a changes function, and several tables."""
    spark.sparkContext.addPyFile(str(ROOT / "tests/changes_functions.py"))
    marks = json.loads(marks_of(spark, connect))
    customers(spark, 30).write.format("waltz").mode("append").options(
        dataFormat="msgpack", encryptionKeys=str(directory), encryptionKeyIdColumn="customer"
    ).save(connect)
    table, schema = str(tmp_path / "table"), "id long, op string, value long, customer string"
    table_options = {"schema": schema, "format": "parquet"}
    call = {"start": {int(partition): mark for partition, mark in marks.items()}, "until": "now"}
    remaining_keys = str(without(directory, "customer-1"))
    reason = r"partition \d+, transaction \d+: the key 'customer-1' does not exist\. Hint: use"
    for tables in (
        {"table": table, **table_options},
        {"table": table, **table_options, "changes": "changes_functions:return_pairs"},
        {"tables": {table: waltz_spark.Table(**table_options)}},
    ):
        with pytest.raises(BadFormat, match=reason):
            waltz_spark.follow(spark, connect, **tables, **call, encryptionKeys=remaining_keys)
    named = {**table_options, "schema": "id long, data_error string"}
    with pytest.raises(BadConfig, match="column 'data_error': this name is reserved"):
        waltz_spark.follow(spark, connect, table=table, **named, encryptionKeys=remaining_keys)
    for tables in (
        {"table": table, **table_options},
        {"tables": {f"{table}-of-several": waltz_spark.Table(**table_options)}},
    ):
        waltz_spark.follow(spark, connect, **tables, **call, encryptionKeys=str(directory))
    for path in (table, f"{table}-of-several"):
        rows = spark.read.parquet(path).collect()
        assert {(row.id, row.customer) for row in rows} == {
            (number, f"customer-{number % 3}") for number in range(30)
        }


def test_a_read_needs_its_encryption_keys_only_in_tasks(
    spark: SparkSession, connect: str, directory: Path
) -> None:
    before = marks_of(spark, connect)
    options = {"encryptionKeys": str(directory), "encryptionKeyId": "customer-0"}
    secret = spark.createDataFrame([("a secret", 0, 9)], "data string, partition int, header int")
    secret.write.format("waltz").mode("append").options(**options).save(connect)
    spark.createDataFrame([("plain", 0)], "data string, partition int").write.format("waltz").mode(
        "append"
    ).save(connect)
    reader = spark.read.format("waltz").option("startingHighWaterMarks", before)
    reader = reader.option("encryptionKeys", str(directory))
    rows = reader.load(connect).orderBy("transaction_id").collect()
    assert [(bytes(row.data), row.data_error) for row in rows] == [
        (b"a secret", None),
        (b"plain", None),
    ]
    required = reader.option("requireEncryption", "true").load(connect)
    reasons = [row.data_error for row in required.orderBy("transaction_id").collect()]
    assert reasons == [None, "the payload is not encrypted"]
    wrong = reader.option("encryptionKeys", "/no/such/directory")
    with pytest.raises(BadConfig, match="encryption keys: the directory '/no/such/directory'"):
        wrong.load(connect).collect()
    assert wrong.option("columns", "header").load(connect).count() == 2  # no payload, no key


def test_the_snippet_of_the_page_works(spark: SparkSession, connect: str, directory: Path) -> None:
    page = (ROOT / "docs/encryption.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(
        r"^```python\n(payments = spark.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    for number in (7, 8):
        (directory / f"customer-{number}").write_text(f"{number:064x}")
    before = marks_of(spark, connect)
    names = {"spark": spark, "connect": connect}
    exec(snippet.replace("/etc/waltz/keys", str(directory)), names)
    assert ("id", "bigint") in names["rows"].dtypes
    assert len(payloads(connect, before)) == 2
    found = payloads(connect, before, encryption_keys=str(directory))
    assert sorted(MSGPACK.deserialize(each)["customer"] for each in found) == [
        "customer-7",
        "customer-8",
    ]


@pytest.mark.slow
def test_a_stream_decrypts_payloads_and_encrypts_its_output(
    spark: SparkSession, connect: str, directory: Path, tmp_path: Path
) -> None:
    before = marks_of(spark, connect)
    options = {"dataFormat": "json", "encryptionKeys": str(directory)}
    customers(spark, 30).write.format("waltz").mode("append").options(
        **options, encryptionKeyIdColumn="customer"
    ).save(connect)
    options_without_key = options | {"encryptionKeys": str(without(directory, "customer-2"))}
    query = (
        spark.readStream.format("waltz")
        .options(**options_without_key, startingHighWaterMarks=before)
        .schema(SCHEMA)
        .load(connect)
        .writeStream.format("waltz")
        .options(
            dataFormat="json",
            encryptionKeys=str(directory),
            encryptionKeyId="customer-0",
            checkpointLocation=str(tmp_path / "checkpoint"),
        )
        .trigger(availableNow=True)
    )
    middle = marks_of(spark, connect)
    query.start(connect).awaitTermination()
    reader = spark.read.format("waltz").options(**options, startingHighWaterMarks=middle)
    rows = reader.schema("id long, customer string").load(connect).collect()
    assert sorted(row.id for row in rows if row.id is not None) == [
        number for number in range(30) if number % 3 < 2
    ]
    assert sum(row.id is None for row in rows) == 10


def encrypted_write(connect: str, name: str, directory: Path) -> Write:
    return Write(
        connect, name, encryptionKeys=str(directory), encryptionKeyId=f"customer-{len(name) % 3}"
    )


@pytest.fixture
def write(connect: str, request: pytest.FixtureRequest, directory: Path) -> Iterator[Write]:
    made = encrypted_write(connect, request.node.name, directory)
    yield made
    made.client.close()


def decrypted_in_log(write: Write, directory: Path) -> Counter[bytes]:
    marks = json.dumps({str(partition): mark for partition, mark in write.marks.items()})
    return Counter(payloads(write.connect, marks, encryption_keys=str(directory)))


def test_an_attempt_finds_the_encrypted_rows_of_the_previous_attempt(
    write: Write, directory: Path
) -> None:
    rows, job = rows_of(0, 200), write.job()
    run_until_killed(write, job, rows, 120)
    written = job.write_task(batches_of(rows, 33), 0, 1)
    assert written.found >= 120
    write.finish(job, written)
    assert decrypted_in_log(write, directory) == counted_once(rows)
    # A finished write compares its rows as plain text.
    again = write.job()
    result = again.write_task(batches_of(rows), 0, 2)
    write.finish(again, result)
    assert result.was_done
    assert decrypted_in_log(write, directory) == counted_once(rows)


def test_a_run_with_another_key_continues_and_a_run_without_the_old_key_fails(
    connect: str, write: Write, directory: Path
) -> None:
    rows, job = rows_of(0, 60), write.job()
    run_until_killed(write, job, rows, 40)
    used = write.options.encryption_key_id
    other = next(path.name for path in directory.iterdir() if path.name != used)
    write_without_key = Write(
        connect, write.name, encryptionKeys=str(without(directory, used)), encryptionKeyId=other
    )
    with pytest.raises(
        BadRequest,
        match=f"its payload cannot be read: the key '{used}' does not exist",
    ):
        write_without_key.job().write_task(batches_of(rows), 0, 1)
    write_without_key.client.close()
    rotated = Write(connect, write.name, encryptionKeys=str(directory), encryptionKeyId=other)
    written = rotated.job().write_task(batches_of(rows), 0, 2)
    rotated.client.close()
    assert written.found >= 40
    assert decrypted_in_log(write, directory) == counted_once(rows)


def test_rejected_rows_are_recomputed_from_decrypted_rows(
    spark: SparkSession, connect: str, directory: Path
) -> None:
    spark.addArtifact(str(FUNCTIONS), pyfile=True)
    sys.path.insert(0, str(FUNCTIONS.parent))
    snapshot = waltz_spark.snapshot(spark, connect)
    before = marks_of(spark, connect)
    options = {
        "dataFormat": "json",
        "encryptionKeys": str(directory),
        "encryptionKeyIdColumn": "customer",
    }
    for more in (5, 7):
        rows = spark.range(1).select(
            F.lit(4711).alias("key"),
            F.lit(more).alias("more"),
            F.lit(more).alias("value"),
            F.lit(f"customer-{more % 3}").alias("customer"),
            F.array(lock("encrypted counter", F.lit(4711))).alias("write_locks"),
        )
        result = waltz_spark.append(
            rows,
            connect,
            high_water_marks=snapshot.high_water_marks,
            onLockFailure="retry",
            recompute="recompute_functions:add_to_newest",
            **options,
        )
        assert result.counts["committed"] == 1
    sys.path.remove(str(FUNCTIONS.parent))
    found = [
        json.loads(payload)["value"]
        for payload in payloads(connect, before, encryption_keys=str(directory))
    ]
    assert found == [5, 12]
