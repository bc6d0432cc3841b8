"""An upload that fails at any operation adds only garbage to the archive."""

from contextlib import contextmanager

import pytest

from tests.unit.archive.test_upload import CLUSTER, KEY, job_after, read_manifest
from waltz_core.archive import manifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.archive.upload import upload
from waltz_core.errors import ArchiveUnavailable, WaltzError


class Crash(BaseException):
    """A simulated crash of the process."""


class FailingStore(ArchiveStore):
    """A store that raises an error before or after its operation number `fails_at`."""

    def __init__(self, url):
        super().__init__(url)
        self.operations = []
        self.fails_at = -1
        self.is_after = False
        self.kind = ArchiveUnavailable

    def fail_next(self, number, *, is_after, kind=ArchiveUnavailable):
        self.operations, self.fails_at, self.is_after, self.kind = [], number, is_after, kind

    def _fail_if_chosen(self, operation, name, *, is_after):
        if not is_after:
            self.operations.append((operation, name))
        if (len(self.operations) - 1, is_after) == (self.fails_at, self.is_after):
            raise self.kind(f"archive: cannot {operation} {name}")

    def read(self, name):
        self._fail_if_chosen("read", name, is_after=False)
        data = super().read(name)
        self._fail_if_chosen("read", name, is_after=True)
        return data

    @contextmanager
    def open_sink(self, name):
        self._fail_if_chosen("write", name, is_after=False)
        with super().open_sink(name) as sink:
            yield sink
        self._fail_if_chosen("write", name, is_after=True)


class FlippingStore(ArchiveStore):
    """A store that flips bit `flipped` of each object that it reads."""

    flipped = None

    def read(self, name):
        data = bytearray(super().read(name))
        if self.flipped is not None and name.endswith(".parquet"):
            data[self.flipped] ^= 1 << self.flipped % 8
        return bytes(data)


# The present manifest is read, and three files are written and read back.
OPERATIONS = ["read", "write", "read", "write", "read", "write", "read"]


@pytest.fixture
def archived(tmp_path, monkeypatch):
    """Return a store and the manifest of its four objects; the next object needs a page."""
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    store = FailingStore(f"file://{tmp_path}")
    uploaded = None
    for attempt in range(4):
        uploaded = upload(store, KEY, job_after(uploaded, attempt=attempt))
    return store, uploaded


def files_of(store):
    return {name: ArchiveStore.read(store, name) for name in store.list_names(CLUSTER)}


def test_an_upload_reads_back_each_file_that_it_writes(archived):
    store, new_manifest = archived
    store.fail_next(-1, is_after=False)
    upload(store, KEY, job_after(new_manifest, attempt=9))
    assert [operation for operation, _ in store.operations] == OPERATIONS
    assert [name.rsplit("/")[-2] for _, name in store.operations[1::2]] == [
        "objects",
        "manifests",
        "manifests",
    ]
    assert [name for _, name in store.operations[1::2]] == [
        name for _, name in store.operations[2::2]
    ]


@pytest.mark.parametrize("kind", [ArchiveUnavailable, Crash])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_after_a_failure_or_a_crash_the_next_attempt_continues(archived, number, is_after, kind):
    store, new_manifest = archived
    before = files_of(store)
    store.fail_next(number, is_after=is_after, kind=kind)
    with pytest.raises(kind, match=f"cannot {OPERATIONS[number]} {CLUSTER}/3/"):
        upload(store, KEY, job_after(new_manifest, attempt=9))
    garbage = files_of(store)
    assert before.items() <= garbage.items()
    assert len(garbage) - len(before) == (number + is_after) // 2, "files of the failed attempt"
    store.fail_next(-1, is_after=False)
    after = upload(store, KEY, job_after(new_manifest, attempt=10))
    manifest = read_manifest(store, after)
    assert [entry.first for entry in manifest.newest_objects] == [20, 30, 40]
    listed = [each.name for each in (*manifest.pages, *manifest.newest_objects)]
    assert after.name not in garbage
    assert not [name for name in listed if name in garbage and name not in before]
    assert garbage.items() <= files_of(store).items(), "nothing is overwritten or deleted"


def test_a_flipped_bit_anywhere_in_an_object_is_found(tmp_path):
    store = FlippingStore(f"file://{tmp_path}")
    upload(store, KEY, job_after())
    (name,) = [each for each in store.list_names(CLUSTER) if each.endswith(".parquet")]
    size = len(store.read(name))
    offsets = [*range(0, size, 61), size - 1]
    for attempt, offset in enumerate(offsets, 2):
        store.flipped = offset
        with pytest.raises(WaltzError, match=f"object {CLUSTER}/3/objects/0-9-9-.*-{attempt}.parq"):
            upload(store, KEY, job_after(attempt=attempt))
    assert len([each for each in store.list_names(CLUSTER) if "manifests" in each]) == 1
