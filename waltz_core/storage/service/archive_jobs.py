"""Ranges that owners have archived by this storage: one at a time, read in pieces, then uploaded.

Its owner, `service.py`, runs the pieces in the partition's lane and starts the uploads.

Rules (docs/decisions/047):
    1. One job is read or uploaded at a time, and at most one waits for each partition.
    2. A job belongs to a session and its connection. After `forget` its result is not reported; an
       upload that has begun may end, and its files are garbage.
    3. While an upload runs, no other job starts, though its own was forgotten: this bounds memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from waltz_core.archive.upload_job import BatchRun, NewManifest, UploadJob, UploadOutcome
from waltz_core.errors import BadRequest, WaltzError
from waltz_core.records.record import Chain, PartitionId, SessionId, TransactionId
from waltz_core.storage.log.archive_pieces import ArchivePiece, ArchiveRead
from waltz_core.storage.service.work import ConnectionId
from waltz_core.wire.messages import ArchiveRange, RangeArchived

ERROR_CHARACTERS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """When a range is archived: with `object_bytes` of records, or at this age."""

    object_bytes: int
    age_ms: int


@dataclass(slots=True)
class _Job:
    """A request, and the batches that were read so far."""

    connection: ConnectionId
    nonce: bytes
    message: ArchiveRange
    runs: list[BatchRun] = field(default_factory=list)
    piece: ArchivePiece | None = None  # that is being read

    @property
    def partition_id(self) -> PartitionId:
        return PartitionId(self.message.partition_id)

    @property
    def read_bytes(self) -> int:
        return sum(len(each.records) for each in self.runs)


@dataclass(frozen=True, slots=True)
class ArchiveNotice:
    """The result of a job, for the connection that has requested it."""

    connection: ConnectionId
    message: RangeArchived


class ArchiveJobs:
    """See the module's rules. Without limits this storage has no archive."""

    def __init__(self, limits: ArchiveLimits | None) -> None:
        self._limits = limits
        self._waiting: dict[PartitionId, _Job] = {}
        self._reading: _Job | None = None
        self._uploading: UploadJob | None = None
        self._uploading_for: _Job | None = None  # None if it was forgotten

    @property
    def has_archive(self) -> bool:
        """Whether this storage has an archive."""
        return self._limits is not None

    def add(self, connection: ConnectionId, nonce: bytes, message: ArchiveRange) -> None:
        """Take a request; raises BadRequest if it cannot be carried out (rule 1)."""
        if self._limits is None:
            raise BadRequest("this storage has no archive configured")
        if not 0 <= message.first <= message.last:
            raise BadRequest(
                f"partition {message.partition_id}: expected a range to archive, found "
                f"{message.first}..{message.last}"
            )
        job = _Job(connection, nonce, message)
        if any(each.partition_id == job.partition_id for each in self._jobs()):
            raise BadRequest(
                f"partition {message.partition_id}: expected one range to archive at a time"
            )
        self._waiting[job.partition_id] = job

    def _jobs(self) -> Iterator[_Job]:
        yield from self._waiting.values()
        yield from filter(None, (self._reading, self._uploading_for))

    def next_piece(self) -> tuple[PartitionId, ArchivePiece] | None:
        """Return the piece to read now; None if one is being read, or nothing waits."""
        if self._uploading is not None or self._limits is None:
            return None
        job = self._reading
        if job is None and self._waiting:
            job = self._reading = self._waiting.pop(next(iter(self._waiting)))
        if job is None or job.piece is not None:
            return None
        message = job.message
        if job.runs:
            end = job.runs[-1].batches[-1]
            first, chain = TransactionId(end.last + 1), end.chain
            job.piece = ArchivePiece(first, TransactionId(message.last), chain)
        else:
            job.piece = ArchivePiece(
                TransactionId(message.first),
                TransactionId(message.last),
                Chain(message.chain_before),
                self._limits.object_bytes,
                self._limits.age_ms,
            )
        return job.partition_id, job.piece

    def was_read(self, piece: ArchivePiece, read: ArchiveRead) -> UploadJob | ArchiveNotice | None:
        """Take the result of a piece; return what follows, or None if more must be read."""
        job = self._reading
        if job is None or job.piece is not piece:
            return None  # Its job was forgotten.
        assert self._limits is not None
        job.piece = None
        if read.run is not None:
            job.runs.append(read.run)
            if not read.is_last and job.read_bytes < self._limits.object_bytes:
                return None
        self._reading = None
        if read.error or not job.runs:
            return _notice(job, _nothing(job), read.error)
        self._uploading, self._uploading_for = _upload_job(job), job
        return self._uploading

    def uploaded(self, upload: UploadJob, outcome: UploadOutcome) -> ArchiveNotice | None:
        """Take the result of an upload; None if its job was forgotten (rule 2)."""
        assert upload is self._uploading, "rule 1"
        job, self._uploading, self._uploading_for = self._uploading_for, None, None
        if job is None:
            return None
        if isinstance(outcome, WaltzError):
            return _notice(job, _nothing(job), str(outcome))
        return _notice(job, outcome)

    def forget(self, partition_id: PartitionId) -> None:
        """The session, its connection, or the partition has ended (rule 2)."""
        self._waiting.pop(partition_id, None)
        if self._reading is not None and self._reading.partition_id == partition_id:
            self._reading = None
        if self._uploading_for is not None and self._uploading_for.partition_id == partition_id:
            self._uploading_for = None


def _upload_job(job: _Job) -> UploadJob:
    message = job.message
    return UploadJob(
        job.partition_id,
        SessionId(message.session_id),
        job.nonce,
        message.attempt,
        TransactionId(message.first),
        Chain(message.chain_before),
        message.manifest,
        message.manifest_crc,
        tuple(job.runs),
    )


def _nothing(job: _Job) -> NewManifest:
    """Return the result of a job that has archived nothing."""
    before = TransactionId(job.message.first - 1)
    return NewManifest(before, Chain(job.message.chain_before), 0, "", 0)


def _notice(job: _Job, made: NewManifest, error: str = "") -> ArchiveNotice:
    message = job.message
    notice = RangeArchived(
        message.session_id,
        0,
        message.partition_id,
        message.attempt,
        made.last,
        made.chain,
        made.stamp_ms,
        made.name,
        made.file_crc,
        error[:ERROR_CHARACTERS_MAX],
    )
    return ArchiveNotice(job.connection, notice)
