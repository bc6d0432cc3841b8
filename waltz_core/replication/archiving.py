"""Archives committed batches, one range at a time, and reports the archived mark to replicas.

An engaged replica writes a range to the archive and reports the new manifest. This file decides
which replica does it, and whether the result may be recorded in ZooKeeper. The session writes it
there, together with the replica states.

Rules (decision 047):
    1. Only committed batches of a settled session are archived, in order, without gaps (AR 1).
    2. Before anything is appended in a session, an engaged replica's log must have the recorded
       chain at the archived mark (AR 8).
    3. A result counts when another engaged replica has the same chain at its end. With one engaged
       replica there is none to compare with.
    4. A failure ends the attempt, never the session; the next attempt waits, and uses another
       replica.
    5. A replica learns the mark when ZooKeeper has it and its own synced log has reached it (AR 9).
    6. A checkpoint is due when the archived records above the session's mark exceed a limit
       (AR 11). The limit is in bytes, since it bounds what stays on disks. The archived part of the
       session's bytes is estimated from IDs: replicas do not report it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from waltz_core.cluster.nodes.model import ArchivedMark
from waltz_core.machine import Report
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, Chain, ReplicaId, TransactionId
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_claim import Claim
from waltz_core.replication.session_events import Batch, CheckpointDue, Effect
from waltz_core.wire.messages import (
    ArchiveRange,
    LineageRequest,
    LineageResponse,
    RangeArchived,
    SetArchived,
    StorageMessage,
)

# The ticket of its requests; `Repairs` has those from 0 on.
ARCHIVE_TICKET: Final = -3
_DOUBLINGS_MAX: Final = 6


@dataclass(slots=True)
class _Attempt:
    """A range that a replica archives; when it has reported it, the mark to compare."""

    number: int
    replica: ReplicaId
    first: TransactionId
    found: ArchivedMark | None = None
    is_comparing: bool = False


class Archiving:
    """The archive of one session. `wanted` is the mark to write to ZooKeeper, if any."""

    def __init__(self, claim: Claim, *, outbox: list[Effect], limits: SessionLimits) -> None:
        self.recorded = claim.archived
        self.wanted: ArchivedMark | None = None
        self.is_checked = claim.archived is None  # rule 2
        self.contradiction: str | None = None
        # Each step of a session asks for it.
        self.is_used = limits.archive_interval_ms > 0 or claim.archived is not None
        self._session_id = claim.session_id
        self._outbox = outbox
        self._limits = limits
        self._unchecked: list[ReplicaSession] = []
        self._attempt: _Attempt | None = None
        self._attempt_count = 0
        self._failure_count = 0
        self._next_at_ms = 0
        self._learned: dict[ReplicaId, TransactionId] = {}
        # What was appended in this session, after its mark (rule 6).
        self._mark = BEFORE_FIRST
        self._submitted_last = BEFORE_FIRST
        self._submitted_bytes = 0
        self._is_checkpoint_due = False

    @property
    def last(self) -> TransactionId:
        """The last ID that is recorded as archived."""
        return BEFORE_FIRST if self.recorded is None else self.recorded.last

    @property
    def wake_at_ms(self) -> int | None:
        """When to begin the next attempt; None while one is under way, or if none is."""
        if self._limits.archive_interval_ms == 0 or self._attempt is not None:
            return None
        return self._next_at_ms if self.wanted is None else None

    # ---- the recorded chain (rule 2)

    def begin(self, engaged: Sequence[ReplicaSession], mark: TransactionId, now_ms: int) -> None:
        """Compare the recorded mark with the log of an engaged replica; the session has a mark.

        The replicas learn the archived mark first: the batches of an earlier session, which must be
        settled, may be in the archive only.
        """
        self._mark = mark
        self._next_at_ms = now_ms + self._limits.archive_interval_ms
        self._announce(engaged, now_ms)
        if not self.is_checked:
            self._unchecked = list(engaged)
            self._check_next(now_ms)

    def _check_next(self, now_ms: int) -> None:
        first = TransactionId(self.last + 1)
        self._unchecked[0].send_request(
            LineageRequest, first, first, now_ms=now_ms, ticket=ARCHIVE_TICKET
        )

    def _checked(self, answer: LineageResponse, now_ms: int) -> None:
        assert self.recorded is not None
        begins = not answer.lineage or answer.lineage[0].first == self.last + 1
        if begins and answer.chain_before == self.recorded.chain:
            self.is_checked = True
            return
        replica = self._unchecked.pop(0).replica
        if self._unchecked:
            self._check_next(now_ms)
            return
        self.contradiction = (
            f"the archive has IDs up to {self.last} with chain {self.recorded.chain.hex()}, but "
            f"replica {replica} has {answer.chain_before.hex()} there: the log is not the archived "
            "one"
        )

    # ---- attempts

    def advance(
        self, engaged: Sequence[ReplicaSession], committed: TransactionId, now_ms: int
    ) -> None:
        """Take all steps that have become possible in a settled session."""
        self._announce(engaged, now_ms)
        attempt = self._attempt
        if attempt is not None:
            if attempt.found is not None and not attempt.is_comparing:
                self._compare(attempt, attempt.found, engaged, now_ms)
            return
        is_due = self.wake_at_ms is not None and now_ms >= self._next_at_ms
        capable = [each for each in engaged if each.supports_archiving]
        if is_due and capable and committed > self.last:
            self._attempt_count += 1
            each = capable[(self._attempt_count + self._failure_count) % len(capable)]
            self._request(each, committed, now_ms)
        elif is_due:
            self._next_at_ms = now_ms + self._limits.archive_interval_ms

    def _request(self, each: ReplicaSession, committed: TransactionId, now_ms: int) -> None:
        recorded = self.recorded
        first = TransactionId(self.last + 1)
        self._attempt = _Attempt(self._attempt_count, each.replica, first)
        chain = GENESIS_CHAIN if recorded is None else recorded.chain
        manifest = ("", 0) if recorded is None else (recorded.manifest, recorded.manifest_crc)
        fields = (self._attempt_count, first, committed, chain, *manifest)
        each.send_request(ArchiveRange, *fields, now_ms=now_ms, ticket=ARCHIVE_TICKET)

    def archived(self, each: ReplicaSession, notice: RangeArchived, now_ms: int) -> None:
        """A replica has finished an attempt."""
        attempt = self._attempt
        if attempt is None or (attempt.replica, attempt.number) != (each.replica, notice.attempt):
            return
        if attempt.found is not None:
            return  # Only the first result of an attempt counts.
        if notice.error:
            self._fail(notice.error, now_ms)
        elif not notice.manifest:
            self._attempt, self._failure_count = None, 0
            self._next_at_ms = now_ms + self._limits.archive_interval_ms
        elif notice.last < attempt.first:
            self._fail(f"expected an end of at least {attempt.first}, found {notice.last}", now_ms)
        else:
            first = TransactionId(0) if self.recorded is None else self.recorded.first
            attempt.found = ArchivedMark(
                TransactionId(notice.last),
                Chain(bytes(notice.chain)),
                notice.stamp_ms,
                first,
                notice.manifest_crc,
                notice.manifest,
            )

    def _compare(
        self,
        attempt: _Attempt,
        found: ArchivedMark,
        engaged: Sequence[ReplicaSession],
        now_ms: int,
    ) -> None:
        """Request the chain at the end of another replica, when its log has reached it (rule 3)."""
        others = [each for each in engaged if each.replica != attempt.replica]
        if not others:
            self._attempt, self.wanted = None, found
            return
        for each in others:
            if each.synced_last >= found.last:
                attempt.is_comparing = True
                each.send_request(
                    LineageRequest, found.last, found.last, now_ms=now_ms, ticket=ARCHIVE_TICKET
                )
                return

    def answered(self, each: ReplicaSession, answer: LineageResponse, now_ms: int) -> None:
        """A replica has returned its lineage: at the recorded mark, or at the end of a range."""
        if not self.is_checked:
            self._checked(answer, now_ms)
            return
        attempt = self._attempt
        if attempt is None or attempt.found is None or not attempt.is_comparing:
            return
        found = attempt.found
        end = answer.lineage[-1] if answer.lineage else None
        if end is not None and (end.last, end.chain) == (found.last, found.chain):
            self._attempt, self.wanted = None, found
            return
        shown = "no batch end" if end is None or end.last != found.last else end.chain.hex()
        self._fail(
            f"expected the chain of {attempt.replica} at {found.last}, {found.chain.hex()}, found "
            f"{shown} at {each.replica}",
            now_ms,
        )

    def rejected(
        self, each: ReplicaSession, message: StorageMessage, reason: str, now_ms: int
    ) -> None:
        """A replica has rejected a request: the attempt has failed (rule 4)."""
        if isinstance(message, SetArchived):
            self._report("archive.failed", replica=each.replica, reason=reason)
        elif self._attempt is not None:
            self._fail(reason, now_ms)

    def _fail(self, reason: str, now_ms: int) -> None:
        assert self._attempt is not None
        replica, self._attempt = self._attempt.replica, None
        doublings = min(self._failure_count, _DOUBLINGS_MAX)
        self._failure_count += 1
        self._next_at_ms = now_ms + (self._limits.archive_interval_ms << doublings)
        self._report("archive.failed", replica=replica, reason=reason)

    # ---- the recorded mark

    def wrote(self, recorded: ArchivedMark | None, now_ms: int) -> None:
        """ZooKeeper is known to have this mark."""
        if recorded != self.recorded:
            assert recorded is not None
            self._report("archive.recorded", last=recorded.last, manifest=recorded.manifest)
            self._failure_count, self._next_at_ms = 0, now_ms
        self.recorded = recorded
        if recorded == self.wanted:
            self.wanted = None
        self._consider_checkpoint()

    def submitted(self, batch: Batch) -> None:
        """A batch is appended in this session."""
        self._submitted_last = batch.last
        self._submitted_bytes += len(batch.records)

    def _consider_checkpoint(self) -> None:
        """Rule 6."""
        archived_count = min(self.last, self._submitted_last) - self._mark
        if self._is_checkpoint_due or archived_count <= 0:
            return
        submitted_count = self._submitted_last - self._mark
        archived_bytes = self._submitted_bytes * archived_count // submitted_count
        if archived_bytes > self._limits.archived_bytes_max:
            self._is_checkpoint_due = True
            self._outbox.append(CheckpointDue(self._session_id))

    def _announce(self, engaged: Sequence[ReplicaSession], now_ms: int) -> None:
        """Send the recorded mark to the replicas that have reached it (rule 5)."""
        recorded = self.recorded
        if recorded is None:
            return
        for each in engaged:
            is_known = self._learned.get(each.replica, BEFORE_FIRST) >= recorded.last
            if each.supports_archiving and not is_known and each.synced_last >= recorded.last:
                self._learned[each.replica] = recorded.last
                last, chain, _, *others = recorded
                fields = (last, chain, *others)
                each.send_request(SetArchived, *fields, now_ms=now_ms, ticket=ARCHIVE_TICKET)

    def _report(self, name: str, **fields: object) -> None:
        session = ("session", self._session_id)
        self._outbox.append(Report(name, (session, *fields.items())))
