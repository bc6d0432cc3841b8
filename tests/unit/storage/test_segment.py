"""One segment: reads return what was appended, torn tails are removed, damage is recorded."""

from random import Random

import numpy as np
import pytest

from tests.unit.storage.logs import (
    BLANK,
    KEY,
    ROOT,
    fill_segment,
    make_batches,
    make_run,
    new_disk,
    new_segment,
    open_segment,
)
from waltz_core.errors import BadFormat, ChecksumMismatch, DiskFailed, MissingSegment
from waltz_core.records.record import BEFORE_FIRST
from waltz_core.storage.disk.file_system import remove_temporary_files
from waltz_core.storage.files import segment as segment_file
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES, IdRange, segment_name
from waltz_core.storage.files.segment import Segment
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, Survival

SEG, IDX, CHN = (ROOT / segment_name(0, suffix) for suffix in (".seg", ".idx", ".chn"))
RECORD_BYTES = 60  # the size of a record of `fill_segment`


def offset_of(transaction_id):
    return SEGMENT_HEADER_BYTES + RECORD_BYTES * transaction_id


# ---- files


def test_a_segment_gets_its_name_only_when_it_is_complete():
    for step in range(1, 20):
        disk = new_disk()
        disk.plan_fault(disk.step_count + step, DiskFault.POWER_LOSS)
        try:
            new_segment(disk)
        except PowerLoss:
            disk.lose_power(Survival.ANY_SECTORS, Random(step))
            remove_temporary_files(disk, ROOT)
            names = disk.list(ROOT)
            assert SEG.name not in names or names == sorted([SEG.name, IDX.name, CHN.name])
            if SEG.name in names:
                assert open_segment(disk).last == BEFORE_FIRST
        else:
            assert step > 12
            return
    pytest.fail("no creation completed without a crash")


def test_synced_records_are_read_back_after_a_power_loss():
    disk = new_disk()
    segment = new_segment(disk)
    assert (segment.last, segment.is_dirty) == (BEFORE_FIRST, False)
    records, entries = fill_segment(segment, [3, 2])
    assert not segment.is_dirty
    disk.lose_power(Survival.NOTHING, Random(1))
    segment = open_segment(disk)
    assert (segment.last, segment.size_bytes) == (4, len(disk.visible_content(SEG)))
    assert segment.is_plausible()
    found, lengths = segment.read(0, 4)
    assert found == records
    assert lengths.tolist() == [RECORD_BYTES] * 5
    assert segment.read(2, 3)[0] == records[2 * RECORD_BYTES : 4 * RECORD_BYTES]
    assert list(segment.lineage.entries(0)) == entries


def test_a_file_of_a_segment_is_synced_only_if_it_has_unsynced_writes():
    segment = new_segment(new_disk())
    records, lengths, entries = make_batches(0, [2])
    segment.append(lengths, records)
    assert (segment.is_dirty, segment.sync()) == (True, 1)
    segment.append_entries([], BEFORE_FIRST)
    assert (segment.is_dirty, segment.sync()) == (False, 0)
    segment.append_entries(entries, BEFORE_FIRST)
    assert segment.sync() == 1
    segment.append(*reversed(make_run(2, [5])))
    segment.forget()
    assert (segment.is_dirty, segment.sync()) == (False, 0)


def test_a_segment_of_another_log_is_rejected():
    disk = new_disk()
    new_segment(disk).close()
    for partition_id, key in ((1, KEY), (2, bytes(16))):
        with pytest.raises(BadFormat, match="expected a segment of partition"):
            Segment.open(disk, ROOT, 0, partition_id=partition_id, cluster_key=key)
    disk.rename(SEG, ROOT / segment_name(7, ".seg"))
    with pytest.raises(BadFormat, match="from transaction 7"):
        open_segment(disk, 7)
    disk.rename(ROOT / segment_name(7, ".seg"), SEG)
    disk.flip_bits(SEG, 60)
    with pytest.raises(BadFormat, match=rf"{SEG.name}: segment header: expected zero"):
        open_segment(disk)


def test_batches_of_another_segment_are_rejected():
    disk = new_disk()
    new_segment(disk).close()
    new_segment(disk, 7).close()
    disk.write_durably(CHN, disk.visible_content(ROOT / segment_name(7, ".chn")))
    with pytest.raises(BadFormat, match="belongs to another segment"):
        open_segment(disk)


# ---- cutting and filling


def test_appends_continue_after_a_truncation():
    disk = new_disk()
    segment = new_segment(disk)
    records, entries = fill_segment(segment, [3, 2, 4])
    segment.truncate(4)
    assert (segment.last, segment.size_bytes) == (4, offset_of(5))
    assert list(segment.lineage.entries(0)) == entries[:2]
    more, _ = fill_segment(segment, [2], entries[1].chain, seed=9)
    assert segment.read(0, 6)[0] == records[: 5 * RECORD_BYTES] + more
    segment.truncate(3)
    assert list(segment.lineage.entries(0)) == entries[:1]
    segment.truncate(BEFORE_FIRST)
    assert (segment.last, segment.size_bytes) == (BEFORE_FIRST, SEGMENT_HEADER_BYTES)
    assert segment.lineage.count == 0
    assert segment.is_plausible()


def test_damage_at_the_end_is_repaired_with_a_record_of_another_size():
    disk = new_disk()
    segment = new_segment(disk)
    records, _ = fill_segment(segment, [4])
    run, lengths = make_run(3, [500])
    segment.fill(lengths, run, IdRange(3, 3))
    assert segment.read(0, 3)[0] == records[: 3 * RECORD_BYTES] + run
    assert segment.size_bytes == len(disk.visible_content(SEG))


# ---- after a crash


@pytest.mark.parametrize("cut", [0, 1, 30, 59])
def test_an_unconfirmed_torn_tail_is_truncated(cut):
    disk = new_disk()
    records, _ = fill_segment(new_segment(disk), [5])
    if cut:
        disk.write_durably(SEG, disk.visible_content(SEG)[:-cut])
    else:
        disk.flip_bits(SEG, offset_of(4) + 40)
    segment = open_segment(disk)
    assert segment.is_plausible() == (not cut)
    assert segment.recover(0, 3, is_last=True) == ((), False)
    assert segment.last == 3
    assert segment.read(0, 3)[0] == records[: 4 * RECORD_BYTES]
    assert len(disk.visible_content(SEG)) == segment.size_bytes == offset_of(4)


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_confirmed_damage_is_kept_and_repaired_durably(bad):
    disk = new_disk()
    records, _ = fill_segment(new_segment(disk), [6])
    disk.flip_bits(SEG, offset_of(bad) + 40)
    segment = open_segment(disk)
    assert segment.recover(0, 5, is_last=True) == ((IdRange(bad, bad),), False)
    assert segment.last == 5
    good = records[bad * RECORD_BYTES : (bad + 1) * RECORD_BYTES]
    segment.fill(np.array([RECORD_BYTES]), good, IdRange(bad, bad))
    disk.lose_power(Survival.NOTHING, Random(1))
    assert open_segment(disk).read(0, 5)[0] == records


def test_intact_records_with_a_wrong_id_do_not_end_damage():
    """A misdirected write: copies of later records overwrite the beginning; the originals remain
    where they belong (seed 520000203)."""
    disk = new_disk()
    records, _ = fill_segment(new_segment(disk), [30])
    page_offset = offset_of(0) + 17  # a page may begin anywhere in a record
    disk.overwrite(SEG, page_offset, disk.visible_content(SEG)[offset_of(12) : offset_of(18) + 30])
    segment = open_segment(disk)
    assert segment.recover(0, 29, is_last=True) == ((IdRange(0, 6),), False)
    good = records[: 7 * RECORD_BYTES]
    segment.fill(np.array([RECORD_BYTES] * 7), good, IdRange(0, 6))
    assert segment.read(0, 29)[0] == records


@pytest.mark.parametrize("piece", [1, 1 << 16])
def test_missing_records_of_an_older_segment_are_damage(piece, monkeypatch):
    monkeypatch.setattr(segment_file, "_HOLE_PIECE_IDS", piece)
    disk = new_disk()
    fill_segment(new_segment(disk), [6])
    disk.write_durably(SEG, disk.visible_content(SEG)[: offset_of(4) + 7])
    segment = open_segment(disk)
    assert segment.recover(0, 5, is_last=False) == ((IdRange(4, 5),), False)
    assert segment.last == 5


def test_an_impossible_gap_of_ids_allocates_no_memory():
    """For example, all segments between two others are missing, or a file has a wrong name."""
    disk = new_disk()
    fill_segment(new_segment(disk), [6])
    segment = open_segment(disk)
    with pytest.raises(MissingSegment, match="to 4611686018427387904: expected at most"):
        segment.recover(0, 1 << 62, is_last=False)
    assert len(disk.visible_content(IDX)) < 1_000


@pytest.mark.parametrize("is_damaged", [False, True])
def test_extra_bytes_are_truncated_only_if_no_record_of_the_segment_is_damaged(is_damaged):
    disk = new_disk()
    fill_segment(new_segment(disk), [6])
    disk.write_durably(SEG, disk.visible_content(SEG) + b"more")
    if is_damaged:
        disk.flip_bits(SEG, offset_of(2) + 40)
    damaged = (IdRange(2, 2),) if is_damaged else ()
    assert open_segment(disk).recover(0, 5, is_last=False) == (damaged, False)
    assert disk.visible_content(SEG).endswith(b"more") == is_damaged


def test_a_wrong_index_is_detected_and_repaired():
    disk = new_disk()
    records, _ = fill_segment(new_segment(disk), [6])
    disk.flip_bits(IDX, SEGMENT_HEADER_BYTES + 8 * 3 + 7, 4)
    segment = open_segment(disk)
    disk.flip_bits(IDX, SEGMENT_HEADER_BYTES + 8 * 3)
    with pytest.raises(ChecksumMismatch, match="wrong from record 2 on"):
        segment.bounds(2, 4)
    assert segment.recover(3, 5, is_last=True) == ((), False)
    assert segment.read(0, 5)[0] == records


@pytest.mark.parametrize("position", [0, 5])
def test_an_index_with_offsets_beyond_the_file_allocates_no_memory(position):
    disk = new_disk()
    fill_segment(new_segment(disk), [6])
    # The first offset becomes 0, or the last one grows by 2**62.
    disk.overwrite(IDX, SEGMENT_HEADER_BYTES, bytes(8)) if position == 0 else disk.flip_bits(
        IDX, SEGMENT_HEADER_BYTES + 8 * position, 0x40
    )
    segment = open_segment(disk)
    with pytest.raises(ChecksumMismatch, match="wrong from record"):
        segment.read(0, max(0, position - 1))


def test_offsets_with_too_large_differences_do_not_count_as_ascending():
    disk = new_disk()
    fill_segment(new_segment(disk), [6])
    disk.write_durably(SEG, disk.visible_content(SEG)[: offset_of(4) + 30])
    wrong = b"".join(one.to_bytes(8, "big", signed=True) for one in (1 << 62, -(1 << 63) + 1))
    disk.overwrite(IDX, SEGMENT_HEADER_BYTES + 8 * 5, wrong[:8])
    disk.write_durably(IDX, disk.visible_content(IDX) + wrong[8:])
    segment = open_segment(disk)
    found = segment.recover(0, 6, is_last=True)
    assert found.damaged == (IdRange(4, 6),)
    assert segment.bounds(4, 6).tolist() == [offset_of(4)] * 3 + [offset_of(4) + 30]


# ---- after a failed sync


def test_rewritten_pages_are_durable_even_if_the_page_cache_marks_them_as_clean():
    disk = new_disk()
    segment = new_segment(disk)
    fill_segment(segment, [2])
    records, lengths, entries = make_batches(2, [3], segment.lineage.chain_at(1))
    segment.append(lengths, records)
    segment.append_entries(entries, 1)
    for _ in range(2):  # both files
        disk.plan_fault_at_call(("sync",), DiskFault.IO_ERROR)
        with pytest.raises(DiskFailed):
            segment.sync()
        segment._records_dirty = False
    segment.write_again(2)
    assert not segment.is_dirty
    disk.lose_power(Survival.NOTHING, Random(1))
    segment = open_segment(disk)
    assert (segment.last, segment.read(2, 4)[0]) == (4, records)
    assert list(segment.lineage.entries(1)) == entries


@pytest.mark.parametrize("synced", [BEFORE_FIRST, 0, 1])
def test_index_entries_lost_in_a_failed_sync_are_rebuilt_from_records(synced):
    disk = new_disk()
    segment = new_segment(disk)
    records, lengths, _ = make_batches(0, [3])
    segment.append(lengths[:2], records[: int(lengths[:2].sum())])
    segment.sync_index()
    segment.append(lengths[2:], records[int(lengths[:2].sum()) :])
    segment.sync()
    disk.plan_fault_at_call(("sync",), DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        segment.sync_index()
    disk.drop_all_cached()
    segment.copy_index(synced)
    disk.lose_power(Survival.NOTHING, Random(1))
    assert open_segment(disk).read(0, 2)[0] == records


def test_the_record_file_of_a_removed_segment_is_removed_first():
    disk = new_disk()
    segment = new_segment(disk)
    begin = len(disk.trace)
    segment.remove()
    assert disk.trace[begin:] == [
        f"unlink {SEG.name}",
        "syncdir storage",
        f"unlink {CHN.name}",
        f"unlink {IDX.name}",
    ]


def test_a_lost_index_header_is_rewritten_and_an_index_with_a_wrong_header_is_not_used():
    disk = new_disk()
    fill_segment(new_segment(disk), [100])
    path = ROOT / segment_name(0, ".idx")
    before = disk.visible_content(path)
    disk.make_unreadable(path, 0, 0)
    assert open_segment(disk).next_id == 100
    for content in (disk.visible_content(path), bytes(128) + before[128:]):
        disk.write_durably(path, content)
        open_segment(disk)
        assert disk.visible_content(path)[:128] == before[:128]
        assert len(disk.visible_content(path)) == len(before)
    disk.write_durably(path, BLANK._replace(first=999).encode() + before[128:])
    disk.plan_read_failure(2)  # the first of the two reads of its header
    assert open_segment(disk).next_id == 0
    assert disk.visible_content(path) == before[:128]
