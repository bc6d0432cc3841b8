"""Work on the archive that owners request: uploads, expiry and collection of garbage.

To archive a range, the storage reads it in pieces, and uploads it when all pieces are read. The
replacement of an object does the same with the complete range of the old object. `service.py` runs
the pieces in the partition's lane. Changes of the archive block, so they run on a separate thread.

Rules (docs/decisions/053):
    1. One job runs at a time, and at most one waits for each partition. A new request for a
       partition replaces an earlier request, because the owner has abandoned the earlier request.
    2. A job belongs to a session and its connection. After `forget`, its result is not reported. A
       change that has begun may still complete; then the files that it has written are garbage.
    3. While a job runs, no other job starts, even if the running job was forgotten: this limits
       memory. If the store hangs, the thread of the job cannot be stopped, but `on_wakeup` reports
       the stalled job.
    4. While the work continues, the owners of all jobs are notified of progress, at most every
       `PROGRESS_INTERVAL_MS`. If an owner receives no progress for a long time, it abandons its
       attempt.
    5. If the rate is limited, reading pauses after each piece. A pause counts as progress.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

from waltz_core.archive.garbage_collection import (
    CollectedGarbage,
    GarbageCollectionJob,
    GarbageCollectionOutcome,
)
from waltz_core.archive.manifest import RecordedManifest
from waltz_core.archive.manifest_jobs import (
    BatchRun,
    ExpiryJob,
    ExpiryOutcome,
    NewManifest,
    ReplacedObject,
    UploadJob,
    UploadOutcome,
)
from waltz_core.errors import BadRequest, WaltzError
from waltz_core.machine import Report
from waltz_core.records.record import GENESIS_CHAIN, Chain, PartitionId, SessionId, TransactionId
from waltz_core.storage.log.archive_pieces import (
    UNARCHIVED_UNKNOWN,
    ArchivePiece,
    ArchiveRead,
    UnarchivedAmount,
)
from waltz_core.storage.service.service_effects import (
    CollectFiles,
    Effect,
    SendStorageMessage,
    UploadRange,
    WriteExpiry,
)
from waltz_core.storage.service.work import ConnectionId
from waltz_core.values import value
from waltz_core.wire.messages import (
    ArchiveProgress,
    ArchiveRange,
    CollectGarbage,
    ExpireObjects,
    GarbageCollected,
    ObjectsExpired,
    RangeArchived,
    ReplaceObject,
)

ERROR_CHARACTERS_MAX: Final = 1_000
PROGRESS_INTERVAL_MS: Final = 10_000
STALLED_MS: Final = 60_000
# The maximum size of an object to replace: above the maximum of `archive_object_bytes`. A limit is
# necessary because a client names the object.
REPLACED_BYTES_MAX: Final = (1 << 30) + (1 << 26)
RangeToWrite: TypeAlias = ArchiveRange | ReplaceObject
ArchiveRequest: TypeAlias = RangeToWrite | CollectGarbage | ExpireObjects
_ArchiveTask: TypeAlias = UploadJob | GarbageCollectionJob | ExpiryJob


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """The limits at which a range is archived: bytes of records, or age of the oldest batch.

    `bytes_per_s` limits the reads of logs (rule 5); 0 means no limit.
    """

    object_bytes: int
    age_ms: int
    bytes_per_s: int = 0


@dataclass(slots=True)
class _ArchiveJob:
    """A request of an owner, and the batches that were already read for this request."""

    connection: ConnectionId
    nonce: bytes
    message: ArchiveRequest
    runs: list[BatchRun] = field(default_factory=list)
    chain_before: Chain = GENESIS_CHAIN  # before the first batch
    piece: ArchivePiece | None = None  # the piece that is being read
    unarchived: UnarchivedAmount = UNARCHIVED_UNKNOWN

    @property
    def partition_id(self) -> PartitionId:
        return PartitionId(self.message.partition_id)

    @property
    def read_bytes(self) -> int:
        return sum(len(run.records) for run in self.runs)


@value(frozen=True, slots=True)
class UploadDone:
    """The upload of an `UploadRange` effect is done."""

    job: UploadJob
    outcome: UploadOutcome


@value(frozen=True, slots=True)
class FilesCollected:
    """The collection of a `CollectFiles` effect is done."""

    job: GarbageCollectionJob
    outcome: GarbageCollectionOutcome


@value(frozen=True, slots=True)
class ExpiryWritten:
    """The expiry of a `WriteExpiry` effect is done."""

    job: ExpiryJob
    outcome: ExpiryOutcome


@value(frozen=True, slots=True)
class ArchiveProgressed:
    """The running `UploadRange`, `CollectFiles` or `WriteExpiry` has made progress."""


ArchiveEvent: TypeAlias = UploadDone | FilesCollected | ExpiryWritten | ArchiveProgressed


class ArchiveJobs:
    """Schedules the archive jobs of a storage; if `limits` is None, it has no archive."""

    def __init__(self, limits: ArchiveLimits | None) -> None:
        self._limits = limits
        self._waiting: dict[PartitionId, _ArchiveJob] = {}
        self._reading: _ArchiveJob | None = None
        self._running: _ArchiveTask | None = None
        self._running_job: _ArchiveJob | None = None  # None if the running job was forgotten
        self._read_at_ms = 0  # when the next piece may be read (rule 5)
        self._progress_ms = 0  # when the running or reading job last progressed
        self._notified_ms: int | None = None  # None before the first progress of these jobs
        self._is_stalled = False
        self.running_since_ms: int | None = None

    @property
    def has_archive(self) -> bool:
        """Whether this storage has an archive."""
        return self._limits is not None

    @property
    def wake_at_ms(self) -> int | None:
        """When to read the next piece, report progress in a pause, or report a stalled job."""
        if self._is_pausing:
            return min(self._read_at_ms, self._progress_ms + PROGRESS_INTERVAL_MS)
        is_watched = self._running is not None and not self._is_stalled
        return self._progress_ms + STALLED_MS if is_watched else None

    @property
    def _is_pausing(self) -> bool:
        return self._reading is not None and self._reading.piece is None

    def add(self, connection: ConnectionId, nonce: bytes, message: ArchiveRequest) -> None:
        """Queue a request; raises BadRequest if it cannot be executed (rule 1)."""
        if self._limits is None:
            raise BadRequest("this storage cannot archive, because it has no setting `archive_url`")
        if isinstance(message, RangeToWrite) and not 0 <= message.first <= message.last:
            raise BadRequest(
                f"partition {message.partition_id}: expected a range of transactions to "
                f"archive, found {message.first}..{message.last}"
            )
        job = _ArchiveJob(connection, nonce, message)
        self.forget(job.partition_id)
        self._waiting[job.partition_id] = job

    def _jobs(self) -> Iterator[_ArchiveJob]:
        yield from self._waiting.values()
        yield from filter(None, (self._reading, self._running_job))

    def next_step(
        self, now_ms: int
    ) -> tuple[PartitionId, ArchivePiece] | CollectFiles | WriteExpiry | None:
        """Return the piece to read now or the change to start now; None if there is neither."""
        if self._running is not None or self._limits is None:
            return None
        job = self._reading
        if job is None and self._waiting:
            job = self._waiting.pop(next(iter(self._waiting)))
            if isinstance(job.message, CollectGarbage):
                collection = _collection_job(job, job.message)
                self._run(collection, job, now_ms)
                return CollectFiles(collection)
            if isinstance(job.message, ExpireObjects):
                expiry = _expiry_job(job, job.message)
                self._run(expiry, job, now_ms)
                return WriteExpiry(expiry)
            self._reading = job
        if job is None or job.piece is not None or now_ms < self._read_at_ms:
            return None
        job.piece = self._next_piece(job, self._limits)
        return job.partition_id, job.piece

    def _next_piece(self, job: _ArchiveJob, limits: ArchiveLimits) -> ArchivePiece:
        message = job.message
        if job.runs:
            end = job.runs[-1].batches[-1]
            first, chain = TransactionId(end.last + 1), end.chain
            return ArchivePiece(first, TransactionId(message.last), chain)
        assert isinstance(message, RangeToWrite)
        if isinstance(message, ReplaceObject):
            # The chain hash before the object need not be checked here. The upload compares the
            # chain hash at the end of the object, which depends on the chain hash before the
            # object.
            return ArchivePiece(TransactionId(message.first), TransactionId(message.last), None)
        return ArchivePiece(
            TransactionId(message.first),
            TransactionId(message.last),
            Chain(message.chain_before),
            limits.object_bytes,
            limits.age_ms,
        )

    def _run(self, run: _ArchiveTask, job: _ArchiveJob, now_ms: int) -> None:
        self._running, self._running_job = run, job
        self._progress_ms = self.running_since_ms = now_ms
        self._is_stalled = False

    def on_piece_read(self, piece: ArchivePiece, read: ArchiveRead, now_ms: int) -> list[Effect]:
        """Process the result of a piece; return the effects, none if more must be read."""
        job = self._reading
        if job is None or job.piece is not piece:
            return []  # Its job was forgotten.
        assert self._limits is not None
        message, error = job.message, read.error
        assert isinstance(message, RangeToWrite)
        job.piece = None
        if not job.runs:
            job.unarchived = read.unarchived
        if read.run is not None:
            if not job.runs:
                job.chain_before = read.chain_before
            job.runs.append(read.run)
            if self._limits.bytes_per_s:
                pause_ms = len(read.run.records) * 1_000 // self._limits.bytes_per_s
                self._read_at_ms = now_ms + pause_ms
            is_replacement = isinstance(message, ReplaceObject)
            bytes_max = REPLACED_BYTES_MAX if is_replacement else self._limits.object_bytes
            if not read.is_last and job.read_bytes < bytes_max:
                return self.on_work_progressed(now_ms)
        self._reading = None
        if isinstance(message, ReplaceObject) and not error:
            error = _incomplete_error(job, message)
        if error or not job.runs:
            return _range_result(job, message, None, error)
        upload = _upload_job(job, message)
        self._run(upload, job, now_ms)
        return [UploadRange(upload)]

    def on_job_done(self, event: ArchiveEvent, now_ms: int) -> list[Effect]:
        """Process the result or the progress of the running job; return the effects."""
        match event:
            case UploadDone(upload, upload_outcome):
                return self._on_upload_done(upload, upload_outcome, now_ms)
            case FilesCollected(collection, collection_outcome):
                return self._on_collection_done(collection, collection_outcome, now_ms)
            case ExpiryWritten(expiry, expiry_outcome):
                return self._on_expiry_done(expiry, expiry_outcome, now_ms)
            case ArchiveProgressed():
                return self.on_work_progressed(now_ms)
            case _:
                assert_never(event)

    def _on_upload_done(
        self, upload: UploadJob, outcome: UploadOutcome, now_ms: int
    ) -> list[Effect]:
        """Process the result of an upload (rule 2)."""
        job = self._end_job(upload)
        effects = self.on_work_progressed(now_ms)
        if job is None:
            return effects
        assert isinstance(job.message, RangeToWrite)
        if isinstance(outcome, WaltzError):
            return effects + _range_result(job, job.message, None, str(outcome))
        return effects + _range_result(job, job.message, outcome)

    def _on_collection_done(
        self, collection: GarbageCollectionJob, outcome: GarbageCollectionOutcome, now_ms: int
    ) -> list[Effect]:
        """Process the result of a collection (rule 2)."""
        job = self._end_job(collection)
        effects = self.on_work_progressed(now_ms)
        partition_field = ("partition", collection.partition_id)
        if isinstance(outcome, CollectedGarbage) and (outcome.file_count or outcome.unknown_count):
            fields = (
                partition_field,
                ("files", outcome.file_count),
                ("bytes", outcome.byte_count),
                ("unknown_files", outcome.unknown_count),
            )
            effects.append(Report("storage.garbage_collected", fields))
        if job is None:
            return effects
        error = ""
        if isinstance(outcome, WaltzError):
            error = str(outcome)[:ERROR_CHARACTERS_MAX]
            effects.append(
                Report("storage.garbage_collection_failed", (partition_field, ("error", error)))
            )
        has_more = isinstance(outcome, CollectedGarbage) and outcome.has_more
        notice = GarbageCollected(*_notification_prefix(job), job.message.attempt, has_more, error)
        return [*effects, SendStorageMessage(job.connection, notice)]

    def _on_expiry_done(
        self, expiry: ExpiryJob, outcome: ExpiryOutcome, now_ms: int
    ) -> list[Effect]:
        """Process the result of an expiry (rule 2)."""
        job = self._end_job(expiry)
        effects = self.on_work_progressed(now_ms)
        if job is None:
            return effects
        prefix = (*_notification_prefix(job), job.message.attempt)
        if isinstance(outcome, WaltzError):
            error = str(outcome)[:ERROR_CHARACTERS_MAX]
            fields = (("partition", expiry.partition_id), ("error", error))
            effects.append(Report("storage.expiry_failed", fields))
            notice = ObjectsExpired(*prefix, 0, "", 0, error)
        else:
            notice = ObjectsExpired(*prefix, outcome.first, outcome.name, outcome.file_crc, "")
        return [*effects, SendStorageMessage(job.connection, notice)]

    def _end_job(self, run: _ArchiveTask) -> _ArchiveJob | None:
        assert run is self._running, "rule 1"
        job, self._running, self._running_job = self._running_job, None, None
        self.running_since_ms = None
        return job

    def on_work_progressed(self, now_ms: int) -> list[Effect]:
        """Note that the work continues, and notify the owners of all jobs (rule 4)."""
        self._progress_ms, self._is_stalled = now_ms, False
        jobs = list(self._jobs())
        if not jobs:
            self._notified_ms = None
            return []
        if self._notified_ms is None:
            self._notified_ms = now_ms
        if now_ms - self._notified_ms < PROGRESS_INTERVAL_MS:
            return []
        self._notified_ms = now_ms
        return [
            SendStorageMessage(
                job.connection, ArchiveProgress(*_notification_prefix(job), job.message.attempt)
            )
            for job in jobs
        ]

    def on_wakeup(self, now_ms: int) -> list[Effect]:
        """Report a job that has just become stalled (rule 3), or progress in a pause (rule 5)."""
        if self._is_pausing:
            return self.on_work_progressed(now_ms)
        wake_at_ms = self.wake_at_ms
        if wake_at_ms is None or now_ms < wake_at_ms:
            return []
        assert self._running is not None
        self._is_stalled = True
        fields = (("partition", self._running.partition_id), ("ms", now_ms - self._progress_ms))
        return [Report("storage.archive_stalled", fields)]

    def forget(self, partition_id: PartitionId) -> None:
        """Forget the jobs of a partition whose session, connection or log has ended (rule 2)."""
        self._waiting.pop(partition_id, None)
        if self._reading is not None and self._reading.partition_id == partition_id:
            self._reading = None
        if self._running_job is not None and self._running_job.partition_id == partition_id:
            self._running_job = None


def _incomplete_error(job: _ArchiveJob, message: ReplaceObject) -> str:
    """Return an error text if batches of the object to replace are missing; "" otherwise."""
    last = job.runs[-1].batches[-1].last if job.runs else message.first - 1
    if last == message.last:
        return ""
    return (
        f"partition {message.partition_id}: expected whole batches with transactions "
        f"{message.first}..{message.last}, found batches up to {last}"
    )


def _upload_job(job: _ArchiveJob, message: RangeToWrite) -> UploadJob:
    replaced_object = None
    if isinstance(message, ReplaceObject):
        archived = TransactionId(message.archived)
        replaced_object = ReplacedObject(message.object, archived, Chain(message.chain))
    return UploadJob(
        job.partition_id,
        SessionId(message.session_id),
        job.nonce,
        message.attempt,
        TransactionId(message.first),
        job.chain_before,
        message.manifest,
        message.manifest_crc,
        tuple(job.runs),
        replaced_object,
    )


def _collection_job(job: _ArchiveJob, message: CollectGarbage) -> GarbageCollectionJob:
    recorded = _recorded_manifest(job, message)
    return GarbageCollectionJob(SessionId(message.session_id), job.nonce, message.attempt, recorded)


def _expiry_job(job: _ArchiveJob, message: ExpireObjects) -> ExpiryJob:
    return ExpiryJob(
        SessionId(message.session_id),
        job.nonce,
        message.attempt,
        _recorded_manifest(job, message),
        TransactionId(message.before),
        message.before_ms,
        message.retention_ms,
    )


def _recorded_manifest(
    job: _ArchiveJob, message: CollectGarbage | ExpireObjects
) -> RecordedManifest:
    return RecordedManifest(
        job.partition_id,
        TransactionId(message.last),
        Chain(message.chain),
        message.manifest,
        message.manifest_crc,
    )


def _range_result(
    job: _ArchiveJob, message: RangeToWrite, new_manifest: NewManifest | None, error: str = ""
) -> list[Effect]:
    """Return the effects that report a result: the notification of the owner, and reports.

    If `new_manifest` is None, there is no new manifest.
    """
    effects: list[Effect] = []
    partition_field = ("partition", message.partition_id)
    failure = (partition_field, ("error", error[:ERROR_CHARACTERS_MAX]))
    if error and isinstance(message, ReplaceObject):
        effects.append(Report("storage.object_replacement_failed", failure))
    elif error:
        effects.append(Report("storage.archive_failed", failure))
    if new_manifest is None:
        new_manifest = NewManifest(*_recorded_end(message), 0, "", 0)
    elif isinstance(message, ReplaceObject):
        if new_manifest.name:
            effects.append(
                Report("storage.object_replaced", (partition_field, ("object", message.object)))
            )
    else:
        effects.append(
            Report("storage.range_archived", (partition_field, ("last", new_manifest.last)))
        )
    notice = RangeArchived(
        *_notification_prefix(job),
        message.attempt,
        new_manifest.last,
        new_manifest.chain,
        new_manifest.stamp_ms,
        new_manifest.name,
        new_manifest.file_crc,
        error[:ERROR_CHARACTERS_MAX],
        *job.unarchived,
    )
    return [SendStorageMessage(job.connection, notice), *effects]


def _recorded_end(message: RangeToWrite) -> tuple[TransactionId, Chain]:
    """Return the last ID and chain hash of the manifest that the owner has recorded."""
    if isinstance(message, ReplaceObject):
        return TransactionId(message.archived), Chain(message.chain)
    return TransactionId(message.first - 1), Chain(message.chain_before)


def _notification_prefix(job: _ArchiveJob) -> tuple[int, int, int]:
    """Return the first fields of a notification about a job."""
    return job.message.session_id, 0, job.message.partition_id
