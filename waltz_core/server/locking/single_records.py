"""Encodes single transactions, and joins consecutive runs of records.

Single transactions are encoded in plain Python: for a few rows, this is faster than `batches.py`.
Both modules must return the same bytes; a test compares them.
"""

import struct
from collections.abc import Sequence
from itertools import chain

import numpy as np

from waltz_core.records.batches import EncodedBatch, LockColumn
from waltz_core.records.checksum import combine, crc32
from waltz_core.records.raw_records import encode_record
from waltz_core.records.record import TransactionId
from waltz_core.server.locking.pending_appends import PendingSingle


def lock_column_of(rows: Sequence[Sequence[int]]) -> LockColumn:
    """Return the locks of a list of rows as a column."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(locks) for locks in rows], out=offsets[1:])
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return LockColumn(offsets, values)


def encode_singles(appends: Sequence[PendingSingle]) -> EncodedBatch:
    """Encode single transactions with consecutive IDs as records."""
    encoded = [
        encode_record(
            pending.transaction_id,
            pending.message.req_id,
            pending.message.header,
            pending.message.data,
            pending.message.data_crc,
        )
        for pending in appends
    ]
    records = b"".join(encoded)
    return EncodedBatch(
        first=TransactionId(appends[0].transaction_id),
        last=TransactionId(appends[-1].transaction_id),
        lengths=struct.pack(f">{len(encoded)}i", *map(len, encoded)),
        records=memoryview(records),
        record_crcs=b"".join(record[-4:] for record in encoded),
        records_crc=crc32(records),
    )


def join_batches(parts: Sequence[EncodedBatch]) -> EncodedBatch:
    """Join consecutive runs of records to one run."""
    if len(parts) == 1:
        return parts[0]
    records_crc = 0
    for part in parts:
        records_crc = combine(records_crc, part.records_crc, len(part.records))
    return EncodedBatch(
        first=parts[0].first,
        last=parts[-1].last,
        lengths=b"".join(part.lengths for part in parts),
        records=memoryview(b"".join(part.records for part in parts)),
        record_crcs=b"".join(part.record_crcs for part in parts),
        records_crc=records_crc,
    )
