"""Readers name a corrupt archive object, which is replaced from a storage that has its records."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.client_contract import RecordingCallbacks
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.archiving import (
    STORAGES,
    ClusterArchive,
    append_and_archive,
    archiving_cluster,
    check_reads_of_all,
    oldest_segment_first_id,
    read_archived_mark,
    read_payloads,
)
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.client import WaltzClient
from waltz_core.errors import Damaged, Unavailable
from waltz_core.local import LocalCluster


def verify(cluster: LocalCluster, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run the command; return its exit code, the problems of the partition, and its messages."""
    result = run_command("archive", "verify", "--connect", cluster.connect, "--json", *words)
    return (
        result.returncode,
        json.loads(result.stdout)["partitions"]["0"]["problems"],
        result.stderr,
    )


def spoil(path: Path) -> bytes:
    """Change the end of an object; return its original bytes."""
    data = path.read_bytes()
    path.write_bytes(data[:-8] + b"spoiled!")
    return data


def has_owner(cluster: LocalCluster) -> bool:
    with WaltzClient(cluster.connect) as client, suppress(Unavailable):
        return bool(client.replicas(0).replicas)
    return False


def check_read_error_names_object(cluster: LocalCluster, entry: ObjectEntry) -> None:
    """Check that the error of a read names the object, and that the client does not retry."""
    wait_until("the partition has an owner", lambda: has_owner(cluster))
    with WaltzClient(cluster.connect) as client, pytest.raises(Damaged) as caught:
        read_payloads(client, entry.first, entry.last, None)
    assert entry.name in str(caught.value)
    assert "waltz-core archive verify --repair" in str(caught.value)


def check_feed_error_names_object(
    cluster: LocalCluster, entry: ObjectEntry, log: pytest.LogCaptureFixture
):
    """Check that the owner interrupts a feed, and that the reason names the object."""
    log.clear()
    log.set_level(logging.INFO)
    with WaltzClient(cluster.connect) as client:
        client.subscribe(RecordingCallbacks(-1), [0])
        wait_until("the client logs the object", lambda: entry.name in log.text)
    assert "stream.interrupted" in log.text


@pytest.mark.slow
def test_a_corrupt_object_is_named_and_replaced_if_a_storage_has_its_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    url = f"file://{tmp_path}/archive"
    archive = ClusterArchive(url)
    with archiving_cluster(tmp_path, url) as cluster:
        written = append_and_archive(cluster, archive)
        starts = [oldest_segment_first_id(cluster, storage) for storage in STORAGES]
        archived_only, also_local = archive.objects()[0], archive.objects()[-1]
        assert archived_only.last < min(starts)
        assert also_local.first > max(starts)
        bytes_before = spoil(tmp_path / "archive" / archived_only.name)
        spoil(tmp_path / "archive" / also_local.name)
        cluster.kill("server-1")  # it has cached the newest transactions
        cluster.start("server-1")
        check_read_error_names_object(cluster, archived_only)
        check_feed_error_names_object(cluster, archived_only, caplog)

        code, problems, messages = verify(cluster, "--repair")
        assert code == 1
        assert [problem["name"] for problem in problems] == [archived_only.name, also_local.name]
        lost, repaired = problems
        assert not lost["is_repaired"]
        assert len(lost["failures"]) == len(STORAGES)
        assert all(
            "the log of this storage begins at" in failure for failure in lost["failures"]
        ), lost["failures"]
        assert f"{archived_only.name}: not repaired" in messages
        assert repaired["is_repaired"]
        assert f"{also_local.name}: repaired by storage {repaired['repaired_by']}" in messages

        code, problems, _ = verify(cluster)
        assert (code, [problem["name"] for problem in problems]) == (1, [archived_only.name])
        (tmp_path / "archive" / archived_only.name).write_bytes(bytes_before)
        assert verify(cluster)[:2] == (0, [])
        mark = read_archived_mark(cluster)
        assert mark is not None
        objects = Manifest.from_bytes(
            archive.store.read(mark.manifest), mark.manifest
        ).newest_objects
        assert objects[-1].name != also_local.name
        assert objects[:-1] == archive.objects()[:-1]
        assert archive.payloads_of(objects) == written
        check_reads_of_all(cluster, written)
