"""A log with records of 0.13: a truncation by the owner drops batches but keeps records."""

import dataclasses
import os
from unittest.mock import Mock

import numpy as np
import pytest

from tests.crash import layout
from tests.crash.test_adopted_crash import other_batches
from tests.unit.storage.test_service import KEY, FailingDisk
from waltz_core.errors import BadRequest, DataLoss, DiskFailed, NoSpace
from waltz_core.records import raw_records
from waltz_core.records.record import (
    BEFORE_FIRST,
    FRAME_BYTES_MAX,
    GENESIS_CHAIN,
    NO_SESSION,
    LineageEntry,
    next_chain,
)
from waltz_core.storage.files.batch_checks import check_chain
from waltz_core.storage.files.control_file import ControlFile, SlotFile
from waltz_core.storage.files.format import (
    NO_NONCE,
    UNBATCHED_CHAIN,
    AckedMarker,
    IdRange,
    ProvisionalMark,
)
from waltz_core.storage.log import truncation
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog

NONCE = b"n" * 16


def records(first, count, data=b"data"):
    return [layout.record(number, data) for number in range(first, first + count)]


def all_records(last):
    return b"".join(records(0, last + 1))


class World:
    """A directory to which 0.13 and this version write alternately."""

    def __init__(self, directory):
        self.directory = directory
        self.disk = FailingDisk()
        self.open()

    def open(self):
        self.control = ControlFile.open(self.disk, self.directory, KEY, 1, 0)
        settings = LogSettings(KEY, 4_000, lambda: 1)
        self.log = PartitionLog.open(self.disk, self.directory / "0", 0, self.control, settings)

    def stop(self):
        self.log.close()
        self.control.close()

    def crash(self):
        self.log.abandon()
        self.control.close()
        self.open()

    def run_0_13(self, session, mark, added, *, cut_to=None):
        """Simulate 0.13: open a session, append records at the end, and start again.

        With `cut_to`, it first truncates the log after that ID.
        """
        self.log.close()
        self.control.set_marks(0, session, mark, min(mark, self.log.max_id))
        self.control.close()
        directory = self.directory / "0"
        segment = max(directory.glob("*.seg"))
        index = segment.with_suffix(".idx")
        if cut_to is not None:
            places = np.frombuffer(index.read_bytes()[128:], dtype=">i8")
            os.truncate(segment, int(places[cut_to + 1]))
            os.truncate(index, 128 + 8 * (cut_to + 1))
        with segment.open("ab") as seg, index.open("ab") as idx:
            for one in added:
                idx.write(np.array([seg.tell()], dtype=">i8").tobytes())
                seg.write(one)
        self.open()

    def write_slot(self, **fields):
        """Change the slot of a log that is closed, and open it again."""
        self.stop()
        slots = SlotFile.open(self.disk, self.directory / "0", 0)
        slots.write(dataclasses.replace(slots.slot, **fields))
        slots.close()
        self.open()

    def content(self):
        return self.log.read_range(0, self.log.max_id, 1 << 20, whole_batches=False).records

    def bounds(self):
        return [(entry.first, entry.last) for entry in self.log.lineage(0, self.log.max_id)[1]]


@pytest.fixture
def empty_world(tmp_path):
    world = World(tmp_path)
    yield world
    world.log.abandon()
    world.control.close()


@pytest.fixture
def world(empty_world):
    """Ten records of 0.13, its mark at 5, prepared by an owner."""
    empty_world.run_0_13(1, 5, records(0, 10))
    empty_world.log.prepare(2, NONCE)
    return empty_world


def cover(world, last=BEFORE_FIRST):
    return world.log.truncate(2, last, BEFORE_FIRST, GENESIS_CHAIN)


def append(world, fields):
    world.log.append(2, *fields)
    world.log.sync()


def append_ours(world, session, mark, batches_count=1):
    """Open a session of this version at the log's end, and append batches of five records."""
    log = world.log
    log.prepare(session, NONCE)
    log.set_low_water_mark(session, mark, log.chain)
    log.engage(session, mark)
    for first in range(mark + 1, mark + 1 + 5 * batches_count, 5):
        ours, chain = records(first, 5), log.chain
        crcs = b"".join(our[-4:] for our in ours)
        after = next_chain(chain, first, first + 4, session, crcs)
        lengths = np.array([len(our) for our in ours], dtype=np.int64)
        entry = LineageEntry(first, first + 4, session, 9, after)
        log.append(session, first, lengths, b"".join(ours), chain, (entry,))
        log.sync()


def record_bytes(world):
    """Return all records in the file, including covered records."""
    return (world.directory / "0" / f"{0:019d}.seg").read_bytes()[128:]


# ---- adopted batches


def test_batch_ends_depend_on_ids_and_marks_and_not_on_reopenings(empty_world):
    for session, mark, count in ((2, -1, 600), (3, 599, 700), (4, 1299, 900)):
        first = empty_world.log.max_id + 1
        empty_world.run_0_13(session, mark, records(first, count, b""))
    assert empty_world.bounds() == [(0, 1023), (1024, 1299), (1300, 2047), (2048, 2199)]
    empty_world.crash()
    assert empty_world.log.max_id == 2_199
    assert not empty_world.log.suspect


def test_batches_of_large_records_fit_into_a_frame(empty_world):
    """No replica could copy larger batches."""
    empty_world.run_0_13(1, BEFORE_FIRST, records(0, 900, bytes(20_000)))
    sizes, first = [], 0
    while first < 900:
        read = empty_world.log.read_range(first, 899, 1, whole_batches=True)
        sizes.append(len(read.records))
        first = read.entries[-1].last + 1
    assert sum(sizes) == 900 * 20_040
    assert max(sizes) < FRAME_BYTES_MAX
    assert min(sizes[:-1]) > FRAME_BYTES_MAX // 4
    empty_world.crash()
    assert len(empty_world.bounds()) == len(sizes)


@pytest.mark.parametrize("count", [2, 7, 20])
def test_batches_of_records_replaced_by_0_13_are_rebuilt(empty_world, count):
    """0.13 ignores batches: a batch above the mark may belong to replaced records."""
    append_ours(empty_world, 1, BEFORE_FIRST)
    append_ours(empty_world, 2, 4, batches_count=2)
    last = 4 + count
    empty_world.run_0_13(3, last, records(5, count, b"other"), cut_to=4)
    read = empty_world.log.read_range(0, last, 1 << 20, whole_batches=True)
    crcs = raw_records.record_crcs(read.records, read.lengths)
    assert check_chain(read.entries, 0, GENESIS_CHAIN, crcs) is None
    assert empty_world.bounds() == [(0, 4), (5, last)]
    assert [entry.session_id for entry in read.entries] == [1, NO_SESSION]
    assert not empty_world.log.suspect
    assert empty_world.log.state().low_water_mark == last


def test_a_mark_of_0_13_is_not_reported_as_confirmed(world):
    state = world.log.state()
    assert (state.low_water_mark, state.mark_confirmed) == (5, False)
    assert world.log.confirmed_low_water_mark == 5


def test_a_0_13_log_that_ends_below_its_mark_reports_no_session(empty_world):
    """0.13 sets its mark before it copies records: the end of such a log is unknown."""
    empty_world.run_0_13(3, 7, records(0, 5))
    assert empty_world.log.prepare(4, NONCE).last_session == NO_SESSION
    empty_world.run_0_13(5, 7, records(5, 3))
    assert empty_world.log.prepare(6, NONCE).last_session == 5


# ---- covering


def test_an_owner_can_divide_covered_records_into_other_batches(world):
    assert cover(world) == (BEFORE_FIRST, GENESIS_CHAIN)
    assert (world.log.max_id, world.log.synced_max) == (BEFORE_FIRST, BEFORE_FIRST)
    first, second, third, fourth = other_batches(records(0, 12), (3, 4, 3, 2), 2)
    append(world, first)
    assert (world.log.max_id, world.log.synced_max) == (2, 2)
    world.log.mark_acked()
    append(world, second)
    append(world, third)
    world.log.append(2, *fourth)
    assert (world.log.max_id, world.log.synced_max) == (11, 9), "later appends work as in any log"
    world.log.sync()
    world.log.set_low_water_mark(2, 11, world.log.chain)
    world.log.engage(2, 11)
    assert record_bytes(world) == world.content() == all_records(11)
    assert world.bounds() == [(0, 2), (3, 6), (7, 9), (10, 11)]
    assert world.log.state().mark_confirmed
    world.crash()
    assert world.bounds() == [(0, 2), (3, 6), (7, 9), (10, 11)]
    assert not world.log.suspect


def test_a_damaged_record_is_covered_and_stays_damaged(world):
    """The record is below the confirmed mark: if it counted as different, appends would fail."""
    (path,) = (world.directory / "0").glob("*.seg")
    content = path.read_bytes()
    position = content.index(records(3, 1)[0]) + 37
    path.write_bytes(content[:position] + b"?" + content[position + 1 :])
    world.log.verify(0, 1 << 20)
    assert world.log.damaged == (IdRange(3, 3),)
    assert cover(world) == (BEFORE_FIRST, GENESIS_CHAIN)
    for fields in other_batches(records(0, 10), (3, 4, 3), 2):
        append(world, fields)
    assert world.bounds() == [(0, 2), (3, 6), (7, 9)]
    assert world.log.damaged == (IdRange(3, 3),)
    world.log.repair(3, np.array([44]), records(3, 1)[0])
    assert world.content() == all_records(9)
    assert world.log.damaged == ()


def test_a_mark_inside_of_a_batch_truncates_the_records_above_it(world):
    """The decided mark is below the end of the log; setting it removes the records above it."""
    last, chain = cover(world, 7)
    assert (last, world.log.chain) == (7, chain)
    assert record_bytes(world) == all_records(9)
    world.log.set_low_water_mark(2, 7, chain)
    assert record_bytes(world) == world.content() == all_records(7)
    assert world.bounds() == [(0, 5), (6, 7)]
    assert world.log.chain_at(7) == chain


def test_a_truncation_without_space_is_repeated_when_the_mark_is_set_again(world, monkeypatch):
    _, chain = cover(world, 7)
    with monkeypatch.context() as patch:
        patch.setattr(truncation, "carry_out", Mock(side_effect=NoSpace("full")))
        with pytest.raises(NoSpace):
            world.log.set_low_water_mark(2, 7, chain)
    world.log.set_low_water_mark(2, 7, chain)
    world.log.engage(2, 7)
    assert record_bytes(world) == world.content() == all_records(7)
    world.crash()
    assert world.log.chain == chain
    assert not world.log.suspect


def test_records_after_the_last_covered_record_are_appended(world):
    cover(world)
    first, second = other_batches(records(0, 14), (8, 6), 2)
    append(world, first)
    append(world, second)
    assert world.content() == all_records(13)
    with pytest.raises(BadRequest):
        append(world, second)


def test_new_records_replace_only_the_records_above_the_mark(world):
    cover(world)
    other = [*records(0, 6), *records(6, 4, b"else")]
    for fields in other_batches(other, (6, 4), 2):
        append(world, fields)
    assert world.content() == all_records(5) + record_bytes(world)[6 * 44 :]
    assert world.bounds() == [(0, 5), (6, 9)]
    assert b"else" in world.content()


def test_nonconsecutive_batches_are_rejected(world):
    cover(world)
    batches = list(other_batches(records(0, 10), (3, 4, 3), 2))
    first, lengths, data, chain, (entry,) = batches[0]
    other = b"\1" * len(chain)  # the same records, after records that are missing here
    crcs = b"".join(data[end - 4 : end] for end in lengths.cumsum())
    behind = entry._replace(chain=next_chain(other, 0, 2, 2, crcs))
    for start, before, placed in ((1, chain, entry), (first, other, entry), (first, other, behind)):
        with pytest.raises(BadRequest):
            world.log.append(2, start, lengths, data, before, (placed,))
        assert world.log.max_id == BEFORE_FIRST
    for batch in batches:
        append(world, batch)
    assert record_bytes(world) == world.content() == all_records(9)


def test_records_below_the_confirmed_mark_are_not_truncated(world):
    cover(world)
    (wrong,) = other_batches([*records(0, 3), *records(3, 4, b"else")], (7,), 2)
    with pytest.raises(DataLoss, match="below the low-water mark 5"):
        append(world, wrong)
    assert record_bytes(world) == all_records(9)
    world.crash()
    assert world.content() == all_records(9)
    assert not world.log.suspect


def test_a_later_session_finds_all_records_with_batches(world):
    cover(world)
    append(world, next(other_batches(records(0, 10), (3,), 2)))
    assert world.log.slot.is_unbatched
    prepared = world.log.prepare(3, NONCE)
    assert (prepared.synced_max, prepared.chain) == (9, world.log.chain_at(9))
    assert not world.log.slot.is_unbatched
    assert world.log.truncate(3, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN)[0] == BEFORE_FIRST
    assert world.log.prepare(4, NONCE).synced_max == 9
    assert world.content() == all_records(9)


@pytest.mark.parametrize("added", [None, 2])
def test_the_next_start_returns_covered_records_to_the_log(world, added):
    """Either this version starts after a clean stop, or 0.13 starts and appends records."""
    cover(world)
    if added is None:
        world.stop()
        world.open()
    else:
        world.run_0_13(4, 9, records(10, added))
    assert not world.log.suspect
    last = 9 + (added or 0)
    assert world.log.prepare(5, NONCE).synced_max == last
    assert world.content() == all_records(last)


def test_a_failed_rebatching_closes_the_log_until_it_is_reopened(world):
    cover(world)
    world.disk.next_errors["pread"] = DiskFailed("no")
    with pytest.raises(DiskFailed, match="cannot write batches"):
        world.log.prepare(3, NONCE)
    assert world.log.is_broken
    with pytest.raises(DiskFailed):
        world.log.prepare(3, NONCE)
    world.open()
    assert world.log.prepare(3, NONCE).synced_max == 9


def test_a_disk_failure_between_two_appends_loses_no_record(world):
    cover(world)
    first, second = other_batches(records(0, 10), (3, 7), 2)
    append(world, first)
    world.disk.next_errors["sync"] = DiskFailed("no")
    with pytest.raises(DiskFailed):
        append(world, second)
    assert world.log.prepare(3, NONCE).synced_max == 9
    assert world.content() == all_records(9)


def test_a_session_may_truncate_only_once_and_only_at_a_batch_end(world):
    with pytest.raises(
        BadRequest,
        match=r"expected chain hash 0+ at transaction 3, found "
        r"no batch end there",
    ):
        world.log.truncate(2, 8, 3, GENESIS_CHAIN)
    cover(world)
    append(world, next(other_batches(records(0, 10), (3,), 2)))
    with pytest.raises(BadRequest, match="one truncation"):
        cover(world)


def test_records_that_the_owner_has_appended_are_removed_by_a_truncation(world):
    log = world.log
    log.set_low_water_mark(2, 9, log.chain)
    log.engage(2, 9)
    (first, lengths, data, _, (entry,)) = list(other_batches(records(0, 12), (10, 2), 2))[1]
    before = log.chain
    crcs = raw_records.record_crcs(data, lengths)
    chain = next_chain(before, entry.first, entry.last, entry.session_id, crcs)
    append(world, (first, lengths, data, before, (entry._replace(chain=chain),)))
    assert log.truncate(2, 9, 9, before) == (9, before)
    assert record_bytes(world) == all_records(9)


# ---- files of earlier versions, which accepted records from 0.13 servers


def test_unbatched_records_of_an_earlier_version_get_batches(empty_world):
    (fields,) = other_batches(records(0, 10), (10,), 2)
    empty_world.log.prepare(2, NONCE)
    append(empty_world, fields)
    acked = AckedMarker(9, UNBATCHED_CHAIN)
    empty_world.write_slot(
        acked=acked, promised=6, nonce=NO_NONCE, provisional=ProvisionalMark(6, 20)
    )
    assert empty_world.content() == all_records(9)
    assert not empty_world.log.slot.is_unbatched
    assert not empty_world.log.suspect
    prepared = empty_world.log.prepare(7, NONCE)
    assert (prepared.synced_max, prepared.last_session) == (9, NO_SESSION), (
        "the log is below its mark"
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_a_truncation_keeps_covered_records_after_a_mark_of_a_0_13_server(empty_world, restarts):
    """Another replica has adopted the same records, and both would support the truncation."""
    empty_world.log.prepare(2, NONCE)
    first, second = other_batches(records(0, 10), (6, 4), 2)
    append(empty_world, first)
    append(empty_world, second)
    fields = {"promised": 6, "nonce": NO_NONCE, "last_session": 6}
    empty_world.write_slot(**fields, provisional=ProvisionalMark(6, 9))
    session = 7
    assert empty_world.log.prepare(session, NONCE).last_session == 6
    if restarts:
        empty_world.crash()
        session = 8
        empty_world.log.prepare(session, NONCE)
    chain = first[-1][0].chain
    assert empty_world.log.truncate(session, 5, 5, chain) == (5, chain)
    empty_world.crash()
    prepared = empty_world.log.prepare(9, NONCE)
    assert (prepared.synced_max, prepared.last_session) == (9, 6)
    assert empty_world.content() == all_records(9)
