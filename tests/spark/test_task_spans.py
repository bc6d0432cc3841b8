"""The OpenTelemetry spans of Spark's tasks, which a worker exports to a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient
from waltz_core.errors import BadConfig

pytestmark = pytest.mark.spark

STARTED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter


def start():
    out = open({path!r}, "a", encoding="utf-8")
    provider = TracerProvider()
    line = lambda span: span.to_json(indent=None) + "\\n"
    exporter = ConsoleSpanExporter(out=out, formatter=line)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
"""


def scan_ranges_of(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the exported spans with a name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [span for span in map(json.loads, lines) if span["name"] == name]


def test_each_task_of_a_write_and_a_read_has_a_span(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    out = tmp_path / "spans"
    module = tmp_path / f"span_export_{tmp_path.parent.name.replace('-', '_')}.py"
    module.write_text(STARTED.format(path=str(out)), encoding="utf-8")
    spark.sparkContext.addPyFile(str(module))
    function = f"{module.stem}:start"
    with WaltzClient(connect) as client:
        start_marks = {
            str(partition): mark for partition, mark in client.high_water_marks().items()
        }
    rows = spark.range(30).selectExpr("cast(cast(id as string) as binary) as data").repartition(2)
    rows.write.format("waltz").mode("append").option("traces", function).save(connect)
    written = scan_ranges_of(out, "waltz write task")  # exported before the task ended
    assert len(written) == 2
    assert sum(span["attributes"]["waltz.committed"] for span in written) == 30
    assert {span["attributes"]["spark.partition_id"] for span in written} == {0, 1}
    reader = spark.read.format("waltz").option("startingHighWaterMarks", json.dumps(start_marks))
    assert reader.option("traces", function).load(connect).count() == 30
    wait_until(
        "the reads are exported",
        lambda: (
            sum(
                each["attributes"]["messaging.batch.message_count"]
                for each in scan_ranges_of(out, "waltz read task")
                if "messaging.batch.message_count" in each["attributes"]
            )
            == 30
        ),
    )


BLOCKED = """
import threading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter


class Blocked(SpanExporter):
    def export(self, spans):
        threading.Event().wait()


def start():
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Blocked()))
    trace.set_tracer_provider(provider)


def fail():
    raise OSError("no collector")
"""


def test_a_blocked_span_exporter_delays_no_task_and_a_failed_traces_function_is_reported(
    spark: SparkSession, connect: str, tmp_path: Path
) -> None:
    module = tmp_path / f"blocked_export_{tmp_path.parent.name.replace('-', '_')}.py"
    module.write_text(BLOCKED, encoding="utf-8")
    spark.sparkContext.addPyFile(str(module))
    with WaltzClient(connect) as client:
        client.append(b"row").result(TEST_TIMEOUT_S)
    reader = spark.read.format("waltz").option("traces", f"{module.stem}:start")
    assert reader.load(connect).count() > 0  # it does not wait for the exporter
    failing = spark.read.format("waltz").option("traces", f"{module.stem}:fail")
    with pytest.raises(
        Exception, match=r"option 'traces': the function '.*:fail' has failed: OSErr"
    ):
        failing.load(connect).collect()


def test_a_missing_function_in_option_traces_is_reported(spark: SparkSession, connect: str) -> None:
    with WaltzClient(connect) as client:
        client.append(b"row").result(TEST_TIMEOUT_S)
    reader = spark.read.format("waltz").option("traces", "no_such_module:start")
    with pytest.raises(
        Exception, match="option 'traces': 'no_such_module:start' cannot be imported"
    ):
        reader.load(connect).collect()
    with pytest.raises(BadConfig, match="option 'traces': expected 'module:function'"):
        spark.read.format("waltz").option("traces", "start").load(connect).collect()
