"""A disk in memory that can lose unsynced data: the simulated version of `file_system.py`.

A storage's promises must survive a power loss, and a real disk cannot simulate a power loss. For
each file, this disk keeps the visible content, the durable content, and the set of sectors that
differ.

Rules:
    1. Only `sync` and `sync_directory` make data durable, and only the data of their own file or
       directory.
    2. A power loss keeps any subset of the unsynced sectors, and any size between the durable and
       the visible size. Of the changes of names, it keeps the first few, as a journal does.
    3. A sector (512 bytes) is written as a whole or not at all, also by a failing write.
    4. After a failed sync, the sectors are marked as clean. So the program sees the sectors, but
       the sectors never become durable, and the next sync reports no error. ext4, XFS and Btrfs do
       the same.
    5. Every call that changes the disk is a step. A fault is planned for the step with a given
       number, for the next step of a given kind, or for a read. A callback reports when the fault
       occurs.
    6. A lying disk reports syncs that it has not done.
    7. An unreadable sector stays unreadable until it is discarded, cut, or written completely. A
       partial write would have to read the rest of the sector.
    8. Clean sectors may be dropped from the cache at any time, and are then read from the disk.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from waltz_core.errors import DiskFailed, NoSpace, ReadFailed
from waltz_core.storage.disk.page_cache import blocks_beginning_in
from waltz_sim.world.inode import SECTOR_BYTES, Inode

if TYPE_CHECKING:
    from random import Random

    from waltz_core.storage.disk.file_system import Buffer, File

FREE_BYTES: Final = 1 << 40  # the size of a disk without a limit
_FOLIO_BYTES: Final = 4 * SECTOR_BYTES  # the unit in the page cache; `page_cache.py`, rule 4
OnInjected = Callable[[], None]


class PowerLoss(BaseException):
    """The machine is off. This is not an error of the disk, and no caller may handle it."""


class Survival(Enum):
    """Which unsynced changes survive a power loss."""

    NOTHING = auto()
    EVERYTHING = auto()  # also used for a killed process
    ANY_SECTORS = auto()
    ENDS = auto()  # the first and the last sector of each write, and no sector between them


class DiskFault(Enum):
    """A fault that occurs once, at a planned step."""

    POWER_LOSS = auto()
    IO_ERROR = auto()
    DISK_FULL = auto()


class Contents(NamedTuple):
    """The durable contents of a disk, as in a backup."""

    files: dict[Path, bytes]
    directories: frozenset[Path]


class _PlannedFault(NamedTuple):
    fault: DiskFault | None
    on_injected: OnInjected | None


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A name was added, removed or moved: `target` now names `inode`, or no file."""

    target: Path
    inode: Inode | None = None
    source: Path | None = None

    def apply(self, names: dict[Path, Inode]) -> None:
        if self.source is not None:
            names.pop(self.source, None)
        if self.inode is None:
            names.pop(self.target, None)
        else:
            names[self.target] = self.inode


class SimFile:
    """An open file of a `SimDisk`."""

    def __init__(
        self, disk: "SimDisk", path: Path, inode: Inode, *, is_best_effort: bool = False
    ) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._is_best_effort = is_best_effort
        self._boot_number = disk.boot_count
        self._is_open = True
        disk.open_count += 1

    def _check(self) -> None:
        disk = self._disk
        if disk.is_powered_off:
            raise PowerLoss
        assert self._boot_number == disk.boot_count, "the file was opened before the power loss"
        assert self._is_open, f"{self._path} is closed"

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset` on; fewer only at the end of the file."""
        self._check()
        assert size >= 0
        assert offset >= 0
        disk = self._disk
        disk.read_count += 1
        if disk.read_plans:
            disk.check_read(self._path)
        unreadable = self._inode.unreadable_sectors
        if unreadable and size:
            sectors = range(offset // SECTOR_BYTES, (offset + size - 1) // SECTOR_BYTES + 1)
            if not unreadable.isdisjoint(sectors):
                raise ReadFailed(f"cannot read {self._path}: a sector cannot be read")
        return bytes(self._inode.visible[offset : offset + size])

    def pwrite(self, parts: Sequence["Buffer"], offset: int) -> None:
        """Write the concatenated parts; a fault leaves the first bytes written."""
        self._check()
        disk, inode = self._disk, self._inode
        data = b"".join(parts)
        size = len(data)
        fault = disk.step("write", self._path)
        if fault is not None:
            has_grown = offset + size > len(inode.visible)
            data = data[: _written_bytes(fault, offset, size, has_grown=has_grown)]
        elif disk.capacity_bytes is not None:
            space = disk.space_after(inode, offset + size)
            if space < 0:
                data = data[: max(0, size + space)]
                fault = DiskFault.DISK_FULL
        whole, data = data, inode.writable_part(offset, data) if inode.unreadable_sectors else data
        if data:
            if len(inode.visible) < offset:
                inode.resize(offset)
            end = offset + len(data)
            inode.visible[offset:end] = data
            inode.mark_written(offset, end)
        if fault is None and len(data) < len(whole):
            fault = DiskFault.IO_ERROR  # rule 7
        disk.raise_fault(fault, "write", self._path)

    def drop_cached(self, offset: int, size: int) -> None:
        """Drop the clean sectors in the blocks of a range from the cache (rule 8)."""
        self._check()
        self._inode.drop_cached(*blocks_beginning_in(offset, size, _FOLIO_BYTES))

    def discard_unreadable(self, offset: int, size: int) -> bool:
        """Zero unreadable sectors at a range's ends; return whether there were any (rule 7)."""
        self._check()
        inode = self._inode
        ends = {
            offset // SECTOR_BYTES,
            (offset + size - 1) // SECTOR_BYTES,
        } & inode.unreadable_sectors
        for start in sorted(sector * SECTOR_BYTES for sector in ends):
            self._disk.raise_fault(self._disk.step("punch", self._path), "punch", self._path)
            lost = slice(start, start + SECTOR_BYTES)
            inode.visible[lost] = bytes(len(inode.visible[lost]))
            inode.mark_written(lost.start, lost.stop)
        return bool(ends)

    def sync(self) -> None:
        """Make the file's bytes and size durable (rules 1 and 4)."""
        self._check()
        assert not self._is_best_effort, f"{self._path} was opened as best-effort, but is synced"
        inode = self._inode
        fault = self._disk.step("sync", self._path)
        if fault is None:
            if not self._disk.is_lying:
                inode.make_durable(inode.dirty_sectors, len(inode.visible))
                inode.dirty_sectors.clear()
            return
        if fault is not DiskFault.POWER_LOSS and not self._disk.is_lying:
            inode.dirty_sectors.clear()
        if fault is DiskFault.DISK_FULL:
            fault = DiskFault.IO_ERROR  # The cause of a failed sync does not matter to the storage.
        self._disk.raise_fault(fault, "sync", self._path)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        self._check()
        fault = self._disk.step("truncate", self._path)
        if fault is None:
            self._inode.resize(size)
        self._disk.raise_fault(fault, "truncate", self._path)

    def size(self) -> int:
        """Return the visible size in bytes."""
        self._check()
        return len(self._inode.visible)

    def lock_range(self, first: int, count: int) -> bool:
        """Acquire a POSIX lock, which is always free, because there is only one process."""
        self._check()
        assert first >= 0
        assert count > 0
        return True

    def lock_whole_file(self) -> bool:
        """Acquire an exclusive lock; return False if another open file has it."""
        self._check()
        if self._inode.locked_by not in {None, self}:
            return False
        self._inode.locked_by = self
        return True

    def allocate(self, size: int) -> None:
        """Reserve space for the first `size` bytes."""
        self._check()
        fault = self._disk.step("allocate", self._path)
        if fault is None and self._disk.space_after(self._inode, size) < 0:
            fault = DiskFault.DISK_FULL
        if fault is None and size > len(self._inode.visible):
            self._inode.resize(size)
        self._disk.raise_fault(fault, "allocate", self._path)

    def close(self) -> None:
        """Close the file, and release its exclusive lock."""
        if self._is_open and self._boot_number == self._disk.boot_count:
            self._disk.open_count -= 1
        self._is_open = False
        if self._inode.locked_by is self:
            self._inode.locked_by = None


class SimDisk:
    """A file system in memory. The parent directories of files exist implicitly."""

    def __init__(self, *, capacity_bytes: int | None = None, is_traced: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.boot_count = 0
        self.step_count = 0
        self.read_count = 0
        self.open_count = 0  # the number of open files
        self.trace: list[str] = []
        self.is_lying = False
        self.on_full: OnInjected | None = None  # called whenever a step finds no space
        self._is_traced = is_traced
        self._plans: dict[int, _PlannedFault] = {}  # by the number of the step
        self._call_plans: list[tuple[Collection[str], _PlannedFault]] = []
        self.read_plans: dict[int, OnInjected | None] = {}  # by the number of the read
        self.is_powered_off = False
        self._names: dict[Path, Inode] = {}
        self._durable_names: dict[Path, Inode] = {}
        self._journal: list[_NameChange] = []  # changes of names that are not durable, oldest first
        self._directories: set[Path] = set()

    # ---- Disk

    def open(self, path: Path, *, create: bool = False, is_best_effort: bool = False) -> "File":
        """Open a file for reading and writing."""
        self.check_power()
        inode = self._names.get(path)
        if inode is None:
            if not create:
                raise DiskFailed(f"cannot open {path}: no such file")
            self.raise_fault(self.step("create", path), "create", path)
            inode = Inode()
            self._change(_NameChange(path, inode))
        return SimFile(self, path, inode, is_best_effort=is_best_effort)

    def exists(self, path: Path) -> bool:
        """Return whether a file or directory with this name exists."""
        self.check_power()
        return path in self._names or path in self._directories

    def identity(self, path: Path) -> tuple[int, int] | None:
        """Return a constant for an existing path: no file is replaced while it is in use."""
        return (0, 0) if self.exists(path) else None

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        self.check_power()
        inside = directory.parts
        return sorted(
            path.name
            for paths in (self._names, self._directories)
            for path in paths
            if path.parts[:-1] == inside
        )

    def prefetch(self, directory: Path, names: Sequence[str]) -> None:
        """Do nothing, because all data is in memory."""
        self.check_power()

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, durably."""
        self.check_power()
        if directory in self._directories:
            return
        self.raise_fault(self.step("mkdir", directory), "mkdir", directory)
        self._directories.update((directory, *directory.parents))

    def make_directories(self, directory: Path, names: Sequence[str]) -> None:
        """Create several directories in a directory, durably."""
        for name in names:
            self.make_directory(directory / name)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; replace the target if it exists."""
        self.check_power()
        self.raise_fault(self.step("rename", target), "rename", target)
        self._change(_NameChange(target, self._names[source], source))

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self.check_power()
        if path not in self._names:
            return
        self.raise_fault(self.step("unlink", path), "unlink", path)
        self._change(_NameChange(path))

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        self.check_power()
        fault = self.step("syncdir", directory)
        if fault is None:
            left: list[_NameChange] = []
            for change in self._journal:
                if change.target.parent == directory:
                    change.apply(self._durable_names)
                else:
                    left.append(change)
            self._journal = left
        self.raise_fault(fault, "syncdir", directory)

    def free_bytes(self, directory: Path) -> int:
        """Return the free space of the disk in bytes."""
        self.check_power()
        used = sum(len(linked.visible) for linked in self._names.values())
        return FREE_BYTES if self.capacity_bytes is None else max(0, self.capacity_bytes - used)

    def size_bytes(self, directory: Path) -> int:
        """Return the size of the disk in bytes."""
        return FREE_BYTES if self.capacity_bytes is None else self.capacity_bytes

    def _change(self, change: _NameChange) -> None:
        change.apply(self._names)
        self._journal.append(change)

    # ---- faults

    def plan_fault(
        self, step: int, fault: DiskFault, on_injected: OnInjected | None = None
    ) -> None:
        """Plan a fault at a step (rule 5); steps are counted from 1 since the disk was created."""
        assert step > self.step_count
        self._plans[step] = _PlannedFault(fault, on_injected)

    def plan_fault_at_call(
        self, names: Collection[str], fault: DiskFault | None, on_injected: OnInjected | None = None
    ) -> None:
        """Plan a fault at the next step of one of these kinds, as named in the trace.

        If `fault` is None, only `on_injected` is called at that step.
        """
        self._call_plans.append((names, _PlannedFault(fault, on_injected)))

    def plan_read_failure(self, count: int, on_injected: OnInjected | None = None) -> None:
        """Plan that the `count`th read from now on fails, once."""
        assert count > 0
        self.read_plans[self.read_count + count] = on_injected

    @property
    def has_fault(self) -> bool:
        """Whether a fault is planned or present."""
        plans = (self._plans, self._call_plans, self.read_plans)
        return self.is_lying or self.capacity_bytes is not None or any(plans)

    def cancel_plans(self) -> None:
        """Cancel all planned faults."""
        self._plans.clear()
        self._call_plans.clear()
        self.read_plans.clear()

    def lose_power(self, survival: Survival, rng: "Random") -> None:
        """Lose power and start again; all open files become invalid (rule 2)."""
        for inode in (*self._names.values(), *self._durable_names.values()):
            _apply_power_loss(inode, survival, rng)
        count = {
            Survival.NOTHING: 0,
            Survival.EVERYTHING: len(self._journal),
            Survival.ANY_SECTORS: rng.randint(0, len(self._journal)),
            Survival.ENDS: len(self._journal),
        }[survival]
        for change in self._journal[:count]:
            change.apply(self._durable_names)
        self._journal.clear()
        self._names = dict(self._durable_names)
        self.cancel_plans()
        self.is_powered_off = False
        self.boot_count += 1
        self.open_count = 0

    def flip_bits(self, path: Path, offset: int, mask: int = 1) -> None:
        """Flip bits both on the disk and in the cache."""
        inode = self._names[path]
        for content in (inode.visible, inode.durable):
            if offset < len(content):
                content[offset] ^= mask

    def flip_bits_unseen(self, path: Path, offset: int, mask: int = 1) -> None:
        """Flip bits on the disk, while the cache still has the correct content (rule 8)."""
        kept = self._names[path].durable
        if offset < len(kept):
            kept[offset] ^= mask

    def drop_all_cached(self) -> None:
        """Drop all clean sectors from the cache (rule 8)."""
        for inode in self._names.values():
            inode.drop_cached(0, len(inode.visible))

    def stop_lying(self) -> None:
        """Stop lying, and make all data durable that was reported as synced."""
        self.is_lying = False
        for inode in self._names.values():
            inode.make_durable(inode.dirty_sectors, len(inode.visible))
            inode.dirty_sectors.clear()

    def overwrite(self, path: Path, offset: int, content: bytes) -> None:
        """Replace bytes of a file on the disk and in the cache, without an error; no file grows."""
        inode = self._names[path]
        for each in (inode.visible, inode.durable):
            part = content[: max(0, len(each) - offset)]
            each[offset : offset + len(part)] = part

    def make_unreadable(self, path: Path, first: int, last: int) -> None:
        """Make the sectors of the bytes first..last unreadable (rule 7)."""
        self._names[path].unreadable_sectors.update(
            range(first // SECTOR_BYTES, last // SECTOR_BYTES + 1)
        )

    def shorten_file(self, path: Path, size: int) -> None:
        """Shorten a file on the disk and in the cache, without an error."""
        inode = self._names[path]
        del inode.visible[size:], inode.durable[size:]

    def remove(self, path: Path) -> None:
        """Remove a file from the disk and from the cache, without an error."""
        self._names.pop(path, None)
        self._durable_names.pop(path, None)

    def durable_contents(self) -> Contents:
        """Return a copy of the durable contents of the disk."""
        files = {path: bytes(inode.durable) for path, inode in self._durable_names.items()}
        return Contents(files, frozenset(self._directories))

    def replace_contents(self, contents: Contents) -> None:
        """Replace all contents by the contents of a backup; the caller has closed all files."""
        self._names = {
            path: Inode(bytearray(s), bytearray(s)) for path, s in contents.files.items()
        }
        self._durable_names = dict(self._names)
        self._directories = set(contents.directories)
        self._journal.clear()
        self.cancel_plans()
        self.is_powered_off = self.is_lying = False
        self.boot_count += 1
        self.open_count = 0

    def visible_content(self, path: Path) -> bytes:
        """Return the content of a file that a program would read."""
        return bytes(self._names[path].visible)

    def write_durably(self, path: Path, content: bytes) -> None:
        """Write a whole file durably, as if it had always been there."""
        self._directories.update(path.parents)
        inode = Inode(bytearray(content), bytearray(content))
        self._names[path] = self._durable_names[path] = inode

    def files(self) -> dict[Path, bytes]:
        """Return the visible content of all files."""
        return {path: bytes(inode.visible) for path, inode in self._names.items()}

    # ---- for SimFile

    def check_power(self) -> None:
        """Raise PowerLoss if the machine is off."""
        if self.is_powered_off:
            raise PowerLoss

    def step(self, call_name: str, path: Path) -> DiskFault | None:
        """Count a step, and return the fault that is planned for it, if any."""
        self.step_count += 1
        if self._is_traced:
            self.trace.append(f"{call_name} {path.name}")
        if not self._plans and not self._call_plans:
            return None
        plan = self._plans.pop(self.step_count, None)
        if plan is None and self._call_plans:
            plan = self._take_call_plan(call_name)
        if plan is None:
            return None
        if plan.on_injected is not None:
            plan.on_injected()
        return plan.fault

    def _take_call_plan(self, call_name: str) -> _PlannedFault | None:
        for position, (names, plan) in enumerate(self._call_plans):
            if call_name in names:
                del self._call_plans[position]
                return plan
        return None

    def check_read(self, path: Path) -> None:
        """Raise ReadFailed if the failure of this read is planned."""
        if self.read_count in self.read_plans:
            on_injected = self.read_plans.pop(self.read_count)
            if on_injected is not None:
                on_injected()
            raise ReadFailed(f"cannot read {path}: input/output error")

    def raise_fault(self, fault: DiskFault | None, call_name: str, path: Path) -> None:
        """Raise the error for a fault; do nothing for None."""
        if fault is None:
            return
        if fault is DiskFault.POWER_LOSS:
            self.is_powered_off = True
            raise PowerLoss
        if fault is DiskFault.DISK_FULL:
            if self.on_full is not None:
                self.on_full()
            raise NoSpace(f"{call_name} {path}: no space left on device")
        if fault is DiskFault.IO_ERROR:
            raise DiskFailed(f"{call_name} {path}: input/output error")

    def space_after(self, inode: Inode, size: int) -> int:
        """Return the bytes that would be free if a file had `size` bytes; negative if too few.

        Returns 0 for a disk without a limit, and for a file that does not grow.
        """
        growth = size - len(inode.visible)
        if self.capacity_bytes is None or growth <= 0:
            return 0
        used = sum(len(linked.visible) for linked in self._names.values())
        return self.capacity_bytes - used - growth


def _written_bytes(fault: DiskFault, offset: int, size: int, *, has_grown: bool) -> int:
    """Return how many bytes of a failing write are written (rule 3)."""
    if fault is DiskFault.POWER_LOSS:
        return max(0, _sector_floor(offset + size // 2) - offset)
    is_divided = has_grown if fault is DiskFault.DISK_FULL else _spans_sectors(offset, size)
    return size // 2 if is_divided else 0


def _spans_sectors(offset: int, size: int) -> bool:
    return size > 0 and offset // SECTOR_BYTES != (offset + size - 1) // SECTOR_BYTES


def _sector_floor(offset: int) -> int:
    return offset // SECTOR_BYTES * SECTOR_BYTES


def _apply_power_loss(inode: Inode, survival: Survival, rng: "Random") -> None:
    """Choose the durable content of a file after a power loss, and make it the visible content."""
    sectors = sorted(inode.dirty_sectors)
    sizes = sorted((len(inode.durable), len(inode.visible)))
    if survival is Survival.EVERYTHING:
        inode.make_durable(sectors, len(inode.visible))
    elif survival is Survival.ANY_SECTORS:
        share = rng.choice((0.1, 0.5, 0.9))
        size = rng.choice((*sizes, rng.randint(*sizes)))
        inode.make_durable([sector for sector in sectors if rng.random() < share], size)
    elif survival is Survival.ENDS:
        ends = [sector for sector in sectors if not {sector - 1, sector + 1} <= inode.dirty_sectors]
        inode.make_durable(ends, len(inode.visible))
    inode.visible = bytearray(inode.durable)
    inode.dirty_sectors.clear()
    inode.locked_by = None
