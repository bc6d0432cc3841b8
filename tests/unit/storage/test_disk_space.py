"""Disk space of a directory: the reserve, and the rejection of appends."""

from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest

from waltz_core.errors import NoSpace
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.disk_space import (
    DAY_MS,
    RESERVE_FILE_NAME,
    SAMPLE_INTERVAL_MS,
    UNCHECKED_BYTES_MAX,
    DiskSpace,
    disk_bytes_of_append,
)
from waltz_sim.world.simulated_disk import DiskFault, SimDisk

ROOT = Path("/waltz")
RESERVE = ROOT / RESERVE_FILE_NAME


def new_space(*, capacity=10_000, reserve=4_000):
    disk = SimDisk(capacity_bytes=capacity)
    disk.make_directory(ROOT)
    space = DiskSpace(disk, ROOT, reserve)
    space.fill_reserve()
    return disk, space


def test_appends_are_rejected_before_they_touch_the_reserve():
    disk, space = new_space()
    steps = disk.step_count
    space.check_append(6_000)
    assert not space.is_full
    with pytest.raises(NoSpace, match="full: an append and the reserve need 6001 bytes, and 6"):
        space.check_append(6_001)
    assert space.is_full
    assert space.reserved_bytes == 4_000
    assert disk.step_count == steps, "no byte was written"


def test_appends_wait_until_a_released_reserve_is_restored():
    disk, space = new_space(capacity=4_500)
    space.check_append(500)
    disk.write_durably(ROOT / "other", bytes(400))
    space.release_reserve()
    assert not disk.exists(RESERVE)
    assert (space.is_full, space.reserved_bytes) == (True, 0)
    disk.write_durably(ROOT / "repair", bytes(300))
    with pytest.raises(NoSpace):
        space.check_append(1)
    space.recheck()
    assert (space.is_full, disk.exists(RESERVE)) == (True, False)
    disk.remove(ROOT / "other")
    space.recheck()
    assert (space.is_full, space.reserved_bytes) == (False, 4_000)
    space.check_append(1)


@pytest.mark.parametrize("note_shortage", [False, True])
def test_the_next_check_requires_the_space_that_was_missing(note_shortage):
    disk, space = new_space()
    if note_shortage:
        space.check_append(100)
        space.note_shortage(2_000)
    else:
        disk.write_durably(ROOT / "other", bytes(5_000))
        with pytest.raises(NoSpace):
            space.check_append(2_000)
    disk.write_durably(ROOT / "other", bytes(4_500))
    space.recheck()
    assert space.is_full
    disk.write_durably(ROOT / "other", bytes(4_000))
    space.recheck()
    assert not space.is_full


def test_a_disk_that_is_full_at_the_start_is_reported():
    disk, space = new_space(capacity=3_999)
    assert (space.is_full, space.reserved_bytes) == (True, 0)
    assert disk.visible_content(RESERVE) == b""


def test_a_disk_without_space_for_a_file_name_is_full_at_the_start():
    disk = SimDisk()
    disk.make_directory(ROOT)
    disk.open = Mock(side_effect=NoSpace("cannot open"))
    space = DiskSpace(disk, ROOT, 4_000)
    space.fill_reserve()
    assert (space.is_full, space.reserved_bytes) == (True, 0)


def test_a_failure_to_fill_or_release_the_reserve_is_not_fatal():
    disk, space = new_space()
    for fault in (DiskFault.IO_ERROR, DiskFault.DISK_FULL):
        disk.plan_fault(disk.step_count + 1, fault)
        space.release_reserve()
    space.release_reserve()
    disk.plan_fault_at_call(("allocate",), DiskFault.IO_ERROR)
    space.recheck()
    assert space.reserved_bytes == 0
    space.recheck()
    assert space.reserved_bytes == 4_000


def test_without_a_reserve_only_free_space_counts():
    _, space = new_space(reserve=0)
    space.check_append(10_000)
    with pytest.raises(NoSpace):
        space.check_append(10_001)
    space.release_reserve()
    space.check_append(10_000)
    assert space.reserved_bytes == 0


def test_the_reserve_is_filled_and_released_on_a_real_disk(tmp_path):
    space = DiskSpace(RealDisk(), tmp_path, 8_192)
    space.fill_reserve()
    assert (tmp_path / RESERVE_FILE_NAME).stat().st_size == 8_192
    space.check_append(1)
    with pytest.raises(NoSpace, match=str(tmp_path)):
        space.check_append(1 << 60)
    space.release_reserve()
    assert not (tmp_path / RESERVE_FILE_NAME).exists()
    space.recheck()
    assert (tmp_path / RESERVE_FILE_NAME).stat().st_size == 8_192


class ReleasingThread(SimDisk):
    """A disk on which another thread releases the reserve while one thread fills it."""

    space = None

    def open(self, path, **how):
        file = super().open(path, **how)
        if self.space is not None and path == RESERVE:
            space, self.space = self.space, None
            self.thread = Thread(target=space.release_reserve)
            self.thread.start()
            self.thread.join(0.05)  # the thread must wait until the reserve is filled
        return file


def test_the_reserve_is_not_released_while_another_thread_fills_it():
    disk = ReleasingThread(capacity_bytes=10_000)
    disk.make_directory(ROOT)
    space = disk.space = DiskSpace(disk, ROOT, 4_000)
    space.fill_reserve()
    disk.thread.join()
    assert (space.reserved_bytes, disk.exists(RESERVE), space.is_full) == (0, False, True)
    space.recheck()
    assert (space.reserved_bytes, disk.exists(RESERVE)) == (4_000, True)


def test_a_call_that_runs_out_of_space_is_repeated_with_the_reserve():
    _, space = new_space()
    calls = []

    def call_without_space():
        calls.append(space.reserved_bytes)
        if space.reserved_bytes:
            raise NoSpace("no")
        return "done"

    assert space.call_with_reserve(call_without_space) == "done"
    assert calls == [4_000, 0]

    def always_full():
        raise NoSpace("never enough")

    with pytest.raises(NoSpace, match="never"):
        space.call_with_reserve(always_full)


def test_the_space_of_an_append_includes_its_index_and_batches():
    assert disk_bytes_of_append(1_000, 10, 2) == 1_000 + 80 + 128


def test_free_space_of_a_large_disk_is_queried_rarely():
    disk = SimDisk()
    disk.make_directory(ROOT)
    disk.free_bytes = request_mock = Mock(wraps=disk.free_bytes)
    space = DiskSpace(disk, ROOT, 0)
    for _ in range(3 * UNCHECKED_BYTES_MAX // 1_024):
        space.check_append(1_024)
    assert request_mock.call_count == 3
    disk.capacity_bytes = 10_000
    space.check_append(2_000)
    assert request_mock.call_count == 3
    space.note_shortage(4_000)
    assert space.is_full
    space.check_append(4_000)
    space.check_append(3_000)
    with pytest.raises(NoSpace):
        space.check_append(10_001)
    assert request_mock.call_count == 5, (
        "half of the remaining 6,000 bytes may be written without a query"
    )


def test_the_fill_rate_covers_the_last_day():
    disk, space = new_space(capacity=10_000, reserve=0)

    def rate_at(hour, used):
        disk.capacity_bytes = 10_000 - used
        now_ms = hour * SAMPLE_INTERVAL_MS
        space.note_free_bytes(now_ms)
        return space.filling_bytes_per_day(space.free_bytes(), now_ms)

    assert space.filling_bytes_per_day(10_000, 0) is None
    assert rate_at(0, 0) is None
    assert rate_at(1, 10) == 240
    assert rate_at(2, 10) == 120
    assert rate_at(3, 0) == 0
    # After a day the rate no longer includes the first hours.
    last = DAY_MS // SAMPLE_INTERVAL_MS + 5
    rates = [rate_at(hour, 5_000) for hour in range(4, last)]
    assert rates[0] == 30_000
    assert rates[-1] == 0
