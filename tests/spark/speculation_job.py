"""A Spark job with a task so slow that Spark starts it a second time on the other worker.

    spark-submit ... speculation_job.py CONNECT DIRECTORY

The first attempt waits in the middle of its rows, with some of them in the log, until the second
one has written rows of its own. So both are in `write()` at the same time. Then the first one
continues, and never ends: the second one wins. The job writes twice, and checks the log after each
write.
"""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

import waltz_spark
from tests.spark.once_rows import (
    ROWS,
    SMALL_BATCHES,
    WAIT_S_MAX,
    WRITES,
    check_write,
    marks_of,
    rows_in,
    rows_of,
    until_some_are_there,
)

SLOW = 1


class Gate:
    """Passes rows on; two attempts of the slow task wait for one another.

    Args:
        connect: the cluster.
        directory: has one file for each step that an attempt has reached.
        after: the marks of the log when the write began.
    """

    def __init__(self, connect: str, directory: Path, after: Mapping[int, int]) -> None:
        self.connect, self.directory, self.after = connect, directory, after

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        is_slow = context.partitionId() == SLOW
        meet = self._first if context.attemptNumber() == 0 else self._second
        seen = 0
        for batch in batches:
            rows = range(seen, seen + batch.num_rows)
            if is_slow:
                meet(rows)
            yield batch
            seen = rows.stop
        if is_slow and context.attemptNumber() == 0:
            signal.pause()  # Spark kills it when the second one has won

    def _first(self, rows: range) -> None:
        if ROWS // 2 in rows:
            self._until_in_log(b"task%d-" % SLOW)
            self._print("first is in")
            self._until("second is in")
            self._print("first continues")

    def _second(self, rows: range) -> None:
        if 0 in rows:
            self._until("first is in")
        elif ROWS - 1 in rows:
            # Only the second attempt has sent what comes after the first half.
            self._until_in_log(b"task%d-%d-" % (SLOW, SLOW * ROWS + ROWS // 2))
            self._print("second is in")
            self._until("first continues")

    def _until_in_log(self, prefix: bytes) -> None:
        until_some_are_there(self.connect, prefix, self.after)

    def _print(self, what: str) -> None:
        (self.directory / what).touch()

    def _until(self, what: str) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not (self.directory / what).exists():
            assert time.monotonic() < deadline, f"not within {WAIT_S_MAX} s: {what}"
            time.sleep(0.02)


def main(connect: str, directory: Path) -> None:
    """Run the job."""
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.1",
    }
    spark = waltz_spark.session("speculation", **speculation, **SMALL_BATCHES)
    rows = rows_of(spark)
    for write, options in WRITES.items():
        steps = directory / write
        steps.mkdir()
        after = marks_of(connect)
        slow = rows.mapInArrow(Gate(connect, steps, after), rows.schema)
        results = str(steps / "results")
        result = waltz_spark.append(slow, connect, resultsPath=results, batchSize="10", **options)
        check_write(write, result.counts, rows_in(connect, after))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
