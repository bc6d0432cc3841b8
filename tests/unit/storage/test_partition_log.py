"""One partition's log on a disk that crashes: exactly the acknowledged records remain."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.storage.logs import KEY, make_entries
from tests.unit.storage.logs import make_run as make_records
from waltz_core.errors import (
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    DataLoss,
    DiskFailed,
    NoSpace,
    SessionFenced,
)
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, NO_SESSION
from waltz_core.storage.disk.file_system import RealDisk, RealFile
from waltz_core.storage.files.control_file import ControlFile
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES, IdRange
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog

NONCE = b"n" * 16


class PowerLost(Exception):
    pass


class CrashDisk(RealDisk):
    """A real disk that tracks synced data, can lose unsynced data, and fails on demand."""

    def __init__(self):
        super().__init__()
        self.synced = {}
        self.failures = {}
        self.steps_left = None  # the number of changes until the power loss

    def step(self):
        if self.steps_left is not None:
            if self.steps_left == 0:
                raise PowerLost
            self.steps_left -= 1

    def sync_directory(self, directory):
        self.step()
        super().sync_directory(directory)

    def open(self, path, *, create=False, is_best_effort=False):
        new = not path.exists()
        how = {"create": create, "is_best_effort": is_best_effort}
        file = CrashFile(path, descriptors=self.descriptors, **how)
        file.disk = self
        if new:
            self.synced[path] = 0
        self.synced.setdefault(path, path.stat().st_size)
        return file

    def rename(self, source, target):
        self.step()
        super().rename(source, target)
        self.synced[target] = self.synced.pop(source)

    def unlink(self, path):
        self.step()
        super().unlink(path)
        self.synced.pop(path, None)

    def lose_unsynced(self, rng):
        """Truncate each file between its synced and its written end; corrupt some of it."""
        for path, size in sorted(self.synced.items()):
            written = path.stat().st_size
            if written <= size:
                continue
            keep = rng.choice([size, written, rng.randint(size, written)])
            with path.open("r+b") as file:
                file.truncate(keep)
                if keep > size and rng.random() < 0.3:
                    file.seek(rng.randint(size, keep - 1))
                    file.write(bytes(keep - file.tell()))
            self.synced[path] = keep

    def raise_failure(self, call, path):
        error = self.failures.get((call, path.suffix))
        if error is not None:
            raise error(f"{call} {path}")


class CrashFile(RealFile):
    def pwrite(self, parts, offset):
        self.disk.raise_failure("write", self._path)
        self.disk.step()
        super().pwrite(parts, offset)

    def sync(self):
        self.disk.raise_failure("sync", self._path)
        self.disk.step()
        super().sync()
        self.disk.synced[self._path] = self.size()

    def truncate(self, size):
        self.disk.raise_failure("truncate", self._path)
        self.disk.step()
        super().truncate(size)
        self.disk.synced[self._path] = min(size, self.disk.synced.get(self._path, 0))


class World:
    def __init__(self, directory, segment_bytes_max=2000, *, trust_fsync=True):
        self.directory = directory
        self.disk = CrashDisk()
        self.clock = SimpleNamespace(now=1_000)
        self.settings = LogSettings(KEY, segment_bytes_max, lambda: self.clock.now, trust_fsync)
        self.log = None
        self.control = None
        self.open()

    def open(self):
        self.directory.mkdir(exist_ok=True)
        self.control = ControlFile.open(self.disk, self.directory, KEY, 1, 0)
        try:
            self.log = PartitionLog.open(
                self.disk, self.directory / "0", 0, self.control, self.settings
            )
        except BaseException:
            self.control.close()
            raise
        return self.log

    def crash(self, rng=None):
        self.disk.steps_left = None
        self.log.abandon()
        self.control.close()
        self.disk.failures.clear()
        if rng is not None:
            self.disk.lose_unsynced(rng)
        return self.open()

    def close(self):
        self.log.close()
        self.control.close()

    def append(self, counts, session=1, size=20, *, sync=True, seed=0):
        first = self.log.max_id + 1
        records, lengths = make_records(first, [size] * sum(counts), seed)
        entries = make_entries(records, lengths, first, self.log.chain, session, counts)
        self.log.append(session, first, lengths, records, self.log.chain, entries)
        if sync:
            self.log.sync()
        return records

    def all_records(self):
        if self.log.max_id < 0:
            return b""
        parts = []
        next_id = 0
        while next_id <= self.log.max_id:
            read = self.log.read_range(next_id, self.log.max_id, 1000, whole_batches=False)
            parts.append(read.records)
            next_id += len(read.lengths)
        return b"".join(parts)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.log.prepare(1, NONCE)
    yield world
    world.log.abandon()
    world.control.close()


# ---- sessions


def test_a_promise_fences_older_sessions_and_other_nonces_also_after_a_restart(world):
    world.log.prepare(5, NONCE)
    for _ in range(2):
        with pytest.raises(SessionFenced) as caught:
            world.log.prepare(4, NONCE)
        assert caught.value.promised == 5
        with pytest.raises(SessionFenced):
            world.log.prepare(5, b"m" * 16)
        with pytest.raises(SessionFenced):
            world.append([1], session=4)
        assert world.log.prepare(5, NONCE).synced_max == BEFORE_FIRST
        world.crash()


def test_a_low_water_mark_that_is_not_the_end_of_the_synced_log_is_rejected(world):
    world.append([3])
    chain = world.log.chain
    for mark, wrong in ((1, chain), (3, chain), (2, GENESIS_CHAIN)):
        with pytest.raises(BadRequest):
            world.log.set_low_water_mark(1, mark, wrong)
    world.append([1], sync=False)
    with pytest.raises(BadRequest):
        world.log.set_low_water_mark(1, 3, world.log.chain)
    world.log.sync()
    world.log.set_low_water_mark(1, 3, world.log.chain)
    state = world.log.state()
    assert (state.last_session, state.low_water_mark, state.mark_confirmed) == (1, 3, False)
    assert world.control.info(0)[:3] == (1, 3, 3)


def test_only_a_provisional_mark_may_be_lowered(world):
    world.append([3, 3])
    world.log.set_low_water_mark(1, 5, world.log.chain)
    world.log.prepare(2, NONCE)
    assert world.log.truncate(2, 2, 2, world.log.chain_at(2)) == (2, world.log.chain)
    # The mark was removed with its records. The mark's session still counts as never opened.
    assert (world.log.state().mark_confirmed, world.log.state().engaged_session) == (True, -1)
    world.log.set_low_water_mark(2, 2, world.log.chain)
    assert world.log.state().engaged_session == -1
    world.log.engage(2, 2)
    assert world.log.state().engaged_session == 2
    assert world.log.is_engaged(2)
    assert not world.log.is_engaged(1)
    world.log.prepare(3, NONCE)
    assert not world.log.is_engaged(2)
    with pytest.raises(DataLoss):
        world.log.truncate(3, 1, BEFORE_FIRST, GENESIS_CHAIN)
    assert world.log.max_id == 2
    # A session that set its mark but never opened does not undo the earlier mark.
    world.log.set_low_water_mark(3, 2, world.log.chain)
    world.crash()
    state = world.log.state()
    assert (state.last_session, state.mark_confirmed, state.engaged_session) == (3, False, 2)


def test_only_the_first_append_of_a_session_confirms_its_mark(world):
    world.append([2])
    world.log.set_low_water_mark(1, 1, world.log.chain)
    world.log.prepare(2, NONCE)
    world.append([1], session=2)
    assert not world.log.state().mark_confirmed
    assert world.log.state().engaged_session == -1
    world.log.set_low_water_mark(2, 2, world.log.chain)
    world.append([1], session=2)
    world.crash()
    state = world.log.state()
    assert (state.mark_confirmed, state.low_water_mark, state.last_session) == (True, 2, 2)
    assert state.engaged_session == 2


# ---- appending


def test_segments_roll_over_at_the_record_that_crosses_the_limit(world):
    world.append([200], size=53)  # 93 bytes each
    sizes = [segment.size_bytes for segment in world.log._files.segments.all]
    assert sizes == [128 + 93 * 21] * 9 + [128 + 93 * 11]
    assert [segment.first for segment in world.log._files.segments.all] == list(range(0, 200, 21))
    assert world.log.slot.acked.transaction_id == BEFORE_FIRST  # the batch was incomplete
    world.append([1])
    world.crash()
    assert world.log.max_id == 200
    assert not world.log.suspect


def flip_bit(world, transaction_id, at=38):
    log = world.log
    position = log._files.segments._index_of(transaction_id)
    segment = log._files.segments.all[position]
    offset = int(segment.bounds(transaction_id, transaction_id)[0])
    path = world.directory / "0" / f"{segment.first:019d}.seg"
    with path.open("r+b") as file:
        file.seek(offset + at)
        byte = file.read(1)
        file.seek(offset + at)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_read_detects_a_corrupt_record_which_is_then_skipped_and_repaired(world):
    written = world.append([3, 4] * 20)
    flip_bit(world, 50)
    assert len(world.log.read_range(40, 60, 1 << 20, whole_batches=False).lengths) == 10
    assert world.log.damaged == (IdRange(50, 50),)
    with pytest.raises(ChecksumMismatch):
        world.log.read_range(50, 60, 1 << 20, whole_batches=False)
    with pytest.raises(ChecksumMismatch):
        world.log.read_range(49, 60, 1 << 20, whole_batches=True)
    assert world.log.read_range(42, 60, 1 << 20, whole_batches=True).entries[-1].last == 48
    assert world.log.read_range(51, 60, 1 << 20, whole_batches=False).first == 51
    world.crash()
    assert world.log.damaged == (IdRange(50, 50),)
    assert not world.log.suspect
    wrong, lengths = make_records(50, [20], seed=9)
    with pytest.raises(ChecksumMismatch):
        world.log.repair(50, lengths, wrong)
    world.log.repair(50, lengths, written[50 * 60 : 51 * 60])
    assert world.log.damaged == ()
    assert world.all_records() == written


def test_lost_records_next_to_a_repaired_record_are_found_after_a_crash(world):
    """A repair may release the block, together with other records in it."""
    written = world.append([3, 4] * 20)
    flip_bit(world, 130, 44)
    world.log.read_range(125, 131, 1 << 20, whole_batches=False)
    world.log.repair(130, np.array([60]), written[130 * 60 : 131 * 60])
    path = max((world.directory / "0").glob("*.seg"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 120)
        file.write(bytes(120))
    world.crash()
    assert world.log.max_id == 139
    assert world.log.damaged == (IdRange(138, 139),)


def test_repairs_are_rejected_after_a_failed_write_in_the_session(world):
    """The acked marker cannot move any more, so it would not show the loss of later records."""
    written = world.append([3, 4] * 20)
    flip_bit(world, 130, 44)
    world.log.read_range(125, 131, 1 << 20, whole_batches=False)
    world.disk.failures["sync", ".seg"] = DiskFailed
    with pytest.raises(DiskFailed):
        world.append([1])
    world.disk.failures.clear()
    with pytest.raises(BadRequest, match="a write has failed in this store session"):
        world.log.repair(130, np.array([60]), written[130 * 60 : 131 * 60])
    assert world.log.damaged == (IdRange(130, 130),)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_close_marks_the_end_as_clean_unless_a_write_has_failed(world, has_failed):
    world.append([5])
    if has_failed:
        world.disk.failures["sync", ".seg"] = DiskFailed
        with pytest.raises(DiskFailed):
            world.append([3])
        world.disk.failures.clear()
    world.close()
    world.settings = replace(world.settings, trust_fsync=False)
    assert world.open().suspect == has_failed
    assert world.log.max_id == 4


# ---- after a crash


def test_an_unsynced_batch_is_kept_or_truncated_completely(world):
    world.append([4])
    world.append([4, 4], sync=False)
    path = world.directory / "0" / f"{0:019d}.seg"
    world.log.abandon()
    world.control.close()
    with path.open("r+b") as file:
        file.truncate(128 + 60 * 10 + 7)
    world.open()
    assert (world.log.max_id, world.log.suspect) == (7, False)
    assert path.stat().st_size == 128 + 60 * 8


def overwrite_record(world, transaction_id):
    """Write another valid record in place of one, as a misdirected write would."""
    other, _ = make_records(transaction_id, [20], seed=3)
    with (world.directory / "0" / f"{0:019d}.seg").open("r+b") as file:
        file.seek(128 + 60 * transaction_id)
        file.write(other)


@pytest.mark.parametrize(
    ("change", "damaged", "suspect"), [(flip_bit, ((5, 5),), False), (overwrite_record, (), True)]
)
def test_corruption_of_a_synced_record_above_the_marker_is_damage(world, change, damaged, suspect):
    """Another record at this position has a valid checksum, but does not match its batch."""
    for _ in range(3):
        world.append([4])
    change(world, 5)
    assert world.log.slot.acked.transaction_id == BEFORE_FIRST
    world.crash()
    assert (world.log.max_id, world.log.damaged, world.log.suspect) == (11, damaged, suspect)


@pytest.mark.parametrize("change", [flip_bit, overwrite_record])
def test_a_wrong_unsynced_record_and_the_intact_records_after_it_are_truncated(world, change):
    world.append([4])
    world.append([4], sync=False)
    world.append([4], sync=False)
    change(world, 5)
    world.crash()
    assert (world.log.max_id, world.log.damaged, world.log.suspect) == (3, (), False)


def test_a_log_that_ends_below_its_marker_is_suspect_until_a_mark_is_set(world):
    world.append([4])
    world.clock.now += 1000
    world.append([4])
    assert world.log.slot.acked.transaction_id == 7
    world.log.abandon()
    world.control.close()
    with (world.directory / "0" / f"{0:019d}.seg").open("r+b") as file:
        file.truncate(128 + 60 * 6)
    world.open()
    assert world.log.suspect
    assert world.log.max_id == 5
    world.crash()
    assert world.log.suspect
    world.log.prepare(2, NONCE)
    world.log.truncate(2, 3, 3, world.log.chain_at(3))
    world.append([2], session=2)
    world.log.set_low_water_mark(2, 5, world.log.chain)
    assert not world.log.suspect
    world.crash()
    assert not world.log.suspect


def test_corruption_below_the_marker_is_damage_and_never_truncated(world):
    written = world.append([20]) + world.append([20])
    world.clock.now += 1000
    world.append([1])
    flip_bit(world, 40)
    world.crash()
    assert world.log.max_id == 40
    assert world.log.damaged == (IdRange(40, 40),)
    flip_bit(world, 3, at=30)
    at = 0
    while at <= world.log.max_id:
        at = world.log.verify(at, 1 << 20)
    assert world.log.damaged == (IdRange(3, 3), IdRange(40, 40))
    assert world.log.read_range(4, 39, 1 << 20, whole_batches=False).records == written[240:2400]


@pytest.mark.parametrize(
    ("names", "suspect"), [("*.idx", False), ("*.chn", True), (f"{32:019d}.chn", True)]
)
def test_missing_index_files_are_rebuilt(world, names, suspect):
    written = world.append([7, 8] * 10)
    chain = world.log.chain
    found = list((world.directory / "0").glob(names))
    assert found
    for path in found:
        path.unlink()
    world.crash()
    assert world.log.suspect == suspect  # a lost .chn has bounds and sessions of batches
    assert world.all_records() == written
    read = world.log.read_range(0, 149, 1 << 20, whole_batches=True)
    assert read.records == written
    assert (world.log.chain == chain) == (names != "*.chn")
    assert [entry.first for entry in read.entries] == [
        0,
        *(entry.last + 1 for entry in read.entries[:-1]),
    ]
    world.log.prepare(2, NONCE)
    world.append([3], session=2)
    world.log.set_low_water_mark(2, 152, world.log.chain)
    world.crash()
    assert (world.log.max_id, world.log.suspect) == (152, False)


def test_a_missing_segment_in_the_middle_is_damage_and_can_be_filled(world):
    written = world.append([5] * 40)
    firsts = [segment.first for segment in world.log._files.segments.all]
    for suffix in ("seg", "idx", "chn"):
        (world.directory / "0" / f"{firsts[2]:019d}.{suffix}").unlink()
    world.crash()
    hole = IdRange(firsts[2], firsts[3] - 1)
    assert world.log.damaged == (hole,)
    assert world.log.max_id == 199
    at = hole.first
    while at <= hole.last:
        count = min(7, hole.last - at + 1)
        part = written[60 * at : 60 * (at + count)]
        world.log.repair(at, np.full(count, 60), part)
        at += count
    assert world.log.damaged == ()
    assert world.all_records() == written


def test_after_a_torn_slot_each_session_that_may_have_been_promised_is_rejected(world):
    world.append([2])
    world.log.prepare(7, NONCE)
    position = world.log._files.slots._position
    world.log.abandon()
    world.control.close()
    with (world.directory / "0" / "waltz-x.ctl").open("r+b") as file:
        file.seek(4096 * position + 100)
        file.write(b"torn")
    world.open()
    assert world.log.suspect
    with pytest.raises(SessionFenced):
        world.log.prepare(world.log.promised, NONCE)
    with (world.directory / "0" / "waltz-x.ctl").open("r+b") as file:
        file.write(bytes(8192))
    world.log.abandon()
    world.control.close()
    with pytest.raises(BadFormat):
        world.open()
    (world.directory / "0" / "waltz-x.ctl").unlink()
    with pytest.raises(BadFormat):
        world.open()
    for path in (world.directory / "0").iterdir():
        path.unlink()
    world.open()


def run_0_13(world, session, mark):
    """Simulate a session of 0.13 that appends two records from ID 5 on; return them."""
    more, _ = make_records(5, [20, 20])
    control = ControlFile.open(world.disk, world.directory, KEY, 1, 0)
    control.set_marks(0, session, mark)
    control.close()
    directory = world.directory / "0"
    with (directory / f"{0:019d}.seg").open("ab") as file:
        file.write(more)
    with (directory / f"{0:019d}.idx").open("ab") as file:
        file.write(np.array([428, 488], dtype=">i8").tobytes())
    return more


def test_engage_requires_the_mark_of_the_same_session(world):
    world.append([2, 3])
    with pytest.raises(
        BadRequest, match="expected low-water mark -1 of session -1, found 4 of session 1"
    ):
        world.log.engage(1, 4)
    chain = world.log.chain
    world.log.set_low_water_mark(1, 4, chain)
    with pytest.raises(
        BadRequest, match="expected low-water mark 4 of session 1, found 1 of session 1"
    ):
        world.log.engage(1, 1)
    world.log.prepare(2, NONCE)
    with pytest.raises(
        BadRequest, match="expected low-water mark 4 of session 1, found 4 of session 2"
    ):
        world.log.engage(2, 4)
    with pytest.raises(SessionFenced):
        world.log.engage(1, 4)
    assert not world.log.state().mark_confirmed
    world.log.set_low_water_mark(2, 4, chain)
    world.log.engage(2, 4)
    assert world.log.state().mark_confirmed


def test_records_written_by_0_13_between_two_runs_are_adopted(world):
    written = world.append([2, 3])
    world.log.set_low_water_mark(1, 4, world.log.chain)
    world.log.engage(1, 4)
    ours = world.log.lineage(0, 4)[1]
    world.close()
    more = run_0_13(world, 3, 4)
    world.open()
    assert (world.log.max_id, world.log.suspect) == (6, False)
    assert (world.log.promised, world.log.last_session) == (3, 3)
    assert world.all_records() == written + more
    world.crash()
    assert (world.log.max_id, world.log.suspect) == (6, False)
    # The same holds the second time: only adopted records get new batches.
    *before, adopted = world.log.lineage(0, 6)[1]
    assert tuple(before) == ours
    assert (adopted.first, adopted.last, adopted.session_id) == (5, 6, NO_SESSION)


def test_an_earlier_session_of_0_13_does_not_replace_a_later_one(world):
    written = world.append([5])
    world.log.set_low_water_mark(1, 4, world.log.chain)
    world.log.engage(1, 4)
    world.close()
    more = run_0_13(world, 0, 2)
    world.open()
    assert world.all_records() == written + more
    assert (world.log.promised, world.log.last_session) == (1, 1)
    assert world.log.state().low_water_mark == 4


@pytest.mark.parametrize("is_opened", [False, True])
def test_records_of_0_13_are_adopted_after_an_incomplete_mark(world, monkeypatch, is_opened):
    """The slot refers to a control structure that was not written. Then 0.13 writes a structure."""
    written = world.append([5])
    monkeypatch.setattr(world.control, "set_marks", lambda *_: (_ for _ in ()).throw(PowerLost))
    with pytest.raises(PowerLost):
        world.log.set_low_water_mark(1, 4, world.log.chain)
    if is_opened:
        world.crash()
        world.close()
    else:
        world.log.abandon()
        world.control.close()
    more = run_0_13(world, 3, 4)
    world.open()
    assert (world.log.max_id, world.log.suspect) == (6, False)
    assert (world.log.promised, world.log.last_session) == (3, 3)
    assert world.all_records() == written + more


def test_a_clock_that_is_set_back_does_not_stop_the_acked_marker(world):
    world.append([2])
    world.clock.now -= 600
    world.append([2])
    assert world.log.slot.acked.transaction_id == -1
    world.clock.now -= 400
    world.append([2])
    assert world.log.slot.acked.transaction_id == 5


# ---- a disk that fails


def test_an_append_on_a_full_disk_does_not_change_the_log(world):
    written = world.append([5])
    for suffix in (".seg", ".idx", ".chn"):
        world.disk.failures[("write", suffix)] = NoSpace
        with pytest.raises(NoSpace):
            world.append([60], size=53)
        del world.disk.failures[("write", suffix)]
        assert world.log.max_id == 4
    assert world.all_records() == written
    written += world.append([5])
    world.crash()
    assert world.all_records() == written
    assert not world.log.suspect


@pytest.mark.parametrize(
    "what", [("write", ".seg"), ("write", ".chn"), ("sync", ".seg"), ("sync", ".chn")]
)
def test_after_a_failed_write_or_sync_the_log_continues_in_a_new_file(world, what):
    written = world.append([5])
    world.disk.failures[what] = DiskFailed
    with pytest.raises(DiskFailed):
        world.append([3])
    world.disk.failures.clear()
    with pytest.raises(DiskFailed):
        world.append([1])
    with pytest.raises(DiskFailed):
        world.log.sync()
    assert world.log.failure_count == 1
    state = world.log.prepare(2, NONCE)
    assert (state.synced_max, state.suspect) == (4, False)
    written += world.append([4], session=2)
    assert [one.first for one in world.log._files.segments.all] == [0, 5]
    world.crash()
    assert world.all_records() == written
    assert not world.log.suspect


def test_a_damaged_batch_does_not_prevent_a_new_segment(world):
    """After an error here the log would have a part of the next batch, without its entry.

    The log's end would be reported with the chain of an earlier batch.
    """
    world.append([20])
    path = world.directory / "0" / f"{0:019d}.chn"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    world.append([30])
    assert [one.first for one in world.log._files.segments.all] == [0, 32]
    assert world.log.slot.acked.transaction_id == 19
    state = world.log.prepare(2, NONCE)
    assert (state.synced_max, state.chain) == (49, world.log.chain_at(49))


def test_a_failed_truncation_makes_the_replica_suspect(world):
    world.append([5])
    for what in ("sync", "truncate"):
        world.disk.failures[(what, ".seg")] = DiskFailed
    with pytest.raises(DiskFailed, match="cannot be truncated"):
        world.append([3])
    world.crash()
    assert world.log.suspect


def test_after_a_failed_slot_write_a_log_rejects_requests_until_it_is_reopened(world):
    written = world.append([5])
    world.disk.failures[("sync", ".ctl")] = DiskFailed
    with pytest.raises(DiskFailed):
        world.log.prepare(2, NONCE)
    world.disk.failures.clear()
    with pytest.raises(DiskFailed):
        world.log.prepare(3, NONCE)
    with pytest.raises(DiskFailed):
        world.append([1])
    world.crash()
    assert world.all_records() == written
    assert world.log.prepare(3, NONCE).synced_max == 4


def test_the_acked_marker_does_not_move_in_a_session_after_a_failed_index_sync(world):
    world.append([5])
    marker = world.log.slot.acked
    world.disk.failures[("sync", ".idx")] = DiskFailed
    with pytest.raises(DiskFailed):
        world.log.mark_acked()
    world.disk.failures.clear()  # The next sync of the file reports a false success.
    world.log.mark_acked()
    assert world.log.slot.acked == marker
    world.log.prepare(2, NONCE)
    world.log.mark_acked()
    assert world.log.slot.acked.transaction_id == 4


# ---- an index that is wrong where the log is cut


def spoil_offset(world, transaction_id):
    """Make the index of the first segment state that a record begins at 0."""
    path = world.directory / "0" / "0000000000000000000.idx"
    with path.open("r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + 8 * transaction_id)
        file.write(bytes(8))


def test_a_truncation_without_effect_syncs_the_log(world):
    world.append([2], sync=False)
    assert world.log.truncate(1, 1, 1, world.log.chain) == (1, world.log.chain)
    assert world.log.synced_max == 1


def test_a_truncation_stopped_by_a_wrong_index_must_be_completed_before_a_new_session(world):
    written = world.append([1] * 10, size=20)
    record_bytes = len(written) // 10
    spoil_offset(world, 6)
    world.log.prepare(2, NONCE)
    base = world.log.chain_at(5)
    with pytest.raises(DiskFailed, match=r"cannot truncate the log: .* wrong from record 6 on"):
        world.log.truncate(2, 5, 5, base)
    # The intent is durable. A session that kept all ten records would lose them at the next
    # opening.
    with pytest.raises(DiskFailed, match="until it is opened again"):
        world.log.prepare(3, NONCE)
    world.crash()
    assert world.all_records() == written[: 6 * record_bytes]
    assert world.log.slot.truncate is None


FULL = [("write", ".ctl"), ("truncate", ".seg"), ("truncate", ".idx"), ("write", ".chn")]


@pytest.mark.parametrize("what", FULL, ids=str)
def test_a_truncation_that_ran_out_of_space_must_be_completed_before_other_changes(world, what):
    world.append([4, 4], size=20)
    written = world.all_records()
    world.log.prepare(2, NONCE)
    cut = (2, 5, 3, world.log.chain_at(3))
    world.disk.failures[what] = NoSpace
    with pytest.raises(NoSpace):
        world.log.truncate(*cut)
    world.disk.failures.clear()
    has_begun = world.log.slot.truncate is not None
    assert has_begun == (what != FULL[0])
    if has_begun:
        with pytest.raises(DiskFailed):
            world.append([1], session=2)
        with pytest.raises(DiskFailed, match="until it is opened again"):
            world.log.prepare(3, NONCE)
    assert world.log.truncate(*cut) == (5, world.log.chain)
    assert (world.log.slot.truncate, world.log.is_broken) == (None, False)
    kept = written[: len(written) * 6 // 8]
    assert world.all_records() == kept
    kept += world.append([2], session=2)
    world.crash()
    assert world.all_records() == kept
    assert not world.log.suspect


def test_only_the_same_request_finishes_a_truncation_that_ran_out_of_space(world):
    world.append([4, 4], size=20)
    world.log.prepare(2, NONCE)
    chain = world.log.chain_at(3)
    world.disk.failures[("write", ".chn")] = NoSpace
    with pytest.raises(NoSpace):
        world.log.truncate(2, 5, 3, chain)
    world.disk.failures.clear()
    for session, last in ((1, 5), (2, 4), (2, 6)):
        with pytest.raises(DiskFailed, match="a write failed in this store session"):
            world.log.truncate(session, last, 3, chain)
    world.log.mark_acked()  # the acked marker does not move
    world.crash()
    assert (world.log.max_id, world.log.slot.truncate, world.log.suspect) == (5, None, False)


def test_a_truncation_that_fails_twice_for_space_waits_for_a_reopening(world):
    world.append([4, 4], size=20)
    world.log.prepare(2, NONCE)
    cut = (2, 5, 3, world.log.chain_at(3))
    world.disk.failures[("write", ".chn")] = NoSpace
    with pytest.raises(NoSpace):
        world.log.truncate(*cut)
    with pytest.raises(DiskFailed, match="partition 0: cannot truncate"):
        world.log.truncate(*cut)
    world.disk.failures.clear()
    with pytest.raises(DiskFailed):
        world.log.truncate(*cut)
    world.crash()
    assert (world.log.max_id, world.log.slot.truncate) == (5, None)


def test_records_of_a_failed_sync_are_ignored_if_the_truncation_fails(world):
    world.append([1] * 5)
    records, lengths = make_records(5, [20] * 3)
    entries = make_entries(records, lengths, 5, world.log.chain, 1, [3])
    world.log.append(1, 5, lengths, records, world.log.chain, entries)
    spoil_offset(world, 5)
    world.disk.failures[("sync", ".seg")] = DiskFailed
    with pytest.raises(DiskFailed, match="cannot be truncated"):
        world.log.sync()
    world.disk.failures.clear()
    with pytest.raises(DiskFailed, match="until it is opened again"):
        world.log.prepare(2, NONCE)
    assert world.log.synced_max == 4
