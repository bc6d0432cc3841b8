"""The position of the feed of one partition: what was received, applied and requested.

A feed continues over any number of mounts, without a missing transaction.

Invariants:
    1. No transaction is missing: each range that is passed on starts right after the previous
       range; overlaps are cut off. A range of a filtered feed also covers the transactions that do
       not pass the filter.
    2. While the application is too far behind the received transactions, no more are requested.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from waltz_core.client.stream.stream_events import FeedAdvanced
from waltz_core.records.raw_records import FEED_HEADER_BYTES, FEED_HEADER_DTYPE
from waltz_core.records.record import BEFORE_FIRST, Chain, TransactionId
from waltz_core.wire.messages import FeedBatch


class FeedCursor:
    """The position of one partition's feed, with the invariants above."""

    def __init__(self, ahead_max: int) -> None:
        self._ahead_max = ahead_max
        self.is_started = False
        # The application headers to feed; empty for all.
        self.header_values: tuple[int, ...] = ()
        # Whether the server waits for the next request: it has sent all that was requested, or
        # nothing was requested yet.
        self.is_suspended = False
        # Whether no request was sent because the application was too far behind. Then the end of
        # the log is not known.
        self.is_application_behind = False
        # Whether the driver fetches the transactions between this position and the end of the log.
        self.is_lagging = False
        # The last batch end for which the feed contained a chain hash, and this chain hash.
        self.chain: tuple[TransactionId, Chain] | None = None
        self._feed_mark: TransactionId | None = None
        self._applied_mark = BEFORE_FIRST

    def start_after(self, mark: TransactionId | None, header_values: tuple[int, ...] = ()) -> None:
        """Start the feed after `mark`; None for the end of the log at the first mount."""
        assert not self.is_started
        self.is_started = True
        self.header_values = header_values
        self._feed_mark = mark
        self._applied_mark = BEFORE_FIRST if mark is None else mark

    def resume(self, mark: TransactionId) -> None:
        """Continue after `mark`: the driver has fetched the transactions up to `mark`."""
        assert self.is_lagging
        assert self._feed_mark is not None
        assert mark >= self._feed_mark
        self.is_lagging = False
        self._feed_mark = mark

    def start_at_end(self, mark: TransactionId) -> TransactionId:
        """Start at `mark` if the feed starts at the end of the log; return the feed's position."""
        assert self.is_started
        if self._feed_mark is None:
            self._feed_mark = self._applied_mark = mark
        return self._feed_mark

    def on_mount_started(self) -> None:
        """A new mount begins: the server no longer waits for a request on an older mount."""
        self.is_suspended = False

    def on_mount_succeeded(self) -> None:
        """A mount with the feed has succeeded: the server waits for a request."""
        assert self._feed_mark is not None
        self.is_suspended = True

    def note_applied(self, mark: TransactionId) -> bool:
        """Note that the feed is applied up to `mark`; return True if requests may continue."""
        # NB: while the driver fetches (`is_lagging`), `mark` may be above the position of this
        # feed.
        self._applied_mark = max(self._applied_mark, mark)
        if not self.is_application_behind or self._feed_mark is None:
            return False
        self.is_application_behind = self._feed_mark - self._applied_mark > self._ahead_max // 2
        return not self.is_application_behind

    def take_request_mark(self) -> TransactionId | None:
        """Return the mark for the next request; None while there is nothing to request."""
        if (
            not self.is_suspended
            or self._feed_mark is None
            or self.is_lagging
            or self.is_application_behind
        ):
            return None
        if self._feed_mark - self._applied_mark >= self._ahead_max:  # invariant 2
            self.is_application_behind = True
            return None
        self.is_suspended = False
        return self._feed_mark

    def accept_batch(self, message: FeedBatch) -> FeedAdvanced | str | None:
        """Return the new part of a batch; None if nothing is new.

        If the batch contradicts the feed, return a text that describes the error.
        """
        feed_mark = self._feed_mark
        if feed_mark is None or self.is_lagging:
            return None
        picked_ids = self._picked_ids(message)
        if isinstance(picked_ids, str):
            return picked_ids
        if message.first > feed_mark + 1:
            return (
                f"the feed has a gap: expected the transaction after {feed_mark}, found "
                f"transaction {message.first}"
            )
        known_count = feed_mark + 1 - message.first
        if known_count >= message.count:
            return None
        known_headers = (
            known_count if picked_ids is None else bisect_left(picked_ids, feed_mark + 1)
        )
        advance = FeedAdvanced(
            TransactionId(feed_mark + 1),
            message.count - known_count,
            memoryview(message.headers)[known_headers * FEED_HEADER_BYTES :],
            None if picked_ids is None else picked_ids[known_headers:],
        )
        self._feed_mark = advance.last  # invariant 1
        if message.chain_at != BEFORE_FIRST:
            self.chain = (TransactionId(message.chain_at), Chain(message.chain))
        return advance

    def _picked_ids(self, message: FeedBatch) -> Sequence[int] | str | None:
        """Return the IDs of a batch's headers, None for all, or a text that describes an error."""
        count, size = message.count, len(message.headers)
        if count > 0 and size == count * FEED_HEADER_BYTES and not message.picked:
            picked_ids = None
        elif not self.header_values or count <= 0 or len(message.picked) % 4:
            expected = count * FEED_HEADER_BYTES
            return (
                f"feed message with {count} transactions: expected {expected} bytes of headers, "
                f"found {size}"
            )
        else:
            offsets = np.frombuffer(message.picked, dtype=">i4").astype(np.int64)
            is_ascending = bool((np.diff(offsets, prepend=-1, append=count) > 0).all())
            if not is_ascending or size != offsets.size * FEED_HEADER_BYTES:
                return (
                    f"feed message with {count} transactions: expected ascending offsets, "
                    f"each with a header, found {offsets.size} offsets and {size} bytes of "
                    "headers"
                )
            picked_ids = (offsets + message.first).tolist()
        if self.header_values:
            values = np.frombuffer(message.headers, dtype=FEED_HEADER_DTYPE)["header"]
            if not np.isin(values.astype(np.int32), self.header_values).all():
                return "the filtered feed has a transaction whose header the client did not request"
        return picked_ids
