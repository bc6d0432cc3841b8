"""One file of the simulated disk: its visible content and its durable content.

A power loss affects a file only in these two contents, and in the sectors in which they may differ.
The disk (`simulated_disk.py`) has the names, the steps and the faults, and the rules that are cited
here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SECTOR_BYTES: Final = 512


@dataclass(slots=True, eq=False)
class Inode:
    """The visible (`seen`) and durable (`kept`) content of a file, and its unsynced sectors."""

    seen: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    locked_by: object | None = None

    def touch(self, start: int, end: int) -> None:
        """Mark the sectors of written bytes as dirty, and those wholly written as readable."""
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
        """Return the part of a write that succeeds before an unreadable sector (rule 7)."""
        end = offset + len(data)
        ends = {offset // SECTOR_BYTES, (end - 1) // SECTOR_BYTES} & self.unreadable
        for start in sorted(sector * SECTOR_BYTES for sector in ends):
            if start < offset or end < start + SECTOR_BYTES:
                return data[: max(0, start - offset)]
        return data

    def resize(self, size: int) -> None:
        """Cut the file to a size in bytes, or extend it with zeros."""
        old = len(self.seen)
        if size < old:
            del self.seen[size:]
            self.dirty = {sector for sector in self.dirty if sector * SECTOR_BYTES < size}
            self.unreadable = {sector for sector in self.unreadable if sector * SECTOR_BYTES < size}
        else:
            self.seen.extend(bytes(size - old))
            # The new part reads as zeros on the disk as well, whatever was stored there before.
            self.touch(old, size)

    def carry_over(self, sectors: Iterable[int], size: int) -> None:
        """Make some sectors, in any order, and a size durable (rule 3)."""
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
        """Make clean sectors show their durable content (rule 8), with lost syncs and bit rot.

        The visible size stays, because the operating system has it in memory.
        """
        end = min(offset + size, len(self.seen))
        if end <= offset:
            return
        for sector in range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            if sector not in self.dirty:
                start = sector * SECTOR_BYTES
                stop = min(start + SECTOR_BYTES, len(self.seen))
                self.seen[start:stop] = self.kept[start:stop].ljust(stop - start, b"\0")
