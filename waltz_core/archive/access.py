"""The archive of a storage process: its store, and uploads to it; all calls block.

It alone imports the Parquet library into a storage, and only where an archive is configured.
"""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from waltz_core.archive.upload_job import UploadJob, UploadOutcome
from waltz_core.errors import WaltzError

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore


class ArchiveAccess:
    """The archive at a URL; `open` comes first."""

    def __init__(self, url: str, cluster_key: bytes) -> None:
        self._url = url
        self._cluster_key = cluster_key
        self._store: ArchiveStore | None = None
        # The last error, and how many attempts have failed since the last one that succeeded.
        self.failure: WaltzError | None = None
        self.failure_count = 0

    def open(self) -> None:
        """Open the store; raises BadConfig if the URL names none."""
        from waltz_core.archive.store import ArchiveStore  # noqa: PLC0415 - see the module

        self._store = ArchiveStore(self._url)

    def upload(self, job: UploadJob) -> UploadOutcome:
        """Carry out a job; return its error rather than raise it."""
        from waltz_core.archive.upload import upload  # noqa: PLC0415 - see the module

        assert self._store is not None
        try:
            made = upload(self._store, self._cluster_key, job)
        except WaltzError as error:
            self.failure, self.failure_count = error, self.failure_count + 1
            return error
        self.failure, self.failure_count = None, 0
        return made


def without_password(url: str) -> str:
    """Return a URL as it may be shown."""
    password = urlsplit(url).password
    return url if password is None else url.replace(f":{password}@", "@", 1)
