"""Limits the number of open file descriptors of a disk, however many files there are.

This file only decides which file must close its descriptor so that another file can be opened.

Rules:
    1. All files and threads together have at most `count_max` open descriptors. To open one more,
       the least recently used descriptor is closed. Files that must stay open may exceed the limit.
    2. While a file is in use, it is never closed for another file.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


class DescriptorHolder(Protocol):
    """A file that has a descriptor."""

    def release(self) -> None:
        """Close the descriptor until the file is used again; the caller holds the lock."""


class Descriptors:
    """The open descriptors of one disk; the caller of each method holds the lock."""

    def __init__(self, count_max: int) -> None:
        assert count_max > 0
        self.lock = threading.Lock()
        self._count = 0
        self._count_max = count_max
        # The files that may be closed; the least recently used file is the first.
        self._idle_files: dict[DescriptorHolder, None] = {}

    def open(self, path: Path, flags: int) -> int:
        """Open a descriptor for a file, which is in use from now on; raises OSError."""
        self._close_idle(1)
        fd = os.open(path, flags, 0o644)
        self._count += 1
        return fd

    def begin_use(self, file: DescriptorHolder) -> None:
        """Keep a file open until `end_use` is called for it."""
        self._idle_files.pop(file, None)

    def end_use(self, file: DescriptorHolder, *, is_kept: bool) -> None:
        """End the use of a file. Unless `is_kept`, the file may then be closed for another file."""
        if not is_kept:
            self._idle_files[file] = None
        self._close_idle(0)

    def close(self, file: DescriptorHolder, fd: int) -> None:
        """Close the descriptor of a file."""
        self._idle_files.pop(file, None)
        self._count -= 1
        os.close(fd)

    @contextmanager
    def reserve_descriptor(self) -> Iterator[None]:
        """Reserve one descriptor for a file that is opened elsewhere; acquires the lock itself."""
        with self.lock:
            self._close_idle(1)
            self._count += 1
        try:
            yield
        finally:
            with self.lock:
                self._count -= 1

    def _close_idle(self, new_count: int) -> None:
        while self._count + new_count > self._count_max and self._idle_files:
            with suppress(OSError):  # all written bytes are synced, so nothing can be lost
                next(iter(self._idle_files)).release()
