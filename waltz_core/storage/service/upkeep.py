"""Carries out the errands of administration as calls of the engine.

The daemon runs them on threads and the simulator in virtual time, and both must do the same.
"""

from contextlib import suppress
from functools import partial
from typing import assert_never

from waltz_core.errors import WaltzError
from waltz_core.records.record import BEFORE_FIRST, PartitionId
from waltz_core.storage.files.format import FLAG_ASSIGNED, FLAG_AVAILABLE
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service import errands
from waltz_core.storage.service.engine import Engine
from waltz_core.storage.service.errands import (
    DiskRoom,
    HeldPartition,
    LogFacts,
    ReplicaChange,
    ReplicaStatus,
)


def partition_of(change: ReplicaChange) -> PartitionId:
    """Return the partition of a change."""
    if isinstance(change, errands.PutCopy):
        return PartitionId(change.batches.partition_id)
    return change.partition_id


def carry_out(engine: Engine, change: ReplicaChange) -> object:
    """Change a partition that is not in use, durably; blocks. Its log is open again afterwards.

    On a full disk the reserve has room for this, except for a copy. Raises the engine's errors;
    the change may then have been begun.
    """
    if isinstance(change, errands.PutCopy):
        return engine.put_copy(change.batches)
    engine.room.with_reserve(partial(_carry_out, engine, change))
    if change.partition_id in engine.assigned():
        # The change is durable; `failed` has the reason why the log does not open.
        with suppress(WaltzError):
            engine.room.with_reserve(partial(engine.assign, change.partition_id))
    return None


def _carry_out(
    engine: Engine,
    change: errands.Assign
    | errands.Unassign
    | errands.SetAvailability
    | errands.MarkReplicaSuspect
    | errands.Reseed,
) -> None:
    match change:
        case errands.Assign():
            engine.assign(change.partition_id)
        case errands.Unassign():
            engine.unassign(change.partition_id, deletes_files=change.deletes_files)
        case errands.SetAvailability():
            engine.set_available(change.partition_id, is_available=change.is_available)
        case errands.MarkReplicaSuspect():
            engine.mark_suspect(change.partition_id)
        case errands.Reseed():
            engine.re_seed(change.partition_id)
        case _:
            assert_never(change)


def held_by(engine: Engine) -> tuple[HeldPartition, ...]:
    """Return all partitions that are held."""
    found = []
    for partition_id in engine.assigned():
        log = engine.logs.get(partition_id)
        synced_max = BEFORE_FIRST if log is None else log.synced_max
        is_available = engine.is_available(partition_id)
        found.append(
            HeldPartition(partition_id, engine.info(partition_id), synced_max, is_available)
        )
    return tuple(found)


def room_of(engine: Engine, clock_ms: int) -> DiskRoom:
    """Return the room on the disk, with the given time."""
    room = engine.room
    facts = DiskRoom(None, room.reserved_bytes, room.is_short, clock_ms)
    try:
        return facts._replace(free_bytes=room.free_bytes(), size_bytes=room.size_bytes())
    except WaltzError as error:
        return facts._replace(disk_error=str(error))


def facts_of(engine: Engine, partition_id: PartitionId, *, is_served: bool) -> ReplicaStatus:
    """Return the state of a replica; raises UnknownPartition if the cluster has none such."""
    info = engine.info(partition_id)
    log, error = engine.logs.get(partition_id), engine.failed.get(partition_id)
    why_not = "its log is not open" if error is None else str(error)
    return ReplicaStatus(
        is_held=bool(info.flags & FLAG_ASSIGNED),
        is_available=bool(info.flags & FLAG_AVAILABLE),
        is_served=is_served,
        info=info,
        log=None if log is None else _facts_of(log),
        why_not=why_not if log is None else "",
    )


def _facts_of(log: PartitionLog) -> LogFacts:
    # NB: another thread may append meanwhile: the facts of a served log are a snapshot, and nothing
    # may be read from its files.
    synced_max, chain = log.synced_end
    return LogFacts(
        is_suspect=log.suspect,
        promised=log.promised,
        last_session=log.last_session,
        low_water_mark=log.confirmed_low_water_mark,
        synced_max=synced_max,
        chain=chain,
        damaged=log.damaged,
    )
