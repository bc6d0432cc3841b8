"""OpenTelemetry spans of appends, feeds and Spark tasks; an optional extra (docs/decisions/068).

Rules:
    1. Without the setting `traces`, OpenTelemetry is not imported, and an append costs only a
       comparison with None.
    2. Spans go to the tracer provider of the process. Waltz sets up no provider and no exporter.
    3. A span never changes the outcome of the operation that it describes. If a sampler or a span
       processor of the application raises an exception, the span is lost. Only the first such
       exception is logged.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from waltz_core.errors import BadConfig

if TYPE_CHECKING:
    import asyncio

    from opentelemetry.trace import Span, SpanKind

_log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int]
# Where possible, attributes have the names of OpenTelemetry's conventions for messaging.
SYSTEM_ATTRIBUTES = {"messaging.system": "waltz"}
PARTITION_ATTRIBUTE = "messaging.destination.partition.id"
ROW_COUNT_ATTRIBUTE = "messaging.batch.message_count"
TRANSACTION_ATTRIBUTE = "waltz.transaction_id"
REJECTED_COUNT_ATTRIBUTE = "waltz.rejected_count"
# The maximum time for which the end of a Spark task waits for the exporter, in seconds.
FLUSH_S: Final = 1.0


class TracedOutcome(NamedTuple):
    """The outcome of an append: its first committed transaction, and the rejected row count."""

    first_committed: int | None
    rejected_count: int


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
        self._has_failed = False

    def follow_append(
        self,
        future: "asyncio.Future[Any]",
        partition_id: int,
        row_count: int,
        outcome_of: Callable[[Any], TracedOutcome],
    ) -> None:
        """Record a span from now until an append has its outcome; the parent is the caller's span.

        `outcome_of` summarizes the result of the future.
        """
        kind = self._trace.SpanKind.PRODUCER
        with self._ignore_errors():
            span = self._start("append", partition_id, {ROW_COUNT_ATTRIBUTE: row_count}, kind)
            future.add_done_callback(partial(self._end_append, span, outcome_of))

    def _end_append(
        self,
        span: "Span",
        outcome_of: Callable[[Any], TracedOutcome],
        future: "asyncio.Future[Any]",
    ) -> None:
        with self._ignore_errors():
            if future.cancelled():
                span.set_attribute("waltz.cancelled", value=True)
            elif (error := future.exception()) is not None:
                self._mark_failed(span, error)
            else:
                first, rejected_count = outcome_of(future.result())
                if first is not None:
                    span.set_attribute(TRANSACTION_ATTRIBUTE, first)
                if rejected_count:
                    span.set_attribute(REJECTED_COUNT_ATTRIBUTE, rejected_count)
                    span.set_status(self._error_status(f"{rejected_count} rows are rejected"))
            span.end()

    @contextmanager
    def apply_span(
        self, partition_id: int, first: int, row_count: int
    ) -> Iterator[Callable[[Exception], None]]:
        """Record a span of the callbacks in this block; the callbacks' own spans are children.

        Call the yielded function with the error of a callback.
        """
        kind = self._trace.SpanKind.CONSUMER
        span: Span | None = None
        with ExitStack() as current:
            with self._ignore_errors():
                attributes = {TRANSACTION_ATTRIBUTE: first, ROW_COUNT_ATTRIBUTE: row_count}
                span = self._start("apply", partition_id, attributes, kind)
                current.enter_context(self._trace.use_span(span))
            yield partial(self._mark_failed, span)
        with self._ignore_errors():
            if span is not None:
                span.end()

    @contextmanager
    def task_span(self, name: str, attributes: Attributes) -> Iterator[dict[str, int]]:
        """Record a span of a Spark task; set further attributes in the yielded dictionary.

        At the end, the method waits up to `FLUSH_S` until the exporter has accepted the span.
        """
        span: Span | None = None
        more_attributes: dict[str, int] = {}
        with self._ignore_errors():
            span = self._start(name, None, attributes, self._trace.SpanKind.INTERNAL)
        try:
            yield more_attributes
        except Exception as error:
            self._mark_failed(span, error)
            raise
        finally:
            with self._ignore_errors():
                if span is not None:
                    span.set_attributes(more_attributes)
                    span.end()
                    self._flush()

    def _flush(self) -> None:
        """Export all spans now, because Spark kills its workers without notice.

        The export runs in a thread, because the time limit of `force_flush` does not interrupt an
        export that has begun.
        """
        flush = getattr(self._trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            thread = threading.Thread(
                target=self._flush_quietly, args=(flush,), name="waltz-spans", daemon=True
            )
            thread.start()
            thread.join(FLUSH_S)

    def _flush_quietly(self, flush: Callable[[int], object]) -> None:
        with self._ignore_errors():
            flush(int(FLUSH_S * 1_000))

    def _start(
        self, name: str, partition_id: int | None, attributes: Attributes, kind: "SpanKind"
    ) -> "Span":
        partition_attributes: Attributes = (
            {} if partition_id is None else {PARTITION_ATTRIBUTE: str(partition_id)}
        )
        title = name if partition_id is None else f"{name} {partition_id}"
        return self._tracer.start_span(
            title, kind=kind, attributes={**SYSTEM_ATTRIBUTES, **partition_attributes, **attributes}
        )

    def _mark_failed(self, span: "Span | None", error: BaseException) -> None:
        with self._ignore_errors():
            if span is not None:
                span.record_exception(error)
                span.set_status(self._error_status(str(error)))

    def _error_status(self, description: str) -> Any:  # noqa: ANN401 - a type of OpenTelemetry
        return self._trace.Status(self._trace.StatusCode.ERROR, description)

    @contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        """Log the first error of the application's sampler or span processor; ignore later ones."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - rule 3
            if not self._has_failed:
                self._has_failed = True
                _log.warning("client.trace_failed error=%r", error, exc_info=error)
