"""Rows for jobs whose tasks fail during a write, and a check of the log after the write."""

import time
from collections import Counter
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from tests.spark.log_payloads import BEFORE_ALL_MARKS, payload_counts
from waltz_core.client import WaltzClient

# Each job writes twice: name of the write -> its options.
WRITES: Mapping[str, Mapping[str, str]] = {"on": {}, "off": {"exactlyOnce": "false"}}
TASKS, ROWS = 4, 400
EXPECTED_PREFIXES = {b"task%d-%d-" % (n // ROWS, n) for n in range(TASKS * ROWS)}
# The time limit of an attempt. At this limit, the job prints the row for which it has waited.
WAIT_S_MAX = 200
# Several tasks poll the log at the same time; the writer needs the CPU between two polls.
POLL_S = 0.1
# The number of rows that Spark collects before it passes them to the writer.
SMALL_BATCHES = {"spark.sql.execution.arrow.maxRecordsPerBatch": "20"}


def make_rows(spark: SparkSession) -> DataFrame:
    """Return `ROWS` rows for each of `TASKS` tasks; each row names its task and its number."""
    return spark.range(0, TASKS * ROWS, numPartitions=TASKS).selectExpr(
        # The rows are large, because Spark passes 64 KiB at a time from worker to worker.
        f"concat('task', id DIV {ROWS}, '-', id, '-', repeat('x', 2000)) AS data",
        "CAST(id % 4 AS int) AS partition",
    )


def count_rows_in_log(connect: str, after: Mapping[int, int] = BEFORE_ALL_MARKS) -> Counter[bytes]:
    """Return which of the rows are in the log after the marks, and how often."""
    with WaltzClient(connect) as client:
        return Counter({data.rstrip(b"x"): n for data, n in payload_counts(client, after).items()})


def read_marks(connect: str) -> dict[int, int]:
    """Return the marks of the log."""
    with WaltzClient(connect) as client:
        return dict(client.high_water_marks(linearizable=True))


def check_write(write: str, counts: Mapping[str, int], found: Counter[bytes]) -> None:
    """Check the rows of one of `WRITES` in the log: each once, or twice if exactly-once is off."""
    if write == "on":
        assert found == Counter(dict.fromkeys(EXPECTED_PREFIXES, 1))
        assert (counts["committed"], counts["rejected"]) == (TASKS * ROWS, 0)
    else:
        assert set(found) == EXPECTED_PREFIXES
        assert max(found.values()) > 1


def wait_until_in_log(
    connect: str, prefix: bytes, after: Mapping[int, int] = BEFORE_ALL_MARKS
) -> None:
    """Wait until a row with this prefix is in the log after the marks."""
    deadline = time.monotonic() + WAIT_S_MAX
    with WaltzClient(connect) as client:
        while True:
            for partition, last in client.high_water_marks(linearizable=True).items():
                for chunk in client.read_range(partition, after.get(partition, -1) + 1, last):
                    if prefix in bytes(chunk.records):
                        return
            assert time.monotonic() < deadline, f"not within {WAIT_S_MAX} s in the log: {prefix!r}"
            time.sleep(POLL_S)
