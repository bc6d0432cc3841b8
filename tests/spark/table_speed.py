"""Measures `follow` against a hand-written `foreachBatch` with `MERGE`, on the same log.

    PYSPARK_VERSION=4.2.1 scripts/run python -m tests.spark.table_speed

Each of the two writes a Delta table from a million changes of 100,000 keys, from the start of the
log, with batches of the same size. They run one after the other, in alternating order. The tables
must be equal. If the median time of `follow` is over the limit, the exit code is 1.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgpack
import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

import waltz_core.local
import waltz_spark
from tests import table_libraries
from tests.fault.load import wait_until
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient

PARTITIONS = 4
COLUMNS = ("id", "op", "amount", "owner", "note")
SCHEMA = "id long, op string, amount double, owner string, note string"
DELETE_SHARE = 0.03
WARM_UP = 20_000
SLOWDOWN_MAX = 1.1

Measurement = tuple[float, float]  # seconds, and CPU seconds of Spark


def append_changes(connect: str, changes: int, keys: int, seed: int) -> None:
    """Append changes of random keys; a key is in one partition."""
    rng = random.Random(seed)
    with WaltzClient(connect, PATIENT_CLIENT) as client:
        for _ in range(changes):
            key = rng.randrange(keys)
            row = {
                "id": key,
                "op": "D" if rng.random() < DELETE_SHARE else "U",
                "amount": rng.uniform(0, 1_000),
                "owner": f"customer {rng.randrange(keys)}",
                "note": f"{rng.getrandbits(128):032x}",
            }
            client.append(msgpack.packb(row), partition=key % PARTITIONS)
        wait_until("all outcomes", lambda: not client.has_pending)
        assert sum(client.high_water_marks().values()) + PARTITIONS == changes


def follow_with_waltz(spark: SparkSession, connect: str, table: Path, batch: int) -> None:
    """Write the table with `follow`."""
    waltz_spark.follow(
        spark,
        connect,
        table=str(table),
        key="id",
        schema=SCHEMA,
        delete_where="op = 'D'",
        until="now",
        batch_transactions=batch,
    )


def merge_by_hand(spark: SparkSession, connect: str, table: Path, batch: int) -> None:
    """Write the table with a hand-written `foreachBatch`."""
    path = table / "rows"
    spark.createDataFrame([], SCHEMA).write.format("delta").save(str(path))
    newest_first = Window.partitionBy("id").orderBy(F.desc("transaction_id"))
    sets = ", ".join(f"{name} = source.{name}" for name in COLUMNS)
    values = ", ".join(f"source.{name}" for name in COLUMNS)

    def apply(df: DataFrame, _number: int) -> None:
        latest = df.withColumn("place", F.row_number().over(newest_first)).where("place = 1")
        latest.createOrReplaceTempView("source_of_batch")
        df.sparkSession.sql(
            f"MERGE INTO delta.`{path}` AS target USING source_of_batch AS source "
            "ON target.id = source.id "
            "WHEN MATCHED AND source.op = 'D' THEN DELETE "
            f"WHEN MATCHED THEN UPDATE SET {sets} "
            f"WHEN NOT MATCHED AND source.op <> 'D' THEN INSERT ({', '.join(COLUMNS)}) "
            f"VALUES ({values})"
        )

    log = (
        spark.readStream.format("waltz")
        .schema(f"{SCHEMA}, transaction_id long")
        .option("dataFormat", "msgpack")
        .option("startingHighWaterMarks", "earliest")
        .option("maxTransactionsPerTrigger", batch)
        .load(connect)
    )
    writer = log.writeStream.foreachBatch(apply).trigger(availableNow=True)
    writer.option("checkpointLocation", str(table / "checkpoint")).start().awaitTermination()


def measure(spark: SparkSession, work: Callable[[], None]) -> Measurement:
    """Return the time of some work, and the CPU time that Spark needs for it."""
    cpu_s = cpu_seconds(spark)
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s, cpu_seconds(spark) - cpu_s


def cpu_seconds(spark: SparkSession) -> float:
    """Return the CPU time of Spark's Java, its Python workers and this process."""
    java = psutil.Process(spark.sparkContext._gateway.proc.pid)
    times = [psutil.Process().cpu_times(), java.cpu_times()]
    times += [child.cpu_times() for child in java.children(recursive=True)]
    return sum(each.user + each.system for each in times)


def read_payload_columns(spark: SparkSession, path: Path) -> DataFrame:
    """Return the columns of the payload."""
    return spark.read.format("delta").load(str(path)).select(*COLUMNS)


def measure_rounds(
    spark: SparkSession, connect: str, directory: Path, batch: int, count: int
) -> Iterator[tuple[Measurement, Measurement]]:
    """Yield the measurements of `follow` and of the hand-written code, round by round."""
    for number in range(count):
        paths = {
            each: directory / f"{number}-{each.__name__}"
            for each in (follow_with_waltz, merge_by_hand)
        }
        found = {}
        for each in sorted(paths, key=lambda each: each.__name__, reverse=number % 2 == 1):
            work = partial(each, spark, connect, paths[each], batch)
            found[each] = measure(spark, work)
        rows = [
            read_payload_columns(spark, paths[follow_with_waltz]),
            read_payload_columns(spark, paths[merge_by_hand] / "rows"),
        ]
        differ = rows[0].exceptAll(rows[1]).count() + rows[1].exceptAll(rows[0]).count()
        assert not differ, f"the tables differ in {differ} rows"
        yield found[follow_with_waltz], found[merge_by_hand]


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.table_speed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=250_000, help="transactions of a commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=SLOWDOWN_MAX, help=f"default {SLOWDOWN_MAX}")
    arguments = parser.parse_args()
    if not table_libraries.DELTA.jars():
        parser.error(table_libraries.DELTA.missing_reason())
    settings = {"spark.sql.shuffle.partitions": "4", **table_libraries.spark_settings()}
    spark = waltz_spark.session("table-speed", master="local[*]", **settings)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with waltz_core.local.cluster(directory / "warm", partition_count=PARTITIONS) as connect:
            append_changes(connect, WARM_UP, WARM_UP // 10, seed=0)
            list(measure_rounds(spark, connect, directory / "first", WARM_UP // 2, 1))
        with waltz_core.local.cluster(directory / "local", partition_count=PARTITIONS) as connect:
            append_changes(connect, arguments.changes, arguments.keys, seed=1)
            found = []
            for follow_times, merge_times in measure_rounds(
                spark, connect, directory, arguments.batch, arguments.rounds
            ):
                found.append((follow_times, merge_times))
                print_line(
                    f"follow {follow_times[0]:.1f} s, CPU {follow_times[1]:.1f} s; "
                    f"foreachBatch {merge_times[0]:.1f} s, CPU {merge_times[1]:.1f} s"
                )
    spark.stop()
    medians = [
        statistics.median(each[side][what] for each in found) for what in (0, 1) for side in (0, 1)
    ]
    report = {
        "changes": arguments.changes,
        "keys": arguments.keys,
        "follow_s": round(medians[0], 1),
        "foreach_batch_s": round(medians[1], 1),
        "ratio": round(medians[0] / medians[1], 2),
        "cpu_ratio": round(medians[2] / medians[3], 2),
    }
    print_line(json.dumps(report))
    return int(medians[0] > arguments.limit * medians[1])


def print_line(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)  # noqa: T201 - the person at the terminal


if __name__ == "__main__":
    sys.exit(main())
