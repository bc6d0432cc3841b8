"""A log that begins above 0: old segments are removed, and a replica without them is reset."""

import pytest

from tests.unit.storage.test_partition_log import NONCE, PowerLost, World
from waltz_core.errors import (
    BadFormat,
    BadRequest,
    BeforeLogStart,
    ChecksumMismatch,
    DataLoss,
    DiskFailed,
    MissingSegment,
    SessionFenced,
)
from waltz_core.records.record import RECONSTRUCTED, Chain
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME
from waltz_core.storage.files.format import (
    SLOT_BLOCK_BYTES,
    AckedMarker,
    IdRange,
    Slot,
    segment_name,
)

NO_LOG = AckedMarker(4000, Chain(b"c" * 16))


def file_names(world, suffix=".seg"):
    return sorted(path.name for path in (world.directory / "0").glob(f"*{suffix}"))


def end_of(log, transaction_id):
    return AckedMarker(transaction_id, log.chain_at(transaction_id))


def confirm_mark(world):
    """Confirm the mark at the end of the log; return that end."""
    log = world.log
    log.set_low_water_mark(log.promised, log.max_id, log.chain)
    log.engage(log.promised, log.max_id)
    return end_of(log, log.max_id)


@pytest.fixture
def world(tmp_path):
    """Twelve batches of 4 records in segments of about 500 bytes, which end within batches."""
    world = World(tmp_path, segment_bytes_max=500)
    world.log.prepare(1, NONCE)
    for _ in range(12):
        world.append([4])
    yield world
    world.log.abandon()
    world.control.close()


def remove_all(world):
    archived = confirm_mark(world)
    while world.log.remove_oldest(archived):
        pass
    return archived


def test_the_start_is_a_batch_end_at_or_after_the_end_of_the_removed_segment(world):
    log, archived = world.log, confirm_mark(world)
    before = file_names(world)
    entries = log.lineage(0, log.max_id)[1]
    everything = world.all_records()
    assert log.remove_oldest(archived)
    assert file_names(world) == before[1:]
    second = int(before[1][:-4])
    assert second % 4 != 0, "the boundary is within a batch"
    assert log.start == end_of(log, second + 4 - second % 4 - 1)
    first = log.start.transaction_id + 1
    read = log.read_range(first, log.max_id, 1 << 20, whole_batches=True)
    assert read.records == everything[-len(read.records) :]
    assert (read.chain_before, read.entries[0].first) == (log.start.chain, first)
    assert log.lineage(0, log.max_id) == (log.start.chain, tuple(entries[first // 4 :]))


def test_the_start_is_not_the_end_of_a_reconstructed_batch(world):
    log, archived = world.log, confirm_mark(world)
    lineage = log._files.segments.all[1].lineage  # the boundary is within its first batch
    lost = lineage.entry(0)
    reconstructed = lost._replace(session_id=RECONSTRUCTED, chain=Chain(bytes(16)))
    lineage.rewrite(0, [reconstructed])
    assert log.remove_oldest(archived)
    assert log.start == end_of(log, lost.last + 4)
    first = log.start.transaction_id + 1
    assert log.read_range(first, first, 1 << 20, whole_batches=True).entries[0].first == first


def test_all_segments_but_the_newest_can_be_removed_and_appends_continue(world):
    archived = remove_all(world)
    log = world.log
    assert len(file_names(world)) == 1
    assert log.start.transaction_id < archived.transaction_id
    world.append([3, 2])
    for _ in range(2):
        assert (world.log.max_id, world.log.suspect) == (52, False)
        first = world.log.start.transaction_id + 1
        read = world.log.read_range(first, 52, 1 << 20, whole_batches=True)
        assert read.entries[-1].last == 52
        world.crash()


@pytest.mark.parametrize("first", [0, 3])
def test_the_error_for_a_read_below_the_start_names_the_first_id(world, first):
    confirm_mark(world)
    log = world.log
    log.remove_oldest(end_of(log, log.max_id))
    start = log.start.transaction_id
    for read in (
        lambda: log.read_range(first, log.max_id, 1000, whole_batches=False),
        lambda: log.read_headers(first, log.max_id, 1000),
        lambda: log.reader.locations(first, log.max_id, 1000),
        lambda: log.lineage(first, start),
    ):
        with pytest.raises(BeforeLogStart, match=f"this storage begins at {start + 1}") as caught:
            read()
        assert caught.value.first_available == start + 1
    assert log.chain_at(first) is None
    assert log.verify(0, 1000) > start + 1, "the scrub begins at the start"


def test_segments_above_the_archived_or_confirmed_mark_are_not_removed(world):
    log = world.log
    before = file_names(world)
    assert not log.remove_oldest(end_of(log, log.max_id)), "no mark is confirmed"
    confirm_mark(world)
    assert not log.remove_oldest(end_of(log, 3))
    with pytest.raises(
        BadRequest,
        match=r"expected chain hash .* at transaction 47, up to which the log is archived",
    ):
        log.remove_oldest(AckedMarker(47, Chain(b"c" * 16)))
    with pytest.raises(BadRequest, match="at transaction 99, up to which the log is archived"):
        log.remove_oldest(AckedMarker(99, log.chain))
    assert file_names(world) == before
    assert log.start.transaction_id == -1


def test_a_truncation_below_the_start_is_rejected(world):
    remove_all(world)
    log = world.log
    start = log.start
    log.prepare(2, NONCE)
    with pytest.raises(DataLoss):
        log.truncate(2, start.transaction_id - 1, *start)
    world.append([2], session=2)
    log.prepare(3, NONCE)
    assert log.truncate(3, 47, 47, log.chain_at(47)) == (47, log.chain_at(47))


def test_damage_below_the_start_is_forgotten(world):
    confirm_mark(world)
    log = world.log
    segment = world.directory / "0" / segment_name(0, ".seg")
    content = bytearray(segment.read_bytes())
    content[128 + 40] ^= 1
    segment.write_bytes(content)
    log.verify(0, 1000)
    with pytest.raises(ChecksumMismatch):
        log.read_range(0, 5, 1000, whole_batches=False)
    assert log.damaged == (IdRange(0, 0),)
    assert log.remove_oldest(end_of(log, log.max_id))
    assert log.damaged == ()
    assert world.crash().damaged == ()


def steps_of(world, change):
    """For each step of a change, lose the power before this step and open the log again."""
    steps = 0
    while True:
        world.disk.steps_left = steps
        try:
            change(world.log)
        except PowerLost:
            steps += 1
            world.crash()
            yield steps
            continue
        world.disk.steps_left = None
        assert steps > 5
        return


def test_opening_a_log_completes_an_interrupted_removal(world):
    archived = confirm_mark(world)
    everything = world.all_records()
    starts = set()
    for _ in steps_of(world, lambda log: log.remove_oldest(archived)):
        log = world.log
        assert (log.max_id, log.suspect, log.damaged) == (47, False, ())
        first = log.start.transaction_id + 1
        starts.add(first)
        records = log.read_range(first, 47, 1 << 20, whole_batches=True).records
        assert records == everything[-len(records) :]
        log.prepare(log.promised, NONCE)
    assert len(starts) > 2
    assert 0 in starts


def test_a_reset_replica_has_no_records_and_is_suspect_until_a_mark_is_set(world):
    log = world.log
    log.reset(1, NO_LOG)
    for _ in range(2):
        log = world.log
        assert (log.max_id, log.chain, log.start, log.suspect) == (*NO_LOG, NO_LOG, True)
        assert log.confirmed_low_water_mark == 4000
        assert file_names(world) == [segment_name(4001, ".seg")]
        assert log.state().synced_max == 4000
        assert log.verify(0, 1000) == 4001
        world.crash()
    world.log.prepare(2, NONCE)
    world.append([2, 3], session=2)
    world.log.set_low_water_mark(2, 4005, world.log.chain)
    assert not world.crash().suspect
    assert world.log.read_range(4001, 4005, 1 << 20, whole_batches=True).entries[0].last == 4002


def test_opening_a_log_completes_a_reset_interrupted_at_any_step(tmp_path):
    ends = set()
    for steps in range(100):
        world = World(tmp_path / str(steps), segment_bytes_max=500)
        world.log.prepare(1, NONCE)
        for _ in range(4):
            world.append([4])
        world.disk.steps_left = steps
        try:
            world.log.reset(1, NO_LOG)
        except PowerLost:
            log = world.crash()
            ends.add((log.max_id, log.suspect))
            if log.suspect:
                assert file_names(world) == [segment_name(4001, ".seg")]
                assert log.prepare(2, NONCE).synced_max == 4000
            world.close()
            continue
        world.disk.steps_left = None
        world.close()
        break
    assert ends == {(15, False), (4000, True)}


def test_a_log_that_may_be_needed_is_not_reset(world):
    log = world.log
    with pytest.raises(SessionFenced):
        log.reset(0, NO_LOG)
    problem = "begin after transaction 47, because it has transactions up to 47"
    with pytest.raises(BadRequest, match=problem):
        log.reset(1, end_of(log, 47))
    confirm_mark(world)
    log.prepare(2, NONCE)
    with pytest.raises(DataLoss, match="the replica must keep records up to its low-water mark 47"):
        log.reset(2, AckedMarker(40, Chain(b"c" * 16)))
    assert log.max_id == 47


def test_removed_segments_stay_removed_after_a_fallback_to_the_older_slot(world):
    remove_all(world)
    start = world.log.start
    world.log.abandon()
    world.control.close()
    path = world.directory / "0" / SLOTS_FILE_NAME
    content = bytearray(path.read_bytes())
    slots = [Slot.decode(content[offset : offset + 512]) for offset in (0, SLOT_BLOCK_BYTES)]
    assert {slot.start for slot in slots} == {start}
    newer = max((0, 1), key=lambda position: slots[position].sequence)
    content[newer * SLOT_BLOCK_BYTES + 40] ^= 1
    path.write_bytes(content)
    log = world.open()
    assert (log.start, log.max_id, log.suspect) == (start, 47, True)


def test_a_first_segment_that_begins_above_the_start_is_reported(world):
    remove_all(world)
    world.log.abandon()
    (oldest,) = (world.directory / "0").glob("*.seg")
    first = world.log.start.transaction_id + 1
    for suffix in (".seg", ".idx", ".chn"):
        path = oldest.with_suffix(suffix)
        path.rename(path.with_name(segment_name(first + 1, suffix)))
    world.control.close()
    with pytest.raises(
        (MissingSegment, BadFormat), match=f"begins at transaction {first} or earlier"
    ):
        world.open()
    for suffix in (".seg", ".idx", ".chn"):
        (world.directory / "0" / segment_name(first + 1, suffix)).rename(oldest.with_suffix(suffix))
    world.open()


def test_a_log_without_the_lineage_of_its_first_segment_is_suspect(world):
    remove_all(world)
    world.append([4])
    world.log.abandon()
    world.control.close()
    start = world.log.start
    oldest = min((world.directory / "0").glob("*.chn"))
    oldest.unlink()
    log = world.open()
    assert log.suspect
    assert (log.max_id, log.start) == (51, start)


def test_opening_a_log_completes_a_failed_removal(world):
    archived = confirm_mark(world)
    world.disk.unlink, unlink = _failing, world.disk.unlink
    with pytest.raises(DiskFailed, match="cannot remove the log before"):
        world.log.remove_oldest(archived)
    assert world.log.is_broken
    world.disk.unlink = unlink
    log = world.crash()
    assert log.start.transaction_id >= 0
    assert file_names(world)[0] != segment_name(0, ".seg")
    assert (log.max_id, log.suspect) == (47, False)


def _failing(path):
    raise DiskFailed(f"unlink {path}")
