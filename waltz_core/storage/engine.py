"""One storage directory: its identity, its locks, its reserve, and the partitions that live in it.

Why it stands alone: a directory belongs to one process, to one cluster and to one storage, and
that is settled before any partition is touched.

Rules:
    1. Locks come first: a BSD lock on `waltz-x.id`, then the original's lock on its control file.
    2. The storage id is made with the directory and never changes.
    3. A partition that cannot be opened does not keep the others from being served; it is in
       `failed` with its error.
    4. The reserve file holds room for truncation, repair and slots when the disk is full.
    5. Names are durable before anything in the files is believed: who made them may have been
       killed before they were.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from waltz_core.errors import DiskFailed, NoSpace, UnknownPartition, WaltzError
from waltz_core.record import PartitionId
from waltz_core.storage.control_file import ControlFile
from waltz_core.storage.disk import Disk, File, create_durably
from waltz_core.storage.format import (
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    STORAGE_ID_BYTES,
    decode_storage_id,
    encode_storage_id,
    of_file,
)
from waltz_core.storage.partition_log import LogSettings, PartitionLog

STORAGE_ID_NAME: Final = "waltz-x.id"
RESERVE_NAME: Final = "waltz-x.reserve"


class Engine:
    """An open storage directory. Calls block; logs may be used by one thread each."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        control: ControlFile,
        settings: LogSettings,
        id_file: File,
    ) -> None:
        self.directory = directory
        with of_file(directory / STORAGE_ID_NAME):
            self.storage_id = decode_storage_id(id_file.pread(STORAGE_ID_BYTES, 0))
        self.cluster_key = settings.cluster_key
        self.logs: dict[PartitionId, PartitionLog] = {}
        self.failed: dict[PartitionId, WaltzError] = {}
        self._disk = disk
        self._control = control
        self._settings = settings
        self._id_file = id_file

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        settings: LogSettings,
        *,
        partition_count: int,
        new_storage_id: bytes,
        reserve_bytes: int = 0,
    ) -> "Engine":
        """Open or create a storage directory and all partitions that are assigned to it.

        `new_storage_id` is used only when the directory has none yet.

        Raises:
            DiskFailed: another process has the directory, or the disk failed.
            ClusterKeyMismatch, BadFormat, ChecksumMismatch: it is not what it should be.
        """
        disk.make_directory(directory)
        id_path = directory / STORAGE_ID_NAME
        if not disk.exists(id_path):
            content = encode_storage_id(new_storage_id)
            create_durably(disk, directory, [(STORAGE_ID_NAME, content)])
        id_file = disk.open(id_path)
        control: ControlFile | None = None
        try:
            _lock(id_file, id_path)
            control = ControlFile.open(
                disk, directory, settings.cluster_key, partition_count, settings.now_ms()
            )
            disk.sync_directory(directory)  # rule 5
            engine = cls(disk, directory, control, settings, id_file)
            engine._fill_reserve(reserve_bytes)
            engine._open_assigned()
        except BaseException:
            if control is not None:
                control.close()
            id_file.close()
            raise
        return engine

    # ---- partitions

    @property
    def partition_count(self) -> int:
        """How many partitions the cluster has."""
        return self._control.header.partition_count

    def assigned(self) -> Sequence[PartitionId]:
        """Return the partitions that this storage holds, in order."""
        every = map(PartitionId, range(self.partition_count))
        return [one for one in every if self._control.info(one).flags & FLAG_ASSIGNED]

    def assign(self, partition_id: PartitionId) -> PartitionLog:
        """Begin to hold a partition, durably, and open its log; again is no error.

        Raises:
            UnknownPartition: the cluster has no such partition.
        """
        if not 0 <= partition_id < self.partition_count:
            raise UnknownPartition(
                f"expected a partition of 0..{self.partition_count - 1}, found {partition_id}"
            )
        if partition_id in self.logs:
            return self.logs[partition_id]
        flags = self._control.info(partition_id).flags
        if not flags & FLAG_ASSIGNED:
            self._control.set_flags(partition_id, flags | FLAG_ASSIGNED | FLAG_AVAILABLE)
        return self._open_log(partition_id)

    def log(self, partition_id: PartitionId) -> PartitionLog:
        """Return the log of a partition.

        Raises:
            UnknownPartition: it is not held here.
            WaltzError: it could not be opened, and why.
        """
        if partition_id in self.failed:
            raise self.failed[partition_id]
        if partition_id not in self.logs:
            raise UnknownPartition(f"partition {partition_id} is not assigned to this storage")
        return self.logs[partition_id]

    def _open_assigned(self) -> None:
        for partition_id in self.assigned():
            try:
                self._open_log(partition_id)
            except WaltzError as error:
                self.failed[partition_id] = error

    def _open_log(self, partition_id: PartitionId) -> PartitionLog:
        directory = self.directory / str(partition_id)
        log = PartitionLog.open(self._disk, directory, partition_id, self._control, self._settings)
        self.logs[partition_id] = log
        self.failed.pop(partition_id, None)
        return log

    # ---- room (rule 4)

    def _fill_reserve(self, reserve_bytes: int) -> None:
        path = self.directory / RESERVE_NAME
        if not reserve_bytes:
            return
        file = self._disk.open(path, create=True)
        try:
            file.allocate(reserve_bytes)
            file.sync()
        except NoSpace:
            # There is none to reserve; appends will be refused, reads go on.
            file.truncate(0)
        finally:
            file.close()

    def release_reserve(self) -> None:
        """Give the reserved room back to the disk, for a truncation or a repair.

        A disk that fails at that loses nothing: whoever needed the room is told that there is none.
        """
        with suppress(DiskFailed, NoSpace):
            self._disk.unlink(self.directory / RESERVE_NAME)
            self._disk.sync_directory(self.directory)

    def refill_reserve(self, reserve_bytes: int) -> None:
        """Reserve room again, as far as there is any."""
        self._fill_reserve(reserve_bytes)

    # ---- counters

    @property
    def appended_bytes(self) -> int:
        """Bytes of records appended since the start."""
        return sum(log.appended_bytes for log in self.logs.values())

    @property
    def sync_count(self) -> int:
        """Syncs of files since the start."""
        return sum(log.sync_count for log in self.logs.values())

    @property
    def read_count(self) -> int:
        """Ranges read since the start."""
        return sum(log.read_count for log in self.logs.values())

    # ---- the end

    def close(self) -> None:
        """Close all logs cleanly and give up the locks; the first error is raised at the end."""
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
        """Give up files and locks as a crash would; nothing is written."""
        for log in self.logs.values():
            log.abandon()
        self._release()

    def _release(self) -> None:
        self.logs.clear()
        self._control.close()
        self._id_file.close()


def _lock(id_file: File, path: Path) -> None:
    if not id_file.lock_whole():
        raise DiskFailed(f"{path}: another process has this storage directory")
