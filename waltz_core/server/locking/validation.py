"""Turns requests into records: decodes them, validates their rows by locks, encodes accepted rows.

These are the steps whose cost depends on the number of rows. `pipeline.py` decides about turns,
sessions and answers. A batch, a piece of a batch, or many single transactions are validated as
arrays. A few single transactions are validated in plain Python, which is faster for a few rows.

Rules:
    1. Only this file sets the IDs, reasons and conflicts of validated rows in their appends.
    2. Row i of a request has sequence number `req_id.sequence + i`, whichever piece contains it.
"""

import struct
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from waltz_core.errors import BadRequest, ChecksumMismatch
from waltz_core.records.batches import AppendRows, EncodedBatch, decode_append, encode_records
from waltz_core.records.checksum import crc32
from waltz_core.records.lock_blocks import DISTANCES_TRANSACTIONS_MAX
from waltz_core.records.record import BEFORE_FIRST, TRANSACTION_BYTES_MAX, TransactionId
from waltz_core.server.locking.lock_table import (
    AHEAD,
    NO_CONFLICT,
    NO_ID,
    PASSED,
    LockRequests,
    LockTable,
    Mask,
)
from waltz_core.server.locking.pending_appends import PendingAppend, PendingBatch, PendingSingle
from waltz_core.server.locking.single_records import encode_singles, lock_column_of
from waltz_core.server.partition_events import PartitionLimits
from waltz_core.wire.messages import AppendBatch, AppendRequest, RowOutcomeCode

_SEQUENCE_MAX: Final = 0x7FFFFFFF
# Up to this number of single transactions, plain Python is faster than arrays.
ONE_BY_ONE_MAX: Final = 16
_PACKED_ROW_NUMBERS: Final = tuple(bytes([row]) for row in range(DISTANCES_TRANSACTIONS_MAX))


class ValidatedPiece(NamedTuple):
    """The result of one validation: the records of the accepted rows, and the appends.

    `part` is None if no row was accepted. `locks` are the write and append locks of the records, in
    the format of `lock_blocks.py`. `lock_rows` has a byte for each lock: the row of the lock's
    record. `lock_rows` is empty if there are too many rows for a byte. `unsettled_appends` wait for
    a transaction in flight, possibly a record of this piece. `rejected_appends` wait for no
    transaction.
    """

    part: EncodedBatch | None
    unsettled_appends: list[PendingAppend]
    rejected_appends: list[PendingAppend]
    locks: bytes = b""
    lock_rows: bytes = b""


class InFlightRange(NamedTuple):
    """The IDs in flight: from `high_water_mark + 1` up to `next_id - 1`."""

    high_water_mark: TransactionId
    next_id: TransactionId


def decode_batch(message: AppendBatch, limits: PartitionLimits) -> AppendRows:
    """Check and decode an append batch; return its rows.

    Raises:
        ChecksumMismatch: the payload differs from the payload that was sent.
        TooLarge: the number of rows or bytes is over the limit.
        BadRequest: the payload is not a batch, or its sequence numbers exceed the maximum.
    """
    actual_crc, expected_crc = crc32(message.payload), message.payload_crc
    if actual_crc != expected_crc:
        raise ChecksumMismatch(
            f"append batch: the payload is damaged: expected CRC {expected_crc:08x}, "
            f"found {actual_crc:08x}"
        )
    rows = decode_append(
        message.payload, rows_max=limits.batch_rows_max, bytes_max=limits.batch_bytes_max
    )
    sequence = message.req_id.sequence
    if sequence < 0 or sequence + rows.count - 1 > _SEQUENCE_MAX:
        raise BadRequest(
            f"append batch: expected sequence numbers in 0..{_SEQUENCE_MAX}, found "
            f"{sequence}..{sequence + rows.count - 1}. Hint: request a new client ID before the "
            "numbers are used up."
        )
    return rows


def verify_data(message: AppendRequest) -> None:
    """Raise ChecksumMismatch if the data of a single transaction differs from the data sent."""
    actual_crc, expected_crc = crc32(message.data), message.data_crc
    if actual_crc != expected_crc:
        raise ChecksumMismatch(
            f"append: the data is damaged: expected CRC {expected_crc:08x}, found {actual_crc:08x}"
        )


def validate_rows(
    pending: PendingBatch, stop: int, table: LockTable, in_flight: InFlightRange
) -> ValidatedPiece:
    """Validate the next rows of a batch, up to row `stop` - 1."""
    assert pending.rows is not None
    start = pending.validated_count
    rows = pending.rows.slice(start, stop)
    small_enough = rows.lengths <= TRANSACTION_BYTES_MAX
    all_small = bool(small_enough.all())
    marks = pending.mark if rows.marks is None else rows.marks
    validation = table.validate(
        LockRequests(
            rows.write_locks,
            rows.read_locks,
            rows.append_locks,
            np.maximum(marks, BEFORE_FIRST),
            None if all_small else small_enough,
        ),
        high_water_mark=in_flight.high_water_mark,
        next_id=in_flight.next_id,
    )
    accepted = validation.accepted
    reasons = np.where(accepted, np.uint8(RowOutcomeCode.COMMITTED), np.uint8(RowOutcomeCode.LOCK))
    reasons[validation.ahead] = RowOutcomeCode.AHEAD
    if not all_small:
        reasons[~small_enough] = RowOutcomeCode.TOO_LARGE
    pending.ids[start:stop] = validation.ids
    pending.conflicts[start:stop] = validation.conflicts
    pending.reasons[start:stop] = reasons
    pending.on_rows_validated(stop)
    if validation.accepted_count:
        kept_rows = None if validation.accepted_count == rows.count else accepted
        req_id = pending.req_id._replace(sequence=pending.req_id.sequence + start)
        part = encode_records(rows, kept_rows, in_flight.next_id, req_id)
        is_few = validation.accepted_count <= DISTANCES_TRANSACTIONS_MAX
        lock_rows = lock_rows_of(rows, kept_rows) if is_few else b""
        return ValidatedPiece(part, [pending], [], entered_locks(rows, kept_rows), lock_rows)
    if validation.pending.any():
        return ValidatedPiece(None, [pending], [])
    return ValidatedPiece(None, [], [pending])


def entered_locks(rows: AppendRows, kept_rows: Mask | None) -> bytes:
    """Return the packed locks that accepted rows (`kept_rows`; None: all) add to the lock table."""
    entered = []
    for column in (rows.write_locks, rows.append_locks):
        values = column.values
        entered.append(values if kept_rows is None else values[np.repeat(kept_rows, column.counts)])
    return np.concatenate(entered).astype(">i4").tobytes()


def lock_rows_of(rows: AppendRows, kept_rows: Mask | None) -> bytes:
    """Return for each lock of `entered_locks` the number of its row among the accepted rows."""
    row_numbers = np.arange(rows.count) if kept_rows is None else np.cumsum(kept_rows) - 1
    lock_rows = []
    for column in (rows.write_locks, rows.append_locks):
        writer_rows = np.repeat(row_numbers, column.counts)
        lock_rows.append(
            writer_rows if kept_rows is None else writer_rows[np.repeat(kept_rows, column.counts)]
        )
    return np.concatenate(lock_rows).astype(np.uint8).tobytes()


def validate_singles(
    group: list[PendingSingle], table: LockTable, in_flight: InFlightRange
) -> ValidatedPiece:
    """Validate single transactions, in order."""
    validate = _validate_one_by_one if len(group) <= ONE_BY_ONE_MAX else _validate_together
    accepted: list[PendingSingle] = []
    unsettled: list[PendingAppend] = []
    rejected: list[PendingAppend] = []
    for pending, (transaction_id, conflict_or_ahead) in zip(
        group, validate(group, table, in_flight), strict=True
    ):
        if transaction_id >= 0:
            pending.transaction_id = transaction_id
            accepted.append(pending)
            unsettled.append(pending)
        elif conflict_or_ahead == AHEAD:
            pending.reject(RowOutcomeCode.AHEAD)
            rejected.append(pending)
        else:
            pending.reason, pending.conflict = RowOutcomeCode.LOCK, conflict_or_ahead
            (unsettled if conflict_or_ahead > in_flight.high_water_mark else rejected).append(
                pending
            )
    if not accepted:
        return ValidatedPiece(None, unsettled, rejected)
    messages = [pending.message for pending in accepted]
    locks = [lock for message in messages for lock in (*message.write_locks, *message.append_locks)]
    lock_rows = b""
    if locks and len(accepted) <= DISTANCES_TRANSACTIONS_MAX:
        counts = [len(message.write_locks) + len(message.append_locks) for message in messages]
        lock_rows = b"".join(
            _PACKED_ROW_NUMBERS[row] * lock_count for row, lock_count in enumerate(counts)
        )
    packed = struct.pack(f">{len(locks)}i", *locks)
    return ValidatedPiece(encode_singles(accepted), unsettled, rejected, packed, lock_rows)


# A row's ID, and its conflict: an ID, NO_CONFLICT or AHEAD.
_RowResult: TypeAlias = tuple[int, int]


def _validate_one_by_one(
    group: list[PendingSingle], table: LockTable, in_flight: InFlightRange
) -> list[_RowResult]:
    results: list[_RowResult] = []
    next_id = in_flight.next_id
    for pending in group:
        message = pending.message
        estimate = table.validate_one(
            (message.write_locks, message.read_locks, message.append_locks),
            max(message.client_high_water_mark, BEFORE_FIRST),
            high_water_mark=in_flight.high_water_mark,
            next_id=next_id,
        )
        if estimate == PASSED:
            results.append((next_id, NO_CONFLICT))
            next_id = TransactionId(next_id + 1)
        else:
            results.append((NO_ID, estimate))
    return results


def _validate_together(
    group: list[PendingSingle], table: LockTable, in_flight: InFlightRange
) -> list[_RowResult]:
    messages = [pending.message for pending in group]
    marks = np.array([message.client_high_water_mark for message in messages], dtype=np.int64)
    validation = table.validate(
        LockRequests(
            lock_column_of([message.write_locks for message in messages]),
            lock_column_of([message.read_locks for message in messages]),
            lock_column_of([message.append_locks for message in messages]),
            np.maximum(marks, BEFORE_FIRST),
        ),
        high_water_mark=in_flight.high_water_mark,
        next_id=in_flight.next_id,
    )
    conflicts = np.where(validation.ahead, AHEAD, validation.conflicts)
    return list(zip(validation.ids.tolist(), conflicts.tolist(), strict=True))
