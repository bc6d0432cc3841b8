"""A stream to a 0.13 server, event by event: requests, and outcomes that the client derives."""

import struct

import pytest

from waltz_core import errors
from waltz_core.legacy.legacy_server_appends import IN_FLIGHT_MAX
from waltz_core.legacy.legacy_server_stream import (
    FLUSH_AFTER_MS,
    RETRY_MS,
    CheckOwnership,
    CloseLink,
    LegacyServerPartition,
    SendToServer,
    SendToStream,
)
from waltz_core.records.batches import encode_append
from waltz_core.records.checksum import crc32
from waltz_core.records.record import ReqId
from waltz_core.wire import messages as m
from waltz_core.wire.messages import LATEST_MARK, RangeForm, RowOutcomeCode

ME, OTHER = 7, 8
MOUNT = ReqId(ME, 1, 0, -1)
MARK = m.HighWaterMarkResponse(MOUNT, 9)
NO_SESSION_MARK = -(1 << 63)


def own_req_id(sequence):
    return ReqId(ME, 1, 0, sequence)


def other_req_id(sequence):
    return ReqId(OTHER, 1, 0, sequence)


def append(sequence, mark=-1):
    return m.AppendRequest(own_req_id(sequence), mark, (), (), (), 0, b"data", crc32(b"data"))


class PartitionWorld:
    """A partition at a 0.13 server, and the messages that both sides have received."""

    def __init__(self):
        self.partition = LegacyServerPartition(0)
        self.now_ms = 0
        self.sent, self.translated, self.proofs = [], [], []
        self.end_reason = None

    def perform(self, effects):
        for effect in effects:
            match effect:
                case SendToServer():
                    self.sent += effect.messages
                case SendToStream():
                    self.translated.append(effect.message)
                case CheckOwnership():
                    self.proofs.append(effect.number)
                case CloseLink():
                    self.end_reason = effect.reason

    def send(self, message):
        self.sent.clear()
        self.perform(self.partition.send(message, 40, self.now_ms))
        return list(self.sent)

    def receive(self, *received):
        self.sent.clear()
        self.translated.clear()
        self.perform(self.partition.receive(received, 40, self.now_ms))
        return list(self.translated)

    def prove(self, *, is_owner=True):
        self.translated.clear()
        number = self.proofs.pop()
        self.perform(
            self.partition.on_ownership_checked(number, is_owner=is_owner, now_ms=self.now_ms)
        )
        return list(self.translated)

    def wake(self):
        self.sent.clear()
        self.perform(self.partition.wake(self.now_ms))
        return list(self.sent)

    def mount(self, mark=9, *, wants_feed=False, after=LATEST_MARK, values=()):
        """Mount with the log at a mark."""
        self.send(m.MountWriter(MOUNT, 3, after, wants_feed, values))
        self.receive(m.HighWaterMarkResponse(MOUNT, mark))
        events = [m.FeedData(other_req_id(i), i, i % 3) for i in range(after + 1, mark + 1)]
        self.receive(*(events if after != LATEST_MARK else ()), m.MountResponse(MOUNT, 0))
        self.receive(m.FlushResponse(MOUNT, mark))
        return self.prove()


def feed_event(transaction_id, req_id, header=0):
    return m.FeedData(req_id, transaction_id, header)


def outcomes(result):
    """Return IDs, reasons and conflicting IDs of an append's result."""
    count = len(result.reasons)
    ids = list(struct.unpack(f">{count}q", result.transaction_ids))
    return (
        ids,
        [RowOutcomeCode(reason) for reason in result.reasons],
        list(struct.unpack(f">{count}q", result.conflicting)),
    )


@pytest.fixture
def world():
    return PartitionWorld()


@pytest.fixture
def mounted_world(world):
    assert [type(effect) for effect in world.mount()] == [m.Mounted]
    return world


# --- the mount


def test_a_mount_waits_for_a_mark_a_flush_and_the_feed_and_then_for_a_check_of_the_owner(world):
    assert world.send(m.MountWriter(MOUNT, 3, LATEST_MARK, wants_feed=False)) == [
        m.HighWaterMarkRequest(MOUNT)
    ]
    assert world.receive(m.HighWaterMarkResponse(MOUNT, 9)) == []
    assert world.sent == [m.MountRequest(MOUNT, 9, 40)]  # the sequence number of the connection
    assert world.receive(m.FeedData(other_req_id(1), 10, 0), m.MountResponse(MOUNT, 0)) == []
    assert world.sent == [m.FeedRequest(MOUNT, 10), m.FlushRequest(MOUNT)]
    assert world.receive(m.FlushResponse(MOUNT, 11)) == []
    assert not world.proofs  # the feed has not reached the flush's mark
    assert world.receive(feed_event(11, other_req_id(2))) == []
    translated = world.prove()
    assert [type(message) for message in translated] == [m.Mounted]
    assert translated[0].high_water_mark == 11


def test_a_mount_with_a_feed_delivers_the_feed_before_the_answer(world):
    assert world.send(m.MountWriter(MOUNT, 3, 7, wants_feed=True)) == [
        m.HighWaterMarkRequest(MOUNT)
    ]
    world.receive(m.HighWaterMarkResponse(MOUNT, 9))
    assert world.sent == [m.MountRequest(MOUNT, 7, 40)]
    translated = world.receive(
        feed_event(8, other_req_id(1), 5),
        feed_event(9, other_req_id(2), 6),
        m.MountResponse(MOUNT, 0),
    )
    assert [(message.first, message.count) for message in translated] == [(8, 2)]
    assert bytes(translated[0].headers) == struct.pack(
        ">10i", *other_req_id(1), 5, *other_req_id(2), 6
    )
    world.receive(m.FlushResponse(MOUNT, 9))
    assert world.prove()[0].high_water_mark == 9


@pytest.mark.parametrize(
    ("after", "answers", "error"),
    [
        (LATEST_MARK, [m.HighWaterMarkResponse(MOUNT, NO_SESSION_MARK)], errors.NotOwned),
        (
            LATEST_MARK,
            [MARK, m.MountResponse(MOUNT, 1)],
            errors.NotOwned,
        ),
        # The server has reported a lower mark than before.
        (
            LATEST_MARK,
            [MARK, m.MountResponse(MOUNT, 2)],
            errors.NotOwned,
        ),
        (30, [MARK, m.MountResponse(MOUNT, 2)], errors.ClientAheadOfLog),
    ],
)
def test_a_mount_that_fails_is_reported_with_its_reason(world, after, answers, error):
    world.send(m.MountWriter(MOUNT, 3, after, wants_feed=after >= 0))
    for answer in answers:
        translated = world.receive(answer)
    assert [(type(message), message.req_id, message.error_code) for message in translated] == [
        (m.ErrorResponse, MOUNT, error.code)
    ]


def test_a_mount_at_a_former_owner_is_not_trusted(world):
    world.send(m.MountWriter(MOUNT, 3, LATEST_MARK, wants_feed=False))
    world.receive(m.HighWaterMarkResponse(MOUNT, 9))
    world.receive(m.MountResponse(MOUNT, 0), m.FlushResponse(MOUNT, 9))
    translated = world.prove(is_owner=False)
    assert [message.error_code for message in translated] == [errors.NotOwned.code]


def test_a_server_that_does_not_report_its_mark_is_queried_again(world):
    world.send(m.MountWriter(MOUNT, 3, LATEST_MARK, wants_feed=False))
    assert world.partition.wake_at_ms == RETRY_MS
    assert world.wake() == []
    world.now_ms = RETRY_MS
    assert world.wake() == [m.HighWaterMarkRequest(MOUNT)]
    assert world.partition.wake_at_ms == 2 * RETRY_MS
    assert world.receive(MARK, MARK) == []
    assert world.sent == [m.MountRequest(MOUNT, 9, 40)]
    assert world.partition.wake_at_ms is None


def test_a_connection_with_an_unanswered_mount_is_closed(world):
    world.send(m.MountWriter(MOUNT, 3, LATEST_MARK, wants_feed=False))
    world.send(m.MountWriter(own_req_id(-2), 4, LATEST_MARK, wants_feed=False))
    assert world.end_reason is None  # without a mark, the server may not be the owner yet
    world.receive(m.HighWaterMarkResponse(own_req_id(-2), 9))
    world.send(m.MountWriter(own_req_id(-3), 5, LATEST_MARK, wants_feed=False))
    assert "did not answer" in world.end_reason


def test_answers_to_an_older_mount_are_ignored(mounted_world):
    mounted_world.send(m.MountWriter(own_req_id(-2), 4, LATEST_MARK, wants_feed=False))
    assert (
        mounted_world.receive(m.HighWaterMarkResponse(MOUNT, 20), m.MountResponse(MOUNT, 0)) == []
    )
    assert mounted_world.sent == []
    mounted_world.receive(m.HighWaterMarkResponse(own_req_id(-2), 9), m.FeedSuspended(MOUNT))
    assert mounted_world.sent == [m.MountRequest(own_req_id(-2), 9, 40)]
    assert mounted_world.receive(m.MountResponse(MOUNT, 0), m.FlushResponse(MOUNT, 9)) == []
    assert mounted_world.sent == []
    assert not mounted_world.proofs


# --- appends


def test_a_batch_is_validated_row_by_row_and_answered_once(mounted_world):
    payload = encode_append(
        [1, 2, 3],
        [b"a", b"b", b"c"],
        write_locks=[(5,), (), (6, 7)],
        read_locks=[(), (8,), ()],
        append_locks=[(), (), (9,)],
        marks=[7, 8, 9],
    )
    sent = mounted_world.send(m.AppendBatch(own_req_id(4), 9, payload, crc32(payload)))
    assert sent == [
        m.AppendRequest(own_req_id(4), 7, (5,), (), (), 1, b"a", crc32(b"a")),
        m.AppendRequest(own_req_id(5), 8, (), (8,), (), 2, b"b", crc32(b"b")),
        m.AppendRequest(own_req_id(6), 9, (6, 7), (), (9,), 3, b"c", crc32(b"c")),
    ]
    assert (
        mounted_world.receive(m.LockFailure(own_req_id(5), 8), feed_event(10, own_req_id(4))) == []
    )
    (result,) = mounted_world.receive(feed_event(11, own_req_id(6)))
    assert (result.req_id, result.high_water_mark) == (own_req_id(4), 11)
    assert outcomes(result) == (
        [10, -1, 11],
        [RowOutcomeCode.COMMITTED, RowOutcomeCode.LOCK, RowOutcomeCode.COMMITTED],
        [-1, 8, -1],
    )


def test_a_batch_that_cannot_be_decoded_is_rejected_before_it_is_sent(mounted_world):
    assert mounted_world.send(m.AppendBatch(own_req_id(4), 9, b"no batch", 0)) == []
    assert [(message.req_id, message.error_code) for message in mounted_world.translated[-1:]] == [
        (own_req_id(4), errors.BadRequest.code)
    ]
    assert mounted_world.send(append(5, 9)) == [append(5, 9)]


def test_a_committed_append_proves_that_earlier_missing_appends_are_lost(mounted_world):
    for sequence in (1, 2, 3):
        mounted_world.send(append(sequence))
    one, two = mounted_world.receive(feed_event(10, own_req_id(2)))
    assert (one.req_id, outcomes(one)[1]) == (own_req_id(1), [RowOutcomeCode.LOST])
    assert (two.req_id, outcomes(two)[0]) == (own_req_id(2), [10])
    assert [
        outcomes(effect)[0] for effect in mounted_world.receive(feed_event(11, own_req_id(3)))
    ] == [[11]]


def test_a_lock_failure_is_reported_after_the_feed_has_caught_up(mounted_world):
    mounted_world.send(append(1))
    assert mounted_world.receive(m.LockFailure(own_req_id(1), 12)) == []
    assert (
        mounted_world.receive(feed_event(10, other_req_id(1)), feed_event(11, other_req_id(2)))
        == []
    )
    (result,) = mounted_world.receive(feed_event(12, other_req_id(3)))
    assert outcomes(result) == ([-1], [RowOutcomeCode.LOCK], [12])
    assert result.high_water_mark == 12


def test_late_and_repeated_messages_have_no_effect(mounted_world):
    mounted_world.send(append(1))
    assert len(mounted_world.receive(feed_event(10, own_req_id(1)))) == 1
    assert (
        mounted_world.receive(
            feed_event(10, own_req_id(1)),
            feed_event(10, own_req_id(1)),
            m.LockFailure(own_req_id(1), 3),
        )
        == []
    )


def test_dropped_appends_are_reported_after_flush_and_feed_and_a_check_of_the_owner(mounted_world):
    mounted_world.send(append(1))
    mounted_world.now_ms = 1_000
    mounted_world.send(append(2))
    assert mounted_world.partition.wake_at_ms == FLUSH_AFTER_MS
    mounted_world.now_ms = FLUSH_AFTER_MS
    assert mounted_world.wake() == [m.FlushRequest(own_req_id(2))]
    mounted_world.send(append(3))
    assert mounted_world.partition.wake_at_ms is None
    assert mounted_world.receive(m.FlushResponse(own_req_id(2), 10)) == []
    assert not mounted_world.proofs
    mounted_world.receive(feed_event(10, other_req_id(1)))
    translated = mounted_world.prove()
    assert [(message.req_id, outcomes(message)[1]) for message in translated] == [
        (own_req_id(1), [RowOutcomeCode.NOT_MOUNTED]),
        (own_req_id(2), [RowOutcomeCode.NOT_MOUNTED]),
    ]
    # The third append arrived after the flush, so the flush does not cover it.
    assert [
        outcomes(effect)[0] for effect in mounted_world.receive(feed_event(11, own_req_id(3)))
    ] == [[11]]


def test_an_append_may_appear_in_the_log_after_a_flush(mounted_world):
    mounted_world.send(append(1))
    mounted_world.now_ms = FLUSH_AFTER_MS
    mounted_world.wake()
    (result,) = mounted_world.receive(
        m.FlushResponse(own_req_id(1), 10), feed_event(10, own_req_id(1))
    )
    assert outcomes(result)[0] == [10]
    assert mounted_world.prove() == []


@pytest.mark.parametrize("is_moved", [True, False])
def test_without_a_proof_of_ownership_a_lost_append_waits_for_the_next_flush(
    mounted_world, is_moved
):
    mounted_world.send(append(1))
    mounted_world.now_ms = FLUSH_AFTER_MS
    mounted_world.wake()
    if is_moved:
        mounted_world.receive(m.FlushResponse(own_req_id(1), 9))
        assert mounted_world.prove(is_owner=False) == []
    else:
        assert mounted_world.receive(m.FlushResponse(own_req_id(1), NO_SESSION_MARK)) == []
    assert mounted_world.partition.wake_at_ms == 2 * FLUSH_AFTER_MS
    mounted_world.now_ms = 2 * FLUSH_AFTER_MS
    assert mounted_world.wake() == [m.FlushRequest(own_req_id(1))]


def test_rows_in_flight_stay_within_the_limit_of_a_0_13_server(mounted_world):
    for sequence in range(1, IN_FLIGHT_MAX + 1):
        assert len(mounted_world.send(append(sequence))) == 1
    late = IN_FLIGHT_MAX + 1
    assert mounted_world.send(append(late)) == []
    mounted_world.receive(feed_event(10, own_req_id(1)))
    assert mounted_world.sent == [append(late)]


def test_an_append_with_a_mark_above_the_log_waits_for_the_server_mark(mounted_world):
    assert mounted_world.send(append(1, 11)) == [m.HighWaterMarkRequest(own_req_id(1))]
    assert mounted_world.send(append(2, 9)) == []  # in order
    mounted_world.receive(m.HighWaterMarkResponse(own_req_id(1), 11))
    assert mounted_world.sent == [append(1, 11), append(2, 9)]


def test_an_unanswered_request_for_the_server_mark_is_repeated(mounted_world):
    mounted_world.send(append(1, 9))
    mounted_world.send(append(2, 11))
    assert mounted_world.partition.wake_at_ms == RETRY_MS
    mounted_world.now_ms = RETRY_MS
    assert mounted_world.wake() == [m.HighWaterMarkRequest(own_req_id(2))]
    mounted_world.now_ms = FLUSH_AFTER_MS
    assert mounted_world.wake() == [
        m.HighWaterMarkRequest(own_req_id(2)),
        m.FlushRequest(own_req_id(1)),
    ]
    # At the end every request has an answer, and the row is rejected once.
    answer = m.HighWaterMarkResponse(own_req_id(2), 10)
    assert mounted_world.receive(answer, answer) == []
    assert len(mounted_world.proofs) == 1
    assert [outcomes(each)[1] for each in mounted_world.prove()] == [[RowOutcomeCode.AHEAD]]
    assert mounted_world.receive(answer) == []
    assert mounted_world.send(append(3, 9)) == [append(3, 9)]


@pytest.mark.parametrize(
    ("mark", "is_owner", "reason"),
    [
        (10, True, RowOutcomeCode.AHEAD),
        (10, False, RowOutcomeCode.NOT_MOUNTED),
        (NO_SESSION_MARK, True, RowOutcomeCode.NOT_MOUNTED),
    ],
)
def test_a_mark_above_the_server_mark_is_rejected(mounted_world, mark, is_owner, reason):
    mounted_world.send(append(1, 11))
    mounted_world.send(append(2, 9))
    assert mounted_world.receive(m.HighWaterMarkResponse(own_req_id(1), mark)) == []
    assert mounted_world.sent == []
    (translated,) = mounted_world.prove(is_owner=is_owner)
    assert (translated.req_id, outcomes(translated)[1]) == (own_req_id(1), [reason])
    assert mounted_world.sent == [append(2, 9)]


# --- the feed


def test_a_suspended_feed_of_a_writer_is_requested_again(mounted_world):
    mounted_world.receive(m.FeedSuspended(MOUNT))
    assert mounted_world.sent == [m.FeedRequest(MOUNT, 9)]


def test_the_feed_is_requested_only_if_the_stream_or_an_append_in_flight_needs_it(world):
    world.mount(9, wants_feed=True, after=7)
    world.receive(m.FeedSuspended(MOUNT))
    assert world.sent == []
    assert world.send(m.FeedRequest(MOUNT, 9)) == [m.FeedRequest(MOUNT, 9)]
    translated = world.receive(feed_event(10, other_req_id(1)), m.FeedSuspended(MOUNT))
    assert [type(message) for message in translated] == [m.FeedBatch, m.FeedSuspended]
    assert world.sent == []
    # Appends in flight need the feed, even if the stream has not requested it.
    assert world.send(append(1)) == [append(1), m.FeedRequest(MOUNT, 10)]
    # The stream has not requested this feed, so it is not notified of its end.
    assert world.receive(m.FeedSuspended(MOUNT)) == []


def test_a_filtered_feed_batch_omits_headers_but_counts_all_transactions(world):
    world.mount(9, wants_feed=True, after=8, values=(2,))
    (batch,) = world.receive(*(feed_event(10 + i, other_req_id(i), i) for i in range(4)))
    assert (batch.first, batch.count) == (10, 4)
    assert bytes(batch.picked) == struct.pack(">i", 2)
    assert bytes(batch.headers) == struct.pack(">5i", *other_req_id(2), 2)
    (batch,) = world.receive(feed_event(14, other_req_id(1), 1))
    assert (batch.first, batch.count, batch.picked, batch.headers) == (14, 1, b"", b"")


def test_a_transaction_after_a_gap_in_the_feed_is_ignored(world):
    world.mount(9, wants_feed=True, after=8)
    assert world.receive(feed_event(11, other_req_id(1))) == []
    assert [
        (effect.first, effect.count) for effect in world.receive(feed_event(10, other_req_id(1)))
    ] == [(10, 1)]


# --- reading back


def request_headers(first, last):
    return m.RangeRequest(own_req_id(-5), first, last, 1 << 20, RangeForm.HEADERS, ())


def test_earlier_headers_are_read_with_a_separate_mount(mounted_world):
    assert mounted_world.send(request_headers(4, 6)) == [m.MountRequest(own_req_id(-5), 3, 40)]
    seen = [feed_event(i, other_req_id(i), i) for i in range(4, 10)]
    assert mounted_world.receive(*seen[:4], feed_event(10, other_req_id(10))) == []
    (answer,) = mounted_world.receive(*seen[4:], m.MountResponse(own_req_id(-5), 0))
    assert mounted_world.sent == [m.FeedRequest(own_req_id(-5), 10)]
    assert (answer.first, answer.count, answer.next, answer.form) == (4, 3, 7, RangeForm.HEADERS)
    assert bytes(answer.records) == b"".join(
        struct.pack(">q5i", i, *other_req_id(i), i) for i in range(4, 7)
    )
    assert mounted_world.send(append(1)) == [append(1)]


@pytest.mark.parametrize("state", [1, 2, 0])
def test_missing_headers_are_an_error(mounted_world, state):
    mounted_world.send(request_headers(4, 6))
    translated = mounted_world.receive(
        feed_event(4, other_req_id(4)), m.MountResponse(own_req_id(-5), state)
    )
    assert [(type(message), message.req_id) for message in translated] == [
        (m.ErrorResponse, own_req_id(-5))
    ]
    assert mounted_world.send(append(1)) == []


def test_messages_that_0_13_cannot_express_are_not_sent(mounted_world):
    with pytest.raises(errors.LocalProtocolError, match="ReplicasRequest"):
        mounted_world.send(m.ReplicasRequest(own_req_id(-5), linearizable=False))
    data_only = m.RangeRequest(own_req_id(-6), 0, 1, 100, RangeForm.WHOLE, ())
    mounted_world.send(data_only)
    assert mounted_world.translated[-1].error_code == errors.NotMounted.code
