"""A change feed in Spark: a batch and a stream have the rows of a replay in plain Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.spark.test_stream import as_json, await_end, marks_of
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.spark.feeds import DELETE_HEADER, Transaction, expected_rows, transaction_with
from waltz_core.client import WaltzClient
from waltz_core.errors import BadFormat
from waltz_spark import error_of
from waltz_spark.datasource import feed_state

pytestmark = pytest.mark.spark

HEADER = 70
PARTITION = 2
SCHEMA = "id long, op string, amount long, _change_type string, transaction_id long"
OPTIONS = {
    "dataFormat": "msgpack",
    "changeFeed": "true",
    "key": "id",
    # The cluster has transactions of other tests, too.
    "headers": f"{HEADER},{DELETE_HEADER}",
    "deleteHeaders": str(DELETE_HEADER),
    "deleteWhere": "op = 'D'",
    "partitions": str(PARTITION),
    "mode": "DROPMALFORMED",
}


def append(connect: str, transactions: Sequence[Transaction]) -> None:
    with WaltzClient(connect) as client:
        futures = [
            client.append(transaction.data, header=transaction.header, partition=PARTITION)
            for transaction in transactions
        ]
        for future in futures:
            future.result(TEST_TIMEOUT_S)


def logged(connect: str) -> list[Transaction]:
    """Return the transactions of the partition; transactions of other tests are not changes."""
    with WaltzClient(connect) as client:
        last = client.high_water_marks()[PARTITION]
        rows = [row for chunk in client.read_range(PARTITION, 0, last) for row in chunk.rows()]
    chosen = (HEADER, DELETE_HEADER)
    return [Transaction(header, data if header in chosen else b"") for _, header, data in rows]


def feed(reader: Any, connect: str, **options: object) -> DataFrame:
    return reader.format("waltz").schema(SCHEMA).options(**OPTIONS | options).load(connect)


def rows_of(table: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in table.collect()]


def changes(first: int, count: int) -> list[Transaction]:
    found = [
        transaction_with(HEADER, id=n % 7, op="IUD"[n % 3], amount=n)
        for n in range(first, first + count)
    ]
    return [*found, transaction_with(DELETE_HEADER, id=3), Transaction(HEADER, b"\xc1")]


@pytest.mark.core
def test_a_batch_read_has_the_changes_after_its_start(spark: SparkSession, connect: str) -> None:
    append(connect, changes(0, 50))
    middle = marks_of(connect)[PARTITION] - 20
    expected = expected_rows(logged(connect))
    assert rows_of(feed(spark.read, connect)) == expected
    starting = as_json({PARTITION: middle})
    machine = feed(spark.read, connect, startingHighWaterMarks=starting)
    assert rows_of(machine) == [row for row in expected if row[-1] > middle]
    assert machine.where("_change_type = 'delete'").count() > 0
    with pytest.raises(Exception, match="expected a payload in msgpack") as failure:
        rows_of(feed(spark.read, connect, mode="FAILFAST", startingHighWaterMarks=starting))
    assert isinstance(error_of(failure.value), BadFormat)


def states() -> set[Path]:
    file = feed_state.state_file_path("any")
    assert file is not None
    return set(file.parent.glob("*.sqlite"))


@pytest.mark.slow
@pytest.mark.core
def test_a_stream_continues_with_the_state_of_its_last_micro_batch(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    append(connect, changes(0, 30))
    begin, before = marks_of(connect)[PARTITION], states()
    starting = as_json({PARTITION: begin})
    for times in range(1, 4):
        append(connect, changes(times, 20))
        table = feed(
            spark.readStream, connect, startingHighWaterMarks=starting, maxTransactionsPerTrigger=15
        )
        await_end(
            table.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("path", str(tmp_path / "files"))
            .trigger(availableNow=True)
            .start()
        )
    rows = rows_of(spark.read.parquet(str(tmp_path / "files")))
    expected = [row for row in expected_rows(logged(connect)) if row[-1] > begin]
    assert sorted(rows, key=str) == sorted(expected, key=str)
    (file,) = states() - before
    state = feed_state.open_cached_state(file)
    assert state is not None
    assert state.mark == marks_of(connect)[PARTITION]
    state.close()
