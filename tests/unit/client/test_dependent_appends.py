"""The in-flight predecessors that a dependent append claims."""

from dataclasses import replace

import pytest

from waltz_core import errors
from waltz_core.client import MSGPACK
from waltz_core.client.model import predecessors
from waltz_core.client.model.predecessors import NO_PREDECESSORS
from waltz_core.records.checksum import crc32
from waltz_core.records.record import NO_SESSION, RECORD_PREFIX, PartitionId, ReqId
from waltz_core.wire.messages import Predecessors

SESSION, MOUNT = 4, 2
LOCKS = (31, 32)
REQ = ReqId(7, 1, PartitionId(0), 1)


def record(transaction_id: int) -> bytes:
    data = MSGPACK.serialize(transaction_id)
    head = RECORD_PREFIX.pack(transaction_id, REQ.to_bytes(), 3, len(data), crc32(data)) + data
    return head + crc32(head).to_bytes(4, "big")


def message(*ids: int, last: int) -> Predecessors:
    records = [record(transaction_id) for transaction_id in ids]
    lengths = b"".join(len(each).to_bytes(4, "big") for each in records)
    return Predecessors(REQ, SESSION, 0, last, lengths, b"".join(records))


def ids(found) -> list[int]:
    return [each.transaction_id for each in found]


def test_a_client_that_has_received_no_predecessors_sends_none():
    assert not NO_PREDECESSORS.has_received_predecessors
    assert NO_PREDECESSORS.mark_and_state(5) == (5, NO_PREDECESSORS)
    assert NO_PREDECESSORS.predecessors_above(5) == ()


def test_newly_received_predecessors_are_added_to_the_earlier_ones():
    first = NO_PREDECESSORS.with_predecessors(message(6, 8, last=9), 5, MOUNT, LOCKS)
    assert (first.session_id, first.mount, first.base_mark, first.mark) == (SESSION, MOUNT, 5, 9)
    assert ids(first.predecessors) == [6, 8]
    assert first.predecessors[0].value() == 6
    more = first.with_predecessors(message(11, last=11), 9, MOUNT, LOCKS)
    assert (more.base_mark, more.mark) == (5, 11)
    assert ids(more.predecessors) == [6, 8, 11]
    assert ids(more.predecessors_above(8)) == [11]


def test_predecessors_are_sent_only_with_a_mark_that_they_continue():
    follow = NO_PREDECESSORS.with_predecessors(message(6, last=9), 5, MOUNT, LOCKS)
    assert follow.mark_and_state(5) == (9, follow)
    assert follow.mark_and_state(8) == (9, follow)
    assert follow.mark_and_state(4) == (4, NO_PREDECESSORS)  # transaction 5 is not applied
    assert follow.mark_and_state(9) == (9, NO_PREDECESSORS)  # all predecessors are in the log
    assert follow.mark_and_state(12) == (12, NO_PREDECESSORS)


def test_an_append_with_a_lock_of_unknown_predecessors_is_sent_without_predecessors():
    follow = NO_PREDECESSORS.with_predecessors(message(6, last=9), 5, MOUNT, LOCKS)
    assert follow.mark_and_state(5, LOCKS[:1]) == (9, follow)
    mark, claimed = follow.mark_and_state(5, (*LOCKS, 33))
    assert mark == 5
    assert (claimed.session_id, claimed.mount, claimed.predecessors) == (SESSION, MOUNT, ())
    # After a rejection by a lock the client receives all predecessors again.
    replaced = claimed.with_predecessors(message(6, 7, last=10), 5, MOUNT, (*LOCKS, 33))
    assert (replaced.base_mark, replaced.mark, ids(replaced.predecessors)) == (5, 10, [6, 7])
    assert replaced.mark_and_state(5, (*LOCKS, 33)) == (10, replaced)


def test_predecessors_are_kept_only_for_the_last_requested_locks():
    first = NO_PREDECESSORS.with_predecessors(message(6, last=9), 5, MOUNT, LOCKS)
    fewer = first.with_predecessors(message(11, last=11), 9, MOUNT, LOCKS[:1])
    assert fewer.mark_and_state(5, LOCKS[:1]) == (11, fewer)
    assert fewer.mark_and_state(5, LOCKS)[0] == 5


def test_an_empty_list_of_predecessors_still_raises_the_mark_of_the_append():
    follow = NO_PREDECESSORS.with_predecessors(message(last=9), 5, MOUNT, LOCKS)
    assert follow.predecessors == ()
    assert follow.mark_and_state(5) == (9, follow)


@pytest.mark.parametrize("follow", [(5,), (4, 6), (7, 6), (6, 6), (6, 10)])
def test_predecessors_with_unexpected_ids_are_rejected(follow):
    with pytest.raises(errors.RemoteProtocolError, match="ascending transaction IDs from 5 to 9"):
        NO_PREDECESSORS.with_predecessors(message(*follow, last=9), 5, MOUNT, LOCKS)


def test_too_many_predecessors_are_dropped(monkeypatch):
    monkeypatch.setattr(predecessors, "PREDECESSORS_MAX", 3)
    follow = NO_PREDECESSORS.with_predecessors(message(6, 7, last=7), 5, MOUNT, LOCKS)
    assert ids(follow.predecessors) == [6, 7]
    assert follow.with_predecessors(message(8, 9, last=9), 7, MOUNT, LOCKS) is NO_PREDECESSORS
    assert NO_PREDECESSORS.session_id == NO_SESSION


def test_a_predecessor_has_the_values_of_its_record():
    (predecessor,) = NO_PREDECESSORS.with_predecessors(
        message(3, last=3), 2, MOUNT, LOCKS
    ).predecessors
    assert predecessor == (3, REQ, 3, MSGPACK.serialize(3))


@pytest.mark.parametrize("at", range(len(record(6))))
def test_predecessors_with_changed_bytes_are_rejected(at):
    whole = message(5, 6, last=9)
    wrong = bytearray(whole.records)
    wrong[len(record(5)) + at] ^= 1
    with pytest.raises(errors.RemoteProtocolError, match="expected a record at byte"):
        NO_PREDECESSORS.with_predecessors(replace(whole, records=bytes(wrong)), 4, MOUNT, LOCKS)


@pytest.mark.parametrize("lengths", [b"", b"\0\0\0\0", b"\0\0\xff\xff", b"\xff\xff\xff\xff"])
def test_predecessors_with_impossible_lengths_are_rejected(lengths):
    whole = message(6, last=9)
    with pytest.raises(errors.RemoteProtocolError, match="a record at byte 0, found other bytes"):
        NO_PREDECESSORS.with_predecessors(replace(whole, lengths=lengths), 4, MOUNT, LOCKS)
