"""Decoders of a storage's files: each structure, and directories with a changed file."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.fuzz.decoder import Decoder
from tests.offline_storage import PARTITION, sample_log
from tests.storage_model import CLUSTER_KEY, ROOT
from waltz_core.errors import BadFormat, ChecksumMismatch, Damaged, WaltzError
from waltz_core.offline.verify import verify
from waltz_core.records import lock_blocks
from waltz_core.records.checksum import crc32
from waltz_core.records.lock_blocks import TRAILER_BYTES, LogEnd
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    LineageEntry,
)
from waltz_core.server.locking.lock_table_loader import _writer_ids
from waltz_core.storage.files.control_file import ControlFile
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    PARTITION_INFO_BYTES,
    SEGMENT_HEADER_BYTES,
    SLOT_BLOCK_BYTES,
    SLOT_BYTES,
    AckedMarker,
    ControlHeader,
    IdRange,
    LineageHeader,
    PartitionInfo,
    ProvisionalMark,
    SegmentHeader,
    Slot,
    TruncateIntent,
    _entry_crc_start,
    decode_entry,
    decode_storage_id,
    encode_entry,
    encode_storage_id,
    partition_info_offset,
)
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.removal import WipeIntent
from waltz_sim.world.simulated_disk import Contents, SimDisk

NOW_MS = 1_700_000_000_000
CHAIN = bytes(range(16))
DAMAGED = (BadFormat, ChecksumMismatch)
SEGMENT = SegmentHeader(NOW_MS, CLUSTER_KEY, PARTITION, 5)
READ_BYTES_MAX = 5_000
READS_MAX = 20


# ---------------------------------------------------------------------------------------------
# structures


def with_crc(data: bytes, before: int = 0) -> bytes:
    """Return the bytes with their CRC-32 in the last four bytes."""
    return data[:-4] + crc32(data[:-4], before).to_bytes(4, "big") if len(data) >= 4 else data


def decode_structure(decode: Callable[[bytes], Any], data: bytes) -> None:
    """Decode a structure, and check that it has only one encoding."""
    encoded: bytes = decode(data).encode()
    assert data[: len(encoded)] == encoded


def slots() -> list[bytes]:
    entry = LineageEntry(3, 9, 2, NOW_MS, CHAIN)
    full = Slot(
        PARTITION,
        sequence=7,
        control_file_sequence=3,
        promised=6,
        nonce=CHAIN,
        last_session=5,
        low_water_mark=9,
        provisional=ProvisionalMark(5, 11),
        acked=AckedMarker(9, CHAIN),
        truncate=TruncateIntent(8, entry),
        damaged=(IdRange(1, 2), IdRange(4, 4)),
        dirty=True,
        suspect=True,
        engaged=4,
        start=AckedMarker(2, CHAIN),
    )
    return [full.encode(), Slot(PARTITION).encode()]


def decode_slot(data: bytes) -> None:
    Slot.encode(Slot.decode(data))  # fields that are disabled by flags are not stored


BOUND = {"segment_crc": 0x01020304, "position": 3}


def decode_lineage_entry(data: bytes) -> None:
    entry, synced = decode_entry(data, **BOUND)
    assert encode_entry(entry, synced, **BOUND) == data


def id_of_storage(data: bytes) -> None:
    assert encode_storage_id(decode_storage_id(data)) == data


# ---------------------------------------------------------------------------------------------
# lock blocks


def runs_of_blocks() -> list[bytes]:
    locks = b"".join(each.to_bytes(4, "big") for each in (1, 2, 3))
    first = lock_blocks.encode(0, LogEnd(4, CHAIN), GENESIS_CHAIN, locks, bytes((0, 1, 4)))
    second = lock_blocks.encode(5, LogEnd(9, CHAIN), CHAIN, locks[:8])
    return [first + second, second, lock_blocks.encode(0, LogEnd(9, CHAIN), CHAIN, b"")]


def sealed_block(data: bytes) -> bytes:
    """Return a run with the CRC of its last block, if there is room for that block."""
    count = int.from_bytes(data[-8:-4], "big")
    distances = count if data[-TRAILER_BYTES:][:4] == b"WLB2" else 0
    start = len(data) - TRAILER_BYTES - 4 * count - distances
    return data if start < 0 else data[:start] + with_crc(data[start:])


def read_blocks(data: bytes) -> None:
    """Read a run of blocks from its end, as the next owner does."""
    run = lock_blocks.LockBlockReader(data)
    block = run.block_ending_at(LogEnd(9, CHAIN), 10)
    for _ in range(10):
        if block is None:
            return
        assert len(block.distances) in (0, len(block.locks) // 4)
        _writer_ids(block)
        block = run.block_ending_at(block.end_before, 10)


# ---------------------------------------------------------------------------------------------
# directories


@cache
def closed_storage() -> Contents:
    """Return the files of a storage with one log, which was closed."""
    world = sample_log()
    world.close()
    return world.disk.durable_contents()._replace(files=world.disk.files())


@cache
def names() -> tuple[Path, ...]:
    """Return the files of that storage."""
    return tuple(sorted(closed_storage().files))


def changed_files() -> list[bytes]:
    """Return each file of the storage, after a byte with its number."""
    files = closed_storage().files
    return [bytes((number,)) + files[path] for number, path in enumerate(names())]


def sealed_file(data: bytes) -> bytes:
    """Return a file of the storage with the CRCs of its structures."""
    if not data:
        return data
    path, content = names()[data[0] % len(names())], bytearray(data[1:])
    if path.name == "waltz-x.ctl":
        parts = [(at, SLOT_BYTES) for at in (0, SLOT_BLOCK_BYTES)]
    elif path.name == "waltz-storage.ctl":
        parts = [
            (partition_info_offset(index, each), PARTITION_INFO_BYTES)
            for index in range(4)
            for each in (0, 1)
        ]
    elif path.suffix == ".chn":
        return data[:1] + sealed_lineage(bytes(content))
    elif path.suffix == ".seg":
        return data[:1] + sealed_records(content)
    else:
        return data
    for at, size in parts:
        if at + size <= len(content):
            content[at : at + size] = with_crc(bytes(content[at : at + size]))
    return data[:1] + bytes(content)


def sealed_records(content: bytearray) -> bytes:
    """Return a `.seg` file with valid CRCs in all records before the first of impossible size."""
    at = SEGMENT_HEADER_BYTES
    while at + RECORD_OVERHEAD_BYTES <= len(content):
        size = int.from_bytes(content[at + 28 : at + 32], "big", signed=True)
        end = at + RECORD_OVERHEAD_BYTES + size
        if size < 0 or end > len(content):
            break
        start, at = at, end
        data = content[start + RECORD_PREFIX.size : end - 4]
        content[start + 32 : start + 36] = crc32(data).to_bytes(4, "big")
        content[start:end] = with_crc(bytes(content[start:end]))
    return bytes(content)


def sealed_lineage(content: bytes) -> bytes:
    """Return a `.chn` file with the CRCs of its header and entries."""
    if len(content) < LINEAGE_HEADER_BYTES:
        return content
    head = with_crc(content[:LINEAGE_HEADER_BYTES])
    try:
        segment_crc = LineageHeader.decode(head).segment_crc
    except DAMAGED:
        return content
    parts = [head]
    for number, at in enumerate(range(LINEAGE_HEADER_BYTES, len(content), LINEAGE_ENTRY_BYTES)):
        entry = content[at : at + LINEAGE_ENTRY_BYTES]
        is_complete = len(entry) == LINEAGE_ENTRY_BYTES
        parts.append(
            with_crc(entry, _entry_crc_start(segment_crc, number)) if is_complete else entry
        )
    return b"".join(parts)


def open_storage(data: bytes) -> None:
    """Open and read a log, one file of which has other bytes."""
    number = data[0] % len(names()) if data else 0
    disk = SimDisk(is_traced=False)
    disk.replace_contents(closed_storage())
    disk.write_durably(names()[number], data[1:])
    control = ControlFile.open(disk, ROOT, CLUSTER_KEY, 4, NOW_MS)
    try:
        settings = LogSettings(CLUSTER_KEY, 900, lambda: NOW_MS)
        log = PartitionLog.open(disk, ROOT / str(PARTITION), PARTITION, control, settings)
        try:
            read_log(log)
        finally:
            log.close()
    finally:
        control.close()


def read_log(log: PartitionLog) -> None:
    """Read all records, headers and batches of a log; damage is an error."""
    next_id = log.start.transaction_id + 1
    for _ in range(READS_MAX):
        if next_id > log.max_id:
            break
        try:
            read = log.read_range(next_id, log.max_id, READ_BYTES_MAX, whole_batches=False)
        except WaltzError:
            next_id += 1
            continue
        assert read.lengths.size > 0
        next_id += int(read.lengths.size)
    if log.max_id > BEFORE_FIRST:
        try:
            log.lineage(0, log.max_id)
            log.read_headers(0, log.max_id, READ_BYTES_MAX)
        except WaltzError:
            return


@cache
def _verified_directory() -> Path:
    # In memory if possible, because each input writes a file.
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="waltz-fuzz-", dir=parent))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for path, content in closed_storage().files.items():
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    (directory / "waltz-x.id").write_bytes(encode_storage_id(CHAIN))
    return directory


def verify_storage(data: bytes) -> None:
    """Verify a storage's directory, one file of which has other bytes."""
    path = names()[data[0] % len(names()) if data else 0]
    directory = _verified_directory()
    copy = directory / path.relative_to(ROOT)
    copy.write_bytes(data[1:])
    try:
        verify(directory, None, 100)
    finally:
        copy.write_bytes(closed_storage().files[path])


def _structure(name: str, decode, value, seal=None) -> Decoder:
    return Decoder(name, partial(decode_structure, decode), DAMAGED, lambda: [value.encode()], seal)


DECODERS = (
    _structure("control-header", ControlHeader.decode, ControlHeader(NOW_MS, CLUSTER_KEY, 4)),
    _structure("partition-info", PartitionInfo.decode, PartitionInfo(3, 9, 9, 5, 7), with_crc),
    _structure("segment-header", SegmentHeader.decode, SEGMENT),
    _structure("lineage-header", LineageHeader.decode, LineageHeader(SEGMENT, CHAIN), with_crc),
    _structure("wipe-intent", WipeIntent.decode, WipeIntent(PARTITION, True, 5, CHAIN), with_crc),
    Decoder("control-slot", decode_slot, DAMAGED, slots, with_crc),
    Decoder(
        "lineage-entry",
        decode_lineage_entry,
        DAMAGED,
        lambda: [encode_entry(LineageEntry(3, 9, 2, NOW_MS, CHAIN), 2, **BOUND)],
        partial(with_crc, before=_entry_crc_start(BOUND["segment_crc"], BOUND["position"])),
    ),
    Decoder("storage-id", id_of_storage, DAMAGED, lambda: [encode_storage_id(CHAIN)], with_crc),
    Decoder("lock-blocks", read_blocks, (), runs_of_blocks, sealed_block),
    Decoder("storage-files", open_storage, (Damaged,), changed_files, sealed_file, examples=10),
    Decoder(
        "storage-verify", verify_storage, (WaltzError,), changed_files, sealed_file, examples=10
    ),
)
