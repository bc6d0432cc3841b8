"""Settles earlier sessions: finds which of their batches are in the log, and the last commit stamp.

A new session settles the earlier sessions before its first append: it requests the lineage (the
list of batches with their sessions) of one engaged replica. The log of an engaged replica up to the
high-water mark is the decided log. If this replica has lost the batches, the session queries the
next replica.

Rules (docs/design/correctness.md 2.3 and 2.4, row 21):
    1. Batches of an earlier session are recognized by their session in the lineage, never by IDs.
    2. If another owner may have written the log, commit stamps continue from the last stamp in the
       log, even if this server's clock is behind this stamp.
    3. A batch that a replica has reconstructed has neither session nor stamp. So a reconstructed
       batch does not prove that a batch of a session is missing from the log.
    4. If the batches in doubt have expired from the archive, their outcome is unknown (AR 15 of
       decision 047). Their outcome is also unknown if only the archive has these batches, and no
       engaged replica can read them there now. The reason: the partition does not wait for an
       object store.
"""

from collections.abc import Sequence
from typing import Final

from waltz_core.errors import (
    ArchiveUnavailable,
    BeforeLogStart,
    ObjectMissing,
    RemoteProtocolError,
    WaltzError,
)
from waltz_core.records.record import BEFORE_FIRST, RECONSTRUCTED, LineageEntry, TransactionId
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_claim import SessionClaim
from waltz_core.replication.session_events import SessionSettled
from waltz_core.wire.messages import LineageRequest, LineageResponse

# The correlation ID of these queries. `RepairRunner` uses IDs from 0 on.
IN_DOUBT_CORRELATION_ID: Final = -2


class InDoubtQueries:
    """Queries engaged replicas, one at a time, for the outcome of batches in doubt.

    `outcome` is set when all queries are answered.
    """

    def __init__(
        self, claim: SessionClaim, mark: TransactionId, engaged: Sequence[ReplicaSession]
    ) -> None:
        assert engaged
        self._replicas = list(engaged)  # the first one is queried
        self.outcome: SessionSettled | None = None
        self._claim = claim
        self._mark = mark
        self._stamp_ms: int | None = (
            0 if claim.follows_own_session or mark == BEFORE_FIRST else None
        )
        if (
            self._stamp_ms is None
            and claim.archived_mark is not None
            and claim.archived_mark.last == mark
        ):
            self._stamp_ms = claim.archived_mark.stamp_ms  # the log may begin after this mark
        self._entries_in_doubt: list[LineageEntry] = []

    def begin(self, now_ms: int) -> None:
        """Send the next query; if no query is necessary, set the outcome at once."""
        if self._stamp_ms is None:
            self._replicas[0].send_request(
                LineageRequest,
                self._mark,
                self._mark,
                now_ms=now_ms,
                correlation_id=IN_DOUBT_CORRELATION_ID,
            )
            return
        in_doubt = self._claim.in_doubt
        if in_doubt is None:
            self._set_outcome(self._mark)
        elif min(in_doubt.last, self._mark) <= in_doubt.committed:
            self._set_outcome(in_doubt.committed)
        else:
            self._request_batches_in_doubt(min(in_doubt.last, self._mark), now_ms)

    def on_lineage_received(
        self, peer: ReplicaSession, answer: LineageResponse, now_ms: int
    ) -> None:
        """Process an answer; the next query or the outcome follows.

        Raises:
            RemoteProtocolError: the answer is invalid, or no engaged replica has the batches (rule
                3).
        """
        if not answer.lineage:
            raise RemoteProtocolError(
                f"storage {peer.replica}: expected a lineage with at least one batch, found none"
            )
        if any(entry.session_id == RECONSTRUCTED for entry in answer.lineage):
            self._query_next_replica(peer, now_ms)
            return
        if self._stamp_ms is None:
            self._stamp_ms = answer.lineage[-1].stamp_ms
            self.begin(now_ms)
            return
        in_doubt = self._claim.in_doubt
        assert in_doubt is not None
        self._entries_in_doubt[:0] = answer.lineage
        first = self._entries_in_doubt[0].first
        if first > in_doubt.committed + 1:
            self._request_batches_in_doubt(TransactionId(first - 1), now_ms)
            return
        last = in_doubt.committed
        for entry in self._entries_in_doubt:
            if entry.session_id != in_doubt.session_id:
                break
            last = TransactionId(max(last, entry.last))
        self._set_outcome(min(last, in_doubt.last, self._mark))

    def on_batches_unreadable(self, error: WaltzError, now_ms: int) -> bool:
        """A replica cannot return the batches in doubt (rule 4); return False for other errors.

        If the batches in doubt have expired, no replica has them, so their outcome is unknown at
        once. If they have not expired, they are requested from the next replica.
        """
        in_doubt = self._claim.in_doubt
        if self._stamp_ms is None or in_doubt is None:
            return False
        if isinstance(error, BeforeLogStart):
            self._replicas.clear()
        elif not isinstance(error, ArchiveUnavailable | ObjectMissing):
            return False
        del self._replicas[:1]
        self._entries_in_doubt.clear()
        if self._replicas:
            self.begin(now_ms)
        else:
            self._set_outcome(in_doubt.committed, has_unknown_outcomes=True)
        return True

    def _query_next_replica(self, peer: ReplicaSession, now_ms: int) -> None:
        del self._replicas[0]
        self._entries_in_doubt.clear()
        if not self._replicas:
            raise RemoteProtocolError(
                f"storage {peer.replica} has lost the batches that show how the previous "
                "store session ended, and so have all other storages that are in sync"
            )
        self.begin(now_ms)

    def _request_batches_in_doubt(self, last: TransactionId, now_ms: int) -> None:
        assert self._claim.in_doubt is not None
        first = self._claim.in_doubt.committed + 1
        self._replicas[0].send_request(
            LineageRequest, first, last, now_ms=now_ms, correlation_id=IN_DOUBT_CORRELATION_ID
        )

    def _set_outcome(
        self, committed_last: TransactionId, *, has_unknown_outcomes: bool = False
    ) -> None:
        assert self._stamp_ms is not None
        self.outcome = SessionSettled(
            self._claim.session_id,
            committed_last,
            self._stamp_ms,
            has_unknown_outcomes=has_unknown_outcomes,
        )
