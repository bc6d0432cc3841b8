"""The lock files of one partition: the newest lock blocks that its owners have sent.

No data depends on these files. They may be missing, torn, old or incomplete at any time: a reader
trusts only the blocks that match the log (`waltz_core/records/lock_blocks.py`). So they are never
synced, their descriptors may be closed at any time, and their errors are not reported.

Rules:
    1. There are two files. Blocks are appended to the newer file. When the newer file is full, it
       replaces the older file, and a new file is begun. So at least the newest `file_bytes_max`
       bytes are available, and the two files together use hardly more than twice `file_bytes_max`.
    2. After an error, the files are neither written nor read until the log is opened again.
    3. The files are opened when the first block is appended or read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.storage.disk.file_system import Disk, File

Buffer = bytes | memoryview

LOCKS_FILE_NAME: Final = "waltz-x.lck"
OLDER_LOCKS_FILE_NAME: Final = "waltz-x.lck.old"
FILE_BYTES_MAX: Final = 8 * 1024 * 1024


class LockBlockFile:
    """The newest lock blocks of one partition, in two files."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self.file_bytes_max = FILE_BYTES_MAX
        self._disk = disk
        self._path = directory / LOCKS_FILE_NAME
        self._older_path = directory / OLDER_LOCKS_FILE_NAME
        self._file: File | None = None
        self._size = 0
        self._has_failed = False

    def append(self, blocks: Sequence[Buffer]) -> None:
        """Append blocks, oldest first; they are not durable."""
        if self._has_failed or not blocks:
            return
        try:
            file = self._open()
            if self._size >= self.file_bytes_max:
                file = self._rotate(file)
            file.pwrite(blocks, self._size)
        except (DiskFailed, NoSpace):
            self._has_failed = True
            return
        self._size += sum(len(block) for block in blocks)

    def newest(self, bytes_max: int) -> bytes:
        """Return the newest `bytes_max` bytes, from both files if necessary.

        Return no bytes after an error.
        """
        if self._has_failed:
            return b""
        try:
            file = self._open()
            blocks = file.pread(min(self._size, bytes_max), max(0, self._size - bytes_max))
            rest = bytes_max - len(blocks)
            return self._read_older(rest) + blocks if rest else blocks
        except (DiskFailed, NoSpace):
            self._has_failed = True
            return b""

    def close(self) -> None:
        """Close the file; later blocks are dropped."""
        self._has_failed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> File:
        if self._file is None:
            self._file = self._disk.open(self._path, create=True, is_best_effort=True)
            self._size = self._file.size()
        return self._file

    def _rotate(self, file: File) -> File:
        self._file = None
        file.close()
        self._disk.rename(self._path, self._older_path)
        return self._open()

    def _read_older(self, bytes_max: int) -> bytes:
        if not self._disk.exists(self._older_path):
            return b""
        file = self._disk.open(self._older_path)
        try:
            size = file.size()
            return file.pread(min(size, bytes_max), max(0, size - bytes_max))
        finally:
            file.close()
