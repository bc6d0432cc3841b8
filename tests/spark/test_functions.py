"""Lock columns equal the client library's locks bit for bit, in ANSI mode too."""

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from waltz_core.client import lock as client_lock
from waltz_core.records.record import partition_of_hash
from waltz_spark.functions import lock, partition_of

pytestmark = pytest.mark.spark

KEYS = [0, 1, -1, 7, 2**31, -(2**31), 2**63 - 1, -(2**63), 123456789012]
TEXTS = ["", "N14228", "grüße", "😀"]
NAMES = ["account", "", "😀", "a-very-long-lock-name-that-overflows-int-hash-arithmetic"]


def test_a_lock_column_equals_the_lock_of_the_client(spark: SparkSession) -> None:
    for kind, keys in (("long", KEYS), ("string", TEXTS)):
        table = spark.createDataFrame([(key,) for key in keys], f"key {kind}")
        rows = table.select(*(lock(name, F.col("key")) for name in NAMES)).collect()
        assert [tuple(row) for row in rows] == [
            tuple(client_lock(name, key) for name in NAMES) for key in keys
        ]


def test_narrow_integers_have_the_lock_of_their_value(spark: SparkSession) -> None:
    kinds = ("tinyint", "smallint", "int")
    casts = ", ".join(f"CAST(v AS {kind}) AS {kind}" for kind in kinds)
    table = spark.sql(f"SELECT {casts} FROM VALUES (0), (1), (-5) AS t(v)")
    rows = table.select(*(lock("account", kind) for kind in kinds)).collect()
    assert [tuple(row) for row in rows] == [
        (client_lock("account", key),) * len(kinds) for key in (0, 1, -5)
    ]


def test_a_null_key_has_no_lock(spark: SparkSession) -> None:
    table = spark.createDataFrame([(None,)], "key long")
    assert table.select(lock("account", "key")).collect()[0][0] is None


def test_a_lock_key_that_is_no_integer_or_string_is_rejected(spark: SparkSession) -> None:
    table = spark.sql("SELECT DATE'2013-01-01' AS key")
    with pytest.raises(Exception, match="key of a lock must be an integer or a string, not date"):
        table.select(lock("account", "key")).collect()


def test_the_partition_of_a_hash_is_the_same_as_in_the_client(spark: SparkSession) -> None:
    hashes = [0, 1, -1, 2**31 - 1, -(2**31), *[client_lock("k", n) for n in range(50)]]
    table = spark.createDataFrame([(h,) for h in hashes], "h int")
    counts = (1, 3, 4, 1000)
    rows = table.select(*(partition_of(F.col("h"), count) for count in counts)).collect()
    assert [tuple(row) for row in rows] == [
        tuple(partition_of_hash(h, count) for count in counts) for h in hashes
    ]
