"""Many segments as one log: reads, batches and truncations across file borders."""

from random import Random

import numpy as np
import pytest

from tests.unit.storage.logs import (
    BLANK,
    ROOT,
    make_batches,
    make_run,
    make_segments,
    new_disk,
    new_segment,
    open_segment,
)
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    IdRange,
    LineageHeader,
    encode_entry,
    segment_name,
)
from waltz_core.storage.files.segments import Segments, first_invalid_record
from waltz_sim.world.simulated_disk import Survival

RECORD_BYTES = 60


def bytes_of(records, first, last):
    return records[first * RECORD_BYTES : (last + 1) * RECORD_BYTES]


def reopen(disk, *firsts):
    return Segments(disk, ROOT, BLANK, [open_segment(disk, first) for first in firsts])


def segments_with_spanning_batch(disk):
    """Segments 0..4, 5..6, 7..9 of which the batch 3..8 spans all three."""
    segments, records, entries = make_segments(disk, [3])
    more, lengths, batches = make_batches(3, [6, 1], entries[-1].chain)
    for count in (2, 2, 3):
        segments.current.append(lengths[:count], more[: count * RECORD_BYTES])
        records += more[: count * RECORD_BYTES]
        lengths, more = lengths[count:], more[count * RECORD_BYTES :]
        if lengths.size:
            segments.sync()
            segments.sync_index()
            segments.add(5, entries[-1].chain)
    segments.current.append_entries(batches, BEFORE_FIRST)
    segments.sync()
    segments.sync_index()
    return segments, records, entries + batches


def test_a_read_crosses_segments_and_returns_at_least_one_record():
    segments, records, _ = make_segments(new_disk(), [3], [1, 1], [4])
    for first in range(9):
        for bytes_max in range(0, 10 * RECORD_BYTES, 13):
            last = segments.last_fitting_id(first, 8, bytes_max)
            assert last == min(8, first + max(1, bytes_max // RECORD_BYTES) - 1)
            found, lengths = segments.read(first, last)
            assert found == bytes_of(records, first, last)
            assert lengths.tolist() == [RECORD_BYTES] * (last - first + 1)
    assert segments.last_fitting_id(1, 2, 1 << 30) == 2


def test_chains_are_known_only_at_the_ends_of_batches():
    segments, _, entries = segments_with_spanning_batch(new_disk())
    ends = {entry.last: entry.chain for entry in entries} | {BEFORE_FIRST: GENESIS_CHAIN}
    for transaction_id in range(-2, 12):
        assert segments.chain_at(transaction_id) == ends.get(transaction_id)
    assert segments.chain == entries[-1].chain
    assert segments.lineage_end() == entries[-1]


def test_batches_of_a_range_are_returned_with_the_chain_before_them():
    segments, _, entries = segments_with_spanning_batch(new_disk())
    for first in range(10):
        for last in range(first, 10):
            expected = [entry for entry in entries if entry.last >= first and entry.first <= last]
            position = entries.index(expected[0])
            before = entries[position - 1].chain if position else GENESIS_CHAIN
            assert segments.entries(first, last, 99) == (before, tuple(expected))
            assert segments.entry_of(first) == expected[0]
            assert list(segments.entries_from(first)) == entries[position:]
    assert segments.entries(0, 9, 1) == (entries[1].chain, (entries[2],))
    assert segments.entry_of(10) is None
    assert segments.entries(10, 10, 5) == (entries[-1].chain, ())


@pytest.mark.parametrize("last_to_keep", range(-1, 9))
def test_a_truncation_may_cross_segments_and_be_repeated(last_to_keep):
    disk = new_disk()
    segments, records, entries = make_segments(disk, [3], [1, 1], [4])
    for _ in range(2):
        segments.truncate(last_to_keep, None)
        assert segments.last_id == last_to_keep
    segments.sync()
    segments.sync_index()
    disk.lose_power(Survival.NOTHING, Random(1))
    firsts = [first for first in (0, 3, 5) if not first or first <= last_to_keep]
    names = [name for name in disk.list(ROOT) if name.endswith(".seg")]
    assert names == [segment_name(first, ".seg") for first in firsts]
    again = reopen(disk, *firsts)
    kept = [entry for entry in entries if entry.last <= last_to_keep]
    assert list(again.entries_from(0)) == kept
    assert again.chain == (kept[-1].chain if kept else GENESIS_CHAIN)
    if last_to_keep >= 0:
        assert again.read(0, last_to_keep)[0] == bytes_of(records, 0, last_to_keep)


def test_an_unknown_segment_is_removed_by_a_truncation():
    """The file got its name before its creation failed; the next opening must not use it."""
    disk = new_disk()
    segments, _, entries = make_segments(disk, [3])
    new_segment(disk, 3, entries[0].chain).close()
    segments.truncate(2, None)
    assert [name for name in disk.list(ROOT) if name.endswith(".seg")] == [segment_name(0, ".seg")]


def test_a_repeated_truncation_rewrites_the_batch_entry_once():
    segments, _, entries = segments_with_spanning_batch(new_disk())
    cut = entries[1]._replace(last=5, chain=bytes(range(16)))
    for _ in range(2):
        segments.truncate(5, cut)
        assert list(segments.entries_from(0)) == [entries[0], cut]
    assert (segments.last_id, segments.chain) == (5, cut.chain)


def test_damage_across_two_segments_is_repaired():
    disk = new_disk()
    segments, records, _ = make_segments(disk, [3], [1, 1], [4])
    for first, position in ((0, 2), (3, 0)):
        path = ROOT / segment_name(first, ".seg")
        disk.flip_bits(path, 128 + position * RECORD_BYTES + 44)
    assert segments.record_crcs(0, 1) is not None
    assert segments.record_crcs(0, 8) is None
    assert segments.diagnose(2) == (IdRange(2, 2),)
    segments.fill(
        2, np.array([RECORD_BYTES] * 2), memoryview(bytes_of(records, 2, 3)), IdRange(2, 3)
    )
    disk.lose_power(Survival.NOTHING, Random(1))
    assert reopen(disk, 0, 3, 5).read(0, 8)[0] == records
    run, lengths = make_run(1, [21])
    with pytest.raises(BadFormat, match="60 bytes, found 61 bytes"):
        reopen(disk, 0, 3, 5).fill(1, lengths, memoryview(run), IdRange(1, 1))


def test_appends_to_a_new_segment_do_not_change_the_old_one():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [3])
    segments.continue_in_new_file(9, entries[-1].chain, BEFORE_FIRST)
    assert [segment.first for segment in segments.all] == [0, 3]
    empty = segments.current
    segments.continue_in_new_file(9, entries[-1].chain, BEFORE_FIRST)
    assert [segment.first for segment in segments.all] == [0, 3]
    assert segments.current is not empty
    assert segments.chain == entries[-1].chain
    assert segments.lineage_end() == entries[-1]


def test_the_first_wrong_record_is_found_for_every_kind_of_damage():
    run, lengths = make_run(4, [0, 10, 20, 5])
    assert first_invalid_record(run, lengths, 4) is None
    assert first_invalid_record(run, lengths, 5) == 0
    bad = bytearray(run)
    bad[40 + 50 + 3] ^= 1
    assert first_invalid_record(bytes(bad), lengths, 4) == 2
    short = lengths.copy()
    short[1] = 7
    assert first_invalid_record(run, short, 4) == 1
    gap, more = make_run(9, [5])
    assert first_invalid_record(run + gap, np.append(lengths, more), 4) == 4


def test_an_entry_copied_from_another_position_is_not_trusted():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [2, 1, 3, 1])
    path, position = ROOT / segment_name(0, ".chn"), LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES
    segment_crc = LineageHeader(BLANK, GENESIS_CHAIN).segment_crc
    disk.overwrite(path, position, encode_entry(entries[3], 5, segment_crc=segment_crc, position=1))
    with pytest.raises(
        ChecksumMismatch,
        match=r"at transaction 2, after batch 0\.\.1, "
        r"found 6\.\.",
    ):
        segments.entries(0, 6, 9)
    assert segments.entries(6, 6, 9)[1] == (entries[3],)


def test_the_last_batches_of_a_running_log_are_not_reconstructed():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [2, 1, 3])
    path = ROOT / segment_name(0, ".chn")
    disk.flip_bits(path, len(disk.visible_content(path)) - 20)
    with pytest.raises(ChecksumMismatch, match="the last 1 of 3 batch"):
        segments.repair(0, 5)
    disk.flip_bits(path, len(disk.visible_content(path)) - 20)
    assert segments.repair(0, 5) == ()
    assert list(segments.entries(0, 5, 9)[1]) == entries
