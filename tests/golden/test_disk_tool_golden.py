"""The disk tool on a 0.13 storage directory, before and after this version has opened it."""

import json

import pytest

from tests.golden.test_disk_golden import KEY, load, original_directory
from tests.offline_storage import flip_byte, overwrite_bytes, verification_texts, verify_directory
from waltz_core.cli.main import main
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine

NAME = "0" * 19
ONLY_THE_ORIGINAL = (
    "0/waltz-x.ctl: the file is missing: only Waltz 0.13 has written to this directory"
)


@pytest.fixture
def storage(tmp_path):
    original_directory(tmp_path)
    return tmp_path


def run_tool(capsys, *words):
    """Return the JSON output of a command, one value for each line."""
    code = main(["disk", *map(str, words), "--json"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_0_13_program_directory_verifies(storage, capsys):
    # Waltz 0.13 had assigned all four partitions; the golden files are those of one partition.
    missing = [
        (
            f"{one}: the directory is missing, but in the control file partition {one} is assigned "
            "to the storage and has session 0"
        )
        for one in (1, 2, 3)
    ]
    assert verification_texts(storage) == (missing, [ONLY_THE_ORIGINAL])
    log = verify_directory(storage, partitions=[0]).logs[0]
    assert (log.record_count, log.checksum_count, log.last) == (9, 18, 8)
    code, (value,) = run_tool(capsys, "verify", storage, "--partition", 0)
    assert code == 0
    assert (value["wrong"], value["notes"]) == (0, 1)
    assert value["partitions"][0]["bytes"] == 551


def test_the_dump_of_0_13_records_has_the_captured_values(storage, capsys):
    code, lines = run_tool(capsys, "dump-segment", storage, "--data")
    assert code == 0
    case = load("segment_file.json")[0]
    header = case["header"]
    assert lines[0]["cluster_key"] == header["key"]
    assert lines[0]["created_ms"] == header["creationTimeMs"]
    assert len(lines) == 1 + len(case["records"])
    for line, record in zip(lines[1:], case["records"], strict=True):
        assert line["transaction_id"] == record["transactionId"]
        assert line["offset"] == record["offset"]
        assert (
            line["client_id"],
            line["generation"],
            line["partition"],
            line["sequence"],
        ) == tuple(record["reqId"].values())
        assert line["header"] == record["header"]
        assert line["data_bytes"] == record["dataLength"]
        assert (line["crc"], line["data_crc"]) == (record["recordCrc32"], record["dataCrc32"])
        assert bytes.fromhex(line["data_hex"]).decode() == record["data"]
        assert line["is_valid"]


@pytest.mark.parametrize("case", load("control_file.json"), ids=lambda one: one["name"])
def test_the_dump_of_a_0_13_control_file_has_the_captured_values(tmp_path, capsys, case):
    path = tmp_path / "waltz-storage.ctl"
    path.write_bytes(bytes.fromhex(case["hex"]))
    code, (value,) = run_tool(capsys, "dump-control-file", path)
    assert code == 0
    decoded = case["decoded"]
    assert value["control_file"]["cluster_key"] == decoded["key"]
    assert value["control_file"]["partition_count"] == decoded["numPartitions"]
    assert value["control_file"]["wrong"] == []
    for partition, stated in zip(value["partitions"], decoded["partitions"], strict=True):
        for position, one in enumerate(partition["structures"]):
            expected = stated[f"struct{position + 1}"]
            assert one["session"] == expected["sessionId"]
            assert one["low_water_mark"] == expected["lowWaterMark"]
            assert one["local_low_water_mark"] == expected["localLowWaterMark"]
            assert one["sequence"] == expected["sequenceNumber"]
            assert one["counts"] == (stated["current"] == position + 1)
            assert one["wrong"] == []


def test_a_rebuilt_0_13_index_equals_the_original_index(storage, capsys):
    index = storage / "0" / f"{NAME}.idx"
    good = index.read_bytes()
    code, (value,) = run_tool(capsys, "repair-index", storage)
    assert (code, value[0]["is_valid"]) == (0, True)
    overwrite_bytes(index, 150, b"\xff")
    code, (value,) = run_tool(capsys, "repair-index", storage)
    assert (code, value[0]["is_rebuilt"], value[0]["wrong"]) == (0, True, 1)
    assert index.read_bytes()[128:] == good[128:]


def test_corruption_anywhere_in_a_0_13_directory_is_found(storage):
    path = storage / "0" / f"{NAME}.seg"
    size = path.stat().st_size
    for at in [*range(4), *range(12, size)]:
        flip_byte(path, at)
        findings = verify_directory(storage, partitions=[0]).findings
        assert findings.error_count, at
        assert any(
            finding.path == f"0/{NAME}.seg"
            for finding in findings.kept_findings
            if finding.is_error
        ), at
        flip_byte(path, at)


def test_a_0_13_directory_opened_by_this_version_passes_the_verification(storage):
    engine = StorageEngine.open(
        RealDisk(),
        storage,
        LogSettings(KEY, 1_000_000_000, lambda: 1795300000000),
        partition_count=4,
        new_storage_id=bytes(range(16)),
    )
    assert sorted(engine.logs) == [0, 1, 2, 3]
    engine.close()
    # Waltz 0.13 creates a partition's directory before its first session, so a missing directory
    # was lost. The three missing directories are created again, and confirm no records.
    lost = "the replica is suspect: its log is not trusted until it is repaired"
    notes = []
    for one in (1, 2, 3):
        new_session = (
            f"waltz-storage.ctl: partition {one}: expected session -1, as in the control "
            "slot, found 0"
        )
        notes += [new_session, f"{one}/waltz-x.ctl: {lost}"]
    assert verification_texts(storage) == ([], notes)
    log = verify_directory(storage).logs[0]
    assert (log.last, log.batch_count, log.unchecked_batch_count) == (8, 1, 0)
