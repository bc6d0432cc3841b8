"""Each request gets one outcome, whatever error the log raises."""

import dataclasses
import zlib
from pathlib import Path

import pytest

from tests.call_counting import record_calls
from tests.storage_owner import OwnerSession
from waltz_core.errors import BadRequest, ChecksumMismatch, NoSpace, ReadFailed
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN
from waltz_core.storage.disk.file_system import RealDisk, RealFile
from waltz_core.storage.files.disk_space import NEW_FILES_BYTES, DiskSpace
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.scrub import ScrubPiece, ScrubResult
from waltz_core.storage.service import work
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import BATCHES_BYTES_MAX, RANGE_BYTES_MAX, LaneRequest, Work
from waltz_core.wire.messages import (
    ENTRIES_MAX,
    Appended,
    LineageRequest,
    LockBlocks,
    LockBlocksRequest,
    RangeBytes,
    RangeForm,
    RangeRaw,
    ReplicaEnd,
    ResetLog,
    SuccessResponse,
    Truncate,
)
from waltz_core.wire.record_locations import LOCATIONS, FileLocation, decode_locations
from waltz_sim.world.simulated_disk import DiskFault, SimDisk

STORAGE_ID = b"the storage's id"


@pytest.fixture
def log(tmp_path):
    settings = LogSettings(b"the cluster key.", 1 << 20, lambda: 0)
    engine = StorageEngine.open(
        RealDisk(), tmp_path, settings, partition_count=1, new_storage_id=STORAGE_ID
    )
    owned_log = engine.assign(0)
    owned_log.prepare(5, bytes(16))
    yield owned_log
    engine.abandon()


def run(log, *messages, **options):
    work = Work(log, tuple(LaneRequest(1, message) for message in messages), STORAGE_ID)
    assert work.partition_id == 0
    return work.run(**options)


def test_a_group_counts_its_appends_and_measures_its_sync(log):
    owner = OwnerSession(5)
    moments = iter((10.0, 10.5))
    result = run(log, owner.append(3), owner.append(2), clock_s=lambda: next(moments))
    assert [type(outcome) for outcome in result.outcomes] == [Appended, Appended]
    assert (result.appended_count, result.appended_bytes) == (5, 5 * 44)
    assert result.sync_s == 0.5
    assert result.failure is None


def test_the_lock_blocks_of_a_group_are_kept_and_reported(log):
    owner = OwnerSession(5)
    group = [
        dataclasses.replace(owner.append(2), locks=b"one "),
        owner.append(),
        dataclasses.replace(owner.append(), locks=b"two "),
    ]
    wrong = dataclasses.replace(owner.append(), locks=b"wrong", records=b"")
    assert isinstance(run(log, *group, wrong).outcomes[-1], ChecksumMismatch)
    ask = LockBlocksRequest(5, 9, 0, 100)
    assert run(log, ask).outcomes == [LockBlocks(5, 9, 0, b"one two ")]
    (short,) = run(log, dataclasses.replace(ask, bytes_max=6)).outcomes
    assert short.blocks == b"e two "
    (none,) = run(log, dataclasses.replace(ask, bytes_max=-1)).outcomes
    assert none.blocks == b""


def test_a_group_without_accepted_appends_is_not_synced(log):
    owner = OwnerSession(5)
    owner.append()
    result = run(log, owner.append(), owner.append())
    assert [type(outcome) for outcome in result.outcomes] == [BadRequest, BadRequest]
    assert result.sync_s is None
    assert result.appended_count == 0


def test_an_append_is_checked_in_one_pass(log, monkeypatch):
    sizes = []

    def counting_crc32(data, value=0):
        sizes.append(len(data))
        return zlib.crc32(data, value)

    append = OwnerSession(5).append(50, b"d" * 500)
    for module in (work, raw_records):
        monkeypatch.setattr(module, "crc32", counting_crc32)
    (outcome,) = run(log, append).outcomes
    assert isinstance(outcome, Appended)
    assert [size for size in sizes if size > 100] == [len(append.records)]


def test_an_append_with_corrupt_bytes_is_rejected(log):
    append = OwnerSession(5).append(3)
    changed = append.records[:50] + b"?" + append.records[51:]
    wrong = dataclasses.replace(append, records=changed)
    (outcome,) = run(log, wrong).outcomes
    assert isinstance(outcome, ChecksumMismatch)
    expected, found = append.records_crc, zlib.crc32(changed)
    assert str(outcome) == (
        f"append from transaction 0 on: expected CRC {expected:08x} over "
        f"132 bytes, found {found:08x}"
    )
    assert log.max_id == BEFORE_FIRST


def test_an_unexpected_message_is_rejected(log):
    (outcome,) = run(log, SuccessResponse(5, 1, 0)).outcomes
    assert isinstance(outcome, BadRequest)


def test_reads_are_always_bounded(log, monkeypatch):
    requests = []
    read = log.read_range
    monkeypatch.setattr(
        log, "read_range", lambda *args, **more: requests.append(args[2]) or read(*args, **more)
    )
    run(log, OwnerSession(5).append(3))
    owner = OwnerSession(5)
    for bytes_max, whole_batches in ((2**31 - 1, False), (2**31 - 1, True), (-5, False)):
        message = owner.make(RangeRaw, 0, 2, bytes_max, RangeForm.WHOLE, whole_batches, False)
        (outcome,) = run(log, message).outcomes
        assert outcome.count >= 1
    assert requests == [RANGE_BYTES_MAX, BATCHES_BYTES_MAX, 1]
    # The lineage of an answer fits into a message even for small records.
    assert BATCHES_BYTES_MAX // 40 <= ENTRIES_MAX


def test_record_locations_are_returned_and_counted_as_read(log):
    owner = OwnerSession(5)
    run(log, owner.append(3))
    (located,) = run(log, owner.make(RangeRaw, 1, 2, 1 << 20, LOCATIONS, False, True)).outcomes
    assert (located.first, located.count, located.form) == (1, 2, LOCATIONS)
    assert decode_locations(located.records, 2 * 44) == (
        FileLocation(0, SEGMENT_HEADER_BYTES + 44, 88),
    )
    assert located.records_crc == zlib.crc32(located.records)
    assert located.lineage[0].last == 2
    result = run(log, owner.make(RangeRaw, 0, 9, -5, LOCATIONS, False, True))
    assert (result.read_count, result.read_bytes) == (1, 44)
    (rejected,) = run(log, owner.make(RangeRaw, 1, 2, 1 << 20, LOCATIONS, False, False)).outcomes
    assert isinstance(rejected, BadRequest)
    (beyond,) = run(log, owner.make(RangeRaw, 3, 9, 1 << 20, LOCATIONS, False, True)).outcomes
    assert beyond.count == 0


@pytest.mark.parametrize(
    "form", [None, RangeForm.WHOLE, RangeForm.HEADERS], ids=["append", "whole", "headers"]
)
def test_the_number_of_calls_does_not_depend_on_the_number_of_records(log, form):
    owner = OwnerSession(5)
    append = owner.append
    run(log, append(3_000), append(100))  # excludes the fixed costs of the first call
    counts = []
    for first, count in ((3_100, 2_000), (5_100, 100)):
        message = append(count)
        if form is not None:
            run(log, message)
            last = first + count - 1
            message = owner.make(RangeRaw, first, last, RANGE_BYTES_MAX, form, False, False)
        with record_calls() as calls:
            (outcome,) = run(log, message).outcomes
        assert getattr(outcome, "count", count) == count
        assert isinstance(outcome, Appended if form is None else RangeBytes)
        counts.append(len(calls))
    assert abs(counts[0] - counts[1]) < 60, counts


@pytest.mark.parametrize("form", [RangeForm.WHOLE, RangeForm.HEADERS], ids=["whole", "headers"])
def test_the_records_of_a_range_are_read_with_one_system_call(log, monkeypatch, form):
    owner = OwnerSession(5)
    run(log, owner.append(500), owner.append(500))
    preads = []
    pread = RealFile.pread

    def recorded_pread(file, size, offset):
        preads.append((file._path.suffix, size))
        return pread(file, size, offset)

    monkeypatch.setattr(RealFile, "pread", recorded_pread)
    message = owner.make(RangeRaw, 3, 997, RANGE_BYTES_MAX, form, False, False)
    (outcome,) = run(log, message).outcomes
    assert outcome.count == 995
    assert [size for suffix, size in preads if suffix == ".seg"] == [995 * 44]


# ---- repeated reads, disk space


def test_a_scrub_piece_returns_the_bytes_read_and_the_next_id(log):
    run(log, OwnerSession(5).append(6))
    result = Work(log, (), STORAGE_ID, piece=ScrubPiece(0, 100)).run()
    assert result.scrub_result == ScrubResult(2, 88)
    assert result.outcomes == []
    result = Work(log, (), STORAGE_ID, piece=ScrubPiece(4, 1_000)).run()
    assert result.scrub_result == ScrubResult(6, 88)


def test_a_failed_read_of_the_scrub_is_reported_and_skipped(log, monkeypatch):
    run(log, OwnerSession(5).append(6))

    def fails(_first, _bytes_max):
        raise ReadFailed("cannot read x.chn: Input/output error")

    monkeypatch.setattr(log, "verify", fails)
    result = Work(log, (), STORAGE_ID, piece=ScrubPiece(0, 100)).run()
    assert result.scrub_result == ScrubResult(6, 0, "cannot read x.chn: Input/output error")
    assert result.failed_reads == ["cannot read x.chn: Input/output error"]
    assert result.failure is None


def test_a_failed_read_is_not_reported_as_a_failed_write(log, monkeypatch):
    run(log, OwnerSession(5).append(6))

    def fails(*_ids):
        raise ReadFailed("cannot read x.chn: Input/output error")

    monkeypatch.setattr(log, "lineage", fails)
    result = run(log, OwnerSession(5).make(LineageRequest, 0, 5))
    assert isinstance(result.outcomes[0], ReadFailed)
    assert result.failure is None
    assert len(result.failed_reads) == 1


def test_a_group_without_space_is_rejected_completely_before_it_is_written(log):
    owner = OwnerSession(5)
    appends = tuple(LaneRequest(1, owner.append(2)) for _ in range(2))
    disk = SimDisk(capacity_bytes=4_096 + 2 * 168 - 1)
    disk.make_directory(Path("/waltz"))
    space = DiskSpace(disk, Path("/waltz"), 4_096)
    space.fill_reserve()
    result = Work(log, appends, STORAGE_ID, space=space).run()
    assert [type(outcome) for outcome in result.outcomes] == [NoSpace, NoSpace]
    assert (log.max_id, result.failure, space.reserved_bytes) == (-1, None, 4_096)
    space.recheck()
    assert space.is_full, "the space is full because of the rejected group"
    disk.capacity_bytes += 1
    space.recheck()
    assert not space.is_full
    result = Work(log, appends, STORAGE_ID, space=space).run()
    assert [type(outcome) for outcome in result.outcomes] == [Appended, Appended]


def test_a_truncation_without_space_is_repeated_with_the_reserve():
    disk = SimDisk()
    settings = LogSettings(b"the cluster key.", 1 << 20, lambda: 0)
    engine = StorageEngine.open(
        disk,
        Path("/waltz"),
        settings,
        partition_count=1,
        new_storage_id=STORAGE_ID,
        reserve_bytes=4_096,
    )
    log, owner = engine.assign(0), OwnerSession(5)
    log.prepare(5, bytes(16))
    (appended,) = run(log, owner.append(4)).outcomes
    assert appended.synced_max == 3
    truncate = LaneRequest(1, owner.make(Truncate, 1, BEFORE_FIRST, GENESIS_CHAIN))
    cuts = disk.step_count + 4  # after the intent: the log is truncated, and then its index
    disk.plan_fault(cuts, DiskFault.DISK_FULL)
    result = Work(log, (truncate,), STORAGE_ID, space=engine.space).run()
    assert isinstance(result.outcomes[0], ReplicaEnd), result.outcomes
    assert (result.outcomes[0].synced_max, result.failure) == (1, None)
    assert (result.has_released_reserve, engine.space.reserved_bytes) == (True, 0)
    assert (log.max_id, log.is_broken, log.slot.truncate) == (1, False, None)
    engine.close()


@pytest.mark.parametrize("reserve_bytes", [2 * NEW_FILES_BYTES, 0])
def test_a_reset_on_a_full_disk_uses_the_reserve_or_changes_nothing(reserve_bytes):
    """A reset must not fail halfway, because the log could not be used until it is reopened."""
    disk = SimDisk()
    settings = LogSettings(b"the cluster key.", 1 << 20, lambda: 0)
    engine = StorageEngine.open(
        disk,
        Path("/waltz"),
        settings,
        partition_count=1,
        new_storage_id=STORAGE_ID,
        reserve_bytes=reserve_bytes,
    )
    log, owner = engine.assign(0), OwnerSession(5)
    log.prepare(5, bytes(16))
    run(log, owner.append(4))
    reset = LaneRequest(1, owner.make(ResetLog, 9, bytes(16)))
    disk.capacity_bytes = sum(map(len, disk.files().values()))
    result = Work(log, (reset,), STORAGE_ID, space=engine.space).run()
    assert (result.failure, log.is_broken, result.has_released_reserve) == (None, False, True)
    if reserve_bytes:
        assert isinstance(result.outcomes[0], ReplicaEnd), result.outcomes
        assert log.max_id == log.start.transaction_id == 9
    else:
        assert isinstance(result.outcomes[0], NoSpace), result.outcomes
        assert log.max_id == 3
    engine.close()
