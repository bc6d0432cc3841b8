"""One file of the simulated disk: its visible content and its durable content.

A power loss affects a file only in these two contents, and in the sectors in which they may differ.
`simulated_disk.py` has the names, steps and faults of a disk, and the rules that comments here
cite.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SECTOR_BYTES: Final = 512


@dataclass(slots=True, eq=False)
class Inode:
    """The visible and the durable content of a file, and its unsynced sectors."""

    visible: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty_sectors: set[int] = field(default_factory=set)
    unreadable_sectors: set[int] = field(default_factory=set)
    locked_by: object | None = None

    def mark_written(self, start: int, end: int) -> None:
        """Mark the sectors of written bytes as dirty, and fully written sectors as readable."""
        if start >= end:
            return
        first, last = start // SECTOR_BYTES, (end - 1) // SECTOR_BYTES
        if first == last:
            self.dirty_sectors.add(first)
        else:
            self.dirty_sectors.update(range(first, last + 1))
        if self.unreadable_sectors:
            self.unreadable_sectors.difference_update(
                range(-(-start // SECTOR_BYTES), end // SECTOR_BYTES)
            )

    def writable_part(self, offset: int, data: bytes) -> bytes:
        """Return the part of a write that succeeds before an unreadable sector (rule 7)."""
        end = offset + len(data)
        ends = {offset // SECTOR_BYTES, (end - 1) // SECTOR_BYTES} & self.unreadable_sectors
        for start in sorted(sector * SECTOR_BYTES for sector in ends):
            if start < offset or end < start + SECTOR_BYTES:
                return data[: max(0, start - offset)]
        return data

    def resize(self, size: int) -> None:
        """Cut the file to a size in bytes, or extend it with zeros."""
        old = len(self.visible)
        if size < old:
            del self.visible[size:]
            self.dirty_sectors = {
                sector for sector in self.dirty_sectors if sector * SECTOR_BYTES < size
            }
            self.unreadable_sectors = {
                sector for sector in self.unreadable_sectors if sector * SECTOR_BYTES < size
            }
        else:
            self.visible.extend(bytes(size - old))
            # The new part reads as zeros on the disk as well, whatever was stored there before.
            self.mark_written(old, size)

    def make_durable(self, sectors: Iterable[int], size: int) -> None:
        """Make some sectors, in any order, and a size durable (rule 3)."""
        durable, visible = self.durable, self.visible
        if len(durable) < size:
            durable.extend(bytes(size - len(durable)))
        elif len(durable) > size:
            del durable[size:]
        end_max = min(len(visible), size)
        for sector in sectors:
            start = sector * SECTOR_BYTES
            end = start + SECTOR_BYTES
            if end > end_max:
                end = end_max
                if start >= end:
                    continue
            durable[start:end] = visible[start:end]

    def drop_cached(self, offset: int, size: int) -> None:
        """Make clean sectors show their durable content (rule 8), including lost syncs and bit rot.

        The visible size stays, because the operating system has it in memory.
        """
        end = min(offset + size, len(self.visible))
        if end <= offset:
            return
        for sector in range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            if sector not in self.dirty_sectors:
                start = sector * SECTOR_BYTES
                stop = min(start + SECTOR_BYTES, len(self.visible))
                self.visible[start:stop] = self.durable[start:stop].ljust(stop - start, b"\0")
