"""The log of a cluster begins later after an expiry; below that, every read names its first ID."""

import time
from pathlib import Path

import pytest

from tests.client_contract import Ledger
from tests.commands import run_command
from tests.fault.load import wait_until
from tests.integration.archiving import (
    STORAGES,
    Archive,
    append,
    archiving_cluster,
    fill,
    oldest_segment,
    read,
    recorded_in,
)
from tests.patience import HANG_S
from waltz_core.archive.garbage_collection import GarbageCollectionJob, collect_garbage
from waltz_core.archive.manifest import EXPIRY_GRACE_MS, Manifest, RecordedManifest
from waltz_core.client import WaltzClient
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BeforeLogStart
from waltz_core.local import LocalCluster
from waltz_core.records.record import PartitionId, SessionId

LATER_SESSION = SessionId(1 << 40)


def expire(cluster: LocalCluster, before: object, *words: str) -> str:
    """Run the command; return what it prints."""
    where = ("--connect", cluster.connect, "--before", str(before), "--partition", "0")
    done = run_command("archive", "expire", *where, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def first_of(cluster: LocalCluster) -> int:
    mark = recorded_in(cluster)
    assert mark is not None
    return mark.first


def check_reads(cluster: LocalCluster, written: list[bytes], first: int) -> None:
    """Read below the first available ID and from it on, in each way."""
    last = len(written) - 1
    with WaltzClient(cluster.connect) as client:
        replicas = client.replicas(0)
        assert replicas.archived is not None
        assert replicas.archived.first == first
        for source in (None, replicas):  # by the server, and by this process
            begun_s = time.monotonic()
            with pytest.raises(BeforeLogStart, match=rf"(at transaction|one is) {first}") as caught:
                read(client, first - 1, last, source)
            assert caught.value.first_available == first
            assert time.monotonic() - begun_s < HANG_S / 2, "the error is not retried"
            assert read(client, first, last, source) == written[first:]
        ledger = Ledger(first - 1)
        client.subscribe(ledger, [0])
        ledger.until(lambda: len(ledger.seen) == len(written) - first)
        assert [data for _, _, data in ledger.seen] == written[first:]


def check_feed_below(cluster: LocalCluster, first: int, caplog: pytest.LogCaptureFixture) -> None:
    """A subscription from a mark below the start ends, and its error names the first ID."""
    with WaltzClient(cluster.connect) as client:
        client.subscribe(Ledger(-1), [0])
        wait_until("the feed has ended", lambda: not client.partitions)
    assert f"the log begins at transaction {first}" in caplog.text


def collect_later(archive: Archive, mark: ArchivedMark, cluster_key: bytes) -> None:
    """Collect garbage as a storage does it after the grace period."""
    recorded = RecordedManifest(
        PartitionId(0), mark.last, mark.chain, mark.manifest, mark.manifest_crc
    )
    job = GarbageCollectionJob(LATER_SESSION, bytes(16), 0, recorded)
    now_ms = time.time_ns() // 1_000_000 + EXPIRY_GRACE_MS
    collect_garbage(archive.store, cluster_key, job, now_ms=now_ms)


def object_names(archive: Archive) -> set[str]:
    return {each for each in archive.store.names("") if "/objects/" in each}


def test_an_expired_part_of_the_log_cannot_be_read_and_is_deleted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    url = f"file://{tmp_path}/archive"
    archive = Archive(url)
    with archiving_cluster(tmp_path, url) as cluster:
        written = fill(cluster, archive)
        before = min(oldest_segment(cluster, each) for each in STORAGES)
        preview = expire(cluster, before)
        shown = f"partition 0: the archive has transactions 0..{len(written) - 1}"
        assert f"{shown}; those before {before} would expire\n" in preview
        assert "nothing was changed" in preview
        assert first_of(cluster) == 0
        expire(cluster, before, "--yes")
        first = first_of(cluster)
        assert 0 < first <= before
        cluster.kill("server-1")  # it has the newest transactions in memory
        cluster.start("server-1")
        check_reads(cluster, written, first)
        check_feed_below(cluster, first, caplog)
        shown_ids = run_command("client", "read", "--connect", cluster.connect, "--partition", "0")
        assert shown_ids.stdout.split(maxsplit=1)[0] == str(first), "the first available ID"
        mark = recorded_in(cluster)
        assert mark is not None
        manifest = Manifest.from_bytes(archive.store.read(mark.manifest), mark.manifest)
        expired = {each.name for each in manifest.newest if each.last < first}
        assert expired
        assert expired < object_names(archive), "the grace period has not passed"
        collect_later(archive, mark, manifest.cluster_key)
        assert object_names(archive) == {each.name for each in manifest.newest} - expired
        check_reads(cluster, written, first)
        expire(cluster, 10 * len(written), "--yes")
        assert first_of(cluster) == len(written), "the one after the archived mark"
        with WaltzClient(cluster.connect) as client:
            append(client, written)
            assert read(client, len(written) - 10, len(written) - 1, None) == written[-10:]
