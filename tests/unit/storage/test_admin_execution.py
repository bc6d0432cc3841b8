"""Administration of a storage directory: reports and changes; test_storage_engine.py has others."""

from pathlib import Path

import pytest

from tests.storage_owner import OwnerSession
from tests.unit.storage.test_storage_engine import open_engine
from waltz_core.errors import (
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    DiskFailed,
    NoSpace,
    UnknownPartition,
)
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, NO_SESSION
from waltz_core.storage.files.disk_space import SAMPLE_INTERVAL_MS
from waltz_core.storage.service import admin_execution, admin_tasks
from waltz_core.storage.service.admin_execution import (
    disk_status_of,
    execute_change,
    held_partitions_of,
    replica_status_of,
)
from waltz_core.wire.admin_messages import Copy
from waltz_sim.world.simulated_disk import DiskFault, SimDisk

NONCE = b"a nonce of owner"


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(tmp_path)
    yield engine
    engine.close()


def copy_of(owner, count=3, **changed):
    append = owner.append(count)
    fields = {
        "first": append.first,
        "lengths": append.lengths,
        "records": append.records,
        "records_crc": append.records_crc,
        "chain_before": append.chain_before,
        "lineage": append.lineage,
    }
    return Copy(1, 1, **(fields | changed))


def test_the_replicas_of_a_storage_and_their_states_are_reported(engine):
    assert held_partitions_of(engine) == ()
    absent = replica_status_of(engine, 1, is_served=False)
    assert (absent.is_held, absent.is_available, absent.log) == (False, True, None)
    assert absent.reason == "the storage has not opened its log"
    with pytest.raises(UnknownPartition):
        replica_status_of(engine, 3, is_served=False)
    assert execute_change(engine, admin_tasks.Assign(1)) is None
    ((partition, info, synced_max, is_available),) = held_partitions_of(engine)
    assert (partition, info.flags, synced_max, is_available) == (1, 5, BEFORE_FIRST, True)
    statuses = replica_status_of(engine, 1, is_served=True)
    assert (statuses.is_held, statuses.is_served, statuses.reason) == (True, True, "")
    assert (statuses.log.promised, statuses.log.chain) == (NO_SESSION, GENESIS_CHAIN)


def test_a_disk_status_has_the_time_and_the_free_space(engine):
    room = disk_status_of(engine, 1_234)
    assert (room.reserved_bytes, room.is_full, room.clock_ms) == (0, False, 1_234)
    assert room.free_bytes > 0
    assert room.filling_bytes_per_day is None
    engine.space.note_free_bytes(1_234 - SAMPLE_INTERVAL_MS)
    assert disk_status_of(engine, 1_234).filling_bytes_per_day is not None
    engine.space.note_shortage(1)
    assert disk_status_of(engine, 1_234).is_full


def test_unknown_free_space_does_not_hide_the_other_values(engine, monkeypatch):
    def fail():
        raise DiskFailed("getting the free space of /waltz: input/output error")

    monkeypatch.setattr(engine.space, "free_bytes", fail)
    assert disk_status_of(engine, 1_234) == (
        None,
        0,
        False,
        1_234,
        "getting the free space of /waltz: input/output error",
        None,
        None,
    )


@pytest.mark.parametrize(
    "change",
    [
        admin_tasks.SetAvailableTask(1, False),
        admin_tasks.MarkSuspectTask(1),
        admin_tasks.ReSeedTask(1),
    ],
    ids=str,
)
def test_the_log_is_open_again_after_a_change(engine, change):
    execute_change(engine, admin_tasks.Assign(1))
    before = engine.log(1)
    execute_change(engine, change)
    assert engine.log(1) is not before
    statuses = replica_status_of(engine, 1, is_served=False)
    assert statuses.is_available == (not isinstance(change, admin_tasks.SetAvailableTask))
    assert statuses.log.is_suspect == (not isinstance(change, admin_tasks.SetAvailableTask))


def test_an_abandoned_partition_stays_closed(engine):
    execute_change(engine, admin_tasks.Assign(1))
    execute_change(engine, admin_tasks.Unassign(1, deletes_files=True))
    assert held_partitions_of(engine) == ()
    with pytest.raises(UnknownPartition):
        engine.log(1)


def test_a_log_that_does_not_open_after_a_change_states_the_reason(engine, monkeypatch):
    execute_change(engine, admin_tasks.Assign(1))

    def raise_bad_format(*_arguments, **_options):
        raise BadFormat("rotten")

    monkeypatch.setattr(
        "waltz_core.storage.service.storage_engine.PartitionLog.open", raise_bad_format
    )
    execute_change(engine, admin_tasks.MarkSuspectTask(1))  # still succeeds
    assert replica_status_of(engine, 1, is_served=False).reason == "rotten"


def test_copied_records_are_appended_and_set_no_mark(engine):
    execute_change(engine, admin_tasks.Assign(1))
    owner = OwnerSession(5, 1)
    assert execute_change(engine, admin_tasks.PutCopy(copy_of(owner))) == 2
    assert execute_change(engine, admin_tasks.PutCopy(copy_of(owner))) == 5
    log = engine.log(1)
    assert (log.synced_max, log.chain, log.last_session) == (5, owner.chain, NO_SESSION)
    assert (log.low_water_mark, log.promised) == (BEFORE_FIRST, NO_SESSION)
    lengths = log.read_range(0, 5, 1 << 20, whole_batches=True).lengths
    assert raw_records.lengths_to_wire(lengths) == 2 * copy_of(OwnerSession(5, 1)).lengths


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"first": 7}, BadRequest),
        ({"chain_before": bytes(15) + b"\1"}, BadRequest),
        ({"records_crc": 1}, ChecksumMismatch),
        ({"lineage": ()}, BadRequest),
    ],
)
def test_a_copy_of_another_log_changes_nothing(engine, changed, error):
    execute_change(engine, admin_tasks.Assign(1))
    with pytest.raises(error):
        execute_change(engine, admin_tasks.PutCopy(copy_of(OwnerSession(5, 1), **changed)))
    assert engine.log(1).max_id == BEFORE_FIRST
    assert execute_change(engine, admin_tasks.PutCopy(copy_of(OwnerSession(5, 1)))) == 2


def full_engine():
    """Return an engine with a reserve and no other free space, and its disk."""
    disk = SimDisk(capacity_bytes=1 << 20)
    engine = open_engine(Path("/waltz"), disk=disk, reserve_bytes=16_384)
    execute_change(engine, admin_tasks.Assign(1))
    disk.capacity_bytes = (1 << 20) - disk.free_bytes(Path("/waltz"))
    return engine, disk


def test_the_state_of_a_replica_is_reported_without_reading_its_files():
    """The event loop calls the function: a hanging disk must not block it."""
    engine, disk = full_engine()
    disk.capacity_bytes += 1 << 16
    owner = OwnerSession(5, 1)
    execute_change(engine, admin_tasks.PutCopy(copy_of(owner)))
    reads_count = disk.read_count
    statuses = replica_status_of(engine, 1, is_served=False)
    assert (statuses.log.synced_max, statuses.log.chain) == (2, owner.chain)
    assert disk.read_count == reads_count


@pytest.mark.parametrize("is_found", [True, False])
def test_a_copy_without_space_does_not_use_the_reserve(is_found):
    """The shortage is detected before the write or during it."""
    engine, disk = full_engine()
    copy, size = copy_of(OwnerSession(5, 1)), 3 * 44 + 3 * 8 + 64
    disk.capacity_bytes += size - is_found
    if not is_found:
        disk.plan_fault_at_call(("write",), DiskFault.DISK_FULL)
    error = f"full: an append and the reserve need {size} bytes" if is_found else "."
    with pytest.raises(NoSpace, match=error):
        execute_change(engine, admin_tasks.PutCopy(copy))
    assert (engine.log(1).max_id, engine.space.reserved_bytes) == (BEFORE_FIRST, 16_384)
    assert engine.space.is_full
    disk.capacity_bytes += is_found
    assert execute_change(engine, admin_tasks.PutCopy(copy)) == 2
    assert engine.space.reserved_bytes == 16_384


def test_other_changes_may_use_the_reserve():
    engine, _ = full_engine()
    execute_change(engine, admin_tasks.ReSeedTask(1))
    assert engine.space.reserved_bytes == 0
    assert engine.log(1).suspect


def test_a_copy_does_not_confirm_an_unconfirmed_mark(engine):
    execute_change(engine, admin_tasks.Assign(1))
    log = engine.log(1)
    log.prepare(4, NONCE)
    log.set_low_water_mark(4, BEFORE_FIRST, GENESIS_CHAIN)
    with pytest.raises(BadRequest, match="the provisional low-water mark"):
        execute_change(engine, admin_tasks.PutCopy(copy_of(OwnerSession(5, 1))))
    assert log.slot.provisional is not None


def test_partition_of_finds_the_partition_in_each_admin_task():
    assert admin_execution.partition_of(admin_tasks.Assign(2)) == 2
    assert admin_execution.partition_of(admin_tasks.PutCopy(copy_of(OwnerSession(5, 1)))) == 1
