"""Finds the archived marks of partitions in the archive after ZooKeeper's data was lost.

After the loss, only the archive and the replicas' logs remain. A manifest states its last ID and
the chain hash at this ID. If the chosen log of a partition has the same chain hash at this ID, the
log and the archived transactions are equal up to this ID. So the newest manifest with this property
replaces the manifest that ZooKeeper had recorded.

Rules (docs/decisions/056):
    1. The manifests of a partition are tried from the newest to the oldest, by session, attempt and
       version. The later manifests of an owner replace its earlier ones. The first available ID of
       a later manifest is the same or higher (AR 7).
    2. A manifest fits if three conditions hold. Its checksums and pages are valid. All of its
       available objects exist and have the recorded size. At the manifest's last ID, the chosen log
       has the manifest's chain hash. A manifest that ZooKeeper never recorded may fit, too, because
       a storage had verified the objects of the manifest before the manifest was written.
    3. The manifest must not end below the start of any replica's log. Replicas remove only archived
       transactions. So a manifest that ends below this start is not the newest manifest, and lacks
       transactions.
    4. If manifests exist and none of them fits, the command rejects the partition, even if its logs
       are complete. If the command accepted the partition, the archiver would begin again at ID 0,
       and garbage collection would delete objects that backups need.
    5. If a newer manifest ends above the chosen log, the command rejects the partition. Only
       committed batches are archived, so this log lacks committed transactions. If the command used
       an older manifest, the first garbage collection would delete the only object that contains
       these transactions.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from waltz_core.archive.file_names import manifest_version_of, manifests_folder, origin_of
from waltz_core.archive.manifest import ObjectEntry
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli.archive.archive_status import archive_url_in
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ObjectMissing
from waltz_core.records.checksum import crc32
from waltz_core.records.record import BEFORE_FIRST, Chain, PartitionId, ReplicaId, TransactionId

ANSWER_TIMEOUT_S: Final = 10.0
DOCS_HINT: Final = "Hint: see docs/operations.md, section 'When ZooKeeper's data is lost'"

# After one of these errors, the search continues with the next manifest. Errors of a storage end
# the search.
_MANIFEST_ERRORS: Final = (ObjectMissing, BadFormat, ChecksumMismatch)

ShowProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The chosen log of a partition: the transactions after `start_id`, up to `last_id`.

    `request_chain` requests the chain hash of the log at an ID; the answer is None if no batch ends
    there. `replica_start_ids` contains the start of every replica's log.
    """

    partition_id: PartitionId
    start_id: TransactionId
    last_id: TransactionId
    request_chain: Callable[[TransactionId], Awaitable[Chain | None]]
    replica_start_ids: Mapping[ReplicaId, TransactionId]


class _CandidateManifest(NamedTuple):
    """A manifest that may fit (rule 2): its archived mark, and its available objects."""

    mark: ArchivedMark
    objects: list[ObjectEntry]


async def reported_archive_url(coordinator: Coordinator, show: ShowProgress) -> str:
    """Return the archive's URL that the storages report; empty if none reports one.

    Raises:
        BadConfig: the storages report different URLs.
    """
    from waltz_core.administration.cluster_probes import query_cluster  # noqa: PLC0415 - loads Arrow

    facts = await query_cluster(
        coordinator,
        timeout_s=ANSWER_TIMEOUT_S,
        on_progress=lambda _done, _count, progress_text: show(progress_text),
    )
    return archive_url_in(facts)


class ArchiveRecovery:
    """Finds archived marks in an archive; without a URL, each log must begin at transaction 0."""

    def __init__(self, url: str, cluster_key: bytes, on_skipped: ShowProgress) -> None:
        """`on_skipped` is called with a sentence for each newer manifest that does not fit.

        Raises:
            BadConfig: the URL names no archive.
        """
        self._store = ArchiveStore(url) if url else None
        self._cluster_key = cluster_key
        self._on_skipped = on_skipped

    async def find_archived_mark(self, log: RecoveredLog) -> ArchivedMark | None:
        """Return the archived mark of a partition; None if no transaction is archived.

        Raises:
            BadRequest: the partition is rejected (rules 3 to 5).
            ArchiveUnavailable: the object store does not answer.
            The error that a storage returns.
        """
        archive_text = "no archive is configured" if self._store is None else self._store.url
        names = await asyncio.to_thread(self._manifest_names, log.partition_id)
        problems: list[str] = []
        for name in names:
            try:
                candidate = await asyncio.to_thread(self._read_manifest, name, log.partition_id)
            except _MANIFEST_ERRORS as error:
                problems.append(f"{name}: {error}")
                continue
            if candidate.mark.last > log.last_id:
                raise BadRequest(
                    f"partition {log.partition_id}: the log of the storages ends at "
                    f"transaction {log.last_id}, but the archive ends at transaction "
                    f"{candidate.mark.last} (manifest {name} in {archive_text}). Hint: start the "
                    "storages of the other replicas. If their logs are lost, move this "
                    "manifest out of the archive; the transactions that only the archive has "
                    "are then lost"
                )
            problem = await self._manifest_problem(candidate, log)
            if problem:
                problems.append(f"{name}: {problem}")
                continue
            for problem_text in problems:
                self._on_skipped(
                    f"partition {log.partition_id}: a newer manifest is ignored: {problem_text}"
                )
            return candidate.mark
        replica, start = max(
            log.replica_start_ids.items(), key=lambda replica_start: replica_start[1]
        )
        if not names and start == BEFORE_FIRST:
            return None
        found_text = (
            (f"{len(names)} manifests, of which the newest cannot be used: {problems[0]}")
            if names
            else "none"
        )
        raise BadRequest(
            f"partition {log.partition_id}: the log of {replica} begins at transaction "
            f"{start + 1}, so the archive ({archive_text}) must have a manifest that ends at a "
            f"transaction in {max(start, log.start_id)}..{log.last_id}; found {found_text}. "
            f"{DOCS_HINT}"
        )

    def _manifest_names(self, partition_id: PartitionId) -> list[str]:
        """Return the names of a partition's manifests, the newest first (rule 1)."""
        if self._store is None:
            return []
        sortable_names = []
        for name in self._store.list_names(manifests_folder(self._cluster_key, partition_id)):
            version, origin = manifest_version_of(name), origin_of(name)
            if version is not None and origin is not None:
                sortable_names.append((origin.session_id, origin.attempt, version, name))
        return [name for *_, name in sorted(sortable_names, reverse=True)]

    async def _manifest_problem(self, candidate: _CandidateManifest, log: RecoveredLog) -> str:
        """Return the reason why a manifest does not fit; empty if it fits (rules 2 and 3).

        Raises the error that a storage returns.
        """
        last, chain = candidate.mark.last, candidate.mark.chain
        last_min = max(log.start_id, *log.replica_start_ids.values())
        if not last_min <= last <= log.last_id:
            return f"expected a last transaction in {last_min}..{log.last_id}, found {last}"
        log_chain = await log.request_chain(last)
        if log_chain != chain:
            chain_text = "no batch that ends there" if log_chain is None else log_chain.hex()
            return (
                f"it ends at transaction {last} with chain hash {chain.hex()}, but the log has "
                f"{chain_text}"
            )
        return await asyncio.to_thread(self._objects_problem, candidate.objects)

    def _read_manifest(self, name: str, partition_id: PartitionId) -> _CandidateManifest:
        """Read the head and the pages of a manifest; the call blocks.

        Raises:
            ObjectMissing, BadFormat, ChecksumMismatch: a file is missing or corrupt.
        """
        assert self._store is not None
        saved_manifest = SavedManifest.read(self._store, name, crc32(self._store.read(name)))
        manifest, entries = saved_manifest.manifest, saved_manifest.entries()
        identity = manifest.cluster_key, manifest.partition_id
        if identity != (self._cluster_key, partition_id):
            raise BadFormat(
                f"expected the manifest of partition {partition_id} of this cluster, found "
                f"the manifest of partition {identity[1]} of cluster {identity[0].hex()}"
            )
        if entries and entries[-1].chain != manifest.chain:
            raise BadFormat(
                f"expected chain hash {manifest.chain.hex()} of its last object, found "
                f"{entries[-1].chain.hex()}"
            )
        available = [entry for entry in entries if entry.last >= manifest.first]
        mark = ArchivedMark(
            manifest.last,
            manifest.chain,
            available[-1].commit_ms_max if available else 0,
            manifest.first,
            saved_manifest.file_crc,
            name,
        )
        return _CandidateManifest(mark, available)

    def _objects_problem(self, entries: list[ObjectEntry]) -> str:
        """Return a text about an object that is missing or has a wrong size; empty without one."""
        assert self._store is not None
        folders = {each.name.rpartition("/")[0]: None for each in entries}
        sizes = {
            file.name: file.byte_count for each in folders for file in self._store.list_files(each)
        }
        for each in entries:
            size_bytes = sizes.get(each.name)
            if size_bytes != each.file_bytes:
                found_text = "none" if size_bytes is None else f"one of {size_bytes} bytes"
                return (
                    f"expected object {each.name} (transactions {each.first}..{each.last}) "
                    f"with {each.file_bytes} bytes, found {found_text}"
                )
        return ""
