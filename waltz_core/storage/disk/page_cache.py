"""What the system's memory keeps of a file that is appended to: its newest part.

It is a matter of offsets alone; what comes of it is a hint to the system, on which no byte of a
file depends.

Rules:
    1. What was synced and lies more than `kept_bytes` before the end is given back. Else a log
       fills all memory with what hardly anybody reads again, and each page of it is a new one:
       where a host hands its memory out page by page as it is first touched, a copy into a new page
       costs ten times one into a page that was used before (docs/decisions/024).
    2. What lies before the first byte that was written here is somebody else's, and stays.
    3. It is given back in steps, so that small appends pay nothing for it.
    4. The system gives back whole folios only, which are up to 2 MiB large and begin at a multiple
       of their size. So whoever reads a file piece by piece and wants each off the disk has the
       blocks of that size given back that begin within a piece: once each, before any of it is
       read. At each piece anew, what was read ahead would go, too.
"""

from typing import Final

KEPT_BYTES: Final = 16 * 1024 * 1024
STEP_BYTES: Final = 1024 * 1024
FOLIO_BYTES_MAX: Final = 2 * 1024 * 1024


def blocks_begun(offset: int, size: int, block_bytes: int = FOLIO_BYTES_MAX) -> tuple[int, int]:
    """Return where the blocks lie that begin within a range: an offset and a size (rule 4)."""
    start = -(-offset // block_bytes) * block_bytes
    return start, -(-(offset + size) // block_bytes) * block_bytes - start


class Tail:
    """The newest part of one file, as far as it was written here. Offsets and sizes in bytes."""

    __slots__ = ("_end", "_first", "_kept_bytes", "_start")

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._first = self._start = -1
        self._end = 0

    def wrote(self, offset: int, size: int) -> None:
        """So many bytes were written."""
        if self._start < 0 or offset > self._end:  # rule 2
            self._first = self._start = offset
        self._end = max(self._end, offset + size)

    def cut(self, size: int) -> None:
        """The file has so many bytes now."""
        self._first, self._start = min(self._first, size), min(self._start, size)
        self._end = min(self._end, size)

    def take_old(self) -> tuple[int, int] | None:
        """All that was written is on the disk: return where the old part begins, and its size.

        None as long as it is not worth a call. Whoever calls gives it back (rule 1).
        """
        stop = self._end - self._kept_bytes
        if stop - self._start < STEP_BYTES:
            return None
        # A folio that the last step ended in was not given back by it (rule 4).
        start = max(self._first, self._start - FOLIO_BYTES_MAX)
        self._start = stop
        return start, stop - start
