"""A partition's log in memory, and the store that commits to it at once.

The store implements `partition_events.Store` for `MemoryWaltz`; the partition machine is the real
one.

Rules:
    1. Every write is committed at once: there is one copy, no quorum, and nothing to sync.
    2. A session opens in the step that requests it; there is no other owner.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from waltz_core.records.checksum import crc32
from waltz_core.records.raw_records import (
    HEADER_DTYPE,
    headers_of,
    lengths_from_wire,
    lengths_to_wire,
    offsets_of,
)
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    RECORD_PREFIX,
    Generation,
    LineageEntry,
    ReplicaId,
    ReqId,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication import session_events as replication
from waltz_core.server.read.cache import CacheBudget, TransactionCache
from waltz_core.wire.messages import RangeBytes, RangeForm, RangeRaw

MEMORY_REPLICA: Final = ReplicaId("memory:1")
# More bytes than a process can store, so that the cache never drops a batch.
_UNLIMITED_BYTES: Final = 1 << 62
_CRC_BYTES: Final = 4


class StoredTransaction(NamedTuple):
    """One committed transaction."""

    transaction_id: TransactionId
    req_id: ReqId
    header: int
    data: bytes


class MemoryLog:
    """The log of one partition, in memory."""

    def __init__(self) -> None:
        self._batches = TransactionCache(CacheBudget(_UNLIMITED_BYTES))
        self.mark = BEFORE_FIRST
        self.chain = GENESIS_CHAIN
        self.session = NO_SESSION

    def write(self, batch: replication.Batch, session: SessionId) -> None:
        """Append a batch and commit it (rule 1)."""
        assert batch.first == self.mark + 1
        self.chain = next_chain(self.chain, batch.first, batch.last, session, batch.record_crcs)
        entry = LineageEntry(batch.first, batch.last, session, batch.stamp_ms, self.chain)
        lengths = lengths_from_wire(batch.lengths, len(batch.records))
        self._batches.put(entry, lengths, bytes(batch.records))
        self.mark = batch.last

    def read(self, request: RangeRaw) -> RangeBytes:
        """Answer a range request like a storage, with records of one batch."""
        part = self._batches.read(
            TransactionId(request.first), TransactionId(request.last), request.bytes_max
        )[0]
        is_whole = request.form == RangeForm.WHOLE
        records = part.records if is_whole else headers_of(part.records, part.lengths)
        return RangeBytes(
            self.session,
            0,
            0,
            part.first,
            part.last - part.first + 1,
            request.form,
            lengths_to_wire(part.lengths) if is_whole else b"",
            records,
            crc32(records),
            bytes(16),
            (part.entry,),
        )

    def transactions(self) -> list[StoredTransaction]:
        """Return all transactions of the log."""
        if self.mark == BEFORE_FIRST:
            return []
        stored: list[StoredTransaction] = []
        for part in self._batches.read(TransactionId(0), self.mark, _UNLIMITED_BYTES):
            offsets = offsets_of(part.lengths).tolist()
            record_headers = np.frombuffer(headers_of(part.records, part.lengths), HEADER_DTYPE)
            for index, record_header in enumerate(record_headers):
                start, end = offsets[index] + RECORD_PREFIX.size, offsets[index + 1] - _CRC_BYTES
                stored.append(
                    StoredTransaction(
                        TransactionId(int(record_header["transaction_id"])),
                        ReqId.from_bytes(record_header["req_id"].tobytes()),
                        int(record_header["header"]),
                        bytes(part.records[start:end]),
                    )
                )
        return stored


class MemoryStore:
    """The store of a partition in memory, by the module's rules."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.generation = Generation(-1)
        self.wake_at_ms: int | None = None
        self.readable_replicas: Sequence[ReplicaId] = ()
        self.archived_mark = None
        self.is_archiving = False
        self.archive_backlog = None

    def is_expiry_done(self, before: TransactionId, before_ms: int) -> bool:
        """Return False: there is no archive."""
        return False

    def replacement_outcome(self, request: replication.ReplaceArchivedObject) -> None:
        """Return None: there is no archive."""

    def step(self, event: replication.Event, now_ms: int) -> Sequence[replication.Effect]:
        """Process one event and return its effects; events about replicas have no effect."""
        match event:
            case replication.TakeOwnership():
                self.generation = event.generation
                return self.open()
            case replication.SubmitToSession():
                return self.submit(event.batch)
            case replication.ProveMark():
                return (replication.MarkProved(event.token, self.log.mark),)
            case _:
                return ()

    def open(self) -> Sequence[replication.Effect]:
        """Open a session (rule 2)."""
        log = self.log
        log.session = SessionId(log.session + 1)
        self.readable_replicas = (MEMORY_REPLICA,)
        return (
            replication.SessionOpened(
                log.session, self.generation, log.mark, log.chain, follows_own_session=False
            ),
            replication.SessionSettled(log.session, log.mark),
        )

    def submit(self, batch: replication.Batch) -> Sequence[replication.Effect]:
        """Commit a batch."""
        self.log.write(batch, self.log.session)
        return (replication.TransactionsCommitted(self.log.session, self.log.mark, self.log.chain),)
