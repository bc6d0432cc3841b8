"""The benchmarks of the storage engine report correct figures and remove their files."""

import json

import pytest

from waltz_core.cli.main import main
from waltz_core.storage.log.partition_log import PartitionLog

SMALL_OPTIONS = ["--mib", "1", "--payload", "100", "--batch", "500"]
ROWS = (1 << 20) // 100 // 500 * 500


def bench(capsys, directory, *arguments):
    """Run a benchmark; return its exit code and its JSON line."""
    code = main(["bench", *arguments, *SMALL_OPTIONS, "--json", "--directory", str(directory)])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_appends_are_measured_and_read_back(capsys, tmp_path):
    code, report = bench(capsys, tmp_path, "storage-append")
    assert code == 0
    assert (report["rows"], report["acknowledged"], report["lost"]) == (ROWS, ROWS, 0)
    assert report["cpu_us_per_tx"] > 0
    extra = report["extra"]
    assert report["cpu_us_per_tx"] == pytest.approx(extra["append_us"] + extra["sync_us"], abs=0.01)
    assert extra["read_us"] > 0
    assert list(tmp_path.iterdir()) == []


def test_workload_storage_open_writes_the_requested_number_of_segments(capsys, tmp_path):
    code, report = bench(capsys, tmp_path, "storage-open", "--segments", "12")
    assert code == 0
    assert (report["rows"], report["lost"]) == (ROWS, 0)
    extra = report["extra"]
    assert 12 <= extra["segments"] <= 20
    openings = [extra[name] for name in ("after_crash_s", "after_stop_s", "again_s")]
    assert report["seconds"] == max(openings)
    assert 0 < extra["open_files"] < 64
    assert list(tmp_path.iterdir()) == []


def test_unreadable_rows_are_reported_as_lost(capsys, tmp_path, monkeypatch):
    append = PartitionLog.append

    def append_partly(log, session, first, *rest, **options):
        if first < 5_000:
            append(log, session, first, *rest, **options)

    monkeypatch.setattr(PartitionLog, "append", append_partly)
    code, report = bench(capsys, tmp_path, "storage-append")
    assert code == 1
    assert report["lost"] == ROWS - 5_000


@pytest.mark.parametrize("flag", ["--mib", "--segments"])
def test_an_amount_of_zero_is_rejected(capsys, flag):
    assert main(["bench", "storage-open", flag, "0"]) != 0
    assert f"{flag}: expected more than 0, found 0" in capsys.readouterr().err
