"""A truncation: its recorded intent, its end, and its repetition."""

from random import Random

import pytest

from tests.unit.storage.logs import ROOT, make_segments, new_disk
from waltz_core.errors import ChecksumMismatch, DiskFailed, NoSpace
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN
from waltz_core.storage.files.batch_checks import check_chain
from waltz_core.storage.files.format import (
    AckedMarker,
    IdRange,
    ProvisionalMark,
    Slot,
    TruncateIntent,
    segment_name,
)
from waltz_core.storage.log import truncation
from waltz_core.storage.log.truncation import plan_truncation
from waltz_sim.world.simulated_disk import DiskFault, Survival

RECORD_BYTES = 60


def test_an_intent_to_truncate_removes_marks_above_the_truncation_from_the_slot():
    segments, _, entries = make_segments(new_disk(), [3, 5], [2])
    ends = [AckedMarker(entry.last, entry.chain) for entry in entries]
    slot = Slot(2, acked=ends[2], provisional=ProvisionalMark(4, 9), damaged=(IdRange(1, 6),))
    cut, _ = plan_truncation(segments, 5)
    found = truncation.slot_with_intent(slot, segments, 5)
    assert found.truncate == TruncateIntent(5, cut)
    assert (found.acked, found.provisional, found.damaged) == (ends[0], None, slot.damaged)
    assert (cut.first, cut.last, cut.session_id) == (3, 5, entries[1].session_id)
    assert check_chain([cut], 3, entries[0].chain, segments.record_crcs(3, 5)) is None
    assert plan_truncation(segments, BEFORE_FIRST) == (
        None,
        AckedMarker(BEFORE_FIRST, GENESIS_CHAIN),
    )
    kept = Slot(2, acked=ends[0], provisional=ProvisionalMark(4, 5))
    found = truncation.slot_with_intent(kept, segments, 7)
    assert (found.truncate, found.acked) == (TruncateIntent(7, None), ends[0])
    assert found.provisional == ProvisionalMark(4, 5)


def test_an_unreadable_batch_is_not_truncated_partially():
    disk = new_disk()
    segments, _, _ = make_segments(disk, [3, 5])
    disk.flip_bits(ROOT / segment_name(0, ".seg"), 128 + 4 * RECORD_BYTES + 44)
    with pytest.raises(ChecksumMismatch, match=r"records 3\.\.5: cannot shorten their batch"):
        truncation.slot_with_intent(Slot(2), segments, 5)
    assert truncation.slot_with_intent(Slot(2), segments, 2).truncate == TruncateIntent(2, None)


def test_a_removed_segment_does_not_return_after_a_failed_directory_sync():
    disk = new_disk()
    segments, _, _ = make_segments(disk, [3, 5], [2])
    slot = truncation.slot_with_intent(Slot(2), segments, 5)
    disk.plan_fault_at_call({"syncdir"}, DiskFault.DISK_FULL)
    with pytest.raises(NoSpace):
        truncation.carry_out(segments, slot.truncate)
    truncation.carry_out(segments, slot.truncate)
    disk.lose_power(Survival.NOTHING, Random(1))
    names = [name for name in disk.list(ROOT) if name.endswith(".seg")]
    assert names == [segment_name(0, ".seg")]


def test_a_truncation_without_space_is_repeated_after_any_step():
    lacked = 0
    for step in range(1, 40):
        disk = new_disk()
        segments, records, entries = make_segments(disk, [3, 5], [2], [4])
        slot = truncation.slot_with_intent(Slot(2, damaged=(IdRange(4, 9),)), segments, 5)
        disk.plan_fault(disk.step_count + step, DiskFault.DISK_FULL)
        try:
            truncation.carry_out(segments, slot.truncate)
        except NoSpace:
            lacked += 1
            truncation.carry_out(segments, slot.truncate)
        except DiskFailed:
            continue  # a sync without space is a permanent failure
        else:
            break
        assert segments.read(0, 5)[0] == records[: 6 * RECORD_BYTES]
        assert list(segments.entries_from(0)) == [entries[0], slot.truncate.shortened]
        after = truncation.slot_after_truncation(slot, segments)
        assert (after.truncate, after.damaged) == (None, (IdRange(4, 5),))
        assert after.acked == AckedMarker(5, slot.truncate.shortened.chain)
    assert lacked > 6
