"""The encrypted write of `exactly_once_job.py`. A function returns the encryption keys.

Each task has its own key. The log has the ID of this key in plain text. The workers get the module
with the keys from Spark.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import waltz_spark
from tests.spark.exactly_once_rows import EXPECTED_PREFIXES, ROWS, TASKS, make_rows, read_marks
from tests.spark.log_payloads import payload_counts
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig

KEY_SERVICE = Path(__file__).with_name("key_services.py")
FailingStep = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def count_decrypted(
    connect: str, after: Mapping[int, int], function: str
) -> Counter[tuple[bytes | None, str | None]]:
    """Return the payloads after the marks, or the errors, that a client with these keys reads."""
    counts: Counter[tuple[bytes | None, str | None]] = Counter()
    config = ClientConfig(encryption_keys=f"tests.spark.key_services:{function}")
    with WaltzClient(connect, config) as client:
        for partition, last in client.high_water_marks(linearizable=True).items():
            for chunk in client.read_range(partition, after[partition] + 1, last):
                counts.update(
                    (row.data and row.data.rstrip(b"x"), row.data_error) for row in chunk.rows()
                )
    return counts


def run(
    spark: SparkSession, connect: str, fails_once_of: Callable[[Mapping[int, int]], FailingStep]
) -> None:
    """Write while tasks are made to fail; read with all keys, and with all keys except one."""
    spark.addArtifact(str(KEY_SERVICE), pyfile=True)
    after = read_marks(connect)
    rows = make_rows(spark).withColumn("key", F.regexp_replace("data", "-.*", "-key"))
    broken = rows.mapInArrow(fails_once_of(after), rows.schema)
    options = {"encryptionKeys": "key_services:key_from_id", "encryptionKeyIdColumn": "key"}
    result = waltz_spark.append(broken, connect, batchSize="10", **options)
    assert (result.counts["committed"], result.counts["rejected"]) == (TASKS * ROWS, 0)
    with WaltzClient(connect) as client:
        stored = Counter(
            {data[:14]: count for data, count in payload_counts(client, after).items()}
        )
    assert set(stored) == {b"WZE\x01\x09task%d-key" % task for task in range(TASKS)}

    assert count_decrypted(connect, after, "key_from_id") == Counter(
        {(data, None): 1 for data in EXPECTED_PREFIXES}
    )
    decrypted = [data for data in EXPECTED_PREFIXES if not data.startswith(b"task1-")]
    assert len(decrypted) == (TASKS - 1) * ROWS
    assert count_decrypted(connect, after, "key_except_of_task_1") == Counter(
        {(data, None): 1 for data in decrypted}
        | {(None, "the key 'task1-key' does not exist"): ROWS}
    )
