"""The storage process: its directory, its ports, its partitions, and its shutdown.

Only this file connects the service with sockets, threads and ZooKeeper. `service.py` decides on all
answers.

Rules:
    1. Before any partition is served, the directory is opened, and this storage is registered for
       its address.
    2. `served_replicas.py` decides which partitions are served; `admin_port.py` administers them.
    3. Calls of the engine run in a small pool of threads, one at a time for a partition. Uploads to
       the archive and collections of garbage share one other thread, and reads from the archive
       have other threads. The process does not wait for these threads when it exits, because a call
       of the object store may hang.
    4. A connection that arrives before the partitions are open waits. Without this rule, an owner
       would receive the error that the storage does not have the partition, and would retry only
       after a long pause.
    5. At shutdown, the process stops reading requests, finishes running work, syncs, and marks the
       directory as clean. If an error such as a failed disk has stopped the process, it leaves the
       directory as it is. In two cases, the process also keeps files and locks open until it exits:
       running work does not end in time, or a call still changes a file after its caller was
       cancelled. So no other process can start on the directory before this exit. A disk that hangs
       does not prevent the exit.
"""

import asyncio
import logging
import secrets
import signal
import time
from asyncio import TaskGroup
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, assert_never
from uuid import UUID

from waltz_core import errors
from waltz_core.archive.archive_cache import READ_AHEAD_THREADS
from waltz_core.archive.garbage_collection import GarbageCollectionJob, GarbageCollectionOutcome
from waltz_core.archive.manifest_jobs import ExpiryJob, ExpiryOutcome, UploadJob, UploadOutcome
from waltz_core.archive.storage_archive import StorageArchive
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.applied_revisions import storage_node_name
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.cluster.zookeeper.follow_znodes import follow_despite_bad_nodes, follow_permissions
from waltz_core.cluster.zookeeper.startup import connect_daemon, retry_start_step
from waltz_core.config.declarations import StorageConfig
from waltz_core.daemon_pages import Health, serve_pages
from waltz_core.driver import Driver, loop_clock_ms
from waltz_core.log_lines import log_report
from waltz_core.machine import Report
from waltz_core.metrics import Metrics
from waltz_core.records.record import FRAME_BYTES_MAX, PartitionId, ReplicaId, TransactionId
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.disk_space import SAMPLE_INTERVAL_MS, DiskSpace
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.scrub import (
    Scrub,
    ScrubState,
    read_scrub_positions,
    write_scrub_positions,
)
from waltz_core.storage.process.admin_port import AdminPort
from waltz_core.storage.process.append_lines import log_synced_appends
from waltz_core.storage.process.archive_rechecks import recheck_forever
from waltz_core.storage.process.segment_sharing import SegmentSharing
from waltz_core.storage.process.served_replicas import ServedReplicas, run_concurrently
from waltz_core.storage.process.storage_health import StorageHealth
from waltz_core.storage.process.storage_metrics import StorageMetrics
from waltz_core.storage.service import archive_jobs, service, service_effects
from waltz_core.storage.service.admin_tasks import ArchiveState
from waltz_core.storage.service.archive_jobs import ERROR_CHARACTERS_MAX
from waltz_core.storage.service.archive_reads import (
    ArchiveQuery,
    answer_from_archive,
    archive_error_of,
)
from waltz_core.storage.service.retention import RetentionLimits
from waltz_core.storage.service.service import Event, StorageIdentity, StorageService
from waltz_core.storage.service.service_effects import Effect
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import ConnectionId, LaneRequest, Work, WorkOutcome
from waltz_core.storage.service.writer_threads import CallThreads, WriteOutcome, WriterThreads
from waltz_core.transport import net, quota_metrics, tls
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.listening import listen
from waltz_core.transport.net import Link
from waltz_core.transport.port_files import open_port_files
from waltz_core.wire.messages import Message, Nack, StorageMessage, WireProtocol

if TYPE_CHECKING:
    from concurrent.futures import Future

_log = logging.getLogger(__name__)

CLOSE_S_MAX: Final = 10.0
# Closing a log needs three syncs, and there may be a thousand logs.
CLOSE_LOGS_S_MAX: Final = 300.0
SCRUB_PROGRESS_INTERVAL_S: Final = 60.0
# The limit of unsent answers of one connection; above it, the connection is closed.
ANSWERS_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
ARCHIVE_READ_THREADS: Final = 4
# The log levels of reports; all other reports have level DEBUG.
LOG_LEVELS: Final = {
    "storage.disk_failed": logging.WARNING,
    "storage.disk_full": logging.WARNING,
    "storage.files_replaced": logging.WARNING,
    "storage.partition_open_failed": logging.WARNING,
    "storage.read_failed": logging.WARNING,
    "storage.reserve_released": logging.WARNING,
    "storage.damage_found": logging.WARNING,
    "storage.scrub_skipped": logging.WARNING,
    "storage.archive_failed": logging.WARNING,
    "storage.archive_read_failed": logging.WARNING,
    "storage.archive_stalled": logging.WARNING,
    "storage.garbage_collection_failed": logging.WARNING,
    "storage.expiry_failed": logging.WARNING,
    "storage.damage_repaired": logging.INFO,
    "storage.disk_space_available": logging.INFO,
    "storage.garbage_collected": logging.INFO,
    "storage.replica_repaired": logging.INFO,
    "storage.scrub_finished": logging.INFO,
    "storage.segment_removed": logging.INFO,
}
ResultT = TypeVar("ResultT")
JobT = TypeVar("JobT")


@dataclass(frozen=True, slots=True)
class StaticCluster:
    """The key and the size of a cluster; replaces ZooKeeper in tests and for a single storage."""

    cluster_key: UUID
    partition_count: int
    partitions: tuple[PartitionId, ...]


def run(config: StorageConfig) -> None:
    """Run a storage until SIGTERM or SIGINT; raise the error if it stops for another reason."""
    if not __debug__:
        raise errors.BadConfig(
            "the storage does not run under `python -O`, because it relies on its assertions. "
            "Hint: run it without -O"
        )
    net.run(serve(config, on_ready=_print_ready))


def _print_ready(address: str) -> None:
    _log.info("storage.ready address=%s", address)
    print(f"storage ready {address}", flush=True)  # noqa: T201 - the parent process waits for it


async def serve(
    config: StorageConfig,
    *,
    cluster: StaticCluster | None = None,
    on_ready: Callable[[str], None] = lambda _address: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` is set; if `stop` is None, until SIGTERM or SIGINT.

    `cluster` replaces ZooKeeper. Raises the errors that prevent a start or stop the daemon:
    ClusterKeyMismatch, StorageIdMismatch, BadFormat (a file), CoordinatorUnavailable, BadConfig
    (another process on the directory, an address in use), DiskFailed.
    """
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls.check_network(config)
    if cluster is not None:
        await StorageDaemon(config, cluster, None).serve(stop, on_ready)
        return
    async with connect_daemon(config) as coordinator:
        limit_ms = config.zookeeper_connect_timeout_ms
        view = await retry_start_step("the cluster", coordinator.read_cluster, timeout_ms=limit_ms)
        cluster_facts = StaticCluster(view.store.cluster_key, view.params.partition_count, ())
        await StorageDaemon(config, cluster_facts, coordinator).serve(stop, on_ready)


class StorageDaemon:
    """One storage process; rules refer to this module."""

    def __init__(
        self, config: StorageConfig, cluster: StaticCluster, coordinator: Coordinator | None
    ) -> None:
        self.metrics = Metrics("storage", has_process_metrics=True)
        self.address = ""
        self._storage_metrics = StorageMetrics(self.metrics, clock_ms=loop_clock_ms)
        self._config = config
        self._ssl = tls.listen_context(config)
        self._cluster = cluster
        self._coordinator = coordinator
        self._writers = WriterThreads(config.writer_thread_count, self._on_work_done)
        # For rare calls: opening, closing, and all files other than the logs.
        self._pool = CallThreads(config.writer_thread_count, "storage-helper")
        self._loop = asyncio.get_running_loop()
        self._uploads = CallThreads(1, "storage-upload")
        self._archive_reads = CallThreads(ARCHIVE_READ_THREADS, "storage-archive-read")
        self._read_ahead = CallThreads(READ_AHEAD_THREADS, "storage-read-ahead")
        self._archive = StorageArchive(
            config.archive_url,
            cluster.cluster_key.bytes,
            self._read_ahead,
            on_progress=self._on_archive_progressed,
            bytes_per_s=config.archive_bytes_per_s,
        )
        self._links: dict[ConnectionId, Link] = {}
        self._segments = SegmentSharing(
            self._links,
            cluster_key=cluster.cluster_key.bytes,
            needs_ticket=config.access == "on",
        )
        self._numbers = count(1)
        self._is_assigned = asyncio.Event()
        self._waiting_links: list[Link] = []
        self._running_work_count = 0
        self._has_pending_work = False  # work did not end during shutdown, and may still run
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # Receives the error that stops the process (service.py, rule 6; or a bug).
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._engine: StorageEngine | None = None
        self._machine: StorageService | None = None
        self._served_replicas: ServedReplicas | None = None
        self._health: StorageHealth | None = None
        self._admin: AdminPort | None = None
        self._driver: Driver[Event, Effect] | None = None

    # ---------------------------------------------------------------------------------------------
    # start and end

    async def serve(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set or an error stops the storage."""
        try:
            async with open_port_files(self._config, self._ssl, metrics=self.metrics):
                await self._serve_directory(stop, on_ready)
        finally:
            self._pool.shutdown(wait=False)
            for threads in (self._uploads, self._archive_reads, self._read_ahead):
                threads.shutdown(wait=False)
            self._writers.end()

    async def _serve_directory(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        engine = await self._in_thread(self._open_engine)
        is_clean = False
        try:
            await self._serve_open(engine, stop, on_ready)
            is_clean = True
        except BaseExceptionGroup as group:
            # Report one error as a message, not as nested exception groups.
            waltz_errors, _ = group.split(errors.WaltzError)
            if waltz_errors is None:
                raise
            raise errors.first_error_in(waltz_errors) from group
        finally:
            if not self._has_pending_work:
                await self._drain()  # for work that began before the driver stopped
            if not self._has_pending_work and (is_clean or not self._pool.is_busy):
                close = engine.close if is_clean else engine.abandon
                await self._with_timeout("the logs", close, CLOSE_LOGS_S_MAX)

    def _open_engine(self) -> StorageEngine:
        config = self._config
        settings = LogSettings(
            cluster_key=self._cluster.cluster_key.bytes,
            segment_bytes_max=config.segment_bytes_max,
            now_ms=_wall_clock_ms,
            trust_fsync=config.trust_fsync,
        )
        return StorageEngine.open(
            RealDisk(config.open_files_max, page_cache_bytes_max=config.page_cache_bytes_max),
            Path(config.directory),
            settings,
            partition_count=self._cluster.partition_count,
            new_storage_id=secrets.token_bytes(16),
            reserve_bytes=config.reserve_bytes,
            for_each=run_concurrently,
        )

    async def _serve_open(
        self, engine: StorageEngine, stop: asyncio.Event, on_ready: Callable[[str], None]
    ) -> None:
        config = self._config
        identity = StorageIdentity(
            self._cluster.cluster_key.bytes, self._cluster.partition_count, engine.storage_id
        )
        machine = await self._create_service(engine, identity)
        self._engine, self._machine = engine, machine
        replicas = self._served_replicas = self._create_served_replicas(engine)
        self._health = StorageHealth(engine, replicas, self._coordinator, self._pool, self._failure)
        self._storage_metrics.register(
            machine, engine.space, links_count=lambda: len(self._links), logs=replicas.logs
        )
        self._driver = self._create_driver(machine)
        async with AsyncExitStack() as stack:
            stack.callback(self._driver.stop)
            if config.http_port:
                pages = serve_pages(
                    self.metrics, self.health, host=config.http_host, port=config.http_port
                )
                await stack.enter_async_context(pages)
            listener = await listen(
                WireProtocol.STORAGE,
                config.listen_host,
                config.port,
                self._accept,
                ssl=self._ssl,
                limits=LinkLimits(config.connections_max),
            )
            stack.push_async_callback(listener.close)
            self.address = f"{config.advertised_host or config.listen_host}:{listener.port}"
            await self._register(engine)
            replicas.address = ReplicaId(self.address)
            self.metrics.set("waltz_storage_info", 1, replica=self.address)
            try:
                async with TaskGroup() as tasks:
                    self._admin = self._make_admin(engine, replicas, identity, tasks)
                    stack.callback(self._admin.stop)
                    admin = await self._admin.listen(
                        config.listen_host, config.admin_port, self._ssl
                    )
                    stack.push_async_callback(admin.close)
                    tasks.create_task(replicas.follow(self._on_assignment_checked))
                    tasks.create_task(self._work_in_background(engine, machine, replicas))
                    if self._coordinator is None:
                        replicas.recheck()
                    else:
                        follow = self._follow_assignment(self._coordinator, engine, replicas, tasks)
                        tasks.create_task(follow)
                    await self._wait_for_event((self._is_assigned, stop), tasks)
                    await self._serve_until(stop, on_ready, tasks)
                    await self._shut_down(replicas)
            except* _StorageStopped:
                if not self._has_pending_work:  # otherwise no thread may be free
                    write = partial(self._write_scrub_positions, machine.scrub_positions)
                    await self._with_timeout("the scrub's progress", write, CLOSE_S_MAX)
                _log.info("storage.stopped address=%s", self.address)

    async def _work_in_background(
        self, engine: StorageEngine, machine: StorageService, served_replicas: ServedReplicas
    ) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._save_scrub_positions(machine))
            tasks.create_task(self._sample_space(engine.space))
            sharing = self._segments.serve(self.address, engine, served_replicas, self._pool)
            tasks.create_task(sharing)
            tasks.create_task(quota_metrics.publish_quotas(self.metrics, "storage", self._ssl))
            tasks.create_task(recheck_forever(self._archive, machine, self._archive_reads))

    async def _create_service(
        self, engine: StorageEngine, identity: StorageIdentity
    ) -> StorageService:
        config = self._config
        if config.archive_url:
            await self._in_thread(self._archive.open)
        scrub = Scrub(
            bytes_per_s=config.scrub_bytes_per_s,
            interval_ms=config.scrub_interval_ms,
            positions=await self._in_thread(self._read_scrub_positions),
        )
        limits = archive_jobs.ArchiveLimits(
            config.archive_object_bytes, config.archive_age_ms, config.archive_bytes_per_s
        )
        return StorageService(
            identity,
            queue_bytes_max=config.queue_bytes_max,
            space=engine.space,
            scrub=scrub,
            archive=limits if config.archive_url else None,
            retention=RetentionLimits(config.local_retention_bytes, config.local_retention_ms),
        )

    def _read_scrub_positions(self) -> dict[PartitionId, TransactionId]:
        try:
            return read_scrub_positions(RealDisk(), Path(self._config.directory))
        except errors.WaltzError as error:
            _log.warning("storage.scrub_restarted error=%s", error)
            return {}

    def _write_scrub_positions(self, positions: Mapping[PartitionId, TransactionId]) -> None:
        try:
            write_scrub_positions(RealDisk(), Path(self._config.directory), positions)
        except errors.WaltzError as error:
            _log.warning("storage.scrub_progress_save_failed error=%s", error)

    async def _save_scrub_positions(self, machine: StorageService) -> None:
        """Write the progress of the scrub at intervals, so that a restart continues from it."""
        saved_positions: Mapping[PartitionId, TransactionId] = {}
        while True:
            await asyncio.sleep(SCRUB_PROGRESS_INTERVAL_S)
            positions = machine.scrub_positions
            if positions != saved_positions:
                await self._in_thread(partial(self._write_scrub_positions, positions))
                saved_positions = positions

    async def _sample_space(self, space: DiskSpace) -> None:
        """Sample the free bytes, from which the doctor predicts when the disk will be full."""
        while True:
            await self._in_thread(lambda: space.note_free_bytes(_wall_clock_ms()))
            await asyncio.sleep(SAMPLE_INTERVAL_MS / 1000)

    def _create_driver(self, machine: StorageService) -> "Driver[Event, Effect]":
        return Driver(
            machine,
            self._perform,
            on_report=self._report,
            on_failure=self._on_failure,
            name="storage",
        )

    def _create_served_replicas(self, engine: StorageEngine) -> ServedReplicas:
        return ServedReplicas(
            engine,
            self._coordinator,
            partitions=self._cluster.partitions,
            post=self._post,
            report=self._report,
            in_thread=self._in_thread,
            on_opened=self._storage_metrics.register_log,
            on_dropped=lambda partition_id: self.metrics.forget(partition=partition_id),
        )

    def _make_admin(
        self,
        engine: StorageEngine,
        served_replicas: ServedReplicas,
        identity: StorageIdentity,
        tasks: TaskGroup,
    ) -> AdminPort:
        return AdminPort(
            engine,
            served_replicas,
            identity,
            post=self._post,
            report=self._report,
            in_thread=self._in_thread,
            tasks=tasks,
            on_failure=self._on_failure,
            scrub_states=self.scrub_status,
            archive_state=self._archive_state,
        )

    async def _register(self, engine: StorageEngine) -> None:
        """Register this storage; raises StorageIdMismatch if its address belongs to another one."""
        coordinator = self._coordinator
        if coordinator is None:
            return
        own_id = UUID(bytes=engine.storage_id)
        registered = await retry_start_step(
            "its registration",
            lambda: coordinator.register_storage_id(ReplicaId(self.address), own_id),
            timeout_ms=self._config.zookeeper_connect_timeout_ms,
        )
        if registered != own_id:
            raise errors.StorageIdMismatch(
                f"ZooKeeper has storage ID {registered} for {self.address}, but the "
                f"directory {self._config.directory} belongs to storage {own_id}. Hint: mount "
                f"the right disk, or run `waltz-core cluster replace-storage {self.address} "
                f"{self.address}` to let a storage with an empty directory replace the "
                "registered one."
            )

    async def _follow_assignment(
        self,
        coordinator: Coordinator,
        engine: StorageEngine,
        served_replicas: ServedReplicas,
        tasks: TaskGroup,
    ) -> None:
        """Follow permissions and assignment; register again when this storage is added again."""
        tasks.create_task(
            follow_permissions(coordinator, self._ssl, storage_node_name(served_replicas.address))
        )
        is_known = True

        def take(assignments: ReplicaAssignments) -> None:
            nonlocal is_known
            was_known, is_known = is_known, served_replicas.address in assignments.partitions
            if is_known and not was_known:
                tasks.create_task(
                    self._register(engine)
                )  # the removal has deleted the registration
            served_replicas.set_assignments(assignments)

        await follow_despite_bad_nodes(coordinator.follow_replica_assignment, take)

    async def _wait_for_event(self, events: Sequence[asyncio.Event], tasks: TaskGroup) -> None:
        """Wait for one of the events; raise the error if one stops the process first."""
        waiting_task = tasks.create_task(_wait_for_one_of(events))
        await asyncio.wait((waiting_task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        waiting_task.cancel()
        if self._failure.done():
            self._failure.result()

    async def _serve_until(
        self, stop: asyncio.Event, on_ready: Callable[[str], None], tasks: TaskGroup
    ) -> None:
        assert self._health is not None
        self._health.has_started = True
        if not stop.is_set():
            on_ready(self.address)
        await self._wait_for_event((stop,), tasks)

    async def _shut_down(self, served_replicas: ServedReplicas) -> None:
        """Shut down (rule 5); raise `_StorageStopped`, which ends all tasks."""
        for link in self._links.values():
            link.pause_reading()
        await self._drain(served_replicas)
        raise _StorageStopped

    async def _drain(self, served_replicas: ServedReplicas | None = None) -> None:
        """Wait until no work and no change of served partitions runs, at most `CLOSE_S_MAX`."""
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                if served_replicas is not None:
                    await served_replicas.pause_changes()
                await self._is_idle.wait()
        except TimeoutError:
            self._has_pending_work = True
            _log.warning("storage.shutdown_pending_work count=%d", self._running_work_count)

    def _on_failure(self, error: BaseException) -> None:
        """Stop the process with an error; only the first error counts."""
        if not self._failure.done():
            self._failure.set_exception(error)

    # ---------------------------------------------------------------------------------------------
    # connections

    def _on_assignment_checked(self) -> None:
        """Accept the connections that wait, because all wanted partitions are served (rule 4)."""
        self._is_assigned.set()
        links, self._waiting_links = self._waiting_links, []
        for link in links:  # in order: a server's later link replaces its earlier one
            if not link.is_closed:
                self._accept(link)

    def _accept(self, link: Link) -> None:
        if not self._is_assigned.is_set():
            self._waiting_links = [other for other in self._waiting_links if not other.is_closed]
            self._waiting_links.append(link)  # rule 4
            return
        connection = ConnectionId(next(self._numbers))
        link.write_backlog_bytes_max = ANSWERS_BYTES_MAX
        self._links[connection] = link
        link.start(
            partial(self._on_messages_received, connection),
            partial(self._on_link_closed, connection),
        )

    def _on_messages_received(self, connection: ConnectionId, messages: list[Message]) -> None:
        for message in self._links[connection].filter_permitted(messages):
            assert isinstance(message, StorageMessage)
            self._post(LaneRequest(connection, message))
            self.metrics.add("waltz_storage_requests_total", request=type(message).__name__)

    def _on_link_closed(self, connection: ConnectionId, _reason: str) -> None:
        del self._links[connection]
        self._post(service.Disconnected(connection))

    # ---------------------------------------------------------------------------------------------
    # the service's effects

    def _post(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.post(event)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case service_effects.SendStorageMessage():
                self._answer(effect.connection, effect.message)
            case service_effects.RunWork():
                self._run_work(effect.work)
            case (
                service_effects.CloseConnection()
                | service_effects.PauseReading()
                | service_effects.ResumeReading()
            ):
                self._apply_flow_control(effect)
            case service_effects.PartitionIdle():
                assert self._served_replicas is not None
                self._served_replicas.on_partition_idle(effect.log.partition_id)
            case service_effects.DropPartition():
                assert self._served_replicas is not None
                self._served_replicas.stop_serving(effect.log.partition_id, effect.error)
            case service_effects.CheckSpace():
                check = self._pool.submit(effect.space.recheck)
                check.add_done_callback(partial(self._post_to_loop, self._on_space_checked))
            case (
                service_effects.UploadRange()
                | service_effects.CollectFiles()
                | service_effects.WriteExpiry()
                | service_effects.ReadArchive()
            ):
                self._use_archive(effect)
            case service_effects.EndProcess():
                self._on_failure(errors.DiskFailed(effect.reason))
            case Report():
                self._report(effect)
            case _:
                assert_never(effect)

    def _use_archive(self, effect: service_effects.ArchiveEffect) -> None:
        archive, uploads = self._archive, self._uploads
        match effect:
            case service_effects.UploadRange(job):
                self._run_on_thread(uploads, archive.upload, job, self._on_upload_done)
            case service_effects.CollectFiles(job):
                self._run_on_thread(uploads, archive.collect_garbage, job, self._on_collection_done)
            case service_effects.WriteExpiry(job):
                self._run_on_thread(uploads, archive.expire, job, self._on_expiry_done)
            case service_effects.ReadArchive(read):
                self._run_on_thread(
                    self._archive_reads, self._read_archive, read, self._on_archive_read_done
                )

    def _run_on_thread(
        self,
        threads: CallThreads,
        call: Callable[[JobT], ResultT],
        job: JobT,
        callback: Callable[[JobT, ResultT], None],
    ) -> None:
        """Run a call on a thread; pass its result to `callback` on the event loop's thread."""

        def on_done(future: "Future[ResultT]") -> None:
            error = future.exception()
            if error is None:
                callback(job, future.result())
            else:
                self._on_failure(error)

        threads.submit(call, job).add_done_callback(partial(self._post_to_loop, on_done))

    def _apply_flow_control(
        self,
        effect: service_effects.CloseConnection
        | service_effects.PauseReading
        | service_effects.ResumeReading,
    ) -> None:
        link = self._links.get(effect.connection)
        if link is None:
            return
        match effect:
            case service_effects.CloseConnection():
                link.close(effect.reason)
            case service_effects.PauseReading():
                link.pause_reading()
            case service_effects.ResumeReading():
                link.resume_reading()

    def _answer(self, connection: ConnectionId, message: StorageMessage) -> None:
        if connection == service.ADMIN_CONNECTION:
            assert self._admin is not None
            self._admin.on_answered(message)
            return
        link = self._links.get(connection)
        if link is None:
            return
        try:
            link.send(self._segments.with_ticket(connection, message))
        except errors.LocalProtocolError as error:
            # A batch of a full append frame may not fit into the frame of a range.
            prefix = (message.session_id, message.sequence, message.partition_id)
            link.send(Nack(*prefix, errors.TooLarge.code, message.session_id, str(error)))

    def _run_work(self, work: Work) -> None:
        self._running_work_count += 1
        self._is_idle.clear()
        self._writers.run(work)

    def _post_to_loop(
        self, callback: "Callable[[Future[ResultT]], None]", future: "Future[ResultT]"
    ) -> None:
        """Call `callback` on the event loop's thread; this method runs on another thread."""
        try:
            self._loop.call_soon_threadsafe(callback, future)
        except RuntimeError:
            if not self._loop.is_closed():  # Otherwise the process is exiting.
                raise

    def _on_upload_done(self, job: UploadJob, outcome: UploadOutcome) -> None:
        self._storage_metrics.count_upload(job, outcome)
        self._post(archive_jobs.UploadDone(job, outcome))

    def _on_collection_done(
        self, job: GarbageCollectionJob, outcome: GarbageCollectionOutcome
    ) -> None:
        self._storage_metrics.count_collection(job, outcome)
        self._post(archive_jobs.FilesCollected(job, outcome))

    def _on_expiry_done(self, job: ExpiryJob, outcome: ExpiryOutcome) -> None:
        self._post(archive_jobs.ExpiryWritten(job, outcome))

    def _on_archive_progressed(self) -> None:
        """Notify the state machine of progress; this method runs on the thread of uploads."""
        with suppress(RuntimeError):  # The loop is closed: the process is exiting.
            self._loop.call_soon_threadsafe(self._post, archive_jobs.ArchiveProgressed())

    def _read_archive(self, read: ArchiveQuery) -> WorkOutcome:
        mark, access = read.mark, self._archive
        try:
            reader = access.reader(PartitionId(mark.partition_id), mark.manifest, mark.manifest_crc)
        except errors.WaltzError as error:
            return error
        return answer_from_archive(reader, read)

    def _on_archive_read_done(self, read: ArchiveQuery, outcome: WorkOutcome) -> None:
        self._storage_metrics.count_archive_read(read.mark.partition_id, outcome)
        failure = archive_error_of(outcome)
        if failure is None or isinstance(failure, errors.ARCHIVE_DAMAGE_ERRORS):
            self._archive.on_location_read(read.location, "" if failure is None else str(failure))
        self._post(service.ArchiveReadDone(read, outcome))

    def _on_space_checked(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._on_failure(error)
        else:
            self._post(service.SpaceChecked())

    def _on_work_done(self, work: Work, outcome: WriteOutcome) -> None:
        self._running_work_count -= 1
        if isinstance(outcome, BaseException):
            self._on_failure(outcome)
        else:
            self._post(service.WorkDone(work, outcome))
        if self._running_work_count == 0:  # and no more work has followed
            self._is_idle.set()
        if not isinstance(outcome, BaseException):  # after the answers are sent
            self._storage_metrics.count(work, outcome)
            log_synced_appends(work, outcome)

    # ---------------------------------------------------------------------------------------------
    # health and status

    async def health(self) -> Health:
        """Return the health of the storage; its directory must be open."""
        assert self._health is not None
        return await self._health.find()

    def _archive_state(self) -> ArchiveState | None:
        config, failure = self._config, self._archive.failure
        if not config.archive_url:
            return None
        return ArchiveState(
            config.archive_url,
            config.archive_age_ms,
            self._archive.failure_count,
            "" if failure is None else str(failure)[:ERROR_CHARACTERS_MAX],
            isinstance(failure, errors.ARCHIVE_DAMAGE_ERRORS),
            self._archive.read_damage[:ERROR_CHARACTERS_MAX],
        )

    def scrub_now(self, partition_id: PartitionId | None = None) -> None:
        """Start a scrub of a partition from its beginning, or of all served partitions (None).

        A partition that is not served is skipped. `scrub_status` reports the progress.
        """
        self._post(service.ScrubRequested(partition_id))

    def scrub_status(self) -> list[ScrubState]:
        """Return the progress of the scrub in each served partition."""
        return [] if self._machine is None else self._machine.scrub_states(loop_clock_ms())

    def _report(self, report: Report) -> None:
        self._storage_metrics.report(report)
        log_report(_log, LOG_LEVELS.get(report.name, logging.DEBUG), report)

    async def _with_timeout(self, what: str, call: Callable[[], None], limit_s: float) -> None:
        """Run a call on a thread at shutdown; if it takes too long, log this and continue."""
        try:
            async with asyncio.timeout(limit_s):
                await self._in_thread(call)
        except TimeoutError:
            _log.warning("storage.shutdown_timed_out files=%r limit_s=%.0f", what, limit_s)

    async def _in_thread(self, call: Callable[[], ResultT]) -> ResultT:
        return await self._loop.run_in_executor(self._pool, call)


class _StorageStopped(Exception):
    """Ends all tasks of a storage that was stopped as requested."""


async def _wait_for_one_of(events: Sequence[asyncio.Event]) -> None:
    async with TaskGroup() as tasks:
        waiting_tasks = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting_tasks:
            task.cancel()


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000
