"""Creates the manifest of a restored partition from the manifest in a backup (blocking).

The objects stay where they are, below the key of the cluster that wrote them. The restored cluster
lists them in a new manifest.

Rules (docs/decisions/055):
    1. The saved manifest is verified (`saved_manifest.py`).
    2. Each object must exist, with two exceptions:
       - If the caller allows it, the oldest objects may be missing, because expiry has deleted them
         after the backup. In this case the restored partition begins after them.
       - The cluster of the backup may have replaced a corrupt object after the backup. So if an
         object is missing or corrupt, another object with the same IDs and chain hash is used
         instead. This replacement is below the key of the backup's cluster, even if the old object
         is below the key of another cluster.
       This check reads an object only if another object with the same IDs exists. Otherwise it
       does not detect a corrupt object.
    3. The end of the restored partition is a batch end. The object that contains this end is read.
       Its hash chain is verified from the first to the last batch, and must match the manifest. So
       the chain hash at the end is the chain hash of the source's log.
    4. The version of the new manifest is above all versions in the cluster's folder. The reason: a
       restored cluster may keep the key of the lost cluster. Then the folder may contain files that
       the lost cluster had archived after the restored end. With the higher version, these files
       are garbage, and not a sign of a rollback (`garbage_collection.py`, rule 9).
    5. The caller pins the source clusters before the check of rule 2, and repeats this check at the
       end (`pins.py`).
"""

import io
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import dropwhile
from typing import Final, NamedTuple
from uuid import UUID

from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.file_names import (
    FileOrigin,
    manifest_name,
    manifest_version_of,
    manifests_folder,
    objects_folder,
    page_name,
)
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.archive.manifest_jobs import NewManifest
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import write_and_verify
from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ObjectMissing
from waltz_core.records.checksum import crc32
from waltz_core.records.record import Chain, SessionId, TransactionId

_CACHE_BYTES_MAX: Final = 64 * 1024 * 1024


class BatchEnd(NamedTuple):
    """The end of a batch of an archived log: its ID, chain hash and commit stamp."""

    last: TransactionId
    chain: Chain
    stamp_ms: int


class RestoredRange:
    """The existing objects of a saved manifest, from which a log is restored up to a batch end."""

    def __init__(
        self, store: ArchiveStore, saved_manifest: SavedManifest, *, may_have_expired: bool = False
    ) -> None:
        """Check the manifest and its objects (rules 1 and 2).

        Raises:
            ObjectMissing: an object does not exist, and no exception of rule 2 applies.
            ArchiveUnavailable: the store did not execute a request.
            BadFormat, ChecksumMismatch: a file is wrong; the error names it.
        """
        self._store = store
        entries = [
            entry
            for entry in saved_manifest.entries()
            if entry.last >= saved_manifest.manifest.first
        ]
        own_folder = objects_folder(
            saved_manifest.manifest.cluster_key, saved_manifest.manifest.partition_id
        )
        existing_names = _existing_names(store, entries, own_folder)
        entries = [_intact_entry(store, entry, existing_names, own_folder) for entry in entries]
        if not entries:
            raise ObjectMissing(
                f"archive {store.url}: cannot restore partition "
                f"{saved_manifest.manifest.partition_id}, "
                "because all of its archived objects have expired"
            )
        if not existing_names:
            raise ObjectMissing(
                f"archive {store.url}: found no objects of partition "
                f"{saved_manifest.manifest.partition_id} of cluster "
                f"{UUID(bytes=saved_manifest.manifest.cluster_key)}. Hint: check that this is the "
                "URL of the archive of that cluster."
            )
        usable_entries = tuple(entries)
        if may_have_expired:
            usable_entries = tuple(
                dropwhile(lambda entry: entry.name not in existing_names, entries)
            )
        missing_entries = [entry for entry in usable_entries if entry.name not in existing_names]
        if missing_entries or not usable_entries:
            missing_entry = (missing_entries or entries)[0]
            raise ObjectMissing(
                f"archive {store.url}: object {missing_entry.name} with transactions "
                f"{missing_entry.first}..{missing_entry.last} does not exist. Hint: if the "
                "oldest transactions have expired since the backup, use --without-expired."
            )
        # The files of `write_manifest`, which are garbage if the restore fails.
        self.written_files: list[str] = []
        manifest = saved_manifest.manifest
        self.first = max(manifest.first, usable_entries[0].first)
        self._manifest = replace(
            manifest, first=self.first, pages=(), newest_objects=usable_entries
        )

    @property
    def last(self) -> TransactionId:
        """The last ID that can be restored."""
        return self._manifest.last

    def batch_end_at(self, last: TransactionId) -> BatchEnd | None:
        """Return the last batch end at or below an ID (rule 3); None if this end is before ID 0.

        Raises:
            BadRequest: the archive does not contain the ID, or no batch end at or below the ID.
            ObjectMissing, ArchiveUnavailable: the object cannot be read.
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        if last < self.first and self.first == 0:
            return None
        if not self.first <= last <= self.last:
            raise BadRequest(
                f"partition {self._manifest.partition_id}: expected one of the archived IDs "
                f"{self.first}..{self.last} as the last transaction to restore, found {last}"
            )
        with self._reader() as reader:
            _, (batch,) = reader.lineage(last, last, 1)
        if batch.last == last:
            return BatchEnd(last, batch.chain, batch.stamp_ms)
        return self.batch_end_at(TransactionId(batch.first - 1))

    def last_committed_until(self, time_ms: int) -> TransactionId:
        """Return the last ID that is known to be committed at or before a time.

        Raises:
            The errors of `batch_end_at`.
        """
        with self._reader() as reader:
            return reader.last_committed_before(time_ms + 1)

    @contextmanager
    def _reader(self) -> Iterator[ArchiveReader]:
        with closing(ArchiveCache(_CACHE_BYTES_MAX)) as cache:
            yield ArchiveReader.for_manifest(self._manifest, self._store, cache)

    def write_manifest(
        self, cluster_key: bytes, session_id: SessionId, nonce: bytes, end: BatchEnd
    ) -> NewManifest:
        """Write a manifest of the objects up to `end`, durably, below the key `cluster_key`.

        Session and nonce make the manifest's name unique.

        Raises:
            ArchiveUnavailable, ChecksumMismatch: the manifest was not written correctly.
            The errors of `batch_end_at`.
        """
        source = self._manifest
        entries = [each for each in source.newest_objects if each.first <= end.last]
        entries[-1] = self._truncate_entry(entries[-1], end)
        folder = manifests_folder(cluster_key, source.partition_id)
        versions = [manifest_version_of(each) or 0 for each in self._store.list_names(folder)]
        manifest = replace(
            source,
            cluster_key=cluster_key,
            version=max([source.version, *versions]) + 1,
            last=end.last,
            chain=end.chain,
            newest_objects=tuple(entries),
        )
        while (page := manifest.page_to_write) is not None:
            origin = FileOrigin(session_id, nonce, len(manifest.pages))
            name = page_name(folder, manifest.version, origin)
            self.written_files.append(name)
            write_and_verify(self._store, name, page.to_bytes())
            manifest = manifest.with_page(name, page)
        name = manifest_name(folder, manifest.version, FileOrigin(session_id, nonce, 0))
        data = manifest.to_bytes()
        self.written_files.append(name)
        write_and_verify(self._store, name, data)
        Manifest.from_bytes(data, name)
        return NewManifest(end.last, end.chain, end.stamp_ms, name, crc32(data))

    def check_objects_exist(self) -> None:
        """Check that the objects still exist (rule 5; blocking).

        Raises:
            ObjectMissing: an object does not exist any more.
            ArchiveUnavailable: the store did not execute a request.
        """
        existing_names = _existing_names(self._store, self._manifest.newest_objects)
        for entry in self._manifest.newest_objects:
            if entry.name not in existing_names:
                raise ObjectMissing(
                    f"archive {self._store.url}: object {entry.name} with transactions "
                    f"{entry.first}..{entry.last} was deleted while the restore ran. Hint: run "
                    "the restore again."
                )

    def _truncate_entry(self, entry: ObjectEntry, end: BatchEnd) -> ObjectEntry:
        """Return the entry of an object, with `end` as the last usable ID of the object."""
        with self._reader() as reader:
            _, batches = reader.lineage(entry.first, end.last, sys.maxsize)
        stamps = [batch.stamp_ms for batch in batches if batch.stamp_ms]
        return entry._replace(
            last=end.last,
            chain=end.chain,
            commit_ms_min=min(stamps, default=0),
            commit_ms_max=max(stamps, default=0),
        )


def _intact_entry(
    store: ArchiveStore, entry: ObjectEntry, existing: Collection[str], own_folder: str
) -> ObjectEntry:
    """Return the entry; if its object is missing or corrupt, return a replacement (rule 2).

    `own_folder` is the objects folder of the manifest's cluster. The cluster writes all its
    replacements there, even for objects in other folders.
    """
    folder, _, name = entry.name.rpartition("/")
    first, last, *_ = [*name.split("-"), ""]  # `file_names.py`
    starts = (f"{folder}/{first}-{last}-", f"{own_folder}/{entry.first}-{entry.last}-")
    other_names = [
        other_name
        for other_name in existing
        if other_name.startswith(starts) and other_name.endswith(".parquet")
    ]
    if entry.name in existing:
        other_names = [other_name for other_name in other_names if other_name != entry.name]
        if not other_names or crc32(store.read(entry.name)) == entry.file_crc:
            return entry
    for other_name in sorted(other_names):
        data = store.read(other_name)
        with suppress(BadFormat, ChecksumMismatch):
            archive_object = ArchiveObject(io.BytesIO(data), other_name)
            chains = {batch.last: batch.chain for batch in archive_object.verify()}
            if (archive_object.metadata.first, chains.get(entry.last)) == (
                entry.first,
                entry.chain,
            ):
                return entry._replace(name=other_name, file_bytes=len(data), file_crc=crc32(data))
    return entry


def _existing_names(store: ArchiveStore, entries: Iterable[ObjectEntry], *others: str) -> set[str]:
    """Return the names of all files in the folders of these objects and in folders `others`."""
    folders = {entry.name.rpartition("/")[0] for entry in entries} | {*others}
    return {name for folder in sorted(folders) for name in store.list_names(folder)}
