"""Appends as an owner sends them to a storage: with correct checksums, chains and sequences."""

import zlib

import numpy as np

from waltz_core.records.record import (
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    LineageEntry,
    ReqId,
    next_chain,
)
from waltz_core.wire.messages import AppendRaw

NONCE = b"a nonce of owner"
STAMP_MS = 1_700_000_000_000
assert len(NONCE) == 16


def encode_records(first, count, data=b"data"):
    """Return the bytes of records, their CRCs for the chain, their lengths for the wire."""
    records, crcs = [], []
    for transaction_id in range(first, first + count):
        req_id = ReqId(1, 1, 0, transaction_id).to_bytes()
        prefix = RECORD_PREFIX.pack(transaction_id, req_id, 7, len(data), zlib.crc32(data))
        crc = zlib.crc32(prefix + data).to_bytes(4, "big")
        records.append(prefix + data + crc)
        crcs.append(crc)
    lengths = np.full(count, len(data) + RECORD_OVERHEAD_BYTES, dtype=">i4").tobytes()
    return b"".join(records), b"".join(crcs), lengths


class OwnerSession:
    """One session of one partition: creates requests in order, and computes the chain."""

    def __init__(self, session_id, partition_id=0, nonce=NONCE):
        self.session_id = session_id
        self.partition_id = partition_id
        self.nonce = nonce
        self.sequence = 0
        self.next_id = 0
        self.chain = GENESIS_CHAIN

    def make(self, kind, *fields):
        self.sequence += 1
        return kind(self.session_id, self.sequence, self.partition_id, *fields)

    def append(self, count=1, data=b"data"):
        """Return the append of one batch of `count` records."""
        records, crcs, lengths = encode_records(self.next_id, count, data)
        first, last = self.next_id, self.next_id + count - 1
        before = self.chain
        self.chain = next_chain(before, first, last, self.session_id, crcs)
        self.next_id += count
        entry = LineageEntry(first, last, self.session_id, STAMP_MS, self.chain)
        return self.make(AppendRaw, first, lengths, records, zlib.crc32(records), before, (entry,))

    def continue_after(self, other):
        """Continue where another owner's log ends."""
        self.next_id, self.chain = other.next_id, other.chain
        return self
