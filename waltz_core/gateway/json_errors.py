"""Errors as HTTP responses: a status, and JSON with `type`, `error`, `expected`, `found`, `hint`.

Rules:
    1. `type` is the name of a class of `waltz_core.errors`; docs/reference/errors.md lists them.
    2. Without an idempotency key, a transaction with an error is not in the log, with two
       exceptions: `OutcomeUnknown` (status 504), and a failure of the gateway (status 500). With a
       key, a request with status 5xx may have appended transactions. To learn the outcome, the
       application sends the same request again.
    3. A response with status 429 or 503 has `Retry-After`.
"""

import math
from typing import Any, Final

from waltz_core import errors

# The first class that matches decides.
HTTP_STATUSES: Final[tuple[tuple[type[errors.WaltzError], int], ...]] = (
    (errors.AuthenticationFailed, 401),
    (errors.PermissionDenied, 403),
    (errors.UnknownPartition, 404),
    (errors.ClientAheadOfLog, 409),
    (errors.BeforeLogStart, 410),
    (errors.TooLarge, 413),
    (errors.UnsupportedMediaType, 415),
    (errors.IdempotencyKeyReused, 422),
    (errors.UsageError, 400),
    (errors.LockFailed, 409),
    (errors.Overloaded, 429),
    (errors.OutcomeUnknown, 504),
    (errors.Unavailable, 503),
    (errors.Superseded, 503),
)
RETRY_AFTER_S: Final = 1


def http_status_of(error: errors.WaltzError) -> int:
    """Return the HTTP status for an error; 500 for an unexpected error."""
    return next((status for kind, status in HTTP_STATUSES if isinstance(error, kind)), 500)


def error_headers(error: errors.WaltzError) -> dict[str, str]:
    """Return the additional headers of a response with this error (rule 3)."""
    status = http_status_of(error)
    if status in (429, 503):
        pause_ms = error.retry_after_ms if isinstance(error, errors.Overloaded) else 0
        return {"Retry-After": str(max(RETRY_AFTER_S, math.ceil(pause_ms / 1000)))}
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}


def error_fields(error: errors.WaltzError) -> dict[str, Any]:
    """Return the JSON fields of an error."""
    kind = type(error).__name__
    if isinstance(error, errors.RequestRejected) and error.expected:
        details = {"expected": error.expected, "found": error.found, "hint": error.hint}
        present_details = {name: detail for name, detail in details.items() if detail != ""}
        return {"type": kind, "error": str(error), **present_details}
    message, _, hint = str(error).partition(" Hint: ")
    fields: dict[str, Any] = {"type": kind, "error": message}
    if isinstance(error, errors.OutcomeUnknown) and not hint:
        hint = "Send the request again with the same Idempotency-Key, if it had one."
    if hint:
        fields["hint"] = hint[0].upper() + hint[1:]
    if isinstance(error, errors.LockFailed):
        fields |= {"winner": error.conflicting, "high_water_mark": error.high_water_mark}
    if isinstance(error, errors.BeforeLogStart) and error.first_available >= 0:
        fields["first_available"] = error.first_available
    return fields
