"""The index of an archive object in memory: its batches with their chain hashes, and row groups.

The chain hash before a range is computed from all batches before the range. So a single range
cannot be verified without the index. The index is created once, when an object is opened, from the
columns with the record CRCs and the batches.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.archive.objects import ArchiveObject, ObjectMetadata
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import I64
from waltz_core.records.record import CHAIN_BYTES, Chain, LineageEntry, SessionId, TransactionId

# In memory, the footer of an object uses about this many times its size in the file.
_FOOTER_EXPANSION_FACTOR: Final = 4


class RowGroup(NamedTuple):
    """The records of a row group; `offsets` has their starts, and the end of the last record."""

    first: TransactionId
    records: raw_records.Buffer
    lengths: I64
    offsets: I64

    @property
    def byte_count(self) -> int:
        """The memory that the row group uses, in bytes."""
        return len(self.records) + self.lengths.nbytes + self.offsets.nbytes


class ObjectIndex:
    """The batches and row groups of an object whose hash chain has been verified."""

    def __init__(self, archive_object: ArchiveObject) -> None:
        """Read the index columns and verify the hash chain.

        Raises:
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        outlines, lineage = archive_object.read_outlines()
        self.name = archive_object.name
        self.metadata: ObjectMetadata = archive_object.metadata
        self.footer: Any = archive_object.footer
        bounds = np.array([item[:4] for item in lineage], dtype=np.int64).reshape(-1, 4)
        self._firsts, self._lasts, self._sessions, self._stamps = np.ascontiguousarray(bounds.T)
        self._chains = b"".join(item.chain for item in lineage)
        self._group_firsts = np.array([item.first for item in outlines], dtype=np.int64)
        self._group_crcs = [crc32(item.crcs) for item in outlines]

    def check_matches(self, manifest: Manifest, entry: ObjectEntry) -> None:
        """Raise BadFormat or ChecksumMismatch unless this is the object that a manifest lists."""
        metadata = self.metadata
        found = (metadata.cluster_key.hex(), metadata.partition_id, metadata.first)
        expected = (manifest.writer_cluster_key(entry).hex(), manifest.partition_id, entry.first)
        if found != expected:
            raise BadFormat(
                f"archived object {entry.name}: expected cluster key, partition and first "
                f"transaction ID {expected}, found {found}"
            )
        chain = self.chain_at(entry.last)
        if chain != entry.chain:
            raise ChecksumMismatch(
                f"archived object {entry.name}: expected chain hash {entry.chain.hex()} at "
                f"transaction {entry.last}, found {None if chain is None else chain.hex()}"
            )

    @property
    def byte_count(self) -> int:
        """The memory that the index uses, in bytes (an estimate)."""
        batches = 4 * int(self._firsts.nbytes) + len(self._chains)
        return batches + _FOOTER_EXPANSION_FACTOR * int(self.footer.serialized_size)

    @property
    def group_count(self) -> int:
        """The number of row groups."""
        return len(self._group_crcs)

    def group_containing(self, transaction_id: TransactionId) -> int:
        """Return the number of the row group that contains an ID of the object."""
        return int(self._group_firsts.searchsorted(transaction_id, side="right")) - 1

    def first_id_of_group(self, group: int) -> TransactionId:
        """Return the first ID of a row group."""
        return TransactionId(int(self._group_firsts[group]))

    def read_row_group(self, archive_object: ArchiveObject, group: int) -> RowGroup:
        """Read a row group of the object, and verify its records with the hash chain.

        Raises:
            BadFormat, ChecksumMismatch: the object is wrong; the error names it.
        """
        part = archive_object.read_row_group(group)
        # The CRCs of the records cover their IDs, too.
        if crc32(raw_records.record_crcs(part.records, part.lengths)) != self._group_crcs[group]:
            raise ChecksumMismatch(
                f"archived object {self.name}: the records of row group {group} do not match "
                "their chain hash"
            )
        offsets = raw_records.offsets_of(part.lengths)
        return RowGroup(self.first_id_of_group(group), part.records, part.lengths, offsets)

    def chain_at(self, last: TransactionId) -> Chain | None:
        """Return the chain hash at the end of a batch; None if no batch ends at this ID."""
        batch_index = int(self._lasts.searchsorted(last))
        return (
            self._chain_of_batch(batch_index)
            if batch_index < self._lasts.size and self._lasts[batch_index] == last
            else None
        )

    def batches_between(
        self, first: TransactionId, last: TransactionId
    ) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the chain hash before the batches that overlap first..last, and these batches."""
        start = int(self._lasts.searchsorted(first))
        stop = int(self._firsts.searchsorted(last, side="right"))
        columns = (self._firsts, self._lasts, self._sessions, self._stamps)
        rows = zip(*(column[start:stop].tolist() for column in columns), strict=True)
        entries = tuple(
            LineageEntry(
                TransactionId(low),
                TransactionId(high),
                SessionId(session),
                stamp,
                self._chain_of_batch(batch_index),
            )
            for batch_index, (low, high, session, stamp) in enumerate(rows, start)
        )
        return self._chain_of_batch(start - 1) if start else self.metadata.chain_before, entries

    def last_committed_before(self, time_ms: int) -> TransactionId:
        """Return the end of the last batch committed before `time_ms`.

        There must be such a batch.
        """
        committed_before = np.flatnonzero((self._stamps != 0) & (self._stamps < time_ms))
        return TransactionId(int(self._lasts[committed_before[-1]]))

    def _chain_of_batch(self, batch_index: int) -> Chain:
        return Chain(self._chains[CHAIN_BYTES * batch_index : CHAIN_BYTES * (batch_index + 1)])
