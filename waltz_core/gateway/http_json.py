"""Helpers of all routes: they parse parameters of a request, and create responses in JSON."""

from collections.abc import Collection
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from waltz_core import errors
from waltz_core.gateway.json_errors import error_fields, error_headers, http_status_of
from waltz_core.gateway.request_parsing import UrlParameters, check_partition, parse_integer
from waltz_core.records import strict_json

_RESPONSE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def url_parameters(request: Request, known_names: Collection[str]) -> UrlParameters:
    """Return the query parameters of a request; raises RequestRejected for unknown ones."""
    return UrlParameters(request.query_params.multi_items(), known_names)


def partition_in_path(request: Request, partition_count: int) -> int:
    """Return the partition that the path names; raises RequestRejected or UnknownPartition."""
    number = parse_integer(request.path_params["partition"])
    return check_partition(number, "partition in the path", partition_count)


def error_response(error: errors.WaltzError) -> Response:
    """Return the response for an error."""
    return json_response(error_fields(error), http_status_of(error), error_headers(error))


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with JSON, which browsers neither store nor pass to other origins."""
    body = strict_json.to_json(value) + b"\n"
    return Response(
        body, status, _RESPONSE_HEADERS | (headers or {}), media_type="application/json"
    )
