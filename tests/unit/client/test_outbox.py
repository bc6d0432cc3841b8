"""The queue of appends that wait to be sent."""

from dataclasses import replace

from tests.unit.client.scenarios import PARTITION, submission
from waltz_core import errors
from waltz_core.client.model.predecessors import NO_PREDECESSORS
from waltz_core.client.stream.outbox import MountLimits, Outbox
from waltz_core.client.stream.outcome_tracker import SingleRow, Submission


def test_an_append_over_the_frame_limit_is_rejected_with_both_sizes():
    outbox = Outbox(PARTITION)
    limits = MountLimits(rows_max=5, bytes_max=4, in_flight_bytes_max=1)
    assert outbox.rejection(submission(1, rows=5), limits, 1) is None
    assert "at most 5 rows" in str(outbox.rejection(submission(1, rows=6), limits, 1))
    assert "found 1 rows and 5 bytes" in str(
        outbox.rejection(submission(1, data=b"12345"), limits, 1)
    )


def test_dependent_appends_of_another_mount_or_partition_are_not_sent():
    outbox, limits = Outbox(PARTITION), MountLimits(5, 100, 100)
    lost_rows = replace(NO_PREDECESSORS, session_id=3, partition_id=PARTITION, mount=2, mark=7)

    def refusal(pipelined_state):
        single = SingleRow(0, b"", (1,), (), (), pipelined_state)
        return outbox.rejection(Submission(1, 1, 7, single, 0), limits, 2)

    assert refusal(NO_PREDECESSORS) is refusal(lost_rows) is None
    assert isinstance(refusal(replace(lost_rows, mount=1)), errors.SessionLost)
    assert isinstance(refusal(replace(lost_rows, partition_id=PARTITION + 1)), errors.BadRequest)
