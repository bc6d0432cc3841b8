"""Removal of replicas: remaining files, and interrupted removals."""

import struct
from pathlib import Path
from random import Random

import pytest

from waltz_core.errors import BadFormat, ChecksumMismatch, NoSpace
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION
from waltz_core.storage.disk.file_system import create_durably
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME, ControlFile, SlotFile
from waltz_core.storage.files.format import FLAG_ASSIGNED, FLAG_AVAILABLE, Slot, with_crc
from waltz_core.storage.files.lock_block_file import LOCKS_FILE_NAME, OLDER_LOCKS_FILE_NAME
from waltz_core.storage.log import removal
from waltz_core.storage.log.removal import WIPE_FILE_NAME, WipeIntent
from waltz_sim.world.simulated_disk import DiskFault, SimDisk, Survival

ROOT = Path("/storage")
HOME = ROOT / "2"
KEY = bytes(range(16))
NONCE = b"a nonce of owner"
KEPT_WIPE = WipeIntent(2, is_held=True, promised=9, nonce=NONCE)
REMOVED_WIPE = WipeIntent(2, is_held=False, promised=NO_SESSION, nonce=bytes(16))


@pytest.fixture
def disk():
    disk = SimDisk()
    disk.make_directory(ROOT)
    return disk


@pytest.fixture
def control(disk):
    control = ControlFile.open(disk, ROOT, KEY, 4, 5)
    disk.make_directory(HOME)
    control.set_flags(2, FLAG_ASSIGNED)
    control.set_marks(2, 8, 40)
    SlotFile.create(disk, HOME, Slot(2, promised=9, low_water_mark=40)).close()
    names = [f"{first:019d}{suffix}" for first in (0, 7) for suffix in (".seg", ".idx", ".chn")]
    names += [LOCKS_FILE_NAME, OLDER_LOCKS_FILE_NAME, "left.tmp", "notes.txt"]
    create_durably(disk, HOME, [(name, b"x") for name in names])
    return control


def names_in(disk):
    return disk.list(HOME)


def test_a_removed_partition_leaves_no_file(disk, control):
    sequence = control.info(2).sequence
    removal.wipe(disk, HOME, control, REMOVED_WIPE)
    assert names_in(disk) == ["notes.txt"]
    assert control.info(2) == (-1, -1, -1, FLAG_AVAILABLE, sequence + 1)
    assert control.info(1).flags == FLAG_AVAILABLE
    disk.lose_power(Survival.NOTHING, Random(1))
    assert ControlFile.open(disk, ROOT, KEY, 4, 5).info(2).sequence == sequence + 1


def test_wiping_a_replica_keeps_its_promise_and_flags(disk, control):
    removal.wipe(disk, HOME, control, KEPT_WIPE)
    assert names_in(disk) == ["notes.txt", SLOTS_FILE_NAME]
    info = control.info(2)
    assert (info.session_id, info.low_water_mark, info.flags) == (-1, -1, FLAG_ASSIGNED)
    slots = SlotFile.open(disk, HOME, 2)
    assert not slots.has_lost_newer_slot
    assert slots.slot == Slot(
        2, control_file_sequence=info.sequence, promised=9, nonce=NONCE, suspect=True
    )
    assert (slots.slot.last_session, slots.slot.low_water_mark) == (NO_SESSION, BEFORE_FIRST)


@pytest.mark.parametrize("intent", [KEPT_WIPE, REMOVED_WIPE])
def test_each_step_of_a_removal_is_durable_before_the_next_step(disk, control, intent):
    """A file system may persist names in any order, unless the directory is synced in between.

    A log that reappears without its slots could not be opened, or could not be trusted.
    """
    trace_start = len(disk.trace)
    removal.wipe(disk, HOME, control, intent)
    steps = disk.trace[trace_start:]
    synced = [position for position, step in enumerate(steps) if step == f"syncdir {HOME.name}"]
    logs = [index for index, step in enumerate(steps) if step.startswith("unlink 0")]
    slots = [
        index
        for index, s in enumerate(steps)
        if SLOTS_FILE_NAME in s and s[:6] in {"unlink", "rename"}
    ]
    (gone,) = (index for index, step in enumerate(steps) if step == f"unlink {WIPE_FILE_NAME}")
    assert len(logs) == 6
    assert slots
    for before, after in ((max(logs), slots[-1]), (slots[-1], gone), (gone, len(steps))):
        assert any(before < position < after for position in synced), steps


def test_without_an_intent_no_removal_is_completed(disk, control):
    before = disk.files()
    removal.finish_removal(disk, HOME, control, 2)
    removal.finish_removal(disk, ROOT / "3", control, 3)
    assert disk.files() == before


def test_a_full_disk_without_space_for_an_intent_changes_nothing(disk, control):
    before = names_in(disk)
    disk.plan_fault(disk.step_count + 2, DiskFault.DISK_FULL)
    with pytest.raises(NoSpace):
        removal.wipe(disk, HOME, control, REMOVED_WIPE)
    assert {name for name in names_in(disk) if not name.startswith(WIPE_FILE_NAME)} == set(before)
    assert not disk.exists(HOME / WIPE_FILE_NAME)
    assert control.info(2).low_water_mark == 40


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (KEPT_WIPE._replace(partition_id=1).encode(), BadFormat),
        (KEPT_WIPE.encode()[:-1], BadFormat),
        (KEPT_WIPE.encode()[:-1] + b"\0", ChecksumMismatch),
    ],
)
def test_an_intent_that_is_invalid_or_of_another_partition_removes_nothing(
    disk, control, content, error
):
    create_durably(disk, HOME, [(WIPE_FILE_NAME, content)])
    before = disk.files()
    with pytest.raises(error):
        removal.finish_removal(disk, HOME, control, 2)
    assert disk.files() == before


@pytest.mark.parametrize("fields", [(2, 2, 9), (2, -1, 9), (2, 1, -2)])
def test_an_intent_with_invalid_values_is_rejected(fields):
    with pytest.raises(BadFormat, match="impossible flag"):
        WipeIntent.decode(with_crc(struct.pack(">iiiq16s", 0, *fields, NONCE)))
