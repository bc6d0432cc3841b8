"""Room on a disk: what is kept back of it, and when appends are refused for want of it.

A full disk must not stop what makes room, or what makes a replica whole. So the last of it is never
given to appends, and whether there is any is asked in one place.

Rules (docs/design/correctness.md 2.4, row 9):
    1. The reserve file holds room for truncation, repair, marks and slots. It is given back to the
       disk when one of them finds none, and filled again as soon as there is enough.
    2. An append is refused before it writes anything, when there is not room for it beside the
       whole reserve. What is refused says how much was free.
       A copy that is put behind a log counts as an append: there may be any amount of it.
    3. Reading needs no room.
    4. The disk is not asked for every append: half of what it had to spare, and no more than
       `SPARE_BYTES_MAX`, is written before it is asked again. Whoever else fills it meanwhile makes
       a write fail, and that one is said to have found no room (`lacked`).
    5. One thread at a time: else the reserve might be given back while another one fills it, and
       be taken for kept.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.storage.disk.file_system import Disk
from waltz_core.storage.files.format import LINEAGE_ENTRY_BYTES, OFFSET_BYTES

RESERVE_NAME: Final = "waltz-x.reserve"
SPARE_BYTES_MAX: Final = 1024 * 1024
ResultT = TypeVar("ResultT")


def append_bytes(record_bytes: int, record_count: int, batch_count: int) -> int:
    """Return what an append takes on the disk."""
    return record_bytes + OFFSET_BYTES * record_count + LINEAGE_ENTRY_BYTES * batch_count


class Room:
    """The room of one storage directory. Calls block, and may come from any thread."""

    def __init__(self, disk: Disk, directory: Path, reserve_bytes: int) -> None:
        self.is_short = False  # appends are refused
        self._lock = threading.RLock()  # rule 5
        self._disk = disk
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._is_reserved = reserve_bytes == 0
        self._wanted_bytes = 0  # by the append that was refused last
        self._spare_bytes = 0  # may be written before the disk is asked again (rule 4)

    @property
    def reserved_bytes(self) -> int:
        """How much is kept back now."""
        return self._reserve_bytes if self._is_reserved else 0

    def check(self, size: int) -> None:
        """See that an append of so many bytes may be written (rule 2).

        Raises:
            NoSpace: it may not.
        """
        with self._lock:
            if size <= self._spare_bytes:
                self._spare_bytes -= size
                return
            free = self.free_bytes()
            wanted = size if self._is_reserved else size + self._reserve_bytes
            self.is_short = free < wanted
            self._spare_bytes = min((free - wanted) // 2, SPARE_BYTES_MAX)
            if self.is_short:
                self._wanted_bytes = size
                raise NoSpace(
                    f"{self._directory}: the disk is full: expected {wanted} bytes for an append "
                    f"and the reserve, found {free} free"
                )

    def lacked(self, size: int) -> None:
        """An append of so many bytes has found no room though there should have been some."""
        with self._lock:
            self.is_short, self._wanted_bytes, self._spare_bytes = True, size, 0

    def with_reserve(self, call: Callable[[], ResultT]) -> ResultT:
        """Call; what finds no room is called again with that of the reserve."""
        try:
            return call()
        except NoSpace:
            self.release()
            return call()

    def release(self) -> None:
        """Give the reserve back to the disk, for a truncation or a repair (rule 1).

        A disk that fails at that loses nothing: whoever needed the room is told that there is none.
        """
        with self._lock, suppress(DiskFailed, NoSpace):
            self._is_reserved = self._reserve_bytes == 0
            self.is_short, self._spare_bytes = True, 0
            self._disk.unlink(self._directory / RESERVE_NAME)
            self._disk.sync_directory(self._directory)

    def fill(self) -> None:
        """Keep the reserve back, if there is room for all of it; raises DiskFailed."""
        if not self._reserve_bytes:
            return
        with self._lock:
            file = self._disk.open(self._directory / RESERVE_NAME, create=True)
            try:
                file.allocate(self._reserve_bytes)
                file.sync()
                self._is_reserved = True
            except NoSpace:
                file.truncate(0)
                self.is_short = True
            finally:
                file.close()

    def look_again(self) -> None:
        """See whether there is room by now, and fill the reserve again."""
        with self._lock, suppress(DiskFailed, NoSpace):
            if not self._is_reserved and self.free_bytes() >= self._reserve_bytes:
                self.fill()
            self._spare_bytes = 0
            self.check(self._wanted_bytes)
            self._spare_bytes = 0  # nothing was written for it

    def free_bytes(self) -> int:
        """Return how much more can be written, beside the reserve; raises DiskFailed."""
        return self._disk.free_bytes(self._directory)

    def size_bytes(self) -> int:
        """Return the size of the disk; raises DiskFailed."""
        return self._disk.size_bytes(self._directory)
