"""Unit tests of `waltz_core.replication.replica_session`: one connection and what it owes."""

from random import Random

import pytest

from tests.unit.replication.model_storage import make_batch
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_session import ReplicaSession, ReplicaStage
from waltz_core.replication.session_events import CloseReplica, OpenReplica, SendToReplica
from waltz_core.replication.window import SessionWindow
from waltz_core.wire import messages as wire

LIMITS = SessionLimits()


@pytest.fixture
def outbox():
    return []


@pytest.fixture
def one(outbox):
    return ReplicaSession("storage0:1", 5, 2, outbox=outbox, limits=LIMITS)


def connected(one, stage=ReplicaStage.PREPARING):
    one.dial()
    one.stage = stage


def marked(one, mark=-1, chain=GENESIS_CHAIN):
    connected(one, ReplicaStage.REPAIRING)
    one.marked(mark, chain)


def test_requests_carry_session_partition_and_a_sequence_of_their_own(one, outbox):
    connected(one)
    one.send_request(wire.Heartbeat, now_ms=7)
    one.send_request(wire.LineageRequest, 3, 4, now_ms=8, ticket=9)
    assert outbox == [
        OpenReplica(5, "storage0:1"),
        SendToReplica(5, "storage0:1", wire.Heartbeat(5, 1, 2)),
        SendToReplica(5, "storage0:1", wire.LineageRequest(5, 2, 2, 3, 4)),
    ]
    assert one.oldest_ms == 7
    assert one.take(wire.LineageResponse(5, 2, 2, bytes(16), ())).ticket == 9
    assert one.take(wire.Nack(5, 1, 2, 1, 0, "")).message == wire.Heartbeat(5, 1, 2)
    assert one.oldest_ms is None


def test_redials_wait_longer_and_longer_and_start_again_after_success(one):
    waits = []
    for _ in range(8):
        connected(one)
        one.lost(1000, Random(1))
        waits.append(one.redial_at_ms - 1000)
    assert waits[0] <= LIMITS.redial_ms_min
    assert LIMITS.redial_ms_max // 2 <= waits[-1] <= LIMITS.redial_ms_max
    marked(one)
    one.lost(1000, Random(1))
    assert one.redial_at_ms - 1000 <= LIMITS.redial_ms_min


@pytest.mark.parametrize(
    ("kind", "fields", "tainted"),
    [
        (wire.Prepare, (bytes(16),) * 3 + (1,), False),
        (wire.LineageRequest, (0, 1), False),
        (wire.RangeRaw, (0, 1, 9, 0, True, False), False),
        (wire.Truncate, (0, 0, bytes(16)), True),
        (wire.SetLowWaterMark, (0, bytes(16)), True),
        (wire.AppendRaw, (0, b"", b"", 0, bytes(16), ()), True),
        (wire.Repair, (0, b"", b"", 0), True),
    ],
)
def test_a_connection_with_a_change_in_flight_is_not_replaced(one, kind, fields, tainted):
    connected(one)
    one.send_request(kind, *fields, now_ms=1)
    one.lost(2, Random(1))
    assert one.is_tainted is tainted


def test_a_marked_replica_does_not_return_into_the_session(one):
    marked(one)
    one.lost(2, Random(1))
    assert one.is_tainted


def test_closing_is_reported_once_and_not_for_a_lost_connection(one, outbox):
    connected(one)
    one.close()
    one.close()
    assert outbox[1:] == [CloseReplica(5, "storage0:1")]
    one.dial()
    one.is_broken = True
    one.close()
    assert len(outbox) == 3


def test_appends_follow_one_another_and_count_until_they_are_answered(one, outbox):
    marked(one)
    window = SessionWindow(-1, GENESIS_CHAIN)
    first = window.add(make_batch(0, [1, 2], 7), 5, 1)
    second = window.add(make_batch(2, [3], 7)._replace(locks=b"lock"), 5, 1)
    one.append_flight(first, 1)
    one.append_flight(second, 1)
    size = first.size_bytes + second.size_bytes + len(second.locks)
    assert (one.next_id, one.next_chain, one.unanswered_bytes) == (3, window.chain, size)
    sent = outbox[-2].message
    assert (sent.first, sent.chain_before, sent.lineage) == (0, GENESIS_CHAIN, (first.entry,))
    assert [each.message.locks for each in outbox[-2:]] == [b"", second.locks]
    assert second.locks
    request = one.take(wire.Appended(5, 1, 2, 1))
    one.appended(request.message, wire.Appended(5, 1, 2, 1))
    assert one.synced_last == 1
    assert one.unanswered_bytes == second.size_bytes + len(second.locks)


@pytest.mark.parametrize("limits", [{"lag_count_max": 2}, {"lag_bytes_max": 90}])
def test_a_replica_is_behind_when_too_much_or_too_many_are_unanswered(outbox, limits):
    one = ReplicaSession("storage0:1", 5, 2, outbox=outbox, limits=SessionLimits(**limits))
    marked(one)
    window = SessionWindow(-1, GENESIS_CHAIN)
    for first in (0, 1):
        assert not one.is_lagging
        one.append_flight(window.add(make_batch(first, [1], 7), 5, 1), 1)
    assert one.is_lagging
    one.take(wire.Appended(5, 1, 2, 0))
    assert not one.is_lagging


def test_a_group_of_appends_may_be_answered_with_the_last_id_at_once(one):
    marked(one)
    window = SessionWindow(-1, GENESIS_CHAIN)
    one.append_flight(window.add(make_batch(0, [1], 7), 5, 1), 1)
    one.append_flight(window.add(make_batch(1, [2], 7), 5, 1), 1)
    for sequence in (1, 2):
        answer = wire.Appended(5, sequence, 2, 1)
        one.appended(one.take(answer).message, answer)
        assert one.synced_last == 1
