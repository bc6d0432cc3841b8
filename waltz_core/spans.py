"""OpenTelemetry spans of appends, feeds and Spark tasks, an optional extra (docs/decisions/068).

Rules:
    1. Without the setting `traces`, OpenTelemetry is not imported, and an append costs only a
       comparison with None.
    2. Spans go to the tracer provider of the process. Waltz sets up no provider and no exporter.
    3. A span never changes the outcome of the operation that it describes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from waltz_core.errors import BadConfig

if TYPE_CHECKING:
    import asyncio

    from opentelemetry.trace import Span, SpanKind

Attributes = Mapping[str, str | int]

# The names of attributes are those of OpenTelemetry's conventions for messaging, where they exist.
SYSTEM = {"messaging.system": "waltz"}
PARTITION = "messaging.destination.partition.id"
ROW_COUNT = "messaging.batch.message_count"
TRANSACTION = "waltz.transaction_id"
# The maximum time for which the end of a Spark task waits for the exporter.
FLUSH_MS = 1_000


class WaltzTracer:
    """Records spans with OpenTelemetry.

    Raises:
        BadConfig: OpenTelemetry is not installed; the message names the extra.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415 - rule 1
        except ImportError:
            raise BadConfig(
                "setting traces: expected OpenTelemetry, found no package opentelemetry. Hint: "
                "install waltz-spark[traces]."
            ) from None
        self._trace = trace
        self._tracer = trace.get_tracer("waltz")

    def follow_append(
        self, outcome: "asyncio.Future[Any]", partition_id: int, row_count: int
    ) -> None:
        """Record a span from now until an append has its outcome, as a child of the caller's."""
        kind = self._trace.SpanKind.PRODUCER
        span = self._start("append", partition_id, {ROW_COUNT: row_count}, kind)
        outcome.add_done_callback(partial(self._end_append, span))

    def _end_append(self, span: "Span", outcome: "asyncio.Future[Any]") -> None:
        if outcome.cancelled():
            span.set_attribute("waltz.cancelled", value=True)
        elif (error := outcome.exception()) is not None:
            self._mark_failed(span, error)
        elif isinstance(result := outcome.result(), int):
            span.set_attribute(TRANSACTION, result)
        span.end()

    @contextmanager
    def apply_span(
        self, partition_id: int, first: int, row_count: int
    ) -> Iterator[Callable[[Exception], None]]:
        """Record a span of the enclosed callbacks, whose spans are its children.

        Call the yielded function with the error of a callback.
        """
        kind = self._trace.SpanKind.CONSUMER
        span = self._start("apply", partition_id, {TRANSACTION: first, ROW_COUNT: row_count}, kind)
        with self._trace.use_span(span, end_on_exit=True):
            yield partial(self._mark_failed, span)

    @contextmanager
    def task_span(self, name: str, attributes: Attributes) -> Iterator["Span"]:
        """Record a span of a Spark task; the exporter has the span when the method returns."""
        span = self._start(name, None, attributes, self._trace.SpanKind.INTERNAL)
        try:
            yield span
        except Exception as error:
            self._mark_failed(span, error)
            raise
        finally:
            span.end()
            flush = getattr(self._trace.get_tracer_provider(), "force_flush", None)
            if flush is not None:  # Spark kills its workers without notice
                flush(FLUSH_MS)

    def _start(
        self, name: str, partition_id: int | None, attributes: Attributes, kind: "SpanKind"
    ) -> "Span":
        place: Attributes = {} if partition_id is None else {PARTITION: str(partition_id)}
        title = name if partition_id is None else f"{name} {partition_id}"
        return self._tracer.start_span(
            title, kind=kind, attributes={**SYSTEM, **place, **attributes}
        )

    def _mark_failed(self, span: "Span", error: BaseException) -> None:
        span.record_exception(error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
