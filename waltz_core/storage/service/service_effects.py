"""The effects of a storage's state machine (`service.py`).

The daemon and the simulator execute them in different ways. This file defines the meaning of each
effect; rules refer to `service.py`.
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
    """Send a message on a connection; do nothing if the connection is closed."""

    connection: ConnectionId
    message: StorageMessage


@value(frozen=True, slots=True)
class CloseConnection:
    """Send the pending answers, and close the connection."""

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
    """Call `work.run()`, and return its result as `WorkDone`; one call at a time per partition."""

    work: Work


@value(frozen=True, slots=True)
class PartitionIdle:
    """A dropped partition has no running work, so its log may be closed."""

    log: PartitionLog


@value(frozen=True, slots=True)
class DropPartition:
    """Drop a partition whose files were deleted or replaced, and do not open it again."""

    log: PartitionLog
    error: WaltzError


@value(frozen=True, slots=True)
class CheckSpace:
    """Call `space.recheck()`, which blocks, and send `SpaceChecked` afterwards (rule 9)."""

    space: DiskSpace


@value(frozen=True, slots=True)
class UploadRange:
    """Call `archive.upload` with the job, a long blocking call; send `UploadDone` afterwards."""

    job: UploadJob


@value(frozen=True, slots=True)
class CollectFiles:
    """Call `archive.collect_garbage`, a long blocking call; send `FilesCollected` afterwards.

    It runs on the thread of `UploadRange`. While either makes progress, send `ArchiveProgressed`.
    """

    job: GarbageCollectionJob


@value(frozen=True, slots=True)
class WriteExpiry:
    """Call `archive.expire` with the job, which blocks; send `ExpiryWritten` afterwards.

    It runs on the thread of `UploadRange`, like `CollectFiles`.
    """

    job: ExpiryJob


@value(frozen=True, slots=True)
class ReadArchive:
    """Answer a request from the archive, which blocks; send `ArchiveReadDone` afterwards."""

    read: ArchiveQuery


@value(frozen=True, slots=True)
class EndProcess:
    """Stop the process, because the disk cannot be trusted (rule 6)."""

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
