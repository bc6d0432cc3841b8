"""The OpenTelemetry spans of appends and feeds, with the setting `traces`."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.loops import run_on_virtual_loop
from tests.unit.client.memory_cluster import IN_MEMORY_CONFIG, memory_cluster
from waltz_core import errors
from waltz_core.client import AsyncCallbacks, lock
from waltz_core.records.batches import encode_append
from waltz_core.spans import WaltzTracer

TRACED_CONFIG = replace(IN_MEMORY_CONFIG, traces=True)
EXPORTED = InMemorySpanExporter()


@pytest.fixture(autouse=True)
def export_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export the spans to `EXPORTED`: a process can set its tracer provider only once."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    EXPORTED.clear()


def spans(start: str) -> list[ReadableSpan]:
    """Return the finished spans whose name has this start."""
    return [span for span in EXPORTED.get_finished_spans() if span.name.startswith(start)]


def attributes(span: ReadableSpan) -> dict[str, object]:
    assert span.attributes is not None
    return {**span.attributes}


@run_on_virtual_loop
async def test_the_span_of_an_append_is_a_child_of_the_callers_span():
    async with memory_cluster() as cluster, cluster.client(TRACED_CONFIG).open_during() as client:
        with trace.get_tracer("application").start_as_current_span("order"):
            first = await client.append(b"one", partition=1)
            second = await client.append(b"two", partition=1)
        assert [await first, await second] == [0, 1]
        await asyncio.sleep(0)  # the callbacks of the second future
        (order,) = spans("order")
        found = spans("append")
        assert [each.name for each in found] == ["append 1", "append 1"]
        for number, span in enumerate(found):
            assert span.kind is trace.SpanKind.PRODUCER
            assert span.parent == order.context
            assert attributes(span) == {
                "messaging.system": "waltz",
                "messaging.destination.partition.id": "1",
                "messaging.batch.message_count": 1,
                "waltz.transaction_id": number,
            }


@run_on_virtual_loop
async def test_spans_show_the_error_of_a_rejected_append_and_the_row_count_of_a_batch():
    async with memory_cluster() as cluster, cluster.client(TRACED_CONFIG).open_during() as client:
        locks = [lock("seat", 1)]
        await (
            await client.append(b"one", partition=0, write_locks=locks, client_high_water_mark=-1)
        )
        with pytest.raises(errors.LockFailed):
            await (
                await client.append(
                    b"two", partition=0, write_locks=locks, client_high_water_mark=-1
                )
            )
        rejected = spans("append")[-1]
        assert rejected.status.status_code is trace.StatusCode.ERROR
        assert "lock conflict" in str(rejected.status.description)
        none: list[list[int]] = [[], []]
        payload = encode_append(
            [0, 0], [b"a", b"b"], write_locks=none, read_locks=none, append_locks=none
        )
        await (await client.append_batch(0, payload, 2, client_high_water_mark=-1))
        batch = attributes(spans("append")[-1])
        assert batch["messaging.batch.message_count"] == 2
        assert batch["waltz.transaction_id"] == 1
        rejected_rows = encode_append(
            [0, 0], [b"a", b"b"], write_locks=[locks, []], read_locks=none, append_locks=none
        )
        await (await client.append_batch(0, rejected_rows, 2, client_high_water_mark=-1))
        partly_rejected = spans("append")[-1]
        assert partly_rejected.status.status_code is trace.StatusCode.ERROR
        assert attributes(partly_rejected)["waltz.rejected_count"] == 1
        assert attributes(partly_rejected)["waltz.transaction_id"] == 3


class FailingOnceCallbacks(AsyncCallbacks):
    """Records a span in each callback; the third one fails once."""

    def __init__(self) -> None:
        self.count = 0
        self.has_failed = False
        self.is_done = asyncio.Event()

    async def client_high_water_mark(self, partition):
        return -1

    async def apply_transaction(self, transaction):
        with trace.get_tracer("application").start_as_current_span("my callback"):
            if self.count == 2 and not self.has_failed:
                self.has_failed = True
                raise errors.Unavailable("the database restarts")
        self.count += 1
        if self.count == 4:
            self.is_done.set()


@run_on_virtual_loop
async def test_the_span_of_applied_transactions_is_the_parent_of_their_callbacks():
    async with memory_cluster() as cluster, cluster.client(TRACED_CONFIG).open_during() as client:
        for row in range(4):
            await (await client.append(b"%d" % row, partition=0))
        callbacks = FailingOnceCallbacks()
        await client.subscribe(callbacks, [0])
        await callbacks.is_done.wait()
    found = spans("apply 0")
    starts = [attributes(each)["waltz.transaction_id"] for each in found]
    assert starts == sorted(starts)
    assert starts[0] == 0
    failed = [each for each in found if each.status.status_code is trace.StatusCode.ERROR]
    assert [str(each.status.description) for each in failed] == ["the database restarts"]
    parents = {each.context.span_id for each in found if each.context is not None}
    callback_spans = spans("my callback")
    assert len(callback_spans) == 5
    assert {
        callback_span.parent and callback_span.parent.span_id for callback_span in callback_spans
    } <= parents


class FailingProcessor(SpanProcessor):
    """A processor of an application that raises in one of its methods."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail)

    def _fail(self, *_args: object, **_named: object) -> None:
        raise RuntimeError("this processor is broken")


class CountingCallbacks(AsyncCallbacks):
    """Counts transactions, without spans of its own."""

    def __init__(self) -> None:
        self.count = 0
        self.is_done = asyncio.Event()

    async def client_high_water_mark(self, partition):
        return -1

    async def apply_transaction(self, transaction):
        self.count += 1
        if self.count == 4:
            self.is_done.set()


@pytest.mark.parametrize("method", ["on_start", "on_end"])
@run_on_virtual_loop
async def test_a_failing_span_processor_does_not_change_outcomes(method, monkeypatch, caplog):
    provider = TracerProvider()
    provider.add_span_processor(FailingProcessor(method))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    small_window = replace(TRACED_CONFIG, in_flight_count_max=2)
    async with memory_cluster() as cluster, cluster.client(small_window).open_during() as client:
        for row in range(4):
            assert await (await client.append(b"%d" % row, partition=0)) == row
        callbacks = CountingCallbacks()
        await client.subscribe(callbacks, [0])
        await callbacks.is_done.wait()
        assert await client.flush(0) == 3
    reports = [message for message in caplog.messages if message.startswith("client.trace_failed")]
    assert reports == ["client.trace_failed error=RuntimeError('this processor is broken')"]


@run_on_virtual_loop
async def test_without_the_setting_no_span_is_recorded():
    async with memory_cluster() as cluster, cluster.client().open_during() as client:
        await (await client.append(b"one", partition=0))
    assert EXPORTED.get_finished_spans() == ()


def test_without_the_setting_opentelemetry_is_not_imported():
    code = "import sys, waltz_core.client; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(errors.BadConfig, match=r"expected OpenTelemetry.*waltz-spark\[traces\]"):
        WaltzTracer()
