"""After an expiry a log begins at a later ID. Reads below this ID report the first available ID."""

import time
from pathlib import Path

import pytest

from tests.client_contract import RecordingCallbacks
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.archiving import (
    STORAGES,
    ClusterArchive,
    append_and_archive,
    append_rows,
    archiving_cluster,
    oldest_segment_first_id,
    read_archived_mark,
    read_payloads,
)
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.garbage_collection import GarbageCollectionJob, collect_garbage
from waltz_core.archive.manifest import EXPIRY_GRACE_MS, Manifest, RecordedManifest
from waltz_core.client import WaltzClient
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BeforeLogStart
from waltz_core.local import LocalCluster
from waltz_core.records.record import PartitionId, SessionId

LATER_SESSION = SessionId(1 << 40)


def expire(cluster: LocalCluster, before: object, *words: str) -> str:
    """Run the command; return its output."""
    options = ("--connect", cluster.connect, "--before", str(before), "--partition", "0")
    result = run_command("archive", "expire", *options, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def first_of(cluster: LocalCluster) -> int:
    mark = read_archived_mark(cluster)
    assert mark is not None
    return mark.first


def check_reads(cluster: LocalCluster, written: list[bytes], first: int) -> None:
    """Read from below the first available ID, and from this ID on, in each way."""
    last = len(written) - 1
    with WaltzClient(cluster.connect) as client:
        replicas = client.replicas(0)
        assert replicas.archived is not None
        assert replicas.archived.first == first
        for source in (None, replicas):  # the server, then this process, reads
            begun_s = time.monotonic()
            with pytest.raises(BeforeLogStart, match=rf"(at transaction|one is) {first}") as caught:
                read_payloads(client, first - 1, last, source)
            assert caught.value.first_available == first
            assert time.monotonic() - begun_s < TEST_TIMEOUT_S / 2, "the error is not retried"
            assert read_payloads(client, first, last, source) == written[first:]
        ledger = RecordingCallbacks(first - 1)
        client.subscribe(ledger, [0])
        ledger.wait_until(lambda: len(ledger.applied) == len(written) - first)
        assert [data for _, _, data in ledger.applied] == written[first:]


def check_feed_below(cluster: LocalCluster, first: int, caplog: pytest.LogCaptureFixture) -> None:
    """A subscription from a mark below the log's start ends; the error names the first ID."""
    with WaltzClient(cluster.connect) as client:
        client.subscribe(RecordingCallbacks(-1), [0])
        wait_until("the feed has ended", lambda: not client.partitions)
    assert f"the log begins at transaction {first}" in caplog.text


def collect_later(archive: ClusterArchive, mark: ArchivedMark, cluster_key: bytes) -> None:
    """Collect garbage as a storage does it after the grace period."""
    recorded = RecordedManifest(
        PartitionId(0), mark.last, mark.chain, mark.manifest, mark.manifest_crc
    )
    job = GarbageCollectionJob(LATER_SESSION, bytes(16), 0, recorded)
    now_ms = time.time_ns() // 1_000_000 + EXPIRY_GRACE_MS
    collect_garbage(archive.store, cluster_key, job, now_ms=now_ms)


def object_names(archive: ClusterArchive) -> set[str]:
    return {name for name in archive.store.list_names("") if "/objects/" in name}


def test_an_expired_part_of_the_log_cannot_be_read_and_is_deleted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    url = f"file://{tmp_path}/archive"
    archive = ClusterArchive(url)
    with archiving_cluster(tmp_path, url) as cluster:
        written = append_and_archive(cluster, archive)
        before = min(oldest_segment_first_id(cluster, storage) for storage in STORAGES)
        preview = expire(cluster, before)
        shown = f"partition 0: the archive has transactions 0..{len(written) - 1}"
        assert f"{shown}; those before {before} would expire\n" in preview
        assert "nothing was changed" in preview
        assert first_of(cluster) == 0
        expire(cluster, before, "--yes")
        first = first_of(cluster)
        assert 0 < first <= before
        cluster.kill("server-1")  # it has cached the newest transactions
        cluster.start("server-1")
        check_reads(cluster, written, first)
        check_feed_below(cluster, first, caplog)
        shown_ids = run_command("client", "read", "--connect", cluster.connect, "--partition", "0")
        assert shown_ids.stdout.split(maxsplit=1)[0] == str(first), "the first available ID"
        mark = read_archived_mark(cluster)
        assert mark is not None
        manifest = Manifest.from_bytes(archive.store.read(mark.manifest), mark.manifest)
        expired = {entry.name for entry in manifest.newest_objects if entry.last < first}
        assert expired
        assert expired < object_names(archive), "the grace period has not passed"
        collect_later(archive, mark, manifest.cluster_key)
        assert object_names(archive) == {entry.name for entry in manifest.newest_objects} - expired
        check_reads(cluster, written, first)
        expire(cluster, 10 * len(written), "--yes")
        assert first_of(cluster) == len(written), "the ID after the archived mark"
        with WaltzClient(cluster.connect) as client:
            append_rows(client, written)
            assert read_payloads(client, len(written) - 10, len(written) - 1, None) == written[-10:]
