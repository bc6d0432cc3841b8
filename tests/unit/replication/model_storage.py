"""A modeled storage: promises, appends, reads and rejections as replication sees them.

This storage replaces the real storage in `ReplicationWorld`. It has a few dozen records in memory,
and fields for the state of a disk. Tests may set these fields.
"""

import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from waltz_core import errors
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    RECORD_PREFIX,
    LineageEntry,
    next_chain,
)
from waltz_core.replication.session_events import Batch
from waltz_core.wire import messages as wire


def make_record(transaction_id, payload):
    """Return one record's bytes; the payload number is its identity."""
    data = payload.to_bytes(8, "big")
    req_id = bytes(12) + (payload & 0x7FFFFFFF).to_bytes(4, "big")
    body = RECORD_PREFIX.pack(transaction_id, req_id, 0, len(data), zlib.crc32(data))
    body += data
    return body + zlib.crc32(body).to_bytes(4, "big")


def payload_of(record):
    return int.from_bytes(record[-12:-4], "big")


def crcs_of(records):
    return b"".join(record[-4:] for record in records)


def make_batch(first, payloads, stamp_ms):
    records = [make_record(first + i, payload) for i, payload in enumerate(payloads)]
    data = b"".join(records)
    lengths = struct.pack(f">{len(records)}i", *map(len, records))
    last = first + len(records) - 1
    return Batch(first, last, lengths, data, crcs_of(records), zlib.crc32(data), stamp_ms)


class Entry(NamedTuple):
    """One batch on disk."""

    lineage: LineageEntry
    records: tuple


@dataclass
class Disk:
    """The state of one partition on a disk."""

    storage_id: bytes
    entries: list = field(default_factory=list)
    start: tuple = (BEFORE_FIRST, GENESIS_CHAIN)
    promised: int = NO_SESSION
    nonce: bytes = bytes(16)
    last_session: int = NO_SESSION
    confirmed: int = BEFORE_FIRST
    provisional: tuple | None = None  # (session, mark)
    suspect: bool = False
    damaged: set = field(default_factory=set)


class ModelStorage:
    """One partition of one storage. `handle` answers requests after it has synced all writes.

    One answer has at most `lineage_max` entries of batches, and the records of at most
    `range_batches_max` batches.
    """

    def __init__(self, name, *, lineage_max, range_batches_max):
        self.disk = Disk(storage_id=name.encode().ljust(16, b"-"))
        self.lineage_max = lineage_max
        self.range_batches_max = range_batches_max
        self.fails_next_sync = False
        self.supports_archiving = True
        self.removed = []  # removed batches, which only the archive contains
        self.announced = NO_SESSION, BEFORE_FIRST  # the session, and its archived mark

    # --- the log

    @property
    def last(self):
        return self.disk.entries[-1].lineage.last if self.disk.entries else self.disk.start[0]

    @property
    def chain(self):
        return self.disk.entries[-1].lineage.chain if self.disk.entries else self.disk.start[1]

    def remove_up_to(self, last):
        """Remove batches, so that the log begins after the given batch end."""
        while self.disk.entries and self.disk.entries[0].lineage.last <= last:
            self.removed.append(self.disk.entries.pop(0))
            gone = self.removed[-1].lineage
            self.disk.start = gone.last, gone.chain
        assert self.disk.start[0] == last

    def _from_archive(self, message, needed):
        """Return the archive's answer to a request for removed batches, if permitted."""
        session, last = self.announced
        if session != message.session_id or needed > min(last, self.disk.start[0]):
            return None
        whole = ModelStorage(
            "archive", lineage_max=self.lineage_max, range_batches_max=self.range_batches_max
        )
        whole.disk.entries, whole.disk.promised = self.removed, self.disk.promised
        return whole._handle(message)

    def _chain_before(self, position):
        entries = self.disk.entries
        return entries[position - 1].lineage.chain if position else self.disk.start[1]

    def _check_start(self, first):
        if first <= self.disk.start[0]:
            raise errors.BeforeLogStart(f"log of this storage begins at {self.disk.start[0] + 1}")

    def payloads(self):
        return [payload_of(record) for entry in self.disk.entries for record in entry.records]

    def _cut(self, last):
        entries = self.disk.entries
        while entries and entries[-1].lineage.first > last:
            entries.pop()
        if entries and entries[-1].lineage.last > last:
            line, records = entries.pop()
            records = records[: last - line.first + 1]
            before = entries[-1].lineage.chain if entries else self.disk.start[1]
            chain = next_chain(before, line.first, last, line.session_id, crcs_of(records))
            entries.append(Entry(line._replace(last=last, chain=chain), records))
        self.disk.damaged = {bad for bad in self.disk.damaged if bad <= self.last}

    # --- requests

    def handle(self, message):
        """Return the answer to a request."""
        try:
            return self._handle(message)
        except errors.WaltzError as error:
            return wire.Nack(
                message.session_id,
                message.sequence,
                message.partition_id,
                error.code,
                self.disk.promised,
                str(error),
            )

    def _handle(self, message):  # noqa: C901 - one line for each message
        disk = self.disk
        prefix = message.session_id, message.sequence, message.partition_id
        if isinstance(message, wire.Prepare):
            return self._prepare(prefix, message)
        if message.session_id != disk.promised:
            raise errors.SessionFenced(f"bound to {disk.promised}, not {message.session_id}")
        match message:
            case wire.Heartbeat():
                return wire.HeartbeatResponse(*prefix)
            case wire.LineageRequest():
                return self._from_archive(message, message.last) or self._lineage(prefix, message)
            case wire.RangeRaw(whole_batches=False):
                return self._from_archive(message, message.first) or self._range(prefix, message)
            case wire.RangeRaw():
                return self._range(prefix, message)
            case wire.AppendRaw():
                return self._append(prefix, message)
            case wire.Truncate():
                self._truncate(message)
            case wire.ResetLog():
                self._reset(message)
            case wire.SetLowWaterMark():
                self._set_mark(message)
            case (
                wire.ArchiveRange()
                | wire.SetArchived()
                | wire.CollectGarbage()
                | wire.ExpireObjects()
                | wire.ReplaceObject()
            ):
                if isinstance(message, wire.SetArchived):
                    self.announced = message.session_id, message.last
                return wire.SuccessResponse(*prefix)
            case wire.Engage():
                own = disk.provisional == (message.session_id, message.mark)
                if not own and (disk.provisional or disk.confirmed != message.mark):
                    raise errors.BadRequest("engage: another mark")
                self._confirm()
            case wire.Repair():
                for bad in range(message.first, message.first + len(message.lengths) // 4):
                    disk.damaged.discard(bad)
        return wire.ReplicaEnd(*prefix, self.last, self.chain)

    def _prepare(self, prefix, message):
        disk = self.disk
        if message.storage_id not in (bytes(16), disk.storage_id):
            raise errors.StorageIdMismatch("another storage")
        if message.session_id < disk.promised or (
            message.session_id == disk.promised and message.nonce != disk.nonce
        ):
            raise errors.SessionFenced(f"bound to {disk.promised}, not {message.session_id}")
        disk.promised, disk.nonce = message.session_id, message.nonce
        mark, confirmed = disk.confirmed, True
        if disk.provisional is not None:
            mark, confirmed = disk.provisional[1], False
        damaged = b"".join(bad.to_bytes(8, "big") * 2 for bad in sorted(disk.damaged))
        state = (disk.last_session, mark, confirmed, self.last, self.chain, disk.suspect, damaged)
        start, chain = disk.start if self.supports_archiving else (wire.NO_ARCHIVING, bytes(16))
        return wire.Prepared(*prefix, disk.storage_id, *state, start=start, start_chain=chain)

    def _lineage(self, prefix, message):
        self._check_start(message.last)
        found = [
            index
            for index, entry in enumerate(self.disk.entries)
            if entry.lineage.first <= message.last and entry.lineage.last >= message.first
        ][-self.lineage_max :]
        if message.first == self.last + 1:
            return wire.LineageResponse(*prefix, self.chain, ())
        if not found:
            raise errors.BadRequest(f"no batches in {message.first}..{message.last}")
        before = self._chain_before(found[0])
        lines = tuple(self.disk.entries[index].lineage for index in found)
        return wire.LineageResponse(*prefix, before, lines)

    def _range(self, prefix, message):
        self._check_start(message.first)
        entries = self.disk.entries
        if message.whole_batches:
            at = next((i for i, e in enumerate(entries) if e.lineage.first == message.first), None)
            if at is None:
                raise errors.BadRequest(f"no batch begins at {message.first}")
            chosen = [e for e in entries[at:] if e.lineage.last <= message.last]
            chosen = chosen[: self.range_batches_max]
            if not chosen:
                raise errors.BadRequest(f"no whole batch in {message.first}..{message.last}")
            before = self._chain_before(at)
            records = [record for entry in chosen for record in entry.records]
            lines = tuple(entry.lineage for entry in chosen)
        else:
            log = [record for entry in entries for record in entry.records]
            skipped = self.disk.start[0] + 1
            records = log[message.first - skipped : message.last + 1 - skipped][
                : self.range_batches_max
            ]
            before, lines = GENESIS_CHAIN, ()
        wanted = range(message.first, message.first + len(records))
        if any(bad in self.disk.damaged for bad in wanted):
            raise errors.ChecksumMismatch("a record is damaged")
        data = b"".join(records)
        lengths = b"".join(len(record).to_bytes(4, "big") for record in records)
        body = (message.form, lengths, data, zlib.crc32(data), before, lines)
        return wire.RangeBytes(*prefix, message.first, len(records), *body)

    def _append(self, prefix, message):
        disk = self.disk
        if message.first != self.last + 1:
            raise errors.BadRequest(f"expected {self.last + 1}, found {message.first}")
        if bytes(message.chain_before) != self.chain:
            raise errors.ChecksumMismatch("another chain before")
        assert zlib.crc32(message.records) == message.records_crc
        session, mark = disk.provisional or (None, None)
        if session == message.session_id and message.first > mark:
            self._confirm()
        records, at = [], 0
        for offset in range(0, len(message.lengths), 4):
            length = int.from_bytes(message.lengths[offset : offset + 4], "big")
            records.append(bytes(message.records[at : at + length]))
            at += length
        for line in message.lineage:
            matching, records = (
                records[: line.last - line.first + 1],
                records[line.last - line.first + 1 :],
            )
            chain = next_chain(
                self.chain, line.first, line.last, line.session_id, crcs_of(matching)
            )
            assert chain == line.chain, "the owner's chain is wrong"
            disk.entries.append(Entry(line, tuple(matching)))
        assert not records
        if self.fails_next_sync:
            self.fails_next_sync = False
            self._cut(message.first - 1)
            raise errors.DiskFailed("fsync failed")
        return wire.Appended(*prefix, self.last)

    def _truncate(self, message):
        keep = min(message.last_to_keep, self.last)
        if keep < self.disk.confirmed:
            raise errors.BadRequest(f"cut to {keep} below the mark {self.disk.confirmed}")
        ends = {entry.lineage.last: entry.lineage.chain for entry in self.disk.entries}
        ends[self.disk.start[0]] = self.disk.start[1]
        if ends.get(message.base) != message.base_chain:
            raise errors.BadRequest(f"another chain at {message.base}")
        self._cut(keep)

    def _reset(self, message):
        disk = self.disk
        if self.last >= message.last:
            raise errors.BadRequest(f"reset to {message.last} of a log that ends at {self.last}")
        if disk.confirmed > message.last and not disk.suspect:
            raise errors.DataLoss(f"reset to {message.last} below the mark {disk.confirmed}")
        disk.entries.clear()
        disk.start, disk.confirmed = (message.last, bytes(message.chain)), message.last
        disk.provisional, disk.suspect, disk.damaged = None, True, set()

    def _set_mark(self, message):
        disk = self.disk
        if (self.last, self.chain) != (message.mark, message.chain):
            raise errors.BadRequest(f"mark {message.mark} on a log that ends at {self.last}")
        if disk.suspect and any(bad > disk.confirmed for bad in disk.damaged):
            raise errors.ReplicaSuspect("mark on a damaged log")
        if message.mark < disk.confirmed:
            raise errors.BadRequest("the mark goes back")
        disk.provisional = message.session_id, message.mark
        disk.last_session = message.session_id
        disk.suspect = False

    def _confirm(self):
        if self.disk.provisional:
            self.disk.confirmed = self.disk.provisional[1]
            self.disk.provisional = None
