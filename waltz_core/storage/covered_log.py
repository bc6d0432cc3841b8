"""A log in which a session of S 1 gives the records of an original other batches than they have.

Why it stands alone: it is the only place where a cut takes nothing away. Replicas that were not
level when an original's server began, or one that it has filled up from afar, hold the same records
in other batches. An owner sees other chains, and cuts to where they agree, to copy from there. Were
the records cut, a replica that is believed would end below what it has acknowledged, and a second
owner might decide by it before they are copied.

So they stay, and are covered: the log says that it ends where it was cut to. What is appended is
compared with what lies there. As far as it is the same, only the batches are written.

Rules (decision 021):
    1. A cut covers where the newest batch is an original's. The confirmed mark is none to an owner
       then: it speaks of records, and not of batches (`mark_confirmed` of PREPARED). So it does
       where an original has set the last mark, and appended nothing: this replica has its batches
       still, but another one may have got the same records, and other batches, from the original.
    2. Before a batch is taken away it is durable that there are records without: an opening gives
       them batches again, and nothing is covered any more.
    3. Records are cut in earnest when others take their place, or when the decided mark is below
       them. Never below the confirmed mark.
    4. When all that is left has its batches, the log is as any other, and then that is durable.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, DataLoss, DiskFailed, NoSpace
from waltz_core.record import NO_SESSION, Chain, LineageEntry, SessionId, TransactionId
from waltz_core.storage import rebatching, truncation
from waltz_core.storage.batch_checks import check_batches
from waltz_core.storage.format import Marker
from waltz_core.storage.partition_log import PartitionLog, Prepared
from waltz_core.storage.unbatched import UNBATCHED

I64 = npt.NDArray[np.int64]
Buffer = bytes | memoryview


class CoveredLog(PartitionLog):
    """One partition on disk; all calls block, one at a time."""

    _covered_end: TransactionId | None = None  # where the log says that it ends, while it covers

    @property
    def max_id(self) -> TransactionId:
        """The last id that counts; BEFORE_FIRST when there is none."""
        return self._segments.last if self._covered_end is None else self._covered_end

    def state(self) -> Prepared:
        """Return what PREPARED tells, as of now (rule 1)."""
        state = super().state()
        return state._replace(mark_confirmed=state.mark_confirmed and not self._is_an_originals())

    def _is_an_originals(self) -> bool:
        with suppress(BadFormat, ChecksumMismatch):
            end = self._segments.lineage_end()
            return end is not None and end.session_id == NO_SESSION
        return False

    def _has_an_originals_mark(self) -> bool:
        provisional = self.slot.provisional
        return provisional is not None and provisional.session_id == NO_SESSION

    def truncate(
        self,
        session: SessionId,
        last_to_keep: TransactionId,
        base: TransactionId,
        base_chain: Chain,
    ) -> tuple[TransactionId, Chain]:
        """Cut everything after an id, or cover it; see `PartitionLog.truncate`."""
        if self._covered_end is not None and last_to_keep < self._covered_end:
            raise BadRequest(f"partition {self.partition_id}: expected one cut in a session")
        covers = self._is_an_originals() or self._has_an_originals_mark()
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
            NoSpace: for cutting what was covered: call it once more when there is room.
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
