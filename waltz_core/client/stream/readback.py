"""Reads parts of the log after a mount, before appends are sent.

The client reads the log for two reasons: to find rows in doubt, and to check that the feed came
from this log.

Rules:
    1. All headers in the range of the rows in doubt are read, in as many answers as necessary.
    2. The last known chain hash of the feed is compared with the chain hash of the same batch in
       the log's lineage. If they differ, the feed came from a different log, and must not continue.
       If the log begins after this batch, there is no chain hash to compare with.
    3. If rows in doubt may be below the start of the log, their outcome is unknown.
    4. A server of L 8 returns only the headers of this client's own rows. The reason is that the
       principal may have the permission to append, but not to read.
"""

from waltz_core.client.stream.outcome_tracker import OutcomeTracker
from waltz_core.errors import DataLoss
from waltz_core.records.record import BEFORE_FIRST, RECONSTRUCTED, Chain, ReqId, TransactionId
from waltz_core.wire.messages import OWN_HEADERS, RangeData, RangeForm, RangeRequest


class ReadBack:
    """The reads of one mount, one request at a time."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._first: TransactionId | None = None
        self._last = BEFORE_FIRST
        self._chain: tuple[TransactionId, Chain] | None = None
        self._request: RangeRequest | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to read."""
        return self._chain is None and self._first is None

    def begin(
        self,
        range_in_doubt: tuple[TransactionId, TransactionId] | None,
        chain: tuple[TransactionId, Chain] | None,
    ) -> None:
        """Plan to read the headers of the range in doubt, and to compare the feed's chain hash."""
        self._first, self._last = range_in_doubt or (None, BEFORE_FIRST)
        self._chain = chain
        self._request = None

    def on_before_log_start(self) -> bool:
        """The log begins after the requested IDs; return whether rows in doubt may have these IDs.

        If so, the outcome of these rows is unknown (rule 3). Otherwise, the request was for the
        chain hash.
        """
        self._request = None
        if self._chain is not None:
            self._chain = None  # rule 2
            return False
        return True

    def cancel(self) -> None:
        """Drop the plan, because the mount has failed."""
        self.begin(None, None)

    def request(self, req_id: ReqId, *, supports_own_ranges: bool = False) -> RangeRequest:
        """Return the next request; with `supports_own_ranges`, the server supports rule 4."""
        assert not self.is_done
        first, last, form = self._first, self._last, int(RangeForm.HEADERS)
        if self._chain is not None:
            first = last = self._chain[0]
        elif supports_own_ranges:
            form = OWN_HEADERS
        assert first is not None
        self._request = RangeRequest(req_id, first, last, self._bytes_max, form, ())
        return self._request

    def is_requested(self, req_id: ReqId) -> bool:
        """Whether this is the ID of the unanswered request."""
        return self._request is not None and self._request.req_id == req_id

    def accept_headers(self, message: RangeData, tracker: OutcomeTracker) -> str | None:
        """Process an answer; return a text that describes an error in the answer, or None."""
        request = self._request
        assert request is not None
        self._request = None
        is_expected_range = message.form == request.form and message.first == request.first
        if not is_expected_range or not _match_own_rows(message, request, tracker):
            range_text = f"transactions {request.first}..{request.last}"
            return f"the server's answer for {range_text} has headers that were not requested"
        if self._chain is not None:
            self._chain = None
            return None
        self._first = TransactionId(message.next) if message.next <= self._last else None
        return None

    def history_loss(self, message: RangeData) -> DataLoss | None:
        """Return an error if the feed came from a different log (rule 2), otherwise None."""
        if self._chain is None:
            return None
        chain_at, chain = self._chain
        batch_entries = [
            entry
            for entry in message.lineage
            if entry.last == chain_at and entry.session_id != RECONSTRUCTED
        ]
        # NB: without the batch's own entry, the chain hashes cannot be compared. The entry is
        # missing if a 0.13 server wrote the batch, or if the entry was lost and reconstructed.
        if not batch_entries or batch_entries[0].chain == chain:
            return None
        return DataLoss(
            f"partition {message.req_id.partition_id}: the log has changed at or before "
            f"transaction {chain_at}, because its chain hash there differs from that of the feed"
        )


def _match_own_rows(message: RangeData, request: RangeRequest, tracker: OutcomeTracker) -> bool:
    """Find the client's rows in an answer; return whether it has the requested headers."""
    first, count = TransactionId(message.first), message.count
    if request.form == OWN_HEADERS:
        is_within = first < message.next <= request.last + 1
        last = TransactionId(message.next - 1)
        return is_within and tracker.match_own_headers(first, last, count, message.records)
    is_dense = count > 0 and message.next == first + count
    return is_dense and tracker.match_headers(first, count, message.records)
