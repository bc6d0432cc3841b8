"""A storage reads archived records that were removed locally or are damaged."""

from dataclasses import replace
from shutil import rmtree

import pytest

from tests.unit.storage.test_archiving import fill_log, make, range_to, request
from tests.unit.storage.test_service import KEY, open_request, prepare, range_of, reports
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import upload
from waltz_core.errors import (
    ArchiveUnavailable,
    BadRequest,
    BeforeLogStart,
    ChecksumMismatch,
    ObjectMissing,
    error_from_code,
)
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.storage.files.format import AckedMarker, IdRange
from waltz_core.storage.service import service, service_effects
from waltz_core.storage.service.archive_reads import (
    QUERIES_MAX,
    REPORT_INTERVAL_MS,
    answer_from_archive,
)
from waltz_core.storage.service.retention import RetentionLimits
from waltz_core.wire.messages import (
    LineageRequest,
    LineageResponse,
    Nack,
    RangeBytes,
    RangeForm,
    SetArchived,
    SuccessResponse,
)
from waltz_core.wire.record_locations import LOCATIONS

__all__ = ["make"]

ROWS = 16


class ArchivedLog:
    """A storage with 16 rows in batches of two, all archived; those up to `start` are removed."""

    def __init__(self, world, directory):
        self.world = world
        fill_log(world, batches=ROWS // 2)
        self.all_records = world.log.read_range(0, ROWS - 1, 1 << 20, whole_batches=True)
        self.headers = raw_records.headers_of(self.all_records.records, self.all_records.lengths)
        self.owner = world.owned(6)
        self.store = ArchiveStore(f"file://{directory}/archive")
        job = request(world, self.owner, range_to(self.owner, ROWS - 1))
        self.uploaded = upload(self.store, KEY, job)
        world.step(service.UploadDone(job, self.uploaded))
        self.cache = ArchiveCache(1 << 20)

    def mark(self):
        uploaded = self.uploaded
        return self.owner.make(
            SetArchived, uploaded.last, uploaded.chain, 0, uploaded.file_crc, uploaded.name
        )

    def answer(self, message, connection=1):
        """Return the answer to a request; reads of the archive are carried out."""
        before = len(self.world.answers(connection))
        self.world.send(connection, message)
        self.world.finish()
        self.read()
        (found,) = self.world.answers(connection)[before:]
        assert found.sequence == message.sequence
        return found

    def read(self):
        """Carry out the reads of the archive; return their number."""
        reads = [effect.read for effect in self.world.effects_of(service_effects.ReadArchive)]
        self.world.effects = [
            effect
            for effect in self.world.effects
            if not isinstance(effect, service_effects.ReadArchive)
        ]
        for read in reads:
            reader = ArchiveReader(
                self.store, read.mark.manifest, read.mark.manifest_crc, self.cache
            )
            self.world.step(service.ArchiveReadDone(read, answer_from_archive(reader, read)))
        return len(reads)

    def error(self, message, connection=1):
        answer = self.answer(message, connection)
        assert isinstance(answer, Nack), answer
        return error_from_code(answer.error_code, answer.message, answer.first_available)

    def lineage(self, first, last):
        return self.answer(self.owner.make(LineageRequest, first, last))


@pytest.fixture
def archived(make, tmp_path):
    world = make(segment_bytes_max=700, retention=RetentionLimits(age_ms_max=1_000))
    archived = ArchivedLog(world, tmp_path)
    assert isinstance(world.ask(1, archived.mark()), SuccessResponse)
    world.finish()
    assert world.log.start.transaction_id == ROWS - 1, "the log has no archived record any more"
    world.ask(7, open_request())
    yield archived
    archived.cache.close()


@pytest.mark.parametrize(("first", "last"), [(0, 15), (3, 3), (5, 12), (14, 99)])
def test_a_reader_receives_removed_records_unchanged(archived, first, last):
    message = range_of(archived.owner, first, last, whole_batches=False, reader=True)
    answer = archived.answer(message, 7)
    assert isinstance(answer, RangeBytes)
    end = min(last, ROWS - 1)
    assert (answer.first, answer.count) == (first, end - first + 1)
    offset, stop = (
        int(each) for each in raw_records.offsets_of(archived.all_records.lengths)[[first, end + 1]]
    )
    assert bytes(answer.records) == archived.all_records.records[offset:stop]
    assert [entry.first for entry in answer.lineage] == list(range(first // 2 * 2, end + 1, 2))


def test_a_reader_gets_the_headers_of_removed_records(archived):
    fields = {"form": RangeForm.HEADERS, "whole_batches": False, "reader": True}
    answer = archived.answer(range_of(archived.owner, 2, 9, **fields), 7)
    assert (answer.count, bytes(answer.records)) == (8, archived.headers[2 * 28 : 10 * 28])
    answer = archived.answer(range_of(archived.owner, 2, 9, bytes_max=60, **fields), 7)
    assert (answer.count, bytes(answer.records)) == (2, archived.headers[2 * 28 : 4 * 28])


def test_the_owner_gets_the_lineage_of_removed_batches(archived):
    lineage = archived.lineage(3, 9)
    assert isinstance(lineage, LineageResponse)
    assert lineage.lineage == archived.all_records.entries[1:5]
    assert lineage.chain_before == archived.all_records.entries[0].chain


def test_a_copy_does_not_read_the_archive(archived):
    message = range_of(archived.owner, 0, 9, whole_batches=True, reader=False)
    assert isinstance(archived.error(message), BeforeLogStart)


def test_a_request_for_locations_of_removed_records_is_rejected(archived):
    fields = {"form": LOCATIONS, "whole_batches": False, "reader": True}
    assert isinstance(archived.error(range_of(archived.owner, 0, 9, **fields), 7), BeforeLogStart)


def expire(archived, first):
    """Let the owner announce a manifest with a later first ID."""
    reader = ArchiveReader(
        archived.store, archived.uploaded.name, archived.uploaded.file_crc, archived.cache
    )
    data = reader.manifest.with_expiry(first, 0).to_bytes()
    archived.store.write("expired", data)
    mark = replace(archived.mark(), first=first, manifest="expired", manifest_crc=crc32(data))
    assert isinstance(archived.world.ask(1, mark), SuccessResponse)


@pytest.mark.parametrize("form", [RangeForm.WHOLE, RangeForm.HEADERS])
def test_a_read_of_expired_records_names_the_first_available_id(archived, form):
    expire(archived, 6)
    fields = {"form": form, "whole_batches": False, "reader": True}
    error = archived.error(range_of(archived.owner, 5, 9, **fields), 7)
    assert isinstance(error, BeforeLogStart)
    assert (error.first_available, error.retriable) == (6, False)
    assert "the first available one is 6" in str(error)
    assert archived.answer(range_of(archived.owner, 6, 9, **fields), 7).count == 4


def test_the_owner_receives_an_error_for_an_expired_lineage(archived):
    expire(archived, 6)
    error = archived.error(archived.owner.make(LineageRequest, 3, 9))
    assert (type(error), error.first_available) == (BeforeLogStart, 6)


def test_the_error_names_a_missing_object(archived):
    (name,) = (each for each in archived.store.list_names("") if each.endswith(".parquet"))
    archived.store.delete(name)
    message = range_of(archived.owner, 0, 9, whole_batches=False, reader=True)
    error = archived.error(message, 7)
    assert isinstance(error, ObjectMissing)
    assert name in str(error)
    assert "Hint: `waltz-core archive verify --repair` replaces" in str(error)


def test_a_failed_read_of_the_archive_is_reported_once_for_a_while(archived):
    world = archived.world
    (name,) = (each for each in archived.store.list_names("") if each.endswith(".parquet"))
    archived.store.delete(name)

    def read(first):
        message = range_of(archived.owner, first, 9, whole_batches=False, reader=True)
        assert isinstance(archived.error(message, 7), ObjectMissing)
        return reports(world, "storage.archive_read_failed")

    (report,) = read(2)
    assert (report["partition"], report["first"]) == (0, 2)
    assert name in str(report["error"])
    assert "Hint" not in str(report["error"])
    assert len(read(4)) == 1
    world.now_ms += REPORT_INTERVAL_MS
    assert len(read(4)) == 2


def test_an_object_store_failure_is_reported_once_for_all_reads(archived):
    world, kinds = archived.world, (ArchiveUnavailable, ArchiveUnavailable, BeforeLogStart)
    for number, kind in enumerate(kinds):
        world.send(7, range_of(archived.owner, number, 9, whole_batches=False, reader=True))
        world.finish()
        (effect,) = world.effects_of(service_effects.ReadArchive)
        world.effects.clear()
        world.step(service.ArchiveReadDone(effect.read, kind(f"cannot read {number}")))
        found = reports(world, "storage.archive_read_failed")
        assert len(found) == (1 if number == 0 else 0)


def test_a_reader_gets_a_retryable_error_until_the_owner_announces_the_archived_mark(archived):
    later = archived.world.owned(7, connection=2)
    message = range_of(later, 0, 9, whole_batches=False, reader=True)
    error = archived.error(message, 7)
    assert isinstance(error, ArchiveUnavailable)
    assert error.retriable
    assert str(error) == (
        "partition 0: transactions 0..9 were requested, but the log of this storage "
        "begins at 16; earlier transactions are in the archive, but the server that owns the "
        "partition has not sent the archived mark yet"
    )


def test_an_archive_of_another_log_is_not_read(archived):
    """For example, ZooKeeper was rolled back: neither the owner nor readers get these records."""
    later = archived.world.owned(7, connection=2)
    uploaded = archived.uploaded
    mark = later.make(SetArchived, uploaded.last, bytes(16), 0, uploaded.file_crc, uploaded.name)
    for connection, reader in ((2, False), (7, True)):
        archived.world.send(2, mark)
        message = range_of(later, 0, 9, whole_batches=False, reader=reader)
        archived.world.send(connection, message)  # before the storage has compared the mark
        archived.world.finish()
        assert archived.read() == 0
        error = archived.error(
            range_of(later, 0, 9, whole_batches=False, reader=reader), connection
        )
        assert isinstance(error, ArchiveUnavailable)
        assert "has not sent" in str(error)
    # A read that follows the mark directly already uses the mark.
    archived.world.send(2, replace(mark, chain=uploaded.chain))
    assert archived.answer(range_of(later, 0, 9, whole_batches=False, reader=True), 7).count == 10


def test_an_archive_read_is_answered_even_after_the_end_of_its_session(archived):
    message = range_of(archived.owner, 0, 1, whole_batches=False, reader=True)
    archived.world.send(7, message)
    archived.world.finish()
    archived.world.ask(2, prepare(archived.world.owned(7, connection=2)))
    assert archived.read() == 1
    assert archived.world.answers(7)[-1].count == 2
    assert archived.world.service.queue_limits.reader_bytes == 0


def test_records_damaged_on_disk_are_read_from_the_archive(make, tmp_path):
    archived = ArchivedLog(make(), tmp_path)
    world, owner = archived.world, archived.owner
    world.log._files.write_slot(replace(world.log.slot, damaged=(IdRange(4, 7),)))
    message = range_of(owner, 4, 9, whole_batches=False, reader=False)
    error = archived.error(message)
    assert isinstance(error, ArchiveUnavailable), "the archive may have them"
    assert (
        "records 4..7 are damaged; the server that owns the partition has not reported yet"
        in str(error)
    )
    world.ask(1, archived.mark())
    answer = archived.answer(range_of(owner, 4, 9, whole_batches=False, reader=False))
    assert (answer.first, answer.count) == (4, 6)
    for name in archived.store.list_names(""):
        archived.store.delete(name)
    archived.cache.close()
    archived.cache = ArchiveCache(0)
    found = archived.error(replace(message, sequence=99))
    assert isinstance(found, ChecksumMismatch)
    assert "records 4..7 are damaged" in str(found)
    assert "; in the archive: archive: cannot read " in str(found)
    assert archived.uploaded.name in str(found)
    assert "Hint: `waltz-core archive verify" in str(found)
    (report,) = reports(world, "storage.archive_read_failed")
    assert isinstance(report["error"], ObjectMissing)
    rmtree(tmp_path / "archive")
    found = archived.error(replace(message, sequence=100))
    assert isinstance(found, ArchiveUnavailable), "the archive may return"
    assert "records 4..7 are damaged; in the archive: archive: cannot read " in str(found)
    assert isinstance(archived.error(range_of(owner, 20, 21, whole_batches=False)), BadRequest)
    archived.cache.close()


def test_waiting_archive_reads_are_limited_and_do_not_block_their_connection(archived):
    world, owner = archived.world, archived.owner
    messages = [
        range_of(owner, 0, 9, bytes_max=1 << 16, reader=True) for _ in range(QUERIES_MAX + 1)
    ]
    for message in messages:
        world.send(7, message)
        world.finish()
    assert world.service.queue_limits.reader_bytes == 0
    assert not world.effects_of(service_effects.PauseReading)
    (rejected,) = (answer for answer in world.answers(7) if isinstance(answer, Nack))
    assert rejected.sequence == messages[-1].sequence
    error = error_from_code(rejected.error_code, rejected.message)
    assert isinstance(error, ArchiveUnavailable)
    assert str(error).endswith(
        f"; {QUERIES_MAX} requests already wait for the archive, which is the limit"
    )
    assert world.ask(1, owner.append(2)).synced_max == ROWS + 1
    assert archived.read() == QUERIES_MAX
    assert archived.answer(messages[0], 7).count == 10


def test_a_storage_without_an_archive_returns_an_error_that_states_this(make):
    world = make(archive=None)
    fill_log(world)
    owner = world.owned(6)
    world.log._files.begin_after(AckedMarker(3, world.log.chain_at(3)), world.log.slot)
    world.ask(7, open_request())
    answer = world.ask(7, range_of(owner, 0, 1, reader=True))
    assert "but this storage has no setting `archive_url`" in answer.message
