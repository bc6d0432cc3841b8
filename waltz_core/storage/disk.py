"""The door to the file system: what the storage asks of a disk, and the real one.

Why it stands alone: all that can go wrong with a disk goes wrong here, so the simulator puts
another `Disk` in its place that tears, loses and fills up. No other file here opens a file.

Rules:
    1. An error of the operating system becomes `NoSpace` (the disk is full, what was there stays
       as it is), `ReadFailed` (bytes of a file that cannot be had) or `DiskFailed` (anything else,
       and whatever a sync fails with); no `OSError` leaves this file.
    2. What is durable is said: only `File.sync`, `File.sync_all` and `sync_directory` make it so.
    3. A write is complete or raises; a short write is carried on.
    4. A file comes into being whole: `create_durably` writes it under another name first.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from waltz_core.errors import DiskFailed, NoSpace, ReadFailed, WaltzError

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
        """Make a directory and its parents, durably, unless it is there."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, in place of the one that has it."""

    def unlink(self, path: Path) -> None:
        """Remove a file; none there is no error."""

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    def free_bytes(self, directory: Path) -> int:
        """Return how much more can be written to the file system of a directory."""


def create_durably(disk: Disk, directory: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """Make files that are whole and durable, each in place of an older one, in this order (rule 4).

    A crash leaves the first few of them, and others under a temporary name.
    """
    temporary = [directory / (name + TEMPORARY_SUFFIX) for name, _ in files]
    for path, (_, content) in zip(temporary, files, strict=True):
        file = disk.open(path, create=True)
        try:
            file.truncate(0)
            file.pwrite([content], 0)
            file.sync()
        finally:
            file.close()
    for path, (name, _) in zip(temporary, files, strict=True):
        disk.rename(path, directory / name)
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
        try:
            data = os.pread(self._fd, size, offset)
            if len(data) in {size, 0}:
                return data
            parts = [data]
            got = len(data)
            while got < size and (data := os.pread(self._fd, size - got, offset + got)):
                parts.append(data)
                got += len(data)
            return b"".join(parts)
        except OSError as error:
            why = f"{error.strerror or error} ({size} bytes at {offset})"
            raise ReadFailed(f"reading {self._path}: {why}") from error

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write all of it (rule 3)."""
        # Here and in `sync` no context manager: they run for every append. Nor is there anything
        # to be put in order when one part is written at once, as it nearly always is. What was
        # written of one that is not is written again.
        try:
            if len(parts) == 1:
                size = memoryview(parts[0]).nbytes
                if os.pwritev(self._fd, parts, offset) == size:
                    return
            left = [memoryview(part).cast("B") for part in parts if len(part)]
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
        if self.exists(directory):
            return
        self.make_directory(directory.parent)
        with _typed_errors("making", directory):
            directory.mkdir(exist_ok=True)
        self.sync_directory(directory.parent)

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

    def free_bytes(self, directory: Path) -> int:
        """Return what is free for everybody; what is kept for root does not count."""
        with _typed_errors("looking at", directory):
            found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
