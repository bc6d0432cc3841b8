"""Rules of the archive (docs/decisions/047), each broken alone.

Uploads are those of `waltz_sim/cluster/simulated_archive.py`, which follow the production ones.
"""

from dataclasses import replace

from tests.sim.broken_replication import as_written
from tests.sim.switches import Patches, instead, nothing, switch
from waltz_core.archive.manifest import Manifest
from waltz_core.errors import ArchiveUnavailable
from waltz_core.replication import partition_store
from waltz_core.replication.archiving import Archiving
from waltz_core.replication.partition_store import PartitionStore, _Waiting
from waltz_core.replication.repairs import Repairs
from waltz_core.replication.settlement import Settlement
from waltz_core.replication.store_session import StoreSession
from waltz_core.storage.files.format import Marker
from waltz_core.storage.log import archive_pieces
from waltz_core.storage.log.log_files import LogFiles
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_sim.cluster import simulated_archive
from waltz_sim.cluster.simulated_archive import SimArchive


@switch
def announced_before_zookeeper() -> Patches:
    """Replicas learn an archived mark before ZooKeeper has it."""
    original = Archiving._announce

    def _announce(self, engaged, now_ms):
        recorded, self.recorded = self.recorded, self.wanted or self.recorded
        try:
            original(self, engaged, now_ms)
        finally:
            self.recorded = recorded

    yield instead(Archiving, "_announce", _announce)


@switch
def failed_write_counts() -> Patches:
    """A file counts although the object store did not acknowledge its write."""
    original = SimArchive._request

    def _request(self, storage, request, answer):
        unacknowledged = self.__dict__.setdefault("unacknowledged", {})

        def taken(result):
            if hasattr(request, "file") and isinstance(result, ArchiveUnavailable):
                unacknowledged[request.name] = result = request.file
            answer(unacknowledged.get(request.name, result))

        original(self, storage, request, taken)

    yield instead(SimArchive, "_request", _request)


@switch
def not_read_back() -> Patches:
    """A file counts when it is written; nothing is compared with it."""

    def _checked(file, name, expected):
        return file

    yield instead(simulated_archive, "_checked", _checked)


@switch
def manifest_without_the_newest_object() -> Patches:
    """A new manifest does not list the new object."""
    original = Manifest.with_object

    def with_object(self, entry):
        made = original(self, entry)
        return replace(made, newest=self.newest)

    yield instead(Manifest, "with_object", with_object)
    yield instead(Manifest, "_check", nothing)


@switch
def manifest_without_the_objects_before() -> Patches:
    """A new manifest lists the new object only."""
    original = Manifest.with_object

    def with_object(self, entry):
        return replace(original(self, entry), newest=(entry,))

    yield instead(Manifest, "with_object", with_object)
    yield instead(Manifest, "_check", nothing)


@switch
def reconstructed_batches_are_archived() -> Patches:
    """A replica archives batches that it has reconstructed, and no other replica is compared."""

    def _compare(self, attempt, found, engaged, now_ms):
        self._attempt, self.wanted = None, found

    yield instead(archive_pieces, "RECONSTRUCTED", object())
    yield instead(Archiving, "_compare", _compare)


@switch
def trusted_replica_is_reset() -> Patches:
    """A replica that a session needs for its decision is reset like any other."""
    original = Repairs._goal_of

    def _goal_of(self, each, goal, now_ms):
        is_open, self.is_open = self.is_open, True
        try:
            return original(self, each, goal, now_ms)
        finally:
            self.is_open = is_open

    yield instead(Repairs, "_goal_of", _goal_of)


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

    yield instead(PartitionLog, "removable_end", removable_end)


@switch
def removed_above_the_archived_mark() -> Patches:
    """A storage removes confirmed segments, archived or not."""
    original = PartitionLog.removable_end

    def removable_end(self, archived):
        return original(self, archived._replace(transaction_id=self.max_id))

    yield instead(PartitionLog, "removable_end", removable_end)


@switch
def start_within_a_batch() -> Patches:
    """A log begins after the last record of a removed segment, even within a batch."""
    original = PartitionLog.removable_end

    def removable_end(self, archived):
        end = original(self, archived)
        return end and Marker(self._files.segments.all[0].last, end.chain)

    yield instead(PartitionLog, "removable_end", removable_end)


@switch
def segments_removed_before_the_start_is_durable() -> Patches:
    """Old segments are removed before the slot has the new start."""
    original = LogFiles.begin_after

    def begin_after(self, start, slot):
        written = []
        write, self.write_slot = self.write_slot, written.append
        try:
            original(self, start, slot)
        finally:
            self.write_slot = write
        for each in written:
            write(each)

    yield instead(LogFiles, "begin_after", begin_after)


@switch
def unknown_write_of_the_mark_is_a_success() -> Patches:
    """A write of the archived mark with an unknown outcome counts as successful."""
    original = PartitionStore._coordinator_unavailable

    def _coordinator_unavailable(self, waiting, reason):
        is_mark = waiting is _Waiting.STATES and self._session.window is not None
        if is_mark and self._writing.archived != self._session._archiving.recorded:
            self._wrote(as_written(self._writing))
        else:
            original(self, waiting, reason)

    yield instead(PartitionStore, "_coordinator_unavailable", _coordinator_unavailable)


@switch
def mark_is_not_fenced() -> Patches:
    """An archived mark of a session that has ended is recorded in the next one."""
    end, start, begin = PartitionStore._end_session, PartitionStore._start_session, Archiving.begin

    def _end_session(self, reason, error_code=0):
        if self._session is not None:
            archiving = self._session._archiving
            attempt = archiving._attempt
            self.left_mark = archiving.wanted or (attempt and attempt.found)
        end(self, reason, error_code)

    def _start_session(self, view):
        start(self, view)
        self._session._archiving.left_mark = getattr(self, "left_mark", None)

    def _begin(self, engaged, mark, now_ms):
        begin(self, engaged, mark, now_ms)
        self.wanted = self.left_mark

    yield instead(PartitionStore, "_end_session", _end_session)
    yield instead(PartitionStore, "_start_session", _start_session)
    yield instead(Archiving, "begin", _begin)


@switch
def claims_forget_the_archived_mark() -> Patches:
    """A claim writes a marker without the archived mark."""
    original = partition_store.claim_over

    def claim_over(view, generation, replicas, nonce):
        claimed = original(view, generation, replicas, nonce)
        return claimed._replace(marker=replace(claimed.marker, archived=None))

    yield instead(partition_store, "claim_over", claim_over)


@switch
def archived_before_settled() -> Patches:
    """A session archives while earlier sessions are not settled."""
    original = StoreSession._advance

    def _advance(self, now_ms):
        original(self, now_ms)
        if self.window is not None and self.ended is None and not self.is_settled:
            self._archiving._next_at_ms = 0
            replicas, committed = self.replicas.values(), self.window.committed
            self._archiving.advance(self.engaged, replicas, committed, now_ms)

    yield instead(StoreSession, "_advance", _advance)


@switch
def uncommitted_batches_are_archived() -> Patches:
    """A replica archives all batches that it has, committed or not."""
    original = Archiving.advance

    def advance(self, engaged, replicas, committed, now_ms):
        lasts = (each.synced_last for each in engaged)
        original(self, engaged, replicas, max(lasts, default=committed), now_ms)

    yield instead(Archiving, "advance", advance)


@switch
def archived_stamp_is_ignored() -> Patches:
    """A new owner stamps batches by its own clock where the last stamp is in the archive only."""
    original = Settlement.begin

    def begin(self, now_ms):
        archived = self._claim.archived
        if archived is not None and archived.last == self._mark:
            self._stamp_ms = 0
        original(self, now_ms)

    yield instead(Settlement, "begin", begin)


@switch
def reset_log_is_trusted() -> Patches:
    """A replica whose records were dropped is not suspect."""
    original = PartitionLog.reset

    def reset(self, session, start):
        original(self, session, start)
        self._files.write_slot(replace(self.slot, suspect=False))

    yield instead(PartitionLog, "reset", reset)
