"""The interface to the object store that holds an archive: any file system of `pyarrow.fs`.

All calls block: use threads. The simulator implements `ArchiveStore`, too.

Rules (docs/decisions/047):
    1. A file is durable when `write` has returned, or the block of `open_sink` has ended without an
       error. If the store is a directory, `ArchiveStore` writes and syncs a temporary file, gives
       it its final name, and syncs the directory. It also syncs each parent directory once. Any
       other store acknowledges an upload when the file is durable. A successful read of a file does
       not prove that the file is durable (AR 3).
    2. No file is overwritten (AR 2). A directory rejects a name that exists. Other stores do not
       reject an existing name, but no two attempts use the same name (`file_names.py`).
    3. After a failed or cancelled `open_sink`, a directory contains no file with this name. Other
       stores may keep an incomplete file, which no manifest lists.
    4. A missing file raises ObjectMissing. All other errors, such as a missing bucket or a store
       without any file of the cluster, raise ArchiveUnavailable. The message states the operation,
       the file and the reason that the store reports. The calls of an open file raise the same
       errors. An error that the caller raises inside the block of `open_sink` stays unchanged.
    5. With a `RateLimit`, `read` and the sinks of `open_sink` wait, so that they do not exceed its
       rate.
    6. URLs contain no secrets, because they are shown and compared. No message contains a secret.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import fs as arrow_fs

from waltz_core.archive.file_names import TEMPORARY_SUFFIX
from waltz_core.errors import ArchiveUnavailable, BadConfig, ObjectMissing
from waltz_core.records.raw_records import Buffer

# A request to S3 fails after this time without progress; the SDK retries a few times.
S3_TIMEOUT_S: Final = 20.0
# The environment variables with the region, in the order in which the SDK of S3 reads them.
_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_REGION_LOCK: Final = threading.Lock()
_S3_OPTIONS: Final = ("region", "endpoint_override", "scheme")
# A failed request to Google Cloud Storage is repeated for this time. The default of pyarrow, 15
# minutes, is longer than an owner waits for an upload without progress.
GCS_RETRY_S: Final = 60
# pyarrow ends the process if it requests a token of Azure and receives none. With a SAS token,
# pyarrow requests no token (docs/archive.md).
AZURE_SAS_VARIABLE: Final = "AZURE_STORAGE_SAS_TOKEN"
_AZURE_SECRETS: Final = ("sig", "client_secret")
# The query with a SAS token in URLs that pyarrow's errors contain.
_SAS_QUERY: Final = re.compile(r"\?[^\s'\"]*\bsig=[^\s'\"]*")
# pyarrow lists all places where it has searched for the library of HDFS: thousands of characters.
_REASON_CHARACTERS_MAX: Final = 500
_STORE_ERRORS: Final = (OSError, pa.ArrowException)
# A read with a rate limit requests this many bytes at a time.
_RATE_LIMITED_READ_BYTES: Final = 1024 * 1024
# A longer wait is divided into parts. Each part is reported as progress.
_WAIT_S_MAX: Final = 1.0


class ListedFile(NamedTuple):
    """A file in the store. `modified_ms` is by the store's clock, 0 if the time is not known."""

    name: str
    byte_count: int
    modified_ms: int


class RateLimit:
    """Limits the bytes per second of the calls on one thread, by blocking the thread.

    During a wait, `on_wait` is called at least once per second.
    """

    def __init__(
        self,
        bytes_per_s: int,
        on_wait: Callable[[], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._on_wait = on_wait
        self._clock_s = clock_s
        self._sleep = sleep
        self._free_at_s = clock_s()  # from then on, all bytes so far are within the rate

    def throttle(self, byte_count: int) -> None:
        """Wait until the rate permits more bytes, and then count `byte_count` more bytes."""
        while (wait_s := self._free_at_s - self._clock_s()) > 0:
            self._sleep(min(wait_s, _WAIT_S_MAX))
            self._on_wait()
        self._free_at_s = max(self._free_at_s, self._clock_s()) + byte_count / self._bytes_per_s


class ArchiveStore:
    """The files of an archive, by names relative to its URL; `rate_limit` applies rule 5.

    In a directory, new files have `file_mode`; by default, the process's umask determines it.
    """

    def __init__(
        self, url: str, rate_limit: RateLimit | None = None, *, file_mode: int | None = None
    ) -> None:
        self.url = url
        self._file_mode = file_mode
        self._rate_limit = rate_limit
        self._files, self._base = _open_file_system(url)
        self.is_directory = isinstance(self._files, arrow_fs.LocalFileSystem)
        self._durable_folders: set[Path] = set()

    def write(self, name: str, data: Buffer) -> None:
        """Write a file, durably (rules 1 and 2).

        Raises:
            ArchiveUnavailable: the file was not written, or the store did not acknowledge it.
        """
        with self.open_sink(name) as sink:
            sink.write(data)

    @contextmanager
    def open_sink(self, name: str) -> Iterator[Any]:
        """Yield a sink for a file, which is durable when the block has ended without an error.

        Raises:
            ArchiveUnavailable: as for `write`.
        """
        location = self._full_path(name)
        stream: AbstractContextManager[Any]
        with _translate_errors("write", location):
            if self.is_directory:
                self._make_durable_folder(Path(location).parent)
                stream = _durable_file(Path(location), self._file_mode)
            else:
                stream = self._files.open_output_stream(location)
            file = stream.__enter__()
        try:
            yield StoreSink(file, location, self._rate_limit)
        except BaseException as error:
            # NB: the caller's block has raised this error. No error of the store may replace it.
            with suppress(*_STORE_ERRORS):
                stream.__exit__(type(error), error, error.__traceback__)
            raise
        with _translate_errors("write", location):
            stream.__exit__(None, None, None)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            ObjectMissing, ArchiveUnavailable: by rule 4.
        """
        with self._open(name, "read") as source, _translate_errors("read", self._full_path(name)):
            if self._rate_limit is None:
                return bytes(source.read())
            pieces = []
            while piece := source.read(_RATE_LIMITED_READ_BYTES):
                self._rate_limit.throttle(len(piece))
                pieces.append(piece)
            return b"".join(pieces)

    def open(self, name: str) -> "StoreFile":
        """Open a file for reads at any position; the caller closes it.

        Raises:
            ObjectMissing, ArchiveUnavailable: by rule 4.
        """
        return StoreFile(self._open(name, "open"), self._full_path(name))

    def _open(self, name: str, operation: str) -> Any:  # noqa: ANN401 - as pyarrow's
        """Open a file for reads (rule 4).

        If the store has no file of the cluster at all, raise ArchiveUnavailable instead of
        ObjectMissing. In this case, the archive is not damaged: its directory is not mounted, the
        bucket is missing, or the URL belongs to another archive.
        """
        try:
            with _translate_errors(operation, self._full_path(name)):
                return self._files.open_input_file(self._full_path(name))
        except ObjectMissing as error:
            cluster, _, rest = name.partition("/")
            folder = self._full_path(cluster)
            with _translate_errors(operation, folder):
                folder_info = self._files.get_file_info(folder)
            if rest and folder_info.type is arrow_fs.FileType.NotFound:
                raise ArchiveUnavailable(
                    f"archive: cannot {operation} {self._full_path(name)}, because folder "
                    f"{folder} has no files. Hint: check that the directory is mounted, and that "
                    "the URL is that of the archive of this cluster."
                ) from error
            raise

    def list_names(self, folder: str) -> list[str]:
        """Return the names of all files in a folder and below it; see `list_files`."""
        return [file.name for file in self.list_files(folder)]

    def list_files(self, folder: str) -> list[ListedFile]:
        """Return all files in and below a folder, sorted by name; none if the folder is missing.

        The result includes temporary files of writes that did not complete.

        Raises:
            ArchiveUnavailable: by rule 4.
        """
        selector = arrow_fs.FileSelector(
            self._full_path(folder), allow_not_found=True, recursive=True
        )
        with _translate_errors("list", self._full_path(folder)):
            file_infos = self._files.get_file_info(selector)
        start = len(self._base) + 1
        return sorted(
            ListedFile(
                file_info.path[start:], file_info.size or 0, (file_info.mtime_ns or 0) // 1_000_000
            )
            for file_info in file_infos
            if file_info.type is arrow_fs.FileType.File
        )

    def delete(self, name: str) -> None:
        """Delete a file; do nothing if it does not exist.

        Raises:
            ArchiveUnavailable: by rule 4.
        """
        with suppress(ObjectMissing), _translate_errors("delete", self._full_path(name)):
            self._files.delete_file(self._full_path(name))

    def move(self, name: str, target: str) -> None:
        """Rename a file, durably.

        If the store is a directory, `name` may also be a folder, which is renamed in one step. The
        folder does not replace an existing folder with files.

        Raises:
            ObjectMissing, ArchiveUnavailable: by rule 4.
        """
        location = self._full_path(target)
        if self.is_directory:
            with _translate_errors("write", location):
                self._make_durable_folder(Path(location).parent)
        with _translate_errors("move", self._full_path(name)):
            self._files.move(self._full_path(name), location)
            if self.is_directory:
                _sync_folder(Path(location).parent)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with its files; do nothing if it does not exist.

        Raises:
            ArchiveUnavailable: by rule 4.
        """
        with suppress(ObjectMissing), _translate_errors("delete", self._full_path(folder)):
            self._files.delete_dir(self._full_path(folder))

    def _full_path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _make_durable_folder(self, folder: Path) -> None:
        """Create a folder; make its name and the names of its parent folders durable.

        A process that was killed may have created folders without a sync of their names. So each
        name in the archive is synced once, even if this process has not created the folder.
        """
        base = Path(self._base)
        for parent in reversed([folder, *folder.parents]):
            is_new = not parent.exists()
            is_unknown = parent.is_relative_to(base) and parent not in self._durable_folders
            if is_new:
                parent.mkdir(exist_ok=True)
            if is_new or is_unknown:
                # If this process may not read the folder above `parent`, the operator has created
                # that folder.
                with suppress(PermissionError):
                    _sync_folder(parent.parent)
            self._durable_folders.add(parent)


class StoreFile:
    """A binary file of the store, open for reads; raises the errors of the store (rule 4).

    Each read requests only its own bytes. pyarrow's `seek` in Google Cloud Storage requests all
    bytes from the position to the end, and fails at the end. `native` is pyarrow's file.
    """

    def __init__(self, file: Any, location: str) -> None:  # noqa: ANN401 - as pyarrow's
        self.native = file
        self._location = location
        self._position = 0

    @property
    def closed(self) -> bool:
        return bool(self.native.closed)

    def read(self, byte_count: int | None = None) -> bytes:
        """Return the next `byte_count` bytes; without a count, all bytes to the end.

        Return no bytes at the end of the file.
        """
        with _translate_errors("read", self._location):
            rest = max(self.native.size() - self._position, 0)
            size = rest if byte_count is None or byte_count < 0 else min(byte_count, rest)
            data = bytes(self.native.read_at(size, self._position)) if size else b""
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the next read, and return it."""
        with _translate_errors("read", self._location):
            starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.native.size()}
        self._position = starts[whence] + position
        return self._position

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def close(self) -> None:
        """Close the file."""
        with _translate_errors("read", self._location):
            self.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreSink:
    """A binary file of the store, open for writes; raises the errors of the store (rule 4).

    Writes do not exceed `rate_limit` (rule 5).
    """

    def __init__(
        self,
        file: Any,  # noqa: ANN401 - as pyarrow's
        location: str,
        rate_limit: RateLimit | None,
    ) -> None:
        self._file = file
        self._location = location
        self._rate_limit = rate_limit

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def write(self, data: Buffer) -> int:
        """Write the next bytes; return their number."""
        with _translate_errors("write", self._location):
            written_bytes = int(self._file.write(data))
        if self._rate_limit is not None:
            self._rate_limit.throttle(written_bytes)
        return written_bytes

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return int(self._file.tell())

    def flush(self) -> None:
        """Pass the bytes to the store; they are durable when `open_sink` has ended."""
        with _translate_errors("write", self._location):
            self._file.flush()


def _without_password(url: str, password: str) -> str:
    return url.replace(f":{password}@", "@", 1)


def _open_file_system(url: str) -> tuple[arrow_fs.FileSystem, str]:
    """Return the file system of a URL, and the path in it; raises BadConfig."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise BadConfig(
            f"archive {_without_password(url, parts.password)}: expected a URL without a "
            "password, found one. Hint: docs/archive.md describes how each kind of store "
            "gets its credentials."
        )
    try:
        if parts.scheme == "s3":
            options = dict(parse_qsl(parts.query))
            unknown_options = sorted(set(options) - set(_S3_OPTIONS))
            if unknown_options:
                raise BadConfig(
                    f"archive {url}: expected only the URL options {', '.join(_S3_OPTIONS)}, "
                    f"found {', '.join(unknown_options)}"
                )
            with _resolve_region(options.get("region")):
                store = arrow_fs.S3FileSystem(
                    connect_timeout=S3_TIMEOUT_S, request_timeout=S3_TIMEOUT_S, **options
                )
            return store, f"{parts.netloc}{parts.path}".rstrip("/")
        file_system, base = arrow_fs.FileSystem.from_uri(_complete_url(url, os.environ))
    except (*_STORE_ERRORS, ValueError) as error:
        raise BadConfig(
            f"archive {url} cannot be used: {_error_reason(error)}. Hint: use a URL such as "
            "file:///srv/archive, s3://bucket/folder, gs://bucket/folder, "
            "abfss://container@account.dfs.core.windows.net/folder or hdfs://host/folder."
        ) from error
    return file_system, base.rstrip("/")


@contextmanager
def _resolve_region(region: str | None) -> Iterator[None]:
    """While the `with` block runs, set the environment variable with the region for the SDK of S3.

    Without this variable, the SDK requests the region from the metadata service of EC2, even if the
    caller passes a region. If that service does not answer, all threads of the process stop for
    about 8 s.
    """
    if not region or any(os.environ.get(name) for name in _REGION_VARIABLES):
        yield
        return
    with _REGION_LOCK:
        os.environ[_REGION_VARIABLES[0]] = region
        try:
            yield
        finally:
            del os.environ[_REGION_VARIABLES[0]]


def _complete_url(url: str, environment: Mapping[str, str]) -> str:
    """Return the URL for pyarrow; where necessary, add a retry limit or the SAS token of Azure.

    The SDKs of the stores read other credentials from the environment, too.

    Raises:
        BadConfig: the URL contains a secret (rule 6).
    """
    parts = urlsplit(url)
    options = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    added_option = ""
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in options:
        added_option = f"retry_limit_seconds={GCS_RETRY_S}"
    if parts.scheme in ("abfs", "abfss"):
        secrets = [option for option in _AZURE_SECRETS if option in options]
        if secrets:
            raise BadConfig(
                f"archive {url.partition('?')[0]}: expected a URL without secrets, found "
                f"{', '.join(secrets)}. Hint: set {AZURE_SAS_VARIABLE} in the environment."
            )
        added_option = environment.get(AZURE_SAS_VARIABLE, "").lstrip("?")
    if not added_option:
        return url
    return f"{url}{'&' if '?' in url else '?'}{added_option}"


def _error_reason(error: Exception) -> str:
    """Return the reason that a store states, as one line without a SAS token (rule 6)."""
    text = getattr(error, "strerror", None) or str(error)
    line = _SAS_QUERY.sub("?...", " ".join(text.split()))
    return line if len(line) <= _REASON_CHARACTERS_MAX else f"{line[:_REASON_CHARACTERS_MAX]}..."


@contextmanager
def _translate_errors(operation: str, location: str) -> Iterator[None]:
    """Translate the store's errors in a block to ObjectMissing or ArchiveUnavailable (rule 4)."""
    try:
        yield
    except FileNotFoundError as error:
        if operation == "write":  # The bucket is missing, which is no damage.
            reason = "the bucket or the folder does not exist"
            raise ArchiveUnavailable(f"archive: cannot write {location}: {reason}") from error
        raise ObjectMissing(
            f"archive: cannot {operation} {location}, because it does not exist"
        ) from error
    except _STORE_ERRORS as error:
        raise ArchiveUnavailable(
            f"archive: cannot {operation} {location}: {_error_reason(error)}"
        ) from error


@contextmanager
def _durable_file(path: Path, mode: int | None) -> Iterator[Any]:
    """Yield a file for writes; after the sync, the file gets its final name (rules 1 to 3)."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("xb") as sink:
            if mode is not None:
                os.fchmod(sink.fileno(), mode)
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        os.link(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
