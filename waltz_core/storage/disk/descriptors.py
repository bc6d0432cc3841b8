"""The descriptors that a disk may have open: few of them, however many files there are.

Which file gives its descriptor up for another's is a matter of turns and counts, and of no file's
bytes.

Rules:
    1. So many are open as was said, over all files and threads: the one that was not used for
       longest is closed. Those that their files keep may be more.
    2. A file that is in use is never closed for another.
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
        """Give it up until the file is used again; whoever calls has the lock."""


class Descriptors:
    """The open descriptors of one disk; whoever calls has the lock."""

    def __init__(self, count_max: int) -> None:
        assert count_max > 0
        self.lock = threading.Lock()
        self._count = 0
        self._count_max = count_max
        self._idle: dict[
            DescriptorHolder, None
        ] = {}  # those that may be closed, the longest unused first

    def open(self, path: Path, flags: int) -> int:
        """Open one more, which is in use."""
        self._make_room(1)
        fd = os.open(path, flags, 0o644)
        self._count += 1
        return fd

    def use(self, file: DescriptorHolder) -> None:
        """Keep a file open until it is left."""
        self._idle.pop(file, None)

    def leave(self, file: DescriptorHolder, *, is_kept: bool) -> None:
        """Let a file be closed when another needs its place, unless it is to be kept open."""
        if not is_kept:
            self._idle[file] = None
        self._make_room(0)

    def close(self, file: DescriptorHolder, fd: int) -> None:
        """Close a file's descriptor."""
        self._idle.pop(file, None)
        self._count -= 1
        os.close(fd)

    @contextmanager
    def one_beside(self) -> Iterator[None]:
        """Leave room for one descriptor that is no file's; takes the lock itself."""
        with self.lock:
            self._make_room(1)
            self._count += 1
        try:
            yield
        finally:
            with self.lock:
                self._count -= 1

    def _make_room(self, wanted: int) -> None:
        while self._count + wanted > self._count_max and self._idle:
            with suppress(OSError):  # all that was written is synced, so nothing can be lost
                next(iter(self._idle)).release()
