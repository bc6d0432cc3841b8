"""The rows that a stream appends at a 0.13 server: waiting, in flight, rejected by a lock.

Rules (4 to 6 and 8: `legacy_server_stream.py`):
    1. A row is COMMITTED if, and only if, its request ID was seen in the feed.
    2. A row is LOST if the feed contains a later row of this connection, but not this row. Reason:
       the server processes appends in order of arrival, and assigns IDs in that order.
    3. A row is LOCK if the server has rejected it because of a lock. The server's answer contains
       an estimate: the ID of the transaction that has written the lock, or a later ID. The stream
       gets this outcome when the feed has reached the estimate.
    7. The number of rows in flight is limited to two batches: the storages write one batch, while
       the server collects the next batch. Other partitions share the connection. If more than 300
       requests are open, a 0.13 server stops reading it.
"""

from collections import deque
from typing import Final

from waltz_core.legacy.legacy_server_rows import LegacyRow, SubmissionRows
from waltz_core.records.record import ReqId, TransactionId
from waltz_core.wire.messages import AppendRequest, RowOutcomeCode

# Rule 7: twice the maximum size of a batch that a 0.13 server sends to its storages.
IN_FLIGHT_MAX: Final = 200


class LegacyAppends:
    """The rows of one partition on one connection. Methods return the submissions to answer."""

    def __init__(self) -> None:
        self.waiting: deque[LegacyRow] = deque()
        self.in_flight: dict[ReqId, LegacyRow] = {}  # in the order of sending
        self._rejected_rows: list[
            LegacyRow
        ] = []  # the rows in flight that a lock has rejected (rule 3)
        self.sent_count = 0

    @property
    def oldest_sent_ms(self) -> int | None:
        """When the oldest row in flight was sent; None if no row is in flight."""
        oldest = next(iter(self.in_flight.values()), None)
        return None if oldest is None else oldest.sent_ms

    @property
    def newest_request_id(self) -> ReqId:
        """The request ID of the newest row in flight; there must be one."""
        return next(reversed(self.in_flight))

    @property
    def can_send(self) -> bool:
        """Whether a row waits and another row may be in flight (rule 7)."""
        return bool(self.waiting) and len(self.in_flight) < IN_FLIGHT_MAX

    def clear(self) -> None:
        """Forget all rows, because their connection is mounted again."""
        self.waiting.clear()
        self.in_flight.clear()
        self._rejected_rows.clear()

    def send(self, now_ms: int) -> AppendRequest:
        """Mark the next row as in flight; return its request."""
        row = self.waiting.popleft()
        self.sent_count += 1
        row.number, row.sent_ms = self.sent_count, now_ms
        self.in_flight[row.request.req_id] = row
        return row.request

    def on_committed(self, req_id: ReqId, transaction_id: TransactionId) -> list[SubmissionRows]:
        """Settle a row that the feed contains, and the rows that were sent earlier (rules 1, 2)."""
        row = self.in_flight.get(req_id)
        if row is None:
            return []
        ended = self.end_rows_up_to(row.number - 1, RowOutcomeCode.LOST)
        del self.in_flight[req_id]
        return [*ended, row.submission] if row.on_committed(transaction_id) else ended

    def on_row_lock_failed(self, req_id: ReqId, conflicting_id: TransactionId) -> None:
        """Record that a lock has rejected a row; the answer has `conflicting_id` (rule 3)."""
        row = self.in_flight.get(req_id)
        if row is not None and row.conflicting_id is None:
            row.conflicting_id = conflicting_id
            self._rejected_rows.append(row)

    def end_rejected_rows(self, mark: TransactionId) -> list[SubmissionRows]:
        """End the rows that locks have rejected, up to the feed's mark (rule 3)."""
        ended = []
        rejected, self._rejected_rows = self._rejected_rows, []
        for row in rejected:
            assert row.conflicting_id is not None
            if row.request.req_id not in self.in_flight:
                continue  # The row was settled meanwhile (rules 1 and 2).
            if row.conflicting_id > mark:
                self._rejected_rows.append(row)
                continue
            del self.in_flight[row.request.req_id]
            if row.on_rejected(RowOutcomeCode.LOCK):
                ended.append(row.submission)
        return ended

    def end_rows_up_to(self, number: int, reason: RowOutcomeCode) -> list[SubmissionRows]:
        """End all rows up to the row with `number`, because these rows are not in the log."""
        ended = []
        while self.in_flight:
            req_id, row = next(iter(self.in_flight.items()))
            if row.number > number:
                break
            del self.in_flight[req_id]
            if row.on_rejected(reason):
                ended.append(row.submission)
        return ended
