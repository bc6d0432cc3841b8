"""Waltz for Spark: `format("waltz")`, `append`, `snapshot`, lock columns.

spark.read.format("waltz").load("zk1:2181,zk2:2181/waltz/payments")
df.write.format("waltz").mode("append").save("zk1:2181,zk2:2181/waltz/payments")
"""

from waltz_spark.api import Snapshot, WriteResult, append, register, session, snapshot

__all__ = ["Snapshot", "WriteResult", "append", "register", "session", "snapshot"]
