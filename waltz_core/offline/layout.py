"""A second decoder for the files of a storage, independent of the storage's code.

`storage/files/format.py` reads bytes that it has written itself, so it cannot detect its own
mistakes. This file was written from the description of the bytes, imports no code of the storage,
and uses crcmod for its checksums. A property test compares both decoders.

Rules:
    1. A decoder returns a value for any bytes, because the user of a damaged file wants to see its
       content. The value lists its errors in `errors`. Its other fields are set even if they are
       meaningless.
    2. Missing bytes are decoded as zeros, and `errors` states the expected and the found size.
    3. A CRC covers all preceding bytes of its structure. Every CRC is checked.
"""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import crcmod.predefined

Bytes = bytes | memoryview
crc32: Final[Callable[..., int]] = crcmod.predefined.mkCrcFun("crc-32")
assert crc32(b"123456789") == 0xCBF43926

CONTROL_FILE_NAME: Final = "waltz-storage.ctl"
ID_NAME: Final = "waltz-x.id"
SLOTS_FILE_NAME: Final = "waltz-x.ctl"
RESERVE_FILE_NAME: Final = "waltz-x.reserve"

CONTROL_HEADER_BYTES: Final = 128
CONTROL_ENTRY_BYTES: Final = 76
INFO_BYTES: Final = 36
ID_BYTES: Final = 24
SLOT_BYTES: Final = 512
SLOT_BLOCK_BYTES: Final = 4096
FILE_HEADER_BYTES: Final = 128
OFFSET_BYTES: Final = 8
CHAIN_HEADER_BYTES: Final = 64
BATCH_BYTES: Final = 64
RECORD: Final = struct.Struct(">qiiiiiiI")
RECORD_FRAME_BYTES: Final = 40  # the size of a record without its data
GENESIS_MARKER: Final = bytes(16)

AVAILABLE, ASSIGNED = 1, 4
DIRTY, SUSPECT, PROVISIONAL, TRUNCATE, SHORTENED = 1, 2, 4, 8, 16
# The chain hash in the acked marker if records may have no batches.
UNBATCHED_CHAIN: Final = b"\xff" * 16
RECONSTRUCTED: Final = -2  # the session of a batch that replaces unreadable ones
_DAMAGED_MAX: Final = 19


def _fit_to_size(data: Bytes, size: int) -> tuple[bytes, list[str]]:
    """Return exactly `size` bytes, and an error if `data` has more or fewer bytes (rule 2)."""
    errors = [] if len(data) == size else [f"expected {size} bytes, found {len(data)}"]
    return bytes(data[:size]).ljust(size, b"\0"), errors


def _expect(errors: list[str], what: str, expected: object, found: object) -> None:
    if expected != found:
        errors.append(f"expected {what} {expected}, found {found}")


def _expect_crc(errors: list[str], body: bytes, stated_crc: int, before: int = 0) -> None:
    _expect(errors, "CRC", f"{crc32(body, before):08x}", f"{stated_crc:08x}")


def _expect_zero(errors: list[str], reserved: bytes, offset: int) -> None:
    """Add an error for reserved bytes that are not zero.

    They begin at `offset` in the structure.
    """
    for position, value in enumerate(reserved):
        if value:
            errors.append(
                f"expected reserved byte {offset + position} to be zero, found {value:#04x}"
            )
            return


# ---------------------------------------------------------------------------------------------
# waltz-storage.ctl


class ControlFileHeader(NamedTuple):
    """The header of the control file: the cluster, and its number of partitions."""

    version: int
    created_ms: int
    cluster_key: bytes
    partition_count: int
    errors: tuple[str, ...]


class ControlInfo(NamedTuple):
    """One of the two structures of a partition in the 0.13 control file."""

    session: int
    low_water_mark: int
    local_low_water_mark: int
    flags: int
    sequence: int
    errors: tuple[str, ...]


class ControlEntry(NamedTuple):
    """The control file's entry of one partition.

    `current` is the index of the valid structure with the greater sequence. It is None if no
    structure is valid, or if both have the same sequence.
    """

    number: int
    infos: tuple[ControlInfo, ControlInfo]
    current: int | None
    errors: tuple[str, ...]

    @property
    def info(self) -> ControlInfo | None:
        """The current structure; None if there is none."""
        return None if self.current is None else self.infos[self.current]


def decode_control_header(data: Bytes) -> ControlFileHeader:
    """Decode the 128 bytes of the control file's header."""
    body, errors = _fit_to_size(data, CONTROL_HEADER_BYTES)
    version, created_ms, key, count, reserved = struct.unpack(">iq16si96s", body)
    _expect(errors, "version", 0, version)
    _expect_zero(errors, reserved, 32)
    if count < 0:
        errors.append(f"expected a partition count of at least 0, found {count}")
    return ControlFileHeader(version, created_ms, key, count, tuple(errors))


def decode_control_entry(data: Bytes, position: int) -> ControlEntry:
    """Decode the 76 bytes of the partition at this position in the control file."""
    body, errors = _fit_to_size(data, CONTROL_ENTRY_BYTES)
    number = int.from_bytes(body[:4], "big", signed=True)
    _expect(errors, "partition", position, number)
    infos = _decode_info(body[4:40]), _decode_info(body[40:76])
    valid_indexes = [index for index in (0, 1) if not infos[index].errors]
    if not valid_indexes:
        errors.append("both copies of the structure are wrong, so neither is used")
    elif len(valid_indexes) == 2 and infos[0].sequence == infos[1].sequence:
        errors.append(
            f"both copies of the structure have the sequence number {infos[0].sequence}, so "
            "neither is used"
        )
        valid_indexes = []
    current = max(valid_indexes, key=lambda index: infos[index].sequence, default=None)
    return ControlEntry(number, infos, current, tuple(errors))


def _decode_info(data: bytes) -> ControlInfo:
    session, mark, local_mark, flags, sequence, stated_crc = struct.unpack(">qqqiiI", data)
    errors: list[str] = []
    _expect_crc(errors, data[:-4], stated_crc)
    for what, value in (("session", session), ("mark", mark), ("local mark", local_mark)):
        if value < -1:
            errors.append(f"expected a {what} of at least -1, found {value}")
    if flags & ~(AVAILABLE | ASSIGNED):
        errors.append(f"expected only the flags {AVAILABLE} and {ASSIGNED}, found {flags:#x}")
    return ControlInfo(session, mark, local_mark, flags, sequence, tuple(errors))


def decode_storage_id(data: Bytes) -> tuple[bytes, tuple[str, ...]]:
    """Decode `waltz-x.id`; return the ID and the errors."""
    body, errors = _fit_to_size(data, ID_BYTES)
    version, uuid, stated_crc = struct.unpack(">i16sI", body)
    _expect_crc(errors, body[:-4], stated_crc)
    _expect(errors, "version", 0, version)
    return uuid, tuple(errors)


# ---------------------------------------------------------------------------------------------
# waltz-x.ctl


class ControlSlot(NamedTuple):
    """One of the two control slots of a partition."""

    version: int
    flags: int
    partition: int
    sequence: int
    control_file_sequence: int
    promised: int
    nonce: bytes
    last_session: int
    low_water_mark: int
    provisional_session: int
    provisional_mark: int
    acked: int
    acked_chain: bytes
    truncate_to: int
    shortened: tuple[int, int, int, int, bytes]
    damaged: tuple[tuple[int, int], ...]
    start: int  # the last ID before the log's first record; `start_chain` is the chain hash there
    start_chain: bytes
    engaged: int  # the last session in which the replica was engaged
    errors: tuple[str, ...]

    @property
    def is_dirty(self) -> bool:
        """Whether the storage was not closed cleanly since this slot was written."""
        return bool(self.flags & DIRTY)

    @property
    def is_suspect(self) -> bool:
        """Whether the log is not trusted."""
        return bool(self.flags & SUSPECT)

    def lists_as_damaged(self, first: int, last: int) -> bool:
        """Whether the slot lists all IDs of first..last as damaged."""
        return any(low <= first and last <= high for low, high in self.damaged)


def decode_control_slot(data: Bytes, position: int) -> ControlSlot:
    """Decode the slot at the beginning of block `position`, 0 or 1."""
    body, errors = _fit_to_size(data, SLOT_BYTES)
    _expect_crc(errors, body[:-4], int.from_bytes(body[-4:], "big"))
    version, flags, partition, count = struct.unpack_from(">iiii", body, 0)
    sequence, control_file_sequence = struct.unpack_from(">qq", body, 16)
    promised, nonce, last_session, mark = struct.unpack_from(">q16sqq", body, 32)
    provisional_session, provisional_mark = struct.unpack_from(">qq", body, 72)
    acked, acked_chain, truncate_to = struct.unpack_from(">q16sq", body, 88)
    shortened = struct.unpack_from(">qqqq16s", body, 120)
    _expect(errors, "version", 0, version)
    if flags & ~(2 * SHORTENED - 1):
        errors.append(f"expected flags below {2 * SHORTENED:#x}, found {flags:#x}")
    if sequence % 2 == position:
        errors.append(
            f"expected {'an odd' if position == 0 else 'an even'} sequence number, found {sequence}"
        )
    if not 0 <= count <= _DAMAGED_MAX:
        errors.append(f"expected 0 to {_DAMAGED_MAX} damaged ranges, found {count}")
        count = 0
    end = 168 + 16 * count
    damaged = tuple(struct.iter_unpack(">qq", body[168:end]))
    _expect_zero(errors, body[end:-32], end)
    first, start_chain, sessions_back = struct.unpack_from(">q16sI", body, SLOT_BYTES - 32)
    if first < 0:
        errors.append(f"expected a first transaction ID of at least 0, found {first}")
    if sessions_back > last_session + 1:
        errors.append(
            "expected a last engaged session of at least 0, found "
            f"{last_session + 1 - sessions_back}"
        )
    errors += _slot_value_errors(promised, last_session, mark, acked, damaged)
    return ControlSlot(
        version,
        flags,
        partition,
        sequence,
        control_file_sequence,
        promised,
        nonce,
        last_session,
        mark,
        provisional_session,
        provisional_mark,
        acked,
        acked_chain,
        truncate_to,
        shortened,
        damaged,
        first - 1,
        start_chain,
        last_session + 1 - sessions_back if sessions_back else -1,
        tuple(errors),
    )


def _slot_value_errors(
    promised: int, last_session: int, mark: int, acked: int, damaged: tuple[tuple[int, int], ...]
) -> list[str]:
    errors = []
    named_values = (
        ("promise", promised),
        ("session", last_session),
        ("mark", mark),
        ("acked ID", acked),
    )
    for what, value in named_values:
        if value < -1:
            errors.append(f"expected a {what} of at least -1, found {value}")
    previous = -1
    for first, last in damaged:
        if not previous < first <= last:
            errors.append(f"expected damaged ranges in ascending order, found {first}..{last}")
        previous = last
    return errors


def current_slot(slots: tuple[ControlSlot, ControlSlot], partition: int) -> ControlSlot | None:
    """Return the current slot: the valid slot with the greater sequence; None if none is valid."""
    valid_slots = [slot for slot in slots if not slot.errors and slot.partition == partition]
    return max(valid_slots, key=lambda slot: slot.sequence, default=None)


# ---------------------------------------------------------------------------------------------
# .seg, .idx, .chn


class FileHeader(NamedTuple):
    """The header of `.seg` and `.idx` (128 bytes), and the segment fields of the `.chn` header."""

    version: int
    created_ms: int
    cluster_key: bytes
    partition: int
    first: int
    errors: tuple[str, ...]


class ChainHeader(NamedTuple):
    """The header of `.chn` (64 bytes); the CRC of each entry continues `segment_crc`."""

    header: FileHeader
    chain_before: bytes
    segment_crc: int

    @property
    def errors(self) -> tuple[str, ...]:
        return self.header.errors


class BatchEntry(NamedTuple):
    """One entry of `.chn`: a batch whose last record is in this segment."""

    first: int
    last: int
    session: int
    stamp_ms: int
    chain: bytes
    synced: int
    errors: tuple[str, ...]


def decode_file_header(data: Bytes) -> FileHeader:
    """Decode the 128 bytes of the header of `.seg` or `.idx`."""
    body, errors = _fit_to_size(data, FILE_HEADER_BYTES)
    version, created_ms, key, partition, first, reserved = struct.unpack(">iq16siq88s", body)
    _expect(errors, "version", 0, version)
    _expect_zero(errors, reserved, 40)
    return FileHeader(version, created_ms, key, partition, first, tuple(errors))


def decode_chain_header(data: Bytes) -> ChainHeader:
    """Decode the 64 bytes of the header of `.chn`."""
    body, errors = _fit_to_size(data, CHAIN_HEADER_BYTES)
    version, created_ms, key, partition, first, chain, reserved, stated_crc = struct.unpack(
        ">iq16siq16s4sI", body
    )
    _expect_crc(errors, body[:-4], stated_crc)
    _expect(errors, "version", 0, version)
    _expect_zero(errors, reserved, 56)
    header = FileHeader(version, created_ms, key, partition, first, tuple(errors))
    # The CRC of each entry also covers the header of the segment, in the form that it has in
    # `.seg`: 40 bytes, and 88 zero bytes.
    return ChainHeader(header, chain, crc32(body[:40] + bytes(88)))


def decode_batch_entry(data: Bytes, position: int, segment_crc: int) -> BatchEntry:
    """Decode the 64 bytes of the entry at a position in its `.chn` file."""
    body, errors = _fit_to_size(data, BATCH_BYTES)
    first, last, session, stamp_ms, chain, synced, reserved, stated_crc = struct.unpack(
        ">qqqq16sq4sI", body
    )
    _expect_crc(errors, body[:-4], stated_crc, crc32(struct.pack(">q", position), segment_crc))
    _expect_zero(errors, reserved, 56)
    if not 0 <= first <= last:
        errors.append(f"expected IDs with 0 <= first <= last, found {first}..{last}")
    elif not -1 <= synced < first:
        errors.append(f"expected a synced transaction ID of -1 to {first - 1}, found {synced}")
    if session < RECONSTRUCTED:
        errors.append(f"expected a session number of at least {RECONSTRUCTED}, found {session}")
    return BatchEntry(first, last, session, stamp_ms, chain, synced, tuple(errors))
