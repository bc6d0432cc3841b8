"""The layout of every byte that a storage has on disk: files of Waltz 0.13, and new files.

A file outlives the program that wrote it, and Waltz 0.13 and this version read the same bytes. So
each layout is declared once and is checked when it is read. Tests compare it with the stored bytes
in `tests/golden/disk/`. docs/design/disk-format.md contains these declarations as tables.

    waltz-storage.ctl   of 0.13: cluster, partitions, session and water marks
    waltz-x.id          new: the storage ID
    <p>/waltz-x.ctl     new: promise, marks, marker, damage of partition p, in two slots
    <p>/waltz-x.wipe    new: the files of partition p are being deleted; the promise that stays
    <p>/<first>.seg     of 0.13: records
    <p>/<first>.idx     of 0.13: where each record starts
    <p>/<first>.chn     new: one entry for each batch that ends in the segment

Rules:
    1. All integers are big-endian. IDs and marks have 64 bits. Each file begins with a version.
    2. For any bytes, a decoder returns a value, or raises `BadFormat` (impossible bytes) or
       `ChecksumMismatch` (changed bytes).
    3. Reserved bytes are written as zero, and a reader rejects any other value.
    4. A CRC is a CRC-32 as in zlib, over all preceding bytes of the structure.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.byte_layout import ByteLayout, Field
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    Chain,
    LineageEntry,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.values import value

VERSION: Final = 0
Bytes = bytes | memoryview

_CRC_STRUCT = struct.Struct(">I")


def with_crc(body: bytes, before: int = 0) -> bytes:
    """Return the bytes and then their CRC-32 (rule 4). The CRC continues the CRC `before`."""
    return body + _CRC_STRUCT.pack(crc32(body, before))


def checked_body(data: Bytes, size: int, what: str, before: int = 0) -> bytes:
    """Check the CRC of a structure of `size` bytes, and return the bytes before the CRC.

    `before` has the same meaning as in `with_crc`.

    Raises:
        BadFormat: the structure has another size.
        ChecksumMismatch: the CRC does not match.
    """
    if len(data) != size:
        raise BadFormat(f"{what}: expected {size} bytes, found {len(data)}")
    body = bytes(data[:-4])
    expected = _CRC_STRUCT.unpack_from(data, size - 4)[0]
    found = crc32(body, before)
    if expected != found:
        raise ChecksumMismatch(f"{what}: expected CRC {expected:08x}, found {found:08x}")
    return body


def _check_length(data: Bytes, size: int, what: str) -> None:
    if len(data) < size:
        raise BadFormat(f"{what}: expected {size} bytes, found {len(data)}")


def check_version(found: int, what: str) -> None:
    """Raise BadFormat for any version other than `VERSION`."""
    if found != VERSION:
        raise BadFormat(
            f"{what}: expected version {VERSION}, found {found}. Hint: if a newer version of Waltz "
            "has written the file, run that version."
        )


def _check_zero(reserved: Bytes, what: str) -> None:
    if any(reserved):
        found = bytes(reserved).strip(b"\0")[:16].hex()
        raise BadFormat(f"{what}: expected zero in the reserved bytes, found {found}")


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Prefix errors about bytes with the path of their file."""
    try:
        yield
    except (BadFormat, ChecksumMismatch) as error:
        raise type(error)(f"{path}: {error}") from error


# ---------------------------------------------------------------------------------------------
# The header of waltz-storage.ctl. It has no CRC; if it is wrong, the storage refuses to start.

CONTROL_HEADER_LAYOUT: Final = ByteLayout(
    Field("version", "i", "0"),
    Field("creation time", "q", "ms since 1970"),
    Field("cluster key", "16s"),
    Field("partition count", "i"),
    Field("reserved", "96s", "zero"),
)
_CONTROL_HEADER_STRUCT = CONTROL_HEADER_LAYOUT.struct
CONTROL_HEADER_BYTES: Final = 128
assert _CONTROL_HEADER_STRUCT.size == CONTROL_HEADER_BYTES
PARTITIONS_MAX: Final = 1 << 20


class ControlHeader(NamedTuple):
    """The cluster to which a storage directory belongs."""

    created_ms: int
    cluster_key: bytes
    partition_count: int

    def encode(self) -> bytes:
        """Return the 128 bytes of the header."""
        return _CONTROL_HEADER_STRUCT.pack(VERSION, *self, bytes(96))

    @staticmethod
    def decode(data: Bytes) -> "ControlHeader":
        """Decode 128 bytes (rule 2)."""
        _check_length(data, CONTROL_HEADER_BYTES, "control file header")
        version, created_ms, key, count, reserved = _CONTROL_HEADER_STRUCT.unpack_from(data)
        check_version(version, "control file header")
        _check_zero(reserved, "control file header")
        if not 0 <= count <= PARTITIONS_MAX:
            raise BadFormat(
                f"control file header: expected 0 to {PARTITIONS_MAX} partitions, found {count}"
            )
        return ControlHeader(created_ms, key, count)


# ---------------------------------------------------------------------------------------------
# One of the two structures of a partition in waltz-storage.ctl.
#
# The valid structure with the greater sequence is the current one. If both are wrong, the storage
# refuses to start.

PARTITION_INFO_LAYOUT: Final = ByteLayout(
    Field("session ID", "q", "-1: none"),
    Field("low-water mark", "q"),
    Field("local low-water mark", "q", "where the log ended when the mark was set"),
    Field("flags", "i", "1 available, 4 assigned"),
    Field("sequence", "i"),
    has_crc=True,
)
_PARTITION_INFO_STRUCT = PARTITION_INFO_LAYOUT.struct
PARTITION_INFO_BYTES: Final = 36
PARTITION_ENTRY_BYTES: Final = 4 + 2 * PARTITION_INFO_BYTES
assert _PARTITION_INFO_STRUCT.size + _CRC_STRUCT.size == PARTITION_INFO_BYTES
assert PARTITION_ENTRY_BYTES == 76
FLAG_AVAILABLE: Final = 1
FLAG_ASSIGNED: Final = 4


class PartitionInfo(NamedTuple):
    """The state of a partition outside its log, in Waltz 0.13."""

    session_id: SessionId
    low_water_mark: TransactionId
    local_low_water_mark: TransactionId
    flags: int
    sequence: int

    def encode(self) -> bytes:
        """Return the 36 bytes of the structure."""
        return with_crc(_PARTITION_INFO_STRUCT.pack(*self))

    @staticmethod
    def decode(data: Bytes) -> "PartitionInfo":
        """Decode 36 bytes (rule 2)."""
        body = checked_body(data, PARTITION_INFO_BYTES, "partition info")
        session, mark, local_mark, flags, sequence = _PARTITION_INFO_STRUCT.unpack(body)
        for name, number in (("session", session), ("mark", mark), ("local mark", local_mark)):
            if number < BEFORE_FIRST:
                raise BadFormat(f"partition info: expected a {name} of at least -1, found {number}")
        return PartitionInfo(
            SessionId(session), TransactionId(mark), TransactionId(local_mark), flags, sequence
        )


NEW_PARTITION_INFOS: Final = (
    PartitionInfo(NO_SESSION, BEFORE_FIRST, BEFORE_FIRST, FLAG_AVAILABLE, -1),
    PartitionInfo(NO_SESSION, BEFORE_FIRST, BEFORE_FIRST, FLAG_AVAILABLE, 0),
)


def partition_entry_offset(index: int) -> int:
    """Return the offset at which the entry of a partition begins in the control file."""
    return CONTROL_HEADER_BYTES + PARTITION_ENTRY_BYTES * index


def partition_info_offset(index: int, slot: int) -> int:
    """Return the offset at which structure 0 or 1 of a partition begins in the control file."""
    assert slot in {0, 1}
    return partition_entry_offset(index) + 4 + PARTITION_INFO_BYTES * slot


# ---------------------------------------------------------------------------------------------
# The header of .seg and of .idx. It has no CRC; its content follows from name and directory.
#
# In .seg, the header is followed by records (raw_records.py). In .idx, it is followed by 8 bytes
# for each record: the offset of the record in .seg.

_SEGMENT_FIELDS = (
    Field("version", "i", "0"),
    Field("creation time", "q", "ms since 1970"),
    Field("cluster key", "16s"),
    Field("partition", "i"),
    Field("first transaction ID", "q", "of this segment"),
)
SEGMENT_HEADER_LAYOUT: Final = ByteLayout(*_SEGMENT_FIELDS, Field("reserved", "88s", "zero"))
_SEGMENT_HEADER_STRUCT = SEGMENT_HEADER_LAYOUT.struct
SEGMENT_HEADER_BYTES: Final = 128
OFFSET_BYTES: Final = 8
assert _SEGMENT_HEADER_STRUCT.size == SEGMENT_HEADER_BYTES


class SegmentHeader(NamedTuple):
    """The cluster and partition of a segment, and its first ID."""

    created_ms: int
    cluster_key: bytes
    partition_id: PartitionId
    first: TransactionId

    def encode(self) -> bytes:
        """Return the 128 bytes of the header."""
        return _SEGMENT_HEADER_STRUCT.pack(VERSION, *self, bytes(88))

    @staticmethod
    def decode(data: Bytes) -> "SegmentHeader":
        """Decode 128 bytes (rule 2)."""
        _check_length(data, SEGMENT_HEADER_BYTES, "segment header")
        version, created_ms, key, partition, first, reserved = _SEGMENT_HEADER_STRUCT.unpack_from(
            data
        )
        check_version(version, "segment header")
        _check_zero(reserved, "segment header")
        if first < 0:
            raise BadFormat(f"segment header: expected a first ID of at least 0, found {first}")
        return SegmentHeader(created_ms, key, PartitionId(partition), TransactionId(first))


def segment_name(first: TransactionId, suffix: str) -> str:
    """Return the name of a file of a segment; the suffix is ".seg", ".idx" or ".chn"."""
    assert first >= 0
    return f"{first:019d}{suffix}"


def first_id_in_name(name: str) -> TransactionId | None:
    """Return the first ID in the name of a ".seg" file; None for any other name."""
    stem, dot, suffix = name.partition(".")
    if dot and suffix == "seg" and len(stem) == 19 and stem.isascii() and stem.isdigit():
        first = int(stem)
        return TransactionId(first) if first < 1 << 63 else None
    return None


# ---------------------------------------------------------------------------------------------
# .chn: the header, and one entry for each batch whose last record is in the segment.
#
# "chain before" is the chain hash before the first entry of the file. "synced ID" is the last ID
# that was durable when the entry was written: a crash cannot have torn records up to this ID. If
# the batch of a wrong entry is above all synced IDs and the acked marker, the log ends before this
# batch. Any other wrong entry makes the replica suspect. No entry crosses a sector boundary.
#
# The CRC of an entry also covers the header of its segment and the number of the entry in the file.
# So if a disk has written other bytes to the place of an entry, a reader rejects these bytes. This
# also holds if the bytes are an entry of another file, or a record (a record also ends with its
# CRC).

LINEAGE_HEADER_LAYOUT: Final = ByteLayout(
    *_SEGMENT_FIELDS,
    Field("chain before", "16s", "before the first entry of this file"),
    Field("reserved", "4x", "zero"),
    has_crc=True,
)
_BATCH_FIELDS = (
    Field("first", "q"),
    Field("last", "q"),
    Field("session ID", "q", "-1: adopted from Waltz 0.13; -2: reconstructed for a lost entry"),
    Field("commit stamp", "q", "ms since 1970; 0: none"),
    Field("chain", "16s", "after this batch"),
)
LINEAGE_ENTRY_LAYOUT: Final = ByteLayout(
    *_BATCH_FIELDS,
    Field("synced ID", "q", "the last durable ID when the entry was written"),
    Field("reserved", "4x", "zero"),
    has_crc=True,
)
_LINEAGE_HEADER_STRUCT = LINEAGE_HEADER_LAYOUT.struct
_LINEAGE_ENTRY_STRUCT = LINEAGE_ENTRY_LAYOUT.struct
_LINEAGE_ENTRY_AND_CRC_STRUCT = struct.Struct(">qqqq16sq4sI")
_POSITION_STRUCT = struct.Struct(">q")
LINEAGE_HEADER_BYTES: Final = 64
LINEAGE_ENTRY_BYTES: Final = 64
assert _LINEAGE_HEADER_STRUCT.size + _CRC_STRUCT.size == LINEAGE_HEADER_BYTES
assert _LINEAGE_ENTRY_STRUCT.size + _CRC_STRUCT.size == LINEAGE_ENTRY_BYTES
assert _LINEAGE_ENTRY_AND_CRC_STRUCT.size == LINEAGE_ENTRY_BYTES
_RESERVED_ZEROS: Final = bytes(4)


class LineageHeader(NamedTuple):
    """The header of a lineage file: its segment, and the chain hash before its first entry."""

    segment: SegmentHeader
    chain_before: Chain

    @property
    def segment_crc(self) -> int:
        """The CRC of the segment header, which the CRC of each entry continues."""
        return crc32(self.segment.encode())

    def encode(self) -> bytes:
        """Return the 64 bytes of the header."""
        return with_crc(_LINEAGE_HEADER_STRUCT.pack(VERSION, *self.segment, self.chain_before))

    @staticmethod
    def decode(data: Bytes) -> "LineageHeader":
        """Decode 64 bytes (rule 2)."""
        body = checked_body(data, LINEAGE_HEADER_BYTES, "lineage header")
        version, created_ms, key, partition, first, chain = _LINEAGE_HEADER_STRUCT.unpack(body)
        check_version(version, "lineage header")
        _check_zero(body[-4:], "lineage header")
        if first < 0:
            raise BadFormat(f"lineage header: expected a first ID of at least 0, found {first}")
        segment = SegmentHeader(created_ms, key, PartitionId(partition), TransactionId(first))
        return LineageHeader(segment, Chain(chain))


def encode_entry(
    entry: LineageEntry, synced: TransactionId, *, segment_crc: int, position: int
) -> bytes:
    """Return the 64 bytes of a lineage entry; `synced` is the last ID that is already durable."""
    assert BEFORE_FIRST <= synced < entry.first
    return with_crc(
        _LINEAGE_ENTRY_STRUCT.pack(*entry, synced), _entry_crc_start(segment_crc, position)
    )


def decode_entry(
    data: Bytes, *, segment_crc: int, position: int
) -> tuple[LineageEntry, TransactionId]:
    """Decode 64 bytes (rule 2); return the entry and its synced ID.

    The synced ID is the last ID that was durable when the entry was written.
    """
    crc_start = _entry_crc_start(segment_crc, position)
    if len(data) == LINEAGE_ENTRY_BYTES:
        values = _LINEAGE_ENTRY_AND_CRC_STRUCT.unpack(data)
        first, last, session, stamp_ms, chain, synced, reserved, stated_crc = values
        is_valid = stated_crc == crc32(data[:-4], crc_start) and reserved == _RESERVED_ZEROS
        if is_valid and BEFORE_FIRST <= synced < first <= last and first >= 0:
            return LineageEntry(first, last, session, stamp_ms, chain), synced
    # The entry is invalid: the checks below raise the specific error.
    body = checked_body(data, LINEAGE_ENTRY_BYTES, "lineage entry", crc_start)
    _check_zero(body[-4:], "lineage entry")
    *fields, synced = _LINEAGE_ENTRY_STRUCT.unpack(body)
    entry = _entry_from_fields(fields)
    if not BEFORE_FIRST <= synced < entry.first:
        raise BadFormat(
            f"lineage entry: expected a synced transaction ID below {entry.first}, found {synced}"
        )
    return entry, TransactionId(synced)


def _entry_crc_start(segment_crc: int, position: int) -> int:
    return crc32(_POSITION_STRUCT.pack(position), segment_crc)


def _entry_from_fields(fields: Sequence[Any]) -> LineageEntry:
    first, last, session, stamp_ms, chain = fields
    if not 0 <= first <= last:
        raise BadFormat(
            f"lineage entry: expected IDs with 0 <= first <= last, found {first}..{last}"
        )
    return LineageEntry(
        TransactionId(first), TransactionId(last), SessionId(session), stamp_ms, Chain(chain)
    )


# ---------------------------------------------------------------------------------------------
# waltz-x.id: the storage ID. If it is wrong, the storage refuses to start.

STORAGE_ID_LAYOUT: Final = ByteLayout(
    Field("version", "i", "0"), Field("storage ID", "16s", "a UUID"), has_crc=True
)
_STORAGE_ID_STRUCT = STORAGE_ID_LAYOUT.struct
STORAGE_ID_BYTES: Final = 24
assert _STORAGE_ID_STRUCT.size + _CRC_STRUCT.size == STORAGE_ID_BYTES


def encode_storage_id(storage_id: bytes) -> bytes:
    """Return the 24 bytes of `waltz-x.id`."""
    assert len(storage_id) == 16
    return with_crc(_STORAGE_ID_STRUCT.pack(VERSION, storage_id))


def decode_storage_id(data: Bytes) -> bytes:
    """Decode 24 bytes (rule 2)."""
    body = checked_body(data, STORAGE_ID_BYTES, "storage ID")
    version, storage_id = _STORAGE_ID_STRUCT.unpack(body)
    check_version(version, "storage ID")
    return bytes(storage_id)


# ---------------------------------------------------------------------------------------------
# <p>/waltz-x.ctl: two slots, at 0 and at 4096; the valid slot with the greater sequence is current.
#
# A slot is one sector, which a disk writes completely or not at all. So a wrong slot was not torn
# by a crash: it is corrupt, and the promise in it may be lost. In this case the other slot is used,
# and the replica is suspect. If both slots are wrong, the partition cannot be opened. The rest of
# the block after the sector is zero and is not read.

SLOT_BYTES: Final = 512
SLOT_BLOCK_BYTES: Final = 4096
SLOT_COUNT: Final = 2
DAMAGED_RANGES_MAX: Final = 19
SLOT_LAYOUT: Final = ByteLayout(
    Field("version", "i", "0"),
    Field("flags", "i", "1 dirty, 2 suspect, 4 provisional mark, 8 truncation, 16 shortened batch"),
    Field("partition", "i"),
    Field("damaged count", "i"),
    Field("sequence", "q"),
    Field("control file sequence", "q", "of the newest structure in `waltz-storage.ctl`"),
    Field("promised session ID", "q"),
    Field("nonce of the promise", "16s", "all bits set: unknown"),
    Field("last session ID", "q"),
    Field("confirmed low-water mark", "q"),
    Field("provisional session ID", "q"),
    Field("provisional low-water mark", "q"),
    Field("acked ID", "q", "the acked marker"),
    Field("acked chain", "16s", "chain at that ID; all bits set: some records have no batches"),
    Field("last ID to keep", "q", "of a truncation that has begun"),
    *(each._replace(name=f"shortened batch: {each.name}", note="") for each in _BATCH_FIELDS),
)
# The rest of the slot, in the same sector.
SLOT_TAIL_LAYOUT: Final = ByteLayout(
    Field(
        "damaged ranges",
        f"{16 * DAMAGED_RANGES_MAX}s",
        f"{DAMAGED_RANGES_MAX} times first and last ID",
    ),
    Field("reserved", "8s", "0"),
    Field("first ID", "q", "of the log's oldest segment"),
    Field("chain before", "16s", "the chain before the first ID"),
    Field(
        "engaged", "I", "0: never engaged; n: last engaged n - 1 sessions before the last session"
    ),
    has_crc=True,
)
_SLOT_STRUCT = SLOT_LAYOUT.struct
_RANGE_STRUCT = struct.Struct(">qq")
assert _SLOT_STRUCT.size == 168
assert SLOT_LAYOUT.size_bytes + SLOT_TAIL_LAYOUT.size_bytes == SLOT_BYTES
assert DAMAGED_RANGES_MAX * _RANGE_STRUCT.size == SLOT_TAIL_LAYOUT.field_offsets()[0].size_bytes
_TAIL_STRUCT = struct.Struct(">q16sI")
_DIRTY, _SUSPECT, _PROVISIONAL, _TRUNCATE, _SHORTENED = 1, 2, 4, 8, 16
NO_NONCE: Final = bytes(16)
_LOST_NONCE: Final = b"\xff" * 16


class Promise(NamedTuple):
    """The session that a replica has promised to accept, and the nonce of its owner.

    See docs/design/correctness.md 2.4.

    If a replica has lost its promise, it creates a new promise. The new promise is for the session
    after the latest session that the replica has seen, and has a nonce that no owner has. So the
    replica rejects all sessions up to the newly promised session. The reason: the lost promise may
    have been for any of these sessions.
    """

    session_id: SessionId = NO_SESSION
    nonce: bytes = NO_NONCE

    @classmethod
    def after_loss(cls, seen: SessionId) -> Self:
        """Return the new promise of a replica that lost its promise after sessions up to `seen`."""
        return cls(SessionId(seen + 1), _LOST_NONCE)

    @property
    def is_after_loss(self) -> bool:
        """Whether the promise was lost, and no session has prepared the replica since."""
        return self.nonce == _LOST_NONCE

    @property
    def last_seen_session(self) -> SessionId:
        """The latest session that this replica has seen."""
        return SessionId(self.session_id - 1) if self.is_after_loss else self.session_id

    def at_least(self, session_id: SessionId) -> "Promise":
        """Return this promise if it is for `session_id` or later; else a new one, without nonce."""
        return self if self.session_id >= session_id else Promise(session_id)


class ProvisionalMark(NamedTuple):
    """A low-water mark that a session has set and that is not confirmed yet."""

    session_id: SessionId
    low_water_mark: TransactionId


class AckedMarker(NamedTuple):
    """The end of a batch up to which the log is known to be durable, and its chain hash."""

    transaction_id: TransactionId
    chain: Chain


GENESIS_MARKER: Final = AckedMarker(BEFORE_FIRST, GENESIS_CHAIN)
# Replaces the chain hash of the acked marker if some records up to the marker have no batches. The
# next opening creates batches for them (`log_recovery.py`, rule 4). No chain hash has this value.
UNBATCHED_CHAIN: Final = Chain(b"\xff" * 16)


class TruncateIntent(NamedTuple):
    """A truncation that has begun: the last ID to keep, and the entry of a shortened batch."""

    last_to_keep: TransactionId
    shortened: LineageEntry | None


class IdRange(NamedTuple):
    """The IDs first..last, both included."""

    first: TransactionId
    last: TransactionId


@value(frozen=True, slots=True)
class Slot:
    """The durable state of a partition outside its log.

    `control_file_sequence` is the sequence of the structure in `waltz-storage.ctl` that this
    version wrote last, or was about to write.
    """

    partition_id: PartitionId
    sequence: int = 0
    control_file_sequence: int = 0
    promised: SessionId = NO_SESSION
    nonce: bytes = NO_NONCE
    last_session: SessionId = NO_SESSION
    low_water_mark: TransactionId = BEFORE_FIRST
    provisional: ProvisionalMark | None = None
    acked: AckedMarker = GENESIS_MARKER
    truncate: TruncateIntent | None = None
    damaged: tuple[IdRange, ...] = ()
    dirty: bool = False
    suspect: bool = False
    engaged: SessionId = NO_SESSION  # the latest session that opened with this replica engaged
    start: AckedMarker = GENESIS_MARKER  # the end of the batch before the log's first record

    def has_legacy_writes(self, info: PartitionInfo) -> bool:
        """Return whether `info` shows that Waltz 0.13 has written after this slot.

        In this case, `info` has a greater sequence than this slot states, or a later session than
        this slot.
        """
        is_later = NO_SESSION < self.last_session < info.session_id
        return is_later or info.sequence > self.control_file_sequence

    @property
    def promise(self) -> Promise:
        """The session that this replica has promised, with its nonce."""
        return Promise(self.promised, self.nonce)

    def with_promise(self, promise: Promise) -> "Slot":
        """Return a copy of the slot with another promise."""
        return replace(self, promised=promise.session_id, nonce=promise.nonce)

    @property
    def is_unbatched(self) -> bool:
        """Whether the log may have records without batches."""
        return self.acked.chain == UNBATCHED_CHAIN

    def encode(self) -> bytes:
        """Return the 512 bytes of the slot."""
        assert len(self.nonce) == 16
        assert len(self.damaged) <= DAMAGED_RANGES_MAX
        provisional = self.provisional or ProvisionalMark(NO_SESSION, BEFORE_FIRST)
        truncate = self.truncate or TruncateIntent(BEFORE_FIRST, None)
        body = _SLOT_STRUCT.pack(
            VERSION,
            self._flags(),
            self.partition_id,
            len(self.damaged),
            self.sequence,
            self.control_file_sequence,
            self.promised,
            self.nonce,
            self.last_session,
            self.low_water_mark,
            *provisional,
            *self.acked,
            truncate.last_to_keep,
            *(truncate.shortened or (0, 0, 0, 0, GENESIS_CHAIN)),
        )
        ranges = b"".join(_RANGE_STRUCT.pack(*ids) for ids in self.damaged)
        tail = _TAIL_STRUCT.pack(
            self.start.transaction_id + 1, self.start.chain, self._encoded_engaged_session()
        )
        return with_crc(
            (body + ranges).ljust(SLOT_BYTES - _CRC_STRUCT.size - len(tail), b"\0") + tail
        )

    def _encoded_engaged_session(self) -> int:
        sessions_back = self.last_session - self.engaged + 1
        assert sessions_back > 0
        return 0 if self.engaged == NO_SESSION or sessions_back >= 1 << 32 else sessions_back

    def _flags(self) -> int:
        return (
            _DIRTY * self.dirty
            | _SUSPECT * self.suspect
            | _PROVISIONAL * (self.provisional is not None)
            | _TRUNCATE * (self.truncate is not None)
            | _SHORTENED * (self.truncate is not None and self.truncate.shortened is not None)
        )

    @staticmethod
    def decode(data: Bytes) -> "Slot":
        """Decode 512 bytes (rule 2)."""
        body = checked_body(data, SLOT_BYTES, "control slot")
        fields = _SLOT_STRUCT.unpack_from(body)
        version, flags, partition, damaged_count, sequence, control_file_sequence = fields[:6]
        promised, nonce, last_session, low_water_mark = fields[6:10]
        check_version(version, "control slot")
        if not 0 <= damaged_count <= DAMAGED_RANGES_MAX or not 0 <= flags < 2 * _SHORTENED:
            raise BadFormat(
                f"control slot: impossible values: damaged count {damaged_count}, flags {flags:x}"
            )
        if min(promised, last_session, low_water_mark, fields[12]) < BEFORE_FIRST:
            raise BadFormat("control slot: expected session IDs and marks of at least -1")
        used_bytes = _SLOT_STRUCT.size + damaged_count * _RANGE_STRUCT.size
        _check_zero(body[used_bytes : -_TAIL_STRUCT.size], "control slot")
        first, chain_before, sessions_back = _TAIL_STRUCT.unpack_from(
            body, len(body) - _TAIL_STRUCT.size
        )
        if first < 0:
            raise BadFormat(
                f"control slot: expected a first transaction ID of at least 0, found {first}"
            )
        if sessions_back > last_session + 1:
            raise BadFormat(
                f"control slot: expected an engaged session of at least 0, "
                f"found {last_session + 1 - sessions_back}"
            )
        return Slot(
            PartitionId(partition),
            sequence,
            control_file_sequence,
            promised=SessionId(promised),
            nonce=nonce,
            last_session=SessionId(last_session),
            low_water_mark=TransactionId(low_water_mark),
            provisional=_decode_provisional_mark(flags, *fields[10:12]),
            acked=AckedMarker(TransactionId(fields[12]), Chain(fields[13])),
            truncate=_decode_truncate_intent(flags, fields[14], fields[15:20]),
            damaged=_decode_damaged_ranges(body[_SLOT_STRUCT.size : used_bytes]),
            dirty=bool(flags & _DIRTY),
            suspect=bool(flags & _SUSPECT),
            engaged=SessionId(last_session + 1 - sessions_back) if sessions_back else NO_SESSION,
            start=AckedMarker(TransactionId(first - 1), Chain(chain_before)),
        )


def _decode_provisional_mark(flags: int, session: int, mark: int) -> ProvisionalMark | None:
    if not flags & _PROVISIONAL:
        return None
    if min(session, mark) < BEFORE_FIRST:
        raise BadFormat(
            f"control slot: impossible provisional low-water mark {mark} of session {session}"
        )
    return ProvisionalMark(SessionId(session), TransactionId(mark))


def _decode_truncate_intent(
    flags: int, last_to_keep: int, shortened: Sequence[Any]
) -> TruncateIntent | None:
    if not flags & _TRUNCATE:
        return None
    if last_to_keep < BEFORE_FIRST:
        raise BadFormat(
            f"control slot: expected a last ID to keep of at least -1, found {last_to_keep}"
        )
    entry = _entry_from_fields(shortened) if flags & _SHORTENED else None
    return TruncateIntent(TransactionId(last_to_keep), entry)


def _decode_damaged_ranges(data: bytes) -> tuple[IdRange, ...]:
    ranges = []
    previous = -1
    for first, last in _RANGE_STRUCT.iter_unpack(data):
        if not previous < first <= last:
            raise BadFormat(f"control slot: the damaged range {first}..{last} is out of order")
        ranges.append(IdRange(TransactionId(first), TransactionId(last)))
        previous = last
    return tuple(ranges)
