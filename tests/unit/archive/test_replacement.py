"""A corrupt or missing object is replaced by one with the same IDs and chain."""

import os
from dataclasses import replace

import pytest

from tests.unit.archive.test_garbage_collection import all_files, collection_job, listed_files, run
from tests.unit.archive.test_upload import KEY, CorruptingStore, job_after, read_manifest
from tests.unit.archive.test_upload_faults import FailingStore
from waltz_core.archive import manifest
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.manifest import decode_page
from waltz_core.archive.manifest_jobs import NewManifest, ReplacedObject
from waltz_core.archive.pins import pin_objects
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import upload
from waltz_core.errors import ArchiveUnavailable, BadFormat, ChecksumMismatch, WaltzError

OBJECT_IDS = 10  # the number of IDs in each object


class ArchivedLog:
    """Six objects with IDs 0..59; a page of the manifest lists the first two."""

    def __init__(self, folder):
        self.store = CorruptingStore(f"file://{folder}")
        self.jobs, self.new_manifest = [], None
        for attempt in range(6):
            self.jobs.append(job_after(self.new_manifest, attempt=attempt))
            self.new_manifest = upload(self.store, KEY, self.jobs[-1])
        head = self.head()
        assert (len(head.pages), len(head.newest_objects)) == (1, 4)
        self.entries = self.entries_of(self.new_manifest)

    def head(self, new_manifest=None):
        return read_manifest(self.store, new_manifest or self.new_manifest)

    def entries_of(self, new_manifest):
        head = self.head(new_manifest)
        paged = [
            entry
            for page in head.pages
            for entry in decode_page(page, self.store.read(page.name)).entries
        ]
        return [*paged, *head.newest_objects]

    def path(self, number):
        return self.store.url.removeprefix("file://") + "/" + self.entries[number].name

    def corrupt_footer(self, number):
        """Change the last bytes of an object: those of its footer."""
        with open(self.path(number), "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"spoiled!")

    def job(self, number, *, attempt=20, **changes):
        """Return the job that replaces an object with the batches of the log."""
        replaced = ReplacedObject(
            self.entries[number].name, self.new_manifest.last, self.new_manifest.chain
        )
        fields = {"manifest": self.new_manifest.name, "manifest_crc": self.new_manifest.file_crc}
        fields |= {"attempt": attempt, "replaced_object": replaced} | changes
        return replace(self.jobs[number], **fields)

    def read(self, new_manifest, first):
        cache = ArchiveCache(1 << 20)
        try:
            reader = ArchiveReader(self.store, new_manifest.name, new_manifest.file_crc, cache)
            return bytes(reader.read_range(first, first + OBJECT_IDS - 1, 1 << 20).records)
        finally:
            cache.close()


@pytest.fixture
def archived(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    return ArchivedLog(tmp_path)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_the_manifest_lists_the_new_object_in_place_of_the_old_one(archived, number):
    before = archived.head()
    whole = archived.read(archived.new_manifest, number * OBJECT_IDS)
    archived.corrupt_footer(number)
    with pytest.raises(WaltzError, match=archived.entries[number].name):
        archived.read(archived.new_manifest, number * OBJECT_IDS)
    kept = all_files(archived.store)
    uploaded = upload(archived.store, KEY, archived.job(number))
    head = archived.head(uploaded)
    assert (head.version, head.first, head.last, head.chain) == (
        before.version + 1,
        before.first,
        before.last,
        before.chain,
    )
    assert (uploaded.last, uploaded.chain) == (before.last, before.chain)
    old, new = archived.entries, archived.entries_of(uploaded)
    assert [each for each in new if each not in old] == [new[number]]
    assert new[number].name.endswith("-20.parquet")
    assert new[number][1:] == old[number][1:], "same IDs, chain, bytes and times"
    assert [page[2:] for page in head.pages] == [page[2:] for page in before.pages]
    assert archived.read(uploaded, number * OBJECT_IDS) == whole
    assert kept.items() <= all_files(archived.store).items(), "nothing is overwritten or deleted"


def test_a_missing_object_is_written_again(archived):
    kept = archived.store.read(archived.entries[1].name)
    archived.store.delete(archived.entries[1].name)
    uploaded = upload(archived.store, KEY, archived.job(1))
    assert archived.store.read(archived.entries_of(uploaded)[1].name) == kept


def test_uploads_continue_after_a_replacement_and_old_pages_remain_valid(archived):
    uploaded = upload(archived.store, KEY, archived.job(0))
    uploaded = upload(
        archived.store, KEY, archived.job(2, attempt=21, **manifest_fields(archived, uploaded))
    )
    uploaded = upload(archived.store, KEY, job_after(uploaded, attempt=22))
    head = archived.head(uploaded)
    assert [each.first for each in archived.entries_of(uploaded)] == list(range(0, 70, OBJECT_IDS))
    assert [head.last, len(head.pages), len(head.newest_objects)] == [69, 2, 3]
    for first in range(0, 70, OBJECT_IDS):
        archived.read(uploaded, first)


def manifest_fields(archived, new_manifest):
    """Return the fields of a job that follows a manifest."""
    assert (new_manifest.last, new_manifest.chain) == (
        archived.new_manifest.last,
        archived.new_manifest.chain,
    )
    return {"manifest": new_manifest.name, "manifest_crc": new_manifest.file_crc}


@pytest.mark.parametrize("number", [1, 3])
def test_a_log_with_other_records_or_other_ids_replaces_no_object(archived, number):
    first = number * OBJECT_IDS
    other = job_after(NewManifest(first - 1, bytes([9] * 16), 0, "", 0))
    shorter = archived.jobs[number].runs[:1]
    before = all_files(archived.store)
    for changes in ({"runs": other.runs}, {"runs": shorter}):
        with pytest.raises(
            BadFormat,
            match=r"expected an object with transactions "
            rf"{first}\.\..*chain hash",
        ):
            upload(archived.store, KEY, archived.job(number, **changes))
    assert all_files(archived.store) == before


@pytest.mark.parametrize("number", [0, 4])
def test_an_object_that_was_replaced_before_is_not_replaced_again(archived, number):
    uploaded = upload(archived.store, KEY, archived.job(number))
    before = all_files(archived.store)
    second_replacement = upload(
        archived.store, KEY, archived.job(number, attempt=21, **manifest_fields(archived, uploaded))
    )
    assert (second_replacement.name, second_replacement.last) == ("", uploaded.last)
    assert all_files(archived.store) == before


@pytest.mark.parametrize("wrong", ["-20.parquet", "-20-page.json", "-20.json"])
def test_an_object_is_not_replaced_if_the_new_file_reads_back_differently(archived, wrong):
    archived.store.wrong = wrong
    with pytest.raises(ChecksumMismatch, match=wrong):
        upload(archived.store, KEY, archived.job(0))


def test_a_replacement_that_fails_at_any_operation_does_not_change_the_archive(archived):
    store = archived.store = FailingStore(archived.store.url)
    attempt, is_done = 20, False
    while not is_done:
        before = listed_files(store, archived.new_manifest)
        store.fail_next(attempt - 20, is_after=attempt % 2 == 0)
        try:
            upload(store, KEY, archived.job(0, attempt=attempt))
            is_done = True
        except ArchiveUnavailable:
            attempt += 1
        store.fail_next(-1, is_after=False)
        assert before <= set(all_files(store))
    assert attempt - 20 >= 6, "manifest and page, and three files, each written and read"


@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_old_object_is_garbage_once_the_new_manifest_is_recorded(archived, is_pinned):
    if is_pinned:
        pin_objects(archived.store, KEY, bytes(16))
    before = listed_files(archived.store, archived.new_manifest)
    upload(archived.store, KEY, archived.job(0))
    run(archived.store, collection_job(archived.new_manifest, attempt=21))
    assert before <= set(all_files(archived.store)), "the old manifest is the recorded one"
    uploaded = upload(archived.store, KEY, archived.job(0, attempt=22))
    run(archived.store, collection_job(uploaded, attempt=23))
    names = set(ArchiveStore(archived.store.url).list_names(""))
    assert listed_files(archived.store, uploaded) <= names
    assert (archived.entries[0].name in names) == is_pinned
    assert {entry.name for entry in archived.entries[1:]} <= names
