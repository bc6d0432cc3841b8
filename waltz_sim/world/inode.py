"""One file of the simulated disk: what a program sees of it, and what is on the platter.

The two contents, and the sectors in which they may differ, are the whole of what a power loss can
do to a file; names, steps and faults are the disk's. So are the rules that are named here
(`simulated_disk.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SECTOR_BYTES: Final = 512


@dataclass(slots=True, eq=False)
class Inode:
    """One file's contents, seen and on the platter; `dirty` are the sectors to be synced."""

    seen: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    locked_by: object | None = None

    def touch(self, start: int, end: int) -> None:
        """Bytes were written: their sectors are dirty, and no longer lost where whole."""
        if start >= end:
            return
        first, last = start // SECTOR_BYTES, (end - 1) // SECTOR_BYTES
        if first == last:
            self.dirty.add(first)
        else:
            self.dirty.update(range(first, last + 1))
        if self.unreadable:
            self.unreadable.difference_update(range(-(-start // SECTOR_BYTES), end // SECTOR_BYTES))

    def up_to_lost(self, offset: int, data: bytes) -> bytes:
        """Return how much of a write goes through (rule 7)."""
        end = offset + len(data)
        ends = {offset // SECTOR_BYTES, (end - 1) // SECTOR_BYTES} & self.unreadable
        for start in sorted(sector * SECTOR_BYTES for sector in ends):
            if start < offset or end < start + SECTOR_BYTES:
                return data[: max(0, start - offset)]
        return data

    def resize(self, size: int) -> None:
        """Cut it, or let it grow by zeros."""
        old = len(self.seen)
        if size < old:
            del self.seen[size:]
            self.dirty = {one for one in self.dirty if one * SECTOR_BYTES < size}
            self.unreadable = {one for one in self.unreadable if one * SECTOR_BYTES < size}
        else:
            self.seen.extend(bytes(size - old))
            # What is grown over reads as zeros on the platter too, whatever lay there before.
            self.touch(old, size)

    def carry_over(self, sectors: Iterable[int], size: int) -> None:
        """Bring sectors, in any order, and a size to the platter (rule 3)."""
        kept, seen = self.kept, self.seen
        if len(kept) < size:
            kept.extend(bytes(size - len(kept)))
        elif len(kept) > size:
            del kept[size:]
        end_max = min(len(seen), size)
        for sector in sectors:
            start = sector * SECTOR_BYTES
            end = start + SECTOR_BYTES
            if end > end_max:
                end = end_max
                if start >= end:
                    continue
            kept[start:end] = seen[start:end]

    def drop_cached(self, offset: int, size: int) -> None:
        """See of clean sectors what is on the platter (rule 8): what syncs have lost, what rotted.

        No file is cut by it: the system knows the size by heart.
        """
        end = min(offset + size, len(self.seen))
        if end <= offset:
            return
        for sector in range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            if sector not in self.dirty:
                start = sector * SECTOR_BYTES
                stop = min(start + SECTOR_BYTES, len(self.seen))
                self.seen[start:stop] = self.kept[start:stop].ljust(stop - start, b"\0")
