"""Reads of archived transactions directly from the object store, without a server or a storage.

A server reports the archived range of a partition (`ReplicaSet.archived`). The process that plans a
read finds the objects once, through the manifest. The processes that read these objects need no
manifest, because objects never change.

Rules (docs/decisions/047, AR 14):
    1. Objects are found through the manifest, and used only up to the IDs that it states.
    2. Each record is verified before it is returned, as `archive/reader.py` does.
    3. If the archive cannot be read, the read does not fail. The caller continues at a storage,
       after the last chunk, because the storages have the same transactions or can read them from
       the archive.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from waltz_core.client.read.ranges import I64, ArchivedRange, RangeChunk
from waltz_core.records import raw_records
from waltz_core.records.batches import select_records
from waltz_core.records.raw_records import Buffer, RangeRead
from waltz_core.records.record import NO_SESSION, TransactionId
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.archive.archive_cache import ArchiveCache
    from waltz_core.archive.manifest import Manifest, ObjectEntry
    from waltz_core.archive.reader import ArchiveReader
    from waltz_core.archive.store import ArchiveStore
    from waltz_core.encryption.envelopes import Encryption

# The size of the cache for the row groups of objects, including those read ahead, and for indexes.
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
_NO_LENGTHS: Final[I64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ArchivedObjects:
    """Consecutive objects of one partition in the archive at `url`; plain values, for pickling."""

    url: str
    manifest: "Manifest"

    @property
    def entries(self) -> "tuple[ObjectEntry, ...]":
        """The objects, in order."""
        return self.manifest.newest_objects

    def objects_between(self, first: int, last: int) -> "ArchivedObjects":
        """Return the objects that contain at least one of the IDs first..last."""
        overlapping = tuple(
            entry for entry in self.entries if entry.last >= first and entry.first <= last
        )
        return ArchivedObjects(self.url, _manifest_with_entries(self.manifest, overlapping))


def find_objects(url: str, archived: ArchivedRange, first: int, last: int) -> ArchivedObjects:
    """Return the objects of an archive that contain at least one of the IDs first..last.

    Raises:
        BadConfig: the URL names no object store.
        ObjectMissing: the manifest does not exist at this URL (any more).
        ArchiveUnavailable: the object store does not answer.
        BadFormat, ChecksumMismatch: a file is damaged; the message names it.
    """
    reader = _open_reader(url, archived)
    entries = reader.objects_between(TransactionId(first), TransactionId(last))
    return ArchivedObjects(url, _manifest_with_entries(reader.manifest, entries))


def last_committed_before(url: str, archived: ArchivedRange, time_ms: int) -> TransactionId:
    """Return the last archived ID that is known to be committed before a time.

    If there is no such ID, the result is the ID before the first available one.

    Raises:
        Like `find_objects`.
    """
    return _open_reader(url, archived).last_committed_before(time_ms)


def _open_reader(url: str, archived: ArchivedRange) -> "ArchiveReader":
    from waltz_core.archive.reader import ArchiveReader  # noqa: PLC0415 - imports Parquet

    store, cache = _open_archive(os.getpid(), url)
    return ArchiveReader(store, archived.manifest, archived.manifest_crc, cache)


def _manifest_with_entries(manifest: "Manifest", entries: "Sequence[ObjectEntry]") -> "Manifest":
    if not entries:
        return replace(
            manifest, first=TransactionId(manifest.last + 1), pages=(), newest_objects=()
        )
    first, end = max(manifest.first, entries[0].first), entries[-1]
    return replace(
        manifest,
        first=TransactionId(first),
        last=end.last,
        chain=end.chain,
        pages=(),
        newest_objects=tuple(entries),
    )


def read_archived(
    objects: ArchivedObjects,
    first: int,
    last: int,
    *,
    form: RangeForm,
    header_values: Sequence[int] = (),
    encryption: "Encryption | None" = None,
) -> Iterator[RangeChunk]:
    """Yield the transactions first..last from archived objects in chunks, in order, without gaps.

    A chunk has the transactions of one row group, about 8 MiB. With `encryption`, `RangeChunk.rows`
    decrypts the data.

    Raises:
        ObjectMissing: an object does not exist any more.
        ArchiveUnavailable: the object store does not answer.
        BadFormat, ChecksumMismatch: an object is damaged, and the message names it. The damaged row
            group is not returned.
    """
    from waltz_core.archive.reader import ArchiveReader  # noqa: PLC0415 - imports Parquet

    store, cache = _open_archive(os.getpid(), objects.url)
    reader = ArchiveReader.for_manifest(objects.manifest, store, cache)
    next_id = TransactionId(first)
    while next_id <= last:
        read = reader.read_within_row_group(next_id, TransactionId(last))
        chunk = _chunk_of(read, form, header_values)
        if encryption is not None:
            decrypt = partial(encryption.decrypt, partition=objects.manifest.partition_id)
            chunk = replace(chunk, decrypt=decrypt)
        next_id = chunk.next
        yield chunk


def _chunk_of(read: RangeRead, form: RangeForm, header_values: Sequence[int]) -> RangeChunk:
    count = int(read.lengths.size)
    records: Buffer = read.records
    lengths = read.lengths
    if header_values:
        values = raw_records.application_headers_of(records, lengths)
        records, lengths = select_records(records, lengths, np.isin(values, header_values))
    if form is RangeForm.HEADERS:
        records, lengths = raw_records.headers_of(records, lengths), _NO_LENGTHS
    next_id = TransactionId(read.first + count)
    mark = TransactionId(next_id - 1)
    return RangeChunk(
        form, read.first, count, next_id, lengths, records, NO_SESSION, mark, read.entries
    )


@functools.cache
def _open_archive(_process: int, url: str) -> "tuple[ArchiveStore, ArchiveCache]":
    """Return the object store and the cache of this process; a forked process opens its own."""
    from waltz_core.archive.archive_cache import ArchiveCache  # noqa: PLC0415 - imports Parquet
    from waltz_core.archive.store import ArchiveStore  # noqa: PLC0415 - imports Parquet

    return ArchiveStore(url), ArchiveCache(CACHE_BYTES_MAX)
