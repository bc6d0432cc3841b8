"""A Spark job that follows the log of `tests/written_log.py` with two executors.

    python -m tests.chaos.endless_spark_job CONNECT TABLE          # until it is killed
    python -m tests.chaos.endless_spark_job CONNECT TABLE finish   # to the end, and once more

With `finish`, the job follows the log to its end. Then it follows the log once more, and calls
`upsert` with the whole log. If one of these two calls writes a version of the table, or if their
marks differ, the exit code is 3.
"""

import os
import sys

from deltalake import DeltaTable

import waltz_spark
from tests import java_classes, table_libraries
from tests.spark.tables_job import follow_table
from tests.written_log import DELETE_HEADER

BATCH_TRANSACTIONS = 20_000  # a job that starts again catches up with the writer
COLUMNS = "id long, op string, value long, header int, partition int, transaction_id long"


def main(connect: str, table: str, order: str = "") -> int:
    """Run the job; return the exit code."""
    java_classes.use_class_archives()
    spark = waltz_spark.session(
        "endless",
        master="local-cluster[2,1,1024]",
        **{
            "spark.sql.shuffle.partitions": "2",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            **table_libraries.spark_settings(),
        },
    )
    batches = {"batch_transactions": BATCH_TRANSACTIONS, "interval_s": 0.2}
    if order != "finish":
        follow_table(spark, connect, table, until=None, **batches)
    follow_table(spark, connect, table, **batches)
    version = DeltaTable(table).version()
    marks = follow_table(spark, connect, table, **batches)
    log = spark.read.format("waltz").schema(COLUMNS).option("headers", f"1,{DELETE_HEADER}")
    repeated = waltz_spark.upsert(
        log.option("dataFormat", "msgpack").load(connect),
        connect,
        table=table,
        key="id",
        delete_headers=[DELETE_HEADER],
        delete_where="op = 'D'",
    )
    spark.stop()
    return 0 if marks == repeated and DeltaTable(table).version() == version else 3


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    sys.exit(main(*sys.argv[1:]))
