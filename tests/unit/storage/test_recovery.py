"""Opening a log: what is trusted, truncated or damaged, and when a replica is suspect."""

import dataclasses
from random import Random

import pytest

from tests.unit.storage.logs import (
    BLANK,
    KEY,
    ROOT,
    make_batches,
    make_run,
    make_segments,
    new_disk,
    open_segment,
)
from waltz_core.errors import BadFormat, DiskFailed, MissingSegment, ReadFailed
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    RECONSTRUCTED,
    LineageEntry,
)
from waltz_core.storage.files.batch_checks import check_chain, check_repaired_batches
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME, SlotFile
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    NEW_PARTITION_INFOS,
    SEGMENT_HEADER_BYTES,
    SLOT_BLOCK_BYTES,
    SLOT_BYTES,
    AckedMarker,
    IdRange,
    Promise,
    Slot,
    TruncateIntent,
    segment_name,
)
from waltz_core.storage.files.record_search import SCAN_BYTES
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.log import log_recovery
from waltz_core.storage.log.log_recovery import open_log
from waltz_core.storage.log.truncation import plan_truncation
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimDisk, Survival

RECORD_BYTES = 60
INFO = NEW_PARTITION_INFOS[1]


def open_disk(disk, *, info=INFO, trust_fsync=True):
    return open_log(disk, ROOT, BLANK, info, trust_fsync=trust_fsync)


def write_log(disk, *counts_of_each, acked=None, **slot):
    """Write a log with slots next to it; `acked` is the number of batches that are acknowledged."""
    segments, records, entries = make_segments(disk, *counts_of_each)
    acked_entries = entries[: len(entries) if acked is None else acked]
    marker = AckedMarker(BEFORE_FIRST, GENESIS_CHAIN)
    if acked_entries:
        marker = AckedMarker(acked_entries[-1].last, acked_entries[-1].chain)
    fields = {"promised": 1, "last_session": 1, "dirty": True} | slot
    fields.setdefault("control_file_sequence", INFO.sequence)
    SlotFile.create(disk, ROOT, Slot(2, acked=marker, **fields))
    return segments, records, entries


def path_of(first, suffix):
    return ROOT / segment_name(first, suffix)


def rot_record(disk, first, transaction_id):
    offset = SEGMENT_HEADER_BYTES + RECORD_BYTES * (transaction_id - first) + 44
    disk.flip_bits(path_of(first, ".seg"), offset)


def content(segments):
    return segments.read(0, segments.last_id)[0] if segments.last_id >= 0 else b""


# ---- opening


def test_acknowledged_records_and_intact_records_after_them_are_kept():
    disk = new_disk()
    _, records, entries = write_log(disk, [3, 2], [4], acked=1)
    segments, slots = open_disk(disk)
    assert content(segments) == records
    assert list(segments.entries_from(0)) == entries
    assert slots.slot.acked == AckedMarker(8, entries[-1].chain)
    assert (slots.slot.suspect, slots.slot.damaged, slots.slot.dirty) == (False, (), True)


def test_a_damaged_record_does_not_confirm_a_batch():
    disk = new_disk()
    below = (IdRange(1, 1),)
    segments, _, entries = write_log(disk, [3, 2, 4], acked=1, damaged=below)
    rot_record(disk, 0, 1)
    segments.all[0].lineage.rewrite(1, [entries[1]._replace(session_id=7)])  # with another chain
    segments, slots = open_disk(disk)
    assert segments.last_id == 2
    assert list(segments.entries_from(0)) == entries[:1]
    assert (slots.slot.suspect, slots.slot.damaged) == (False, below)


def test_records_without_a_batch_entry_do_not_belong_to_the_log():
    disk = new_disk()
    _, records, _ = write_log(disk, [3, 2], acked=1)
    chn = path_of(0, ".chn")
    disk.write_durably(chn, disk.visible_content(chn)[: LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES])
    segments, slots = open_disk(disk)
    assert (content(segments), segments.last_id) == (records[: 3 * RECORD_BYTES], 2)
    assert not slots.slot.suspect


def test_a_log_that_ends_below_the_marker_is_suspect():
    disk = new_disk()
    write_log(disk, [3, 2, 4], acked=3)
    seg = path_of(0, ".seg")
    disk.write_durably(seg, disk.visible_content(seg)[: SEGMENT_HEADER_BYTES + 5 * RECORD_BYTES])
    segments, slots = open_disk(disk)
    assert segments.last_id == 4
    assert slots.slot.suspect


def test_a_log_with_another_history_below_the_marker_is_suspect():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [3])
    SlotFile.create(
        disk,
        ROOT,
        Slot(2, acked=AckedMarker(2, KEY), control_file_sequence=INFO.sequence, dirty=True),
    )
    assert open_disk(disk)[1].slot.suspect
    assert segments.chain == entries[-1].chain


def test_a_mark_above_lost_batches_is_lowered():
    disk = new_disk()
    _, records, entries = write_log(disk, [3, 2, 4], low_water_mark=8)
    disk.flip_bits(path_of(0, ".chn"), LINEAGE_HEADER_BYTES + 2 * LINEAGE_ENTRY_BYTES)
    before = disk.visible_content(ROOT / SLOTS_FILE_NAME)
    for _ in range(2):
        segments, slots = open_disk(disk)
        assert content(segments) == records
        found = list(segments.entries_from(0))
        assert found[:2] == entries[:2]
        assert {one.session_id for one in found[2:]} == {RECONSTRUCTED}
        assert (slots.slot.suspect, slots.slot.low_water_mark) == (True, 4)
        # Damage in reconstructed batches can be repaired.
        check_repaired_batches(segments, IdRange(6, 6), ())
        check_repaired_batches(segments, IdRange(1, 1), ())
        disk.write_durably(
            ROOT / SLOTS_FILE_NAME, before
        )  # a crash: the batches are durable, their slot is not


@pytest.mark.parametrize("trust_fsync", [True, False])
@pytest.mark.parametrize("dirty", [True, False])
def test_an_unclean_stop_makes_a_log_suspect_if_syncs_are_not_trusted(dirty, trust_fsync):
    disk = new_disk()
    write_log(disk, [3], dirty=dirty)
    slot = open_disk(disk, trust_fsync=trust_fsync)[1].slot
    assert slot.suspect == (dirty and not trust_fsync)


def _block(content, position):
    return content[SLOT_BLOCK_BYTES * position :][:SLOT_BYTES]


def test_a_fallback_to_the_older_slot_rejects_all_earlier_sessions():
    disk = new_disk()
    with_lost_newer_slot(disk, 9)
    slot = open_disk(disk, info=INFO._replace(session_id=4))[1].slot
    assert slot.suspect
    assert slot.promised == 5
    assert slot.nonce not in {b"", bytes(16)}
    # A second opening before any session has the same result: no owner can have a later promise.
    content = disk.visible_content(ROOT / SLOTS_FILE_NAME)
    older = min((0, 1), key=lambda position: Slot.decode(_block(content, position)).sequence)
    disk.flip_bits(ROOT / SLOTS_FILE_NAME, SLOT_BLOCK_BYTES * (1 - older) + 20)
    assert open_disk(disk, info=INFO._replace(session_id=4))[1].slot.promised == 5


def with_lost_newer_slot(disk, lost_promise, **older):
    """Write a log whose newer slot, with this promise, is lost."""
    write_log(disk, [3], **older)
    slots = SlotFile.open(disk, ROOT, 2)
    lost = Slot(
        2, promised=lost_promise, acked=slots.slot.acked, control_file_sequence=INFO.sequence
    )
    slots.write(lost)
    disk.flip_bits(ROOT / SLOTS_FILE_NAME, SLOT_BLOCK_BYTES * slots._position + 20)


def test_a_session_found_only_in_the_log_counts_as_promised():
    """The lost slot may have had the only promise, but the batches are in the log."""
    disk = new_disk()
    with_lost_newer_slot(disk, NO_SESSION, promised=0, last_session=0)
    segments, slots = open_disk(disk)
    assert segments.lineage_end().session_id == 1
    assert slots.slot.promised == 2


def failing(message):
    def fail(*_, **__):
        raise DiskFailed(message)

    return fail


def test_an_error_during_close_does_not_replace_the_first_error(monkeypatch):
    disk = new_disk()
    write_log(disk, [3], [2])
    before = disk.open_count
    close = Segment.close

    def close_and_fail(self):
        close(self)
        raise DiskFailed(f"closing {self.first}")

    def closes_fail(self, segments):
        patches.setattr(Segment, "close", close_and_fail)

    with monkeypatch.context() as patches:
        patches.setattr(log_recovery._LogOpening, "recover_batches", failing("the first"))
        patches.setattr(log_recovery._LogOpening, "recover_records", closes_fail)
        with pytest.raises(DiskFailed, match="the first") as caught:
            open_disk(disk)
    assert caught.value.__notes__ == ["and then: closing 0", "and then: closing 3"]
    assert disk.open_count == before


# ---- truncations


@pytest.mark.parametrize("last_to_keep", [0, 2, 4, 5, 8])
def test_opening_a_log_completes_a_truncation_that_has_an_intent(last_to_keep):
    disk = new_disk()
    segments, records, entries = write_log(disk, [3], [2], [4])
    cut, end = plan_truncation(segments, last_to_keep)
    slots = SlotFile.open(disk, ROOT, 2)
    acked = min(slots.slot.acked, end, key=lambda one: one.transaction_id)
    slots.write(
        Slot(
            2,
            promised=1,
            acked=acked,
            truncate=TruncateIntent(last_to_keep, cut),
            control_file_sequence=INFO.sequence,
            dirty=True,
        )
    )
    again, slots = open_disk(disk)
    assert content(again) == records[: (last_to_keep + 1) * RECORD_BYTES]
    kept = [one for one in entries if one.last <= last_to_keep] + ([cut] if cut else [])
    assert list(again.entries_from(0)) == kept
    assert slots.slot.truncate is None
    assert not slots.slot.suspect


# ---- files that are not a log


def test_missing_slots_are_reported_and_not_rebuilt():
    disk = new_disk()
    write_log(disk, [3])
    disk.unlink(ROOT / SLOTS_FILE_NAME)
    with pytest.raises(
        BadFormat,
        match=r"expected a file waltz-x\.ctl, because there are "
        r"\.chn files; found none",
    ):
        open_disk(disk)


def test_a_log_without_its_beginning_is_rejected():
    disk = new_disk()
    write_log(disk, [3], [2])
    for suffix in (".seg", ".idx", ".chn"):
        disk.unlink(path_of(0, suffix))
    with pytest.raises(
        MissingSegment, match="the oldest segment begins at transaction 0 or earlier, found 3"
    ):
        open_disk(disk)


def test_files_without_their_segment_are_removed():
    disk = new_disk()
    _, records, _ = write_log(disk, [3])
    disk.write_durably(path_of(3, ".idx"), b"x")
    disk.write_durably(path_of(3, ".chn"), b"x")
    disk.write_durably(ROOT / "anything.tmp", b"x")
    assert content(open_disk(disk)[0]) == records
    assert disk.list(ROOT) == sorted(
        [SLOTS_FILE_NAME, *(segment_name(0, suffix) for suffix in (".seg", ".idx", ".chn"))]
    )


@pytest.mark.parametrize("last", [3, 4, 6])
def test_a_batch_of_an_abandoned_file_is_ignored_after_a_crash(last):
    """The truncation of the file was not synced, and the next segment begins at the same ID."""
    disk = new_disk()
    _, records, entries = write_log(disk, [3], [2])
    segment = open_segment(disk)
    segment.append_entries([LineageEntry(3, last, 1, 5, KEY)], BEFORE_FIRST)
    segment.sync()
    segment.close()
    segments, slots = open_disk(disk)
    assert content(segments) == records
    assert list(segments.entries_from(0)) == entries
    assert not slots.slot.suspect


# ---- adopting


def test_a_directory_of_0_13_gets_batches_and_is_not_suspect():
    disk = new_disk()
    _, records, _ = make_segments(disk, [3], [4])
    for first in (0, 3):
        disk.unlink(path_of(first, ".chn"))
    info = INFO._replace(session_id=5, low_water_mark=4, local_low_water_mark=4, sequence=9)
    segments, slots = open_disk(disk, info=info)
    assert content(segments) == records
    entries = list(segments.entries_from(0))
    assert [(entry.first, entry.last, entry.session_id) for entry in entries] == [
        (0, 4, NO_SESSION),
        (5, 6, NO_SESSION),
    ]
    assert check_chain(entries, 0, GENESIS_CHAIN, segments.record_crcs(0, 6)) is None
    slot = slots.slot
    assert (slot.promised, slot.last_session, slot.low_water_mark) == (5, 5, 4)
    assert (slot.suspect, slot.control_file_sequence) == (False, 9)


ADOPTED = INFO._replace(session_id=5, low_water_mark=11, local_low_water_mark=11, sequence=9)


def adopt_0_13_log(spoil=lambda _disk: None):
    """Return the batches and the slot of an adopted 0.13 directory, optionally with corruption."""
    disk = new_disk()
    make_segments(disk, [6], [6])
    for first in (0, 6):
        disk.unlink(path_of(first, ".chn"))
    spoil(disk)
    segments, slots = open_disk(disk, info=ADOPTED)
    return list(segments.entries_from(0)), slots.slot


@pytest.mark.parametrize(
    ("spoil", "damaged"),
    [
        (lambda disk: rot_record(disk, 0, 3), (IdRange(3, 3),)),
        (lambda disk: disk.flip_bits(path_of(0, ".idx"), SEGMENT_HEADER_BYTES + 30), ()),
    ],
    ids=["record", "index"],
)
def test_corruption_before_the_adoption_does_not_change_the_chain(spoil, damaged):
    """With another chain, this replica could not be compared with the other replicas."""
    entries, slot = adopt_0_13_log(spoil)
    assert (entries, slot.damaged, slot.suspect) == (adopt_0_13_log()[0], damaged, False)


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_record_without_a_checksum_makes_an_adopted_log_suspect(is_zero):
    def spoil(disk):
        end = SEGMENT_HEADER_BYTES + 4 * RECORD_BYTES
        if is_zero:
            disk.overwrite(path_of(0, ".seg"), end - 10, bytes(10))
        else:
            disk.flip_bits(path_of(0, ".seg"), end - 1)

    entries, slot = adopt_0_13_log(spoil)
    assert (slot.damaged, slot.suspect) == ((IdRange(3, 3),), True)
    assert {entry.session_id for entry in entries} == {RECONSTRUCTED}
    assert slot.low_water_mark == BEFORE_FIRST


def test_an_adopted_log_opens_despite_an_unreadable_sector():
    disk = new_disk()
    make_segments(disk, [200], [6])
    for first in (0, 200):
        disk.unlink(path_of(first, ".chn"))
    position = SEGMENT_HEADER_BYTES + 90 * RECORD_BYTES
    disk.make_unreadable(path_of(0, ".seg"), position, position)
    marks = {"low_water_mark": 205, "local_low_water_mark": 205}
    segments, slots = open_disk(disk, info=ADOPTED._replace(**marks))
    (lost,) = slots.slot.damaged
    assert (lost.first <= 90 <= lost.last, slots.slot.suspect) == (True, True)
    assert {one.session_id for one in segments.entries_from(0)} == {RECONSTRUCTED}
    assert segments.last_id == 205


def test_a_damaged_record_above_a_0_13_mark_is_not_a_torn_tail():
    """Later records may have been acknowledged. The replica must not report that it lacks them."""
    disk = new_disk()
    _, records, _ = make_segments(disk, [12])
    disk.unlink(path_of(0, ".chn"))
    rot_record(disk, 0, 7)
    disk.write_durably(
        path_of(0, ".seg"), disk.visible_content(path_of(0, ".seg"))[:-1]
    )  # this record is torn
    info = INFO._replace(session_id=5, low_water_mark=4, local_low_water_mark=4, sequence=9)
    segments, slots = open_disk(disk, info=info)
    assert (segments.last_id, slots.slot.damaged) == (10, (IdRange(7, 7),))
    assert content(segments)[8 * RECORD_BYTES :] == records[8 * RECORD_BYTES : 11 * RECORD_BYTES]


def test_an_oversized_0_13_transaction_is_not_a_torn_tail():
    """0.13 has no limit, and acknowledges records above the mark of its last session."""
    disk = new_disk()
    make_segments(disk, [3])
    segment = open_segment(disk)
    more, lengths = make_run(3, [20, SCAN_BYTES, 20])
    segment.append(lengths, more)
    segment.sync()
    disk.unlink(path_of(0, ".chn"))
    info = INFO._replace(session_id=5, low_water_mark=2, local_low_water_mark=2, sequence=9)
    segments, slots = open_disk(disk, info=info)
    assert (segments.last_id, content(segments)[-len(more) :] == more) == (5, True)
    assert (slots.slot.damaged, slots.slot.suspect) == ((), False)


def test_a_session_of_0_13_overrides_an_earlier_promise():
    """The earlier promise has the nonce of another owner, of an older session."""
    disk = new_disk()
    write_log(disk, [3], promised=4, nonce=bytes([7] * 16), control_file_sequence=3)
    slot = open_disk(disk, info=INFO._replace(session_id=5, sequence=9))[1].slot
    assert slot.promise == Promise(5)


def test_a_truncation_intent_older_than_records_of_0_13_is_dropped():
    """0.13 ignores the intent, and acknowledges records after those that should be truncated."""
    disk = new_disk()
    intent = TruncateIntent(2, None)
    _, records, _ = write_log(disk, [3, 2], [4], acked=1, truncate=intent, control_file_sequence=3)
    info = INFO._replace(session_id=5, low_water_mark=8, local_low_water_mark=8, sequence=9)
    segments, slots = open_disk(disk, info=info)
    assert content(segments) == records
    assert (slots.slot.truncate, slots.slot.suspect) == (None, False)


def interrupted_openings(prepare, survival, info=INFO):
    """Lose the power at each step of an opening; yield the result of the next opening."""
    for step in range(1, 80):
        disk = new_disk()
        prepare(disk)
        disk.plan_fault(disk.step_count + step, DiskFault.POWER_LOSS)
        try:
            open_disk(disk, info=info)
        except PowerLoss:
            is_cut = True
        else:
            is_cut = False
        disk.lose_power(survival if is_cut else Survival.NOTHING, Random(step))
        yield open_disk(disk, info=info)
        if not is_cut:
            assert step > 5
            return
    pytest.fail("no opening completed without a crash")


def test_an_adoption_interrupted_at_any_step_keeps_the_records_of_0_13():
    """Only the session shows that 0.13 has written.

    The slot must not store this session too early.
    """
    more, lengths = make_run(5, [20] * 4)

    def run_0_13(disk):
        make_segments(disk, [3], [2])
        SlotFile.create(disk, ROOT, Slot(2, control_file_sequence=9, promised=4, last_session=4))
        segment = open_segment(disk, 3)
        segment.append(lengths, more)
        segment.sync()
        segment.close()

    info = INFO._replace(session_id=5, low_water_mark=4, local_low_water_mark=4, sequence=9)
    for segments, slots in interrupted_openings(run_0_13, Survival.EVERYTHING, info):
        assert content(segments) == make_run(0, [20] * 5)[0] + more
        slot = slots.slot
        assert (slot.last_session, slot.low_water_mark, slot.suspect) == (5, 4, False)


# ---- a missing directory (rule 8)

KNOWN = INFO._replace(session_id=7, low_water_mark=3, local_low_water_mark=3, sequence=9)


def test_an_interrupted_opening_of_a_missing_log_keeps_the_promise_and_suspect_flag():
    for segments, slots in interrupted_openings(lambda _disk: None, Survival.ANY_SECTORS, KNOWN):
        slot = slots.slot
        assert (slot.suspect, slot.promise) == (True, Promise.after_loss(7))
        assert (segments.last_id, slot.low_water_mark) == (BEFORE_FIRST, BEFORE_FIRST)
        assert slot.last_session == NO_SESSION


def test_all_files_are_prefetched_before_the_first_is_read():
    class ReadAheadDisk(SimDisk):
        announced = None

        def prefetch(self, directory, names):
            self.announced = (self.read_count, directory, set(names))

    disk = ReadAheadDisk()
    disk.make_directory(ROOT)
    write_log(disk, [3], [2], [4])
    disk.write_durably(ROOT / "left.tmp", b"")
    before = disk.read_count
    open_disk(disk)
    suffixes = (".seg", ".idx", ".chn")
    names = {segment_name(first, suffix) for first in (0, 3, 5) for suffix in suffixes}
    assert disk.announced == (before, ROOT, names | {SLOTS_FILE_NAME})


# ---- syncs (rule 9)


def synced_by_opening(disk, **wanted):
    """Open a log, and return the syncs: suffixes of files, SLOTS_FILE_NAME, or "names"."""
    before = len(disk.trace)
    for each in open_log(disk, ROOT, BLANK, INFO, trust_fsync=True, is_name_durable=True, **wanted):
        each.close()
    steps = [step.removesuffix(".tmp").split() for step in disk.trace[before:]]
    files = [name.removeprefix(f"{0:019d}") for call, name in steps if call == "sync"]
    return sorted(files) + ["names"] * sum(call == "syncdir" for call, _ in steps)


def test_opening_a_new_log_syncs_each_file_once_and_the_file_names_twice():
    expected = [".chn", ".idx", ".seg", SLOTS_FILE_NAME, "names", "names"]
    assert synced_by_opening(new_disk()) == expected


def test_opening_a_log_that_ends_at_its_marker_syncs_batches_slot_and_file_names():
    disk = new_disk()
    write_log(disk, [3, 2])
    assert synced_by_opening(disk) == [".chn", SLOTS_FILE_NAME, "names"]
    assert synced_by_opening(disk) == [".chn", SLOTS_FILE_NAME, "names"]


def test_unconfirmed_and_repaired_records_are_synced():
    disk = new_disk()
    write_log(disk, [3, 2], acked=1)
    assert synced_by_opening(disk) == [".chn", ".idx", ".seg", SLOTS_FILE_NAME, "names"]
    seg, idx = path_of(0, ".seg"), path_of(0, ".idx")
    disk.write_durably(seg, disk.visible_content(seg) + b"torn")
    assert synced_by_opening(disk) == [".chn", ".seg", SLOTS_FILE_NAME, "names"]
    disk.write_durably(idx, disk.visible_content(idx)[:-8] + bytes(8))
    assert ".idx" in synced_by_opening(disk)


@pytest.mark.parametrize(
    "newer",
    [
        {"dirty": False},
        {"suspect": True},
        {"truncate": TruncateIntent(4, None)},
        {"acked": AckedMarker(BEFORE_FIRST, GENESIS_CHAIN)},
    ],
    ids=str,
)
def test_a_slot_is_synced_before_changes_that_the_older_slot_forbids(newer):
    disk = new_disk()
    write_log(disk, [3, 2])
    slots = SlotFile.open(disk, ROOT, 2)
    slots.write(dataclasses.replace(slots.slot, **newer))
    slots.close()
    assert synced_by_opening(disk).count(SLOTS_FILE_NAME) >= 2


# ---- a crash while it is opened


def test_adopted_records_are_read_again_after_a_restart():
    disk = new_disk()
    _, records, _ = make_segments(disk, [700, 700], [900], [500])
    firsts = (0, 1400, 2300)
    for first in firsts:
        disk.unlink(path_of(first, ".chn"))
    info = INFO._replace(session_id=5, low_water_mark=2799, local_low_water_mark=2799, sequence=9)
    for created_ms in (77, 78):  # the time of each start, not of the segments
        blank = BLANK._replace(created_ms=created_ms)
        segments, slots = open_log(disk, ROOT, blank, info, trust_fsync=True)
        assert not slots.slot.suspect
        assert slots.slot.low_water_mark == 2799
        assert content(segments) == records
        entries = list(segments.entries_from(0))
        assert check_chain(entries, 0, GENESIS_CHAIN, segments.record_crcs(0, 2799)) is None
        for first in firsts:
            assert segments.entries(first, first, 9)[1][0].session_id == NO_SESSION
        segments.close()
        slots.close()


def test_an_opening_interrupted_at_any_step_has_the_same_result():
    def with_rot(disk):
        written_logs.append(write_log(disk, [3, 2], [4, 3], acked=3)[1:])
        rot_record(disk, 5, 10)

    written_logs = []
    for segments, slots in interrupted_openings(with_rot, Survival.ANY_SECTORS):
        records, entries = written_logs[-1]
        assert content(segments) == records[: 9 * RECORD_BYTES]
        assert list(segments.entries_from(0)) == entries[:3]
        assert (slots.slot.suspect, slots.slot.damaged) == (False, ())


def test_an_interrupted_opening_keeps_the_fallback_flag():
    info = INFO._replace(session_id=4)
    for _, slots in interrupted_openings(
        lambda disk: with_lost_newer_slot(disk, 9), Survival.ANY_SECTORS, info
    ):
        assert (slots.slot.promise, slots.slot.suspect) == (Promise.after_loss(4), True)


@pytest.mark.parametrize("acked", [0, 2])
def test_a_replica_without_batches_is_suspect_after_an_interrupted_opening(acked):
    """Rule 6: after the `.chn` is rebuilt, the files themselves do not show the loss."""

    def without_batches(disk):
        write_log(disk, [3, 2], [4], acked=acked)
        disk.flip_bits(path_of(5, ".chn"), 9)

    for _, slots in interrupted_openings(without_batches, Survival.EVERYTHING):
        assert slots.slot.suspect


def test_batches_rebuilt_after_a_fallback_are_marked_as_reconstructed():
    """Rule 5: compared with an older slot, the last session's writes look like those of 0.13."""
    disk = new_disk()
    write_log(disk, [3, 2], [4], control_file_sequence=3)
    _, slots = open_disk(disk, info=INFO._replace(sequence=3))
    slots.write(dataclasses.replace(slots.slot, control_file_sequence=9))
    disk.flip_bits(ROOT / SLOTS_FILE_NAME, SLOT_BLOCK_BYTES * slots._position + 20)
    disk.flip_bits(path_of(0, ".chn"), LINEAGE_HEADER_BYTES + 3)
    segments, slots = open_disk(disk, info=INFO._replace(sequence=9))
    assert slots.slot.suspect
    sessions = {one.session_id for one in segments.entries_from(0)}
    assert NO_SESSION not in sessions
    assert RECONSTRUCTED in sessions


def test_an_opening_that_fails_at_any_step_leaves_no_file_open():
    for step in range(1, 60):
        disk = new_disk()
        segments, _, _ = write_log(disk, [2, 1], [2], acked=2)
        segments.close()
        open_count = disk.open_count
        disk.flip_bits(path_of(3, ".chn"), LINEAGE_HEADER_BYTES + 3)
        disk.plan_fault(disk.step_count + step, DiskFault.IO_ERROR)
        try:
            segments, slots = open_disk(disk)
        except DiskFailed:
            assert disk.open_count == open_count
        else:
            segments.close()
            slots.close()
            assert disk.open_count == open_count
            assert step > 10
            return
    pytest.fail("no opening completed without an error")


# ---- batches that are lost, or left over


@pytest.mark.parametrize("acked", [1, 3])
@pytest.mark.parametrize("lost", [(9, 9), (100, 100), (150, 170), (199, 199)])
def test_sectors_that_cannot_be_read_in_an_older_segment_are_damage(lost, acked):
    """The last record may or may not begin in these sectors, or be readable later."""
    disk = new_disk()
    _, records, entries = write_log(disk, [100, 100], [4], acked=acked)
    path = path_of(0, ".seg")
    first, last = lost
    start = SEGMENT_HEADER_BYTES + RECORD_BYTES * first
    disk.make_unreadable(path, start, start + RECORD_BYTES * (last - first))
    segments, slots = open_disk(disk)
    assert segments.last_id == 203
    assert list(segments.entries_from(0)) == entries
    assert not slots.slot.suspect
    (damage,) = slots.slot.damaged or (None,)
    if damage is None:
        assert last < 99 or (last < 199 and acked > 1), "the record was read"
    else:  # only records in the same page are missing
        assert damage.first <= first
        assert last <= damage.last
        assert damage.last - damage.first <= last - first + 2 * (4096 // RECORD_BYTES + 1)
        assert len(disk.visible_content(path)) == SEGMENT_HEADER_BYTES + 200 * RECORD_BYTES
        intact_ranges = ((0, damage.first - 1), (damage.last + 1, 203))
        for low, high in intact_ranges:
            found = segments.read(low, high)[0] if low <= high else b""
            assert found == records[low * RECORD_BYTES : (high + 1) * RECORD_BYTES]
    slots.close()
    again = open_disk(disk)[1].slot
    assert (again.damaged, again.suspect) == (slots.slot.damaged, False)


def test_without_an_index_an_older_segment_is_scanned():
    disk = new_disk()
    _, records, _ = write_log(disk, [100, 100], [4])
    path = path_of(0, ".idx")
    size = len(disk.visible_content(path))
    disk.make_unreadable(path, size - 1, size - 1)
    segments, slots = open_disk(disk)
    assert content(segments) == records
    assert (slots.slot.damaged, slots.slot.suspect) == ((), False)


def test_a_log_with_lost_records_and_lost_index_is_not_opened():
    """A record after the damage could not be distinguished from data inside another record."""
    disk = new_disk()
    write_log(disk, [200, 200], [4], acked=1)
    path = path_of(0, ".seg")
    before = disk.visible_content(path)
    start = SEGMENT_HEADER_BYTES + 250 * RECORD_BYTES
    disk.make_unreadable(path, start, start)
    end = len(disk.visible_content(path_of(0, ".idx"))) - 1
    disk.make_unreadable(path_of(0, ".idx"), end, end)
    with pytest.raises(ReadFailed, match=r"\.idx: a sector cannot be read"):
        open_disk(disk)
    assert disk.visible_content(path) == before


def test_a_log_with_unreadable_sectors_at_its_end_is_not_opened():
    """Incomplete unconfirmed data is truncated; a temporary read error reports no damage."""
    disk = new_disk()
    write_log(disk, [3], [20, 20], acked=2)
    path = path_of(3, ".seg")
    before = disk.visible_content(path)
    start = SEGMENT_HEADER_BYTES + 25 * RECORD_BYTES
    disk.make_unreadable(path, start, start)
    with pytest.raises(ReadFailed, match="a sector cannot be read"):
        open_disk(disk)
    assert disk.visible_content(path) == before


def test_lost_batches_at_the_end_of_an_older_segment_are_reconstructed():
    disk = new_disk()
    _, records, entries = write_log(disk, [3, 2], [4], [1])
    chn = path_of(0, ".chn")
    disk.write_durably(chn, disk.visible_content(chn)[: LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES])
    for _ in range(2):
        segments, slots = open_disk(disk)
        assert slots.slot.suspect
        found = list(segments.entries_from(0))
        assert found == [entries[0], entries[1]._replace(session_id=RECONSTRUCTED), *entries[2:]]
        assert (content(segments), segments.chain) == (records, entries[-1].chain)


def test_batches_after_the_last_record_are_truncated():
    disk = new_disk()
    _, records, entries = write_log(disk, [3], [4])
    seg = path_of(3, ".seg")
    disk.write_durably(seg, disk.visible_content(seg)[:SEGMENT_HEADER_BYTES])
    segments, slots = open_disk(disk)
    assert slots.slot.suspect
    assert (segments.last_id, segments.chain) == (2, entries[0].chain)
    assert content(segments) == records[: 3 * RECORD_BYTES]


def test_a_damaged_batch_before_the_newest_segment_is_not_torn():
    """A new segment after a failed write does not move the acked marker; the old file is synced."""
    disk = new_disk()
    segments, records, entries = write_log(disk, [3, 2, 1], acked=1)
    segments.add(5, entries[-1].chain)
    disk.flip_bits(path_of(0, ".chn"), LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES + 5)
    segments, slots = open_disk(disk)
    assert slots.slot.suspect
    assert (content(segments), segments.last_id) == (records, 5)


def test_a_torn_batch_across_two_segments_is_truncated_without_suspicion():
    """The batch's part in the older file was synced.

    The whole batch was neither synced nor acknowledged.
    """
    disk = new_disk()
    segments, records, entries = write_log(disk, [3, 2], acked=2)
    more, lengths, _ = make_batches(5, [2], entries[-1].chain)
    segments.current.append(lengths, more)
    segments.sync()
    segments.sync_index()
    segments.add(5, entries[-1].chain)
    segments, slots = open_disk(disk)
    assert (content(segments), segments.last_id) == (records, 4)
    assert not slots.slot.suspect
