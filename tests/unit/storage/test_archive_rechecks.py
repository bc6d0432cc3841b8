"""Reads of damaged archive files are repeated until the file is repaired."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.archived_log import CLUSTER_KEY, PARTITION_ID, write_archive
from waltz_core.archive.storage_archive import StorageArchive
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import ArchiveUnavailable
from waltz_core.storage.process.archive_rechecks import recheck

OBJECT = 51  # transactions per object


class Case:
    """An archive with reads of a corrupt object at two places, and of a missing one."""

    def __init__(self, folder):
        store = ArchiveStore(f"file://{folder}")
        self.log = write_archive(store, sizes=(3, 1, 40, 7))
        self.paths = [folder / entry.name for entry in self.log.manifest.newest_objects]
        self.data = self.paths[0].read_bytes()
        self.threads = ThreadPoolExecutor(1)
        self.access = StorageArchive(store.url, CLUSTER_KEY, self.threads)
        self.access.open()
        self.paths[0].write_bytes(self.data[:-8] + bytes(8))
        self.missing = self.paths[1].rename(folder / "elsewhere")
        self.read(0, 7, OBJECT)

    def mark(self):
        manifest = self.log.manifest
        return SimpleNamespace(
            last=manifest.last, manifest=self.log.name, manifest_crc=self.log.crc
        )

    def read(self, *ids):
        for transaction_id in ids:
            damage = self.access.find_damage_at(
                (PARTITION_ID, transaction_id), self.log.name, self.log.crc
            )
            self.access.on_location_read((PARTITION_ID, transaction_id), damage)

    def recheck(self, **changed):
        mark = SimpleNamespace(**{**vars(self.mark()), **changed})
        asyncio.run(recheck(self.access, {PARTITION_ID: mark}, self.threads))
        return len(self.access.damaged_locations)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def test_damage_is_cleared_after_the_archived_file_is_repaired(case):
    assert len(case.access.damaged_locations) == case.recheck() == 2
    case.missing.rename(case.paths[1])
    assert case.recheck() == 1
    assert case.log.manifest.newest_objects[0].name in case.access.read_damage
    case.paths[0].write_bytes(case.data)
    assert case.recheck() == 0, "cleared at both positions"
    assert case.access.read_damage == ""


def test_damage_is_kept_while_the_object_store_is_unavailable(case, monkeypatch):
    def unavailable(*_):
        raise ArchiveUnavailable("no route")

    case.missing.rename(case.paths[1])
    assert case.recheck(last=-1) == 2, "the archived mark of the session is below the object"
    asyncio.run(recheck(case.access, {}, case.threads))
    monkeypatch.setattr(ArchiveStore, "open", unavailable)
    assert case.recheck() == 2
