"""A simulated storage: the production service and engine on a disk that can lose data.

It replaces `storage/process/storage_daemon.py`. It runs the service's effects in virtual time, and
its power may fail between any two steps of its disk.

Rules:
    1. The service, the engine and the files are unchanged production code.
    2. A piece of work takes effect at one moment. Its answers follow after the duration of the disk
       access. If the process dies in between, all data is durable and no request is answered. If
       the process dies during the work, it dies at a step of its disk (`SimDisk.plan_fault`).
    3. A disk belongs to the machine, not to the process: it survives every restart of the process.
    4. Like the daemon, a storage does not start while ZooKeeper is unavailable, or if its address
       is registered for another storage. The storage serves the cluster's partition if the last
       assignment that it has read contains the storage. If a later assignment does not contain the
       storage, it serves the partition until the owner has removed it from the replica states.
    5. Uploads and reads of the archive go to the simulated archive.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from waltz_core.archive.garbage_collection import GarbageCollectionJob, GarbageCollectionOutcome
from waltz_core.archive.manifest_jobs import ExpiryJob, ExpiryOutcome, UploadJob, UploadOutcome
from waltz_core.errors import (
    CoordinatorUnavailable,
    NoSpace,
    PermissionDenied,
    StorageIdMismatch,
    WaltzError,
)
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import PartitionId, ReplicaId, SessionId
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.scrub import Scrub
from waltz_core.storage.service import archive_jobs, service, service_effects
from waltz_core.storage.service.archive_reads import ArchiveQuery
from waltz_core.storage.service.retention import RetentionLimits
from waltz_core.storage.service.service import StorageIdentity, StorageService
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import ConnectionId, LaneRequest, Work, WorkOutcome, WorkResult
from waltz_core.wire.authentication import rejected_answer
from waltz_core.wire.messages import Message, StorageMessage
from waltz_sim.world.network import FAR, Handlers, SimLink
from waltz_sim.world.process import Process
from waltz_sim.world.simulated_disk import Contents, PowerLoss, SimDisk, Survival

if TYPE_CHECKING:
    from collections.abc import Callable

    from waltz_sim.cluster.simulated_cluster import SimCluster

STORAGE_DIRECTORY: Final = Path("/waltz")
QUEUE_BYTES_MAX: Final = 64 * 1024
SCRUB_BYTES_PER_S: Final = 4 * 1024  # low, because a simulated log has only some kilobytes
RESTART_MS: Final = (1, 400)
REOPEN_DELAY_US: Final = 200_000
LEAVING_CHECK_US: Final = 1_000_000
EMPTY_CONTENTS: Final = Contents({}, frozenset())
LOCK_FILE_BYTES_MAX: Final = 2 * 1024


@dataclass(frozen=True, slots=True)
class DiskBackup:
    """A backup of a disk, with the session of its replica's low-water mark."""

    contents: Contents
    last_session: SessionId


class SimStorage(Process):
    """One storage machine: its disk, and the process on it. `replica` is its address."""

    def __init__(self, cluster: "SimCluster", replica: ReplicaId) -> None:
        super().__init__(cluster.world, replica)
        self.replica = replica
        self._cluster = cluster
        self._checks = cluster.checks
        self.disk = SimDisk(is_traced=False)
        self.snapshots: list[DiskBackup] = []
        self.trusts_fsync = True
        # Where the storage must die: the name of a request, and whether after its work (or before).
        # The callback runs at the death.
        self.planned_death: tuple[str, bool, Callable[[], None]] | None = None
        self.fsync_us = self.rng.choice((100, 500, 2_000))
        self.storage_id = self.rng.randbytes(16)
        self.engine: StorageEngine | None = None
        self.service: StorageService | None = None
        self._settings = LogSettings(
            cluster.key, cluster.setup.segment_bytes_max, self._wall_clock, trust_fsync=True
        )
        self.start_error: WaltzError | None = None  # the reason why it did not start
        self._is_dropping = False
        self._exclusive_call: Callable[[], None] | None = None
        self.is_uploading = False
        self.is_denying = False  # whether the servers are not permitted to replicate
        self.on_started()

    def _wall_clock(self) -> int:
        return self.wall_ms

    @property
    def log(self) -> PartitionLog | None:
        """The log of the partition, if the process runs and serves the partition."""
        if self.engine is None:
            return None
        return self.engine.logs.get(self._cluster.partition_id)

    # ---- life

    def on_started(self) -> None:
        """Open the directory, and serve the partition if it is assigned here."""
        self._is_dropping = False
        self._exclusive_call = None
        try:
            self._open_directory()
        except PowerLoss:
            self.lose_power()
            return
        except WaltzError as error:
            self._stop_after_failed_start(error)
            return
        self.start_error = None
        assert self.engine is not None
        identity = StorageIdentity(self._cluster.key, 1, self.engine.storage_id)
        setup = self._cluster.setup
        interval_ms, has_archive = setup.scrub_interval_ms, setup.archive_interval_ms > 0
        scrub = Scrub(bytes_per_s=SCRUB_BYTES_PER_S if interval_ms else 0, interval_ms=interval_ms)
        limits = archive_jobs.ArchiveLimits(setup.archive_object_bytes, setup.archive_age_ms)
        self.service = StorageService(
            identity,
            queue_bytes_max=QUEUE_BYTES_MAX,
            space=self.engine.space,
            scrub=scrub,
            archive=limits if has_archive else None,
            retention=RetentionLimits(bytes_max=setup.local_retention_bytes),
        )
        self._checks.on_storage_started(self)
        self.apply_assignment()

    def _open_directory(self) -> None:
        """Open the directory, and register the storage at its address (rule 4)."""
        if self._cluster.is_zookeeper_unavailable:
            raise CoordinatorUnavailable("ZooKeeper is unavailable")
        self._checks.before_log_open(self)
        engine = self.open_engine(self.disk)
        registered = self._cluster.register_storage(self.replica, engine.storage_id)
        if registered != engine.storage_id:
            engine.abandon()
            raise StorageIdMismatch(
                f"{self.replica} is registered with storage ID {registered.hex()}, but its "
                f"directory has {engine.storage_id.hex()}"
            )
        self.engine = engine

    def open_engine(self, disk: SimDisk) -> StorageEngine:
        """Open the directory on a disk; raises PowerLoss and the errors of `StorageEngine.open`."""
        return StorageEngine.open(
            disk,
            STORAGE_DIRECTORY,
            replace(self._settings, trust_fsync=self.trusts_fsync),
            partition_count=1,
            new_storage_id=self.storage_id,
            reserve_bytes=self._cluster.setup.reserve_bytes,
        )

    def apply_assignment(self) -> None:
        """Serve the partition if it is assigned here or is leaving; otherwise stop (rule 4)."""
        if self.service is None or self._is_dropping:
            return
        is_served = self._cluster.partition_id in self.service.partitions
        assert self.engine is not None
        if not self.engine.is_available(self._cluster.partition_id):
            if is_served:
                self._drop_partition()
            return
        is_leaving = self.replica not in self._cluster.replicas and self._is_in_last_session()
        if is_leaving:
            self.call_after_us(LEAVING_CHECK_US, self.apply_assignment)
        if is_leaving or self.replica in self._cluster.replicas:
            if not is_served:
                self._serve_partition()
        elif is_served:
            self._drop_partition()

    def _drop_partition(self) -> None:
        self._is_dropping = True
        self._step(service.PartitionDropped(PartitionId(self._cluster.partition_id)))

    def run_exclusively(self, call: "Callable[[], None]") -> None:
        """Call a function while the partition is not served; then serve it again if it is assigned.

        If the process dies before, the function is never called.
        """
        assert self.service is not None
        assert self._exclusive_call is None
        self._exclusive_call = call
        if self._is_dropping:
            return
        if self._cluster.partition_id in self.service.partitions:
            self._drop_partition()
        else:
            self._run_exclusive_call()

    def _run_exclusive_call(self) -> None:
        call, self._exclusive_call = self._exclusive_call, None
        if call is not None:
            try:
                call()
            except PowerLoss:
                self.lose_power()
                return
        self.apply_assignment()

    def _is_in_last_session(self) -> bool:
        """Whether this storage has a log of the partition, and is a replica of the last session."""
        assert self.engine is not None
        metadata = self._cluster.coordinator.metadata
        is_held = self._cluster.partition_id in self.engine.assigned_partitions()
        return is_held and metadata is not None and self.replica in metadata.states

    def receive_assignment(self) -> None:
        """Read the assignment after its watch has fired."""
        if self._cluster.is_zookeeper_unavailable:
            self.call_after_us(100_000, self.receive_assignment)
        else:
            self.apply_assignment()

    def _serve_partition(self) -> None:
        """Open the partition's log and serve it; if that fails, try again later."""
        assert self.engine is not None
        bytes_before = self._checks.before_log_open(self)
        try:
            log = self._open_log(self.engine)
        except PowerLoss:
            self.lose_power()
            return
        except WaltzError as error:
            self.start_error = error
            self.world.note(f"{self.name} does not open the partition: {error}")
            self._checks.on_storage_open_failed(self, error)
            if self.engine.has_failed:
                self._end_process(str(error))
            else:
                self.call_after_us(REOPEN_DELAY_US, self.apply_assignment)
            return
        self.start_error = None
        log.lock_block_file.file_bytes_max = LOCK_FILE_BYTES_MAX
        assert self.service is not None
        self._checks.on_log_opened(self, log, bytes_before)
        self._step(service.PartitionOpened(log))

    def _end_process(self, reason: str) -> None:
        """End the process, as the daemon does if it cannot trust its disk; restart the process."""
        self.world.note(f"{self.name} ends: {reason}")
        self._checks.count("storage ended itself")
        self.die()
        self._cluster.network.end_links(self, is_silent=False)
        self._cluster.restart_later(self)

    def _open_log(self, engine: StorageEngine) -> PartitionLog:
        """Open the log as the daemon does: even a full disk has a reserve for opening."""
        partition_id = PartitionId(self._cluster.partition_id)
        return engine.space.call_with_reserve(partial(engine.assign, partition_id))

    def on_died(self) -> None:
        """Drop the process's state; the files keep the contents of the page cache."""
        if self.engine is not None:
            self.engine.abandon()
        self.engine = self.service = None
        self.is_uploading = False

    def kill(self, *, is_silent: bool = False) -> None:
        """Kill the process as with SIGKILL; the page cache stays."""
        if not self.is_up:
            return
        self.world.note(f"{self.name} is killed")
        self.die()
        self._cluster.network.end_links(self, is_silent=is_silent)

    def lose_power(
        self, survival: Survival | None = None, *, loses_ignored_syncs: bool = False
    ) -> None:
        """Cut the power: all or some of the unsynced data is lost."""
        if survival is None:
            survival = self.rng.choice((Survival.ANY_SECTORS, Survival.ENDS))
        if self.disk.is_lying and not loses_ignored_syncs:
            # The losses of a lying disk belong to the budget of that fault.
            survival = Survival.EVERYTHING
        self.world.note(f"{self.name} loses power")
        if self.is_up:
            # The open files are lost with this boot of the machine, so no file needs to be closed.
            self.engine = None
            self.die()
            self._cluster.network.end_links(self, is_silent=self.chance() < 0.5)
        self.disk.lose_power(survival, self.rng)
        self._cluster.restart_later(self)

    def re_seed(self) -> None:
        """Give the storage an empty disk and a new storage ID while its process is down."""
        assert not self.is_up
        self.disk.replace_contents(EMPTY_CONTENTS)
        self.snapshots.clear()
        self.start_error = None
        self.storage_id = self.rng.randbytes(16)

    def repair(self) -> None:
        """End the faults of the machine and of its disk."""
        self.is_denying = False
        disk = self.disk
        disk.capacity_bytes = disk.on_full = None
        disk.stop_lying()
        disk.cancel_plans()
        self.fsync_us = 500
        self.planned_death = None
        if self.is_up:  # If it is down, its operator must first start it with untrusted syncs.
            self.trusts_fsync = True

    def _stop_after_failed_start(self, error: WaltzError) -> None:
        self.world.note(f"{self.name} does not start: {error}")
        self.start_error = error
        self.engine = self.service = None
        self.is_up = False
        self.incarnation += 1
        self._checks.on_storage_open_failed(self, error)
        self._cluster.network.end_links(self, is_silent=False)
        self._cluster.restart_later(self)

    def scrub_now(self) -> None:
        """Start a scrub pass, as at an operator's request."""
        self._step(service.ScrubRequested())

    @property
    def is_scrubbing(self) -> bool:
        """Whether a requested scrub pass is still running."""
        states = () if self.service is None else self.service.scrub_states(self.now_ms)
        return any(state.is_requested for state in states)

    # ---- links

    def accept(self, link: SimLink) -> Handlers:
        """Accept the connection of a server or of another program."""
        return Handlers(self._on_message, self._on_connection_lost)

    def _on_message(self, link: SimLink, message: Message) -> None:
        assert isinstance(message, StorageMessage)
        if self.is_denying:
            answer = rejected_answer(message, None, PermissionDenied("replicate was revoked"))
            self._cluster.network.send(link, FAR, answer)
            return
        self._step(LaneRequest(ConnectionId(link.number), message))

    def _on_connection_lost(self, link: SimLink, reason: str) -> None:
        self._step(service.Disconnected(ConnectionId(link.number)))

    # ---- the service

    def on_timer(self) -> None:
        """Wake the service."""
        self._step(Wakeup())

    def _step(self, event: service.Event) -> None:
        machine = self.service
        assert machine is not None
        for effect in machine.step(event, self.now_ms):
            self._perform(effect)
            if self.service is not machine:
                return
        self.set_timer(machine.wake_at_ms)

    def _perform(self, effect: service_effects.Effect) -> None:
        match effect:
            case service_effects.SendStorageMessage(connection, message):
                link = self.links.get(connection)
                if link is not None:
                    self._cluster.network.send(link, FAR, message)
            case service_effects.RunWork(work):
                self._run_work(work)
            case service_effects.CloseConnection(connection, reason):
                link = self.links.get(connection)
                if link is not None:
                    self._cluster.network.close(link, FAR, reason)
                    self.call_after_us(0, lambda: self._step(service.Disconnected(connection)))
            case service_effects.EndProcess(reason):
                self._end_process(reason)
            case Report():
                self._checks.on_report(self.name, effect)
            case service_effects.PartitionIdle():
                self._is_dropping = False
                self.call_after_us(0, self._run_exclusive_call)
            case service_effects.CheckSpace(space):
                self._check_space(space)
            case _:
                self._use_archive(effect)

    def _use_archive(self, effect: service_effects.Effect) -> None:
        """Perform an effect that concerns the archive (rule 5)."""
        archive = self._cluster.archive
        match effect:
            case service_effects.UploadRange(job):
                self.is_uploading = True
                archive.upload(self, job, partial(self._on_upload_done, job))
            case service_effects.CollectFiles(collection):
                archive.collect_garbage(
                    self, collection, partial(self._on_collection_done, collection)
                )
            case service_effects.WriteExpiry(expiry):
                self.is_uploading = True
                archive.expire(self, expiry, partial(self._on_expiry_written, expiry))
            case service_effects.ReadArchive(read):
                archive.read_later(self, read, partial(self._on_archive_read, read))
            case _:
                pass  # In the simulator, the socket limits reading.

    def _on_upload_done(self, job: UploadJob, outcome: UploadOutcome) -> None:
        self.is_uploading = False
        self._step(archive_jobs.UploadDone(job, outcome))

    def _on_expiry_written(self, job: ExpiryJob, outcome: ExpiryOutcome) -> None:
        self.is_uploading = False
        self._step(archive_jobs.ExpiryWritten(job, outcome))

    def _on_collection_done(
        self, job: GarbageCollectionJob, outcome: GarbageCollectionOutcome
    ) -> None:
        self._step(archive_jobs.FilesCollected(job, outcome))

    def on_archive_progressed(self) -> None:
        """Report to the service that a request of the running upload is done."""
        self._step(archive_jobs.ArchiveProgressed())

    def _on_archive_read(self, read: ArchiveQuery, outcome: WorkOutcome) -> None:
        self._step(service.ArchiveReadDone(read, outcome))

    def _run_work(self, work: Work) -> None:
        """Run a piece of work, and answer it later (rule 2)."""
        if self._kill_if_planned(work, is_after=False):
            return
        before = self._checks.before_work(self, work)
        try:
            result = work.run()
        except PowerLoss:
            self._checks.count("power lost at a step of the disk")
            self.lose_power()
            return
        if self.disk.on_full is not None and any(
            isinstance(outcome, NoSpace) for outcome in result.outcomes
        ):
            self.disk.on_full()  # A storage that watches its space rejects a write before it fails.
        self._checks.on_work_done(self, work, result, before)
        if self._kill_if_planned(work, is_after=True):
            return
        has_synced = result.sync_s is not None or not result.read_count
        busy_us = self.fsync_us if has_synced else 30
        self.call_after_us(
            int(busy_us * (0.5 + self.chance())) + 20, partial(self._on_work_done, work, result)
        )

    def _check_space(self, space: DiskSpace) -> None:
        try:
            space.recheck()
        except PowerLoss:
            self.lose_power()
            return
        self.call_after_us(self.fsync_us, lambda: self._step(service.SpaceChecked()))

    def _kill_if_planned(self, work: Work, *, is_after: bool) -> bool:
        """Kill this storage if a fault is planned at this work; return whether it was killed."""
        if self.planned_death is None or not work.requests:
            return False
        point, is_wanted_after, on_death = self.planned_death
        if type(work.requests[0].message).__name__ != point or is_after != is_wanted_after:
            return False
        self.planned_death = None
        on_death()
        self.kill()
        self._cluster.restart_later(self)
        return True

    def _on_work_done(self, work: Work, result: WorkResult) -> None:
        self._step(service.WorkDone(work, result))
