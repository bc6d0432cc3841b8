"""Executes the tasks of administration as calls of the engine.

The daemon runs this code on threads, and the simulator runs it in virtual time, so that both do the
same.
"""

from contextlib import suppress
from functools import partial
from typing import assert_never

from waltz_core.errors import WaltzError
from waltz_core.records.record import BEFORE_FIRST, PartitionId
from waltz_core.storage.files.format import FLAG_ASSIGNED, FLAG_AVAILABLE
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service import admin_tasks
from waltz_core.storage.service.admin_tasks import (
    DiskStatus,
    HeldPartition,
    LogStatus,
    ReplicaChange,
    ReplicaStatus,
)
from waltz_core.storage.service.storage_engine import StorageEngine


def partition_of(change: ReplicaChange) -> PartitionId:
    """Return the partition that a change concerns."""
    if isinstance(change, admin_tasks.PutCopy):
        return PartitionId(change.batches.partition_id)
    return change.partition_id


def execute_change(engine: StorageEngine, change: ReplicaChange) -> object:
    """Execute a change of a partition that is not in use, durably; open its log again (blocking).

    On a full disk, the reserve has enough space for any change except a copy. Raises the errors of
    the engine. After an error, the change may have begun.
    """
    if isinstance(change, admin_tasks.PutCopy):
        return engine.append_copy(change.batches)
    engine.space.call_with_reserve(partial(_carry_out, engine, change))
    if change.partition_id in engine.assigned_partitions():
        # The change is durable. If the log cannot be opened, `open_errors` has the reason.
        with suppress(WaltzError):
            engine.space.call_with_reserve(partial(engine.assign, change.partition_id))
    return None


def _carry_out(
    engine: StorageEngine,
    change: admin_tasks.Assign
    | admin_tasks.Unassign
    | admin_tasks.SetAvailableTask
    | admin_tasks.MarkSuspectTask
    | admin_tasks.ReSeedTask,
) -> None:
    match change:
        case admin_tasks.Assign():
            engine.assign(change.partition_id)
        case admin_tasks.Unassign():
            engine.unassign(change.partition_id, deletes_files=change.deletes_files)
        case admin_tasks.SetAvailableTask():
            engine.set_available(change.partition_id, is_available=change.is_available)
        case admin_tasks.MarkSuspectTask():
            engine.mark_suspect(change.partition_id)
        case admin_tasks.ReSeedTask():
            engine.re_seed(change.partition_id)
        case _:
            assert_never(change)


def held_partitions_of(engine: StorageEngine) -> tuple[HeldPartition, ...]:
    """Return all partitions that the storage holds."""
    partitions = []
    for partition_id in engine.assigned_partitions():
        log = engine.logs.get(partition_id)
        synced_max = BEFORE_FIRST if log is None else log.synced_max
        is_available = engine.is_available(partition_id)
        partitions.append(
            HeldPartition(partition_id, engine.info(partition_id), synced_max, is_available)
        )
    return tuple(partitions)


def disk_status_of(engine: StorageEngine, clock_ms: int) -> DiskStatus:
    """Return the state of the disk; `clock_ms` is the present time."""
    space = engine.space
    status = DiskStatus(None, space.reserved_bytes, space.is_full, clock_ms)
    try:
        free_bytes = space.free_bytes()
        return status._replace(
            free_bytes=free_bytes,
            size_bytes=space.size_bytes(),
            filling_bytes_per_day=space.filling_bytes_per_day(free_bytes, clock_ms),
        )
    except WaltzError as error:
        return status._replace(disk_error=str(error))


def replica_status_of(
    engine: StorageEngine, partition_id: PartitionId, *, is_served: bool
) -> ReplicaStatus:
    """Return the state of a replica; raises UnknownPartition if the partition does not exist."""
    info = engine.info(partition_id)
    log, error = engine.logs.get(partition_id), engine.open_errors.get(partition_id)
    reason = "the storage has not opened its log" if error is None else str(error)
    return ReplicaStatus(
        is_held=bool(info.flags & FLAG_ASSIGNED),
        is_available=bool(info.flags & FLAG_AVAILABLE),
        is_served=is_served,
        info=info,
        log=None if log is None else _log_status_of(log),
        reason=reason if log is None else "",
    )


def _log_status_of(log: PartitionLog) -> LogStatus:
    # NB: another thread may append at the same time. So the facts of a served log are a snapshot,
    # and this code must not read the files of the log.
    synced_max, chain = log.synced_end
    return LogStatus(
        is_suspect=log.suspect,
        promised=log.promised,
        last_session=log.last_session,
        low_water_mark=log.confirmed_low_water_mark,
        synced_max=synced_max,
        chain=chain,
        damaged=log.damaged,
    )
