"""The latest rejections of a partition, with the client of each winning transaction."""

from collections.abc import Sequence
from typing import Any, Final

from waltz_core import errors
from waltz_core.client import RangeForm
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.read.ranges import RangeQuery
from waltz_core.client.read.reported_rejections import Rejection
from waltz_core.records.record import REQ_ID, PartitionId, ReqId, TransactionId

# The maximum number of rejections for which the gateway reads the winner's client ID. Each of these
# reads is one request. The page shows the newest rejections first.
WINNERS_MAX: Final = 20


async def read_rejections(client: AsyncWaltzClient, partition: int) -> list[dict[str, Any]]:
    """Return the rejections as JSON, newest first; `winner` is -1 if no lock was the reason.

    Raises:
        PermissionDenied: the caller may neither read nor administer the partition.
        BadRequest: the server is too old.
    """
    rejections = await client.recent_rejections(partition)
    client_ids = await _client_ids_of_winners(client, partition, rejections)
    return [
        {
            "time_ms": rejection.time_ms,
            "client_id": rejection.req_id.client_id,
            "request_id": str(rejection.req_id),
            "reason": rejection.reason.name.lower(),
            "winner": rejection.conflicting,
            "winner_client_id": client_ids.get(rejection.conflicting),
        }
        for rejection in rejections
    ]


async def _client_ids_of_winners(
    client: AsyncWaltzClient, partition: int, rejections: Sequence[Rejection]
) -> dict[TransactionId, int]:
    """Return the client IDs of the newest winners, as far as the caller may read them."""
    winners = dict.fromkeys(
        rejection.conflicting for rejection in rejections if rejection.conflicting >= 0
    )
    client_ids: dict[TransactionId, int] = {}
    for winner in list(winners)[:WINNERS_MAX]:
        query = RangeQuery(winner, winner, RangeForm.HEADERS)
        try:
            chunk = await client.requests.fetch_range(PartitionId(partition), query)
        except (errors.PermissionDenied, errors.BeforeLogStart):
            break
        if chunk.count:  # in this form, a record begins with its transaction ID of 8 bytes
            client_ids[winner] = ReqId(*REQ_ID.unpack_from(chunk.records, 8)).client_id
    return client_ids
