"""`archive verify` follows a manifest that is replaced meanwhile, and can be interrupted."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.archived_log import KEY, PARTITION, write_archive, write_manifest
from waltz_core.archive.archive_check import ArchiveCheck
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli.archive.archive_verify import _verify
from waltz_core.cluster.nodes.model import ArchivedMark, MarkerState, PartitionMarker
from waltz_core.errors import ArchiveUnavailable


class Case:
    """An archive, and a coordinator that returns the next of some marks at each read."""

    def __init__(self, folder):
        self.folder = folder
        self.store = ArchiveStore(f"file://{folder}")
        self.log = write_archive(self.store)
        self.marks = [self.mark(self.log.manifest, self.log.name, self.log.crc)]
        self.check = ArchiveCheck(self.store, KEY, PARTITION, first=0)

    def mark(self, manifest, name, crc):
        return ArchivedMark(manifest.last, manifest.chain, 5, manifest.first, crc, name)

    async def read_partition(self, partition_id):
        assert partition_id == PARTITION
        mark = self.marks[0] if len(self.marks) == 1 else self.marks.pop(0)
        return SimpleNamespace(marker=PartitionMarker(MarkerState.OPEN, 7, bytes(16), mark))

    def verify(self):
        return asyncio.run(_verify(self, PARTITION, self.check))


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path / "archive")


def without_first_object(case):
    """Return the mark of a manifest after the expiry of an object, whose file is deleted."""
    first, second = case.log.manifest.newest[:2]
    (case.folder / first.name).unlink()
    later = case.log.manifest.expired(second.first, 0)
    return case.mark(later, "later", write_manifest(case.store, later, "later"))


def test_an_object_that_has_expired_meanwhile_is_no_fault(case):
    case.marks.append(without_first_object(case))
    found = case.verify()
    assert (found["problems"], found["objects"]) == ([], 3)


def test_a_manifest_that_was_deleted_meanwhile_is_no_fault(case):
    case.marks.append(without_first_object(case))
    (case.folder / case.log.name).unlink()
    assert case.verify()["problems"] == []


def test_an_object_that_the_recorded_manifest_lists_is_missing(case, capsys):
    without_first_object(case)
    found = case.verify()
    assert [each["name"] for each in found["problems"]] == [case.log.manifest.newest[0].name]
    assert found["objects"] == 3
    assert "it does not exist. Hint: add --repair" in capsys.readouterr().err


def test_nothing_is_archived(case, capsys):
    case.marks = [None]
    assert case.verify()["problems"] == []
    assert capsys.readouterr().err == f"partition {PARTITION}: nothing is archived\n"


def test_a_check_that_is_interrupted_prints_where_to_continue(case, monkeypatch, capsys):
    third = case.log.manifest.newest[2]
    open_file = case.store.open

    async def main():
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def interrupted(name):
            if name == third.name:
                loop.call_soon_threadsafe(task.cancel)
            return open_file(name)

        monkeypatch.setattr(case.store, "open", interrupted)
        await _verify(case, PARTITION, case.check)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    continue_with = capsys.readouterr().err.rpartition(" --first ")[2]
    assert int(continue_with) in {third.first, third.last + 1}
    assert case.check._is_stopped


def test_a_store_that_fails_ends_the_check_with_the_place_to_continue(case, monkeypatch, capsys):
    second = case.log.manifest.newest[1]
    open_file = case.store.open

    def unreachable(name):
        if name == second.name:
            raise ArchiveUnavailable("no route")
        return open_file(name)

    monkeypatch.setattr(case.store, "open", unreachable)
    with pytest.raises(ArchiveUnavailable):
        case.verify()
    assert capsys.readouterr().err == (
        f"partition {PARTITION}: IDs before {second.first} are verified; continue with "
        f"--partition {PARTITION} --first {second.first}\n"
    )
