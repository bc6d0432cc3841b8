"""Search for records by their content, and after damage first with the index."""

import tracemalloc
from random import Random

import numpy as np
import pytest

from tests.unit.storage.logs import BLANK, ROOT, fill_segment, make_run, new_disk, new_segment
from waltz_core.errors import ReadFailed
from waltz_core.records.record import GENESIS_CHAIN, RECORD_PREFIX
from waltz_core.storage.files import record_search
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES, segment_name
from waltz_core.storage.files.index import OffsetIndex
from waltz_core.storage.files.record_search import (
    HoleSearch,
    PartlyReadableFile,
    _candidate_offsets,
    find_record,
    record_end,
    scan,
)

SEG, IDX = (ROOT / segment_name(0, suffix) for suffix in (".seg", ".idx"))
MIB = 1 << 20
RECORD_BYTES = 60  # the size of a record of `fill_segment`
NOWHERE = np.zeros(0, dtype=np.int64)


def offset_of(transaction_id):
    return SEGMENT_HEADER_BYTES + RECORD_BYTES * transaction_id


def test_a_search_finds_the_next_intact_record_after_a_corrupt_one():
    disk = new_disk()
    fill_segment(new_segment(disk, chain=GENESIS_CHAIN), [6])
    disk.flip_bits(SEG, offset_of(2) + 50)
    file, size = disk.open(SEG), len(disk.visible_content(SEG))
    starts, end = scan(file, SEGMENT_HEADER_BYTES, 0, size=size, stop_id=None)
    assert (starts.tolist(), end) == ([offset_of(0), offset_of(1)], offset_of(2))
    starts, end = scan(file, offset_of(3), 3, size=size, stop_id=5)
    assert (starts.tolist(), end) == ([offset_of(3), offset_of(4)], offset_of(5))
    starts, end = scan(file, offset_of(3), 4, size=size, stop_id=None)
    assert (starts.size, end) == (0, offset_of(3))
    for hole, behind in ((0, 1), (1, 3), (2, 3), (4, 5)):
        record = find_record(file, offset_of(hole), hole, size=size, starts=NOWHERE)
        assert record == (behind, offset_of(behind), False)
    assert find_record(file, offset_of(5), 5, size=size, starts=NOWHERE) is None
    assert find_record(file, size, 0, size=size, starts=NOWHERE) is None


def test_the_end_of_a_record_is_derived_from_its_length():
    disk = new_disk()
    fill_segment(new_segment(disk), [3])
    file, size = disk.open(SEG), len(disk.visible_content(SEG))
    assert record_end(file, offset_of(2), 2, size) == offset_of(3) == size
    assert record_end(file, offset_of(2), 1, size) is None
    assert record_end(file, offset_of(2), 2, size - 1) is None
    assert record_end(file, offset_of(3) - 39, 2, size) is None
    assert record_end(file, 0, 2, size) is None
    disk.overwrite(SEG, offset_of(2) + 28, (-1).to_bytes(4, "big", signed=True))
    assert record_end(file, offset_of(2), 2, size) is None


def search_of(disk, *, last=19):
    index = OffsetIndex(disk.open(IDX), BLANK)
    search = HoleSearch(disk.open(SEG), index, 0, last=last)
    return lambda hole: search.record_after(hole, offset_of(hole), len(disk.visible_content(SEG)))


def with_later_records(offset):
    """Twenty records: record 2 is damaged; records from 10 on are also at another position."""
    disk = new_disk()
    fill_segment(new_segment(disk), [20])
    disk.flip_bits(SEG, offset_of(2) + 40)
    disk.overwrite(SEG, offset, disk.visible_content(SEG)[offset_of(10) : offset_of(13) + 20])
    for transaction_id in range(3, (offset - SEGMENT_HEADER_BYTES) // RECORD_BYTES):
        disk.flip_bits(SEG, offset_of(transaction_id) + 40)
    return disk


def test_damage_ends_at_a_record_that_the_index_confirms():
    # The damage is from the middle of record 8 up to the middle of record 12.
    assert search_of(with_later_records(offset_of(8) + 30))(2) == (12, offset_of(12))


def test_records_missing_in_the_index_are_found():
    disk = new_disk()
    fill_segment(new_segment(disk), [20])
    disk.flip_bits(SEG, offset_of(3) + 40)
    for transaction_id in (4, 5):  # the offset of 6 is right, and record 4 leads to it
        disk.flip_bits(IDX, SEGMENT_HEADER_BYTES + 8 * transaction_id + 7)
    assert search_of(disk)(3) == (4, offset_of(4))
    disk.flip_bits(SEG, offset_of(5) + 40)
    assert search_of(disk)(3) == (6, offset_of(6))
    disk.flip_bits(SEG, offset_of(5) + 40)
    disk.write_durably(IDX, disk.visible_content(IDX)[:SEGMENT_HEADER_BYTES])
    assert search_of(disk)(3) == (4, offset_of(4))


def test_an_index_with_lost_offsets_does_not_end_damage():
    disk = new_disk()
    fill_segment(new_segment(disk), [200])
    disk.make_unreadable(SEG, offset_of(3) + 40, offset_of(3) + 40)
    file = PartlyReadableFile(disk.open(SEG))
    file.pread(60, offset_of(3))
    size = len(disk.visible_content(SEG))
    behind = HoleSearch(file, OffsetIndex(disk.open(IDX), BLANK), 0, last=199).record_after
    assert behind(3, offset_of(3), size) is not None
    disk.overwrite(IDX, SEGMENT_HEADER_BYTES + 8 * 150, bytes(8))
    behind = HoleSearch(file, OffsetIndex(disk.open(IDX), BLANK), 0, last=199).record_after
    with pytest.raises(ReadFailed, match=r"cannot find the records after 3: .* in both"):
        behind(3, offset_of(3), size)


def test_without_an_index_a_record_is_ignored_if_the_space_before_it_is_too_small():
    disk = with_later_records(offset_of(2) + 30)
    disk.write_durably(IDX, disk.visible_content(IDX)[:SEGMENT_HEADER_BYTES])
    # Eight records before the tenth need 320 bytes.
    assert search_of(disk)(2) == (6, offset_of(6))


def test_a_record_above_the_last_id_does_not_hide_later_records():
    disk = with_later_records(offset_of(8) + 30)
    disk.write_durably(IDX, disk.visible_content(IDX)[:SEGMENT_HEADER_BYTES])
    assert search_of(disk, last=9)(2) is None
    disk.overwrite(SEG, offset_of(14), make_run(7, [20])[0])
    assert search_of(disk, last=9)(2) == (7, offset_of(14))


def test_a_record_above_the_last_confirmed_id_does_not_end_damage():
    disk = new_disk()
    fill_segment(new_segment(disk), [20])
    disk.flip_bits(SEG, offset_of(6) + 40)
    assert search_of(disk, last=7)(6) == (7, offset_of(7))
    assert search_of(disk, last=6)(6) is None


def test_an_empty_index_is_read_once(monkeypatch):
    disk = new_disk()
    fill_segment(new_segment(disk), [20])
    known = disk.visible_content(IDX)
    disk.write_durably(IDX, known[:SEGMENT_HEADER_BYTES] + bytes(8 * 20))
    requests = []
    search = record_search.find_record

    def counted(*args, starts, **named):
        requests.append(starts.size)
        return search(*args, starts=starts, **named)

    monkeypatch.setattr(record_search, "find_record", counted)
    behind = search_of(disk)
    assert [behind(hole) for hole in (2, 5, 7)] == [(each, offset_of(each)) for each in (3, 6, 8)]
    assert requests == [17, 0, 0]
    # The search stores the positions that it has found.
    disk.write_durably(
        IDX,
        known[: SEGMENT_HEADER_BYTES + 8 * 3] + bytes(8) + known[SEGMENT_HEADER_BYTES + 8 * 4 :],
    )
    behind = search_of(disk)
    assert [behind(hole) for hole in (2, 5, 7)] == [(each, offset_of(each)) for each in (3, 6, 8)]
    assert requests[3:] == [17, 14, 12]


def possible_places(data, after, space):
    """Return where a record may begin, byte by byte."""
    id_max = after + space // 40 + 1_000_000
    for position in range(len(data) - 36 + 1):
        found, _, _, stated, _ = RECORD_PREFIX.unpack_from(data, position)
        if after < found <= id_max and 0 <= stated <= space - position - 40:
            yield position


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 16])
def test_record_positions_do_not_depend_on_the_step_size(monkeypatch, step):
    monkeypatch.setattr(record_search, "_STEP_BYTES", step)
    rng = Random(step)
    found = 0
    for size in (0, 35, 36, 37, 400):
        for fill in (0, 1, 255):
            # Small numbers everywhere, so that many of them look like IDs and lengths.
            data = bytes(rng.choice((0, 0, 0, fill, rng.randrange(40))) for _ in range(size))
            for after in (0, 5, 1 << 40):
                for space in (size, 40, 3000):
                    expected = list(possible_places(data, after, space))
                    assert list(_candidate_offsets(data, after, space)) == expected
                    found += len(expected)
    assert found > 50


def test_a_search_after_damage_takes_little_more_memory_than_it_reads_at_once():
    disk = new_disk()
    records, lengths = make_run(9, [500_000])
    path = ROOT / "rotten"
    file = disk.open(path, create=True)
    file.pwrite([Random(1).randbytes(9 * MIB), records], 0)
    tracemalloc.start()
    try:
        record = find_record(file, 0, 3, size=file.size(), starts=NOWHERE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert record == (9, 9 * MIB, False)
    assert int(lengths[0]) == len(records)
    assert peak < 24 * MIB


class CountingFile:
    """A file that counts the bytes that are read."""

    def __init__(self, content):
        self.content = content
        self.read_bytes = 0

    def pread(self, size, offset):
        found = self.content[offset : offset + size]
        self.read_bytes += len(found)
        return found


def test_data_that_resembles_long_records_is_searched_quickly():
    forged = RECORD_PREFIX.pack(8, bytes(16), 7, 6 * MIB, 0)
    records, _ = make_run(8, [100])
    content = forged * 50 + records + bytes(7 * MIB)
    file = CountingFile(content)
    record = find_record(file, 0, 7, size=len(content), starts=NOWHERE)
    assert record == (8, 50 * len(forged), False)
    assert file.read_bytes < 2 * len(content)


def test_unreadable_blocks_are_zeros_and_are_read_once():
    disk = new_disk()
    content = Random(3).randbytes(20_000)
    disk.write_durably(SEG, content)
    disk.make_unreadable(SEG, 5_000, 5_000)
    file = PartlyReadableFile(disk.open(SEG))
    assert file.pread(4_096, 0) == content[:4_096]
    assert not file.has_unreadable
    expected = content[:4_096] + bytes(4_096) + content[8_192:]
    assert file.pread(30_000, 0) == expected
    assert file.has_unreadable
    before = disk.read_count
    assert file.pread(100, 4_100) == bytes(100)
    assert disk.read_count == before
    assert file.pread(300, 8_000) == expected[8_000:8_300]
