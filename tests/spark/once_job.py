"""A Spark job of four tasks, three of which are struck down in their first attempt.

    python -m tests.spark.once_job CONNECT DIRECTORY [OPTION=VALUE ...]

It runs on a master with two executors of their own (`local-cluster`). Task 0 raises, the Python
worker of task 1 is killed with -9, the executor of task 2 too; each when some of its rows are in
the log. The last line says what the driver was told.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext

import waltz_spark
from tests.spark.once_rows import ROWS, SMALL_BATCHES, TASKS, rows_of, until_some_are_there


class Breaker:
    """Passes rows on; in the middle of a first attempt it does what its task has coming."""

    def __init__(self, connect: str, directory: str) -> None:
        self.connect, self.directory = connect, directory

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get().partitionId()
        seen = 0
        for batch in batches:
            for start in range(0, batch.num_rows, 50):
                part = batch.slice(start, 50)
                yield part
                seen += part.num_rows
                if seen == ROWS // 2:
                    self._strike(task)

    def _strike(self, task: int) -> None:
        try:
            (Path(self.directory) / f"struck-{task}").touch(exist_ok=False)
        except FileExistsError:
            return
        if task == TASKS - 1:
            return
        until_some_are_there(self.connect, b"task%d-" % task)
        if task == 0:
            raise RuntimeError("struck")
        worker = psutil.Process()
        victim = worker if task == 1 else worker.parent().parent()
        victim.send_signal(signal.SIGKILL)
        signal.pause()  # it dies here


def main(connect: str, directory: str, options: dict[str, str]) -> int:
    """Run the job; return the exit code."""
    spark = waltz_spark.session(
        "once",
        master="local-cluster[2,2,1024]",
        **{
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            **SMALL_BATCHES,
        },
    )
    rows = rows_of(spark)
    broken = rows.mapInArrow(Breaker(connect, directory), rows.schema)
    result = waltz_spark.append(broken, connect, batchSize="10", **options)
    print(json.dumps(result.counts))  # noqa: T201 - the test reads it
    spark.stop()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    sys.exit(main(sys.argv[1], sys.argv[2], dict(each.split("=", 1) for each in sys.argv[3:])))
