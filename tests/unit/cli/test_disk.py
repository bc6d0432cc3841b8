"""`waltz-core disk`: output and exit codes of its commands."""

import json
import os
import subprocess
import sys
from random import Random

import msgpack
import numpy as np
import pytest

from tests.offline_storage import flip_byte, sample_storage, segment_files, write_to_directory
from tests.storage_model import ModeledLog, encode_record
from waltz_core.cli.main import main
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, next_chain

VALUES = [{"id": 0, "name": "Ada"}, {"id": 1, "tags": [1, 2]}, "three", None]


@pytest.fixture
def storage(tmp_path):
    """Segments 0..10, 11..23 and 24..35."""
    return sample_storage(tmp_path / "storage")[0]


def log_of(target, payloads):
    """A storage with these payloads in one batch."""
    modeled_log = ModeledLog(Random(1))
    modeled_log.prepare()
    encoded_records = [encode_record(record_id, one) for record_id, one in enumerate(payloads)]
    last = len(encoded_records) - 1
    chain = next_chain(
        GENESIS_CHAIN, 0, last, modeled_log.session, b"".join(one[-4:] for one in encoded_records)
    )
    entry = LineageEntry(0, last, modeled_log.session, 1_700_000_000_000, chain)
    lengths = np.array([len(one) for one in encoded_records])
    modeled_log.log.append(
        modeled_log.session, 0, lengths, b"".join(encoded_records), GENESIS_CHAIN, [entry]
    )
    modeled_log.close()
    return write_to_directory(modeled_log.disk, target)


def run_disk(capsys, *arguments):
    code = main(["disk", *map(str, arguments)])
    assert code == 0
    return capsys.readouterr().out


def lines(capsys, *arguments):
    return [json.loads(line) for line in run_disk(capsys, *arguments, "--json").splitlines()]


def test_verify_reports_the_damage_and_exits_with_1(storage, capsys):
    assert main(["disk", "verify", str(storage)]) == 0
    assert "0 wrong, 0 notes" in capsys.readouterr().out
    flip_byte(segment_files(storage)[1], 200)
    assert main(["disk", "verify", str(storage)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("wrong: 2/0000000000000000011.seg at 189: record 12: expected CRC ")
    assert "72 checksums of 36 records" in out
    assert "1 wrong, 0 notes" in out
    assert main(["disk", "verify", str(storage), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["wrong"] == 1
    (finding,) = value["findings"]
    assert (finding["kind"], finding["file"], finding["offset"]) == (
        "wrong",
        "2/0000000000000000011.seg",
        189,
    )
    assert value["partitions"][0]["unreadable"] == [[12, 12]]
    assert value["partitions"][0]["unchecked_batches"] == 1


def test_option_limit_bounds_the_number_of_shown_findings(storage, capsys):
    for path in segment_files(storage):
        flip_byte(path, 200)
    assert main(["disk", "verify", str(storage), "--limit", "1"]) == 1
    out = capsys.readouterr().out
    assert out.count("wrong: ") == 1
    assert "2 more findings were omitted; --limit shows more" in out


def test_id_options_select_records_and_segments(storage, capsys):
    found = lines(capsys, "dump-segment", storage, "--first", 9, "--last", 12)
    kinds = [one["kind"] for one in found]
    assert kinds == ["segment", "record", "record", "segment", "record", "record"]
    assert [one["transaction_id"] for one in found if one["kind"] == "record"] == [9, 10, 11, 12]
    (only,) = lines(capsys, "dump-segment", storage, "-r", "-t", 30)
    assert only["transaction_id"] == 30
    assert [one["first"] for one in lines(capsys, "dump-segment", storage, "-m")] == [0, 11, 24]


def test_a_dump_ignores_a_wrong_index(storage, capsys):
    for path in segment_files(storage, ".idx"):
        flip_byte(path, 128 + 8 * 5 + 7, 255)
    (only,) = lines(capsys, "dump-segment", storage, "-r", "-t", 5)
    assert (only["transaction_id"], only["is_valid"]) == (5, True)


def test_batches_are_printed_after_their_last_record(storage, capsys):
    found = lines(capsys, "dump-segment", segment_files(storage)[0], "-r", "--batches")
    order = [one.get("transaction_id", one.get("last")) for one in found]
    assert order == [0, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10]
    batches = lines(capsys, "dump-segment", storage, "--batches")
    assert [(one["first"], one["last"]) for one in batches][:3] == [(0, 2), (3, 7), (8, 8)]
    assert all(one["wrong"] == [] for one in batches)


def test_damage_is_shown_and_the_dump_continues(storage, capsys):
    path = segment_files(storage)[0]
    flip_byte(path, 500)
    flip_byte(path, 128 + 7)
    found = lines(capsys, "dump-segment", path, "-r")
    assert found[0]["kind"] == "gap"
    assert (found[0]["first"], found[0]["next_id"]) == (0, 1)
    assert [one["is_valid"] for one in found[1:]].count(False) == 1
    assert [one["transaction_id"] for one in found[1:]] == list(range(1, 11))
    out = run_disk(capsys, "dump-segment", path, "-r")
    assert "record 0: bytes 128..172 cannot be read: expected transaction ID 0, found 1" in out
    assert " NO" in out


@pytest.mark.parametrize("name", ["msgpack", "json", "payloads:read", "payloads:Reader"])
def test_a_deserializer_reads_payloads(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "payloads.py").write_text(
        "import json\n"
        "def read(data): return json.loads(data)\n"
        "class Reader:\n"
        "    def deserialize(self, data): return json.loads(data)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "payloads", raising=False)
    pack = msgpack.packb if name == "msgpack" else lambda value: json.dumps(value).encode()
    directory = log_of(tmp_path / "storage", [pack(one) for one in VALUES])
    found = lines(capsys, "dump-segment", directory, "-r", "-d", name)
    assert [one["data"] for one in found] == VALUES
    assert '{"id": 0, "name": "Ada"}' in run_disk(capsys, "dump-segment", directory, "-d", name)


def test_any_bytes_are_shown(tmp_path, capsys):
    directory = log_of(tmp_path, [b"plain", b"\xff\x00", "Zo\u00eb".encode()])
    found = lines(capsys, "dump-segment", directory, "-r", "--data")
    assert [one["data_hex"] for one in found] == ["706c61696e", "ff00", "5a6fc3ab"]
    out = run_disk(capsys, "dump-segment", directory, "--data")
    assert "  plain\n" in out
    assert "\\xff" in out
    assert "Zo\u00eb" in out


def test_the_dump_continues_after_an_unreadable_payload(tmp_path, capsys):
    directory = log_of(tmp_path, [b"{}", b"no json", b"[1]"])
    found = lines(capsys, "dump-segment", directory, "-r", "-d", "json")
    assert (found[0]["data"], found[2]["data"]) == ({}, [1])
    assert found[1]["data_error"].startswith("BadFormat: transaction data is not valid JSON")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("yaml", "--deserializer: expected bytes, msgpack, json or module:name, found 'yaml'"),
        ("nowhere:read", "--deserializer nowhere:read: No module named 'nowhere'"),
        ("json:nothing", "--deserializer json:nothing: module 'json' has no attribute 'nothing'"),
        (
            "json:__name__",
            "--deserializer json:__name__: expected a function that takes bytes, or",
        ),
    ],
)
def test_an_invalid_deserializer_is_rejected(storage, capsys, name, sentence):
    assert main(["disk", "dump-segment", str(storage), "-d", name]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"waltz-core: {sentence}")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["dump-segment", "nowhere"],
            "nowhere: expected a segment or a directory, found nothing",
        ),
        (["segment-statistic", "."], ".: the directory has no segments"),
        (["dump-control-file", "."], ".: expected a directory with waltz-storage.ctl or"),
        (["verify", "."], ".: expected a storage directory with waltz-storage.ctl"),
        (
            ["repair-index", "x.seg"],
            "x.seg: expected a segment file, whose name has 19 digits and ends in .seg",
        ),
        (
            ["dump-segment", ".", "--first", "-1"],
            "--first: expected a transaction ID of at least 0, found -1",
        ),
        (["dump-segment", ".", "-t", "1", "--last", "2"], "--transaction cannot be used"),
        (["verify", ".", "--limit", "-1"], "--limit: expected a number of at least 0, found -1"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(
    tmp_path, monkeypatch, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.seg").write_bytes(b"")
    assert main(["disk", *arguments]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"waltz-core: {sentence}")
    assert captured.count("\n") == 1


def test_the_statistics_count_all_segments(storage, capsys):
    (value,) = lines(capsys, "segment-statistic", storage)
    assert [one["records"] for one in value] == [11, 13, 12]
    assert value[0]["data_size"]["max"] == 55
    assert value[1]["sessions"][0]["session"] == 1
    assert value[2]["batches"] == {
        "count": 2,
        "wrong": 0,
        "records_min": 4,
        "records_mean": 6.5,
        "records_max": 9,
    }
    out = run_disk(capsys, "segment-statistic", storage)
    assert out.count("  records   ") == 3
    assert "  index     13 entries, 1.00 a record" in out


def test_control_files_are_shown_with_the_current_structures(storage, capsys):
    (value,) = lines(capsys, "dump-control-file", storage, "--assigned")
    (partition,) = value["partitions"]
    assert partition["partition"] == 2
    assert [one["counts"] for one in partition["structures"]].count(True) == 1
    current = next(one for one in partition["slots"] if one["counts"])
    assert (current["acked"], current["low_water_mark"], current["flags"]) == (35, -1, [])
    assert (current["last_session"], current["engaged"]) == (1, 1)
    assert value["storage_id"] == {"id": "00010203-0405-0607-0809-0a0b0c0d0e0f", "wrong": []}
    flip_byte(storage / "2" / "waltz-x.ctl", 20)
    flip_byte(storage / "2" / "waltz-x.ctl", 4096 + 20)
    out = run_disk(capsys, "dump-control-file", storage / "2")
    assert "expected CRC b25c4fb2, found a6093a67" in out
    assert out.splitlines()[2].split() == ["counts", "no", "no"]


def test_an_index_is_rebuilt_unless_the_command_is_a_dry_run(storage, capsys):
    path = segment_files(storage, ".idx")[1]
    good = path.read_bytes()
    flip_byte(path, 140)
    bad = path.read_bytes()
    out = run_disk(capsys, "repair-index", storage, "--dry-run")
    assert "0000000000000000011.idx: 1 wrong entry; would be rebuilt, 13 entries" in out
    assert out.count("; unchanged") == 2
    assert path.read_bytes() == bad
    out = run_disk(capsys, "repair-index", storage)
    assert "0000000000000000011.idx: 1 wrong entry; rebuilt, 13 entries" in out
    assert path.read_bytes() == good


def test_a_rejected_segment_does_not_stop_the_repair_of_other_segments(storage, capsys):
    flip_byte(segment_files(storage)[0], 39)
    flip_byte(segment_files(storage, ".idx")[1], 140)
    assert main(["disk", "repair-index", str(storage)]) == 1
    captured = capsys.readouterr()
    assert "0000000000000000011.idx: 1 wrong entry; rebuilt" in captured.out
    assert (
        "0000000000000000000.seg: the header is wrong: "
        "expected first transaction ID 0, found 1. No index" in captured.err
    )


LOCK_HOLDER_PROGRAM = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
if sys.argv[1].endswith(".id"):
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
else:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 128)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["waltz-x.id", "waltz-storage.ctl"], ids=["Waltz", "Waltz 0.13"])
def test_a_directory_of_a_running_storage_can_be_dumped_and_not_verified(storage, capsys, name):
    command = [sys.executable, "-c", LOCK_HOLDER_PROGRAM, str(storage / name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"open\n"
        for arguments, sentence in (
            (["verify"], "a running storage uses this directory"),
            (["repair-index", "--dry-run"], "a running storage uses this directory"),
            (["repair-index"], f"holds the lock on {name}"),
        ):
            assert main(["disk", *arguments, str(storage)]) == 1
            captured = capsys.readouterr()
            assert captured.out == ""
            assert sentence in captured.err
        assert len(lines(capsys, "dump-segment", storage, "-r")) == 36
        running.communicate()
    assert main(["disk", "verify", str(storage)]) == 0


def test_a_closed_pipe_ends_a_dump_without_an_error_message(tmp_path):
    directory = log_of(tmp_path, [b"x" * 100] * 1000)
    script = "import sys; from waltz_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "disk", "dump-segment", str(directory)]
    pipe = subprocess.PIPE
    # Python flushes its buffer when it exits. This must not fail because of the closed pipe.
    buffering = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=buffering) as running:
        assert b"cluster key" in running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 0
