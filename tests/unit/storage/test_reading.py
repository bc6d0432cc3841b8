"""Reads around damage: no wrong record is returned, and new damage is recorded durably."""

import pytest

from tests.unit.storage.logs import ROOT, make_segments, new_disk
from waltz_core.errors import BadRequest, ChecksumMismatch, DiskFailed
from waltz_core.records.raw_records import headers_of
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED
from waltz_core.storage.files.control_file import SlotFile
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES, IdRange, Slot, segment_name
from waltz_core.storage.log import reading
from waltz_core.storage.log.reading import LogReader
from waltz_sim.world.simulated_disk import SimFile

RECORD_BYTES = 60
FIRSTS = (0, 5, 8)


class Log:
    """Batches 0..2, 3..4 | 5..7 | 8..11 in three segments, with a reader."""

    batches = ([3, 2], [3], [4])

    def __init__(self):
        self.disk = new_disk()
        self.segments, self.records, self.entries = make_segments(self.disk, *self.batches)
        self.slots = SlotFile.create(self.disk, ROOT, Slot(2))
        self.written_slots = []
        self.reader = LogReader(2, self.segments, self.slots, self.write_slot)

    def write_slot(self, slot):
        self.written_slots.append(slot)
        self.slots.write(slot)

    def rot(self, transaction_id, at=44):
        first = max(one for one in FIRSTS if one <= transaction_id)
        offset = SEGMENT_HEADER_BYTES + RECORD_BYTES * (transaction_id - first) + at
        self.disk.flip_bits(ROOT / segment_name(first, ".seg"), offset)

    def rot_index(self, transaction_id, at=7, mask=8):
        first = max(one for one in FIRSTS if one <= transaction_id)
        offset = SEGMENT_HEADER_BYTES + 8 * (transaction_id - first) + at
        self.disk.flip_bits(ROOT / segment_name(first, ".idx"), offset, mask)

    def read(self, first, last, bytes_max=1 << 20, *, whole_batches=False):
        """Read, check the result, and return its last ID."""
        read = self.reader.read_range(first, last, bytes_max, whole_batches=whole_batches)
        end = first + read.lengths.size - 1
        assert read.first == first
        assert read.records == self.records[first * RECORD_BYTES : (end + 1) * RECORD_BYTES]
        touching = [entry for entry in self.entries if entry.last >= first and entry.first <= end]
        position = self.entries.index(touching[0])
        assert read.entries == tuple(touching)
        assert read.chain_before == (
            self.entries[position - 1].chain if position else GENESIS_CHAIN
        )
        return end


@pytest.fixture
def log():
    return Log()


def test_a_read_returns_at_least_one_record_within_its_limit(log):
    assert log.read(0, 11) == 11
    assert log.read(4, 6) == 6
    assert log.read(2, 11, 3 * RECORD_BYTES) == 4
    assert log.read(2, 11, 4 * RECORD_BYTES - 1) == 4
    assert log.read(7, 11, 1) == 7
    assert log.written_slots == []


def test_a_read_of_whole_batches_begins_and_ends_with_a_batch(log):
    assert log.read(0, 11, 1, whole_batches=True) == 2
    assert log.read(0, 11, 5 * RECORD_BYTES, whole_batches=True) == 4
    assert log.read(0, 11, 7 * RECORD_BYTES, whole_batches=True) == 4
    assert log.read(3, 11, whole_batches=True) == 11
    with pytest.raises(BadRequest, match="expected a batch that begins at transaction 4, found"):
        log.read(4, 11, whole_batches=True)


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (5, 4), (3, 12), (12, 12)])
def test_missing_ids_are_rejected(log, first, last):
    with pytest.raises(BadRequest, match="this storage ends at 11"):
        log.read(first, last)


@pytest.mark.parametrize("at", [0, 7, 28, 40, 44, 59])
def test_a_damaged_record_is_recorded_once_and_skipped(log, at):
    log.rot(6, at)
    assert log.read(0, 11) == 5
    assert log.slots.slot.damaged == (IdRange(6, 6),)
    with pytest.raises(ChecksumMismatch, match=r"records 6\.\.6 are damaged"):
        log.read(6, 11)
    assert log.read(7, 11) == 11
    assert len(log.written_slots) == 1
    assert SlotFile.open(log.disk, ROOT, 2).slot.damaged == (IdRange(6, 6),)


def test_a_read_of_whole_batches_stops_before_the_batch_with_the_damage(log):
    log.rot(6)
    assert log.read(0, 11, whole_batches=True) == 4
    with pytest.raises(ChecksumMismatch):
        log.read(5, 11, whole_batches=True)
    assert log.read(8, 11, whole_batches=True) == 11


@pytest.mark.parametrize(("at", "mask"), [(7, 8), (0, 1)])
def test_a_wrong_index_is_repaired_without_recording_damage(log, at, mask):
    path = ROOT / segment_name(5, ".idx")
    before = log.disk.visible_content(path)
    log.rot_index(6, at, mask)
    assert log.disk.visible_content(path) != before
    assert log.read(0, 11) == 11
    assert log.slots.slot.damaged == ()
    assert log.disk.visible_content(path) == before


def test_header_reads_match_the_records_and_stop_before_damage(log):
    read = log.reader.read_headers(2, 9, 1 << 20)
    run, lengths = log.segments.read(2, 9)
    assert (read.first, read.record_count, read.headers) == (2, 8, headers_of(run, lengths))
    assert read.entries == tuple(log.entries)
    assert log.reader.read_headers(2, 9, 28 * 3 + 27).record_count == 3
    assert log.reader.read_headers(2, 9, 0).record_count == 1
    log.rot(6)
    assert log.reader.read_headers(2, 9, 1 << 20).record_count == 4
    with pytest.raises(ChecksumMismatch):
        log.reader.read_headers(6, 9, 1 << 20)


def test_headers_of_large_records_are_returned_in_several_answers(log, monkeypatch):
    """Thousands of headers may span gigabytes of records; a single read would time out."""
    monkeypatch.setattr(reading, "READ_BYTES", 2 * RECORD_BYTES)
    monkeypatch.setattr(reading, "HEADERS_READ_BYTES_MAX", 3 * RECORD_BYTES)
    read = log.reader.read_headers(1, 11, 1 << 20)
    assert (read.first, read.record_count, read.entries[-1].last) == (1, 4, 4)
    assert len(read.headers) == 4 * 28
    monkeypatch.setattr(reading, "HEADERS_READ_BYTES_MAX", 1)
    monkeypatch.setattr(reading, "READ_BYTES", 1)
    assert log.reader.read_headers(1, 11, 1 << 20).record_count == 1


# ---- a disk that cannot read some bytes


class LargeLog(Log):
    """Twenty batches of five 60-byte records in one cold segment, and another segment after it."""

    batches = ([5] * 20, [3])

    def lose(self, suffix, first, last):
        """Lose the sectors of a byte range of the first segment."""
        path = ROOT / segment_name(0, suffix)
        first, last = first // 512 * 512, last // 512 * 512 + 511
        self.disk.overwrite(path, first, bytes(last - first + 1))
        self.disk.make_unreadable(path, first, last)


@pytest.fixture
def large_log():
    return LargeLog()


def test_a_temporary_read_failure_is_not_recorded_as_damage(large_log):
    for count in range(1, 9):
        large_log.disk.plan_read_failure(count)
        assert large_log.read(20, 60) == 60
        assert len(large_log.reader.take_disk_errors()) == 1
        assert large_log.reader.take_disk_errors() == []
    assert large_log.slots.slot.damaged == ()


def test_only_records_in_unreadable_sectors_are_damaged(large_log):
    # Bytes 1024..1535 are in the records 14..23: the first begins at 968, the last ends at 1568.
    large_log.lose(".seg", 1_024, 1_024)
    assert large_log.read(0, 99) == 13
    assert large_log.slots.slot.damaged == (IdRange(14, 23),)
    assert len(large_log.written_slots) == 1
    assert "a sector cannot be read" in large_log.reader.take_disk_errors()[0]
    with pytest.raises(ChecksumMismatch, match=r"14\.\.23 are damaged"):
        large_log.read(14, 99)
    assert large_log.read(24, 99) == 99
    assert large_log.read(0, 99, whole_batches=True) == 9


def test_a_long_run_of_lost_records_is_recorded_in_parts(large_log, monkeypatch):
    monkeypatch.setattr(reading, "_UNREADABLE_RUN_MAX", 4)
    large_log.lose(".seg", 1_024, 2_047)
    at, seen = 0, []
    while at < 100:
        at = large_log.reader.verify(at, 1 << 20)
        seen.append(at)
    assert large_log.slots.slot.damaged == (IdRange(14, 31),)
    assert seen[:2] == [14, 18]


def test_an_index_that_cannot_be_read_is_rebuilt(large_log):
    path = ROOT / segment_name(0, ".idx")
    before = large_log.disk.visible_content(path)
    large_log.lose(".idx", 600, 600)
    assert large_log.read(0, 99) == 99
    assert large_log.slots.slot.damaged == ()
    assert large_log.disk.visible_content(path) == before
    assert large_log.read(0, 99) == 99


def test_batches_are_reconstructed_even_if_records_cannot_be_read(large_log):
    large_log.lose(".chn", 600, 600)
    for damaged in range(0, 100, 10):
        large_log.disk.flip_bits(
            ROOT / segment_name(0, ".seg"), SEGMENT_HEADER_BYTES + damaged * RECORD_BYTES
        )
    for first in range(1, 100, 10):
        read = large_log.reader.read_range(first, 99, 1 << 20, whole_batches=False)
        assert read.lengths.size == 9
        assert read.records == large_log.records[first * RECORD_BYTES : (first + 9) * RECORD_BYTES]
    entries = large_log.segments.entries(0, 99, 99)[1]
    assert any(entry.session_id == RECONSTRUCTED for entry in entries)
    assert {entry for entry in entries if entry.session_id != RECONSTRUCTED} <= set(
        large_log.entries
    )


def test_checked_records_are_counted(large_log):
    assert large_log.reader.verify(0, 10 * RECORD_BYTES) == 10
    assert large_log.reader.checked_bytes == 10 * RECORD_BYTES
    large_log.disk.flip_bits(
        ROOT / segment_name(0, ".seg"), SEGMENT_HEADER_BYTES + 11 * RECORD_BYTES + 44
    )
    assert large_log.reader.verify(10, 10 * RECORD_BYTES) == 11
    assert large_log.reader.verify(11, 10 * RECORD_BYTES) == 12
    assert large_log.reader.checked_bytes == 11 * RECORD_BYTES
    assert large_log.reader.segment_end(11) == 99
    assert large_log.reader.segment_end(100) == 102


def test_verifying_skips_only_the_damage_at_its_position(log):
    log.rot(10)
    assert log.reader.verify(8, 1 << 20) == 10
    lineage = ROOT / segment_name(0, ".chn")
    log.disk.overwrite(lineage, len(log.disk.visible_content(lineage)) - 10, bytes(10))
    with pytest.raises(ChecksumMismatch, match="the last 1 of 2 batch"):
        log.reader.verify(0, 1 << 20)


def last_located_id(log, first, last, bytes_max=1 << 20):
    """Request the positions of records; return the last ID of the answer if they are right."""
    read = log.reader.locations(first, last, bytes_max)
    found = b""
    for position in read.locations:
        content = log.disk.visible_content(ROOT / segment_name(position.segment, ".seg"))
        found += content[position.offset : position.offset + position.size]
    end = first + read.lengths.size - 1
    assert read.first == first
    assert found == log.records[first * RECORD_BYTES : (end + 1) * RECORD_BYTES]
    assert read.lengths.tolist() == [RECORD_BYTES] * read.lengths.size
    assert read.entries == tuple(
        entry for entry in log.entries if entry.last >= first and entry.first <= end
    )
    return end


def test_record_locations_cover_segments_up_to_the_byte_limit(log):
    assert last_located_id(log, 0, 11) == 11
    assert last_located_id(log, 4, 6) == 6
    assert last_located_id(log, 2, 11, 4 * RECORD_BYTES - 1) == 4
    assert last_located_id(log, 7, 11, 1) == 7
    with pytest.raises(BadRequest, match="this storage ends at 11"):
        log.reader.locations(3, 12, 1)


def test_record_locations_stop_before_known_damage(log):
    log.rot(6)
    assert log.reader.locations(0, 11, 1 << 20).lengths.size == 12
    assert log.slots.slot.damaged == ()
    log.read(0, 11)
    assert last_located_id(log, 0, 11) == 5
    with pytest.raises(ChecksumMismatch, match=r"records 6\.\.6 are damaged"):
        log.reader.locations(6, 11, 1 << 20)
    assert last_located_id(log, 7, 11) == 11


def test_a_wrong_index_is_repaired_before_record_locations_are_returned(log):
    log.rot_index(6, 0, 1)
    assert last_located_id(log, 0, 11) == 11
    assert log.slots.slot.damaged == ()


def test_record_locations_are_limited_to_the_returned_batch_entries(log, monkeypatch):
    monkeypatch.setattr(reading, "LINEAGE_ENTRIES_MAX", 2)
    assert last_located_id(log, 0, 11) == 1


def test_verifying_finds_damage_on_disk_that_the_page_cache_hides(large_log):
    path = ROOT / segment_name(0, ".seg")
    for number in (11, 60):
        large_log.disk.flip_bits_unseen(path, SEGMENT_HEADER_BYTES + number * RECORD_BYTES + 44)
    assert large_log.read(0, 99) == 99  # readers get the cached pages
    assert large_log.slots.slot.damaged == ()
    at = 0
    while at < 100:
        at = large_log.reader.verify(at, 10 * RECORD_BYTES)
    assert large_log.slots.slot.damaged == (IdRange(11, 11), IdRange(60, 60))


def test_verifying_drops_blocks_only_up_to_its_position(large_log):
    path = ROOT / segment_name(0, ".seg")
    large_log.disk.flip_bits_unseen(path, SEGMENT_HEADER_BYTES + 60 * RECORD_BYTES + 44)
    assert large_log.reader.verify(0, 10 * RECORD_BYTES) == 10
    assert large_log.read(0, 99) == 99


def test_pages_that_cannot_be_dropped_are_read_from_memory(large_log, monkeypatch):
    """Dropping pages is only a hint; a file that cannot be opened fails when it is read."""

    def refuse(_file, _offset, _size):
        raise DiskFailed("cannot open a file: input/output error")

    monkeypatch.setattr(SimFile, "drop_cached", refuse)
    assert large_log.reader.verify(0, 10 * RECORD_BYTES) == 10
    assert large_log.slots.slot.damaged == ()
