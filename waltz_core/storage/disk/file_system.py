"""The interface to the file system: the operations that a storage needs, and the real disk.

All errors of a disk are raised in this file, and no other file of a storage opens files. The
simulator replaces the real disk by its own `Disk`, which can lose or tear writes, and can be full.

Rules:
    1. No `OSError` leaves this file. It becomes `NoSpace` (the disk is full, existing data is
       untouched), `ReadFailed` (bytes of a file cannot be read) or `DiskFailed` (any other error,
       and any error of a sync).
    2. Only `File.sync` and `sync_directory` make changes durable.
    3. A write is complete or raises an error: after a short write, the remaining bytes are written.
    4. A file appears with its complete content: `create_durably` writes it under another name
       first.
    5. A real disk limits its open descriptors (`descriptors.py`). A locked file stays open, because
       closing it would release the lock. A file with unsynced writes stays open, too, because the
       system reports a failed write-back only to processes that have the file open. A best-effort
       file (`is_best_effort`) is never synced, and may be closed at any time, because its errors do
       not matter.
    6. If a thread closes a file while another thread uses it, the descriptor is closed when that
       use has ended. If the descriptor were closed earlier, the system could give its number to
       another file, and the other thread would read or write the wrong file.
    7. `prefetch` is a hint: the system reads the named bytes from the disk ahead of time, many at
       a time. Correctness does not depend on it.
    8. If a block is unreadable, a write to a part of the block fails, too, because the system must
       first read the rest of the block. In this case, `overwrite` calls `discard_unreadable`, which
       replaces the block by zeros. Then `overwrite` writes again. Only `discard_unreadable`
       discards unreadable bytes in this way.
    9. The page cache keeps only the newest part of the synced bytes of a real file
       (`page_cache.py`).
   10. A read from the page cache does not show that the bytes on the disk are wrong. So before a
       read that looks for damage, the storage drops the bytes from the page cache (`drop_cached`;
       `page_cache.py`, rule 4). `drop_cached` is a hint, too.
"""

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from waltz_core.errors import DiskFailed, NoSpace, ReadFailed, WaltzError
from waltz_core.storage.disk.descriptors import Descriptors
from waltz_core.storage.disk.page_cache import (
    PAGE_CACHE_BYTES_MAX,
    RecentPages,
    blocks_beginning_in,
)

Buffer = bytes | memoryview
TEMPORARY_SUFFIX: Final = ".tmp"
_VECTOR_PARTS_MAX: Final = 512  # POSIX guarantees 16, Linux has 1024
# The unit of `discard_unreadable`: the block of nearly all file systems. Larger blocks are not
# punched.
_BLOCK_BYTES: Final = 4096
_PUNCH_HOLE_FLAGS: Final = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
# The errors that a disk, or a file system with checksums, reports for bytes that it has lost.
_LOST_BYTES_ERRORS: Final = {
    errno.EIO,
    errno.EBADMSG,
    errno.ENODATA,
    getattr(errno, "EUCLEAN", errno.EIO),
}
_READ_RETRY_S: Final = 0.5
OPEN_FILES_MAX: Final = 64
# `prefetch` requests files up to this size completely. In larger files, it requests only the
# following numbers of bytes at the beginning and at the end.
_SMALL_FILE_BYTES_MAX: Final = 64 * 1024
_PREFETCHED_BEGINNING_BYTES: Final = 4 * 1024
_PREFETCHED_END_BYTES: Final = 16 * 1024


class File(Protocol):
    """An open file. Offsets and sizes are in bytes."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write all bytes of the parts, one part after the other, from `offset` on."""

    def drop_cached(self, offset: int, size: int) -> None:
        """Drop synced bytes from the page cache, in complete blocks (rule 10)."""

    def discard_unreadable(self, offset: int, size: int) -> bool:
        """Replace unreadable blocks at the ends of a range by zeros (rule 8).

        Return whether there were unreadable blocks.
        """

    def sync(self) -> None:
        """Make the file's bytes and size durable (fdatasync)."""

    def truncate(self, size: int) -> None:
        """Change the size of the file to `size` bytes."""

    def size(self) -> int:
        """Return the size of the file in bytes."""

    def lock_range(self, first: int, count: int) -> bool:
        """Acquire an exclusive POSIX lock on bytes; return False if another process holds it."""

    def lock_whole_file(self) -> bool:
        """Acquire an exclusive lock on the file; return False if the file is locked already.

        The lock also excludes other openings of the file in the same process.
        """

    def allocate(self, size: int) -> None:
        """Reserve disk space for the first `size` bytes."""

    def close(self) -> None:
        """Close the file, which releases its locks."""


class Disk(Protocol):
    """The operations of a file system that the storage uses."""

    def open(self, path: Path, *, create: bool = False, is_best_effort: bool = False) -> File:
        """Open a file for reading and writing; a best-effort file is never synced (rule 5)."""

    def exists(self, path: Path) -> bool:
        """Return whether a file or a directory of this name exists."""

    def identity(self, path: Path) -> tuple[int, int] | None:
        """Return the device and the inode of a file now; None if the file does not exist."""

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, unless they exist; make their names durable."""

    def make_directories(self, directory: Path, names: Sequence[str]) -> None:
        """Create directories in a durable directory, unless they exist, with one sync for all."""

    def prefetch(self, directory: Path, names: Sequence[str]) -> None:
        """Hint that the beginnings and the ends of files will be read soon (rule 7)."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, and replace an existing target."""

    def unlink(self, path: Path) -> None:
        """Remove a file; do nothing if it does not exist."""

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    def free_bytes(self, directory: Path) -> int:
        """Return how many more bytes can be written to the file system of a directory."""

    def size_bytes(self, directory: Path) -> int:
        """Return the size of the file system of a directory, in bytes."""


def make_directory_with_parents(
    disk: Disk,
    directory: Path,
    make_single_directory: Callable[[Path], None],
    sync_existing: Callable[[Path], None],
) -> None:
    """Create a directory and its parents; make the name of each durable in its parent.

    `make_single_directory` creates a directory in an existing parent. If a directory exists, the
    process that created it may have been killed before the name was durable. So `sync_existing`
    syncs the parent of an existing directory.
    """
    if disk.exists(directory):
        sync_existing(directory.parent)
        return
    make_directory_with_parents(disk, directory.parent, make_single_directory, sync_existing)
    make_single_directory(directory)
    disk.sync_directory(directory.parent)


def create_durably(disk: Disk, directory: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """Create files with their complete content, durably, and replace older files (rule 4).

    After a crash, some of the files may be missing, or have only their temporary names. If the last
    file has its final name, all other files have their final names, too: the directory is synced
    before the last rename.
    """
    temporary_paths = [directory / (name + TEMPORARY_SUFFIX) for name, _ in files]
    for path, (_, content) in zip(temporary_paths, files, strict=True):
        file = disk.open(path, create=True)
        try:
            file.truncate(0)
            file.pwrite([content], 0)
            file.sync()
        finally:
            file.close()
    for position, (path, (name, _)) in enumerate(zip(temporary_paths, files, strict=True), 1):
        if 1 < position == len(files):
            disk.sync_directory(directory)
        disk.rename(path, directory / name)
    disk.sync_directory(directory)


def overwrite(file: File, data: Buffer, offset: int) -> None:
    """Write bytes over bytes that may be unreadable (rule 8)."""
    try:
        file.pwrite([data], offset)
    except DiskFailed:
        if not file.discard_unreadable(offset, len(data)):
            raise
        file.pwrite([data], offset)


def remove_temporary_files(disk: Disk, directory: Path) -> None:
    """Remove the temporary files that a crash in `create_durably` has left."""
    for name in disk.list(directory):
        if name.endswith(TEMPORARY_SUFFIX):
            disk.unlink(directory / name)


# ---------------------------------------------------------------------------------------------
# the real file system


def descriptor_for_reader(path: Path) -> int:
    """Open a real file for another process, and return a read-only descriptor."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadFailed(f"cannot open {path}: {error.strerror or error}") from error


@contextmanager
def _typed_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _typed_error(error, action, path) from error


def _typed_error(
    error: OSError, action: str, path: Path, *, may_be_full: bool = True
) -> WaltzError:
    """Convert an error of the operating system to an error of `errors.py` (rule 1)."""
    message = f"cannot {action} {path}: {error.strerror or error}"
    if may_be_full and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(message)
    return DiskFailed(message)


class RealFile:
    """A file of the operating system. One thread at a time may use it; any thread may close it.

    Errors are converted without a context manager, for speed: some calls run for every append,
    others for every file when a log is opened.
    """

    __slots__ = (
        "_descriptors",
        "_fd",
        "_is_best_effort",
        "_is_closed",
        "_is_locked",
        "_is_unsynced",
        "_is_used",
        "_path",
        "_tail",
    )

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        descriptors: Descriptors,
        is_best_effort: bool = False,
        page_cache_bytes_max: int = PAGE_CACHE_BYTES_MAX,
    ) -> None:
        self._path = path
        self._descriptors = descriptors
        self._is_closed = False
        self._is_best_effort = is_best_effort
        self._is_locked = False
        self._is_unsynced = False
        self._is_used = False
        self._tail = RecentPages(page_cache_bytes_max)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            with descriptors.lock:
                self._fd = descriptors.open(path, flags)
                descriptors.end_use(self, is_kept=False)
        except OSError as error:
            raise _typed_error(error, "open", path) from error

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes."""
        try:
            fd = self._begin_use()
        except DiskFailed as error:
            if self._is_closed:
                raise
            raise ReadFailed(str(error)) from error  # it could not be opened again
        try:
            data = os.pread(fd, size, offset)
            if len(data) in {size, 0}:
                return data
            parts = [data]
            read_size = len(data)
            while read_size < size and (data := os.pread(fd, size - read_size, offset + read_size)):
                parts.append(data)
                read_size += len(data)
            return b"".join(parts)
        except OSError as error:
            reason = f"{error.strerror or error} ({size} bytes at {offset})"
            raise ReadFailed(f"cannot read {self._path}: {reason}") from error
        finally:
            self._end_use()

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write all bytes of the parts (rule 3)."""
        fd = self._begin_use()
        self._is_unsynced = True
        try:
            if len(parts) == 1:
                size = memoryview(parts[0]).nbytes
                if os.pwritev(fd, parts, offset) == size:
                    self._tail.note_write(offset, size)
                    return  # nearly always; otherwise the rest is written again
            remaining = [memoryview(part).cast("B") for part in parts if len(part)]
            while remaining:
                written = os.pwritev(fd, remaining[:_VECTOR_PARTS_MAX], offset)
                self._tail.note_write(offset, written)
                offset += written
                remaining = _unwritten_parts(remaining, written)
        except OSError as error:
            raise _typed_error(error, "write", self._path) from error
        finally:
            self._end_use()

    def drop_cached(self, offset: int, size: int) -> None:
        """Drop pages from the page cache; unsynced bytes stay (rule 10)."""
        start, size = blocks_beginning_in(offset, size)
        if not size:
            return
        fd = self._begin_use()
        try:
            _drop_cached(fd, start, size)
        finally:
            self._end_use()

    def discard_unreadable(self, offset: int, size: int) -> bool:
        """Punch out the first and the last block of a range if they are unreadable; no others.

        If the file system does not support this, the blocks stay and the next write fails.
        """
        fd = self._begin_use()
        has_unreadable = False
        try:
            for block in {offset // _BLOCK_BYTES, (offset + size - 1) // _BLOCK_BYTES}:
                if not _is_readable(fd, block * _BLOCK_BYTES):
                    self._is_unsynced = has_unreadable = True
                    _punch_hole(fd, block * _BLOCK_BYTES)
        finally:
            self._end_use()
        return has_unreadable

    def sync(self) -> None:
        """Wait for fdatasync; if it fails for lack of space, the unsynced data is lost (rule 1)."""
        fd = self._begin_use()
        try:
            os.fdatasync(fd)
            self._is_unsynced = False
            droppable_range = self._tail.take_droppable()
            if droppable_range is not None:
                _drop_cached(fd, *droppable_range)
        except OSError as error:
            raise _typed_error(error, "sync", self._path, may_be_full=False) from error
        finally:
            self._end_use()

    def truncate(self, size: int) -> None:
        """Change the size of the file to `size` bytes."""
        fd = self._begin_use()
        self._is_unsynced = True
        self._tail.truncate(size)
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            raise _typed_error(error, "truncate", self._path) from error
        finally:
            self._end_use()

    def size(self) -> int:
        """Return the size of the file in bytes."""
        fd = self._begin_use()
        try:
            return os.fstat(fd).st_size
        except OSError as error:
            raise _typed_error(error, "get the size of", self._path) from error
        finally:
            self._end_use()

    def lock_range(self, first: int, count: int) -> bool:
        """Acquire a POSIX record lock.

        NB: the lock is lost when this process closes any descriptor of the file.
        """
        fd = self._begin_use()
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first, os.SEEK_SET)
            self._is_locked = True
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                return False
            raise DiskFailed(f"cannot lock {self._path}: {error.strerror}") from error
        finally:
            self._end_use()
        return True

    def lock_whole_file(self) -> bool:
        """Acquire a BSD lock, which belongs to the open file and not to the process."""
        fd = self._begin_use()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_locked = True
        except BlockingIOError:
            return False
        except OSError as error:
            raise DiskFailed(f"cannot lock {self._path}: {error.strerror}") from error
        finally:
            self._end_use()
        return True

    def allocate(self, size: int) -> None:
        """Reserve disk space for the first `size` bytes."""
        fd = self._begin_use()
        self._is_unsynced = True
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise _typed_error(error, "allocate space for", self._path) from error
        finally:
            self._end_use()

    def close(self) -> None:
        """Close the file; if another thread uses it, the end of that use closes it (rule 6)."""
        try:
            with self._descriptors.lock:
                self._is_closed = True
                if not self._is_used:
                    self.release()
        except OSError as error:
            raise _typed_error(error, "close", self._path) from error

    # ---- its descriptor (rule 5)

    def _begin_use(self) -> int:
        with self._descriptors.lock:
            if self._is_closed:
                raise DiskFailed(f"{self._path}: the file is closed")
            if self._fd >= 0:
                self._descriptors.begin_use(self)
            else:
                with _typed_errors("open", self._path):
                    self._fd = self._descriptors.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            self._is_used = True
            return self._fd

    def _end_use(self) -> None:
        with self._descriptors.lock:
            self._is_used = False
            if self._is_closed:
                with suppress(OSError):  # `close` has returned, and cannot raise it
                    self.release()
                return
            is_unsynced = self._is_unsynced and not self._is_best_effort
            self._descriptors.end_use(self, is_kept=self._is_locked or is_unsynced)

    def release(self) -> None:
        """Close the descriptor until the file is used again; the caller holds the lock."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._descriptors.close(self, fd)


def _unwritten_parts(parts: list[memoryview], written_size: int) -> list[memoryview]:
    """Return the parts that follow the first `written_size` bytes."""
    for position, part in enumerate(parts):
        if written_size < len(part):
            return [part[written_size:], *parts[position + 1 :]]
        written_size -= len(part)
    return []


def _is_readable(fd: int, offset: int) -> bool:
    """Return whether a block can be read, at once or on a retry.

    If an error does not show that bytes are lost, the block counts as readable.
    """
    for is_last in (False, True):
        try:
            os.pread(fd, _BLOCK_BYTES, offset)
        except OSError as error:
            if error.errno not in _LOST_BYTES_ERRORS:
                return True
            if not is_last:
                threading.Event().wait(_READ_RETRY_S)
        else:
            return True
    return False


def _punch_hole(fd: int, offset: int) -> None:
    """Punch a block out of a file, and keep the file's size; do nothing if this is unsupported."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None and ctypes.sizeof(ctypes.c_long) == ctypes.sizeof(ctypes.c_int64):
        fallocate(fd, _PUNCH_HOLE_FLAGS, ctypes.c_int64(offset), ctypes.c_int64(_BLOCK_BYTES))


def _drop_cached(fd: int, start: int, size: int) -> None:
    """Drop synced pages from the page cache; do nothing if the file system does not support it."""
    with suppress(OSError):
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)


def _prefetch_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size <= _SMALL_FILE_BYTES_MAX:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        else:
            os.posix_fadvise(fd, 0, _PREFETCHED_BEGINNING_BYTES, os.POSIX_FADV_WILLNEED)
            os.posix_fadvise(
                fd, size - _PREFETCHED_END_BYTES, _PREFETCHED_END_BYTES, os.POSIX_FADV_WILLNEED
            )
    finally:
        os.close(fd)


class RealDisk:
    """The file system of this machine, with a limit of open files (rule 5)."""

    def __init__(
        self,
        open_files_max: int = OPEN_FILES_MAX,
        *,
        page_cache_bytes_max: int = PAGE_CACHE_BYTES_MAX,
    ) -> None:
        self.descriptors = Descriptors(open_files_max)
        self._page_cache_bytes_max = page_cache_bytes_max

    def open(self, path: Path, *, create: bool = False, is_best_effort: bool = False) -> File:
        """Open a file for reading and writing."""
        return RealFile(
            path,
            create=create,
            descriptors=self.descriptors,
            is_best_effort=is_best_effort,
            page_cache_bytes_max=self._page_cache_bytes_max,
        )

    def exists(self, path: Path) -> bool:
        """Return whether a file or a directory of this name exists."""
        return self.identity(path) is not None

    def identity(self, path: Path) -> tuple[int, int] | None:
        """Return the device and the inode of a file now; None if the file does not exist."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _typed_error(error, "get the identity of", path) from error
        return status.st_dev, status.st_ino

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        with _typed_errors("list", directory):
            return sorted(os.listdir(directory))

    def prefetch(self, directory: Path, names: Sequence[str]) -> None:
        """Request that the system reads the bytes into its page cache; do not wait for it."""
        with self.descriptors.reserve_descriptor():
            for name in names:
                with suppress(OSError):  # the later read reports the error
                    _prefetch_file(f"{directory}/{name}")

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents; make the name of each durable in its parent."""
        make_directory_with_parents(
            self, directory, self._make_single_directory, self._sync_existing
        )

    def make_directories(self, directory: Path, names: Sequence[str]) -> None:
        """Create directories in a durable directory, unless they exist, with one sync for all."""
        for name in names:
            self._make_single_directory(directory / name)
        self.sync_directory(directory)

    def _sync_existing(self, directory: Path) -> None:
        """Sync a directory, unless this process may not read it.

        A process can read each directory that it has created. So this process has not created the
        unreadable directory.
        """
        if os.access(directory, os.R_OK):
            self.sync_directory(directory)

    def _make_single_directory(self, directory: Path) -> None:
        with _typed_errors("make", directory):
            directory.mkdir(exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, and replace an existing target."""
        with _typed_errors("rename", source):
            source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file; do nothing if it does not exist."""
        with _typed_errors("remove", path):
            path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        """Wait until the names in a directory are durable."""
        with _typed_errors("sync", directory):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        """Return the free bytes, without the space that is reserved for root."""
        with _typed_errors("get the free space of", directory):
            statistics = os.statvfs(directory)
        return statistics.f_bavail * statistics.f_frsize

    def size_bytes(self, directory: Path) -> int:
        """Return the size in bytes, including the space that is reserved for root."""
        with _typed_errors("get the file system size of", directory):
            statistics = os.statvfs(directory)
        return statistics.f_blocks * statistics.f_frsize
