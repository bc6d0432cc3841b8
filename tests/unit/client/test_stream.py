"""The stream machine of one partition, event by event."""

from dataclasses import replace
from random import Random

import pytest

from tests.unit.client.scenarios import (
    PARTITION,
    SETTINGS,
    Scenario,
    committed_result,
    feed_batch,
    headers,
    range_data,
    req,
    result,
    submission,
)
from waltz_core import errors
from waltz_core.client.stream import partition_stream, stream_events
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.client.stream.readback import ReadBack
from waltz_core.client.stream.stream_events import Phase
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED, Generation, LineageEntry
from waltz_core.wire import messages as m


def outcomes_by_token(effects):
    return {e.token: e.outcome for e in effects if isinstance(e, stream_events.SubmissionSettled)}


def rejection_errors(effects):
    return {e.token: e.error for e in effects if isinstance(e, stream_events.SubmissionRejected)}


# ---------------------------------------------------------------------------------------------
# mounting and sending


def test_the_first_append_opens_a_link_and_mounts_the_partition():
    scenario = Scenario()
    assert scenario.step(stream_events.SendAppends(submission(1))) == [
        stream_events.OpenLink(1, ())
    ]
    mount = scenario.open_link(generation=4)
    assert mount == m.MountWriter(req(-1, 4), 1, m.LATEST_MARK, wants_feed=False)
    assert scenario.answer_mount(mount, 9) == [
        stream_events.MarkAdvanced(9),
        stream_events.StreamReady(9),
        stream_events.SendOnLink(
            1, m.AppendRequest(req(1, 4), -1, (1,), (2,), (3,), 5, b"data", 99)
        ),
    ]


def test_each_row_of_a_batch_uses_one_sequence_number():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1, rows=10)))
    assert scenario.sent_messages() == [m.AppendBatch(req(1), -1, b"data", 99)]
    scenario.step(stream_events.SendAppends(submission(2)))
    assert scenario.sent_messages()[0].req_id == req(11)


def test_an_answer_settles_its_submission_and_moves_the_mark():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1, rows=2)))
    effects = scenario.receive(
        result(req(1), (5, m.RowOutcomeCode.COMMITTED, -1), (-1, m.RowOutcomeCode.LOCK, 4), mark=5)
    )
    assert effects[0] == stream_events.MarkAdvanced(5)
    outcome = outcomes_by_token(effects)[1]
    assert outcome.transaction_ids.tolist() == [5, -1]
    assert outcome.reasons.tolist() == [m.RowOutcomeCode.COMMITTED, m.RowOutcomeCode.LOCK]
    assert outcome.conflicting.tolist() == [-1, 4]
    assert outcome.high_water_mark == 5
    assert outcome.committed_count == 1
    assert not scenario.stream.has_pending


def test_appends_in_flight_stay_within_the_servers_limit():
    scenario = Scenario()
    scenario.step(stream_events.MountPartition())
    mount = scenario.open_link()
    scenario.receive(m.Mounted(mount.req_id, 1, -1, 100, 1_000, 25))
    scenario.step(stream_events.SendAppends(submission(1, data=b"x" * 20)))
    assert len(scenario.sent_messages()) == 1
    scenario.step(stream_events.SendAppends(submission(2, data=b"x" * 20)))
    assert scenario.sent_messages() == []
    scenario.receive(committed_result(req(1), 0))
    assert [message.req_id for message in scenario.sent_messages()] == [req(2)]


def test_an_append_over_the_servers_frame_limit_is_rejected_before_it_is_sent():
    scenario = Scenario().mount_partition()
    effects = scenario.step(stream_events.SendAppends(submission(1, rows=101)))
    assert isinstance(rejection_errors(effects)[1], errors.TooLarge)
    effects = scenario.step(stream_events.SendAppends(submission(2, data=b"x" * 1_001)))
    assert isinstance(rejection_errors(effects)[2], errors.TooLarge)
    assert not scenario.stream.has_pending


def test_waiting_appends_do_not_overtake_the_rows_of_a_large_submission():
    """The rows are sent again in two submissions, after all waiting appends."""
    scenario = Scenario()
    for token, rows in ((1, 101), (2, 1), (3, 2)):
        one = replace(submission(token, rows=rows), keeps_order=token != 3)
        scenario.step(stream_events.SendAppends(one))
    effects = scenario.answer_mount(scenario.open_link(), -1)
    assert isinstance(rejection_errors(effects)[1], errors.TooLarge)
    assert outcomes_by_token(effects)[2].reasons.tolist() == [m.RowOutcomeCode.LOST]
    # The large submission is not ordered.
    assert [message.req_id for message in scenario.sent_messages(m.AppendBatch)] == [req(1)]
    assert scenario.sent_messages(m.AppendRequest) == []


def test_a_requested_mount_does_not_wait_for_an_append():
    scenario = Scenario()
    assert scenario.step(stream_events.MountPartition()) == [stream_events.OpenLink(1, ())]
    assert scenario.answer_mount(scenario.open_link(), 3)[-1] == stream_events.StreamReady(3)
    assert scenario.step(stream_events.MountPartition()) == []


# ---------------------------------------------------------------------------------------------
# a broken link


def in_doubt(rows: int = 2) -> Scenario:
    """Return a stream whose link broke after a submission at mark 9."""
    scenario = Scenario().mount_partition(mark=9)
    scenario.step(stream_events.SendAppends(submission(1, rows=rows)))
    assert scenario.step(stream_events.LinkLost(1, "cut")) == [stream_events.OpenLink(2, (1,))]
    return scenario


def test_rows_in_doubt_are_read_back_from_the_old_mark_to_the_mark_of_the_new_mount():
    scenario = in_doubt()
    scenario.step(stream_events.SendAppends(submission(2)))
    assert scenario.last_effects == []  # invariant 1: rows in doubt are not settled yet
    mount = scenario.open_link(number=2, generation=1)
    effects = scenario.answer_mount(mount, 12, link=2)
    request = m.RangeRequest(req(-3, 1), 10, 12, 2_800, m.RangeForm.HEADERS, ())
    assert effects == [stream_events.MarkAdvanced(12), stream_events.SendOnLink(2, request)]
    effects = scenario.receive(
        range_data(request, req(1, 1, 99), req(2), req(2, 1), mark=12), link=2
    )
    outcome = outcomes_by_token(effects)[1]
    assert outcome.reasons.tolist() == [m.RowOutcomeCode.LOST, m.RowOutcomeCode.COMMITTED]
    assert outcome.transaction_ids.tolist() == [-1, 11]
    assert [message.req_id for message in scenario.sent_messages()] == [req(3, 1)]


def test_ordered_appends_do_not_overtake_resent_ones():
    scenario = Scenario().mount_partition(mark=9)
    scenario.step(stream_events.SendAppends(replace(submission(1), keeps_order=True)))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.step(stream_events.SendAppends(replace(submission(2), keeps_order=True)))
    scenario.step(stream_events.SendAppends(submission(3)))
    effects = scenario.answer_mount(scenario.open_link(number=2), 9, link=2)
    outcomes = outcomes_by_token(effects)
    assert {token: outcome.reasons.tolist() for token, outcome in outcomes.items()} == {
        1: [m.RowOutcomeCode.LOST],
        2: [m.RowOutcomeCode.LOST],
    }
    assert [message.req_id for message in scenario.sent_messages()] == [
        req(2)
    ]  # the third is ignored


def test_rows_in_doubt_are_read_back_in_several_requests_up_to_the_mark():
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 12, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    answer = range_data(request, req(5, 0, 99), req(1), mark=12)
    assert scenario.receive(replace(answer, req_id=req(-99)), link=2) == []  # not requested
    scenario.receive(answer, link=2)
    (again,) = scenario.sent_messages(m.RangeRequest)
    assert (again.first, again.last) == (12, 12)
    effects = scenario.receive(range_data(again, req(2), mark=12), link=2)
    assert outcomes_by_token(effects)[1].transaction_ids.tolist() == [11, 12]


def log_start_error(range_request, first):
    code = errors.BeforeLogStart.code
    return m.ErrorResponse(
        range_request.req_id, code, False, f"expected IDs from {first} on", first
    )


def test_rows_in_doubt_below_the_start_of_the_log_have_an_unknown_outcome():
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 12, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    effects = scenario.receive(log_start_error(request, 11), link=2)
    assert outcomes_by_token(effects) == {}
    (rejected,) = [e for e in effects if isinstance(e, stream_events.SubmissionRejected)]
    assert isinstance(rejected.error, errors.OutcomeUnknown)
    assert "because the log begins after them" in str(rejected.error)
    assert scenario.stream.phase is Phase.READY


def test_rows_in_doubt_above_the_start_of_the_log_are_read_back():
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 12, link=2)
    tracker = scenario.stream._tracker
    assert not tracker.submissions_in_doubt_below(10), "the first row in doubt may have ID 10"
    assert [each.req_id for each in tracker.submissions_in_doubt_below(11)] == [req(1)]


def test_a_chain_below_the_start_of_the_log_is_not_compared():
    readback = ReadBack(2_800)
    readback.begin((10, 12), (4, GENESIS_CHAIN))
    assert (readback.request(req(-1)).first, readback.on_before_log_start()) == (4, False)
    assert (readback.request(req(-2)).first, readback.on_before_log_start()) == (10, True)


def test_without_later_records_all_unanswered_appends_are_lost():
    scenario = in_doubt()
    effects = scenario.answer_mount(scenario.open_link(number=2), 9, link=2)
    assert outcomes_by_token(effects)[1].reasons.tolist() == [m.RowOutcomeCode.LOST] * 2
    assert scenario.stream.phase is Phase.READY


def test_the_range_to_read_back_stays_the_same_if_the_next_link_breaks():
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 12, link=2)
    scenario.step(stream_events.LinkLost(2, "cut"))
    scenario.wake(scenario.stream.wake_at_ms)
    scenario.answer_mount(scenario.open_link(number=3), 40, link=3)
    (request,) = scenario.sent_messages(m.RangeRequest)
    assert (request.first, request.last) == (10, 12)


def test_an_answer_on_the_old_link_settles_its_rows():
    scenario = in_doubt()
    scenario.open_link(number=2)
    effects = scenario.step(stream_events.MessageReceived(1, committed_result(req(1), 10, 11)))
    assert outcomes_by_token(effects)[1].transaction_ids.tolist() == [10, 11]


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda data: replace(data, first=11),
        lambda data: replace(data, count=1),
        lambda data: replace(data, count=0, next=data.first, records=b""),
        lambda data: replace(data, next=data.next + 1),
        lambda data: replace(data, form=m.RangeForm.WHOLE),
        lambda data: replace(data, records=data.records[:-1]),
        lambda data: replace(data, records=data.records[28:] + data.records[:28]),
        lambda data: replace(data, first=11, next=13, records=headers(11, req(1), req(2))),
    ],
)
def test_headers_that_do_not_match_the_request_settle_no_row(corrupt):
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 11, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    effects = scenario.receive(corrupt(range_data(request, req(1), req(2), mark=11)), link=2)
    assert outcomes_by_token(effects) == {}
    assert scenario.stream.phase is Phase.WAITING


# ---------------------------------------------------------------------------------------------
# untrusted messages


def test_an_older_generation_is_not_mounted():
    scenario = Scenario()
    scenario.step(stream_events.MountPartition())
    scenario.answer_mount(scenario.open_link(generation=5), 3)
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.step(stream_events.LinkLost(1, "cut"))
    opening = scenario.last_effects[0]
    assert scenario.step(stream_events.LinkOpened(opening.attempt, 2, 4, 9)) == []
    assert scenario.stream.phase is Phase.WAITING


def test_a_mark_below_a_known_mark_is_rejected():
    scenario = in_doubt()
    effects = scenario.answer_mount(scenario.open_link(number=2), 8, link=2)
    assert outcomes_by_token(effects) == {}
    assert scenario.stream.phase is Phase.WAITING
    assert "is below the known one, 9" in scenario.stream.failure


def test_a_link_with_unanswered_appends_is_never_mounted_again():
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2), 9, link=2)
    # The rows in doubt are settled, but they may still be queued at the server for link 1.
    scenario.step(stream_events.SendAppends(submission(2)))
    scenario.step(stream_events.LinkLost(2, "cut"))
    scenario.wake(scenario.stream.wake_at_ms)
    opening = next(
        effect for effect in scenario.last_effects if isinstance(effect, stream_events.OpenLink)
    )
    assert set(opening.avoided_links) >= {2}
    with pytest.raises(AssertionError):
        scenario.step(stream_events.LinkOpened(opening.attempt, 2, 0, 99))


def test_a_link_with_an_abandoned_append_is_not_mounted_again():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    assert isinstance(
        rejection_errors(scenario.wake(SETTINGS.request_timeout_ms))[1], errors.OutcomeUnknown
    )
    assert scenario.step(stream_events.Subscribe(-1)) == [stream_events.OpenLink(2, (1,))]


def test_the_list_of_links_to_avoid_contains_no_broken_links():
    """A client that runs for years has many broken links."""
    scenario = Scenario().mount_partition()
    for number in range(1, 9):
        scenario.step(stream_events.SendAppends(submission(number)))
        scenario.step(stream_events.LinkLost(number, "cut"))
        if scenario.stream.phase is Phase.WAITING:
            scenario.wake(scenario.stream.wake_at_ms)
        scenario.answer_mount(scenario.open_link(number=number + 1), -1, link=number + 1)
        assert scenario.stream.phase is Phase.READY
    assert not scenario.stream._avoided_links


def test_a_stream_continues_after_the_loss_of_a_link_that_it_avoids():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.receive(m.ErrorResponse(req(1), errors.OutcomeUnknown.code, True, "?"))
    opening = scenario.last_effects[-1]
    assert opening == stream_events.OpenLink(2, (1,))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.answer_mount(scenario.open_link(number=2), 0, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    scenario.receive(range_data(request, req(1), mark=0), link=2)
    scenario.step(stream_events.SendAppends(submission(2)))
    scenario.step(stream_events.MessageReceived(2, committed_result(req(2), 1)))
    scenario.step(stream_events.LinkLost(2, "cut"))
    assert scenario.stream.phase is Phase.IDLE


# ---------------------------------------------------------------------------------------------
# errors in answer to an append


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.SessionLost("x"), m.RowOutcomeCode.LOST),
        (errors.Overloaded("x"), m.RowOutcomeCode.OVERLOADED),
        (errors.NoSpace("x"), m.RowOutcomeCode.NO_SPACE),
        (errors.TooLarge("x"), m.RowOutcomeCode.TOO_LARGE),
        (errors.ClientAheadOfLog("x"), m.RowOutcomeCode.AHEAD),
        (errors.NotOwned("x"), m.RowOutcomeCode.NOT_MOUNTED),
        (errors.GenerationMismatch("x"), m.RowOutcomeCode.GENERATION),
    ],
)
def test_a_definite_rejection_is_reported_for_every_row(error, reason):
    scenario = Scenario().mount_partition(mark=4)
    scenario.step(stream_events.SendAppends(submission(1, rows=3)))
    outcome = outcomes_by_token(scenario.reject(req(1), error))[1]
    assert outcome.reasons.tolist() == [reason] * 3
    assert outcome.high_water_mark == 4
    remounts = reason in (m.RowOutcomeCode.NOT_MOUNTED, m.RowOutcomeCode.GENERATION)
    assert (scenario.stream.phase is Phase.READY) is not remounts


def overloaded_error(req_id, retry_after_ms):
    code = errors.Overloaded.code
    return m.ErrorResponse(req_id, code, True, "over a limit", retry_after_ms=retry_after_ms)


def test_after_an_append_over_a_limit_the_next_mount_waits_for_the_servers_pause():
    scenario = Scenario().mount_partition()
    for token in (1, 2):
        scenario.step(stream_events.SendAppends(submission(token)))
    start_ms = scenario.now_ms
    effects = scenario.receive(overloaded_error(req(1), 4_000))
    assert outcomes_by_token(effects)[1].reasons.tolist() == [m.RowOutcomeCode.OVERLOADED]
    scenario.step(stream_events.SendAppends(submission(3)))
    assert scenario.sent_messages() == []  # the server expects a mount first
    scenario.receive(result(req(2), (-1, m.RowOutcomeCode.NOT_MOUNTED, -1), mark=-1))
    assert scenario.stream.phase is Phase.WAITING
    assert scenario.stream.failure == "over a limit"
    assert scenario.stream.wake_at_ms == start_ms + 4_000
    assert scenario.wake(start_ms + 4_000) == [stream_events.OpenLink(2, ())]
    scenario.answer_mount(scenario.open_link(number=1), -1)
    assert [message.req_id for message in scenario.sent_messages(m.AppendRequest)] == [req(3)]


def test_the_error_for_an_unsent_append_states_the_remaining_pause():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    timeout_ms = scenario.stream._settings.request_timeout_ms
    outcome = outcomes_by_token(scenario.receive(overloaded_error(req(1), timeout_ms + 5_000)))[1]
    assert outcome.retry_after_ms == timeout_ms + 5_000
    scenario.step(stream_events.SendAppends(submission(2)))
    error = rejection_errors(scenario.wake(scenario.now_ms + timeout_ms))[2]
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_ms == 5_000
    assert "(over a limit); the transaction is not in the log" in str(error)


def test_a_mount_over_a_limit_is_repeated_at_the_latest_after_the_request_timeout():
    scenario = Scenario()
    scenario.step(stream_events.MountPartition())
    (mount,) = scenario.open_link() and scenario.sent_messages(m.MountWriter)
    scenario.receive(overloaded_error(mount.req_id, 1 << 30))
    timeout_ms = scenario.stream._settings.request_timeout_ms
    assert scenario.stream.wake_at_ms == scenario.now_ms + timeout_ms
    # Another server has other limits.
    effects = scenario.step(stream_events.GenerationChanged(9))
    assert effects == [stream_events.OpenLink(2, ())]


def test_an_unknown_outcome_is_settled_by_the_log():
    scenario = Scenario().mount_partition(mark=4)
    scenario.step(stream_events.SendAppends(submission(1)))
    effects = scenario.reject(req(1), errors.OutcomeUnknown("the partition has moved"))
    assert effects == [stream_events.OpenLink(2, (1,))]
    scenario.answer_mount(scenario.open_link(number=2, generation=1), 5, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    effects = scenario.receive(range_data(request, req(1), mark=5), link=2)
    assert outcomes_by_token(effects)[1].transaction_ids.tolist() == [5]


def test_a_usage_error_is_returned_to_the_caller():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    error = rejection_errors(scenario.reject(req(1), errors.BadRequest("no Arrow")))[1]
    assert isinstance(error, errors.BadRequest)
    assert scenario.stream.phase is Phase.READY


def test_a_stream_that_lost_its_mount_awaits_all_answers_and_mounts_on_the_same_link():
    scenario = Scenario().mount_partition()
    for token in (1, 2):
        scenario.step(stream_events.SendAppends(submission(token)))
    scenario.receive(result(req(1), (-1, m.RowOutcomeCode.NOT_MOUNTED, -1), mark=-1))
    assert scenario.stream.phase is Phase.READY
    scenario.step(stream_events.SendAppends(submission(3)))
    assert scenario.sent_messages() == []  # the server would reject it, too
    effects = scenario.receive(result(req(2), (-1, m.RowOutcomeCode.NOT_MOUNTED, -1), mark=-1))
    assert effects[-1] == stream_events.OpenLink(2, ())
    scenario.answer_mount(scenario.open_link(number=1), -1)
    assert [message.req_id for message in scenario.sent_messages(m.AppendRequest)] == [req(3)]


def test_missing_answers_time_out():
    scenario = Scenario().mount_partition()
    for token in (1, 2):
        scenario.step(stream_events.SendAppends(submission(token)))
    scenario.receive(result(req(1), (-1, m.RowOutcomeCode.NOT_MOUNTED, -1), mark=-1))
    assert scenario.wake(SETTINGS.retry_interval_ms_max) == [stream_events.OpenLink(2, (1,))]


def test_an_answer_that_does_not_fit_leaves_its_submission_in_doubt():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1, rows=2)))
    assert scenario.receive(committed_result(req(1), 5)) == [stream_events.OpenLink(2, (1,))]


def test_a_later_connection_with_the_same_client_id_ends_the_stream():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.step(stream_events.SendAppends(submission(2)))
    effects = scenario.reject(req(1), errors.ConnectionSuperseded("a later one"))
    rejected = rejection_errors(effects)
    assert isinstance(rejected[1], errors.OutcomeUnknown)
    assert isinstance(rejected[2], errors.OutcomeUnknown)
    assert isinstance(effects[-1], stream_events.StreamStopped)
    assert isinstance(
        rejection_errors(scenario.step(stream_events.SendAppends(submission(3))))[3],
        errors.ConnectionSuperseded,
    )


# ---------------------------------------------------------------------------------------------
# time


def test_links_are_tried_again_at_once_and_then_after_pauses_that_double():
    scenario = Scenario()
    scenario.step(stream_events.SendAppends(submission(1)))
    pauses = []
    for _ in range(7):
        opening = scenario.last_effects[-1]
        assert isinstance(opening, stream_events.OpenLink)
        scenario.step(stream_events.LinkFailed(opening.attempt, errors.Unreachable("no owner")))
        if scenario.last_effects:
            pauses.append(0)
            continue
        pauses.append(scenario.stream.wake_at_ms - scenario.now_ms)
        scenario.wake(scenario.stream.wake_at_ms)
    assert pauses[0] == 0
    for pause, whole in zip(pauses[1:], (100, 200, 400, 800, 1_000, 1_000), strict=True):
        assert whole // 2 <= pause <= whole


def test_a_new_assignment_ends_a_pause():
    scenario = Scenario()
    scenario.step(stream_events.SendAppends(submission(1)))
    for _ in range(2):
        scenario.step(
            stream_events.LinkFailed(scenario.last_effects[-1].attempt, errors.NotOwned("no owner"))
        )
    assert scenario.last_effects == []
    assert scenario.step(stream_events.GenerationChanged(1)) == [stream_events.OpenLink(3, ())]
    # The failures were at another server, so the first retry at this one has no pause.
    scenario.step(stream_events.LinkFailed(3, errors.NotOwned("not yet")))
    assert scenario.last_effects == [stream_events.OpenLink(4, ())]


def test_a_stream_opens_a_new_link_only_for_a_newer_generation():
    scenario = Scenario().mount_partition()
    assert scenario.step(stream_events.GenerationChanged(0)) == []
    scenario.step(stream_events.SendAppends(submission(1)))
    assert scenario.step(stream_events.GenerationChanged(1)) == [stream_events.OpenLink(2, (1,))]


def test_an_unanswered_mount_times_out():
    scenario = Scenario()
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.open_link()
    assert scenario.stream.wake_at_ms == SETTINGS.mount_timeout_ms
    assert scenario.wake(SETTINGS.mount_timeout_ms) == [stream_events.OpenLink(2, ())]


def test_the_outcome_of_a_timed_out_append_is_unknown_only_if_the_append_was_sent():
    scenario = Scenario().mount_partition(mark=6)
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.step(stream_events.SendAppends(submission(2)))
    rejected = rejection_errors(scenario.wake(SETTINGS.request_timeout_ms))
    assert isinstance(rejected[1], errors.OutcomeUnknown)
    assert "after transaction 6" in str(rejected[1])
    assert isinstance(rejected[2], errors.Unreachable)
    assert "not in the log" in str(rejected[2])


def test_an_unanswered_append_seen_in_the_feed_is_committed_at_its_timeout():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.receive(feed_batch(request.req_id, 0, req(1)))
    effects = scenario.wake(SETTINGS.request_timeout_ms)
    assert outcomes_by_token(effects)[1].transaction_ids.tolist() == [0]


def test_closing_distinguishes_sent_from_unsent_appends():
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1)))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.step(stream_events.SendAppends(submission(2)))
    rejected = rejection_errors(scenario.step(stream_events.CloseStream()))
    assert isinstance(rejected[1], errors.OutcomeUnknown)
    assert type(rejected[2]) is errors.Unreachable
    assert scenario.stream.wake_at_ms is None


# ---------------------------------------------------------------------------------------------
# client IDs


def test_a_client_id_is_replaced_before_its_sequence_numbers_run_out(monkeypatch):
    monkeypatch.setattr(partition_stream, "SEQUENCE_MAX", 10)
    scenario = Scenario().mount_partition()
    scenario.step(stream_events.SendAppends(submission(1, rows=8)))
    scenario.step(stream_events.SendAppends(submission(2, rows=5)))
    assert scenario.last_effects == []  # appends with the old ID are still in flight
    assert (
        scenario.receive(committed_result(req(1), *range(8)))[-1] == stream_events.RequestClientId()
    )
    assert scenario.step(stream_events.ClientIdRenewed(8)) == [stream_events.OpenLink(2, ())]
    mount = scenario.open_link(number=1)
    assert mount.req_id.client_id == 8
    scenario.answer_mount(mount, 7)
    assert [message.req_id for message in scenario.sent_messages()] == [req(1, 0, client_id=8)]


PROOF = bytes(range(16))
DENIED = errors.ClientIdDenied("not yours")


def test_a_stream_gets_its_client_id_before_it_opens_its_first_link():
    stream = PartitionStream(None, PARTITION, SETTINGS, Random(1))
    stream.next_sequence = 40  # an earlier attempt has used these numbers
    stream.step(stream_events.MountPartition(), 0)
    assert stream.needs_client_id
    assert stream.step(stream_events.ClientIdRenewed(8, PROOF), 0) == []
    assert (stream.needs_client_id, stream.next_sequence) == (False, 40)
    (sent,) = stream.step(stream_events.LinkOpened(1, 1, Generation(0), 1), 0)
    assert (sent.message.req_id.client_id, sent.message.proof) == (8, PROOF)
    stream.step(stream_events.ClientIdRenewed(9), 0)  # the ID belongs to another attempt
    assert stream.client_id == 8


def test_a_denied_client_id_is_replaced_and_rows_in_doubt_have_unknown_outcomes():
    scenario = in_doubt()
    scenario.step(stream_events.SendAppends(submission(2)))
    effects = scenario.reject(scenario.open_link(number=2).req_id, DENIED, link=2)
    ((token, error),) = rejection_errors(effects).items()
    assert (token, type(error)) == (1, errors.OutcomeUnknown)
    assert scenario.stream.needs_client_id
    scenario.wake(1_000)
    scenario.step(stream_events.ClientIdRenewed(8, PROOF))
    mount = scenario.open_link(number=3)
    assert (mount.req_id.client_id, mount.proof) == (8, PROOF)
    scenario.answer_mount(mount, 12, link=3)
    assert [message.req_id for message in scenario.sent_messages()] == [req(1, 0, client_id=8)]


def test_a_stream_ends_if_the_new_client_id_is_denied_too():
    scenario = Scenario()
    scenario.step(stream_events.MountPartition())
    scenario.reject(scenario.open_link().req_id, DENIED)
    scenario.wake(1_000)
    scenario.step(stream_events.ClientIdRenewed(8))
    effects = scenario.reject(scenario.open_link(number=2).req_id, DENIED, link=2)
    assert [
        type(effect.error) for effect in effects if isinstance(effect, stream_events.StreamStopped)
    ] == [errors.ClientIdDenied]


def test_after_a_successful_mount_a_denied_client_id_is_replaced_again():
    """A token may be replaced more than once."""
    scenario = Scenario().mount_partition()
    for client_id in (8, 9):
        scenario.step(stream_events.LinkLost(scenario.connection_sequence, "cut"))
        scenario.step(stream_events.MountPartition())
        scenario.wake(scenario.now_ms + 2_000)
        number = scenario.connection_sequence + 1
        scenario.reject(scenario.open_link(number=number).req_id, DENIED, link=number)
        scenario.wake(scenario.now_ms + 2_000)
        scenario.step(stream_events.ClientIdRenewed(client_id))
        number = scenario.connection_sequence + 1
        scenario.answer_mount(scenario.open_link(number=number), -1, link=number)
        assert scenario.stream.phase is Phase.READY


# ---------------------------------------------------------------------------------------------
# a range of own headers


def own_headers_answer(range_request, *rows, next_id, mark=12):
    """Return the answer to a request for the client's own headers."""
    heads = b"".join(headers(number, each) for number, each in rows)
    fields = (range_request.first, len(rows), next_id, m.OWN_HEADERS, b"", heads, 1, mark, ())
    return m.RangeData(range_request.req_id, *fields)


def test_a_client_reads_back_only_its_own_headers_if_the_server_supports_it():
    scenario = in_doubt()
    mount = scenario.open_link(number=2, generation=1, supports_own_ranges=True)
    (request,) = [
        each.message
        for each in scenario.answer_mount(mount, 12, link=2)
        if isinstance(each, stream_events.SendOnLink)
    ]
    assert request == m.RangeRequest(req(-3, 1), 10, 12, 2_800, m.OWN_HEADERS, ())
    effects = scenario.receive(own_headers_answer(request, (11, req(2)), next_id=12), link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    assert (request.first, request.last, outcomes_by_token(effects)) == (12, 12, {})
    outcome = outcomes_by_token(scenario.receive(own_headers_answer(request, next_id=13), link=2))[
        1
    ]
    assert outcome.reasons.tolist() == [m.RowOutcomeCode.LOST, m.RowOutcomeCode.COMMITTED]
    assert outcome.transaction_ids.tolist() == [-1, 11]


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda data: replace(data, form=m.RangeForm.HEADERS),
        lambda data: replace(data, first=11),
        lambda data: replace(data, count=1),
        lambda data: replace(data, next=data.first),
        lambda data: replace(data, next=13),
        lambda data: replace(data, next=11),
        lambda data: replace(data, records=data.records[:-1]),
        lambda data: replace(data, records=data.records[28:] + data.records[:28]),
        lambda data: replace(data, records=headers(10, req(1), req(2, client_id=8))),
        lambda data: replace(data, records=headers(9, req(1), req(2))),
    ],
)
def test_an_answer_with_own_headers_that_does_not_match_the_request_settles_no_row(corrupt):
    scenario = in_doubt()
    scenario.answer_mount(scenario.open_link(number=2, supports_own_ranges=True), 11, link=2)
    (request,) = scenario.sent_messages(m.RangeRequest)
    good = own_headers_answer(request, (10, req(1)), (11, req(2)), next_id=12, mark=11)
    assert outcomes_by_token(scenario.receive(corrupt(good), link=2)) == {}
    assert scenario.stream.phase is Phase.WAITING


# ---------------------------------------------------------------------------------------------
# the feed


def test_the_feed_is_mounted_after_the_mark_of_the_log_is_known():
    scenario = Scenario()
    scenario.step(stream_events.Subscribe(4))
    first = scenario.open_link()
    assert not first.wants_feed
    scenario.answer_mount(first, 9)
    (second,) = scenario.sent_messages(m.MountWriter)
    assert second == m.MountWriter(req(-2), 1, 4, wants_feed=True)
    effects = scenario.receive(feed_batch(second.req_id, 5, *(req(i, 0, 99) for i in range(5))))
    assert [(e.first, e.count) for e in effects if isinstance(e, stream_events.FeedAdvanced)] == [
        (5, 5)
    ]
    scenario.answer_mount(second, 9)
    assert scenario.sent_messages(m.FeedRequest) == [m.FeedRequest(second.req_id, 9)]
    assert scenario.stream.phase is Phase.READY


def test_a_filter_is_sent_with_the_mount_of_the_feed_only():
    scenario = Scenario()
    scenario.step(stream_events.Subscribe(4, (7, 9)))
    first = scenario.open_link()
    assert (first.wants_feed, first.header_values) == (False, ())
    scenario.answer_mount(first, 9)
    (second,) = scenario.sent_messages(m.MountWriter)
    assert (second.wants_feed, second.header_values) == (True, (7, 9))


def test_late_batches_of_an_ended_feed_are_ignored():
    scenario = Scenario()
    request = scenario.mount_with_feed(4)
    scenario.step(stream_events.Unsubscribe())
    late_batch = feed_batch(request.req_id, 5, req(1, 0, 99))
    assert not [
        e for e in scenario.receive(late_batch) if isinstance(e, stream_events.FeedAdvanced)
    ]
    assert not scenario.stream.has_feed
    assert scenario.stream.phase is not Phase.READY


def test_a_restarted_feed_ignores_messages_of_the_earlier_feed():
    scenario = Scenario()
    request = scenario.mount_with_feed(4)
    scenario.step(stream_events.Unsubscribe())
    scenario.step(stream_events.Subscribe(2))
    late_batch = feed_batch(request.req_id, 3, req(1, 0, 99))
    assert not [
        e for e in scenario.receive(late_batch) if isinstance(e, stream_events.FeedAdvanced)
    ]
    first = scenario.open_link()
    assert not first.wants_feed
    scenario.answer_mount(first, 4)
    (second,) = scenario.sent_messages(m.MountWriter)
    assert (second.high_water_mark, second.wants_feed) == (2, True)


def test_messages_of_an_earlier_mount_are_ignored_on_the_same_link():
    scenario = Scenario()
    request = scenario.mount_with_feed(4)
    scenario.step(stream_events.Unsubscribe())
    scenario.step(stream_events.Subscribe(2))
    scenario.answer_mount(scenario.open_link(), 4)
    (again,) = scenario.sent_messages(m.MountWriter)
    late_batch = feed_batch(request.req_id, 3, req(1, 0, 99))
    assert scenario.receive(late_batch) == []
    assert [e.first for e in scenario.receive(replace(late_batch, req_id=again.req_id))] == [3]


def test_ending_a_feed_that_never_started_has_no_effect():
    scenario = Scenario().mount_partition(4)
    assert scenario.step(stream_events.Unsubscribe()) == []
    assert scenario.stream.phase is Phase.READY


def test_a_feed_from_the_end_of_the_log_begins_at_the_mark_of_the_first_mount():
    scenario = Scenario()
    scenario.step(stream_events.Subscribe(None))
    scenario.answer_mount(scenario.open_link(), 9)
    (mount,) = scenario.sent_messages(m.MountWriter)
    assert mount.high_water_mark == 9


def test_repeated_feed_records_are_dropped():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    rows = [req(i, 0, 99) for i in range(4)]
    scenario.receive(feed_batch(request.req_id, 0, *rows[:3]))
    effects = scenario.receive(feed_batch(request.req_id, 1, *rows[1:]))
    (fed,) = [e for e in effects if isinstance(e, stream_events.FeedAdvanced)]
    assert (fed.first, fed.count, len(fed.headers)) == (3, 1, 20)
    assert scenario.receive(feed_batch(request.req_id, 1, *rows[1:])) == []


def test_a_feed_batch_after_a_gap_is_not_delivered_and_a_new_link_is_opened():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    effects = scenario.receive(feed_batch(request.req_id, 1, req(1, 0, 99)))
    assert effects == [stream_events.OpenLink(2, ())]
    assert "gap" in scenario.stream.failure


def test_a_suspended_feed_sends_no_request_until_half_of_its_records_are_applied():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    scenario.receive(feed_batch(request.req_id, 0, *(req(i, 0, 99) for i in range(50))))
    assert scenario.receive(m.FeedSuspended(request.req_id)) == []
    assert scenario.step(stream_events.FeedApplied(23)) == []
    # The log may have grown since, so the stream requests its high-water mark first.
    assert scenario.step(stream_events.FeedApplied(24)) == [stream_events.OpenLink(2, ())]
    effects = scenario.answer_mount(scenario.open_link(), 900)
    assert effects[1:] == [stream_events.FeedLagging(49, 900), stream_events.StreamReady(900)]


def test_the_stream_sends_no_feed_request_before_its_mount_is_answered():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    scenario.receive(feed_batch(request.req_id, 0, *(req(i, 0, 99) for i in range(50))))
    scenario.receive(m.FeedSuspended(request.req_id))
    scenario.step(stream_events.FeedApplied(24))
    scenario.answer_mount(scenario.open_link(), 60)
    (mount,) = scenario.sent_messages(m.MountWriter)
    assert mount.wants_feed
    assert scenario.step(stream_events.FeedApplied(30)) == []
    scenario.answer_mount(mount, 60)
    assert scenario.sent_messages(m.FeedRequest) == [m.FeedRequest(mount.req_id, 49)]


def test_a_feed_that_lags_far_is_resumed_after_its_records_were_fetched():
    scenario = Scenario()
    scenario.step(stream_events.Subscribe(-1))
    effects = scenario.answer_mount(scenario.open_link(), 500)
    assert effects == [
        stream_events.MarkAdvanced(500),
        stream_events.FeedLagging(-1, 500),
        stream_events.StreamReady(500),
    ]
    scenario.step(stream_events.SendAppends(submission(1)))
    assert len(scenario.sent_messages()) == 1  # appends do not wait for the feed
    scenario.receive(committed_result(req(1), 501))
    assert scenario.step(stream_events.ResumeFeed(480)) == [stream_events.OpenLink(2, ())]
    scenario.answer_mount(scenario.open_link(), 501)
    (mount,) = scenario.sent_messages(m.MountWriter)
    assert (mount.high_water_mark, mount.wants_feed) == (480, True)


def test_a_log_that_ends_below_the_clients_mark_stops_the_stream_with_an_error():
    scenario = Scenario()
    scenario.step(stream_events.Subscribe(90))
    scenario.answer_mount(scenario.open_link(), 50)
    (mount,) = scenario.sent_messages(m.MountWriter)
    effects = scenario.reject(mount.req_id, errors.ClientAheadOfLog("the log now ends at 50"))
    assert isinstance(effects[-1].error, errors.ClientAheadOfLog)
    assert scenario.stream.phase is Phase.STOPPED


def remount_with_chain(
    chain: bytes, *, found: bytes | None, last: int = 1, session_id: int = 1
) -> tuple[Scenario, list]:
    """Feed a batch with a chain, break the link, mount again, and answer with chain `found`."""
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    rows = (req(1, 0, 99), req(2, 0, 99))
    scenario.receive(feed_batch(request.req_id, 0, *rows, chain_at=1, chain=chain))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.answer_mount(scenario.open_link(number=2), 1, link=2)
    (mount,) = scenario.sent_messages(m.MountWriter)
    scenario.answer_mount(mount, 1, link=2)
    (requests,) = scenario.sent_messages(m.RangeRequest)
    assert (requests.first, requests.last) == (1, 1)
    lineage = () if found is None else (LineageEntry(0, last, session_id, 0, found),)
    return scenario, scenario.receive(
        range_data(requests, rows[1], mark=1, lineage=lineage), link=2
    )


def test_a_log_with_a_different_chain_stops_the_stream_with_an_error():
    scenario, effects = remount_with_chain(b"a" * 16, found=b"b" * 16)
    assert isinstance(effects[-1].error, errors.DataLoss)
    assert scenario.stream.phase is Phase.STOPPED


@pytest.mark.parametrize(
    "entry",
    [
        {"found": b"a" * 16},
        {"found": None},  # the lineage has no entry
        {"found": b"b" * 16, "last": 5},
        {"found": b"b" * 16, "session_id": RECONSTRUCTED},
    ],
)
def test_a_stream_continues_if_the_log_has_the_chain_of_the_feed(entry):
    scenario, _ = remount_with_chain(b"a" * 16, **entry)
    assert scenario.stream.phase is Phase.READY


def test_the_genesis_chain_is_not_compared():
    assert bytes(GENESIS_CHAIN) == bytes(16)
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    scenario.receive(feed_batch(request.req_id, 0, req(1, 0, 99)))
    scenario.step(stream_events.LinkLost(1, "cut"))
    scenario.answer_mount(scenario.open_link(number=2), 0, link=2)
    (mount,) = scenario.sent_messages(m.MountWriter)
    scenario.answer_mount(mount, 0, link=2)
    assert scenario.sent_messages(m.RangeRequest) == []


def test_a_duplicate_row_in_the_log_is_reported():
    scenario = Scenario()
    request = scenario.mount_with_feed(-1)
    scenario.step(stream_events.SendAppends(submission(1)))
    with pytest.raises(errors.DataLoss, match="twice"):
        scenario.receive(feed_batch(request.req_id, 0, req(1), req(1)))


def test_every_feed_batch_raises_the_known_high_water_mark():
    scenario = Scenario()
    request = scenario.mount_with_feed(3)
    assert scenario.stream.high_water_mark == 3
    scenario.receive(feed_batch(request.req_id, 4, req(1, 0, 99)))
    assert scenario.stream.high_water_mark == 4


def test_a_new_assignment_ends_a_hanging_dial():
    scenario = Scenario()
    scenario.step(stream_events.SendAppends(submission(1)))
    first = scenario.opening
    assert scenario.step(stream_events.GenerationChanged(1)) == [stream_events.OpenLink(2, ())]
    assert scenario.step(stream_events.LinkOpened(first.attempt, 1, 0, 1)) == []
    assert scenario.step(stream_events.LinkFailed(first.attempt, errors.Unreachable("gone"))) == []
    assert scenario.stream.phase is Phase.LINKING
    assert isinstance(scenario.open_link(number=2, generation=1), m.MountWriter)
