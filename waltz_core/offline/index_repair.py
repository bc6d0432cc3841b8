"""Rebuilds the index of a segment from its records.

This is the only file of the package that writes. It writes through the storage's `Disk`. In tests,
a simulated `Disk` loses power at every step.

Rules:
    1. The new index is written completely under another name, synced, and renamed over the old
       index. The directory is synced last. A crash leaves the old index or the new index.
    2. No index is written if the present index is already correct. No index is written, either, if
       the segment's header does not match its name, because an operator must examine the segment
       first.
    3. If a record is unreadable, its old index entry is kept, provided that this entry is
       plausible. The old entry may be the only information about the record's position. If the old
       entry is not plausible, the new entry contains the offset at which the damage begins.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, DiskFailed
from waltz_core.offline.files import segment_path, storage_directory_of
from waltz_core.offline.layout import (
    CONTROL_FILE_NAME,
    CONTROL_HEADER_BYTES,
    FILE_HEADER_BYTES,
    ID_NAME,
    OFFSET_BYTES,
    decode_file_header,
)
from waltz_core.offline.records import Gap, walk_records
from waltz_core.storage.disk.file_system import TEMPORARY_SUFFIX, Disk, File

I64 = npt.NDArray[np.int64]


class IndexRepairResult(NamedTuple):
    """The result of a repair.

    `entry_count` is the number of entries in the new index. `difference_count` is the number of
    places at which the old index differs, including its header and its size. `kept_count` is the
    number of entries of records that cannot be read.
    """

    path: Path
    entry_count: int
    old_entry_count: int | None
    difference_count: int
    kept_count: int

    @property
    def is_valid(self) -> bool:
        """Whether the old index was correct."""
        return self.difference_count == 0


def repair_index(disk: Disk, segment: Path, *, dry_run: bool) -> IndexRepairResult:
    """Rebuild the index of a `.seg` file, durably; with `dry_run`, only report the differences.

    Raises:
        BadFormat: the header of the segment is wrong (rule 2).
        DiskFailed, NoSpace: a file could not be read or written; the old index stays.
    """
    first = int(segment.stem)
    path = segment_path(segment.parent, first, ".idx")
    with ExitStack() as open_files:
        file = disk.open(segment)
        open_files.callback(file.close)
        header = _checked_header(file, segment, first)
        old_index = _OldIndex()
        if disk.exists(path):
            old_file = disk.open(path)
            open_files.callback(old_file.close)
            old_index = _OldIndex(old_file)
        # The records are read twice, so that the index need not fit into memory.
        result = _compare_with_old(path, header, _new_entries(file, first, old_index), old_index)
        if not result.is_valid and not dry_run:
            _write_index(disk, path, header, _new_entries(file, first, old_index))
        return result


@contextmanager
def hold_exclusive_locks(disk: Disk, path: Path) -> Iterator[None]:
    """Hold the same locks as a running storage, on the storage directory that contains `path`.

    A file outside of a storage directory, such as a copy, needs no lock.

    Raises:
        DiskFailed: a storage runs on the directory, or another command reads it.
    """
    directory = storage_directory_of(path)
    with ExitStack() as locks:
        for name in (ID_NAME, CONTROL_FILE_NAME):
            if directory is None or not disk.exists(directory / name):
                continue
            file = disk.open(directory / name)
            locks.callback(file.close)
            is_control_file = name == CONTROL_FILE_NAME
            if not (
                file.lock_range(0, CONTROL_HEADER_BYTES)
                if is_control_file
                else file.lock_whole_file()
            ):
                raise DiskFailed(
                    f"{directory}: another process, such as a storage, uses the directory "
                    f"and holds the lock on {name}. Hint: stop that process first."
                )
        yield


class _OldIndex:
    """The existing index, or an empty one; its offsets are read on demand."""

    def __init__(self, file: File | None = None) -> None:
        self._file = file
        size = 0 if file is None else file.size()
        self.exists = file is not None
        self.header = b"" if file is None else file.pread(FILE_HEADER_BYTES, 0)
        self.count, self.trailing_bytes = divmod(max(0, size - FILE_HEADER_BYTES), OFFSET_BYTES)

    def read(self, position: int, count: int) -> I64:
        """Return up to `count` offsets, starting at a position."""
        count = max(0, min(count, self.count - position))
        if self._file is None or not count:
            return np.zeros(0, dtype=np.int64)
        data = self._file.pread(OFFSET_BYTES * count, FILE_HEADER_BYTES + OFFSET_BYTES * position)
        return np.frombuffer(data, dtype=">i8").astype(np.int64)


def _checked_header(file: File, path: Path, first: int) -> bytes:
    data = file.pread(FILE_HEADER_BYTES, 0)
    header = decode_file_header(data)
    errors = list(header.errors)
    if header.first != first:
        errors.append(f"expected first transaction ID {first}, found {header.first}")
    if errors:
        raise BadFormat(
            f"{path}: the header is wrong: {errors[0]}. No index is built for such a segment"
        )
    return data


class _IndexPart(NamedTuple):
    """Entries of the new index, starting at a position.

    `is_kept` is set if the records of these entries cannot be read.
    """

    position: int
    offsets: I64
    is_kept: bool


def _new_entries(file: File, first: int, old: _OldIndex) -> Iterator[_IndexPart]:
    """Yield the entries of the new index, part by part."""
    for part in walk_records(file, first):
        position = part.first - first
        if not isinstance(part, Gap):
            yield _IndexPart(
                position, np.array(part.bounds[:-1], dtype=np.int64) + part.offset, is_kept=False
            )
            continue
        if part.next_id is not None:
            count = part.next_id - part.first
            old_offsets = old.read(position, count)
            if old_offsets.size != count or not _is_plausible(old_offsets, part):
                old_offsets = np.full(count, part.offset, dtype=np.int64)
            yield _IndexPart(position, old_offsets, is_kept=True)
            continue
        old_offsets = old.read(position, old.count)
        if old_offsets.size and _is_plausible(old_offsets, part):
            yield _IndexPart(position, old_offsets, is_kept=True)


def _is_plausible(entries: I64, gap: Gap) -> bool:
    """Return whether old index entries are plausible for the unreadable records of a gap."""
    return bool(
        entries[0] == gap.offset and (np.diff(entries) >= 0).all() and entries[-1] < gap.end
    )


def _compare_with_old(
    path: Path, header: bytes, parts: Iterator[_IndexPart], old: _OldIndex
) -> IndexRepairResult:
    count = difference_count = kept_count = 0
    for part in parts:
        size = int(part.offsets.size)
        count = part.position + size
        kept_count += size if part.is_kept else 0
        old_offsets = old.read(part.position, size)
        difference_count += (
            int((old_offsets != part.offsets[: old_offsets.size]).sum())
            + size
            - int(old_offsets.size)
        )
    if not old.exists:
        return IndexRepairResult(path, count, None, max(1, difference_count), kept_count)
    difference_count += max(0, old.count - count) + (1 if old.trailing_bytes else 0)
    # Compare the headers without the creation time: Waltz 0.13 writes different creation times to
    # `.seg` and `.idx`.
    if old.header[:4] + old.header[12:] != header[:4] + header[12:]:
        difference_count += 1
    return IndexRepairResult(path, count, old.count, difference_count, kept_count)


def _write_index(disk: Disk, path: Path, header: bytes, parts: Iterator[_IndexPart]) -> None:
    """Replace the old index by a new one, durably (rule 1)."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        file.pwrite([header], 0)
        for part in parts:
            offset = FILE_HEADER_BYTES + OFFSET_BYTES * part.position
            file.pwrite([part.offsets.astype(">i8").tobytes()], offset)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)
