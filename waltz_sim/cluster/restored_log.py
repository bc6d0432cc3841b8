"""A partition that was restored from a backup: its log is in the archive, and no storage has data.

`cluster/change/restoring.py` leaves such a partition in ZooKeeper (docs/decisions/055). The log is
the log of a lost cluster.

Rules:
    1. The objects are stored below the key of the lost cluster, and the manifest below the key of
       this cluster.
    2. The rows have only append locks: their authors read no data that the checkers would have to
       know.
    3. The commit stamps of the rows may be later than the clocks of this cluster.
    4. If objects may expire, the first objects may have expired before the restore.
    5. The last object may have more batches than the manifest lists, because the log was restored
       up to a batch within the object.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

from waltz_core.archive.file_names import FileOrigin, manifest_name, manifests_folder
from waltz_core.archive.manifest import Expiry, Manifest, ObjectEntry
from waltz_core.archive.manifest_jobs import BatchRun, UploadJob
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import encode_record
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Chain,
    ClientId,
    Generation,
    LineageEntry,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.session_events import Batch
from waltz_sim.cluster.simulated_archive import StoredFile, build_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from waltz_sim.cluster.simulated_cluster import SimCluster

LOST_CLUSTER_KEY: Final = b"lost-cluster-key"
_SESSION: Final = SessionId(3)
_NEXT_SESSION: Final = SessionId(10)
_NONCE: Final = bytes(16)
_CLIENT_ID: Final = ClientId(1)
_HEADER: Final = 7
_BATCH_ROWS_MAX: Final = 4
_OBJECT_BATCHES_MAX: Final = 3
# The first commit stamp: the start of the wall clocks.
_FIRST_STAMP_MS: Final = 1_000_000
_CLOCK_AHEAD_MS: Final = 3_600_000


def restore_lost_log(cluster: "SimCluster") -> None:
    """Put a lost cluster's log of `Setup.restored_count` IDs into a cluster before its start."""
    _RestoredLog(cluster).write()


class _RestoredLog:
    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._rng = cluster.world.stream("restored")
        self._count = cluster.setup.restored_count
        self._stamp_ms = _FIRST_STAMP_MS + self._rng.choice((0, _CLOCK_AHEAD_MS))

    def write(self) -> None:
        """Write the archive and the nodes in ZooKeeper, and notify the checkers."""
        cluster = self._cluster
        objects: list[ObjectEntry] = []
        last, chain = BEFORE_FIRST, GENESIS_CHAIN
        while last + 1 < self._count:
            objects.append(self._write_object_after(last, chain))
            last, chain = objects[-1].last, objects[-1].chain
        mark = self._write_manifest(objects)
        coordinator = cluster.coordinator
        coordinator.metadata = PartitionMetadata(Generation(-1), _NEXT_SESSION)
        coordinator.marker = PartitionMarker(MarkerState.NEW, archived=mark)
        coordinator.client_count = _CLIENT_ID
        cluster.checks.on_partition_restored(mark)

    def _store_file(self, name: str, file: StoredFile) -> None:
        self._cluster.archive.files[name] = file
        self._cluster.archive.written_ms[name] = 0

    def _write_object_after(self, last: TransactionId, chain: Chain) -> ObjectEntry:
        """Write the next object, and return its entry in the manifest."""
        runs: list[BatchRun] = []
        first, chain_before = TransactionId(last + 1), chain
        for _ in range(self._rng.randint(1, _OBJECT_BATCHES_MAX)):
            if last + 1 < self._count:
                runs.append(self._make_batch_after(last, chain, self._count))
                last, chain = runs[-1].batches[-1].last, runs[-1].batches[-1].chain
                self._cluster.checks.outcomes.on_log_exposed(last, chain)
        stamp_ms = self._stamp_ms
        if last + 1 == self._count and self._rng.random() < 0.5:  # rule 5
            runs.append(self._make_batch_after(last, chain, self._count + _BATCH_ROWS_MAX))
        origin = _SESSION, _NONCE, first
        job = UploadJob(
            self._cluster.partition_id, *origin, first, chain_before, "", 0, tuple(runs)
        )
        entry, file = build_object(LOST_CLUSTER_KEY, job)
        self._store_file(entry.name, file)
        return entry._replace(last=last, chain=chain, commit_ms_max=stamp_ms)

    def _make_batch_after(self, before: TransactionId, chain: Chain, stop: int) -> BatchRun:
        """Return the next batch, with IDs below `stop`; the caller adds it to the log."""
        cluster, first = self._cluster, TransactionId(before + 1)
        count = min(self._rng.randint(1, _BATCH_ROWS_MAX), stop - first)
        last = TransactionId(first + count - 1)
        keys = cluster.setup.keys
        rows = [((), (), (position % keys,)) for position in range(first, last + 1)]
        operations = cluster.workload.record_rows("the lost cluster", rows)
        records = [
            self._encode_record(TransactionId(position), operation.data)
            for position, operation in enumerate(operations, first)
        ]
        data, lengths = (
            b"".join(records),
            np.array([len(record) for record in records], dtype=np.int64),
        )
        crcs = b"".join(record[-4:] for record in records)
        self._stamp_ms += 1
        wire_lengths = lengths.astype(">i4").tobytes()
        batch = Batch(first, last, wire_lengths, data, crcs, crc32(data), self._stamp_ms)
        end = cluster.checks.history.add_batch(chain, _SESSION, batch)
        return BatchRun(data, lengths, [LineageEntry(first, last, _SESSION, self._stamp_ms, end)])

    def _encode_record(self, position: TransactionId, data: bytes) -> bytes:
        req_id = ReqId(_CLIENT_ID, Generation(0), self._cluster.partition_id, position)
        return encode_record(position, req_id, _HEADER, data, crc32(data))

    def _write_manifest(self, objects: "Sequence[ObjectEntry]") -> ArchivedMark:
        """Write the manifest, and return the archived mark (rules 1 and 4)."""
        cluster, kept = self._cluster, list(objects)
        if cluster.setup.expires and len(kept) > 1 and self._rng.random() < 0.5:
            del cluster.archive.files[kept.pop(0).name]
        end, first = kept[-1], kept[0].first
        folder = manifests_folder(cluster.key, cluster.partition_id)
        name = manifest_name(folder, 1, FileOrigin(_NEXT_SESSION, _NONCE, 1))
        expiries = (Expiry(first, 0),) if first else ()
        bounds = first, end.last, end.chain
        manifest = Manifest(
            cluster.key,
            cluster.partition_id,
            1,
            *bounds,
            newest_objects=tuple(kept),
            expiries=expiries,
        )
        data = manifest.to_bytes()
        self._store_file(name, StoredFile(data))
        return ArchivedMark(end.last, end.chain, end.commit_ms_max, first, crc32(data), name)
