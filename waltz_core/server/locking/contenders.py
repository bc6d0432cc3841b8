"""Writers that a lock has refused, told one after the other, so that one of them gets in.

Under optimistic locking everybody who was refused tries again. If all who wait for one hot lock are
told at once, all of them send at once, one gets in, and the rest have worked for nothing. Told in
turn, each finds few others on the way.

Rules:
    1. Only what is final is held back: a transaction that was refused for one that is committed.
       Holding it back changes when its writer hears of it, and nothing else.
    2. Writers that were sent one by one and asked for exactly the same locks form a queue. Whenever
       such a transaction has landed, and some time after none has, the first in the queue is told.
    3. Nobody is held back for longer than `HELD_MS_MAX`, nor beyond the end of the session.
    4. Who is told hears of the last transaction of the queue's locks that has come before him.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeGuard

from waltz_core.server.locking.lock_table import REFUSED
from waltz_core.server.locking.tickets import (
    SingleTicket,
    Ticket,
)
from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import Reason

HELD_MS_MAX: Final = 100
# The one who was told has so many times as long as the last commit took, until the next is told.
PATIENCE: Final = 3
PATIENCE_MS_MIN: Final = 2

Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Queue:
    """Who waits for some locks; the first is told at `due_ms` at the latest."""

    due_ms: int
    patience_ms: int
    waiting: deque[tuple[SingleTicket, int]] = field(default_factory=deque)  # held back until
    last_id: int = -1  # the last transaction with these locks

    @property
    def told_at_ms(self) -> int:
        """When the first is told, if nothing lands before."""
        return min(self.due_ms, self.waiting[0][1])


def is_contender(ticket: Ticket) -> TypeGuard[SingleTicket]:
    """Whether it was refused for a lock that it wants to write; who only reads hinders nobody."""
    if not isinstance(ticket, SingleTicket) or ticket.reason is not Reason.LOCK:
        return False
    return bool(ticket.message.write_locks)


class Contenders:
    """See the module's rules."""

    __slots__ = ("_not_before_ms", "_queues")

    def __init__(self) -> None:
        self._queues: dict[Key, _Queue] = {}
        # Nobody is due earlier. It is asked for at every event, so it may be too early, not late.
        self._not_before_ms: int | None = None

    @property
    def due_ms(self) -> int | None:
        """When `due` may have somebody to tell, if nothing lands before."""
        return self._not_before_ms

    def landed(
        self,
        landed: Iterable[Ticket],
        refused: Iterable[SingleTicket],
        *,
        took_ms: int,
        now_ms: int,
    ) -> list[SingleTicket]:
        """A batch has landed, and refusals are final with it; return who is told now.

        `refused` are those of the `landed` who may be held back.
        """
        patience_ms = max(PATIENCE_MS_MIN, PATIENCE * took_ms)
        touched: dict[Key, None] = {}
        for ticket in refused:
            key = key_of(ticket)
            queue = self._queues.setdefault(key, _Queue(now_ms, patience_ms))
            queue.waiting.append((ticket, now_ms + HELD_MS_MAX))
            queue.last_id = max(queue.last_id, ticket.conflict)
            touched[key] = None
        if not self._queues:
            return []
        for each in landed:
            if not isinstance(each, SingleTicket) or each.transaction_id == REFUSED:
                continue
            key = key_of(each)
            if key in self._queues:
                queue = self._queues[key]
                queue.last_id = max(queue.last_id, each.transaction_id)
                touched[key] = None
        told: list[SingleTicket] = []
        for key in touched:
            queue = self._queues[key]
            queue.patience_ms = patience_ms
            told.append(self._next_of(key, queue, now_ms))
            if queue.waiting:
                due_ms = queue.told_at_ms
                self._not_before_ms = min(due_ms, self._not_before_ms or due_ms)
        if not self._queues:
            self._not_before_ms = None
        return told

    def due(self, now_ms: int) -> list[SingleTicket]:
        """Return whose time has come (rules 2 and 3)."""
        if self._not_before_ms is None or self._not_before_ms > now_ms:
            return []
        told: list[SingleTicket] = []
        for key, queue in list(self._queues.items()):
            while queue.waiting and queue.told_at_ms <= now_ms:
                told.append(self._next_of(key, queue, now_ms))
        self._look()
        return told

    def drop(self, connection: ConnectionId) -> list[SingleTicket]:
        """Forget a closed connection's; return them."""
        return self._take(lambda ticket: ticket.connection == connection)

    def all(self) -> list[SingleTicket]:
        """Hold nobody back any more; return them."""
        return self._take(lambda _: True)

    def _next_of(self, key: Key, queue: _Queue, now_ms: int) -> SingleTicket:
        ticket, _ = queue.waiting.popleft()
        ticket.conflict = max(ticket.conflict, queue.last_id)  # rule 4
        queue.due_ms = now_ms + queue.patience_ms
        if not queue.waiting:
            del self._queues[key]
        return ticket

    def _take(self, wanted: Callable[[SingleTicket], bool]) -> list[SingleTicket]:
        taken: list[SingleTicket] = []
        for key, queue in list(self._queues.items()):
            taken += [ticket for ticket, _ in queue.waiting if wanted(ticket)]
            queue.waiting = deque(each for each in queue.waiting if not wanted(each[0]))
            if not queue.waiting:
                del self._queues[key]
        self._look()
        return taken

    def _look(self) -> None:
        times = (queue.told_at_ms for queue in self._queues.values())
        self._not_before_ms = min(times, default=None)


def key_of(ticket: SingleTicket) -> Key:
    """Return what those have in common who wait for one another: exactly the same locks."""
    return tuple(sorted(ticket.message.write_locks)), tuple(sorted(ticket.message.read_locks))
