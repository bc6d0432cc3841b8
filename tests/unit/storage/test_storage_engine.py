"""A storage directory: its identity, locks and partitions, and when it cannot be opened."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import (
    BadFormat,
    ChecksumMismatch,
    ClusterKeyMismatch,
    DiskFailed,
    MissingSegment,
    SessionFenced,
    UnknownPartition,
)
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_sim.world.simulated_disk import DiskFault, SimDisk, Survival

KEY = bytes(range(16))
SETTINGS = LogSettings(KEY, 10_000, lambda: 5)


def open_engine(directory, *, disk=None, settings=SETTINGS, partition_count=3, **options):
    return StorageEngine.open(
        disk or RealDisk(),
        directory,
        settings,
        partition_count=partition_count,
        new_storage_id=os.urandom(16),
        **options,
    )


def test_a_directory_keeps_its_identity_and_its_partitions(tmp_path):
    engine = open_engine(tmp_path / "a" / "b", reserve_bytes=4096)
    engine.assign(2)
    engine.assign(0).prepare(3, KEY)
    assert engine.assigned_partitions() == [0, 2]
    with pytest.raises(UnknownPartition):
        engine.log(1)
    with pytest.raises(UnknownPartition):
        engine.assign(3)
    identity = engine.storage_id
    engine.close()
    engine = open_engine(tmp_path / "a" / "b")
    assert engine.storage_id == identity
    assert engine.assigned_partitions() == [0, 2]
    assert engine.log(0).promised == 3
    assert (tmp_path / "a" / "b" / "waltz-x.reserve").stat().st_size == 4096
    engine.space.release_reserve()
    assert not (tmp_path / "a" / "b" / "waltz-x.reserve").exists()
    engine.close()


def test_several_partitions_are_assigned_with_one_sync_of_names_and_one_of_flags():
    disk = SimDisk()
    engine = open_engine(Path("/waltz"), disk=disk, partition_count=9)
    engine.assign(4)
    before = len(disk.trace)
    engine.assign_new([2, 4, 7])
    assert [step.split()[0] for step in disk.trace[before:]].count("sync") == 1
    assert engine.assigned_partitions() == [2, 4, 7]
    assert sorted(engine.logs) == [4]
    before = len(disk.trace)
    engine.assign_new([2, 4, 7])
    assert len(disk.trace) == before, "the partitions existed already"
    for partition_id in (2, 7):
        engine.assign(partition_id)
    engine.abandon()
    disk.lose_power(Survival.NOTHING, Random(1))
    engine = open_engine(Path("/waltz"), disk=disk, partition_count=9)
    assert (sorted(engine.logs), engine.open_errors) == ([2, 4, 7], {})
    with pytest.raises(UnknownPartition):
        engine.assign_new([1, 9])
    assert engine.assigned_partitions() == [2, 4, 7]
    engine.abandon()


def test_argument_for_each_determines_how_the_partitions_are_opened(tmp_path):
    engine = open_engine(tmp_path)
    for partition_id in (2, 0):
        engine.assign(partition_id)
    engine.close()
    requests = []

    def for_each(call, partition_ids):
        requests.extend(partition_ids)
        for partition_id in reversed(partition_ids):
            call(partition_id)

    engine = open_engine(tmp_path, for_each=for_each)
    assert requests == [0, 2]
    assert list(engine.logs) == [2, 0]
    engine.close()


def test_a_second_opener_is_rejected_in_this_process_and_in_another(tmp_path):
    engine = open_engine(tmp_path)
    with pytest.raises(DiskFailed, match="another process"):
        open_engine(tmp_path)
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "try:\n    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 128, 0)\n"
        "except OSError:\n    sys.exit(7)\n"
    )
    control = str(tmp_path / "waltz-storage.ctl")
    run = [sys.executable, "-c", script, control]
    assert subprocess.run(run, check=False, timeout=TEST_TIMEOUT_S).returncode == 7
    engine.close()
    assert subprocess.run(run, check=False, timeout=TEST_TIMEOUT_S).returncode == 0
    open_engine(tmp_path).close()


def test_another_cluster_or_another_number_of_partitions_is_rejected(tmp_path):
    open_engine(tmp_path).close()
    with pytest.raises(ClusterKeyMismatch, match=f"found {KEY.hex()}"):
        open_engine(tmp_path, settings=LogSettings(bytes(16), 10_000, lambda: 5))
    with pytest.raises(BadFormat, match="expected a partition count of 4, found 3"):
        open_engine(tmp_path, partition_count=4)
    open_engine(tmp_path).close()


def test_a_partition_without_its_directory_is_not_created_again(tmp_path):
    engine = open_engine(tmp_path)
    log = engine.assign(1)
    log.prepare(6, KEY)
    log.set_low_water_mark(6, log.max_id, log.chain)
    engine.close()
    shutil.rmtree(tmp_path / "1")
    for _ in range(2):
        engine = open_engine(tmp_path)
        log = engine.log(1)
        assert (log.max_id, log.suspect, log.last_session) == (-1, True, -1)
        for session in (6, 7):
            with pytest.raises(
                SessionFenced, match="expected a store session above the promised session 7"
            ):
                log.prepare(session, KEY)
        engine.close()
    engine = open_engine(tmp_path)
    assert engine.log(1).prepare(8, KEY).suspect
    engine.unassign(1, deletes_files=False)  # The control file no longer lists the partition.
    shutil.rmtree(tmp_path / "1")
    log = engine.assign(1)
    assert (log.suspect, log.promised) == (False, -1)
    engine.close()


NAMES = ["waltz-x.ctl", f"{0:019d}.idx", f"{0:019d}.chn", f"{0:019d}.seg"]


@pytest.mark.parametrize("file_count", range(len(NAMES)))
def test_a_log_opens_after_a_crash_while_its_first_segment_is_created(tmp_path, file_count):
    engine = open_engine(tmp_path)
    engine.assign(0)
    engine.abandon()
    for name in NAMES[file_count:]:
        (tmp_path / "0" / name).rename(tmp_path / "0" / f"{name}.tmp")
    for _ in range(2):
        engine = open_engine(tmp_path)
        log = engine.log(0)
        assert (log.max_id, log.suspect, log.damaged) == (-1, False, ())
        engine.abandon()
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == sorted(NAMES)


# ---- administration; tests/crash covers crashes


def test_an_absent_partition_cannot_be_administered(tmp_path):
    engine = open_engine(tmp_path)
    for command in (
        lambda partition: engine.unassign(partition, deletes_files=False),
        lambda partition: engine.set_available(partition, is_available=False),
        engine.mark_suspect,
        engine.re_seed,
    ):
        with pytest.raises(UnknownPartition, match="partition 1 is not assigned"):
            command(1)
        with pytest.raises(UnknownPartition, match=r"expected a partition in 0..2, found 3"):
            command(3)
    with pytest.raises(UnknownPartition):
        engine.info(-1)
    engine.close()


def engine_with_lost_slots(tmp_path, *, blocks):
    """Return an engine whose partition 1 has lost control slots; partition 2 is intact."""
    engine = open_engine(tmp_path)
    engine.assign(2)
    engine.assign(1).prepare(5, KEY)
    engine.close()
    spoil_slots(tmp_path, blocks)
    return open_engine(tmp_path)


def spoil_slots(tmp_path, blocks):
    """Flip a bit in each block; a second call restores the blocks."""
    path = tmp_path / "1" / "waltz-x.ctl"
    content = bytearray(path.read_bytes())
    for block in blocks:
        content[4096 * block + 40] ^= 1
    path.write_bytes(content)


def test_a_partition_that_cannot_be_opened_can_be_emptied(tmp_path):
    engine = engine_with_lost_slots(tmp_path, blocks=(0, 1))
    with pytest.raises(BadFormat):
        engine.log(1)
    with pytest.raises(BadFormat):
        engine.set_available(1, is_available=False)
    assert engine.log(2).max_id == -1, "other partitions are open"
    engine.re_seed(1)
    log = engine.assign(1)
    assert (log.max_id, log.suspect, log.slot.nonce) == (-1, True, b"\xff" * 16)
    assert log.promised == 0  # one above the session in the control file
    engine.close()


def test_a_partition_that_cannot_be_opened_can_be_deleted_but_not_unassigned(tmp_path):
    engine = engine_with_lost_slots(tmp_path, blocks=(0, 1))
    with pytest.raises(BadFormat):
        engine.unassign(1, deletes_files=False)
    assert engine.assigned_partitions() == [1, 2]
    engine.unassign(1, deletes_files=True)
    assert (engine.assigned_partitions(), engine.open_errors) == ([2], {})
    assert list((tmp_path / "1").iterdir()) == []
    engine.close()


def test_a_replica_with_a_lost_slot_stays_suspect_when_its_flags_are_set(tmp_path):
    engine = engine_with_lost_slots(tmp_path, blocks=(0,))
    assert engine.log(1).suspect
    engine.set_available(1, is_available=False)
    assert engine.assign(1).suspect
    engine.close()


def test_the_directory_of_a_partition_outside_the_cluster_is_ignored(tmp_path):
    engine = open_engine(tmp_path)
    engine.close()
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "waltz-x.wipe").write_bytes(b"not ours")
    engine = open_engine(tmp_path)
    assert engine.open_errors == {}
    engine.close()


def test_the_availability_of_a_repaired_partition_can_be_changed(tmp_path):
    engine = engine_with_lost_slots(tmp_path, blocks=(0, 1))
    assert 1 in engine.open_errors
    spoil_slots(tmp_path, (0, 1))  # an operator has restored the file
    engine.set_available(1, is_available=False)
    assert not engine.is_available(1)
    assert engine.assign(1).promised == 5
    engine.close()


@pytest.mark.parametrize("name", ["waltz-x.id", "waltz-storage.ctl"])
def test_errors_name_the_file(tmp_path, name):
    open_engine(tmp_path).close()
    (tmp_path / name).write_bytes(b"\1" * 400)
    with pytest.raises((BadFormat, ChecksumMismatch), match=f"{name}: "):
        open_engine(tmp_path)


def test_files_of_a_killed_process_are_synced_before_they_are_trusted():
    disk = SimDisk()
    engine = open_engine(Path("/waltz"), disk=disk)
    disk.plan_fault_at_call(("sync",), DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        engine.assign(1)
    engine.abandon()
    file = disk.open(Path("/waltz/waltz-storage.ctl"))
    file.pwrite([file.pread(1000, 0)], 0)  # a write of a killed process
    file.close()
    engine = open_engine(Path("/waltz"), disk=disk)
    assert engine.assigned_partitions() == [1]
    disk.lose_power(Survival.NOTHING, Random(1))
    engine = open_engine(Path("/waltz"), disk=disk)
    assert engine.assigned_partitions() == [1]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_partition_with_replaced_files_opens_only_after_a_re_seed(tmp_path, is_replaced):
    engine = open_engine(tmp_path)
    log = engine.assign(1)
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    log.prepare(7, KEY)
    shutil.rmtree(tmp_path / "1")
    if is_replaced:
        shutil.copytree(tmp_path / "copy", tmp_path / "1")
    with pytest.raises(MissingSegment) as caught:
        log.check_files()
    engine.stop_serving(1, caught.value)
    for call in (engine.assign, engine.log):
        with pytest.raises(MissingSegment, match="deleted or replaced"):
            call(1)
    engine.re_seed(1)
    log = engine.assign(1)
    assert (log.suspect, log.promised, log.max_id) == (True, 7, -1)
    with pytest.raises(SessionFenced):
        log.prepare(7, bytes(16))
    engine.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_partition_is_not_emptied_without_its_control_file(tmp_path, is_replaced):
    engine = open_engine(tmp_path / "storage")
    log = engine.assign(1)
    engine.check_files()
    shutil.copytree(tmp_path / "storage", tmp_path / "copy")
    shutil.rmtree(tmp_path / "storage")
    if is_replaced:
        (tmp_path / "copy").rename(tmp_path / "storage")
    with pytest.raises(MissingSegment) as caught:
        log.check_files()
    engine.stop_serving(1, caught.value)
    assert engine.has_lost_files
    for call in (engine.check_files, lambda: engine.re_seed(1)):
        with pytest.raises(MissingSegment, match=r"waltz-storage.ctl: .*deleted or replaced.*Hint"):
            call()
    assert (tmp_path / "storage").exists() == is_replaced
    engine.abandon()


@pytest.mark.parametrize(
    "step",
    [lambda engine: engine.set_available(1, is_available=False), lambda each: each.mark_suspect(1)],
    ids=["set_available", "mark_suspect"],
)
def test_an_administrative_command_does_not_open_a_replaced_directory(tmp_path, step):
    engine = open_engine(tmp_path)
    engine.assign(1).prepare(5, bytes(16))
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    engine.log(1).prepare(9, KEY)
    shutil.rmtree(tmp_path / "1")
    shutil.copytree(tmp_path / "copy", tmp_path / "1")
    for call in (step, lambda engine: engine.assign(1)):
        with pytest.raises(MissingSegment, match="deleted or replaced"):
            call(engine)
    engine.close()
