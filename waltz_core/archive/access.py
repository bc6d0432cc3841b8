"""The archive of a storage process: its store, uploads to it, and collections; all calls block.

It alone imports the Parquet library into a storage, and only where an archive is configured.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from waltz_core.archive.collection import CollectionJob, CollectionOutcome, collect
from waltz_core.archive.upload_job import UploadJob, UploadOutcome
from waltz_core.errors import WaltzError

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore

# An upload makes hundreds of calls of the store.
_PROGRESS_S: Final = 1.0


class ArchiveAccess:
    """The archive at a URL; `open` comes first.

    `on_progress` is called on the thread of a job while the store carries out its calls.
    """

    def __init__(self, url: str, cluster_key: bytes, *, on_progress: Callable[[], None]) -> None:
        self._url = url
        self._cluster_key = cluster_key
        self._store: ArchiveStore | None = None
        self._on_progress = on_progress
        self._reported_s = 0.0

    def open(self) -> None:
        """Open the store; raises BadConfig if the URL names none."""
        from waltz_core.archive.store import ArchiveStore  # noqa: PLC0415 - see the module

        self._store = ArchiveStore(self._url)

    def upload(self, job: UploadJob) -> UploadOutcome:
        """Carry out a job; return its error rather than raise it."""
        from waltz_core.archive.upload import upload  # noqa: PLC0415 - see the module

        assert self._store is not None
        try:
            return upload(self._store, self._cluster_key, job, self._progressed)
        except WaltzError as error:
            return error

    def collect(self, job: CollectionJob) -> CollectionOutcome:
        """Carry out a collection; return its error rather than raise it."""
        assert self._store is not None
        try:
            return collect(
                self._store,
                self._cluster_key,
                job,
                now_ms=time.time_ns() // 1_000_000,
                on_progress=self._progressed,
            )
        except WaltzError as error:
            return error

    def _progressed(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _PROGRESS_S:
            self._reported_s = now_s
            self._on_progress()
