"""Opens and lists files for reading only, and keeps a storage from running at the same time.

The storage's own `RealDisk` opens every file for writing, which is not possible for a backup on a
read-only disk. This code cannot change any file.

Rules:
    1. Files are opened read-only. An error of the operating system is raised as a DiskFailed with
       one sentence.
    2. No storage may run on a directory while a command reads it. A running storage would change
       files between two reads of the command, and the files would not match each other. So a
       command holds shared locks, which exclude the exclusive locks of a storage. Several commands
       may read at the same time.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from waltz_core.errors import BadRequest, DiskFailed
from waltz_core.offline.layout import CONTROL_FILE_NAME, CONTROL_HEADER_BYTES, ID_NAME

SEGMENT_SUFFIX: Final = ".seg"
_NAME_DIGITS: Final = 19


class ReadableFile(Protocol):
    """The operations of a file that the package needs to read it."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""

    def size(self) -> int:
        """Return the size of the file in bytes."""


class OpenFile:
    """A file that is open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskFailed(f"cannot open {path}: {error.strerror}") from error

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""
        parts = []
        try:
            while size and (data := os.pread(self.fd, size, offset)):
                parts.append(data)
                size -= len(data)
                offset += len(data)
        except OSError as error:
            raise DiskFailed(
                f"cannot read {self.path} at offset {offset}: {error.strerror}"
            ) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_all(path: Path) -> bytes | None:
    """Return the content of a small file; None if it does not exist."""
    if not path.exists():
        return None
    with OpenFile(path) as file:
        return file.pread(file.size(), 0)


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise DiskFailed(f"cannot list {directory}: {error.strerror}") from error


# ---------------------------------------------------------------------------------------------
# finding files


def first_id_in_name(name: str) -> int | None:
    """Return the first ID in the name of a `.seg` file; None for any other name."""
    stem, suffix = os.path.splitext(name)
    is_number = len(stem) == _NAME_DIGITS and stem.isascii() and stem.isdigit()
    return int(stem) if suffix == SEGMENT_SUFFIX and is_number else None


def segment_path(directory: Path, first: int, suffix: str) -> Path:
    """Return the path of a segment's `.seg`, `.idx` or `.chn` file."""
    return directory / f"{first:0{_NAME_DIGITS}d}{suffix}"


def first_ids_in(directory: Path) -> list[int]:
    """Return the first IDs of a partition's segments, in ascending order."""
    return [first for name in names_in(directory) if (first := first_id_in_name(name)) is not None]


def partitions_in(directory: Path) -> list[int]:
    """Return the partitions that have a directory in a storage directory, in ascending order."""
    names = [name for name in names_in(directory) if name.isascii() and name.isdecimal()]
    return sorted(int(name) for name in names if (directory / name).is_dir())


def is_storage_directory(directory: Path) -> bool:
    """Return whether a directory is a storage directory, not a partition's directory."""
    return (directory / CONTROL_FILE_NAME).exists() or (directory / ID_NAME).exists()


def segments_at(path: Path, partitions: list[int] | None = None) -> list[Path]:
    """Return the `.seg` files that a path on the command line selects.

    A storage directory selects all its partitions, or only `partitions`.

    Raises:
        BadRequest: the path does not exist, or has no segment.
    """
    if path.is_file():
        if first_id_in_name(path.name) is None:
            raise BadRequest(
                f"{path}: expected a segment file, whose name has {_NAME_DIGITS} digits and "
                f"ends in {SEGMENT_SUFFIX}"
            )
        return [path]
    if not path.is_dir():
        raise BadRequest(f"{path}: expected a segment or a directory, found nothing")
    directories = [path]
    if is_storage_directory(path) or not first_ids_in(path):
        directories = [path / str(number) for number in select_partitions(path, partitions)]
    segments = [
        segment_path(directory, first, SEGMENT_SUFFIX)
        for directory in directories
        for first in first_ids_in(directory)
    ]
    if not segments:
        raise BadRequest(f"{path}: the directory has no segments")
    return segments


def select_partitions(directory: Path, partitions: list[int] | None) -> list[int]:
    """Return the partitions of a storage directory; only `partitions` if they are given.

    Raises BadRequest if a given partition does not exist.
    """
    existing = partitions_in(directory)
    missing_partitions = [number for number in partitions or [] if number not in existing]
    if missing_partitions:
        raise BadRequest(
            f"{directory} has no partition {missing_partitions[0]}; it has "
            f"{', '.join(map(str, existing)) or 'none'}"
        )
    return existing if partitions is None else sorted(set(partitions))


def storage_directory_of(path: Path) -> Path | None:
    """Return the storage directory that contains a file or a directory; None if there is none."""
    path = path.absolute()
    return next(
        (directory for directory in (path, *path.parents[:2]) if is_storage_directory(directory)),
        None,
    )


# ---------------------------------------------------------------------------------------------
# the locks (rule 2)


@contextmanager
def hold_shared_locks(path: Path) -> Iterator[None]:
    """Hold shared locks on the storage directory of a path, so that no storage runs on it.

    A file outside of a storage directory, such as a copy, needs no lock.

    Raises:
        DiskFailed: a storage runs on the directory.
    """
    directory = storage_directory_of(path)
    with ExitStack() as locks:
        if directory is not None:
            for name in (ID_NAME, CONTROL_FILE_NAME):
                if (directory / name).exists():
                    file = locks.enter_context(OpenFile(directory / name))
                    _lock_shared(file, directory, is_old=name == CONTROL_FILE_NAME)
        yield


def _lock_shared(file: OpenFile, directory: Path, *, is_old: bool) -> None:
    # NB: this process loses its POSIX lock when it closes any descriptor of the file, for example
    # after it has read the control file. The BSD lock stays.
    try:
        if is_old:
            fcntl.lockf(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, CONTROL_HEADER_BYTES)
        else:
            fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise DiskFailed(
            f"{directory}: a running storage uses this directory and changes its files. "
            "Hint: stop the storage first, or use a copy of the directory."
        ) from error
    except OSError as error:
        raise DiskFailed(f"cannot lock {file.path}: {error.strerror}") from error
