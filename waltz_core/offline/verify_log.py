"""Verifies one partition: its segments in order, and its batches across segments.

It compares the files of a log with each other and with the control slot. It does not depend on
other partitions or on the format of control files.

Rules:
    1. Bytes that were synced are still on the disk after a crash, so a fault in them is damage,
       and an error. These bytes are known to be synced:
       - the records up to the acked marker
       - the records up to the synced ID in the entry of a later batch
       - all segments except the last one
       If the storage was not closed cleanly, all other bytes may be missing or incomplete (a torn
       tail). A fault in them is only a note. If the partition has no control slot, a torn tail
       cannot be distinguished from damage, so every fault is an error.
    2. Waltz 0.13 writes records without batches. If 0.13 has written to a log after this version,
       the old batches may describe records that 0.13 has truncated. So a fault in a batch is only
       a note. The next start of the storage creates new batches.
"""

from functools import partial
from pathlib import Path
from typing import Final

from waltz_core.offline.file_findings import VerificationFindings, records_text
from waltz_core.offline.files import OpenFile, first_ids_in, names_in, segment_path
from waltz_core.offline.layout import GENESIS_MARKER, SLOTS_FILE_NAME, TRUNCATE
from waltz_core.offline.lineage import ChainCheck, ChainEnd, batches_of, header_of
from waltz_core.offline.verify_segment import ExpectedLog, FoundLog, SegmentCheck

# The files with the locks of the newest batches. They are not checked: a new owner verifies them
# with the hash chain.
_LOCK_NAMES: Final = {"waltz-x.lck", "waltz-x.lck.old"}
_SUFFIXES: Final = (".seg", ".idx", ".chn")


def verify_log(directory: Path, expected: ExpectedLog, findings: VerificationFindings) -> FoundLog:
    """Verify the log in a partition's directory."""
    return _LogCheck(directory, expected, findings).run()


def verify_segment(path: Path, findings: VerificationFindings) -> FoundLog:
    """Verify one segment, but not its batches, because they depend on the preceding segment."""
    found_log = FoundLog()
    SegmentCheck(
        path.parent,
        int(path.stem),
        next_first=None,
        expected=ExpectedLog(partition=None, cluster_key=None),
        findings=findings,
        found_log=found_log,
        chain=None,
        is_error_at=lambda _: True,
        is_index_error_at=lambda _: True,
    ).run()
    return found_log


def has_batches(directory: Path) -> bool:
    """Return whether a partition's directory has batches, which Waltz 0.13 does not write."""
    return any(name.endswith(".chn") for name in names_in(directory))


class _LogCheck:
    """The check of the log of one partition, with the control slot and across segments."""

    def __init__(
        self, directory: Path, expected: ExpectedLog, findings: VerificationFindings
    ) -> None:
        self._directory = directory
        self._expected = expected
        self._findings = findings
        self._found_log = FoundLog()
        slot = expected.slot
        self._start = ChainEnd(-1, GENESIS_MARKER)
        if slot is not None:
            self._start = ChainEnd(slot.start, slot.start_chain)
        self._first_ids = first_ids_in(directory)
        self._synced_up_to = expected.last_synced_id
        self._chain: ChainCheck | None = None

    def run(self) -> FoundLog:
        """Verify all segments of the log, and return the content that was found."""
        self._check_file_names()
        self._skip_segments_before_start()
        if not self._first_ids:
            return self._found_log
        if self._expected.slot is not None or has_batches(self._directory):
            last_in_entries = self._synced_by_entries(self._first_ids[-1])
            self._synced_up_to = max(
                self._synced_up_to, last_in_entries, self._last_batch_in_older_segments()
            )
            slot = self._expected.slot
            if slot is not None and slot.flags & TRUNCATE:
                # The next start completes this truncation. Bytes after `truncate_to` may already be
                # missing.
                self._synced_up_to = min(self._synced_up_to, slot.truncate_to)
            self._chain = ChainCheck(
                self._directory,
                self._first_ids,
                self._start,
                self._findings,
                self._is_batch_error_at,
                self._expected.batch_ends,
            )
        expected_first = min(self._start.last + 1, self._first_ids[0])
        for first, next_first in zip(self._first_ids, [*self._first_ids[1:], None], strict=True):
            if first > expected_first:
                self._report_missing_segments(expected_first, first)
            expected_first = SegmentCheck(
                self._directory,
                first,
                next_first=next_first,
                expected=self._expected,
                findings=self._findings,
                found_log=self._found_log,
                chain=self._chain,
                is_error_at=partial(self._is_error_at, segment=first),
                is_index_error_at=partial(self._is_index_error_at, segment=first),
            ).run()
        self._found_log.last = expected_first - 1
        if self._chain is not None:
            self._chain.finish(expected_first - 1)
            self._found_log.end = self._chain.end
            self._found_log.chains_by_id = self._chain.chains
            self._found_log.batch_count = self._chain.count
            self._found_log.unchecked_batch_count = self._chain.unchecked_count
        return self._found_log

    def _skip_segments_before_start(self) -> None:
        """Skip segments that end at or before the start of the log."""
        first = self._start.last + 1
        while len(self._first_ids) > 1 and self._first_ids[1] <= first:
            path = segment_path(Path(self._directory.name), self._first_ids.pop(0), ".seg")
            note = (
                f"the segment ends before transaction {first}, where the log begins; the next "
                "start of the storage removes it"
            )
            self._findings.in_file(str(path)).add_note(None, note)

    # ---- what may be torn (rule 1)

    def _is_error_at(self, transaction_id: int, segment: int) -> bool:
        is_used = transaction_id > self._start.last
        return is_used and self._is_synced(transaction_id, segment, self._synced_up_to)

    def _is_index_error_at(self, transaction_id: int, segment: int) -> bool:
        # The index is synced only when the acked marker moves. The synced ID in a batch entry is
        # about records, not about the index.
        return self._is_synced(transaction_id, segment, self._expected.last_synced_id)

    def _is_synced(self, transaction_id: int, segment: int, stated_last: int) -> bool:
        """Return whether the bytes of an ID in a segment must have been synced."""
        later_first_ids = self._first_ids[self._first_ids.index(segment) + 1 :]
        if later_first_ids:
            # After a failed write, a log truncates its last file and continues in a new file. The
            # truncation may not be durable, so a crash may restore the truncated bytes. The
            # restored records have IDs of the next segment.
            return not self._is_dirty or transaction_id < later_first_ids[0]
        return not self._is_dirty or transaction_id <= stated_last

    def _is_batch_error_at(self, transaction_id: int) -> bool:
        # Even in a full segment, the last entry may be missing. So this check depends on the ID
        # only.
        is_torn = self._is_dirty and transaction_id > self._synced_up_to
        return not (self._expected.gets_batches or is_torn)

    @property
    def _is_dirty(self) -> bool:
        return self._expected.slot is not None and self._expected.slot.is_dirty

    def _synced_by_entries(self, first: int) -> int:
        """Return the greatest synced ID in the batch entries of the last segment."""
        path = segment_path(self._directory, first, ".chn")
        if not path.exists():
            return -1
        with OpenFile(path) as file:
            header = header_of(file)
            entries = (placed.batch for placed in batches_of(file, header.segment_crc))
            return max((entry.synced for entry in entries if not entry.errors), default=-1)

    def _last_batch_in_older_segments(self) -> int:
        """Return the end of the last valid batch in an older segment; older segments are synced."""
        for first, next_first in zip(self._first_ids[-2::-1], self._first_ids[:0:-1], strict=True):
            path = segment_path(self._directory, first, ".chn")
            if not path.exists():
                continue
            with OpenFile(path) as file:
                entries = (placed.batch for placed in batches_of(file, header_of(file).segment_crc))
                batch_ends = [
                    entry.last for entry in entries if not entry.errors and entry.last < next_first
                ]
            if batch_ends:
                return max(batch_ends)
        return -1

    # ---- names

    def _report_missing_segments(self, expected_first: int, first: int) -> None:
        path = segment_path(Path(self._directory.name), first, ".seg")
        what = f"no segment has {records_text(expected_first, first - 1)}"
        self._findings.in_file(str(path)).add_error(None, what)
        self._found_log.note_unreadable(expected_first, first - 1)
        if self._chain is not None:
            self._chain.check_records(expected_first, None, first - expected_first)

    def _check_file_names(self) -> None:
        expected = {SLOTS_FILE_NAME, *_LOCK_NAMES} | {
            segment_path(self._directory, first, suffix).name
            for first in self._first_ids
            for suffix in _SUFFIXES
        }
        for name in names_in(self._directory):
            if name in expected:
                continue
            report = self._findings.in_file(f"{self._directory.name}/{name}")
            if name.endswith(".tmp"):
                report.add_note(
                    None, "the file was never completed; the next start of the storage removes it"
                )
            elif name.endswith((".idx", ".chn")):
                report.add_note(
                    None, "the file has no .seg file; the next start of the storage removes it"
                )
            else:
                report.add_note(None, "the file does not belong to a storage")
