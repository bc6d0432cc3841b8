"""Majorities: the size of a quorum, the mark that a quorum has reached, and votes.

Appends, recovery and proofs of the high-water mark must use the same definition of a quorum.

Invariants:
    1. A quorum is a strict majority, so two disjoint groups of replicas cannot both be a quorum.
    2. If no replica's mark decreases, the mark that a quorum has reached does not decrease.
    3. A replica that has voted is never counted as lost. The results COMMITTED and LOST are final.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto

from waltz_core.records.record import ReplicaId, TransactionId


def quorum_size(replica_count: int) -> int:
    """Return the smallest strict majority of `replica_count` replicas."""
    assert replica_count > 0
    return replica_count // 2 + 1


def quorum_mark(marks: Sequence[TransactionId], quorum: int) -> TransactionId | None:
    """Return the highest ID that `quorum` marks have reached; None if there are fewer marks."""
    assert quorum > 0
    if len(marks) < quorum:
        return None
    return sorted(marks, reverse=True)[quorum - 1]


class VoteResult(Enum):
    """The result of the votes so far."""

    OPEN = auto()
    COMMITTED = auto()
    LOST = auto()


class Tally:
    """The votes of the replicas on one question, until there is a final result."""

    __slots__ = ("_lost_replicas", "_quorum", "_replicas", "_voters")

    def __init__(self, replicas: Iterable[ReplicaId]) -> None:
        self._replicas = frozenset(replicas)
        self._quorum = quorum_size(len(self._replicas))
        self._voters: set[ReplicaId] = set()
        self._lost_replicas: set[ReplicaId] = set()

    @property
    def result(self) -> VoteResult:
        """The result so far; OPEN until enough replicas have voted or are lost."""
        if len(self._voters) >= self._quorum:
            return VoteResult.COMMITTED
        if len(self._replicas) - len(self._lost_replicas) < self._quorum:
            return VoteResult.LOST
        return VoteResult.OPEN

    def count_vote(self, replica: ReplicaId) -> None:
        """Count the vote of a replica that has confirmed."""
        assert replica in self._replicas
        assert replica not in self._lost_replicas
        self._voters.add(replica)

    def count_lost(self, replica: ReplicaId) -> None:
        """Count a replica that can no longer answer as lost."""
        assert replica in self._replicas
        if replica in self._voters:
            return  # A vote stays valid: it was true when it was given.
        self._lost_replicas.add(replica)
