"""Validation and encoding of rows: whole, in pieces or one by one, with equal results."""

import struct
import zlib
from collections.abc import Sequence

import pytest

from waltz_core import errors
from waltz_core.records import raw_records
from waltz_core.records.batches import EncodedBatch, encode_append
from waltz_core.records.lock_blocks import DISTANCES_TRANSACTIONS_MAX
from waltz_core.records.record import (
    BEFORE_FIRST,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.server.locking import validation
from waltz_core.server.locking.lock_table import LockTable
from waltz_core.server.locking.pending_appends import FlushGroup, PendingBatch, PendingSingle
from waltz_core.server.locking.validation import (
    InFlightRange,
    decode_batch,
    validate_rows,
    validate_singles,
)
from waltz_core.server.partition_events import ConnectionId, PartitionLimits
from waltz_core.wire.messages import AppendBatch, AppendRequest, RowOutcomeCode

LIMITS = PartitionLimits(lock_slot_count=1009)
REQ = ReqId(ClientId(1), Generation(1), PartitionId(0), 10)
A = ConnectionId(1)
DATA = [b"a", b"bb", b"ccc", b"dddd", b"e"]
WRITES = [[1], [2], [1], [3], []]
MARKS = [-1, -1, -1, 5, -1]
COMMITTED, LOCK, AHEAD = RowOutcomeCode.COMMITTED, RowOutcomeCode.LOCK, RowOutcomeCode.AHEAD


def message(req_id: ReqId = REQ) -> AppendBatch:
    none: list[list[int]] = [[] for _ in DATA]
    payload = encode_append(
        list(range(len(DATA))),
        DATA,
        write_locks=WRITES,
        read_locks=none,
        append_locks=none,
        marks=MARKS,
    )
    return AppendBatch(req_id, -1, payload, zlib.crc32(payload))


def single(
    write: Sequence[int], read: Sequence[int] = (), append: Sequence[int] = (), *, mark: int = -1
) -> PendingSingle:
    request = AppendRequest(REQ, mark, tuple(write), tuple(read), tuple(append), 0, b"", 0)
    return PendingSingle(A, 100, request, FlushGroup(), 0)


def with_locks(
    write: list[list[int]], read: list[list[int]], append: list[list[int]]
) -> PendingBatch:
    count = len(write)
    payload = encode_append(
        [0] * count, [b""] * count, write_locks=write, read_locks=read, append_locks=append
    )
    request = AppendBatch(REQ, -1, payload, zlib.crc32(payload))
    pending = PendingBatch(A, 1_000, request, REQ, FlushGroup(), 0)
    pending.open(decode_batch(request, LIMITS))
    return pending


def validate_in_pieces(stops: list[int]) -> tuple[PendingBatch, list[EncodedBatch]]:
    """Validate the five rows in pieces that end at these rows, before any commit."""
    pending = PendingBatch(A, 1_000, message(), REQ, FlushGroup(), 0)
    pending.open(decode_batch(message(), LIMITS))
    table = LockTable(1009, BEFORE_FIRST)
    next_id = TransactionId(0)
    parts = []
    for stop in stops:
        piece = validate_rows(pending, stop, table, InFlightRange(BEFORE_FIRST, next_id))
        if piece.part is not None:
            parts.append(piece.part)
            assert piece.part.first == next_id
            next_id = TransactionId(piece.part.last + 1)
    assert pending.is_validated
    return pending, parts


@pytest.mark.parametrize("stops", [[5], [1, 2, 3, 4, 5], [2, 5], [3, 4, 5]])
def test_pieces_have_the_same_outcomes_and_records_as_the_whole_batch(stops: list[int]) -> None:
    pending, parts = validate_in_pieces(stops)
    assert pending.ids.tolist() == [0, 1, -1, -1, 2]
    assert pending.reasons.tolist() == [COMMITTED, COMMITTED, LOCK, AHEAD, COMMITTED]
    assert pending.conflicts.tolist() == [-1, -1, 0, -1, -1]
    (whole,) = validate_in_pieces([5])[1]
    assert b"".join(part.records for part in parts) == bytes(whole.records)
    assert b"".join(part.record_crcs for part in parts) == whole.record_crcs
    lengths = raw_records.lengths_from_wire(whole.lengths, len(whole.records))
    numbers = raw_records.req_ids_of(whole.records, lengths)["sequence"].tolist()
    assert numbers == [10, 11, 14]


def test_a_piece_of_rejected_rows_waits_only_until_its_conflicts_are_committed() -> None:
    pending = PendingBatch(A, 1_000, message(), REQ, FlushGroup(), 0)
    pending.open(decode_batch(message(), LIMITS))
    table = LockTable(1009, BEFORE_FIRST)
    validate_rows(pending, 2, table, InFlightRange(BEFORE_FIRST, TransactionId(0)))
    unsettled = validate_rows(pending, 3, table, InFlightRange(BEFORE_FIRST, TransactionId(2)))
    assert (unsettled.part, unsettled.unsettled_appends, unsettled.rejected_appends) == (
        None,
        [pending],
        [],
    )
    ahead = validate_rows(pending, 4, table, InFlightRange(TransactionId(1), TransactionId(2)))
    assert (ahead.part, ahead.unsettled_appends, ahead.rejected_appends) == (None, [], [pending])


@pytest.mark.parametrize("few", [0, 16], ids=["by arrays", "one by one"])
def test_single_transactions_are_validated_in_order(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "ONE_BY_ONE_MAX", few)
    group = [single(write, mark=mark) for write, mark in zip(WRITES, MARKS, strict=True)]
    table = LockTable(1009, BEFORE_FIRST)
    piece = validate_singles(group, table, InFlightRange(BEFORE_FIRST, TransactionId(0)))
    assert piece.part is not None
    assert [pending.transaction_id for pending in group] == [0, 1, -1, -1, 2]
    assert [pending.reason for pending in group] == [COMMITTED, COMMITTED, LOCK, AHEAD, COMMITTED]
    assert piece.unsettled_appends == [group[0], group[1], group[2], group[4]]
    assert piece.rejected_appends == [group[3]]


@pytest.mark.parametrize("few", [0, 16], ids=["by arrays", "one by one"])
def test_the_locks_of_accepted_rows_are_reported(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "ONE_BY_ONE_MAX", few)
    writes, reads, appends = [[1, -2], [1], []], [[9], [], []], [[], [5], [6, 7]]
    group = [single(*locks) for locks in zip(writes, reads, appends, strict=True)]
    in_flight = InFlightRange(BEFORE_FIRST, TransactionId(0))
    piece = validate_singles(group, LockTable(1009, BEFORE_FIRST), in_flight)
    assert [pending.reason for pending in group] == [COMMITTED, LOCK, COMMITTED]
    assert struct.unpack(">4i", piece.locks) == (1, -2, 6, 7)
    assert list(piece.lock_rows) == [0, 0, 1, 1]
    pending = with_locks(writes, reads, appends)
    piece = validate_rows(pending, 3, LockTable(1009, BEFORE_FIRST), in_flight)
    assert pending.reasons.tolist() == [COMMITTED, LOCK, COMMITTED]
    found = zip(struct.unpack(">4i", piece.locks), piece.lock_rows, strict=True)
    assert sorted(found) == [(-2, 0), (1, 0), (6, 1), (7, 1)]


def test_large_batches_carry_no_lock_distances() -> None:
    group = [single([row]) for row in range(DISTANCES_TRANSACTIONS_MAX + 1)]
    in_flight = InFlightRange(BEFORE_FIRST, TransactionId(0))
    whole = validate_singles(group, LockTable(10_007, BEFORE_FIRST), in_flight)
    assert whole.locks == struct.pack(f">{len(group)}i", *range(len(group)))
    assert whole.lock_rows == b""
    few = validate_singles(group[1:], LockTable(10_007, BEFORE_FIRST), in_flight)
    assert list(few.lock_rows) == list(range(DISTANCES_TRANSACTIONS_MAX))


def test_all_locks_of_an_accepted_batch_are_reported() -> None:
    pending = with_locks([[1], [2]], [[9], []], [[], [3]])
    in_flight = InFlightRange(BEFORE_FIRST, TransactionId(0))
    piece = validate_rows(pending, 2, LockTable(1009, BEFORE_FIRST), in_flight)
    assert struct.unpack(">3i", piece.locks) == (1, 2, 3)
    assert list(piece.lock_rows) == [0, 1, 1]


def test_a_batch_over_the_maximum_sequence_number_is_rejected() -> None:
    last = REQ._replace(sequence=0x7FFFFFFF - 4)
    assert decode_batch(message(last), LIMITS).count == 5
    with pytest.raises(errors.BadRequest, match="sequence numbers"):
        decode_batch(message(last._replace(sequence=last.sequence + 1)), LIMITS)
