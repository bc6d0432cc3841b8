"""A cluster that archives and removes old segments keeps every transaction."""

from pathlib import Path
from uuid import UUID

from tests.integration.archiving import (
    SEGMENT_BYTES,
    STORAGES,
    Archive,
    archiving_cluster,
    datas_of,
    fill,
    read_all,
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
        return start, datas_of(read.records, read.lengths)
    finally:
        engine.abandon()


def test_archive_and_local_logs_together_have_all_that_was_written(tmp_path: Path):
    url = f"file://{tmp_path}/archive"
    archive = Archive(url)
    with archiving_cluster(tmp_path, url) as cluster:
        written = fill(cluster, archive)
        assert len(archive.objects()) > 1
        read_all(cluster, written)
        cluster.down()
        newest = archive.newest()
        assert newest is not None
        assert archive.datas() == written
        complete = 0
        for storage in STORAGES:
            start, datas = local_log(cluster, storage, UUID(bytes=newest.cluster_key))
            assert 0 < start <= newest.last
            found = written[: start + 1] + datas
            assert found == written[: len(found)]
            complete += found == written
        assert complete > len(STORAGES) // 2, "the last one that was started may be behind"
