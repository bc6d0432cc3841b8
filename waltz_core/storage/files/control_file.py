"""The state of a storage outside its logs: the 0.13 control file, and slots of partitions.

Both the control file and a slot file contain two copies of each state. The newer valid copy is the
*current* copy. If a crash interrupts the write of one copy, the other copy stays valid.

Rules:
    1. A write never overwrites the current copy. It writes the other copy and syncs it. From then
       on, the written copy is the current copy.
    2. While the storage runs, it holds an exclusive lock on bytes 0..127 of `waltz-storage.ctl`.
       Waltz 0.13 uses the same lock (docs/design/disk-format.md 2).
    3. Partitions share no state in the control file, so several threads may write the state of
       different partitions at the same time. The threads share syncs: a sync serves all threads
       whose write was complete when the sync began. If a sync fails, these threads and all later
       threads receive the error. The reason: the system reports a failed sync only once, but the
       lost bytes may contain the sessions of many partitions.
    4. If only one slot of a partition is valid, it may be the older slot, and a promise may be
       lost. So the caller is notified (`has_lost_newer_slot`). A slot with an even sequence belongs
       in block 1, and a slot with an odd sequence in block 0. A slot in the wrong block, or of
       another partition, is invalid.
    5. The control file is created only in a directory without partitions. The control file states
       which partitions the storage holds, and their sessions and marks. If a new file replaced a
       missing control file, this state would be lost.
    6. Bytes that an earlier process has written may be readable, but not durable. If a sync of that
       process failed, another sync would succeed and do nothing. So the same bytes are written
       again and synced before they are trusted.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from waltz_core.errors import (
    BadFormat,
    ChecksumMismatch,
    ClusterKeyMismatch,
    DiskFailed,
    WaltzError,
)
from waltz_core.records.record import PartitionId, SessionId, TransactionId
from waltz_core.storage.disk.file_system import Disk, File, create_durably, overwrite
from waltz_core.storage.files.format import (
    CONTROL_HEADER_BYTES,
    NEW_PARTITION_INFOS,
    PARTITION_INFO_BYTES,
    SLOT_BLOCK_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    ControlHeader,
    PartitionInfo,
    Slot,
    errors_with_path,
    partition_entry_offset,
    partition_info_offset,
)

CONTROL_FILE_NAME: Final = "waltz-storage.ctl"
SLOTS_FILE_NAME: Final = "waltz-x.ctl"
_LOCK_BYTES: Final = 128


class ControlFile:
    """The control file of Waltz 0.13: the cluster, and a few numbers for each partition."""

    def __init__(self, file: File, header: ControlHeader, current: list[int]) -> None:
        self.header = header
        self._file = file
        # For each partition, the index of its current structure: 0 or 1.
        self._current = current
        self._infos = [_read_info(file, index, slot) for index, slot in enumerate(current)]
        self._write_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._written_count = self._synced_count = 0
        self._failure: WaltzError | None = None  # the error of a sync (rule 3)

    @classmethod
    def open(
        cls, disk: Disk, directory: Path, cluster_key: bytes, partition_count: int, now_ms: int
    ) -> "ControlFile":
        """Open the file, or create it, and lock it.

        Raises:
            DiskFailed: another process uses this directory, or the disk failed.
            ClusterKeyMismatch: the directory belongs to another cluster.
            BadFormat: the number of partitions differs; both structures of a partition are wrong;
                or the file is missing or too short although there are partitions (rule 5).
        """
        path = directory / CONTROL_FILE_NAME
        header = ControlHeader(now_ms, cluster_key, partition_count)
        if not disk.exists(path):
            _create(disk, directory, header, found="no file")
        file = _open_locked(disk, path)
        try:
            size_bytes = file.size()
            if size_bytes < CONTROL_HEADER_BYTES:
                # The creation of the file was interrupted, so the file contains no state. Waltz
                # 0.13 also creates such a file again.
                _create(disk, directory, header, found=f"{size_bytes} bytes")
        except BaseException:
            file.close()
            raise
        if size_bytes < CONTROL_HEADER_BYTES:
            file.close()
            file = _open_locked(disk, path)
        try:
            file.pwrite([file.pread(file.size(), 0)], 0)  # rule 6
            file.sync()
            with errors_with_path(path):
                header = ControlHeader.decode(file.pread(CONTROL_HEADER_BYTES, 0))
            _check_header(header, cluster_key, partition_count, path)
            current = [_newer_copy_index(file, index, path) for index in range(partition_count)]
            return cls(file, header, current)
        except BaseException:
            file.close()
            raise

    @property
    def has_failed(self) -> bool:
        """Whether a sync has failed, so that no write succeeds before the next opening (rule 3)."""
        return self._failure is not None

    def info(self, partition_id: PartitionId) -> PartitionInfo:
        """Return the current structure of a partition."""
        return self._infos[partition_id]

    def set_marks(
        self,
        partition_id: PartitionId,
        session_id: SessionId,
        mark: TransactionId,
        local_mark: TransactionId | None = None,
    ) -> PartitionInfo:
        """Write session and low-water mark durably, as Waltz 0.13 does at SET_LOW_WATER_MARK.

        `local_mark` is the end of the log, if it differs from the mark.
        """
        local_low_water_mark = mark if local_mark is None else local_mark
        info = self.info(partition_id)._replace(session_id=session_id, low_water_mark=mark)
        return self._write(partition_id, info._replace(local_low_water_mark=local_low_water_mark))

    def set_flags(self, partition_id: PartitionId, flags: int) -> PartitionInfo:
        """Write the flags of a partition durably."""
        return self._write(partition_id, self.info(partition_id)._replace(flags=flags))

    def set_flags_of(self, partition_ids: Sequence[PartitionId], flags: int) -> None:
        """Write the flags of several partitions durably, with one sync."""
        self._write_all(
            {
                partition_id: self.info(partition_id)._replace(flags=flags)
                for partition_id in partition_ids
            }
        )

    def forget(self, partition_id: PartitionId, flags: int) -> PartitionInfo:
        """Reset the state of a partition durably, and set these flags."""
        return self._write(partition_id, NEW_PARTITION_INFOS[0]._replace(flags=flags))

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def _write(self, partition_id: PartitionId, info: PartitionInfo) -> PartitionInfo:
        self._write_all({partition_id: info})
        return self.info(partition_id)

    def _write_all(self, infos: Mapping[PartitionId, PartitionInfo]) -> None:
        """Write and sync the copies that are not current; then they are current (rule 1)."""
        next_infos = {
            partition_id: info._replace(sequence=self.info(partition_id).sequence + 1)
            for partition_id, info in infos.items()
        }
        with self._write_lock:
            for partition_id, info in next_infos.items():
                position = partition_info_offset(partition_id, 1 - self._current[partition_id])
                self._file.pwrite([info.encode()], position)
            self._written_count += 1
            write_number = self._written_count
        self._sync(write_number)
        for partition_id, info in next_infos.items():
            self._current[partition_id] = 1 - self._current[partition_id]
            self._infos[partition_id] = info

    def _sync(self, number: int) -> None:
        """Make the first `number` writes durable, maybe by another thread's sync (rule 3)."""
        with self._sync_lock:
            if self._failure is not None:
                raise DiskFailed(
                    "the control file cannot be written, because a sync of it has failed "
                    f"before: {self._failure}"
                )
            if self._synced_count >= number:
                return
            with self._write_lock:
                count = self._written_count
            try:
                self._file.sync()
            except WaltzError as error:
                self._failure = error
                raise
            self._synced_count = count


def _open_locked(disk: Disk, path: Path) -> File:
    file = disk.open(path)
    if not file.lock_range(0, _LOCK_BYTES):
        file.close()
        raise DiskFailed(f"cannot lock {path}: another process holds the lock")
    return file


def _create(disk: Disk, directory: Path, header: ControlHeader, *, found: str) -> None:
    """Create the control file durably; raise BadFormat if there is a partition (rule 5)."""
    partitions = [name for name in disk.list(directory) if name.isascii() and name.isdecimal()]
    if partitions:
        raise BadFormat(
            f"{directory / CONTROL_FILE_NAME}: expected at least {CONTROL_HEADER_BYTES} bytes, "
            f"found {found}. The directory has files of partitions {', '.join(partitions)}, so the "
            "storage does not create a new control file: the promised store sessions would be lost"
        )
    create_durably(disk, directory, [(CONTROL_FILE_NAME, _new_content(header))])


def _new_content(header: ControlHeader) -> bytes:
    infos = b"".join(info.encode() for info in NEW_PARTITION_INFOS)
    entries = [
        index.to_bytes(4, "big", signed=True) + infos for index in range(header.partition_count)
    ]
    return header.encode() + b"".join(entries)


def _check_header(
    header: ControlHeader, cluster_key: bytes, partition_count: int, path: Path
) -> None:
    if header.cluster_key != cluster_key:
        raise ClusterKeyMismatch(
            f"{path}: the directory belongs to another cluster: expected cluster key "
            f"{cluster_key.hex()}, found {header.cluster_key.hex()}"
        )
    if header.partition_count != partition_count:
        raise BadFormat(
            f"{path}: expected a partition count of {partition_count}, found "
            f"{header.partition_count}"
        )


def _newer_copy_index(file: File, index: int, path: Path) -> int:
    """Return the index of a partition's current structure (docs/design/disk-format.md 2)."""
    partition_id = int.from_bytes(file.pread(4, partition_entry_offset(index)), "big", signed=True)
    if partition_id != index:
        raise BadFormat(
            f"{path}: expected partition {index} in entry {index}, found {partition_id}"
        )
    sequences: list[tuple[int, int]] = []
    for slot in (0, 1):
        try:
            sequences.append((_read_info(file, index, slot).sequence, slot))
        except (BadFormat, ChecksumMismatch):
            continue
    if not sequences:
        raise BadFormat(f"{path}: both copies of the state of partition {index} are damaged")
    if len(sequences) == 2 and sequences[0][0] == sequences[1][0]:
        raise BadFormat(
            f"{path}: both copies of the state of partition {index} have the same sequence number"
        )
    return max(sequences)[1]


def _read_info(file: File, index: int, slot: int) -> PartitionInfo:
    data = file.pread(PARTITION_INFO_BYTES, partition_info_offset(index, slot))
    return PartitionInfo.decode(data)


# ---------------------------------------------------------------------------------------------
# the slots of a partition


class SlotFile:
    """The two slots of a partition; `slot` is the current slot.

    `slot` is durable after the first write. Before that, it was read from the disk, but may not be
    durable. `older_slot` is the slot that a crash may make current again; None if there is none.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        file: File,
        slot: Slot,
        position: int,
        *,
        older: Slot | None,
    ) -> None:
        assert position in {0, 1}
        self._disk = disk
        self._directory = directory
        self._identity = self._identity_now()
        self.slot = slot
        self.older_slot = older
        self.has_lost_newer_slot = older is None
        self._file = file
        self._position = position

    @classmethod
    def create(cls, disk: Disk, directory: Path, slot: Slot) -> "SlotFile":
        """Create the file with two valid slots, durably, and open it."""
        create_durably(disk, directory, [cls.new_file(slot)])
        return cls.open(disk, directory, slot.partition_id)

    @staticmethod
    def new_file(slot: Slot) -> tuple[str, bytes]:
        """Return the name and the content of a file with two valid slots."""
        assert _block_index(slot.sequence) == 1, "rule 4"
        older = replace(slot, sequence=slot.sequence - 1)
        blocks = [
            block_slot.encode().ljust(SLOT_BLOCK_BYTES, b"\0") for block_slot in (older, slot)
        ]
        return SLOTS_FILE_NAME, b"".join(blocks)

    @classmethod
    def open(cls, disk: Disk, directory: Path, partition_id: PartitionId) -> "SlotFile":
        """Open the file and read the current slot.

        Raises:
            BadFormat: no slot is valid, or the slots belong to another partition.
            ReadFailed: the disk cannot read the slots; the older slot is not used instead.
        """
        path = directory / SLOTS_FILE_NAME
        file = disk.open(path)
        try:
            readable_slots = _readable_slots(file)
        except BaseException:
            file.close()
            raise
        valid_slots = [
            (slot.sequence, position, slot)
            for position, slot in readable_slots
            if slot.partition_id == partition_id and position == _block_index(slot.sequence)
        ]
        if not valid_slots:
            file.close()
            owners = ", ".join(str(slot.partition_id) for _, slot in readable_slots)
            found_text = owners if readable_slots else "no readable slot"
            raise BadFormat(
                f"{path}: neither control slot is valid: expected partition {partition_id}, "
                f"found {found_text}"
            )
        _, position, slot = max(valid_slots, key=lambda candidate: candidate[0])
        older = next(
            (candidate for sequence, _, candidate in valid_slots if sequence < slot.sequence), None
        )
        return cls(disk, directory, file, slot, position, older=older)

    def is_in_place(self) -> bool:
        """Return whether the directory and the file still are the ones that were opened.

        Raises DiskFailed.
        """
        return self._identity_now() == self._identity

    def _identity_now(self) -> tuple[object, object]:
        directory = self._directory
        return self._disk.identity(directory), self._disk.identity(directory / SLOTS_FILE_NAME)

    def write(self, slot: Slot) -> None:
        """Write a slot durably; it is the current slot from now on (rule 1)."""
        slot = replace(slot, sequence=self.slot.sequence + 1)
        position = 1 - self._position
        assert position == _block_index(slot.sequence), "rule 4"
        overwrite(self._file, slot.encode(), SLOT_BLOCK_BYTES * position)
        self._file.sync()
        self.slot, self.older_slot, self._position = slot, self.slot, position

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _readable_slots(file: File) -> list[tuple[int, Slot]]:
    slots: list[tuple[int, Slot]] = []
    for position in range(SLOT_COUNT):
        with suppress(BadFormat, ChecksumMismatch):
            slots.append(
                (position, Slot.decode(file.pread(SLOT_BYTES, SLOT_BLOCK_BYTES * position)))
            )
    return slots


def _block_index(sequence: int) -> int:
    return (sequence + 1) % SLOT_COUNT
