"""Answers that must not be stale: the high-water mark, and that a client is ahead of the log.

A server that was paused or cut off does not know that it has been replaced, and still has a mark to
tell. Whoever asks for the mark gets it from here, after a quorum of storages has confirmed, later
than the question, that it knows no later session; or without asking them while such a confirmation
is fresh.

Rules (docs/design/correctness.md 2.4, row 16, and 2.3, "ZooKeeper away"):
    1. A proof that was begun before a question came answers that question only when it is asked
       for no more than `session_timer_ms` of freshness.
    2. One proof is under way at a time; questions that come meanwhile share the next one.
    3. Who takes more to be in the log than is known here may have it from a later owner. That he
       is ahead ends his work for good, so it is told only after a proof that began later than his
       request (row 25), however fresh the last one is; without it he is told to try again.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from waltz_core.records.record import BEFORE_FIRST
from waltz_core.replication.session_events import ProveMark
from waltz_core.server.append.mounts import mark_of
from waltz_core.wire.messages import (
    ClientMessage,
    FeedRequest,
    MountRequest,
    MountWriter,
    RangeRequest,
    TransactionDataRequest,
)

QuestionT = TypeVar("QuestionT")


class Proofs(Generic[QuestionT]):
    """Who waits for which proof."""

    __slots__ = (
        "_asked",
        "_asked_ms",
        "_is_under_way",
        "_session_timer_ms",
        "_token",
        "_waiting",
        "proved_ms",
    )

    def __init__(self, session_timer_ms: int) -> None:
        self._session_timer_ms = session_timer_ms
        self._waiting: list[QuestionT] = []
        self._asked: list[QuestionT] = []
        self._asked_ms = 0
        self._is_under_way = False
        self._token = 0
        # When a quorum last confirmed the session; None before it did.
        self.proved_ms: int | None = None

    def is_fresh(self, now_ms: int) -> bool:
        """Whether the session timer still covers an answer without a proof."""
        return self.proved_ms is not None and now_ms - self.proved_ms <= self._session_timer_ms

    def confirm(self, at_ms: int) -> None:
        """A quorum answered a request that was sent at `at_ms`: that is a proof too."""
        if self.proved_ms is None or at_ms > self.proved_ms:
            self.proved_ms = at_ms

    def ask(self, question: QuestionT, now_ms: int) -> list[ProveMark]:
        """Let a question wait for a proof that begins now or later."""
        self._waiting.append(question)
        return self._begin(now_ms)

    def proved(self, token: int, now_ms: int) -> tuple[Sequence[QuestionT], list[ProveMark]]:
        """Return the questions that this proof answers, and the next proof to ask for."""
        if token != self._token or not self._is_under_way:
            return (), []
        answered, self._asked, self._is_under_way = self._asked, [], False
        self.confirm(self._asked_ms)
        return answered, self._begin(now_ms)

    def failed(self, token: int, now_ms: int) -> tuple[Sequence[QuestionT], list[ProveMark]]:
        """Return the questions that stay without this proof, and the next proof to ask for."""
        if token != self._token or not self._is_under_way:
            return (), []
        unanswered, self._asked, self._is_under_way = self._asked, [], False
        return unanswered, self._begin(now_ms)

    def drop(self, is_gone: Callable[[QuestionT], bool]) -> None:
        """Forget the questions that nobody waits for any more."""
        self._asked = [each for each in self._asked if not is_gone(each)]
        self._waiting = [each for each in self._waiting if not is_gone(each)]

    def reset(self) -> Sequence[QuestionT]:
        """The session is over: return every question; nothing is proved any more."""
        questions = [*self._asked, *self._waiting]
        self._asked, self._waiting, self._is_under_way = [], [], False
        self.proved_ms = None
        return questions

    def _begin(self, now_ms: int) -> list[ProveMark]:
        if self._is_under_way or not self._waiting:
            return []
        self._asked, self._waiting, self._is_under_way = self._waiting, [], True
        self._asked_ms = now_ms
        self._token += 1
        return [ProveMark(self._token)]


def claim_of(message: ClientMessage) -> int:
    """Return the highest id that a request takes to be in the log (rule 3); appends are judged."""
    match message:
        case MountRequest() | MountWriter():
            return mark_of(message)
        case FeedRequest():
            return message.client_high_water_mark
        case RangeRequest():
            return message.first
        case TransactionDataRequest():
            return message.transaction_id
        case _:
            return BEFORE_FIRST
