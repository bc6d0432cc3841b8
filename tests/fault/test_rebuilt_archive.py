"""ZooKeeper's data is lost after storages have removed archived segments."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.commands import run_command
from tests.fault.load import start_zookeeper, wait_until
from tests.integration.archiving import (
    STORAGES,
    ClusterArchive,
    ListedFiles,
    append_rows,
    archiving_cluster,
    check_reads_of_all,
    oldest_segment_first_id,
    read_archived_mark,
)
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.fault
HIDDEN: Final = "hidden"


@pytest.fixture
def archive(tmp_path: Path) -> ClusterArchive:
    return ClusterArchive(f"file://{tmp_path}/archive")


@pytest.fixture
def cluster(tmp_path: Path, archive: ClusterArchive) -> Iterator[LocalCluster]:
    with archiving_cluster(tmp_path, archive.store.url) as cluster:
        yield cluster


def append_and_archive(
    cluster: LocalCluster, archive: ClusterArchive, written: list[bytes]
) -> None:
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        client.mount()
        append_rows(client, written)
    wait_until("all transactions are archived", lambda: recorded_last(cluster) == len(written) - 1)


def recorded_last(cluster: LocalCluster) -> int:
    mark = read_archived_mark(cluster)
    return -1 if mark is None else mark.last


def remove_segments(cluster: LocalCluster, archive: ClusterArchive, written: list[bytes]) -> None:
    """Append until each storage has removed segments; new sessions confirm marks for removals."""
    for storage in STORAGES:
        append_and_archive(cluster, archive, written)
        cluster.kill(storage)
        cluster.start(storage)
    append_and_archive(cluster, archive, written)
    wait_until(
        "all storages have removed segments",
        lambda: all(oldest_segment_first_id(cluster, each) > 0 for each in STORAGES),
    )


def lose_zookeeper(cluster: LocalCluster) -> None:
    for member in reversed(cluster.members):
        cluster.kill(member.name, signal.SIGTERM)
    shutil.rmtree(cluster.directory / "zookeeper" / "version-2")
    start_zookeeper(cluster)


def rebuild(cluster: LocalCluster, *options: str) -> tuple[int, dict[str, Any] | None, str]:
    """Rebuild the metadata; return the exit code, the result and the messages."""
    named = []
    for name in STORAGES:
        member = cluster.member(name)
        named += ["--storage", f"127.0.0.1:{member.port}:{member.admin_port}"]
    words = ["cluster", "rebuild-metadata", "--connect", cluster.connect, "--json", *named]
    words += ["--from-directory", str(cluster.directory / STORAGES[0])]
    ran = run_command(*words, *options)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout else None, ran.stderr


@pytest.mark.slow
def test_removed_transactions_are_found_in_the_archive_again(
    cluster: LocalCluster, archive: ClusterArchive, tmp_path: Path
) -> None:
    written: list[bytes] = []
    remove_segments(cluster, archive, written)
    before = read_archived_mark(cluster)
    assert before is not None
    lose_zookeeper(cluster)
    assert rebuild(cluster, "--only-znodes")[0] == 0
    for name in STORAGES:
        cluster.start(name)

    # With a wrong archive the log must not open, because its beginning is missing.
    code, _, messages = rebuild(cluster, "--archive", f"file://{tmp_path}/empty")
    assert code == 1
    assert "0 partitions are open again, 1 are not: partition 0: the log of " in messages
    assert "; found none. Hint: " in messages
    rejected = run_command(
        *("cluster", "accept-replicas", "0", "--yes", "--connect", cluster.connect),
        *("--archive", f"file://{tmp_path}/empty"),
    )
    assert rejected.returncode == 1
    assert "partition 0: the log of " in rejected.stderr
    assert read_archived_mark(cluster) is None

    cluster.start("server-1")
    code, result, messages = rebuild(cluster)
    assert (code, result is None) == (0, False), messages
    assert result is not None
    assert f"of which the archive has 0..{before.last}" in " ".join(result["steps"])
    recorded = read_archived_mark(cluster)
    assert recorded is not None
    assert (recorded.last, recorded.chain) == (before.last, before.chain)
    assert recorded.manifest == before.manifest
    assert recorded.stamp_ms == before.stamp_ms
    check_reads_of_all(cluster, written)

    check_empty_replica(cluster, archive, written)
    check_collection(cluster, archive, written)


def check_empty_replica(
    cluster: LocalCluster, archive: ClusterArchive, written: list[bytes]
) -> None:
    """A replica that is emptied begins at the archived mark, and the archiver continues."""
    cluster.kill(STORAGES[2])
    shutil.rmtree(cluster.directory / STORAGES[2])
    append_and_archive(cluster, archive, written)
    lost = f"127.0.0.1:{cluster.member(STORAGES[2]).port}"
    cluster.start(STORAGES[2])
    replaced = run_command("cluster", "replace-storage", lost, lost, "--connect", cluster.connect)
    assert replaced.returncode == 0, replaced
    assert oldest_segment_first_id(cluster, STORAGES[2]) > 0
    append_and_archive(cluster, archive, written)
    check_reads_of_all(cluster, written)


def check_collection(cluster: LocalCluster, archive: ClusterArchive, written: list[bytes]) -> None:
    """The new owner collects the garbage of earlier sessions, and no file that a manifest lists."""

    def is_collected() -> bool:
        logs = [cluster.log_path(storage).read_text(errors="replace") for storage in STORAGES]
        mark = read_archived_mark(cluster)
        assert mark is not None
        return (
            any("storage.garbage_collected" in log for log in logs)
            or not ListedFiles(archive, mark).garbage_objects
        )

    wait_until("garbage is collected", is_collected)
    mark = read_archived_mark(cluster)
    assert mark is not None
    assert archive.payloads_of(ListedFiles(archive, mark).objects) == written
    logs = "".join(cluster.log_path(storage).read_text(errors="replace") for storage in STORAGES)
    assert "collection_failed" not in logs
