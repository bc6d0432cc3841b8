"""Proofs of a session's mark: a quorum of replicas says that it knows of no later session.

A proof changes nothing and decides nothing about the log. It only says that the mark was still that
of the newest session after the question had come.

Rules:
    1. The mark that is proved is the one that was committed when the proof was asked for.
    2. Each question is answered once: proved by a quorum, or not proved in time, or at the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from waltz_core.records.record import ReplicaId, TransactionId
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.quorum import Tally, VoteResult
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_events import Effect, MarkProved, MarkUnproved
from waltz_core.wire import messages


@dataclass(slots=True)
class _Proof:
    """A mark that a quorum is asked to confirm."""

    tally: Tally
    mark: TransactionId
    deadline_ms: int


class Proving:
    """The proofs that are under way in one session; their tokens are the tickets of heartbeats."""

    def __init__(
        self, assigned: Sequence[ReplicaId], *, outbox: list[Effect], limits: SessionLimits
    ) -> None:
        self._assigned = assigned
        self._outbox = outbox
        self._limits = limits
        self._proofs: dict[int, _Proof] = {}

    def begin(
        self, token: int, mark: TransactionId, engaged: Iterable[ReplicaSession], now_ms: int
    ) -> None:
        """Ask the engaged replicas (rule 1)."""
        assert token not in self._proofs
        deadline_ms = now_ms + self._limits.proof_ms_max
        self._proofs[token] = _Proof(Tally(self._assigned), mark, deadline_ms)
        for each in engaged:
            each.ask(messages.Heartbeat, now_ms=now_ms, ticket=token)

    def vote(self, token: int, replica: ReplicaId) -> None:
        """A replica knows of no later session."""
        proof = self._proofs.get(token)
        if proof is None:
            return
        proof.tally.vote(replica)
        if proof.tally.verdict is VoteResult.COMMITTED:
            del self._proofs[token]
            self._outbox.append(MarkProved(token, proof.mark))

    def deadlines(self) -> Iterator[int]:
        """Yield when each proof is given up."""
        return (proof.deadline_ms for proof in self._proofs.values())

    def give_up_late(self, now_ms: int) -> None:
        """Answer those that nobody confirmed in time."""
        for token, proof in list(self._proofs.items()):
            if proof.deadline_ms <= now_ms:
                del self._proofs[token]
                self._outbox.append(MarkUnproved(token))

    def end(self) -> None:
        """The session is over: nothing more can be proved in it."""
        for token in self._proofs:
            self._outbox.append(MarkUnproved(token))
        self._proofs.clear()
