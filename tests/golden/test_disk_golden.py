"""Files of a 0.13 storage, read and written again byte for byte."""

import json
from pathlib import Path

import numpy as np
import pytest

from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import first_bad_record, record_crcs
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    LineageEntry,
    SessionId,
    next_chain,
)
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files import format as disk_format
from waltz_core.storage.files.control_file import ControlFile
from waltz_core.storage.files.format import (
    CONTROL_HEADER_BYTES,
    NEW_PARTITION_INFOS,
    PARTITION_INFO_BYTES,
    ControlHeader,
    PartitionInfo,
    SegmentHeader,
    partition_info_offset,
)
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.removal import WipeIntent
from waltz_core.storage.service.storage_engine import StorageEngine

GOLDEN = Path(__file__).parent / "disk"


def load(name):
    return json.loads((GOLDEN / name).read_text())


KEY = bytes.fromhex("0e6bfd32bdc64ce187fb950915c99d24")
SETTINGS = LogSettings(KEY, 1_000_000_000, lambda: 1795227976155)


@pytest.mark.parametrize("case", load("control_file.json"), ids=lambda one: one["name"])
def test_control_file_of_waltz_0_13_decodes_and_encodes_to_the_same_bytes(case):
    data = bytes.fromhex(case["hex"])
    header = ControlHeader.decode(data[:CONTROL_HEADER_BYTES])
    decoded = case["decoded"]
    assert header.created_ms == decoded["creationTimeMs"]
    assert header.partition_count == decoded["numPartitions"]
    assert header.encode() == data[:CONTROL_HEADER_BYTES]
    for index, partition in enumerate(decoded["partitions"]):
        for slot, name in enumerate(("struct1", "struct2")):
            at = partition_info_offset(index, slot)
            raw = data[at : at + PARTITION_INFO_BYTES]
            info = PartitionInfo.decode(raw)
            stated = partition[name]
            assert list(info) == [
                stated["sessionId"],
                stated["lowWaterMark"],
                stated["localLowWaterMark"],
                stated["flags"],
                stated["sequenceNumber"],
            ]
            assert info.encode() == raw


def test_a_written_control_file_equals_the_control_file_of_waltz_0_13(tmp_path):
    case = load("control_file.json")[0]
    data = bytes.fromhex(case["hex"])
    header = ControlHeader.decode(data[:CONTROL_HEADER_BYTES])
    control = ControlFile.open(
        RealDisk(), tmp_path, header.cluster_key, header.partition_count, header.created_ms
    )
    for index in range(header.partition_count):
        assert control.info(index) == NEW_PARTITION_INFOS[1]
        control.set_flags(index, 5)
        control.set_marks(index, SessionId(0), BEFORE_FIRST)
    control.close()
    assert (tmp_path / "waltz-storage.ctl").read_bytes() == data


@pytest.mark.parametrize("case", load("control_file.json"), ids=lambda one: one["name"])
def test_the_control_file_has_the_same_current_structure_as_in_waltz_0_13(tmp_path, case):
    data = bytes.fromhex(case["hex"])
    (tmp_path / "waltz-storage.ctl").write_bytes(data)
    control = ControlFile.open(RealDisk(), tmp_path, KEY, 4, 0)
    for index, partition in enumerate(case["decoded"]["partitions"]):
        current = partition[f"struct{partition['current']}"]
        assert control.info(index).session_id == current["sessionId"]
        assert control.info(index).low_water_mark == current["lowWaterMark"]
    control.close()


def original_directory(tmp_path):
    """Create the golden directory of a 0.13 storage, with partition 0 assigned."""
    (tmp_path / "0").mkdir()
    name = "0" * 19
    (tmp_path / "0" / f"{name}.seg").write_bytes(bytes.fromhex(load("segment_file.json")[0]["hex"]))
    (tmp_path / "0" / f"{name}.idx").write_bytes(bytes.fromhex(load("index_file.json")[0]["hex"]))
    (tmp_path / "waltz-storage.ctl").write_bytes(bytes.fromhex(load("control_file.json")[0]["hex"]))


@pytest.mark.parametrize("without_index", [False, True])
def test_opening_a_0_13_directory_changes_no_record_and_no_index_entry(tmp_path, without_index):
    original_directory(tmp_path)
    seg, idx = (tmp_path / "0" / f"{'0' * 19}.{suffix}" for suffix in ("seg", "idx"))
    before = seg.read_bytes(), idx.read_bytes()
    if without_index:
        idx.unlink()
    control = ControlFile.open(RealDisk(), tmp_path, KEY, 4, 0)
    log = PartitionLog.open(RealDisk(), tmp_path / "0", 0, control, SETTINGS)
    assert log.max_id == 8
    assert log.promised == log.last_session == 0
    assert log.low_water_mark == BEFORE_FIRST
    assert not log.suspect
    read = log.read_range(0, 8, 1 << 20, whole_batches=True)
    records = load("segment_file.json")[0]["records"]
    assert read.records.hex() == "".join(record["hex"] for record in records)
    assert read.chain_before == GENESIS_CHAIN
    assert read.entries[-1].last == 8
    chain = log.chain
    log.close()
    after = seg.read_bytes(), idx.read_bytes()
    assert after[0] == before[0]
    assert after[1][128:] == before[1][128:]
    again = PartitionLog.open(RealDisk(), tmp_path / "0", 0, control, SETTINGS)
    assert (again.max_id, again.chain, again.suspect) == (8, chain, False)
    again.close()
    control.close()


def test_appends_write_the_bytes_of_0_13(tmp_path):
    case = load("segment_file.json")[0]
    data = bytes.fromhex(case["hex"])
    header = SegmentHeader.decode(data[:128])
    assert header.encode() == data[:128]
    engine = StorageEngine.open(
        RealDisk(), tmp_path, SETTINGS, partition_count=4, new_storage_id=bytes(range(16))
    )
    log = engine.assign(0)
    log.prepare(SessionId(1), bytes(16))
    lengths = np.array([RECORD_OVERHEAD_BYTES + r["dataLength"] for r in case["records"]])
    records = data[128:]
    assert first_bad_record(records, lengths) is None
    chain = next_chain(GENESIS_CHAIN, 0, 8, SessionId(1), record_crcs(records, lengths))
    log.append(SessionId(1), 0, lengths, records, GENESIS_CHAIN, [LineageEntry(0, 8, 1, 5, chain)])
    log.sync()
    engine.close()
    directory = tmp_path / "0"
    assert (directory / f"{'0' * 19}.seg").read_bytes() == data
    golden_index = bytes.fromhex(load("index_file.json")[0]["hex"])
    assert (directory / f"{'0' * 19}.idx").read_bytes()[128:] == golden_index[128:]


def test_the_record_crc_covers_header_and_data():
    for record in load("segment_file.json")[0]["records"]:
        raw = bytes.fromhex(record["hex"])
        assert crc32(raw[:-4]) == int(record["recordCrc32"], 16)


# Structures of this project: bytes of the first released version. New ones may be added; existing
# ones never change.


def test_the_layouts_of_this_version_have_not_changed():
    golden = load("ours.json")
    assert disk_format.encode_storage_id(bytes(range(16))).hex() == golden["storage_id"]
    entry = LineageEntry(3, 9, 7, 1795227976155, bytes(range(16)))
    head = disk_format.LineageHeader(SegmentHeader(5, KEY, 2, 43), bytes(range(16)))
    bound = {"segment_crc": head.segment_crc, "position": 1}
    assert disk_format.encode_entry(entry, 2, **bound).hex() == golden["lineage_entry"]
    assert disk_format.decode_entry(bytes.fromhex(golden["lineage_entry"]), **bound) == (entry, 2)
    assert head.encode().hex() == golden["lineage_header"]
    slot = disk_format.Slot(
        2,
        sequence=5,
        control_file_sequence=4,
        promised=7,
        nonce=bytes(range(16)),
        last_session=6,
        low_water_mark=40,
        provisional=disk_format.ProvisionalMark(7, 41),
        acked=disk_format.AckedMarker(42, bytes(range(16, 32))),
        truncate=disk_format.TruncateIntent(5, entry),
        damaged=(disk_format.IdRange(1, 2), disk_format.IdRange(9, 9)),
        dirty=True,
        suspect=True,
    )
    assert slot.encode().hex() == golden["slot"]
    assert disk_format.Slot.decode(bytes.fromhex(golden["slot"])) == slot
    wipe = WipeIntent(2, is_held=True, promised=7, nonce=bytes(range(16)))
    assert wipe.encode().hex() == golden["wipe"]
    assert WipeIntent.decode(bytes.fromhex(golden["wipe"])) == wipe
