"""The commands of the archive and the doctor, on a cluster that archives into a directory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from tests.commands import run_command
from tests.fault.doctor import await_findings
from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.pins import pin_objects
from waltz_core.archive.store import ArchiveStore
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster, running_cluster

APPENDS, ROWS_OF_ONE = 3, 50
ROWS = APPENDS * ROWS_OF_ONE


class Archived(NamedTuple):
    """A cluster with one partition, which is archived completely, and the URL of the archive."""

    cluster: LocalCluster
    url: str

    def command(self, subcommand: str, *words: str) -> tuple[int, dict[str, Any], str]:
        """Return the exit code, the value and the messages of a command."""
        result = run_command(
            "archive", subcommand, "--connect", self.cluster.connect, "--json", *words
        )
        return result.returncode, json.loads(result.stdout), result.stderr

    def status(self, *words: str) -> dict[str, Any]:
        code, output, _ = self.command("status", *words)
        assert (code, output["errors"]) == (0, [])
        (row,) = output["partitions"]
        return {"archive": output["archive"], **row}

    def append(self) -> None:
        """Append rows, and wait until they are archived."""
        with WaltzClient(self.cluster.connect) as client:
            for future in [client.append(bytes(500), partition=0) for _ in range(ROWS_OF_ONE)]:
                future.result(TEST_TIMEOUT_S)
        wait_until("all transactions are archived", lambda: self.status()["lag"] == 0)

    def path(self, name: str) -> Path:
        return Path(urlsplit(f"{self.url}/{name}").path)


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archived]:
    directory = tmp_path_factory.mktemp("archived")
    url = f"file://{directory}/archive"
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive_url": url, "archive_object_bytes": 20_000, "archive_age_ms": 0},
        "server": {"archive_interval_ms": 100},
    }
    options = {"settings": settings, "server_count": 1, "partition_count": 1}
    with running_cluster(directory / "cluster", **options) as cluster:
        archive = Archived(cluster, url)
        for _ in range(APPENDS):
            archive.append()  # at least one object
        yield archive


def test_the_status_shows_the_archived_transactions_of_a_partition(archived: Archived):
    status = archived.status()
    assert status["archive"] == archived.url  # as in the settings of the storages
    assert status["first_available"] == 0
    assert (status["lag"], status["lag_bytes"], status["lag_s"]) == (0, 0, 0.0)
    assert status["archived"] == status["high_water_mark"] == ROWS - 1
    assert archived.path(status["manifest"]).is_file()
    assert "files" not in status
    rows, next_id, size = 0, 0, 0
    listed = archived.status("--objects")
    for file in listed["files"]:
        assert file["first"] == next_id
        assert 0 < file["commit_ms_min"] <= file["commit_ms_max"]
        rows += pq.read_table(file["url"]).num_rows
        next_id, size = file["last"] + 1, size + file["bytes"]
    assert (rows, next_id, len(listed["files"])) == (ROWS, ROWS, listed["objects"])
    assert size == listed["bytes"] == status["bytes"]
    assert status["objects"] > 1
    text = run_command("archive", "status", "--connect", archived.cluster.connect)
    assert (text.returncode, text.stderr) == (0, f"archive: {archived.url}\n")
    titles, row = text.stdout.splitlines()
    assert titles.split()[:3] == ["partition", "first", "available"]
    assert row.split()[:4] == ["0", "0", str(ROWS - 1), str(ROWS - 1)]


def test_the_status_reports_an_unreadable_archive_and_all_other_values(archived: Archived):
    code, output, _ = archived.command("status", "--archive", f"{archived.url}-elsewhere")
    assert code == 1
    assert "the directory is mounted" in output["errors"][0]
    assert output["partitions"][0]["objects"] is None
    assert output["partitions"][0]["archived"] == ROWS - 1
    result = run_command("archive", "status", "--connect", archived.cluster.connect, "--objects")
    assert (result.returncode, result.stderr) == (
        1,
        "waltz-core: --objects requires --json\n",
    )


def test_a_storage_that_does_not_answer_is_reported(archived: Archived):
    archived.cluster.kill("storage-1")
    code, output, _ = archived.command("status")
    assert code == 1
    assert [error for error in output["errors"] if error.startswith("storage ")]
    assert output["archive"] == archived.url, "the other storages report the value"
    archived.cluster.start("storage-1")
    wait_until("all storages answer", lambda: archived.command("status")[0] == 0)


def test_pins_are_shown_and_removed(archived: Archived):
    """An interrupted restore, for example, leaves a pin."""
    connect = archived.cluster.connect
    key = json.loads(run_command("cluster", "show-key", "--connect", connect, "--json").stdout)
    source, restored = UUID(key["cluster_key"]), UUID(int=7)
    assert archived.command("status")[1]["pins"] == []
    pin_objects(ArchiveStore(archived.url), source.bytes, restored.bytes)
    assert archived.command("status")[1]["pins"] == [str(restored)]
    text = run_command("archive", "status", "--connect", connect)
    assert (
        f"no objects are deleted from the archive, because the restored cluster {restored} may"
        in text.stderr
    )
    result = run_command("archive", "unpin", str(UUID(int=8)), "--connect", connect)
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        f"expected a pin of the cluster with key {UUID(int=8)}, found {restored}" in result.stderr
    )
    result = run_command("archive", "unpin", str(source), "--connect", connect)
    assert f"in this ZooKeeper has the key {source}, and needs the pinned" in result.stderr
    result = run_command("archive", "unpin", str(restored), "--connect", connect)
    assert result.returncode == 0, result
    assert archived.command("status")[1]["pins"] == []


def test_every_file_is_verified_and_a_corrupt_one_is_named(archived: Archived):
    files = archived.status("--objects")["files"]
    code, output, messages = archived.command("verify", "--archive", archived.url)
    assert (code, output["passed"]) == (0, True)
    assert output["partitions"]["0"]["objects"] == len(files)
    assert f"up to transaction {ROWS - 1}: 0 wrong files" in messages
    bad = Path(urlsplit(files[1]["url"]).path)
    data = bad.read_bytes()
    try:
        bad.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        code, output, messages = archived.command("verify")
        (problem,) = output["partitions"]["0"]["problems"]
        assert code == 1
        assert not output["passed"]
        assert problem["name"] in files[1]["url"]
        assert (problem["first"], problem["last"]) == (files[1]["first"], files[1]["last"])
        assert "expected a file with CRC-32" in problem["problem"]
        location = f"transactions {files[1]['first']}..{files[1]['last']}, file {problem['name']}"
        assert location in messages
        assert "Hint: add --repair to write the file again" in messages
        # A range that the object does not contain.
        words = ("--partition", "0", "--first", str(files[2]["first"]))
        assert archived.command("verify", *words)[0] == 0
        code, output, messages = archived.command("verify", "--first", str(ROWS))
        assert (code, output["passed"]) == (1, False)
        assert f"{ROWS} on are not archived; the last archived one is {ROWS - 1}" in messages
        bad.unlink()
        _, output, _ = archived.command("verify")
        assert "it does not exist" in output["partitions"]["0"]["problems"][0]["problem"]
        manifest = archived.path(archived.status()["manifest"])
        hidden = manifest.rename(manifest.with_suffix(".hidden"))
        _, output, _ = archived.command("verify")
        hidden.rename(manifest)
        (problem,) = output["partitions"]["0"]["problems"]
        assert problem["name"].endswith(manifest.name)
    finally:
        bad.write_bytes(data)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--partition", "1"), "--partition: expected a partition in 0..0, found 1"),
        (
            ("--first", "7", "--last", "6"),
            "expected 0 <= --first <= --last, found --first 7 and --last 6",
        ),
        (("--archive", "nowhere"), "archive nowhere cannot be used: "),
    ],
)
def test_verify_rejects_invalid_partitions_and_ids(
    archived: Archived, words: tuple[str, ...], error: str
):
    result = run_command("archive", "verify", "--connect", archived.cluster.connect, *words)
    assert result.returncode == 1
    assert result.stderr.startswith(f"waltz-core: {error}")


def test_the_doctor_reports_a_damaged_manifest_that_a_storage_has_found(archived: Archived):
    connect = archived.cluster.connect
    manifest = archived.path(archived.status()["manifest"])
    data = manifest.read_bytes()
    doctor_options = ("--connect", connect, "--directory", "/nonexistent")
    await_findings((), *doctor_options)
    manifest.write_bytes(data[:-1] + b" ")
    try:
        with WaltzClient(connect) as client:
            client.append(b"more", partition=0).result(TEST_TIMEOUT_S)
        findings = await_findings(("archive-damaged",), *doctor_options)
        assert str(manifest.name) in findings[0]["sentence"]
        assert findings[0]["command"] == f"waltz-core archive verify --repair --connect {connect}"
        words = findings[0]["command"].split()[1:]
        assert manifest.name in run_command(*words).stdout
        assert archived.command("status")[1]["partitions"][0]["lag"] == 1
        assert archived.command("status")[1]["partitions"][0]["lag_s"] > 0
    finally:
        manifest.write_bytes(data)
    wait_until("all transactions are archived", lambda: archived.status()["lag"] == 0)
    await_findings((), *doctor_options)


def test_the_doctor_reports_an_archive_that_cannot_be_written(archived: Archived):
    connect = archived.cluster.connect
    doctor_options = ("--connect", connect, "--directory", "/nonexistent")
    folder = archived.path("")
    hidden = folder.rename(folder.with_name("hidden"))
    folder.touch()  # Replaces the folder by a file.
    try:
        with WaltzClient(connect) as client:
            client.append(b"more", partition=0).result(TEST_TIMEOUT_S)
        findings = await_findings(("archive-unavailable",), *doctor_options)
        assert "): archive: cannot" in findings[0]["sentence"]
        result = run_command(*findings[0]["command"].split()[1:])
        assert result.returncode == 1
        assert "archive: cannot" in result.stderr
    finally:
        folder.unlink()
        hidden.rename(folder)
    wait_until("all transactions are archived", lambda: archived.status()["lag"] == 0)
    await_findings((), *doctor_options)
