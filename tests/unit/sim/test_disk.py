"""The simulated disk: a crash loses exactly what was not synced; it fails on request."""

from pathlib import Path
from random import Random

import pytest

from waltz_core.errors import DiskFailed, NoSpace, ReadFailed
from waltz_core.storage.disk.file_system import create_durably
from waltz_sim.world.inode import SECTOR_BYTES
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimDisk, Survival

ROOT = Path("/s")
PATH = ROOT / "f"


@pytest.fixture
def disk():
    disk = SimDisk()
    disk.make_directory(ROOT)
    create_durably(disk, ROOT, [("f", b"a" * 3 * SECTOR_BYTES)])
    return disk


def test_synced_data_survives_and_the_rest_is_lost(disk):
    file = disk.open(PATH)
    file.pwrite([b"b" * 10, memoryview(b"c")], SECTOR_BYTES)
    file.sync()
    file.pwrite([b"d"], 0)
    file.truncate(5)
    disk.lose_power(Survival.NOTHING, Random(1))
    left = disk.visible_content(PATH)
    assert len(left) == 3 * SECTOR_BYTES
    assert left[SECTOR_BYTES : SECTOR_BYTES + 11] == b"b" * 10 + b"c"
    assert left[:SECTOR_BYTES] == b"a" * SECTOR_BYTES


def test_killing_the_process_loses_no_data(disk):
    disk.open(PATH).pwrite([b"z" * 2000], 1000)
    disk.lose_power(Survival.EVERYTHING, Random(1))
    assert disk.visible_content(PATH) == b"a" * 1000 + b"z" * 2000


def test_a_crash_may_keep_both_ends_of_a_long_write_and_lose_its_middle():
    disk = SimDisk()
    disk.make_directory(Path("/d"))
    file = disk.open(Path("/d/f"), create=True)
    disk.sync_directory(Path("/d"))
    file.pwrite([b"x" * (4 * SECTOR_BYTES)], 0)
    disk.lose_power(Survival.ENDS, Random(1))
    end, lost = b"x" * SECTOR_BYTES, bytes(2 * SECTOR_BYTES)
    assert disk.visible_content(Path("/d/f")) == end + lost + end


def test_any_subset_of_whole_sectors_can_remain():
    patterns = set()
    for seed in range(300):
        disk = SimDisk()
        create_durably(disk, ROOT, [("f", b"a" * 4 * SECTOR_BYTES)])
        disk.open(PATH).pwrite([b"b" * 4 * SECTOR_BYTES], 0)
        disk.lose_power(Survival.ANY_SECTORS, Random(seed))
        left = disk.visible_content(PATH)
        pieces = [
            left[offset : offset + SECTOR_BYTES] for offset in range(0, len(left), SECTOR_BYTES)
        ]
        assert all(piece in {b"a" * SECTOR_BYTES, b"b" * SECTOR_BYTES} for piece in pieces)
        patterns.add(b"".join(piece[:1] for piece in pieces))
    assert len(patterns) == 16


def test_unwritten_sectors_of_a_grown_file_read_as_zeros():
    seen = set()
    for seed in range(100):
        disk = SimDisk()
        create_durably(disk, ROOT, [("f", b"a")])
        disk.open(PATH).pwrite([b"b" * 2 * SECTOR_BYTES], 1)
        disk.lose_power(Survival.ANY_SECTORS, Random(seed))
        left = disk.visible_content(PATH)
        assert left[:1] == b"a"
        assert set(left[1:]) <= {0, ord("b")}
        seen.add((len(left), left[-1:]))
    assert len(seen) > 4


def test_names_are_durable_only_after_a_sync_of_their_directory(disk):
    create_durably(disk, ROOT, [("new", b"n")])
    disk.unlink(PATH)
    disk.rename(ROOT / "new", ROOT / "newer")
    disk.open(ROOT / "g", create=True).pwrite([b"x"], 0)
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.list(ROOT) == ["f", "new"]
    disk.unlink(PATH)
    disk.rename(ROOT / "new", ROOT / "newer")
    disk.sync_directory(ROOT)
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.list(ROOT) == ["newer"]


def test_a_sync_after_a_failed_sync_falsely_reports_success(disk):
    file = disk.open(PATH)
    file.pwrite([b"b"], 0)
    disk.plan_fault(disk.step_count + 1, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        file.sync()
    file.sync()
    assert file.pread(1, 0) == b"b"
    disk.lose_power(Survival.EVERYTHING, Random(1))
    assert disk.visible_content(PATH)[:1] == b"a"


def test_a_failed_write_keeps_its_first_half_up_to_a_sector_boundary(disk):
    disk.plan_fault(disk.step_count + 1, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        disk.open(PATH).pwrite([b"bbbb"], SECTOR_BYTES - 2)
    assert disk.visible_content(PATH)[SECTOR_BYTES - 3 : SECTOR_BYTES + 2] == b"abbaa"
    disk.plan_fault(disk.step_count + 1, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        disk.open(PATH).pwrite([b"cccc"], 0)
    assert disk.visible_content(PATH)[:4] == b"aaaa"


def test_a_full_disk_still_serves_reads_and_accepts_writes_that_fit():
    disk = SimDisk(capacity_bytes=10)
    file = disk.open(PATH, create=True)
    file.pwrite([b"12345678"], 0)
    with pytest.raises(NoSpace):
        file.pwrite([b"abcd"], 8)
    assert file.pread(100, 0) == b"12345678ab"
    with pytest.raises(NoSpace):
        file.allocate(11)
    file.truncate(2)
    file.pwrite([b"abcd"], 2)
    assert file.size() == 6


def test_calls_fail_while_the_power_is_off(disk):
    file = disk.open(PATH)
    disk.plan_fault(disk.step_count + 1, DiskFault.POWER_LOSS)
    with pytest.raises(PowerLoss):
        file.pwrite([b"bb"], 0)
    for call in (file.size, file.sync, lambda: disk.list(ROOT), lambda: disk.open(PATH)):
        with pytest.raises(PowerLoss):
            call()
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.visible_content(PATH)[:2] == b"aa"
    with pytest.raises(AssertionError):
        file.size()


def test_only_one_opener_gets_the_lock(disk):
    one, other = disk.open(PATH), disk.open(PATH)
    assert one.lock_whole_file()
    assert not other.lock_whole_file()
    one.close()
    assert other.lock_whole_file()
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.open(PATH).lock_whole_file()


def test_corruption_on_the_disk_is_not_counted_as_a_step(disk):
    steps = disk.step_count
    disk.flip_bits(PATH, 3, 0x80)
    assert disk.visible_content(PATH)[3] == ord("a") ^ 0x80
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.visible_content(PATH)[3] == ord("a") ^ 0x80
    assert disk.step_count == steps


def test_a_planned_failure_of_a_call_or_read_occurs_once_and_notifies_the_test(disk):
    failed_calls = []
    disk.plan_fault_at_call(
        {"rename", "sync"}, DiskFault.IO_ERROR, lambda: failed_calls.append("call")
    )
    disk.plan_read_failure(2, lambda: failed_calls.append("read"))
    file = disk.open(PATH)
    file.pwrite([b"b"], 0)
    assert file.pread(1, 0) == b"b"
    assert failed_calls == []
    with pytest.raises(DiskFailed, match="cannot read"):
        file.pread(1, 0)
    with pytest.raises(DiskFailed, match="sync"):
        file.sync()
    assert failed_calls == ["read", "call"]
    assert file.pread(1, 0) == b"b"
    file.sync()


def test_a_disk_with_false_syncs_loses_synced_data_at_a_power_loss(disk):
    disk.is_lying = True
    file = disk.open(PATH)
    file.pwrite([b"b"], 0)
    file.sync()
    assert disk.visible_content(PATH)[:1] == b"b"
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.visible_content(PATH)[:1] == b"a"


def test_a_backup_has_the_durable_bytes(disk):
    file = disk.open(PATH)
    file.pwrite([b"b"], 0)
    backup = disk.durable_contents()
    file.sync()
    other = ROOT / "other"
    disk.write_durably(other, b"new")
    disk.replace_contents(backup)
    assert disk.visible_content(PATH)[:1] == b"a"
    assert not disk.exists(other)
    with pytest.raises(AssertionError, match="before the power loss"):
        file.size()


def test_changed_pages_and_shrunk_files_do_not_count_as_steps(disk):
    steps, size = disk.step_count, len(disk.visible_content(PATH))
    disk.overwrite(PATH, size - 2, b"xyz")
    assert disk.visible_content(PATH)[-3:] == b"axy"
    disk.shorten_file(PATH, 5)
    disk.lose_power(Survival.NOTHING, Random(1))
    assert disk.visible_content(PATH) == b"aaaaa"
    disk.remove(PATH)
    assert not disk.exists(PATH)
    assert disk.step_count == steps


def with_unreadable_sectors(content, first, last):
    disk, path = SimDisk(), Path("/d/f")
    disk.write_durably(path, content)
    disk.make_unreadable(path, first, last)
    return disk, path, disk.open(path)


def test_unreadable_sectors_are_readable_after_a_complete_rewrite():
    disk, path, file = with_unreadable_sectors(bytes(2_000), 600, 1_100)
    assert len(file.pread(512, 0)) == 512
    for size, offset in ((1, 512), (1, 1_535), (2_000, 0)):
        with pytest.raises(ReadFailed, match="/d/f"):
            file.pread(size, offset)
    assert file.pread(0, 600) == b""
    assert len(file.pread(400, 1_536)) == 400
    file.pwrite([b"x" * 512], 512)
    assert file.pread(512, 512) == b"x" * 512
    with pytest.raises(ReadFailed):
        file.pread(1, 1_024)
    disk.lose_power(Survival.NOTHING, Random(1))
    with pytest.raises(ReadFailed):
        disk.open(path).pread(1, 1_024)


@pytest.mark.parametrize(
    ("offset", "size", "written"),
    [(700, 1, 0), (500, 100, 12), (512, 511, 0), (513, 511, 0), (400, 1_000, 624), (1_100, 100, 0)],
)
def test_an_unreadable_sector_cannot_be_written_in_part(offset, size, written):
    disk, path, file = with_unreadable_sectors(bytes(2_000), 600, 1_100)
    with pytest.raises(DiskFailed, match="write /d/f"):
        file.pwrite([b"x" * size], offset)
    assert disk.visible_content(path) == bytes(offset) + b"x" * written + bytes(
        2_000 - offset - written
    )


def test_released_or_truncated_unreadable_sectors_read_as_zeros():
    disk, path, file = with_unreadable_sectors(b"a" * 2_000, 512, 1_999)
    file.discard_unreadable(600, 1_000)  # complete sectors between them are not zeroed
    assert file.pread(512, 512) == bytes(512)
    assert file.pread(512, 1_536) == bytes(2_000 - 1_536)
    assert file.size() == 2_000
    with pytest.raises(ReadFailed):
        file.pread(1, 1_024)
    file.pwrite([b"b" * 1_000], 600)
    assert file.pread(2_000, 0) == b"a" * 512 + bytes(88) + b"b" * 1_000 + bytes(400)
    file.discard_unreadable(0, 2_000)
    assert file.pread(512, 0) == b"a" * 512
    disk.make_unreadable(path, 1_024, 1_999)
    file.truncate(1_024)
    file.truncate(2_000)
    assert file.pread(976, 1_024) == bytes(976)


def test_free_space_is_the_rest_of_the_capacity():
    disk = SimDisk(capacity_bytes=100)
    disk.write_durably(Path("/d/f"), bytes(70))
    assert disk.free_bytes(Path("/d")) == 30
    disk.capacity_bytes = 60
    assert disk.free_bytes(Path("/d")) == 0
    disk.capacity_bytes = None
    assert disk.free_bytes(Path("/d")) > 1 << 30
