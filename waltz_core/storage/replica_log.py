"""A partition's log as servers of both kinds write it: our owners by S 1, originals by S 0.

Why it stands alone: an original trusts a storage with less than our owner does, and tells it less.
What of our rules holds all the same is decided here; `partition_log.py` is what both stand on.

Rules (interop.md 3.1, correctness.md "Room for our rules"; decision 021 says why):
    1. A session of an original is promised durably before anything is done in it, with no nonce:
       an original has none. Our owners' sessions are above it, or it is above theirs.
    2. What an original appends has no batches (`unbatched.py`). The first PREPARE of S 1 has the
       log opened once more, in place: then its records get theirs.
    3. An original sets its mark before it has filled the log up. Such a mark is kept and told, but
       it is confirmed only by an append behind it, in its session: only then has that been opened.
    4. Nothing below a confirmed mark is cut, whoever asks.
    5. A replica that is suspect takes part in nothing of S 0 but reads. An original would take its
       silence for "I have nothing", and cut what it has; one that refuses counts as away, and one
       that is away may have had anything.
    6. A log that does not reach the mark of its last session tells no session in PREPARED: it is
       unknown, not short.
    7. A provisional mark of an original has no session any more once an owner of ours has come
       after it: that is how a cut knows of it (`covered_log.py`, rule 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self

import numpy as np

from waltz_core.checksum import crc32
from waltz_core.errors import (
    BadRequest,
    DataLoss,
    DiskFailed,
    NoSpace,
    ReplicaSuspect,
    SessionFenced,
    TooLarge,
    WaltzError,
)
from waltz_core.record import (
    NO_SESSION,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    TRANSACTION_BYTES_MAX,
    PartitionId,
    Record,
    SessionId,
    TransactionId,
)
from waltz_core.storage import recovery
from waltz_core.storage.control_file import ControlFile, SlotFile
from waltz_core.storage.covered_log import CoveredLog
from waltz_core.storage.disk import Disk
from waltz_core.storage.format import NO_NONCE, Marker, SegmentHeader
from waltz_core.storage.partition_log import LogSettings, PartitionLog, Prepared
from waltz_core.storage.reading import LogReader
from waltz_core.storage.segments import Segments
from waltz_core.storage.unbatched import UNBATCHED, is_unbatched

# The original syncs its index whenever so many more records are there, and trusts it so far.
INDEX_SYNC_IDS: Final = 1000


class ReplicaLog(CoveredLog):
    """One partition on disk; all calls block, one at a time."""

    _open_again: Callable[[], tuple[Segments, SlotFile]]

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
        """Open or create a log; see `PartitionLog.open`."""
        log = super().open(disk, directory, partition_id, control, settings, is_named=is_named)
        log._open_again = partial(_open_again, disk, directory, log, settings, control)
        return log

    # ---- sessions

    def prepare(self, session: SessionId, nonce: bytes) -> Prepared:
        """Promise a session of S 1, and tell what is there; see `PartitionLog.prepare`.

        Records of an original get their batches first (rule 2).
        """
        if session > self.promised and is_unbatched(self.slot) and not self.is_broken:
            self._count_all()
            if self._failed:
                self._go_on_in_new_segment()
            self._make_batches()
        provisional = self.slot.provisional
        is_an_originals = self.slot.nonce == NO_NONCE and session > self.promised
        if provisional is not None and is_an_originals and not self.is_broken:
            # Nothing confirms it any more; whose it is has to be known for longer (rule 7).
            mark = provisional._replace(session_id=NO_SESSION)
            self._write_slot(replace(self.slot, provisional=mark))
        return super().prepare(session, nonce)

    def state(self) -> Prepared:
        """Return what PREPARED tells, as of now (rule 6)."""
        state = super().state()
        is_short = state.synced_max < state.low_water_mark
        if is_short:
            return state._replace(last_session=NO_SESSION, engaged_session=NO_SESSION)
        return state

    def promise(self, session: SessionId) -> None:
        """Promise a session of an original durably, if that is new, and sync the log (rule 1).

        Raises:
            SessionFenced: a later session was promised, or this one to an owner of ours.
            DiskFailed: promise or log could not be made durable.
        """
        if self.is_broken and not self._is_half_cut:
            raise DiskFailed(f"partition {self.partition_id}: failed until it is opened again")
        slot = self.slot
        if session > slot.promised:
            self._count_all()
            self._engaged = NO_SESSION
            self._write_slot(replace(slot, promised=session, nonce=NO_NONCE))
            if self._failed:
                self._go_on_in_new_segment()
            self.sync()
        elif session < slot.promised or slot.nonce != NO_NONCE:
            raise SessionFenced(
                f"partition {self.partition_id}: expected a session above {slot.promised}, "
                f"found {session}",
                slot.promised,
            )

    def _make_batches(self) -> None:
        """Open the files once more, in place: an opening gives records their batches."""
        self.sync()
        self.check_place()
        self.abandon()
        self._failed = self.is_broken = True  # until they are open
        try:
            segments, slots = self._open_again()
        except WaltzError as error:
            raise DiskFailed(f"partition {self.partition_id}: making batches: {error}") from error
        self._segments, self._slots = segments, slots
        self.reader = LogReader(self.partition_id, segments, slots, self._write_slot)
        self.lock_file = segments.lock_file
        self.synced_max = segments.last
        self.chain = self._synced_chain = segments.chain
        self._failed = self.is_broken = False

    # ---- what an original changes

    def append_records(self, session: SessionId, records: Sequence[Record]) -> int:
        """Write records behind the last one; `sync_records` makes them durable; their bytes.

        Raises:
            SessionFenced: the session is not the promised one.
            BadRequest: they do not go on where the log ends, one after the other.
            TooLarge: one is larger than a transaction may be here.
            ReplicaSuspect: rule 5.
            NoSpace: the disk is full; nothing was written.
            DiskFailed: a write failed.
        """
        self._check_original(session)
        ids = [record.transaction_id for record in records]
        if ids != list(range(self.max_id + 1, self.max_id + 1 + len(ids))):
            raise BadRequest("transaction out of order")
        if not records:
            return 0
        largest = max(len(record.data) for record in records)
        if largest > TRANSACTION_BYTES_MAX:
            raise TooLarge(f"expected {TRANSACTION_BYTES_MAX} bytes of data at most, got {largest}")
        self._leave_batches()
        provisional = self.slot.provisional
        if provisional is not None and ids[0] > provisional.low_water_mark:
            # Perhaps ZooKeeper has not heard of it yet.
            self._confirm(session, engaged=self.slot.engaged)
        before = (self.max_id, self.chain)
        encoded = b"".join(map(encoded_record, records))
        lengths = np.array(
            [len(record.data) + RECORD_OVERHEAD_BYTES for record in records], dtype=np.int64
        )
        try:
            self._write_batches(lengths, memoryview(encoded), ())
        except NoSpace:
            self._cut_back(*before)
            raise
        except DiskFailed as error:
            self._fail()
            raise DiskFailed(str(error)) from error  # A read that failed here is as bad as a write.
        self.appended_bytes += len(encoded)
        return len(encoded)

    def sync_records(self) -> TransactionId:
        """Make what was appended durable, and the index as often as an original does."""
        before = self.synced_max
        last = self.sync()
        if (last + 1) // INDEX_SYNC_IDS > (before + 1) // INDEX_SYNC_IDS:
            self._sync_index()
        return last

    def cut_to(self, session: SessionId, last_to_keep: TransactionId) -> TransactionId:
        """Cut everything after an id, durably; return the last id.

        Raises:
            SessionFenced, ReplicaSuspect, NoSpace: as `append_records`, and as `truncate`.
            DataLoss: the id is below the confirmed low-water mark (rule 4).
        """
        intent = self.slot.truncate if self._is_half_cut else None
        if intent is not None and (session, last_to_keep) == (self.promised, intent.last_to_keep):
            self._truncate(last_to_keep)
            return self.max_id
        self._check_original(session)
        if last_to_keep < min(self.max_id, self.slot.low_water_mark):
            raise DataLoss(
                f"partition={self.partition_id} transactionId={last_to_keep} is below the "
                f"low-water mark {self.slot.low_water_mark}, nothing is cut there"
            )
        self.sync()
        if last_to_keep < self.max_id:
            self._truncate(last_to_keep)
        return self.max_id

    def set_original_mark(self, session: SessionId, mark: TransactionId) -> None:
        """Store session and mark durably, where the control file has them too (rule 3).

        Raises:
            SessionFenced, ReplicaSuspect: as `append_records`.
            BadRequest: the log goes on behind the mark, or the mark goes back.
        """
        self._check_original(session)
        if self.max_id > mark:
            raise BadRequest("low-water mark is lower than the max transaction id")
        if mark < self.slot.low_water_mark:
            raise BadRequest(
                f"low-water mark {mark} is lower than the current one {self.slot.low_water_mark}"
            )
        if self._is_an_originals():
            self._leave_batches()  # A bound of theirs is at the newest mark, on all replicas.
        self.sync()
        self._sync_index()
        acked = Marker(self.synced_max, self._synced_chain)
        self._write_mark(replace(self.slot, acked=acked), session, mark)

    def last_session_info(self) -> tuple[SessionId, TransactionId, TransactionId]:
        """Return the last session, its mark, and where the log ended when that was set.

        Raises:
            ReplicaSuspect: rule 5.
        """
        self.check_vouches()
        local = self._control.info(self.partition_id).local_low_water_mark
        return self.last_session, self.low_water_mark, local

    def check_vouches(self) -> None:
        """Raise ReplicaSuspect where the replica does not vouch for its log (rule 5)."""
        if self.suspect:
            raise ReplicaSuspect(
                f"partition={self.partition_id} cannot vouch for its log: it counts as away until "
                "a server that speaks S 1 has repaired it"
            )

    def _check_original(self, session: SessionId) -> None:
        self._check_session(session)
        self.check_vouches()

    def _truncate(self, last_to_keep: TransactionId) -> None:
        super()._truncate(last_to_keep)
        if is_unbatched(self.slot):
            self.chain = self._synced_chain = UNBATCHED

    def _leave_batches(self) -> None:
        """Say durably that records without batches follow (`unbatched.py`, rule 1)."""
        if not is_unbatched(self.slot):
            self.sync()
            self._sync_index()
            self._write_slot(replace(self.slot, acked=Marker(self.synced_max, UNBATCHED)))
            self.chain = self._synced_chain = UNBATCHED


def _open_again(
    disk: Disk, directory: Path, log: PartitionLog, settings: LogSettings, control: ControlFile
) -> tuple[Segments, SlotFile]:
    key, partition_id = settings.cluster_key, log.partition_id
    blank = SegmentHeader(settings.now_ms(), key, partition_id, TransactionId(0))
    # Nothing was lost in between, whatever the file system is trusted with.
    info = control.info(partition_id)
    return recovery.open_log(disk, directory, blank, info, trust_fsync=True, is_named=True)


def encoded_record(record: Record) -> bytes:
    """Return a record as it lies in a segment."""
    body = (
        RECORD_PREFIX.pack(
            record.transaction_id,
            record.req_id.to_bytes(),
            record.header,
            len(record.data),
            crc32(record.data),
        )
        + record.data
    )
    return body + crc32(body).to_bytes(4, "big")
