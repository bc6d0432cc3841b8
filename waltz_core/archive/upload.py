"""Writes a manifest for a new object, for a replaced object or for an expiry; all calls block.

An upload writes a range of a log as an object, and a manifest that lists it. A replacement writes
an object, and a manifest that lists this object instead of the replaced one. An expiry writes a
manifest with a greater first available ID.

Rules (docs/decisions/047):
    1. No file is overwritten: each combination of session, nonce and attempt occurs once
       (`file_names.py`).
    2. The object is read back. Its bytes must be the bytes that were written, because no other
       check covers statistics and headers. Its records, batches and chain hashes must be those of
       the log (AR 4).
    3. The new manifest is read back. It lists all objects of the current manifest. The current
       manifest must end directly before the range (AR 5).
    4. A failure leaves the current manifest as it is. Files of a failed attempt are garbage.
    5. Only complete objects expire, the oldest first. Commit times never decrease, so all objects
       before an expired object are at least as old. The first available ID is at most the ID after
       the archived mark. Local logs and new objects continue at that ID.
    6. A corrupt or missing object is replaced by a new object with the same IDs, and with the same
       chain hash at its end. This chain hash covers all preceding batches (AR 5). The old object is
       not changed. If a page of the manifest lists the old object, a new page replaces this page.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from waltz_core.archive.file_names import (
    FileOrigin,
    manifest_name,
    manifests_folder,
    object_name,
    objects_folder,
    page_name,
)
from waltz_core.archive.manifest import Manifest, ManifestPage, ObjectEntry, PageEntry, decode_page
from waltz_core.archive.manifest_jobs import (
    BatchRun,
    ExpiryJob,
    ManifestAfterExpiry,
    NewManifest,
    ReplacedObject,
    UploadJob,
)
from waltz_core.archive.objects import ArchivedRecords, ArchiveObject, ObjectMetadata, ObjectWriter
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import Buffer
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, TransactionId

ROW_GROUP_BYTES: Final = 8 * 1024 * 1024


def upload(
    store: ArchiveStore,
    cluster_key: bytes,
    job: UploadJob,
    on_progress: Callable[[], None] = lambda: None,
) -> NewManifest:
    """Write the object and the manifest of a job; both are durable and verified on return.

    `on_progress` is called after each step, which consists of one or a few calls of the store.

    Raises:
        ArchiveUnavailable, ObjectMissing: the store did not execute a request.
        BadFormat, ChecksumMismatch: a file does not have the written bytes, or the current manifest
            does not end before the range.
    """
    current = _read_current_manifest(store, cluster_key, job)
    on_progress()
    origin = FileOrigin(job.session_id, job.nonce, job.attempt)
    if job.replaced_object is not None:
        manifest = _replace_object(store, current, job, job.replaced_object, origin, on_progress)
        if manifest is None:
            return NewManifest(current.last, current.chain, job.end.stamp_ms, "", 0)
    else:
        manifest = _add_object(store, current, job, origin, on_progress)
    folder = manifests_folder(cluster_key, job.partition_id)
    name, data = manifest_name(folder, manifest.version, origin), manifest.to_bytes()
    write_and_verify(store, name, data)
    manifest = Manifest.from_bytes(data, name)
    return NewManifest(manifest.last, manifest.chain, job.end.stamp_ms, name, crc32(data))


def _add_object(
    store: ArchiveStore,
    current: Manifest,
    job: UploadJob,
    origin: FileOrigin,
    on_progress: Callable[[], None],
) -> Manifest:
    """Write the object; return the next manifest, with this object at its end."""
    entry = _write_object(store, current.cluster_key, job, origin, on_progress)
    on_progress()
    page = current.page_to_write
    if page is not None:
        current = current.with_page(_write_page(store, current, page, origin), page)
        on_progress()
    return current.with_object(entry)


def _replace_object(
    store: ArchiveStore,
    current: Manifest,
    job: UploadJob,
    replaced: ReplacedObject,
    origin: FileOrigin,
    on_progress: Callable[[], None],
) -> Manifest | None:
    """Write the new object; return the next manifest, without the replaced object (rule 6).

    Return None if the object was already replaced.
    """
    page_entry, entries = current.page_containing(job.first), current.newest_objects
    if page_entry is not None:
        entries = decode_page(page_entry, store.read(page_entry.name)).entries
        on_progress()
    content_key = (job.first, job.end.last, job.end.chain)
    old_entry = next((entry for entry in entries if entry[1:4] == content_key), None)
    if old_entry is None:
        raise BadFormat(
            f"manifest {job.manifest}: expected an object with transactions "
            f"{job.first}..{job.end.last} and the chain hash {job.end.chain.hex()} of this "
            "log, found none"
        )
    if old_entry.name != replaced.name:
        return None
    new_entry = _write_object(store, current.cluster_key, job, origin, on_progress)
    on_progress()
    new_entries = tuple(new_entry if entry is old_entry else entry for entry in entries)
    if page_entry is None:
        return current.with_newest_objects(new_entries)
    page = ManifestPage(new_entries)
    name = _write_page(store, current, page, origin)
    on_progress()
    return current.with_replaced_page(page_entry, name, page)


def _write_page(
    store: ArchiveStore, current: Manifest, page: ManifestPage, origin: FileOrigin
) -> str:
    """Write a page of the next manifest; return its name."""
    folder = manifests_folder(current.cluster_key, current.partition_id)
    name, data = page_name(folder, current.version + 1, origin), page.to_bytes()
    write_and_verify(store, name, data)
    ManifestPage.from_bytes(data, name)
    return name


def expire(
    store: ArchiveStore,
    cluster_key: bytes,
    job: ExpiryJob,
    *,
    now_ms: int,
    on_progress: Callable[[], None] = lambda: None,
) -> ManifestAfterExpiry:
    """Write the manifest of an expiry; it is durable and verified on return (rule 5).

    Raises:
        The errors of `upload`.
    """
    current = job.recorded_manifest.read(store, cluster_key)
    on_progress()
    before_ms = job.before_ms
    if job.retention_ms:
        before_ms = max(before_ms, now_ms - job.retention_ms)

    def is_old(entry: PageEntry | ObjectEntry) -> bool:
        return entry.last < job.before or 0 < entry.commit_ms_max < before_ms

    first = TransactionId(_last_expired_id(store, current, is_old, on_progress) + 1)
    manifest = current.with_expiry(first, now_ms)
    if (manifest.first, manifest.pages, manifest.newest_objects) == (
        current.first,
        current.pages,
        current.newest_objects,
    ):
        return ManifestAfterExpiry(first, "", 0)
    folder = manifests_folder(cluster_key, job.partition_id)
    origin = FileOrigin(job.session_id, job.nonce, job.attempt)
    name, data = manifest_name(folder, manifest.version, origin), manifest.to_bytes()
    write_and_verify(store, name, data)
    Manifest.from_bytes(data, name)
    return ManifestAfterExpiry(first, name, crc32(data))


def _last_expired_id(
    store: ArchiveStore,
    current: Manifest,
    is_old: Callable[[PageEntry | ObjectEntry], bool],
    on_progress: Callable[[], None],
) -> TransactionId:
    """Return the last ID of the newest object that has expired, now or earlier (rule 5)."""
    last = TransactionId(current.first - 1)
    for page_entry in current.pages:
        if page_entry.last <= last:
            continue
        if is_old(page_entry):
            last = page_entry.last
            continue
        page = decode_page(page_entry, store.read(page_entry.name))
        on_progress()
        last = max([last, *(entry.last for entry in page.entries if is_old(entry))])
        if page_entry.commit_ms_max:
            return last  # if a page has no times, only a later page shows its age
    return max([last, *(entry.last for entry in current.newest_objects if is_old(entry))])


def _read_current_manifest(store: ArchiveStore, cluster_key: bytes, job: UploadJob) -> Manifest:
    """Read the current manifest; return an empty one if nothing is archived (rules 3 and 6)."""
    if job.manifest:
        return job.recorded_manifest.read(store, cluster_key)
    start = TransactionId(0)
    empty_manifest = Manifest(cluster_key, job.partition_id, 0, start, BEFORE_FIRST, GENESIS_CHAIN)
    job.recorded_manifest.check_matches(empty_manifest, cluster_key)
    return empty_manifest


def _write_object(
    store: ArchiveStore,
    cluster_key: bytes,
    job: UploadJob,
    origin: FileOrigin,
    on_progress: Callable[[], None],
) -> ObjectEntry:
    """Write the object, read it back, and return its entry (rule 2)."""
    end = job.end
    metadata = ObjectMetadata(
        cluster_key, job.partition_id, job.first, end.last, job.chain_before, end.chain
    )
    folder = objects_folder(cluster_key, job.partition_id)
    name = object_name(folder, job.first, end.last, origin)
    with store.open_sink(name) as target:
        sink = _CrcSink(target)
        writer = ObjectWriter(sink, metadata)
        for group in _split_into_row_groups(job.runs):
            writer.write_row_group(ArchivedRecords(*run) for run in group)
            on_progress()
        writer.close()
    on_progress()
    data = store.read(name)
    if crc32(data) != sink.crc:
        raise ChecksumMismatch(
            f"archived object {name}: expected CRC {sink.crc:08x} (of the written bytes), "
            f"found {crc32(data):08x} in the bytes that were read back"
        )
    archive_object = ArchiveObject(data, name)
    batches = [batch for run in job.runs for batch in run.batches]
    if archive_object.metadata != metadata or list(archive_object.verify()) != batches:
        raise ChecksumMismatch(f"archived object {name}: its batches differ from those of the log")
    stamps = [written_batch.stamp_ms for written_batch in batches if written_batch.stamp_ms]
    return ObjectEntry(
        name,
        job.first,
        end.last,
        end.chain,
        file_bytes=len(data),
        file_crc=sink.crc,
        record_bytes=job.record_bytes,
        commit_ms_min=min(stamps, default=0),
        commit_ms_max=max(stamps, default=0),
    )


class _CrcSink:
    """Passes bytes on to a file, and computes their CRC-32."""

    closed = False

    def __init__(self, target: Any) -> None:  # noqa: ANN401 - a file of pyarrow, or Python's
        self._target = target
        self.crc = 0

    def write(self, data: Buffer) -> None:
        """Write bytes to the file."""
        self._target.write(data)
        self.crc = crc32(data, self.crc)


def _split_into_row_groups(runs: tuple[BatchRun, ...]) -> Iterator[list[BatchRun]]:
    """Group runs of batches into row groups of about `ROW_GROUP_BYTES`."""
    group: list[BatchRun] = []
    for run in runs:
        group.append(run)
        if sum(len(grouped_run.records) for grouped_run in group) >= ROW_GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def write_and_verify(store: ArchiveStore, name: str, data: bytes) -> None:
    """Write a manifest's head or page, and check that the store returns the same bytes.

    Raises ArchiveUnavailable, or ChecksumMismatch if the bytes differ.
    """
    store.write(name, data)
    if store.read(name) != data:
        raise ChecksumMismatch(
            f"manifest {name}: expected the written bytes when it was read back, found other bytes"
        )
