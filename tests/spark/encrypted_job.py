"""A Spark job whose tasks fail during an encrypted write, with keys of a function.

    python -m tests.spark.encrypted_job CONNECT DIRECTORY

It fails as in `once_job.py`. Each task has its own key, whose ID the log has in plain text. The
workers get the module with the keys from Spark; the driver cannot import it.
"""

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from pyspark.sql import functions as F

import waltz_spark
from tests.spark.in_log import in_log
from tests.spark.once_job import Breaker
from tests.spark.once_rows import EXPECTED, ROWS, SMALL_BATCHES, TASKS, marks_of, rows_of
from waltz_core.client import WaltzClient

VAULT = Path(__file__).with_name("vault.py")


def main(connect: str, directory: Path) -> None:
    """Run the job."""
    spark = waltz_spark.session(
        "encrypted",
        master="local-cluster[2,2,1024]",
        **{"spark.executor.memory": "512m", "spark.ui.enabled": "false", **SMALL_BATCHES},
    )
    spark.addArtifact(str(VAULT), pyfile=True)
    after = marks_of(connect)
    rows = rows_of(spark).withColumn("key", F.regexp_replace("data", "-.*", "-key"))
    broken = rows.mapInArrow(Breaker(connect, directory, after), rows.schema)
    options = {"encryptionKeys": "vault:key_of", "encryptionKeyColumn": "key"}
    result = waltz_spark.append(broken, connect, batchSize="10", **options)
    assert (result.counts["committed"], result.counts["rejected"]) == (TASKS * ROWS, 0)
    with WaltzClient(connect) as client:
        stored = Counter({data[:14]: count for data, count in in_log(client, after).items()})
    assert set(stored) == {b"WZE\x01\x09task%d-key" % task for task in range(TASKS)}

    def read(function: str) -> Counter[tuple[bytes | None, str | None]]:
        reader = spark.read.format("waltz").option("encryptionKeys", f"vault:{function}")
        found = reader.load(connect).select("data", "data_error").collect()
        return Counter((each[0] and bytes(each[0]).rstrip(b"x"), each[1]) for each in found)

    assert read("key_of") == Counter({(data, None): 1 for data in EXPECTED})
    lost = [data for data in EXPECTED if data.startswith(b"task1-")]
    assert len(lost) == ROWS
    assert read("without_task_1") == Counter(
        {(data, None): 1 for data in EXPECTED if data not in lost}
        | {(None, "there is no key 'task1-key'"): ROWS}
    )
    assert find_spec("vault") is None
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    main(sys.argv[1], Path(sys.argv[2]))
