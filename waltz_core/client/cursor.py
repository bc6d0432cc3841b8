"""How far the feed of one partition has come: what was fed, what was applied, what comes next.

Why it stands alone: the feed survives any number of mounts, and that it stays dense over all of
them is easy to see only where nothing else is.

Invariants:
    1. What is handed on is dense: each stretch starts after the last one, overlaps are cut off.
    2. `applied <= fed`; no more is asked for while they are too far apart.
"""

from dataclasses import dataclass

from waltz_core.raw_records import FEED_HEADER_BYTES
from waltz_core.record import BEFORE_FIRST, TransactionId
from waltz_core.wire.messages import LATEST_MARK, FeedBatch


@dataclass(frozen=True, slots=True)
class Stretch:
    """Transactions of the feed that are new, 20 bytes of header each."""

    first: TransactionId
    count: int
    headers: memoryview

    @property
    def last(self) -> TransactionId:
        """The last of them."""
        return TransactionId(self.first + self.count - 1)


class FeedCursor:
    """The feed of one partition; see the module's docstring."""

    def __init__(self, ahead_max: int) -> None:
        self._ahead_max = ahead_max
        self.is_wanted = False
        # A grant was used up, or none was asked for yet: the server waits for the next request.
        self.is_suspended = False
        self.fed: TransactionId | None = None
        self._applied = BEFORE_FIRST

    @property
    def mount_mark(self) -> int:
        """What a mount tells the server of where to start."""
        return LATEST_MARK if self.fed is None else self.fed

    def want(self, mark: TransactionId | None) -> None:
        """Start after `mark`; None for the end of the log as the first mount finds it."""
        assert not self.is_wanted
        self.is_wanted = True
        self.fed = mark
        self._applied = BEFORE_FIRST if mark is None else mark

    def mounted(self, mark: TransactionId) -> None:
        """A mount has succeeded with the log at `mark`; the server waits to be asked."""
        assert self.is_wanted
        if self.fed is None:
            self.fed = self._applied = mark
        self.is_suspended = True

    def applied(self, mark: TransactionId) -> None:
        """The application has taken everything up to here."""
        assert self.fed is not None
        assert mark <= self.fed  # invariant 2
        # What is told late, of the time before `want`, changes nothing.
        self._applied = max(self._applied, mark)

    def ask(self) -> TransactionId | None:
        """Return the mark for the next request, None while there is nothing to ask for."""
        if not self.is_suspended or self.fed is None or self.fed - self._applied >= self._ahead_max:
            return None
        self.is_suspended = False
        return self.fed

    def take(self, message: FeedBatch) -> Stretch | str | None:
        """Return what is new in a batch, None for nothing, or in words what is wrong with it."""
        if not self.is_wanted or self.fed is None:
            return None
        if message.count <= 0 or len(message.headers) != message.count * FEED_HEADER_BYTES:
            return f"a feed batch of {message.count} has {len(message.headers)} bytes of headers"
        if message.first > self.fed + 1:
            return f"the feed has a gap: transaction {message.first} after {self.fed}"
        known = self.fed + 1 - message.first
        if known >= message.count:
            return None
        headers = memoryview(message.headers)[known * FEED_HEADER_BYTES :]
        stretch = Stretch(TransactionId(self.fed + 1), message.count - known, headers)
        self.fed = stretch.last  # invariant 1
        return stretch
