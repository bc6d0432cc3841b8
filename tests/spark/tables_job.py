"""A Spark job that follows the log with a table, and is killed.

    python -m tests.spark.tables_job CONNECT TABLE STEP

TABLE is the path of a Delta table or, with FORMAT=parquet in the environment, the path of a table
of Parquet files. TABLE can also be the name of an Iceberg table in the directory WAREHOUSE.

STEP is a step at which the driver kills itself and its Java process, or `tasks`. With `tasks`, the
job runs on a master with two executors (`local-cluster`). The Python worker of the first running
task and the executor of the second task are killed.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql import SparkSession

import waltz_spark
from tests import table_libraries
from tests.written_log import DELETE_HEADER
from waltz_spark.tables import iceberg_table, log_changes, merged_table

DURING_A_COMMIT = "in apply"
STEPS = ("after finish", "after marks", "before apply", DURING_A_COMMIT, "after apply")
BATCH_TRANSACTIONS = 40
CATALOG_NAME = "lake"


class KillingRead(log_changes.LastChangesRead):
    """Kills the worker of one task, and the executor of another one, in the middle of a read."""

    directory = Path(os.environ.get("STRUCK", tempfile.gettempdir()))

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in super().__call__(numbers):
            yield batch.slice(0, 1)
            for victim in ("worker", "executor"):
                try:
                    (self.directory / victim).touch(exist_ok=False)
                except FileExistsError:
                    continue
                worker = psutil.Process()
                (worker if victim == "worker" else worker.parent().parent()).kill()
                signal.pause()  # the process is killed here
            yield batch.slice(1)


def catalog_settings(warehouse: Path | str) -> dict[str, str]:
    """Return the settings of a catalog of Iceberg tables in a directory."""
    name = f"spark.sql.catalog.{CATALOG_NAME}"
    return {
        name: "org.apache.iceberg.spark.SparkCatalog",
        f"{name}.type": "hadoop",
        f"{name}.warehouse": str(warehouse),
    }


def follow_table(spark: SparkSession, connect: str, table: str, **more: Any) -> dict[int, int]:
    """Follow the log of `tests/written_log.py`."""
    return waltz_spark.follow(
        spark,
        connect,
        table=table,
        schema="id long, op string, value long",
        delete_headers=[DELETE_HEADER],
        delete_where="op = 'D'",
        **{
            "key": "id",
            "headers": [1, DELETE_HEADER],
            "batch_transactions": BATCH_TRANSACTIONS,
            "until": "now",
            **more,
        },
    )


def follow_parquet_files(spark: SparkSession, connect: str, table: str) -> dict[int, int]:
    """Follow the same log with Parquet files."""
    return waltz_spark.follow(
        spark,
        connect,
        table=table,
        format="parquet",
        schema="id long, op string, value long",
        headers=[1],
        batch_transactions=BATCH_TRANSACTIONS,
        until="now",
    )


def method_ending_at(
    step: str,
    end: Callable[[], None],
    table: Path,
    owner: type = merged_table.MergedDeltaTable,
) -> tuple[str, Callable[..., Any]]:
    """Return a method of a table's class, by name, that calls a function at a step."""
    when, name = step.split()
    method = getattr(owner, name)

    def end_when_files_are_written() -> None:
        known = set(table.glob("*.parquet"))
        while set(table.glob("*.parquet")) <= known:
            pass
        end()

    @wraps(method)
    def ending(*args: Any) -> Any:
        if when == "before":
            end()
        if when == "in":
            threading.Thread(target=end_when_files_are_written, daemon=True).start()
        result = method(*args)
        if when == "after":
            end()
        return result

    return name, ending


def main(connect: str, table: str, step: str) -> None:
    """Run the job."""
    is_cluster = step == "tasks"
    settings = {"spark.sql.shuffle.partitions": "2", **table_libraries.spark_settings()}
    if is_cluster:
        settings["spark.executor.memory"] = "512m"
        log_changes.LastChangesRead = KillingRead  # type: ignore[misc]
    is_iceberg = "WAREHOUSE" in os.environ
    if is_iceberg:
        settings |= catalog_settings(os.environ["WAREHOUSE"])
    master = "local-cluster[2,1,1024]" if is_cluster else "local[2]"
    spark = waltz_spark.session("tables", master=master, **settings)
    java = spark.sparkContext._gateway.proc.pid

    def kill() -> None:
        for pid in (java, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    if not is_cluster:
        owner = iceberg_table.MergedIcebergTable if is_iceberg else merged_table.MergedDeltaTable
        setattr(owner, *method_ending_at(step, kill, Path(table), owner))
    if os.environ.get("FORMAT") == "parquet":
        follow_parquet_files(spark, connect, table)
    else:
        follow_table(spark, connect, table, format="iceberg" if is_iceberg else None)
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    main(*sys.argv[1:])
