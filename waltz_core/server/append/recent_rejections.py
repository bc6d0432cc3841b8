"""The newest rejections of a partition, which clients can request.

Operators see in them which request was rejected, and by which transaction.

Rules:
    1. Only rejections that sending the same row again cannot change are recorded: LOCK, AHEAD and
       TOO_LARGE. They are recorded when the server answers the append, and their outcome is final.
    2. The transaction that caused a LOCK is committed when the append is answered. The exception
       are dependent appends (`dependent_appends.py`): the transaction may be in flight. Such an
       entry is listed only after the commit, and dropped if the transaction is lost.
    3. The entries are in memory only, and no other server has them. The server drops them when it
       releases the partition, and the next owner starts without entries.
    4. An append without a rejection has no cost.
"""

from collections import deque
from typing import Final, NamedTuple

import numpy as np

from waltz_core.records.record import ReqId, TransactionId
from waltz_core.server.locking.pending_appends import PendingAppend, PendingSingle
from waltz_core.wire.messages import RowOutcomeCode

REJECTIONS_MAX: Final = 100
_RECORDED_REASONS: Final = (RowOutcomeCode.LOCK, RowOutcomeCode.AHEAD, RowOutcomeCode.TOO_LARGE)
_IS_RECORDED: Final = np.array([code in _RECORDED_REASONS for code in RowOutcomeCode])


class RejectionEntry(NamedTuple):
    """One rejected row. `conflict` is the conflicting transaction ID for LOCK, otherwise -1."""

    stamp_ms: int
    req_id: ReqId
    reason: RowOutcomeCode
    conflict: TransactionId


class RecentRejections:
    """The newest `REJECTIONS_MAX` rejections of a partition, by the module's rules.

    `wall_ms` is the wall clock time of the entries that are added next; the owner sets it.
    """

    def __init__(self) -> None:
        self._rows: deque[RejectionEntry] = deque(maxlen=REJECTIONS_MAX)
        self.wall_ms = 0

    def add(self, pending: PendingAppend) -> None:
        """Record the rejected rows of an append that is being answered (rule 1)."""
        if isinstance(pending, PendingSingle):
            if pending.reason in _RECORDED_REASONS:
                self._add_row(pending.req_id, pending.reason, pending.conflict)
            return
        first = pending.req_id.sequence
        for row in np.flatnonzero(_IS_RECORDED[pending.reasons])[-REJECTIONS_MAX:].tolist():
            self._add_row(
                pending.req_id._replace(sequence=first + row),
                RowOutcomeCode(int(pending.reasons[row])),
                int(pending.conflicts[row]),
            )

    def _add_row(self, req_id: ReqId, reason: RowOutcomeCode, conflict: int) -> None:
        self._rows.append(RejectionEntry(self.wall_ms, req_id, reason, TransactionId(conflict)))

    def drop_lost(self, last: TransactionId) -> None:
        """Drop the entries for transactions above `last`, which are lost with their session."""
        if any(row.conflict > last for row in self._rows):
            kept = [row for row in self._rows if row.conflict <= last]
            self._rows = deque(kept, maxlen=REJECTIONS_MAX)

    def clear(self) -> None:
        """Drop all entries, because the server releases the partition (rule 3)."""
        self._rows.clear()

    def newest_first(self, high_water_mark: TransactionId) -> list[RejectionEntry]:
        """Return the entries whose conflicting transactions are committed (rule 2)."""
        return [row for row in reversed(self._rows) if row.conflict <= high_water_mark]
