"""Answers requests for records that only the archive has, because they were removed or damaged.

Rules (docs/decisions/054):
    1. The log is read first. The archive is read only if the log has removed the records, or they
       are damaged. In addition, the request must begin at or below the session's archived mark. (A
       request for a lineage must end at or below the mark.)
    2. The archive is read with the mark and manifest that the session's owner has sent (AR 9). The
       log must have the same chain hash at the mark. Otherwise the archive may belong to another
       log, for example after a rollback of ZooKeeper, and its records must not be returned.
    3. If the owner requests whole batches, it wants to copy them to another replica. Such a copy
       begins above the archived mark (AR 13), so the archive is not read.
    4. A request that waits for the archive does not wait in its partition's lane. It is answered
       even if the session has ended, because archived records do not change.
    5. An answer ends at the archived mark. If local records are damaged and the archive cannot
       return them, the error contains both reasons. If the files of the archive are damaged, too,
       this error is an error of damage. If only the local records are damaged, the error has the
       type of the archive's error.
    6. At most QUERIES_MAX requests wait for the archive. Further requests are rejected, and may be
       repeated. `queue_limits.py` does not count these requests: if it counted them, a store that
       hangs would also stop the owner's connection.
    7. For each partition, the same failure is reported once in `REPORT_INTERVAL_MS`. If a file is
       missing or corrupt, failures are the same if their texts are equal, because the text contains
       the file's name. Other failures concern all files, so they are the same if they have the same
       class.
"""

from typing import Final, Protocol

from waltz_core.errors import (
    ARCHIVE_DAMAGE_ERRORS,
    ArchiveUnavailable,
    BeforeLogStart,
    ChecksumMismatch,
    WaltzError,
)
from waltz_core.machine import Report
from waltz_core.records import raw_records
from waltz_core.records.raw_records import Buffer, RangeRead
from waltz_core.records.record import RECORD_HEADER, Chain, LineageEntry, PartitionId, TransactionId
from waltz_core.storage.log.reading import LINEAGE_ENTRIES_MAX
from waltz_core.storage.service.work import RANGE_BYTES_MAX, LaneRequest, WorkOutcome, range_bytes
from waltz_core.values import value
from waltz_core.wire.messages import (
    LineageRequest,
    LineageResponse,
    RangeForm,
    RangeRaw,
    SetArchived,
    StorageMessage,
)

# Several requests for each thread that reads the archive; a reader has one request at a time.
QUERIES_MAX: Final = 64
REPORT_INTERVAL_MS: Final = 600_000
_REMEMBERED_REPORTS_MAX: Final = 100
_REPAIR_HINT: Final = (
    "Hint: `waltz-core archive verify --repair` replaces a missing or corrupt object if a storage "
    "still has its transactions."
)


class RangeReader(Protocol):
    """The part of `archive.reader.ArchiveReader` that this file uses; the simulator has its own."""

    def read_range(self, first: TransactionId, last: TransactionId, bytes_max: int) -> RangeRead:
        """Return records of first..last up to `bytes_max`, but at least one record."""

    def lineage(
        self, first: TransactionId, last: TransactionId, entries_max: int
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that overlap first..last, and the chain hash before them.

        If there are more than `entries_max`, the newest are returned.
        """


@value(frozen=True, slots=True)
class ArchiveQuery:
    """A request to answer from the archive.

    `mark` is the archived mark with the manifest, and `error` is the error of the log.
    """

    request: LaneRequest
    mark: SetArchived
    error: WaltzError

    @property
    def location(self) -> tuple[int, int]:
        """The partition, and the first ID that the archive must have."""
        message = self.request.message
        assert isinstance(message, RangeRaw | LineageRequest)
        return message.partition_id, _needed_id(message)


class ArchiveReads:
    """The archived marks of the present sessions, and the requests that wait for the archive."""

    def __init__(self, *, has_archive: bool) -> None:
        self._has_archive = has_archive
        self.marks: dict[PartitionId, SetArchived] = {}
        self._count = 0
        self._reported_ms: dict[tuple[int, str], int] = {}  # rule 7; the newest is the last

    def set_mark(self, mark: SetArchived) -> None:
        """Store the archived mark of a session; the caller has checked its chain hash (rule 2)."""
        self.marks[PartitionId(mark.partition_id)] = mark

    def forget(self, partition_id: PartitionId) -> None:
        """Forget the mark of a partition, because its session has ended."""
        self.marks.pop(partition_id, None)

    def archive_query_for(
        self, request: LaneRequest, error: WaltzError
    ) -> ArchiveQuery | WaltzError:
        """Return the archive read that replaces a failed read, or the error (rules 1 to 3)."""
        message = request.message
        if not isinstance(error, BeforeLogStart | ChecksumMismatch):
            return error
        if not isinstance(message, RangeRaw | LineageRequest) or _is_copy(message):
            return error
        archived_mark = self.marks.get(PartitionId(message.partition_id))
        if (
            archived_mark is not None
            and _needed_id(message) <= archived_mark.last
            and _is_form_supported(message)
        ):
            return self._query(ArchiveQuery(request, archived_mark, error))
        if archived_mark is None and isinstance(error, BeforeLogStart):
            reason = "but the server that owns the partition has not sent the archived mark yet"
            if not self._has_archive:
                reason = "but this storage has no setting `archive_url`"
            return ArchiveUnavailable(f"{error}; earlier transactions are in the archive, {reason}")
        if archived_mark is None and self._has_archive and isinstance(message, RangeRaw):
            reason = (
                "the server that owns the partition has not reported yet whether the archive "
                "has these records"
            )
            return ArchiveUnavailable(f"{error}; {reason}")
        return error

    def _query(self, query: ArchiveQuery) -> ArchiveQuery | WaltzError:
        if self._count < QUERIES_MAX:
            self._count += 1
            return query
        return ArchiveUnavailable(
            f"{query.error}; {self._count} requests already wait for the archive, which is "
            "the limit"
        )

    def on_answered(self, query: ArchiveQuery, outcome: WorkOutcome, now_ms: int) -> list[Report]:
        """Note that a request was answered, and report a failure (rules 6 and 7)."""
        self._count -= 1
        assert self._count >= 0
        failure = archive_error_of(outcome)
        if failure is None or isinstance(failure, BeforeLogStart):
            return []
        partition, first = query.location
        is_damage = isinstance(failure, ARCHIVE_DAMAGE_ERRORS)
        key = partition, str(failure) if is_damage else type(failure).__name__
        reported_ms = self._reported_ms.get(key)
        if reported_ms is not None and now_ms - reported_ms < REPORT_INTERVAL_MS:
            return []
        self._reported_ms.pop(key, None)
        self._reported_ms[key] = now_ms
        if len(self._reported_ms) > _REMEMBERED_REPORTS_MAX:
            del self._reported_ms[next(iter(self._reported_ms))]
        fields = (("partition", partition), ("first", first), ("error", failure))
        return [Report("storage.archive_read_failed", fields)]


def archive_error_of(outcome: WorkOutcome) -> WaltzError | None:
    """Return the error of the archive if `answer_from_archive` has failed; None for an answer."""
    if not isinstance(outcome, WaltzError):
        return None
    cause = outcome.__cause__
    return cause if isinstance(cause, WaltzError) else outcome


def _is_copy(message: RangeRaw | LineageRequest) -> bool:
    """Whether the owner requests batches to copy them to another replica (rule 3)."""
    return isinstance(message, RangeRaw) and message.whole_batches


def _is_form_supported(message: RangeRaw | LineageRequest) -> bool:
    """Whether the archive has the requested form: it cannot return positions in local files."""
    return isinstance(message, LineageRequest) or message.form in tuple(RangeForm)


def _needed_id(message: RangeRaw | LineageRequest) -> int:
    """Return the ID that the archive must have to answer.

    For records, this is the first ID. For a lineage, it is the last ID, because the newest batches
    are needed first.
    """
    return message.last if isinstance(message, LineageRequest) else message.first


def answer_from_archive(reader: RangeReader, read: ArchiveQuery) -> WorkOutcome:
    """Return the answer from the archive, or the error (rule 5; blocking)."""
    try:
        return _answer(reader, read.request.message, TransactionId(read.mark.last))
    except WaltzError as error:
        return _read_error(read.error, error)


def _read_error(log_error: WaltzError, archive_error: WaltzError) -> WaltzError:
    """Return the error for the reader; its cause is the error of the archive (rule 5)."""
    text, error_class = str(archive_error), type(archive_error)
    if isinstance(log_error, ChecksumMismatch):
        text = f"{log_error}; in the archive: {text}"
    if isinstance(archive_error, ARCHIVE_DAMAGE_ERRORS):
        text = f"{text}. {_REPAIR_HINT}"
        error_class = type(log_error) if isinstance(log_error, ChecksumMismatch) else error_class
    elif not isinstance(log_error, ChecksumMismatch):
        return archive_error
    read_error = error_class(text)
    read_error.__cause__ = archive_error
    return read_error


def _answer(
    reader: RangeReader, message: StorageMessage, archived: TransactionId
) -> StorageMessage:
    prefix = (message.session_id, message.sequence, message.partition_id)
    if isinstance(message, LineageRequest):
        first, last = TransactionId(message.first), TransactionId(message.last)
        return LineageResponse(*prefix, *reader.lineage(first, last, LINEAGE_ENTRIES_MAX))
    assert isinstance(message, RangeRaw)
    first, last = TransactionId(message.first), min(TransactionId(message.last), archived)
    records: Buffer
    if message.form == RangeForm.HEADERS:
        count_max = max(1, min(message.bytes_max, RANGE_BYTES_MAX) // RECORD_HEADER.size)
        last = min(last, TransactionId(first + count_max - 1))
        read = reader.read_range(first, last, RANGE_BYTES_MAX)
        records, lengths = raw_records.headers_of(read.records, read.lengths), b""
    else:
        read = reader.read_range(first, last, min(max(1, message.bytes_max), RANGE_BYTES_MAX))
        records, lengths = read.records, raw_records.lengths_to_wire(read.lengths)
    count = int(read.lengths.size)
    return range_bytes(message, count, lengths, records, read.chain_before, read.entries)
