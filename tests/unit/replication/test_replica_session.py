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
def session(outbox):
    return ReplicaSession("storage0:1", 5, 2, outbox=outbox, limits=LIMITS)


def connect(session, stage=ReplicaStage.PREPARING):
    session.dial()
    session.stage = stage


def write_mark(session, mark=-1, chain=GENESIS_CHAIN):
    connect(session, ReplicaStage.REPAIRING)
    session.on_mark_written(mark, chain)


def test_redials_back_off_and_the_backoff_resets_after_success(session):
    waits = []
    for _ in range(8):
        connect(session)
        session.on_connection_lost(1000, Random(1))
        waits.append(session.redial_at_ms - 1000)
    assert waits[0] <= LIMITS.redial_ms_min
    assert LIMITS.redial_ms_max // 2 <= waits[-1] <= LIMITS.redial_ms_max
    write_mark(session)
    session.on_connection_lost(1000, Random(1))
    assert session.redial_at_ms - 1000 <= LIMITS.redial_ms_min


@pytest.mark.parametrize(
    ("kind", "fields", "damaged"),
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
def test_a_replica_cannot_rejoin_if_its_connection_is_lost_during_a_request_that_writes(
    session, kind, fields, damaged
):
    connect(session)
    session.send_request(kind, *fields, now_ms=1)
    session.on_connection_lost(2, Random(1))
    assert session.cannot_rejoin is damaged


@pytest.mark.parametrize("limits", [{"lag_count_max": 2}, {"lag_bytes_max": 90}])
def test_a_replica_lags_if_unanswered_bytes_or_batches_exceed_a_limit(outbox, limits):
    session = ReplicaSession("storage0:1", 5, 2, outbox=outbox, limits=SessionLimits(**limits))
    write_mark(session)
    window = SessionWindow(-1, GENESIS_CHAIN)
    for first in (0, 1):
        assert not session.is_lagging
        session.append_from_window(window.add(make_batch(first, [1], 7), 5, 1), 1)
    assert session.is_lagging
    session.take_request(wire.Appended(5, 1, 2, 0))
    assert not session.is_lagging


def test_one_answer_may_acknowledge_a_group_of_appends(session):
    write_mark(session)
    window = SessionWindow(-1, GENESIS_CHAIN)
    session.append_from_window(window.add(make_batch(0, [1], 7), 5, 1), 1)
    session.append_from_window(window.add(make_batch(1, [2], 7), 5, 1), 1)
    for sequence in (1, 2):
        answer = wire.Appended(5, sequence, 2, 1)
        session.on_append_synced(session.take_request(answer).message, answer)
        assert session.synced_last == 1
