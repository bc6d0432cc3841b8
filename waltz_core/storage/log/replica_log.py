"""A partition's log, parts of which a Waltz 0.13 process may have written.

0.13 writes records without batches. An opening adopts them: it makes batches from their ids
(`log_recovery.py`, rule 4). Replicas that were not level when 0.13 stopped can hold the same
records in different batches. An owner then sees different chains, and cuts to where they agree, to
copy from there. If the records were cut, a trusted replica would end below what it has
acknowledged, and a second owner might decide by it before they are copied.

So the records stay, and are covered: the log reports that it ends where it was cut to. Appended
records are compared with those on the disk. As long as they are equal, only batches are written.

Rules (decision 043):
    1. A cut covers records if the newest batch was adopted. The confirmed mark does not bind an
       owner then: 0.13 set it for records, not for batches (`mark_confirmed` of PREPARED). A cut
       also covers where a 0.13 server set the last mark through an earlier version of this storage
       (`log_recovery.py`, rule 4): another replica may have the same records in adopted batches.
    2. Before a batch is dropped it is durable that there are records without batches (`UNBATCHED`
       in the acked marker). The next opening, or the next session's PREPARE, makes batches for
       them, and nothing is covered any more.
    3. Records are cut when others take their place, or when the decided mark is below them. Never
       below the confirmed mark.
    4. When every remaining record has its batch, the log is like any other, and that is durable.
    5. A log that does not reach the mark of its last session reports no session in PREPARED: 0.13
       sets its mark before it has filled the log up, so the log is unknown, not short.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from waltz_core.errors import (
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    DataLoss,
    DiskFailed,
    NoSpace,
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
    ControlFile,
    SlotFile,
)
from waltz_core.storage.files.format import (
    UNBATCHED,
    Marker,
    SegmentHeader,
)
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import (
    log_recovery,
    rebatching,
    truncation,
)
from waltz_core.storage.log.partition_log import (
    LogSettings,
    PartitionLog,
    Prepared,
)
from waltz_core.storage.log.reading import LogReader

I64 = npt.NDArray[np.int64]
Buffer = bytes | memoryview


class ReplicaLog(PartitionLog):
    """One partition on disk; all calls block, one at a time."""

    _open_again: Callable[[], tuple[Segments, SlotFile]]
    _covered_end: TransactionId | None = None  # where the log reports its end, while it covers

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

    @property
    def max_id(self) -> TransactionId:
        """The last id that counts; BEFORE_FIRST when there is none."""
        return self._segments.last if self._covered_end is None else self._covered_end

    def state(self) -> Prepared:
        """Return what PREPARED reports, as of now (rules 1 and 5)."""
        state = super().state()
        if state.synced_max < state.low_water_mark:
            state = state._replace(last_session=NO_SESSION, engaged_session=NO_SESSION)
        return state._replace(mark_confirmed=state.mark_confirmed and not self._ends_adopted())

    def _ends_adopted(self) -> bool:
        with suppress(BadFormat, ChecksumMismatch):
            end = self._segments.lineage_end()
            return end is not None and end.session_id == NO_SESSION
        return False

    # ---- batches for records that have none

    def prepare(self, session: SessionId, nonce: bytes) -> Prepared:
        """Promise a session and report the log's state; see `PartitionLog.prepare`.

        Records that an earlier session left without batches get them first (rule 2).
        """
        if session > self.promised and self.slot.is_unbatched and not self.is_broken:
            self._count_all()
            if self._failed:
                self._go_on_in_new_segment()
            self._make_batches()
        return super().prepare(session, nonce)

    def _make_batches(self) -> None:
        """Open the files again, in place: an opening makes batches."""
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

    # ---- covering

    def truncate(
        self,
        session: SessionId,
        last_to_keep: TransactionId,
        base: TransactionId,
        base_chain: Chain,
    ) -> tuple[TransactionId, Chain]:
        """Cut everything after an id, or cover it (rule 1); see `PartitionLog.truncate`."""
        if self._covered_end is not None and last_to_keep < self._covered_end:
            raise BadRequest(f"partition {self.partition_id}: expected one cut in a session")
        provisional = self.slot.provisional
        is_mark_0_13 = provisional is not None and provisional.session_id == NO_SESSION
        covers = self._ends_adopted() or is_mark_0_13
        if self._is_half_cut or last_to_keep >= self.max_id or not covers:
            return super().truncate(session, last_to_keep, base, base_chain)
        self._check_session(session)
        if base > last_to_keep or self.chain_at(base) != base_chain:
            raise BadRequest(
                f"partition {self.partition_id}: expected a batch that ends at {base} with chain "
                f"{base_chain.hex()}"
            )
        self._cover(last_to_keep)
        return self.max_id, self.chain

    def _truncate(self, last_to_keep: TransactionId) -> None:
        super()._truncate(last_to_keep)
        if self.slot.is_unbatched:
            self.chain = self._synced_chain = UNBATCHED

    def _cover(self, last: TransactionId) -> None:
        cut, end = truncation.cut_of(self._segments, last)
        self.sync()
        self._sync_index()
        self._write_slot(replace(self.slot, acked=Marker(self.synced_max, UNBATCHED)))
        self._covered_end = self.synced_max = last
        self.chain = self._synced_chain = end.chain if cut is None else cut.chain
        with self._failing():
            rebatching.drop_batches(self._segments, end.transaction_id)
            rebatching.add_batches(self._segments, [] if cut is None else [cut])

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Give the file up for what the disk does not do (`partition_log.py`, rule 6)."""
        try:
            yield
        except (DiskFailed, NoSpace) as error:
            self._fail()
            raise DiskFailed(str(error)) from error

    def append(  # noqa: PLR0913 - as that of the log below
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
        """Write whole batches behind the last record that counts; see `PartitionLog.append`."""
        if self._covered_end is not None:
            self._check_session(session)
            if first == self.max_id + 1 and chain_before == self.chain:
                check_batches(first, lengths, records, chain_before, entries, records_crc)
                if self._uncover(lengths, memoryview(records).cast("B"), entries):
                    return
                self._cut_rest()
        super().append(
            session, first, lengths, records, chain_before, entries, records_crc=records_crc
        )

    def _uncover(self, lengths: I64, records: memoryview, entries: Sequence[LineageEntry]) -> bool:
        """Let batches count again whose records are here; tell whether they are."""
        first = TransactionId(self.max_id + 1)
        here = min(int(lengths.size), self._segments.last - first + 1)
        size = int(lengths[:here].sum())
        found, found_lengths = self._segments.read(first, TransactionId(first + here - 1))
        if not np.array_equal(found_lengths, lengths[:here]) or found != records[:size]:
            return False
        with self._failing():
            if here < lengths.size:
                self._write_batches(lengths[here:], records[size:], ())
                self._segments.sync()  # before the entries name them
            rebatching.add_batches(self._segments, entries)
        self._covered_end, self.chain = entries[-1].last, entries[-1].chain
        if self._covered_end == self._segments.last:
            self._settle()
        return True

    def _cut_rest(self) -> None:
        """Cut what is still covered in earnest (rule 3)."""
        assert self._covered_end is not None
        end, chain = self._covered_end, self.chain
        if end < min(self.slot.low_water_mark, self._segments.last):
            raise DataLoss(
                f"partition {self.partition_id}: the records behind {end} are not the decided "
                f"ones, and are below the low-water mark {self.slot.low_water_mark}"
            )
        self.sync()
        self._covered_end = None
        if end < self._segments.last:
            self._truncate(end)
        self.chain = chain
        self._settle()

    def _settle(self) -> None:
        """All records have their batches: say so durably (rule 4)."""
        with self._failing():  # covering still, so that nothing is cut that was synced
            rebatching.relink(self._segments)
            self.sync_count += self._segments.sync()
            self._segments.sync_index()
        self._covered_end = None
        self.synced_max, self._synced_chain = self._segments.last, self.chain
        self._write_slot(replace(self.slot, acked=Marker(self.synced_max, self.chain)))

    def set_low_water_mark(self, session: SessionId, mark: TransactionId, chain: Chain) -> None:
        """Store session and mark durably; see `PartitionLog.set_low_water_mark`.

        Raises:
            NoSpace: there is no room to cut what was covered; call it again when there is.
        """
        intent = self.slot.truncate if self._is_half_cut else None
        if intent is not None and (session, mark) == (self.promised, intent.last_to_keep):
            self._truncate(mark)
            self.chain = self._segments.chain
            self._settle()
        if self._covered_end is not None:
            self._check_session(session)
            if (self.max_id, self.chain) == (mark, chain):
                self._cut_rest()
        super().set_low_water_mark(session, mark, chain)

    def mark_acked(self) -> None:
        """Move the acked marker; see `PartitionLog.mark_acked`."""
        if self._covered_end is None:
            super().mark_acked()

    def _count_all(self) -> None:
        """Cover nothing any more: the records are there, and have no batches."""
        if self._covered_end is not None:
            self._covered_end = None
            self.synced_max = self._segments.last
            self.chain = self._synced_chain = UNBATCHED

    def _cut_back(self, last: TransactionId, chain: Chain) -> None:
        if self._covered_end is not None:
            self._count_all()
            last, chain = min(self.slot.acked.transaction_id, self.synced_max), UNBATCHED
            self.synced_max = last
        super()._cut_back(last, chain)

    def close(self) -> None:
        """Close the log; see `PartitionLog.close`."""
        self._count_all()
        super().close()


def _open_again(
    disk: Disk, directory: Path, log: PartitionLog, settings: LogSettings, control: ControlFile
) -> tuple[Segments, SlotFile]:
    key, partition_id = settings.cluster_key, log.partition_id
    blank = SegmentHeader(settings.now_ms(), key, partition_id, TransactionId(0))
    # Nothing was lost in between, so the file system need not be trusted with `fsync`.
    info = control.info(partition_id)
    return log_recovery.open_log(disk, directory, blank, info, trust_fsync=True, is_named=True)
