"""A storage as replication sees it: what it promises, keeps over a crash, answers and refuses.

It stands for the real storage in replication's own simulation: a few dozen records in memory,
with a page cache that a power loss empties, and a disk that can be put back to an older state.
"""

import zlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from waltz_core import errors
from waltz_core.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    RECORD_PREFIX,
    LineageEntry,
    next_chain,
)
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


class Entry(NamedTuple):
    """One batch on disk."""

    lineage: LineageEntry
    records: tuple


@dataclass
class Disk:
    """What there is of one partition. `synced_last` is what a power loss leaves."""

    storage_id: bytes
    entries: list = field(default_factory=list)
    synced_last: int = BEFORE_FIRST
    promised: int = NO_SESSION
    nonce: bytes = bytes(16)
    last_session: int = NO_SESSION
    confirmed: int = BEFORE_FIRST
    provisional: tuple | None = None  # (session, mark)
    suspect: bool = False
    damaged: set = field(default_factory=set)

    def copy(self):
        return replace(self, entries=self.entries[:], damaged=set(self.damaged))


class ModelStorage:
    """One partition of one storage. `handle` answers; sync is told apart by `sync`."""

    def __init__(self, world, name, checker):
        self.world = world
        self.rng = world.rng
        self.name = name
        self.checker = checker
        self.disk = Disk(storage_id=self.rng.randbytes(16))
        self.snapshots = []
        self.is_up = True
        self.fails_next_sync = False
        self.lineage_max = self.rng.choice((1, 2, 3, 50))
        self.range_batches_max = self.rng.choice((1, 3, 20))
        self.slow_us = 0

    # --- faults

    def crash(self):
        """The process ends; what it wrote without syncing is in the page cache and stays."""
        self.is_up = False
        self.fails_next_sync = False

    def lose_power(self):
        """What was not synced may be gone, in the middle of a batch too."""
        self.crash()
        keep = self.disk.synced_last
        if self.rng.random() < 0.4:
            keep = self.rng.randint(keep, self.last)
        self._cut(keep)

    def roll_back(self):
        """The disk is as it was a while ago; the markers outside the log tell."""
        assert self.snapshots
        self.crash()
        place = self.rng.randrange(len(self.snapshots))
        self.disk = self.snapshots[place].copy()
        self.snapshots = self.snapshots[: place + 1]
        self.disk.suspect = True
        self.disk.synced_last = self.last

    def rot(self):
        """One record becomes unreadable."""
        if self.last >= 0:
            self.disk.damaged.add(self.rng.randint(0, self.last))

    def _snap(self, chance):
        if self.rng.random() < chance:
            self.snapshots = [*self.snapshots, self.disk.copy()][-3:]

    # --- the log

    @property
    def last(self):
        return self.disk.entries[-1].lineage.last if self.disk.entries else BEFORE_FIRST

    @property
    def chain(self):
        return self.disk.entries[-1].lineage.chain if self.disk.entries else GENESIS_CHAIN

    def payloads(self):
        return [payload_of(record) for entry in self.disk.entries for record in entry.records]

    def _cut(self, last):
        entries = self.disk.entries
        while entries and entries[-1].lineage.first > last:
            entries.pop()
        if entries and entries[-1].lineage.last > last:
            line, records = entries.pop()
            records = records[: last - line.first + 1]
            before = entries[-1].lineage.chain if entries else GENESIS_CHAIN
            chain = next_chain(before, line.first, last, line.session_id, crcs_of(records))
            entries.append(Entry(line._replace(last=last, chain=chain), records))
        self.disk.synced_last = min(self.disk.synced_last, self.last)
        self.disk.damaged = {bad for bad in self.disk.damaged if bad <= self.last}

    def sync(self):
        for entry in reversed(self.disk.entries):
            if entry.lineage.last <= self.disk.synced_last:
                break
            self.checker.synced(self, entry)
        self.disk.synced_last = self.last

    # --- requests

    def handle(self, message):
        """Return the answer, which may be sent once everything written so far is synced."""
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
                return wire.HeartbeatAnswer(*prefix)
            case wire.LineageRequest():
                return self._lineage(prefix, message)
            case wire.RangeRaw():
                return self._range(prefix, message)
            case wire.AppendRaw():
                return self._append(prefix, message)
            case wire.Truncate():
                self._truncate(message)
            case wire.SetLowWaterMark():
                self._set_mark(message)
            case wire.Engage():
                own = disk.provisional == (message.session_id, message.mark)
                if not own and (disk.provisional or disk.confirmed != message.mark):
                    raise errors.BadRequest("engage: another mark")
                self._confirm()
            case wire.Repair():
                for bad in range(message.first, message.first + len(message.lengths) // 4):
                    disk.damaged.discard(bad)
        return wire.ReplicaState(*prefix, self.last, self.chain)

    def _prepare(self, prefix, message):
        disk = self.disk
        if message.storage_id not in (bytes(16), disk.storage_id):
            raise errors.StorageIdMismatch("another storage")
        if message.session_id < disk.promised or (
            message.session_id == disk.promised and message.nonce != disk.nonce
        ):
            raise errors.SessionFenced(f"bound to {disk.promised}, not {message.session_id}")
        disk.promised, disk.nonce = message.session_id, message.nonce
        self.sync()
        mark, confirmed = disk.confirmed, True
        if disk.provisional is not None:
            mark, confirmed = disk.provisional[1], False
        damaged = b"".join(bad.to_bytes(8, "big") * 2 for bad in sorted(disk.damaged))
        state = (disk.last_session, mark, confirmed, self.last, self.chain, disk.suspect, damaged)
        return wire.Prepared(*prefix, disk.storage_id, *state)

    def _lineage(self, prefix, message):
        found = [
            index
            for index, entry in enumerate(self.disk.entries)
            if entry.lineage.first <= message.last and entry.lineage.last >= message.first
        ][-self.lineage_max :]
        if not found:
            raise errors.BadRequest(f"no batches in {message.first}..{message.last}")
        before = self.disk.entries[found[0] - 1].lineage.chain if found[0] else GENESIS_CHAIN
        lines = tuple(self.disk.entries[index].lineage for index in found)
        return wire.LineageResponse(*prefix, before, lines)

    def _range(self, prefix, message):
        entries = self.disk.entries
        if message.whole_batches:
            at = next((i for i, e in enumerate(entries) if e.lineage.first == message.first), None)
            if at is None:
                raise errors.BadRequest(f"no batch begins at {message.first}")
            chosen = [e for e in entries[at:] if e.lineage.last <= message.last]
            chosen = chosen[: self.range_batches_max]
            if not chosen:
                raise errors.BadRequest(f"no whole batch in {message.first}..{message.last}")
            before = entries[at - 1].lineage.chain if at else GENESIS_CHAIN
            records = [record for entry in chosen for record in entry.records]
            lines = tuple(entry.lineage for entry in chosen)
        else:
            log = [record for entry in entries for record in entry.records]
            records = log[message.first : message.last + 1][: self.range_batches_max]
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
        self.checker.appending(self, message)
        records, at = [], 0
        for place in range(0, len(message.lengths), 4):
            length = int.from_bytes(message.lengths[place : place + 4], "big")
            records.append(bytes(message.records[at : at + length]))
            at += length
        for line in message.lineage:
            mine, records = (
                records[: line.last - line.first + 1],
                records[line.last - line.first + 1 :],
            )
            chain = next_chain(self.chain, line.first, line.last, line.session_id, crcs_of(mine))
            assert chain == line.chain, "the owner's chain is wrong"
            disk.entries.append(Entry(line, tuple(mine)))
        assert not records
        if self.fails_next_sync:
            self.fails_next_sync = False
            self._cut(disk.synced_last)
            raise errors.DiskFailed("fsync failed")
        self.world.after(0, lambda: self._snap(0.05))
        return wire.Appended(*prefix, self.last)

    def _truncate(self, message):
        keep = min(message.last_to_keep, self.last)
        if keep < self.disk.confirmed:
            raise errors.BadRequest(f"cut to {keep} below the mark {self.disk.confirmed}")
        ends = {entry.lineage.last: entry.lineage.chain for entry in self.disk.entries}
        ends[BEFORE_FIRST] = GENESIS_CHAIN
        if ends.get(message.base) != message.base_chain:
            raise errors.BadRequest(f"another chain at {message.base}")
        self.checker.cutting(self, keep)
        self._cut(keep)

    def _set_mark(self, message):
        disk = self.disk
        if (self.last, self.chain) != (message.mark, message.chain):
            raise errors.BadRequest(f"mark {message.mark} on a log that ends at {self.last}")
        if disk.suspect and any(bad > disk.confirmed for bad in disk.damaged):
            raise errors.ReplicaSuspect("mark on a damaged log")
        if message.mark < disk.confirmed:
            raise errors.BadRequest("the mark goes back")
        self._snap(0.3)
        self.sync()
        disk.provisional = message.session_id, message.mark
        disk.last_session = message.session_id
        disk.suspect = False
        self._snap(0.2)

    def _confirm(self):
        if self.disk.provisional:
            self.disk.confirmed = self.disk.provisional[1]
            self.disk.provisional = None
