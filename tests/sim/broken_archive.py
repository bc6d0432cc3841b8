"""Mutants of the archive (docs/decisions/047). Each mutant breaks one rule.

The mutants change the uploads of `waltz_sim/cluster/simulated_archive.py`, which are like those of
production.
"""

from dataclasses import replace

from tests.sim.broken_replication import as_written
from tests.sim.switches import Patches, do_nothing, replaced, switch
from waltz_core.archive import garbage_collection
from waltz_core.archive.file_names import FileOrigin
from waltz_core.archive.manifest import Manifest
from waltz_core.client.stream.outcome_tracker import OutcomeTracker
from waltz_core.errors import ArchiveUnavailable
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.replication import partition_store
from waltz_core.replication.archiving import SessionArchiver
from waltz_core.replication.in_doubt_queries import InDoubtQueries
from waltz_core.replication.partition_store import PartitionStore, _PendingRequest
from waltz_core.replication.repair_runner import RepairRunner
from waltz_core.replication.store_session import StoreSession
from waltz_core.storage.files.format import AckedMarker
from waltz_core.storage.log import archive_pieces
from waltz_core.storage.log.log_files import LogFiles
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_sim.cluster import simulated_archive
from waltz_sim.cluster.simulated_archive import SimArchive


def _without_comparison(self, attempt, found, engaged, now_ms):
    self._attempt, self.mark_to_write = None, found


@switch
def mark_announced_before_zookeeper() -> Patches:
    """A server sends an archived mark to replicas before it is in ZooKeeper."""
    original = SessionArchiver._announce_mark

    def _announce_mark(self, engaged, now_ms):
        recorded, self.recorded_mark = self.recorded_mark, self.mark_to_write or self.recorded_mark
        try:
            original(self, engaged, now_ms)
        finally:
            self.recorded_mark = recorded

    yield replaced(SessionArchiver, "_announce_mark", _announce_mark)


@switch
def failed_write_counts_as_archived() -> Patches:
    """A file counts as archived although the object store has not acknowledged its write."""
    original = SimArchive._send_request

    def _send_request(self, storage, request, on_answer):
        unacknowledged = self.__dict__.setdefault("unacknowledged", {})

        def without_error(result):
            if hasattr(request, "file") and isinstance(result, ArchiveUnavailable):
                unacknowledged[request.name] = result = request.file
            on_answer(unacknowledged.get(request.name, result))

        original(self, storage, request, without_error)

    yield replaced(SimArchive, "_send_request", _send_request)


@switch
def file_not_read_back() -> Patches:
    """A file counts as archived after it is written, without being read back."""

    def _check_crc(file, name, expected):
        return file

    yield replaced(simulated_archive, "_check_crc", _check_crc)


@switch
def manifest_without_the_newest_object() -> Patches:
    """A new manifest does not list the new object."""
    original = Manifest.with_object

    def with_object(self, entry):
        manifest = original(self, entry)
        return replace(manifest, newest_objects=self.newest_objects)

    yield replaced(Manifest, "with_object", with_object)
    yield replaced(Manifest, "_check_consistency", do_nothing)


@switch
def manifest_without_the_objects_before() -> Patches:
    """A new manifest lists only the new object, not the earlier ones."""
    original = Manifest.with_object

    def with_object(self, entry):
        return replace(original(self, entry), newest_objects=(entry,))

    yield replaced(Manifest, "with_object", with_object)
    yield replaced(Manifest, "_check_consistency", do_nothing)


@switch
def reconstructed_batches_are_archived() -> Patches:
    """A replica archives batches that it has reconstructed, without a comparison."""

    yield replaced(archive_pieces, "RECONSTRUCTED", object())
    yield replaced(SessionArchiver, "_compare_chain", _without_comparison)


@switch
def attempts_are_not_counted() -> Patches:
    """All attempts of a session have the same number, so the names of their files repeat."""

    def _next_replica(self, capable):
        return capable[0]

    yield replaced(SessionArchiver, "_next_replica", _next_replica)


@switch
def trusted_replica_is_reset() -> Patches:
    """A log is reset although a session needs this replica for its decision."""
    original = RepairRunner._goal_of

    def _goal_of(self, each, goal, now_ms):
        is_open, self.is_open = self.is_open, True
        try:
            return original(self, each, goal, now_ms)
        finally:
            self.is_open = is_open

    yield replaced(RepairRunner, "_goal_of", _goal_of)


@switch
def removed_above_the_confirmed_mark() -> Patches:
    """A storage removes archived segments above its confirmed mark."""
    original = PartitionLog.removable_end

    def removable_end(self, archived):
        slots = self._files.slots
        slot, slots.slot = slots.slot, replace(slots.slot, low_water_mark=archived.transaction_id)
        try:
            return original(self, archived)
        finally:
            slots.slot = slot

    yield replaced(PartitionLog, "removable_end", removable_end)


@switch
def removed_above_the_archived_mark() -> Patches:
    """A storage removes segments that are confirmed, but perhaps not archived."""
    original = PartitionLog.removable_end

    def removable_end(self, archived):
        return original(self, archived._replace(transaction_id=self.max_id))

    yield replaced(PartitionLog, "removable_end", removable_end)


@switch
def start_within_a_batch() -> Patches:
    """A log begins after the last record of a removed segment, even within a batch."""
    original = PartitionLog.removable_end

    def removable_end(self, archived):
        end = original(self, archived)
        return end and AckedMarker(self._files.segments.all[0].last, end.chain)

    yield replaced(PartitionLog, "removable_end", removable_end)


@switch
def segments_removed_before_the_start_is_durable() -> Patches:
    """A storage removes old segments before the new start of the log is on disk."""
    original = LogFiles.begin_after

    def begin_after(self, start, slot):
        written = []
        write, self.write_slot = self.write_slot, written.append
        try:
            original(self, start, slot)
        finally:
            self.write_slot = write
        for written_slot in written:
            write(written_slot)

    yield replaced(LogFiles, "begin_after", begin_after)


@switch
def unknown_write_of_the_mark_is_a_success() -> Patches:
    """A write of the archived mark with an unknown outcome counts as successful."""
    original = PartitionStore._on_coordinator_unavailable

    def _on_coordinator_unavailable(self, waiting, reason):
        is_mark = waiting is _PendingRequest.STATES_WRITE and self._session.window is not None
        if (
            is_mark
            and self._nodes_being_written.archived_mark != self._session._archiver.recorded_mark
        ):
            self._on_metadata_written(as_written(self._nodes_being_written))
        else:
            original(self, waiting, reason)

    yield replaced(PartitionStore, "_on_coordinator_unavailable", _on_coordinator_unavailable)


@switch
def archived_mark_is_not_fenced() -> Patches:
    """The next session records an archived mark of a session that has ended."""
    end, start, begin = (
        PartitionStore._end_session,
        PartitionStore._start_session,
        SessionArchiver.begin,
    )

    def _end_session(self, reason, error_code=0):
        if self._session is not None:
            archiving = self._session._archiver
            attempt = archiving._attempt
            self.left_mark = archiving.mark_to_write or (attempt and attempt.reported_mark)
        end(self, reason, error_code)

    def _start_session(self, view):
        start(self, view)
        self._session._archiver.left_mark = getattr(self, "left_mark", None)

    def _begin(self, engaged, mark, now_ms):
        begin(self, engaged, mark, now_ms)
        self.mark_to_write = self.left_mark

    yield replaced(PartitionStore, "_end_session", _end_session)
    yield replaced(PartitionStore, "_start_session", _start_session)
    yield replaced(SessionArchiver, "begin", _begin)


@switch
def claims_forget_the_archived_mark() -> Patches:
    """A claim of a session removes the archived mark from ZooKeeper."""
    original = partition_store.claimed_nodes

    def claim_over(view, generation, replicas, nonce):
        claimed = original(view, generation, replicas, nonce)
        return claimed._replace(marker=replace(claimed.marker, archived=None))

    yield replaced(partition_store, "claimed_nodes", claim_over)


@switch
def archived_before_settled() -> Patches:
    """A session archives while earlier sessions are not settled."""
    original = StoreSession._advance

    def _advance(self, now_ms):
        original(self, now_ms)
        if self.window is not None and self.ending is None and not self.is_settled:
            self._archiver._next_attempt_at_ms = 0
            replicas, committed = self.replicas.values(), self.window.committed
            self._archiver.advance(self.engaged, replicas, committed, now_ms)

    yield replaced(StoreSession, "_advance", _advance)


@switch
def uncommitted_batches_are_archived() -> Patches:
    """A replica archives uncommitted batches, and no second replica confirms them.

    The mutant also omits the comparison of chains. This comparison waits until a second replica has
    the batches. Two of three replicas are a quorum, so the batches would be committed.
    """
    original = SessionArchiver.advance

    def advance(self, engaged, replicas, committed, now_ms):
        lasts = (each.synced_last for each in engaged)
        original(self, engaged, replicas, max(lasts, default=committed), now_ms)

    yield replaced(SessionArchiver, "advance", advance)
    yield replaced(SessionArchiver, "_compare_chain", _without_comparison)


@switch
def archived_stamp_is_ignored() -> Patches:
    """If only the archive has the last commit stamp, a new owner ignores it, and uses its clock."""
    original = InDoubtQueries.begin

    def begin(self, now_ms):
        archived = self._claim.archived_mark
        if archived is not None and archived.last == self._mark:
            self._stamp_ms = 0
        original(self, now_ms)

    yield replaced(InDoubtQueries, "begin", begin)


@switch
def reset_log_is_trusted() -> Patches:
    """A replica whose log was reset is not suspect."""
    original = PartitionLog.reset

    def reset(self, session, start):
        original(self, session, start)
        self._files.write_slot(replace(self.slot, suspect=False))

    yield replaced(PartitionLog, "reset", reset)


# ---- a log that is not the archived one (AR 8)


@switch
def log_may_end_below_the_archived_mark() -> Patches:
    """A session opens although its log ends below the archived mark."""
    original = StoreSession._decide_mark

    def _decide_mark(self):
        archiving = self._archiver
        recorded, archiving.recorded_mark = archiving.recorded_mark, None
        try:
            return original(self)
        finally:
            archiving.recorded_mark = recorded

    yield replaced(StoreSession, "_decide_mark", _decide_mark)


# ---- collection (AR 16)


@switch
def collection_ignores_later_owners() -> Patches:
    """Garbage collection deletes files of later owners, which its manifest does not list."""

    def origin_of(name):
        return FileOrigin(-1, b"", -1)

    yield replaced(garbage_collection, "origin_of", origin_of)


@switch
def replaced_manifests_are_deleted_at_once() -> Patches:
    """Garbage collection deletes a manifest as soon as there is a newer one."""

    def _recently_replaced(found, now_ms):
        return set()

    yield replaced(garbage_collection, "_recently_replaced", _recently_replaced)


@switch
def collection_while_a_mark_is_written() -> Patches:
    """A session collects garbage while it writes an archived mark."""
    original = SessionArchiver.advance

    def advance(self, engaged, replicas, committed, now_ms):
        original(self, engaged, replicas, committed, now_ms)
        is_due = self._next_collection_at_ms is not None and now_ms >= self._next_collection_at_ms
        if is_due and self.mark_to_write is not None and self._attempt is None:
            self._collect_garbage(
                [each for each in engaged if each.supports_archiving], replicas, now_ms
            )

    yield replaced(SessionArchiver, "advance", advance)


@switch
def collection_ignores_the_starts_of_logs() -> Patches:
    """A session collects garbage by a rolled-back mark, although a log begins above this mark."""
    original = SessionArchiver._collect_garbage

    def _collect_garbage(self, capable, replicas, now_ms):
        starts = {
            replica: replica.repair.start for replica in replicas if replica.repair is not None
        }
        for replica in starts:
            replica.repair.start = BEFORE_FIRST
        try:
            original(self, capable, replicas, now_ms)
        finally:
            for replica, start in starts.items():
                replica.repair.start = start

    yield replaced(SessionArchiver, "_collect_garbage", _collect_garbage)


# ---- replacement of an object (AR 5)


@switch
def replacement_is_not_compared() -> Patches:
    """A replaced object may have reconstructed batches, and another chain than the manifest."""

    def _replaced_entry(entries, job):
        return next(entry for entry in entries if entry.name == job.replaced_object.name)

    yield replaced(archive_pieces, "RECONSTRUCTED", object())
    yield replaced(simulated_archive, "_replaced_entry", _replaced_entry)


@switch
def replacement_without_the_newest_object() -> Patches:
    """A replacement of an object uses the old manifest while a new mark is being written."""
    advance, written = SessionArchiver.advance, SessionArchiver._on_object_written

    def _advance(self, engaged, replicas, committed, now_ms):
        advance(self, engaged, replicas, committed, now_ms)
        if self.mark_to_write is not None and self._attempt is None:
            self._replace_object([each for each in engaged if each.supports_archiving], now_ms)

    def _on_object_written(self, attempt, notice, now_ms):
        last, chain = self.recorded_mark[:2]
        written(self, attempt, replace(notice, last=last, chain=chain), now_ms)

    yield replaced(SessionArchiver, "advance", _advance)
    yield replaced(SessionArchiver, "_on_object_written", _on_object_written)


# ---- expiry (AR 7, AR 15)


@switch
def archiving_forgets_the_expiry() -> Patches:
    """When a session records an archived mark, it resets the first available ID to 0."""
    original = SessionArchiver._on_range_archived

    def _archived(self, attempt, notice, now_ms):
        recorded = self.recorded_mark
        self.recorded_mark = recorded and recorded._replace(first=0)
        try:
            original(self, attempt, notice, now_ms)
        finally:
            self.recorded_mark = recorded

    yield replaced(SessionArchiver, "_on_range_archived", _archived)


@switch
def expired_objects_are_deleted_at_once() -> Patches:
    """Expired objects leave the manifest and the store without a grace period."""

    def deletable_below(self, now_ms):
        return self.first

    yield replaced(Manifest, "deletable_below", deletable_below)


@switch
def object_expires_too_early() -> Patches:
    """If the objects below an ID expire, the object that contains this ID expires, too."""
    original = simulated_archive._first_unexpired

    def _first_unexpired(present, before, before_ms):
        first_unexpired = original(present, before, before_ms)
        return next(
            (entry.last + 1 for entry in present.newest_objects if entry.first == first_unexpired),
            first_unexpired,
        )

    yield replaced(simulated_archive, "_first_unexpired", _first_unexpired)


@switch
def expired_rows_are_lost() -> Patches:
    """If rows have expired, so that a client cannot read them back, it reports them as lost."""

    def submissions_in_doubt_below(self, first_available):
        return []

    yield replaced(OutcomeTracker, "submissions_in_doubt_below", submissions_in_doubt_below)


@switch
def expired_batches_are_lost() -> Patches:
    """If batches in doubt have expired, a session treats them as not in the log."""
    original = InDoubtQueries._set_outcome

    def _set_outcome(self, committed_last, *, has_unknown_outcomes=False):
        original(self, committed_last)

    yield replaced(InDoubtQueries, "_set_outcome", _set_outcome)
