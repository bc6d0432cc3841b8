"""The control file and the slots: the newest structure is used, or the older one after a crash."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.storage.logs import KEY, ROOT, new_disk
from waltz_core.errors import BadFormat, DiskFailed, ReadFailed
from waltz_core.records.record import NO_SESSION
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.control_file import (
    CONTROL_FILE_NAME,
    SLOTS_FILE_NAME,
    ControlFile,
    SlotFile,
)
from waltz_core.storage.files.format import (
    SLOT_BLOCK_BYTES,
    SLOT_BYTES,
    IdRange,
    Slot,
    partition_entry_offset,
    partition_info_offset,
)
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimFile, Survival

PATH = ROOT / CONTROL_FILE_NAME
SLOTS = ROOT / SLOTS_FILE_NAME


def open_control(disk, directory=ROOT, *, key=KEY, partition_count=3):
    return ControlFile.open(disk, directory, key, partition_count, 5)


# ---- the control file of Waltz 0.13


def test_control_data_survives_a_power_loss():
    disk = new_disk()
    control = open_control(disk)
    before = control.info(1)
    control.set_flags(0, 3)
    set_to = control.set_marks(0, 7, 41)
    disk.lose_power(Survival.NOTHING, Random(1))
    control = open_control(disk)
    assert control.info(0) == set_to
    assert (set_to.flags, set_to.session_id, set_to.low_water_mark) == (3, 7, 41)
    assert set_to.local_low_water_mark == 41
    assert set_to.sequence == before.sequence + 2
    assert control.info(1) == before


@pytest.mark.parametrize("survival", Survival)
def test_a_crash_during_a_write_leaves_the_old_or_the_new_state(survival):
    for seed in range(30):
        disk = new_disk()
        control = open_control(disk)
        old = control.set_marks(0, 7, 41)
        disk.plan_fault(disk.step_count + 1 + seed % 2, DiskFault.POWER_LOSS)
        with pytest.raises(PowerLoss):
            control.set_marks(0, 8, 50)
        disk.lose_power(survival, Random(seed))
        found = open_control(disk).info(0)
        new = old._replace(
            session_id=8, low_water_mark=50, local_low_water_mark=50, sequence=old.sequence + 1
        )
        assert found in (old, new)


def test_a_failed_write_does_not_change_the_current_state():
    disk = new_disk()
    control = open_control(disk)
    old = control.set_flags(2, 1)
    disk.plan_fault(disk.step_count + 1, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        control.set_flags(2, 3)
    assert control.info(2) == old
    assert control.set_flags(2, 5).sequence == old.sequence + 1
    assert open_control(disk).info(2).flags == 5


def test_a_failed_sync_fails_every_partition_of_the_file_until_it_is_opened_again():
    disk = new_disk()
    control = open_control(disk)
    before = control.set_marks(0, 7, 41)
    disk.plan_fault(disk.step_count + 2, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed, match="sync "):
        control.set_marks(1, 7, 41)
    assert control.has_failed
    for partition_id in (0, 1, 2):
        with pytest.raises(
            DiskFailed,
            match="the control file cannot be written, because a "
            "sync of it has failed before: sync ",
        ):
            control.set_marks(partition_id, 8, 42)
    assert control.info(0) == before
    assert control.info(1).session_id == control.info(2).session_id == NO_SESSION
    control.close()
    again = open_control(disk)
    assert not again.has_failed
    trusted = again.info(1)
    again.close()
    disk.lose_power(Survival.NOTHING, Random(1))
    assert open_control(disk).info(1) == trusted, "trusted state is durable"


def test_one_sync_covers_all_earlier_writes(tmp_path):
    control = open_control(RealDisk(), tmp_path)
    started, may_continue, syncs = threading.Event(), threading.Event(), []
    file = control._file

    def slow_sync():
        syncs.append(control._written_count)
        started.set()
        assert may_continue.wait(TEST_TIMEOUT_S)
        file.sync()

    control._file = SimpleNamespace(pwrite=file.pwrite, sync=slow_sync, close=file.close)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(control.set_marks, 0, 7, 40)
        assert started.wait(TEST_TIMEOUT_S)
        others = [pool.submit(control.set_marks, each, 7, 41) for each in (1, 2)]
        until = time.monotonic() + TEST_TIMEOUT_S
        while control._written_count < 3:
            assert time.monotonic() < until
        may_continue.set()
        assert [each.result(TEST_TIMEOUT_S).sequence for each in (first, *others)] == [1, 1, 1]
    assert syncs == [1, 3]
    control.close()


def test_if_one_copy_is_damaged_the_other_copy_is_used():
    disk = new_disk()
    control = open_control(disk)
    older = control.set_flags(1, 1)
    control.set_flags(1, 3)
    offsets = [partition_info_offset(1, slot) for slot in (0, 1)]
    (newest,) = [
        at for at, slot in zip(offsets, (0, 1), strict=True) if slot == control._current[1]
    ]
    disk.flip_bits(PATH, newest + 9)
    assert open_control(disk).info(1) == older
    (other,) = set(offsets) - {newest}
    disk.flip_bits(PATH, other + 9)
    with pytest.raises(BadFormat, match="both copies of the state of partition 1 are"):
        open_control(disk)


def test_a_control_file_with_a_copy_or_an_entry_at_a_wrong_position_is_rejected():
    disk = new_disk()
    open_control(disk)
    content = disk.visible_content(PATH)
    first, second = (partition_info_offset(0, slot) for slot in (0, 1))
    disk.overwrite(PATH, second, content[first:second])
    with pytest.raises(BadFormat, match="both copies of the state of partition"):
        open_control(disk)
    disk.write_durably(PATH, content)
    disk.flip_bits(PATH, partition_entry_offset(1) + 3, 2)
    with pytest.raises(BadFormat, match="expected partition 1 in entry 1, found 3"):
        open_control(disk)


@pytest.mark.parametrize("size", [0, 1, 127])
def test_a_partially_created_file_is_rebuilt(tmp_path, size):
    (tmp_path / CONTROL_FILE_NAME).write_bytes(bytes(size))
    (tmp_path / "lost+found").mkdir()
    for _ in range(2):
        control = open_control(RealDisk(), tmp_path)
        assert control.header.partition_count == 3
        control.close()


@pytest.mark.parametrize("size", [None, 0, 1, 127])
def test_a_missing_or_truncated_file_with_partitions_is_rejected(tmp_path, size):
    control = open_control(RealDisk(), tmp_path)
    control.set_marks(0, 7, 41)
    control.close()
    for name in ("0", "2"):
        (tmp_path / name).mkdir()
    path = tmp_path / CONTROL_FILE_NAME
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    found = "no file" if size is None else f"{size} bytes"
    for _ in range(2):
        with pytest.raises(
            BadFormat, match=f"at least 128 bytes, found {found}.* partitions 0, 2, so"
        ):
            open_control(RealDisk(), tmp_path)
    assert path.exists() == (size is not None)
    if size is not None:
        assert path.stat().st_size == size


def test_a_crash_during_the_creation_leaves_no_file_or_a_complete_file():
    for steps in range(1, 10):
        disk = new_disk()
        disk.plan_fault(disk.step_count + steps, DiskFault.POWER_LOSS)
        try:
            open_control(disk)
        except PowerLoss:
            disk.lose_power(Survival.ANY_SECTORS, Random(steps))
            assert open_control(disk).header.cluster_key == KEY
        else:
            assert steps > 4
            return
    pytest.fail("no creation completed without a crash")


# ---- the slots of this version


def new_slots(disk, **fields):
    return SlotFile.create(disk, ROOT, Slot(2, **fields))


def test_slots_are_written_alternately_and_the_newest_is_used():
    disk = new_disk()
    slots = new_slots(disk)
    for promised in range(5):
        sequence = slots.slot.sequence
        slots.write(Slot(2, promised=promised, damaged=(IdRange(3, 4),)))
        assert slots.slot.sequence == sequence + 1
        disk.lose_power(Survival.NOTHING, Random(1))
        slots = SlotFile.open(disk, ROOT, 2)
        assert (slots.slot.promised, slots.slot.damaged) == (promised, (IdRange(3, 4),))
        assert not slots.has_lost_newer_slot


def test_a_damaged_newer_slot_is_reported_and_the_older_slot_is_used():
    disk = new_disk()
    slots = new_slots(disk)
    slots.write(Slot(2, promised=6))
    slots.write(Slot(2, promised=9))
    disk.flip_bits(SLOTS, SLOT_BLOCK_BYTES * slots._position + 20)
    slots = SlotFile.open(disk, ROOT, 2)
    assert (slots.slot.promised, slots.has_lost_newer_slot) == (6, True)
    disk.flip_bits(SLOTS, SLOT_BLOCK_BYTES * slots._position + 20)
    with pytest.raises(BadFormat, match="neither control slot is valid"):
        SlotFile.open(disk, ROOT, 2)


@pytest.mark.parametrize("spoiled", ["newest", "older"])
def test_a_slot_at_the_position_of_the_other_slot_is_invalid(spoiled):
    """A misdirected write has stored a valid slot at the wrong position."""
    disk = new_disk()
    slots = new_slots(disk)
    slots.write(Slot(2, promised=6))
    slots.write(Slot(2, promised=9))
    content, newest = disk.visible_content(SLOTS), slots._position
    lost_file = newest if spoiled == "newest" else 1 - newest
    other = SLOT_BLOCK_BYTES * (1 - lost_file)
    disk.overwrite(SLOTS, SLOT_BLOCK_BYTES * lost_file, content[other : other + SLOT_BLOCK_BYTES])
    again = SlotFile.open(disk, ROOT, 2)
    assert (again.slot.promised, again.has_lost_newer_slot) == (
        6 if spoiled == "newest" else 9,
        True,
    )
    # The next write replaces the misdirected slot, and the current slot is kept.
    again.write(Slot(2, promised=12))
    kept = disk.visible_content(SLOTS)[other : other + SLOT_BLOCK_BYTES]
    assert kept == content[other : other + SLOT_BLOCK_BYTES]
    assert SlotFile.open(disk, ROOT, 2).slot.promised == 12


def test_slots_of_another_partition_are_rejected():
    disk = new_disk()
    new_slots(disk)
    with pytest.raises(BadFormat, match="expected partition 1, found 2"):
        SlotFile.open(disk, ROOT, 1)


def test_a_failed_slot_write_does_not_change_the_slot_in_use():
    disk = new_disk()
    slots = new_slots(disk, promised=3)
    for step in (1, 2):
        disk.plan_fault(disk.step_count + step, DiskFault.IO_ERROR)
        with pytest.raises(DiskFailed):
            slots.write(Slot(2, promised=8))
        assert slots.slot.promised == 3
    disk.lose_power(Survival.NOTHING, Random(1))
    assert SlotFile.open(disk, ROOT, 2).slot.promised == 3


def test_slots_that_cannot_be_read_leave_no_file_open():
    disk = new_disk()
    SlotFile.create(disk, ROOT, Slot(2)).close()
    before = disk.open_count
    for read in (1, 2):
        disk.plan_read_failure(read)
        with pytest.raises(ReadFailed):
            SlotFile.open(disk, ROOT, 2)
        assert disk.open_count == before
    SlotFile.open(disk, ROOT, 2).close()


def test_a_slot_write_releases_only_lost_sectors_of_its_block(monkeypatch):
    disk = new_disk()
    slots = SlotFile.create(disk, ROOT, Slot(2))
    abandoned = []
    monkeypatch.setattr(
        SimFile, "discard_unreadable", lambda _, *position: not abandoned.append(position)
    )
    for _ in range(2):
        disk.plan_fault_at_call({"write"}, DiskFault.IO_ERROR)
        slots.write(Slot(2))
        position = SLOT_BLOCK_BYTES * (slots.slot.sequence % 2 == 0)
        assert disk.visible_content(SLOTS)[position : position + SLOT_BYTES] == slots.slot.encode()
        assert abandoned.pop() == (position, SLOT_BYTES)
    slots.write(Slot(2))
    assert abandoned == [], "the write succeeded"
    monkeypatch.setattr(SimFile, "discard_unreadable", lambda *_: False)
    disk.plan_fault_at_call({"write"}, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed, match="write"):
        slots.write(Slot(2))
