"""Appends of a request without an idempotency key, and the JSON of the outcomes of all appends.

Rules:
    1. Each transaction has its own outcome, in the order of the request. A request is not atomic.
    2. The transactions of one partition enter the log in the order of the request.
    3. The status is 200 if all transactions are committed, and otherwise the status of the worst
       outcome. An unknown outcome is worse than a transaction that is not in the log.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from waltz_core import errors
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.gateway.json_errors import error_fields, error_headers, http_status_of
from waltz_core.gateway.request_parsing import NewTransaction

if TYPE_CHECKING:
    import asyncio

    from waltz_core.records.record import TransactionId

_Outcome: TypeAlias = "TransactionId | errors.WaltzError"
# Worst first.
_STATUSES_BY_SEVERITY: Final = (500, 504, 401, 403, 503, 429, 413, 404, 400, 409)


class AppendReply(NamedTuple):
    """The answer to an append request: HTTP status, headers, JSON body, and all errors in it."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]
    errors: list[errors.WaltzError]


async def append_transactions(
    client: AsyncWaltzClient, rows: Sequence[NewTransaction]
) -> AppendReply:
    """Append transactions without an idempotency key; return the answer with all outcomes."""
    pending: list[tuple[int, asyncio.Future[TransactionId] | errors.WaltzError]] = []
    for row in rows:
        try:
            pending.append((row.partition, await _append(client, row)))
        except errors.WaltzError as error:
            pending.append((row.partition, error))
    outcomes: list[tuple[int, _Outcome]] = []
    for partition, future in pending:
        if isinstance(future, errors.WaltzError):
            outcomes.append((partition, future))
            continue
        try:
            outcomes.append((partition, await future))
        except errors.WaltzError as error:
            outcomes.append((partition, error))
    return reply_of_outcomes(outcomes)


async def _append(client: AsyncWaltzClient, row: NewTransaction) -> "asyncio.Future[TransactionId]":
    return await client.append(
        row.data,
        partition=row.partition,
        header=row.header,
        write_locks=row.write_locks,
        read_locks=row.read_locks,
        append_locks=row.append_locks,
        client_high_water_mark=row.mark,
    )


def reply_of_outcomes(outcomes: Sequence[tuple[int, _Outcome]]) -> AppendReply:
    """Return the answer to a request from the partition and the outcome of each transaction."""
    outcome_fields = [
        {"partition": partition, **error_fields(outcome)}
        if isinstance(outcome, errors.WaltzError)
        else {"partition": partition, "transaction_id": int(outcome)}
        for partition, outcome in outcomes
    ]
    failures = [outcome for _, outcome in outcomes if isinstance(outcome, errors.WaltzError)]
    if not failures:
        return AppendReply(200, {}, {"outcomes": outcome_fields}, [])
    worst_error = min(failures, key=_severity_rank)
    fields = error_fields(worst_error) | {"outcomes": outcome_fields}
    return AppendReply(http_status_of(worst_error), error_headers(worst_error), fields, failures)


def _severity_rank(error: errors.WaltzError) -> int:
    status = http_status_of(error)
    return _STATUSES_BY_SEVERITY.index(status) if status in _STATUSES_BY_SEVERITY else -1
