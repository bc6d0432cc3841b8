"""Avro and Protobuf payloads with a schema registry: written and read in tasks of a real Spark."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import SparkSession

import waltz_spark
from tests.protobuf_files import encode_descriptor, order_file
from tests.schema_registry import InProcessRegistry, run_schema_registry
from tests.spark.test_batch import ACCOUNTS, accounts, marks_of, since
from waltz_core.client import Avro, Protobuf, WaltzClient
from waltz_core.errors import BadConfig, BadFormat, BadRequest

pytestmark = pytest.mark.spark

USER = "waltz:a secret"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def registry() -> Iterator[InProcessRegistry]:
    with run_schema_registry() as registry:
        registry.user = USER
        yield registry


@pytest.fixture
def options(registry: InProcessRegistry, tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "auth"
    file.write_text(USER)
    return {
        "dataFormat": "avro",
        "schemaRegistry": registry.url,
        "schemaRegistryAuthFile": str(file),
    }


@pytest.mark.core
def test_a_table_is_written_and_read_back_in_avro(
    spark: SparkSession, connect: str, registry: InProcessRegistry, options: dict[str, str]
) -> None:
    before = marks_of(spark, connect)
    table = accounts(spark, 1000)
    result = waltz_spark.append(table, connect, **options, schemaSubject="accounts-value")
    assert result.counts["committed"] == 1000
    posts = [path for method, path in registry.requests if method == "POST"]
    assert posts == ["/subjects/accounts-value/versions"]
    back = since(spark, connect, before).options(**options).schema(ACCOUNTS).load(connect)
    assert_df_equality(back, table, ignore_row_order=True, ignore_nullable=True)
    assert "secret" not in back._jdf.queryExecution().toString()


@pytest.mark.core
def test_a_table_follows_a_log_with_avro_payloads(
    spark: SparkSession, connect: str, options: dict[str, str], tmp_path: Path
) -> None:
    before = marks_of(spark, connect)
    rows = spark.range(20).selectExpr("id", "concat('owner ', id) AS owner")
    waltz_spark.append(rows, connect, **options, schemaSubject="followed-value")
    table_options = {"schema": "id long, owner string", "format": "parquet"}
    one, several, log = (str(tmp_path / name) for name in ("one", "several", "log"))
    call = {"start": before, "until": "now"}
    waltz_spark.follow(spark, connect, table=one, **table_options, **call, **options)
    tables = {
        several: waltz_spark.Table(**table_options),
        log: waltz_spark.Table(schema="header int", format="parquet"),
    }
    waltz_spark.follow(spark, connect, tables=tables, **call, **options)
    for path in (one, several):
        selected = spark.read.parquet(path).select("id", "owner")
        assert_df_equality(selected, rows, ignore_row_order=True, ignore_nullable=True)
    assert spark.read.parquet(log).count() == 20


@pytest.mark.slow
def test_a_stream_copies_the_rows_of_a_client_under_another_subject(
    spark: SparkSession,
    connect: str,
    registry: InProcessRegistry,
    options: dict[str, str],
    tmp_path: Path,
) -> None:
    before = marks_of(spark, connect)
    fields = [{"name": "id", "type": "int"}, {"name": "owner", "type": "string"}]
    owners = Avro(
        registry.url,
        auth_file=options["schemaRegistryAuthFile"],
        subject="owners-value",
        schema={"type": "record", "name": "Owner", "fields": fields},
    )
    with WaltzClient(connect) as client:
        for number in range(5):
            data = owners.serialize({"id": number, "owner": f"owner {number}"})
            client.append(data, partition=0, header=3).result()
    starting = json.dumps({str(partition): mark for partition, mark in before.items()})
    stream = spark.readStream.format("waltz").options(**options, headers="3")
    stream = stream.option("startingHighWaterMarks", starting).schema("id long, owner string")
    query = (
        stream.load(connect)
        .writeStream.format("waltz")
        .options(**options, schemaSubject="copies-value", path=connect)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    reader = since(spark, connect, before).options(**options, headers="0")
    rows = reader.schema("id long, owner string").load(connect).orderBy("id").collect()
    assert [tuple(row) for row in rows] == [(each, f"owner {each}") for each in range(5)]
    assert len(registry.subjects["copies-value"]) == 1


def test_protobuf_is_written_and_read_with_a_registered_schema(
    spark: SparkSession, connect: str, registry: InProcessRegistry, options: dict[str, str]
) -> None:
    registry.put("orders-value", encode_descriptor(order_file()), "PROTOBUF")
    options["dataFormat"] = "protobuf"
    before = marks_of(spark, connect)
    orders = spark.range(100).selectExpr(
        "id",
        "map('a', cast(id AS int)) AS counts",
        "array(named_struct('sku', concat('s', id))) AS lines",
        "timestamp_micros(id) AS at",
    )
    orders.write.format("waltz").mode("append").options(
        **options, schemaSubject="orders-value"
    ).save(connect)
    back = since(spark, connect, before).options(**options).schema(orders.schema.toNullable())
    rows = back.load(connect).orderBy("id").collect()
    assert rows == orders.orderBy("id").collect()
    with WaltzClient(connect) as client:
        chunk = next(client.read_range(0, before[0] + 1, before[0] + 1))
        reader = Protobuf(registry.url, auth_file=options["schemaRegistryAuthFile"])
        assert reader.deserialize(next(chunk.rows()).data)["state"] == "NEW"


def test_the_snippet_of_the_page_works(
    spark: SparkSession, connect: str, registry: InProcessRegistry, options: dict[str, str]
) -> None:
    page = (ROOT / "docs/payload-schemas.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    snippet = snippet.replace("http://registry:8081", registry.url)
    snippet = snippet.replace("/etc/waltz/registry", options["schemaRegistryAuthFile"])
    names = {"spark": spark, "connect": connect}
    exec(snippet, names)
    assert ("id", "bigint") in names["rows"].dtypes
    assert len(registry.subjects["orders-value"]) == 1


def test_errors_of_the_registry_reach_the_user(
    spark: SparkSession, connect: str, registry: InProcessRegistry, options: dict[str, str]
) -> None:
    subject = {"schemaSubject": "errors-value"}
    write = spark.range(3).write.format("waltz").mode("append").options(**subject)
    before = marks_of(spark, connect)
    with pytest.raises(BadConfig, match="rejects the credentials with status 401"):
        write.options(dataFormat="avro", schemaRegistry=registry.url).save(connect)
    write.options(**options).save(connect)
    with pytest.raises(BadRequest, match="not compatible"):
        spark.range(3).selectExpr("id", "id AS other").write.format("waltz").mode("append").options(
            **subject, **options
        ).save(connect)
    assert sum(marks_of(spark, connect).values()) == sum(before.values()) + 3
    del registry.by_id[1]
    reader = since(spark, connect, before).options(**options).schema("id long")
    with pytest.raises(BadFormat, match="schema 1 does not exist in the schema registry"):
        reader.load(connect).collect()
