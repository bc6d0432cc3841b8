"""The door to the file system: what the storage asks of a disk, and the real one.

Why it stands alone: all that can go wrong with a disk goes wrong here, so the simulator puts
another `Disk` in its place that tears, loses and fills up. No other file here opens a file.

Rules:
    1. An error of the operating system becomes `NoSpace` (the disk is full, what was there stays
       as it is) or `DiskFailed` (anything else, and whatever a sync fails with); no `OSError`
       leaves this file.
    2. What is durable is said: only `File.sync`, `File.sync_all` and `sync_directory` make it so.
    3. A write is complete or raises; a short write is carried on.
    4. A file comes into being whole: `create_durably` writes it under another name first.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from waltz_core.errors import DiskFailed, NoSpace, WaltzError

Buffer = bytes | memoryview
TEMPORARY_SUFFIX: Final = ".tmp"
_VECTOR_MAX: Final = 512  # POSIX promises 16, Linux has 1024


class File(Protocol):
    """An open file. Offsets and sizes are in bytes."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write the parts one after the other from `offset` on."""

    def sync(self) -> None:
        """Make the file's bytes and size durable (fdatasync)."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""

    def size(self) -> int:
        """Return the size in bytes."""

    def lock_range(self, first: int, count: int) -> bool:
        """Take an exclusive POSIX lock on bytes; False when another process has it."""

    def lock_whole(self) -> bool:
        """Take an exclusive lock that an opener in this same process meets too; False if taken."""

    def allocate(self, size: int) -> None:
        """Reserve room for the first `size` bytes."""

    def close(self) -> None:
        """Close it; the lock goes with it."""


class Disk(Protocol):
    """A file system as the storage uses it."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing."""

    def exists(self, path: Path) -> bool:
        """Tell if there is a file or a directory of this name."""

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""

    def make_directory(self, directory: Path) -> None:
        """Make a directory and its parents, unless they are there; their names are durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, in place of the one that has it."""

    def unlink(self, path: Path) -> None:
        """Remove a file; none there is no error."""

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""


def make_with_parents(
    disk: Disk,
    directory: Path,
    make_one: Callable[[Path], None],
    sync_found: Callable[[Path], None],
) -> None:
    """Make a directory and its parents, each durable in the one above; `make_one` makes just one.

    Whoever made one that is there may have been killed before its name was durable, so
    `sync_found` makes the names beside that one durable too.
    """
    if disk.exists(directory):
        sync_found(directory.parent)
        return
    make_with_parents(disk, directory.parent, make_one, sync_found)
    make_one(directory)
    disk.sync_directory(directory.parent)


def create_durably(disk: Disk, directory: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """Make files that are whole and durable, each in place of an older one (rule 4).

    A crash leaves some of them, and others under a temporary name; the last one is there only when
    all are. No order of renames is kept but by a sync of the directory between them.
    """
    for name, content in files:
        file = disk.open(directory / (name + TEMPORARY_SUFFIX), create=True)
        try:
            file.truncate(0)
            file.pwrite([content], 0)
            file.sync()
        finally:
            file.close()
    for place, (name, _) in enumerate(files, 1):
        if 1 < place == len(files):
            disk.sync_directory(directory)
        disk.rename(directory / (name + TEMPORARY_SUFFIX), directory / name)
    disk.sync_directory(directory)


def remove_temporary(disk: Disk, directory: Path) -> None:
    """Remove what a crash in `create_durably` has left."""
    for name in disk.list(directory):
        if name.endswith(TEMPORARY_SUFFIX):
            disk.unlink(directory / name)


# ---------------------------------------------------------------------------------------------
# the real one


@contextmanager
def _typed_errors(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _typed(error, what, path) from error


def _typed(error: OSError, what: str, path: Path, *, may_be_full: bool = True) -> WaltzError:
    """Return the error that an error of the operating system becomes (rule 1)."""
    message = f"{what} {path}: {error.strerror or error}"
    if may_be_full and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(message)
    return DiskFailed(message)


class RealFile:
    """A file of the operating system."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with _typed_errors("opening", path):
            self._fd = os.open(path, flags, 0o644)

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes."""
        with _typed_errors("reading", self._path):
            data = os.pread(self._fd, size, offset)
            if len(data) in {size, 0}:
                return data
            parts = [data]
            got = len(data)
            while got < size and (data := os.pread(self._fd, size - got, offset + got)):
                parts.append(data)
                got += len(data)
            return b"".join(parts)

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write all of it (rule 3)."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        # Here and in `sync` no context manager: they run for every append.
        try:
            while left:
                written = os.pwritev(self._fd, left[:_VECTOR_MAX], offset)
                offset += written
                left = _after(left, written)
        except OSError as error:
            raise _typed(error, "writing", self._path) from error

    def sync(self) -> None:
        """Wait for fdatasync. One that finds no room has lost what it was to write (rule 1)."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _typed(error, "syncing", self._path, may_be_full=False) from error

    def truncate(self, size: int) -> None:
        """Cut the file."""
        with _typed_errors("truncating", self._path):
            os.ftruncate(self._fd, size)

    def size(self) -> int:
        """Return the size in bytes."""
        with _typed_errors("looking at", self._path):
            return os.fstat(self._fd).st_size

    def lock_range(self, first: int, count: int) -> bool:
        """Take a POSIX record lock; it is lost when this process closes the file anywhere."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first, os.SEEK_SET)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                return False
            raise DiskFailed(f"locking {self._path}: {error.strerror}") from error
        return True

    def lock_whole(self) -> bool:
        """Take a BSD lock, which belongs to the open file and not to the process."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DiskFailed(f"locking {self._path}: {error.strerror}") from error
        return True

    def allocate(self, size: int) -> None:
        """Reserve room on the disk."""
        with _typed_errors("allocating", self._path):
            os.posix_fallocate(self._fd, 0, size)

    def close(self) -> None:
        """Close it, once."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with _typed_errors("closing", self._path):
                os.close(fd)


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """Return what is left of the parts after `written` bytes."""
    for place, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[place + 1 :]]
        written -= len(part)
    return []


class RealDisk:
    """The file system of this machine."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing."""
        return RealFile(path, create=create)

    def exists(self, path: Path) -> bool:
        """Tell if there is something of this name."""
        with _typed_errors("looking for", path):
            return path.exists()

    def list(self, directory: Path) -> list[str]:
        """Return the names, sorted."""
        with _typed_errors("listing", directory):
            return sorted(os.listdir(directory))

    def make_directory(self, directory: Path) -> None:
        """Make it and its parents; each is durable in the one above."""
        make_with_parents(self, directory, self._make_one, self._sync_found)

    def _sync_found(self, directory: Path) -> None:
        """Sync a directory, unless it may not be read: then this process has made nothing there."""
        if os.access(directory, os.R_OK):
            self.sync_directory(directory)

    def _make_one(self, directory: Path) -> None:
        with _typed_errors("making", directory):
            directory.mkdir(exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name."""
        with _typed_errors("renaming", source):
            source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with _typed_errors("removing", path):
            path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        """Wait until the names are on disk."""
        with _typed_errors("syncing", directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
