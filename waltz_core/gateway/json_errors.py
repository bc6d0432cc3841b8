"""Errors as HTTP responses: a status, and JSON with `type`, `error`, `expected`, `found`, `hint`.

Rules:
    1. `type` is the name of a class of `waltz_core.errors`; docs/reference/errors.md lists them.
    2. Without an idempotency key, a transaction with an error is not in the log, except after
       `OutcomeUnknown`, which has status 504. With a key, a request with status 5xx may have
       appended transactions; the same request determines it.
    3. A response with status 429 or 503 has `Retry-After`.
"""

import math
from typing import TYPE_CHECKING, Any, Final

from waltz_core import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

# The first class that matches decides.
STATUS_OF: Final[tuple[tuple[type[errors.WaltzError], int], ...]] = (
    (errors.AuthenticationFailed, 401),
    (errors.PermissionDenied, 403),
    (errors.UnknownPartition, 404),
    (errors.ClientAheadOfLog, 409),
    (errors.BeforeLogStart, 410),
    (errors.TooLarge, 413),
    (errors.UsageError, 400),
    (errors.LockFailed, 409),
    (errors.Overloaded, 429),
    (errors.OutcomeUnknown, 504),
    (errors.Unavailable, 503),
    (errors.Superseded, 503),
)
RETRY_AFTER_S: Final = 1


class RequestRejected(errors.BadRequest):
    """A request with a wrong value, and what was expected; `status` is 400 or a more exact one."""

    def __init__(
        self,
        message: str,
        *,
        expected: str,
        found: object,
        hint: str = "",
        status: int = 400,
    ) -> None:
        super().__init__(f"{message}: expected {expected}, found {found!r:.200}")
        self.message = message
        self.expected = expected
        self.found = found
        self.hint = hint
        self.status = status


def status_of(error: errors.WaltzError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestRejected):
        return error.status
    return next((status for kind, status in STATUS_OF if isinstance(error, kind)), 500)


def headers_of(error: errors.WaltzError) -> dict[str, str]:
    """Return the headers of an error's response."""
    status = status_of(error)
    if status in (429, 503):
        pause_ms = error.retry_after_ms if isinstance(error, errors.Overloaded) else 0
        return {"Retry-After": str(max(RETRY_AFTER_S, math.ceil(pause_ms / 1000)))}
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}


def fields_of(error: errors.WaltzError) -> dict[str, Any]:
    """Return the JSON of an error."""
    if isinstance(error, RequestRejected):
        found = error.found if _is_short(error.found) else repr(error.found)[:200]
        named: Mapping[str, Any] = {
            "error": error.message,
            "expected": error.expected,
            "found": found,
            "hint": error.hint,
        }
        return {"type": "BadRequest", **{name: each for name, each in named.items() if each != ""}}
    message, _, hint = str(error).partition(" Hint: ")
    fields: dict[str, Any] = {"type": type(error).__name__, "error": message}
    if isinstance(error, errors.OutcomeUnknown) and not hint:
        hint = "Send the request again with the same Idempotency-Key, if it had one."
    if hint:
        fields["hint"] = hint[0].upper() + hint[1:]
    if isinstance(error, errors.LockFailed):
        fields |= {"winner": error.conflicting, "high_water_mark": error.high_water_mark}
    if isinstance(error, errors.BeforeLogStart) and error.first_available >= 0:
        fields["first_available"] = error.first_available
    return fields


def _is_short(value: object) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= 200)
    )
