"""Reads ranges of a partition from the objects that one manifest lists.

All calls block, and all threads of a process may share a reader. `archive_cache.py` caches pages of
the manifest, indexes of objects (`object_index.py`) and row groups.

Rules (docs/decisions/047, AR 14):
    1. A record is returned only if its ID and its CRC are correct, and the hash chain covers it.
       When an object is opened, its hash chain is verified from the first to the last batch. The
       chain hash at the end must be the chain hash that the manifest states. This verification
       reads a few bytes per record, not the records.
    2. An error names the file. A read ends before a wrong or unreachable record; only a read that
       begins with such a record fails.
    3. A reader uses one manifest. When another manifest has replaced it, objects of the old
       manifest may be deleted. So after ObjectMissing, the caller requests the name of the recorded
       manifest from ZooKeeper or the owner. If the name has changed, the caller repeats the read
       with `successor`. Otherwise the file is lost.
    4. If a read begins where an earlier read has ended, a thread reads the next row group ahead.
"""

import sys
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Final, NamedTuple, Self

import numpy as np

from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry, check_crc, decode_page
from waltz_core.archive.object_index import ObjectIndex, RowGroup
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import BadRequest, BeforeLogStart, WaltzError
from waltz_core.records import raw_records
from waltz_core.records.raw_records import RangeRead
from waltz_core.records.record import Chain, LineageEntry, TransactionId

# The maximum number of records in an answer, which also limits the number of batches.
_RANGE_RECORDS_MAX: Final = 1 << 16
# The maximum number of read ends that are remembered, to detect sequential reads.
_READ_ENDS_MAX: Final = 32
# In memory, the entries of a page use about this many times the size of the page's file.
_PAGE_EXPANSION_FACTOR: Final = 4


class _RowGroupRead(NamedTuple):
    """The records of a read that are in one row group, with the position of this row group."""

    range: RangeRead
    entry: ObjectEntry
    object_index: ObjectIndex
    group: int


class ArchiveReader:
    """The archive of one partition, as one manifest lists it."""

    def __init__(
        self, store: ArchiveStore, manifest_name: str, manifest_crc: int, cache: ArchiveCache
    ) -> None:
        """The constructor reads nothing. All readers of a process share `cache`."""
        self.manifest_name = manifest_name
        self._store = store
        self._manifest_crc = manifest_crc
        self._cache = cache
        self._loaded_manifest: Manifest | None = None
        self._lock = threading.Lock()
        self._read_ends: OrderedDict[TransactionId, None] = OrderedDict()

    @classmethod
    def for_manifest(cls, manifest: Manifest, store: ArchiveStore, cache: ArchiveCache) -> Self:
        """Return a reader for a manifest that was read already."""
        reader = cls(store, "", 0, cache)
        reader._loaded_manifest = manifest
        return reader

    def successor(self, manifest_name: str, manifest_crc: int) -> "ArchiveReader | None":
        """Return a reader for another manifest; None if this reader already uses it (rule 3)."""
        if manifest_name == self.manifest_name:
            return None
        return ArchiveReader(self._store, manifest_name, manifest_crc, self._cache)

    @property
    def manifest(self) -> Manifest:
        """The head of the manifest.

        Raises:
            ObjectMissing, ArchiveUnavailable: the head cannot be read.
            BadFormat, ChecksumMismatch: the head is wrong; the error names it.
        """
        if self._loaded_manifest is None:
            key = self._cache_key("manifest", self.manifest_name, self._manifest_crc)
            self._loaded_manifest = self._cache.get(key, self._load_manifest)
        return self._loaded_manifest

    @property
    def first_available(self) -> TransactionId:
        """The first ID that the archive contains; raises the errors of `manifest`."""
        return self.manifest.first

    @property
    def archived_end(self) -> tuple[TransactionId, Chain]:
        """The last ID of the archive, and its chain hash; raises the errors of `manifest`."""
        return self.manifest.last, self.manifest.chain

    def read_range(self, first: TransactionId, last: TransactionId, bytes_max: int) -> RangeRead:
        """Return records of first..last up to `bytes_max`, but at least one record.

        Raises:
            BeforeLogStart: `first` has expired.
            BadRequest: the archive ends before `last`.
            ObjectMissing: a file does not exist (rule 3).
            ArchiveUnavailable: the store does not answer; the caller may retry.
            BadFormat, ChecksumMismatch: a file is wrong; the error names it.
        """
        self._check_bounds(first, last)
        last = min(last, TransactionId(first + _RANGE_RECORDS_MAX - 1))
        part = self._read_in_row_group(first, last, bytes_max)
        parts, next_id = [part], _next_id(part)
        room = bytes_max - len(part.range.records)
        while next_id <= last and room > 0:
            try:
                part = self._read_in_row_group(next_id, last, room)
            except WaltzError:
                break  # rule 2
            if len(part.range.records) > room:
                break
            parts.append(part)
            next_id = _next_id(part)
            room -= len(part.range.records)
        if self._is_sequential(first, next_id):
            self._read_ahead(parts[-1])
        return _join_ranges([row_group_read.range for row_group_read in parts])

    def read_within_row_group(self, first: TransactionId, last: TransactionId) -> RangeRead:
        """Return the records of first..last that are in one row group, without a copy.

        Raises:
            The errors of `read_range`.
        """
        self._check_bounds(first, last)
        part = self._read_in_row_group(first, last, sys.maxsize)
        if self._is_sequential(first, _next_id(part)):
            self._read_ahead(part)
        return part.range

    def lineage(
        self, first: TransactionId, last: TransactionId, entries_max: int
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the batches that overlap first..last, and the chain hash before them.

        If there are more than `entries_max`, the newest are returned.

        Raises:
            The errors of `read_range`.
        """
        self._check_bounds(first, last)
        chain_before, newer_entries = self.manifest.chain, tuple[LineageEntry, ...]()
        for entry in reversed(self.objects_between(first, last)):
            begin, end = max(first, entry.first), min(last, entry.last)
            chain_before, entries = self._index_of(entry).batches_between(begin, end)
            newer_entries = entries + newer_entries
            if len(newer_entries) > entries_max:
                return newer_entries[-entries_max - 1].chain, newer_entries[-entries_max:]
        return chain_before, newer_entries

    def objects_between(self, first: TransactionId, last: TransactionId) -> list[ObjectEntry]:
        """Return the objects that contain the available IDs of first..last, in order.

        Raises:
            The errors of `manifest`, also for a page of it.
        """
        first = max(first, self.manifest.first)
        if not first <= last:
            return []
        return list(takewhile(lambda entry: entry.first <= last, self._entries_from(first)))

    def last_committed_before(self, time_ms: int) -> TransactionId:
        """Return the last ID that is known to be committed before a time.

        If no ID is known to be committed before this time, return the ID before the first available
        ID. Some transactions have no commit time. Commit times never decrease. So a transaction
        without a commit time counts if a later transaction has a commit time before `time_ms`, and
        only then.

        Raises:
            The errors of `read_range`.
        """
        manifest = self.manifest
        bounds = [(listed.first, listed.commit_ms_min) for listed in manifest.pages]
        bounds += [(listed.first, listed.commit_ms_min) for listed in manifest.newest_objects]
        starts = [first for first, oldest_ms in bounds if 0 < oldest_ms < time_ms]
        committed_id = TransactionId(manifest.first - 1)
        if not starts:
            return committed_id
        newest_entry: ObjectEntry | None = None
        for entry in self._entries_from(max(starts[-1], manifest.first)):
            if entry.commit_ms_min >= time_ms:
                break
            if entry.commit_ms_min:
                newest_entry = entry
        if newest_entry is not None:
            last = self._index_of(newest_entry).last_committed_before(time_ms)
            committed_id = max(committed_id, min(last, newest_entry.last))
        return committed_id

    def _check_bounds(self, first: TransactionId, last: TransactionId) -> None:
        manifest = self.manifest
        if 0 <= first < manifest.first:
            raise BeforeLogStart(
                f"archive of partition {manifest.partition_id}: transactions {first}..{last} "
                f"were requested, but the first available one is {manifest.first}",
                manifest.first,
            )
        if not 0 <= first <= last <= manifest.last:
            raise BadRequest(
                f"archive of partition {manifest.partition_id}: transactions {first}..{last} "
                f"were requested, but the last archived one is {manifest.last}"
            )

    def _read_in_row_group(
        self, first: TransactionId, last: TransactionId, bytes_max: int
    ) -> _RowGroupRead:
        """Return one or more records from the beginning of a range, all from one row group."""
        entry = next(self._entries_from(first))
        index = self._index_of(entry)
        group_number = index.group_containing(first)
        group = self._row_group(entry, index, group_number)
        skip = first - group.first
        count = min(group.lengths.size - skip, min(last, entry.last) + 1 - first)
        count = raw_records.count_within(group.lengths[skip : skip + count], bytes_max)
        start, end = int(group.offsets[skip]), int(group.offsets[skip + count])
        chain_before, entries = index.batches_between(first, TransactionId(first + count - 1))
        records = RangeRead(
            first,
            group.lengths[skip : skip + count],
            memoryview(group.records)[start:end],
            entries,
            chain_before,
        )
        return _RowGroupRead(records, entry, index, group_number)

    def _is_sequential(self, first: TransactionId, next_id: TransactionId) -> bool:
        """Note the end of a read; return whether the read began where an earlier read had ended."""
        with self._lock:
            is_sequential = first in self._read_ends
            self._read_ends.pop(first, None)
            self._read_ends[next_id] = None
            if len(self._read_ends) > _READ_ENDS_MAX:
                self._read_ends.popitem(last=False)
            return is_sequential

    def _read_ahead(self, part: _RowGroupRead) -> None:
        entry, index, group_number = part.entry, part.object_index, part.group + 1
        if group_number < index.group_count and index.first_id_of_group(group_number) <= entry.last:
            key = self._cache_key("group", entry.name, group_number)
            self._cache.read_ahead(key, lambda: self._load_row_group(entry, index, group_number))
            return
        with suppress(WaltzError):  # the next read needs the same page, and raises its error
            next_entry = next(self._entries_from(TransactionId(entry.last + 1)), None)
            if next_entry is not None:
                key = self._cache_key("group", next_entry.name, 0)
                self._cache.read_ahead(
                    key, lambda: self._load_row_group(next_entry, self._index_of(next_entry), 0)
                )

    # --- The files, through the cache

    def _cache_key(self, kind: str, name: str, number: int = 0) -> tuple[str, str, str, int]:
        return (kind, self._store.url, name, number)

    def _load_manifest(self) -> tuple[Manifest, int]:
        data = self._store.read(self.manifest_name)
        check_crc(self.manifest_name, data, self._manifest_crc)
        manifest = Manifest.from_bytes(data, self.manifest_name)
        return manifest, _PAGE_EXPANSION_FACTOR * len(data)

    def _entries_from(self, transaction_id: TransactionId) -> Iterator[ObjectEntry]:
        """Yield the objects, beginning with the one that contains an ID."""
        manifest = self.manifest
        start = bisect_left(manifest.pages, transaction_id, key=lambda page_entry: page_entry.last)
        for page_number in range(start, len(manifest.pages)):
            entries = self._page_at(page_number).entries
            yield from entries[_entry_position(entries, transaction_id) :]
        yield from manifest.newest_objects[
            _entry_position(manifest.newest_objects, transaction_id) :
        ]

    def _page_at(self, number: int) -> ManifestPage:
        page_entry = self.manifest.pages[number]

        def load() -> tuple[ManifestPage, int]:
            data = self._store.read(page_entry.name)
            return decode_page(page_entry, data), _PAGE_EXPANSION_FACTOR * len(data)

        return self._cache.get(self._cache_key("page", page_entry.name, page_entry.file_crc), load)

    def _index_of(self, entry: ObjectEntry) -> ObjectIndex:
        """Return the index of an object, after a check against the manifest's entry (rule 1)."""

        def load() -> tuple[ObjectIndex, int]:
            with self._store.open(entry.name) as source:
                object_index = ObjectIndex(ArchiveObject(source, entry.name))
            return object_index, object_index.byte_count

        index = self._cache.get(self._cache_key("index", entry.name), load)
        index.check_matches(self.manifest, entry)
        return index

    def _row_group(self, entry: ObjectEntry, index: ObjectIndex, number: int) -> RowGroup:
        key = self._cache_key("group", entry.name, number)
        return self._cache.get(key, lambda: self._load_row_group(entry, index, number))

    def _load_row_group(
        self, entry: ObjectEntry, index: ObjectIndex, number: int
    ) -> tuple[RowGroup, int]:
        with self._store.open(entry.name) as source:
            archive_object = ArchiveObject(source, entry.name, footer=index.footer)
            group = index.read_row_group(archive_object, number)
        return group, group.byte_count


def _entry_position(entries: tuple[ObjectEntry, ...], transaction_id: TransactionId) -> int:
    return bisect_left(entries, transaction_id, key=lambda entry: entry.last)


def _next_id(part: _RowGroupRead) -> TransactionId:
    return TransactionId(part.range.first + int(part.range.lengths.size))


def _join_ranges(ranges: list[RangeRead]) -> RangeRead:
    """Join copies of consecutive ranges to one range; ranges may share a batch."""
    entries: dict[TransactionId, LineageEntry] = {
        each.first: each for read in ranges for each in read.entries
    }
    return RangeRead(
        ranges[0].first,
        np.concatenate([each.lengths for each in ranges]),
        b"".join(each.records for each in ranges),
        tuple(entries.values()),
        ranges[0].chain_before,
    )
