"""The lock files: the newest blocks are returned, even if other files are damaged."""

from tests.unit.storage.logs import ROOT, new_disk, open_names
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.lock_block_file import (
    LOCKS_FILE_NAME,
    OLDER_LOCKS_FILE_NAME,
    LockBlockFile,
)
from waltz_sim.world.simulated_disk import DiskFault


def new_file(disk, file_bytes_max=100):
    file = LockBlockFile(disk, ROOT)
    file.file_bytes_max = file_bytes_max
    return file


def test_appended_blocks_are_returned_oldest_first():
    locks = new_file(new_disk())
    locks.append([b"one", b"two"])
    locks.append([b"three"])
    assert locks.newest(100) == b"onetwothree"
    assert locks.newest(8) == b"twothree"
    assert locks.newest(0) == b""


def test_a_lock_file_becomes_the_older_file_when_it_is_full():
    disk = new_disk()
    locks = new_file(disk, 10)
    for number in range(7):
        locks.append([b"%d...." % number])
    kept = locks.newest(1_000)
    assert kept == b"".join(b"%d...." % number for number in range(4, 7))
    assert disk.visible_content(ROOT / OLDER_LOCKS_FILE_NAME) == b"4....5...."
    assert disk.visible_content(ROOT / LOCKS_FILE_NAME) == b"6...."
    assert locks.newest(7) == b"..6...."


def test_a_restarted_storage_appends_to_the_existing_lock_file():
    disk = new_disk()
    first = new_file(disk)
    first.append([b"before"])
    first.close()
    first.append([b"no process"])
    second = new_file(disk)
    second.append([b"after"])
    assert second.newest(100) == b"beforeafter"


def test_many_lock_files_share_few_descriptors(tmp_path):
    disk = RealDisk(3)
    files = []
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        files.append(LockBlockFile(disk, tmp_path / str(number)))
    for turn in range(2):
        for number, locks in enumerate(files):
            locks.append([b"%d %d " % (number, turn)])
            assert len(open_names(tmp_path)) <= 3
    assert [locks.newest(100) for locks in files] == [b"%d 0 %d 1 " % (n, n) for n in range(8)]


def test_after_an_error_a_lock_file_returns_no_blocks():
    disk = new_disk()
    locks = new_file(disk)
    locks.append([])
    assert disk.files() == {}
    locks.append([b"one"])
    disk.plan_fault(disk.step_count + 1, DiskFault.IO_ERROR)
    locks.append([b"two"])
    locks.append([b"three"])
    assert locks.newest(100) == b""
    assert new_file(disk).newest(100).startswith(b"one")
    assert b"three" not in new_file(disk).newest(100)
    disk.plan_read_failure(1)
    assert new_file(disk).newest(100) == b""
    full = new_disk()
    full.capacity_bytes = 0
    locks = new_file(full)
    locks.append([b"one"])
    assert locks.newest(100) == b""
