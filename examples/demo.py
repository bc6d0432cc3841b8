"""`make demo`: writes a year of flights through Spark, reads them back, and shows a conflict.

    1. Start a real cluster on this machine: ZooKeeper, two servers, and three storages, which sync
       every append to disk.
    2. Write 336,776 departures, one transaction each, with an append lock on the aircraft.
    3. Read the departures back through Spark, and compare every column of every row.
    4. Compute a table from the log: the busiest aircraft, and where each one is.
    5. Two dispatchers decide about the same aircraft from one snapshot. The log accepts the
       decisions of the first dispatcher. The log rejects the conflicting rows of the second
       dispatcher, and names the conflicting transactions. The second dispatcher decides again from
       a new snapshot, and the log accepts these rows.

If any comparison fails, the demo ends with exit code 1.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from flights import ROW_COUNT, SCHEMA, flights
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import waltz_core.local
import waltz_spark
from waltz_core.errors import WaltzError
from waltz_spark.functions import lock, partition_of

DISPATCH = 7  # the application header of a dispatch; a departure has header 0
DISPATCH_SCHEMA = "tailnum string, origin string, dest string, dispatcher string"
ANNA_PLACES, BORIS_PLACES = (0, 40), (25, 65)  # places in the list of the busiest aircraft
SETTINGS = {"spark.sql.shuffle.partitions": "4"}  # enough for two cores and small tables
CONTESTED_COUNT = ANNA_PLACES[1] - BORIS_PLACES[0]


class FailedCheck(Exception):
    """The log has broken a guarantee: a figure differs from the expected one."""


@dataclass
class Figures:
    """The figures that the demo prints at its end."""

    rows: int = 0
    rejected: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Measure and print the duration in seconds of a step, the body of the `with` statement."""
        began = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - began
        show_line(f"   {self.seconds[what]:.1f} s")


def show_line(text: str) -> None:
    """Print a line to standard output, and flush it."""
    print(text, flush=True)


def check(what: str, *, found: object, expected: object) -> None:
    """Raise FailedCheck if a figure differs from the expected one."""
    if found != expected:
        raise FailedCheck(f"{what}: expected {expected}, found {found}")


def append_flights(table: DataFrame, connect: str, partition_count: int) -> None:
    """Append every flight with its aircraft's lock.

    A flight without a tail number has no lock; its flight number chooses the partition.
    """
    aircraft = lock("aircraft", "tailnum")
    by_flight = partition_of(lock("flight", "flight"), partition_count)
    with_cluster_argument = table.select(
        "*",
        F.array_compact(F.array(aircraft)).alias("append_locks"),
        F.when(F.col("tailnum").isNull(), by_flight).alias("partition"),
    )
    with_cluster_argument.write.format("waltz").mode("append").option("dataFormat", "msgpack").save(
        connect
    )


def read_flights(snapshot: waltz_spark.Snapshot) -> DataFrame:
    """Return the flights in the log, with their partitions and transaction IDs."""
    columns = f"{SCHEMA}, partition int, transaction_id long"
    return snapshot.read(columns, dataFormat="msgpack", headers="0")


def differing_rows(table: DataFrame, read_back: DataFrame) -> int:
    """Return how many different rows do not occur equally often in both tables."""
    columns = table.columns
    all_rows = table.select(*columns, F.lit(1).alias("side")).unionAll(
        read_back.select(*columns, F.lit(-1).alias("side"))
    )
    return all_rows.groupBy(*columns).agg(F.sum("side").alias("sides")).where("sides != 0").count()


def aircraft_table(read_back: DataFrame) -> DataFrame:
    """Compute the table of aircraft from the log: departure count and last destination of each."""
    latest = F.struct("time_hour", "sched_dep_time", "partition", "transaction_id")
    return (
        read_back.where("tailnum IS NOT NULL")
        .groupBy("tailnum")
        .agg(F.count("*").alias("departures"), F.max_by("dest", latest).alias("at"))
        .orderBy(F.desc("departures"), "tailnum")
    )


def dispatch_rows(
    spark: SparkSession, dispatcher: str, aircraft: list[tuple[str, str]], to: str
) -> DataFrame:
    """Return one row for each aircraft: its next flight, with a write lock on the aircraft."""
    rows = [(tailnum, at, to, dispatcher) for tailnum, at in aircraft]
    table = spark.createDataFrame(rows, DISPATCH_SCHEMA)
    return table.select(
        "*",
        F.array(lock("aircraft", "tailnum")).alias("write_locks"),
        F.lit(DISPATCH).alias("header"),
    )


def run_conflict(spark: SparkSession, connect: str, busiest: list[tuple[str, str]]) -> int:
    """Let two dispatchers conflict, and check the outcome; return the number of rejected rows."""
    snapshot = waltz_spark.snapshot(spark, connect)
    marks = snapshot.high_water_marks
    anna = dispatch_rows(spark, "Anna", busiest[slice(*ANNA_PLACES)], "BOS")
    boris = dispatch_rows(spark, "Boris", busiest[slice(*BORIS_PLACES)], "SFO")
    first = waltz_spark.append(anna, connect, high_water_marks=marks, dataFormat="msgpack")
    check(
        "Anna's rows committed", found=first.counts["committed"], expected=len(range(*ANNA_PLACES))
    )
    second = waltz_spark.append(boris, connect, high_water_marks=marks, dataFormat="msgpack")
    rejected = second.rejected.select(
        "tailnum", "dest", "partition", "lock_failure_transaction_id"
    ).cache()
    winners = first.committed.select(
        "tailnum", "partition", F.col("transaction_id").alias("lock_failure_transaction_id")
    )
    both = {tailnum for tailnum, _ in busiest[BORIS_PLACES[0] : ANNA_PLACES[1]]}
    check(
        "Boris's rejected aircraft",
        found={row.tailnum for row in rejected.collect()},
        expected=both,
    )
    matching_count = rejected.join(
        winners, ["tailnum", "partition", "lock_failure_transaction_id"]
    ).count()
    check("rejections that name Anna's transaction", found=matching_count, expected=CONTESTED_COUNT)
    show_line(
        "   the log rejects exactly the rows that conflict with Anna's, and names her transactions:"
    )
    rejected.orderBy("partition", "lock_failure_transaction_id").show(5, truncate=False)
    again = append_new_decisions(spark, connect, both)
    check("Boris's rows committed after a new decision", found=again, expected=CONTESTED_COUNT)
    return int(second.counts["rejected"])


def append_new_decisions(spark: SparkSession, connect: str, tailnums: set[str]) -> int:
    """Append Boris's rejected decisions again, from a new snapshot; return how many committed."""
    snapshot = waltz_spark.snapshot(spark, connect)
    sent = snapshot.read(DISPATCH_SCHEMA, dataFormat="msgpack", headers=DISPATCH)
    now = [
        (row.tailnum, row.dest)
        for row in sent.where("dispatcher = 'Anna'").collect()
        if row.tailnum in tailnums
    ]
    boris = dispatch_rows(spark, "Boris", now, "SFO")
    marks = snapshot.high_water_marks
    return int(
        waltz_spark.append(boris, connect, high_water_marks=marks, dataFormat="msgpack").counts[
            "committed"
        ]
    )


def run(spark: SparkSession, connect: str, scratch: Path) -> Figures:
    """Run steps 2 to 5 on a running cluster; return the figures."""
    figures = Figures()
    before = waltz_spark.snapshot(spark, connect)
    check("transactions in the log before the demo", found=before.read().count(), expected=0)
    table = flights(spark, scratch).cache()
    figures.rows = table.count()
    check("flights in the file", found=figures.rows, expected=ROW_COUNT)
    show_line(f"2. writing {figures.rows:,} flights through Spark into three replicas")
    with figures.measure("write"):
        append_flights(table, connect, len(before.high_water_marks))
    show_line("3. reading them back through Spark")
    read_back = read_flights(waltz_spark.snapshot(spark, connect)).cache()
    with figures.measure("read"):
        check("flights in the log", found=read_back.count(), expected=ROW_COUNT)
    show_line("   comparing every column of every row")
    with figures.measure("compare"):
        check("rows that differ", found=differing_rows(table, read_back), expected=0)
    show_line("4. from the log: the busiest aircraft, and where each aircraft is")
    rows = aircraft_table(read_back).limit(BORIS_PLACES[1]).collect()
    for row in rows[:5]:
        show_line(f"   {row.tailnum:8} {row.departures:4} departures, now at {row['at']}")
    show_line("5. two dispatchers, one snapshot, the same aircraft")
    figures.rejected = run_conflict(spark, connect, [(row.tailnum, row["at"]) for row in rows])
    return figures


def stop_spark(spark: SparkSession) -> None:
    """Terminate Spark's idle Python workers, then stop Spark.

    Spark itself only closes the pipes of the workers, and a worker then sometimes prints a
    traceback.
    """
    children = psutil.Process().children(recursive=True)
    workers = [
        child
        for child in children
        if any("pyspark.daemon" in word for word in _command_line(child))
    ]
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.terminate()
    psutil.wait_procs(workers, timeout=10)
    spark.stop()


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def main() -> int:
    """Run the demo; return the exit code: 1 after a failure."""
    parser = argparse.ArgumentParser(description="A year of flights through Waltz and Spark.")
    parser.add_argument("--connect", help="an empty cluster [default: a temporary one]")
    given = parser.parse_args().connect
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            show_line("1. starting ZooKeeper, three storages, two servers, and Spark")
            connect = given or stack.enter_context(waltz_core.local.cluster())
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            spark = waltz_spark.session("waltz demo", master="local[2]", **SETTINGS)
            stack.callback(stop_spark, spark)
            show_line(f"   {connect}")
            figures = run(spark, connect, scratch)
    except (FailedCheck, WaltzError) as error:
        show_line(f"demo: FAILED: {error}")
        return 1
    write, read = figures.seconds["write"], figures.seconds["read"]
    show_line("")
    show_line(f"rows       {figures.rows:,}")
    show_line(f"write      {write:.1f} s, {figures.rows / write:,.0f} rows/s, into three replicas")
    show_line(f"read       {read:.1f} s, {figures.rows / read:,.0f} rows/s")
    show_line(f"rejected   {figures.rejected} of the second dispatcher's rows")
    show_line(f"total      {time.monotonic() - began:.1f} s")
    show_line("demo: OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
