"""What the system's memory keeps of a file that is appended to: its newest part.

Why it stands alone: it is a matter of offsets alone; what comes of it is a hint to the system, on
which no byte of a file depends.

Rules:
    1. What was synced and lies more than `kept_bytes` before the end is given back. Else a log
       fills all memory with what hardly anybody reads again, and each page of it is a new one:
       where a host hands its memory out page by page as it is first touched, a copy into a new page
       costs ten times one into a page that was used before (docs/decisions/024).
    2. What lies before the first byte that was written here is somebody else's, and stays.
    3. It is given back in steps, so that small appends pay nothing for it.
"""

from typing import Final

KEPT_BYTES: Final = 16 * 1024 * 1024
STEP_BYTES: Final = 1024 * 1024
# The system gives back whole folios only. One that a step ends in is given back by a later one,
# which begins so much earlier: they have up to 2 MiB.
_FOLIO_BYTES_MAX: Final = 2 * 1024 * 1024


class Tail:
    """The newest part of one file, as far as it was written here. Offsets and sizes in bytes."""

    __slots__ = ("_end", "_first", "_kept_bytes", "_start")

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._first = self._start = -1
        self._end = 0

    def wrote(self, offset: int, size: int) -> None:
        """So many bytes were written."""
        if self._start < 0:
            self._first = self._start = offset
        self._end = max(self._end, offset + size)

    def take_old(self) -> tuple[int, int] | None:
        """All that was written is on the disk: return where the old part begins, and its size.

        None as long as it is not worth a call. Whoever calls gives it back (rule 1).
        """
        stop = self._end - self._kept_bytes
        if stop - self._start < STEP_BYTES:
            return None
        start = max(self._first, self._start - _FOLIO_BYTES_MAX)
        self._start = stop
        return start, stop - start
