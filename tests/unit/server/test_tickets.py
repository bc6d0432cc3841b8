"""The outcome of each row of an append: reported once, lost only with what it depends on."""

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
from waltz_core.server.locking.tickets import BatchTicket, Epoch, SingleTicket
from waltz_core.server.partition_events import MIB, ConnectionId
from waltz_core.wire.messages import AppendBatch, AppendRequest, AppendResult, Reason

REQ = ReqId(ClientId(1), Generation(0), PartitionId(0), 7)
A = ConnectionId(1)


def single(transaction_id: int = -1, conflict: int = -1) -> SingleTicket:
    ticket = SingleTicket(A, 60, AppendRequest(REQ, -1, (), (), (), 0, b"", 0), Epoch(), 0)
    ticket.transaction_id, ticket.conflict = transaction_id, conflict
    if conflict >= 0:
        ticket.reason = Reason.LOCK
    return ticket


def batch(ids: list[int], reasons: list[Reason], conflicts: list[int]) -> BatchTicket:
    ticket = BatchTicket(A, 60, None, REQ, Epoch(), 0)
    ticket.ids = np.array(ids, dtype=np.int64)
    ticket.reasons = np.array(reasons, dtype=np.uint8)
    ticket.conflicts = np.array(conflicts, dtype=np.int64)
    return ticket


def outcomes(ticket: SingleTicket | BatchTicket) -> list[tuple[int, Reason, int]]:
    answer = ticket.answer(TransactionId(99))
    assert (answer.connection, answer.cost_bytes) == (A, 60)
    message = answer.message
    assert isinstance(message, AppendResult)
    assert (message.req_id, message.high_water_mark) == (REQ, 99)
    ids = np.frombuffer(message.transaction_ids, ">i8").tolist()
    conflicts = np.frombuffer(message.conflicting, ">i8").tolist()
    return list(zip(ids, map(Reason, bytes(message.reasons)), conflicts, strict=True))


def test_the_outcome_of_a_single_append() -> None:
    assert outcomes(single(5)) == [(5, Reason.COMMITTED, -1)]
    assert outcomes(single(conflict=3)) == [(-1, Reason.LOCK, 3)]


def test_a_single_append_is_lost_with_its_id_or_with_its_conflict() -> None:
    kept = single(5)
    assert not kept.settle(TransactionId(5))
    assert outcomes(kept) == [(5, Reason.COMMITTED, -1)]
    gone = single(5)
    assert gone.settle(TransactionId(4))
    assert outcomes(gone) == [(-1, Reason.LOST, -1)]
    refused = single(conflict=5)
    assert not refused.settle(TransactionId(5))
    assert outcomes(refused) == [(-1, Reason.LOCK, 5)]
    unsure = single(conflict=5)
    assert unsure.settle(TransactionId(4))
    assert outcomes(unsure) == [(-1, Reason.LOST, -1)]


def test_a_batch_is_lost_row_by_row() -> None:
    committed, lock, ahead = Reason.COMMITTED, Reason.LOCK, Reason.AHEAD
    rows = batch([4, -1, -1, 5, -1], [committed, lock, ahead, committed, lock], [-1, 2, -1, -1, 5])
    assert rows.settle(TransactionId(4))
    assert outcomes(rows) == [
        (4, committed, -1),
        (-1, lock, 2),
        (-1, ahead, -1),
        (-1, Reason.LOST, -1),
        (-1, Reason.LOST, -1),
    ]


def test_a_batch_of_which_nothing_is_lost() -> None:
    rows = batch([4, 5], [Reason.COMMITTED] * 2, [-1, -1])
    assert not rows.settle(TransactionId(5))
    assert outcomes(rows) == [(4, Reason.COMMITTED, -1), (5, Reason.COMMITTED, -1)]


def opened(data: list[bytes]) -> BatchTicket:
    """A batch that was decoded and of which no row is judged."""
    none: list[list[int]] = [[] for _ in data]
    payload = encode_append(
        [0] * len(data), data, write_locks=none, read_locks=none, append_locks=none
    )
    ticket = BatchTicket(A, 60, AppendBatch(REQ, 5, payload, 0), REQ, Epoch(), 0)
    assert not ticket.is_judged
    ticket.open(decode_append(payload, rows_max=100, bytes_max=MIB))
    assert (ticket.message, ticket.mark, ticket.judged_count) == (None, 5, 0)
    return ticket


def test_a_batch_that_is_rejected_as_a_whole() -> None:
    rows = opened([b"a", b"b", b"c"])
    rows.reject(Reason.OVERLOADED)
    assert rows.is_final
    assert outcomes(rows) == [(-1, Reason.OVERLOADED, -1)] * 3


def test_a_batch_is_final_when_all_of_it_is_judged_and_nothing_in_flight() -> None:
    rows = opened([b"a", b"b", b"c"])
    rows.ids[0] = 7
    rows.judged(1)
    rows.flight_count = 1
    assert not rows.is_final
    rows.reject(Reason.NOT_MOUNTED)
    assert (rows.is_judged, rows.is_final, rows.rows) == (True, False, None)
    rows.flight_count = 0
    assert rows.is_final
    assert outcomes(rows) == [(7, Reason.COMMITTED, -1), *[(-1, Reason.NOT_MOUNTED, -1)] * 2]


def test_rows_that_are_not_judged_are_not_lost() -> None:
    rows = opened([b"a", b"b"])
    rows.ids[0] = 7
    rows.judged(1)
    assert rows.settle(TransactionId(6))
    assert rows.reasons.tolist() == [Reason.LOST, Reason.COMMITTED]
    assert not rows.settle(TransactionId(6))
    rows.reject(Reason.NOT_MOUNTED)
    assert outcomes(rows) == [(-1, Reason.LOST, -1), (-1, Reason.NOT_MOUNTED, -1)]


def test_a_piece_ends_before_the_row_that_would_make_it_too_long() -> None:
    size = 100 - RECORD_OVERHEAD_BYTES
    rows = opened([bytes(size)] * 10)
    assert [rows.stop_within(piece) for piece in (1, 100, 199, 200, 999, None)] == [
        1, 1, 1, 2, 9, 10
    ]  # fmt: skip
    rows.judged(8)
    assert [rows.stop_within(piece) for piece in (1, 200, 9_999, None)] == [9, 10, 10, 10]
    assert [rows.cost_up_to(row) for row in (0, 1, 8, 10)] == [0, 6, 48, 60]


def test_rows_lost_to_a_full_disk_are_reported_as_such() -> None:
    rows = batch([4, 5], [Reason.COMMITTED] * 2, [-1, -1])
    assert rows.settle(TransactionId(4), Reason.NO_SPACE)
    assert outcomes(rows) == [(4, Reason.COMMITTED, -1), (-1, Reason.NO_SPACE, -1)]
