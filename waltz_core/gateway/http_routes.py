"""The routes of the gateway: each checks its request, calls the client, and returns JSON.

Rules:
    1. Every response except a feed is JSON; an error has the fields of `json_errors.py`.
    2. `ROUTES` is the table of all operations: the metrics and the description (`openapi.py`) use
       the same names.
    3. An exception that is no `WaltzError` is logged and answered with status 500. In a feed that
       has begun, it ends the connection.
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
from waltz_core.config.declarations import ClientConfig, GatewayConfig
from waltz_core.config.host_names import is_loopback
from waltz_core.errors import RequestRejected
from waltz_core.gateway import openapi
from waltz_core.gateway.callers import Caller, Callers
from waltz_core.gateway.http_appends import AppendReply, append_all
from waltz_core.gateway.http_feeds import (
    EVENT_STREAM,
    JSON_LINES,
    HttpFeed,
    as_json_line,
    as_server_sent_event,
    feed_config,
    fields_of_transaction,
)
from waltz_core.gateway.idempotent_appends import IdempotentAppends
from waltz_core.gateway.json_errors import fields_of, headers_of, status_of
from waltz_core.gateway.request_headers import check_content, check_local_host, key_in, length_of
from waltz_core.gateway.request_parsing import (
    BodyMemory,
    UrlParameters,
    check_number,
    check_partition,
    parse_integer,
    parse_transactions,
    with_partition,
)
from waltz_core.metrics import Metrics
from waltz_core.records import strict_json
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

RANGE_BYTES_MAX: Final = 1024 * 1024
# After these errors the client's stream of the partition continues.
_HARMLESS: Final = (errors.Superseded, errors.Unavailable, errors.UsageError)

HttpHandler: TypeAlias = Callable[[Request, Caller], Awaitable[Response]]


class GatewayParts(NamedTuple):
    """The parts of the gateway that the routes use."""

    config: GatewayConfig
    client_config: ClientConfig
    callers: Callers
    metrics: Metrics
    tasks: asyncio.TaskGroup  # of the daemon


class GatewayRoutes:
    """The operations of one gateway."""

    def __init__(self, parts: GatewayParts) -> None:
        config = parts.config
        self._parts = parts
        self._memory = BodyMemory(
            body_bytes_max=config.body_bytes_max, memory_bytes_max=config.memory_bytes_max
        )
        self._idempotent = IdempotentAppends(
            parts.callers,
            config.connect,
            retention_ms=config.idempotency_retention_ms,
            timeout_ms=config.request_timeout_ms,
        )
        self._is_local = is_loopback(config.listen_host) and not config.https_certificate
        self._turn = 0
        self.feed_count = 0

    def app(self) -> Starlette:
        """Return the application."""
        handlers: dict[str, HttpHandler] = {
            "append": self._append,
            "marks": self._marks,
            "range": self._range,
            "feed": self._feed,
        }
        routes = [
            Route(each.path, self._endpoint(each.name, handlers[each.name]), methods=[each.method])
            for each in openapi.OPERATIONS
        ]
        routes.append(Route(openapi.DOCUMENT_PATH, _document))
        app = Starlette(
            routes=routes, exception_handlers={404: _reject_operation, 405: _reject_operation}
        )
        app.router.redirect_slashes = False  # rule 1
        return app

    def _endpoint(
        self, name: str, handler: HttpHandler
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint with its caller, its errors and its metrics."""

        async def endpoint(request: Request) -> Response:
            began_s = time.monotonic()
            try:
                response = await self._respond(request, handler)
            except errors.WaltzError as error:
                response = _error_response(error)
            except ClientDisconnect:  # nothing reads the response
                response = _error_response(errors.BadRequest("the body is not complete"))
            except Exception:  # noqa: BLE001 - the top of a task (rule 3)
                _log.exception("gateway.request_failed operation=%s", name)
                response = _error_response(
                    errors.WaltzError("the gateway has failed; its log has the error")
                )
            metrics = self._parts.metrics
            metrics.add("waltz_gateway_requests_total", operation=name, status=response.status_code)
            metrics.observe(
                "waltz_gateway_request_seconds", time.monotonic() - began_s, operation=name
            )
            return response

        return endpoint

    async def _respond(self, request: Request, handler: HttpHandler) -> Response:
        if self._is_local:
            check_local_host(request.headers)
        authorization = request.headers.get("authorization")
        async with self._parts.callers.request_of(authorization) as caller:
            return await handler(request, caller)

    # --- append

    async def _append(self, request: Request, caller: Caller) -> Response:
        _query(request, ())
        check_content(request.headers)
        key = key_in(request.headers)
        async with self._memory.body(request.stream(), length_of(request.headers)) as body:
            count = caller.client.partition_count
            rows = parse_transactions(body, count)
            if key is not None:
                answer = await self._idempotent.append(caller, key, rows)
            else:
                self._turn += 1
                answer = await append_all(caller.client, with_partition(rows, self._turn % count))
        caller.is_over |= any(_ends_client(each) for each in answer.errors)
        self._count(answer)
        if answer.status == 503 and len(answer.errors) == len(rows):
            await self._parts.callers.check_token(caller)
        return _json(answer.fields, answer.status, answer.headers)

    def _count(self, answer: AppendReply) -> None:
        outcomes = answer.fields["outcomes"]
        committed = sum("transaction_id" in each for each in outcomes)
        self._parts.metrics.add("waltz_gateway_appended_transactions_total", committed)

    # --- marks and ranges

    async def _marks(self, request: Request, caller: Caller) -> Response:
        query = _query(request, ("partition", "linearizable"))
        count = caller.client.partition_count
        chosen = query.partitions(count)
        marks = await caller.client.high_water_marks(
            chosen or None, linearizable=query.flag("linearizable")
        )
        shown = {str(partition): int(mark) for partition, mark in sorted(marks.items())}
        return _json({"partition_count": count, "marks": shown})

    async def _range(self, request: Request, caller: Caller) -> Response:
        query = _query(request, ("first", "last", "header"))
        partition = _partition(request, caller)
        first = query.number("first")
        if first is None:
            raise RequestRejected("query parameter first", expected="an ID", found=None)
        last, headers = query.number("last"), query.headers()
        mark = await caller.client.high_water_mark(partition)
        end = mark if last is None else min(last, mark)
        found: dict[str, Any] = {"transactions": [], "next": first, "high_water_mark": int(mark)}
        if first > end:
            return _json(found)
        query_of = RangeQuery(
            TransactionId(first), TransactionId(end), RangeForm.WHOLE, headers, RANGE_BYTES_MAX
        )
        chunk = await caller.client.requests.fetch_range(PartitionId(partition), query_of)
        found["transactions"] = [fields_of_transaction(*row) for row in chunk.rows()]
        found["next"] = int(chunk.next)
        return _json(found)

    # --- the feed

    async def _feed(self, request: Request, caller: Caller) -> Response:
        query = _query(request, ("from", "header"))
        partition = _partition(request, caller)
        mark, headers = _start_of_feed(request, query), query.headers()
        encode, media = as_server_sent_event, EVENT_STREAM
        if JSON_LINES in request.headers.get("accept", ""):
            encode, media = as_json_line, JSON_LINES
        if self.feed_count >= self._parts.config.feeds_max:
            raise errors.Overloaded(
                f"the gateway has {self.feed_count} feeds (feeds_max). Hint: use another gateway, "
                "or read ranges."
            )
        self.feed_count += 1
        stack = AsyncExitStack()
        stack.callback(self._feed_ended)
        try:
            config = feed_config(self._parts.client_config)
            client = await stack.enter_async_context(self._parts.callers.own_client(caller, config))
            await client.open()
            reader = HttpFeed(client, partition, mark)
            await reader.check()
        except BaseException:
            await stack.aclose()
            raise
        # As a task: what ends the response also cancels everything that the response awaits.
        on_end = partial(self._parts.tasks.create_task, stack.aclose())
        return _FeedResponse(reader.events(headers, encode), media, on_end)

    def _feed_ended(self) -> None:
        self.feed_count -= 1


class _FeedResponse(StreamingResponse):
    """A feed; `on_end` is called when the response ends, for whatever reason."""

    def __init__(
        self, events: AsyncIterator[bytes], media: str, on_end: Callable[[], object]
    ) -> None:
        super().__init__(events, media_type=media, headers={"Cache-Control": "no-store"})
        self._on_end = on_end

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception:  # rule 3; the status has been sent, so the connection ends
            _log.exception("gateway.request_failed operation=feed")
            raise
        finally:
            self._on_end()


def _start_of_feed(request: Request, query: UrlParameters) -> int:
    """Return the mark after which a feed begins; `Last-Event-ID` is a later one than `from`."""
    text = request.headers.get("last-event-id")
    if text:
        return check_number(parse_integer(text), "header Last-Event-ID", minimum=BEFORE_FIRST)
    mark = query.number("from", minimum=BEFORE_FIRST)
    if mark is None:
        raise RequestRejected(
            "query parameter from",
            expected="the ID of the last transaction that you have applied, -1 for none",
            found=None,
        )
    return mark


def _partition(request: Request, caller: Caller) -> int:
    number = parse_integer(request.path_params["partition"])
    return check_partition(number, "partition in the path", caller.client.partition_count)


def _query(request: Request, known: tuple[str, ...]) -> UrlParameters:
    return UrlParameters(request.query_params.multi_items(), known)


def _ends_client(error: errors.WaltzError) -> bool:
    is_denied = isinstance(error, errors.AuthenticationFailed | errors.PermissionDenied)
    return is_denied or not isinstance(error, _HARMLESS)


async def _document(_request: Request) -> Response:
    return _json(openapi.document())


async def _reject_operation(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    hint = f"GET {openapi.DOCUMENT_PATH} returns the operations."
    text = f"there is no operation {request.method} {request.url.path[:200]}"
    fields = {"type": "BadRequest", "error": text, "hint": hint}
    return _json(fields, status, getattr(error, "headers", None))  # `Allow`


def _error_response(error: errors.WaltzError) -> Response:
    return _json(fields_of(error), status_of(error), headers_of(error))


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = strict_json.to_json(value) + b"\n"
    return Response(body, status, headers, media_type="application/json")
