"""The segments of one partition, as one sequence of records and one sequence of batches.

A batch, a read or a truncation may cross the border between two segments. Only `Segments` handles
these borders: the log sees one sequence, and a segment sees only its own part.

Rules:
    1. Segment i ends where segment i+1 begins. The first segment begins at or before the first
       record of the log. There is always at least one segment.
    2. A batch's entry is in the segment of its last record.
    3. New segments are added at the end. A truncation removes segments from the end, the newest
       first.
    4. The log begins after its start, which is the end of a batch. Segments that end at or before
       the start are removed, the oldest first. The oldest remaining segment may have records at or
       before the start; they are not used any more.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, ChecksumMismatch, DiskFailed, ReadFailed
from waltz_core.records import raw_records
from waltz_core.records.record import (
    BEFORE_FIRST,
    RECONSTRUCTED,
    RECORD_OVERHEAD_BYTES,
    Chain,
    LineageEntry,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.storage.disk.file_system import Disk
from waltz_core.storage.files.format import (
    GENESIS_MARKER,
    AckedMarker,
    IdRange,
    SegmentHeader,
    first_id_in_name,
)
from waltz_core.storage.files.lock_block_file import LockBlockFile
from waltz_core.storage.files.segment import Segment
from waltz_core.wire.record_locations import FileLocation

I64 = npt.NDArray[np.int64]
_CRC_BLOCK_BYTES: Final = 8 * 1024 * 1024


class LostBatches(NamedTuple):
    """Unreadable entries in a segment, starting at a position.

    `ids` are the IDs of the records in the batches of these entries and in the next batch.
    `is_provable` is set if there is only one entry, and a readable entry follows it: then the entry
    may be rebuilt.
    """

    segment_index: int
    position: int
    ids: IdRange
    is_provable: bool


class Segments:
    """All segments of a partition, oldest first."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        header_template: SegmentHeader,
        segments: list[Segment],
        start: AckedMarker = GENESIS_MARKER,
    ) -> None:
        assert segments
        assert segments[0].first <= start.transaction_id + 1
        self.all = segments
        self.start = start
        self.lock_block_file = LockBlockFile(disk, directory)
        self.directory = directory
        self._disk = disk
        self._header_template = header_template
        self._is_truncating = False  # whether a truncation was begun and is not finished
        self._firsts = [segment.first for segment in segments]

    # ---- contents

    @property
    def current(self) -> Segment:
        """The segment to which records are appended."""
        return self.all[-1]

    @property
    def last_id(self) -> TransactionId:
        """The last ID; if there is no record, the ID before the first one."""
        return self.current.last

    @property
    def chain(self) -> Chain:
        """The chain hash after the last batch that has an entry."""
        lineage = self.current.lineage
        return lineage.chain_at(lineage.count)

    def lineage_end(self) -> LineageEntry | None:
        """Return the last batch; None if there is none."""
        for segment in reversed(self.all):
            if segment.lineage.count:
                return segment.lineage.entry(segment.lineage.count - 1)
        return None

    def chain_at(self, transaction_id: TransactionId) -> Chain | None:
        """Return the chain hash at the end of a batch; None if no batch ends at this ID."""
        start = self.start
        if transaction_id == start.transaction_id:
            return start.chain
        if not start.transaction_id < transaction_id <= self.last_id:
            return None
        lineage = self._segment_of(transaction_id).lineage
        position = lineage.position_of(transaction_id)
        if position == lineage.count:
            return None
        entry = lineage.entry(position)
        return entry.chain if entry.last == transaction_id else None

    def segment_end(self, transaction_id: TransactionId) -> TransactionId:
        """Return the last ID of the segment that contains an ID."""
        return self.all[self._index_of(transaction_id)].last

    def _segment_of(self, transaction_id: int) -> Segment:
        return self.all[self._index_of(transaction_id)]

    def _index_of(self, transaction_id: int) -> int:
        return bisect_right(self._firsts, transaction_id) - 1

    # ---- changing

    def add(self, now_ms: int, chain_before: Chain) -> None:
        """Begin a new segment after the last record, durably."""
        self._add(TransactionId(self.last_id + 1), now_ms, chain_before)

    def _add(self, first: TransactionId, now_ms: int, chain_before: Chain) -> None:
        header = self._header_template._replace(created_ms=now_ms, first=first)
        self.all.append(Segment.create(self._disk, self.directory, header, chain_before))
        self._firsts.append(first)

    def begin_after(self, start: AckedMarker, now_ms: int) -> None:
        """Make the log begin after a batch end, and remove older segments, durably.

        The call may be repeated. If the log ends before the new start, it is empty afterwards (rule
        4). The slot must already contain the new start.
        """
        self.start = start
        if self.last_id < start.transaction_id:
            self._add(TransactionId(start.transaction_id + 1), now_ms, start.chain)
        while len(self.all) > 1 and self.all[1].first <= start.transaction_id + 1:
            self.all.pop(0).remove()
            self._firsts.pop(0)

    def continue_in_new_file(self, now_ms: int, chain_before: Chain, marker: TransactionId) -> None:
        """Continue in a new file, and never write the current file again.

        The index of the current file was synced up to the marker.
        """
        with suppress(DiskFailed):
            # This sync is not trusted, but it may make the truncation durable. Waltz 0.13 needs the
            # truncation: 0.13 fails if a file has bytes after the ID where the next segment begins.
            self.current.sync()
        self.current.forget()
        if self.current.next_id > self.current.first:
            self.current.copy_index(marker)
            self.add(now_ms, chain_before)
            return
        # The segment is empty; the new files replace its files.
        header = self._header_template._replace(created_ms=now_ms, first=self.current.first)
        self.current.close()
        self.all[-1] = Segment.create(self._disk, self.directory, header, chain_before)

    def sync(self) -> int:
        """Make records and batches durable; return the number of syncs."""
        return sum(segment.sync() for segment in self.all[-2:] if segment.is_dirty)

    def sync_index(self) -> None:
        """Make the index of the current segment durable.

        The indexes of older segments have been durable since those segments were full.
        """
        self.current.sync_index()

    def truncate(self, last_to_keep: TransactionId, shortened: LineageEntry | None) -> None:
        """Remove records and batches after an ID; `shortened` is the entry of a shortened batch.

        The method does not sync, but removed segments stay removed. The call may be repeated.
        """
        if self._is_truncating:  # The names are already removed, but perhaps not durably.
            self._disk.sync_directory(self.directory)
        self._is_truncating = True
        self._remove_unfinished()
        while len(self.all) > 1 and self.current.first > last_to_keep:
            self._firsts.pop()
            self.all.pop().remove()
        self.current.truncate(last_to_keep)
        end = self.lineage_end()
        if shortened is not None and (end is None or end.last < shortened.first):
            self.current.append_entries([shortened], BEFORE_FIRST)
        self._is_truncating = False

    def _remove_unfinished(self) -> None:
        """Remove segments that are not in `all`.

        Their creation failed after the file had its final name.
        """
        names = self._disk.list(self.directory)
        unfinished_ids = [
            first for first in map(first_id_in_name, names) if first not in {None, *self._firsts}
        ]
        for first in unfinished_ids:
            assert first is not None
            header = self._header_template._replace(first=first)
            Segment(self._disk, self.directory, header).remove()

    def fill(self, first: TransactionId, lengths: I64, records: memoryview, hole: IdRange) -> None:
        """Write records into a hole that begins at `first`, durably.

        Raises:
            BadFormat: the records do not fit into the hole.
        """
        written_count = 0
        while written_count < lengths.size:
            segment = self._segment_of(first)
            count = min(int(lengths.size) - written_count, segment.next_id - first)
            part = lengths[written_count : written_count + count]
            size = int(part.sum())
            segment_hole = IdRange(first, min(hole.last, segment.last))
            segment.fill(part, records[:size], segment_hole)
            records = records[size:]
            written_count += count
            first = TransactionId(first + count)

    def diagnose(self, transaction_id: TransactionId) -> tuple[IdRange, ...]:
        """Return the damage around a wrong record; repair the index of its segment if necessary."""
        segment = self._segment_of(transaction_id)
        if segment.has_correct_index(transaction_id):
            return (IdRange(transaction_id, transaction_id),)
        return segment.recover(segment.first, segment.last, is_last=False).damaged

    def repair(self, first: TransactionId, last: TransactionId) -> tuple[IdRange, ...]:
        """Rebuild index and batches of first..last where they cannot be read.

        Return newly found damage.
        """
        damaged: list[IdRange] = []
        for index in self._indices_around(first, last):
            segment = self.all[index]
            low, high = max(first, segment.first), min(last, segment.last)
            try:
                if low <= high:
                    segment.bounds(low, high)
            except (ChecksumMismatch, ReadFailed):
                recovery = segment.recover(segment.first, segment.last, is_last=False)
                damaged.extend(recovery.damaged)
            for run in segment.lineage.unreadable_runs():
                self._repair_batches(index, *run)
        return tuple(damaged)

    def lost_batches(self, first: TransactionId, last: TransactionId) -> list[LostBatches]:
        """Return the unreadable batch entries around first..last.

        Raises:
            ChecksumMismatch, ReadFailed: the entry before them cannot be read either.
        """
        lost = []
        for index in self._indices_around(first, last):
            segment = self.all[index]
            for low, high in segment.lineage.unreadable_runs():
                begin = TransactionId(self._entry_before(index, low).last + 1)
                is_end = high == segment.lineage.count
                end = segment.last if is_end else segment.lineage.entry(high).last
                is_provable = high == low + 1 and not is_end
                lost.append(LostBatches(index, low, IdRange(begin, end), is_provable))
        return lost

    def rebuild_lost_batch(self, lost: LostBatches) -> bool:
        """Rebuild a lost batch if its records and the batch after it prove its content.

        Return whether it was rebuilt.
        """
        entry = (
            self._reconstruct_batch(lost.segment_index, lost.position) if lost.is_provable else None
        )
        if entry is None:
            return False
        self.all[lost.segment_index].lineage.rewrite(lost.position, [entry])
        return True

    def readable_batches(
        self, first: TransactionId, last: TransactionId
    ) -> list[tuple[Chain, LineageEntry]]:
        """Return the readable batches that overlap first..last, each with the chain hash before it.

        This reads all entries of the surrounding segments.
        """
        batches = []
        for index in self._indices_around(first, last):
            lineage = self.all[index].lineage
            for position in range(lineage.count):
                with suppress(BadFormat, ChecksumMismatch, ReadFailed):
                    entry = lineage.entry(position)
                    if first <= entry.last and entry.first <= last:
                        batches.append((lineage.chain_at(position), entry))
        return batches

    def _indices_around(self, first: TransactionId, last: TransactionId) -> range:
        """Return the indices of the segments that contain first..last and their batches."""
        try:
            last_index = self._last_index_of(last)
        except ReadFailed:
            last_index = min(self._index_of(last) + 1, len(self.all) - 1)
        return range(max(0, self._index_of(first)), last_index + 1)

    def _repair_batches(self, index: int, low: int, high: int) -> None:
        """Rebuild the entries at positions low..high-1, whose neighbors are readable.

        A single entry, except for its stamp, can be reconstructed from the chain hash of the next
        entry. The new entry gets the stamp of the preceding entry. If several entries are lost, the
        bounds of their batches are lost, and the new chain hashes differ from those of other
        replicas.
        """
        lineage = self.all[index].lineage
        if high == lineage.count:
            # Only the next opening can find the end of the log: it trims the lineage file, and
            # marks the replica as suspect.
            raise ChecksumMismatch(
                f"the last {high - low} of {high} batch entries of the segment that begins "
                f"with transaction {self.all[index].first} cannot be read"
            )
        following = lineage.entry(high)
        previous = self._entry_before(index, low)
        entry_count = high - low
        ends = [previous.last + count for count in range(1, entry_count)] + [following.first - 1]
        entry = self._reconstruct_batch(index, low) if entry_count == 1 else None
        if entry is not None:
            lineage.rewrite(low, [entry])
            return
        entries: list[LineageEntry] = []
        for end in ends:
            entries.append(self._reconstructed_entry(previous, end, RECONSTRUCTED))
            previous = entries[-1]
        lineage.rewrite(low, entries)

    def _reconstruct_batch(self, index: int, position: int) -> LineageEntry | None:
        """Reconstruct a lost batch from the next chain hash; None if no session matches."""
        previous, following = (
            self._entry_before(index, position),
            self.all[index].lineage.entry(position + 1),
        )
        if not 0 <= previous.session_id <= following.session_id <= previous.session_id + 100:
            return None
        for session in range(previous.session_id, following.session_id + 1):
            candidate = self._reconstructed_entry(previous, following.first - 1, SessionId(session))
            if (
                self._reconstructed_entry(candidate, following.last, following.session_id).chain
                == following.chain
            ):
                return candidate
        return None

    def _entry_before(self, index: int, position: int) -> LineageEntry:
        while index >= 0:
            if position:
                return self.all[index].lineage.entry(position - 1)
            index -= 1
            position = self.all[index].lineage.count if index >= 0 else 0
        last_before = TransactionId(self.all[0].first - 1)
        return LineageEntry(last_before, last_before, SessionId(0), 0, self.oldest_chain())

    def oldest_chain(self) -> Chain:
        """Return the chain hash before the first batch of the oldest segment."""
        if self.all[0].first == self.start.transaction_id + 1:
            return self.start.chain
        return self.all[0].lineage.chain_before

    def _reconstructed_entry(
        self, previous: LineageEntry, last: int, session: SessionId
    ) -> LineageEntry:
        first, end = TransactionId(previous.last + 1), TransactionId(last)
        crcs = self.record_crcs(first, end) or bytes(4 * (end - first + 1))
        chain = next_chain(previous.chain, first, end, session, crcs)
        return LineageEntry(first, end, session, previous.stamp_ms, chain)

    def close(self) -> None:
        """Close all files."""
        self.lock_block_file.close()
        for segment in self.all:
            segment.close()

    # ---- records

    def read(self, first: TransactionId, last: TransactionId) -> tuple[bytes, I64]:
        """Return the bytes of records first..last, unchecked, and their lengths."""
        runs: list[bytes] = []
        lengths: list[I64] = []
        while first <= last:
            segment = self._segment_of(first)
            end = min(last, segment.last)
            run, part = segment.read(first, end)
            runs.append(run)
            lengths.append(part)
            first = TransactionId(end + 1)
        if len(runs) == 1:
            return runs[0], lengths[0]
        return b"".join(runs), np.concatenate(lengths)

    def drop_cached(self, first: TransactionId, last: TransactionId) -> None:
        """Drop the bytes of first..last from the page cache, so that reads go to the disk."""
        while first <= last:
            segment = self._segment_of(first)
            segment.drop_cached(first, min(last, segment.last))
            first = TransactionId(segment.next_id)

    def locations(
        self, first: TransactionId, last: TransactionId
    ) -> tuple[list[FileLocation], I64]:
        """Return the file positions and lengths of records first..last, from the index alone."""
        locations: list[FileLocation] = []
        lengths: list[I64] = []
        while first <= last:
            segment = self._segment_of(first)
            end = min(last, segment.last)
            offsets = segment.bounds(first, end)
            start = int(offsets[0])
            locations.append(FileLocation(segment.first, start, int(offsets[-1]) - start))
            lengths.append(raw_records.lengths_between(offsets))
            first = TransactionId(end + 1)
        return locations, np.concatenate(lengths)

    def last_fitting_id(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> TransactionId:
        """Return the last ID up to which the records from `first` on fit into `bytes_max`.

        The result is at least `first`. Each record has at least `RECORD_OVERHEAD_BYTES` bytes, so
        only a limited part of the index is read.
        """
        last = min(last, TransactionId(first + bytes_max // RECORD_OVERHEAD_BYTES))
        next_id = first
        while next_id <= last:
            segment = self._segment_of(next_id)
            end = min(last, segment.last)
            offsets = segment.bounds(next_id, end)
            count = int(np.searchsorted(offsets[1:] - offsets[0], bytes_max, side="right"))
            if count < end - next_id + 1:
                return TransactionId(max(first, next_id + count - 1))
            bytes_max -= int(offsets[-1] - offsets[0])
            next_id = TransactionId(end + 1)
        return last

    def byte_count(self, first: TransactionId, last: TransactionId) -> int:
        """Return the bytes of records first..last; this reads only the ends of the index."""
        total, next_id = 0, first
        while next_id <= last:
            segment = self._segment_of(next_id)
            end = min(last, segment.last)
            total += int(segment.bounds(end, end)[-1] - segment.bounds(next_id, next_id)[0])
            next_id = TransactionId(end + 1)
        return total

    def record_crcs(self, first: TransactionId, last: TransactionId) -> bytes | None:
        """Return the CRCs of records first..last; None if a record is wrong or missing."""
        if last > self.last_id:
            return None
        parts: list[bytes] = []
        while first <= last:
            end = self.last_fitting_id(first, last, _CRC_BLOCK_BYTES)
            records, lengths = self.read(first, end)
            if first_invalid_record(records, lengths, first) is not None:
                return None
            parts.append(raw_records.record_crcs(records, lengths))
            first = TransactionId(end + 1)
        return b"".join(parts)

    # ---- batches

    def entries_from(self, first: TransactionId) -> Iterator[LineageEntry]:
        """Yield the batches that end at or after an ID, oldest first."""
        for index in range(max(0, self._index_of(first)), len(self.all)):
            lineage = self.all[index].lineage
            yield from lineage.entries(lineage.position_of(first))

    def entry_of(self, transaction_id: TransactionId) -> LineageEntry | None:
        """Return the first batch that ends at or after an ID; None if there is none."""
        return next(self.entries_from(transaction_id), None)

    def entries(
        self, first: TransactionId, last: TransactionId, entries_max: int
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that overlap first..last, and the chain hash before them.

        If there are more than `entries_max`, the newest are returned. If there are no batches, the
        method returns the chain hash at the end of the log.

        Raises:
            BadFormat, ChecksumMismatch: an entry is wrong, or in the wrong place.
        """
        slices: list[Sequence[LineageEntry]] = []
        chain_before = self.chain
        remaining = entries_max
        for index in range(self._last_index_of(last), -1, -1):
            lineage = self.all[index].lineage
            low = lineage.position_of(first)
            high = min(lineage.position_of(last) + 1, lineage.count)
            low = max(low, high - remaining)
            if low < high:
                slices.append(_checked_run(lineage.slice(low, high)))
                chain_before = lineage.chain_at(low)
                remaining -= high - low
            if remaining == 0 or self.all[index].first <= first:
                break
        return chain_before, tuple(entry for part in reversed(slices) for entry in part)

    def _last_index_of(self, last: TransactionId) -> int:
        """Return the index of the segment whose lineage file has the batch that contains an ID."""
        index = max(0, self._index_of(last))
        while index + 1 < len(self.all):
            lineage = self.all[index].lineage
            if lineage.position_of(last) < lineage.count:
                break
            index += 1
        return index


def _checked_run(entries: Sequence[LineageEntry]) -> Sequence[LineageEntry]:
    """Check that each entry of one file continues the previous one; return the entries."""
    for previous, following in pairwise(entries):
        if following.first != previous.last + 1:
            raise ChecksumMismatch(
                f"expected a batch that begins at transaction {previous.last + 1}, after batch "
                f"{previous.first}..{previous.last}, found {following.first}..{following.last}"
            )
    return entries


def first_invalid_record(
    records: bytes | memoryview, lengths: I64, first: TransactionId
) -> int | None:
    """Return the index of the first record that is incomplete, wrong or in the wrong place."""
    count, size = _size_before_short_record(lengths)
    run = memoryview(records)[:size]
    invalid_positions = [
        position
        for position in (
            raw_records.first_bad_record(run, lengths[:count]),
            raw_records.first_gap(run, lengths[:count], first),
        )
        if position is not None
    ]
    if invalid_positions:
        return min(invalid_positions)
    return count if count < lengths.size else None


def _size_before_short_record(lengths: I64) -> tuple[int, int]:
    """Return the number and the bytes of the records before the first one that is too short."""
    if lengths.size <= raw_records.ONE_BY_ONE_MAX:
        size = 0
        for count, length in enumerate(lengths.tolist()):
            if length < RECORD_OVERHEAD_BYTES:
                return count, size
            size += length
        return int(lengths.size), size
    short_positions = np.flatnonzero(lengths < RECORD_OVERHEAD_BYTES)
    count = int(short_positions[0]) if short_positions.size else int(lengths.size)
    return count, int(lengths[:count].sum())
