"""Submissions that wait to be sent on one partition, in order, each until its deadline.

A submission in the outbox was never sent. So if the submission times out, its rows are not in the
log. In contrast, if a sent submission (in the outcome tracker) times out, its outcome is unknown.

Rules:
    1. First in, first out; deadlines never decrease.
    2. A submission that exceeds the server's limits is rejected before it is sent.
    3. A submission is also rejected if it depends on appends in flight that the client received in
       another mount (`predecessors.py`, rule 2).
"""

from collections import deque

from waltz_core import errors
from waltz_core.client.stream import append_errors
from waltz_core.client.stream.outcome_tracker import BatchOutcome, Submission
from waltz_core.records.record import PartitionId
from waltz_core.values import value
from waltz_core.wire.messages import Mounted, RowOutcomeCode


@value(frozen=True, slots=True)
class MountLimits:
    """The limits of a mounted partition: rows and bytes in one frame, and bytes in flight."""

    rows_max: int
    bytes_max: int
    in_flight_bytes_max: int

    @staticmethod
    def from_response(mounted: Mounted, in_flight_bytes_max: int) -> "MountLimits":
        """Return the limits of the server, with at most `in_flight_bytes_max` bytes in flight."""
        return MountLimits(
            mounted.batch_rows_max,
            mounted.batch_bytes_max,
            min(mounted.in_flight_bytes_max, in_flight_bytes_max),
        )


@value(frozen=True, slots=True, eq=False)
class WaitingSubmission:
    """A submission that was not sent yet, and its deadline."""

    submission: Submission
    deadline_ms: int


class Outbox:
    """The queue of submissions, by the rules above."""

    def __init__(self, partition_id: PartitionId) -> None:
        self._partition_id = partition_id
        self._waiting: deque[WaitingSubmission] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> WaitingSubmission | None:
        """The next submission to send."""
        return self._waiting[0] if self._waiting else None

    def put(self, submission: Submission, deadline_ms: int) -> None:
        """Add a submission at the end of the queue."""
        assert not self._waiting or deadline_ms >= self._waiting[-1].deadline_ms  # rule 1
        self._waiting.append(WaitingSubmission(submission, deadline_ms))

    def take(self) -> WaitingSubmission:
        """Remove the first submission and return it."""
        return self._waiting.popleft()

    def take_all(self) -> list[WaitingSubmission]:
        """Remove all submissions and return them."""
        submissions = list(self._waiting)
        self._waiting.clear()
        return submissions

    def fail_following(
        self, submission: Submission, outcome: BatchOutcome
    ) -> list[tuple[int, BatchOutcome]]:
        """Remove the submissions that must not overtake a lost one; return their outcomes."""
        if not append_errors.is_order_lost(submission, outcome):
            return []
        outcomes: list[tuple[int, BatchOutcome]] = []
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.submission.keeps_order:
                rows, mark = waiting.submission.row_count, outcome.high_water_mark
                lost_outcome = BatchOutcome.all_rejected(
                    rows, RowOutcomeCode.LOST, high_water_mark=mark
                )
                outcomes.append((waiting.submission.token, lost_outcome))
            else:
                self._waiting.append(waiting)
        return outcomes

    def take_expired(self, now_ms: int) -> list[WaitingSubmission]:
        """Remove the submissions whose deadline has passed, and return them."""
        expired = []
        while self._waiting and self._waiting[0].deadline_ms <= now_ms:
            expired.append(self._waiting.popleft())
        return expired

    def rejection(
        self, submission: Submission, limits: MountLimits, mount: int
    ) -> errors.WaltzError | None:
        """Return the error that prevents a submission in this mount, or None (rules 2 and 3)."""
        pipelined_state = submission.pipelined_state
        if pipelined_state is not None and pipelined_state.has_received_predecessors:
            if pipelined_state.partition_id != self._partition_id:
                return errors.BadRequest(
                    f"partition {self._partition_id}: the append depends on appends in flight in "
                    f"another partition, {pipelined_state.partition_id}"
                )
            if pipelined_state.mount != mount:
                return errors.SessionLost(
                    f"partition {self._partition_id}: the append depends on appends that were in "
                    "flight on a connection that has ended; the append is not in the log"
                )
        if submission.row_count <= limits.rows_max and submission.size_bytes <= limits.bytes_max:
            return None
        return errors.TooLarge(
            f"append batch for partition {self._partition_id}: expected at most "
            f"{limits.rows_max} rows and {limits.bytes_max} bytes, "
            f"found {submission.row_count} rows and {submission.size_bytes} bytes"
        )
