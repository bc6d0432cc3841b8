"""The feed of a partition as server-sent events or as lines of JSON.

Rules:
    1. Each feed has a separate client, because a client has only one feed for each partition.
    2. A slow reader must not use unlimited memory. At most one batch of events, of about
       `BATCH_BYTES_MAX`, waits for the reader. Then the feed pauses: the client requests no more
       data, and the server's buffer for this client is bounded. If a reader reads nothing for a
       time, the HTTP port closes the connection of the reader (http_port.py, rule 5).
    3. After `HEARTBEAT_S` without a transaction, the gateway sends a heartbeat with the mark of the
       feed. With a filter, this mark also advances past transactions that do not match.
    4. The gateway checks the position and the permissions before the response begins, so that most
       errors determine the status of the response. A later error that ends the feed is the last
       event. At each heartbeat, the gateway checks the token. The client itself would not report an
       invalid token, but wait until the token is valid again.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from waltz_core import errors
from waltz_core.client import AsyncTransaction, AsyncWaltzClient, PoisonPolicy, RangeForm
from waltz_core.client.model.callbacks import default_policy
from waltz_core.client.read.data_cache import DataBudget
from waltz_core.client.read.feed_delivery import DeliveryProgress, DeliveryRun
from waltz_core.client.read.ranges import RangeQuery
from waltz_core.config.declarations import ClientConfig
from waltz_core.gateway.json_errors import error_fields
from waltz_core.records import strict_json
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId

BATCH_TRANSACTIONS_MAX: Final = 256
BATCH_BYTES_MAX: Final = 256 * 1024
CACHE_BYTES_MAX: Final = 4 * 1024 * 1024
PREFETCH_COUNT_MAX: Final = 4_096
HEARTBEAT_S: Final = 10.0
EVENT_STREAM_TYPE: Final = "text/event-stream"
JSON_LINES_TYPE: Final = "application/x-ndjson"


class _EventBatch(NamedTuple):
    """Consecutive events of a feed with their marks, and the mark after the last event."""

    events: Sequence[tuple[int, dict[str, Any]]]
    mark: int
    is_last: bool = False


EncodeEvent = Callable[[int, dict[str, Any] | None], bytes]


def feed_client_config(config: ClientConfig) -> ClientConfig:
    """Return the settings of a feed's client; it prefetches little, as there are many feeds."""
    return replace(config, feed_prefetch_count_max=PREFETCH_COUNT_MAX)


class HttpFeed:
    """Receives the feed of one partition after a mark, and yields its events."""

    is_batched = True

    def __init__(self, client: AsyncWaltzClient, partition: int, mark: int) -> None:
        self._client = client
        self._partition = partition
        self._mark = mark  # the mark after the events that were yielded
        self._event_batches: asyncio.Queue[_EventBatch] = asyncio.Queue(
            1
        )  # full: `apply` waits (rule 2)
        client.subscriptions.data_budget = DataBudget(CACHE_BYTES_MAX)

    async def check_start(self) -> None:
        """Check that the log contains the position, and that the caller may read it (rule 4).

        Raises:
            PermissionDenied, AuthenticationFailed: the caller may not read the partition.
            ClientAheadOfLog, BeforeLogStart: the log does not contain the position.
        """
        last = await self._client.high_water_mark(self._partition)
        if self._mark > last:
            last = await self._client.high_water_mark(self._partition, linearizable=True)
        if self._mark > last:
            raise errors.ClientAheadOfLog(
                f"partition {self._partition}: the mark {self._mark} is above the log's "
                f"high-water mark {last}. Hint: the mark may come from another cluster."
            )
        if last > BEFORE_FIRST:
            first = min(self._mark + 1, last)
            query = RangeQuery(TransactionId(first), TransactionId(first), RangeForm.HEADERS)
            await self._client.requests.fetch_range(PartitionId(self._partition), query)

    async def events(
        self, header_values: tuple[int, ...], encode: EncodeEvent
    ) -> AsyncIterator[bytes]:
        """Subscribe, and yield the encoded events and heartbeats (rule 3)."""
        await self._client.subscribe_consumer(self, [self._partition], header_values)
        yield encode(self._mark, None)
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    batch = await self._event_batches.get()
            except TimeoutError:
                try:
                    await self._check_token()
                except errors.AuthenticationFailed as error:
                    yield encode(self._mark, error_fields(error))
                    return
                if self._event_batches.empty():
                    yield encode(self._mark, None)
                continue
            if batch.events:
                yield b"".join(encode(mark, fields) for mark, fields in batch.events)
            self._mark = batch.mark
            if batch.is_last:
                return

    async def _check_token(self) -> None:
        owner = self._client.directory.owners.get(PartitionId(self._partition))
        if owner is None:
            return
        try:
            await self._client.links.get(owner.address)
        except errors.AuthenticationFailed:
            raise
        except (errors.Unavailable, errors.ProtocolError):
            return  # the client of the feed tries again, and logs the error

    # --- the consumer of the client's feed

    async def start_mark(self, partition_id: PartitionId) -> TransactionId:
        """Return the position after which the feed begins."""
        return TransactionId(self._mark)

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        """Queue transactions as events; wait while the reader is slow (rule 2)."""
        source = self._client.subscriptions.data_cache(partition_id)
        events: list[tuple[int, dict[str, Any]]] = []
        size, row_error = 0, None
        try:
            for number, row in run[:BATCH_TRANSACTIONS_MAX]:
                if not is_running() or size > BATCH_BYTES_MAX:
                    break
                transaction = AsyncTransaction(partition_id, TransactionId(number), row, source)
                data = await transaction.data()
                size += len(data)
                events.append((number, transaction_fields(number, transaction.header, data)))
        except errors.WaltzError as error:
            row_error = error
        if events or not run:
            mark = last if len(events) == len(run) else events[-1][0]
            await self._event_batches.put(_EventBatch(events, mark))
        return DeliveryProgress(len(events), row_error)

    async def on_uncaught_exception(
        self,
        partition_id: PartitionId,
        transaction_id: TransactionId,
        error: Exception,
    ) -> PoisonPolicy:
        """Report an error that ends the feed (rule 4); other errors are retried."""
        policy = default_policy(error)
        if policy is PoisonPolicy.STOP:
            waltz_error = (
                error if isinstance(error, errors.WaltzError) else errors.WaltzError(str(error))
            )
            last_mark = transaction_id - 1
            await self._event_batches.put(
                _EventBatch([(last_mark, error_fields(waltz_error))], last_mark, is_last=True)
            )
        return policy


def transaction_fields(transaction_id: int, header: int, data: bytes) -> dict[str, Any]:
    """Return the JSON fields of a transaction; the data is Base64."""
    text = base64.b64encode(data).decode("ascii")
    return {"transaction_id": transaction_id, "header": header, "data": text}


def as_server_sent_event(mark: int, fields: dict[str, Any] | None) -> bytes:
    """Encode an event; its ID is the mark. A browser sends this ID again as `Last-Event-ID`."""
    if fields is None:
        return b": heartbeat\nid: %d\n\n" % mark
    kind = b"error" if "type" in fields else b"transaction"
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (mark, kind, strict_json.to_json(fields))


def as_json_line(mark: int, fields: dict[str, Any] | None) -> bytes:
    """Encode an event as a line; a heartbeat contains only the mark."""
    return strict_json.to_json({"mark": mark} if fields is None else fields) + b"\n"
