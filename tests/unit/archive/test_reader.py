"""A reader returns exactly the archived records of the log."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from threading import current_thread
from urllib.parse import parse_qsl, urlsplit

import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs as arrow_fs

from tests.archived_log import FIRST_COMMIT_MS, PARTITION_ID, write_archive, write_manifest
from waltz_core.archive import archive_cache
from waltz_core.archive.archive_cache import ArchiveCache
from waltz_core.archive.manifest import ManifestPage
from waltz_core.archive.object_index import ObjectIndex
from waltz_core.archive.objects import SCHEMA, ArchiveObject
from waltz_core.archive.reader import ArchiveReader
from waltz_core.archive.store import ArchiveStore
from waltz_core.errors import (
    ArchiveUnavailable,
    BadFormat,
    BadRequest,
    BeforeLogStart,
    ChecksumMismatch,
    ObjectMissing,
)

UNLIMITED_BYTES = 1 << 30
OBJECT_NAME = f"{PARTITION_ID}/objects/1.parquet"


class CountingStore(ArchiveStore):
    """Records the opened files, also those of read-ahead; a test can make it unreachable."""

    def __init__(self, url):
        super().__init__(url)
        self.opened, self.opened_ahead = [], []
        self.is_reachable = True

    def read(self, name):
        self._record_opened(name)
        return super().read(name)

    def open(self, name):
        self._record_opened(name)
        return super().open(name)

    def _record_opened(self, name):
        is_ahead = current_thread().name.startswith("archive-read-ahead")
        (self.opened_ahead if is_ahead else self.opened).append(name)
        if not self.is_reachable:
            raise ArchiveUnavailable("no route")


@pytest.fixture
def store(tmp_path):
    return CountingStore(f"file://{tmp_path}/archive")


@pytest.fixture
def cache():
    cache = ArchiveCache(UNLIMITED_BYTES)
    yield cache
    cache.close()


def reader_of(store, log, cache):
    return ArchiveReader(store, log.name, log.crc, cache)


def check(log, read, first, last, bytes_max):
    """Check that a read returned as many records as fit, and exactly the archived records."""
    count = int(read.lengths.size)
    expected = log.records[first : first + count]
    assert read.first == first
    assert read.records == b"".join(expected)
    assert read.lengths.tolist() == [len(each) for each in expected]
    assert (read.chain_before, read.entries) == log.batches(first, first + count - 1)
    assert first + count - 1 <= last
    assert count == 1 or len(read.records) <= bytes_max
    if first + count - 1 < last:
        assert len(read.records) + len(log.records[first + count]) > bytes_max


def path_of(store, name):
    return Path(store.url.removeprefix("file://")) / name


def read_all(reader, log):
    """Read the whole log in pieces."""
    pieces, next_id = [], 0
    while next_id < len(log.records):
        read = reader.read_range(next_id, len(log.records) - 1, UNLIMITED_BYTES)
        pieces.append(read.records)
        next_id += int(read.lengths.size)
    assert b"".join(pieces) == b"".join(log.records)


@pytest.mark.parametrize("rows", [1, 10, 45, 1_000])
def test_a_range_returns_the_archived_records(store, cache, rows):
    log = write_archive(store, rows=rows, page_entries=2, unused=(6, 2))
    reader = reader_of(store, log, cache)
    assert reader.first_available == 0
    assert reader.archived_end == (len(log.records) - 1, log.lineage[-1].chain)
    rng = Random(rows)
    for _ in range(100):
        first = rng.randrange(len(log.records))
        last = rng.randrange(first, len(log.records))
        bytes_max = rng.choice((1, 400, 5_000, UNLIMITED_BYTES))
        check(log, reader.read_range(first, last, bytes_max), first, last, bytes_max)


def test_a_read_within_a_row_group_ends_with_the_row_group(store, cache):
    log = write_archive(store, rows=10)  # objects of 51 records
    reader = reader_of(store, log, cache)
    rng = Random(3)
    for _ in range(100):
        first = rng.randrange(len(log.records))
        last = rng.randrange(first, len(log.records))
        read = reader.read_within_row_group(first, last)
        group_end = first + min(9 - first % 51 % 10, 50 - first % 51)
        count = min(last, group_end) - first + 1
        assert read.lengths.size == count
        assert (read.first, read.records) == (first, b"".join(log.records[first : first + count]))
        assert (read.chain_before, read.entries) == log.batches(first, first + count - 1)
    with pytest.raises(BadRequest, match="were requested, but the"):
        reader.read_within_row_group(0, len(log.records))


def test_a_reader_reads_files_on_demand_and_only_once(store, cache):
    log = write_archive(store, page_entries=2)
    reader = reader_of(store, log, cache)
    assert store.opened == []
    read_all(reader, log)
    files = sorted({*store.list_names("")})
    assert sorted(set(store.opened)) == files
    count = len(store.opened)
    read_all(reader_of(store, log, cache), log)
    assert len(store.opened) == count


def test_ids_outside_of_the_archive_are_rejected(store, cache):
    log = write_archive(store)
    name = "expired"
    crc = write_manifest(store, log.manifest.with_expiry(60, 0), name)
    reader = ArchiveReader(store, name, crc, cache)
    last = len(log.records) - 1
    with pytest.raises(
        BeforeLogStart,
        match=r"59\.\.70 were requested, but the first available "
        r"one is 60",
    ) as caught:
        reader.read_range(59, 70, 1)
    assert caught.value.first_available == reader.first_available == 60
    check(log, reader.read_range(60, 70, UNLIMITED_BYTES), 60, 70, UNLIMITED_BYTES)
    for ids in ((last, last + 1), (last + 1, last + 1), (70, 69), (-1, 70)):
        with pytest.raises(BadRequest, match=f"the last archived one is {last}"):
            reader.read_range(*ids, 1)
    assert [each.first for each in reader.objects_between(0, 60)] == [51]


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_changed_byte_of_each_column_is_found_and_named(store, cache, column):
    log = write_archive(store)
    path = path_of(store, OBJECT_NAME)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(2).column(SCHEMA.get_field_index(column))
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises((BadFormat, ChecksumMismatch), match=f"object {OBJECT_NAME}: "):
        read_all(reader_of(store, log, cache), log)


def test_a_changed_byte_is_detected_or_does_not_change_the_range(store):
    log = write_archive(store, objects=2, rows=30)
    path = path_of(store, OBJECT_NAME)
    whole = path.read_bytes()
    rng, found = Random(5), []
    for offset in rng.sample(range(len(whole)), 40):
        data = bytearray(whole)
        data[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with closing(ArchiveCache(UNLIMITED_BYTES)) as cache:
            try:
                read_all(reader_of(store, log, cache), log)
            except (BadFormat, ChecksumMismatch) as error:
                found.append(str(error))
    assert len(found) > 10
    assert [each for each in found if not each.startswith(f"archived object {OBJECT_NAME}: ")] == []


def test_a_range_ends_before_damaged_records_and_a_read_of_them_fails(store, cache):
    log = write_archive(store)
    path = path_of(store, OBJECT_NAME)
    path.write_bytes(path.read_bytes()[:-1])
    reader = reader_of(store, log, cache)
    check(log, reader.read_range(20, 50, UNLIMITED_BYTES), 20, 50, UNLIMITED_BYTES)
    assert reader.read_range(20, 60, UNLIMITED_BYTES).lengths.size == 31
    with pytest.raises(BadFormat, match=f"object {OBJECT_NAME}: "):
        reader.read_range(51, 60, 1)
    check(log, reader.read_range(102, 110, UNLIMITED_BYTES), 102, 110, UNLIMITED_BYTES)


def test_records_that_do_not_match_the_chain_are_rejected(store, cache, tmp_path):
    """The records of another valid object with the same IDs."""
    log = write_archive(store)
    other = CountingStore(f"file://{tmp_path}/other")
    write_archive(other, seed=9)
    with store.open(OBJECT_NAME) as source:
        index = ObjectIndex(ArchiveObject(source, "o"))
    with (
        other.open(OBJECT_NAME) as source,
        pytest.raises(ChecksumMismatch, match="of row group 0 do"),
    ):
        index.read_row_group(ArchiveObject(source, "o"), 0)
    path_of(store, OBJECT_NAME).write_bytes(other.read(OBJECT_NAME))
    with pytest.raises(ChecksumMismatch, match=f"archived object {OBJECT_NAME}: expected chain"):
        reader_of(store, log, cache).read_range(51, 51, 1)


def test_an_object_of_another_partition_or_range_is_rejected(store, cache):
    log = write_archive(store)
    path_of(store, OBJECT_NAME).write_bytes(
        path_of(store, f"{PARTITION_ID}/objects/2.parquet").read_bytes()
    )
    with pytest.raises(BadFormat, match=rf"object {OBJECT_NAME}: expected .* 51\), found .* 102\)"):
        reader_of(store, log, cache).read_range(51, 51, 1)


@pytest.mark.parametrize("kind", ["manifest", "page"])
def test_a_manifest_with_the_content_of_another_manifest_is_found_and_named(store, cache, kind):
    log = write_archive(store, page_entries=2)
    name = log.name if kind == "manifest" else f"{PARTITION_ID}/manifests/page"
    other = log.manifest.with_expiry(60, 0) if kind == "manifest" else ManifestPage(())
    path_of(store, name).write_bytes(other.to_bytes())
    with pytest.raises(ChecksumMismatch, match=f"manifest {name} is corrupt: expected CRC"):
        reader_of(store, log, cache).read_range(0, 0, 1)


def test_the_recorded_manifest_decides_whether_a_missing_file_has_expired(store, cache):
    """Rule 3: the object has either expired or been lost."""
    log = write_archive(store)
    stale = reader_of(store, log, cache)
    store.delete(f"{PARTITION_ID}/objects/0.parquet")
    with pytest.raises(ObjectMissing, match=r"/objects/0\.parquet, because it does not exist"):
        stale.read_range(0, 9, UNLIMITED_BYTES)
    assert stale.successor(log.name, log.crc) is None
    expired = log.manifest.with_expiry(51, 0)
    newer = stale.successor("newer", write_manifest(store, expired, "newer"))
    with pytest.raises(BeforeLogStart, match="first available one is 51"):
        newer.read_range(0, 9, UNLIMITED_BYTES)
    check(log, newer.read_range(51, 80, UNLIMITED_BYTES), 51, 80, UNLIMITED_BYTES)
    store.delete("newer")
    with pytest.raises(ObjectMissing, match="/newer, because it does not exist"):
        stale.successor("newer", 0).read_range(51, 80, UNLIMITED_BYTES)


def test_an_unreachable_store_is_not_reported_as_damage(store, cache):
    log = write_archive(store)
    reader = reader_of(store, log, cache)
    reader.read_range(0, 0, 1)
    store.is_reachable = False
    with pytest.raises(ArchiveUnavailable, match="no route"):
        reader.read_range(40, 50, 1)
    store.is_reachable = True
    check(log, reader.read_range(40, 50, UNLIMITED_BYTES), 40, 50, UNLIMITED_BYTES)


def test_threads_may_share_a_reader_and_a_small_cache(store):
    log = write_archive(store, page_entries=2)
    cache = ArchiveCache(30_000)
    reader = reader_of(store, log, cache)

    def read_some(seed):
        rng = Random(seed)
        for _ in range(25):
            first = rng.randrange(len(log.records))
            last = min(len(log.records) - 1, first + rng.randrange(30))
            check(log, reader.read_range(first, last, 5_000), first, last, 5_000)
            assert cache.byte_count <= cache.bytes_max

    with ThreadPoolExecutor(6) as threads:
        for each in [threads.submit(read_some, seed) for seed in range(6)]:
            each.result()
    cache.close()
    assert 0 < cache.byte_count <= cache.bytes_max
    files = sum(path_of(store, name).stat().st_size for name in store.list_names(""))
    assert files > cache.bytes_max


def test_sequential_reads_find_the_next_row_group_in_memory(store, monkeypatch):
    """The next row group may be the first of the next object, with its index."""
    monkeypatch.setattr(archive_cache, "READ_AHEAD_THREADS", 1)
    log = write_archive(store, rows=10)
    with closing(ArchiveCache(UNLIMITED_BYTES)) as cache:
        reader = reader_of(store, log, cache)
        reader.read_range(0, 4, UNLIMITED_BYTES)
        cache._threads.submit(int).result()  # after all read-aheads
        assert store.opened_ahead == []
        reader.read_range(5, 9, UNLIMITED_BYTES)
        count = len(store.opened)
        for first, last in ((10, 19), (20, 29), (30, 39), (40, 49), (50, 50), (51, 60)):
            cache._threads.submit(int).result()
            check(
                log, reader.read_range(first, last, UNLIMITED_BYTES), first, last, UNLIMITED_BYTES
            )
            assert len(store.opened) == count
    assert store.opened_ahead.count(OBJECT_NAME) >= 2


def test_objects_are_found_by_id_and_by_commit_time(store, cache):
    log = write_archive(store, objects=6, page_entries=3)
    reader = reader_of(store, log, cache)
    last = len(log.records) - 1
    entries = reader.objects_between(0, last)
    assert [entry.first for entry in entries] == [0, 51, 102, 153, 204, 255]
    assert all(entry.file_bytes == path_of(store, entry.name).stat().st_size for entry in entries)
    assert reader.objects_between(50, 51) == entries[:2]
    assert reader.objects_between(152, 153) == entries[2:4]
    assert reader.objects_between(300, UNLIMITED_BYTES) == entries[5:]
    assert reader.objects_between(last + 1, UNLIMITED_BYTES) == []
    assert reader.objects_between(9, 8) == []
    for time_ms in range(FIRST_COMMIT_MS - 500, FIRST_COMMIT_MS + 7_000, 500):
        older = [entry.last for entry in log.lineage if 0 < entry.stamp_ms < time_ms]
        assert reader.last_committed_before(time_ms) == max(older, default=-1)
    crc = write_manifest(store, log.manifest.with_expiry(60, 0), "expired")
    assert ArchiveReader(store, "expired", crc, cache).last_committed_before(FIRST_COMMIT_MS) == 59


@pytest.fixture
def bucket(monkeypatch):
    """The URL of a bucket in a server that imitates S3."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1"}
    files = arrow_fs.S3FileSystem(**options, allow_bucket_creation=True)
    files.create_dir("archive")
    yield "s3://archive/prefix?" + "&".join(f"{key}={value}" for key, value in options.items())
    server.stop()


def test_an_archive_in_s3_is_written_and_read_and_its_faults_are_reported(bucket, cache):
    store = ArchiveStore(bucket)
    log = write_archive(store, page_entries=2)
    reader = reader_of(store, log, cache)
    read_all(reader, log)
    check(log, reader.read_range(30, 130, 9_000), 30, 130, 9_000)
    whole = store.read(OBJECT_NAME)
    store.write(OBJECT_NAME, whole[:-100])
    with (
        closing(ArchiveCache(UNLIMITED_BYTES)) as fresh,
        pytest.raises(BadFormat, match=f"object {OBJECT_NAME}: "),
    ):
        reader_of(store, log, fresh).read_range(51, 60, 1)
    store.delete(OBJECT_NAME)
    with (
        closing(ArchiveCache(UNLIMITED_BYTES)) as fresh,
        pytest.raises(ObjectMissing, match=OBJECT_NAME),
    ):
        reader_of(store, log, fresh).read_range(51, 60, 1)


def test_the_documented_snippets_read_objects_in_s3(bucket, monkeypatch):
    """With the documented variables; the fixture sets the credentials."""
    server = dict(parse_qsl(urlsplit(bucket).query))["endpoint_override"]
    variables = {"AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    variables["AWS_ENDPOINT_URL"] = f"http://{server}"
    page = Path("docs/archive-objects.md").read_text(encoding="utf-8")
    for name, value in variables.items():
        assert name in page
        monkeypatch.setenv(name, value)
    log = write_archive(ArchiveStore(bucket))
    base = bucket.partition("?")[0]
    names = {
        "status": {"archive": bucket},
        "objects": [
            {"name": entry.name, "url": f"{base}/{entry.name}", "first": 1, "last": entry.last}
            for entry in log.manifest.newest_objects
        ],
    }
    for library in ("pyarrow", "Polars"):
        snippet = rf"^## {library}\n\n```python\n(.*?)^```$"
        (text,) = re.findall(snippet, page, re.MULTILINE | re.DOTALL)
        exec(text, names)
    assert names["table"].column("transaction_id").to_pylist() == list(
        range(1, log.manifest.last + 1)
    )
    assert names["payloads"].columns == ["data"]
