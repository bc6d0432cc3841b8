"""The descriptors that a disk may have open: a limited number, however many files there are.

This file only decides which file closes its descriptor to make room for another.

Rules:
    1. Over all files and threads, at most `count_max` descriptors are open: to open one more, the
       least recently used one is closed. Files that must stay open may exceed the limit.
    2. A file is never closed for another one while it is in use.
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
        """Close it until the file is used again; the caller holds the lock."""


class Descriptors:
    """The open descriptors of one disk; the caller holds the lock."""

    def __init__(self, count_max: int) -> None:
        assert count_max > 0
        self.lock = threading.Lock()
        self._count = 0
        self._count_max = count_max
        self._idle: dict[
            DescriptorHolder, None
        ] = {}  # those that may be closed, least recently used first

    def open(self, path: Path, flags: int) -> int:
        """Open one more, which is in use."""
        self._close_idle(1)
        fd = os.open(path, flags, 0o644)
        self._count += 1
        return fd

    def begin_use(self, file: DescriptorHolder) -> None:
        """Keep a file open until it is left."""
        self._idle.pop(file, None)

    def end_use(self, file: DescriptorHolder, *, is_kept: bool) -> None:
        """Let a file be closed when another needs its place, unless it must stay open."""
        if not is_kept:
            self._idle[file] = None
        self._close_idle(0)

    def close(self, file: DescriptorHolder, fd: int) -> None:
        """Close a file's descriptor."""
        self._idle.pop(file, None)
        self._count -= 1
        os.close(fd)

    @contextmanager
    def reserve_one(self) -> Iterator[None]:
        """Leave room for one descriptor outside this count; takes the lock itself."""
        with self.lock:
            self._close_idle(1)
            self._count += 1
        try:
            yield
        finally:
            with self.lock:
                self._count -= 1

    def _close_idle(self, wanted: int) -> None:
        while self._count + wanted > self._count_max and self._idle:
            with suppress(OSError):  # everything written is synced, so nothing can be lost
                next(iter(self._idle)).release()
