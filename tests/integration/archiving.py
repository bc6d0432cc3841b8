"""A cluster with one partition that archives into small objects, and a reader of its archive."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tests.client_contract import RecordingCallbacks
from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore
from waltz_core.client import ReplicaSet, WaltzClient
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.raw_records import I64, Buffer
from waltz_core.records.record import PartitionId

SEGMENT_BYTES: Final = 16 * 1024
STORAGES: Final = ("storage-1", "storage-2", "storage-3")
APPENDED_ROWS: Final = 100


def archiving_cluster(
    directory: Path, url: str, *, removes_segments: bool = True
) -> AbstractContextManager[LocalCluster]:
    """Start a cluster; with `removes_segments`, each log keeps two segments and the newest one."""
    storage: dict[str, object] = {
        "segment_bytes_max": SEGMENT_BYTES,
        "archive_url": url,
        "archive_object_bytes": 20_000,
        "archive_age_ms": 0,
        "local_retention_bytes": 2 * SEGMENT_BYTES if removes_segments else 0,
    }
    settings = {"storage": storage, "server": {"archive_interval_ms": 100}}
    return running_cluster(
        directory / "cluster", settings=settings, server_count=1, partition_count=1
    )


def payloads_of(records: Buffer, lengths: I64) -> list[bytes]:
    """Return the payloads of records."""
    found, at = [], 0
    for length in lengths.tolist():
        found.append(bytes(records[at : at + length][36:-4]))
        at += length
    return found


def append_rows(client: WaltzClient, written: list[bytes]) -> None:
    """Append different rows, one after the other, and record each row with its ID."""
    for _ in range(APPENDED_ROWS):
        row = b"%d:" % len(written) + bytes(500)
        assert client.append(row, partition=0).result(TEST_TIMEOUT_S) == len(written)
        written.append(row)


class ClusterArchive:
    """The archive of a cluster."""

    def __init__(self, url: str) -> None:
        self.store = ArchiveStore(url)

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest with the highest last ID."""
        names = [name for name in self.store.list_names("") if name.endswith(".json")]
        found = [Manifest.from_bytes(self.store.read(name), name) for name in names]
        return max(found, key=lambda each: each.last, default=None)

    def last(self) -> int:
        newest = self.newest_manifest()
        return -1 if newest is None else newest.last

    def objects(self) -> tuple[ObjectEntry, ...]:
        newest = self.newest_manifest()
        return () if newest is None else newest.newest_objects

    def payloads(self) -> list[bytes]:
        """Return the payloads of all verified objects, in order."""
        return self.payloads_of(self.objects())

    def payloads_of(self, objects: Sequence[ObjectEntry]) -> list[bytes]:
        """Return the payloads of objects from the first one on, which are verified."""
        found: list[bytes] = []
        for entry in objects:
            assert entry.first == len(found)
            with self.store.open(entry.name) as source:
                each = ArchiveObject(source, entry.name)
                assert [batch.chain for batch in each.verify()][-1] == entry.chain
                for group in range(each.group_count):
                    piece = each.read_row_group(group)
                    found += payloads_of(piece.records, piece.lengths)
        return found


def read_archived_mark(cluster: LocalCluster) -> ArchivedMark | None:
    """Return the archived mark in ZooKeeper."""

    async def read_payloads() -> ArchivedMark | None:
        async with open_session(cluster.connect) as coordinator:
            marker = (await coordinator.read_partition(PartitionId(0))).marker
            return None if marker is None else marker.archived

    return asyncio.run(read_payloads())


class ListedFiles:
    """The recorded manifest of an archive, and the files that it does not list."""

    def __init__(self, archive: ClusterArchive, mark: ArchivedMark) -> None:
        self.mark = mark
        head = Manifest.from_bytes(archive.store.read(mark.manifest), mark.manifest)
        assert not head.pages
        self.objects = head.newest_objects
        listed = {mark.manifest, *(entry.name for entry in head.newest_objects)}
        files = archive.store.list_files("")
        assert listed <= {file.name for file in files}
        self.garbage = [file for file in files if file.name not in listed]
        self.garbage_objects = [each for each in self.garbage if "/objects/" in each.name]


def oldest_segment_first_id(cluster: LocalCluster, storage: str) -> int:
    """Return the first ID of a storage's oldest segment file."""
    names = (cluster.directory / storage).glob("**/*.seg")
    return min(int("".join(filter(str.isdigit, name.stem))) for name in names)


def append_and_archive(cluster: LocalCluster, archive: ClusterArchive) -> list[bytes]:
    """Append until all is archived and all storages have removed segments; return the rows."""
    written: list[bytes] = []
    with WaltzClient(cluster.connect) as client:
        client.mount()
        append_rows(client, written)
        for storage in STORAGES:  # a new session confirms a mark
            cluster.kill(storage)
            cluster.start(storage)
            append_rows(client, written)
        wait_until(
            "all storages have removed segments",
            lambda: all(oldest_segment_first_id(cluster, each) > 0 for each in STORAGES),
        )
        wait_until("all is archived", lambda: archive.last() == len(written) - 1)
    return written


def read_payloads(
    client: WaltzClient, first: int, last: int, replicas: ReplicaSet | None
) -> list[bytes]:
    chunks = client.read_range(0, first, last, replicas=replicas)
    return [row for chunk in chunks for row in payloads_of(chunk.records, chunk.lengths)]


def check_reads_of_all(cluster: LocalCluster, written: list[bytes]) -> None:
    """Read all transactions in each way; removed transactions come from the archive."""
    last = len(written) - 1
    with WaltzClient(cluster.connect) as client:
        for replicas in (None, client.replicas(0)):  # by the server, by this process
            chunks = client.read_range(0, 0, last, replicas=replicas)
            found = [row for chunk in chunks for row in payloads_of(chunk.records, chunk.lengths)]
            assert found == written
        (filtered,) = client.read_range(0, 0, 9, header_values=[1])
        assert filtered.lengths.size == 0
        ledger = RecordingCallbacks(-1)
        client.subscribe(ledger, [0])
        ledger.wait_until(lambda: len(ledger.applied) == len(written))
    assert [data for _, _, data in ledger.applied] == written
