"""The two indexes of a segment: offsets can be rebuilt, and batches cannot be rebuilt."""

from random import Random

import numpy as np
import pytest

from tests.unit.storage.logs import BLANK, KEY, ROOT, make_batches, new_disk
from waltz_core.errors import ChecksumMismatch
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN
from waltz_core.storage.disk.file_system import RealDisk, create_durably
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    LineageHeader,
)
from waltz_core.storage.files.index import LineageFile, OffsetIndex
from waltz_sim.world.simulated_disk import Survival

IDX, CHN = ROOT / "i.idx", ROOT / "c.chn"


def new_index(disk):
    create_durably(disk, ROOT, [(IDX.name, BLANK.encode())])
    return OffsetIndex(disk.open(IDX), BLANK)


def test_a_rewrite_over_lost_sectors_keeps_the_header_and_readable_entries():
    disk = new_disk()
    index = new_index(disk)
    index.write(0, np.arange(300))
    index.sync()
    disk.make_unreadable(IDX, 0, 0)
    disk.make_unreadable(IDX, 1_024, 1_024)
    index.overwrite(130, np.arange(130, 140))  # in the third sector; the first sector stays lost
    assert index.read(130, 170).tolist() == [*range(130, 140), *[0] * 36, *range(176, 300)]
    index.overwrite(3, np.arange(3, 5))
    assert disk.visible_content(IDX)[:SEGMENT_HEADER_BYTES] == BLANK.encode()
    assert index.read(0, 60).tolist() == [0, 0, 0, 3, 4, *[0] * 43, *range(48, 60)]
    index.overwrite(0, np.arange(300))
    assert index.read(0, 300).tolist() == list(range(300))


def new_lineage(disk, chain_before=GENESIS_CHAIN):
    header = LineageHeader(BLANK, chain_before)
    create_durably(disk, ROOT, [(CHN.name, header.encode())])
    return LineageFile(disk.open(CHN), header)


def filled_lineage(disk, counts=(3, 1, 5, 2), first=0):
    """A lineage file of batches, and the entries in it."""
    lineage = new_lineage(disk)
    entries = make_batches(first, counts)[2]
    lineage.append(entries, BEFORE_FIRST)
    lineage.sync()
    return lineage, entries


def entry_offset(position):
    return LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES * position


# ---- offsets


def test_a_read_of_offsets_ends_at_the_last_offset():
    index = new_index(new_disk())
    assert index.count == 0
    assert index.read(0, 5).tolist() == []
    index.write(0, np.array([128, 170, 260]))
    index.write(3, np.array([300]))
    assert index.read(2, 99).tolist() == [260, 300]
    index.write(1, np.array([171]))
    assert (index.count, index.read(0, 4).tolist()) == (4, [128, 171, 260, 300])
    index.write(4, np.array([], dtype=np.int64))
    index.add(350)
    assert (index.count, index.read(3, 9).tolist()) == (5, [300, 350])


def test_after_a_power_loss_only_the_synced_part_of_an_index_remains():
    disk = new_disk()
    index = new_index(disk)
    index.write(0, np.array([128, 170]))
    index.sync()
    index.write(2, np.array([260]))
    index.truncate(1)
    disk.lose_power(Survival.NOTHING, Random(1))
    index = OffsetIndex(disk.open(IDX), BLANK)
    assert index.read(0, 9).tolist() == [128, 170]
    index.truncate(1)
    index.sync()
    disk.lose_power(Survival.NOTHING, Random(1))
    assert OffsetIndex(disk.open(IDX), BLANK).count == 1


def test_a_partial_offset_at_the_end_is_ignored(tmp_path):
    path = tmp_path / "i.idx"
    path.write_bytes(BLANK.encode() + (128).to_bytes(8, "big") + b"\0\0\0")
    assert path.stat().st_size == SEGMENT_HEADER_BYTES + 11
    index = OffsetIndex(RealDisk().open(path), BLANK)
    assert (index.count, index.read(0, 2).tolist()) == (1, [128])
    index.close()


# ---- batches


def test_the_position_of_an_id_is_the_first_batch_that_ends_at_or_after_it():
    lineage, entries = filled_lineage(new_disk(), (3, 1, 5, 2))
    for wanted in range(14):
        expected = next((i for i, entry in enumerate(entries) if entry.last >= wanted), 4)
        assert lineage.position_of(wanted) == expected
    assert new_lineage(new_disk()).position_of(0) == 0


@pytest.mark.parametrize("damaged", range(6))
def test_the_position_is_found_despite_an_unreadable_entry(damaged):
    disk = new_disk()
    lineage, entries = filled_lineage(disk, (2,) * 6)
    disk.flip_bits(CHN, entry_offset(damaged) + 4)
    with pytest.raises(ChecksumMismatch):
        lineage.entry(damaged)
    with pytest.raises(ChecksumMismatch):
        list(lineage.entries(0))
    for position, entry in enumerate(entries):
        if position not in {damaged, damaged + 1}:
            assert lineage.position_of(entry.last) == position
    # The unreadable entry may contain these IDs, so the search does not skip it.
    assert lineage.position_of(entries[damaged].last) in {damaged, damaged + 1}


def test_a_torn_end_is_truncated_and_earlier_damage_is_kept():
    disk = new_disk()
    lineage, entries = filled_lineage(disk, (2,) * 5)
    disk.flip_bits(CHN, entry_offset(1))
    disk.flip_bits(CHN, entry_offset(3))
    disk.flip_bits(CHN, entry_offset(4))
    lineage.trim_invalid()
    assert lineage.count == 3
    assert len(disk.visible_content(CHN)) == entry_offset(3)
    assert lineage.entry(2) == entries[2]
    lineage.append(entries[3:4], BEFORE_FIRST)
    assert lineage.entry(3) == entries[3]


def test_the_newest_synced_id_of_readable_entries_is_used():
    disk = new_disk()
    lineage = new_lineage(disk)
    entries = make_batches(0, (2,) * 4)[2]
    for entry, synced in zip(entries, (BEFORE_FIRST, 1, 3, 3), strict=True):
        lineage.append([entry], synced)
    assert [lineage.durable_before(position) for position in range(5)] == [3, 3, 3, 3, BEFORE_FIRST]
    disk.flip_bits(CHN, entry_offset(2))
    disk.flip_bits(CHN, entry_offset(3))
    assert lineage.durable_before(0) == 1
    assert lineage.durable_before(2) == BEFORE_FIRST


def test_a_header_is_rewritten_durably_without_changing_entries():
    disk = new_disk()
    lineage, entries = filled_lineage(disk)
    lineage.rewrite_header(KEY)
    disk.lose_power(Survival.NOTHING, Random(1))
    header = LineageHeader.decode(disk.visible_content(CHN)[:LINEAGE_HEADER_BYTES])
    assert header.chain_before == KEY
    again = LineageFile(disk.open(CHN), header)
    assert again.chain_at(0) == KEY
    assert list(again.entries(0)) == entries


@pytest.mark.parametrize(("source", "target"), [(1, 2), (3, 0)])
def test_an_entry_copied_to_another_position_is_invalid(source, target):
    disk = new_disk()
    lineage, _ = filled_lineage(disk)
    data = disk.visible_content(CHN)[entry_offset(source) :][:LINEAGE_ENTRY_BYTES]
    disk.open(CHN).pwrite([data], entry_offset(target))
    with pytest.raises(ChecksumMismatch):
        lineage.entry(target)


def test_an_entry_of_another_segment_is_invalid():
    disk = new_disk()
    _, entries = filled_lineage(disk)
    other = LineageFile(disk.open(CHN), LineageHeader(BLANK._replace(created_ms=6), GENESIS_CHAIN))
    with pytest.raises(ChecksumMismatch):
        other.entry(0)
    assert other.unreadable_runs() == [(0, len(entries))]
