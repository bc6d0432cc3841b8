"""The outcomes that the tracker derives from answers, feeds and read-back."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.client.scenarios import (
    CLIENT,
    PARTITION,
    committed_result,
    feed_headers,
    headers,
    req,
    result,
    submission,
)
from waltz_core import errors
from waltz_core.client.stream import outcome_tracker
from waltz_core.client.stream.outcome_tracker import OutcomeTracker, PendingSubmission
from waltz_core.records.raw_records import ONE_BY_ONE_MAX
from waltz_core.records.record import BEFORE_FIRST, TransactionId
from waltz_core.wire.messages import RowOutcomeCode


def register_submission(
    tracker: OutcomeTracker, token: int, sequence: int, rows: int = 1, mark: int = 9
) -> PendingSubmission:
    pending = PendingSubmission(
        submission(token, rows), req(sequence), 1, 1, TransactionId(mark), 100
    )
    tracker.register(pending)
    return pending


def new_tracker() -> OutcomeTracker:
    return OutcomeTracker(CLIENT, PARTITION)


def test_sequence_numbers_are_not_used_twice():
    tracker = new_tracker()
    register_submission(tracker, 1, 1, rows=3)
    with pytest.raises(AssertionError):
        register_submission(tracker, 2, 3)


def test_an_answer_belongs_to_the_submission_with_exactly_its_request_id():
    tracker = new_tracker()
    pending = register_submission(tracker, 1, 5)
    assert tracker.find(req(5)) is pending
    assert tracker.find(req(5, generation=1)) is None
    assert tracker.find(req(6)) is None
    assert tracker.on_answered(committed_result(req(5, generation=1), 10)) is None
    assert tracker.on_answered(committed_result(req(5), 10))[0] is pending
    assert tracker.on_answered(committed_result(req(5), 10)) is None


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "row",
    [(-1, RowOutcomeCode.COMMITTED, -1), (7, RowOutcomeCode.LOST, -1)],
    ids=["no id", "an id"],
)
def test_an_answer_that_contradicts_itself_is_not_trusted(rows, row):
    tracker = new_tracker()
    register_submission(tracker, 1, 1, rows=rows)
    with pytest.raises(errors.RemoteProtocolError):
        tracker.on_answered(result(req(1), *[row] * rows, mark=9))
    assert len(tracker) == 1


def test_the_log_takes_precedence_over_an_answer():
    tracker = new_tracker()
    register_submission(tracker, 1, 1, rows=2)
    tracker.match_feed(TransactionId(20), feed_headers(req(5, 0, 99), req(2)))
    _, outcome = tracker.on_answered(result(req(1), *[(-1, RowOutcomeCode.LOST, -1)] * 2, mark=9))
    assert outcome.reasons.tolist() == [RowOutcomeCode.LOST, RowOutcomeCode.COMMITTED]
    assert outcome.transaction_ids.tolist() == [-1, 21]
    assert outcome.high_water_mark == 21


def test_the_tracker_ignores_rows_of_other_clients():
    tracker = new_tracker()
    pending = register_submission(tracker, 1, 1, rows=2)
    foreign_ids = (req(1, 0, 99), req(1, 1), req(3), req(0), req(1)._replace(partition_id=4))
    assert tracker.match_headers(TransactionId(10), 5, headers(10, *foreign_ids))
    tracker.match_feed(TransactionId(10), feed_headers(*foreign_ids))
    assert pending.found_ids is None
    assert pending.known_outcome(BEFORE_FIRST) is None


def test_a_submission_is_not_settled_while_only_a_part_of_its_rows_is_in_the_log():
    tracker = new_tracker()
    pending = register_submission(tracker, 1, 1, rows=2)
    tracker.note_mount_mark(TransactionId(15))
    tracker.match_feed(TransactionId(12), feed_headers(req(1)))
    assert pending.known_outcome(BEFORE_FIRST) is None, "the other row may also be in the log"
    assert tracker.unresolved_range() == (10, 15)


def test_unanswered_appends_are_read_back_up_to_the_last_proven_mark():
    tracker = new_tracker()
    register_submission(tracker, 1, 1, mark=9)
    tracker.note_mount_mark(TransactionId(12))
    register_submission(tracker, 2, 2, mark=12)
    tracker.note_mount_mark(TransactionId(20))
    assert tracker.unresolved_range() == (10, 20)


def test_a_proven_mark_does_not_settle_later_appends():
    tracker = new_tracker()
    register_submission(tracker, 1, 1, mark=9)
    tracker.note_mount_mark(TransactionId(12))
    later_submission = register_submission(tracker, 2, 2, mark=12)
    assert tracker.unresolved_range() == (10, 12)
    outcomes = tracker.take_final_outcomes(TransactionId(12))
    assert [pending.submission.token for pending, _ in outcomes] == [1]
    assert list(tracker) == [later_submission]
    assert tracker.unresolved_range() is None


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_every_row_of_every_submission_is_found_at_its_id(sizes, order):
    tracker = new_tracker()
    rows = []
    sequence = 1
    for token, size in enumerate(sizes):
        register_submission(tracker, token, sequence, rows=size, mark=-1)
        rows += [req(sequence + i) for i in range(size)]
        sequence += size
    # The log has rows of several clients; the rows of each client are in order.
    log = [row for row in rows if order.random() < 0.7]
    for _ in range(order.randrange(5)):
        log.insert(order.randrange(len(log) + 1), req(1, 0, 99))
    tracker.note_mount_mark(TransactionId(len(log) - 1))
    next_id = 0
    while next_id < len(log):
        count = order.randrange(1, 5)
        part = log[next_id : next_id + count]
        assert tracker.match_headers(TransactionId(next_id), len(part), headers(next_id, *part))
        next_id += len(part)
    outcomes = tracker.take_final_outcomes(TransactionId(len(log) - 1))
    assert [pending.submission.token for pending, _ in outcomes] == list(range(len(sizes)))
    ids = np.concatenate([outcome.transaction_ids for _, outcome in outcomes]).tolist()
    assert ids == [log.index(row) if row in log else -1 for row in rows]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    rows=st.lists(
        st.builds(req, st.integers(0, 14), st.integers(0, 1), st.sampled_from((CLIENT, 99))),
        max_size=12,
    ),
)
def test_a_short_feed_batch_gives_the_same_outcomes_as_a_long_batch(sizes, rows):
    found = []
    for limit in (ONE_BY_ONE_MAX, -1):
        tracker, sequence = new_tracker(), 1
        for token, size in enumerate(sizes):
            register_submission(tracker, token, sequence, rows=size)
            sequence += size
        with mock.patch.object(outcome_tracker, "ONE_BY_ONE_MAX", limit):
            try:
                tracker.match_feed(TransactionId(20), feed_headers(*rows))
            except errors.DataLoss as error:
                found.append(str(error))
            else:
                found.append(
                    [None if e.found_ids is None else e.found_ids.tolist() for e in tracker]
                )
    assert found[0] == found[1]
