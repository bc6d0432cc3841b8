"""The space on a disk: how much is reserved, and when appends are rejected.

A full disk must not prevent truncations and repairs. So appends never use the last part of the
disk. Only `DiskSpace` decides whether an append has space.

Rules (docs/design/correctness.md 2.4, row 9):
    1. The reserve is a file that allocates space for truncations, repairs, marks and slots. When
       one of these operations finds no space, the file is deleted. It is created again as soon as
       there is enough space.
    2. An append is rejected before it writes anything, unless there is space for it in addition to
       the whole reserve. The error states how many bytes were free. A copy of records to the end of
       a log is treated like an append, because its size is not limited.
    3. Reading needs no space.
    4. The free space is not queried for every append. After a query, appends may write half of the
       available space, and at most `UNCHECKED_BYTES_MAX`, before the next query. If another process
       fills the disk in the meantime, a write fails for lack of space, and the caller calls
       `note_shortage`.
    5. Only one thread at a time may change the reserve. If two threads could change it, one thread
       might release the reserve while the other thread fills it, and `DiskSpace` would treat the
       reserve as filled.
    6. The rate at which the disk fills is measured over the last day: an average since the start
       would include the time before old segments were removed.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.storage.disk.file_system import Disk
from waltz_core.storage.files.format import LINEAGE_ENTRY_BYTES, OFFSET_BYTES

RESERVE_FILE_NAME: Final = "waltz-x.reserve"
UNCHECKED_BYTES_MAX: Final = 1024 * 1024
# The size of a new segment without records: three files of one block, their names, and a margin.
NEW_FILES_BYTES: Final = 64 * 1024
SAMPLE_INTERVAL_MS: Final = 3_600_000
DAY_MS: Final = 24 * SAMPLE_INTERVAL_MS
ResultT = TypeVar("ResultT")


def disk_bytes_of_append(record_bytes: int, record_count: int, batch_count: int) -> int:
    """Return the bytes that an append uses on the disk."""
    return record_bytes + OFFSET_BYTES * record_count + LINEAGE_ENTRY_BYTES * batch_count


class DiskSpace:
    """The space of one storage directory. Calls block, and may come from any thread."""

    def __init__(self, disk: Disk, directory: Path, reserve_bytes: int) -> None:
        self.is_full = False  # whether appends are rejected
        self._lock = threading.RLock()  # rule 5
        self._disk = disk
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._is_reserved = reserve_bytes == 0
        self._rejected_bytes = 0  # the size of the append that was rejected last
        self._unchecked_bytes = 0  # bytes that may be written before the next query (rule 4)
        # Pairs of time in ms and free bytes (rule 6).
        self._samples: deque[tuple[int, int]] = deque(maxlen=DAY_MS // SAMPLE_INTERVAL_MS)

    @property
    def reserved_bytes(self) -> int:
        """The present size of the reserve."""
        return self._reserve_bytes if self._is_reserved else 0

    def check_append(self, size: int) -> None:
        """Check that an append of `size` bytes may be written (rule 2).

        Raises:
            NoSpace: there is no space for it.
        """
        with self._lock:
            if size <= self._unchecked_bytes:
                self._unchecked_bytes -= size
                return
            self._check_free(size)

    def _check_free(self, size: int) -> None:
        free_bytes = self.free_bytes()
        needed_bytes = size if self._is_reserved else size + self._reserve_bytes
        self.is_full = free_bytes < needed_bytes
        self._unchecked_bytes = min((free_bytes - needed_bytes) // 2, UNCHECKED_BYTES_MAX)
        if self.is_full:
            self._rejected_bytes = size
            raise NoSpace(
                f"{self._directory}: the disk is full: an append and the reserve need "
                f"{needed_bytes} bytes, and {free_bytes} are free"
            )

    def check_files_fit(self) -> None:
        """Check that small new files have space, before a change that must not be interrupted.

        Raises:
            NoSpace: there is no space for the files; nothing was written.
        """
        free_bytes = self.free_bytes()
        if free_bytes < NEW_FILES_BYTES:
            raise NoSpace(
                f"{self._directory}: the disk is full: new files need {NEW_FILES_BYTES} bytes, "
                f"and {free_bytes} are free"
            )

    def note_shortage(self, size: int) -> None:
        """Note that an append found no space although `check_append` allowed it (rule 4)."""
        with self._lock:
            self.is_full, self._rejected_bytes, self._unchecked_bytes = True, size, 0

    def call_with_reserve(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function; if it finds no space, release the reserve and call it again."""
        try:
            return call()
        except NoSpace:
            self.release_reserve()
            return call()

    def release_reserve(self) -> None:
        """Release the reserve to the disk, for a truncation or a repair (rule 1).

        A disk error is ignored: the operation that needs the space will fail with NoSpace.
        """
        with self._lock, suppress(DiskFailed, NoSpace):
            self._is_reserved = self._reserve_bytes == 0
            self.is_full, self._unchecked_bytes = True, 0
            self._disk.unlink(self._directory / RESERVE_FILE_NAME)
            self._disk.sync_directory(self._directory)

    def fill_reserve(self) -> None:
        """Fill the reserve, if there is space for all of it; raises DiskFailed."""
        if not self._reserve_bytes:
            return
        with self._lock:
            try:
                file = self._disk.open(self._directory / RESERVE_FILE_NAME, create=True)
            except NoSpace:
                self.is_full = True
                return
            try:
                file.allocate(self._reserve_bytes)
                file.sync()
                self._is_reserved = True
            except NoSpace:
                file.truncate(0)
                self.is_full = True
            finally:
                file.close()

    def recheck(self) -> None:
        """Query the free space again, and fill the reserve if there is enough."""
        with self._lock, suppress(DiskFailed, NoSpace):
            if not self._is_reserved and self.free_bytes() >= self._reserve_bytes:
                self.fill_reserve()
            self._unchecked_bytes = 0
            self._check_free(self._rejected_bytes)
            self._unchecked_bytes = 0  # no append was written

    def free_bytes(self) -> int:
        """Return how many more bytes can be written, without the reserve; raises DiskFailed."""
        return self._disk.free_bytes(self._directory)

    def note_free_bytes(self, now_ms: int) -> None:
        """Record a sample for `filling_bytes_per_day`; called every `SAMPLE_INTERVAL_MS`."""
        with suppress(DiskFailed):
            self._samples.append((now_ms, self.free_bytes()))

    def filling_bytes_per_day(self, free_bytes: int, now_ms: int) -> int | None:
        """Return by how many bytes per day the free space decreases (rule 6).

        None in the first hour.
        """
        oldest_ms, oldest_free_bytes = self._samples[0] if self._samples else (now_ms, free_bytes)
        elapsed_ms = now_ms - oldest_ms
        if elapsed_ms < SAMPLE_INTERVAL_MS:
            return None
        return max(0, (oldest_free_bytes - free_bytes) * DAY_MS // elapsed_ms)

    def size_bytes(self) -> int:
        """Return the size of the file system in bytes; raises DiskFailed."""
        return self._disk.size_bytes(self._directory)
