"""One partition in the server process: its machine, its driver, its links and its metrics.

A host is created and stopped with the assignment of its partition.

Rules:
    1. Effects are carried out at once or as tasks of the process; every task ends in an event.
    2. If the state machine raises an exception, the process exits, because the machine's state can
       no longer be trusted. Clients get the outcomes of their appends from the next owner.
    3. If a released partition is still assigned to this server after a pause, the server owns it
       again. If the partition was released because there was no quorum, this server first tries to
       hand the partition over to another server.
    4. A session begins only with a permit (`session_open_limit.py`). The permit ends when the
       session is open or abandoned.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import nan
from ssl import SSLContext
from typing import Final

from waltz_core.cluster.coordinator import Coordinator, PartitionVersions
from waltz_core.driver import Driver, loop_clock_ms
from waltz_core.errors import (
    ARCHIVE_DAMAGE_ERRORS,
    BeforeLogStart,
    CoordinatorConflict,
    Overloaded,
    WaltzError,
)
from waltz_core.log_lines import log_report
from waltz_core.machine import Report
from waltz_core.metrics import Metrics
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    Generation,
    PartitionId,
    ReplicaId,
    TransactionId,
)
from waltz_core.replication import session_events as replication
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import (
    ConnectionId,
    Effect,
    Event,
    Fetch,
    FetchAnswered,
    FetchFailed,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.process.append_times import AppendTimes
from waltz_core.server.process.partition_cost import cost_of
from waltz_core.server.process.session_open_limit import SessionOpenLimit, SessionOpenPermit
from waltz_core.server.process.storage_links import ReadLinks, SessionLinks, TaskStarter
from waltz_core.wire.messages import ClientMessage, LockBlocks, RangeData, RowOutcomeCode

_log = logging.getLogger(__name__)

REOPEN_PAUSE_S: Final = 2.0
_GAUGE_NAMES: Final = (
    "waltz_server_engaged_replicas",
    "waltz_server_high_water_mark",
    "waltz_server_feed_lag_transactions",
    "waltz_server_store_session",
    "waltz_server_first_available_transaction",
)
_ARCHIVE_GAUGE_NAMES: Final = (
    "waltz_server_archived_transaction",
    "waltz_server_unarchived_transactions",
    "waltz_server_unarchived_bytes",
    "waltz_server_unarchived_seconds",
)
# How long a request to a replica must wait before the replica is reported as slow, or as silent.
SLOW_REPLICA_MS: Final = 1_000
SILENT_REPLICA_MS: Final = 10_000
# The log levels of reports; other reports have level INFO.
LOG_LEVELS: Final = {
    "append.slow": logging.WARNING,
    "archive.garbage_collection_failed": logging.WARNING,
    "archive.expiry_failed": logging.WARNING,
    "archive.failed": logging.WARNING,
    "archive.object_replacement_failed": logging.WARNING,
    "partition.data_loss": logging.ERROR,
    "partition.open_failed": logging.WARNING,
    "replica.damaged": logging.WARNING,
}
# The reports that end an attempt to open a session, successful or not.
_OPENING_END_REPORTS: Final = frozenset({"session.opened", "session.closed", "session.abandoned"})


@dataclass(frozen=True, slots=True)
class ServerServices:
    """The services that all partitions of a process share. `on_failure` makes the process exit."""

    coordinator: Coordinator
    tasks: TaskStarter
    read_links: ReadLinks
    open_limit: SessionOpenLimit
    append_times: AppendTimes
    metrics: Metrics
    refresh_storage_ids: Callable[[], Awaitable[None]]
    hand_over: Callable[[PartitionId, Generation], Awaitable[bool]]
    answer: Callable[[SendToClient], None]
    on_failure: Callable[[Exception], None]
    write_backlog_bytes_max: int
    ssl: SSLContext | None  # for dialing storages


class Host:
    """Runs one partition, by the module's rules."""

    def __init__(
        self,
        partition_id: PartitionId,
        partition: Partition,
        store: PartitionStore,
        services: ServerServices,
    ) -> None:
        self.partition_id = partition_id
        self.partition = partition
        self._take_append_times = store.take_append_times
        self._wait_reporter = ReplicaWaitReporter(
            partition_id, store.replica_waits_ms, services.metrics
        )
        self._services = services
        self._replicas: tuple[ReplicaId, ...] = ()
        self._links = SessionLinks(
            services.tasks,
            self.post,
            self.post,
            write_backlog_bytes_max=services.write_backlog_bytes_max,
            ssl=services.ssl,
        )
        self._published = _PublishedCounters()
        self._in_sync_metric = InSyncReplicaMetric(partition_id, services.metrics)
        self._open_permit: SessionOpenPermit | None = None
        self._answers = self._answer_bytes = 0
        self._driver: Driver[Event, Effect] = Driver(
            partition,
            self._perform_effect,
            on_report=self._log_report,
            on_failure=services.on_failure,
            name=f"partition-{partition_id}",
        )

    @property
    def is_open(self) -> bool:
        """Whether the partition accepts appends."""
        return self.partition.is_open

    # -----------------------------------------------------------------------------------------
    # events

    def post(self, event: Event) -> None:
        """Pass an event to the partition's machine."""
        self._driver.post(event)

    def receive(
        self,
        connection: ConnectionId,
        message: ClientMessage,
        cost_bytes: int,
        *,
        principal: str = "",
        over_limit: Overloaded | None = None,
    ) -> None:
        """Pass a client's request to the partition's machine."""
        wall_ms = time.time_ns() // 1_000_000
        self._driver.post(
            RequestReceived(connection, message, cost_bytes, wall_ms, principal, over_limit)
        )

    def assign(self, generation: Generation, replicas: tuple[ReplicaId, ...]) -> None:
        """Own the partition, or apply a new generation or new replicas of its assignment."""
        is_new = generation != self.partition.generation or not self._replicas
        changed = replicas != self._replicas
        self._replicas = replicas
        if not replicas:
            return  # The partition has no storages yet.
        if is_new or not self.partition.is_owned:
            self.post(replication.TakeOwnership(generation, replicas))
        elif changed:
            self.post(replication.ReassignReplicas(replicas))

    def stop(self) -> None:
        """Stop, because another server owns the partition: answer waiting requests."""
        self.post(replication.ReleaseOwnership())
        self._driver.stop()
        self._release_permit()
        self._links.close_all()
        self._services.metrics.forget(partition=self.partition_id)

    # -----------------------------------------------------------------------------------------
    # effects

    def _perform_effect(self, effect: Effect) -> None:
        match effect:
            case SendToClient():
                self._answers += 1
                if isinstance(effect.message, RangeData):
                    self._answer_bytes += len(effect.message.records)
                self._answer_bytes += effect.cost_bytes
                self._services.answer(effect)
            case replication.SendToReplica():
                self._links.send(effect)
            case replication.OpenReplica():
                self._links.open(effect)
            case replication.CloseReplica():
                self._links.close(effect)
            case Fetch():
                self._services.tasks.create_task(self._fetch_from_storage(effect))
            case replication.ReadMetadata():
                self._services.tasks.create_task(self._read_metadata(effect))
            case replication.WriteMetadata():
                self._services.tasks.create_task(self._write_metadata(effect))
            case replication.OwnershipReleased():
                self._on_ownership_released(effect)
            case _:  # The partition's machine processes all other effects of the store itself.
                raise AssertionError(f"unexpected effect: {effect!r}")

    def _on_ownership_released(self, effect: replication.OwnershipReleased) -> None:
        _log.warning("partition.released partition=%s reason=%s", self.partition_id, effect.reason)
        if effect.should_hand_over:
            self._services.tasks.create_task(self._hand_over_partition(self.partition.generation))
        loop = asyncio.get_running_loop()
        loop.call_later(REOPEN_PAUSE_S, self._retake_ownership)

    async def _hand_over_partition(self, generation: Generation) -> None:
        try:
            is_handed_over = await self._services.hand_over(self.partition_id, generation)
        except WaltzError as error:
            _log.warning(
                "partition.hand_over_failed partition=%s error=%r", self.partition_id, error
            )
            return
        if is_handed_over:
            _log.warning("partition.handed_over partition=%s", self.partition_id)

    def _retake_ownership(self) -> None:
        if self._driver.is_stopped or self.partition.is_owned or not self._replicas:
            return
        self.post(replication.TakeOwnership(self.partition.generation, self._replicas))

    async def _read_metadata(self, effect: replication.ReadMetadata) -> None:
        coordinator = self._services.coordinator
        permit = await self._services.open_limit.acquire()
        self._release_permit()
        self._open_permit = permit
        if self._driver.is_stopped:
            self._release_permit()
            return
        try:
            await self._services.refresh_storage_ids()
            view = await coordinator.read_partition(self.partition_id)
        except WaltzError as error:
            self.post(replication.MetadataOutcomeUnknown(effect.attempt, str(error)))
            return
        self.post(
            replication.MetadataRead(
                effect.attempt,
                view.metadata,
                view.metadata_version,
                view.marker,
                view.marker_version,
            )
        )

    async def _write_metadata(self, effect: replication.WriteMetadata) -> None:
        expected = PartitionVersions(effect.metadata_version, effect.marker_version)
        try:
            written = await self._services.coordinator.write_partition(
                self.partition_id, effect.metadata, effect.marker, expected
            )
        except CoordinatorConflict:
            self.post(replication.MetadataConflict(effect.attempt))
        except WaltzError as error:
            self.post(replication.MetadataOutcomeUnknown(effect.attempt, str(error)))
        else:
            self.post(replication.MetadataWritten(effect.attempt, written.metadata, written.marker))

    async def _fetch_from_storage(self, effect: Fetch) -> None:
        try:
            answer = await self._services.read_links.fetch(
                effect.replica, effect.message, is_urgent=effect.is_urgent
            )
        except WaltzError as error:
            first = error.first_available if isinstance(error, BeforeLogStart) else BEFORE_FIRST
            damage_code = error.code if isinstance(error, ARCHIVE_DAMAGE_ERRORS) else 0
            self.post(FetchFailed(effect.token, str(error), TransactionId(first), damage_code))
            return
        size = len(answer.blocks if isinstance(answer, LockBlocks) else answer.records)
        self._services.metrics.add(
            "waltz_server_fetched_bytes_total", size, partition=self.partition_id
        )
        self.post(FetchAnswered(effect.token, answer))

    # -----------------------------------------------------------------------------------------
    # reports and metrics

    def _log_report(self, report: Report) -> None:
        level = LOG_LEVELS.get(report.name, logging.INFO)
        log_report(_log, level, report, partition=self.partition_id)
        self._services.metrics.report(report)
        if report.name in _OPENING_END_REPORTS:
            self._release_permit()
        if report.name == "replica.rejected":
            self._services.tasks.create_task(self._refresh_storage_ids())

    def _release_permit(self) -> None:
        if self._open_permit is not None:
            self._open_permit.release()
            self._open_permit = None

    async def _refresh_storage_ids(self) -> None:
        """Read the storage IDs again: a storage may have been replaced since the session began."""
        try:
            await self._services.refresh_storage_ids()
        except WaltzError as error:
            _log.info("partition.storage_ids_read_failed reason=%s", error)

    @property
    def cost(self) -> float:
        """The total cost of this partition (`partition_cost.py`)."""
        counters = self.partition.pipeline.counters
        return cost_of(counters, answers=self._answers, answer_bytes=self._answer_bytes)

    def publish_metrics(self) -> None:
        """Update the metrics of this partition."""
        self._published.publish(self.partition_id, self.partition, self._services.metrics)
        self._in_sync_metric.publish(self._replicas, self.partition.engaged)
        now_ms = loop_clock_ms()
        self._wait_reporter.publish(now_ms)
        for replica, took_ms in self._take_append_times().items():
            self._services.append_times.add(replica, took_ms, now_ms)
            name = "waltz_server_replica_append_seconds"
            for append_ms in took_ms:
                self._services.metrics.observe(name, append_ms / 1000, replica=replica)

    @property
    def silent_replicas(self) -> list[ReplicaId]:
        """The replicas that have not answered for `SILENT_REPLICA_MS` on an open connection."""
        return sorted(self._wait_reporter.silent_replicas)


class InSyncReplicaMetric:
    """Publishes which of the assigned replicas of a partition are in sync."""

    def __init__(self, partition_id: PartitionId, metrics: Metrics) -> None:
        self._partition_id = partition_id
        self._metrics = metrics
        self._published_states: dict[ReplicaId, bool] = {}

    def publish(self, assigned: Iterable[ReplicaId], engaged: Collection[ReplicaId]) -> None:
        """Update the metric if a replica has changed."""
        in_sync = {replica: replica in engaged for replica in assigned}
        if in_sync == self._published_states:
            return
        for replica in self._published_states.keys() - in_sync.keys():
            self._metrics.forget(partition=self._partition_id, replica=replica)
        for replica, value in in_sync.items():
            self._metrics.set(
                "waltz_server_replica_in_sync", value, partition=self._partition_id, replica=replica
            )
        self._published_states = in_sync


class ReplicaWaitReporter:
    """Reports how long a partition waits for each replica.

    Args:
        waits_ms: maps the present time to the age of each replica's oldest unanswered request.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        waits_ms: Callable[[int], Mapping[ReplicaId, int]],
        metrics: Metrics,
    ) -> None:
        self.silent_replicas: set[ReplicaId] = set()
        self._partition_id = partition_id
        self._waits_ms = waits_ms
        self._metrics = metrics
        self._slow_replicas: set[ReplicaId] = set()

    def publish(self, now_ms: int) -> None:
        """Update the metrics; log when a replica becomes silent or answers again."""
        waits_ms = self._waits_ms(now_ms)
        slow_replicas = {
            replica for replica, wait_ms in waits_ms.items() if wait_ms >= SLOW_REPLICA_MS
        }
        for replica in sorted(slow_replicas | self._slow_replicas):
            self._metrics.set(
                "waltz_server_replica_wait_seconds",
                waits_ms[replica] / 1_000 if replica in slow_replicas else 0,
                partition=self._partition_id,
                replica=replica,
            )
        silent_replicas = {
            replica for replica in slow_replicas if waits_ms[replica] >= SILENT_REPLICA_MS
        }
        for replica in sorted(silent_replicas - self.silent_replicas):
            self._metrics.report(Report("replica.silent", (("replica", replica),)))
            _log.warning("replica.silent partition=%s replica=%s", self._partition_id, replica)
        for replica in sorted(self.silent_replicas - silent_replicas):
            _log.info("replica.responsive partition=%s replica=%s", self._partition_id, replica)
        self._slow_replicas, self.silent_replicas = slow_replicas, silent_replicas


class _PublishedCounters:
    """Publishes those counters and gauges of a partition that have changed.

    The update must be cheap: it runs every second for up to a thousand partitions, most of them
    idle.
    """

    def __init__(self) -> None:
        self._published_totals: dict[str, int] = {}
        self._published_rejections = [0] * len(RowOutcomeCode)
        self._gauges: tuple[int, ...] = ()
        self._archive: tuple[float, ...] = ()

    def publish(self, partition_id: PartitionId, partition: Partition, metrics: Metrics) -> None:
        counters = partition.pipeline.counters
        for name, count in (
            ("waltz_server_appended_transactions_total", counters.committed),
            ("waltz_server_appended_bytes_total", counters.committed_bytes),
            ("waltz_server_appended_batches_total", counters.batches),
        ):
            if count != self._published_totals.get(name):
                metrics.add(
                    name, count - self._published_totals.get(name, 0), partition=partition_id
                )
                self._published_totals[name] = count
        for reason in RowOutcomeCode:
            new_count = counters.rejected[reason] - self._published_rejections[reason]
            self._published_rejections[reason] = counters.rejected[reason]
            if new_count:
                metrics.add(
                    "waltz_server_rejected_transactions_total",
                    new_count,
                    partition=partition_id,
                    reason=reason.name.lower(),
                )
        while counters.took_ms:
            metrics.observe("waltz_server_append_seconds", counters.took_ms.popleft() / 1000)
        for (cache, outcome), count in partition.reads.cache_reads().items():
            name = f"{cache} {outcome}"
            if count != self._published_totals.get(name):
                new_count = count - self._published_totals.get(name, 0)
                self._published_totals[name] = count
                metrics.add(
                    "waltz_server_cache_reads_total", new_count, cache=cache, outcome=outcome
                )
        self._publish_gauges(partition_id, partition, metrics)
        self._publish_archive_gauges(partition_id, partition, metrics)

    def _publish_gauges(
        self, partition_id: PartitionId, partition: Partition, metrics: Metrics
    ) -> None:
        mark, lag = partition.high_water_mark, partition.feed.lag_max()
        session_id = partition.session_id if partition.is_open else NO_SESSION
        first = partition.first_available
        gauges = (len(partition.engaged), mark, lag, session_id, first)
        # If these values are unchanged, the lock table is unchanged, too, except for entries in
        # flight.
        current = (*gauges, partition.pipeline.lock_loader.floor)
        if current == self._gauges:
            return
        self._gauges = current
        for name, value in zip(_GAUGE_NAMES, gauges, strict=True):
            metrics.set(name, value, partition=partition_id)
        locks = partition.pipeline.locks
        if locks is not None:
            # The probability for a client that lags by a thousand transactions.
            lagging = TransactionId(max(BEFORE_FIRST, mark - 1_000))
            metrics.set(
                "waltz_server_false_rejections_ratio",
                locks.false_rejection_probability(lagging),
                partition=partition_id,
            )

    def _publish_archive_gauges(
        self, partition_id: PartitionId, partition: Partition, metrics: Metrics
    ) -> None:
        if partition.archive_progress is None:
            return
        last, backlog = partition.archive_progress
        waited_ms = 0 if backlog.since_ms is None else loop_clock_ms() - backlog.since_ms
        values: tuple[float, ...] = (
            last,
            backlog.transaction_count,
            nan if backlog.byte_count is None else backlog.byte_count,
            max(0, waited_ms) / 1_000,
        )
        if values == self._archive:
            return
        self._archive = values
        for name, value in zip(_ARCHIVE_GAUGE_NAMES, values, strict=True):
            metrics.set(name, value, partition=partition_id)
