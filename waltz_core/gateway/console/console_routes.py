"""The routes of the console: each checks its request, and returns the JSON that the pages show.

Rules:
    1. The pages themselves need no permission. Each request for JSON contains the token of the
       caller, like the other requests of the gateway (decision 066).
    2. These operations are only for the pages of the same version. They may change with each
       release, and are not in the OpenAPI document.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from waltz_core import errors
from waltz_core.access.principals import ANONYMOUS
from waltz_core.administration import member_connections
from waltz_core.errors import RequestRejected
from waltz_core.gateway.callers import Caller
from waltz_core.gateway.console.change_kinds import parse_change
from waltz_core.gateway.console.cluster_view import (
    FINDINGS_AGE_S_MAX,
    TIMEOUT_S,
    VIEW_AGE_S_MAX,
    ClusterViewer,
    Fields,
    SharedAnswers,
)
from waltz_core.gateway.console.rejection_rows import read_rejections
from waltz_core.gateway.console.running_changes import ChangeCaller, ConsoleChanges
from waltz_core.gateway.console.snapshot_reader import NO_ANSWER_TEXT
from waltz_core.gateway.console.transaction_pages import (
    first_transaction_at,
    read_page_from,
    read_page_until,
)
from waltz_core.gateway.http_json import json_response, partition_in_path, url_parameters
from waltz_core.gateway.openapi import HttpOperation
from waltz_core.gateway.request_headers import (
    check_content_headers,
    check_local_host,
    content_length,
)
from waltz_core.gateway.request_parsing import BodyReader, UrlParameters, check_integer
from waltz_core.records import strict_json

COUNT_DEFAULT: Final = 50
COUNT_MAX: Final = 200
PERMISSION_AGE_S_MAX: Final = 5.0

Handler = Callable[[Request, Caller], Awaitable[Response]]


class ConsoleRoutes:
    """The operations of the console of one gateway."""

    def __init__(
        self, viewer: ClusterViewer, changes: ConsoleChanges, bodies: BodyReader, *, has_tls: bool
    ) -> None:
        self._viewer, self._changes, self._bodies = viewer, changes, bodies
        self._has_tls = has_tls
        self._views: SharedAnswers[Fields] = SharedAnswers(VIEW_AGE_S_MAX)
        self._findings: SharedAnswers[Fields] = SharedAnswers(FINDINGS_AGE_S_MAX)
        self._permissions: SharedAnswers[Fields] = SharedAnswers(PERMISSION_AGE_S_MAX)

    def operations(self) -> list[tuple[HttpOperation, Handler]]:
        """Return all operations with their handlers."""
        prefix, partition = "/v1/console", "/v1/console/partitions/{partition}"
        operations: list[tuple[str, str, str, str, Handler]] = [
            ("cluster", "GET", f"{prefix}/cluster", "Show the cluster.", self._show_cluster),
            ("findings", "GET", f"{prefix}/findings", "Check the cluster.", self._show_findings),
            ("changes", "GET", f"{prefix}/changes", "List the changes.", self._list_changes),
            ("change", "POST", f"{prefix}/changes", "Start a change.", self._start_change),
            (
                "transactions",
                "GET",
                f"{partition}/transactions",
                "Show transactions.",
                self._show_transactions,
            ),
            (
                "first_at",
                "GET",
                f"{partition}/first-at",
                "Find the first transaction at or after a time.",
                self._find_time,
            ),
            (
                "rejections",
                "GET",
                f"{partition}/rejections",
                "Show rejected appends.",
                self._show_rejections,
            ),
        ]
        return [
            (HttpOperation(f"console_{name}", method, path, summary), handler)
            for name, method, path, summary, handler in operations
        ]

    # --- the cluster

    async def _show_cluster(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        member_connections.use_ssl_context(caller.client.ssl_context)
        key = caller.token_hash
        view = await self._views.get(key, lambda: self._viewer.view(key))
        permission = await self._permissions.get(key, lambda: self._permission_fields(caller))
        return json_response(view | permission)

    async def _show_findings(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        member_connections.use_ssl_context(caller.client.ssl_context)
        key = caller.token_hash
        return json_response(await self._findings.get(key, lambda: self._viewer.findings(key)))

    # --- changes

    async def _permission_fields(self, caller: Caller) -> Fields:
        """Return whether the caller may change the cluster, and otherwise the reason."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._changes.check_permitted(_change_caller(caller))
        except errors.AuthenticationFailed:
            raise
        except TimeoutError:
            return {"can_change": False, "cannot_change_reason": NO_ANSWER_TEXT}
        except errors.WaltzError as error:
            return {"can_change": False, "cannot_change_reason": str(error)}
        return {"can_change": True, "cannot_change_reason": ""}

    async def _list_changes(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        permission = await self._permission_fields(caller)
        if not permission["can_change"]:
            return json_response({"kinds": [], "running": [], "history": []} | permission)
        return json_response(await self._changes.fields() | permission)

    async def _start_change(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        check_content_headers(request.headers)
        async with self._bodies.body(request.stream(), content_length(request.headers)) as body:
            kind, arguments = parse_change(_parse_json(body))
        principal = await self._changes.check_permitted(_change_caller(caller))
        if principal == ANONYMOUS and not self._has_tls:
            check_local_host(request.headers, "the gateway has no TLS and the caller no token")
        change = await self._changes.start(_change_caller(caller), kind, arguments)
        return json_response({"id": str(change.number)}, 202)

    # --- partitions

    async def _show_transactions(self, request: Request, caller: Caller) -> Response:
        query = url_parameters(request, ("first", "last", "count", "header"))
        partition = partition_in_path(request, caller.client.partition_count)
        first, last = query.integer("first"), query.integer("last", minimum=-1)
        count, headers = _row_count(query), query.headers()
        if first is None:
            page = await read_page_until(caller.client, partition, last, count, headers)
        elif last is None:
            page = await read_page_from(caller.client, partition, first, count, headers)
        else:
            raise RequestRejected(
                "the query parameters", expected="first or last", found="both of them"
            )
        return json_response(page)

    async def _find_time(self, request: Request, caller: Caller) -> Response:
        query = url_parameters(request, ("time_ms",))
        partition = partition_in_path(request, caller.client.partition_count)
        time_ms = query.integer("time_ms")
        if time_ms is None:
            raise RequestRejected(
                "query parameter time_ms", expected="milliseconds since 1970", found=None
            )
        return json_response(await first_transaction_at(caller.client, partition, time_ms))

    async def _show_rejections(self, request: Request, caller: Caller) -> Response:
        url_parameters(request, ())
        partition = partition_in_path(request, caller.client.partition_count)
        return json_response({"rejections": await read_rejections(caller.client, partition)})


def _change_caller(caller: Caller) -> ChangeCaller:
    return ChangeCaller(caller.token_hash, caller.client.ssl_context)


def _row_count(query: UrlParameters) -> int:
    count = query.integer("count")
    return check_integer(
        COUNT_DEFAULT if count is None else count,
        "query parameter count",
        minimum=1,
        maximum=COUNT_MAX,
    )


def _parse_json(body: bytes) -> Any:  # noqa: ANN401 - any value of JSON
    try:
        return strict_json.from_json(body)
    except ValueError as error:
        raise RequestRejected(
            "the body", expected="valid JSON", found=f"invalid JSON: {error}"
        ) from error
