"""The possible states after a simulated crash: all allowed ones, and no other."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.errors import DiskFailed
from waltz_core.storage.disk.file_system import create_durably
from waltz_sim.world.crash import (
    DirectoryEntry,
    DiskState,
    KeepAll,
    KeepAllBut,
    KeepNone,
    KeepOnly,
    KeepRandom,
    MakeDirectory,
    RecordingDisk,
    Sector,
    Size,
    SyncDirectory,
    keep_choices,
    sync_positions,
    with_delayed_sync,
    without_change,
)
from waltz_sim.world.inode import SECTOR_BYTES
from waltz_sim.world.simulated_disk import DiskFault

ROOT = Path("/d")
PATH = ROOT / "f"


def new_recording_disk(content=b"a" * 4 * SECTOR_BYTES):
    disk = RecordingDisk()
    disk.make_directory(ROOT)
    create_durably(disk, ROOT, [("f", content)])
    return disk


def disk_state_of(disk):
    disk_state = DiskState()
    for change in disk.changes:
        disk_state.apply_change(change)
    return disk_state


def files_after_crash(disk, keep):
    return disk_state_of(disk).contents_after_crash(keep).files


def test_synced_data_survives_every_crash():
    disk = new_recording_disk()
    disk.open(PATH).pwrite([b"b"], 0)
    assert files_after_crash(disk, KeepNone()) == {PATH: b"a" * 4 * SECTOR_BYTES}
    assert files_after_crash(disk, KeepAll())[PATH][:2] == b"ba"
    disk.open(PATH).sync()
    assert files_after_crash(disk, KeepNone())[PATH][:2] == b"ba"
    assert disk_state_of(disk).unsynced_units() == []


def test_each_whole_sector_is_kept_or_lost_independently():
    disk = new_recording_disk()
    disk.open(PATH).pwrite([b"b" * 3 * SECTOR_BYTES], 100)
    number = disk.file_id_of(PATH)
    kept = files_after_crash(disk, KeepOnly([Sector(number, 1)]))[PATH]
    assert kept == b"a" * SECTOR_BYTES + b"b" * SECTOR_BYTES + b"a" * 2 * SECTOR_BYTES
    lost = files_after_crash(disk, KeepAllBut([Sector(number, 1)]))[PATH]
    assert lost[SECTOR_BYTES : 2 * SECTOR_BYTES] == b"a" * SECTOR_BYTES
    assert lost[100] == lost[2 * SECTOR_BYTES] == ord("b")


def test_a_crash_may_keep_the_new_size_of_a_file_and_lose_its_data():
    disk = new_recording_disk(b"a")
    disk.open(PATH).pwrite([b"b" * SECTOR_BYTES], SECTOR_BYTES)
    number = disk.file_id_of(PATH)
    assert files_after_crash(disk, KeepOnly([Size(number)]))[PATH] == b"a".ljust(
        2 * SECTOR_BYTES, b"\0"
    )
    only = files_after_crash(disk, KeepOnly([Sector(number, 1)]))[PATH]
    assert only == b"a".ljust(SECTOR_BYTES, b"\0") + b"b" * SECTOR_BYTES


def test_a_sync_of_a_file_and_of_its_name_are_independent():
    disk = new_recording_disk()
    file = disk.open(ROOT / "g", create=True)
    file.pwrite([b"g"], 0)
    file.sync()
    assert ROOT / "g" not in files_after_crash(disk, KeepNone())
    assert files_after_crash(disk, KeepOnly([DirectoryEntry(ROOT / "g")]))[ROOT / "g"] == b"g"
    file.pwrite([b"h"], 1)
    disk.sync_directory(ROOT)
    assert files_after_crash(disk, KeepNone())[ROOT / "g"] == b"g"


def test_after_a_crash_a_renamed_file_may_have_both_names_or_none():
    disk = new_recording_disk(b"a")
    disk.rename(PATH, ROOT / "g")
    assert files_after_crash(disk, KeepOnly([DirectoryEntry(ROOT / "g")])) == {
        PATH: b"a",
        ROOT / "g": b"a",
    }
    assert files_after_crash(disk, KeepOnly([DirectoryEntry(PATH)])) == {}
    assert files_after_crash(disk, KeepAll()) == {ROOT / "g": b"a"}


def test_a_directory_lost_in_a_crash_loses_its_content():
    disk = new_recording_disk(b"a")
    disk.inner.make_directory(ROOT / "e")
    disk.changes.append(MakeDirectory(ROOT / "e"))
    create_durably(disk, ROOT / "e", [("f", b"x")])
    assert files_after_crash(disk, KeepNone()) == {PATH: b"a"}
    assert files_after_crash(disk, KeepAll())[ROOT / "e" / "f"] == b"x"


def test_after_a_failed_sync_only_a_rewrite_makes_data_durable():
    disk = new_recording_disk()
    file = disk.open(PATH)
    file.pwrite([b"b"], 0)
    disk.inner.plan_fault_at_call(("sync",), DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        file.sync()
    file.sync()
    assert files_after_crash(disk, KeepNone())[PATH][:1] == b"a"
    assert files_after_crash(disk, KeepAll())[PATH][:1] == b"b"
    file.pwrite([b"b"], 0)
    file.sync()
    assert files_after_crash(disk, KeepNone())[PATH][:1] == b"b"


def test_killing_the_process_keeps_data_without_making_it_durable():
    disk = new_recording_disk()
    disk.open(PATH).pwrite([b"b"], 0)
    disk.open(ROOT / "g", create=True)
    again = RecordingDisk(disk.changes)
    assert again.list(ROOT) == ["f", "g"]
    assert again.open(PATH).pread(2, 0) == b"ba"
    assert files_after_crash(again, KeepNone())[PATH][:1] == b"a"
    again.open(PATH).sync()
    assert files_after_crash(again, KeepNone())[PATH][:1] == b"b"
    assert ROOT / "g" not in files_after_crash(again, KeepNone())


def test_a_sync_can_be_omitted_or_delayed():
    disk = new_recording_disk()
    places = sync_positions(disk.changes)[2:]  # not those of the creation
    last = places[-1]
    assert isinstance(disk.changes[last], SyncDirectory)
    assert len(without_change(disk.changes, last)) == len(disk.changes) - 1
    assert with_delayed_sync(disk.changes, last) is None
    late = with_delayed_sync(disk.changes, places[0])
    assert sorted(map(repr, late)) == sorted(map(repr, disk.changes))
    assert late.index(disk.changes[places[0]]) == places[1]


@given(st.integers(0, 10_000))
def test_after_a_crash_each_sector_has_only_one_of_the_written_values(seed):
    disk = new_recording_disk(b"")
    file = disk.open(PATH)
    for value in (b"1", b"2", b"3"):
        file.pwrite([value * SECTOR_BYTES], 0)
        file.pwrite([value * SECTOR_BYTES], SECTOR_BYTES)
    file.truncate(SECTOR_BYTES + 7)
    content = files_after_crash(disk, KeepRandom(Random(seed)))[PATH]
    assert len(content) <= 2 * SECTOR_BYTES
    for offset in (0, SECTOR_BYTES):
        assert len(set(content[offset : offset + 7])) <= 1
    kept = list(keep_choices(disk_state_of(disk), Random(seed), random_count=3))
    assert len(kept) >= 2 + 2 * 3 + 3
