"""Unit tests of `waltz_core.replication.replica_session`: a connection and its requests."""

from random import Random

import pytest

from tests.unit.replication.model_storage import make_batch
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_session import ReplicaSession, ReplicaStage
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
    one.on_mark_written(mark, chain)


def test_redials_back_off_and_the_backoff_resets_after_success(one):
    waits = []
    for _ in range(8):
        connected(one)
        one.on_connection_lost(1000, Random(1))
        waits.append(one.redial_at_ms - 1000)
    assert waits[0] <= LIMITS.redial_ms_min
    assert LIMITS.redial_ms_max // 2 <= waits[-1] <= LIMITS.redial_ms_max
    marked(one)
    one.on_connection_lost(1000, Random(1))
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
    one.on_connection_lost(2, Random(1))
    assert one.cannot_rejoin is tainted


@pytest.mark.parametrize("limits", [{"lag_count_max": 2}, {"lag_bytes_max": 90}])
def test_a_replica_lags_if_unanswered_bytes_or_batches_exceed_a_limit(outbox, limits):
    one = ReplicaSession("storage0:1", 5, 2, outbox=outbox, limits=SessionLimits(**limits))
    marked(one)
    window = SessionWindow(-1, GENESIS_CHAIN)
    for first in (0, 1):
        assert not one.is_lagging
        one.append_from_window(window.add(make_batch(first, [1], 7), 5, 1), 1)
    assert one.is_lagging
    one.take_request(wire.Appended(5, 1, 2, 0))
    assert not one.is_lagging


def test_one_answer_may_acknowledge_a_group_of_appends(one):
    marked(one)
    window = SessionWindow(-1, GENESIS_CHAIN)
    one.append_from_window(window.add(make_batch(0, [1], 7), 5, 1), 1)
    one.append_from_window(window.add(make_batch(1, [2], 7), 5, 1), 1)
    for sequence in (1, 2):
        answer = wire.Appended(5, sequence, 2, 1)
        one.on_append_synced(one.take_request(answer).message, answer)
        assert one.synced_last == 1
