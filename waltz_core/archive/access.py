"""The archive of a storage process: its store, uploads to it, and readers of it; all calls block.

It alone imports the Parquet library into a storage, and only where an archive is configured.
"""

from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from waltz_core.archive.upload_job import UploadJob, UploadOutcome
from waltz_core.errors import ArchiveUnavailable, WaltzError
from waltz_core.records.record import PartitionId

if TYPE_CHECKING:
    from waltz_core.archive.archive_cache import ArchiveCache
    from waltz_core.archive.reader import ArchiveReader
    from waltz_core.archive.store import ArchiveStore

# Parts of the archive that were read and may be read again soon: row groups, indexes, manifests.
CACHE_BYTES_MAX: Final = 128 * 1024 * 1024


class ArchiveAccess:
    """The archive at a URL; `open` comes first."""

    def __init__(self, url: str, cluster_key: bytes, read_ahead: Executor) -> None:
        """`read_ahead` has the threads for reads of what will probably be requested next."""
        self._read_ahead = read_ahead
        self._url = url
        self._cluster_key = cluster_key
        self._store: ArchiveStore | None = None
        self._cache: ArchiveCache | None = None
        self._readers: dict[PartitionId, ArchiveReader] = {}

    def open(self) -> None:
        """Open the store; raises BadConfig if the URL names none."""
        from waltz_core.archive.archive_cache import ArchiveCache  # noqa: PLC0415 - see the module
        from waltz_core.archive.store import ArchiveStore  # noqa: PLC0415 - see the module

        self._store = ArchiveStore(self._url)
        self._cache = ArchiveCache(CACHE_BYTES_MAX, self._read_ahead)

    def upload(self, job: UploadJob) -> UploadOutcome:
        """Carry out a job; return its error rather than raise it."""
        from waltz_core.archive.upload import upload  # noqa: PLC0415 - see the module

        assert self._store is not None
        try:
            return upload(self._store, self._cluster_key, job)
        except WaltzError as error:
            return error

    def reader(
        self, partition_id: PartitionId, manifest: str, manifest_crc: int
    ) -> "ArchiveReader":
        """Return the reader of a partition's archive by a manifest; one at a time is kept.

        Raises:
            ArchiveUnavailable: no archive is configured.
        """
        from waltz_core.archive.reader import ArchiveReader  # noqa: PLC0415 - see the module

        if self._store is None or self._cache is None:
            raise ArchiveUnavailable(
                f"partition {partition_id}: these ids are in the archive, and this storage has no "
                "`archive_url`"
            )
        found = self._readers.get(partition_id)
        if found is None or found.manifest_name != manifest:
            found = ArchiveReader(self._store, manifest, manifest_crc, self._cache)
            self._readers[partition_id] = found
        return found
