"""The storage process: its directory, its port, its partitions, its end.

Why it stands alone: it is the one place where the service meets sockets, threads and ZooKeeper.
What may be answered is `service.py`'s; here it is only carried.

Rules:
    1. The directory is open, and this storage registered for its address, before any partition is
       served.
    2. A partition is served while the replica assignment names this storage for it, and afterwards
       for as long as its metadata does: the session that leaves this storage out has to hear first
       what it holds (correctness.md 2.1 C and D). While ZooKeeper is away nothing changes. One that
       cannot be opened (a full disk, a failing one, a file that somebody has to bring back) is
       tried again, ever more rarely.
    3. Calls of the engine run in a small pool of threads, one at a time for a partition.
    4. Who asks before the partitions are open waits until they are: the answer that they are not
       here would keep an owner away for long.
    5. At the end: read no more, let work under way end, sync, leave the directory marked as clean.
       After a failure of the disk it is left as it is.
"""

import asyncio
import logging
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar, assert_never
from uuid import UUID

from waltz_core import errors, net
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.model import ReplicaAssignments
from waltz_core.cluster.zookeeper import connected
from waltz_core.config import StorageConfig
from waltz_core.driver import Driver
from waltz_core.machine import Report
from waltz_core.metrics import Health, Metrics, serve_pages
from waltz_core.net import Link
from waltz_core.record import FRAME_BYTES_MAX, PartitionId, ReplicaId
from waltz_core.storage import service
from waltz_core.storage.disk import RealDisk
from waltz_core.storage.engine import Engine
from waltz_core.storage.partition_log import LogSettings, PartitionLog
from waltz_core.storage.service import Effect, Event, Identity, StorageService
from waltz_core.storage.work import ConnectionId, Request, Work, WorkResult
from waltz_core.wire.messages import AppendRaw, Message, Nack, StorageMessage, Surface

_log = logging.getLogger(__name__)

CLOSE_S_MAX: Final = 10.0
OPEN_AGAIN_S_MIN: Final = 1.0
OPEN_AGAIN_S_MAX: Final = 60.0
# What one connection may have asked for and not taken yet; whoever wants more is cut.
ANSWERS_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
# Reports that somebody should look at; others are counted, and told only when asked for.
_ALARMS: Final = ("disk_failed", "partition_refused")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StaticCluster:
    """A cluster without ZooKeeper: for tests, and for whoever has one storage only."""

    cluster_key: UUID
    partition_count: int
    partitions: tuple[PartitionId, ...]


def run(config: StorageConfig) -> None:
    """Run a storage until SIGTERM or SIGINT; raises what made it end otherwise."""
    if not __debug__:
        raise errors.BadConfig("python -O: the storage relies on its assertions, run it without -O")
    net.run(serve(config, on_ready=_say_ready))


def _say_ready(address: str) -> None:
    print(f"storage ready {address}", flush=True)  # noqa: T201 - whoever started us waits for it


async def serve(
    config: StorageConfig,
    *,
    cluster: StaticCluster | None = None,
    on_ready: Callable[[str], None] = lambda _address: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` is set (without one: until SIGTERM or SIGINT).

    `cluster` takes the place of ZooKeeper. Raises what the daemon cannot start or go on with:
    ClusterKeyMismatch, StorageIdMismatch, BadFormat (a file), CoordinatorUnavailable, BadConfig
    (another process on the directory, an address in use), DiskFailed.
    """
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if cluster is not None:
        await StorageDaemon(config, cluster, None).serve(stop, on_ready)
        return
    async with connected(
        config.connect,
        connect_timeout_ms=config.zookeeper_connect_timeout_ms,
        session_timeout_ms=config.zookeeper_session_timeout_ms,
        request_timeout_ms=config.zookeeper_request_timeout_ms,
    ) as coordinator:
        view = await coordinator.read_cluster()
        facts = StaticCluster(view.store.cluster_key, view.params.partition_count, ())
        await StorageDaemon(config, facts, coordinator).serve(stop, on_ready)


def look_again_s(
    again_s: float,
    *,
    served: Collection[PartitionId],
    wanted: Collection[PartitionId],
    lying_here: Collection[PartitionId],
) -> float | None:
    """Return after how long to look at the partitions again though nothing has changed.

    None when only a change can give reason to. `again_s` is the pause as it has grown by now, for
    partitions that could not be opened, or not be dropped yet.
    """
    if set(served) != set(wanted):
        return again_s
    # Of one that lies here and is not served, a session may still come to want the vote.
    return None if set(served) >= set(lying_here) else OPEN_AGAIN_S_MAX


class StorageDaemon:
    """One storage; see the module's rules."""

    def __init__(
        self, config: StorageConfig, cluster: StaticCluster, coordinator: Coordinator | None
    ) -> None:
        self.metrics = Metrics("storage", with_process=True)
        self.address = ""
        self._config = config
        self._cluster = cluster
        self._coordinator = coordinator
        self._pool = ThreadPoolExecutor(config.writer_threads_count, "storage-writer")
        self._loop = asyncio.get_running_loop()
        self._links: dict[ConnectionId, Link] = {}
        self._numbers = count(1)
        self._logs: dict[PartitionId, PartitionLog] = {}
        self._wanted: tuple[PartitionId, ...] = cluster.partitions
        self._wanted_changed = asyncio.Event()
        self._is_assigned = asyncio.Event()
        self._early: list[Link] = []
        self._works_count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._dropping: dict[PartitionId, asyncio.Event] = {}
        # Set with what ends the process (service.py, rule 6; or a bug of ours).
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._engine: Engine | None = None
        self._driver: Driver[Event, Effect] | None = None

    # ---------------------------------------------------------------------------------------------
    # its life

    async def serve(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set or something has failed."""
        engine = await self._in_thread(self._open_engine)
        is_clean = False
        try:
            await self._serve_open(engine, stop, on_ready)
            is_clean = True
        except BaseExceptionGroup as group:
            # What can be told in a sentence is told in one, not as a tree of tasks.
            told, _ = group.split(errors.WaltzError)
            if told is None:
                raise
            raise _first_of(told) from group
        finally:
            await self._in_thread(engine.close if is_clean else engine.abandon)
            self._pool.shutdown(wait=False)

    def _open_engine(self) -> Engine:
        config = self._config
        settings = LogSettings(
            cluster_key=self._cluster.cluster_key.bytes,
            segment_bytes_max=config.segment_bytes_max,
            now_ms=_wall_clock_ms,
            trust_fsync=config.trust_fsync,
        )
        return Engine.open(
            RealDisk(config.open_files_max),
            Path(config.directory),
            settings,
            partition_count=self._cluster.partition_count,
            new_storage_id=secrets.token_bytes(16),
            reserve_bytes=config.reserve_bytes,
        )

    async def _serve_open(
        self, engine: Engine, stop: asyncio.Event, on_ready: Callable[[str], None]
    ) -> None:
        config = self._config
        identity = Identity(
            self._cluster.cluster_key.bytes, self._cluster.partition_count, engine.storage_id
        )
        machine = StorageService(identity, queue_bytes_max=config.queue_bytes_max)
        self._engine = engine
        self._driver = Driver(
            machine, self._perform, on_report=self._report, on_failure=self._failed, name="storage"
        )
        self._show(machine)
        async with AsyncExitStack() as stack:
            stack.callback(self._driver.stop)
            if config.http_port:
                pages = serve_pages(
                    self.metrics, self.health, host=config.listen_host, port=config.http_port
                )
                await stack.enter_async_context(pages)
            listener = await net.listen(
                Surface.STORAGE,
                config.listen_host,
                config.port,
                self._accept,
                links_max=config.connections_max,
            )
            stack.push_async_callback(listener.close)
            self.address = f"{config.advertised_host or config.listen_host}:{listener.port}"
            await self._register(engine)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow_partitions())
                    if self._coordinator is None:
                        self._wanted_changed.set()
                    else:
                        follow = self._coordinator.follow_replica_assignment(self._assigned)
                        tasks.create_task(follow)
                    await self._until(self._is_assigned, tasks)
                    on_ready(self.address)
                    await self._until(stop, tasks)
                    await self._end()
            except* _End:
                _log.info("storage.ended address=%s", self.address)

    async def _register(self, engine: Engine) -> None:
        """Take this address, or raise StorageIdMismatch when it is another storage's."""
        if self._coordinator is None:
            return
        mine = UUID(bytes=engine.storage_id)
        registered = await self._coordinator.register_storage_id(ReplicaId(self.address), mine)
        if registered != mine:
            raise errors.StorageIdMismatch(
                f"{self.address} is registered in ZooKeeper for storage {registered}, but the "
                f"directory {self._config.directory} is that of storage {mine}"
            )

    async def _until(self, event: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Wait for an event, or raise what the process has to end with."""
        waiting = tasks.create_task(event.wait())
        await asyncio.wait((waiting, self._failure), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._failure.done():
            self._failure.result()

    async def _end(self) -> None:
        """Rule 5; raises `_End`, which ends all tasks."""
        for link in self._links.values():
            link.pause_reading()
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._is_idle.wait()
        except TimeoutError:
            _log.warning("storage.busy_at_end works=%d", self._works_count)
        raise _End

    def _failed(self, error: BaseException) -> None:
        """End the process with an error; the first one counts."""
        if not self._failure.done():
            self._failure.set_exception(error)

    # ---------------------------------------------------------------------------------------------
    # partitions (rule 2)

    def _assigned(self, assignments: ReplicaAssignments) -> None:
        mine = assignments.partitions.get(ReplicaId(self.address))
        if mine is None:
            _log.warning("storage.not_assigned address=%s", self.address)
        count_max = self._cluster.partition_count
        self._wanted = tuple(sorted(each for each in mine or () if 0 <= each < count_max))
        self._wanted_changed.set()

    async def _follow_partitions(self) -> None:
        """Open and drop partitions until they are the right ones (rule 2)."""
        again_s = OPEN_AGAIN_S_MIN
        while True:
            try:
                async with asyncio.timeout(self._wait_s(again_s)):
                    await self._wanted_changed.wait()
                again_s = OPEN_AGAIN_S_MIN
            except TimeoutError:
                again_s = min(2 * again_s, OPEN_AGAIN_S_MAX)
            self._wanted_changed.clear()
            wanted = self._wanted
            wanted = (*wanted, *await self._leaving(wanted))
            for partition_id in [each for each in self._logs if each not in wanted]:
                await self._drop(partition_id)
            for partition_id in [each for each in wanted if each not in self._logs]:
                await self._open(partition_id)
            self._is_assigned.set()
            while self._early:
                self._accept(self._early.pop())

    def _wait_s(self, again_s: float) -> float | None:
        assert self._engine is not None
        lying_here = self._engine.assigned()
        return look_again_s(again_s, served=self._logs, wanted=self._wanted, lying_here=lying_here)

    async def _leaving(self, assigned: Collection[PartitionId]) -> list[PartitionId]:
        """Return the partitions that were taken away, but not yet by a session of their owner."""
        assert self._engine is not None
        leaving: list[PartitionId] = []
        if self._coordinator is None:
            return leaving
        for partition_id in self._engine.assigned():
            if partition_id in assigned:
                continue
            try:
                metadata = (await self._coordinator.read_partition(partition_id)).metadata
                is_named = metadata is not None and ReplicaId(self.address) in metadata.states
            except errors.WaltzError as error:
                _log.warning("storage.metadata_unread partition=%s error=%s", partition_id, error)
                is_named = partition_id in self._logs
            if is_named:
                leaving.append(partition_id)
        return leaving

    async def _open(self, partition_id: PartitionId) -> None:
        try:
            log = await self._in_thread(partial(self._open_log, partition_id))
        except errors.WaltzError as error:
            # One partition that cannot be served is no reason not to serve the others.
            fields = (("partition", partition_id), ("error", error))
            self._report(Report("partition_refused", fields))
            return
        self._logs[partition_id] = log
        self._ask(log)
        self._post(service.Opened(log))
        _log.info("storage.partition_opened partition=%s last=%s", partition_id, log.synced_max)

    def _open_log(self, partition_id: PartitionId) -> PartitionLog:
        """Open a log, on a thread of the pool; a full disk still has room for that."""
        assert self._engine is not None
        try:
            return self._engine.assign(partition_id)
        except errors.NoSpace:
            self._engine.release_reserve()
            _log.warning("storage.reserve_released partition=%s", partition_id)
            return self._engine.assign(partition_id)

    async def _drop(self, partition_id: PartitionId) -> None:
        """Serve a partition no longer; its files stay, and stay open until the process ends."""
        idle = self._dropping[partition_id] = asyncio.Event()
        self._post(service.Dropped(partition_id))
        await idle.wait()
        del self._dropping[partition_id]
        del self._logs[partition_id]
        self.metrics.forget(partition=partition_id)
        _log.info("storage.partition_dropped partition=%s", partition_id)

    # ---------------------------------------------------------------------------------------------
    # connections

    def _accept(self, link: Link) -> None:
        if not self._is_assigned.is_set():
            self._early.append(link)  # rule 4
            return
        connection = ConnectionId(next(self._numbers))
        link.write_backlog_bytes_max = ANSWERS_BYTES_MAX
        self._links[connection] = link
        link.start(partial(self._received, connection), partial(self._closed, connection))

    def _received(self, connection: ConnectionId, messages: list[Message]) -> None:
        for message in messages:
            assert isinstance(message, StorageMessage)
            self.metrics.add("waltz_storage_requests_total", request=type(message).__name__)
            self._post(Request(connection, message))

    def _closed(self, connection: ConnectionId, _reason: str) -> None:
        del self._links[connection]
        self._post(service.Disconnected(connection))

    # ---------------------------------------------------------------------------------------------
    # the service's effects

    def _post(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.post(event)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case service.Answer():
                self._answer(effect.connection, effect.message)
            case service.RunWork():
                self._run_work(effect.work)
            case service.CloseConnection() | service.PauseReading() | service.ResumeReading():
                self._steer(effect)
            case service.Idle():
                self._dropping[effect.log.partition_id].set()
            case service.EndProcess():
                self._failed(errors.DiskFailed(effect.reason))
            case Report():
                self._report(effect)
            case _:
                assert_never(effect)

    def _steer(
        self, effect: service.CloseConnection | service.PauseReading | service.ResumeReading
    ) -> None:
        link = self._links.get(effect.connection)
        if link is None:
            return
        match effect:
            case service.CloseConnection():
                link.close(effect.reason)
            case service.PauseReading():
                link.pause_reading()
            case service.ResumeReading():
                link.resume_reading()

    def _answer(self, connection: ConnectionId, message: StorageMessage) -> None:
        link = self._links.get(connection)
        if link is None:
            return
        try:
            link.send(message)
        except errors.LocalProtocolError as error:
            # A batch that came in a full frame does not fit into the frame of a range.
            prefix = (message.session_id, message.sequence, message.partition_id)
            link.send(Nack(*prefix, errors.TooLarge.code, message.session_id, str(error)))

    def _run_work(self, work: Work) -> None:
        self._works_count += 1
        self._is_idle.clear()
        future = self._pool.submit(self._run, work)
        future.add_done_callback(partial(self._hop, work))

    def _run(self, work: Work) -> WorkResult:
        """Run a piece of work, on a thread of the pool; a full disk still has room for repair."""
        result = work.run(time.perf_counter)
        is_append = work.requests and isinstance(work.requests[0].message, AppendRaw)
        if not is_append and any(isinstance(each, errors.NoSpace) for each in result.outcomes):
            assert self._engine is not None
            self._engine.release_reserve()
            _log.warning("storage.reserve_released partition=%s", work.partition_id)
            result = work.run(time.perf_counter)
        return result

    def _hop(self, work: Work, future: "Future[WorkResult]") -> None:
        """Go back to the loop's thread; this runs on the pool's."""
        self._loop.call_soon_threadsafe(self._work_done, work, future)

    def _work_done(self, work: Work, future: "Future[WorkResult]") -> None:
        self._works_count -= 1
        if self._works_count == 0:
            self._is_idle.set()
        error = future.exception()
        if error is not None:
            self._failed(error)
            return
        result = future.result()
        self._count(work, result)
        self._post(service.WorkDone(work, result))

    # ---------------------------------------------------------------------------------------------
    # what it shows

    def health(self) -> Health:
        """Whether the disk takes writes, and which partitions are served."""
        suspect = [each for each, log in self._logs.items() if log.suspect]
        state = None if self._coordinator is None else self._coordinator.session_state.name
        details = {
            "address": self.address,
            "partitions": sorted(self._logs),
            "not_served": sorted(set(self._wanted) - self._logs.keys()),
            "suspect": sorted(suspect),
            "zookeeper": state,
        }
        is_well = not self._failure.done() and not details["not_served"] and not suspect
        return Health(is_well, details)

    def _show(self, machine: StorageService) -> None:
        ask = self.metrics.ask
        directory = self._config.directory
        ask("waltz_storage_connections", lambda: len(self._links))
        ask("waltz_storage_queued_bytes", lambda: machine.queued_bytes)
        ask("waltz_storage_free_bytes", lambda: shutil.disk_usage(directory).free)
        ask(
            "waltz_storage_suspect_replicas",
            lambda: sum(log.suspect for log in list(self._logs.values())),
        )

    def _ask(self, log: PartitionLog) -> None:
        where = {"partition": log.partition_id}
        self.metrics.ask("waltz_storage_last_transaction", lambda: log.synced_max, **where)
        self.metrics.ask("waltz_storage_low_water_mark", lambda: log.low_water_mark, **where)

    def _count(self, work: Work, result: WorkResult) -> None:
        add, partition = self.metrics.add, work.partition_id
        if result.appended_count:
            add(
                "waltz_storage_appended_transactions_total",
                result.appended_count,
                partition=partition,
            )
            add("waltz_storage_appended_bytes_total", result.appended_bytes, partition=partition)
        if result.read_count:
            add("waltz_storage_read_transactions_total", result.read_count, partition=partition)
            add("waltz_storage_read_bytes_total", result.read_bytes, partition=partition)
        if result.sync_s is not None:
            add("waltz_storage_syncs_total")
            self.metrics.observe("waltz_storage_sync_seconds", result.sync_s)
        if result.failure is not None:
            add("waltz_storage_failed_writes_total")

    def _report(self, report: Report) -> None:
        self.metrics.report(report)
        level = logging.WARNING if report.name in _ALARMS else logging.DEBUG
        if _log.isEnabledFor(level):
            fields = " ".join(f"{name}={value}" for name, value in report.fields)
            _log.log(level, "storage.%s %s", report.name, fields)

    async def _in_thread(self, call: Callable[[], ResultT]) -> ResultT:
        return await self._loop.run_in_executor(self._pool, call)


class _End(Exception):
    """The storage was asked to end."""


def _first_of(group: BaseExceptionGroup[errors.WaltzError]) -> errors.WaltzError:
    found = group.exceptions[0]
    return found if isinstance(found, errors.WaltzError) else _first_of(found)


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000
