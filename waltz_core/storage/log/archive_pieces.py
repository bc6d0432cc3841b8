"""Work on a log for the archive: reads of ranges to archive, and removal of old segments.

Each piece is short, so that other work of the partition runs between them.

Rules (docs/decisions/047):
    1. A read returns only whole batches, from the first ID on, with the expected chain before them.
    2. A range with reconstructed batches or damage is an error; another replica may have it (AR 1).
    3. A piece removes one segment at most. `PartitionLog.remove_oldest` checks whether it may.
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

# Half of what a reader may request at once. Finding the batches of a piece takes about 1 ms of CPU.
PIECE_BYTES_MAX: Final = 4 * 1024 * 1024


class ArchivePiece(NamedTuple):
    """Read batches of first..last. The log must have `chain_before` before them, unless None.

    Without `bytes_min` bytes in the whole range, nothing is read unless the oldest batch is
    `age_ms_min` old; 0 for a range that has begun.
    """

    first: TransactionId
    last: TransactionId
    chain_before: Chain | None
    bytes_min: int = 0
    age_ms_min: int = 0


class Unarchived(NamedTuple):
    """The records from the first one of an attempt to `last`, before it.

    `age_ms` is that of the oldest batch, -1 if it has no commit stamp.
    """

    last: TransactionId = BEFORE_FIRST
    byte_count: int = 0
    age_ms: int = -1


UNARCHIVED_UNKNOWN: Final = Unarchived()


class ArchiveRead(NamedTuple):
    """The batches of a piece; None if there is too little, or no whole one in the range.

    `is_last`: the range ends with them. `chain_before` is the log's chain before them. `unarchived`
    belongs to the first piece of an attempt.
    """

    run: BatchRun | None = None
    is_last: bool = True
    error: str = ""
    chain_before: Chain = GENESIS_CHAIN
    unarchived: Unarchived = UNARCHIVED_UNKNOWN


class RetentionPiece(NamedTuple):
    """Measure a log; with `removes`, remove its oldest segment first if `archived` allows it."""

    archived: AckedMarker | None
    removes: bool = False


class LogSize(NamedTuple):
    """The size of a log's segments, and what its oldest one is.

    `oldest_age_ms` is that of its newest batch, 0 if that has no commit stamp. `is_removable`: the
    archive has it. `removed`: the segment of the piece was removed.
    """

    size_bytes: int
    oldest_age_ms: int = 0
    is_removable: bool = False
    removed: bool = False


def read_for_archive(log: PartitionLog, piece: ArchivePiece) -> ArchiveRead:
    """Read the next batches of a range.

    Raises:
        BeforeLogStart, BadRequest, ChecksumMismatch: as `LogReader.read_range`, and rules 1 and 2.
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
    if any(each.session_id == RECONSTRUCTED for each in read.entries):
        raise BadRequest(
            f"{where}: cannot be archived from this replica, because their original session "
            "and chain hash are lost: the entries of the batches were damaged and "
            "reconstructed"
        )
    end, stamp_ms = read.entries[-1].last, read.entries[0].stamp_ms
    age_ms, unarchived = log.clock_ms() - stamp_ms, UNARCHIVED_UNKNOWN
    if piece.bytes_min:
        byte_count = log.reader.byte_count(piece.first, last)
        unarchived = Unarchived(last, byte_count, max(0, age_ms) if stamp_ms else -1)
        if age_ms < piece.age_ms_min and byte_count <= piece.bytes_min:
            return ArchiveRead(unarchived=unarchived)
    if end > last:
        return ArchiveRead(unarchived=unarchived)
    run = BatchRun(read.records, read.lengths, read.entries)
    return ArchiveRead(
        run, is_last=end == last, chain_before=read.chain_before, unarchived=unarchived
    )


def retain(log: PartitionLog, piece: RetentionPiece) -> LogSize:
    """Remove the oldest segment if that is requested and allowed; return the log's size (rule 3).

    Raises:
        BadRequest: the log has another chain at the archived mark.
        DiskFailed: a write failed.
    """
    log.check_files()
    archived = piece.archived
    removed = piece.removes and archived is not None and log.remove_oldest(archived)
    stamp_ms = log.oldest_stamp_ms
    return LogSize(
        log.size_bytes,
        log.clock_ms() - stamp_ms if stamp_ms else 0,
        is_removable=archived is not None and log.removable_end(archived) is not None,
        removed=removed,
    )
