"""Expiry raises the first available ID by whole objects; files remain for a grace period."""

import pytest

from tests.unit.archive.test_garbage_collection import (
    CollectedStore,
    all_files,
    collection_job,
    listed_files,
    run,
)
from tests.unit.archive.test_upload import KEY, NONCE, job_after, read_manifest
from waltz_core.archive import manifest
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.manifest import EXPIRY_GRACE_MS, RecordedManifest
from waltz_core.archive.manifest_jobs import ExpiryJob, NewManifest
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import expire, upload
from waltz_core.errors import BeforeLogStart, ChecksumMismatch

NOW_MS = 2_000_000_000_000
OBJECT_IDS = 10  # the number of IDs in each object


@pytest.fixture
def archived(tmp_path, monkeypatch):
    """Return a store and its manifest of six objects with IDs 0..59, four of them in pages."""
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    store = CollectedStore(f"file://{tmp_path}")
    uploaded = None
    for attempt in range(6):
        uploaded = upload(store, KEY, job_after(uploaded, attempt=attempt))
    head = read_manifest(store, uploaded)
    assert [len(head.pages), len(head.newest_objects), head.last] == [1, 4, 6 * OBJECT_IDS - 1]
    return store, uploaded


def run_expiry(
    store, new_manifest, *, before=0, before_ms=0, retention_ms=0, now_ms=NOW_MS, attempt=20
):
    recorded_after_expiry = RecordedManifest(
        3, new_manifest.last, new_manifest.chain, new_manifest.name, new_manifest.file_crc
    )
    job = ExpiryJob(9, NONCE, attempt, recorded_after_expiry, before, before_ms, retention_ms)
    return expire(store, KEY, job, now_ms=now_ms)


def recorded_after_expiry(new_manifest, expired):
    """Return the manifest as ZooKeeper would record it after an expiry."""
    return NewManifest(
        new_manifest.last, new_manifest.chain, new_manifest.stamp_ms, expired.name, expired.file_crc
    )


@pytest.mark.parametrize(
    ("before", "first"),
    [(1, 0), (9, 0), (10, 10), (29, 20), (30, 30), (59, 50), (60, 60), (99, 60)],
)
def test_only_objects_entirely_below_the_given_id_expire(archived, before, first):
    store, new_manifest = archived
    manifest = run_expiry(store, new_manifest, before=before)
    assert manifest.first == first
    assert bool(manifest.name) == (first > 0)
    if manifest.name:
        head = read_manifest(store, recorded_after_expiry(new_manifest, manifest))
        assert (head.first, head.last, head.chain) == (first, new_manifest.last, new_manifest.chain)


@pytest.mark.parametrize("limit_kind", ["time", "retention"])
@pytest.mark.parametrize("expired_count", [0, 1, 2, 3, 6])
def test_objects_expire_if_they_were_committed_before_the_given_time(
    archived, limit_kind, expired_count, monkeypatch
):
    store, new_manifest = archived
    times = set_commit_times(store, new_manifest, monkeypatch)
    before_ms = times[expired_count] if expired_count < 6 else times[-1] + 1
    bound = {"before_ms": before_ms}
    if limit_kind == "retention":
        bound = {"retention_ms": NOW_MS - before_ms}
    assert run_expiry(store, new_manifest, **bound).first == expired_count * OBJECT_IDS


def set_commit_times(store, new_manifest, monkeypatch):
    """Give each object a different commit time; return the times."""
    head = read_manifest(store, new_manifest)
    page = head.pages[0]
    times = [1_000_000 + 10 * number for number in range(6)]
    entries = [
        *manifest.decode_page(page, store.read(page.name)).entries,
        *head.newest_objects,
    ]
    changed = tuple(
        entry._replace(commit_ms_min=time_ms, commit_ms_max=time_ms)
        for entry, time_ms in zip(entries, times, strict=True)
    )
    bounds = page._replace(commit_ms_min=times[0], commit_ms_max=times[1])
    found = manifest.replace(head, pages=(bounds,), newest_objects=changed[2:])
    monkeypatch.setattr(RecordedManifest, "read", lambda *_: found)
    monkeypatch.setattr(
        "waltz_core.archive.upload.decode_page", lambda *_: manifest.ManifestPage(changed[:2])
    )
    return times


def test_objects_without_commit_times_expire_together_with_later_objects(archived, monkeypatch):
    store, new_manifest = archived
    set_commit_times(store, new_manifest, monkeypatch)
    found = RecordedManifest(3, new_manifest.last, new_manifest.chain, new_manifest.name, 0).read(
        store, KEY
    )
    newest = (
        found.newest_objects[0]._replace(commit_ms_min=0, commit_ms_max=0),
        *found.newest_objects[1:],
    )
    page = found.pages[0]._replace(commit_ms_min=0, commit_ms_max=0)
    changed = manifest.replace(found, pages=(page,), newest_objects=newest)
    monkeypatch.setattr(RecordedManifest, "read", lambda *_: changed)
    assert (
        run_expiry(store, new_manifest, before_ms=newest[1].commit_ms_max + 1).first
        == 4 * OBJECT_IDS
    )
    before_ms = newest[1].commit_ms_max
    assert run_expiry(store, new_manifest, before_ms=before_ms, attempt=21).first == 2 * OBJECT_IDS


def test_expired_files_are_deleted_only_after_the_grace_period(archived):
    store, new_manifest = archived
    before = set(all_files(store))
    expired = recorded_after_expiry(new_manifest, run_expiry(store, new_manifest, before=35))
    old = listed_files(store, new_manifest)
    run(store, collection_job(expired, attempt=21), now_ms=NOW_MS + EXPIRY_GRACE_MS - 1)
    remaining = set(all_files(store))
    assert old - {new_manifest.name} <= remaining, "a reader with the older manifest may need them"
    run(store, collection_job(expired, attempt=22), now_ms=NOW_MS + EXPIRY_GRACE_MS)
    names = set(all_files(store))
    deleted = {each for each in before - names if each.endswith(".parquet")}
    assert sorted(int(each.rpartition("/")[2].partition("-")[0]) for each in deleted) == [0, 10, 20]
    with ReaderWithCache(store, expired) as reader:
        assert reader.read_range(30, 59, 1 << 20).lengths.size == 30
        with pytest.raises(BeforeLogStart, match="the first available one is 30") as caught:
            reader.read_range(29, 40, 1 << 20)
        assert caught.value.first_available == 30
    run(store, collection_job(expired, attempt=23), now_ms=NOW_MS + EXPIRY_GRACE_MS)
    assert set(all_files(store)) == names


class ReaderWithCache:
    """A reader of a manifest, and its cache."""

    def __init__(self, store, new_manifest):
        self.cache = ArchiveCache(1 << 20)
        self.reader = ArchiveReader(
            ArchiveStore(store.url), new_manifest.name, new_manifest.file_crc, self.cache
        )

    def __enter__(self):
        return self.reader

    def __exit__(self, *_):
        self.cache.close()


def test_the_next_expiry_removes_deleted_objects_from_the_manifest(archived):
    store, uploaded = archived
    expired = recorded_after_expiry(uploaded, run_expiry(store, uploaded, before=35))
    later = run_expiry(store, expired, now_ms=NOW_MS + EXPIRY_GRACE_MS - 1, attempt=21)
    assert later == (30, "", 0), "nothing has changed"
    later = run_expiry(store, expired, now_ms=NOW_MS + EXPIRY_GRACE_MS, attempt=22)
    assert (later.first, later.name != "") == (30, True)
    head = read_manifest(store, recorded_after_expiry(uploaded, later))
    assert (head.pages, [entry.first for entry in head.newest_objects]) == ((), [30, 40, 50])
    uploaded = upload(store, KEY, job_after(recorded_after_expiry(uploaded, later), attempt=23))
    assert read_manifest(store, uploaded).first == 30


def test_uploads_continue_after_all_objects_have_expired(archived):
    store, uploaded = archived
    expired = recorded_after_expiry(uploaded, run_expiry(store, uploaded, before=100))
    later = recorded_after_expiry(
        uploaded, run_expiry(store, expired, now_ms=NOW_MS + EXPIRY_GRACE_MS, attempt=21)
    )
    assert not read_manifest(store, later).newest_objects
    uploaded = upload(store, KEY, job_after(later, attempt=22))
    head = read_manifest(store, uploaded)
    assert (head.first, [entry.first for entry in head.newest_objects], head.last) == (60, [60], 69)


def test_a_manifest_that_reads_back_differently_is_an_error(archived):
    store, new_manifest = archived
    store.read = lambda name: ArchiveStore.read(store, name) + b" " * ("-20.json" in name)
    with pytest.raises(ChecksumMismatch, match=r"manifest .*-20\.json: expected the written bytes"):
        run_expiry(store, new_manifest, before=35)
