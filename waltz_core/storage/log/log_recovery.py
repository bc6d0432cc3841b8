"""Opens a log: decides which bytes to trust, truncates a torn tail, adopts records of Waltz 0.13.

The order of the steps matters (docs/design/correctness.md 2.5). Normally, a store session decides
which bytes of a replica to trust. Only this code decides without a session.

Rules:
    1. The intent of a truncation is carried out before any other check.
    2. Bytes that are known to have been synced are never truncated. If such bytes are wrong, they
       are damage. If they are missing, the replica is suspect. These bytes end at the acked marker,
       the greatest synced ID in a batch entry, or the last batch in the older segments, whichever
       is last. (A *synced ID* is the last ID that was durable when the entry was written.)
    3. After these synced bytes, a record belongs to the log if its batch is complete, has an entry,
       and matches the hash chain. All other bytes were never acknowledged: a crash may leave any
       sectors of unsynced data on the disk. The other bytes are truncated, unless this opening
       creates batches for them. For an exception, see "Known limit" in
       `waltz_core/storage/__init__.py`.
    4. Waltz 0.13 writes records without batches. To *adopt* records is to create batches for them.
       An opening adopts records in three cases:
       - Waltz 0.13 has written to the directory after this version. The replica is not suspect. The
         sequence in the control file shows that 0.13 has written. If a crash came between the
         writes of the slot and of the control file, the session in the control file shows that 0.13
         has written.
       - An owner has left records without batches (`UNBATCHED_CHAIN`).
       - An earlier version of this storage has received the records from 0.13 servers. If such a
         server has set a provisional mark, the mark is kept without its session
         (`covered_records.py`, rule 1).
       In the last two cases, the slot is the newest state, and its marker is trusted.
       Adopted batches have up to 1024 IDs, and the same bounds on all replicas. The bounds depend
       only on IDs, record lengths and the low-water mark of 0.13, however often the log was opened
       in between. If an earlier adoption has created batches with other bounds, these batches are
       created again.
       0.13 ignores batches and intents. So an intent that is older than the writes of 0.13 is
       dropped, and batches above the slot's mark must match the records. The session and mark of
       0.13 are written to the slot last, when all records have batches. 0.13 has no marker, so its
       records up to the last complete record count as synced.
    5. If only one slot is valid, it may be the older slot, and a promise may be lost. So the
       replica is suspect. The replica rejects all sessions that the directory has seen, and the
       next session. Example: after session 6, it rejects sessions up to 7. This state is made
       durable before anything else is written, because the next opening finds two valid slots
       again, and no sign of the loss. The older slot also does not show which version wrote last:
       an apparent write of 0.13 may be a write of this version.
    6. The state "suspect" is made durable before the evidence for it is repaired. In the opposite
       order, a crash in between would leave files without any sign of an error.
    7. Bytes that a killed process has written may be readable, but not durable. So these bytes and
       the file names are synced before they are trusted. Bytes that no marker or entry covers are
       also written again before the sync. The reason: after a failed sync, the page cache may
       contain bytes that the disk does not have, and treats them as clean. For an index, only the
       marker shows which bytes are durable.
    8. If the directory of a partition is missing or empty, although the control file has a session
       of the partition, the log and its promise are lost. The new log is empty and suspect, and
       rejects sessions as in rule 5. The first slot of the new log contains this state. If a log is
       deleted on purpose, the control file is cleared first (`removal.py`).
    9. A storage may open a thousand logs, so an opening omits unnecessary syncs. It does not sync
       files that it has just created durably, or records and index up to the marker, which are
       durable already. It does not sync the newer slot if a crash may return to the older slot
       without harm (`may_return_to_older_slot`). It syncs all bytes that it has changed, and all
       bytes that no marker or entry covers.
   10. A new start of the log is written to the slot before the segments up to the start are
       removed. If the removal was interrupted, the opening finishes it, oldest segment first. If
       the log ends before its start, a reset was interrupted. In this case, the opened log begins
       after the start, empty and suspect.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from waltz_core.errors import BadFormat, ChecksumMismatch, MissingSegment, ReadFailed, WaltzError
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    FRAME_BYTES_MAX,
    GENESIS_CHAIN,
    NO_SESSION,
    RECONSTRUCTED,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    Chain,
    LineageEntry,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.storage.disk.file_system import Disk, create_durably, remove_temporary_files
from waltz_core.storage.files.batch_checks import check_chain, entry_before
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME, SlotFile
from waltz_core.storage.files.format import (
    NO_NONCE,
    AckedMarker,
    IdRange,
    LineageHeader,
    PartitionInfo,
    Promise,
    SegmentHeader,
    Slot,
    first_id_in_name,
    segment_name,
)
from waltz_core.storage.files.id_ranges import add_damage, damage_up_to
from waltz_core.storage.files.index import LineageFile
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log.rebatching import chain_before, drop_batches, rewrite_chain_headers

ADOPTED_BATCH_IDS: Final = 1024
# The maximum number of records that are read one by one at the end of a 0.13 log.
_TORN_RECORDS_MAX: Final = 4096
ADOPTED_BATCH_BYTES: Final = (
    FRAME_BYTES_MAX // 2
)  # a batch is copied to other replicas in one frame


def open_log(
    disk: Disk,
    directory: Path,
    header_template: SegmentHeader,
    info: PartitionInfo,
    *,
    trust_fsync: bool,
    is_name_durable: bool = False,
) -> tuple[Segments, SlotFile]:
    """Open or create the files of a partition, and recover a state that can be trusted.

    All changes are durable on return, including the dirty bit. `is_name_durable` states that the
    directory's name is already durable.
    """
    if not (is_name_durable and disk.exists(directory)):
        disk.make_directory(directory)
    remove_temporary_files(disk, directory)
    firsts = _first_ids(disk, directory)
    if not firsts and not disk.exists(directory / SLOTS_FILE_NAME):
        return _create_log(disk, directory, header_template, info, trust_fsync=trust_fsync)
    disk.prefetch(directory, disk.list(directory))
    disk.sync_directory(directory)  # rule 7
    slots = _open_slots(disk, directory, header_template, info)
    opening = _LogOpening(disk, directory, header_template, info, slots)
    try:
        opening.slot = _slot_at_open(slots, info, trust_fsync=trust_fsync)
        if not opening.may_return_to_older_slot():
            slots.write(opening.slot)
        segments = opening.open_segments(firsts)
        opening.recover_records(segments)
        opening.recover_batches(segments)
        opening.write_again(segments)
        slots.write(opening.final_slot(segments))
        for segment in segments.all[:-1]:
            segment.close()
    except BaseException as error:
        # The caller may retry, so no file may stay open.
        for close in (
            *(segment_to_close.close for segment_to_close in opening.opened),
            slots.close,
        ):
            try:
                close()
            except WaltzError as close_error:  # The first error is the cause.
                error.add_note(f"and then: {close_error}")
        raise
    return segments, slots


def _create_log(
    disk: Disk,
    directory: Path,
    header_template: SegmentHeader,
    info: PartitionInfo,
    *,
    trust_fsync: bool,
) -> tuple[Segments, SlotFile]:
    """Create the files of a new log, durably; the `.seg` file is created last."""
    slot = Slot(
        header_template.partition_id,
        control_file_sequence=info.sequence,
        dirty=True,
        suspect=not trust_fsync,
    )
    if info.session_id != NO_SESSION:  # rule 8
        slot = replace(_without_promise(slot, info.session_id), suspect=True)
    files = [SlotFile.new_file(slot), *Segment.new_files(header_template, GENESIS_CHAIN)]
    create_durably(disk, directory, files)
    segments = Segments(
        disk, directory, header_template, [Segment(disk, directory, header_template)]
    )
    return segments, SlotFile.open(disk, directory, header_template.partition_id)


# ---------------------------------------------------------------------------------------------
# slots


def _open_slots(
    disk: Disk, directory: Path, header_template: SegmentHeader, info: PartitionInfo
) -> SlotFile:
    if disk.exists(directory / SLOTS_FILE_NAME):
        return SlotFile.open(disk, directory, header_template.partition_id)
    if any(name.endswith(".chn") for name in disk.list(directory)):
        raise BadFormat(
            f"{directory}: expected a file {SLOTS_FILE_NAME}, because there are .chn files; found "
            "none"
        )
    # The sequence in the slot is below the sequence in the control file, so this opening adopts the
    # records. If a crash interrupts this opening, the next opening adopts them.
    slot = Slot(header_template.partition_id, control_file_sequence=info.sequence - 1, dirty=True)
    return SlotFile.create(disk, directory, slot)


def _slot_at_open(slots: SlotFile, info: PartitionInfo, *, trust_fsync: bool) -> Slot:
    slot = slots.slot
    if slot.has_legacy_writes(info):
        slot = replace(slot, truncate=None)  # 0.13 has written after the intent (rule 4)
    elif slot.provisional is not None and slot.nonce == NO_NONCE:  # of a 0.13 server (rule 4)
        slot = replace(slot, provisional=slot.provisional._replace(session_id=NO_SESSION))
    if slots.has_lost_newer_slot:
        slot = _without_promise(slot, max(slot.last_session, info.session_id))
    suspect = slot.suspect or slots.has_lost_newer_slot or (slot.dirty and not trust_fsync)
    return replace(slot, dirty=True, suspect=suspect)


def _slot_from_0_13(slot: Slot, info: PartitionInfo) -> Slot:
    """Return the slot with the session and the low-water mark of 0.13 (rule 4)."""
    if info.session_id < slot.last_session:
        return slot
    return replace(
        slot.with_promise(slot.promise.at_least(info.session_id)),
        last_session=info.session_id,
        low_water_mark=info.low_water_mark,
        provisional=None,
    )


def _without_promise(slot: Slot, last_seen_session: SessionId) -> Slot:
    """Return the slot with a promise that rejects all seen sessions and the next one (rule 5)."""
    return slot.with_promise(
        Promise.after_loss(max(slot.promise.last_seen_session, last_seen_session))
    )


def _first_ids(disk: Disk, directory: Path) -> list[TransactionId]:
    names = disk.list(directory)
    firsts = sorted(first for name in names if (first := first_id_in_name(name)) is not None)
    known_names = frozenset(names)
    for name in names:
        if name.endswith((".idx", ".chn")) and f"{name[:-4]}.seg" not in known_names:
            disk.unlink(directory / name)  # a crash came before the `.seg` file had its name
    return firsts


# ---------------------------------------------------------------------------------------------
# segments


class _LogOpening:
    """The state of one opening; `slot` collects the changes that are written at its end."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        header_template: SegmentHeader,
        info: PartitionInfo,
        slots: SlotFile,
    ) -> None:
        slot = slots.slot
        self.slot = slot
        self._slots = slots
        self._disk = disk
        self._directory = directory
        self._header_template = header_template
        self._info = info
        # Whether a 0.13 process has written after this version, or an owner has left records
        # without batches.
        self._has_legacy_writes = slot.has_legacy_writes(info)
        self._is_adopting = self._has_legacy_writes or slot.is_unbatched
        self.opened: list[Segment] = []  # all segments to close if the opening fails
        self._rebuilt_segments: list[Segment] = []
        self._implausible_segments: set[TransactionId] = set()  # older segments, by their first ID
        # The records up to this ID are known to be synced. Batch entries may show that later
        # records are synced, too, but they can be read only when the segments are open.
        acked = slot.acked.transaction_id
        self._marker_id = info.local_low_water_mark if self._has_legacy_writes else acked
        self._last_durable_id = self._marker_id
        self._older_batches_end = BEFORE_FIRST  # the end of the last batch in an older segment

    def may_return_to_older_slot(self) -> bool:
        """Return whether a crash during this opening may make the older slot valid again.

        The newer slot can be read but may not be durable (rule 7). If this method returns True,
        every truncation and repair of this opening is allowed with the older slot, too (rules 1, 2,
        6).
        """
        newer, older = self._slots.slot, self._slots.older_slot
        return (
            older is not None
            and older.dirty
            and self.slot == newer
            and not newer.suspect
            and not self._is_adopting
            and newer.truncate is older.truncate is None
            and newer.start == older.start
            and older.acked.transaction_id <= newer.acked.transaction_id
        )

    def open_segments(self, firsts: list[TransactionId]) -> Segments:
        """Finish interrupted removals, and open all other segments (rules 1 and 10)."""
        intent, start = self.slot.truncate, self.slot.start
        opened = self.opened
        if intent is not None:
            while len(firsts) > 1 and firsts[-1] > intent.last_to_keep:
                self._remove(firsts.pop())
        while len(firsts) > 1 and firsts[1] <= start.transaction_id + 1:
            self._remove(firsts.pop(0))
        if firsts and firsts[0] > start.transaction_id + 1:
            raise MissingSegment(
                f"{self._directory}: expected that the oldest segment begins at transaction "
                f"{start.transaction_id + 1} or earlier, found {firsts[0]}"
            )
        # A batch that ends at or before the start may cross the beginning of the oldest segment.
        # Then only the `.chn` file of this segment states the chain hash before the segment's first
        # batch.
        is_exact = not firsts or firsts[0] == start.transaction_id + 1
        chain = start.chain if is_exact else None
        for position, first in enumerate(firsts):
            segment, end = self._open_segment(first, chain)
            if position + 1 < len(firsts):
                chain = self._verify_and_close(segment, end, firsts[position + 1])
        if not opened:
            header = self._header_template._replace(first=TransactionId(start.transaction_id + 1))
            opened.append(Segment.create(self._disk, self._directory, header, start.chain))
        return Segments(self._disk, self._directory, self._header_template, opened, start)

    def _remove(self, first: TransactionId) -> None:
        Segment(self._disk, self._directory, self._header_template._replace(first=first)).remove()

    def _open_segment(
        self, first: TransactionId, chain_before: Chain | None
    ) -> tuple[Segment, LineageEntry | None]:
        """Open a segment; create a missing or wrong `.chn` file again, without batches.

        Return the segment and its last batch. `chain_before` is None if it is not known.
        """
        header = self._header_template._replace(first=first)
        lineage = self._open_lineage(header)
        is_rebuilt = lineage is None
        if lineage is None:
            if not self._is_adopting:
                self._mark_suspect()
            content = LineageHeader(header, chain_before or GENESIS_CHAIN).encode()
            create_durably(self._disk, self._directory, [(segment_name(first, ".chn"), content)])
        segment = Segment.open(
            self._disk,
            self._directory,
            first,
            partition_id=self._header_template.partition_id,
            cluster_key=self._header_template.cluster_key,
            lineage=lineage,
        )
        self.opened.append(segment)
        is_continued = chain_before in {None, segment.lineage.chain_before}
        if not is_continued and not self._is_adopting:
            self._mark_suspect()
            # The preceding segment may have lost its last batches.
            self._rebuilt_segments.extend(self.opened[-2:-1])
        end = segment.lineage.trim_invalid()
        if is_rebuilt:
            self._rebuilt_segments.append(segment)
        return segment, end

    def _open_lineage(self, header: SegmentHeader) -> LineageFile | None:
        path = self._directory / segment_name(header.first, ".chn")
        if not self._disk.exists(path):
            return None
        try:
            lineage = LineageFile.open(self._disk, path)
        except (BadFormat, ChecksumMismatch):
            return None
        if lineage.segment[1:] == header[1:]:
            return lineage
        lineage.close()
        return None

    def _verify_and_close(
        self, segment: Segment, end: LineageEntry | None, next_first: TransactionId
    ) -> Chain:
        """Check an older segment and close it; return the chain hash at its end."""
        lineage = segment.lineage
        chain = lineage.chain_before if end is None else end.chain
        if end is not None and end.last >= next_first:
            # After a failed write, a log truncates its last file and continues in a new file. The
            # truncation may not be durable, so a crash may restore the truncated bytes.
            lineage.truncate(lineage.position_of(next_first))
            chain = lineage.chain_at(lineage.count)
            end = lineage.entry(lineage.count - 1) if lineage.count else None
        if end is not None:
            self._older_batches_end = end.last
        if segment.next_id != next_first or not segment.is_plausible():
            self._implausible_segments.add(segment.first)
        segment.close()
        return chain

    def _mark_suspect(self) -> None:
        """Mark the replica as suspect, durably (rule 6)."""
        if not self.slot.suspect:
            self.slot = replace(self.slot, suspect=True)
            self._slots.write(self.slot)

    # ---- records

    def recover_records(self, segments: Segments) -> None:
        """Read the records after the marker, truncate a torn tail, and note damage (rule 2)."""
        lineage = segments.current.lineage
        position = lineage.position_of(TransactionId(self._marker_id + 1))
        durable_id = lineage.durable_before(position)
        if self._has_legacy_writes:
            # 0.13 may have truncated records that this version had synced. 0.13 has no marker: all
            # its complete records may have been acknowledged, and 0.13 was stopped cleanly before a
            # migration.
            durable_id = max(min(durable_id, segments.last_id), self._last_complete(segments))
        # The marker moves when a full segment is closed, but not when a failure makes the log begin
        # a new file.
        self._last_durable_id = max(self._marker_id, self._older_batches_end, durable_id)
        if self.slot.truncate is not None:
            # The truncation removes all records above this ID, although entries state that they
            # were synced (rule 1).
            self._last_durable_id = min(self._last_durable_id, self.slot.truncate.last_to_keep)
        next_firsts = [*(segment.first for segment in segments.all[1:]), None]
        for segment, next_first in zip(segments.all, next_firsts, strict=True):
            if next_first is None:
                start = max(segment.first, TransactionId(self._marker_id))
                self._recover(segment, start, self._last_durable_id, is_last=True)
                continue
            last_synced = TransactionId(next_first - 1)
            is_plausible = segment.first not in self._implausible_segments
            if not is_plausible or last_synced > self._marker_id:
                start = (
                    max(segment.first, min(self._marker_id, last_synced))
                    if is_plausible
                    else segment.first
                )
                self._recover(segment, start, last_synced, is_last=False)
        if segments.last_id < self._last_durable_id:
            self._mark_suspect()
        if self.slot.truncate is not None:
            # `write_again` makes this durable before the intent is removed.
            segments.truncate(*self.slot.truncate)
        if segments.last_id < segments.start.transaction_id:
            segments.begin_after(segments.start, self._header_template.created_ms)  # rule 10

    def _last_complete(self, segments: Segments) -> TransactionId:
        """Return the last ID above the marker whose record is valid at its offset in the index."""
        current = segments.current
        lowest_id = max(current.first, self._marker_id + 1, current.last - _TORN_RECORDS_MAX)
        for candidate_id in range(current.last, lowest_id - 1, -1):
            with suppress(ChecksumMismatch):
                if (
                    segments.record_crcs(TransactionId(candidate_id), TransactionId(candidate_id))
                    is not None
                ):
                    return TransactionId(candidate_id)
        return BEFORE_FIRST

    def _recover(
        self, segment: Segment, start: TransactionId, last_synced: TransactionId, *, is_last: bool
    ) -> None:
        recovery = segment.recover(start, last_synced, is_last=is_last)
        self._note_damage(recovery.damaged)
        if recovery.has_lost_ids:
            self._mark_suspect()

    def _note_damage(self, damaged: tuple[IdRange, ...]) -> None:
        for ids in damaged:
            self.slot = replace(self.slot, damaged=add_damage(self.slot.damaged, ids))

    # ---- batches

    def recover_batches(self, segments: Segments) -> None:
        """Check the batches above the marker.

        Truncate or adopt records without a valid batch (rules 3, 4).
        """
        for segment in self._rebuilt_segments:
            self._create_lost_batches(segments, segment)
        last_trusted = (
            min(self._marker_id, self.slot.low_water_mark) if self._is_adopting else self._marker_id
        )
        if not self._is_adopting and not self._is_marker_valid(segments):
            self._mark_suspect()
        end = min(self._valid_end(segments, TransactionId(last_trusted)), segments.last_id)
        if not self._is_adopting and end < self._last_durable_id:
            self._mark_suspect()
        if self._is_adopting:
            end = self._end_before_gap(segments, end)
        if self._is_adopting or end < self._last_durable_id:
            drop_batches(segments, end)
            # If an entry below `end` is unreadable, `drop_batches` has removed it, with all later
            # entries.
            end = min(end, self._lineage_end_id(segments))
            self._append_batches(segments, TransactionId(end + 1), segments.last_id)
        elif end < segments.last_id or end < self._lineage_end_id(segments):
            segments.truncate(end, None)

    def _is_marker_valid(self, segments: Segments) -> bool:
        try:
            return segments.chain_at(TransactionId(self._marker_id)) == self.slot.acked.chain
        except (BadFormat, ChecksumMismatch):
            return False

    def _valid_end(self, segments: Segments, last_trusted: TransactionId) -> TransactionId:
        """Return the end of the valid batches after `last_trusted`; stop at an invalid batch."""
        end = last_trusted
        try:
            first_untrusted = TransactionId(last_trusted + 1)
            chain, batches = segments.entries(first_untrusted, first_untrusted, 1)
            end = TransactionId(batches[0].first - 1) if batches else self._lineage_end_id(segments)
            for entry in segments.entries_from(TransactionId(end + 1)):
                if entry.last > segments.last_id or not self._is_batch_valid(
                    segments, entry, end, chain
                ):
                    return end
                end, chain = entry.last, entry.chain
        except (BadFormat, ChecksumMismatch):
            return end
        return end

    def _end_before_gap(self, segments: Segments, end: TransactionId) -> TransactionId:
        """Return the end of the existing batches that an adoption keeps (rule 4).

        At the end of the log, an earlier adoption may have created batches with other bounds. Such
        batches are dropped, with all batches after them.
        """
        first = TransactionId(end + 1)
        with suppress(BadFormat, ChecksumMismatch):  # an unreadable entry stays as it is
            while first > 0:
                entry = segments.entry_of(TransactionId(first - 1))
                if entry is None or entry.session_id != NO_SESSION or entry.first >= first:
                    break
                first = entry.first
        while first <= end:
            entry = segments.entry_of(first)
            if entry is None or entry.last != self._adopted_end(segments, first, segments.last_id):
                break
            first = TransactionId(entry.last + 1)
        return TransactionId(first - 1)

    def _lineage_end_id(self, segments: Segments) -> TransactionId:
        end = segments.lineage_end()
        return end.last if end is not None else segments.start.transaction_id

    def _is_batch_valid(
        self, segments: Segments, entry: LineageEntry, end: TransactionId, chain: Chain
    ) -> bool:
        if entry.first != end + 1:
            return False
        if any(ids.first <= entry.last and entry.first <= ids.last for ids in self.slot.damaged):
            return True  # bytes that cannot be read cannot be checked; the damage is known
        crcs = segments.record_crcs(entry.first, entry.last)
        return crcs is not None and check_chain([entry], entry.first, chain, crcs) is None

    def _create_lost_batches(self, segments: Segments, segment: Segment) -> None:
        """Create batches for a segment that has lost its batches, up to the next known batch."""
        position = segments.all.index(segment)
        earlier_segments = [other for other in segments.all[: position + 1] if other.lineage.count]
        next_segment = next(
            (other for other in segments.all[position + 1 :] if other.lineage.count), None
        )
        oldest_id = segments.all[0].first
        first = (
            earlier_segments[-1].lineage.entry(earlier_segments[-1].lineage.count - 1).last + 1
            if earlier_segments
            else oldest_id
        )
        if next_segment is not None:
            last = min(segment.last, next_segment.lineage.entry(0).first - 1)
            if first <= last:
                chain = next_segment.lineage.chain_before
                self._append_batches(segments, TransactionId(first), TransactionId(last), chain)

    def _append_batches(
        self,
        segments: Segments,
        first: TransactionId,
        last: TransactionId,
        last_chain: Chain | None = None,
    ) -> None:
        """Create batches for first..last.

        If `last_chain` is known, it is the last batch's chain hash.
        """
        position = 0
        while first <= last:
            end = self._adopted_end(segments, first, last)
            while segments.all[position].last < end:
                position += 1
            segment = segments.all[position]
            crcs = self._crcs_of(segments, first, end)
            session_id, stamp_ms = self._origin_of_created_batch(segments, first)
            chain = next_chain(chain_before(segments, position), first, end, session_id, crcs)
            if end == last and last_chain is not None:
                chain = last_chain
            entry = LineageEntry(first, end, session_id, stamp_ms, chain)
            segment.append_entries([entry], BEFORE_FIRST)
            segment.sync()
            first = TransactionId(end + 1)
        rewrite_chain_headers(segments)

    def _origin_of_created_batch(
        self, segments: Segments, first: TransactionId
    ) -> tuple[SessionId, int]:
        """Return the session and commit stamp of a batch that this opening creates.

        Batches of 0.13 never had a session; other batches have lost their sessions. Stamps never
        decrease, so the stamp of the preceding batch is the nearest known value.
        """
        if self._is_adopting and not self.slot.suspect:
            return NO_SESSION, 0
        preceding_batch = entry_before(segments, first)
        return RECONSTRUCTED, 0 if preceding_batch is None else preceding_batch.stamp_ms

    def _crcs_of(self, segments: Segments, first: TransactionId, last: TransactionId) -> bytes:
        """Return the CRCs of the records of a batch that this opening creates.

        If an adopted record is corrupt, it is noted as damage. In place of its computed CRC, the
        CRC that the record states is used, as on the other replicas. If the stated CRC may be
        corrupt, too, the replica is suspect.
        """
        crcs: bytes | None = None
        try:
            crcs = segments.record_crcs(first, last)
        except ReadFailed:
            if not self._is_adopting:
                raise
        if crcs is not None or not self._is_adopting:
            return crcs or bytes(4 * (last - first + 1))
        ids = map(TransactionId, range(first, last + 1))
        return b"".join(
            self._computed_or_stated_crc(segments, transaction_id) for transaction_id in ids
        )

    def _computed_or_stated_crc(self, segments: Segments, transaction_id: TransactionId) -> bytes:
        try:
            crc = segments.record_crcs(transaction_id, transaction_id)
            if crc is None:
                # The index may be wrong, and the record right.
                self._note_damage(segments.diagnose(transaction_id))
                crc = segments.record_crcs(transaction_id, transaction_id)
            return crc or self._crc_stated_by_record(segments, transaction_id)
        except ReadFailed:
            self._note_damage((IdRange(transaction_id, transaction_id),))
            self._mark_suspect()
            return bytes(4)

    def _crc_stated_by_record(self, segments: Segments, transaction_id: TransactionId) -> bytes:
        record, _ = segments.read(transaction_id, transaction_id)
        # The stated CRC is the end of the record. If it is corrupt, it is zero, or most likely the
        # next record is corrupt, too.
        has_next = transaction_id < segments.segment_end(transaction_id)
        if has_next and len(record) >= RECORD_OVERHEAD_BYTES and any(record[-4:]):
            found_id, _, _, data_bytes, data_crc = RECORD_PREFIX.unpack_from(record)
            data = memoryview(record)[RECORD_PREFIX.size : -4]
            if (found_id, data_bytes) == (transaction_id, len(data)) and crc32(data) != data_crc:
                return record[-4:]  # The data is corrupt, or the CRC of the data.
        self._mark_suspect()
        return bytes(4)

    def _adopted_end(
        self, segments: Segments, first: TransactionId, last: TransactionId
    ) -> TransactionId:
        """Return the end of an adopted batch that begins at `first`.

        The batch ends before a multiple of 1024, at the low-water mark, or at `last`, whichever is
        first. It ends earlier if it would not fit into a frame.
        """
        end = first - first % ADOPTED_BATCH_IDS + ADOPTED_BATCH_IDS - 1
        mark = self._info.low_water_mark
        end = TransactionId(min(end, last, mark if first <= mark else last))
        with suppress(ChecksumMismatch):
            return segments.last_fitting_id(first, end, ADOPTED_BATCH_BYTES)
        for segment in segments.all:  # a wrong index is rebuilt
            if segment.first <= end and first <= segment.last:
                self._note_damage(
                    segment.recover(segment.first, segment.last, is_last=False).damaged
                )
        return segments.last_fitting_id(first, end, ADOPTED_BATCH_BYTES)

    # ---- the end

    def write_again(self, segments: Segments) -> None:
        """Sync the trusted log, and rewrite the bytes that no marker covers (rules 7 and 9).

        A log of 0.13 may be long, so it is only synced.
        """
        current, durable_before, marker = segments.current, self._last_durable_id, self._marker_id
        if self._has_legacy_writes:
            durable_before = marker = segments.last_id
        current.write_again(
            max(current.first, TransactionId(durable_before + 1)),
            index_rewrite_first=max(current.first, TransactionId(marker + 1)),
            syncs_all=self._is_adopting or segments.last_id > self._marker_id,
        )

    def final_slot(self, segments: Segments) -> Slot:
        """Return the slot of the opened log, after all recovery (rule 5)."""
        end = segments.lineage_end()
        marker = AckedMarker(end.last, end.chain) if end is not None else segments.start
        slot = _slot_from_0_13(self.slot, self._info) if self._has_legacy_writes else self.slot
        if end is not None and end.session_id == RECONSTRUCTED:
            # No owner can compare the chain hash of a reconstructed batch with another log. So an
            # owner must be able to truncate these batches, and to copy their records from another
            # replica. This code also runs if an earlier opening has created the batches, and a
            # crash came before its write of the slot.
            intact_end = _last_intact_batch_end(segments)
            mark = min(slot.low_water_mark, intact_end)
            provisional = slot.provisional if intact_end >= slot.low_water_mark else None
            slot = replace(slot, suspect=True, low_water_mark=mark, provisional=provisional)
        if slot.promise.is_after_loss and end is not None:
            slot = _without_promise(slot, end.session_id)
        return replace(
            slot,
            acked=marker,
            truncate=None,
            damaged=damage_up_to(slot.damaged, segments.last_id),
            control_file_sequence=max(self._info.sequence, self.slot.control_file_sequence),
        )


def _last_intact_batch_end(segments: Segments) -> TransactionId:
    """Return the end of the last batch that is readable and not reconstructed."""
    for segment in reversed(segments.all):
        for position in range(segment.lineage.count - 1, -1, -1):
            with suppress(BadFormat, ChecksumMismatch):
                entry = segment.lineage.entry(position)
                if entry.session_id != RECONSTRUCTED:
                    return entry.last
    return segments.start.transaction_id
