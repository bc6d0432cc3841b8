"""Starts, stops and restarts the feeds of partitions, each with its callbacks.

Several instances of an application may share the partitions of a log, and start and stop feeds
while they run. As soon as a feed stops here, another instance may apply its partition.

Rules:
    1. A partition has one consumer (the callbacks) at a time.
    2. `set_partitions` waits for the running callbacks of a feed that it stops. Afterwards no
       transaction of this feed is applied.
    3. A restarted feed requests its mark again, and keeps its consumer and filter. A new feed gets
       the consumer that subscribed last.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from waltz_core import errors
from waltz_core.client.read.catch_up import CatchUp, Recipient
from waltz_core.client.read.data_cache import DATA_BYTES_MAX, DataBudget, DataCache
from waltz_core.client.read.requests import OwnerRequests
from waltz_core.client.stream.client_partition import ClientPartition
from waltz_core.config.declarations import ClientConfig
from waltz_core.encryption.envelopes import Encryption
from waltz_core.records.record import PartitionId, TransactionId

FindPartition = Callable[[PartitionId], Coroutine[Any, Any, ClientPartition]]
Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class _PartitionFeed:
    """The feed of one partition, running or ended."""

    def __init__(self, partition: ClientPartition, catch_up: CatchUp, data: DataCache) -> None:
        self.partition = partition
        self._catch_up = catch_up
        self._data = data
        self.task: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    @property
    def is_delivering(self) -> bool:
        """Whether the feed delivers transactions."""
        return self._catch_up.applier.stopped is None and not self._is_over.is_set()

    async def run(self, mark: TransactionId | None) -> None:
        """Apply transactions after `mark` (None: the end of the log) until the feed is stopped."""
        self.task = asyncio.current_task()
        try:
            if self._catch_up.applier.stopped is None:
                await self._catch_up.run(mark)
        finally:
            self._data.clear()
            self._is_over.set()

    async def stop(self) -> None:
        """Stop the feed, and wait for running callbacks (rule 2)."""
        text = f"the application has ended the feed of partition {self.partition.partition_id}"
        self._catch_up.applier.pause_by_application(errors.Unavailable(text))
        if self.task is None:  # the client was closing, so it has started no task for this feed
            self._data.clear()
        else:
            await self._is_over.wait()
        self.partition.unsubscribe()


class _StartingFeed:
    """A placeholder for a feed, while the client requests the application's mark."""


class Subscriptions:
    """The feeds of one client."""

    def __init__(
        self,
        find_partition: FindPartition,
        spawn: Spawn,
        requests: OwnerRequests,
        config: ClientConfig,
        encryption: Encryption | None,
    ) -> None:
        self._encryption = encryption
        self._find_partition = find_partition
        self._spawn = spawn
        self._requests = requests
        self._config = config
        self._recipients: dict[PartitionId, Recipient] = {}
        self._last_recipient: Recipient | None = None
        self._feeds: dict[PartitionId, _PartitionFeed | _StartingFeed] = {}
        self._data: dict[PartitionId, DataCache] = {}
        self.data_budget = DataBudget(DATA_BYTES_MAX)
        self._set_lock = asyncio.Lock()
        self._set_count = 0  # the number of calls of `set_partitions`

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions whose feed is applied now, in order."""
        # NB: threads of the sync client read this while the loop changes it; `list` copies
        # atomically.
        return tuple(
            sorted(
                int(partition_id)
                for partition_id in list(self._feeds)
                if self._has_feed(partition_id)
            )
        )

    async def subscribe(self, recipient: Recipient, partition_ids: Iterable[PartitionId]) -> None:
        """Start the feeds of these partitions; raises BadRequest if a feed is already running."""
        self._last_recipient = recipient
        number = self._set_count
        for partition_id in partition_ids:
            if self._set_count != number:
                return  # `set_partitions` was called meanwhile and takes precedence
            if self._has_feed(partition_id):
                raise errors.BadRequest(f"partition {partition_id} is already subscribed")
            self._recipients[partition_id] = recipient
            await self._start_feed(partition_id)

    async def set_partitions(self, partition_ids: Iterable[PartitionId]) -> None:
        """Stop the feeds of all other partitions, then start the feeds of these (rules 2 and 3)."""
        if self._last_recipient is None:
            raise errors.UsageError(
                "cannot set partitions: the client has no callbacks yet. Hint: call "
                "subscribe first."
            )
        wanted_ids = dict.fromkeys(partition_ids)
        task = asyncio.current_task()
        for partition_id, feed in self._feeds.items():
            if isinstance(feed, _PartitionFeed) and feed.task is task:
                raise reentrant_set_partitions_error(partition_id)
        self._set_count += 1
        async with self._set_lock:
            for partition_id in [feed_id for feed_id in self._feeds if feed_id not in wanted_ids]:
                await self._stop_feed(partition_id)
            for partition_id in wanted_ids:
                if not self._has_feed(partition_id):
                    await self._start_feed(partition_id)

    def data_cache(self, partition_id: PartitionId) -> DataCache:
        """Return the data cache of a partition."""
        return self._data[partition_id]

    def _create_data_cache(
        self, partition: ClientPartition, header_values: tuple[int, ...]
    ) -> DataCache:
        partition_id, stream = partition.partition_id, partition.stream
        return DataCache(
            lambda query: self._requests.fetch_data_range(partition_id, query),
            lambda transaction_id: self._requests.fetch_data(partition_id, transaction_id),
            mark=lambda: stream.high_water_mark,
            bytes_max=self._config.range_bytes_max,
            budget=self.data_budget,
            loop=asyncio.get_running_loop(),
            header_values=header_values,
            encryption=self._encryption,
        )

    def _has_feed(self, partition_id: PartitionId) -> bool:
        feed = self._feeds.get(partition_id)
        return isinstance(feed, _StartingFeed) or (feed is not None and feed.is_delivering)

    async def _start_feed(self, partition_id: PartitionId) -> None:
        """Start a feed; raises any exception that `client_high_water_mark` raises."""
        await self._stop_feed(partition_id)  # removes a feed that has ended by itself
        assert self._last_recipient is not None
        recipient = self._recipients.setdefault(partition_id, self._last_recipient)
        start = self._feeds[partition_id] = _StartingFeed()
        try:
            partition = await self._find_partition(partition_id)
            # A context must not claim the log's mark while the application's view is older.
            with partition.count_starting_feed():
                mark = await recipient.consumer.start_mark(partition_id)
        except BaseException:
            if self._feeds.get(partition_id) is start:
                del self._feeds[partition_id]
            raise
        if self._feeds.get(partition_id) is not start:
            return  # stopped meanwhile, and perhaps restarted
        data = self._data[partition_id] = self._create_data_cache(
            partition, recipient.header_values
        )
        catch_up = CatchUp(partition, recipient, self._requests, self._config, data)
        feed = _PartitionFeed(partition, catch_up, data)
        self._feeds[partition_id] = feed
        if mark is not None:
            # Start the applier at once, because a context that is submitted now must not claim the
            # log's mark.
            catch_up.applier.start(mark)
        self._spawn(feed.run(mark), "feed")

    async def _stop_feed(self, partition_id: PartitionId) -> None:
        feed = self._feeds.get(partition_id)
        if feed is None:
            return
        if isinstance(feed, _StartingFeed):
            del self._feeds[partition_id]
            return
        await feed.stop()
        if self._feeds.get(partition_id) is feed:
            del self._feeds[partition_id]


def reentrant_set_partitions_error(partition_id: int) -> errors.UsageError:
    """Return the error of `set_partitions` in a callback, which would wait for itself."""
    return errors.UsageError(
        f"cannot set partitions in a callback of partition {partition_id}: set_partitions "
        "waits until callbacks have ended. Hint: call it outside of callbacks."
    )
