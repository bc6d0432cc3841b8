"""Covered records: records that stay on the disk after the end that the log reports.

Waltz 0.13 writes records without batches. When this version opens such a log, it adopts the
records: it creates batches from their IDs (`log_recovery.py`, rule 4). If replicas were not in sync
when 0.13 stopped, they may have the same records in different batches. An owner then finds
different chain hashes. The owner truncates the log of one replica to the last batch end that both
replicas have, and copies the records after this end.

If this truncation removed the records, a trusted replica would end below the records that it has
acknowledged. Until the records are copied, a second owner might use the shorter log to determine
the end of the log.

So the records stay on the disk, and the log reports the end that the truncation requested. The
records after this end are *covered*. Appended records are compared with the covered records. While
they are equal, only batches are written.

Rules (decision 043):
    1. A truncation covers records in two cases:
       - The newest batch was adopted. Then the confirmed mark does not limit the truncation,
         because 0.13 has set this mark for records, not for batches. So in the message PREPARED,
         the field `mark_confirmed` is False.
       - A 0.13 server has set the last mark, through an earlier version of this storage
         (`log_recovery.py`, rule 4). Then another replica may have the same records in adopted
         batches.
    2. Before a batch is dropped, the log durably states that it has records without batches
       (`UNBATCHED_CHAIN` in the acked marker). The next opening, or the next session's PREPARE,
       creates batches for these records. After that, no record is covered any more.
    3. Covered records are truncated when other records replace them, or when the decided low-water
       mark is below them, but never below the confirmed mark.
    4. When every remaining record has its batch, the log is an ordinary log again. This state is
       made durable.
    5. If a log ends below the mark of its last session, PREPARED reports no session. The reason:
       0.13 sets the mark before it has completed the log, so the end of such a log proves nothing.
    6. Damaged records are treated like other records: they stay, and are repaired later.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, ChecksumMismatch, DataLoss, DiskFailed, WaltzError
from waltz_core.records import raw_records
from waltz_core.records.record import NO_SESSION, LineageEntry, TransactionId
from waltz_core.storage.files.control_file import SlotFile
from waltz_core.storage.files.format import UNBATCHED_CHAIN, AckedMarker
from waltz_core.storage.files.segments import Segments
from waltz_core.storage.log import rebatching, truncation
from waltz_core.storage.log.log_files import LogFiles

I64 = npt.NDArray[np.int64]


class CoveredRecords:
    """Covers and uncovers records of one log; `LogFiles.covered_end` is the reported end.

    `reopen` opens the log's files again, as when the process starts. This opening creates batches.
    """

    def __init__(self, files: LogFiles, reopen: Callable[[], tuple[Segments, SlotFile]]) -> None:
        self._files = files
        self._reopen = reopen

    def ends_with_adopted_batch(self) -> bool:
        """Return whether the newest batch was created from records of Waltz 0.13 (rule 1)."""
        with suppress(BadFormat, ChecksumMismatch):
            end = self._files.segments.lineage_end()
            return end is not None and end.session_id == NO_SESSION
        return False

    def must_cover_records(self) -> bool:
        """Return whether a truncation must cover records instead of removing them (rule 1)."""
        provisional = self._files.slot.provisional
        is_mark_0_13 = provisional is not None and provisional.session_id == NO_SESSION
        return self.ends_with_adopted_batch() or is_mark_0_13

    def make_batches(self) -> None:
        """Create batches for records without a batch: open the files again, in place (rule 2)."""
        files = self._files
        files.stop_covering()
        if files.has_failed:
            files.continue_in_new_segment()
        files.sync()
        files.check_files()
        files.abandon()
        files.has_failed = files.is_broken = True  # until the files are open
        try:
            files.replace_files(*self._reopen())
        except WaltzError as error:
            raise DiskFailed(
                f"partition {files.partition_id}: cannot write batches for records of Waltz "
                f"0.13: {error}"
            ) from error

    def cover(self, last: TransactionId) -> None:
        """Report `last` as the log's end, cover the records after it, and drop later batches."""
        files = self._files
        shortened, end = truncation.plan_truncation(files.segments, last)
        files.sync()
        files.sync_index()
        files.write_slot(replace(files.slot, acked=AckedMarker(files.synced_max, UNBATCHED_CHAIN)))
        files.covered_end = files.synced_max = last
        files.chain = files.synced_chain = end.chain if shortened is None else shortened.chain
        with files.fail_on_disk_error():
            rebatching.drop_batches(files.segments, end.transaction_id)
            rebatching.add_batches(files.segments, [] if shortened is None else [shortened])

    def uncover(self, lengths: I64, records: memoryview, entries: Sequence[LineageEntry]) -> bool:
        """Append batches whose records equal the covered records; return False if they differ.

        Only the batches, and the records after the covered records, are written. Raises DiskFailed
        if a write failed.
        """
        files = self._files
        first = TransactionId(files.last_id + 1)
        covered_count = min(int(lengths.size), files.segments.last_id - first + 1)
        size = int(lengths[:covered_count].sum())
        covered_records, covered_lengths = files.segments.read(
            first, TransactionId(first + covered_count - 1)
        )
        if not np.array_equal(covered_lengths, lengths[:covered_count]):
            return False
        if covered_records != records[:size] and not self._differ_in_damage(
            first, covered_lengths, covered_records, records
        ):
            return False
        with files.fail_on_disk_error():
            if covered_count < lengths.size:
                files.write_batches(lengths[covered_count:], records[size:], ())
                files.segments.sync()  # before the entries refer to these records
            rebatching.add_batches(files.segments, entries)
        files.covered_end, files.chain = entries[-1].last, entries[-1].chain
        if files.covered_end == files.segments.last_id:
            self.complete_batches()
        return True

    def _differ_in_damage(
        self, first: TransactionId, lengths: I64, covered_records: bytes, records: memoryview
    ) -> bool:
        """Return whether the log differs from these records only in known damage (rule 6)."""
        offsets = raw_records.offsets_of(lengths)
        compared_size = 0
        for ids in self._files.slot.damaged:
            low = max(0, ids.first - first)
            high = min(int(lengths.size), ids.last - first + 1)
            if low < high:
                if (
                    covered_records[compared_size : offsets[low]]
                    != records[compared_size : offsets[low]]
                ):
                    return False
                compared_size = int(offsets[high])
        return covered_records[compared_size:] == records[compared_size : len(covered_records)]

    def truncate_covered(self) -> None:
        """Truncate the covered records (rule 3).

        Raises DataLoss if they are below the confirmed mark.
        """
        files = self._files
        assert files.covered_end is not None
        end, chain, low_water_mark = files.covered_end, files.chain, files.slot.low_water_mark
        if end < min(low_water_mark, files.segments.last_id):
            raise DataLoss(
                f"partition {files.partition_id}: the records after {end} differ from those "
                "of the decided log, although they are below the low-water mark "
                f"{low_water_mark}"
            )
        files.sync()
        files.covered_end = None
        if end < files.segments.last_id:
            files.truncate(end)
        files.chain = chain
        self.complete_batches()

    def complete_batches(self) -> None:
        """Sync the batches, and state durably that all records have their batches (rule 4)."""
        files = self._files
        with files.fail_on_disk_error():  # still covering, so that no synced record is truncated
            rebatching.rewrite_chain_headers(files.segments)
            files.sync_count += files.segments.sync()
            files.segments.sync_index()
        files.covered_end = None
        files.synced_max, files.synced_chain = files.segments.last_id, files.chain
        files.write_slot(replace(files.slot, acked=AckedMarker(files.synced_max, files.chain)))
