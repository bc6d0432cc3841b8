"""Mutants of the storage. Each mutant breaks one rule."""

from dataclasses import replace

from tests.sim.switches import Patches, do_nothing, replaced, switch
from waltz_core.errors import DiskFailed
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.storage.files import record_search, segments
from waltz_core.storage.files.format import AckedMarker
from waltz_core.storage.files.index import LineageFile
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import damage, partition_log, reading, truncation
from waltz_core.storage.log.log_files import LogFiles
from waltz_core.storage.log.log_recovery import _LogOpening
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service import service, work
from waltz_core.storage.service.service import StorageService
from waltz_core.wire.messages import AppendRaw, SetLowWaterMark


@switch
def skip_truncate() -> Patches:
    """A storage reports a truncation of its log that it has not done."""
    original = PartitionLog.truncate

    def truncate(self, session, last_to_keep, base, base_chain):
        if self.synced_max <= last_to_keep:
            return original(self, session, last_to_keep, base, base_chain)
        chain_of_kept = self.chain_at(last_to_keep)
        if chain_of_kept is None:
            return original(self, session, last_to_keep, base, base_chain)
        # The storage answers with the state after a truncation, but truncates no records. It writes
        # the next append after these records.
        files = self._files
        files.synced_max, files.chain, files.synced_chain = (
            last_to_keep,
            chain_of_kept,
            chain_of_kept,
        )
        return last_to_keep, chain_of_kept

    yield replaced(PartitionLog, "truncate", truncate)


@switch
def truncate_without_intent() -> Patches:
    """A storage truncates a log without first recording the truncation, and without a sync."""

    def truncate(self, last_to_keep):
        cut, _ = truncation.plan_truncation(self.segments, last_to_keep)
        self.segments.truncate(last_to_keep, cut)
        self.synced_max = self.last_id
        self.chain = self.synced_chain = self.segments.chain
        marker = min(self.slot.acked, AckedMarker(self.last_id, self.chain))
        self.write_slot(replace(self.slot, acked=marker))

    yield replaced(LogFiles, "truncate", truncate)


@switch
def truncate_below_mark() -> Patches:
    """A storage truncates its log below its confirmed mark."""
    original = PartitionLog.truncate

    def truncate(self, session, last_to_keep, base, base_chain):
        slots = self._files.slots
        mark, slots.slot = self.slot, replace(self.slot, low_water_mark=BEFORE_FIRST)
        try:
            return original(self, session, last_to_keep, base, base_chain)
        finally:
            slots.slot = replace(self.slot, low_water_mark=mark.low_water_mark)

    yield replaced(PartitionLog, "truncate", truncate)


@switch
def answer_before_fsync() -> Patches:
    """An append is answered before it is durable."""

    def sync(self):
        self.check_usable()
        self.synced_max, self.synced_chain = self.last_id, self.chain
        return self.synced_max

    yield replaced(LogFiles, "sync", sync)


@switch
def failed_fsync_ignored() -> Patches:
    """A failed sync counts as successful."""
    original = Segment.sync

    def sync(self):
        try:
            return original(self)
        except DiskFailed:
            self.forget()
            return 1

    yield replaced(Segment, "sync", sync)


@switch
def promise_not_durable() -> Patches:
    """PREPARE is answered before the promise is on disk."""
    original = PartitionLog.prepare

    def prepare(self, session, nonce):
        slots = self._files.slots
        write, slots.write = slots.write, lambda slot: setattr(slots, "slot", slot)
        try:
            return original(self, session, nonce)
        finally:
            slots.write = write

    yield replaced(PartitionLog, "prepare", prepare)


@switch
def fence_after_vote() -> Patches:
    """A storage answers PREPARE, but fences older sessions only when its mark is set.

    Until then, it accepts appends of the earlier session.
    """
    admit, check_owner = StorageService._admit_prepare, service._check_owner
    check_service, check_log = StorageService._check_session, PartitionLog._check_session
    older = {}  # lane -> the session that may still append, and its connection

    def _admit_prepare(self, request, message):
        lane = self._lanes.get(message.partition_id)
        before = None if lane is None else (lane.promise.session_id, lane.owner)
        fence, self._fence = self._fence, do_nothing
        try:
            admit(self, request, message)
        finally:
            self._fence = fence
        if lane is not None and before is not None and before[1] not in (None, request.connection):
            older[id(lane.log)] = before

    def _check_session(self, lane, message):
        session = older.get(id(lane.log), (None, None))[0]
        if isinstance(message, AppendRaw) and message.session_id == session:
            return
        if isinstance(message, SetLowWaterMark):
            older.pop(id(lane.log), None)
        check_service(self, lane, message)

    def _check_owner(lane, request):
        if older.get(id(lane.log)) != (request.message.session_id, request.connection):
            check_owner(lane, request)

    def _check_log_session(self, session):
        if older.get(id(self), (None, None))[0] != session:
            check_log(self, session)

    yield replaced(StorageService, "_admit_prepare", _admit_prepare)
    yield replaced(StorageService, "_check_session", _check_session)
    yield replaced(service, "_check_owner", _check_owner)
    yield replaced(PartitionLog, "_check_session", _check_log_session)


@switch
def older_sessions_may_append() -> Patches:
    """A storage accepts appends of sessions older than the promised one."""
    check_service, check_owner = StorageService._check_session, service._check_owner
    check_log, fence = PartitionLog._check_session, StorageService._fence

    def _check_session(self, lane, message):
        if not isinstance(message, AppendRaw) or message.session_id > lane.promise.session_id:
            check_service(self, lane, message)

    def _check_owner(lane, request):
        if not isinstance(request.message, AppendRaw):
            check_owner(lane, request)

    def _check_log_session(self, session):
        if session > self.slot.promised:
            check_log(self, session)

    def _fence(self, lane, reason, *, kept_connection=None):
        lane.owner = None  # So that its connection is not closed.
        fence(self, lane, reason, kept_connection=kept_connection)

    yield replaced(StorageService, "_check_session", _check_session)
    yield replaced(StorageService, "_fence", _fence)
    yield replaced(service, "_check_owner", _check_owner)
    yield replaced(PartitionLog, "_check_session", _check_log_session)


@switch
def nonce_ignored() -> Patches:
    """The session ID alone identifies an owner: another owner with the same ID is accepted."""
    admit, prepare = StorageService._admit_prepare, PartitionLog.prepare

    def _admit_prepare(self, request, message):
        lane = self._lanes.get(message.partition_id)
        if lane is not None and lane.promise.session_id == message.session_id:
            lane.promise = lane.promise._replace(nonce=message.nonce)
        admit(self, request, message)

    def prepare_any(self, session, nonce):
        return prepare(self, session, self.slot.nonce if session == self.slot.promised else nonce)

    yield replaced(StorageService, "_admit_prepare", _admit_prepare)
    yield replaced(PartitionLog, "prepare", prepare_any)


@switch
def mark_confirmed_when_set() -> Patches:
    """A low-water mark counts as confirmed as soon as it is set."""
    original = PartitionLog.set_low_water_mark

    def set_low_water_mark(self, session, mark, chain):
        original(self, session, mark, chain)
        self._files.write_slot(replace(self.slot, low_water_mark=mark, provisional=None))

    yield replaced(PartitionLog, "set_low_water_mark", set_low_water_mark)


@switch
def session_kept_at_mark_only_when_engaged() -> Patches:
    """A storage stores the session at ENGAGE, not together with the low-water mark."""
    set_mark, confirm = PartitionLog.set_low_water_mark, PartitionLog._confirm

    def set_low_water_mark(self, session, mark, chain):
        before = self.slot.last_session
        set_mark(self, session, mark, chain)
        self._files.write_slot(replace(self.slot, last_session=before))

    def _confirm(self, session):
        self._files.write_slot(replace(self.slot, last_session=session))
        confirm(self, session)

    def engage(self, session, mark):
        self._check_session(session)
        self._confirm(session)
        self._engaged = session

    yield replaced(PartitionLog, "set_low_water_mark", set_low_water_mark)
    yield replaced(PartitionLog, "_confirm", _confirm)
    yield replaced(PartitionLog, "engage", engage)


@switch
def torn_record_accepted() -> Patches:
    """After a crash the records are not checked against their checksums."""
    yield replaced(record_search, "first_bad_record", do_nothing)
    # Without this patch, the check of the batch would detect the torn record, and truncate the
    # batch.
    yield replaced(segments, "first_invalid_record", do_nothing)


@switch
def damage_cut_as_torn_tail() -> Patches:
    """A bad record ends the log, even if later records were synced."""
    original = Segment.recover

    def recover(self, start_id, last_synced, *, is_last):
        return original(self, start_id, BEFORE_FIRST if is_last else last_synced, is_last=is_last)

    def recover_records(self, segments):
        slot = self.slot
        records(self, segments)
        self.slot = replace(self.slot, suspect=slot.suspect)

    def recover_batches(self, segments):
        slot = self.slot
        self._last_durable_id = self._marker_id = BEFORE_FIRST
        lineage(self, segments)
        self.slot = replace(self.slot, suspect=slot.suspect)

    records, lineage = _LogOpening.recover_records, _LogOpening.recover_batches
    yield replaced(Segment, "recover", recover)
    yield replaced(_LogOpening, "recover_records", recover_records)
    yield replaced(_LogOpening, "recover_batches", recover_batches)


@switch
def index_trusted_after_crash() -> Patches:
    """The index is not checked against the records after a crash."""

    def _repair(self, first, starts):
        position = first - self.first
        missing = position + starts.size - self.index.count
        if missing > 0:
            self.index.write(self.index.count, starts[starts.size - missing :])

    yield replaced(Segment, "_repair", _repair)


@switch
def batches_trusted_after_crash() -> Patches:
    """After a crash the batches' chain is not checked against the records."""

    def _holds(self, segments, entry, end, chain):
        return entry.first == end + 1

    yield replaced(_LogOpening, "_is_batch_valid", _holds)


@switch
def reads_unchecked() -> Patches:
    """Bytes that are read from the disk are not compared with their checksums."""
    yield replaced(reading, "first_invalid_record", do_nothing)


@switch
def acked_marker_not_stored() -> Patches:
    """The acked marker is not stored."""
    original = LogFiles.write_slot

    def write_slot(self, slot):
        original(self, replace(slot, acked=AckedMarker(BEFORE_FIRST, bytes(16))))

    def durable_before(self, position):
        return BEFORE_FIRST

    yield replaced(LogFiles, "write_slot", write_slot)
    yield replaced(LineageFile, "durable_before", durable_before)


@switch
def group_continues_after_a_rejection() -> Patches:
    """After a rejected append, later appends of its group are acknowledged."""
    original = work._append_group

    def _append_group(log, requests, result, clock_s):
        original(log, requests, result, clock_s)
        good = [outcome for outcome in result.outcomes if not isinstance(outcome, Exception)]
        if good:
            result.outcomes[:] = [
                replace(good[-1], sequence=request.message.sequence) for request in requests
            ]

    yield replaced(work, "_append_group", _append_group)


@switch
def segments_cut_in_any_order() -> Patches:
    """A truncation removes the segments' files without syncing their directory."""

    def truncate(self, last_to_keep, entry):
        directory = self._disk.sync_directory
        self._disk.sync_directory = do_nothing
        try:
            original(self, last_to_keep, entry)
        finally:
            self._disk.sync_directory = directory

    original = Segments.truncate
    yield replaced(Segments, "truncate", truncate)


@switch
def repaired_without_check() -> Patches:
    """Damage is repaired with the received bytes, whatever they are."""
    yield replaced(damage, "check_repaired_batches", do_nothing)
    yield replaced(damage, "first_invalid_record", do_nothing)


@switch
def appends_unchecked() -> Patches:
    """The checksums, IDs and chain of appended records are not checked."""
    yield replaced(partition_log, "check_batches", do_nothing)


@switch
def suspect_is_forgotten() -> Patches:
    """A log that has lost records is not suspect after its opening."""
    yield replaced(_LogOpening, "_mark_suspect", do_nothing)
