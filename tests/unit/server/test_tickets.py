"""The outcome of each row of an append: told once, and lost only with what it stands on."""

import numpy as np

from waltz_core.record import ClientId, Generation, PartitionId, ReqId, TransactionId
from waltz_core.server.events import ConnectionId
from waltz_core.server.tickets import BatchTicket, Epoch, SingleTicket
from waltz_core.wire.messages import AppendRequest, AppendResult, Reason

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


def told(ticket: SingleTicket | BatchTicket) -> list[tuple[int, Reason, int]]:
    answer = ticket.answer(TransactionId(99))
    assert (answer.connection, answer.cost_bytes) == (A, 60)
    message = answer.message
    assert isinstance(message, AppendResult)
    assert (message.req_id, message.high_water_mark) == (REQ, 99)
    ids = np.frombuffer(message.transaction_ids, ">i8").tolist()
    conflicts = np.frombuffer(message.conflicting, ">i8").tolist()
    return list(zip(ids, map(Reason, bytes(message.reasons)), conflicts, strict=True))


def test_what_a_single_append_is_told() -> None:
    assert told(single(5)) == [(5, Reason.COMMITTED, -1)]
    assert told(single(conflict=3)) == [(-1, Reason.LOCK, 3)]


def test_a_single_append_is_lost_with_its_id_or_with_its_conflict() -> None:
    kept = single(5)
    assert not kept.settle(TransactionId(5))
    assert told(kept) == [(5, Reason.COMMITTED, -1)]
    gone = single(5)
    assert gone.settle(TransactionId(4))
    assert told(gone) == [(-1, Reason.LOST, -1)]
    refused = single(conflict=5)
    assert not refused.settle(TransactionId(5))
    assert told(refused) == [(-1, Reason.LOCK, 5)]
    unsure = single(conflict=5)
    assert unsure.settle(TransactionId(4))
    assert told(unsure) == [(-1, Reason.LOST, -1)]


def test_a_batch_is_lost_row_by_row() -> None:
    committed, lock, ahead = Reason.COMMITTED, Reason.LOCK, Reason.AHEAD
    rows = batch([4, -1, -1, 5, -1], [committed, lock, ahead, committed, lock], [-1, 2, -1, -1, 5])
    assert rows.settle(TransactionId(4))
    assert told(rows) == [
        (4, committed, -1),
        (-1, lock, 2),
        (-1, ahead, -1),
        (-1, Reason.LOST, -1),
        (-1, Reason.LOST, -1),
    ]


def test_a_batch_of_which_nothing_is_lost() -> None:
    rows = batch([4, 5], [Reason.COMMITTED] * 2, [-1, -1])
    assert not rows.settle(TransactionId(5))
    assert told(rows) == [(4, Reason.COMMITTED, -1), (5, Reason.COMMITTED, -1)]


def test_a_batch_that_is_refused_as_a_whole() -> None:
    rows = batch([], [], [])
    rows.refuse(Reason.OVERLOADED, 3)
    assert told(rows) == [(-1, Reason.OVERLOADED, -1)] * 3


def test_rows_lost_to_a_full_disk_are_told_as_such() -> None:
    rows = batch([4, 5], [Reason.COMMITTED] * 2, [-1, -1])
    assert rows.settle(TransactionId(4), Reason.NO_SPACE)
    assert told(rows) == [(4, Reason.COMMITTED, -1), (-1, Reason.NO_SPACE, -1)]
