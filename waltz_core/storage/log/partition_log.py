"""The log of one partition on one replica: its promise, low-water marks, records and damage.

`PartitionLog` decides which state of the replica is trusted when a session recovers the partition.
`LogFiles` writes and syncs. The engine opens the logs of all partitions, and the service executes
requests on them.

Rules (numbers in brackets: rows of docs/design/correctness.md 2.4):
    1. A promise, a mark, a truncation or a sync is durable before the request is answered.
    2. After the promise of a session, the log permanently rejects all earlier sessions, and an
       owner that uses the same session with another nonce [15].
    3. A low-water mark is stored only if the log ends exactly at the mark. The mark is provisional
       until ENGAGE, or the first append of its session, confirms it. Nothing below a confirmed mark
       is ever truncated [15].
    4. Each batch above the acked marker has a lineage entry. Records without a lineage entry are
       not part of the log.
    5. Damaged records keep their IDs in the log, and the slot lists them; reading them is an error
       [5].
    6. The log begins after its start: the end of a batch up to which the archive contains every
       record. The start only rises. It is never above the confirmed mark, and never within a batch
       (decision 047).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from waltz_core.errors import (
    BadRequest,
    DataLoss,
    DiskFailed,
    MissingSegment,
    NoSpace,
    ReplicaSuspect,
    SessionFenced,
)
from waltz_core.records.raw_records import RangeRead
from waltz_core.records.record import (
    NO_SESSION,
    RECONSTRUCTED,
    Chain,
    LineageEntry,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.disk.file_system import Disk
from waltz_core.storage.files.batch_checks import check_batches
from waltz_core.storage.files.control_file import ControlFile, SlotFile
from waltz_core.storage.files.format import (
    AckedMarker,
    IdRange,
    Promise,
    ProvisionalMark,
    SegmentHeader,
    Slot,
)
from waltz_core.storage.files.lock_block_file import LockBlockFile
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import damage, log_recovery
from waltz_core.storage.log.covered_records import CoveredRecords
from waltz_core.storage.log.log_files import LogFiles, LogSettings
from waltz_core.storage.log.reading import READ_BYTES, HeadersRead, LogReader

I64 = npt.NDArray[np.int64]
Buffer = bytes | memoryview


class ReplicaReport(NamedTuple):
    """The state of a replica, as message PREPARED reports it."""

    last_session: SessionId
    low_water_mark: TransactionId
    mark_confirmed: bool
    synced_max: TransactionId
    chain: Chain
    suspect: bool
    damaged: tuple[IdRange, ...]
    engaged_session: SessionId


class PartitionLog:
    """One partition on disk; all calls block, and only one may run at a time."""

    def __init__(
        self, files: LogFiles, covered_records: CoveredRecords, control: ControlFile
    ) -> None:
        self.partition_id: PartitionId = files.partition_id
        self.appended_bytes = 0
        self.read_count = 0
        self._files = files
        self._covered_records = covered_records
        self._control = control
        self._engaged = NO_SESSION

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        partition_id: PartitionId,
        control: ControlFile,
        settings: LogSettings,
        *,
        is_name_durable: bool = False,
    ) -> Self:
        """Open or create a log, and recover it; all changes are durable. See `open_log`."""
        now_ms, key = settings.now_ms(), settings.cluster_key
        header_template = SegmentHeader(now_ms, key, partition_id, TransactionId(0))
        info, trust_fsync = control.info(partition_id), settings.trust_fsync
        opened_files = log_recovery.open_log(
            disk,
            directory,
            header_template,
            info,
            trust_fsync=trust_fsync,
            is_name_durable=is_name_durable,
        )
        files = LogFiles(*opened_files, settings)

        def reopen() -> tuple[Segments, SlotFile]:
            header_template = SegmentHeader(settings.now_ms(), key, partition_id, TransactionId(0))
            # This process has not stopped, so an unclean stop is impossible.
            info = control.info(partition_id)
            return log_recovery.open_log(
                disk, directory, header_template, info, trust_fsync=True, is_name_durable=True
            )

        return cls(files, CoveredRecords(files, reopen), control)

    # ---- state

    @property
    def slot(self) -> Slot:
        """The durable state of the partition, without the log."""
        return self._files.slots.slot

    @property
    def max_id(self) -> TransactionId:
        """The last ID of the log, synced or not; in an empty log, the ID of its start."""
        return self._files.last_id

    @property
    def start(self) -> AckedMarker:
        """The batch end after which the log begins (rule 6)."""
        return self._files.segments.start

    @property
    def synced_max(self) -> TransactionId:
        """The last ID that is durable."""
        return self._files.synced_max

    @property
    def synced_end(self) -> tuple[TransactionId, Chain]:
        """The last ID that is durable, and the chain hash at this ID."""
        return self._files.synced_max, self._files.synced_chain

    @property
    def chain(self) -> Chain:
        """The chain hash at the last ID."""
        return self._files.chain

    @property
    def reader(self) -> LogReader:
        """The reader of records, headers and batches."""
        return self._files.reader

    @property
    def lock_block_file(self) -> LockBlockFile:
        """The file with the lock blocks of this log's batches."""
        return self._files.lock_block_file

    @property
    def sync_count(self) -> int:
        """The number of syncs that the log has made."""
        return self._files.sync_count

    @property
    def failure_count(self) -> int:
        """The number of writes and syncs that have failed."""
        return self._files.failure_count

    @property
    def is_broken(self) -> bool:
        """Whether the log rejects all calls until it is opened again (`log_files.py`, rule 3)."""
        return self._files.is_broken

    @property
    def files_error(self) -> MissingSegment | None:
        """The error if the files were deleted or replaced (`log_files.py`, rule 5)."""
        return self._files.files_error

    @property
    def promised(self) -> SessionId:
        """The latest session that this replica has promised."""
        return self.slot.promised

    @property
    def last_session(self) -> SessionId:
        """The last session that set a low-water mark."""
        return self.slot.last_session

    @property
    def low_water_mark(self) -> TransactionId:
        """The low-water mark that was set last, confirmed or provisional."""
        provisional = self.slot.provisional
        return self.slot.low_water_mark if provisional is None else provisional.low_water_mark

    @property
    def confirmed_low_water_mark(self) -> TransactionId:
        """The low-water mark below which the log is never truncated (rule 3)."""
        return self.slot.low_water_mark

    @property
    def suspect(self) -> bool:
        """Whether the replica's own log is not trusted."""
        return self.slot.suspect

    @property
    def damaged(self) -> tuple[IdRange, ...]:
        """The ranges of IDs whose records are damaged."""
        return self.slot.damaged

    def is_engaged(self, session: SessionId) -> bool:
        """Whether this session has sent ENGAGE, without a later promise or failure."""
        is_working = not self._files.has_failed
        return session != NO_SESSION and self._engaged == session and is_working

    def state(self) -> ReplicaReport:
        """Return the state that PREPARED reports (`covered_records.py`, rules 1 and 5)."""
        slot, synced_max = self.slot, self.synced_max
        is_below_mark = synced_max < self.low_water_mark
        return ReplicaReport(
            NO_SESSION if is_below_mark else slot.last_session,
            self.low_water_mark,
            slot.provisional is None and not self._covered_records.ends_with_adopted_batch(),
            synced_max,
            self._files.synced_chain,
            slot.suspect,
            slot.damaged,
            NO_SESSION if is_below_mark else slot.engaged,
        )

    # ---- sessions

    def prepare(self, session: SessionId, nonce: bytes) -> ReplicaReport:
        """Promise a session durably, sync the log, and return its state (rule 2).

        First, batches are created for records that an earlier session left without batches
        (`covered_records.py`, rule 2).

        Raises:
            SessionFenced: a later session was promised, or this session was promised to another
                owner.
            DiskFailed: promise or log could not be made durable.
        """
        if self.is_broken:
            raise DiskFailed(
                f"partition {self.partition_id}: the log has failed and cannot be used until it "
                "is opened again"
            )
        if session > self.promised and self.slot.is_unbatched:
            self._covered_records.make_batches()
        slot = self.slot
        promise = Promise(session, nonce)
        is_same = promise == slot.promise
        if not is_same and session <= slot.promised:
            raise SessionFenced(
                f"partition {self.partition_id}: expected a store session above the promised "
                f"session {slot.promised}, found {session}",
                slot.promised,
            )
        if not is_same:
            self._engaged = NO_SESSION
            self._files.write_slot(slot.with_promise(promise))
        if self._files.has_failed:
            self._engaged = NO_SESSION
            self._files.continue_in_new_segment()
        self._files.sync()
        return self.state()

    def set_low_water_mark(self, session: SessionId, mark: TransactionId, chain: Chain) -> None:
        """Store session and low-water mark durably, as provisional (rule 3); clears `suspect`.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the log does not end at the mark with this chain hash, or is not synced.
            DataLoss: the mark is below the confirmed mark.
            ReplicaSuspect: the log is suspect and damaged above its confirmed mark.
            NoSpace: the disk is too full to truncate covered records; call this method again when
                there is space.
        """
        self._truncate_covered(session, mark, chain)
        self._check_session(session)
        if (self.max_id, self.synced_max, self.chain) != (mark, mark, chain):
            raise BadRequest(
                f"partition {self.partition_id}: expected a log that ends at transaction "
                f"{mark} with chain hash {chain.hex()}, found a log that ends at {self.max_id} "
                f"with chain hash {self.chain.hex()} and is synced up to {self.synced_max}"
            )
        if mark < self.slot.low_water_mark:
            raise DataLoss(
                f"partition {self.partition_id}: expected a low-water mark of at least "
                f"{self.slot.low_water_mark}, found {mark}"
            )
        if self.slot.suspect:
            self._verify_suspect()
        self._files.sync_index()
        slot = replace(self.slot, acked=AckedMarker(mark, chain), suspect=False)
        self._write_mark(slot, session, mark)

    def _truncate_covered(self, session: SessionId, mark: TransactionId, chain: Chain) -> None:
        """Truncate covered records if the log ends at the mark (`covered_records.py`, rule 3)."""
        files = self._files
        intent = self.slot.truncate if files.is_half_truncated else None
        if intent is not None and (session, mark) == (self.promised, intent.last_to_keep):
            files.truncate(mark)
            files.chain = files.segments.chain
            self._covered_records.complete_batches()
        if files.covered_end is not None:
            self._check_session(session)
            if (files.covered_end, files.chain) == (mark, chain):
                self._covered_records.truncate_covered()

    def _write_mark(self, slot: Slot, session: SessionId, mark: TransactionId) -> None:
        """Write session and provisional mark to the slot, and then to the 0.13 control file."""
        info = self._control.info(self.partition_id)
        slot = replace(slot, last_session=session, provisional=ProvisionalMark(session, mark))
        self._files.write_slot(replace(slot, control_file_sequence=info.sequence + 1))
        try:
            self._control.set_marks(self.partition_id, session, mark, self.max_id)
        except (DiskFailed, NoSpace) as error:
            raise self._files.mark_broken(f"cannot write the control file: {error}") from error

    def engage(self, session: SessionId, mark: TransactionId) -> None:
        """Confirm the low-water mark durably, because ZooKeeper records the replica as engaged.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the session has set another mark, or no mark.
        """
        self._check_session(session)
        if (self.slot.last_session, self.low_water_mark) != (session, mark):
            raise BadRequest(
                f"partition {self.partition_id}: expected low-water mark "
                f"{self.low_water_mark} of session {self.slot.last_session}, found {mark} of "
                f"session {session}"
            )
        self._confirm(session)
        self._engaged = session

    def _confirm(self, session: SessionId) -> None:
        provisional = self.slot.provisional
        if provisional is not None and provisional.session_id == session:
            mark = provisional.low_water_mark
            slot = replace(self.slot, low_water_mark=mark, provisional=None, engaged=session)
            self._files.write_slot(slot)

    def _check_session(self, session: SessionId) -> None:
        self._files.check_usable()
        if session != self.slot.promised:
            raise SessionFenced(
                f"partition {self.partition_id}: expected the promised store session "
                f"{self.slot.promised}, found {session}",
                self.slot.promised,
            )

    def _verify_suspect(self) -> None:
        """Read all records above the confirmed mark.

        Raise ReplicaSuspect if any of them is damaged.
        """
        first = TransactionId(self.slot.low_water_mark + 1)
        while first <= self.max_id:
            first = self.verify(first, READ_BYTES)
        damaged = [ids for ids in self.slot.damaged if ids.last > self.slot.low_water_mark]
        if damaged:
            raise ReplicaSuspect(f"partition {self.partition_id}: records {damaged} are damaged")

    # ---- appending

    def append(  # noqa: PLR0913 - every one of them is a part of an append
        self,
        session: SessionId,
        first: TransactionId,
        lengths: I64,
        records: Buffer,
        chain_before: Chain,
        entries: Sequence[LineageEntry],
        *,
        records_crc: int | None = None,
    ) -> None:
        """Write complete batches after the last record; `sync` makes them durable.

        `records_crc` is the CRC of all bytes, if the caller has already computed it.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the records do not continue the log, or do not fit their batches.
            ChecksumMismatch: a record's CRC does not match; nothing was written.
            NoSpace: the disk is full; nothing was written.
            DiskFailed: a write failed (`log_files.py`, rule 3).
        """
        self._check_session(session)
        if first != self.max_id + 1 or chain_before != self.chain:
            raise BadRequest(
                f"partition {self.partition_id}: cannot append: expected records from transaction "
                f"{self.max_id + 1} on, after chain hash {self.chain.hex()}; found records from "
                f"{first} on, after {chain_before.hex()}"
            )
        check_batches(first, lengths, records, chain_before, entries, records_crc)
        new_records = memoryview(records).cast("B")
        if self._files.covered_end is not None:
            if self._covered_records.uncover(lengths, new_records, entries):
                return
            self._covered_records.truncate_covered()
        self._confirm(session)
        self._files.append(lengths, new_records, entries)
        self.appended_bytes += len(records)

    def sync(self) -> TransactionId:
        """Sync all appended records; return the last ID (rule 1). See `LogFiles.sync`."""
        return self._files.sync()

    def mark_acked(self) -> None:
        """Move the acked marker to the last synced ID, durably."""
        self._files.mark_acked()

    # ---- truncation

    def truncate(
        self,
        session: SessionId,
        last_to_keep: TransactionId,
        base: TransactionId,
        base_chain: Chain,
    ) -> tuple[TransactionId, Chain]:
        """Remove all records after an ID, durably; return the last ID and its chain hash.

        Raises:
            NoSpace: the disk is full. Call this method again when there is space; until then other
                calls fail.
            SessionFenced: the session is not the promised one.
            DataLoss: the ID is below the confirmed low-water mark.
            BadRequest: no batch of this log ends at `base` with this chain hash, or `base` is above
                `last_to_keep`.
        """
        files = self._files
        intent = self.slot.truncate if files.is_half_truncated else None
        if intent is not None and (session, last_to_keep) == (self.promised, intent.last_to_keep):
            files.truncate(last_to_keep)
            return self.max_id, self.chain
        if files.covered_end is not None and last_to_keep < files.covered_end:
            raise BadRequest(
                f"partition {self.partition_id}: expected at most one truncation in a store "
                "session, found another one"
            )
        self._check_session(session)
        covers_records = last_to_keep < self.max_id and self._covered_records.must_cover_records()
        if last_to_keep < self.start.transaction_id or (
            last_to_keep < self.slot.low_water_mark and not covers_records
        ):
            raise DataLoss(
                f"partition {self.partition_id}: cannot truncate after transaction "
                f"{last_to_keep}, which is below the low-water mark {self.slot.low_water_mark}"
            )
        found_chain = self.chain_at(base) if base <= last_to_keep else None
        if found_chain != base_chain:
            raise BadRequest(
                f"partition {self.partition_id}: expected chain hash {base_chain.hex()} at "
                f"transaction {base}, found "
                f"{found_chain.hex() if found_chain is not None else 'no batch end there'}"
            )
        if covers_records:
            self._covered_records.cover(last_to_keep)
        else:
            files.sync()
            if last_to_keep < self.max_id:
                files.truncate(last_to_keep)
        return self.max_id, self.chain

    def chain_at(self, transaction_id: TransactionId) -> Chain | None:
        """Return the chain hash at the end of a batch; None if no batch ends at this ID."""
        return self._files.segments.chain_at(transaction_id)

    # ---- the start (rule 6)

    def remove_oldest(self, archived: AckedMarker) -> bool:
        """Remove the oldest segment, durably, if the archive contains its records.

        Return whether the segment was removed. `archived` is a batch end up to which the archive
        contains every record. The newest segment stays, and so do records above the confirmed mark
        (AR 10 in decision 047).

        Raises:
            BadRequest: the log has another chain hash at `archived`.
            DiskFailed: a write failed (`log_files.py`, rule 3).
        """
        files = self._files
        files.check_usable()
        found_chain = self.chain_at(archived.transaction_id)
        if found_chain != archived.chain:
            raise BadRequest(
                f"partition {self.partition_id}: expected chain hash {archived.chain.hex()} "
                f"at transaction {archived.transaction_id}, up to which the log is archived; "
                f"found {'none' if found_chain is None else found_chain.hex()}"
            )
        end = self.removable_end(archived)
        if end is None:
            return False
        files.mark_acked()
        files.begin_after(end, self.slot)
        return True

    def removable_end(self, archived: AckedMarker) -> AckedMarker | None:
        """Return the log's start without the oldest segment; None if the segment must stay."""
        files, segments = self._files, self._files.segments
        if len(segments.all) == 1 or files.covered_end is not None:
            return None
        # A reconstructed batch does not have the chain hash of the lost batch, and may end within
        # the lost batch.
        entries = segments.entries_from(segments.all[0].last)
        end = next((entry for entry in entries if entry.session_id != RECONSTRUCTED), None)
        if end is None or end.last > min(archived.transaction_id, self.slot.low_water_mark):
            return None
        return AckedMarker(end.last, end.chain)

    @property
    def size_bytes(self) -> int:
        """The bytes of the records and headers of all segments."""
        return sum(segment.size_bytes for segment in self._files.segments.all)

    @property
    def oldest_stamp_ms(self) -> int:
        """The commit stamp of the newest batch of the oldest segment; 0 if this batch has none."""
        segments = self._files.segments
        end = segments.entry_of(segments.all[0].last)
        return 0 if end is None else end.stamp_ms

    def clock_ms(self) -> int:
        """Return the time of the clock that dates the segments, in milliseconds."""
        return self._files.now_ms()

    def reset(self, session: SessionId, start: AckedMarker) -> None:
        """Drop all records and begin after a batch end that the archive contains, durably (AR 12).

        The log is suspect until a session sets its mark. Its confirmed mark rises to the start,
        because the archive contains the records up to there.

        Raises:
            SessionFenced: the session is not the promised one.
            DataLoss: the log is not suspect, and its confirmed mark is above the start.
            BadRequest: the log does not end before the start.
            DiskFailed: a write failed (`log_files.py`, rule 3).
        """
        self._check_session(session)
        slot = self.slot
        if slot.low_water_mark > start.transaction_id and not slot.suspect:
            raise DataLoss(
                f"partition {self.partition_id}: cannot reset the log to begin after "
                f"transaction {start.transaction_id}: the replica must keep records up to its "
                f"low-water mark {slot.low_water_mark}"
            )
        if self.max_id >= start.transaction_id:
            raise BadRequest(
                f"partition {self.partition_id}: cannot reset the log to begin after transaction "
                f"{start.transaction_id}, because it has transactions up to {self.max_id}"
            )
        self._files.stop_covering()
        mark = max(slot.low_water_mark, start.transaction_id)
        slot = replace(slot, suspect=True, acked=start, low_water_mark=mark, provisional=None)
        self._files.begin_after(start, slot)

    # ---- reading

    def read_range(
        self, first: TransactionId, last: TransactionId, bytes_max: int, *, whole_batches: bool
    ) -> RangeRead:
        """Return records of first..last up to `bytes_max`, but at least one record or batch.

        With `whole_batches`, `first` must begin a batch, and the result ends with a batch. The
        result ends before a damaged record.

        Raises:
            BadRequest: the log does not have these records, or no batch begins at `first`.
            ChecksumMismatch: the record at `first` (or its batch) is damaged.
        """
        self.read_count += 1
        return self.reader.read_range(first, last, bytes_max, whole_batches=whole_batches)

    def read_headers(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> HeadersRead:
        """Return the 28-byte headers of first..last up to `bytes_max`, but at least one header.

        Raises:
            BadRequest, ChecksumMismatch: as for `read_range`.
        """
        self.read_count += 1
        return self.reader.read_headers(first, last, bytes_max)

    def lineage(
        self, first: TransactionId, last: TransactionId
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that overlap first..last, and the chain hash before them.

        If there are too many batches, the newest are returned.

        Raises:
            BadFormat, ChecksumMismatch: an entry is wrong.
        """
        return self.reader.lineage(first, last)

    # ---- damage

    def repair(self, first: TransactionId, lengths: I64, records: Buffer) -> None:
        """Replace damaged records by valid copies, durably; raises like `damage.repair_damage`."""
        if self._files.has_failed:  # The marker of a failed log may not move.
            raise BadRequest(
                f"partition {self.partition_id}: cannot repair records now, because a write has "
                "failed in this store session. The owner can repair them in its next session."
            )
        # The repair may discard blocks with other records (file_system.py, rule 8). The marker must
        # cover these records, so that they are damage, and not a torn tail.
        self._files.mark_acked()
        remaining = damage.repair_damage(self.slot, self._files.segments, first, lengths, records)
        self._files.write_slot(replace(self.slot, damaged=remaining))

    def verify(self, first: TransactionId, bytes_max: int) -> TransactionId:
        """Read records, starting at an ID, and note damage; return the next ID.

        Raises an error if batches cannot be read.
        """
        return self.reader.verify(first, bytes_max)

    # ---- the end

    def close(self) -> None:
        """Sync, move the marker to the end, clear the dirty bit, all durably; close the files."""
        self._files.close()

    def abandon(self) -> None:
        """Close the files without any write, as if the process had crashed."""
        self._files.abandon()

    def check_files(self) -> None:
        """Raise MissingSegment if the files were deleted or replaced; see `LogFiles`."""
        self._files.check_files()
