"""Manifests to write: for a range to archive, or for an expiry. This needs no Parquet library.

A storage's machine makes jobs, and `upload.py` carries them out on a thread.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from waltz_core.archive.manifest import RecordedManifest
from waltz_core.errors import WaltzError
from waltz_core.records.raw_records import I64, Buffer
from waltz_core.records.record import Chain, LineageEntry, PartitionId, SessionId, TransactionId
from waltz_core.values import value


class BatchRun(NamedTuple):
    """Consecutive whole batches, and their records."""

    records: Buffer
    lengths: I64
    batches: Sequence[LineageEntry]


class ReplacedObject(NamedTuple):
    """An object that is corrupt or missing, and where the manifest that lists it ends."""

    name: str
    archived: TransactionId
    archived_chain: Chain


@value(frozen=True, slots=True, eq=False)
class UploadJob:
    """The batches from `first` on, and the manifest that ends before them.

    `manifest` is empty if nothing is archived. Session, nonce and attempt make the names of new
    files unique (rule AR 2). With `replaces`, the manifest lists that object with these batches.
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
    replaces: ReplacedObject | None = None

    @property
    def recorded(self) -> RecordedManifest:
        """The present manifest."""
        end = TransactionId(self.first - 1), self.chain_before
        if self.replaces is not None:
            end = self.replaces.archived, self.replaces.archived_chain
        return RecordedManifest(self.partition_id, *end, self.manifest, self.manifest_crc)

    @property
    def end(self) -> LineageEntry:
        """The last batch."""
        return self.runs[-1].batches[-1]

    @property
    def record_count(self) -> int:
        """The number of transactions."""
        return self.end.last - self.first + 1

    @property
    def record_bytes(self) -> int:
        """The size of the records."""
        return sum(len(each.records) for each in self.runs)


class NewManifest(NamedTuple):
    """A manifest that is durable in the archive.

    Without a name, nothing has changed: another object has replaced the one of the job before.
    """

    last: TransactionId
    chain: Chain
    stamp_ms: int
    name: str
    file_crc: int


UploadOutcome: TypeAlias = NewManifest | WaltzError


@value(frozen=True, slots=True)
class ExpiryJob:
    """Objects below `before`, or committed before `before_ms`, expire; 0 stands for none.

    So do those that are older than `retention_ms`. Session, nonce and attempt as in `UploadJob`.
    """

    session_id: SessionId
    nonce: bytes
    attempt: int
    recorded: RecordedManifest
    before: TransactionId
    before_ms: int
    retention_ms: int

    @property
    def partition_id(self) -> PartitionId:
        """The partition whose objects expire."""
        return self.recorded.partition_id


class ExpiredManifest(NamedTuple):
    """A manifest that is durable in the archive, with a greater first available ID.

    Without a name, nothing has changed.
    """

    first: TransactionId
    name: str
    file_crc: int


ExpiryOutcome: TypeAlias = ExpiredManifest | WaltzError
