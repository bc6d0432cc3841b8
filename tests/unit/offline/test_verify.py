"""`verify`: each kind of damage is reported exactly, with its file and position."""

import shutil
from dataclasses import replace

import pytest

from tests.offline_storage import (
    PARTITION,
    flip_byte,
    overwrite_bytes,
    sample_log,
    sample_storage,
    segment_files,
    verification_texts,
    verify_directory,
    write_to_directory,
)
from tests.storage_model import ROOT
from tests.storage_model import encode_record as make_record
from waltz_core.errors import BadRequest, DiskFailed
from waltz_core.offline.files import OpenFile, hold_shared_locks
from waltz_core.offline.layout import UNBATCHED_CHAIN, crc32
from waltz_core.offline.lineage import batches_of, header_of
from waltz_core.offline.verify_control import read_slots
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.format import AckedMarker, IdRange, ProvisionalMark, Slot
from waltz_sim.world.simulated_disk import DiskFault

ONE, TWO, THREE = "2/0000000000000000000", "2/0000000000000000011", "2/0000000000000000024"
SLOTS = "2/waltz-x.ctl"


@pytest.fixture
def storage(tmp_path):
    """Segments 0..10, 11..23 and 24..35; batches ..2, ..7, ..8, ..20, ..22, ..31 and ..35."""
    directory, _ = sample_storage(tmp_path / "storage")
    assert verification_texts(directory) == ([], [])
    return directory


def segment_path(storage, position, suffix=".seg"):
    return segment_files(storage, suffix)[position]


def truncate_file(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def swap_files(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def test_checked_files_and_records_are_counted(storage):
    log = verify_directory(storage).logs[PARTITION]
    assert (log.segment_count, log.record_count, log.last) == (3, 36, 35)
    assert (log.checksum_count, log.batch_count, log.unchecked_batch_count) == (72, 7, 0)
    assert log.bytes_read == sum(
        segment_file.stat().st_size for segment_file in segment_files(storage)
    )


RECORDS = {
    "a byte of the data": (
        lambda s: flip_byte(segment_path(s, 0), 128 + 36),
        [f"{ONE}.seg at 128: record 0: expected CRC 840d656b, found b96d4cdb; expected CRC"],
    ),
    "the id": (
        lambda s: flip_byte(segment_path(s, 0), 128 + 7, 4),
        [
            (
                f"{ONE}.seg at 128: record 0: expected transaction ID 0, found 4; not listed as "
                "damaged"
            )
        ],
    ),
    "a length that leads elsewhere": (
        lambda s: flip_byte(segment_path(s, 0), 128 + 31, 4),
        [f"{ONE}.seg at 128: record 0: expected CRC 2654e7b0, found 22071105; no record begins"],
    ),
    "a length that leads nowhere": (
        lambda s: flip_byte(segment_path(s, 0), 128 + 28, 64),
        [
            (
                f"{ONE}.seg at 128: record 0: expected a record with at most 733 bytes of data, "
                "found a length of 1073"
            )
        ],
    ),
    "zeros over several": (
        lambda s: overwrite_bytes(segment_path(s, 0), 256, bytes(400)),
        [f"{ONE}.seg at 238: records 2..8: expected CRC acb9009d, found 00000000; no record"],
    ),
    "a segment that is cut": (
        lambda s: truncate_file(segment_path(s, 1), 30),
        [
            (
                f"{TWO}.seg at 858: record 23: expected a record with at most 8 bytes of data, "
                "found a length of 38"
            )
        ],
    ),
    "the last segment cut": (
        lambda s: truncate_file(segment_path(s, 2), 30),
        [
            (
                f"{THREE}.seg at 806: bytes 806..872 have no valid record from transaction 35 on: "
                "expected a record with at most 27 bytes of data"
            ),
            (f"{THREE}.idx at 216: expected 216 bytes, for the index of 11 records, found 224"),
            (
                f"{THREE}.chn at 128: batch 32..35: the log ends at transaction 34, without "
                "record 35"
            ),
            f"{SLOTS}: the log ends at transaction 34, below its acked ID 35",
        ],
    ),
    "bytes behind the last record": (
        lambda s: segment_path(s, 2).write_bytes(segment_path(s, 2).read_bytes() + b"x" * 50),
        [
            (
                f"{THREE}.seg at 903: bytes 903..952 have no valid record from transaction 36 on: "
                "expected transaction ID 36, found 8"
            )
        ],
    ),
    "a segment that is gone": (
        lambda s: [segment_path(s, 1, suffix).unlink() for suffix in (".seg", ".idx", ".chn")],
        [
            f"{THREE}.chn at 40: header: expected chain hash 2851e2a1c2b64d2cd46733f6a3d31852",
            f"{THREE}.chn at 64: batch 23..31: expected the batch to begin at transaction 9",
            (
                f"{ONE}.seg at 901: the segment ends with record 10, but the next segment "
                "begins with 24"
            ),
        ],
    ),
    "two segments in each other's place": (
        lambda s: swap_files(segment_path(s, 0), segment_path(s, 1)),
        [
            f"{ONE}.seg at 32: header: expected first ID 0, found 11",
            f"{ONE}.seg at 128: records 0..10: expected transaction ID 0, found 11",
            (f"{ONE}.seg at 189: the segment has record 11, with which the next segment begins"),
            f"{TWO}.seg at 32: header: expected first ID 11, found 0",
            f"{TWO}.seg at 128: records 11..23: expected transaction ID 11, found 0",
        ],
    ),
    "the partition in a header": (
        lambda s: flip_byte(segment_path(s, 0), 31, 1),
        [f"{ONE}.seg at 28: header: expected partition 2, found 3"],
    ),
}
OTHER_FILES = {
    "an index entry": (
        lambda s: flip_byte(segment_path(s, 2, ".idx"), 128 + 8 * 3 + 7, 2),
        [f"{THREE}.idx at 152: index entry of record 27: expected offset 304, found 306"],
    ),
    "No index": (
        lambda s: segment_path(s, 1, ".idx").unlink(),
        [f"{TWO}.idx: the file is missing; waltz-core disk repair-index rebuilds it"],
    ),
    "a batch": (
        lambda s: flip_byte(segment_path(s, 2, ".chn"), 64 + 8),
        [f"{THREE}.chn at 64: entry 0, after transaction 22: expected CRC"],
    ),
    "no batches": (
        lambda s: segment_path(s, 1, ".chn").unlink(),
        [f"{TWO}.chn: the file is missing: its batches are lost"],
    ),
    "two batches in each other's place": (
        lambda s: overwrite_bytes(
            segment_path(s, 1, ".chn"),
            64,
            segment_path(s, 1, ".chn").read_bytes()[128:]
            + segment_path(s, 1, ".chn").read_bytes()[64:128],
        ),
        [
            f"{TWO}.chn at 64: entry 0, after transaction 8: expected CRC",
            f"{TWO}.chn at 128: entry 1, after transaction 8: expected CRC",
        ],
    ),
    "one control slot": (
        lambda s: flip_byte(s / SLOTS, 20),
        [
            f"{SLOTS} at 0: slot 0: expected CRC b25c4fb2, found a6093a67",
            (
                f"{SLOTS}: only one control slot is valid; the other slot may have had a later "
                "promised session"
            ),
        ],
    ),
    "both slots": (
        lambda s: [flip_byte(s / SLOTS, at) for at in (20, 4116)],
        [
            f"{SLOTS} at 0: slot 0: expected CRC b25c4fb2, found a6093a67",
            f"{SLOTS} at 4096: slot 1: expected CRC 1c5b59de, found 080e2c0b",
            f"{SLOTS}: no control slot is valid; the storage cannot open the partition",
        ],
    ),
    "no slots": (
        lambda s: (s / SLOTS).unlink(),
        [
            (
                f"{SLOTS}: the file is missing, although there are batches; it contained the "
                "promised session"
            )
        ],
    ),
    "the storage's id": (
        lambda s: flip_byte(s / "waltz-x.id", 6),
        [("waltz-x.id at 0: expected CRC b0afd326, found 2da03250; the storage does not start")],
    ),
    "a structure of the control file": (
        lambda s: flip_byte(s / "waltz-storage.ctl", 128 + 76 * 2 + 4 + 7),
        ["waltz-storage.ctl at 284: partition 2, copy 1 of its structure: expected CRC"],
    ),
    "a cut control file": (
        lambda s: truncate_file(s / "waltz-storage.ctl", 200),
        [("waltz-storage.ctl at 232: expected 432 bytes, for 4 partitions, found 232")],
    ),
    "no control file": (
        lambda s: (s / "waltz-storage.ctl").unlink(),
        ["waltz-storage.ctl: the file is missing; without it the storage does not start"],
    ),
    "a partition that is gone": (
        lambda s: shutil.rmtree(s / "2"),
        [
            (
                "2: the directory is missing, but in the control file partition 2 is assigned to "
                "the storage and has session 1"
            )
        ],
    ),
}


KINDS = RECORDS | OTHER_FILES


@pytest.mark.parametrize(("damage", "sentences"), KINDS.values(), ids=KINDS)
def test_each_kind_of_damage_is_reported_once_at_its_position(storage, damage, sentences):
    damage(storage)
    wrong, _ = verification_texts(storage)
    for found_text, sentence in zip(wrong, sentences, strict=False):
        assert found_text.startswith(sentence)
    assert len(wrong) == len(sentences), wrong


def test_the_chain_detects_records_of_another_history(tmp_path, storage):
    other, _ = sample_storage(tmp_path / "other")
    path = segment_path(other, 0)
    world = sample_log()
    encode_record = world.records[4]
    assert encode_record in path.read_bytes()
    assert verify_directory(other).findings.error_count == 0
    # A valid record with the right ID and size that was never in this log.
    record = make_record(4, bytes(len(encode_record) - 40))
    overwrite_bytes(path, path.read_bytes().index(encode_record), record)
    wrong, _ = verification_texts(other)
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{ONE}.chn at 128: batch 3..7: expected chain ")
    assert " for these records, found " in wrong[0]


def write_slot(storage, **changes):
    """Change fields of the current slot; return the earlier slot."""
    data = (storage / SLOTS).read_bytes()
    both = [Slot.decode(data[offset : offset + 512]) for offset in (0, 4096)]
    current = max(both, key=lambda one: one.sequence)
    position = 4096 * ((current.sequence + 1) % 2)
    overwrite_bytes(storage / SLOTS, position, replace(current, **changes).encode())
    return current


def test_a_control_slot_that_contradicts_the_log_is_reported(storage):
    acked = write_slot(storage, acked=AckedMarker(35, bytes(16))).acked
    chain = acked.chain.hex()
    assert verification_texts(storage)[0] == [
        (
            f"{SLOTS}: the acked marker is at transaction 35: expected chain hash {'00' * 16} "
            f"there, found {chain}"
        )
    ]
    write_slot(storage, acked=AckedMarker(30, acked.chain))
    assert verification_texts(storage)[0] == [
        (
            f"{SLOTS}: the acked marker is at transaction 30: expected chain hash {chain} "
            "there, found no batch that ends there"
        ),
        (
            f"{SLOTS}: the log was closed with its acked marker at transaction 30, but it "
            "continues to 35"
        ),
    ]
    write_slot(storage, acked=acked, low_water_mark=36, provisional=ProvisionalMark(1, 40))
    assert verification_texts(storage)[0] == [
        f"{SLOTS}: the log ends at transaction 35, below its low-water mark 36",
        (f"{SLOTS}: the log ends at transaction 35, below its provisional low-water mark 40"),
    ]
    write_slot(storage, low_water_mark=35, provisional=None, damaged=(IdRange(40, 41),))
    assert verification_texts(storage)[0] == [
        f"{SLOTS}: records 40..41 are listed as damaged, but the log ends at transaction 35"
    ]
    write_slot(storage, damaged=(), suspect=True)
    notes = [f"{SLOTS}: the replica is suspect: its log is not trusted until it is repaired"]
    assert verification_texts(storage) == ([], notes)


def test_sessions_of_the_two_control_files_are_compared(storage):
    write_slot(storage, last_session=0, engaged=0)
    adopts = (
        "Waltz 0.13 was the last version to write to this log; the next start of the storage "
        "adopts the records"
    )
    assert verification_texts(storage) == ([], [f"{SLOTS}: {adopts}"])
    write_slot(storage, last_session=5, promised=5)
    wrong, notes = verification_texts(storage)
    assert wrong == []
    assert notes == [
        "waltz-storage.ctl: partition 2: expected session 5, as in the control slot, found 1"
    ]


def test_unbatched_records_are_valid_if_the_acked_marker_confirms_them(storage):
    """The acked marker confirms these records, although they have no batches."""
    write_slot(
        storage,
        acked=AckedMarker(35, UNBATCHED_CHAIN),
        nonce=bytes(16),
        provisional=ProvisionalMark(1, 50),
    )
    path = segment_path(storage, 2, ".chn")
    path.write_bytes(path.read_bytes()[:64])
    writes = (
        "some records belong to no batch; the next start of the storage creates batches for them"
    )
    ends = f"{THREE}.chn: no batch has records 23..35"
    assert verification_texts(storage) == ([], [ends, f"{SLOTS}: {writes}"])
    write_slot(storage, acked=AckedMarker(36, UNBATCHED_CHAIN))
    found_text = f"{SLOTS}: the log ends at transaction 35, below its acked ID 36"
    assert verification_texts(storage)[0] == [found_text]


def test_swapped_control_slots_are_invalid(storage):
    data = (storage / SLOTS).read_bytes()
    (storage / SLOTS).write_bytes(data[4096:] + data[:4096])
    wrong, _ = verification_texts(storage)
    assert wrong[0].startswith(f"{SLOTS} at 0: slot 0: expected an odd sequence number, found ")
    assert wrong[1].startswith(f"{SLOTS} at 4096: slot 1: expected an even sequence number, found ")
    assert wrong[2] == f"{SLOTS}: no control slot is valid; the storage cannot open the partition"


def test_nonzero_padding_bytes_are_reported(storage):
    flip_byte(storage / SLOTS, 5000, 7)
    assert verification_texts(storage)[0] == [
        f"{SLOTS} at 5000: expected zeros after the slot, found 0x07"
    ]
    flip_byte(storage / SLOTS, 5000, 7)
    (storage / SLOTS).write_bytes((storage / SLOTS).read_bytes() + b"x")
    assert verification_texts(storage)[0] == [f"{SLOTS} at 8192: expected 8192 bytes, found 8193"]


def test_a_report_of_damage_states_if_the_records_are_listed_as_damaged(tmp_path):
    world = sample_log()
    world.close()
    directory = write_to_directory(world.disk, tmp_path)
    flip_byte(segment_path(directory, 0), 200)
    write_slot(directory, damaged=(IdRange(1, 1), IdRange(30, 31)))
    wrong, notes = verification_texts(directory)
    assert [one.rpartition("; ")[2] for one in wrong] == ["listed as damaged"]
    assert notes == [
        (
            f"{SLOTS}: records 30..31 are listed as damaged, but all of them can be read and have "
            "valid CRCs"
        )
    ]


@pytest.mark.parametrize("segment_bytes_max", [900, 100_000])
def test_a_torn_tail_after_an_unclean_stop_is_reported_as_a_note(tmp_path, segment_bytes_max):
    """Data that was synced is not a torn tail, not even in the last segment."""
    world = sample_log(segment_bytes_max)
    world.append([3])
    directory = write_to_directory(world.disk, tmp_path)
    truncate_file(segment_path(directory, -1), 10)
    wrong, notes = verification_texts(directory)
    assert wrong == []
    assert any(
        "never acknowledged, so the next start of the storage truncates the log there" in note
        for note in notes
    )
    assert (
        f"{SLOTS}: the log was not closed properly; it is known to be synced up to transaction 35"
    ) in notes
    flip_byte(segment_path(directory, 0), 200)
    (confirmed,) = verification_texts(directory)[0]
    assert confirmed.startswith(f"{ONE}.seg at 173: record 1: ")
    assert confirmed.endswith("; not listed as damaged")


def test_a_partition_and_a_segment_can_be_verified_alone(tmp_path, storage):
    copy = tmp_path / "2"
    shutil.copytree(storage / "2", copy)
    assert verify_directory(copy).logs[PARTITION].batch_count == 7
    assert verification_texts(copy) == ([], [])
    for path in segment_files(storage):
        flip_byte(path, 200)
    alone = verify_directory(segment_path(storage, 1))
    assert [(finding.path, finding.offset) for finding in alone.findings.kept_findings] == [
        (f"{TWO}.seg", 189)
    ]
    assert verification_texts(copy) == ([], [])
    with pytest.raises(BadRequest, match="partition 3; it has 2"):
        verify_directory(storage, partitions=[3])
    findings = verify_directory(storage, partitions=[2], limit=1).findings
    assert (len(findings.kept_findings), findings.error_count, findings.omitted_count) == (1, 3, 2)


@pytest.mark.parametrize("name", ["nothing", "2/waltz-x.ctl", "empty"])
def test_a_directory_without_a_storage_is_rejected(storage, name):
    (storage / "empty").mkdir()
    with pytest.raises(BadRequest, match="expected a storage directory"):
        verify_directory(storage / name)


def test_a_directory_cannot_be_inspected_and_opened_at_the_same_time(storage):
    file = RealDisk().open(storage / "waltz-x.id")
    with hold_shared_locks(storage), hold_shared_locks(storage / "2"):
        assert not file.lock_whole_file()
    assert file.lock_whole_file()
    with pytest.raises(DiskFailed, match="a running storage uses this directory"):
        verify_directory(storage)
    file.close()
    assert verify_directory(storage).findings.error_count == 0


def test_a_wrong_data_crc_in_a_correct_record_is_found(storage):
    path = segment_path(storage, 0)
    encode_record = bytearray(sample_log().records[0])
    encode_record[33] ^= 1
    encode_record[-4:] = crc32(bytes(encode_record[:-4])).to_bytes(4, "big")
    overwrite_bytes(path, 128, bytes(encode_record))
    wrong, _ = verification_texts(storage)
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{ONE}.seg at 128: record 0: expected CRC 76a4c084 of the data")


def test_a_wrong_batch_in_an_older_segment_is_reported_as_damage_and_not_as_a_torn_tail(tmp_path):
    """After a failed sync the acked marker has not moved, but the older file is synced."""
    world = sample_log(segment_bytes_max=100_000)
    for _ in range(3):
        world.append([1])
        world.sync()
    world.append([1])
    world.disk.plan_fault(world.disk.step_count + 1, DiskFault.IO_ERROR)
    with pytest.raises(DiskFailed):
        world.sync()
    world.log.prepare(world.session + 1, bytes(16))
    directory = write_to_directory(world.disk, tmp_path)
    assert len(segment_files(directory)) == 2
    assert verification_texts(directory)[0] == []
    flip_byte(segment_path(directory, 0, ".chn"), 64 + 64 * 8 + 5)
    wrong, _ = verification_texts(directory)
    assert [one.partition(": ")[0] for one in wrong] == [f"{ONE}.chn at {64 + 64 * 8}"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_extra_bytes_are_an_error_only_in_a_closed_log(tmp_path, is_closed):
    """After a failed write the truncated tail may reappear: the truncation was not synced."""
    world = sample_log()
    world.append([3])
    if is_closed:
        world.close()
    directory = write_to_directory(world.disk, tmp_path)
    for path, spare in (
        (segment_path(directory, 0), world.records[11]),
        (segment_path(directory, 0, ".idx"), (901).to_bytes(8, "big")),
        (segment_path(directory, 0, ".chn"), bytes(24)),
    ):
        path.write_bytes(path.read_bytes() + spare)
    wrong, notes = verification_texts(directory)
    found_text = [one for one in (wrong if is_closed else notes) if one.startswith(ONE)]
    assert [one.partition(": ")[0] for one in found_text] == [
        f"{ONE}.seg at 901",
        f"{ONE}.chn at 256",
        f"{ONE}.idx at 216",
    ]
    assert len(wrong) == 3 * is_closed


def test_reconstructed_batches_are_not_reported_as_wrong_records(tmp_path):
    """The storage reconstructs batches whose entries are unreadable. Their chains prove nothing."""
    world = sample_log(segment_bytes_max=100_000)
    for position in (1, 2):
        world.disk.flip_bits(ROOT / "2" / f"{'0' * 19}.chn", 64 + 64 * position + 8)
    world.log.lineage(0, world.max_id)
    world.close()
    directory = write_to_directory(world.disk, tmp_path)
    log = verify_directory(directory).logs[PARTITION]
    assert [batch.session for batch in batches(segment_path(directory, 0, ".chn"))][:4] == [
        1,
        -2,
        -2,
        1,
    ]
    assert verification_texts(directory) == ([], [])
    assert (log.batch_count, log.unchecked_batch_count) == (7, 3)
    flip_byte(segment_path(directory, 0, ".chn"), 64 + 64 * 5 + 40)
    assert verification_texts(directory)[0] != []


def batches(path):
    with OpenFile(path) as file:
        return [one.batch for one in batches_of(file, header_of(file).segment_crc)]


def test_lock_files_are_expected_and_unknown_files_are_noted(storage):
    for name in ("waltz-x.lck", "waltz-x.lck.old"):
        (storage / "2" / name).write_bytes(b"torn")
    assert verification_texts(storage) == ([], [])
    (storage / "2" / "notes.txt").write_bytes(b"")
    assert verification_texts(storage) == (
        [],
        ["2/notes.txt: the file does not belong to a storage"],
    )


@pytest.fixture
def log_with_later_start(tmp_path):
    """A log without segment 0..10 that begins after batch 9..20, and a complete copy of the log."""
    world = sample_log()
    world.prepare()
    world.set_mark()
    before = write_to_directory(world.disk, tmp_path / "before")
    assert world.log.remove_oldest(AckedMarker(35, world.log.chain))
    world.close()
    directory = write_to_directory(world.disk, tmp_path / "log_with_later_start")
    assert verification_texts(directory) == ([], [])
    return directory, before


def test_a_log_that_begins_above_0_is_verified_from_its_start(log_with_later_start):
    directory, _ = log_with_later_start
    log = verify_directory(directory).logs[PARTITION]
    assert (log.segment_count, log.last, log.unchecked_batch_count) == (2, 35, 1)
    assert log.chains_by_id[20] == read_slots(directory / SLOTS)[0].start_chain
    flip_byte(segment_path(directory, 0), 128 + 37)  # record 11, below the start
    wrong, notes = verification_texts(directory)
    assert wrong == []
    assert any("record 11: expected CRC" in note for note in notes)
    flip_byte(segment_path(directory, 0), 128 + 60 * 13)
    assert verification_texts(directory)[0]


def test_an_interrupted_removal_of_a_segment_is_noted(log_with_later_start):
    directory, before = log_with_later_start
    for suffix in (".seg", ".idx", ".chn"):
        shutil.copy(segment_path(before, 0, suffix), directory / f"{ONE}{suffix}")
    note = (
        f"{ONE}.seg: the segment ends before transaction 21, where the log begins; the next "
        "start of the storage removes it"
    )
    assert verification_texts(directory) == ([], [note])


def test_a_log_without_its_first_segment_is_reported(log_with_later_start):
    directory, before = log_with_later_start
    shutil.copy(before / SLOTS, directory / SLOTS)  # it states that the log begins with 0
    assert f"{TWO}.seg: no segment has records 0..10" in verification_texts(directory)[0]


def test_a_wrong_chain_at_the_start_of_a_log_is_reported(log_with_later_start):
    directory, _ = log_with_later_start
    slots = [
        replace(Slot.decode(data[:512]), start=AckedMarker(20, b"c" * 16))
        for data in blocks(SLOTS, directory)
    ]
    (directory / SLOTS).write_bytes(b"".join(slot.encode().ljust(4096, b"\0") for slot in slots))
    (wrong,) = verification_texts(directory)[0]
    assert wrong.startswith(
        f"{SLOTS}: the log begins after transaction 20: expected chain hash 6363"
    )


def blocks(name, directory):
    content = (directory / name).read_bytes()
    return content[:4096], content[4096:]
