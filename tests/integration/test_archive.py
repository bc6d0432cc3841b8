"""A cluster that archives and removes old segments keeps every transaction."""

from pathlib import Path
from uuid import UUID

from tests.integration.archiving import (
    SEGMENT_BYTES,
    STORAGES,
    ClusterArchive,
    append_and_archive,
    archiving_cluster,
    check_reads_of_all,
    payloads_of,
)
from waltz_core.local import LocalCluster
from waltz_core.records import raw_records
from waltz_core.records.record import PartitionId
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine


def local_log(cluster: LocalCluster, storage: str, key: UUID) -> tuple[int, list[bytes]]:
    """Return the start of a storage's log, and the payloads after it."""
    settings = LogSettings(key.bytes, SEGMENT_BYTES, lambda: 0)
    engine = StorageEngine.open(
        RealDisk(),
        cluster.directory / storage,
        settings,
        partition_count=1,
        new_storage_id=bytes(16),
    )
    try:
        log = engine.logs[PartitionId(0)]
        start = log.start.transaction_id
        read = log.read_range(start + 1, log.synced_max, 1 << 30, whole_batches=False)
        assert raw_records.first_bad_record(read.records, read.lengths) is None
        return start, payloads_of(read.records, read.lengths)
    finally:
        engine.abandon()


def test_archive_and_local_logs_together_have_all_transactions(tmp_path: Path):
    url = f"file://{tmp_path}/archive"
    archive = ClusterArchive(url)
    with archiving_cluster(tmp_path, url) as cluster:
        written = append_and_archive(cluster, archive)
        assert len(archive.objects()) > 1
        check_reads_of_all(cluster, written)
        cluster.down()
        newest = archive.newest_manifest()
        assert newest is not None
        assert archive.payloads() == written
        complete = 0
        for storage in STORAGES:
            start, payloads = local_log(cluster, storage, UUID(bytes=newest.cluster_key))
            assert 0 < start <= newest.last
            found = written[: start + 1] + payloads
            assert found == written[: len(found)]
            complete += found == written
        assert complete > len(STORAGES) // 2, "the storage that was started last may lag"
