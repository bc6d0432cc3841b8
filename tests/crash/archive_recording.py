"""Records each change of an archive in a directory; tests derive the states after crashes from it.

`ArchiveStore` uses a real file system. The recorder converts its calls to the changes of
`waltz_sim/world/crash.py`. The paths of changes are relative to the recorded directory, below
`ROOT`.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from waltz_core.archive import store as store_module
from waltz_core.archive.store import ArchiveStore
from waltz_sim.world.crash import (
    CreateFile,
    DiskState,
    HardLink,
    KeepAll,
    MakeDirectory,
    PositionMarker,
    Sync,
    SyncDirectory,
    Unlink,
    Write,
)

ROOT = Path("/")
ARCHIVE = "archive"


class Recorder:
    """The changes below a directory, after those of an earlier process."""

    def __init__(self, directory, changes=(), complete=()):
        self.directory = directory
        self.changes = list(changes)
        self.complete = dict(complete)  # the bytes of each file with its final name, by name
        disk_state = DiskState()
        for change in self.changes:
            disk_state.apply_change(change)
        self._numbers = dict(disk_state.visible_files())
        self._next = disk_state.file_count
        write_out(disk_state.contents_after_crash(KeepAll()), directory)

    def store(self):
        """Return the archive's store; it may change files within `recording` only."""
        return RecordedStore(self)

    def recording(self):
        """Return a context in which all changes are recorded."""
        recorder = self

        class RecordedPath(type(Path())):
            def open(self, mode):
                opened = super().open(mode)
                recorder.create(Path(self))
                return RecordedFile(recorder, opened, Path(self))

            def mkdir(self, *, exist_ok):
                super().mkdir(exist_ok=exist_ok)
                recorder.changes.append(MakeDirectory(recorder.name_of(self)))

            def unlink(self, *, missing_ok):
                recorder.unlink(Path(self))
                super().unlink(missing_ok=missing_ok)

        class RecordedOs:
            def __getattr__(self, name):
                return getattr(os, name)

            def fsync(self, descriptor):
                os.fsync(descriptor)
                recorder.sync(Path(f"/proc/self/fd/{descriptor}").readlink())

            def link(self, source, target):
                os.link(source, target)
                recorder.link(Path(source), Path(target))

        return patch.multiple(store_module, Path=RecordedPath, os=RecordedOs())

    def name_of(self, path):
        """Return the path of a file in the recorded changes."""
        return ROOT / Path(path).relative_to(self.directory)

    def mark_position(self, description):
        self.changes.append(PositionMarker(description))

    def create(self, path):
        self._numbers[self.name_of(path)] = self._next
        self.changes.append(CreateFile(self.name_of(path), self._next))
        self._next += 1

    def write(self, path, offset, data):
        self.changes.append(Write(self._numbers[self.name_of(path)], offset, bytes(data)))

    def sync(self, path):
        if not path.is_relative_to(self.directory):
            return
        name = self.name_of(path)
        if path.is_dir():
            self.changes.append(SyncDirectory(name))
        else:
            self.changes.append(Sync(self._numbers[name], name))

    def link(self, source, target):
        self._numbers[self.name_of(target)] = self._numbers[self.name_of(source)]
        self.changes.append(HardLink(self.name_of(source), self.name_of(target)))
        name = str(target.relative_to(self.directory / ARCHIVE))
        self.complete[name] = target.read_bytes()

    def unlink(self, path):
        if self._numbers.pop(self.name_of(path), None) is not None:
            self.changes.append(Unlink(self.name_of(path)))


class RecordedFile:
    """An open file that is written from its beginning to its end.

    All writes are recorded as one change, but after some crashes only a part of it is on the disk.
    """

    def __init__(self, recorder, file, path):
        self._recorder, self._file, self._path = recorder, file, path
        self._data = b""
        self.fileno = file.fileno

    def write(self, data):
        self._data += data
        return self._file.write(data)

    def flush(self):
        self._file.flush()
        self._recorder.write(self._path, 0, self._data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


class RecordedStore(ArchiveStore):
    """Records deletions as well, which pyarrow executes."""

    def __init__(self, recorder):
        super().__init__(f"file://{recorder.directory}/{ARCHIVE}")
        self._recorder = recorder

    def delete(self, name):
        self._recorder.unlink(self._recorder.directory / ARCHIVE / name)
        super().delete(name)


def write_out(contents, directory):
    """Write the files that a crash has left to a directory; its earlier content is deleted."""
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
    for path in sorted(contents.directories):
        (directory / path.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
    for path, content in contents.files.items():
        (directory / path.relative_to(ROOT)).write_bytes(content)
