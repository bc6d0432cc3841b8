"""Answers append requests when they are final, and the flushes that wait for them.

Every request ends here exactly once, whichever way it took through the pipeline.

Rules:
    1. A request is answered once, and then leaves its flush group (the requests that a flush waits
       for). When all requests of a group have left, the waiting flushes are notified.
    2. A client treats AHEAD (its mark is above the log's) as final, so a replaced server must not
       report it. `ConfirmAheadOfLog` first requests a confirmation by a quorum that the session
       in which the row was validated is still the newest. Without this confirmation the answer is
       NOT_MOUNTED, so that the client mounts again.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from waltz_core.errors import TooLarge, WaltzError
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, TransactionId
from waltz_core.server.append.answers import append_error_answer
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import AppendOutcome, BarrierReached, ConfirmAheadOfLog
from waltz_core.server.append.recent_rejections import RecentRejections
from waltz_core.server.locking.dependent_appends import DependentAppends
from waltz_core.server.locking.pending_appends import (
    AppendCounters,
    FlushGroup,
    PendingAppend,
    PendingSingle,
)
from waltz_core.server.partition_events import SendToClient
from waltz_core.wire.messages import RowOutcomeCode


class Completions:
    """Answers append requests by the module's rules; the pipeline decides when one is final."""

    def __init__(
        self, mounts: Mounts, counters: AppendCounters, rejections: RecentRejections
    ) -> None:
        self._mounts = mounts
        self._counters = counters
        self._rejections = rejections
        self._flush_groups: deque[FlushGroup] = deque((FlushGroup(),))
        # The session that was opened last, and its high-water mark.
        self.session_id = NO_SESSION
        self.high_water_mark = BEFORE_FIRST

    # --- flush groups

    def add_request(self) -> FlushGroup:
        """Register a request that has arrived; return its flush group."""
        self._counters.requests += 1
        flush_group = self._flush_groups[-1]
        flush_group.unfinished_count += 1
        return flush_group

    def remove_request(self, pending: PendingAppend, out: list[AppendOutcome]) -> None:
        """Remove a request that has ended from its flush group (rule 1)."""
        pending.flush_group.unfinished_count -= 1
        assert pending.flush_group.unfinished_count >= 0
        while len(self._flush_groups) > 1 and not self._flush_groups[0].unfinished_count:
            out.extend(
                BarrierReached(token) for token in self._flush_groups.popleft().waiting_tokens
            )

    def flush(self, token: int) -> list[AppendOutcome]:
        """Return `BarrierReached` as soon as all requests received until now have ended."""
        if self._flush_groups[-1].unfinished_count:
            self._flush_groups[-1].waiting_tokens.append(token)
            self._flush_groups.append(FlushGroup())
        elif len(self._flush_groups) > 1:
            self._flush_groups[-2].waiting_tokens.append(token)
        else:
            return [BarrierReached(token)]
        return []

    def abandon(self) -> list[AppendOutcome]:
        """Notify all waiting flushes and drop all groups, because the partition is released."""
        out: list[AppendOutcome] = [
            BarrierReached(token) for group in self._flush_groups for token in group.waiting_tokens
        ]
        self._flush_groups = deque((FlushGroup(),))
        return out

    # --- answers

    def answer_rejected(self, rejected: Iterable[PendingSingle]) -> list[AppendOutcome]:
        """Answer rejected writers that no longer wait in the lock queues (`lock_queues.py`)."""
        out: list[AppendOutcome] = []
        for pending in rejected:
            self.answer_final(pending, out)
        return out

    def answer_dependent_writers(
        self, rejected: Iterable[PendingSingle], dependent: DependentAppends, next_id: TransactionId
    ) -> list[AppendOutcome]:
        """Answer rejected writers with their predecessors, or with LOCK if these are unknown."""
        out: list[AppendOutcome] = []
        for pending in rejected:
            assert pending.reason is RowOutcomeCode.LOCK
            self._counters.rejected[RowOutcomeCode.LOCK] += 1
            # Record the rejection before `reject_by_lock` sets the outcome, because the conflicting
            # transaction may be in flight (recent_rejections.py, rule 2).
            self._rejections.add(pending)
            answer = dependent.predecessors_answer(pending, self.high_water_mark, next_id)
            if answer is None:
                pending.reject_by_lock(min(pending.conflict, self.high_water_mark))
                answer = pending.answer(self.high_water_mark)
            out.append(answer)
            self.remove_request(pending, out)
        return out

    def answer_if_final(self, pending: PendingAppend, out: list[AppendOutcome]) -> None:
        """Answer a request if all of its rows are final."""
        if isinstance(pending, PendingSingle) or pending.is_final:
            self.answer_final(pending, out)

    def answer_final(self, pending: PendingAppend, out: list[AppendOutcome]) -> None:
        """Answer a request whose rows are all final (rule 2)."""
        if not pending.is_ahead:
            out.append(self._build_answer(pending))
            self.remove_request(pending, out)
        elif pending.session_id == self.session_id:
            out.append(ConfirmAheadOfLog(pending))  # Flushes wait until this event is answered.
        else:
            out.extend(self.answer_ahead_of_log(pending, is_proved=False))

    def answer_ahead_of_log(
        self, pending: PendingAppend, *, is_proved: bool
    ) -> list[AppendOutcome]:
        """Answer a request that has rows ahead of the log (rule 2).

        `is_proved`: a quorum has confirmed the session. Otherwise the client must mount again.
        """
        if not is_proved:
            client_id = pending.req_id.client_id
            pending.replace_unconfirmed_ahead()
            if pending.mount == self._mounts.mount_number(client_id, pending.connection):
                self._mounts.require_remount(client_id)
        out: list[AppendOutcome] = [self._build_answer(pending)]
        self.remove_request(pending, out)
        return out

    def answer_error(
        self, pending: PendingAppend, error: WaltzError, out: list[AppendOutcome]
    ) -> None:
        """Answer a request with an error: none of its rows is in the log."""
        if isinstance(error, TooLarge):
            self._counters.rejected[RowOutcomeCode.TOO_LARGE] += 1
        out.append(append_error_answer(pending, error))
        self.remove_request(pending, out)

    def _build_answer(self, pending: PendingAppend) -> SendToClient:
        rejected = self._counters.rejected
        if isinstance(pending, PendingSingle):
            if pending.reason:
                rejected[pending.reason] += 1
                self._rejections.add(pending)
        elif pending.reasons.any():
            for reason, count in enumerate(np.bincount(pending.reasons).tolist()):
                rejected[reason] += count if reason else 0
            self._rejections.add(pending)
        return pending.answer(self.high_water_mark)
