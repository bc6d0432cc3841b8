"""Rebuilding an index: its report, and crashes that leave the old or the new index."""

from contextlib import suppress
from random import Random

import pytest

from tests.offline_storage import PARTITION, sample_log
from tests.storage_model import ROOT
from waltz_core.errors import BadFormat, DiskFailed
from waltz_core.offline.index_repair import hold_exclusive_locks, repair_index
from waltz_core.storage.disk.file_system import RealDisk
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, Survival

SEGMENT = ROOT / str(PARTITION) / "0000000000000000011.seg"
INDEX = SEGMENT.with_suffix(".idx")


@pytest.fixture
def disk():
    """The disk of a log that was closed; segments 0..10, 11..23 and 24..35."""
    world = sample_log()
    world.close()
    world.disk.lose_power(Survival.EVERYTHING, Random(1))
    return world.disk


DAMAGES = {
    "an entry": lambda disk: disk.flip_bits(INDEX, 128 + 8 * 4 + 7),
    "the first entry": lambda disk: disk.flip_bits(INDEX, 128),
    "entries missing": lambda disk: disk.shorten_file(INDEX, 150),
    "an entry too many": lambda disk: disk.write_durably(
        INDEX, disk.visible_content(INDEX) + bytes(8)
    ),
    "half an entry too many": lambda disk: disk.write_durably(
        INDEX, disk.visible_content(INDEX) + bytes(4)
    ),
    "nothing but a name": lambda disk: disk.shorten_file(INDEX, 0),
    "another partition's header": lambda disk: disk.flip_bits(INDEX, 31),
    "No index": lambda disk: disk.remove(INDEX),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_rebuilt_index_equals_the_index_of_the_storage(disk, damage):
    good = disk.visible_content(INDEX)
    damage(disk)
    before = disk.files()
    dry = repair_index(disk, SEGMENT, dry_run=True)
    assert not dry.is_valid
    assert disk.files() == before
    assert repair_index(disk, SEGMENT, dry_run=False) == dry
    assert disk.visible_content(INDEX) == good
    assert disk.open_count == 0
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.visible_content(INDEX) == good, "the new index was durable"
    assert repair_index(disk, SEGMENT, dry_run=False).is_valid


def test_a_correct_index_is_unchanged(disk):
    before = disk.step_count
    repair = repair_index(disk, SEGMENT, dry_run=False)
    assert (repair.is_valid, repair.entry_count, repair.old_entry_count) == (True, 13, 13)
    assert disk.step_count == before


@pytest.mark.parametrize("survival", list(Survival))
def test_a_crash_at_any_step_leaves_either_the_old_or_the_new_index(disk, survival):
    good = disk.visible_content(INDEX)
    contents = disk.durable_contents()
    seen = set()
    is_done, step = False, 0
    while not is_done:
        step += 1
        disk.replace_contents(contents)
        disk.flip_bits(INDEX, 140)
        bad = disk.visible_content(INDEX)
        disk.plan_fault(disk.step_count + step, DiskFault.POWER_LOSS)
        with suppress(PowerLoss):
            repair_index(disk, SEGMENT, dry_run=False)
            is_done = True
        disk.lose_power(survival, Random(step))
        assert disk.visible_content(INDEX) in (good, bad)
        seen.add(disk.visible_content(INDEX))
    assert step > 6
    assert seen == {good, bad}


@pytest.mark.parametrize("fault", [DiskFault.IO_ERROR, DiskFault.DISK_FULL])
def test_an_error_during_a_repair_leaves_the_old_index_unchanged(disk, fault):
    disk.flip_bits(INDEX, 140)
    bad = disk.visible_content(INDEX)
    for step in range(1, 6):
        disk.plan_fault(disk.step_count + step, fault)
        with pytest.raises(Exception, match="idx"):
            repair_index(disk, SEGMENT, dry_run=False)
        assert disk.visible_content(INDEX) == bad
        assert disk.open_count == 0


@pytest.mark.parametrize(("lost", "wrong_entry"), [((200, 150), 12), ((700, 1000), 0)])
def test_entries_of_records_that_cannot_be_read_are_kept(disk, lost, wrong_entry):
    good = disk.visible_content(INDEX)
    start, size = lost
    disk.overwrite(SEGMENT, start, bytes(size))
    disk.flip_bits(INDEX, 128 + 8 * wrong_entry + 7)
    repair = repair_index(disk, SEGMENT, dry_run=False)
    assert (repair.entry_count, repair.difference_count) == (13, 1)
    assert repair.kept_count > 1
    assert disk.visible_content(INDEX) == good


def test_index_entries_of_lost_records_are_set_to_the_start_of_the_damage(disk):
    good = disk.visible_content(INDEX)
    disk.overwrite(SEGMENT, 200, bytes(150))
    kept = repair_index(disk, SEGMENT, dry_run=True).kept_count
    disk.remove(INDEX)
    assert repair_index(disk, SEGMENT, dry_run=False).kept_count == kept
    rebuilt = [
        int.from_bytes(disk.visible_content(INDEX)[offset : offset + 8], "big")
        for offset in range(128, 232, 8)
    ]
    old = [int.from_bytes(good[offset : offset + 8], "big") for offset in range(128, 232, 8)]
    differ = [position for position in range(13) if rebuilt[position] != old[position]]
    assert len(differ) == kept - 1
    assert {rebuilt[position] for position in differ} == {old[differ[0] - 1]}


def test_a_segment_with_a_wrong_header_gets_no_index(disk):
    disk.flip_bits(SEGMENT, 39)
    with pytest.raises(
        BadFormat, match=r"expected first transaction ID 11, found 10. No index is built"
    ):
        repair_index(disk, SEGMENT, dry_run=False)


def test_a_repair_locks_the_storage_directory(tmp_path):
    disk = RealDisk()
    for name in ("waltz-x.id", "waltz-storage.ctl"):
        (tmp_path / name).write_bytes(bytes(200))
    (tmp_path / "2").mkdir()
    with hold_exclusive_locks(disk, tmp_path / "2"):
        file = disk.open(tmp_path / "waltz-x.id")
        assert not file.lock_whole_file()
    assert file.lock_whole_file()
    with (
        pytest.raises(DiskFailed, match=r"holds the lock on waltz-x.id"),
        hold_exclusive_locks(disk, tmp_path),
    ):
        pass
    file.close()
