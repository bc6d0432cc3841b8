"""Runs the feed of one partition, from the application's mark to the end of the log and beyond.

If an application was stopped for a day, it is millions of transactions behind. Its client reads
these transactions as ranges of headers, as fast as the application applies them. Only the last
transactions arrive as a feed from the server.

Rules:
    1. A server may be unavailable for any time: a request is repeated until it is answered, or
       until the feed has ended for another reason.
    2. An error that no retry can fix ends the feed and is reported to the application.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from waltz_core import errors
from waltz_core.client.links.outage_log import OutageLog
from waltz_core.client.read.data_cache import DataCache
from waltz_core.client.read.feed_delivery import Applier, Consumer
from waltz_core.client.read.ranges import RangeQuery
from waltz_core.client.read.requests import OwnerRequests
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.raw_records import FEED_HEADER_DTYPE, HEADER_DTYPE
from waltz_core.records.record import TransactionId
from waltz_core.wire.messages import RangeForm

T = TypeVar("T")


class Recipient(NamedTuple):
    """The consumer of a feed, and the application headers that it requests (empty: all)."""

    consumer: Consumer
    header_values: tuple[int, ...]


class CatchUp:
    """Reads one partition from a mark until its feed begins, and again whenever it lags far."""

    def __init__(
        self,
        partition: ClientPartition,
        recipient: Recipient,
        requests: OwnerRequests,
        config: ClientConfig,
        data: DataCache,
    ) -> None:
        self._partition = partition
        self._requests = requests
        self._config = config
        self._header_values = recipient.header_values
        self._data = data
        self._applier = Applier(
            partition.partition_id, recipient.consumer, self._on_applied, partition.tracer
        )
        self._outage = OutageLog(partition.partition_id, "range")
        partition.applier = self._applier
        partition.fetch = self._fetch_all

    @property
    def applier(self) -> Applier:
        """The applier that passes the feed on to the application."""
        return self._applier

    async def run(self, mark: TransactionId | None) -> None:
        """Pass the feed to the application, from `mark` on; None starts at the end of the log."""
        if mark is None:
            try:
                mark = await self._query_until_answered(self._request_mark)
            except errors.WaltzError as error:
                await self._applier.stop(error)
                return
            self._applier.start(mark)
        self._partition.subscribe(mark, self._header_values)
        try:
            await self._applier.run()
        except Exception as error:  # for example, no thread can be started
            await self._applier.stop(error)
            raise

    def _on_applied(self, mark: TransactionId) -> None:
        self._data.release_applied(mark)
        self._partition.on_feed_applied(mark)

    async def _fetch_all(self, fetched_mark: TransactionId, last: TransactionId) -> None:
        """Fetch and queue the transactions after a mark, until the end of the log is near."""
        lag_max = self._partition.settings.feed_lag_max
        try:
            while last - fetched_mark > lag_max // 2 and self._applier.stopped is None:
                fetched_mark = await self._query_until_answered(
                    partial(self._fetch_next_range, fetched_mark, last)
                )
                if fetched_mark >= last:
                    last = await self._query_until_answered(self._request_mark)
        except errors.WaltzError as error:
            await self._applier.stop(error)
            return
        except Exception as error:
            await self._applier.stop(error)
            raise
        if self._applier.stopped is None:
            self._partition.on_feed_caught_up(fetched_mark)

    async def _query_until_answered(self, query: Callable[[], Awaitable[T]]) -> T:
        """Repeat a query until it is answered (rule 1).

        Raises any error other than `Unavailable`. If the feed has ended, raises even `Unavailable`.
        """
        pause_s = self._config.retry_interval_ms_min / 1000
        while True:
            try:
                answer = await query()
            except errors.Unavailable as error:
                if self._applier.stopped is not None:
                    raise
                self._outage.note_failure(error)
            else:
                self._outage.note_success()
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.retry_interval_ms_max / 1000)

    async def _fetch_next_range(
        self, fetched_mark: TransactionId, last: TransactionId
    ) -> TransactionId:
        """Fetch one range, and queue it when the application is near enough; return its last ID."""
        partition_id = self._partition.partition_id
        query = RangeQuery(
            TransactionId(fetched_mark + 1),
            last,
            RangeForm.HEADERS,
            self._header_values,
            self._config.range_bytes_max,
        )
        chunk = await self._requests.fetch_range(partition_id, query)
        if chunk.next <= query.first:
            raise errors.DataLoss(
                f"partition {partition_id} has lost transactions: its log ended at {last}, "
                f"and now ends at {fetched_mark}"
            )
        record_headers = np.frombuffer(chunk.records, dtype=HEADER_DTYPE)
        feed = np.empty(record_headers.size, dtype=FEED_HEADER_DTYPE)
        feed["req_id"] = record_headers["req_id"]
        feed["header"] = record_headers["header"]
        await self._applier.wait_until_applied(
            TransactionId(max(fetched_mark - self._config.feed_prefetch_count_max, -1))
        )
        last = TransactionId(chunk.next - 1)
        self._applier.queue_range(record_headers["transaction_id"].tolist(), feed.tobytes(), last)
        return last

    async def _request_mark(self) -> TransactionId:
        return await self._requests.high_water_mark(
            self._partition.partition_id, linearizable=False
        )
