"""Creates the OpenAPI document of the gateway, from which programs generate clients."""

from typing import Any, Final, NamedTuple

from waltz_core import __version__
from waltz_core.gateway.http_feeds import EVENT_STREAM_TYPE, JSON_LINES_TYPE
from waltz_core.gateway.json_errors import HTTP_STATUSES
from waltz_core.gateway.request_headers import KEY_CHARACTERS_MAX
from waltz_core.gateway.request_parsing import TRANSACTIONS_MAX

DOCUMENT_PATH: Final = "/v1/openapi.json"


class HttpOperation(NamedTuple):
    """One HTTP operation: name in metrics, method, path, and a one-line summary."""

    name: str
    method: str
    path: str
    summary: str


OPERATIONS: Final = (
    HttpOperation("append", "POST", "/v1/transactions", "Append transactions."),
    HttpOperation("marks", "GET", "/v1/marks", "Return the high-water marks of partitions."),
    HttpOperation(
        "range",
        "GET",
        "/v1/partitions/{partition}/transactions",
        "Return committed transactions, about 1 MiB at a time.",
    ),
    HttpOperation(
        "feed",
        "GET",
        "/v1/partitions/{partition}/feed",
        "Stream the committed transactions after a mark, and new ones as they are committed.",
    ),
)

_ID_OR_MARK: Final = {"type": "integer", "format": "int64", "minimum": -1}
_RANGE_ID: Final = _ID_OR_MARK | {"minimum": 0}
_INT32: Final = {"type": "integer", "format": "int32"}
_PARTITION: Final = {"type": "integer", "format": "int32", "minimum": 0}
_TEXT: Final = {"type": "string"}
_BASE64: Final = {"type": "string", "contentEncoding": "base64"}
_LOCKS: Final = {
    "type": "array",
    "items": {
        "description": "Name and key of a lock.",
        "type": "array",
        "prefixItems": [_TEXT, {"type": ["string", "integer"]}],
        "minItems": 2,
        "maxItems": 2,
    },
}
_SCHEMAS: Final[dict[str, Any]] = {
    "NewTransaction": {
        "type": "object",
        "properties": {
            "data": _BASE64,
            "header": _INT32 | {"default": 0},
            "partition": _PARTITION
            | {
                "description": "Default: the partition of the first lock, otherwise the gateway "
                "chooses one."
            },
            "write_locks": _LOCKS,
            "read_locks": _LOCKS,
            "append_locks": _LOCKS,
            "mark": _ID_OR_MARK
            | {
                "description": "The mark of the state from which the transaction was computed. "
                "Required if the transaction has write locks or read locks."
            },
        },
        "required": ["data"],
        "additionalProperties": False,
    },
    "Append": {
        "type": "object",
        "properties": {
            "transactions": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/NewTransaction"},
                "minItems": 1,
                "maxItems": TRANSACTIONS_MAX,
            }
        },
        "required": ["transactions"],
        "additionalProperties": False,
    },
    "Outcome": {
        "description": "A committed transaction has an ID. Any other has the fields of Error.",
        "type": "object",
        "properties": {
            "partition": _PARTITION,
            "transaction_id": _ID_OR_MARK,
            "type": _TEXT,
            "error": _TEXT,
            "hint": _TEXT,
            "winner": _ID_OR_MARK,
            "high_water_mark": _ID_OR_MARK,
        },
        "required": ["partition"],
    },
    "Outcomes": {
        "type": "object",
        "properties": {
            "outcomes": {"type": "array", "items": {"$ref": "#/components/schemas/Outcome"}}
        },
        "required": ["outcomes"],
    },
    "Error": {
        "type": "object",
        "properties": {
            "type": _TEXT | {"description": "The class of the error."},
            "error": _TEXT | {"description": "What failed."},
            "expected": {"description": "The expected value."},
            "found": {"description": "The found value."},
            "hint": _TEXT | {"description": "What to do."},
            "winner": _ID_OR_MARK | {"description": "The transaction that has written the lock."},
            "high_water_mark": _ID_OR_MARK
            | {"description": "Read the log up to this mark, then compute the transaction again."},
            "first_available": _ID_OR_MARK,
            "outcomes": {"type": "array", "items": {"$ref": "#/components/schemas/Outcome"}},
        },
        "required": ["type", "error"],
    },
    "Marks": {
        "type": "object",
        "properties": {
            "partition_count": _PARTITION,
            "marks": {"type": "object", "additionalProperties": _ID_OR_MARK},
        },
        "required": ["partition_count", "marks"],
    },
    "Transaction": {
        "type": "object",
        "properties": {"transaction_id": _ID_OR_MARK, "header": _INT32, "data": _BASE64},
        "required": ["transaction_id", "header", "data"],
    },
    "Range": {
        "type": "object",
        "properties": {
            "transactions": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Transaction"},
            },
            "next": _ID_OR_MARK | {"description": "The first ID after this range."},
            "high_water_mark": _ID_OR_MARK,
        },
        "required": ["transactions", "next", "high_water_mark"],
    },
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document with all operations."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths[operation.path] = {
            operation.method.lower(): _OPERATION_DETAILS[operation.name]
            | _common_details(operation)
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Waltz gateway",
            "version": __version__,
            "description": "docs/gateway.md describes the operations and their guarantees.",
        },
        "paths": paths,
        "security": [{}, {"token": []}],
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _common_details(operation: HttpOperation) -> dict[str, Any]:
    details = _OPERATION_DETAILS[operation.name]
    error_responses = {
        str(status): _error_response(status) for status in _ERROR_STATUSES[operation.name]
    }
    responses = {
        **error_responses,
        **details["responses"],
        "default": _response("An error.", "Error"),
    }
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }


def _response(text: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": text, "content": content}


def _error_response(status: int) -> dict[str, Any]:
    types = sorted({kind.__name__ for kind, http_status in HTTP_STATUSES if http_status == status})
    response = _response(f"An error, such as {', '.join(types)}.", "Error")
    if status in (429, 503):
        text = "The seconds after which to repeat the request."
        response["headers"] = {"Retry-After": {"description": text, "schema": {"type": "integer"}}}
    return response


def _parameter(
    name: str, location: str, text: str, schema: dict[str, Any], *, is_required: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "in": location,
        "description": text,
        "schema": schema,
        "required": is_required,
    }


_PARTITION_IN_PATH: Final = _parameter(
    "partition", "path", "The partition.", _PARTITION, is_required=True
)
_HEADER_FILTER: Final = _parameter(
    "header", "query", "Only transactions with one of these headers, such as `7,8`.", _TEXT
)
_COMMON_STATUSES: Final = (400, 401, 403, 429, 503)
_ERROR_STATUSES: Final = {
    "append": (*_COMMON_STATUSES, 404, 413, 415, 422, 504),
    "marks": (*_COMMON_STATUSES, 404),
    "range": (*_COMMON_STATUSES, 404, 410),
    "feed": (*_COMMON_STATUSES, 404, 409, 410),
}
_OPERATION_DETAILS: Final[dict[str, dict[str, Any]]] = {
    "append": {
        "parameters": [
            _parameter(
                "Idempotency-Key",
                "header",
                "A request with the same key and the same transactions has the same outcomes.",
                _TEXT | {"pattern": f"^[A-Za-z0-9._~-]{{1,{KEY_CHARACTERS_MAX}}}$"},
            )
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Append"}}},
        },
        "responses": {
            "200": _response("All transactions are committed.", "Outcomes"),
            "409": _response(
                "A lock has rejected transactions (LockFailed), or a mark is above the log "
                "(ClientAheadOfLog).",
                "Error",
            ),
        },
    },
    "marks": {
        "parameters": [
            _parameter("partition", "query", "Partitions, such as `0,3`; default: all.", _TEXT),
            _parameter(
                "linearizable",
                "query",
                "If true, a quorum confirms the marks before the gateway answers.",
                {"type": "boolean", "default": False},
            ),
        ],
        "responses": {"200": _response("The marks.", "Marks")},
    },
    "range": {
        "parameters": [
            _PARTITION_IN_PATH,
            _parameter("first", "query", "The first ID.", _RANGE_ID, is_required=True),
            _parameter("last", "query", "The last ID, inclusive; default: the end.", _RANGE_ID),
            _HEADER_FILTER,
        ],
        "responses": {"200": _response("The transactions.", "Range")},
    },
    "feed": {
        "parameters": [
            _PARTITION_IN_PATH,
            _parameter("from", "query", "The last transaction that you have applied.", _ID_OR_MARK),
            _parameter(
                "Last-Event-ID", "header", "Replaces `from` after a reconnect.", _ID_OR_MARK
            ),
            _HEADER_FILTER,
        ],
        "responses": {
            "200": {
                "description": "Events until the connection ends.",
                "content": {
                    EVENT_STREAM_TYPE: {"schema": _TEXT},
                    JSON_LINES_TYPE: {"schema": _TEXT},
                },
            }
        },
    },
}
