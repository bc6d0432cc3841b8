"""A garbage collection deletes only files that no manifest will list."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest

from tests.unit.archive.test_upload import CLUSTER, KEY, NONCE, job_after, read_manifest
from tests.unit.archive.test_upload_faults import Crash, FailingStore
from waltz_core.archive import garbage_collection, manifest
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.file_names import FileOrigin, origin_of
from waltz_core.archive.garbage_collection import (
    REPLACED_GRACE_MS,
    CollectedGarbage,
    GarbageCollectionJob,
    collect_garbage,
)
from waltz_core.archive.manifest import RecordedManifest, decode_page
from waltz_core.archive.pins import is_pinned, pin_objects, pins_of, unpin_objects
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import upload
from waltz_core.errors import (
    ArchiveUnavailable,
    BadFormat,
    BadRequest,
    ChecksumMismatch,
    ObjectMissing,
)
from waltz_core.records.checksum import crc32

LATER_MS = 1 << 50
OTHER_NONCE = bytes([1] * 16)


class CollectedStore(FailingStore):
    """A store whose lists and deletes also fail as planned; `on_delete` runs before each delete."""

    on_delete = staticmethod(lambda: None)

    def list_files(self, folder):
        self._fail_if_chosen("list", folder, is_after=False)
        files = super().list_files(folder)
        self._fail_if_chosen("list", folder, is_after=True)
        return files

    def delete(self, name):
        self.on_delete()
        self._fail_if_chosen("delete", name, is_after=False)
        super().delete(name)
        self._fail_if_chosen("delete", name, is_after=True)


def all_files(store):
    return {
        file.name: ArchiveStore.read(store, file.name)
        for file in ArchiveStore.list_files(store, "")
    }


def listed_files(store, new_manifest):
    """Return the names of a manifest, its pages and its objects."""
    head = read_manifest(ArchiveStore(store.url), new_manifest)
    names = {new_manifest.name, *(entry.name for entry in head.newest_objects)}
    for page in head.pages:
        entries = decode_page(page, ArchiveStore.read(store, page.name)).entries
        names |= {page.name, *(entry.name for entry in entries)}
    return names


def collection_job(new_manifest, *, session=10, nonce=OTHER_NONCE, attempt=1, **changes):
    recorded = RecordedManifest(
        3, new_manifest.last, new_manifest.chain, new_manifest.name, new_manifest.file_crc
    )
    return GarbageCollectionJob(session, nonce, attempt, recorded._replace(**changes))


def run(store, job, *, now_ms=LATER_MS):
    return collect_garbage(store, KEY, job, now_ms=now_ms)


def fail_upload(store, new_manifest, *, attempt, writes=1, kind=Crash, **changes):
    """Let an upload fail after it has written `writes` files."""
    store.fail_next(2 * writes, is_after=False, kind=kind)
    with pytest.raises(kind):
        upload(store, KEY, job_after(new_manifest, attempt=attempt, **changes))
    store.fail_next(-1, is_after=False)


@pytest.fixture
def archived(tmp_path, monkeypatch):
    """Return a store and its manifest of session 9, with a page and files of failed attempts."""
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    store = CollectedStore(f"file://{tmp_path}")
    uploaded = None
    for attempt in range(0, 12, 2):
        uploaded = upload(store, KEY, job_after(uploaded, attempt=attempt))
        fail_upload(store, uploaded, attempt=attempt + 1, writes=1 + attempt // 2 % 2)
    assert read_manifest(ArchiveStore(store.url), uploaded).pages
    (tmp_path / f"{CLUSTER}/3/objects/0-9-9-{NONCE.hex()}-99.parquet.tmp").write_bytes(b"half")
    return store, uploaded


def test_a_file_name_contains_the_attempt_that_has_written_the_file(archived):
    store, _ = archived
    origins = [origin_of(name) for name in all_files(store)]
    assert {origin.attempt for origin in origins} == {*range(12), 99}
    assert {(origin.session_id, origin.nonce) for origin in origins} == {(9, NONCE)}
    folder, attempt_suffix = f"{CLUSTER}/3/objects", f"9-{NONCE.hex()}-2"
    assert origin_of(f"{folder}/0-1-{attempt_suffix}.parquet") == FileOrigin(9, NONCE, 2)
    for name in (
        f"{folder}/0-1-{attempt_suffix}.json",
        f"{folder}/0-1-{attempt_suffix}.parquet.tmp.tmp",
        f"{folder}/0-01-{attempt_suffix}.parquet",
        f"{folder}/0-1-9-{'AB' * 16}-2.parquet",
        f"{folder}/deep/0-1-{attempt_suffix}.parquet",
        f"{folder}/-1-1-{attempt_suffix}.parquet",
        f"{folder}/0-1-{attempt_suffix}.parquet\n",
        f"{folder}/1-{attempt_suffix}.json",
        f"{CLUSTER}/3/other/0-1-{attempt_suffix}.parquet",
        "README",
    ):
        assert origin_of(name) is None, name


def test_files_of_the_recorded_manifest_remain_readable(archived):
    store, new_manifest = archived
    before = all_files(store)
    remaining = listed_files(store, new_manifest)
    result = run(store, collection_job(new_manifest))
    after = all_files(store)
    assert set(after) == remaining
    assert after.items() <= before.items()
    garbage = [len(data) for name, data in before.items() if name not in remaining]
    assert result == CollectedGarbage(len(garbage), sum(garbage), 0, has_more=False)
    reader = ArchiveReader(
        ArchiveStore(store.url), new_manifest.name, new_manifest.file_crc, ArchiveCache(1 << 20)
    )
    assert reader.read_range(0, new_manifest.last, 1 << 20).lengths.size == new_manifest.last + 1
    assert run(store, collection_job(new_manifest)) == CollectedGarbage(0, 0, 0, has_more=False)


def test_only_manifests_are_deleted_while_another_cluster_uses_the_objects(archived):
    store, new_manifest = archived
    remaining = listed_files(store, new_manifest)
    before = set(all_files(store))
    objects = {each for each in before if "/objects/" in each}
    name = pin_objects(store, KEY, b"k" * 16)
    run(store, collection_job(new_manifest))
    assert set(all_files(store)) == remaining | objects | {name}
    assert before > remaining | objects
    store.delete(name)
    run(store, collection_job(new_manifest))
    assert set(all_files(store)) == remaining


def test_a_pin_that_is_written_during_a_collection_stops_it(archived):
    """A restore writes the pin, then checks the objects; it detects no delete after its check."""
    store, new_manifest = archived
    deleted = []

    def pin_after_one():
        if not deleted:
            pin_objects(ArchiveStore(store.url), KEY, b"k" * 16)
        deleted.append(None)

    before = {all_file for all_file in all_files(store) if "/objects/" in all_file}
    store.on_delete = pin_after_one
    result = run(store, collection_job(new_manifest))
    after = {all_file for all_file in all_files(store) if "/objects/" in all_file}
    assert len(before - after) == 1
    assert result.file_count == len(deleted) > 1, "replaced manifests are deleted all the same"
    assert not result.has_more


def test_pins_are_listed_and_removed(archived):
    store, _ = archived
    restored = UUID(int=7)
    assert pins_of(store, KEY) == []
    with pytest.raises(
        BadRequest, match=f"expected a pin of the cluster with key {restored}, found none"
    ):
        unpin_objects(store, KEY, restored.bytes)
    pin_objects(store, KEY, restored.bytes)
    assert pins_of(store, KEY) == [str(restored)]
    with pytest.raises(BadRequest, match=f"found {restored}"):
        unpin_objects(store, KEY, OTHER_NONCE)
    unpin_objects(store, KEY, restored.bytes)
    assert not is_pinned(store, KEY)


def test_the_temporary_file_of_a_pin_is_listed_and_removed_like_the_pin(archived):
    """A restore into a directory was killed while it wrote the pin."""
    store, _ = archived
    restored = UUID(int=7)
    store.write(f"{CLUSTER}/pins/{restored}.tmp", b"")
    assert is_pinned(store, KEY)
    assert pins_of(store, KEY) == [str(restored)]
    unpin_objects(store, KEY, restored.bytes)
    assert not is_pinned(store, KEY)


def set_modified_time(store, name, modified_ms):
    os.utime(Path(store.url.removeprefix("file://")) / name, (0, modified_ms / 1_000))


def heads_of(store):
    """Return the names of all heads, complete or not, by their version."""
    heads = {}
    for name in sorted(all_files(store)):
        if "/manifests/" in name and "-page" not in name:
            heads.setdefault(int(name.rpartition("/")[2].partition("-")[0]), []).append(name)
    return heads


def test_a_replaced_manifest_is_kept_for_the_grace_period(archived):
    """Even an old manifest is kept, because lagging replicas have only its name."""
    store, new_manifest = archived
    now_ms = 10 * REPLACED_GRACE_MS
    heads, listed = heads_of(store), listed_files(store, new_manifest)
    for version, names in heads.items():
        for name in names:
            set_modified_time(
                store, name, now_ms if version >= 5 else now_ms - 2 * REPLACED_GRACE_MS
            )
    run(store, collection_job(new_manifest), now_ms=now_ms)
    assert set(all_files(store)) == {*listed, *heads[4], *heads[5]}
    run(store, collection_job(new_manifest), now_ms=now_ms + REPLACED_GRACE_MS - 1)
    assert set(all_files(store)) == {*listed, *heads[4], *heads[5]}
    run(store, collection_job(new_manifest), now_ms=now_ms + REPLACED_GRACE_MS)
    assert set(all_files(store)) == listed


def test_files_of_ended_attempts_of_the_same_session_are_deleted(archived):
    store, new_manifest = archived
    fail_upload(store, new_manifest, attempt=20, session_id=10, nonce=OTHER_NONCE)
    fail_upload(store, new_manifest, attempt=21, session_id=10, nonce=OTHER_NONCE)
    run(store, collection_job(new_manifest, attempt=21))
    (remaining,) = set(all_files(store)) - listed_files(store, new_manifest)
    assert origin_of(remaining) == FileOrigin(10, OTHER_NONCE, 21)
    run(store, collection_job(new_manifest, attempt=22))
    assert set(all_files(store)) == listed_files(store, new_manifest)


@pytest.mark.parametrize("suffix", ["", ".tmp"])
@pytest.mark.parametrize(
    "origin", [FileOrigin(11, OTHER_NONCE, 0), FileOrigin(10, NONCE, 0), FileOrigin(11, NONCE, 5)]
)
def test_a_file_of_a_later_or_different_owner_stops_the_collection(
    archived, tmp_path, origin, suffix
):
    store, new_manifest = archived
    (tmp_path / f"{CLUSTER}/3/manifests/9-{origin}.json{suffix}").write_bytes(b"x")
    before = all_files(store)
    with pytest.raises(
        BadRequest, match=f"no files of other owners since session 10, found .*9-{origin}."
    ):
        run(store, collection_job(new_manifest))
    assert all_files(store) == before


def roll_back(store, new_manifest, *, head_version):
    """Upload in session 10 after the manifest of session 9 with version `head_version`."""
    head = next(name for name in heads_of(store)[head_version] if f"/{head_version}-9-" in name)
    data = ArchiveStore.read(store, head)
    found = manifest.Manifest.from_bytes(data, head)
    old = new_manifest._replace(last=found.last, chain=found.chain, name=head, file_crc=crc32(data))
    return upload_in_session_10(store, old, attempt=0)


def upload_in_session_10(store, new_manifest, *, attempt):
    return upload(
        store, KEY, job_after(new_manifest, attempt=attempt, session_id=10, nonce=OTHER_NONCE)
    )


def test_nothing_is_deleted_after_a_rollback_of_zookeeper(archived):
    """Backups may list files of earlier manifests, also below the newest recorded version."""
    store, new_manifest = archived
    newer_manifest = roll_back(store, new_manifest, head_version=4)
    assert {6, 5} <= set(heads_of(store))
    for attempt in range(1, 6):
        before = all_files(store)
        with pytest.raises(
            BadRequest, match=r"from 6 \(session 9, .*\) to 5 \(session 10, .*/5-10-.*\).*back"
        ):
            run(store, collection_job(newer_manifest, attempt=attempt))
        with pytest.raises(BadRequest, match=r"decreased from 6 \(session 9, "):
            run(store, collection_job(newer_manifest, session=11, nonce=NONCE, attempt=0))
        assert all_files(store) == before
        newer_manifest = upload_in_session_10(store, newer_manifest, attempt=attempt)
    # The operator no longer needs the backups that need these files.
    for name in heads_of(store)[6]:
        if "/6-9-" in name:
            store.delete(name)
    run(store, collection_job(newer_manifest, attempt=9))
    assert set(all_files(store)) == listed_files(store, newer_manifest)


def test_failed_attempts_of_several_sessions_are_not_taken_for_a_rollback(archived):
    """Each owner may have written the version after the recorded version, and no higher version."""
    store, new_manifest = archived
    for session in (10, 11, 12):
        upload(
            store, KEY, job_after(new_manifest, attempt=50, session_id=session, nonce=OTHER_NONCE)
        )
    owner_fields = {"session_id": 13, "nonce": OTHER_NONCE}
    last = upload(store, KEY, job_after(new_manifest, attempt=0, **owner_fields))
    run(store, collection_job(last, session=13))
    assert set(all_files(store)) == listed_files(store, last)


FAULTS = {
    "manifest missing": ({"name": "x.json"}, ObjectMissing, "x.json, because it does not exist"),
    "other CRC": ({"file_crc": 1}, ChecksumMismatch, "expected CRC 00000001"),
    "other end": ({"last": 8}, BadFormat, "up to transaction 8 with chain hash"),
    "other chain": ({"chain": OTHER_NONCE}, BadFormat, f"with chain hash {OTHER_NONCE.hex()}"),
    "other partition": (
        {"partition_id": 4},
        BadFormat,
        "expected partition 4 .* found partition 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_deleted_if_the_recorded_manifest_differs(archived, fault):
    changes, error, reason = FAULTS[fault]
    store, new_manifest = archived
    before = all_files(store)
    with pytest.raises(error, match=reason):
        run(store, collection_job(new_manifest, **changes))
    assert all_files(store) == before


@pytest.mark.parametrize("kind", ["parquet", "-page.json"])
def test_nothing_is_deleted_if_a_listed_file_is_missing(archived, kind):
    store, new_manifest = archived
    lost = min(name for name in listed_files(store, new_manifest) if name.endswith(kind))
    store.delete(lost)
    before = all_files(store)
    with pytest.raises(ObjectMissing, match=lost):
        run(store, collection_job(new_manifest))
    assert all_files(store) == before


def test_files_with_unknown_names_and_files_of_other_partitions_are_kept(archived, tmp_path):
    store, new_manifest = archived
    others = [
        f"{CLUSTER}/3/objects/notes.txt",
        f"{CLUSTER}/3/manifests/backup/1-9-{NONCE.hex()}-1.json",
        f"{CLUSTER}/3/other",
        f"{CLUSTER}/4/objects/0-9-99-{NONCE.hex()}-1.parquet",
        f"{CLUSTER}/33/objects/0-9-1-{NONCE.hex()}-1.parquet",
    ]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert run(store, collection_job(new_manifest)).unknown_count == 2
    assert set(all_files(store)) == {*others, *listed_files(store, new_manifest)}


def test_a_collection_deletes_a_few_files_at_a_time(archived, monkeypatch):
    monkeypatch.setattr(garbage_collection, "DELETIONS_MAX", 5)
    store, new_manifest = archived
    garbage = len(all_files(store)) - len(listed_files(store, new_manifest))
    assert garbage > 10
    result = run(store, collection_job(new_manifest))
    assert (result.file_count, result.has_more) == (5, True)
    garbage -= 5
    while (result := run(store, collection_job(new_manifest))).has_more:
        assert result.file_count == 5
        garbage -= 5
    assert result.file_count == garbage


@pytest.mark.parametrize("kind", [ArchiveUnavailable, Crash])
@pytest.mark.parametrize("is_after", [False, True])
def test_after_a_failure_or_a_crash_at_any_step_a_later_collection_deletes_the_rest(
    archived, is_after, kind
):
    store, new_manifest = archived
    remaining = listed_files(store, new_manifest)
    store.fail_next(-1, is_after=False)
    number, is_failing = 0, True
    while is_failing:
        fail_upload(store, new_manifest, attempt=100 + number)
        store.fail_next(number, is_after=is_after, kind=kind)
        try:
            run(store, collection_job(new_manifest))
            is_failing = False
        except kind:
            number += 1
        assert remaining <= set(all_files(store))
    assert number >= 5, "the manifest, a page, two lists and a delete"
    assert set(all_files(store)) == remaining


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_fenced_owner_deletes_no_file_of_the_later_owner(archived, is_seen):
    """The later owner archives before the fenced owner's list, or between its deletes."""
    store, new_manifest = archived
    later = []

    def archive():
        if not later:
            later.append(None)
            owner_fields = {"session_id": 10, "nonce": OTHER_NONCE}
            second = upload(
                ArchiveStore(store.url), KEY, job_after(new_manifest, attempt=1, **owner_fields)
            )
            later[0] = upload(
                ArchiveStore(store.url), KEY, job_after(second, attempt=2, **owner_fields)
            )

    if is_seen:
        archive()
    store.on_delete = archive
    with suppress(BadRequest):
        run(store, collection_job(new_manifest, session=9, nonce=NONCE, attempt=12))
        assert not is_seen
    assert listed_files(store, later[0]) <= set(all_files(store))


def test_a_late_collection_keeps_later_attempts_of_its_session(archived):
    """The owner has abandoned the collection, and has uploaded objects since."""
    store, new_manifest = archived
    owner_fields = {"session_id": 10, "nonce": OTHER_NONCE}
    second = upload(store, KEY, job_after(new_manifest, attempt=8, **owner_fields))
    run(store, collection_job(new_manifest, attempt=7))
    assert set(all_files(store)) == listed_files(store, new_manifest) | listed_files(store, second)


def test_progress_is_reported_with_each_call_of_the_store(archived):
    store, new_manifest = archived
    store.fail_next(-1, is_after=False)
    calls = []
    collect_garbage(
        store,
        KEY,
        collection_job(new_manifest),
        now_ms=LATER_MS,
        on_progress=lambda: calls.append(1),
    )
    assert len(calls) == len(store.operations) - 1, "every call but the read of the head"
    calls.clear()
    upload(store, KEY, job_after(new_manifest, attempt=50), lambda: calls.append(1))
    assert len(calls) >= 4


def test_listed_files_have_sizes_and_times(tmp_path):
    store = ArchiveStore(f"file://{tmp_path}")
    store.write("1/a", b"abc")
    (file,) = store.list_files("1")
    modified_ms = Path(tmp_path / "1/a").stat().st_mtime_ns // 1_000_000
    assert file == ("1/a", 3, modified_ms)
