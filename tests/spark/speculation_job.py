"""A Spark job with a slow task, which Spark starts a second time on the other worker.

    spark-submit ... speculation_job.py CONNECT DIRECTORY

The first attempt waits after some of its rows are in the log, until the second attempt has written
rows. So both attempts are in `write()` at the same time. Then the first attempt continues, but
never ends, so Spark uses the result of the second attempt. The job writes twice, and checks the log
after each write.
"""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

import waltz_spark
from tests.spark.exactly_once_rows import (
    ROWS,
    SMALL_BATCHES,
    WAIT_S_MAX,
    WRITES,
    check_write,
    count_rows_in_log,
    make_rows,
    read_marks,
    wait_until_in_log,
)

SLOW_TASK = 1


class AttemptBarrier:
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
        is_slow = context.partitionId() == SLOW_TASK
        wait_for_other_attempt = (
            self._run_first_attempt if context.attemptNumber() == 0 else self._run_second_attempt
        )
        row_count = 0
        for batch in batches:
            rows = range(row_count, row_count + batch.num_rows)
            if is_slow:
                wait_for_other_attempt(rows)
            yield batch
            row_count = rows.stop
        if is_slow and context.attemptNumber() == 0:
            signal.pause()  # Spark kills it after the second attempt has succeeded

    def _run_first_attempt(self, rows: range) -> None:
        if ROWS // 2 in rows:
            self._wait_until_in_log(b"task%d-" % SLOW_TASK)
            self._record_step("first is in")
            self._wait_for_step("second is in")
            self._record_step("first continues")

    def _run_second_attempt(self, rows: range) -> None:
        if 0 in rows:
            self._wait_for_step("first is in")
        elif ROWS - 1 in rows:
            # Only the second attempt has sent the rows after the first half.
            self._wait_until_in_log(b"task%d-%d-" % (SLOW_TASK, SLOW_TASK * ROWS + ROWS // 2))
            self._record_step("second is in")
            self._wait_for_step("first continues")

    def _wait_until_in_log(self, prefix: bytes) -> None:
        wait_until_in_log(self.connect, prefix, self.after)

    def _record_step(self, step: str) -> None:
        (self.directory / step).touch()

    def _wait_for_step(self, step: str) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not (self.directory / step).exists():
            assert time.monotonic() < deadline, f"not within {WAIT_S_MAX} s: {step}"
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
    rows = make_rows(spark)
    for write, options in WRITES.items():
        steps = directory / write
        steps.mkdir()
        after = read_marks(connect)
        slow = rows.mapInArrow(AttemptBarrier(connect, steps, after), rows.schema)
        results = str(steps / "results")
        result = waltz_spark.append(slow, connect, resultsPath=results, batchSize="10", **options)
        check_write(write, result.counts, count_rows_in_log(connect, after))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
