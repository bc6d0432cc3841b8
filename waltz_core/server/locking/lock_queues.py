"""Queues of writers that a contended lock has rejected; notifies the writers one after the other.

Under optimistic locking, each rejected writer tries again. If all writers of one lock are notified
at once, all of them send again at once. One writer succeeds, and the work of the other writers is
wasted. If the writers are notified one after the other, each writer competes with few others.

Rules:
    1. Only final rejections wait here. The queue changes only the time at which a writer receives
       its rejection.
    2. Single appends with exactly the same locks form a queue. The first writer in the queue is
       notified when a transaction with these locks is committed. In a queue of dependent appends
       (`dependent_appends.py`), this writer is notified when such a transaction is admitted. If
       there is no such transaction for some time (`NOTIFY_FACTOR`), this writer is notified, too.
    3. No writer waits for longer than `WAIT_MS_MAX`, or beyond the end of the session.
    4. The rejection names the last committed transaction with the queue's locks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeGuard

from waltz_core.server.locking.lock_table import NO_ID
from waltz_core.server.locking.pending_appends import PendingAppend, PendingSingle
from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import RowOutcomeCode

WAIT_MS_MAX: Final = 100
# The next writer is notified after this multiple of the time that the last commit or answer took.
NOTIFY_FACTOR: Final = 3
NOTIFY_MS_MIN: Final = 2

LockKey: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _LockQueue:
    """The writers that wait for the same locks.

    The first writer is notified at `due_ms` at the latest.
    """

    due_ms: int
    notify_interval_ms: int = NOTIFY_MS_MIN
    notified_ms: int = 0
    last_id: int = NO_ID  # the ID of the last transaction with these locks
    waiting: deque[tuple[PendingSingle, int]] = field(default_factory=deque)  # with deadlines

    @property
    def process_at_ms(self) -> int:
        """When to process the queue next, unless a commit or an admission comes first."""
        return min(self.due_ms, self.waiting[0][1]) if self.waiting else self.due_ms


def is_contending(pending: PendingAppend) -> TypeGuard[PendingSingle]:
    """Whether this append has write locks and a lock has rejected it; other appends do not wait."""
    if not isinstance(pending, PendingSingle) or pending.reason is not RowOutcomeCode.LOCK:
        return False
    return bool(pending.message.write_locks)


class LockQueues:
    """Queues of rejected writers, by the module's rules.

    With `expects_next_attempt`, a rejected writer waits until its queue is due, even if the queue
    is empty. The reason is that the writer notified last is expected to send its next attempt
    first.
    """

    __slots__ = ("_expects_next_attempt", "_not_before_ms", "_queues", "waiting_count")

    def __init__(self, *, expects_next_attempt: bool) -> None:
        self._expects_next_attempt = expects_next_attempt
        self._queues: dict[LockKey, _LockQueue] = {}
        self.waiting_count = 0
        # The earliest time at which a queue must be processed; possibly too early, never too late.
        self._not_before_ms: int | None = None

    @property
    def due_ms(self) -> int | None:
        """When `take_due` may return a writer, unless a commit or an admission comes first."""
        return self._not_before_ms

    def on_rejected(self, pending: PendingSingle, now_ms: int) -> list[PendingSingle]:
        """Queue a rejected writer; return the writer that must be notified now, if any."""
        queue = self._enqueue(pending, now_ms, due_ms=0)
        if now_ms >= queue.due_ms:
            return [self._take_first(queue, now_ms)]
        self._note_due_time(queue)
        return []

    def on_writer_admitted(self, pending: PendingSingle, now_ms: int) -> list[PendingSingle]:
        """Return the writer to notify after the transaction of `pending` was admitted.

        The writer to notify is the first one in the queue for the locks of this transaction.
        """
        queue = self._queues.get(lock_key_of(pending))
        if queue is None:
            return []
        queue.notify_interval_ms = max(NOTIFY_MS_MIN, NOTIFY_FACTOR * (now_ms - queue.notified_ms))
        if not queue.waiting:
            queue.due_ms = now_ms
            return []
        return [self._take_first(queue, now_ms)]

    def on_committed(
        self,
        finished: Iterable[PendingAppend],
        rejected: Iterable[PendingSingle],
        *,
        took_ms: int,
        now_ms: int,
    ) -> list[PendingSingle]:
        """Return the writers to notify after a batch was committed.

        `finished` are the appends of the batch. `rejected` are the appends whose rejections are
        final now; these appends may wait in a queue.
        """
        queues_by_key: dict[LockKey, _LockQueue] = {}
        for pending in rejected:
            queue = self._enqueue(pending, now_ms, due_ms=now_ms)
            queue.last_id = max(queue.last_id, pending.conflict)
            queues_by_key[lock_key_of(pending)] = queue
        if not self._queues:
            return []
        for append in finished:
            if isinstance(append, PendingSingle) and append.transaction_id != NO_ID:
                key = lock_key_of(append)
                if key in self._queues:
                    queues_by_key[key] = self._queues[key]
                    queues_by_key[key].last_id = max(
                        queues_by_key[key].last_id, append.transaction_id
                    )
        notified: list[PendingSingle] = []
        for queue in queues_by_key.values():
            queue.notify_interval_ms = max(NOTIFY_MS_MIN, NOTIFY_FACTOR * took_ms)
            notified.append(self._take_first(queue, now_ms))
        self._remove_unused(now_ms)
        return notified

    def take_due(self, now_ms: int) -> list[PendingSingle]:
        """Remove and return the writers that must be notified now (rules 2 and 3)."""
        if self._not_before_ms is None or self._not_before_ms > now_ms:
            return []
        notified: list[PendingSingle] = []
        for queue in self._queues.values():
            while queue.waiting and queue.process_at_ms <= now_ms:
                notified.append(self._take_first(queue, now_ms))
        self._remove_unused(now_ms)
        return notified

    def drop(self, connection: ConnectionId) -> list[PendingSingle]:
        """Remove and return the writers of a closed connection."""
        dropped = self._take_matching(lambda pending: pending.connection == connection)
        self._remove_unused(0)
        return dropped

    def take_all(self) -> list[PendingSingle]:
        """Remove and return all waiting writers."""
        appends = self._take_matching(lambda _: True)
        self._queues.clear()
        self._not_before_ms = None
        return appends

    def _enqueue(self, pending: PendingSingle, now_ms: int, *, due_ms: int) -> _LockQueue:
        queue = self._queues.setdefault(lock_key_of(pending), _LockQueue(due_ms))
        queue.waiting.append((pending, now_ms + WAIT_MS_MAX))
        self.waiting_count += 1
        return queue

    def _take_first(self, queue: _LockQueue, now_ms: int) -> PendingSingle:
        pending, _ = queue.waiting.popleft()
        self.waiting_count -= 1
        pending.conflict = max(pending.conflict, queue.last_id)  # rule 4
        queue.notified_ms, queue.due_ms = now_ms, now_ms + queue.notify_interval_ms
        self._note_due_time(queue)
        return pending

    def _note_due_time(self, queue: _LockQueue) -> None:
        at_ms = queue.process_at_ms
        if self._not_before_ms is None or at_ms < self._not_before_ms:
            self._not_before_ms = at_ms

    def _remove_unused(self, now_ms: int) -> None:
        """Remove unused queues, and compute when the remaining queues must be processed."""
        for key, queue in list(self._queues.items()):
            if not queue.waiting and not (self._expects_next_attempt and queue.due_ms > now_ms):
                del self._queues[key]
        self._not_before_ms = min(
            (queue_left.process_at_ms for queue_left in self._queues.values()), default=None
        )

    def _take_matching(self, is_match: Callable[[PendingSingle], bool]) -> list[PendingSingle]:
        matching: list[PendingSingle] = []
        for queue in self._queues.values():
            matching += [pending for pending, _ in queue.waiting if is_match(pending)]
            queue.waiting = deque(entry for entry in queue.waiting if not is_match(entry[0]))
        self.waiting_count -= len(matching)
        return matching


def lock_key_of(pending: PendingSingle) -> LockKey:
    """Return the locks of an append, sorted: all writers of one queue have the same locks."""
    return tuple(sorted(pending.message.write_locks)), tuple(sorted(pending.message.read_locks))
