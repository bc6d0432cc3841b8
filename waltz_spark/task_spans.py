"""OpenTelemetry spans of the tasks of a read or write, with the option `traces`.

The option names a function of the user, which sets the tracer provider of a Python worker. Spark
uses a worker for many tasks, so the function is called once in each process.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark import TaskContext

from waltz_core.errors import BadConfig
from waltz_core.spans import ROW_COUNT_ATTRIBUTE, WaltzTracer
from waltz_core.user_functions import load_function

_INSTALL_HINT = "Hint: install the module on all workers, or distribute it with spark.addArtifacts."


@functools.cache
def _tracer_of(name: str) -> WaltzTracer:
    start = load_function(name, "option 'traces'", _INSTALL_HINT)
    try:
        start()
    except Exception as error:
        raise BadConfig(f"option 'traces': the function {name!r} has failed: {error!r}") from error
    return WaltzTracer()


def with_read_span(
    batches: Iterator[pa.RecordBatch], name: str | None, partition: int
) -> Iterator[pa.RecordBatch]:
    """Return the batches of a read task; record a span of the task if `name` is not None.

    Raises:
        BadConfig: the function or OpenTelemetry is not installed, or the function has failed.
    """
    return batches if name is None else _with_span(batches, _tracer_of(name), partition)


def _with_span(
    batches: Iterator[pa.RecordBatch], tracer: WaltzTracer, partition: int
) -> Iterator[pa.RecordBatch]:
    attributes = {**_spark_attributes(), "waltz.partition": partition}
    with tracer.task_span("waltz read task", attributes) as counts:
        for batch in batches:
            counts[ROW_COUNT_ATTRIBUTE] = counts.get(ROW_COUNT_ATTRIBUTE, 0) + batch.num_rows
            yield batch


@contextmanager
def write_span(name: str | None) -> Iterator[dict[str, int]]:
    """Record a span of a write task if `name` is not None; set its attributes in the yielded dict.

    Raises:
        BadConfig: the function or OpenTelemetry is not installed, or the function has failed.
    """
    if name is None:
        yield {}
        return
    with _tracer_of(name).task_span("waltz write task", _spark_attributes()) as counts:
        yield counts


def _spark_attributes() -> dict[str, int]:
    """Return the IDs by which the Spark UI identifies the task; empty outside of a task."""
    task = TaskContext.get()
    if task is None:
        return {}
    return {
        "spark.stage_id": task.stageId(),
        "spark.task_attempt_id": task.taskAttemptId(),
        "spark.partition_id": task.partitionId(),
    }
