"""Removes a partition's files, in an order that is safe against crashes.

Only this code deletes acknowledged data on purpose. `admin.py` decides whether the removal is
allowed. A removal cannot be undone.

The steps, in this order; each step is durable before the next step:
    - write the intent (`waltz-x.wipe`)
    - clear the partition in the control file
    - delete the files of the log, the newest first
    - clear the slots
    - delete the intent

Rules:
    1. Before the intent is durable, nothing has changed. Once it is durable, the removal is carried
       out. If the process dies, the next opening of the directory carries it out.
    2. Each step may be repeated: an interrupted removal starts again from its intent.
    3. If a storage still holds a replica after its log was deleted, this replica is suspect, has no
       mark, and keeps its promise. So an owner never treats this replica as new, and never assumes
       that it still has the data that it has acknowledged.
    4. Only the files of a log are removed; other files in the directory are not touched.
"""

from pathlib import Path
from typing import Final, NamedTuple

from waltz_core.errors import BadFormat
from waltz_core.records.byte_layout import ByteLayout, Field
from waltz_core.records.record import NO_SESSION, PartitionId, SessionId
from waltz_core.storage.disk.file_system import TEMPORARY_SUFFIX, Disk, create_durably
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME, ControlFile, SlotFile
from waltz_core.storage.files.format import (
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    VERSION,
    Bytes,
    Slot,
    check_version,
    checked_body,
    with_crc,
)
from waltz_core.storage.files.lock_block_file import LOCKS_FILE_NAME, OLDER_LOCKS_FILE_NAME

WIPE_FILE_NAME: Final = "waltz-x.wipe"
_LOG_FILE_SUFFIXES: Final = (
    ".seg",
    ".idx",
    ".chn",
    LOCKS_FILE_NAME,
    OLDER_LOCKS_FILE_NAME,
    TEMPORARY_SUFFIX,
)

WIPE_LAYOUT: Final = ByteLayout(
    Field("version", "i", "0"),
    Field("partition", "i"),
    Field("replica is kept", "i", "1: the replica starts empty and suspect; 0: it is removed"),
    Field("promised session ID", "q"),
    Field("nonce of the promise", "16s"),
    has_crc=True,
)
_WIPE_STRUCT = WIPE_LAYOUT.struct
WIPE_BYTES: Final = WIPE_LAYOUT.size_bytes


class WipeIntent(NamedTuple):
    """The intent to remove a partition's files.

    If `is_held`, the partition starts again, empty, with its promise.
    """

    partition_id: PartitionId
    is_held: bool
    promised: SessionId
    nonce: bytes

    def encode(self) -> bytes:
        """Return the 40 bytes of the intent, with a CRC."""
        return with_crc(_WIPE_STRUCT.pack(VERSION, *self))

    @staticmethod
    def decode(data: Bytes) -> "WipeIntent":
        """Decode 40 bytes.

        Raises BadFormat or ChecksumMismatch for another version, a wrong CRC or impossible values.
        """
        body = checked_body(data, WIPE_BYTES, "wipe intent")
        version, partition, is_held, promised, nonce = _WIPE_STRUCT.unpack(body)
        check_version(version, "wipe intent")
        if is_held not in {0, 1} or promised < NO_SESSION:
            raise BadFormat(f"wipe intent: impossible flag {is_held} or session {promised}")
        return WipeIntent(PartitionId(partition), bool(is_held), SessionId(promised), nonce)


def wipe(disk: Disk, directory: Path, control: ControlFile, intent: WipeIntent) -> None:
    """Remove a partition's files and its state; all changes are durable on return.

    The caller must have closed the files. Raises NoSpace, with nothing changed, if the intent
    cannot be written. After DiskFailed, rule 1 applies.
    """
    create_durably(disk, directory, [(WIPE_FILE_NAME, intent.encode())])
    finish_removal(disk, directory, control, intent.partition_id)


def finish_removal(
    disk: Disk, directory: Path, control: ControlFile, partition_id: PartitionId
) -> None:
    """Finish a removal whose intent is durable; do nothing if there is no intent (rule 1).

    Raises:
        BadFormat, ChecksumMismatch: the intent cannot be read.
    """
    path = directory / WIPE_FILE_NAME
    if not disk.exists(path):
        return
    intent = _read(disk, path)
    if intent.partition_id != partition_id:
        raise BadFormat(f"{path}: expected partition {partition_id}, found {intent.partition_id}")
    flags = control.info(partition_id).flags | FLAG_ASSIGNED if intent.is_held else FLAG_AVAILABLE
    cleared_info = control.forget(partition_id, flags)
    for name in reversed(disk.list(directory)):
        if name.endswith(_LOG_FILE_SUFFIXES):
            disk.unlink(directory / name)
    disk.sync_directory(directory)
    if intent.is_held:
        slot = Slot(
            partition_id,
            control_file_sequence=cleared_info.sequence,
            promised=intent.promised,
            nonce=intent.nonce,
            suspect=True,
        )
        SlotFile.create(disk, directory, slot).close()
    else:
        disk.unlink(directory / SLOTS_FILE_NAME)
        disk.sync_directory(directory)
    disk.unlink(path)
    disk.sync_directory(directory)


def _read(disk: Disk, path: Path) -> WipeIntent:
    file = disk.open(path)
    try:
        return WipeIntent.decode(file.pread(WIPE_BYTES, 0))
    finally:
        file.close()
