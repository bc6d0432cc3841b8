"""Pieces of work on one partition: calls of its log in sequence, possibly on another thread.

This code blocks on the disk, and makes no decisions: `service.py` decides which requests are
allowed. Each function executes a message by calling the log, and returns the result as an answer.

Rules:
    1. Each request has one outcome, in the order of the requests: an answer, or an error.
    2. An append counts as done after the sync that covers it, never before.
    3. One pass over the bytes of an append checks the CRC with which they were sent, and the CRCs
       of the records. Records are never processed one by one.
    4. If an append of a group fails, the later appends of the group are rejected, too, because they
       continue the log after the failed append.
    5. Appends for which there is no space are rejected before the first byte is written. Other work
       that finds no space is repeated with the space of the reserve (`disk_space.py`). The space
       for a reset is checked before the reset begins. Without this check, the log might be unable
       to write its new files, and would reject all calls until it is opened again.
    6. If any work finds damage, the result of the work contains the damage.
    7. A piece of the scrub, the archive or the retention has one result, or its error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NewType, TypeAlias, assert_never

import numpy as np

from waltz_core.errors import (
    BadRequest,
    ChecksumMismatch,
    DiskFailed,
    NoSpace,
    ReadFailed,
    WaltzError,
)
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    GENESIS_CHAIN,
    RECORD_HEADER,
    RECORD_OVERHEAD_BYTES,
    Chain,
    LineageEntry,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.files.disk_space import DiskSpace, disk_bytes_of_append
from waltz_core.storage.files.format import AckedMarker, IdRange
from waltz_core.storage.files.id_ranges import remove_damage
from waltz_core.storage.log.archive_pieces import (
    ArchivePiece,
    ArchiveRead,
    LogSize,
    RetentionPiece,
    read_for_archive,
    retain,
)
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.reading import LocationsRead
from waltz_core.storage.log.scrub import ScrubPiece, ScrubResult
from waltz_core.values import value
from waltz_core.wire.messages import (
    ENTRIES_MAX,
    Appended,
    AppendRaw,
    Buffer,
    Engage,
    LineageRequest,
    LineageResponse,
    LockBlocks,
    LockBlocksRequest,
    Prepare,
    Prepared,
    RangeBytes,
    RangeForm,
    RangeRaw,
    Repair,
    ReplicaEnd,
    ResetLog,
    SetArchived,
    SetLowWaterMark,
    StorageMessage,
    SuccessResponse,
    Truncate,
)
from waltz_core.wire.record_locations import LOCATIONS, LOCATIONS_BYTES_MAX, encode_locations

ConnectionId = NewType("ConnectionId", int)
# The maximum number of bytes that are read for one answer. A single larger batch or record is sent
# whole.
RANGE_BYTES_MAX: Final = 8 * 1024 * 1024
# An answer of whole batches needs the lineage of each batch, and there may be as many batches as
# records.
BATCHES_BYTES_MAX: Final = ENTRIES_MAX * RECORD_OVERHEAD_BYTES


@value(frozen=True, slots=True)
class LaneRequest:
    """A message that arrived on a connection."""

    connection: ConnectionId
    message: StorageMessage


WorkOutcome: TypeAlias = StorageMessage | WaltzError
LanePiece: TypeAlias = ScrubPiece | ArchivePiece | RetentionPiece


@dataclass(slots=True)
class WorkResult:
    """The outcomes of the requests (rule 1), a failure of the disk, and values for metrics.

    `new_damage` has the IDs whose damage the work has found. `failed_reads` has the errors that the
    disk has reported for unreadable bytes.
    """

    outcomes: list[WorkOutcome] = field(default_factory=list)
    failure: DiskFailed | None = None
    files_error: WaltzError | None = None  # the files were deleted or replaced
    appended_count: int = 0
    appended_bytes: int = 0
    read_count: int = 0
    read_bytes: int = 0
    sync_s: float | None = None  # seconds of the sync of a group of appends
    new_damage: tuple[IdRange, ...] = ()
    repaired_ids: IdRange | None = None
    failed_reads: list[str] = field(default_factory=list)
    scrub_result: ScrubResult | None = None
    archive_read: ArchiveRead | None = None
    log_size: LogSize | None = None  # None after an error, too
    has_released_reserve: bool = False  # the reserve was released for this work


def _no_clock() -> float:
    return 0.0


class Work:
    """Requests of one partition that are served together, or one piece (rule 7).

    Without requests and piece, the work moves the acked marker. `has_archive` states that PREPARED
    reports the start of the log.
    """

    __slots__ = ("_has_archive", "_space", "_storage_id", "log", "piece", "requests")

    def __init__(
        self,
        log: PartitionLog,
        requests: tuple[LaneRequest, ...],
        storage_id: bytes,
        *,
        space: DiskSpace | None = None,
        piece: LanePiece | None = None,
        has_archive: bool = False,
    ) -> None:
        assert not (requests and piece is not None)
        self.log = log
        self.requests = requests
        self.piece = piece
        self._storage_id = storage_id
        self._space = space
        self._has_archive = has_archive

    @property
    def partition_id(self) -> PartitionId:
        """The partition of all requests."""
        return self.log.partition_id

    @property
    def is_append(self) -> bool:
        """Whether the work appends new records."""
        return bool(self.requests) and isinstance(self.requests[0].message, AppendRaw)

    def run(self, clock_s: Callable[[], float] = _no_clock) -> WorkResult:
        """Execute the work and return its result (blocking).

        Errors of the log are in the result. Any other exception is a bug, and is raised.
        """
        result = self._execute(clock_s)
        space = self._space
        needs_space = any(isinstance(outcome, NoSpace) for outcome in result.outcomes)
        if needs_space and space is not None:
            if self.is_append:
                space.note_shortage(self._append_bytes())
            else:
                space.release_reserve()
                result = self._execute(clock_s)
                result.has_released_reserve = True
        return result

    def _append_bytes(self) -> int:
        return sum(_size_of_append(request.message) for request in self.requests)

    def _execute(self, clock_s: Callable[[], float]) -> WorkResult:
        result = WorkResult()
        known_damage = self.log.damaged
        try:
            if self.piece is not None:
                self._run_piece(self.piece, result)
            elif not self.requests:
                self.log.mark_acked()
            elif self.is_append:
                if self._space is not None:
                    self._space.check_append(self._append_bytes())
                _append_group(self.log, self.requests, result, clock_s)
            else:
                assert len(self.requests) == 1
                if self._space is not None and isinstance(self.requests[0].message, ResetLog):
                    self._space.check_files_fit()
                result.outcomes.append(self._execute_request(self.requests[0].message, result))
        except WaltzError as caught_error:
            error = self._cause_of(caught_error)
            self._note_error(error, result)
            if isinstance(self.piece, ScrubPiece):
                # After an error, the scrub skips the rest of the segment. The next pass or another
                # reader must find the damage.
                next_segment_first = TransactionId(
                    self.log.reader.segment_end(self.piece.first) + 1
                )
                result.scrub_result = ScrubResult(next_segment_first, 0, str(error))
            elif isinstance(self.piece, ArchivePiece):
                result.archive_read = ArchiveRead(error=str(error))
            missing_count = len(self.requests) - len(result.outcomes)
            result.outcomes += [error] * missing_count
        assert len(result.outcomes) == len(self.requests)
        result.files_error = self.log.files_error
        if self.log.damaged is not known_damage:
            result.new_damage = _without_known_damage(self.log.damaged, known_damage)
        result.failed_reads += self.log.reader.take_disk_errors()
        return result

    def _run_piece(self, piece: LanePiece, result: WorkResult) -> None:
        match piece:
            case ScrubPiece():
                result.scrub_result = _scrub(self.log, piece)
            case ArchivePiece():
                result.archive_read = read_for_archive(self.log, piece)
            case RetentionPiece():
                result.log_size = retain(self.log, piece)
            case _:
                assert_never(piece)

    def _note_error(self, error: WaltzError, result: WorkResult) -> None:
        """Note in the result whether an error means an unreadable record or a failed disk."""
        if isinstance(error, ReadFailed):  # A failed read loses no written bytes.
            result.failed_reads.append(str(error))
        elif isinstance(error, DiskFailed):
            result.failure = error

    def _cause_of(self, error: WaltzError) -> WaltzError:
        """Return MissingSegment in place of a disk error if the files were deleted or replaced."""
        if isinstance(error, DiskFailed):
            try:
                self.log.check_files()
            except WaltzError as files_error:
                return files_error
        return error

    def _execute_request(self, message: StorageMessage, result: WorkResult) -> StorageMessage:
        match message:
            case Prepare():
                prepared = _prepare(self.log, message, self._storage_id)
                return _with_start(prepared, self.log.start) if self._has_archive else prepared
            case RangeRaw():
                return _read_range(self.log, message, result)
            case LineageRequest():
                return _read_lineage(self.log, message)
            case Repair():
                state = _apply_change(self.log, message)
                last = message.first + len(message.lengths) // 4 - 1
                result.repaired_ids = IdRange(TransactionId(message.first), TransactionId(last))
                return state
            case LockBlocksRequest():
                return _read_lock_blocks(self.log, message)
            case _:
                return _apply_change(self.log, message)


def _without_known_damage(
    ranges: tuple[IdRange, ...], known: tuple[IdRange, ...]
) -> tuple[IdRange, ...]:
    for known_range in known:
        ranges = remove_damage(ranges, known_range)
    return ranges


def _scrub(log: PartitionLog, piece: ScrubPiece) -> ScrubResult:
    log.check_files()
    checked_bytes_before = log.reader.checked_bytes
    next_id = log.verify(piece.first, piece.bytes_max)
    return ScrubResult(next_id, log.reader.checked_bytes - checked_bytes_before)


# ---------------------------------------------------------------------------------------------
# Appends


def _size_of_append(append: StorageMessage) -> int:
    """Return the bytes that an append uses on the disk."""
    assert isinstance(append, AppendRaw)
    return disk_bytes_of_append(len(append.records), len(append.lengths) // 4, len(append.lineage))


def _append_group(
    log: PartitionLog,
    requests: Sequence[LaneRequest],
    result: WorkResult,
    clock_s: Callable[[], float],
) -> None:
    """Write all appends, sync once, and answer all of them (group commit)."""
    written_appends: list[AppendRaw] = []
    rejection: WaltzError | None = None
    for request in requests:
        append = request.message
        assert isinstance(append, AppendRaw)
        try:
            _append(log, append)
        except DiskFailed:
            raise
        except WaltzError as error:
            rejection = error
            break
        written_appends.append(append)
    if written_appends:
        started_s = clock_s()
        synced_max = log.sync()
        result.sync_s = clock_s() - started_s
        log.lock_block_file.append([append.locks for append in written_appends if append.locks])
        for append in written_appends:
            result.outcomes.append(_append_answer(append, synced_max, result))
    if rejection is not None:
        result.outcomes += [rejection] * (len(requests) - len(written_appends))


def _append_answer(append: AppendRaw, synced_max: TransactionId, result: WorkResult) -> Appended:
    """Count the records of a durable append; return the answer."""
    assert append.lineage[-1].last <= synced_max, "rule 2"
    result.appended_count += len(append.lengths) // 4
    result.appended_bytes += len(append.records)
    return Appended(append.session_id, append.sequence, append.partition_id, synced_max)


def _append(log: PartitionLog, append: AppendRaw) -> None:
    _check_crc("append", append)
    log.append(
        SessionId(append.session_id),
        TransactionId(append.first),
        raw_records.lengths_from_wire(append.lengths, len(append.records)),
        append.records,
        Chain(append.chain_before),
        append.lineage,
        records_crc=append.records_crc,
    )


def _check_crc(what: str, message: AppendRaw | Repair) -> None:
    found_crc = crc32(message.records)
    if found_crc != message.records_crc:
        raise ChecksumMismatch(
            f"{what} from transaction {message.first} on: expected CRC "
            f"{message.records_crc:08x} over {len(message.records)} bytes, found {found_crc:08x}"
        )


# ---------------------------------------------------------------------------------------------
# Other requests, one at a time


def _apply_change(log: PartitionLog, message: StorageMessage) -> StorageMessage:
    session = SessionId(message.session_id)
    match message:
        case SetArchived():
            return _compare_archived(log, message)
        case SetLowWaterMark():
            log.set_low_water_mark(session, TransactionId(message.mark), Chain(message.chain))
        case Truncate():
            log.truncate(
                session,
                TransactionId(message.last_to_keep),
                TransactionId(message.base),
                Chain(message.base_chain),
            )
        case ResetLog():
            log.reset(session, AckedMarker(TransactionId(message.last), Chain(message.chain)))
        case Engage():
            log.engage(session, TransactionId(message.mark))
        case Repair():
            _check_crc("repair", message)
            lengths = raw_records.lengths_from_wire(message.lengths, len(message.records))
            log.repair(TransactionId(message.first), lengths, message.records)
        case _:
            raise BadRequest(f"{type(message).__name__} is not a request that changes a log")
    state = log.state()
    return ReplicaEnd(*_response_prefix(message), state.synced_max, state.chain)


def _prepare(log: PartitionLog, message: Prepare, storage_id: bytes) -> Prepared:
    replica_report = log.prepare(SessionId(message.session_id), message.nonce)
    return Prepared(
        *_response_prefix(message),
        storage_id=storage_id,
        last_session=replica_report.last_session,
        low_water_mark=replica_report.low_water_mark,
        mark_confirmed=replica_report.mark_confirmed,
        synced_max=replica_report.synced_max,
        chain=replica_report.chain,
        suspect=replica_report.suspect,
        damaged=np.array(replica_report.damaged, dtype=">i8").tobytes(),
        engaged_session=replica_report.engaged_session,
    )


def _with_start(prepared: Prepared, start: AckedMarker) -> Prepared:
    return replace(prepared, start=start.transaction_id, start_chain=start.chain)


def _compare_archived(log: PartitionLog, message: SetArchived) -> SuccessResponse:
    """Raise BadRequest if the log has another chain hash at the mark (AR 10 in decision 047)."""
    found_chain = log.chain_at(TransactionId(message.last))
    if found_chain != message.chain:
        found_text = "no batch that ends there" if found_chain is None else found_chain.hex()
        raise BadRequest(
            f"partition {message.partition_id}: expected chain hash {message.chain.hex()} at "
            f"transaction {message.last}, up to which the log is archived; found {found_text}"
        )
    return SuccessResponse(*_response_prefix(message))


def _read_range(log: PartitionLog, message: RangeRaw, result: WorkResult) -> RangeBytes:
    first = TransactionId(message.first)
    last = TransactionId(min(message.last, log.synced_max))
    limit = BATCHES_BYTES_MAX if message.whole_batches else RANGE_BYTES_MAX
    bytes_max = min(max(1, message.bytes_max), limit)
    if message.reader and first > last:
        return _empty_range(message)
    if message.form == LOCATIONS and message.reader:
        return _read_locations(
            log.reader.locations(first, last, _locations_bytes(message)), message, result
        )
    if message.form == RangeForm.HEADERS:
        headers = log.read_headers(first, last, bytes_max)
        records: Buffer = headers.headers
        lengths = b""
        count = len(records) // RECORD_HEADER.size
        chain_before, entries = headers.chain_before, headers.entries
    elif message.form == RangeForm.WHOLE:
        read = log.read_range(first, last, bytes_max, whole_batches=message.whole_batches)
        count, records = int(read.lengths.size), read.records
        lengths = raw_records.lengths_to_wire(read.lengths)
        chain_before, entries = read.chain_before, read.entries
    else:
        raise BadRequest(
            "range request: expected 0 (whole records) or 1 (headers) in field form, found "
            f"{message.form}"
        )
    result.read_count += count
    result.read_bytes += len(records)
    return range_bytes(message, count, lengths, records, chain_before, entries)


def range_bytes(
    message: RangeRaw,
    count: int,
    lengths: bytes,
    records: Buffer,
    chain_before: Chain,
    entries: tuple[LineageEntry, ...],
) -> RangeBytes:
    """Return the answer with `count` records, or headers, from the requested ID on."""
    return RangeBytes(
        *_response_prefix(message),
        first=message.first,
        count=count,
        form=message.form,
        lengths=lengths,
        records=records,
        records_crc=crc32(records),
        chain_before=chain_before,
        lineage=entries,
    )


def _locations_bytes(message: RangeRaw) -> int:
    return min(max(1, message.bytes_max), LOCATIONS_BYTES_MAX)


def _read_locations(read: LocationsRead, message: RangeRaw, result: WorkResult) -> RangeBytes:
    """Return the file positions of the records; the requester reads and checks them."""
    count, locations = int(read.lengths.size), encode_locations(read.locations)
    result.read_count += count
    result.read_bytes += sum(location.size for location in read.locations)
    return RangeBytes(
        *_response_prefix(message),
        first=read.first,
        count=count,
        form=LOCATIONS,
        lengths=raw_records.lengths_to_wire(read.lengths),
        records=locations,
        records_crc=crc32(locations),
        chain_before=GENESIS_CHAIN,  # only whole batches need it
        lineage=read.entries,
    )


def _empty_range(message: RangeRaw) -> RangeBytes:
    """Return the answer to a reader if the requested records are not synced here yet."""
    return RangeBytes(
        *_response_prefix(message),
        first=message.first,
        count=0,
        form=message.form,
        lengths=b"",
        records=b"",
        records_crc=crc32(b""),
        chain_before=GENESIS_CHAIN,
        lineage=(),
    )


def _read_lineage(log: PartitionLog, message: LineageRequest) -> LineageResponse:
    chain_before, entries = log.lineage(TransactionId(message.first), TransactionId(message.last))
    return LineageResponse(*_response_prefix(message), chain_before, entries)


def _read_lock_blocks(log: PartitionLog, message: LockBlocksRequest) -> LockBlocks:
    bytes_max = min(max(0, message.bytes_max), RANGE_BYTES_MAX)
    return LockBlocks(*_response_prefix(message), log.lock_block_file.newest(bytes_max))


def _response_prefix(message: StorageMessage) -> tuple[int, int, int]:
    """Return the fields of a request that every answer repeats."""
    return message.session_id, message.sequence, message.partition_id
