"""The routes of the gateway: each checks its request, calls the client, and returns JSON.

Rules:
    1. Every response except feeds and the console's pages is JSON; an error has the fields of
       `json_errors.py`.
    2. `openapi.OPERATIONS` is the table of the operations for applications: the routes, the metrics
       and the OpenAPI document use the same names. The console has its own operations and pages.
    3. An exception that is not a `WaltzError` is logged and answered with status 500. In a feed
       that has begun, the exception ends the connection.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from waltz_core import errors
from waltz_core.client import RangeForm
from waltz_core.client.read.ranges import RangeQuery
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.config.declarations import ClientConfig, GatewayConfig
from waltz_core.config.host_names import is_loopback
from waltz_core.errors import RequestRejected
from waltz_core.gateway import openapi
from waltz_core.gateway.callers import Caller, Callers
from waltz_core.gateway.console.cluster_view import ClusterViewer
from waltz_core.gateway.console.console_routes import ConsoleRoutes
from waltz_core.gateway.console.running_changes import ConsoleChanges
from waltz_core.gateway.console.static_pages import page_routes
from waltz_core.gateway.http_appends import AppendReply, append_transactions
from waltz_core.gateway.http_feeds import (
    EVENT_STREAM_TYPE,
    JSON_LINES_TYPE,
    HttpFeed,
    as_json_line,
    as_server_sent_event,
    feed_client_config,
    transaction_fields,
)
from waltz_core.gateway.http_json import (
    error_response,
    json_response,
    partition_in_path,
    url_parameters,
)
from waltz_core.gateway.idempotent_appends import IdempotentAppends
from waltz_core.gateway.request_headers import (
    check_content_headers,
    check_local_host,
    content_length,
    idempotency_key_in,
)
from waltz_core.gateway.request_parsing import (
    BodyReader,
    UrlParameters,
    check_integer,
    parse_integer,
    parse_transactions,
    with_default_partition,
)
from waltz_core.metrics import Metrics
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

RANGE_BYTES_MAX: Final = 1024 * 1024
# After these errors, the stream of the client continues.
_NON_FATAL_ERRORS: Final = (errors.Superseded, errors.Unavailable, errors.UsageError)

HttpHandler: TypeAlias = Callable[[Request, Caller], Awaitable[Response]]


class GatewayParts(NamedTuple):
    """The parts of the gateway that the routes use."""

    config: GatewayConfig
    client_config: ClientConfig
    callers: Callers
    metrics: Metrics
    tasks: asyncio.TaskGroup  # of the daemon
    coordinator: Callable[[], Coordinator]  # of the session with ZooKeeper


class GatewayRoutes:
    """The HTTP operations of one gateway: append, marks, range, feed, and the console."""

    def __init__(self, parts: GatewayParts) -> None:
        config = parts.config
        self._parts = parts
        self._body_memory = BodyReader(
            body_bytes_max=config.body_bytes_max, memory_bytes_max=config.memory_bytes_max
        )
        self._idempotent_appends = IdempotentAppends(
            parts.callers,
            config.connect,
            retention_ms=config.idempotency_retention_ms,
            timeout_ms=config.request_timeout_ms,
        )
        self.changes = ConsoleChanges(config.connect, parts.coordinator, parts.tasks)
        self.viewer = ClusterViewer(config.connect, parts.coordinator, parts.tasks)
        has_tls = bool(config.https_certificate)
        self._console = ConsoleRoutes(self.viewer, self.changes, self._body_memory, has_tls=has_tls)
        self._must_check_host = is_loopback(config.listen_host) and not has_tls
        self._round_robin_count = 0  # selects the partition if a request names none
        self.feed_count = 0

    def asgi_app(self) -> Starlette:
        """Return the ASGI application with the routes of all operations."""
        handlers: dict[str, HttpHandler] = {
            "append": self._append,
            "marks": self._read_marks,
            "range": self._read_range,
            "feed": self._open_feed,
        }
        routes = [
            Route(
                operation.path,
                self._endpoint(operation.name, handlers[operation.name]),
                methods=[operation.method],
            )
            for operation in openapi.OPERATIONS
        ]
        routes += [
            Route(
                operation.path, self._endpoint(operation.name, handler), methods=[operation.method]
            )
            for operation, handler in self._console.operations()
        ]
        routes += [*page_routes(), Route(openapi.DOCUMENT_PATH, _openapi_document)]
        app = Starlette(
            routes=routes,
            exception_handlers={404: _reject_unknown_operation, 405: _reject_unknown_operation},
        )
        app.router.redirect_slashes = False  # rule 1
        return app

    def _endpoint(
        self, name: str, handler: HttpHandler
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that runs a handler, reports errors as JSON, and counts requests."""

        async def endpoint(request: Request) -> Response:
            start_s = time.monotonic()
            try:
                response = await self._respond(request, handler)
            except errors.WaltzError as error:
                response = error_response(error)
            except ClientDisconnect:  # nothing reads the response
                response = error_response(
                    errors.BadRequest("the connection ended before the end of the request body")
                )
            except Exception:  # noqa: BLE001 - the top of a task (rule 3)
                _log.exception("gateway.request_failed operation=%s", name)
                response = error_response(
                    errors.WaltzError(
                        "internal error in the gateway. Hint: the log of the gateway has the "
                        "details."
                    )
                )
            metrics = self._parts.metrics
            metrics.add("waltz_gateway_requests_total", operation=name, status=response.status_code)
            metrics.observe(
                "waltz_gateway_request_seconds", time.monotonic() - start_s, operation=name
            )
            return response

        return endpoint

    async def _respond(self, request: Request, handler: HttpHandler) -> Response:
        if self._must_check_host:
            check_local_host(request.headers)
        authorization = request.headers.get("authorization")
        async with self._parts.callers.caller_of_request(authorization) as caller:
            return await handler(request, caller)

    # --- append

    async def _append(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        check_content_headers(request.headers)
        key = idempotency_key_in(request.headers)
        async with self._body_memory.body(
            request.stream(), content_length(request.headers)
        ) as body:
            count = caller.client.partition_count
            rows = parse_transactions(body, count)
            if key is not None:
                answer = await self._idempotent_appends.append(caller, key, rows)
            else:
                self._round_robin_count += 1
                answer = await append_transactions(
                    caller.client, with_default_partition(rows, self._round_robin_count % count)
                )
        caller.is_unusable |= any(_makes_client_unusable(error) for error in answer.errors)
        self._count_committed(answer)
        if answer.status == 503 and len(answer.errors) == len(rows):
            await self._parts.callers.check_token(caller)
        return json_response(answer.body, answer.status, answer.headers)

    def _count_committed(self, answer: AppendReply) -> None:
        outcomes = answer.body["outcomes"]
        committed = sum("transaction_id" in outcome for outcome in outcomes)
        self._parts.metrics.add("waltz_gateway_appended_transactions_total", committed)

    # --- marks and ranges

    async def _read_marks(self, request: Request, caller: Caller) -> Response:
        query = url_parameters(request, ("partition", "linearizable"))
        count = caller.client.partition_count
        partitions = query.partitions(count)
        marks = await caller.client.high_water_marks(
            partitions or None, linearizable=query.flag("linearizable")
        )
        marks_by_text = {str(partition): int(mark) for partition, mark in sorted(marks.items())}
        return json_response({"partition_count": count, "marks": marks_by_text})

    async def _read_range(self, request: Request, caller: Caller) -> Response:
        query = url_parameters(request, ("first", "last", "header"))
        partition = partition_in_path(request, caller.client.partition_count)
        first = query.integer("first")
        if first is None:
            raise RequestRejected("query parameter first", expected="an ID", found=None)
        last, headers = query.integer("last"), query.headers()
        mark = await caller.client.high_water_mark(partition)
        end = mark if last is None else min(last, mark)
        fields: dict[str, Any] = {"transactions": [], "next": first, "high_water_mark": int(mark)}
        if first > end:
            return json_response(fields)
        range_query = RangeQuery(
            TransactionId(first), TransactionId(end), RangeForm.WHOLE, headers, RANGE_BYTES_MAX
        )
        chunk = await caller.client.requests.fetch_range(PartitionId(partition), range_query)
        fields["transactions"] = [transaction_fields(*row) for row in chunk.rows()]
        fields["next"] = int(chunk.next)
        return json_response(fields)

    # --- the feed

    async def _open_feed(self, request: Request, caller: Caller) -> Response:
        query = url_parameters(request, ("from", "header"))
        partition = partition_in_path(request, caller.client.partition_count)
        mark, headers = _feed_start(request, query), query.headers()
        encode, media = as_server_sent_event, EVENT_STREAM_TYPE
        if JSON_LINES_TYPE in request.headers.get("accept", ""):
            encode, media = as_json_line, JSON_LINES_TYPE
        if self.feed_count >= self._parts.config.feeds_max:
            raise errors.Overloaded(
                f"the gateway already has {self.feed_count} open feeds, which is the limit "
                "(feeds_max). Hint: use another gateway, or read ranges."
            )
        self.feed_count += 1
        stack = AsyncExitStack()
        stack.callback(self._on_feed_ended)
        try:
            config = feed_client_config(self._parts.client_config)
            client = await stack.enter_async_context(
                self._parts.callers.dedicated_client(caller, config)
            )
            await client.open()
            reader = HttpFeed(client, partition, mark)
            await reader.check_start()
        except BaseException:
            await stack.aclose()
            raise
        # The cleanup runs in a separate task, because a cancelled response also cancels everything
        # that it awaits.
        on_end = partial(self._parts.tasks.create_task, stack.aclose())
        return _FeedResponse(reader.events(headers, encode), media, on_end)

    def _on_feed_ended(self) -> None:
        self.feed_count -= 1


class _FeedResponse(StreamingResponse):
    """A streaming response with a feed; calls `on_end` when it ends, for any reason."""

    def __init__(
        self, events: AsyncIterator[bytes], media_type: str, on_end: Callable[[], object]
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-store"})
        self._on_end = on_end

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception:  # rule 3; the status has been sent, so the connection ends
            _log.exception("gateway.request_failed operation=feed")
            raise
        finally:
            self._on_end()


def _feed_start(request: Request, query: UrlParameters) -> int:
    """Return the mark after which a feed begins, from `Last-Event-ID`, otherwise from `from`."""
    text = request.headers.get("last-event-id")
    if text:
        return check_integer(parse_integer(text), "header Last-Event-ID", minimum=BEFORE_FIRST)
    mark = query.integer("from", minimum=BEFORE_FIRST)
    if mark is None:
        raise RequestRejected(
            "query parameter from",
            expected="the ID of the last transaction that you have applied, -1 for none",
            found=None,
        )
    return mark


def _makes_client_unusable(error: errors.WaltzError) -> bool:
    is_denied = isinstance(error, errors.AuthenticationFailed | errors.PermissionDenied)
    return is_denied or not isinstance(error, _NON_FATAL_ERRORS)


async def _openapi_document(_request: Request) -> Response:
    return json_response(openapi.openapi_document())


async def _reject_unknown_operation(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    hint = f"GET {openapi.DOCUMENT_PATH} returns the operations."
    text = f"there is no operation {request.method} {request.url.path[:200]}"
    fields = {"type": "BadRequest", "error": text, "hint": hint}
    return json_response(fields, status, getattr(error, "headers", None))  # `Allow`
