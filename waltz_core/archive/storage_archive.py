"""The archive of a storage process: its store, changes and readers; all calls block.

Only this file imports the Parquet library into a storage, and only if an archive is configured.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from waltz_core.archive.garbage_collection import (
    GarbageCollectionJob,
    GarbageCollectionOutcome,
    collect_garbage,
)
from waltz_core.archive.manifest_jobs import ExpiryJob, ExpiryOutcome, UploadJob, UploadOutcome
from waltz_core.errors import ARCHIVE_DAMAGE_ERRORS, ArchiveUnavailable, BeforeLogStart, WaltzError
from waltz_core.records.record import PartitionId, TransactionId

if TYPE_CHECKING:
    from waltz_core.archive.archive_cache import ArchiveCache
    from waltz_core.archive.reader import ArchiveReader
    from waltz_core.archive.store import ArchiveStore

# The maximum size of cached parts of the archive: row groups, indexes and manifests that may be
# read again soon.
CACHE_BYTES_MAX: Final = 128 * 1024 * 1024
# The minimum time between two reports of progress. An upload calls the store hundreds of times.
_PROGRESS_INTERVAL_S: Final = 1.0
# The maximum number of locations of damage that are remembered.
DAMAGED_LOCATIONS_MAX: Final = 100


class StorageArchive:
    """The archive at a URL; `open` must be called first.

    The threads of `read_ahead` read row groups that will probably be requested next. `on_progress`
    is called on the thread that runs an upload, an expiry or a collection, between calls of the
    store. `bytes_per_s` limits the rate of this thread; 0 means no limit.
    """

    def __init__(
        self,
        url: str,
        cluster_key: bytes,
        read_ahead: Executor,
        *,
        on_progress: Callable[[], None] = lambda: None,
        bytes_per_s: int = 0,
    ) -> None:
        self._read_ahead = read_ahead
        self._url = url
        self._cluster_key = cluster_key
        self._bytes_per_s = bytes_per_s
        self._store: ArchiveStore | None = None
        # The same store with the rate limit, for uploads, expiry and garbage collection.
        self._rate_limited_store: ArchiveStore | None = None
        # The last error, and the number of failed attempts since the last successful attempt.
        self.failure: WaltzError | None = None
        self.failure_count = 0
        self._cache: ArchiveCache | None = None
        self._readers: dict[PartitionId, ArchiveReader] = {}
        self._on_progress = on_progress
        self._last_report_s = 0.0
        # Missing or corrupt files that reads have found, by the partition and the first ID of the
        # read.
        self._damage: dict[tuple[int, int], str] = {}

    def open(self) -> None:
        """Open the store; raises BadConfig if the URL is not valid."""
        # Import all modules that are used later, because other code may be installed while this
        # process runs.
        from waltz_core.archive import reader, upload  # noqa: F401, PLC0415 - see the module
        from waltz_core.archive.archive_cache import ArchiveCache  # noqa: PLC0415 - see the module
        from waltz_core.archive.store import ArchiveStore, RateLimit  # noqa: PLC0415 - see the module

        self._store = self._rate_limited_store = ArchiveStore(self._url)
        if self._bytes_per_s:
            self._rate_limited_store = ArchiveStore(
                self._url, RateLimit(self._bytes_per_s, self._note_progress)
            )
        self._cache = ArchiveCache(CACHE_BYTES_MAX, self._read_ahead)

    def upload(self, job: UploadJob) -> UploadOutcome:
        """Execute an upload; return its error instead of raising it."""
        from waltz_core.archive.upload import upload  # noqa: PLC0415 - see the module

        assert self._rate_limited_store is not None
        try:
            new_manifest = upload(
                self._rate_limited_store, self._cluster_key, job, self._note_progress
            )
        except WaltzError as error:
            self.failure, self.failure_count = error, self.failure_count + 1
            return error
        self.failure, self.failure_count = None, 0
        return new_manifest

    def collect_garbage(self, job: GarbageCollectionJob) -> GarbageCollectionOutcome:
        """Execute a collection; return its error instead of raising it."""
        assert self._rate_limited_store is not None
        try:
            return collect_garbage(
                self._rate_limited_store,
                self._cluster_key,
                job,
                now_ms=time.time_ns() // 1_000_000,
                on_progress=self._note_progress,
            )
        except WaltzError as error:
            return error

    def expire(self, job: ExpiryJob) -> ExpiryOutcome:
        """Execute an expiry; return its error instead of raising it."""
        from waltz_core.archive.upload import expire  # noqa: PLC0415 - see the module

        assert self._rate_limited_store is not None
        try:
            return expire(
                self._rate_limited_store,
                self._cluster_key,
                job,
                now_ms=time.time_ns() // 1_000_000,
                on_progress=self._note_progress,
            )
        except WaltzError as error:
            return error

    def _note_progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_report_s >= _PROGRESS_INTERVAL_S:
            self._last_report_s = now_s
            self._on_progress()

    def reader(
        self, partition_id: PartitionId, manifest: str, manifest_crc: int
    ) -> "ArchiveReader":
        """Return the reader of a partition's archive for a manifest; the latest reader is cached.

        Raises:
            ArchiveUnavailable: no archive is configured.
        """
        from waltz_core.archive.reader import ArchiveReader  # noqa: PLC0415 - see the module

        if self._store is None or self._cache is None:
            raise ArchiveUnavailable(
                f"partition {partition_id}: the requested transactions are only in the "
                "archive, and this storage has no setting `archive_url`"
            )
        reader = self._readers.get(partition_id)
        if reader is None or reader.manifest_name != manifest:
            reader = ArchiveReader(self._store, manifest, manifest_crc, self._cache)
            self._readers[partition_id] = reader
        return reader

    @property
    def read_damage(self) -> str:
        """The damage that a read has found most recently; empty if there is none."""
        return next(reversed(self._damage.values()), "")

    @property
    def damaged_locations(self) -> list[tuple[int, int]]:
        """One location for each different error: the partition and the first ID of a read."""
        return list({damage: location for location, damage in self._damage.items()}.values())

    def find_damage_at(self, location: tuple[int, int], manifest: str, manifest_crc: int) -> str:
        """Read a record; return the damage that the read finds, empty if there is none.

        Raises:
            ArchiveUnavailable: the store did not execute a request.
        """
        first = TransactionId(location[1])
        reader = self.reader(PartitionId(location[0]), manifest, manifest_crc)
        try:
            reader.read_range(first, first, 1)
        except BeforeLogStart:  # It has expired.
            return ""
        except ARCHIVE_DAMAGE_ERRORS as error:
            return str(error)
        return ""

    def note_recheck_result(self, location: tuple[int, int], damage: str) -> None:
        """Note the outcome of `find_damage_at`; success clears the same damage at all locations."""
        old_damage = self._damage.get(location)
        self.on_location_read(location, damage)
        if not damage:
            repaired_locations = [
                repaired_location
                for repaired_location, location_damage in self._damage.items()
                if location_damage == old_damage
            ]
            for repaired_location in repaired_locations:
                del self._damage[repaired_location]

    def on_location_read(self, location: tuple[int, int], damage: str) -> None:
        """Note the outcome of a read; a successful read clears the damage at its location."""
        self._damage.pop(location, None)
        if damage:
            self._damage[location] = damage
            if len(self._damage) > DAMAGED_LOCATIONS_MAX:
                del self._damage[next(iter(self._damage))]
