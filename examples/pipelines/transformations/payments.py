"""A table of all payments of the log, and a flow that appends to the log.

`$WALTZ_CONNECT` is the log. Header 1 is a payment, header 2 an alert.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


@dp.table
def payments() -> DataFrame:
    """All payments; each run adds the new ones."""
    log = spark.readStream.format("waltz").option("startingHighWaterMarks", "earliest")
    log = log.option("headers", "1").option("dataFormat", "msgpack")
    return log.schema("account string, amount long, partition int, transaction_id long").load()


dp.create_sink("log", format="waltz", options={"dataFormat": "msgpack"})


@dp.append_flow(target="log")
def alerts() -> DataFrame:
    """Large payments, which become transactions with header 2."""
    large = spark.readStream.table("payments").where("amount >= 1000")
    return large.select("account", "amount", F.lit(2).alias("header"))
