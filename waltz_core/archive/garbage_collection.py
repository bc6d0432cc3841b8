"""Deletes garbage from a partition's archive: files that no manifest lists or will list.

Each attempt to archive a range leaves garbage. A successful attempt leaves the manifest that it has
replaced, and a failed attempt leaves all its files. The owner of the partition requests a
collection, and a storage executes it.

Rules (docs/decisions/047, AR 16):
    1. The request names the manifest that ZooKeeper records. This manifest, its pages and its
       objects are not deleted. If one of these files is missing or wrong, the store has lost files
       or contains another archive, and the collection deletes nothing.
    2. Files of sessions before the owner's session are deleted if rule 1 permits it. When the owner
       claimed its session in ZooKeeper, it fenced the writes of all earlier sessions. So no
       manifest will list these files.
    3. Files of the owner's own session are deleted only if their attempt number is below the
       attempt number of the request. The owner requests a collection when all lower attempts have
       ended, and none of them has a write to ZooKeeper whose outcome is unknown.
    4. If the store contains a file of a later session, or of another owner of the same session, the
       collection deletes nothing. Such a file has one of three causes: ZooKeeper was rolled back,
       another cluster uses the archive, or a later owner has fenced this owner.
    5. A file whose name contains no attempt (`file_names.py`) is counted, but not deleted.
    6. A replaced manifest is kept for `REPLACED_GRACE_MS` after the next version was written.
       During this time, clients and lagging replicas may still use the name of the replaced
       manifest. After this time, they find that its file is missing, and need the name of the
       present manifest (`reader.py`, rule 3).
    7. While a restored cluster uses objects of this cluster (`pins.py`), no object is deleted. The
       restored cluster may list objects that expiry has removed from this cluster's manifest. A
       restore may begin during a collection, so the pins are read again before each object is
       deleted.
    8. Objects that have expired are kept until the grace period is over (`manifest.py`, rule 4).
    9. The collection deletes nothing if a later session has written a lower version of the manifest
       than an earlier session. Example: session 5 has written version 12, and session 6 has written
       version 10. A new manifest has the version after the recorded version, so a lower version is
       possible only if ZooKeeper was rolled back. After a rollback, backups may list objects of
       version 12. Until an operator deletes the manifest with version 12, all files stay, and the
       rollback can be detected.

The collection of a fenced owner may still run while a later owner works. It deletes no file that
the later owner needs:
    - The later owner's new files belong to a later session, and are not deleted.
    - The later owner also needs the files that the recorded manifest listed at the time of the
      later owner's claim. Each of these files is listed by the manifest of the request (rule 1), or
      belongs to a later attempt of the fenced owner (rule 3).
"""

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from waltz_core.archive.file_names import (
    FileOrigin,
    manifest_version_of,
    manifests_folder,
    objects_folder,
    origin_of,
)
from waltz_core.archive.manifest import Manifest, RecordedManifest, decode_page
from waltz_core.archive.pins import is_pinned
from waltz_core.errors import BadRequest, ObjectMissing, WaltzError
from waltz_core.records.record import PartitionId, SessionId
from waltz_core.values import value

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore, ListedFile

REPLACED_GRACE_MS: Final = 3_600_000
# The maximum number of deletions of one collection. Other work on the store waits for a collection,
# so a collection must be short.
DELETIONS_MAX: Final = 200


@value(frozen=True, slots=True)
class GarbageCollectionJob:
    """A request of an owner to collect garbage, with the manifest that ZooKeeper records.

    All attempts of the owner below `attempt` have ended (rule 3).
    """

    session_id: SessionId
    nonce: bytes
    attempt: int
    recorded_manifest: RecordedManifest

    @property
    def partition_id(self) -> PartitionId:
        """The partition whose files are collected."""
        return self.recorded_manifest.partition_id


class CollectedGarbage(NamedTuple):
    """The number of deleted files, and their bytes.

    `unknown_count` is the number of files whose names contain no attempt. `has_more` is set if
    there is more garbage.
    """

    file_count: int
    byte_count: int
    unknown_count: int
    has_more: bool


GarbageCollectionOutcome: TypeAlias = CollectedGarbage | WaltzError


def collect_garbage(
    store: "ArchiveStore",
    cluster_key: bytes,
    job: GarbageCollectionJob,
    *,
    now_ms: int,
    on_progress: Callable[[], None] = lambda: None,
) -> CollectedGarbage:
    """Delete at most `DELETIONS_MAX` files of garbage (blocking).

    `on_progress` is called after each call of the store.

    Raises:
        ArchiveUnavailable: the store did not execute a request; some files may be deleted.
        ObjectMissing, BadFormat, ChecksumMismatch: the archive does not match the recorded manifest
            (rule 1).
        BadRequest: there are files of a later session or another owner (rule 4), or ZooKeeper was
            rolled back (rule 9).
    """
    manifest = job.recorded_manifest.read(store, cluster_key)
    names_to_keep = _names_to_keep(store, job, manifest, now_ms, on_progress)
    folders = (
        objects_folder(cluster_key, job.partition_id),
        manifests_folder(cluster_key, job.partition_id),
    )
    files: list[ListedFile] = []
    for folder in folders:
        files += store.list_files(folder)
        on_progress()
    _check_listed_files_exist(names_to_keep, files, folders)
    _check_versions(files)
    deletable_folders = folders[1:] if is_pinned(store, cluster_key) else folders  # rule 7
    on_progress()
    replaced_names = _recently_replaced(files, now_ms)
    garbage: list[ListedFile] = []
    unknown_count = 0
    for file in files:
        origin = origin_of(file.name)
        if origin is None:
            unknown_count += 1
            continue
        _check_origin(file.name, origin, job)
        is_ended = origin.session_id < job.session_id or origin.attempt < job.attempt
        is_garbage = is_ended and file.name not in names_to_keep and file.name not in replaced_names
        if is_garbage and file.name.startswith(deletable_folders):
            garbage.append(file)
    sizes: list[int] = []
    for file in garbage[:DELETIONS_MAX]:
        if file.name.startswith(folders[0]):
            is_kept = is_pinned(store, cluster_key)  # rule 7
            on_progress()
            if is_kept:
                continue
        store.delete(file.name)
        sizes.append(file.byte_count)
        on_progress()
    return CollectedGarbage(len(sizes), sum(sizes), unknown_count, len(garbage) > DELETIONS_MAX)


def _names_to_keep(
    store: "ArchiveStore",
    job: GarbageCollectionJob,
    manifest: Manifest,
    now_ms: int,
    on_progress: Callable[[], None],
) -> set[str]:
    """Return the names of the manifest, pages and objects that must be kept (rules 1 and 8)."""
    entries = list(manifest.newest_objects)
    names = {job.recorded_manifest.name}
    for page_entry in manifest.pages:
        page = decode_page(page_entry, store.read(page_entry.name))
        names.add(page_entry.name)
        entries += page.entries
        on_progress()
    end = manifest.deletable_below(now_ms)
    return names | {entry.name for entry in entries if entry.last >= end}


def _check_listed_files_exist(
    listed: set[str], files: "list[ListedFile]", folders: tuple[str, str]
) -> None:
    """Raise ObjectMissing if the store lacks a listed file of this partition (rule 1)."""
    own_files = {name for name in listed if name.rpartition("/")[0] in folders}
    missing = sorted(own_files - {file.name for file in files})
    if missing:
        raise ObjectMissing(
            f"garbage collection of the archive stopped: of the {len(own_files)} files that "
            f"the manifest lists in {' and '.join(folders)}, {len(missing)} do not exist, "
            f"such as {missing[0]}"
        )


class _ManifestVersion(NamedTuple):
    """A manifest, complete or not, with the session and version in its name."""

    session_id: SessionId
    version: int
    name: str


def _check_versions(files: "list[ListedFile]") -> None:
    """Raise BadRequest if the versions show that ZooKeeper was rolled back (rule 9)."""
    manifest_versions = []
    for file in files:
        version, origin = manifest_version_of(file.name), origin_of(file.name)
        if version is not None and origin is not None:
            manifest_versions.append(_ManifestVersion(origin.session_id, version, file.name))
    newest: _ManifestVersion | None = None  # the newest manifest of all earlier sessions
    for _, group in groupby(sorted(manifest_versions), key=lambda head: head.session_id):
        session_heads = list(group)
        if newest is not None and session_heads[0].version < newest.version:
            raise BadRequest(
                "garbage collection of the archive stopped, and nothing is deleted: the manifest "
                f"version decreased from {newest.version} (session {newest.session_id}, "
                f"{newest.name}) to {session_heads[0].version} (session "
                f"{session_heads[0].session_id}, {session_heads[0].name}). ZooKeeper was rolled "
                "back, so backups may need files that ZooKeeper no longer records. Hint: read "
                "docs/archive.md, section 'Garbage, and stores that hang'."
            )
        newest = max(session_heads[-1], newest or session_heads[-1], key=lambda head: head.version)


def _recently_replaced(files: "list[ListedFile]", now_ms: int) -> set[str]:
    """Return the names of manifests whose next version was written recently (rule 6)."""
    version_by_file = {file: manifest_version_of(file.name) for file in files}
    written_ms: dict[int, int] = {}
    for file, version in version_by_file.items():
        if version is not None:
            written_ms[version] = max(file.modified_ms, written_ms.get(version, 0))
    return {
        file.name
        for file, version in version_by_file.items()
        if version is not None and now_ms - written_ms.get(version + 1, 0) < REPLACED_GRACE_MS
    }


def _check_origin(name: str, origin: FileOrigin, job: GarbageCollectionJob) -> None:
    """Raise BadRequest if a file belongs to a later session or another owner (rule 4)."""
    is_own = (origin.session_id, origin.nonce) == (job.session_id, job.nonce)
    if origin.session_id >= job.session_id and not is_own:
        raise BadRequest(
            "garbage collection of the archive stopped: expected no files of other "
            f"owners since session {job.session_id}, found {name}. Either this server has lost "
            "the partition to a later owner, or ZooKeeper was rolled back, or another cluster "
            "with the same cluster key uses this archive. Hint: read docs/archive.md, section "
            "'Garbage, and stores that hang'."
        )
