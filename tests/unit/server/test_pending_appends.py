"""Batch appends: rows that are not validated yet, and boundaries of pieces."""

import numpy as np

from waltz_core.records.batches import decode_append, encode_append
from waltz_core.records.record import (
    RECORD_OVERHEAD_BYTES,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.server.locking.pending_appends import FlushGroup, PendingBatch
from waltz_core.server.partition_events import MIB, ConnectionId
from waltz_core.wire.messages import AppendBatch, RowOutcomeCode

REQ = ReqId(ClientId(1), Generation(0), PartitionId(0), 7)
A = ConnectionId(1)


def outcomes(pending: PendingBatch) -> list[tuple[int, RowOutcomeCode]]:
    answer = pending.answer(TransactionId(99))
    assert (answer.connection, answer.cost_bytes) == (A, 60)
    message = answer.message
    assert (message.req_id, message.high_water_mark) == (REQ, 99)
    ids = np.frombuffer(message.transaction_ids, ">i8").tolist()
    return list(zip(ids, map(RowOutcomeCode, bytes(message.reasons)), strict=True))


def pending_batch(data: list[bytes]) -> PendingBatch:
    """A batch that was decoded and of which no row is validated."""
    none: list[list[int]] = [[] for _ in data]
    payload = encode_append(
        [0] * len(data), data, write_locks=none, read_locks=none, append_locks=none
    )
    pending = PendingBatch(A, 60, AppendBatch(REQ, 5, payload, 0), REQ, FlushGroup(), 0)
    assert not pending.is_validated
    pending.open(decode_append(payload, rows_max=100, bytes_max=MIB))
    assert (pending.message, pending.mark, pending.validated_count) == (None, 5, 0)
    return pending


def test_rows_that_await_validation_are_not_marked_as_lost() -> None:
    rows = pending_batch([b"a", b"b", b"c"])
    rows.ids[:2] = 6, 7
    rows.on_rows_validated(2)
    assert rows.mark_if_lost(TransactionId(6), RowOutcomeCode.NO_SPACE)
    assert rows.reasons.tolist() == [
        RowOutcomeCode.COMMITTED,
        RowOutcomeCode.NO_SPACE,
        RowOutcomeCode.COMMITTED,
    ]
    assert not rows.mark_if_lost(TransactionId(6))
    rows.reject(RowOutcomeCode.NOT_MOUNTED)
    assert outcomes(rows) == [
        (6, RowOutcomeCode.COMMITTED),
        (-1, RowOutcomeCode.NO_SPACE),
        (-1, RowOutcomeCode.NOT_MOUNTED),
    ]


def test_a_piece_ends_before_the_row_that_exceeds_its_limit() -> None:
    size = 100 - RECORD_OVERHEAD_BYTES
    rows = pending_batch([bytes(size)] * 10)
    assert [rows.piece_end(piece) for piece in (1, 100, 199, 200, 999, None)] == [
        1, 1, 1, 2, 9, 10
    ]  # fmt: skip
    rows.on_rows_validated(8)
    assert [rows.piece_end(piece) for piece in (1, 200, 9_999, None)] == [9, 10, 10, 10]
    assert [rows.cost_up_to(row) for row in (0, 1, 8, 10)] == [0, 6, 48, 60]
