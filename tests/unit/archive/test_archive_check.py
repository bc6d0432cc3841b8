"""The check of an archive names each missing or corrupt file, and no other."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.archived_log import (
    CLUSTER_KEY,
    FIRST_COMMIT_MS,
    PARTITION_ID,
    encode_object,
    make_batches,
    write_archive,
    write_manifest,
)
from waltz_core.archive import archive_check
from waltz_core.archive.archive_check import ArchiveCheck, RecordedArchive
from waltz_core.archive.manifest import ManifestPage
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import ArchiveUnavailable, ObjectMissing
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN

PAGE = f"{PARTITION_ID}/manifests/page"


class Archive:
    """A log in an archive: four objects; a page of the manifest lists the first two."""

    def __init__(self, folder: Path, **options):
        self.folder = folder
        self.store = ArchiveStore(f"file://{folder}")
        self.log = write_archive(self.store, page_entries=2, **options)
        self.listed = [*self._page(), *self.log.manifest.newest_objects]

    def _page(self):
        return ManifestPage.from_bytes(self.store.read(PAGE), PAGE).entries

    @property
    def recorded(self):
        manifest = self.log.manifest
        return RecordedArchive(
            manifest.first, manifest.last, manifest.chain, self.log.name, self.log.crc
        )

    def path(self, name):
        return self.folder / name

    def object(self, number):
        return f"{PARTITION_ID}/objects/{number}.parquet"

    def relist(self, entries):
        """Write a manifest with other entries of the same IDs, without a page."""
        self.listed = entries
        manifest = replace(
            self.log.manifest, pages=(), newest_objects=tuple(entries), chain=entries[-1].chain
        )
        crc = write_manifest(self.store, manifest, "relisted")
        self.log = self.log._replace(manifest=manifest, name="relisted", crc=crc)

    def flip(self, name, at):
        """Change one byte; `at` is its position as a fraction of the file's length."""
        data = bytearray(self.path(name).read_bytes())
        data[int(at * len(data))] ^= 0x10
        self.path(name).write_bytes(data)

    def check(self, recorded=None, *, first=0, last=None, partition=PARTITION_ID):
        """Check the whole archive; return the check. The manifest in ZooKeeper does not change."""
        check = ArchiveCheck(self.store, CLUSTER_KEY, partition, first=first, last=last)
        recorded = recorded or self.recorded
        try:
            check.begin(recorded)
        except ObjectMissing as error:
            check.note_missing_manifest(recorded, error)
            return check
        while True:
            try:
                if not check.check_next_file():
                    return check
            except ObjectMissing as error:
                check.note_missing_file(error)

    def problem(self, name, **options):
        """Check the whole archive; return the problem of the only corrupt file."""
        check = self.check(**options)
        assert [bad_file.name for bad_file in check.bad_files] == [name]
        assert check.next_id == self.log.manifest.last + 1 or not check.object_count
        return check.bad_files[0]


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "archive")


def test_an_archive_without_faults_has_no_findings(archive):
    check = archive.check()
    assert check.bad_files == []
    assert (check.object_count, check.next_id) == (4, archive.log.manifest.last + 1)
    sizes = [archive.path(archive.object(number)).stat().st_size for number in range(4)]
    assert check.byte_count == sum(sizes)


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.9999])
@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_byte_of_an_object_is_found(archive, at, number):
    """A byte of its pages, of its footer or at its end."""
    archive.flip(archive.object(number), at)
    problem = archive.problem(archive.object(number))
    assert "expected a file with CRC-32" in problem.problem


def test_wrong_records_are_found_even_if_the_crc_of_the_file_matches(tmp_path):
    """For example, an object that was damaged before it was written."""
    intact, damaged = Archive(tmp_path / "good"), Archive(tmp_path / "bad", seed=9)
    name = intact.object(1)
    (entry,) = (each for each in damaged.listed if each.name == name)
    shutil.copy(damaged.path(name), intact.path(name))
    wrong = [
        each._replace(file_bytes=entry.file_bytes, file_crc=entry.file_crc)
        if each.name == name
        else each
        for each in intact.listed
    ]
    intact.relist(wrong)
    assert "the chain hash before transaction" in intact.problem(name).problem


def test_truncated_missing_and_swapped_objects_are_found(archive):
    one = archive.path(archive.object(1))
    data = one.read_bytes()
    one.write_bytes(data[:-100])
    problem = archive.problem(archive.object(1))
    assert f"expected a file of {len(data)} bytes, found {len(data) - 100}" in problem.problem
    one.unlink()
    problem = archive.problem(archive.object(1))
    assert "it does not exist" in problem.problem
    assert (problem.first, problem.last) == archive.listed[1][1:3]
    shutil.copy(archive.path(archive.object(3)), one)
    expected, other = (archive.listed[each].first for each in (1, 3))
    assert (
        f"expected {expected} as the first transaction ID, found {other}"
        in archive.problem(archive.object(1)).problem
    )


def test_a_corrupt_or_missing_manifest_is_found(archive):
    last = archive.log.manifest.last
    archive.flip(archive.log.name, 0.5)
    problem = archive.problem(archive.log.name)
    assert f"expected {archive.log.crc:08x}" in problem.problem
    assert (problem.first, problem.last) == (0, last)
    archive.path(archive.log.name).unlink()
    assert "it does not exist" in archive.problem(archive.log.name).problem


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"last": 17}, "expected 17 as the last ID (recorded in ZooKeeper)"),
        ({"first": 1}, "expected 1 as the first ID (recorded in ZooKeeper), found 0"),
        ({"chain": b"other chain here"}, " as the chain (recorded in ZooKeeper), found "),
    ],
)
def test_a_manifest_that_differs_from_zookeeper_is_found(archive, change, text):
    recorded = archive.recorded._replace(**change)
    assert text in archive.problem(archive.log.name, recorded=recorded).problem


def test_the_archive_of_another_partition_is_not_accepted(archive):
    problem = archive.problem(archive.log.name, partition=PARTITION_ID + 1)
    assert "expected 4 as the partition (recorded in ZooKeeper), found 3" in problem.problem


def test_a_corrupt_or_missing_page_hides_only_the_objects_that_it_lists(archive):
    archive.flip(PAGE, 0.5)
    check = archive.check()
    assert [bad_file.name for bad_file in check.bad_files] == [PAGE]
    assert " as CRC-32, found " in check.bad_files[0].problem
    assert check.object_count == 2
    archive.path(PAGE).unlink()
    assert "it does not exist" in archive.problem(PAGE).problem
    # The objects after it are still checked.
    archive.flip(archive.object(3), 0.5)
    assert [bad_file.name for bad_file in archive.check().bad_files] == [PAGE, archive.object(3)]


def test_the_check_returns_the_names_of_all_wrong_files(archive):
    archive.path(archive.object(0)).unlink()
    archive.flip(archive.object(1), 0.5)
    archive.path(archive.object(3)).unlink()
    check = archive.check()
    assert [bad_file.name for bad_file in check.bad_files] == [
        archive.object(each) for each in (0, 1, 3)
    ]
    assert check.object_count == 2


def test_a_check_of_a_range_reads_only_the_objects_with_its_ids(archive):
    for number in (0, 3):
        archive.path(archive.object(number)).unlink()
    one, two = archive.listed[1:3]
    check = archive.check(first=one.first + 1, last=two.last - 1)
    assert (check.bad_files, check.object_count) == ([], 2)
    assert archive.check(first=one.first + 1, last=two.last + 1).object_count == 2
    assert len(archive.check(first=one.first - 1, last=two.last).bad_files) == 1


def test_a_chain_that_does_not_continue_the_previous_object_is_found(tmp_path):
    """The check also detects this if it begins with the second object."""
    intact, other = Archive(tmp_path / "good"), Archive(tmp_path / "other", seed=9)
    entries = intact.listed
    for number in (2, 3):
        shutil.copy(other.path(other.object(number)), intact.path(intact.object(number)))
    intact.relist([*entries[:2], *other.listed[2:]])
    for first in (0, entries[2].first):
        check = intact.check(first=first)
        assert [bad_file.name for bad_file in check.bad_files] == [intact.object(2)]
        assert f"the chain hash before transaction {entries[2].first}" in check.bad_files[0].problem


def test_a_manifest_chain_that_differs_from_the_object_is_found(archive):
    archive.relist([*archive.listed[:3], archive.listed[3]._replace(chain=b"other chain here")])
    problem = archive.problem(archive.object(3)).problem
    assert f" as the chain hash at transaction {archive.log.manifest.last}, found " in problem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cluster_key": bytes(16)}, f"expected {CLUSTER_KEY.hex()} as cluster key, found 0000"),
        ({"partition_id": 4}, "expected 3 as partition, found 4"),
        (
            {"chain_before": b"not the genesis!"},
            f"expected {bytes(16).hex()} as the chain hash before transaction 0",
        ),
    ],
)
def test_an_object_of_another_log_is_found_by_its_metadata(archive, changes, text):
    chain = changes.get("chain_before", GENESIS_CHAIN)
    records, lineage = make_batches(0, sizes=(3, 1, 40, 7), chain=chain)
    data = encode_object(records, lineage, **changes)
    archive.path(archive.object(0)).write_bytes(data)
    entry = archive.listed[0]._replace(
        file_bytes=len(data), file_crc=crc32(data), chain=lineage[-1].chain
    )
    archive.relist([entry, *archive.listed[1:]])
    assert text in archive.check().bad_files[0].problem


def test_a_page_whose_objects_differ_from_the_manifest_is_found(archive):
    """After such a page, the check cannot verify the chain."""
    entries = archive.listed
    manifest = replace(archive.log.manifest, pages=(), newest_objects=tuple(entries))
    for number in (0, 1):
        page = ManifestPage((entries[number],))
        archive.store.write(f"page {number}", page.to_bytes())
        manifest = manifest.with_page(f"page {number}", page)
    wrong = ManifestPage((entries[0],)).to_bytes()
    archive.path("page 1").write_bytes(wrong)
    wrong_page = manifest.pages[1]._replace(file_crc=crc32(wrong))
    manifest = replace(manifest, pages=(manifest.pages[0], wrong_page))
    crc = write_manifest(archive.store, manifest, "paged")
    recorded = RecordedArchive(manifest.first, manifest.last, manifest.chain, "paged", crc)
    check = archive.check(recorded)
    assert [bad_file.name for bad_file in check.bad_files] == ["page 1"]
    expected, found = entries[1][1:3], entries[0][1:3]
    assert f"expected {expected} as IDs, found {found}" in check.bad_files[0].problem
    assert check.object_count == 3


@pytest.mark.parametrize("field", ["commit_ms_min", "commit_ms_max"])
def test_wrong_commit_times_of_the_manifest_are_found(archive, field):
    """A reader would skip an object that it needs."""
    entries = archive.listed
    entries[1] = entries[1]._replace(**{field: FIRST_COMMIT_MS + 7})
    archive.relist(entries)
    assert " as commit times, found " in archive.problem(archive.object(1)).problem


def test_rows_outside_of_the_ids_in_the_manifest_are_ignored(tmp_path):
    archive = Archive(tmp_path / "archive", objects=1, unused=(2,))
    assert archive.check().bad_files == []


def test_a_check_continues_after_its_manifest_was_replaced(archive):
    """Expiry has deleted files before the check has read them."""
    log = archive.log
    check = ArchiveCheck(archive.store, CLUSTER_KEY, PARTITION_ID, first=0)
    check.begin(archive.recorded)
    assert check.check_next_file()  # the page
    assert check.check_next_file()  # object 0
    for number in (1, 2):
        archive.path(archive.object(number)).unlink()
    entries = archive.listed
    first = entries[3].first + 1  # within an object
    later = log.manifest.with_expiry(first, 0)
    crc = write_manifest(archive.store, later, "later")
    with pytest.raises(ObjectMissing):
        check.check_next_file()
    check.begin(RecordedArchive(first, later.last, later.chain, "later", crc))
    while check.check_next_file():
        pass
    assert (check.bad_files, check.object_count) == ([], 2)
    assert check.next_id == later.last + 1


def test_an_unreachable_store_is_an_error_and_not_a_finding(archive, monkeypatch):
    check = ArchiveCheck(archive.store, CLUSTER_KEY, PARTITION_ID, first=0)
    check.begin(archive.recorded)
    check.check_next_file()
    check.check_next_file()

    def unreachable(_name):
        raise ArchiveUnavailable("no route")

    monkeypatch.setattr(archive.store, "open", unreachable)
    with pytest.raises(ArchiveUnavailable):
        check.check_next_file()
    assert (check.bad_files, check.next_id) == ([], archive.listed[1].first)


def test_a_stopped_check_reads_no_further_file(archive, monkeypatch):
    monkeypatch.setattr(archive_check, "_COPY_BYTES", 100)
    check = ArchiveCheck(archive.store, CLUSTER_KEY, PARTITION_ID, first=0)
    check.begin(archive.recorded)
    check.check_next_file()
    check.stop()
    check.check_next_file()
    assert (check.bad_files, check.object_count, check.next_id) == ([], 0, 0)
