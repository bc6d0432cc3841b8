"""A storage archives ranges for its owner, one at a time, and removes archived segments."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.storage_owner import NONCE, STAMP_MS, OwnerSession
from tests.unit.storage.test_service import KEY, ServiceWorld, prepare, reports, tick
from waltz_core.archive.garbage_collection import CollectedGarbage, GarbageCollectionJob
from waltz_core.archive.manifest import RecordedManifest
from waltz_core.archive.manifest_jobs import ExpiryJob, ManifestAfterExpiry, NewManifest
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import upload
from waltz_core.errors import ArchiveUnavailable, BadRequest, SessionFenced, error_from_code
from waltz_core.machine import Wakeup
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED
from waltz_core.storage.files.format import AckedMarker, IdRange
from waltz_core.storage.log.archive_pieces import LogSize, RetentionPiece
from waltz_core.storage.service import service, service_effects
from waltz_core.storage.service.archive_jobs import PROGRESS_INTERVAL_MS, STALLED_MS, ArchiveLimits
from waltz_core.storage.service.retention import MEASURE_INTERVAL_MS, Retention, RetentionLimits
from waltz_core.wire import messages
from waltz_core.wire.messages import (
    ArchiveProgress,
    ArchiveRange,
    CollectGarbage,
    ExpireObjects,
    GarbageCollected,
    Nack,
    ObjectsExpired,
    RangeArchived,
    ReplaceObject,
    SetArchived,
    SuccessResponse,
)

OLD = ArchiveLimits(object_bytes=1 << 20, age_ms=0)
# Six records of 140 bytes, the oldest of which is 7 ms old.
LAG = (5, 6 * 140, 7)
MADE = NewManifest(5, GENESIS_CHAIN, 9, "m", 7)


@pytest.fixture
def make(tmp_path):
    worlds = []

    def make_world(**options):
        options = {"archive": OLD} | options
        worlds.append(ServiceWorld(tmp_path / str(len(worlds)), **options))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.engine.abandon()


def range_to(owner, last, *, first=0, chain=GENESIS_CHAIN, attempt=1):
    return owner.make(ArchiveRange, attempt, first, last, chain, "", 0)


def collection_of(owner, *, attempt=3, last=5):
    return owner.make(CollectGarbage, attempt, last, GENESIS_CHAIN, "m", 7)


def fill_log(world, *, batches=3, size=2, session=5):
    """Return an owner that has appended batches, with data of 100 bytes."""
    owner = world.owned(session)
    for _ in range(batches):
        world.ask(1, owner.append(size, b"x" * 100))
    return owner


def request(world, owner, message):
    """Send a request to archive; return the job to upload, if any."""
    world.send(1, message)
    world.finish()
    jobs = world.effects_of(service_effects.UploadRange)
    world.effects = [
        effect for effect in world.effects if not isinstance(effect, service_effects.UploadRange)
    ]
    return jobs[0].job if jobs else None


def notices(world, connection=1):
    return [answer for answer in world.answers(connection) if isinstance(answer, RangeArchived)]


def rejection(world, message, connection=1):
    answer = world.ask(connection, message)
    assert isinstance(answer, Nack), answer
    return error_from_code(answer.error_code, answer.message)


def test_a_range_is_uploaded_and_its_manifest_is_reported(make, tmp_path):
    world = make()
    owner = fill_log(world)
    store = ArchiveStore(f"file://{tmp_path}/archive")
    message = range_to(owner, 5)
    world.log.clock_ms = lambda: STAMP_MS + 7
    job = request(world, owner, message)
    assert isinstance(world.answers(1)[-1], SuccessResponse)
    assert world.answers(1)[-1].sequence == message.sequence
    uploaded = upload(store, KEY, job)
    world.step(service.UploadDone(job, uploaded))
    assert notices(world) == [
        RangeArchived(
            5,
            0,
            0,
            1,
            5,
            owner.chain,
            uploaded.stamp_ms,
            uploaded.name,
            uploaded.file_crc,
            "",
            *LAG,
        )
    ]
    assert reports(world, "storage.range_archived") == [{"partition": 0, "last": 5}]
    (name,) = (each for each in store.list_names("") if each.endswith(".parquet"))
    assert f"0-5-5-{NONCE.hex()}-1" in name
    with store.open(name) as source:
        row_group = ArchiveObject(source, name).read_row_group(0)
    assert (
        bytes(row_group.records) == world.log.read_range(0, 5, 1 << 20, whole_batches=True).records
    )


def test_a_range_ends_with_the_batch_that_fills_an_object(make, monkeypatch):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    world = make(archive=ArchiveLimits(object_bytes=700, age_ms=1 << 60))
    owner = fill_log(world, batches=6)
    job = request(world, owner, range_to(owner, 11))
    assert [len(run.batches) for run in job.runs] == [1, 1, 1]
    assert (job.first, job.end.last, job.record_bytes) == (0, 5, 6 * 140)


def test_other_work_runs_between_the_pieces_of_a_range(make, monkeypatch):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    world = make()
    owner = fill_log(world, batches=6)
    world.send(1, range_to(owner, 11), owner.append(), owner.append())
    order = []
    while world.work_items:
        work = world.work_items.pop(0)
        order.append("piece" if work.piece is not None else "append")
        world.step(service.WorkDone(work, work.run()))
    assert order == ["piece", "append", *["piece"] * 5]


def test_pieces_are_read_at_the_rate_and_a_pause_is_reported_as_progress(make, monkeypatch):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    world = make(archive=ArchiveLimits(object_bytes=1 << 20, age_ms=0, bytes_per_s=10))
    owner = fill_log(world, batches=4)
    began_ms = world.now_ms
    world.send(1, range_to(owner, 7))
    world.finish()
    notified_ms = [began_ms]
    while not (uploads := world.effects_of(service_effects.UploadRange)):
        world.now_ms = world.service.wake_at_ms
        notified = len(progress_of(world))
        world.step(Wakeup())
        notified_ms += [world.now_ms] * (len(progress_of(world)) - notified)
        world.finish()
    assert len(uploads[0].job.runs) == 4
    assert world.now_ms - began_ms == 3 * 280 * 1_000 // 10, "280 bytes each"
    gaps_ms = [later - earlier for earlier, later in pairwise([*notified_ms, world.now_ms])]
    assert max(gaps_ms) < 2 * PROGRESS_INTERVAL_MS


@pytest.mark.parametrize("last", [5, 1 << 40])
def test_an_archived_range_ends_at_the_latest_at_the_end_of_the_synced_log(make, last):
    world = make()
    owner = fill_log(world)
    assert request(world, owner, range_to(owner, last)).end.last == 5


def test_a_range_below_the_minimum_size_and_age_is_not_archived(make):
    age_ms = 1 << 60
    world = make(archive=ArchiveLimits(object_bytes=6 * 140, age_ms=age_ms))
    owner = fill_log(world)
    assert request(world, owner, range_to(owner, 5)) is None
    world.log.clock_ms = lambda: STAMP_MS + 7
    assert request(world, owner, range_to(owner, 5)) is None
    assert notices(world)[1:] == [RangeArchived(5, 0, 0, 1, -1, GENESIS_CHAIN, 0, "", 0, "", *LAG)]
    assert request(world, owner, range_to(owner, 9, first=6, chain=owner.chain)) is None
    assert notices(world)[-1] == RangeArchived(5, 0, 0, 1, 5, owner.chain, 0, "", 0, "")
    world.ask(1, owner.append())
    assert request(world, owner, range_to(owner, 6)).end.last == 6


def test_the_archive_backlog_includes_all_segments(make):
    age_ms = 1 << 60
    world = make(archive=ArchiveLimits(1 << 20, age_ms), segment_bytes_max=600)
    owner = fill_log(world, batches=8)
    assert len(world.log._files.segments.all) > 2
    request(world, owner, range_to(owner, 9, first=2, chain=world.log.chain_at(1)))
    assert (notices(world)[-1].unarchived_last, notices(world)[-1].unarchived_bytes) == (9, 8 * 140)


@pytest.mark.parametrize(("last", "end"), [(0, None), (1, 1), (2, 1), (4, 3)])
def test_a_batch_that_reaches_beyond_the_range_is_not_archived(make, monkeypatch, last, end):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    world = make()
    owner = fill_log(world)
    job = request(world, owner, range_to(owner, last))
    assert (job and job.end.last) == end
    assert [notice.error for notice in notices(world)] == ([""] if end is None else [])


def test_an_archive_job_continues_if_the_clock_is_behind_the_commit_stamps(make, monkeypatch):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 150)
    world = make(archive=ArchiveLimits(object_bytes=400, age_ms=0))
    owner = fill_log(world, size=1)
    monkeypatch.setattr(world.log, "clock_ms", lambda: STAMP_MS - 1)
    job = request(world, owner, range_to(owner, 2))
    assert [len(run.batches) for run in job.runs] == [1, 1, 1]


def test_an_old_batch_of_any_size_is_archived(make):
    ages = [world_age - STAMP_MS for world_age in (STAMP_MS + 1_000, STAMP_MS + 1 << 50)]
    for age_ms, is_archived in zip(ages, (True, False), strict=True):
        world = make(archive=ArchiveLimits(object_bytes=1 << 20, age_ms=age_ms))
        owner = fill_log(world)
        assert (request(world, owner, range_to(owner, 5)) is not None) == is_archived


def test_a_range_with_damage_a_wrong_chain_or_a_reconstructed_batch_is_not_archived(
    make, monkeypatch
):
    world = make()
    owner = fill_log(world)
    request(world, owner, range_to(owner, 5, chain=NONCE))
    assert "expected chain hash " in notices(world)[-1].error
    request(world, owner, range_to(owner, 5, first=1))
    assert "expected a batch that begins at transaction 1" in notices(world)[-1].error
    read_range = world.log.read_range

    def reconstructed(*args, **options):
        read = read_range(*args, **options)
        return read._replace(
            entries=(*read.entries[:-1], read.entries[-1]._replace(session_id=RECONSTRUCTED))
        )

    monkeypatch.setattr(world.log, "read_range", reconstructed)
    request(world, owner, range_to(owner, 5))
    assert "damaged and reconstructed" in notices(world)[-1].error
    monkeypatch.undo()
    world.log._files.write_slot(replace(world.log.slot, damaged=(IdRange(3, 3),)))
    assert request(world, owner, range_to(owner, 5)) is None
    assert "records 3..3 are damaged" in notices(world)[-1].error
    assert len(reports(world, "storage.archive_failed")) == 4


def test_a_failed_upload_is_reported_and_does_not_block_the_next(make):
    world = make()
    owner = fill_log(world)
    job = request(world, owner, range_to(owner, 5))
    world.step(service.UploadDone(job, ArchiveUnavailable("cannot write x")))
    (notice,) = notices(world)
    assert (notice.manifest, notice.error) == ("", "cannot write x")
    assert request(world, owner, range_to(owner, 5, attempt=2)).attempt == 2


def test_archive_requests_are_rejected_from_other_owners_or_without_an_archive(make):
    world = make()
    owner = fill_log(world)
    assert isinstance(rejection(world, range_to(owner, 5), connection=2), SessionFenced)
    assert isinstance(rejection(world, range_to(OwnerSession(4), 5)), SessionFenced)
    assert "found 3..2" in str(rejection(world, range_to(owner, 2, first=3)))
    mark = owner.make(SetArchived, 5, owner.chain, 0, 0, "m")
    assert isinstance(rejection(world, mark, connection=2), SessionFenced)
    assert isinstance(rejection(world, collection_of(owner), connection=2), SessionFenced)
    assert isinstance(rejection(world, collection_of(OwnerSession(4))), SessionFenced)
    other = make(archive=None)
    owner = fill_log(other)
    for message in (range_to(owner, 5), collection_of(owner)):
        found = rejection(other, message)
        assert isinstance(found, BadRequest)
        assert str(found) == "this storage cannot archive, because it has no setting `archive_url`"


def test_one_range_is_read_or_uploaded_at_a_time(make):
    world = make()
    owners = [fill_log(world)]
    for partition_id in (1, 2):
        log = world.engine.assign(partition_id)
        world.step(service.PartitionOpened(log))
        owner = OwnerSession(5, partition_id)
        world.ask(1, prepare(owner))
        world.ask(1, owner.append(2))
        owners.append(owner)
    for owner in owners:
        world.send(1, range_to(owner, 1))
    world.finish()
    order = []
    while jobs := world.effects_of(service_effects.UploadRange)[len(order) :]:
        job = jobs[0].job
        order.append(job.partition_id)
        world.step(service.UploadDone(job, MADE))
        world.finish()
    assert order == [0, 1, 2]
    assert [notice.partition_id for notice in notices(world)] == order


ENDINGS = {
    "disconnect": lambda world: world.step(service.Disconnected(1)),
    "later session": lambda world: world.ask(2, prepare(OwnerSession(6))),
    "later connection": lambda world: world.ask(2, prepare(OwnerSession(5))),
    "drop": lambda world: world.step(service.PartitionDropped(0)),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_uploading", [False, True])
def test_a_job_ends_with_its_session_but_the_next_job_waits_for_the_running_upload(
    make, ending, is_uploading
):
    world = make()
    owner = fill_log(world)
    world.send(1, range_to(owner, 5))
    if is_uploading:
        world.finish()
    ENDINGS[ending](world)
    world.finish()
    uploads = world.effects_of(service_effects.UploadRange)
    assert len(uploads) == is_uploading
    if ending == "drop":
        world.step(service.PartitionOpened(world.log))
    later = OwnerSession(7)
    world.ask(3, prepare(later))
    world.send(3, range_to(later, 5))
    world.finish()
    if is_uploading:
        assert len(world.effects_of(service_effects.UploadRange)) == 1
        world.step(service.UploadDone(uploads[0].job, MADE))
        world.finish()
        assert not notices(world, 1)
    job = world.effects_of(service_effects.UploadRange)[-1].job
    assert job.session_id == 7
    world.step(service.UploadDone(job, MADE))
    assert [notice.session_id for notice in notices(world, 3)] == [7]
    assert not notices(world, 1)
    assert not notices(world, 2)


@pytest.mark.parametrize("is_uploading", [False, True])
def test_a_new_request_replaces_an_earlier_request_for_the_same_partition(make, is_uploading):
    """The owner has abandoned the collection."""
    world = make()
    owner = fill_log(world)
    world.send(1, range_to(owner, 5))
    if is_uploading:
        world.finish()
    world.send(1, range_to(owner, 5, attempt=2))
    world.finish()
    jobs = [effect.job for effect in world.effects_of(service_effects.UploadRange)]
    if is_uploading:
        world.step(service.UploadDone(jobs[0], MADE))
        world.finish()
        jobs = [effect.job for effect in world.effects_of(service_effects.UploadRange)][1:]
    (job,) = jobs
    assert job.attempt == 2
    world.step(service.UploadDone(job, MADE))
    assert [notice.attempt for notice in notices(world)] == [2]


# ---- garbage


def collection_notices(world, connection=1):
    return [answer for answer in world.answers(connection) if isinstance(answer, GarbageCollected)]


OUTCOMES = {
    "some": (CollectedGarbage(3, 700, 1, True), (True, "")),
    "none": (CollectedGarbage(0, 0, 0, False), (False, "")),
    "error": (ArchiveUnavailable("cannot list x"), (False, "cannot list x")),
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_garbage_is_collected_for_the_owner_and_reported(make, kind):
    outcome, expected = OUTCOMES[kind]
    world = make()
    owner = fill_log(world)
    assert isinstance(world.ask(1, collection_of(owner)), SuccessResponse)
    (effect,) = world.effects_of(service_effects.CollectFiles)
    recorded = RecordedManifest(0, 5, GENESIS_CHAIN, "m", 7)
    assert effect.job == GarbageCollectionJob(5, NONCE, 3, recorded)
    world.step(service.FilesCollected(effect.job, outcome))
    assert collection_notices(world) == [GarbageCollected(5, 0, 0, 3, *expected)]
    assert reports(world, "storage.garbage_collected") == (
        [{"partition": 0, "files": 3, "bytes": 700, "unknown_files": 1}] if kind == "some" else []
    )
    assert reports(world, "storage.garbage_collection_failed") == (
        [{"partition": 0, "error": "cannot list x"}] if kind == "error" else []
    )
    assert request(world, owner, range_to(owner, 5)).attempt == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_collection_is_not_reported_to_an_owner_whose_session_has_ended(make, ending):
    world = make()
    owner = fill_log(world)
    world.send(1, collection_of(owner))
    (effect,) = world.effects_of(service_effects.CollectFiles)
    ENDINGS[ending](world)
    world.finish()
    world.step(service.FilesCollected(effect.job, BadRequest("found a later session")))
    assert not [notice for number in (1, 2) for notice in collection_notices(world, number)]
    assert not reports(world, "storage.garbage_collection_failed"), (
        "the later owner collects its own garbage"
    )


def test_a_collection_and_an_upload_wait_for_each_other(make):
    world = make()
    owner = fill_log(world)
    log = world.engine.assign(1)
    world.step(service.PartitionOpened(log))
    second = OwnerSession(5, 1)
    world.ask(1, prepare(second))
    world.ask(1, second.append(2))
    world.send(1, collection_of(owner))
    assert request(world, second, range_to(second, 1)) is None
    (effect,) = world.effects_of(service_effects.CollectFiles)
    world.step(service.FilesCollected(effect.job, CollectedGarbage(0, 0, 0, False)))
    world.finish()
    (upload,) = world.effects_of(service_effects.UploadRange)
    world.send(1, collection_of(owner, attempt=4))
    assert len(world.effects_of(service_effects.CollectFiles)) == 1
    world.step(service.UploadDone(upload.job, MADE))
    assert world.effects_of(service_effects.CollectFiles)[1].job.attempt == 4


# ---- stores that hang


def progress_of(world):
    answers = [answer for answer in world.answers(1) if isinstance(answer, ArchiveProgress)]
    return [(answer.partition_id, answer.attempt) for answer in answers]


def three_jobs(make):
    """Return a world that uploads a range of partition 0; two other partitions wait."""
    world = make()
    owners = [fill_log(world)]
    for partition_id in (1, 2):
        log = world.engine.assign(partition_id)
        world.step(service.PartitionOpened(log))
        owners.append(OwnerSession(5, partition_id))
        world.ask(1, prepare(owners[-1]))
        world.ask(1, owners[-1].append(2))
    for owner in owners:
        world.send(1, range_to(owner, 1))
    world.finish()
    return world, world.effects_of(service_effects.UploadRange)[0].job


def test_the_owners_of_all_jobs_are_notified_of_progress_at_intervals(make):
    world, job = three_jobs(make)
    for _ in range(PROGRESS_INTERVAL_MS // 1_000):
        world.step(service.ArchiveProgressed())
        assert not progress_of(world)
        world.now_ms += 1_000
    world.step(service.ArchiveProgressed())
    world.step(service.ArchiveProgressed())
    assert sorted(progress_of(world)) == [(0, 1), (1, 1), (2, 1)]
    world.now_ms += PROGRESS_INTERVAL_MS
    world.step(service.UploadDone(job, MADE))
    assert sorted(progress_of(world)[3:]) == [(1, 1), (2, 1)], "one job has ended"


def test_a_hanging_upload_is_reported_once_and_the_other_jobs_run_after_it(make):
    world, job = three_jobs(make)
    began_ms = world.now_ms
    assert world.service.archive_running_since_ms == began_ms
    world.now_ms += STALLED_MS // 2
    world.step(service.ArchiveProgressed())
    world.now_ms += STALLED_MS - 1
    world.step(Wakeup())
    assert not reports(world, "storage.archive_stalled")
    notified = len(progress_of(world))
    world.now_ms += 1
    for _ in range(3):
        world.step(Wakeup())
        world.now_ms += STALLED_MS
    assert reports(world, "storage.archive_stalled") == [{"partition": 0, "ms": STALLED_MS}]
    assert len(progress_of(world)) == notified
    world.finish()
    assert len(world.effects_of(service_effects.UploadRange)) == 1, "memory is bounded"
    assert world.service.archive_running_since_ms == began_ms
    world.step(service.UploadDone(job, ArchiveUnavailable("timed out")))
    for partition_id in (1, 2):
        world.finish()
        job = world.effects_of(service_effects.UploadRange)[-1].job
        assert job.partition_id == partition_id
        world.step(service.UploadDone(job, MADE))
    assert [notice.error for notice in notices(world)] == ["timed out", "", ""]
    assert world.service.archive_running_since_ms is None


def test_the_answer_to_prepare_has_the_log_start_if_an_archive_is_configured(make):
    prepared = make().ask(1, prepare(OwnerSession(1)))
    assert (prepared.start, prepared.start_chain) == (-1, GENESIS_CHAIN)
    assert make(archive=None).ask(1, prepare(OwnerSession(1))).start == messages.NO_ARCHIVING


# ---- retention


def world_with_segments(make, **limits):
    """Return a world whose log has four segments of two batches, all confirmed, and its owner."""
    world = make(segment_bytes_max=700, retention=RetentionLimits(**limits))
    fill_log(world, batches=8)
    owner = world.owned(6)
    assert len(world.log._files.segments.all) == 4
    return world, owner


def mark_at(world, owner, last):
    return owner.make(SetArchived, last, world.log.chain_at(last) or GENESIS_CHAIN, 0, 0, "m")


def removed_starts(world):
    return [report["start"] for report in reports(world, "storage.segment_removed")]


def test_segments_over_the_size_limit_are_removed_up_to_the_archived_mark(make):
    world, owner = world_with_segments(make, bytes_max=2_000)
    assert world.log.size_bytes > 4 * 560
    assert isinstance(world.ask(1, mark_at(world, owner, 1)), SuccessResponse)
    world.finish()
    assert removed_starts(world) == [], "the mark is within the oldest segment"
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    assert removed_starts(world) == [5], "no more than needed"
    assert world.log.size_bytes <= 2_000
    assert world.log.start.transaction_id == 5
    assert world.ask(1, owner.append(2)).synced_max == 17


def test_segments_over_the_age_limit_are_removed_but_never_the_newest(make):
    world, owner = world_with_segments(make, age_ms_max=1_000)
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    assert removed_starts(world) == [5, 9, 15]


@pytest.mark.parametrize("limits", [{}, {"bytes_max": 1 << 30, "age_ms_max": 1 << 60}])
def test_segments_within_the_retention_limits_are_not_removed(make, limits):
    world, owner = world_with_segments(make, **limits)
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    assert removed_starts(world) == []
    world.now_ms += MEASURE_INTERVAL_MS
    world.step(Wakeup())
    pieces = []
    while world.work_items:
        work = world.work_items.pop(0)
        pieces.append(work.piece)
        world.step(service.WorkDone(work, work.run()))
    assert any(isinstance(piece, RetentionPiece) for piece in pieces) == bool(limits)
    assert removed_starts(world) == []


def test_an_archived_mark_with_another_chain_is_rejected(make):
    world, owner = world_with_segments(make, bytes_max=1)
    for last in (2, 15, 99):
        found = rejection(world, owner.make(SetArchived, last, NONCE, 0, 0, "m"))
        assert isinstance(found, BadRequest)
        assert f"at transaction {last}, up to which the log is archived; found" in str(found)
    assert removed_starts(world) == []


def test_retention_is_checked_again_with_the_mark_of_a_later_session(make):
    world, owner = world_with_segments(make, bytes_max=2_400)
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    before = removed_starts(world)
    for _ in range(4):
        world.ask(1, owner.append(2, b"x" * 100))
    next_ms = world.now_ms + MEASURE_INTERVAL_MS
    while world.now_ms < next_ms:
        tick(world)
        world.finish()
    assert removed_starts(world)[len(before) :], "appends have exceeded the size limit again"
    later = world.owned(7, 2)
    before = removed_starts(world)
    for _ in range(6):
        world.ask(2, later.append(2, b"x" * 100))
    world.now_ms += 2 * MEASURE_INTERVAL_MS
    tick(world)
    world.finish()
    assert removed_starts(world) == before
    world.ask(2, mark_at(world, later, 15))
    world.finish()
    assert len(removed_starts(world)) > len(before)


def test_retention_first_removes_the_oldest_segments_of_the_largest_log(make):
    world, owner = world_with_segments(make, bytes_max=2_400)
    log = world.engine.assign(1)
    world.step(service.PartitionOpened(log))
    second = OwnerSession(5, 1)
    world.ask(1, prepare(second))
    for _ in range(3):
        world.ask(1, second.append(2, b"x" * 100))
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    assert {report["partition"] for report in reports(world, "storage.segment_removed")} == {0}
    assert world.log.size_bytes + log.size_bytes <= 2_400


def expiry_of(owner, attempt=3):
    return owner.make(ExpireObjects, attempt, 5, GENESIS_CHAIN, "m", 7, 4, 77, 60_000)


EXPIRIES = {
    "some": (ManifestAfterExpiry(3, "e", 8), (3, "e", 8, "")),
    "none": (ManifestAfterExpiry(0, "", 0), (0, "", 0, "")),
    "error": (ArchiveUnavailable("cannot read m"), (0, "", 0, "cannot read m")),
}


@pytest.mark.parametrize("kind", EXPIRIES)
def test_an_expiry_request_of_the_owner_is_performed_and_its_outcome_reported(make, kind):
    outcome, expected = EXPIRIES[kind]
    world = make()
    owner = fill_log(world)
    assert isinstance(world.ask(1, expiry_of(owner)), SuccessResponse)
    (effect,) = world.effects_of(service_effects.WriteExpiry)
    recorded = RecordedManifest(0, 5, GENESIS_CHAIN, "m", 7)
    assert effect.job == ExpiryJob(5, NONCE, 3, recorded, 4, 77, 60_000)
    world.step(service.ExpiryWritten(effect.job, outcome))
    notices = [answer for answer in world.answers(1) if isinstance(answer, ObjectsExpired)]
    assert notices == [ObjectsExpired(5, 0, 0, 3, *expected)]
    assert reports(world, "storage.expiry_failed") == (
        [{"partition": 0, "error": "cannot read m"}] if kind == "error" else []
    )
    assert request(world, owner, range_to(owner, 5)).attempt == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_expiry_is_not_reported_to_an_owner_whose_session_has_ended(make, ending):
    world = make()
    owner = fill_log(world)
    world.send(1, expiry_of(owner))
    (effect,) = world.effects_of(service_effects.WriteExpiry)
    ENDINGS[ending](world)
    world.finish()
    world.step(service.ExpiryWritten(effect.job, ManifestAfterExpiry(3, "e", 8)))
    answers = [answer for number in (1, 2) for answer in world.answers(number)]
    assert not [answer for answer in answers if isinstance(answer, ObjectsExpired)]


def test_frequent_new_archived_marks_do_not_delay_the_removal_of_segments():
    partitions, marks, removals = 10, 9, 0
    retention = Retention(RetentionLimits(age_ms_max=1))
    for partition in range(partitions):
        retention.on_partition_opened(partition)
        retention.on_archived(partition, AckedMarker(5, GENESIS_CHAIN), 0)
    for count in range(100):
        partition, piece = retention.next_piece(0)
        removals += piece.removes_oldest
        retention.on_piece_done(partition, LogSize(100, oldest_age_ms=2, is_removable=True))
        if count % marks == 0:
            retention.on_archived(count % partitions, AckedMarker(6 + count, GENESIS_CHAIN), 0)
    assert removals > 50


def replacement_of(owner, first, last, *, mark, name="o", attempt=3):
    mark = (mark.last, mark.chain, mark.name, mark.file_crc)
    return owner.make(ReplaceObject, attempt, first, last, name, *mark)


def archived_in(world, owner, store, *ends):
    """Archive objects that end at these IDs; return the manifest, and the names of the objects."""
    uploaded, first = NewManifest(-1, GENESIS_CHAIN, 0, "", 0), 0
    for attempt, last in enumerate(ends):
        fields = (attempt, first, last, uploaded.chain, uploaded.name, uploaded.file_crc)
        job = request(world, owner, owner.make(ArchiveRange, *fields))
        uploaded, first = upload(store, KEY, job), last + 1
        world.step(service.UploadDone(job, uploaded))
    return uploaded, [name for name in store.list_names("") if name.endswith(".parquet")]


def test_an_object_of_any_size_is_rewritten_from_the_log(make, tmp_path, monkeypatch):
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    world = make(archive=ArchiveLimits(object_bytes=1 << 20, age_ms=0))
    owner = fill_log(world, batches=6)
    store = ArchiveStore(f"file://{tmp_path}/archive")
    made, names = archived_in(world, owner, store, 1, 9, 11)
    (name,) = (each for each in names if "/2-9-" in each)
    whole = store.read(name)
    store.delete(name)
    world.service._archive._limits = ArchiveLimits(object_bytes=1, age_ms=1 << 60)
    count = len(notices(world))
    message = replacement_of(owner, 2, 9, mark=made, name=name, attempt=7)
    job = request(world, owner, message)
    assert [len(run.batches) for run in job.runs] == [1, 1, 1, 1]
    again = upload(store, KEY, job)
    world.step(service.UploadDone(job, again))
    assert notices(world)[count:] == [
        RangeArchived(5, 0, 0, 7, 11, made.chain, again.stamp_ms, again.name, again.file_crc, "")
    ]
    (new,) = (each for each in store.list_names("") if "/2-9-" in each)
    assert new.endswith("-7.parquet")
    assert store.read(new) == whole
    assert reports(world, "storage.object_replaced") == [{"partition": 0, "object": name}]


def test_replacing_an_archived_object_uses_bounded_memory(make, monkeypatch):
    """A client may request any IDs; only the manifest shows that no object has them."""
    monkeypatch.setattr("waltz_core.storage.log.archive_pieces.PIECE_BYTES_MAX", 300)
    monkeypatch.setattr("waltz_core.storage.service.archive_jobs.REPLACED_BYTES_MAX", 900)
    world = make(archive=OLD)
    owner = fill_log(world, batches=20)
    assert request(world, owner, replacement_of(owner, 0, 39, mark=MADE)) is None
    assert "expected whole batches with transactions 0..39, found batches up to 7" in (
        notices(world)[-1].error
    )


def test_a_log_without_all_records_of_an_object_does_not_replace_it(make):
    world, owner = world_with_segments(make, bytes_max=2_000)
    world.ask(1, mark_at(world, owner, 15))
    world.finish()
    assert world.log.start.transaction_id == 5
    for first, last, reason in (
        (6, 8, "expected whole batches with transactions 6..8, found batches up to "),
        (6, 16, "expected whole batches with transactions 6..16, found batches up to 15"),
        (7, 9, "expected a batch that begins at transaction 7"),
        (4, 7, "4..7 were requested, but the log of this storage begins at 6"),
    ):
        request(world, owner, replacement_of(owner, first, last, mark=MADE))
        assert reason in notices(world)[-1].error
        assert notices(world)[-1].manifest == ""
    assert len(reports(world, "storage.object_replacement_failed")) == 4
    assert "found 3..2" in str(rejection(world, replacement_of(owner, 3, 2, mark=MADE)))
