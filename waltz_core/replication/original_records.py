"""Records, lists of them and failures, as S 0 has them and as S 1 has them.

Why it stands alone: sessions (`originals.py`) and readers, who ask on links of their own, need the
same of it, and none of it knows of sessions.

Rules:
    1. A record's data CRC is checked by the codec, its record CRC is made here: an original sends
       none, and does not check its own when it reads.
    2. Nobody tells how long records are before they are here: first few are asked for, then more.
    3. Nobody can tell a reader the batches of what he reads: they are marked as made up.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from waltz_core import raw_records
from waltz_core.checksum import crc32
from waltz_core.errors import (
    BadRequest,
    ClusterKeyMismatch,
    RemoteProtocolError,
    SessionFenced,
    Unavailable,
    UnknownPartition,
    WaltzError,
)
from waltz_core.record import (
    GENESIS_CHAIN,
    MADE_UP,
    RECORD_HEADER,
    RECORD_PREFIX,
    Chain,
    LineageEntry,
    Record,
    RecordHeader,
    ReqId,
    TransactionId,
    identity_chain,
)
from waltz_core.replication.events import Batch
from waltz_core.wire import messages, original_messages
from waltz_core.wire.messages import RangeForm, StorageMessage

Prefix: TypeAlias = tuple[int, int, int]  # session, sequence, partition

_CRC: Final = struct.Struct(">I")
_NOBODY: Final = -1
# One APPEND_REQUEST: the storage syncs once for each.
APPEND_RECORDS_MAX: Final = 4096
APPEND_BYTES_MAX: Final = 4 * 1024 * 1024
HEADERS_MAX: Final = 1024
_PAGE_MIN: Final = 3
_PAGE_MAX: Final = 256
_PAGE_BYTES: Final = 1024 * 1024
_FAILURES: Final[tuple[tuple[str, type[WaltzError]], ...]] = (
    (r"session id has changed to (-?\d+)", SessionFenced),
    (r"is not assigned", UnknownPartition),
    (r"have been disabled", Unavailable),
    (r"(cluster key|number of partitions) is inconsistent", ClusterKeyMismatch),
)


# ---------------------------------------------------------------------------------------------
# records


def header_bytes(header: RecordHeader | Record) -> bytes:
    """Return the 28 bytes of a record header."""
    return RECORD_HEADER.pack(header[0], header[1].to_bytes(), header[2])


def raw_record(record: Record) -> bytes:
    """Return a record as it lies in a segment file; both of its CRCs are made here."""
    prefix = RECORD_PREFIX.pack(
        record.transaction_id,
        record.req_id.to_bytes(),
        record.header,
        len(record.data),
        crc32(record.data),
    )
    made = prefix + record.data
    return made + _CRC.pack(crc32(made))


def records_of(message: messages.AppendRaw) -> list[Record]:
    """Take raw records apart, as S 0 carries them."""
    found: list[Record] = []
    view, start = memoryview(message.records), 0
    for length in raw_records.lengths_from_wire(message.lengths, len(view)).tolist():
        transaction_id, req_id, header, _, _ = RECORD_PREFIX.unpack_from(view, start)
        data = bytes(view[start + RECORD_PREFIX.size : start + length - _CRC.size])
        found.append(Record(TransactionId(transaction_id), ReqId.from_bytes(req_id), header, data))
        start += length
    return found


def identities_of(batches: Iterable[Batch]) -> dict[TransactionId, Chain]:
    """Return what each record of these batches is known by in an original's log."""
    found: dict[TransactionId, Chain] = {}
    for batch in batches:
        lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
        headers = raw_records.headers_of(batch.records, lengths)
        for at in range(0, len(headers), RECORD_HEADER.size):
            last = TransactionId(batch.first + at // RECORD_HEADER.size)
            found[last] = identity_chain(headers[at : at + RECORD_HEADER.size])
    return found


def chunks_of(records: Sequence[Record]) -> list[tuple[Record, ...]]:
    """Return them in appends of a bounded size."""
    found: list[tuple[Record, ...]] = []
    start = size = 0
    for index, record in enumerate(records):
        if index > start and (
            index - start == APPEND_RECORDS_MAX or size + len(record.data) > APPEND_BYTES_MAX
        ):
            found.append(tuple(records[start:index]))
            start, size = index, 0
        size += len(record.data) + RECORD_PREFIX.size
    return [*found, tuple(records[start:])]


class PageSize:
    """How many records to ask for next: few until it is known how long they are."""

    def __init__(self) -> None:
        self._count = _PAGE_MIN

    def next(self, wanted: int) -> int:
        """Return a count of at most `wanted`."""
        return min(self._count, wanted)

    def learn(self, records: Sequence[Record]) -> None:
        """Take in what came."""
        longest = max((len(record.data) for record in records), default=0) + RECORD_PREFIX.size
        count = min(2 * self._count, _PAGE_MAX, _PAGE_BYTES // longest)
        self._count = max(count, _PAGE_MIN)


def check_dense(found: Sequence[RecordHeader | Record], first: int, count_max: int) -> None:
    """Raise RemoteProtocolError unless it is what there is from `first` on, one at least."""
    if not 1 <= len(found) <= count_max:
        raise RemoteProtocolError(f"expected 1 to {count_max} records, found {len(found)}")
    for index, each in enumerate(found):
        if each.transaction_id != first + index:
            raise RemoteProtocolError(
                f"expected transaction {first + index}, found {each.transaction_id}"
            )


def range_bytes(
    prefix: Prefix,
    records: Sequence[Record],
    chain_before: Chain,
    lineage: tuple[LineageEntry, ...],
) -> messages.RangeBytes:
    """Return records, and the batches that they are in, as S 1 has them."""
    pieces = [raw_record(record) for record in records]
    run = b"".join(pieces)
    lengths = struct.pack(f">{len(pieces)}i", *map(len, pieces))
    first, form = records[0].transaction_id, int(RangeForm.WHOLE)
    crc = crc32(run)
    return messages.RangeBytes(
        *prefix, first, len(pieces), form, lengths, run, crc, chain_before, lineage
    )


# ---------------------------------------------------------------------------------------------
# readers, who ask on links of their own


def reading(message: messages.RangeRaw, pages: PageSize) -> StorageMessage:
    """Return what a reader's request is in S 0; its sequence is that of the request."""
    prefix = message.session_id, message.sequence, message.partition_id
    count = message.last - message.first + 1
    if message.form == RangeForm.HEADERS:
        count = min(count, HEADERS_MAX)
        return original_messages.RecordHeaderListRequest(*prefix, message.first, count)
    return original_messages.RecordListRequest(*prefix, message.first, pages.next(count))


def was_read(
    message: messages.RangeRaw, answer: StorageMessage, pages: PageSize
) -> messages.RangeBytes | messages.Nack:
    """Return what a reader is answered. Nobody can tell the batches of what it reads.

    Raises:
        RemoteProtocolError: it is not what was asked for.
    """
    prefix = message.session_id, message.sequence, message.partition_id
    if isinstance(answer, original_messages.FailureResponse):
        return failure(prefix, answer)
    count_max = message.last - message.first + 1
    if isinstance(answer, original_messages.RecordHeaderListResponse):
        found: Sequence[RecordHeader | Record] = answer.headers
    elif isinstance(answer, original_messages.RecordListResponse):
        found = answer.records
    else:
        raise RemoteProtocolError(f"expected a list of records, found {type(answer).__name__}")
    if not found:
        return messages.Nack(*prefix, BadRequest.code, _NOBODY, f"no id {message.first} yet")
    check_dense(found, message.first, count_max)
    last = found[-1].transaction_id
    lineage = (LineageEntry(TransactionId(message.first), last, MADE_UP, 0, GENESIS_CHAIN),)
    if isinstance(answer, original_messages.RecordListResponse):
        pages.learn(answer.records)
        return range_bytes(prefix, answer.records, GENESIS_CHAIN, lineage)
    run = b"".join(map(header_bytes, found))
    form, crc = int(RangeForm.HEADERS), crc32(run)
    return messages.RangeBytes(
        *prefix, message.first, len(found), form, b"", run, crc, GENESIS_CHAIN, lineage
    )


def failure(prefix: Prefix, answer: original_messages.FailureResponse) -> messages.Nack:
    """Return what a Java exception's text means."""
    text = answer.text or "no reason given"
    for pattern, kind in _FAILURES:
        found = re.search(pattern, text)
        if found is not None:
            promised = int(found[1]) if kind is SessionFenced else _NOBODY
            return messages.Nack(*prefix, kind.code, promised, text)
    return messages.Nack(*prefix, BadRequest.code, _NOBODY, text)
