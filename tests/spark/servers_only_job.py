"""A job that reads and writes although its executors can reach only the servers.

    spark-submit --master spark://... servers_only_job.py CONNECT RESULTS

The last line of its output has the number of rows that it has read, and the error of the write.
"""

import json
import sys

from pyspark.sql import SparkSession

import waltz_spark
from waltz_core.errors import WaltzError


def main(connect: str, results: str) -> None:
    """Read all, write one row."""
    spark = SparkSession.builder.getOrCreate()
    read = spark.read.format("waltz").option("minPartitions", 8).load(connect).count()
    try:
        waltz_spark.append(spark.sql("SELECT 'x' AS data"), connect, resultsPath=results)
        error = ""
    except WaltzError as failure:
        error = f"{type(failure).__name__}: {failure}"
    print(json.dumps({"read": read, "error": error}))  # noqa: T201 - the submitter
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
