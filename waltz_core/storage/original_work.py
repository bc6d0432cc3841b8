"""What is done, on a thread, for an original's server: one request of S 0 in, its answer out.

Why it stands alone: it translates. What may be done is `replica_log.py`'s, and when it is done, and
what becomes of a failure, `work.py`'s.

Rules (interop.md 3.1):
    1. The session of a request is durable before anything is done in it.
    2. What is read was checked by its CRC. A record that is damaged is an error, and none that is
       not there is.
    3. A list is no longer than `LIST_BYTES_MAX`, but for a single record that is: whoever asked for
       more asks again behind it.
"""

from collections.abc import Iterator
from typing import Final, TypeAlias

from waltz_core.errors import BadRequest
from waltz_core.record import (
    RECORD_HEADER,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    Record,
    RecordHeader,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.reading import RangeRead
from waltz_core.storage.replica_log import ReplicaLog
from waltz_core.wire.messages import ENTRIES_MAX, StorageMessage, SuccessResponse
from waltz_core.wire.original_messages import (
    AppendRecordsRequest,
    LastSessionInfoRequest,
    LastSessionInfoResponse,
    MaxTransactionIdRequest,
    MaxTransactionIdResponse,
    RecordHeaderListRequest,
    RecordHeaderListResponse,
    RecordHeaderRequest,
    RecordHeaderResponse,
    RecordListRequest,
    RecordListResponse,
    RecordRequest,
    RecordResponse,
    SetLowWaterMarkRequest,
    TruncateRequest,
)

_Prefix: TypeAlias = tuple[int, int, int]
LIST_BYTES_MAX: Final = 4 * 1024 * 1024


def serve(log: ReplicaLog, message: StorageMessage) -> StorageMessage:
    """Do what was asked, durably; return the answer.

    Raises:
        WaltzError: why it was not done.
    """
    prefix = (message.session_id, message.sequence, message.partition_id)
    log.promise(SessionId(message.session_id))
    read = _read(log, message, prefix)
    return _change(log, message, prefix) if read is None else read


def _change(log: ReplicaLog, message: StorageMessage, prefix: _Prefix) -> StorageMessage:
    """Do what servers ask of a replica that is to be in their session, or is in it."""
    session = SessionId(message.session_id)
    match message:
        case LastSessionInfoRequest():
            return LastSessionInfoResponse(*prefix, *log.last_session_info())
        case MaxTransactionIdRequest():
            log.check_vouches()
            return MaxTransactionIdResponse(*prefix, log.synced_max)
        case SetLowWaterMarkRequest():
            log.set_original_mark(session, TransactionId(message.low_water_mark))
            return SuccessResponse(*prefix)
        case TruncateRequest():
            last = log.cut_to(session, TransactionId(message.last_to_keep))
            return MaxTransactionIdResponse(*prefix, last)
        case _:
            raise BadRequest(f"a storage takes no {type(message).__name__}")


def _read(log: ReplicaLog, message: StorageMessage, prefix: _Prefix) -> StorageMessage | None:
    """Return what was asked for of the records; None when it was something else."""
    match message:
        case RecordHeaderRequest():
            headers = _headers(log, message.transaction_id, 1)
            return RecordHeaderResponse(*prefix, headers[0] if headers else None)
        case RecordRequest():
            records = _records(log, message.transaction_id, 1)
            return RecordResponse(*prefix, records[0] if records else None)
        case RecordHeaderListRequest():
            headers = _headers(log, message.first, message.count_max)
            return RecordHeaderListResponse(*prefix, headers)
        case RecordListRequest():
            return RecordListResponse(*prefix, _records(log, message.first, message.count_max))
        case _:
            return None


def read_count(answer: StorageMessage) -> int:
    """Return how many records, or headers of them, an answer carries."""
    match answer:
        case RecordResponse():
            return int(answer.record is not None)
        case RecordHeaderResponse():
            return int(answer.header is not None)
        case RecordListResponse():
            return len(answer.records)
        case RecordHeaderListResponse():
            return len(answer.headers)
        case _:
            return 0


def append(log: ReplicaLog, message: AppendRecordsRequest) -> int:
    """Write the records; nothing is durable yet. Return their bytes."""
    session = SessionId(message.session_id)
    log.promise(session)
    return log.append_records(session, message.records)


def disk_bytes(message: AppendRecordsRequest) -> int:
    """Return what the records of an append will have in a segment."""
    return sum(len(record.data) + RECORD_OVERHEAD_BYTES for record in message.records)


# ---------------------------------------------------------------------------------------------
# reading


def _last(log: ReplicaLog, first: int, count_max: int) -> int:
    """Return the last id of a list, below `first` if there is none to be had."""
    return min(log.synced_max, first + min(count_max, ENTRIES_MAX) - 1) if first >= 0 else first - 1


def _records(log: ReplicaLog, first: int, count_max: int) -> tuple[Record, ...]:
    last = _last(log, first, count_max)
    if first > last:
        return ()
    read = log.read_range(
        TransactionId(first), TransactionId(last), LIST_BYTES_MAX, whole_batches=False
    )
    return tuple(_decoded(read))


def _decoded(read: RangeRead) -> Iterator[Record]:
    at = 0
    for length in read.lengths.tolist():
        transaction_id, req_id, header, size, _ = RECORD_PREFIX.unpack_from(read.records, at)
        start = at + RECORD_PREFIX.size
        data = read.records[start : start + size]
        yield Record(TransactionId(transaction_id), ReqId.from_bytes(req_id), header, data)
        at += length


def _headers(log: ReplicaLog, first: int, count_max: int) -> tuple[RecordHeader, ...]:
    last = _last(log, first, count_max)
    if first > last:
        return ()
    read = log.read_headers(TransactionId(first), TransactionId(last), LIST_BYTES_MAX)
    return tuple(
        RecordHeader(TransactionId(transaction_id), ReqId.from_bytes(req_id), header)
        for transaction_id, req_id, header in RECORD_HEADER.iter_unpack(read.headers)
    )
