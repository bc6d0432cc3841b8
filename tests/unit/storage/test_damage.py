"""Repair of damage: only from a range's first ID, with valid records of the same log."""

import numpy as np
import pytest

from tests.unit.storage.logs import ROOT, make_batches, make_run, make_segments, new_disk
from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ReadFailed
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    IdRange,
    Slot,
    segment_name,
)
from waltz_core.storage.log import damage

RECORD_BYTES = 60
HOLE = Slot(2, damaged=(IdRange(1, 1), IdRange(4, 6)))


class Log:
    """Batches 0..2, 3..7 and 8..9 in one segment, with damage at 1 and 4..6."""

    def __init__(self):
        self.disk = new_disk()
        self.segments, self.records, self.entries = make_segments(self.disk, [3, 5, 2])
        for transaction_id in (1, 4, 5, 6):
            offset = SEGMENT_HEADER_BYTES + RECORD_BYTES * transaction_id + 44
            self.disk.flip_bits(ROOT / segment_name(0, ".seg"), offset)

    def fill(self, first, last, *, slot=HOLE):
        run = self.records[first * RECORD_BYTES : (last + 1) * RECORD_BYTES]
        lengths = np.array([RECORD_BYTES] * (last - first + 1), dtype=np.int64)
        return damage.repair_damage(slot, self.segments, first, lengths, run)


@pytest.fixture
def log():
    return Log()


def test_damage_is_repaired_in_parts_from_its_beginning(log):
    left = log.fill(4, 5)
    assert left == (IdRange(1, 1), IdRange(6, 6))
    assert log.fill(6, 6, slot=Slot(2, damaged=left)) == (IdRange(1, 1),)


def test_damage_found_during_a_repair_is_recorded(log):
    log.disk.flip_bits(ROOT / segment_name(0, ".seg"), SEGMENT_HEADER_BYTES + RECORD_BYTES * 7 + 44)
    assert log.fill(4, 6) == (IdRange(1, 1), IdRange(7, 7))
    assert log.fill(7, 7, slot=Slot(2, damaged=(IdRange(7, 7),))) == ()


@pytest.mark.parametrize(("first", "last"), [(5, 6), (0, 1), (1, 2), (4, 7), (8, 8)])
def test_only_known_damage_is_overwritten(log, first, last):
    before = log.disk.files()
    with pytest.raises(BadRequest, match=f"partition 2: .* damaged range.*, found {first}"):
        log.fill(first, last)
    assert log.disk.files() == before


def test_corrupt_records_are_not_written(log):
    before = log.disk.files()
    run, lengths = make_run(4, [20])
    with pytest.raises(
        ChecksumMismatch, match="2: the copy of record 4 is damaged or has another transaction ID"
    ):
        damage.repair_damage(HOLE, log.segments, 4, lengths, run[:-1] + bytes([run[-1] ^ 1]))
    other, lengths = make_run(5, [20])
    with pytest.raises(ChecksumMismatch, match="record 4"):
        damage.repair_damage(HOLE, log.segments, 4, lengths, other)
    assert log.disk.files() == before


def test_records_of_another_history_do_not_repair_damage(log):
    run, lengths, _ = make_batches(1, [1], seed=8)
    with pytest.raises(ChecksumMismatch, match=r"do not match the chain hash of batch 0\.\.2"):
        damage.repair_damage(HOLE, log.segments, 1, lengths, run)
    assert log.fill(1, 1) == (IdRange(4, 6),)
    assert log.segments.read(0, 2)[0] == log.records[: 3 * RECORD_BYTES]


def test_records_of_another_length_are_rejected(log):
    run, lengths = make_run(1, [21])
    with pytest.raises(BadFormat, match="60 bytes, found 61 bytes"):
        damage.repair_damage(HOLE, log.segments, 1, lengths, run)


def spoil_batch(log, position):
    path = ROOT / segment_name(0, ".chn")
    log.disk.flip_bits(path, LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES * position + 8)


def test_a_damaged_batch_is_rebuilt_from_repaired_records(log):
    spoil_batch(log, 1)
    left = log.fill(4, 5)
    assert left == (IdRange(1, 1), IdRange(6, 6)), "the rest of the damage remains"
    with pytest.raises(ChecksumMismatch):
        log.segments.entries(4, 4, 1)
    assert log.fill(6, 6, slot=Slot(2, damaged=left)) == (IdRange(1, 1),)
    assert log.segments.entries(0, 9, 9)[1] == tuple(log.entries)


def test_a_repair_waits_for_the_batch_after_a_lost_batch(log):
    spoil_batch(log, 0)
    left = log.fill(4, 5)
    left = log.fill(1, 1, slot=Slot(2, damaged=left))
    assert left == (IdRange(6, 6),)
    with pytest.raises(ChecksumMismatch):
        log.segments.entries(0, 0, 1)
    assert log.fill(6, 6, slot=Slot(2, damaged=left)) == ()
    assert [entry[1:3] for entry in log.segments.entries(0, 9, 9)[1]] == [
        entry[1:3] for entry in log.entries
    ]
    assert log.segments.read(0, 9)[0] == log.records


def records_of_another_log(first, last):
    run, lengths, _ = make_batches(first, [last - first + 1], seed=8)
    return first, lengths, run


@pytest.mark.parametrize("spoiled", [0, 1])
def test_records_of_another_history_do_not_prove_a_batch(log, spoiled):
    spoil_batch(log, spoiled)
    slot = Slot(2, damaged=(IdRange(4, 6),))
    log.fill(1, 1, slot=Slot(2, damaged=(IdRange(1, 1), IdRange(4, 6))))
    before = log.disk.visible_content(ROOT / segment_name(0, ".chn"))
    with pytest.raises(ChecksumMismatch, match=r"cannot be rebuilt with the copied records 4\.\.6"):
        damage.repair_damage(slot, log.segments, *records_of_another_log(4, 6))
    assert log.disk.visible_content(ROOT / segment_name(0, ".chn")) == before
    assert log.fill(4, 6, slot=slot) == ()
    assert log.segments.read(0, 9)[0] == log.records


def test_a_complete_batch_next_to_a_lost_one_is_verified(log):
    spoil_batch(log, 1)
    slot = Slot(2, damaged=(IdRange(1, 6),))
    with pytest.raises(ChecksumMismatch, match=r"do not match the chain hash of batch 0\.\.2"):
        damage.repair_damage(slot, log.segments, *records_of_another_log(1, 4))


def test_a_repair_does_not_wait_for_a_damaged_adjacent_batch(log):
    spoil_batch(log, 1)
    assert log.fill(1, 1) == (IdRange(4, 6),)
    spoil_batch(log, 2)
    assert log.fill(1, 1) == (IdRange(4, 6),), "the repair does not read the end of the log"


@pytest.mark.parametrize("spoiled", [(0, 1), (2,)])
def test_adjacent_lost_batches_or_a_lost_last_batch_cannot_be_proved(log, spoiled):
    for position in spoiled:
        spoil_batch(log, position)
    log.disk.flip_bits(ROOT / segment_name(0, ".seg"), SEGMENT_HEADER_BYTES + RECORD_BYTES * 8 + 44)
    first, last = (8, 8) if spoiled == (2,) else (4, 5)
    with pytest.raises(ChecksumMismatch, match=r"unreadable batch entries .* cannot be rebuilt"):
        log.fill(first, last, slot=Slot(2, damaged=(*HOLE.damaged, IdRange(8, 8))))


# ---- blocks that the disk cannot read (blocks of 512 bytes in these tests)


class LogWithLostBlocks(Log):
    """Batches 0..29 and 30..59 in one segment, and 60..69 in the next, without corruption."""

    def __init__(self):
        self.disk = new_disk()
        self.segments, self.records, self.entries = make_segments(self.disk, [30, 30], [10])
        self.path = ROOT / segment_name(0, ".seg")


@pytest.mark.parametrize("pieces", [(39,), (26, 39), (22, 31, 33, 39), tuple(range(21, 40))])
def test_lost_blocks_are_overwritten_in_parts(pieces):
    """A piece may cover a part of a block; the rest reads as zeros until it is repaired, too."""
    log = LogWithLostBlocks()
    first, last = SEGMENT_HEADER_BYTES + RECORD_BYTES * 21, SEGMENT_HEADER_BYTES + RECORD_BYTES * 40
    log.disk.make_unreadable(log.path, first + 30, last - 30)
    damaged = (IdRange(21, 39),)
    first_id = 21
    for end in pieces:
        damaged = log.fill(first_id, end, slot=Slot(2, damaged=damaged))
        first_id = end + 1
    outside_range = [one for one in damaged if one.last < 21 or one.first > 39]
    assert len(outside_range) == len(damaged), "no repaired record is damaged"
    for one in outside_range:  # the record shared a block with them
        assert 12 < one.first <= one.last < 49
        log.fill(*one, slot=Slot(2, damaged=(one,)))
    assert log.segments.read(0, 59)[0] == log.records[: 60 * RECORD_BYTES]


def test_the_last_block_of_an_older_segment_is_overwritten():
    log = LogWithLostBlocks()
    end = len(log.disk.visible_content(log.path))
    log.disk.make_unreadable(log.path, end - 1, end - 1)
    left = log.fill(58, 59, slot=Slot(2, damaged=(IdRange(58, 59),)))
    assert len(log.disk.visible_content(log.path)) == end
    for one in left:
        log.fill(*one, slot=Slot(2, damaged=(one,)))
    assert log.segments.read(0, 59)[0] == log.records[: 60 * RECORD_BYTES]


@pytest.mark.parametrize("position", [0, SEGMENT_HEADER_BYTES + 8 * 50])
def test_lost_blocks_of_an_index_are_rebuilt(position):
    log = LogWithLostBlocks()
    path = log.path.with_suffix(".idx")
    content = log.disk.visible_content(path)
    log.segments.close()
    log.disk.make_unreadable(path, position, position)
    assert log.segments.repair(0, 59) == ()
    assert log.segments.read(0, 59)[0] == log.records[: 60 * RECORD_BYTES]
    log.segments.close()
    assert log.disk.open(path).pread(10_000, 0) == content


@pytest.mark.parametrize("position", [0, 600], ids=["with the header", "in the middle"])
def test_lost_blocks_of_batches_are_rebuilt(position):
    disk = new_disk()
    segments, _, entries = make_segments(disk, [1] * 40, [1])
    path = ROOT / segment_name(0, ".chn")
    before = disk.visible_content(path)[:LINEAGE_HEADER_BYTES]
    disk.make_unreadable(path, position, position)
    segments.repair(0, 39)
    assert disk.visible_content(path)[:LINEAGE_HEADER_BYTES] == before
    found = list(segments.entries_from(0))
    is_lost = [one != other for one, other in zip(found, entries, strict=True)]
    assert 1 < sum(is_lost) <= 512 // LINEAGE_ENTRY_BYTES + 1
    assert [(one.first, one.last) for one in found] == [(one.first, one.last) for one in entries]


def test_a_segment_header_is_kept_when_its_block_is_released():
    log = LogWithLostBlocks()
    before = log.disk.visible_content(log.path)
    log.disk.make_unreadable(log.path, 0, 0)
    damaged = log.fill(0, 6, slot=Slot(2, damaged=(IdRange(0, 6),)))
    assert log.disk.visible_content(log.path)[: SEGMENT_HEADER_BYTES + 360] == before[: 128 + 360]
    assert damaged == (), "record 6 ends in the next block"


def test_records_that_do_not_match_release_no_sector():
    log = LogWithLostBlocks()
    position = SEGMENT_HEADER_BYTES + RECORD_BYTES * 20
    log.disk.make_unreadable(log.path, position, position)
    run, lengths = make_run(20, [500])
    with pytest.raises(BadFormat):
        damage.repair_damage(Slot(2, damaged=(IdRange(20, 20),)), log.segments, 20, lengths, run)
    with pytest.raises(ReadFailed):
        log.segments.read(20, 20)
