"""A Spark job that writes several times, each time with four tasks, three of which fail at first.

    python -m tests.spark.exactly_once_job CONNECT DIRECTORY WRITE...

The job runs on a master with two executor processes (`local-cluster`). Task 0 raises an exception.
The Python worker of task 1 and the executor of task 2 are killed with SIGKILL. Each fault occurs
when some rows of the task are in the log. The job checks the log after each write. The write
`encrypted` is encrypted.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext

import waltz_spark
from tests.spark import encrypted_write
from tests.spark.exactly_once_rows import (
    ROWS,
    SMALL_BATCHES,
    TASKS,
    WRITES,
    check_write,
    count_rows_in_log,
    make_rows,
    read_marks,
    wait_until_in_log,
)


class FailFirstAttempts:
    """Passes rows on, and makes the first attempt of a task fail in the middle.

    Args:
        connect: the cluster.
        directory: has one file for each task that has failed.
        after: the marks of the log when the write began.
    """

    def __init__(self, connect: str, directory: Path, after: Mapping[int, int]) -> None:
        self.connect, self.directory, self.after = connect, directory, after

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get().partitionId()
        row_count = 0
        for batch in batches:
            for start in range(0, batch.num_rows, 50):
                part = batch.slice(start, 50)
                yield part
                row_count += part.num_rows
                if row_count == ROWS // 2:
                    self._fail_once(task)

    def _fail_once(self, task: int) -> None:
        try:
            (self.directory / f"struck-{task}").touch(exist_ok=False)
        except FileExistsError:
            return
        if task == TASKS - 1:
            return
        wait_until_in_log(self.connect, b"task%d-" % task, self.after)
        if task == 0:
            raise RuntimeError("struck")
        worker = psutil.Process()
        victim = worker if task == 1 else worker.parent().parent()
        victim.send_signal(signal.SIGKILL)
        signal.pause()  # the process is killed here


def main(connect: str, directory: Path, writes: Sequence[str]) -> None:
    """Run the job with the given writes."""
    spark = waltz_spark.session(
        "once",
        master="local-cluster[2,2,1024]",
        **{
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            **SMALL_BATCHES,
        },
    )
    rows = make_rows(spark)
    for write in writes:
        failed_tasks = directory / write
        failed_tasks.mkdir()
        if write == "encrypted":
            encrypted_write.run(spark, connect, partial(FailFirstAttempts, connect, failed_tasks))
            continue
        after = read_marks(connect)
        broken = rows.mapInArrow(FailFirstAttempts(connect, failed_tasks, after), rows.schema)
        result = waltz_spark.append(broken, connect, batchSize="10", **WRITES[write])
        check_write(write, result.counts, count_rows_in_log(connect, after))
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
