"""A cluster that archives and removes old segments keeps every transaction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

from tests.client_contract import Ledger
from tests.fault.load import wait_until
from tests.patience import HANG_S
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster, running
from waltz_core.records import raw_records
from waltz_core.records.raw_records import I64, Buffer
from waltz_core.records.record import PartitionId
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.engine import Engine

SEGMENT_BYTES: Final = 16 * 1024
STORAGES: Final = ("storage-1", "storage-2", "storage-3")
ROWS: Final = 100


def datas_of(records: Buffer, lengths: I64) -> list[bytes]:
    """Return the payloads of records."""
    found, at = [], 0
    for length in lengths.tolist():
        found.append(bytes(records[at : at + length][36:-4]))
        at += length
    return found


def append(client: WaltzClient, written: list[bytes]) -> None:
    """Append rows that differ, one after the other, and note them at their IDs."""
    for _ in range(ROWS):
        row = b"%d:" % len(written) + bytes(500)
        assert client.append(row, partition=0).result(HANG_S) == len(written)
        written.append(row)


class Archive:
    """The archive of a cluster."""

    def __init__(self, url: str) -> None:
        self.store = ArchiveStore(url)

    def newest(self) -> Manifest | None:
        """Return the manifest that reaches furthest."""
        names = [each for each in self.store.names("") if each.endswith(".json")]
        found = [Manifest.from_bytes(self.store.read(each), each) for each in names]
        return max(found, key=lambda each: each.last, default=None)

    def last(self) -> int:
        newest = self.newest()
        return -1 if newest is None else newest.last

    def objects(self) -> tuple[ObjectEntry, ...]:
        newest = self.newest()
        return () if newest is None else newest.newest

    def datas(self) -> list[bytes]:
        """Return the payloads of all verified objects, in order."""
        return self.datas_of(self.objects())

    def datas_of(self, objects: Sequence[ObjectEntry]) -> list[bytes]:
        """Return the payloads of objects from the first one on, which are verified."""
        found: list[bytes] = []
        for entry in objects:
            assert entry.first == len(found)
            with self.store.open(entry.name) as source:
                each = ArchiveObject(source, entry.name)
                assert [batch.chain for batch in each.verify()][-1] == entry.chain
                for group in range(each.group_count):
                    piece = each.read(group)
                    found += datas_of(piece.records, piece.lengths)
        return found


def oldest_segment(cluster: LocalCluster, storage: str) -> int:
    """Return the first ID of a storage's oldest segment file."""
    names = (cluster.directory / storage).glob("**/*.seg")
    return min(int("".join(filter(str.isdigit, each.stem))) for each in names)


def local_log(cluster: LocalCluster, storage: str, key: UUID) -> tuple[int, list[bytes]]:
    """Return the start of a storage's log, and the payloads after it."""
    settings = LogSettings(key.bytes, SEGMENT_BYTES, lambda: 0)
    engine = Engine.open(
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


def read_all(cluster: LocalCluster, written: list[bytes]) -> None:
    """Read everything in each way: removed transactions come from the archive."""
    last = len(written) - 1
    with WaltzClient(cluster.connect) as client:
        for replicas in (None, client.replicas(0)):  # by the server, and by this process
            chunks = client.read_range(0, 0, last, replicas=replicas)
            found = [row for each in chunks for row in datas_of(each.records, each.lengths)]
            assert found == written
        (filtered,) = client.read_range(0, 0, 9, header_values=[1])
        assert filtered.lengths.size == 0
        ledger = Ledger(-1)
        client.subscribe(ledger, [0])
        ledger.until(lambda: len(ledger.seen) == len(written))
    assert [data for _, _, data in ledger.seen] == written


def test_archive_and_local_logs_together_have_all_that_was_written(tmp_path: Path):
    settings: dict[str, dict[str, object]] = {
        "storage": {
            "segment_bytes_max": SEGMENT_BYTES,
            "archive_url": f"file://{tmp_path}/archive",
            "archive_object_bytes": 20_000,
            "archive_age_ms": 0,
            "local_retention_bytes": 2 * SEGMENT_BYTES,
        },
        "server": {"archive_interval_ms": 100},
    }
    archive, written = Archive(f"file://{tmp_path}/archive"), list[bytes]()
    options = {"settings": settings, "server_count": 1, "partition_count": 1}
    with running(tmp_path / "cluster", **options) as cluster:
        with WaltzClient(cluster.connect) as client:
            client.mount()
            append(client, written)
            wait_until("all is archived", lambda: archive.last() == len(written) - 1)
            assert len(archive.objects()) > 1
            for storage in STORAGES:
                # A session that begins confirms a mark up to which segments may be removed.
                cluster.kill(storage)
                cluster.start(storage)
                append(client, written)
            wait_until(
                "all storages have removed segments",
                lambda: all(oldest_segment(cluster, each) > 0 for each in STORAGES),
            )
            wait_until("all is archived", lambda: archive.last() == len(written) - 1)
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
