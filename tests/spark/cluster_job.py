"""A user's Spark job: it writes rows with locks, reads them back, and causes a conflict.

    spark-submit --master spark://... cluster_job.py CONNECT RESULTS COUNT [OPTION=VALUE ...]

The job uses only the installed package. The last line of the job's output has the results.
"""

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import waltz_spark
from waltz_spark.functions import lock

TASKS = 8
ACCOUNTS = 100


def main(connect: str, results: str, count: int, options: dict[str, str]) -> None:
    """Write, read back and compare; then write again with the marks from before the first write."""
    spark = SparkSession.builder.getOrCreate()
    before = waltz_spark.snapshot(spark, connect)
    rows = spark.range(0, count, numPartitions=TASKS).select(
        F.concat(F.lit("row "), F.col("id"), F.lit(" "), F.repeat(F.lit("."), 80)).alias("data"),
        F.array(lock("account", F.col("id") % ACCOUNTS)).alias("append_locks"),
    )
    first_append = waltz_spark.append(rows, connect, resultsPath=f"{results}/first", **options)

    # Each row of the write counts 1, and each row of the log counts -1. If the sum for a row is not
    # 0, write and log differ.
    after = waltz_spark.snapshot(spark, connect)
    reader = after.reader().option("minPartitions", TASKS)
    reader = reader.option("startingHighWaterMarks", _text(before.high_water_marks))
    log = reader.load(connect).selectExpr("CAST(data AS string) AS data")
    both = rows.select("data", F.lit(1).alias("one")).unionAll(
        log.select("data", F.lit(-1).alias("one"))
    )
    read = F.count_if(F.col("one") < 0)
    each = both.groupBy("data").agg(F.sum("one").alias("sum"), read.alias("read"))
    found = each.agg(F.sum("read"), F.count_if(F.col("sum") != 0)).first()

    stale = spark.range(0, ACCOUNTS, numPartitions=2).select(
        F.lit("stale").alias("data"),
        F.array(lock("account", F.col("id"))).alias("write_locks"),
    )
    rejected, accepted = (
        waltz_spark.append(
            stale,
            connect,
            high_water_marks=each.high_water_marks,
            resultsPath=f"{results}/{name}",
            **options,
        )
        for name, each in (("stale", before), ("fresh", after))
    )
    report = {
        "committed": first_append.counts["committed"],
        "results": first_append.committed.count(),
        "read": found[0],
        "differing": found[1],
        "refused": rejected.counts["rejected"],
        "taken": accepted.counts["committed"],
        "zone": spark.conf.get("spark.sql.session.timeZone"),
        "rows_in_batch": spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"),
    }
    print(json.dumps(report))  # noqa: T201 - the submitter reads it
    spark.stop()


def _text(marks: object) -> str:
    assert isinstance(marks, dict)
    return json.dumps({str(partition): mark for partition, mark in marks.items()})


if __name__ == "__main__":
    own, given = sys.argv[1:4], sys.argv[4:]
    main(own[0], own[1], int(own[2]), dict(each.split("=", 1) for each in given))
