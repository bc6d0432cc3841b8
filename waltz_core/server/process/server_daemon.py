"""The server process: registration, assignment, clients, health, graceful shutdown.

This module turns settings into limits, ZooKeeper's assignment into ownership, and signals into a
graceful shutdown. `served_partition.py` decides what a partition does.

Rules:
    1. A partition is served exactly while the current assignment names this server. While ZooKeeper
       is unavailable, the server keeps its partitions. This is safe, because storages fence
       replaced owners. While a node cannot be decoded, the server also keeps its partitions. So one
       damaged node does not stop all servers at once.
    2. The server registers only when it can answer clients, and unregisters before it stops
       answering.
    3. Shutdown has these steps: stop reading, wait for a limited time until appends in flight are
       final, leave the assignment, answer the waiting requests, close.
"""

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from random import SystemRandom
from typing import Final

from waltz_core import errors
from waltz_core.cluster.coordinator import ClusterView, Coordinator
from waltz_core.cluster.membership.applied_revisions import server_node_name
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.znodes.model import ReplicaAssignments, ServerDescriptor
from waltz_core.cluster.znodes.shared_request import SharedRequest
from waltz_core.cluster.zookeeper.follow_znodes import follow_despite_bad_nodes, follow_permissions
from waltz_core.cluster.zookeeper.startup import connect_daemon, retry_start_step
from waltz_core.config.declarations import NO_GROUP, ServerConfig
from waltz_core.daemon_pages import Health, serve_pages
from waltz_core.driver import loop_clock_ms
from waltz_core.metrics import Metrics
from waltz_core.records.record import (
    FRAME_BYTES_MAX,
    ClientId,
    Generation,
    PartitionId,
    ReplicaId,
    ServerId,
)
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.partition_store import PartitionStore
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.locking.lock_table import slot_count_within
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import KIB, MIB, PartitionIdentity, PartitionLimits
from waltz_core.server.process.append_times import AppendTime, AppendTimes
from waltz_core.server.process.client_id_queue import ClientIdQueue
from waltz_core.server.process.clients import ClientConnections
from waltz_core.server.process.failure_detector import FailureDetector
from waltz_core.server.process.flow_control import FlowLimits
from waltz_core.server.process.host import Host, ServerServices
from waltz_core.server.process.preferences import Preferences, reachable_partitions
from waltz_core.server.process.rebalancer import BalanceTimes, Rebalancer
from waltz_core.server.process.registry_requests import RegistryRequests
from waltz_core.server.process.session_open_limit import SessionOpenLimit
from waltz_core.server.process.storage_links import ReadLinks, is_reachable
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.transport import net, tls
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.listening import Listener, listen
from waltz_core.transport.port_files import open_port_files
from waltz_core.transport.quota_metrics import publish_quotas
from waltz_core.wire.messages import WireProtocol

_log = logging.getLogger(__name__)


METRICS_INTERVAL_S: Final = 1.0
LAST_APPENDS_POLLS_MAX: Final = 100
LAST_APPENDS_POLL_S: Final = 0.01
UNREGISTER_S_MAX: Final = 2.0
# Without this pause, a partition whose storages no server can reach would move again and again.
HAND_OVER_PAUSE_S: Final = 60.0
PREFERENCE_CHECK_S: Final = 10.0
# The overhead of a record and of its entry in a frame, in addition to its data.
_ROW_OVERHEAD_BYTES: Final = 48
_FEED_CACHE_BYTES_MIN: Final = 20 * KIB


def run(config: ServerConfig) -> None:
    """Run a server until SIGTERM or SIGINT; if it fails, raise the error."""
    if not __debug__:
        raise errors.BadConfig(
            "the server does not run under `python -O`, because it relies on its assertions. "
            "Hint: run it without -O"
        )
    net.run(serve(config, on_ready=_print_ready))


def _print_ready(address: str) -> None:
    _log.info("server.ready address=%s", address)
    print(f"server ready {address}", flush=True)  # noqa: T201 - the parent process waits for it


async def serve(
    config: ServerConfig,
    *,
    on_ready: Callable[[str], None] = lambda _address: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` is set; if `stop` is None, until SIGTERM or SIGINT."""
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls.check_network(config)
    async with connect_daemon(config) as coordinator:
        limit_ms = config.zookeeper_connect_timeout_ms
        cluster = await retry_start_step(
            "the cluster", coordinator.read_cluster, timeout_ms=limit_ms
        )
        server_id = await retry_start_step("an ID", coordinator.next_server_id, timeout_ms=limit_ms)
        try:
            await Server(config, coordinator, cluster, server_id).serve(stop, on_ready)
        except BaseExceptionGroup as group:
            # A single error is easier to read than an exception group.
            known_errors, _ = group.split(errors.WaltzError)
            if known_errors is None:
                raise
            raise errors.first_error_in(known_errors) from group


class _ServerStopped(Exception):
    """Raised to end all tasks when the server has shut down."""


class Server:
    """One server process, by the module's rules."""

    def __init__(
        self,
        config: ServerConfig,
        coordinator: Coordinator,
        cluster: ClusterView,
        server_id: ServerId,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._cluster_key = cluster.store.cluster_key.bytes
        self._server_id = server_id
        self.partition_count = cluster.params.partition_count
        self.hosts: dict[PartitionId, Host] = {}
        self.metrics = Metrics("server", has_process_metrics=True)
        self._limits = partition_limits_of(config, self.partition_count)
        self._budget = CacheBudget(config.transaction_cache_bytes)
        self._throttle = LargeBatchThrottle(is_enabled=config.small_requests_first)
        # The budget is for all partitions of the cluster, because one server may own all of them.
        self._feed_cache_bytes = max(
            _FEED_CACHE_BYTES_MIN, config.feed_cache_bytes // self.partition_count
        )
        self._ssl = tls.dial_context(config, config.connect)
        self._port_ssl: tls.ListenContext | None = None
        self._read_links = ReadLinks(self._cluster_key, self.partition_count, ssl=self._ssl)
        self._open_limit = SessionOpenLimit()
        self._append_times = AppendTimes()
        self._random = SystemRandom()
        self._storage_ids: dict[ReplicaId, bytes] = {}
        self._storage_id_reads = SharedRequest(self._read_storage_ids)
        self._replicas_in_group: set[ReplicaId] = set()  # storages of this server's own group
        self._assignments = self._newest_assignments = ReplicaAssignments()
        self._view: ServersView | None = None
        self._tasks = asyncio.TaskGroup()
        self.registry = RegistryRequests(
            coordinator.writes, self.next_client_id, self.partition_count, self._tasks
        )
        self._clients = ClientConnections(self, _flow_limits(config), self._tasks, self.metrics)
        self._failure_detector = FailureDetector(
            server_id, self._tasks, coordinator.remove_dead_server, ssl=self._ssl
        )
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._descriptor = ServerDescriptor(server_id, "", 0)
        self._preferences = Preferences(HAND_OVER_PAUSE_S)
        self._preference_lock = asyncio.Lock()
        self._client_ids = ClientIdQueue(coordinator.issued_ids.allocate_ids)
        self._handed_over_s: dict[PartitionId, float] = {}
        self._hand_over_lock = asyncio.Lock()
        self._without_quorum_s = -math.inf
        self._is_registered = False
        self.address = ""

    # -----------------------------------------------------------------------------------------
    # start and shutdown

    async def serve(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set, or raise the error of a task that failed."""
        config = self._config
        async with AsyncExitStack() as stack:
            if config.http_port:
                pages = serve_pages(
                    self.metrics, self.health, host=config.http_host, port=config.http_port
                )
                await stack.enter_async_context(pages)
            self._port_ssl = ssl = tls.listen_context(config)
            files = open_port_files(config, ssl, self._ssl, metrics=self.metrics)
            await stack.enter_async_context(files)
            listener = await listen(
                WireProtocol.CLIENT,
                config.listen_host,
                config.port,
                self._accept,
                ssl=ssl,
                limits=LinkLimits(config.connections_max, config.memory_bytes_max),
            )
            stack.push_async_callback(_close_listener, listener)
            host = config.advertised_host or config.listen_host
            port = config.advertised_port or listener.port
            self.address = f"{host}:{port}"
            self._descriptor = ServerDescriptor(self._server_id, host, port)
            try:
                await self._serve_while_registered(stop, on_ready)
            finally:
                self._read_links.close()

    def _accept(self, link: net.Link) -> None:
        link.limit_write_buffer(self._config.write_buffer_bytes_max)
        self._clients.accept(link)

    async def _serve_while_registered(
        self, stop: asyncio.Event, on_ready: Callable[[str], None]
    ) -> None:
        try:
            async with self._tasks as tasks:
                coordinator = self._coordinator
                assignment_watch = follow_despite_bad_nodes(
                    coordinator.follow_replica_assignment, self._on_assignments_changed
                )
                tasks.create_task(assignment_watch)
                tasks.create_task(
                    follow_permissions(
                        coordinator, self._port_ssl, server_node_name(self._server_id)
                    )
                )
                await retry_start_step(
                    "its registration",
                    lambda: coordinator.register_server(self._descriptor),
                    timeout_ms=self._config.zookeeper_connect_timeout_ms,
                )
                self._is_registered = True
                tasks.create_task(
                    follow_despite_bad_nodes(coordinator.follow_servers, self._on_ownership_changed)
                )
                tasks.create_task(self._publish_metrics())
                tasks.create_task(publish_quotas(self.metrics, "server", self._port_ssl))
                tasks.create_task(self._restore_preferences_periodically())
                tasks.create_task(
                    self._failure_detector.publish_results(
                        coordinator.reachability, self._has_open_partition
                    )
                )
                if self._config.balance == "load":
                    tasks.create_task(self._make_rebalancer().run())
                on_ready(self.address)
                await self._wait_for_stop(stop)
                await self._shut_down()
        except* _ServerStopped:
            _log.info("server.stopped server=%s", self._server_id)

    def _has_open_partition(self) -> bool:
        """Whether a partition is open, which proves that the network and the TLS settings work."""
        return any(host.partition.is_open for host in self.hosts.values())

    def _make_rebalancer(self) -> Rebalancer:
        config = self._config
        self._coordinator.keep_owners()
        times = BalanceTimes(
            config.balance_interval_ms, config.balance_window_ms, config.balance_cooldown_ms
        )
        return Rebalancer(
            self._server_id,
            self._coordinator,
            lambda: {partition_id: host.cost for partition_id, host in self.hosts.items()},
            times,
            lambda: time.monotonic() >= self._without_quorum_s + times.cooldown_ms / 1000,
        )

    async def _wait_for_stop(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set, or raise the error of a failed partition (host.py, rule 2)."""
        waiting = self._tasks.create_task(stop.wait())
        await asyncio.wait((waiting, self._failure), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._failure.done():
            self._failure.result()

    async def _shut_down(self) -> None:
        """Shut down (rule 3); raises `_ServerStopped`, which ends all tasks."""
        self._failure_detector.stop()
        self._clients.pause()
        for _ in range(LAST_APPENDS_POLLS_MAX):
            pipelines = [host.partition.pipeline for host in self.hosts.values()]
            if not any(pipeline.queued_bytes or pipeline.in_flight_bytes for pipeline in pipelines):
                break
            await asyncio.sleep(LAST_APPENDS_POLL_S)
        try:
            async with asyncio.timeout(UNREGISTER_S_MAX):
                await self._coordinator.unregister_server()
        except (TimeoutError, errors.WaltzError) as error:
            _log.warning("server.unregister_failed error=%r", error)
        for partition_id in list(self.hosts):
            self._drop_host(partition_id)
        raise _ServerStopped

    def _on_partition_failed(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # -----------------------------------------------------------------------------------------
    # ownership

    def _on_assignments_changed(self, assignments: ReplicaAssignments) -> None:
        """The replica assignment was read for the first time, or has changed."""
        self._newest_assignments = assignments
        self._tasks.create_task(self._apply_assignments(assignments))

    async def _apply_assignments(self, assignments: ReplicaAssignments) -> None:
        """Read the storage IDs, which may have changed; then own the partitions."""
        try:
            await self._storage_id_reads.wait_for_answer()
            await self._refresh_replicas_in_group()
        except errors.WaltzError as error:
            _log.warning("server.storages_read_failed error=%r", error)
        if assignments is self._newest_assignments:
            self._assignments = assignments
            self._apply_ownership()

    def _on_ownership_changed(self, view: ServersView) -> None:
        """The assignment of partitions to servers has changed."""
        self._view = view
        self._failure_detector.watch_servers(view)
        self._apply_ownership()

    def _apply_ownership(self) -> None:
        if self._view is None:
            return
        own_ids = self._view.partitions_of(self._server_id)
        for partition_id in [hosted_id for hosted_id in self.hosts if hosted_id not in own_ids]:
            _log.info("partition.moved_away partition=%s", partition_id)
            self._drop_host(partition_id)
        for partition_id, generation in own_ids.items():
            replicas = self._assignments.replicas_of(partition_id)
            host = self.hosts.get(partition_id)
            if host is None:
                host = self.hosts[partition_id] = self._create_host(partition_id)
            host.assign(generation, replicas)

    def _drop_host(self, partition_id: PartitionId) -> None:
        host = self.hosts.pop(partition_id)
        host.stop()
        self._clients.forget_partition(host)

    def _create_host(self, partition_id: PartitionId) -> Host:
        config = self._config
        store = PartitionStore(
            partition_id,
            self._cluster_key,
            self.partition_count,
            self._storage_ids,
            rng=self._random,
            limits=session_limits_of(config),
        )
        partition = Partition(
            PartitionIdentity(partition_id, self.partition_count, self._cluster_key),
            store,
            self._limits,
            TransactionCache(self._budget),
            FeedCache(self._feed_cache_bytes),
            self._throttle,
        )
        partition.reads.replicas_in_group = self._replicas_in_group
        services = ServerServices(
            coordinator=self._coordinator,
            tasks=self._tasks,
            read_links=self._read_links,
            open_limit=self._open_limit,
            append_times=self._append_times,
            metrics=self.metrics,
            refresh_storage_ids=self._storage_id_reads.wait_for_answer,
            hand_over=self._hand_over_partition,
            answer=self._clients.answer,
            on_failure=self._on_partition_failed,
            write_backlog_bytes_max=2 * config.replica_lag_bytes_max + FRAME_BYTES_MAX,
            ssl=self._ssl,
        )
        return Host(partition_id, partition, store, services)

    async def _hand_over_partition(self, partition_id: PartitionId, generation: Generation) -> bool:
        """Give a partition to another server, unless this was done within `HAND_OVER_PAUSE_S`."""
        self._without_quorum_s = time.monotonic()
        last_s = self._handed_over_s.get(partition_id, -math.inf)
        if time.monotonic() < last_s + HAND_OVER_PAUSE_S:
            return False
        # One at a time: concurrent changes of the same node would conflict.
        async with self._hand_over_lock:
            host = self.hosts.get(partition_id)
            if host is None or host.partition.is_owned:
                return False  # The partition was owned again meanwhile.
            async with self._preference_lock:  # `hand_over` also removes a preference.
                if not await self._coordinator.hand_over(partition_id, generation):
                    return False
                if self._preferences.suspend(partition_id, time.monotonic()):
                    _log.warning("server.preference_suspended partition=%s", partition_id)
        # Record the time only after the change: if ZooKeeper does not answer, the next release must
        # try again.
        self._handed_over_s[partition_id] = time.monotonic()
        return True

    async def _read_storage_ids(self) -> None:
        uuids = await self._coordinator.read_storage_ids()
        self._storage_ids.update((replica, uuid.bytes) for replica, uuid in uuids.items())

    async def _refresh_replicas_in_group(self) -> None:
        if self._config.group != NO_GROUP:
            groups = (await self._coordinator.read_groups()).groups
            self._replicas_in_group.clear()
            self._replicas_in_group.update(
                storage for storage in groups if groups[storage] == self._config.group
            )

    async def change_preferences(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> None:
        """Add and remove preferred partitions (`clients.Backend`)."""
        async with self._preference_lock:
            await self._change_preferences(added, removed)

    async def _change_preferences(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> None:
        active_preferences = self._preferences.active_preferences_after(added, removed)
        await self._coordinator.change_preferences(
            replace(self._descriptor, preferred=active_preferences)
        )
        self._preferences.change(added, removed)

    async def _restore_preferences_periodically(self) -> None:
        """Restore suspended preferences when a quorum of the partition's storages answers."""
        while True:
            await asyncio.sleep(PREFERENCE_CHECK_S)
            resumable_partitions = self._preferences.resumable_partitions(time.monotonic())
            if not resumable_partitions:
                continue
            reachability = {
                ReplicaId(name): was_reached
                for name, was_reached in await self.check_connectivity()
            }
            resumed_partitions = reachable_partitions(
                resumable_partitions, self._assignments.replicas_of, reachability
            )
            if resumed_partitions:
                await self._restore_preferences(resumed_partitions)

    async def _restore_preferences(self, partitions: Collection[PartitionId]) -> None:
        async with self._preference_lock:
            # A preference may have been removed while the storages were queried.
            suspended = [
                partition_id
                for partition_id in partitions
                if partition_id in self._preferences.suspended_partitions
            ]
            if not suspended:
                return
            try:
                await self._change_preferences(suspended, ())
            except errors.WaltzError as error:
                _log.warning(
                    "server.preference_restore_failed error=%r", error
                )  # retried at the next check
            else:
                _log.info("server.preference_restored partitions=%s", suspended)

    # -----------------------------------------------------------------------------------------
    # health and metrics

    def append_times(self) -> Sequence[AppendTime]:
        """Return the append latencies of the storages over the last minute (`clients.Backend`)."""
        return self._append_times.recent_append_times(loop_clock_ms())

    async def next_client_id(self) -> ClientId:
        """Issue a client ID that was never used before (`clients.Backend`)."""
        return await self._client_ids.next_client_id()

    async def check_connectivity(self) -> Sequence[tuple[str, bool]]:
        """Try to connect to every storage of the replica assignment (`clients.Backend`)."""
        is_reachable_by_name: dict[str, bool] = {}

        async def check(replica: ReplicaId) -> None:
            is_reachable_by_name[replica] = await is_reachable(
                replica, self._cluster_key, self.partition_count, ssl=self._ssl
            )

        async with asyncio.TaskGroup() as tasks:
            for replica in self._assignments.partitions:
                tasks.create_task(check(replica))
        return sorted(is_reachable_by_name.items())

    async def health(self) -> Health:
        """Return the health of the server.

        The server is healthy if every partition has a session; appends continue without ZooKeeper.
        The server is ready if it is healthy and has registered once, with or without partitions.
        """
        zookeeper = self._coordinator.was_connected_recently
        partitions = {
            str(partition_id): host.partition.is_open
            for partition_id, host in sorted(self.hosts.items())
        }
        details = {
            "server": self._server_id,
            "address": self.address,
            "zookeeper": zookeeper,
            "zookeeper_session": self._coordinator.session_state.name,
            "partitions": partitions,
            "suspended_preferences": self._preferences.suspended_partitions,
            "silent_replicas": {
                str(partition_id): host.silent_replicas
                for partition_id, host in sorted(self.hosts.items())
                if host.silent_replicas
            },
        }
        unready_reasons = [] if self._is_registered else ["the server has not registered yet"]
        unready_reasons += [
            f"partition {partition_id} has no open store session"
            for partition_id, is_open in partitions.items()
            if not is_open
        ]
        return Health(all(partitions.values()), unready_reasons, details)

    async def _publish_metrics(self) -> None:
        """Update the metrics periodically."""
        metrics = self.metrics
        while True:
            for host in self.hosts.values():
                host.publish_metrics()
            metrics.set("waltz_server_partitions", len(self.hosts))
            metrics.set(
                "waltz_server_zookeeper_connected", self._coordinator.was_connected_recently
            )
            metrics.set("waltz_server_connections", self._clients.count)
            metrics.set("waltz_server_legacy_client_connections", self._clients.legacy_client_count)
            metrics.set("waltz_server_queued_bytes", self._clients.memory_bytes)
            metrics.set("waltz_server_feed_cache_bytes", len(self.hosts) * self._feed_cache_bytes)
            metrics.set("waltz_server_transaction_cache_bytes", self._budget.used_bytes)
            tables = [host.partition.pipeline.locks for host in self.hosts.values()]
            metrics.set(
                "waltz_server_lock_table_bytes", sum(table.size_bytes for table in tables if table)
            )
            await asyncio.sleep(METRICS_INTERVAL_S)


async def _close_listener(listener: Listener) -> None:
    """Close all links; abort congested links."""
    for link in listener.links:
        if link.is_congested:
            link.abort("shutting down")
    await listener.close()


def partition_limits_of(config: ServerConfig, partition_count: int) -> PartitionLimits:
    """Return the limits of a partition; raises BadConfig if a batch would not fit into a frame."""
    slot_count = min(
        config.lock_slot_count, slot_count_within(config.lock_table_bytes_max, partition_count)
    )
    # A client's batch, together with other requests, must fit into one frame to a storage.
    rows_max = (FRAME_BYTES_MAX - config.batch_bytes_max - 2 * MIB) // (2 * _ROW_OVERHEAD_BYTES)
    if rows_max < 1:
        raise errors.BadConfig(
            f"setting batch_bytes_max: expected at most {FRAME_BYTES_MAX - 3 * MIB}, so that "
            f"a batch fits into a message to a storage; found {config.batch_bytes_max}"
        )
    batch_rows_max = min(config.batch_rows_max, rows_max)
    return PartitionLimits(
        lock_slot_count=slot_count,
        queue_bytes_max=config.partition_queue_bytes_max,
        in_flight_bytes_max=config.partition_in_flight_bytes_max,
        in_flight_batches_max=config.partition_in_flight_batches_max,
        batch_rows_max=batch_rows_max,
        batch_bytes_max=config.batch_bytes_max,
        connection_bytes_max=config.connection_in_flight_bytes_max,
        slice_rows_max=min(8_192, rows_max),
        feed_frame_count_max=config.feed_frame_count_max,
        feed_request_count_min=config.feed_request_count_min,
        range_bytes_max=config.range_bytes_max,
        concurrent_fetches_max=config.partition_storage_reads_max,
        remembered_clients_max=config.remembered_clients_max,
        high_water_mark_staleness_ms_max=config.high_water_mark_staleness_ms_max,
        session_wait_ms_max=config.session_wait_ms_max,
        checkpoint_interval_count=config.checkpoint_interval_count,
        lock_load_count_max=config.lock_load_count_max,
        archive_interval_ms=config.archive_interval_ms,
    )


def session_limits_of(config: ServerConfig) -> SessionLimits:
    """Return the limits of a store session."""
    return SessionLimits(
        redial_ms_min=config.retry_interval_ms_min,
        redial_ms_max=min(2_000, config.retry_interval_ms_max),
        answer_ms_max=config.quorum_timeout_ms,
        quorum_ms_max=config.quorum_timeout_ms,
        lag_bytes_max=config.replica_lag_bytes_max,
        slow_append_ms=config.slow_append_ms,
        archive_interval_ms=config.archive_interval_ms,
        archive_retention_ms=config.archive_retention_ms,
    )


def _flow_limits(config: ServerConfig) -> FlowLimits:
    reserved_bytes = (
        config.lock_table_bytes_max + config.feed_cache_bytes + config.transaction_cache_bytes
    )
    return FlowLimits(
        connection_in_flight_count_max=config.connection_in_flight_count_max,
        connection_in_flight_bytes_max=config.connection_in_flight_bytes_max,
        memory_bytes_max=max(config.memory_bytes_max - reserved_bytes, 16 * MIB),
        range_bytes_max=config.range_bytes_max,
    )
