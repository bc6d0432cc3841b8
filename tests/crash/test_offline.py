"""`verify` accepts all files that a storage writes, even after crashes, and finds each change."""

import struct
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.crash.test_storage_crash import check_after_error, run_until_error
from tests.offline_storage import (
    PARTITION,
    flip_byte,
    sample_log,
    segment_files,
    verification_texts,
    write_to_directory,
)
from tests.property.test_storage_format import B16, INT64, SLOTS, entries
from tests.storage_model import ALL_SURVIVALS, random_log, run_until_power_loss
from waltz_core.errors import DiskFailed
from waltz_core.offline import layout
from waltz_core.offline.layout import GENESIS_MARKER, BatchEntry
from waltz_core.records.record import PartitionId
from waltz_core.storage.files import format as disk_format
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, Survival

NOT_ASSIGNED = (
    f"{PARTITION}: the directory has partition {PARTITION}, which is not assigned to the storage"
)


@pytest.mark.parametrize("seed", range(8))
def test_a_closed_log_has_no_findings(tmp_path, seed):
    world = random_log(seed)
    run_until_power_loss(world, 30, None)
    world.close()
    assert verification_texts(write_to_directory(world.disk, tmp_path)) == ([], [NOT_ASSIGNED])


@pytest.mark.parametrize("survival", ALL_SURVIVALS)
@pytest.mark.parametrize("seed", range(8))
def test_verify_accepts_every_state_after_a_crash(tmp_path, seed, survival):
    world = random_log(seed)
    for number in range(3):
        run_until_power_loss(world, 25, world.rng.randint(1, 120))
        world.disk.lose_power(survival, world.rng)
        wrong, notes = verification_texts(write_to_directory(world.disk, tmp_path / str(number)))
        assert wrong == []
        assert notes
        world.open()
        world.check_after_crash()
    world.close()
    wrong, notes = verification_texts(write_to_directory(world.disk, tmp_path / "closed"))
    assert wrong == []
    # The control structure of Waltz 0.13 is written after the slot of this version. So after a
    # crash, the control structure may be older than the slot.
    assert [note for note in notes if "expected session" not in note] == [NOT_ASSIGNED]


@pytest.mark.parametrize("fault", [DiskFault.IO_ERROR, DiskFault.DISK_FULL])
@pytest.mark.parametrize("seed", range(8))
def test_after_an_error_and_a_crash_only_an_index_can_be_wrong(tmp_path, seed, fault):
    """The index of an abandoned file was never synced."""
    world = random_log(seed)
    world.prepare()
    world.set_mark()
    for number in range(3):
        error, at_the_edge = run_until_error(world, fault)
        if error is None or at_the_edge:
            return
        try:
            world.prepare_after_error()
        except DiskFailed:
            return
        check_after_error(world)
        world.check_new_session()
        assert (
            verification_texts(write_to_directory(world.disk, tmp_path / f"{number} running"))[0]
            == []
        )
        world.disk.lose_power(world.rng.choice(ALL_SURVIVALS), world.rng)
        wrong, _ = verification_texts(write_to_directory(world.disk, tmp_path / str(number)))
        world.open()
        if world.log.suspect:
            return
        assert [one for one in wrong if ".idx at " not in one] == []
        world.check_after_crash()


@pytest.mark.parametrize("seed", range(60))
def test_any_changed_byte_of_a_closed_log_is_found(tmp_path, seed):
    world = random_log(seed)
    run_until_power_loss(world, 20, None)
    world.close()
    directory = write_to_directory(world.disk, tmp_path)
    rng = Random(seed)
    suffix = rng.choice((".seg", ".seg", ".seg", ".chn", ".idx"))
    path = rng.choice(segment_files(directory, suffix))
    offset = rng.randrange(path.stat().st_size)
    flip_byte(path, offset, rng.randint(1, 255))
    wrong, notes = verification_texts(directory)
    if suffix != ".chn" and 4 <= offset < 12:
        assert any(f"{path.name} at 4: header: the creation time is" in one for one in notes)
        return
    assert any(path.name in one for one in wrong), (path.name, offset)


@settings(max_examples=40)
@given(st.integers(0, 9), st.data())
def test_any_changed_byte_outside_the_logs_is_found(tmp_path_factory, seed, data):
    world = random_log(seed)
    run_until_power_loss(world, 10, None)
    world.close()
    directory = write_to_directory(world.disk, tmp_path_factory.mktemp("storage"))
    name = data.draw(
        st.sampled_from(("waltz-x.id", "waltz-storage.ctl", f"{PARTITION}/waltz-x.ctl"))
    )
    size = (directory / name).stat().st_size
    at = data.draw(st.integers(0, size - 1))
    flip_byte(directory / name, at, data.draw(st.integers(1, 255)))
    wrong, _ = verification_texts(directory)
    is_created = name == "waltz-storage.ctl" and 4 <= at < 12  # creation time: not checked
    assert is_created or wrong, (name, at)


@given(SLOTS)
def test_encoded_control_slots_are_decoded_to_the_same_values(slot):
    read = layout.decode_control_slot(slot.encode(), (slot.sequence + 1) % 2)
    assert read.errors == ()
    assert (read.partition, read.sequence, read.control_file_sequence) == (
        slot.partition_id,
        slot.sequence,
        slot.control_file_sequence,
    )
    assert (read.promised, read.nonce, read.last_session) == (
        slot.promised,
        slot.nonce,
        slot.last_session,
    )
    assert read.low_water_mark == slot.low_water_mark
    assert (read.acked, read.acked_chain) == slot.acked
    assert read.damaged == slot.damaged
    assert (read.is_dirty, read.is_suspect) == (slot.dirty, slot.suspect)
    assert read.engaged == slot.engaged
    provisional = (read.provisional_session, read.provisional_mark)
    assert (provisional if read.flags & layout.PROVISIONAL else None) == slot.provisional
    assert (read.truncate_to if read.flags & layout.TRUNCATE else None) == (
        slot.truncate.last_to_keep if slot.truncate else None
    )
    assert (read.shortened if read.flags & layout.SHORTENED else None) == (
        slot.truncate.shortened if slot.truncate else None
    )


@given(entries(), st.integers(0, 1 << 40), B16, INT64)
def test_encoded_batches_are_decoded_to_the_same_values(entry, position, key, created_ms):
    segment = disk_format.SegmentHeader(created_ms, key, PartitionId(3), entry.first)
    head = disk_format.LineageHeader(segment, GENESIS_MARKER)
    read_head = layout.decode_chain_header(head.encode())
    assert (read_head.errors, read_head.chain_before) == ((), GENESIS_MARKER)
    assert read_head.header[1:5] == (created_ms, key, 3, entry.first)
    assert layout.decode_file_header(segment.encode()) == read_head.header
    written = disk_format.encode_entry(
        entry, entry.first - 1, segment_crc=head.segment_crc, position=position
    )
    read = layout.decode_batch_entry(written, position, read_head.segment_crc)
    expected = ()
    if entry.session_id < layout.RECONSTRUCTED:
        expected = (f"expected a session number of at least -2, found {entry.session_id}",)
    assert read == BatchEntry(*entry, entry.first - 1, expected)
    misplaced = layout.decode_batch_entry(written, position + 1, read_head.segment_crc)
    assert misplaced.errors[0].startswith("expected CRC")


@given(st.binary(max_size=600), st.integers(0, 1))
def test_any_bytes_are_decoded_without_an_exception(data, position):
    assert layout.decode_control_slot(data, position).errors
    assert layout.decode_control_entry(data, position).errors
    assert layout.decode_file_header(data[:100]).errors
    assert layout.decode_chain_header(data[:60]).errors
    assert layout.decode_batch_entry(data[:60], position, 0).errors
    assert layout.decode_storage_id(data[:20])[1]


def test_the_crc_of_the_offline_tools_is_crc_32_as_in_waltz_0_13():
    assert struct.pack(">I", layout.crc32(b"hello-0")).hex() == "154677bc"  # as in Waltz 0.13


def cut_in_a_batch(world):
    """Truncate a log within its second-last batch; both batches are trusted."""
    for counts in ([9], [2], [1]):
        world.append(counts)
        world.sync()
    base = world.entries[-4].last
    world.log.truncate(world.session, base + 4, base, world.chain_at(base))


@pytest.mark.parametrize("survival", list(Survival))
def test_verify_accepts_a_log_with_an_interrupted_truncation(tmp_path, survival):
    step = cuts = 0
    lost = True
    while lost:
        step += 1
        world = sample_log()
        world.disk.plan_fault(world.disk.step_count + step, DiskFault.POWER_LOSS)
        lost = False
        try:
            cut_in_a_batch(world)
        except PowerLoss:
            lost = True
        world.disk.lose_power(survival, world.rng)
        wrong, notes = verification_texts(write_to_directory(world.disk, tmp_path / str(step)))
        assert wrong == [], step
        cuts += (
            "2/waltz-x.ctl: a truncation after transaction 39 was started; the next start of "
            "the storage completes it"
        ) in notes
    assert step > 15
    assert cuts > 2
