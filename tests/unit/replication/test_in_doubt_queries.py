"""Unit tests of `waltz_core.replication.in_doubt_queries`: requests, and what answers prove."""

from types import SimpleNamespace

import pytest

from waltz_core import errors
from waltz_core.errors import BeforeLogStart
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED, LineageEntry
from waltz_core.replication.in_doubt_queries import IN_DOUBT_CORRELATION_ID, InDoubtQueries
from waltz_core.replication.session_claim import InDoubtIds
from waltz_core.replication.session_events import SessionSettled
from waltz_core.wire.messages import LineageRequest, LineageResponse


class Replica:
    """Records the requests."""

    replica = "a:1"

    def __init__(self):
        self.supplier = []

    def send_request(self, kind, first, last, *, now_ms, correlation_id):
        assert (kind, correlation_id) == (LineageRequest, IN_DOUBT_CORRELATION_ID)
        self.supplier.append((first, last))


def queries_of(mark, *others, follows_own_session=True, in_doubt=None):
    claim = SimpleNamespace(
        session_id=9, follows_own_session=follows_own_session, archived_mark=None, in_doubt=in_doubt
    )
    replica = Replica()
    return InDoubtQueries(claim, mark, [replica, *others]), replica


def lineage(*entries):
    """Return an answer of batches (first, last, session, stamp)."""
    batches = [LineageEntry(*entry, GENESIS_CHAIN) for entry in entries]
    return LineageResponse(9, 1, 0, GENESIS_CHAIN, batches)


def test_in_doubt_queries_read_the_last_commit_stamp_and_then_the_rows_in_doubt_in_windows():
    past, replica = queries_of(9, follows_own_session=False, in_doubt=InDoubtIds(7, 3, 8))
    past.begin(0)
    past.on_lineage_received(replica, lineage((9, 9, 8, 777)), 0)
    past.on_lineage_received(replica, lineage((7, 7, 8, 770), (8, 8, 8, 775)), 0)
    past.on_lineage_received(replica, lineage((4, 5, 7, 700), (6, 6, 7, 710)), 0)
    assert replica.supplier == [(9, 9), (4, 8), (4, 6)]
    assert past.outcome == SessionSettled(9, 6, 777)


def test_an_answer_without_batches_is_rejected():
    past, replica = queries_of(5, follows_own_session=False)
    past.begin(0)
    with pytest.raises(errors.RemoteProtocolError):
        past.on_lineage_received(replica, lineage(), 0)
    assert past.outcome is None


def test_reconstructed_batches_do_not_prove_that_a_session_has_no_records():
    other = Replica()
    past, replica = queries_of(9, other, in_doubt=InDoubtIds(7, 3, 8))
    past.begin(0)
    past.on_lineage_received(replica, lineage((6, 6, 7, 710), (7, 8, 7, 720)), 0)
    past.on_lineage_received(replica, lineage((4, 5, RECONSTRUCTED, 0)), 0)
    assert past.outcome is None
    past.on_lineage_received(other, lineage((4, 5, 7, 700), (6, 6, 7, 710), (7, 8, 7, 720)), 0)
    assert (replica.supplier, other.supplier) == ([(4, 8), (4, 5)], [(4, 8)])
    assert past.outcome == SessionSettled(9, 8, 0)


def test_a_session_is_not_settled_if_its_batches_are_lost():
    past, replica = queries_of(5, follows_own_session=False)
    past.begin(0)
    with pytest.raises(errors.RemoteProtocolError, match="has lost the batches"):
        past.on_lineage_received(replica, lineage((4, 5, RECONSTRUCTED, 0)), 0)
    assert past.outcome is None


def test_batches_that_have_expired_have_an_unknown_outcome():
    past, replica = queries_of(9, in_doubt=InDoubtIds(7, 3, 8))
    past.begin(0)
    assert replica.supplier == [(4, 8)]
    assert past.on_batches_unreadable(BeforeLogStart("gone"), 0)
    assert past.outcome == SessionSettled(9, 3, 0, has_unknown_outcomes=True)


def test_a_commit_stamp_below_the_start_of_the_log_makes_no_outcome_unknown():
    past, _ = queries_of(9, follows_own_session=False, in_doubt=InDoubtIds(7, 3, 8))
    past.begin(0)
    assert not past.on_batches_unreadable(BeforeLogStart("gone"), 0)
    assert past.outcome is None
