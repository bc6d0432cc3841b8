"""What waits to be sent."""

from dataclasses import replace

import pytest

from tests.unit.client.stories import PARTITION, parcel
from waltz_core import errors
from waltz_core.client.model.predecessors import FOLLOW
from waltz_core.client.stream.monitor import BatchOutcome, Parcel, Single
from waltz_core.client.stream.outbox import MountLimits, Outbox
from waltz_core.wire.messages import Reason


def tokens(waiting):
    return [each.parcel.token for each in waiting]


def test_first_in_first_out_until_the_deadline():
    outbox = Outbox(PARTITION)
    assert outbox.first is None
    for token, deadline_ms in ((1, 10), (2, 10), (3, 20), (4, 30)):
        outbox.put(parcel(token), deadline_ms)
    assert outbox.take().parcel.token == 1
    assert outbox.first.parcel.token == 2
    assert tokens(outbox.take_expired(20)) == [2, 3]
    assert outbox.take_expired(20) == []
    assert len(outbox) == 1
    assert tokens(outbox.take_all()) == [4]
    assert len(outbox) == 0


def test_deadlines_never_decrease():
    outbox = Outbox(PARTITION)
    outbox.put(parcel(1), 10)
    with pytest.raises(AssertionError):
        outbox.put(parcel(2), 9)


def test_ordered_appends_are_removed_and_the_rest_stays():
    outbox = Outbox(PARTITION)
    for token in range(4):
        outbox.put(replace(parcel(token), keeps_order=token % 2 == 1), 10)
    lost = BatchOutcome.uniform(1, Reason.LOST, high_water_mark=7)
    assert outbox.lose_following(parcel(9), lost) == []
    ordered = replace(parcel(9), keeps_order=True)
    lost_rows = outbox.lose_following(ordered, lost)
    assert [(token, each.reasons.tolist()) for token, each in lost_rows] == [
        (1, [Reason.LOST]),
        (3, [Reason.LOST]),
    ]
    assert outbox.lose_following(ordered, lost) == []
    assert tokens(outbox.take_all()) == [0, 2]


def test_an_append_over_the_frame_limit_is_rejected_with_both_sizes():
    outbox = Outbox(PARTITION)
    limits = MountLimits(rows_max=5, bytes_max=4, in_flight_bytes_max=1)
    assert outbox.rejection(parcel(1, rows=5), limits, 1) is None
    assert "at most 5 rows" in str(outbox.rejection(parcel(1, rows=6), limits, 1))
    assert "found 1 rows and 5 bytes" in str(outbox.rejection(parcel(1, data=b"12345"), limits, 1))


def test_dependents_of_another_mount_or_partition_are_not_sent():
    outbox, limits = Outbox(PARTITION), MountLimits(5, 100, 100)
    lost_rows = replace(FOLLOW, session_id=3, partition_id=PARTITION, mount=2, mark=7)

    def refusal(following):
        single = Single(0, b"", (1,), (), (), following)
        return outbox.rejection(Parcel(1, 1, 7, single, 0), limits, 2)

    assert refusal(FOLLOW) is refusal(lost_rows) is None
    assert isinstance(refusal(replace(lost_rows, mount=1)), errors.SessionLost)
    assert isinstance(refusal(replace(lost_rows, partition_id=PARTITION + 1)), errors.BadRequest)
