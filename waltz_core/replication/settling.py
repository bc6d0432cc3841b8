"""What became of earlier sessions, and where their commit stamps ended: told before any append.

It is the only question that a new session has for the log itself. It is asked of one engaged
replica, whose log up to the mark is the decided one, and of the next where that one has lost the
batches.

Rules (docs/design/correctness.md 2.3 and 2.4, row 21):
    1. What an owner submitted is known again by its session in the lineage, never by its ids.
    2. Commit stamps go on from the last one in the log when somebody else may have written it,
       whatever this server's clock says.
    3. A batch that a replica has made up says neither who wrote it nor when: its silence about a
       session is no "it is not in the log".
"""

from collections.abc import Sequence
from typing import Final

from waltz_core.errors import RemoteProtocolError
from waltz_core.records.record import BEFORE_FIRST, MADE_UP, LineageEntry, TransactionId
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_claim import Claim
from waltz_core.replication.session_events import Settled
from waltz_core.wire.messages import LineageRequest, LineageResponse

# The ticket of its requests; `Repairs` has those from 0 on.
SETTLING: Final = -2


class Settling:
    """The questions of one session, one at a time; `outcome` is there when all are answered."""

    def __init__(
        self, claim: Claim, mark: TransactionId, engaged: Sequence[ReplicaSession]
    ) -> None:
        assert engaged
        self._replicas = list(engaged)  # the first one is asked
        self.outcome: Settled | None = None
        self._claim = claim
        self._mark = mark
        self._stamp_ms: int | None = 0 if claim.unbroken or mark == BEFORE_FIRST else None
        self._doubtful: list[LineageEntry] = []

    def begin(self, now_ms: int) -> None:
        """Ask a replica what has to be asked, or know the outcome at once."""
        if self._stamp_ms is None:
            self._replicas[0].ask(
                LineageRequest, self._mark, self._mark, now_ms=now_ms, ticket=SETTLING
            )
            return
        doubt = self._claim.in_doubt
        if doubt is None:
            self._settle(self._mark)
        elif min(doubt.last, self._mark) <= doubt.committed:
            self._settle(doubt.committed)
        else:
            self._ask_doubtful(min(doubt.last, self._mark), now_ms)

    def heard(self, each: ReplicaSession, answer: LineageResponse, now_ms: int) -> None:
        """Take an answer in; the next question or the outcome follows.

        Raises:
            RemoteProtocolError: it is no answer to what was asked, or no replica is left that has
                the batches (rule 3).
        """
        if not answer.lineage:
            raise RemoteProtocolError(f"storage {each.replica}: an empty lineage")
        if any(entry.session_id == MADE_UP for entry in answer.lineage):
            self._ask_the_next(each, now_ms)
            return
        if self._stamp_ms is None:
            self._stamp_ms = answer.lineage[-1].stamp_ms
            self.begin(now_ms)
            return
        doubt = self._claim.in_doubt
        assert doubt is not None
        self._doubtful[:0] = answer.lineage
        first = self._doubtful[0].first
        if first > doubt.committed + 1:
            self._ask_doubtful(TransactionId(first - 1), now_ms)
            return
        last = doubt.committed
        for entry in self._doubtful:
            if entry.session_id != doubt.session_id:
                break
            last = TransactionId(max(last, entry.last))
        self._settle(min(last, doubt.last, self._mark))

    def _ask_the_next(self, each: ReplicaSession, now_ms: int) -> None:
        del self._replicas[0]
        self._doubtful.clear()
        if not self._replicas:
            raise RemoteProtocolError(
                f"storage {each.replica} has lost the batches that say what became of the session "
                "before, and so have all others that are engaged"
            )
        self.begin(now_ms)

    def _ask_doubtful(self, last: TransactionId, now_ms: int) -> None:
        assert self._claim.in_doubt is not None
        first = self._claim.in_doubt.committed + 1
        self._replicas[0].ask(LineageRequest, first, last, now_ms=now_ms, ticket=SETTLING)

    def _settle(self, committed_last: TransactionId) -> None:
        assert self._stamp_ms is not None
        self.outcome = Settled(self._claim.session_id, committed_last, self._stamp_ms)
