"""The effects of a storage's state machine (`service.py`).

The daemon and the simulator carry them out, each in its own way; this file defines what each
means.
"""

from typing import TypeAlias

from waltz_core.archive.garbage_collection import GarbageCollectionJob
from waltz_core.archive.manifest_jobs import ExpiryJob, UploadJob
from waltz_core.errors import WaltzError
from waltz_core.machine import Report
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service.archive_reads import ArchiveQuery
from waltz_core.storage.service.work import ConnectionId, Work
from waltz_core.values import value
from waltz_core.wire.messages import StorageMessage


@value(frozen=True, slots=True)
class SendStorageMessage:
    """Send a message on a connection; ignored if the connection is closed."""

    connection: ConnectionId
    message: StorageMessage


@value(frozen=True, slots=True)
class CloseConnection:
    """Send the answers so far, then close."""

    connection: ConnectionId
    reason: str


@value(frozen=True, slots=True)
class PauseReading:
    """Stop reading a connection (rule 7)."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class ResumeReading:
    """Resume reading a connection."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class RunWork:
    """Call `work.run()` and return its result as `WorkDone`; one at a time per partition."""

    work: Work


@value(frozen=True, slots=True)
class PartitionIdle:
    """A dropped partition has no running work: its log may be closed."""

    log: PartitionLog


@value(frozen=True, slots=True)
class DropPartition:
    """The files of a partition were deleted or replaced: drop it, and do not open it again."""

    log: PartitionLog
    why: WaltzError


@value(frozen=True, slots=True)
class CheckSpace:
    """Call `space.recheck()`, which blocks, then send `SpaceChecked` (rule 9)."""

    space: DiskSpace


@value(frozen=True, slots=True)
class UploadRange:
    """Call `archive.upload` with the job, which blocks for long, then send `Uploaded`."""

    job: UploadJob


@value(frozen=True, slots=True)
class CollectFiles:
    """Call `archive.collect_garbage`, which blocks for long, then send `FilesCollected`.

    It has the thread of `UploadRange`. While either makes progress, send `ArchiveProgressed`.
    """

    job: GarbageCollectionJob


@value(frozen=True, slots=True)
class WriteExpiry:
    """Call `archive.expire` with the job, which blocks, then send `ExpiryWritten`.

    Like `CollectFiles`.
    """

    job: ExpiryJob


@value(frozen=True, slots=True)
class ReadArchive:
    """Call `archive.read`, which blocks, then send `ArchiveAnswered`."""

    read: ArchiveQuery


@value(frozen=True, slots=True)
class EndProcess:
    """End the process: the disk cannot be trusted (rule 6)."""

    reason: str


ArchiveEffect: TypeAlias = UploadRange | CollectFiles | WriteExpiry | ReadArchive
Effect: TypeAlias = (
    SendStorageMessage
    | CloseConnection
    | PauseReading
    | ResumeReading
    | RunWork
    | PartitionIdle
    | DropPartition
    | CheckSpace
    | UploadRange
    | CollectFiles
    | WriteExpiry
    | ReadArchive
    | EndProcess
    | Report
)
