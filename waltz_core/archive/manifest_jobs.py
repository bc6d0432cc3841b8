"""Jobs that write a manifest: one kind archives a range, the other expires objects.

This file needs no Parquet library. A storage's state machine creates jobs, and `upload.py` executes
them on a thread.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from waltz_core.archive.manifest import RecordedManifest
from waltz_core.errors import WaltzError
from waltz_core.records.raw_records import I64, Buffer
from waltz_core.records.record import Chain, LineageEntry, PartitionId, SessionId, TransactionId
from waltz_core.values import value


class BatchRun(NamedTuple):
    """Consecutive complete batches, and their records."""

    records: Buffer
    lengths: I64
    batches: Sequence[LineageEntry]


class ReplacedObject(NamedTuple):
    """A corrupt or missing object, and the last ID and chain hash of the manifest that lists it."""

    name: str
    manifest_last: TransactionId
    manifest_chain: Chain


@value(frozen=True, slots=True, eq=False)
class UploadJob:
    """A job to write batches from `first` on as an object, and a new manifest that lists it.

    `manifest` is the name of the present manifest, which ends before `first`; it is empty if
    nothing is archived. Session, nonce and attempt make the names of new files unique (rule AR 2).
    If `replaced_object` is set, a new object with these batches replaces that object in the
    manifest.
    """

    partition_id: PartitionId
    session_id: SessionId
    nonce: bytes
    attempt: int
    first: TransactionId
    chain_before: Chain
    manifest: str
    manifest_crc: int
    runs: tuple[BatchRun, ...]
    replaced_object: ReplacedObject | None = None

    @property
    def recorded_manifest(self) -> RecordedManifest:
        """The present manifest, as ZooKeeper records it."""
        end = TransactionId(self.first - 1), self.chain_before
        if self.replaced_object is not None:
            end = self.replaced_object.manifest_last, self.replaced_object.manifest_chain
        return RecordedManifest(self.partition_id, *end, self.manifest, self.manifest_crc)

    @property
    def end(self) -> LineageEntry:
        """The last batch of the job."""
        return self.runs[-1].batches[-1]

    @property
    def record_count(self) -> int:
        """The number of transactions in the job."""
        return self.end.last - self.first + 1

    @property
    def record_bytes(self) -> int:
        """The bytes of the records in the job."""
        return sum(len(run.records) for run in self.runs)


class NewManifest(NamedTuple):
    """A manifest that was written and is durable in the archive.

    If the name is empty, nothing was written, because another object had already replaced the
    object of the job.
    """

    last: TransactionId
    chain: Chain
    stamp_ms: int
    name: str
    file_crc: int


UploadOutcome: TypeAlias = NewManifest | WaltzError


@value(frozen=True, slots=True)
class ExpiryJob:
    """A job to expire objects below ID `before` or committed before `before_ms`; 0: no such limit.

    Objects older than `retention_ms` expire, too. Session, nonce and attempt have the same meaning
    as in `UploadJob`.
    """

    session_id: SessionId
    nonce: bytes
    attempt: int
    recorded_manifest: RecordedManifest
    before: TransactionId
    before_ms: int
    retention_ms: int

    @property
    def partition_id(self) -> PartitionId:
        """The partition whose objects expire."""
        return self.recorded_manifest.partition_id


class ManifestAfterExpiry(NamedTuple):
    """The manifest that an expiry has written; it is durable.

    If the name is empty, nothing was written, because the expiry changes nothing.
    """

    first: TransactionId
    name: str
    file_crc: int


ExpiryOutcome: TypeAlias = ManifestAfterExpiry | WaltzError
