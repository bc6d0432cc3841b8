"""Brings the feed of one partition from the application's mark to the end of the log, and on.

Why it stands alone: an application that comes back after a day is millions of transactions behind.
It fetches those itself, in ranges of headers and at its own pace; only the rest comes as a feed.
"""

import asyncio

import numpy as np

from waltz_core import errors
from waltz_core.client.feed import Applier, Consumer
from waltz_core.client.partition import ClientPartition
from waltz_core.client.ranges import RangeQuery
from waltz_core.client.requests import Requests
from waltz_core.config import ClientConfig
from waltz_core.raw_records import FEED_HEADER_DTYPE, HEADER_DTYPE
from waltz_core.record import TransactionId
from waltz_core.wire.messages import RangeForm

# Nearer to the end of the log than this, the server's feed is the shorter way.
FEED_LAG_MAX = 20_000


class CatchUp:
    """One partition's way from a mark to its feed."""

    def __init__(
        self,
        partition: ClientPartition,
        consumer: Consumer,
        requests: Requests,
        config: ClientConfig,
    ) -> None:
        self._partition = partition
        self._requests = requests
        self._config = config
        self._applier = Applier(partition.partition_id, consumer, partition.applied)
        partition.applier = self._applier

    async def run(self, mark: TransactionId | None) -> None:
        """Feed the application after `mark` (None: the end of the log) until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._applier.run())
            group.create_task(self._bring(mark))

    async def _bring(self, mark: TransactionId | None) -> None:
        try:
            last = await self._ask_mark()
            start = last if mark is None else mark
            self._applier.start(start)
            while last - start > FEED_LAG_MAX:
                start = await self._fetch(start, last)
                if start >= last:
                    last = await self._ask_mark()
        except errors.WaltzError as error:
            await self._applier.stop(error)
            return
        if self._applier.stopped is None:
            self._partition.subscribe(start)

    async def _fetch(self, start: TransactionId, last: TransactionId) -> TransactionId:
        """Hand on what one range request gives, once the application is near enough."""
        partition_id = self._partition.partition_id
        query = RangeQuery(
            TransactionId(start + 1),
            last,
            RangeForm.HEADERS,
            bytes_max=self._config.range_bytes_max,
        )
        chunk = await self._requests.range(partition_id, query)
        if chunk.count == 0:
            raise errors.DataLoss(
                f"partition {partition_id}: the log ended at {last} and now ends at {start}"
            )
        heads = np.frombuffer(chunk.records, dtype=HEADER_DTYPE)
        feed = np.empty(heads.size, dtype=FEED_HEADER_DTYPE)
        feed["req_id"] = heads["req_id"]
        feed["header"] = heads["header"]
        await self._applier.reached(
            TransactionId(max(start - self._config.feed_ahead_count_max, -1))
        )
        self._applier.feed(chunk.first, feed.tobytes())
        return TransactionId(chunk.next - 1)

    async def _ask_mark(self) -> TransactionId:
        return await self._requests.high_water_mark(
            self._partition.partition_id, linearizable=False
        )
