"""Ends append requests: answers each one when it is final, and the flushes that waited for it.

Every request ends here, once, whichever way it took through the pipeline.

Rules:
    1. A request is answered once, and then leaves its flush group (the requests that a flush waits
       for). When all requests of a group have left, the waiting flushes are notified.
    2. AHEAD is not reported directly: `AheadOfLog` first requests a proof that the session in which
       the row was validated is still the newest. Without the proof the answer is NOT_MOUNTED, so
       that the client mounts again.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from waltz_core.errors import TooLarge, WaltzError
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, TransactionId
from waltz_core.server.append.answers import reject_ticket
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import AheadOfLog, AppendOutcome, BarrierReached
from waltz_core.server.locking.dependent_appends import DependentAppends
from waltz_core.server.locking.tickets import AppendCounters, FlushGroup, SingleTicket, Ticket
from waltz_core.server.partition_events import SendToClient
from waltz_core.wire.messages import Reason


class Completions:
    """See the module's rules; the pipeline decides when a request is final."""

    def __init__(self, mounts: Mounts, counters: AppendCounters) -> None:
        self._mounts = mounts
        self._counters = counters
        self._flush_groups: deque[FlushGroup] = deque((FlushGroup(),))
        # Of the session that was opened last.
        self.session_id = NO_SESSION
        self.high_water_mark = BEFORE_FIRST

    # --- flush groups

    def enter(self) -> FlushGroup:
        """A request has arrived; return the flush group that it belongs to."""
        self._counters.requests += 1
        flush_group = self._flush_groups[-1]
        flush_group.unfinished += 1
        return flush_group

    def leave(self, ticket: Ticket, out: list[AppendOutcome]) -> None:
        """A request has ended (rule 1)."""
        ticket.flush_group.unfinished -= 1
        assert ticket.flush_group.unfinished >= 0
        while len(self._flush_groups) > 1 and not self._flush_groups[0].unfinished:
            out.extend(BarrierReached(token) for token in self._flush_groups.popleft().waiting)

    def flush(self, token: int) -> list[AppendOutcome]:
        """Return `BarrierReached` when everything received up to now has ended."""
        if self._flush_groups[-1].unfinished:
            self._flush_groups[-1].waiting.append(token)
            self._flush_groups.append(FlushGroup())
        elif len(self._flush_groups) > 1:
            self._flush_groups[-2].waiting.append(token)
        else:
            return [BarrierReached(token)]
        return []

    def abandon(self) -> list[AppendOutcome]:
        """No request will end any more: notify everything that waits."""
        out: list[AppendOutcome] = [
            BarrierReached(token) for group in self._flush_groups for token in group.waiting
        ]
        self._flush_groups = deque((FlushGroup(),))
        return out

    # --- answers

    def answer_rejected(self, rejected: Iterable[SingleTicket]) -> list[AppendOutcome]:
        """Answer writers from the lock queues (`lock_queues.py`)."""
        out: list[AppendOutcome] = []
        for ticket in rejected:
            self.finish(ticket, out)
        return out

    def answer_dependent(
        self, rejected: Iterable[SingleTicket], dependent: DependentAppends, next_id: TransactionId
    ) -> list[AppendOutcome]:
        """Answer writers with their predecessors in flight, or with LOCK if there are none."""
        out: list[AppendOutcome] = []
        for ticket in rejected:
            answer = dependent.predecessors_answer(ticket, self.high_water_mark, next_id)
            if answer is None:
                ticket.reject_for(min(ticket.conflict, self.high_water_mark))
                self.finish(ticket, out)
            else:
                self._counters.rejected[Reason.LOCK] += 1
                out.append(answer)
                self.leave(ticket, out)
        return out

    def finish_if_final(self, ticket: Ticket, out: list[AppendOutcome]) -> None:
        """Answer a request if all of its rows are final."""
        if isinstance(ticket, SingleTicket) or ticket.is_final:
            self.finish(ticket, out)

    def finish(self, ticket: Ticket, out: list[AppendOutcome]) -> None:
        """Answer a request whose rows are all final (rule 2)."""
        if not ticket.is_ahead:
            out.append(self._answer(ticket))
            self.leave(ticket, out)
        elif ticket.session_id == self.session_id:
            out.append(AheadOfLog(ticket))  # Flushes wait for that answer, too.
        else:
            out.extend(self.answer_ahead(ticket, is_proved=False))

    def answer_ahead(self, ticket: Ticket, *, is_proved: bool) -> list[AppendOutcome]:
        """Answer a request with rows that were ahead of the log (rule 2)."""
        if not is_proved:
            client_id = ticket.req_id.client_id
            ticket.end_unproved()
            if ticket.mount == self._mounts.number(client_id, ticket.connection):
                self._mounts.invalidate(client_id)
        out: list[AppendOutcome] = [self._answer(ticket)]
        self.leave(ticket, out)
        return out

    def fail(self, ticket: Ticket, error: WaltzError, out: list[AppendOutcome]) -> None:
        """Answer a request with an error: none of its rows is in the log."""
        if isinstance(error, TooLarge):
            self._counters.rejected[Reason.TOO_LARGE] += 1
        out.append(reject_ticket(ticket, error))
        self.leave(ticket, out)

    def _answer(self, ticket: Ticket) -> SendToClient:
        rejected = self._counters.rejected
        if isinstance(ticket, SingleTicket):
            if ticket.reason:
                rejected[ticket.reason] += 1
        elif ticket.reasons.any():
            for reason, count in enumerate(np.bincount(ticket.reasons).tolist()):
                rejected[reason] += count if reason else 0
        return ticket.answer(self.high_water_mark)
