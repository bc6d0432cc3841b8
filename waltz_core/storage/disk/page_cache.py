"""Limits how much of a log file stays in the page cache: only the newest part.

This file only computes offsets. The result is a hint to the system: no byte of a file depends on
it.

Rules:
    1. Synced bytes that are more than `kept_bytes` before the end of the file are dropped. Without
       this rule, a log would fill all memory with pages that are hardly ever read again. On some
       virtual machines, the host provides a page only when it is first used. There, a copy into a
       new page costs ten times as much as a copy into a page that was used before
       (docs/decisions/024).
    2. Bytes before the first byte that this process has written are never dropped: other processes
       may need them.
    3. Pages are dropped in large steps, so that small appends have no additional cost.
    4. The system drops only whole folios. A folio is a group of pages of up to 2 MiB that begins at
       a multiple of its size. A reader that must not read from the page cache reads a file piece by
       piece. Before each piece, it drops the 2 MiB blocks that begin within the piece. So each
       block is dropped only once. A second drop, before the next piece, would also drop the bytes
       that the system has read ahead.
"""

from typing import Final

PAGE_CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
DROP_STEP_BYTES: Final = 1024 * 1024
FOLIO_BYTES_MAX: Final = 2 * 1024 * 1024


def blocks_beginning_in(
    offset: int, size: int, block_bytes: int = FOLIO_BYTES_MAX
) -> tuple[int, int]:
    """Return the blocks that begin within a range, as an offset and a size in bytes (rule 4)."""
    start = -(-offset // block_bytes) * block_bytes
    return start, -(-(offset + size) // block_bytes) * block_bytes - start


class RecentPages:
    """The part of one file that this process has written. Offsets and sizes are in bytes."""

    __slots__ = ("_end", "_first", "_kept_bytes", "_start")

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._first = self._start = -1
        self._end = 0

    def note_write(self, offset: int, size: int) -> None:
        """Note that `size` bytes were written at `offset`."""
        if self._start < 0 or offset > self._end:  # rule 2
            self._first = self._start = offset
        self._end = max(self._end, offset + size)

    def truncate(self, size: int) -> None:
        """Note that the file was truncated to `size` bytes."""
        self._first, self._start = min(self._first, size), min(self._start, size)
        self._end = min(self._end, size)

    def take_droppable(self) -> tuple[int, int] | None:
        """Return offset and size of the bytes to drop from the page cache (rule 1).

        The caller must have synced all written bytes, and drops the returned range. Return None if
        there are too few bytes to drop.
        """
        stop = self._end - self._kept_bytes
        if stop - self._start < DROP_STEP_BYTES:
            return None
        # The last step did not drop the folio in which it ended (rule 4).
        start = max(self._first, self._start - FOLIO_BYTES_MAX)
        self._start = stop
        return start, stop - start
