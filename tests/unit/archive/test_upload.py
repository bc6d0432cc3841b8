"""An upload adds one verified object to a manifest, or fails and names the file."""

from itertools import pairwise

import pytest

from tests.unit.storage.logs import make_batches
from waltz_core.archive import manifest
from waltz_core.archive.manifest import Manifest, ManifestPage
from waltz_core.archive.manifest_jobs import BatchRun, UploadJob
from waltz_core.archive.objects import ArchiveObject
from waltz_core.archive.store import ArchiveStore, RateLimit
from waltz_core.archive.upload import upload
from waltz_core.errors import ArchiveUnavailable, BadFormat, ChecksumMismatch, WaltzError
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN

KEY = bytes(range(16))
NONCE = bytes(16)
CLUSTER = "00010203-0405-0607-0809-0a0b0c0d0e0f"


class CorruptingStore(ArchiveStore):
    """Returns changed bytes for the files whose names contain `wrong`."""

    wrong = "?"

    def read(self, name):
        data = super().read(name)
        middle = len(data) // 2
        if self.wrong in name:
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data


@pytest.fixture
def store(tmp_path):
    return CorruptingStore(f"file://{tmp_path}")


def job_after(previous=None, *, attempt=1, counts=(2, 3), **changes):
    """Return a job that uploads two runs of batches after the `previous` manifest."""
    first, chain, _, name, file_crc = 0, GENESIS_CHAIN, 0, "", 0
    if previous is not None:
        first, chain, _, name, file_crc = previous.last + 1, *previous[1:]
    runs, next_id, last_chain = [], first, chain
    for _ in range(2):
        records, lengths, entries = make_batches(next_id, counts, last_chain)
        runs.append(BatchRun(records, lengths, entries))
        next_id, last_chain = entries[-1].last + 1, entries[-1].chain
    values = {
        "partition_id": 3,
        "session_id": 9,
        "nonce": NONCE,
        "attempt": attempt,
        "first": first,
        "chain_before": chain,
        "manifest": name,
        "manifest_crc": file_crc,
        "runs": tuple(runs),
    }
    return UploadJob(**values | changes)


def read_manifest(store, new_manifest):
    data = store.read(new_manifest.name)
    assert crc32(data) == new_manifest.file_crc
    return Manifest.from_bytes(data, new_manifest.name)


def test_consecutive_uploads_archive_the_whole_log(store):
    one = job_after()
    first = upload(store, KEY, one)
    two = job_after(first, attempt=2)
    second = upload(store, KEY, two)
    manifest = read_manifest(store, second)
    assert (manifest.version, manifest.last, manifest.chain) == (2, 19, two.end.chain)
    assert (second.last, second.chain) == (manifest.last, manifest.chain)
    assert [each.first for each in manifest.newest_objects] == [0, 10]
    for entry, job in zip(manifest.newest_objects, (one, two), strict=True):
        data = store.read(entry.name)
        assert (entry.file_bytes, entry.file_crc) == (len(data), crc32(data))
        assert entry.commit_ms_min == entry.commit_ms_max == 5
        with store.open(entry.name) as source:
            read = ArchiveObject(source, entry.name)
            whole = b"".join(
                bytes(read.read_row_group(number).records) for number in range(read.group_count)
            )
            assert whole == b"".join(bytes(run.records) for run in job.runs)
            assert [each.last for each in read.verify()] == [
                batch.last for run in job.runs for batch in run.batches
            ]
    assert store.list_names(CLUSTER) == [
        f"{CLUSTER}/3/manifests/1-9-{NONCE.hex()}-1.json",
        f"{CLUSTER}/3/manifests/2-9-{NONCE.hex()}-2.json",
        f"{CLUSTER}/3/objects/0-9-9-{NONCE.hex()}-1.parquet",
        f"{CLUSTER}/3/objects/10-19-9-{NONCE.hex()}-2.parquet",
    ]


def test_entries_of_old_objects_move_to_a_page(store, monkeypatch):
    monkeypatch.setattr(manifest, "ENTRIES_PER_PAGE", 2)
    uploaded = None
    for attempt in range(5):
        uploaded = upload(store, KEY, job_after(uploaded, attempt=attempt))
    found = read_manifest(store, uploaded)
    (page,) = found.pages
    assert len(found.newest_objects) == 3
    entries = ManifestPage.from_bytes(store.read(page.name), page.name).entries
    assert [each.first for each in (*entries, *found.newest_objects)] == [0, 10, 20, 30, 40]


def test_nothing_is_overwritten(store):
    upload(store, KEY, job_after())
    before = {name: store.read(name) for name in store.list_names(CLUSTER)}
    with pytest.raises(ArchiveUnavailable, match=r"cannot write .*0-9-9-.*parquet: File exists"):
        upload(store, KEY, job_after())
    assert {name: store.read(name) for name in store.list_names(CLUSTER)} == before


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        (
            {"first": 11},
            BadFormat,
            "up to transaction 10 with chain hash .*, found partition 3 .* up to transaction 9",
        ),
        ({"chain_before": NONCE}, BadFormat, "with chain hash 0{32}, found"),
        ({"partition_id": 4}, BadFormat, "expected partition 4 .* found partition 3"),
        ({"manifest_crc": 1}, ChecksumMismatch, "1-9-.*json is corrupt: expected CRC 00000001"),
        ({"manifest": "x/y"}, ArchiveUnavailable, "archive: cannot read .*x/y, because folder"),
        (
            {"manifest": ""},
            BadFormat,
            (
                r"\(none\) is not the one that ZooKeeper records: expected partition 3 of "
                r"cluster \w+ up to transaction 9"
            ),
        ),
    ],
)
def test_a_manifest_that_does_not_end_before_the_range_is_rejected(store, changes, error, reason):
    uploaded = upload(store, KEY, job_after())
    before = store.list_names(CLUSTER)
    with pytest.raises(error, match=reason):
        upload(store, KEY, job_after(uploaded, attempt=2, **changes))
    assert store.list_names(CLUSTER) == before


@pytest.mark.parametrize("wrong", [".parquet", "1-9-"])
def test_the_error_names_a_file_that_reads_back_differently(store, wrong):
    store.wrong = wrong
    with pytest.raises(WaltzError, match=r"0-9-9|1-9-"):
        upload(store, KEY, job_after())


def test_records_of_another_log_are_found(store):
    job = job_after()
    entries = list(job.runs[0].batches)
    entries[0] = entries[0]._replace(stamp_ms=6, chain=NONCE)
    wrong = (job.runs[0]._replace(batches=entries), job.runs[1])
    with pytest.raises(
        ChecksumMismatch, match=r"0-9-9.*: its batches differ from those of the log"
    ):
        upload(store, KEY, job_after(runs=wrong))
    assert not [name for name in store.list_names(CLUSTER) if "manifests" in name]


def test_the_error_of_a_store_names_the_failed_operation(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ArchiveUnavailable, match=r"cannot write .*objects/0-9-9"):
        upload(ArchiveStore(f"file://{tmp_path}/file"), KEY, job_after())


class FakeTime:
    """A clock that advances only in `sleep`."""

    def __init__(self):
        self.now_s = 0.0

    def clock_s(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


def test_an_upload_runs_at_its_rate_limit(tmp_path):
    time, waits_s = FakeTime(), []
    limit = RateLimit(
        1_000, lambda: waits_s.append(time.now_s), clock_s=time.clock_s, sleep=time.sleep
    )
    store = ArchiveStore(f"file://{tmp_path}", limit)
    uploaded = upload(store, KEY, job_after())
    assert uploaded.last == read_manifest(ArchiveStore(store.url), uploaded).last
    written_bytes = sum(file.byte_count for file in store.list_files(""))
    last = (tmp_path / uploaded.name).stat().st_size
    assert time.now_s * 1_000 == pytest.approx(2 * written_bytes - last), (
        "all reads except the last one wait"
    )
    gaps = [later - earlier for earlier, later in pairwise([0.0, *waits_s])]
    assert max(gaps) <= 1.0, "each wait is reported"
