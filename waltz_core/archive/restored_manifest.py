"""The manifest of a restored partition: that of a backup, up to a batch end; all calls block.

The objects stay where they are, below the key of the cluster that wrote them: the restored cluster
lists them in a manifest of its own.

Rules (docs/decisions/047, "Backup and restore"):
    1. The saved manifest is verified (`saved_manifest.py`).
    2. Each object exists, except for the oldest ones, which expiry may have deleted meanwhile: then
       the partition begins after them.
    3. The object that holds the end is read. Its chain is verified from its first to its last
       batch, and must be the manifest's, so the end has the chain of the source's log.
    4. While a prefix has a pin, no object in it is deleted, also by its own cluster. `pin` comes
       before the check of rule 2.
"""

from bisect import bisect_left
from itertools import dropwhile
from typing import Final, NamedTuple
from uuid import UUID

from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.archive.object_index import ObjectIndex
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import write_read_back
from waltz_core.archive.upload_job import NewManifest
from waltz_core.errors import BadRequest, ObjectMissing
from waltz_core.records.checksum import crc32
from waltz_core.records.record import Chain, SessionId, TransactionId

_PINS: Final = "pins"


class BatchEnd(NamedTuple):
    """The end of a batch of an archived log: its ID, the chain and the commit stamp there."""

    last: TransactionId
    chain: Chain
    stamp_ms: int


class RestoredRange:
    """The objects of a saved manifest that exist, and the ends at which a log may be restored."""

    def __init__(self, store: ArchiveStore, saved: SavedManifest) -> None:
        """Check the manifest and its objects (rules 1 and 2).

        Raises:
            ObjectMissing: an object does not exist, and it is not one of the oldest.
            ArchiveUnavailable: the store did not carry out a request.
            BadFormat, ChecksumMismatch: with the name of the file.
        """
        self._store = store
        self._manifest = saved.manifest
        entries = saved.entries()
        folders = {each.name.rpartition("/")[0] for each in entries}
        existing = {name for folder in sorted(folders) for name in store.names(folder)}
        self._entries = list(dropwhile(lambda each: each.name not in existing, entries))
        missing = [each for each in self._entries if each.name not in existing]
        if missing or not self._entries:
            lost = (missing or entries)[0]
            raise ObjectMissing(
                f"archive {store.url}: object {lost.name}, IDs {lost.first}..{lost.last}, does not "
                "exist"
            )
        self.first = max(self._manifest.first, self._entries[0].first)
        self._indexes: dict[str, ObjectIndex] = {}

    @property
    def last(self) -> TransactionId:
        """The last ID."""
        return self._manifest.last

    @property
    def sources(self) -> list[bytes]:
        """The keys of the clusters that wrote the objects."""
        return sorted({self._manifest.writer_of(each) for each in self._entries})

    def end_at(self, last: TransactionId) -> BatchEnd | None:
        """Return the last batch end at or below an ID (rule 3); None if it is before ID 0.

        Raises:
            BadRequest: the archive does not have it.
            ObjectMissing, ArchiveUnavailable: the object cannot be read.
            BadFormat, ChecksumMismatch: with the name of the object.
        """
        if last < self.first and self.first == 0:
            return None
        if not self.first <= last <= self.last:
            raise BadRequest(
                f"partition {self._manifest.partition_id}: expected an end in {self.first}.."
                f"{self.last}, the IDs in the archive, found {last}"
            )
        entry = self._entries[bisect_left(self._entries, last, key=lambda each: each.last)]
        _, (batch,) = self._index(entry).entries(last, last)
        if batch.last == last:
            return BatchEnd(last, batch.chain, batch.stamp_ms)
        return self.end_at(TransactionId(batch.first - 1))

    def last_until(self, time_ms: int) -> TransactionId:
        """Return the last ID with this commit time or an earlier one; raises as `end_at`.

        Transactions without a commit time belong to those before them.
        """
        for entry in self._entries:
            if entry.commit_ms_max > time_ms:
                later = self._index(entry).first_at_or_after(time_ms + 1)
                if later is not None and later <= entry.last:
                    return TransactionId(later - 1)
        return self.last

    def write(
        self, cluster_key: bytes, session_id: SessionId, nonce: bytes, end: BatchEnd
    ) -> NewManifest:
        """Write a manifest of the objects up to an end, below another key; it is durable.

        Session and nonce make its name unique.

        Raises:
            ArchiveUnavailable, ChecksumMismatch: it was not written as it should be.
        """
        entries = [each for each in self._entries if each.first <= end.last]
        entries[-1] = entries[-1]._replace(last=end.last, chain=end.chain)
        source = self._manifest
        made = Manifest(
            cluster_key,
            source.partition_id,
            source.version + 1,
            self.first,
            end.last,
            end.chain,
            newest=tuple(entries),
        )
        folder = f"{UUID(bytes=cluster_key)}/{source.partition_id}/manifests"
        prefix = f"{folder}/{made.version}-{session_id}-{nonce.hex()}"
        while (page := made.next_page) is not None:
            name = f"{prefix}-{len(made.pages)}-page.json"
            write_read_back(self._store, name, page.to_bytes())
            made = made.with_page(name, page)
        name, data = f"{prefix}-0.json", made.to_bytes()
        write_read_back(self._store, name, data)
        Manifest.from_bytes(data, name)
        return NewManifest(end.last, end.chain, end.stamp_ms, name, crc32(data))

    def _index(self, entry: ObjectEntry) -> ObjectIndex:
        found = self._indexes.get(entry.name)
        if found is None:
            with self._store.open(entry.name) as source:
                found = ObjectIndex(ArchiveObject(source, entry.name))
            found.check(self._manifest, entry)
            self._indexes[entry.name] = found
        return found


def pin(store: ArchiveStore, source_key: bytes, cluster_key: bytes) -> str | None:
    """Pin the objects of a cluster for a restored one (rule 4).

    Return the name of the pin, or None if it existed.

    Raises:
        ArchiveUnavailable: it was not written.
    """
    folder = f"{UUID(bytes=source_key)}/{_PINS}"
    name = f"{folder}/{UUID(bytes=cluster_key)}"
    if name in store.names(folder):
        return None
    store.write(name, b"")
    return name


def is_pinned(store: ArchiveStore, cluster_key: bytes) -> bool:
    """Whether a restored cluster uses objects of this one, so that none may be deleted (rule 4)."""
    return bool(store.names(f"{UUID(bytes=cluster_key)}/{_PINS}"))
