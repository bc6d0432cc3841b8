"""Proofs of a session's high-water mark: a quorum confirms that it knows no later session.

A proof shows that the session was still the newest session when the proof was requested. A proof
changes nothing in the log.

Rules:
    1. The proved mark is the high-water mark that was committed when the proof was requested.
    2. Each request is answered once: with a quorum, at the timeout, or at the end of the session.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from waltz_core.records.record import ReplicaId, TransactionId
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.quorum import Tally, VoteResult
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_events import Effect, MarkProofFailed, MarkProved
from waltz_core.wire import messages


@dataclass(slots=True)
class _Proof:
    """A high-water mark that a quorum must confirm."""

    tally: Tally
    mark: TransactionId
    deadline_ms: int


class MarkProofs:
    """The proofs in progress in one session; the token of a proof is its correlation ID."""

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
        """Request a confirmation from the engaged replicas (rule 1)."""
        assert token not in self._proofs
        deadline_ms = now_ms + self._limits.proof_ms_max
        self._proofs[token] = _Proof(Tally(self._assigned), mark, deadline_ms)
        for peer in engaged:
            if (
                peer.unanswered_count < self._limits.lag_count_max
            ):  # A hanging replica confirms nothing.
                peer.send_request(messages.Heartbeat, now_ms=now_ms, correlation_id=token)

    def on_confirmed(self, token: int, replica: ReplicaId) -> None:
        """Count the confirmation of a replica that has promised no later session."""
        proof = self._proofs.get(token)
        if proof is None:
            return
        proof.tally.count_vote(replica)
        if proof.tally.result is VoteResult.COMMITTED:
            del self._proofs[token]
            self._outbox.append(MarkProved(token, proof.mark))

    def deadlines(self) -> Iterator[int]:
        """Yield the times at which the proofs time out."""
        return (proof.deadline_ms for proof in self._proofs.values())

    def fail_overdue(self, now_ms: int) -> None:
        """Answer the proofs that have timed out, as failed."""
        for token, proof in list(self._proofs.items()):
            if proof.deadline_ms <= now_ms:
                del self._proofs[token]
                self._outbox.append(MarkProofFailed(token))

    def fail_all(self) -> None:
        """The session has ended: answer all proofs as failed."""
        for token in self._proofs:
            self._outbox.append(MarkProofFailed(token))
        self._proofs.clear()
