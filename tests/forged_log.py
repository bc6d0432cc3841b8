"""A synthetic log of a billion transactions: forged metadata without the records.

Each partition gets the files of a storage after a session with this number of transactions. The
files have the last record, its position in an index, one batch that covers all IDs, and the marker
of the durable end. ZooKeeper gets the metadata that the session's owner would have written. The
other records are missing, so only the last record can be read. Appends continue after this record.
"""

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path
from uuid import UUID

from waltz_core.cluster.znodes.model import (
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
    ReplicaState,
)
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.local import LocalCluster
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    LineageEntry,
    ReqId,
    next_chain,
)
from waltz_core.storage.disk.file_system import RealDisk, RealFile
from waltz_core.storage.files.control_file import SlotFile
from waltz_core.storage.files.format import (
    OFFSET_BYTES,
    SEGMENT_HEADER_BYTES,
    AckedMarker,
    SegmentHeader,
)
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine

STAMP_MS = 1_700_000_000_000
SESSION, GENERATION = 0, 1
DATA = b"the last one"


class UnsyncedFile(RealFile):
    def sync(self):
        """Do nothing, because a forged log has no promise."""


class UnsyncedDisk(RealDisk):
    def open(self, path, *, create=False, is_best_effort=False):
        how = {"create": create, "is_best_effort": is_best_effort}
        return UnsyncedFile(path, descriptors=self.descriptors, **how)

    def sync_directory(self, directory):
        """Do nothing."""


def write_forged_log(cluster: LocalCluster, last: int) -> None:
    """Write the log 0..last to each partition of a cluster that was prepared but never started."""
    key, addresses = asyncio.run(_write_metadata(cluster.connect))
    for member in cluster.members:
        if member.kind == "storage":
            assert f"127.0.0.1:{member.port}" in addresses
            _write_storage(cluster.directory / member.name, key, cluster.partition_count, last)


async def _write_metadata(connect: str) -> tuple[UUID, list[str]]:
    async with zookeeper_session.open_session(connect) as coordinator:
        store = (await coordinator.read_cluster()).store
        assignment = (await coordinator.read_replica_assignment()).partitions
        marker = PartitionMarker(MarkerState.OPEN, SESSION)

        async def write(partition: int) -> None:
            states = {
                address: ReplicaState(SESSION)
                for address, held in assignment.items()
                if partition in held
            }
            view = await coordinator.read_partition(partition)
            metadata = PartitionMetadata(GENERATION, SESSION, states)
            await coordinator.write_partition(partition, metadata, marker, view.versions)

        for first in range(0, store.partition_count, 100):
            async with asyncio.TaskGroup() as group:
                for partition in range(first, min(first + 100, store.partition_count)):
                    group.create_task(write(partition))
        return store.cluster_key, list(assignment)


def _write_storage(directory: Path, key: UUID, partition_count: int, last: int) -> None:
    disk = UnsyncedDisk()
    settings = LogSettings(key.bytes, 1 << 30, lambda: STAMP_MS)
    engine = StorageEngine.open(
        disk,
        directory,
        settings,
        partition_count=partition_count,
        new_storage_id=zlib.crc32(directory.name.encode()).to_bytes(16, "big"),
    )
    for partition in range(partition_count):
        engine.assign(partition)
    engine.close()
    chain = next_chain(GENESIS_CHAIN, 0, last, SESSION, bytes(4 * (last + 1)))
    for partition in range(partition_count):
        _write_partition(disk, directory / str(partition), key, partition, last, chain)


def _write_partition(disk, directory, key, partition, last, chain):
    segment = Segment.open(disk, directory, 0, partition_id=partition, cluster_key=key.bytes)
    entry = LineageEntry(0, last, SESSION, STAMP_MS, chain)
    segment.append_entries([entry], BEFORE_FIRST)
    segment.close()
    stem = f"{directory}/{0:019d}"
    with open(stem + ".seg", "ab") as records:
        records.write(encode_record(last, partition))
    with open(stem + ".idx", "r+b") as index:  # a sparse file, except for its end
        index.seek(SEGMENT_HEADER_BYTES + OFFSET_BYTES * last)
        index.write(SEGMENT_HEADER_BYTES.to_bytes(OFFSET_BYTES, "big"))
    header = SegmentHeader(STAMP_MS, key.bytes, partition, last + 1)
    Segment.create(disk, directory, header, chain).close()
    slots = SlotFile.open(disk, directory, partition)
    slots.write(
        replace(slots.slot, promised=SESSION, last_session=SESSION, acked=AckedMarker(last, chain))
    )
    slots.close()


def encode_record(transaction_id: int, partition: int) -> bytes:
    """Return the bytes of one record."""
    req_id = ReqId(1, GENERATION, partition, transaction_id).to_bytes()
    prefix = RECORD_PREFIX.pack(transaction_id, req_id, 7, len(DATA), zlib.crc32(DATA))
    body = prefix + DATA
    assert len(body) + 4 == RECORD_OVERHEAD_BYTES + len(DATA)
    return body + zlib.crc32(body).to_bytes(4, "big")
