"""The newest rejections of a partition, which clients can request.

These rejections show operators which requests were rejected, and because of which transactions.

Rules:
    1. A rejection is recorded only if the server would reject the same row again: LOCK, AHEAD and
       TOO_LARGE. The rejection is recorded when the server answers the append, so its outcome is
       final.
    2. When an append is answered with LOCK, the conflicting transaction is usually committed. But
       for a dependent append (`dependent_appends.py`) this transaction may be in flight. In this
       case, the entry is listed only after the transaction is committed, and dropped if the
       transaction is lost.
    3. The entries are in this server's memory only. The server drops the entries when it releases
       the partition, and the next owner starts without entries.
    4. An append without a rejection causes no work in this module.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from waltz_core.records.record import ReqId, TransactionId
from waltz_core.server.locking.pending_appends import PendingAppend, PendingSingle
from waltz_core.wire.messages import RowOutcomeCode

REJECTIONS_MAX: Final = 100
_RECORDED_REASONS: Final = (RowOutcomeCode.LOCK, RowOutcomeCode.AHEAD, RowOutcomeCode.TOO_LARGE)
_IS_RECORDED_BY_CODE: Final = np.array([code in _RECORDED_REASONS for code in RowOutcomeCode])


class RejectionEntry(NamedTuple):
    """One rejected row. `conflict` is the conflicting transaction ID for LOCK, otherwise -1."""

    stamp_ms: int
    req_id: ReqId
    reason: RowOutcomeCode
    conflict: TransactionId


class _AppendRejections(NamedTuple):
    """The rejected rows of one append, with their numbers in the request."""

    stamp_ms: int
    req_id: ReqId
    numbers: Sequence[int]
    reasons: bytes
    conflicts: Sequence[int]

    def newest_first(self) -> Iterator[RejectionEntry]:
        for number, reason, conflict in zip(
            reversed(self.numbers), reversed(self.reasons), reversed(self.conflicts), strict=True
        ):
            yield RejectionEntry(
                self.stamp_ms,
                self.req_id._replace(sequence=self.req_id.sequence + number),
                RowOutcomeCode(reason),
                TransactionId(conflict),
            )


class RecentRejections:
    """The newest `REJECTIONS_MAX` rejections of a partition, by the module's rules.

    `wall_ms` is the wall clock time of the rows that are added next; the caller sets `wall_ms`.
    """

    def __init__(self) -> None:
        # Stored by append, because a batch has many rows. `newest_first` creates the entries of the
        # rows.
        self._appends: deque[_AppendRejections] = deque()
        self._row_count = 0
        self.wall_ms = 0

    def add(self, pending: PendingAppend) -> None:
        """Record the rejected rows of an append that is being answered (rule 1)."""
        if isinstance(pending, PendingSingle):
            if pending.reason in _RECORDED_REASONS:
                reasons = bytes((pending.reason,))
                self._add(
                    _AppendRejections(
                        self.wall_ms, pending.req_id, (0,), reasons, (pending.conflict,)
                    )
                )
            return
        rows = np.flatnonzero(_IS_RECORDED_BY_CODE[pending.reasons])[-REJECTIONS_MAX:]
        if rows.size:
            reasons, conflicts = pending.reasons[rows].tobytes(), pending.conflicts[rows].tolist()
            self._add(
                _AppendRejections(self.wall_ms, pending.req_id, rows.tolist(), reasons, conflicts)
            )

    def _add(self, rows: _AppendRejections) -> None:
        self._appends.append(rows)
        self._row_count += len(rows.reasons)
        while self._row_count - len(self._appends[0].reasons) >= REJECTIONS_MAX:
            self._row_count -= len(self._appends.popleft().reasons)

    def drop_lost(self, last: TransactionId) -> None:
        """Drop the rows rejected for transactions above `last`, which are lost (rule 2).

        All dropped rows belong to single appends: a batch is answered when its conflicts are final.
        """
        kept_appends = deque(append for append in self._appends if max(append.conflicts) <= last)
        self._appends, self._row_count = (
            kept_appends,
            sum(len(append.reasons) for append in kept_appends),
        )

    def clear(self) -> None:
        """Drop all rows, because the server releases the partition (rule 3)."""
        self._appends.clear()
        self._row_count = 0

    def newest_first(self, high_water_mark: TransactionId) -> list[RejectionEntry]:
        """Return the rejections whose conflicting transactions are committed (rule 2)."""
        newest = islice(
            (entry for append in reversed(self._appends) for entry in append.newest_first()),
            REJECTIONS_MAX,
        )
        return [entry for entry in newest if entry.conflict <= high_water_mark]
