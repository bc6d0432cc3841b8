"""A restored partition uses the backup's objects up to the end of a batch."""

from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from uuid import UUID

import pytest

from tests.archived_log import (
    CLUSTER_KEY,
    FIRST_COMMIT_MS,
    PARTITION_ID,
    encode_object,
    write_archive,
    write_manifest,
)
from waltz_core.archive import manifest as manifest_module
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.archive_check import ArchiveCheck, RecordedArchive
from waltz_core.archive.file_names import manifest_version_of
from waltz_core.archive.manifest import Manifest
from waltz_core.archive.pins import is_pinned, pin_objects
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.restored_manifest import BatchEnd, RestoredRange
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ObjectMissing
from waltz_core.records.checksum import crc32

FOLDER = f"{UUID(bytes=CLUSTER_KEY)}/{PARTITION_ID}"
NEW_KEY, NONCE = b"k" * 16, b"n" * 16
SIZES = (3, 1, 40, 7)
ROWS_PER_OBJECT = sum(SIZES)


@pytest.fixture
def store(tmp_path):
    return ArchiveStore(f"file://{tmp_path}/archive")


@pytest.fixture
def log(store):
    """Four objects with four batches each, the oldest two in a page."""
    return write_archive(store, sizes=SIZES, page_entries=2, folder=FOLDER)


def read_saved_manifest(store, log):
    return SavedManifest.read(store, log.name, log.crc)


def restore(store, log, end):
    return RestoredRange(store, read_saved_manifest(store, log)).write_manifest(
        NEW_KEY, 9, NONCE, end
    )


def object_name(number):
    return f"{FOLDER}/objects/{number}.parquet"


def damage(store, name, data):
    store.delete(name)
    store.write(name, data)


def test_an_object_that_was_replaced_after_the_backup_is_found(store, log):
    newest = log.manifest.newest_objects
    old = newest[0]._replace(
        name=f"{FOLDER}/objects/{newest[0].first}-{newest[0].last}-9-n-1.parquet"
    )
    listed = replace(log.manifest, newest_objects=(old, *newest[1:]))
    log = log._replace(name="backup", crc=write_manifest(store, listed, "backup"))
    data = store.read(newest[0].name)
    with pytest.raises(ObjectMissing, match=old.name):
        RestoredRange(store, read_saved_manifest(store, log))
    other = store.read(newest[1].name)
    for attempt, each in enumerate((other, data[:-8] + bytes(8), data, data), start=2):
        store.write(old.name.replace("-1.parquet", f"-{attempt}.parquet"), each)
    batch = BatchEnd(log.lineage[-1].last, log.lineage[-1].chain, FIRST_COMMIT_MS)
    new_manifest = RestoredRange(store, read_saved_manifest(store, log)).write_manifest(
        NEW_KEY, 9, NONCE, batch
    )
    entries = SavedManifest.read(store, new_manifest.name, new_manifest.file_crc).entries()
    (entry,) = (each for each in entries if each.first == old.first)
    assert entry.name.endswith("-4.parquet"), "the first object with the same chain"
    assert entry[1:] == old[1:]


def test_a_corrupt_object_is_not_restored_if_another_one_has_its_records(store, log):
    newest = log.manifest.newest_objects
    name = f"{FOLDER}/objects/{newest[0].first}-{newest[0].last}-9-n-1.parquet"
    listed = replace(log.manifest, newest_objects=(newest[0]._replace(name=name), *newest[1:]))
    log = log._replace(name="backup", crc=write_manifest(store, listed, "backup"))
    data = store.read(newest[0].name)
    replacement = name.replace("-1.parquet", "-2.parquet")

    def restored():
        found = RestoredRange(store, read_saved_manifest(store, log))
        return next(
            entry.name for entry in found._manifest.newest_objects if entry.first == newest[0].first
        )

    store.write(name, data)
    store.write(replacement, data)
    assert restored() == name, "the object is valid"
    damage(store, name, data[:-8] + bytes(8))
    assert restored() == replacement
    damage(store, replacement, data[:-8] + bytes(8))
    assert restored() == name, "no other object is valid"


@pytest.mark.parametrize("last", [ROWS_PER_OBJECT - 1, ROWS_PER_OBJECT - 8])
def test_a_restored_object_that_was_replaced_is_found_under_the_key_of_the_new_cluster(
    store, log, last
):
    """The backup lists the source's object, and may end within it."""
    first = RestoredRange(store, read_saved_manifest(store, log))
    end = first.batch_end_at(last)
    new_manifest = first.write_manifest(NEW_KEY, 9, NONCE, end)
    saved = SavedManifest.read(store, new_manifest.name, new_manifest.file_crc)
    store.delete(object_name(0))
    with pytest.raises(ObjectMissing, match=object_name(0)):
        RestoredRange(store, saved)
    batches = [entry for entry in log.lineage if entry.last <= last]
    name = f"{UUID(bytes=NEW_KEY)}/{PARTITION_ID}/objects/0-{last}-9-{NONCE.hex()}-4.parquet"
    store.write(name, encode_object(log.records[: last + 1], batches, cluster_key=NEW_KEY))
    range_with_new_object = RestoredRange(store, saved)
    range_with_new_object.check_objects_exist()
    assert range_with_new_object.batch_end_at(last) == end
    manifest = range_with_new_object.write_manifest(b"o" * 16, 10, NONCE, end)
    entries = SavedManifest.read(store, manifest.name, manifest.file_crc).entries()
    assert [entry.name for entry in entries] == [name]


def test_the_end_of_a_restored_range_is_always_the_end_of_a_batch(store, log):
    restored = RestoredRange(store, read_saved_manifest(store, log))
    assert (restored.first, restored.last) == (0, 4 * ROWS_PER_OBJECT - 1)
    ends = {entry.last: BatchEnd(entry.last, entry.chain, entry.stamp_ms) for entry in log.lineage}
    last_end = None
    for last in range(4 * ROWS_PER_OBJECT):
        last_end = ends.get(last, last_end)
        assert restored.batch_end_at(last) == last_end
    assert restored.batch_end_at(-1) is None
    with pytest.raises(
        BadRequest,
        match=rf"archived IDs 0\.\.{4 * ROWS_PER_OBJECT - 1} as .*found "
        rf"{4 * ROWS_PER_OBJECT}",
    ):
        restored.batch_end_at(4 * ROWS_PER_OBJECT)


@pytest.mark.parametrize(
    "last",
    [
        2,
        3,
        ROWS_PER_OBJECT - 1,
        ROWS_PER_OBJECT + 2,
        3 * ROWS_PER_OBJECT - 1,
        4 * ROWS_PER_OBJECT - 1,
    ],
)
def test_a_reader_of_the_written_manifest_returns_the_records_up_to_the_end(store, log, last):
    end = RestoredRange(store, read_saved_manifest(store, log)).batch_end_at(last)
    restored = restore(store, log, end)
    assert (restored.last, restored.chain, restored.stamp_ms) == end
    assert restored.name.startswith(
        f"{UUID(bytes=NEW_KEY)}/{PARTITION_ID}/manifests/5-9-{NONCE.hex()}-"
    )
    with closing(ArchiveCache(1 << 20)) as cache:
        reader = ArchiveReader(store, restored.name, restored.file_crc, cache)
        assert reader.manifest.cluster_key == NEW_KEY
        assert reader.archived_end == (last, end.chain)
        found = b"".join(
            bytes(reader.read_range(first, last, 1).records) for first in range(last + 1)
        )
        assert found == b"".join(log.records[: last + 1])
        with pytest.raises(BadRequest):
            reader.read_range(0, last + 1, 1)


@pytest.mark.parametrize(
    "last", [2, 43, ROWS_PER_OBJECT + 2, ROWS_PER_OBJECT + 3, 4 * ROWS_PER_OBJECT - 1]
)
def test_the_check_of_a_restored_archive_has_no_findings(store, log, last):
    restored = restore(
        store, log, RestoredRange(store, read_saved_manifest(store, log)).batch_end_at(last)
    )
    check = ArchiveCheck(store, NEW_KEY, PARTITION_ID, first=0)
    check.begin(RecordedArchive(0, restored.last, restored.chain, restored.name, restored.file_crc))
    while check.check_next_file():
        pass
    assert (check.bad_files, check.next_id) == ([], last + 1)


def test_a_manifest_with_many_objects_has_pages(store, log, monkeypatch):
    monkeypatch.setattr(manifest_module, "ENTRIES_PER_PAGE", 1)
    found = RestoredRange(store, read_saved_manifest(store, log))
    restored = restore(store, log, found.batch_end_at(found.last))
    manifest = Manifest.from_bytes(store.read(restored.name), restored.name)
    assert len(manifest.pages) == 3
    assert {page.name.partition("/")[0] for page in manifest.pages} == {str(UUID(bytes=NEW_KEY))}
    reread_manifest = SavedManifest.read(store, restored.name, restored.file_crc)
    assert reread_manifest.entries() == read_saved_manifest(store, log).entries()


def test_a_time_limit_selects_the_last_batch_committed_at_or_before_this_time(store, log):
    restored = RestoredRange(store, read_saved_manifest(store, log))
    for number, reach in enumerate(accumulate([ROWS_PER_OBJECT] * 4)):
        # The first batch of each object has no stamp, so its age is unknown.
        stamp = FIRST_COMMIT_MS + 1_000 * number
        assert restored.last_committed_until(stamp) == reach - 1
        assert restored.last_committed_until(stamp - 1) == reach - ROWS_PER_OBJECT - 1


def test_a_wrong_archive_is_an_error_even_if_objects_may_have_expired(store, log, tmp_path):
    saved, other = read_saved_manifest(store, log), ArchiveStore(f"file://{tmp_path}/other")
    for may_have_expired in (False, True):
        with pytest.raises(ObjectMissing, match="Hint: check that this is the URL of the archive"):
            RestoredRange(other, saved, may_have_expired=may_have_expired)


def test_a_partition_begins_after_the_objects_that_expiry_has_deleted(store, log):
    store.delete(object_name(0))
    with pytest.raises(ObjectMissing, match=r"object .*0\.parquet with .* use --without-expired"):
        RestoredRange(store, read_saved_manifest(store, log))
    restored = RestoredRange(store, read_saved_manifest(store, log), may_have_expired=True)
    assert restored.first == ROWS_PER_OBJECT
    with pytest.raises(
        BadRequest,
        match=rf"expected one of the archived IDs {ROWS_PER_OBJECT}\.\.",
    ):
        restored.batch_end_at(ROWS_PER_OBJECT - 1)
    written_manifest = restored.write_manifest(
        NEW_KEY, 9, NONCE, restored.batch_end_at(restored.last)
    )
    manifest = Manifest.from_bytes(store.read(written_manifest.name), written_manifest.name)
    assert (manifest.first, manifest.newest_objects[0].first) == (ROWS_PER_OBJECT, ROWS_PER_OBJECT)


@pytest.mark.parametrize("numbers", [(1,), (3,), (0, 2), (1, 2, 3)])
def test_a_missing_object_that_has_not_expired_is_an_error(store, log, numbers):
    for number in numbers:
        store.delete(object_name(number))
    with pytest.raises(
        ObjectMissing, match=r"object .*\.parquet with transactions .* does not exist"
    ):
        RestoredRange(store, read_saved_manifest(store, log), may_have_expired=True)


def test_an_object_of_another_log_is_not_restored(store, log, tmp_path):
    other = ArchiveStore(f"file://{tmp_path}/other")
    write_archive(other, sizes=SIZES, seed=5, folder=FOLDER)
    damage(store, object_name(3), other.read(object_name(3)))
    restored = RestoredRange(store, read_saved_manifest(store, log))
    with pytest.raises(ChecksumMismatch, match=r"3\.parquet: expected chain hash"):
        restored.batch_end_at(restored.last)
    assert restored.batch_end_at(3 * ROWS_PER_OBJECT - 1) is not None


def test_each_file_of_a_manifest_is_verified(store, log):
    saved = read_saved_manifest(store, log)
    head = saved.head.replace(b'"version"', b'"vers1on"')
    for wrong in (
        saved._replace(file_crc=saved.file_crc ^ 1),
        saved._replace(head=head),
        saved._replace(pages=(saved.pages[0] + b" ",)),
    ):
        with pytest.raises(ChecksumMismatch, match="manifest"):
            RestoredRange(store, wrong)
    with pytest.raises(BadFormat, match="expected 1 pages in the backup, found 0"):
        RestoredRange(store, saved._replace(pages=()))
    store.delete(f"{FOLDER}/manifests/page")
    with pytest.raises(ObjectMissing):
        read_saved_manifest(store, log)


def test_objects_of_other_clusters_are_rejected(store, log):
    """The key in the name of an object must equal the key in the object's metadata."""
    manifest = Manifest.from_bytes(store.read(log.name), log.name)
    foreign_name = f"{UUID(bytes=b'z' * 16)}/{PARTITION_ID}/objects/3.parquet"
    store.write(foreign_name, store.read(object_name(3)))
    newest = (
        *manifest.newest_objects[:-1],
        manifest.newest_objects[-1]._replace(name=foreign_name),
    )
    data = replace(manifest, newest_objects=newest).to_bytes()
    saved = SavedManifest(
        "m", manifest_module.crc32(data), data, read_saved_manifest(store, log).pages
    )
    with pytest.raises(BadFormat, match="expected cluster key"):
        RestoredRange(store, saved).batch_end_at(manifest.last)


def test_a_pin_is_written_once_and_protects_its_source(store):
    assert not is_pinned(store, CLUSTER_KEY)
    name = pin_objects(store, CLUSTER_KEY, NEW_KEY)
    assert name is not None
    assert is_pinned(store, CLUSTER_KEY)
    assert not is_pinned(store, NEW_KEY)
    assert pin_objects(store, CLUSTER_KEY, NEW_KEY) is None
    store.delete(name)
    assert not is_pinned(store, CLUSTER_KEY)


def test_a_fully_expired_archive_is_rejected(store, log):
    end = log.manifest.last + 1
    fully_expired = log.manifest.with_expiry(end, 0).with_expiry(
        end, manifest_module.EXPIRY_GRACE_MS
    )
    store.write("gone.json", fully_expired.to_bytes())
    saved = SavedManifest.read(store, "gone.json", crc32(fully_expired.to_bytes()))
    with pytest.raises(
        ObjectMissing, match="partition 3, because all of its archived objects have expired"
    ):
        RestoredRange(store, saved)


def test_expired_objects_that_still_exist_are_not_restored_as_available(store, log):
    expired = log.manifest.with_expiry(ROWS_PER_OBJECT, 0)
    store.write("expired.json", expired.to_bytes())
    saved = SavedManifest.read(store, "expired.json", crc32(expired.to_bytes()))
    assert RestoredRange(store, saved).first == ROWS_PER_OBJECT


@pytest.mark.parametrize(("key", "version"), [(CLUSTER_KEY, 10), (NEW_KEY, 5)])
def test_the_new_manifest_has_a_higher_version_than_all_manifests_of_its_cluster(
    store, log, key, version
):
    """With a lower version, manifests written after the backup would look like a rollback."""
    store.write(f"{FOLDER}/manifests/9-8-{NONCE.hex()}-1.json", b"written after the backup")
    restored = RestoredRange(store, read_saved_manifest(store, log))
    manifest = restored.write_manifest(key, 9, NONCE, restored.batch_end_at(ROWS_PER_OBJECT - 1))
    assert Manifest.from_bytes(store.read(manifest.name), manifest.name).version == version
    assert manifest_version_of(manifest.name) == version


def test_the_error_names_an_object_that_was_deleted_during_the_restore(store, log):
    restored = RestoredRange(store, read_saved_manifest(store, log))
    restored.check_objects_exist()
    store.delete(object_name(0))
    later = RestoredRange(store, read_saved_manifest(store, log), may_have_expired=True)
    with pytest.raises(
        ObjectMissing,
        match=f"{object_name(0)} with transactions 0..{ROWS_PER_OBJECT - 1} was deleted",
    ):
        restored.check_objects_exist()
    later.check_objects_exist()
