"""Work on a log for the archive: read ranges to archive, and remove old segments.

The work is divided into short pieces, so that other work of the partition runs between them.

Rules (docs/decisions/047):
    1. A read returns only complete batches, from the first ID on, and only if the log has the
       expected chain hash before them.
    2. A range with reconstructed batches or damage is an error; another replica may have the range
       intact (AR 1).
    3. A piece removes one segment at most. `PartitionLog.remove_oldest` checks whether the removal
       is allowed.
"""

from typing import Final, NamedTuple

from waltz_core.archive.manifest_jobs import BatchRun
from waltz_core.errors import BadRequest
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECONSTRUCTED,
    Chain,
    TransactionId,
)
from waltz_core.storage.files.format import AckedMarker
from waltz_core.storage.log.partition_log import PartitionLog

# Half of the bytes that a reader may request at once. Finding the batches of a piece needs about 1
# ms of CPU time.
PIECE_BYTES_MAX: Final = 4 * 1024 * 1024


class ArchivePiece(NamedTuple):
    """A request to read the batches of first..last for the archive.

    Unless `chain_before` is None, the log must have this chain hash before `first`. A small range
    is not read before it is old: if the complete range has at most `bytes_min` bytes, its oldest
    batch must be at least `age_ms_min` old. After the first piece of a range, both limits are 0.
    """

    first: TransactionId
    last: TransactionId
    chain_before: Chain | None
    bytes_min: int = 0
    age_ms_min: int = 0


class UnarchivedAmount(NamedTuple):
    """The amount of records that are not archived yet, from the first ID of an attempt to `last`.

    `age_ms` is the age of the oldest batch, -1 if it has no commit stamp.
    """

    last: TransactionId = BEFORE_FIRST
    byte_count: int = 0
    age_ms: int = -1


UNARCHIVED_UNKNOWN: Final = UnarchivedAmount()


class ArchiveRead(NamedTuple):
    """The result of a piece: complete batches in `run`, or None if there is nothing to archive yet.

    `is_last` states that the range ends with these batches. `chain_before` is the log's chain hash
    before them. `unarchived` is known only in the first piece of an attempt.
    """

    run: BatchRun | None = None
    is_last: bool = True
    error: str = ""
    chain_before: Chain = GENESIS_CHAIN
    unarchived: UnarchivedAmount = UNARCHIVED_UNKNOWN


class RetentionPiece(NamedTuple):
    """A request to measure a log.

    If `removes_oldest` is set and `archived` permits it, the oldest segment is removed first.
    """

    archived: AckedMarker | None
    removes_oldest: bool = False


class LogSize(NamedTuple):
    """The size of a log's segments, and the state of the oldest segment.

    `oldest_age_ms` is the age of the newest batch in the oldest segment, 0 if this batch has no
    commit stamp. `is_removable` states that the archive contains this segment. `has_removed` states
    that the piece removed a segment.
    """

    size_bytes: int
    oldest_age_ms: int = 0
    is_removable: bool = False
    has_removed: bool = False


def read_for_archive(log: PartitionLog, piece: ArchivePiece) -> ArchiveRead:
    """Read the next batches of a range for the archive.

    Raises:
        BeforeLogStart, BadRequest, ChecksumMismatch: as for `LogReader.read_range`, and by rules 1
            and 2.
    """
    log.check_files()
    last = min(piece.last, log.synced_max)
    if last < piece.first:
        return ArchiveRead()
    read = log.read_range(piece.first, last, PIECE_BYTES_MAX, whole_batches=True)
    where = f"partition {log.partition_id}: batches from transaction {piece.first} on"
    expected = read.chain_before if piece.chain_before is None else piece.chain_before
    if read.chain_before != expected:
        raise BadRequest(
            f"{where}: expected chain hash {expected.hex()} before them, found "
            f"{read.chain_before.hex()}"
        )
    if any(entry.session_id == RECONSTRUCTED for entry in read.entries):
        raise BadRequest(
            f"{where}: cannot be archived from this replica, because their original session "
            "and chain hash are lost: the entries of the batches were damaged and "
            "reconstructed"
        )
    end, stamp_ms = read.entries[-1].last, read.entries[0].stamp_ms
    age_ms, unarchived = log.clock_ms() - stamp_ms, UNARCHIVED_UNKNOWN
    if piece.bytes_min:
        byte_count = log.reader.byte_count(piece.first, last)
        unarchived = UnarchivedAmount(last, byte_count, max(0, age_ms) if stamp_ms else -1)
        if age_ms < piece.age_ms_min and byte_count <= piece.bytes_min:
            return ArchiveRead(unarchived=unarchived)
    if end > last:
        return ArchiveRead(unarchived=unarchived)
    run = BatchRun(read.records, read.lengths, read.entries)
    return ArchiveRead(
        run, is_last=end == last, chain_before=read.chain_before, unarchived=unarchived
    )


def retain(log: PartitionLog, piece: RetentionPiece) -> LogSize:
    """Remove the oldest segment if the piece requests this and rule 3 permits it.

    Return the size of the log afterwards.

    Raises:
        BadRequest: the log has another chain hash at the archived mark.
        DiskFailed: a write failed.
    """
    log.check_files()
    archived = piece.archived
    has_removed = piece.removes_oldest and archived is not None and log.remove_oldest(archived)
    stamp_ms = log.oldest_stamp_ms
    return LogSize(
        log.size_bytes,
        log.clock_ms() - stamp_ms if stamp_ms else 0,
        is_removable=archived is not None and log.removable_end(archived) is not None,
        has_removed=has_removed,
    )
