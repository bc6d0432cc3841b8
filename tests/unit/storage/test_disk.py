"""The real and the simulated disk: the same calls, results and typed errors."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.storage.logs import ROOT, new_disk, open_names
from waltz_core.errors import DiskFailed, NoSpace, ReadFailed
from waltz_core.storage.disk import file_system as disk_module
from waltz_core.storage.disk.file_system import RealDisk, create_durably, remove_temporary_files
from waltz_core.storage.disk.page_cache import DROP_STEP_BYTES
from waltz_sim.world.crash import DiskState, RecordingDisk, keep_choices
from waltz_sim.world.simulated_disk import DiskFault, SimDisk


@pytest.fixture(params=["real", "twin"])
def disk_and_directory(request, tmp_path):
    """A disk, and a directory on it."""
    return (RealDisk(), tmp_path) if request.param == "real" else (new_disk(), ROOT)


def test_parts_are_written_one_after_the_other_and_read_up_to_the_end(disk_and_directory):
    disk, directory = disk_and_directory
    file = disk.open(directory / "f", create=True)
    file.pwrite([b"0123", memoryview(b""), memoryview(b"45678")], 2)
    assert file.size() == 11
    assert file.pread(4, 3) == b"1234"
    assert file.pread(100, 9) == b"78"
    assert file.pread(5, 11) == file.pread(5, 500) == b""
    assert file.pread(2, 0) == b"\0\0"
    file.sync()
    file.truncate(5)
    assert file.pread(100, 0) == b"\0\x00012"
    file.truncate(8)
    assert file.pread(100, 4) == b"2\0\0\0"
    file.close()


@pytest.mark.parametrize("bytes_max", [None, 3])
def test_partial_writes_of_the_system_are_continued(tmp_path, monkeypatch, bytes_max):
    whole = os.pwritev
    if bytes_max:
        monkeypatch.setattr(
            os, "pwritev", lambda fd, parts, at: whole(fd, [memoryview(parts[0])[:bytes_max]], at)
        )
    file = RealDisk().open(tmp_path / "f", create=True)
    parts = [bytes([number % 251]) * (number % 5) for number in range(3000)]
    file.pwrite(parts, 7)
    assert file.pread(10_000, 7) == b"".join(parts)
    file.close()


@pytest.fixture
def unreadable_blocks(monkeypatch):
    """The numbers of blocks that the real disk cannot read, and the error for them."""
    found = SimpleNamespace(blocks=set(), number=errno.EIO, is_once=False)
    pread = os.pread

    def failing(fd, size, offset):
        if size and found.blocks & set(range(offset // 4096, -(-(offset + size) // 4096))):
            if found.is_once:
                found.blocks.clear()
            raise OSError(found.number, "no")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(disk_module, "_READ_RETRY_S", 0)
    return found


def test_unreadable_blocks_are_released_from_a_real_file(tmp_path, unreadable_blocks):
    path = tmp_path / "f"
    path.write_bytes(b"a" * 20_000)
    file = RealDisk().open(path)
    unreadable_blocks.blocks |= {1, 3}
    file.discard_unreadable(0, 8_192)  # blocks 0 and 1
    file.discard_unreadable(16_384, 100)  # block 4
    zeros = bytes(4_096)
    assert path.read_bytes() == b"a" * 4_096 + zeros + b"a" * (20_000 - 8_192)
    unreadable_blocks.blocks |= {2, 4}
    file.discard_unreadable(3 * 4_096 + 1, 4_096)  # blocks 3 and 4, where the file ends
    file.discard_unreadable(2 * 4_096 - 1, 1)  # block 1
    assert path.read_bytes() == b"a" * 4_096 + zeros + b"a" * 4_096 + bytes(20_000 - 12_288)
    assert file.size() == 20_000


@pytest.fixture
def file_with_unreadable_block(unreadable_blocks, tmp_path):
    """A file with one block that the disk cannot read."""
    path = tmp_path / "f"
    path.write_bytes(b"a" * 100)
    unreadable_blocks.blocks.add(0)
    return path


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE, errno.EINTR])
def test_an_error_without_a_byte_range_releases_no_block(
    unreadable_blocks, file_with_unreadable_block, number
):
    unreadable_blocks.number = number
    RealDisk().open(file_with_unreadable_block).discard_unreadable(0, 10)
    assert file_with_unreadable_block.read_bytes() == b"a" * 100


def test_a_block_is_kept_if_the_second_attempt_to_read_it_succeeds(
    unreadable_blocks, file_with_unreadable_block
):
    unreadable_blocks.is_once = True
    RealDisk().open(file_with_unreadable_block).discard_unreadable(0, 10)
    assert not unreadable_blocks.blocks
    assert file_with_unreadable_block.read_bytes() == b"a" * 100


def test_a_system_that_cannot_release_blocks_keeps_them(
    unreadable_blocks, file_with_unreadable_block, monkeypatch
):
    file = RealDisk().open(file_with_unreadable_block)
    monkeypatch.setattr(disk_module.ctypes, "CDLL", lambda _: object())
    file.discard_unreadable(0, 10)
    assert file_with_unreadable_block.read_bytes() == b"a" * 100


def test_files_are_created_renamed_and_deleted(disk_and_directory):
    disk, directory = disk_and_directory
    with pytest.raises(DiskFailed, match=r"cannot open .*/f"):
        disk.open(directory / "f")
    disk.open(directory / "f", create=True).close()
    disk.open(directory / "g", create=True).close()
    assert disk.exists(directory / "f")
    assert disk.list(directory) == ["f", "g"]
    disk.rename(directory / "f", directory / "g")
    disk.unlink(directory / "none")
    assert disk.list(directory) == ["g"]
    assert not disk.exists(directory / "f")
    disk.unlink(directory / "g")
    assert disk.list(directory) == []


def test_directories_are_made_with_their_parents(disk_and_directory):
    disk, directory = disk_and_directory
    for _ in range(2):
        disk.make_directory(directory / "a" / "b" / "c")
    assert disk.exists(directory / "a" / "b" / "c")
    assert disk.list(directory / "a") == ["b"]


def test_a_new_file_atomically_replaces_an_older_one(disk_and_directory):
    disk, directory = disk_and_directory
    create_durably(disk, directory, [("f", b"old, and longer")])
    create_durably(disk, directory, [("e", b"1"), ("f", b"new")])
    assert disk.list(directory) == ["e", "f"]
    file = disk.open(directory / "f")
    assert file.pread(100, 0) == b"new"
    file.close()
    disk.open(directory / "g.tmp", create=True).close()
    remove_temporary_files(disk, directory)
    assert disk.list(directory) == ["e", "f"]


def test_a_file_gets_its_name_after_its_content():
    """Rule 4: after a failure at any step, either the old or the new file exists."""
    for step in range(1, 20):
        disk = new_disk()
        create_durably(disk, ROOT, [("a", b"old"), ("b", b"old")])
        disk.plan_fault(disk.step_count + step, DiskFault.IO_ERROR)
        try:
            create_durably(disk, ROOT, [("a", b"new a"), ("b", b"new b")])
        except DiskFailed:
            found = disk.visible_content(ROOT / "a"), disk.visible_content(ROOT / "b")
            assert found in [(b"old", b"old"), (b"new a", b"old"), (b"new a", b"new b")]
        else:
            assert step > 8
            return
    pytest.fail("no call completed without a fault")


def test_only_one_opener_can_lock_a_whole_file(disk_and_directory):
    disk, directory = disk_and_directory
    first = disk.open(directory / "f", create=True)
    second = disk.open(directory / "f")
    assert first.lock_whole_file()
    assert first.lock_whole_file()
    assert not second.lock_whole_file()
    first.close()
    assert second.lock_whole_file()
    second.close()


def test_a_range_that_another_process_has_locked_is_rejected(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(256))
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 128, 0)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "locked\n"
        file = RealDisk().open(path)
        assert not file.lock_range(0, 128)
        assert file.lock_range(128, 10)
        other.communicate("", timeout=TEST_TIMEOUT_S)
    assert file.lock_range(0, 128)
    file.close()


CALLS = {
    "pread": lambda file: file.pread(1, 0),
    "pwritev": lambda file: file.pwrite([b"x"], 0),
    "fdatasync": lambda file: file.sync(),
    "ftruncate": lambda file: file.truncate(1),
    "fstat": lambda file: file.size(),
    "posix_fallocate": lambda file: file.allocate(10),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_of_the_system_names_the_call_and_the_file(tmp_path, monkeypatch, call, number):
    file = RealDisk().open(tmp_path / "f", create=True)

    def fail(*_args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        # A sync without space has lost data: this is more than a full disk.
        full = number in {errno.ENOSPC, errno.EDQUOT} and call not in {"fdatasync", "pread"}
        with pytest.raises(NoSpace if full else DiskFailed, match=f"{tmp_path}/f: ") as caught:
            CALLS[call](file)
        assert isinstance(caught.value, ReadFailed) == (call == "pread")
    file.close()
    file.close()


# ---- descriptors of the real disk


@pytest.fixture
def no_syncs(monkeypatch):
    """Syncs return at once: these tests check which files are open."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


@pytest.mark.usefixtures("no_syncs")
def test_the_number_of_open_descriptors_is_limited(tmp_path):
    disk = RealDisk(8)
    files = [disk.open(tmp_path / str(number), create=True) for number in range(20)]
    rng = Random(1)
    contents = [b""] * len(files)
    for _ in range(80):
        number = rng.randrange(len(files))
        more = rng.randbytes(3)
        files[number].pwrite([more], len(contents[number]))
        files[number].sync()
        contents[number] += more
        other = rng.randrange(len(files))
        assert files[other].pread(100, 0) == contents[other][:100]
        assert files[other].size() == len(contents[other])
        assert len(open_names(tmp_path)) == 8
    for file in files:
        file.close()
    assert open_names(tmp_path) == set()
    with pytest.raises(DiskFailed, match=f"{tmp_path}/0: the file is closed"):
        files[0].size()


def test_the_file_that_was_not_used_for_longest_is_closed_first(tmp_path):
    disk = RealDisk(3)
    first_file, second_file, _ = (disk.open(tmp_path / name, create=True) for name in "123")
    first_file.size()
    disk.open(tmp_path / "4", create=True)
    assert open_names(tmp_path) == {"1", "3", "4"}
    second_file.size()
    assert open_names(tmp_path) == {"1", "2", "4"}


def test_a_file_with_unsynced_writes_stays_open(tmp_path):
    disk = RealDisk(2)
    files = [disk.open(tmp_path / str(number), create=True) for number in range(6)]
    changes = (
        lambda file: file.pwrite([b"x"], 0),
        lambda file: file.truncate(3),
        lambda file: file.allocate(4),
    )
    for change, file in zip(changes, files, strict=False):
        change(file)
    for file in files:
        file.size()
    assert open_names(tmp_path) == {"0", "1", "2"}
    for file in files[:3]:
        file.sync()
    assert open_names(tmp_path) == {"1", "2"}


def test_a_best_effort_file_can_be_closed_with_unsynced_writes(tmp_path):
    disk = RealDisk(2)
    files = [
        disk.open(tmp_path / str(number), create=True, is_best_effort=True) for number in range(6)
    ]
    for turn in range(3):
        for number, file in enumerate(files):
            file.pwrite([bytes([number])], turn)
            assert len(open_names(tmp_path)) == 2
    assert [file.pread(9, 0) for file in files] == [bytes([number] * 3) for number in range(6)]


def test_the_in_memory_disk_rejects_a_sync_of_a_best_effort_file():
    file = new_disk().open(ROOT / "f", create=True, is_best_effort=True)
    file.pwrite([b"x"], 0)
    with pytest.raises(AssertionError, match="best-effort"):
        file.sync()


def test_a_failure_to_open_a_file_again_is_reported_as_a_read_or_write_failure(tmp_path):
    disk = RealDisk(1)
    file = disk.open(tmp_path / "f", create=True)
    file.pwrite([b"some bytes"], 0)
    file.sync()
    disk.open(tmp_path / "other", create=True)
    (tmp_path / "f").rename(tmp_path / "elsewhere")
    with pytest.raises(ReadFailed, match=f"cannot open {tmp_path}/f: No such file"):
        file.pread(4, 0)
    for call in (lambda: file.pwrite([b"x"], 0), file.sync, file.size, lambda: file.truncate(1)):
        with pytest.raises(DiskFailed, match=f"cannot open {tmp_path}/f") as caught:
            call()
        assert not isinstance(caught.value, ReadFailed)
    (tmp_path / "elsewhere").rename(tmp_path / "f")
    assert file.pread(4, 0) == b"some"
    file.close()
    with pytest.raises(DiskFailed, match="is closed") as caught:
        file.pread(4, 0)
    assert not isinstance(caught.value, ReadFailed), "this is a bug of Waltz, not a disk failure"


def test_a_file_closed_during_a_call_keeps_its_descriptor_until_the_end(tmp_path, monkeypatch):
    disk = RealDisk(2)
    file = disk.open(tmp_path / "f", create=True)
    write, numbers = os.pwritev, []

    def close_during_write(fd, parts, offset):
        file.close()  # as another thread does
        numbers.append(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT))
        assert fd not in numbers
        return write(fd, parts, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", close_during_write)
        file.pwrite([b"mine"], 0)
    os.close(numbers[0])
    assert (tmp_path / "f").read_bytes() == b"mine"
    assert open_names(tmp_path) == set()
    with pytest.raises(DiskFailed, match="is closed"):
        file.sync()


def test_read_ahead_uses_one_descriptor_and_is_only_a_hint(tmp_path, monkeypatch):
    sizes = {"empty": 0, "small": 65_536, "large": 1_000_000}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    disk, requests = RealDisk(2), []
    kept = disk.open(tmp_path / "kept", create=True)

    def record_advice(fd, offset, size, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        requests.append((name, offset, size))
        assert open_names(tmp_path) == {"kept", name}
        if name == "empty":
            raise OSError(errno.EINVAL, "no such advice")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fadvise", record_advice)
        disk.prefetch(tmp_path, ["empty", "none", "small", "large"])
    assert requests == [
        ("empty", 0, 0),
        ("small", 0, 0),
        ("large", 0, 4_096),
        ("large", 1_000_000 - 16_384, 16_384),
    ]
    assert open_names(tmp_path) == {"kept"}
    disk.prefetch(tmp_path, list(sizes))
    assert open_names(tmp_path) == {"kept"}
    kept.close()
    assert disk.descriptors._count == 0


def test_an_error_while_closing_a_file_to_make_room_is_ignored(tmp_path, monkeypatch):
    disk = RealDisk(1)
    first = disk.open(tmp_path / "1", create=True)
    close = os.close

    def close_and_fail(fd):
        close(fd)
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close_and_fail)
        second = disk.open(tmp_path / "2", create=True)
        second.pwrite([b"x"], 0)
        assert first.size() == 0
        second.sync()
    assert open_names(tmp_path) == {"2"}


def test_a_file_that_is_locked_stays_open(tmp_path):
    disk = RealDisk(2)
    assert disk.open(tmp_path / "whole", create=True).lock_whole_file()
    assert disk.open(tmp_path / "range", create=True).lock_range(0, 9)
    for number in range(6):
        disk.open(tmp_path / str(number), create=True).size()
    assert open_names(tmp_path) == {"whole", "range"}
    assert not RealDisk().open(tmp_path / "whole").lock_whole_file()


@pytest.mark.usefixtures("no_syncs")
def test_threads_share_the_descriptors(tmp_path):
    disk = RealDisk(3)

    def write(thread):
        files = [disk.open(tmp_path / f"{thread} {number}", create=True) for number in range(5)]
        for turn in range(100):
            file = files[turn % 5]
            file.pwrite([bytes([thread])], turn // 5)
            file.sync()
            assert file.pread(1, turn // 5) == bytes([thread])
        return [file.pread(100, 0) for file in files]

    with ThreadPoolExecutor(4) as pool:
        for thread, contents in enumerate(pool.map(write, range(4))):
            assert contents == [bytes([thread]) * 20] * 5
    assert len(open_names(tmp_path)) == 3


def test_free_space_excludes_reserved_blocks(tmp_path):
    found = os.statvfs(tmp_path)
    free = RealDisk().free_bytes(tmp_path)
    assert 0 < free <= found.f_bfree * found.f_frsize
    with pytest.raises(DiskFailed, match="cannot get the free space of"):
        RealDisk().free_bytes(tmp_path / "none")


def test_errors_for_invalid_names_are_typed(tmp_path):
    disk = RealDisk()
    with pytest.raises(DiskFailed, match="cannot list"):
        disk.list(tmp_path / "none")
    with pytest.raises(DiskFailed, match="cannot rename"):
        disk.rename(tmp_path / "none", tmp_path / "other")
    with pytest.raises(DiskFailed, match="cannot remove"):
        disk.unlink(tmp_path)
    with pytest.raises(DiskFailed, match="cannot sync"):
        disk.sync_directory(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskFailed, match=r"cannot make|cannot get the identity of"):
        disk.make_directory(tmp_path / "file" / "below")


def test_reserved_space_is_allocated(disk_and_directory):
    disk, directory = disk_and_directory
    file = disk.open(directory / "f", create=True)
    file.allocate(5000)
    assert file.size() == 5000
    file.allocate(100)
    assert file.size() == 5000
    file.close()


def test_the_in_memory_disk_has_a_capacity():
    disk = SimDisk(capacity_bytes=100)
    file = disk.open(Path("/f"), create=True)
    file.pwrite([bytes(90)], 0)
    with pytest.raises(NoSpace):
        file.allocate(101)
    with pytest.raises(NoSpace):
        file.pwrite([bytes(20)], 90)
    file.pwrite([b"again"], 0)
    assert file.pread(5, 0) == b"again"


# ---- files that a killed process may have left


def test_making_an_existing_directory_syncs_its_parent_if_readable(tmp_path, monkeypatch):
    disk, synced = RealDisk(), []
    monkeypatch.setattr(disk, "sync_directory", synced.append)
    disk.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path.parent, tmp_path, tmp_path / "a"]
    synced.clear()
    disk.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a"]
    synced.clear()
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    disk.make_directory(tmp_path / "a" / "b")
    assert synced == []


def test_the_last_file_gets_its_name_only_after_the_other_files_are_durable():
    disk = RecordingDisk()
    disk.make_directory(ROOT)
    create_durably(disk, ROOT, [("a", b"1"), ("b", b"2"), ("c", b"3")])
    disk_state, seen = DiskState(), set()
    for change in disk.changes:
        disk_state.apply_change(change)
        for keep in keep_choices(disk_state, Random(1), random_count=30):
            names = {path.name for path in disk_state.contents_after_crash(keep).files}
            seen.add(frozenset(names & {"a", "b", "c"}))
            assert "c" not in names or {"a", "b"} <= names
    assert {frozenset("a"), frozenset("b"), frozenset("abc")} <= seen


# ---- the page cache


MIB = 1024 * 1024


@pytest.mark.parametrize("can_do_it", [True, False])
def test_a_real_file_releases_all_pages_but_the_newest_and_loses_no_data(
    tmp_path, monkeypatch, can_do_it
):
    hints = []

    def advise(_, start, size, advice):
        hints.append((start + size, advice))
        if not can_do_it:
            raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    file = RealDisk(page_cache_bytes_max=4 * MIB).open(tmp_path / "f", create=True)
    piece = os.urandom(MIB)
    for number in range(8):
        file.pwrite([piece[:10], piece[10:]] if number % 2 else [piece], number * MIB)
        assert len(hints) == max(0, number - 4)  # nothing before it is synced
        file.sync()
    assert hints == [(number * MIB, os.POSIX_FADV_DONTNEED) for number in range(1, 5)]
    assert file.pread(8 * MIB, 0) == 8 * piece
    file.close()


@pytest.mark.parametrize("has_cut", [False, True])
def test_the_system_drops_old_pages_from_the_page_cache(tmp_path, has_cut):
    """The pieces do not match the folios. After a truncation, the newest part is at the new end."""
    kept, size = MIB, 1_088_001
    file = RealDisk(page_cache_bytes_max=kept).open(tmp_path / "f", create=True)
    for count in (16, 14) if has_cut else (16,):
        for number in range(file.size() // size, count):
            file.pwrite([os.urandom(size)], number * size)
            file.sync()
        in_memory = pages_in_memory(tmp_path / "f")
        if has_cut:
            file.truncate(size)
            file.sync()
    file.close()
    if all(in_memory):
        pytest.skip("a file system in memory")
    assert in_memory[-1]
    # Two parts are not released: a part smaller than a step, and a folio in which a step ends.
    assert sum(in_memory) * mmap.PAGESIZE <= kept + DROP_STEP_BYTES + 2 * MIB + size


def test_dropped_pages_are_read_from_the_disk_again(tmp_path):
    file = RealDisk().open(tmp_path / "f", create=True)
    content = os.urandom(8 * mmap.PAGESIZE)
    file.pwrite([content], 0)
    file.sync()
    file.pwrite([b"z"], 4 * MIB)  # unsynced pages are written first, or kept
    file.drop_cached(0, 5 * MIB)
    in_memory = pages_in_memory(tmp_path / "f")[:8]
    assert file.pread(len(content), 0) == content
    assert file.pread(2, 4 * MIB) == b"z"
    file.close()
    if all(in_memory):
        pytest.skip("a file system in memory")
    assert not any(in_memory)


def test_each_piece_of_a_sequential_read_is_read_from_the_disk(tmp_path):
    """The page cache has the file in folios, which may be larger than a piece."""
    file, written, piece = RealDisk().open(tmp_path / "f", create=True), 2 * MIB, MIB // 4
    size = 3 * written
    for offset in range(100, size, written):
        file.pwrite([os.urandom(written)], offset)
        file.sync()
    before = bytes_read()
    for offset in (0, *range(144, size, piece)):  # like the pieces of a segment, after its header
        file.drop_cached(offset, piece)
        file.pread(piece, offset)
    from_disk = bytes_read() - before
    file.drop_cached(0, 2 * size)
    in_memory = pages_in_memory(tmp_path / "f")
    file.close()
    if all(in_memory):
        pytest.skip("a file system in memory")
    assert from_disk >= size


def bytes_read():
    """Return the bytes that this process has read from disks."""
    (line,) = [each for each in Path("/proc/self/io").read_text().splitlines() if "read_b" in each]
    return int(line.split()[1])


def pages_in_memory(path):
    """Return for each page whether it is in memory, without a read that would fetch it."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), found)
        del first  # otherwise the mapping could not be closed
    assert not failed
    return [bool(each & 1) for each in found]
