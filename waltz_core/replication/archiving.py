"""Archives committed batches, one range at a time, and sends the archived mark to replicas.

An engaged replica writes a range of batches to the archive, and reports the new manifest (the list
of the partition's files in the archive). This module chooses the replica, and decides whether its
result may be recorded in ZooKeeper. The session then writes the result to ZooKeeper, together with
the replica states. Replicas also delete files that no manifest lists.

An *attempt* is one such request to a replica: to archive a range, collect garbage, expire objects,
or replace an object. One attempt runs at a time.

Rules (decision 047):
    1. Only committed batches of a settled session are archived, in order, without gaps (AR 1).
    2. The log must be the log that was archived. So before the first append of a session, an
       engaged replica's log must have the recorded hash chain at the archived mark (AR 8).
    3. The result of archiving a range counts only if another engaged replica has the same chain at
       the end of the range. If there is only one engaged replica, the result counts without this
       check.
    4. A failure ends the attempt, never the session. The next attempt waits, and uses another
       replica.
    5. A replica receives the archived mark when ZooKeeper has recorded the mark, and the replica
       has synced its own log up to the mark (AR 9).
    6. If a replica reports no progress for `NO_PROGRESS_MS_MAX`, the attempt has failed, because
       the object store may hang, or the storage may be stopped. A later result of this attempt is
       ignored.
    7. An engaged replica collects garbage when this session has recorded a mark, and then at
       intervals (AR 16). A file that is still needed must not be deleted, so these conditions
       apply:
        - No other attempt is in progress, and no write of a mark has an unknown outcome.
        - All replicas are connected.
        - No replica's log begins above the recorded mark. If a log does, ZooKeeper was rolled back.
       The request has a number, like every attempt. So the storage knows: all attempts of this
       session with lower numbers have ended, and the files of these attempts may be garbage.
    8. Archived records above the session's mark cannot be removed from disks yet. When their size
       exceeds a limit, a checkpoint is due (AR 11). The size is estimated from the IDs, because
       replicas do not report it.
    9. Objects expire when a client requests it, and at intervals if a retention is set (AR 15). An
       engaged replica writes the new manifest in an attempt. The first available ID never decreases
       (AR 7). It is at most the archived mark + 1, where logs may begin.
    10. An object is replaced when a client requests it (AR 5). The engaged replicas try the
        replacement one after the other, until one has the object's records. The recorded mark does
        not change. There is one replacement at a time, and its outcome is kept until the next
        request.
    11. At its end, an attempt reports the size of the records that were not archived before the
        attempt. The reported lag is this size, plus the estimated size of later appends, minus the
        part that the attempt has archived. The size of later appends is estimated from the average
        size of a record.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import le
from typing import Final, NamedTuple, TypeAlias, assert_never

from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.machine import Report, earliest
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, Chain, ReplicaId, TransactionId
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_session import ReplicaSession
from waltz_core.replication.session_claim import SessionClaim
from waltz_core.replication.session_events import (
    ArchiveBacklog,
    Batch,
    CheckpointDue,
    Effect,
    ReplaceArchivedObject,
    ReplacementOutcome,
)
from waltz_core.wire.messages import (
    ArchiveProgress,
    ArchiveRange,
    CollectGarbage,
    ExpireObjects,
    GarbageCollected,
    LineageRequest,
    LineageResponse,
    ObjectsExpired,
    RangeArchived,
    ReplaceObject,
    SetArchived,
    StorageMessage,
)

# The correlation ID of archive requests. `RepairRunner` uses IDs from 0 on.
ARCHIVE_CORRELATION_ID: Final = -3
ArchiveNotice: TypeAlias = RangeArchived | GarbageCollected | ObjectsExpired | ArchiveProgress
ARCHIVE_NOTICES: Final = (RangeArchived, GarbageCollected, ObjectsExpired, ArchiveProgress)
# A single call of an object store may take this long, and a replica reports no progress meanwhile.
NO_PROGRESS_MS_MAX: Final = 300_000
EXPIRY_INTERVAL_MS: Final = 3_600_000
EXPIRY_RETRY_MS: Final = 10_000
_DOUBLINGS_MAX: Final = 6
# The maximum pause before the first attempt of a session. A session can end at its first
# checkpoint, 10 s after its start. Even such a session must begin an attempt.
_FIRST_ATTEMPT_DELAY_MS_MAX: Final = 10_000


class ExpiryBounds(NamedTuple):
    """Which objects expire: those with IDs below `before`, or commit times before `before_ms`.

    0 means that the field sets no limit.
    """

    before: TransactionId
    before_ms: int


_NO_EXPIRY: Final = ExpiryBounds(TransactionId(0), 0)


@dataclass(slots=True)
class _Attempt:
    """One attempt of a replica: to archive a range, collect garbage, expire or replace objects.

    `last_report_ms` is the time of the replica's last report. `reported_mark` is the end of the
    range that the replica has archived, to be compared with another replica's log (rule 3).
    """

    number: int
    replica: ReplicaId
    first: TransactionId
    last_report_ms: int
    is_garbage_collection: bool = False
    expiry: ExpiryBounds | None = None
    is_replacement: bool = False
    reported_mark: ArchivedMark | None = None
    is_comparing: bool = False

    @property
    def archives_range(self) -> bool:
        return not self.is_garbage_collection and self.expiry is None and not self.is_replacement


@dataclass(slots=True)
class _Replacement:
    """A replacement that a client has requested.

    `written_by` is the replica that has written the manifest, until ZooKeeper has recorded this
    manifest; otherwise None.
    """

    request: ReplaceArchivedObject
    failures: dict[ReplicaId, str] = field(default_factory=dict)
    written_by: ReplicaId | None = None
    outcome: ReplacementOutcome | None = None

    @property
    def failure_reasons(self) -> tuple[str, ...]:
        return tuple(f"{replica}: {reason}" for replica, reason in self.failures.items())


class _BacklogEstimate:
    """Estimates the backlog: the committed records that are not archived (rule 11)."""

    def __init__(self, archived: TransactionId) -> None:
        self.count = 0
        self.since_ms: int | None = None
        self._archived_last = archived
        self._last_report = (archived, archived, 0)  # (first, last, bytes) of IDs first + 1..last

    def update(self, archived: TransactionId, committed: TransactionId, now_ms: int) -> None:
        """Update the estimate with the current marks."""
        self.count = max(0, committed - archived)
        if self.count == 0:
            self.since_ms = None
        elif self.since_ms is None or self._archived_last < archived >= self._last_report[1]:
            self.since_ms = now_ms
        self._archived_last = archived

    def on_backlog_reported(self, notice: RangeArchived, now_ms: int) -> None:
        """Update the estimate: a replica has reported the amount of its unarchived records."""
        last = TransactionId(notice.unarchived_last)
        if last > self._archived_last:
            self._last_report = (self._archived_last, last, notice.unarchived_bytes)
            if notice.unarchived_age_ms >= 0:
                self.since_ms = now_ms - notice.unarchived_age_ms

    def byte_count(self, bytes_after: Callable[[TransactionId], int | None]) -> int | None:
        """Return the approximate size of the records that are not archived, in bytes.

        `bytes_after` returns the size of the records after an ID; None if it is not known.
        """
        first, last, reported_bytes = self._last_report
        waiting = max(0, last - self._archived_last)
        newer_bytes = bytes_after(max(last, self._archived_last)) if self.count > waiting else 0
        if newer_bytes is None:
            return None
        return newer_bytes + (reported_bytes * waiting // (last - first) if waiting else 0)


def _fields_of_mark(mark: ArchivedMark) -> tuple[TransactionId, Chain, str, int]:
    return mark.last, mark.chain, mark.manifest, mark.manifest_crc


class SessionArchiver:
    """Archives the log during one session.

    `mark_to_write` is the archived mark that must be written to ZooKeeper, if any.
    """

    def __init__(self, claim: SessionClaim, *, outbox: list[Effect], limits: SessionLimits) -> None:
        self.recorded_mark = claim.archived_mark
        self.mark_to_write: ArchivedMark | None = None
        self.is_checked = claim.archived_mark is None  # rule 2
        self.contradiction: str | None = None
        # Each step of a session reads this attribute.
        self.has_archive = limits.archive_interval_ms > 0 or claim.archived_mark is not None
        self._backlog_estimate = _BacklogEstimate(self.archived_last)
        self._session_id = claim.session_id
        self._outbox = outbox
        self._limits = limits
        self._replicas_to_compare: list[ReplicaSession] = []
        self._attempt: _Attempt | None = None
        self._attempt_count = 0
        self._failure_count = 0
        self._next_attempt_at_ms = 0
        self._next_collection_at_ms: int | None = None  # None until a mark is recorded (rule 7)
        self._announced_marks: dict[ReplicaId, ArchivedMark] = {}
        # Three expiries: the one that clients have requested, the one in progress, and the last
        # completed one, with the archived mark at its end.
        self._requested_expiry = _NO_EXPIRY
        self._running_expiry = _NO_EXPIRY
        self._finished_expiry = (_NO_EXPIRY, BEFORE_FIRST)
        self._next_expiry_at_ms: int | None = None  # rule 9
        self._replacement: _Replacement | None = None  # the last requested replacement
        # The appends of this session, after its mark (rule 8).
        self._mark = BEFORE_FIRST
        self._submitted_last = BEFORE_FIRST
        self._submitted_bytes = 0
        self._is_checkpoint_due = False

    @property
    def archived_last(self) -> TransactionId:
        """The last ID that is recorded as archived."""
        return BEFORE_FIRST if self.recorded_mark is None else self.recorded_mark.last

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is in progress; its work is lost if the session ends now."""
        return self._attempt is not None or self.mark_to_write is not None

    @property
    def wake_at_ms(self) -> int | None:
        """When the next attempt is due, or when the attempt in progress times out."""
        if self._attempt is not None:
            return self._attempt.last_report_ms + NO_PROGRESS_MS_MAX
        if self.mark_to_write is not None:
            return None
        expire_at_ms = None if self.recorded_mark is None else self._next_expiry_at_ms
        if self._limits.archive_interval_ms == 0:
            return expire_at_ms
        return earliest(
            expire_at_ms, earliest(self._next_attempt_at_ms, self._next_collection_at_ms)
        )

    # ---- the recorded chain (rule 2)

    def begin(self, engaged: Sequence[ReplicaSession], mark: TransactionId, now_ms: int) -> None:
        """Compare the recorded archived mark with an engaged replica's log, when the session opens.

        The replicas receive the archived mark before this comparison. The reason: to settle an
        earlier session, a replica may need batches that only the archive has.
        """
        self._mark = mark
        self._next_attempt_at_ms = now_ms + min(
            self._limits.archive_interval_ms, _FIRST_ATTEMPT_DELAY_MS_MAX
        )
        if self._limits.archive_retention_ms:
            self._next_expiry_at_ms = now_ms
        self._announce_mark(engaged, now_ms)
        if not self.is_checked:
            self._replicas_to_compare = list(engaged)
            self._compare_next_replica(now_ms)

    def _compare_next_replica(self, now_ms: int) -> None:
        first = TransactionId(self.archived_last + 1)
        self._replicas_to_compare[0].send_request(
            LineageRequest, first, first, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
        )

    def _on_archived_mark_checked(self, answer: LineageResponse, now_ms: int) -> None:
        assert self.recorded_mark is not None
        begins_at_mark = not answer.lineage or answer.lineage[0].first == self.archived_last + 1
        if begins_at_mark and answer.chain_before == self.recorded_mark.chain:
            self.is_checked = True
            return
        self._on_mark_mismatch(f"has the chain hash {answer.chain_before.hex()} there", now_ms)

    def on_mark_before_log_start(self, now_ms: int) -> None:
        """The compared replica has no chain at the recorded mark, because its log begins later."""
        self._on_mark_mismatch("begins later", now_ms)

    def _on_mark_mismatch(self, difference: str, now_ms: int) -> None:
        assert self.recorded_mark is not None
        replica = self._replicas_to_compare.pop(0).replica
        if self._replicas_to_compare:
            self._compare_next_replica(now_ms)
            return
        self.contradiction = (
            f"the archive has transactions up to {self.archived_last} with chain hash "
            f"{self.recorded_mark.chain.hex()}, but the log of replica {replica} {difference}: the "
            "log is not the archived one, or ZooKeeper's data was rolled back"
        )

    # ---- attempts

    def advance(
        self,
        engaged: Sequence[ReplicaSession],
        replicas: Collection[ReplicaSession],
        committed: TransactionId,
        now_ms: int,
    ) -> None:
        """Take all steps that have become possible in a settled session.

        `engaged` are the members of `replicas` that count for the quorum.
        """
        self._backlog_estimate.update(self.archived_last, committed, now_ms)
        self._announce_mark(engaged, now_ms)
        attempt = self._attempt
        if attempt is not None:
            if now_ms - attempt.last_report_ms >= NO_PROGRESS_MS_MAX:
                self._on_attempt_failed(
                    f"the storage has reported no progress for {NO_PROGRESS_MS_MAX} ms", now_ms
                )
            elif attempt.reported_mark is not None and not attempt.is_comparing:
                self._compare_chain(attempt, attempt.reported_mark, engaged, now_ms)
            return
        if self.mark_to_write is not None:
            return
        archiving_replicas = [peer for peer in engaged if peer.supports_archiving]
        self._replace_object(archiving_replicas, now_ms)
        is_due = self._next_expiry_at_ms is not None and now_ms >= self._next_expiry_at_ms
        if is_due and self.recorded_mark is not None and self._attempt is None:
            self._expire_objects(archiving_replicas, self.recorded_mark, now_ms)
        if self._limits.archive_interval_ms and self._attempt is None:
            self._begin_due_attempt(archiving_replicas, replicas, committed, now_ms)

    def _begin_due_attempt(
        self,
        archiving_replicas: Sequence[ReplicaSession],
        replicas: Collection[ReplicaSession],
        committed: TransactionId,
        now_ms: int,
    ) -> None:
        """Begin a collection or an attempt that is due."""
        if self._next_collection_at_ms is not None and now_ms >= self._next_collection_at_ms:
            self._collect_garbage(archiving_replicas, replicas, now_ms)
        if self._attempt is None and now_ms >= self._next_attempt_at_ms:
            if archiving_replicas and committed > self.archived_last:
                self._archive_range(self._next_replica(archiving_replicas), committed, now_ms)
            else:
                self._next_attempt_at_ms = now_ms + self._limits.archive_interval_ms

    def _next_replica(self, archiving_replicas: Sequence[ReplicaSession]) -> ReplicaSession:
        """Choose the replica for the next attempt, in turn, and count the attempt."""
        self._attempt_count += 1
        return archiving_replicas[self._attempt_count % len(archiving_replicas)]

    def _archive_range(self, peer: ReplicaSession, committed: TransactionId, now_ms: int) -> None:
        recorded_mark = self.recorded_mark
        first = TransactionId(self.archived_last + 1)
        self._attempt = _Attempt(self._attempt_count, peer.replica, first, now_ms)
        chain = GENESIS_CHAIN if recorded_mark is None else recorded_mark.chain
        manifest = (
            ("", 0)
            if recorded_mark is None
            else (recorded_mark.manifest, recorded_mark.manifest_crc)
        )
        fields = (self._attempt_count, first, committed, chain, *manifest)
        peer.send_request(
            ArchiveRange, *fields, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
        )

    def _collect_garbage(
        self,
        archiving_replicas: Sequence[ReplicaSession],
        replicas: Collection[ReplicaSession],
        now_ms: int,
    ) -> None:
        """Request a garbage collection if the state of all replicas permits it (rule 7)."""
        recorded_mark = self.recorded_mark
        assert recorded_mark is not None
        prepared_peers = [
            peer for peer in replicas if peer.supports_archiving and peer.repair is not None
        ]
        if len(prepared_peers) < len(replicas) or not archiving_replicas:
            self._next_collection_at_ms = now_ms + self._limits.archive_interval_ms
            return
        for peer in prepared_peers:
            assert peer.repair is not None
            if peer.repair.start > recorded_mark.last:
                reason = (
                    f"the log of the replica begins after transaction {peer.repair.start}, "
                    f"but in ZooKeeper the last archived transaction is {recorded_mark.last}: "
                    "ZooKeeper's data was rolled back"
                )
                self._on_collection_failed(peer.replica, reason, now_ms)
                return
        peer = self._next_replica(archiving_replicas)
        number, first = self._attempt_count, TransactionId(self.archived_last + 1)
        self._attempt = _Attempt(number, peer.replica, first, now_ms, is_garbage_collection=True)
        fields = (number, *_fields_of_mark(recorded_mark))
        peer.send_request(
            CollectGarbage, *fields, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
        )

    def _on_garbage_collected(self, notice: GarbageCollected, now_ms: int) -> None:
        if notice.error:
            self._on_attempt_failed(notice.error, now_ms)
            return
        self._attempt = None
        pause_ms = self._limits.collection_interval_ms
        if notice.has_more:
            pause_ms = self._limits.archive_interval_ms
        self._next_collection_at_ms = now_ms + pause_ms

    def _on_collection_failed(self, replica: ReplicaId, reason: str, now_ms: int) -> None:
        self._next_collection_at_ms = now_ms + self._limits.collection_interval_ms
        self._report("archive.garbage_collection_failed", replica=replica, reason=reason)

    # ---- expiry (rule 9)

    def request_expiry(self, bounds: ExpiryBounds, now_ms: int) -> None:
        """Schedule an expiry that a client requests; a repeated request changes nothing."""
        if not self.is_expiry_done(bounds):
            requested = ExpiryBounds(
                max(self._requested_expiry.before, bounds.before),
                max(self._requested_expiry.before_ms, bounds.before_ms),
            )
            if requested != self._requested_expiry:
                self._requested_expiry, self._next_expiry_at_ms = requested, now_ms

    def is_expiry_done(self, bounds: ExpiryBounds) -> bool:
        """Whether these limits, or higher ones, have been applied to the whole archive."""
        expired, last = self._finished_expiry
        return last == self.archived_last and all(map(le, bounds, expired))

    def _expire_objects(
        self, archiving_replicas: Sequence[ReplicaSession], recorded_mark: ArchivedMark, now_ms: int
    ) -> None:
        if not archiving_replicas:
            self._next_expiry_at_ms = now_ms + EXPIRY_RETRY_MS
            return
        peer = self._next_replica(archiving_replicas)
        number, first, bounds = (
            self._attempt_count,
            TransactionId(self.archived_last + 1),
            self._requested_expiry,
        )
        self._attempt = _Attempt(number, peer.replica, first, now_ms, expiry=bounds)
        mark_fields = _fields_of_mark(recorded_mark)
        fields = (number, *mark_fields, *bounds, self._limits.archive_retention_ms)
        peer.send_request(
            ExpireObjects, *fields, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
        )

    def _on_objects_expired(
        self, bounds: ExpiryBounds, notice: ObjectsExpired, now_ms: int
    ) -> None:
        """Process the end of an expiry; if `notice` names no manifest, no object has expired."""
        recorded_mark = self.recorded_mark
        assert recorded_mark is not None
        if notice.error:
            self._on_attempt_failed(notice.error, now_ms)
        elif not notice.manifest:
            self._attempt, self._running_expiry = None, bounds
            self._on_expiry_ended(now_ms)
        elif not recorded_mark.first <= notice.first <= recorded_mark.last + 1:
            limits = f"{recorded_mark.first}..{recorded_mark.last + 1}"
            self._on_attempt_failed(
                f"expected a first available ID in {limits}, found {notice.first}", now_ms
            )
        else:
            self._attempt, self._running_expiry = None, bounds
            self.mark_to_write = recorded_mark._replace(
                first=TransactionId(notice.first),
                manifest=notice.manifest,
                manifest_crc=notice.manifest_crc,
            )

    def _on_expiry_ended(self, now_ms: int) -> None:
        self._finished_expiry = (self._running_expiry, self.archived_last)
        self._next_expiry_at_ms = None
        if self._limits.archive_retention_ms:
            self._next_expiry_at_ms = now_ms + EXPIRY_INTERVAL_MS
        if self._requested_expiry == self._running_expiry:
            self._requested_expiry = _NO_EXPIRY
        else:
            self._next_expiry_at_ms = now_ms

    # ---- replacement of an object (rule 10)

    def request_replacement(self, request: ReplaceArchivedObject) -> None:
        """Schedule a replacement that a client requests; a repeated request changes nothing.

        While a replacement is in progress, a different request is ignored; the client must repeat
        it.
        """
        replacement = self._replacement
        if replacement is None or (
            replacement.outcome is not None and replacement.request != request
        ):
            self._replacement = _Replacement(request)

    def replacement_outcome(self, request: ReplaceArchivedObject) -> ReplacementOutcome | None:
        """Return the outcome of a replacement request; None if there is none yet."""
        replacement = self._replacement
        return (
            None if replacement is None or replacement.request != request else replacement.outcome
        )

    def _replace_object(self, archiving_replicas: Sequence[ReplicaSession], now_ms: int) -> None:
        """Request the replacement from a replica that has not failed."""
        replacement, recorded_mark = self._replacement, self.recorded_mark
        if replacement is None or replacement.outcome is not None:
            return
        untried = [peer for peer in archiving_replicas if peer.replica not in replacement.failures]
        if not untried or recorded_mark is None:
            reasons = replacement.failure_reasons or (
                "no storage whose replica is in sync can archive",
            )
            replacement.outcome = ReplacementOutcome(
                is_replaced=False, replica=None, failures=reasons
            )
            return
        peer, request = self._next_replica(untried), replacement.request
        number, first = self._attempt_count, TransactionId(self.archived_last + 1)
        self._attempt = _Attempt(number, peer.replica, first, now_ms, is_replacement=True)
        old_object = (request.first, request.last, request.name)
        fields = (number, *old_object, *_fields_of_mark(recorded_mark))
        peer.send_request(
            ReplaceObject, *fields, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
        )

    def _on_object_written(self, attempt: _Attempt, notice: RangeArchived, now_ms: int) -> None:
        """Process the end of a replacement; if `notice` names no manifest, nothing was replaced."""
        replacement, recorded_mark = self._replacement, self.recorded_mark
        assert replacement is not None
        assert recorded_mark is not None
        if notice.error:
            self._on_attempt_failed(notice.error, now_ms)
        elif not notice.manifest:
            self._attempt = None
            replacement.outcome = ReplacementOutcome(is_replaced=True, replica=None, failures=())
        elif (notice.last, notice.chain) != recorded_mark[:2]:
            expected = f"{recorded_mark.last} with chain hash {recorded_mark.chain.hex()}"
            found = f"{notice.last} with chain hash {bytes(notice.chain).hex()}"
            self._on_attempt_failed(
                f"expected a manifest that ends at transaction {expected}, found one that ends "
                f"at {found}",
                now_ms,
            )
        else:
            self._attempt, replacement.written_by = None, attempt.replica
            self.mark_to_write = recorded_mark._replace(
                manifest=notice.manifest, manifest_crc=notice.manifest_crc
            )

    def _on_object_replaced(self, current: _Replacement, recorded_mark: ArchivedMark) -> None:
        """ZooKeeper has recorded the manifest with the new object."""
        replica, current.written_by = current.written_by, None
        reasons = current.failure_reasons
        current.outcome = ReplacementOutcome(is_replaced=True, replica=replica, failures=reasons)
        name, manifest = current.request.name, recorded_mark.manifest
        self._report("archive.object_replaced", object=name, replica=replica, manifest=manifest)

    def on_attempt_notified(self, peer: ReplicaSession, notice: ArchiveNotice, now_ms: int) -> None:
        """Process a report of an attempt's progress or end; ignore it for an abandoned attempt."""
        attempt = self._attempt
        if attempt is None or (attempt.replica, attempt.number) != (peer.replica, notice.attempt):
            return
        attempt.last_report_ms = now_ms
        match notice:
            case ArchiveProgress():
                pass
            case RangeArchived():
                if attempt.is_replacement:
                    self._on_object_written(attempt, notice, now_ms)
                elif (
                    attempt.archives_range and attempt.reported_mark is None
                ):  # only the first result
                    self._backlog_estimate.on_backlog_reported(notice, now_ms)
                    self._on_range_archived(attempt, notice, now_ms)
            case GarbageCollected():
                if attempt.is_garbage_collection:
                    self._on_garbage_collected(notice, now_ms)
            case ObjectsExpired():
                if attempt.expiry is not None:
                    self._on_objects_expired(attempt.expiry, notice, now_ms)
            case _:
                assert_never(notice)

    def _on_range_archived(self, attempt: _Attempt, notice: RangeArchived, now_ms: int) -> None:
        if notice.error:
            self._on_attempt_failed(notice.error, now_ms)
        elif not notice.manifest:
            self._attempt, self._failure_count = None, 0
            self._next_attempt_at_ms = now_ms + self._limits.archive_interval_ms
        elif notice.last < attempt.first:
            self._on_attempt_failed(
                f"expected an archived range that ends at transaction {attempt.first} or later, "
                f"found {notice.last}",
                now_ms,
            )
        else:
            first = TransactionId(0) if self.recorded_mark is None else self.recorded_mark.first
            attempt.reported_mark = ArchivedMark(
                TransactionId(notice.last),
                Chain(bytes(notice.chain)),
                notice.stamp_ms,
                first,
                notice.manifest_crc,
                notice.manifest,
            )

    def _compare_chain(
        self,
        attempt: _Attempt,
        reported_mark: ArchivedMark,
        engaged: Sequence[ReplicaSession],
        now_ms: int,
    ) -> None:
        """Request the chain at the range's end from another replica that has the range (rule 3)."""
        others = [peer for peer in engaged if peer.replica != attempt.replica]
        # Successive attempts compare with different replicas: a log with a reconstructed batch has
        # another chain, so a comparison with this log fails.
        start = attempt.number % max(1, len(others))
        others = others[start:] + others[:start]
        if not others:
            self._attempt, self.mark_to_write = None, reported_mark
            return
        for peer in others:
            if peer.synced_last >= reported_mark.last:
                attempt.is_comparing = True
                peer.send_request(
                    LineageRequest,
                    reported_mark.last,
                    reported_mark.last,
                    now_ms=now_ms,
                    correlation_id=ARCHIVE_CORRELATION_ID,
                )
                return

    def on_lineage_received(
        self,
        peer: ReplicaSession,
        message: StorageMessage,
        answer: LineageResponse,
        now_ms: int,
    ) -> None:
        """Process a lineage: compare it at the recorded mark, or at the end of a written range."""
        if not self.is_checked:
            self._on_archived_mark_checked(answer, now_ms)
            return
        attempt = self._attempt
        if attempt is None or attempt.reported_mark is None or not self._is_current(peer, message):
            return
        reported_mark = attempt.reported_mark
        end = answer.lineage[-1] if answer.lineage else None
        if end is not None and (end.last, end.chain) == (reported_mark.last, reported_mark.chain):
            self._attempt, self.mark_to_write = None, reported_mark
            return
        found_text = (
            ("no batch that ends there")
            if end is None or end.last != reported_mark.last
            else end.chain.hex()
        )
        self._on_attempt_failed(
            f"expected chain hash {reported_mark.chain.hex()} at transaction {reported_mark.last}, "
            f"as archived by {attempt.replica}, found {found_text} at replica {peer.replica}",
            now_ms,
        )

    def on_request_rejected(
        self, peer: ReplicaSession, message: StorageMessage, reason: str, now_ms: int
    ) -> None:
        """A replica has rejected an archive request: the attempt has failed (rule 4)."""
        if isinstance(message, SetArchived):
            self._report("archive.failed", replica=peer.replica, reason=reason)
        elif self._is_current(peer, message):
            self._on_attempt_failed(reason, now_ms)

    def _is_current(self, peer: ReplicaSession, message: StorageMessage) -> bool:
        """Whether a request belongs to the attempt in progress, and not to an abandoned one."""
        attempt = self._attempt
        if attempt is None:
            return False
        if isinstance(message, ArchiveRange | CollectGarbage | ExpireObjects | ReplaceObject):
            return (attempt.replica, attempt.number) == (peer.replica, message.attempt)
        reported_mark = attempt.reported_mark if attempt.is_comparing else None
        return (
            isinstance(message, LineageRequest)
            and reported_mark is not None
            and message.last == reported_mark.last
        )

    def _on_attempt_failed(self, reason: str, now_ms: int) -> None:
        assert self._attempt is not None
        attempt, self._attempt = self._attempt, None
        if attempt.is_garbage_collection:
            self._on_collection_failed(attempt.replica, reason, now_ms)
            return
        if attempt.expiry is not None:
            self._next_expiry_at_ms = now_ms + EXPIRY_RETRY_MS
            self._report("archive.expiry_failed", replica=attempt.replica, reason=reason)
            return
        if attempt.is_replacement:
            assert self._replacement is not None
            self._replacement.failures[attempt.replica] = reason
            self._report(
                "archive.object_replacement_failed", replica=attempt.replica, reason=reason
            )
            return
        doublings = min(self._failure_count, _DOUBLINGS_MAX)
        self._failure_count += 1
        self._next_attempt_at_ms = now_ms + (self._limits.archive_interval_ms << doublings)
        self._report("archive.failed", replica=attempt.replica, reason=reason)

    # ---- the recorded mark

    def on_metadata_written(self, recorded_mark: ArchivedMark | None, now_ms: int) -> None:
        """ZooKeeper is known to have recorded this archived mark."""
        if recorded_mark != self.recorded_mark:
            assert recorded_mark is not None
            replacement = self._replacement
            if replacement is not None and replacement.written_by is not None:
                self._on_object_replaced(replacement, recorded_mark)
            elif recorded_mark.last == self.archived_last:
                self._report(
                    "archive.transactions_expired",
                    first=recorded_mark.first,
                    manifest=recorded_mark.manifest,
                )
                self._on_expiry_ended(now_ms)
            else:
                self._report(
                    "archive.manifest_recorded",
                    last=recorded_mark.last,
                    manifest=recorded_mark.manifest,
                )
                self._failure_count, self._next_attempt_at_ms = 0, now_ms
            if self._next_collection_at_ms is None:
                self._next_collection_at_ms = now_ms
        self.recorded_mark = recorded_mark
        if recorded_mark == self.mark_to_write:
            self.mark_to_write = None
        self._report_due_checkpoint()

    def on_batch_submitted(self, batch: Batch) -> None:
        """A batch is appended in this session."""
        self._submitted_last = batch.last
        self._submitted_bytes += len(batch.records)

    @property
    def backlog(self) -> ArchiveBacklog:
        """The backlog of committed transactions that are not archived (rule 11)."""
        lag = self._backlog_estimate
        return ArchiveBacklog(lag.count, lag.byte_count(self._submitted_bytes_after), lag.since_ms)

    def _submitted_bytes_after(self, last: TransactionId) -> int | None:
        """Return the approximate size of the session's records after ID `last`, in bytes.

        Return None if `last` is before the session's mark.
        """
        count = self._submitted_last - self._mark
        if last < self._mark or count <= 0:
            return None
        return self._submitted_bytes * max(0, self._submitted_last - last) // count

    def _report_due_checkpoint(self) -> None:
        """Report that a checkpoint is due if the limit of rule 8 is exceeded."""
        archived_count = min(self.archived_last, self._submitted_last) - self._mark
        if self._is_checkpoint_due or archived_count <= 0:
            return
        submitted_count = self._submitted_last - self._mark
        archived_bytes = self._submitted_bytes * archived_count // submitted_count
        if archived_bytes > self._limits.archived_bytes_max:
            self._is_checkpoint_due = True
            self._outbox.append(CheckpointDue(self._session_id))

    def _announce_mark(self, engaged: Sequence[ReplicaSession], now_ms: int) -> None:
        """Send the recorded mark to the replicas that have reached it (rule 5)."""
        recorded_mark = self.recorded_mark
        if recorded_mark is None:
            return
        for peer in engaged:
            is_known = self._announced_marks.get(peer.replica) == recorded_mark
            if peer.supports_archiving and not is_known and peer.synced_last >= recorded_mark.last:
                self._announced_marks[peer.replica] = recorded_mark
                last, chain, _, *others = recorded_mark
                fields = (last, chain, *others)
                peer.send_request(
                    SetArchived, *fields, now_ms=now_ms, correlation_id=ARCHIVE_CORRELATION_ID
                )

    def _report(self, name: str, **fields: object) -> None:
        session = ("session", self._session_id)
        self._outbox.append(Report(name, (session, *fields.items())))
