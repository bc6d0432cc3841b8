"""The log of one partition on one replica: its segments, its promise, its marks, its damage.

Why it stands alone: everything that recovery believes about a replica is decided here. The engine
only holds many of these, and the service only carries messages to them.

Rules (numbers in brackets: rows of docs/design/correctness.md 2.4):
    1. Nothing is answered before it is durable: a promise, a mark, a truncation, a sync.
    2. A later session fences an earlier one for good; so does another nonce of the same one [15].
    3. A low-water mark is stored only where the log ends exactly there; it is provisional until
       ENGAGE, or the first append of its session, confirms it. Nothing below a confirmed mark is
       ever cut [15].
    4. The acked marker is an id at a batch's end, synced, index included, with the chain there. It
       moves at each roll, or a second after what it lacks; a log that ends below is suspect [2].
    5. Each batch above the marker has a lineage entry; records without one are no part of the log.
    6. A failed write or sync is final for its file: what was not synced is cut away, and the log
       goes on in a new segment once a session prepares it again. When the cut or a slot fails too,
       nothing is answered until the log is opened again [7].
    7. A truncation writes its intent first; what it finds no room for is done again, by the next
       open if need be [9, 12].
    8. Damaged ids stay in the log and are known in the slot; reading them is an error [5].
    9. Files that were deleted or replaced under this process are not used any more: what they
       acknowledge would be lost, and those that are there now may have forgotten a promise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Self

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
    WaltzError,
)
from waltz_core.records.record import (
    NO_SESSION,
    Chain,
    LineageEntry,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.disk.file_system import Disk
from waltz_core.storage.files.batch_checks import check_batches
from waltz_core.storage.files.control_file import (
    SLOTS_NAME,
    ControlFile,
    SlotFile,
)
from waltz_core.storage.files.format import (
    UNBATCHED,
    IdRange,
    Mark,
    Marker,
    SegmentHeader,
    Slot,
)
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import (
    damage,
    log_recovery,
    truncation,
)
from waltz_core.storage.log.reading import (
    READ_BYTES,
    HeadersRead,
    LogReader,
    RangeRead,
)

I64 = npt.NDArray[np.int64]
Buffer = bytes | memoryview
MARKER_INTERVAL_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What all logs of a storage share.

    `segment_bytes_max`: a segment that is larger gets no further record. `now_ms` is the wall
    clock; it stamps headers and paces the marker, and decides nothing. Without `trust_fsync` an
    unclean stop makes the replica suspect.
    """

    cluster_key: bytes
    segment_bytes_max: int
    now_ms: Callable[[], int]
    trust_fsync: bool = True


class Prepared(NamedTuple):
    """What a replica has, as PREPARED tells it."""

    last_session: SessionId
    low_water_mark: TransactionId
    mark_confirmed: bool
    synced_max: TransactionId
    chain: Chain
    suspect: bool
    damaged: tuple[IdRange, ...]
    engaged_session: SessionId


class PartitionLog:
    """One partition on disk; all calls block, one at a time."""

    def __init__(
        self, segments: Segments, slots: SlotFile, control: ControlFile, settings: LogSettings
    ) -> None:
        self.partition_id: PartitionId = slots.slot.partition_id
        self.synced_max = segments.last
        self.chain = segments.chain
        self.appended_bytes = 0
        self.sync_count = 0
        self.read_count = 0
        self.failure_count = 0
        self._segments = segments
        self._slots = slots
        self.reader = LogReader(self.partition_id, segments, slots, self._write_slot)
        self._control = control
        self._settings = settings
        self._engaged = NO_SESSION
        self._failed = False
        self._is_half_cut = False  # there was no room to carry out an intent that is durable
        self.lock_file = segments.lock_file
        self.is_broken = False  # the disk has refused a cut; nothing until it is opened again
        self.gone: MissingSegment | None = None  # its files were deleted or replaced (rule 9)
        self._directory = segments.directory
        self._synced_chain = segments.chain
        self._unmarked_ms = 0  # since when something synced is beyond the marker; 0: nothing is

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        partition_id: PartitionId,
        control: ControlFile,
        settings: LogSettings,
        *,
        is_named: bool = False,
    ) -> Self:
        """Open or create a log, and recover it; durable. See `open_log`.

        Raises:
            BadFormat, ChecksumMismatch, MissingSegment: the files cannot be a log.
            DiskFailed, NoSpace: the disk could not be read or written.
        """
        now_ms, key = settings.now_ms(), settings.cluster_key
        blank = SegmentHeader(now_ms, key, partition_id, TransactionId(0))
        info, trusts = control.info(partition_id), settings.trust_fsync
        opened = log_recovery.open_log(
            disk, directory, blank, info, trust_fsync=trusts, is_named=is_named
        )
        return cls(*opened, control, settings)

    # ---- what it is

    @property
    def slot(self) -> Slot:
        """What is durable beside the log."""
        return self._slots.slot

    @property
    def max_id(self) -> TransactionId:
        """The last id written, synced or not; BEFORE_FIRST when the log is empty."""
        return self._segments.last

    @property
    def promised(self) -> SessionId:
        """The latest session that this replica has promised itself to."""
        return self.slot.promised

    @property
    def last_session(self) -> SessionId:
        """The last session that set a low-water mark."""
        return self.slot.last_session

    @property
    def low_water_mark(self) -> TransactionId:
        """The mark that was set last, confirmed or provisional."""
        provisional = self.slot.provisional
        return self.slot.low_water_mark if provisional is None else provisional.low_water_mark

    @property
    def confirmed_low_water_mark(self) -> TransactionId:
        """The mark below which nothing is ever cut (rule 3)."""
        return self.slot.low_water_mark

    @property
    def suspect(self) -> bool:
        """Can the replica not vouch for its own log?"""
        return self.slot.suspect

    @property
    def damaged(self) -> tuple[IdRange, ...]:
        """Ids whose records cannot be read."""
        return self.slot.damaged

    def is_engaged(self, session: SessionId) -> bool:
        """Has ENGAGE of this session come, and no later promise or failure since?"""
        return session != NO_SESSION and self._engaged == session

    def state(self) -> Prepared:
        """Return what PREPARED tells, as of now."""
        slot = self.slot
        return Prepared(
            slot.last_session,
            self.low_water_mark,
            slot.provisional is None,
            self.synced_max,
            self._synced_chain,
            slot.suspect,
            slot.damaged,
            slot.engaged,
        )

    # ---- sessions

    def prepare(self, session: SessionId, nonce: bytes) -> Prepared:
        """Promise a session durably, sync the log, and tell what is there (rule 2).

        Raises:
            SessionFenced: a later session was promised, or this one to somebody else.
            DiskFailed: promise or log could not be made durable.
        """
        if self.is_broken:
            raise DiskFailed(f"partition {self.partition_id}: failed until it is opened again")
        slot = self.slot
        same = session == slot.promised and nonce == slot.nonce
        if not same and session <= slot.promised:
            raise SessionFenced(
                f"partition {self.partition_id}: expected a session above {slot.promised}, "
                f"found {session}",
                slot.promised,
            )
        if not same:
            self._engaged = NO_SESSION
            self._write_slot(replace(slot, promised=session, nonce=nonce))
        if self._failed:
            self._go_on_in_new_segment()
        self.sync()
        return self.state()

    def set_low_water_mark(self, session: SessionId, mark: TransactionId, chain: Chain) -> None:
        """Store session and mark durably, provisional at first (rule 3); clears `suspect`.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the log does not end, synced, at the mark with this chain.
            DataLoss: the mark is below the confirmed one.
            ReplicaSuspect: the log is suspect and damaged above its confirmed mark.
        """
        self._check_session(session)
        if (self.max_id, self.synced_max, self.chain) != (mark, mark, chain):
            raise BadRequest(
                f"partition {self.partition_id}: expected a log that ends at {mark} with chain "
                f"{chain.hex()}, found {self.max_id}, synced to {self.synced_max}, "
                f"chain {self.chain.hex()}"
            )
        if mark < self.slot.low_water_mark:
            raise DataLoss(
                f"partition {self.partition_id}: expected a mark of at least "
                f"{self.slot.low_water_mark}, found {mark}"
            )
        if self.slot.suspect:
            self._verify_suspect()
        self._sync_index()
        slot = replace(self.slot, acked=Marker(mark, chain), suspect=False)
        self._write_mark(slot, session, mark)

    def _write_mark(self, slot: Slot, session: SessionId, mark: TransactionId) -> None:
        """Write session and provisional mark into a slot, and then where the original has them."""
        info = self._control.info(self.partition_id)
        slot = replace(slot, last_session=session, provisional=Mark(session, mark))
        self._write_slot(replace(slot, original_sequence=info.sequence + 1))
        try:
            self._control.set_marks(self.partition_id, session, mark, self.max_id)
        except (DiskFailed, NoSpace) as error:
            raise self._break(f"control file: {error}") from error

    def engage(self, session: SessionId, mark: TransactionId) -> None:
        """Confirm the mark durably: ZooKeeper has the replica as engaged in this session.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the session has set another mark, or none.
        """
        self._check_session(session)
        if (self.slot.last_session, self.low_water_mark) != (session, mark):
            raise BadRequest(
                f"partition {self.partition_id}: expected mark {self.low_water_mark} of session "
                f"{self.slot.last_session}, found {mark} of {session}"
            )
        self._confirm(session)
        self._engaged = session

    def _confirm(self, session: SessionId) -> None:
        provisional = self.slot.provisional
        if provisional is not None and provisional.session_id == session:
            mark = provisional.low_water_mark
            slot = replace(self.slot, low_water_mark=mark, provisional=None, engaged=session)
            self._write_slot(slot)

    def _check_session(self, session: SessionId) -> None:
        if self._failed:
            raise DiskFailed(f"partition {self.partition_id}: a write failed in this session")
        if session != self.slot.promised:
            raise SessionFenced(
                f"partition {self.partition_id}: expected session {self.slot.promised}, "
                f"found {session}",
                self.slot.promised,
            )

    def _verify_suspect(self) -> None:
        """Read everything above the confirmed mark; damage there keeps the replica suspect."""
        first = TransactionId(self.slot.low_water_mark + 1)
        while first <= self.max_id:
            first = self.verify(first, READ_BYTES)
        above = [one for one in self.slot.damaged if one.last > self.slot.low_water_mark]
        if above:
            raise ReplicaSuspect(f"partition {self.partition_id}: records {above} are damaged")

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
        """Write whole batches behind the last record; `sync` makes them durable.

        `records_crc` is that of all bytes, where the caller has found it by a pass over them.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: the records do not go on where the log ends, or do not fit their batches.
            ChecksumMismatch: a record's CRC does not fit; nothing was written.
            NoSpace: the disk is full; nothing was written.
            DiskFailed: a write failed (rule 6).
        """
        self._check_session(session)
        if first != self.max_id + 1 or chain_before != self.chain:
            raise BadRequest(
                f"partition {self.partition_id}: expected an append at {self.max_id + 1} after "
                f"chain {self.chain.hex()}, found one at {first} after {chain_before.hex()}"
            )
        check_batches(first, lengths, records, chain_before, entries, records_crc)
        self._confirm(session)
        before = (self.max_id, self.chain)
        try:
            self._write_batches(lengths, memoryview(records).cast("B"), entries)
        except NoSpace:
            # What did not fit is taken away again; the session, not the disk, is at its end.
            self._cut_back(*before)
            raise
        except DiskFailed as error:
            self._fail()
            raise DiskFailed(str(error)) from error  # A read that failed here is as bad as a write.
        self.chain = entries[-1].chain
        self.appended_bytes += len(records)

    def sync(self) -> TransactionId:
        """Make all that was appended durable; return the last id (rule 1).

        Raises:
            DiskFailed: the sync failed; everything after the last good one is cut away (rule 6).
        """
        if self._failed:
            raise DiskFailed(f"partition {self.partition_id}: a write failed in this session")
        try:
            self.sync_count += self._segments.sync()
        except (DiskFailed, NoSpace) as error:
            self._fail()
            raise DiskFailed(str(error)) from error
        self.synced_max = self.max_id
        self._synced_chain = self.chain
        if self.slot.acked.transaction_id < self.synced_max:
            now_ms = self._settings.now_ms()
            self._unmarked_ms = self._unmarked_ms or now_ms
            if abs(now_ms - self._unmarked_ms) >= MARKER_INTERVAL_MS:  # a clock may be set back
                self.mark_acked()
        return self.synced_max

    def mark_acked(self) -> None:
        """Move the acked marker to the last synced id, durably (rule 4); not after a failure."""
        self._unmarked_ms = 0
        # The next sync of an index that failed would lie; a cut that is half done has its marker.
        if self.slot.acked.transaction_id < self.synced_max and not self._failed:
            self._sync_index()
            marker = Marker(self.synced_max, self._synced_chain)
            self._write_slot(replace(self.slot, acked=marker))

    def _sync_index(self) -> None:
        try:
            self._segments.sync_index()
        except DiskFailed:
            self._fail()
            raise

    def _write_batches(
        self, lengths: I64, records: memoryview, entries: Sequence[LineageEntry]
    ) -> None:
        """Write records and batches, rolling over wherever a segment has become too large."""
        while lengths.size:
            current = self._segments.current
            room = self._settings.segment_bytes_max - current.size_bytes
            if room < 0:
                entries = self._roll(entries)
                continue
            part, size = lengths, len(records)
            if size > room:
                # The first record that ends beyond the room is the last one here.
                ends = lengths.cumsum()
                part = lengths[: int(ends.searchsorted(room, side="right")) + 1]
                size = int(ends[part.size - 1])
            current.append(part, records[:size])
            lengths, records = lengths[part.size :], records[size:]
        self._segments.current.append_entries(entries, self.synced_max)

    def _roll(self, entries: Sequence[LineageEntry]) -> Sequence[LineageEntry]:
        """Begin a new segment; return the batches that do not end in the old one."""
        last = self._segments.last
        here = [entry for entry in entries if entry.last <= last]
        self._segments.current.append_entries(here, self.synced_max)
        chain = here[-1].chain if here else self._segments.chain
        self.sync_count += self._segments.sync()
        self._segments.sync_index()
        marker = self._marker_at_roll()
        if marker is not None:
            self._write_slot(replace(self.slot, acked=marker))
            self._unmarked_ms = 0
        self._segments.add(self._settings.now_ms(), chain)
        return entries[len(here) :]

    def _marker_at_roll(self) -> Marker | None:
        """Return what the marker may vouch for when all segments are synced; None for nothing."""
        if self.slot.is_unbatched:
            return Marker(self._segments.last, UNBATCHED)
        end = self._segments.lineage_end()
        return None if end is None else Marker(end.last, end.chain)

    # ---- failing (rule 6)

    def _fail(self) -> None:
        """Give up the file: cut what was not synced, or else become suspect."""
        self.failure_count += 1
        self._failed = True
        self._engaged = NO_SESSION
        self._cut_back(self.synced_max, self._synced_chain)

    def _cut_back(self, last: TransactionId, chain: Chain) -> None:
        try:
            if self.slot.acked.transaction_id > last:
                # A roll has moved the marker into what is cut now; none of it was answered.
                self._write_slot(replace(self.slot, acked=Marker(last, chain)))
            self._segments.cut(last, None)
        except WaltzError as error:  # A rotten index is no less in the way than a failing disk.
            failure = self._break(f"what was written after {last} cannot be cut away")
            self._write_slot(replace(self.slot, suspect=True))
            raise failure from error
        self.chain = chain

    def _go_on_in_new_segment(self) -> None:
        self._segments.renew(self._settings.now_ms(), self.chain, self.slot.acked.transaction_id)
        self._failed = False

    # ---- cutting

    def truncate(
        self,
        session: SessionId,
        last_to_keep: TransactionId,
        base: TransactionId,
        base_chain: Chain,
    ) -> tuple[TransactionId, Chain]:
        """Cut everything after an id, durably; return the last id and the chain there (rule 7).

        Raises:
            NoSpace: call it once more when there is room; nothing else is done meanwhile.
            SessionFenced: the session is not the promised one.
            DataLoss: the id is below the confirmed low-water mark.
            BadRequest: `base` is no batch end here with this chain, or is above `last_to_keep`.
        """
        intent = self.slot.truncate if self._is_half_cut else None
        if intent is not None and (session, last_to_keep) == (self.promised, intent.last_to_keep):
            self._truncate(last_to_keep)
            return self.max_id, self.chain
        self._check_session(session)
        if last_to_keep < self.slot.low_water_mark:
            raise DataLoss(
                f"partition {self.partition_id}: expected to keep at least "
                f"{self.slot.low_water_mark}, found {last_to_keep}"
            )
        found = self.chain_at(base) if base <= last_to_keep else None
        if found != base_chain:
            raise BadRequest(
                f"partition {self.partition_id}: expected chain {base_chain.hex()} at {base}, "
                f"found {found.hex() if found is not None else 'no batch end there'}"
            )
        self.sync()
        if last_to_keep < self.max_id:
            self._truncate(last_to_keep)
        return self.max_id, self.chain

    def chain_at(self, transaction_id: TransactionId) -> Chain | None:
        """Return the chain at a batch's end, or None where no batch ends."""
        return self._segments.chain_at(transaction_id)

    def _truncate(self, last_to_keep: TransactionId) -> None:
        was_half_cut = self._is_half_cut
        if not was_half_cut:
            intended = truncation.intended(self.slot, self._segments, last_to_keep)
            self._write_slot(intended, may_be_full=True)
        intent = self.slot.truncate
        assert intent is not None
        self._failed = self.is_broken = True  # until it is carried out
        try:
            truncation.carry_out(self._segments, intent)
            self._slots.write(truncation.finished(self.slot, self._segments))
        except WaltzError as error:
            # The intent is durable, and stays: the next open carries it out before anything else.
            self._is_half_cut = isinstance(error, NoSpace) and not was_half_cut
            if self._is_half_cut:
                raise
            raise DiskFailed(f"partition {self.partition_id}: truncating: {error}") from error
        self._is_half_cut = self._failed = self.is_broken = False
        self.sync_count += 1
        self.synced_max = self.max_id
        self.chain = self._synced_chain = self._segments.chain

    # ---- reading

    def read_range(
        self, first: TransactionId, last: TransactionId, bytes_max: int, *, whole_batches: bool
    ) -> RangeRead:
        """Return records of first..last that fit into `bytes_max`, one (batch) at least.

        With `whole_batches`, `first` begins a batch and the answer ends with one. The answer stops
        before a damaged record.

        Raises:
            BadRequest: there is no such record, or no batch begins there.
            ChecksumMismatch: the record at `first` (or its batch) is damaged.
        """
        self.read_count += 1
        return self.reader.read_range(first, last, bytes_max, whole_batches=whole_batches)

    def read_headers(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> HeadersRead:
        """Return the 28-byte headers of first..last that fit into `bytes_max`, one at least.

        Raises:
            BadRequest, ChecksumMismatch: as `read_range`.
        """
        self.read_count += 1
        return self.reader.read_headers(first, last, bytes_max)

    def lineage(
        self, first: TransactionId, last: TransactionId
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that touch first..last and the chain before them, newest if many.

        Raises:
            BadFormat, ChecksumMismatch: an entry is wrong.
        """
        return self.reader.lineage(first, last)

    # ---- damage

    def repair(self, first: TransactionId, lengths: I64, records: Buffer) -> None:
        """Fill damaged records with good ones, durably; raises what `damage.fill` does."""
        if self._failed:  # Its marker may not be moved.
            raise BadRequest(f"partition {self.partition_id}: a write failed in this session")
        # Blocks may be given up (file_system.py, rule 8): what else was in them was synced, and is
        # missed.
        self.mark_acked()
        left = damage.fill(self.slot, self._segments, first, lengths, records)
        self._write_slot(replace(self.slot, damaged=left))

    def verify(self, first: TransactionId, bytes_max: int) -> TransactionId:
        """Note damage from an id on; return the next id. Raises for batches beyond reading."""
        return self.reader.verify(first, bytes_max)

    # ---- the end

    def close(self) -> None:
        """Sync, move the marker to the end, clear the dirty bit, all durably; close the files."""
        try:
            if not self._failed:
                self.sync()
                self._segments.sync_index()
                marker = Marker(self.synced_max, self._synced_chain)
                self._write_slot(replace(self.slot, acked=marker, dirty=False))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files and nothing else: the next open finds what a crash would leave."""
        self._segments.close()
        self._slots.close()

    def check_place(self) -> None:
        """Look whether directory and slots are still those that were opened (rule 9).

        Raises:
            MissingSegment: they are not; the log answers nothing any more.
            DiskFailed: the disk does not say.
        """
        if self.gone is None and not self._slots.is_in_place():
            self._failed = self.is_broken = True
            self.gone = MissingSegment(
                f"{self._directory}: expected the directory and the {SLOTS_NAME} that this "
                "process has opened, found them deleted or replaced"
            )
        if self.gone is not None:
            raise self.gone

    def _write_slot(self, slot: Slot, *, may_be_full: bool = False) -> None:
        self.check_place()
        try:
            self._slots.write(slot)
            self.sync_count += 1
        except (DiskFailed, NoSpace) as error:
            if may_be_full and isinstance(error, NoSpace):
                raise  # Nothing was written.
            raise self._break(f"control slots: {error}") from error

    def _break(self, reason: str) -> DiskFailed:
        """Answer nothing more until the log is opened again."""
        self._failed = self.is_broken = True
        return DiskFailed(f"partition {self.partition_id}: {reason}")
