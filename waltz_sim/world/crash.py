"""A disk that records each change, and every state that a crash may leave on it.

`simulated_disk.py` loses power once, at random. Here a program runs to its end. Then this module
builds every state that a crash at any point of the run may have left. So no state depends on luck,
and a test can remove or move a sync without running the program again.

Rules:
    1. Only synced data is certain. Of the later changes, each sector, each size and each directory
       entry is kept or lost independently, in any order. If a sector, size or entry has changed
       several times, any of its values may remain.
    2. `Sync` makes a file's bytes and size durable, but not its name. `SyncDirectory` makes the
       entries of one directory durable, but neither the directory's own entry in its parent, nor
       the contents of files.
    3. A rename is two changes of entries. After a crash the file may have both names, or neither.
    4. A sector within a file's size that was never written reads as zeros.
    5. After a failed sync, the sectors of the file may be durable or not. A later sync makes
       them durable only if they are written again.
    6. A killed process loses nothing, and makes nothing durable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.storage.disk.file_system import make_directory_with_parents
from waltz_sim.world.inode import SECTOR_BYTES
from waltz_sim.world.simulated_disk import Contents, SimDisk

if TYPE_CHECKING:
    from random import Random

    from waltz_core.storage.disk.file_system import Buffer, File

FileId = int
UNITS_MAX: Final = 24  # the maximum number of units that are kept or lost alone at one point


class CreateFile(NamedTuple):
    """A new, empty file was created with a name."""

    path: Path
    file: FileId


class Write(NamedTuple):
    """Bytes were written to a file, which grows if necessary."""

    file: FileId
    offset: int
    data: bytes


class Resize(NamedTuple):
    """The size of a file was changed."""

    file: FileId
    size: int


class Rename(NamedTuple):
    """A file was renamed."""

    source: Path
    target: Path


class HardLink(NamedTuple):
    """A file was given another name in addition."""

    source: Path
    target: Path


class Unlink(NamedTuple):
    """A name of a file was removed."""

    path: Path


class MakeDirectory(NamedTuple):
    """A directory was created in an existing directory."""

    path: Path


class Sync(NamedTuple):
    """A file was synced: `path` is its name when it was opened, `site` the caller of the sync."""

    file: FileId
    path: Path
    site: str = ""


class SyncFailed(NamedTuple):
    """The sync of a file has failed (rule 5)."""

    file: FileId


class SyncDirectory(NamedTuple):
    """A directory was synced: its names are durable."""

    path: Path
    site: str = ""


class PositionMarker(NamedTuple):
    """A marker by which a test finds a position in the list. It is not a change of the disk."""

    what: object


DiskChange: TypeAlias = (
    CreateFile
    | Write
    | Resize
    | Rename
    | HardLink
    | Unlink
    | MakeDirectory
    | Sync
    | SyncFailed
    | SyncDirectory
    | PositionMarker
)


class RecordingFile:
    """An open file of a `RecordingDisk`, which records its changes."""

    def __init__(self, disk: "RecordingDisk", file: "File", number: FileId, path: Path) -> None:
        self._disk = disk
        self._file = file
        self._number = number
        self._path = path
        self.pread = file.pread
        self.drop_cached = file.drop_cached
        self.discard_unreadable = file.discard_unreadable
        self.size = file.size
        self.lock_range = file.lock_range
        self.lock_whole_file = file.lock_whole_file
        self.close = file.close

    def pwrite(self, parts: Sequence["Buffer"], offset: int) -> None:
        """Write the concatenated parts; if the write fails, record the bytes that were written."""
        data = b"".join(parts)
        before = self._file.pread(len(data), offset)
        try:
            self._file.pwrite([data], offset)
        except (DiskFailed, NoSpace):
            data = self._file.pread(len(data), offset)
            if data != before:
                self._disk.changes.append(Write(self._number, offset, data))
            raise
        self._disk.changes.append(Write(self._number, offset, data))

    def sync(self) -> None:
        """Make the file's bytes and size durable."""
        try:
            self._file.sync()
        except DiskFailed:
            self._disk.changes.append(SyncFailed(self._number))
            raise
        self._disk.changes.append(Sync(self._number, self._path, self._disk.site()))

    def truncate(self, size: int) -> None:
        """Change the size of the file in bytes."""
        self._file.truncate(size)
        self._disk.changes.append(Resize(self._number, size))

    def allocate(self, size: int) -> None:
        """Reserve space for a size in bytes."""
        self._file.allocate(size)
        self._disk.changes.append(Resize(self._number, self._file.size()))


class RecordingDisk:
    """A `Disk` over a `SimDisk` that records each change; tests plan faults on `inner`."""

    def __init__(
        self, changes: Iterable[DiskChange] = (), site: Callable[[], str] = lambda: ""
    ) -> None:
        """Continue after a killed process that had made these changes (rule 6).

        `site` returns the caller of each sync.
        """
        self.changes = list(changes)
        self.site = site
        self.inner = SimDisk(is_traced=False)
        disk_state = DiskState()
        for change in self.changes:
            disk_state.apply_change(change)
        self.inner.replace_contents(disk_state.contents_after_crash(KeepAll()))
        self._files = dict(disk_state.visible_files())
        self._next_file_id = disk_state.file_count

    @classmethod
    def after_power_loss(
        cls, contents: Contents, site: Callable[[], str] = lambda: ""
    ) -> "RecordingDisk":
        """Return a disk on which these contents are durable."""
        return cls(changes_of(contents), site)

    def open(self, path: Path, *, create: bool = False, is_best_effort: bool = False) -> "File":
        """Open a file for reading and writing."""
        file = self.inner.open(path, create=create, is_best_effort=is_best_effort)
        if path not in self._files:
            self._files[path] = self._next_file_id
            self._next_file_id += 1
            self.changes.append(CreateFile(path, self._files[path]))
        return RecordingFile(self, file, self._files[path], path)

    def exists(self, path: Path) -> bool:
        """Return whether a file or directory with this name exists."""
        return self.inner.exists(path)

    def identity(self, path: Path) -> tuple[int, int] | None:
        """Return a value that distinguishes two files with the same name; None without a file."""
        return self.inner.identity(path)

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return self.inner.list(directory)

    def prefetch(self, directory: Path, names: Sequence[str]) -> None:
        """Announce that files will be read soon."""
        self.inner.prefetch(directory, names)

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, durably."""
        make_directory_with_parents(
            self, directory, self._make_single_directory, self.sync_directory
        )

    def make_directories(self, directory: Path, names: Sequence[str]) -> None:
        """Create several directories in a directory, durably."""
        for name in names:
            if not self.exists(directory / name):
                self._make_single_directory(directory / name)
        self.sync_directory(directory)

    def _make_single_directory(self, directory: Path) -> None:
        self.inner.make_directory(directory)
        self.changes.append(MakeDirectory(directory))

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; replace the target if it exists."""
        self.inner.rename(source, target)
        self._files[target] = self._files.pop(source)
        self.changes.append(Rename(source, target))

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self.inner.unlink(path)
        if self._files.pop(path, None) is not None:
            self.changes.append(Unlink(path))

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        self.inner.sync_directory(directory)
        self.changes.append(SyncDirectory(directory, self.site()))

    def free_bytes(self, directory: Path) -> int:
        """Return the free space of the disk in bytes."""
        return self.inner.free_bytes(directory)

    def size_bytes(self, directory: Path) -> int:
        """Return the size of the disk in bytes."""
        return self.inner.size_bytes(directory)

    def file_id_of(self, path: Path) -> FileId:
        """Return the ID of the file with a name."""
        return self._files[path]

    def mark_position(self, what: object) -> None:
        """Record a marker between two changes."""
        self.changes.append(PositionMarker(what))


def changes_of(contents: Contents) -> list[DiskChange]:
    """Return changes that produce these contents and make them durable."""
    changes: list[DiskChange] = []
    directories = sorted(contents.directories)
    changes += [MakeDirectory(path) for path in directories if path != path.parent]
    for number, (path, content) in enumerate(sorted(contents.files.items())):
        changes += [CreateFile(path, number), Write(number, 0, content), Sync(number, path)]
    return changes + [SyncDirectory(path) for path in directories]


# ---------------------------------------------------------------------------------------------
# the states after a crash


class Sector(NamedTuple):
    """A sector that was written after the last sync of its file."""

    file: FileId
    number: int


class Size(NamedTuple):
    """The size of a file that has changed after the last sync of the file."""

    file: FileId


class DirectoryEntry(NamedTuple):
    """A directory entry that has changed after the last sync of its directory."""

    path: Path


Unit: TypeAlias = Sector | Size | DirectoryEntry


class KeepNone:
    """Chooses which unsynced changes survive. This class keeps no change."""

    def version(self, unit: Unit, count: int) -> int:
        """Return the number of the value that survives: 0 is synced, 1..count are later values."""
        del unit, count
        return 0

    def size(self, unit: Size, sizes: Sequence[int]) -> int:
        """Return the size that survives; the first of `sizes` is the durable size."""
        return sizes[self.version(unit, len(sizes) - 1)]


class KeepAll(KeepNone):
    """Keeps all unsynced changes."""

    def version(self, unit: Unit, count: int) -> int:
        """Return the newest value of each unit."""
        del unit
        return count


class KeepOnly(KeepNone):
    """Keeps only some units. If a sector is kept, the newest size of its file is kept, too."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = set(units)
        self._files_with_size = {unit.file for unit in self.units if isinstance(unit, Sector)}

    def version(self, unit: Unit, count: int) -> int:
        """Return the newest value of a kept unit, and the durable value of all others."""
        is_kept = unit in self.units or (
            isinstance(unit, Size) and unit.file in self._files_with_size
        )
        return count if is_kept else 0


class KeepAllBut(KeepNone):
    """Keeps all units except some."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = set(units)

    def version(self, unit: Unit, count: int) -> int:
        """Return the newest value of each unit that is not lost."""
        return 0 if unit in self.units else count


class KeepRandom(KeepNone):
    """Keeps random units. A unit has any of its values, a file any size between its sizes."""

    def __init__(self, rng: "Random") -> None:
        self._rng = rng
        self._share = rng.choice((0.1, 0.5, 0.9))

    def version(self, unit: Unit, count: int) -> int:
        """Return a random value of a unit."""
        del unit
        return self._rng.randint(1, count) if self._rng.random() < self._share else 0

    def size(self, unit: Size, sizes: Sequence[int]) -> int:
        """Return one of the sizes, or a size between them."""
        del unit
        between = self._rng.randint(min(sizes), max(sizes))
        return self._rng.choice((*sizes, between, sizes[-1]))


@dataclass(slots=True, eq=False)
class _RecordedFile:
    """A file: its durable content, its visible content, and all unsynced values in between."""

    durable: bytearray = field(default_factory=bytearray)
    visible: bytearray = field(default_factory=bytearray)
    sectors: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    unsure_sectors: set[int] = field(default_factory=set)  # sectors of a failed sync (rule 5)

    def write(self, offset: int, data: bytes) -> None:
        if len(self.visible) < offset:
            self.resize(offset)
        self.visible[offset : offset + len(data)] = data
        self._note_sectors(offset, offset + len(data))
        self._note_size()

    def resize(self, size: int) -> None:
        old = len(self.visible)
        del self.visible[size:]
        self.visible.extend(bytes(size - len(self.visible)))
        if size % SECTOR_BYTES and size < old:
            self._note_sectors(size, size + 1)  # the cut part of a sector is zeroed
        self._note_sectors(old, size)
        self._note_size()

    def _note_sectors(self, start: int, end: int) -> None:
        for sector in range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)) if start < end else ():
            offset = sector * SECTOR_BYTES
            content = bytes(self.visible[offset : offset + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
            self.sectors.setdefault(sector, []).append(content)
            self.unsure_sectors.discard(sector)

    def _note_size(self) -> None:
        if len(self.visible) != (self.sizes or [len(self.durable)])[-1]:
            self.sizes.append(len(self.visible))

    def sync(self) -> None:
        """Make the file durable, except the sectors of a failed sync."""
        unsure = {sector: self.sectors[sector] for sector in self.unsure_sectors}
        before = self.durable
        self.durable = bytearray(self.visible)
        for sector in unsure:
            offset = sector * SECTOR_BYTES
            size = len(self.durable[offset : offset + SECTOR_BYTES])
            self.durable[offset : offset + size] = before[offset : offset + size].ljust(size, b"\0")
        self.sectors = unsure
        self.sizes.clear()

    def content(self, number: FileId, keep: KeepNone) -> bytes:
        sizes = [len(self.durable), *self.sizes]
        size = keep.size(Size(number), sizes) if self.sizes else sizes[0]
        left = bytearray(self.durable[:size])
        left.extend(bytes(size - len(left)))
        for sector, versions in self.sectors.items():
            offset = sector * SECTOR_BYTES
            survivor = keep.version(Sector(number, sector), len(versions)) if offset < size else 0
            if survivor:
                left[offset : offset + SECTOR_BYTES] = versions[survivor - 1][: size - offset]
        return bytes(left)


class DiskState:
    """The state of a disk after a list of changes, which are added one after the other."""

    def __init__(self) -> None:
        self._files: dict[FileId, _RecordedFile] = {}
        # Directory entries by path. The entry of a directory has no file.
        self._durable_entries: dict[Path, FileId | None] = {}
        self._visible_entries: dict[Path, FileId | None] = {}
        self._unsynced_entries: dict[Path, list[tuple[bool, FileId | None]]] = {}

    @property
    def file_count(self) -> int:
        """The number of files that were ever created."""
        return len(self._files)

    def visible_files(self) -> Iterator[tuple[Path, FileId]]:
        """Return the files that a program sees, with their names."""
        return ((path, file) for path, file in self._visible_entries.items() if file is not None)

    def apply_change(self, change: DiskChange) -> None:
        """Apply the next change."""
        match change:
            case Write(file, offset, data):
                self._files[file].write(offset, data)
            case Resize(file, size):
                self._files[file].resize(size)
            case Sync(file):
                self._files[file].sync()
            case SyncFailed(file):
                self._files[file].unsure_sectors.update(self._files[file].sectors)
            case PositionMarker():
                pass
            case _:
                self._apply_name_change(change)

    def _apply_name_change(
        self, change: CreateFile | Rename | HardLink | Unlink | MakeDirectory | SyncDirectory
    ) -> None:
        match change:
            case CreateFile(path, file):
                self._files[file] = _RecordedFile()
                self._add_entry(path, file)
            case Rename(source, target):
                self._add_entry(target, self._visible_entries[source])
                self._remove_entry(source)
            case HardLink(source, target):
                self._add_entry(target, self._visible_entries[source])
            case Unlink(path):
                self._remove_entry(path)
            case MakeDirectory(path):
                self._add_entry(path, None)
            case SyncDirectory(path):
                self._sync_entries(path)

    def _add_entry(self, path: Path, file: FileId | None) -> None:
        self._visible_entries[path] = file
        self._unsynced_entries.setdefault(path, []).append((True, file))

    def _remove_entry(self, path: Path) -> None:
        del self._visible_entries[path]
        self._unsynced_entries.setdefault(path, []).append((False, None))

    def _sync_entries(self, directory: Path) -> None:
        for path in [path for path in self._unsynced_entries if path.parent == directory]:
            del self._unsynced_entries[path]
            self._durable_entries.pop(path, None)
            if path in self._visible_entries:
                self._durable_entries[path] = self._visible_entries[path]

    def unsynced_units(self) -> list[Unit]:
        """Return all units that a crash may keep or lose independently."""
        units: list[Unit] = [DirectoryEntry(path) for path in self._unsynced_entries]
        for number, file in self._files.items():
            units += [Sector(number, sector) for sector in file.sectors]
            if file.sizes:
                units.append(Size(number))
        return units

    def contents_after_crash(self, keep: KeepNone) -> Contents:
        """Return the contents after a crash in which `keep` chooses the unsynced changes."""
        entries = dict(self._durable_entries)
        for path, values in self._unsynced_entries.items():
            survivor = keep.version(DirectoryEntry(path), len(values))
            if survivor:
                is_there, file = values[survivor - 1]
                entries.pop(path, None)
                if is_there:
                    entries[path] = file
        directories = {Path("/")}
        for path in sorted(path for path, file in entries.items() if file is None):
            if path.parent in directories:
                directories.add(path)
        contents = {
            path: self._files[file].content(file, keep)
            for path, file in sorted(entries.items(), key=lambda entry: entry[0])
            if file is not None and path.parent in directories
        }
        return Contents(contents, frozenset(directories))


def keep_choices(disk_state: DiskState, rng: "Random", *, random_count: int) -> Iterator[KeepNone]:
    """Yield the choices at one point: nothing, all, each unit alone, all but each unit, random."""
    yield KeepNone()
    yield KeepAll()
    units = disk_state.unsynced_units()
    if len(units) < 2:
        return
    files = {unit.file for unit in units if not isinstance(unit, DirectoryEntry)}
    groups: list[Sequence[Unit]] = [
        [unit for unit in units if not isinstance(unit, DirectoryEntry) and unit.file == file]
        for file in files
    ]
    groups.append([unit for unit in units if isinstance(unit, DirectoryEntry)])
    alone = [[unit] for unit in _sample_units(units, rng)]
    for group in (*alone, *(group for group in groups if 1 < len(group) < len(units))):
        yield KeepOnly(group)
        yield KeepAllBut(group)
    for _ in range(random_count):
        yield KeepRandom(rng)


def _sample_units(units: Sequence[Unit], rng: "Random") -> Sequence[Unit]:
    """Return `UNITS_MAX` units: the first two, the last two, and some in between.

    If there are not more units, return all.
    """
    if len(units) <= UNITS_MAX:
        return units
    between = rng.sample(range(2, len(units) - 2), UNITS_MAX - 4)
    return [
        units[position] for position in (0, 1, *sorted(between), len(units) - 2, len(units) - 1)
    ]


# ---------------------------------------------------------------------------------------------
# faulty programs


def sync_positions(changes: Sequence[DiskChange]) -> list[int]:
    """Return the positions of the syncs in a list of changes."""
    return [
        position
        for position, change in enumerate(changes)
        if isinstance(change, Sync | SyncDirectory)
    ]


def without_change(changes: Sequence[DiskChange], position: int) -> list[DiskChange]:
    """Return the changes of a faulty program that omits the sync at a position."""
    return [*changes[:position], *changes[position + 1 :]]


def with_delayed_sync(changes: Sequence[DiskChange], position: int) -> list[DiskChange] | None:
    """Return the changes with a sync delayed until after the next sync; None for the last sync."""
    after = next((sync for sync in sync_positions(changes) if sync > position), None)
    if after is None:
        return None
    return [
        *changes[:position],
        *changes[position + 1 : after + 1],
        changes[position],
        *changes[after + 1 :],
    ]


def disk_states(changes: Sequence[DiskChange]) -> Iterator[tuple[int, DiskState]]:
    """Yield each point at which a crash may occur: the count of changes before it, the state."""
    disk_state = DiskState()
    yield 0, disk_state
    for position, change in enumerate(changes):
        disk_state.apply_change(change)
        if not isinstance(change, PositionMarker):
            yield position + 1, disk_state
