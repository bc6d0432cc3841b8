"""One storage directory: its identity, its locks, its reserve, and its partitions.

A directory belongs to one process, one cluster and one storage. The engine checks this before it
opens any partition.

Rules:
    1. Locks are acquired first: a BSD lock on `waltz-x.id`, then the lock of Waltz 0.13 on its
       control file.
    2. The storage ID is created with the directory and never changes.
    3. If a partition cannot be opened, the other partitions are still served. `open_errors` has the
       partition with its error.
    4. When the disk is full, there is still space for truncation, repair and slots
       (`disk_space.py`).
    5. Administration changes a partition only while the partition's log is closed; `assign` opens
       it again. A removal that was begun is finished before any log is opened.
    6. If the control file has a greater sequence than the slot states, Waltz 0.13 has written to
       the directory (`format.Slot`). So before this version writes to the control file, it writes
       the new sequence to the slot.
    7. File names are made durable before the content of the files is trusted. The process that has
       created the files may have been killed before it synced their names. One sync covers the
       directories of all partitions.
    8. If the files of an open partition were deleted or replaced, this process does not open the
       partition again until administration has emptied or removed it. The new files may lack a
       promise, which the opened log still has.
    9. If the control file itself was deleted or replaced, the next start does not find what is
       written to the open file. So no partition is emptied, and the process exits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from waltz_core.errors import (
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    DiskFailed,
    MissingSegment,
    NoSpace,
    ReplicaSuspect,
    UnknownPartition,
    WaltzError,
)
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import NO_SESSION, Chain, PartitionId, TransactionId
from waltz_core.storage.disk.file_system import Disk, File, create_durably
from waltz_core.storage.files.control_file import (
    CONTROL_FILE_NAME,
    SLOTS_FILE_NAME,
    ControlFile,
    SlotFile,
)
from waltz_core.storage.files.disk_space import DiskSpace, disk_bytes_of_append
from waltz_core.storage.files.format import (
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    NO_NONCE,
    STORAGE_ID_BYTES,
    PartitionInfo,
    Promise,
    Slot,
    decode_storage_id,
    encode_storage_id,
    errors_with_path,
    segment_name,
)
from waltz_core.storage.log import removal
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.removal import WipeIntent
from waltz_core.wire.admin_messages import Copy

STORAGE_ID_FILE_NAME: Final = "waltz-x.id"
# A function that makes one call for each partition, in sequence or in parallel, and returns when
# all calls have returned.
ForEach: TypeAlias = Callable[[Callable[[PartitionId], None], Sequence[PartitionId]], None]


def call_in_sequence(
    call: Callable[[PartitionId], None], partition_ids: Sequence[PartitionId]
) -> None:
    """Call a function for one partition after the other."""
    for partition_id in partition_ids:
        call(partition_id)


class StorageEngine:
    """An open storage directory. Calls block; each log may be used by one thread at a time."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        control: ControlFile,
        settings: LogSettings,
        id_file: File,
        reserve_bytes: int,
    ) -> None:
        self.directory = directory
        self.space = DiskSpace(disk, directory, reserve_bytes)
        with errors_with_path(directory / STORAGE_ID_FILE_NAME):
            self.storage_id = decode_storage_id(id_file.pread(STORAGE_ID_BYTES, 0))
        self.cluster_key = settings.cluster_key
        self.logs: dict[PartitionId, PartitionLog] = {}
        self.open_errors: dict[PartitionId, WaltzError] = {}
        self._disk = disk
        self._control = control
        self._settings = settings
        self._id_file = id_file
        self._lost_logs: dict[PartitionId, PartitionLog] = {}  # rule 8
        # Partitions whose directories have durable names (rule 7).
        self._durable_names: set[PartitionId] = set()
        self._control_identity = disk.identity(directory / CONTROL_FILE_NAME)

    @classmethod
    def open(  # noqa: PLR0913 - the parts of an open directory
        cls,
        disk: Disk,
        directory: Path,
        settings: LogSettings,
        *,
        partition_count: int,
        new_storage_id: bytes,
        reserve_bytes: int = 0,
        for_each: ForEach = call_in_sequence,
    ) -> "StorageEngine":
        """Open or create a storage directory, and open all partitions that are assigned to it.

        `new_storage_id` is used only if the directory has no storage ID yet. `for_each` opens the
        partitions. They share no state; if they are opened in parallel, they share syncs of the
        disk.

        Raises:
            DiskFailed: another process uses the directory, or the disk failed.
            ClusterKeyMismatch, BadFormat, ChecksumMismatch: the directory is invalid.
        """
        disk.make_directory(directory)
        id_path = directory / STORAGE_ID_FILE_NAME
        if not disk.exists(id_path):
            content = encode_storage_id(new_storage_id)
            create_durably(disk, directory, [(STORAGE_ID_FILE_NAME, content)])
        id_file = disk.open(id_path)
        control: ControlFile | None = None
        try:
            _lock_directory(id_file, id_path)
            control = ControlFile.open(
                disk, directory, settings.cluster_key, partition_count, settings.now_ms()
            )
            names = disk.list(directory)
            disk.sync_directory(directory)  # rule 7
            engine = cls(disk, directory, control, settings, id_file, reserve_bytes)
            engine._durable_names |= {PartitionId(int(name)) for name in names if name.isdecimal()}
            engine.space.fill_reserve()
            engine._finish_removals()
            engine._open_assigned(for_each)
        except BaseException:
            if control is not None:
                control.close()
            id_file.close()
            raise
        return engine

    # ---- partitions

    @property
    def partition_count(self) -> int:
        """The number of partitions in the cluster."""
        return self._control.header.partition_count

    @property
    def has_failed(self) -> bool:
        """Whether no partition can be assigned before a restart (`control_file.py`, rule 3)."""
        return self._control.has_failed

    def assigned_partitions(self) -> Sequence[PartitionId]:
        """Return the partitions that this storage holds, in ascending order."""
        partition_ids = map(PartitionId, range(self.partition_count))
        return [
            partition_id
            for partition_id in partition_ids
            if self._control.info(partition_id).flags & FLAG_ASSIGNED
        ]

    def info(self, partition_id: PartitionId) -> PartitionInfo:
        """Return the entry of a partition in the 0.13 control file.

        Raises:
            UnknownPartition: the cluster has no such partition.
        """
        self.check_exists(partition_id)
        return self._control.info(partition_id)

    def is_held(self, partition_id: PartitionId) -> bool:
        """Whether this storage holds a partition, served or not; False for an invalid ID."""
        is_valid_id = 0 <= partition_id < self.partition_count
        return is_valid_id and bool(self._control.info(partition_id).flags & FLAG_ASSIGNED)

    def is_available(self, partition_id: PartitionId) -> bool:
        """Whether a partition that the storage holds may be served."""
        return bool(self.info(partition_id).flags & FLAG_AVAILABLE)

    def assign(self, partition_id: PartitionId) -> PartitionLog:
        """Begin to hold a partition, durably, and open its log; the call may be repeated.

        Raises:
            UnknownPartition: the cluster has no such partition.
        """
        self.check_exists(partition_id)
        if partition_id in self.logs:
            return self.logs[partition_id]
        self._finish_removal(partition_id)
        flags = self._control.info(partition_id).flags
        if not flags & FLAG_ASSIGNED:
            self._write_flags(partition_id, flags | FLAG_ASSIGNED | FLAG_AVAILABLE)
        return self._open_log(partition_id)

    def assign_new(self, partition_ids: Sequence[PartitionId]) -> None:
        """Begin to hold partitions that were never held, durably, with few syncs for all.

        All other partitions are skipped; `assign` opens the logs afterwards.

        Raises:
            UnknownPartition: the cluster has no such partition.
        """
        new_partitions: list[PartitionId] = []
        for partition_id in partition_ids:
            self.check_exists(partition_id)
            if not self._disk.exists(self._directory_of(partition_id)):
                new_partitions.append(partition_id)
        if new_partitions:
            self._disk.make_directories(
                self.directory, [str(new_partition) for new_partition in new_partitions]
            )
            self._durable_names.update(new_partitions)
            self._control.set_flags_of(new_partitions, FLAG_ASSIGNED | FLAG_AVAILABLE)

    def log(self, partition_id: PartitionId) -> PartitionLog:
        """Return the open log of a partition.

        Raises:
            UnknownPartition: this storage does not hold the partition.
            WaltzError: the log could not be opened; the error states the reason.
        """
        if partition_id in self.open_errors:
            raise self.open_errors[partition_id]
        if partition_id not in self.logs:
            raise UnknownPartition(f"partition {partition_id} is not assigned to this storage")
        return self.logs[partition_id]

    def check_exists(self, partition_id: PartitionId) -> None:
        """Raise UnknownPartition if the cluster has no such partition."""
        if not 0 <= partition_id < self.partition_count:
            raise UnknownPartition(
                f"expected a partition in 0..{self.partition_count - 1}, found {partition_id}"
            )

    def _open_assigned(self, for_each: ForEach) -> None:
        for_each(
            self._try_open,
            [
                partition_id
                for partition_id in self.assigned_partitions()
                if partition_id not in self.open_errors
            ],
        )

    def _try_open(self, partition_id: PartitionId) -> None:
        with suppress(WaltzError):  # The error is in `open_errors`.
            self._open_log(partition_id)

    def stop_serving(self, partition_id: PartitionId, error: WaltzError) -> None:
        """Do not open a partition again, because its files were deleted or replaced (rule 8)."""
        self._lost_logs[partition_id] = self.logs.pop(partition_id)
        self.open_errors[partition_id] = error

    def has_lost_files_of(self, partition_id: PartitionId) -> bool:
        """Whether the files of a partition were deleted or replaced (rule 8)."""
        return partition_id in self._lost_logs

    def check_files(self) -> None:
        """Check that the control file is still the file that was opened (rule 9).

        Raises:
            MissingSegment: the control file or the directory was deleted or replaced.
            DiskFailed: the disk cannot be read.
        """
        path = self.directory / CONTROL_FILE_NAME
        if self._disk.identity(path) != self._control_identity:
            raise MissingSegment(
                f"{path}: the file was deleted or replaced while this process used it, so "
                "that writes to it would be lost at the next start. Hint: restore the "
                "directory, or replace the storage with an empty one (`waltz-core cluster "
                "replace-storage`)."
            )

    @property
    def has_lost_files(self) -> bool:
        """Whether the files of any partition were deleted or replaced (rule 8)."""
        return bool(self._lost_logs)

    def _open_log(self, partition_id: PartitionId) -> PartitionLog:
        if partition_id in self._lost_logs:
            raise self.open_errors[partition_id]
        directory = self._directory_of(partition_id)
        try:
            log = PartitionLog.open(
                self._disk,
                directory,
                partition_id,
                self._control,
                self._settings,
                is_name_durable=partition_id in self._durable_names,
            )
        except WaltzError as error:
            self.open_errors[partition_id] = error
            raise
        self._durable_names.add(partition_id)
        self.logs[partition_id] = log
        self.open_errors.pop(partition_id, None)
        return log

    def segment_path(self, partition_id: PartitionId, first: TransactionId) -> Path:
        """Return the path of the `.seg` file of the segment that begins with an ID."""
        return self._directory_of(partition_id) / segment_name(first, ".seg")

    def _directory_of(self, partition_id: PartitionId) -> Path:
        return self.directory / str(partition_id)

    # ---- administration (rule 5)

    def unassign(self, partition_id: PartitionId, *, deletes_files: bool) -> None:
        """Stop holding a partition, durably; if `deletes_files` is False, its files stay.

        Raises:
            UnknownPartition: this storage does not hold the partition.
            WaltzError: its log cannot be opened, so the partition can only be deleted.
        """
        self._check_held(partition_id)
        if deletes_files:
            self._wipe(WipeIntent(partition_id, is_held=False, promised=NO_SESSION, nonce=NO_NONCE))
        else:
            self._write_next_sequence(partition_id)
            self._control.forget(partition_id, FLAG_AVAILABLE)
        self.open_errors.pop(partition_id, None)

    def set_available(self, partition_id: PartitionId, *, is_available: bool) -> None:
        """Set durably whether a partition may be served; the call may be repeated.

        Raises:
            UnknownPartition, WaltzError: as for `unassign`.
        """
        self._check_held(partition_id)
        flags = self._control.info(partition_id).flags
        if bool(flags & FLAG_AVAILABLE) != is_available:
            self._write_flags(partition_id, flags ^ FLAG_AVAILABLE)

    def mark_suspect(self, partition_id: PartitionId) -> None:
        """Mark a replica as suspect, durably; the call may be repeated.

        Raises:
            UnknownPartition: this storage does not hold the partition.
        """
        self._check_held(partition_id)
        self._close_log(partition_id)
        slots = self._open_slots(partition_id)
        try:
            if not slots.has_lost_newer_slot:  # Otherwise, the next opening marks the replica.
                slots.write(replace(slots.slot, suspect=True))
        finally:
            slots.close()

    def re_seed(self, partition_id: PartitionId) -> None:
        """Delete the log of a replica, durably; the replica is empty and suspect from now on.

        Raises:
            UnknownPartition: this storage does not hold the partition.
            MissingSegment: the control file was deleted or replaced (rule 9).
        """
        self.check_files()
        self._check_held(partition_id)
        promise = self._promise(partition_id)
        self._wipe(
            WipeIntent(partition_id, is_held=True, promised=promise.session_id, nonce=promise.nonce)
        )
        self.open_errors.pop(partition_id, None)

    def append_copy(self, copy: Copy) -> TransactionId:
        """Append complete batches of another replica to an unserved log; return the last ID.

        The method truncates nothing and sets no mark, so the replica still shows which records it
        has acknowledged. It does not use the reserve (`disk_space.py`, rule 2).

        Raises:
            NoSpace: there is not enough space without the reserve; no record was written.
            BadRequest: the batches do not continue the log.
            ChecksumMismatch: the received records differ from those that were sent.
        """
        assign = partial(self.assign, PartitionId(copy.partition_id))
        log = self.space.call_with_reserve(assign)
        provisional = log.slot.provisional
        if provisional is not None and provisional.session_id == log.promised:
            raise BadRequest(  # An append would confirm a mark that may be wrong.
                f"partition {copy.partition_id}: cannot receive a copy, because the replica "
                f"has the provisional low-water mark {provisional.low_water_mark} of session "
                f"{provisional.session_id}"
            )
        lengths = raw_records.lengths_from_wire(copy.lengths, len(copy.records))
        found_crc = crc32(copy.records)
        if found_crc != copy.records_crc:
            raise ChecksumMismatch(
                f"copied records from ID {copy.first}: expected CRC {copy.records_crc:08x}, "
                f"found {found_crc:08x}"
            )
        size = disk_bytes_of_append(len(copy.records), int(lengths.size), len(copy.lineage))
        self.space.check_append(size)
        try:
            log.append(
                log.promised,
                TransactionId(copy.first),
                lengths,
                copy.records,
                Chain(copy.chain_before),
                copy.lineage,
                records_crc=found_crc,
            )
        except NoSpace:
            self.space.note_shortage(size)
            raise
        return log.sync()

    def _check_held(self, partition_id: PartitionId) -> None:
        self.check_exists(partition_id)
        self._finish_removal(partition_id)
        if not self._control.info(partition_id).flags & FLAG_ASSIGNED:
            raise UnknownPartition(f"partition {partition_id} is not assigned to this storage")

    def _close_log(self, partition_id: PartitionId) -> None:
        log = self.logs.get(partition_id)
        if log is None:
            return
        try:
            log.check_files()
        except MissingSegment as error:
            self.stop_serving(
                partition_id, error
            )  # Rule 8: the next opening would use the new files.
            raise
        del self.logs[partition_id]
        log.close()

    def _open_slots(self, partition_id: PartitionId) -> SlotFile:
        return SlotFile.open(self._disk, self._directory_of(partition_id), partition_id)

    def _write_flags(self, partition_id: PartitionId, flags: int) -> None:
        self._write_next_sequence(partition_id)
        self._control.set_flags(partition_id, flags)

    def _write_next_sequence(self, partition_id: PartitionId) -> None:
        """Write the next sequence of the control file into the slot (rule 6)."""
        if partition_id in self.open_errors:
            self._open_log(partition_id)  # It may open now; otherwise this raises.
        self._close_log(partition_id)
        if not self._disk.exists(self._directory_of(partition_id) / SLOTS_FILE_NAME):
            return  # never held: the slot will be created with the current sequence
        slots = self._open_slots(partition_id)
        try:
            if slots.has_lost_newer_slot:
                raise ReplicaSuspect(
                    f"partition {partition_id}: expected 2 valid control slots, found 1. "
                    "Hint: take the partition online first (`storage availability`); it then "
                    "rejects all store sessions that the lost slot may have promised."
                )
            sequence = self._control.info(partition_id).sequence + 1
            slots.write(replace(slots.slot, control_file_sequence=sequence))
        finally:
            slots.close()

    def _promise(self, partition_id: PartitionId) -> Promise:
        """Return a replica's promise; if it may be lost, a new one (`log_recovery.py`, rule 5)."""
        last_seen_session = self._control.info(partition_id).session_id
        log = self.logs.get(partition_id) or self._lost_logs.get(partition_id)
        if log is not None:
            return log.slot.promise
        slot, has_lost_newer_slot = Slot(partition_id), True
        if self._disk.exists(self._directory_of(partition_id) / SLOTS_FILE_NAME):
            with suppress(BadFormat):
                slots = self._open_slots(partition_id)
                slot, has_lost_newer_slot = slots.slot, slots.has_lost_newer_slot
                slots.close()
        if has_lost_newer_slot:
            return Promise.after_loss(max(slot.promised, last_seen_session))
        return slot.promise.at_least(last_seen_session)

    def _wipe(self, intent: WipeIntent) -> None:
        log = self.logs.pop(intent.partition_id, None) or self._lost_logs.get(intent.partition_id)
        if log is not None:
            log.abandon()
        directory = self._directory_of(intent.partition_id)
        self._disk.make_directory(directory)  # it may have been deleted
        removal.wipe(self._disk, directory, self._control, intent)
        self._lost_logs.pop(intent.partition_id, None)

    def _finish_removal(self, partition_id: PartitionId) -> None:
        """Finish a removal that was begun; skip directories of unknown partitions."""
        if not 0 <= partition_id < self.partition_count:
            return
        directory = self._directory_of(partition_id)
        removal.finish_removal(self._disk, directory, self._control, partition_id)

    def _finish_removals(self) -> None:
        names = [name for name in self._disk.list(self.directory) if name.isdecimal()]
        for partition_id in map(PartitionId, sorted(map(int, names))):
            try:
                self._finish_removal(partition_id)
            except WaltzError as error:
                self.open_errors[partition_id] = error

    # ---- counters

    @property
    def appended_bytes(self) -> int:
        """The bytes of records that were appended since the start."""
        return sum(log.appended_bytes for log in self.logs.values())

    @property
    def sync_count(self) -> int:
        """The number of syncs of logs since the start."""
        return sum(log.sync_count for log in self.logs.values())

    @property
    def read_count(self) -> int:
        """The number of ranges that were read since the start."""
        return sum(log.read_count for log in self.logs.values())

    # ---- the end

    def close(self) -> None:
        """Close all logs cleanly and release the locks; raise the first error at the end."""
        errors: list[WaltzError] = []
        for log in self.logs.values():
            try:
                log.close()
            except WaltzError as error:
                errors.append(error)
        self._release()
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Close files and release locks without any write, as if the process had crashed."""
        for log in self.logs.values():
            log.abandon()
        self._release()

    def _release(self) -> None:
        for log in self._lost_logs.values():
            log.abandon()
        self.logs.clear()
        self._control.close()
        self._id_file.close()


def _lock_directory(id_file: File, path: Path) -> None:
    if not id_file.lock_whole_file():
        raise DiskFailed(f"{path}: another process uses this storage directory")
